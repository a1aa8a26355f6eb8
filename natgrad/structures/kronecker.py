"""The Kronecker-factored structure (K-FAC): two small matrices a layer."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, final

import torch
from torch import Tensor

from natgrad.errors import UncoveredError
from natgrad.model import Model
from natgrad.operators import KroneckerOperator, Layout, Operator
from natgrad.operators.subset import REST
from natgrad.pullback import Block, Pullback
from natgrad.pullback.broadcast import as_spread, parted
from natgrad.pullback.moments import second_moments
from natgrad.pullback.precision import without_autocast
from natgrad.pullback.sharing import Expand, Largest, Reduce, Sharing
from natgrad.slots import check_slots
from natgrad.structures.exact import Diagonal, Structure


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
        covered, others = split(pullback.layers)
        total = sum(map(self.layer_elements, covered))
        return total + (self.fallback.elements(restricted(pullback, others)) if others else 0)

    def shapes(self, block: Block) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The shapes of S and A of a layer."""
        c, o, i = block.shape
        diagonal = block.sparse or i > self.largest
        return (c, o) if o > self.largest else (c, o, o), (c, i) if diagonal else (c, i, i)

    def parts(self, pullback: Pullback) -> tuple[list[Block], Pullback | None]:
        """The layers that have a rule, and the pullback to the other parameters; refused is what does not fit."""
        self.admit(pullback)
        covered, others = split(pullback.layers)
        self.check(others, pullback.displaced)
        return covered, restricted(pullback, others) if others else None

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
                    "the examples are not on the first axis, or its outputs are not used. Keep the examples apart, or "
                    f"let {names} fall back to {self.fallback!r} with strict=False"
                )
            raise UncoveredError(
                f"no layer rule covers {names}, and strict=True. Pass rules=[…] with a rule for their module, use the "
                f"module's own forward, or let them fall back to {self.fallback!r} with strict=False"
            )

    def restored(
        self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]
    ) -> tuple[list[Block], Operator | None]:
        """The layers that have a product among these tensors, and the operator over the other parameters."""
        blocks = [piece for block in blocks for piece in _as_before(model, block, tensors)]
        kept = [block for block in blocks if f"{block.names[0]}/S" in tensors]
        rest = {key.removeprefix(REST): t for key, t in tensors.items() if key.startswith(REST)}
        if not rest:
            return kept, None
        names = {name for block in kept for name in block.names}
        ruled = [block for block in blocks if block not in kept]
        params = {name: p for name, p in model.params.items() if name not in names}
        smaller = Model(model.function, params, model.output)
        return kept, self.fallback.restore(smaller, _placed(ruled, params), rest)


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

    @without_autocast
    def estimate(self, pullback: Pullback) -> KroneckerOperator:
        covered, others = self.parts(pullback)
        factors = second_moments(pullback, covered, self.rule_of_sharing)
        return KroneckerOperator(
            Layout(pullback.model.like, pullback.y.dtype),
            tuple(covered),
            tuple(s for s, _ in factors),
            tuple(a for _, a in factors),
            None if others is None else self.fallback.estimate(others),
        )

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> KroneckerOperator:
        kept, rest = self.restored(model, blocks, tensors)
        left, right = (tuple(tensors[f"{block.names[0]}/{side}"] for block in kept) for side in "SA")
        return KroneckerOperator(Layout.of(model.params, dtype_of(left, rest)), tuple(kept), left, right, rest)


def dtype_of(factors: Sequence[Tensor], rest: Operator | None) -> torch.dtype:
    """The precision of a metric: that of its factors or, where no layer has a rule, of what is over the others."""
    if factors or rest is None:
        return factors[0].dtype
    return rest.layout.dtype


def split(blocks: Sequence[Block]) -> tuple[list[Block], list[Block]]:
    """The layers that have a rule, and the others."""
    return [b for b in blocks if b.rule is not None], [b for b in blocks if b.rule is None]


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
    return replace(pullback, model=model, layers=_placed(blocks, params))


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
