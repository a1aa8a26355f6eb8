"""Where the examples are in every layer's output: on one axis, in their order, or the rule cannot speak for it.

A shape cannot say so. A model may swap its axes (t positions where t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. For most layers the graph proves it (``natgrad.pullback.order``). For
the others cotangents tell: scaling example n by c_n must scale row n of every g by c_n, and nothing else.

Most rules want them on the first axis. To a rule that treats leading axes alike (``Rule.leading``) a layer is shown
with its examples there, wherever they are (``Use.turned``): torch's transformers and recurrences have them second.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import BatchStatisticsError
from natgrad.pullback.axes import Axis
from natgrad.pullback.blocks import Block
from natgrad.pullback.graph import Survey, survey
from natgrad.pullback.order import DATA_DEPENDENT, ordered
from natgrad.pullback.tape import Tape
from natgrad.pullback.uses import Use
from natgrad.rules.base import Replayed

_Signature: TypeAlias = tuple[object, ...]
_KEPT = 256  # graphs; the lengths of sequences make many


@final
@dataclass(frozen=True)
class Seating:
    """Where the uses of a tape have their examples, by their positions in ``Tape.uses``.

    ``elsewhere``: those that a rule cannot speak for. ``idle``: those whose output never reaches y, so neither.
    ``axes``: those that it can, once they are turned. All others are as the rule has them. ``certain``: whether
    another pass with the same graph need not be looked at; without any cotangents there was nothing to see.
    """

    elsewhere: frozenset[int] = frozenset()
    idle: frozenset[int] = frozenset()
    axes: Mapping[int, Axis] = field(default_factory=dict)
    certain: bool = True

    @property
    def wrong(self) -> frozenset[int]:
        """All that a rule cannot speak for."""
        return self.elsewhere | self.idle


@final
class Verdicts:
    """What was found about graphs that have been looked at before, for a model that is called again and again.

    A graph is known again by its operations with their axes, and by its layers with their shapes. One that moves
    examples by an index that depends on the data is looked at every time.
    """

    def __init__(self) -> None:
        self._known: dict[_Signature, Seating] = {}
        self._told: set[str] = set()

    def news(self, message: str) -> bool:
        """Whether this has not been said yet."""
        new = message not in self._told
        self._told.add(message)
        return new

    def seated(self, tape: Tape, seen: Survey) -> Seating:
        """As the function of this name, for a graph of these kinds of nodes."""
        if not tape.uses or not tape.y.requires_grad:
            return Seating()
        if not DATA_DEPENDENT.isdisjoint(seen.names):
            return seated(tape)
        uses = tuple((id(use.module), use.shapes) for use in tape.uses)
        signature = (tape.y.shape, uses, seen.kinds, seen.form)
        found = self._known.get(signature)
        if found is None:
            found = seated(tape)
            if found.certain:
                self._known[signature] = found
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return found


def seated(tape: Tape) -> Seating:
    """Where every layer call of a tape has its examples."""
    if not tape.uses or not tape.y.requires_grad:
        return Seating()
    n, order = tape.y.shape[0], ordered(tape.y, tape.uses)
    axes: dict[int, Axis] = {}
    unsure: dict[int, list[Axis | None]] = {}
    elsewhere, idle = set(), set()
    for at, use in enumerate(tape.uses):
        home, proven = use.rule.axis(use.module, use.call), order.axis(use)
        if not order.reaches(use):
            idle.add(at)
        elif _at_home(use, n) and (n == 1 or (proven is not None and proven.index == home)):
            continue
        elif proven is not None and use.turns(proven, n):
            axes[at] = proven
        elif options := _options(use, n):
            unsure[at] = options
        else:
            elsewhere.add(at)
    if not unsure:
        return Seating(frozenset(elsewhere), frozenset(idle), axes)
    found, certain = _looked_for(tape, unsure)
    axes |= {at: axis for at, axis in found.items() if axis is not None}
    return Seating(frozenset(elsewhere | unsure.keys() - found.keys()), frozenset(idle), axes, certain)


def _at_home(use: Use, n: int) -> bool:
    """Whether n examples may be where the rule has them."""
    home = use.rule.axis(use.module, use.call)
    return home is None or (len(use.shape) > max(home, 1) and use.shape[home] == n)


def _options(use: Use, n: int) -> list[Axis | None]:
    """Where n examples may be: None is where the rule has them."""
    home = use.rule.axis(use.module, use.call)
    others = [Axis(at) for at, size in enumerate(use.shape) if size == n and at != home and use.turns(Axis(at), n)]
    return [*([None] if _at_home(use, n) else []), *others]


def check_alike(tape: Tape, layers: Sequence[Block], part: tuple[int, int]) -> Seating:
    """Where the examples are. Raise if a layer that has its rule from another part of the batch cannot have it here.

    A model may sort its examples: the first part was in order, and this one is not.
    """
    counts, found = survey(tape.y).counts, seated(tape)
    names = [layer.names[0] for layer in layers if layer.rule and not tape.complete(layer, counts, found.wrong)]
    if names:
        raise BatchStatisticsError(
            f"the layers of {', '.join(names)} see examples {part[0]} to {part[1]} in another order, or are used in "
            "another way, than those before: the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )
    return found


def check_unused(tape: Tape, leaves: Mapping[str, Tensor], part: tuple[int, int]) -> None:
    """Raise if a parameter that the whole batch did not use is used by a part of it."""
    if not leaves or tape.y.grad_fn is None:
        return
    names = sorted(set(leaves) - survey(tape.y).unreached(leaves))
    if names:
        raise BatchStatisticsError(
            f"examples {part[0]} to {part[1]} use {', '.join(names)}, and the whole batch did not: what the model uses "
            "is decided anew in every pass, and the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )


def _looked_for(tape: Tape, unsure: Mapping[int, Sequence[Axis | None]]) -> tuple[dict[int, Axis | None], bool]:
    """The first axis of each use on which cotangents show its examples, if one does, and whether that is certain.

    It is not where cotangents were zero, or so many of them that they show the examples on more than one axis.
    """
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(tape.y.shape, generator=generator, dtype=torch.float64).to(tape.y)
    once, left = tape.outer(s.unsqueeze(0)), {at: list(options) for at, options in unsure.items()}
    for c in _codes(tape.y):
        scaled = tape.outer((s * c.view(-1, *[1] * (s.ndim - 1))).unsqueeze(0))
        for at, options in left.items():
            left[at] = [axis for axis in options if _shown(tape, at, axis, once[at], scaled[at], c)]
    alive = {at: [_alive(tape, at, axis, once[at]) for axis in options] for at, options in left.items()}
    seen = all(any(bool(g.any()) for g in once[at]) for at in unsure)
    certain = seen and all(len(each) < 2 or each[0] for each in alive.values())
    return {at: options[0] for at, options in left.items() if options}, certain


def _codes(y: Tensor) -> Iterator[Tensor]:
    """Scales c [n] that tell all examples of y apart, together: powers of two, which are exact in every precision."""
    number, n = torch.arange(y.shape[0]), y.shape[0]
    while True:
        yield 2.0 ** (number % 8).to(y)
        number, n = number // 8, -(-n // 8)
        if n <= 1:
            return


def _shown(
    tape: Tape, at: int, axis: Axis | None, once: tuple[Tensor, ...], scaled: tuple[Tensor, ...], c: Tensor
) -> bool:
    """Whether the cotangents of a use are scaled by c along an axis, as its examples are."""
    return all(
        _scales(g, h, c) for g, h in zip(_rows(tape, at, axis, once), _rows(tape, at, axis, scaled), strict=True)
    )


def _alive(tape: Tape, at: int, axis: Axis | None, outer: tuple[Tensor, ...]) -> bool:
    """Whether every example has cotangents there."""
    return all(bool(g.any(1).all()) for g in _rows(tape, at, axis, outer))


def _scales(g: Tensor, h: Tensor, c: Tensor) -> bool:
    """Whether h [n ·] is c [n] times g."""
    if g.shape[0] != c.shape[0]:
        return False
    expected = c[:, None] * g
    return not bool(((h - expected).norm(dim=1) > torch.finfo(c.dtype).eps ** 0.5 * expected.norm(dim=1)).any())


def _rows(tape: Tape, at: int, axis: Axis | None, outer: tuple[Tensor, ...]) -> list[Tensor]:
    """g [n ·] of every layer of a use, a row an example, if these are on the axis."""
    use = tape.uses[at]
    if isinstance(use.rule, Replayed):
        return [g[0].flatten(1) for g in tape.inner(at, outer).values()]
    g = outer[0] if axis is None else axis.first(outer[0], tape.y.shape[0], 1)
    return [use.rule.cotangents(use.module, keys, g)[0].flatten(1) for keys in use.rule.layers(use.module)]
