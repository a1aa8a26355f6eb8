"""The KL clip: natural gradients that are shortened before they enter the momentum."""

import math

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests import oracle
from tests.optim.tasks import task
from tests.pulled import close

DAMPED = 0.1


def test_the_clip_scales_by_the_root_of_the_radius_over_the_length_and_never_lengthens() -> None:
    of = task("coins")
    θ, ω, G = of.theta(), of.gradient(), of.metric()
    v = oracle.damped(G, ω, DAMPED)
    lr = 0.3
    length = lr**2 * float(ω @ v)
    for radius in (length / 100, length / 2, length * 2, 1e9):
        of = task("coins")
        of.step(of.optimizer(step=ng.KLClip(radius), lr=lr, damping=DAMPED))
        close(of.theta(), θ - lr * min(1.0, math.sqrt(radius / length)) * v)


def test_every_group_counts_with_its_own_learning_rate() -> None:
    of = task("coins")
    θ, ω, G = of.theta(), of.gradient(), of.metric()
    v = oracle.damped(G, ω, DAMPED)
    first = {"params": list(of.model[0].parameters()), "lr": 0.5}  # type: ignore[index]
    rates = torch.cat([torch.full((9,), 0.5), torch.full((8,), 0.2)]).double()
    radius = 1e-4
    shrink = math.sqrt(radius / float((rates**2 * ω) @ v))
    assert shrink < 1
    of.step(of.optimizer(step=ng.KLClip(radius), lr=0.2, damping=DAMPED, groups=[first]))
    close(of.theta(), θ - shrink * rates * v)


def test_what_is_clipped_enters_the_momentum() -> None:
    of = task("coins")
    lr, μ, radius = 0.5, 0.9, 1e-4
    opt = of.optimizer(step=ng.KLClip(radius), lr=lr, momentum=μ, damping=DAMPED)
    θ, m = of.theta(), torch.zeros(17, dtype=torch.float64)
    for _ in range(4):
        v = oracle.damped(of.metric(), of.gradient(), DAMPED)
        length = lr**2 * float(of.gradient() @ v)
        assert length > radius
        m = μ * m + math.sqrt(radius / length) * v
        θ = θ - lr * m
        of.step(opt)
        close(of.theta(), θ)


def test_a_zero_gradient_is_not_clipped_to_something_that_is_no_number() -> None:
    of = task()
    θ = of.theta()
    opt = of.optimizer(step=ng.KLClip(), damping=DAMPED)
    (0 * of.loss()).backward()
    opt.step()
    close(of.theta(), θ)


class _Heads(nn.Module):
    """Two heads, one of which is used."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.other = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x)


def test_a_step_in_which_all_parameters_rest_changes_none() -> None:
    model = _Heads()
    opt = ng.KFAC(model, ng.Euclidean(), lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.ones(4, 3))
    for p in model.other.parameters():  # a gradient without a metric, and a metric without a gradient
        p.grad = torch.ones_like(p)
    opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("radius", [0.0, -1.0, math.nan])
def test_the_radius_must_be_positive(radius: float) -> None:
    with pytest.raises(ValueError, match=r"KLClip\(radius=…\) must be positive, got"):
        ng.KLClip(radius)


def test_a_length_that_overflows_is_named_and_is_no_step_of_zero() -> None:
    model = nn.Linear(3, 2, bias=False)
    opt = ng.KFAC(model, ng.Euclidean(), lr=0.1)
    before = model.weight.detach().clone()
    (1e25 * model(torch.randn(8, 3)).sum()).backward()  # ⟨ω, v⟩ is beyond 10³⁸, ω and v are not
    with pytest.raises(ng.errors.NonFiniteError, match=r"the step of weight holds NaN or infinity"):
        opt.step()
    assert torch.equal(model.weight, before)
