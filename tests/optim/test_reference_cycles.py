"""What nobody holds is freed at once, not when Python next looks for cycles.

What a step has used is as large as the metric, and an optimizer that was replaced would go on watching its model.
"""

import gc
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import natgrad as ng
from natgrad.errors import FactorisationError, NatgradError, NonFiniteError, SingularMetricError, UncoveredError
from natgrad.step import StepRule
from natgrad.structures.kronecker import ProductInverse
from tests.optim.tasks import Task, task
from tests.pulled import opaque


@pytest.fixture
def uncollected() -> Iterator[None]:
    """Cycles of references stay."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "rule", [ng.KLClip(), ng.SelfTuned(), ng.TrustRegion(0.1)], ids=lambda rule: type(rule).__name__
)
def test_a_step_leaves_no_cycle_of_references_behind(rule: StepRule) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, t = torch.randn(8, 4), torch.arange(8) % 3
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical(), samples=1), step=rule, metric_every=1, inverse_every=1)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        return loss

    opt.step(closure)
    gc.collect()
    gc.disable()
    try:
        opt.step(closure)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # torch's compiler leaves fake tensors behind, now and then, if it has run in this process.
        kinds = [type(o) for o in gc.garbage if type(o) is torch.Tensor or "natgrad" in type(o).__module__]
        left = [kind.__name__ for kind in kinds]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []


def _made(of: Task, opt: ng.NaturalGradient) -> None:
    """And not used."""


def _scheduled(of: Task, opt: ng.NaturalGradient) -> None:
    schedule = LambdaLR(opt, lambda step: 1 / (1 + step))
    of.step(opt)
    schedule.step()


def _loaded(of: Task, opt: ng.NaturalGradient) -> None:
    of.step(opt)
    opt.load_state_dict(opt.state_dict())
    of.step(opt)


def _without_a_gradient(of: Task, opt: ng.NaturalGradient) -> None:
    with pytest.raises(ValueError, match="no parameter has a gradient"):
        opt.step()


def _without_a_pass(of: Task, opt: ng.NaturalGradient) -> None:
    for p in of.model.parameters():
        p.grad = torch.ones_like(p)
    with pytest.raises(NatgradError, match="no forward pass with gradients was seen"):
        opt.step()


def _not_finite(of: Task, opt: ng.NaturalGradient) -> None:
    with pytest.raises(NonFiniteError, match="at step 0"):
        of.model(of.x * torch.nan)


def _fails(*given: object) -> None:
    raise FactorisationError("it did not converge")


def _never_factored(of: Task, opt: ng.NaturalGradient) -> None:
    for owner, what in ((type(opt.preconditioner.solver), "init"), (ng.operators.KroneckerOperator, "with_new_basis")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(owner, what, _fails)
            with pytest.raises(FactorisationError, match="it did not converge"):
                of.step(opt)


def _not_inverted_by_a_gpu(of: Task, opt: ng.NaturalGradient) -> None:
    of.step(opt)
    assert isinstance(opt.preconditioner.inverse, ProductInverse)
    opt.preconditioner.inverse.batch.failures, opt.tracker.average = [torch.ones(())], None
    with pytest.raises(SingularMetricError, match="was not positive after damping"):
        opt.step()


USES: list[Callable[[Task, ng.NaturalGradient], None]] = [
    _made,
    _scheduled,
    _loaded,
    _without_a_gradient,
    _without_a_pass,
    _not_finite,
    _never_factored,
    _not_inverted_by_a_gpu,
]


@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
@pytest.mark.usefixtures("uncollected")
def test_an_optimizer_that_nobody_holds_watches_no_more(use: Callable[[Task, ng.NaturalGradient], None]) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric)
    use(of, opt)
    itself, tracker = weakref.ref(opt), weakref.ref(opt.tracker)
    del opt
    assert itself() is None
    assert tracker() is None
    assert not of.model._forward_pre_hooks
    of.loss().backward()


class Unknown(nn.Linear):
    """A layer without a rule."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return opaque(x, self.weight) + self.bias


@pytest.mark.usefixtures("uncollected")
def test_the_optimizer_that_a_message_advises_is_the_only_one() -> None:
    """Though the error is held, and in its traceback the tracker, as an interactive session holds its last one."""
    model, x = nn.Sequential(Unknown(4, 3), nn.ReLU(), nn.Linear(3, 2)), torch.randn(8, 4)
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), strict=True)
    with pytest.raises(UncoveredError, match="strict=True") as error:
        model(x)
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), strict=False)
    model(x).sum().backward()
    opt.step()
    assert len(model._forward_pre_hooks) == 1
    assert error.value.__traceback__ is not None


_FIRST = """
import gc, weakref
import torch
import natgrad as ng

gc.disable()
def train():
    model = torch.nn.Linear(3, 2)
    opt = ng.KFAC(model, ng.Euclidean())
    model(torch.randn(4, 3)).sum().backward()
    opt.step()
    return model, weakref.ref(opt)

model, opt = train()
assert opt() is None
assert not model._forward_pre_hooks
"""


def test_the_first_optimizer_of_a_process_is_freed_as_the_others_are() -> None:
    """torch's compiler is loaded for it, which leaves a cycle behind that holds every frame that was active."""
    subprocess.run([sys.executable, "-c", _FIRST], check=True, timeout=120)
