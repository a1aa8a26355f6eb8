"""Parameters that the loss reaches, but not through the outputs that the metric is on."""

import copy
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import LossMismatchError
from natgrad.structures import Structure
from tests.optim.tasks import seeded


class TwoHeads(nn.Module):
    """A body with two heads, the second behind a matrix and a gain that belong to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.a, self.b = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(4, 1)
        self.w, self.gain = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.tanh(self.body(x))
        return {"a": self.a(h), "b": self.b(h @ self.w) * self.gain}


OUTSIDE = ["w", "gain", "b.weight", "b.bias"]
STRUCTURES: dict[str, tuple[Structure, ng.solve.Solver]] = {
    "kronecker": (ng.Kronecker(), ng.Cholesky()),
    "eigen": (ng.EigenKronecker(), ng.Cholesky()),
    "dense": (ng.Dense(), ng.Cholesky()),
    "block": (ng.BlockDense(), ng.Cholesky()),
    "diagonal": (ng.Diagonal(), ng.Cholesky()),
    "kernel": (ng.Kernel(), ng.Cholesky()),
    "implicit": (ng.Implicit(), ng.CG(tol=1e-12)),
}
structures = pytest.mark.parametrize("name", STRUCTURES)


def made(name: str, model: nn.Module, **options: Any) -> ng.NaturalGradient:
    structure, solver = STRUCTURES[name]
    return ng.NaturalGradient(
        model,
        ng.Fisher(ng.Categorical()),
        structure=ng.Refresh(structure, every=options.pop("every", 1), decay=options.pop("decay", 0.0)),
        solver=solver,
        lr=0.05,
        damping=options.pop("damping", 0.1),
        output=lambda out: out["a"],
        **options,
    )


def backward(model: nn.Module, at: int = 0, past: bool = True) -> Tensor:
    x, t, u = seeded(lambda: (torch.randn(8, 3).double(), torch.randint(2, (8,)), torch.randn(8, 1).double()), at)
    out = model(x)
    loss = F.cross_entropy(out["a"], t)
    loss = loss + (out["b"] - u).square().mean() if past else loss
    loss.backward()
    return loss


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> list[float]:
    losses = []
    for at in steps:
        opt.zero_grad()
        losses.append(backward(model, at).item())
        opt.step()
    return losses


def two_heads() -> TwoHeads:
    return seeded(lambda: TwoHeads().double())


@structures
@pytest.mark.parametrize("step", [ng.Fixed(), ng.KLClip(1e-3)], ids=["fixed", "clip"])
def test_they_do_not_move_and_the_others_move_as_if_they_were_not_there(name: str, step: ng.step.StepRule) -> None:
    model, other = two_heads(), two_heads()
    for key in OUTSIDE:
        other.get_parameter(key).requires_grad_(False)
    before = copy.deepcopy(model)
    opts = made(name, model, step=step), made(name, other, step=step)
    for m, opt in zip((model, other), opts, strict=True):
        train(m, opt, range(3))
    for key, p in model.named_parameters():
        expected = before.get_parameter(key) if key in OUTSIDE else other.get_parameter(key)
        torch.testing.assert_close(p, expected, rtol=1e-8, atol=1e-10)


@structures
def test_the_fallback_steps_them_as_torch_does(name: str) -> None:
    model, other = two_heads(), two_heads()
    opt = made(name, model, fallback="adamw", weight_decay=0.1)
    head = [other.get_parameter(key) for key in OUTSIDE]
    adamw = torch.optim.AdamW(head, lr=0.05, weight_decay=0.1, betas=(0.9, 0.95))
    for at in range(4):
        train(model, opt, range(at, at + 1))
        adamw.zero_grad()
        backward(other, at)
        adamw.step()
        with torch.no_grad():
            for key, p in other.named_parameters():
                if key not in OUTSIDE:
                    p.copy_(model.get_parameter(key))
    for key in OUTSIDE:
        torch.testing.assert_close(model.get_parameter(key), other.get_parameter(key))
    assert "AdamW steps" in str(opt.plan())


@structures
@pytest.mark.parametrize("fallback", [None, "adamw"])
def test_a_loss_on_two_heads_falls_with_a_metric_on_one(name: str, fallback: Any) -> None:
    """It rose past 10²⁰ in 20 steps with the step ω/λ."""
    model = two_heads()
    opt = made(name, model, damping=0.01, fallback=fallback)
    losses = [train(model, opt, range(1))[0] for _ in range(20)]
    assert losses[-1] < 0.8 * losses[0]


def test_they_are_named_once_and_the_plan_gives_the_reason(caplog: pytest.LogCaptureFixture) -> None:
    for fallback, ending in ((None, "w, gain, b.weight, b.bias do not move: give them a group"), ("adamw", "AdamW")):
        model = two_heads()
        opt = made("kronecker", model, fallback=fallback)
        caplog.clear()
        with caplog.at_level(logging.INFO, "natgrad"):
            train(model, opt, range(3))
        said = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
        assert len(said) == 1
        assert "do not come through the outputs that the metric is on" in said[0]
        assert ending in said[0]
        plan = opt.plan()
        assert "the outputs do not depend on" in str(plan)
        assert "no layer rule covers" not in str(plan)
        assert {row.structure for row in plan.rows if set(row.names) <= set(OUTSIDE)} == {"no metric"}


def test_a_group_may_refuse_the_fallback() -> None:
    model = two_heads()
    before = model.b.weight.detach().clone()
    groups = [{"params": model.b.parameters(), "fallback": None}]
    opt = made("kronecker", model, fallback="adamw", groups=groups)
    train(model, opt, range(2))
    assert torch.equal(model.b.weight, before)
    assert not torch.equal(model.w, two_heads().w)


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC, ng.Natural])
def test_strict_refuses_them_before_anything_moves(preset: Callable[..., Any]) -> None:
    model = two_heads()
    before = copy.deepcopy(model.state_dict())
    opt = preset(model, ng.Fisher(ng.Categorical()), output=lambda out: out["a"], strict=True)
    with pytest.raises(LossMismatchError, match=r"do not come through the outputs.*\bw\b"):
        train(model, opt, range(1))
    assert all(torch.equal(p, before[key]) for key, p in model.state_dict().items())
    opt.zero_grad()
    backward(model, past=False)
    opt.step()


def test_layers_that_the_backward_pass_of_the_user_does_not_show_are_named_and_belong_to_the_fallback(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """``Empirical()`` sees the layers below the outputs. Parameters of no layer have a metric of their gradient."""
    one = lambda out: out["a"]  # noqa: E731
    model, start = two_heads(), two_heads()
    train(model, ng.NaturalGradient(model, ng.Empirical(), structure=ng.Kronecker(), output=one), range(3))
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert "do not come through the outputs that the metric is on: b.weight, b.bias do not move: give them" in said
    assert torch.equal(model.b.weight, start.b.weight)
    model = two_heads()
    train(model, ng.Natural(model, ng.Empirical(), output=one), range(1))  # type: ignore[call-arg]
    assert not [key for key in OUTSIDE if torch.equal(model.get_parameter(key), start.get_parameter(key))]
    opt = ng.KFAC(two_heads(), ng.Empirical(), output=one, strict=True)
    with pytest.raises(LossMismatchError, match=r"do not come through the outputs.*b\.weight, b\.bias do not move"):
        train(opt.tracker.module, opt, range(1))


def test_the_metric_is_not_estimated_more_often_for_their_sake() -> None:
    model = two_heads()
    opt = made("kronecker", model, every=4)
    train(model, opt, range(2))
    assert not opt.tracker.due


@pytest.mark.parametrize("name", [name for name in STRUCTURES if name != "implicit"])
@pytest.mark.parametrize("fallback", [None, "adamw"])
def test_a_run_goes_on_from_a_checkpoint_bit_for_bit(name: str, fallback: Any) -> None:
    model, decay = two_heads(), 0.0 if name == "kernel" else 0.5
    opt = made(name, model, every=3, decay=decay, fallback=fallback)
    train(model, opt, range(2))
    other = copy.deepcopy(model)
    again = made(name, other, every=3, decay=decay, fallback=fallback)
    again.load_state_dict(opt.state_dict())
    train(model, opt, range(2, 6))
    train(other, again, range(2, 6))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_head_that_an_estimate_sees_later_has_its_metric_from_then_on() -> None:
    model = two_heads()
    on_both = [False]

    def output(out: dict[str, Tensor]) -> Tensor:
        return torch.cat([out["a"], out["b"]], 1) if on_both[0] else torch.cat([out["a"], 0 * out["a"][:, :1]], 1)

    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Refresh(ng.Kronecker(), decay=0.5), output=output)
    train(model, opt, range(1))
    assert opt.parameters.outside == set(OUTSIDE)
    on_both[0] = True
    train(model, opt, range(1))
    assert not opt.parameters.outside
    assert not torch.equal(model.b.weight, two_heads().b.weight)
