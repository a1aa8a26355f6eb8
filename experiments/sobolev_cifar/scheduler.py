"""Run many trainings, several at once in processes."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from threading import local
from typing import final

from experiments.cifar import Benchmark, cached
from experiments.images import Images
from experiments.sobolev_cifar.record import Record
from experiments.sobolev_cifar.training import Budget, Job, Setup, train


@final
@dataclass(frozen=True)
class Place:
    """Folders: the images as downloaded (``data``) and decoded (``store``), states and curves (``out``)."""

    data: Path
    store: Path
    out: Path

    def images(self, what: Benchmark, setup: Setup) -> Images:
        """The images that a setup trains on."""
        return setup.part.of(cached(self.data, what, self.store))


@final
@dataclass(frozen=True)
class Task:
    """A run with its setup, its images and its folders."""

    job: Job
    setup: Setup
    what: Benchmark
    place: Place


def perform(task: Task, budget: Budget) -> Record | None:
    """Perform one run; None if there is no time for it."""
    if not budget.allows(task.setup.duration):
        return None
    task.setup.prepare()
    record = train(task.job, task.setup, task.place.images(task.what, task.setup), task.place.out, budget)
    if record.history:
        last, end = record.history[-1], ", diverged" if record.diverged else "" if record.finished else ", not done"
        shown = f"loss {last.train_loss:.4f}, {last.test_accuracy:.2%} in {last.seconds:.0f} s"
        print(f"{task.job.key}: epoch {last.epoch} of {task.setup.epochs}, {shown}{end}", flush=True)
    return record


def perform_all(tasks: Sequence[Task], workers: int, budget: Budget) -> list[Record]:
    """Perform all runs that there is time for, ``workers`` at once.

    A run that fails stops no other; failures are reported at the end.
    """
    begun = [task for task in tasks if budget.allows(task.setup.duration)]
    if not begun:
        return []
    records, failed = [], []
    outcomes = _sequential(begun, budget) if workers == 1 else _parallel(begun, workers, budget)
    for task, outcome in outcomes:
        if isinstance(outcome, BaseException):
            failed.append(f"{task.job.key}: " + "".join(traceback.format_exception(outcome)))
        elif outcome is not None:
            records.append(outcome)
    if failed:
        raise SystemExit("\n".join([f"{len(failed)} of {len(tasks)} runs failed", *failed]))
    return records


def _sequential(tasks: Sequence[Task], budget: Budget) -> Iterator[tuple[Task, Record | BaseException | None]]:
    """Run one after the other in this process."""
    return ((task, _attempted(task, budget)) for task in tasks)


def _attempted(task: Task, budget: Budget) -> Record | Exception | None:
    try:
        return perform(task, budget)
    except Exception as error:
        return error


def _parallel(
    tasks: Sequence[Task], workers: int, budget: Budget
) -> Iterator[tuple[Task, Record | BaseException | None]]:
    """Run in processes. Each is a pool of its own: one that is killed loses its own run, and no other."""
    with ExitStack() as pools, ThreadPoolExecutor(workers) as threads:
        mine = local()

        def attempt(task: Task) -> Record | None:
            if not hasattr(mine, "pool"):
                mine.pool = pools.enter_context(ProcessPoolExecutor(1, mp_context=get_context("spawn")))
            try:
                record: Record | None = mine.pool.submit(perform, task, budget).result()
            except BrokenProcessPool:
                del mine.pool  # the next run has a new one
                raise
            return record

        for task, future in [(task, threads.submit(attempt, task)) for task in tasks]:
            error = future.exception()
            yield task, future.result() if error is None else error
