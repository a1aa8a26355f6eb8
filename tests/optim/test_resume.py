"""Checkpoints: a resumed run is, bit for bit, the run that was saved."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.optim.checkpoint import gather_state
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.features import Rows
from natgrad.rules.linear import LinearRule
from tests.optim.states import whole
from tests.optim.tasks import Task, seeded, task

SAMPLED = ng.Fisher(ng.Categorical(), samples=1)
LOOSE = ng.CG(tol=1e-2, max_steps=3)  # far from converged: a lost warm start would show

RUNS: dict[str, dict[str, Any]] = {
    "dense": {"structure": ng.Dense()},
    "dense_every": {"structure": ng.Refresh(ng.Dense(), every=3, decay=0.9)},
    "dense_rarely": {"structure": ng.Refresh(ng.Dense(), every=2, decay=0.9, inverse=3)},
    "dense_pinv_rarely": {"structure": ng.Refresh(ng.Dense(), every=2, decay=0.9, inverse=3), "solver": ng.Pinv()},
    "block_dense_rarely": {"structure": ng.Refresh(ng.BlockDense(), every=2, decay=0.9, inverse=3)},
    "low_rank_rarely": {"structure": ng.Refresh(ng.LowRank(4), every=2, decay=0.9, inverse=3)},
    "dense_pinv": {"structure": ng.Refresh(ng.Dense(), every=3), "solver": ng.Pinv()},
    "dense_cg": {"structure": ng.Refresh(ng.Dense(), every=3, decay=0.9), "solver": LOOSE},
    "block_dense": {"structure": ng.Refresh(ng.BlockDense(), every=3, decay=0.9), "momentum": 0.9},
    "diagonal_sampled": {"structure": ng.Diagonal(), "metric": SAMPLED},
    "diagonal_averaged": {"structure": ng.Refresh(ng.Diagonal(), every=3, decay=0.9), "metric": SAMPLED},
    "low_rank": {"structure": ng.Refresh(ng.LowRank(4), every=3, decay=0.9), "metric": SAMPLED, "momentum": 0.5},
    "kernel": {"structure": ng.Refresh(ng.Kernel(), every=3), "metric": SAMPLED},
    "implicit_cg": {"structure": ng.Implicit(), "solver": LOOSE, "momentum": 0.9},
    "momentum_decay": {"momentum": 0.9, "weight_decay": 0.1},
    "trust_region": {"step": ng.TrustRegion(0.05, ng.Backtracking()), "momentum": 0.5},
    "geodesic": {"step": ng.GeodesicCorrected(), "structure": ng.Refresh(ng.Dense(), every=3, decay=0.9)},
    "geodesic_sampled_cg": {"step": ng.GeodesicCorrected(), "metric": SAMPLED, "solver": LOOSE},
    "levenberg_marquardt": {"step": ng.LevenbergMarquardt(scaled=False)},
    "levenberg_marquardt_every": {
        "step": ng.LevenbergMarquardt(),
        "structure": ng.Refresh(ng.BlockDense(), every=3, decay=0.9),
        "momentum": 0.5,
    },
}


def _optimizer(of: Task, name: str, seed: int) -> ng.NaturalGradient:
    options = {"lr": 0.3, "damping": 1e-2, **RUNS[name]}
    return of.optimizer(generator=torch.Generator().manual_seed(seed), **options)


def _run(of: Task, opt: Any, steps: range) -> list[Tensor]:
    """The batch changes every third step: in between, a warm start is worth having."""
    iterates = []
    for t in steps:
        batch = task("classes", seed=100 + t // 3)
        view = Task(of.model, batch.x, batch.t, of.kind)
        opt.step(view.closure(opt))
        iterates.append(of.theta())
    return iterates


@pytest.mark.parametrize("at", [1, 4, 5])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_goes_on_bit_for_bit(name: str, at: int) -> None:
    of = task("classes")
    opt = _optimizer(of, name, seed=7)
    _run(of, opt, range(at))
    file = io.BytesIO()
    torch.save({"model": of.model.state_dict(), "opt": opt.state_dict()}, file)
    expected = _run(of, opt, range(at, at + 5))

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = task("classes", seed=99)
    other = _optimizer(fresh, name, seed=8)
    fresh.model.load_state_dict(saved["model"])
    other.load_state_dict(saved["opt"])
    got = _run(fresh, other, range(at, at + 5))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert len({float(θ.sum()) for θ in got}) >= 4  # it did move; Levenberg–Marquardt may refuse a step


@pytest.mark.parametrize("name", RUNS)
def test_loading_replaces_all_that_a_used_optimizer_remembers(name: str) -> None:
    of, used = task("classes"), task("classes", seed=3)
    opt, other = _optimizer(of, name, 7), _optimizer(used, name, 8)
    _run(of, opt, range(4))
    _run(used, other, range(20, 25))
    used.loss()  # and an estimate that no step has used
    used.model.load_state_dict(of.model.state_dict())
    other.load_state_dict(opt.state_dict())
    expected, got = _run(of, opt, range(4, 8)), _run(used, other, range(4, 8))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


@pytest.mark.parametrize(
    "metric", [ng.Empirical(), ng.Euclidean(), nn.CrossEntropyLoss()], ids=lambda m: type(m).__name__
)
def test_a_backward_pass_before_a_state_is_loaded_belongs_to_no_step(metric: Any) -> None:
    """Not to the next one either, where no estimate is due: the metric is that of the run that was saved."""
    of, other = task("classes"), task("classes", seed=99)
    schedule = ng.Refresh(ng.Kronecker(), every=3, decay=0.9)
    opt, again = (ng.NaturalGradient(t.model, metric, structure=schedule, lr=0.1) for t in (of, other))
    _run(of, opt, range(2))
    other.loss().backward()
    other.model.load_state_dict(of.model.state_dict())
    again.load_state_dict(opt.state_dict())
    expected, got = _run(of, opt, range(2, 6)), _run(other, again, range(2, 6))
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def test_a_state_dict_is_a_snapshot() -> None:
    of = task("classes")
    opt = _optimizer(of, "levenberg_marquardt_every", 7)
    _run(of, opt, range(2))
    weights = {name: p.clone() for name, p in of.model.state_dict().items()}
    state = opt.state_dict()
    expected = _run(of, opt, range(2, 6))
    of.model.load_state_dict(weights)
    opt.load_state_dict(state)
    assert all(torch.equal(a, b) for a, b in zip(_run(of, opt, range(2, 6)), expected, strict=True))


AMID: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda m: ng.KFAC(m, ng.Euclidean()),
    "kfac_of_a_loss": lambda m: ng.KFAC(m, nn.CrossEntropyLoss()),
    "kfac_sampled": lambda m: ng.KFAC(m, SAMPLED),
    "kfac_empirical": lambda m: ng.KFAC(m, ng.Empirical()),
    "kfac_tuned": lambda m: ng.KFAC(m, ng.Euclidean(), step=ng.SelfTuned()),
    "ekfac": lambda m: ng.EKFAC(m, ng.Euclidean()),
    "sobolev_kfac": lambda m: ng.SobolevKFAC(m, ng.Euclidean()),
    "natural_empirical": lambda m: ng.Natural(m, ng.Empirical()),
}


@pytest.mark.parametrize("after", ["forward", "backward", "refresh"])
@pytest.mark.parametrize("name", AMID)
def test_a_batch_whose_pass_was_made_before_the_state_was_saved_counts_once(name: str, after: str) -> None:
    """The run that was saved goes on with its step; the run that is resumed begins the batch again."""
    of, other = task("classes"), task("classes", seed=99)
    opt, again = AMID[name](of.model), AMID[name](other.model)
    batches = [task("classes", seed=seed) for seed in range(6)]
    refreshes = after == "refresh" and "empirical" not in name

    def make_step(of: Task, opt: Any, at: int, amid: Callable[[str], None]) -> Tensor:
        if refreshes:
            opt.refresh(batches[at].x, batches[at].t)
        amid("refresh")

        def closure() -> Tensor:
            opt.zero_grad()
            loss = F.cross_entropy(of.model(batches[at].x), batches[at].t)
            amid("forward")
            loss.backward()
            amid("backward")
            return loss

        opt.step(closure)
        return of.theta()

    def save(when: str) -> None:
        if when == after and not saved:
            saved.append({"model": copy.deepcopy(of.model.state_dict()), "opt": opt.state_dict()})

    saved: list[dict[str, Any]] = []
    for at in range(3):
        make_step(of, opt, at, lambda _: None)
    expected = [make_step(of, opt, at, save) for at in range(3, 6)]
    other.model.load_state_dict(saved[0]["model"])
    again.load_state_dict(saved[0]["opt"])
    got = [make_step(other, again, at, lambda _: None) for at in range(3, 6)]
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.kind, self.box = nn.Linear(3, 4), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"kind": self.kind(x), "box": self.box(x)}


@pytest.mark.parametrize("amid", [True, False])
def test_a_rule_may_ask_about_heads_before_a_resumed_run_has_estimated_their_metric(amid: bool) -> None:
    """The pass was made before the state was saved, or the metric is not due."""
    x, t = torch.ones(6, 3).cumsum(0), torch.arange(6) % 4
    losses = {"kind": nn.CrossEntropyLoss(), "box": nn.MSELoss()}
    structure = ng.Kronecker() if amid else ng.Refresh(ng.Kronecker(), every=2)

    def optimizer(model: nn.Module) -> ng.NaturalGradient:
        return ng.NaturalGradient(model, losses, structure=structure, step=ng.SelfTuned(), damping=0.1)

    def run(model: nn.Module, opt: Any, steps: int, saves: bool = False) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            y = model(x)
            loss = F.cross_entropy(y["kind"], t) + F.mse_loss(y["box"], x[:, :2])
            loss.backward()
            if saves and amid and not saved:
                saved.append(copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()}))
            return loss

        for _ in range(steps):
            opt.step(closure)

    saved: list[dict[str, Any]] = []
    model, other = seeded(TwoHeads), TwoHeads()
    opt, again = optimizer(model), optimizer(other)
    run(model, opt, 3)
    if not amid:
        saved.append(copy.deepcopy({"model": model.state_dict(), "opt": opt.state_dict()}))
    run(model, opt, 2, saves=True)
    other.load_state_dict(saved[0]["model"])
    again.load_state_dict(saved[0]["opt"])
    run(other, again, 2)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("weight", [None, torch.tensor([1.0, 2.0, 3.0, 4.0])], ids=["ignored", "weighted"])
def test_a_rule_may_ask_about_the_terms_of_a_batch_that_counts_once(weight: Tensor | None) -> None:
    x, t, loss = torch.ones(6, 3).cumsum(0), torch.tensor([0, -100, 1, 2, -100, 3]), nn.CrossEntropyLoss(weight=weight)
    model, other = seeded(lambda: nn.Linear(3, 4)), nn.Linear(3, 4)
    opt, again = (ng.KFAC(each, loss, step=ng.SelfTuned()) for each in (model, other))

    def run(model: nn.Module, opt: Any, saves: bool = False) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            value: Tensor = loss(model(x), t)
            value.backward()
            if saves:
                other.load_state_dict(model.state_dict())
                again.load_state_dict(opt.state_dict())
            return value

        opt.step(closure)

    for saves in (False, False, True):
        run(model, opt, saves)
    run(other, again)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_a_state_before_the_first_step_can_be_resumed() -> None:
    of, fresh = task("classes"), task("classes")
    opt, other = _optimizer(of, "diagonal_averaged", 7), _optimizer(fresh, "diagonal_averaged", 8)
    other.load_state_dict(opt.state_dict())
    pairs = zip(_run(of, opt, range(4)), _run(fresh, other, range(4)), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_damping_that_was_adapted_is_resumed() -> None:
    of, fresh = task("classes"), task("classes")
    opt, other = _optimizer(of, "levenberg_marquardt", 7), _optimizer(fresh, "levenberg_marquardt", 8)
    _run(of, opt, range(3))
    assert opt.param_groups[0]["damping"] != 1e-2
    other.load_state_dict(opt.state_dict())
    assert other.param_groups[0]["damping"] == opt.param_groups[0]["damping"]


def test_the_metric_is_not_cast_to_the_dtype_of_the_parameters() -> None:
    """As torch does with the rest of a state: float32 factors of a bfloat16 model would lose their digits."""
    of = task("classes")
    opt = _optimizer(of, "dense", 7)
    _run(of, opt, range(1))
    state = whole(opt)
    state["natgrad"]["operator"] = {k: t.to(torch.float32) for k, t in state["natgrad"]["operator"].items()}
    opt.load_state_dict(state)
    assert whole(opt)["natgrad"]["operator"]["matrix"].dtype == torch.float32


# Checkpoints of K-FAC and EK-FAC: bit for bit, at every phase of the schedules, across precisions; or refused.


EXACT, SAMPLED_CLASSES = ng.Fisher(ng.Categorical()), ng.Fisher(ng.Categorical(), samples=1)
SCHEDULE: dict[str, Any] = {"metric_every": 2, "inverse_every": 3, "lr": 0.1}
SIZES = (12, 9, 5, 16, 7, 20, 3, 11, 6)
Make = Callable[[nn.Module], Any]

KFAC_RUNS: dict[str, Make] = {
    "kfac": lambda m: ng.KFAC(m, EXACT, **SCHEDULE),
    "kfac_sampled": lambda m: ng.KFAC(m, SAMPLED_CLASSES, generator=torch.Generator().manual_seed(3), **SCHEDULE),
    "kfac_cholesky": lambda m: ng.KFAC(m, EXACT, solver=ng.Cholesky(), **SCHEDULE),
    "kfac_reduce": lambda m: ng.KFAC(m, EXACT, sharing="reduce", **SCHEDULE),
    "kfac_groups": lambda m: ng.KFAC(m, EXACT, groups=[{"params": m.get_submodule("last").parameters()}], **SCHEDULE),
    "kfac_block_fallback": lambda m: ng.KFAC(m, EXACT, fallback=ng.BlockDense(), **SCHEDULE),
    "ekfac": lambda m: ng.EKFAC(m, EXACT, **SCHEDULE),
    "ekfac_sampled": lambda m: ng.EKFAC(m, SAMPLED_CLASSES, generator=torch.Generator().manual_seed(3), **SCHEDULE),
}


class Net(nn.Module):
    """A convolution, a linear layer, and a weight that is used past its module, for the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.last = nn.Conv1d(1, 2, 2), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        h = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return self.last(torch.tanh(F.linear(h, self.hidden.weight, self.hidden.bias)))


def _net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    return seeded(lambda: Net().to(dtype), seed)


def _batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))


def _train(model: nn.Module, opt: Any, steps: range, sizes: Sequence[int] = (10,)) -> Tensor:
    dtype = next(model.parameters()).dtype
    for step in steps:
        n = sizes[step % len(sizes)]
        x, t = seeded(partial(_batch, n), 100 + step)
        opt.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float() if dtype == torch.bfloat16 else model(x.to(dtype)), t).backward()
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _saved(model: nn.Module, opt: Any) -> dict[str, Any]:
    """Through a file that holds tensors and numbers only."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _loaded(make: Make, saved: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    model = _net(dtype, seed=9)
    opt = make(model)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    return model, opt


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("name", KFAC_RUNS)
def test_a_resumed_run_goes_on_bit_for_bit_at_every_phase_of_the_schedules(name: str, at: int) -> None:
    """The metric every 2 steps and the inverse every 3: after 6 steps all combinations have been."""
    model = _net()
    opt = KFAC_RUNS[name](model)
    _train(model, opt, range(at))
    saved = _saved(model, opt)
    expected = _train(model, opt, range(at, at + 7))
    got = _train(*_loaded(KFAC_RUNS[name], saved), range(at, at + 7))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("name", KFAC_RUNS)
def test_a_resumed_run_goes_on_bit_for_bit_where_batches_differ_in_size(name: str, at: int) -> None:
    """A batch counts by its examples over those of the step before, which are in the state with the average."""
    model = _net()
    opt = KFAC_RUNS[name](model)
    _train(model, opt, range(at), SIZES)
    saved = _saved(model, opt)
    assert gather_state(saved["opt"])["natgrad"]["mass"][1] in SIZES
    expected = _train(model, opt, range(at, at + 5), SIZES)
    assert torch.equal(_train(*_loaded(KFAC_RUNS[name], saved), range(at, at + 5), SIZES), expected)


@pytest.mark.parametrize("name", KFAC_RUNS)
def test_a_state_can_be_loaded_again_after_steps_have_been_made_with_it(name: str) -> None:
    model = _net()
    opt = KFAC_RUNS[name](model)
    _train(model, opt, range(3))
    saved = _saved(model, opt)
    runs = []
    for _ in range(2):
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        runs.append(_train(model, opt, range(3, 6)).clone())
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
def test_a_bfloat16_model_is_resumed_with_factors_in_single_precision(name: str) -> None:
    model = _net(torch.bfloat16)
    opt = KFAC_RUNS[name](model)
    _train(model, opt, range(4))
    saved = _saved(model, opt)
    metric = gather_state(saved["opt"])["natgrad"]
    held = [*metric["operator"].values(), *metric["inverse"].values()]
    assert {t.dtype for t in held} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in held)  # a cast would have lost digits
    other, loaded = _loaded(KFAC_RUNS[name], saved, torch.bfloat16)
    got, expected = (whole(opt)["natgrad"]["operator"] for opt in (loaded, opt))
    assert all(torch.equal(got[key], t) for key, t in expected.items())
    assert torch.equal(_train(other, loaded, range(4, 9)), _train(model, opt, range(4, 9)))


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("name", ["kfac", "ekfac", "kfac_block_fallback"])
def test_a_run_goes_on_in_another_precision_and_comes_back(name: str, at: int) -> None:
    """float32 to float64 and back: the metric has the precision of the model that it is loaded into."""
    model = _net(torch.float32)
    opt = KFAC_RUNS[name](model)
    _train(model, opt, range(at))
    saved = _saved(model, opt)
    expected = _train(model, opt, range(at, at + 5))
    wide, wide_opt = _loaded(KFAC_RUNS[name], saved, torch.float64)
    assert {t.dtype for t in whole(wide_opt)["natgrad"]["operator"].values()} == {torch.float64}
    back = _saved(wide, wide_opt)
    got = _train(wide, wide_opt, range(at, at + 5))
    torch.testing.assert_close(got.float(), expected, rtol=1e-3, atol=1e-4)
    narrow, narrow_opt = _loaded(KFAC_RUNS[name], back, torch.float32)
    assert torch.equal(_train(narrow, narrow_opt, range(at, at + 5)), expected)  # nothing was lost on the way


class Named(Rule):
    """A rule of the user's, which does what the library's does."""

    def covers(self, module: nn.Module) -> bool:
        """As the library's."""
        return LinearRule().covers(module)

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        """As the library's."""
        return LinearRule().shape(module, keys)

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        """As the library's."""
        return LinearRule().inputs(module, keys, call)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        """As the library's."""
        return LinearRule().cotangents(module, keys, g)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        """As the library's."""
        return LinearRule().pack(module, block)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        """As the library's."""
        return LinearRule().unpack(module, keys, packed)


def _linear(out: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


OTHERS: dict[str, tuple[Callable[[], ng.NaturalGradient], str]] = {
    "structure": (
        lambda: ng.EKFAC(_linear(), EXACT),
        r"its structure is EigenKronecker\(.*\), here it is Kronecker\(",
    ),
    "sharing": (
        lambda: ng.KFAC(_linear(), EXACT, sharing="reduce"),
        r"its structure is Kronecker\(sharing='reduce'.*, here it is Kronecker\(sharing='expand'",
    ),
    "fallback": (
        lambda: ng.KFAC(_linear(), EXACT, fallback=ng.BlockDense()),
        r"fallback=BlockDense\(\).*, here it is .*fallback=Diagonal\(\)",
    ),
    "shape": (
        lambda: ng.KFAC(_linear(3), EXACT),
        r"of its parameters, 2.weight is \[3, 4\] and here \[2, 4\], 2.bias is \[3\] and here \[2\]\. Nothing",
    ),
    "name": (
        lambda: ng.KFAC(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), EXACT),
        r"of its parameters, 1.weight is \[2, 4\] and here not there, .*2.weight is not there and here \[2, 4\]",
    ),
    "rules": (
        lambda: ng.KFAC(_linear(), EXACT, rules=[Named()]),
        r"of its layers, 0.weight \+ 0.bias is Named and here LinearRule",
    ),
    "order": (
        lambda: ng.KFAC(_Reversed(), EXACT),
        "its parameters are in the order 2.weight, 2.bias, 0.weight, 0.bias, here it is 0.weight, 0.bias, 2.weight",
    ),
}


class _Reversed(nn.Module):
    """The same parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("2", nn.Linear(4, 2))
        self.add_module("0", nn.Linear(3, 4))


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(name: str) -> None:
    make, match = OTHERS[name]
    model = _linear()
    opt = ng.KFAC(model, EXACT, metric_every=1)
    x = torch.randn(6, 3)
    for _ in range(2):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    before = whole(opt)
    with pytest.raises(ValueError, match=f"this is the state of another optimizer: .*{match}"):
        opt.load_state_dict(make().state_dict())
    after = whole(opt)
    assert str(before["param_groups"]) == str(after["param_groups"])
    for part in ("operator", "inverse"):
        assert all(torch.equal(t, before["natgrad"][part][key]) for key, t in after["natgrad"][part].items())
    assert (after["natgrad"]["step"], after["natgrad"]["estimated"]) == (2, 1)
