"""Edges of the autograd graph: where cotangents of a module's outputs, and of its input, are found."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from natgrad.model import map_tensors, tensors_of
from natgrad.pullback.graph import nodes


def edge_of(output: Tensor) -> GradientEdge:
    """As ``get_gradient_edge``, which takes longer: a node of torch's own keeps the graph alive, as the edge must."""
    node: Any = output.grad_fn
    if node is None or isinstance(node, torch._C._FunctionBase):
        return get_gradient_edge(output)
    return GradientEdge(node, output.output_nr)


def source_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> GradientEdge | None:
    """The edge of the first argument, if nothing else that is computed is given."""
    if not args or not isinstance(args[0], Tensor) or args[0].grad_fn is None:
        return None
    others = (t for t in tensors_of((args, dict(kwargs))) if t.grad_fn is not None)
    same = all(t.grad_fn is args[0].grad_fn and t.output_nr == args[0].output_nr for t in others)
    return edge_of(args[0]) if same else None


def apart(output: Any, given: Collection[Any]) -> Any:
    """The outputs of a module, with a node of its own for one that another was computed from.

    An LSTM cell returns c and h = o tanh c: the cotangent of c holds that of h, which the replay would add again.
    """
    tops = [t.grad_fn for t in tensors_of(output) if t.grad_fn is not None]
    if len(tops) < 2:
        return output
    below = set(nodes([child for top in tops for child, _ in top.next_functions], stop=given))
    if below.isdisjoint(tops):
        return output
    return map_tensors(output, lambda t: t.clone() if t.grad_fn in below else t)
