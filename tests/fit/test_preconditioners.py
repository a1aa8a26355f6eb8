"""Preconditioned conjugate gradients for least squares: the same step, in fewer products."""

import logging
import math

import pytest
import torch

import natgrad as ng
from natgrad.structures.base import Structure
from tests.fit.problems import boundary, edges, exact_rows, flat, grid, network, solution

λ = 1e-4


def inside(net: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return ng.pde.laplacian(net, x) + 2 * math.pi**2 * solution(x)


def problem(net: torch.nn.Module, solver: ng.CG) -> ng.LeastSquares:
    residuals = {"in": ng.Residuals(inside, grid(6)), "on": ng.Residuals(boundary, edges(6), weight=3.0)}
    return ng.LeastSquares(residuals, net, structure=ng.Implicit(), solver=solver, step=ng.Fixed(), damping=λ)


@pytest.mark.parametrize("preconditioner", [ng.Nystrom(12), ng.Diagonal(), ng.Kronecker(), ng.Dense()], ids=repr)
def test_a_preconditioner_does_not_change_the_step(preconditioner: Structure) -> None:
    net = network(2, 9, 8, 1)
    r, J = exact_rows(net)
    exact = torch.linalg.solve(J.T @ J + λ * torch.eye(J.shape[1]).double(), J.T @ r)
    before = flat(net)
    problem(net, ng.CG(tol=1e-12, max_steps=3000, preconditioner=preconditioner)).step()
    assert (before - flat(net) - exact).norm() < 1e-6 * exact.norm()


def test_a_solve_that_is_cut_short_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    fit = problem(network(2, 9, 8, 1), ng.CG(max_steps=2))
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        fit.step()
        fit.step()
    (message,) = caplog.messages
    assert "max_steps=2" in message
    assert "Raise max_steps, tol or the damping" in message


def test_nystrom_takes_fewer_products_the_larger_its_rank() -> None:
    net = network(2, 9, 8, 1)
    pb = ng.pullback(net, grid(6), ng.Euclidean())
    G = ng.Implicit().estimate(pb)
    ω = G.layout.covector(G.product(torch.randn(G.layout.size, generator=torch.Generator().manual_seed(0)).double()))
    steps = []
    for preconditioner in (None, ng.Nystrom(10), ng.Nystrom(30)):
        inverse = ng.CG(tol=1e-8, max_steps=3000, preconditioner=preconditioner).init(G, 1e-9)
        inverse.sharp(ω)
        assert inverse.report is not None
        steps.append(inverse.report.steps)
    assert steps[2] < steps[1] < steps[0]
    assert steps[2] < 0.3 * steps[0]


def test_nystrom_of_the_whole_rank_is_the_metric_and_of_less_is_below_it() -> None:
    pb = ng.pullback(network(2, 6, 1), grid(4), ng.Euclidean())
    G = ng.Dense().estimate(pb).dense()
    whole = ng.Nystrom(100).estimate(pb).dense()
    assert torch.allclose(whole, G, atol=1e-10 * float(G.max()))
    part = ng.Nystrom(5).estimate(pb)
    low = part.dense() - part.floor[0] * torch.eye(len(G)).double()
    values = torch.linalg.eigvalsh(G - low)
    assert values[0] > -1e-10 * values[-1]  # Y(ΩᵀY)⁻¹Yᵀ ≤ G
    with pytest.raises(ValueError, match="positive rank"):
        ng.Nystrom(0)
