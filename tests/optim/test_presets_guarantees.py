"""What every optimizer of the library guarantees, for the presets that train networks; and what they refuse."""

from __future__ import annotations

import inspect
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError, NonFiniteError
from natgrad.optim import natural_of_outputs
from tests import oracle
from tests.optim.tasks import seeded

Make = Callable[..., Any]
FISHER = ng.Fisher(ng.Categorical(), samples=1)


def _fisher(model: nn.Module, **options: Any) -> ng.NaturalGradient:
    return natural_of_outputs(model, FISHER, power=0.75, generator=torch.Generator().manual_seed(3), **options)


PRESETS: dict[str, Make] = {
    "natural": ng.Natural,
    "natural_fisher": _fisher,
    "shampoo": ng.Shampoo,
    "kl_shampoo": partial(ng.Shampoo, fit="kl"),
    "soap": ng.SOAP,
    "muon": ng.Muon,
}
GRADIENTS = [name for name in PRESETS if name != "natural_fisher"]  # whose metric is of the gradient alone


class Net(nn.Module):
    """A convolution, a gain, and two linear layers: matrices, a kernel, and vectors for AdamW."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(1, 3, 2), nn.LayerNorm(6)
        self.hidden, self.last = nn.Linear(6, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 3]."""
        h = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return self.last(torch.tanh(self.hidden(self.norm(h))))


def _net(seed: int = 0, dtype: torch.dtype = torch.float64) -> Net:
    return seeded(lambda: Net().to(dtype), seed)


def _batch(step: int, n: int = 12) -> tuple[Tensor, Tensor]:
    return seeded(lambda: (torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))), 100 + step)


def _train(model: nn.Module, opt: torch.optim.Optimizer, steps: range, parts: tuple[int, ...] = (12,)) -> Tensor:
    dtype = next(model.parameters()).dtype
    for step in steps:
        x, t = _batch(step)
        opt.zero_grad()
        for xs, ts in zip(x.to(dtype).split(list(parts)), t.split(list(parts)), strict=True):
            (F.cross_entropy(model(xs), ts, reduction="sum") / len(x)).backward()
        opt.step()
    return oracle.flatten(model.parameters())


@pytest.mark.parametrize("at", [1, 2, 3, 5, 11])
@pytest.mark.parametrize("name", PRESETS)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, at: int) -> None:
    model = _net()
    opt = PRESETS[name](model, lr=0.01)
    _train(model, opt, range(at))
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    expected = _train(model, opt, range(at, at + 12))
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = _net(seed=9)
    resumed = PRESETS[name](other, lr=0.01)
    other.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["opt"])
    assert torch.equal(_train(other, resumed, range(at, at + 12)), expected)


@pytest.mark.parametrize("name", GRADIENTS)
def test_micro_batches_make_the_steps_of_the_joint_batch(name: str) -> None:
    options = {"iteration": "minimax"} if name == "muon" else {}
    found, expected = (
        _train(model, PRESETS[name](model, lr=0.01, **options), range(12), parts)
        for model, parts in ((_net(), (5, 7)), (_net(), (12,)))
    )
    moved = expected - oracle.flatten(_net().parameters())
    assert (found - expected).norm() <= 1e-8 * moved.norm()


@pytest.mark.parametrize("name", PRESETS)
def test_a_schedule_moves_the_learning_rate_of_all_parameters(name: str) -> None:
    """At the end of the cosine it is zero, and nothing moves."""
    model = _net()
    opt = PRESETS[name](model, lr=0.01)
    schedule = CosineAnnealingLR(opt, 4)
    for step in range(4):
        before = oracle.flatten(model.parameters())
        after = _train(model, opt, range(step, step + 1))
        assert bool((after != before).any())
        schedule.step()
    before = oracle.flatten(model.parameters())
    assert torch.equal(_train(model, opt, range(4, 5)), before)


@pytest.mark.parametrize("name", PRESETS)
def test_tensors_are_made_where_the_model_is_whatever_the_default_device(name: str) -> None:
    make, model, other = PRESETS[name], _net(), _net()
    expected = _train(model, make(model, lr=0.01), range(6))
    batches = [_batch(step) for step in range(6)]
    with torch.device("meta"):
        opt = make(other, lr=0.01)
        for x, t in batches:
            opt.zero_grad()
            (F.cross_entropy(other(x), t, reduction="sum") / len(x)).backward()
            opt.step()
    assert torch.equal(oracle.flatten(other.parameters()), expected)


@pytest.mark.parametrize("name", PRESETS)
def test_groups_have_their_own_rates_and_may_go_to_adamw(name: str) -> None:
    model = _net()
    groups = [
        {"params": [model.hidden.weight], "lr": 0.0},
        {"params": model.last.parameters(), "fallback": "adamw", "weight_decay": 0.0},
    ]
    opt = PRESETS[name](model, lr=0.01, groups=groups)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    hand = [p.detach().clone().requires_grad_() for p in model.last.parameters()]
    adamw = torch.optim.AdamW(hand, lr=0.01, betas=(0.9, 0.95), weight_decay=0.0)
    for step in range(3):
        _train(model, opt, range(step, step + 1))
        for p, q in zip(hand, model.last.parameters(), strict=True):
            p.grad = None if q.grad is None else q.grad.clone()
        adamw.step()
    assert torch.equal(model.hidden.weight, before["hidden.weight"])
    assert not torch.equal(model.conv.weight, before["conv.weight"])
    for p, q in zip(hand, model.last.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", PRESETS)
def test_scaled_losses_make_the_same_steps_and_overflow_makes_none(name: str) -> None:
    """``GradScaler`` divides the gradients by a power of two, and leaves out a step with infinities."""
    found = []
    for scaled in (False, True):
        model = _net()
        opt, scaler = PRESETS[name](model, lr=0.01), torch.amp.GradScaler("cpu", init_scale=2.0**10, enabled=scaled)
        for step in range(5):
            opt.zero_grad()
            x, t = _batch(step)
            scaler.scale(F.cross_entropy(model(x), t)).backward()
            if step == 2 and scaled:  # an overflow beside the four steps of the other run
                before = oracle.flatten(model.parameters())
                assert model.last.weight.grad is not None
                model.last.weight.grad[0, 0] = torch.inf
                scaler.step(opt)
                scaler.update()
                assert torch.equal(oracle.flatten(model.parameters()), before)
                continue
            if step == 2:
                opt.zero_grad()
                continue
            scaler.step(opt)
            scaler.update()
        found.append(oracle.flatten(model.parameters()))
    if name == "natural_fisher":  # it has seen the pass whose step was left out
        assert (found[0] - found[1]).norm() < 0.1 * (found[0] - oracle.flatten(_net().parameters())).norm()
    else:
        assert torch.equal(*found)


@pytest.mark.parametrize("name", PRESETS)
def test_a_step_inside_autocast_is_that_outside(name: str) -> None:
    found = []
    for enabled in (False, True):
        model = _net(dtype=torch.float32)
        opt = PRESETS[name](model, lr=0.01)
        for step in range(3):
            x, t = _batch(step)
            opt.zero_grad()
            F.cross_entropy(model(x.float()), t).backward()
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                opt.step()
        found.append(oracle.flatten(model.parameters()))
    assert torch.equal(*found)


@pytest.mark.parametrize("name", PRESETS)
def test_training_in_bfloat16_stays_finite_and_learns(name: str) -> None:
    model = _net(dtype=torch.bfloat16)
    opt = PRESETS[name](model, lr=0.02)
    x, t = _batch(0)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        loss = F.cross_entropy(model(x.bfloat16()).float(), t)
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("where", ["hidden.weight", "hidden.bias"])  # with a metric, and stepped by AdamW
@pytest.mark.parametrize("name", GRADIENTS)
def test_a_run_goes_on_as_if_a_step_that_was_refused_had_not_been(name: str, where: str) -> None:
    model, other = _net(), _net()
    opt, again = PRESETS[name](model, lr=0.01), PRESETS[name](other, lr=0.01)
    _train(model, opt, range(3))
    x, t = _batch(50)
    F.cross_entropy(model(x), t).backward()
    model.get_parameter(where).grad.view(-1)[0] = torch.nan  # type: ignore[union-attr]
    with pytest.raises(NonFiniteError, match=f"the gradient of {where} holds NaN"):
        opt.step()
    assert torch.equal(_train(model, opt, range(3, 6)), _train(other, again, range(6)))


# Zeros.


@pytest.mark.parametrize("name", GRADIENTS)
def test_a_first_batch_of_zeros_moves_nothing_but_by_weight_decay(name: str) -> None:
    model = _net()
    opt = PRESETS[name](model, lr=0.01, weight_decay=0.1)
    before = oracle.flatten(model.parameters())
    (0 * model(_batch(0)[0]).sum()).backward()
    opt.step()
    torch.testing.assert_close(oracle.flatten(model.parameters()), (1 - 0.001) * before, rtol=1e-12, atol=1e-14)
    start = oracle.flatten(model.parameters())
    moved = _train(model, opt, range(1, 4)) - start
    assert bool(moved.isfinite().all())
    assert float(moved.abs().max()) < 0.2  # no step by a gradient over rounding


@pytest.mark.parametrize("name", GRADIENTS)
def test_units_without_a_gradient_do_not_move(name: str) -> None:
    """Dead units have rows of zeros in the gradient: their factors vanish there, and a whole dead layer's all over."""

    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.dead, self.last = nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            mask = torch.tensor([1.0, 1.0, 0.0, 0.0], dtype=x.dtype)
            return self.last(torch.tanh(self.used(x)) * mask + 0 * self.dead(x))

    model = seeded(lambda: Half().double())
    opt = PRESETS[name](model, lr=0.01, weight_decay=0.0)
    before = {key: p.detach().clone() for key, p in model.named_parameters()}
    for step in range(6):
        opt.zero_grad()
        model(_batch(step)[0]).square().sum().backward()
        opt.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())
    assert torch.equal(model.dead.weight, before["dead.weight"])
    moved = model.used.weight.detach() - before["used.weight"]
    assert float(moved[2:].abs().max()) < 1e-6 * float(moved[:2].abs().max())


@pytest.mark.parametrize("scale", [1e-18, 1e-20, 1e-21, 1e-30])
@pytest.mark.parametrize("name", [name for name in GRADIENTS if name != "muon"])
def test_gradients_whose_squares_vanish_make_no_step_and_the_other_layers_theirs(name: str, scale: float) -> None:
    """In single precision, where squares are rounded below 10⁻³⁸ and vanish below 10⁻⁴⁵."""
    found = []
    for factor in (scale, 0.0):
        model = _net(dtype=torch.float32)
        before = model.hidden.weight.detach().clone()
        opt = PRESETS[name](model, lr=0.01, weight_decay=0.0)
        for step in range(5):
            x, t = _batch(step)
            opt.zero_grad()
            F.cross_entropy(model(x.float()), t).backward()
            assert model.hidden.weight.grad is not None
            model.hidden.weight.grad.mul_(factor)
            opt.step()
        assert torch.equal(model.hidden.weight, before)
        found.append(oracle.flatten(model.parameters()))
    assert torch.equal(*found)


SMALL: dict[str, Make] = {
    "natural": ng.Natural,
    "natural_power": partial(ng.Natural, power=1.0),
    "shampoo": partial(ng.Shampoo, power=0.75),
}


@pytest.mark.parametrize("name", SMALL)
def test_small_gradients_make_the_steps_of_large_ones(name: str) -> None:
    """Of 10⁻¹⁵ in single precision: v is up to 10³⁰, its squares leave the range, and its direction is that of ever."""
    moved = []
    for scale in (1.0, 2.0**-50):
        linear = seeded(lambda: nn.Linear(4, 3, bias=False))
        before = linear.weight.detach().clone()
        opt = SMALL[name](linear, lr=0.01, weight_decay=0.0)
        for step in range(5):
            linear.weight.grad = scale * seeded(lambda: torch.randn(3, 4), step)
            opt.step()
        moved.append(linear.weight.detach() - before)
    assert (moved[1] - moved[0]).norm() < 0.01 * moved[0].norm()


# Bad input.


def test_every_argument_is_visible_and_given_by_name() -> None:
    for make in (ng.Natural, ng.Shampoo, ng.SOAP, ng.Muon):
        kinds = [p.kind for p in inspect.signature(make).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD not in kinds
        positional = [name for name, p in inspect.signature(make).parameters.items() if p.kind != p.KEYWORD_ONLY]
        assert positional == (["params", "metric"] if make is ng.Natural else ["params"])


ERRORS: dict[str, tuple[Callable[[Any], Any], type[Exception], str]] = {
    "power_above": (lambda m: ng.Natural(m, power=1.5), ValueError, "power between 0 and 1, got 1.5"),
    "power_below": (lambda m: ng.Shampoo(m, power=-0.25), ValueError, "power between 0 and 1, got -0.25"),
    "power_bool": (lambda m: ng.Natural(m, power=True), ValueError, "power between 0 and 1, got True"),
    "rms": (lambda m: ng.Muon(m, rms=0.0), ValueError, "must be positive and finite, got 0.0"),
    "damping": (lambda m: ng.Natural(m, damping=ng.Relative(-1.0)), ValueError, "must be positive and finite, got -1"),
    "fit": (lambda m: ng.Shampoo(m, fit="best"), ValueError, 'is "mean" or "kl", not \'best\''),  # type: ignore[arg-type]
    "basis": (
        lambda m: ng.SOAP(m, basis_every=0),
        ValueError,
        r"SOAP\(basis_every=…\) must be a whole number of steps, at least 1",
    ),
    "factors": (
        lambda m: natural_of_outputs(m, FISHER, factors="half"),  # type: ignore[arg-type]
        ValueError,
        'is "diagonal" or "whole", not \'half\'',
    ),
    "largest": (
        lambda m: natural_of_outputs(m, FISHER, largest=8),
        ValueError,
        "bounds whole factors, and these are diagonals",
    ),
    "metric": (lambda m: ng.Natural(m, "fisher"), TypeError, "metric"),  # type: ignore[arg-type]
    "polar": (
        lambda m: ng.Muon(m, groups=[{"params": list(m.parameters()), "fallback": None}]),
        IncompatibleError,
        "fewer than two axes: conv.bias, norm.weight, norm.bias, hidden.bias, last.bias",
    ),
    "vectors": (lambda m: ng.Natural(m.norm), ValueError, "leaves no parameter for the metric"),
    "momentum": (lambda m: ng.SOAP(m, momentum=1.0), ValueError, r"momentum must be in \[0, 1\), got 1.0"),
    "lr": (lambda m: ng.Natural(m, lr="0.1"), TypeError, "lr must be a number, got '0.1'"),  # type: ignore[arg-type]
    "rates": (lambda m: ng.Muon(m, lr=torch.ones(2)), TypeError, r"lr must be a number, got tensor"),  # type: ignore[arg-type]
    "decay": (lambda m: ng.Shampoo(m, decay=None), ValueError, r"must be in \[0, 1\), got None"),  # type: ignore[arg-type]
    "size": (lambda m: ng.Natural(m, rms="a"), ValueError, "must be positive and finite, got a"),  # type: ignore[arg-type]
    "damping_none": (lambda m: ng.SOAP(m, damping=None), TypeError, "damping must be a number, got None"),  # type: ignore[arg-type]
    "every": (
        lambda m: natural_of_outputs(m, FISHER, metric_every=1.5),  # type: ignore[arg-type]
        TypeError,
        r"\(every=…\) must be a whole number of steps, got 1.5",
    ),
    "inverse": (
        lambda m: ng.KFAC(m, nn.CrossEntropyLoss(), inverse_every=float("nan")),  # type: ignore[arg-type]
        TypeError,
        r"\(inverse=…\) must be a whole number of steps, got nan",
    ),
    "parameters": (
        lambda m: ng.Natural(3),  # type: ignore[arg-type]
        TypeError,
        "takes a model, or its parameters, not int",
    ),
    "never": (lambda m: natural_of_outputs(m, FISHER, metric_every=None), TypeError, "number of steps, got None"),  # type: ignore[arg-type]
    "early": (lambda m: ng.SOAP(m, early="yes"), TypeError, "early must be True or False, got 'yes'"),  # type: ignore[arg-type]
    "nesterov": (lambda m: ng.Muon(m, nesterov=1), TypeError, "nesterov must be True or False, got 1"),  # type: ignore[arg-type]
    "moments": (lambda m: ng.SOAP(m, moments="kept"), ValueError, 'is "carried" or "sorted", not \'kept\''),  # type: ignore[arg-type]
    "polar_number": (lambda m: ng.Natural(m, polar=3), TypeError, "polar must be True or False, got 3"),  # type: ignore[arg-type]
    "rows": (lambda m: ng.Shampoo(m, largest=1.5), TypeError, "largest must be a whole number"),  # type: ignore[arg-type]
    "groups": (lambda m: ng.Muon(m, groups=3), TypeError, "groups must be a list of dicts"),  # type: ignore[arg-type]
    "strict": (lambda m: ng.KFAC(m, ng.Euclidean(), strict="x"), TypeError, "strict must be True"),  # type: ignore[arg-type]
    "memory": (lambda m: ng.KFAC(m, ng.Euclidean(), memory="a"), TypeError, "a number of bytes"),  # type: ignore[arg-type]
    "generator": (lambda m: ng.KFAC(m, ng.Euclidean(), generator=3), TypeError, "torch.Generator"),  # type: ignore[arg-type]
    "output": (lambda m: ng.KFAC(m, ng.Euclidean(), output=3), TypeError, "function of what the"),  # type: ignore[arg-type]
    "group": (lambda m: ng.Natural(m, groups=[{"lr": 0.1}]), TypeError, r"one of them is \{'lr': 0.1\}"),
    "group_dict": (lambda m: ng.Muon(m, groups={"params": []}), TypeError, "one of them is 'params'"),  # type: ignore[dict-item]
    "group_names": (
        lambda m: ng.KFAC(m, nn.CrossEntropyLoss(), groups=[{"params": m.last.named_parameters()}]),
        TypeError,
        "groups= is a list of dicts",
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_input_is_refused_by_name(name: str) -> None:
    make, kind, match = ERRORS[name]
    with pytest.raises(kind, match=match):
        make(_net())


def test_a_metric_that_needs_targets_says_how_to_give_them() -> None:
    model = _net()
    opt: Any = ng.Natural(model, ng.Empirical(F.cross_entropy))
    x, t = _batch(0)
    F.cross_entropy(model(x), t).backward()
    with pytest.raises(NatgradError, match=r"needs the targets: call opt.refresh\(x, target\) before opt.step"):
        opt.step()
    opt.refresh(x, t)
    opt.step()


def test_a_step_without_gradients_says_what_is_missing() -> None:
    for make in PRESETS.values():
        with pytest.raises(ValueError, match=r"call loss\.backward"):
            make(_net()).step()
