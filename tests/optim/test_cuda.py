"""On a GPU: a bad step changes nothing without waiting for the device, and is reported by the next."""

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import NonFiniteError
from tests.optim.tasks import KINDS, Task, task

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    # torch's own: raised once, by the first backward pass of the process on a GPU
    pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"),
]


def _on_gpu(kind: str = "regression") -> Task:
    of = task(kind)
    return Task(of.model.cuda(), of.x.cuda(), of.t.cuda(), of.kind)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_gradient_changes_nothing_and_a_later_step_reports_it(value: float) -> None:
    of, twin = _on_gpu(), _on_gpu()
    options = {"damping": 0.1, "momentum": 0.9, "weight_decay": 0.1}
    opt, other = of.optimizer(**options), twin.optimizer(**options)
    for _ in range(2):
        of.step(opt)
        twin.step(other)
    before = of.theta()
    of.closure(opt)()
    weight = of.model.get_parameter("0.weight")
    assert weight.grad is not None
    weight.grad[0, 0] = value
    opt.step()
    assert torch.equal(of.theta(), before)
    of.closure(opt)()
    torch.cuda.synchronize()  # the answer has arrived; without it a later step would find it
    with pytest.raises(NonFiniteError, match="the step held NaN or infinity at step 2: that step changed nothing"):
        opt.step()
    for _ in range(2):
        of.step(opt)
        twin.step(other)
    assert torch.equal(of.theta(), twin.theta())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(5), ng.Kernel()])
def test_the_steps_are_those_of_the_cpu(kind: str, structure: ng.structures.Structure) -> None:
    ends: list[Tensor] = []
    for of in (task(kind), _on_gpu(kind)):
        opt = of.optimizer(structure=structure, damping=0.1, momentum=0.5)
        for _ in range(3):
            of.step(opt)
        ends.append(of.theta().cpu())
    torch.testing.assert_close(ends[0], ends[1], rtol=1e-8, atol=1e-10)


def test_clipping_lands_exactly_and_a_checkpoint_of_the_gpu_resumes_there() -> None:
    rule = ng.Constrained(ng.TrustRegion(0.1, ng.Backtracking()), ng.Clipping({"0.weight": (0.1, 0.7)}))
    of, fresh = _on_gpu(), _on_gpu()
    opt, other = of.optimizer(step=rule), fresh.optimizer(step=rule)
    for _ in range(3):
        of.step(opt)
    weight = of.model.get_parameter("0.weight")
    assert bool(((weight >= 0.1) & (weight <= 0.7)).all())
    fresh.model.load_state_dict(of.model.state_dict())
    other.load_state_dict(opt.state_dict())
    of.step(opt)
    fresh.step(other)
    assert torch.equal(of.theta(), fresh.theta())


def test_sampled_metrics_have_a_generator_on_the_device() -> None:
    of = _on_gpu("classes")
    before = torch.cuda.get_rng_state()
    opt = of.optimizer(metric=ng.Fisher(ng.Categorical(), samples=1), structure=ng.Diagonal())
    of.step(opt)
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert opt.keeper.generator.device.type == "cuda"
