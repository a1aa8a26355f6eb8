"""The figure of docs/pde.md: a solution, its error, and the error against seconds, from the logs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

import natgrad as ng
from examples.gallery import style
from experiments.pde.problems import PROBLEMS

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "pde.svg"
_PIXELS = 64
# The method of the style and the words at the line.
_SOLVERS = {
    "natgrad": ("Gauss–Newton", "ng.LeastSquares"),
    "adam": ("AdamW", "Adam, best rate"),
    "lbfgs": ("L-BFGS", "L-BFGS"),
    "engd": ("natural gradient", "energy natural gradient"),
}


def draw(results: Path, path: Path = FIGURE, *, steps: int = 150) -> None:
    """Solve the first problem once more for the pictures, and draw the curves of the logs beside them."""
    problem = PROBLEMS["poisson2d"]
    net = problem.network(0, "cpu")
    ng.LeastSquares(problem.classes(0, "cpu")[0], net).solve(max_steps=steps)
    ticks = (torch.arange(_PIXELS, dtype=torch.float64) + 0.5) / _PIXELS
    x = torch.cartesian_prod(ticks, ticks)
    with torch.no_grad():
        u = net(x).view(_PIXELS, _PIXELS).T
        gap = (u - problem.solution(x).view(_PIXELS, _PIXELS).T).abs()
    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(10.4, 3.2), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.35])
        for axes, values, title in ((left, u, "u(x, y)"), (middle, gap, "|u − sin πx sin πy|")):
            image = axes.imshow(values.tolist(), origin="lower", extent=(0, 1, 0, 1), cmap="viridis")
            figure.colorbar(image, ax=axes, shrink=0.75)
            axes.set_title(title)
            axes.set_xticks([0, 1])
            axes.set_yticks([0, 1])
        for solver, (method, label) in _SOLVERS.items():
            for at, (seconds, errors) in enumerate(curves(results / problem.name, solver)):
                look = {"color": style.COLOURS[method], "label": None if at else label}
                right.semilogy(seconds, errors, linewidth=1.0, alpha=0.8, **look)
        right.set_xlabel("seconds of one core")
        right.set_title("relative L² error (lower is better)")
        style.name_lines(right)
        style.save(figure, path, "A solution, its error, and the error against seconds")


def curves(folder: Path, solver: str) -> list[tuple[list[float], list[float]]]:
    """Seconds and errors of every seed of a solver, at the rate that ends best."""
    by_rate: dict[str, list[tuple[list[float], list[float]]]] = {}
    for path in sorted(folder.glob(f"{solver}*.jsonl")):
        head, *lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        looks = [line for line in lines if "error" in line]
        if head["solver"] == solver and looks:
            curve = [line["seconds"] for line in looks], [line["error"] for line in looks]
            by_rate.setdefault(str(head["rate"]), []).append(curve)
    return min(by_rate.values(), key=lambda runs: min(min(errors) for _, errors in runs), default=[])
