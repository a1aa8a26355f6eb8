"""EigenKronecker (EK-FAC): the diagonal of the metric in the eigenvectors of the two Kronecker factors.

G ≈ (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ,   S = Q · Qᵀ,  A = P · Pᵀ,   D = Σ_kn (Qᵀ R_kn P)²          (George et al. 2018)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, cast, final

import torch
from torch import Tensor

from natgrad.accelerate.inverses import SymFactor, relative_shifts
from natgrad.accelerate.temporaries import ROWS, at_once
from natgrad.linalg import Damping, Relative, without_rounding
from natgrad.model import Model
from natgrad.pullbacks.example_grads import ExampleGrads, Squares
from natgrad.pullbacks.gradient import GradientSample, gradient_factors, squared_gradients
from natgrad.pullbacks.layer import Block, Tied
from natgrad.pullbacks.layer_factors import by_roots, factors_of, second_moments
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.pullbacks.tape import Cotangents, Tape
from natgrad.rules.features import Features
from natgrad.structures.base import Cost, Inverse, Layout, Operator
from natgrad.structures.layered import (
    Basis,
    Layered,
    LayerOperator,
    LayerSplit,
    Rotation,
    packed_alike,
    rotate,
    rotate_back,
    rotate_rows,
    squares_of,
    turns_factors,
)


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

    Method:
        G ≈ (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer, Q and P the eigenvectors of the factors S and A of ``Kronecker``.

        D = Σ_kn (Qᵀ R_kn P)² are the second moments of the per-example gradients R_kn = Σ_r g aᵀ in that basis (George
        et al. 2018, (9)): the diagonal of G itself, in the basis where S ⊗ A is diagonal.

        So it is never further from G than ``Kronecker`` is, in the Frobenius norm, and its trace is that of G.

        An optimizer keeps the basis between two inverses, and estimates D in it. When the basis is computed again D is
        carried there, D' = (Q'ᵀQ)² D (PᵀP')²: the diagonal of the metric in the new basis.

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> x = torch.tensor([[1.0, 0.0], [0.0, 2.0]])
        >>> pb = ng.pullback(model, x, ng.Euclidean())
        >>> EigenKronecker().estimate(pb).dense().diagonal()
        tensor([0.5000, 2.0000, 0.5000, 2.0000])
    """

    has_basis: ClassVar[bool] = True

    def layer_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        factors = super().layer_shapes(block)
        bases = {basis: factors[side] for basis, side in ("QS", "PA") if len(factors[side]) == 3}
        return factors | bases | {"D": block.shape}

    def layer_cost(self, block: Block, *, exact: bool) -> Cost:
        s, a = self.factor_shapes(block)
        return Cost(self.layer_elements(block) + block.size, {"S": s, "A": a, "D": block.shape})

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
        return replace(out, power=self.power)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> EigenKroneckerOperator:
        """S and A as in ``Kronecker``, and D = (QᵀG_kP)² in the basis of ``like`` (Vyas et al. 2024)."""
        assert like is None or isinstance(like, EigenKroneckerOperator)
        split, layout, fallback = self.split_gradient(sample, like)
        pairs = gradient_factors(sample, split.used, self.factor_shapes)
        pairs = [(s.to(layout.dtype), a.to(layout.dtype)) for s, a in pairs]
        zeros = [_zeros(block, layout.dtype) for block in split.used]
        out = self.assemble(split, layout, pairs, fallback, None if like is None else like.basis, zeros)
        scales = squared_gradients(sample, split.blocks, out.basis.sides)
        return replace(out, scales=tuple(d.to(layout.dtype) for d in scales))

    def identity(self, model: Model, blocks: Sequence[Block], dtype: torch.dtype) -> EigenKroneckerOperator | None:
        out = cast("EigenKroneckerOperator | None", super().identity(model, blocks, dtype))
        return None if out is None else replace(out, scales=tuple(map(torch.ones_like, out.scales)))  # D may be square

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> EigenKroneckerOperator:
        """Without eigenvectors among the tensors, with those of S and A."""
        split, fallback = self.restored_split(model, blocks, tensors)
        layout = Layout.of(model.params, next(iter(tensors.values())).dtype)
        names = [block.names[0] for block in split.used]

        bases = [(tensors.get(f"{name}/Q"), tensors.get(f"{name}/P")) for name in names]
        sides = split.of_all(bases, lambda block: (None, None))
        basis = Basis.of_sides(sides) if any(key.endswith(("/Q", "/P")) for key in tensors) else None
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
        basis: Q and P, the eigenvectors of S and A as they were when the basis was last computed.
        scales: D [c o i], the second moments of the gradients in that basis.
        fallback: The metric on the parameters that no layer rule covers.
        unseen: Parameters of layers that no forward pass has used so far.
        power: p: the operator is G^p of the G that the tensors hold.
        positions: How many positions the factors are means over.
        elsewhere: The largest root mean square of a gradient of layers that other processes keep.
        products: Whether D is s ⊗ a of the eigenvalues of S and A, of which some are rounding.

    Method:
        G = (Q ⊗ P) diag(D) (Q ⊗ P)ᵀ on every layer: v = W [c o i] goes to Q (D ⊙ QᵀWP) Pᵀ (George et al. 2018, (9)).
    """

    fields: ClassVar[Mapping[str, str]] = {"S": "left", "A": "right", "D": "scales"}
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
    elsewhere: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)
    products: bool = field(default=False, kw_only=True)  # whether D is s ⊗ a of the eigenvalues of S and A

    @property
    def by_letter(self) -> Mapping[str, Sequence[Tensor | None]]:
        return {"S": self.left, "A": self.right, "Q": self.basis.left, "P": self.basis.right, "D": self.scales}

    def _basis_of(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        left, right = (tuple(side[b] for b in numbers) for side in (self.basis.left, self.basis.right))
        return {"basis": Basis(left, right)}

    def act(self, b: int, w: Tensor) -> Tensor:
        q, p = self.basis.left[b], self.basis.right[b]
        return rotate_back(q, self.scales[b].pow(self.power) * rotate(q, w, p), p)

    def map(self, f: Callable[[Tensor], Tensor]) -> EigenKroneckerOperator:
        fallback = None if self.fallback is None else self.fallback.map(f)
        return replace(self, scales=tuple(map(f, self.scales)), fallback=fallback, power=1.0)

    def layer_diagonal(self, b: int) -> Tensor:
        q, p = self.basis.left[b], self.basis.right[b]
        return rotate_back(squares_of(q), self.scales[b].pow(self.power), squares_of(p))

    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        return self.scales[b].double().clamp(min=0)

    def eigenvalues(self) -> Tensor | None:
        layers, dtype = list[Tensor](), self.layout.dtype
        for scales, (q, p) in zip(self.scales, self.basis.sides, strict=True):
            d = scales.double()
            if self.products and p is not None:  # beside one s_o the largest is that of A
                d = without_rounding(d, dtype)
            if self.products and q is not None:
                d = without_rounding(d.mT, dtype).mT
            layers.append(d.clamp(min=0).flatten())
        if self.fallback is None:
            return torch.cat(layers)
        below = self.fallback.eigenvalues()
        return None if below is None else torch.cat([*layers, below])

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
        mean, there = super().lerp(other, weight), cast(EigenKroneckerOperator, other)
        old = there.basis.change_basis(self.scales, self.basis)
        return replace(mean, basis=there.basis, scales=self.layers_lerp(there, old, there.scales, weight))

    def with_new_basis(self, basis: Basis | None = None) -> EigenKroneckerOperator:
        """In the eigenvectors of S and A as they are now, which may be known, with D carried there."""
        basis = Basis.of(self.left, self.right) if basis is None else basis
        below = self.fallback
        fallback = below.with_new_basis() if isinstance(below, LayerOperator) else below
        return replace(self, basis=basis, scales=basis.change_basis(self.scales, self.basis), fallback=fallback)

    def _inverse(self, damping: Damping) -> Inverse:
        """(G + λ)^-p = Q (QᵀWP / (D + λ)^p) Pᵀ, exactly, and with nothing to be factored."""
        if damping == 0:
            for block, values in zip(self.blocks, self.scales, strict=True):
                self.refuse_singular(block, values, 0.0)
            self.refuse_rounding()
        return self.spectral_inverse(self.fallback_inverse(damping), damping)


# Second moments of per-example gradients in a basis of every layer: D = Σ_kn (Qᵀ R_kn P)² (George et al. 2018).


@final
class RotatedSquares:
    """D [c o i] of every layer, summed over chunks of roots.

    With one position D is (g Q)²ᵀ(a P)², and no row is formed. With several the rows Σ_r g aᵀ come first, a chunk at a
    time; whether they are rotated, or g and a before, is decided by what is less work. The rows of a tied weight are
    the sum of those of its kinds, and rotated.
    """

    def __init__(self, layers: Sequence[Block], sides: Sequence[tuple[Rotation, Rotation]], dtype: torch.dtype) -> None:
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
                self._add_one_position(b, h)
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
            self._sums[b].accumulate(a.squared_gradients(rotate_rows(g, q)))
            return
        x = a.dense().to(self._dtype)
        if r == 1:
            self._inputs[b] = rotate_rows(x, p)
            self._add_one_position(b, g)
            return
        if turns_factors(ExampleGrads(x, g), q, p):
            self._sums[b].add(ExampleGrads(rotate_rows(x, p), rotate_rows(g, q)))
            return
        step = at_once(k * c * o * i)
        for chunk, h in zip(x.split(step), g.split(step, dim=1), strict=True):
            self._sums[b].accumulate(_squares(ExampleGrads(chunk, h).rows().unflatten(-1, (c, o, i)), q, p))

    def _add_one_position(self, b: int, g: Tensor) -> None:
        self._sums[b].add(ExampleGrads(self._inputs[b], rotate_rows(g, self._sides[b][0])))


def rotated_squares(pb: Pullback, layers: Sequence[Block], sides: Sequence[tuple[Rotation, Rotation]]) -> list[Tensor]:
    """D [c o i] of every layer in ``layers``, which have rules: the diagonal of G in the basis of its sides."""
    if not layers:
        return []
    if pb.coupling is not None:
        return _coupled(pb, layers, sides)
    squares = RotatedSquares(layers, sides, pb.y.dtype)
    for g in by_roots(pb):
        squares.add(pb.tape, g)
    return squares.totals()


def _coupled(pb: Pullback, layers: Sequence[Block], sides: Sequence[tuple[Rotation, Rotation]]) -> list[Tensor]:
    """The rows of a coupled metric come mixed, and in flattening order."""
    totals = [Squares() for _ in layers]
    orders = [block.index.argsort().argsort() for block in layers]
    for factors in replace(pb, layers=list(layers)).factors():
        for total, f, block, order, (q, p) in zip(totals, factors, layers, orders, sides, strict=True):
            total.accumulate(_squares(f.rows()[..., order].unflatten(-1, block.shape), q, p))
    return [total.total() for total in totals]


def _squares(rows: Tensor, q: Tensor | None, p: Tensor | None) -> Tensor:
    """Σ_kn (QᵀRP)² [c o i] of rows [k n c o i]."""
    return rotate(q, rows, p).square().sum((0, 1))
