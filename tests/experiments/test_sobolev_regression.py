"""The regression study compares what it says it compares, resumes, and its page says what it found."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from experiments.regression_configs import (
    CONFIGS,
    AdamW,
    Batches,
    Config,
    GaussNewton,
    Look,
    Natural,
    Result,
    Sobolev,
    network,
    train,
)
from experiments.regression_data import Checks, Problem, Sampled, Sines, Table, real
from experiments.regression_record import CONFIRM, CONTEST, MATCHED, SWEEP, TUNE, Key, Record, summary, tables
from experiments.sobolev_regression import Study, draw

ROOT = Path(__file__).parent.parent.parent
RESULTS = ROOT / "experiments" / "results" / "sobolev_regression"


def rows(n: int = 80) -> Table:
    """A generated set of the form of the real ones; one of its columns is constant."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(n, 3, generator=generator, dtype=torch.float64)
    x[:, 2] = 5.0
    test = torch.stack([torch.arange(n) % 10 == s for s in range(4)])
    return Table("rows", x, 7 + 2 * x[:, 0].sin() * x[:, 1], test)


def study(problems: tuple[Problem, ...], seconds: float = 0.01) -> Study:
    return Study(problems, ("rows",), seconds, trials=2, splits=2, points=1, width=6)


def weights_after(arm: Config, steps: int) -> torch.Tensor:
    """The weights of a network after so many steps of an arm, all on one batch."""
    x, y = rows().split(0).train
    model = network(3, 6, seed=0)
    optimizer = arm.optimizer(model, x)
    for _ in range(steps):

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = 0.5 * (model(x) - y).square().mean()
            loss.backward()
            return loss.detach()

        optimizer.step(closure)  # type: ignore[arg-type]
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach()


def test_a_split_trains_validates_and_tests_on_different_rows_and_on_all_of_them() -> None:
    table = rows()
    for number in range(3):
        split = table.split(number)
        parts = (split.train, split.validation, split.test)
        assert sum(len(x) for x, _ in parts) == len(table.x)
        seen = torch.cat([y for _, y in parts]).flatten()
        assert len(seen.unique()) == len(table.y.unique())
        assert len(split.test[0]) == int(table.test[number].sum())


def test_standardised_targets_times_the_unit_are_targets() -> None:
    table = rows()
    split = table.split(1)
    assert split.train[1].std() == pytest.approx(1.0)
    assert split.train[0].isfinite().all()
    assert (split.train[0][:, 2] == 0).all()  # the constant column
    spread = split.test[1].max() - split.test[1].min()
    expected = table.y[table.test[1]].max() - table.y[table.test[1]].min()
    assert float(spread) * split.unit == pytest.approx(float(expected))


def test_noise_is_in_the_training_targets_and_not_in_the_test() -> None:
    clean, noisy = Sampled(Sines(), 0.0).split(0), Sampled(Sines(), 0.5).split(0)
    assert torch.equal(clean.train[0], noisy.train[0])
    assert float((clean.train[1] - noisy.train[1]).std()) == pytest.approx(0.5, rel=0.15)
    assert torch.equal(noisy.test[1], Sines()(noisy.test[0]))


def test_noise_on_a_real_set_is_not_in_its_test() -> None:
    clean, noisy = rows().split(0), replace(rows(), noise=1.0).split(0)
    assert torch.equal(clean.test[1], noisy.test[1])
    assert torch.equal(clean.train[0], noisy.train[0])
    assert float((clean.train[1] - noisy.train[1]).std()) == pytest.approx(1.0, rel=0.3)
    assert float((clean.validation[1] - noisy.validation[1]).abs().min()) > 0


def test_the_board_has_jumps_and_the_sines_have_none() -> None:
    x = torch.stack([torch.linspace(-1, 1, 4001, dtype=torch.float64), torch.full((4001,), 0.3).double()], 1)
    assert float(Checks()(x).diff(dim=0).abs().max()) == 2.0
    assert float(Sines()(x).diff(dim=0).abs().max()) < 0.01


def test_arms_of_one_trial_share_what_they_have_in_common() -> None:
    for trial in range(5):
        assert GaussNewton.drawn(trial).shared == Sobolev.drawn(trial).shared
    assert len({Sobolev.drawn(trial) for trial in range(8)}) == 8


def test_a_sobolev_arm_of_short_lengthscale_takes_the_steps_of_gauss_newton() -> None:
    shared = Natural(64, 1e-4, 1e-2)
    plain = weights_after(GaussNewton(shared), 6)
    near = weights_after(Sobolev(shared, nu=1.5, scale=1e-6), 6)
    far = weights_after(Sobolev(shared, nu=1.5, scale=0.5), 6)
    assert torch.allclose(near, plain, atol=1e-6)
    assert float((far - plain).norm()) > 1e-2


def test_every_pass_of_batches_sees_an_example_at_most_once() -> None:
    x = torch.arange(10.0)[:, None]
    batches = Batches((x, x), 4, torch.Generator().manual_seed(0))
    for _ in range(3):
        seen = torch.cat([batches.next()[0] for _ in range(2)]).flatten()
        assert len(seen.unique()) == 8


def test_early_stopping_looks_at_validation_only() -> None:
    looks = (Look(0, 0.0, 3.0, 1.0), Look(5, 0.1, 1.0, 2.0), Look(9, 0.2, 2.0, 0.5))
    assert Result(looks).best() == looks[1]
    assert Result(looks).best(steps=4) == looks[0]


@pytest.mark.parametrize("arm", CONFIGS, ids=lambda arm: arm.title)
def test_every_arm_learns_the_sines(arm: type[Config]) -> None:
    result = train(arm.drawn(1), Sampled(Sines(), 0.0, n=64).split(0), 0, seconds=0.8, width=16)
    assert not result.failure
    assert result.best().test < 0.7 * result.looks[0].test


def test_a_run_that_diverges_is_an_infinite_error_and_not_a_missing_one() -> None:
    arm = AdamW(batch=64, weight_decay=0.0, lr=1e300)
    result = train(arm, Sampled(Sines(), 0.0, n=64).split(0), 0, seconds=0.02, width=6)
    assert math.isinf(result.looks[-1].test)
    assert math.isfinite(result.best().test)


def test_a_study_resumes_from_its_record_and_runs_nothing_twice(tmp_path: Path) -> None:
    problems = (rows(), Sampled(Checks(), 0.1, n=40))
    part = replace(study(problems), splits=1).run(tmp_path, made_with="first")
    whole = study(problems).run(tmp_path, made_with="second")
    again = study(problems).run(tmp_path, made_with="second")
    assert again.machine["commits"] == ["first", "second"]
    assert set(part.cells) < set(whole.cells)
    assert set(again.cells) == set(whole.cells)
    assert Record.load(tmp_path / "record.json").cells == again.cells
    stages = [sum(key.stage == stage for key in whole.cells) for stage in (TUNE, CONTEST, MATCHED, SWEEP, CONFIRM)]
    assert stages == [2 * 2 * 3, 2 * 2 * 3, 2 * 2, 4 * 6 + 1, 2 * 2]
    found = summary(again)
    assert len(tables(found)) == 4
    assert all(path.stat().st_size < 150_000 for path in draw(again, found, tmp_path))
    with pytest.raises(ValueError, match=r"only runs of one length compare\. Give --seconds 0\.01, or another folder"):
        study(problems, seconds=0.05).run(tmp_path)


def test_an_infinite_error_survives_the_file(tmp_path: Path) -> None:
    looks = (Look(0, 0.0, 1.0, 1.0), Look(3, 0.1, math.inf, math.inf))
    record = Record(0.1, {}, {Key(CONTEST, "rows", AdamW.title, 0, 0): Result(looks, "reason")})
    record.save(tmp_path / "record.json")
    assert Record.load(tmp_path / "record.json") == record


def test_real_sets_come_from_a_file_and_a_set_that_is_not_there_is_named(tmp_path: Path) -> None:
    table = rows()
    arrays = {"rows_x": table.x.numpy(), "rows_y": table.y.numpy(), "rows_test": table.test.numpy()}
    np.savez(tmp_path / "sets.npz", **arrays)  # type: ignore[arg-type]
    (found,) = real(tmp_path / "sets.npz", ("rows",))
    assert torch.equal(found.x, table.x)
    assert torch.equal(found.test, table.test)
    with pytest.raises(ValueError, match=r"sets.npz holds no set boston: it has rows"):
        real(tmp_path / "sets.npz", ("rows", "boston"))


def test_the_summary_is_that_of_the_record() -> None:
    def digits(text: str) -> Any:  # Python 3.11 rounds deviations in another way than 3.10
        return json.loads(text, parse_float=lambda number: f"{float(number):.12g}")

    record = Record.load(RESULTS / "record.json")
    assert digits(json.dumps(summary(record))) == digits((RESULTS / "summary.json").read_text())
