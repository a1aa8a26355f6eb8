"""A natural-gradient step of a full Gaussian, over one Cholesky factorisation and two matrix products.

    python -m benchmarks.gaussian

F of N(μ, Σ) in (h, Λ) has (d + d²)² entries and is never formed: F⁻¹ is two products with Λ, and whether the new Λ is
positive definite is one factorisation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import torch
from torch import Tensor

import natgrad as ng
from benchmarks.harness import machine, settle
from benchmarks.report import Report, Target, save, table
from natgrad.mirror import MeanChart, NaturalChart, mirror_step, natural_step

UNIT, STEP, MIRROR = "one Cholesky, two products", "natural step, ∇ in η", "mirror step (21), ∇ in ξ"


@final
@dataclass(frozen=True)
class Case:
    """A Gaussian in (h, Λ), and a gradient in η."""

    h: Tensor
    Λ: Tensor
    ω: Tensor
    lr: float = 1e-5  # the whole step stays in the domain

    @staticmethod
    def of(d: int, dtype: torch.dtype, device: torch.device) -> Case:
        generator = torch.Generator(device).manual_seed(0)
        A, W = torch.randn(2, d, d, dtype=dtype, device=device, generator=generator) / d**0.5
        h, w = torch.randn(2, d, dtype=dtype, device=device, generator=generator)
        return Case(h, A @ A.T + torch.eye(d, dtype=dtype, device=device), torch.cat([w, (W + W.T).flatten()]))

    @property
    def eta(self) -> Tensor:
        return torch.cat([self.h, self.Λ.flatten()])

    def textbook(self) -> Tensor:
        """η − lr F⁻¹ω written out: δΛ = Λ(2W + wμᵀ + μwᵀ)Λ and δh = Λw + δΛμ."""
        d = len(self.h)
        w, W, μ = self.ω[:d], self.ω[d:].view(d, d), torch.linalg.solve(self.Λ, self.h)
        δΛ = self.Λ @ (2 * W + w.outer(μ) + μ.outer(w)) @ self.Λ
        return self.eta - self.lr * torch.cat([self.Λ @ w + δΛ @ μ, δΛ.flatten()])


def contestants(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The contestants."""
    family, eta, W = ng.families.FullGaussian(), case.eta, case.ω[len(case.h) :].view_as(case.Λ)
    xi = family.mean(eta)

    def unit() -> Tensor:
        torch.linalg.cholesky(case.Λ)
        return case.Λ @ W @ case.Λ

    return {
        UNIT: unit,
        STEP: lambda: natural_step(family, eta, case.ω, case.lr, NaturalChart()).point,
        MIRROR: lambda: mirror_step(family, xi, case.ω, case.lr, MeanChart()).point,
    }


def run(report: Report, d: int, dtype: torch.dtype) -> None:
    """Check the step, and time it."""
    case = Case.of(d, dtype, report.device)
    entries, section = contestants(case), f"full Gaussian, d = {d}, {str(dtype).removeprefix('torch.')}"
    report.agree(section, {STEP: entries[STEP], "textbook": case.textbook})
    result = report.race(section, entries, UNIT, report.rounds)
    report.targets.append(Target(f"natural step, {section}", result.ratio(STEP, UNIT).median, 1.5, True))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=15, help="rounds of the timing")
    parser.add_argument("--size", type=int, default=1000, help="d")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    name = "gaussian.json" if device.type == "cpu" else f"gaussian-{device.type}.json"
    settle()
    start, report = time.perf_counter(), Report(device, args.rounds)
    for dtype in (torch.float64, torch.float32):
        run(report, args.size, dtype)
    seconds = time.perf_counter() - start
    save(report, args.output or Path(__file__).parent / "results" / name, seconds)
    print(table(report))
    print(f"\n{seconds:.0f} s; torch {torch.__version__}, {machine(device)['device']}")


if __name__ == "__main__":
    main()
