"""Potentials with their textbook formulas, in plain torch, and a point and an objective for each."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import natgrad as ng
from natgrad.mirror import Potential

Function = Callable[[Tensor], Tensor]

MATRIX = torch.tensor([[2.0, 0.5, 0.1], [0.5, 1.0, -0.3], [0.1, -0.3, 3.0]], dtype=torch.float64)
TARGET = torch.tensor([0.3, 0.5, 0.2], dtype=torch.float64)
hessian: Callable[..., Tensor] = torch.autograd.functional.hessian


@dataclass(frozen=True)
class Case:
    """ψ of the library, ψ and ψ* of the textbook, and two points of its domain."""

    potential: Potential
    value: Function
    conjugate: Function
    x: Tensor
    y: Tensor
    solver: ng.Cholesky | ng.Pinv

    def __repr__(self) -> str:
        return type(self.potential).__name__


def _t(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def _case(potential: Potential, value: Function, conjugate: Function, x: Tensor, y: Tensor, **solver: Any) -> Case:
    return Case(potential, value, conjugate, x, y, solver.get("solver", ng.Cholesky()))


CASES = [
    _case(
        ng.mirror.SquaredNorm(),
        lambda x: (x**2).sum() / 2,
        lambda z: (z**2).sum() / 2,
        _t(1.0, -2.0, 0.5),
        _t(0.3, 0.1, -0.7),
    ),
    _case(
        ng.mirror.Quadratic.of(MATRIX),
        lambda x: x @ MATRIX @ x / 2,
        lambda z: z @ torch.linalg.inv(MATRIX) @ z / 2,
        _t(1.0, -2.0, 0.5),
        _t(0.3, 0.1, -0.7),
    ),
    _case(
        ng.mirror.NegativeEntropy(),
        lambda x: (x * x.log() - x).sum(),
        lambda z: z.exp().sum(),
        _t(0.2, 1.5, 0.7),
        _t(0.4, 0.9, 2.0),
    ),
    _case(
        ng.mirror.BinaryEntropy(),
        lambda x: (x * x.log() + (1 - x) * (1 - x).log()).sum(),
        lambda z: (1 + z.exp()).log().sum(),
        _t(0.2, 0.55, 0.7),
        _t(0.4, 0.9, 0.35),
    ),
    _case(
        ng.mirror.LogBarrier(),
        lambda x: -x.log().sum(),
        lambda z: (-1 - (-z).log()).sum(),
        _t(0.2, 1.5, 0.7),
        _t(0.4, 0.9, 2.0),
    ),
    _case(
        ng.mirror.SimplexEntropy(),
        lambda x: (x * x.log()).sum(),
        lambda z: z.exp().sum().log(),
        _t(0.2, 0.5, 0.3),
        _t(0.6, 0.1, 0.3),
        solver=ng.Pinv(),
    ),
]


def objective(x: Tensor) -> Tensor:
    """A smooth function that is not convex, and is coupled to no potential."""
    return (x * TARGET).sum().sin() + ((x - TARGET) ** 2).sum() + x[0] * x[1] * x[2]


def gradient(f: Function, x: Tensor) -> Tensor:
    leaf = x.clone().requires_grad_()
    with torch.enable_grad():
        (ω,) = torch.autograd.grad(f(leaf), leaf)
    return ω


def close(got: Tensor, expected: Tensor, tol: float = 1e-12) -> None:
    torch.testing.assert_close(got, expected, rtol=tol, atol=tol)
