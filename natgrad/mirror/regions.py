"""The set Q that a step may not leave: Grad minimises its quadratic model over it (000 definition 12)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError, NatgradError
from natgrad.mirror.metrics import InnerProduct
from natgrad.mirror.potentials import scaled_cholesky

_STEPS, _HALVINGS = 200, 60


class Region(ABC):
    """A closed convex set Q."""

    @abstractmethod
    def check(self, x: Tensor) -> None:
        """Refuse a point outside, by entry and bound."""

    @abstractmethod
    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        """argmin_{y ∈ Q} m(y) and −min m, for m(y) = ⟨ω, y − x⟩ + (α/2)‖y − x‖²_g."""


@final
@dataclass(frozen=True)
class Everywhere(Region):
    """Q = Rᵈ: y = x − ω♯/α, and −min m = ‖ω♯‖²_g/2α (000 lemma 13)."""

    def check(self, x: Tensor) -> None:
        """Every point is inside."""

    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        gradient = g.sharp(ω)
        return x - gradient / α, 0.5 * (ω * gradient).sum() / α


@final
@dataclass(frozen=True)
class Box(Region):
    """Q = {lower ≤ x ≤ upper}, entry by entry (000 corollary 15).

    m is minimised by Newton steps in the entries that are free, projected on Q (Bertsekas 1982), with G as a matrix:
    for small spaces.

    >>> from natgrad.mirror import SquaredNorm
    >>> G = InnerProduct(SquaredNorm().hessian(torch.zeros(2)))
    >>> Box(torch.zeros(2), torch.ones(2)).step(G, torch.full((2,), 0.5), torch.tensor([1.0, -0.1]), α=1.0)[0]
    tensor([0.0000, 0.6000])
    """

    lower: Tensor
    upper: Tensor

    def __post_init__(self) -> None:
        if self.lower.shape != self.upper.shape or not bool((self.lower < self.upper).all()):
            raise ValueError(
                f"Box(lower, upper) of shapes {tuple(self.lower.shape)} and {tuple(self.upper.shape)}: both need the "
                "shape of x, and lower must be below upper in every entry"
            )

    def check(self, x: Tensor) -> None:
        if x.shape != self.lower.shape:
            raise ValueError(f"x has shape {tuple(x.shape)} and the box {tuple(self.lower.shape)}")
        outside = ~((x >= self.lower) & (x <= self.upper))
        if bool(outside.any()):
            at = tuple(int(i) for i in outside.nonzero()[0])
            raise DomainError(
                f"x{list(at)} = {float(x[at]):.6g} is outside [{float(self.lower[at]):g}, {float(self.upper[at]):g}]: "
                "start inside the box"
            )

    def step(self, g: InnerProduct, x: Tensor, ω: Tensor, α: float) -> tuple[Tensor, Tensor]:
        M, linear = α * g.dense(), ω.reshape(-1)
        scaled_cholesky(M, "the metric in a box")  # raises where m has no minimum, or more than one
        low, high = (self.lower - x).reshape(-1), (self.upper - x).reshape(-1)
        d = torch.zeros_like(low)
        scale = 64 * torch.finfo(x.dtype).eps * (1 + float(linear.abs().max()))
        for _ in range(_STEPS):
            slope = linear + M @ d
            if float((d - (d - slope).clamp(low, high)).abs().max()) <= scale:
                break
            free = ~(((d <= low) & (slope > 0)) | ((d >= high) & (slope < 0)))
            newton = torch.zeros_like(d)
            newton[free] = -torch.linalg.solve(M[free][:, free], slope[free])
            moved = _searched(M, linear, d, newton, low, high)
            if moved is None:
                break  # m is flat to rounding
            d = moved
        else:
            raise NatgradError(f"the step in the box was not found in {_STEPS} iterations: is the metric positive?")
        y = torch.where(d <= low, self.lower.reshape(-1), torch.where(d >= high, self.upper.reshape(-1), x.ravel() + d))
        return y.view_as(x), -_model(M, linear, d)


def _model(M: Tensor, linear: Tensor, d: Tensor) -> Tensor:
    return (linear * d).sum() + 0.5 * (d * (M @ d)).sum()


def _searched(M: Tensor, linear: Tensor, d: Tensor, newton: Tensor, low: Tensor, high: Tensor) -> Tensor | None:
    """The projected step, halved until m falls."""
    here = float(_model(M, linear, d))
    for k in range(_HALVINGS):
        moved = (d + 0.5**k * newton).clamp(low, high)
        if float(_model(M, linear, moved)) < here:
            return moved
    return None
