"""Checkpoints: a resumed run is, bit for bit, the run that was saved."""

import io
from typing import Any

import pytest
import torch
from torch import Tensor

import natgrad as ng
from tests.optim.tasks import Task, task

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
    "levenberg_marquardt": {"step": ng.LevenbergMarquardt()},
    "levenberg_marquardt_every": {
        "step": ng.LevenbergMarquardt(),
        "structure": ng.Refresh(ng.BlockDense(), every=3, decay=0.9),
        "momentum": 0.5,
    },
}


def _optimizer(of: Task, name: str, seed: int) -> ng.NaturalGradient:
    options = {"lr": 0.3, "damping": 1e-2, **RUNS[name]}
    return of.optimizer(generator=torch.Generator().manual_seed(seed), **options)


def _run(of: Task, opt: ng.NaturalGradient, steps: range) -> list[Tensor]:
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
    state = opt.state_dict()
    state["natgrad"]["operator"] = {k: t.to(torch.float32) for k, t in state["natgrad"]["operator"].items()}
    opt.load_state_dict(state)
    assert opt.state_dict()["natgrad"]["operator"]["matrix"].dtype == torch.float32
