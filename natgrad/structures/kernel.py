"""Kernel: G = RᵀR through its per-example rows R, inverted in the space of examples and roots (Woodbury)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from typing import ClassVar, cast, final

import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.accelerate.moments import add_gram_, mirror_
from natgrad.accelerate.roots import spectrum
from natgrad.accelerate.temporaries import at_once
from natgrad.kernels.gram import KernelMatrix, root_or_nan
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    cholesky,
    eigvalsh,
    inverse_powered,
    refuse_lost_damping,
    without_rounding,
)
from natgrad.model import Model
from natgrad.pullbacks.example_grads import ExampleGrads
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import DualMetric, Inverse, Layout, Operator, RootedOperator, Structure, check_shape
from natgrad.structures.dense import FormedOperator
from natgrad.structures.woodbury import RangeOperator, WoodburyInverse, refine

_REFINED = 2  # steps of iterative refinement


@final
@dataclass(frozen=True, repr=False)
class Kernel(Structure):
    """Keep the metric exactly as factors of its rows: cheap with fewer examples than parameters.

    Args:
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.

    Method:
        The rows R in factored form: G = RᵀR exactly, inverted through the N·K × N·K Gram matrix (Woodbury).

        Under a ``Sobolev`` metric the kernel matrix of the inputs is not inverted (``PushThrough``). With a ``power``
        below 1 the metric is G^p through the eigenvalues of the Gram matrix.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> Kernel().estimate(pb).gram()  # ‖(1, 2, 1)‖²
        tensor([[6.]])
    """

    bounded: ClassVar[bool] = False
    suggested: ClassVar[bool] = True
    power: float = field(default=1.0, kw_only=True)

    def elements(self, pullback: Pullback) -> int:
        coupled = pullback.coupled
        if coupled is not None and coupled.K is not None:  # the factors again in double, and two matrices in double
            return self.elements(pullback.unmixed()) * (1 + 8 // pullback.y.element_size())
        rows = pullback.columns * pullback.n
        return pullback.n * pullback.factor_size + 2 * rows**2  # and the Gram matrix, and that of one block

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> KernelOperator:
        self.admit(pullback)
        return self.without_gram(pullback)

    @without_autocast
    def without_gram(self, pullback: Pullback) -> KernelOperator:
        """The rows alone, for those who need no Gram matrix: only their factors must fit into memory."""
        coupled = pullback.coupled
        K = None if coupled is None or coupled.K is None else KernelMatrix.of(coupled.K)
        pb = pullback if K is None else pullback.unmixed()
        layout = Layout(pb.model.like, pb.y.dtype)
        return KernelOperator(layout, tuple(pb.blocks), tuple(pb.collect()), K, power=self.power)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KernelOperator:
        restored, factors = [], []
        for block in blocks:
            f = ExampleGrads(tensors[f"{block.names[0]}/a"], tensors[f"{block.names[0]}/g"])
            packed = (f.a.shape[2], f.g.shape[4], f.a.shape[3])  # parameters of no module have a group for each entry
            restored.append(block if packed == block.shape else block.without_rule())
            (c, o, i), r = packed if math.prod(packed) == block.size else block.shape, f.g.shape[2]
            factors.append(f)
            k, n = factors[0].g.shape[:2]
            check_shape(f"{block.names[0]}/a of the metric", f.a, (n, r, c, i))
            check_shape(f"{block.names[0]}/g of the metric", f.g, (k, n, r, c, o))
        K = KernelMatrix.of(tensors["K"]) if "K" in tensors else None
        layout = Layout.of(model.params, factors[0].g.dtype)
        return KernelOperator(layout, tuple(restored), tuple(factors), K, power=self.power)


@final
@dataclass(frozen=True, repr=False)
class KernelOperator(RootedOperator):
    """A metric as its rows, in the factors of the layers: exact, and cheap for few examples.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        blocks: The layers, in the order of the tensors.
        factors: The rows R [(k n) p] of every block, as factors.
        K: The kernel matrix of the inputs, for a metric that couples the examples by its inverse.
        power: p: the operator is G^p of the G that the tensors hold.

    Method:
        G = RᵀR. The Gram matrix R Rᵀ [(k n) (l m)] is the neural tangent kernel in the output metric, over N.

        A metric that couples the examples by the inverse of a kernel matrix K is G = BᵀK⁻¹B. We keep the factors of B,
        and form R = L⁻¹B with K = L Lᵀ for a few parameters at a time. With damping it is solved without K⁻¹, by
        ``PushThrough``.

        With R Rᵀ = V diag(w) Vᵀ the columns of Q = RᵀV w^-½ [p r] are the eigenvectors of G outside its null space.
        They are never formed: G^p = Q w^p Qᵀ = RᵀV w^(p−1) VᵀR.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    factors: tuple[ExampleGrads, ...]
    K: KernelMatrix | None = None
    power: float = field(default=1.0, kw_only=True)

    def gram(self) -> Tensor:
        """R Rᵀ [(k n) (l m)]."""
        if self.K is None:
            total = self.factors[0].gram()
            for f in self.factors[1:]:
                total += f.gram()
            return total
        k, n = self.factors[0].g.shape[:2]
        total = self.factors[0].g.new_zeros(k * n, k * n)
        for rows in (r for f in self.factors for r in _slices(f)):
            add_gram_(total, self.K.whiten(rows).flatten(0, 1))
        return mirror_(total)

    def gram_with(self, other: KernelOperator) -> Tensor:
        """R R'ᵀ [(k n) (l m)] with the rows of another kernel over the same parameters, layer by layer.

        Layers that both have packed alike are multiplied as factors. The others, such as a weight that one of the two
        reads through a module and the other inside a derivative, are multiplied as rows.
        """
        if self.K is not None or other.K is not None:
            self.refuse("a Gram matrix with other rows", "its examples are coupled; use Euclidean, without a kernel")
        here, there = _in_blocks_of_both(self, other)
        return reduce(torch.add, (f.gram(h) for f, h in zip(here.factors, there.factors, strict=True)))

    def _in_blocks(self, which: Sequence[int]) -> KernelOperator:
        """The same rows: the blocks ``which`` as they are, and explicit rows for the parameters of the others."""
        others = [b for b in range(len(self.blocks)) if b not in which]
        blocks, factors = [self.blocks[b] for b in which], [self.factors[b] for b in which]
        if others:
            blocks.append(Block.of_rows([self.blocks[b] for b in others]))
            order = torch.cat([self.blocks[b].index for b in others]).argsort()
            factors.append(ExampleGrads.of_rows(torch.cat([self.factors[b].rows() for b in others], -1)[..., order]))
        return replace(self, blocks=tuple(blocks), factors=tuple(factors))

    def push(self, v: Tensor) -> Tensor:
        """R v [k n]."""
        pushes = [f.push(b.pack(v)) for b, f in zip(self.blocks, self.factors, strict=True)]
        total = torch.stack(pushes).sum(0)
        return total if self.K is None else self.K.whiten(total)

    def pull(self, t: Tensor) -> Tensor:
        """Rᵀ t [p], for t [k n]."""
        t = t if self.K is None else self.K.unwhiten(t)
        out = t.new_empty(self.layout.size)
        for block, f in zip(self.blocks, self.factors, strict=True):
            block.unpack(f.pull(t), out)
        return out

    @cached_property
    def range(self) -> tuple[Tensor, Tensor]:
        """The eigenvalues w [r] of R Rᵀ that are not zero, up to rounding, and the eigenvectors V [(k n) r]."""
        gram = self.gram()
        check_finite(gram, "the kernel")
        values, vectors = spectrum(gram)
        positive = values > values.numel() * torch.finfo(values.dtype).eps * values[-1]
        return values[positive], vectors[:, positive]

    @property
    def root_columns(self) -> int | None:
        return math.prod(self.factors[0].g.shape[:2]) if self.power == 1 else None

    def push_root(self, v: Tensor) -> Tensor:
        return self.push(v).flatten()

    def pull_root(self, t: Tensor) -> Tensor:
        return self.pull(t.view(self.factors[0].g.shape[:2]))

    def product(self, v: Tensor) -> Tensor:
        if self.power == 1:
            return self.pull(self.push(v))
        return self.map(lambda w: w.pow(self.power)).product(v)

    def map(self, f: Callable[[Tensor], Tensor]) -> RangeOperator:
        values = self.range[0]
        return RangeOperator(self.layout, KernelRange(self), f(values), f(values.new_zeros(())))

    def diagonal(self) -> Tensor:
        if self.power == 0:
            return self.factors[0].g.new_ones(self.layout.size)
        out = self.factors[0].g.new_empty(self.layout.size)
        exact = self.power == 1 and self.K is None
        for block, f in zip(self.blocks, self.factors, strict=True):
            block.unpack(f.square() if exact else self._mixed_square(f), out)
        return out

    def _mixed_square(self, f: ExampleGrads) -> Tensor:
        """Σ R² [c o i] of a block, over the rows of a root R of G^p."""
        squares = [self._root(r).square().sum(0).view(f.g.shape[3], -1, f.a.shape[3]) for r in _slices(f)]
        return torch.cat(squares, dim=1)

    def _root(self, rows: Tensor) -> Tensor:
        """The rows of a root of G^p, w^((p−1)/2) VᵀR, from rows [k n d] of R before K mixes them."""
        rows = (rows if self.K is None else self.K.whiten(rows)).flatten(0, 1)
        if self.power == 1:
            return rows
        values, vectors = self.range
        return values.pow(0.5 * (self.power - 1)).unsqueeze(-1) * (vectors.T @ rows)

    def dense(self) -> Tensor:
        if self.power == 0:
            return torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.factors[0].g.device)
        rows = self.rows()
        return rows.T @ rows

    def rows(self) -> Tensor:
        """R [m p] in flattening order, with G^p = RᵀR; m = k·n where the power is 1."""
        count = math.prod(self.factors[0].g.shape[:2]) if self.power == 1 else self.range[0].numel()
        out = self.factors[0].g.new_empty(count, self.layout.size)
        for block, f in zip(self.blocks, self.factors, strict=True):
            block.unpack(self._root(f.rows()), out)
        return out

    def to(self, dtype: torch.dtype) -> KernelOperator:
        """The same operator in another precision."""
        factors = tuple(ExampleGrads(f.a.to(dtype), f.g.to(dtype)) for f in self.factors)
        return replace(self, layout=Layout(self.layout.like, dtype), factors=factors)

    def _logdet(self, damping: Damping) -> Tensor:
        """log det(G + λ) = (P − NK) log λ + log det(RRᵀ + λ), Sylvester's identity."""
        λ = self.absolute(damping)
        self._check(λ)
        factor = cholesky(self.gram(), λ, "the kernel")
        return (self.layout.size - factor.shape[0]) * math.log(λ) + 2 * factor.diagonal().log().sum()

    def eigenvalues(self) -> Tensor:
        """The eigenvalues of R Rᵀ, and P − NK zeros; with more rows than parameters, the largest P."""
        values = eigvalsh(self.gram().double(), "the kernel")[-self.layout.size :]
        values = without_rounding(values, self.layout.dtype)
        return torch.cat([values, values.new_zeros(self.layout.size - len(values))])

    def lerp(self, other: Operator, weight: float) -> KernelOperator:
        """Both sets of rows, weighted: exact, and as large as the two together."""
        self.same_kind(other)
        new = cast(KernelOperator, other)
        here, there = _in_blocks_of_both(self, new)
        pairs = list(zip(here.factors, there.factors, strict=True))
        if any(f.g.shape[0] != h.g.shape[0] for f, h in pairs):
            raise ValueError("kernels with different numbers of roots cannot be joined")
        u, w = math.sqrt(1 - weight), math.sqrt(weight)
        joined = tuple(_join(ExampleGrads(f.a, u * f.g), ExampleGrads(h.a, w * h.g)) for f, h in pairs)
        return replace(here, factors=joined, K=_beside(here, there))

    def tensors(self) -> dict[str, Tensor]:
        out = {}
        for block, f in zip(self.blocks, self.factors, strict=True):
            out[f"{block.names[0]}/a"], out[f"{block.names[0]}/g"] = f.a, f.g
        return out if self.K is None else out | {"K": self.K.whole}

    def _inverse(self, damping: Damping) -> Inverse:
        λ = self.absolute(damping)
        if isinstance(damping, Relative) and λ == 0:  # so is G
            return DualMetric(self.layout, self.map(torch.zeros_like))
        self._check(λ)
        if self.power != 1:
            return DualMetric(self.layout, self.map(lambda w: (w + λ).pow(-self.power)))
        if self.K is not None:
            dual = PushThrough.of(replace(self, K=None), self.K, λ)
            diagonal = dual.factor.square().sum(-1) / self.K.whole.diagonal().sum()  # no eigenvalue is above the trace
            refuse_lost_damping(λ, diagonal, "the metric coupled by a kernel")
            return PushThroughInverse(self.layout, dual)
        gram = self.gram()
        factor = cholesky(gram, λ, "the kernel")
        refuse_lost_damping(λ, gram.diagonal(), "the kernel metric")
        return WoodburyInverse(self.layout, self, factor.new_tensor(1 / λ), factor.div_(math.sqrt(λ)))

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None and self.power != 1:
            self.refuse(f"Pinv(weight=…) at the power {self.power:g}", "another norm has no powers; leave it out")
        if damping != 0:
            return self.inverse(damping)
        if self.power != 1:
            cut = (rtol or 0.0) * self.range[0][-1:].sum()
            kept = self.map(lambda w: inverse_powered(torch.where(w > cut, w, 0.0), self.power))
            return DualMetric(self.layout, kept)
        weight = cholesky(weight, 0.0, "Pinv(weight=…)") if weight is not None and weight.ndim == 2 else weight
        gram = self.gram() if weight is None else self._weighted_gram(weight)
        check_finite(gram, "the kernel")
        values, vectors = spectrum(gram)
        cut = (gram.shape[0] * torch.finfo(gram.dtype).eps if rtol is None else rtol) * values[-1]
        scale = torch.where(values > cut, values, torch.inf).pow(-2)
        return KernelPseudoInverse(self.layout, self, vectors, scale, weight)

    def _weighted_gram(self, weight: Tensor) -> Tensor:
        """R W⁻¹Rᵀ [(k n) (l m)], of W [p] (diagonal), or of L [p q] with W = L Lᵀ."""
        if weight.ndim == 2:
            half = torch.linalg.solve_triangular(weight, self.rows().T, upper=False)
            return half.T @ half
        k, n = self.factors[0].g.shape[:2]
        total = self.factors[0].g.new_zeros(k * n, k * n)
        for block, f in zip(self.blocks, self.factors, strict=True):
            packed = block.pack(weight).view(f.g.shape[3], f.g.shape[4], f.a.shape[3])
            for rows, w in zip(_slices(f), packed.split(_step(f), dim=1), strict=True):
                mixed = (rows if self.K is None else self.K.whiten(rows)).flatten(0, 1) * w.flatten().rsqrt()
                total.addmm_(mixed, mixed.T)
        return total

    def _check(self, damping: float) -> None:
        """Woodbury divides by λ; without damping, say how singular the metric is."""
        if damping <= 0:
            self._damped_eigenvalues("Cholesky", damping)
            self.refuse("Cholesky without damping", "Woodbury divides by it; add damping > 0, or use Pinv() or Dense")


@final
@dataclass(frozen=True)
class KernelRange:
    """The orthonormal rows Qᵀ [r p], the eigenvectors of G outside its null space: Qᵀ = w^-½ VᵀR."""

    kernel: KernelOperator

    def push_root(self, v: Tensor) -> Tensor:
        values, vectors = self.kernel.range
        return values.rsqrt() * (vectors.T @ self.kernel.push_root(v))

    def pull_root(self, t: Tensor) -> Tensor:
        values, vectors = self.kernel.range
        return self.kernel.pull_root(vectors @ (values.rsqrt() * t))


@final
@dataclass(frozen=True, repr=False)
class KernelPseudoInverse(Inverse):
    """G⁺ω = Rᵀ (RRᵀ)⁺² R ω; with a weight W⁻¹Rᵀ (RW⁻¹Rᵀ)⁺² R W⁻¹ω, the solution of G v = ω of least ‖v‖_W."""

    layout: Layout
    kernel: KernelOperator
    vectors: Tensor
    scale: Tensor
    weight: Tensor | None = None  # W [p], or L [p q] with W = L Lᵀ

    def solve(self, ω: Tensor) -> Tensor:
        # Rounding is multiplied by the condition number to the power 3/2, and not to 1: refine.
        return refine(self._apply, self.kernel.product, ω)

    def _apply(self, ω: Tensor) -> Tensor:
        t = self.kernel.push(self._unweighted(ω))
        inner = self.vectors @ (self.scale * (self.vectors.T @ t.reshape(-1)))
        return self._unweighted(self.kernel.pull(inner.view_as(t)))

    def _unweighted(self, ω: Tensor) -> Tensor:
        """W⁻¹ω."""
        if self.weight is None:
            return ω
        if self.weight.ndim == 1:
            return ω / self.weight
        return torch.cholesky_solve(ω.unsqueeze(1), self.weight).squeeze(1)


@final
@dataclass(frozen=True)
class PushThrough:
    """z ↦ (λK + BBᵀ)⁻¹, for the rows B [(k n) p] of a metric BᵀK⁻¹B and K [n n] for every column k:

        (BᵀK⁻¹B + λ)⁻¹BᵀK⁻¹v = Bᵀ(λK + BBᵀ)⁻¹v

    K is inverted nowhere. The identity also holds for a singular K, with K⁺ for K⁻¹ and with B and v projected onto the
    range of K. Equal examples have equal rows, and count once.
    """

    rows: KernelOperator  # B, in float64
    K: KernelMatrix
    damping: float
    factor: Tensor  # of λK' + QᵀBBᵀQ [(k n) (l m)]

    @staticmethod
    def of(rows: KernelOperator, K: KernelMatrix, damping: float) -> PushThrough:
        double = rows.to(torch.float64)
        matrix = K.restrict_gram(double.gram())
        check_finite(matrix, "the kernel")
        n = K.whole.shape[0]
        k = matrix.shape[0] // n
        matrix.view(k, n, k, n).diagonal(dim1=0, dim2=2).add_(damping * K.inner.unsqueeze(2))
        # λK may be less than the rounding of BBᵀ, so that the matrix is positive only up to rounding. We add that much,
        # and refinement with B itself removes it again.
        diagonal = matrix.diagonal()
        diagonal.add_(matrix.shape[0] * torch.finfo(matrix.dtype).eps * diagonal.amax())
        return PushThrough(double, K, damping, root_or_nan(matrix))

    def solve(self, v: Tensor) -> Tensor:
        """(λK + BBᵀ)⁻¹v [k n], of v [k n] projected onto the range of K."""
        inside = self.K.restrict(v.double())
        z = self._apply(inside)
        for _ in range(_REFINED):
            z = z + self._apply(inside - self._product(z))
        return self.K.extend(z)

    def _apply(self, t: Tensor) -> Tensor:
        return torch.cholesky_solve(t.reshape(-1, 1), self.factor).view_as(t)

    def _product(self, z: Tensor) -> Tensor:
        through = self.rows.push(self.rows.pull(self.K.extend(z)))
        return self.damping * (z @ self.K.inner) + self.K.restrict(through)


@final
@dataclass(frozen=True, repr=False)
class PushThroughInverse(Inverse):
    """(BᵀK⁻¹B + λ)⁻¹ω = (ω − Bᵀ(λK + BBᵀ)⁻¹Bω)/λ, which for ω = Bᵀe is Bᵀ(λK + BBᵀ)⁻¹K e."""

    layout: Layout
    dual: PushThrough

    def solve(self, ω: Tensor) -> Tensor:
        rows, exact = self.dual.rows, ω.double()
        return ((exact - rows.pull(self.dual.solve(rows.push(exact)))) / self.dual.damping).to(ω.dtype)


def _slices(f: ExampleGrads) -> Iterator[Tensor]:
    """The rows [k n (c o i)] of a block, some outputs o at a time."""
    for g in f.g.split(_step(f), dim=4):
        yield ExampleGrads(f.a, g).rows()


def _step(f: ExampleGrads) -> int:
    """How many outputs o at a time."""
    k, n, _, c, o = f.g.shape
    return min(max(1, o), at_once(k * n * c * f.a.shape[3]))


def _alike(left: KernelOperator, a: int, right: KernelOperator, b: int) -> bool:
    """Whether the factors of two blocks of the same parameters are packed in the same order."""
    f, h, block, other = left.factors[a], right.factors[b], left.blocks[a], right.blocks[b]
    if f.g.shape[3:] != h.g.shape[3:] or f.a.shape[2:] != h.a.shape[2:]:
        return False
    return block == other or torch.equal(block.index, other.index)


def _in_blocks_of_both(left: KernelOperator, right: KernelOperator) -> tuple[KernelOperator, KernelOperator]:
    """The same rows, in the blocks that both have packed alike, and one of explicit rows for all other parameters.

    A layer may have its rule in one pass and not in another, where the model uses it in another way.
    """
    theirs = {block.names: b for b, block in enumerate(right.blocks)}
    pairs = [(a, theirs[block.names]) for a, block in enumerate(left.blocks) if block.names in theirs]
    alike = [(a, b) for a, b in pairs if _alike(left, a, right, b)]
    return left._in_blocks([a for a, _ in alike]), right._in_blocks([b for _, b in alike])


def _beside(left: KernelOperator, right: KernelOperator) -> KernelMatrix | None:
    """K of the examples of both, which are not coupled to each other."""
    if left.K is None and right.K is None:
        return None
    kernels = [
        f.factors[0].g.new_ones(f.factors[0].g.shape[1]).diag() if f.K is None else f.K.whole for f in (left, right)
    ]
    return KernelMatrix.of(torch.block_diag(*[K.double() for K in kernels]))


def _join(left: ExampleGrads, right: ExampleGrads) -> ExampleGrads:
    """The examples of both. Shorter sequences get positions of zeros, which add nothing to Σ_r g aᵀ."""
    r = max(left.a.shape[1], right.a.shape[1])
    a = [_pad(f.a, 1, r) for f in (left, right)]
    g = [_pad(f.g, 2, r) for f in (left, right)]
    return ExampleGrads(torch.cat(a), torch.cat(g, dim=1))


def _pad(t: Tensor, dim: int, size: int) -> Tensor:
    missing = size - t.shape[dim]
    return t if missing == 0 else F.pad(t, (*[0, 0] * (t.ndim - 1 - dim), 0, missing))


@final
@dataclass(frozen=True, repr=False)
class RowStack(FormedOperator, RootedOperator):
    """G = RᵀR with the rows R [m p] of several kernels, one below the other, the rows of each times its ``scale``.

    Each kernel is that of one function of the parameters on points of its own (the residuals inside of a domain, and
    those on its boundary): G = Σ_c scale_c² G_c, and R Rᵀ has the blocks scale_c scale_d R_c R_dᵀ.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> kernels = [ng.Kernel().estimate(ng.pullback(model, x, ng.Euclidean())) for x in torch.eye(2).split(1)]
    >>> RowStack(kernels[0].layout, tuple(kernels), (1.0, 2.0)).gram()
    tensor([[1., 0.],
            [0., 4.]])
    """

    layout: Layout
    kernels: tuple[KernelOperator, ...]
    scales: tuple[float, ...]

    @property
    def sizes(self) -> list[int]:
        """How many rows every kernel has, k·n."""
        return [kernel.factors[0].g.shape[:2].numel() for kernel in self.kernels]

    @property
    def root_columns(self) -> int:
        return sum(self.sizes)

    def push_root(self, v: Tensor) -> Tensor:
        """R v [m]."""
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.cat([scale * kernel.push(v).flatten() for kernel, scale in pairs])

    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p]."""
        pairs = zip(self.kernels, self.scales, t.split(self.sizes), strict=True)
        pulled = [kernel.pull(scale * t_c.view(kernel.factors[0].g.shape[:2])) for kernel, scale, t_c in pairs]
        return pulled[0] if len(pulled) == 1 else torch.stack(pulled).sum(0)

    def gram(self) -> Tensor:
        """R Rᵀ [m m]: R is never formed, unless a layer has no factors."""
        sizes = self.sizes
        out = self.kernels[0].factors[0].g.new_empty(sum(sizes), sum(sizes))
        starts = [sum(sizes[:c]) for c in range(len(sizes))]
        spans = [slice(start, start + size) for start, size in zip(starts, sizes, strict=True)]
        for c, (left, scale) in enumerate(zip(self.kernels, self.scales, strict=True)):
            out[spans[c], spans[c]] = left.gram() * scale**2
            for d in range(c):
                block = left.gram_with(self.kernels[d]) * (scale * self.scales[d])
                out[spans[c], spans[d]], out[spans[d], spans[c]] = block, block.T
        return out

    def rows(self) -> Tensor:
        """R [m p], in flattening order."""
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.cat([scale * kernel.rows() for kernel, scale in pairs])

    def product(self, v: Tensor) -> Tensor:
        return self.pull_root(self.push_root(v))

    def diagonal(self) -> Tensor:
        pairs = zip(self.kernels, self.scales, strict=True)
        return torch.stack([scale**2 * kernel.diagonal() for kernel, scale in pairs]).sum(0)

    def dense(self) -> Tensor:
        rows = self.rows()
        return rows.T @ rows

    def tensors(self) -> dict[str, Tensor]:
        return {f"{c}/{name}": t for c, kernel in enumerate(self.kernels) for name, t in kernel.tensors().items()}
