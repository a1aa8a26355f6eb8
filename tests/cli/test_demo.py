"""`natgrad demo` and the data it trains on."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections import Counter
from contextlib import redirect_stdout
from dataclasses import replace
from io import StringIO
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import natgrad.cli.demo
from natgrad.cli.demo import (
    Budget,
    Point,
    Task,
    TrainingRun,
    batches,
    classifier,
    compare,
    milestones,
    train,
)
from natgrad.cli.main import budget_of, main
from natgrad.cli.report import AXES, ladder, reached
from natgrad.data import load_digits

OPTIMIZERS = ["SGD", "AdamW", "natural gradient", "natural gradient (CG)", "K-FAC"]
PNG = b"\x89PNG\r\n\x1a\n"


def demo(out: Path, *options: str) -> int:
    return main(["demo", "--out", str(out), *options])


def summary(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return result


def linear_task(**changes: Any) -> Task:
    """The classifier's data with a linear model and SGD: milliseconds a step."""

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=changes.get("lr", 0.1))

    base = classifier()
    return replace(
        base,
        name="linear",
        network=lambda: nn.Linear(64, 10),
        batch_size=100,
        loss=changes.get("loss", base.loss),
        optimizers={"first": sgd, "second": sgd},
    )


class Finished(NamedTuple):
    code: int
    output: str
    out: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A whole demo of twenty steps a run."""
    out = tmp_path_factory.mktemp("demo")
    with redirect_stdout(StringIO()) as output:
        code = demo(out, "--steps", "20")
    return Finished(code, output.getvalue(), out)


class TestDemo:
    def test_every_optimizer_has_a_row_on_every_task(self, finished: Finished) -> None:
        assert finished.code == 0
        rows = [line.split("│")[1].strip() for line in finished.output.splitlines() if line.startswith("│")]
        assert rows == OPTIMIZERS * 2

    def test_summary_holds_every_run(self, finished: Finished) -> None:
        tasks = summary(finished.out)["tasks"]
        assert [task["name"] for task in tasks] == ["classifier", "auto-encoder"]
        for task in tasks:
            assert [run["optimizer"] for run in task["runs"]] == OPTIMIZERS
            for run in task["runs"]:
                assert run["status"] == "finished"
                assert [point["step"] for point in run["history"]] == [
                    0,
                    *takewhile(lambda step: step <= 20, milestones()),
                ]
                assert run["history"][-1]["seconds"] > 0

    def test_runs_of_a_task_differ_by_their_optimizer_alone(self, finished: Finished) -> None:
        for task in summary(finished.out)["tasks"]:
            starts, ends = ([run["history"][at]["train_loss"] for run in task["runs"]] for at in (0, -1))
            assert len(set(starts)) == 1
            assert len(set(ends)) == len(OPTIMIZERS)

    def test_natural_gradients_are_ahead_after_twenty_steps(self, finished: Finished) -> None:
        for task in summary(finished.out)["tasks"]:
            loss = {run["optimizer"]: run["history"][-1]["train_loss"] for run in task["runs"]}
            first_order = min(loss["SGD"], loss["AdamW"])
            assert loss["natural gradient"] < 0.5 * first_order
            assert loss["natural gradient (CG)"] < 0.75 * first_order
            assert loss["K-FAC"] < first_order

    @pytest.mark.parametrize("name", ["loss-steps.png", "loss-seconds.png"])
    def test_plots_are_written(self, name: str, finished: Finished) -> None:
        content = (finished.out / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000
        assert name in finished.output

    def test_interrupt_keeps_what_there_is(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real = natgrad.cli.demo.measure

        def interrupted(task: Task, model: nn.Module, step: int, seconds: float) -> Point:
            if interrupted.calls == 7:  # type: ignore[attr-defined]
                raise KeyboardInterrupt
            interrupted.calls += 1  # type: ignore[attr-defined]
            return real(task, model, step, seconds)

        interrupted.calls = 0  # type: ignore[attr-defined]
        monkeypatch.setattr(natgrad.cli.demo, "measure", interrupted)
        assert demo(tmp_path, "--steps", "4") == 130  # five measurements of SGD, two of AdamW
        output = capsys.readouterr().out
        assert "AdamW (interrupted)" in output
        result = summary(tmp_path)
        assert result["interrupted"]
        (task,) = result["tasks"]
        assert [(run["optimizer"], run["status"], len(run["history"])) for run in task["runs"]] == [
            ("SGD", "finished", 5),
            ("AdamW", "interrupted", 2),
        ]
        assert (tmp_path / "loss-steps.png").read_bytes().startswith(PNG)

    def test_interrupt_before_the_first_measurement(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(natgrad.cli.demo, "measure", interrupted)
        assert demo(tmp_path, "--steps", "1") == 130
        assert "Nothing was trained" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("missing", ["rich", "matplotlib"])
    def test_missing_extra_is_named(
        self, missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] == missing or name == "natgrad.cli.report":
                monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, missing, None)
        out = tmp_path / "out"
        assert demo(out, "--steps", "1") == 1
        message = capsys.readouterr().err
        assert missing in message
        assert "pip install 'natgrad[cli]'" in message
        assert not out.exists()

    def test_other_missing_modules_are_not_blamed_on_the_extra(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.delitem(sys.modules, "natgrad.cli.report")
        monkeypatch.setitem(sys.modules, "json", None)
        with pytest.raises(ModuleNotFoundError, match="json"):
            demo(tmp_path, "--steps", "1")

    @pytest.mark.parametrize("option", ["--steps", "--seconds", "--threads"])
    def test_budgets_must_be_positive(self, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert demo(tmp_path, option, "0") == 1
        assert f"{option} is 0" in capsys.readouterr().err

    def test_seconds_are_those_of_all_runs_together(self) -> None:
        tasks = (linear_task(), replace(linear_task(), weight=3.0))
        limit = budget_of(Namespace(seconds=16.0, steps=None, threads=1), tasks)
        assert sum(limit.times(task.weight).seconds or 0.0 for task in tasks for _ in task.optimizers) == 16.0

    def test_folder_that_cannot_be_made(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert demo(tmp_path / "file" / "out", "--steps", "1") == 1
        assert str(tmp_path / "file" / "out") in capsys.readouterr().err


class TestTraining:
    def test_equal_optimizers_give_equal_histories(self) -> None:
        first, second = compare((linear_task(),), Budget(steps=20), seed=3).runs
        assert [point.train_loss for point in first.history] == [point.train_loss for point in second.history]
        assert first.history[-1].train_loss < 0.9 * first.history[0].train_loss

    def test_seed_changes_the_run(self) -> None:
        losses = {compare((linear_task(),), Budget(steps=1), seed).runs[0].history[-1].train_loss for seed in (0, 1)}
        assert len(losses) == 2

    def test_seconds_end_a_run(self) -> None:
        run = compare((linear_task(),), Budget(seconds=0.05), seed=0).runs[0]
        assert run.status == "finished"
        assert 0.05 <= run.history[-1].seconds < 0.05 + 2.0
        assert run.at_seconds(0.05) is not None
        assert run.at_seconds(1e3) is None

    def test_divergence_ends_a_run_and_keeps_finite_losses(self) -> None:
        def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return y.pow(4).sum()

        run = compare((linear_task(loss=loss, lr=1e3),), Budget(steps=50), seed=0).runs[0]
        assert run.status == "diverged"
        assert run.history[-1].step < 50

    def test_clock_stands_still_while_losses_are_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter(range(1000))
        monkeypatch.setattr("natgrad.cli.demo.perf_counter", lambda: float(next(ticks)))
        run = TrainingRun(linear_task(), "first")
        train(run, Budget(steps=5), 0, lambda run, spent: None)
        assert [point.seconds for point in run.history] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def test_batches_visit_every_example_once_an_epoch(self) -> None:
        epochs = list(islice(batches(10, 3, seed=0), 6))
        for epoch in (epochs[:3], epochs[3:]):
            assert len(set(torch.cat(epoch).tolist())) == 9
        assert not torch.equal(torch.cat(epochs[:3]), torch.cat(epochs[3:]))

    def test_batch_larger_than_the_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="between 1 and the number of examples, 10"):
            next(batches(10, 11, seed=0))

    def test_budget_without_a_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="never ends"):
            Budget()

    def test_table_goes_as_far_as_most_runs(self) -> None:
        task = linear_task()
        runs = [TrainingRun(task, "first", [Point(end, 1.0, 1.0, 1.0, 1.0)], "finished") for end in (18, 200, 5000)]
        runs.append(TrainingRun(task, "first", [Point(2, 1.0, 1.0, 1.0, 1.0)], "interrupted"))
        assert reached(runs, AXES["steps"]) == 200
        assert runs[0].at_step(100) is None

    def test_table_steps_are_measured_exactly(self) -> None:
        measured = set(islice(milestones(), 100))
        assert {int(step) for step in ladder(3000, rungs=8) if step >= 1} <= measured


class TestDigits:
    def test_shapes_and_range(self) -> None:
        train, test = load_digits(dtype=torch.float64)
        assert train.images.shape == (1438, 64)
        assert test.images.shape == (359, 64)
        assert train.images.dtype == torch.float64
        assert train.labels.dtype == torch.int64
        levels = torch.cat([train.images, test.images]).unique()
        assert torch.equal(levels, torch.arange(17) / 16)

    def test_label_counts_are_those_of_the_published_set(self) -> None:
        train, test = load_digits()
        counts = Counter(torch.cat([train.labels, test.labels]).tolist())
        assert [counts[digit] for digit in range(10)] == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]

    def test_images_belong_to_their_labels(self) -> None:
        """Nearest class mean gets nine digits in ten right; shuffled labels would get one."""
        train, test = load_digits()
        means = torch.stack([train.images[train.labels == digit].mean(dim=0) for digit in range(10)])
        nearest = torch.cdist(test.images, means).argmin(dim=1)
        assert (nearest == test.labels).double().mean() > 0.85

    def test_split_is_a_partition(self) -> None:
        """No image of the set occurs twice, so images identify examples."""
        train, test = ({tuple(image) for image in part.images.tolist()} for part in load_digits())
        assert len(train) == 1438
        assert len(test) == 359
        assert not train & test

    def test_split_depends_on_the_seed_alone(self) -> None:
        assert torch.equal(load_digits().test.images, load_digits(seed=0).test.images)
        assert not torch.equal(load_digits().test.images, load_digits(seed=1).test.images)

    @pytest.mark.parametrize("fraction", [0.0, 1.0, 1e-5])
    def test_empty_side_is_refused(self, fraction: float) -> None:
        with pytest.raises(ValueError, match="test_fraction"):
            load_digits(test_fraction=fraction)
