"""Who keeps the metric of which layer: several processes divide it by layers, whatever divides the parameters.

Every process estimates the factors of all layers on its part of the batch. Those of a layer go to its owners, which
average them over the processes, invert them, and keep both:

    S_r, A_r  ──triangles──►  owner: S̄, Ā, S⁻¹, A⁻¹           when the metric is estimated
    ω         ──shards─────►  owner: v = S⁻¹ωA⁻¹  ──►  shards   in every step

So a process keeps 1/R of the metric of R processes (KAISA: Pauloski et al. 2021), and an inverse never travels.
``DTensor`` says which part of a parameter a process has (FSDP2, HSDP); with ``DistributedDataParallel`` it has all.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from natgrad.accelerate.temporaries import CHUNK_BYTES
from natgrad.errors import IncompatibleError
from natgrad.geometry import Covector, Vector
from natgrad.pullbacks.layer import Block
from natgrad.sharding import Exchange, Extent, Layout, is_sharded, layout, local, owners, told
from natgrad.step.base import Rates, pairings
from natgrad.structures.base import FALLBACK, Inverse, Operator
from natgrad.structures.base import Layout as MetricLayout
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator
from natgrad.structures.layered import Basis, LayerOperator, layer_tensors

Unit: TypeAlias = tuple[str, Tensor, bool]  # of a layer: whose it is, a tensor, and whether that is symmetric


@final
class LayerOwners:
    """The owners of layers in a group of processes, all of which make the same calls.

    ``params``: as this process has them. ``share``: of the processes, the part that keeps a layer. With 1/R every layer
    has one owner. The processes form as many teams as a layer could have owners apart, and a layer belongs to a team.
    """

    def __init__(self, params: Mapping[str, Tensor], group: dist.ProcessGroup, share: float) -> None:
        self._group, self._rank, self._size = group, dist.get_rank(group), dist.get_world_size(group)
        self.teams: int = max(n for n in range(1, self._size + 1) if not self._size % n and n * share <= 1 + 1e-9)
        self._like: Any = next(iter(params.values()))
        self._device = self._like.device
        self._parts: Layout = layout({name: Extent.of(p) for name, p in params.items()}, group)
        first = {name: min(r for r, e in of.items() if e == of[self._rank]) for name, of in self._parts.items()}
        self._counted = {name for name, rank in first.items() if rank == self._rank}  # of copies the first one counts
        self.is_sharded: bool = is_sharded(self._like)
        self._team: dict[str, int] = {}  # of every layer, by its first parameter, and of the fallback
        self._ways: tuple[Exchange, Exchange] | None = None
        self.layers: LayerOperator | None = None  # all of them, with their bases, and without what owners keep
        self._next: LayerOperator | None = None  # the same after this step
        self._bases: tuple[Basis, Basis] | None = None  # of all layers, and of those that are kept here
        self._renewed = False  # the second is not that of the last step
        self._rotations: dict[str, tuple[int, ...]] = {}  # the shapes of Q and P

    def assign(self, G: LayerOperator) -> None:
        """Give every layer of a metric to a team: the dearest first, none more than 1.2 of its share of the memory."""
        if self._team:
            return
        names = [block.names[0] for block in G.blocks]
        kept = G.tensors()
        sizes = [float(sum(t.numel() for key, t in kept.items() if key.startswith(f"{name}/"))) for name in names]
        if G.fallback is not None:
            names.append(FALLBACK)
            sizes.append(float(sum(t.numel() for t in G.fallback.tensors().values())))
        for letter, side in (("Q", G.left), ("P", G.right)):
            pairs = zip(G.blocks, side, strict=True)
            self._rotations |= {f"{block.names[0]}/{letter}": tuple(t.shape) for block, t in pairs if t.ndim == 3}
        self._team = dict(zip(names, division([b.shape for b in G.blocks], sizes, self.teams), strict=True))
        home = {name: self._team[block.names[0]] for block in G.blocks for name in block.names}
        if G.fallback is not None:
            home |= dict.fromkeys(G.fallback.layout.like, self._team[FALLBACK])
        wholes = {name: Extent.whole(t.shape) for name, t in G.layout.like.items()}
        here = {name: dict.fromkeys(self._ranks(home[name]), wholes[name]) for name in wholes}
        have = {name: self._parts[name] for name in wholes}
        self._ways = Exchange(have, here, self._group), Exchange(here, have, self._group)

    def _ranks(self, team: int) -> Iterable[int]:
        return range(team, self._size, self.teams)

    def _is_mine(self, name: str) -> bool:
        return self._team[name] == self._rank % self.teams

    def kept(self, G: LayerOperator) -> LayerOperator:
        """What this process keeps of a metric of all layers."""
        return self.part(G, fallback=G.fallback is not None and self._is_mine(FALLBACK))

    def part(self, G: LayerOperator, *, fallback: bool) -> LayerOperator:
        """The layers of this process, with the fallback or without."""
        return G.only([b for b, block in enumerate(G.blocks) if self._is_mine(block.names[0])], fallback=fallback)

    # Estimates.

    def mean(self, estimate: LayerOperator, n: int) -> LayerOperator:
        """The layers that this process keeps, averaged over all processes by their numbers of examples n."""
        self.assign(estimate)
        total = self._used_alike(estimate, n)
        units = list(self._units(estimate))
        means = {}
        arriving: list[tuple[list[Unit], Tensor, object]] = []
        for bucket in _buckets(units):
            arriving.append(self._send(bucket, n / total))
            if len(arriving) > 1:  # one travels while the next is packed
                means.update(self._received(*arriving.pop(0)))
        for each in arriving:
            means.update(self._received(*each))
        unseen = estimate.unseen if self.layers is None else estimate.unseen & self.layers.unseen
        self._next = replace(estimate.without_tensors(), unseen=unseen)  # type: ignore[type-var]  # a dataclass
        out = self.kept(estimate).with_tensors(means)
        if not isinstance(out, EigenKroneckerOperator) or not isinstance(estimate, EigenKroneckerOperator):
            return out
        if self._bases is None or self._bases[0] is not estimate.basis:
            return out
        return replace(out, basis=self._bases[1])

    def _used_alike(self, estimate: LayerOperator, n: int) -> float:
        """Σ n. Raises, in every process, if some have used a layer that others have not."""
        flags = [float(block.names[0] not in estimate.unseen) for block in estimate.blocks]
        told = torch.tensor([float(n), *flags], dtype=torch.float64, device=estimate.device)
        dist.all_reduce(told, group=self._group)
        total, *counts = told.tolist()
        names = [b.title for b, count in zip(estimate.blocks, counts, strict=True) if 0 < count < self._size]
        if names:
            raise IncompatibleError(
                f"some processes have used {', '.join(names)} in this step and others have not: choose the layers that "
                "are skipped alike in all processes, with random numbers of the same seed"
            )
        return total

    def _units(self, G: LayerOperator) -> Iterator[Unit]:
        for letter, side in G.averaged_letters.items():
            for block, t in zip(G.blocks, side, strict=True):
                yield f"{block.names[0]}/{letter}", t, letter in "SA" and t.ndim == 3
        if G.fallback is not None:
            averaged = G.fallback.averaged()
            if averaged is None:
                G.fallback.refuse("owners=", "its averages are more than sums; use Diagonal() or BlockDense()")
            for key, t in averaged.items():
                yield FALLBACK + key, t, False

    def _team_of(self, key: str) -> int:
        return self._team[FALLBACK if key.startswith(FALLBACK) else key.rpartition("/")[0]]

    def _send(self, bucket: list[Unit], weight: float) -> tuple[list[Unit], Tensor, object]:
        packed: list[list[Tensor]] = [[] for _ in range(self.teams)]
        mine = []
        for key, t, symmetric in bucket:
            packed[self._team_of(key)].append((folded(t) if symmetric else t).reshape(-1) * weight)
            if self._team_of(key) == self._rank % self.teams:
                mine.append((key, t, symmetric))
        like = bucket[0][1]
        of_team = [torch.cat(pieces) if pieces else like.new_empty(0) for pieces in packed]
        sizes = [len(of_team[rank % self.teams]) for rank in range(self._size)]
        here = sizes[self._rank]
        sent = torch.cat([of_team[rank % self.teams] for rank in range(self._size)])
        arrived = like.new_empty(self._size, here)
        work = dist.all_to_all_single(
            arrived.view(-1), sent, [here] * self._size, sizes, group=self._group, async_op=True
        )
        return mine, arrived, (work, sent)

    def _received(self, mine: list[Unit], arrived: Tensor, travelling: object) -> dict[str, Tensor]:
        travelling[0].wait()  # type: ignore[index]
        sizes = [_folded_size(t) if symmetric else t.numel() for _, t, symmetric in mine]
        out = {}
        for (key, t, symmetric), total in zip(mine, arrived.sum(0).split(sizes), strict=True):
            out[key] = unfolded(total, t.shape) if symmetric else total.view(t.shape).clone()
        return out

    @property
    def all_layers(self) -> LayerOperator:
        """All layers, as they are in this step."""
        layers = self._next or self.layers
        assert layers is not None
        return layers

    def with_new_basis(self, kept: LayerOperator) -> Operator:
        """The kept layers with new eigenvectors, if they have some; ``commit`` tells them to all."""
        self._renewed = isinstance(kept, EigenKroneckerOperator)
        return kept.with_new_basis()

    def commit(self, kept: LayerOperator) -> None:
        """After a step that succeeded: remember which layers there are, and in which bases estimates are made."""
        self.layers, self._next = self._next or self.layers, None
        if self._renewed:
            self.tell_basis(kept)

    def discard(self) -> None:
        """There is no step."""
        self._next, self._renewed = None, False

    def tell_basis(self, kept: LayerOperator) -> None:
        """Tell all processes the bases of all layers."""
        layers = self.all_layers
        assert isinstance(layers, EigenKroneckerOperator)
        assert isinstance(kept, EigenKroneckerOperator)
        self._bases, self._renewed = (self.bases(kept, layers.blocks), kept.basis), False
        self.layers = replace(layers, basis=self._bases[0])

    def bases(self, kept: EigenKroneckerOperator, blocks: Sequence[Block]) -> Basis:
        """The bases of all layers, from those that every process has; all of them call this together."""
        wholes = {key: Extent.whole(shape) for key, shape in self._rotations.items()}
        have = {key: dict.fromkeys(self._ranks(self._team_of(key)), extent) for key, extent in wholes.items()}
        want = {key: dict.fromkeys(range(self._size), extent) for key, extent in wholes.items()}
        mine = layer_tensors(kept.blocks, {"Q": kept.basis.left, "P": kept.basis.right})
        like = torch.empty(0, dtype=kept.layout.dtype, device=self._device)
        tensors = Exchange(have, want, self._group).start(mine, like).wait()
        left, right = (tuple(tensors.get(f"{b.names[0]}/{letter}") for b in blocks) for letter in "QP")
        return Basis(left, right)

    # Checkpoints: what owners keep is divided as the parameters are or, with ``DistributedDataParallel``, everywhere.

    def collected(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tensors of all owners by name, each divided over the processes; all of them call this together."""
        out: dict[str, Tensor] = {}
        mine = {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
        each = told(mine, self._group)
        kinds = {key: kind for of_rank in each for key, kind in of_rank.items()}
        for dtype in sorted({dtype for _, dtype in kinds.values()}, key=str):
            keys = sorted(key for key in kinds if kinds[key][1] == dtype)
            whole = {key: Extent.whole(kinds[key][0]) for key in keys}
            have = {key: {rank: whole[key] for rank, of in enumerate(each) if key in of} for key in keys}
            parts = {key: self._divided(kinds[key][0], dtype) for key in keys}
            want = layout({key: Extent.of(part) for key, part in parts.items()}, self._group)
            like = torch.empty(0, dtype=dtype, device=self._device)
            for key, t in Exchange(have, want, self._group).start(tensors, like).wait().items():
                local(parts[key]).copy_(t)
            out |= parts
        return out

    def divided(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Whole tensors, divided over the processes."""
        out = {key: self._divided(tuple(t.shape), t.dtype) for key, t in tensors.items()}
        for key, part in out.items():
            local(part).copy_(Extent.of(tensors[key]).cut(tensors[key], Extent.of(part)))
        return out

    def _divided(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A place for a tensor: its rows are divided as parameters are."""
        if not self.is_sharded or not math.prod(shape):
            return torch.empty(shape, dtype=dtype, device=self._device)
        from torch.distributed.tensor import Shard, empty

        axis = Shard(0 if shape[0] > 1 or len(shape) == 1 else 1)
        placements = [each if each.is_replicate() else axis for each in self._like.placements]
        return empty(*shape, dtype=dtype, device_mesh=self._like.device_mesh, placements=placements)

    def loaded(self, G: LayerOperator) -> LayerOperator:
        """What this process keeps of a metric that a checkpoint holds; ``adopt`` goes on with it."""
        self.assign(G)
        return self.kept(G)

    def adopt(self, G: LayerOperator, kept: LayerOperator) -> None:
        """Go on with a metric that a checkpoint holds, of which this is kept."""
        self.layers, self._next, self._renewed = G.without_tensors(), None, False
        if isinstance(G, EigenKroneckerOperator) and isinstance(kept, EigenKroneckerOperator):
            self._bases = G.basis, kept.basis

    def named(self, tensors: Mapping[str, Tensor], kept: LayerOperator) -> dict[str, Tensor]:
        """Those of the layers that are kept."""
        first = {block.names[0] for block in kept.blocks} | ({FALLBACK[:-1]} if kept.fallback is not None else set())
        return {key: t for key, t in tensors.items() if key.partition("/")[0] in first}

    # Steps.

    def sharp(self, inverse: Inverse, ω: Covector) -> tuple[Vector, Tensor]:
        """What this process has of ω♯ = (G + λ)⁻¹ω, and ⟨ω, ω♯⟩ []; ``inverse``: of the layers that it keeps."""
        assert self._ways is not None
        named = dict(ω.items())
        like = next(iter(named.values()))
        whole = self._ways[0].start(named, like).wait()
        mine = {name: whole[name] for name in inverse.layout.like}
        v, pairing = dict[str, Tensor](), like.new_zeros((), dtype=inverse.layout.dtype)
        if mine:
            found, pairing = inverse.sharp_with_pairing(Covector(mine))
            v = dict(found.items())
            pairing = pairing * (self._rank < self.teams)  # of a team the first one counts
        arrival = self._ways[1].start(v, like)
        dist.all_reduce(pairing, group=self._group)
        arrived = arrival.wait()
        return Vector({name: arrived[name] for name in named}), pairing

    def kept_of(self, v: Vector, kept: MetricLayout) -> Vector:
        """A vector of which this process has a part, whole on the parameters of the layers that it keeps."""
        assert self._ways is not None
        named = dict(v.items())
        whole = self._ways[0].start(named, next(iter(named.values()))).wait()
        return Vector({name: whole[name] for name in kept.like})

    def pairings(self, ω: Covector, v: Vector, rates: Rates) -> list[Tensor]:
        """⟨ω, v⟩ [] of every group, of all processes."""
        mine = [([name for name in names if name in self._counted], rate) for names, rate in rates]
        zero = next(iter(v.values())).new_zeros((), dtype=torch.float64)
        terms = [pairings(ω, v, [pair])[0].double() if pair[0] else zero for pair in mine]
        total = torch.stack(terms)
        dist.all_reduce(total, group=self._group)
        return list(total.unbind())

    def beside(self, kept: LayerOperator) -> LayerOperator:
        """The kept layers with the size of the largest gradient of all, beside which others are rounding."""
        here = kept.largest_gradient
        here = torch.zeros((), dtype=kept.layout.dtype, device=self._device) if here is None else here
        return replace(kept, elsewhere=self.largest(here))  # type: ignore[type-var]  # a dataclass

    def largest(self, number: Tensor) -> Tensor:
        """The largest number [] of all processes."""
        number = number.clone()
        dist.all_reduce(number, dist.ReduceOp.MAX, group=self._group)
        return number


def division(shapes: Sequence[tuple[int, int, int]], sizes: Sequence[float], count: int) -> list[int]:
    """Who owns layers of these shapes [c o i], and the fallback, if there is one more size, among ``count``."""
    costs = [float(c * (o**3 + i**3)) for c, o, i in shapes]
    return owners([*costs, *sizes[len(costs) :]], count, sizes=sizes)


def _buckets(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """By type, and so that no more travels at once than a chunk."""
    kinds: dict[torch.dtype, list[Unit]] = {}
    for unit in units:
        kinds.setdefault(unit[1].dtype, []).append(unit)
    for of_kind in kinds.values():
        bucket, filled = list[Unit](), 0
        for unit in of_kind:
            if bucket and filled + unit[1].nbytes > CHUNK_BYTES:
                yield bucket
                bucket, filled = [], 0
            bucket.append(unit)
            filled += unit[1].nbytes
        yield bucket


def folded(t: Tensor) -> Tensor:
    """Half of symmetric matrices [c d d], [c d(d+1)/2]: the corner, and both triangles beside it in one rectangle.

    >>> folded(torch.tensor([[[1.0, 2.0], [2.0, 3.0]]]))
    tensor([[2., 3., 1.]])
    """
    h = t.shape[-1] // 2
    both = torch.nn.functional.pad(t[:, h:, h:].triu(), (0, 0, 0, 2 * h + 1 - t.shape[-1]))
    both[:, 1:, :h] += t[:, :h, :h].tril()
    return torch.cat([t[:, :h, h:].flatten(1), both.flatten(1)], 1)


def unfolded(flat: Tensor, shape: Sequence[int]) -> Tensor:
    """The inverse of ``folded``.

    >>> unfolded(torch.tensor([[2.0, 3.0, 1.0]]), (1, 2, 2))
    tensor([[[1., 2.],
             [2., 3.]]])
    """
    c, d, _ = shape
    h, k = d // 2, d - d // 2
    corner, both = flat.view(c, -1).split([h * k, (h + 1) * k], 1)
    out, both = flat.new_empty(c, d, d), both.view(c, h + 1, k)
    out[:, :h, h:] = corner.view(c, h, k)
    out[:, h:, :h] = corner.view(c, h, k).mT
    upper, lower = both[:, :k].triu(), both[:, 1:, :h].tril()
    out[:, h:, h:] = upper + upper.triu(1).mT
    out[:, :h, :h] = lower + lower.tril(-1).mT
    return out


def _folded_size(t: Tensor) -> int:
    c, d, _ = t.shape
    return c * math.comb(d + 1, 2)
