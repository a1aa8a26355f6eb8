"""What a step holds beside parameters, gradients, momentum, factors and their inverses."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.step import Step, StepContext, StepRule
from tests.memory import peak
from tests.pulled import close, normal


def network(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    return nn.Sequential(*[module for layer in layers for module in (layer, nn.Tanh())][:-1]).double()


def backward(model: nn.Module, opt: torch.optim.Optimizer, n: int = 8) -> None:
    width = next(model.parameters()).shape[1]
    opt.zero_grad()
    model(normal(n, width, seed=1)).square().sum().backward()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("rule", [ng.KLClip(), ng.Fixed()], ids=repr)
@pytest.mark.parametrize("widths", [(100, 90, 80, 110, 95, 105, 85), (600,) * 5], ids=["different", "one shape"])
def test_a_step_without_a_new_inverse_holds_one_vector_and_one_layer(
    widths: tuple[int, ...], rule: StepRule, momentum: float
) -> None:
    model = network(*widths)
    metric = ng.Sampled(ng.Euclidean())  # one cotangent and not one an output: what a step holds is no matter of these
    opt = ng.KFAC(model, metric, momentum=momentum, weight_decay=0.1, step=rule, inverse_every=100)
    for _ in range(2):
        backward(model, opt)
        opt.step()
    backward(model, opt)
    size, largest = (f(p.nbytes for p in model.parameters()) for f in (sum, max))
    assert peak(opt.step) < size + 1.2 * largest


def test_a_step_with_a_new_inverse_holds_one_factor_more() -> None:
    model = network(300, 310, 5)
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1, inverse_every=1)
    for _ in range(2):
        backward(model, opt)
        opt.step()
    backward(model, opt)
    size, largest = sum(p.nbytes for p in model.parameters()), 311**2 * 8
    assert peak(opt.step) < 1.1 * max(largest, 2 * size)


def test_inverses_stay_where_they_are_and_are_those_of_an_optimizer_that_makes_them_for_the_first_time() -> None:
    model = network(4, 5, 3)
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1, inverse_every=1)
    places = set()
    for _ in range(3):
        backward(model, opt)
        opt.step()
        assert opt.preconditioner.inverse is not None
        assert opt.tracker.average is not None
        places.add(tuple(t.data_ptr() for t in opt.preconditioner.inverse.tensors().values()))
        new = ng.Factored().init(opt.tracker.average, opt.preconditioner.damping)
        for key, t in new.tensors().items():
            close(opt.preconditioner.inverse.tensors()[key], t)
    assert len(places) == 1


@final
@dataclass(frozen=True)
class Failing(StepRule):
    """Raises after it has solved, where the damping is 0.5."""

    def take(self, context: StepContext) -> Step:
        step = ng.KLClip().take(context)
        if context.damping == 0.5:
            raise ArithmeticError("no")
        return step


def test_after_a_step_that_failed_with_a_new_inverse_the_inverse_is_made_again() -> None:
    def run(bad: bool) -> Tensor:
        model = network(4, 5, 3)
        opt = ng.KFAC(model, ng.Euclidean(), damping=0.1, metric_every=100, inverse_every=1, step=Failing())
        for step in range(3):
            backward(model, opt)
            if bad and step == 1:
                opt.param_groups[0]["damping"] = 0.5
                with pytest.raises(ArithmeticError, match="no"):
                    opt.step()
                opt.param_groups[0]["damping"] = 0.1
                backward(model, opt)
            opt.step()
        return flat(model)

    close(run(True), run(False), 1e-14)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_last_displacement_is_made_when_it_is_asked_for(momentum: float) -> None:
    model = network(4, 5, 3)
    opt = ng.KFAC(model, ng.Euclidean(), momentum=momentum)
    for _ in range(3):
        backward(model, opt)
        before = flat(model)
        opt.step()
        assert opt.last is not None
        close(opt.last.displacement.flatten(), flat(model) - before, 1e-12)


def test_the_displacement_of_an_earlier_step_stays_what_it_was() -> None:
    model = network(4, 5, 3)
    opt = ng.KFAC(model, ng.Euclidean())
    backward(model, opt)
    opt.step()
    assert opt.last is not None
    earlier = opt.last.displacement
    expected = earlier.flatten()
    backward(model, opt)
    opt.step()
    assert torch.equal(earlier.flatten(), expected)
    assert not torch.equal(opt.last.displacement.flatten(), expected)


def test_the_last_displacement_is_that_of_the_learning_rate_of_its_step() -> None:
    """A schedule changes a rate that is a tensor in place."""
    model, rate = network(4, 5, 3), torch.tensor(0.1, dtype=torch.float64)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker())
    opt.param_groups[0]["lr"] = rate
    backward(model, opt)
    before = flat(model)
    opt.step()
    rate.fill_(0.5)
    assert opt.last is not None
    close(opt.last.displacement.flatten(), flat(model) - before, 1e-12)


def test_gradients_are_not_overwritten() -> None:
    """A layer without bias is packed as a view of its gradient."""
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Tanh(), nn.Linear(4, 4, bias=False), nn.Linear(4, 3)).double()
    opt = ng.KFAC(model, ng.Euclidean())
    backward(model, opt)
    before = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    opt.step()
    assert all(torch.equal(a, p.grad) for a, p in zip(before, model.parameters(), strict=True) if p.grad is not None)
    one = nn.Sequential(nn.Linear(4, 3, bias=False)).double()
    opt = ng.KFAC(one, ng.Euclidean())
    backward(one, opt)
    grad = one.get_parameter("0.weight").grad
    assert grad is not None
    kept = grad.clone()
    opt.step()
    assert torch.equal(kept, grad)
