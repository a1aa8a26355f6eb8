"""Nonlinear least squares beside SciPy: the NIST Statistical Reference Datasets, batches of curve fits, networks.

Run with ``python benchmarks/least_squares.py FOLDER``, where the folder has the 27 files ``Misra1a.dat`` … of
https://www.itl.nist.gov/div898/strd/nls/nls_main.shtml. Every problem is solved from both of its starting points, with
default tolerances. Digits are −log₁₀ of the largest relative error of a certified value. Times are those of the
processor, the median of some runs after the first, on one thread (set OMP_NUM_THREADS=1). The libraries take turns.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, final

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor

import natgrad as ng
from benchmarks.harness import machine

RESULTS = Path(__file__).parent / "results" / "least_squares.json"
Model = Callable[[Any, Any, Any], Any]  # b, x and the library, torch or numpy, that has exp, cos, …


def _rational(b: Any, x: Any, above: int, below: int) -> Any:
    top = sum(b[k] * x**k for k in range(1, above + 1)) + b[0]
    return top / (1 + sum(b[above + k] * x**k for k in range(1, below + 1)))


def _gaussians(b: Any, x: Any, of: Any) -> Any:
    hills = b[2] * of.exp(-((x - b[3]) ** 2) / b[4] ** 2) + b[5] * of.exp(-((x - b[6]) ** 2) / b[7] ** 2)
    return b[0] * of.exp(-b[1] * x) + hills


def _decays(b: Any, x: Any, of: Any) -> Any:
    return b[0] * of.exp(-b[1] * x) + b[2] * of.exp(-b[3] * x) + b[4] * of.exp(-b[5] * x)


def _waves(b: Any, x: Any, of: Any) -> Any:
    def wave(p: Any, q: Any, period: Any) -> Any:
        angle = 2 * math.pi * x / period
        return p * of.cos(angle) + q * of.sin(angle)

    return b[0] + wave(b[1], b[2], 12) + wave(b[4], b[5], b[3]) + wave(b[7], b[8], b[6])


def _chwirut(b: Any, x: Any, of: Any) -> Any:
    return of.exp(-b[0] * x) / (b[1] + b[2] * x)


def _growth(b: Any, x: Any, of: Any) -> Any:
    return b[0] * (1 - of.exp(-b[1] * x))


MODELS: dict[str, Model] = {
    "Bennett5": lambda b, x, of: b[0] * (b[1] + x) ** (-1 / b[2]),
    "BoxBOD": _growth,
    "Chwirut1": _chwirut,
    "Chwirut2": _chwirut,
    "DanWood": lambda b, x, of: b[0] * x ** b[1],
    "ENSO": _waves,
    "Eckerle4": lambda b, x, of: b[0] / b[1] * of.exp(-0.5 * ((x - b[2]) / b[1]) ** 2),
    "Gauss1": _gaussians,
    "Gauss2": _gaussians,
    "Gauss3": _gaussians,
    "Hahn1": lambda b, x, of: _rational(b, x, 3, 3),
    "Kirby2": lambda b, x, of: _rational(b, x, 2, 2),
    "Lanczos1": _decays,
    "Lanczos2": _decays,
    "Lanczos3": _decays,
    "MGH09": lambda b, x, of: b[0] * (x**2 + x * b[1]) / (x**2 + x * b[2] + b[3]),
    "MGH10": lambda b, x, of: b[0] * of.exp(b[1] / (x + b[2])),
    "MGH17": lambda b, x, of: b[0] + b[1] * of.exp(-x * b[3]) + b[2] * of.exp(-x * b[4]),
    "Misra1a": _growth,
    "Misra1b": lambda b, x, of: b[0] * (1 - (1 + b[1] * x / 2) ** -2),
    "Misra1c": lambda b, x, of: b[0] * (1 - (1 + 2 * b[1] * x) ** -0.5),
    "Misra1d": lambda b, x, of: b[0] * b[1] * x / (1 + b[1] * x),
    "Nelson": lambda b, x, of: b[0] - b[1] * x[0] * of.exp(-b[2] * x[1]),  # of the logarithm of y
    "Rat42": lambda b, x, of: b[0] / (1 + of.exp(b[1] - b[2] * x)),
    "Rat43": lambda b, x, of: b[0] / (1 + of.exp(b[1] - b[2] * x)) ** (1 / b[3]),
    "Roszman1": lambda b, x, of: b[0] - b[1] * x - of.arctan(b[2] / (x - b[3])) / math.pi,
    "Thurber": lambda b, x, of: _rational(b, x, 3, 3),
}


@final
@dataclass(frozen=True)
class Problem:
    """A data set with its two starting points, certified values and their standard deviations."""

    name: str
    starts: tuple[list[float], list[float]]
    certified: list[float]
    deviations: list[float]
    y: list[float]
    x: list[Any]  # numbers, or two lists of them (Nelson)

    @staticmethod
    def read(path: Path) -> Problem:
        """From a file of NIST."""
        text = path.read_text(encoding="latin-1")
        rows = re.findall(r"^\s*b\d+\s*=\s*(\S+)\s+(\S+)\s+(\S+)\s+(\S+)\s*$", text, re.MULTILINE)
        first, second, certified, deviations = ([float(row[k]) for row in rows] for k in range(4))
        lines = text.splitlines()
        start = max(k for k, line in enumerate(lines) if re.match(r"^Data:\s+y\s", line)) + 1
        data = [[float(v) for v in line.split()] for line in lines[start:] if line.strip()]
        y, *x = (list(column) for column in zip(*data, strict=True))
        if path.stem == "Nelson":
            y = [math.log(v) for v in y]
        return Problem(path.stem, (first, second), certified, deviations, y, x[0] if len(x) == 1 else x)

    def residuals(self) -> Callable[[Tensor], Tensor]:
        x, y, model = torch.tensor(self.x, dtype=torch.float64), torch.tensor(self.y, dtype=torch.float64), self._model
        return lambda b: model(b, x, torch) - y

    @property
    def _model(self) -> Model:
        return MODELS[self.name]

    def digits(self, found: list[float], truth: list[float]) -> float:
        worst = max(abs(a - b) / abs(b) for a, b in zip(found, truth, strict=True))
        return 11.0 if worst == 0 else min(11.0, -math.log10(worst))  # 11 are certified


def in_turns(ours: Callable[[], Any], theirs: Callable[[], Any], rounds: int) -> tuple[Any, float, Any, float]:
    """What both return, each with the median of the processor times of its runs after the first, in ms."""
    found, beside = ours(), theirs()
    mine, other = [], []
    for _ in range(rounds):
        start = time.process_time()
        found = ours()
        between = time.process_time()
        beside = theirs()
        mine.append(between - start)
        other.append(time.process_time() - between)
    return found, 1e3 * statistics.median(mine), beside, 1e3 * statistics.median(other)


def compare(problem: Problem, start: int, rounds: int) -> dict[str, Any]:
    """One problem from one start, by both libraries."""
    import numpy as np
    from scipy.optimize import least_squares

    x, y = np.array(problem.x), np.array(problem.y)
    x0, fun = torch.tensor(problem.starts[start - 1], dtype=torch.float64), problem.residuals()

    def theirs(b: Any) -> Any:
        return MODELS[problem.name](b, x, np) - y

    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        fit, ours_ms, beside, their_ms = in_turns(
            lambda: ng.least_squares(fun, x0), lambda: least_squares(theirs, x0.numpy()), rounds
        )
    return {
        "problem": problem.name,
        "start": start,
        "digits": round(problem.digits(fit.x.tolist(), problem.certified), 1),
        "digits of standard errors": round(problem.digits(fit.standard_errors.tolist(), problem.deviations), 1),
        "nfev": fit.nfev,
        "status": fit.status,
        "ms": round(ours_ms, 2),
        "SciPy digits": round(problem.digits(beside.x.tolist(), problem.certified), 1),
        "SciPy nfev": int(beside.nfev),
        "SciPy ms": round(their_ms, 2),
    }


def many_fits(count: int) -> dict[str, Any]:
    """``count`` exponential decays with an offset, 20 points each, in one call and in loops over SciPy's functions."""
    import numpy as np
    from scipy.optimize import curve_fit, least_squares

    generator = torch.Generator().manual_seed(0)
    t = torch.linspace(0, 4, 20, dtype=torch.float64)
    truth = torch.rand(count, 3, dtype=torch.float64, generator=generator) + 0.5
    noise = 0.02 * torch.randn(count, 20, dtype=torch.float64, generator=generator)
    data = truth[:, :1] * torch.exp(-truth[:, 1:2] * t) + truth[:, 2:] + noise

    def fun(x: Tensor, y: Tensor) -> Tensor:
        return x[0] * torch.exp(-x[1] * t) + x[2] - y

    x0 = torch.ones(count, 3, dtype=torch.float64)
    some, times = min(count, 200), t.numpy()

    def ours() -> Any:
        return ng.least_squares(fun, x0, (data,), batch=True)

    def theirs() -> Any:
        each = (data[k].numpy() for k in range(some))
        return [least_squares(lambda x, y=y: x[0] * np.exp(-x[1] * times) + x[2] - y, np.ones(3)).x for y in each]

    def curves() -> None:
        for k in range(some):
            curve_fit(lambda t, a, b, c: a * np.exp(-b * t) + c, times, data[k].numpy(), np.ones(3))

    fit, ms, beside, their_ms = in_turns(ours, theirs, 5)
    _, curve_ours_ms, _, curve_ms = in_turns(ours, curves, 5)
    their_ms, curve_ms = their_ms / some * count, curve_ms / some * count
    apart = max(float(abs(x - fit.x[k].numpy()).max()) for k, x in enumerate(beside))
    return {
        "fits": count,
        "converged": int(fit.success.sum()),
        "ms": round(ms, 1),
        "SciPy ms": round(their_ms),
        "times faster": round(their_ms / ms, 1),
        "SciPy curve_fit ms": round(curve_ms),
        "times faster than curve_fit": round(curve_ms / curve_ours_ms, 1),
        "largest difference to SciPy": apart,
    }


def two_peaks(count: int) -> dict[str, Any]:
    """Fits of two peaks with six unknowns, from starts with centres up to two widths off: how many end elsewhere."""
    import numpy as np
    from scipy.optimize import least_squares

    generator = torch.Generator().manual_seed(0)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, dtype=torch.float64, generator=generator)

    def peaks(x: Any, t: Any, of: Any) -> Any:
        first = x[0] * of.exp(-0.5 * ((t - x[1]) / x[2]) ** 2)
        return first + x[3] * of.exp(-0.5 * ((t - x[4]) / x[5]) ** 2)

    t = torch.linspace(0, 10, 60, dtype=torch.float64)
    low, range_ = (torch.tensor(v, dtype=torch.float64) for v in ([1, 2, 0.4, 1, 6, 0.4], [2, 2, 0.6, 2, 2, 0.6]))
    truth = low + range_ * uniform(count, 6)
    x0 = truth * (0.7 + 0.6 * uniform(count, 6))
    x0[:, [1, 4]] = truth[:, [1, 4]] + 2.4 * uniform(count, 2) - 1.2
    noise = 0.05 * torch.randn(count, 60, dtype=torch.float64, generator=generator)
    data = torch.vmap(lambda x: peaks(x, t, torch))(truth) + noise

    def fun(x: Tensor, y: Tensor) -> Tensor:
        return peaks(x, t, torch) - y

    best = ng.least_squares(fun, truth, (data,), batch=True).cost
    row: dict[str, Any] = {"fits": count}
    for name, scale in (("jac", "jac"), ("1", 1.0)):
        start = time.process_time()
        fit = ng.least_squares(fun, x0, (data,), batch=True, x_scale=scale)
        row[f"ms, x_scale {name}"] = round(1e3 * (time.process_time() - start))
        row[f"percent elsewhere, x_scale {name}"] = round(100 * float((fit.cost > 1.01 * best).double().mean()), 2)
    start, costs = time.process_time(), []
    for k in range(count):
        y = data[k].numpy()
        costs.append(least_squares(lambda x, y=y: peaks(x, t.numpy(), np) - y, x0[k].numpy()).cost)
    row["SciPy ms"] = round(1e3 * (time.process_time() - start))
    row["SciPy percent elsewhere"] = round(100 * float((torch.tensor(costs) > 1.01 * best).double().mean()), 2)
    return row


def networks(rounds: int) -> list[dict[str, Any]]:
    """tanh networks of one hidden layer, for about 15 steps each: their time, and where they lead.

    SciPy does not count the evaluations for its Jacobian, and natgrad counts the call that its Jacobian takes.
    """
    import numpy as np
    from scipy.optimize import least_squares

    def residuals(x: Any, z: Any, y: Any, of: Any, hidden: int) -> Any:
        inputs = z.shape[1]
        W, rest = x[: inputs * hidden].reshape(inputs, hidden), x[inputs * hidden :]
        return of.tanh(z @ W + rest[:hidden]) @ rest[hidden : 2 * hidden] + rest[-1] - y

    rows = []
    for inputs, hidden, points in ((1, 33, 200), (1, 33, 1000), (2, 50, 300), (2, 100, 500)):
        generator = torch.Generator().manual_seed(0)
        z = 4 * torch.rand(points, inputs, dtype=torch.float64, generator=generator) - 2
        y = torch.sin(2 * z).sum(1)
        x0 = 0.5 * torch.randn(hidden * (inputs + 2) + 1, dtype=torch.float64, generator=generator)
        data, more = (z, y, torch, hidden), (z.numpy(), y.numpy(), np, hidden)
        fit, ms, beside, their_ms = in_turns(
            partial(ng.least_squares, residuals, x0, data, max_nfev=30),
            partial(least_squares, residuals, x0.numpy(), args=more, max_nfev=15),
            rounds,
        )
        rows.append(
            {
                "unknowns": len(x0),
                "residuals": points,
                "ms": round(ms, 1),
                "SciPy ms": round(their_ms, 1),
                "cost": float(fit.cost),
                "SciPy cost": float(beside.cost),
            }
        )
        print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the .dat files of NIST")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--fits", type=int, default=10_000)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name in MODELS:
        problem = Problem.read(arguments.folder / f"{name}.dat")
        for start in (1, 2):
            rows.append(compare(problem, start, arguments.rounds))
            print("  ".join(f"{key} {value}" for key, value in rows[-1].items()), flush=True)
    ratios = [row["ms"] / row["SciPy ms"] for row in rows]
    summary = {
        "runs": len(rows),
        "runs with 6 digits or more": sum(row["digits"] >= 6 for row in rows),
        "SciPy runs with 6 digits or more": sum(row["SciPy digits"] >= 6 for row in rows),
        "fewest digits": min(row["digits"] for row in rows),
        "median time over SciPy's": round(statistics.median(ratios), 2),
        "largest time over SciPy's": round(max(ratios), 2),
        "runs within twice SciPy's time": sum(ratio <= 2 for ratio in ratios),
    }
    batch, peaks = many_fits(arguments.fits), two_peaks(arguments.fits // 5)
    print(summary, batch, peaks)
    content = {
        "machine": machine(torch.device("cpu")),
        "load": round(os.getloadavg()[1], 1),  # of other work, too
        "cores": os.cpu_count(),
        "summary": summary,
        "batch": batch,
        "two peaks": peaks,
        "networks": networks(3),
        "rows": rows,
    }
    arguments.output.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
