"""K-FAC with activation checkpointing: recomputation in the backward pass changes no step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import natgrad as ng
from natgrad.errors import UncoveredError
from tests import oracle
from tests.optim.tasks import half_square, seeded
from tests.zoo import mlp

EUCLIDEAN = ng.Euclidean()
PRESETS = {"kfac": ng.KFAC, "ekfac": ng.EKFAC}
Preset = Callable[..., ng.NaturalGradient]


def data(n: int = 12, seed: int = 0) -> tuple[Tensor, Tensor]:
    return seeded(lambda: (torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 2, dtype=torch.float64)), seed)


def network() -> nn.Module:
    return seeded(lambda: mlp(3, 4, 2).double())


def theta(model: nn.Module) -> Tensor:
    return oracle.flatten(model.parameters())


class Checkpointed(nn.Module):
    """Two of three layers are computed again in the backward pass, or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.a, self.b, self.c, self.drop = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.Dropout(0.2)
        self.reentrant = reentrant

    def body(self, x: Tensor) -> Tensor:
        """[n 4]."""
        return torch.tanh(self.b(self.drop(torch.relu(self.a(x)))))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        if self.reentrant is None:
            return self.c(self.body(x))
        return self.c(checkpoint(self.body, x, use_reentrant=self.reentrant))


def _trained(make: Preset, model: nn.Module, call: Callable[[Tensor], Tensor]) -> Tensor:
    x, t = data()
    opt = make(model, EUCLIDEAN, metric_every=2, inverse_every=2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        for _ in range(4):
            opt.zero_grad()
            half_square(call(x), t).backward()
            opt.step()
    return theta(model)


@pytest.mark.parametrize("name", PRESETS)
def test_activation_checkpointing_does_not_change_a_step(name: str) -> None:
    plain, whole = (seeded(lambda: Checkpointed(None).double()) for _ in range(2))
    parts = seeded(lambda: Checkpointed(False).double())
    expected = _trained(PRESETS[name], plain, plain)
    assert torch.equal(_trained(PRESETS[name], parts, parts), expected)
    assert torch.equal(_trained(PRESETS[name], whole, lambda x: checkpoint(whole, x, use_reentrant=False)), expected)


def _accumulated(make: Preset, call: Callable[[nn.Module], Callable[[Tensor], Tensor]]) -> tuple[Tensor, int]:
    """One step from two unequal micro-batches, the first of them called in another way; and the calls of the model."""
    (x, t), model = data(), network()
    opt, calls = make(model, EUCLIDEAN), []
    model.register_forward_hook(lambda *_: calls.append(1))
    with set_checkpoint_early_stop(False):
        half_square(call(model)(x[:5]), t[:5]).backward()
    half_square(model(x[5:]), t[5:]).backward()
    opt.step()
    return theta(model), len(calls)


@pytest.mark.parametrize("name", PRESETS)
def test_what_a_checkpoint_computes_again_does_not_count_twice(name: str) -> None:
    """The whole model is called again, to its end, inside the backward pass of one of the micro-batches."""
    plain, calls = _accumulated(PRESETS[name], lambda model: model)
    found, more = _accumulated(PRESETS[name], lambda model: partial(checkpoint, model, use_reentrant=False))
    assert calls == 2 < more
    assert torch.equal(found, plain)


def test_a_forward_pass_inside_a_backward_pass_is_not_estimated_from() -> None:
    (x, t), (other, _) = data(), data(7, seed=1)
    model, plain = network(), network()
    opt, expected = ng.KFAC(model, EUCLIDEAN), ng.KFAC(plain, EUCLIDEAN)
    seen: list[Tensor] = []

    def again(_: Tensor) -> None:
        with torch.enable_grad():
            seen.append(model(other))

    y = model(x)
    y.register_hook(again)
    half_square(y, t).backward()
    opt.step()
    half_square(plain(x), t).backward()
    expected.step()
    assert len(seen) == 1
    assert torch.equal(theta(model), theta(plain))


def test_a_reentrant_checkpoint_hides_its_layers_and_is_refused() -> None:
    model = seeded(lambda: Checkpointed(True).double())
    match = r"checkpoint hides a.weight, a.bias, b.weight, b.bias from the graph .*: call it with use_reentrant=False"
    with pytest.raises(UncoveredError, match=match):
        _trained(ng.KFAC, model, lambda x: model(x.requires_grad_()))
