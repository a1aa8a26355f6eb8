"""Dropout in training mode: to the metric the masks of the pass are constants; to the user nothing has changed."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.errors import BatchStatisticsError
from natgrad.operators import KroneckerOperator
from tests import oracle, zoo
from tests.optim.tasks import seeded
from tests.pullback.test_batch_statistics import optimizer, recorded
from tests.pulled import Rooted, close, normal, opaque, rows


class Bare(nn.Module):
    """Two parameters that no rule covers; between them a batch normalisation, and dropout as a module or a function."""

    def __init__(self, norm: bool, functional: bool) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))
        self.norm = nn.BatchNorm1d(4) if norm else nn.Identity()
        self.drop, self.functional = nn.Dropout(0.4), functional

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        h = torch.tanh(self.norm(opaque(x, self.first)))
        h = F.dropout(h, 0.4, self.training) if self.functional else self.drop(h)
        return opaque(h, self.last)

    def with_constants(self, x: Tensor) -> Tensor:
        """The same, with the statistics as constants."""
        z = x @ self.first.T
        if isinstance(self.norm, nn.BatchNorm1d):
            μ, σ2 = z.detach().mean(0), z.detach().var(0, correction=0)
            z = (z - μ) / (σ2 + self.norm.eps).sqrt() * self.norm.weight + self.norm.bias
        return F.dropout(torch.tanh(z), 0.4) @ self.last.T


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


@pytest.mark.parametrize("functional", [False, True], ids=["a module", "a function"])
@pytest.mark.parametrize("norm", [False, True], ids=["dropout", "dropout and batch norm"])
def test_parameters_without_a_rule_have_the_masks_and_statistics_of_the_pass(norm: bool, functional: bool) -> None:
    model = seeded(lambda: Bare(norm, functional).double())
    x, opt, bare = normal(6, 3), optimizer(model), [model.first, model.last]
    for step in range(2):
        with _stream(step):
            model(x).square().sum().backward()
        G = cast(KroneckerOperator, opt.tracker.fresh or opt.tracker.average)  # nothing is averaged over time
        with _stream(step):
            y = model.with_constants(x)
        rows_of = [oracle.flatten(torch.autograd.grad(y_d, bare, retain_graph=True)) for y_d in y.flatten()]
        assert G.fallback is not None
        close(G.fallback.diagonal(), torch.stack(rows_of).square().sum(0) / len(x))
        opt.step()


class Behind(nn.Module):
    """A weight that is a function of its parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.randn(3, 2))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        return x @ self.last.exp()


@pytest.mark.parametrize("make", [lambda: Bare(norm=False, functional=False), Behind], ids=["opaque", "behind"])
def test_a_hook_on_a_parameter_does_not_reach_its_metric(make: Callable[[], nn.Module]) -> None:
    """Nor is it lost: the user's own backward pass calls it."""
    x, metrics = normal(6, 3), []
    for hooked in (False, True):
        model = seeded(lambda: make().double())
        last, opt = model.get_parameter("last"), optimizer(model)
        if hooked:
            last.register_hook(torch.zeros_like)
        with _stream(0):
            model(x).square().sum().backward()
        assert last.grad is not None
        assert bool(last.grad.any()) != hooked
        assert opt.tracker.fresh is not None
        metrics.append(opt.tracker.fresh.diagonal())
    assert torch.equal(*metrics)
