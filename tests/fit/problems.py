"""Small residual functions of a network, and their Jacobian by torch.func alone."""

import math
from collections.abc import Callable, Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, hessian, jacrev, vmap

import natgrad as ng


def network(*sizes: int, seed: int = 0) -> nn.Sequential:
    """A tanh network in double precision."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for i, o in pairwise(sizes):
        layers += [nn.Linear(i, o), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).double()


def grid(n: int) -> Tensor:
    """n² points inside of the unit square."""
    ticks = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.cartesian_prod(ticks, ticks)


def edges(n: int) -> Tensor:
    """4n points on the boundary of the unit square."""
    t = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    sides = [(t, 0 * t), (t, 0 * t + 1), (0 * t, t), (0 * t + 1, t)]
    return torch.cat([torch.stack(side, -1) for side in sides])


def solution(x: Tensor) -> Tensor:
    return (math.pi * x).sin().prod(-1, keepdim=True)


def interior(net: nn.Module, x: Tensor) -> Tensor:
    """Δu + 2π² sin πx sin πy, by nested automatic differentiation."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    second = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(second).sum(0).unsqueeze(1) + 2 * math.pi**2 * solution(x.detach())


def boundary(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) - solution(x)


def poisson(n: int = 6, weight: float = 3.0) -> dict[str, ng.Residuals]:
    """Two classes with different numbers of points."""
    return {
        "interior": ng.Residuals(interior, grid(n)),
        "boundary": ng.Residuals(boundary, edges(n), weight=weight),
    }


def exact_rows(net: nn.Module, n: int = 6, weight: float = 3.0) -> tuple[Tensor, Tensor]:
    """r [m] and J [m p] of ``poisson``, scaled, one example at a time."""
    params = {name: p.detach() for name, p in net.named_parameters()}

    def u(θ: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, dict(θ), (x[None],))[0, 0]

    def inside(θ: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return hessian(u, argnums=1)(θ, x).diagonal().sum() + 2 * math.pi**2 * solution(x)[0]

    def outside(θ: Mapping[str, Tensor], x: Tensor) -> Tensor:
        return u(θ, x) - solution(x)[0]

    parts = []
    cases: list[tuple[Callable[..., Tensor], Tensor, float]] = [(inside, grid(n), 1.0), (outside, edges(n), weight)]
    for r, x, w in cases:
        scale = math.sqrt(w / len(x))
        value = vmap(r, in_dims=(None, 0))(params, x)
        rows = jacrev(lambda θ, r=r, x=x: vmap(r, in_dims=(None, 0))(θ, x))(params)
        parts.append((scale * value, scale * torch.cat([t.reshape(len(x), -1) for t in rows.values()], 1)))
    values, jacobians = zip(*parts, strict=True)
    return torch.cat(values).detach(), torch.cat(jacobians).detach()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in net.parameters()])
