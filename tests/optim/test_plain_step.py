"""A plain step: in few operations, in one pass on a GPU, and replayed where it comes again."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar, final

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from benchmarks.census import Operations
from natgrad.accelerate.fused import Flag
from natgrad.accelerate.replay import GraphCache
from natgrad.optim import estimates, optimizer, update
from natgrad.step import PlainRule, Step, StepContext, StepRule
from tests.optim.tasks import seeded

Make = Callable[[], tuple[nn.Module, ng.NaturalGradient]]
T = TypeVar("T")


def operations(widths: Sequence[int], **options: Any) -> int:
    """Of a step of K-FAC in which neither the metric nor its inverse is due."""
    pairs = list(pairwise(widths))
    model = seeded(lambda: nn.Sequential(*[m for i, o in pairs for m in (nn.Linear(i, o), nn.Tanh())]))
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), **options)
    x, t = seeded(lambda: (torch.randn(32, widths[0]), torch.randint(widths[-1], (32,))))
    for step in range(9):
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), t).backward()
        if step < 8:
            opt.step()
    with Operations() as counted:
        opt.step()
    return counted.count


@pytest.mark.parametrize("options", [{}, {"weight_decay": 0.01}, {"step": ng.Fixed()}], ids=["clip", "decay", "fixed"])
def test_a_plain_step_of_eight_linear_layers_takes_at_most_eighty_operations(options: dict[str, Any]) -> None:
    """By hand it takes 63, a layer at a time; layers of one shape are stacked."""
    assert operations([16] * 9, **options) <= 80
    assert operations([20, *[16] * 7, 4], **options) <= 80


def test_eight_layers_of_one_shape_take_few_operations_more_than_one() -> None:
    assert operations([16] * 9) <= operations([16] * 2) + 8


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[bool]]:
    """From its call on, a processor does what a GPU does; whether momentum and move were one pass, step by step."""
    fused: list[bool] = []

    def can_roll(*args: Any) -> bool:
        fused.append(_can_fuse(*args))
        return fused[-1]

    _can_fuse = update._can_fuse

    def start() -> list[bool]:
        monkeypatch.setattr(update, "is_asynchronous", lambda device: True)
        monkeypatch.setattr(optimizer, "is_asynchronous", lambda device: True)
        monkeypatch.setattr(update, "_can_fuse", can_roll)
        monkeypatch.setattr(Flag, "check", lambda self, tensors, what: self.look(tensors))
        monkeypatch.setattr(Flag, "send", lambda self, what, step: None)
        return fused

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


CASES: dict[str, Make] = {
    "kfac": kfac,
    "groups": grouped,
    "clip": lambda: grouped(step=ng.KLClip(1e-6)),
    "fixed": lambda: grouped(step=ng.Fixed(), lr=1e-3),
}


def run(make: Make, steps: int = 5) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters and momenta; every step is where ``opt.last`` says."""
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


def alike(found: tuple[list[Tensor], list[Tensor]], expected: tuple[list[Tensor], list[Tensor]]) -> None:
    for own, right in zip(found, expected, strict=True):
        for a, b in zip(own, right, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", list(CASES))
def test_steps_in_one_pass_are_those_of_several(name: str, gpu: Callable[[], list[bool]]) -> None:
    expected = run(CASES[name])
    fused = gpu()
    alike(run(CASES[name]), expected)
    assert fused == [False, True, True, True, True]  # at first there is no momentum


def test_steps_with_momentum_on_gradients_are_on_a_gpu_those_of_a_processor(gpu: Callable[[], list[bool]]) -> None:
    expected = run(lambda: grouped(momentum_on="gradients"))
    fused = gpu()
    alike(run(lambda: grouped(momentum_on="gradients")), expected)
    assert not fused  # the momentum is averaged before the metric


class Twice(StepRule):
    """Looks at another move before it decides."""

    def take(self, context: StepContext) -> Step:
        context.natural()
        return ng.KLClip().take(context)


def test_a_rule_that_calls_a_plain_one_takes_its_steps_and_a_move_it_only_tried_leaves_no_momentum() -> None:
    alike(run(lambda: kfac(step=Twice())), run(lambda: kfac(step=ng.KLClip())))


class Half(PlainRule):
    """A rule of a user: half of the natural gradient."""

    def scale(self, v: ng.Vector, square: Tensor) -> Tensor:
        return torch.full_like(square, 0.5)


class HalfOfEach(PlainRule):
    """The same, with a number for each parameter."""

    def scale(self, v: ng.Vector, square: Tensor) -> dict[str, Tensor]:
        return {name: torch.full((), 0.5, dtype=t.dtype) for name, t in v.items()}


@pytest.mark.parametrize("rule", [Half(), HalfOfEach()])
def test_a_plain_rule_of_a_user_is_one_method(rule: PlainRule, gpu: Callable[[], list[bool]]) -> None:
    """Momentum is linear: half of every natural gradient is half of the learning rate."""
    expected = run(lambda: kfac(step=ng.Fixed(), lr=1e-3, metric_every=100))[0]
    found = run(lambda: kfac(step=rule, lr=2e-3, metric_every=100))[0]
    inside = run(lambda: kfac(step=ng.Constrained(rule, ng.Clipping({})), lr=2e-3, metric_every=100))[0]
    gpu()
    fused = run(lambda: kfac(step=rule, lr=2e-3, metric_every=100))[0]
    for right, *others in zip(expected, found, inside, fused, strict=True):
        for p in others:
            torch.testing.assert_close(p, right, rtol=1e-4, atol=1e-6)


class Unbounded(PlainRule):
    """A rule of a user whose number is not finite from the third step on: one for all parameters, or for each."""

    def __init__(self, *, each: bool) -> None:
        self.each, self.steps = each, 0

    def scale(self, v: ng.Vector, square: Tensor) -> Tensor | dict[str, Tensor]:
        self.steps += 1
        c = torch.full_like(square, 0.5 if self.steps < 3 else torch.nan)
        return dict.fromkeys(v, c) if self.each else c


class Unmeasured(PlainRule):
    """A rule of a user that reads nothing, and whose number says nothing of v."""

    bounded = True
    measured = False

    def __init__(self, c: float | None) -> None:
        self.c = c

    def scale(self, v: ng.Vector, square: Tensor) -> Tensor | None:
        return None if self.c is None else torch.tensor(self.c)


@pytest.mark.parametrize("options", [{"momentum": 0.0}, {"momentum_on": "steps"}, {"momentum_on": "gradients"}])
@pytest.mark.parametrize(
    "rule",
    [
        lambda: Unbounded(each=False),
        lambda: Unbounded(each=True),
        lambda: Unmeasured(None),
        lambda: Unmeasured(0.5),
    ],
)
def test_a_step_of_a_plain_rule_that_is_not_finite_changes_nothing_on_a_gpu(
    rule: Callable[[], PlainRule], options: dict[str, Any], gpu: Callable[[], list[bool]]
) -> None:
    gpu()
    step = rule()
    model, opt = kfac(step=step, **options)
    for at in range(4):
        opt.zero_grad()
        model(torch.eye(4)).square().mean().backward()
        if at >= 2 and isinstance(step, Unmeasured):
            next(model.parameters()).grad.fill_(torch.nan)  # type: ignore[union-attr]
        before = [p.detach().clone() for p in model.parameters()]
        opt.step()
        moved = [not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True)]
        assert moved == [at < 2] * len(moved)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_a_momentum_beyond_the_range_of_half_precision_is_seen_before_it_is_used(
    dtype: torch.dtype, gpu: Callable[[], list[bool]]
) -> None:
    fused = gpu()
    model = seeded(lambda: nn.Linear(2, 2, bias=False)).to(dtype)
    opt = ng.KFAC(model, ng.Euclidean(), lr=3e-4, damping=1e-7, metric_every=1)
    for _ in range(8):
        model(torch.full((1, 2), 1e-3, dtype=dtype))
        model.weight.grad = torch.tensor([[8e-3, -8e-3], [8e-3, -8e-3]], dtype=dtype)
        opt.step()
    assert not any(fused)
    assert model.weight.isfinite().all()
    largest = opt.state[model.weight]["momentum"].abs().max()
    assert (largest > 70_000) == (dtype is torch.float64)  # that is where float16 ends


def test_parameters_without_momentum_or_gradient_are_not_moved_in_one_pass(gpu: Callable[[], list[bool]]) -> None:
    fused = gpu()
    run(lambda: kfac(momentum=0.0))
    assert not any(fused)
    model, opt = kfac()
    assert isinstance(model, nn.Sequential)
    for step in range(3):
        model(torch.ones(3, 4)).square().mean().backward()
        if step == 2:
            weight = model.get_parameter("0.weight")
            weight.grad, before = None, weight.detach().clone()
        opt.step()
    assert fused[-3:] == [False, True, True]
    assert torch.equal(weight, before)


def test_a_checkpoint_of_another_memory_format_goes_on_as_in_its_own(gpu: Callable[[], list[bool]]) -> None:
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
    fused = gpu()
    for _ in range(2):
        step(model, opt)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(opt.state_dict())
    for _ in range(2):
        step(model, opt)
        step(other, again)
    assert fused == [False, True, True, False, True, False]
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(q, p)


class Replays:
    """In the place of CUDA: what is captured is run again by a replay."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def possible(self, tensors: Sequence[Tensor]) -> bool:
        return True

    def capture(self, fn: Callable[[], T], device: torch.device) -> tuple[T, Callable[[], None]]:
        self.captures += 1
        result: list[T] = []

        def replay() -> None:
            self.replays += 1
            result[:] = [fn()]

        # The first replay runs it; its result is not looked at before.
        return (None, None), replay  # type: ignore[return-value]


@pytest.mark.parametrize("momentum_on", ["steps", "gradients"])
@pytest.mark.parametrize("every", [1, 20])
def test_a_captured_step_follows_gradient_learning_rate_and_inverse(
    every: int, momentum_on: str, gpu: Callable[[], list[bool]]
) -> None:
    """The schedule changes the rate in every step; the metric and its inverse change every few."""

    def trained(captures: Replays | None) -> list[Tensor]:
        model = net()
        options: dict[str, Any] = {"metric_every": every, "inverse_every": every, "weight_decay": 0.01}
        options["momentum_on"] = momentum_on
        opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), **options)
        schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
        if captures is not None:
            opt._graphs = GraphCache(capacity=1, capture=captures)
        for step in range(8):
            x = torch.randn(32, 4, generator=torch.Generator().manual_seed(step))
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), x.argmax(1) % 3).backward()
            opt.step()
            schedule.step()
        return [p.detach() for p in model.parameters()]

    expected = trained(None)
    gpu()
    captures = Replays()
    for found, right in zip(trained(captures), expected, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-6)
    assert captures.captures == 1
    assert captures.replays == 6  # the first step has no momentum yet, the second is the first of its kind


@final
@dataclass(frozen=True)
class Sign(StepRule):
    """δ = −lr·sign(v), which is finite where v is not."""

    def take(self, context: StepContext) -> Step:
        v = context.sharp(context.smooth(context.differential), context.damping)
        return Step(context.move(v.map(torch.sign)), context.damping)


def test_on_a_gpu_a_finite_step_of_a_gradient_that_is_not_moves_nothing(
    gpu: Callable[[], list[bool]], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = net(), torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Diagonal(), step=Sign(), lr=0.1, damping=0.1)
    gpu()
    monkeypatch.setattr(estimates, "can_read", lambda t: False)
    moved = []
    for spoiled in (False, True):
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        model(x).square().mean().backward()
        grad = model.get_parameter("0.weight").grad
        assert grad is not None
        grad[0, 0] = torch.nan if spoiled else grad[0, 0]
        opt.step()
        moved.append(any(not torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True)))
    assert moved == [True, False]
