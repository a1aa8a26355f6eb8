"""What a metric cannot see: rank, spectrum, null directions, range and constancy of the rank of a pullback."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import range_rounding
from natgrad.model import check_slots
from natgrad.pullback.pullback import Pullback, at
from natgrad.structures.base import Layout
from natgrad.structures.dense import Dense
from natgrad.structures.kernel import Kernel


@final
@dataclass(frozen=True)
class Diagnosis:
    """The state of a metric at a point; ``print`` it for a report.

    ``spectrum``: the eigenvalues of G that can differ from zero, largest first. ``null_share``: for every parameter,
    the share of its coordinates that lies in the null space (1: the outputs do not see it). ``null_directions``: a few
    vectors that the outputs do not see. ``outside``: ‖ω − Πω‖/‖ω‖ for the projection Π onto the range of G, and
    ``in_range`` whether that is rounding (None without ω). ``constant_rank``: whether the rank is the same at
    parameters nearby, ``nearby_rank``. If so, the image of a neighbourhood of the parameters is a manifold, and the
    coordinate vectors span its tangent space; if not, the natural gradient on the model depends on the parametrisation
    (van Oostrum, Müller and Ay 2023, section 2). Constant rank does not show that the point is proper in their sense:
    other parameters far away may have the same outputs, where the image of the whole model crosses itself. The rank is
    compared at a few random parameters, on one batch.
    """

    size: int
    rank: int
    spectrum: Tensor
    null_share: dict[str, float]
    null_directions: tuple[Vector, ...]
    nearby_rank: int
    outside: float | None = None

    @property
    def singular(self) -> bool:
        return self.rank < self.size

    @property
    def constant_rank(self) -> bool:
        return self.rank == self.nearby_rank

    @property
    def in_range(self) -> bool | None:
        if self.outside is None:
            return None
        return self.outside <= range_rounding(self.spectrum.numel(), self.spectrum.dtype)

    def __str__(self) -> str:
        largest, smallest = float(self.spectrum[0]), float(self.spectrum[max(self.rank, 1) - 1])
        lines = [
            f"rank {self.rank} of {self.size}" + (": singular, damp it or use Pinv()" if self.singular else ""),
            f"eigenvalues from {largest:.3g} down to {smallest:.3g}, condition {largest / smallest:.3g} in the range"
            if self.rank
            else "the metric is zero",
            "constant rank: it is the same nearby"
            if self.constant_rank
            else f"no constant rank: it is {self.nearby_rank} nearby, the step depends on the parametrisation",
        ]
        if self.outside is not None:
            inside = "lies in the range of the metric" if self.in_range else "does not lie in the range of the metric"
            lines.append(f"ω {inside} (relative part outside {self.outside:.2g})")
        lines += [f"  {name}: {share:6.1%} null" for name, share in self.null_share.items() if share > 1e-9]
        return "\n".join(lines)


def diagnose(
    pullback: Pullback, ω: Covector | None = None, *, rtol: float | None = None, nearby: int = 2, directions: int = 4
) -> Diagnosis:
    """Rank, spectrum and null directions of a pulled-back metric, which is not inverted.

    ``rtol``: eigenvalues at most rtol times the largest count as zero (default: their number × machine epsilon).
    ``nearby``: at how many random parameters close by the rank is compared. ``directions``: how many null directions.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 3).double()
    >>> x = torch.randn(8, 2, dtype=torch.float64)
    >>> print(ng.diagnose(ng.pullback(model, x, ng.Fisher(ng.Categorical()))).rank)  # 9, less one constant a column
    6
    """
    check_slots(pullback=(pullback, Pullback))
    basis, spectrum, rank = _range(pullback, rtol)
    layout = Layout.of(pullback.model.params, pullback.y.dtype)
    visible = basis.square().sum(1)  # the diagonal of the projection onto the range
    share = {name: 1 - float(t.mean()) for name, t in layout.vector(visible).items()}
    outside = None
    if ω is not None:
        flat = layout.flatten(ω).to(basis)
        norm = torch.linalg.vector_norm(flat)
        rest = flat - basis @ (basis.T @ flat)
        outside = float(torch.linalg.vector_norm(rest) / norm) if float(norm) > 0 else 0.0
    return Diagnosis(
        size=pullback.model.size,
        rank=rank,
        spectrum=spectrum,
        null_share={name: max(value, 0.0) for name, value in share.items()},
        null_directions=_null(basis, visible, layout, min(directions, pullback.model.size - rank)),
        nearby_rank=max([rank] + [_rank_nearby(pullback, rtol, seed) for seed in range(nearby)]),
        outside=outside,
    )


def _range(pb: Pullback, rtol: float | None) -> tuple[Tensor, Tensor, int]:
    """An orthonormal basis U [p rank] of the range of G, the spectrum (largest first) and the rank."""
    small = min(pb.model.size, pb.columns * pb.n)
    needed = small * pb.model.size * pb.y.element_size()
    if needed > pb.memory:
        raise MemoryBoundError(
            f"the eigenvectors of {pb.model.size:,} parameters need {needed:,} bytes, over the bound "
            f"memory={pb.memory:,}: diagnose a smaller batch or a part of the model (freeze the rest)"
        )
    if pb.model.size <= pb.columns * pb.n:
        values, vectors = torch.linalg.eigh(Dense().estimate(pb).matrix)
    else:
        kernel = Kernel().estimate(pb)
        values, vectors = torch.linalg.eigh(kernel.gram())
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
