"""Kronecker (K-FAC): one product S ⊗ A for every layer, averaged in place and inverted factor by factor.

    A = E[a aᵀ]   of the inputs a of a layer          S = E[g gᵀ]   of the cotangents g of its outputs
    G ≈ S ⊗ A     so that  G W = S W A  and  G⁻¹ W = S⁻¹ W A⁻¹       (row-major: S acts on the rows of W [c o i])

(Martens and Grosse 2015; for convolutions Grosse and Martens 2016; for recurrent networks Martens, Ba and Johnson 2018;
without coordinates Luk and Grosse 2018.)
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any, Literal, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision
from natgrad.accelerate.inverses import (
    BatchedInverse,
    Inversion,
    SymFactor,
    aligned,
    balance,
    diagonal,
    is_dense,
    mean_eigenvalues,
    relative_shifts,
    two_sided,
    two_sided_columns,
)
from natgrad.accelerate.moments import lay_out
from natgrad.accelerate.replay import Scalar
from natgrad.errors import FactorisationError, IncompatibleError
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    is_rounding,
    number_of,
    refuse_singular,
)
from natgrad.model import Model, library_pass
from natgrad.output.hessian import Empirical
from natgrad.pullbacks.coupling import at_fixed_address
from natgrad.pullbacks.gradient import GradientSample, gradient_factors
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.layer_factors import (
    CapturedKernels,
    EagerKernels,
    FactorList,
    FactorSink,
    LayerFactors,
    VisiblePositions,
    factors_of,
    kernels_of,
    layers_with_positions,
    may_hide,
    stream,
)
from natgrad.pullbacks.operation_layers import is_operation, with_layers
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.pullbacks.tape import BackwardHooks, Cotangents, Tape
from natgrad.structures.base import (
    Inverse,
    Layout,
    Operator,
    Structure,
    check_shape,
)
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator
from natgrad.structures.layered import (
    Basis,
    FactorAverage,
    Layered,
    LayerInverse,
    LayerOperator,
    LayerSplit,
    eigenvalues,
    factor_power,
    join_columns,
    layer_tensors,
    spectra,
    split_columns,
)

NOT_POSITIVE = "a factor of the metric was not positive after damping: raise the damping, or use a larger batch"


@final
@dataclass(frozen=True, repr=False)
class Kronecker(Layered):
    """Keep two small matrices per layer, whose Kronecker product approximates the metric: K-FAC.

    Args:
        sharing: How positions that share a weight (pixels, tokens, time steps) are treated: "expand" treats them as
            independent examples, "reduce" sums over them first (Eschenhagen et al. 2023).
        fallback: The structure of parameters that no layer rule covers; ``Diagonal()`` by default.
        strict: Raise an error for such parameters.
        largest: Of a factor with more rows than this (a vocabulary; the row of the bias is not counted) only the
            diagonal is kept.
        bias: "joint" keeps weight and bias as one layer, "separate" as two.
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.
        sides: "inputs" takes S = 1, G ≈ 1 ⊗ A (Benzing 2022): a pass needs no cotangents, and the metric on the outputs
            does not matter.

    Method:
        G ≈ S ⊗ A on every layer, A = E[a aᵀ], S = E[g gᵀ] (Martens and Grosse 2015; Luk and Grosse 2018, (2.8)).

        With a ``power`` below 1 the metric is S^p ⊗ A^p. ``opt.plan()`` shows what every parameter has.

        A position that the loss does not see (a padded token, an ignored label) does not count, unless it is a pixel.
        One whose units are off (``relu(a)``, or g in ``relu(a) * g``) does.

        A parameter outside of modules with a rule has the factors of the operations that use it: products,
        convolutions, lookups. Gains and offsets (positions, a class token, LayerScale) have a group for every entry,
        and so the exact diagonal of G.

        So do parameters θ of a weight W = f(θ) (``weight_norm``, a merged LoRA): W has a Kronecker product S ⊗ A, but
        its pullback (∂f/∂θ)ᵀ(S ⊗ A)(∂f/∂θ) is not a Kronecker product. This is logged once; ``strict`` allows it.

        An embedding that is also the weight of a linear head is one layer, W [V d], with one product for both uses,
        whose trace and partial traces are those of the sum of the two (``natgrad.pullbacks.layer``).

        In training mode the statistics of a batch normalisation and the masks of dropout are constants of the pass,
        also to parameters without a rule, which are differentiated in its own graph.

        A layer that a forward pass does not use (an expert, as a module or in a stack; a block that stochastic depth
        drops) is not in the estimate of that pass: the moving average of its factors continues with the next pass that
        uses it.

        The correction of the average for its start counts all estimates, and is an approximation for such a layer.

        If no positions share a weight, S ⊗ A equals the block of G for one example, for deep linear networks with
        squared loss, and whenever a and g are independent.

        If positions share it, the block of one example is a sum of products, in general not a product; for a deep
        linear network "expand" is exact if it has an output at every position, and "reduce" if it averages over them.

        "reduce" is for layers whose positions are averaged later. It sees nothing of a gradient whose cotangents cancel
        over the positions, such as that of the keys of an attention and of the patches that they read: there the metric
        is too small, and the step too long.

        Every metric on the outputs can be used, also a sampled one (Luk and Grosse 2018, theorem 3.6).

    Example:
        >>> import torch, natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> Kronecker().estimate(pb).dense()
        tensor([[1., 2., 1.],
                [2., 4., 2.],
                [1., 2., 1.]])
    """

    sides: Literal["both", "inputs"] = field(default="both", kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sides not in ("both", "inputs"):
            raise ValueError(f'Kronecker(sides=…) is "both" or "inputs", not {self.sides!r}')

    def factor_shapes(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        s, a = super().factor_shapes(block)
        return (s[:2] if self.sides == "inputs" else s), a

    def zeros(self, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        s, a = super().zeros(block, dtype)
        return (torch.ones_like(s) if self.sides == "inputs" else s), a

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> KroneckerOperator:
        """With every parameter in the layers, or in the fallback, as it is in ``like``."""
        split, layout = self.split(pullback, like), Layout(pullback.model.like, pullback.y.dtype)
        inputs_only = self.sides == "inputs"
        estimates, positions = factors_of(pullback, split.used, self.sharing_rule, inputs_only=inputs_only)
        counts = tuple(split.of_all(positions, lambda block: 0))
        return replace(self.assemble(split, layout, estimates, self.fallback_estimate(split)), positions=counts)

    def assemble(
        self,
        split: LayerSplit,
        layout: Layout,
        pairs: Iterable[tuple[SymFactor, SymFactor]],
        fallback: Operator | None,
    ) -> KroneckerOperator:
        """The operator with these S and A of the used layers; those of the others are zero."""
        factors = split.of_all(pairs, lambda block: self.zeros(block, layout.dtype))
        left, right = tuple(lay_out(s) for s, _ in factors), tuple(lay_out(a) for _, a in factors)
        return KroneckerOperator(layout, split.blocks, left, right, fallback, split.unseen, power=self.power)

    @without_autocast
    def absorb(self, pullback: Pullback, average: Operator, weight: float) -> KroneckerOperator:
        """Factor by factor, and in place; a layer that the pass did not use keeps its average."""
        assert isinstance(average, KroneckerOperator)
        split = self.split(pullback, average)
        fallback = self.fallback_estimate(split)
        fallback = None if fallback is None else fallback.finite()
        average.same_layers(split.blocks)
        numbers = {block.names: b for b, block in enumerate(average.blocks)}
        sink = FactorAverage(average, [numbers[block.names] for block in split.used], weight)
        stream(pullback, split.used, self.sharing_rule, sink, inputs_only=self.sides == "inputs")
        return average.absorbed(fallback, weight, split.unseen)

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> KroneckerOperator:
        """S = Σ_k G_k G_kᵀ/(i·k) and A = Σ_k G_kᵀ G_k/(o·k) of every matrix (Gupta, Koren and Singer 2018).

        A kernel of which only the diagonals are kept is the matrix [o i·k].
        """
        assert like is None or isinstance(like, KroneckerOperator)
        split, layout, fallback = self.split_gradient(sample, like)
        pairs = gradient_factors(sample, split.used, self.factor_shapes, inputs_only=self.sides == "inputs")
        return self.assemble(split, layout, pairs, fallback)

    def in_backward(
        self, pullback: Pullback, average: Operator | None, *, in_place: bool, weigh: Callable[[], float]
    ) -> KroneckerInBackward:
        """An estimate that is made while the user's backward pass runs, from the pass of this pullback.

        ``average``: what it will be averaged with. With ``in_place`` that changes where cotangents arrive; ``weigh``
        gives the weight of the estimate, and is called once, when the first of them does.
        """
        assert average is None or isinstance(average, KroneckerOperator)
        return KroneckerInBackward(self, pullback, average, weigh if in_place else None)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KroneckerOperator:
        split, fallback = self.restored_split(model, blocks, tensors)
        layout = Layout.of(model.params, next(iter(tensors.values())).dtype)
        saved = [(tensors[f"{block.names[0]}/S"], tensors[f"{block.names[0]}/A"]) for block in split.used]
        return self.assemble(split, layout, saved, fallback)


def check_source(structure: Structure, source: str) -> None:
    """Refuse a structure that cannot be estimated from a pass, or in the "backward" pass that the user runs."""
    if source != "backward":
        return
    if not isinstance(structure, Kronecker):
        raise IncompatibleError(
            f"Empirical() does not work with {type(structure).__name__}, which is not made layer by layer, where "
            "cotangents arrive: use Kronecker, or give it the loss, Empirical(loss)"
        )
    if structure.sides == "inputs":
        raise IncompatibleError(
            'Kronecker(sides="inputs") needs no cotangents, and so no backward pass: use it with Euclidean()'
        )
    structure.fallback.gradient_blocks([])


@final
class KroneckerInBackward:
    """A = E[a aᵀ] and S = E[g gᵀ] of every layer, with the cotangents g of a backward pass that the user runs.

    ``weigh``: gives the weight of the estimate in the ``average``, which is then changed in place. Layers that no
    backward pass comes to keep their averages.
    """

    def __init__(
        self,
        structure: Kronecker,
        pullback: Pullback,
        average: KroneckerOperator | None,
        weigh: Callable[[], float] | None,
    ) -> None:
        self._structure, self._average, self._weigh = structure, average, weigh
        self._split = split = structure.split(pullback, average)
        self._pullback = pullback if average is None and split.uncovered is not None else None
        self._layout = Layout(pullback.model.like, pullback.y.dtype) if average is None else average.layout
        self._sink: FactorSink | None = None
        self._weight = 1.0
        tape, metric = pullback.tape, pullback.metric
        of_mean = isinstance(metric, Empirical) and metric.reduction == "mean"
        dtype, several = pullback.y.dtype, layers_with_positions(tape, split.used)
        layers = LayerFactors(tuple(split.used), structure.sharing_rule, dtype, pullback.n, several, of_mean=of_mean)
        self._hooks = BackwardHooks(tape, split.used, self._consume)
        # A pass keeps masks at fixed addresses until ``finish``: micro-batches of one step have memory of their own.
        self._turns: set[int] = tape.memo.setdefault("turns", set())
        self._turn = next(turn for turn in count() if turn not in self._turns)
        self._turns.add(self._turn)
        memo = tape.memo.setdefault(("turn", self._turn), {})
        self._layers, self._tape, self._graphs = layers, replace(self._hooks.tape, memo=memo), pullback.graph_cache
        self._reached = layers.reached_positions(self._tape)
        self.asks_outputs: bool = may_hide(tape, split.used)  # cotangents of layers do not tell what the loss sees

    @property
    def arrived(self) -> bool:
        """Whether a backward pass has begun."""
        return self._hooks.arrived

    @torch.no_grad()
    def see_outputs(self, tape: Tape, cotangent: Tensor) -> None:
        """The backward pass comes to the outputs of this tape, with a cotangent of as many numbers."""
        s, tape = cotangent.detach().reshape(1, *tape.y.shape), replace(tape, memo=self._tape.memo)
        with library_pass(), full_precision(tape.y.device):  # to which the hooks are deaf
            visible = VisiblePositions(tape, self._split.used, lambda: s).without_graph()
        self._layers = replace(self._layers, visible=visible)

    def remove(self) -> None:
        """No longer wait for a backward pass."""
        self._hooks.remove()
        self._turns.discard(self._turn)

    @torch.no_grad()
    def _consume(self, numbers: Sequence[int], g: Cotangents) -> None:
        if self._sink is None:
            self._sink = self._begun()
        kernels = self._kernels(self._sink)
        with full_precision(self._tape.y.device):
            kernels.inputs(numbers)
            kernels.outputs(numbers, g)
            self._sink.flush()

    def _kernels(self, sink: FactorSink) -> EagerKernels | CapturedKernels:
        graphs = None if sink.address_key is None else self._graphs
        return kernels_of(graphs, self._layers, self._tape, sink, self._reached)

    def _begun(self) -> FactorSink:
        """Where the factors go."""
        if self._average is None or self._weigh is None:
            return FactorList()
        self._average.same_layers(self._split.blocks)
        self._weight = self._weigh()
        numbers = {block.names: b for b, block in enumerate(self._average.blocks)}
        # A backward pass whose loss has overflowed does not raise: a GradScaler makes no step with it.
        used = [numbers[block.names] for block in self._split.used]
        return FactorAverage(self._average, used, self._weight, lenient=True)

    @torch.no_grad()
    def finish(self, sample: GradientSample, like: Operator | None) -> KroneckerOperator:
        """The estimate or, in place, the new average; ``sample`` is for parameters that no layer rule covers.

        ``like``: the estimate of later passes of the same step, which know the layers of all passes before them.
        """
        self._hooks.finish()
        if self._sink is not None:
            self._kernels(self._sink).inputs_after()
            self._sink.flush()
        self._turns.discard(self._turn)
        split, used = self._split_like(like), self._split.used
        absent = {name for b in self._hooks.absent for name in used[b].names}
        unseen = split.unseen | absent
        fallback = None if split.uncovered is None else self._of_uncovered(sample, split.uncovered)
        sink = self._begun() if self._sink is None else self._sink  # no layer has a rule
        if isinstance(sink, FactorAverage):
            assert self._average is not None
            sink.refuse_left_out()
            return self._average.absorbed(fallback, self._weight, unseen)
        assert isinstance(sink, FactorList)
        dtype, factors = self._layout.dtype, sink.factors
        pairs = [
            (factors[b, "S"], factors[b, "A"]) if (b, "S") in factors else self._structure.zeros(block, dtype)
            for b, block in enumerate(used)
        ]
        out = self._structure.assemble(split, self._layout, pairs, fallback)
        return replace(out, unseen=unseen)

    def _split_like(self, like: Operator | None) -> LayerSplit:
        """The layers, with those that only later passes used: here they are unseen, and have no fallback."""
        pullback = self._pullback
        if like is None or pullback is None:
            return self._split
        later = [block for block in like.layers if is_operation(block) and pullback.unreached.issuperset(block.names)]
        layers = with_layers(pullback.layers, later)
        left = {block.names[0]: block for block in layers if pullback.unreached.issuperset(block.names)}
        unused = {**left, **pullback.unused, **{block.names[0]: block for block in later}}
        return self._structure.split(replace(pullback, layers=layers, unused=unused))

    def _of_uncovered(self, sample: GradientSample, uncovered: Pullback) -> Operator:
        below = None if self._average is None else self._average.fallback
        rest = replace(sample.over(list(uncovered.model.params)), blocks=uncovered.layers)
        return self._structure.fallback_of(rest, below)


@final
@dataclass(frozen=True, repr=False)
class KroneckerOperator(LayerOperator):
    """A metric as two small matrices for every layer.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        blocks: The layers, in the order of the tensors.
        left: S [c o o] of every layer, or its diagonal [c o].
        right: A [c i i] of every layer, or its diagonal [c i].
        fallback: The metric on the parameters that no layer rule covers, in another structure.
        unseen: Parameters of layers that no forward pass has used so far.
        power: p: the operator is G^p of the G that the tensors hold.
        positions: How many positions the factors are means over.
        elsewhere: The largest root mean square of a gradient of layers that other processes keep.

    Method:
        G = S ⊗ A on every layer: v = W [c o i] goes to S W A, or with a ``power`` p to S^p W A^p.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[SymFactor, ...]  # S [c o o] of every layer, or its diagonal [c o]
    right: tuple[SymFactor, ...]  # A [c i i] of every layer, or its diagonal [c i]
    fallback: Operator | None = None
    unseen: frozenset[str] = frozenset()
    power: float = field(default=1.0, kw_only=True)
    positions: tuple[int | Tensor, ...] = field(default=(), kw_only=True, compare=False, repr=False)
    elsewhere: Tensor | None = field(default=None, kw_only=True, compare=False, repr=False)

    def act(self, b: int, w: Tensor) -> Tensor:
        # Powers are not kept: the factors change in place.
        return two_sided(factor_power(self.left[b], self.power), w, factor_power(self.right[b], self.power))

    def map(self, f: Callable[[Tensor], Tensor]) -> EigenKroneckerOperator:
        return self.in_eigenbasis().map(f)

    def layer_diagonal(self, b: int) -> Tensor:
        s, a = factor_power(self.left[b], self.power), factor_power(self.right[b], self.power)
        return self.layer_values(b, diagonal(s), diagonal(a))

    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        values = s.clamp(min=0).unsqueeze(-1) * a.clamp(min=0).unsqueeze(-2)
        return values.expand(self.blocks[b].shape)

    def eigenvalues(self) -> Tensor | None:
        return self.in_eigenbasis().eigenvalues()

    def spectrum(self, damping: Damping = 0.0) -> tuple[list[Tensor], Basis]:
        """The products s_o a_i + λ, in the eigenvectors of the factors; (s_o + λ_S)(a_i + λ_A) if λ is relative."""
        (s, q), (a, p) = spectra(self.left), spectra(self.right)
        if isinstance(damping, Relative) and self.blocks:
            λ_S, λ_A = _relative_shifts(damping.epsilon, self.left, self.right, self.beside)
            s, a = (
                [
                    (x.clamp(min=0) + λ.unsqueeze(-1)).masked_fill(λ.unsqueeze(-1) == 0, 0.0)
                    for x, λ in zip(values, shifts, strict=True)
                ]
                for values, shifts in ((s, λ_S), (a, λ_A))
            )
        products = [x.unsqueeze(-1) * y.unsqueeze(-2) for x, y in zip(s, a, strict=True)]
        if not isinstance(damping, Relative) and damping != 0:
            products = [x.add_(damping) for x in products]
        products = [x.expand(block.shape) for block, x in zip(self.blocks, products, strict=True)]
        return products, Basis(tuple(q), tuple(p))

    @property
    def gradient_sizes(self) -> list[Tensor]:
        if not self.blocks:
            return []
        return list(_sizes(_group_means(self.left, self.right)[0]).split([len(s) for s in self.left]))

    def in_eigenbasis(self) -> EigenKroneckerOperator:
        """The same metric, by its eigenvectors: inverses at many dampings then factor nothing."""
        # In double precision: rounding of a small eigenvalue of one factor is multiplied by the largest of the other.
        (s, q), (a, p) = (spectra([factor.double() for factor in side]) for side in (self.left, self.right))
        dtype = self.layout.dtype
        basis = Basis(*(tuple(side if side is None else side.to(dtype) for side in each) for each in (q, p)))
        scales = tuple(self.layer_values(b, *pair).to(dtype) for b, pair in enumerate(zip(s, a, strict=True)))
        layers = self.layout, self.blocks, self.left, self.right, basis, scales, self.fallback, self.unseen
        return EigenKroneckerOperator(*layers, power=self.power, products=True)

    def _inverse(self, damping: Damping) -> Inverse:
        """(G + λ)^-p exactly: of the factors without damping, through their eigenvalues with it.

        Relative damping is that of the factors, (S + λ_S)^-p ⊗ (A + λ_A)^-p.
        """
        fallback = self.fallback_inverse(damping)
        return self._undamped_inverse(fallback) if damping == 0 else self.spectral_inverse(fallback, damping)

    def factored_inverse(
        self,
        damping: Damping,
        warm: Mapping[str, Tensor],
        into: Inverse | None = None,
    ) -> Inverse:
        """(S + λ_S)^-p ⊗ (A + λ_A)^-p, λ_S = √λ/π, λ_A = π√λ, π² = (tr A/dim A)/(tr S/dim S).

        An approximation of (G + λ)^-p (Martens and Grosse 2015, section 6.3). Relative damping is ε·tr S/dim S and
        ε·tr A/dim A. Inverses are made by Cholesky, powers below 1 by products on a GPU and by
        eigenvalues on a processor and in float64 (``natgrad.accelerate.roots``).

        Where a factor is zero (a layer with no gradient) π is 1; with relative damping its inverse is zero, and so is
        the step of the layer. A factor that cannot be inverted keeps its last inverse, from ``warm`` or ``into``, and
        FactorisationError is raised when the others are done; on a GPU the inverse has ``failed``, a step or two later.
        Without a last inverse SingularMetricError is raised at once.
        """
        fallback = self.fallback_inverse(damping)
        if damping == 0 or not self.blocks:
            return self._undamped_inverse(fallback)
        if isinstance(into, ProductInverse) and into.fits(self):
            out = into if fallback is None and into.fallback is None else replace(into, fallback=fallback)
        else:
            out, warm = ProductInverse.empty(self, fallback), warm if into is None else into.tensors()
            if not self._has_product_inverse(warm):
                out.compute_(self, damping)
                return out
            out.load_(warm)
        out.refresh_(self, damping)
        return out

    def _undamped_inverse(self, fallback: Inverse | None) -> ProductInverse:
        """S^-p ⊗ A^-p; a singular factor raises, by the name of its layer."""
        for side, factors in (("S", self.left), ("A", self.right)):
            for block, factor in zip(self.blocks, factors, strict=True):
                groups = eigenvalues(factor.double())
                if factor.shape[-1] == 1:  # one number for every channel
                    groups = groups.amin(0, keepdim=True)
                for values in groups:
                    rounding = factor.shape[-1] * torch.finfo(factor.dtype).eps
                    refuse_singular(values, what=f"the factor {side} of {block.title}", damping=0.0, rtol=rounding)
        self.refuse_rounding()
        out = ProductInverse.empty(self, fallback)
        out.compute_(self, 0.0)
        return out

    @property
    def inverts_at_once(self) -> bool:
        return not any(map(is_dense, (*self.left, *self.right)))

    def layers_from(self, tensors: Mapping[str, Tensor], fallback: Inverse | None) -> Inverse | None:
        if not self._has_product_inverse(tensors):
            return super().layers_from(tensors, fallback)
        out = ProductInverse.empty(self, fallback)
        out.load_(tensors)
        return out

    def _has_product_inverse(self, tensors: Mapping[str, Tensor]) -> bool:
        """Whether S⁻¹ and A⁻¹ of the layers are among these tensors."""
        return all(f"{block.names[0]}/S" in tensors for block in self.blocks[:1])


@final
@dataclass(frozen=True, repr=False)
class ProductInverse(LayerInverse):
    """v = S^-p W A^-p, damped. The inverses lie in one stack for each batch of layers, and are refreshed there."""

    layout: Layout
    blocks: tuple[Block, ...]
    fallback: Inverse | None
    dense: tuple[tuple[bool, bool], ...]  # of every layer, whether S and A are matrices
    power: float = 1.0
    stacks: tuple[tuple[SymFactor, SymFactor], ...] = ()  # of every batch, S^-p [b·c o o] and A^-p [b·c i i]
    batch: BatchedInverse = field(default_factory=BatchedInverse)
    memo: dict[Hashable, Any] = field(default_factory=dict, compare=False)  # see ``at_fixed_address``

    @staticmethod
    def empty(G: KroneckerOperator, fallback: Inverse | None) -> ProductInverse:
        """Memory for the inverses of G, with nothing in it yet."""
        out = ProductInverse(G.layout, G.blocks, fallback, _dense_sides(G), G.power)
        pairs = [(G.left[batch[0]], G.right[batch[0]], len(batch)) for batch in out.batches]
        stacks = tuple((_memory(s, count), _memory(a, count)) for s, a, count in pairs)
        return replace(out, stacks=stacks)

    def fits(self, G: KroneckerOperator) -> bool:
        """Whether the inverse of G can be computed in this memory."""
        if self.power != G.power or self.dense != _dense_sides(G):
            return False
        if self.blocks is not G.blocks:  # in a training loop they are
            here, there = ([(b.names, b.shape) for b in blocks] for blocks in (self.blocks, G.blocks))
            if here != there:
                return False
        like = G.left[0]
        memory = [t for pair in self.stacks for t in pair]
        return all(t.dtype == like.dtype and t.device == like.device for t in memory)

    def load_(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy S^-p and A^-p of every layer."""
        for key, t in self._views().items():
            check_shape(f"{key} of the inverse of the metric", tensors[key], t.shape)
            t.copy_(tensors[key])

    def compute_(self, G: KroneckerOperator, damping: Damping, *, warm: bool = False) -> None:
        """From G, waiting for the device; a matrix that cannot be inverted raises, after a retry in double precision.

        ``warm``: there is an inverse, which stays where it raises.
        """
        relative, number = isinstance(damping, Relative), number_of(damping)
        jobs = self._jobs((*G.left, *G.right), number, relative=relative, beside=G.beside)
        for job in () if warm else jobs:
            check_finite(job.factor, job.title)
        self.batch.compute_(jobs, power=self.power, epsilon=number if relative else None, warm=warm)

    def refresh_(self, G: KroneckerOperator, damping: Damping) -> None:
        """From G, in place of the inverse that is there. A GPU is not waited for: ``failed`` tells later."""
        relative, number = isinstance(damping, Relative), number_of(damping)
        factors = (*G.left, *G.right)
        stacks = (t for pair in self.stacks for t in pair)
        beside = G.beside if relative else None
        beside = None if beside is None else at_fixed_address(self.memo, "beside", beside)
        read = factors if beside is None else (*factors, beside)
        addresses = *map(Tensor.data_ptr, read), *map(Tensor.data_ptr, stacks)
        jobs = partial(self._jobs, relative=relative, beside=beside)
        self.batch.refresh_(jobs, factors, number, addresses, power=self.power, relative=relative)

    def _jobs(
        self, factors: Sequence[SymFactor], damping: Scalar, *, relative: bool, beside: Tensor | None
    ) -> list[Inversion]:
        """What is inverted, with factored damping, and where it goes; ``factors``: all S, then all A."""
        count = len(self.blocks)
        of_factors = _relative_shifts(damping, factors[:count], factors[count:], beside) if relative else ((), ())
        jobs: list[Inversion] = []
        for batch, stacks in zip(self.batches, self.stacks, strict=True):
            s, a = [factors[b] for b in batch], [factors[count + b] for b in batch]
            c = s[0].shape[0]
            shifts: tuple[Sequence[Tensor], Sequence[Tensor]]
            if relative:
                shifts = [of_factors[0][b] for b in batch], [of_factors[1][b] for b in batch]
            else:
                π = balance(a, s)
                shifts = (damping**0.5 / π).split(c), (damping**0.5 * π).split(c)
            for letter, side, of_side, stack in zip("SA", (s, a), shifts, stacks, strict=True):
                outs = _unaligned(stack, side[0].shape[-1]).split(c)
                for b, factor, shift, out in zip(batch, side, of_side, outs, strict=True):
                    title = f"the factor {letter} of {self.blocks[b].title}"
                    jobs.append(Inversion(factor, shift, out, title))
        return jobs

    def failed(self) -> bool:
        """Whether a GPU could not compute a part of it, as far as the host has read; that part is an older one."""
        return self.batch.failed()

    def adopt_failures(self, other: Inverse) -> None:
        """Take over the failures of an inverse that this one was built from."""
        if isinstance(other, ProductInverse):
            self.batch.adopt_failures(other.batch)
        else:
            self.batch.clear()

    def clear_failures(self) -> None:
        """Forget failures that have been handled."""
        self.batch.clear()

    def copy_into(self, new: Inverse) -> Inverse:
        result = super().copy_into(new)
        if result is self is not new:
            self.adopt_failures(new)
        return result

    def stacks_with(self, b: int) -> object:
        return self.dense[b]

    def apply(self, batch: int, columns: list[Tensor]) -> list[Tensor]:
        L, R = self.stacks[batch]
        graph = torch.is_grad_enabled() and any(w.requires_grad for w in columns)
        if self.dense[self.batches[batch][0]] == (True, True) and not graph and L.shape[0] == columns[0].shape[0]:
            return two_sided_columns(L, columns, R)
        w = join_columns(columns)
        in_place = not graph and w is not columns[0]
        return split_columns(two_sided(L, w, R, w if in_place else None), columns)

    def tensors(self) -> dict[str, Tensor]:
        return self.fallback_inverse_tensors() | self._views()

    def nonnegative(self) -> dict[str, Tensor]:
        return super().nonnegative() | {key: diagonal(t) for key, t in self._views().items()}

    def _views(self) -> dict[str, Tensor]:
        """Views of the stacks of every layer, without the padding."""
        out: dict[str, Tensor] = {}
        for batch, stacks in zip(self.batches, self.stacks, strict=True):
            blocks = [self.blocks[b] for b in batch]
            (_, o, i), c = blocks[0].shape, blocks[0].factor_groups
            sides = (
                (letter, _unaligned(stack, d).split(c)) for letter, stack, d in zip("SA", stacks, (o, i), strict=True)
            )
            out |= layer_tensors(blocks, dict(sides))
        return out


def retry(G: Operator, inverse: Inverse, damping: Damping) -> None:
    """Compute an inverse that has ``failed`` again, in place and in double precision. This waits for the device.

    Raises where it fails again.
    """
    if not isinstance(G, KroneckerOperator) or not isinstance(inverse, ProductInverse) or not inverse.fits(G):
        raise FactorisationError(NOT_POSITIVE)
    inverse.compute_(G, damping, warm=True)


def _group_means(left: Sequence[SymFactor], right: Sequence[SymFactor]) -> tuple[Tensor, Tensor]:
    """tr S/dim S and tr A/dim A [2 Σc] of the groups of all layers, and the means of these over the groups of a layer.

    In few launches where every layer has one group: in a captured step they are computed every time.
    """
    means = mean_eigenvalues((*left, *right)).view(2, -1)
    counts = [len(s) for s in left]
    if set(counts) == {1}:
        return means, means
    groups = torch.stack([torch.cat([diagonal(factor).mean(-1) for factor in side]) for side in (left, right)])
    expanded = (zip(side.split(1), counts, strict=True) for side in means)
    return groups, torch.stack([torch.cat([mean.expand(c) for mean, c in side]) for side in expanded])


def _sizes(groups: Tensor) -> Tensor:
    """√(tr S/dim S · tr A/dim A) [Σc]; the product itself could leave the range of single precision."""
    return groups.clamp(min=0).sqrt().prod(0)


def _relative_shifts(
    epsilon: Scalar, left: Sequence[SymFactor], right: Sequence[SymFactor], beside: Tensor | None
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    """λ_S and λ_A [c] of every layer: ε·(mean eigenvalue) of the factor, and zero for a group that is zero.

    ``beside``: the largest size outside of these layers (``is_rounding``).
    """
    groups, means = _group_means(left, right)
    zero, counts = is_rounding(_sizes(groups), beside), list(map(len, left))
    shifts = relative_shifts(epsilon, means).masked_fill(zero, 0.0)
    return shifts[0].split(counts), shifts[1].split(counts)


def _dense_sides(G: KroneckerOperator) -> tuple[tuple[bool, bool], ...]:
    return tuple([(is_dense(s), is_dense(a)) for s, a in zip(G.left, G.right, strict=True)])


def _memory(factor: SymFactor, count: int) -> SymFactor:
    """For the inverses of as many factors like this one, ``aligned`` with zeros."""
    shape = (count * factor.shape[0], *factor.shape[1:])
    like = aligned(factor[:1])
    if like.shape[-1] == factor.shape[-1]:
        return torch.empty(shape, dtype=factor.dtype, device=factor.device)
    return like.new_zeros(shape[0], *like.shape[1:])


def _unaligned(factor: SymFactor, size: int) -> SymFactor:
    """A view without the padding of an ``aligned`` factor."""
    return factor[..., :size, :size] if is_dense(factor) else factor
