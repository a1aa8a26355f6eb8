"""Least squares on a GPU: the steps of the CPU, in every structure."""

import pytest
import torch

import natgrad as ng
from natgrad.structures.base import Structure
from tests.fit.problems import boundary, edges, grid, network, solution


def moved(device: str, structure: Structure, sizes: tuple[int, ...]) -> torch.Tensor:
    net = network(*sizes).to(device)
    residuals = {
        "in": ng.Residuals(lambda net, x: ng.pde.laplacian(net, x) + 20 * solution(x), grid(8).to(device)),
        "on": ng.Residuals(boundary, edges(8).to(device), weight=2.0),
    }
    solver = ng.CG(tol=1e-12, max_steps=2000) if isinstance(structure, ng.Implicit) else None
    problem = ng.LeastSquares(residuals, net, structure=structure, solver=solver, damping=1e-3)
    for _ in range(3):
        problem.step()
    return torch.cat([p.detach().flatten() for p in net.parameters()]).cpu()


@pytest.mark.parametrize("sizes", [(2, 9, 1), (2, 24, 24, 1)])
@pytest.mark.parametrize(
    "structure",
    [ng.Kernel(), ng.Dense(), pytest.param(ng.Implicit(), marks=pytest.mark.gpu("slow")), ng.Kronecker()],
    ids=repr,
)
def test_steps_are_those_of_the_cpu(structure: Structure, sizes: tuple[int, ...]) -> None:
    here, there = (moved(device, structure, sizes) for device in ("cpu", "cuda"))
    assert (here - there).norm() < 1e-5 * here.norm()
