"""The step of K-FAC that tunes its own learning rate, momentum and damping (Martens and Grosse 2015)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.geometry import Vector
from natgrad.linalg import check_number_fields
from natgrad.step.base import Step, StepContext, StepRule
from natgrad.structures.layered import LayerOperator

_CUT, _CUTS = 4.0, 3  # a step that is too long is divided by 4, at most 3 times; so is a damping that is too large
_GROWTH = 3.0  # the longest step that is not tried, over the one before


@final
@dataclass(frozen=True)
class SelfTuned(StepRule):
    """Choose learning rate, momentum and damping in every step, by products with the metric.

    Needs ``opt.step(closure)``; further calls of the closure draw the same random numbers. The learning rate and
    momentum of the optimizer are not used.

    Args:
        every: The loss is evaluated where the step lands in the first step and then every so many: by default every
            five steps with Kronecker factors, and every step with other structures.
        factor: What λ is multiplied by where the loss fell by less than a quarter of the prediction, and divided by
            where it fell by more than three quarters.
        fraction: The fraction of the batch for the exact products, with 256 examples at least. With gradient
            accumulation it holds for every micro-batch.
        smallest: The smallest λ; below it a batch is fitted at the expense of the others.

    Method:
        δ = α·Δ + μ·δ₀ with the α and μ that are best for the quadratic model, and λ by Levenberg–Marquardt.

        Δ = −(G + λ)⁻¹ω in the structure, δ₀ the last step, and m(δ) = ⟨ω, δ⟩ + ½⟨δ, (G + λ)δ⟩ with *exact* products ⟨Δ,
        GΔ⟩, ⟨Δ, Gδ₀⟩, ⟨δ₀, Gδ₀⟩ (Martens and Grosse 2015, sections 6.4, 6.5 and 7).

        If G were the exact curvature, the ratio would be 1 + λ⟨δ, δ⟩/⟨δ, (G + λ)δ⟩: if it is above three halves, the
        damping is larger than the metric, and λ is divided by four.

        If the loss rises, the step is cut to a quarter, at most three times, and λ is multiplied by four; if no cut
        helps, the step is rejected. Steps without an evaluation are at most three times as long, in the metric, as the
        one before, since a small batch may determine few directions.

        The exact products are those of the function that is trained, with its batch statistics and, on the whole batch,
        its masks of dropout. Products of several micro-batches are averaged, weighted by examples.

    Example:
        >>> SelfTuned()
        SelfTuned(every=None, factor=1.3, fraction=0.25, smallest=1e-06)
    """

    adapts_damping: ClassVar[bool] = True
    needs_closure: ClassVar[bool] = True
    # Steps that are as long as the metric of the batch allows need a recent metric and a recent inverse.
    schedule: ClassVar[tuple[int, int]] = (2, 5)

    every: int | None = None
    factor: float = 1.3
    fraction: float = 0.25
    smallest: float = 1e-6  # λ; below, a batch is fitted at the expense of the others

    def __post_init__(self) -> None:
        check_number_fields(self)
        if (
            (self.every is not None and self.every < 1)
            or not self.factor > 1
            or not 0 < self.fraction <= 1
            or not self.smallest > 0
        ):
            raise ValueError(f"SelfTuned needs every ≥ 1, factor > 1, 0 < fraction ≤ 1 and smallest > 0, got {self}")

    def take(self, context: StepContext) -> Step:
        λ = max(context.damping, self.smallest)
        Δ = -context.sharp(context.differential, λ)
        last = context.velocity()
        basis = [Δ] if last is None else [Δ, last]
        flat = torch.stack([v.flatten() for v in basis])
        slope = flat @ context.differential.flatten().to(flat.dtype)
        H = context.curvature(basis, self.fraction).to(flat.dtype) + λ * (flat @ flat.T)
        weights = _best(H, slope)
        every = self.every or (5 if isinstance(context.operator, LayerOperator) else 1)
        untried = bool(context.step % every)
        if untried and last is not None:
            weights = weights * _no_longer(_GROWTH**2 * H[1, 1], weights @ H @ weights)
        δ = Vector({name: t.to(Δ[name].dtype) for name, t in Δ.unflatten(weights @ flat).items()})
        if untried:
            return Step(δ, λ, velocity=δ, numbers=_numbers(weights, slope, H))
        return self._tried(context, δ, weights, slope, H, λ)

    def _tried(self, context: StepContext, δ: Vector, weights: Tensor, slope: Tensor, H: Tensor, λ: float) -> Step:
        """The step, cut until the loss does not rise, and the damping that follows."""
        here, numbers = context.loss(None), _numbers(weights, slope, H)
        predicted = -float(numbers["predicted_decrease"])
        rounding = 10 * max(torch.finfo(t.dtype).eps for t in δ.values()) * abs(here)
        actual = context.loss(δ) - here
        if -predicted <= rounding and abs(actual) <= rounding:
            return Step(δ, λ, velocity=δ, numbers=numbers)  # nothing can be said
        ratio = actual / predicted if predicted < 0 and math.isfinite(actual) else -math.inf
        if actual <= rounding:
            return Step(δ, self._adapted(λ, ratio), ratio=ratio, velocity=δ, numbers=numbers)
        more = min(_CUT * λ, 1 / self.smallest)
        for _ in range(_CUTS):
            δ, weights = δ / _CUT, weights / _CUT
            if context.loss(δ) - here <= rounding:
                numbers, reason = _numbers(weights, slope, H), "cut: the loss was higher at its end"
                return Step(δ, more, ratio=ratio, velocity=δ, reason=reason, numbers=numbers)
        return Step(δ, more, accepted=False, ratio=ratio, reason=f"the loss is higher even after {_CUTS} cuts")

    def _adapted(self, λ: float, ratio: float) -> float:
        if ratio > 0.75:
            return max(λ / (_CUT if ratio > 1.5 else self.factor), self.smallest)
        return min(λ * self.factor, 1 / self.smallest) if ratio < 0.25 else λ


def _numbers(weights: Tensor, slope: Tensor, H: Tensor) -> dict[str, Tensor]:
    """α, μ, and what the model says of their step."""
    square = weights @ H @ weights
    names = ("lr_effective", "momentum_effective")
    model = {"step_length": square.sqrt(), "predicted_decrease": -(weights @ slope) - 0.5 * square}
    return {**dict(zip(names, weights.unbind(), strict=False)), **model}


def _no_longer(bound: Tensor, square: Tensor) -> Tensor:
    """The factor that shortens a step of squared length ``square`` to at most ``bound``."""
    return (bound / square.clamp(min=torch.finfo(square.dtype).tiny)).clamp(max=1).sqrt()


def _best(H: Tensor, slope: Tensor) -> Tensor:
    """The minimiser of ⟨slope, w⟩ + ½⟨w, Hw⟩ for one or two directions; nothing is read from the device.

    If the two directions agree up to rounding, only the first is used.
    """
    alone = torch.zeros_like(slope)
    alone[0] = -slope[0] / H[0, 0]
    alone = torch.where(H[0, 0] > 0, alone, torch.zeros_like(alone))  # a zero gradient: stay
    if slope.numel() == 1:
        return alone
    det = H[0, 0] * H[1, 1] - H[0, 1] * H[1, 0]
    both = torch.stack([H[0, 1] * slope[1] - H[1, 1] * slope[0], H[1, 0] * slope[0] - H[0, 0] * slope[1]]) / det
    rounding = 1e3 * torch.finfo(H.dtype).eps * H[0, 0] * H[1, 1]
    return torch.where(det > rounding, both, alone)
