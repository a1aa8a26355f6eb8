"""Passes and steps that fail: nothing of them is left that the next ones would see."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.operators import KroneckerOperator
from tests.pulled import close, normal, opaque


class Marker:
    """Lives as long as the graph that it is in."""


class Marked(torch.autograd.Function):
    """The identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marker: Marker) -> Tensor:
        ctx.marker = marker
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None


class Net(nn.Module):
    """Three layers and a matrix of none; before the last layer it raises ``error``, if there is one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.c = nn.Linear(4, 5), nn.Linear(5, 3), nn.Linear(5, 5)
        self.p = nn.Parameter(torch.ones(3, 4))
        self.error: BaseException | None = None
        self.node: weakref.ref[Marker] | None = None
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        marker = Marker()
        self.node = weakref.ref(marker)
        h = Marked.apply(self.a(x), marker)  # type: ignore[no-untyped-call]
        h = self.c(h)
        if self.error is not None:
            raise self.error
        return self.b(torch.tanh(h)) + opaque(x, self.p).abs().sqrt()


def step(model: nn.Module, opt: ng.NaturalGradient, x: Tensor) -> None:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def fails(model: Net, x: Tensor, error: BaseException) -> None:
    model.error = error
    with pytest.raises(type(error)):
        model(x)
    model.error = None


def test_a_pass_that_raises_leaves_nothing_of_its_graph_behind() -> None:
    model, x = Net(), normal(8, 4)
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
    step(model, opt, x)
    try:
        fails(model, x, MemoryError("too large"))
    finally:
        gc.collect()
    assert model.node is not None
    assert model.node() is None


@pytest.mark.parametrize("evaluates", [False, True])
@pytest.mark.parametrize("error", [ValueError("no"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_after_a_pass_that_was_interrupted_the_run_goes_on_as_if_it_had_not_been(
    error: BaseException, evaluates: bool
) -> None:
    """No hook hears of a KeyboardInterrupt: ``zero_grad`` forgets the pass."""

    def run(error: BaseException | None) -> Tensor:
        model, x = Net(), normal(8, 4)
        opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
        for at in range(4):
            if error is not None and at % 2:
                fails(model, x, error)
                if evaluates:
                    with torch.no_grad():
                        model(x)
                    opt.zero_grad()
                    assert not any(m._forward_hooks for m in model.modules())
            step(model, opt, normal(8, 4, seed=at))
        return flat(model)

    assert torch.equal(run(error), run(None))


def test_an_estimate_that_is_refused_does_not_count_in_the_average() -> None:
    def run(bad: bool) -> dict[str, Tensor]:
        model = Net()
        opt = ng.KFAC(model, ng.Euclidean(), metric_every=1, lr=1e-9)
        for at in range(3):
            if bad and at:
                with pytest.raises(NonFiniteError, match=rf"at step {at}: the estimate of the metric of a\.weight"):
                    model(torch.full((8, 4), 1e200, dtype=torch.float64))
            step(model, opt, normal(8, 4, seed=at))
        assert opt.tracker.average is not None
        return opt.tracker.average.tensors()

    for found, expected in zip(run(True).values(), run(False).values(), strict=True):
        close(found, expected, 1e-12)


KINDS: list[Any] = [ng.Kronecker(), ng.Diagonal(), ng.EigenKronecker()]


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("structure", KINDS, ids=lambda s: type(s).__name__)
def test_a_metric_of_other_parameters_that_is_not_finite_is_refused_and_not_averaged(
    structure: Any, first: bool
) -> None:
    """√|x p| has no derivative at x = 0. An average that is infinite would never move its parameters again."""
    model, x = Net(), normal(8, 4)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Refresh(structure, decay=0.9), lr=0.1)
    if not first:
        step(model, opt, x)
    bad = x.clone()
    bad[0] = 0
    with pytest.raises(NonFiniteError, match=r"the estimate of the metric \(.*\) holds NaN or infinity, and was not"):
        model(bad)
    step(model, opt, x)
    assert opt.tracker.average is not None
    assert all(bool(t.isfinite().all()) for t in opt.tracker.average.tensors().values())


def test_after_a_step_that_failed_the_inverse_is_that_of_the_average_which_has_its_estimate() -> None:
    model, x = Net(), normal(8, 4)
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=100, inverse_every=1)
    step(model, opt, x)
    opt.refresh(normal(8, 4, seed=1))
    model.get_parameter("a.weight").grad = torch.full((5, 4), torch.nan, dtype=torch.float64)
    with pytest.raises(NonFiniteError, match=r"the gradient of a\.weight"):
        opt.step()
    step(model, opt, x)
    assert opt.tracker.average is not None
    assert opt.preconditioner.inverse is not None
    for key, t in ng.Factored().init(opt.tracker.average, opt.preconditioner.damping).tensors().items():
        close(opt.preconditioner.inverse.tensors()[key], t, 1e-12)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize(("dtype", "lr"), [(torch.float16, 1e4), (torch.float32, 1e38)])
def test_a_step_beyond_the_range_of_the_parameters_is_refused_and_changes_nothing(
    dtype: torch.dtype, lr: float, momentum: float
) -> None:
    model = nn.Linear(4, 3).to(dtype)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), lr=lr, damping=1e-3, momentum=momentum)
    before = flat(model)
    (100 * model(normal(8, 4).to(dtype)).sum()).backward()
    with pytest.raises(NonFiniteError, match=r"the step of .*bias holds NaN or infinity. Nothing was changed"):
        opt.step()
    assert torch.equal(flat(model), before)


class Recursive(nn.Module):
    """Calls itself, ``times`` times, with or without gradients."""

    def __init__(self, times: int, graph: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 4)
        self.times, self.graph = times, graph
        self.double()

    def forward(self, x: Tensor, depth: int = 0, through: bool = True) -> Tensor:
        if depth < self.times:
            with torch.set_grad_enabled(self.graph):
                x = self(x, depth + 1) if through else self.forward(x, depth + 1, through)
        return self.b(torch.tanh(self.a(x)))


@pytest.mark.parametrize("graph", [True, False])
def test_a_model_that_calls_itself_is_seen_as_one_pass(graph: bool) -> None:
    def factors(through: bool) -> dict[str, Tensor]:
        model = Recursive(2, graph)
        opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
        for at in range(2):
            opt.zero_grad()
            model(normal(8, 4, seed=at), through=through).square().mean().backward()
            opt.step()
        assert isinstance(opt.tracker.average, KroneckerOperator)
        assert opt.tracker.average.fallback is None
        return opt.tracker.average.tensors()

    expected = factors(False)
    for key, t in factors(True).items():
        close(t, expected[key], 1e-12)
