"""The autograd graph: its nodes, its leaves, and how the batch axis moves through its operations.

The batch axis is followed from the result of an operation to an argument if an entry of example n in the argument can
change the result of example n only. Operations that are not listed here prove nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, TypeAlias, final

from torch import Tensor

from natgrad.accelerate.autograd_nodes import (
    LEAF,
    TRANSPOSES_AND_CASTS,
    UNTYPED,
    argument,
    axis_arguments,
    output_shapes,
    size_arguments,
)


def nodes(roots: Iterable[Any], stop: Collection[Any] = ()) -> Iterator[Any]:
    """All nodes below the roots, the roots included, down to those in ``stop``, which are left out."""
    visited: set[Any] = set(stop)
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node is not None and node not in visited:
            visited.add(node)
            yield node
            stack.extend(child for child, _ in node.next_functions)


@final
@dataclass(frozen=True, eq=False)
class Survey:
    """One walk over the graph below y: its nodes, how they are joined, and the leaves that enter it, by their ids.

    A leaf under a chain of transposes and casts is where the chain enters (``leaf_uses``); the chain is not looked at.
    ``joins``: for every node the places of its arguments among the nodes, with their output numbers. ``top``: the id of
    the leaf that y itself is such a chain of, which enters nothing.
    """

    nodes: Sequence[Any]
    joins: tuple[object, ...]
    entries: tuple[int, ...]
    top: int | None = None

    @property
    def kinds(self) -> tuple[object, ...]:
        """The types of the nodes, or their names where a type does not tell."""
        kinds = tuple(map(type, self.nodes))
        if any(kind.__name__ == UNTYPED for kind in set(kinds)):
            return tuple(node.name() for node in self.nodes)
        return kinds

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of the nodes."""
        return frozenset(kind.__name__ if isinstance(kind, type) else str(kind) for kind in set(self.kinds))

    @cached_property
    def counts(self) -> Counter[int]:
        """How often each leaf enters."""
        return Counter(self.entries)

    @property
    def form(self) -> tuple[object, ...]:
        """Kinds, joins and the axes that operations work along: ``x.softmax(0)`` and ``x.softmax(1)`` are of one kind.

        All but sizes: it is the same for batches of any length.
        """
        return self.kinds, self.joins, tuple(axis_arguments(self.nodes)), self.entries, self.top

    @property
    def shapes(self) -> list[Shape]:
        """The shapes of all outputs of nodes that y depends on."""
        return output_shapes(self.nodes, {pair: None for pair in self.joins if type(pair) is tuple})

    @property
    def sizes(self) -> tuple[object, ...]:
        """All sizes and places that nodes saved."""
        return tuple(size_arguments(self.nodes))

    def unreached(self, leaves: Mapping[str, Tensor]) -> frozenset[str]:
        """The names of the leaves that do not enter the graph at all; none where there is no graph to tell."""
        if not self.nodes:
            return frozenset()
        return frozenset(name for name, p in leaves.items() if not self.counts[id(p)] and id(p) != self.top)


def survey(y: Tensor) -> Survey:
    """Walk over the graph below y. A tight loop, because it runs in every estimate."""
    root = y.grad_fn
    if root is None:
        return Survey((), (), ())
    top = leaf_below(root)
    if top is not None:
        return Survey((root,), (), (), id(top))
    order: list[Any] = [root]
    index: dict[Any, int] = {root: 0}
    entries: list[int] = []
    joins: list[object] = []
    for node in order:  # which grows
        for child, number in node.next_functions:
            kind = type(child)
            leaf = child.variable if kind is LEAF else leaf_below(child) if kind in TRANSPOSES_AND_CASTS else None
            if leaf is not None:
                entries.append(id(leaf))
                joins.append("leaf")
            elif child is None:
                joins.append(None)
            else:
                at = index.get(child)
                if at is None:
                    at = index[child] = len(order)
                    order.append(child)
                joins.append((at, number))
        joins.append("end")
    return Survey(order, tuple(joins), tuple(entries))


def size_pattern(shapes: Iterable[Shape]) -> tuple[Shape, ...]:
    """The shapes with every size replaced by its number in the order of appearance: which sizes agree, and no size.

    0 and 1 keep their meaning.

    >>> size_pattern([(5, 7), (7, 1)]) == size_pattern([(6, 9), (9, 1)]) != size_pattern([(6, 6), (6, 1)])
    True
    """
    numbers: dict[int, int] = {0: 0, 1: 1}
    patterns: dict[Shape, Shape] = {}
    out = []
    for shape in shapes:
        pattern = patterns.get(shape)
        if pattern is None:
            pattern = patterns[shape] = tuple([numbers.setdefault(size, len(numbers)) for size in shape])
        out.append(pattern)
    return tuple(out)


def leaf_uses(roots: Iterable[Any], stop: Collection[Any]) -> Counter[int]:
    """How often each leaf, by id, enters the graph below the roots.

    Transposes and casts of a leaf are looked through: autocast caches its copy of a weight, so that several uses
    share one cast, and it is the entries of the copy that count.
    """
    counts: Counter[int] = Counter()
    for node in nodes(roots, stop):
        if not _above_leaf(node):
            leaves = (leaf_below(child) for child, _ in node.next_functions)
            counts.update(id(leaf) for leaf in leaves if leaf is not None)
    return counts


def _above_leaf(node: Any) -> bool:
    return type(node) is LEAF or (type(node) in TRANSPOSES_AND_CASTS and leaf_below(node) is not None)


def leaf_below(node: Any) -> Any:
    """The leaf that a chain of transposes and casts starts from, or None."""
    kind = type(node)
    while kind in TRANSPOSES_AND_CASTS:
        node = node.next_functions[0][0]
        kind = type(node)
    return node.variable if kind is LEAF else None


@final
@dataclass(frozen=True)
class BatchAxis:
    """Where a tensor has its n examples: on one axis, whose entries are numbered [before n after], row-major.

    >>> BatchAxis(1).of((7, 5, 24), (35, 24), 5)
    BatchAxis(index=0, before=7)
    """

    index: int
    before: int = 1

    def fits(self, shape: Shape, n: int) -> bool:
        """Whether a tensor of this shape can have n examples there."""
        size = shape[self.index] if 0 <= self.index < len(shape) else 0
        return size > 0 and size % (self.before * n) == 0

    def of(self, result: Shape, argument: Shape, n: int) -> BatchAxis | None:
        """The axis in a tensor that was reshaped to ``result``: elements keep their row-major order.

        None where a reshape cut the examples themselves in two. For one example there may be several: best is an axis
        of its own, then one that ends with it.
        """
        ahead = math.prod(result[: self.index]) * self.before
        candidates = []
        for index in range(len(argument)):
            before, rest = divmod(ahead, max(1, math.prod(argument[:index])))
            axis = BatchAxis(index, before)
            if before and not rest and axis.fits(argument, n):
                candidates.append(axis)
        goes_on = {axis: argument[axis.index] > axis.before * n for axis in candidates}
        return min(candidates, key=lambda axis: (goes_on[axis], axis.before > 1), default=None)

    def stays(self, other: BatchAxis | None, result: Shape, argument: Shape, n: int) -> bool:
        """Whether a reshape moves this axis to ``other`` whatever the sizes are, as long as the same ones agree.

        Equal leading and trailing axes cancel, and what is left of both shapes has equally many elements. An axis that
        cancels stays where it is. The first axis that does not is the slowest index of what is left.
        """
        if n == 1 or other is None or other.before != self.before:
            return False
        short = min(len(result), len(argument))
        lead = next((at for at in range(short) if result[at] != argument[at]), short)
        ends = range(1, short - lead + 1)
        tail = next((at - 1 for at in ends if result[-at] != argument[-at]), short - lead)
        if self.index < lead:
            return other.index == self.index
        if self.index >= len(result) - tail:
            return other.index - len(argument) == self.index - len(result)
        first = self.before == 1 and self.index == other.index == lead
        return first and (len(argument) - tail == lead + 1 or argument[lead] == n)

    def move_to_front(self, t: Tensor, n: int, lead: int = 0) -> Tensor:
        """A view with the n examples on an axis of their own, in front; ``lead`` axes before them stay.

        >>> import torch
        >>> BatchAxis(0, before=2).move_to_front(torch.arange(6), 3).flatten(1)
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        """
        at = lead + self.index
        return t.unflatten(at, (self.before, n, -1)).movedim(at + 1, lead)

    def split(self, shape: Shape, n: int) -> Shape:
        """The shape of that view."""
        at = self.index
        return (n, *shape[:at], self.before, shape[at] // (self.before * n), *shape[at + 1 :])


Shape: TypeAlias = tuple[int, ...]


@final
@dataclass(frozen=True)
class GraphStep:
    """One operation, and the one of its arguments that is looked at: number ``at`` of those that have gradients."""

    node: Any
    at: int
    axis: BatchAxis
    n: int
    result: Shape
    argument: Shape

    @property
    def reshapes(self) -> bool:
        """Whether the operation keeps all elements in their order."""
        return _FOLLOWED.get(self.node.name()) is _reshaped

    def moved(self, index: int | None) -> BatchAxis | None:
        """The examples on this axis of the argument, if it is as long there as the result is."""
        if index is None or not 0 <= index < len(self.argument):
            return None
        same = self.argument[index] == self.result[self.axis.index]
        return replace(self.axis, index=index) if same else None


Follow: TypeAlias = Callable[[GraphStep], BatchAxis | None]


def below(step: GraphStep) -> BatchAxis | None:
    """The axis of the examples in the argument, or None where the operation does not tell."""
    follow = _FOLLOWED.get(step.node.name())
    return None if follow is None or 0 in step.argument else follow(step)


def _aligned(step: GraphStep) -> BatchAxis | None:
    """Broadcasting: axes are counted from the back. None for an argument that is spread over the examples."""
    return step.moved(step.axis.index - len(step.result) + len(step.argument))


def _reshaped(step: GraphStep) -> BatchAxis | None:
    return step.axis.of(step.result, step.argument, step.n)


def _first(step: GraphStep) -> BatchAxis | None:
    """Of every entry of the first axis by itself; the other arguments are weights."""
    return step.moved(0) if step.at == 0 and step.axis.index == 0 else None


def _in_rows(step: GraphStep) -> BatchAxis | None:
    """Of every row by itself; the other arguments are weights."""
    return step.moved(step.axis.index) if step.at == 0 and step.axis.index < len(step.result) - 1 else None


def _weighted(step: GraphStep) -> BatchAxis | None:
    """Of every number by itself; the other arguments are weights."""
    return step.moved(step.axis.index) if step.at == 0 and step.argument == step.result else None


def _standardized(step: GraphStep) -> BatchAxis | None:
    """With statistics that the batch has no part in."""
    return None if argument(step.node, "training", default=True) else _weighted(step)


def _normalized(step: GraphStep) -> BatchAxis | None:
    free = len(step.result) - len(argument(step.node, "normalized_shape"))
    return step.moved(step.axis.index) if step.at == 0 and step.axis.index < free else None


def _padded(step: GraphStep) -> BatchAxis | None:
    """Padding by 1 and −1 keeps the length, and moves every entry."""
    pad = argument(step.node, "pad")
    along_batch = pad[2 * (len(step.result) - 1 - step.axis.index) :][:2]
    return step.moved(step.axis.index) if not any(along_batch) else None


def _attended(step: GraphStep) -> BatchAxis | None:
    """q, k, v [*batch t d] and a mask: the batch axes are those of the result."""
    same = len(step.argument) == len(step.result)
    return step.moved(step.axis.index) if same and step.axis.index < len(step.result) - 2 else None


def _multiplied(step: GraphStep) -> BatchAxis | None:
    """[*batch i j] times [*batch j k]: examples on i are those of the first, on k those of the second."""
    return _product(step, step.at)


def _multiplied_and_added(step: GraphStep) -> BatchAxis | None:
    return _aligned(step) if step.at == 0 else _product(step, step.at - 1)


def _product(step: GraphStep, factor: int) -> BatchAxis | None:
    row = len(step.result) - 2
    if step.axis.index < row or step.axis.index == row + factor:
        return step.moved(step.axis.index)
    return None


def _permuted(step: GraphStep) -> BatchAxis | None:
    return step.moved(_signed(argument(step.node, "dims")[step.axis.index]) % len(step.result))


def _transposed(step: GraphStep) -> BatchAxis | None:
    d = len(step.result)
    dims = [_signed(argument(step.node, key, default=at)) % d for at, key in enumerate(("dim0", "dim1"))]
    at = step.axis.index
    return step.moved(dims[1 - dims.index(at)] if at in dims else at) if d > 1 else step.moved(at)


def _along(step: GraphStep) -> BatchAxis | None:
    """Along other axes, which stay."""
    return None if step.axis.index in _axes(step.node, len(step.result)) else step.moved(step.axis.index)


def _cut(step: GraphStep) -> BatchAxis | None:
    """A part of the argument, or one of the parts of the result: all of it, on the axis of the examples."""
    same = len(step.argument) == len(step.result)
    return step.moved(step.axis.index) if same else None


def _reduced(step: GraphStep) -> BatchAxis | None:
    axes = _axes(step.node, len(step.argument))
    if len(step.result) == len(step.argument):
        axes_left = list(range(len(step.argument)))
    else:
        axes_left = [axis for axis in range(len(step.argument)) if axis not in axes]
    index = axes_left[step.axis.index] if len(axes_left) == len(step.result) else None
    return None if index in axes else step.moved(index)


def _selected(step: GraphStep) -> BatchAxis | None:
    (dim,) = _axes(step.node, len(step.argument))
    return step.moved(step.axis.index + (step.axis.index >= dim))


def _stacked(step: GraphStep) -> BatchAxis | None:
    (dim,) = _axes(step.node, len(step.result))
    return None if step.axis.index == dim else step.moved(step.axis.index - (step.axis.index > dim))


def _axes(node: Any, d: int) -> set[int]:
    """The axes that an operation works along, counted from the front; all where it does not say."""
    dims = argument(node, "dim", "dims")
    flat = tuple(dims) if isinstance(dims, (tuple, list)) else () if dims is None else (dims,)
    return {_signed(axis) % d for axis in flat} or set(range(d))


def _signed(axis: int) -> int:
    """Saved axes are unsigned: −1 comes as 2⁶⁴ − 1."""
    return axis - 2**64 if axis >= 2**63 else axis


def _named(follow: Follow, *names: str) -> dict[str, Follow]:
    return {f"{name}Backward{version}": follow for name in names for version in range(4)}


_FOLLOWED: dict[str, Follow] = (
    _named(  # functions of every number by itself, or of the numbers of several tensors at the same place
        _aligned,
        *("Add", "Sub", "Rsub", "Mul", "Div", "Neg", "Pow", "Exp", "Log", "Log1P", "Sqrt", "Rsqrt", "Reciprocal"),
        *("Sin", "Cos", "Abs", "Erf", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Where", "MaskedFill"),
        *("Relu", "LeakyRelu", "Threshold", "Elu", "Gelu", "Silu", "Mish", "Tanh", "Sigmoid", "Softplus", "Lerp"),
        *("Hardtanh", "Hardswish", "Hardsigmoid", "Celu", "Selu", "ToCopy", "Clone", "Alias", "NativeDropout"),
        *("LogSigmoid", "Square", "Addcmul", "Addcdiv", "Expand", "Repeat", "Expm1", "Sign"),
    )
    | {"ForkBackward": _aligned, "ActivatedLayerBackward": _in_rows}
    | _named(_reshaped, "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "Flatten", "Reshape")
    | _named(
        _first,
        *("NativeGroupNorm", "Convolution", "ConvolutionOverrideable", "MkldnnConvolution", "CudnnConvolution"),
        *("MaxPool1DWithIndices", "MaxPool2DWithIndices", "MaxPool3DWithIndices", "AvgPool1D", "AvgPool2D"),
        *("AvgPool3D", "AdaptiveAvgPool2D", "AdaptiveAvgPool3D", "AdaptiveMaxPool2D", "MkldnnAdaptiveAvgPool2D"),
        *("ReflectionPad1D", "ReflectionPad2D", "ReplicationPad1D", "ReplicationPad2D", "UpsampleNearest2D"),
        *("UpsampleBilinear2D", "MiopenConvolution", "Im2Col"),
    )
    | _named(_weighted, "Prelu")
    | _named(_standardized, "NativeBatchNorm", "CudnnBatchNorm", "MiopenBatchNorm")
    | _named(_normalized, "NativeLayerNorm", "FusedRmsNorm")
    | _named(_padded, "ConstantPadNd")
    | _named(
        _attended,
        *("ScaledDotProductFlashAttention", "ScaledDotProductFlashAttentionForCpu", "ScaledDotProductCudnnAttention"),
        *("ScaledDotProductEfficientAttention", "ScaledDotProductFusedAttentionOverrideable"),
    )
    | _named(_multiplied, "Bmm", "Mm")
    | _named(_multiplied_and_added, "Baddbmm", "Addmm")
    | _named(_permuted, "Permute")
    | _named(_transposed, "Transpose", "T")
    | _named(_along, "Softmax", "LogSoftmax", "SafeSoftmax", "Cumsum", "Flip", "Roll", "Glu", "SoftmaxBackwardData")
    | _named(_cut, "Slice", "Narrow", "Cat", "Split", "SplitWithSizes", "Chunk")
    | _named(_reduced, "Sum", "Mean", "Logsumexp", "Amax", "Amin", "Max", "Min", "Var", "Std", "VarMean", "Prod")
    | _named(_reduced, "LinalgVectorNorm")
    | _named(_selected, "Select", "Unbind")
    | _named(_stacked, "Stack")
)
