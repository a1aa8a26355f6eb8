"""Loading a state: one of another metric is refused with the difference; one of another solver is accepted."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.optim.checkpoint import in_words
from natgrad.output import OutputMetric
from tests.optim.states import EXACT, MAKES, Make, alike, net, state_of, train, whole
from tests.pulled import normal
from tests.zoo import case, mlp

SAMPLED = ng.Fisher(ng.Categorical(), samples=1)
OTHER_METRICS: dict[str, tuple[OutputMetric, str]] = {
    "kind": (ng.Euclidean(), r"its metric is Fisher\(family=Categorical\(\)\), here it is Euclidean\(\)"),
    "family": (ng.Fisher(ng.Bernoulli()), r"Categorical\(\)\), here it is Fisher\(family=Bernoulli\(\)\)"),
    "reduction": (ng.Fisher(ng.Categorical(), reduction="mean"), r"here it is Fisher\(.*reduction='mean'\)"),
    "coupled": (ng.Sobolev(EXACT), r"here it is Sobolev\(base=Fisher\(family=Categorical\(\)\)\)"),
}


@pytest.mark.parametrize("name", OTHER_METRICS)
def test_the_state_of_another_metric_is_refused_and_nothing_is_loaded(name: str) -> None:
    metric, match = OTHER_METRICS[name]
    _, state = state_of(MAKES["kfac"])
    model = net(1)
    opt = ng.KFAC(model, metric)
    train(model, opt, 1)
    before = whole(opt)
    with pytest.raises(ValueError, match=f"this is the state of another optimizer: .*{match}"):
        opt.load_state_dict(state)
    assert alike(whole(opt), before)


def test_an_estimate_from_samples_is_one_of_the_same_metric() -> None:
    for metric in (SAMPLED, ng.Sampled(EXACT)):
        _, state = state_of(MAKES["kfac"])
        model = net()
        ng.KFAC(model, metric).load_state_dict(state)


def test_metrics_and_solvers_have_the_same_words_in_every_process() -> None:
    """No addresses, no tensors but for numbers, and no defaults, to which a later version may add."""
    for metric, words in [
        (ng.Sobolev(SAMPLED, lengthscale=2, features=lambda x: x), "lengthscale=2, features=…"),
        (ng.Sobolev(EXACT, lengthscale=2.0, features=abs), "lengthscale=2, features=…"),
        (ng.Sobolev(EXACT, lengthscale=torch.tensor(3.0)), "lengthscale=3"),
    ]:
        assert in_words(metric.unsampled()) == f"Sobolev(base=Fisher(family=Categorical()), {words})"
    assert in_words(ng.CG(tol=1e-3)) == "CG(tol=0.001)"
    assert in_words(ng.Factored()) == "Factored()"


def test_another_solver_keeps_the_metric_and_inverts_anew_which_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """So that its next step is that of the run that was saved, had it had this solver and no inverse yet."""
    saved, state = state_of(MAKES["kfac"])
    thetas = []
    for _ in range(2):
        model = net()
        opt = MAKES["exact"](model)
        model.load_state_dict(saved.tracker.module.state_dict())
        with caplog.at_level(logging.INFO, "natgrad"):
            opt.load_state_dict(state)
        assert opt.preconditioner.inverse is None
        thetas.append(train(model, opt, 1))
    told = [r.getMessage() for r in caplog.records if r.getMessage().startswith("the state was saved with the solver")]
    assert (
        told
        == ["the state was saved with the solver Factored(), here it is Cholesky(): the next step inverts anew"] * 2
    )
    average = saved.tracker.average
    assert average is not None
    expected = ng.Cholesky().init(average, 1e-2)
    assert opt.preconditioner.inverse is not None
    ω = normal(average.layout.size)
    torch.testing.assert_close(opt.preconditioner.inverse.solve(ω), expected.solve(ω))
    assert torch.equal(*thetas)
    assert not torch.allclose(thetas[0], train(saved.tracker.module, saved, 1))


def test_a_state_of_version_0_1_0_is_loaded_bit_for_bit() -> None:
    """It says nothing of layers that operations have shown, and counts its estimates."""
    saved, state = state_of(MAKES["dense"])
    assert "operations" not in state["natgrad"]
    state["natgrad"]["count"] = 3
    model = net(1)
    opt = MAKES["dense"](model)
    model.load_state_dict(saved.tracker.module.state_dict())
    opt.load_state_dict(state)
    assert torch.equal(train(model, opt, 3), train(saved.tracker.module, saved, 3))


@pytest.mark.parametrize("name", MAKES)
def test_a_state_that_is_whole_is_loaded(name: str) -> None:
    _, state = state_of(MAKES[name])
    opt, _ = state_of(MAKES[name], seed=1, steps=1)
    opt.load_state_dict(state)
    assert alike(whole(opt), state)


@pytest.mark.parametrize("name", ["kfac", "ekfac", "blocks", "kernel", "low_rank"])
@pytest.mark.parametrize(
    "model", ["bare_parameter", "tied_weights", "tied_embedding", "conv", "attention", "weight_norm"]
)
def test_states_of_layers_of_all_kinds_are_whole(model: str, name: str) -> None:
    """Parameters that are spread over the examples, tied ones, groups, rules that replay, and such that have none."""
    problem = case(model).make()
    opt = MAKES[name](problem.module)
    problem.outputs().square().sum().backward()
    opt.step()
    state = copy.deepcopy(opt.state_dict())
    other = MAKES[name](problem.module)
    other.load_state_dict(state)
    assert alike(other.state_dict(), state)
    ω, averages = normal(opt.tracker.model.size), [own.tracker.average for own in (opt, other)]
    solved = [opt.preconditioner.solver.init(G, 0.1).solve(ω) for G in averages if G is not None]
    torch.testing.assert_close(solved[0], solved[1])


def test_the_state_of_another_kind_of_optimizer_is_refused() -> None:
    adam = torch.optim.Adam(mlp(3, 4, 2).parameters())
    with pytest.raises(ValueError, match='this is not the state of a NaturalGradient: it has no "natgrad" entry'):
        ng.KFAC(mlp(3, 4, 2), EXACT).load_state_dict(adam.state_dict())


def test_equal_numbers_have_the_same_words_and_others_have_not() -> None:
    alike = [1.5, np.float64(1.5), np.float32(1.5), Fraction(3, 2), torch.tensor(1.5)]
    assert {in_words(number) for number in alike} == {"1.5"}
    assert in_words({"b": 1.0, "a": (2, None)}) == "{'a': [2, None], 'b': 1}"
    for one, other in ((Fraction(5, 2), Fraction(1, 2)), (torch.tensor(1.0), torch.tensor(5.0)), ({"a": 1}, {"a": 9})):
        assert in_words(one) != in_words(other)


def test_what_a_hook_keeps_beside_a_parameter_may_have_any_shape() -> None:
    _, state = state_of(MAKES["kfac"])
    state["state"][0]["seen"] = torch.tensor(3.0)
    opt = MAKES["kfac"](net())
    opt.load_state_dict(state)
    assert opt.state_dict()["state"][0]["seen"] == 3


def test_the_first_inverse_after_another_solver_has_none_before_it() -> None:
    model = net()
    opt = ng.KFAC(model, EXACT, metric_every=1, inverse_every=1)
    train(model, opt, 3)
    assert opt.preconditioner.inverted_before == 1
    other = ng.KFAC(net(), EXACT, solver=ng.Cholesky(), metric_every=1, inverse_every=1)
    other.load_state_dict(opt.state_dict())
    assert other.preconditioner.inverse is None
    train(other.tracker.module, other, 1)
    assert other.preconditioner.inverted_before is None


# A state that is damaged is refused with what is wrong with it, and nothing of it is loaded.


Damage = Callable[[dict[str, Any]], object]


def _refused(make: Make, damage: Damage, error: type[Exception], match: str) -> None:
    _, state = state_of(make)
    damage(state)
    opt, before = state_of(make, seed=1, steps=1)
    with pytest.raises(error, match=match):
        opt.load_state_dict(state)
    assert alike(whole(opt), before)


def _entry(*path: Any, value: Any) -> Damage:
    """Put a value at this place, or take what is there away."""

    def damage(state: dict[str, Any]) -> None:
        for key in path[:-1]:
            state = state[key]
        if value is None:
            del state[path[-1]]
        else:
            state[path[-1]] = value

    return damage


def _operator(key: str, value: Any) -> Damage:
    return _entry("natgrad", "operator", key, value=value)


def _inverse(key: str, value: Any) -> Damage:
    return _entry("natgrad", "inverse", key, value=value)


def _poison(what: str, key: str, number: float) -> Damage:
    return lambda state: state["natgrad"][what][key].view(-1)[0].fill_(number)


def _row(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.float64)


DAMAGED: dict[str, tuple[str, Damage, str]] = {
    "no_S": ("kfac", _operator("hidden.weight/S", None), "hidden.weight/S of the metric is missing"),
    "no_A": ("kfac", _operator("hidden.weight/A", None), "hidden.weight/A of the metric is missing"),
    "no_D": ("ekfac", _operator("last.weight/D", None), "last.weight/D of the metric is missing"),
    "no_Q": ("ekfac", _operator("last.weight/Q", None), "last.weight/Q of the metric is missing"),
    "no_P": ("ekfac", _operator("last.weight/P", None), "last.weight/P of the metric is missing"),
    "other_S": (
        "kfac",
        _operator("hidden.weight/S", _row(1, 3, 3)),
        r"hidden.weight/S of the metric in the state has the shape \[1, 3, 3\], here it is \[1, 4, 4\]",
    ),
    "flat_A": ("ekfac", _operator("hidden.weight/A", _row(4)), r"hidden.weight/A .*shape \[4\], here .*\[1, 4, 4\]"),
    "other_D": ("ekfac", _operator("hidden.weight/D", _row(1, 1, 1)), r"hidden.weight/D .*\[1, 1, 1\].*\[1, 4, 4\]"),
    "other_Q": ("ekfac", _operator("last.weight/Q", _row(1, 4, 4)), r"last.weight/Q .*\[1, 4, 4\].*\[1, 2, 2\]"),
    "strange": ("kfac", _operator("nobody/S", _row(1)), "has nobody/S, for which there is no layer"),
    "no_rest": ("kfac", _operator("fallback/values", None), "the factors of mix are missing in the metric"),
    "other_rest": ("kfac", _operator("fallback/values", _row(3)), r"fallback/values .*shape \[3\], here it is \[16\]"),
    "other_rest_block": ("blocks", _operator("fallback/mix", _row(3, 3)), r"fallback/mix .*\[3, 3\].*\[16, 16\]"),
    "no_matrix": (
        "dense",
        lambda s: s["natgrad"]["operator"].update(x=s["natgrad"]["operator"].pop("matrix")),
        "matrix of the metric is missing",
    ),
    "other_matrix": ("dense", _operator("matrix", _row(3, 3)), r"matrix of the metric .*\[3, 3\].*\[42, 42\]"),
    "other_diagonal": ("diagonal", _operator("values", _row(3)), r"values of the metric .*\[3\].*\[42\]"),
    "no_block": ("block_dense", _operator("mix", None), "the metric in the state has 2 blocks, here it has 3"),
    "other_block": ("block_dense", _operator("mix", _row(3, 3)), r"mix of the metric .*\[3, 3\].*\[16, 16\]"),
    "no_floor": ("low_rank", _operator("floor", None), "floor of the metric is missing"),
    "other_floor": ("low_rank", _operator("floor", _row(1)), r"floor of the metric .*\[1\].*\[42\]"),
    "no_rows": ("kernel", _operator("last.weight/g", None), "last.weight/g of the metric is missing"),
    "other_rows": (
        "kernel",
        _operator("last.weight/a", _row(5, 1, 1, 5)),
        r"last.weight/a of .*\[5, 1, 1, 5\].*\[6, 1,",
    ),
    "no_inverse_S": ("kfac", _inverse("last.weight/S", None), "last.weight/S of the inverse of the metric is missing"),
    "other_inverse_A": (
        "kfac",
        _inverse("last.weight/A", _row(1, 1, 1)),
        r"last.weight/A of the inverse .*\[1, 1, 1\]",
    ),
    "other_inverse_d": (
        "exact",
        _inverse("last.weight/d", _row(1, 1, 1)),
        r"last.weight/d of the inverse .*\[1, 1, 1\]",
    ),
    "other_inverse_rest": (
        "kfac",
        _inverse("fallback/values", _row(3)),
        "the inverse of the metric in the state do not fit",
    ),
    "other_factor": (
        "dense",
        _inverse("cholesky/0", _row(1, 3, 3)),
        "of the inverse of the metric in the state do not",
    ),
    "other_guess": ("implicit", _inverse("guess", _row(3)), r"guess of the inverse .*\[3\], here it is \[42\]"),
    "no_tensor": ("kfac", _operator("last.weight/S", 3), "last.weight/S of the metric in the state is a int, not a"),
    "no_step": ("kfac", _entry("natgrad", "step", value=None), 'the "natgrad" entry of the state has no step'),
    "no_generator": ("kfac", _entry("natgrad", "generator", value=None), "has no generator: it is incomplete"),
    "word_step": ("kfac", _entry("natgrad", "step", value="two"), '"step" of the state is a str: it is damaged'),
    "bad_generator": ("kfac", _entry("natgrad", "generator", value=_row(3)), '"generator" of the state is no state'),
    "no_state": ("kfac", _entry("state", value=None), 'the state has no "state"'),
    "no_damping": ("kfac", _entry("param_groups", 0, "damping", value=None), "group 0 of the state has no damping"),
    "bad_lr": ("kfac", _entry("param_groups", 0, "lr", value=-1.0), "lr must be finite and ≥ 0, got -1.0"),
    "other_group": (
        "kfac",
        lambda state: state["param_groups"][0]["params"].pop(),
        r"its parameter groups have \[4\] parameters, here they have \[5\]",
    ),
    "more_groups": (
        "kfac",
        lambda state: state["param_groups"].append({**state["param_groups"][0], "params": [7]}),
        r"its parameter groups have \[5, 1\] parameters, here they have \[5\]",
    ),
    "other_momentum": (
        "kfac",
        _entry("state", 1, "momentum", value=_row(2)),
        r"momentum of hidden.weight in the state has the shape \[2\], here it is \[4, 3\]",
    ),
    "no_momentum": (
        "kfac",
        _entry("state", 1, "momentum", value="none"),
        "momentum of hidden.weight in the state is a str, where a tensor belongs",
    ),
    "strange_momentum": ("kfac", _entry("state", 9, value={}), "momentum of a parameter number 9, which no group has"),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_state_is_refused_by_what_is_wrong_with_it_and_nothing_is_loaded(name: str) -> None:
    make, damage, match = DAMAGED[name]
    _refused(MAKES[make], damage, ValueError, f"{match}.*Nothing was loaded" if name != "bad_lr" else match)


POISONED: dict[str, tuple[str, Damage, str]] = {
    "factor": ("kfac", _poison("operator", "hidden.weight/S", float("nan")), "hidden.weight/S of the metric"),
    "rest": ("ekfac", _poison("operator", "fallback/values", float("inf")), "fallback/values of the metric"),
    "matrix": ("dense", _poison("operator", "matrix", float("-inf")), "matrix of the metric"),
    "inverse": (
        "kfac",
        _poison("inverse", "last.weight/A", float("nan")),
        "last.weight/A of the inverse of the metric",
    ),
    "momentum": (
        "kfac",
        lambda s: s["state"][2]["momentum"].fill_(float("nan")),
        "momentum of hidden.bias",
    ),
}


@pytest.mark.parametrize("name", POISONED)
def test_a_state_with_nan_or_infinity_is_refused_and_nothing_is_loaded(name: str) -> None:
    make, damage, match = POISONED[name]
    _refused(MAKES[make], damage, NonFiniteError, f"{match} in the state holds NaN or infinity.*earlier checkpoint")


NEGATIVE: dict[str, tuple[str, str, str, str]] = {
    "diagonal": ("diagonal", "operator", "values", "values of the metric"),
    "matrix": ("dense", "operator", "matrix", "matrix of the metric"),
    "block": ("block_dense", "operator", "mix", "mix of the metric"),
    "left": ("kfac", "operator", "hidden.weight/S", "hidden.weight/S of the metric"),
    "right": ("kfac", "operator", "last.weight/A", "last.weight/A of the metric"),
    "moments": ("ekfac", "operator", "last.weight/D", "last.weight/D of the metric"),
    "rest": ("ekfac", "operator", "fallback/values", "fallback/values of the metric"),
    "floor": ("low_rank", "operator", "floor", "floor of the metric"),
    "inverse": ("kfac", "inverse", "hidden.weight/S", "hidden.weight/S of the inverse"),
    "eigenvalue": ("ekfac", "inverse", "hidden.weight/d", "hidden.weight/d of the inverse"),
    "scale": ("kfac", "inverse", "fallback/values", "fallback/values of the inverse"),
}


@pytest.mark.parametrize("name", NEGATIVE)
def test_a_negative_second_moment_is_refused_and_nothing_is_loaded(name: str) -> None:
    """The steps would be NaN, or would ascend."""
    make, operator, key, match = NEGATIVE[name]
    _refused(MAKES[make], _poison(operator, key, -1.0), ValueError, f"{match}.* has negative entries, -1: .*earlier")


def places(state: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of everything in a state."""
    for key, value in state.items() if isinstance(state, dict) else enumerate(state):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


GRADIENTS: dict[str, Callable[[torch.nn.Module], torch.optim.Optimizer]] = {
    "natural": ng.Natural,
    "soap": ng.SOAP,
    "muon": ng.Muon,
    "adamw": lambda m: ng.KFAC(m, EXACT, fallback="adamw"),
    "kfac": MAKES["kfac"],
    "dense": MAKES["dense"],
}


@pytest.mark.parametrize("name", GRADIENTS)
def test_whatever_else_is_in_the_place_of_something_is_refused_in_words_and_nothing_is_loaded(name: str) -> None:
    """Of metric, momentum, numbers, words and groups; a number is not refused where a number belongs."""
    model = net()
    opt = GRADIENTS[name](model)
    train(model, opt, 2)
    saved = opt.state_dict()
    before = copy.deepcopy(saved)
    for at in places(saved):
        for other in (None, "word", [1.0], {"a": 1}, b"x", model, torch.ones(2, 0), torch.tensor(1 + 2j)):
            damaged = copy.deepcopy(saved)
            holder = damaged
            for key in at[:-1]:
                holder = holder[key]
            holder[at[-1]] = other
            with pytest.raises(ValueError, match="Nothing was loaded"):
                opt.load_state_dict(damaged)
    assert alike(opt.state_dict(), before)


def test_negative_second_moments_of_adamw_are_refused() -> None:
    damage = _entry("state", 0, "exp_avg_sq", value=torch.full((4, 4), -1.0).double())
    _refused(lambda m: ng.KFAC(m, EXACT, fallback="adamw"), damage, ValueError, "exp_avg_sq of mix .*negative entries")


def test_a_second_moment_that_is_negative_by_rounding_is_loaded() -> None:
    _, state = state_of(MAKES["diagonal"])
    state["natgrad"]["operator"]["values"][0] = -1e-18
    MAKES["diagonal"](net()).load_state_dict(state)


def test_what_was_saved_before_a_default_was_added_is_the_same_structure() -> None:
    _, state = state_of(MAKES["kfac"])
    for words in ("Kronecker()", "Kronecker(sharing='expand', strict=False)", "Kronecker(fallback=Diagonal())"):
        state["natgrad"]["structure"] = words
        MAKES["kfac"](net()).load_state_dict(state)
    for words in (
        "Kronecker(sharing='reduce')",
        "Kronecker(fallback=Dense())",
        "Kronecker(later=1)",
        "EigenKronecker()",
    ):
        state["natgrad"]["structure"] = words
        with pytest.raises(ValueError, match=rf"its structure is {re.escape(words)}, here it is Kronecker\(sharing="):
            MAKES["kfac"](net()).load_state_dict(state)
