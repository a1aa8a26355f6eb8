"""The verdict follows the table of the protocol, from made-up runs whose answer is known."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from experiments.sobolev_cifar import figures, report, verdict
from experiments.sobolev_cifar.command import RESULTS
from experiments.sobolev_cifar.paired_stats import Pair, Paired
from experiments.sobolev_cifar.plan import plan
from experiments.sobolev_cifar.record import Name, Point, Record, load_all
from experiments.sobolev_cifar.tuning import Choices
from experiments.sobolev_cifar.verdict import DECIDE, PRIMARY, SECONDARY, Difference, Runs
from tests.experiments.tiny import MACHINE, SIZES


def runs_of(dataset: str, arm: str, losses: Sequence[float], seeds: Sequence[int], commit: str = "a") -> list[Record]:
    """Two epochs of a constant loss, a seed each, with both schedules."""
    return [
        Record(
            Name(dataset, schedule, arm, seed),
            SIZES,
            MACHINE,
            [Point(e + 1, loss, loss, 0.5, 1.0, 1) for e in range(2)],
            finished=True,
            diverged=False,
            commits=[commit],
        )
        for schedule in ("fifths", "tenths")
        for seed, loss in zip(seeds, losses, strict=True)
    ]


def cells(table: str) -> list[list[str]]:
    """The rows of a Markdown table."""
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:]]


def found(records: Sequence[Record], folder: Path) -> Runs:
    return Runs(report.groups(list(records), folder / "no timing"))


@pytest.mark.parametrize(
    ("mean", "spread", "words"),
    [
        (-0.10, 0.005, "for the claim: a clear advantage"),
        (-0.06, 0.02, "for an advantage; whether it is clear is not decided"),
        (-0.03, 0.005, "an advantage, but a small one: against a clear advantage"),
        (-0.002, 0.005, "against the claim: no advantage found, and a clear one is excluded"),
        (-0.04, 0.03, "undecided"),
        (0.05, 0.005, "against the claim: slower"),
    ],
)
def test_every_row_of_the_protocols_table_has_its_interval(mean: float, spread: float, words: str) -> None:
    differences = tuple(2.0 * (mean + spread * k) for k in (-1, 0, 0, 1))
    assert verdict.verdict_on(Difference(PRIMARY, (0, 1, 2, 3), Paired(differences), 2.0, 0.975, True)) == words
    assert words.split(":")[0] in (RESULTS.parents[1] / "sobolev_cifar" / "protocol.md").read_text()


def test_the_claim_is_decided_by_the_seeds_of_the_protocol_and_a_seed_counts_once(tmp_path: Path) -> None:
    """Differences −0.2, −0.3, −0.1, −0.2 on CIFAR-100; seed 7 of it does not decide. By hand: ±4.18 standard errors."""
    kfac = runs_of("cifar100", "amari", [2.0] * 5, [0, 1, 2, 3, 7])
    ours = runs_of("cifar100", "sobolev", [1.8, 1.7, 1.9, 1.8, 9.0], [0, 1, 2, 3, 7])
    runs = found([*kfac, *ours], tmp_path)
    claim = runs.claim("cifar100", PRIMARY, DECIDE["cifar100"])
    assert claim is not None
    assert claim.seeds == (0, 1, 2, 3)
    half = stats.t.isf(0.0125, 3) * np.std([0.2, 0.3, 0.1, 0.2], ddof=1) / 2
    assert claim.relative == pytest.approx((-0.1, -0.1 - half / 2, -0.1 + half / 2))
    first, *_ = cells(verdict.answers(runs))
    low, high = (f"−{100 * (0.1 + side * half / 2):.1f}" for side in (1, -1))
    assert first[1:] == ["not run", f"−10.0 % [{low}, {high}]"]


def test_a_part_of_the_seeds_is_called_preliminary_and_other_commits_are_marked(tmp_path: Path) -> None:
    kfac = runs_of("cifar100", "amari", [2.0, 2.1], [0, 1])
    ours = runs_of("cifar100", "sobolev", [1.8, 1.7], [0, 1], commit="b")
    table = verdict.endpoints(found([*kfac, *ours], tmp_path))
    assert "(preliminary: 2 of 4 seeds)" in table
    assert "] † |" in table
    assert "| CIFAR-10 | primary: training loss, mean of epochs to 40 % | 3 to 7 | not run |" in table


def test_one_seed_is_shown_without_an_interval_and_decides_nothing(tmp_path: Path) -> None:
    runs = found([*runs_of("cifar100", "amari", [2.0], [1]), *runs_of("cifar100", "sobolev", [1.8], [1])], tmp_path)
    assert {row[2] for row in cells(verdict.answers(runs))[:3]} == {"not run"}
    table = verdict.endpoints(runs)
    assert "| 1 | −0.2000 | −10.0 % | – | – | – | preliminary: 1 of 4 seeds |" in table
    assert "±" not in report.table(runs.groups)


@pytest.mark.parametrize("control", [2.2, 1.2, 1.8])
def test_the_control_is_compared_seed_by_seed(control: float, tmp_path: Path) -> None:
    """Sobolev's loss is 1.8 + w and the control's c − w."""
    wiggle = [0.0, 0.02, -0.02, 0.01]
    ours = runs_of("cifar10", "sobolev", [1.8 + w for w in wiggle], [3, 4, 5, 6])
    theirs = runs_of("cifar10", "permuted", [control - w for w in wiggle], [3, 4, 5, 6])
    rows = {row[0]: row[1:] for row in cells(verdict.answers(found([*ours, *theirs], tmp_path)))}
    differences, mean = np.array([1.8 - control + 2 * w for w in wiggle]), control - np.mean(wiggle)
    interval = stats.t.interval(0.95, 3, differences.mean(), differences.std(ddof=1) / 2)
    shown = [f"{100 * value / mean:+.1f}".replace("-", "−") for value in (differences.mean(), *interval)]
    (row,) = (row for name, row in rows.items() if name.endswith("less the control"))
    assert row == [f"{shown[0]} % [{shown[1]}, {shown[2]}]", "not run"]


def curves(dataset: str, arm: str, losses: Sequence[Sequence[float]]) -> list[Record]:
    """Runs with these training losses, a seed each, with both schedules; the accuracy is one minus a tenth of it."""
    return [
        Record(
            Name(dataset, schedule, arm, seed),
            SIZES,
            MACHINE,
            [Point(e + 1, loss, 2 * loss, 1 - loss / 10, 1.0, 1) for e, loss in enumerate(values)],
            finished=True,
            diverged=False,
            commits=["a"],
        )
        for schedule in ("fifths", "tenths")
        for seed, values in enumerate(losses)
    ]


def test_a_curve_that_is_some_epochs_ahead_has_that_lead(tmp_path: Path) -> None:
    """Straight lines until 40 % of ten epochs; seeds lead by 0.1, 0.2, 0.3 and 0.4 epochs, by hand 0.25 ± 0.21."""
    lines = [[5.0 - epoch for epoch in range(4)] + 6 * [1.0]] * 4
    ahead = [[5.0 - epoch - lead for epoch in range(4)] + 6 * [1.0] for lead in (0.1, 0.2, 0.3, 0.4)]
    runs = found([*curves("cifar100", "amari", lines), *curves("cifar100", "sobolev", ahead)], tmp_path)
    rows = {row.split(" | ")[0][2:]: row.split(" | ")[1:] for row in verdict.robustness(runs).splitlines()}
    half = stats.t.isf(0.025, 3) * np.std([0.1, 0.2, 0.3, 0.4], ddof=1) / 2
    assert rows["… as a lead in epochs"] == ["not run", f"+0.25 [+{0.25 - half:.2f}, +{0.25 + half:.2f}] |"]
    # Relative to K-FAC's mean of 3.5; in the last of these epochs relative to 2; accuracies in points, a tenth of it.
    assert rows["training loss, mean of epochs to 40 %: the primary endpoint"][1].startswith("−7.1 % [")
    assert rows["training loss in the last of these epochs"][1].startswith("−12.5 % [")
    assert rows["test loss, mean of epochs to 40 %"][1].startswith("−7.1 % [")
    assert rows["test accuracy, mean of epochs to 40 %, points"][1].startswith("+2.50 [")
    assert rows["test accuracy, mean of the epochs after 40 %, points"][1] == "+0.00 [+0.00, +0.00] |"
    low, high = (f"−{100 * (0.25 + side * half) / 3.5:.1f}" for side in (1, -1))  # K-FAC's seeds are all equal
    assert rows["… not paired within seeds"][1] == f"−7.1 % [{low}, {high}] |"
    ours, theirs = (runs.side("cifar100", arm, ("fifths", "tenths")) for arm in ("sobolev", "amari"))
    assert ours is not None
    assert theirs is not None
    drawn = [[-lead, -lead - half, -lead + half, -0.1, -0.2, -0.3, -0.4] for lead in 4 * [0.25]]
    scales = [[100 / (5.0 - epoch)] for epoch in range(4)]  # the mean loss of K-FAC in the figure's four epochs
    assert np.array(figures.lead(Pair(ours, theirs))) == pytest.approx(np.array(drawn) * np.array(scales))


@pytest.mark.parametrize("first", [0.9, 0.5])
def test_seeds_with_fifths_that_are_earlier_at_the_end_of_tenths_are_counted(first: float, tmp_path: Path) -> None:
    """With tenths the baseline gets to 0.8 in its last epoch; with fifths one seed in its second, the other perhaps."""

    def run(schedule: str, seed: int, accuracies: Sequence[float]) -> Record:
        history = [Point(e + 1, 1.0 / (e + 1), 1.0, accuracy, 1.0, 1) for e, accuracy in enumerate(accuracies)]
        return Record(Name("cifar10", schedule, "amari", seed), SIZES, MACHINE, history, finished=True, diverged=False)

    tenths = [run("tenths", seed, [0.3, 0.4, 0.8]) for seed in (0, 1)]
    fifths = [run("fifths", 0, [0.3, 0.8, 0.8]), run("fifths", 1, [0.3, first, 0.5])]
    loss, accuracy, *_ = cells(verdict.schedule(found([*tenths, *fifths], tmp_path)))
    assert loss[2:] == ["0 of 2", "0, 0"]
    assert accuracy[2:] == (["2 of 2", "1, 1"] if first > 0.8 else ["1 of 2", "1, never"])


def test_runs_of_one_epoch_are_compared_too(tmp_path: Path) -> None:
    runs = found(
        [*curves("cifar100", "amari", [[2.0], [2.1]]), *curves("cifar100", "sobolev", [[1.8], [1.7]])], tmp_path
    )
    assert "| test accuracy, mean of the epochs after 40 %, points | not run | +3.00 [" in verdict.robustness(runs)
    assert "| … as a lead in epochs | not run | – |" in verdict.robustness(runs)


def test_runs_that_name_no_commit_are_marked(tmp_path: Path) -> None:
    nameless = [
        replace(run, commits=[])
        for arm, losses in (("amari", [2.0, 2.1]), ("sobolev", [1.8, 1.7]))
        for run in runs_of("cifar100", arm, losses, [0, 1])
    ]
    runs = found(nameless, tmp_path)
    assert "] † |" in verdict.endpoints(runs)
    assert cells(verdict.answers(runs))[0][2].endswith("] † (preliminary: 2 of 4 seeds)")


def test_seeds_that_do_not_decide_have_intervals_of_95_per_cent(tmp_path: Path) -> None:
    """Differences −0.2, −0.3, −0.1, −0.2, −0.2, of which the first four decide on CIFAR-100."""
    kfac = runs_of("cifar100", "amari", [2.0] * 5, [0, 1, 2, 3, 7])
    ours = runs_of("cifar100", "sobolev", [1.8, 1.7, 1.9, 1.8, 1.8], [0, 1, 2, 3, 7])
    table = verdict.endpoints(found([*kfac, *ours], tmp_path))
    half = stats.t.isf(0.025, 4) * np.std([0.2, 0.3, 0.1, 0.2, 0.2], ddof=1) / math.sqrt(5)
    assert f"| −0.2000 [−{0.2 + half:.4f}, −{0.2 - half:.4f}] |" in table


def test_the_power_is_that_of_simulated_experiments() -> None:
    draws = np.random.default_rng(0).normal(verdict.detectable(5, 0.975), 1.0, (20_000, 5))
    t = draws.mean(1) / (draws.std(1, ddof=1) / math.sqrt(5))
    assert (t > stats.t.isf(0.0125, 4)).mean() == pytest.approx(0.8, abs=0.01)


def test_the_margin_is_welchs(tmp_path: Path) -> None:
    one, other = [-0.02, -0.03, -0.01, -0.04, -0.02], [-0.05, -0.09, -0.06, -0.08]
    sides = [
        Difference(PRIMARY, tuple(range(len(d))), Paired(tuple(2.0 * x for x in d)), 2.0, 0.975, True)
        for d in (one, other)
    ]
    mean, low, high = verdict.margin_grows(*sides)
    interval = stats.ttest_ind(other, one, equal_var=False).confidence_interval()
    assert (mean, low, high) == pytest.approx((np.mean(other) - np.mean(one), interval.low, interval.high))


def test_what_is_not_run_has_no_number(tmp_path: Path) -> None:
    empty = found([], tmp_path)
    for table in (verdict.answers(empty), verdict.schedule(empty)):
        assert not any(re.search(r"[+−]\d", cell) for row in cells(table) for cell in row[1:])
    assert {row[-3:] for row in map(tuple, cells(verdict.paper_figures(empty)))} == {("–", "–", "–")}


def test_runs_of_the_protocol_and_its_searches_are_counted() -> None:
    """Counted by hand in the protocol: its runs, and a search for each images and schedule of a tuned optimizer."""
    nothing, everything = (cells(verdict.progress(left, Choices({}))) for left in (plan(), ()))
    planned = [16, 12, 12, 12, 8, 8, 6, 8, 4, 4]
    assert [[int(n) for n in row[1:4]] for row in nothing[:-1]] == [
        [n, 0, searches] for n, searches in zip(planned, [0, 0, 0, 0, 4, 4, 0, 2, 0, 0], strict=True)
    ]
    assert [[int(n) for n in row[1:4]] for row in everything[:-1]] == [[n, n, 0] for n in planned]
    assert [nothing[-1][1:4], everything[-1][1:4]] == [["90", "0", "10"], ["90", "90", "0"]]


def test_the_tables_are_those_of_the_record() -> None:
    groups = report.groups(load_all([RESULTS]), RESULTS / "timing.json")
    for name, text in (
        ("answers", verdict.answers(Runs(groups))),
        ("endpoints", verdict.endpoints(Runs(groups))),
        ("questions", verdict.questions(Runs(groups))),
        ("robustness", verdict.robustness(Runs(groups))),
        ("figures", verdict.paper_figures(Runs(groups))),
        ("schedule", verdict.schedule(Runs(groups))),
        ("commits", verdict.commits(groups)),
    ):
        assert (RESULTS / f"{name}.md").read_text().strip() == text, f"{name}.md: run --report again"
    runs = [int(row[1]) for row in cells(verdict.commits(groups))]
    assert sum(runs) == len(load_all([RESULTS]))


def test_accuracies_that_differ_by_less_than_half_a_point_are_similar() -> None:
    assert verdict.similar(Difference(SECONDARY, (0, 1), Paired((0.3, 0.3)), 90.0, 0.975, True))
