"""LowRank: the leading eigenpairs of the metric, and the diagonal of what is left as a floor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast, final

import torch
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import Self

from natgrad.accelerate.roots import spectrum
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    cholesky,
    is_number,
    refuse_singular,
    svd,
)
from natgrad.model import Model
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import Cost, DualMetric, Inverse, Layout, Operator, Structure, check_shape
from natgrad.structures.dense import CholeskyInverse, Dense, restore_inverse
from natgrad.structures.implicit import Implicit
from natgrad.structures.kernel import Kernel
from natgrad.structures.woodbury import Columns, RangeOperator, WoodburyInverse

_WHAT = "the low-rank metric"
_LARGEST = 4096  # parameters, up to which a matrix is affordable


@final
@dataclass(frozen=True, repr=False)
class LowRank(Structure):
    """Keep the largest eigenpairs of the metric, and a diagonal for the rest.

    Args:
        rank: The number of eigenpairs.
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.

    Method:
        Averaging cuts back to the rank every time: an average over micro-batches, or over time, has the diagonal of the
        joint batch exactly, and its leading eigenpairs only as far as each part had kept them.

        A diagonal and a range have no eigenvectors in common. With a ``power`` below 1 the floor is therefore one
        number, its mean: G = U diag(s) Uᵀ + d, and G^p has (s + d)^p on the range of U and d^p beside it.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> LowRank(1).estimate(pb).values.round()
        tensor([6.])
    """

    rank: int
    power: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.rank, whole=True) or self.rank < 1:
            raise ValueError(f"LowRank(rank) needs a positive rank, got {self.rank!r}")

    def elements(self, pullback: Pullback) -> int:
        small = min(pullback.columns * pullback.n, pullback.model.size)
        return (min(self.rank, small) + 2) * pullback.model.size + small**2

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> LowRankOperator:
        self.admit(pullback)
        layout = Layout(pullback.model.like, pullback.y.dtype)
        if pullback.model.size <= pullback.columns * pullback.n:
            matrix = Dense().estimate(pullback).matrix
            values, u = leading(matrix, self.rank)
            return with_floor(layout, u, values, matrix.diagonal(), self.rank).with_power(self.power)
        # Eigenvectors of G = RᵀR are Rᵀw/√s for the eigenvectors w of the smaller R Rᵀ; R itself is never formed.
        kernel = Kernel().estimate(pullback)
        values, w = leading(kernel.gram(), self.rank)
        u = values.new_empty(layout.size, values.numel())
        for j, value in enumerate(values):
            u[:, j] = kernel.pull(w[:, j].view(kernel.factors[0].g.shape[:2])) / value.sqrt()
        return with_floor(layout, u, values, kernel.diagonal(), self.rank).with_power(self.power)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> LowRankOperator:
        G = restore_low_rank(model, tensors, self.rank)
        if self.power != 1 and bool((G.floor != G.floor[:1]).any()):  # saved at the power 1
            return G.with_power(self.power)
        return replace(G, power=self.power)

    def cost(self, blocks: Sequence[Block], *, exact: bool = False, iterative: bool = False) -> Cost:
        p = sum(block.size for block in blocks)
        r = min(self.rank, p)
        inverse = 0 if iterative else r + 1 if self.power != 1 else (r + 1) * p + r**2  # a power has U of the metric
        return Cost((r + 1) * p + r + inverse, {"U": (1, p, r)})


@final
@dataclass(frozen=True, repr=False)
class LowRankOperator(Operator):
    """A metric as its leading eigenpairs and a floor.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        vectors: U [p r].
        values: s [r].
        floor: d [p], which keeps the diagonal of G exact. With another ``power`` than 1 it is one number, and keeps the
            trace.
        rank: The eigenpairs that a moving average may keep; one batch can have fewer.
        power: p: the operator is G^p of the G that the tensors hold.

    Method:
        G ≈ U diag(s) Uᵀ + diag(d).
    """

    layout: Layout
    vectors: Tensor  # U [p r]
    values: Tensor  # s [r]
    floor: Tensor  # d [p]
    rank: int  # eigenpairs that a moving average may keep; one batch can have fewer
    power: float = field(default=1.0, kw_only=True)

    def with_power(self, power: float) -> Self:
        out = super().with_power(power)
        if out is self or power == 1:
            return out
        return replace(out, floor=out.floor.mean().expand_as(out.floor).clone())

    def map(self, f: Callable[[Tensor], Tensor]) -> Operator:
        if self.eigenvalues() is None:
            return super().map(f)
        return RangeOperator(self.layout, Columns(self.vectors), f(self.values + self.floor[0]), f(self.floor[0]))

    def eigenvalues(self) -> Tensor | None:
        """Where the floor is one number, as at every other power than 1: a diagonal has other eigenvectors."""
        if bool(self.floor.amax() > self.floor.amin()):
            return None
        return F.pad(self.values, (0, self.floor.numel() - self.values.numel())).double() + self.floor

    def product(self, v: Tensor) -> Tensor:
        s, d = self._powers()
        return self.vectors @ (s * (self.vectors.T @ v)) + d * v

    def diagonal(self) -> Tensor:
        s, d = self._powers()
        return self.vectors.square() @ s + d

    def dense(self) -> Tensor:
        s, d = self._powers()
        return (self.vectors * s) @ self.vectors.T + d.diag()

    def _powers(self) -> tuple[Tensor, Tensor]:
        """s [r] and d [p] of G^p = U diag(s) Uᵀ + diag(d)."""
        if self.power == 1:
            return self.values, self.floor
        spectrum = torch.cat([self.floor[:1], self.values + self.floor[0]])
        rounding = self.floor.numel() * torch.finfo(spectrum.dtype).eps * spectrum.amax()
        # As in ``powered``: 10⁻¹⁶ is rounding, and its fourth root 10⁻⁴ would not look like it.
        outside, inside = torch.where(spectrum > rounding, spectrum, 0.0).pow(self.power).tensor_split([1])
        return inside - outside, outside.expand_as(self.floor)

    def _logdet(self, damping: Damping) -> Tensor:
        """log det(E + BBᵀ) = log det E + log det(1 + BᵀE⁻¹B), E = d + λ, in double precision."""
        λ, dtype = self.absolute(damping), self.floor.dtype
        vectors, values, floor = (t.double() for t in (self.vectors, self.values, self.floor))
        G = replace(self, vectors=vectors, values=values, floor=floor, power=1.0)
        if G._bare(λ):
            return (2 * cholesky(G.dense(), λ, _WHAT).diagonal().log().sum()).to(dtype)
        e, _, factor = G._capacity(λ)
        return (e.log().sum() + 2 * factor.diagonal().log().sum()).to(dtype)

    def lerp(self, other: Operator, weight: float) -> LowRankOperator:
        """The two ranges together, cut back to the rank; what is cut goes into the floor, so the diagonal stays."""
        self.same_kind(other)
        new = cast(LowRankOperator, other)
        root = torch.cat(
            [self.vectors * ((1 - weight) * self.values).sqrt(), new.vectors * (weight * new.values).sqrt()], dim=1
        )
        here, there = (replace(G, power=1.0).diagonal() for G in (self, new))
        diagonal = torch.lerp(here, there, weight)
        values, w = leading(root.T @ root, self.rank)
        joined = with_floor(self.layout, root @ w / values.sqrt(), values, diagonal, self.rank)
        return joined.with_power(self.power)

    def nonnegative(self) -> dict[str, Tensor]:
        return {"values": self.values, "floor": self.floor}

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        if "factor" in tensors:
            return WoodburyInverse(self.layout, Columns(tensors["root"]), tensors["scale"], tensors["factor"])
        if "inside" in tensors:
            rows = Columns(tensors["vectors"])
            return DualMetric(self.layout, RangeOperator(self.layout, rows, tensors["inside"], tensors["outside"]))
        return restore_inverse(self.layout, [torch.arange(self.layout.size, device=self.floor.device)], tensors)

    def _inverse(self, damping: Damping) -> Inverse:
        λ = self.absolute(damping)
        if self.power != 1 or (isinstance(damping, Relative) and λ == 0):
            return super()._inverse(damping)
        if self._bare(λ):
            whole = torch.arange(self.floor.numel(), device=self.floor.device)[None]
            return CholeskyInverse(self.layout, (whole,), (cholesky(self.dense()[None], λ, _WHAT),))
        e, b, factor = self._capacity(λ)
        return WoodburyInverse(self.layout, Columns(b), e.reciprocal(), factor)

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        reason = "its floor and its range have no common eigenbasis"
        self.refuse("Pinv", f"{reason}; use Cholesky() with damping > 0, or Pinv() with Dense or Kernel")

    def _bare(self, damping: float) -> bool:
        """Whether E vanishes somewhere, so that Woodbury has no E⁻¹: the matrix itself says whether it is singular."""
        check_finite(self.floor, _WHAT)
        e, eps = self.floor + damping, torch.finfo(self.floor.dtype).eps
        if bool(e.min() > eps * (self.values.sum() + e.amax())):
            return False
        if e.numel() > _LARGEST:
            spectrum = torch.cat([e, self.values]).sort().values[-e.numel() :]
            refuse_singular(spectrum, what=_WHAT, damping=damping, rtol=e.numel() * eps, failed=True)
        return True

    def _capacity(self, damping: float) -> tuple[Tensor, Tensor, Tensor]:
        """E = d + λ [p], B = U√s [p r] and the Cholesky factor of 1 + BᵀE⁻¹B [r r]."""
        e = self.floor + damping
        b = self.vectors * self.values.sqrt()
        return e, b, cholesky(b.T @ (b / e[:, None]), 1.0, "the capacity matrix of the low-rank metric")


def leading(matrix: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The largest eigenvalues [r] of a positive semi-definite matrix, descending, at most ``rank``, with vectors [d r].

    Eigenvalues that are zero up to rounding are left out.
    """
    check_finite(matrix, "the metric")
    values, vectors = spectrum(matrix)
    positive = values > values.numel() * torch.finfo(values.dtype).eps * values[-1:]
    keep = positive.nonzero().squeeze(-1).flip(0)[:rank]
    return values[keep], vectors[:, keep]


def restore_low_rank(model: Model, tensors: Mapping[str, Tensor], rank: int) -> LowRankOperator:
    """The operator of a checkpoint, at the power 1."""
    u, values, floor = (tensors[key] for key in ("vectors", "values", "floor"))
    for key, shape in (("vectors", (model.size, values.numel())), ("floor", (model.size,))):
        check_shape(f"{key} of the metric", tensors[key], shape)
    return LowRankOperator(Layout.of(model.params, values.dtype), u, values, floor, rank)


def with_floor(layout: Layout, u: Tensor, values: Tensor, diagonal: Tensor, rank: int) -> LowRankOperator:
    """U diag(s) Uᵀ with the floor that restores ``diagonal`` [p]; below zero is rounding, as the rest is PSD.

    Parameters that nothing depends on, whose diagonal is zero, are outside of the range of U exactly.
    """
    u = u.masked_fill((diagonal == 0).unsqueeze(1), 0.0)
    floor = (diagonal - u.square() @ values).clamp(min=0)
    return LowRankOperator(layout, u, values, floor, rank)


@final
@dataclass(frozen=True, repr=False)
class Nystrom(Structure):
    """Sketch the metric by random products with it, as a preconditioner of conjugate gradients.

    Args:
        rank: The number of products, and of eigenpairs that are kept.
        seed: The seed of the random vectors Ω.

    Method:
        G ≈ U diag(s) Uᵀ + d(1 − UUᵀ) from ``rank`` products with G (Frangella, Tropp and Udell 2023, algorithm 2.1).

        With orthonormal random Ω [p r] and Y = GΩ, U diag(s) Uᵀ = Y(ΩᵀY)⁻¹Yᵀ, and d is the least of the s. It needs
        nothing but products, so that it preconditions ``CG`` for an ``Implicit`` metric of any number of terms:
        ``CG(preconditioner=Nystrom(50))``. The iterations then depend on the eigenvalues that are left, λ_r and below.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> Nystrom(2).estimate(pb).dense().round()
        tensor([[1., 2., 1.],
                [2., 4., 2.],
                [1., 2., 1.]])
    """

    rank: int
    seed: int = field(default=0, kw_only=True)  # of Ω

    def __post_init__(self) -> None:
        if not is_number(self.rank, whole=True) or self.rank < 1:
            raise ValueError(f"Nystrom(rank) needs a positive rank, got {self.rank!r}")

    def uncovered(self) -> None:
        return None

    def elements(self, pullback: Pullback) -> int:
        return (3 * min(self.rank, pullback.model.size) + 2) * pullback.model.size

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> LowRankOperator:
        self.admit(pullback)
        return self.extract(Implicit().estimate(pullback))

    def extract(self, G: Operator) -> LowRankOperator:
        p, dtype = G.layout.size, G.layout.dtype
        rank = min(self.rank, p)
        random = torch.randn(p, rank, generator=torch.Generator().manual_seed(self.seed), dtype=torch.float64)
        Ω = torch.linalg.qr(random.to(G.device)).Q.to(dtype)
        Y = torch.stack([G.product(column) for column in Ω.T], dim=1)
        check_finite(Y, "the metric")
        # Shifted by its rounding, which makes ΩᵀY positive, and shifted back at the end.
        ν, info = torch.finfo(dtype).eps * p**0.5 * torch.linalg.matrix_norm(Y), None
        while info is None or bool(info):
            shifted = Y + ν * Ω
            C, info = torch.linalg.cholesky_ex(0.5 * (Ω.T @ shifted + shifted.T @ Ω))
            ν = torch.where(info > 0, 10 * ν + torch.finfo(dtype).tiny, ν)
        U, s, _ = svd(torch.linalg.solve_triangular(C, shifted.T, upper=False).T, "the sketch of the metric")
        values = (s.square() - ν).clamp(min=0)
        floor = values[-1] if rank < p else values.new_zeros(())
        return LowRankOperator(G.layout, U, values - floor, floor.expand(p).clone(), rank)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> LowRankOperator:
        return restore_low_rank(model, tensors, self.rank)
