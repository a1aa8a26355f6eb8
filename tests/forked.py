"""Programs of several processes, which tests start with a folder that takes what they find."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from torch import nn

import natgrad as ng


def run(main: Callable[[Path, int, int], None], sizes: Iterable[int]) -> None:
    """Run ``main(folder, rank, size)`` in groups of so many processes, one group after the other."""
    ng.Natural(nn.Linear(2, 2))  # loads torch's compiler once, and not in every process
    for size in sizes:
        args = [(Path(sys.argv[1]), rank, size) for rank in range(size)]
        processes = [multiprocessing.get_context("fork").Process(target=main, args=each) for each in args]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        if any(process.exitcode for process in processes):
            sys.exit(1)
