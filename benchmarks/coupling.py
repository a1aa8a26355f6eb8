"""Sobolev K-FAC over K-FAC: what a kernel of the inputs of a batch adds to a training step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

import natgrad as ng
from benchmarks.alone import Alone
from benchmarks.contestants import Problem
from benchmarks.kfac_cases import Make
from benchmarks.report import Report, Target

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Training = Callable[[Problem, Optimizer, int], Callable[[], Any]]
Metric = Callable[[Problem], ng.OutputMetric]
Loop = Callable[[torch.device], Callable[[], Any]]

PLAIN, COUPLED = "natgrad K-FAC, 10 & 100", "natgrad Sobolev K-FAC, 10 & 100"


def kfac(metric: ng.OutputMetric, model: nn.Module) -> torch.optim.Optimizer:
    """The unit."""
    return ng.KFAC(model, metric, lr=1e-4, metric_every=10, inverse_every=100)


def sobolev(metric: ng.OutputMetric, model: nn.Module) -> torch.optim.Optimizer:
    """With the schedule of the unit."""
    return ng.SobolevKFAC(model, metric, lr=1e-4, lengthscale=20.0, metric_every=10, inverse_every=100)


def compare(report: Report, make: Make, metric: Metric, training: Training, bound: float | None) -> None:
    """Steps with the factors every ten, their inverses every hundred; tokens have no kernel, and are left out."""
    problem = make(report.device)
    if not problem.x.is_floating_point():
        return
    length = 100 if report.device.type == "cuda" else 10
    loops: dict[str, Loop] = {
        name: partial(loop, make, metric, training, made, length) for name, made in ((PLAIN, kfac), (COUPLED, sobolev))
    }
    section, (rounds, warmup) = f"Sobolev K-FAC: {problem.name}", report.cycles
    with _running(loops, report.device) as entries:
        result = report.race(section, entries, PLAIN, rounds, dict.fromkeys(entries, length), warmup)
    if bound is not None:
        claim = f"Sobolev K-FAC step, 10 & 100, over K-FAC, {problem.name}"
        report.targets.append(Target(claim, result.ratio(COUPLED, PLAIN).median, bound, True))


def loop(
    make: Make,
    metric: Metric,
    training: Training,
    made: Callable[[ng.OutputMetric, nn.Module], torch.optim.Optimizer],
    length: int,
    device: torch.device,
) -> Callable[[], Any]:
    """So many steps of a network and an optimizer."""
    problem = make(device)
    return training(problem, partial(made, metric(problem)), length)


@contextmanager
def _running(loops: dict[str, Loop], device: torch.device) -> Iterator[dict[str, Callable[[], Any]]]:
    """Ready to be called. On a GPU each alone: recorded kernels know memory, which the other would move."""
    if device.type != "cuda":
        yield {name: made(device) for name, made in loops.items()}
        return
    with ExitStack() as stack:
        yield {name: stack.enter_context(Alone(made, device, device=device)) for name, made in loops.items()}
