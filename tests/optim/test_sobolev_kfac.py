"""Sobolev K-FAC: K-FAC itself where the kernel is 1, and what a kernel of the inputs makes of it elsewhere.

That two processes take the steps of one that accumulates their batches is in ``test_distributed``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.functionspace import Alike, Median, SobolevKernel
from tests import oracle
from tests.optim.tasks import half_square, resumes, seeded
from tests.pulled import normal
from tests.zoo import mlp

EXACT, SAMPLED = ng.Fisher(ng.Categorical()), ng.Fisher(ng.Categorical(), samples=2)
SCHEDULE: dict[str, Any] = {"lr": 0.1, "damping": 0.05, "metric_every": 2, "inverse_every": 2}
SMALL = 1e-3  # a lengthscale beside which all distances are large: e^{−1000} is zero
Make = Callable[..., ng.NaturalGradient]


@final
class Net(nn.Module):
    """Convolutions with groups, strides and a normalisation, then a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4)
        self.second, self.last = nn.Conv2d(4, 4, 2, stride=2, groups=2), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2 4 4] to [n 3]."""
        return self.last(torch.tanh(self.second(torch.tanh(self.norm(self.first(x))))).flatten(1))


def perceptron() -> nn.Module:
    """[n 2] to [n 3]."""
    return mlp(2, 4, 3)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp": (perceptron, (2,)),
    "conv": (Net, (2, 4, 4)),
}


def batch(step: int, *shape: int, n: int = 10) -> tuple[Tensor, Tensor]:
    """Inputs and classes, others at every step."""
    return normal(n, *shape, seed=step), torch.randint(3, (n,), generator=torch.Generator().manual_seed(step))


def trained(
    make: Make, model: nn.Module, shape: tuple[int, ...], steps: int = 5, pieces: int = 1, n: int = 10
) -> Tensor:
    """θ [P] after some steps, each on a batch of its own."""
    opt = make(model)
    for step in range(steps):
        x, t = batch(step, *shape, n=n)
        opt.zero_grad()
        for part, label in zip(x.chunk(pieces), t.chunk(pieces), strict=True):
            (F.cross_entropy(model(part), label) * len(part) / len(x)).backward()
        opt.step()
    return oracle.flatten(model.parameters())


def made(name: str) -> nn.Module:
    """A model, always the same."""
    return seeded(lambda: MODELS[name][0]().double())


def both(lengthscale: float, **options: Any) -> tuple[Make, Make]:
    """KFAC and SobolevKFAC of one schedule."""
    return (
        lambda model: ng.KFAC(model, EXACT, **SCHEDULE, **options),
        lambda model: ng.SobolevKFAC(model, EXACT, lengthscale=lengthscale, **SCHEDULE, **options),
    )


# By default


def test_the_lengthscale_is_a_quarter_of_the_median_distance_unless_another_is_given() -> None:
    """About what Bai, Rosenberg and Xu (2022) have."""

    def of(**options: Any) -> Tensor:
        return trained(lambda model: ng.SobolevKFAC(model, EXACT, **SCHEDULE, **options), made("mlp"), (2,))

    torch.testing.assert_close(of(), of(lengthscale=Median(divisor=4.0)), rtol=0, atol=0)
    for divisor in (1.0, 3.9, 20.0):
        assert (of() - of(lengthscale=Median(divisor))).norm() > 1e-5


# Where K is 1


@pytest.mark.parametrize("options", [{}, {"sharing": "reduce"}, {"solver": ng.Cholesky()}], ids=["", "reduce", "chol"])
@pytest.mark.parametrize("name", MODELS)
def test_a_small_lengthscale_gives_the_steps_of_kfac(name: str, options: dict[str, Any]) -> None:
    kfac, sobolev = both(SMALL, **options)
    expected = trained(kfac, made(name), MODELS[name][1])
    torch.testing.assert_close(trained(sobolev, made(name), MODELS[name][1]), expected, rtol=0, atol=1e-10)
    assert (expected - oracle.flatten(made(name).parameters())).norm() > 1e-2  # it did move


@pytest.mark.parametrize("name", MODELS)
def test_samples_that_the_batch_shares_and_a_small_lengthscale_give_the_steps_of_kfac(name: str) -> None:
    """Every column of the root is drawn once for all examples; K-FAC with the same columns is the same."""

    def of(metric: ng.OutputMetric) -> Tensor:
        generator = torch.Generator().manual_seed(3)
        return trained(lambda m: ng.KFAC(m, metric, **SCHEDULE, generator=generator), made(name), MODELS[name][1])

    def sobolev(model: nn.Module) -> ng.NaturalGradient:
        generator = torch.Generator().manual_seed(3)
        return ng.SobolevKFAC(model, SAMPLED, lengthscale=SMALL, **SCHEDULE, generator=generator)

    got = trained(sobolev, made(name), MODELS[name][1])
    torch.testing.assert_close(got, of(Shared()), rtol=0, atol=1e-10)
    assert (got - of(SAMPLED)).norm() > 1e-3  # samples of every example by itself are others


@final
class Shared(ng.OutputMetric):
    """The sampled metric with samples that the whole batch shares, and no coupling."""

    @property
    def exact(self) -> bool:
        return False

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return SAMPLED.flat(y, u, target)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return SAMPLED.shared_root(y, target, generator)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return SAMPLED.divergence(y, y0, target)


@pytest.mark.parametrize("name", MODELS)
def test_a_batch_of_one_gives_the_steps_of_kfac(name: str) -> None:
    kfac, sobolev = both(5.0)
    expected = trained(kfac, made(name), MODELS[name][1], n=1)
    torch.testing.assert_close(trained(sobolev, made(name), MODELS[name][1], n=1), expected, rtol=0, atol=1e-10)


@pytest.mark.parametrize("name", MODELS)
def test_microbatches_are_coupled_each_by_itself(name: str) -> None:
    """With a small lengthscale accumulation is that of K-FAC; with any, one example at a time is K-FAC."""
    for lengthscale, pieces in ((SMALL, 3), (5.0, 10)):
        kfac, sobolev = both(lengthscale)
        expected = trained(kfac, made(name), MODELS[name][1], pieces=pieces)
        got = trained(sobolev, made(name), MODELS[name][1], pieces=pieces)
        torch.testing.assert_close(got, expected, rtol=0, atol=1e-10)


# Where it is not


def test_one_step_is_that_of_factors_whose_scale_is_matched_by_traces() -> None:
    """(S + λ^½/π)⁻¹ ∇ (A + π λ^½)⁻¹, with A = Σ C a aᵀ/N, S = κ Σ C g gᵀ/N from the definitions, for one layer."""
    x, t, λ = normal(6, 3), normal(6, 2, seed=1), 0.1
    layer = seeded(lambda: nn.Linear(3, 2).double())
    before = torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], 1)
    opt = ng.SobolevKFAC(layer, ng.Euclidean(), lr=0.5, damping=λ, lengthscale=2.0, step=ng.Fixed(), momentum=0.0)
    half_square(layer(x), t).backward()
    opt.step()
    K = (SobolevKernel(1.5, 2.0)(x) + 1e-6 * torch.eye(6).double()) / (1 + 1e-6)
    C, ā = K.inverse(), torch.cat([x, torch.ones(6, 1).double()], 1)
    A, S = ā.T @ C @ ā / 6, C.sum() / 6 * torch.eye(2).double()  # g of output k is e_k, in every example
    exact, plain = 2 * (C * (ā @ ā.T)).sum() / 6, 2 * ā.square().sum() / 6
    S = S * (exact / (A.trace() * S.trace())) / (plain / (ā.square().sum() / 6 * 2))
    π = ((A.trace() / 4) / (S.trace() / 2)).sqrt()
    left, right = S + λ**0.5 / π * torch.eye(2).double(), A + π * λ**0.5 * torch.eye(4).double()
    gradient = (before @ ā.T - t.T) @ ā / 6
    expected = before - 0.5 * left.inverse() @ gradient @ right.inverse()
    now = torch.cat([layer.weight.detach(), layer.bias.detach()[:, None]], 1)
    torch.testing.assert_close(now, expected, rtol=0, atol=1e-9)


def test_a_batch_of_copies_has_one_over_n_of_the_factors_of_one_example() -> None:
    """They count as one; G is a mean over N. In one layer the product is exact, up to the jitter."""
    one, copies = (
        ng.Kronecker().estimate(ng.pullback(seeded(lambda: nn.Linear(3, 2).double()), x, ng.Sobolev()))
        for x in (normal(1, 3), normal(1, 3).expand(8, 3).contiguous())
    )
    torch.testing.assert_close(8 * copies.dense(), one.dense(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("lengthscale", [Median(4.0), Alike(0.5), 20.0], ids=repr)
def test_default_steps_descend_where_the_kernel_is_far_from_one(lengthscale: Any) -> None:
    """Undamped, η < 2/λ_max(K) would be asked of the user: by default steps are clipped, as those of K-FAC are."""
    x = normal(48, 2)
    t = (1.5 * x).sin().sum(1, keepdim=True)

    def losses(make: Make) -> list[float]:
        model, out = seeded(lambda: mlp(2, 16, 16, 1).double()), []
        opt = make(model)
        for _ in range(40):
            opt.zero_grad()
            loss = half_square(model(x), t)
            loss.backward()
            opt.step()
            out.append(loss.item())
        return out

    kfac = losses(lambda m: ng.KFAC(m, ng.Euclidean(), metric_every=2, inverse_every=2))
    own = losses(lambda m: ng.SobolevKFAC(m, ng.Euclidean(), lengthscale=lengthscale, metric_every=2, inverse_every=2))
    K = ng.Sobolev(lengthscale=lengthscale).gram(x, 48)
    assert torch.linalg.eigvalsh(K)[-1] > 3  # far from 1
    assert max(own) < 1.05 * own[0]
    assert own[-1] < 0.6 * own[0]
    assert kfac[-1] < 0.6 * kfac[0]


@pytest.mark.parametrize("metric", [EXACT, SAMPLED], ids=["exact", "sampled"])
@pytest.mark.parametrize("lengthscale", [5.0, Median(4.0), Alike(0.2)], ids=repr)
def test_a_run_that_is_saved_goes_on_bit_for_bit(metric: ng.OutputMetric, lengthscale: Any) -> None:
    """Lengthscales are measured on every batch and keep no state."""

    def start() -> tuple[nn.Module, ng.NaturalGradient]:
        model = made("conv")
        options = {**SCHEDULE, "generator": torch.Generator().manual_seed(3)}
        return model, ng.SobolevKFAC(model, metric, lengthscale=lengthscale, **options)

    def step(model: nn.Module, opt: ng.NaturalGradient, seed: int) -> None:
        x, t = batch(seed, 2, 4, 4)
        opt.zero_grad()
        F.cross_entropy(model(x), t).backward()
        opt.step()

    resumes(start, step)
