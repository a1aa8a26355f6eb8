"""A ``forward(interior, boundary)`` that returns all residuals, one below the other: exact rows, and no wide tables."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.fit.problems import boundary, edges, exact_rows, grid, interior, network, solution


def by_operators(net: nn.Module, x: Tensor) -> Tensor:
    return ng.pde.laplacian(net, x) + 2 * math.pi**2 * solution(x)


def by_transforms(net: nn.Module, x: Tensor) -> Tensor:
    second = torch.func.vmap(torch.func.hessian(lambda x: net(x)[0]))(x)
    return second.diagonal(dim1=1, dim2=2).sum(1, keepdim=True) + 2 * math.pi**2 * solution(x)


class Concatenated(nn.Module):
    def __init__(self, net: nn.Module, inside: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.inside = net, inside

    def forward(self, x: Tensor, on_boundary: Tensor) -> Tensor:
        return torch.cat([self.inside(self.net, x), boundary(self.net, on_boundary)])


@pytest.mark.parametrize("inside", [interior, by_operators, by_transforms])
def test_concatenated_residuals_have_exact_and_narrow_rows(inside: Callable[[nn.Module, Tensor], Tensor]) -> None:
    n, net = 6, network(2, 7, 1)
    J = exact_rows(net, n, 1.0)[1]
    m = len(J)
    unscaled = torch.cat([J[: n * n] * n, J[n * n :] * math.sqrt(4 * n)])
    pb = ng.pullback(Concatenated(net, inside), (grid(n), edges(n)), ng.Euclidean())
    G = ng.Kernel().estimate(pb)
    assert torch.allclose(G.rows() * math.sqrt(m), unscaled, atol=1e-10 * float(unscaled.abs().max()))
    assert max(f.a.shape[1] for f in G.factors) <= 6  # positions of an example, not of the batch


@pytest.mark.parametrize("inside", [by_operators, by_transforms])
def test_a_class_may_take_its_derivatives_by_any_means(inside: Callable[[nn.Module, Tensor], Tensor]) -> None:
    net = network(2, 7, 1)
    r, J = exact_rows(net, 6, 1.0)
    problem = ng.LeastSquares([ng.Residuals(inside, grid(6)), ng.Residuals(boundary, edges(6))], net, step=ng.Fixed())
    problem.damping, before = 1e-3, torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    problem.step()
    after = torch.cat([p.detach().reshape(-1) for p in net.parameters()])
    exact = torch.linalg.solve(J.T @ J + 1e-3 * torch.eye(J.shape[1]).double(), J.T @ r)
    assert torch.allclose(before - after, exact, rtol=1e-7, atol=1e-9)
