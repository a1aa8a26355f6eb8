"""What is said of layers whose rule cannot be used: once, by name, and with what can be done."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.pulled import normal

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


def told(forward: Forward, caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """The levels and messages about rules in three steps."""
    torch.manual_seed(0)
    model = Written(forward).double()
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
    with caplog.at_level(logging.INFO, "natgrad"):
        for seed in range(3):
            opt.zero_grad()
            model(normal(5, 3, seed=seed)).square().sum().backward()
            opt.step()
    return [(record.levelno, record.getMessage()) for record in caplog.records if "rules of" in record.getMessage()]


@pytest.mark.parametrize("forward", [_concatenated, _gathered, _sorted], ids=lambda f: f.__name__)
def test_examples_that_are_elsewhere_are_a_warning_with_the_names_and_the_way_out(
    forward: Forward, caplog: pytest.LogCaptureFixture
) -> None:
    ((level, message),) = told(forward, caplog)
    assert level == logging.WARNING
    assert re.match(
        r"the layer rules of body\.bias, body\.weight are not used, and the model is run example by example .*, which "
        r"is slow: .* an index, a sort or a concatenation of examples\. The outputs of the model have them on "
        r"their first axis, linear layers, .* and embeddings on any, .*: put them there before these layers, and back "
        r"behind them\. "
        r"strict=True refuses such layers, and opt\.plan\(\) lists them after the first pass",
        message,
    )


def test_a_layer_that_is_called_in_vain_is_no_warning(caplog: pytest.LogCaptureFixture) -> None:
    ((level, message),) = told(_idle, caplog)
    assert level == logging.INFO
    assert re.match(
        r"the layer rules of body\.bias, body\.weight are not used: a layer was called, and the outputs of the model "
        r"do not depend on its own",
        message,
    )


@pytest.mark.parametrize("forward", [_plain, _second], ids=lambda f: f.__name__)
def test_nothing_is_said_of_rules_that_are_used(forward: Forward, caplog: pytest.LogCaptureFixture) -> None:
    assert not told(forward, caplog)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
