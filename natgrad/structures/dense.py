"""Dense and BlockDense: all of the metric, or one matrix for every layer, inverted by Cholesky."""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, pairwise
from typing import ClassVar, cast, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.roots import spectrum
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    cholesky,
    damped_spectrum,
    eigvalsh,
    inverse_powered,
    is_rounding,
    powered,
    refuse_indefinite,
    refuse_rounding,
    without_rounding,
)
from natgrad.model import Model
from natgrad.pullbacks.example_grads import cross
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import (
    Inverse,
    Layout,
    Operator,
    StateError,
    Structure,
    Subset,
    check_shape,
)


class MatrixOperator(Operator):
    """Matrices on groups of parameters, and zero between these: what Dense and BlockDense have in common."""

    matrices: tuple[Tensor, ...]
    indices: tuple[Tensor, ...]  # the flattened positions of every matrix

    @abstractmethod
    def title(self, numbers: Sequence[int]) -> str:
        """What these matrices are, for errors."""

    @abstractmethod
    def with_matrices(self, matrices: Sequence[Tensor], power: float = 1.0) -> Self:
        """Other matrices at the same positions."""

    @cached_property
    def _powered(self) -> tuple[Tensor, ...]:
        return tuple(_matrix_power(matrix, self.power, self.title([b])) for b, matrix in enumerate(self.matrices))

    def product(self, v: Tensor) -> Tensor:
        out = torch.zeros_like(v)
        for index, matrix in zip(self.indices, self._powered, strict=True):
            out[index] = matrix @ v[index]
        return out

    def map(self, f: Callable[[Tensor], Tensor]) -> Self:
        pairs = (spectrum(matrix) for matrix in self.matrices)
        return self.with_matrices([(vectors * f(values)) @ vectors.T for values, vectors in pairs])

    def diagonal(self) -> Tensor:
        out = self.matrices[0].new_zeros(self.layout.size)
        for index, matrix in zip(self.indices, self._powered, strict=True):
            out[index] = matrix.diagonal()
        return out

    def dense(self) -> Tensor:
        out = self.matrices[0].new_zeros(self.layout.size, self.layout.size)
        for index, matrix in zip(self.indices, self._powered, strict=True):
            out[index[:, None], index] = matrix
        return out

    def _logdet(self, damping: Damping) -> Tensor:
        triangles = self._cholesky(damping).factors
        return torch.stack([2 * L.diagonal(dim1=-2, dim2=-1).log().sum() for L in triangles]).sum()

    def eigenvalues(self) -> Tensor:
        spectra = (eigvalsh(matrix.double(), "the metric") for matrix in self.matrices)
        return torch.cat([without_rounding(values, self.layout.dtype) for values in spectra])

    def lerp(self, other: Operator, weight: float) -> Self:
        self.same_kind(other)
        pairs = zip(self.matrices, cast(MatrixOperator, other).matrices, strict=True)
        return self.with_matrices([torch.lerp(a, b, weight) for a, b in pairs], self.power)

    def averaged(self) -> dict[str, Tensor]:
        return self.tensors()

    def nonnegative(self) -> dict[str, Tensor]:
        return {key: matrix.diagonal() for key, matrix in self.tensors().items()}

    def _cholesky(self, damping: Damping) -> CholeskyInverse:
        """(G_b + λ)⁻¹ of every block, whatever the power."""
        shifts, largest = _shifts(self.matrices, damping), _largest(self.matrices)
        if isinstance(damping, Relative) and damping.largest is not None:
            largest = largest.maximum(damping.largest)
        batches = _batched(self.indices, self.matrices)
        triangles = [cholesky(m, _of_blocks(shifts, b), self.title(b), largest) for b, _, m in batches]
        return CholeskyInverse(self.layout, tuple(index for _, index, _ in batches), tuple(triangles))

    def _inverse(self, damping: Damping) -> Inverse:
        """(G_b + λ)^-p of every block; by Cholesky where p is 1."""
        batches, shifts = _batched(self.indices, self.matrices), _shifts(self.matrices, damping)
        if self.power == 1 and not (isinstance(shifts, Tensor) and bool((shifts == 0).any())):
            return self._cholesky(damping)
        roots = [
            _damped_root(matrix, _of_blocks(shifts, b), damping, self.power, self.title(b)) for b, _, matrix in batches
        ]
        inverse = PseudoInverse(self.layout, tuple(index for _, index, _ in batches), tuple(roots))
        if damping == 0:
            refuse_rounding(torch.cat([matrix.diagonal() for matrix in self.matrices]), "the metric")
        return inverse

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None and self.power != 1:
            self.refuse(f"Pinv(weight=…) at the power {self.power:g}", "another norm has no powers; leave it out")
        batches, shifts = _batched(self.indices, self.matrices), _shifts(self.matrices, damping)
        largest = _largest(self.matrices)
        roots: list[Tensor] = []
        for numbers, index, matrix in batches:
            check_finite(matrix, "the metric")
            λ = _of_blocks(shifts, numbers)
            eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
            damped = matrix + (λ[:, None, None] if isinstance(λ, Tensor) else λ) * eye
            inverse_root = None if weight is None else _inverse_root(weight, index)
            root = _pseudo_root(damped, rtol, inverse_root, damping, self.power)
            sizes = damped.diagonal(dim1=-2, dim2=-1).amax(-1).clamp(min=0).sqrt()
            roots.append(root.masked_fill(is_rounding(sizes, largest)[:, None, None], 0.0))
        return PseudoInverse(self.layout, tuple(index for _, index, _ in batches), tuple(roots))

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        return restore_inverse(self.layout, self.indices, tensors)


@final
@dataclass(frozen=True, repr=False)
class DenseOperator(MatrixOperator):
    """A metric as a matrix, every entry of it.

    Args:
        layout: The names and shapes of the parameters, and the precision.
        matrix: G [p q].
        power: p: the operator is G^p of the G that the tensors hold.
    """

    layout: Layout
    matrix: Tensor
    power: float = field(default=1.0, kw_only=True)

    @property
    def matrices(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # read only
        """The one matrix."""
        return (self.matrix,)

    @cached_property
    def indices(self) -> tuple[Tensor, ...]:  # type: ignore[override]  # read only
        """All positions, as one block."""
        return (torch.arange(self.layout.size, device=self.matrix.device),)

    def title(self, numbers: Sequence[int]) -> str:
        return "the dense metric"

    def with_matrices(self, matrices: Sequence[Tensor], power: float = 1.0) -> DenseOperator:
        return DenseOperator(self.layout, *matrices, power=power)

    def dense(self) -> Tensor:
        return self._powered[0]


@final
@dataclass(frozen=True, repr=False)
class BlockDenseOperator(MatrixOperator):
    """A metric as one matrix for every layer.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        names: The names of the layers.
        indices: The flattened positions of every block.
        matrices: The matrix of every block.
        power: p: the operator is G^p of the G that the tensors hold.
    """

    damps_per_block: ClassVar[bool] = True
    layout: Layout
    names: tuple[str, ...]
    indices: tuple[Tensor, ...]
    matrices: tuple[Tensor, ...]
    power: float = field(default=1.0, kw_only=True)

    def title(self, numbers: Sequence[int]) -> str:
        names = ", ".join(self.names[b] for b in numbers)
        return f"the block {names} of the metric" if len(numbers) == 1 else f"a block of the metric ({names})"

    def with_matrices(self, matrices: Sequence[Tensor], power: float = 1.0) -> BlockDenseOperator:
        return replace(self, matrices=tuple(matrices), power=power)

    def tensors(self) -> dict[str, Tensor]:
        return dict(zip(self.names, self.matrices, strict=True))

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None and weight.ndim == 2:
            self.refuse("Pinv(weight=matrix)", "a full weight mixes the blocks; give positive numbers a parameter")
        return super()._pseudo_inverse(damping, rtol, weight)


class FormedOperator(Operator):
    """A metric that is known by its products; its inverse, and what else needs eigenvalues, are those of its matrix."""

    def to_dense(self) -> DenseOperator:
        """The same as a matrix [p p]."""
        return DenseOperator(self.layout, self.dense())

    def map(self, f: Callable[[Tensor], Tensor]) -> Operator:
        return self.to_dense().map(f)

    def logdet(self, damping: Damping = 0.0) -> Tensor:
        return self.to_dense().logdet(damping)

    def inverse(self, damping: Damping) -> Inverse:
        return self.to_dense().inverse(damping)

    def pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        return self.to_dense().pseudo_inverse(damping, rtol, weight)

    def lerp(self, other: Operator, weight: float) -> Self:
        self.refuse("a moving average", "average what it is made of")


# Structures.


class MatrixStructure(Structure):
    """A matrix for every group of layers."""

    @abstractmethod
    def groups(self, blocks: Sequence[Block]) -> list[list[Block]]:
        """The layers that have a matrix together."""

    @abstractmethod
    def assemble(self, layout: Layout, groups: Sequence[Sequence[Block]], matrices: Sequence[Tensor]) -> MatrixOperator:
        """The operator with these matrices of the groups, in flattening order."""

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
        return {name_of(group): (_size(group),) * 2 for group in self.groups(blocks)}

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        return list(blocks)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> MatrixOperator:
        """g gᵀ of every group; of all layers the full matrix of AdaGrad (Duchi, Hazan and Singer 2011)."""
        if isinstance(like, MatrixOperator):
            return like.with_matrices(_outer_products(sample, like.layout, like.indices, like.matrices), like.power)
        layout, groups = Layout.of(sample.ω), self.groups(sample.blocks)
        self.admit_gradient(sample.blocks, layout, sample.memory)
        indices = [index_of(group).sort().values for group in groups]
        return self.assemble(layout, groups, _outer_products(sample, layout, indices, None))

    def matrices_of(self, pullback: Pullback) -> MatrixOperator:
        """G of every group, from the rows."""
        self.admit(pullback)
        groups, at = self.groups(pullback.blocks), {block.names[0]: b for b, block in enumerate(pullback.blocks)}
        matrices = _matrices(pullback, [[at[block.names[0]] for block in group] for group in groups])
        return self.assemble(Layout(pullback.model.like, pullback.y.dtype), groups, matrices)


@final
@dataclass(frozen=True, repr=False)
class Dense(MatrixStructure):
    """All of G [p q]: RᵀCR/N; with a ``power`` below 1, G^p.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Dense().estimate(pb).dense()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """

    operator: ClassVar[type[Operator]] = DenseOperator
    suggested: ClassVar[bool] = True
    power: float = field(default=1.0, kw_only=True)

    def groups(self, blocks: Sequence[Block]) -> list[list[Block]]:
        return [list(blocks)]

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]]:
        return {"matrix": (_size(blocks),) * 2}

    def assemble(self, layout: Layout, groups: Sequence[Sequence[Block]], matrices: Sequence[Tensor]) -> DenseOperator:
        return DenseOperator(layout, *matrices, power=self.power)

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> DenseOperator:
        return cast(DenseOperator, self.matrices_of(pullback))


@final
@dataclass(frozen=True, repr=False)
class BlockDense(MatrixStructure):
    """Keep the metric of every layer as a matrix, and nothing between layers.

    A layer is its weight and bias together.

    Args:
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> BlockDense().estimate(pb).names
        ('weight + bias',)
    """

    suggested: ClassVar[bool] = True
    power: float = field(default=1.0, kw_only=True)

    def groups(self, blocks: Sequence[Block]) -> list[list[Block]]:
        return list(layers_in(blocks).values())

    def assemble(
        self, layout: Layout, groups: Sequence[Sequence[Block]], matrices: Sequence[Tensor]
    ) -> BlockDenseOperator:
        indices = tuple(index_of(group).sort().values for group in groups)
        return BlockDenseOperator(layout, tuple(map(name_of, groups)), indices, tuple(matrices), power=self.power)

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> BlockDenseOperator:
        return cast(BlockDenseOperator, self.matrices_of(pullback))

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> BlockDenseOperator:
        groups = self.groups(blocks)
        if len(tensors) != len(groups):
            raise StateError(f"the metric in the state has {len(tensors)} blocks, here it has {len(groups)}")
        for (key, t), shape in zip(tensors.items(), self.shapes(blocks).values(), strict=True):
            check_shape(f"{key} of the metric", t, shape)
        layout = Layout.of(model.params, next(iter(tensors.values())).dtype)
        return replace(self.assemble(layout, groups, list(tensors.values())), names=tuple(tensors))


def _matrices(pullback: Pullback, groups: Sequence[Sequence[int]]) -> list[Tensor]:
    """RᵀR [d d] of every group of blocks, which are given by their numbers.

    In flattening order, whatever the packing: the order must not depend on the batch.
    """
    blocks = pullback.blocks
    positions = [index_of([blocks[b] for b in group]) for group in groups]
    totals = [pullback.y.new_zeros(len(index), len(index)) for index in positions]
    ends = [list(accumulate((blocks[b].size for b in group), initial=0)) for group in groups]
    for factors in pullback.factors():
        for total, group, stops in zip(totals, groups, ends, strict=True):
            spans = [slice(start, stop) for start, stop in pairwise(stops)]
            for at, b in enumerate(group):
                for d, columns in zip(group[: at + 1], spans, strict=False):  # the rest is symmetric
                    total[spans[at], columns] += cross(factors[b], factors[d], pullback.chunk)
    out = []
    for index, total in zip(positions, totals, strict=True):
        order = index.argsort()
        out.append((total.tril() + total.tril(-1).T)[order[:, None], order])
    return out


def _size(group: Sequence[Block]) -> int:
    """Of the matrix of these layers."""
    return sum(block.size for block in group)


def _outer_products(
    sample: GradientSample, layout: Layout, positions: Sequence[Tensor], old: Sequence[Tensor] | None
) -> list[Tensor]:
    """g gᵀ at the positions of every block.

    Parameters without a gradient have their ``old`` block, and zero beside the others: so every estimate is positive
    semi-definite, and so is their average.
    """
    g = layout.flatten(sample.ω)
    products = [torch.outer(g[at], g[at]) for at in positions]
    if not sample.without or old is None:
        return products
    absent = torch.zeros_like(g, dtype=torch.bool)
    absent[Subset.of(layout, sorted(sample.without)).index(g.device)] = True
    masks = [absent[at] for at in positions]
    triples = zip(masks, products, old, strict=True)
    return [
        torch.where(mask[:, None] & mask, before, new.masked_fill(mask[:, None] | mask, 0.0))
        for mask, new, before in triples
    ]


# Arithmetic of blocks.


def _matrix_power(matrix: Tensor, power: float, what: str) -> Tensor:
    """G^p [d d] of a symmetric matrix that is not negative."""
    if power == 1:
        return matrix
    check_finite(matrix, what)
    values, vectors = spectrum(matrix)
    return (vectors * powered(values, power, what)) @ vectors.T


def inverse_in_units(G: Operator, damping: float) -> Inverse | None:
    """(G + λ·diag G)⁻¹, the damping of Marquardt (1963), which does not change with the units of the parameters.

    None where G is not kept as matrices, and of a power of G.
    """
    if not isinstance(G, MatrixOperator) or G.power != 1:
        return None
    largest = _largest(G.matrices)
    return G.with_matrices([_in_units(matrix, damping, largest) for matrix in G.matrices]).inverse(0.0)


def _in_units(matrix: Tensor, damping: float, largest: Tensor) -> Tensor:
    """G + λ·diag G; parameters that nothing depends on have the largest unit, and λ = 1: they do not move."""
    units = matrix.diagonal()
    curved = (units > 0) & ~is_rounding(units.clamp(min=0).sqrt(), largest)
    return matrix + torch.diag(torch.where(curved, damping * units, largest.square().clamp(min=1e-30)))


def _largest(matrices: Sequence[Tensor]) -> Tensor:
    """The largest root mean square [] of all blocks, beside which others are rounding."""
    return torch.cat([matrix.diagonal() for matrix in matrices]).clamp(min=0).sqrt().amax()


def _shifts(matrices: Sequence[Tensor], damping: Damping) -> float | Tensor:
    """λ, or λ [b] relative to the mean eigenvalue of every block, and zero where the block is."""
    if not isinstance(damping, Relative):
        return damping
    return damping.shifts(torch.stack([matrix.diagonal().mean() for matrix in matrices]))


def _of_blocks(shifts: float | Tensor, numbers: int | list[int]) -> float | Tensor:
    return shifts[numbers] if isinstance(shifts, Tensor) else shifts


# Inverses.


class BlockInverse(Inverse):
    """T Tᵀ of a matrix for every block; blocks of one size are treated as one batch."""

    layout: Layout
    indices: tuple[Tensor, ...]  # [b d] flattened positions
    factors: tuple[Tensor, ...]  # [b d e]
    prefix: ClassVar[str]  # of the names of the factors in a checkpoint

    def tensors(self) -> dict[str, Tensor]:
        return {f"{self.prefix}{at}": factor for at, factor in enumerate(self.factors)}

    def solve(self, ω: Tensor) -> Tensor:
        return self.each(lambda T, columns: T @ (T.mT @ columns), ω)

    def each(self, multiply: Callable[[Tensor, Tensor], Tensor], t: Tensor) -> Tensor:
        """Of t [*s p]: a function of the factor [b d e] and the columns [b d s] of every block."""
        rows = t.view(-1, t.shape[-1])
        out = torch.empty_like(rows)
        for index, factor in zip(self.indices, self.factors, strict=True):
            out[:, index] = multiply(factor, rows[:, index].permute(1, 2, 0)).permute(2, 0, 1)
        return out.view_as(t)


@final
@dataclass(frozen=True, repr=False)
class CholeskyInverse(BlockInverse):
    """(G_b + λ)⁻¹ of every block by its Cholesky factor L; its root is L⁻ᵀ."""

    layout: Layout
    indices: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]  # L
    prefix: ClassVar[str] = "cholesky/"

    def solve(self, ω: Tensor) -> Tensor:
        return self.each(lambda L, columns: torch.cholesky_solve(columns, L), ω)

    def root_times(self, ξ: Tensor) -> Tensor:
        return self.each(lambda L, columns: torch.linalg.solve_triangular(L.mT, columns, upper=True), ξ)

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        return self.each(lambda L, columns: torch.linalg.solve_triangular(L, columns, upper=False), ω)


@final
@dataclass(frozen=True, repr=False)
class PseudoInverse(BlockInverse):
    """W^{-½} (W^{-½} G W^{-½})⁺ W^{-½}: the solution of G v = ω of least ‖v‖_W.

    Without a weight it is the Moore–Penrose inverse (van Oostrum, Müller and Ay (2023, (33)).

    Eigenvalues at most ``rtol`` times the largest count as zero. Without a weight it has powers, (G⁺)^p. Powers of
    inverses are of this kind too: with relative damping a block of zeros has the inverse zero.
    """

    layout: Layout
    indices: tuple[Tensor, ...]
    factors: tuple[Tensor, ...]  # [b d r]: the pseudo-inverse is T Tᵀ
    prefix: ClassVar[str] = "root/"


def _damped_root(matrix: Tensor, λ: float | Tensor, damping: Damping, power: float, what: str) -> Tensor:
    """(G + λ)^-p/2 [b d d] of matrices of one size. No eigenvalue of a matrix is above d times their mean."""
    check_finite(matrix, what)
    shift = λ if isinstance(λ, Tensor) else matrix.new_full((len(matrix),), λ)
    values, vectors = spectrum(matrix)
    zero = (shift == 0).unsqueeze(-1) & isinstance(damping, Relative)
    damped = damped_spectrum(values.masked_fill(zero, 1.0), λ, what).masked_fill(zero, 0.0)
    root = (vectors * inverse_powered(damped, 0.5 * power).unsqueeze(-2)) @ vectors.mT
    # Rounding must not move parameters that nothing depends on: a step rule may enlarge it to a whole step.
    unused = matrix.diagonal(dim1=-2, dim2=-1) == 0
    return root.masked_fill_(unused.unsqueeze(-1) != unused.unsqueeze(-2), 0.0)


def restore_inverse(layout: Layout, indices: Sequence[Tensor], tensors: Mapping[str, Tensor]) -> Inverse | None:
    """The inverse with these tensors, of matrices at these flattened positions."""
    batches = tuple(index for _, index, _ in _batched(indices, indices))
    for kind in (CholeskyInverse, PseudoInverse):
        keys = [f"{kind.prefix}{at}" for at in range(len(batches))]
        if all(key in tensors for key in keys):
            return kind(layout, batches, tuple(tensors[key] for key in keys))
    return None


def _pseudo_root(
    matrix: Tensor, rtol: float | None, inverse_root: Tensor | None, damping: Damping, power: float
) -> Tensor:
    """T with T Tᵀ = w ((w G w)⁺)^p w, w = W^{-½} or 1, of the ``matrix`` G with its damping in it."""
    inner = matrix if inverse_root is None else inverse_root @ matrix @ inverse_root
    values, vectors = spectrum(inner)
    rtol = matrix.shape[-1] * torch.finfo(matrix.dtype).eps if rtol is None else rtol
    refuse_indefinite(values, rtol, damping, "the metric")
    cut = rtol * values[..., -1:]
    scale = torch.where(values > cut, values, torch.inf).pow(-0.5 * power)
    root = vectors * scale.unsqueeze(-2)
    return root if inverse_root is None else inverse_root @ root


def _inverse_root(weight: Tensor, index: Tensor) -> Tensor:
    """W^{-½} [b d d] on the blocks ``index`` [b d], of a weight [p] (diagonal) or [p q]."""
    if weight.ndim == 1:
        return torch.diag_embed(weight[index].rsqrt())
    values, vectors = spectrum(weight)
    root = (vectors * values.rsqrt()) @ vectors.T
    return root[index.unsqueeze(-1), index.unsqueeze(-2)]


def _batched(indices: Sequence[Tensor], matrices: Sequence[Tensor]) -> list[tuple[list[int], Tensor, Tensor]]:
    """Stack blocks of the same size, with their numbers."""
    by_size: dict[int, list[int]] = defaultdict(list)
    for b, index in enumerate(indices):
        by_size[index.numel()].append(b)
    return [
        (group, torch.stack([indices[b] for b in group]), torch.stack([matrices[b] for b in group]))
        for group in by_size.values()
    ]


def layers_in(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks by the names of their parameters up to the last dot: what a user calls a layer."""
    grouped: dict[str, list[Block]] = {}
    for block in blocks:
        grouped.setdefault(block.names[0].rpartition(".")[0], []).append(block)
    return grouped


def index_of(group: Sequence[Block]) -> Tensor:
    """The positions [p] of the blocks' parameters in flattening order."""
    return torch.cat([block.index for block in group])


def name_of(group: Sequence[Block]) -> str:
    """The names of the blocks' parameters, in flattening order."""
    starts: dict[str, int] = {}
    for block in group:
        starts.update(zip(block.names, sorted(place.start for place in block.slices), strict=True))
    return " + ".join(sorted(starts, key=lambda name: starts[name]))
