"""One style for all pictures: a method has the same colour everywhere, and its name stands at the end of its line.

There is no background, and text is grey, so that a picture can be read on a light and on a dark page.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from natgrad.cli.colours import COLOURS as METHODS
from natgrad.cli.colours import GREY as GREY

# Two of a kind: coordinates, parametrisations, models.
COLOURS = {**METHODS, "first": METHODS["AdamW"], "second": METHODS["ng.Natural"]}


def size(full: int, quick: int) -> int:
    """A number of steps or examples: the tests set GALLERY=quick, and want to see the script run to its end."""
    return quick if os.environ.get("GALLERY") == "quick" else full


def figure(columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """An empty figure in this style, and its axes row by row."""
    torch.manual_seed(0)
    plt.rcParams.update(
        {
            "axes.edgecolor": GREY,
            "axes.facecolor": "none",
            "axes.labelcolor": GREY,
            "axes.spines.right": False,
            "axes.spines.top": False,
            "axes.titlecolor": GREY,
            "axes.titlesize": 11,
            "figure.facecolor": "none",
            "font.size": 10,
            "lines.linewidth": 1.8,
            "savefig.facecolor": "none",
            "svg.fonttype": "none",
            "svg.hashsalt": "natgrad",
            "text.color": GREY,
            "xtick.color": GREY,
            "ytick.color": GREY,
        }
    )
    made, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    return made, list(axes.flat)


Line = tuple[Tensor | Sequence[float], Tensor | Sequence[float]]


def curves(ax: Axes, lines: Mapping[str, Line], labels: Mapping[str, str] = MappingProxyType({})) -> None:
    """Draw named lines x, y; every name (or label) stands at the end of its line, above another that is too near."""
    ends: list[tuple[float, float, str]] = []
    for name, (x, y) in lines.items():
        xs, ys = torch.as_tensor(x).detach(), torch.as_tensor(y).detach()
        ax.plot(xs, ys, color=COLOURS[name])
        ends.append((float(xs[-1]), float(ys[-1]), name))
    ax.margins(x=0.02)
    ax.figure.canvas.draw()
    places: list[tuple[float, float, str]] = []
    for x_end, y_end, name in ends:
        right, height = ax.transData.transform((x_end, y_end))
        places.append((float(right), float(height), name))
    above = -1e9
    for right, height, name in sorted(places, key=lambda place: place[1]):
        above = max(height, above + 13)
        u, v = map(float, ax.transAxes.inverted().transform((right, above)))
        ax.text(
            u + 0.02, v, labels.get(name, name), color=COLOURS[name], transform=ax.transAxes, va="center", fontsize=9
        )


def path(ax: Axes, points: Tensor | list[Tensor], name: str, label: tuple[float, float] | None = None) -> None:
    """Draw the iterates of a method [k 2] as dots that are joined, with its name at a place of the picture."""
    xy = torch.stack(list(points)).detach()
    ax.plot(xy[:, 0], xy[:, 1], marker="o", ms=3, lw=1.2, color=COLOURS[name])
    if label is not None:
        ax.annotate(name, label, color=COLOURS[name], fontsize=9)


def arrow(ax: Axes, start: Tensor, by: Tensor, name: str, text: str = "", offset: tuple[float, float] = (4, 4)) -> None:
    """Draw a vector at a point, with a word at its tip."""
    colour = COLOURS.get(name, GREY)
    tip = start + by
    props = {"arrowstyle": "-|>", "color": colour, "lw": 1.8, "shrinkA": 0, "shrinkB": 0}
    ax.annotate("", (float(tip[0]), float(tip[1])), (float(start[0]), float(start[1])), arrowprops=props)
    ax.annotate(
        text or name, (float(tip[0]), float(tip[1])), offset, textcoords="offset points", color=colour, fontsize=9
    )
