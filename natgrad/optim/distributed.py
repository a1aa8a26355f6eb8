"""Several processes that train one model (``DistributedDataParallel``) share one metric, and the work to invert it.

Every process estimates the metric on its shard of the batch. All of them use the mean over all examples,

    G = Σ_r n_r G_r / Σ_r n_r          (for S, A and D, each by itself).

The expensive part, inverses and eigenvectors of the factors, is divided: each layer belongs to one process, which sends
its result to the others (Ba, Grosse and Martens 2017). So every process holds the whole state, and a checkpoint of any
of them can be loaded with any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, cast, final

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from natgrad.accelerate.fused import copy_
from natgrad.accelerate.modules import active_ddp, in_join
from natgrad.errors import IncompatibleError, NatgradError
from natgrad.linalg import Damping, Relative
from natgrad.optim.owners import LayerOwners
from natgrad.sharding import group_of, is_sharded
from natgrad.solve.solvers import Solver
from natgrad.structures.base import Inverse, Operator
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator
from natgrad.structures.kronecker import ProductInverse
from natgrad.structures.layered import LayerOperator

T = TypeVar("T")
Tensors: TypeAlias = Mapping[str, Tensor]


class Processes:
    """The processes that train one model: here one process alone.

    >>> Processes().mean_of([torch.ones(1)], 5)
    [tensor([1.])]
    """

    rank: int = 0
    size: int = 1
    owners: LayerOwners | None = None  # of layers, where no process keeps all

    def together(self, function: Callable[[], T]) -> T:
        """What a function returns; where layers have owners, an error of one process is raised by all."""
        return function()

    def raise_together(self, problem: Exception | None) -> None:
        """Raise the problem of one process in all of them; one that raised alone would leave the others waiting."""
        if problem is None:
            return
        try:
            raise problem
        finally:
            del problem  # an error in a variable would hold the optimizer, which its frames hold

    def check(self) -> None:
        """Raise where the processes that train one model would not all take the same steps."""

    def mean(self, operator: Operator, n: int, restore: Callable[[Tensors], Operator | None]) -> Operator:
        """The mean of the estimates of all processes, weighted by their numbers of examples n."""
        return operator

    def mean_of(self, values: Sequence[Tensor], n: int) -> list[Tensor]:
        """The mean of tensors over all processes, each by itself."""
        return list(values)

    def with_new_basis(self, G: Operator) -> Operator:
        """The metric with new eigenvectors, where it has some; each process does its share."""
        return G.with_new_basis() if isinstance(G, LayerOperator) else G

    def inverse(
        self, solver: Solver, G: Operator, damping: Damping, *, last: Inverse | None = None, warm: Tensors | None = None
    ) -> Inverse:
        """(G + λ)⁻¹ by the solver. Each process inverts its share of the layers.

        It starts from the ``last`` inverse, which may be overwritten, or from the tensors ``warm`` of one.
        """
        return solver.init(G, damping, warm) if last is None else solver.again(last, G, damping)


@final
class Alone(Processes):
    """A process that knows of no others, and would take steps of its own if there were any.

    ``cause``: what decides them. Gradients are not of this kind: the user may have averaged them.
    """

    def __init__(self, cause: str) -> None:
        self._cause = cause

    def check(self) -> None:
        size = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
        if size > 1:
            raise IncompatibleError(
                f"there are {size} processes, and the optimizer was given a model in no DistributedDataParallel: each "
                f"process would step by {self._cause}, and their parameters would drift apart. Wrap the model first, "
                "and give the wrapped one to the optimizer: model = DistributedDataParallel(model); "
                "opt = KFAC(model, …). "
                "If each process trains a model of its own, such as a stage of a pipeline, give the optimizer "
                "DistributedDataParallel(model, process_group=torch.distributed.new_subgroups(1)[0])"
            )


@final
class Group(Processes):
    """The processes of a process group; all of them make the same calls."""

    def __init__(
        self,
        group: dist.ProcessGroup,
        ddp: DistributedDataParallel | None,
        params: Mapping[str, Tensor],
        owners: LayerOwners | None,
    ) -> None:
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.owners: LayerOwners | None = owners
        self._group, self._ddp, self._params = group, ddp, params
        self._device = next(iter(params.values())).device
        self._divided: tuple[list[tuple[str, ...]], LayerOwners] | None = None

    def together(self, function: Callable[[], T]) -> T:
        return function() if self.owners is None else self._together(function)

    def _together(self, function: Callable[[], T]) -> T:
        problem, result = None, None
        try:
            result = function()
        except Exception as error:
            problem = error
        try:
            self.raise_together(problem)
        finally:
            del problem  # as in ``raise_together``
        return cast(T, result)

    def raise_together(self, problem: Exception | None) -> None:
        count = torch.full((1,), float(problem is not None), device=self._device)
        dist.all_reduce(count, group=self._group)
        if not float(count):
            return
        note = problem if problem is None or isinstance(problem, NatgradError) else _described(problem)
        notes: list[NatgradError | None] = [None] * self.size
        dist.all_gather_object(notes, note, group=self._group)
        del note
        try:
            if problem is not None:
                raise problem
        finally:
            del problem  # as above
        rank, theirs = next((rank, each) for rank, each in enumerate(notes) if each is not None)
        raise type(theirs)(f"in process {rank}: {theirs}")

    def check(self) -> None:
        """Some processes may have no batch left in ``model.join()``, and would make no step."""
        if self._ddp is not None and in_join(self._ddp):
            raise IncompatibleError(
                "with model.join() a process without batches makes no step, and the others would wait for its share of "
                "the metric: give all processes equally many batches (DistributedSampler does), and leave out join()"
            )

    def mean(self, operator: Operator, n: int, restore: Callable[[Tensors], Operator | None]) -> Operator:
        """In place, if an average is taken number by number; else estimates are exchanged and averaged one by one."""
        if self.owners is not None:
            return self.owners.mean(cast(LayerOperator, operator), n)
        if operator.layers:
            self._used_alike(operator)
        averaged = operator.averaged()
        if averaged is not None:
            values = list(averaged.values())
            copy_(values, self.mean_of(values, n))
            return operator
        if not operator.tensors():
            raise IncompatibleError(
                f"{type(operator).__name__} sees the batch of its own process only: with DistributedDataParallel use "
                "Kronecker, EigenKronecker, Diagonal, BlockDense, Dense, LowRank or Kernel"
            )
        mean, total = operator, 0
        for at, (count, tensors) in enumerate(self._exchanged(operator.tensors(), n)):
            other = restore(tensors)
            assert other is not None
            total += count
            mean = other if at == 0 else mean.lerp(other, count / total)
        return mean

    def _used_alike(self, operator: Operator) -> None:
        """Raise, in every process, if some have used a layer that others have not."""
        flags = [float(block.names[0] not in operator.unseen) for block in operator.layers]
        counts = torch.tensor(flags, device=self._device)
        dist.all_reduce(counts, group=self._group)
        names = [b.title for b, count in zip(operator.layers, counts.tolist(), strict=True) if 0 < count < self.size]
        if names:
            raise IncompatibleError(
                f"some processes have used {', '.join(names)} in this step and others have not: choose the layers that "
                "are skipped alike in all processes, with random numbers of the same seed"
            )

    def mean_of(self, values: Sequence[Tensor], n: int) -> list[Tensor]:
        out = list(values)
        for dtype in sorted({t.dtype for t in values}, key=str):
            which = [at for at, t in enumerate(values) if t.dtype == dtype]
            count = torch.full((1,), n, dtype=dtype, device=self._device)
            total = torch.cat([*(values[at].reshape(-1) * n for at in which), count])
            dist.all_reduce(total, group=self._group)
            means = (total[:-1] / total[-1]).split([values[at].numel() for at in which])
            for at, mean in zip(which, means, strict=True):
                out[at] = mean.view(values[at].shape)
        return out

    def inverse(
        self, solver: Solver, G: Operator, damping: Damping, *, last: Inverse | None = None, warm: Tensors | None = None
    ) -> Inverse:
        if self.owners is not None:
            if isinstance(damping, Relative) or damping == 0 or not solver.by_layer:
                G = self.owners.beside(cast(LayerOperator, G))
            return super().inverse(solver, G, damping, last=last, warm=warm)
        if isinstance(G, LayerOperator) and G.inverts_at_once and last is not None:  # all processes have the same G
            return solver.again(last, G, damping)
        start = (warm or {}) if last is None else last.tensors()
        if not isinstance(G, LayerOperator) or not solver.by_layer or damping == 0 or G.power == 0:
            return solver.init(G, damping, start)
        division = self._division_of(G)
        # What is rounding is so beside all layers, not beside those of the share alone.
        mine = replace(division.part(G, fallback=False), elsewhere=G.largest_gradient)  # type: ignore[type-var]
        own = self._together(lambda: solver.init(mine, damping, division.named(start, mine)))
        inverse = G.layers_from(division.collected(own.tensors()), G.fallback_inverse(damping))
        assert inverse is not None
        if isinstance(inverse, ProductInverse):
            inverse.adopt_failures(own)  # a GPU tells later that a factor could not be inverted
        return inverse

    def with_new_basis(self, G: Operator) -> Operator:
        if self.owners is not None:
            return self.owners.with_new_basis(cast(LayerOperator, G))
        if not isinstance(G, EigenKroneckerOperator):
            return super().with_new_basis(G)
        division = self._division_of(G)
        mine = self._together(division.part(G, fallback=False).with_new_basis)
        return G.with_new_basis(division.bases(cast(EigenKroneckerOperator, mine), G.blocks))

    def _division_of(self, G: LayerOperator) -> LayerOwners:
        """Who computes what is expensive, where every process keeps the whole metric."""
        names = [block.names for block in G.blocks]
        if self._divided is None or self._divided[0] != names:
            self._divided = names, LayerOwners(self._params, self._group, 1 / self.size)
            self._divided[1].assign(G)
        return self._divided[1]

    def _exchanged(self, tensors: Tensors, note: Any) -> list[tuple[Any, dict[str, Tensor]]]:
        """The tensors of every process, with a note of its own."""
        mine = note, {key: (tuple(t.shape), t.dtype) for key, t in tensors.items()}
        notes: list[Any] = [None] * self.size
        dist.all_gather_object(notes, mine, group=self._group)
        return [(said, self._broadcast(shapes, tensors, rank)) for rank, (said, shapes) in enumerate(notes)]

    def _broadcast(
        self, shapes: Mapping[str, tuple[tuple[int, ...], torch.dtype]], mine: Tensors, rank: int
    ) -> dict[str, Tensor]:
        """The tensors of one process, which sends them to the others."""
        tensors: dict[str, Tensor] = {}
        for dtype in sorted({dtype for _, dtype in shapes.values()}, key=str):
            keys = [key for key, (_, its) in shapes.items() if its == dtype]
            sizes = [torch.Size(shapes[key][0]) for key in keys]
            flat = torch.empty(sum(size.numel() for size in sizes), dtype=dtype, device=self._device)
            if rank == self.rank:
                torch.cat([mine[key].reshape(-1) for key in keys], out=flat)
            dist.broadcast(flat, dist.get_global_rank(self._group, rank), group=self._group)
            chunks = flat.split([size.numel() for size in sizes])
            tensors.update({key: chunk.view(size) for key, chunk, size in zip(keys, chunks, sizes, strict=True)})
        return tensors


def processes_of(
    wrapping: Sequence[nn.Module], params: Mapping[str, Tensor], cause: str | None, share: float | None
) -> Processes:
    """The processes that share a model: of the mesh that its parameters are divided on, or of the
    ``DistributedDataParallel`` among it and what it wraps; if there is none, this process.

    A ``DistributedDataParallel`` of one process alone says that the others train other models. ``cause``: what decides
    the steps of a process beside gradients, if there is such a thing. ``share``: of the processes, the part that keeps
    a layer; None where all of them keep the whole metric.
    """
    if meshes := {cast(Any, p).device_mesh for p in params.values() if is_sharded(p)}:
        if len(meshes) > 1 or not all(map(is_sharded, params.values())):
            raise IncompatibleError(
                "some parameters are divided over other processes than the rest, or over none, and the metric is one: "
                "give fully_shard one mesh, and call it on the whole model, too"
            )
        if "FSDPModule" not in {
            cls.__name__ for module in wrapping[-1].modules() for cls in type(module).__mro__
        } or any(sum(not each.is_replicate() for each in cast(Any, p).placements) > 1 for p in params.values()):
            raise IncompatibleError(
                "tensor parallelism (parallelize_module) divides layers, and a process sees parts of factors: take "
                "fully_shard alone, or an optimizer of gradients alone (ng.Natural, ng.Muon, ng.Shampoo, ng.SOAP)"
            )
        group = group_of(meshes.pop())
        return _group(group, None, params, share)
    for module in wrapping:
        if isinstance(module, DistributedDataParallel):
            return _group(module.process_group, module, params, share)
    world = Processes() if cause is None else Alone(cause)
    world.check()
    return world


def _group(
    group: dist.ProcessGroup,
    ddp: DistributedDataParallel | None,
    params: Mapping[str, Tensor],
    share: float | None,
) -> Processes:
    size = dist.get_world_size(group)
    if size == 1:
        return Processes()
    return Group(group, ddp, params, None if share is None else LayerOwners(params, group, max(share, 1 / size)))


def _described(problem: Exception) -> NatgradError:
    """An error that other processes can read."""
    return NatgradError(f"{type(problem).__name__}: {problem}")


def refuse_flat_shards(model: nn.Module) -> None:
    """Raise if FSDP holds the parameters as parts of one vector, which do not tell their rows and columns."""
    if "FullyShardedDataParallel" in {cls.__name__ for module in model.modules() for cls in type(module).__mro__}:
        raise IncompatibleError(
            "FullyShardedDataParallel holds parameters as parts of one vector, which have no rows and columns: use "
            "torch.distributed.fsdp.fully_shard"
        )


def refuse_foreign_ddp(world: Processes) -> None:
    """Raise if a pass of ``DistributedDataParallel`` begins, and the optimizer does not know of the other processes.

    Its model was wrapped after the optimizer was made, or it was given the module inside: parameters would differ.
    """
    active = active_ddp()
    if active is None or world.size > 1 or dist.get_world_size(active.process_group) == 1:
        return
    raise IncompatibleError(
        "the model runs inside DistributedDataParallel, and the optimizer was given the module inside: every process "
        "would estimate a metric of its own, and their parameters would differ. Wrap the model first, and give the "
        "wrapped one to the optimizer: model = DistributedDataParallel(model); opt = KFAC(model, …)"
    )
