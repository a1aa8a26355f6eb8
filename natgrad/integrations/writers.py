"""ng.log_to: the numbers of an optimizer into the logger that is there, without waiting for the device."""

from __future__ import annotations

import csv
import logging
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.fused import Readback
from natgrad.linalg import is_number

Write: TypeAlias = Callable[[dict[str, float], int], object]
_STEP = "natgrad/step"


def log_to(opt: torch.optim.Optimizer, writer: Any, *, every: int = 50, layers: bool = False) -> Log:
    """Write ``opt.metrics()`` into a logger, in the next step and then every few steps.

    Args:
        opt: An optimizer of natgrad, also inside the wrapper of accelerate or Lightning.
        writer: What has ``add_scalar(name, value, step)`` (TensorBoard's ``SummaryWriter``), ``log_metrics(numbers,
            step=…)`` (mlflow, the loggers of Lightning) or ``log(numbers, step=…)`` (a run of W&B, ``Accelerator``); a
            function of a dict and a step; or the path of a CSV file, which is continued if it exists.
        every: Steps between two rows.
        layers: Add the numbers of every layer, which wait for the device (``metrics(layers=True)``).

    Returns:
        A ``Log``. Its ``close()`` writes what a GPU has not sent yet, and ends the logging.

    Raises:
        TypeError: If the optimizer has no ``metrics()``, or the writer none of these.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> model, x, t = nn.Linear(4, 3), torch.randn(32, 4), torch.arange(32) % 3
    >>> opt = ng.Natural(model)
    >>> log = ng.log_to(opt, lambda numbers, step: print(step, numbers["natgrad/lr"]), every=2)
    >>> for _ in range(4):
    ...     opt.zero_grad()
    ...     nn.functional.cross_entropy(model(x), t).backward()
    ...     opt.step()
    1 0.003
    3 0.003
    """
    return Log(opt, writer, every=every, layers=layers)


@final
class Log:
    """What ``log_to`` has begun; ``close`` ends it."""

    def __init__(self, opt: torch.optim.Optimizer, writer: Any, *, every: int, layers: bool) -> None:
        while isinstance(inner := getattr(opt, "optimizer", None), torch.optim.Optimizer):
            opt = inner
        if not hasattr(opt, "metrics"):
            raise TypeError(f"log_to writes opt.metrics(), and {type(opt).__name__} has none: give it one of natgrad's")
        if not is_number(every, whole=True) or every < 1:
            raise ValueError(f"log_to(every=…) must be a whole number of steps, at least 1, got {every!r}")
        self._metrics: Callable[..., dict[str, Tensor]] = opt.metrics
        self._write, self._every, self._layers, self._steps = _write_of(writer), every, layers, 0
        # On their way from a device, by how many there are; with their names, what the host knows, and the step.
        self._sent: dict[int, Readback[tuple[list[str], dict[str, float], int]]] = {}
        self._hook = opt.register_step_post_hook(self._after)

    def _after(self, *_: object) -> None:
        for readback in self._sent.values():
            while (arrived := readback.take_arrived()) is not None:
                self._put(*arrived)
        self._steps += 1
        if (self._steps - 1) % self._every:
            return
        numbers = self._metrics(layers=True) if self._layers else self._metrics()
        step = int(numbers.pop(_STEP))
        there = [name for name, t in numbers.items() if is_asynchronous(t.device)]
        known = {name: float(t) for name, t in numbers.items() if not is_asynchronous(t.device)}
        if not there:
            self._write(known, step)
            return
        values = torch.stack([numbers[name].float() for name in there])
        readback = self._sent.setdefault(len(there), Readback())
        readback.send(torch.where(values.isnan(), torch.inf, values), (there, known, step))

    def _put(self, values: list[float], note: tuple[list[str], dict[str, float], int]) -> None:
        names, known, step = note
        self._write({**known, **dict(zip(names, values, strict=True))}, step)

    def close(self) -> None:
        """Wait for what was sent, write it, and write no more."""
        self._hook.remove()
        for readback in self._sent.values():
            while readback:
                self._put(*readback.take())


def _write_of(writer: Any) -> Write:
    if isinstance(writer, str | os.PathLike):
        return CsvFile(Path(writer))
    if hasattr(writer, "add_scalar"):
        return lambda numbers, step: [writer.add_scalar(name, value, step) for name, value in numbers.items()]
    if hasattr(writer, "log_metrics"):
        return lambda numbers, step: writer.log_metrics(numbers, step=step)
    if hasattr(writer, "log") and not isinstance(writer, logging.Logger):
        return lambda numbers, step: writer.log(numbers, step=step)
    if not callable(writer):
        raise TypeError(
            f"log_to does not know how to write into {type(writer).__name__}: give a SummaryWriter, a run of W&B, "
            "mlflow, a logger of Lightning, the path of a CSV file, or a function of a dict and a step"
        )
    return writer


@final
class CsvFile:
    """A table with a line for every step that was written; a number that is new gets a new column.

    >>> import tempfile
    >>> file = CsvFile(Path(tempfile.mkdtemp()) / "run.csv")
    >>> file({"loss": 2.0}, 1)
    >>> file({"loss": 1.0, "ratio": 0.5}, 2)
    >>> file.path.read_text().splitlines()
    ['step,loss,ratio', '1,2.0,', '2,1.0,0.5']
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._columns: list[str] = []
        if path.exists() and path.stat().st_size:
            self._columns = next(csv.reader(path.read_text(encoding="utf-8").splitlines()))
            if self._columns[0] != "step":
                raise ValueError(f"{path} is no table that log_to has begun: give another path")

    def __call__(self, numbers: Mapping[str, float], step: int) -> None:
        if new := [name for name in numbers if name not in self._columns]:
            lines = self.path.read_text(encoding="utf-8").splitlines() if self._columns else []
            rows = list(csv.reader(lines))[1:]
            self._columns = [*(self._columns or ["step"]), *new]
            self._write_rows([self._columns, *([*row, *[""] * len(new)] for row in rows)], "w")
        self._write_rows([[step, *(numbers.get(name, "") for name in self._columns[1:])]], "a")

    def _write_rows(self, rows: list[Any], mode: str) -> None:
        with self.path.open(mode, encoding="utf-8", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows(rows)
