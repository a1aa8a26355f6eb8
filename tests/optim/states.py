"""Optimizers in all structures, with states to save and to load."""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.optim.checkpoint import gather_state
from natgrad.structures import Structure
from tests.optim.tasks import seeded
from tests.pulled import normal, opaque

EXACT = ng.Fisher(ng.Categorical(axis=-1))
Make = Callable[[nn.Module], ng.NaturalGradient]


class Net(nn.Module):
    """Two layers, and a matrix that no rule covers, for the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.last, self.mix = nn.Linear(3, 4), nn.Linear(4, 2), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        return self.last(torch.tanh(opaque(self.hidden(x), self.mix)))


def net(seed: int = 0) -> nn.Module:
    return seeded(lambda: Net().double(), seed)


def _structured(structure: Structure | ng.Refresh, **options: Any) -> Make:
    return lambda m: ng.NaturalGradient(m, EXACT, structure=structure, lr=0.1, damping=0.1, momentum=0.5, **options)


def _slots(structure: Structure | ng.Refresh, **options: Any) -> Make:
    """Optimizers of gradients, in the slots of ``NaturalGradient``."""
    return lambda m: ng.NaturalGradient(
        m,
        ng.BatchGradient(),
        structure=structure,
        lr=0.01,
        momentum=0.9,
        momentum_on="gradients",
        weight_decay=0.1,
        fallback="adamw",
        **{"damping": ng.Relative(1e-2), **options},
    )


FACTORED: dict[str, Any] = {"solver": ng.Factored()}
MAKES: dict[str, Make] = {
    "kfac": lambda m: ng.KFAC(m, EXACT, early=False),
    "ekfac": lambda m: ng.EKFAC(m, EXACT, early=False),
    "exact": lambda m: ng.KFAC(m, EXACT, early=False, solver=ng.Cholesky()),
    "blocks": lambda m: ng.KFAC(m, EXACT, fallback=ng.BlockDense()),
    "natural": _slots(ng.Refresh(ng.Kronecker(largest=1, power=0.5), decay=0.95), step=ng.Polar(0.4), **FACTORED),
    "shampoo": _slots(ng.Refresh(ng.Kronecker(power=0.5), 1, 0.95, 10), step=ng.Normalised(), **FACTORED),
    "soap": _slots(ng.Refresh(ng.EigenKronecker(power=0.5), decay=0.95, inverse=10)),
    "muon": _slots(ng.Diagonal(power=0.0), step=ng.Polar()),
    "dense": _structured(ng.Refresh(ng.Dense(), every=5)),
    "block_dense": _structured(ng.Refresh(ng.BlockDense(), every=5)),
    "diagonal": _structured(ng.Refresh(ng.Diagonal(), every=5)),
    "low_rank": _structured(ng.Refresh(ng.LowRank(3), every=5)),
    "kernel": _structured(ng.Refresh(ng.Kernel(), every=5)),
    "implicit": _structured(ng.Implicit(), solver=ng.CG()),
}


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: int) -> Tensor:
    for _ in range(steps):
        opt.zero_grad()
        nn.functional.cross_entropy(model(normal(6, 3)), torch.arange(6) % 2).backward()
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def state_of(make: Make, seed: int = 0, steps: int = 2) -> tuple[ng.NaturalGradient, dict[str, Any]]:
    model = net(seed)
    opt = make(model)
    train(model, opt, steps)
    return opt, whole(opt)


def whole(opt: ng.NaturalGradient) -> dict[str, Any]:
    """Its state with the metric in one entry, "natgrad", as it was saved in version 0.1.0."""
    return copy.deepcopy(gather_state(opt.state_dict()))


def alike(a: Any, b: Any) -> bool:
    """Equal, number by number."""
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(alike, a, b))
    return torch.equal(a, b) if isinstance(a, Tensor) else bool(a == b)
