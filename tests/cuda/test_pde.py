"""On a GPU: differential operators are those of the CPU, and wait for nothing."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import natgrad as ng
from tests.cuda.waiting import no_waiting


def test_operators_and_their_gradients() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 32), nn.SiLU(), nn.Linear(32, 2)).double()
    x, D = torch.rand(100, 4, dtype=torch.float64), torch.tensor([1.0, 0.5, -2.0])

    def operators(net: nn.Module, x: Tensor) -> list[Tensor]:
        u = ng.pde.derivatives(net, x, space=slice(1, None), diffusion=D.to(x))
        loss = (u.laplacian + u.value * u.d(0)).square().sum()
        return [u.value, u.gradient, u.laplacian, *torch.autograd.grad(loss, list(net.parameters()))]

    expected = operators(net, x)
    net, x, D = net.cuda(), x.cuda(), D.cuda()
    operators(net, x)  # the libraries wait when they are used for the first time
    with no_waiting():
        results = operators(net, x)
    for result, right in zip(results, expected, strict=True):
        torch.testing.assert_close(result.cpu(), right, rtol=1e-10, atol=1e-10)
