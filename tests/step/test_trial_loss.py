"""The loss where a step would land, and exact products, with batch statistics and dropout."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import close, normal


class _Normalised(nn.Module):
    """A batch normalisation and dropout before a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.drop, self.head = nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 4] to [n 3]."""
        return self.head(self.drop(self.norm(x)))


def test_a_trial_leaves_buffers_and_the_random_stream_alone() -> None:
    torch.manual_seed(0)
    model, x, t = _Normalised(), torch.randn(16, 4), torch.arange(16) % 3
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), step=ng.SelfTuned(every=1))
    seen: list[Tensor] = []

    def closure() -> Tensor:
        opt.zero_grad()
        before = torch.get_rng_state()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        seen.append(before)
        return loss

    opt.step(closure)
    assert len(seen) > 1
    assert all(torch.equal(state, seen[0]) for state in seen)  # the same masks in every trial
    assert model.norm.num_batches_tracked is not None
    assert int(model.norm.num_batches_tracked) == 1
    assert not torch.equal(torch.get_rng_state(), seen[0])


def test_exact_products_are_those_of_the_function_that_is_trained() -> None:
    """Statistics of the batch move with the parameters: the outputs of one example depend on the others."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    x = normal(6, 3)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), damping=0.1)
    model(x).square().sum().backward()
    params = dict(model.named_parameters())
    J = torch.cat(
        [
            j.reshape(12, -1)
            for j in torch.autograd.functional.jacobian(
                lambda *θ: torch.func.functional_call(model, dict(zip(params, θ, strict=True)), x).flatten(),
                tuple(p.detach() for p in params.values()),
            )
        ],
        dim=1,
    )
    v = ng.Vector({name: normal(*p.shape, seed=3) for name, p in params.items()})
    flat = v.flatten()
    close(opt.tracker.batch_queries.curvature([v], 0.5), (flat @ J.T @ J @ flat / 6).view(1, 1), 1e-9)


class _Random(nn.Module):
    """A layer, something random, and another layer."""

    def __init__(self, draw: Callable[[Tensor, bool], Tensor]) -> None:
        super().__init__()
        self.body, self.draw, self.head = nn.Linear(3, 4), draw, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n 2]."""
        return self.head(self.draw(torch.tanh(self.body(x)), self.training)).mean(1)


def _attention(h: Tensor, training: bool) -> Tensor:
    return F.scaled_dot_product_attention(h, h, h, dropout_p=0.3 if training else 0.0)


DRAWS: dict[str, Callable[[Tensor, bool], Tensor]] = {
    "a function": lambda h, training: F.dropout(h, 0.4, training),
    "attention": _attention,
    "noise": lambda h, _: h * (1 + torch.randn_like(h)),  # in evaluation mode, too
    "own stream": lambda h, training: h * torch.bernoulli(torch.full_like(h, 0.6)) if training else h,
}


@pytest.mark.parametrize("kind", DRAWS)
def test_exact_products_have_the_masks_of_the_pass(kind: str) -> None:
    model, x = seeded(lambda: _Random(DRAWS[kind]).double()), normal(6, 5, 3)
    opt = ng.KFAC(model, ng.Euclidean(), step=ng.SelfTuned())
    state: list[Tensor] = []

    def closure() -> Tensor:
        opt.zero_grad()
        torch.rand(3)  # the closure draws, too, before the model does
        state.append(torch.get_rng_state())
        loss = model(x).square().mean()
        loss.backward()
        return loss

    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        for _ in range(2):
            opt.step(closure)
        torch.set_rng_state(state[-1])
        model(x)
        params, v = dict(model.named_parameters()), normal(sum(p.numel() for p in model.parameters()))
        vector = ng.Vector(oracle.unflatten(v, params))
        found = opt.tracker.batch_queries.curvature([vector], 0.25)
        torch.set_rng_state(state[-1])
        y = model(x)
    J = torch.stack(
        [oracle.flatten(torch.autograd.grad(y_d, list(params.values()), retain_graph=True)) for y_d in y.flatten()]
    )
    close(found, ((J @ v).square().sum() / 6).view(1, 1), 1e-9)


@pytest.mark.parametrize(
    "rule", [ng.SelfTuned(), ng.TrustRegion(0.01), ng.GeodesicCorrected()], ids=lambda r: type(r).__name__
)
@pytest.mark.parametrize("kind", [kind for kind in DRAWS if kind != "attention"])
def test_rules_train_a_model_that_draws_random_numbers(kind: str, rule: ng.step.StepRule) -> None:
    model, x = seeded(lambda: _Random(DRAWS[kind]).double()), normal(6, 5, 3)
    opt = ng.KFAC(model, ng.Euclidean(), step=rule, damping=1.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) - 1).square().mean()
        loss.backward()
        return loss

    losses = seeded(lambda: [float(opt.step(closure)) for _ in range(10)])
    assert losses[-1] < 0.9 * losses[0]
