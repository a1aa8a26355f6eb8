"""A step inside autocast: products of the metric are not rounded to half precision."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.structures.layered import LayerInverse
from tests import oracle
from tests.optim.tasks import seeded

FISHER = ng.Fisher(ng.Categorical())
OPTIMIZERS: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "kfac": lambda model: ng.KFAC(model, FISHER, metric_every=2),
    "ekfac": lambda model: ng.EKFAC(model, FISHER, metric_every=2),
    "dense": lambda model: ng.NaturalGradient(model, FISHER, lr=0.1, step=ng.KLClip()),
    "kernel": lambda model: ng.NaturalGradient(model, FISHER, structure=ng.Kernel(), lr=0.1),
}


def _trained(make: Callable[[nn.Module], ng.NaturalGradient], autocast: bool) -> Tensor:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)))
    x = seeded(lambda: torch.randn(16, 4), seed=1)
    opt = make(model)
    for _ in range(3):
        opt.zero_grad()
        F.cross_entropy(model(x), x.argmax(1) % 3).backward()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            opt.step()
    return oracle.flatten(model.parameters())


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", list(OPTIMIZERS))
def test_a_step_inside_autocast_is_that_outside(name: str, packed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if packed:
        monkeypatch.setattr(LayerInverse, "_columns", [None] * 3)
    expected = _trained(OPTIMIZERS[name], autocast=False)
    assert torch.equal(_trained(OPTIMIZERS[name], autocast=True), expected)
