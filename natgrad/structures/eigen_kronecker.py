"""EigenKronecker (EK-FAC): the diagonal of the metric in the eigenvectors of the two Kronecker factors.

G ≈ (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ,   S = Q · Qᵀ,  A = P · Pᵀ,   D = Σ_kn (Qᵀ R_kn P)²          (George et al. 2018)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, TypeAlias, cast, final

import torch
from torch import Tensor

from natgrad.accelerate.fused import copy_
from natgrad.accelerate.inverses import SymFactor, relative_shifts
from natgrad.accelerate.replay import Scalar
from natgrad.accelerate.roots import EIGENVECTORS
from natgrad.accelerate.temporaries import ROWS, at_once
from natgrad.linalg import Damping, Relative
from natgrad.model import Model
from natgrad.pullbacks.factors import Factors, Squares
from natgrad.pullbacks.gradient import GradientSample, gradient_factors, squared_gradients, stream_gradient
from natgrad.pullbacks.layer import Block, Tied
from natgrad.pullbacks.moments import by_roots, factors_of, second_moments
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.rules.features import Features
from natgrad.structures.base import Cost, IdentityInverse, Inverse, Layout, Operator
from natgrad.structures.layered import (
    Basis,
    FactorAverage,
    Layered,
    LayerOperator,
    LayerSplit,
    Rotation,
    SidesCost,
    SpectralInverse,
    WorkSharing,
    alike,
    lay_side_by_side,
    layer_tensors,
    packed_alike,
    rotated,
    rotated_back,
    spread,
    turned,
    turns_factors,
)

Eigenvectors: TypeAlias = Literal["exact", "iterated"]
Moments: TypeAlias = Literal["carried", "sorted"]


@final
@dataclass(frozen=True, repr=False)
class EigenKronecker(Layered):
    """Keep the eigenvectors of two small matrices per layer, and the metric's diagonal in them.

    Args:
        sharing: How positions that share a weight are treated, "expand" or "reduce"; here it chooses the basis only.
        fallback: The structure of parameters that no layer rule covers.
        strict: Raise an error for such parameters.
        largest: Of a Kronecker factor with more rows than this, such as a vocabulary, only the diagonal is kept.
        bias: "joint" keeps weight and bias as one layer, "separate" as two.
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.
        eigenvectors: "exact" ones, or "iterated": Q ← QR(SQ), one step of the orthogonal iteration from the last basis,
            its columns sorted (Vyas et al. 2024). On a GPU this is several times as fast, and follows S well enough if
            that changes slowly.
        moments: What D becomes when the basis is renewed: "carried" there, D' = (Q'ᵀQ)² D (PᵀP')², the diagonal of the
            metric in the new basis; or "sorted" with the columns (Vyas et al. 2024), for iterated eigenvectors.

    Method:
        G ≈ (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer, Q and P the eigenvectors of the factors S and A of ``Kronecker``.

        D = Σ_kn (Qᵀ R_kn P)² are the second moments of the per-example gradients R_kn = Σ_r g aᵀ in that basis (George
        et al. 2018, (9)): the diagonal of G itself, in the basis where S ⊗ A is diagonal.

        So it is never further from G than ``Kronecker`` is, in the Frobenius norm, and its trace is that of G.

        An optimizer keeps the basis between two inverses, and estimates D in it.

        With "sorted", a metric of gradients (``BatchGradient``) that is inverted in every step has its basis renewed
        after a step, so that the next gradient is measured in the basis in which it is divided. The first basis is
        exact; the signs of its columns do not matter.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> pb = ng.pullback(model, x, ng.Euclidean())
        >>> EigenKronecker().estimate(pb).dense().diagonal()
        tensor([0.5000, 2.0000, 0.5000, 2.0000])
    """

    gradient_in_place: ClassVar[bool] = True
    has_basis: ClassVar[bool] = True
    eigenvectors: Eigenvectors = field(default="exact", kw_only=True)
    moments: Moments = field(default="carried", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.moments not in ("carried", "sorted"):
            raise ValueError(f'EigenKronecker(moments=…) is "carried" or "sorted", not {self.moments!r}')
        if self.moments == "sorted" and self.eigenvectors == "exact":
            raise ValueError(
                'EigenKronecker(moments="sorted") needs eigenvectors="iterated": D keeps its columns, and exact '
                'eigenvectors are other columns each time. Give that, or moments="carried"'
            )
        if self.eigenvectors not in ("exact", "iterated"):
            raise ValueError(f'EigenKronecker(eigenvectors=…) is "exact" or "iterated", not {self.eigenvectors!r}')

    @property
    def renews_after(self) -> bool:
        return self.moments == "sorted"

    def layer_elements(self, block: Block) -> int:
        sides = self.shapes(block)
        return block.size + sum(math.prod(shape) * (2 if len(shape) == 3 else 1) for shape in sides)

    def layer_cost(self, block: Block, *, exact: bool) -> Cost:
        s, a = self.shapes(block)
        sides = SidesCost.of(block, (s, a))
        rotate = 2 * sides.rotations + 2 * block.size  # Qᵀg and Pᵀa, and the squares of their products
        return Cost(
            numbers=sides.numbers + sides.rotations + 2 * block.size,
            invert=EIGENVECTORS * sides.cubes,
            solve=2 * sides.solve,
            position=sides.numbers + rotate,
            factors={"S": s, "A": a, "D": block.shape},
        )

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> EigenKroneckerOperator:
        """In the basis of ``like`` where it is one of these layers: no eigenvectors, and one backward pass a root."""
        split, layout = self.split(pullback, like), Layout(pullback.model.like, pullback.y.dtype)
        basis = self._basis_of(like, split.blocks)
        if basis is None or pullback.coupling is not None:
            estimates, positions = factors_of(pullback, split.used, self.sharing_rule)
            if basis is None:
                used = Basis.of([s for s, _ in estimates], [a for _, a in estimates]).sides
                basis = Basis.of_sides(split.of_all(used, lambda block: (None, None)))  # until it is renewed
            scales = rotated_squares(pullback, split.used, split.of_used(basis.sides))
        else:
            squares = RotatedSquares(split.used, split.of_used(basis.sides), layout.dtype)
            estimates, positions = second_moments(pullback, split.used, self.sharing_rule, squares.add)
            scales = squares.totals()
        fallback = self.fallback_estimate(split, like.fallback if isinstance(like, EigenKroneckerOperator) else None)
        counts = tuple(split.of_all(positions, lambda block: 0))
        return replace(self.assemble(split, layout, estimates, fallback, basis, scales), positions=counts)

    def assemble(
        self,
        split: LayerSplit,
        layout: Layout,
        pairs: Iterable[tuple[SymFactor, SymFactor]],
        fallback: Operator | None,
        basis: Basis | None,
        scales: Iterable[Tensor],
    ) -> EigenKroneckerOperator:
        """The operator with these S, A and D of the used layers; those of the others are zero.

        ``basis``: of all layers; None for the eigenvectors of S and A.
        """
        factors = split.of_all(pairs, lambda block: self.zeros(block, layout.dtype))
        left, right = tuple(s for s, _ in factors), tuple(a for _, a in factors)
        d = tuple(split.of_all(scales, lambda block: _zeros(block, layout.dtype)))
        basis = Basis.of(left, right) if basis is None else basis
        out = EigenKroneckerOperator(layout, split.blocks, left, right, basis, d, fallback, split.unseen)
        return replace(out, power=self.power, eigenvectors=self.eigenvectors, moments=self.moments)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> EigenKroneckerOperator:
        """S and A as in ``Kronecker``, and D = (QᵀG_kP)² in the basis of ``like`` (Vyas et al. 2024)."""
        assert like is None or isinstance(like, EigenKroneckerOperator)
        split, layout, fallback = self.split_gradient(sample, like)
        pairs = gradient_factors(sample, split.used, self.shapes)
        pairs = [(s.to(layout.dtype), a.to(layout.dtype)) for s, a in pairs]
        zeros = [_zeros(block, layout.dtype) for block in split.used]
        out = self.assemble(split, layout, pairs, fallback, None if like is None else like.basis, zeros)
        scales = squared_gradients(sample, split.blocks, out.basis.sides)
        return replace(out, scales=tuple(d.to(layout.dtype) for d in scales))

    def absorb_gradient(self, sample: GradientSample, average: Operator, weight: Scalar) -> EigenKroneckerOperator:
        """In place, all three in few launches; a matrix without a gradient keeps its average."""
        assert isinstance(average, EigenKroneckerOperator)
        average = average.side_by_side()
        split, _, fallback = self.split_gradient(sample, average)
        numbers = [b for b, block in enumerate(split.blocks) if block.names[0] not in split.unseen]
        sink = FactorAverage(average, numbers, weight, alone=True)
        stream_gradient(sample, split.used, self.shapes, sink, bases=split.of_used(average.basis.sides))
        return average.absorbed(fallback, weight, split.unseen)

    def identity(self, model: Model, blocks: Sequence[Block], dtype: torch.dtype) -> EigenKroneckerOperator | None:
        factors = self.identity_factors(blocks, dtype)
        if factors is None:
            return None
        ones = {f"{block.names[0]}/D": torch.ones_like(_zeros(block, dtype)) for block in self.arrange(blocks)}
        return self.restore(model, blocks, factors | ones)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> EigenKroneckerOperator:
        """Without eigenvectors among the tensors, with those of S and A."""
        split, fallback = self.restored_split(model, blocks, tensors)
        layout = Layout.of(model.params, split.dtype(tensors, fallback))
        names = [block.names[0] for block in split.used]

        def of_zeros(block: Block) -> tuple[Rotation, Rotation]:
            s, a = self.zeros(block, layout.dtype)
            return Basis.of([s], [a]).sides[0]

        sides = split.of_all([(tensors.get(f"{name}/Q"), tensors.get(f"{name}/P")) for name in names], of_zeros)
        basis = Basis.of_sides(sides) if any(key.rpartition("/")[2] in ("Q", "P") for key in tensors) else None
        saved = [(tensors[f"{name}/S"], tensors[f"{name}/A"]) for name in names]
        return self.assemble(split, layout, saved, fallback, basis, [tensors[f"{name}/D"] for name in names])

    def _basis_of(self, like: Operator | None, covered: Sequence[Block]) -> Basis | None:
        """The basis of an operator over the same layers."""
        if not isinstance(like, EigenKroneckerOperator):
            return None
        same = [block.names for block in like.blocks] == [block.names for block in covered]
        return like.basis if same and all(map(packed_alike, like.blocks, covered)) else None


def _zeros(block: Block, dtype: torch.dtype) -> Tensor:
    """D of a layer that a pass did not use."""
    return torch.zeros(block.shape, dtype=dtype, device=block.device)


@final
@dataclass(frozen=True, repr=False)
class EigenKroneckerOperator(LayerOperator):
    """A metric as eigenvectors and eigenvalues of every layer.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        blocks: The layers, in the order of the tensors.
        left: S [c o o], or its diagonal [c o], for the next basis.
        right: A [c i i], or its diagonal [c i].
        basis: Q and P, the eigenvectors of S and A as they were when the basis was last renewed.
        scales: D [c o i], the second moments of the gradients in that basis.
        fallback: The metric on the parameters that no layer rule covers.
        unseen: Parameters of layers that no forward pass has used so far.
        power: p: the operator is G^p of the G that the tensors hold.
        positions: How many positions the factors are means over.
        eigenvectors: "exact" or "iterated".
        moments: "carried" or "sorted".
        products: Whether D is s ⊗ a of the eigenvalues of S and A.
        in_place: Its basis is renewed where it is, and no other metric's.

    Method:
        G = (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer: v = W [c o i] goes to Q (D ⊙ QᵀWP) Pᵀ (George et al. 2018, (9)).
    """

    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[SymFactor, ...]  # S [c o o], or its diagonal [c o], for the next basis
    right: tuple[SymFactor, ...]  # A [c i i], or its diagonal [c i]
    basis: Basis
    scales: tuple[Tensor, ...]  # D [c o i]
    fallback: Operator | None = None
    unseen: frozenset[str] = frozenset()
    power: float = field(default=1.0, kw_only=True)
    positions: tuple[int | Tensor, ...] = field(default=(), kw_only=True, compare=False, repr=False)
    eigenvectors: Eigenvectors = field(default="exact", kw_only=True)
    moments: Moments = field(default="carried", kw_only=True)
    products: bool = field(default=False, kw_only=True)  # whether D is s ⊗ a of the eigenvalues of S and A
    in_place: bool = field(default=False, kw_only=True)  # its basis is renewed where it is, and no other metric's

    @property
    def averaged_letters(self) -> Mapping[str, Sequence[Tensor]]:
        return {"S": self.left, "A": self.right, "D": self.scales}

    @property
    def by_letter(self) -> Mapping[str, Sequence[Tensor | None]]:
        return {"S": self.left, "A": self.right, "Q": self.basis.left, "P": self.basis.right, "D": self.scales}

    def applied(self, b: int, w: Tensor) -> Tensor:
        q, p = self.basis.left[b], self.basis.right[b]
        return rotated_back(q, self.scales[b].pow(self.power) * rotated(q, w, p), p)

    def map(self, f: Callable[[Tensor], Tensor]) -> EigenKroneckerOperator:
        fallback = None if self.fallback is None else self.fallback.map(f)
        return replace(self, scales=tuple(map(f, self.scales)), fallback=fallback, power=1.0)

    def layer_diagonal(self, b: int) -> Tensor:
        return spread(self.basis.left[b], self.scales[b].pow(self.power), self.basis.right[b])

    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        return self.scales[b].double().clamp(min=0)

    def spectrum(self, damping: Damping = 0.0) -> tuple[list[Tensor], Basis]:
        if not isinstance(damping, Relative):
            return [d + damping for d in self.scales], self.basis
        damped = []
        for d, zero in zip(self.scales, self.zero_groups, strict=True):
            values = d.clamp(min=0)  # what is below is rounding
            λ = relative_shifts(damping.epsilon, values.mean())
            damped.append((values + λ).masked_fill(zero[:, None, None] | (λ == 0), 0.0))
        return damped, self.basis

    @property
    def gradient_sizes(self) -> list[Tensor]:
        return [d.mean((1, 2)).clamp(min=0).sqrt() for d in self.scales]

    def lerp(self, other: Operator, weight: float) -> EigenKroneckerOperator:
        """A, S and D are averaged, D in the basis of ``other``, the newer one.

        Where this one has another basis, its diagonal in the newer one is taken: no more than that can be kept.
        """
        self.same_kind(other)
        there = cast(EigenKroneckerOperator, other)
        fallback = self.fallback_lerp(there, weight)
        return replace(
            there,
            left=self.layers_lerp(there, self.left, there.left, weight),
            right=self.layers_lerp(there, self.right, there.right, weight),
            scales=self.layers_lerp(there, there.basis.change_basis(self.scales, self.basis), there.scales, weight),
            fallback=fallback,
            unseen=self.unseen & there.unseen,
            positions=(),
            in_place=False,
        )

    def side_by_side(self) -> EigenKroneckerOperator:
        """In memory of its own, where it is changed in place: layers of one shape lie one after the other."""
        if self.in_place:
            return self
        sides: list[list[Tensor | None]] = [list(side) for side in self.by_letter.values()]
        for numbers in alike(self.blocks, self.basis).values():
            lay_side_by_side(sides, numbers)
        copies = [[t if t is None else t.contiguous() for t in side] for side in sides]
        left, right, scales = (tuple(t for t in copies[at] if t is not None) for at in (0, 1, 4))
        basis = Basis(tuple(copies[2]), tuple(copies[3]))
        return replace(self, left=left, right=right, basis=basis, scales=scales, in_place=True)

    def with_new_basis(self, sharing: WorkSharing | None = None, *, exact: bool = False) -> EigenKroneckerOperator:
        """In the eigenvectors of S and A as they are now, with D ``carried`` there, or ``sorted``.

        ``exact``: the eigenvectors themselves, also where they are otherwise iterated; D is carried to them.
        """
        if exact and self.eigenvectors != "exact":
            decomposed = replace(self, eigenvectors="exact", moments="carried").with_new_basis(sharing, exact=True)
            return replace(decomposed, eigenvectors=self.eigenvectors, moments=self.moments)
        before = self if self.moments == "carried" else self._sorted()
        basis = before._next_basis(range(len(self.blocks))) if sharing is None else before._shared_basis(sharing)
        fallback = (
            self.fallback.with_new_basis(exact=exact) if isinstance(self.fallback, LayerOperator) else self.fallback
        )
        scales, old = basis.change_basis(self.scales, self.basis) if before is self else before.scales, self.basis
        if not self.in_place or [q is None for q in basis.both] != [q is None for q in old.both]:
            return replace(self, basis=basis, scales=scales, fallback=fallback, in_place=False)
        here, there = ([t for t in (*b.both, *d) if t is not None] for b, d in ((old, self.scales), (basis, scales)))
        copy_(here, there)
        return replace(self, basis=replace(old, failures=basis.failures), fallback=fallback)

    def _sorted(self) -> EigenKroneckerOperator:
        """The same metric, the columns of Q sorted by qᵀSq, the largest first, those of P by pᵀAp, and D with them."""
        left, right, scales = list(self.basis.left), list(self.basis.right), list(self.scales)
        for side, factors, axis in ((left, self.left, 1), (right, self.right, 2)):
            for b, (q, F) in enumerate(zip(tuple(side), factors, strict=True)):
                if q is not None:
                    order = (q * (F @ q)).sum(1).argsort(dim=1, descending=True)  # [c d]
                    side[b] = torch.take_along_dim(q, order[:, None], 2)
                    scales[b] = torch.take_along_dim(scales[b], order.unsqueeze(3 - axis), axis)
        return replace(self, basis=Basis(tuple(left), tuple(right), self.basis.failures), scales=tuple(scales))

    def _next_basis(self, numbers: Sequence[int]) -> Basis:
        """The eigenvectors of S and A of these layers, or the old basis after a step of the iteration towards them."""
        left, right = [self.left[b] for b in numbers], [self.right[b] for b in numbers]
        if self.eigenvectors == "exact":
            return Basis.of(left, right)
        basis = self.basis
        old = replace(basis, left=tuple(basis.left[b] for b in numbers), right=tuple(basis.right[b] for b in numbers))
        return old.refresh_after(left, right, sort=self.moments == "carried")  # else they are sorted

    def _shared_basis(self, sharing: WorkSharing) -> Basis:
        """The eigenvectors of S and A, every process those of its layers."""
        names, share = [block.names[0] for block in self.blocks], sharing.share(self.blocks)

        def decompose() -> dict[str, Tensor]:
            basis = self._next_basis(share)
            return layer_tensors([self.blocks[b] for b in share], {"Q": basis.left, "P": basis.right})

        tensors = sharing.gathered(decompose)
        q, p = (tuple(tensors.get(f"{name}/{side}") for name in names) for side in "QP")
        return Basis(q, p)

    def inverse(self, damping: Damping) -> Inverse:
        """(G + λ)^-p = Q (QᵀWP / (D + λ)^p) Pᵀ, exactly, and with nothing to be factored."""
        if self.power == 0:
            return IdentityInverse(self.layout)
        self._refuse_undamped(damping)
        fallback = self.fallback_inverse(damping)
        if not self.in_place:
            return self.spectral_inverse(fallback, damping)
        scales: list[Tensor | None] = [torch.empty_like(d) for d in self.scales]
        for numbers in alike(self.blocks, self.basis).values():
            lay_side_by_side([scales], numbers)
        memory, basis = tuple(d for d in scales if d is not None), self.basis
        inverse = SpectralInverse(self.layout, self.blocks, fallback, basis.left, basis.right, memory, live=True)
        inverse.rescale_(self.scales, self.power, damping, self.beside)
        return inverse

    def inverse_again(self, last: Inverse, damping: Damping) -> Inverse:
        """Where the basis is renewed in place, only (D + λ)^-p is computed again, there too."""
        basis = self.basis
        if not isinstance(last, SpectralInverse) or self.power == 0 or not last.reads(basis.left, basis.right):
            return self.inverse(damping)
        self._refuse_undamped(damping)
        fallback = self.fallback_inverse(damping)
        last.rescale_(self.scales, self.power, damping, self.beside)
        return last if fallback is None else replace(last, fallback=fallback)

    def _refuse_undamped(self, damping: Damping) -> None:
        if damping == 0:
            for block, values in zip(self.blocks, self.scales, strict=True):
                self.refuse_singular(block, values, 0.0)
            self.refuse_rounding()


# Second moments of per-example gradients in a basis of every layer: D = Σ_kn (Qᵀ R_kn P)² (George et al. 2018).


Sides: TypeAlias = tuple[Tensor | None, Tensor | None]  # Q [c o o] and P [c i i] of a layer; None for the axes


@final
class RotatedSquares:
    """D [c o i] of every layer, summed over chunks of roots.

    With one position D is (g Q)²ᵀ(a P)², and no row is formed. With several the rows Σ_r g aᵀ come first, a chunk at a
    time; whether they are rotated, or g and a before, is decided by what is less work. The rows of a tied weight are
    the sum of those of its kinds, and rotated.
    """

    def __init__(self, layers: Sequence[Block], sides: Sequence[Sides], dtype: torch.dtype) -> None:
        self._layers, self._sides, self._dtype = list(layers), list(sides), dtype
        self._sums = [Squares() for _ in layers]
        self._tape: Tape | None = None
        self._inputs: dict[int, Tensor] = {}  # of the tape, rotated: where there is one position they are few numbers

    def add(self, tape: Tape, g: Cotangents) -> None:
        if tape is not self._tape:
            self._tape = tape
            self._inputs.clear()
        for b, block in enumerate(self._layers):
            if block.facets:
                pairs = [(tape.inputs(kind).dense(), g.of(tape, kind).dense()) for kind in block.kinds]
                for rows in Tied.of(block, pairs, self._dtype).rows(ROWS):
                    self._sums[b].accumulate(_squares(rows, *self._sides[b]))
                continue
            h = g.of(tape, block).dense().to(self._dtype)
            if b in self._inputs:
                self._add_plain(b, h)
            else:
                self._add(b, tape.inputs(block), h)

    def totals(self) -> list[Tensor]:
        """D of every layer."""
        return [total.total().contiguous() for total in self._sums]

    def _add(self, b: int, a: Features, g: Tensor) -> None:
        q, p = self._sides[b]
        k, _, r, c, o = g.shape
        i = a.shape[-1]
        if p is None and r > 1:  # a need not be dense
            self._sums[b].accumulate(a.squared_gradients(turned(g, q)))
            return
        x = a.dense().to(self._dtype)
        if r == 1:
            self._inputs[b] = turned(x, p)
            self._add_plain(b, g)
            return
        if turns_factors(Factors(x, g), q, p):
            self._sums[b].add(Factors(turned(x, p), turned(g, q)))
            return
        step = at_once(k * c * o * i)
        for chunk, h in zip(x.split(step), g.split(step, dim=1), strict=True):
            self._sums[b].accumulate(_squares(Factors(chunk, h).rows().unflatten(-1, (c, o, i)), q, p))

    def _add_plain(self, b: int, g: Tensor) -> None:
        self._sums[b].add(Factors(self._inputs[b], turned(g, self._sides[b][0])))


def rotated_squares(pb: Pullback, layers: Sequence[Block], sides: Sequence[Sides]) -> list[Tensor]:
    """D [c o i] of every layer in ``layers``, which have rules: the diagonal of G in the basis of its sides."""
    if not layers:
        return []
    if pb.coupling is not None:
        return _coupled(pb, layers, sides)
    squares = RotatedSquares(layers, sides, pb.y.dtype)
    for g in by_roots(pb):
        squares.add(pb.tape, g)
    return squares.totals()


def _coupled(pb: Pullback, layers: Sequence[Block], sides: Sequence[Sides]) -> list[Tensor]:
    """The rows of a coupled metric come mixed, and in flattening order."""
    totals = [Squares() for _ in layers]
    orders = [block.index.argsort().argsort() for block in layers]
    for factors in replace(pb, layers=list(layers)).factors():
        for total, f, block, order, (q, p) in zip(totals, factors, layers, orders, sides, strict=True):
            total.accumulate(_squares(f.rows()[..., order].unflatten(-1, block.shape), q, p))
    return [total.total() for total in totals]


def _squares(rows: Tensor, q: Tensor | None, p: Tensor | None) -> Tensor:
    """Σ_kn (QᵀRP)² [c o i] of rows [k n c o i]."""
    rows = rows if q is None else q.mT @ rows
    return (rows if p is None else rows @ p).square().sum((0, 1))
