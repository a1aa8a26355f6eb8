"""Small dense linear algebra with errors that say what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from natgrad.errors import NonFiniteError, SingularMetricError

_SMALL = 2**14  # numbers
_HALVINGS = 60  # of a Newton step


def symmetric_root(h: Tensor, failure: str) -> Tensor:
    """h^½ [n d e] of positive semi-definite h; eigenvalues negative beyond rounding raise."""
    values, vectors = torch.linalg.eigh(0.5 * (h + h.transpose(-1, -2)))
    rounding = h.shape[-1] * torch.finfo(h.dtype).eps * values.abs().amax(-1)
    negative = values[:, 0] < -8 * rounding
    if bool(negative.any()):
        n = int(negative.nonzero()[0, 0])
        raise SingularMetricError(
            f"{failure} at example {n}: its Hessian has the eigenvalue {float(values[n, 0]):.3g}, and an indefinite h "
            "is not a metric. Use a convex function, or Fisher, or Euclidean"
        )
    scaled = vectors * values.clamp(min=0).sqrt().unsqueeze(-2)  # what is left below zero is rounding
    return scaled @ vectors.transpose(-1, -2)


def cholesky(matrix: Tensor, damping: float, what: str) -> Tensor:
    """L with L Lᵀ = matrix + damping, for one matrix [d d] or a batch [b d d]; singular and indefinite ones raise.

    Rounding lets Cholesky succeed on a singular matrix and return noise. Without damping to speak of, matrices that
    look singular are therefore checked against their spectrum.
    """
    check_finite(matrix, what)
    if matrix.numel() == 0:
        return matrix
    damped = matrix.clone()
    diagonal = damped.diagonal(dim1=-2, dim2=-1)
    diagonal.add_(damping)
    factor, info = torch.linalg.cholesky_ex(damped)
    size, eps = matrix.shape[-1], torch.finfo(matrix.dtype).eps
    largest = diagonal.amax(-1)
    suspicious = info > 0
    lost = damping <= 8 * eps * largest  # damping below the rounding of the matrix cannot make it regular
    if bool(lost.any()):
        suspicious |= lost & ~(smallest(factor) > 1e3 * size * eps * largest)  # NaN is suspicious too
    if bool(suspicious.any()):
        for values, failed in zip(_spectra(damped[suspicious]), info[suspicious], strict=True):
            refuse_singular(values, size * eps, bool(failed > 0), damping, what)
    return factor


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
    return torch.linalg.eigvalsh(matrices.double()).reshape(-1, matrices.shape[-1])


def refuse_singular(values: Tensor, rtol: float, failed: bool, damping: float, what: str) -> None:
    """Raise with rank, smallest eigenvalue and the two remedies, if the ascending ``values`` call for it."""
    smallest, largest = float(values[0]), float(values[-1])
    rank = int((values > rtol * max(largest, 0.0)).sum())
    if not failed and rank == values.numel():
        return
    indefinite = smallest < -rtol * abs(largest)
    kind = "indefinite" if indefinite else "singular"
    other = "use a positive metric (Fisher, or a convex loss)" if indefinite else "solve in its range with Pinv()"
    raise SingularMetricError(
        f"{what} is {kind} at damping {damping:g}: rank {rank} of {values.numel()}, smallest eigenvalue "
        f"{smallest:.3g}, largest {largest:.3g}. Add damping (damping > 0), or {other}"
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


def refuse_indefinite(values: Tensor, rtol: float, damping: float, what: str) -> None:
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


def check_finite(tensor: Tensor, what: str) -> None:
    """Raise if the tensor holds NaN or infinity."""
    if not bool(torch.isfinite(tensor).all()):
        raise NonFiniteError(f"{what} holds NaN or infinity. Nothing was changed")


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
    for k in range(max_steps + 1):
        here, g = value(x), gradient(x)
        δ = direction(x, g)
        decrement = -inner(g, δ)
        near = decrement.abs() <= (rounding * (1 + here.abs()) if flat is None else flat)
        stopped = stopped | decrement.isnan() | (near & ~(decrement.abs() < last))
        if k == max_steps or bool(stopped.all()):
            break
        δ = torch.where(per_point(stopped), 0.0, δ)
        t = torch.ones_like(here) if reach is None else (0.9 * reach(x, δ)).clamp(max=1.0)
        for _ in range(_HALVINGS):
            trial = x + per_point(t) * δ if project is None else project(x + per_point(t) * δ)
            falls = near | stopped | (value(trial) <= here + 1e-4 * inner(g, trial - x))
            if bool(falls.all()):
                break
            t = torch.where(falls, t, 0.5 * t)
        x, stopped = torch.where(per_point(falls & ~stopped), trial, x), stopped | ~falls
        last = torch.where(near, decrement.abs(), torch.inf)
    return x, decrement


def check_damping(damping: float, dtype: torch.dtype = torch.float64) -> None:
    """Damping is a non-negative number, and one that a metric of this precision can be added to."""
    if not damping >= 0 or damping == float("inf"):
        raise ValueError(f"damping must be a finite number ≥ 0, got {damping}")
    if damping > torch.finfo(dtype).max / 2:
        precision = str(dtype).removeprefix("torch.")
        raise ValueError(f"damping={damping:g} overflows in the {precision} of the metric: use less, or a double model")


def consecutive(tensors: Sequence[Tensor]) -> Tensor | None:
    """[b *shape] of tensors of one shape, each without gaps, that follow each other in memory: a view. Else None.

    >>> both = torch.arange(6.0).view(2, 3)
    >>> consecutive([both[0], both[1]]).shape, consecutive([both[1], both[0]])
    (torch.Size([2, 3]), None)
    """
    first, size = tensors[0], tensors[0].numel()
    place, start = first.untyped_storage().data_ptr(), first.storage_offset()
    for at, t in enumerate(tensors):
        if t.shape != first.shape or t.dtype != first.dtype or not t.is_contiguous():
            return None
        if t.storage_offset() != start + at * size or t.untyped_storage().data_ptr() != place:
            return None
    return first.as_strided((len(tensors), *first.shape), (size, *first.stride()))


def pairing(pairs: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ ⟨x, y⟩ over pairs of tensors; on a GPU in few launches where the y lie side by side in one piece of memory.

    At least in single precision: sums in half precision soon leave its range. The order of the sum does not depend on
    where the x lie, or that piece: a run that is resumed has the same bits.

    >>> x, y = torch.ones(2, 3), torch.arange(6.0).view(2, 3)
    >>> pairing([(x[0], y[0]), (x[1], y[1])])
    tensor(15.)
    """
    runs = [[pair] for pair in pairs] if pairs[0][1].device.type == "cpu" else _few(side_by_side(pairs))
    wholes = ((_joined([x for x, _ in run]), _joined([y for _, y in run])) for run in runs)
    precise = ((x, y.to(torch.promote_types(y.dtype, torch.float32))) for x, y in wholes)
    return torch.stack([torch.dot(x.to(y.dtype), y) for x, y in precise]).sum()


def _few(runs: Sequence[list[tuple[Tensor, Tensor]]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The runs, the small ones among them (biases, scales) as one: a launch costs more than their copies.

    >>> [len(run) for run in _few([[(torch.zeros(1), torch.ones(1))], [(torch.ones(2), torch.ones(2))]])]
    [2]
    """
    sizes = [sum(y.numel() for _, y in run) for run in runs]
    small = [pair for run, size in zip(runs, sizes, strict=True) if size <= _SMALL for pair in run]
    large = [run for run, size in zip(runs, sizes, strict=True) if size > _SMALL]
    return [*large, small] if small else large


def side_by_side(pairs: Sequence[tuple[Tensor, Tensor]]) -> list[list[tuple[Tensor, Tensor]]]:
    """The pairs, in runs whose second tensors are ``consecutive``."""
    pieces: dict[int, list[tuple[Tensor, Tensor]]] = {}
    for pair in pairs:
        pieces.setdefault(pair[1].untyped_storage().data_ptr(), []).append(pair)
    runs: list[list[tuple[Tensor, Tensor]]] = []
    for piece in pieces.values():
        last: Tensor | None = None
        for pair in sorted(piece, key=lambda pair: pair[1].storage_offset()):
            if last is None or pair[0].shape != pair[1].shape or consecutive([last, pair[1]]) is None:
                runs.append([])
            runs[-1].append(pair)
            last = pair[1]
    return runs


def _joined(run: Sequence[Tensor]) -> Tensor:
    """All numbers of tensors, one after the other."""
    if len(run) == 1:
        return run[0].flatten()
    whole = consecutive(run)
    return torch.cat([t.flatten() for t in run]) if whole is None else whole.flatten()


def gated_add(tensors: Sequence[Tensor], changes: Sequence[Tensor], weight: float, found: Tensor) -> None:
    """Add weight times the changes, unless ``found`` (a number on the GPU) is not zero: one launch, nothing waits."""
    _descend(tensors, changes, -weight, found, decay=0.0)


def gated_descent(tensors: Sequence[Tensor], velocity: Sequence[Tensor], rate: float | Tensor, found: Tensor) -> None:
    """Subtract rate times the velocity, as ``gated_add``; the rate may be a number on the GPU, in single precision."""
    _descend(tensors, velocity, rate, found, decay=0.0)


def gated_lerp(
    tensors: Sequence[Tensor], totals: Sequence[Tensor], weight: float | Tensor, count: float, found: Tensor
) -> None:
    """(1 − w) x + w y/count in the memory of x, as ``gated_add``; w may be on the GPU, in single precision."""
    _descend(tensors, totals, weight / count, found, decay=count)


def gated_momentum(
    tensors: Sequence[Tensor],
    directions: Sequence[Tensor],
    momenta: Sequence[Tensor],
    rate: float | Tensor,
    persistence: float,
    divisor: Tensor,
    found: Tensor,
) -> None:
    """m ← μm + v/divisor, x ← x − rate·m, as ``gated_add``: one pass over all three. The directions are used up."""
    torch._fused_sgd_(
        list(tensors),
        _alike(directions, tensors),
        list(momenta),
        weight_decay=0.0,
        momentum=persistence,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,
        grad_scale=divisor,
        found_inf=found,
    )


def _descend(
    tensors: Sequence[Tensor], others: Sequence[Tensor], rate: float | Tensor, found: Tensor, decay: float
) -> None:
    """x − rate·y or, with a decay, x − rate·(decay·x − y): torch's fused descent, or ascent."""
    torch._fused_sgd_(
        list(tensors),
        _alike(others, tensors),
        [],
        weight_decay=decay,
        momentum=0.0,
        lr=rate,
        dampening=0.0,
        nesterov=False,
        maximize=decay > 0,
        is_first_step=False,
        found_inf=found,
    )


def _alike(others: Sequence[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The others, in the memory formats of the tensors: a fused kernel reads them side by side."""
    pairs = zip(tensors, others, strict=True)
    return [y if y.stride() == x.stride() else torch.empty_like(x).copy_(y) for x, y in pairs]
