"""Tensors that are divided over processes: who has which part, who computes with the whole, and how parts travel.

A process of a group has an ``Extent`` of a tensor, and a ``Layout`` says which one every process has. What needs a
whole tensor is done by one process each, its owner (``owners``: the largest first, so that all are equally busy and
none keeps more than its share). An ``Exchange`` brings tensors from one layout into another: shards to owners, results
to shards, a state into a checkpoint. It is one ``all_to_all_single``, and others may be under way.

Nothing here knows what the tensors are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias, cast, final

import torch
import torch.distributed as dist
from torch import Tensor

_SURPLUS = 1.2  # of its share of all sizes a process may keep, beside the last tensor that it took


@final
@dataclass(frozen=True)
class Extent:
    """A box of a tensor: on every axis the indices from a start to before a stop.

    >>> rows = Extent((0, 0), (2, 3))
    >>> rows.meet(Extent((1, 1), (4, 3)))
    Extent(starts=(1, 1), stops=(2, 3))
    """

    starts: tuple[int, ...]
    stops: tuple[int, ...]

    @staticmethod
    def whole(shape: Sequence[int]) -> Extent:
        """All of a tensor."""
        return Extent((0,) * len(shape), tuple(shape))

    @staticmethod
    def of(t: Tensor) -> Extent:
        """What this process has: of a ``DTensor`` its shard, of another tensor everything."""
        if not is_sharded(t):
            return Extent.whole(t.shape)
        (chunk,) = cast(Any, t).__create_chunk_list__()
        ends = (start + size for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        return Extent(tuple(chunk.offsets), tuple(ends))

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """How many indices on every axis."""
        return tuple(stop - start for start, stop in zip(self.starts, self.stops, strict=True))

    @cached_property
    def size(self) -> int:
        """How many numbers."""
        return math.prod(self.shape)

    def meet(self, other: Extent) -> Extent | None:
        """What two extents have in common; None if that is nothing."""
        starts = tuple(map(max, self.starts, other.starts))
        stops = tuple(map(min, self.stops, other.stops))
        return None if any(map(int.__ge__, starts, stops)) else Extent(starts, stops)

    def cut(self, t: Tensor, part: Extent) -> Tensor:
        """A part of t, which is what lies in this extent."""
        for axis, (start, length) in enumerate(zip(part.starts, part.shape, strict=True)):
            if length != t.shape[axis]:
                t = t.narrow(axis, start - self.starts[axis], length)
        return t


Layout: TypeAlias = Mapping[str, Mapping[int, Extent]]  # of every tensor, by name, what the processes have, by rank


def is_sharded(t: Tensor) -> bool:
    """Whether this process has a part of the tensor. (By name: the import would take longer than all else here.)"""
    return type(t).__name__ == "DTensor"


def local(t: Tensor) -> Tensor:
    """The part of a tensor that this process has, in its memory."""
    return cast(Any, t).to_local() if is_sharded(t) else t


def gradient_of(p: Tensor) -> Tensor:
    """The part of its gradient that this process has, divided as p is."""
    g, like = cast(Any, p.grad), cast(Any, p)
    alike = not is_sharded(g) or g.placements == like.placements
    return local(g if alike else g.redistribute(placements=like.placements))


def divided_as(p: Tensor, t: Tensor) -> Tensor:
    """A whole tensor of the shape of p, or the part of it that this process has, divided as p is; others as they are.

    Of a part and a whole of one shape it does not matter which it is.
    """
    if not is_sharded(p) or is_sharded(t) or t.shape not in (p.shape, local(p).shape):
        return t
    out = torch.empty_like(p, dtype=t.dtype, requires_grad=False)
    local(out).copy_(Extent.of(t).cut(t, Extent.of(p)) if t.shape == p.shape else t)
    return out


def shape_of(t: Tensor) -> Tensor:
    """A tensor of the shape and type of the whole, on the meta device, without values."""
    like = torch.empty(t.shape, dtype=t.dtype, device="meta") if is_sharded(t) else torch.empty_like(t, device="meta")
    return like.requires_grad_(False)


def whole(t: Tensor) -> Tensor:
    """All of a tensor. Of a ``DTensor`` all processes call this together."""
    return cast(Any, t).full_tensor() if is_sharded(t) else t


def group_of(mesh: Any) -> dist.ProcessGroup:
    """The processes of a ``DeviceMesh`` with any number of axes. All of them call this together."""
    if mesh.ndim == 1:
        return mesh.get_group()
    ranks = mesh.mesh.flatten().tolist()
    if len(ranks) == dist.get_world_size():
        return cast(dist.ProcessGroup, dist.group.WORLD)
    return cast(dist.ProcessGroup, dist.new_group(ranks, use_local_synchronization=True))


def layout(mine: Mapping[str, Extent], group: dist.ProcessGroup) -> dict[str, dict[int, Extent]]:
    """The extents of all processes. All of them call this together."""
    out: dict[str, dict[int, Extent]] = {}
    for rank, extents in enumerate(told(mine, group)):
        for name, extent in extents.items():
            out.setdefault(name, {})[rank] = extent
    return out


def told(mine: Any, group: dist.ProcessGroup) -> list[Any]:
    """What every process says. All of them call this together."""
    each = [None] * dist.get_world_size(group)
    dist.all_gather_object(each, mine, group)
    return each


def owners(
    costs: Sequence[float],
    count: int,
    *,
    sizes: Sequence[float] | None = None,
    candidates: Sequence[Sequence[int]] | None = None,
) -> list[int]:
    """Who owns what among ``count`` processes: the dearest first, each for the process with the least work so far.

    ``costs``: work. ``sizes``: memory, of which no process keeps more than 1.2 × its share and one thing beside, by
    default as the work. ``candidates``: the processes that may own a thing, by default all (there the bound holds).

    The rule "longest processing time first" is at most 4/3 slower than the best division (Graham 1969).

    >>> owners([3.0, 1.0, 2.0, 2.0], 2)
    [0, 0, 1, 1]
    """
    sizes = costs if sizes is None else sizes
    work, memory, out = [0.0] * count, [0.0] * count, [0] * len(costs)
    share = _SURPLUS * sum(sizes) / count
    for at in sorted(range(len(costs)), key=lambda at: -costs[at]):
        possible = range(count) if candidates is None else candidates[at]
        free = [rank for rank in possible if memory[rank] <= share] or possible
        out[at] = rank = min(free, key=lambda rank: (work[rank], memory[rank]))
        work[rank] += costs[at]
        memory[rank] += sizes[at]
    return out


@final
class Exchange:
    """Tensors of one type from a layout into another, by one ``all_to_all_single`` of a group.

    ``have`` and ``want`` name the same tensors, in all processes in the same order. An extent that several processes
    have comes from the nearest. Where nothing leaves a process there is no call.
    """

    def __init__(self, have: Layout, want: Layout, group: dist.ProcessGroup) -> None:
        self._group, size = group, dist.get_world_size(group)
        self._rank = rank = dist.get_rank(group)
        self._have = {name: have[name][rank] for name in want if rank in have[name]}
        self._want = {name: extents[rank] for name, extents in want.items() if rank in extents}
        self._sends: list[list[tuple[str, Extent]]] = [[] for _ in range(size)]
        self._receives: list[list[tuple[str, Extent]]] = [[] for _ in range(size)]
        self._travels = False
        for name, to, source, piece in _pieces(have, want):
            self._travels = self._travels or source != to
            if source == rank:
                self._sends[to].append((name, piece))
            if to == rank:
                self._receives[source].append((name, piece))

    def start(self, parts: Mapping[str, Tensor], like: Tensor) -> Arrival:
        """Send what this process has; ``like``: a tensor of the type and the device."""
        pieces = [self._have[name].cut(parts[name], piece) for to in self._sends for name, piece in to]
        sent = torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else like.new_empty(0)
        if not self._travels:
            return Arrival(self._want, self._receives, sent, None)
        taken, given = ([sum(piece.size for _, piece in to) for to in way] for way in (self._receives, self._sends))
        arrived = sent.new_empty(sum(taken))
        work = dist.all_to_all_single(arrived, sent, taken, given, group=self._group, async_op=True)
        return Arrival(self._want, self._receives, arrived, (work, sent))


@final
class Arrival:
    """Tensors on their way."""

    def __init__(
        self, want: Mapping[str, Extent], pieces: Sequence[Sequence[tuple[str, Extent]]], arrived: Tensor, work: Any
    ) -> None:
        self._want, self._pieces, self._arrived, self._work = want, pieces, arrived, work

    def wait(self) -> dict[str, Tensor]:
        """The tensors that this process wants; on a GPU its queue waits, not the host."""
        if self._work is not None:
            self._work[0].wait()
        pairs = [pair for source in self._pieces for pair in source]
        chunks = self._arrived.split([piece.size for _, piece in pairs])
        whole = {name: chunk.view(piece.shape) for (name, piece), chunk in zip(pairs, chunks, strict=True)}
        out = {}
        for name, extent in self._want.items():
            is_one = name in whole and whole[name].shape == extent.shape
            out[name] = whole[name] if is_one else self._arrived.new_empty(extent.shape)
        for (name, piece), chunk in zip(pairs, chunks, strict=True):
            if piece != self._want[name]:
                self._want[name].cut(out[name], piece).copy_(chunk.view(piece.shape))
        return out


def _pieces(have: Layout, want: Layout) -> Iterator[tuple[str, int, int, Extent]]:
    """What goes to whom, and from whom."""
    for name, wanted in want.items():
        holders: dict[Extent, list[int]] = {}
        for rank, extent in have[name].items():
            holders.setdefault(extent, []).append(rank)
        for to, extent in wanted.items():
            for held, ranks in holders.items():
                piece = extent.meet(held)
                if piece is not None:
                    yield name, to, min(ranks, key=lambda rank: abs(rank - to)), piece
