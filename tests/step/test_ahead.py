"""Steps whose momentum is made in one pass with the move, as on a GPU, are those that are made one after the other."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.flags import Flag
from natgrad.optim.preconditioner import Solves
from natgrad.step.base import Proposal, Step, StepRule
from tests.optim.tasks import seeded

Make = Callable[[], tuple[nn.Module, ng.NaturalGradient]]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """From its call on, a processor does what a GPU does; whether it did, step by step."""
    made: list[bool] = []

    def rolling(self: Solves, *args: Any) -> Any:
        found = self.rolling(*args)
        made.append(found is not None)
        return found

    def start() -> list[bool]:
        monkeypatch.setattr(Solves, "ahead", rolling)
        monkeypatch.setattr(Flag, "check", lambda self, tensors, what, step: self.look(tensors))
        return made

    return start


def net() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)))


def kfac(**options: Any) -> tuple[nn.Module, ng.NaturalGradient]:
    model = net()
    return model, ng.KFAC(model, ng.Fisher(ng.Categorical()), **{"lr": 0.1, "metric_every": 1, **options})


def grouped(**options: Any) -> tuple[nn.Module, ng.NaturalGradient]:
    model = net()
    groups = [
        {"params": model[0].parameters(), "lr": 0.05, "momentum": 0.5, "weight_decay": 0.1},
        {"params": model[2].parameters(), "lr": 0.0},
    ]
    metric = ng.Fisher(ng.Categorical())
    return model, ng.KFAC(model, metric, **{"lr": 0.1, "groups": groups, "weight_decay": 0.01, **options})


def clipped(rule: StepRule) -> StepRule:
    return ng.Constrained(rule, ng.Clipping({"0.weight": (-0.1, 0.1)}))


MADE: dict[str, Make] = {
    "kfac": kfac,
    "groups": grouped,
    "clipped": lambda: kfac(step=clipped(ng.KLClip())),
    "clip": lambda: grouped(step=ng.KLClip(1e-6)),
}


def run(make: Make, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    model, opt = make()
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    for _ in range(steps):
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
        opt.step()
        assert opt.last is not None
        rates = {id(p): 1 - g["lr"] * g["weight_decay"] for g in opt.param_groups for p in g["params"]}
        for old, p, δ in zip(before, model.parameters(), opt.last.displacement.values(), strict=True):
            torch.testing.assert_close(p.detach(), rates[id(p)] * old + δ, rtol=1e-5, atol=1e-6)
    momenta = [opt.state[p]["momentum"] for p in model.parameters() if "momentum" in opt.state[p]]
    return [p.detach() for p in model.parameters()], momenta


@pytest.mark.parametrize("name", list(MADE))
def test_steps_in_one_pass_are_those_of_several(name: str, ahead: Callable[[], list[bool]]) -> None:
    expected = run(MADE[name])
    made = ahead()
    found = run(MADE[name])
    assert made == [False, True, True, True, True]  # at first there is no momentum
    for right, own in zip(expected, found, strict=True):
        assert len(right) == len(own) == 6
        for a, b in zip(right, own, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


class Twice(StepRule):
    """Looks at another move before it decides."""

    def take(self, proposal: Proposal) -> Step:
        proposal.natural()
        return ng.KLClip().take(proposal)


def test_a_move_that_was_only_looked_at_leaves_no_momentum(ahead: Callable[[], list[bool]]) -> None:
    expected = run(lambda: kfac(step=ng.KLClip()))
    made = ahead()
    found = run(lambda: kfac(step=Twice()))
    assert any(made)
    for right, own in zip(expected, found, strict=True):
        for a, b in zip(right, own, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_momentum_beyond_the_range_of_half_precision_is_seen_before_it_is_used(
    dtype: torch.dtype, ahead: Callable[[], list[bool]]
) -> None:
    made = ahead()
    model = seeded(lambda: nn.Linear(2, 2, bias=False)).to(dtype)
    opt = ng.KFAC(model, ng.Euclidean(), lr=3e-4, damping=1e-7, metric_every=1)
    for _ in range(8):
        model(torch.full((1, 2), 1e-3, dtype=dtype))
        model.weight.grad = torch.tensor([[8e-3, -8e-3], [8e-3, -8e-3]], dtype=dtype)
        opt.step()
    assert not any(made)
    assert model.weight.isfinite().all()
    largest = opt.state[model.weight]["momentum"].abs().max()
    assert (largest > 70_000) == (dtype is torch.float64)  # that is where float16 ends


def test_parameters_without_momentum_or_at_rest_are_not_moved_in_one_pass(ahead: Callable[[], list[bool]]) -> None:
    made = ahead()
    run(lambda: kfac(momentum=0.0))
    assert not any(made)
    model, opt = kfac()
    assert isinstance(model, nn.Sequential)
    for step in range(3):
        model(torch.ones(3, 4)).square().mean().backward()
        if step == 2:
            model[0].weight.grad = None
        opt.step()
    assert made[-3:] == [False, True, False]


def test_a_checkpoint_of_another_memory_format_goes_on_as_in_its_own(ahead: Callable[[], list[bool]]) -> None:
    def made(last: bool) -> tuple[nn.Module, ng.NaturalGradient]:
        format = torch.channels_last if last else torch.contiguous_format
        model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.Linear(12, 2)))
        model = model.to(memory_format=format)  # type: ignore[call-overload]
        return model, ng.KFAC(model, ng.Euclidean(), lr=0.05)

    def step(model: nn.Module, opt: ng.NaturalGradient) -> None:
        opt.zero_grad()
        model(torch.arange(64.0).view(2, 2, 4, 4) / 64).square().mean().backward()
        opt.step()

    (model, opt), (other, again) = made(False), made(True)
    seen = ahead()
    for _ in range(2):
        step(model, opt)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    for _ in range(2):
        step(model, opt)
        step(other, again)
    assert seen == [False, True, True, False, True, False]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)
