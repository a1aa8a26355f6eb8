"""Mirror descent and natural gradient of exponential families, in either chart (Grosse 2021, section 4.1).

With λ = 1/lr the proximal steps of the linearised objective are explicit: take the gradient in one chart, and move the
point in the other,

    argmin_u ⟨∇_ηJ, u⟩ + λ KL(p_η ‖ p_u)   is   ξ ← ξ − lr ∇_ηJ,
    argmin_u ⟨∇_ξJ, u⟩ + λ KL(p_u ‖ p_ξ)   is   η ← η − lr ∇_ξJ,

and either is a step of natural gradient in the chart that moves: F_ξ⁻¹∇_ξJ = ∇_ηJ and F_η⁻¹∇_ηJ = ∇_ξJ.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read
from natgrad.errors import DomainError, NatgradError, NonFiniteError, UnsolvedError
from natgrad.families.base import ExponentialFamily
from natgrad.families.domains import Domain, all_finite, entry, first
from natgrad.families.information import Information
from natgrad.show import brief

# The two charts of an exponential family: natural parameters η, and mean parameters ξ = ∇log Z(η)


class Chart(ABC):
    """The base class of charts: coordinates of the members of an exponential family.

    Coordinates have the shape of the points of the family.
    """

    symbol: ClassVar[str]  # for messages

    @property
    @abstractmethod
    def other(self) -> Chart:
        """The dual coordinates."""

    @abstractmethod
    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """η of the member with the coordinates x."""

    @abstractmethod
    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """ξ of the member with the coordinates x."""

    @abstractmethod
    def across(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        """The coordinates of the same member in the other chart, differentiable."""

    @abstractmethod
    def domain(self, family: ExponentialFamily) -> Domain:
        """Where x may lie."""

    @abstractmethod
    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        """The Fisher information in these coordinates: the Jacobian of ``across``."""


@final
@dataclass(frozen=True)
class NaturalChart(Chart):
    """The chart of natural parameters.

    Method:
        x = η, with ξ = ∇log Z(η) across and F_η = ∇²log Z.
    """

    symbol = "η"

    @property
    def other(self) -> Chart:
        return MeanChart()

    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return x

    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.mean(x)

    across = mean

    def domain(self, family: ExponentialFamily) -> Domain:
        return family.natural_domain

    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        return family.fisher(x)


@final
@dataclass(frozen=True)
class MeanChart(Chart):
    """The chart of mean parameters, the expectations of the sufficient statistics.

    Method:
        x = ξ = E t, with η across and F_ξ = F_η⁻¹.
    """

    symbol = "ξ"

    @property
    def other(self) -> Chart:
        return NaturalChart()

    def natural(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return family.natural(x)

    def mean(self, family: ExponentialFamily, x: Tensor) -> Tensor:
        return x

    across = natural

    def domain(self, family: ExponentialFamily) -> Domain:
        return family.mean_domain

    def fisher(self, family: ExponentialFamily, x: Tensor) -> Information:
        return family.fisher_mean(x)


def in_other_chart(
    objective: Callable[[Tensor], Tensor], family: ExponentialFamily, chart: Chart
) -> Callable[[Tensor], Tensor]:
    """The same objective as a function of the other chart.

    Args:
        objective: A function of the coordinates of ``chart``.
        family: The exponential family.
        chart: The chart of ``objective``: ``NaturalChart()`` or ``MeanChart()``.

    Returns:
        The function on the other chart, J_ξ(ξ) = J_η(η(ξ)).

    Example:
        >>> import torch
        >>> from natgrad.families import Poisson
        >>> in_other_chart(lambda xi: xi, Poisson(), MeanChart())(torch.tensor(0.0))  # ξ = e^η
        tensor(1.)
    """
    return lambda z: objective(chart.other.across(family, z))


# Steps that would leave the domain of a family


_DOUBLINGS, _BISECTIONS = 11, 10  # of the exponent e of 2⁻ᵉ: e up to 2048, to a precision of 1


class Boundary(ABC):
    """What to do with a step v from x when x + v may lie outside the domain."""

    @abstractmethod
    def share(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Tensor:
        """t [*batch] with x + t v inside the domain, 0 ≤ t ≤ 1 for every member of the batch."""

    @abstractmethod
    def retreat(self, t: Tensor, x: Tensor, v: Tensor, valid: Callable[[Tensor], Tensor], what: str) -> Tensor:
        """A smaller t, for members whose end point has no image in the other chart (``valid`` is False) [*batch]."""


@final
@dataclass(frozen=True)
class Shorten(Boundary):
    """Go a fraction of the distance to the boundary, every member of a batch by itself.

    The distance is computed only when some step leaves the domain, since it costs more than the test (an eigenvalue
    problem instead of a Cholesky factorisation). That test reads one boolean from the device.

    >>> from natgrad.families.domains import OpenBox
    >>> x, v = torch.tensor([1.0, 1.0]), torch.tensor([-4.0, -0.5])
    >>> Shorten(0.5).share(OpenBox(0.0, axes=0), x, v, "x")  # ½ of ¼, and the whole step
    tensor([0.1250, 1.0000])
    """

    of_the_way: float = 0.9

    def __post_init__(self) -> None:
        if not 0 < self.of_the_way < 1:
            raise ValueError(
                f"Shorten({self.of_the_way!r}) must be between 0 and 1: the fraction of the distance to the boundary, "
                "where no distribution exists"
            )

    def share(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Tensor:
        whole = domain.contains(x + v)
        t = torch.ones_like(whole, dtype=x.dtype)
        if bool(whole.all()):
            return t
        t = torch.where(whole, t, (self.of_the_way * domain.reach(x, v)).clamp(max=1.0))
        # If the sum still rounds onto the boundary, stay, and report a share of 0.
        return torch.where(domain.contains(along(x, t, v)), t, 0.0)

    def retreat(self, t: Tensor, x: Tensor, v: Tensor, valid: Callable[[Tensor], Tensor], what: str) -> Tensor:
        """The largest share, up to a factor of 2, with a valid point; where there is none, the member stays."""

        def fine(e: Tensor) -> Tensor:
            return valid(along(x, t * torch.exp2(-e), v)) | (t * torch.exp2(-e) == 0)

        unchanged = valid(along(x, t, v))
        low, high = torch.zeros_like(t), torch.ones_like(t)
        for _ in range(_DOUBLINGS):
            good = fine(high) | unchanged
            low, high = torch.where(good, low, high), torch.where(good, high, 2 * high)
        for _ in range(_BISECTIONS):
            middle = 0.5 * (low + high)
            good = fine(middle)
            low, high = torch.where(good, low, middle), torch.where(good, middle, high)
        return torch.where(unchanged, t, t * torch.exp2(-high))


@final
@dataclass(frozen=True)
class Forbid(Boundary):
    """Raise a DomainError that names the entry and the bound."""

    def share(self, domain: Domain, x: Tensor, v: Tensor, what: str) -> Tensor:
        domain.check(x + v, what)
        return torch.ones_like(domain.contains(x), dtype=x.dtype)

    def retreat(self, t: Tensor, x: Tensor, v: Tensor, valid: Callable[[Tensor], Tensor], what: str) -> Tensor:
        raise DomainError(f"{what}: take shorter steps (a smaller lr), or let Shorten() do it")


def per_member(t: Tensor, x: Tensor) -> Tensor:
    """One number a member, t [*batch], with axes appended to multiply points x [*batch *point]."""
    return t.reshape(t.shape + (1,) * (x.ndim - t.ndim))


def along(x: Tensor, t: Tensor, v: Tensor) -> Tensor:
    """x + t v, with one t [*batch] a member."""
    return x + per_member(t, x) * v


_WHOLE = Shorten()
_NEAR, _FAR = 4, 2**16  # units in the last place from the boundary: too near to return, and certainly far enough


@final
@dataclass(frozen=True)
class Move:
    """A step of members of a family, and how much of it was taken.

    End points lie in the domain. ``reasons`` explain the steps that were shortened; they are written on demand, and
    wait for the device.

    Attributes:
        family: The exponential family.
        moved: The chart in which the step is a straight line.
        point: The end point, in the chart of the gradient.
        share: The fraction of the step that was taken [*batch], 1 where it is whole.
        aim: The end point of the whole step, in the chart that moved.
        shorter: The argument of the caller that makes steps shorter.
    """

    family: ExponentialFamily
    moved: Chart  # the chart in which the step is a straight line
    point: Tensor
    share: Tensor
    aim: Tensor  # the end point of the whole step, in the chart that moved
    shorter: str = "a smaller lr"

    __repr__ = brief

    @property
    def shortened(self) -> Tensor:
        """Whether the step of each member was shortened [*batch], booleans."""
        return self.share < 1

    @property
    def reasons(self) -> tuple[str, ...]:
        """A sentence for every member whose step was shortened."""
        return tuple(self._reason(tuple(map(int, at))) for at in self.shortened.nonzero().tolist())

    def _reason(self, at: tuple[int, ...]) -> str:
        return (
            f"{float(self.share[at]):.3g} of the step was taken, as the whole would leave the domain "
            f"({_broken_bound(self.family, self.moved, self.aim[at], entry(at))}): take shorter steps ({self.shorter})"
        )


def natural_direction(family: ExponentialFamily, x: Tensor, ω: Tensor, chart: Chart) -> Tensor:
    """The natural gradient of a member of an exponential family.

    Args:
        family: The exponential family.
        x: The present point, in ``chart``.
        ω: The gradient in the same chart.
        chart: The chart of x and ω: ``NaturalChart()`` or ``MeanChart()``.

    Returns:
        F⁻¹ω, which is the plain gradient in the other chart.

    Example:
        >>> import torch
        >>> from natgrad.families import Poisson
        >>> from natgrad.mirror import NaturalChart
        >>> eta, J = torch.tensor(0.5), lambda xi: xi**2  # of ξ = e^η: ∇_ηJ = 2ξ², ∇_ξJ = 2ξ
        >>> natural_direction(Poisson(), eta, 2 * (2 * eta).exp(), NaturalChart()) - 2 * eta.exp()
        tensor(0.)
    """
    _check_gradient(x, ω, chart)
    return chart.fisher(family, x).sharp(ω)


def mirror_step(
    family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary = _WHOLE
) -> Move:
    """A mirror-descent step: the gradient in one chart moves the other chart.

    Args:
        family: The exponential family.
        x: The present point, in ``chart``.
        ω: The gradient in the same chart.
        lr: Step size, 1/λ of the proximal step; one number, or one a member.
        chart: The chart of x and ω: ``NaturalChart()`` or ``MeanChart()``.
        boundary: What to do with a step that would leave the domain: ``Shorten(share)`` by default, or
            ``RefuseBoundary``.

    Returns:
        The ``Move``, with its end point in ``chart``.

    Example:
        >>> import torch
        >>> from natgrad.families import Poisson
        >>> from natgrad.mirror import MeanChart
        >>> mirror_step(Poisson(), torch.tensor(1.0), torch.tensor(2.0), 0.5, MeanChart()).point  # η = 0 ← 0 − 1
        tensor(0.3679)
    """
    _check_gradient(x, ω, chart)
    z, v = chart.across(family, x), -lr * ω
    t, point = _take_step(family, chart.other, z, v, boundary, x)
    stays = (per_member(t, x) == 0) & along(z, t, v).isfinite()
    return Move(family, chart.other, torch.where(stays, x, point), t, z + v)


def natural_step(
    family: ExponentialFamily, x: Tensor, ω: Tensor, lr: float | Tensor, chart: Chart, boundary: Boundary = _WHOLE
) -> Move:
    """A natural-gradient step in the chart of the gradient itself.

    Args:
        family: The exponential family.
        x: The present point, in ``chart``.
        ω: The gradient in the same chart.
        lr: Step size; one number, or one a member.
        chart: The chart of x and ω: ``NaturalChart()`` or ``MeanChart()``.
        boundary: What to do with a step that would leave the domain: ``Shorten(share)`` by default, or
            ``RefuseBoundary``.

    Returns:
        The ``Move``, with its end point in ``chart``.

    Method:
        x ← x − lr F⁻¹ω: natural gradient descent in the chart of the gradient itself (Amari 1998).

        It is ``mirror_step`` from the other chart, where the gradient F⁻¹ω is plain.
    """
    _check_gradient(x, ω, chart)
    F = chart.fisher(family, x)
    v = -lr * F.sharp(ω)
    # If F⁻¹ divides, F must stay away from 0, which the other chart tells. Products alone need no such check.
    if F.divides:
        t, _ = _take_step(family, chart, x, v, boundary, None)
    else:
        _check_step(family, chart, v)
        t = boundary.share(chart.domain(family), x, v, _label(family, chart))
    return Move(family, chart, along(x, t, v), t, x + v)


def _take_step(
    family: ExponentialFamily, moved: Chart, x: Tensor, v: Tensor, boundary: Boundary, stored: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The share t of a step in a chart, and the image of x + t v in the other chart, such that the way back exists.

    A large η lies inside its domain where ξ rounds onto the boundary of its own (a probability of 1), and no later step
    could return. End points near either boundary are therefore mapped across and back as a test. Reads two booleans
    from the device. ``stored``: the start in the other chart, where x was computed from it.
    """
    here, there = moved.domain(family), moved.other.domain(family)
    _check_step(family, moved, v)
    aim = x + v
    if bool(here.clear_of_boundary(aim, _FAR).all()):
        with suppress(UnsolvedError):
            point = moved.across(family, aim)
            if bool(there.clear_of_boundary(point, _FAR).all()):
                return x.new_ones(x.shape[: x.ndim - family.axes]), point

    def returns(y: Tensor) -> Tensor:
        across, solved = _map_across(family, moved, y, here.clear_of_boundary(y, _NEAR))
        back, returned = _map_across(family, moved.other, across, there.clear_of_boundary(across, _NEAR) & solved)
        return returned & here.contains(back)

    # A member that already starts without a way back is only kept in the domain.
    start = _map_across(family, moved, x, here.contains(x))[0] if stored is None else stored
    lost = ~(here.contains(x) & there.contains(start))
    t = boundary.share(here, x, v, _label(family, moved))
    end = along(x, t, v)
    wrong = ~returns(end) & ~lost
    if bool(wrong.any()):
        why = _broken_bound(family, moved, end[first(wrong)], entry(first(wrong)))
        t = boundary.retreat(t, x, v, lambda y: returns(y) | (lost & here.contains(y)), why)
    return t, _map_across(family, moved, along(x, t, v), t > 0)[0]


def _map_across(family: ExponentialFamily, chart: Chart, x: Tensor, inside: Tensor) -> tuple[Tensor, Tensor]:
    """The coordinates in the other chart, NaN for members outside; and for which members they exist [*batch]."""
    nowhere = torch.full_like(x, torch.nan)
    if not bool(inside.any()):
        return nowhere, inside
    try:
        return nowhere.masked_scatter(per_member(inside, x), chart.across(family, x[inside])), inside
    except UnsolvedError as error:
        solved = inside.clone()
        solved[inside] = error.solved
    return _map_across(family, chart, x, solved)


def _check_step(family: ExponentialFamily, moved: Chart, v: Tensor) -> None:
    """Refuse a step that is not finite. A GPU is not waited for; there it shows in the point."""
    if can_read(v) and not bool(all_finite(v.reshape(-1))):
        at = first(~v.isfinite())
        raise NonFiniteError(
            f"the step in {moved.symbol} of {type(family).__name__} is {float(v[at])} at {entry(at)}: its gradient is "
            f"not finite, or too large for {v.dtype}. Nothing was changed"
        )


def _broken_bound(family: ExponentialFamily, moved: Chart, aim: Tensor, at: str) -> str:
    """Which bound a step breaks, in its own chart or in the other, as far as this precision can tell."""
    try:
        moved.domain(family).check(aim, _label(family, moved, at))
        moved.other.domain(family).check(moved.across(family, aim), _label(family, moved.other, at))
    except NatgradError as error:
        return str(error).split(": start inside")[0]
    return f"{moved.other.symbol} of {type(family).__name__}{at} is on its boundary, to the rounding of {aim.dtype}"


def _label(family: ExponentialFamily, chart: Chart, at: str = "") -> str:
    return f"{chart.symbol} of {type(family).__name__}{at}{', at ' if family.axes else ''}"


def _check_gradient(x: Tensor, ω: Tensor, chart: Chart) -> None:
    if x.shape != ω.shape:
        raise ValueError(
            f"the gradient has shape {tuple(ω.shape)} and {chart.symbol} {tuple(x.shape)}: take it of one number, with "
            f"respect to {chart.symbol} itself"
        )
