"""What the processes of ``test_owners`` do: train models that are divided over them, and say where they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.sharding import local
from tests import forked
from tests.zoo import opaque

D = torch.float64
STEPS, HALF, TIMEOUT, N = 6, 4, 20, 12


class Net(nn.Module):
    """Shards of unequal size and without rows, a convolution, a normalisation, matrices without a rule, or frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(13, 7), nn.Linear(7, 7, bias=False)
        self.conv, self.second = nn.Conv1d(7, 5, 3, padding=1), nn.Linear(5, 5)
        self.norm, self.third = nn.LayerNorm(5), nn.Linear(5, 7)
        self.dark = nn.Parameter(torch.empty(7, 7))
        self.one, self.frozen, self.head = nn.Linear(7, 1), nn.Linear(7, 7), nn.Linear(7, 13, bias=False)
        _fill(self)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n r 13]."""
        h = self.conv(self.first(self.words(x)).mT).mT.tanh()
        h = self.third(torch.tanh(self.norm(self.second(h))))
        h = self.frozen(opaque(h, self.dark)) + self.one(h)
        y: Tensor = self.head(h)
        return y


class Small(nn.Module):
    """Fewer features than a batch has examples: no factor has a null space, whose basis rounding would choose."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(3, 4), nn.Linear(4, 1), nn.Linear(4, 13)
        _fill(self)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n r 13]."""
        angles = torch.tensor([1.0, 1.7, 2.9], dtype=D)
        h = torch.tanh(self.first(torch.sin(x.unsqueeze(-1) * angles + x.roll(1, 1).unsqueeze(-1) / angles)))
        y: Tensor = self.third(h) + self.second(h) * torch.linspace(-1, 1, 13, dtype=D)
        return y


class Lame(Small):
    """One feature is zero, and so is a row of one factor."""

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n r 13]."""
        h = torch.sin(torch.stack([x + 1.0, 1.7 * x, 0.0 * x], -1).to(D))
        y: Tensor = self.third(torch.tanh(self.first(h)))
        return y + self.second(torch.tanh(self.first(h))) * torch.linspace(-1, 1, 13, dtype=D)


def _fill(model: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=D) / p[0].numel() ** 0.5


def _exact() -> Any:
    return ng.Fisher(ng.Categorical(axis=-1), reduction="mean")


SCHEDULE: dict[str, Any] = {"lr": 0.05, "metric_every": 2, "inverse_every": 3}
Make = Callable[..., Any]
MAKES: dict[str, tuple[type[nn.Module], Make]] = {
    "kfac": (Net, lambda m, **more: ng.KFAC(m, _exact(), **SCHEDULE, **more)),
    "small": (Small, lambda m, **more: ng.KFAC(m, _exact(), fallback="adamw", **SCHEDULE, **more)),
    "singular": (Lame, lambda m, **more: ng.KFAC(m, ng.Euclidean(), damping=0.0, **SCHEDULE, **more)),
    "ekfac": (Small, lambda m, **more: ng.EKFAC(m, _exact(), damping=0.1, **SCHEDULE, **more)),
    "sobolev": (
        Small,
        lambda m, **more: ng.SobolevKFAC(m, _exact(), features=lambda x: x.to(D), lengthscale=2.0, **SCHEDULE, **more),
    ),
    "relative": (
        Net,
        lambda m, **more: ng.KFAC(m, _exact(), damping=ng.Relative(0.1), **SCHEDULE, **more),
    ),
    "loss": (
        Net,
        lambda m, **more: ng.KFAC(m, ng.metric_of(nn.CrossEntropyLoss()), **SCHEDULE, **more),
    ),
    "adamw": (
        Net,
        lambda m, **more: ng.KFAC(m, _exact(), fallback="adamw", momentum_on="gradients", **SCHEDULE, **more),
    ),
    "groups": (
        Net,
        lambda m, **more: ng.KFAC(
            m,
            _exact(),
            solver=ng.Cholesky(),
            weight_decay=0.1,
            groups=[{"params": [getattr(m, "module", m).second.weight], "lr": 0.02}],
            **SCHEDULE,
            **more,
        ),
    ),
}
ALL, FEW = ("kfac", "ekfac", "sobolev"), ("kfac", "ekfac", "sobolev", "loss", "relative", "adamw", "groups")
CASES: dict[int, dict[str, tuple[str, ...]]] = {
    2: {"fsdp": FEW, "ddp": (*ALL, "relative")},
    4: {"fsdp": ALL, "hsdp": ALL, "half": ("kfac",)},
}
SAVED = ("small", "ekfac")
CUTS = {1: [0, N], 2: [0, 7, N], 4: [0, 2, 5, 9, N]}  # rows of unequal size


def build(name: str, layout: str) -> Any:
    """The model of a case, alone or divided."""
    model = MAKES[name][0]()
    if not layout:
        return model
    if layout in ("ddp", "half"):
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("replicas", "shards")) if layout == "hsdp" else ((world,), ("shards",))
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    fully_shard(model.get_submodule("first"), mesh=mesh)
    fully_shard(model.get_submodule("third"), mesh=mesh, reshard_after_forward=False)
    return fully_shard(model, mesh=mesh)


def make(name: str, model: Any, layout: str) -> Any:
    """Its optimizer; with ``DistributedDataParallel`` a layer has one owner, or half of the processes."""
    owners: dict[str, Any] = {"ddp": "one", "half": 0.5}
    return MAKES[name][1](model, owners=owners.get(layout))


def pieces(name: str, world: int, rank: int) -> list[tuple[int, int]]:
    """The rows of the two micro-batches of a process; the first one would choose the basis of EK-FAC alone."""
    start, stop = CUTS[world][rank : rank + 2]
    half = (start + stop) // 2
    return [(start, stop)] if name == "ekfac" else [(start, half), (half, stop)]


def backward(model: Any, step: int, parts: list[tuple[int, int]]) -> None:
    """Clipped gradients of some micro-batches; FSDP and DDP reduce them after the last."""
    x = torch.randint(13, (N, 6), generator=torch.Generator().manual_seed(step))
    world = dist.get_world_size() if dist.is_initialized() else 1
    for at, (start, stop) in enumerate(parts):
        for m in model.modules():
            if hasattr(m, "set_requires_gradient_sync"):
                m.set_requires_gradient_sync(at == len(parts) - 1, recurse=False)
        waits = isinstance(model, DistributedDataParallel) and at < len(parts) - 1
        with model.no_sync() if waits else nullcontext():
            part, y = x[start:stop], model(x[start:stop])
            loss = F.cross_entropy(y.flatten(0, 1), part.roll(-1, 1).flatten(), reduction="sum")
            (loss * world / x.numel()).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def train(model: Any, opt: Any, steps: range, parts: list[tuple[int, int]]) -> Tensor:
    """θ after some steps."""
    for step in steps:
        opt.zero_grad()
        backward(model, step, parts)
        opt.step()
    return torch.cat([whole(p).flatten() for p in model.parameters()])


def whole(t: Tensor) -> Tensor:
    """A copy of all of a tensor."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def joint(name: str, world: int) -> tuple[Any, Any, list[tuple[int, int]]]:
    """One process with the joint batch; with a coupled metric in as many micro-batches."""
    model = build(name, "")
    parts = [part for rank in range(world) for part in pieces(name, world, rank)]
    return model, make(name, model, ""), parts if name == "sobolev" else [(0, N)]


@contextmanager
def counted(sent: dict[str, int]) -> Iterator[None]:
    """Count the bytes that this process gives to others, by the function of torch.distributed."""
    originals = {name: getattr(dist, name) for name in ("all_to_all_single", "all_reduce", "broadcast", "all_gather")}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "all_to_all_single":
                _, given, _, sizes = args
                number = sum(sizes) - sizes[dist.get_rank(kwargs["group"])]
                sent[name] = sent.get(name, 0) + number * given.element_size()
            else:
                sent[name] = sent.get(name, 0) + sum(t.nbytes for t in args if isinstance(t, Tensor))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, wrapped(name))
    yield
    for name, original in originals.items():
        setattr(dist, name, original)


def measured(model: Any, opt: Any, parts: list[tuple[int, int]]) -> dict[str, Any]:
    """What travels in a step with an estimate, in one with an inverse, and in another; and what this process keeps."""
    found: dict[str, Any] = {}
    for step, what in ((STEPS, "estimate and inverse"), (STEPS + 1, "step"), (STEPS + 2, "estimate")):
        opt.zero_grad()
        backward(model, step, parts)
        sent: dict[str, int] = {}
        with counted(sent):
            opt.step()
        found[what] = sent
    average, inverse = opt.tracker.average, opt.preconditioner.inverse
    found["kept"] = sum(t.numel() for of in (average, inverse) for t in of.tensors().values())
    return found


def flat(state: Any) -> dict[Any, Tensor]:
    """All tensors of a state."""
    out = {}
    for key, of_param in state["state"].items():
        for what, t in {**of_param, **of_param["natgrad"]}.items():
            if isinstance(t, Tensor) and what not in ("generator", "rank"):  # every process has its own
                out[key, what] = t
    return out


def resumed(folder: Path, saved: str, layout: str, name: str) -> tuple[Any, Any]:
    """A fresh model and a fresh optimizer, from a checkpoint of two processes."""
    model = build(name, layout)
    opt = make(name, model, layout)
    model_state, state = get_state_dict(model, opt)
    places: dict[str, Any] = {"model": model_state, "optimizer": state}
    load(places, checkpoint_id=folder / f"{saved}.{name}")
    set_state_dict(model, opt, model_state_dict=places["model"], optim_state_dict=places["optimizer"])
    return model, opt


def faults(layout: str, rank: int) -> dict[Any, Any]:
    """What is said where one of two processes fails, and whether that changed something; then θ, and θ without it."""
    found: dict[Any, Any] = {}
    model, twin = (build("small", layout) for _ in range(2))
    opt, other = make("small", model, layout), make("small", twin, layout)
    for each, its in ((model, opt), (twin, other)):
        train(each, its, range(2), pieces("small", 2, rank))
    for what in ("input", "empty", "gradient", "refresh"):
        before = {key: whole(t) for key, t in flat(opt.state_dict()).items()}, _places(model)
        opt.zero_grad()
        fails = rank == 1
        x = torch.randint(13, (3, 6)).to(D)
        x = x[:0] if fails and what == "empty" else x * torch.nan if fails and what == "input" else x
        if what == "refresh":
            opt.refresh(x * torch.nan if fails else x)
        (model(x).sum() * 0 if what == "gradient" else model(x).sum()).backward()
        if fails and what == "gradient":
            next(t for p in model.parameters() if (t := local(p.grad)).numel()).fill_(torch.nan)
        if what == "gradient" and layout == "ddp":  # DDP would have given it to all
            for p in model.parameters():
                dist.all_reduce(p.grad)
        found[what] = message(opt.step)
        after = {key: whole(t) for key, t in flat(opt.state_dict()).items()}, _places(model)
        same = before[0].keys() == after[0].keys() and all(
            torch.equal(t, after[0][key]) for key, t in before[0].items()
        )
        found[what, "same"] = same and torch.equal(before[1], after[1])
    found["end"] = [
        train(each, its, range(2, STEPS), pieces("small", 2, rank)) for each, its in ((model, opt), (twin, other))
    ]
    lame = build("singular", layout)
    its, before_it = make("singular", lame, layout), _places(lame)
    found["singular"] = message(lambda: train(lame, its, range(1), pieces("singular", 2, rank)))
    found["singular", "same"] = torch.equal(before_it, _places(lame))
    return found


def _places(model: Any) -> Tensor:
    return torch.cat([whole(p).flatten() for p in model.parameters()])


def message(make: Callable[[], object]) -> str:
    """What is raised."""
    try:
        make()
    except (ng.errors.NatgradError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def death(folder: Path, rank: int) -> None:
    """One of two processes dies between its backward pass and its step: how many seconds the other waits."""
    model, opt = resumed(folder, "fsdp", "fsdp", "small")
    backward(model, HALF, pieces("small", 2, rank))
    if rank == 0:
        start, said = time.monotonic(), ""
        try:
            opt.step()
        except RuntimeError as error:
            said = str(error)
        torch.save((said, time.monotonic() - start), folder / "death.pt")
    os._exit(0)


def main(folder: Path, rank: int, world: int) -> None:
    """Every optimizer in every layout."""
    where, patience = f"file://{folder}/store{world}", timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=where, timeout=patience, rank=rank, world_size=world)
    found: dict[Any, Any] = {}
    for layout, names in CASES[world].items():
        for name in names:
            model = build(name, layout)
            opt = make(name, model, layout)
            found[layout, name] = train(model, opt, range(STEPS), pieces(name, world, rank))
            if name == "kfac":
                found["measured", layout] = measured(model, opt, pieces(name, world, rank))
        for name in SAVED if world == 2 else ():
            model, parts = build(name, layout), pieces(name, world, rank)
            opt = make(name, model, layout)
            train(model, opt, range(HALF), parts)
            found["state", layout, name] = {key: whole(t) for key, t in flat(opt.state_dict()).items()}
            model_state, state = get_state_dict(model, opt)
            save({"model": model_state, "optimizer": state}, checkpoint_id=folder / f"{layout}.{name}")
            found["after", layout, name] = train(model, opt, range(HALF, STEPS), parts)
    for layout in ("fsdp", "ddp") if world == 2 else ("fsdp", "hsdp"):
        for name in SAVED:
            model, opt = resumed(folder, "fsdp", layout, name)
            found["went on", layout, name] = train(model, opt, range(HALF, STEPS), pieces(name, world, rank))
    for layout in ("fsdp", "ddp") if world == 2 else ():
        found["faults", layout] = faults(layout, rank)
    torch.save(found, folder / f"{world}.{rank}.pt")
    if world == 2:
        death(folder, rank)
    dist.destroy_process_group()


if __name__ == "__main__":
    forked.run(main, CASES)
