"""The structure, and those that keep entries of G exactly: all, blocks, the diagonal, the rows, or products only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError
from natgrad.kernels.gram import KernelMatrix
from natgrad.linearise import linearise
from natgrad.model import Model
from natgrad.pullback.factors import Factors, cross
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import Pullback, without_autocast
from natgrad.structures.base import Layout, Operator
from natgrad.structures.dense import BlockDenseOperator, DenseOperator
from natgrad.structures.diagonal import DiagonalOperator
from natgrad.structures.implicit import ImplicitOperator
from natgrad.structures.kernel import KernelOperator

# Where the blocks of a pullback lie in a matrix, and which of them are one layer.


def spans_of(pullback: Pullback) -> list[slice]:
    """Of every block, its rows in a packed matrix."""
    ends = accumulate((block.size for block in pullback.blocks), initial=0)
    return [slice(start, end) for start, end in pairwise(ends)]


def layers_in(blocks: Sequence[Block]) -> dict[str, list[Block]]:
    """Blocks whose parameters' names agree up to the last dot: what a user calls a layer."""
    grouped: dict[str, list[Block]] = {}
    for block in blocks:
        grouped.setdefault(block.names[0].rpartition(".")[0], []).append(block)
    return grouped


def index_of(group: Sequence[Block]) -> Tensor:
    """The places [p] of the blocks' parameters in flattening order."""
    return torch.cat([block.index for block in group])


def name_of(group: Sequence[Block]) -> str:
    """In flattening order, whatever the blocks."""
    starts: dict[str, int] = {}
    for block in group:
        starts.update(zip(block.names, sorted(place.start for place in block.places), strict=True))
    return " + ".join(sorted(starts, key=lambda name: starts[name]))


def add_pairs(total: Tensor, factors: Sequence[Factors], limit: int) -> None:
    """Add Σ_kn R Rᵀ of several blocks that are kept as one."""
    ends = list(accumulate((f.g.shape[3] * f.g.shape[4] * f.a.shape[3] for f in factors), initial=0))
    spans = [slice(start, end) for start, end in pairwise(ends)]
    for b, left in enumerate(factors):
        for d in range(b + 1):
            product = cross(left, factors[d], limit)
            total[spans[b], spans[d]] += product
            if d < b:
                total[spans[d], spans[b]] += product.T


class Structure(ABC):
    """A choice of what to keep of G = RᵀR/N."""

    @property
    @abstractmethod
    def bounded(self) -> bool:
        """Whether a moving average of its operators stays as small as one of them."""

    @property
    def one_pass(self) -> bool:
        """Whether an estimate needs the model's forward pass once, so that what was random in it is a constant."""
        return False

    @abstractmethod
    def elements(self, pullback: Pullback) -> int:
        """How many numbers the operator will hold."""

    @abstractmethod
    def estimate(self, pullback: Pullback) -> Operator:
        """The operator of this structure, at the pullback's model and batch."""

    def estimate_like(self, pullback: Pullback, like: Operator | None) -> Operator:
        """An estimate that will be averaged with ``like``, where it fits: what is amortised is taken from there."""
        return self.estimate(pullback)

    def absorbs(self, average: Operator) -> bool:
        """Whether an estimate can go into this average piece by piece, without ever being whole."""
        return False

    def absorb(self, pullback: Pullback, average: Operator, weight: float) -> Operator:
        """The average (1 − w) Ḡ + w G, in the memory of Ḡ where ``absorbs`` says so."""
        return average.lerp(self.estimate_like(pullback, average), weight)

    @abstractmethod
    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> Operator | None:
        """The operator with these ``tensors()``; None if nothing was kept and it must be estimated again."""

    def admit(self, pullback: Pullback) -> None:
        """Refuse, before anything is allocated, what exceeds the memory bound, and say what would fit."""
        size = pullback.y.element_size()
        needed = self.elements(pullback) * size
        if needed <= pullback.memory:
            return
        others = [s for s in (Dense(), BlockDense(), Kernel(), Diagonal(), Implicit()) if type(s) is not type(self)]
        fits = {type(s).__name__: s.elements(pullback) * size for s in others}
        fitting = ", ".join(f"{name} ({b:,} bytes)" for name, b in fits.items() if b <= pullback.memory)
        raise MemoryBoundError(
            f"{type(self).__name__} of {pullback.model.size:,} parameters needs {needed:,} bytes, over the bound "
            f"memory={pullback.memory:,}. {'These fit: ' + fitting if fitting else 'No structure fits: raise memory='}"
        )


@final
@dataclass(frozen=True)
class Dense(Structure):
    """All of G [p q]: RᵀCR/N (002 (29)).

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Dense().estimate(pb).dense()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """

    @property
    def bounded(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        return pullback.model.size**2

    @without_autocast
    def estimate(self, pullback: Pullback) -> DenseOperator:
        self.admit(pullback)
        p = pullback.model.size
        packed = pullback.y.new_zeros(p, p)
        order = torch.cat([block.index for block in pullback.blocks])
        starts = spans_of(pullback)
        for factors in pullback.factors():
            for b, left in enumerate(factors):
                for d in range(b + 1):
                    packed[starts[b], starts[d]] += cross(left, factors[d], pullback.chunk)
        matrix = torch.empty_like(packed)
        matrix[order[:, None], order] = packed.tril() + packed.tril(-1).T
        return DenseOperator(Layout(pullback.model.like, pullback.y.dtype), matrix)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> DenseOperator:
        return DenseOperator(Layout.of(model.params, tensors["matrix"].dtype), tensors["matrix"])


@final
@dataclass(frozen=True)
class BlockDense(Structure):
    """The diagonal blocks of G, one a layer (a layer's weight and bias together).

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> BlockDense().estimate(pb).names
    ('weight + bias',)
    """

    @property
    def bounded(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        return sum(sum(block.size for block in group) ** 2 for group in layers_in(pullback.blocks).values())

    @without_autocast
    def estimate(self, pullback: Pullback) -> BlockDenseOperator:
        self.admit(pullback)
        blocks = pullback.blocks
        groups = layers_in(blocks)
        at = {id(block): b for b, block in enumerate(blocks)}
        members = [[at[id(block)] for block in group] for group in groups.values()]
        totals = [pullback.y.new_zeros(index_of(group).numel(), index_of(group).numel()) for group in groups.values()]
        for factors in pullback.factors():
            for total, group in zip(totals, members, strict=True):
                add_pairs(total, [factors[b] for b in group], pullback.chunk)
        # Blocks are kept in flattening order, whatever the packing: the order must not depend on the batch.
        orders = [index_of(group).argsort() for group in groups.values()]
        matrices = tuple(0.5 * (t + t.T)[o[:, None], o] for t, o in zip(totals, orders, strict=True))
        indices = tuple(index_of(group).sort().values for group in groups.values())
        names = tuple(map(name_of, groups.values()))
        return BlockDenseOperator(Layout(pullback.model.like, pullback.y.dtype), names, indices, matrices)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> BlockDenseOperator:
        indices = tuple(index_of(group).sort().values for group in layers_in(blocks).values())
        layout = Layout.of(model.params, next(iter(tensors.values())).dtype)
        return BlockDenseOperator(layout, tuple(tensors), indices, tuple(tensors.values()))


@final
@dataclass(frozen=True)
class Diagonal(Structure):
    """The diagonal of G, without its rows: Σ_n (Σ_k g²) a², one product a layer (002 (31)).

    With a sampled metric this is the pullback sampling trick: one backward pass, and no per-example gradient.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Diagonal().estimate(pb).values
    tensor([1., 4., 1.])
    """

    @property
    def bounded(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        return pullback.model.size

    @without_autocast
    def estimate(self, pullback: Pullback) -> DiagonalOperator:
        self.admit(pullback)
        return DiagonalOperator(Layout(pullback.model.like, pullback.y.dtype), pullback.square())

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> DiagonalOperator:
        return DiagonalOperator(Layout.of(model.params, tensors["values"].dtype), tensors["values"])


@final
@dataclass(frozen=True)
class Kernel(Structure):
    """R itself, in factored form: G = RᵀR exactly, inverted through the N·K × N·K Gram matrix (Woodbury).

    Under a ``Sobolev`` metric the kernel matrix of the inputs is not inverted (``PushThrough``), and mixes no rows.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Kernel().estimate(pb).gram()  # ‖(1, 2, 1)‖²
    tensor([[6.]])
    """

    @property
    def bounded(self) -> bool:
        return False

    def elements(self, pullback: Pullback) -> int:
        coupled = pullback.coupled
        if coupled is not None and coupled.K is not None:  # the factors again in double, and two matrices in double
            return self.elements(pullback.unmixed()) * (1 + 8 // pullback.y.element_size())
        rows = pullback.columns * pullback.n
        kept = 0
        for block in pullback.blocks:
            _, o, i = block.shape
            shared = 1 if block.rule is None else pullback.seen.positions[block.names[0]]
            kept += rows * shared * o + pullback.n * shared * i  # g [k n r c o] and a [n r c i]
        return kept + 2 * rows**2  # the factors; the Gram matrix and the Gram matrix of one block

    @without_autocast
    def estimate(self, pullback: Pullback) -> KernelOperator:
        self.admit(pullback)
        coupled = pullback.coupled
        K = None if coupled is None or coupled.K is None else KernelMatrix.of(coupled.K)
        pb = pullback if K is None else pullback.unmixed()
        return KernelOperator(Layout(pb.model.like, pb.y.dtype), tuple(pb.blocks), tuple(pb.collect()), K)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KernelOperator:
        kept, factors = [], []
        for block in blocks:
            f = Factors(tensors[f"{block.names[0]}/a"], tensors[f"{block.names[0]}/g"])
            packed = (f.g.shape[3], f.g.shape[4], f.a.shape[3])
            kept.append(block if packed == block.shape else block.without_rule())
            factors.append(f)
        K = KernelMatrix.of(tensors["K"]) if "K" in tensors else None
        return KernelOperator(Layout.of(model.params, factors[0].g.dtype), tuple(kept), tuple(factors), K)


@final
@dataclass(frozen=True)
class Implicit(Structure):
    """Only v ↦ Jᵀ(C ⊗ h)Jv, through the model linearised once (002 section 5.2); solved by ``CG``.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Implicit().estimate(pb).product(torch.tensor([1.0, 0.0, 0.0]))
    tensor([1., 2., 1.])
    """

    @property
    def bounded(self) -> bool:
        return False

    def elements(self, pullback: Pullback) -> int:
        return pullback.model.size

    @without_autocast
    def estimate(self, pullback: Pullback) -> ImplicitOperator:
        self.admit(pullback)
        linear = linearise(pullback.model, pullback.batch.x)
        return ImplicitOperator(Layout(pullback.model.like, pullback.y.dtype), ((1.0, pullback, linear),))

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> None:
        return None
