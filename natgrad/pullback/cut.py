"""Where a tensor without examples is spread over them, and the rows of the parameters that it comes from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from natgrad.pullback.axes import Axis
from natgrad.rules.precision import single

LEAF = "torch::autograd::AccumulateGrad"
# Of a tensor without examples these keep the order of the elements, and all of them.
SAME = frozenset(
    f"{name}Backward0" for name in ("View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze", "ToCopy", "Alias")
) | {"SqueezeBackward1"}


@final
@dataclass(frozen=True)
class Cut:
    """Where a tensor u without examples is spread over them: argument ``at`` of a node with n of them on an axis."""

    node: Any
    at: int
    n: int
    axis: Axis = field(default_factory=lambda: Axis(0))

    @property
    def below(self) -> Any:
        """The node that u comes from."""
        return self.node.next_functions[self.at][0]

    @property
    def u(self) -> torch.Size:
        """The shape of u."""
        child, output = self.node.next_functions[self.at]
        return _shape(child, output)

    @property
    def z(self) -> torch.Size:
        """The shape of what comes out."""
        return _shape(self.node, 0)

    @property
    def known(self) -> bool:
        """Whether the operation is one of those above, and u has no examples."""
        name, u, z = self.node.name(), self._aligned, self.z
        if len(u) != len(z) or u[self.axis.index] != 1 or not self.axis.fits(tuple(z), self.n):
            return False
        if name == "RepeatBackward0":
            return all(times == 1 for at, times in enumerate(self.node._saved_repeats) if at != self.axis.index)
        return name in ("AddBackward0", "SubBackward0", "MulBackward0", "ExpandBackward0")

    @property
    def _aligned(self) -> tuple[int, ...]:
        """The shape of u with as many axes as z has: broadcasting puts ones in front."""
        return (1,) * (len(self.z) - len(self.u)) + tuple(self.u)

    @property
    def added(self) -> bool:
        """Whether g ⊙ x is g itself."""
        name = self.node.name()
        return name != "MulBackward0" and (self.at == 0 or (name == "AddBackward0" and self.node._saved_alpha == 1))

    def weighted(self, g: Tensor) -> Tensor:
        """g ⊙ x [k *z]: the cotangents of u before they are summed."""
        if self.added:
            return g
        name = self.node.name()
        if name == "MulBackward0":
            other: Tensor = self.node._saved_other if self.at == 0 else self.node._saved_self
            return g * other.detach().to(g.dtype)
        return g * (self.node._saved_alpha if name == "AddBackward0" else -self.node._saved_alpha)

    def summed(self, g: Tensor) -> Tensor:
        """Cotangents [k n *u] of u for every example, from those of z [k *z]."""
        at, u = self.axis.index, self._aligned
        g = self.weighted(g).unflatten(1 + at, (self.axis.before, self.n, -1)).movedim(2 + at, 1)  # [k n *z], z_at = 2
        sizes = (*u[:at], 1, *u[at:])
        spread = [2 + axis for axis, size in enumerate(sizes) if size == 1]
        return g.sum(spread).reshape(g.shape[0], self.n, *self.u)

    def pulled(self, g: Tensor, leaves: Sequence[Tensor]) -> Tensor:
        """R [k n p] of the leaves, one after the other, from cotangents [k *z]."""
        g = self.summed(single(g))
        leaf = _only_leaf(self.below)
        if leaf is None:
            return _through(GradientEdge(*self.node.next_functions[self.at]), leaves, g)
        parts = [
            g.reshape(*g.shape[:2], -1) if own is leaf else g.new_zeros(*g.shape[:2], own.numel()) for own in leaves
        ]
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def reshaped(node: Any) -> Any:
    """The node of the tensor that this one is a reshape, or a cast, of."""
    while node is not None and node.name() in SAME:
        node = node.next_functions[0][0]
    return node


def _only_leaf(node: Any) -> Tensor | None:
    """The leaf that a tensor is a reshape of, or None."""
    below = reshaped(node)
    return below.variable if below is not None and below.name() == LEAF else None


def _through(u: GradientEdge, leaves: Sequence[Tensor], g: Tensor) -> Tensor:
    """(∂u/∂θ)ᵀ g [k n p] for g [k n *u]."""
    k, n = g.shape[:2]
    dtype = u.node._input_metadata[u.output_nr].dtype
    grads = torch.autograd.grad(
        u, leaves, g.flatten(0, 1).to(dtype), retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    parts = [
        g.new_zeros(k, n, leaf.numel()) if found is None else found.reshape(k, n, -1).to(g.dtype)
        for leaf, found in zip(leaves, grads, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


def _shape(node: Any, output: int) -> torch.Size:
    return torch.Size(node._input_metadata[output].shape)
