"""The experiment on CIFAR at a tiny size: it runs, it can be stopped and go on exactly, it reports what it ran."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import natgrad as ng
from experiments.cifar import CIFAR100
from experiments.images import Images
from experiments.sobolev_cifar import arms, report
from experiments.sobolev_cifar.arms import FIFTHS, TENTHS, Momentum
from experiments.sobolev_cifar.command import main
from experiments.sobolev_cifar.figures import draw
from experiments.sobolev_cifar.record import Name, Point, Record, load_all
from experiments.sobolev_cifar.training import Budget, Job, Training, train
from tests.experiments.test_cifar import images, write_archive
from tests.experiments.tiny import MACHINE, SETUP, SIZES, TINY, Ample, write_timing


@final
@dataclass(frozen=True)
class OneEpoch(Budget):
    """Time to begin, and not for another epoch."""

    def allows(self, seconds: float) -> bool:
        return seconds == 0


def timeless(record: Record) -> list[dict[str, Any]]:
    """The curve without its clock."""
    return [{**asdict(point), "seconds": 0.0} for point in record.history]


OFTEN = arms.Constants(metric_every=2, inverse_every=3)  # and in the second epoch too


@pytest.mark.parametrize(
    "arm",
    [
        *(
            replace(arm, constants=OFTEN)
            for arm in (arms.amari(), arms.sobolev(), arms.control(), arms.without_images(), arms.literal())
        ),
        replace(arms.sobolev().exactly_damped(), constants=OFTEN),
        arms.Natural(1e-2, 0.1),
    ],
    ids=lambda arm: arm.name,
)
def test_a_run_that_is_stopped_after_an_epoch_goes_on_exactly(
    arm: arms.Config, pictures: Images, tmp_path: Path
) -> None:
    job = Job("cifar10", TENTHS, arm, seed=0)
    whole = train(job, SETUP, pictures, tmp_path / "whole", Ample())
    assert whole.finished
    assert len(whole.history) == 2
    half = train(job, SETUP, pictures, tmp_path / "half", OneEpoch())
    assert not half.finished
    assert len(half.history) == 1
    state = tmp_path / "half" / "states" / f"{job.key}.pt"
    assert state.exists()
    assert timeless(train(job, SETUP, pictures, tmp_path / "half", Ample())) == timeless(whole)
    assert not state.exists()  # a gigabyte at full size
    (saved,) = load_all([tmp_path / "half"])
    assert saved.finished
    assert timeless(saved) == [pytest.approx(point, rel=1e-5) for point in timeless(whole)]


def test_a_state_of_other_settings_is_refused(pictures: Images, tmp_path: Path) -> None:
    job = Job("cifar10", TENTHS, Momentum(0.01, 0.0), seed=0)
    train(job, SETUP, pictures, tmp_path, OneEpoch())
    with pytest.raises(ValueError, match=r"cifar10-tenths-sgd-0 was begun with .*: choose another --out"):
        train(job, replace(SETUP, batch=16), pictures, tmp_path, Ample())


def test_arms_of_one_seed_start_from_the_same_weights_and_see_the_same_images(pictures: Images) -> None:
    one, other = (
        Training(Job("cifar10", TENTHS, arm, seed=3), SETUP, pictures) for arm in (arms.amari(), Momentum(0.1, 0.0))
    )
    for mine, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    for (x, t), (u, s) in zip(one.feed.epoch(), other.feed.epoch(), strict=True):
        assert torch.equal(x, u)
        assert torch.equal(t, s)


def test_a_run_whose_loss_is_no_number_is_over_and_said_to_have_diverged(pictures: Images, tmp_path: Path) -> None:
    record = train(Job("cifar10", TENTHS, Momentum(1e30, 0.0), 0), SETUP, pictures, tmp_path, Ample())
    assert record.finished
    assert record.diverged
    (saved,) = load_all([tmp_path])
    assert math.isnan(saved.history[-1].train_loss)
    (group,) = report.groups([saved], tmp_path / "no timing")
    assert "0 (all 1 diverged)" in group.row()


def test_the_schedules_are_those_of_the_paper() -> None:
    """Bai et al. (2022), App. D: to a tenth after 20 and 40 of 50 epochs, or to a fifth after 20 and 30."""
    tenths, fifths = ([s.left(epoch, 50) for epoch in range(50)] for s in (TENTHS, FIFTHS))
    assert tenths == pytest.approx([1.0] * 20 + [0.1] * 20 + [0.01] * 10)
    assert fifths == pytest.approx([1.0] * 20 + [0.2] * 10 + [0.04] * 20)


def test_the_weight_decay_shrinks_weights_as_fast_as_one_inside_the_momentum() -> None:
    """θ ← θ − lr·m, m ← μm + wd·θ: after a start of 1/(1 − μ) steps, as (1 − lr·wd/(1 − μ)) a step."""
    c = arms.Constants()
    θ, m, passed = 1.0, 0.0, []
    for _ in range(3000):
        m = c.momentum * m + c.weight_decay * θ
        θ -= c.lr * m
        passed.append(θ)
    assert passed[-1] / passed[-2] == pytest.approx(1 - c.lr * c.decoupled, abs=1e-6)
    assert passed[-1] == pytest.approx((1 - c.lr * c.decoupled) ** 3000, rel=0.01)


def probes(metric: ng.OutputMetric, y: Tensor) -> Tensor:
    """E[s_n s_mᵀ] [n o m p] by many draws."""
    generator = torch.Generator().manual_seed(0)
    s = torch.cat([metric.root(y, None, generator) for _ in range(4000)])
    return torch.einsum("kno,kmp->nomp", s, s) / 4000


def test_independent_labels_leave_only_the_diagonal_of_the_coupling_and_shared_probes_all_of_it() -> None:
    """E[s_n s_mᵀ] = 0 for n ≠ m, where the shared probe has the product of the roots."""
    torch.manual_seed(0)
    y, x = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 5, dtype=torch.float64)
    shared, alone = (arm.metric for arm in (arms.sobolev(), arms.independent()))
    exact = ng.Fisher(ng.Categorical()).root(y)
    expected = torch.einsum("kno,kmp->nomp", exact, exact)
    n = torch.arange(3)
    drawn = probes(alone, y)
    assert (probes(shared, y) - expected).abs().max() < 0.05
    assert (drawn[n, :, n] - expected[n, :, n]).abs().max() < 0.05
    drawn[n, :, n] = 0
    assert drawn.abs().max() < 0.05
    assert expected[0, :, 1].abs().max() > 0.1
    C, D = shared.coupling(x, 3), alone.coupling(x, 3)
    assert C is not None
    assert D is not None
    assert torch.equal(C, D)


def test_the_sobolev_arm_takes_the_steps_of_sobolev_kfac() -> None:
    def preset(model: nn.Module) -> Optimizer:
        metric, c = ng.Fisher(ng.Categorical(), samples=1), arms.Constants()
        clip, generator = ng.KLClip(c.clip), torch.Generator().manual_seed(0)
        return ng.SobolevKFAC(
            model,
            metric,
            lr=c.lr,
            damping=c.damping,
            nu=1.5,
            lengthscale=20.0,
            momentum=c.momentum,
            weight_decay=c.decoupled,
            early=False,  # as in the paper
            step=clip,
            generator=generator,
        )

    x, t = torch.randn(16, 5), torch.arange(16) % 3
    moved = []
    for make in (lambda model: arms.sobolev().optimizer(model, 0), preset):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
        optimizer = make(model)
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), t).backward()
            optimizer.step()
        moved.append([p.detach().clone() for p in model.parameters()])
    for mine, theirs in zip(*moved, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=0)


def test_the_kernel_has_the_lengthscale_and_the_network_input_is_not_scaled() -> None:
    """k = (1 + r)e^{−r}, r = ‖x − x'‖/20."""
    x = torch.zeros(2, 3, 32, 32, dtype=torch.float64)
    x[1, 0, 0, 0] = 40.0
    metric = arms.sobolev().metric
    assert isinstance(metric, ng.Sobolev)
    assert float(metric.gram(x, 2)[0, 1]) == pytest.approx(3 * math.exp(-2), rel=1e-5)


def test_the_control_has_the_spectrum_of_the_kernel_matrix_and_the_inputs_of_other_examples() -> None:
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    theirs, ours = (arm.metric for arm in (arms.sobolev(), arms.control()))
    assert isinstance(theirs, ng.Sobolev)
    assert isinstance(ours, ng.Sobolev)
    K, P = theirs.gram(x, 5), torch.eye(5, dtype=torch.float64).roll(1, 0)
    torch.testing.assert_close(ours.gram(x, 5), P @ K @ P.T)
    assert not torch.allclose(ours.gram(x, 5), K)


@pytest.mark.parametrize("matched", [False, True])
def test_the_literal_factors_are_those_that_the_paper_prints(matched: bool) -> None:
    """A = āᵀK⁻¹ā/N and S = Σ_k s_kᵀK⁻¹s_k/N by numpy; the matched product has the trace of the metric itself.

    Without a probe the root of a Euclidean metric is the identity, and independent samples have nothing to do.
    """
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(6, 3, dtype=torch.float64)
    metric = arms.Independent(ng.Sobolev(ng.Euclidean(), lengthscale=2.0), matched=matched)
    G = ng.Kronecker().estimate(ng.pullback(model, x, metric))
    z = x.numpy()
    r = np.linalg.norm(z[:, None] - z[None], axis=-1) / 2.0
    K = ((1 + r) * np.exp(-r) + 1e-6 * np.eye(6)) / (1 + 1e-6)
    a, inverse = np.concatenate([z, np.ones((6, 1))], 1), np.linalg.inv(K)
    A, S = a.T @ inverse @ a / 6, inverse.sum() * np.eye(2) / 6
    # tr G_C over tr S_C tr A_C, relative to C = 1, where s is the same in all examples.
    κ = (np.trace(a.T @ inverse @ a) / 6 * 2) / (np.trace(S) * np.trace(A)) if matched else 1.0
    expected = κ * np.kron(S, A)
    left, right = G.left[0][0].numpy(), G.right[0][0].numpy()
    np.testing.assert_allclose(np.kron(left, right), expected, rtol=1e-8)


def test_scaled_inputs_reach_the_network_and_the_kernel_is_the_same(pictures: Images) -> None:
    plain, scaled = (
        Training(Job("cifar10", FIFTHS, arm, seed=0), SETUP, pictures) for arm in (arms.amari(), arms.literal())
    )
    (x, _), (u, _) = next(plain.feed.epoch()), next(scaled.feed.epoch())
    torch.testing.assert_close(u, x / 20)
    torch.testing.assert_close(scaled.scale(pictures.test.x), plain.scale(pictures.test.x) / 20)
    metric, ours = arms.literal().metric, arms.sobolev().metric
    assert isinstance(metric, arms.Independent)
    assert isinstance(ours, ng.Sobolev)
    torch.testing.assert_close(metric.sobolev.gram(u.double(), len(u)), ours.gram(x.double(), len(x)))


def curve(arm: str, seed: int, losses: list[float], accuracies: list[float]) -> Record:
    """A finished run with these numbers."""
    pairs = enumerate(zip(losses, accuracies, strict=True))
    history = [Point(e + 1, loss, loss, accuracy, 2.0 * (e + 1), 4) for e, (loss, accuracy) in pairs]
    return Record(Name("cifar10", "tenths", arm, seed), SIZES, MACHINE, history, finished=True, diverged=False)


def test_the_summary_has_means_and_sample_deviations_over_seeds(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    losses, accuracies = rng.random((3, 5)), rng.random((3, 5))
    records = [curve("sobolev", s, losses[s].tolist(), accuracies[s].tolist()) for s in range(3)]
    report.save(records, tmp_path)
    found = json.loads((tmp_path / "summary.json").read_text())["cifar10"]["tenths"]["sobolev"]
    for name, values in (("train_loss", losses), ("test_accuracy", 100 * accuracies)):
        assert found[name]["mean"] == pytest.approx(values.mean(0).tolist(), rel=1e-4)
        assert found[name]["deviation"] == pytest.approx(values.std(0, ddof=1).tolist(), rel=1e-4)
    again = load_all([tmp_path])
    assert [asdict(p) for p in again[2].history] == [pytest.approx(asdict(p), rel=1e-5) for p in records[2].history]


def test_there_are_pictures_of_every_schedule_and_of_the_lead(tmp_path: Path) -> None:
    one = [curve(arm, seed, [2.0, 1.0], [0.3, 0.5]) for arm in ("amari", "sobolev") for seed in (0, 1)]
    records = [*one, *(replace(record, name=replace(record.name, schedule="fifths")) for record in one)]
    write_timing(tmp_path, {"amari": 3.0, "sobolev": 3.2})
    found = report.save(records, tmp_path)
    assert found[0].seconds == [3.0, 6.0]  # of a run alone, where that was measured
    names = [path.name for path in draw(found, tmp_path)]
    schedules = ["cifar10-tenths.svg", "cifar10-fifths.svg"]
    assert names == [*schedules, "lead.svg"]
    assert all(0 < (tmp_path / name).stat().st_size < 200_000 for name in names)


def test_the_command_runs_what_is_not_done_in_several_processes_and_draws_it(folder: Path) -> None:
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    main([*places, *TINY, "--arms", "amari", "sobolev", "--seeds", "0", "--workers", "2"])
    main([*places, *TINY, "--arms", "amari", "independent", "--seeds", "0"])
    main([*places, "--report"])
    found = json.loads((folder / "results" / "summary.json").read_text())["cifar10"]["tenths"]
    assert list(found) == ["amari", "sobolev", "independent"]
    assert found["amari"]["workers"] == [2]  # it was not run again
    assert found["independent"]["workers"] == [1]
    assert 0 < (folder / "results" / "cifar10-tenths.svg").stat().st_size < 200_000
    with pytest.raises(SystemExit, match=r"cifar10-tenths-amari-0 was run with .*: choose other folders"):
        main([*places, *TINY, "--batch", "16", "--arms", "amari", "--seeds", "0"])


def test_the_same_command_tunes_and_runs_cifar100_from_its_published_archive(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_archive(tmp_path / "data", images(CIFAR100, 64))
    places = ["--data", f"{tmp_path}/data", "--out", f"{tmp_path}/out", "--results", f"{tmp_path}/results"]
    hundred = [*places, *TINY, "--datasets", "cifar100", "--epochs", "1"]
    tuning = ["--tune-epochs", "1", "--finalists", "1", "--final-epochs", "1", "--held-out", "20"]
    main([*hundred, "--arms", "sgd", "--tune", *tuning])
    main([*hundred, "--arms", "amari", "sobolev", "sgd", "--seeds", "0"])
    found = json.loads((tmp_path / "results" / "summary.json").read_text())
    assert [name for name in found if name not in ("machine", "commits")] == ["cifar100"]
    assert list(found["cifar100"]["tenths"]) == ["amari", "sobolev", "sgd"]


def test_steps_are_timed_alone_and_in_turns(folder: Path) -> None:
    places = ["--data", f"{folder}/data", "--out", f"{folder}/out", "--results", f"{folder}/results"]
    main([*places, *TINY, "--arms", "amari", "sgd", "--time", "--rounds", "1"])
    (found,) = json.loads((folder / "results" / "timing.json").read_text())
    assert found["over_amari"]["amari"]["median"] == 1.0
    assert list(found["ms_a_step"]) == ["amari", "sgd"]
    assert found["seconds_an_epoch"]["amari"] == pytest.approx(2e-3 * found["ms_a_step"]["amari"]["median"], rel=1e-2)


def test_every_arm_is_an_optimizer_of_every_model() -> None:
    for name, row in arms.ARMS.items():
        assert len({tuple(arm.numbers().values()) for arm in row.candidates}) == len(row.candidates)
        for arm in row.candidates:
            assert isinstance(arm.optimizer(nn.Linear(3, 10), 0), Optimizer)
            assert arm.name == name
            assert row.candidates[0].at(arm.numbers()) == arm
        assert len(row.candidates) in (1, 12, 16)  # the budgets of the protocol
