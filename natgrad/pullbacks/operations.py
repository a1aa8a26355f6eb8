"""Uses of parameters, found by what is computed: every operation that reads a parameter together with data is one.

A dispatch mode (``OperationRecorder``) sees linear, matmul, einsum, attention and cells come apart into some twenty
aten operations, in whatever module or function they are. It follows two things, and needs no name of an autograd node:

* *data*: the memory that depends on the inputs of the pass. What requires a gradient and is not data is an *operand*: a
  parameter or a function of parameters (transposed, sliced, cast, expanded, weight-normed, a merged LoRA). An operation
  on both is a use.
* *edges*: below autograd an output has no ``grad_fn`` yet. It has one when the next operation comes, and is read then,
  before an in-place operation can change it. Cotangents of all uses are one ``torch.autograd.grad(y, edges, s)``.

``missed`` walks the graph from y, but not along edges that a use has claimed: a parameter it comes to has a use that no
form speaks for (a custom Function, a fused LSTM, an unknown operation).

Every use is z = W a + b with rows r of a [r c i] and groups c with weights of their own, or entry by entry, z = w ⊙ a.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from math import prod
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional as F

from natgrad.accelerate.autograd import VIEWS, OperationMode, base, leaf_below, nodes, storage, version_of
from natgrad.accelerate.patches import Axis, patches
from natgrad.errors import NatgradError

Roles: TypeAlias = tuple[str, ...]  # what every axis of an operand is: "c", "o", "i", two of them, or "" if expanded
Map: TypeAlias = Callable[[Tensor], Tensor]


# Operands: where a tensor that an operation read has its numbers from.


@final
@dataclass(frozen=True)
class Copy:
    """Memory that is a copy of other memory: a cast under autocast, a weight that einsum permuted and laid out anew."""

    shape: torch.Size
    stride: tuple[int, ...]  # of the copy
    start: int
    source_stride: tuple[int, ...]
    source_start: int

    def source(self, at: Tensor) -> Tensor:
        """Where in the source memory the numbers at these places of the copy are from."""
        index = unravel(at - self.start, self.shape, self.stride)
        return self.source_start + sum(
            (i * s for i, s in zip(index, self.source_stride, strict=True)), at.new_zeros(())
        )


def unravel(at: Tensor, shape: Sequence[int], stride: Sequence[int]) -> list[Tensor]:
    """The index, axis by axis, of places in the memory of a dense tensor.

    >>> unravel(torch.tensor([0, 1, 4]), (2, 3), (3, 1))
    [tensor([0, 0, 1]), tensor([0, 1, 1])]
    """
    index = [torch.zeros_like(at) for _ in shape]
    for axis in sorted(range(len(shape)), key=lambda axis: -stride[axis]):
        if shape[axis] > 1 and stride[axis] > 0:
            index[axis] = at // stride[axis]
            at = at % stride[axis]
    return index


def _memory_of(t: Tensor) -> int:
    """Where the numbers of a tensor are; of a cast that an earlier pass made, and autocast kept, those of its leaf.

    A cast of a dense tensor has the layout of that tensor.
    """
    leaf = None if t.is_leaf else leaf_below(t.grad_fn)
    if leaf is None or leaf.dtype == t.dtype or not leaf.is_contiguous() or leaf.storage_offset():
        return storage(t)
    return storage(leaf)


@final
class Operand:
    """A parameter, or a function of parameters, as an operation read it."""

    storage: int

    def __init__(self, t: Tensor, copies: Mapping[int, tuple[int, tuple[Copy, ...]]]) -> None:
        # At once: an in-place operation changes it.
        self.at: Tensor | GradientEdge = t if t.is_leaf else get_gradient_edge(t)
        self.storage, self._copies = copies.get(storage(t), (_memory_of(t), ()))
        self.shape: torch.Size = t.shape
        self.dtype: torch.dtype = t.dtype
        self._stride, self._start = t.stride(), int(t.storage_offset())
        # 1 where it was expanded.
        self.unexpanded: tuple[int, ...] = tuple(
            1 if step == 0 else size for size, step in zip(t.shape, t.stride(), strict=True)
        )

    @property
    def edge(self) -> GradientEdge:
        return get_gradient_edge(self.at) if isinstance(self.at, Tensor) else self.at

    def locate(self, p: Tensor) -> tuple[Tensor, list[Tensor]] | None:
        """Where in p its first number is, and, for every axis, all numbers along it: indices [ndim] and [size ndim].

        None if it is no view of p, nor a copy of one.
        """
        if self.storage != storage(p) or p.layout is not torch.strided:
            return None
        start = torch.tensor(self._start)
        axes = [start + step * torch.arange(size) for size, step in zip(self.unexpanded, self._stride, strict=True)]
        result = [self._index(axis, p) for axis in (start[None], *axes)]
        first = result[0][0]
        if not self._separate(p, first, result[1:]):
            return None
        return first, result[1:]

    def _index(self, at: Tensor, p: Tensor) -> Tensor:
        for copied in self._copies:
            at = copied.source(at)
        return torch.stack([*unravel(at - int(p.storage_offset()), p.shape, p.stride()), at * 0], dim=-1)[..., :-1]

    def _separate(self, p: Tensor, first: Tensor, axes: Sequence[Tensor]) -> bool:
        """Whether the index of a number is the sum of those along the axes, looked at for some numbers."""
        generator = torch.Generator().manual_seed(0)
        which = [torch.randint(max(size, 1), (32,), generator=generator) for size in self.unexpanded]
        at = self._start + sum((i * s for i, s in zip(which, self._stride, strict=True)), torch.zeros(32).long())
        expected = first + sum(
            (axis[i] - first for i, axis in zip(which, axes, strict=True)), torch.zeros(32, 1).long()
        )
        result = self._index(at, p)
        size = torch.tensor(p.shape)
        return torch.equal(result, expected) and bool(((result >= 0) & (result < size)).all())

    def repeats(self) -> int:
        """How often the stack along the first axis comes, in a copy of a parameter that was expanded: 1, where once."""
        if not self._copies or isinstance(self.at, Tensor):
            return 1
        if all(storage(node.variable) != self.storage for node in nodes([self.at.node]) if hasattr(node, "variable")):
            return 1  # a copy of a function of parameters
        at = self._start + self._stride[0] * torch.arange(self.shape[0])
        for copied in self._copies:
            at = copied.source(at)
        once = at[: len(torch.unique(at))]
        times = max(1, len(at) // max(1, len(once)))
        return times if torch.equal(at, once.repeat(times)) else 1

    def once(self, times: int) -> Operand:
        """The stack that comes so many times."""
        result, size = copy.copy(self), self.shape[0] // times
        result.shape, result.unexpanded = torch.Size((size, *self.shape[1:])), (size, *self.unexpanded[1:])
        return result

    @cached_property
    def leaves(self) -> frozenset[int]:
        """The ids of the parameters that it depends on."""
        if isinstance(self.at, Tensor):
            return frozenset([id(self.at)])
        return frozenset(id(node.variable) for node in nodes([self.at.node]) if hasattr(node, "variable"))

    def place(self, leaves: Mapping[str, Tensor], names: Mapping[int, str]) -> Hashable:
        """What ``locate`` depends on, the same in every pass; ``names``: of the parameters, by their ids."""
        own = sorted(names[leaf] for leaf in self.leaves if leaf in names)
        starts = [
            (name, self._start - int(leaves[name].storage_offset()), self.storage == storage(leaves[name]))
            for name in own
        ]
        return (*starts, self.shape, self._stride, self._copies)


# Uses.


def _same(t: Tensor) -> Tensor:
    return t


@final
@dataclass(eq=False)
class Operation:
    """An operation z = W a + b on rows a [r c i], or, if ``entrywise``, z = w ⊙ a with a [r e 1] for e entries of w.

    ``read``: a, without the 1 of a bias. ``write``: from a cotangent of the output to g [r c o].
    """

    name: str
    write: Map
    read: Callable[[], Tensor] | None = None  # None: ones
    weight: Operand | None = None
    roles: Roles = ()  # of the axes of the weight
    bias: Operand | None = None
    bias_roles: Roles = ()
    scale: float = 1.0  # of the bias
    entrywise: bool = False
    groups: int = 1  # c, where an axis of the weight has two roles
    index: Tensor | None = None  # [r] of a lookup: a is one-hot there, or zero where the row has no member
    members: Callable[[], Tensor] | None = None  # [r c], one where a row belongs to a group; None: to all
    axes: tuple[Axis, ...] = ()  # of a convolution: what its positions read of the images ``data``
    outer: tuple[Axis, ...] = ()  # and what they read of the cotangents, of which only a ``crop`` is read
    crop: Map = _same
    data: Tensor | None = None  # what a is made of
    version: int = 0
    edge: GradientEdge | None = None
    shape: tuple[int, ...] = ()
    half: bool = False  # whether the output is in float16
    extends: Operation | None = None  # a hint: this bias is added to what that product wrote
    claims: list[tuple[Any, Operand]] = field(default_factory=list)  # nodes and the operands that they read

    @property
    def operands(self) -> list[Operand]:
        return [operand for operand in (self.weight, self.bias) if operand is not None]

    @property
    def expanded(self) -> bool:
        """Whether a parameter was expanded along an axis that is one of groups, outputs or inputs."""
        for operand, roles in ((self.weight, self.roles), (self.bias, self.bias_roles)):
            if operand is not None and roles:  # entries have no roles
                axes = zip(roles, operand.shape, operand.unexpanded, strict=True)
                if any(role and size != single for role, size, single in axes):
                    return True
        return False

    def place(self, leaves: Mapping[str, Tensor], names: Mapping[int, str]) -> Hashable:
        """The key of the layer that it is a use of, the same in every pass."""
        what = (
            self.name,
            self.roles,
            self.bias_roles,
            self.scale,
            self.groups,
            self.index is None,
            self.axes,
            self.outer,
        )
        return (*what, *((operand is self.bias, operand.place(leaves, names)) for operand in self.operands))

    def inputs(self) -> Tensor:
        """a [r c i], detached, as it was when the operation ran."""
        if self.read is None:
            raise NatgradError(f"an offset ({self.name}) has no inputs")  # never asked for
        self._check_data()
        return self.read().detach()

    def images(self) -> Tensor:
        """The images [n ch *spatial] that a convolution reads, detached."""
        assert self.data is not None
        self._check_data()
        return self.data.detach()

    def _check_data(self) -> None:
        if self.data is not None and version_of(self.data) != self.version:
            raise NatgradError(
                f"the input of the operation {self.name} was changed in place after its use: write a copy instead, "
                "x = x.clone(), before the operation that changes it"
            )

    def cotangents(self, g: Tensor) -> Tensor:
        """g [k r c o] from cotangents [k *output]."""
        if g.shape[0] == 1:
            return self.write(g[0]).unsqueeze(0)
        try:
            result: Tensor = torch.func.vmap(self.write)(g)
        except RuntimeError:  # a view that vmap cannot follow
            result = torch.stack([self.write(column) for column in g])
        return result


def _flat(t: Tensor) -> Tensor:
    return t.reshape(-1, 1, t.shape[-1])


def _last(t: Tensor) -> Tensor:
    return t.movedim(1, -1)


Find: TypeAlias = Callable[[Any], Operand | None]  # the operand that an argument is, if it is one
Form: TypeAlias = Callable[..., Operation | Sequence[Operation] | None]


def _product(p: Find, x: Tensor, y: Tensor, b: Any = None, beta: float = 1, alpha: float = 1) -> Operation | None:
    """x y + b, of matrices or of stacks [c r i] [c i o]; the stack is rows where one matrix was expanded to it.

    So are the repetitions of a stack that was expanded, as matmul does: [n 1 r i] [c i o] is a product of n·c matrices.
    """
    flip = p(x) is not None
    weight, data, bias = (p(x), y, p(b)) if flip else (p(y), x, p(b))
    shared = weight is not None and len(weight.shape) == 3 and weight.unexpanded[0] == 1
    c = 1 if shared or x.ndim != 3 else len(x)
    o = y.shape[-1] if y.ndim > 1 else 1
    if (flip and (p(y) or bias)) or (bias is not None and prod(bias.unexpanded) not in (1, o * c)):
        return None
    if bias is not None and prod(bias.unexpanded) == 1 != o * c:  # one number for all outputs: no bias of a product
        return None
    times = 1 if weight is None or bias is not None or c == 1 else weight.repeats()
    weight = weight if weight is None or times == 1 else weight.once(times)

    def turn(t: Tensor) -> Tensor:  # W x is xᵀ Wᵀ
        stack = t if t.ndim == 3 else t[None] if t.ndim == 2 else t[None, :, None]
        return stack.mT if flip else stack

    def rows(t: Tensor) -> Tensor:
        if shared or t.ndim < 3:
            return _flat(turn(t))
        return turn(t).unflatten(0, (times, -1)).transpose(1, 2).flatten(0, 1)

    def output(g: Tensor) -> Tensor:
        if y.ndim > 1:
            return rows(g)
        return g.reshape(1, 1, -1) if flip else g.reshape(-1, 1, 1)  # one row of W x, or one output a row of X w

    def inputs() -> Tensor:
        a = data.reshape(1, 1, -1) if data.ndim == 1 else rows(data)
        return a if alpha == 1 else alpha * a

    names = {1: ("i",), 2: ("i", "o"), 3: ("" if shared else "c", "i", "o")}
    roles: Roles = () if weight is None else names[len(weight.shape)]
    if flip:
        roles = tuple({"i": "o", "o": "i"}.get(role, role) for role in roles)
    bias_roles = () if bias is None else _bias_roles(bias, c)
    return Operation("product", output, inputs, weight, roles, bias, bias_roles, beta, data=data)


def _bias_roles(bias: Operand, c: int) -> Roles:
    """Of a bias [o], [1 o] or [c 1 o], which is added along the last axis."""
    roles = [""] * len(bias.shape)
    roles[-1] = "o"
    if c > 1:
        roles[0] = "c"
    return tuple(roles)


def _grouped(p: Find, x: Tensor, w: Tensor, offs: Any = None, *_: Any) -> Operation | None:
    """Rows sorted by expert, of which expert e has those up to ``offs[e]``."""
    if x.ndim != 2 or w.ndim != 3 or p(x) or p(w) is None or offs is None:
        return None

    def rows(t: Tensor) -> Tensor:
        group = torch.bucketize(torch.arange(len(t), device=t.device, dtype=offs.dtype), offs, right=True)
        return (group[:, None] == torch.arange(len(offs), device=t.device)).to(t.dtype)[..., None] * t[:, None]

    result = Operation("product", rows, lambda: rows(x), p(w), ("c", "i", "o"), data=x)
    result.members = lambda: rows(x.new_ones(len(x), 1))[..., 0]
    return result


def _entries(
    p: Find, lay: Map, read: Callable[[], Tensor] | None, w: Any, data: Tensor, name: str, scale: float = 1.0
) -> Operation:
    """Every entry of the operand w by itself. ``lay``: brings a tensor like the output to axes (*rows, *operand)."""
    operand = p(w)
    assert operand is not None
    sizes = operand.unexpanded

    def rows(t: Tensor) -> Tensor:
        t = lay(t)
        axes_of_operand = [t.ndim - len(sizes) + i for i, size in enumerate(sizes) if size != 1]
        return t.permute([i for i in range(t.ndim) if i not in axes_of_operand] + axes_of_operand).reshape(
            -1, prod(sizes), 1
        )

    a = None if read is None else (lambda: rows(read()))
    return Operation(name, rows, a, operand, entrywise=True, data=data if read is not None else None, scale=scale)


def _binary(p: Find, gain: bool, x: Any, y: Any, scale: float = 1) -> Operation | None:
    """x y, or x + scale·y."""
    if not isinstance(y, Tensor) or not isinstance(x, Tensor) or (p(x) and p(y)):
        return None
    w, d, scale = (x, y, 1) if p(x) else (y, x, scale)
    shape = torch.broadcast_shapes(x.shape, y.shape)

    def lay(t: Tensor) -> Tensor:
        return t.expand(shape)

    if gain:
        return _entries(p, lay, lambda: d, w, d, "gain")
    result = _entries(p, lay, None, w, d, "offset", scale)
    result.data = d  # whose memory may be that of a product
    return result


def _entrywise(run: Callable[..., Tensor]) -> Form:
    """Any function of every entry by itself: the derivative by each of its operands, as autograd knows it."""

    def form(p: Find, *args: Any, **kwargs: Any) -> list[Operation]:
        shape = torch.broadcast_shapes(*(t.shape for t in (*args, *kwargs.values()) if isinstance(t, Tensor)))

        def slope(at: int) -> Tensor:
            whole = [t.detach().expand(shape) if isinstance(t, Tensor) else t for t in args]
            whole[at] = whole[at].clone().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(run(*whole, **kwargs).sum(), whole[at])[0]

        data = next(t for t in args if isinstance(t, Tensor) and not p(t))
        operands = [at for at, t in enumerate(args) if isinstance(t, Tensor) and p(t)]
        return [_entries(p, lambda t: t.expand(shape), partial(slope, at), args[at], data, "gain") for at in operands]

    return form


def _assigned(p: Find, x: Tensor, at: Sequence[Tensor | None], value: Tensor, *_: Any) -> Operation | None:
    """x[at] = value: a mask token."""
    if p(x) or any(t is not None and p(t) for t in at):
        return None
    index: list[Any] = []
    for t in at:
        mask = t is not None and t.dtype in (torch.bool, torch.uint8)
        index += [slice(None)] if t is None else t.nonzero().unbind(1) if mask else [t.clone()]
    return _entries(p, lambda g: g[tuple(index)], None, value, x, "value")


def _copied(p: Find, x: Tensor, value: Tensor, *_: Any) -> Operation | None:
    """x[:, 0] = value."""
    return None if p(x) else _entries(p, lambda g: g.expand(x.shape), None, value, x, "value")


def _trilinear(p: Find, x: Tensor, w: Tensor, y: Tensor, *axes: Any) -> Operation | None:
    """Σ_ij W_oij x_i y_j of nn.Bilinear: a product with the inputs x yᵀ."""
    if p(x) or p(y) or [list(each) for each in axes[:4]] != [[1, 3], [0], [1, 2], [2, 3]]:
        return None
    return Operation("product", _flat, lambda: _flat((x[:, :, None] * y[:, None]).flatten(1)), p(w), ("o", "i", "i"))


def _joined(p: Find, tensors: Sequence[Tensor], dim: int = 0) -> list[Operation]:
    """cat: a class token, or learned positions, beside the data."""
    result, start = [], 0
    for t in tensors:
        size = t.shape[dim] if t.ndim else 1
        if p(t):
            cut = lambda g, start=start, size=size: g.narrow(dim, start, size)  # noqa: E731
            result.append(_entries(p, cut, None, t, t, "offset"))
        start += size
    return result


def _convolution(
    p: Find, x: Any, w: Any, b: Any, stride: Any, pad: Any, dilation: Any, mirrored: bool, extra: Any, c: int
) -> Any:
    """Positions read patches of x; mirrored (transposed), they read x itself, and patches of the cotangents."""
    if p(x):
        return None
    k = w.ndim - 2
    sizes = list(zip(w.shape[2:], *(list(v) * (k // len(v)) for v in (stride, dilation, pad, extra)), strict=True))
    itself = (Axis(1),) * k

    def rows(t: Tensor, axes: Sequence[Axis]) -> Tensor:
        return patches(t, axes, c).flatten(0, 1)

    if not mirrored:
        axes = tuple(Axis(kernel, step, apart, before=side, after=side) for kernel, step, apart, side, _ in sizes)
        result = Operation("product", lambda g: rows(g, itself), lambda: rows(x, axes), p(w), bias=p(b), groups=c)
        result.roles = ("co", *["i"] * (w.ndim - 1)) if p(w) else ()
        result.bias_roles = ("co",) if p(b) else ()
        result.data, result.axes, result.outer = x, axes, itself
        return result
    axes = tuple(Axis(kernel, step, apart, side, max(side - more, 0)) for kernel, step, apart, side, more in sizes)

    def crop(g: Tensor) -> Tensor:
        """Without the outputs at the ends that output padding has added, and no input reaches."""
        for at, (*_, side, more) in enumerate(sizes, start=-k):
            g = g.narrow(at, 0, g.shape[at] - max(more - side, 0))
        return g

    of_bias = [_entries(p, _last, None, b, x, "offset")] if p(b) else []
    if p(w) is None:
        return of_bias
    roles = ("ci", *["o"] * (w.ndim - 1))
    result = Operation("product", lambda g: rows(crop(g), axes), lambda: rows(x, itself), p(w), roles, groups=c)
    result.data, result.axes, result.outer, result.crop = x, itself, axes, crop
    return [result, *of_bias]


def _lookup(p: Find, w: Tensor, index: Tensor, padding: int = -1, scaled: bool = False, *_: Any) -> Operation | None:
    if scaled or p(w) is None or w.ndim != 2:
        return None
    at = index.flatten() % len(w)  # a copy: the index may be overwritten
    valid = ((at != padding) if padding >= 0 else torch.ones_like(at, dtype=torch.bool))[:, None].to(w.dtype)
    d, size = w.shape[1], len(w)

    def one_hot() -> Tensor:
        return (F.one_hot(at, size) * valid)[:, None]

    result = Operation("lookup", lambda g: g.reshape(-1, 1, d), one_hot, p(w), ("i", "o"))
    result.index, result.members = at, lambda: valid
    return result


def _indexed(p: Find, w: Tensor, at: Sequence[Tensor | None]) -> Operation | None:
    """w[index] with an index from the data."""
    if p(w) is None or len(at) != 1 or at[0] is None or at[0].dtype not in (torch.int64, torch.int32):
        return None
    return _lookup(p, w, at[0])


def _normalised(p: Find, lay: Map, read: Callable[[], Tensor], w: Any, b: Any, x: Tensor) -> list[Operation]:
    result = [_entries(p, lay, read, w, x, "gain")] if p(w) else []
    return result + ([_entries(p, lay, None, b, x, "offset")] if p(b) else [])


def _batch_norm(
    p: Find, x: Any, w: Any, b: Any, mean: Any, var: Any, training: bool, _: Any, eps: float, *__: Any
) -> Any:
    mean, var = (None, None) if training else (mean.clone(), var.clone())
    return _normalised(p, _last, lambda: F.batch_norm(x, mean, var, training=training, eps=eps), w, b, x)


def _linear(p: Find, x: Tensor, w: Tensor, b: Any = None) -> Operation | None:
    """On devices where torch does not take it apart."""
    if p(x):
        return None
    bias_roles = ("o",) if p(b) else ()
    return Operation("product", _flat, lambda: _flat(x), p(w), ("o", "i") if p(w) else (), p(b), bias_roles, data=x)


FORMS: dict[str, Form] = {
    "mm": _product,
    "bmm": _product,
    "mv": _product,
    "dot": lambda p, x, y: _binary(p, True, x, y),
    "addmm": lambda p, b, x, y, **k: _product(p, x, y, b, **k),
    "baddbmm": lambda p, b, x, y, **k: _product(p, x, y, b, **k),
    "addmv": lambda p, b, x, y, **k: _product(p, x, y, **k) if not p(b) else None,
    "linear": _linear,
    "_grouped_mm": _grouped,
    "_trilinear": _trilinear,
    "convolution": _convolution,
    "embedding": _lookup,
    "index": _indexed,
    "cat": _joined,
    "add": lambda p, x, y, alpha=1: _binary(p, False, x, y, alpha),
    "sub": lambda p, x, y, alpha=1: _binary(p, False, x, y, -alpha),
    "mul": lambda p, x, y: _binary(p, True, x, y),
    "index_put": _assigned,
    "copy": _copied,
    **{
        name: _entrywise(getattr(torch, name))
        for name in ("div", "pow", "where", "lerp", "addcmul", "addcdiv", "maximum", "minimum")
    },
    "_prelu_kernel": lambda p, x, w: _entries(p, _same, lambda: x.clamp(max=0), w, x, "gain") if not p(x) else None,
    "native_layer_norm": lambda p, x, s, w, b, eps: _normalised(p, _same, lambda: F.layer_norm(x, s, eps=eps), w, b, x),
    "_fused_rms_norm": lambda p, x, s, w, eps: _normalised(p, _same, lambda: F.rms_norm(x, s, None, eps), w, None, x),
    "native_group_norm": lambda p, x, w, b, n, c, hw, k, e: _normalised(
        p, _last, lambda: F.group_norm(x, k, eps=e), w, b, x
    ),
    "native_batch_norm": _batch_norm,
    "cudnn_batch_norm": _batch_norm,
    "miopen_batch_norm": _batch_norm,
}
_COPIES = frozenset(("_to_copy", "clone"))
_PRODUCTS = frozenset(("mm", "addmm", "linear"))
_STATES = frozenset(("zeros", "ones", "full", "randn", "rand"))  # not positions (arange, linspace) or the identity


@final
class OperationRecorder(OperationMode):
    """Collects uses while it is entered. ``inputs``: the tensors whose descendants are data.

    So is a matrix of zeros, ones or noise that the pass makes, with a row for every example: the first state of a
    recurrence.
    """

    def __init__(self, inputs: Iterable[Tensor]) -> None:
        super().__init__()
        given = list(inputs)
        self._uses: list[Operation] = []
        self._data = {storage(t): True for t in given}
        # Among them the number of examples, and that of their positions where these are folded into the batch.
        self._sizes = {size for t in given for size in (*t.shape[:2], t.shape[:2].numel())}
        self._states: set[int] = set()  # memory
        self._copies: dict[int, tuple[int, tuple[Copy, ...]]] = {}
        self._pending: list[tuple[Operation, Tensor, Tensor | None]] = []
        self._products: dict[int, tuple[Operation, int]] = {}  # by the memory of the output, with its size

    def uses(self) -> list[Operation]:
        """All that was recorded, after the pass, in its order."""
        self._settle()
        return [use for use in self._uses if use.edge is not None]

    def is_data(self, t: Tensor) -> bool:
        """Whether a tensor depends on the inputs."""
        return self._data.get(storage(t), False)

    def see(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._settle()  # autograd is through with the operation before
        each = (t for a in (*args, *kwargs.values()) for t in (a if isinstance(a, (list, tuple)) else (a,)))
        given = {id(t): (t, storage(t)) for t in each if isinstance(t, Tensor)}
        operands = [t for t, at in given.values() if t.requires_grad and not self._data.get(at)]
        data = any(self._data.get(at) for _, at in given.values())
        if operands and not data and name in _PRODUCTS:
            states = [t for t, at in given.values() if at in self._states and not t.requires_grad]
            data = any(t.ndim == 2 and len(t) in self._sizes for t in states)
        uses = []
        real = not any(t.is_complex() for t, _ in given.values())  # cotangents of complex numbers are conjugates
        if data and operands and real and name.rstrip("_") in FORMS and torch.is_grad_enabled():
            uses = self._recognise(name, {id(t): Operand(t, self._copies) for t in operands}, args, kwargs)
        out = run(*args, **kwargs)
        outs = [t for t in (out if isinstance(out, (list, tuple)) else (out,)) if isinstance(t, Tensor)]
        for t in outs:
            self._written(name, t, data, given, args if operands else ())
        if uses:
            self._uses += uses
            view = base(outs[0]) if outs[0] is args[0] else None
            self._pending += [(use, outs[0], view) for use in uses]
            products = (use for use in uses if use.name == "product")
            self._products.update({storage(outs[0]): (use, outs[0].numel()) for use in products})
        return out

    def _written(
        self, name: str, t: Tensor, data: bool, given: Mapping[int, tuple[Tensor, int]], args: tuple[Any, ...]
    ) -> None:
        at = storage(t)
        self._data[at] = data
        if any(at == other for _, other in given.values()):
            if name.endswith("_"):
                self._copies.pop(at, None)  # written to: a copy no longer
            return
        self._states.add(at) if name in _STATES else self._states.discard(at)
        self._products.pop(at, None)  # new memory, or memory that is given out again
        self._copies.pop(at, None)
        if name in _COPIES and args and t.shape == args[0].shape and args[0].layout is torch.strided:
            source, chain = self._copies.get(storage(args[0]), (storage(args[0]), ()))
            copy = Copy(t.shape, t.stride(), int(t.storage_offset()), args[0].stride(), int(args[0].storage_offset()))
            self._copies[at] = source, (copy, *chain)

    def _recognise(self, name: str, operands: dict[int, Operand], args: Any, kwargs: Any) -> list[Operation]:
        overwritten = name in ("pow_", "lerp_", "addcmul_", "addcdiv_", "div_")
        if overwritten and id(args[0]) in operands:
            return []  # its derivative would be taken where it no longer is
        if (overwritten or name == "mul_") and id(args[0]) not in operands:
            args = (args[0].clone(), *args[1:])  # about to be overwritten: autograd keeps a copy, too
        try:
            result = FORMS[name.rstrip("_")](lambda t: operands.get(id(t)), *args, **kwargs)
        except Exception:  # arguments of another kind than the form knows: ``missed`` names the parameter
            return []
        uses = [
            use for use in (result if isinstance(result, Sequence) else [result]) if use is not None and use.operands
        ]
        if any(use.expanded for use in uses):
            return []  # one number at several places of a matrix
        for use in uses:
            if use.name == "offset" and use.data is not None and use.weight is not None:
                of, size = self._products.get(storage(use.data), (None, 0))
                row = max(use.weight.unexpanded, default=1) == prod(use.weight.unexpanded)
                use.extends = of if row and use.data.numel() == size and use.scale == 1 else None
            if use.read is None:
                use.data = None
            use.version = 0 if use.data is None else version_of(use.data)
        return uses

    def _settle(self) -> None:
        for use, out, whole in self._pending:
            # In place on a view, the node of the view is made anew each time: that of its base stays.
            if whole is not None and whole.is_contiguous():
                start = int(out.storage_offset()) - int(whole.storage_offset())
                use.write, out = _within(use.write, out.shape, out.stride(), start), whole
            use.shape, use.half = out.shape, out.dtype is torch.float16
            if out.grad_fn is not None:
                use.edge = get_gradient_edge(out)
                use.claims = [(use.edge.node, operand) for operand in use.operands]
        self._pending.clear()


def _within(write: Map, shape: Sequence[int], stride: Sequence[int], start: int) -> Map:
    return lambda g: write(g.contiguous().as_strided(shape, stride, start))


_TOP = "the output"


def missed(y: Tensor, uses: Iterable[Operation], params: Mapping[str, Tensor]) -> dict[str, str]:
    """Parameters with a use that was not recorded, and the node of the graph that leads to it."""
    claimed = {(node, *tuple(operand.edge)[:2]) for use in uses for node, operand in use.claims}
    names = {id(p): name for name, p in params.items()}
    result: dict[str, str] = {}
    visited: set[Any] = set()
    stack: list[tuple[Any, str]] = [(y.grad_fn, _TOP)]
    while stack:
        node, above = stack.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        name = names.get(id(getattr(node, "variable", None)))
        if name is not None:
            result[name] = above
        # A view on the way is not what reads the parameter.
        reader = above if node.name().startswith(VIEWS) and above != _TOP else node.name()
        stack += [(to, reader) for to, nr in node.next_functions if to and (node, to, nr) not in claimed]
    return result
