"""A certificate that is lost to rounding is told from an optimizer that is not invariant."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.invariance import Certificate, certify
from tests.invariance.reference import TASKS, Recurrent, Task

LSTM = Task(lambda: Recurrent(nn.LSTM(3, 6, batch_first=True)), (5, 3))


def kfac(lr: float, damping: float = 0.0) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), lr=lr, damping=damping)


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


def reduced(damping: float) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: ng.KFAC(model, ng.Euclidean(), lr=0.1, damping=damping, sharing="reduce")


POOLED = Task(
    lambda: nn.Sequential(nn.Conv2d(2, 3, 3, padding=1), nn.Tanh(), nn.AvgPool2d(3), nn.Flatten(), nn.Linear(12, 2)),
    (2, 6, 6),
)


def test_a_factor_of_the_inputs_alone_loses_the_certificate_to_rounding() -> None:
    """A of the first layer has no parameters in it: no rounding of those would show what it makes of its own."""
    found = certify(reduced(0.0), POOLED.model(), POOLED.batch(), steps=4)
    assert not found.invariant
    assert found.rounded is not None, str(found)
    assert found.rounded > 1


@pytest.mark.parametrize("damping", [1e-10, 1e-8, 1e-4])
def test_damping_is_no_rounding_of_the_inputs_either(damping: float) -> None:
    found = certify(reduced(damping), POOLED.model(), POOLED.batch(), steps=4)
    assert not found.invariant
    assert found.rounded is None, str(found)


@final
class Cast(nn.Module):
    """Layers on the inputs in double precision, whatever these come in."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers = layers

    def forward(self, x: Tensor) -> Tensor:
        """y [n out]."""
        return cast(Tensor, self.layers(x.double()))


@final
class Numbered(nn.Module):
    """An embedding of numbers that come as floating ones; those beyond it count as its first or last."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(8, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """y [n 2]."""
        return cast(Tensor, self.head(self.table(x.long().clamp(0, 7)).tanh()))


def test_inputs_are_rounded_as_the_parameters_are() -> None:
    """A rounding of single precision would excuse everything."""
    x, t = TASKS["mlp"].batch()
    found = certify(sgd, Cast(TASKS["mlp"].model()), (x.float(), t), steps=2)
    assert found.rounded is None
    assert 0 < max(found.rounding) < 1e-12


def test_inputs_that_serve_as_indices_are_left_as_they_are() -> None:
    """Rounded down they would be others, and the function another one before the first step."""
    torch.manual_seed(0)
    batch = torch.randint(8, (50,)).double(), torch.randn(50, 2, dtype=torch.float64)
    found = certify(sgd, Numbered().double(), batch, steps=2, keep=("table",))
    assert found.rounded is None
    assert 0 < max(found.rounding) < 1e-12


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
