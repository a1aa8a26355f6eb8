"""A layer that cannot use its rule is reported once, by name, with the reason and the fix."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.pulled import normal, opaque

Forward = Callable[["Written", Tensor], Tensor]


class Written(nn.Module):
    """Two layers, and a forward pass that the test writes."""

    def __init__(self, forward: Forward) -> None:
        super().__init__()
        self.body, self.head, self.bare = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(3, 3))
        self._written = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._written(self, x)


def _concatenated(m: Written, x: Tensor) -> Tensor:
    a, b = torch.tanh(m.body(torch.cat([x, 2 * x]))).chunk(2)
    return m.head((a * b) @ m.bare)


def _gathered(m: Written, x: Tensor) -> Tensor:
    chosen = (x[:, 0] > 0).nonzero().squeeze(1)
    return m.head(torch.zeros_like(x).index_add(0, chosen, torch.tanh(m.body(x[chosen]))) @ m.bare)


def _sorted(m: Written, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.head(torch.tanh(m.body(x[order]))[order.argsort()] @ m.bare)


def _idle(m: Written, x: Tensor) -> Tensor:
    m.body(x)
    return m.head(torch.tanh(nn.functional.linear(x, m.body.weight, m.body.bias)) @ m.bare)


def _plain(m: Written, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(x)) @ m.bare)


def _second(m: Written, x: Tensor) -> Tensor:
    return m.head(torch.tanh(m.body(x.unsqueeze(0))) @ m.bare).squeeze(0)


def _centred(m: Written, x: Tensor) -> Tensor:
    z = m.body(x)
    return m.head(torch.tanh(z - z.mean(0)) @ m.bare)


def _opaque(m: Written, x: Tensor) -> Tensor:
    return m.head(opaque(torch.tanh(m.body(x)), m.bare))


def told(forward: Forward, caplog: pytest.LogCaptureFixture) -> list[str]:
    """The warnings of three steps."""
    torch.manual_seed(0)
    model = Written(forward).double()
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
    with caplog.at_level(logging.WARNING, "natgrad"):
        for seed in range(3):
            opt.zero_grad()
            model(normal(5, 3, seed=seed)).square().sum().backward()
            opt.step()
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize(
    ("forward", "names", "reason"),
    [
        (_centred, r"body\.bias, body\.weight", "the outputs of one example depend on the others"),
        (_opaque, "bare", "read by OpaqueBackward, of which natgrad knows nothing"),
    ],
)
def test_a_fallback_is_one_short_sentence_once_with_the_names_and_the_reason(
    forward: Forward, names: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    (message,) = told(forward, caplog)
    assert re.match(rf"{names} have no layer rule and are differentiated example by example, .*: .*{reason}", message)
    assert len(message) < 300


@pytest.mark.parametrize("forward", [_centred, _opaque])
def test_a_model_is_warned_of_once_however_many_pullbacks_it_has(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    model = Written(forward).double()
    for seed in range(3):
        ng.Dense().estimate(ng.pullback(model, normal(5, 3, seed=seed), ng.Euclidean()))
    ng.natural_gradient(model, normal(5, 3), lambda y: y.square().mean(), ng.Euclidean(), damping=0.1)
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1
    ng.pullback(Written(forward).double(), normal(5, 3), ng.Euclidean())  # another model
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 2


def test_the_warning_of_a_deep_model_is_short(caplog: pytest.LogCaptureFixture) -> None:
    class Centred(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(30))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                z = layer(x)
                x = torch.tanh(z - z.mean(0)) + x
            return x

    ng.pullback(Centred().double(), normal(5, 3), ng.Euclidean())
    (message,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert message.startswith("layers.0.bias, layers.0.weight, layers.1.bias and 57 more have no layer rule")
    assert len(message.split()) < 50


def _merged(m: Written, x: Tensor) -> Tensor:
    return m.head(torch.tanh(nn.functional.linear(x, m.body.weight + m.bare @ m.bare, m.body.bias)))


def test_parameters_behind_a_function_have_a_diagonal_which_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    (message,) = told(_merged, caplog)
    assert re.match(
        r"bare, body\.weight are behind a function .*a diagonal in place of Kronecker factors.*Multiply by", message
    )
    assert len(message) < 300


@pytest.mark.parametrize("strict", [False, True])
def test_weight_norm_is_logged_for_kronecker_factors_only(strict: bool, caplog: pytest.LogCaptureFixture) -> None:
    """``strict`` accepts it: the parameters have a rule, though not K-FAC's."""
    model = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).double()
    pb = ng.pullback(model, normal(5, 4), ng.Euclidean())
    ng.Diagonal().estimate(pb)
    assert not caplog.records
    for _ in range(2):
        ng.Kronecker(strict=strict).estimate(pb)
    (record,) = caplog.records
    assert "parametrizations.weight.original0, parametrizations.weight.original1 are behind" in record.getMessage()


@pytest.mark.parametrize(
    "forward", [_plain, _second, _idle, _concatenated, _gathered, _sorted], ids=lambda f: f.__name__
)
def test_nothing_is_said_of_rules_that_are_used(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    """Wherever the examples are: in time, behind one another, chosen, or sorted."""
    assert not told(forward, caplog)
