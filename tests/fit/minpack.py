"""The problems of Moré, Garbow and Hillstrom (1981), with their starting points and the sums of squares at minima."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def steps(first: int, last: int) -> Tensor:
    return torch.arange(first, last + 1, dtype=torch.float64)


@final
@dataclass(frozen=True)
class Problem:
    fun: Callable[[Tensor], Tensor]
    x0: Tensor
    minima: tuple[float, ...]  # Σ f², where a good method may end


def stack(*parts: Tensor) -> Tensor:
    return torch.stack(parts)


def helical(x: Tensor) -> Tensor:
    angle = torch.atan2(x[1], x[0]) / (2 * math.pi)
    angle = torch.where((x[0] < 0) & (x[1] < 0), angle + 1, angle)
    return stack(10 * (x[2] - 10 * angle), 10 * (torch.hypot(x[0], x[1]) - 1), x[2])


BARD = numbers(0.14, 0.18, 0.22, 0.25, 0.29, 0.32, 0.35, 0.39, 0.37, 0.58, 0.73, 0.96, 1.34, 2.10, 4.39)
GAUSS = numbers(
    *(0.0009, 0.0044, 0.0175, 0.0540, 0.1295, 0.2420, 0.3521, 0.3989),
    *(0.3521, 0.2420, 0.1295, 0.0540, 0.0175, 0.0044, 0.0009),
)
MEYER = numbers(
    *(34780, 28610, 23650, 19630, 16370, 13720, 11540, 9744),
    *(8261, 7030, 6005, 5147, 4427, 3820, 3307, 2872),
)
KOWALIK = numbers(0.1957, 0.1947, 0.1735, 0.1600, 0.0844, 0.0627, 0.0456, 0.0342, 0.0323, 0.0235, 0.0246)
TIMES = numbers(4, 2, 1, 0.5, 0.25, 0.167, 0.125, 0.1, 0.0833, 0.0714, 0.0625)
OSBORNE = numbers(
    *(0.844, 0.908, 0.932, 0.936, 0.925, 0.908, 0.881, 0.850, 0.818, 0.784, 0.751, 0.718, 0.685, 0.658, 0.628, 0.603),
    *(0.580, 0.558, 0.538, 0.522, 0.506, 0.490, 0.478, 0.467, 0.457, 0.448, 0.438, 0.431, 0.424, 0.420, 0.414, 0.411),
    0.406,
)


def bard(x: Tensor) -> Tensor:
    u, v = steps(1, 15), 16 - steps(1, 15)
    return BARD - (x[0] + u / (v * x[1] + torch.minimum(u, v) * x[2]))


def gulf(x: Tensor) -> Tensor:
    t = steps(1, 99) / 100
    return torch.exp(-((25 + (-50 * t.log()) ** (2 / 3) - x[1]).abs() ** x[2]) / x[0]) - t


def box(x: Tensor) -> Tensor:
    t = 0.1 * steps(1, 10)
    return torch.exp(-t * x[0]) - torch.exp(-t * x[1]) - x[2] * (torch.exp(-t) - torch.exp(-10 * t))


def powell(x: Tensor) -> Tensor:
    a, b, c, d = x.view(-1, 4).unbind(1)
    return torch.cat([a + 10 * b, 5**0.5 * (c - d), (b - 2 * c) ** 2, 10**0.5 * (a - d) ** 2])


def wood(x: Tensor) -> Tensor:
    a, b, c, d = x
    return stack(
        *(10 * (b - a**2), 1 - a, 90**0.5 * (d - c**2), 1 - c, 10**0.5 * (b + d - 2)),
        (b - d) / 10**0.5,
    )


def kowalik(x: Tensor) -> Tensor:
    return KOWALIK - x[0] * (TIMES**2 + TIMES * x[1]) / (TIMES**2 + TIMES * x[2] + x[3])


def brown_dennis(x: Tensor) -> Tensor:
    t = steps(1, 20) / 5
    return (x[0] + t * x[1] - t.exp()) ** 2 + (x[2] + x[3] * t.sin() - t.cos()) ** 2


def biggs(x: Tensor) -> Tensor:
    t = 0.1 * steps(1, 13)
    y = torch.exp(-t) - 5 * torch.exp(-10 * t) + 3 * torch.exp(-4 * t)
    return x[2] * torch.exp(-t * x[0]) - x[3] * torch.exp(-t * x[1]) + x[5] * torch.exp(-t * x[4]) - y


def watson(x: Tensor) -> Tensor:
    t, j = (steps(1, 29) / 29).unsqueeze(1), torch.arange(len(x), dtype=torch.float64)
    derivative = (j[1:] * x[1:] * t ** (j[1:] - 1)).sum(1)
    return torch.cat([derivative - (x * t**j).sum(1) ** 2 - 1, x[:1], (x[1] - x[0] ** 2 - 1).view(1)])


def rosenbrock(x: Tensor) -> Tensor:
    return torch.cat([10 * (x[1::2] - x[::2] ** 2), 1 - x[::2]])


def penalty(x: Tensor) -> Tensor:
    return torch.cat([1e-5**0.5 * (x - 1), (x.square().sum() - 0.25).view(1)])


def penalty_two(x: Tensor) -> Tensor:
    n, a = len(x), 1e-5**0.5
    y = torch.exp(steps(2, n) / 10) + torch.exp(steps(1, n - 1) / 10)
    rising = a * (torch.exp(x[1:] / 10) + torch.exp(x[:-1] / 10) - y)
    level = a * (torch.exp(x[1:] / 10) - math.exp(-0.1))
    weights = torch.arange(n, 0, -1, dtype=torch.float64)
    return torch.cat([x[:1] - 0.2, rising, level, ((weights * x**2).sum() - 1).view(1)])


def variable(x: Tensor) -> Tensor:
    total = (steps(1, len(x)) * (x - 1)).sum()
    return torch.cat([x - 1, stack(total, total**2)])


def trigonometric(x: Tensor) -> Tensor:
    n = len(x)
    return n - x.cos().sum() + steps(1, n) * (1 - x.cos()) - x.sin()


def almost_linear(x: Tensor) -> Tensor:
    n = len(x)
    return torch.cat([x[:-1] + x.sum() - (n + 1), (x.prod() - 1).view(1)])


def neighbours(x: Tensor) -> tuple[Tensor, Tensor]:
    zero = x.new_zeros(1)
    return torch.cat([zero, x[:-1]]), torch.cat([x[1:], zero])


def boundary_value(x: Tensor) -> Tensor:
    h = 1 / (len(x) + 1)
    left, right = neighbours(x)
    return 2 * x - left - right + h**2 * (x + h * steps(1, len(x)) + 1) ** 3 / 2


def integral_equation(x: Tensor) -> Tensor:
    h = 1 / (len(x) + 1)
    t = h * steps(1, len(x))
    cubes = (x + t + 1) ** 3
    below, above = (t * cubes).cumsum(0), ((1 - t) * cubes).flip(0).cumsum(0).flip(0) - (1 - t) * cubes
    return x + h * ((1 - t) * below + t * above) / 2


def tridiagonal(x: Tensor) -> Tensor:
    left, right = neighbours(x)
    return (3 - 2 * x) * x - left - 2 * right + 1


def banded(x: Tensor) -> Tensor:
    i = torch.arange(len(x))
    near = ((i - i[:, None]) >= -5) & ((i - i[:, None]) <= 1) & (i != i[:, None])
    return x * (2 + 5 * x**2) + 1 - near.double() @ (x * (1 + x))


def linear(x: Tensor) -> Tensor:
    share = 2 * x.sum() / 10 + 1
    return torch.cat([x - share, -share.expand(10 - len(x))])


def rank_one(x: Tensor) -> Tensor:
    return steps(1, 10) * (steps(1, len(x)) * x).sum() - 1


def rank_one_with_zeros(x: Tensor) -> Tensor:
    inner = steps(1, 8) * (steps(2, len(x) - 1) * x[1:-1]).sum() - 1
    return torch.cat([-torch.ones_like(inner[:1]), inner, -torch.ones_like(inner[:1])])


def chebyquad(x: Tensor) -> Tensor:
    n, z = len(x), 2 * x - 1
    before, here, means = torch.ones_like(z), z, []
    for k in range(1, n + 1):
        means.append(here.mean() + (1 / (k * k - 1) if k % 2 == 0 else 0.0))
        before, here = here, 2 * z * here - before
    return stack(*means)


PROBLEMS: dict[str, Problem] = {
    "Rosenbrock": Problem(rosenbrock, numbers(-1.2, 1), (0.0,)),
    "Freudenstein and Roth": Problem(
        lambda x: stack(
            -13 + x[0] + ((5 - x[1]) * x[1] - 2) * x[1],
            -29 + x[0] + ((x[1] + 1) * x[1] - 14) * x[1],
        ),
        numbers(0.5, -2),
        (0.0, 48.984253679240013),
    ),
    "Powell, badly scaled": Problem(
        lambda x: stack(1e4 * x[0] * x[1] - 1, torch.exp(-x[0]) + torch.exp(-x[1]) - 1.0001), numbers(0, 1), (0.0,)
    ),
    "Brown, badly scaled": Problem(lambda x: stack(x[0] - 1e6, x[1] - 2e-6, x[0] * x[1] - 2), numbers(1, 1), (0.0,)),
    "Beale": Problem(lambda x: numbers(1.5, 2.25, 2.625) - x[0] * (1 - x[1] ** steps(1, 3)), numbers(1, 1), (0.0,)),
    "Jennrich and Sampson": Problem(
        lambda x: 2 + 2 * steps(1, 10) - torch.exp(steps(1, 10) * x[0]) - torch.exp(steps(1, 10) * x[1]),
        numbers(0.3, 0.4),
        (124.36218235561473,),
    ),
    "helical valley": Problem(helical, numbers(-1, 0, 0), (0.0,)),
    "Bard": Problem(bard, numbers(1, 1, 1), (8.2148773065789727e-3, 17.428693383)),
    "Gaussian": Problem(
        lambda x: x[0] * torch.exp(-x[1] * ((8 - steps(1, 15)) / 2 - x[2]) ** 2 / 2) - GAUSS,
        numbers(0.4, 1, 0),
        (1.1279327696188716e-8,),
    ),
    "Meyer": Problem(
        lambda x: x[0] * torch.exp(x[1] / (45 + 5 * steps(1, 16) + x[2])) - MEYER,
        numbers(0.02, 4000, 250),
        (87.945855171018046,),
    ),
    "Gulf": Problem(gulf, numbers(5, 2.5, 0.15), (0.0,)),
    "box": Problem(box, numbers(0, 10, 20), (0.0,)),
    "Powell, singular": Problem(powell, numbers(3, -1, 0, 1), (0.0,)),
    "Wood": Problem(wood, numbers(-3, -1, -3, -1), (0.0,)),
    "Kowalik and Osborne": Problem(kowalik, numbers(0.25, 0.39, 0.415, 0.39), (3.0750560384923e-4, 1.0273e-3)),
    "Brown and Dennis": Problem(brown_dennis, numbers(25, 5, -5, -1), (85822.201626356270,)),
    "Osborne": Problem(
        lambda x: (
            OSBORNE - x[0] - x[1] * torch.exp(-10 * steps(0, 32) * x[3]) - x[2] * torch.exp(-10 * steps(0, 32) * x[4])
        ),
        numbers(0.5, 1.5, -1, 0.01, 0.02),
        (5.4648946975e-5,),
    ),
    "Biggs": Problem(biggs, numbers(1, 2, 1, 1, 1, 1), (0.0, 5.6556499255e-3)),
    "Watson": Problem(watson, torch.zeros(6, dtype=torch.float64), (2.2876700536e-3,)),
    "Watson, 9": Problem(watson, torch.zeros(9, dtype=torch.float64), (1.3997601382e-6,)),
    "extended Rosenbrock": Problem(rosenbrock, numbers(-1.2, 1).repeat(10), (0.0,)),
    "extended Powell": Problem(powell, numbers(3, -1, 0, 1).repeat(3), (0.0,)),
    "penalty": Problem(penalty, numbers(1, 2, 3, 4), (2.2499775008999e-5,)),
    "second penalty": Problem(penalty_two, torch.full((4,), 0.5, dtype=torch.float64), (9.3762930917e-6,)),
    "variably dimensioned": Problem(variable, 1 - steps(1, 10) / 10, (0.0,)),
    "trigonometric": Problem(trigonometric, torch.full((10,), 0.1, dtype=torch.float64), (0.0, 2.7950616e-5)),
    "Brown, almost linear": Problem(almost_linear, torch.full((10,), 0.5, dtype=torch.float64), (0.0, 1.0)),
    "boundary value": Problem(boundary_value, steps(1, 10) / 11 * (steps(1, 10) / 11 - 1), (0.0,)),
    "integral equation": Problem(integral_equation, steps(1, 10) / 11 * (steps(1, 10) / 11 - 1), (0.0,)),
    "Broyden, tridiagonal": Problem(tridiagonal, -torch.ones(10, dtype=torch.float64), (0.0,)),
    "Broyden, banded": Problem(banded, -torch.ones(10, dtype=torch.float64), (0.0,)),
    "linear": Problem(linear, torch.ones(5, dtype=torch.float64), (5.0,)),
    "linear, rank 1": Problem(rank_one, torch.ones(5, dtype=torch.float64), (90 / 42,)),
    "linear, rank 1 with zeros": Problem(rank_one_with_zeros, torch.ones(5, dtype=torch.float64), (124 / 34,)),
    "Chebyshev": Problem(chebyquad, steps(1, 8) / 9, (3.5168737256779e-3,)),
}
