"""The subcommands of `natgrad`. Needs typer, rich and matplotlib."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from torch import nn
from torch.optim import Optimizer

import natgrad as ng
from natgrad.cli.compare import START, Contestant, problem_of, trials
from natgrad.cli.demo import digits, poisson
from natgrad.cli.doctor import findings
from natgrad.cli.inspection import Inspection, inspect
from natgrad.cli.report import report, resumed, save
from natgrad.cli.training import Budget, Problem, Runs, Task, TrainingRun, UsageError, Watch, compare, warm_up
from natgrad.errors import NatgradError
from natgrad.model import map_tensors

DEMO_SECONDS = 35.0  # of training: the measurements and the report take the demo to a minute on two cores
RATE_SEED = 1_000_000  # of the runs that search learning rates: not one of the seeds that are compared
FAILED, USAGE, NOT_GOOD, INTERRUPTED = 1, 2, 3, 130
EXIT_CODES = (
    "Exit codes: 0 done; 1 an error, such as one raised by your function; 2 a wrong command line; "
    "3 certify: not invariant, doctor: something to repair; 130 interrupted by Ctrl-C, with the report so far."
)

app = typer.Typer(
    help="Natural gradients for PyTorch.",
    epilog=EXIT_CODES,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Function = Annotated[
    str,
    typer.Argument(
        metavar="MODULE:FUNCTION",
        help="A function that returns (model, loss, train, test): a module, a function of output and target, "
        "and two lists or DataLoaders of batches (input, target).",
    ),
]
Threads = Annotated[int, typer.Option(min=1, help="Threads of torch.")]
Device = Annotated[str | None, typer.Option(help="Where the model and its batches go.")]
Steps = Annotated[int | None, typer.Option(min=1, help="At most this many steps in a run.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the numbers into this file.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write a page into this file.")]


def version(asked: bool) -> None:
    """Print the versions, and end."""
    if asked:
        typer.echo(f"natgrad {ng.__version__}, torch {torch.__version__}")
        raise typer.Exit


@app.callback()
def natgrad(
    version: Annotated[
        bool, typer.Option("--version", callback=version, is_eager=True, help="Print the versions.")
    ] = False,
) -> None:
    """Natural gradients for PyTorch."""


@contextmanager
def told(*also: type[Exception]) -> Iterator[None]:
    """Say what is wrong on the command line, or ``also`` with a file, in one sentence without a traceback."""
    expected: tuple[type[Exception], ...] = (UsageError, NatgradError, *also)
    try:
        yield
    except expected as error:
        typer.echo(f"natgrad: {error}", err=True)
        raise typer.Exit(FAILED if isinstance(error, NatgradError) else USAGE) from error


@contextmanager
def threads(number: int) -> Iterator[None]:
    """Set torch's number of threads, and restore it afterwards."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def console() -> Console:
    """The terminal. A file or a pipe has no width of its own; rich's 80 would cut the tables."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=160)


@contextmanager
def progress(of: Console, ended: Callable[[], object] = lambda: None) -> Iterator[Watch]:
    """One bar per run; ``ended`` is called after each."""
    columns = ("{task.description}", BarColumn(), TimeElapsedColumn(), TextColumn("{task.fields[state]}"))
    with Progress(*columns, console=of) as shown:
        bars: dict[int, TaskID] = {}

        def watch(run: TrainingRun, spent: float) -> None:
            if id(run) not in bars:
                bars[id(run)] = shown.add_task(
                    f"{run.task.name}: {run.optimizer}, seed {run.seed}", total=1.0, state=""
                )
            last = run.history[-1]
            shown.update(bars[id(run)], completed=spent, state=f"step {last.step}, test loss {last.test_loss:.3g}")
            if run.status != "running":
                ended()

        yield watch


def conclude(comparison: Runs, settings: dict[str, Any], title: str, out: Path, to: Console) -> None:
    """Write the report, and exit with the code of an interrupted comparison if it is one."""
    report(comparison, settings, title, out, to)
    if comparison.interrupted:
        to.print("Interrupted: the results cover the runs above.")
        raise typer.Exit(INTERRUPTED)


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("natgrad-demo"),
    seconds: Annotated[float | None, typer.Option(help="Training time of all runs together [35]")] = None,
    steps: Steps = None,
    seed: Annotated[int, typer.Option(help="Of initial weights and mini-batches.")] = 0,
    threads_: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = 1,
) -> None:
    """Compare optimizers on digits, and on a differential equation, in a minute.

    ng.Natural and K-FAC beside tuned AdamW and Muon on handwritten digits, and Gauss-Newton beside AdamW and L-BFGS on
    a differential equation. Prints who has the lowest test loss, whoever it is, and writes report.html and
    summary.json.
    """
    tasks, to = (digits(), poisson()), console()
    with told(OSError):
        out.mkdir(parents=True, exist_ok=True)
        share = DEMO_SECONDS if seconds is None and steps is None else seconds
        budget = budget_of(steps, None if share is None else share / sum(t.weight * len(t.optimizers) for t in tasks))
    settings = {"command": "demo", "steps": budget.steps, "seconds": budget.seconds}
    with threads(threads_):
        for task in tasks:
            warm_up(task)
        with progress(to) as watch:
            comparison = compare(tasks, budget, (seed,), watch)
        conclude(comparison, settings, "natgrad demo", out, to)


def budget_of(steps: int | None, seconds: float | None) -> Budget:
    """The budget of a run."""
    if seconds is not None and not seconds > 0:
        raise UsageError(f"--seconds is {seconds:g}, but must be positive")
    return Budget(steps, seconds)


@app.command("compare")
def compare_(
    function: Function,
    optimizers: Annotated[
        str, typer.Option(help="Names, with a learning rate (adamw=0.001) or without: then it is searched.")
    ] = "natural,adamw,muon",
    seconds: Annotated[float, typer.Option(help="Training time of a run.")] = 60.0,
    steps: Steps = None,
    seeds: Annotated[int, typer.Option(min=1, help="Runs of each optimizer.")] = 3,
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("natgrad-compare"),
    device: Device = None,
    threads_: Annotated[int, typer.Option("--threads", min=1, help="Threads of torch.")] = torch.get_num_threads(),
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Take one step with each optimizer, and stop.")] = False,
) -> None:
    """Compare optimizers on a model of your own; the same command goes on where it was stopped.

    MODULE:FUNCTION is called once for every run, after the seed was set: it makes the model anew. Every optimizer gets
    the same seconds, initial weights and mini-batches. Learning rates that are not given are searched first, each for a
    quarter of the seconds. Writes report.html and summary.json.
    """
    to, path = console(), out / "summary.json"
    with told():
        problem, budget = problem_of(function, device), budget_of(steps, seconds)
        contestants = [Contestant.of(text) for text in optimizers.split(",")]
        settings = {"command": f"compare {function}", "steps": steps, "seconds": seconds, "device": device}
        so_far = resumed(path, settings, problem)
    with threads(threads_):
        with told():
            score = first_steps(problem, contestants)
        if dry_run:
            to.print(f"{function} works with {', '.join(one.name for one in contestants)}.")
            return
        with told(OSError):
            out.mkdir(parents=True, exist_ok=True)
        with progress(to, lambda: save(so_far, settings, path)) as watch, suppress(KeyboardInterrupt):
            tuned = [*trials(problem, contestants, budget, RATE_SEED, watch, so_far)]
            task = Task(function, problem, {one.title: one for one in tuned}, score_name=score)
            compare((task,), budget, range(seeds), watch, so_far)
        conclude(so_far, settings, f"natgrad compare {function}", out, to)


def first_steps(problem: Callable[[], Problem], contestants: Sequence[Contestant]) -> str | None:
    """One step with every contestant, so that what does not work is told before the clock runs; the score's name."""
    twice = [one.title for one in contestants if [other.title for other in contestants].count(one.title) > 1]
    if twice:
        raise UsageError(f"{twice[0]} is named twice: give the two different learning rates, such as adamw=0.001")
    rated = [replace(one, rate=START) if one.tunes else one for one in contestants]
    score = warm_up(Task("first step", problem, {one.title: one for one in rated})).score
    return None if score is None else f"test {getattr(score, '__name__', 'score').replace('_', ' ')}"


@app.command("inspect")
def inspect_(
    function: Function,
    spectrum: Annotated[bool, typer.Option(help="Compute the eigenvalues of the metric on the first batch.")] = True,
    seed: Annotated[int, typer.Option(help="Of initial weights.")] = 0,
    json_: Json = None,
    html: Html = None,
) -> None:
    """Say what ng.Natural and ng.KFAC would do with a model: plan, coverage, memory, spectrum.

    MODULE:FUNCTION may return the model alone if it computes its loss, or (model, loss). A model on the meta device
    (made under `with torch.device("meta")`) has shapes and no numbers: a plan for billions of parameters costs no
    memory.
    """
    with told():
        torch.manual_seed(seed)
        found = inspect(problem_of(function, least=2)(), spectrum=spectrum)
    typer.echo(str(found))
    write(found, f"natgrad inspect {function}", json_, html)


def write(found: Inspection, title: str, json_: Path | None, html: Path | None) -> None:
    """Write the files that were asked for."""
    with told(OSError):
        if json_ is not None:
            json_.write_text(json.dumps(found.numbers, indent=1) + "\n", encoding="utf-8")
        if html is not None:
            html.write_text(found.page(title), encoding="utf-8")


@app.command()
def certify(
    function: Function,
    optimizers: Annotated[str, typer.Option(help="kfac (undamped), or names as in compare.")] = "kfac",
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 5,
    seed: Annotated[int, typer.Option(help="Of initial weights.")] = 0,
    json_: Json = None,
    html: Html = None,
) -> None:
    """Test whether an optimizer takes the same steps in other coordinates of the network, on its first batch.

    The model and the batch are made double precision. ng.invariance.certify describes the test.
    """
    with told():
        torch.manual_seed(seed)
        problem = problem_of(function)()
        problem.model.double()
        x, target = map_tensors(next(iter(problem.train)), lambda t: t.double() if t.is_floating_point() else t)
        certificates = {
            text: ng.invariance.certify(undamped(text, problem), problem.model, (x, target), steps, loss=problem.loss)
            for text in optimizers.split(",")
        }
    numbers = {text: {"invariant": c.invariant, "differences": c.differences} for text, c in certificates.items()}
    found = Inspection(numbers, certificates)
    typer.echo(str(found))
    write(found, f"natgrad certify {function}", json_, html)
    if not all(c.invariant for c in certificates.values()):
        raise typer.Exit(NOT_GOOD)


def undamped(text: str, problem: Problem) -> Callable[[nn.Module], Optimizer]:
    """The optimizer of a network by its name, without damping if it is K-FAC."""
    if text == "kfac":
        return lambda model: ng.KFAC(model, problem.loss, lr=0.1, damping=0.0)
    one = Contestant.of(text)
    at = replace(one, rate=START) if one.tunes else one
    return lambda model: at(replace(problem, model=model))


@app.command()
def doctor() -> None:
    """Look at versions and devices, and take a step whose result is known."""
    found = [*findings()]
    typer.echo("\n".join(map(str, found)))
    if any(one.remedy for one in found):
        raise typer.Exit(NOT_GOOD)
