"""The state of another metric is refused with what differs; that of another solver, or of before, is gone on with."""

import copy
import logging
from fractions import Fraction

import numpy as np
import pytest
import torch

import natgrad as ng
from natgrad.optim.checkpoint import in_words, metric_in_words, solver_in_words
from natgrad.output import OutputMetric
from tests.optim.states import EXACT, MAKES, alike, net, state_of, train
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
    before = copy.deepcopy(opt.state_dict())
    with pytest.raises(ValueError, match=f"this is the state of another optimizer: .*{match}"):
        opt.load_state_dict(state)
    assert alike(opt.state_dict(), before)


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
        assert metric_in_words(metric) == f"Sobolev(base=Fisher(family=Categorical()), {words})"
    assert solver_in_words(ng.CG(tol=1e-3)) == "CG(tol=0.001)"
    assert solver_in_words(ng.Factored(ng.Newton())) == solver_in_words(ng.Factored()) == "Factored()"


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


@pytest.mark.parametrize("name", MAKES)
def test_states_of_before_metric_and_solver_were_saved_are_loaded_bit_for_bit(name: str) -> None:
    saved, state = state_of(MAKES[name])
    for entry in ("metric", "solver"):
        del state["natgrad"][entry]
    model = net(1)
    opt = MAKES[name](model)
    model.load_state_dict(saved.tracker.module.state_dict())
    opt.load_state_dict(state)
    assert torch.equal(train(model, opt, 3), train(saved.tracker.module, saved, 3))


@pytest.mark.parametrize("name", MAKES)
def test_a_state_that_is_whole_is_loaded(name: str) -> None:
    _, state = state_of(MAKES[name])
    opt, _ = state_of(MAKES[name], seed=1, steps=1)
    opt.load_state_dict(state)
    assert alike(opt.state_dict(), state)


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
    MAKES["kfac"](net()).load_state_dict(state)


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
