"""Sobolev K-FAC over K-FAC: what a kernel of the inputs of a batch adds to a training step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import natgrad as ng
from benchmarks.contestants import Problem
from benchmarks.report import Report, Target

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]
Training = Callable[[Problem, Optimizer, int], Callable[[], Any]]
Metric = Callable[[Problem], ng.OutputMetric]

EVERY = {"metric_every": 10, "inverse_every": 100}


def compare(report: Report, problem: Problem, metric: Metric, training: Training, bound: float | None) -> None:
    """Steps with the factors every ten, their inverses every hundred; tokens have no kernel, and are left out."""
    if not problem.x.is_floating_point():
        return
    length = 100 if report.device.type == "cuda" else 10  # with ten refreshes a loop settles, as one that is alone
    plain, coupled = "natgrad K-FAC, 10 & 100", "natgrad Sobolev K-FAC, 10 & 100"

    def kfac(model: nn.Module) -> torch.optim.Optimizer:
        return ng.KFAC(model, metric(problem), lr=1e-4, **EVERY)  # type: ignore[arg-type]

    def sobolev(model: nn.Module) -> torch.optim.Optimizer:
        return ng.SobolevKFAC(model, metric(problem), lr=1e-4, lengthscale=20.0, **EVERY)  # type: ignore[arg-type]

    entries = {name: training(problem, made, length) for name, made in ((plain, kfac), (coupled, sobolev))}
    section, counts = f"Sobolev K-FAC: {problem.name}", dict.fromkeys(entries, length)
    rounds, warmup = report.cycles
    result = report.race(section, entries, plain, rounds, counts, warmup)
    if bound is not None:
        claim = f"Sobolev K-FAC step, 10 & 100, over K-FAC, {problem.name}"
        report.targets.append(Target(claim, result.ratio(coupled, plain).median, bound, True))
