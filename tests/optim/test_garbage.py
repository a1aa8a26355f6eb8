"""What a step has used is freed when it ends, not when Python next looks for cycles: it is as large as the metric."""

import gc

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.step import StepRule


@pytest.mark.parametrize(
    "rule", [ng.KLClip(), ng.SelfTuned(), ng.TrustRegion(0.1)], ids=lambda rule: type(rule).__name__
)
def test_a_step_leaves_no_cycle_of_references_behind(rule: StepRule) -> None:
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, t = torch.randn(8, 4), torch.arange(8) % 3
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical(), samples=1), step=rule, metric_every=1, inverse_every=1)

    def closure() -> torch.Tensor:
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), t)
        loss.backward()
        return loss

    opt.step(closure)
    gc.collect()
    gc.disable()
    try:
        opt.step(closure)
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        # torch's compiler leaves fake tensors behind, now and then, if it has run in this process.
        kinds = [type(o) for o in gc.garbage if type(o) is torch.Tensor or "natgrad" in type(o).__module__]
        left = [kind.__name__ for kind in kinds]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert left == []
