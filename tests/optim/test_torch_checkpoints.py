"""Checkpoints by torch's own engine: saved and loaded by it, a run goes on bit for bit, or is refused by name."""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load as load_all
from torch.distributed.checkpoint.state_dict_saver import save as save_all

import natgrad as ng
from tests.optim.states import EXACT, MAKES, net
from tests.optim.tasks import seeded

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
Save = Callable[[nn.Module, ng.NaturalGradient, Path], None]
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


def plain(seed: int = 0) -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), seed)


def run(model: nn.Module, opt: ng.NaturalGradient, steps: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        x = torch.randn(6, 3, generator=generator, dtype=torch.float64)

        def closure(x: Tensor = x) -> Tensor:
            opt.zero_grad()
            loss = nn.functional.cross_entropy(model(x), torch.arange(6) % 2)
            loss.backward()
            return loss

        opt.step(closure)
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _save(model: nn.Module, opt: ng.NaturalGradient, folder: Path) -> None:
    save_all({"model": model, "opt": opt}, checkpoint_id=folder)


def _load(model: nn.Module, opt: ng.NaturalGradient, folder: Path) -> None:
    load_all({"model": model, "opt": opt}, checkpoint_id=folder)


def _save_named(model: nn.Module, opt: ng.NaturalGradient, folder: Path, options: Any = None) -> None:
    of_model, of_opt = get_state_dict(model, opt, options=options)
    save_all({"model": of_model, "opt": of_opt}, checkpoint_id=folder)


def _load_named(model: nn.Module, opt: ng.NaturalGradient, folder: Path, options: Any = None) -> None:
    of_model, of_opt = get_state_dict(model, opt, options=options)
    state: dict[str, Any] = {"model": of_model, "opt": of_opt}
    load_all(state, checkpoint_id=folder)
    set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"], options=options)


WAYS: dict[str, tuple[Save, Save]] = {
    "load": (_save, _load),
    "set_state_dict": (_save_named, _load_named),
    "flat": (partial(_save_named, options=FLAT), partial(_load_named, options=FLAT)),
}
KNOWN = {name: make for name, make in MAKES.items() if name not in ("low_rank", "kernel", "implicit")} | {
    "adapted": lambda m: ng.KFAC(m, EXACT, step=ng.LevenbergMarquardt(), damping=1, momentum=0.0),
    "cg": lambda m: ng.NaturalGradient(m, EXACT, structure=ng.Refresh(ng.Dense(), every=2), solver=ng.CG()),
    "sampled": lambda m: ng.EKFAC(m, ng.Fisher(ng.Categorical(), samples=1), metric_every=2, inverse_every=3),
}


@pytest.mark.parametrize(
    ("name", "way"), [*((name, "load") for name in KNOWN), *product(["kfac", "soap"], ["set_state_dict", "flat"])]
)
def test_a_fresh_optimizer_goes_on_bit_for_bit(name: str, way: str, tmp_path: Path) -> None:
    save, load = WAYS[way]
    model, other = plain(), plain(9)
    opt, fresh = KNOWN[name](model), KNOWN[name](other)
    run(model, opt, 3, seed=1)
    save(model, opt, tmp_path)
    load(other, fresh, tmp_path)
    assert torch.equal(run(other, fresh, 3, seed=2), run(model, opt, 3, seed=2))


@pytest.mark.parametrize(
    ("name", "way"),
    [
        ("kfac", "load"),
        ("kfac", "set_state_dict"),
        ("kfac", "flat"),
        ("kernel", "load"),
        ("implicit", "flat"),
        ("self_tuned", "set_state_dict"),
    ],
)
def test_what_only_a_pass_can_tell_is_asked_for_and_then_a_run_goes_on(name: str, way: str, tmp_path: Path) -> None:
    """The last parameter has no rule, and rows depend on the batch: there is no place to load into before a step."""
    make = (MAKES | {"self_tuned": lambda m: ng.KFAC(m, EXACT, step=ng.SelfTuned())})[name]
    save, load = WAYS[way]
    model, other = net(), net(9)
    opt, fresh = make(model), make(other)
    run(model, opt, 3, seed=1)
    save(model, opt, tmp_path)
    with pytest.raises(Exception, match=r"make one step, on any batch, and then load\. Nothing was loaded"):
        load(other, fresh, tmp_path)
    assert fresh.tracker.step == 0
    run(other, fresh, 1, seed=3)
    load(other, fresh, tmp_path)
    assert torch.equal(run(other, fresh, 3, seed=2), run(model, opt, 3, seed=2))


@pytest.mark.parametrize("name", MAKES)
def test_a_named_state_in_a_file_goes_on_bit_for_bit(name: str) -> None:
    """As Hugging Face and others keep it: no place is needed, as all of it is there."""
    model, other = net(), net(9)
    opt, fresh = MAKES[name](model), MAKES[name](other)
    run(model, opt, 3, seed=1)
    file = io.BytesIO()
    torch.save(get_state_dict(model, opt), file)
    file.seek(0)
    of_model, of_opt = torch.load(file, weights_only=True)
    set_state_dict(other, fresh, model_state_dict=of_model, optim_state_dict=of_opt)
    assert torch.equal(run(other, fresh, 3, seed=2), run(model, opt, 3, seed=2))


def test_the_state_is_tensors_by_parameter_under_names_without_dots() -> None:
    model = plain()
    opt = ng.KFAC(model, EXACT)
    run(model, opt, 2, seed=1)
    state = opt.state_dict()
    assert list(state) == ["state", "param_groups"]
    assert list(state["state"]) == [0, 1, 2, 3]
    for of_param in state["state"].values():
        for key, value in (of_param | of_param["natgrad"]).items():
            assert isinstance(value, Tensor) or key == "natgrad"
            assert "." not in key
    assert {"operator/S", "operator/A", "inverse/S", "inverse/A"} <= set(state["state"][2]["natgrad"])
    assert not any("operator" in key for key in state["state"][3]["natgrad"])  # a bias is in the layer of its weight


@pytest.mark.parametrize("name", ["natural", "kfac", "self_tuned"])
def test_a_state_to_load_into_changes_nothing(name: str) -> None:
    """Torch asks for one by a step at the rate 0 with gradients that are 0."""
    make = (MAKES | {"self_tuned": lambda m: ng.KFAC(m, EXACT, step=ng.SelfTuned())})[name]
    model, other = plain(), plain()
    opt, asked = make(model), make(other)
    get_state_dict(other, asked)
    asked.state_dict()
    assert asked.tracker.step == 0
    assert torch.equal(run(other, asked, 4, seed=1), run(model, opt, 4, seed=1))


def test_a_state_before_the_first_step_takes_no_more_memory_than_the_metric_may() -> None:
    """A metric that is too large is refused in the first pass; until then the optimizer can be saved and moved."""
    model = nn.Linear(10**5, 1)
    state = ng.NaturalGradient(model, EXACT).state_dict()
    assert not any("matrix" in key for key in state["state"][0]["natgrad"])


def test_a_first_step_at_the_rate_zero_is_a_step() -> None:
    """A schedule may begin so: its gradient is not zero, and the metric has seen it."""
    model = plain()
    opt = ng.KFAC(model, EXACT, lr=0.0)
    run(model, opt, 1, seed=1)
    assert opt.tracker.step == 1
    opt = ng.KFAC(model, EXACT, lr=0.0)
    model(torch.ones(2, 3, dtype=torch.float64)).sum().backward()
    opt.step()
    assert opt.tracker.step == 1


def _damaged(key: str, value: Tensor | None) -> Callable[[dict[str, Any]], object]:
    def damage(state: dict[str, Any]) -> None:
        first = state["state"][0]["natgrad"]
        if value is None:
            del first[key]
        else:
            first[key] = value

    return damage


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (_damaged("words", None), 'it has no "natgrad" entry'),
        (_damaged("words", torch.zeros(5, dtype=torch.uint8)), '"words" of the state cannot be read: it is damaged'),
        (_damaged("step", None), 'the "natgrad" entry of the state has no step: it is incomplete'),
        (_damaged("operator/S", None), r"0\.weight/S of the metric is missing in the state\. Nothing was loaded"),
        (lambda state: state["state"][1].pop("momentum"), r"momentum of 0\.bias is missing in the state"),
        (lambda state: state["state"].pop(2), r"the state of 2\.weight is missing"),
        (
            lambda state: state["param_groups"][0]["params"].pop(),
            "has 3 parameters in its groups, and was saved with 4",
        ),
    ],
    ids=["no words", "words", "step", "factor", "momentum", "parameter", "groups"],
)
def test_a_damaged_state_is_refused_by_what_is_wrong(damage: Callable[[Any], object], match: str) -> None:
    model = plain()
    opt = ng.KFAC(model, EXACT)
    run(model, opt, 2, seed=1)
    state = opt.state_dict()
    damage(state)
    other = ng.KFAC(plain(), EXACT)
    with pytest.raises(ValueError, match=match):
        other.load_state_dict(state)
    assert other.tracker.step == 0


@pytest.mark.parametrize(("saved", "now"), [(0.5, 0.75), (0.5, 0.0), (0.0, 0.5), (1.0, 0.5)])
def test_a_metric_goes_on_at_another_power(saved: float, now: float) -> None:
    """What is averaged is G. The next step has the inverse at the new power."""

    def made(model: nn.Module, power: float) -> ng.NaturalGradient:
        return ng.NaturalGradient(
            model,
            ng.BatchGradient(),
            structure=ng.Refresh(ng.Kronecker(largest=1, power=power), decay=0.95),
            solver=ng.Factored(),
            step=ng.Polar(0.4),
            lr=0.1,
            damping=ng.Relative(1e-2),
            momentum_on="gradients",
            fallback="adamw",
        )

    model, other, reference = plain(), plain(), plain()
    opt, again, same = made(model, saved), made(other, now), made(reference, now)
    run(model, opt, 3, seed=1)
    again.load_state_dict(opt.state_dict())
    other.load_state_dict(model.state_dict())
    if now and saved:  # the same average of G at the same parameters
        for p, start in zip(reference.parameters(), model.parameters(), strict=True):
            p.data.copy_(start)
        state = opt.state_dict()
        assert opt.tracker.average is not None
        same.load_state_dict(state)
        same.preconditioner.inverse = None
        assert torch.equal(run(other, again, 2, seed=2), run(reference, same, 2, seed=2))
    before = torch.cat([p.detach().reshape(-1) for p in other.parameters()])
    assert not torch.equal(run(other, again, 2, seed=2), before)
