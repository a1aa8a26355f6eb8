"""The natural gradient does not see the coordinates: training is invariant to a linear change of the parameters."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import oracle
from tests.optim.tasks import Task, seeded, task


class _Changed(nn.Module):
    """The network at θ = θ₀ + Aφ, with φ the parameters."""

    def __init__(self, inner: nn.Module, A: Tensor) -> None:
        super().__init__()
        self._call: Callable[[dict[str, Tensor], Tensor], Tensor] = lambda params, x: torch.func.functional_call(
            inner, params, (x,)
        )
        self._like = {name: p.detach() for name, p in inner.named_parameters()}
        self._origin = oracle.flatten(self._like.values())
        self.A, self.φ = A, nn.Parameter(torch.zeros(A.shape[1], dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return self._call(oracle.unflatten(self._origin + self.A @ self.φ, self._like), x)


def _matrix(rows: int, columns: int) -> Tensor:
    """A well-conditioned change of coordinates that mixes everything, scales from 1 to 10."""
    g = torch.Generator().manual_seed(5)
    u, _, v = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64, generator=g), full_matrices=False)
    return u * torch.linspace(1, 10, min(rows, columns), dtype=torch.float64) @ v


def _train(kind: str, A: Tensor | None, make: Callable[[nn.Module], torch.optim.Optimizer]) -> list[Tensor]:
    of = task(kind, n=30)
    model: nn.Module = seeded(lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double())
    of = Task(model if A is None else _Changed(model, A), of.x, of.t, of.kind)
    opt = make(of.model)
    outputs = []
    for _ in range(6):
        of.step(opt)
        with torch.no_grad():
            outputs.append(of.model(of.x))
    return outputs


def _natural(kind: str, **options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    metric = task(kind).kind.metric
    return lambda model: ng.NaturalGradient(model, metric, **{"lr": 0.2, "damping": 0.0, **options})


@pytest.mark.parametrize("kind", ["regression", "coins", "counts"])
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.5}, {"step": ng.TrustRegion(0.01)}, {"structure": ng.Refresh(ng.Dense(), every=2, decay=0.5)}],
    ids=["fixed", "momentum", "trust_region", "averaged"],
)
def test_training_is_invariant_to_a_linear_change_of_the_parameters(kind: str, options: dict[str, Any]) -> None:
    make = _natural(kind, **options)
    plain, changed = _train(kind, None, make), _train(kind, _matrix(6, 6), make)
    for a, b in zip(plain, changed, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)
    assert float((plain[-1] - plain[0]).abs().max()) > 1e-2  # and it went somewhere


@pytest.mark.parametrize("kind", ["regression", "coins"])
def test_an_over_parametrised_model_trains_as_the_plain_one_with_pinv(kind: str) -> None:
    """A (AᵀGA)⁺ Aᵀ = G⁻¹ for a surjective A: 9 parameters for 6."""
    plain = _train(kind, None, _natural(kind))
    wide = _train(kind, _matrix(6, 9), _natural(kind, solver=ng.Pinv(rtol=1e-11)))
    for a, b in zip(plain, wide, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


@pytest.mark.parametrize("make", [lambda m: torch.optim.SGD(m.parameters(), lr=0.05), _natural("coins", damping=0.1)])
def test_gradient_descent_and_damping_are_not_invariant(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    plain, changed = _train("coins", None, make), _train("coins", _matrix(6, 6), make)
    assert float((plain[-1] - changed[-1]).abs().max()) > 1e-2
