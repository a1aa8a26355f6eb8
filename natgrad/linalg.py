"""Small dense linear algebra with errors that say what to do."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.inverses import relative_shifts
from natgrad.errors import FactorisationError, NonFiniteError, SingularMetricError

_HALVINGS = 60  # of a Newton step
_CANCELLED = 64  # times the precision: how much is left where the terms of a gradient cancel


@final
@dataclass(frozen=True)
class Relative:
    """Damping without units: a share of the mean eigenvalue, factor by factor.

    Args:
        epsilon: ε > 0, the share; 0.01 is a good start.

    Method:
        S + ε·mean(S) and A + ε·mean(A) for the two factors of a layer, G_b + ε·mean(G_b) for every block of
        ``BlockDense`` and every layer of ``EigenKronecker``, d + ε·mean(d) for every parameter of ``Diagonal``, and G +
        ε·tr G/p for one matrix. The mean runs over all groups of a layer.

        Multiplying the loss by a number multiplies G + λ by a number, and leaves the direction of the step as it was.
        So does multiplying the outputs of a layer, or the inputs of one without a bias, where every layer has its own
        λ; one matrix over several layers has one λ for all of them.

        What is zero (dead units, an expert that was not used, a batch of zeros) has no scale: its step is zero. Zero is
        also what only rounding keeps from it (``is_rounding``): a parameter of ``Diagonal``, a block of ``BlockDense``,
        or a group of a layer, such as the keys of an attention.

        That is a mean second moment of at most (64 ε)² of the largest (6·10⁻¹¹ in single precision, 2·10⁻²⁸ in double);
        ``opt.diagnostics()`` names the parameters that stand still for it.
        So are factors whose λ is below the smallest normal number, 10⁻³⁸ in single precision: gradients have vanished
        there.

        It bounds no step. Where the gradients of a layer are g times smaller but not zero, as those of the queries and
        keys of an attention whose softmax saturates, λ is g² times smaller and the step 1/g times longer. A number as
        damping, or ``LevenbergMarquardt()``, which looks at the loss, bounds it.

    Example:
        >>> import natgrad as ng
        >>> G = ng.operators.DiagonalOperator(ng.operators.Layout.of({"w": torch.ones(2)}), torch.tensor([1.0, 3.0]))
        >>> ng.sharp(G, ng.Covector({"w": torch.ones(2)}), damping=Relative(0.5))["w"]  # 1/(1 + 0.5·2), 1/(3 + 0.5·2)
        tensor([0.5000, 0.2500])
    """

    epsilon: float
    largest: Tensor | None = field(default=None, init=False, repr=False, compare=False)  # see ``beside``

    def __post_init__(self) -> None:
        if not is_number(self.epsilon) or not 0 < self.epsilon < math.inf:
            raise ValueError(
                f"Relative(epsilon) must be positive and finite, got {self.epsilon}: without damping, give damping=0"
            )

    def beside(self, sizes: Tensor) -> Relative:
        """The same, for a part of a metric whose other parts have these root mean squares [u] (``is_rounding``)."""
        out = Relative(self.epsilon)
        if sizes.numel():
            object.__setattr__(out, "largest", sizes.amax())  # it is frozen
        return out

    def shifts(self, means: Tensor) -> Tensor:
        """λ [u] of the parts of a metric, from their mean second moments [u]; zero for those that are zero."""
        sizes = means.clamp(min=0).sqrt()
        return relative_shifts(self.epsilon, means).masked_fill(is_rounding(sizes, self.largest), 0.0)

    def __format__(self, spec: str) -> str:
        return f"Relative({self.epsilon:{spec}})"


Damping: TypeAlias = float | Relative


def number_of(damping: Damping) -> float:
    """λ, or ε where it is relative."""
    return damping.epsilon if isinstance(damping, Relative) else damping


def eigh(matrix: Tensor, what: str) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues [* d] and eigenvectors [* d d] of symmetric matrices.

    As ``eigvalsh``, ``svd`` and ``svdvals``, it refuses NaN and infinity by name. Of these torch's routines make NaN,
    finite numbers that mean nothing, or an error that tells of repeated eigenvalues, as the size has it.

    >>> eigh(torch.tensor([[2.0, torch.nan], [torch.nan, 2.0]]), "the metric")
    Traceback (most recent call last):
    ...
    natgrad.errors.NonFiniteError: the metric holds NaN or infinity. Nothing was changed
    """
    check_finite(matrix, what)
    with _named(what):
        values, vectors = torch.linalg.eigh(matrix)
    return values, vectors


def eigvalsh(matrix: Tensor, what: str) -> Tensor:
    """Ascending eigenvalues [* d] of symmetric matrices."""
    check_finite(matrix, what)
    with _named(what):
        return torch.linalg.eigvalsh(matrix)


def svd(matrix: Tensor, what: str) -> tuple[Tensor, Tensor, Tensor]:
    """U [* m k], descending s [* k] and Vᵀ [* k n] of matrices [* m n], k = min(m, n)."""
    check_finite(matrix, what)
    with _named(what):
        U, s, Vt = torch.linalg.svd(matrix, full_matrices=False)
    return U, s, Vt


def svdvals(matrix: Tensor, what: str) -> Tensor:
    """Descending singular values [* k] of matrices [* m n]."""
    check_finite(matrix, what)
    with _named(what):
        return torch.linalg.svdvals(matrix)


def least_eigenvalue(matrices: Tensor) -> Tensor:
    """The smallest eigenvalue [*batch] of symmetric matrices; NaN of those that hold NaN or infinity, and of no other.

    >>> least_eigenvalue(torch.stack([torch.eye(3), torch.full((3, 3), torch.nan)]))
    tensor([1., nan])
    """
    finite = matrices.isfinite().flatten(-2).all(-1)
    with _named("a matrix"):
        values = torch.linalg.eigvalsh(torch.where(finite[..., None, None], matrices, 0.0))
    return torch.where(finite, values[..., 0], torch.nan)


@contextmanager
def _named(what: str) -> Iterator[None]:
    """An iteration that does not converge is an error of ours."""
    try:
        yield
    except torch.linalg.LinAlgError as error:  # type: ignore[attr-defined]
        raise FactorisationError(
            f"the eigenvalues or singular values of {what} cannot be found: compute in double precision, or scale the "
            "data to numbers of about 1"
        ) from error


def is_rounding(sizes: Tensor, beside: Tensor | None = None, *, dtype: torch.dtype | None = None) -> Tensor:
    """Which gradients are zero up to rounding, from their root mean squares [u]: up to 64 ε of the largest of all.

    The outputs need not depend on a parameter that they are computed with: the bias of the keys of an attention, a bias
    before an instance normalisation, the keys themselves if their cotangents are summed over the positions. The terms
    of its gradient, of size t, cancel, but for ε·t or so. Its second moment, which is zero, is stored as (ε·t)², and
    a divisor that is relative to that makes noise of any length. This is the one rule of what is zero: where the
    damping is relative it does not move, an undamped metric with it is singular, and a step rule that gives every
    parameter a length of its own (``Normalised``, ``Polar``) gives it none.

    It is a rule for squares, which are as exact as what is squared; over the largest in the metric we have measured
    roots of 0.001 ε (attention) to 60 ε (16 000 positions before a normalisation). An eigenvalue of a matrix is not a
    square: it is wrong by ε·λ_max and more, and has that cut (``refuse_singular``, ``without_rounding``). As a cut for
    squares, p·ε would take for zero what is merely small: with 10⁶ parameters in single precision, every gradient below
    a third of the largest.

    ``beside``: [], the largest root mean square elsewhere. ``dtype``: of the gradients, if ``sizes`` have another. Half
    precision is judged as single. NaN and infinity are not rounding, and nothing is beside them.

    >>> is_rounding(torch.tensor([1.0, 1e-4, 1e-7, 0.0, torch.inf]))
    tensor([False, False,  True,  True, False])
    """
    if not sizes.numel():
        return sizes.bool()
    all_sizes = sizes if beside is None else torch.cat([sizes.flatten(), beside.to(sizes.dtype).view(1)])
    eps = torch.finfo(torch.promote_types(dtype or sizes.dtype, torch.float32)).eps
    return sizes <= _CANCELLED * eps * all_sizes.nan_to_num(0.0, 0.0, 0.0).amax()


def refuse_rounding(moments: Tensor, what: str, beside: Tensor | None = None) -> None:
    """Raise if one of the second moments [u] of an undamped metric ``is_rounding``. This waits for the device.

    >>> refuse_rounding(torch.tensor([2.0, 1.0]), "the metric")
    """
    zero = is_rounding(moments.clamp(min=0).sqrt(), beside)
    if not bool(zero.any()):
        return
    smallest, largest = float(moments.min()), float(moments.max() if beside is None else beside.square())
    raise SingularMetricError(
        f"{what} is singular without damping: rank {int((~zero).sum())} of {zero.numel()} at most, since second "
        f"moments down to {smallest:.3g} are rounding beside {largest:.3g}, the largest. Add damping (damping > 0), "
        "or solve in its range with Pinv() (in any structure but LowRank and Implicit)"
    )


def symmetric_root(h: Tensor, failure: str) -> Tensor:
    """h^½ [n d e] of positive semi-definite h; eigenvalues negative beyond rounding raise.

    A small h may be the difference of numbers of size 1, such as p − p² for a probability near 1: its rounding error is
    that of these numbers.
    """
    finite = h.isfinite().flatten(1).all(1)
    if not bool(finite.all()):
        n = int(finite.logical_not().nonzero()[0])
        raise NonFiniteError(
            f"the Hessian of the metric at the outputs of example {n} holds NaN or infinity: the outputs are too "
            "large, or outside the domain of the metric"
        )
    with _named("the Hessian of the metric at the outputs"):
        values, vectors = torch.linalg.eigh(0.5 * (h + h.transpose(-1, -2)))
    rounding = h.shape[-1] * torch.finfo(h.dtype).eps * values.abs().amax(-1).clamp(min=1)
    negative = values[:, 0] < -8 * rounding
    if bool(negative.any()):
        n = int(negative.nonzero()[0, 0])
        raise SingularMetricError(
            f"{failure} at example {n}: its Hessian has the eigenvalue {float(values[n, 0]):.3g}, and an indefinite h "
            "is not a metric. Use a convex function, or Fisher, or Euclidean"
        )
    scaled = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # what is left below zero is rounding
    return scaled @ vectors.transpose(-1, -2)


def cholesky(matrix: Tensor, damping: float | Tensor, what: str, beside: Tensor | None = None) -> Tensor:
    """L with L Lᵀ = matrix + damping, for one matrix [d d] or a batch [b d d]; singular and indefinite ones raise.

    ``damping``: one number, or a tensor [b] with one for every matrix. ``beside``: the largest root mean square in the
    metric that they are blocks of (``is_rounding``).

    Rounding lets Cholesky succeed on a singular matrix and return noise. Without damping to speak of, matrices that
    look singular are therefore checked against their spectrum, and no diagonal may be rounding.
    """
    if matrix.numel() == 0:
        return matrix
    damped = matrix.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping.unsqueeze(-1) if isinstance(damping, Tensor) else damping)
    check_finite(damped, what)
    factor, info = torch.linalg.cholesky_ex(damped)
    size, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    largest = diagonal.amax(-1)
    suspicious = info > 0
    lost = damping <= 8 * eps * largest  # damping below the rounding of the matrix cannot make it regular
    if bool(lost.any()):
        # At unit diagonal: the units of the parameters do not make a matrix singular, nor Cholesky inaccurate.
        units = diagonal.clamp(min=torch.finfo(matrix.dtype).tiny).rsqrt()
        suspicious |= lost & ~(smallest(units.unsqueeze(-1) * factor) > 1e3 * size * eps)  # NaN is suspicious too
    if bool(suspicious.any()):
        each = _each(damping, largest)[suspicious]
        for values, failed, λ in zip(_spectra(damped[suspicious]), info[suspicious], each, strict=True):
            refuse_singular(values, what=what, damping=float(λ), rtol=size * eps, failed=bool(failed > 0))
    if bool(lost.any()):
        refuse_rounding(diagonal[lost], what, largest.amax().sqrt() if beside is None else beside)
    return factor


def _each(damping: float | Tensor, like: Tensor) -> Tensor:
    """The damping of every matrix, in double precision."""
    return torch.as_tensor(damping, dtype=torch.float64, device=like.device).expand(like.shape)


def damped_spectrum(values: Tensor, damping: float | Tensor, what: str) -> Tensor:
    """The eigenvalues [b d] of matrices + damping, from those of the matrices; as ``cholesky``, singular ones raise.

    Eigenvalues that are zero up to rounding are not negative.

    >>> damped_spectrum(torch.tensor([[0.0, 3.0]]), 1.0, "the metric")
    tensor([[1., 4.]])
    """
    if values.numel() == 0:
        return values
    size, eps = values.shape[-1], torch.finfo(values.dtype).eps
    largest = values.abs().amax(-1)
    λ = _each(damping, largest)
    rounding = size * eps * largest
    zero = values.abs() <= rounding.unsqueeze(-1)
    damped = torch.where(zero, values.clamp(min=0), values) + λ.to(values.dtype).unsqueeze(-1)
    check_finite(damped, what)
    smallest = damped.amin(-1)
    bad = (smallest <= 0) | ((λ <= 8 * eps * largest) & (smallest <= rounding))
    if bool(bad.any()):
        at = int(bad.flatten().nonzero()[0])
        number = float(λ.reshape(-1)[at])
        refuse_singular(damped.reshape(-1, size)[at], what=what, damping=number, rtol=size * eps, failed=True)
    return damped


def powered(values: Tensor, power: float, what: str) -> Tensor:
    """Eigenvalues to a power between 0 and 1, those within rounding as zero; negative ones raise. The power 0 is 1.

    (10⁻¹⁶ is rounding, and its fourth root 10⁻⁴ would not look like it.)

    >>> powered(torch.tensor([0.0, 4.0]), 0.5, "the metric")
    tensor([0., 2.])
    """
    if power == 1:
        return values
    if power == 0:
        return torch.ones_like(values)
    if values.numel() == 0:
        return values
    rounding = values.shape[-1] * torch.finfo(values.dtype).eps * values.abs().amax(-1, keepdim=True)
    if bool((values < -8 * rounding).any()):
        raise SingularMetricError(
            f"{what} is indefinite, smallest eigenvalue {float(values.min()):.3g}, and has no power {power:g}: use a "
            "positive metric (Fisher, or a convex loss)"
        )
    return torch.where(values > rounding, values, 0.0).pow(power)


def without_rounding(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Eigenvalues [* d] of a matrix RᵀR that was computed in ``dtype``, of which none is negative.

    Values up to ε times the largest, about the error of an entry of the matrix, are zero: half of what is zero would be
    positive otherwise, and log det(RᵀR + λ) of a small λ too large. An inverse keeps them: R has the same error, and
    R(RᵀR + λ)⁻¹Rᵀ would exceed 1.

    >>> without_rounding(torch.tensor([-3e-8, 3e-8, 0.1, 1.0]), torch.float32)
    tensor([0.0000, 0.0000, 0.1000, 1.0000])
    """
    if values.numel() == 0:
        return values
    return torch.where(values > torch.finfo(dtype).eps * values.amax(-1, keepdim=True), values, 0.0)


def inverse_powered(values: Tensor, power: float) -> Tensor:
    """x^-p of positive numbers, and 0 of zero; NaN stays NaN.

    >>> inverse_powered(torch.tensor([0.0, 4.0]), 0.5)
    tensor([0.0000, 0.5000])
    """
    return torch.where(values == 0, torch.inf, values).pow(-power)


def is_number(value: object, *, whole: bool = False) -> bool:
    """Whether it is a real number, or a whole one, of Python or of numpy: ``True`` is none.

    >>> is_number(0.5), is_number("0.5"), is_number(0.5, whole=True), is_number(True)
    (True, False, False, False)
    """
    return isinstance(value, Integral if whole else Real) and not isinstance(value, bool)


def check_number_fields(thing: Any) -> None:
    """Raise if a field of a dataclass is declared as ``float`` or ``int``, or as None beside, and is something else."""
    for each in fields(thing):
        kind, _, other = str(each.type).partition(" | ")
        value = getattr(thing, each.name)
        if kind not in ("float", "int") or other not in ("", "None") or (other and value is None):
            continue
        if not is_number(value, whole=kind == "int"):
            which = "whole number" if kind == "int" else "number"
            raise TypeError(f"{type(thing).__name__}({each.name}=…) must be a {which}, got {value!r}")


def check_power(power: float, what: str) -> None:
    """A metric G has the points G^p, 0 ≤ p ≤ 1, of the geodesic from the identity to itself."""
    if not is_number(power) or not 0 <= power <= 1:
        raise ValueError(
            f"{what} must have a power between 0 and 1, got {power!r}: 1 is the natural gradient, 0 the gradient"
        )


def smallest(factor: Tensor) -> Tensor:
    """An estimate from above of the smallest eigenvalue of L Lᵀ: two steps of inverse iteration.

    Pivots would be free, but the last one of a singular matrix is far from zero where the leading part is nearly
    singular as well.
    """
    size = factor.shape[-1]
    start = torch.arange(1.0, size + 1, dtype=factor.dtype, device=factor.device).square().sin()  # no special vector
    v = start.expand(factor.shape[:-1]).unsqueeze(-1)
    for _ in range(2):
        v = torch.cholesky_solve(v / v.abs().amax(-2, keepdim=True), factor)
    return v.squeeze(-1).abs().amax(-1).reciprocal()


def _spectra(matrices: Tensor) -> Tensor:
    """Ascending eigenvalues [b d]."""
    return eigvalsh(matrices.double(), "the damped metric").reshape(-1, matrices.shape[-1])


def refuse_singular(values: Tensor, *, what: str, damping: Damping, rtol: float = 0.0, failed: bool = False) -> None:
    """Raise if an eigenvalue in ``values`` [d] is not above ``rtol`` times the largest.

    ``failed``: a factorisation has failed, so that this raises in any case. The error has the rank, the smallest
    eigenvalue and the two remedies.

    >>> refuse_singular(torch.tensor([2.0, 1.0]), what="the metric", damping=0.0)
    """
    if values.numel() == 0:
        return
    smallest, largest = map(float, values.aminmax())
    least = rtol * max(largest, 0.0)
    if not failed and smallest > least:
        return
    rank = int((values > least).sum())
    indefinite = smallest < -rtol * abs(largest)
    kind = "indefinite" if indefinite else "singular"
    inside = "solve in its range with Pinv() (in any structure but LowRank and Implicit)"
    other = "use a positive metric (Fisher, or a convex loss)" if indefinite else inside
    raise SingularMetricError(
        f"{what} is {kind} at damping {damping:g}: rank {rank} of {values.numel()}, smallest eigenvalue "
        f"{smallest:.3g}, largest {largest:.3g}. Add damping (damping > {damping:g}), or {other}"
    )


def refuse_lost_damping(damping: float, diagonal: Tensor, what: str) -> None:
    """Raise if (ω − Rᵀ(RRᵀ + λ)⁻¹Rω)/λ is noise: what is left of the difference is λ/λ_max(RRᵀ) of it, or less.

    ``diagonal``: of RRᵀ [m].
    """
    if diagonal.numel() == 0:
        return
    largest = float(diagonal.amax())
    lost = diagonal.numel() * torch.finfo(diagonal.dtype).eps * largest
    if damping <= lost:
        raise SingularMetricError(
            f"{what} is inverted through its rows, which divides by the damping: at damping {damping:g} nothing but "
            f"rounding is left beside an eigenvalue of {largest:.3g} or more. Add damping (more than "
            f"{lost:.1g}), or use Pinv() or Dense"
        )


def refuse_indefinite(values: Tensor, rtol: float, damping: Damping, what: str) -> None:
    """Raise if an eigenvalue of ``values`` [* d] is negative beyond rounding, or beyond ``rtol`` of the largest.

    A pseudo-inverse would drop it as if it were zero, and with it a part of ω that does lie in the range.
    """
    if values.numel() == 0:
        return
    rounding = 8 * values.shape[-1] * torch.finfo(values.dtype).eps
    smallest = values.amin(-1)
    negative = smallest < -max(rtol, rounding) * values.abs().amax(-1)
    if bool(negative.any()):
        raise SingularMetricError(
            f"{what} is indefinite at damping {damping:g}: smallest eigenvalue {float(smallest.min()):.3g}, largest "
            f"{float(values.max()):.3g}, and Pinv() would drop what is negative. Add damping until it is positive, or "
            "use a metric that is (Fisher, or a convex loss)"
        )


def range_rounding(size: int, dtype: torch.dtype) -> float:
    """How much of an ω = Rᵀt in the range of G = RᵀR, of ``size`` eigenvalues, can seem to lie outside.

    Directions count as null up to the eigenvalue size·ε·λ_max, and ω has the share √λ of each: √(size·ε), and twice
    that for a t which leans to the small ones. A tenth outside is not rounding in any precision.
    """
    return min(0.1, 2 * (size * torch.finfo(dtype).eps) ** 0.5)


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise if the tensor holds NaN or infinity."""
    if not bool(torch.isfinite(tensor).all()):
        raise NonFiniteError(f"{what} holds NaN or infinity. Nothing was changed")


def check_positive(value: float | Tensor, what: str, advice: str = "") -> None:
    """Raise if the number, or an entry of the tensor, is not positive and finite."""
    if not isinstance(value, Tensor) and not is_number(value):
        raise TypeError(f"{what} must be a number, got {value!r}{advice}")
    if not bool(torch.as_tensor((value > 0) & (value < torch.inf)).all()):
        raise ValueError(f"{what} must be positive and finite, got {value}{advice}")


def newton(
    x: Tensor,
    *,
    value: Callable[[Tensor], Tensor],
    gradient: Callable[[Tensor], Tensor],
    direction: Callable[[Tensor, Tensor], Tensor],
    reach: Callable[[Tensor, Tensor], Tensor] | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
    flat: float | None = None,
    axes: int = 1,
    max_steps: int = 200,
) -> tuple[Tensor, Tensor]:
    """Minimise f by damped Newton steps from x [*batch *point]; each point of the batch moves by itself.

    ``value`` is f(x) [*batch], ``gradient`` g = ∇f(x), and ``direction(x, g)`` is −H⁻¹g or another descent direction δ.
    A step tδ starts at t = min(1, 0.9 ``reach(x, δ)``), which keeps it inside the domain of f, and is halved until
    f(x + tδ) ≤ f(x) + 10⁻⁴⟨g, tδ⟩ (Armijo 1966). ``project`` maps each trial point to the feasible set. Below ``flat``
    (default: rounding of f) the squared Newton decrement λ² = −⟨g, δ⟩ replaces f, whose differences are rounding: full
    steps continue while λ² falls. A point stops when no step helps, or where δ is NaN.

    Returns x and λ² [*batch] there. The caller decides which λ² is a minimum. A point has ``axes`` trailing axes.

    >>> x, decrement = newton(
    ...     torch.tensor([4.0, 9.0]),
    ...     value=lambda x: x - 2 * x.log(),
    ...     gradient=lambda x: 1 - 2 / x,
    ...     direction=lambda x, g: -g * x.square() / 2,
    ...     reach=lambda x, δ: torch.where(δ < 0, -x / δ, torch.inf),
    ...     axes=0,
    ... )
    >>> x
    tensor([2., 2.])
    """

    def inner(a: Tensor, b: Tensor) -> Tensor:
        return (a * b).sum(tuple(range(-axes, 0))) if axes else a * b

    def per_point(t: Tensor) -> Tensor:
        return t.reshape(t.shape + (1,) * axes)

    rounding = 256 * torch.finfo(x.dtype).eps
    stopped, last = torch.tensor(False, device=x.device), torch.tensor(torch.inf, device=x.device)
    here = value(x)
    for k in range(max_steps + 1):
        g = gradient(x)
        δ = direction(x, g)
        decrement = -inner(g, δ)
        near = decrement.abs() <= (rounding * (1 + here.abs()) if flat is None else flat)
        stopped = stopped | decrement.isnan() | (near & ~(decrement.abs() < last))
        if k == max_steps or bool(stopped.all()):
            break
        δ = torch.where(per_point(stopped), 0.0, δ)
        t = torch.ones_like(here) if reach is None else (0.9 * reach(x, δ)).clamp(max=1.0)
        there, falls = here, near | stopped
        for _ in range(_HALVINGS):
            trial = x + per_point(t) * δ if project is None else project(x + per_point(t) * δ)
            if bool(falls.all()):
                break
            there = value(trial)
            falls = near | stopped | (there <= here + 1e-4 * inner(g, trial - x))
            t = torch.where(falls, t, 0.5 * t)
        x, here = torch.where(per_point(falls & ~stopped), trial, x), torch.where(falls, there, here)
        stopped, last = stopped | ~falls, torch.where(near, decrement.abs(), torch.inf)
    return x, decrement


def check_damping(damping: Damping, dtype: torch.dtype = torch.float64, *, relative: bool = True) -> None:
    """Damping is a non-negative number, and one that a metric of this precision can be added to; or it is relative."""
    if isinstance(damping, Relative):
        if not relative:
            raise TypeError(f"damping must be a number here, got {damping!r}: there are no factors to be damped apart")
        return
    if not is_number(damping):
        raise TypeError(f"damping must be a number ≥ 0, or Relative(ε), got {damping!r}")
    if not damping >= 0 or damping == float("inf"):
        raise ValueError(f"damping must be a finite number ≥ 0, got {damping}")
    if damping > torch.finfo(dtype).max / 2:
        precision = str(dtype).removeprefix("torch.")
        raise ValueError(f"damping={damping:g} overflows in the {precision} of the metric: use less, or a double model")


def gauss_rule(diagonal: Tensor, beside: Tensor) -> tuple[Tensor, Tensor]:
    """Nodes and weights [… q] of the Gauss rule of a measure, from its Jacobi matrix (Golub & Welsch 1969).

    x p_k = β_{k+1} p_{k+1} + α_k p_k + β_k p_{k−1} for the orthonormal polynomials of the measure: ``diagonal`` is
    α [… q], ``beside`` is β [… q−1]. The eigenvalues are the nodes, and the squared first entries of the eigenvectors
    the weights.

    >>> x, w = gauss_rule(torch.zeros(3, dtype=torch.float64), torch.tensor([1.0, 2.0], dtype=torch.float64).sqrt())
    >>> (w @ x**4).round(decimals=6)  # the fourth moment of N(0, 1)
    tensor(3., dtype=torch.float64)
    """
    matrix = torch.diag_embed(diagonal) + torch.diag_embed(beside, 1) + torch.diag_embed(beside, -1)
    values, vectors = eigh(matrix, "the Jacobi matrix of a measure")
    return values, vectors[..., 0, :].square()
