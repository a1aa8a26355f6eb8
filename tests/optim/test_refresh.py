"""When the metric is estimated, and what is kept of it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import natgrad as ng
from tests import oracle
from tests.optim.tasks import Task, half_square, task


@contextmanager
def _counted(structure: type, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """How many examples each estimate saw."""
    seen: list[int] = []
    estimate = structure.estimate  # type: ignore[attr-defined]

    def counting(self: ng.structures.Structure, pb: ng.Pullback, *like: object) -> ng.operators.Operator:
        seen.append(pb.n)
        return estimate(self, pb, *like)

    with monkeypatch.context() as patch:
        patch.setattr(structure, "estimate", counting)
        yield seen


@pytest.mark.parametrize(("every", "estimates"), [(1, 7), (2, 4), (3, 3), (10, 1)])
def test_the_metric_is_estimated_only_when_due(every: int, estimates: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = task()
    opt = of.optimizer(structure=ng.Refresh(ng.Dense(), every=every), damping=0.1, lr=0.1)
    with _counted(ng.Dense, monkeypatch) as seen:
        for _ in range(7):
            of.step(opt)
    assert seen == [12] * estimates


def _by_hand(of: Task, steps: int, every: int, decay: float, lr: float, damping: float) -> Tensor:
    """θ after the steps, with Ḡ_t = Σ_s β^{t−s} G_s / Σ_s β^{t−s}, every estimate kept."""
    estimates: list[Tensor] = []
    like = oracle.parameters(of.model)
    for t in range(steps):
        if t % every == 0:
            estimates.append(of.metric())
        powers = [decay ** (len(estimates) - 1 - s) for s in range(len(estimates))]
        G = torch.stack([w * g for w, g in zip(powers, estimates, strict=True)]).sum(0) / sum(powers)
        θ = of.theta() - lr * oracle.damped(G, of.gradient(), damping)
        with torch.no_grad():
            for p, value in zip(like.values(), oracle.unflatten(θ, like).values(), strict=True):
                p.copy_(value)
    return of.theta()


@pytest.mark.parametrize(("every", "decay"), [(1, 0.0), (1, 0.9), (3, 0.0), (2, 0.5), (3, 0.95)])
def test_the_moving_average_is_corrected_for_its_start(every: int, decay: float) -> None:
    of = task("coins")
    expected = _by_hand(task("coins"), 7, every, decay, 0.4, 0.1)
    opt = of.optimizer(structure=ng.Refresh(ng.Dense(), every=every, decay=decay), lr=0.4, damping=0.1)
    for _ in range(7):
        of.step(opt)
    torch.testing.assert_close(of.theta(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel(), ng.Implicit()])
def test_micro_batches_of_unequal_size_make_the_step_of_the_joint_batch(structure: ng.structures.Structure) -> None:
    whole, parts = task("counts"), task("counts")
    solver = ng.CG(tol=1e-13, max_steps=500) if isinstance(structure, ng.Implicit) else ng.Cholesky()
    whole.step(whole.optimizer(structure=structure, solver=solver, damping=0.1))
    opt = parts.optimizer(structure=structure, solver=solver, damping=0.1)
    opt.zero_grad()
    for x, t in zip(parts.x.split([7, 1, 4]), parts.t.split([7, 1, 4]), strict=True):
        (parts.kind.loss(parts.model(x), t) * len(x) / 12).backward()
    opt.step()
    torch.testing.assert_close(parts.theta(), whole.theta(), rtol=1e-9, atol=1e-11)


class TwoWays(torch.nn.Module):
    """A weight that one pass multiplies from the right, and another from the left."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.turned = torch.nn.Linear(3, 3), torch.nn.Linear(3, 2), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x @ self.layer.weight + self.layer.bias if self.turned else self.layer(x)
        return self.head(h.tanh())


@pytest.mark.parametrize("structure", [ng.Kernel(), ng.LowRank(20)])
def test_micro_batches_that_use_a_layer_in_two_ways_have_the_step_of_the_dense_metric(
    structure: ng.structures.Structure,
) -> None:
    steps = []
    for each in (ng.Dense(), structure):
        torch.manual_seed(0)
        model = TwoWays().double()
        opt = ng.NaturalGradient(model, ng.Euclidean(), structure=each, lr=1.0, damping=0.1)
        for x in torch.randn(2, 5, 3, dtype=torch.float64):
            model(x).square().sum().backward()
            model.turned = not model.turned
        opt.step()
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(steps[1], steps[0], rtol=1e-8, atol=1e-9)


def test_the_average_over_micro_batches_starts_anew_at_every_step() -> None:
    whole, parts = task("counts"), task("counts")
    one, other = whole.optimizer(damping=0.1), parts.optimizer(damping=0.1)
    for _ in range(3):
        whole.step(one)
        other.zero_grad()
        for x, t in zip(parts.x.split([2, 10]), parts.t.split([2, 10]), strict=True):
            (parts.kind.loss(parts.model(x), t) * len(x) / 12).backward()
        other.step()
    torch.testing.assert_close(parts.theta(), whole.theta(), rtol=1e-9, atol=1e-11)


def test_evaluation_under_no_grad_does_not_touch_the_metric(monkeypatch: pytest.MonkeyPatch) -> None:
    quiet, evaluated = task(), task()
    one, other = quiet.optimizer(damping=0.1), evaluated.optimizer(damping=0.1)
    for _ in range(3):
        quiet.step(one)
        with _counted(ng.Dense, monkeypatch) as seen, torch.no_grad():
            evaluated.model(torch.full((50, 2), 3.0, dtype=torch.float64))
        evaluated.step(other)
        assert seen == []
    assert torch.equal(quiet.theta(), evaluated.theta())


def test_the_library_s_own_passes_do_not_count_as_training() -> None:
    """A pullback, a geodesic or a call at other parameters between two steps changes no step."""
    quiet, analysed = task(), task()
    one, other = quiet.optimizer(damping=0.1), analysed.optimizer(damping=0.1)
    strange = torch.full((5, 2), 3.0, dtype=torch.float64)
    for _ in range(3):
        quiet.step(one)
        ng.Dense().estimate(ng.pullback(analysed.model, strange, ng.Euclidean()))
        ng.natural_gradient(analysed.model, strange, lambda y: y.sum(), ng.Euclidean(), damping=1.0)
        moved = {name: p.detach() + 1 for name, p in analysed.model.named_parameters()}
        torch.func.functional_call(analysed.model, moved, (strange,))
        analysed.step(other)
    assert torch.equal(quiet.theta(), analysed.theta())


@pytest.mark.parametrize("samples", [None, 1])
def test_the_user_s_random_stream_is_left_alone(samples: int | None) -> None:
    of = task("classes")
    torch.default_generator.manual_seed(3)
    before = torch.get_rng_state()
    opt = of.optimizer(metric=ng.Fisher(ng.Categorical(), samples=samples), structure=ng.Diagonal())
    for _ in range(3):
        of.step(opt)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_same_generator_gives_the_same_steps_and_another_one_others() -> None:
    ends = []
    for seed in (1, 1, 2):
        of = task("classes")
        generator = torch.Generator().manual_seed(seed)
        metric = ng.Fisher(ng.Categorical(), samples=1)
        opt = of.optimizer(metric=metric, structure=ng.Diagonal(), generator=generator)
        for _ in range(3):
            of.step(opt)
        ends.append(of.theta())
    assert torch.equal(ends[0], ends[1])
    assert not torch.allclose(ends[0], ends[2])


def _cosh(y: Tensor, t: Tensor) -> Tensor:
    return torch.cosh(y - t).sum()


def _square(y: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (y - t).square().sum()


TARGETS: dict[str, tuple[ng.OutputMetric, Callable[[Tensor, Tensor], Tensor]]] = {
    "empirical": (ng.Empirical(_square), lambda y, t: oracle.empirical(y, t, _square)),
    "loss_hessian": (ng.LossHessian(_cosh), lambda y, t: oracle.loss_hessian(_cosh, y, t)),
}


@pytest.mark.parametrize("name", TARGETS)
@pytest.mark.parametrize("first", [True, False], ids=["refresh_first", "refresh_last"])
def test_a_metric_with_targets_is_estimated_by_refresh(name: str, first: bool) -> None:
    metric, h = TARGETS[name]
    of = task()
    J = oracle.module_jacobian(of.model, of.x)
    G = oracle.dense(J, h(of.model(of.x), of.t))
    expected = of.theta() - 0.3 * oracle.damped(G, of.gradient(), 0.1)
    opt = of.optimizer(metric=metric, lr=0.3, damping=0.1)
    if first:
        opt.refresh(of.x, of.t)
    of.closure(opt)()
    if not first:
        opt.refresh(of.x, of.t)
    opt.step()
    torch.testing.assert_close(of.theta(), expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("rule", [ng.TrustRegion(0.01, ng.Backtracking()), ng.GeodesicCorrected()])
def test_rules_that_look_at_the_batch_again_find_its_targets(rule: ng.step.StepRule) -> None:
    """The forward pass of the user, which has no targets, must not take the place of the batch of refresh."""
    ends = []
    for first in (True, False):
        of = task()
        opt = of.optimizer(metric=ng.LossHessian(_cosh), step=rule, damping=0.1)
        if first:
            opt.refresh(of.x, of.t)
        of.closure(opt)()
        if not first:
            opt.refresh(of.x, of.t)
        opt.step()
        ends.append(of.theta())
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[0], task().theta())


def test_a_metric_with_targets_asks_for_them() -> None:
    of = task()
    opt = of.optimizer(metric=ng.LossHessian(_cosh))
    of.closure(opt)()
    with pytest.raises(ng.errors.NatgradError, match=r"needs the targets: call opt.refresh\(x, target\) before"):
        opt.step()
    with pytest.raises(ValueError, match="LossHessian is made from the training loss and needs the targets"):
        opt.refresh(of.x)
    assert torch.equal(of.theta(), task().theta())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: ng.Refresh(ng.Dense(), every=0), "must be at least 1, got 0"),
        (lambda: ng.Refresh(ng.Dense(), decay=1.1), r"must be in \[0, 1\], got 1.1"),
        (lambda: ng.Refresh(ng.Dense(), decay=-0.1), r"must be in \[0, 1\]"),
        (lambda: ng.Refresh(ng.Kernel(), decay=0.5), "does not work with Kernel: every average would be larger"),
        (lambda: ng.Refresh(ng.Implicit(), every=2), "does not work with Implicit"),
        (lambda: ng.Refresh(ng.Dense(), inverse=0), r"Refresh\(inverse=…\) must be at least 1, got 0"),
        (lambda: ng.Refresh(ng.Dense(), inverse="new"), r"inverse=…\) must be a whole number of steps, got 'new'"),  # type: ignore[arg-type]
    ],
)
def test_impossible_schedules_are_refused(make: type, message: str) -> None:
    with pytest.raises((TypeError, ValueError, ng.errors.IncompatibleError), match=message):
        make()


def test_half_square_has_the_euclidean_metric_as_its_hessian() -> None:
    """The loss of these tests is the one whose generalised Gauss–Newton matrix is G."""
    t = torch.ones(1, 2, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda y: half_square(y, t), torch.zeros(1, 2, dtype=torch.float64))
    assert torch.equal(torch.as_tensor(hessian).view(2, 2), torch.eye(2, dtype=torch.float64))
