"""ng.log_to writes the numbers of an optimizer into whatever logs."""

from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import natgrad as ng
from tests.optim.tasks import seeded
from tests.pulled import normal


def train(model: nn.Module, opt: Any, steps: int) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(normal(8, 4).float()).square().mean().backward()
        opt.step()


class Board:
    """As TensorBoard's SummaryWriter."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.rows.append((name, value, step))


class Keeper:
    """As mlflow and the loggers of Lightning."""

    def __init__(self) -> None:
        self.rows: list[tuple[dict[str, float], int]] = []

    def log_metrics(self, numbers: dict[str, float], step: int) -> None:
        self.rows.append((numbers, step))


class Wrapper(torch.optim.Optimizer):
    """As those of accelerate and Lightning: it hides what it does not know."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer


@pytest.mark.parametrize("wrapped", [False, True])
def test_every_kind_of_logger_gets_the_numbers_of_the_steps_that_are_due(wrapped: bool) -> None:
    model = seeded(lambda: nn.Linear(4, 3))
    opt, board, keeper, rows = ng.Natural(model), Board(), Keeper(), list[tuple[dict[str, float], int]]()
    seen: Any = Wrapper(opt) if wrapped else opt
    logs = [ng.log_to(seen, to, every=3) for to in (board, keeper, lambda numbers, step: rows.append((numbers, step)))]
    train(model, opt, 5)
    expected = {name: float(value) for name, value in opt.metrics().items() if name != "natgrad/step"}
    assert [step for _, step in keeper.rows] == [step for _, step in rows] == [1, 4]
    assert keeper.rows == rows
    assert rows[0][0].keys() == expected.keys()
    assert board.rows == [(name, value, step) for numbers, step in rows for name, value in numbers.items()]
    for log in logs:
        log.close()
    train(model, opt, 5)
    assert len(rows) == 2


def test_a_table_goes_on_where_it_ended_and_takes_new_columns(tmp_path: Path) -> None:
    path, model = tmp_path / "run.csv", seeded(lambda: nn.Linear(4, 3))
    opt = ng.Natural(model)
    log = ng.log_to(opt, path, every=1)
    train(model, opt, 2)
    log.close()
    again = ng.Natural(model)
    again.load_state_dict(opt.state_dict())
    ng.log_to(again, path, every=1, layers=True)
    train(model, again, 1)
    rows = list(csv.DictReader(path.read_text(encoding="utf-8").splitlines()))
    assert [int(row["step"]) for row in rows] == [1, 2, 3]
    assert rows[0]["natgrad/layer/weight/cond_S"] == ""
    last = float(again.metrics(layers=True)["natgrad/layer/weight/cond_S"])
    assert float(rows[2]["natgrad/layer/weight/cond_S"]) == last


def test_a_table_of_somebody_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("a,b\n1,2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="no table that log_to has begun"):
        ng.log_to(ng.Natural(nn.Linear(4, 3)), path)


@pytest.mark.parametrize("writer", [3, logging.getLogger("nobody")], ids=["number", "logger"])
def test_what_cannot_be_written_into_is_refused_by_name(writer: Any) -> None:
    with pytest.raises(TypeError, match=f"into {type(writer).__name__}"):
        ng.log_to(ng.Natural(nn.Linear(4, 3)), writer)


def test_other_optimizers_and_periods_are_refused() -> None:
    with pytest.raises(TypeError, match="AdamW has none"):
        ng.log_to(torch.optim.AdamW(nn.Linear(4, 3).parameters()), print)
    with pytest.raises(ValueError, match="at least 1, got 0"):
        ng.log_to(ng.Natural(nn.Linear(4, 3)), print, every=0)


def test_a_run_of_wandb_is_written_by_its_log() -> None:
    class Run:
        def __init__(self) -> None:
            self.rows: list[tuple[dict[str, float], int]] = []

        def log(self, numbers: dict[str, float], step: int) -> None:
            self.rows.append((numbers, step))

    run, model = Run(), seeded(lambda: nn.Linear(4, 3))
    opt = ng.KFAC(model, ng.Euclidean())
    ng.log_to(opt, run, every=2)
    train(model, opt, 3)
    assert [step for _, step in run.rows] == [1, 3]
    assert run.rows[0][0]["natgrad/metric_updates"] == 1
