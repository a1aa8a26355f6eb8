"""Whether the examples are where a rule expects them: on one axis of every layer's output, in their order.

A shape cannot say so. A model may swap its axes (t positions where t happens to be n), sort its examples and put them
back, or apply a layer to a table with n rows. For most layers the graph proves it (``natgrad.pullback.order``). For
the others cotangents tell: scaling example n by c_n must scale row n of every g by c_n, and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, final

import torch
from torch import Tensor

from natgrad.errors import BatchStatisticsError
from natgrad.pullback.blocks import Block
from natgrad.pullback.graph import Survey, survey
from natgrad.pullback.order import DATA_DEPENDENT, ordered
from natgrad.pullback.tape import Tape
from natgrad.rules.base import Replayed

_Signature: TypeAlias = tuple[object, ...]
_KEPT = 256  # graphs; the lengths of sequences make many


@final
class Verdicts:
    """What was found about graphs that have been looked at before, for a model that is called again and again.

    A graph is known again by its operations with their axes, and by its layers with their shapes. One that moves
    examples by an index that depends on the data is looked at every time.
    """

    def __init__(self) -> None:
        self._known: dict[_Signature, frozenset[int]] = {}
        self._told: set[str] = set()

    def news(self, message: str) -> bool:
        """Whether this has not been said yet."""
        new = message not in self._told
        self._told.add(message)
        return new

    def misplaced(self, tape: Tape, seen: Survey) -> frozenset[int]:
        """As the function of this name, for a graph of these kinds of nodes."""
        if not tape.uses or not tape.y.requires_grad:
            return frozenset()
        if not DATA_DEPENDENT.isdisjoint(seen.names):
            return misplaced(tape)
        uses = tuple((id(use.module), use.shapes) for use in tape.uses)
        signature = (tape.y.shape, uses, seen.kinds, seen.form)
        found = self._known.get(signature)
        if found is None:
            found = self._known[signature] = misplaced(tape)
            if len(self._known) > _KEPT:
                del self._known[next(iter(self._known))]
        return found


def misplaced(tape: Tape) -> frozenset[int]:
    """Positions in ``tape.uses`` of the layer calls that a rule cannot speak for.

    Those whose examples are not where the rule has them, and those whose output never reaches y.
    """
    if not tape.uses or not tape.y.requires_grad:
        return frozenset()
    n = tape.y.shape[0]
    order = ordered(tape.y, tape.uses)
    wrong, unsure = set(), []
    for at, use in enumerate(tape.uses):
        found = [edge.node for edge in use.edges if edge is not None and edge.node in order.reached]
        axis = use.rule.axis(use.module, use.call)
        if not found or (axis is not None and (len(use.shape) <= max(axis, 1) or use.shape[axis] != n)):
            wrong.add(at)
        elif n > 1 and not order.places(use):
            unsure.append(at)
    return frozenset(wrong | _looked_for(tape, unsure)) if unsure else frozenset(wrong)


def check_alike(tape: Tape, layers: Sequence[Block], part: tuple[int, int]) -> None:
    """Raise if a layer that has its rule from another part of the batch cannot have it in this one.

    A model may sort its examples: the first part was in order, and this one is not.
    """
    counts, moved = survey(tape.y).counts, misplaced(tape)
    names = [layer.names[0] for layer in layers if layer.rule and not tape.complete(layer, counts, moved)]
    if names:
        raise BatchStatisticsError(
            f"the layers of {', '.join(names)} see examples {part[0]} to {part[1]} in another order, or are used in "
            "another way, than those before: the batch cannot be processed in parts. Raise memory= so that it fits "
            "whole"
        )


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


def _looked_for(tape: Tape, unsure: Sequence[int]) -> set[int]:
    n = tape.y.shape[0]
    generator = torch.Generator().manual_seed(0)
    s = torch.rand(tape.y.shape, generator=generator, dtype=torch.float64).to(tape.y)
    c = 2.0 ** (torch.arange(n) % 8).to(tape.y)  # powers of two: exact in every precision
    once, scaled = tape.outer(s.unsqueeze(0)), tape.outer((s * c.view(-1, *[1] * (s.ndim - 1))).unsqueeze(0))
    wrong, tolerance = set(), torch.finfo(tape.y.dtype).eps ** 0.5
    for at in unsure:
        for g, h in zip(_rows(tape, at, once[at]), _rows(tape, at, scaled[at]), strict=True):
            if g.shape[0] != n:
                wrong.add(at)
                break
            expected = c[:, None] * g
            if bool(((h - expected).norm(dim=1) > tolerance * expected.norm(dim=1)).any()):
                wrong.add(at)
                break
    return wrong


def _rows(tape: Tape, at: int, outer: tuple[Tensor, ...]) -> list[Tensor]:
    """g [n ·] of every layer of a use, a row an example."""
    use = tape.uses[at]
    if isinstance(use.rule, Replayed):
        return [g[0].flatten(1) for g in tape.inner(at, outer).values()]
    return [use.rule.cotangents(use.module, keys, outer[0])[0].flatten(1) for keys in use.rule.layers(use.module)]
