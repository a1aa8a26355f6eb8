"""What a pullback is made of: a batch, what a pass over it has shown of the layers, and how it is gone through."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

from natgrad.model import Inputs, Model
from natgrad.pullback.blocks import Block
from natgrad.pullback.parts import Part
from natgrad.pullback.recorded import Recordings
from natgrad.pullback.separate import Verdicts
from natgrad.pullback.tape import Tape


@final
@dataclass(frozen=True)
class Batch:
    """A model with inputs and, where a metric needs them, targets."""

    model: Model
    x: Inputs
    target: Any = None


@final
@dataclass(frozen=True)
class Seen:
    """The layers, with their rules, and what a pass has shown of them, by their first name.

    ``positions``: how many r·c of one example share the weight. ``unused``: the layers that the pass did not use, as
    they are where they are used; in ``layers`` they have no rule, and their rows are zero. ``displaced``: parameters
    whose rule does not apply, as the examples are not in their places.
    """

    layers: list[Block]
    positions: Mapping[str, int]
    unused: Mapping[str, Block] = field(default_factory=dict)
    displaced: frozenset[str] = frozenset()


@final
@dataclass(frozen=True)
class Passes:
    """How the examples are gone through: in ranges that are processed together, each with its tape.

    ``memory``: bytes that a structure may occupy. A tape that is missing is recorded when it is needed. ``recordings``:
    of second moments, where the same model is seen again and again.
    """

    memory: int
    parts: list[Part]
    tapes: dict[Part, Tape]
    recordings: Recordings | None = None
    verdicts: Verdicts = field(default_factory=Verdicts)
