"""Whether what a rule returns has the shapes that it promised: a rule may be the user's own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from natgrad.rules.base import Rule


def check_packing(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], size: int) -> None:
    """W [c o i] must have a place for every number."""
    if len(shape) != 3 or math.prod(shape) != size:
        raise ValueError(
            f"{_name(rule)}.shape gives {tuple(shape)} for {' + '.join(names)}, which has {size} numbers: it must be "
            "(c, o, i) with as many places"
        )


def check_inputs(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], a: Tensor) -> None:
    """a [n r c i]."""
    c, _, i = shape
    if a.ndim != 4 or a.shape[2:] != (c, i):
        raise ValueError(
            f"{_name(rule)}.inputs returns a tensor of shape {tuple(a.shape)} for {' + '.join(names)}: it must be "
            f"[n r c i] with c = {c} and i = {i}, as {_name(rule)}.shape says"
        )


def check_cotangents(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], g: Tensor) -> None:
    """g [k n r c o]."""
    c, o, _ = shape
    if g.ndim != 5 or g.shape[3:] != (c, o):
        raise ValueError(
            f"{_name(rule)}.cotangents returns a tensor of shape {tuple(g.shape)} for {' + '.join(names)}: it must be "
            f"[k n r c o] with c = {c} and o = {o}, as {_name(rule)}.shape says"
        )


def check_moment(rule: Rule, what: str, names: Sequence[str], shape: tuple[int, int], moment: Tensor) -> None:
    """S [c o o] or [c o], A [c i i] or [c i]; ``shape`` is (c, o) or (c, i)."""
    c, d = shape
    if tuple(moment.shape) not in ((c, d, d), (c, d)):
        raise ValueError(
            f"{_name(rule)}.{what} returns a tensor of shape {tuple(moment.shape)} for {' + '.join(names)}: it "
            f"must be [{c} {d} {d}], or the diagonal [{c} {d}], as {_name(rule)}.shape says"
        )


def check_length(rule: Rule, what: str, names: Sequence[str], c: int, d: int, size: int) -> None:
    """Rows of ``size`` numbers, of a layer with c groups whose factor is [c d d]."""
    if c != 1 or size != d:
        raise ValueError(
            f"{_name(rule)}.{what} returns rows of {size} numbers for {' + '.join(names)}: there must be {d} in each, "
            f"and one group, not {c}, as {_name(rule)}.shape says"
        )


def _name(rule: Rule) -> str:
    return type(rule).__name__
