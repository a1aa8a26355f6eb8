"""On a GPU: steps that are made in one pass, in memory of several kinds, are those of the processor."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.optim.tasks import seeded

Make = Callable[[nn.Module], ng.NaturalGradient]
FISHER = ng.Fisher(ng.Categorical())


def _images() -> nn.Module:
    layers = [nn.Conv2d(2, 4, 3), nn.Tanh(), nn.Conv2d(4, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)]
    # In double precision: in single, a GPU's convolutions have eleven bits.
    return nn.Sequential(*layers).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _net() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def _trained(device: str, build: Callable[[], nn.Module], make: Make, autocast: bool = False) -> Tensor:
    """The parameters after steps that are made kernel by kernel, and steps that are recorded."""
    model = seeded(build).to(device)
    x = seeded(lambda: torch.randn(16, 2, 6, 6), seed=1).to(next(model.parameters()))
    opt = make(model)
    for _ in range(12):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16, device=device) % 3).backward()
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            opt.step()
    return torch.cat([p.detach().flatten().double().cpu() for p in model.parameters()])


def _kfac(**options: Any) -> Make:
    settings: dict[str, Any] = {"lr": 0.05, "metric_every": 20, "inverse_every": 20, "early": False, **options}
    settings["solver"] = ng.Factored()
    return lambda model: ng.KFAC(model, FISHER, **settings)


def test_the_clip_inside_a_constraint_keeps_its_momentum() -> None:
    rule = ng.Constrained(ng.KLClip(), ng.Clipping({"1.weight": (-0.05, 0.05)}))
    here, there = (_trained(device, _net, _kfac(step=rule)) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    "make", [_kfac(), lambda model: ng.NaturalGradient(model, FISHER, structure=ng.Diagonal(), lr=0.05, momentum=0.9)]
)
def test_parameters_may_have_several_memory_formats(make: Make) -> None:
    here, there = (_trained(device, _images, make) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-5, atol=1e-6)  # rates are read in single precision


def test_a_step_inside_autocast_is_that_outside() -> None:
    inside, outside = (_trained("cuda", _net, _kfac(), autocast=autocast) for autocast in (True, False))
    torch.testing.assert_close(inside, outside, rtol=1e-5, atol=1e-6)
