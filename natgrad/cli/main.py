"""The `natgrad` command."""

from __future__ import annotations

import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from natgrad import __version__
from natgrad.cli.demo import Budget, Runs, Task, TrainingRun, compare, digits, poisson

if TYPE_CHECKING:
    from rich.console import Console

EXTRA = ("rich", "matplotlib")
SECONDS = 3.5  # training time of a run of weight 1; four of weight 1 and three of weight 2 take 35 s
INTERRUPTED = 130  # 128 + SIGINT, the exit code that shells expect


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code.

    >>> main(["demo", "--steps", "-1"])
    1
    """
    parser = ArgumentParser(prog="natgrad", description="Natural gradients for PyTorch.")
    parser.add_argument("--version", action="version", version=f"natgrad {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    demo_parser = commands.add_parser(
        "demo",
        help="compare optimizers on digits, and on a differential equation, in a minute",
        description="Compare ng.Natural and K-FAC with tuned AdamW and Muon on handwritten digits, and Gauss-Newton "
        "with AdamW and L-BFGS on a differential equation. Prints who has the lowest test loss, whoever it is, and "
        "writes report.html and summary.json.",
    )
    configure(demo_parser)
    arguments = parser.parse_args(argv)
    try:
        return demo(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(
            f"natgrad: this command needs {error.name}, which is not installed. Install the command-line extra:\n"
            "    pip install 'natgrad[cli]'",
            file=sys.stderr,
        )
        return 1


def configure(parser: ArgumentParser) -> None:
    """Options of `natgrad demo`."""
    parser.add_argument("--out", type=Path, default=Path("natgrad-demo"), help="folder for the results (%(default)s)")
    parser.add_argument("--seconds", type=float, help="training time of all runs together (35 unless --steps is given)")
    parser.add_argument("--steps", type=int, help="at most this many steps per run")
    parser.add_argument("--seed", type=int, default=0, help="seed of initial weights and mini-batches (%(default)s)")
    # Networks of this size gain nothing from more threads, and lose a lot where another process wants the cores.
    parser.add_argument("--threads", type=int, default=1, help="threads of torch (%(default)s)")


def budget_of(arguments: Namespace, tasks: tuple[Task, ...]) -> Budget:
    """The budget of a run of weight 1."""
    for option in ("seconds", "steps", "threads"):
        value = getattr(arguments, option)
        if value is not None and not value > 0:
            raise ValueError(f"natgrad demo: --{option} is {value}, but must be positive")
    if arguments.seconds is None:
        return Budget(arguments.steps, seconds=None if arguments.steps else SECONDS)
    return Budget(arguments.steps, arguments.seconds / sum(task.weight * len(task.optimizers) for task in tasks))


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def compare_with_progress(tasks: tuple[Task, ...], budget: Budget, seed: int, console: Console) -> Runs:
    """``compare`` with one progress bar per run."""
    from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    columns = ("{task.description}", BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=console) as progress:
        bars: dict[int, TaskID] = {}

        def watch(run: TrainingRun, spent: float) -> None:
            if id(run) not in bars:
                bars[id(run)] = progress.add_task(f"{run.task.name}: {run.optimizer}", total=1.0, state="")
            last = run.history[-1]
            progress.update(bars[id(run)], completed=spent, state=f"step {last.step}, loss {last.train_loss:.3g}")

        return compare(tasks, budget, seed, watch)


def demo(arguments: Namespace) -> int:
    """Run `natgrad demo`; the exit code is 0, 130 after Ctrl-C, or 1 if it could not start."""
    from rich.console import Console

    # Imported before the training, so that a missing extra is noticed before and not after it.
    from natgrad.cli.report import report

    tasks = (digits(), poisson())
    try:
        budget = budget_of(arguments, tasks)
        arguments.out.mkdir(parents=True, exist_ok=True)
    except (ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    console = Console()
    if not console.is_terminal:
        console = Console(width=132)  # a file or a pipe has no width of its own; rich's 80 would cut the tables
    with threads(arguments.threads):
        comparison = compare_with_progress(tasks, budget, arguments.seed, console)
        report(comparison, arguments.seed, arguments.out, console)
    if comparison.interrupted:
        console.print("Interrupted: the results cover the runs above.")
        return INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
