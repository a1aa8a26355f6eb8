"""A certificate that is lost to rounding is told from an optimizer that is not invariant."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.invariance import Certificate, certify
from tests.invariance.reference import TASKS, Recurrent, Task

LSTM = Task(lambda: Recurrent(nn.LSTM(3, 6, batch_first=True)), (5, 3))


def kfac(lr: float, damping: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: ng.NaturalGradient(model, ng.Euclidean(), ng.Kronecker(), lr=lr, damping=damping)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


def test_long_steps_of_badly_conditioned_metrics_lose_the_certificate_to_rounding() -> None:
    """The gates of an LSTM at its start: conditions of 1e4 and more on both sides."""
    found = certify(kfac(0.1), LSTM.model(), LSTM.batch(), steps=3)
    assert not found.invariant
    assert found.rounded is not None
    assert found.rounded > 0
    assert len(found.rounding) == len(found.differences)
    lines = str(found).splitlines()
    assert lines[0] == "step  difference in function  of one rounding"
    assert [float(line.split()[2]) for line in lines[1:-1]] == pytest.approx(found.rounding, rel=0.06)
    assert lines[-1].startswith(f"lost to rounding from step {found.rounded} on: at most ")


def test_shorter_steps_keep_it() -> None:
    found = certify(kfac(1e-3), LSTM.model(), LSTM.batch(), steps=3)
    assert found.invariant, str(found)
    assert (found.rounded, found.rounding) == (None, ())


@pytest.mark.parametrize("damping", [1e-8, 1e-4, 1.0])
def test_damping_is_no_rounding_where_the_metrics_are_badly_conditioned_either(damping: float) -> None:
    found = certify(kfac(0.1, damping), LSTM.model(), LSTM.batch(), steps=3)
    assert found.rounded is None, str(found)
    assert str(found).splitlines()[-1].startswith("not invariant: at most ")


@pytest.mark.parametrize("kind", TASKS)
def test_coordinate_wise_optimizers_are_not_excused(kind: str) -> None:
    task = TASKS[kind]
    found = certify(sgd, task.model(), task.batch(), steps=2)
    assert not found.invariant
    assert found.rounded is None
    assert 0 < max(found.rounding) < 1e-12  # what gradient descent makes of a rounding


def test_in_single_precision_rounding_is_beyond_the_tolerance_before_the_first_step() -> None:
    task = TASKS["mlp"]
    x, t = task.batch()
    batch = x.float(), t.float()
    assert certify(kfac(0.1), task.model().float(), batch, steps=1).rounded == 0
    assert certify(sgd, task.model().float(), batch, steps=2, tolerance=1e-5).rounded is None


def test_the_first_difference_beyond_the_tolerance_decides() -> None:
    """Later ones are those of two runs that have parted already."""
    small, large = 1e-15, 0.5
    assert Certificate((small, 1e-8, large), 1.0, rounding=(small, 1e-9, 1e-6)).rounded == 1
    assert Certificate((small, 1e-8, large), 1.0, rounding=(small, 1e-11, large)).rounded is None
    assert Certificate((small, small, small), 1.0).rounded is None


def test_a_run_that_a_rounding_throws_off_is_refused() -> None:
    calls: list[nn.Module] = []

    def make(model: nn.Module) -> torch.optim.Optimizer:
        calls.append(model)
        return torch.optim.SGD(model.parameters(), lr=1e-2 if len(calls) < 3 else 1e300)

    task = TASKS["mlp"]
    with pytest.raises(NonFiniteError, match=r"the transformed network, nudged by a rounding, are not finite after"):
        certify(make, task.model(), task.batch(), steps=2)
    assert len(calls) == 3
