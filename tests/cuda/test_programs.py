"""A step from a captured graph is the step that is launched kernel by kernel, whatever changes between two steps.

Both run in double precision on one device, so that nothing but old numbers could make them differ: what a graph reads,
and its key has forgotten. Rates and momenta are exact in single precision, which graphs read them in.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.accelerate.replay import CudaGraphs
from tests.cuda.waiting import no_waiting
from tests.optim.tasks import seeded

Make = Callable[[nn.Module], Any]
FISHER = ng.Fisher(ng.Categorical(axis=-1))


class Tokens(nn.Module):
    """Layers that read one tensor, positions as a parameter, a layer that may be left out, and a tied head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(7, 4), nn.Parameter(0.1 * torch.randn(5, 4))
        self.q, self.k, self.extra = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = self.embed(x) + self.positions[: x.shape[1]]
        h = h + (self.q(h) @ self.k(h).mT).softmax(-1) @ h
        return self.head(torch.relu(h + self.extra(h).tanh()) if whole else h)


class Images(nn.Module):
    """A convolution, a transposed one, PReLU, and a layer that may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.slope, self.up = nn.Conv2d(2, 3, 3, padding=1), nn.PReLU(3), nn.ConvTranspose2d(3, 2, 2, 2)
        self.extra, self.head = nn.Conv2d(3, 3, 1), nn.Linear(128, 3)

    def forward(self, x: Tensor, whole: bool = True) -> Tensor:
        h = self.slope(self.first(x))
        return self.head(self.up(h + self.extra(h).tanh() if whole else h).tanh().flatten(1))


def batch(model: nn.Module, n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Inputs and classes; of tokens, some do not count."""
    generator = torch.Generator().manual_seed(seed)
    if isinstance(model, Images):
        x = torch.randn(n, 2, 4, 4, dtype=torch.float64, generator=generator)
        return x.cuda(), (torch.arange(n) % 3).cuda()
    x, t = torch.randint(7, (2, n, 5), generator=generator).unbind()
    return x.cuda(), t.masked_fill(torch.rand(n, 5, generator=generator) < 0.3, -100).cuda()


def _slots(**options: Any) -> Make:
    settings: dict[str, Any] = {"lr": 2**-5, "momentum": 0.5, "damping": ng.Relative(2**-3), **options}
    settings["solver"] = ng.Factored()
    return lambda model: ng.KFAC(model, FISHER, **settings)


SMALL: dict[str, Any] = {"lr": 2**-6, "momentum": 0.5, "weight_decay": 2**-4}
OPTIMIZERS: dict[str, Make] = {
    "kfac": _slots(metric_every=2, inverse_every=2),
    "seldom": _slots(metric_every=2, inverse_every=6, weight_decay=2**-4),
    "polar": _slots(step=ng.Polar(iteration="minimax"), fallback="adamw", momentum_on="gradients", metric_every=3),
    "natural": lambda model: ng.Natural(model, iteration="minimax", **SMALL),
    "muon": lambda model: ng.Muon(model, iteration="minimax", nesterov=False, **SMALL),
    "shampoo": lambda model: ng.Shampoo(model, inverse_every=6, **SMALL),
}

# What happens before steps, by their numbers; between them are plain steps, which are captured and replayed.
EVENTS = {
    6: "rate", 9: "size", 10: "size", 12: "decay", 14: "left out", 17: "momentum", 20: "clipped", 22: "resumed",
    26: "elsewhere", 29: "new rule", 32: "no gradient", 34: "rate",
}  # fmt: skip


def way(build: type[nn.Module], make: Make, steps: int) -> tuple[list[Tensor], int]:
    """The parameters after every step, and how many were replayed."""
    model = seeded(build).double().cuda()
    opt = make(model)
    thetas = list[Tensor]()
    for step in range(steps):
        event, group = EVENTS.get(step), opt.param_groups[0]
        x, t = batch(model, 5 if event == "size" else 8, 0)
        if event == "rate":
            group["lr"] *= 0.5
        elif event == "decay":
            group["weight_decay"] = 2**-3
        elif event == "momentum":
            group["momentum"] = 0.25
        elif event == "resumed":
            saved, weights = copy.deepcopy(opt.state_dict()), model.state_dict()
            model = build().double().cuda()
            model.load_state_dict(weights)
            opt = make(model)
            opt.load_state_dict(saved)
        elif event == "elsewhere":
            for p in model.parameters():
                p.data = p.data.clone()
        elif event == "new rule" and isinstance(opt, ng.NaturalGradient) and opt.rule == ng.KLClip():
            opt.rule = ng.KLClip(1e-6)
        elif event == "new rule" and hasattr(opt, "rms"):
            opt.rms *= 2
        opt.zero_grad()
        y = model(x, whole=event != "left out")
        F.cross_entropy(y.flatten(0, -2), t.flatten()).backward()
        if event == "clipped":
            nn.utils.clip_grad_norm_(model.parameters(), 0.125)
        elif event == "no gradient":
            model.get_parameter("extra.weight").grad = None
        opt.step()
        thetas.append(torch.cat([p.detach().flatten().cpu() for p in model.parameters()]))
    return thetas, sum(stats.replays for stats in opt._graphs.stats.values())


@pytest.mark.parametrize(
    ("name", "build"),
    [
        ("kfac", Images),
        ("seldom", Tokens),
        ("polar", Tokens),
        ("natural", Images),
        ("muon", Tokens),
        ("shampoo", Images),
    ],
)
def test_captured_steps_are_those_that_are_launched_one_by_one(
    name: str, build: type[nn.Module], monkeypatch: pytest.MonkeyPatch
) -> None:
    captures = False

    def possible(_: CudaGraphs, tensors: Sequence[Tensor]) -> bool:  # also in double precision
        return captures and bool(tensors) and tensors[0].is_cuda and not torch.cuda.is_current_stream_capturing()

    monkeypatch.setattr(CudaGraphs, "possible", possible)
    expected, _ = way(build, OPTIMIZERS[name], 36)
    captures = True
    found, replays = way(build, OPTIMIZERS[name], 36)
    for step, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert float((one - other).norm() / other.norm()) < 1e-6, (step, EVENTS.get(step))
    assert replays > 4  # since the resumption


@pytest.mark.parametrize("build", [Tokens, Images])
def test_an_estimate_of_parameters_without_a_layer_waits_for_nothing(build: type[nn.Module]) -> None:
    """Positions and slopes: where their entries are is known to the host."""
    model = seeded(build).cuda()
    opt = ng.KFAC(model, FISHER, metric_every=1, inverse_every=1)
    x, t = batch(model, 8, 0)
    x = x if x.dtype == torch.long else x.float()

    def train(steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            F.cross_entropy(model(x).flatten(0, -2), t.flatten()).backward()
            opt.step()

    train(12)
    with no_waiting():
        train(4)
