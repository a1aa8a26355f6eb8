"""Dropout in training mode: to the metric the masks of the pass are constants; to the user nothing has changed."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from natgrad.operators import KroneckerOperator
from tests import oracle, zoo
from tests.optim.tasks import seeded
from tests.pullback.test_batch_statistics import optimizer, recorded
from tests.pulled import Rooted, close, normal, opaque, rows


class Gain(nn.Module):
    """Dropout, and a parameter that no rule covers."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else []), nn.Dropout(0.4))
        self.mix = nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """The features mixed into two outputs."""
        return opaque(torch.tanh(self.body(x)), self.mix)


def _dropped() -> zoo.Problem:
    layers = [nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 4), nn.Dropout(0.2), nn.Linear(4, 2)]
    return zoo.Case(
        "dropout", lambda: zoo.Problem(nn.Sequential(*layers), torch.randn(6, 3, dtype=torch.float64))
    ).make()


@contextmanager
def _stream(seed: int) -> Iterator[None]:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def test_rows_are_those_of_the_network_with_this_mask() -> None:
    of = _dropped()
    with _stream(3):
        y = of.module(of.x)
    s = normal(2, *y.shape)
    leaves = list(of.module.parameters())
    expected = torch.stack(
        [
            torch.stack(
                [
                    oracle.flatten(
                        torch.autograd.grad(y[n], leaves, s[k, n], retain_graph=True, materialize_grads=True)
                    )
                    for n in range(len(y))
                ]
            )
            for k in range(2)
        ]
    )
    with _stream(3):
        pb = recorded(of, Rooted(s))
    close(rows(pb), expected / len(y) ** 0.5)


def test_the_users_random_stream_is_that_of_a_pass_without_us() -> None:
    of = _dropped()
    plain, opt = copy.deepcopy(of.module), optimizer(of.module)
    drawn = []
    for net in (of.module, plain):
        with _stream(5):
            drawn.append((net(of.x).detach(), torch.rand(3)))
    assert opt.tracker.fresh is not None
    assert torch.equal(drawn[0][0], drawn[1][0])
    assert torch.equal(drawn[0][1], drawn[1][1])


def test_a_refresh_with_dropout_in_training_mode_is_refused_with_the_way_out() -> None:
    of = _dropped()
    opt = optimizer(of.module)
    with pytest.raises(BatchStatisticsError, match=r"draws random numbers.*natgrad.evaluating"):
        opt.refresh(of.x)


@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "dropout and batch norm"])
def test_parameters_without_a_rule_are_seen_in_evaluation_mode(norm: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = seeded(lambda: Gain(norm).double())
    x = normal(6, 3)
    opt = optimizer(model)
    with caplog.at_level("INFO", logger="natgrad"):
        for _ in range(2):
            model(x).square().sum().backward()
            G = cast(KroneckerOperator, opt.tracker.fresh or opt.tracker.average)  # nothing is averaged over time
            with ng.evaluating(model):
                J = oracle.module_jacobian(model, x)
            assert G.fallback is not None
            close(G.fallback.diagonal(), J[:, :, :8].square().sum((0, 1)) / len(x))  # first comes mix
            opt.step()
    told = [r.getMessage() for r in caplog.records if "no layer rule covers" in r.getMessage()]
    assert len(told) == 1
    assert "mix" in told[0]
