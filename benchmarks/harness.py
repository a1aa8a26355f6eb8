"""Timing and memory: contestants take turns, and only ratios within a turn are compared."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import platform
import resource
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, final

import torch
from torch import Tensor


@final
@dataclass(frozen=True)
class Spread:
    """A median with the quartiles around it."""

    median: float
    low: float
    high: float

    @staticmethod
    def of(values: list[float]) -> Spread:
        if len(values) < 2:
            return Spread(values[0], values[0], values[0])
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return Spread(median, low, high)


@final
@dataclass(frozen=True)
class Race:
    """Seconds of every contestant, a number a round, and those of the ``unit``, one of them, in the same rounds."""

    unit: str
    seconds: dict[str, list[float]]
    beside: dict[str, list[float]]

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def in_units(self, name: str) -> list[float]:
        """Time over the unit's in the same round: what slows the machine down slows both."""
        return [a / b for a, b in zip(self.seconds[name], self.beside[name], strict=True)]

    def ratio(self, name: str, over: str) -> Spread:
        """Time of one over the other, of each in units."""
        if over == self.unit:
            return Spread.of(self.in_units(name))
        if name == self.unit:
            return Spread.of([1 / r for r in self.in_units(over)])
        return Spread.of([a / b for a, b in zip(self.in_units(name), self.in_units(over), strict=True)])

    def each(self, steps: Mapping[str, int]) -> Race:
        """The time of one step, for contestants that take several in a call."""
        own = {name: [s / steps.get(name, 1) for s in seconds] for name, seconds in self.seconds.items()}
        return Race(self.unit, own, {name: [s / steps.get(self.unit, 1) for s in u] for name, u in self.beside.items()})


Contestants: TypeAlias = Mapping[str, Callable[[], Any]]


def duels(
    contestants: Contestants,
    unit: str,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    turns: Mapping[str, int] | None = None,
) -> Race:
    """Every contestant takes turns with the unit alone, after some rounds that are not counted.

    ``turns``: how many of them are one round. What runs finds the memory and the caches that others have left. A
    training loop finds its own, in the same places again and again, and so do two that alternate; among many, every
    round would be a first one.
    """
    seconds: dict[str, list[float]] = {}
    beside: dict[str, list[float]] = {}
    for name in [name for name in contestants if name != unit] or [unit]:
        gc.collect()
        torch.cuda.empty_cache()  # nothing, where there is no GPU
        two = _rounds(
            {unit: contestants[unit], name: contestants[name]}, rounds, device, warmup, (turns or {}).get(name, 1)
        )
        seconds |= {unit: [*seconds.get(unit, []), *two[unit]], name: two[name]}
        beside[name] = two[unit]
    return Race(unit, seconds, beside | {unit: seconds[unit]})


def together(
    contestants: Contestants,
    unit: str,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    turns: Mapping[str, int] | None = None,
) -> Race:
    """All contestants take turns, the most that one of them needs in a round: on a GPU none finds what it left."""
    seconds = _rounds(contestants, rounds, device, warmup, max((turns or {}).values(), default=1))
    return Race(unit, seconds, dict.fromkeys(seconds, seconds[unit]))


def _rounds(
    contestants: Contestants, rounds: int, device: torch.device, warmup: int, turns: int = 1
) -> dict[str, list[float]]:
    """Seconds of each, which take turns: the mean of so many for every round."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(-warmup, rounds):
        own = dict.fromkeys(contestants, 0.0)
        for _ in range(turns):
            for name, contestant in contestants.items():
                start = now(device)
                contestant()
                own[name] += (now(device) - start) / turns
        if at >= 0:
            for name, taken in own.items():
                seconds[name].append(taken)
    return seconds


def now(device: torch.device) -> float:
    """Time on the processor, which other programs on the machine do not add to; on a GPU the time of its queue."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def disagreement(results: Mapping[str, Tensor]) -> float:
    """The largest relative distance of a contestant's result from the first one's."""
    first, *others = [r.detach() for r in results.values()]
    norm = torch.linalg.vector_norm(first)
    return max((float(torch.linalg.vector_norm(r - first) / norm) for r in others), default=0.0)


def settle() -> None:
    """One thread, and an allocator that keeps what it has, as it does after the first steps of training.

    Fresh pages cost as much as a layer. Whether freed ones are given back to the system depends on who ran before, so
    without this the order of the contestants would decide.
    """
    torch.set_num_threads(1)
    _allocator(trim=-1, mmap=2**30)


def _allocator(trim: int, mmap: int) -> None:
    """Free memory is given back from ``trim`` bytes on (−1: never); from ``mmap`` on allocations have their pages."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, trim)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, mmap)  # M_MMAP_THRESHOLD


def peak_memory(prepare: Callable[..., Callable[[], Any]], *args: Any, device: torch.device) -> int:
    """Bytes that ``prepare(*args)()`` needs at its peak beyond what was there before, in a process of its own.

    ``prepare`` runs something small of the same kind, so that what libraries load once is not counted.
    """
    if device.type == "cuda":
        run = prepare(*args)
        gc.collect()  # what earlier contestants left in cycles would be freed during the run, and counted against it
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(_resident_peak, prepare, args).result()


def _resident_peak(prepare: Callable[..., Callable[[], Any]], args: tuple[Any, ...]) -> int:
    torch.set_num_threads(1)
    _allocator(trim=2**16, mmap=2**16)  # tensors that are freed leave at once: what is resident is what is alive
    run = prepare(*args)
    status = Path("/proc/self/status")
    if not status.exists():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        unit = 1 if sys.platform == "darwin" else 1024
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts at what is resident now
    before = _status(status, "VmRSS")
    run()
    return _status(status, "VmHWM") - before


def _status(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@final
class SubprocessRunner:
    """The contestant ``prepare(*args)``, made and called in a process that it has to itself, as a training loop has.

    What is called and given must be found by its name there. A call returns when the device has done it.
    """

    def __init__(self, prepare: Callable[..., Callable[[], Any]], *args: Any, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        given = (there, prepare, args, device, torch.get_float32_matmul_precision())
        self._process = context.Process(target=_serve, args=given, daemon=True)
        self._process.start()
        there.close()

    def __call__(self) -> None:
        try:
            self._connection.send("go")
            self._connection.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError) as error:
            self._process.join()
            raise RuntimeError(
                f"a contestant's process has ended with code {self._process.exitcode}: what it wrote tells why"
            ) from error

    def __enter__(self) -> SubprocessRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join()


def _serve(
    connection: Connection,
    prepare: Callable[..., Callable[[], Any]],
    args: tuple[Any, ...],
    device: torch.device,
    precision: str,
) -> None:
    """A call for every message, until nobody is there any more."""
    settle()
    torch.set_float32_matmul_precision(precision)
    contestant = prepare(*args)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        contestant()
        now(device)  # waits for it
        connection.send("done")


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on, and nothing that names the machine."""
    on_gpu = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_gpu else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "system": platform.system(),
        **({"matmul": torch.get_float32_matmul_precision()} if on_gpu else {}),
    }


def launch_time(device: torch.device, count: int = 2000) -> float:
    """Microseconds that the processor takes to start a kernel which does next to nothing: of five times the median."""
    x, times = torch.zeros(1, device=device), []
    for _ in range(6):
        start = now(device)
        for _ in range(count):
            x.add_(1.0)
        times.append((now(device) - start) / count * 1e6)
    return round(sorted(times[1:])[2], 2)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if not info.exists():
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {torch.backends.cpu.get_cpu_capability()}"
