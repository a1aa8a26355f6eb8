"""Where should the kernel of a Sobolev metric be evaluated? Mini-batches of a small regression problem.

    python -m experiments.sobolev_points experiments/results/sobolev_points   # twenty minutes of a busy core
    python -m benchmarks.pages                                                # the tables of docs/sobolev_study.md

Bai, Rosenberg and Xu (2022) project tangents on the kernel functions of a batch. The points may be others, and need no
targets: ``opt.refresh(points)`` before the forward pass. The gradient is that of the batch in all cases.

The target is sin 3x₁ + sin(3x₂ + 2x₁) at random points of [−1, 1]², with noise. Every metric has the learning rate and
the damping with the smallest error on validation points, of all in a grid, with one seed; other seeds are reported.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import natgrad as ng
from experiments.files import markdown_table, write_json
from natgrad.errors import NatgradError
from natgrad.output import OutputMetric

TRAIN, BATCH, STEPS, SEEDS = 128, 16, 150, 5
RATES, DAMPINGS, NOISES = (0.003, 0.01, 0.03, 0.1, 0.3, 1.0), (1e-2, 1e-1), (0.0, 0.5)
COUNTS, DENSE = (4, 16, 64, 256, 1024), 2048
SOBOLEV = ng.Sobolev(nu=1.5, lengthscale=0.5)
Points = Callable[[Tensor, Tensor, torch.Generator], Tensor]  # of a batch and all training inputs

METRICS: Mapping[str, tuple[OutputMetric, Points]] = {
    "Gauss–Newton, the batch": (ng.Euclidean(), lambda x, every, g: x),
    "Gauss–Newton, all training inputs": (ng.Euclidean(), lambda x, every, g: every),
    "Sobolev, the batch": (SOBOLEV, lambda x, every, g: x),
    "Sobolev, 64 training inputs": (SOBOLEV, lambda x, every, g: every[torch.randperm(TRAIN, generator=g)[:64]]),
    "Sobolev, all training inputs": (SOBOLEV, lambda x, every, g: every),
    "Sobolev, 128 new points": (SOBOLEV, lambda x, every, g: inputs(TRAIN, g)),
}


def inputs(n: int, generator: torch.Generator) -> Tensor:
    """Points of the square [n 2]."""
    return 2 * torch.rand(n, 2, generator=generator, dtype=torch.float64) - 1


def target(x: Tensor) -> Tensor:
    """The function to be learned [n 1]."""
    return (3 * x[:, :1]).sin() + (3 * x[:, 1:] + 2 * x[:, :1]).sin()


def network(seed: int) -> nn.Module:
    """Two hidden layers of tanh units."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(2, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh(), nn.Linear(20, 1))
    return net.double()


def error(net: nn.Module, x: Tensor) -> float:
    """The root mean square error without noise."""
    with torch.no_grad():
        return float((net(x) - target(x)).square().mean().sqrt())


def train(name: str, noise: float, seed: int, lr: float, damping: float, steps: int = STEPS) -> nn.Module | None:
    """A trained network, or None where a step failed."""
    metric, points = METRICS[name]
    generator = torch.Generator().manual_seed(seed)
    x = inputs(TRAIN, generator)
    t = target(x) + noise * torch.randn(TRAIN, 1, generator=generator, dtype=torch.float64)
    net = network(seed)
    opt = ng.NaturalGradient(net, metric, structure=ng.Kernel(), lr=lr, damping=ng.Relative(damping))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(opt, steps)
    try:
        for _ in range(steps):
            batch = torch.randperm(TRAIN, generator=generator)[:BATCH]
            opt.zero_grad()
            opt.refresh(points(x[batch], x, generator))
            (0.5 * (net(x[batch]) - t[batch]).square().mean()).backward()
            opt.step()
            schedule.step()
    except NatgradError:
        return None
    return net


def study(noise: float, steps: int = STEPS, seeds: int = SEEDS) -> dict[str, Any]:
    """For every metric the best settings, and the errors on test points with other seeds."""
    validation, test = (inputs(DENSE, torch.Generator().manual_seed(-1 - k)) for k in range(2))
    found = {}
    for name in METRICS:
        tried = {}
        for settings in itertools.product(RATES, DAMPINGS):
            net = train(name, noise, 0, *settings, steps=steps)
            tried[settings] = math.inf if net is None else error(net, validation)
        best = min(tried, key=lambda settings: tried[settings])
        nets = [train(name, noise, seed, *best, steps=steps) for seed in range(1, 1 + seeds)]
        found[name] = {"lr": best[0], "damping": best[1], "errors": [error(n, test) if n else None for n in nets]}
    return found


def shares(seeds: int = SEEDS) -> dict[str, list[float]]:
    """N·vᵀGv at N points over that at many, for random v: how much of the norm of J v a batch of N sees."""
    found: dict[str, list[float]] = {f"{count}": [] for count in COUNTS}
    for seed in range(seeds):
        net, generator = network(seed), torch.Generator().manual_seed(seed)
        x = inputs(DENSE, generator)
        v = {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in net.named_parameters()}
        Jv = torch.func.jvp(
            lambda p, net=net, x=x: torch.func.functional_call(net, p, (x,)), (dict(net.named_parameters()),), (v,)
        )[1].detach()
        norms = {n: float(Jv[:n].T @ torch.linalg.solve(SOBOLEV.gram(x[:n], n), Jv[:n])) for n in (*COUNTS, DENSE)}
        for count in COUNTS:
            found[f"{count}"].append(norms[count] / norms[DENSE])
    return found


def tables(record: Mapping[str, Any]) -> tuple[str, str]:
    """The errors of the metrics, and the share of the norm that a number of points sees."""
    rows = []
    for name in METRICS:
        row = [name]
        for of_noise in record["errors"].values():
            found, reference = of_noise[name], of_noise["Sobolev, the batch"]["errors"]
            errors = [math.inf if e is None else e for e in found["errors"]]
            lower = sum(e < other for e, other in zip(errors, reference, strict=True))
            row += [f"{statistics.fmean(errors):.3f} ± {statistics.stdev(errors):.3f}", f"{lower} of {len(errors)}"]
            row.append(f"{found['lr']:g}, {found['damping']:g}")
        rows.append(row)
    head = [[f"error, noise {noise}", "below Sobolev, the batch", "lr, ε"] for noise in record["errors"]]
    first = markdown_table(["metric, and its points", *itertools.chain(*head)], rows)
    means = [f"{100 * statistics.fmean(values):.0f} %" for values in record["shares"].values()]
    return first, markdown_table(["points", *record["shares"]], [["share of the norm of J v", *means]])


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, help="where the record goes")
    folder: Path = parser.parse_args(arguments).folder
    record = {"shares": shares(), "errors": {f"{noise:g}": study(noise) for noise in NOISES}}
    write_json(folder / "record.json", record)
    print(*tables(record), sep="\n\n")


if __name__ == "__main__":
    main()
