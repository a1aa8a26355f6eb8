"""Finite steps along a nonlinear map of the parameters: the order in the learning rate at which they differ."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.invariance import certify
from tests.pulled import normal

Point = dict[str, Tensor]
MAPS: dict[str, Callable[[Point], Point]] = {
    "cubic": lambda θ: {name: 2 * p + p**3 / 3 for name, p in θ.items()},
    "exponential": lambda θ: {name: p.exp() - 1 + 0.5 * p for name, p in θ.items()},
    "coupled": lambda θ: {name: p + 0.3 * p.sum().sin() for name, p in θ.items()},
}


def optimizer(name: str, lr: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    if name == "gradient":
        return lambda model: torch.optim.SGD(model.parameters(), lr=lr)
    step = {"geodesic": ng.GeodesicCorrected()}.get(name, ng.Fixed())
    damping = 0.1 if name == "damped" else 0.0
    return lambda model: ng.NaturalGradient(
        model, ng.Euclidean(), structure=ng.Dense(), step=step, lr=lr, damping=damping
    )


@cache
def task() -> tuple[nn.Module, tuple[Tensor, Tensor]]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
    return model, (normal(64, 2), normal(64, 2, seed=1))


@pytest.mark.parametrize("name", MAPS)
@pytest.mark.parametrize(("kind", "order"), [("gradient", 1), ("damped", 1), ("natural", 2), ("geodesic", 3)])
def test_the_order_of_the_difference_is_that_of_the_theory(kind: str, order: int, name: str) -> None:
    model, batch = task()
    found = certify(optimizer(kind, 0.02), model, batch, steps=1, map=MAPS[name])
    assert not found.invariant
    assert found.order is not None
    assert abs(found.order - order) < 0.15, str(found)
    assert f"of order lr^{found.order:.2f}" in str(found)


def test_the_difference_is_that_of_the_two_steps_by_hand() -> None:
    """y(f(θ − lr·∇_θ)) against y(f(θ) − lr·∇_ξ), on the batch."""
    model, (x, target) = task()
    f, lr = MAPS["cubic"], 0.1
    θ = {name: p.detach() for name, p in model.named_parameters()}

    def y(p: Point) -> Tensor:
        return torch.func.functional_call(model, p, (x,))

    def loss(p: Point) -> Tensor:
        return (y(p) - target).square().sum() / (2 * len(x))

    ω_θ, ω_ξ = torch.func.grad(lambda p: loss(f(p)))(θ), torch.func.grad(loss)(f(θ))
    one = y(f({name: θ[name] - lr * ω_θ[name] for name in θ}))
    other = y({name: f(θ)[name] - lr * ω_ξ[name] for name in θ})
    found = certify(optimizer("gradient", lr), model, (x, target), steps=1, map=f)
    assert found.shorter[0] == found.differences[-1]
    assert found.shorter[0] >= float((one - other).abs().max()) / float(other.abs().max()) * 0.2
    assert math.log2(found.shorter[0] / found.shorter[1]) == pytest.approx(1, abs=0.3)


def test_affine_maps_and_permutations_are_exact() -> None:
    """The steps of the natural gradient are equal in every learning rate, over several steps."""
    model, batch = task()
    mixed = 0.1 * normal(9, 9, seed=2) + torch.eye(9, dtype=torch.float64)

    def affine(θ: Point) -> Point:
        first = torch.cat([θ["0.weight"].reshape(-1), θ["0.bias"]])
        moved = mixed @ first + 0.01
        return {**θ, "0.weight": moved[:6].view(3, 2), "0.bias": moved[6:]}

    def permuted(θ: Point) -> Point:
        order = torch.tensor([2, 0, 1])
        inner = {"0.weight": θ["0.weight"][order], "0.bias": θ["0.bias"][order], "2.weight": θ["2.weight"][:, order]}
        return {**θ, **inner}

    for f in (affine, permuted):
        found = certify(optimizer("natural", 0.02), model, batch, steps=3, map=f)
        assert found.invariant, str(found)
        assert found.order is None
    assert certify(optimizer("gradient", 0.1), model, batch, steps=5, map=permuted).invariant


def test_a_map_that_forgets_a_parameter_is_refused() -> None:
    with pytest.raises(ValueError, match=r"same names and shapes, and does not for 2\.bias"):
        certify(optimizer("gradient", 0.1), *task(), map=lambda θ: {**θ, "2.bias": θ["0.bias"]})
    with pytest.raises(ValueError, match=r"takes neither seed= nor keep="):
        certify(optimizer("gradient", 0.1), *task(), map=MAPS["cubic"], seed=1)
