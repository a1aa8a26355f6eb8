"""Residuals that no step can be made with, each with its message."""

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError, IncompatibleError, NonFiniteError
from natgrad.step import StepRule
from natgrad.structures.base import Structure
from tests.fit.problems import flat, grid, network, poisson, solution


def plain(net: nn.Module, x: Tensor) -> Tensor:
    return net(x) - solution(x)


def test_a_class_without_points_is_named() -> None:
    residuals = {**poisson(4), "initial": ng.Residuals(plain, torch.zeros(0, 2).double())}
    with pytest.raises(ValueError, match="'initial' have no points: leave the class out"):
        ng.LeastSquares(residuals, network(2, 5, 1)).step()


@pytest.mark.parametrize("structure", [ng.Dense(power=0.5), ng.Kernel(power=0.5), ng.Kronecker(power=0.5)], ids=repr)
def test_a_power_of_the_metric_is_refused(structure: Structure) -> None:
    with pytest.raises(IncompatibleError, match=r"LeastSquares does not work with .*power=0\.5.*Use power=1"):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), network(2, 5, 1), structure=structure)


OWN_FACTORISATION = r"solver=….*its own factorisation: give structure=Implicit\(\) for CG"


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kernel()], ids=repr)
def test_a_solver_is_refused_where_the_structure_has_its_own(structure: Structure) -> None:
    with pytest.raises(IncompatibleError, match=OWN_FACTORISATION):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), network(2, 5, 1), structure=structure, solver=ng.CG())


def test_a_solver_is_refused_where_the_structure_that_is_chosen_has_its_own() -> None:
    fit = ng.LeastSquares(ng.Residuals(plain, grid(4)), network(2, 5, 1), solver=ng.CG())
    with pytest.raises(IncompatibleError, match=OWN_FACTORISATION):
        fit.step()


def test_residuals_that_are_nan_at_the_start_are_named() -> None:
    x = grid(4)
    x[3] = torch.nan
    with pytest.raises(NonFiniteError, match="'residuals' where the step starts: the outputs are not"):
        ng.LeastSquares(ng.Residuals(plain, x), network(2, 5, 1)).step()


def test_a_function_that_returns_nan_is_named() -> None:
    residuals = ng.Residuals(lambda net, x: (-net(x).square() - 1).log(), grid(4))
    with pytest.raises(NonFiniteError, match=r"first layer with NaN or infinity is the model \(ResidualsOfNetwork\)"):
        ng.LeastSquares(residuals, network(2, 5, 1)).step()


def test_a_layer_is_named_as_in_the_network() -> None:
    broken = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Threshold(math.inf, math.nan), nn.Linear(3, 1)).double()
    with pytest.raises(NonFiniteError, match=r"first layer with NaN or infinity is 2 \(Threshold\)"):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), broken).step()
    random = nn.Sequential(nn.Linear(2, 3), nn.Dropout(), nn.Linear(3, 1)).double()
    with pytest.raises(BatchStatisticsError, match=r"^1 \(Dropout\): in training mode"):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), random).step()


def _mixed(net: nn.Sequential) -> nn.Module:
    net[0].float()
    return net


@pytest.mark.parametrize(
    ("changed", "match"),
    [
        (lambda net: net.requires_grad_(False), "the module Sequential has no trainable parameters"),
        (lambda net: net.to("meta"), r"the module Sequential: 0\.weight, .* on the meta device"),
        (_mixed, r"the module Sequential mixes dtypes: 0\.weight is torch.float32"),
    ],
)
def test_parameters_are_refused_by_their_names_in_the_network(changed: Callable[[Any], nn.Module], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), changed(network(2, 5, 1)))


def test_a_rule_for_matrices_asks_for_another_rule() -> None:
    match = r"fewer than two axes: 0\.bias, 2\.bias\. .* elsewhere, take another step rule"
    with pytest.raises(IncompatibleError, match=match):
        ng.LeastSquares(ng.Residuals(plain, grid(4)), network(2, 5, 1), step=ng.Polar())


@pytest.mark.parametrize("rule", [ng.LevenbergMarquardt(), ng.GridSearch(), ng.Armijo(), ng.GeodesicSearch()])
def test_a_trial_step_that_is_nan_is_shortened_and_the_reason_kept(rule: StepRule) -> None:
    θ = {"a": torch.tensor([4.0]).double()}
    problem = ng.LeastSquares(lambda θ: (θ["a"] - 3.6).sqrt() + θ["a"] - 3.61, θ, step=rule, damping=1e-6)
    result = problem.solve(max_steps=200)  # the first step of Newton leads to 3.43
    assert any("shortened: not finite in residuals" in record.reason for record in result.history)
    assert all(record.cost < math.inf for record in result.history)
    assert float(θ["a"]) == pytest.approx(3.6, abs=1e-3), result.message


def test_more_unknowns_than_residuals_have_a_solution_but_no_covariance() -> None:
    net = network(2, 20, 1)
    result = ng.LeastSquares(ng.Residuals(plain, grid(3)), net).solve(max_steps=50)
    assert result.cost < 1e-12
    assert result.rank <= 9
    assert bool((result.covariance == math.inf).all())


def test_products_have_no_rank() -> None:
    problem = ng.LeastSquares(ng.Residuals(plain, grid(3)), network(2, 5, 1), structure=ng.Implicit())
    with pytest.raises(IncompatibleError, match="known by products only"):
        _ = problem.solve(max_steps=1).rank


def test_single_precision_says_what_it_reached(caplog: pytest.LogCaptureFixture) -> None:
    net = network(2, 5, 1).float()
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        ng.LeastSquares(ng.Residuals(lambda net, x: net(x), grid(4).float()), net).solve(max_steps=200)
    (record,) = caplog.records
    assert "in float32 stopped at the cost" in record.getMessage()


HIDDEN: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "points alone": lambda net, x: x[:, :1],
    "detach": lambda net, x: net(x).detach(),
    "no_grad": torch.no_grad()(plain),
    "a new tensor": lambda net, x: torch.tensor(net(x).tolist(), dtype=torch.float64),
}


@pytest.mark.parametrize("structure", [None, ng.Dense(), ng.Implicit(), ng.Kronecker()], ids=repr)
@pytest.mark.parametrize("name", list(HIDDEN))
def test_residuals_that_hide_the_parameters_are_named(name: str, structure: Structure | None) -> None:
    residuals = {**poisson(3), "hidden": ng.Residuals(HIDDEN[name], grid(3))}
    with pytest.raises(ValueError, match=r"'hidden' do not depend on the parameters: .* without detach\(\)"):
        ng.LeastSquares(residuals, network(2, 5, 1), structure=structure).step()
    with pytest.raises(ValueError, match="'residuals' do not depend on the parameters"):
        ng.LeastSquares(lambda θ: θ["a"].detach(), {"a": torch.ones(2).double()}, structure=structure).step()


@pytest.mark.parametrize("sizes", [(2, 1), (2, 20, 1)], ids=["more residuals", "more unknowns"])
def test_a_jacobian_of_zeros_ends_at_once(sizes: tuple[int, ...]) -> None:
    net = network(*sizes)
    before = flat(net)
    result = ng.LeastSquares(ng.Residuals(lambda net, x: 0 * net(x) + 1, grid(3)), net).solve()
    assert (result.status, len(result.history), result.rank) == (1, 1, 0)
    assert torch.equal(flat(net), before)


def test_what_residuals_cannot_be_is_named() -> None:
    def step(function: Callable[[nn.Module, Tensor], Any]) -> None:
        ng.LeastSquares({"law": ng.Residuals(function, grid(3))}, network(2, 5, 1)).step()

    with pytest.raises(TypeError, match=r"'law' must be a tensor \[n \*out\], a row for each point, got None"):
        step(lambda net, x: None)
    with pytest.raises(TypeError, match=r"'law' are torch.complex128, .* torch.view_as_real"):
        step(lambda net, x: 1j * net(x))
    with pytest.raises(TypeError, match=r"'law' are torch.int64, and must be real floating-point"):
        step(lambda net, x: net(x).long())
    with pytest.raises(ValueError, match=r"'law' are a tensor \[9, 0\] without entries: leave the class out"):
        step(lambda net, x: net(x)[:, :0])


def test_options_of_a_wrong_kind_are_named() -> None:
    net = network(2, 5, 1)
    with pytest.raises(TypeError, match=r"points must be a tensor, a tuple of tensors or .* got \[\[0.0, 1.0\]\]"):
        ng.Residuals(plain, ([[0.0, 1.0]], grid(3)))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"weight must be a number .* multiply r by their roots"):
        ng.Residuals(plain, grid(3), weight=torch.ones(9))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="memory must be a number of bytes, got '1 GB'"):
        ng.LeastSquares(ng.Residuals(plain, grid(3)), net, memory="1 GB")  # type: ignore[arg-type]
    problem = ng.LeastSquares(ng.Residuals(plain, grid(3)), net)
    with pytest.raises(TypeError, match=r"max_steps must be an integer, got 2\.5"):
        problem.solve(max_steps=2.5)  # type: ignore[arg-type]
    for name in ("cost", "ftol", "xtol", "gtol", "seconds"):
        with pytest.raises(ValueError, match=rf"solve\({name}=…\) must be a number ≥ 0, got nan"):
            problem.solve(**{name: math.nan})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"solve\(ftol=…\) must be a number ≥ 0, got None"):
        problem.solve(ftol=None)  # type: ignore[arg-type]
    assert problem.steps == 0


def test_what_is_no_residual_is_refused() -> None:
    net = network(2, 5, 1)
    with pytest.raises(TypeError, match=r"'inside' must be ng\.Residuals"):
        ng.LeastSquares({"inside": grid(3)}, net)  # type: ignore[dict-item]
    with pytest.raises(TypeError, match="params is a module, or a dict of tensors by name, not list"):
        ng.LeastSquares(ng.Residuals(plain, grid(3)), list(net.parameters()))  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="takes the residuals first, and then the model"):
        ng.LeastSquares(net, {"inside": ng.Residuals(plain, grid(3))})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match=r"weight=…\) must be positive"):
        ng.Residuals(plain, grid(3), weight=0.0)
    with pytest.raises(ValueError, match='"mean" or "sum"'):
        ng.Residuals(plain, grid(3), reduction="none")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="there is no class"):
        ng.LeastSquares({}, net)
    with pytest.raises(TypeError, match="structure must be a natgrad Structure"):
        ng.LeastSquares(ng.Residuals(plain, grid(3)), net, structure=ng.Kernel)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="without a closure"):
        ng.GaussNewton(net, ng.Residuals(plain, grid(3))).step(lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="least squares has residuals"):
        ng.LeastSquares(ng.Residuals(plain, grid(3)), net, step=ng.SelfTuned()).step()
    assert flat(net).isfinite().all()


def test_a_class_of_residuals_may_depend_on_frozen_parameters_only() -> None:
    net = network(2, 5, 1)
    for p in net[0].parameters():
        p.requires_grad_(False)
    frozen = ng.Residuals(lambda net, x: net[0](x), grid(3))
    result = ng.LeastSquares({"all": ng.Residuals(plain, grid(3)), "frozen": frozen}, net).solve(max_steps=3)
    assert result.history[-1].cost <= result.history[0].cost


def test_inference_mode_is_named() -> None:
    problem = ng.LeastSquares(lambda θ: θ["b"] - 1, {"b": torch.zeros(2).double()})
    with torch.inference_mode(), pytest.raises(ValueError, match="inference_mode"):
        problem.step()


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_of_the_optimizer_is_refused_with_the_fix(copied: Callable[[Any], Any]) -> None:
    net = nn.Linear(1, 1).double()
    with pytest.raises(TypeError, match="make a new optimizer for it, and load_state_dict"):
        copied(ng.GaussNewton(net, ng.Residuals(lambda net, x: net(x) - 1, torch.ones(3, 1).double())))
