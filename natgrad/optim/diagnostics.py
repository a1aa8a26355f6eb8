"""How the metric of an optimizer stands after some steps: conditions, damping, staleness, and the last step."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

import torch
from torch import Tensor

from natgrad.errors import NatgradError
from natgrad.geometry import Covector, Vector
from natgrad.operators import EigenKroneckerOperator, KroneckerOperator
from natgrad.operators.factor import Factor, diagonal, full
from natgrad.operators.kronecker_inverse import balance
from natgrad.pullback.blocks import Block
from natgrad.solve import Factored

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient


@final
@dataclass(frozen=True)
class Side:
    """One factor of a layer: its condition, by how much its rank falls short, and how many of its rows are zero.

    Over several groups c the worst condition, and the sums. ``damped``: the condition after √λ/π or π√λ is added.
    A zero row of S is a unit that no gradient reaches, a zero row of A an input that is always zero.
    """

    condition: float
    damped: float
    deficit: int
    dead: int
    size: int  # c·d


@final
@dataclass(frozen=True)
class Health:
    """One layer. ``share`` = λ/(λ + the mean eigenvalue of S ⊗ A): how much of the damped metric is damping.

    ``damped``: the condition of what is inverted, (S + √λ/π) ⊗ (A + π√λ) or G + λ. ``step``: √(δᵀGδ) of the last step
    δ on this layer. Parameters without a layer rule have no factors, and only a step.
    """

    names: tuple[str, ...]
    step: float
    factors: Mapping[str, Side]
    share: float | None = None
    damped: float | None = None


@final
@dataclass(frozen=True)
class Diagnostics:
    """The layers, and what they have in common; ``print`` it.

    ``metric_age`` and ``inverse_age``: steps since the metric was estimated, and since it was inverted, 0 if the last
    step did so. ``step``: √(δᵀGδ) of the last step, whole; for a Fisher metric ½ of its square is, to second order, the
    divergence of the outputs after the step from those before. ``accepted``: whether the last step was made.
    """

    layers: tuple[Health, ...]
    damping: float
    metric_age: int
    inverse_age: int
    step: float
    accepted: bool

    def __str__(self) -> str:
        heads = ("parameters", "cond S", "cond A", "damped", "damping", "rank S", "rank A", "dead units", "step")
        cells = [_cells(layer) for layer in self.layers]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [_line(row, widths) for row in (heads, *cells)]
        refused = "" if self.accepted else ", which was refused"
        lines.append(f"last step{refused}: √(δᵀGδ) = {self.step:.3g}; damping λ = {self.damping:.3g}")
        lines.append(f"the metric was estimated {_ago(self.metric_age)}, and inverted {_ago(self.inverse_age)}")
        return "\n".join(lines)


def diagnostics(opt: NaturalGradient) -> Diagnostics:
    """Look at the metric and the last step. It waits for the device and computes eigenvalues: call it now and then.

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> opt = ng.KFAC(model, ng.Fisher(ng.Gaussian()))
    >>> model(torch.randn(32, 4)).square().sum().backward()
    >>> opt.step()
    >>> found = opt.diagnostics()
    >>> len(found.layers), found.metric_age, found.layers[1].factors["S"].condition  # S is the unit matrix
    (2, 0, 1.0)
    """
    G, last = opt.keeper.average, opt.last
    if G is None or last is None:
        raise NatgradError(
            "there is nothing to diagnose before the first step: opt.plan() says what the optimizer is going to do"
        )
    λ = opt.inverse_damping  # of the inverse that the last step was made with
    δ = last.displacement
    ω = G.flat(δ)
    with torch.no_grad():
        if isinstance(G, KroneckerOperator | EigenKroneckerOperator):
            factored = isinstance(opt.solver, Factored)
            layers = [_layer(G, b, λ, factored, _norm(δ, ω, block.names)) for b, block in enumerate(G.blocks)]
            known = {name for layer in layers for name in layer.names}
        else:
            layers, known = [], set()
        others = [tuple(n for n in block.names if n not in known) for block in opt.keeper.view.blocks]
        layers += [Health(names, _norm(δ, ω, names), {}) for names in others if names]
    order = {name: at for at, name in enumerate(opt.keeper.model.params)}
    ordered = sorted(layers, key=lambda layer: order[layer.names[0]])
    ages = (opt.keeper.step - 1 - opt.keeper.estimated, opt.keeper.step - 1 - opt.keeper.inverted)
    return Diagnostics(tuple(ordered), last.damping, *ages, _norm(δ, ω, tuple(δ)), last.accepted)


def _layer(G: KroneckerOperator | EigenKroneckerOperator, b: int, λ: float, factored: bool, step: float) -> Health:
    block: Block = G.blocks[b]
    s, a = G.left[b].double(), G.right[b].double()
    π = balance([a], [s])
    values = {"S": _eigenvalues(s), "A": _eigenvalues(a)}
    shifts = {"S": λ**0.5 / π, "A": λ**0.5 * π}
    sides = {key: _side(values[key], factor, shifts[key]) for key, factor in (("S", s), ("A", a))}
    if isinstance(G, EigenKroneckerOperator):
        spectrum = G.scales[b].double().clamp(min=0)
    else:
        spectrum = values["S"].clamp(min=0).unsqueeze(-1) * values["A"].clamp(min=0).unsqueeze(-2)
    mean = float(spectrum.mean())
    damped = sides["S"].damped * sides["A"].damped if factored else _condition(spectrum.flatten(1), λ)
    return Health(block.names, step, sides, λ / (λ + mean) if λ > 0 else 0.0, damped)


def _eigenvalues(factor: Factor) -> Tensor:
    """[c d], ascending."""
    return torch.linalg.eigvalsh(factor) if full(factor) else factor.sort(-1).values


def _side(values: Tensor, factor: Factor, shift: Tensor) -> Side:
    largest = values.amax(-1, keepdim=True)
    noise = values.shape[-1] * torch.finfo(torch.float32).eps * largest
    zero = values <= noise
    cleaned = values.masked_fill(zero, 0.0)
    return Side(
        condition=_condition(cleaned, 0.0),
        damped=_condition(cleaned + shift.unsqueeze(-1), 0.0),
        deficit=int(zero.sum()),
        dead=int((diagonal(factor) == 0).sum()),
        size=values.numel(),
    )


def _condition(values: Tensor, λ: float) -> float:
    """The largest of max/min over groups [c d]; ∞ where a value is zero."""
    shifted = values + λ
    smallest = shifted.amin(-1)
    return float(torch.where(smallest > 0, shifted.amax(-1) / smallest, torch.inf).max())


def _norm(δ: Vector, ω: Covector, names: Sequence[str]) -> float:
    """√⟨ω, δ⟩ over some parameters; below zero it is rounding."""
    total = sum((δ[name].double() * ω[name].double()).sum() for name in names)
    return math.sqrt(max(float(total), 0.0))


def _cells(layer: Health) -> tuple[str, ...]:
    title, step = " + ".join(layer.names), f"{layer.step:.1e}"
    if not layer.factors:
        return (title, *[""] * 7, step)
    s, a = layer.factors["S"], layer.factors["A"]
    ranks = (f"{side.size - side.deficit}/{side.size}" for side in (s, a))
    return (
        title,
        f"{s.condition:.1e}",
        f"{a.condition:.1e}",
        f"{layer.damped:.1e}",
        f"{layer.share:.0%}",
        *ranks,
        str(s.dead),
        step,
    )


def _ago(age: int) -> str:
    return "in the last step" if age == 0 else f"{age} step{'s' if age > 1 else ''} before it"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *rest = zip(cells, widths, strict=True)
    return "  ".join([first[0].ljust(first[1]), *(cell.rjust(width) for cell, width in rest)]).rstrip()
