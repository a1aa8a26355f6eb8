"""Sobolev K-FAC against K-FAC, SGD and AdamW: VGG16 on CIFAR-10 and CIFAR-100, after Bai, Rosenberg and Xu (2022).

    python experiments/sobolev_cifar.py --data DATA --tune             # tune SGD and AdamW in two rounds
    python experiments/sobolev_cifar.py --data DATA --tune --anew      # … again, after the options have changed
    python experiments/sobolev_cifar.py --data DATA --time             # milliseconds per step on an idle device
    python experiments/sobolev_cifar.py --data DATA --workers 4        # all unfinished runs
    python experiments/sobolev_cifar.py --data DATA --seconds 540      # … for nine minutes; the same command resumes
    python experiments/sobolev_cifar.py --report                       # curves, summary, tables and figures
    python experiments/sobolev_cifar.py --data DATA --pack PIECES      # write the images losslessly in small files

DATA: see ``experiments/cifar.py``. Checkpoints and decoded images go to ``--out`` and may be large (a gigabyte per
unfinished K-FAC run); results go to ``--results``, and finished runs there are not repeated. A run with other settings
or other images is refused, never mixed in. SGD and AdamW are tuned for each schedule separately; when their settings
change, their runs are repeated and replaced, and the old settings stay in ``tuned.json``.

The schedules are those of the paper, "tenths" for its baseline and "fifths" for its Sobolev gradient, and "cosine". A
seed has the same initial weights and the same batches for all optimizers. Augmentation: four black pixels around the
image, a random crop, a random mirror image. Training losses are means during an epoch, in training mode. The
optimizers, and how the paper's weight decay is done here, are in ``experiments/configs.py``. Workers share a GPU in
turns; with NVIDIA's multi-process service (``nvidia-cuda-mps-control -d``) they run side by side.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from experiments import paired_stats, report
from experiments.cifar import CIFAR10, CIFAR100, pack
from experiments.configs import (
    FIFTHS,
    TENTHS,
    AdamW,
    Config,
    Cosine,
    Momentum,
    Schedule,
    amari,
    grid,
    independent,
    sobolev,
)
from experiments.files import commit
from experiments.images import Part
from experiments.record import Record, load_all, load_each
from experiments.report import draw
from experiments.scheduler import Place, Task, perform_all
from experiments.timing import Timing, lines, measured
from experiments.training import Budget, Job, Pace, Setup, Until
from experiments.tuning import Choices, Round, Tuning, TuningKey

# The names on the command line.
BENCHMARKS = {"cifar10": CIFAR10, "cifar100": CIFAR100}
SCHEDULES: dict[str, Schedule] = {"tenths": TENTHS, "fifths": FIFTHS, "cosine": Cosine()}
LAYOUTS = {"channels-last": torch.channels_last, "contiguous": torch.contiguous_format}
FIXED: dict[str, Callable[[], Config]] = {
    "amari": amari,
    "sobolev": sobolev,
    "independent": independent,
    "amari_exact": lambda: amari().exactly_damped(),
    "sobolev_exact": lambda: sobolev().exactly_damped(),
}
TUNED = {"sgd": Momentum, "adamw": AdamW}
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
RESULTS = Path(__file__).resolve().parent / "results" / "sobolev_cifar"


def arm(key: TuningKey, results: Path, setup: Setup) -> Config:
    """An optimizer by name; SGD and AdamW as tuned on these images with this schedule."""
    if key.arm in FIXED:
        return FIXED[key.arm]()
    found = Choices.load(results / TUNED_FILE).chosen(key, setup)
    return TUNED[key.arm](lr=found["lr"], weight_decay=found["weight_decay"])


def tune(args: argparse.Namespace, setup: Setup, place: Place, budget: Budget) -> None:
    """Tune SGD and AdamW on held-out training images."""
    rounds = Round(args.tune_epochs), Round(args.final_epochs, args.finalists)
    place = replace(place, out=args.out / "tuning")
    setup = replace(setup, part=replace(setup.part, held_out=args.held_out))
    tuning = Tuning(rounds, [SCHEDULES[name] for name in args.schedules], setup, place, args.results / TUNED_FILE)
    grids = {name: arms for name, arms in grid().items() if name in args.arms}
    benchmarks = [BENCHMARKS[name] for name in args.datasets]
    if args.anew:
        tuning.set_aside(grids, benchmarks)
    tuning.tune(grids, benchmarks, budget)


def run(args: argparse.Namespace, setup: Setup, place: Place, budget: Budget) -> None:
    """All unfinished runs, the first seed of everything first."""
    known = {record.name.key: record for record in records(args) if record.finished}
    benchmarks = [BENCHMARKS[name] for name in args.datasets]
    arms = {
        (what, schedule): [arm(TuningKey(what.name, name, schedule), args.results, setup) for name in args.arms]
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
    if record.name.arm not in TUNED or not record.made_with({**settings, "arm": was}):
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
    print(report.table(found), paired_stats.table(found), paired_stats.reached(found), sep="\n\n")


def clock(args: argparse.Namespace, setup: Setup, place: Place) -> None:
    """Milliseconds per step of every optimizer on every set of images, one after the other in one process."""
    # The cost of a step does not depend on the learning rate: SGD and AdamW need not be tuned.
    arms = [FIXED[name]() if name in FIXED else TUNED[name](lr=1e-3, weight_decay=1e-3) for name in args.arms]
    for what in (BENCHMARKS[name] for name in args.datasets):
        found = measured(arms, replace(setup, pace=Pace()), place.images(what, setup), args.rounds)
        path = args.results / "timing.json"
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
    add("--arms", nargs="+", choices=[*FIXED, *TUNED], default=["amari", "sobolev", "independent", *TUNED])
    add("--seeds", nargs="+", type=int, default=[0, 1, 2])
    add("--epochs", type=int, default=50)
    add("--batch", type=int, default=128)
    add("--width", type=int, default=64, help="channels of the first layer")
    add("--limit", type=int, default=None, help="only so many images of each split")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    add("--layout", choices=LAYOUTS, default="channels-last", help="of images in memory")
    add("--workers", type=int, default=1, help="runs at once, each in a process")
    add("--seconds", type=float, default=math.inf, help="no epoch is begun that would end later")
    add("--commit", default="", help="that the code is of, where this is no git repository")
    add("--save-every", type=int, default=1, help="epochs between two states")
    add("--rounds", type=int, default=5, help="of --time, a hundred steps each")
    add("--tune-epochs", type=int, default=4, help="of all candidates")
    add("--finalists", type=int, default=5, help="candidates that --tune chooses from in the end")
    add("--final-epochs", type=int, default=15, help="of these")
    add("--held-out", type=int, default=5000, help="training images that --tune chooses by")
    add("--anew", action="store_true", help="with --tune: put choices that were made in another way aside, and choose")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--tune", action="store_true", help="choose learning rate and weight decay of SGD and AdamW")
    what.add_argument("--time", action="store_true", help="measure a step of every optimizer, alone")
    what.add_argument("--report", action="store_true", help="write curves, summary, table and pictures")
    what.add_argument("--pack", type=Path, default=None, help="write the images in pieces to this folder")
    return checked(parser.parse_args(arguments))


def checked(args: argparse.Namespace) -> argparse.Namespace:
    """Refuse impossible numbers before anything is read."""
    for name, of in COUNTS.items():
        value = getattr(args, name)
        if value is not None and value < 1:
            raise SystemExit(f"--{name.replace('_', '-')} is {value}, the number of {of}: give 1 or more")
    if args.anew and not args.tune:
        raise SystemExit("--anew puts choices of SGD and AdamW aside to make them again: give it with --tune")
    return args


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    start, args = time.time(), parsed(arguments)
    budget = Until(start + args.seconds)
    layout = LAYOUTS[args.layout]
    part, pace = Part(args.limit), Pace(args.workers, args.save_every)
    trains = not (args.report or args.pack)
    made_with = (args.commit or commit()) if trains else ""
    setup = Setup(args.epochs, args.batch, args.width, args.device, layout, part, pace, made_with)
    place = Place(args.data, args.out, args.out)
    if args.pack:
        for name in args.datasets:
            print(*(path.name for path in pack(args.data, BENCHMARKS[name], args.pack)), sep="\n")
    elif args.tune:
        tune(args, setup, place, budget)
    elif args.time:
        clock(args, setup, place)
    elif args.report:
        summarise(args)
        print(
            *(
                path.name
                for path in draw(report.groups(load_all([args.results]), args.results / "timing.json"), args.results)
            )
        )
    else:
        run(args, setup, place, budget)


if __name__ == "__main__":
    main()
