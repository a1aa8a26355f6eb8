"""The neural tangent kernel of a model: J Jᵀ between points, from per-layer factors or matrix-free."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import full_precision
from natgrad.errors import MemoryBoundError
from natgrad.geometry import unflatten
from natgrad.linalg import check_finite, is_number
from natgrad.linearise import Linearisation, linearise
from natgrad.model import Inputs, Model, check_slots, examples, tensors_of
from natgrad.output.metric import Euclidean
from natgrad.pullbacks.pullback import Observer, memory_bound
from natgrad.pullbacks.pullback import layers_of as layers_of_model
from natgrad.pullbacks.rows import check_independent, separable
from natgrad.show import brief
from natgrad.structures.base import Inverse, Layout
from natgrad.structures.dense import name_of
from natgrad.structures.kernel import Kernel, KernelOperator

Range = tuple[int, int]  # of examples


def ntk(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    y: Inputs = None,
    *,
    batch: int | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int | None = None,
) -> Tensor:
    """The neural tangent kernel of a model: how much examples share what they teach.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        x: The inputs.
        y: Other inputs to compare with; x itself by default.
        batch: The examples whose factors are in memory at a time.
        params: The parameters of a pure function, by name; a module has its own.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        memory: Bytes that a temporary may take; larger work is done in chunks.

    Returns:
        Θ [n m k l]; k and l are flattened outputs.

    Method:
        Θ = Σ_p ∂φ_k(x_n)/∂θ^p ∂φ_l(y_m)/∂θ^p. Where layers have rules, it comes from their inputs and cotangents, and J
        [(n k) p] is never formed.

        It is the inverse metric of the tangent space in which the ∂φ/∂θ^p are orthonormal (Bai, Rosenberg and Xu 2022,
        lemma 6): the dual of the pushforward of the Euclidean metric. It depends on the parametrisation: θ' = 2θ has Θ'
        = Θ/4. ``PushforwardMetric`` is the metric, and ``TangentKernel`` a kernel that does not depend on it.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> ntk(model, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))[:, :, 0, 0].round(decimals=4)  # ⟨x, y⟩ + 1
        tensor([[6., 3.],
                [3., 2.]])
    """
    (kernel,) = _assemble(Model.of(model, params, output), x, y, batch, memory, by_layer=False).values()
    return kernel


def layer_ntks(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    y: Inputs = None,
    *,
    batch: int | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int | None = None,
) -> dict[str, Tensor]:
    """The neural tangent kernel of every layer, which sum to that of the network.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        x: The inputs.
        y: Other inputs to compare with; x itself by default.
        batch: The examples whose factors are in memory at a time.
        params: The parameters of a pure function, by name; a module has its own.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        memory: Bytes that a temporary may take; larger work is done in chunks.

    Returns:
        Θ_layer [n m k l] by the names of the layer's parameters.

    Example:
        >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
        >>> {name: tuple(t.shape) for name, t in layer_ntks(model, torch.randn(3, 2)).items()}
        {'0.weight + 0.bias': (3, 3, 1, 1), '2.weight + 2.bias': (3, 3, 1, 1)}
    """
    return _assemble(Model.of(model, params, output), x, y, batch, memory, by_layer=True)


def _assemble(
    model: Model, x: Inputs, y: Inputs, batch: int | None, memory: int | None, *, by_layer: bool
) -> dict[str, Tensor]:
    """The kernels [n m k l] of the layers, or their sum under the title "", block by block over ranges of examples.

    Between points and themselves only the blocks below the diagonal are computed.
    """
    symmetric, memory = y is None, memory_bound(memory, model.example.device)
    right_x = x if symmetric else y
    left_ranges = _ranges(model, x, batch)
    right_ranges = left_ranges if symmetric else _ranges(model, y, batch)
    titles: dict[str, str] = {}
    totals: dict[str, Tensor] = {}  # [k n l m], by title
    for one in left_ranges:
        left = jacobian_rows(model, x, memory, one)
        for two in right_ranges:
            diagonal = symmetric and one == two
            right = left if diagonal else jacobian_rows(model, right_x, memory, two)
            (k, n), (l, m) = (side.factors[0].g.shape[:2] for side in (left, right))
            layers, others = layers_of(left), layers_of(right)
            if not totals:
                (_, rows), (_, columns) = left_ranges[-1] or (0, n), right_ranges[-1] or (0, m)
                titles = {name: name_of(layer.blocks) if by_layer else "" for name, layer in layers.items()}
                like, shape = left.factors[0].g, (k, rows, l, columns)
                check_size(
                    (len(set(titles.values())) + 1) * math.prod(shape) * like.element_size(), (rows, columns), memory
                )
                totals = {title: like.new_zeros(shape) for title in dict.fromkeys(titles.values())}
            top, start = one[0] if one else 0, two[0] if two else 0
            with torch.no_grad(), full_precision(left.factors[0].g.device):
                for name, layer in layers.items():
                    block = layer.gram() if diagonal else layer.gram_with(others[name])
                    block = block.view(k, n, l, m) * math.sqrt(n * m)
                    total = totals[titles[name]]
                    total[:, top : top + n, :, start : start + m] += block
                    if symmetric and not diagonal:
                        total[:, start : start + m, :, top : top + n] += block.permute(2, 3, 0, 1)
            if diagonal:
                break
    for total in totals.values():
        check_finite(total, "the neural tangent kernel")
    return {name: total.permute(1, 3, 0, 2) for name, total in totals.items()}


def _ranges(model: Model, x: Inputs, batch: int | None) -> list[Range | None]:
    """Ranges of ``batch`` examples; [None] is all of them."""
    if batch is None:
        return [None]
    if not is_number(batch, whole=True) or batch < 1:
        raise ValueError(f"batch={batch!r} must be a positive integer: the examples that are taken at a time")
    n = max((t.shape[0] if t.ndim else 0 for t in tensors_of(x)), default=0)
    if not separable(x, n):
        raise ValueError(
            f"batch={batch} takes a range of the examples, and the inputs do not all have {n} of them on "
            "their first axis: leave batch= out, or give inputs that have"
        )
    if batch < n:
        check_independent(model, x, batch, n)
    return [(start, min(start + batch, n)) for start in range(0, n, batch)]


def jacobian_rows(model: Model, x: Inputs, memory: int, chosen: Range | None = None) -> KernelOperator:
    """J/√N at the points x, or at a range of them, as per-layer factors."""
    if chosen is not None:
        x = examples(x, chosen, max(t.shape[0] for t in tensors_of(x)))
    pb = Observer(model, Euclidean(), layers_of_model(model), None, memory).checked(x)
    needed = (Kernel().elements(pb) - 2 * (pb.columns * pb.n) ** 2) * pb.y.element_size()  # without its matrices
    if needed > memory:
        raise MemoryBoundError(
            f"the layers of {pb.n} points with {pb.columns} outputs and {model.size:,} parameters need "
            f"{needed:,} bytes, over the bound memory={memory:,}: take fewer points at a time (ntk has batch= "
            "for it), or products only with functionspace.NTKOperator"
        )
    with torch.no_grad(), full_precision(pb.y.device):
        return KernelOperator(Layout(pb.model.like, pb.y.dtype), tuple(pb.blocks), tuple(pb.collect()))


def check_size(needed: int, sizes: tuple[int, int], memory: int) -> None:
    """Refuse a kernel that does not fit, before it is allocated."""
    if needed > memory:
        raise MemoryBoundError(
            f"the kernel between {sizes[0]} and {sizes[1]} points needs {needed:,} bytes, over the bound "
            f"memory={memory:,}: take products only, with functionspace.NTKOperator, or fewer points"
        )


def layers_of(rows: KernelOperator) -> dict[str, KernelOperator]:
    """The rows of every layer: of all blocks whose names agree up to the last dot.

    The blocks of a layer may depend on the batch (with one example a bias looks like any other axis of size one); the
    layer does not.
    """
    layers: dict[str, list[int]] = defaultdict(list)
    for at, block in enumerate(rows.blocks):
        layers[block.names[0].rpartition(".")[0]].append(at)
    return {
        name: replace(rows, blocks=tuple(rows.blocks[b] for b in which), factors=tuple(rows.factors[b] for b in which))
        for name, which in layers.items()
    }


@final
@dataclass(frozen=True)
class NTKOperator:
    """The neural tangent kernel as an operator, where the kernel itself is too large.

    Args:
        left: The derivatives at the points x.
        right: The derivatives at the points y.
        inverse: That of a metric G on the parameters, as ``Cholesky().init(G, damping)`` returns it; None is the
            Euclidean one, so that this is Θ of ``ntk``.

    Method:
        u ↦ J_x G⁻¹ J_yᵀ u, a backward and a forward product: nothing of the size of Θ or of J is allocated.

        For any G it is the dual of the pushforward of G. Where G is pulled back from a metric on functions it is the
        kernel of the tangent space, which ``TangentKernel`` computes without a metric of the size of the parameters.
    """

    left: Linearisation
    right: Linearisation
    inverse: Inverse | None = None

    __repr__ = brief

    @staticmethod
    def of(
        model: nn.Module | Callable[..., Any],
        x: Inputs,
        y: Inputs = None,
        *,
        inverse: Inverse | None = None,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> NTKOperator:
        """The operator between points x and y, at the model's parameters as they are now; y = None is x itself.

        >>> import natgrad as ng
        >>> model, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> NTKOperator.of(model, x).product(torch.tensor([[1.0], [0.0]])).flatten()  # a column of ntk
        tensor([6., 3.])
        >>> G = ng.Dense().estimate(ng.pullback(model, torch.randn(8, 2), ng.Euclidean()))
        >>> NTKOperator.of(model, x, inverse=ng.Cholesky().init(G)).dense().shape  # for the empirical L²
        torch.Size([2, 2, 1, 1])
        """
        wrapped = Model.of(model, params, output)
        wrapped.check_separable()
        if inverse is not None:
            check_slots(inverse=(inverse, Inverse))
        left = linearise(wrapped, x)
        right = left if y is None else linearise(wrapped, y)
        for linear in (left, right):
            check_finite(linear.y, "the output of the model")
        if inverse is not None and list(inverse.layout.like) != list(wrapped.params):
            raise ValueError(
                f"the metric is over {list(inverse.layout.like)}, and the model has {list(wrapped.params)}: estimate "
                "it from a pullback of this model"
            )
        return NTKOperator(left, right, inverse)

    def product(self, u: Tensor) -> Tensor:
        """[n *out], from u [m *out] at the points y."""
        if u.shape != self.right.y.shape:
            raise ValueError(
                f"u has the shape {tuple(u.shape)}, and the outputs at the points y {tuple(self.right.y.shape)}"
            )
        pulled = self.right.pull(u.to(self.right.y.dtype))
        if self.inverse is None:
            return self.left.push(pulled)
        layout = self.inverse.layout
        w = self.inverse.solve(layout.flatten(pulled))
        return self.left.push(unflatten(w, layout.like))

    def dense(self, memory: int | None = None) -> Tensor:
        """The kernel [n m k l], by one product per output of every point y: for few points."""
        x, y = self.left.y, self.right.y
        check_size(x.numel() * y.numel() * y.element_size(), (x.shape[0], y.shape[0]), memory_bound(memory, y.device))
        eye = torch.eye(y.numel(), dtype=y.dtype, device=y.device).view(-1, *y.shape)
        columns = torch.stack([self.product(u).reshape(-1) for u in eye], dim=1)
        return columns.view(x.shape[0], x[0].numel(), y.shape[0], y[0].numel()).transpose(1, 2)
