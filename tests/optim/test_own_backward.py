"""Empirical() without a loss: the cotangents of the user's backward pass give the factors of Empirical(loss)."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import natgrad as ng
from natgrad.accelerate import moments
from natgrad.errors import IncompatibleError, LossMismatchError, NatgradError, NonFiniteError, UncoveredError
from natgrad.pullbacks import coupling, layer_factors
from natgrad.structures.kronecker import KroneckerInBackward
from tests.optim.states import Net

LOSS = F.cross_entropy
N = 6


class Text(nn.Module):
    """An embedding, a normalisation, attention and a head: [n t] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 4), nn.LayerNorm(4)
        self.mix, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.table(x))
        return self.head((h + self.mix(h, h, h)[0]).mean(1))


class Twice(nn.Module):
    """A layer that is called twice, and an LSTM: [n t 3] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.step, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = self.lstm(x)[0][:, -1]
        return self.head(self.step(self.step(h).tanh()).tanh())


class Behind(nn.Module):
    """Weights that are functions of parameters, and are used twice: [n 3] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.gain, self.head = nn.Parameter(torch.randn(3, 3)), nn.Parameter(torch.randn(3)), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        w = F.softplus(self.w)
        h = torch.tanh(x @ w) * self.gain.prod()
        return self.head(torch.tanh(h @ w) * self.gain.exp())


class Prompts(nn.Module):
    """Learned prompts, which pass through a layer before they are compared with the data: [n 3] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.prompts, self.key, self.query = nn.Parameter(torch.randn(3, 4)), nn.Linear(4, 4), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(torch.tanh(self.prompts).expand(len(x), 3, 4))
        return torch.einsum("nd,nkd->nk", self.query(x), keys)


class Latents(nn.Module):
    """Learned latents, normalised and projected once for all examples, which look at the data: [n 5 3] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.latents, self.norm = nn.Parameter(torch.randn(4, 6)), nn.LayerNorm(6)
        self.query, self.key, self.value, self.head = nn.Linear(6, 4), nn.Linear(3, 4), nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        query = self.query(self.norm(self.latents.expand(len(x), 4, 6)))
        seen = torch.softmax(query @ self.key(x).mT, -1) @ self.value(x)
        return self.head(seen.mean(1))


def plain() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))


def convolutional() -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(inplace=True), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 3))


def reals(*shape: int) -> Callable[[], Tensor]:
    return lambda: torch.randn(N, *shape, dtype=torch.float64)


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (plain, reals(3)),
    "convolution": (convolutional, reals(2, 5, 5)),
    "text": (Text, lambda: torch.randint(7, (N, 5))),
    "twice": (Twice, reals(5, 3)),
    "behind functions": (Behind, reals(3)),
    "through a layer": (Prompts, reals(3)),
    "latents": (Latents, reals(5, 3)),
}


def targets() -> Tensor:
    return torch.randint(3, (N,))


@pytest.mark.parametrize("reduction", ["sum", "mean"])
@pytest.mark.parametrize("name", CASES)
def test_the_factors_are_those_of_the_loss_with_targets(name: str, reduction: Literal["sum", "mean"]) -> None:
    """In the first estimate, and in the averages of later ones, which change in place."""
    build, batch = CASES[name]

    def trained(own: bool) -> ng.NaturalGradient:
        torch.manual_seed(0)
        model = build().double()
        metric = ng.Empirical(reduction=reduction) if own else ng.Empirical(LOSS)
        structure = ng.Refresh(ng.Kronecker(), 1, 0.9)
        opt = ng.NaturalGradient(model, metric, structure=structure, solver=ng.Factored(), lr=1e-2, damping=1.0)
        for _ in range(3):
            x, t = batch(), targets()
            opt.zero_grad()
            if not own:
                opt.refresh(x, t)
            LOSS(model(x), t, reduction=reduction).backward()
            opt.step()
        return opt

    found, expected = trained(True).tracker.average, trained(False).tracker.average
    assert found is not None
    assert expected is not None
    assert found.tensors().keys() == expected.tensors().keys()
    for key, t in expected.tensors().items():
        torch.testing.assert_close(found.tensors()[key], t, msg=key)


def optimizer(model: nn.Module, output: Callable[..., Tensor] | None = None) -> ng.NaturalGradient:
    structure = ng.Refresh(ng.Kronecker(), 1, 0.9)
    return ng.NaturalGradient(model, ng.Empirical(), structure=structure, lr=1e-2, damping=1.0, output=output)


class Optional(nn.Module):
    """Two bare parameters, each of which only some passes use: [n 3] → [n 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.randn(3, 3)) for _ in range(2))
        self.head = nn.Linear(3, 3)

    def forward(self, x: Tensor, uses: str) -> Tensor:
        x = x @ self.first if "first" in uses else x
        return self.head((x @ self.second if "second" in uses else x).tanh())


@pytest.mark.parametrize("make", [lambda model: optimizer(model), lambda model: ng.Natural(model, ng.Empirical())])
@pytest.mark.parametrize("passes", [("", "first"), ("first", "second"), ("", "second first")], ids=str)
def test_the_order_of_micro_batches_does_not_change_the_first_step(
    make: Callable[[nn.Module], ng.NaturalGradient], passes: tuple[str, ...]
) -> None:
    """A parameter outside of a layer has its factors whichever pass of the first step uses it."""
    found = []
    for order in (1, -1):
        torch.manual_seed(0)
        model = Optional().double()
        opt = make(model)
        x, t = torch.randn(len(passes), N, 3, dtype=torch.float64), [targets() for _ in passes]
        for uses, inputs, labels in list(zip(passes, x, t, strict=True))[::order]:
            LOSS(model(inputs, uses), labels).backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_first_step_that_a_scaler_leaves_out_is_forgotten(bad: int) -> None:
    """Its cotangents are infinite. If they are those of the step that is made, the step is refused."""
    found = []
    for skipped in (True, False):
        torch.manual_seed(0)
        model = plain().double()
        opt = optimizer(model)
        x, t = torch.randn(N, 3, dtype=torch.float64), targets()
        for factor in ((torch.inf, 1.0) if bad == 0 else (1.0, torch.inf)) if skipped else (1.0,):
            opt.zero_grad()
            (factor * LOSS(model(x), t)).backward()
        if skipped and bad:
            with pytest.raises(NonFiniteError):
                opt.step()
            return
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.parametrize("make", [ng.KFAC, ng.Natural])
def test_a_later_step_that_a_scaler_leaves_out_raises_only_if_it_is_made(
    make: Callable[..., ng.NaturalGradient],
) -> None:
    torch.manual_seed(0)
    model = plain().double()
    opt, x, t = make(model, ng.Empirical()), torch.randn(N, 3, dtype=torch.float64), targets()
    before: list[Tensor] = []
    for factor in (1.0, torch.inf, 1.0, torch.inf):
        before = [p.detach().clone() for p in model.parameters()]
        opt.zero_grad()
        (factor * LOSS(model(x), t)).backward()
        if factor == 1.0:
            opt.step()
            assert all(bool(p.isfinite().all()) for p in model.parameters())
            assert not any(map(torch.equal, model.parameters(), before))
    with pytest.raises(NonFiniteError, match="at step 2: the estimate of the metric of"):
        opt.step()
    assert all(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("make", [ng.KFAC, ng.Natural])
@pytest.mark.parametrize("divisor", [1, N])
def test_sums_over_unequal_micro_batches_give_the_steps_of_the_joint_batch(
    make: Callable[..., ng.NaturalGradient], divisor: int
) -> None:
    """Whether they are divided by the number of all examples or not."""
    found = []
    for sizes in ([N], [1, N - 1], [2, 3, N - 5]):
        torch.manual_seed(0)
        model = plain().double()
        opt = make(model, ng.Empirical(reduction="sum"))
        for _ in range(3):
            opt.zero_grad()
            x, t = torch.randn(N, 3, dtype=torch.float64), targets()
            for inputs, labels in zip(x.split(sizes), t.split(sizes), strict=True):
                (LOSS(model(inputs), labels, reduction="sum") / divisor).backward()
            opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    for each in found[1:]:
        torch.testing.assert_close(each, found[0], rtol=1e-10, atol=1e-12)


def test_accumulated_passes_count_by_their_examples() -> None:
    """In turns, or one backward pass through both; a pass without a backward pass counts for nothing."""
    found = []
    for together in (False, True, None):
        torch.manual_seed(0)
        model = plain().double()
        opt = optimizer(model)
        for _ in range(2):
            opt.zero_grad()
            x, t = torch.randn(N, 3, dtype=torch.float64), targets()
            if together is None:
                LOSS(model(x), t).backward()
            else:
                model(x)
                losses = []
                for part in (slice(0, 2), slice(2, N)):
                    loss = LOSS(model(x[part]), t[part])
                    losses.append(loss * len(t[part]) / N if together else loss)
                    if not together:
                        losses[-1].backward()
                if together:
                    (losses[0] * N / 2 + losses[1] * N / 4).backward()
                for p in model.parameters():  # the same step in all three
                    p.grad = torch.zeros_like(p)
            if together is None:
                for p in model.parameters():
                    p.grad = torch.zeros_like(p)
            opt.step()
        assert opt.tracker.average is not None
        found.append(opt.tracker.average.tensors())
    for other in found[1:]:
        for key, t in other.items():
            torch.testing.assert_close(t, found[0][key], msg=key)


def test_no_backward_pass_of_our_own_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once it is known where the examples are, in passes that record operations and in those that need not."""
    model, x = plain(), torch.randn(N, 3)
    opt = optimizer(model)
    for _ in range(2):
        LOSS(model(x), targets()).backward()
        opt.step()

    def refuse(*args: object, **kwargs: object) -> None:
        raise AssertionError("torch.autograd.grad was called")

    monkeypatch.setattr(torch.autograd, "grad", refuse)
    for _ in range(2):
        LOSS(model(x), targets()).backward()
        opt.step()


class Heads(nn.Module):
    """Two outputs, of which the loss may read one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.two = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.body(x).tanh()
        return self.one(h), self.two(h)


@pytest.mark.parametrize("first", [True, False])
def test_a_layer_that_no_backward_pass_comes_to_keeps_its_factors(first: bool) -> None:
    """Or has none yet, and all of the first estimate later."""
    torch.manual_seed(0)
    model, x = Heads().double(), torch.randn(N, 3, dtype=torch.float64)
    opt = optimizer(model, output=lambda out: torch.cat(out, 1))
    found: list[dict[str, Tensor]] = []
    for both in (first, not first):
        opt.zero_grad()
        one, two = model(x)
        loss = LOSS(one, targets())
        (loss + LOSS(two, targets()) if both else loss).backward()
        opt.step()
        assert opt.tracker.average is not None
        found.append({key: t.clone() for key, t in opt.tracker.average.tensors().items()})
    if first:
        assert torch.equal(found[1]["two.weight/S"], found[0]["two.weight/S"])
        assert torch.equal(found[1]["two.weight/A"], found[0]["two.weight/A"])
    else:
        assert "two.weight/S" not in found[0]
        torch.testing.assert_close(found[1]["two.weight/A"], found[1]["one.weight/A"], atol=1e-2, rtol=1e-2)
    assert not torch.equal(found[1]["one.weight/S"], found[0]["one.weight/S"])


def test_parameters_without_a_rule_have_the_square_of_their_gradient() -> None:
    torch.manual_seed(0)
    model = Net().double()
    opt = optimizer(model)
    squares = []
    for _ in range(2):
        opt.zero_grad()
        LOSS(model(torch.randn(N, 3, dtype=torch.float64)), torch.randint(2, (N,))).backward()
        assert model.mix.grad is not None
        squares.append(model.mix.grad.flatten().square())
        opt.step()
    assert opt.tracker.average is not None
    tensors = opt.tracker.average.tensors()
    assert "hidden.weight/S" in tensors
    torch.testing.assert_close(tensors["fallback/values"], (0.9 * squares[0] + squares[1]) / 1.9)


class Checkpointed(nn.Module):
    """A part of the model may be run again in the backward pass."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.first, self.last, self.again = nn.Linear(3, 4), nn.Linear(4, 3), again
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x).tanh()
        return self.last(checkpoint(self.body, h, use_reentrant=False) if self.again else self.body(h))


def test_activation_checkpointing_changes_nothing() -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Checkpointed(again)
        opt = optimizer(model)
        for _ in range(2):
            opt.zero_grad()
            LOSS(model(torch.randn(N, 3)), targets()).backward()
            opt.step()
        assert opt.tracker.average is not None
        found.append(opt.tracker.average.tensors())
    for key, t in found[0].items():
        assert torch.equal(found[1][key], t), key


def test_half_precision_is_that_of_the_loss_with_targets() -> None:
    """Under autocast, in single precision factors."""
    found = []
    for metric in (ng.Empirical(), ng.Empirical(LOSS)):
        torch.manual_seed(0)
        model = plain()
        opt = ng.NaturalGradient(model, metric, structure=ng.Refresh(ng.Kronecker(), 1, 0.9), lr=1e-2, damping=1.0)
        for _ in range(2):
            opt.zero_grad()
            x, t = torch.randn(N, 3), targets()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                if metric.needs_target:
                    opt.refresh(x, t)
                loss = LOSS(model(x), t)
            loss.backward()
            opt.step()
        assert opt.tracker.average is not None
        found.append(opt.tracker.average.tensors())
    for key, t in found[1].items():
        assert found[0][key].dtype is torch.float32
        torch.testing.assert_close(found[0][key], t, rtol=3e-2, atol=1e-3, msg=key)


def test_resuming_is_exact() -> None:
    torch.manual_seed(0)
    model = convolutional()
    opt = optimizer(model)
    x, t = torch.randn(N, 2, 5, 5), targets()

    def train(model: nn.Module, opt: ng.NaturalGradient) -> None:
        for _ in range(3):
            opt.zero_grad()
            LOSS(model(x), t).backward()
            opt.step()

    train(model, opt)
    again = convolutional()
    again.load_state_dict(model.state_dict())
    resumed = optimizer(again)
    resumed.load_state_dict(opt.state_dict())
    train(model, opt)
    train(again, resumed)
    for p, q in zip(model.parameters(), again.parameters(), strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize("backward", [True, False])
def test_nothing_of_a_pass_stays_after_the_step(backward: bool) -> None:
    """Without the garbage collector: inputs of layers are large."""
    model = nn.Sequential(nn.Linear(3, 5), nn.ReLU(), nn.Linear(5, 4, bias=False), nn.Tanh(), nn.Linear(4, 3))
    opt = optimizer(model)
    LOSS(model(torch.randn(N, 4, 3)).mean(1), targets()).backward()
    opt.step()
    kept: list[weakref.ref[Tensor]] = []
    handle = model.get_submodule("2").register_forward_pre_hook(lambda _, args: kept.append(weakref.ref(args[0])))
    gc.collect()
    gc.disable()
    try:
        x = torch.randn(N, 4, 3)
        if not backward:
            model(x)  # nobody calls backward through this one
        LOSS(model(x).mean(1), targets()).backward()
        opt.step()
        assert not [thing for thing in gc.get_objects() if issubclass(type(thing), KroneckerInBackward)]
        assert all(reference() is None for reference in kept)
    finally:
        gc.enable()
        handle.remove()


def test_bad_input() -> None:
    model, x = plain(), torch.randn(N, 3)
    for structure in (ng.Dense(), ng.Diagonal(), ng.EigenKronecker(), ng.Implicit()):
        with pytest.raises(IncompatibleError, match=r"Empirical\(\) does not work with"):
            ng.NaturalGradient(model, ng.Empirical(), structure=structure)
    with pytest.raises(ValueError, match="without a reduction"):
        ng.Empirical(LOSS, reduction="sum")
    with pytest.raises(IncompatibleError, match="cotangents of a training loop"):
        ng.Dense().estimate(ng.pullback(model, x, ng.Empirical()))
    opt = optimizer(model)
    with pytest.raises(IncompatibleError, match="nothing to refresh"):
        opt.refresh(x)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    model(x)
    with pytest.raises(NatgradError, match="no backward pass came through a forward pass"):
        opt.step()
    y = model(x)
    LOSS(y, targets()).backward(retain_graph=True)
    passes = r"two backward passes came to the outputs of Linear.*a gradient penalty\), use BatchGradient\(\)"
    with pytest.raises(NatgradError, match=passes):
        LOSS(y, targets()).backward()
    compiled = torch.compile(plain(), backend="eager")
    opt = optimizer(compiled)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="a compiled model shows none"):
        compiled(x)


class Masked(nn.Module):
    """Positions of which some do not reach the loss: [n t 4], [n t] → [n t 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor, there: Tensor) -> Tensor:
        return self.c(torch.tanh(self.b(torch.tanh(self.a(x))))) * there.unsqueeze(-1)


def test_micro_batches_keep_their_own_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, where what counts is known from one place in memory, in every pass, until the step."""

    def trained() -> dict[str, Tensor]:
        torch.manual_seed(0)
        model = Masked()
        opt = ng.NaturalGradient(model, ng.Empirical(), structure=ng.Kronecker(), lr=0.0, damping=1e-2)
        for _ in range(3):
            for part in range(2):
                x, there = torch.randn(8, 6, 4), torch.ones(8, 6)
                if part == 0:
                    there[:, 3:], x[:, 3:] = 0.0, 100.0
                (model(x, there).square().sum((1, 2)).mean() / 2).backward()
            opt.step()
            opt.zero_grad()
        assert opt.tracker.average is not None
        return dict(opt.tracker.average.tensors())

    expected = trained()
    monkeypatch.setattr(coupling, "is_asynchronous", lambda device: True)
    monkeypatch.setattr(moments, "can_read", lambda t: False)
    for key, t in trained().items():
        torch.testing.assert_close(t, expected[key], rtol=1e-5, atol=1e-6)


# Units that are off hide no position that the loss sees.


class Tagger(nn.Module):
    """Labels of tokens, behind units that are all off for some: [n t 3] → [n t 3], or flat [n·t 3]."""

    def __init__(self, flat: bool = False) -> None:
        super().__init__()
        self.a, self.b, self.c, self.flat = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 3), flat

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = F.relu_(self.b(F.hardtanh(self.a(x), 0.0, 2.0)))
        y = self.c(h)
        return {"hidden": h, "logits": y.flatten(0, 1) if self.flat else y}


def tagged(flat: bool, *, parts: int = 1) -> tuple[dict[str, Tensor], dict[str, Tensor], float]:
    """The factors A of two steps of micro-batches, A by hand, and the share of seen tokens without a cotangent."""
    torch.manual_seed(4)
    model = Tagger(flat).double()
    model.b.bias.data -= 0.8
    opt = ng.NaturalGradient(
        model,
        ng.Empirical(),
        structure=ng.Refresh(ng.Kronecker(), 1, 0.5),
        lr=0.0,
        damping=1.0,
        output=lambda out: out["logits"],
        examples="inputs" if flat else None,
    )
    by_hand: dict[str, list[Tensor]] = {"a": [], "b": [], "c": []}
    seen = torch.empty(0, dtype=torch.bool)
    dead: list[Tensor] = []
    for name, rows in by_hand.items():
        layer = model.get_submodule(name)

        def keep(_: nn.Module, args: tuple[Tensor], rows: list[Tensor] = rows) -> None:
            a = args[0].detach()[seen]
            rows.append(torch.cat([a, torch.ones_like(a[:, :1])], 1))

        layer.register_forward_pre_hook(keep)
    for _ in range(2):
        for part in range(parts):
            x, labels = torch.randn(N, 7, 3).double(), torch.randint(3, (N, 7))
            labels[:, 5 - part :] = -100
            seen = labels != -100
            out = model(x)
            hidden, logits = out["hidden"], out["logits"].reshape(N, 7, 3)
            dead.append((hidden == 0).all(-1)[seen])
            (LOSS(logits[seen], labels[seen]) / parts).backward()
        opt.step()
        opt.zero_grad()
    assert opt.tracker.average is not None
    found = {name: opt.tracker.average.tensors()[f"{name}.weight/A"][0] for name in by_hand}
    each = {name: [a.mT @ a / len(a) for a in rows] for name, rows in by_hand.items()}
    expected = {name: sum(A[:parts], 0 * A[0]) / 3 + sum(A[parts:], 0 * A[0]) * 2 / 3 for name, A in each.items()}
    return found, {name: A / parts for name, A in expected.items()}, float(torch.cat(dead).double().mean())


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("flat", [False, True])
def test_tokens_whose_units_are_off_count_and_ignored_ones_do_not(flat: bool, parts: int) -> None:
    """A is the mean over the tokens with a label; micro-batches have different numbers of them."""
    found, expected, dead = tagged(flat, parts=parts)
    assert 0.1 < dead < 0.9
    for name, A in expected.items():
        torch.testing.assert_close(found[name], A, msg=name)


def test_on_a_gpu_too_tokens_whose_units_are_off_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coupling, "is_asynchronous", lambda device: True)
    for module in (moments, layer_factors):
        monkeypatch.setattr(module, "can_read", lambda t: False)
    found, expected, _ = tagged(False, parts=2)
    for name, A in expected.items():
        torch.testing.assert_close(found[name], A, msg=name)


def test_outputs_that_change_in_place_before_the_backward_pass_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    opt = optimizer(model)
    y = model(torch.randn(N, 5, 3))
    y /= 2
    with pytest.raises(NatgradError, match="changed in place before backward"):
        y.square().sum().backward()
    opt.zero_grad()


# A GradScaler multiplies the loss, and so the metric by its square.


def _scaled_steps(opt: torch.optim.Optimizer, model: nn.Module, scale: float, steps: int = 4) -> None:
    x, t = torch.randn(N, 4), torch.arange(N) % 3
    scaler = torch.amp.GradScaler("cpu", init_scale=scale)
    for _ in range(steps):
        opt.zero_grad()
        scaler.scale(LOSS(100 * model(x), t)).backward()
        scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(opt)
        scaler.update()


def _classifier() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def test_a_grad_scaler_is_noticed_once(caplog: pytest.LogCaptureFixture) -> None:
    model = _classifier()
    opt = ng.KFAC(model, ng.Empirical(), damping=1e10)  # beside a metric that is 2³² times too large
    _scaled_steps(opt, model, 2.0**16)
    (record,) = caplog.records
    assert "times smaller than that of the backward pass, as a GradScaler makes it" in record.getMessage()


def test_a_grad_scaler_is_an_error_of_strict_optimizers() -> None:
    model = _classifier()
    with pytest.raises(LossMismatchError, match=r"Give the loss, Empirical\(loss\), or use autocast in bfloat16"):
        _scaled_steps(ng.KFAC(model, ng.Empirical(), strict=True), model, 2.0**16)


def test_clipping_and_steps_of_a_fixed_length_are_not_taken_for_a_grad_scaler(caplog: pytest.LogCaptureFixture) -> None:
    for make, scale in ((ng.KFAC, 1.0), (ng.Natural, 2.0**16)):
        model = _classifier()
        _scaled_steps(make(model, ng.Empirical(), lr=0.01), model, scale)
    assert not caplog.records


def test_outputs_that_a_batch_of_one_example_does_not_show_to_be_flattened_are_refused_with_the_way_out() -> None:
    def trained(*sizes: int, **options: Any) -> None:
        model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7), nn.Flatten(0, 1)).double()
        opt = ng.Natural(model, ng.Empirical(), **options)
        for n in sizes:
            opt.zero_grad()
            F.cross_entropy(model(torch.arange(5 * n).reshape(n, 5) % 7), torch.arange(5 * n) % 7).backward()
            opt.step()

    with pytest.raises(UncoveredError, match=r'in another way than the first one did.*several examples.*"inputs"'):
        trained(1, 4)
    trained(4, 1, 4)
    trained(1, 4, examples="inputs")


@pytest.mark.parametrize("name", ["through a layer", "latents"])
@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC, ng.Natural])
def test_a_loss_that_waits_takes_the_steps_of_its_metric_with_targets(name: str, preset: Any) -> None:
    """Parameters that meet the data behind other layers have no examples on their first axis."""
    build, batch = CASES[name]
    found = []
    for refreshed in (False, True):
        torch.manual_seed(0)
        model = build().double()
        opt = preset(model, nn.CrossEntropyLoss(), lr=0.01, generator=torch.Generator().manual_seed(0))
        for _ in range(3):
            x, t = batch(), targets()
            opt.zero_grad()
            if refreshed:
                opt.refresh(x, t)
            nn.CrossEntropyLoss()(model(x), t).backward()
            opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(found[0], found[1], rtol=1e-8, atol=1e-10)
