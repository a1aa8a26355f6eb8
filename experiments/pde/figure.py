"""The figure of docs/pde.md: a solution, its error, and the error against seconds, from the logs."""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib
import torch
from matplotlib.figure import Figure

import natgrad as ng
from experiments.pde.problems import PROBLEMS

FIGURE = Path(__file__).resolve().parents[2] / "docs" / "figures" / "pde.svg"
_PIXELS = 64
_COLOURS = {"natgrad": "tab:red", "adam": "tab:gray", "lbfgs": "tab:blue", "engd": "tab:green"}
_TITLES = {
    "natgrad": "ng.LeastSquares",
    "adam": "Adam, best rate",
    "lbfgs": "L-BFGS",
    "engd": "energy natural gradient",
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
    with matplotlib.rc_context({"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "natgrad"}):
        figure = Figure(figsize=(8.4, 2.6), layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=[1, 1, 1.35])
        for axes, values, title in ((left, u, "u(x, y)"), (middle, gap, "|u − sin πx sin πy|")):
            image = axes.imshow(values.tolist(), origin="lower", extent=(0, 1, 0, 1), cmap="viridis")
            figure.colorbar(image, ax=axes, shrink=0.75)
            axes.set_title(title, fontsize=8)
            axes.set_xticks([0, 1])
            axes.set_yticks([0, 1])
        for solver, colour in _COLOURS.items():
            for at, (seconds, errors) in enumerate(curves(results / problem.name, solver)):
                label = _TITLES[solver] if at == 0 else None
                right.semilogy(seconds, errors, color=colour, linewidth=1.0, alpha=0.8, label=label)
        right.set_xlabel("seconds of one core")
        right.set_title("relative L² error", fontsize=8)
        right.legend(frameon=False, fontsize=7)
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, metadata={"Date": None})


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
