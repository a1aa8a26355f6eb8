"""One pass over a stream of data: mirror descent meets the Cramér–Rao bound, SGD and Adam do not
(Grosse (2021), section 4.2).

    python -m experiments.online_mle experiments/results/online_mle

Every estimator starts from the same first data and sees every other datum once. Its error is measured in the Fisher
metric, k E‖ξ_k − ξ‖²/p: no unbiased estimator is below 1. SGD and Adam work in unconstrained coordinates (logarithms of
positive parameters), with the best of several rates and schedules by their final error.
"""

from __future__ import annotations

import argparse
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import final

import matplotlib
import torch
from matplotlib.figure import Figure
from torch import Tensor

import natgrad as ng
from examples.gallery import style
from natgrad.errors import DomainError
from natgrad.families import ExponentialFamily

RATES = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0)


class Problem(ABC):
    """A distribution to be learned, and the unconstrained coordinates u in which SGD and Adam work."""

    title: str
    family: ExponentialFamily

    @property
    @abstractmethod
    def eta(self) -> Tensor:
        """η of the true distribution."""

    @abstractmethod
    def natural(self, u: Tensor) -> Tensor:
        """η(u)."""

    @abstractmethod
    def free(self, eta: Tensor) -> Tensor:
        """u(η)."""

    @abstractmethod
    def data(self, x: Tensor) -> Tensor:
        """Numbers [… replica] in the shape that the family takes."""


@final
class Gamma(Problem):
    """Shape 3 and rate 20; u are their logarithms."""

    title, family = "gamma, shape 3, rate 20", ng.families.Gamma()

    @property
    def eta(self) -> Tensor:
        return torch.tensor([2.0, -20.0], dtype=torch.float64)

    def natural(self, u: Tensor) -> Tensor:
        shape, rate = u.exp().unbind(-1)
        return torch.stack([shape - 1, -rate], -1)

    def free(self, eta: Tensor) -> Tensor:
        return torch.stack([eta[..., 0] + 1, -eta[..., 1]], -1).log()

    def data(self, x: Tensor) -> Tensor:
        return x


@final
class Gaussian(Problem):
    """N(3, 0.1²); u = (μ, log σ)."""

    title, family = "Gaussian, μ = 3, σ = 0.1", ng.families.DiagonalGaussian()

    @property
    def eta(self) -> Tensor:
        return self.natural(torch.tensor([3.0, math.log(0.1)], dtype=torch.float64))

    def natural(self, u: Tensor) -> Tensor:
        λ = (-2 * u[..., 1]).exp()
        return torch.stack([u[..., 0] * λ, λ], -1)

    def free(self, eta: Tensor) -> Tensor:
        h, λ = eta.unbind(-1)
        return torch.stack([h / λ, -0.5 * λ.log()], -1)

    def data(self, x: Tensor) -> Tensor:
        return x.unsqueeze(-1)


@final
@dataclass(frozen=True)
class Stream:
    """Data [k replica], how many of them the initial estimate uses, and when the error is measured."""

    x: Tensor
    first: int

    @property
    def looks(self) -> list[int]:
        n = len(self.x)
        even = [round(self.first * (n / self.first) ** (i / 24)) for i in range(25)]
        return sorted({min(n, max(self.first + 1, k)) for k in even})


class Estimator(ABC):
    """An estimator that sees one datum at a time."""

    @abstractmethod
    def estimates(self, problem: Problem, stream: Stream) -> Iterator[Tensor]:
        """η [replica p] after every datum."""


@final
@dataclass(frozen=True)
class Mirror(Estimator):
    """``ng.MirrorDescent`` with lr = 1/(k + 1)."""

    def estimates(self, problem: Problem, stream: Stream) -> Iterator[Tensor]:
        member = ng.mirror.Member(problem.family, problem.family.fit(problem.data(stream.x[: stream.first])))
        opt = ng.MirrorDescent([member])
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (stream.first + k + 1))
        for x in stream.x[stream.first :]:
            opt.zero_grad()
            (-problem.family.log_prob(member.natural(), problem.data(x))).sum().backward()
            opt.step()
            schedule.step()
            yield member.natural().detach()


@final
@dataclass(frozen=True)
class Plain(Estimator):
    """A torch optimizer in the coordinates u; its rate falls as k^−power."""

    optimizer: type[torch.optim.SGD] | type[torch.optim.Adam]
    lr: float
    power: float

    def estimates(self, problem: Problem, stream: Stream) -> Iterator[Tensor]:
        eta = problem.family.fit(problem.data(stream.x[: stream.first]))
        u = problem.free(eta).requires_grad_()
        opt = self.optimizer([u], lr=self.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: (1 + k / stream.first) ** -self.power)
        for x in stream.x[stream.first :]:
            opt.zero_grad()
            (-problem.family.log_prob(problem.natural(u), problem.data(x))).sum().backward()
            opt.step()
            schedule.step()
            yield problem.natural(u.detach())


@final
@dataclass(frozen=True)
class Curve:
    """k E‖ξ_k − ξ‖²/p over time, for the best settings of an estimator."""

    problem: str
    arm: str
    settings: str
    looks: list[int]
    error: list[float]


def measure(problem: Problem, arm: Estimator, stream: Stream) -> list[float]:
    """The error over time; infinite once the estimator has left the family."""
    family, errors = problem.family, []
    xi, F = family.mean(problem.eta), family.fisher_mean(family.mean(problem.eta))
    try:
        for k, eta in enumerate(arm.estimates(problem, stream), stream.first + 1):
            if k in stream.looks:
                δ = family.mean(eta) - xi
                errors.append(float((δ * F.flat(δ)).sum(-1).mean()) * k / xi.numel())
    except DomainError:
        errors += [math.inf] * (len(stream.looks) - len(errors))
    return errors


def curves(problem: Problem, stream: Stream, rates: tuple[float, ...]) -> list[Curve]:
    """The curves of all estimators, with their best settings."""
    looks = stream.looks
    best = [Curve(problem.title, "mirror descent", "lr = 1/(k + 1)", looks, measure(problem, Mirror(), stream))]
    optimizers: list[type[torch.optim.SGD] | type[torch.optim.Adam]] = [torch.optim.SGD, torch.optim.Adam]
    for kind in optimizers:
        tried = []
        for power in (0.0, 0.5, 1.0):
            for lr in rates:
                error = measure(problem, Plain(kind, lr, power), stream)
                settings = f"lr = {lr:g} (k/{stream.first})^−{power:g}"
                tried.append(Curve(problem.title, kind.__name__, settings, looks, error))
        best.append(min(tried, key=lambda curve: curve.error[-1]))
    return best


def draw(found: list[Curve], path: Path) -> None:
    """One panel per problem."""
    problems = list(dict.fromkeys(curve.problem for curve in found))
    methods = {"mirror descent": "natural gradient", "SGD": "gradient descent", "Adam": "AdamW"}
    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(4.8 * len(problems), 3.2), layout="constrained")
        for ax, problem in zip(figure.subplots(1, len(problems), squeeze=False).flatten(), problems, strict=True):
            for curve in (c for c in found if c.problem == problem):
                ax.plot(curve.looks, curve.error, label=curve.arm, color=style.COLOURS[methods.get(curve.arm, "exact")])
            ax.axhline(1.0, color=style.GREY, lw=1, ls=":", label="_")
            ax.set(xscale="log", yscale="log", title=problem, xlabel="data seen, k")
            style.name_lines(ax)
        figure.supylabel("error / Cramér–Rao bound")
        style.save(figure, path, "Error over the Cramér–Rao bound against data seen")


def study(steps: int, replicas: int, rates: tuple[float, ...] = RATES) -> list[Curve]:
    """Both problems."""
    found = []
    for problem in (Gamma(), Gaussian()):
        x = problem.family.sample(problem.eta, (steps, replicas), torch.Generator().manual_seed(0))
        found += curves(problem, Stream(x.reshape(steps, replicas), first=10), rates)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the record and the plot go")
    parser.add_argument("--data", type=int, default=1000, help="of a stream")
    parser.add_argument("--replicas", type=int, default=400, help="streams that are averaged")
    given = parser.parse_args(arguments)
    folder: Path = given.folder
    folder.mkdir(parents=True, exist_ok=True)
    found = study(given.data, given.replicas)
    (folder / "record.json").write_text(json.dumps([asdict(c) for c in found], indent=1, ensure_ascii=False) + "\n")
    draw(found, folder / "efficiency.svg")
    for curve in found:
        print(f"{curve.problem:28}{curve.arm:16}{curve.settings:20}{curve.error[-1]:8.2f} times the bound")


if __name__ == "__main__":
    main()
