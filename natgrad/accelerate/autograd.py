"""Autograd from inside: walks over its graph, private attributes of nodes, tensors and hooks under plain names,
backward passes of several cotangents, and the operations that torch dispatches, seen as they run.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode

from natgrad.accelerate.moments import single

_nodes: Any = torch._C._functions  # the types of nodes, which torch's stubs do not list
LEAF = _nodes.AccumulateGrad
TRANSPOSES_AND_CASTS = frozenset({_nodes.TBackward0, _nodes.TransposeBackward0, _nodes.ToCopyBackward0})
UNTYPED = "CppFunction"  # the type of all nodes that have no type of their own

VIEWS = (  # how the names of nodes begin whose outputs share the memory of their argument, or may do so
    *("Expand", "View", "UnsafeView", "ReshapeAlias", "Slice", "Select", "Permute", "Transpose", "TBackward"),
    *("Unsqueeze", "Squeeze", "Alias"),
)
WRITTEN_VIEW = "torch::autograd::CopySlices"  # an operation in place on a view; its first argument is what was viewed

# Arguments of an operation that are numbers: the axes that it works along, and whether it uses batch statistics.
_AXES = frozenset(
    f"_saved_{name}"
    for name in (
        *("dim", "dims", "dim0", "dim1", "dim2", "dimension", "keepdim", "normalized_shape", "pad", "training"),
        *("shifts", "repeats", "offset", "diagonal"),
    )
)
# And those that say which entries of its argument it takes.
_PLACES = frozenset(
    f"_saved_{name}" for name in ("start", "end", "step", "split_size", "split_sizes", "stride", "storage_offset")
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


def output_shape(node: Any, output: int = 0) -> tuple[int, ...]:
    """The shape of an output of a node.

    >>> output_shape((torch.ones(2, 3, requires_grad=True) * 2).grad_fn)
    (2, 3)
    """
    return tuple(node._input_metadata[output].shape)


def output_shapes(nodes: Sequence[Any], outputs: Iterable[tuple[int, int]]) -> list[tuple[int, ...]]:
    """The shapes of outputs, each of the number of a node and its own: one call for a graph, in every estimate."""
    return [tuple(nodes[at]._input_metadata[number].shape) for at, number in outputs]


def axis_arguments(nodes: Iterable[Any]) -> list[object]:
    """The axes that operations work along, as their nodes saved them, and other switches."""
    return [getattr(node, key) for node in nodes for key in _keys(type(node))[0]]  # type: ignore[arg-type]


def place_arguments(nodes: Iterable[Any]) -> list[tuple[int, ...]]:
    """The places that nodes saved, of those that take some entries. No tensors, which may be freed."""
    saved = [getattr(node, key) for node in nodes for key in _keys(type(node))[1]]  # type: ignore[arg-type]
    return [tuple(value) if isinstance(value, (tuple, list)) else (value,) for value in saved]


@cache
def _keys(kind: type) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """There are few types of nodes, and every estimate asks."""
    saved = vars(kind)
    places = () if kind.__name__.startswith("Lerp") else _PLACES.intersection(saved)  # whose end is a tensor
    return tuple(sorted(_AXES.intersection(saved))), tuple(sorted(places))


def edge_of(output: Tensor) -> GradientEdge:
    """``get_gradient_edge``, faster for nodes of torch itself, which keep the graph alive as the edge must."""
    node: Any = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def not_viewed(output: Tensor) -> Tensor:
    """The same numbers in the same memory, not as a view: what is done to them in place then has its own node.

    >>> output = torch.nn.Linear(2, 2)(torch.ones(1, 3, 2))
    >>> output.grad_fn.name(), not_viewed(output).relu_().grad_fn.name()
    ('...ViewBackward0', 'ReluBackward0')
    """
    return torch.ops.aten._unsafe_view(output, output.shape) if output._is_view() else output


def computes_gradient(leaves: Iterable[Tensor]) -> bool:
    """Whether the backward pass that is running computes the gradient of one of these leaves.

    >>> x, p = torch.ones(1, requires_grad=True), torch.ones(1, requires_grad=True)
    >>> y = x * p
    >>> _ = y.register_hook(lambda g: print(computes_gradient([p])))
    >>> _ = torch.autograd.grad(y, x, retain_graph=True)
    False
    >>> _ = torch.autograd.grad(y, p, retain_graph=True)
    True
    >>> y.backward()
    True
    """
    return any(leaf.requires_grad and _is_asked_for(get_gradient_edge(leaf).node) for leaf in leaves)


def _is_asked_for(leaf: Any) -> bool:
    try:
        return bool(torch._C._will_engine_execute_node(leaf))
    except RuntimeError:  # ``torch.autograd.grad`` is asked for this leaf, and will not accumulate its gradient
        return True


def divert(node: Any, instead: Callable[..., tuple[Tensor | None, ...] | None]) -> None:
    """The backward pass of this node, of a Python function, is ``instead``, and where that returns None its own.

    A hook could not keep it from running: it is given zeros where nothing comes to it.

    >>> class Double(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return 2 * x
    ...     @staticmethod
    ...     def backward(ctx, g):
    ...         return 2 * g
    >>> x = torch.ones(1, requires_grad=True)
    >>> y = Double.apply(x)
    >>> divert(y.grad_fn, lambda node, g: (5 * g,))
    >>> torch.autograd.grad(y, x)
    (tensor([5.]),)
    """
    function = node._forward_cls

    def backward(ctx: Any, *grads: Tensor) -> Any:
        result = instead(ctx, *grads)
        return function.backward(ctx, *grads) if result is None else result

    node._forward_cls = SimpleNamespace(backward=backward, vjp=function.vjp)


def frees(node: Any) -> bool:
    """Whether the backward pass that is running goes through a node, and frees what the graph below it has saved.

    >>> x = torch.ones(1, requires_grad=True)
    >>> y = x.exp()
    >>> _ = y.register_hook(lambda g: print(frees(y.grad_fn)))
    >>> _ = torch.autograd.grad(y.sum(), y)
    False
    >>> _ = torch.autograd.grad(y.sum(), x, retain_graph=True)
    False
    >>> _ = torch.autograd.grad(y.sum(), x)
    True
    """
    if node is None or torch._C._autograd._get_current_graph_task_keep_graph():
        return False
    return any(_is_asked_for(below) for below, _ in node.next_functions if below is not None)


def version_of(t: Tensor) -> int:
    """How often a tensor was changed in place; 0 for an inference tensor, which does not count."""
    return 0 if t.is_inference() else t._version


def is_view_of(t: Tensor, base: Tensor) -> bool:
    """Whether a tensor is another one, or a view of it."""
    return t is base or t._base is base


@contextmanager
def without_hooks(leaves: Sequence[Tensor]) -> Iterator[None]:
    """Inside, ``leaf.register_hook`` has no effect: a hook that masks or clips a gradient is not for a metric.

    >>> p = torch.ones(1, requires_grad=True)
    >>> _ = p.register_hook(lambda g: 0 * g)
    >>> with without_hooks([p]):
    ...     torch.autograd.grad(3 * p, p)
    (tensor([3.]),)
    """
    hooks = [p._backward_hooks for p in leaves if p._backward_hooks]
    saved = [dict(each) for each in hooks]
    for each in hooks:
        each.clear()
    try:
        yield
    finally:
        for each, back in zip(hooks, saved, strict=True):
            each.update(back)


def put_forward_hook(module: nn.Module, number: int, hook: Callable[..., Any]) -> None:
    """Add a forward hook with keyword arguments under the id of a handle, before all others."""
    module._forward_hooks[number] = hook
    module._forward_hooks_with_kwargs[number] = True
    if len(module._forward_hooks) > 1:
        module._forward_hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]


def remove_forward_hook(module: nn.Module, number: int) -> None:
    """Remove that hook, if it is there."""
    module._forward_hooks.pop(number, None)
    module._forward_hooks_with_kwargs.pop(number, None)


_log = logging.getLogger("natgrad")


def vjp(ys: tuple[Tensor, ...], at: Sequence[Any], cotangents: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    """Jᵀ of cotangents [k *shape of y], [k *shape] at tensors or edges of the graph of ys; None where nothing arrives.

    >>> x = torch.ones(2, requires_grad=True)
    >>> vjp((3 * x,), [x], (torch.tensor([[1.0, 0.0], [0.0, 2.0]]),))
    (tensor([[3., 0.],
            [0., 6.]]),)
    """
    if cotangents[0].shape[0] > 1:
        try:
            return _grad(ys, at, cotangents, batched=True)
        except RuntimeError as error:  # a genuine mistake is raised again below
            _log.info("a kernel takes one cotangent at a time (%s): one backward pass each", error)
    # One column needs no vmap, whose overhead would show beside a single backward pass.
    columns = [_grad(ys, at, tuple(g[k] for g in cotangents)) for k in range(cotangents[0].shape[0])]
    if len(columns) == 1:
        return tuple([None if g is None else g.unsqueeze(0) for g in columns[0]])
    return tuple(None if gs[0] is None else torch.stack(list(gs)) for gs in zip(*columns, strict=True))


def _grad(
    ys: tuple[Tensor, ...], at: Sequence[Any], cotangents: tuple[Tensor, ...], batched: bool = False
) -> tuple[Tensor | None, ...]:
    # For a GPU torch runs the backward pass in another thread. Switching to it, and back for every hook, takes longer
    # than launching many kernels.
    with torch.autograd.set_multithreading_enabled(False):
        grads: tuple[Tensor | None, ...] = torch.autograd.grad(
            ys, at, cotangents, retain_graph=True, allow_unused=True, is_grads_batched=batched
        )
    return grads


def pull(y: Tensor, at: Tensor, u: Tensor) -> Tensor:
    """Jᵀu at a leaf of a small graph, which stays, without the checks of ``torch.autograd.grad``: a third of its time.

    >>> x = torch.ones(2, requires_grad=True)
    >>> pull(3 * x, x, torch.tensor([1.0, 2.0]))
    tensor([3., 6.])
    """
    engine: Any = torch.autograd.Variable._execution_engine
    (grad,) = engine.run_backward((y,), (u,), True, False, (at,), True, accumulate_grad=False)
    return torch.zeros_like(at) if grad is None else grad


_ROOM = 2**26  # bytes


def waiting_bytes(device: torch.device, total: int) -> int:
    """How many bytes of cotangents, of a ``total``, may wait for others, so that their kernels are launched together.

    >>> waiting_bytes(torch.device("cpu"), 2**30)
    0
    """
    return max(_ROOM, total // 3) if device.type == "cuda" else 0


# Cotangents through a graph in half precision: scaled into its range before the pass, and back after it.
#
# float16 has no number below 6·10⁻⁸, and few digits below 6·10⁻⁵. The cotangents s/√N of a large batch, times the small
# Jacobians of a deep network, are there. A power of two changes no digit, so the metric does not depend on it, nor on
# the scale of a ``GradScaler``, which the loss has and the metric never sees.


_LARGEST = 6  # the largest number of a root is brought to 2⁵ … 2⁶: Jacobians up to 10³ do not overflow


def pulled(y: Tensor, at: Sequence[Any], s: Tensor, half: bool) -> tuple[Tensor | None, ...]:
    """Cotangents [k *shape] at edges or leaves of the graph of y, for s [k n *out]: ``vjp``, without underflow.

    ``half``: whether some of them come in float16.

    >>> x = torch.full((1,), 2.0**-20, dtype=torch.float16, requires_grad=True)
    >>> y = x * 2.0**-10
    >>> edge = torch.autograd.graph.get_gradient_edge(x)
    >>> pulled(y, [edge], torch.full((1, 1), 2.0**-20), half=True)[0] == 2.0**-30
    tensor([[True]])
    """
    if not half:
        return vjp((y,), at, (s.to(y.dtype),))
    exponent = torch.frexp(s.abs().amax()).exponent
    scale = torch.ldexp(s.new_ones(()), _LARGEST - exponent)
    grads = vjp((y,), at, ((s * scale).to(y.dtype),))
    return tuple(None if g is None else single(g) / scale for g in grads)


class OperationMode(TorchDispatchMode, ABC):
    """While it is entered, ``see`` is called for every operation, below autograd, in place of the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """As ``with`` does, for those who begin in one hook and end in another."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        return self.see(name, func, args, kwargs or {})

    @abstractmethod
    def see(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``run(*args, **kwargs)`` does; ``name`` is that of aten, in place ones with their underscore."""


def operations_are_seen() -> bool:
    """Whether a mode, ours or another, looks at the operations that run now."""
    return _get_current_dispatch_mode() is not None


def storage(t: Tensor) -> int:
    """The address of the memory of a tensor, which its views share; 0 where it has none."""
    if t.layout is not torch.strided or t._is_zerotensor():  # forward-mode derivatives make zeros without memory
        return 0
    return t.untyped_storage().data_ptr()


def base(t: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, for autograd."""
    return t._base
