"""An inverse problem: the unknown conductivity of the heat equation from noisy measurements, with its error bar.

    python -m experiments.pde.inverse --seeds 10

u_t = κ u_xx on [0, 1]², u(0, x) = sin πx, κ = 0.1, so that u = exp(−κπ²t) sin πx. The data are u at 100 random points
with noise of deviation 0.01. Network and κ are fitted together: residuals of the data in units of the noise, and those
of the equation with a weight that makes it hold. The error bar is the root of the entry of (JᵀJ)⁺ at κ. Over seeds, the
error in units of the bar must look like N(0, 1).
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
from pathlib import Path

import torch
from torch import Tensor, nn

import natgrad as ng

RESULTS = Path(__file__).resolve().parents[1] / "results" / "pde" / "inverse.jsonl"
KAPPA, NOISE, POINTS, WEIGHT = 0.1, 0.01, 100, 1e7


class Rod(nn.Module):
    """The temperature u(t, x) as a network, and the conductivity κ."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.u = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1)).double()
        self.kappa = nn.Parameter(torch.ones(1, dtype=torch.float64))


def exact(x: Tensor) -> Tensor:
    return (-KAPPA * math.pi**2 * x[:, :1]).exp() * (math.pi * x[:, 1:]).sin()


def equation(rod: Rod, x: Tensor) -> Tensor:
    u = ng.pde.derivatives(rod.u, x, space=slice(1, None))
    return u.d(0) - rod.kappa * u.laplacian


def fitted(seed: int, *, steps: int = 150) -> dict[str, float]:
    """κ, its error bar, and the error in units of the bar."""
    torch.manual_seed(seed)
    rod = Rod()
    inside, at = torch.rand(200, 2, dtype=torch.float64), torch.rand(POINTS, 2, dtype=torch.float64)
    data = exact(at) + NOISE * torch.randn(POINTS, 1, dtype=torch.float64)
    residuals = {
        "equation": ng.Residuals(equation, inside, weight=WEIGHT),
        "data": ng.Residuals(lambda rod, x: (rod.u(x) - data) / NOISE, at, reduction="sum"),
    }
    result = ng.LeastSquares(residuals, rod).solve(max_steps=steps)
    bar = float(result.covariance_of("kappa", variance=1.0).sqrt())
    κ = rod.kappa.item()
    return {"seed": seed, "kappa": κ, "bar": bar, "in units of the bar": (κ - KAPPA) / bar, "loss": float(result.cost)}


def summary(results: Path = RESULTS) -> dict[str, float]:
    """The root mean square over the seeds of the error of κ, over κ and in units of its bar."""
    lines = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    errors = {
        "over kappa": [line["kappa"] / KAPPA - 1 for line in lines],
        "in units of the bar": [line["in units of the bar"] for line in lines],
    }
    squares = {name: statistics.mean(e**2 for e in of_seeds) for name, of_seeds in errors.items()}
    return {"seeds": len(lines), **{name: math.sqrt(square) for name, square in squares.items()}}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pde.inverse")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    lines = []
    for seed in range(options.seeds):
        lines.append(fitted(seed))
        print(json.dumps(lines[-1]), flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(json.dumps(summary(options.results)))


if __name__ == "__main__":
    main()
