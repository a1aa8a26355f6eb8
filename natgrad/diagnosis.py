"""What a metric cannot see: rank, spectrum, null directions, range and constancy of the rank of a pullback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError, NatgradError
from natgrad.geometry import Covector, Vector, check_kind
from natgrad.lanczos import SpectralDensity, residual, spectral_density
from natgrad.linalg import eigh, range_rounding
from natgrad.model import check_slots, map_tensors
from natgrad.pullbacks.pullback import Observer, Pullback, at, layers_of
from natgrad.show import as_html, brief
from natgrad.structures.base import Layout
from natgrad.structures.dense import Dense
from natgrad.structures.implicit import Implicit
from natgrad.structures.kernel import Kernel

_LARGEST = 2048  # rows of a matrix whose eigenvectors are computed: some seconds on a processor


@final
@dataclass(frozen=True)
class Diagnosis:
    """The state of a metric: rank, spectrum, null directions; ``print`` it for a report.

    By the Lanczos process, ``rank`` is an estimate with the error ``rank_error``, ``spectrum`` the Ritz values of one
    probe (the largest are eigenvalues), ``outside`` a bound from above, and what needs eigenvectors is left out.

    Attributes:
        size: The number of parameters.
        rank: The number of eigenvalues that are not zero.
        spectrum: The eigenvalues of G that can differ from zero, largest first, in double precision where the model
            runs in it.
        null_share: For every parameter, the share of its coordinates that lies in the null space (1: the outputs do not
            see it).
        null_directions: A few vectors that the outputs do not see.
        nearby_rank: The rank at a few random parameters nearby, on the same batch; None by the Lanczos process.
        outside: ‖ω − Πω‖/‖ω‖ for the projection Π onto the range of G; ``in_range`` says whether that is rounding.
        dtype: The precision of the model. ``resolved`` counts the eigenvalues above its rounding: where that is less
            than ``rank``, a rank that is found in that precision is another one.
        density: By the Lanczos process: the spectrum of random probes.
        rank_error: By the Lanczos process: the standard error of the rank.

    Method:
        ``constant_rank`` says whether the rank is the same nearby. If so, the image of a neighbourhood of the
        parameters is a manifold, and the coordinate vectors span its tangent space; if not, the natural gradient on the
        model depends on the parametrisation (van Oostrum, Müller and Ay 2023, section 2).

        Constant rank does not show that the point is proper in their sense: other parameters far away may have the same
        outputs, where the image of the whole model crosses itself.
    """

    size: int
    rank: int
    spectrum: Tensor
    null_share: dict[str, float]
    null_directions: tuple[Vector, ...]
    nearby_rank: int | None
    outside: float | None = None
    dtype: torch.dtype | None = None
    density: SpectralDensity | None = None
    rank_error: float = 0.0

    __repr__ = brief
    _repr_html_ = as_html

    @property
    def singular(self) -> bool:
        """Whether some directions of the parameters do not change the outputs."""
        return self.rank < self.size

    @property
    def constant_rank(self) -> bool | None:
        """Whether the rank is the same nearby; None where that was not looked at."""
        return None if self.nearby_rank is None else self.rank == self.nearby_rank

    @property
    def in_range(self) -> bool | None:
        """None without ω, and where the Lanczos process has not decided it."""
        if self.outside is None:
            return None
        small = self.outside <= range_rounding(self.spectrum.numel(), self.dtype or self.spectrum.dtype)
        return small if small or self.density is None else None

    @property
    def resolved(self) -> int:
        """How many eigenvalues are above the rounding of the model's own precision."""
        if self.dtype is None or self.dtype == self.spectrum.dtype or self.rank == 0:
            return self.rank
        rounding = torch.finfo(self.dtype).eps * float(self.spectrum[0])
        if self.density is not None:
            return min(self.rank, round(self.density.count_above(rounding * self.density.probed)[0]))
        return min(self.rank, int((self.spectrum > rounding * self.spectrum.numel()).sum()))

    def __str__(self) -> str:
        about = f" ± {self.rank_error:.2g}" if self.rank_error else ""
        lines = [f"rank {self.rank}{about} of {self.size}" + (": singular, damp it or use Pinv()" * self.singular)]
        if not self.rank:
            lines.append("the metric is zero")
        elif self.density is None:
            largest, smallest = float(self.spectrum[0]), float(self.spectrum[self.rank - 1])
            condition = f"condition {largest / smallest:.3g} in the range"
            lines.append(f"eigenvalues from {largest:.3g} down to {smallest:.3g}, {condition}")
        else:
            lines.append(f"largest eigenvalue {self.density.largest:.3g}; eigenvalues by decades:\n{self.density}")
        if self.dtype is not None and self.spectrum.dtype != torch.float64:
            lines.append(f"computed in {_name(self.spectrum.dtype)}: in float64 the rank may be larger")
        elif self.resolved < self.rank:
            name = _name(self.dtype)
            lines.append(
                f"in {name} only {self.resolved} of them are above rounding: its rank and that of float64 differ"
            )
        if self.constant_rank:
            lines.append("constant rank: it is the same nearby")
        elif self.nearby_rank is not None:
            lines.append(f"no constant rank: it is {self.nearby_rank} nearby, the step depends on the parametrisation")
        if self.outside is not None:
            verdict = {True: "lies in", False: "does not lie in", None: "is not shown to lie in"}[self.in_range]
            most = "at most " if self.density is not None else ""
            lines.append(f"ω {verdict} the range of the metric (relative part outside {most}{self.outside:.2g})")
        lines += [f"  {name}: {share:6.1%} null" for name, share in self.null_share.items() if share > 1e-9]
        return "\n".join(lines)


def _name(dtype: torch.dtype | None) -> str:
    return str(dtype).removeprefix("torch.")


def diagnose(
    pullback: Pullback,
    ω: Covector | None = None,
    *,
    rtol: float | None = None,
    nearby: int = 2,
    directions: int = 4,
    method: Literal["auto", "dense", "lanczos"] = "auto",
    probes: int = 4,
    steps: int = 200,
    generator: torch.Generator | None = None,
) -> Diagnosis:
    """Rank, spectrum and null directions of a metric, without inverting it.

    Args:
        pullback: The metric, from ``ng.pullback``.
        ω: A covector to be tested: does it lie in the range of the metric?
        rtol: Eigenvalues at most rtol times the largest count as zero (default: their number × the machine epsilon of
            double precision, in which all is computed where the model allows).
        nearby: At how many random parameters close by the rank is compared.
        directions: How many null directions are returned.
        method: "dense" computes all eigenvectors, of G or of the N·K rows of its root, whichever is smaller; "auto"
            takes it up to 2,048 of them, within the memory bound of the pullback. "lanczos" takes products with G
            alone, and reports the rank with an error (``natgrad.spectral_density``).
        probes: By "lanczos": the number of random vectors.
        steps: By "lanczos": products with G for each of them.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.

    Returns:
        A ``Diagnosis``; ``print`` it.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 3).double()
        >>> x = torch.randn(8, 2, dtype=torch.float64)
        >>> print(ng.diagnose(ng.pullback(model, x, ng.Fisher(ng.Categorical()))).rank)  # 9, less one constant a column
        6
    """
    check_slots(pullback=(pullback, Pullback))
    if ω is not None:
        check_kind(ω, Covector, "diagnose(pullback, ω)")
    if method not in ("auto", "dense", "lanczos"):
        raise ValueError(f'diagnose(method=…) is "auto", "dense" or "lanczos", not {method!r}')
    dtype = pullback.model.example.dtype
    small = min(pullback.model.size, pullback.columns * pullback.n)
    needed = small * pullback.model.size * torch.float64.itemsize
    if method == "auto":
        method = "dense" if small <= _LARGEST and needed <= pullback.memory else "lanczos"
    if method == "dense" and needed > pullback.memory:
        raise MemoryBoundError(
            f"the eigenvectors of {pullback.model.size:,} parameters need {needed:,} bytes, over the bound "
            f'memory={pullback.memory:,}: use method="lanczos", or diagnose a smaller batch or a part of the model'
        )
    pb = _in_double(pullback)
    layout = Layout.of(pullback.model.params, pb.y.dtype)
    if method == "lanczos":
        return _by_lanczos(pb, ω, rtol, probes, steps, generator, layout, dtype)
    basis, spectrum, rank = _range(pb, rtol)
    visible = basis.square().sum(1)  # the diagonal of the projection onto the range
    share = {name: 1 - float(t.mean()) for name, t in layout.vector(visible).items()}
    outside = None
    if ω is not None:
        flat = layout.flatten(ω).to(basis)
        norm = torch.linalg.vector_norm(flat)
        rest = flat - basis @ (basis.T @ flat)
        outside = float(torch.linalg.vector_norm(rest) / norm) if float(norm) > 0 else 0.0
    return Diagnosis(
        size=pb.model.size,
        rank=rank,
        spectrum=spectrum,
        null_share={name: max(value, 0.0) for name, value in share.items()},
        null_directions=_null(basis, visible, layout, min(directions, pb.model.size - rank)),
        nearby_rank=max([rank] + [_rank_nearby(pb, rtol, seed) for seed in range(nearby)]),
        outside=outside,
        dtype=dtype,
    )


def _by_lanczos(
    pb: Pullback,
    ω: Covector | None,
    rtol: float | None,
    probes: int,
    steps: int,
    generator: torch.Generator | None,
    layout: Layout,
    dtype: torch.dtype,
) -> Diagnosis:
    G = Implicit().estimate(pb)
    density = spectral_density(G, probes=probes, steps=steps, generator=generator, memory=pb.memory)
    cut = density.rounding if rtol is None else rtol * density.largest
    low, high = density.bounds_above(cut)
    error = density.count_above(cut)[1]
    first = density.values[0][density.counts[0] > 0]
    return Diagnosis(
        size=pb.model.size,
        rank=round((low + high) / 2),
        spectrum=first.sort(descending=True).values.to(pb.y.dtype),
        null_share={},
        null_directions=(),
        nearby_rank=None,
        outside=None if ω is None else residual(G.product, layout.flatten(ω).to(pb.y), steps),
        dtype=dtype,
        density=density,
        rank_error=(high - low) / 2 + error,
    )


def _in_double(pb: Pullback) -> Pullback:
    """The same pullback in double precision; itself where that is what it is, or where the model does not run in it.

    A sampled metric stays: in another precision its samples would be other ones.
    """
    if pb.y.dtype == torch.float64 or not pb.metric.exact:
        return pb

    def double(t: Tensor) -> Tensor:
        return t.double() if t.is_floating_point() else t

    try:
        moved = pb.model.copied()
        if moved.module is None:
            moved = moved.at({name: p.detach().double() for name, p in moved.params.items()})
        else:
            moved.module.double()
        x, target = map_tensors(pb.batch.x, double), map_tensors(pb.batch.target, double)
        new = Observer(moved, pb.metric, layers_of(moved), None, pb.memory).checked(x, target)
    except (RuntimeError, TypeError, ValueError, NatgradError):  # single precision is written into it somewhere
        return pb
    return new if new.y.dtype == torch.float64 and new.y.shape == pb.y.shape else pb


def _range(pb: Pullback, rtol: float | None) -> tuple[Tensor, Tensor, int]:
    """An orthonormal basis U [p rank] of the range of G, the spectrum (largest first) and the rank."""
    if pb.model.size <= pb.columns * pb.n:
        values, vectors = eigh(Dense().estimate(pb).matrix, "the metric")
    else:
        kernel = Kernel().estimate(pb)
        values, vectors = eigh(kernel.gram(), "the kernel of the metric")
        vectors = kernel.rows().T @ vectors / values.clamp(min=torch.finfo(values.dtype).tiny).sqrt()
    cut = (values.numel() * torch.finfo(values.dtype).eps if rtol is None else rtol) * values[-1].clamp(min=0)
    rank = int((values > cut).sum())
    return vectors[:, values.numel() - rank :], values.flip(0), rank


def _rank_nearby(pb: Pullback, rtol: float | None, seed: int) -> int:
    """The rank at parameters moved at random: by a step whose square, an eigenvalue, is still far above rounding."""
    size = torch.finfo(pb.y.dtype).eps ** (1 / 6)
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: p + size * (1 + p.abs()) * torch.randn(p.shape, generator=generator).to(p)
        for name, p in pb.template.items()
    }
    return _range(at(pb, moved), rtol)[2]


def _null(basis: Tensor, visible: Tensor, layout: Layout, count: int) -> tuple[Vector, ...]:
    """Orthonormal null directions, from the coordinate axes that the metric sees least."""
    if count < 1:
        return ()
    axes = visible.argsort()[:count]
    start = torch.zeros(visible.numel(), count, dtype=basis.dtype, device=basis.device)
    start[axes, torch.arange(count, device=basis.device)] = 1
    for _ in range(2):  # twice: one projection loses digits where an axis lies almost in the range
        start, _ = torch.linalg.qr(start - basis @ (basis.T @ start))
    return tuple(layout.vector(column) for column in start.T.contiguous())
