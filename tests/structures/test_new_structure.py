"""A structure of the user's: three classes, and everything that an optimizer does with a structure works."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.linalg import Damping
from natgrad.model import Model
from natgrad.operators import Inverse, Layout, Operator
from natgrad.pullbacks.layer import Block
from natgrad.structures import Structure
from tests.optim.states import whole


@final
@dataclass(frozen=True)
class Scalar(Structure):
    """G ≈ (tr G/p)·1."""

    def elements(self, pullback: ng.Pullback) -> int:
        return 1

    def estimate(self, pullback: ng.Pullback, like: Operator | None = None) -> ScalarOperator:
        return ScalarOperator(Layout(pullback.model.like, pullback.y.dtype), pullback.square().mean())

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> ScalarOperator:
        return ScalarOperator(Layout.of(model.params, tensors["scale"].dtype), tensors["scale"])


@final
@dataclass(frozen=True)
class ScalarOperator(Operator):
    layout: Layout
    scale: Tensor  # []

    def product(self, v: Tensor) -> Tensor:
        return self.scale * v

    def diagonal(self) -> Tensor:
        return self.scale.expand(self.layout.size)

    def dense(self) -> Tensor:
        return self.diagonal().diag()

    def logdet(self, damping: Damping = 0.0) -> Tensor:
        return self.layout.size * (self.scale + self.absolute(damping)).log()

    def lerp(self, other: Operator, weight: float) -> ScalarOperator:
        self.same_kind(other)
        return ScalarOperator(self.layout, torch.lerp(self.scale, cast(ScalarOperator, other).scale, weight))

    def tensors(self) -> dict[str, Tensor]:
        return {"scale": self.scale}

    def inverse(self, damping: Damping) -> Inverse:
        return ScalarInverse(self.layout, self.scale + self.absolute(damping))

    def pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        return self.inverse(damping)


@final
@dataclass(frozen=True)
class ScalarInverse(Inverse):
    layout: Layout
    divisor: Tensor

    def solve(self, ω: Tensor) -> Tensor:
        return ω / self.divisor


def task(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), *torch.randn(2, 8, 3).double()


def optimizer(model: nn.Module) -> ng.NaturalGradient:
    structure = ng.Refresh(Scalar(), every=2, decay=0.9)
    return ng.NaturalGradient(model, ng.Euclidean(), structure=structure, lr=0.1, damping=0.5, momentum=0.9)


def train(model: nn.Module, opt: ng.NaturalGradient, x: Tensor, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def test_its_step_is_the_gradient_over_the_damped_mean_eigenvalue() -> None:
    model, x, _ = task()
    expected = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).trace() / theta(model).numel()
    before, opt = theta(model), optimizer(model)
    train(model, opt, x, 1)
    gradient = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    torch.testing.assert_close(theta(model), before - 0.1 * gradient / (expected + 0.5), rtol=1e-12, atol=1e-12)


def test_a_run_is_resumed_bit_for_bit() -> None:
    (whole, x, _), (parted, _, _) = task(), task()
    train(whole, optimizer(whole), x, 7)
    opt = optimizer(parted)
    train(parted, opt, x, 4)
    resumed, _, _ = task(1)
    resumed.load_state_dict(parted.state_dict())
    again = optimizer(resumed)
    again.load_state_dict(opt.state_dict())
    train(resumed, again, x, 3)
    assert torch.equal(theta(resumed), theta(whole))


def test_a_damaged_state_is_refused_by_name() -> None:
    model, x, _ = task()
    opt = optimizer(model)
    train(model, opt, x, 1)
    state = whole(opt)
    state["natgrad"]["operator"] = {"scales": torch.ones(())}
    with pytest.raises(ValueError, match=r"scale of the metric is missing in the state\. Nothing was loaded"):
        optimizer(model).load_state_dict(state)


def test_plan_and_diagnostics_say_what_they_know() -> None:
    model, x, _ = task()
    opt = optimizer(model)
    assert [row.structure for row in opt.plan().rows] == ["Scalar", "Scalar"]
    assert opt.plan().bytes is None  # its cost is not stated
    train(model, opt, x, 1)
    found = opt.diagnostics()
    assert [layer.names[0] for layer in found.layers] == ["0.weight", "2.weight"]
    assert found.step > 0


def test_solvers_that_do_not_fit_refuse_it_by_name_and_others_work() -> None:
    model, x, _ = task()
    G = Scalar().estimate(ng.pullback(model, x, ng.Euclidean()))
    ω = ng.Covector({name: torch.ones_like(p) for name, p in model.named_parameters()})
    with pytest.raises(IncompatibleError, match="Factored does not work with ScalarOperator"):
        ng.sharp(G, ω, ng.Factored(), damping=0.1)
    with pytest.raises(IncompatibleError, match=r"preconditioner=Dense.* does not work with ScalarOperator"):
        ng.sharp(G, ω, ng.CG(preconditioner=ng.Dense()), damping=0.1)
    expected = ng.sharp(G, ω, damping=0.1).flatten()
    solver = ng.CG(tol=1e-12, preconditioner=ng.Diagonal())
    torch.testing.assert_close(ng.sharp(G, ω, solver, damping=0.1).flatten(), expected)


def test_it_can_be_the_fallback_of_kronecker() -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mix, self.layer = nn.Parameter(torch.rand(3) + 0.5), nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.layer(torch.atan2(x, self.mix))  # an operation that no rule knows
            return out

    _, x, _ = task()
    model = Mixed().double()
    pb = ng.pullback(model, x, ng.Euclidean())
    G = ng.Kronecker(fallback=Scalar()).estimate(pb)
    assert isinstance(G.fallback, ScalarOperator)
    exact = ng.Dense().estimate(pb).diagonal()
    start = 0
    for name, p in model.named_parameters():
        if name == "mix":
            torch.testing.assert_close(G.diagonal()[start : start + 3], exact[start : start + 3].mean().expand(3))
        start += p.numel()
