"""Timing and memory: contestants take turns, and only ratios within a round are compared."""

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
    """Seconds of every contestant per round, and those of the ``unit``, one of them, in the same rounds."""

    unit: str
    seconds: dict[str, list[float]]
    beside: dict[str, list[float]]

    def time(self, name: str) -> Spread:
        return Spread.of(self.seconds[name])

    def in_units(self, name: str) -> list[float]:
        """Time over that of the unit in the same round: a slow phase of the machine affects both."""
        return [a / b for a, b in zip(self.seconds[name], self.beside[name], strict=True)]

    def ratio(self, name: str, over: str) -> Spread:
        """The ratio of two contestants, both in units."""
        if over == self.unit:
            return Spread.of(self.in_units(name))
        if name == self.unit:
            return Spread.of([1 / r for r in self.in_units(over)])
        return Spread.of([a / b for a, b in zip(self.in_units(name), self.in_units(over), strict=True)])

    def each(self, steps: Mapping[str, int]) -> Race:
        """The time per step, for contestants that take several steps per call."""
        seconds = {name: [s / steps.get(name, 1) for s in times] for name, times in self.seconds.items()}
        beside = {name: [s / steps.get(self.unit, 1) for s in times] for name, times in self.beside.items()}
        return Race(self.unit, seconds, beside)


Contestants: TypeAlias = Mapping[str, Callable[[], Any]]


def duels(
    contestants: Contestants,
    unit: str,
    rounds: int,
    device: torch.device,
    warmup: int = 2,
    turns: Mapping[str, int] | None = None,
) -> Race:
    """Every contestant alternates with the unit only, after ``warmup`` rounds that are not counted.

    ``turns``: turns per round. A training loop finds its own memory and caches in the same state every time, and so do
    two loops that alternate; among many, every round would start cold.
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
    """All contestants alternate: on a GPU none finds its memory as it left it."""
    seconds = _rounds(contestants, rounds, device, warmup, max((turns or {}).values(), default=1))
    return Race(unit, seconds, dict.fromkeys(seconds, seconds[unit]))


def _rounds(
    contestants: Contestants, rounds: int, device: torch.device, warmup: int, turns: int = 1
) -> dict[str, list[float]]:
    """Seconds of each contestant per round, the mean over its turns."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for at in range(-warmup, rounds):
        means = dict.fromkeys(contestants, 0.0)
        for _ in range(turns):
            for name, contestant in contestants.items():
                start = now(device)
                contestant()
                means[name] += (now(device) - start) / turns
        if at >= 0:
            for name, mean in means.items():
                seconds[name].append(mean)
    return seconds


def now(device: torch.device) -> float:
    """CPU time of this process, which other programs do not add to; on a GPU the time when its queue is empty."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        return time.perf_counter()
    return time.process_time()


def disagreement(results: Mapping[str, Tensor]) -> float:
    """The largest relative distance of a result from the first one."""
    first, *others = [r.detach() for r in results.values()]
    norm = torch.linalg.vector_norm(first)
    return max((float(torch.linalg.vector_norm(r - first) / norm) for r in others), default=0.0)


def settle() -> None:
    """One thread, and an allocator that never returns memory to the system, as after the first steps of training.

    Fresh pages cost as much as a layer. Whether freed pages are returned depends on what ran before: without this the
    order of the contestants would matter.
    """
    torch.set_num_threads(1)
    _allocator(trim=-1, mmap=2**30)


def _allocator(trim: int, mmap: int) -> None:
    """Return free memory beyond ``trim`` bytes (−1: never); map allocations from ``mmap`` bytes on separately."""
    if sys.platform == "linux" and platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(-1, trim)  # M_TRIM_THRESHOLD
        libc.mallopt(-3, mmap)  # M_MMAP_THRESHOLD


def peak_memory(prepare: Callable[..., Callable[[], Any]], *args: Any, device: torch.device) -> int:
    """Peak memory of ``prepare(*args)()`` in bytes, beyond what was allocated before, on the CPU in a new process.

    ``prepare`` runs something small of the same kind, so that what libraries load once is not counted.
    """
    if device.type == "cuda":
        run = prepare(*args)
        gc.collect()  # garbage of earlier contestants would be freed during the run
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
    _allocator(trim=2**16, mmap=2**16)  # freed tensors are returned at once: resident memory is live memory
    run = prepare(*args)
    status = Path("/proc/self/status")
    if not status.exists():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run()
        unit = 1 if sys.platform == "darwin" else 1024
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * unit
    Path("/proc/self/clear_refs").write_text("5")  # reset the high-water mark
    before = _status(status, "VmRSS")
    run()
    return _status(status, "VmHWM") - before


def _status(status: Path, key: str) -> int:
    line = next(line for line in status.read_text().splitlines() if line.startswith(key))
    return int(line.split()[1]) * 1024


@final
class SubprocessRunner:
    """The contestant ``prepare(*args)`` in a process of its own: on a GPU it shares no allocator with the others.

    Functions and arguments are pickled. A call returns when the device has finished.
    """

    def __init__(self, prepare: Callable[..., Callable[[], Any]], *args: Any, device: torch.device) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, there = context.Pipe()
        arguments = (there, prepare, args, device, torch.get_float32_matmul_precision())
        self._process = context.Process(target=_serve, args=arguments, daemon=True)
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
    """Call the contestant for every message, until the connection is closed."""
    settle()
    torch.set_float32_matmul_precision(precision)
    contestant = prepare(*args)
    while True:
        try:
            connection.recv()
        except EOFError:
            return
        contestant()
        now(device)  # waits for the device
        connection.send("done")


def machine(device: torch.device) -> dict[str, Any]:
    """What the numbers depend on, without the name of the machine."""
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
    """Microseconds per launch of a tiny kernel: the median of five measurements."""
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
