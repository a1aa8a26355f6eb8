"""Models as functions of named parameters: what is accepted, what is refused by name, and evaluation mode."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from natgrad.linearise import linearise
from natgrad.model import Arguments, Model, arguments, map_tensors, tensors_of
from tests import zoo

every_case = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)
X = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(3, 2)


def linear() -> nn.Linear:
    return nn.Linear(2, 2).double()


def mixed() -> nn.Module:
    return nn.Sequential(nn.Linear(2, 2).float(), nn.Linear(2, 2).double())


def returning(output: Callable[[Tensor], Any]) -> Callable[[], Any]:
    """Call a pure function whose outputs are `output(x w)`."""
    params = {"w": torch.eye(2, dtype=torch.float64)}
    return lambda: Model.of(lambda p, x: output(x @ p["w"]), params)(None, X)


def f(params: Mapping[str, Tensor], x: Tensor) -> Tensor:
    return x @ params["w"]


REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "all frozen": (
        lambda: Model.of(linear().requires_grad_(False)),
        ValueError,
        "module Linear has no trainable param",
    ),
    "no parameters": (lambda: Model.of(nn.Tanh()), ValueError, "module Tanh has no trainable parameters"),
    "no params": (lambda: Model.of(f, {}), ValueError, "params= has no trainable parameters"),
    "params= of a module": (lambda: Model.of(linear(), {"w": X}), TypeError, "a module has its own parameters"),
    "inputs first": (lambda: Model.of(cast(Any, X)), TypeError, "not a Tensor: give the model first, then the inputs"),
    "function without params=": (lambda: Model.of(f), TypeError, r"f\(params, x\) needs params="),
    "mixed dtypes": (lambda: Model.of(mixed()), ValueError, "mixes dtypes: 0.weight is torch.float32 and 1.weight is"),
    "mixed devices": (lambda: Model.of(f, {"w": X, "m": X.to("meta")}), ValueError, "mixes devices: w is cpu and m is"),
    "not a tensor": (lambda: Model.of(f, cast(Any, {"w": [1.0]})), TypeError, "params=: parameter w must be a real"),
    "integer parameter": (lambda: Model.of(f, {"w": torch.ones(2).long()}), TypeError, "parameter w must be a real"),
    "empty batch": (lambda: Model.of(linear())(None, X[:0]), ValueError, "the batch is empty"),
    "one number": (returning(torch.sum), ValueError, "returned one number: outputs need the examples on their first"),
    "integers": (returning(lambda y: y.long()), TypeError, "the outputs are torch.int64: a metric needs real"),
    "complex": (returning(lambda y: y.to(torch.complex128)), TypeError, "the outputs are torch.complex128"),
    "a dict": (returning(lambda y: {"y": y}), TypeError, "the model returned a dict: pass output="),
    "a tuple": (returning(lambda y: (y, y)), TypeError, "the model returned a tuple: pass output="),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_no_model_is_refused_with_the_reason(name: str) -> None:
    attempt, error, match = REFUSED[name]
    with pytest.raises(error, match=match):
        attempt()


@every_case
def test_a_model_is_its_function_at_its_parameters(case: zoo.Case) -> None:
    problem = case.make()
    model = Model.of(problem.model, problem.params, problem.output)
    assert Model.of(model) is model
    assert model.size == sum(p.numel() for p in problem.parameters().values())
    assert model.example is next(iter(problem.parameters().values()))
    for params in (None, model.params):
        torch.testing.assert_close(model(params, problem.x), problem.outputs(), rtol=1e-12, atol=1e-12)


def test_a_linearisation_is_a_snapshot() -> None:
    module, v = linear(), {"weight": torch.ones(2, 2), "bias": torch.ones(2)}
    at = linearise(Model.of(module), X)
    before = at.push(v)
    with torch.no_grad():
        for p in module.parameters():
            p.zero_()
    torch.testing.assert_close(at.push(v), before)
    assert all(p.grad is None for p in module.parameters())


def test_inputs_are_one_tensor_or_positional_or_keyword_arguments() -> None:
    call = Arguments((X,), {"mask": X})
    assert arguments(X) == ((X,), {})
    assert arguments((X, X)) == ((X, X), {})
    assert arguments({"x": X}) == ((), {"x": X})
    assert arguments(None) == ((), {})
    assert arguments(call) == ((X,), {"mask": X})
    assert len(tensors_of(("a string", [X, {"b": X}], 3))) == 2
    assert len(tensors_of(call)) == 2
    doubled = map_tensors({"a": (X, [X]), "flag": True}, lambda t: 2 * t)
    assert doubled["flag"] is True
    torch.testing.assert_close(doubled["a"][1][0], 2 * X)
    assert map_tensors(call, torch.numel) == Arguments((6,), {"mask": 6})


def test_a_module_takes_keyword_inputs() -> None:
    module = linear()
    torch.testing.assert_close(Model.of(module)(None, {"input": X}), module(X))


# Evaluation mode and modules that couple examples


def test_evaluating_restores_every_mode_also_after_an_exception() -> None:
    dropout = nn.Dropout()
    inner = nn.Sequential(nn.BatchNorm1d(2), dropout).eval()
    net = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), inner)
    dropout.train()
    modes = [m.training for m in net.modules()]

    def fail() -> None:
        with ng.evaluating(net):
            assert not any(m.training for m in net.modules())
            raise KeyError("inside")

    with pytest.raises(KeyError, match="inside"):
        fail()
    assert [m.training for m in net.modules()] == modes
    with ng.evaluating(net):
        assert not any(m.training for m in net.modules())
    assert [m.training for m in net.modules()] == modes


COUPLING: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (lambda: nn.BatchNorm1d(2), r"1 \(BatchNorm1d\)"),
    "batch norm 2d": (lambda: nn.BatchNorm2d(2), r"1 \(BatchNorm2d\)"),
    "dropout": (lambda: nn.Dropout(0.1), r"1 \(Dropout\)"),
    "dropout 2d": (lambda: nn.Dropout2d(0.1), r"1 \(Dropout2d\)"),
    "alpha dropout": (lambda: nn.AlphaDropout(0.1), r"1 \(AlphaDropout\)"),
    "lstm": (lambda: nn.LSTM(2, 2, num_layers=2, dropout=0.1), r"1 \(LSTM\)"),
    "gru, dropout an integer": (lambda: nn.GRU(2, 2, num_layers=2, dropout=1), r"1 \(GRU\)"),
    "attention": (lambda: nn.MultiheadAttention(2, 1, dropout=0.1), r"1 \(MultiheadAttention\)"),
    "random relu": (lambda: nn.RReLU(), r"1 \(RReLU\)"),
}
SEPARABLE: dict[str, Callable[[], nn.Module]] = {
    "instance norm": lambda: nn.InstanceNorm1d(2, affine=True),
    "instance norm with averages": lambda: nn.InstanceNorm2d(2, track_running_stats=True),
    "no dropout": lambda: nn.Dropout(0.0),
    "layer norm": lambda: nn.LayerNorm(2),
    "group norm": lambda: nn.GroupNorm(1, 2),
    "lstm": lambda: nn.LSTM(2, 2),
    "attention": lambda: nn.MultiheadAttention(2, 1),
    "leaky relu": lambda: nn.RReLU(0.2, 0.2),
}


@pytest.mark.parametrize("name", COUPLING)
def test_modules_that_couple_examples_are_named_in_training_mode_and_fine_in_evaluation_mode(name: str) -> None:
    make, match = COUPLING[name]
    net = nn.Sequential(nn.Linear(2, 2), make())
    with pytest.raises(BatchStatisticsError, match=match + r": in training mode .* model\.eval\(\)"):
        Model.of(net).check_separable()
    with ng.evaluating(net):
        Model.of(net).check_separable()


def test_all_coupling_modules_are_named_at_once() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2), nn.Dropout())
    with pytest.raises(BatchStatisticsError, match=r"0 \(BatchNorm1d\), 2 \(Dropout\)"):
        Model.of(net).check_separable()
    with pytest.raises(BatchStatisticsError, match=r"the model \(BatchNorm1d\)"):
        Model.of(nn.BatchNorm1d(2)).check_separable()


@pytest.mark.parametrize("name", SEPARABLE)
def test_modules_that_keep_examples_apart_are_accepted_in_training_mode(name: str) -> None:
    Model.of(nn.Sequential(nn.Linear(2, 2), SEPARABLE[name]()).train()).check_separable()


def test_batch_norm_without_running_averages_couples_examples_in_evaluation_mode_too() -> None:
    net = nn.Sequential(nn.BatchNorm1d(2, track_running_stats=False)).eval()
    with pytest.raises(BatchStatisticsError, match=r"0 \(BatchNorm1d\)"):
        Model.of(net).check_separable()


def test_a_pure_function_is_taken_to_be_separable() -> None:
    Model.of(f, {"w": torch.eye(2)}).check_separable()
