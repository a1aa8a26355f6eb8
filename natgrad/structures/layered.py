"""What Kronecker and EigenKronecker share: one block for every layer with a rule, and a fallback for the others.

On a layer with parameters W [c o i] the metric is diagonal in a basis Q ⊗ P, where Q and P are eigenvectors of two
symmetric factors: S [c o o] of the outputs and A [c i i] of the inputs. Parameters that no layer rule covers have
another structure, the *fallback*.
"""

from __future__ import annotations

import logging
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Integral
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate import fused
from natgrad.accelerate.devices import can_read, is_asynchronous, refuse_inference_mode
from natgrad.accelerate.inverses import (
    SymFactor,
    batch_by_size,
    diagonal,
    is_dense,
    layers_at_once,
    stacked,
    two_sided,
)
from natgrad.accelerate.moments import PendingAverages
from natgrad.accelerate.replay import Scalar
from natgrad.accelerate.roots import spectrum
from natgrad.accelerate.temporaries import at_once
from natgrad.errors import IncompatibleError, NonFiniteError, UncoveredError
from natgrad.geometry import Covector, Vector, check_kind, unflatten
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    eigvalsh,
    inverse_powered,
    is_rounding,
    powered,
    refuse_indefinite,
    refuse_rounding,
    refuse_singular,
)
from natgrad.log import listed
from natgrad.model import Model, check_slots, check_types
from natgrad.pullbacks.example_grads import ExampleGrads, slices
from natgrad.pullbacks.gradient import GradientSample, matrices
from natgrad.pullbacks.layer import LARGEST, Block, Sharing
from natgrad.pullbacks.layer_factors import FactorSink, Side
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.rules.features import Moment
from natgrad.structures.base import (
    FALLBACK,
    Cost,
    Inverse,
    Layout,
    Operator,
    StateError,
    Structure,
    Subset,
    check_shape,
)
from natgrad.structures.diagonal import Diagonal

T = TypeVar("T")
UNSEEN = "unseen"  # in a checkpoint, in place of the factors of a layer that no pass has used


# The structure.


@dataclass(frozen=True, repr=False)
class Layered(Structure):
    """Two factors for every layer, and another structure for the parameters that no layer rule covers."""

    by_layer: ClassVar[bool] = True
    sharing: Literal["expand", "reduce"] = "expand"
    fallback: Structure = field(default_factory=Diagonal)
    strict: bool = False
    largest: int = LARGEST
    bias: Literal["joint", "separate"] = "joint"
    power: float = field(default=1.0, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = type(self).__name__
        if self.bias not in ("joint", "separate"):
            raise ValueError(f'{name}(bias=…) is "joint" or "separate", not {self.bias!r}')
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f'{name}(sharing=…) is "expand" or "reduce", not {self.sharing!r}')
        check_slots(fallback=(self.fallback, Structure))
        check_types(
            largest=(self.largest, Integral, "a whole number of rows"), strict=(self.strict, bool, "True or False")
        )
        if not self.fallback.bounded:
            raise ValueError(
                f"{name}(fallback={self.fallback!r}) cannot be averaged over time: use Diagonal() or BlockDense()"
            )
        if self.fallback.power not in (1, self.power):
            raise ValueError(
                f"{name}(power={self.power:g}, fallback={self.fallback!r}) has two powers: the fallback takes that of "
                "the layers, so give it none"
            )
        if self.largest < 1:
            raise ValueError(f"{name}(largest=…) must be at least 1, got {self.largest}")

    def arrange(self, blocks: Sequence[Block]) -> list[Block]:
        """The layers as this structure keeps them."""
        joint = self.bias == "joint"
        return list(blocks) if joint else [piece for block in blocks for piece in block.separated()]

    def _arranged(self, pullback: Pullback) -> Pullback:
        return pullback if self.bias == "joint" else pullback.separated()

    def layer_cost(self, block: Block, *, exact: bool) -> Cost:
        """What a layer with a rule costs: a product of inverses or, if ``exact``, a scaling between two rotations."""
        shapes, numbers = self.layer_shapes(block), self.layer_elements(block)
        rotations = sum(math.prod(shape) for shape in shapes.values() if len(shape) == 3)
        return Cost(numbers + (rotations + block.size if exact else numbers), shapes)

    def cost(self, blocks: Sequence[Block], *, exact: bool = False, iterative: bool = False) -> Cost | None:
        costs = [self.layer_cost(block, exact=exact) for block in blocks if block.rule is not None]
        uncovered = [block for block in blocks if block.rule is None]
        below = self.fallback.cost(uncovered, exact=exact, iterative=iterative) if uncovered else None
        if uncovered and below is None:
            return None
        costs = costs if below is None else [*costs, below]
        return costs[0] if len(costs) == 1 else Cost(sum(cost.numbers for cost in costs))

    def title(self, block: Block) -> str:
        """What becomes of a layer, in a word for a table."""
        if block.rule is not None:
            return type(self).__name__
        return f"{type(self.fallback).__name__} (fallback)"

    def uncovered(self) -> str | None:
        if self.strict:
            return (
                "strict=True refuses them in the first pass that uses them by an operation without a rule "
                f"(strict=False: {self.fallback!r})"
            )
        return f"{super().uncovered()}, and their metric is {self.fallback!r}"

    def elements(self, pullback: Pullback) -> int:
        blocks, uncovered = split_layers(self._arranged(pullback), None)
        total = sum(map(self.layer_elements, blocks))
        return total + (self.fallback.elements(restrict(pullback, uncovered)) if uncovered else 0)

    def layer_elements(self, block: Block) -> int:
        """How many numbers are kept of a layer."""
        return sum(map(math.prod, self.layer_shapes(block).values()))

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]] | None:
        """None where a pass must show first what has factors."""
        blocks = self.arrange(blocks)
        if any(block.rule is None for block in blocks):
            return None
        return {f"{b.names[0]}/{letter}": shape for b in blocks for letter, shape in self.layer_shapes(b).items()}

    def layer_shapes(self, block: Block) -> dict[str, tuple[int, ...]]:
        """Of what is kept of a layer, by letter."""
        return dict(zip("SA", self.factor_shapes(block), strict=True))

    def factor_shapes(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of S and A of a layer."""
        (_, o, i), c = block.shape, block.factor_groups
        inputs, outputs = self.sharing_rule.only_diagonal(block)
        return (c, o) if outputs else (c, o, o), (c, i) if inputs else (c, i, i)

    def zeros(self, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """S and A of a layer that a pass did not use."""
        s, a = (torch.zeros(shape, dtype=dtype, device=block.device) for shape in self.factor_shapes(block))
        return s, a

    @property
    def sharing_rule(self) -> Sharing:
        """How positions that share a weight enter the factors."""
        return Sharing(self.sharing, self.largest)

    def fallback_estimate(self, split: LayerSplit, like: Operator | None = None) -> Operator | None:
        """The metric on the uncovered parameters, with the power of the layers."""
        if split.uncovered is None:
            return None
        return self.fallback.estimate(split.uncovered, like).with_power(self.power)

    def split(self, pullback: Pullback, like: Operator | None = None) -> LayerSplit:
        """The layers that have a rule, and the pullback to the other parameters. Checks ``strict`` and the memory.

        ``like``: the operator that the estimate will be averaged with.
        """
        refuse_inference_mode(type(self).__name__)
        if like is None:  # else there is one of this size already
            self.admit(pullback)
        pullback = self._arranged(pullback)
        blocks, uncovered = split_layers(pullback, like)
        unused = {name for block in pullback.unused.values() for name in block.names}
        late = _late(pullback, uncovered)
        self._check_strict([block for block in uncovered if block.names[0] not in unused], {**pullback.reasons, **late})
        if late:
            pullback.logger.log_once(logging.WARNING, f"{listed(late)}: the metric is {self.fallback!r}; {LATE}")
        self._log_diagonal(blocks, pullback)
        unseen = unused.intersection(name for block in blocks for name in block.names) if unused else ()
        return LayerSplit(tuple(blocks), frozenset(unseen), restrict(pullback, uncovered) if uncovered else None)

    def _log_diagonal(self, blocks: Sequence[Block], pullback: Pullback) -> None:
        """Log once which parameters of products have only a diagonal, why, and what to do about it."""
        by_reason: dict[str, list[str]] = {}
        diagonals = pullback.operations.diagonals
        for name in (name for block in blocks for name in block.names) if diagonals else ():
            if name in diagonals:
                by_reason.setdefault(diagonals[name], []).append(name)
        for reason, names in by_reason.items():
            pullback.logger.log_once(logging.WARNING, f"{listed(names)} {reason}")

    def _check_strict(self, uncovered: Sequence[Block], reasons: Mapping[str, str]) -> None:
        """With ``strict``, refuse parameters that no rule covers, with the ``reasons``, by name."""
        if self.strict and uncovered:
            names = [name for block in uncovered for name in block.names]
            why = "; ".join(dict.fromkeys(reason for name, reason in reasons.items() if name in names))
            raise UncoveredError(
                f"no layer rule covers {listed(names)}, and strict=True{': ' + why if why else ''}. Pass rules=[…] "
                f"with a rule for their module, or let them fall back to {self.fallback!r} with strict=False"
            )

    # The second moment of gradients: every matrix is a layer.

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """Every parameter of two or more axes is a layer; the others have the fallback."""
        out = matrices(blocks, self.largest)
        uncovered = [block for block in out if block.rule is None]
        if self.strict and uncovered:
            names = ", ".join(block.title for block in uncovered)
            raise UncoveredError(
                f"{names}: fewer than two axes, so no Kronecker factors of gradients, and strict=True. With "
                f"strict=False their metric is {self.fallback!r}"
            )
        if uncovered:
            self.fallback.gradient_blocks(uncovered)
        return out

    def split_gradient(
        self, sample: GradientSample, like: LayerOperator | None
    ) -> tuple[LayerSplit, Layout, Operator | None]:
        """The matrices, those without a gradient unseen, and the second moment of the other parameters.

        ``like``: what the estimate will be averaged with.
        """
        if like is not None:
            below = like.fallback
            of_fallback = None if below is None else self.fallback_of(sample.over(below.layout.like), below)
            return LayerSplit(like.blocks, sample.without - set(like.uncovered.names)), like.layout, of_fallback
        layout = Layout.of(sample.ω)
        blocks = tuple(block for block in sample.blocks if block.rule is not None)
        self.admit_gradient(blocks, layout, sample.memory)
        uncovered = [block for block in sample.blocks if block.rule is None]
        rest = sample.over([block.names[0] for block in uncovered])
        rest = replace(rest, blocks=_reposition(uncovered, rest.ω))
        of_fallback = self.fallback_of(rest) if uncovered else None
        return LayerSplit(blocks, sample.without - set(rest.ω)), layout, of_fallback

    def fallback_of(self, sample: GradientSample, like: Operator | None = None) -> Operator:
        """The second moment of the uncovered parameters, to the power of the layers."""
        return self.fallback.of_gradient(sample, like).with_power(self.power)

    def restored_split(
        self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
    ) -> tuple[LayerSplit, Operator | None]:
        """The layers that have factors among these tensors, and the operator on the other parameters."""
        blocks = self.arrange(blocks)
        optional = "" if any(key.endswith(("/Q", "/P")) for key in tensors) else "QP"  # a basis can be computed again
        for block in blocks:
            self._check_factors(block, tensors, optional)
        unseen = [block for block in blocks if f"{block.names[0]}/{UNSEEN}" in tensors]
        covered = [block for block in blocks if f"{block.names[0]}/S" in tensors or block in unseen]
        split = LayerSplit(tuple(covered), frozenset(name for block in unseen for name in block.names))
        below = fallback_tensors(tensors)
        names = {name for block in covered for name in block.names}
        if not below:
            missing = [name for name in model.params if name not in names]
            if missing:
                raise StateError(f"the factors of {', '.join(missing)} are missing in the metric of the state")
            return split, None
        uncovered = [block for block in blocks if block not in covered]
        params = {name: p for name, p in model.params.items() if name not in names}
        smaller = replace(model, params=params)
        try:
            fallback = self.fallback.restore(smaller, _reposition(uncovered, params), below)
        except StateError as error:
            raise StateError(f"{FALLBACK}{error}") from error
        return split, None if fallback is None else fallback.with_power(self.power)

    def _check_factors(self, block: Block, tensors: Mapping[str, Tensor], optional: str) -> None:
        """The tensors of a layer have their shapes, and are all there or none, but for the ``optional`` letters."""
        shapes = {f"{block.names[0]}/{letter}": shape for letter, shape in self.layer_shapes(block).items()}
        there = shapes.keys() & tensors.keys()
        for key, shape in shapes.items():
            if key in there:
                check_shape(f"{key} of the metric", tensors[key], shape)
            elif there and key[-1] not in optional:
                raise StateError(f"{key} of the metric is missing in the state")


@final
@dataclass(frozen=True)
class LayerSplit:
    """The layers with a rule, the parameters of those that a pass did not use, and the pullback to the others."""

    blocks: tuple[Block, ...]
    unseen: frozenset[str]
    uncovered: Pullback | None = None

    @property
    def used(self) -> list[Block]:
        """The layers that the pass used."""
        return [block for block in self.blocks if block.names[0] not in self.unseen]

    def of_used(self, of_all: Iterable[T]) -> list[T]:
        """What belongs to the used layers, out of what belongs to every layer."""
        return [t for block, t in zip(self.blocks, of_all, strict=True) if block.names[0] not in self.unseen]

    def of_all(self, of_used: Iterable[T], unused: Callable[[Block], T]) -> list[T]:
        """What belongs to every layer, from what belongs to the used ones, and ``unused`` for each of the others."""
        supply = iter(of_used)
        return [unused(block) if block.names[0] in self.unseen else next(supply) for block in self.blocks]


def split_layers(pullback: Pullback, like: Operator | None) -> tuple[list[Block], list[Block]]:
    """The layers that have a rule, and the other parameters.

    A layer that the pass did not use is what it is in ``like``. A parameter without a module that no pass has used yet
    is among the uncovered, and stays there when operations use it later.
    """
    layers = {block.names: block for block in like.layers} if like is not None and pullback.unused else {}
    below = like.fallback.layout.like if isinstance(like, LayerOperator) and like.fallback is not None else {}
    covered: list[Block] = []
    uncovered: list[Block] = []
    for layer in pullback.layers:
        fell_back = bool(below) and any(name in below for name in layer.names)
        if layer.names[0] in pullback.unused:
            unused = layers.get(layer.names, pullback.unused[layer.names[0]])
            layer = layer if fell_back or unused.rule is None else unused
        elif fell_back and is_operation(layer):
            layer = layer.without_rule()
        (uncovered if layer.rule is None else covered).append(layer)
    return covered, uncovered


LATE = (
    "no pass had used them when the metric was first estimated, and an average keeps its structure. Begin with a pass "
    "that uses them"
)


def _late(pullback: Pullback, uncovered: Sequence[Block]) -> dict[str, str]:
    """Why parameters have no rule although operations show one."""
    if not uncovered:
        return {}
    names = {name for block in uncovered for name in block.names}
    shown = (name for layer in pullback.layers if is_operation(layer) for name in layer.names)
    return {name: LATE for name in shown if name in names}


def restrict(pullback: Pullback, blocks: Sequence[Block]) -> Pullback:
    """The same pullback, to some of the parameters only, and without rules."""
    names = {name for block in blocks for name in block.names}
    params = {name: p for name, p in pullback.model.params.items() if name in names}
    model = replace(pullback.model, params=params)
    layers = _reposition(blocks, params)
    return replace(pullback, batch=replace(pullback.batch, model=model), layers=layers)


def _reposition(blocks: Sequence[Block], params: Mapping[str, Tensor]) -> list[Block]:
    """The blocks without their rules, at their positions among these parameters."""
    return _moved([block.without_rule() for block in blocks], params)


def _moved(blocks: Sequence[Block], params: Mapping[str, Tensor]) -> list[Block]:
    """The blocks at their positions among these parameters."""
    starts, at = {}, 0
    for name, p in params.items():
        starts[name] = at
        at += p.numel()
    out = []
    for block in blocks:
        slices = (replace(place, start=starts[name]) for name, place in zip(block.names, block.slices, strict=True))
        facets = (replace(facet, block=_moved([facet.block], params)[0]) for facet in block.facets)
        out.append(replace(block, slices=tuple(slices), facets=tuple(facets)))
    return out


# The operator.


@final
@dataclass(frozen=True)
class LayerSpectrum:
    """The eigenvalues of one layer: of its factors, S and A, and of its block of G, whatever the power."""

    names: tuple[str, ...]
    factors: Mapping[str, Tensor]  # [c d], ascending
    diagonals: Mapping[str, Tensor]  # [c d], of the factors
    values: Tensor  # [c o i]
    is_zero: Tensor  # [c], of which groups the gradients are rounding beside the largest


class LayerOperator(Operator):
    """A metric with one block for every layer, on W [c o i], which is diagonal in a basis Q ⊗ P of the layer.

    A layer that the forward pass did not use (an expert, a block that was dropped) is zero, and its parameters are
    ``unseen``: an average counts the passes that used a layer. ``fallback`` is the metric on the parameters that no
    layer rule covers, in another structure and of the same power.
    """

    damps_per_block: ClassVar[bool] = True
    fields: ClassVar[Mapping[str, str]] = {"S": "left", "A": "right"}  # of the averaged tensors, by their letters
    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[SymFactor, ...]  # S [c o o] of every layer, or its diagonal [c o]
    right: tuple[SymFactor, ...]  # A [c i i], or its diagonal [c i]
    fallback: Operator | None
    unseen: frozenset[str]
    positions: tuple[int | Tensor, ...]  # of every layer, that A is a mean over: [c] or a number; () of an average
    elsewhere: Tensor | None  # the largest root mean square [] of a gradient in other processes

    @abstractmethod
    def act(self, b: int, w: Tensor) -> Tensor:
        """G^p W [c o i] of the layer number b."""

    @abstractmethod
    def layer_diagonal(self, b: int) -> Tensor:
        """The diagonal of the layer's block of G^p, packed [c o i]."""

    @abstractmethod
    def layer_values(self, b: int, s: Tensor, a: Tensor) -> Tensor:
        """The eigenvalues [c o i] of the block of G, in double precision; those of S and A are s [c o] and a [c i]."""

    @abstractmethod
    def spectrum(self, damping: Damping = 0.0) -> tuple[list[Tensor], Basis]:
        """The eigenvalues [c o i] of every block of G + λ, and the basis they belong to.

        With relative damping a group that is zero stays zero.
        """

    @property
    @abstractmethod
    def gradient_sizes(self) -> list[Tensor]:
        """Of every layer the root mean squares [c] of the gradients of its groups, as G has them (``is_rounding``)."""

    @property
    def beside(self) -> Tensor | None:
        """The largest root mean square [] of a gradient outside of these layers; None where there is nothing."""
        if self.fallback is None:
            return self.elsewhere
        below = self.fallback.with_power(1.0).diagonal().clamp(min=0).amax().sqrt()
        return below if self.elsewhere is None else torch.maximum(below, self.elsewhere)

    @property
    def zero_groups(self) -> list[Tensor]:
        """Which groups [c] of every layer are zero beside the others, and beside the fallback (``is_rounding``)."""
        return rounding_groups(self.gradient_sizes, self.beside)

    def with_power(self, power: float) -> Self:
        out = super().with_power(power)
        if out is self or self.fallback is None:
            return out
        return replace(out, fallback=self.fallback.with_power(power))  # type: ignore[type-var]  # a dataclass

    @property
    def by_letter(self) -> Mapping[str, Sequence[Tensor | None]]:
        """All tensors of every layer: S and A, and with a basis Q, P and D."""
        return self.averaged_letters

    @property
    def averaged_letters(self) -> Mapping[str, Sequence[Tensor]]:
        """The tensors of which an average is taken."""
        return {letter: getattr(self, name) for letter, name in self.fields.items()}

    def only(self, numbers: Sequence[int], *, fallback: bool) -> Self:
        """The same metric of these layers alone, and of the fallback, or not."""
        below = self.fallback if fallback else None
        names = {name for b in numbers for name in self.blocks[b].names}
        names |= set() if below is None else set(below.layout.like)
        like = {name: t for name, t in self.layout.like.items() if name in names}
        blocks = tuple(_moved([self.blocks[b] for b in numbers], like))
        sides = {name: tuple(getattr(self, name)[b] for b in numbers) for name in self.fields.values()}
        changes = {**sides, **self._basis_of(numbers), "layout": Layout(like, self.layout.dtype), "blocks": blocks}
        return replace(self, **changes, fallback=below, unseen=self.unseen & names, positions=())  # type: ignore[type-var]

    def _basis_of(self, numbers: Sequence[int]) -> Mapping[str, Any]:
        """What there is of these layers beside averages."""
        return {}

    def with_tensors(self, tensors: Mapping[str, Tensor]) -> Self:
        """With these averages, by their names in ``averaged()``; those of the fallback are written in place."""
        names = [block.names[0] for block in self.blocks]
        sides = {side: tuple(tensors[f"{name}/{letter}"] for name in names) for letter, side in self.fields.items()}
        below = None if self.fallback is None else self.fallback.averaged()
        for key, t in (below or {}).items():
            t.copy_(tensors[FALLBACK + key])
        return replace(self, **sides)  # type: ignore[type-var]

    def without_tensors(self) -> Self:
        """Which layers there are, and in what basis."""
        return replace(self, **dict.fromkeys(self.fields.values(), ()), positions=())  # type: ignore[type-var]

    @cached_property
    def addresses(self) -> tuple[int, ...]:
        """Where all of them lie, and where their averages are updated."""
        return tuple(0 if t is None else t.data_ptr() for side in self.by_letter.values() for t in side)

    @cached_property
    def uncovered(self) -> Subset:
        """The parameters of the fallback among all."""
        return Subset.of(self.layout, [] if self.fallback is None else list(self.fallback.layout.like))

    def saw(self, b: int) -> bool:
        """Whether a pass has used the layer number b."""
        return self.blocks[b].names[0] not in self.unseen

    def product(self, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for b, block in enumerate(self.blocks):
            block.unpack(self.act(b, block.pack(v)), out)
        if self.fallback is not None:
            self.uncovered.put(self.fallback.product(self.uncovered.take(v)), out)
        return out

    def diagonal(self) -> Tensor:
        out = self._empty(self.layout.size)
        for b, block in enumerate(self.blocks):
            block.unpack(self.layer_diagonal(b), out)
        if self.fallback is not None:
            self.uncovered.put(self.fallback.diagonal(), out)
        return out

    def dense(self) -> Tensor:
        out = self._empty(self.layout.size, self.layout.size).zero_()
        for b, block in enumerate(self.blocks):
            c, o, i = block.shape
            unit = torch.eye(o * i, dtype=out.dtype, device=out.device).view(-1, 1, o, i).expand(-1, c, o, i)
            for index, rows in zip(block.index.view(c, -1), self.act(b, unit).flatten(2).unbind(1), strict=True):
                out[index[:, None], index] = rows
        if self.fallback is not None:
            index = self.uncovered.index(out.device)
            out[index[:, None], index] = self.fallback.dense()
        return out

    def _logdet(self, damping: Damping) -> Tensor:
        total = self._empty().zero_()
        for block, values in zip(self.blocks, self.spectrum(damping)[0], strict=True):
            if isinstance(damping, Relative) or damping == 0:
                self.refuse_singular(block, values, damping)
                total = total + values.log().sum()
            else:  # G is a mean of squares: what is below λ is rounding
                total = total + values.clamp(min=damping).log().sum()
        if damping == 0:
            self.refuse_rounding()
        return total if self.fallback is None else total + self.fallback._logdet(self._beside_layers(damping))

    def refuse_singular(self, block: Block, damped: Tensor, damping: Damping) -> None:
        """Raise, by the name of its layer, if one of the eigenvalues [c o i] of G + λ is zero up to rounding."""
        what = f"the block {block.title} of the metric"
        check_finite(damped, what)
        refuse_singular(damped.flatten(), what=what, damping=damping, rtol=self._rounding(block))

    def refuse_rounding(self) -> None:
        """Raise, by the name of its layer, if a group is zero beside the others, or a parameter of the fallback is."""
        if not self.blocks:
            return
        sizes, beside = self.gradient_sizes, self.beside
        largest = torch.cat(sizes if beside is None else [*sizes, beside.view(1)]).amax()
        for block, of_layer in zip(self.blocks, sizes, strict=True):
            refuse_rounding(of_layer.square(), f"the block {block.title} of the metric", largest)
        if self.fallback is not None:
            refuse_rounding(self.fallback.with_power(1.0).diagonal(), "the metric of the fallback", largest)

    # Inverses.

    @property
    def inverts_at_once(self) -> bool:
        """Whether an inverse takes less time than to send it to another process, and cannot fail."""
        return False

    def with_new_basis(self) -> Operator:
        """The same metric, with what is amortised over many estimates (eigenvectors) computed anew."""
        return self

    def fallback_inverse(self, damping: Damping) -> Inverse | None:
        """The inverse of the metric on parameters without a layer rule; None if there are none."""
        return None if self.fallback is None else self.fallback.inverse(self._beside_layers(damping))

    def _beside_layers(self, damping: Damping) -> Damping:
        """The damping of the fallback, whose parameters may be rounding beside the layers."""
        largest = self._largest_layer
        return damping if largest is None or not isinstance(damping, Relative) else damping.beside(largest.view(1))

    @property
    def largest_gradient(self) -> Tensor | None:
        """The largest root mean square [] of a gradient."""
        sizes = [size for size in (self._largest_layer, self.beside) if size is not None]
        return torch.stack(sizes).amax() if sizes else None

    @property
    def _largest_layer(self) -> Tensor | None:
        """The largest root mean square [] of a gradient outside of the fallback."""
        sizes = [*self.gradient_sizes, *([] if self.elsewhere is None else [self.elsewhere.view(1)])]
        return torch.cat(sizes).amax() if sizes else None

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None:
            self.refuse("Pinv(weight=…)", "a weight is no product of two factors; leave it out, or use BlockDense")
        fallback = self.fallback
        largest = self._largest_layer
        if fallback is not None and largest is not None:  # what is rounding beside the layers is zero
            kept = fallback.map(lambda w: w.masked_fill(is_rounding(w.abs().sqrt(), largest), 0.0))
            fallback = kept.with_power(self.power)
        below = None if fallback is None else fallback.pseudo_inverse(self._beside_layers(damping), rtol, None)
        rtol = max(map(self._rounding, self.blocks), default=0.0) if rtol is None else rtol
        return self.spectral_inverse(below, damping, rtol)

    def spectral_inverse(
        self, fallback: Inverse | None, damping: Damping, rtol: float | None = None
    ) -> SpectralInverse:
        """(G + λ)^-p by the eigenvalues; with ``rtol`` a pseudo-inverse, which drops the small ones."""
        damped, basis = self.spectrum(damping)
        if damping == 0:
            pairs = zip(damped, self.zero_groups, strict=True)
            damped = [d.masked_fill(zero[:, None, None], 0.0) for d, zero in pairs]
        for block, values in zip(self.blocks, damped, strict=True):
            if can_read(values):
                check_finite(values, f"the block {block.title} of the metric")
        scales = tuple(inverse_scales(layer, self.power, damping, rtol) for layer in damped)
        return SpectralInverse.of(self.layout, self.blocks, fallback, basis, scales)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        fallback = None if self.fallback is None else self.fallback.inverse_from(fallback_tensors(tensors))
        if self.fallback is not None and fallback is None:
            return None
        return self.layers_from(tensors, fallback)

    def layers_from(self, tensors: Mapping[str, Tensor], fallback: Inverse | None) -> Inverse | None:
        """The inverse with these tensors and this inverse on the uncovered parameters."""
        if any(f"{block.names[0]}/d" not in tensors for block in self.blocks[:1]):
            return None
        q, p = (tuple(tensors.get(f"{block.names[0]}/{side}") for block in self.blocks) for side in "QP")
        d = tuple(tensors[f"{block.names[0]}/d"] for block in self.blocks)
        for block, scale in zip(self.blocks, d, strict=True):
            check_shape(f"{block.names[0]}/d of the inverse of the metric", scale, block.shape)
        return SpectralInverse.of(self.layout, self.blocks, fallback, Basis(q, p), d)

    # Averages.

    def lerp(self, other: Operator, weight: float) -> Self:
        """A and S are averaged, each by itself, as in Martens and Grosse (2015, section 5)."""
        self.same_kind(other)
        there = cast(LayerOperator, other)
        self.same_layers(there.blocks)
        sides = ((self.left, there.left), (self.right, there.right))
        left, right = (self.layers_lerp(there, old, new, weight) for old, new in sides)
        fallback = None if self.fallback is None else self.fallback.lerp(cast(Operator, there.fallback), weight)
        return replace(  # type: ignore[type-var]  # a dataclass
            self, left=left, right=right, fallback=fallback, unseen=self.unseen & there.unseen, positions=()
        )

    def layers_lerp(
        self, other: LayerOperator, old: Sequence[Tensor], new: Sequence[Tensor], weight: float
    ) -> tuple[Tensor, ...]:
        """For every layer the mean of its two tensors, or the one of the operator that has seen it."""
        if not self.blocks:
            return ()
        mean = fused.lerp(old, new, weight)
        for b, block in enumerate(self.blocks):
            if block.rule is not None and block.rule.stacked:
                mean[b] = old[b].lerp(new[b], group_weights(self.right[b], other.right[b], weight, old[b].ndim))
        choices = enumerate(zip(old, new, mean, strict=True))
        return tuple((m if self.saw(b) else y) if other.saw(b) else x for b, (x, y, m) in choices)

    def pool(self, other: Operator, weight: float) -> Self:
        """With every A weighted by its positions. That of a tied weight is none of positions alone, and has ``w``."""
        mean, there = self.lerp(other, weight), cast(LayerOperator, other)
        right, counts = list(mean.right), list(zip(self.positions, there.positions, strict=True))
        for b, (old, new) in enumerate(counts):
            block = self.blocks[b]
            if not block.facets and (isinstance(old + new, Tensor) or block.rule is None or not block.rule.stacked):
                total = torch.as_tensor(old + new, dtype=right[b].dtype, device=right[b].device)
                share = (new / total.clamp(min=1)).view(-1, *[1] * (right[b].ndim - 1))
                right[b] = self.right[b].lerp(there.right[b], share)
        fallback = None if self.fallback is None else self.fallback.pool(cast(Operator, there.fallback), weight)
        return replace(  # type: ignore[type-var]  # a dataclass
            mean, right=tuple(right), fallback=fallback, positions=tuple(old + new for old, new in counts)
        )

    def absorbed(self, fallback: Operator | None, weight: Scalar, unseen: frozenset[str]) -> Self:
        """The average after its layers were updated in place, with the estimate on the uncovered parameters."""
        if self.fallback is not None and fallback is not None:
            fallback = self.fallback.merged(fallback, float(weight))
        if fallback is self.fallback and self.unseen <= unseen:
            return self
        return replace(self, fallback=fallback, unseen=self.unseen & unseen)  # type: ignore[type-var]  # a dataclass

    def same_layers(self, blocks: Iterable[Block]) -> None:
        """An estimate must have the same layers, packed alike: ``x @ W`` has for inputs what are outputs of Wx."""
        here, there = {b.names: b for b in self.blocks}, {b.names: b for b in blocks}
        turned = [names for names in here.keys() & there.keys() if not packed_alike(here[names], there[names])]
        if here.keys() != there.keys() or turned:
            names = ", ".join(sorted({name for layer in (here.keys() ^ there.keys()).union(turned) for name in layer}))
            raise IncompatibleError(
                f"the layers of {names} were seen by their rule in one batch and not in another: they are called in "
                "different ways. Leave them to the fallback, with a rule that does not cover them, or call them alike"
            )

    # Checkpoints and reports.

    @property
    def layers(self) -> tuple[Block, ...]:
        return self.blocks

    def layer_spectra(self) -> Iterator[LayerSpectrum]:
        """The eigenvalues of the factors of every layer."""
        zeros = self.zero_groups
        for b, block in enumerate(self.blocks):
            s, a = self.left[b].double(), self.right[b].double()
            factors = {"S": eigenvalues(s), "A": eigenvalues(a)}
            values = self.layer_values(b, factors["S"], factors["A"])
            yield LayerSpectrum(block.names, factors, {"S": diagonal(s), "A": diagonal(a)}, values, zeros[b])

    def tensors(self) -> dict[str, Tensor]:
        """A layer that no pass has used has a mark in place of its tensors."""
        unseen = [block.names[0] for b, block in enumerate(self.blocks) if not self.saw(b)]
        out = {key: t for key, t in self._named(self.by_letter).items() if key.rpartition("/")[0] not in unseen}
        return out | {f"{name}/{UNSEEN}": self._empty(0) for name in unseen}

    def averaged(self) -> dict[str, Tensor] | None:
        """All but the basis, in which both are, and what both are weighed with."""
        if self.fallback is not None and self.fallback.averaged() is None:
            return None
        return self._named(self.averaged_letters)

    def nonnegative(self) -> dict[str, Tensor]:
        below = {} if self.fallback is None else self.fallback.nonnegative()
        sides = {"S": list(map(diagonal, self.left)), "A": list(map(diagonal, self.right))}
        return in_fallback(below) | layer_tensors(self.blocks, {**self.averaged_letters, **sides})

    def _named(self, by_letter: Mapping[str, Sequence[Tensor | None]]) -> dict[str, Tensor]:
        below = {} if self.fallback is None else self.fallback.tensors()
        return in_fallback(below) | layer_tensors(self.blocks, by_letter)

    def _rounding(self, block: Block) -> float:
        """The relative size of eigenvalues that are noise. Each side has the noise of its size."""
        return sum(block.shape[1:]) * torch.finfo(self.layout.dtype).eps

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.layout.dtype, device=self.device)

    @property
    def device(self) -> torch.device:
        return (self.blocks[0] if self.blocks else cast(Operator, self.fallback)).device


def packed_alike(block: Block, other: Block) -> bool:
    """Whether W [c o i] has every number at the same place; a rule that is the same packs alike."""
    if block.shape != other.shape:
        return False
    return block.rule == other.rule or torch.equal(block.index, other.index)


def group_weights(old: Tensor, new: Tensor, weight: Scalar, axes: int) -> Tensor:
    """The weight [c 1 …] of each group of a stacked layer in a moving average, from A of the average and A of a pass.

    An expert that no row of the pass used keeps its average (weight 0); one that is used for the first time has no
    average yet (weight 1). Either has A = 0, as a layer without rows has. The weight has this number of axes.

    >>> group_weights(torch.ones(3, 1, 1), torch.tensor([2.0, 0.0, 2.0]).view(3, 1, 1), 0.25, 2).T
    tensor([[0.2500, 0.0000, 0.2500]])
    """
    used, before = new.flatten(1).any(1), old.flatten(1).any(1)
    weights = torch.where(before, torch.as_tensor(weight, dtype=new.dtype, device=new.device), 1.0) * used
    return weights.view(-1, *[1] * (axes - 1))


def layer_tensors(blocks: Sequence[Block], by_letter: Mapping[str, Iterable[Tensor | None]]) -> dict[str, Tensor]:
    """Tensors of every layer, by its first parameter and their letter."""
    pairs = ((block, letter, t) for letter, side in by_letter.items() for block, t in zip(blocks, side, strict=True))
    return {f"{block.names[0]}/{letter}": t for block, letter, t in pairs if t is not None}


def in_fallback(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors of the fallback, by their names in the whole."""
    return {FALLBACK + key: t for key, t in tensors.items()}


def fallback_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of the fallback, by their names there."""
    return {key.removeprefix(FALLBACK): t for key, t in tensors.items() if key.startswith(FALLBACK)}


def inverse_scales(damped: Tensor, power: float, damping: Damping, rtol: float | None) -> Tensor:
    """(G + λ)^-p [c o i] of the eigenvalues of G + λ in a layer; with ``rtol``, 0 for those below rtol of the largest.

    With relative damping they are zero where a group is: so is its step.
    """
    if rtol is None:
        least = 0.0 if isinstance(damping, Relative) else damping  # what is below is rounding
        return inverse_powered(damped.clamp(min=least), power)
    refuse_indefinite(damped.flatten(), rtol, damping, "the metric")
    # All groups have one largest eigenvalue: a group that should be zero (the bias of the keys of attention) is noise
    # beside the others.
    return torch.where(damped > rtol * damped.amax(), damped, torch.inf).pow(-power)


def rounding_groups(sizes: Sequence[Tensor], beside: Tensor | None) -> list[Tensor]:
    """Which groups [c] of every layer are zero beside those of all layers, and this size [] (``is_rounding``)."""
    return list(is_rounding(torch.cat(list(sizes)), beside).split([len(t) for t in sizes])) if sizes else []


# Inverses.


class LayerInverse(Inverse):
    """An inverse that works layer by layer, on W [c o i], with one of its own for the uncovered parameters."""

    layout: Layout
    blocks: tuple[Block, ...]
    fallback: Inverse | None

    @abstractmethod
    def apply(self, batch: int, columns: list[Tensor]) -> list[Tensor]:
        """The solutions for the layers of a batch: of W [b·c o i], given by blocks of columns [b·c o j] (weight, bias).

        The blocks are not changed.
        """

    @abstractmethod
    def stacks_with(self, b: int) -> object:
        """A key: layers are solved as one batch only if their shapes and these keys are equal."""

    @cached_property
    def batches(self) -> tuple[tuple[int, ...], ...]:
        """Numbers of layers of one shape that are solved together. Largest first: later, results occupy more memory."""
        groups: dict[object, list[int]] = defaultdict(list)
        for b, block in enumerate(self.blocks):
            groups[block.shape, self.stacks_with(b)].append(b)
        batches: list[tuple[int, ...]] = []
        for group in groups.values():
            block = self.blocks[group[0]]
            count = layers_at_once(block.device, block.size * self.layout.dtype.itemsize)
            batches += [tuple(group[at : at + count]) for at in range(0, len(group), count)]
        return tuple(sorted(batches, key=lambda batch: -len(batch) * self.blocks[batch[0]].size))

    @cached_property
    def uncovered(self) -> Subset:
        """The parameters of the fallback among all."""
        return Subset.of(self.layout, [] if self.fallback is None else list(self.fallback.layout.like))

    def solve(self, ω: Tensor) -> Tensor:
        v = self._solve_layers(unflatten(ω, self.layout.like))
        if self.fallback is not None:
            v |= unflatten(self.fallback.solve(self.uncovered.take(ω)), self.fallback.layout.like)
        return torch.cat([v[name].reshape(-1) for name in self.layout.like])

    def sharp(self, ω: Covector, pairs: list[tuple[Tensor, Tensor]] | None = None) -> Vector:
        """ω♯, in the precision of every parameter. Appends the tensors of ω and ω♯ to ``pairs``."""
        check_kind(ω, Covector, "inverse.sharp(ω)")
        named = dict(ω.items())
        self.layout.check(named)
        v = self._solve_layers(named, pairs)
        if self.fallback is not None:
            below = self.fallback.sharp(Covector({name: named[name] for name in self.uncovered.names}))
            v |= below
            if pairs is not None:
                pairs += [(named[name], t.to(self.layout.dtype)) for name, t in below.items()]
        return Vector({name: v[name].to(t.dtype) for name, t in self.layout.like.items()})

    def sharp_with_pairing(self, ω: Covector) -> tuple[Vector, Tensor]:
        pairs: list[tuple[Tensor, Tensor]] = []
        return self.sharp(ω, pairs), fused.pairing(pairs)

    def _solve_layers(
        self, ω: Mapping[str, Tensor], pairs: list[tuple[Tensor, Tensor]] | None = None
    ) -> dict[str, Tensor]:
        """ω♯ on the layers, in the precision of the metric. Appends the tensors of ω and ω♯ to ``pairs``."""
        v: dict[str, Tensor] = {}
        ω = dict(ω.items())  # a ``Covector`` is looked up in Python
        for k, batch in enumerate(self.batches):
            columns, (c, o, _), count = self._columns[k], self.blocks[batch[0]].shape, len(batch)
            if columns is None:
                given = [stacked([self.blocks[b].packed(ω).to(self.layout.dtype) for b in batch])]
                solved = self.apply(k, given)
                for b, w in zip(batch, solved[0].split(c), strict=True):
                    v.update(self.blocks[b].unpacked(w))
            else:
                given = [ω[names[0]] if count == 1 else torch.stack([ω[name] for name in names]) for names in columns]
                given = [w.to(self.layout.dtype) for w in given]
                fans = [self.layout.like[names[0]].shape[1:].numel() for names in columns]
                solved = self.apply(k, [w.reshape(count * c, o, i) for w, i in zip(given, fans, strict=True)])
                solved = [u.reshape(w.shape) for w, u in zip(given, solved, strict=True)]
                for names, u in zip(columns, solved, strict=True):
                    v.update(zip(names, [u] if count == 1 else u.unbind(), strict=True))
            if pairs is not None:
                pairs += zip(given, solved, strict=True)
        return v

    @cached_property
    def _columns(self) -> list[list[tuple[str, ...]] | None]:
        """Of every batch, the names of the parameters that lie side by side in W; None where a rule packs otherwise."""
        out: list[list[tuple[str, ...]] | None] = []
        for batch in self.batches:
            columns = [self.blocks[b].columns(self.layout.like) for b in batch]
            layers = [layer for layer in columns if layer is not None]
            shapes = {tuple(self.layout.like[name].shape for name in layer) for layer in layers}
            out.append(list(zip(*layers, strict=True)) if len(layers) == len(columns) and len(shapes) == 1 else None)
        return out

    def fallback_inverse_tensors(self) -> dict[str, Tensor]:
        return {} if self.fallback is None else in_fallback(self.fallback.tensors())

    def nonnegative(self) -> dict[str, Tensor]:
        return {} if self.fallback is None else in_fallback(self.fallback.nonnegative())

    def copy_into(self, new: Inverse) -> Inverse:
        """The new inverse, copied into the memory of this one if that is possible."""
        if new is self or type(new) is not type(self):
            return new
        old, tensors = self.tensors(), new.tensors()
        if {key: t.shape for key, t in old.items()} != {key: t.shape for key, t in tensors.items()}:
            return new
        changed = [key for key, t in old.items() if t.data_ptr() != tensors[key].data_ptr()]
        if changed:
            fused.copy_([old[key] for key in changed], [tensors[key] for key in changed])
        return self

    # What the optimizer asks; a subclass whose inverse is computed on the device may fail there.


@final
@dataclass(frozen=True, repr=False)
class SpectralInverse(LayerInverse):
    """v = Q (d ⊙ QᵀWP) Pᵀ with the eigenvectors Q of S and P of A, and the inverse d of each damped eigenvalue."""

    layout: Layout
    blocks: tuple[Block, ...]
    fallback: Inverse | None
    left: tuple[Rotation, ...]  # Q [c o o]; None for the axes themselves
    right: tuple[Rotation, ...]  # P [c i i]
    scales: tuple[Tensor, ...]  # d [c o i]

    @staticmethod
    def of(
        layout: Layout, blocks: tuple[Block, ...], fallback: Inverse | None, basis: Basis, scales: Sequence[Tensor]
    ) -> SpectralInverse:
        """Layers of one shape lie side by side, and so are solved at once."""
        out = SpectralInverse(layout, blocks, fallback, basis.left, basis.right, tuple(scales))
        sides: list[list[Rotation]] = [list(basis.left), list(basis.right), list(scales)]
        for batch in out.batches:
            for side in sides:
                if (stack := stacked_side(side, batch)) is not None:
                    for b, t in zip(batch, stack.split(len(stack) // len(batch)), strict=True):
                        side[b] = t
        q, p, d = map(tuple, sides)
        return replace(out, left=q, right=p, scales=cast(tuple[Tensor, ...], d))

    def stacks_with(self, b: int) -> object:
        return self.blocks[b].factor_groups, self.left[b] is None, self.right[b] is None

    @cached_property
    def stacks(self) -> list[tuple[Rotation, Rotation, Tensor]]:
        """Q [b·c o o], P [b·c i i] and d [b·c o i] of every batch."""
        out = []
        for batch in self.batches:
            Q, P = (stacked_side(side, batch) for side in (self.left, self.right))
            out.append((Q, P, stacked([self.scales[b] for b in batch])))
        return out

    def apply(self, batch: int, columns: list[Tensor]) -> list[Tensor]:
        (Q, P, d), w = self.stacks[batch], join_columns(columns)
        turned = two_sided(None if Q is None else Q.mT, w, None if P is None else P.mT)
        # In place, unless that is the covector, or a derivative is recorded.
        turned = turned * d if turned is w or turned.requires_grad else turned.mul_(d)
        return split_columns(two_sided(Q, turned, P), columns)

    @property
    def root_size(self) -> int:
        return sum(self._sizes)

    def root_times(self, ξ: Tensor) -> Tensor:
        """Q (√d ⊙ Z) Pᵀ of every layer."""
        *layers, below = ξ.split(self._sizes, dim=1)
        out = ξ.new_empty(len(ξ), self.layout.size)
        for block, q, p, d, z in zip(self.blocks, self.left, self.right, self.scales, layers, strict=True):
            block.unpack(rotate_back(q, z.view(-1, *block.shape) * d.sqrt(), p), out)
        if self.fallback is not None:
            self.uncovered.put(self.fallback.root_times(below), out)
        return out

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        """√d ⊙ QᵀWP of every layer."""
        sides = zip(self.blocks, self.left, self.right, self.scales, strict=True)
        layers = [(rotate(q, block.pack(ω), p) * d.sqrt()).flatten(1) for block, q, p, d in sides]
        if self.fallback is not None:
            layers.append(self.fallback.root_transpose_times(self.uncovered.take(ω)))
        return torch.cat(layers, dim=1)

    @without_autocast
    def output_covariance(self, pullback: Pullback) -> Tensor:
        """Layer by layer, from g and a: rows of parameters that are packed otherwise, or in no layer, are formed."""
        layers = {block.names for block in self.blocks}
        if any((name,) in layers for layer in pullback.layers if len(layer.names) > 1 for name in layer.names):
            pullback = pullback.separated()
        given, factors = pullback.blocks, pullback.collect()
        total = factors[0].g.new_zeros(len(factors[0].a), *[len(factors[0].g)] * 2)
        left, others = {block.names: number for number, block in enumerate(given)}, list[int]()
        for b, (block, q, p, d) in enumerate(zip(self.blocks, self.left, self.right, self.scales, strict=True)):
            number = left.get(block.names)
            if number is not None and packed_alike(block, given[number]):
                total += _covariance(factors[left.pop(block.names)], q, p, d)
            else:
                others.append(b)
        if not left:
            return total
        Q, P = (tuple(side[b] for b in others) for side in (self.left, self.right))
        blocks, D = tuple(self.blocks[b] for b in others), tuple(self.scales[b] for b in others)
        rest = SpectralInverse(self.layout, blocks, self.fallback, Q, P, D)
        return total + rest.covariance_of([given[n] for n in left.values()], [factors[n] for n in left.values()])

    @property
    def _sizes(self) -> list[int]:
        """Numbers of white noise for every layer, and for the uncovered parameters."""
        return [block.size for block in self.blocks] + [0 if self.fallback is None else self.fallback.root_size]

    def tensors(self) -> dict[str, Tensor]:
        by_letter = {"Q": self.left, "P": self.right, "d": self.scales}
        return self.fallback_inverse_tensors() | layer_tensors(self.blocks, by_letter)

    def nonnegative(self) -> dict[str, Tensor]:
        return super().nonnegative() | layer_tensors(self.blocks, {"d": self.scales})


def join_columns(columns: Sequence[Tensor]) -> Tensor:
    """W [c o i] from blocks of its columns [c o j]; a single one is itself, not a copy."""
    return columns[0] if len(columns) == 1 else torch.cat(list(columns), dim=-1)


def split_columns(w: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """The inverse of ``join_columns``."""
    return [w] if len(columns) == 1 else list(w.split([column.shape[-1] for column in columns], dim=-1))


# Bases.


Rotation: TypeAlias = Tensor | None  # columns [c d d]; None for the axes themselves


@final
@dataclass(frozen=True, eq=False)
class Basis:
    """Q of the outputs and P of the inputs of every layer. Operators that share the object have the same basis."""

    left: tuple[Rotation, ...]  # Q [c o o]
    right: tuple[Rotation, ...]  # P [c i i]

    @staticmethod
    def of_sides(sides: Sequence[tuple[Rotation, Rotation]]) -> Basis:
        """Of Q and P of every layer."""
        return Basis(tuple(q for q, _ in sides), tuple(p for _, p in sides))

    @staticmethod
    def of(left: Sequence[SymFactor], right: Sequence[SymFactor]) -> Basis:
        """The eigenvectors of S and of A."""
        return Basis(tuple(spectra(left)[1]), tuple(spectra(right)[1]))

    @property
    def sides(self) -> list[tuple[Rotation, Rotation]]:
        """Q and P of every layer."""
        return list(zip(self.left, self.right, strict=True))

    def change_basis(self, scales: Sequence[Tensor], old: Basis) -> tuple[Tensor, ...]:
        """D' = (U∘U) D (V∘V)ᵀ, U = Q'ᵀQ, V = P'ᵀP: the diagonal, in this basis, of what is D [c o i] in another."""
        if old is self:
            return tuple(scales)
        pairs = zip(self.sides, old.sides, scales, strict=True)
        return tuple(two_sided(_overlap(Q, q), d, _overlap(P, p)) for (Q, P), (q, p), d in pairs)


def stacked_side(side: Sequence[Rotation], numbers: Sequence[int]) -> Rotation:
    """The rotations [b·c d d] of some layers of one shape on one side, or None if they have none."""
    present = [q for q in (side[b] for b in numbers) if q is not None]
    return stacked(present) if present else None


def rotate_rows(x: Tensor, q: Rotation) -> Tensor:
    """x [*lead c d] in the coordinates of a basis [c d d], or of one [1 d d] for all groups."""
    if q is None:
        return x
    return x @ q[0] if q.shape[0] == 1 else torch.einsum("...cd,cde->...ce", x, q)


def turns_factors(f: ExampleGrads, q: Rotation, p: Rotation) -> bool:
    """Whether it is less work to turn g and a at every position than rows Σ_r g aᵀ."""
    (k, _, r, _, o), i = f.g.shape, f.a.shape[3]
    positions = r * (k * o * o * (q is not None) + i * i * (p is not None))
    return r == 1 or positions <= k * o * i * (o * (q is not None) + i * (p is not None))


def _covariance(f: ExampleGrads, q: Rotation, p: Rotation, d: Tensor) -> Tensor:
    """R_n (Q ⊗ P) diag(d) (Q ⊗ P)ᵀ R_nᵀ [n k l] of every example, for the rows of a layer and d [c o i]."""
    if turns_factors(f, q, p):
        return ExampleGrads(rotate_rows(f.a, p), rotate_rows(f.g, q)).weighed_gram(d)
    out = []
    for some in slices(len(f.a), at_once(f.g.shape[0] * d.numel())):
        rows = rotate(q, f.at(some).rows().unflatten(2, d.shape), p)
        half = (rows * d.sqrt()).flatten(2).transpose(0, 1)
        out.append(half @ half.mT)
    return torch.cat(out)


def rotate(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Qᵀ W P: the coordinates of W [*batch c o i] in the basis."""
    w = w if q is None else q.mT @ w
    return w if p is None else w @ p


def rotate_back(q: Rotation, w: Tensor, p: Rotation) -> Tensor:
    """Q W Pᵀ: the inverse of ``rotate``."""
    w = w if q is None else q @ w
    return w if p is None else w @ p.mT


def squares_of(q: Rotation) -> Rotation:
    """Q∘Q."""
    return None if q is None else q.square()


def spectra(side: Sequence[SymFactor]) -> tuple[list[Tensor], list[Rotation]]:
    """Eigenvalues [c d] and eigenvectors [c d d] of the factors of one side; a diagonal one has the axes."""
    dense = [at for at, factor in enumerate(side) if is_dense(factor)]
    values: list[Tensor] = list(side)
    vectors: list[Rotation] = [None] * len(side)
    for batch in batch_by_size([side[at] for at in dense]):
        positions = [dense[at] for at in batch]
        λ, q = spectrum(stacked([side[at] for at in positions]))
        counts = [side[at].shape[0] for at in positions]
        for at, layer_values, layer_vectors in zip(positions, λ.split(counts), q.split(counts), strict=True):
            values[at], vectors[at] = layer_values, layer_vectors
    return values, vectors


def factor_power(factor: SymFactor, power: float) -> SymFactor:
    """The factor to a power between 0 and 1."""
    if power == 1:
        return factor
    (values,), (vectors,) = spectra([factor])
    values = powered(values, power, "a factor of the metric")
    return values if vectors is None else (vectors * values.unsqueeze(-2)) @ vectors.mT


def eigenvalues(factor: SymFactor) -> Tensor:
    """[c d], ascending."""
    return eigvalsh(factor, "a factor of the metric") if is_dense(factor) else factor.sort(-1).values


def _overlap(new: Rotation, old: Rotation) -> Rotation:
    """Q'ᵀQ, every entry squared."""
    if new is None or old is None:
        return squares_of(old if new is None else new.mT)
    return (new.mT @ old).square()


@final
class FactorAverage(FactorSink):
    """The sink that adds factors to moving averages, Ā ← (1 − w) Ā + w A, and S̄ likewise, one by one.

    ``numbers``: the number in ``average`` of each layer b of ``put``. A layer that is new has weight 1. Every group of
    a stacked layer has its own weight (``group_weights``), computed from A, which arrives before S. ``lenient``: a
    factor that is not finite is left out, and ``refuse_left_out`` raises; else ``put`` does.
    """

    def __init__(
        self,
        average: LayerOperator,
        numbers: Sequence[int],
        weight: Scalar,
        *,
        lenient: bool = False,
    ) -> None:
        self.average: LayerOperator = average
        self.numbers: Sequence[int] = numbers
        self._weight, self._lenient = weight, lenient
        self._left_out: list[str] = []  # titles of layers
        self._group_weights: dict[int, Tensor] = {}

    @cached_property
    def _averages(self) -> PendingAverages:  # not made where captured kernels are replayed
        factors = [t for side in self.average.averaged_letters.values() for t in side]
        return PendingAverages(factors)

    @property
    def weight(self) -> Scalar:
        return self._weight

    @property
    def address_key(self) -> Hashable:
        return tuple(self.numbers), self.average.unseen, self.average.addresses

    def with_weight(self, weight: Scalar) -> FactorAverage:
        return FactorAverage(self.average, self.numbers, weight, lenient=self._lenient)

    def put(self, b: int, side: Side, moment: Moment) -> None:
        number = self.numbers[b]
        factor = self.average.averaged_letters[side][number]
        weight = self._weight if self.average.saw(number) else 1.0
        rule = self.average.blocks[number].rule
        if rule is not None and rule.stacked:
            new = moment.mean()
            if side == "A":
                self._group_weights[b] = group_weights(factor, new, weight, 1) / weight
            share = self._group_weights[b].view(-1, *[1] * (factor.ndim - 1))
            moment = Moment(factor.lerp(new, share.to(factor.dtype)), 1)  # with ``weight`` this is w_c of the new one
        if is_asynchronous(factor.device):  # not checked on the host: a moment that is not finite is not added
            masked = isinstance(moment.count, Tensor) and moment.count.ndim > 0
            moment = Moment(moment.mean(), 1) if masked else moment
            self._averages.add(factor, moment.total, count=moment.count, weight=weight)
            return
        if moment.is_finite():
            moment.average_into(factor, float(weight))
            return
        self._left_out.append(self.average.blocks[number].title)
        if not self._lenient:
            self.refuse_left_out()

    def refuse_left_out(self) -> None:
        """Raise if a factor was not finite."""
        if self._left_out:
            raise NonFiniteError(
                f"the estimate of the metric of {', '.join(dict.fromkeys(self._left_out))} holds NaN or infinity, and "
                "was not averaged: clean the batch, or lower the learning rate"
            )

    def flush(self) -> None:
        if "_averages" in vars(self):  # else nothing waits
            self._averages.flush()
