"""K-FAC with bad input: wrong options, rules that break their word, dead layers, NaN."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NatgradError, NonFiniteError
from natgrad.operators import KroneckerOperator
from natgrad.rules import LinearRule, Rule
from natgrad.rules.base import Call, Keys
from tests.optim.tasks import seeded, task
from tests.pulled import close, covered, normal, oracle_rows, random_roots, rows
from tests.zoo import Problem, mlp

FISHER = ng.Fisher(ng.Bernoulli())
PRESETS = pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC], ids=["KFAC", "EKFAC"])


# Options


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"sharing": "mean"}, ValueError, 'Kronecker\\(sharing=…\\) is "expand" or "reduce", not \'mean\''),
        ({"fallback": "diagonal"}, ValueError, r'fallback= is "adamw", the structure of .*, or None, got \'diagonal\''),
        ({"fallback": ng.Diagonal}, TypeError, r"got the class Diagonal: write Diagonal\(…\)"),
        ({"fallback": ng.Kernel()}, ValueError, r"Kernel\(\)\) cannot be averaged over time: use Diagonal\(\)"),
        ({"metric_every": 0}, ValueError, "metric_every must be at least 1 step, got 0"),
        ({"inverse_every": 0}, ValueError, "inverse_every must be at least 1 step, got 0"),
        ({"decay": 1.5}, ValueError, r"decay=…\) must be in \[0, 1\], got 1.5"),
        ({"decay": -0.1}, ValueError, r"decay=…\) must be in \[0, 1\], got -0.1"),
        ({"radius": 0.1}, TypeError, "unexpected keyword argument .radius."),
        ({"update_freq": 3, "stat": 1}, TypeError, "unexpected keyword argument .update_freq."),
        ({"rules": [LinearRule]}, TypeError, r"rules\[0\] must be a natgrad Rule, got the class LinearRule: write"),
        ({"step": ng.SelfTuned}, TypeError, r"step must be a natgrad StepRule, got the class SelfTuned: write"),
        ({"step": "clip"}, TypeError, "step must be a natgrad StepRule, got 'clip'"),
        ({"solver": ng.Dense()}, TypeError, r"solver must be a natgrad Solver, got Dense\(\)"),
        ({"lr": -1.0}, ValueError, "lr must be finite and ≥ 0, got -1.0"),
        ({"damping": -1.0}, ValueError, "damping must be finite and ≥ 0, got -1.0"),
        ({"momentum": 1.0}, ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    ],
)
def test_wrong_options_are_refused_when_the_optimizer_is_made(
    options: dict[str, Any], error: type[Exception], match: str
) -> None:
    with pytest.raises(error, match=match):
        ng.KFAC(nn.Linear(2, 2), FISHER, **options)


def test_parameters_are_not_a_model_and_a_family_is_not_a_metric() -> None:
    with pytest.raises(TypeError, match=r"takes the model, an nn\.Module, not generator"):
        ng.KFAC(nn.Linear(2, 2).parameters(), FISHER)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"metric must be a natgrad OutputMetric, got Bernoulli\(\)"):
        ng.KFAC(nn.Linear(2, 2), ng.Bernoulli())  # type: ignore[arg-type]


@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker])
def test_the_largest_factor_has_a_row(structure: Any) -> None:
    with pytest.raises(ValueError, match=rf"{structure.__name__}\(largest=…\) must be at least 1, got 0"):
        structure(largest=0)


# Rules of one's own


class Scaled(nn.Module):
    """y = W (s x) with a number s that is not trained."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.weight, self.s = nn.Parameter(torch.randn(o, i)), 3.0

    def forward(self, x: Tensor) -> Tensor:
        """[n o]."""
        return self.s * x @ self.weight.T


@dataclass(frozen=True)
class ScaledRule(Rule):
    """a = s x, g the cotangents of y; ``wrong`` names a promise that is broken."""

    wrong: str = ""

    def covers(self, module: nn.Module) -> bool:
        return type(module) is Scaled

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        o, i = cast(Scaled, module).weight.shape
        return (1, o, i + 1) if self.wrong == "shape" else (1, o, i)

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        a = cast(Scaled, module).s * call.x
        if self.wrong == "input":
            return a
        return a[:, None, None, :-1] if self.wrong == "fewer inputs" else a[:, None, None]

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        if self.wrong == "cotangent":
            return g
        return g[:, :, None, None, :-1] if self.wrong == "fewer outputs" else g[:, :, None, None]

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return block["weight"][None]

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed.squeeze(-3)}


def own() -> nn.Sequential:
    """A layer of one's own between others."""
    return seeded(lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), Scaled(3, 2)).double())


def test_a_module_with_a_rule_of_twenty_lines_is_covered_and_its_rows_are_those_of_the_oracle() -> None:
    problem = Problem(own(), normal(5, 2))
    metric = random_roots(problem)
    pb = ng.pullback(problem.module, problem.x, metric, rules=[ScaledRule()])
    assert covered(pb) == {"0.weight", "0.bias", "2.weight"}
    close(rows(pb), oracle_rows(problem, metric.s))


def test_kfac_trains_with_a_rule_of_ones_own_and_strict() -> None:
    model = own()
    opt = ng.KFAC(model, ng.Euclidean(), rules=[ScaledRule()], strict=True)
    model(normal(5, 2)).square().sum().backward()
    opt.step()
    assert {row.names: row.rule for row in opt.plan().rows}[("2.weight",)] == "Scaled"
    G = opt.tracker.average
    assert isinstance(G, KroneckerOperator)
    close(G.left[1], torch.eye(2, dtype=torch.float64)[None])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ("shape", r"ScaledRule\.shape gives \(1, 2, 4\) for 2\.weight, which has 6 numbers: it must be \(c, o, i\)"),
        ("input", r"ScaledRule\.inputs returns a tensor of shape \(5, 3\) for .*weight: it must be \[n r c i\] with"),
        ("fewer inputs", r"ScaledRule\.input.* for .*weight: it must be .*as ScaledRule\.shape says"),
        ("cotangent", r"ScaledRule\.cotangents returns a tensor of shape \(2, 5, 2\) for .*weight: .*\[k n r c o\]"),
        ("fewer outputs", r"ScaledRule\..* for .*weight: it must be .*as ScaledRule\.shape says"),
    ],
)
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()], ids=repr)
def test_a_rule_whose_shapes_are_not_those_it_promised_is_named_with_its_layer(
    structure: Any, wrong: str, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        structure.estimate(ng.pullback(own(), normal(5, 2), ng.Euclidean(), rules=[ScaledRule(wrong)]))


# Layers that are dead, batches that are small, parameters that are frozen


@PRESETS
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dead_units_and_layers_without_gradient_make_finite_steps(preset: Any, dtype: torch.dtype) -> None:
    dead = nn.Linear(2, 4, dtype=dtype)
    model = nn.Sequential(dead, nn.ReLU(), nn.Linear(4, 2, dtype=dtype))
    with torch.no_grad():
        dead.bias.fill_(-100.0)
    opt = preset(model, FISHER, metric_every=1, inverse_every=1)
    x = normal(6, 2).to(dtype)
    before = dead.weight.detach().clone()
    for _ in range(3):
        opt.zero_grad()
        model(x).square().sum().backward()
        opt.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert torch.equal(dead.weight, before)  # no gradient, no step
    assert opt.diagnostics().layers[0].factors["S"].dead == 4


@PRESETS
def test_a_batch_of_one_makes_a_finite_step(preset: Any) -> None:
    model = seeded(lambda: mlp(3, 4, 2).double())
    opt = preset(model, FISHER)
    model(normal(1, 3)).square().sum().backward()
    opt.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


@PRESETS
@pytest.mark.parametrize("frozen", [["0.weight"], ["0.bias"], ["0.weight", "0.bias"], ["2.weight"]])
def test_frozen_parameters_stay_and_have_no_factors(preset: Any, frozen: list[str]) -> None:
    of = task("coins")
    for name in frozen:
        of.model.get_parameter(name).requires_grad_(False)
    before = {name: p.detach().clone() for name, p in of.model.named_parameters()}
    opt = preset(of.model, of.kind.metric)
    of.step(opt)
    assert not {name for row in opt.plan().rows for name in row.names} & set(frozen)
    for name, p in of.model.named_parameters():
        assert torch.equal(p, before[name]) == (name in frozen)


@pytest.mark.parametrize("steps", [0, 1, 10])
def test_parameters_that_are_frozen_after_the_optimizer_was_made_are_refused_by_name(steps: int) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric)
    for _ in range(steps):
        of.step(opt)
    of.model.get_parameter("0.weight").requires_grad_(False)
    before = of.theta()
    with pytest.raises(NatgradError, match=r"0\.weight was trainable when the optimizer was made, and is frozen now"):
        of.step(opt)
    assert torch.equal(of.theta(), before)
    of.model.get_parameter("0.weight").requires_grad_(True)
    of.step(opt)


# Numbers that are none


@PRESETS
@pytest.mark.parametrize("where", ["inputs", "gradients"])
def test_nan_changes_nothing_and_the_run_goes_on_as_if_it_had_not_been(preset: Any, where: str) -> None:
    """But for the forward pass: what it has shown of the metric is good, and K-FAC has averaged it already."""

    def run(bad: bool) -> Tensor:
        of = task("coins")
        opt = preset(of.model, of.kind.metric, metric_every=1, inverse_every=1)
        for step in range(4):
            if bad and step == 2:
                before = of.theta()
                with pytest.raises(NonFiniteError, match="NaN or infinity"):
                    _poisoned(of, opt, where)
                assert torch.equal(of.theta(), before)
            elif step == 2 and where == "gradients":
                of.model(_input(of, where))
                opt.tracker.discard()
            of.step(opt)
        return of.theta()

    assert torch.equal(run(False), run(True))


def _input(of: Any, where: str) -> Tensor:
    x: Tensor = of.x.clone()
    x[3, 1] = float("nan") if where == "inputs" else 1.0
    return x


def _poisoned(of: Any, opt: ng.NaturalGradient, where: str) -> None:
    opt.zero_grad()
    of.kind.loss(of.model(_input(of, where)), of.t).backward()
    of.model.get_parameter("2.bias").grad[0] = float("nan")
    opt.step()
