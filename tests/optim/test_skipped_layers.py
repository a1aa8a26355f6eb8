"""Layers that some batches skip: experts, stochastic depth, parameters that are never used."""

from __future__ import annotations

import copy
import logging
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng

NAMES = {"e.0": ("e.0.weight", "e.0.bias"), "e.1": ("e.1.weight", "e.1.bias")}


class Experts(nn.Module):
    """Of two experts, those that ``using`` names; ``spare`` is never called, and ``gain`` belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.e = nn.ModuleList([nn.Linear(3, 4), nn.Linear(3, 4)])
        self.head, self.spare = nn.Linear(4, 2), nn.Linear(3, 3)
        self.gain = nn.Parameter(torch.ones(2, 4))
        self.using: tuple[int, ...] = (0,)

    def forward(self, x: Tensor) -> Tensor:
        h = x.new_zeros(len(x), 4)
        for k in self.using:
            h = h + self.gain[k] * torch.tanh(self.e[k](x))
        return self.head(h)


STRUCTURES: dict[str, Any] = {
    "kronecker": ng.Kronecker(),
    "eigen": ng.EigenKronecker(),
    "diagonal": ng.Diagonal(),
    "block": ng.BlockDense(),
    "dense": ng.Dense(),
}
structures = pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
to_none = pytest.mark.parametrize("set_to_none", [True, False])
every = pytest.mark.parametrize("every", [1, 3])


def task() -> tuple[Experts, Tensor, Tensor]:
    torch.manual_seed(0)
    x = torch.randn(16, 3, dtype=torch.float64)
    return Experts().double(), x, torch.stack([x.sum(1), x[:, 0] * x[:, 1]], dim=1)


def optimizer(model: nn.Module, structure: Any, every: int = 1, **options: Any) -> ng.NaturalGradient:
    averaged = ng.Refresh(structure, every=every, decay=0.9)
    return ng.NaturalGradient(model, ng.Euclidean(), structure=averaged, lr=0.1, damping=0.1, **options)


def one(model: Experts, opt: Any, x: Tensor, t: Tensor, using: tuple[int, ...], none: bool = True) -> float:
    model.using = using
    opt.zero_grad(set_to_none=none)
    loss = (model(x) - t).square().mean()
    loss.backward()
    opt.step()
    return loss.item()


@structures
@to_none
@every
def test_experts_that_take_turns_are_trained(structure: Any, set_to_none: bool, every: int) -> None:
    model, x, t = task()
    opt = optimizer(model, structure, every, momentum=0.5)
    losses = [one(model, opt, x, t, (k % 2,), set_to_none) for k in range(30)]
    assert losses[-2] < 0.5 * losses[0]
    assert losses[-1] < 0.5 * losses[1]


@structures
@every
def test_an_expert_without_a_gradient_is_not_touched(structure: Any, every: int) -> None:
    model, x, t = task()
    opt = optimizer(model, structure, every, momentum=0.9, weight_decay=0.1)
    params = dict(model.named_parameters())
    for k in range(8):
        idle = [params[name] for name in NAMES[f"e.{(k + 1) % 2}"]] + [*model.spare.parameters()]
        before = [(p.clone(), copy.deepcopy(opt.state.get(p, {}))) for p in idle]
        one(model, opt, x, t, (k % 2,))
        for p, (value, state) in zip(idle, before, strict=True):
            assert torch.equal(p, value)
            assert opt.state[p].keys() - {"natgrad"} == state.keys() - {"natgrad"}
            assert all(torch.equal(opt.state[p][key], state[key]) for key in state if key != "natgrad")
    assert opt.last is not None
    assert not opt.last.displacement["spare.weight"].any()


@structures
def test_blocks_that_are_dropped_at_random_are_trained(structure: Any) -> None:
    model, x, t = task()
    opt = optimizer(model, structure, momentum=0.5)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(60):
        kept = torch.rand(2, generator=generator) < 0.6
        one(model, opt, x, t, tuple(k for k in range(2) if kept[k]))
        with torch.no_grad():
            model.using = (0, 1)
            losses.append((model(x) - t).square().mean().item())
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])
def test_the_average_of_a_layer_is_over_the_passes_that_used_it(kind: Any) -> None:
    model, x, t = task()
    opt = optimizer(model, kind())
    one(model, opt, x, t, (0, 1))
    G = opt.tracker.average
    assert G is not None
    before = {key: value.clone() for key, value in G.tensors().items()}
    one(model, opt, x, t, (0,))
    after = opt.tracker.average
    assert after is not None
    assert after.unseen == {"spare.weight", "spare.bias"}
    for side in "SA":
        assert torch.equal(after.tensors()[f"e.1.weight/{side}"], before[f"e.1.weight/{side}"])
    assert not torch.equal(after.tensors()["e.0.weight/S"], before["e.0.weight/S"])


@pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])
def test_what_one_pass_sees_first_is_its_own_estimate(kind: Any) -> None:
    model, x, t = task()
    opt = optimizer(model, kind())
    one(model, opt, x, t, (0,))
    model.using = (1,)
    own = ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean())).tensors()
    one(model, opt, x, t, (1,))
    assert opt.tracker.average is not None
    after = opt.tracker.average.tensors()
    for side in "SA":
        torch.testing.assert_close(after[f"e.1.weight/{side}"], own[f"e.1.weight/{side}"])


@structures
def test_the_rows_of_a_layer_that_is_not_used_are_zero_and_need_no_pass(structure: Any) -> None:
    model, x, _ = task()
    calls = []
    pb = ng.pullback(model, x, ng.Euclidean())
    with model.e[0].register_forward_hook(lambda *_: calls.append(0)):
        G = structure.estimate(pb)
    assert list(pb.unused) == ["e.1.weight", "spare.weight"]
    shapes = G.flat(ng.Vector({name: torch.ones_like(p) for name, p in pb.model.params.items()}))
    assert not shapes["e.1.weight"].any()
    assert not shapes["spare.bias"].any()
    assert shapes["e.0.weight"].any()


def test_a_layer_without_a_metric_waits_until_a_pass_has_used_it(caplog: pytest.LogCaptureFixture) -> None:
    model, x, t = task()
    opt = optimizer(model, ng.Kronecker(), 5)
    one(model, opt, x, t, (0,))
    value = model.e[1].weight.clone()  # type: ignore[operator]
    with caplog.at_level(logging.INFO, "natgrad"):
        one(model, opt, x, t, (1,))
        assert torch.equal(model.e[1].weight, value)  # type: ignore[arg-type]
        one(model, opt, x, t, (1,))
    assert not torch.equal(model.e[1].weight, value)  # type: ignore[arg-type]
    said = [r.getMessage() for r in caplog.records if "a gradient, but no forward pass" in r.getMessage()]
    assert len(said) == 1
    assert said[0].startswith("e.1.bias, e.1.weight: ")
    assert not opt.tracker.due


def test_the_log_says_once_what_is_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, x, t = task()
    opt = optimizer(model, ng.Kronecker())
    with caplog.at_level(logging.INFO, "natgrad"):
        for k in range(6):
            one(model, opt, x, t, (k % 2,))
    said = [r.getMessage() for r in caplog.records if "no gradient. A parameter is left alone" in r.getMessage()]
    assert [m.partition(":")[0] for m in said] == [
        "e.1.weight, e.1.bias, spare.weight, spare.bias",
        "e.0.weight, e.0.bias",
    ]


@structures
@pytest.mark.parametrize("at", [1, 2, 5])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(structure: Any, at: int) -> None:
    model, x, t = task()
    opt = optimizer(model, structure, 2, momentum=0.9)
    for k in range(at):
        one(model, opt, x, t, (k % 2,))
    other = copy.deepcopy(model)
    again = optimizer(other, structure, 2, momentum=0.9)
    again.load_state_dict(opt.state_dict())
    for k in range(at, at + 4):
        one(model, opt, x, t, (k % 2,))
        one(other, again, x, t, (k % 2,))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_without_any_gradient_a_step_is_refused() -> None:
    model, x, _ = task()
    opt = optimizer(model, ng.Kronecker())
    model(x)
    with pytest.raises(ValueError, match=r"no parameter has a gradient: call loss.backward\(\) before opt.step"):
        opt.step()


def test_the_step_is_that_of_a_gradient_of_zero() -> None:
    model, x, t = task()
    twin = copy.deepcopy(model)
    opt, other = optimizer(model, ng.Dense()), optimizer(twin, ng.Dense())
    model.using = twin.using = (0, 1)
    for net in (model, twin):
        (net(x) - t).square().mean().backward()
    for p in model.e[1].parameters():
        p.grad = None
    for q in twin.e[1].parameters():
        q.grad = torch.zeros_like(q)
    for q in twin.spare.parameters():
        q.grad = torch.zeros_like(q)
    opt.step()
    other.step()
    torch.testing.assert_close(model.head.weight, twin.head.weight)
    assert not torch.equal(model.e[1].weight, twin.e[1].weight)  # type: ignore[arg-type]


@pytest.mark.parametrize("make", [ng.Natural, ng.Shampoo, ng.SOAP])
@pytest.mark.parametrize("first", [1, 9, 26])
def test_a_layer_moves_with_its_first_gradient(first: int, make: Any) -> None:
    """Whatever the schedule of the inverses is."""
    torch.manual_seed(0)
    early, late, x = nn.Linear(4, 3), nn.Linear(4, 3), torch.randn(16, 4)
    opt = make(nn.ModuleList([early, late]), lr=1e-2, weight_decay=0.0)
    start = late.weight.detach().clone()
    for step in range(first + 1):
        assert torch.equal(late.weight, start)
        opt.zero_grad()
        loss = early(x).square().mean()
        (loss + late(x).square().mean() if step == first else loss).backward()
        opt.step()
    assert not torch.isclose(late.weight, start).any()


def test_a_layer_that_is_trainable_again_is_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)), torch.randn(8, 4)
    model[0].requires_grad_(False)
    opt = ng.KFAC(model, ng.Euclidean())
    with caplog.at_level(logging.WARNING, "natgrad"):
        for _ in range(3):
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
            model[0].requires_grad_(True)
    assert [record.getMessage() for record in caplog.records] == [
        "0.weight, 0.bias was frozen when the optimizer was made, and is trainable now, but not stepped: make a new one"
    ]


class Tokens(nn.Module):
    """Two tokens of one module without a rule. The second is used from some step on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
        self.head = nn.Linear(3, 2)
        self.both = False

    def forward(self, x: Tensor) -> Tensor:
        """x [n 3]."""
        h = x * self.first
        return self.head(torch.where(x > 0, self.second, h) if self.both else h)


def _step(model: Tokens, opt: Any, x: Tensor) -> None:
    opt.zero_grad()
    model(x).square().mean().backward()
    opt.step()


def test_a_parameter_that_no_pass_uses_needs_no_rule_even_beside_one_that_is_used() -> None:
    """The mask token of a vision transformer, beside its class token."""
    model, x = Tokens().double(), torch.randn(8, 3, dtype=torch.float64)
    pb = ng.pullback(model, x, ng.Euclidean())
    assert list(pb.unused) == ["second"]
    found = ng.Kronecker(strict=True).estimate(pb).diagonal()
    J = torch.func.vmap(torch.func.jacrev(lambda θ, x: torch.func.functional_call(model, θ, x)), (None, 0))(
        dict(model.named_parameters()), x
    )
    torch.testing.assert_close(found[:3], J["first"].square().sum(1).mean(0), rtol=1e-10, atol=1e-10)
    assert not found[3:6].any()
    opt = ng.KFAC(model, ng.Euclidean(), strict=True, metric_every=1)
    for _ in range(2):
        _step(model, opt, x)
    assert "the outputs do not depend on second" in str(opt.plan())


def test_a_parameter_that_a_later_pass_uses_first_says_why_it_has_no_rule(caplog: pytest.LogCaptureFixture) -> None:
    model, strict, x = Tokens(), Tokens(), torch.randn(8, 3)
    opt, refusing = (ng.KFAC(m, ng.Euclidean(), strict=m is strict, metric_every=1) for m in (model, strict))
    _step(model, opt, x)
    _step(strict, refusing, x)
    model.both = strict.both = True
    with caplog.at_level(logging.WARNING, "natgrad"):
        _step(model, opt, x)
    assert "second: the metric is Diagonal(); no pass had used them when the metric was first estimated" in caplog.text
    assert "second: no pass had used them when the metric was first estimated" in str(opt.plan())
    with pytest.raises(ng.errors.UncoveredError, match=r"covers second.*no pass had used them.*Begin with a pass"):
        _step(strict, refusing, x)
