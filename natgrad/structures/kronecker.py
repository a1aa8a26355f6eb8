"""The Kronecker-factored structure (K-FAC): two small matrices a layer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeVar, final

import torch
from torch import Tensor

from natgrad.errors import UncoveredError
from natgrad.model import Model
from natgrad.operators import KroneckerOperator, Layout, Operator
from natgrad.operators.layers import UNSEEN, LayerOperator
from natgrad.operators.subset import REST
from natgrad.pullback import Block, Pullback
from natgrad.pullback.broadcast import SpreadRule, as_spread, parted
from natgrad.pullback.precision import without_autocast
from natgrad.pullback.sharing import Expand, Largest, Reduce, Sharing
from natgrad.pullback.streamed import factors_of, stream
from natgrad.slots import check_slots
from natgrad.structures.absorb import Absorb, laid_out
from natgrad.structures.exact import Diagonal, Structure

T = TypeVar("T")


@dataclass(frozen=True)
class Layered(Structure):
    """Two factors a layer, and another structure for the parameters that no layer rule covers."""

    sharing: Literal["expand", "reduce"] = "expand"
    fallback: Structure = field(default_factory=Diagonal)
    strict: bool = False
    largest: int = 16384

    def __post_init__(self) -> None:
        name = type(self).__name__
        if self.sharing not in ("expand", "reduce"):
            raise ValueError(f'{name}(sharing=…) is "expand" or "reduce", not {self.sharing!r}')
        check_slots(fallback=(self.fallback, Structure))
        if not self.fallback.bounded:
            raise ValueError(
                f"{name}(fallback={self.fallback!r}) cannot be averaged over time: use Diagonal() or BlockDense()"
            )
        if self.largest < 1:
            raise ValueError(f"{name}(largest=…) must be at least 1, got {self.largest}")

    @abstractmethod
    def layer_elements(self, block: Block) -> int:
        """How many numbers are kept of a layer."""

    @property
    def bounded(self) -> bool:
        return True

    @property
    def one_pass(self) -> bool:
        return True

    def elements(self, pullback: Pullback) -> int:
        blocks, others = split(pullback, None)
        total = sum(map(self.layer_elements, blocks))
        return total + (self.fallback.elements(restricted(pullback, others)) if others else 0)

    def shapes(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of S and A of a layer."""
        c, o, i = block.shape
        diagonal = block.sparse or i > self.largest
        return (c, o) if o > self.largest else (c, o, o), (c, i) if diagonal else (c, i, i)

    def parts(self, pullback: Pullback, like: Operator | None = None) -> Parts:
        """The layers that have a rule, and the pullback to the other parameters; refused is what does not fit.

        ``like``: what the estimate will be averaged with.
        """
        if like is None:  # else there is one of this size already
            self.admit(pullback)
        blocks, others = split(pullback, like)
        out = {name for block in pullback.seen.unused.values() for name in block.names}
        self.check([block for block in others if block.names[0] not in out], pullback.seen.displaced)
        unseen = frozenset(name for block in blocks for name in block.names if name in out)
        return Parts(tuple(blocks), unseen, restricted(pullback, others) if others else None)

    def zeros(self, block: Block, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """S and A of a layer that a pass did not use."""
        s, a = (torch.zeros(shape, dtype=dtype, device=block.device) for shape in self.shapes(block))
        return s, a

    @property
    def rule_of_sharing(self) -> Sharing:
        """What to do with positions, as an object."""
        return Largest(Expand() if self.sharing == "expand" else Reduce(), self.largest)

    def check(self, others: Sequence[Block], displaced: Collection[str] = ()) -> None:
        """With ``strict``, refuse parameters that no rule covers, or cannot, with examples ``displaced``."""
        if self.strict and others:
            names = ", ".join(name for block in others for name in block.names)
            if displaced:
                raise UncoveredError(
                    f"no layer rule can be used for {', '.join(sorted(displaced))}, and strict=True: behind it the "
                    "outputs of one example depend on the others, as in z @ z.T or F.batch_norm(…, training=True), or "
                    "the examples are not on one axis, in order, or its outputs are not used. Keep the examples apart, "
                    f"or let {names} fall back to {self.fallback!r} with strict=False"
                )
            raise UncoveredError(
                f"no layer rule covers {names}, and strict=True. Pass rules=[…] with a rule for their module, use the "
                f"module's own forward, or let them fall back to {self.fallback!r} with strict=False"
            )

    def restored(
        self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
    ) -> tuple[Parts, Operator | None]:
        """The layers that have a product among these tensors, and the operator over the other parameters."""
        blocks = [piece for block in blocks for piece in _as_before(model, block, tensors)]
        hidden = [block for block in blocks if f"{block.names[0]}/{UNSEEN}" in tensors]
        kept = [block for block in blocks if f"{block.names[0]}/S" in tensors or block in hidden]
        parts = Parts(tuple(kept), frozenset(name for block in hidden for name in block.names))
        rest = {key.removeprefix(REST): t for key, t in tensors.items() if key.startswith(REST)}
        if not rest:
            return parts, None
        names = {name for block in kept for name in block.names}
        ruled = [block for block in blocks if block not in kept]
        params = {name: p for name, p in model.params.items() if name not in names}
        smaller = Model(model.function, params, model.output)
        return parts, self.fallback.restore(smaller, _placed(ruled, params), rest)


@final
@dataclass(frozen=True)
class Kronecker(Layered):
    """G ≈ S ⊗ A on every layer, A = E[a aᵀ], S = E[g gᵀ] (003 (2.8), (4.5), (5.3); 004 (37)).

    ``sharing``: what becomes of positions that share a weight (pixels, tokens, time steps): "expand" takes them for
    independent examples, "reduce" sums over them first. ``fallback`` is the structure of the parameters that no layer
    rule covers; with ``strict`` there must be none. Of a factor with more than ``largest`` rows (a vocabulary) only the
    diagonal is kept. All of this is in ``opt.plan()``.

    Parameters of no layer that are only added to the examples, or multiplied with them (positions, a class token,
    LayerScale), are covered: every entry is a group of its own, so that they have the diagonal of G.

    An embedding that is also the weight of a linear head is one layer, W [V d], with one product for both uses, whose
    trace and partial traces are those of the sum of the two (``natgrad.pullback.tied``).

    In training mode the statistics of a batch normalisation and the masks of dropout are constants of the pass. The
    parameters that fall back need passes of their own: they are seen in evaluation mode then, and the log says so once.

    A layer that a forward pass does not use (an expert, a block that stochastic depth drops) is not in the estimate of
    that pass: the moving average of its factors goes on with the next pass that uses it. The correction of the average
    for its start counts all estimates, so that it is an approximation for such a layer.

    The products S ⊗ A are exact for one datum, for deep linear networks with squared loss, and wherever a and g are
    independent. Any metric on the outputs will do (003, theorem 3.6), also a sampled one.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 1)
    >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
    >>> Kronecker().estimate(pb).dense()
    tensor([[1., 2., 1.],
            [2., 4., 2.],
            [1., 2., 1.]])
    """

    def layer_elements(self, block: Block) -> int:
        return sum(map(math.prod, self.shapes(block)))

    def estimate(self, pullback: Pullback) -> KroneckerOperator:
        return self.estimate_like(pullback, None)

    @without_autocast
    def estimate_like(self, pullback: Pullback, like: Operator | None) -> KroneckerOperator:
        """With every parameter in the layers, or in the fallback, as it is in ``like``."""
        parts, dtype = self.parts(pullback, like), pullback.y.dtype
        found = factors_of(pullback, parts.seen, self.rule_of_sharing)
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        return KroneckerOperator(
            Layout(pullback.model.like, dtype),
            parts.blocks,
            tuple(laid_out(s) for s, _ in factors),
            tuple(laid_out(a) for _, a in factors),
            None if parts.others is None else self.fallback.estimate(parts.others),
            parts.unseen,
        )

    def absorbs(self, average: Operator) -> bool:
        return isinstance(average, KroneckerOperator)

    @without_autocast
    def absorb(self, pullback: Pullback, average: Operator, weight: float) -> KroneckerOperator:
        """Factor by factor, and in place; a layer that the pass did not use keeps its average."""
        assert isinstance(average, KroneckerOperator)
        parts = self.parts(pullback, average)
        rest = None if parts.others is None else self.fallback.estimate(parts.others).finite()
        average.same_layers(parts.blocks)
        numbers = {block.names: b for b, block in enumerate(average.blocks)}
        sink = Absorb(average, [numbers[block.names] for block in parts.seen], weight)
        stream(pullback, parts.seen, self.rule_of_sharing, sink)
        return average.absorbed(rest, weight, parts.unseen)

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KroneckerOperator:
        parts, rest = self.restored(model, blocks, tensors)
        dtype = dtype_of(parts, tensors, rest)
        found = [(tensors[f"{block.names[0]}/S"], tensors[f"{block.names[0]}/A"]) for block in parts.seen]
        factors = parts.everywhere(found, lambda block: self.zeros(block, dtype))
        left, right = tuple(laid_out(s) for s, _ in factors), tuple(laid_out(a) for _, a in factors)
        return KroneckerOperator(Layout.of(model.params, dtype), parts.blocks, left, right, rest, parts.unseen)


def dtype_of(parts: Parts, tensors: Mapping[str, Tensor], rest: Operator | None) -> torch.dtype:
    """The precision of a metric: that of its factors or, where no layer has a rule, of what is over the others."""
    if rest is not None and not parts.blocks:
        return rest.layout.dtype
    name = parts.blocks[0].names[0]
    return tensors[f"{name}/{UNSEEN if name in parts.unseen else 'S'}"].dtype


@final
@dataclass(frozen=True)
class Parts:
    """The layers that have a rule, the parameters of those that a pass did not use, and the pullback to the others."""

    blocks: tuple[Block, ...]
    unseen: frozenset[str]
    others: Pullback | None = None

    @property
    def seen(self) -> list[Block]:
        """The layers that the pass used."""
        return [block for block in self.blocks if block.names[0] not in self.unseen]

    def of_seen(self, of_all: Iterable[T]) -> list[T]:
        """What belongs to the layers that are seen, out of what belongs to every layer."""
        return [t for block, t in zip(self.blocks, of_all, strict=True) if block.names[0] not in self.unseen]

    def everywhere(self, found: Iterable[T], nothing: Callable[[Block], T]) -> list[T]:
        """What was found of the layers that are seen, and ``nothing`` for each of the others, in the order of all."""
        supply = iter(found)
        return [nothing(block) if block.names[0] in self.unseen else next(supply) for block in self.blocks]


def split(pullback: Pullback, like: Operator | None) -> tuple[list[Block], list[Block]]:
    """The layers that have a rule, and the others.

    A layer that the pass did not use is what it is in ``like``, or where it is used. Parameters of no layer are then
    among the others, and stay there when they turn out to be spread over the examples: their diagonal is the same.
    """
    known = {block.names: block for block in like.blocks} if isinstance(like, LayerOperator) else {}
    below = like.rest.layout.like if isinstance(like, LayerOperator) and like.rest is not None else {}
    blocks: list[Block] = []
    others: list[Block] = []
    for layer in pullback.layers:
        pieces, fallen = [layer], any(name in below for name in layer.names)
        if layer.names[0] in pullback.seen.unused:
            own = known.get(layer.names, pullback.seen.unused[layer.names[0]])
            alone = {name for name in layer.names if (name,) in known}
            pieces = parted(pullback.model, layer, alone) if fallen or own.rule is None else [own]
        elif fallen and isinstance(layer.rule, SpreadRule):
            pieces = [layer.without_rule()]
        blocks += [piece for piece in pieces if piece.rule is not None]
        others += [piece for piece in pieces if piece.rule is None]
    return blocks, others


def _as_before(model: Model, block: Block, tensors: Mapping[str, Tensor]) -> list[Block]:
    """A block, or the pieces of it, that had these factors."""
    named = {name for name in block.names if f"{name}/S" in tensors}
    if block.names[0] in named:
        s, a = (tensors[f"{block.names[0]}/{side}"] for side in "SA")
        if s.shape[0] * s.shape[1] * a.shape[-1] == block.size:  # of all parameters, with the rule or a number each
            ruled = block.rule is not None and not s.shape[0] == block.size != block.shape[0]
            return [block if ruled else as_spread(model, block)]
    return parted(model, block, named)


def restricted(pullback: Pullback, blocks: Sequence[Block]) -> Pullback:
    """The same pullback, to some of the parameters only, and without rules."""
    names = {name for block in blocks for name in block.names}
    params = {name: p for name, p in pullback.model.params.items() if name in names}
    model = Model(pullback.model.function, params, pullback.model.output)
    seen = replace(pullback.seen, layers=_placed(blocks, params))
    return replace(pullback, batch=replace(pullback.batch, model=model), seen=seen)


def _placed(blocks: Sequence[Block], params: Mapping[str, Tensor]) -> list[Block]:
    """The blocks without their rules, at their places among these parameters."""
    starts, at = {}, 0
    for name, p in params.items():
        starts[name] = at
        at += p.numel()
    out = []
    for block in (block.without_rule() for block in blocks):
        places = (replace(place, start=starts[name]) for name, place in zip(block.names, block.places, strict=True))
        out.append(replace(block, places=tuple(places)))
    return out
