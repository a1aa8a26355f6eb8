"""Diagnose a pulled-back metric: rank, spectrum, null directions, range, properness."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError
from natgrad.geometry import Covector, Vector
from natgrad.pullback.pullback import Pullback, at
from natgrad.structures.base import Layout
from natgrad.structures.dense import Dense
from natgrad.structures.kernel import Kernel


@final
@dataclass(frozen=True)
class Diagnosis:
    """The state of a metric at a point; ``print`` it for a report.

    ``spectrum``: the eigenvalues of G that can differ from zero, largest first. ``null_share``: for every parameter,
    the share of its coordinates that lies in the null space (1: the outputs do not depend on it). ``null_directions``:
    a few vectors in the null space. ``outside``: ‖ω − Πω‖/‖ω‖ for the projection Π onto the range of G, and
    ``in_range`` whether that is rounding (None without ω). ``proper``: whether the rank is the same at nearby
    parameters (``nearby_rank``). Then the image of the model is a manifold there, and the coordinate vectors span its
    tangent space;
    if not, the natural gradient on the model depends on the parametrisation (van Oostrum, Müller and Ay (2023)).
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
    def proper(self) -> bool:
        return self.rank == self.nearby_rank

    @property
    def in_range(self) -> bool | None:
        return None if self.outside is None else self.outside <= _rounding(self.spectrum)

    def __str__(self) -> str:
        largest, smallest = float(self.spectrum[0]), float(self.spectrum[max(self.rank, 1) - 1])
        lines = [
            f"rank {self.rank} of {self.size}" + (": singular, damp it or use Pinv()" if self.singular else ""),
            f"eigenvalues from {largest:.3g} down to {smallest:.3g}, condition {largest / smallest:.3g} in the range"
            if self.rank
            else "the metric is zero",
            "proper: the rank is the same nearby"
            if self.proper
            else f"not proper: the rank is {self.nearby_rank} nearby, the step depends on the parametrisation",
        ]
        if self.outside is not None:
            inside = "lies in the range of the metric" if self.in_range else "does not lie in the range of the metric"
            lines.append(f"ω {inside} (relative part outside {self.outside:.2g})")
        lines += [f"  {name}: {share:6.1%} null" for name, share in self.null_share.items() if share > 1e-9]
        return "\n".join(lines)


def diagnose(
    pullback: Pullback, ω: Covector | None = None, *, rtol: float | None = None, nearby: int = 2, directions: int = 4
) -> Diagnosis:
    """Analyse a pulled-back metric without inverting it.

    ``rtol``: eigenvalues at most rtol times the largest count as zero (default: their number × machine epsilon).
    ``nearby``: the number of random nearby parameters at which the rank is compared. ``directions``: the number of null
    directions to return.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 3).double()
    >>> x = torch.randn(8, 2, dtype=torch.float64)
    >>> print(ng.diagnose(ng.pullback(model, x, ng.Fisher(ng.Categorical()))).rank)  # 9, less one constant a column
    6
    """
    basis, spectrum, rank = _range(pullback, rtol)
    layout = Layout.of(pullback.model.params, pullback.y.dtype)
    diagonal = basis.square().sum(1)  # of the projection onto the range
    share = {name: 1 - float(t.mean()) for name, t in layout.vector(diagonal).items()}
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
        null_directions=_null(basis, diagonal, layout, min(directions, pullback.model.size - rank)),
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
    """The rank at randomly perturbed parameters; the squared size of the step is far above rounding."""
    size = torch.finfo(pb.y.dtype).eps ** (1 / 6)
    generator = torch.Generator().manual_seed(seed)
    moved = {
        name: p + size * (1 + p.abs()) * torch.randn(p.shape, generator=generator).to(p)
        for name, p in pb.template.items()
    }
    return _range(at(pb, moved), rtol)[2]


def _null(basis: Tensor, diagonal: Tensor, layout: Layout, count: int) -> tuple[Vector, ...]:
    """Orthonormal null directions, from the coordinate axes that are closest to the null space."""
    if count < 1:
        return ()
    axes = diagonal.argsort()[:count]
    start = torch.zeros(diagonal.numel(), count, dtype=basis.dtype, device=basis.device)
    start[axes, torch.arange(count, device=basis.device)] = 1
    for _ in range(2):  # twice, because one projection loses digits if an axis lies almost in the range
        start, _ = torch.linalg.qr(start - basis @ (basis.T @ start))
    return tuple(layout.vector(column) for column in start.T.contiguous())


def _rounding(spectrum: Tensor) -> float:
    """How much of an ω = Rᵀt in the range may appear to lie outside it, by rounding.

    Directions count as null up to the eigenvalue size·ε·λ_max, and ω contains √λ of each: √(size·ε), doubled for a t
    that prefers small eigenvalues. More than a tenth is not rounding in any precision.
    """
    return min(0.1, 2 * (spectrum.numel() * torch.finfo(spectrum.dtype).eps) ** 0.5)
