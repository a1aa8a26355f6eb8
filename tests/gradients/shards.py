"""What the processes of ``test_shards`` do: train a model that is sharded over them, and say where it ends."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
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
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional as F

import natgrad as ng

D = torch.float64
MAKES: dict[str, Callable[[Any], Any]] = {
    "natural": lambda model: ng.Natural(model, lr=0.01, iteration="minimax"),
    "muon": lambda model: ng.Muon(model, lr=0.01, iteration="minimax", nesterov=False),
    "shampoo": lambda model: ng.Shampoo(model, lr=0.01, fit="kl"),
    "soap": lambda model: ng.SOAP(model, lr=0.01, damping=ng.Relative(0.1)),
}
LAYOUTS = ("fsdp", "hsdp", "tp")
STEPS, AFTER = 5, 3


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
    """Two linear layers, for tensor parallelism."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.up, self.down = nn.Linear(13, 6, bias=False), nn.Linear(6, 13, bias=False)
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=D)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n·r 13]."""
        return self.down(torch.tanh(self.up(F.one_hot(x, 13).to(D)))).flatten(0, 1)


def build(layout: str, sharded: bool) -> nn.Module:
    """The model, alone or divided."""
    model: nn.Module = Pair() if layout == "tp" else Net()
    if sharded and layout == "tp":
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    elif sharded:
        replicas = dist.get_world_size() if layout == "hsdp" else 1
        shape = (replicas, dist.get_world_size() // replicas) if layout == "hsdp" else (dist.get_world_size(),)
        names = ("replicas", "shards")[-len(shape) :]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
        for name in ("first", "second", "third"):
            fully_shard(model.get_submodule(name), mesh=mesh)
        fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, opt: Any, steps: range, layout: str, rank: int | None) -> Tensor:
    """θ after some steps, of two micro-batches each, with clipped gradients."""
    for step in steps:
        x = torch.randint(13, (8, 6), generator=torch.Generator().manual_seed(step))
        mine = x if rank is None or layout == "tp" else x[rank * 4 : rank * 4 + 4]
        opt.zero_grad()
        for part in mine.chunk(2):
            (F.cross_entropy(model(part), part.roll(-1, 1).flatten()) / 2).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
    each = (p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters())
    return torch.cat([p.detach().flatten() for p in each])


def main(folder: Path) -> None:
    """Every optimizer in every layout; a checkpoint of one."""
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[Any, Any] = {}
    for layout in LAYOUTS:
        for name, make in MAKES.items():
            model = build(layout, sharded=True)
            opt = make(model)
            found[layout, name] = train(model, opt, range(STEPS), layout, rank)
            if layout == "fsdp":
                state = dict(zip(("model", "optimizer"), get_state_dict(model, opt), strict=True))
                save(state, checkpoint_id=folder / name)
                found["after", name] = train(model, opt, range(STEPS, STEPS + AFTER), layout, rank)
    model = build("fsdp", sharded=True)
    opt = ng.Natural(model)
    model(torch.zeros(2, 3, dtype=torch.int64)).sum().backward()
    if rank == 1:
        shards: list[Any] = [p.grad for p in model.parameters() if p.grad is not None]
        next(g.to_local() for g in shards if g.to_local().numel())[0] = torch.nan
    try:
        opt.step()
        found["nan"] = "nothing"
    except ng.errors.NonFiniteError as error:
        found["nan"] = str(error)
    torch.save(found, folder / f"{rank}.pt")
    dist.destroy_process_group()


def resumed(folder: Path, name: str) -> Tensor:
    """θ of a run that goes on from the checkpoint, in one process."""
    model = build("fsdp", sharded=False)
    opt = MAKES[name](model)
    model_state, state = get_state_dict(model, opt)
    saved: dict[str, Any] = {"model": model_state, "optimizer": state}
    load(saved, checkpoint_id=folder / name)
    set_state_dict(model, opt, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"])
    return train(model, opt, range(STEPS, STEPS + AFTER), "fsdp", None)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
