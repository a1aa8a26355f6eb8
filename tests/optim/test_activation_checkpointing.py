"""K-FAC with activation checkpointing: recomputation in the backward pass changes no step."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import natgrad as ng
from natgrad.errors import UncoveredError
from tests import oracle
from tests.optim.tasks import half_square, seeded
from tests.pulled import close
from tests.zoo import mlp, opaque

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


class Attending(nn.Module):
    """A block of fused attention, with a gain, and a parameter of which no operation tells, checkpointed or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.qkv, self.gain, self.mix = nn.Linear(3, 9), nn.Parameter(torch.rand(3)), nn.Parameter(torch.randn(3, 3))
        self.head, self.reentrant = nn.Linear(3, 2), reentrant

    def block(self, x: Tensor) -> Tensor:
        """[n t 3]."""
        q, k, v = self.qkv(x).unsqueeze(1).chunk(3, dim=-1)
        h = F.scaled_dot_product_attention(q, k, v).squeeze(1) * self.gain
        return x + opaque(h.flatten(0, 1), self.mix).view_as(h)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n 2]."""
        h = self.block(x) if self.reentrant is None else checkpoint(self.block, x, use_reentrant=self.reentrant)
        return self.head(h.mean(1))


def _pair() -> tuple[Attending, Attending, Tensor]:
    plain, parts = (seeded(lambda: Attending(None).double()) for _ in range(2))
    parts.reentrant = False
    return plain, parts, seeded(lambda: torch.randn(5, 4, 3, dtype=torch.float64))


STEPS: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "kfac": lambda m: ng.KFAC(m, EUCLIDEAN, lr=0.1),
    "ekfac": lambda m: ng.EKFAC(m, EUCLIDEAN, lr=0.1),
    "dense": lambda m: ng.NaturalGradient(m, EUCLIDEAN, lr=0.1, damping=0.1),
    "empirical": lambda m: ng.KFAC(m, ng.Empirical(), lr=0.1),
    "self-tuned": lambda m: ng.KFAC(m, EUCLIDEAN, step=ng.SelfTuned()),
    "trust region": lambda m: ng.KFAC(m, EUCLIDEAN, step=ng.TrustRegion(0.01)),
}


@pytest.mark.parametrize("name", STEPS)
def test_attention_and_parameters_without_a_rule_in_a_checkpoint_make_the_same_steps(name: str) -> None:
    plain, parts, x = _pair()
    for model in (plain, parts):
        opt = STEPS[name](model)
        for _ in range(3):
            opt.step(partial(_closure, opt, model, x))
    close(theta(parts), theta(plain))


def _closure(opt: ng.NaturalGradient, model: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    opt.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    return loss


class Encoder(nn.Module):
    """A layer whose pass is run again for the metric (attention), and a matrix of which modules do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.mix = nn.MultiheadAttention(4, 2, batch_first=True), nn.Parameter(torch.randn(4, 4))
        self.first, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n 2]."""
        h = self.first(x)
        h = torch.tanh(h + self.attention(h, h, h, need_weights=False)[0]) @ self.mix
        return self.head(h.mean(1))


@pytest.mark.parametrize("name", STEPS)
def test_a_model_that_is_called_in_a_checkpoint_makes_the_same_steps(name: str) -> None:
    """What is saved for the metric, in the middle of the pass, is not computed again."""
    plain, whole = (seeded(lambda: Encoder().double()) for _ in range(2))
    x = seeded(lambda: torch.randn(5, 4, 3, dtype=torch.float64))
    for model, call in ((plain, plain), (whole, partial(checkpoint, whole, use_reentrant=False))):
        opt = STEPS[name](model)
        for _ in range(3):
            opt.step(partial(_closure, opt, call, x))
    close(theta(whole), theta(plain))


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(
    "structure", [ng.Dense(), ng.Kernel(), ng.Diagonal(), ng.Implicit(), ng.Kronecker()], ids=lambda s: type(s).__name__
)
def test_passes_of_the_library_are_not_checkpointed(structure: ng.structures.Structure, reentrant: bool) -> None:
    plain, parts, x = _pair()
    parts.reentrant = reentrant
    mine, theirs = (structure.estimate(ng.pullback(model, x, EUCLIDEAN)).dense() for model in (parts, plain))
    close(mine, theirs)


def test_a_reentrant_checkpoint_hides_its_layers_and_is_refused() -> None:
    model = seeded(lambda: Checkpointed(True).double())
    match = r"checkpoint hides a.weight, a.bias, b.weight, b.bias from the graph .*: call it with use_reentrant=False"
    with pytest.raises(UncoveredError, match=match):
        _trained(ng.KFAC, model, lambda x: model(x.requires_grad_()))


class _Reentrant(nn.Module):
    """All layers are computed again, in the mode that hides them from the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.body = network()

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        y: Tensor = checkpoint(self.body, x, use_reentrant=True)
        return y


def test_a_whole_model_that_recomputes_reentrantly_is_told_the_other_mode() -> None:
    """The graph of such a pass ends at the inputs, and no backward pass is seen that trains."""
    model = _Reentrant()
    opt = ng.KFAC(model, nn.CrossEntropyLoss())
    x, _ = data()
    F.cross_entropy(model(x.requires_grad_()), torch.zeros(len(x), dtype=torch.long)).backward()
    with pytest.raises(ng.errors.NatgradError, match="use_reentrant=False"):
        opt.step()
