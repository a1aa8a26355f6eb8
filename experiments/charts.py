"""The figures of the page on charts: the Bregman divergence of log Z, and mirror descent
(Grosse (2021), section 4.1).

python -m experiments.charts docs/figures
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

import natgrad as ng
from examples.gallery import style
from natgrad.mirror import MeanChart, Move, NaturalChart, Shorten, mirror_step

BLUE, RED, GREY = style.COLOURS["first"], style.COLOURS["second"], style.GREY
NORMAL = ng.families.DiagonalGaussian()
START, GOAL = (-1.0, 0.7), (1.0, 1.0)  # μ and σ


def draw(folder: Path) -> list[Path]:
    """All figures, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    with matplotlib.rc_context(style.LOOK):
        titles = {
            "bregman": "Two convex functions and their tangents",
            "mirror": "Steps that are straight in one chart",
        }
        for name, figure in {"bregman": bregman(), "mirror": mirror()}.items():
            paths.append(folder / f"{name}.svg")
            style.save(figure, paths[-1], titles[name])
    return paths


def bregman() -> Figure:
    """log Z and its tangent, −H and its tangent: the same gap, with swapped arguments."""
    b = ng.families.Bernoulli()
    here, there = (torch.tensor(value, dtype=torch.float64) for value in (-1.1, 1.6))
    eta, xi = torch.linspace(-3.0, 3.0, 61).double(), torch.linspace(0.01, 0.99, 61).double()
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    _gap(left, b.log_partition, b.mean, eta, here, there)
    left.set(xlabel="η", title=r"log Z(η): the gap at η is KL($p_{η'}$ ‖ $p_η$)")
    _labels(left, ("η′", "η"), (here, there))

    def conjugate(xi: Tensor) -> Tensor:
        return b.natural(xi) * xi - b.log_partition(b.natural(xi))

    _gap(right, conjugate, b.natural, xi, b.mean(there), b.mean(here))
    right.set(xlabel="ξ", title="−H(ξ): the gap at ξ′ is the same number")
    _labels(right, ("ξ", "ξ′"), (b.mean(there), b.mean(here)))
    return figure


def _gap(
    ax: Axes, φ: Callable[[Tensor], Tensor], slope: Callable[[Tensor], Tensor], x: Tensor, at: Tensor, far: Tensor
) -> None:
    """φ, its tangent at a point, and the gap between them at another point."""
    tangent = φ(at) + slope(at) * (x - at)
    foot = float(φ(at) + slope(at) * (far - at))
    ax.plot(x.tolist(), φ(x).tolist(), color=BLUE)
    ax.plot(x.tolist(), tangent.tolist(), color=GREY, lw=1)
    ax.plot([float(far)] * 2, [foot, float(φ(far))], color=RED, lw=2.5, solid_capstyle="butt")
    ax.plot([float(at)], [float(φ(at))], "o", color=GREY, ms=4)
    middle = float(far), (foot + float(φ(far))) / 2
    ax.annotate(f"{float(φ(far)) - foot:.3f}", middle, (8, 0), textcoords="offset points", color=RED, va="center")


def _labels(ax: Axes, names: tuple[str, str], at: tuple[Tensor, Tensor]) -> None:
    ax.set_xticks([float(x) for x in at], labels=list(names))
    ax.set_yticks([])


def mirror() -> Figure:
    """Steps that are straight in one chart: up and back in the curve ξ(η), and paths of a Gaussian."""
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.35))
    _staircase(left)
    _paths(right)
    return figure


def _staircase(ax: Axes) -> None:
    """η → ξ(η), a step in ξ, and back, for a Poisson distribution that learns the rate 6."""
    p, eta = ng.families.Poisson(), torch.tensor(0.0, dtype=torch.float64)
    grid = torch.linspace(-0.5, 1.9, 61).double()
    ax.plot(grid.tolist(), p.mean(grid).tolist(), color=BLUE)
    for _ in range(4):
        xi = p.mean(eta)
        new = mirror_step(p, eta, xi - 6.0, 0.4, NaturalChart()).point
        corners = [(eta, xi), (eta, p.mean(new)), (new, p.mean(new))]
        ax.plot([float(x) for x, _ in corners], [float(y) for _, y in corners], color=RED, lw=1)
        ax.plot([float(new)], [float(p.mean(new))], "o", color=RED, ms=3)
        eta = new
    ax.axhline(6.0, color=GREY, lw=1, ls=":")
    ax.set(xlabel="η", ylabel="ξ = ∇log Z(η)", title="gradient in η, step in ξ")


def _paths(ax: Axes) -> None:
    """Four descents of KL(p ‖ q) in the half-plane of mean and deviation."""
    for title, colour, path in _descents():
        ax.plot(*zip(*path, strict=True), "o-", color=colour, ms=2.5, lw=1)
        beside = {RED: (0, 10), GREY: (4, -12)}.get(colour, (6, 6))  # none covers a path
        ax.annotate(title, path[3], beside, textcoords="offset points", color=colour, fontsize=8)
    ax.plot(*GOAL, "*", color=GREY, ms=9)
    ax.set(xlabel="μ", ylabel="σ", title="the same loss, four ways to step", ylim=(0, None))


def _descents() -> list[tuple[str, str, list[tuple[float, float]]]]:
    """Of J = KL(goal ‖ p): mirror descent in both directions, and the plain gradient in both charts."""
    goal = NORMAL.mean(_eta(GOAL))
    natural, mean = NaturalChart(), MeanChart()

    def by_eta(eta: Tensor) -> Tensor:
        return NORMAL.log_partition(eta) - NORMAL.pair(eta, goal)

    def mirrored(eta: Tensor, ω: Tensor) -> Tensor:
        return mirror_step(NORMAL, eta, ω, 0.15, natural).point

    def crossed(eta: Tensor, ω: Tensor) -> Tensor:
        # The gradient in ξ is F⁻¹ω; the step in η is natural gradient.
        move: Move = mirror_step(NORMAL, NORMAL.mean(eta), NORMAL.fisher(eta).sharp(ω), 0.15, mean)
        return NORMAL.natural(move.point)

    def plain(eta: Tensor, ω: Tensor) -> Tensor:
        return eta - 0.3 * Shorten().share(NORMAL.natural_domain, eta, -0.3 * ω, "η") * ω

    def plain_mean(eta: Tensor, ω: Tensor) -> Tensor:
        xi, v = NORMAL.mean(eta), -0.1 * NORMAL.fisher(eta).sharp(ω)
        return NORMAL.natural(xi + Shorten().share(NORMAL.mean_domain, xi, v, "ξ") * v)

    steps: list[tuple[str, str, Callable[[Tensor, Tensor], Tensor]]] = [
        ("∇ in η, step in ξ", RED, mirrored),
        ("∇ in ξ, step in η", BLUE, crossed),
        ("plain gradient in η", GREY, plain),
        ("plain gradient in ξ", style.COLOURS["gradient descent"], plain_mean),
    ]
    return [(title, colour, _path(by_eta, step)) for title, colour, step in steps]


def _path(loss: Callable[[Tensor], Tensor], step: Callable[[Tensor, Tensor], Tensor]) -> list[tuple[float, float]]:
    eta, path = _eta(START), [START]
    for _ in range(25):
        leaf = eta.clone().requires_grad_()
        (ω,) = torch.autograd.grad(loss(leaf), leaf)
        eta = step(eta, ω).detach()
        μ, variance = (float(part) for part in NORMAL.covariance_form(eta))
        path.append((μ, variance**0.5))
    return path


def _eta(form: tuple[float, float]) -> Tensor:
    μ, σ = (torch.tensor([value], dtype=torch.float64) for value in form)
    return NORMAL.from_covariance(μ, σ**2)


def main(arguments: list[str] | None = None) -> Any:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the figures go")
    for path in draw(parser.parse_args(arguments).folder):
        print(f"{path} {path.stat().st_size // 1000} kB")


if __name__ == "__main__":
    main()
