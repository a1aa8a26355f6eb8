"""A custom step rule that returns or asks for something invalid: the message names the fix."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.step import PlainRule, Step, StepContext, StepRule


@final
@dataclass(frozen=True)
class Custom(StepRule):
    """A rule made of one function."""

    function: Callable[[StepContext], Any]

    def take(self, context: StepContext) -> Step:
        return self.function(context)


@final
@dataclass(frozen=True)
class CustomPlain(PlainRule):
    """A plain rule made of its scale."""

    value: Any

    def scale(self, v: ng.Vector, square: torch.Tensor) -> Any:
        return self.value


def step(function: Callable[[StepContext], Any] | PlainRule) -> None:
    torch.manual_seed(0)
    model = nn.Linear(2, 1).double()
    rule = function if isinstance(function, PlainRule) else Custom(function)
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, damping=0.1, lr=0.1)
    model(torch.randn(4, 2, dtype=torch.float64)).square().mean().backward()
    opt.step()


def test_a_covector_is_no_displacement() -> None:
    with pytest.raises(TypeError, match=r"displacement of a step must be a Vector, got Covector: context.sharp"):
        step(lambda context: Step(context.differential * -0.1, context.damping))  # type: ignore[arg-type]


def test_a_covector_is_no_velocity() -> None:
    with pytest.raises(TypeError, match="velocity of a step must be a Vector, got Covector"):
        step(lambda context: Step(context.natural(), context.damping, velocity=context.differential))  # type: ignore[arg-type]


def test_a_rule_returns_a_step() -> None:
    with pytest.raises(TypeError, match=r"Custom.take must return a Step, got Vector"):
        step(lambda context: context.natural())


def test_a_plain_rule_returns_tensors_for_all_parameters_or_one() -> None:
    with pytest.raises(TypeError, match=r"scale of a PlainRule returns a tensor \[\], a dict .*, got 0\.5"):
        step(CustomPlain(0.5))
    with pytest.raises(ValueError, match="a number for each parameter: it differs from these in bias"):
        step(CustomPlain({"weight": torch.ones(())}))


def test_the_loss_needs_a_closure() -> None:
    with pytest.raises(TypeError, match=r"opt.step\(\) was called without a closure: call opt.step\(closure\)"):
        step(lambda context: context.loss(None))


def test_diagnose_wants_a_pullback() -> None:
    pb = ng.pullback(nn.Linear(2, 1), torch.randn(4, 2), ng.Euclidean())
    with pytest.raises(TypeError, match="pullback must be a natgrad Pullback, got"):
        ng.diagnose(ng.Dense().estimate(pb))  # type: ignore[arg-type]
