"""The first step compares the gradient that comes to the outputs with that of the loss that was given."""

from __future__ import annotations

import copy
import gc
import logging
import re
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import LossMismatchError
from natgrad.watch import LossWatch
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import close, normal
from tests.zoo import mlp

N, C = 6, 3


class Pixels(nn.Module):
    """Classes [n c h w], and with ``last`` [n h w c]."""

    def __init__(self, last: bool = False) -> None:
        super().__init__()
        self.layer, self.last = nn.Conv2d(2, 4, 1), last

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y.movedim(1, -1) if self.last else y


class Named(nn.Module):
    """A model that returns its outputs in a dict."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"y": self.body(x)}


Train = Callable[[Any], Tensor]
Case = tuple[nn.Module, Tensor, Any, Train]


def vectors(width: int = C) -> tuple[nn.Module, Tensor]:
    return seeded(lambda: mlp(3, 4, width).double()), normal(N, 3)


LABELS, COINS = torch.arange(N) % C, (normal(N, C, seed=4) > 0).double()
MAP = torch.arange(2 * 3 * 5).reshape(2, 3, 5) % 4


def messages(caplog: pytest.LogCaptureFixture, level: int = logging.WARNING) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= level]


def run(model: nn.Module, x: Tensor, loss: Any, train: Train, steps: int = 3, **options: Any) -> None:
    opt = options.pop("preset", ng.KFAC)(model, loss, lr=1e-3, **options)
    for _ in range(steps):
        opt.zero_grad()
        train(model(x)).backward()
        opt.step()


LOSSES: dict[str, tuple[Any, Train]] = {
    "cross entropy": (F.cross_entropy, lambda y: F.cross_entropy(y, LABELS)),
    "a module": (nn.CrossEntropyLoss(), lambda y: nn.CrossEntropyLoss()(y, LABELS)),
    "ignored labels": (F.cross_entropy, lambda y: F.cross_entropy(y, LABELS.masked_fill(LABELS == 1, -100))),
    "soft labels": (F.cross_entropy, lambda y: F.cross_entropy(y, torch.softmax(normal(N, C, seed=3), 1))),
    "smooth labels": (
        nn.CrossEntropyLoss(label_smoothing=0.2),
        lambda y: F.cross_entropy(y, LABELS, label_smoothing=0.2),
    ),
    "squares": (F.mse_loss, lambda y: F.mse_loss(y, normal(N, C, seed=5))),
}


@pytest.mark.parametrize("name", LOSSES)
def test_nothing_is_said_where_the_loss_is_the_one_given(name: str, caplog: pytest.LogCaptureFixture) -> None:
    loss, train = LOSSES[name]
    with caplog.at_level(logging.INFO, "natgrad"):
        run(*vectors(), loss, train, strict=True)
    assert not [m for m in messages(caplog, logging.INFO) if "the gradient at" in m]


def test_pixels_have_their_classes_where_the_loss_reads_them(caplog: pytest.LogCaptureFixture) -> None:
    x = normal(2, 2, 3, 5)
    run(seeded(lambda: Pixels().double()), x, F.cross_entropy, lambda y: F.cross_entropy(y, MAP), strict=True)
    run(
        seeded(lambda: Pixels(last=True).double()),
        x,
        ng.metric_of(F.cross_entropy, axis=-1),
        lambda y: F.cross_entropy(y.movedim(-1, 1), MAP),
        strict=True,
    )
    assert not messages(caplog)


WRONG: dict[str, tuple[Case, str]] = {
    "another family": (
        (*vectors(), F.mse_loss, lambda y: F.cross_entropy(y, LABELS)),
        r"the gradient at the outputs is that of cross entropy over axis 1, and the metric was made from MSELoss\(\): "
        r"give nn\.CrossEntropyLoss\(\)",
    ),
    "coins": (
        (*vectors(), F.cross_entropy, lambda y: F.binary_cross_entropy_with_logits(y, COINS)),
        r"is that of binary cross entropy, and the metric was made from CrossEntropyLoss\(\): give nn\.BCEWithLogits",
    ),
    "squares of logits": (
        (*vectors(), F.cross_entropy, lambda y: F.mse_loss(y, normal(N, C))),
        r"the gradient at the outputs is not that of CrossEntropyLoss\(\), from which the metric was made",
    ),
    "an added term": (
        (*vectors(), nn.CrossEntropyLoss(), lambda y: F.cross_entropy(y, LABELS) + 0.1 * y.square().mean()),
        r"the gradient at the outputs is not that of CrossEntropyLoss\(\)",
    ),
    "another axis": (
        (
            seeded(lambda: Pixels().double()),
            normal(2, 2, 3, 5),
            ng.metric_of(F.cross_entropy, axis=-1),
            lambda y: F.cross_entropy(y, MAP),
        ),
        r"cross entropy with the classes on axis 1 of 4, .*give it as metric_of\(loss, axis=1\)",
    ),
    "a sum": (
        (*vectors(), F.cross_entropy, lambda y: F.cross_entropy(y, LABELS, reduction="sum")),
        r'that of the sum over 6 terms, and the metric that of the mean: give the loss with reduction="sum"',
    ),
    "a mean": (
        (*vectors(), nn.CrossEntropyLoss(reduction="sum"), lambda y: F.cross_entropy(y, LABELS)),
        r'that of the mean over 6 terms, and the metric that of the sum: give the loss with reduction="mean"',
    ),
    "a weight": (
        (*vectors(), F.cross_entropy, lambda y: 0.7 * F.cross_entropy(y, LABELS)),
        r"is 0\.7 times that of CrossEntropyLoss\(\), and the metric is not",
    ),
}


ACTIONS = LABELS[:, None]


def _chosen(y: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    actions, values = target
    return F.mse_loss(y.gather(1, actions), values)


@pytest.mark.parametrize("given", [nn.MSELoss(), F.huber_loss, nn.BCEWithLogitsLoss()])
def test_terms_without_a_gradient_are_told_where_the_metric_counts_them(
    given: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Values of the actions that were taken: one of three outputs has a gradient."""
    values = normal(N, 1, seed=6).sigmoid()
    run(*vectors(), given, lambda y: given(y.gather(1, ACTIONS), values))
    (said,) = messages(caplog)
    assert "67% of the terms of the outputs have no gradient" in said
    with pytest.raises(LossMismatchError, match="67% of the terms"):
        run(*vectors(), given, lambda y: given(y.gather(1, ACTIONS), values), strict=True)


def _near(y: Tensor) -> Tensor:
    """Targets that rounding makes equal to many of the outputs."""
    return (y.detach() * (1 + 0.01 * normal(*y.shape, seed=8))).to(y.dtype)


EQUAL: dict[str, tuple[Callable[[Tensor], Tensor], torch.dtype, Any, Train]] = {
    "behind a clamp": (
        lambda y: y.clamp(-0.01, 0.01),
        torch.float64,
        F.mse_loss,
        lambda y: F.mse_loss(y, 0.02 * COINS - 0.01),
    ),
    "certain coins": (
        lambda y: 1e3 * y,
        torch.float64,
        nn.BCEWithLogitsLoss(),
        lambda y: F.binary_cross_entropy_with_logits(y, COINS),
    ),
    "in bfloat16": (lambda y: y, torch.bfloat16, F.mse_loss, lambda y: F.mse_loss(y, _near(y))),
}


class Ended(nn.Module):
    """A network with a function behind it."""

    def __init__(self, net: nn.Module, end: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.net, self.end = net, end

    def forward(self, x: Tensor) -> Tensor:
        return self.end(self.net(x))


@pytest.mark.parametrize("name", EQUAL)
def test_outputs_that_equal_their_targets_are_no_mask(name: str, caplog: pytest.LogCaptureFixture) -> None:
    end, dtype, given, train = EQUAL[name]
    model, x = vectors()
    run(Ended(model, end).to(dtype), x.to(dtype), given, train, steps=1)
    assert not messages(caplog)


def test_the_loss_with_its_mask_has_the_metric_of_the_terms_that_are_trained() -> None:
    (model, x), values = vectors(), normal(N, 1, seed=6)
    other = copy.deepcopy(model)
    opt = ng.NaturalGradient(model, _chosen, strict=True)
    opt.refresh(x, (ACTIONS, values))
    _chosen(model(x), (ACTIONS, values)).backward()
    opt.step()
    opt = ng.NaturalGradient(other, nn.MSELoss(), output=lambda y: y.gather(1, ACTIONS))
    _chosen(other(x), (ACTIONS, values)).backward()
    opt.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("name", WRONG)
def test_another_loss_is_named_once_with_the_way_out_and_strict_refuses_it(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    (model, x, loss, train), match = WRONG[name]
    run(copy.deepcopy(model), x, loss, train)
    (said,) = messages(caplog)
    with pytest.raises(LossMismatchError, match=match) as error:
        run(model, x, loss, train, strict=True)
    assert str(error.value) == said


HARMLESS: dict[str, tuple[float, str]] = {
    "accumulation": (0.25, "is 1/4 of that of CrossEntropyLoss(), as in accumulation over 4 passes"),
    "scaler": (65536.0, "is 65536 times that of CrossEntropyLoss(), as a GradScaler makes it"),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_factors_of_accumulation_and_of_a_scaler_are_said_and_no_error(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    factor, words = HARMLESS[name]
    with caplog.at_level(logging.INFO, "natgrad"):
        run(*vectors(), F.cross_entropy, lambda y: factor * F.cross_entropy(y, LABELS), strict=True)
    assert len([m for m in messages(caplog, logging.INFO) if words in m]) == 1
    assert not messages(caplog)


def test_micro_batches_of_unequal_size_are_no_weight(caplog: pytest.LogCaptureFixture) -> None:
    """The mean over all examples, of which the first pass has 2/3; one pass alone with this factor is warned of."""
    model, x = vectors()
    opt = ng.KFAC(model, F.cross_entropy, strict=True)
    with caplog.at_level(logging.INFO, "natgrad"):
        for xs, ts in ((x[:4], LABELS[:4]), (x[4:], LABELS[4:])):
            (F.cross_entropy(model(xs), ts, reduction="sum") / N).backward()
        opt.step()
    assert [m for m in messages(caplog, logging.INFO) if "is 0.667 of that of CrossEntropyLoss(), one of 2" in m]
    assert not messages(caplog)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(reduction="sum"), nn.BCEWithLogitsLoss(reduction="sum")])
def test_micro_batches_of_a_sum_are_told(loss: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    """Their gradients add up, and their metrics are averaged. A pass without a backward pass is none of them."""
    model, x = vectors()
    t = F.one_hot(LABELS).double()
    opt = ng.KFAC(copy.deepcopy(model), loss, strict=True)
    loss(opt.tracker.module(x), t).backward()
    opt.tracker.module(x)
    opt.step()
    opt = ng.KFAC(model, loss)
    for part in (slice(0, 2), slice(2, N)):
        loss(model(x[part]), t[part]).backward()
    opt.step()
    (said,) = messages(caplog)
    assert "the loss is a sum over the examples, and the gradient that of 2 passes" in said


def test_terms_that_do_not_count_alike_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """A focal loss, or a mean over sequences of different lengths: the gradient of every term is that of the loss."""
    w = torch.linspace(0.5, 1.5, N, dtype=torch.float64)
    with caplog.at_level(logging.INFO, "natgrad"):
        train = lambda y: (w * F.cross_entropy(y, LABELS, reduction="none")).mean()  # noqa: E731
        run(*vectors(), F.cross_entropy, train, strict=True)
    (said,) = [m for m in messages(caplog, logging.INFO) if "the terms of the gradient" in m]
    assert "have 0.5 to 1.5 times the weights that they have in CrossEntropyLoss()" in said


def test_a_step_that_knows_no_scale_is_not_warned_of_one(caplog: pytest.LogCaptureFixture) -> None:
    model, x = vectors()
    train = lambda y: F.cross_entropy(y, LABELS, reduction="sum")  # noqa: E731
    with caplog.at_level(logging.INFO, "natgrad"):
        run(model, x, F.cross_entropy, train, preset=ng.Natural, strict=True)
    assert not messages(caplog)
    assert [m for m in messages(caplog, logging.INFO) if "sum over 6 terms" in m]


def test_a_module_that_is_called_shows_its_targets(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing else tells a mean of squares from a sum."""
    loss, other, t = nn.MSELoss(), nn.MSELoss(), normal(N, C, seed=5)
    run(*vectors(), loss, lambda y: loss(y.view(-1), t.view(-1)), strict=True)
    assert not messages(caplog)
    match = r"is 18 times|that of the sum over 18 terms, and the metric that of the mean"
    with pytest.raises(LossMismatchError, match=match):
        run(*vectors(), loss, lambda y: 18 * loss(y, t), strict=True)
    with pytest.raises(LossMismatchError, match="is not that of MSELoss"):
        run(*vectors(), loss, lambda y: loss(y, t) + y.abs().mean(), strict=True)
    run(*vectors(), loss, lambda y: 18 * other(y, t), strict=True)  # which cannot be seen
    assert not loss._forward_pre_hooks


def test_mixed_labels_are_calls_of_the_loss_given(caplog: pytest.LogCaptureFixture) -> None:
    """The Hessian of Σ_j α_j L(y, t_j) is Σ_j α_j times that of L, for losses whose Hessian has no targets in it."""
    loss, other = nn.CrossEntropyLoss(), LABELS.roll(1)
    run(*vectors(), loss, lambda y: 0.3 * loss(y, LABELS) + 0.7 * loss(y, other), strict=True)
    run(*vectors(), loss, lambda y: loss(y, LABELS) + 0 * loss(y.detach(), other), strict=True)
    assert not messages(caplog)
    with pytest.raises(LossMismatchError, match=r"is 1\.7 times that of CrossEntropyLoss"):
        run(*vectors(), loss, lambda y: loss(y, LABELS) + 0.7 * loss(y, other), strict=True)
    with pytest.raises(LossMismatchError, match="is not that of CrossEntropyLoss"):
        run(*vectors(), loss, lambda y: loss(y, LABELS) + loss(y, other) + y.square().mean(), strict=True)
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())  # the metric has one call's targets
    mixed: Train = lambda y: 0.3 * weighted(y, LABELS) + 0.7 * weighted(y, other)  # noqa: E731
    with pytest.raises(LossMismatchError, match=r"called with two targets on the outputs of one pass.*Empirical\(\)"):
        run(*vectors(), weighted, mixed, strict=True)
    run(*vectors(), weighted, mixed, metric_every=1)
    (said,) = messages(caplog)
    assert "two targets" in said
    run(*vectors(), weighted, lambda y: weighted(y, LABELS) + 0 * weighted(y, LABELS.double().long()), strict=True)


class Missing(nn.Module):
    """Squares of what is not NaN in a pair of targets."""

    def forward(self, y: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
        return sum((torch.where(t.isnan(), y, t) - y).square().mean() for t in target) / 2  # type: ignore[return-value]


def test_targets_are_compared_part_by_part_and_values_that_are_missing_are_equal() -> None:
    loss, t = Missing(), normal(N, C, seed=5)
    t[0, 0] = torch.nan
    run(*vectors(), loss, lambda y: 0.5 * loss(y, (t, t)) + 0.5 * loss(y, (t.clone(), t.clone())), strict=True)
    with pytest.raises(LossMismatchError, match="two targets"):
        run(*vectors(), loss, lambda y: 0.5 * loss(y, (t, t)) + 0.5 * loss(y, (t, t + 1)), strict=True)


class Inside(torch.autograd.Function):
    """A loss that is called where gradients are off."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, loss: Callable[..., Tensor]) -> Tensor:
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            (ctx.slope,) = torch.autograd.grad(F.cross_entropy(leaf, LABELS, loss.weight), leaf)  # type: ignore[attr-defined]
        return loss(y, LABELS)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Any:
        return cotangents[0] * ctx.slope, None


def test_a_call_without_gradients_has_the_targets_if_no_other_has() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 50.0, 0.1]).double())
    found = []
    for train in (lambda y: loss(y, LABELS), lambda y: Inside.apply(y, loss)):  # type: ignore[no-untyped-call]
        model, x = vectors()
        run(model, x, loss, train, metric_every=1, strict=True)
        found.append(model.state_dict())
    torch.testing.assert_close(found[0], found[1])


def _logged(loss: nn.Module, y: Tensor) -> None:
    with torch.no_grad():
        loss(y, LABELS.roll(1))


BESIDE: dict[str, Callable[[nn.Module, Tensor], object]] = {
    "without gradients": _logged,
    "detached": lambda loss, y: loss(y.detach(), LABELS.roll(1)),
    "in torch.func": lambda loss, y: torch.func.hessian(lambda z: loss(z, LABELS.roll(1)))(y.detach()),
    "once more": lambda loss, y: loss(y, LABELS.clone()),
}


@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 50.0, 0.1]).double()], ids=["plain", "weighted"])
def test_calls_of_the_loss_that_train_nothing_change_nothing(
    beside: str, weight: Tensor | None, caplog: pytest.LogCaptureFixture
) -> None:
    loss = nn.CrossEntropyLoss(weight=weight)

    def trained(train: Train) -> dict[str, Any]:
        model, x = vectors()
        run(model, x, loss, train, metric_every=1, strict=True)
        return model.state_dict()

    def told(y: Tensor) -> Tensor:
        value: Tensor = loss(y, LABELS)
        BESIDE[beside](loss, y)
        return value

    torch.testing.assert_close(trained(told), trained(lambda y: loss(y, LABELS)), rtol=0.0, atol=0.0)
    assert not messages(caplog)


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.MSELoss()], ids=repr)
def test_as_many_passes_as_terms_are_accumulated_and_no_sum(loss: nn.Module, caplog: pytest.LogCaptureFixture) -> None:
    model, x = vectors()
    target = LABELS if isinstance(loss, nn.CrossEntropyLoss) else normal(N, C, seed=5)
    passes = N if isinstance(loss, nn.CrossEntropyLoss) else N * C
    opt = ng.KFAC(model, loss, strict=True)
    with caplog.at_level(logging.INFO, "natgrad"):
        for _ in range(passes):
            (loss(model(x), target) / passes).backward()
        opt.step()
    assert [m for m in messages(caplog, logging.INFO) if f"as in accumulation over {passes} passes" in m]


class InArray(torch.autograd.Function):
    """The identity, whose result lies in an array that tells when its memory is freed."""

    arrays: ClassVar[list[weakref.ref[Any]]] = []

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        array = y.detach().numpy().copy()
        InArray.arrays.append(weakref.ref(array))
        return torch.from_numpy(array)

    @staticmethod
    def backward(ctx: Any, *cotangents: Tensor) -> Tensor:
        return cotangents[0]


class Arrays(nn.Module):
    """A linear layer whose outputs lie in arrays."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, C)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = InArray.apply(self.layer(x))  # type: ignore[no-untyped-call]
        return y


def test_the_outputs_that_are_compared_stay_in_memory_until_the_step() -> None:
    """Else those of the next micro-batch may lie where they were, and calls of its loss would be taken for theirs."""
    loss, model = nn.CrossEntropyLoss(), seeded(lambda: Arrays().double())
    opt = ng.KFAC(model, loss)
    InArray.arrays.clear()
    loss(model(normal(N, 3)), LABELS).backward()
    (array,) = InArray.arrays
    assert array() is not None
    opt.step()
    assert array() is None


class Margin(nn.Module):
    """A loss of nobody's but the user's."""

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        return F.softplus(-target * input).mean()


def test_a_loss_of_the_user_s_own_is_compared_where_it_is_called() -> None:
    loss, t = Margin(), COINS * 2 - 1
    run(*vectors(), loss, lambda y: loss(y, t), strict=True)
    with pytest.raises(LossMismatchError, match=r"the gradient at the outputs is 2 times that of Margin\(\)"):
        run(*vectors(), loss, lambda y: 2 * loss(y, t), strict=True)
    with pytest.raises(LossMismatchError, match=r"the gradient at the outputs is not that of Margin\(\)"):
        run(*vectors(), loss, lambda y: loss(y, t) + y.square().mean(), strict=True)


class Last(nn.Module):
    """The outputs of the last position of a sequence, or some of them: a part of a larger tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y[:, -1, :C]


def test_outputs_that_are_a_part_of_a_larger_tensor() -> None:
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double())
    net, x = seeded(lambda: Last().double()), normal(N, 2, 3)
    run(net, x, loss, lambda y: loss(y, LABELS), strict=True)
    flat, t = nn.MSELoss(), normal(C, N, seed=5)
    run(net, x, flat, lambda y: flat(y.mT, t), strict=True)
    with pytest.raises(LossMismatchError, match="is 3 times that of MSELoss"):
        run(net, x, flat, lambda y: 3 * flat(y.mT, t), strict=True)


def test_one_number_is_not_taken_for_another_loss() -> None:
    """Any two vectors of one number are parallel: online regression is not binary cross entropy."""
    net, _ = vectors(1)
    run(net, normal(1, 3), F.mse_loss, lambda y: F.mse_loss(y, torch.ones(1, 1).double()), strict=True)


class Learned(nn.Module):
    """A loss with parameters of its own, which are drawn when it is made."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(C, C).double()

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        error: Tensor = self.layer(input) - target
        return error.square().mean()


def test_a_loss_of_the_user_s_own_is_not_made_again_and_hears_of_no_other_calls() -> None:
    """The random stream does not move, and two passes may wait for their losses together."""
    (net, x), loss, t, calls = vectors(), Learned(), normal(N, C, seed=5), []
    loss.register_forward_hook(lambda *_: calls.append(1))
    opt = ng.KFAC(net, loss, lr=1e-3)
    assert "Learned(…)" in repr(ng.metric_of(loss))
    before = torch.get_rng_state()
    (loss(net(x), t) + loss(net(x + 1), t)).backward()
    opt.step()
    assert torch.equal(before, torch.get_rng_state())
    assert len(calls) == 2


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, C), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"a": self.a(h), "b": self.b(h), "h": h}


def both(out: dict[str, Tensor], w: float = 1.0) -> Tensor:
    return F.cross_entropy(out["a"], LABELS) + w * F.cross_entropy(out["b"], LABELS % 2)


def two_heads() -> tuple[nn.Module, Tensor]:
    return seeded(lambda: TwoHeads().double()), normal(N, 3)


def test_heads_are_compared_each_with_its_loss_and_weight(caplog: pytest.LogCaptureFixture) -> None:
    losses = {"a": F.cross_entropy, "b": F.cross_entropy}
    run(*two_heads(), losses, both, strict=True)
    run(*two_heads(), ng.metric_of(losses, weights={"b": 0.3}), lambda out: both(out, 0.3), strict=True)
    assert not messages(caplog)
    with pytest.raises(LossMismatchError, match=r"the gradient at the head 'b' is 0\.3 times that of CrossEntropyLoss"):
        run(*two_heads(), losses, lambda out: both(out, 0.3), strict=True)
    with pytest.raises(LossMismatchError, match="no gradient comes to the head 'b': its loss is not in what backward"):
        run(*two_heads(), losses, lambda out: F.cross_entropy(out["a"], LABELS), strict=True)


@pytest.mark.parametrize("preset", [ng.KFAC, ng.Natural])
@pytest.mark.parametrize("weight", [0.5, 0.25, 2.0, 2.0**12])
def test_a_weight_of_one_head_is_not_taken_for_accumulation_or_a_scaler(
    preset: Any, weight: float, caplog: pytest.LogCaptureFixture
) -> None:
    """Nor for a scale of the loss, of which the steps of ``Natural`` are free: those have it alike in all heads."""
    losses = {"a": F.cross_entropy, "b": F.cross_entropy}
    match = re.escape(f"the gradient at the head 'b' is {weight:.3g} times that of CrossEntropyLoss")
    with pytest.raises(LossMismatchError, match=match):
        run(*two_heads(), losses, lambda out: both(out, weight), preset=preset, strict=True)
    run(*two_heads(), losses, lambda out: both(out) / 4, preset=preset, strict=True)
    assert not messages(caplog)


def test_a_head_that_the_metric_does_not_see_is_named() -> None:
    """Activations that the outputs are made of are none."""
    with pytest.raises(LossMismatchError, match="the output 'b' is trained, too, and the metric does not see it"):
        run(*two_heads(), {"a": F.cross_entropy}, both, strict=True)
    run(*two_heads(), {"a": F.cross_entropy}, lambda out: F.cross_entropy(out["a"], LABELS), strict=True)


def test_later_steps_look_at_nothing_until_the_outputs_have_another_form() -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(3, C), 0

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.layer(x)
            return y if y.ndim == 2 else y.movedim(-1, 1)

    model = seeded(lambda: Rows().double())
    opt = ng.KFAC(model, F.cross_entropy, lr=1e-3, strict=True, metric_every=1)
    hooks: list[bool] = []

    def train(x: Tensor, t: Tensor, factor: float = 1.0) -> None:
        opt.zero_grad()
        y = model(x)
        hooks.append(any(watcher._watched for watcher in opt.watchers if isinstance(watcher, LossWatch)))
        (factor * F.cross_entropy(y, t)).backward()
        opt.step()

    train(normal(N, 3), LABELS)
    train(normal(N, 3), LABELS, factor=0.7)
    train(normal(4, 3), LABELS[:4], factor=0.7)
    with pytest.raises(LossMismatchError, match=r"is 0\.7 times"):
        train(normal(N, 4, 3), LABELS[:, None].expand(N, 4), factor=0.7)
    assert hooks == [True, False, False, True]


def test_a_step_that_is_refused_has_changed_nothing_and_another_is_made() -> None:
    model, x = vectors()
    before = copy.deepcopy(model.state_dict())
    opt = ng.KFAC(model, F.cross_entropy, strict=True)
    F.mse_loss(model(x), normal(N, C)).backward()
    with pytest.raises(LossMismatchError):
        opt.step()
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())
    opt.zero_grad()
    F.cross_entropy(model(x), LABELS).backward()
    opt.step()


def test_without_watchers_another_loss_is_trained_and_the_steps_are_the_same(caplog: pytest.LogCaptureFixture) -> None:
    trained = []
    for watched in (True, False):
        model, x = vectors()
        opt = ng.KFAC(model, F.cross_entropy, strict=watched)
        if not watched:
            opt.watchers.clear()
        for _ in range(2):
            opt.zero_grad()
            F.cross_entropy(model(x), LABELS).backward()
            opt.step()
        trained.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    assert torch.equal(*trained)
    model, x = vectors()
    opt = ng.KFAC(model, F.cross_entropy, strict=True)
    opt.watchers.clear()
    F.mse_loss(model(x), normal(N, C)).backward()
    opt.step()
    assert not messages(caplog)


def test_a_metric_that_was_made_from_no_loss_is_compared_with_none(caplog: pytest.LogCaptureFixture) -> None:
    run(*vectors(), ng.Fisher(ng.Categorical()), lambda y: y.square().mean(), strict=True)
    assert not messages(caplog)


def test_a_compiled_pass_shows_nothing_and_the_log_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = vectors()
    compiled: Any = torch.compile(model, backend="eager")
    with caplog.at_level(logging.INFO, "natgrad"):
        run(compiled, x, F.mse_loss, lambda y: F.mse_loss(y, normal(N, C, seed=5)), strict=True)
    assert len([m for m in messages(caplog, logging.INFO) if "a compiled pass does not show its gradients" in m]) == 1


class InHalf(nn.Module):
    """Computes its own loss, and returns its logits in another precision, or others than those of the loss."""

    def __init__(self, same: bool) -> None:
        super().__init__()
        self.layer, self.same = nn.Linear(3, C), same

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layer(x)
        shown = logits if self.same else self.layer(x)
        return {"logits": shown.double(), "loss": F.cross_entropy(logits, labels)}


@pytest.mark.parametrize("same", [True, False])
def test_a_model_that_returns_a_copy_of_what_its_loss_is_made_of(same: bool, caplog: pytest.LogCaptureFixture) -> None:
    def step(factor: float) -> None:
        model = seeded(lambda: InHalf(same))
        opt = ng.KFAC(model, F.cross_entropy, output=lambda out: out["logits"], strict=True)
        labels = LABELS.masked_fill(LABELS == 1, -100)
        for _ in range(2):
            opt.zero_grad()
            (factor * model(normal(N, 3).float(), labels)["loss"]).backward()
            opt.step()

    step(1.0)
    if same:
        with pytest.raises(LossMismatchError, match=r"is 0\.7 times that of CrossEntropyLoss"):
            step(0.7)
    else:
        with caplog.at_level(logging.INFO, "natgrad"):
            step(0.7)
        assert [m for m in messages(caplog, logging.INFO) if "the model makes it from other tensors" in m]


@pytest.mark.parametrize("several", [False, True])
def test_a_gradient_by_the_inputs_is_not_taken_for_that_of_the_loss(several: bool) -> None:
    """A gradient penalty asks for ∂y/∂x before backward(); the labels of two examples are ignored."""
    body, x = vectors()
    x = x.requires_grad_()
    model = Named(body) if several else body
    labels = LABELS.index_fill(0, torch.tensor([1, 4]), -100)
    read = (lambda out: out["y"]) if several else None
    kept = x.detach()[labels >= 0]
    G = oracle.dense(oracle.module_jacobian(model, kept, read), oracle.categorical(body(kept)))  # a mean over these
    opt = ng.NaturalGradient(
        model, {"y": nn.CrossEntropyLoss()} if several else nn.CrossEntropyLoss(), damping=0.1, strict=True
    )
    before = oracle.flatten(model.parameters())
    y = oracle.call(model, x, read)
    (slope,) = torch.autograd.grad(y[:3].sum(), x, create_graph=True)
    (F.cross_entropy(y, labels) + slope.square().sum()).backward()
    v = oracle.damped(G, oracle.flatten(p.grad for p in model.parameters() if p.grad is not None), 0.1)
    opt.step()
    close(before - oracle.flatten(model.parameters()), v, 1e-8)


@pytest.mark.parametrize("several", [False, True])
def test_a_pass_for_an_adversarial_example_is_not_kept_until_the_step(several: bool) -> None:
    """Its backward pass is for the inputs alone and frees the graph, so that none that trains can follow."""
    width = 77  # no other tensor has this shape
    body = nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, C))
    model = Named(body) if several else body
    opt = ng.KFAC(model, {"y": nn.CrossEntropyLoss()} if several else nn.CrossEntropyLoss())

    def logits(x: Tensor) -> Tensor:
        y: Tensor = model(x)["y"] if several else model(x)
        return y

    x = torch.randn(N, 3).requires_grad_()
    for _ in range(3):
        (slope,) = torch.autograd.grad(F.cross_entropy(logits(x), LABELS), x)
        x = (x + 0.01 * slope.sign()).detach().requires_grad_()
    gc.collect()
    assert not [t for t in gc.get_objects() if type(t) is Tensor and t.shape == (N, width)]
    F.cross_entropy(logits(x), LABELS).backward()
    opt.step()


def test_a_gradient_at_the_outputs_may_be_computed_before_that_of_the_parameters() -> None:
    def trained(*, apart: bool) -> Tensor:
        model, x = vectors()
        opt = ng.NaturalGradient(model, nn.CrossEntropyLoss(), damping=0.1, strict=True)
        y = model(x)
        loss = F.cross_entropy(y, LABELS)
        if apart:
            y.backward(*torch.autograd.grad(loss, y))
        else:
            loss.backward()
        opt.step()
        return oracle.flatten(model.parameters())

    close(trained(apart=True), trained(apart=False))
