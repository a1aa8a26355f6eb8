"""The example of Grosse (2021), section 1: Rosenbrock's function as a loss on the outputs of a model."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests.golden import Golden, agrees, golden, names, tensor
from tests.pulled import close

Params = dict[str, Tensor]


class Rosenbrock:
    """z = (a − x₁, √b (x₂ − x₁²)), a pure function of its parameters alone, with h = z₁² + z₂²."""

    def __init__(self, case: Golden) -> None:
        inputs = case["inputs"]
        self.a, self.b = inputs.get("a", 1.0), inputs.get("b", 100.0)

    def __call__(self, params: Params, x: Any = None) -> Tensor:
        x1, x2 = params["x"]
        return torch.stack([self.a - x1, math.sqrt(self.b) * (x2 - x1**2)])[None]

    def h(self, params: Params) -> Tensor:
        return self(params).square().sum()

    def natural(self, params: Params, structure: Structure | None = None, solver: Solver | None = None) -> ng.Vector:
        return ng.natural_gradient(
            self, None, lambda z: z.square().sum(), ng.Euclidean(), structure=structure, solver=solver, params=params
        )


@pytest.mark.parametrize("name", names("rosenbrock.point"))
def test_metric_and_natural_gradient_at_a_point(name: str) -> None:
    case = golden(name)
    f, params = Rosenbrock(case), {"x": tensor(case["inputs"]["x"])}
    pb = ng.pullback(f, None, ng.Euclidean(), params=params)
    G = ng.Dense().estimate(pb)
    agrees(case, pb.y[0], "z")
    agrees(case, G.dense(), "G")
    leaves = {"x": params["x"].clone().requires_grad_()}
    w = ng.differential(leaves, f.h(leaves))
    agrees(case, w["x"], "grad")
    agrees(case, ng.sharp(G, w)["x"], "natgrad")
    agrees(case, f.natural(params)["x"], "natgrad")
    # The generalised Gauss–Newton matrix of z₁² + z₂² is twice G, as it is the metric of that loss and not of half.
    twice = ng.pullback(f, None, ng.LossHessian(lambda z, t: z.square().sum()), torch.zeros(1), params=params)
    close(ng.Dense().estimate(twice).dense(), 2 * G.dense())


@pytest.mark.parametrize("name", names("rosenbrock.point"))
@pytest.mark.parametrize("way", ["Kernel Pinv", "Implicit CG", "LowRank", "BlockDense"])
def test_every_exact_structure_gives_the_same_natural_gradient(name: str, way: str) -> None:
    case = golden(name)
    params = {"x": tensor(case["inputs"]["x"])}
    ways: dict[str, tuple[Structure, Solver]] = {
        "Kernel Pinv": (ng.Kernel(), ng.Pinv()),
        "Implicit CG": (ng.Implicit(), ng.CG(tol=1e-14)),
        "LowRank": (ng.LowRank(2), ng.Cholesky()),
        "BlockDense": (ng.BlockDense(), ng.Cholesky()),
    }
    expected = tensor(case["expected"]["natgrad"])
    close(Rosenbrock(case).natural(params, *ways[way])["x"], expected, 1e-9)


@pytest.mark.parametrize("name", names("rosenbrock.ngd"))
def test_trajectory_of_natural_gradient_descent(name: str) -> None:
    case = golden(name)
    f, params = Rosenbrock(case), {"x": tensor(case["inputs"]["x0"])}
    iterates, losses = [params["x"]], [f.h(params)]
    for _ in case["expected"]["iterates"][1:]:
        params = params + (-case["inputs"]["alpha"]) * f.natural(params)
        iterates.append(params["x"])
        losses.append(f.h(params))
    agrees(case, torch.stack(iterates), "iterates")
    if "h" in case["expected"]:
        agrees(case, torch.stack(losses), "h")


@pytest.mark.parametrize("start", [[-1.2, 1.0], [0.0, 0.0], [3.0, -7.0]])
def test_half_a_step_reaches_the_optimum_in_two(start: list[float]) -> None:
    """α = 1/2 is Gauss–Newton: z is linear in x₂, and after the first step x₁ = a."""
    case = golden("rosenbrock.ngd.-1.2x1.0.alpha0.5")
    f, params = Rosenbrock(case), {"x": tensor(start)}
    params = params + (-0.5) * f.natural(params)
    close(params["x"], tensor([1.0, 2 * start[0] - start[0] ** 2]), 1e-10)
    params = params + (-0.5) * f.natural(params)
    close(params["x"], tensor([1.0, 1.0]), 1e-10)


def test_a_whole_step_goes_in_circles() -> None:
    """α = 1 reflects z at the origin: the second step undoes the first."""
    case = golden("rosenbrock.ngd.alpha1.cycle")
    f, params = Rosenbrock(case), {"x": tensor(case["inputs"]["x0"])}
    visited = [params["x"]]
    for _ in range(4):
        params = params + (-1.0) * f.natural(params)
        visited.append(params["x"])
    agrees(case, torch.stack(visited[:3]), "iterates")
    close(visited[4], visited[0], 1e-9)
    close(visited[3], visited[1], 1e-9)


def test_trajectory_of_gradient_descent() -> None:
    """Plain gradient descent has to declare the covector a vector, by the Euclidean metric of its parameters."""
    case = golden("rosenbrock.gd")
    f, params = Rosenbrock(case), {"x": tensor(case["inputs"]["x0"])}
    iterates = [params["x"]]
    for _ in case["expected"]["iterates"][1:]:
        leaves = {"x": params["x"].clone().requires_grad_()}
        v = ng.Identity().sharp(ng.differential(leaves, f.h(leaves)))
        params = params + (-case["inputs"]["lr"]) * v
        iterates.append(params["x"])
    agrees(case, torch.stack(iterates), "iterates")
