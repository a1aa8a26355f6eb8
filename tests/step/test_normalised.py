"""Steps of a given root mean square."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.optim.tasks import seeded, task

RULES = {"plain": ng.Normalised(), "general": ng.Constrained(ng.Normalised(), ng.Clipping({}))}


@pytest.mark.parametrize("rule", list(RULES))
@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kronecker(), ng.Diagonal()], ids=repr)
def test_each_step_is_the_natural_gradient_at_its_root_mean_square(structure: Any, rule: str) -> None:
    job, other = task("classes"), task("classes")
    opt = job.optimizer(structure=structure, lr=0.5, step=RULES[rule])
    natural = other.optimizer(structure=structure, lr=1.0)
    before = [p.detach().clone() for p in job.model.parameters()]
    job.step(opt)
    other.step(natural)
    assert natural.last is not None
    for p, old, δ in zip(job.model.parameters(), before, natural.last.displacement.values(), strict=True):
        torch.testing.assert_close(p - old, 0.5 * 0.2 * δ / δ.square().mean().sqrt())


def test_no_scale_of_the_loss_is_left() -> None:
    def moved(scale: float) -> Tensor:
        job = task("regression")
        opt = job.optimizer(lr=0.1, damping=0.0, structure=ng.Diagonal(), step=ng.Normalised(0.1))
        for _ in range(3):
            opt.zero_grad()
            (scale * job.loss()).backward()
            opt.step()
        return job.theta()

    torch.testing.assert_close(moved(1e-6), moved(1e6))


@pytest.mark.parametrize("momentum_on", ["steps", "gradients"])
def test_a_zero_gradient_is_a_zero_step(momentum_on: Any) -> None:
    model = seeded(lambda: nn.Linear(3, 2))
    before = [p.detach().clone() for p in model.parameters()]
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=ng.Normalised(), momentum=0.9, momentum_on=momentum_on)
    model(torch.randn(4, 3))
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_half_precision_is_normalised_in_single() -> None:
    """The squares of these numbers are below the range of float16."""
    model = nn.Linear(64, 64, bias=False).half()
    before = model.weight.detach().clone()
    opt = ng.NaturalGradient(
        model, ng.Euclidean(), structure=ng.Diagonal(), lr=1.0, damping=1.0, step=ng.Normalised(0.5)
    )
    model(torch.zeros(2, 64, dtype=torch.float16))
    model.weight.grad = torch.full_like(model.weight, 1e-5)
    opt.step()
    torch.testing.assert_close(
        (before - model.weight).float().square().mean().sqrt(), torch.tensor(0.5), rtol=1e-2, atol=0.0
    )


@pytest.mark.parametrize("rule", [ng.Normalised, ng.Polar])
@pytest.mark.parametrize("rms", [0.0, -1.0, float("inf"), float("nan")])
def test_sizes_that_are_none_are_refused(rule: type[ng.Normalised], rms: float) -> None:
    with pytest.raises(ValueError, match=rf"{rule.__name__}\(rms=…\) must be positive and finite, got {rms}"):
        rule(rms=rms)


def test_a_length_beyond_single_precision_makes_a_step_of_the_same_size() -> None:
    model = nn.Linear(2, 1, bias=False)
    before = model.weight.detach().clone()
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Diagonal(), damping=1.0, step=ng.Normalised())
    model(torch.zeros(2, 2))
    model.weight.grad = torch.full_like(model.weight, 3e38)
    opt.step()
    torch.testing.assert_close(before - model.weight, torch.full((1, 2), 0.2))
