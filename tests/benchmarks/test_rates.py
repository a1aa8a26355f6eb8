"""Counts of learning rates beside AdamW's, from made-up losses whose answer is known."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from benchmarks.rates import DEFAULTS, LENGTHS, RATES, TASKS, Records, search, tables
from benchmarks.rates import Task as RateTask

FIRST, SECOND, THIRD = list(TASKS)[:3]


def parabola(records: Records, task: str, method: str, best: float, least: float, default: float) -> None:
    """Losses of a search whose best rate is ``best``, and that of the default."""
    at = RATES.index(best)
    for k in range(at - 1, at + 2):
        records.add(task, method, RATES[k], least + (k - at) ** 2, 1.0)
    records.add(task, method, DEFAULTS.get(method, 1e-3), default, 1.0)


def test_searches_that_are_done_are_counted(tmp_path: Path) -> None:
    records = Records(tmp_path / "rates.jsonl")
    for task, best in ((FIRST, RATES[8]), (SECOND, RATES[8])):
        parabola(records, task, "AdamW", best, 1.0, 3.0)
    parabola(records, FIRST, "ng.Natural", RATES[9], 0.5, 4.0)  # within 2 ×, and its default is above AdamW's
    parabola(records, SECOND, "ng.Natural", RATES[10], 1.5, 2.0)  # not within 2 ×, and its best is above AdamW's
    records.add(THIRD, "AdamW", 1e-3, 1.0, 1.0)  # a search that has begun
    counts, rows, _, defaults = tables(records)
    assert "| 0.003 | 1 of 2 |" in defaults
    assert [cell.strip() for cell in counts.splitlines()[2].split("|")[2:7]] == ["2", "1", "1", "1", "2"]
    assert [row.split("|")[1].strip() for row in rows.splitlines()[2:]] == [FIRST, FIRST, SECOND, SECOND]
    assert tables(Records(tmp_path / "rates.jsonl"))[:2] == (counts, rows)


def test_a_length_that_explains_the_rates_leaves_the_same_quotient_on_every_task(tmp_path: Path) -> None:
    records = Records(tmp_path / "rates.jsonl")
    for task, quotient in ((FIRST, 1), (SECOND, 8)):
        parabola(records, task, "AdamW", RATES[5], 1.0, 3.0)
        parabola(records, task, "ng.Natural", RATES[5 + int(math.log2(quotient))], 1.0, 3.0)
        records.lengths[task] = dict.fromkeys(LENGTHS, 0.4) | {"κ": 0.1 * quotient}
    table = [[cell.strip() for cell in row.split("|")[1:-1]] for row in tables(records)[2].splitlines()[2:]]
    found = {name: tuple(cells) for name, *cells in table}
    assert found["κ"] == ("0.1 to 0.8", "1", "2 of 2")
    assert found["signal"] == ("0.4 to 0.4", "8", "1 of 2")


def test_a_search_ends_where_the_best_rate_has_worse_neighbours(tmp_path: Path) -> None:
    """One parameter θ = 1 with the loss ½(θ − 0.9)²: AdamW moves it by the sum of the rates."""

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(4, 1), torch.full((4, 1), 0.9)

    def network(folder: Path) -> torch.nn.Module:
        net = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(net.weight)
        return net

    def half_square(y: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return 0.5 * (y - t).square().mean()

    TASKS["one number"] = RateTask(network, lambda folder: (draw, [draw(torch.Generator())]), half_square, steps=20)
    records = Records(tmp_path / "rates.jsonl")
    try:
        search("one number", "AdamW", tmp_path, records, torch.device("cpu"))
    finally:
        del TASKS["one number"]
    best, loss = records.best("one number", "AdamW")
    assert records.is_done("one number", "AdamW")
    assert 1e-3 < best < RATES[-1]
    assert loss < records.default("one number", "AdamW") < math.inf
