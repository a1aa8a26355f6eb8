"""What becomes of the positions r of an example that share a weight, in the two factors of a layer.

    expand:  A = Σ_nr a aᵀ / (N·R),       S = Σ_kn Σ_r g gᵀ / N            (003 (4.5), (5.3); ERRATA 48)
    reduce:  A = Σ_n ā āᵀ / N, ā = mean_r a,   S = Σ_kn ĝ ĝᵀ / N, ĝ = Σ_r g    (Eschenhagen et al. 2023)

Both are exact for one position, R = 1, up to the independence of a and g. Masked positions count neither in the sum
nor in N·R.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.moments import single
from natgrad.pullback.factors import Factors
from natgrad.pullback.layer import Block
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Moment, Replayed, Rows, RowsRule


@final
@dataclass
class Pair:
    """Sums over chunks: S [c o o] (or [c o]), and A [c i i] (or [c i]) with its number of positions."""

    s: Tensor | None = None
    a: Tensor | None = None
    count: int | Tensor = 0

    def add_inputs(self, moment: Moment) -> None:
        self.a = moment.total if self.a is None else self.a + moment.total
        self.count = self.count + moment.count

    def add_outputs(self, s: Tensor) -> None:
        self.s = s if self.s is None else self.s.add_(s)

    def factors(self) -> tuple[Tensor, Tensor]:
        """S and A."""
        assert self.s is not None
        assert self.a is not None
        return self.s, mean(Moment(self.a, self.count))


def mean(moment: Moment) -> Tensor:
    """Total over count; where groups have counts of their own, none of which is below 1."""
    count, total = moment.count, moment.total
    if isinstance(count, Tensor):
        count = count.clamp(min=1).view(-1, *[1] * (total.ndim - 1)).to(total.dtype)
    return total / count


def averaged(pairs: Sequence[Pair]) -> list[tuple[Tensor, Tensor]]:
    """S and A of every layer; where no count is a tensor, all divisions in one launch."""
    counts = [pair.count for pair in pairs if isinstance(pair.count, int)]
    if len(counts) < len(pairs):
        return [pair.factors() for pair in pairs]
    found = fused.divided([pair.a for pair in pairs if pair.a is not None], [float(count) for count in counts])
    return [(pair.s, a) for pair, a in zip(pairs, found, strict=True) if pair.s is not None]


class Sharing(ABC):
    """What becomes of the positions r of an example that share a weight."""

    @abstractmethod
    def inputs(self, tape: Tape, block: Block) -> Moment:
        """Σ a aᵀ over all uses of a block."""

    def input_rows(self, tape: Tape, block: Block) -> Rows | None:
        """The a of a block that is used once, where they are the rows of a matrix and A is Σ a aᵀ of them."""
        return None

    def output_rows(self, tape: Tape, block: Block, g: Cotangents) -> Rows | None:
        """The g of a block, likewise."""
        return None

    @abstractmethod
    def squares(self, tape: Tape, block: Block) -> Moment:
        """The diagonal of that, without the rest."""

    @abstractmethod
    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        """Σ g gᵀ over all uses of a block."""

    @abstractmethod
    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        """The a [n r c i] and g [k n r c o] whose second moments these are."""

    @abstractmethod
    def expands(self, block: Block) -> bool:
        """Whether both are whole moments of positions that count by themselves."""

    def direct(self, tape: Tape, block: Block) -> bool:
        """Whether, besides, they are of what is linear in the inputs and cotangents of the calls (``Rule.linear``)."""
        return self.expands(block) and all(use.rule.linear for use in tape.of(block))


@final
@dataclass(frozen=True)
class Cotangents:
    """Of every use, by its position: of its outputs, and of the layers inside where it was replayed."""

    outer: dict[int, tuple[Tensor, ...]]
    inner: dict[int, Mapping[str, Tensor]]
    products: dict[int, Tensor] = field(default_factory=dict)  # Σ g gᵀ that were asked for, by the id of g

    def product(self, at: int, key: str) -> Tensor:
        """Σ_knr g gᵀ [c o p] of a layer inside a replay, a copy. Layers with one g, as W_ih and W_hh, have one."""
        g = self.inner[at][key]
        if id(g) not in self.products:
            self.products[id(g)] = Moment.of(single(g.flatten(0, 1))).total
        return self.products[id(g)].clone()

    def forget(self, at: int) -> None:
        """Nobody asks for those of this use any more."""
        self.outer.pop(at, None)
        for g in self.inner.pop(at, {}).values():
            self.products.pop(id(g), None)

    def of(self, tape: Tape, block: Block) -> list[Tensor]:
        """g [k n r c o] of every use of a block."""
        return [tape.canonical(at, block.keys, self.outer, self.inner) for at in tape.places(block)]

    def whole(self, tape: Tape, block: Block) -> Tensor:
        """The uses one after the other along r."""
        parts = self.of(tape, block)
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=2)


@final
@dataclass(frozen=True)
class Expand(Sharing):
    """Positions count as if they were independent examples."""

    def input_rows(self, tape: Tape, block: Block) -> Rows | None:
        uses = tape.of(block)
        if len(uses) != 1 or not isinstance(uses[0].rule, RowsRule):
            return None
        return uses[0].rule.input_rows(uses[0].module, block.keys, uses[0].call)

    def output_rows(self, tape: Tape, block: Block, g: Cotangents) -> Rows | None:
        places = tape.places(block)
        use = tape.uses[places[0]]
        if len(places) != 1 or not isinstance(use.rule, RowsRule):
            return None
        return use.rule.output_rows(use.module, block.keys, g.outer[places[0]][0])

    def inputs(self, tape: Tape, block: Block) -> Moment:
        assert block.rule is not None
        pair, uses = Pair(), tape.of(block)
        one = block.rule.gathered([use.call for use in uses]) if len(uses) > 1 else None
        if one is not None:
            return block.rule.input_moment(uses[0].module, block.keys, one)
        for use in uses:
            if isinstance(use.rule, Replayed):
                pair.add_inputs(use.replay.layer(block.keys).moment)
            else:
                pair.add_inputs(use.rule.input_moment(use.module, block.keys, use.call))
        assert pair.a is not None
        return Moment(pair.a, pair.count)

    def squares(self, tape: Tape, block: Block) -> Moment:
        pair = Pair()
        for use in tape.of(block):
            if isinstance(use.rule, Replayed):
                pair.add_inputs(use.replay.layer(block.keys).squares)
            else:
                a = single(use.rule.inputs(use.module, block.keys, use.call))
                pair.add_inputs(Moment(a.square().sum((0, 1)), a.shape[0] * a.shape[1]))
        assert pair.a is not None
        return Moment(pair.a, pair.count)

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        assert block.rule is not None
        pair, places = Pair(), tape.places(block)
        one = block.rule.gathered_cotangents([g.outer[at][0] for at in places]) if len(places) > 1 else None
        if one is not None:
            return block.rule.output_moment(tape.uses[places[0]].module, block.keys, one)
        for at in places:
            use = tape.uses[at]
            if isinstance(use.rule, Replayed):
                pair.add_outputs(g.product(at, block.keys[0]))
            else:
                pair.add_outputs(use.rule.output_moment(use.module, block.keys, g.outer[at][0]))
        assert pair.s is not None
        return pair.s

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return Factors(tape.inputs(block), g.whole(tape, block))

    def expands(self, block: Block) -> bool:
        return True


@final
@dataclass(frozen=True)
class Reduce(Sharing):
    """The mean of the inputs and the sum of the cotangents over the positions."""

    def inputs(self, tape: Tape, block: Block) -> Moment:
        assert block.rule is not None
        # Means of one-hot vectors have products off the diagonal: a matrix of a vocabulary squared, and not kept.
        return self.squares(tape, block) if block.rule.sparse else Moment.of(self._mean(tape, block))

    def squares(self, tape: Tape, block: Block) -> Moment:
        mean = self._mean(tape, block)
        return Moment(mean.square().sum((0, 1)), mean.shape[0])

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        return Moment.of(single(self._total(tape, block, g).flatten(0, 1))).total

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return Factors(self._mean(tape, block), self._total(tape, block, g))

    def expands(self, block: Block) -> bool:
        return False  # means and sums over positions are few numbers

    def _mean(self, tape: Tape, block: Block) -> Tensor:
        """[n 1 c i]."""
        means = [
            use.replay.layer(block.keys).mean
            if isinstance(use.rule, Replayed)
            else use.rule.input_mean(use.module, block.keys, use.call)
            for use in tape.of(block)
        ]
        return (means[0] if len(means) == 1 else torch.stack(means).mean(0)).unsqueeze(1)

    def _total(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        """[k n 1 c o]."""
        parts = [part.sum(2, keepdim=True) for part in g.of(tape, block)]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


@final
@dataclass(frozen=True)
class Largest(Sharing):
    """Another sharing; of a factor with more than ``size`` rows only the diagonal is kept, and formed."""

    sharing: Sharing
    size: int

    def inputs(self, tape: Tape, block: Block) -> Moment:
        assert block.rule is not None
        large = block.shape[2] > self.size and not block.rule.sparse  # what is sparse is diagonal anyway
        return self.sharing.squares(tape, block) if large else self.sharing.inputs(tape, block)

    def squares(self, tape: Tape, block: Block) -> Moment:
        return self.sharing.squares(tape, block)

    def input_rows(self, tape: Tape, block: Block) -> Rows | None:
        return self.sharing.input_rows(tape, block) if block.shape[2] <= self.size else None

    def output_rows(self, tape: Tape, block: Block, g: Cotangents) -> Rows | None:
        return self.sharing.output_rows(tape, block, g) if block.shape[1] <= self.size else None

    def outputs(self, tape: Tape, block: Block, g: Cotangents) -> Tensor:
        if block.shape[1] <= self.size:
            return self.sharing.outputs(tape, block, g)
        return torch.stack([single(part).square().sum((0, 1, 2)) for part in g.of(tape, block)]).sum(0)

    def explicit(self, tape: Tape, block: Block, g: Cotangents) -> Factors:
        return self.sharing.explicit(tape, block, g)

    def expands(self, block: Block) -> bool:
        return max(block.shape[1:]) <= self.size and self.sharing.expands(block)
