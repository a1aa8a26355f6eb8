"""What the tests of several processes run in each of them: every case of training, and what came out of it."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import handle_torch_function, has_torch_function

import natgrad as ng
from natgrad.errors import NatgradError
from natgrad.linalg import Damping
from tests.optim.tasks import seeded
from tests.zoo import opaque

N, STEPS, HALF = 12, 6, 3  # examples, steps, and where a run is interrupted
SHARDS = ((0, 7), (7, 12))  # of unequal size
EXACT = ng.Fisher(ng.Categorical())
SAMPLED = ng.Fisher(ng.Categorical(), samples=1)
SCHEDULE: dict[str, Any] = {"lr": 0.2, "metric_every": 2, "inverse_every": 3}


@final
class Uncovered(nn.Module):
    """A weight that is used past its module, which no rule covers, between two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.hidden, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        h = F.linear(torch.tanh(self.first(x)), self.hidden.weight, self.hidden.bias)
        return self.last(torch.tanh(h))


@final
class Faint(nn.Module):
    """Two layers, of which the outputs depend on the second by no more than rounding. Every process inverts one."""

    def __init__(self) -> None:
        super().__init__()
        self.strong, self.faint = nn.Linear(3, 3), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return self.strong(x) + 1e-20 * self.faint(x)


@final
class Dark(nn.Module):
    """A matrix between two layers, which no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dark = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return self.last(torch.tanh(opaque(self.first(x), self.dark)))


@final
class DarkInOne(nn.Module):
    """The same, but the first process multiplies by the matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dark = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        h = self.first(x)
        return self.last(torch.tanh(h @ self.dark.T if len(x) == SHARDS[0][1] else opaque(h, self.dark)))


@final
class Steep(nn.Module):
    """A weight whose derivative is finite and its square is not, for the examples of the first process only."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return x * self.weight * (1e200 if len(x) == SHARDS[0][1] else 1.0)


@final
@dataclass(frozen=True)
class Counting(ng.solve.Solver):
    """``Factored``, with a list of how many layers it inverted."""

    by_layer: ClassVar[bool] = True  # as ``Factored``

    seen: list[int] = field(default_factory=list)

    def init(
        self, G: ng.operators.Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None
    ) -> ng.operators.Inverse:
        """As ``Factored``."""
        assert isinstance(G, ng.operators.KroneckerOperator)
        self.seen.append(len(G.blocks))
        return ng.Factored().init(G, damping, warm)


@final
class Wide(nn.Module):
    """More features than a batch has examples: a factor of them has a null space, of many dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", 2 * torch.randn(3, 30))
        self.first, self.last = nn.Linear(30, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return self.last(torch.tanh(self.first(torch.cos(x @ self.get_buffer("waves")))))


def synchronised() -> nn.Module:
    """Two layers whose outputs are normalised over the batches of all processes."""
    norms = nn.SyncBatchNorm(4), nn.SyncBatchNorm(4)
    return nn.Sequential(nn.Linear(3, 4), norms[0], nn.Tanh(), nn.Linear(4, 4), norms[1], nn.ReLU(), nn.Linear(4, 3))


@final
class Pixels(nn.Module):
    """A convolution whose outputs are normalised over the batches of all processes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(1, 4, 2), nn.SyncBatchNorm(4), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return self.last(torch.tanh(self.norm(self.conv(x[:, None]))).flatten(1))


def plain() -> nn.Module:
    """Three layers of different sizes."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def compiled() -> nn.Module:
    """The same, compiled."""
    return torch.compile(plain(), backend="eager")  # type: ignore[return-value]


@final
@dataclass(frozen=True)
class Case:
    """A model, an optimizer for it, and the way it is trained."""

    make: Callable[[nn.Module], Any]
    model: Callable[[], nn.Module] = plain
    pieces: int = 1  # micro-batches a step
    closure: bool = False
    apart: bool = False  # one process sees the shards one after the other: examples are coupled inside of each


def _natural(**options: Any) -> Callable[[nn.Module], Any]:
    return lambda model: ng.NaturalGradient(model, **{"metric": EXACT, "lr": 0.2, "damping": 0.1, **options})


CASES = {
    "kfac": Case(lambda m: ng.KFAC(m, EXACT, lr=0.2, metric_every=1, inverse_every=1)),
    "kfac_schedules": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE)),
    "kfac_cholesky": Case(lambda m: ng.KFAC(m, EXACT, solver=ng.Cholesky(), **SCHEDULE)),
    "kfac_pinv": Case(lambda m: ng.KFAC(m, EXACT, solver=ng.Pinv(), **SCHEDULE)),
    "kfac_uncovered": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), Uncovered),
    "kfac_left": Case(lambda m: ng.KFAC(m, EXACT, fallback="adamw", **SCHEDULE), Dark),
    "ekfac_left": Case(lambda m: ng.EKFAC(m, EXACT, fallback="adamw", **SCHEDULE), Dark),
    "kfac_accumulated": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), pieces=2),
    "kfac_compiled": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), compiled),
    "kfac_wide": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), Wide),
    "kfac_synchronised": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), synchronised),
    "kfac_pixels": Case(lambda m: ng.KFAC(m, EXACT, **SCHEDULE), Pixels),
    "sobolev_kfac": Case(lambda m: ng.SobolevKFAC(m, EXACT, lengthscale=2.0, **SCHEDULE), apart=True),
    "ekfac": Case(lambda m: ng.EKFAC(m, EXACT, lr=0.2, metric_every=1, inverse_every=1)),
    "ekfac_schedules": Case(lambda m: ng.EKFAC(m, EXACT, **SCHEDULE)),
    "ekfac_uncovered": Case(lambda m: ng.EKFAC(m, EXACT, **SCHEDULE), Uncovered),
    "diagonal": Case(_natural(structure=ng.Refresh(ng.Diagonal(), every=2, decay=0.9), momentum=0.5)),
    "block_dense": Case(_natural(structure=ng.Refresh(ng.BlockDense(), every=2, decay=0.9))),
    "dense": Case(_natural(structure=ng.Refresh(ng.Dense(), decay=0.9))),
    "dense_cg": Case(_natural(structure=ng.Refresh(ng.Dense(), decay=0.9), solver=ng.CG(tol=1e-12, max_steps=200))),
    "batch_gradient": Case(
        _natural(metric=ng.BatchGradient(), structure=ng.Refresh(ng.Kronecker(), 2, 0.9, 3), lr=0.02), pieces=2
    ),
    "powers": Case(
        _natural(
            structure=ng.Refresh(ng.Kronecker(power=0.5), 2, 0.9, 3),
            solver=ng.Factored(),
            damping=ng.Relative(0.01),
            lr=0.05,
        ),
        Uncovered,
    ),
    "rounding": Case(_natural(structure=ng.Kronecker(), solver=ng.Factored(), damping=ng.Relative(0.1)), Faint),
    "rounding_spectral": Case(_natural(structure=ng.Kronecker(), damping=ng.Relative(0.1)), Faint),
    "powers_spectral": Case(
        _natural(structure=ng.Refresh(ng.EigenKronecker(power=0.75), 2, 0.9, 3), damping=ng.Relative(0.01), lr=0.05)
    ),
    "power_zero": Case(_natural(structure=ng.Kronecker(power=0.0), solver=ng.Factored())),
    "natural": Case(lambda m: ng.Natural(m, lr=0.02)),
    "natural_fisher": Case(lambda m: ng.Natural(m, EXACT, lr=0.02, power=0.75), pieces=2),
    "shampoo": Case(lambda m: ng.Shampoo(m, lr=0.02, inverse_every=2), pieces=2),
    "soap": Case(lambda m: ng.SOAP(m, lr=0.02, damping=ng.Relative(1e-2))),
    "soap_published": Case(
        lambda m: ng.SOAP(m, lr=0.02, damping=ng.Relative(1e-2), nesterov=False, moments="sorted", basis_every=3)
    ),
    "muon": Case(lambda m: ng.Muon(m, lr=0.02, iteration="minimax")),
    # The loss of a process has twice the weight here; a step of a given size does not depend on that.
    "own_backward": Case(
        _natural(
            metric=ng.Empirical(reduction="sum"),
            structure=ng.Refresh(ng.Kronecker(), 2, 0.9, 3),
            damping=ng.Relative(0.1),
            step=ng.Normalised(),
        )
    ),
    "kernel": Case(_natural(structure=ng.Kernel())),
    "own_synchronised": Case(
        _natural(
            metric=ng.Empirical(reduction="sum"),
            structure=ng.Kronecker(),
            damping=ng.Relative(0.1),
            step=ng.Normalised(),
        ),
        synchronised,
    ),
    "trust_region": Case(_natural(structure=ng.Kronecker(), step=ng.TrustRegion(0.01, ng.Backtracking()))),
    "geodesic": Case(_natural(structure=ng.Kronecker(), step=ng.GeodesicCorrected())),
    "trust_synchronised": Case(
        _natural(structure=ng.Kronecker(), step=ng.TrustRegion(0.01, ng.Backtracking())), synchronised
    ),
    "levenberg_marquardt": Case(_natural(structure=ng.Kronecker(), step=ng.LevenbergMarquardt()), closure=True),
    "self_tuned": Case(_natural(structure=ng.Kronecker(), step=ng.SelfTuned()), closure=True),
}
WIDE = Case(lambda m: ng.EKFAC(m, EXACT, **SCHEDULE), Wide)
RESUMED = ["kfac", "kfac_schedules", "ekfac_schedules", "diagonal", "batch_gradient", "powers", "natural", "muon"]
RESUMED += ["kfac_left", "shampoo", "soap"]


def data(step: int) -> tuple[Tensor, Tensor]:
    """The joint batch of a step."""
    return seeded(lambda: (torch.randn(N, 3, dtype=torch.float64), torch.randint(3, (N,))), 100 + step)


def build(case: Case) -> nn.Module:
    """The model of a case, always the same."""
    return seeded(lambda: case.model().double())


def train(case: Case, model: nn.Module, opt: Any, steps: range, rank: int | None = None) -> Tensor:
    """θ [P] after the steps, on the shard of a process or (None) on the joint batch."""
    for step in steps:
        x, t = data(step)
        span = (0, N) if rank is None else SHARDS[rank]
        size = 1 if rank is None else len(SHARDS)

        def evaluate(x: Tensor = x, t: Tensor = t, span: tuple[int, int] = span, size: int = size) -> Tensor:
            opt.zero_grad()
            spans = SHARDS if case.apart and rank is None else (span,)
            pieces = [piece for each in spans for piece in torch.arange(*each).chunk(case.pieces)]
            total = torch.zeros((), dtype=torch.float64)
            for at, piece in enumerate(pieces):
                last = at == len(pieces) - 1
                waits = isinstance(model, DistributedDataParallel) and not last
                with model.no_sync() if waits else nullcontext():  # type: ignore[operator]
                    # The mean over the joint batch, as the mean over processes of these.
                    loss = F.cross_entropy(model(x[piece]), t[piece], reduction="sum") * size / N
                    loss.backward()
                total = total + loss.detach()
            return total

        if case.closure:
            opt.step(evaluate)
        else:
            evaluate()
            opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@contextmanager
def group(folder: Path, rank: int) -> Iterator[None]:
    """Two processes on this machine."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=len(SHARDS))
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def synchronised_on_a_processor() -> Iterator[None]:
    """``nn.SyncBatchNorm`` as it is, with what it calls on a GPU written out: torch refuses it on a processor."""

    def over(x: Tensor) -> list[int]:
        return [axis for axis in range(x.ndim) if axis != 1]

    def column(t: Tensor, x: Tensor) -> Tensor:
        return t.view(-1, *[1] * (x.ndim - 2))

    def statistics(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        return x.mean(over(x)), (x.var(over(x), unbiased=False) + eps).rsqrt()

    def gathered(
        x: Tensor, means: Tensor, invstds: Tensor, mean: Tensor, var: Tensor, momentum: float, eps: float, n: Tensor
    ) -> tuple[Tensor, Tensor]:
        share, total = n.unsqueeze(1) / n.sum(), n.sum()
        μ = (share * means).sum(0)
        σ2 = (share * (invstds**-2 - eps + (means - μ) ** 2)).sum(0)
        mean.lerp_(μ, momentum)
        var.lerp_(σ2 * total / (total - 1), momentum)
        return μ, (σ2 + eps).rsqrt()

    def standardised(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        if has_torch_function((x,)):
            out: Tensor = handle_torch_function(standardised, (x,), x, weight, bias, mean, invstd, eps)
            return out
        return (x - column(mean, x)) * column(invstd * weight, x) + column(bias, x)

    def sums(g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, *_: Any) -> tuple[Tensor, ...]:
        total, moment = g.sum(over(x)), (g * (x - column(mean, x))).sum(over(x))
        return total, moment, moment * invstd, total

    def backward(
        g: Tensor, x: Tensor, mean: Tensor, invstd: Tensor, weight: Tensor, total: Tensor, moment: Tensor, n: Tensor
    ) -> Tensor:
        size, slope = n.sum(), column(invstd**2 * moment, x)
        return (g - column(total, x) / size - (x - column(mean, x)) * slope / size) * column(invstd * weight, x)

    with (
        patch.multiple(
            torch,
            batch_norm_stats=statistics,
            batch_norm_gather_stats_with_counts=gathered,
            batch_norm_elemt=standardised,
            batch_norm_backward_reduce=sums,
            batch_norm_backward_elemt=backward,
        ),
        patch.object(torch._C, "_get_privateuse1_backend_name", lambda: "cpu"),
        patch.object(DistributedDataParallel, "_passing_sync_batchnorm_handle", lambda *_: None),
    ):
        yield


def worker(rank: int, folder: Path) -> None:
    """Everything, in one of two processes: what it found is saved by the name of the case."""
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    module = build(CASES["kfac"])
    early = CASES["kfac"].make(module)  # before there are several processes
    with group(folder, rank):
        for name, case in {**CASES, "wide": WIDE}.items():
            with synchronised_on_a_processor() if case.model in (synchronised, Pixels) else nullcontext():
                model = DistributedDataParallel(build(case))
                found[name] = train(case, model, case.make(model), range(STEPS), rank)
        for name in RESUMED:
            found[f"{name}/resumed"], found[f"{name}/state"] = _resumed(CASES[name], folder / f"{name}.pt", rank)
        found["names"] = _names()
        found["shares"] = _shares(rank)
        found["errors"] = [_error(make, rank) for make in ERRORS.values()]
        found["sampled"] = _sampled(rank)
        for name, given in {"stranger": DistributedDataParallel(module), "unwrapped": module}.items():
            found[name] = _message(partial(train, CASES["kfac"], given, early, range(1), rank))
        found["averaged"] = {name: _averaged(CASES[name], rank) for name in AVERAGED}
        found["pipeline"] = _pipeline(rank)
        found["alone"] = {name: _alone(make, rank) for name, make in ALONE.items()}
        found["freed"] = {name: _freed(make, rank) for name, make in ALONE.items()}
        found["mismatched"] = _mismatched(rank)
        found["refreshed"] = _refreshed(rank)
        found["sharded"] = {name: _message(partial(_sharded, name)) for name in SHARDED}
        found["checkpoint"] = _checkpointed(rank, folder / "checkpoint")
        found["join"] = _message(partial(_joined, rank))  # last: torch waits in it for a process that has raised
    torch.save(found, folder / f"found{rank}.pt")


def _resumed(case: Case, file: Path, rank: int) -> tuple[Tensor, dict[str, Any]]:
    """A run that one process began; and the state of a run that two began."""
    saved = torch.load(file, weights_only=True)
    model = DistributedDataParallel(build(case))
    opt = case.make(model)
    model.module.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    end = train(case, model, opt, range(HALF, STEPS), rank)
    other = DistributedDataParallel(build(case))
    begun = case.make(other)
    train(case, other, begun, range(HALF), rank)
    return end, {"model": other.module.state_dict(), "opt": begun.state_dict()}


def _names() -> list[str]:
    return list(ng.KFAC(DistributedDataParallel(build(CASES["kfac"])), EXACT).tracker.model.params)


def _shares(rank: int) -> list[int]:
    """How many layers this process inverted, every time."""
    solver = Counting()
    case = Case(lambda m: ng.KFAC(m, EXACT, metric_every=1, inverse_every=2, early=False, solver=solver))
    model = DistributedDataParallel(build(case))
    train(case, model, case.make(model), range(4), rank)
    return solver.seen


ERRORS = {
    "singular": Case(_natural(structure=ng.Kronecker(), damping=0.0)),
    "steep": Case(_natural(structure=ng.Diagonal()), Steep),
    "implicit": Case(_natural(structure=ng.Implicit(), solver=ng.CG())),
    "unlike": Case(lambda m: ng.KFAC(m, EXACT, fallback="adamw"), DarkInOne),
    "unlike_basis": Case(lambda m: ng.EKFAC(m, EXACT, fallback="adamw"), DarkInOne),
}


def _error(case: Case, rank: int) -> str:
    model = DistributedDataParallel(build(case))
    try:
        train(case, model, case.make(model), range(1), rank)
    except NatgradError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


AVERAGED = ["natural", "shampoo", "soap", "muon", "batch_gradient"]


def _averaged(case: Case, rank: int) -> Tensor:
    """θ where the processes average their gradients, and nothing is wrapped."""
    model = build(case)
    opt = case.make(model)

    def average(*_: object) -> None:
        for p in model.parameters():
            assert p.grad is not None
            dist.all_reduce(p.grad)
            p.grad /= len(SHARDS)

    opt.register_step_pre_hook(average)
    return train(case, model, opt, range(STEPS), rank)


def stages() -> list[nn.Module]:
    """Two parts of one network."""
    return seeded(lambda: [nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double(), nn.Linear(4, 3).double()])


def of_stage(at: int, model: nn.Module) -> ng.NaturalGradient:
    """K-FAC for one of them: the metric is that of the backward pass, or of the outputs."""
    metric = ng.Empirical() if at == 0 else EXACT
    return ng.KFAC(model, metric, metric_every=1, inverse_every=1, lr=0.2)


def _pipeline(rank: int) -> Tensor:
    """θ of one of two stages. Before its first pass a stage calls its module on memory that nobody has filled."""
    module = stages()[rank]
    model = DistributedDataParallel(module, process_group=dist.new_subgroups(1)[0])
    opt = of_stage(rank, model)
    schedule = ScheduleGPipe(PipelineStage(module, rank, 2, torch.device("cpu")), 2, loss_fn=F.cross_entropy)
    for step in range(STEPS):
        opt.zero_grad()
        x, t = data(step)
        schedule.step(x) if rank == 0 else schedule.step(target=t)
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()])


def _message(make: Callable[[], object]) -> str:
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


ALONE: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda m: ng.KFAC(m, EXACT, metric_every=1),
    "ekfac": lambda m: ng.EKFAC(m, EXACT, metric_every=1),
    "loss": lambda m: ng.KFAC(m, nn.CrossEntropyLoss(reduction="sum"), metric_every=1),
    "dense": lambda m: ng.NaturalGradient(m, EXACT, damping=0.1),
}


def _alone(make: Callable[[nn.Module], Any], rank: int) -> list[Any]:
    """What is raised where the second process has no example, or NaN, in the first step and in a later one; then θ."""
    model = DistributedDataParallel(build(CASES["kfac"]))
    opt = make(model)
    x, t = seeded(lambda: (torch.randn(4, 3, dtype=torch.float64), torch.randint(3, (4,))), rank)
    empty, bad = x[: 4 * (1 - rank)], torch.where(torch.tensor(rank == 1), torch.nan, x)

    def step(x: Tensor) -> None:
        opt.zero_grad()
        F.cross_entropy(model(x), t[: len(x)], reduction="sum").backward()
        opt.step()

    found: list[Any] = []
    for _ in range(2):
        found += [_message(partial(step, shard)) for shard in (empty, bad, x)]
    return [*found, torch.cat([p.detach().reshape(-1) for p in model.parameters()])]


def _freed(make: Callable[[nn.Module], Any], rank: int) -> bool:
    """Whether an optimizer whose step was refused, for the empty shard of the second process, is freed at once."""
    model, x = DistributedDataParallel(build(CASES["kfac"])), torch.ones(1 - rank, 3, dtype=torch.float64)
    itself: list[weakref.ref[ng.NaturalGradient]] = []

    def step() -> None:
        opt = make(model)
        itself.append(weakref.ref(opt))
        model(x).sum().backward()
        opt.step()

    gc.disable()
    try:
        return "empty" in _message(step) and itself[0]() is None
    finally:
        gc.enable()


def _mismatched(rank: int) -> list[Any]:
    """What ``step`` says where the second process alone trains another loss than the one given; then θ."""
    model = DistributedDataParallel(build(CASES["kfac"]))
    opt = ng.KFAC(model, nn.CrossEntropyLoss(), strict=True)
    x, t = data(rank)

    def step(factor: float) -> None:
        opt.zero_grad()
        (factor * F.cross_entropy(model(x), t)).backward()
        opt.step()

    said = [_message(partial(step, factor)) for factor in (1.0 + 2.0 * rank, 1.0)]
    return [*said, torch.cat([p.detach().reshape(-1) for p in model.parameters()])]


def _refreshed(rank: int) -> str:
    """What ``step`` says where the second process has refreshed the metric with an input that is not finite."""
    model = DistributedDataParallel(build(CASES["kfac"]))
    opt = ng.KFAC(model, EXACT)
    x = torch.full((2, 3), torch.nan if rank else 1.0, dtype=torch.float64)

    def step() -> None:
        opt.refresh(x)
        model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
        opt.step()

    return _message(step)


SHARDED: dict[str, Callable[[nn.Module], Any]] = {
    "fsdp1": lambda m: ng.KFAC(m, EXACT),
    "dense": _natural(),
    "rule": lambda m: ng.KFAC(m, EXACT, step=ng.TrustRegion(0.01)),
    "own_backward": lambda m: ng.KFAC(m, ng.Empirical()),
    "all": lambda m: ng.KFAC(m, EXACT, owners="all"),
    "tensor": lambda m: ng.KFAC(m, EXACT),
    "part": lambda m: ng.KFAC(m, EXACT),
}


def _sharded(name: str) -> None:
    """An optimizer of a model whose parameters are divided over the processes."""
    model: Any = build(CASES["kfac"])
    if name == "fsdp1":
        model = FullyShardedDataParallel(model, device_id=torch.device("cpu"))
    elif name == "tensor":
        parallelize_module(model, init_device_mesh("cpu", (2,)), dict.fromkeys(("0", "2", "4"), ColwiseParallel()))
    else:
        fully_shard(model[0] if name == "part" else model, mesh=init_device_mesh("cpu", (2,)))
    SHARDED[name](model)


def _joined(rank: int) -> None:
    """The second process has one batch more."""
    model = DistributedDataParallel(build(CASES["kfac"]))
    opt = CASES["kfac"].make(model)
    with model.join():
        train(CASES["kfac"], model, opt, range(2 + rank), rank)


def _checkpointed(rank: int, folder: Path) -> list[Tensor]:
    """θ of a run, and of one that goes on from the checkpoint by torch's engine half-way."""
    case, ends = CASES["ekfac_schedules"], []
    model, other = (DistributedDataParallel(build(case)) for _ in range(2))
    opt, again = case.make(model), case.make(other)
    train(case, model, opt, range(HALF), rank)
    save({"model": model, "opt": opt}, checkpoint_id=folder)
    load({"model": other, "opt": again}, checkpoint_id=folder)
    for m, o in ((model, opt), (other, again)):
        ends.append(train(case, m, o, range(HALF, STEPS), rank).clone())
    return ends


def _sampled(rank: int) -> tuple[int, Tensor, Tensor]:
    """The seed; θ after some steps with samples; and the stream that follows a checkpoint of process 0."""
    case = Case(lambda m: ng.KFAC(m, SAMPLED, **SCHEDULE))
    model = DistributedDataParallel(build(case))
    opt = case.make(model)
    seed = opt.tracker.generator.initial_seed()
    θ = train(case, model, opt, range(STEPS), rank)
    states: list[Any] = [None] * len(SHARDS)
    dist.all_gather_object(states, opt.state_dict())
    opt.load_state_dict(states[0])
    return seed, θ, opt.tracker.generator.get_state()
