"""Misuse of an optimizer: every message names the fix."""

import copy
import logging
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError, UncoveredError
from tests import oracle
from tests.zoo import opaque

GAUSSIAN = ng.Fisher(ng.Gaussian())
PRESETS = pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC], ids=["KFAC", "EKFAC"])


class Bare(nn.Module):
    """Parameters that no layer rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.v = nn.Parameter(torch.randn(4, 3)), nn.Parameter(torch.randn(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        return opaque(opaque(x, self.w).tanh(), self.v)


class Mixing(nn.Module):
    """A layer behind which the outputs of one example depend on the others."""

    def __init__(self, mix: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(3, 4), mix

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(self.layer(x))


def products(z: Tensor) -> Tensor:
    return z @ z.T


def centred(z: Tensor) -> Tensor:
    return (z - z.mean(0)) * z


def train(opt: ng.NaturalGradient, model: nn.Module, steps: int = 3) -> list[float]:
    losses, x = [], torch.randn(6, 3, generator=torch.Generator().manual_seed(0))
    for _ in range(steps):
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        opt.step()
        losses.append(loss.item())
    return losses


def strict(model: nn.Module, preset: Callable[..., ng.NaturalGradient] = ng.KFAC) -> None:
    train(preset(model, GAUSSIAN, strict=True), model)


def said(caplog: pytest.LogCaptureFixture, start: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.getMessage().startswith(start)]


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_an_optimizer_is_not_copied(copied: Callable[[Any], Any]) -> None:
    with pytest.raises(TypeError, match="not copied: copy the model, make a new optimizer for it, and load_state_dict"):
        copied(ng.KFAC(nn.Linear(3, 2), GAUSSIAN))


@pytest.mark.parametrize("make", [ng.KFAC, ng.NaturalGradient])
def test_a_family_in_the_place_of_a_metric_is_told_apart(make: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match=r"got Categorical\(\), a family: write Fisher\(Categorical\(\)\)"):
        make(nn.Linear(3, 2), ng.Categorical())


@PRESETS
def test_a_model_without_any_layer_falls_back_unless_strict(preset: Callable[..., ng.NaturalGradient]) -> None:
    torch.manual_seed(0)
    model = Bare()
    opt = preset(model, GAUSSIAN)
    assert opt.plan().uncovered == ("w", "v")
    losses = train(opt, model, 12)
    assert losses[-1] < losses[0]
    assert [layer.names for layer in opt.diagnostics().layers] == [("w", "v")]
    again = copy.deepcopy(model)
    resumed = preset(again, GAUSSIAN)
    resumed.load_state_dict(opt.state_dict())
    assert train(opt, model) == train(resumed, again)
    with pytest.raises(UncoveredError, match="no layer rule covers w, v, and strict=True"):
        strict(Bare(), preset)


@pytest.mark.parametrize("mix", [products, centred])
def test_examples_that_mix_are_named_once_and_fall_back(
    mix: Callable[[Tensor], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    model = Mixing(mix)
    opt = ng.KFAC(model, GAUSSIAN, metric_every=1)
    with caplog.at_level(logging.INFO, "natgrad"):
        train(opt, model)
    assert len(said(caplog, "layer.bias, layer.weight have no layer rule")) == 1
    slow = said(caplog, "torch.func.vmap cannot follow the model on one example") + said(caplog, "an example alone has")
    assert len(slow) == 1
    assert "layer.weight, layer.bias had a rule, but the outputs of one example depend on the" in str(opt.plan())
    with pytest.raises(UncoveredError, match=r"the outputs of one example depend on the others \(z @ z\.T"):
        strict(Mixing(mix))


@pytest.mark.parametrize("steps", [0, 1])
def test_a_model_that_is_cast_afterwards_is_refused(steps: int) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    opt = ng.KFAC(model, GAUSSIAN, early=False)
    train(opt, model, steps)
    model.double()
    match = r"0\.weight is torch\.float64 on cpu, and was torch\.float32 on cpu.*make the optimizer after it"
    x = torch.randn(6, 3, dtype=torch.float64)
    if steps == 0:  # the metric is due, and the pass is looked at
        with pytest.raises(NatgradError, match=match):
            model(x)
        return
    model(x).sum().backward()
    with pytest.raises(NatgradError, match=match):
        opt.step()


def test_a_model_without_second_derivatives_has_no_self_tuned_step() -> None:
    model, x = nn.Sequential(nn.EmbeddingBag(5, 3), nn.Linear(3, 2)), torch.randint(5, (6, 4))
    opt = ng.KFAC(model, GAUSSIAN, step=ng.SelfTuned())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss.detach()

    with pytest.raises(IncompatibleError, match=r"without a second derivative .*use step=KLClip\(\) or step=Fixed\(\)"):
        opt.step(closure)


def test_a_pass_in_evaluation_mode_beside_one_in_training_mode_is_warned_of_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, x = nn.Linear(3, 2), torch.randn(6, 3)
    opt = ng.KFAC(model, GAUSSIAN, metric_every=1)
    train(opt, model)
    for gradients in (False, True, True):
        with torch.set_grad_enabled(gradients):
            model.eval()(x)
        train(opt, model.train(), 1)
        assert len(said(caplog, "between two steps the metric saw a forward pass in evaluation mode")) == gradients
    assert "under torch.no_grad() to evaluate" in caplog.text


def test_several_terms_an_example_are_told_once_with_both_reductions(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(3, 8), nn.Unflatten(1, (4, 2)))
    with caplog.at_level(logging.INFO, "natgrad"):
        train(ng.KFAC(model, ng.Fisher(ng.Categorical(axis=-1), reduction="mean"), metric_every=1), model)
        assert not caplog.records
        train(ng.KFAC(model, ng.Fisher(ng.Categorical(axis=-1)), metric_every=1), model)
    (message,) = said(caplog, "the outputs have 4 terms an example")
    assert "reduction='sum'" in message
    assert "For a loss that is their mean give Fisher(family, reduction='mean')" in message


@PRESETS
@pytest.mark.parametrize("change", [lambda y: y.div_(2), lambda y: y.masked_fill_(y > 0, -1e9)], ids=["div", "mask"])
def test_outputs_that_are_changed_in_place_before_their_loss_are_named(preset: Any, change: Callable[..., Any]) -> None:
    """The metric of cross entropy waits for the loss; the next pass, with another tensor, is trained."""
    model, x = nn.Linear(4, 3).double(), torch.randn(6, 4, dtype=torch.float64)
    opt = preset(model, nn.CrossEntropyLoss())
    y = model(x)
    change(y)
    with pytest.raises(NatgradError, match="the outputs of the model were changed in place before backward"):
        F.cross_entropy(y, torch.arange(6) % 3).backward()
    opt.zero_grad()
    F.cross_entropy(change(model(x).clone()), torch.arange(6) % 3).backward()
    opt.step()


def test_a_loss_is_no_closure() -> None:
    model = nn.Linear(3, 2)
    opt = ng.Natural(model)
    loss: Any = model(torch.ones(4, 3)).square().mean()
    loss.backward()
    with pytest.raises(TypeError, match=r"takes a closure, .* not a Tensor: call loss\.backward\(\) and opt\.step\(\)"):
        opt.step(loss)


def _stepped(*metrics: Any) -> Tensor:
    """The weights after a step of the first of several optimizers of one model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    opts = [ng.KFAC(model, metric) for metric in metrics]
    F.cross_entropy(model(torch.randn(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
    opts[0].step()
    return oracle.flatten(model.parameters())


@pytest.mark.parametrize("second", [F.mse_loss, F.cross_entropy, GAUSSIAN])
def test_two_optimizers_of_one_model_do_not_disturb_each_other(second: Any) -> None:
    first = ng.metric_of(F.cross_entropy)
    assert torch.equal(_stepped(first, second), _stepped(first))


def test_a_second_optimizer_that_disturbs_empirical_is_a_cause_that_is_named() -> None:
    with pytest.raises(NatgradError, match=r"A second optimizer of natgrad for this model .* delete one of them"):
        _stepped(ng.Empirical(), GAUSSIAN)
