"""Eigenbases with many layers: the steps of every layer by itself, of one shape at once, and replayed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar, final

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from natgrad.accelerate import roots
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.replay import CudaGraphs
from natgrad.optim import optimizer, preconditioner, update
from natgrad.structures import layered
from tests.optim.tasks import seeded

T = TypeVar("T")
Make = Callable[[nn.Module], ng.NaturalGradient]


def eigen(
    *,
    basis_every: int = 3,
    metric_every: int = 1,
    early: bool = True,
    nesterov: bool = True,
    damping: Any = ng.Relative(1e-2),  # noqa: B008
) -> Make:
    return lambda model: ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.EigenKronecker(power=0.5), metric_every, 0.95, early=early, inverse=basis_every),
        lr=0.01,
        damping=damping,
        momentum=0.95,
        momentum_on="gradients",
        nesterov=nesterov,
        weight_decay=0.1,
        fallback="adamw",
    )


def gradients(shapes: Sequence[tuple[int, ...]], step: int) -> list[Tensor]:
    """Of the parameters with these shapes, in double precision."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(*shape, dtype=torch.float64, generator=generator) * (1 + at) for at, shape in enumerate(shapes)]


def bare(shapes: Sequence[tuple[int, ...]]) -> nn.Module:
    model = nn.Module()
    for at, shape in enumerate(shapes):
        model.register_parameter(f"w{at}", nn.Parameter(torch.ones(shape, dtype=torch.float64)))
    return model


def stepped(shapes: Sequence[tuple[int, ...]], which: Sequence[int], make: Make, absent: set[int]) -> list[Tensor]:
    """Some of the parameters after ten steps. The ``absent`` have no gradient in the first and the last ones."""
    model = bare([shapes[at] for at in which])
    opt = make(model)
    for step in range(10):
        all_of_them = gradients(shapes, step)
        for at, p in zip(which, model.parameters(), strict=True):
            p.grad = None if at in absent and step in (0, 1, 8) else all_of_them[at]
        if any(p.grad is not None for p in model.parameters()):
            opt.step()
    return [p.detach() for p in model.parameters()]


SHAPES = [(4, 3), (3, 4), (4, 3), (4, 4), (4, 3), (2, 4, 3, 1), (4, 4), (2, 4, 3, 1), (2, 2, 3, 2)]
STRUCTURES: dict[str, Make] = {
    "carried": eigen(),
    "in every step": eigen(basis_every=1),
    "from the first": eigen(nesterov=False, early=False),
    "absolute": eigen(damping=1e-3),
    "diagonal": lambda model: ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.EigenKronecker(largest=3, power=0.75), 1, 0.9, inverse=3),
        lr=0.01,
    ),
    "exact, and seldom": lambda model: ng.NaturalGradient(
        model, ng.BatchGradient(), structure=ng.Refresh(ng.EigenKronecker(), 1, 0.9, inverse=2), lr=0.01
    ),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_layers_of_one_shape_make_the_steps_of_each_by_itself(name: str) -> None:
    together = stepped(SHAPES, range(len(SHAPES)), STRUCTURES[name], set())
    for at, found in enumerate(together):
        (alone,) = stepped(SHAPES, [at], STRUCTURES[name], set())
        torch.testing.assert_close(found, alone, rtol=1e-8, atol=1e-10)


def test_a_layer_without_a_gradient_does_not_change_the_others() -> None:
    absent, make = {2, 6}, eigen(basis_every=1)
    together = stepped(SHAPES, range(len(SHAPES)), make, absent)
    present = [at for at in range(len(SHAPES)) if at not in absent]
    expected = stepped(SHAPES, present, make, set())
    for at, right in zip(present, expected, strict=True):
        torch.testing.assert_close(together[at], right, rtol=1e-8, atol=1e-10)
    assert all(together[at].isfinite().all() for at in absent)


def test_a_layer_of_zeros_stands_still() -> None:
    """With relative damping, also beside others of its shape."""
    model = nn.Sequential(*(nn.Linear(3, 3, bias=False) for _ in range(3)))
    opt: Any = ng.SOAP(model, lr=0.01, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    for step in range(5):
        for at, p in enumerate(model.parameters()):
            p.grad = torch.randn(3, 3, generator=torch.Generator().manual_seed(step)) * (at != 1)
        opt.step()
    moved = [float((p.detach() - old).abs().max()) for p, old in zip(model.parameters(), before, strict=True)]
    assert moved[1] == 0
    assert moved[0] > 0
    assert moved[2] > 0


@pytest.mark.parametrize(
    "make", [eigen(), STRUCTURES["from the first"], lambda m: ng.EKFAC(m, ng.Fisher(ng.Categorical()), lr=0.01)]
)
def test_a_resumed_run_is_the_run(make: Make) -> None:
    def run(steps: range, model: nn.Module, opt: ng.NaturalGradient) -> None:
        for step in steps:
            x = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), x.argmax(1)).backward()
            opt.step()

    model, other = net([5] * 5), net([5] * 5)
    opt, again = make(model), make(other)
    run(range(7), model, opt)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    run(range(7, 15), model, opt)
    run(range(7, 15), other, again)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(p, q)


# As on a GPU.


def net(widths: Sequence[int]) -> nn.Sequential:
    pairs = list(pairwise(widths))
    return seeded(lambda: nn.Sequential(*[m for i, o in pairs for m in (nn.Linear(i, o), nn.Tanh())]))


@dataclass
class Kernels(TorchDispatchMode):
    """Operations, those of replayed graphs apart from those that are launched one by one."""

    replaying: bool = False
    launched: Counter[str] = field(default_factory=Counter)
    captured: Counter[str] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @property
    def products(self) -> int:
        """Of matrices, in replayed graphs."""
        return self.captured["bmm"] + self.captured["baddbmm_"]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name not in VIEWS and func.namespace == "aten":
            (self.captured if self.replaying else self.launched)[name] += 1
        return func(*args, **(kwargs or {}))


VIEWS = {"view", "_unsafe_view", "as_strided", "slice", "select", "transpose", "unsqueeze", "expand", "split", "unbind"}
VIEWS |= {"split_with_sizes", "alias", "detach", "promote_types", "diagonal"}


@dataclass
class Gpu:
    """In the place of CUDA: what is captured is run again by a replay."""

    captures: bool = True
    replays: int = 0
    kernels: Kernels | None = None
    replaying: bool = False  # graphs do not hold others

    def possible(self) -> bool:
        return self.captures and not self.replaying

    def capture(self, fn: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        def replay() -> None:
            self.replays += 1
            self.replaying = True
            if self.kernels is not None:
                self.kernels.replaying = True
            fn()
            self.replaying = False
            if self.kernels is not None:
                self.kernels.replaying = False

        return (None, None), replay  # type: ignore[return-value]

    @contextmanager
    def counting(self) -> Iterator[Kernels]:
        self.replays, self.kernels = 0, Kernels()
        with self.kernels as kernels:
            yield kernels
        self.kernels = None


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Gpu]:
    """From its call on, a processor does what a GPU does."""

    def start() -> Gpu:
        it = Gpu()
        for module in (optimizer, update, preconditioner, layered):
            monkeypatch.setattr(module, "is_asynchronous", lambda device: True)
        monkeypatch.setattr(roots, "_SINGLE", range(0))  # products of halves
        monkeypatch.setattr(Flag, "check", lambda self, tensors, what: self.look(tensors))
        monkeypatch.setattr(Flag, "send", lambda self, what, step: None)
        monkeypatch.setattr(CudaGraphs, "possible", lambda self, tensors: it.possible())
        monkeypatch.setattr(CudaGraphs, "capture", lambda self, fn, device: it.capture(fn, device))
        return it

    return start


def trained(model: nn.Module, opt: ng.NaturalGradient, steps: range, schedule: bool = False) -> list[Tensor]:
    width = next(model.parameters()).shape[1]
    for step in steps:
        x = torch.randn(16, width, generator=torch.Generator().manual_seed(step))
        opt.zero_grad()
        model(x).square().mean().backward()
        if schedule:
            for group in opt.param_groups:
                group["lr"], group["damping"] = 0.01 * 0.97**step, group["damping"] * 0.9
        opt.step()
    return [p.detach() for p in model.parameters()]


def assert_equal_runs(runs: Sequence[list[Tensor]], rtol: float) -> None:
    """The parameters at the end of two runs; rounding grows from step to step."""
    for p, q in zip(*runs, strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=0.1 * rtol)


@pytest.mark.parametrize("name", ["carried", "from the first", "absolute", "diagonal", "exact, and seldom"])
@pytest.mark.parametrize("widths", [[4] * 5, [6, 4, 4, 4, 3, 4, 4]])
def test_captured_steps_follow_gradient_rate_damping_and_basis(
    name: str, widths: list[int], gpu: Callable[[], Gpu]
) -> None:
    """Beside steps of a GPU that captures nothing: rounding grows from step to step."""
    it, runs = gpu(), []
    for it.captures in (False, True):
        model = net(widths)
        runs.append(trained(model, STRUCTURES[name](model), range(24), schedule=True))
    assert_equal_runs(runs, rtol=1e-4)
    assert it.replays > 18


@pytest.mark.parametrize("nesterov", [True, False])
def test_a_captured_step_is_bit_for_bit_that_of_a_resumed_run(nesterov: bool, gpu: Callable[[], Gpu]) -> None:
    """A resumed run has captured nothing yet."""
    it, model, other = gpu(), net([5] * 4), net([5] * 4)
    opt, again = eigen(nesterov=nesterov)(model), eigen(nesterov=nesterov)(other)
    trained(model, opt, range(12))
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    it.replays = 0
    found = trained(model, opt, range(12, 13))
    assert it.replays > 0
    assert all(map(torch.equal, found, trained(other, again, range(12, 13))))


def test_the_basis_is_computed_once_for_an_estimate() -> None:
    model, bases = net([5] * 2), list[Tensor]()
    opt = eigen(basis_every=2, metric_every=4, early=False)(model)
    for step in range(16):
        trained(model, opt, range(step, step + 1))
        assert opt.tracker.average is not None
        bases.append(opt.tracker.average.tensors()["0.weight/Q"].clone())
    assert [step for step in range(1, 16) if not torch.equal(bases[step], bases[step - 1])] == [4, 8, 12]


@pytest.mark.parametrize("every", [1, 5])
def test_captured_steps_of_natural_are_those_of_a_processor(every: int, gpu: Callable[[], Gpu]) -> None:
    """Layers of several shapes, whose diagonals are powers of one vector."""

    def made(model: nn.Module) -> ng.NaturalGradient:
        return ng.NaturalGradient(
            model,
            ng.BatchGradient(),
            structure=ng.Refresh(ng.Kronecker(largest=1, power=0.5), 1, 0.9, every),
            solver=ng.Factored(),
            step=ng.Polar(0.4, "minimax"),  # converges, so that rounding stays rounding
            damping=ng.Relative(0.5),
            lr=0.01,
            momentum=0.9,
            momentum_on="gradients",
            fallback="adamw",
        )

    runs = []
    for captured in (False, True):
        model = net([6, 4, 4, 3, 5])
        it = gpu() if captured else None
        runs.append(trained(model, made(model), range(24)))
        assert it is None or it.replays > 18
    assert_equal_runs(runs, rtol=1e-3)


@final
class Forwarding(ng.solve.Solver):
    """Makes a new inverse every time, as a solver does that does not say otherwise."""

    def init(self, G: Any, damping: Any = 0.0, warm: Any = None) -> Any:
        return ng.Factored().init(G, damping, warm)


def natural(model: nn.Module, solver: Any) -> ng.NaturalGradient:
    structure = ng.Refresh(ng.Kronecker(largest=1, power=0.5), 1, 0.9, 1)
    return ng.NaturalGradient(
        model, ng.BatchGradient(), structure=structure, solver=solver, step=ng.Polar(0.4), lr=0.01,
        damping=ng.Relative(0.1), momentum=0.9, momentum_on="gradients", fallback="adamw",
    )  # fmt: skip


@pytest.mark.parametrize("captures", [False, True])
def test_a_solver_that_makes_new_inverses_takes_the_steps_of_one_that_overwrites_them(
    captures: bool, gpu: Callable[[], Gpu]
) -> None:
    it, runs = gpu(), []
    it.captures = captures
    for solver in (ng.Factored(), Forwarding()):
        model = net([6, 4, 4, 3])
        runs.append(trained(model, natural(model, solver), range(24)))
    assert_equal_runs(runs, rtol=1e-4)


def test_a_plain_step_of_ekfac_is_one_graph_in_few_products(gpu: Callable[[], Gpu]) -> None:
    it = gpu()
    model = net([16] * 9)
    opt = ng.EKFAC(model, ng.Fisher(ng.Categorical()), lr=0.01, metric_every=40, inverse_every=40, early=False)
    trained(model, opt, range(5))
    with it.counting() as kernels:
        trained(model, opt, range(5, 6))
    assert it.replays == 1
    assert kernels.products == 4


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Pinv()])
@pytest.mark.parametrize("structure", [ng.EigenKronecker(), ng.Kronecker(), ng.EigenKronecker(largest=4)])
def test_layers_that_are_solved_at_once_make_the_steps_of_a_processor(
    structure: ng.structures.Structure, solver: ng.solve.Solver, gpu: Callable[[], Gpu]
) -> None:
    """Convolutions with groups, norms, and linear layers, each of a shape that comes twice; in double precision."""

    def build() -> nn.Module:
        convolutions = [m for _ in range(2) for m in (nn.Conv2d(4, 4, 3, padding=1, groups=2), nn.GroupNorm(2, 4))]
        linear = [nn.Linear(16, 5), nn.Tanh(), nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5)]
        return nn.Sequential(*convolutions, nn.Flatten(), *linear).double()

    def run() -> list[Tensor]:
        model = seeded(build)
        refreshed = ng.Refresh(structure, 2, 0.9, inverse=2)
        opt = ng.NaturalGradient(
            model, ng.Fisher(ng.Categorical()), structure=refreshed, solver=solver, lr=0.01, damping=0.1
        )
        for step in range(6):
            x = torch.randn(8, 4, 2, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(8) % 5).backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    expected = run()
    gpu()
    for found, right in zip(run(), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-7)  # rates are read in single precision
