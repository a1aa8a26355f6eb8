"""Bad input: an error that says what, where and what to do, and nothing changed by it.

A step's parameters, gradients and state are compared before and after the error, and the run that met it ends, bit for
bit, where a run ends that did not.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree

import natgrad as ng
from natgrad.errors import MemoryBoundError, NatgradError, NonFiniteError, SingularMetricError
from tests.optim.tasks import Task, task

NAN, INF = float("nan"), float("inf")


def _snapshot(of: Task, opt: ng.NaturalGradient) -> list[Any]:
    """All numbers: parameters, gradients, the state of the optimizer."""
    gradients = [p.grad for p in of.model.parameters()]
    leaves, _ = _pytree.tree_flatten([list(of.model.parameters()), gradients, opt.state_dict()])
    return [leaf.detach().clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def _same(a: list[Any], b: list[Any]) -> bool:
    def equal(one: Any, other: Any) -> bool:
        if isinstance(one, Tensor):
            return isinstance(other, Tensor) and torch.equal(one.nan_to_num(7e77), other.nan_to_num(7e77))
        return bool(one == other)

    return len(a) == len(b) and all(map(equal, a, b))


@dataclass(frozen=True)
class Bad:
    """``prepare`` is what the user does, ``act`` the call that must raise."""

    act: Callable[[Task, ng.NaturalGradient], object]
    error: type[Exception]
    match: str
    prepare: Callable[[Task, ng.NaturalGradient], object] = lambda of, opt: opt.zero_grad()
    repair: Callable[[Task, ng.NaturalGradient], object] = lambda of, opt: None
    options: dict[str, Any] = field(default_factory=dict)


def _backward(of: Task, opt: ng.NaturalGradient) -> None:
    of.closure(opt)()


def _with_gradient(value: float) -> Callable[[Task, ng.NaturalGradient], None]:
    def prepare(of: Task, opt: ng.NaturalGradient) -> None:
        _backward(of, opt)
        grad = of.model.get_parameter("2.bias").grad
        assert grad is not None
        grad[1] = value

    return prepare


def _forward_at(value: float) -> Callable[[Task, ng.NaturalGradient], object]:
    def forward(of: Task, opt: ng.NaturalGradient) -> object:
        x = of.x.clone()
        x[3, 0] = value
        return of.model(x)

    return forward


def _set_parameter(value: float) -> Callable[[Task, ng.NaturalGradient], None]:
    def prepare(of: Task, opt: ng.NaturalGradient) -> None:
        opt.zero_grad()
        of.model.get_parameter("0.weight").data[0, 0] = value

    return prepare


def _damping(value: float) -> Callable[[Task, ng.NaturalGradient], None]:
    def change(of: Task, opt: ng.NaturalGradient) -> None:
        opt.param_groups[0]["damping"] = value

    return change


def _negative(of: Task, opt: ng.NaturalGradient) -> None:
    _backward(of, opt)
    _damping(-1.0)(of, opt)


def _bound(memory: int) -> Callable[[Task, ng.NaturalGradient], None]:
    def change(of: Task, opt: ng.NaturalGradient) -> None:
        opt.zero_grad()
        opt.tracker.observer = replace(opt.tracker.observer, memory=memory)

    return change


def _singular(of: Task, opt: ng.NaturalGradient) -> None:
    opt.zero_grad()
    _damping(0.0)(of, opt)
    of.kind.loss(of.model(of.x[:3]), of.t[:3]).backward()


def _step(of: Task, opt: ng.NaturalGradient) -> None:
    opt.step()


BAD: dict[str, Bad] = {
    "empty_batch": Bad(lambda of, opt: of.model(of.x[:0]), ValueError, "the batch is empty"),
    "nan_input": Bad(_forward_at(NAN), NonFiniteError, "at step 2: .*the inputs hold NaN or infinity: clean the batch"),
    "inf_input": Bad(
        _forward_at(INF),
        NonFiniteError,
        r"at step 2: the estimate of the metric \(matrix\) holds NaN or infinity, and was not averaged: clean",
    ),
    "nan_parameter": Bad(
        lambda of, opt: of.model(of.x),
        NonFiniteError,
        "at step 2: .*parameter 0.weight holds NaN or infinity: reload it",
        prepare=_set_parameter(NAN),
    ),
    "nan_gradient": Bad(
        _step, NonFiniteError, "at step 2: the gradient of 2.bias holds NaN", prepare=_with_gradient(NAN)
    ),
    "inf_gradient": Bad(_step, NonFiniteError, "at step 2: the gradient of 2.bias holds", prepare=_with_gradient(-INF)),
    "no_backward": Bad(_step, ValueError, r"no parameter has a gradient: call loss.backward\(\) before"),
    "no_forward": Bad(
        _step,
        NatgradError,
        r"no forward pass with gradients was seen since the last step: call model\(x\) outside",
        prepare=lambda of, opt: [p.grad.fill_(1.0) for p in of.model.parameters() if p.grad is not None],
    ),
    "singular_metric": Bad(
        _step,
        SingularMetricError,
        r"singular at damping 0: rank \d+ of 17, smallest eigenvalue .*Add damping",
        prepare=_singular,
        repair=_damping(0.1),
    ),
    "negative_damping": Bad(
        _step,
        ValueError,
        "damping must be a finite number ≥ 0, got -1",
        prepare=_negative,
        repair=_damping(0.1),
    ),
    "memory": Bad(
        lambda of, opt: of.model(of.x),
        MemoryBoundError,
        r"Dense of 17 parameters needs 2,312 bytes, over the bound memory=1,000. These fit: .*Diagonal",
        prepare=_bound(1000),
        repair=_bound(2**32),
    ),
    "foreign_state": Bad(
        lambda of, opt: opt.load_state_dict(torch.optim.SGD(of.model.parameters(), lr=0.1).state_dict()),
        ValueError,
        'not the state of a NaturalGradient: it has no "natgrad" entry',
    ),
    "state_of_another_structure": Bad(
        lambda of, opt: opt.load_state_dict(of.optimizer(structure=ng.Diagonal(), lr=9.0).state_dict()),
        ValueError,
        r"the state of another optimizer: its structure is Diagonal\(\), here it is Dense\(\)",
    ),
    "state_of_another_model": Bad(
        lambda of, opt: opt.load_state_dict(ng.NaturalGradient(nn.Linear(2, 1), ng.Euclidean()).state_dict()),
        ValueError,
        r"the state of another optimizer: of its parameters, weight is \[1, 2\] and here not there",
    ),
    "new_group": Bad(
        lambda of, opt: opt.add_param_group({"params": [nn.Parameter(torch.ones(1))]}),
        ValueError,
        "make a new optimizer",
    ),
}


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize(
    "options",
    [{}, {"momentum": 0.9, "weight_decay": 0.1}],
    ids=["plain", "momentum"],
)
def test_an_error_changes_nothing_and_training_goes_on(name: str, options: dict[str, Any]) -> None:
    bad = BAD[name]
    of, twin = task(), task()
    opt, other = of.optimizer(damping=0.1, **options), twin.optimizer(damping=0.1, **options)
    for _ in range(2):
        of.step(opt)
        twin.step(other)
    kept = of.model.get_parameter("0.weight").detach().clone()
    bad.prepare(of, opt)
    before = _snapshot(of, opt)
    with pytest.raises(bad.error, match=bad.match):
        bad.act(of, opt)
    assert _same(before, _snapshot(of, opt))
    of.model.get_parameter("0.weight").data.copy_(kept)
    bad.repair(of, opt)
    for _ in range(2):
        of.step(opt)
        twin.step(other)
    assert torch.equal(of.theta(), twin.theta())


def test_a_step_that_fails_after_the_solve_leaves_the_warm_start_of_the_solver() -> None:
    """Conjugate gradients remember their last solution, also where the metric is not due."""
    fail = False

    def project(params: dict[str, Tensor]) -> dict[str, Tensor]:
        return {} if fail else params

    rule = ng.Constrained(ng.Fixed(), ng.BackProjection(project))
    options = {"structure": ng.Refresh(ng.Dense(), every=5), "solver": ng.CG(tol=1e-2, max_steps=2), "lr": 0.1}
    of, twin = task(), task()
    never = ng.Constrained(ng.Fixed(), ng.BackProjection(dict))
    opt, other = of.optimizer(step=rule, **options), twin.optimizer(step=never, **options)
    of.step(opt)
    twin.step(other)
    _backward(of, opt)
    before, fail = _snapshot(of, opt), True
    with pytest.raises(ValueError, match="BackProjection must return all parameters"):
        opt.step()
    assert _same(before, _snapshot(of, opt))
    fail = False
    for _ in range(3):
        of.step(opt)
        twin.step(other)
    assert torch.equal(of.theta(), twin.theta())
