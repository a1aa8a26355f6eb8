"""The neural tangent kernel of a model: J Jᵀ between points, from the factors of the layers or as a product only."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import MemoryBoundError
from natgrad.geometry import unflatten
from natgrad.linalg import check_finite
from natgrad.linearise import Linearisation, linearise
from natgrad.model import Inputs, Model, tensors_of
from natgrad.output.metric import Euclidean
from natgrad.pullback.chunks import Part, check_apart, examples, ranges, separable
from natgrad.pullback.factors import Factors
from natgrad.pullback.layer import Block
from natgrad.pullback.pullback import MEMORY, pullback, unrounded
from natgrad.slots import check_slots
from natgrad.structures.base import Inverse, Layout
from natgrad.structures.dense import index_of, name_of
from natgrad.structures.kernel import Kernel, KernelOperator

# Gram matrices of the rows of two sets of examples, from the factors of their layers: J is not formed.


_LIMIT = 2**22  # elements of a temporary


@final
@dataclass(frozen=True)
class Layer:
    """The rows of one layer, R [(k n) p], in factors: those of all blocks whose names agree up to the last dot.

    Which blocks a layer has may depend on the batch (a bias of one example looks like any other axis of one); the layer
    does not.
    """

    blocks: tuple[Block, ...]
    factors: tuple[Factors, ...]

    @property
    def title(self) -> str:
        """The names of its parameters, in flattening order."""
        return name_of(self.blocks)

    def gram(self, other: Layer | None = None) -> Tensor:
        """R R'ᵀ [(k n) (l m)] with the rows of the same layer at other examples; None: at the same ones."""
        if other is None:
            return reduce(torch.add, (f.gram() for f in self.factors))
        if not self._packed_as(other):
            return self._rows() @ other._rows().T
        return reduce(torch.add, map(cross_gram, self.factors, other.factors))

    def _packed_as(self, other: Layer) -> bool:
        mine, its = ([(b.names, b.shape, b.keys, type(b.rule)) for b in layer.blocks] for layer in (self, other))
        return mine == its

    def _rows(self) -> Tensor:
        """R [(k n) p] in flattening order."""
        packed = torch.cat([f.rows().flatten(0, 1) for f in self.factors], dim=1)
        return packed[:, index_of(self.blocks).argsort()]


def layers(rows: KernelOperator) -> dict[str, Layer]:
    """The layers of J/√N by the part of their names before the last dot."""
    grouped: dict[str, list[tuple[Block, Factors]]] = defaultdict(list)
    for block, factors in zip(rows.blocks, rows.factors, strict=True):
        grouped[block.names[0].rpartition(".")[0]].append((block, factors))
    return {
        name: Layer(tuple(block for block, _ in found), tuple(f for _, f in found)) for name, found in grouped.items()
    }


def gram(left: KernelOperator, right: KernelOperator) -> Tensor:
    """R R'ᵀ [(k n) (l m)] of two sets of examples, summed over the layers."""
    others = layers(right)
    return reduce(torch.add, (layer.gram(others[name]) for name, layer in layers(left).items()))


def cross_gram(left: Factors, right: Factors, limit: int = _LIMIT) -> Tensor:
    """R R'ᵀ [(k n) (l m)], R = Σ_r g aᵀ and R' = Σ_s h bᵀ: for one position ⟨g_kn, h_lm⟩⟨a_n, b_m⟩, entry by entry.

    With several positions it is that product summed over their pairs, or the product of the rows, whichever is less
    work; see ``Factors.gram``, which is this for equal factors. Temporaries stay within ``limit`` elements, where one
    pair of examples allows.

    >>> from natgrad.pullback import Factors
    >>> f = Factors(torch.randn(3, 1, 1, 4), torch.randn(2, 3, 1, 1, 5))
    >>> torch.allclose(cross_gram(f, f), f.gram())
    True
    """
    (k, n, r, c, o), (l, m, s) = left.g.shape, right.g.shape[:3]
    i = left.a.shape[3]
    if left.plain and right.plain:
        inner = left.g[:, :, 0, 0].flatten(0, 1) @ right.g[:, :, 0, 0].flatten(0, 1).T
        return (inner.view(k, n, l, m) * (left.a[:, 0, 0] @ right.a[:, 0, 0].T)[None, :, None, :]).view(k * n, l * m)
    # A multiplication entry by entry, with its sum, takes as long as a hundred inside a matrix product.
    if c == 1 and r * s * (o + i / (k * l) + 100) < o * i:
        return _by_positions(left, right, limit)
    return _by_rows(left, right, limit)


def _by_rows(left: Factors, right: Factors, limit: int) -> Tensor:
    """R R'ᵀ summed over slices of the parameters: outputs o, and all of c and i."""
    (k, n, _, c, _), (l, m) = left.g.shape, right.g.shape[:2]
    total = left.g.new_zeros(k * n, l * m)
    step = max(1, limit // (max(k * n, l * m) * c * left.a.shape[3]))
    for g, h in zip(left.g.split(step, dim=4), right.g.split(step, dim=4), strict=True):
        total.addmm_(Factors(left.a, g).rows().flatten(0, 1), Factors(right.a, h).rows().flatten(0, 1).T)
    return total


def _by_positions(left: Factors, right: Factors, limit: int) -> Tensor:
    """Σ_rs ⟨g_knr, h_lms⟩⟨a_nr, b_ms⟩, for blocks of pairs of examples (n, m)."""
    (k, n, r, _, o), (l, m, s) = left.g.shape, right.g.shape[:3]
    total = left.g.new_empty(k, n, l, m)
    step = max(1, math.isqrt(limit // (k * r * l * s)))
    for top in range(0, n, step):
        g, a = left.g[:, top : top + step, :, 0].reshape(-1, o), left.a[top : top + step, :, 0].flatten(0, 1)
        for start in range(0, m, step):
            h, b = right.g[:, start : start + step, :, 0].reshape(-1, o), right.a[start : start + step, :, 0]
            inner = (g @ h.T).view(k, -1, r, l, b.shape[0], s)
            inner *= (a @ b.flatten(0, 1).T).view(-1, r, 1, b.shape[0], s)
            total[:, top : top + step, :, start : start + step] = inner.sum((2, 5))
    return total.view(k * n, l * m)


def ntk(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    y: Inputs = None,
    *,
    batch: int | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int = MEMORY,
) -> Tensor:
    """Θ [n m k l] = Σ_p ∂φ_k(x_n)/∂θ^p ∂φ_l(y_m)/∂θ^p, the neural tangent kernel (000 (14)); y = None is x itself.

    It is the inverse metric of the tangent space in which the ∂φ/∂θ^p are orthonormal (000 lemma 6): the dual of the
    pushforward of the Euclidean metric, and not that metric, as 000 section 5.2 has it (ERRATA 18). It depends on the
    parametrisation: θ' = 2θ has Θ' = Θ/4. See ``PushforwardMetric`` for the metric, ``TangentKernel`` for the kernel
    that does not.

    J [(n k) p] is not formed where layers have rules: Θ is made from their inputs and cotangents. k, l: outputs,
    flattened. ``batch``: examples whose factors are held at a time, for many points. ``memory``: bytes. ``params``,
    ``output``: as for ``pullback``.

    >>> model = nn.Linear(2, 1)
    >>> ntk(model, torch.tensor([[1.0, 2.0], [0.0, 1.0]]))[:, :, 0, 0].round(decimals=4)  # ⟨x, y⟩ + 1
    tensor([[6., 3.],
            [3., 2.]])
    """
    left = Points(Model.of(model, params, output), x, batch, memory)
    canvas: Canvas | None = None
    for pair in _pairs(left, None if y is None else Points(left.model, y, batch, memory)):
        canvas = Canvas.of(pair, 1, memory) if canvas is None else canvas
        for _, block in pair.grams():
            canvas.add(pair, block)
    assert canvas is not None
    return canvas.kernel()


def layer_ntks(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    y: Inputs = None,
    *,
    batch: int | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int = MEMORY,
) -> dict[str, Tensor]:
    """The terms of ``ntk`` by layer: Θ = Σ_layers Θ_layer, each [n m k l], by the names of the layer's parameters.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 1))
    >>> {name: tuple(t.shape) for name, t in layer_ntks(model, torch.randn(3, 2)).items()}
    {'0.weight + 0.bias': (3, 3, 1, 1), '2.weight + 2.bias': (3, 3, 1, 1)}
    """
    left = Points(Model.of(model, params, output), x, batch, memory)
    canvases: dict[str, Canvas] = {}
    for pair in _pairs(left, None if y is None else Points(left.model, y, batch, memory)):
        found = layers(pair.left)
        if not canvases:
            canvases = {layer.title: Canvas.of(pair, len(found), memory) for layer in found.values()}
        for layer, block in pair.grams():
            canvases[layer.title].add(pair, block)
    return {title: canvas.kernel() for title, canvas in canvases.items()}


@final
@dataclass(frozen=True)
class Points:
    """A model at points x, ``batch`` of them at a time, with the bytes that its factors may take."""

    model: Model
    x: Inputs
    batch: int | None = None
    memory: int = MEMORY

    def parts(self) -> list[Part | None]:
        """Ranges of the points; None is all of them."""
        if self.batch is None:
            return [None]
        if isinstance(self.batch, bool) or not isinstance(self.batch, int) or self.batch < 1:
            raise ValueError(f"batch={self.batch!r} must be a positive integer: the examples that are taken at a time")
        n = self._n
        if self.batch < n:
            check_apart(self.model, self.x, self.batch, n)
        return [*ranges(0, n, self.batch)]

    def rows(self, part: Part | None = None) -> KernelOperator:
        """J/√N of a range, in factors."""
        x = self.x if part is None else examples(self.x, part, self._n)
        pb = pullback(self.model, x, Euclidean(), memory=self.memory)
        needed = (Kernel().elements(pb) - 2 * (pb.columns * pb.n) ** 2) * pb.y.element_size()  # without its matrices
        if needed > self.memory:
            raise MemoryBoundError(
                f"the layers of {pb.n} points with {pb.columns} outputs and {self.model.size:,} parameters need "
                f"{needed:,} bytes, over the bound memory={self.memory:,}: take fewer points at a time (ntk has batch= "
                "for it), or products only with functionspace.NTKOperator"
            )
        with torch.no_grad(), unrounded(pb.y.device):
            return KernelOperator(Layout(pb.model.like, pb.y.dtype), tuple(pb.blocks), tuple(pb.collect()))

    @property
    def _n(self) -> int:
        sizes = {t.shape[0] if t.ndim else 0 for t in tensors_of(self.x)}
        n = max(sizes, default=0)
        if not separable(self.x, n):
            raise ValueError(
                f"batch={self.batch} takes a range of the examples, and the inputs do not all have {n} of them on "
                "their first axis: leave batch= out, or give inputs that have"
            )
        return n


@final
@dataclass(frozen=True)
class Pair:
    """Two ranges of points, with the rows of both; ``right`` is None where they are one range."""

    left: KernelOperator
    right: KernelOperator | None
    top: int
    start: int
    sizes: tuple[int, int]  # all points of both sides
    mirrored: bool  # whether the block across the diagonal is the transpose

    def grams(self) -> Iterator[tuple[Layer, Tensor]]:
        """Θ [k n l m] of the two ranges, a layer at a time."""
        others = None if self.right is None else layers(self.right)
        k, n, l, m = self.shape
        with torch.no_grad(), unrounded(self.left.factors[0].g.device):
            for name, layer in layers(self.left).items():
                block = layer.gram(None if others is None else others[name])
                yield layer, block.view(k, n, l, m) * math.sqrt(n * m)

    @property
    def shape(self) -> tuple[int, int, int, int]:
        (k, n), (l, m) = (rows.factors[0].g.shape[:2] for rows in (self.left, self.right or self.left))
        return k, n, l, m


def _pairs(left: Points, right: Points | None) -> Iterator[Pair]:
    """All pairs of ranges; of points with themselves, those below the diagonal."""
    others = left if right is None else right
    ours, theirs = left.parts(), others.parts()
    for one in ours:
        rows = left.rows(one)
        for two in theirs:
            same = right is None and one == two
            other = None if same else others.rows(two)
            n, m = (r.factors[0].g.shape[1] for r in (rows, other or rows))
            sizes = (ours[-1][1] if ours[-1] else n, theirs[-1][1] if theirs[-1] else m)
            yield Pair(rows, other, one[0] if one else 0, two[0] if two else 0, sizes, right is None and not same)
            if same:
                break


@final
@dataclass(frozen=True)
class Canvas:
    """Θ [k n l m] of all points, filled block by block."""

    total: Tensor

    @staticmethod
    def of(pair: Pair, count: int, memory: int) -> Canvas:
        """Zeros, one of ``count`` kernels; refused, with a term of them, before they are allocated if too large."""
        k, _, l, _ = pair.shape
        like = pair.left.factors[0].g
        shape = (k, pair.sizes[0], l, pair.sizes[1])
        check_size((count + 1) * math.prod(shape) * like.element_size(), pair.sizes, memory)
        return Canvas(like.new_zeros(shape))

    def add(self, pair: Pair, block: Tensor) -> None:
        _, n, _, m = block.shape
        rows, columns = slice(pair.top, pair.top + n), slice(pair.start, pair.start + m)
        self.total[:, rows, :, columns] += block
        if pair.mirrored:
            self.total[:, columns, :, rows] += block.permute(2, 3, 0, 1)

    def kernel(self) -> Tensor:
        """Θ [n m k l]."""
        check_finite(self.total, "the neural tangent kernel")
        return self.total.permute(1, 3, 0, 2)


def check_size(needed: int, sizes: tuple[int, int], memory: int) -> None:
    """Refuse a kernel that does not fit, before it is allocated."""
    if needed > memory:
        raise MemoryBoundError(
            f"the kernel between {sizes[0]} and {sizes[1]} points needs {needed:,} bytes, over the bound "
            f"memory={memory:,}: take products only, with functionspace.NTKOperator, or fewer points"
        )


@final
@dataclass(frozen=True)
class NTKOperator:
    """u ↦ J_x G⁻¹ J_yᵀ u, a backward and a forward product: nothing of the size of Θ or of J is made.

    ``inverse``: of a metric G on the parameters, as ``Cholesky().init(G, damping)`` returns it; None is the Euclidean
    one, so that this is Θ of ``ntk``. For any G it is the dual of the pushforward of G (ERRATA 18). Where G is pulled
    back from a metric on functions it is the kernel of the tangent space (000 (19)), which ``TangentKernel`` knows
    without a metric of the size of the parameters.
    """

    left: Linearisation
    right: Linearisation
    inverse: Inverse | None = None

    @staticmethod
    def of(
        model: nn.Module | Callable[..., Any],
        x: Inputs,
        y: Inputs = None,
        inverse: Inverse | None = None,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> NTKOperator:
        """The operator between points x and y, at the model's parameters as they are now; y = None is x itself.

        >>> import natgrad as ng
        >>> model, x = nn.Linear(2, 1), torch.tensor([[1.0, 2.0], [0.0, 1.0]])
        >>> NTKOperator.of(model, x).product(torch.tensor([[1.0], [0.0]])).flatten()  # 000 (14)
        tensor([6., 3.])
        >>> G = ng.Dense().estimate(ng.pullback(model, torch.randn(8, 2), ng.Euclidean()))
        >>> NTKOperator.of(model, x, inverse=ng.Cholesky().init(G)).dense().shape  # (19), for the empirical L²
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

    def dense(self, memory: int = MEMORY) -> Tensor:
        """The kernel [n m k l], by a product for every output of every point y: for few of them."""
        x, y = self.left.y, self.right.y
        check_size(x.numel() * y.numel() * y.element_size(), (x.shape[0], y.shape[0]), memory)
        eye = torch.eye(y.numel(), dtype=y.dtype, device=y.device).view(-1, *y.shape)
        columns = torch.stack([self.product(u).reshape(-1) for u in eye], dim=1)
        return columns.view(x.shape[0], x[0].numel(), y.shape[0], y[0].numel()).transpose(1, 2)
