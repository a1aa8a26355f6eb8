"""Models whose examples mix in training mode: the loss in training mode, the metric in evaluation mode."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from tests import oracle
from tests.optim.tasks import half_square, seeded, silent, task

X = seeded(lambda: torch.randn(24, 3, dtype=torch.float64))


def _model() -> nn.Sequential:
    return seeded(
        lambda: nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Dropout(0.2), nn.Linear(5, 2)).double()
    )


def _forward(model: nn.Module, seed: int) -> Tensor:
    """The same masks for the same seed."""
    return seeded(lambda: half_square(model(X), X[:, :2].sin()), seed)


def test_batch_norm_and_dropout_train_in_training_mode_with_the_metric_of_evaluation_mode() -> None:
    model, λ = _model(), 0.1
    opt = ng.NaturalGradient(model, ng.Euclidean(), lr=0.1, damping=λ)
    losses = []
    for t in range(60):
        θ = oracle.flatten(model.parameters())
        with ng.evaluating(model), silent(model):
            G = oracle.dense(oracle.module_jacobian(model, X), oracle.euclidean(model(X)))
        with ng.evaluating(model):
            opt.refresh(X)
        assert model.training
        opt.zero_grad()
        loss = _forward(model, t)
        loss.backward()
        ω = oracle.flatten(p.grad for p in model.parameters() if p.grad is not None)
        opt.step()
        expected = θ - 0.1 * oracle.damped(G, ω, λ)
        torch.testing.assert_close(oracle.flatten(model.parameters()), expected, rtol=0, atol=1e-10)
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert int(model.get_buffer("1.num_batches_tracked")) == 60  # once a step: our passes leave the statistics alone


@pytest.mark.parametrize(
    "rule", [ng.TrustRegion(1e-3, ng.Backtracking()), ng.GeodesicCorrected()], ids=["trust_region", "geodesic"]
)
def test_rules_that_look_at_the_batch_again_do_so_in_evaluation_mode(rule: ng.step.StepRule) -> None:
    model = _model()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=rule, damping=0.1, lr=0.1)
    for t in range(3):
        with ng.evaluating(model):
            opt.refresh(X)
        opt.zero_grad()
        _forward(model, t).backward()
        with ng.evaluating(model), torch.no_grad():
            before = model(X)
        opt.step()
        with ng.evaluating(model), torch.no_grad():
            moved = float(0.5 * (model(X) - before).square().sum(1).mean())
        assert opt.last is not None
        assert opt.last.accepted
        if isinstance(rule, ng.TrustRegion):
            assert 0 < moved <= rule.radius
    assert model.training
    assert int(model.get_buffer("1.num_batches_tracked")) == 3


def test_a_refresh_is_for_one_step_and_the_next_training_pass_asks_for_another() -> None:
    model = _model()
    opt = ng.NaturalGradient(model, ng.Euclidean())
    with ng.evaluating(model):
        opt.refresh(X)
    _forward(model, 0).backward()
    opt.step()
    with pytest.raises(BatchStatisticsError, match=r"BatchNorm1d.*natgrad.evaluating"):
        model(X)


def test_the_metric_of_a_refresh_is_not_averaged_with_that_of_the_forward_pass() -> None:
    of, twin = task(n=12), task(n=12)
    opt, other = of.optimizer(damping=0.1), twin.optimizer(damping=0.1)
    for p, q in zip(of.model.parameters(), twin.model.parameters(), strict=True):
        p.grad, q.grad = torch.ones_like(p), torch.ones_like(q)
    opt.refresh(of.x[:5])
    of.model(of.x)
    opt.step()
    other.refresh(twin.x[:5])
    other.step()
    assert torch.equal(of.theta(), twin.theta())


class _Bare(nn.Module):
    """A parameter that no rule covers, so that an estimate makes forward passes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.mix, self.head = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        return self.head(torch.tanh(self.first(x) @ self.mix))


def test_two_optimizers_of_one_model_do_not_see_each_others_passes() -> None:
    models = [seeded(lambda: _Bare().double()) for _ in range(2)]
    x = torch.randn(8, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pair = [ng.KFAC(models[0], ng.Euclidean(), metric_every=1), ng.EKFAC(models[0], ng.Euclidean(), metric_every=1)]
    alone = ng.KFAC(models[1], ng.Euclidean(), metric_every=1)
    for _ in range(3):
        for model, opt in ((models[0], pair[0]), (models[1], alone)):
            model.zero_grad()
            model(x).square().sum().backward()
            opt.step()
        pair[1].tracker.discard()
    for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q)
