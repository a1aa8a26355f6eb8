"""Several processes that train one model: each computes directions of some matrices, and all take the same steps.

``DTensor`` says which part of a parameter a process has (FSDP2, HSDP, tensor and expert parallelism, and products of
these). What is done number by number (AdamW, the update) is done on the shards. A direction needs whole matrices, and
every matrix has an owner: gradients travel to owners, which keep momentum and statistics, and directions travel back.
Of a stack every process owns the matrices that it has. In ``DistributedDataParallel`` every process has all gradients
and keeps the whole state: owners compute what is expensive, and send it to the others.

In a checkpoint the state of a matrix is a ``DTensor``, too, so that it can be read with any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, TypeAlias, cast, final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from natgrad.accelerate.fused import norms
from natgrad.accelerate.modules import in_join
from natgrad.accelerate.temporaries import CHUNK_BYTES
from natgrad.errors import IncompatibleError
from natgrad.gradients.assignment import Assignment
from natgrad.sharding import Exchange, Extent, Layout, group_of, is_sharded, layout, local, owners, told

State: TypeAlias = dict[str, Tensor]
Member: TypeAlias = tuple[Tensor, Assignment, State]
Shapes: TypeAlias = Callable[[Assignment], Mapping[str, tuple[int, ...]]]  # of the state of a matrix


@final
class Stage:
    """Matrices that travel and step together: all of them, where there is one process.

    ``members``: of every parameter group the matrices whose state this process keeps, with whole gradients ``grads``.
    ``owned``: those whose directions it computes; None: all.
    """

    def __init__(
        self,
        members: Sequence[Sequence[Member]],
        grads: Mapping[str, Tensor],
        *,
        owned: Collection[str] | None = None,
        back: tuple[Exchange, Tensor] | None = None,
    ) -> None:
        self.grads: Mapping[str, Tensor] = grads
        self.owned: Collection[str] | None = owned
        self.members, self._back = members, back

    def send(self, directions: dict[str, Tensor]) -> None:
        """Directions set out to all processes that have the parameters."""
        self._sent: Any = directions if self._back is None else self._back[0].start(directions, self._back[1])

    def received(self) -> dict[str, Tensor]:
        """What this process has of the directions of these matrices."""
        return self._sent if self._back is None else self._sent.wait()


@final
class Owners:
    """Who owns which matrix, in all groups of processes that share parameters. All of them make the same calls."""

    def __init__(
        self, params: Sequence[tuple[Tensor, Assignment]], ddp: DistributedDataParallel | None, shapes: Shapes
    ) -> None:
        self._ddp, self._shapes = ddp, shapes
        by_ranks: dict[tuple[int, ...], list[tuple[Tensor, Assignment]]] = {}
        for p, a in params:
            ranks = tuple(cast(Any, p).device_mesh.mesh.flatten().tolist()) if is_sharded(p) else ()
            by_ranks.setdefault(ranks, []).append((p, a))
        self._groups = []
        for ranks in sorted(by_ranks, key=lambda ranks: (len(ranks), ranks)):
            if ranks or ddp is not None:
                of_group = {a.name: (p, a) for p, a in by_ranks[ranks]}
                mesh = cast(Any, by_ranks[ranks][0][0]).device_mesh if ranks else None
                group = group_of(mesh) if ranks else cast(DistributedDataParallel, ddp).process_group
                self._groups.append(_Sharers(group, of_group, shapes, everywhere=not ranks))
        self._of = {name: group for group in self._groups for name in group.home}

    @property
    def is_one(self) -> bool:
        """Whether no other process has a part."""
        return all(group.size == 1 for group in self._groups)

    def stages(self, matrices: Sequence[Sequence[Member]], grads: Mapping[str, Tensor]) -> Iterator[Stage]:
        """Gradients set out to owners, and arrive one bucket after the other."""
        if self._ddp is not None and in_join(self._ddp):
            raise IncompatibleError(
                "with model.join() a process without batches makes no step, and the others would wait for the "
                "directions of its matrices: give all processes equally many batches (DistributedSampler does), and "
                "leave out join()"
            )
        at = {member[1].name: (number, member) for number, members in enumerate(matrices) for member in members}
        travelling = []
        for group in self._groups:
            for names, there, back in group.buckets(tuple(name for name in group.home if name in at)):
                like = grads[names[0]]
                is_here = group.everywhere or group.size == 1
                arrival = None if is_here else there.start({name: grads[name] for name in names}, like)
                travelling.append((group, names, arrival, None if group.size == 1 else (back, like.new_empty(0))))
        plain = [[member for member in members if member[1].name not in self._of] for members in matrices]
        if any(plain):
            yield Stage(plain, grads)
        for group, names, arrival, way in travelling:
            whole = grads if arrival is None else arrival.wait()
            kept: list[list[Member]] = [[] for _ in matrices]
            for name in names:
                number, (p, a, state) = at[name]
                if group.everywhere:
                    kept[number].append((p, a, state))
                elif name in group.mine:
                    kept[number].append((whole[name], group.mine[name], state))
            yield Stage(kept, whole, owned=group.mine if group.everywhere else None, back=way)

    def total(self, number: Tensor) -> Tensor:
        """Σ of a number over the processes that have shards: it is finite only if it is so in all of them."""
        return self._reduced(number, dist.ReduceOp.SUM)

    def lengths(self, v: Mapping[str, Tensor], computed: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Tensor]:
        """‖v‖ [] of whole matrices, and a number that is finite only if they are so in all processes.

        ``v``: what this process has of the directions. ``computed``: those that it owns.
        """
        known = {name: t for name, t in v.items() if name not in self._of or self._of[name].everywhere} | dict(computed)
        squares = dict(zip(known, [x.square() for x in norms(list(known.values()))] if known else (), strict=True))
        zero = next(iter(v.values())).new_zeros((), dtype=torch.float64)
        total = sum(squares.values(), zero)
        for group in self._groups:
            names = [name for name in group.home if name in v]
            if not group.everywhere and group.size > 1:
                sums = torch.stack([*(squares.get(name, zero) for name in names), total])
                dist.all_reduce(sums, group=group.processes)
                *of_group, total = sums.unbind()
                squares |= dict(zip(names, of_group, strict=True))
        return {name: squares[name].sqrt() for name in v}, total

    def largest(self, numbers: Tensor) -> Tensor:
        """The largest number of all processes, but for NaN and infinity."""
        finite = torch.cat([numbers, numbers.new_zeros(1)]).nan_to_num(0.0, 0.0, 0.0)
        return self._reduced(finite.amax(), dist.ReduceOp.MAX)

    def _reduced(self, number: Tensor, operation: Any) -> Tensor:
        for group in self._groups:  # small groups before large ones, of which they are parts
            if not group.everywhere and group.size > 1:
                dist.all_reduce(number, operation, group=group.processes)
        return number

    def share(self, states: Mapping[str, State], letters: Sequence[str]) -> None:
        """Send what owners have decomposed to the other processes that keep it, in their states by name."""
        for group in self._groups:
            if not group.everywhere or not letters:
                continue
            have, want, tensors = dict[str, Any](), dict[str, Any](), dict[str, Tensor]()
            for name in group.home:
                for letter, shape in self._shapes(group.params[name][1]).items():
                    if name in states and letter in letters:
                        extent, (owner,) = Extent.whole(shape), group.home[name]
                        have[f"{name} {letter}"] = {owner: extent}
                        want[f"{name} {letter}"] = dict.fromkeys(range(group.size), extent)
                        if name in group.mine:
                            tensors[f"{name} {letter}"] = states[name][letter]
            dtypes = {key: group.params[key.rpartition(" ")[0]][0].dtype for key in have}
            types = {key: torch.promote_types(dtype, torch.float32) for key, dtype in dtypes.items()}
            for key, t in group.moved(tensors, have, want, types).items():
                name, _, letter = key.rpartition(" ")
                if name not in group.mine:
                    states[name][letter] = t.clone()

    def for_checkpoint(self, states: Mapping[Tensor, State]) -> dict[str, State]:
        """The states of matrices, by name, divided as their parameters are."""
        out: dict[str, State] = {}
        for group in self._groups:
            if group.everywhere:
                continue
            tensors = {f"{name} {key}": t for name in group.mine for key, t in states[group.params[name][0]].items()}
            types = {key: t.dtype for key, t in tensors.items()}
            types = {key: dtype for each in told(types, group.processes) for key, dtype in each.items()}
            have = {key: extents for key, extents in self._regions(group).items() if key in types}
            parts = {key: self._divided(group, key, dtype) for key, dtype in types.items()}
            want = layout({key: Extent.of(t) for key, t in parts.items()}, group.processes)
            for key, t in group.moved(tensors, have, want, types).items():
                local(parts[key]).copy_(t)
            for key, part in parts.items():
                name, _, letter = key.rpartition(" ")
                out.setdefault(name, {})[letter] = part
        return out

    def from_checkpoint(self, states: MutableMapping[Tensor, State]) -> None:
        """Bring states of matrices, divided in any way, to their owners; other processes forget them."""
        for group in self._groups:
            if group.everywhere:
                continue
            extents, params = self._regions(group), group.params
            given = {f"{name} {key}": t for name in group.home for key, t in states.get(params[name][0], {}).items()}
            given = {key: t for key, t in given.items() if key in extents}
            have = layout({key: Extent.of(t) for key, t in given.items()}, group.processes)
            want = {key: extents[key] for key in given}
            types = {key: t.dtype for key, t in given.items()}
            moved = group.moved({key: local(t) for key, t in given.items()}, have, want, types)
            for name in group.home:
                states[params[name][0]] = {}
            for key, t in moved.items():
                name, _, letter = key.rpartition(" ")
                states[params[name][0]][letter] = t.clone()

    def _regions(self, group: _Sharers) -> dict[str, dict[int, Extent]]:
        """What owners keep of the states of all matrices: of a stack, some of it."""
        out: dict[str, dict[int, Extent]] = {}
        for name, homes in group.home.items():
            a = group.params[name][1]
            for key, shape in self._shapes(a).items():
                for owner, extent in homes.items():
                    ends = (end * shape[0] // a.shape[0] for end in (extent.starts[0], extent.stops[0]))
                    first, last = (0, shape[0]) if extent.shape == a.shape else ends
                    rows = Extent((first, *[0] * (len(shape) - 1)), (last, *shape[1:]))
                    out.setdefault(f"{name} {key}", {})[owner] = rows
        return out

    def _divided(self, group: _Sharers, key: str, dtype: torch.dtype) -> Tensor:
        """A place for a part of the state: momentum is divided as its parameter, the rest by matrices or rows."""
        from torch.distributed.tensor import Shard, empty

        name, _, letter = key.rpartition(" ")
        p, a = group.params[name]
        if letter == "momentum":
            return torch.empty_like(p, dtype=dtype)
        shape, like = self._shapes(a)[letter], cast(Any, p)
        axis = Shard(0 if shape[0] > 1 else 1)
        placements = [each if each.is_replicate() else axis for each in like.placements]
        return empty(*shape, dtype=dtype, device_mesh=like.device_mesh, placements=placements)


@final
class _Sharers:
    """The processes that share some parameters. ``everywhere``: each of them has all, and keeps the whole state."""

    def __init__(
        self,
        processes: dist.ProcessGroup,
        params: Mapping[str, tuple[Tensor, Assignment]],
        shapes: Shapes,
        *,
        everywhere: bool,
    ) -> None:
        self.processes, self.params, self.everywhere = processes, params, everywhere
        self.rank, self.size = dist.get_rank(processes), dist.get_world_size(processes)
        matrices = {name: Extent.of(p) for name, (p, a) in params.items() if a.is_matrix}
        ranks = range(self.size)
        everyone = {name: dict.fromkeys(ranks, extent) for name, extent in matrices.items()}
        self._have: Layout = everyone if everywhere else layout(matrices, processes)
        units = [(name, part) for name in matrices for part in _units(params[name][1], self._have[name])]
        parts = [replace(params[name][1], shape=part.shape) for name, part in units]
        costs = [_cost(a, shapes(a)) for a in parts]
        sizes = [float(sum(map(prod, shapes(a).values()))) for a in parts]
        candidates = [
            [rank for rank in ranks if not a.stack or part.meet(self._have[name].get(rank, part)) is not None]
            for (name, part), a in zip(units, parts, strict=True)
        ]
        self.home: dict[str, dict[int, Extent]] = {}
        self.mine: dict[str, Assignment] = {}
        chosen = owners(costs, self.size, sizes=sizes, candidates=candidates)
        for at in sorted(range(len(units)), key=lambda at: -costs[at]):  # alike matrices, of several owners, together
            (name, part), owner = units[at], chosen[at]
            self.home.setdefault(name, {})[owner] = part
            if owner == self.rank:
                self.mine[name] = parts[at]
        self._buckets: dict[tuple[str, ...], list[tuple[list[str], Exchange, Exchange]]] = {}

    def buckets(self, names: tuple[str, ...]) -> list[tuple[list[str], Exchange, Exchange]]:
        """These matrices, by type and so that no process computes with too many at once; their ways there and back."""
        if names not in self._buckets:
            most, filled, buckets = CHUNK_BYTES * self.size, dict[torch.dtype, int](), list[list[str]]()
            last: dict[torch.dtype, list[str]] = {}
            for name in names:
                p, a = self.params[name]
                size = prod(a.shape) * p.element_size()
                if p.dtype not in last or filled[p.dtype] + size > most:
                    last[p.dtype], filled[p.dtype] = [], 0
                    buckets.append(last[p.dtype])
                last[p.dtype].append(name)
                filled[p.dtype] += size
            self._buckets = {names: []}
            for bucket in buckets:
                have, home = ({name: of[name] for name in bucket} for of in (self._have, self.home))
                way = Exchange(have, home, self.processes), Exchange(home, have, self.processes)
                self._buckets[names].append((bucket, *way))
        return self._buckets[names]

    def moved(
        self, tensors: Mapping[str, Tensor], have: Layout, want: Layout, types: Mapping[str, torch.dtype]
    ) -> dict[str, Tensor]:
        """Tensors in another layout, all of one type at once."""
        out: dict[str, Tensor] = {}
        device = local(next(iter(self.params.values()))[0]).device
        for dtype in sorted(set(types.values()), key=str):
            keys = sorted(key for key in types if types[key] == dtype)
            exchange = Exchange({key: have[key] for key in keys}, {key: want[key] for key in keys}, self.processes)
            like = torch.empty(0, dtype=dtype, device=device)
            mine = {key: tensors[key].to(device) for key in keys if key in tensors}
            out |= exchange.start(mine, like).wait()
        return out


def _units(a: Assignment, have: Mapping[int, Extent]) -> list[Extent]:
    """What has one owner: a matrix, or the matrices of a stack that processes have."""
    spans = sorted({(extent.starts[0], extent.stops[0]) for extent in have.values() if extent.size})
    ends = [0, *(stop for _, stop in spans)]
    if not a.stack or [start for start, _ in spans] != ends[:-1] or ends[-1] != a.shape[0]:
        return [Extent.whole(a.shape)]
    rest = a.shape[1:]
    return [Extent((start, *[0] * len(rest)), (stop, *rest)) for start, stop in spans]


def _cost(a: Assignment, shapes: Mapping[str, tuple[int, ...]]) -> float:
    """Products of a direction: of a polar factor, and of the decompositions of whole factors."""
    n, k, o, i = a.sizes
    factors = [shape for shape in shapes.values() if len(shape) == 3 and shape[1] == shape[2] and shape[0] == n]
    return float(n * k * o * i * min(o, i) + sum(n * shape[1] ** 3 for shape in factors))
