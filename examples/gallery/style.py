"""One style for all pictures: a method has the same colour everywhere, and its name stands at the end of its line.

There is no background, and text is grey, so that a picture can be read on a light and on a dark page.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from natgrad.cli.colours import COLOURS as METHODS
from natgrad.cli.colours import GREY as GREY

# The methods of the command line, others of the races, and two of a kind: coordinates, parametrisations, models.
OTHERS = {"SOAP": "#a8763e", "KL-Shampoo": "#7f8f1f"}
COLOURS = {**METHODS, **OTHERS, "first": METHODS["AdamW"], "second": METHODS["ng.Natural"]}


def size(full: int, quick: int) -> int:
    """A number of steps or examples: the tests set GALLERY=quick, and want to see the script run to its end."""
    return quick if os.environ.get("GALLERY") == "quick" else full


# What every picture looks like: of the gallery, and, inside `matplotlib.rc_context(style.LOOK)`, of the documents.
LOOK: Any = {
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


def figure(columns: int = 1, rows: int = 1, width: float = 4.2, height: float = 3.2) -> tuple[Figure, list[Axes]]:
    """An empty figure in this style, and its axes row by row."""
    torch.manual_seed(0)
    plt.rcParams.update(LOOK)
    made, axes = plt.subplots(
        rows, columns, figsize=(width * columns, height * rows), squeeze=False, layout="constrained"
    )
    return made, list(axes.flat)


def save(drawn: Figure, path: Path, title: str) -> None:
    """Write a figure of a document as SVG, with a title for screen readers; equal figures are equal files.

    Hundredths of a point are seen by nobody, but labels keep their digits.
    """
    text = io.StringIO()
    drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None, "Title": title})
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(re.sub(r"<[^>]*>", lambda tag: re.sub(r"(\d\.\d\d)\d+", r"\1", tag[0]), text.getvalue()))


Line = tuple[Tensor | Sequence[float], Tensor | Sequence[float]]


def curves(ax: Axes, lines: Mapping[str, Line], labels: Mapping[str, str] = MappingProxyType({})) -> None:
    """Draw named lines x, y; every name (or label) stands at the end of its line."""
    for name, (x, y) in lines.items():
        xs, ys = torch.as_tensor(x).detach(), torch.as_tensor(y).detach()
        ax.plot(xs, ys, color=COLOURS[name], label=labels.get(name, name))
    name_lines(ax)


def name_lines(ax: Axes) -> None:
    """Write the label of every line at its end, above another label that it would cover."""
    drawn: Any = ax.get_figure(root=True)
    drawn.draw_without_rendering()
    size = 0.9 * plt.rcParams["font.size"]
    pixels = drawn.dpi / 72
    ends: list[tuple[float, float, tuple[float, float], Line2D]] = []
    for line in ax.get_lines():
        if not str(line.get_label()).startswith("_"):
            xy = torch.as_tensor(line.get_xydata())
            x, y = xy[xy.isfinite().all(1)][-1].tolist()
            right, height = ax.transData.transform((x, y)) / pixels
            ends.append((float(height), float(right), (x, y), line))
    taken: list[tuple[float, float, float]] = []
    for height, left, end, line in sorted(ends, key=lambda row: row[0]):
        name, above = str(line.get_label()), height
        right = left + 0.6 * size * len(name)
        for low, start, stop in taken:
            if start < right and left < stop:
                above = max(above, low + 1.25 * size)
        taken.append((above, left, right))
        at: Any = {
            "xytext": (4, above - height),
            "textcoords": "offset points",
            "va": "center",
            "annotation_clip": False,
        }
        ax.annotate(name, end, color=line.get_color(), fontsize=size, **at)


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
