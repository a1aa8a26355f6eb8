"""`natgrad demo`: five optimizers on two small tasks, with progress bars, in under two minutes."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from natgrad.cli.experiment import Budget, Comparison, Run, Task, compare

if TYPE_CHECKING:
    from rich.console import Console

SECONDS = 3.6  # of training for a run of weight 1; the two tasks with five runs each make 72
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


def configure(parser: ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--out", type=Path, default=Path("natgrad-demo"), help="folder for the results (%(default)s)")
    parser.add_argument("--seconds", type=float, help="training time of all runs together (72 unless --steps is given)")
    parser.add_argument("--steps", type=int, help="at most this many steps a run")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights and mini-batches (%(default)s)")
    # Networks of this size gain nothing from more threads, and lose a lot where another process wants the cores.
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")
    parser.add_argument("--grid", action="store_true", help="run the grid from which the optimizers' numbers come")


def budget(arguments: Namespace, tasks: tuple[Task, ...]) -> Budget:
    """The share of the time that a run of weight 1 gets."""
    for option in ("seconds", "steps", "threads"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            raise ValueError(f"natgrad demo: --{option} is {value}, but must be positive")
    if arguments.seconds is None:
        return Budget(arguments.steps, seconds=None if arguments.steps else SECONDS)
    return Budget(arguments.steps, arguments.seconds / sum(task.weight * len(task.contenders) for task in tasks))


@contextmanager
def threads(count: int) -> Iterator[None]:
    """So many threads for torch, and the old number afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def with_progress(tasks: tuple[Task, ...], limit: Budget, seed: int, console: Console) -> Comparison:
    """`compare`, with one bar a run."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console) as progress:
        bars: dict[int, TaskID] = {}

        def watch(run: Run, spent: float) -> None:
            if id(run) not in bars:
                bars[id(run)] = progress.add_task(f"{run.task.name}: {run.contender.name}", total=1.0, state="")
            last = run.history[-1]
            state = f"step {last.step}, loss {last.train_loss:.3g}"
            progress.update(bars[id(run)], completed=spent, state=state)

        return compare(tasks, limit, seed, watch)


def run(arguments: Namespace) -> int:
    """The command itself; the exit code is 0, 130 after Ctrl-C, 1 if it could not start."""
    from rich.console import Console

    # Imported before the training, so that a missing extra is noticed before and not after it.
    from natgrad.cli.report import report
    from natgrad.cli.tasks import autoencoder, classifier, grid

    tasks = (classifier(), autoencoder())
    if arguments.grid:
        tasks = (grid(tasks[0]), grid(tasks[1]))
    try:
        limit = budget(arguments, tasks)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    console = Console()
    if not console.is_terminal:
        console = Console(width=132)  # a file or a pipe has no width of its own; rich's 80 would cut the tables
    with threads(arguments.threads):
        comparison = with_progress(tasks, limit, arguments.seed, console)
        report(comparison, arguments.seed, arguments.out, console)
    if comparison.interrupted:
        console.print("Interrupted: the runs above are what there is.")
        return INTERRUPTED
    return 0
