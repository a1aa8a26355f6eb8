"""When the metric is inverted: early, when it has moved, and within a budget of time."""

import copy
import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.operators import Inverse, Operator
from natgrad.structures.dense import CholeskyInverse
from tests.optim.states import whole
from tests.optim.tasks import seeded, task

EARLY = [1, 2, 4, 8, 16, 32, 64]  # steps, counted from 1
LATER = 4  # steps until the host reads a drift


class Linear:
    """A linear model of inputs whose scale is a function of the step: its metric is scale² · XᵀX/N, whatever θ is."""

    def __init__(self, scale: Callable[[int], float] = lambda step: 1.0, **options: Any) -> None:
        self.model = seeded(lambda: nn.Linear(3, 2, bias=False).double())
        self.x = seeded(lambda: torch.randn(8, 3, dtype=torch.float64))
        self.scale, self.step = scale, 0
        schedule = {"structure": ng.Kronecker(), "inverse": "fresh", "budget": None} | options.pop("schedule", {})
        self.opt = ng.NaturalGradient(
            self.model, ng.Euclidean(), lr=0.01, damping=0.1, structure=ng.Refresh(**schedule), **options
        )

    def take(self) -> Tensor:
        self.step += 1
        self.opt.zero_grad()
        self.model(self.scale(self.step) * self.x).square().mean().backward()
        self.opt.step()
        return self.model.weight.detach().clone()

    def inverted(self, steps: int) -> list[int]:
        """The steps among the next ones in which the metric is inverted."""
        found = []
        for _ in range(steps):
            self.take()
            if self.opt.preconditioner.inverted == self.step - 1:
                found.append(self.step)
        return found


STRUCTURES = [ng.Kronecker(), ng.EigenKronecker(), ng.Dense(), ng.Diagonal(), ng.LowRank(3), ng.Kernel()]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_a_metric_that_stays_is_inverted_early_and_then_never_again(structure: ng.structures.Structure) -> None:
    assert Linear(schedule={"structure": structure}).inverted(200) == EARLY


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize(("drift", "times"), [(0.99, 1), (1.01, 0)])
def test_a_metric_that_doubles_has_moved_by_one(structure: ng.structures.Structure, drift: float, times: int) -> None:
    """And its inverse is made again, once, when the host has read of it."""
    on = {"structure": structure, "drift": drift}
    if isinstance(structure, ng.EigenKronecker):  # of S, A and D all but S
        on["drift"] = drift * math.sqrt(2 / 3)
    if isinstance(structure, ng.Kronecker):  # of S and A only A
        on["drift"] = drift * math.sqrt(1 / 2)
    run = Linear(lambda step: 1.0 if step < 100 else math.sqrt(2), schedule=on)
    assert run.inverted(99) == EARLY
    found = run.inverted(40)
    assert len(found) == times
    # The inverse is 36 steps old, and its drift is measured whenever it is older by an eighth.
    assert all(100 <= step - LATER < 100 + 40 / 8 for step in found)


def test_a_slow_drift_adds_up() -> None:
    """Factors that grow by 2 % a step are inverted whenever they have grown by a half: 1.02²¹ ≥ 1.5 > 1.02²⁰."""
    on = {"structure": ng.Dense(), "drift": 0.5, "early": False}
    found = Linear(lambda step: 1.01**step, schedule=on).inverted(120)
    grown = math.ceil(math.log(1.5, 1.01**2))
    assert len(found) > 4
    assert all(grown <= b - a - LATER <= grown + grown / 8 for a, b in itertools.pairwise(found))


def test_a_damping_that_moves_counts_as_drift() -> None:
    run = Linear()
    assert run.inverted(100) == EARLY
    run.opt.param_groups[0]["damping"] *= 1.05
    assert run.inverted(10) == []
    run.opt.param_groups[0]["damping"] *= 1.05
    assert run.inverted(10) == [111]


@pytest.mark.parametrize(
    ("options", "inverted", "estimated"),
    [
        ({}, [*EARLY, 101, 201], [*range(1, 17), *range(21, 250, 10)]),
        ({"inverse_every": 20, "metric_every": 5}, [1, 2, 4, 8, 16, *range(21, 250, 20)], None),
        ({"inverse_every": 3, "metric_every": 3}, [1, 2, *range(4, 250, 3)], [1, 2, 3, *range(4, 250, 3)]),
        ({"early": False}, [1, 101, 201], [*range(1, 250, 10)]),
    ],
)
@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC])
def test_presets_invert_in_steps_that_double_before_their_first_period(
    preset: Callable[..., ng.NaturalGradient], options: Mapping[str, Any], inverted: list[int], estimated: Any
) -> None:
    of = task("regression")
    opt = preset(of.model, of.kind.metric, lr=0.001, **options)
    found: list[tuple[int, int]] = []
    for _ in range(249):
        of.step(opt)
        found.append((opt.tracker.estimated + 1, opt.preconditioner.inverted + 1))
    assert sorted({step for _, step in found}) == inverted
    assert estimated is None or sorted({step for step, _ in found}) == estimated


class Clock:
    """Time that passes only when somebody says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)


def _slow(clock: Clock, seconds: Callable[[], float]) -> ng.solve.Solver:
    """Cholesky that takes so long."""

    class Slow(ng.solve.Solver):
        def init(self, G: Operator, damping: Any = 0.0, warm: Any = None) -> Inverse:
            clock.now += seconds()
            return G.inverse(damping)

    return Slow()


@pytest.mark.parametrize(("budget", "between"), [(0.1, 30), (0.5, LATER + 2), (1.0, LATER + 1), (0.05, 60)])
def test_inverting_takes_no_more_than_its_part_of_the_time(
    budget: float, between: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The metric moves in every step by more than enough, and an inverse takes as long as the passes of 3 steps.

    How long the other work of a step takes does not matter.
    """
    clock, on = Clock(monkeypatch), {"structure": ng.Dense(), "drift": 0.01, "budget": budget}

    def scale(step: int) -> float:
        clock.now += 1.0
        return 0.99**step

    solve = CholeskyInverse.solve

    def slow(inverse: CholeskyInverse, ω: Tensor) -> Tensor:
        clock.now += 7.0
        return solve(inverse, ω)

    monkeypatch.setattr(CholeskyInverse, "solve", slow)
    run = Linear(scale, schedule=on, solver=_slow(clock, lambda: 3.0))
    run.inverted(100)
    found = run.inverted(200)
    assert {b - a for a, b in itertools.pairwise(found)} == {between}
    assert 3.0 * (len(found) - 1) <= budget * (found[-1] - found[0]) * (1 + 1e-9)


def test_an_interruption_of_one_inverse_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that takes as long as a thousand steps, where the others take as long as three."""
    clock, on = Clock(monkeypatch), {"structure": ng.Dense(), "drift": 0.01, "budget": 0.1}

    def scale(step: int) -> float:
        clock.now += 1.0
        return 0.99**step

    run = Linear(scale, schedule=on, solver=_slow(clock, lambda: 1000.0 if 150 < run.step < 200 else 3.0))
    run.inverted(100)
    assert {b - a for a, b in itertools.pairwise(run.inverted(300))} == {30}


@pytest.mark.parametrize("at", [3, 6, 20, 70, 103, 105])
def test_a_resumed_run_inverts_in_the_same_steps(at: int) -> None:
    """Also where a drift is on its way to the host."""

    def run() -> Linear:
        return Linear(lambda step: 1.0 + 0.5 * (step > 99) + step / 500, schedule={"drift": 0.2})

    one, other = run(), run()
    for _ in range(at):
        one.take()
    other.model.load_state_dict(one.model.state_dict())
    other.opt.load_state_dict(copy.deepcopy(one.opt.state_dict()))
    other.step = one.step
    for _ in range(60):
        assert torch.equal(one.take(), other.take())
        assert one.opt.preconditioner.inverted == other.opt.preconditioner.inverted


def test_a_state_with_a_period_is_inverted_once_and_then_by_drift() -> None:
    old = Linear(schedule={"inverse": 50, "budget": 0.1})
    old.inverted(80)
    new = Linear()
    new.opt.load_state_dict(copy.deepcopy(old.opt.state_dict()))
    new.step = 80
    assert new.inverted(100) == [81]


def test_steps_that_fail_leave_the_schedule_as_it_was() -> None:
    """Before each step of one run there is one whose gradient is not finite: both runs invert in the same steps."""

    def scale(step: int) -> float:
        return 1.0 if step < 70 else 1.3 if step < 80 else 2.0

    runs = [Linear(scale, schedule={"structure": ng.Dense(), "drift": 0.2}) for _ in range(2)]
    for step in range(1, 120):
        runs[1].opt.zero_grad()
        runs[1].model(scale(step) * runs[1].x).mul(math.nan).sum().backward()
        with pytest.raises(ng.errors.NonFiniteError, match="the gradient of weight holds NaN"):
            runs[1].opt.step()
        assert torch.equal(*(run.take() for run in runs))
        assert runs[0].opt.preconditioner.inverted == runs[1].opt.preconditioner.inverted
    assert runs[0].opt.preconditioner.inverted > 80


def test_damaged_entries_of_a_state_are_refused() -> None:
    run = Linear()
    run.take()
    state = whole(run.opt)
    del state["natgrad"]["freshness"]["sketch"]
    with pytest.raises(ValueError, match='the "freshness" of the state has no sketch'):
        run.opt.load_state_dict(state)
    state["natgrad"]["freshness"]["sketch"] = torch.full((2,), math.nan)
    with pytest.raises(ng.errors.NonFiniteError, match="sketch of the freshness in the state holds NaN"):
        run.opt.load_state_dict(state)
