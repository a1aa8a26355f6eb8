"""Sobolev K-FAC against K-FAC, SGD and AdamW: VGG16 on CIFAR-10 and CIFAR-100, after Bai, Rosenberg and Xu (2022).

    python -m experiments.sobolev_cifar --queue --data DATA --minutes 9    # what the protocol has and is not done yet
    python -m experiments.sobolev_cifar --report                           # curves, summary, tables, figures, verdict
    python -m experiments.sobolev_cifar --data DATA --tune --arms sgd      # tune an optimizer in two rounds
    python -m experiments.sobolev_cifar --data DATA --tune --anew          # … again, after the options have changed
    python -m experiments.sobolev_cifar --data DATA --time                 # milliseconds per step on an idle device
    python -m experiments.sobolev_cifar --data DATA --kernel               # what the control keeps of the coupling
    python -m experiments.sobolev_cifar --data DATA --arms amari --seeds 9 # runs of one's own choice
    python -m experiments.sobolev_cifar --data DATA --pack PIECES          # the images losslessly in small files

What is compared, and in which order it is run, was written down before: ``protocol.md``.
DATA: see ``experiments/cifar.py``. Checkpoints and decoded images go to ``--out`` and may be large (a gigabyte per
unfinished K-FAC run); results go to ``--results``, and finished runs there are not repeated. A run with other settings
or other images is refused, never mixed in. Tuned optimizers are tuned for each schedule separately; when their settings
change, their runs are repeated and replaced, and the old settings stay in ``tuned.json``. A run that time cuts short is
saved in ``--out`` and resumed from there by the same command.

The schedules are those of the paper, "tenths" for its baseline and "fifths" for its Sobolev gradient, and "cosine". A
seed has the same initial weights and the same batches for all optimizers. Augmentation: four black pixels around the
image, a random crop, a random mirror image. Training losses are means during an epoch, in training mode. The
optimizers, and how the paper's weight decay is done here, are in ``arms.py``. Workers share a GPU in
turns; with NVIDIA's multi-process service (``nvidia-cuda-mps-control -d``) they run side by side.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from experiments.cifar import CIFAR10, CIFAR100, pack
from experiments.files import commit
from experiments.images import Part
from experiments.sobolev_cifar import kernel, paired_stats, report, verdict
from experiments.sobolev_cifar.arms import ARMS, FIFTHS, TENTHS, Config, Cosine, Schedule
from experiments.sobolev_cifar.captured import cuda_graph
from experiments.sobolev_cifar.figures import draw
from experiments.sobolev_cifar.plan import Planned, plan
from experiments.sobolev_cifar.record import Name, Record, load_all, load_each
from experiments.sobolev_cifar.scheduler import Place, Task, perform_all
from experiments.sobolev_cifar.timing import Timing, lines, measured
from experiments.sobolev_cifar.training import Budget, Job, Pace, Setup, Until
from experiments.sobolev_cifar.tuning import Choices, Round, Tuning, TuningKey

# The names on the command line.
BENCHMARKS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
SCHEDULES: dict[str, Schedule] = {"tenths": TENTHS, "fifths": FIFTHS, "cosine": Cosine()}
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
TUNED_FILE = "tuned.json"
COUNTS = {
    "epochs": "epochs of a run",
    "batch": "images of a step",
    "width": "channels of the first layer",
    "limit": "images of each split",
    "workers": "runs at once",
    "save_every": "epochs between two states",
    "rounds": "rounds of --time",
    "tune_epochs": "epochs of all candidates",
    "finalists": "candidates of the last round",
    "final_epochs": "epochs of these",
    "held_out": "training images that --tune chooses by",
}
RESULTS = Path(__file__).resolve().parents[1] / "results" / "sobolev_cifar"


def arm(key: TuningKey, choices: Choices, setup: Setup) -> Config:
    """The settings of an arm; where it is tuned, those for these images and this schedule."""
    one = ARMS[key.arm]
    if not one.tuned:
        return one.candidates[0]
    return one.candidates[0].at(choices.chosen(key, setup))


def tune(args: argparse.Namespace, setup: Setup, place: Place, budget: Budget) -> None:
    """Tune on held-out training images."""
    tuning = _tuning(args, setup, place, args.schedules)
    grids = {name: ARMS[name].candidates for name in args.arms if ARMS[name].tuned}
    benchmarks = [BENCHMARKS[name] for name in args.datasets]
    if args.anew:
        tuning.set_aside(grids, benchmarks)
    tuning.tune(grids, benchmarks, budget)


def _tuning(args: argparse.Namespace, setup: Setup, place: Place, schedules: Sequence[str]) -> Tuning:
    rounds = Round(args.tune_epochs), Round(args.final_epochs, args.finalists)
    place = replace(place, out=args.out / "tuning")
    setup = replace(setup, part=replace(setup.part, held_out=args.held_out))
    return Tuning(rounds, [SCHEDULES[name] for name in schedules], setup, place, args.results / TUNED_FILE)


def queue(args: argparse.Namespace, setup: Setup, place: Place, budget: Budget) -> None:
    """The runs of the protocol that are not done, in its order, for as long as the time lasts.

    One that time cuts short is saved in ``--out``, and is the first of the next call. Searches come before the first
    run that needs them; where fewer runs than workers are left before it, later ones that need none run beside them.
    A run or a search that fails stops no other.
    """
    left, failed = list(plan()), list[str]()
    try:
        while left:
            choices = Choices.load(args.results / TUNED_FILE)
            ready = [run for run in left if not run.searches(choices)]
            if left[0] not in ready:
                part, dataset, before = left[0].part, left[0].name.dataset, len(failed)
                waiting = [run for run in left if run not in ready and (run.part, run.name.dataset) == (part, dataset)]
                try:
                    _search(waiting, choices, args, setup, place, budget)
                except (SystemExit, OSError, ValueError) as failure:  # a trial fails, or the images are not there
                    failed.append(f"{failure}")
                choices = Choices.load(args.results / TUNED_FILE)
                if left[0].searches(choices) and len(failed) == before:
                    break  # there is no time for the rest of it
                left = [run for run in left if run not in waiting or not run.searches(choices)]
                continue
            tasks, later = list[Task](), False
            done = {record.name: record for record in records(args) if record.finished}
            for run in list(left):
                later |= run not in ready  # than the first run that needs a search
                if run in ready and (not later or 0 < len(tasks) < setup.pace.workers):
                    tasks += _task(run, choices, done, setup, place)
                    left.remove(run)
            try:
                perform_all(tasks, setup.pace.workers, budget)
            except SystemExit as failure:
                failed.append(f"{failure}")
    finally:
        report.save_runs(records(args), args.results)
        missing = not_done(args)
        print(f"{len(missing)} of {len(plan())} runs of the protocol are not done", *_counted(missing), sep="\n  ")
    if failed:
        raise SystemExit("\n".join(failed))


def _task(run: Planned, choices: Choices, done: Mapping[Name, Record], setup: Setup, place: Place) -> list[Task]:
    """A run, if it is not done."""
    name = run.named(choices)
    assert name is not None
    what, key = BENCHMARKS[name.dataset], TuningKey(name.dataset, name.arm, name.schedule)
    job = Job(what.name, SCHEDULES[name.schedule], arm(key, choices, setup), name.seed)
    record = done.get(name)
    # The images of runs that are done need not be here: those of the record are taken for the same.
    if record is not None and is_done(setup.settings(job, record.settings.get("images", "")), record):
        return []
    return [Task(job, setup, what, place)]


def _search(
    runs: Sequence[Planned], choices: Choices, args: argparse.Namespace, setup: Setup, place: Place, budget: Budget
) -> None:
    """The searches before some runs on the same images: their trials run side by side."""
    keys = [key for run in runs for key in run.searches(choices)]
    grids = {key.arm: ARMS[key.arm].candidates for key in keys}
    schedules = list(dict.fromkeys(key.schedule for key in keys))
    _tuning(args, setup, place, schedules).tune(grids, [BENCHMARKS[runs[0].name.dataset]], budget)


def not_done(args: argparse.Namespace) -> list[Planned]:
    """The runs of the protocol that are not in the record."""
    choices = Choices.load(args.results / TUNED_FILE)
    done = {record.name for record in records(args) if record.finished}
    return [run for run in plan() if run.named(choices) not in done]


def _counted(runs: Sequence[Planned]) -> list[str]:
    parts = dict.fromkeys(run.part for run in runs)
    return [f"{part}: {sum(run.part == part for run in runs)}" for part in parts]


def run(args: argparse.Namespace, setup: Setup, place: Place, budget: Budget) -> None:
    """All unfinished runs, the first seed of everything first."""
    known = {record.name.key: record for record in records(args) if record.finished}
    benchmarks, choices = [BENCHMARKS[name] for name in args.datasets], Choices.load(args.results / TUNED_FILE)
    arms = {
        (what, schedule): [arm(TuningKey(what.name, name, schedule), choices, setup) for name in args.arms]
        for what in benchmarks
        for schedule in args.schedules
    }
    # Decode once, before several processes need the images.
    images = {what: place.images(what, setup).digest for what in benchmarks}
    tasks = []
    for seed in args.seeds:
        for (what, schedule), ones in arms.items():
            jobs = [Job(what.name, SCHEDULES[schedule], one, seed) for one in ones]
            left = [job for job in jobs if not is_done(setup.settings(job, images[what]), known.get(job.key))]
            tasks += [Task(job, setup, what, place) for job in left]
    print(f"{len(tasks)} runs, {len(known.keys() - {task.job.key for task in tasks})} are done")
    perform_all(tasks, setup.pace.workers, budget)
    summarise(args)


def is_done(settings: dict[str, Any], record: Record | None) -> bool:
    """Whether this run is done; a record with other settings or images is refused.

    A run whose tuned settings have changed since is not refused, but run again.
    """
    if record is None or record.made_with(settings):
        return record is not None
    was = record.settings["arm"]
    if not ARMS[record.name.arm].tuned or not record.made_with({**settings, "arm": was}):
        raise SystemExit(
            f"{record.name.key} was run with {record.settings}, now it is {settings}: choose other folders for --out "
            "and --results, or the same settings and images"
        )
    print(f"{record.name.key} was run with {was}, and {settings['arm']} has been chosen since: it is run again")
    return False


def records(args: argparse.Namespace) -> list[Record]:
    """All runs, without those with outdated settings."""
    return Choices.load(args.results / TUNED_FILE).current(load_each([args.results, args.out]))


def summarise(args: argparse.Namespace) -> None:
    """Write all results, and print the tables."""
    found = report.save(records(args), args.results)
    paired_stats.save(found, args.results)
    choices = Choices.load(args.results / TUNED_FILE)
    (args.results / "tuned.md").write_text(choices.table(report.TITLES) + "\n")
    print(verdict.save(found, not_done(args), choices, args.results), end="\n\n")
    print(report.table(found), paired_stats.table(found), paired_stats.reached(found), sep="\n\n")


def clock(args: argparse.Namespace, setup: Setup, place: Place) -> None:
    """Milliseconds per step of every optimizer on every set of images, one after the other in one process."""
    # The cost of a step does not depend on the learning rate: nothing need be tuned.
    arms, path = [ARMS[name].candidates[-1] for name in args.arms], args.results / "timing.json"
    alone = replace(setup, pace=replace(setup.pace, workers=1))
    for what in (BENCHMARKS[name] for name in args.datasets):
        lost = Timing.load(path).lost(what.name, alone, args.arms)
        if lost:
            raise SystemExit(
                f"{path} has times of {', '.join(lost)} on {what.name} from one measurement, which a new one replaces "
                "as a whole: name them in --arms, too"
            )
        found = measured(arms, alone, place.images(what, setup), args.rounds)
        Timing.load(path).with_measurement(found).save(path)
        print(lines(found))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Sobolev K-FAC against K-FAC, SGD and AdamW on CIFAR.")
    add = parser.add_argument
    add("--data", type=Path, default=Path("data"), help="the folder with the images")
    add("--out", type=Path, default=Path("experiments/states"), help="states and decoded images: gigabytes")
    add("--results", type=Path, default=RESULTS, help="curves, tables and pictures")
    add("--datasets", nargs="+", choices=BENCHMARKS, default=["cifar10"])
    add("--schedules", nargs="+", choices=SCHEDULES, default=["tenths", "fifths"])
    add("--arms", nargs="+", choices=ARMS, default=["amari", "sobolev", "independent", "sgd", "adamw"])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--epochs", type=int, default=50)
    add("--batch", type=int, default=128)
    add("--width", type=int, default=64, help="channels of the first layer")
    add("--limit", type=int, default=None, help="only so many images of each split")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--layout", choices=LAYOUTS, default="channels-last", help="of images in memory")
    add("--workers", type=int, default=1, help="runs at once, each in a process")
    add("--seconds", type=float, default=math.inf, help="no epoch is begun that would end later")
    add("--minutes", type=float, default=math.inf, help="the same in minutes")
    add(
        "--enough",
        type=float,
        default=0.0,
        help="seconds of a run: none is begun with less, a shorter trial with its share",
    )
    add("--commit", default="", help="that the code is of, where this is no git repository")
    add("--capture", action="store_true", help="passes as CUDA graphs, where no optimizer looks at them")
    add("--fuse", action="store_true", help="with --capture: their kernels by torch.compile")
    add("--save-every", type=int, default=1, help="epochs between two states")
    add("--rounds", type=int, default=5, help="of --time, a hundred steps each")
    add("--tune-epochs", type=int, default=4, help="of all candidates")
    add("--finalists", type=int, default=5, help="candidates that --tune chooses from in the end")
    add("--final-epochs", type=int, default=15, help="of these")
    add("--held-out", type=int, default=5000, help="training images that --tune chooses by")
    add("--anew", action="store_true", help="with --tune: put choices that were made in another way aside, and choose")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--queue", action="store_true", help="run what the protocol has and is not done, in its order")
    what.add_argument("--tune", action="store_true", help="choose the settings of the tuned optimizers")
    what.add_argument("--time", action="store_true", help="measure a step of every optimizer, alone")
    what.add_argument("--kernel", action="store_true", help="measure what the control keeps of the kernel's coupling")
    what.add_argument("--report", action="store_true", help="write curves, summary, table and pictures")
    what.add_argument("--pack", type=Path, default=None, help="write the images in pieces to this folder")
    return checked(parser.parse_args(arguments))


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse impossible numbers before anything is read."""
    for name, of in COUNTS.items():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} is {value}, the number of {of}: give 1 or more")
    if args.capture and args.device == "cpu":
        raise SystemExit("--capture makes CUDA graphs, and --device is cpu: leave one of them out")
    if args.fuse and not args.capture:
        raise SystemExit("--fuse compiles the passes that are captured, and none is: give it with --capture")
    if args.anew and not args.tune:
        raise SystemExit("--anew puts choices of SGD and AdamW aside to make them again: give it with --tune")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    start, args = time.time(), parsed(arguments)
    budget = Until(start + min(args.seconds, 60 * args.minutes))
    layout = LAYOUTS[args.layout]
    # A state of K-FAC is more than a gigabyte: the queue writes it only where it stops.
    every, capture = args.epochs if args.queue else args.save_every, cuda_graph if args.capture else None
    part, pace = Part(args.limit), Pace(args.workers, every, capture, args.fuse, args.enough / args.epochs)
    trains = not (args.report or args.pack or args.kernel)
    made_with = (args.commit or commit()) if trains else ""
    setup = Setup(args.epochs, args.batch, args.width, args.device, layout, part, pace, made_with)
    place = Place(args.data, args.out, args.out)
    if args.pack:
        for name in args.datasets:
            print(*(path.name for path in pack(args.data, BENCHMARKS[name], args.pack)), sep="\n")
    elif args.queue:
        queue(args, setup, place, budget)
    elif args.tune:
        tune(args, setup, place, budget)
    elif args.time:
        clock(args, setup, place)
    elif args.kernel:
        new = [kernel.described(place.images(BENCHMARKS[name], setup), args.batch) for name in args.datasets]
        print(kernel.save(new, args.results))
    elif args.report:
        summarise(args)
        found = report.groups(load_all([args.results]), args.results / "timing.json")
        print(*(path.name for path in draw(found, args.results)))
    else:
        run(args, setup, place, budget)


if __name__ == "__main__":
    main()
