"""On a GPU: a bad step changes nothing without waiting for the device, and is reported by the next."""

import importlib
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from tests.cuda.waiting import no_waiting
from tests.optim.states import alike, whole
from tests.optim.tasks import KINDS, Task, task


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
    assert opt.tracker.generator.device.type == "cuda"


class _Loop:
    """K-FAC on a small network with every kind of layer that is recorded, and layers of one shape."""

    def __init__(self, device: str, dtype: torch.dtype = torch.float64, make: Any = ng.KFAC, **options: Any) -> None:
        torch.manual_seed(0)
        layers = [nn.Conv2d(2, 4, 3, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(64, 6), nn.LayerNorm(6)]
        layers += [nn.Linear(6, 6), nn.Tanh(), nn.LayerNorm(6), nn.Linear(6, 6), nn.Tanh()]
        self.model = nn.Sequential(*layers, nn.Linear(6, 3)).to(device, dtype)
        x = torch.randn(16, 2, 4, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
        self.x = x.to(device, dtype)
        self.t = (torch.arange(16) % 3).to(device)
        metric = options.pop("metric", ng.Fisher(ng.Categorical()))
        self.opt = make(self.model, metric, lr=0.05, weight_decay=0.01, **options)
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.97)

    def go(self, steps: int) -> None:
        """So many steps."""
        for _ in range(steps):
            self.opt.zero_grad()
            nn.functional.cross_entropy(self.model(self.x), self.t).backward()
            self.opt.step()
            self.schedule.step()

    def run(self, steps: int) -> Tensor:
        """The parameters after so many steps."""
        self.go(steps)
        return torch.cat([p.detach().flatten().cpu() for p in self.model.parameters()])


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.gpu("slow"))])
@pytest.mark.parametrize(
    "every",
    [*((1, 4), (2, 6)), *(pytest.param(e, marks=pytest.mark.gpu("slow")) for e in ((1, 1), (5, 5), (100, 100)))],
)
def test_steps_are_those_of_the_cpu(every: tuple[int, int], dtype: torch.dtype) -> None:
    """In single precision they are captured; clip, momentum and move are one pass, and layers are not packed."""
    options: dict[str, Any] = {"metric_every": every[0], "inverse_every": every[1], "solver": ng.Factored()}
    here, there = _Loop("cpu", dtype, **options), _Loop("cuda", dtype, **options)
    rtol, atol = (1e-3, 1e-4) if dtype is torch.float32 else (1e-5, 1e-5)
    torch.testing.assert_close(there.run(25), here.run(25), rtol=rtol, atol=atol)
    replays = sum(stats.replays for stats in there.opt._graphs.stats.values())
    assert replays == (23 if dtype is torch.float32 else 0)  # the first has no momentum yet; the second may not repeat


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("steps", [3, 12])  # kernel by kernel, and recorded
def test_a_bad_gradient_changes_nothing_where_clip_and_move_are_one_pass(value: float, steps: int) -> None:
    loop = _Loop("cuda", torch.float32)
    before = loop.run(steps)
    momentum = [loop.opt.state[p]["momentum"].clone() for p in loop.model.parameters()]
    nn.functional.cross_entropy(loop.model(loop.x), loop.t).backward()
    grad = loop.model.get_parameter("3.weight").grad
    assert grad is not None
    grad[0, 0] = value
    loop.opt.step()
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([p.detach().flatten().cpu() for p in loop.model.parameters()]), before)
    pairs = zip(loop.model.parameters(), momentum, strict=True)
    assert all(torch.equal(loop.opt.state[p]["momentum"], m) for p, m in pairs)
    with pytest.raises(NonFiniteError, match=f"the step held NaN or infinity at step {steps}"):
        loop.opt.step()


def _matrices_by_polar(model: nn.Module, metric: ng.OutputMetric, **options: Any) -> ng.NaturalGradient:
    """Muon for matrices, AdamW for the rest."""
    identity, rule = ng.Diagonal(power=0), ng.Polar(iteration="minimax")
    return ng.NaturalGradient(model, metric, structure=identity, step=rule, momentum=0.9, fallback="adamw", **options)


def _square_root(statistics: ng.OutputMetric) -> Any:
    """Factors of every step, in another metric than that of the loop; their roots are those of the first."""
    structure = ng.Refresh(ng.Kronecker(power=0.5), 1, 0.9, 100)
    slots: dict[str, Any] = {"structure": structure, "solver": ng.Factored(), "step": ng.Normalised()}
    numbers: dict[str, Any] = {"damping": ng.Relative(1e-2), "momentum": 0.9, "fallback": "adamw"}
    return lambda model, _, **options: ng.NaturalGradient(model, statistics, **slots, **numbers, **options)


_ON_GRADIENTS: dict[str, Any] = {"momentum_on": "gradients"}
_SLOW: dict[str, Any] = {"metric_every": 100, "inverse_every": 100, "solver": ng.Factored(), **_ON_GRADIENTS}
_VARIANTS: dict[str, dict[str, Any]] = {
    "momentum on gradients": _SLOW,
    "normalised": {"step": ng.Normalised(), **_SLOW},
    "adamw": {"fallback": "adamw", **_SLOW},
    "polar": {"make": _matrices_by_polar, **_ON_GRADIENTS},
    "gradients": {"make": _square_root(ng.BatchGradient()), **_ON_GRADIENTS},
    "own backward": {"make": _square_root(ng.Empirical()), **_ON_GRADIENTS},
    "polar in a metric": {"step": ng.Polar(iteration="minimax"), "fallback": "adamw", **_SLOW},
}


@pytest.mark.parametrize("variant", _VARIANTS)
def test_steps_of_other_rules_are_those_of_the_cpu_and_are_recorded(variant: str) -> None:
    here, there = (_Loop(device, torch.float64, **_VARIANTS[variant]) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there.run(12), here.run(12), rtol=1e-5, atol=1e-5)
    recorded = _Loop("cuda", torch.float32, **_VARIANTS[variant])
    recorded.go(12)
    assert sum(stats.replays for stats in recorded.opt._graphs.stats.values()) == 10


@pytest.mark.parametrize("variant", _VARIANTS)
@pytest.mark.parametrize("name", ["3.weight", "4.weight"])  # of the metric, and of AdamW where there is one
def test_a_bad_gradient_changes_nothing_whatever_the_rule(variant: str, name: str) -> None:
    loop = _Loop("cuda", torch.float32, **_VARIANTS[variant])
    before = loop.run(12)
    states = whole(loop.opt)["state"]
    loop.opt.zero_grad()
    nn.functional.cross_entropy(loop.model(loop.x), loop.t).backward()
    grad = loop.model.get_parameter(name).grad
    assert grad is not None
    grad.view(-1)[0] = torch.nan
    loop.opt.step()
    torch.cuda.synchronize()
    assert torch.equal(torch.cat([p.detach().flatten().cpu() for p in loop.model.parameters()]), before)
    assert alike(whole(loop.opt)["state"], states)
    with pytest.raises(NonFiniteError, match="the step held NaN or infinity at step 12"):
        loop.opt.step()


@pytest.mark.parametrize("variant", _VARIANTS)
def test_a_recorded_step_of_other_rules_waits_for_nothing(variant: str) -> None:
    loop = _Loop("cuda", torch.float32, **_VARIANTS[variant])
    loop.run(12)
    with no_waiting():
        loop.go(20)


def test_cotangents_that_are_used_on_the_way_have_the_factors_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.import_module("natgrad.accelerate.autograd"), "_ROOM", 0)
    options: dict[str, Any] = {"metric_every": 1, "inverse_every": 1, "solver": ng.Factored()}
    found = []
    for _ in range(2):
        metric, generator = ng.Fisher(ng.Categorical(), samples=1), torch.Generator("cuda").manual_seed(3)
        found.append(_Loop("cuda", metric=metric, generator=generator, **options).run(8))
        monkeypatch.undo()
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize(
    ("structure", "metric"),
    [(ng.EigenKronecker(), ng.Fisher(ng.Categorical())), (ng.Kronecker(power=0.5), ng.BatchGradient())],
    ids=["in new memory", "with a fallback"],
)
def test_a_recorded_step_reads_the_inverse_that_was_made_for_it(
    structure: ng.structures.Structure, metric: ng.OutputMetric
) -> None:
    make = partial(ng.NaturalGradient, structure=ng.Refresh(structure, decay=0.9, inverse=2, early=False))
    options: dict[str, Any] = {"make": make, "metric": metric, "damping": 0.1}
    here, there = _Loop("cpu", torch.float64, **options), _Loop("cuda", torch.float32, **options)
    torch.testing.assert_close(there.run(12).double(), here.run(12).double(), rtol=1e-3, atol=1e-3)


def test_a_recorded_step_waits_for_nothing() -> None:
    loop = _Loop("cuda", torch.float32, metric_every=10, inverse_every=20)
    loop.run(45)
    with no_waiting():
        loop.go(20)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", ["adamw", "gradients"])
def test_the_precision_of_new_tensors_is_no_concern_of_a_step(variant: str, dtype: torch.dtype) -> None:
    """Flags, rates and counts are in single precision, as the fused kernels want them."""
    loop, other = (_Loop("cuda", dtype, **_VARIANTS[variant]) for _ in range(2))
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        found = loop.run(8)
    finally:
        torch.set_default_dtype(before)
    torch.testing.assert_close(found, other.run(8))


@pytest.mark.parametrize("make", [ng.KFAC, ng.Natural, ng.Shampoo], ids=lambda make: make.__name__)
def test_numbers_for_a_logger_wait_for_nothing(make: Any) -> None:
    model, loss = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).cuda(), nn.CrossEntropyLoss()
    x, t = torch.randn(32, 8, device="cuda"), torch.arange(32, device="cuda") % 4
    opt = make(model, loss) if make is ng.KFAC else make(model)
    rows: list[tuple[dict[str, float], int]] = []
    log = ng.log_to(opt, lambda numbers, step: rows.append((numbers, step)), every=1)

    def train(steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            loss(model(x), t).backward()
            opt.step()

    train(45)
    with no_waiting():
        train(5)
        found = opt.metrics()
    log.close()
    assert [step for _, step in rows] == list(range(1, 51))
    del found["natgrad/step"]
    assert rows[-1][0] == pytest.approx({name: float(value) for name, value in found.items()})


@pytest.mark.parametrize("every", [pytest.param((1, 3), marks=pytest.mark.gpu("slow")), (2, 4)])
def test_recorded_sobolev_steps_are_those_of_the_cpu(every: tuple[int, int]) -> None:
    options: dict[str, Any] = {"metric_every": every[0], "inverse_every": every[1], "solver": ng.Factored()}
    here, there = (_Loop(device, make=ng.SobolevKFAC, lengthscale=4.0, **options).run(25) for device in ("cpu", "cuda"))
    torch.testing.assert_close(there, here, rtol=1e-4, atol=1e-5)


def test_a_first_estimate_that_is_not_finite_is_refused_at_once() -> None:
    loop = _Loop("cuda")
    x, loop.x = loop.x, torch.full_like(loop.x, torch.nan)
    with pytest.raises(NonFiniteError, match=r"the estimate of the metric .* holds NaN or infinity"):
        loop.go(1)
    loop.x = x
    assert bool(torch.isfinite(loop.run(2)).all())


def test_estimates_that_are_not_finite_do_not_reach_the_average() -> None:
    loop = _Loop("cuda", metric_every=1, inverse_every=1)
    loop.run(5)
    assert loop.opt.tracker.average is not None
    before = {key: t.clone() for key, t in loop.opt.tracker.average.tensors().items()}
    x, loop.x = loop.x, torch.full_like(loop.x, torch.nan)
    loop.run(1)
    after = loop.opt.tracker.average.tensors()
    assert all(torch.equal(t, before[key]) for key, t in after.items())
    loop.x = x
    torch.cuda.synchronize()
    with pytest.raises(NonFiniteError, match="the step held NaN or infinity at step 5"):
        loop.run(1)
