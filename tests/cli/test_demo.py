"""`natgrad demo` and the data it trains on."""

from __future__ import annotations

import json
import re
import sys
import warnings
from collections import Counter
from contextlib import redirect_stdout
from io import StringIO
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import natgrad.cli.commands
import natgrad.cli.training
from natgrad.cli.colours import COLOURS
from natgrad.cli.demo import digits, poisson
from natgrad.cli.main import main
from natgrad.cli.report import by_task, headline, rows, verdict
from natgrad.cli.training import (
    Batches,
    Budget,
    Point,
    Problem,
    Task,
    TrainingRun,
    compare,
    endless,
    milestones,
    train,
)
from natgrad.data import load_digits
from natgrad.errors import NatgradWarning

CONTESTANTS = {
    "digits": ["AdamW", "Muon", "ng.Natural", "K-FAC"],
    "differential equation": ["AdamW", "L-BFGS", "Gauss–Newton"],
}


def demo(out: Path, *options: str) -> int:
    return main(["demo", "--out", str(out), *options])


def summary(out: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    return result


def linear_task(**changes: Any) -> Task:
    """The classifier's data with a linear model and SGD: milliseconds a step."""

    def sgd(problem: Problem) -> torch.optim.Optimizer:
        return torch.optim.SGD(problem.model.parameters(), lr=changes.get("lr", 0.1))

    def problem() -> Problem:
        data, loss = load_digits(), changes.get("loss", nn.functional.cross_entropy)
        return Problem(nn.Linear(64, 10), loss, Batches(*data.train, 100), [data.test])

    return Task("linear", problem, {"first": sgd, "second": sgd})


class Finished(NamedTuple):
    code: int
    output: str
    out: Path


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """A whole demo of twenty steps a run, in which the library warns of nothing."""
    out = tmp_path_factory.mktemp("demo")
    with redirect_stdout(StringIO()) as output, warnings.catch_warnings():
        warnings.simplefilter("error", NatgradWarning)
        code = demo(out, "--steps", "20")
    return Finished(code, output.getvalue(), out)


class TestDemo:
    def test_every_optimizer_has_a_row_on_every_task(self, finished: Finished) -> None:
        assert finished.code == 0
        listed = [line.split("│")[1].strip() for line in finished.output.splitlines() if line.startswith("│")]
        assert sorted(listed) == sorted(name for names in CONTESTANTS.values() for name in names)

    def test_summary_holds_every_run(self, finished: Finished) -> None:
        tasks = summary(finished.out)["tasks"]
        assert [task["name"] for task in tasks] == list(CONTESTANTS)
        for task in tasks:
            assert [run["optimizer"] for run in task["runs"]] == CONTESTANTS[task["name"]]
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
            assert len(set(ends)) == len(task["runs"])

    def test_gauss_newton_is_a_hundred_times_below_adamw_on_the_equation(self, finished: Finished) -> None:
        (task,) = [task for task in summary(finished.out)["tasks"] if task["name"] == "differential equation"]
        loss = {run["optimizer"]: run["history"][-1]["test_loss"] for run in task["runs"]}
        assert loss["Gauss–Newton"] < 0.01 * loss["AdamW"]

    def test_the_report_is_one_file_and_asks_for_nothing(self, finished: Finished) -> None:
        page = (finished.out / "report.html").read_text(encoding="utf-8")
        links = re.findall(r"""(?:src|href|url\()=?["']?([^"' )>]+)""", page)
        assert all(link.startswith("#") for link in links), links
        assert "@import" not in page
        assert page.index("test loss against seconds") < page.index("training loss against seconds")
        for name, optimizers in CONTESTANTS.items():
            for optimizer in optimizers:
                assert f'id="{name}/{optimizer}"' in page, "a box that hides the curves"
                assert f'id="{name}/{optimizer}:test loss against seconds 0"' in page
                assert COLOURS[optimizer] in page
        assert str(finished.out / "report.html") in finished.output

    def test_the_verdict_of_the_report_is_that_of_the_record(self, finished: Finished) -> None:
        page = (finished.out / "report.html").read_text(encoding="utf-8")
        for task in summary(finished.out)["tasks"]:
            best = {run["optimizer"]: min(point["test_loss"] for point in run["history"]) for run in task["runs"]}
            assert f"Lowest test loss: {min(best, key=lambda name: best[name])}, {min(best.values()):.3g}" in page

    def test_interrupt_keeps_what_there_is(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        real, calls = natgrad.cli.training.measure, list[int]()

        def interrupted(problem: Problem, sample: Any, step: int, seconds: float) -> Point:
            calls.append(step)
            if calls[-7:] == [0, 1, 2, 3, 4, 0, 1]:
                raise KeyboardInterrupt
            return real(problem, sample, step, seconds)

        monkeypatch.setattr(natgrad.cli.training, "measure", interrupted)
        assert demo(tmp_path, "--steps", "4") == 130  # five measurements of AdamW, one of Muon
        output = capsys.readouterr().out
        assert "Muon (interrupted)" in output
        result = summary(tmp_path)
        assert result["interrupted"]
        (task,) = result["tasks"]
        assert [(run["optimizer"], run["status"], len(run["history"])) for run in task["runs"]] == [
            ("AdamW", "finished", 5),
            ("Muon", "interrupted", 1),
        ]
        assert "Muon (interrupted)" in (tmp_path / "report.html").read_text(encoding="utf-8")

    def test_interrupt_before_the_first_measurement(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def interrupted(*arguments: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(natgrad.cli.commands, "warm_up", lambda task: None)
        monkeypatch.setattr(natgrad.cli.training, "measure", interrupted)
        assert demo(tmp_path, "--steps", "1") == 130
        assert "Nothing was trained" in capsys.readouterr().out
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("missing", ["typer", "rich", "matplotlib"])
    def test_missing_extra_is_named(
        self, missing: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in [*sys.modules]:
            if name.partition(".")[0] == missing or name in ("natgrad.cli.report", "natgrad.cli.commands"):
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
        for name in ("natgrad.cli.report", "natgrad.cli.commands"):
            monkeypatch.delitem(sys.modules, name)
        monkeypatch.setitem(sys.modules, "json", None)
        with pytest.raises(ModuleNotFoundError, match="json"):
            demo(tmp_path, "--steps", "1")

    @pytest.mark.parametrize("option", ["--steps", "--seconds", "--threads"])
    def test_budgets_must_be_positive(self, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert demo(tmp_path, option, "0") == 2
        assert option in capsys.readouterr().err

    def test_seconds_are_those_of_all_runs_together(self, tmp_path: Path) -> None:
        assert demo(tmp_path, "--steps", "1", "--seconds", "20") == 0
        share = summary(tmp_path)["settings"]["seconds"]
        tasks = (digits(), poisson())
        assert share * sum(task.weight * len(task.optimizers) for task in tasks) == pytest.approx(20.0)

    def test_folder_that_cannot_be_made(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "file").touch()
        assert demo(tmp_path / "file" / "out", "--steps", "1") == 2
        assert str(tmp_path / "file" / "out") in capsys.readouterr().err


class TestTraining:
    def test_equal_optimizers_give_equal_histories(self) -> None:
        first, second = compare((linear_task(),), Budget(steps=20), seeds=[3]).runs
        assert [point.train_loss for point in first.history] == [point.train_loss for point in second.history]
        assert first.history[-1].train_loss < 0.9 * first.history[0].train_loss

    def test_seed_changes_the_run(self) -> None:
        runs = compare((linear_task(),), Budget(steps=1), seeds=(0, 1)).runs
        assert [(run.optimizer, run.seed) for run in runs] == [("first", 0), ("second", 0), ("first", 1), ("second", 1)]
        assert len({run.history[-1].train_loss for run in runs}) == 2

    def test_seconds_end_a_run(self) -> None:
        run = compare((linear_task(),), Budget(seconds=0.05)).runs[0]
        assert run.status == "finished"
        assert 0.05 <= run.history[-1].seconds < 0.05 + 2.0

    def test_divergence_ends_a_run_and_keeps_finite_losses(self) -> None:
        def loss(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
            return y.pow(4).sum()

        run = compare((linear_task(loss=loss, lr=1e3),), Budget(steps=50)).runs[0]
        assert run.status == "diverged"
        assert run.history[-1].step < 50

    def test_clock_stands_still_while_losses_are_measured(self, monkeypatch: pytest.MonkeyPatch) -> None:
        ticks = iter(range(1000))
        monkeypatch.setattr("natgrad.cli.training.perf_counter", lambda: float(next(ticks)))
        run = TrainingRun(linear_task(), "first")
        train(run, Budget(steps=5), lambda run, spent: None)
        assert [point.seconds for point in run.history] == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]

    def test_batches_visit_every_example_once_an_epoch(self) -> None:
        epochs = [x for x, _ in islice(endless(Batches(torch.arange(10), torch.arange(10), 3), seed=0), 6)]
        for epoch in (epochs[:3], epochs[3:]):
            assert len(set(torch.cat(epoch).tolist())) == 9
        assert not torch.equal(torch.cat(epochs[:3]), torch.cat(epochs[3:]))

    def test_batch_larger_than_the_data_is_refused(self) -> None:
        with pytest.raises(ValueError, match="between 1 and the number of examples, 10"):
            Batches(torch.arange(10), torch.arange(10), 11)

    def test_budget_without_a_limit_is_refused(self) -> None:
        with pytest.raises(ValueError, match="never ends"):
            Budget()

    @pytest.mark.parametrize("winner", ["AdamW", "K-FAC"])
    def test_the_verdict_names_the_winner_even_if_it_is_adamw(self, winner: str) -> None:
        task = linear_task()
        other = {"AdamW": "K-FAC", "K-FAC": "AdamW"}[winner]
        runs = [
            TrainingRun(task, name, [Point(step, step / 10, 0.1, loss / step, 0.9) for step in (1, 2)], "finished")
            for name, loss in ((winner, 1.0), (other, 6.0))
        ]
        ((_, methods),) = groups = by_task(runs)
        text = verdict(methods)
        assert headline(groups) == f"linear: {winner} has the lowest test loss"
        assert text.startswith(f"Lowest test loss: {winner}, 0.5 after 0.2 s. Next: {other}, 3, 6 times as much.")
        assert text.endswith(
            f"First within 2 % of AdamW's lowest: {winner}, after {0.2 if winner == 'AdamW' else 0.1} s."
        )
        assert [row[0] for row in rows(task, methods)] == [winner, other]
        assert rows(task, methods)[1][3] == ("0.2 s" if other == "AdamW" else "not reached")

    def test_muon_steps_matrices_and_adamw_the_rest(self) -> None:
        task = digits()
        problem = task.problem()
        before = [p.detach().clone() for p in problem.model.parameters()]
        opt = task.optimizers["Muon"](problem)

        def closure() -> Any:
            opt.zero_grad()
            loss, _ = problem.of_batch(next(iter(problem.train)))
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            return loss

        opt.step(closure)
        assert not any(torch.equal(p, q) for p, q in zip(before, problem.model.parameters(), strict=True))

    def test_the_solution_of_the_equation_has_no_residual(self) -> None:
        """Δu of the network agrees with differentiating u twice."""
        model: Any = poisson().problem().model
        x = torch.rand(5, 2, dtype=torch.float64)
        trace = torch.stack(
            [torch.autograd.functional.hessian(lambda z: model.solution(z[None])[0, 0], row).trace() for row in x]
        )
        torch.testing.assert_close(model(x)[:, 0], trace)


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
