"""What the processes of ``test_shards`` do: train models that are divided over them, and say where they end."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import natgrad as ng
from natgrad.gradients import shards
from tests import forked

D = torch.float64
MAKES: dict[str, Callable[[Any], Any]] = {
    "natural": lambda model: ng.Natural(model, lr=0.01, iteration="minimax"),
    "muon": lambda model: ng.Muon(model, lr=0.01, iteration="minimax", nesterov=False),
    "shampoo": lambda model: ng.Shampoo(model, lr=0.01, fit="kl"),
    "soap": lambda model: ng.SOAP(model, lr=0.01, damping=ng.Relative(0.1)),
}
LAYOUTS = {2: ("fsdp", "tp", "experts", "ddp"), 4: ("fsdp", "hsdp", "fsdp_tp", "halves")}
STEPS, AFTER, TIMEOUT = 5, 3, 20


class Net(nn.Module):
    """Shards of unequal size and without rows, a tied weight, a stack of experts, a convolution, a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.words, self.first = nn.Embedding(13, 7), nn.Linear(7, 7, bias=False)
        self.conv, self.second = nn.Conv1d(7, 5, 3, padding=1), nn.Linear(5, 5)
        self.norm, self.third = nn.LayerNorm(5), nn.Linear(5, 7)
        self.experts = nn.Parameter(torch.empty(3, 7, 7))
        self.one = nn.Linear(7, 1)
        self.frozen, self.head = nn.Linear(7, 7), nn.Linear(7, 13, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=D) / p[0].numel() ** 0.5
        self.head.weight = self.words.weight
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n·r 13]."""
        h = self.conv(self.first(self.words(x)).mT).mT.tanh()
        h = self.third(torch.tanh(self.norm(self.second(h))))
        h = h + torch.einsum("nri,eio->nro", h, self.experts) / 3
        h = self.frozen(h) + self.one(h)
        return self.head(h).flatten(0, 1)


class Pair(nn.Module):
    """Two linear layers and, between them, experts, for tensor and expert parallelism."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(13, 6, bias=False), nn.Linear(6, 13, bias=False)
        self.experts = nn.Parameter(torch.empty(experts, 6, 6)) if experts else None
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n·r 13]."""
        one_hot = F.one_hot(x, 13).to(D)
        if self.experts is None:
            return self.down(torch.tanh(self.up(one_hot))).flatten(0, 1)
        if isinstance(self.experts, DTensor):
            mesh = self.experts.device_mesh
            one_hot = DTensor.from_local(one_hot, mesh, [Replicate()])
        h = torch.tanh(self.up(one_hot.flatten(0, 1)))
        h = torch.bmm(h.expand(len(self.experts), *h.shape), self.experts).sum(0)
        y = self.down(torch.tanh(h))
        return y.full_tensor() if isinstance(y, DTensor) else y


def build(layout: str, divided: bool) -> nn.Module:
    """The model, alone or divided."""
    if layout in ("fsdp", "hsdp", "ddp", "halves"):
        return _divide(Net(), layout) if divided else Net()
    model: Any = Pair(4 if layout == "experts" else 0)
    if not divided:
        return model
    if layout == "experts":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for module in (model.up, model.down):
            module.weight = nn.Parameter(distribute_tensor(module.weight.data, mesh, [Replicate()]))
        model.experts = nn.Parameter(distribute_tensor(model.experts.data, mesh, [Shard(0)]))
        return model
    shape = (dist.get_world_size() // 2, 2)
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("data", "tensor"))
    parallelize_module(model, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["data"]) if layout == "fsdp_tp" else model


def _divide(model: Any, layout: str) -> Any:
    if layout == "ddp":
        return DistributedDataParallel(model)
    world = dist.get_world_size()
    shape, names = ((2, world // 2), ("replicas", "shards")) if layout == "hsdp" else ((world,), ("shards",))
    if layout == "halves":  # stages of a pipeline have meshes of their own
        mesh = init_device_mesh("cpu", (2, world // 2, 1), mesh_dim_names=("half", "replicas", "shards"))
        mesh = mesh["replicas", "shards"]
    else:
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    for name in ("first", "second", "third"):
        fully_shard(model.get_submodule(name), mesh=mesh)
    return fully_shard(model, mesh=mesh)


def rows(layout: str) -> slice:
    """The rows of a batch that a process sees."""
    if not dist.is_initialized() or layout in ("tp", "experts"):
        return slice(None)
    rank, world = dist.get_rank(), dist.get_world_size()
    if layout in ("fsdp_tp", "halves"):
        rank, world = rank // 2 if layout == "fsdp_tp" else rank % 2, world // 2
    return slice(rank * 8 // world, (rank + 1) * 8 // world)


def backward(model: nn.Module, step: int, mine: slice) -> None:
    """Clipped gradients of two micro-batches."""
    x = torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step))
    for part in x[mine].chunk(2):
        (F.cross_entropy(model(part), part.roll(-1, 1).flatten()) / 2).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)


def train(model: nn.Module, opt: Any, steps: range, layout: str) -> Tensor:
    """θ after some steps."""
    for step in steps:
        opt.zero_grad()
        backward(model, step, rows(layout))
        opt.step()
    return torch.cat([whole(p).flatten() for p in model.parameters()])


def whole(t: Tensor) -> Tensor:
    """A copy of all of a tensor."""
    return (t.full_tensor() if isinstance(t, DTensor) else t).detach().clone()


def state_of(opt: Any) -> dict[Any, Tensor]:
    """All tensors of the state, as a checkpoint would have them."""
    state = opt.state_dict()["state"]
    return {(key, what): whole(t) for key, of_param in state.items() for what, t in of_param.items()}


@contextmanager
def counted(bytes_out: list[int], reduced: list[int]) -> Iterator[None]:
    """Count the bytes that this process gives to others, and what is reduced, by any function of torch.distributed."""
    originals = {name: getattr(dist, name) for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce_"))}

    def wrapped(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if name == "all_to_all_single":
                _, sent, _, sizes = args
                others = sum(sizes) - sizes[dist.get_rank(kwargs["group"])]
                bytes_out.append(others * sent.element_size())
            else:
                reduced.append(sum(t.numel() for t in args if isinstance(t, Tensor)))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, wrapped(name))
    yield
    for name, original in originals.items():
        setattr(dist, name, original)


def measured(model: nn.Module, opt: Any, layout: str) -> dict[str, float]:
    """Of one step: bytes out, against those of all matrices; numbers of the state, and the largest that is allowed."""
    opt.zero_grad()
    backward(model, 99, rows(layout))
    sent, reduced = list[int](), list[int]()
    with counted(sent, reduced):
        opt.step()
    params = dict(zip([a.name for a in opt.plan().assignments], opt.param_groups[0]["params"], strict=True))
    matrices = [params[a.name] for a in opt.plan().assignments if a.is_matrix]
    whole_state = state_of(opt)
    numbers = [opt.plan().assignments.index(a) for a in opt.plan().assignments if a.is_matrix]
    sizes = [sum(t.numel() for (key, _), t in whole_state.items() if key == number) for number in numbers]
    kept = sum(t.numel() for p in matrices for t in opt.state[p].values())
    return {
        "sent": sum(sent) / sum(8 * p.numel() for p in matrices),
        "reduced": sum(reduced) / len(matrices),
        "kept": kept,
        "state": sum(sizes),
        "allowed": 1.2 * sum(sizes) / (2 if layout == "halves" else dist.get_world_size()) + max(sizes),
    }


def resumed(folder: Path, layout: str, name: str) -> tuple[nn.Module, Any]:
    """A fresh model and its optimizer, from the checkpoint."""
    model = build(layout, divided=dist.is_initialized())
    opt = MAKES[name](model)
    model_state, state = get_state_dict(model, opt)
    saved: dict[str, Any] = {"model": model_state, "optimizer": state}
    load(saved, checkpoint_id=folder / name)
    set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return model, opt


def faults(folder: Path) -> dict[Any, Any]:
    """NaN in a process; a process that dies before it steps."""
    found: dict[Any, Any] = {}
    rank, model = dist.get_rank(), build("fsdp", divided=True)
    opt = ng.Natural(model)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    if rank == 1:
        grads: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        next(g.to_local() for g in grads if g.to_local().numel())[0] = torch.nan
    before = train(model, opt, range(0), "fsdp")
    try:
        opt.step()
        found["nan"] = "nothing"
    except ng.errors.NonFiniteError as error:
        found["nan"] = str(error), bool(torch.equal(train(model, opt, range(0), "fsdp"), before))
    ddp: Any = build("ddp", divided=True)
    opt = ng.Natural(ddp)
    with pytest.raises(ng.errors.IncompatibleError, match="leave out join"), ddp.join():
        train(ddp, opt, range(1), "ddp")
    model, opt = resumed(folder, "fsdp", "natural")
    backward(model, STEPS, rows("fsdp"))
    if rank == 1:
        torch.save(found, folder / f"2.{rank}.faults.pt")
        os._exit(0)
    start = time.monotonic()
    try:
        opt.step()
    except RuntimeError:
        found["death"] = time.monotonic() - start
    torch.save(found, folder / f"2.{rank}.faults.pt")
    os._exit(0)


def main(folder: Path, rank: int, world: int) -> None:
    """Every optimizer in every layout; checkpoints."""
    where, patience = f"file://{folder}/store{world}", timedelta(seconds=TIMEOUT)
    dist.init_process_group("gloo", init_method=where, timeout=patience, rank=rank, world_size=world)
    found: dict[Any, Any] = {}
    for layout in LAYOUTS[world]:
        vars(shards)["CHUNK_BYTES"] = 512 if layout == "hsdp" else 2**28  # many buckets, or one
        for name in MAKES:
            model = build(layout, divided=True)
            opt = MAKES[name](model)
            found[layout, name] = train(model, opt, range(STEPS), layout)
            found["metrics", layout, name] = opt.metrics(layers=True)
            if layout == "fsdp" and world == 2:
                found["state", name] = state_of(opt)
                state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
                save(state, checkpoint_id=folder / name)
                found["after", name] = train(model, opt, range(STEPS, STEPS + AFTER), layout)
            if layout == "ddp":
                found["state", layout, name] = state_of(opt)
            found["measured", layout, name] = measured(model, opt, layout)
    for layout in ("fsdp", "hsdp") if world == 4 else ("fsdp",):
        for name in MAKES:
            model, opt = resumed(folder, layout, name)
            found["resumed", layout, name] = state_of(opt)
            found["went on", layout, name] = train(model, opt, range(STEPS, STEPS + AFTER), layout)
    if world == 2:
        model = build("fsdp", divided=False)
        opt, names = ng.Natural(model, lr=0.01, iteration="minimax"), {p: name for name, p in model.named_parameters()}
        _divide(model, "fsdp")
        for group in opt.param_groups:
            group["params"] = [model.get_parameter(names[p]) for p in group["params"]]
        found["divided later"] = train(model, opt, range(STEPS), "fsdp")
    for name in MAKES if world == 2 else ():
        plain, model = build("fsdp", divided=False), build("fsdp", divided=True)
        alone, opt = MAKES[name](plain), MAKES[name](model)
        for step in range(2):
            backward(plain, step, slice(None))
            alone.step()
        opt.load_state_dict(alone.state_dict())
        found["of one", name] = state_of(alone), state_of(opt)
    torch.save(found, folder / f"{world}.{rank}.pt")
    if world == 2:
        faults(folder)
    dist.destroy_process_group()


if __name__ == "__main__":
    forked.run(main, LAYOUTS)
