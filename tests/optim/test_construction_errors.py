"""What the optimizer refuses at construction or at its first batch, and what works instead."""

import inspect
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError, MemoryBoundError
from natgrad.optim import natural_of_outputs
from tests.optim.tasks import task

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize("family", [ng.Categorical(), ng.Gaussian(scale=None)], ids=["categorical", "gaussian"])
def test_outputs_that_do_not_fit_the_family_are_refused(family: Any) -> None:
    model = nn.Linear(2, 1)
    opt = ng.NaturalGradient(model, ng.Fisher(family))
    with pytest.raises(ValueError, match=r"needs .* on the last axis, .*got outputs of shape \(3, 1\)"):
        model(torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"got outputs of shape \(3, 1\)"):
        opt.refresh(torch.ones(3, 2))


def _mixed(**second: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2).to(**second))


def _linear(**options: Any) -> ng.NaturalGradient:
    return ng.NaturalGradient(nn.Linear(2, 2), options.pop("metric", ng.Euclidean()), **options)


def _twice() -> object:
    model = nn.Linear(2, 2)
    groups: list[dict[str, Any]] = [{"params": model.parameters()}, {"params": model.parameters(), "lr": 0.1}]
    return ng.Natural(model, groups=groups)


CONSTRUCTIONS: list[tuple[Callable[[], object], type[Exception], str]] = [
    (lambda: ng.NaturalGradient(nn.Tanh(), ng.Euclidean()), ValueError, "the module Tanh has no trainable parameters"),
    (lambda: ng.pullback(nn.Tanh(), torch.ones(1, 1), ng.Euclidean()), ValueError, "no trainable parameters"),
    (lambda: ng.KFAC(nn.ParameterList([torch.zeros(0)]), ng.Euclidean()), ValueError, "trainable .*none with entries"),
    (lambda: ng.NaturalGradient(_mixed(dtype=torch.float64), ng.Euclidean()), ValueError, "mixes dtypes: 0.weight is"),
    (lambda: ng.NaturalGradient(_mixed(device="meta"), ng.Euclidean()), ValueError, "mixes devices: .*meta"),
    (
        lambda: ng.NaturalGradient(nn.Linear(2, 2).parameters(), ng.Euclidean()),  # type: ignore[arg-type]
        TypeError,
        "takes the model, an nn.Module, not generator",
    ),
    (lambda: _linear(lr=-0.1), ValueError, "lr must be finite and ≥ 0, got -0.1"),
    (lambda: _linear(lr=NAN), ValueError, "lr must be finite and ≥ 0, got nan"),
    (lambda: _linear(damping=-1.0), ValueError, "damping must be finite and ≥ 0"),
    (lambda: _linear(damping=INF), ValueError, "damping must be finite and ≥ 0"),
    (lambda: _linear(momentum=1.0), ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    (lambda: _linear(momentum=-0.1), ValueError, r"momentum must be in \[0, 1\)"),
    (lambda: _linear(weight_decay=-1.0), ValueError, "weight_decay must be finite and ≥ 0"),
    (lambda: _linear(weigth_decay=0.1), TypeError, "unexpected keyword argument .weigth_decay."),
    (
        lambda: _linear(groups=[{"params": [], "power": 0.5}]),
        ValueError,
        "group holds power, which all parameters share",
    ),
    (lambda: _linear(groups=[{"params": [], "betas": 0, "eps": 1}]), ValueError, "group holds betas, eps, which all"),
    (
        lambda: _linear(groups=[{"params": [], "wd": 0, "learning_rate": 1}]),
        ValueError,
        "group holds learning_rate, which is called lr here, and wd, which is called weight_decay here",
    ),
    (lambda: _linear(fallback=torch.optim.AdamW), ValueError, 'fallback= is "adamw", .* got <class .*AdamW'),
    (lambda: _linear(fallback=ng.Diagonal), TypeError, r"fallback must be .* the class Diagonal: write Diagonal\(…\)"),
    (lambda: _linear(groups=[{"params": [torch.ones(1)]}]), ValueError, "1 tensors that are not trainable parameters"),
    (_twice, ValueError, r"weight, bias: in several parameter groups, or twice in one\. Leave it in one of them"),
    (lambda: _linear(metric=ng.Euclidean), TypeError, r"metric must be .*OutputMetric.* write Euclidean\(…\)"),
    (
        lambda: _linear(metric="fisher"),
        TypeError,
        "got 'fisher': give a metric, such as .*, or the loss, such as nn.Cros",
    ),
    (lambda: _linear(metric=torch.ones(())), TypeError, "got a Tensor: give the loss itself, .* and not its value"),
    (lambda: ng.Natural(nn.Linear(2, 2), 0.1), TypeError, "got 0.1: if this is the learning rate, write lr=0.1"),  # type: ignore[arg-type]
    (lambda: _linear(metric=ng.Kronecker()), TypeError, r"got Kronecker\(.*\), which belongs to structure="),
    (lambda: _linear(metric=nn.CrossEntropyLoss), TypeError, r"metric must be .* write CrossEntropyLoss\(…\)"),
    (lambda: _linear(structure=ng.Cholesky()), TypeError, r"Structure, got Cholesky\(.*\), which belongs to solver="),
    (lambda: _linear(solver=ng.CG), TypeError, r"solver must be .* write CG\(…\)"),
    (lambda: _linear(step=0.1), TypeError, "step must be a natgrad StepRule, got 0.1"),
    (lambda: _linear(rules=None), TypeError, r"rules is a list of layer rules, rules=\[MyRule\(\)\], got None"),
]


@pytest.mark.parametrize(("make", "error", "match"), CONSTRUCTIONS)
def test_what_cannot_work_is_refused_when_it_is_made(make: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        make()


OPTIMIZERS = (ng.NaturalGradient, ng.KFAC, ng.EKFAC, ng.SobolevKFAC, ng.Natural, ng.Shampoo, ng.SOAP, ng.Muon)
OF_GROUPS = {"lr", "damping", "momentum", "weight_decay", "fallback"}


@pytest.mark.parametrize("make", [*OPTIMIZERS, ng.StochasticReconfiguration], ids=lambda f: f.__name__)
def test_a_group_has_no_argument_that_holds_for_all_parameters(make: Callable[..., ng.NaturalGradient]) -> None:
    for name in inspect.signature(make).parameters.keys() - {"model", "params", "groups"} - OF_GROUPS:
        with pytest.raises(ValueError, match=f"a parameter group holds {name}, which all parameters share"):
            ng.NaturalGradient(nn.Linear(2, 2), ng.Euclidean(), groups=[{"params": [], name: None}])


def test_the_damping_is_one_for_all_groups() -> None:
    model = nn.Linear(2, 2)
    groups = [{"params": model.bias, "damping": 0.5}]
    with pytest.raises(ValueError, match=r"the damping must be the same in all parameter groups, got \[0.1, 0.5\]"):
        ng.NaturalGradient(model, ng.Euclidean(), damping=0.1, groups=groups)
    assert not model._forward_pre_hooks
    opt = ng.NaturalGradient(model, ng.Euclidean(), damping=0.1, groups=[{"params": model.bias}])
    opt.param_groups[1]["damping"] = 0.5
    model(torch.ones(3, 2)).sum().backward()
    before = model.weight.detach().clone()
    with pytest.raises(ValueError, match="the same in all parameter groups"):
        opt.step()
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize(
    ("rule", "needed"),
    [
        (ng.Fixed(), False),
        (ng.TrustRegion(0.1, ng.Backtracking()), False),
        (ng.LevenbergMarquardt(), True),
        (ng.Constrained(ng.LevenbergMarquardt(), ng.Clipping({"bias": (0.0, 1.0)})), True),
    ],
)
def test_a_rule_that_needs_a_closure_says_so_at_construction(
    rule: ng.step.StepRule, needed: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="natgrad"):
        opt = _linear(step=rule)
    said = f"{type(rule).__name__} evaluates the loss again: call opt.step(closure)"
    assert [record.message for record in caplog.records if record.name == "natgrad"] == [said] * needed
    assert opt.needs_closure is needed
    assert ("which evaluates the loss again: opt.step(closure)" in repr(opt)) is needed
    if needed:
        with pytest.raises(TypeError, match=r"evaluates the loss again: call opt.step\(closure\)"):
            opt.step()


@pytest.mark.parametrize("make", [ng.NaturalGradient, ng.KFAC, ng.EKFAC, ng.SobolevKFAC])
def test_a_loss_that_is_not_given_is_missed_by_its_name(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"missing the loss: give the one you train .* such as KFAC\(model, nn\."):
        make(nn.Linear(2, 2))


def test_repr_names_all_choices_and_the_numbers_of_the_groups() -> None:
    text = repr(_linear(structure=ng.Refresh(ng.Diagonal(), every=3), lr=0.25))
    for part in (
        "metric: Euclidean(",
        "structure: Refresh(",
        "every=3",
        "solver: Cholesky()",
        "step: Fixed()",
        "lr: 0.25",
    ):
        assert part in text


NOISY: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch_norm": (lambda: nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)), r"1 \(BatchNorm1d\)"),
    "dropout": (lambda: nn.Sequential(nn.Linear(2, 3), nn.Dropout(0.5)), r"1 \(Dropout\)"),
}


@pytest.mark.parametrize("name", NOISY)
def test_modules_that_mix_examples_or_are_random_are_named_and_work_in_evaluation_mode(name: str) -> None:
    make, match = NOISY[name]
    model, x = make(), torch.randn(6, 2, generator=torch.Generator().manual_seed(0))
    with pytest.raises(BatchStatisticsError, match=match + ".*no per-example Jacobian.*natgrad.evaluating"):
        ng.pullback(model, x, ng.Euclidean())
    opt = ng.NaturalGradient(model, ng.Euclidean())
    with pytest.raises(BatchStatisticsError, match=match):
        model(x)
    with pytest.raises(BatchStatisticsError, match=match):
        opt.refresh(x)
    start = [p.detach().clone() for p in model.parameters()]
    with ng.evaluating(model):
        model(x).square().sum().backward()
        opt.step()
    assert all(module.training for module in model.modules())
    assert not torch.equal(next(model.parameters()), start[0])
    model.eval()
    assert ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense().isfinite().all()


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Kernel(), ng.LowRank(3)])
def test_a_structure_over_the_memory_bound_says_how_much_it_needs_and_what_fits(
    structure: ng.structures.Structure,
) -> None:
    of = task()
    opt = of.optimizer(structure=structure, memory=150)
    name = type(structure).__name__
    with pytest.raises(MemoryBoundError, match=f"{name} of 17 parameters needs .*bound memory=150. These fit: .*bytes"):
        of.model(of.x)
    pb = ng.pullback(of.model, of.x, ng.Euclidean(), memory=150)
    with pytest.raises(MemoryBoundError, match=f"{name} of 17 parameters needs .* These fit"):
        structure.estimate(pb)
    assert opt.tracker.step == 0


@pytest.mark.parametrize("make", [ng.NaturalGradient, ng.KFAC, ng.EKFAC, ng.SobolevKFAC], ids=lambda f: f.__name__)
def test_every_option_is_a_keyword_with_a_visible_default(make: Callable[..., ng.NaturalGradient]) -> None:
    model, metric, *options = inspect.signature(make).parameters.values()
    assert (model.name, metric.name) == ("model", "metric")
    assert all(option.kind is option.KEYWORD_ONLY for option in options)
    assert all(option.default is not option.empty for option in options)
    names = {option.name for option in options}
    assert {"lr", "damping", "momentum", "weight_decay", "step", "solver", "groups", "rules", "output"} <= names
    if make is not ng.NaturalGradient:
        assert {"metric_every", "inverse_every", "decay", "sharing", "fallback", "strict"} <= names
    with pytest.raises(TypeError, match="positional argument"):
        make(nn.Linear(2, 2), ng.Euclidean(), 0.1)


def test_repr_tells_where_momentum_is_what_is_relative_and_what_adamw_steps() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))
    lines = repr(natural_of_outputs(model, ng.Euclidean())).replace("\n", "; ").split("; ")
    assert "damping: relative to the mean eigenvalue of every factor" in lines
    assert "momentum: on gradients" in lines
    assert "fallback: AdamW for 2 of 4 parameters" in lines
    plain = repr(ng.NaturalGradient(model, ng.Euclidean()))
    assert "momentum: on steps" in plain
    assert "relative" not in plain
    assert "AdamW" not in plain
