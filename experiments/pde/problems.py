"""Differential equations with known solutions: residuals, points, networks, and the error of a network.

Every problem is least squares over classes of residuals, (1/N) Σ r², each with its own points. Points are drawn in
[0, 1]^d unless said otherwise, anew for every step or once; the error is ‖u − u*‖/‖u*‖ on fixed test points.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import final

import torch
from torch import Tensor, nn

import natgrad as ng

Residual = Callable[[nn.Module, Tensor], Tensor]
_TESTS = 9000
_TEST_SEED = 2024


@final
@dataclass(frozen=True)
class Points:
    """How a class of residuals draws its n points: a function of the number, the generator and the device."""

    count: int
    draw: Callable[[int, torch.Generator], Tensor]
    weight: float = 1.0


@final
@dataclass(frozen=True)
class Problem:
    """An equation: its residuals by class, where they are evaluated, the network, and the solution."""

    name: str
    sizes: tuple[int, ...]
    residuals: Mapping[str, tuple[Residual, Points]]
    solution: Callable[[Tensor], Tensor]  # [n d] → [n o]
    inside: Callable[[int, torch.Generator], Tensor]
    fixed: bool = False
    fixed_points: Mapping[str, Tensor] = field(default_factory=dict)  # in place of drawn ones

    def network(self, seed: int, device: str) -> nn.Sequential:
        """A tanh network in double precision, the same for every solver and device."""
        torch.manual_seed(seed)
        layers: list[nn.Module] = []
        for i, o in pairwise(self.sizes):
            layers += [nn.Linear(i, o, dtype=torch.float64), nn.Tanh()]
        return nn.Sequential(*layers[:-1]).to(device)

    def classes(self, seed: int, device: str, factor: float = 1.0) -> tuple[dict[str, ng.Residuals], torch.Generator]:
        """The classes of residuals, with points from a generator of their own, on the CPU.

        ``factor``: how many times as many points as the table of the problems has; those of a grid stay.
        """
        generator = torch.Generator().manual_seed(10_000 + seed)
        out = {}
        for name, (residual, of_table) in self.residuals.items():
            points = replace(of_table, count=max(1, round(factor * of_table.count)))
            once = self.fixed_points.get(name)
            if once is None and self.fixed:
                once = points.draw(points.count, generator)
            if once is not None:
                out[name] = ng.Residuals(residual, once.to(device), weight=points.weight)
            else:
                out[name] = ng.Residuals(residual, _Drawn(points, generator, device), weight=points.weight)
        return out, generator

    def error(self, net: nn.Module, device: str) -> float:
        """‖u − u*‖/‖u*‖ at test points that are never trained on."""
        x = self.inside(_TESTS, torch.Generator().manual_seed(_TEST_SEED)).to(device)
        with torch.no_grad():
            exact = self.solution(x)
            return float((net(x)[:, : exact.shape[1]] - exact).norm() / exact.norm())


@final
@dataclass(frozen=True)
class _Drawn:
    points: Points
    generator: torch.Generator
    device: str

    def __call__(self) -> Tensor:
        return self.points.draw(self.points.count, self.generator).to(self.device)


# Points.


def cube(d: int) -> Callable[[int, torch.Generator], Tensor]:
    """Uniform in [0, 1]^d."""
    return lambda n, generator: torch.rand(n, d, generator=generator, dtype=torch.float64)


def surface(d: int) -> Callable[[int, torch.Generator], Tensor]:
    """Uniform on the 2d faces of the cube."""

    def draw(n: int, generator: torch.Generator) -> Tensor:
        x = torch.rand(n, d, generator=generator, dtype=torch.float64)
        axis = torch.randint(d, (n,), generator=generator)
        side = torch.randint(2, (n,), generator=generator).double()
        x[torch.arange(n), axis] = side
        return x

    return draw


def beside(draw: Callable[[int, torch.Generator], Tensor], t: float | None = None) -> Callable[..., Tensor]:
    """(t, x) with x from ``draw`` and t uniform in [0, 1], or fixed."""

    def with_time(n: int, generator: torch.Generator) -> Tensor:
        x = draw(n, generator)
        time = (
            torch.rand(n, 1, generator=generator, dtype=torch.float64) if t is None else torch.full((n, 1), t).double()
        )
        return torch.cat([time, x], 1)

    return with_time


def box(lows: tuple[float, ...], highs: tuple[float, ...], on_surface: bool = False) -> Callable[..., Tensor]:
    """Uniform in a box, or on its surface."""
    low, high = torch.tensor(lows, dtype=torch.float64), torch.tensor(highs, dtype=torch.float64)
    draw = surface(len(lows)) if on_surface else cube(len(lows))
    return lambda n, generator: low + (high - low) * draw(n, generator)


def grid(n: int) -> Tensor:
    """n² points inside of the unit square, evenly spaced."""
    ticks = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    return torch.cartesian_prod(ticks, ticks)


def edges(n: int) -> Tensor:
    """4n points on the boundary of the unit square, evenly spaced."""
    t = torch.linspace(0, 1, n + 1, dtype=torch.float64)[:-1]
    sides = [(t, 0 * t), (0 * t + 1, t), (1 - t, 0 * t + 1), (0 * t, 1 - t)]
    return torch.cat([torch.stack(side, -1) for side in sides])


# Equations.


def poisson(
    name: str,
    sizes: tuple[int, ...],
    solution: Callable[[Tensor], Tensor],
    source: Callable[[Tensor], Tensor],
    counts: tuple[int, int],
    fixed_points: Mapping[str, Tensor] | None = None,
) -> Problem:
    """Δu = source in the cube, u = solution on its surface."""
    d = sizes[0]
    residuals = {
        "interior": (lambda net, x: ng.pde.laplacian(net, x) - source(x), Points(counts[0], cube(d))),
        "boundary": (lambda net, x: net(x) - solution(x), Points(counts[1], surface(d))),
    }
    return Problem(name, sizes, residuals, solution, cube(d), fixed_points=fixed_points or {})


def sines(x: Tensor) -> Tensor:
    """sin πx · sin πy."""
    return (math.pi * x[:, :1]).sin() * (math.pi * x[:, 1:]).sin()


def cosines(x: Tensor) -> Tensor:
    """Σ_i cos πx_i."""
    return (math.pi * x).cos().sum(-1, keepdim=True)


def products(x: Tensor) -> Tensor:
    """Σ_k x_{2k−1}x_{2k}, which is harmonic."""
    return (x[:, ::2] * x[:, 1::2]).sum(-1, keepdim=True)


def squares(x: Tensor) -> Tensor:
    """‖x‖²."""
    return x.square().sum(-1, keepdim=True)


def heat() -> Problem:
    """∂_t u = ¼Δu in 4 + 1 dimensions, u = e⁻ᵗ Σ sin 2x_i."""

    def solution(x: Tensor) -> Tensor:
        return (-x[:, :1]).exp() * (2 * x[:, 1:]).sin().sum(-1, keepdim=True)

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        u = ng.pde.derivatives(net, x, space=slice(1, None))
        return u.d(0) - 0.25 * u.laplacian

    def given(net: nn.Module, x: Tensor) -> Tensor:
        return net(x) - solution(x)

    residuals = {
        "interior": (equation, Points(3000, cube(5))),
        "boundary": (given, Points(500, beside(surface(4)))),
        "initial": (given, Points(500, beside(cube(4), 0.0))),
    }
    return Problem("heat", (5, 256, 256, 128, 128, 1), residuals, solution, cube(5))


def fokker_planck() -> Problem:
    """The logarithm q of a density with ∂_t p = ½∇·(xp) + Δp in 9 + 1 dimensions, p = N(0, (2 − e⁻ᵗ)·1).

    ∂_t q = 9/2 + ½x·∇q + ‖∇q‖² + Δq for t in [0, 1] and x in [−5, 5]⁹ (Dangel et al. 2024); the initial density is
    given.
    """
    d = 9

    def solution(x: Tensor) -> Tensor:
        variance = 2 - (-x[:, :1]).exp()
        return -0.5 * x[:, 1:].square().sum(-1, keepdim=True) / variance - 0.5 * d * (2 * math.pi * variance).log()

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        q = ng.pde.derivatives(net, x, space=slice(1, None))
        slope = q.gradient[:, 0, 1:]
        drift = 0.5 * (x[:, 1:] * slope).sum(-1, keepdim=True)
        return q.d(0) - 0.5 * d - drift - slope.square().sum(-1, keepdim=True) - q.laplacian

    space = box((-5.0,) * d, (5.0,) * d)
    residuals = {
        "interior": (equation, Points(3000, beside(space))),
        "initial": (lambda net, x: net(x) - solution(x), Points(1000, beside(space, 0.0))),
    }
    return Problem("fokker_planck", (10, 256, 256, 128, 128, 1), residuals, solution, beside(space))


def kovasznay() -> Problem:
    """Stationary flow behind a grid at the Reynolds number 40 (Kovasznay 1948): velocities and pressure."""
    reynolds = 40.0
    rate = reynolds / 2 - math.sqrt(reynolds**2 / 4 + 4 * math.pi**2)

    def solution(x: Tensor) -> Tensor:
        decay, angle = (rate * x[:, 0]).exp(), 2 * math.pi * x[:, 1]
        along, across = 1 - decay * angle.cos(), rate / (2 * math.pi) * decay * angle.sin()
        return torch.stack([along, across, 0.5 * (1 - decay.square())], -1)

    def equation(net: nn.Module, x: Tensor) -> Tensor:
        u = ng.pde.derivatives(net, x)
        velocity, slope = u.value[:, :2], u.gradient
        carried = torch.einsum("nj,nij->ni", velocity, slope[:, :2])
        momentum = carried + slope[:, 2] - u.laplacian[:, :2] / reynolds
        return torch.cat([momentum, (slope[:, 0, 0] + slope[:, 1, 1]).unsqueeze(-1)], -1)

    low, high = (-0.5, -0.5), (1.0, 1.5)
    residuals = {
        "interior": (equation, Points(900, box(low, high))),
        "boundary": (lambda net, x: (net(x) - solution(x))[:, :2], Points(160, box(low, high, on_surface=True))),
        "pressure": (
            lambda net, x: (net(x) - solution(x))[:, 2:],
            Points(1, lambda n, generator: torch.zeros(n, 2).double()),
        ),
    }
    return Problem("kovasznay", (2, 40, 40, 3), residuals, solution, box(low, high), fixed=True)


PROBLEMS: dict[str, Problem] = {
    problem.name: problem
    for problem in (
        poisson(
            "poisson2d",
            (2, 64, 1),
            sines,
            lambda x: -2 * math.pi**2 * sines(x),
            (900, 120),
            {"interior": grid(30), "boundary": edges(30)},
        ),
        poisson("poisson5d", (5, 64, 64, 48, 48, 1), cosines, lambda x: -(math.pi**2) * cosines(x), (3000, 500)),
        poisson("poisson5d_small", (5, 64, 1), cosines, lambda x: -(math.pi**2) * cosines(x), (3000, 500)),
        poisson("poisson10d", (10, 256, 256, 128, 128, 1), products, lambda x: 0 * x[:, :1], (3000, 500)),
        poisson("poisson100d", (100, 768, 768, 512, 512, 1), squares, lambda x: 0 * x[:, :1] + 200, (100, 50)),
        heat(),
        fokker_planck(),
        kovasznay(),
    )
}
