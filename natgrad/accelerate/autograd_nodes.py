"""Private attributes of autograd nodes, tensors and modules' hooks, read under plain names."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

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
    ('ViewBackward0', 'ReluBackward0')
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


def put_forward_hook(module: nn.Module, number: int, hook: Callable[..., Any], *, first: bool) -> None:
    """Add a forward hook with keyword arguments under the id of a handle; ``first``: before all others."""
    module._forward_hooks[number] = hook
    module._forward_hooks_with_kwargs[number] = True
    if first and len(module._forward_hooks) > 1:
        module._forward_hooks.move_to_end(number, last=False)  # type: ignore[attr-defined]


def remove_forward_hook(module: nn.Module, number: int) -> None:
    """Remove that hook, if it is there."""
    module._forward_hooks.pop(number, None)
    module._forward_hooks_with_kwargs.pop(number, None)
