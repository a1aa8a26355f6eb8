"""Which power of the metric? A quadratic with noisy gradients, solved exactly; and the figure that shows it.

    python -m experiments.powers docs/figures

The loss is ½ Σ_i h_i e_i² with h_i = i^-3/2, from e_i = 1. The gradient of a batch of B examples has noise of
covariance H/B, as a Fisher metric says. A step with the power p is e ← e − η_t H^-p (He + ξ), so that

    E e_i² ← (1 − η_t h_i^{1−p})² E e_i² + η_t² h_i^{1−2p}/B.

η_t warms up over 5 % of the steps and falls to 10 % along a cosine; its maximum is the best of a fine grid, for every p
and B by itself. Nothing is sampled.
"""

from __future__ import annotations

import argparse
import math
from functools import cache
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from examples.gallery import style
from experiments.files import markdown_table

SIZE, STEPS = 400, 300
BATCHES = (1, 10, 100, 1000)
POWERS = tuple(k / 16 for k in range(17))
# From the colour of gradient descent to that of the natural gradient.
SHADES = (style.COLOURS["gradient descent"], "#8f809a", "#a9798a", "#c97660", style.COLOURS["natural gradient"])


def schedule(step: int, steps: int = STEPS) -> float:
    """The learning rate of a step over its maximum."""
    return min(1.0, (step + 1) / (0.05 * steps)) * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))


def expected(squares: Tensor, h: Tensor, η: Tensor, power: float, batch: float) -> Tensor:
    """E e² after a step, from E e² before it.

    >>> one = torch.ones(1)
    >>> expected(one, one, 0.5 * one, 1.0, 4.0)  # ¼ + ¼/4
    tensor([0.3125])
    """
    return (1 - η * h ** (1 - power)).square() * squares + η.square() * h ** (1 - 2 * power) / batch


@cache
def remaining(power: float, batch: float) -> float:
    """The expected loss after all steps, over that at the start, with the best learning rate.

    >>> remaining(0.5, 1) < min(remaining(0.0, 1), remaining(1.0, 1))
    True
    >>> remaining(1.0, 1000) < remaining(0.25, 1000)
    True
    """
    h = torch.arange(1, SIZE + 1, dtype=torch.float64) ** -1.5
    rates = torch.logspace(-5, 1, 121, dtype=torch.float64)[:, None]
    squares = torch.ones(len(rates), SIZE, dtype=torch.float64)
    for step in range(STEPS):
        squares = expected(squares, h, rates * schedule(step), power, batch)
    losses = (h * squares).sum(1) / h.sum()
    return float(losses.nan_to_num(nan=math.inf).min())


def best(batch: float) -> float:
    """The power, among sixteenths, with the smallest loss at the end.

    >>> best(1) < best(100)
    True
    """
    return min(POWERS, key=lambda power: remaining(power, batch))


def worse(power: float, batch: float) -> str:
    """The loss that a power leaves over that of the best power."""
    return f"{remaining(power, batch) / remaining(best(batch), batch):.2f}"


def table() -> str:
    """The best power for every batch, and what other powers cost."""
    head = ["examples in a batch", "best power", "p = 0", "p = ½", "p = ¾", "p = 1"]
    powers = (0.0, 0.5, 0.75, 1.0)
    rows = ([f"{batch}", f"{best(batch):g}", *(worse(power, batch) for power in powers)] for batch in BATCHES)
    return markdown_table(head, rows)


def draw(folder: Path) -> Path:
    """The figure, as SVG."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "powers.svg"
    with matplotlib.rc_context(style.LOOK):
        figure = Figure(figsize=(10.4, 3.4), layout="constrained")
        left, middle, right = figure.subplots(1, 3)
        _balls(left)
        _noise(middle)
        _ends(right)
        style.save(figure, path, "Unit balls of powers of a metric; the noise of a step; the loss after many steps")
    return path


def _balls(ax: Axes) -> None:
    """Unit balls {v : vᵀG^p v ≤ 1} of a metric, and the steepest descent in each."""
    turn = torch.tensor([[math.cos(0.5), -math.sin(0.5)], [math.sin(0.5), math.cos(0.5)]], dtype=torch.float64)
    values, ω = torch.tensor([9.0, 0.3], dtype=torch.float64), torch.tensor([1.0, 0.9], dtype=torch.float64)
    angle = torch.linspace(0, 2 * math.pi, 121, dtype=torch.float64)
    circle = torch.stack([angle.cos(), angle.sin()])
    for power, colour in zip((0.0, 0.25, 0.5, 0.75, 1.0), SHADES, strict=True):
        ball = turn @ (values ** (-power / 2) * (turn.T @ circle).T).T
        v = turn @ (values**-power * (turn.T @ ω))
        v = v / (ω @ v).sqrt()
        ax.plot(*_points(ball), color=colour, lw=1)
        ax.annotate("", tuple(v.tolist()), (0, 0), arrowprops={"arrowstyle": "->", "color": colour, "lw": 1.2})
        if power in (0.0, 1.0):
            ax.annotate(
                f"p = {power:g}",
                (float(v[0]), float(v[1])),
                (4, 4),
                textcoords="offset points",
                color=colour,
                fontsize=9,
            )
    ax.set(title="unit balls of $G^p$, and steps", aspect="equal", xlim=(-2.0, 2.0), ylim=(-2.0, 2.0))
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[["left", "bottom"]].set_visible(False)


def _points(curve: Tensor) -> tuple[list[float], list[float]]:
    x, y = curve.tolist()
    return x, y


def _noise(ax: Axes) -> None:
    """The deviation of the noise of a step, along an eigenvector of G."""
    h = torch.logspace(-4, 0, 41, dtype=torch.float64)
    for power, colour in zip((0.0, 0.25, 0.5, 0.75, 1.0), SHADES, strict=True):
        ax.loglog(h.tolist(), (h ** (0.5 - power)).tolist(), color=colour, lw=1.2)
        side = ("top", -5) if power < 0.5 else ("bottom", 4)
        start = 1e-4, 1e-4 ** (0.5 - power)
        look: Any = {"textcoords": "offset points", "va": side[0], "color": colour, "fontsize": 9}
        ax.annotate(f"p = {power:g}", start, (0, side[1]), **look)
    ax.set(title="noise of a step, $h^{½ - p}$", xlabel="eigenvalue h of G")


def _ends(ax: Axes) -> None:
    """What is left of the loss, over what the best power leaves."""
    for batch, colour in zip(BATCHES, (SHADES[0], *SHADES[2:]), strict=True):
        least = remaining(best(batch), batch)
        losses = {p: remaining(p, batch) / least for p in POWERS if remaining(p, batch) < 3 * least}
        ax.plot([*losses], [*losses.values()], color=colour, label=f"B = {batch}", lw=1.2)
        ax.plot([best(batch)], [1.0], "o", color=colour, ms=4, label="_")
    ax.set(title="loss over that of the best power", xlabel="power p", ylim=(0.95, 3.0))
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1])
    style.name_lines(ax)


def main(arguments: list[str] | None = None) -> None:
    """Draw the figure and print the table."""
    parser = argparse.ArgumentParser(description="The figure and the table of the page on optimizers.")
    parser.add_argument("folder", type=Path, help="where the figure goes")
    print(draw(parser.parse_args(arguments).folder))
    print(table())


if __name__ == "__main__":
    main()
