"""Where the two factors of every layer go, one after the other, and how they are made of a pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.moments import check_inputs, check_outputs, check_rows
from natgrad.pullback.recorded import Weight
from natgrad.pullback.relation import Relation
from natgrad.pullback.sharing import Cotangents, Sharing, mean
from natgrad.pullback.tape import Tape
from natgrad.pullback.tied import joined
from natgrad.rules.base import Moment
from natgrad.rules.rows import Rows


class Sink(ABC):
    """Takes the factors of layers one by one, with a weight."""

    @property
    def weight(self) -> float:
        """Of all that arrives."""
        return 1.0

    @property
    def places(self) -> Hashable:
        """Where it writes: kernels that were recorded write there again. None where nothing is recorded."""
        return None

    def weighted(self, weight: Weight) -> Sink:
        """The same sink with another weight, which may be a number on the device."""
        return self

    @abstractmethod
    def inputs(self, b: int, moment: Moment) -> None:
        """A = total/count of the layer number b; the total may be overwritten."""

    @abstractmethod
    def outputs(self, b: int, total: Tensor, count: int) -> None:
        """S = total/count of the layer number b; the total may be overwritten."""

    def input_rows(self, b: int, rows: Rows, count: int) -> bool:
        """Take A = Σ a aᵀ/count of the rows a without forming it, where that is possible; whether it was."""
        return False

    def output_rows(self, b: int, rows: Rows, count: int) -> bool:
        """Take S = Σ g gᵀ/count of the rows g, likewise."""
        return False

    def flush(self) -> None:  # noqa: B027 - a sink that holds nothing back has nothing to do
        """Nothing is held back any longer."""


@final
class Collected(Sink):
    """All factors, S and A of every layer."""

    def __init__(self, count: int) -> None:
        self.left: list[Tensor | None] = [None] * count
        self.right: list[Tensor | None] = [None] * count

    def inputs(self, b: int, moment: Moment) -> None:
        self.right[b] = mean(moment) if isinstance(moment.count, Tensor) else moment.total.div_(moment.count)

    def outputs(self, b: int, total: Tensor, count: int) -> None:
        self.left[b] = total.div_(count)

    def pairs(self) -> list[tuple[Tensor, Tensor]]:
        """After the stream."""
        return [(s, a) for s, a in zip(self.left, self.right, strict=True) if s is not None and a is not None]


@final
@dataclass(frozen=True)
class Layers:
    """The layers, what becomes of their positions, and what couples the n examples.

    Cotangents are those of the root itself: products of them are divided by n where they are used.
    """

    blocks: tuple[Block, ...]
    sharing: Sharing
    dtype: torch.dtype
    n: int
    coupled: Relation | None = None

    def late(self, b: int) -> bool:
        """Whether A depends on cotangents: that of a tied weight does, and with a coupling both have one scale."""
        return self.coupled is not None or bool(self.blocks[b].facets)

    @property
    def places(self) -> Hashable:
        """Where recorded kernels read what is not of the pass."""
        return None if self.coupled is None else self.coupled.places

    def put_inputs(self, b: int, tape: Tape, sink: Sink) -> None:
        """A, unless it is late."""
        if self.late(b):
            return
        block = self.blocks[b]
        rows = self.sharing.input_rows(tape, block)
        if rows is not None:
            check_rows(block, "input_rows", rows.size, block.shape[2])
        if rows is None or not sink.input_rows(b, rows, rows.x.shape[0]):
            sink.inputs(b, self._moment(block, tape))

    def put_outputs(self, b: int, tape: Tape, g: Cotangents, sink: Sink) -> None:
        """S and, where it is late, A."""
        block = self.blocks[b]
        if not self.late(b):
            rows = self.sharing.output_rows(tape, block, g)
            if rows is not None:
                check_rows(block, "output_rows", rows.size, block.shape[1])
            if rows is None or not sink.output_rows(b, rows, self.n):
                sink.outputs(b, self._product(block, tape, g), self.n)
            return
        pairs = [self._pair(kind, tape, g) for kind in block.kinds]
        if not block.facets:  # with their counts, by which the sink divides where it averages
            ((s, moment),) = pairs
            sink.outputs(b, s, self.n)
            sink.inputs(b, moment)
            return
        s, a = joined(block, [(s.div_(self.n), mean(moment)) for s, moment in pairs])
        sink.outputs(b, s, 1)
        sink.inputs(b, Moment(a, 1))

    def in_order(self, tape: Tape, g: Cotangents, numbers: Iterable[int]) -> Iterable[int]:
        """The numbers of these layers; cotangents that no later layer asks for are forgotten on the way."""
        left = Counter(at for b in numbers for at in tape.places(self.blocks[b]))
        for b in numbers:
            yield b
            for at in tape.places(self.blocks[b]):
                left[at] -= 1
                if not left[at]:
                    g.forget(at)

    def _pair(self, kind: Block, tape: Tape, g: Cotangents) -> tuple[Tensor, Moment]:
        """n S and A."""
        if self.coupled is None:
            return self._product(kind, tape, g), self._moment(kind, tape)
        s, moment = self.coupled.factors(tape, kind, self.sharing, g)
        check_outputs(kind, s)
        check_inputs(kind, moment.total)
        return s.to(self.dtype), Moment(moment.total.to(self.dtype), moment.count)

    def _moment(self, kind: Block, tape: Tape) -> Moment:
        moment = self.sharing.inputs(tape, kind)
        check_inputs(kind, moment.total)
        return Moment(moment.total.to(self.dtype), moment.count)

    def _product(self, kind: Block, tape: Tape, g: Cotangents) -> Tensor:
        s = self.sharing.outputs(tape, kind, g)
        check_outputs(kind, s)
        return s.to(self.dtype)
