"""On a GPU: steps that are made in one pass, in memory of several kinds, are those of the processor."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.cuda.waiting import no_waiting
from tests.optim.tasks import seeded

Make = Callable[[nn.Module], Any]
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


def _same_shapes() -> nn.Module:
    layers = [m for _ in range(4) for m in (nn.Linear(24, 24), nn.Tanh())]
    return nn.Sequential(nn.Flatten(), nn.Linear(72, 24), nn.Tanh(), *layers, nn.Linear(24, 3))


EIGENBASIS: dict[str, Make] = {
    "soap": lambda model: ng.SOAP(model, lr=1e-3, basis_every=5, damping=ng.Relative(0.1)),
    "published": lambda model: ng.SOAP(
        model, lr=1e-3, basis_every=5, damping=ng.Relative(0.1), nesterov=False, moments="sorted"
    ),
    "exact": lambda model: ng.NaturalGradient(
        model,
        ng.BatchGradient(),
        structure=ng.Refresh(ng.EigenKronecker(power=0.5), 1, 0.95, inverse=5),
        lr=1e-3,
        damping=ng.Relative(0.1),
    ),
    "ekfac": lambda model: ng.EKFAC(model, FISHER, lr=0.01, metric_every=4, inverse_every=4, damping=0.1),
}


@pytest.mark.parametrize("name", EIGENBASIS)
def test_steps_in_an_eigenbasis_are_those_of_the_cpu(name: str) -> None:
    here, there = (_trained(device, _same_shapes, EIGENBASIS[name]) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-2, atol=1e-3)


def test_soap_waits_for_nothing_and_replays_its_plain_steps() -> None:
    """Also in the steps with new bases, which are in the place of the old ones."""
    model = seeded(_same_shapes).cuda()
    opt = ng.SOAP(model, lr=1e-3, basis_every=5)
    x = torch.randn(16, 2, 6, 6, device="cuda")
    for step in range(40):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16, device="cuda") % 3).backward()
        with no_waiting() if step > 20 else nullcontext():
            opt.step()
    (of_graph,) = opt._graphs.stats.values()
    assert of_graph.captures <= 2
    assert of_graph.replays > 25


def test_a_step_of_soap_that_is_not_finite_changes_nothing() -> None:
    model = seeded(_same_shapes).cuda()
    opt = ng.SOAP(model, lr=1e-3, basis_every=5)
    x = torch.randn(16, 2, 6, 6, device="cuda")
    for step in range(8):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), torch.arange(16, device="cuda") % 3).backward()
        if step == 7:
            before = [p.detach().clone() for p in model.parameters()]
            for p in model.parameters():
                assert p.grad is not None
                p.grad.fill_(torch.nan)
        opt.step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))
    assert all(t.isfinite().all() for state in opt.state.values() for t in state.values())
