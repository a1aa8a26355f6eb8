"""A run tests with the averages of the normalisation, has the rates of its schedule, and the constants of the paper."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import SGD, Optimizer

import natgrad as ng
from experiments.images import Images
from experiments.sobolev_cifar import arms
from experiments.sobolev_cifar.arms import FIFTHS, TENTHS, Config, Momentum, Schedule
from experiments.sobolev_cifar.training import Job, Pace, Training
from tests.experiments.tiny import SETUP


def test_test_images_are_judged_with_the_averages_of_the_normalisation(pictures: Images) -> None:
    training = Training(Job("cifar10", TENTHS, Momentum(0.01, 0.0), seed=0), SETUP, pictures)
    training.epoch()
    pixels = pictures.train.x.double()
    x = (pictures.test.x.double() - pixels.mean((0, 1, 2))) / pixels.std((0, 1, 2), correction=0)
    x, t = x.permute(0, 3, 1, 2).float(), pictures.test.y
    averaged = copy.deepcopy(training.model).eval()
    with torch.no_grad():
        y, own = averaged(x), copy.deepcopy(training.model).train()(x)
    (point,) = training.history
    assert point.test_loss == pytest.approx(float(F.cross_entropy(y, t)), rel=1e-5)
    assert point.test_accuracy == pytest.approx(float((y.argmax(1) == t).double().mean()))
    assert abs(float(F.cross_entropy(own, t)) - point.test_loss) > 1e-3  # the averages of the batch say another thing


@final
class Watched(SGD):
    """Knows the rates of all steps that it took."""

    def __init__(self, parameters: Any, seen: list[float]) -> None:
        super().__init__(parameters, lr=0.5)
        self.seen = seen

    def step(self, closure: Any = None) -> Any:
        self.seen.append(self.param_groups[0]["lr"])
        return super().step(closure)


@final
@dataclass(frozen=True)
class Watching(Config):
    """Steps of rate 0.5, if nobody changes it."""

    name: str = "watching"
    seen: list[float] = field(default_factory=list)

    def optimizer(self, model: nn.Module, seed: int) -> Optimizer:
        return Watched(model.parameters(), self.seen)

    def numbers(self) -> dict[str, float]:
        return {"lr": 0.5}

    def looks(self, step: int) -> bool:
        return False

    def at(self, numbers: Mapping[str, float]) -> Config:
        return self


@pytest.mark.parametrize(
    ("schedule", "left"),
    [(TENTHS, [1, 1, 0.1, 0.1, 0.01]), (FIFTHS, [1, 1, 0.2, 0.04, 0.04])],
    ids=lambda value: getattr(value, "name", ""),
)
def test_every_step_has_the_rate_of_its_epoch(schedule: Schedule, left: list[float], pictures: Images) -> None:
    arm = Watching()
    training = Training(Job("cifar10", schedule, arm, seed=0), replace(SETUP, epochs=5), pictures)
    for _ in range(5):
        training.epoch()
    assert arm.seen == pytest.approx([0.5 * part for part in left for _ in range(2)])  # 64 images in batches of 32


def steps(optimizer: Optimizer, model: nn.Module, loss: float) -> list[torch.Tensor]:
    """The weights after each of 105 steps on a loss that is multiplied by a number."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for _ in range(105):
        x, t = torch.randn(16, 5, generator=generator), torch.randint(3, (16,), generator=generator)
        optimizer.zero_grad()
        (loss * F.cross_entropy(model(x), t)).backward()
        optimizer.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    return found


def written_out(model: nn.Module, clip: float = 0.01, metric_every: int = 10, inverse_every: int = 100) -> Optimizer:
    """K-FAC with the numbers of Bai et al. (2022), App. D and Wang's script, none of them ours."""
    return ng.KFAC(
        model,
        ng.Fisher(ng.Categorical(), samples=1),
        lr=0.01,
        damping=0.03,
        momentum=0.9,
        weight_decay=0.03,
        metric_every=metric_every,
        inverse_every=inverse_every,
        early=False,
        step=ng.KLClip(clip),
        generator=torch.Generator().manual_seed(0),
    )


@pytest.mark.parametrize("loss", [1.0, 300.0], ids=["free", "clipped"])
def test_kfac_takes_the_steps_of_the_papers_numbers_and_of_no_others(loss: float) -> None:
    """105 steps: factors every 10 and inverses every 100, so that both are seen; steps of KL 0.01 where that binds."""
    torch.manual_seed(0)
    start = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))

    def taken(make: Any) -> torch.Tensor:
        model = copy.deepcopy(start)
        return torch.stack(steps(make(model), model, loss))

    expected = taken(lambda model: arms.amari().optimizer(model, 0))
    torch.testing.assert_close(taken(written_out), expected, rtol=1e-5, atol=1e-6)
    others = [{"metric_every": 7}, {"inverse_every": 50}, *([{"clip": 0.001}] if loss > 1 else [])]
    for other in others:
        apart = (taken(lambda model, other=other: written_out(model, **other)) - expected).abs().max()
        assert apart > 1e-3, other


@pytest.mark.parametrize(
    "arm",
    [replace(arms.sobolev(), constants=arms.Constants(metric_every=2)), arms.Natural(1e-2, 0.1), Momentum(0.1, 0.0)],
    ids=lambda arm: arm.name,
)
def test_passes_that_no_optimizer_sees_change_no_number(arm: Config, pictures: Images) -> None:
    """A pass is run again where a graph would be replayed, without any hook, which a graph would not call either.

    Half of the passes, or all, are not seen: of 32, more are replayed than warm up. The run is resumed in between.
    """
    job, setup, replays = Job("cifar10", TENTHS, arm, seed=0), replace(SETUP, batch=16, epochs=8), list[int]()

    def capture(kernels: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            replays.append(len(replays))
            kernels()

        return replay

    eager = Training(job, setup, pictures)
    first, rest = (Training(job, replace(setup, pace=Pace(capture=capture)), pictures) for _ in range(2))
    for _ in range(8):
        eager.epoch()
    for _ in range(3):
        first.epoch()
    rest.load(copy.deepcopy(first.state()))
    for _ in range(5):
        rest.epoch()
    assert len(replays) > 5
    assert [p.train_loss for p in rest.history] == [p.train_loss for p in eager.history]
    assert rest.history[-1].test_loss == eager.history[-1].test_loss
