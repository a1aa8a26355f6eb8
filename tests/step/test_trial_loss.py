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
    close(opt.source.batch_queries.curvature([v], 0.5), (flat @ J.T @ J @ flat / 6).view(1, 1), 1e-9)


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
        found = opt.source.batch_queries.curvature([vector], 0.25)
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


ASKS: dict[str, ng.step.StepRule] = {
    "divergence": ng.TrustRegion(0.3, ng.Backtracking(shrink=0.8, tries=60)),
    "exact products": ng.SelfTuned(fraction=1.0),
    "acceleration": ng.GeodesicCorrected(),
}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("rule", ASKS)
def test_a_rule_sees_the_joint_batch_of_accumulated_passes(rule: str, every: int) -> None:
    """Micro-batches of different sizes and of very different inputs, the last one the smallest."""
    x, t = normal(21, 4) * torch.linspace(3.0, 0.05, 21)[:, None], torch.arange(21) % 3

    def trained(sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double())
        structure = ng.Refresh(ng.Dense(), every=every)
        opt = ng.NaturalGradient(
            model, ng.Fisher(ng.Categorical()), structure=structure, step=ASKS[rule], lr=0.5, damping=1e-3
        )

        def closure() -> Tensor:
            opt.zero_grad()
            total = torch.zeros((), dtype=torch.float64)
            for a, b in zip(x.split(sizes), t.split(sizes), strict=True):
                loss = F.cross_entropy(model(a), b, reduction="sum") / len(x)
                loss.backward()
                total += loss.detach()
            return total

        for _ in range(3):
            opt.step(closure)
        v = ng.Vector({name: torch.ones_like(p) for name, p in model.named_parameters()})
        theta = torch.cat([p.detach().flatten() for p in model.parameters()])
        return theta, opt.source.batch_queries.curvature([v], 1.0)

    (joint, product), (parts, of_parts) = trained((21,)), trained((9, 10, 2))
    close(parts, joint, 1e-9)
    close(of_parts, product, 1e-9)


def test_the_divergence_of_uneven_passes_of_several_heads_is_that_of_the_joint_batch() -> None:
    class TwoHeads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.kind, self.size = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = torch.tanh(self.body(x))
            return {"kind": self.kind(h), "size": self.size(h)}

    x = normal(11, 3)
    metric = {"kind": ng.Fisher(ng.Categorical()), "size": ng.Euclidean()}

    def divergence(sizes: tuple[int, ...]) -> float:
        model = seeded(lambda: TwoHeads().double())
        opt = ng.NaturalGradient(
            model, metric, structure=ng.Kernel(), step=ng.TrustRegion(0.1, ng.Backtracking()), damping=1.0
        )
        for part in x.split(sizes):
            y = model(part)
            (y["kind"].square().sum() + y["size"].sum()).backward()
        moved = {name: 1.1 * p.detach() + 0.1 for name, p in model.named_parameters()}
        return opt.source.batch_queries.divergence(moved)

    assert divergence((8, 3)) == pytest.approx(divergence((11,)), rel=1e-12)


@pytest.mark.parametrize("every", [1, 3])
def test_a_pass_that_fails_is_not_asked_about(every: int) -> None:
    """Also in steps that do not estimate the metric."""
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 3)).double())
    opt = ng.NaturalGradient(
        model,
        ng.Fisher(ng.Categorical()),
        structure=ng.Refresh(ng.Dense(), every=every, early=False),
        step=ng.TrustRegion(0.1, ng.Backtracking()),
        damping=0.1,
    )
    for _ in range(2):
        opt.zero_grad()
        with pytest.raises(RuntimeError, match="shape"):
            model(normal(5, 7))
        F.cross_entropy(model(normal(6, 4)), torch.arange(6) % 3).backward()
        opt.step()
        assert opt.last is not None
        assert opt.last.accepted
    assert not model._forward_hooks
