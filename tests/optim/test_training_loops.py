"""K-FAC in the user's loop: clipping, schedules, accumulation, mixed precision, and what goes wrong."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LambdaLR, LRScheduler, OneCycleLR

import natgrad as ng
from natgrad.errors import NatgradError, SingularMetricError
from tests import kronecker_oracle, oracle
from tests.optim.tasks import half_square, seeded, silent
from tests.zoo import mlp

EUCLIDEAN, FISHER = ng.Euclidean(), ng.Fisher(ng.Categorical())
PRESETS = {"kfac": ng.KFAC, "ekfac": ng.EKFAC}
Preset = Callable[..., ng.NaturalGradient]


def _data(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    return seeded(lambda: (torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)), seed)


def _model(seed: int = 0) -> nn.Module:
    return seeded(lambda: mlp(3, 4, 2).double(), seed)


def _theta(model: nn.Module) -> Tensor:
    return oracle.flatten(model.parameters())


def _direction(model: nn.Module, x: Tensor, damping: float, ω: Tensor) -> Tensor:
    """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹ ω, layer by layer, from the textbook's factors of the Euclidean metric."""
    s = torch.eye(2, dtype=x.dtype)[:, None].expand(2, len(x), 2)
    v = torch.empty_like(ω)
    with silent(model):
        found = kronecker_oracle.layers(model, x, s)
    for layer in found:
        S, A = layer.factors("expand")
        π = (A.trace() / len(A) / (S.trace() / len(S))).sqrt()
        left = S + damping**0.5 / π * torch.eye(len(S), dtype=S.dtype)
        right = A + damping**0.5 * π * torch.eye(len(A), dtype=A.dtype)
        v[layer.index] = torch.linalg.solve(left, torch.linalg.solve(right, ω[layer.index].T).T)
    return v


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], LRScheduler]] = {
    "lambda": lambda opt: LambdaLR(opt, lambda step: 0.7**step),
    "cosine": lambda opt: CosineAnnealingLR(opt, 6),
    "one_cycle": lambda opt: OneCycleLR(opt, max_lr=0.5, total_steps=6),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_clipped_and_scheduled_steps_are_those_of_the_textbook(name: str) -> None:
    """θ ← (1 − lr·wd)θ − lr·m, m ← μm + (S + √λ/π)⁻¹ ∇ (A + π√λ)⁻¹ with the gradient clipped, and lr and μ moving."""
    x, t = _data()
    model, hand = _model(), _model()
    options: dict[str, Any] = {"metric_every": 1, "inverse_every": 1, "decay": 0.0, "step": ng.Fixed()}
    opt = ng.KFAC(model, EUCLIDEAN, lr=0.2, damping=0.1, weight_decay=0.1, **options)
    schedule = SCHEDULES[name](opt)
    m, seen = torch.zeros(26, dtype=torch.float64), set()
    for _ in range(5):
        lr, μ = opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]
        seen.add((lr, μ))
        ω = oracle.differential(hand, half_square(hand(x), t))
        m = μ * m + _direction(hand, x, 0.1, ω * min(1.0, 0.3 / (float(ω.norm()) + 1e-6)))
        like = oracle.parameters(hand)
        θ = oracle.unflatten((1 - lr * 0.1) * _theta(hand) - lr * m, like)
        with torch.no_grad():
            for key, p in like.items():
                p.copy_(θ[key])
        opt.zero_grad()
        half_square(model(x), t).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        opt.step()
        schedule.step()
    assert len(seen) == 5
    torch.testing.assert_close(_theta(model), _theta(hand), rtol=1e-9, atol=1e-11)


def _accumulated(make: Preset, sizes: tuple[int, ...], start: int) -> list[nn.Module]:
    """Two runs of seven steps, one of them from micro-batches from the step ``start`` on."""
    x, t = _data()
    models = [_model(), _model()]
    opts = [make(model, EUCLIDEAN, metric_every=2, inverse_every=3, lr=0.3) for model in models]
    for step in range(7):
        for opt, model, parts in zip(opts, models, (sizes if step >= start else (12,), (12,)), strict=True):
            opt.zero_grad()
            for xs, ts in zip(x.split(list(parts)), t.split(list(parts)), strict=True):
                (half_square(model(xs), ts) * len(xs) / len(x)).backward()
            opt.step()
    return models


@pytest.mark.parametrize("sizes", [(5, 7), (1, 4, 7)])
def test_micro_batches_of_unequal_size_make_the_steps_of_the_joint_batch(sizes: tuple[int, ...]) -> None:
    torch.testing.assert_close(*map(_theta, _accumulated(ng.KFAC, sizes, start=0)), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("sizes", [(5, 7), (1, 4, 7)])
def test_ekfac_makes_the_steps_of_the_joint_batch_where_the_first_step_has_had_one(sizes: tuple[int, ...]) -> None:
    """The first step chooses the first basis, the factors of all micro-batches those that follow."""
    torch.testing.assert_close(*map(_theta, _accumulated(ng.EKFAC, sizes, start=1)), rtol=1e-9, atol=1e-11)


def test_ekfac_measures_its_first_micro_batches_in_the_basis_of_the_first_one() -> None:
    """S, A and the trace of D are those of the joint batch. D is not: it was carried from there to their basis."""
    x, t = _data()
    found = []
    for sizes in ([5, 7], [12]):
        model = _model()
        opt = ng.EKFAC(model, EUCLIDEAN)
        for xs, ts in zip(x.split(sizes), t.split(sizes), strict=True):
            (half_square(model(xs), ts) * len(xs) / len(x)).backward()
        opt.step()
        assert opt.tracker.average is not None
        found.append(opt.tracker.average.tensors())
    for key, joint in found[1].items():
        if key[-1] in "SA":
            torch.testing.assert_close(found[0][key], joint)
        if key[-1] == "D":
            torch.testing.assert_close(found[0][key].sum(), joint.sum())
    assert any(not torch.allclose(found[0][key], joint) for key, joint in found[1].items() if key[-1] == "D")


def test_ekfac_that_is_shown_the_joint_batch_before_makes_its_first_step_from_micro_batches() -> None:
    (x, t), model, joint = _data(), _model(), _model()
    opt, other = ng.EKFAC(model, EUCLIDEAN), ng.EKFAC(joint, EUCLIDEAN)
    opt.refresh(x)
    for xs, ts in zip(x.split([5, 7]), t.split([5, 7]), strict=True):
        (half_square(model(xs), ts) * len(xs) / len(x)).backward()
    opt.step()
    half_square(joint(x), t).backward()
    other.step()
    torch.testing.assert_close(_theta(model), _theta(joint), rtol=1e-9, atol=1e-11)


def test_factors_under_autocast_are_products_in_single_precision() -> None:
    """A and S from inputs and cotangents in bfloat16, whose products have not been rounded."""
    model, (x, _) = _model().float(), _data(64)  # 1/√64 is a number of bfloat16
    opt = ng.KFAC(model, EUCLIDEAN)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.float())
    assert opt.tracker.fresh is not None
    found = opt.tracker.fresh.tensors()
    with silent(model), torch.autocast("cpu", torch.bfloat16):
        z = model[0](x.float())  # type: ignore[index]
        h = torch.tanh(z)
        y = model[2](h)  # type: ignore[index]
    g = [torch.autograd.grad(y, z, s.expand_as(y), retain_graph=True)[0] for s in torch.eye(2, dtype=torch.bfloat16)]
    assert h.dtype == g[0].dtype == torch.bfloat16
    a, g1 = F.pad(h.double(), (0, 1), value=1.0), torch.stack(g).double().flatten(0, 1)
    for got, expected in ((found["2.weight/A"][0], a.T @ a / 64), (found["0.weight/S"][0], g1.T @ g1 / 64)):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-7)  # rounded products are 4e-3 apart


class Deep(nn.Module):
    """Two small factors on the way: cotangents below what float16 can tell from zero."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        h = torch.tanh(self.b(torch.tanh(self.a(x)) * 2**-10))
        return self.c(h * 2**-10)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.Diagonal()])
def test_cotangents_in_float16_do_not_underflow(structure: ng.structures.Structure) -> None:
    x = _data(1024)[0].float()
    model = seeded(Deep)
    opt = ng.NaturalGradient(model, EUCLIDEAN, structure=structure)
    exact = structure.estimate(ng.pullback(model, x, EUCLIDEAN)).diagonal()
    with torch.autocast("cpu", torch.float16):
        model(x)
    assert opt.tracker.fresh is not None
    sizes = [16, 20, 10]  # of the layers
    for got, expected in zip(opt.tracker.fresh.diagonal().split(sizes), exact.split(sizes), strict=True):
        assert 0 < expected.sum() < 10
        torch.testing.assert_close(got.sum(), expected.sum(), rtol=1e-2, atol=0.0)


def _scaled(scale: float, clip: bool = False) -> tuple[ng.NaturalGradient, nn.Module, torch.amp.GradScaler]:
    """Three steps in float16 with a scaler of this scale."""
    x, t = (v.float() for v in _data(32))
    model = _model().float()
    opt = ng.KFAC(model, EUCLIDEAN, lr=0.1, damping=0.1, metric_every=1, inverse_every=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(3):
        opt.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = half_square(model(x).float(), t)
        scaler.scale(loss).backward()
        if clip:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()
    return opt, model, scaler


@pytest.mark.parametrize("clip", [False, True])
def test_steps_do_not_depend_on_the_scale_of_the_loss(clip: bool) -> None:
    (opt, model, _), (other, twin, _) = _scaled(1.0, clip), _scaled(2.0**10, clip)
    assert opt.tracker.step == other.tracker.step == 3
    torch.testing.assert_close(_theta(model), _theta(twin), rtol=2e-3, atol=2e-3)
    assert (_theta(model) - _theta(_model()).float()).norm() > 1e-2


def test_a_step_that_the_scaler_skips_leaves_its_estimate_to_the_next_one() -> None:
    """The parameters have not moved: the metric of the next step is the mean over both batches."""
    (x, t), (x2, t2) = _data(8), _data(16, seed=1)
    model = _model()
    opt = ng.NaturalGradient(model, EUCLIDEAN, structure=ng.Refresh(ng.Kronecker(), decay=0.9), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    before = _theta(model)
    (scaler.scale(half_square(model(x), t)) * torch.inf).backward()
    scaler.step(opt)
    scaler.update()
    assert torch.equal(_theta(model), before)
    assert opt.tracker.step == 0
    opt.zero_grad()
    scaler.scale(half_square(model(x2), t2)).backward()
    with silent(model):
        joint = ng.Kronecker().estimate(ng.pullback(model, torch.cat([x, x2]), EUCLIDEAN))
    scaler.step(opt)
    assert opt.tracker.step == opt.tracker.weight.total == 1
    assert opt.tracker.fresh is None
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.dense(), joint.dense())


@pytest.mark.parametrize("preset", PRESETS.values(), ids=PRESETS)
@pytest.mark.parametrize("partly", [False, True])
def test_a_discriminator_is_frozen_while_its_generator_steps(preset: Preset, partly: bool) -> None:
    """Its own steps are those of a loop in which the generator's passes never were."""
    x, _ = _data()

    def run(generating: bool) -> Tensor:
        maker, judge = seeded(lambda: mlp(4, 4, 3).double()), seeded(lambda: mlp(3, 4, 1).double())
        opt = preset(judge, ng.Fisher(ng.Bernoulli()), metric_every=2)
        frozen = list(judge.parameters())[: 2 if partly else None]
        z = seeded(lambda: torch.randn(6, 4, dtype=torch.float64), seed=9)
        for _ in range(4):
            if generating:
                for p in frozen:
                    p.requires_grad_(False)
                F.softplus(-judge(maker(z))).mean().backward()
                for p in frozen:
                    p.requires_grad_(True)
            opt.zero_grad()
            (F.softplus(-judge(x)).mean() + F.softplus(judge(maker(z).detach())).mean()).backward()
            opt.step()
        return _theta(judge)

    assert torch.equal(run(True), run(False))


def test_parameters_that_are_still_frozen_in_their_own_step_are_refused_there() -> None:
    model, (x, t) = _model(), _data()
    opt = ng.KFAC(model, EUCLIDEAN)
    model[0].weight.requires_grad_(False)  # type: ignore[index]
    half_square(model(x), t).backward()
    with pytest.raises(NatgradError, match=r"0\.weight was trainable .* and is frozen now"):
        opt.step()


@pytest.mark.parametrize("steps", [0, 1])
def test_a_module_that_was_replaced_is_refused_by_name(steps: int) -> None:
    model, (x, t) = _model(), _data()
    opt = ng.KFAC(model, EUCLIDEAN)
    for _ in range(steps):
        half_square(model(x), t).backward()
        opt.step()
    before = opt.tracker.step
    model[2] = nn.Linear(4, 2).double()  # type: ignore[operator]
    opt.zero_grad()
    half_square(model(x), t).backward()
    with pytest.raises(NatgradError, match=r"no longer has 2.weight, 2.bias, .* Make a new optimizer"):
        opt.step()
    assert opt.tracker.step == before


def test_a_model_whose_hooks_were_removed_is_refused() -> None:
    model, (x, t) = _model(), _data()
    opt = ng.KFAC(model, EUCLIDEAN)
    model._forward_pre_hooks.clear()
    half_square(model(x), t).backward()
    with pytest.raises(NatgradError, match="the metric is due, and no forward pass with gradients was seen"):
        opt.step()


def test_a_batch_too_small_for_a_factor_is_singular_by_name_and_fine_with_damping() -> None:
    """Two examples have an A of rank 2, and it is 4 × 4."""
    model, (x, t) = _model(), _data(2)
    opt = ng.KFAC(model, EUCLIDEAN, damping=0.0)
    half_square(model(x), t).backward()
    with pytest.raises(SingularMetricError, match=r"the factor [AS] of 0.weight \+ 0.bias is singular"):
        opt.step()
    opt.param_groups[0]["damping"] = 1e-3
    opt.zero_grad()
    half_square(model(x), t).backward()
    opt.step()
    assert bool(_theta(model).isfinite().all())
