"""The pullback of an output metric to the parameters: G = (1/N) Σ_k Σ_nm C_nm R_kn R_kmᵀ, R_kn = J_nᵀ s_kn."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, wraps
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar, final, overload

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.accelerate.autograd import version_of
from natgrad.accelerate.devices import device_bytes, fake_tensors, full_precision, is_asynchronous
from natgrad.accelerate.replay import GraphCache
from natgrad.accelerate.temporaries import CHUNK_BYTES, STAYS_IN_CPU_CACHE
from natgrad.errors import IncompatibleError, MemoryBoundError, NatgradError, NonFiniteError
from natgrad.geometry import Vector
from natgrad.linalg import is_number
from natgrad.log import OnceLogger, listed
from natgrad.model import Inputs, Model, batches_of, check_inputs, check_slots, examples, map_tensors, tensors_of
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import Coupling, OutputMetric
from natgrad.pullbacks.batch_axis import LayerStatus, StatusCache, check_outputs
from natgrad.pullbacks.coupling import root_of
from natgrad.pullbacks.example_grads import ExampleGrads, Squares
from natgrad.pullbacks.layer import Block, Tied, formed, partition
from natgrad.pullbacks.operation_layers import OperationLayers
from natgrad.pullbacks.rows import rows, separable
from natgrad.pullbacks.tape import Cotangents, Tape, record
from natgrad.rules import RULES
from natgrad.rules.base import Rule
from natgrad.show import brief


@final
@dataclass(frozen=True)
class Batch:
    """A model with inputs, and targets if the metric needs them.

    ``cotangent``: what the user's own loss sends into the outputs, where a metric waits for it. ``rng_state``: of the
    random stream before the user's pass over the batch, where it is kept.
    """

    model: Model
    x: Inputs
    target: Any = None
    cotangent: Tensor | None = None
    rng_state: Tensor | None = None


# The root of the output metric, computed where it is needed, and checked.


@final
@dataclass
class Root:
    """s [k n *out] with Σ_k s_k s_kᵀ = h at the outputs y [n *out], for any range of the examples.

    Samples are drawn once and kept. An exact root has K·D numbers an example, D² for most metrics: it is made for the
    examples that are processed together, and not kept.
    """

    metric: OutputMetric
    y: Tensor  # [n *out]
    target: Any
    memory: int  # bytes that the root may occupy
    check: bool = True  # whether it is finite
    stored: Tensor | None = None

    @staticmethod
    def of(observer: Observer, metric: OutputMetric, target: Any, y: Tensor, coupled: bool) -> Root:
        """Draw samples now. Compute an exact root now only if it is ``coupled``, which needs all examples at once."""
        check = not observer.deferred
        whole = root_at(metric, y, target, observer.generator, check) if coupled or not metric.exact else None
        return Root(metric, y, target, observer.bound, check, whole)

    @property
    def columns(self) -> int:
        """K, from the stored root, or from the root at one example."""
        if self.stored is None and self._alone is None:
            self.stored = root_at(self.metric, self.y, self.target, None, self.check)
        return self.stored.shape[0] if self.stored is not None else self._alone or 0

    def whole(self) -> Tensor:
        """s [k n *out] of all examples; an exact one is computed anew each time, and not kept."""
        if self.stored is not None:
            return self.stored
        self._admit()
        root = root_at(self.metric, self.y, self.target, None, self.check)
        self.check = False  # what is made again is not checked again
        return root

    def _admit(self) -> None:
        """Refuse, before it is made, a root that exceeds the memory bound."""
        n, d, bytes_each = self.y.shape[0], self.y.shape[1:].numel(), self.y.element_size()
        if n * d**2 * bytes_each <= self.memory:
            return  # nearly certain: no metric of the library has many more columns than outputs
        needed = n * self.columns * d * bytes_each
        if needed > self.memory:
            raise MemoryBoundError(
                f"the exact root of {self.metric!r} has {self.columns:,} columns: for {n} examples with {d:,} outputs "
                f"it needs {needed:,} bytes, over the bound memory={self.memory:,}. Sample it, with "
                "Fisher(family, samples=k) or Sampled(metric, k), take smaller batches (a DataLoader in place of x), "
                "or use Implicit, which needs no root"
            )

    @cached_property
    def _alone(self) -> int | None:
        """K of the root at one example; None if metric or targets are defined for the whole batch only."""
        n = self.y.shape[0]
        if not all(t.ndim and t.shape[0] == n for t in tensors_of(self.target)):
            return None
        try:
            shape = self._shape(self.y[:1], examples(self.target, (0, 1), n))
        except Exception:  # whatever it is, the whole batch will raise it again if it is not about one example
            return None
        return shape[0] if shape[1:] == (1, *self.y.shape[1:]) else None

    def _shape(self, y: Tensor, target: Any) -> tuple[int, ...]:
        """The shape of the root at one example; a large root is not made to learn it."""
        with torch.no_grad(), full_precision(y.device):
            if y.numel() ** 2 * y.element_size() <= _chunk_bytes(self.memory):
                return tuple(self.metric.root(y, target).shape)
            try:
                with fake_tensors() as mode:
                    return tuple(self.metric.root(mode.from_tensor(y), map_tensors(target, mode.from_tensor)).shape)
            except Exception:  # the metric looks at values, which are not there: Hessians do, and have D columns
                return (y.numel(), *y.shape)


def _chunk_bytes(memory: int) -> int:
    """What a temporary may occupy: an eighth of the bound, and no more than stays fast."""
    return max(1, min(memory // 8, CHUNK_BYTES))


def root_at(
    metric: OutputMetric, y: Tensor, target: Any, generator: torch.Generator | None, check: bool = True
) -> Tensor:
    """s [k n *out] at y [n *out], of the right shape and, where that may be looked at, finite."""
    before = version_of(y)
    with torch.no_grad(), full_precision(y.device):
        root = metric.root(y, target, generator).detach()
    if version_of(y) != before:
        raise ValueError(f"{metric!r}.root has changed the outputs of the model in place: let it work on y.clone()")
    if root.shape[1:] != y.shape:
        raise ValueError(
            f"{metric!r}.root must be [k n *out] with [n *out] = {tuple(y.shape)}, got {tuple(root.shape)}"
        )
    if check:
        _check_finite(metric, root)
    return root


def flat_at(metric: OutputMetric, y: Tensor, u: Tensor, target: Any) -> Tensor:
    """h u [n *out], of the right shape and finite: the checks of ``root_at``, for structures that need no root."""
    with torch.no_grad(), full_precision(y.device):
        hu = metric.flat(y, u, target)
    if hu.shape != y.shape:
        raise ValueError(f"{metric!r}.flat must be [n *out] = {tuple(y.shape)}, got {tuple(hu.shape)}")
    _check_finite(metric, hu)
    return hu


def _check_finite(metric: OutputMetric, values: Tensor) -> None:
    # A sum reads the numbers once, isfinite five times; finite numbers may overflow together.
    if not bool(values.sum().isfinite()) and not bool(values.isfinite().all()):
        raise NonFiniteError(f"{metric!r} is not finite at the outputs: they are too large, or outside its domain")


def memory_bound(memory: int | None, device: torch.device) -> int:
    """The bytes that a structure may occupy: ``memory`` or, where that is None, half of what the device has.

    >>> memory_bound(1000, torch.device("cpu")), memory_bound(None, torch.device("cpu")) > 2**28
    (1000, True)
    """
    if memory is None:
        return device_bytes(device) // 2
    if not is_number(memory) or not memory > 0:
        raise ValueError(f"memory must be a number of bytes, or None for half of those of the device, got {memory!r}")
    return int(memory)


@final
@dataclass
class Pullback:
    """A model at a batch with a metric on its outputs; made by ``pullback``.

    ``root`` [k n *out] satisfies Σ_k s_k s_kᵀ = h (exactly, or in expectation); all structures estimated from one
    pullback see the same samples. G is the mean over the examples; only metrics of a loss know how it is reduced.

    Attributes:
        batch: The model, and the inputs and targets x.
        metric: The metric on the outputs.
        y: The outputs [n *out].
        roots: The root of the metric at the outputs.
        layers: The layers with their rules.
        positions: By the first name of a layer: the number of positions r·c of an example that share the weight.
        unused: The layers that the pass did not use, with their rule; in ``layers`` they have no rule, and their rows
            are zero.
        unreached: All parameters that the outputs do not depend on.
        reasons: Why parameters that were used have no rule, by name.
        memory: Bytes that a structure may occupy.
        recorded: What the forward pass recorded; None after ``release``.
        record_again: A function that records the pass again.
        operations: The layers that are operations outside of modules.
        logger: Where messages go, each once.
        graph_cache: CUDA graphs of second moments, for a model that is used repeatedly.
        coupled: The coupling C [n m] of the examples, and K, in float64.
        versions: The versions of the parameters, where they are watched.
    """

    batch: Batch
    metric: OutputMetric
    y: Tensor  # [n *out]
    roots: Root
    layers: list[Block]  # with their rules
    positions: Mapping[str, int]
    unused: Mapping[str, Block]
    unreached: frozenset[str]
    reasons: Mapping[str, str]
    memory: int  # bytes that a structure may occupy
    recorded: Tape | None = field(repr=False)  # of the pass; None after ``release``
    record_again: Callable[[], Tape] = field(repr=False)
    operations: OperationLayers = field(repr=False)
    logger: OnceLogger = field(repr=False)
    graph_cache: GraphCache[None] | None = field(default=None, repr=False)  # CUDA graphs of second moments
    coupled: Coupling | None = None  # C [n m] and K in float64: C may be large, and what it multiplies nearly cancel
    versions: Mapping[str, int] = field(default_factory=dict, repr=False)  # of the parameters, where they are watched

    __repr__ = brief

    def check_current(self, before: str = "estimate") -> None:
        """Refuse parameters that were written to after the pass: J would be there, and h where they were before.

        ``before``: what must be done earlier.
        """
        params = self.model.params
        watched = ((name, params[name], version) for name, version in self.versions.items() if name in params)
        if changed := [name for name, p, version in watched if version_of(p) != version]:
            raise NatgradError(
                f"the parameters {listed(changed)} were written to since pullback(…), which has the outputs from "
                f"before: call pullback again, or {before} before you change them"
            )

    def release(self) -> None:
        """Drop the graph of the pass, which belongs to the user's backward pass."""
        self.recorded = None

    @property
    def tape(self) -> Tape:
        """Of the pass or, where that was released, of another one."""
        if self.recorded is None:
            self.recorded = self.record_again()
        return self.recorded

    @property
    def model(self) -> Model:
        """The model at the parameters of the pass."""
        return self.batch.model

    @property
    def coupling(self) -> Tensor | None:
        """C [n m]."""
        return None if self.coupled is None else self.coupled.C

    @property
    def root(self) -> Tensor:
        """s [k n *out] of all examples."""
        return self.roots.whole()

    @property
    def columns(self) -> int:
        """K, the number of columns of the root."""
        return self.roots.columns

    @property
    def n(self) -> int:
        """N, the number of examples."""
        return self.y.shape[0]

    @property
    def blocks(self) -> list[Block]:
        """The layers as ``factors`` packs them; coupled metrics and tied weights have rows in flattening order."""
        coupled = self.coupling is not None
        return [layer.without_rule() if coupled or layer.facets else layer for layer in self.layers]

    @property
    def factor_size(self) -> int:
        """How many numbers g [k r c o] and a [r c i] of all blocks have, for one example."""
        numbers = 0
        for block in self.blocks:
            _, o, i = block.shape
            shared = 1 if block.rule is None else self.positions[block.names[0]]
            numbers += shared * (self.columns * o + i)
        return numbers

    def separated(self) -> Pullback:
        """The same pullback with weights and biases as separate layers."""
        layers: list[Block] = []
        unused: dict[str, Block] = {}
        for layer in self.layers:
            whole = self.unused.get(layer.names[0], layer)
            layers += [piece if whole is layer else piece.without_rule() for piece in whole.separated()]
            unused |= {piece.names[0]: piece for piece in whole.separated() if whole is not layer}
        return replace(self, layers=layers, unused=unused)

    def unmixed(self) -> Pullback:
        """The same pullback without the coupling."""
        return replace(self, coupled=None)

    @property
    def chunk(self) -> int:
        """The largest number of elements of a temporary."""
        return max(1, _chunk_bytes(self.memory) // self.y.element_size())

    @property
    def template(self) -> Vector:
        """A vector of the right names and shapes (its values are the parameters)."""
        return Vector({name: p.detach() for name, p in self.model.params.items()})

    def output_flat(self, u: Tensor) -> Tensor:
        """The metric of the whole batch of outputs applied to u [n *out]: (1/N) Σ_m C_nm Σ_k s_kn ⟨s_km, u_m⟩."""
        if self.coupling is None and self.metric.exact:
            return self.metric.flat(self.y, u, self.batch.target) / self.n
        s = self.root
        s = s.reshape(*s.shape[:2], -1)  # [k n d], with d = 1 for outputs [n]
        t = torch.einsum("knd,nd->kn", s, u.reshape(self.n, -1))
        if self.coupling is not None:
            t = self._coupled_with(t.double()).to(t.dtype)
        return torch.einsum("knd,kn->nd", s, t).view_as(u) / self.n

    def check_metric(self) -> None:
        """Raise if the metric is not finite at the outputs, for structures that only compute products."""
        if self.roots.stored is None:  # a stored root has been checked already
            flat_at(self.metric, self.y, torch.ones_like(self.y), self.batch.target)

    def factors(self, limit: int | None = None) -> Iterator[list[ExampleGrads]]:
        """Factors of all blocks, chunk by chunk over the roots; G is the sum over the chunks.

        ``limit``: elements that a chunk of roots may have, where that is less than ``chunk``.
        A coupling mixes the examples, so its rows come whole in n and mixed by a root L of C = L Lᵀ.
        """
        if self.coupling is not None:
            yield from self._coupled()
            return
        for factors in self._by_roots(limit):
            yield from formed(factors, self.chunk)

    def _by_roots(self, limit: int | None = None) -> Iterator[list[ExampleGrads | Tied]]:
        """Factors of all examples, chunk by chunk over the roots."""
        inputs = self._inputs()
        for s in self.root.split(self.roots_at_once(inputs, limit)):
            yield self._factors(inputs, s / math.sqrt(self.n))

    def collect(self) -> list[ExampleGrads]:
        """The factors of all examples and roots at once, for the kernel."""
        chunks = self._coupled() if self.coupling is not None else self._by_roots()
        whole = [[f.at(slice(None)) for f in factors] for factors in chunks]
        return [ExampleGrads(fs[0].a, torch.cat([f.g for f in fs])) for fs in zip(*whole, strict=True)]

    def square(self) -> Tensor:
        """The diagonal of G [p] = Σ_kn R², from the factors."""
        sums = [Squares() for _ in self.blocks]
        # The roots are summed, so small chunks that stay in the cache are fastest.
        for factors in self.factors(self.chunk if is_asynchronous(self.y.device) else STAYS_IN_CPU_CACHE):
            for total, f in zip(sums, factors, strict=True):
                total.add(f)
        out = self.y.new_empty(self.model.size)
        for block, total in zip(self.blocks, sums, strict=True):
            block.unpack(total.total(), out)
        return out

    def _inputs(self) -> list[Tensor | None]:
        factored = (block if block.rule and not block.facets else None for block in self.layers)
        return [None if block is None else self.tape.inputs(block).dense().to(self.y.dtype) for block in factored]

    def roots_at_once(self, inputs: Sequence[Tensor | None], limit: int | None) -> int:
        """How many columns k of the root fit into a chunk, including the rows of layers with several positions."""
        cost = sum(shape.numel() for use in self.tape.uses for shape in use.shapes)
        for block, a in zip(self.layers, inputs, strict=True):
            if a is None or a.shape[1] > 1:
                cost += block.size * self.n
        if any(a is None for a in inputs) and not separable(self.batch.x, self.n):
            cost += self.n * self.y.numel()  # every example has a cotangent of the whole batch
        return max(1, min(self.chunk, limit or self.chunk) // max(cost, 1))

    def _factors(self, inputs: Sequence[Tensor | None], s: Tensor) -> list[ExampleGrads | Tied]:
        tape = self.tape
        cotangents = tape.cotangents(s) if any(block.rule for block in self.layers) else Cotangents({}, {})
        unused = [block.names[0] in self.unused for block in self.layers]
        ruleless = [block for block, out in zip(self.layers, unused, strict=True) if block.rule is None and not out]
        bare = [name for block in ruleless for name in block.names]
        self._admit_rows(ruleless, s)
        explicit = rows(self.model, tape, bare, self.batch.x, s, self.logger, self.chunk) if bare else s.new_empty(0)
        out: list[ExampleGrads | Tied] = []
        start = 0
        for block, a, nothing in zip(self.layers, inputs, unused, strict=True):
            if nothing:
                out.append(ExampleGrads.of_rows(s.new_zeros(*s.shape[:2], block.size, dtype=self.y.dtype)))
            elif block.facets:
                pairs = [(tape.inputs(kind).dense(), cotangents.of(tape, kind).dense()) for kind in block.kinds]
                out.append(Tied.of(block, pairs, self.y.dtype))
            elif a is None or block.rule is None:
                out.append(ExampleGrads.of_rows(explicit[..., start : start + block.size]))
                start += block.size
            else:
                out.append(ExampleGrads(a, cotangents.of(tape, block).dense().to(a.dtype)))
        return out

    def _admit_rows(self, ruleless: Sequence[Block], s: Tensor) -> None:
        """Refuse, before they are made, rows of parameters without a layer rule that exceed the memory bound."""
        needed = s.shape[:2].numel() * sum(block.size for block in ruleless) * s.element_size()
        if needed > self.memory:
            names = listed([name for block in ruleless for name in block.names])
            raise MemoryBoundError(
                f"the rows of {self.n} examples for {names}, which no layer rule covers, need {needed:,} bytes, over "
                f"the bound memory={self.memory:,}: take smaller batches (a DataLoader in place of x), use Implicit, "
                "or raise memory="
            )

    def mixing(self) -> Tensor:
        """L [n m] with C = L Lᵀ. Sums of squares of what is mixed by it do not cancel, as products with C do.

        It comes in the precision in which it must be multiplied, which may be more than that of the rows.
        """
        assert self.coupled is not None
        L = self.coupled.L
        return root_of(self.coupled.C.double()).to(self.y.dtype) if L is None else L

    def _coupled_with(self, t: Tensor) -> Tensor:
        """t C, for t [k n]; by a root of C where one is known to all its digits."""
        assert self.coupled is not None
        C, L = self.coupled.C, self.coupled.L
        return t @ L @ L.T if L is not None and L.dtype == C.dtype else t @ C.double()

    def _coupled(self) -> Iterator[list[ExampleGrads]]:
        mix, each = self.mixing(), self.y.element_size()
        # All rows that are mixed and, of one layer at a time, those that are not, and both in the precision of mixing.
        largest = max((layer.size for layer in self.layers), default=0)
        needed = self.n * (
            self.model.size * each + largest * (each + 2 * mix.element_size() * (mix.dtype != self.y.dtype))
        )
        if needed > self.memory:
            raise MemoryBoundError(
                f"the coupled rows of {self.n} examples and {self.model.size} parameters need {needed:,} bytes, "
                f"over the bound memory={self.memory:,}: use a smaller batch, or Implicit"
            )
        inputs = self._inputs()
        for s in self.root.split(1):
            factors = self._factors(inputs, s / math.sqrt(self.n))
            yield [_mixed(f, layer, mix) for f, layer in zip(factors, self.layers, strict=True)]


def _mixed(f: ExampleGrads | Tied, layer: Block, mix: Tensor) -> ExampleGrads:
    """The rows of a layer, mixed by L, in the order of its parameters."""
    rows = f.at(slice(None)).rows()
    dtype = rows.dtype
    rows = (rows if layer.facets else rows[..., layer.index.argsort()]).to(mix.dtype)
    return ExampleGrads.of_rows(torch.einsum("nm,knp->kmp", mix, rows).to(dtype))


# Metrics are computed in the precision that their numbers have, also inside a forward pass under autocast.
#
# And without a graph: a rule may read a parameter, and a factor that remembers it would hold every pass
# since the first.


_ALIKE = 1e-5  # by what the shares of heads in a batch may differ, which are sums in single precision
Self = TypeVar("Self")
Result = TypeVar("Result")
Others = ParamSpec("Others")


@final
@dataclass(frozen=True, eq=False)
class LoaderPullback:
    """A metric pulled back over all batches of a ``DataLoader``; made by ``pullback``.

    Every estimate reads the loader, once, at the parameters that the model has then. It is the mean over the examples,
    as of the joint batch, in the memory of one batch; ``Kernel`` and ``Implicit`` keep all of them. Of a loss whose
    mean is over class weights, or leaves out ignored labels, it is that mean.

    Attributes:
        observer: Makes the pullback of a batch.
        loader: The loader.
    """

    observer: Observer
    loader: DataLoader[Any]

    __repr__ = brief

    @staticmethod
    def of(observer: Observer, loader: DataLoader[Any], target: Any) -> LoaderPullback:
        """Refuses a ``target``, which belongs to one batch, and a loss that is a sum over the examples."""
        if target is not None:
            raise TypeError("target= belongs to one batch x; a loader brings its targets, as pairs (x, target)")
        if observer.metric.grows:
            raise IncompatibleError(
                f'a DataLoader does not work with {observer.metric!r}: with reduction="sum" the metric grows with the '
                'examples, and what a loader gives is a mean over them. Give the loss with reduction="mean"'
            )
        return LoaderPullback(observer, loader)

    def __iter__(self) -> Iterator[Pullback]:
        """The pullback of every batch."""
        for x, target in batches_of(self.observer.model, self.loader):
            yield self.observer.checked(x, target)

    @property
    def memory(self) -> int:
        """Bytes that a structure may occupy."""
        return self.observer.bound

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        raise TypeError(
            f"the pullback of a DataLoader has no {name}: give one batch x here, or do it for every batch, `for pb in "
            "pullback(model, loader, metric)`. Structures take the loader: ng.Kronecker().estimate(pullback)"
        )

    def mean(self, structure: Any, like: Any = None) -> tuple[Any, int, int]:
        """The estimate of all batches, weighted by what their mean is over, and the numbers of examples and outputs.

        A structure with eigenvectors takes the eigenvectors of the first batch for all estimates of a pass. At its end
        the eigenvectors of all batches are known, and a second pass measures the eigenvalues in them.
        """
        G, n, outputs, count = self._one_pass(structure, like)
        if G is None:
            raise ValueError("the loader has no batch: there is no data to estimate the metric from")
        G = G.finite(wait=True)
        if not structure.has_basis or count == 1:
            return G, n, outputs
        again, n2, *_ = self._one_pass(structure, G.with_new_basis())
        if again is None or n2 != n:
            raise ValueError(
                f"the loader gave {n} examples in a first pass, and {n2} in a second one, which {structure!r} needs: "
                "its eigenvalues are measured in the eigenvectors of all examples. Give a loader that can be read "
                "twice, or use Kronecker()"
            )
        return again.finite(wait=True), n, outputs

    def _one_pass(self, structure: Any, like: Any) -> tuple[Any, int, int, int]:
        """The mean of all batches (None without one), and the numbers of examples, of outputs and of batches."""
        operator, n, outputs, count, total = None, 0, 0, 0, torch.zeros((), dtype=torch.float64)
        for x, target in batches_of(self.observer.model, self.loader):
            pb = self.observer.checked(x, target)
            if pb.coupling is not None:
                raise IncompatibleError(
                    f"a DataLoader does not work with {pb.metric!r}, which couples the examples, also those of two "
                    "batches: give one batch, or a metric that is a sum over the examples (Fisher, Euclidean)"
                )
            n, outputs, count = n + pb.n, outputs + pb.y.numel(), count + 1
            new = structure.estimate(pb, operator or like)
            share = torch.as_tensor(pb.metric.denominator(pb.y, target)).to("cpu", torch.float64)
            total = total + share
            weights = share / total.clamp(min=torch.finfo(total.dtype).tiny)  # of the heads, or one
            weight = float(weights.max())
            if weight - float(weights.min()) > _ALIKE:
                raise IncompatibleError(
                    f"a DataLoader does not work with {pb.metric!r} and these targets: the mean of every head is over "
                    "the labels that it has, or their class weights, and batches have other shares of those of one "
                    "head than of another. Give one batch, or a Fisher metric for every head"
                )
            operator = new if operator is None else operator.pool(new, weight)
        return operator, n, outputs, count


def without_autocast(
    estimate: Callable[Concatenate[Self, Pullback, Others], Result],
) -> Callable[Concatenate[Self, Pullback | LoaderPullback, Others], Result]:
    """An estimate with autocast off, which would round every product of factors to half precision, and no gradients.

    Refused where the parameters have changed since the pass. Of a loader it is the mean over its batches.
    """

    @wraps(estimate)
    def wrapped(
        self: Self, pullback: Pullback | LoaderPullback, /, *args: Others.args, **kwargs: Others.kwargs
    ) -> Result:
        if isinstance(pullback, LoaderPullback):
            return pullback.mean(self, *args, **kwargs)[0]
        check_slots(pullback=(pullback, Pullback))
        pullback.check_current()
        with torch.no_grad(), full_precision(pullback.y.device):
            return estimate(self, pullback, *args, **kwargs)

    return wrapped


# From a model and a batch to a pullback: the forward pass, the layers that have a rule in it, and the root.


_FLATTENED = (
    'the outputs have {} rows for {} examples: they are read as [n t *out] with t = {}, as with examples="inputs"'
)
_WITHOUT = "{} have no layer rule and are differentiated example by example, which is slow: {}."
_LEFT = "{} have no layer rule, and AdamW steps them: {}."
_PAIRS = (
    "%s: a batch normalisation of two values a channel makes them ±1, whatever they are, and the layers before it, "
    "which have hardly a gradient, and a large metric, stay where they are: use larger batches or nn.GroupNorm, or put "
    "the module into evaluation mode"
)


class OperationsNeededError(Exception):
    """Control flow: parameters are used outside modules with a rule; run the pass again and record its operations."""


class NoRuleError(Exception):
    """Control flow: the pass uses these ``optional`` parameters, and no layer rule covers them: leave them out.

    ``reasons``: why, by name.
    """

    def __init__(self, reasons: Mapping[str, str]) -> None:
        super().__init__(", ".join(reasons))
        self.reasons = reasons


@overload
def pullback(
    model: nn.Module | Callable[..., Any] | Model,
    x: DataLoader[Any],
    metric: OutputMetric | Criterion,
    target: None = None,
    generator: torch.Generator | None = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    memory: int | None = None,
    rules: Sequence[Rule] = (),
) -> LoaderPullback: ...


@overload
def pullback(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    metric: OutputMetric | Criterion,
    target: Any = None,
    generator: torch.Generator | None = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    memory: int | None = None,
    rules: Sequence[Rule] = (),
) -> Pullback: ...


def pullback(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    metric: OutputMetric | Criterion,
    target: Any = None,
    generator: torch.Generator | None = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    memory: int | None = None,
    rules: Sequence[Rule] = (),
) -> Pullback | LoaderPullback:
    """Pull the metric on the outputs of a model back to its parameters (Grosse 2021, section 5).

    Estimate before the parameters change: afterwards the pullback is refused, unless they were written to through
    ``p.data`` or by a CUDA graph, which nothing shows.

    Args:
        model: A module or a pure function f(params, x).
        x: A tensor, a tuple of positional inputs or a dict of keyword inputs, with the examples on the first axis of
            each; or a ``DataLoader`` of such x, or of pairs (x, target), over whose batches every structure then takes
            the mean.
        metric: A metric, or a loss, which stands for ``metric_of(loss)``.
        target: The targets of the batch, for metrics that need them.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.
        params: The parameters of a pure function.
        output: Extracts y [n *out] from what the model returns, such as ``lambda out: out.logits``.
        examples: "inputs" if the model flattens positions into the first axis of its outputs (``logits.view(-1, V)``),
            and the targets are flattened, too: y becomes [n t *out]. Without it this is found where rows of the outputs
            depend on each other (attention) and blocks of t rows do not.
        memory: Bytes that a structure may occupy (None: half of those of the device); temporaries are chunked to an
            eighth of it.
        rules: Layer rules for your own modules; they take precedence over those of the library.

    Returns:
        A ``Pullback``, which every structure estimates: ``ng.Kronecker().estimate(pb)``.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model = nn.Linear(2, 3)
        >>> pb = ng.pullback(model, torch.randn(5, 2), ng.Fisher(ng.Categorical()))
        >>> ng.Dense().estimate(pb).dense().shape
        torch.Size([9, 9])
    """
    metric = metric_of(metric)
    wrapped = Model.of(model, params, output, examples, metric.heads)
    observer = Observer(wrapped, metric, layers_of(wrapped, rules), generator, memory)
    return LoaderPullback.of(observer, x, target) if isinstance(x, DataLoader) else observer.checked(x, target)


@final
@dataclass(frozen=True)
class ObserverCache:
    """Caches for a model that is used repeatedly."""

    logger: OnceLogger = field(default_factory=OnceLogger)
    statuses: StatusCache = field(default_factory=StatusCache)
    graphs: GraphCache[None] = field(default_factory=GraphCache)
    operations: OperationLayers = field(default_factory=OperationLayers)


@final
@dataclass(frozen=True)
class PassLayers:
    """The layers of a pass. ``bare``: those without a module's rule. ``reasons``: why parameters have no rule."""

    tape: Tape
    blocks: list[Block]
    status: LayerStatus
    bare: list[Block]
    reasons: dict[str, str]


@final
@dataclass(frozen=True)
class Observer:
    """Makes pullbacks of one model: its metric, its layers, and caches of what was learned about its graphs.

    ``deferred``: do not check that numbers are finite, because a GPU would have to wait; the moving average does.
    ``rules``: the user's own, which ``blocks`` were made with.
    """

    model: Model
    metric: OutputMetric
    blocks: list[Block]
    generator: torch.Generator | None
    memory: int | None = None
    cache: ObserverCache = field(default_factory=ObserverCache)
    deferred: bool = False
    rules: Sequence[Rule] = ()

    def without(self, names: Collection[str]) -> Observer:
        """This observer with the named parameters held constant."""
        model = replace(self.model, params={name: p for name, p in self.model.params.items() if name not in names})
        return replace(self, model=model, blocks=layers_of(model, self.rules), cache=ObserverCache())

    @cached_property
    def bound(self) -> int:
        """The bytes that a structure may occupy."""
        return memory_bound(self.memory, self.model.example.device)

    @property
    def logger(self) -> OnceLogger:
        """Says once what becomes of a module, however many pullbacks and optimizers it has."""
        return self.cache.logger if self.model.module is None else OnceLogger.of(self.model.module)

    def checked(self, x: Inputs, target: Any = None) -> Pullback:
        """The pullback at inputs and targets, which are checked first."""
        check_inputs(self.model, x)
        self.metric.check_target(target)
        self.model.check_separable()
        params = self.model.params
        before = {name: version_of(p) for name, p in params.items()}
        pb = self.of(Batch(self.model, x, target))
        # Parameters that the pass itself writes to (an embedding with max_norm) are not watched: every pass does.
        return replace(pb, versions={name: v for name, v in before.items() if version_of(params[name]) == v})

    def of(self, batch: Batch, averaged: bool = False, optional: Collection[str] = ()) -> Pullback:
        """The pullback at a batch, by a forward pass of the library."""
        while True:
            asked = self.operations
            try:
                return self.assemble(batch, self._recorded(batch.x), averaged=averaged, optional=optional)
            except OperationsNeededError:  # once
                assert not asked

    @cached_property
    def output_metric(self) -> OutputMetric:
        """The metric of the outputs [n *out], where the model may flatten the terms of its examples."""
        return self.metric if self.model.examples is None else self.metric.unflattened()

    @property
    def operations(self) -> bool:
        """Whether a pass must record its operations, because parameters are used outside modules with a rule."""
        return self.cache.operations.needed(self.blocks)

    def assemble(
        self,
        batch: Batch,
        tape: Tape,
        fleeting: bool = False,
        averaged: bool = False,
        optional: Collection[str] = (),
    ) -> Pullback:
        """The pullback from a forward pass that has already run, such as one seen by an optimizer's hook.

        ``fleeting``: the pullback is used at once, so y need not be copied. ``averaged``: what the examples of the
        outputs are has been decided, because an average over earlier passes exists. ``optional``: parameters that are
        left out, by ``NoRuleError``, if the pass uses them and no layer rule covers them.
        """
        # Under autocast, outputs and cotangents are in half precision; factors are in single precision or better. A
        # copy, because the user may change the outputs in place.
        y = tape.y.detach().to(torch.promote_types(tape.y.dtype, torch.float32), copy=not fleeting)
        if self.model.examples is not None and y.ndim > 1:
            flat = y.shape[0] * y.shape[1]
            unflattened = map_tensors(
                batch.target, lambda t: self.model.by_example(t, batch.x) if t.ndim and t.shape[0] == flat else t
            )
            batch = replace(batch, target=unflattened)
        if not self.deferred:
            check_outputs(self.model, batch.x, y)
        if tape.statistics.pairs:
            self.logger.log_once(logging.WARNING, _PAIRS, listed(tape.statistics.pairs))
        layers = self._layers(tape)
        if layers.bare and tape.operations is None:
            self.cache.operations.expect()
            raise OperationsNeededError
        first, rows = _first_size(batch.x) if layers.reasons else 0, y.shape[0]
        if self.model.examples is None and 0 < first < rows and rows % first == 0:
            hint = 'pass examples="inputs"'
            if not averaged and separable(batch.x, first):
                observer = replace(self, model=replace(self.model, examples="inputs"))
                with torch.enable_grad():  # the caller may have it off
                    by_example = replace(tape, y=self.model.by_example(tape.y, batch.x))
                still = observer._layers(by_example).reasons.keys()
                if not still or (still <= set(optional) and still < layers.reasons.keys()):
                    self.cache.operations.forget()
                    self.logger.log_once(logging.INFO, _FLATTENED.format(rows, first, rows // first))
                    return observer.assemble(batch, by_example, fleeting, optional=optional)
                hint = "return outputs [n t *out] with the examples first"
            hint = f", and the outputs have {rows} rows for {first} examples; {hint}"
            layers.reasons.update({name: reason + hint for name, reason in layers.reasons.items()})
        if left := {name: reason for name, reason in layers.reasons.items() if name in optional}:
            self._log_uncovered(left, _LEFT)
            raise NoRuleError(left)
        if tape.operations is not None and layers.bare:
            self.cache.operations.remember(self.blocks)
        tape, blocks, status, reasons = layers.tape, layers.blocks, layers.status, layers.reasons
        if len(tape.y) > 1:  # one example alone is not slow
            self._log_uncovered(reasons)
        metric = self.output_metric.shaped(tape.shapes)
        cotangent = None if batch.cotangent is None else batch.cotangent.detach().reshape(y.shape)
        target = metric.prepared(y, batch.target, cotangent)
        batch = Batch(self.model, batch.x, target, rng_state=batch.rng_state)
        coupled = metric.coupled(batch.x, y.shape[0], y.dtype)
        return Pullback(
            batch=batch,
            metric=metric,
            y=y,
            roots=Root.of(self, metric, target, y, coupled is not None),
            layers=blocks,
            positions=tape.cached("positions", lambda: {block.names[0]: tape.positions(block) for block in blocks}),
            unused=status.unused,
            unreached=status.unreached,
            reasons=reasons,
            memory=self.bound,
            recorded=tape,
            record_again=lambda: self._layers(self._recorded(batch.x)).tape,
            operations=self.cache.operations,
            logger=self.logger,
            graph_cache=self.cache.graphs if is_asynchronous(y.device) else None,
            coupled=None if coupled is None else _placed(coupled, y),
        )

    def _recorded(self, x: Inputs) -> Tape:
        return record(self.model, self.blocks, x, operations=self.operations)

    def _layers(self, tape: Tape) -> PassLayers:
        """The layers of a pass whose outputs have the examples on their first axis."""
        status, tape = self.cache.statuses.of(self.model, self.blocks, tape)
        blocks = status.blocks
        bare = [block for block in blocks if block.rule is None and block.names[0] not in status.unused]
        reasons: dict[str, str] = {}
        if bare and tape.operations is not None:
            blocks, tape, reasons = self.cache.operations.resolve(self.model, blocks, tape, bare)
        # Of the parameters of a module without a rule, operations may have used some and not others.
        left = {b.names[0]: b for b in blocks if b.rule is None and status.unreached.issuperset(b.names)}
        if left.keys() - status.unused.keys():
            status = replace(status, unused={**left, **status.unused})
        return PassLayers(tape, blocks, status, bare, reasons)

    def _log_uncovered(self, reasons: Mapping[str, str], sentence: str = _WITHOUT) -> None:
        """Log once which parameters have no rule, and for what ``reasons``, by name."""
        by_reason: dict[str, list[str]] = {}
        for name, reason in reasons.items():
            by_reason.setdefault(reason, []).append(name)
        for reason, which in by_reason.items():
            message = sentence.format(listed(sorted(which)), reason)
            # A function has no modules that could be written otherwise.
            self.logger.log_once(logging.INFO if self.model.module is None else logging.WARNING, message)


def _first_size(x: Inputs) -> int:
    """The size of the first axis of the first input that has one; else 0."""
    return next((t.shape[0] for t in tensors_of(x) if t.ndim), 0)


def _placed(coupled: Coupling, y: Tensor) -> Coupling:
    """Where the outputs are, all but L in double precision."""
    C, K, L, weights = coupled.C, coupled.K, coupled.L, coupled.weights
    return Coupling(
        C.to(y.device, torch.float64),
        None if K is None else K.to(y.device, torch.float64),
        None if L is None else L.to(y.device),
        None if weights is None else weights.to(y.device, torch.float64),
        coupled.matched,
    )


def layers_of(model: Model, rules: Sequence[Rule] = ()) -> list[Block]:
    """The layers of the model, by the user's rules and those of the library."""
    if not isinstance(rules, Sequence):
        raise TypeError(f"rules is a list of layer rules, rules=[MyRule()], got {rules!r}")
    check_slots(**{f"rules[{at}]": (rule, Rule) for at, rule in enumerate(rules)})
    return partition(model, (*rules, *RULES))


def at(pb: Pullback, params: Mapping[str, Tensor]) -> Pullback:
    """The same model, batch, metric and targets at other parameters."""
    moved = Model(lambda θ, x: pb.model({**params, **θ}, x), {name: p.detach() for name, p in params.items()})
    return pullback(moved, pb.batch.x, pb.metric, target=pb.batch.target, memory=pb.memory)
