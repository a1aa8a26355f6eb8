"""The Laplacian of a network in d dimensions, and the gradient of ½ mean (Δu)² by its parameters: time and memory.

    python benchmarks/pde.py
    python benchmarks/pde.py --device cuda

The network is d-256-256-128-128-1 in float64, d = 10. The contestants are ``ng.pde.laplacian``, the loop of most code
for PDEs (a backward pass through the gradient for every coordinate) and the trace of vmap(hessian) by ``torch.func``.
The unit is the Jacobian by vmap(jacfwd). All are checked to compute the same numbers before they are timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor, nn
from torch.func import hessian, jacfwd, vmap

import natgrad as ng
from benchmarks.harness import machine, peak_memory, settle
from benchmarks.report import Report, Target, save, table

OURS, NESTED, HESSIAN, UNIT = "natgrad", "nested autograd", "vmap(hessian)", "Jacobian, vmap(jacfwd)"
WIDTHS = (256, 256, 128, 128, 1)


def network(d: int, device: torch.device) -> nn.Sequential:
    """d-256-256-128-128-1, tanh, float64."""
    torch.manual_seed(0)
    sizes = (d, *WIDTHS)
    layers = [each for i, o in pairwise(sizes) for each in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double().to(device)


def ours(net: nn.Module, x: Tensor) -> Tensor:
    """Δu [n] by one forward pass."""
    return ng.pde.laplacian(net, x).squeeze(-1)


def nested(net: nn.Module, x: Tensor) -> Tensor:
    """Δu [n]: for every coordinate a backward pass through the backward pass."""
    x = x.detach().requires_grad_()
    (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
    seconds = [torch.autograd.grad(slope[:, i].sum(), x, create_graph=True)[0][:, i] for i in range(x.shape[1])]
    return torch.stack(seconds).sum(0)


def by_hessian(net: nn.Module, x: Tensor) -> Tensor:
    """Δu [n], from the Hessian of every point by forward over reverse mode."""
    curvature: Tensor = vmap(hessian(lambda point: net(point).squeeze(-1)))(x)
    return curvature.diagonal(dim1=-2, dim2=-1).sum(-1)


LAPLACIANS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {OURS: ours, NESTED: nested, HESSIAN: by_hessian}


def contestant(name: str, net: nn.Module, x: Tensor, *, by_parameters: bool) -> Callable[[], Tensor]:
    """Δu [n], or ∂/∂θ ½ mean (Δu)² as one vector."""
    if not by_parameters:
        return lambda: LAPLACIANS[name](net, x).detach()

    def gradient() -> Tensor:
        loss = 0.5 * LAPLACIANS[name](net, x).square().mean()
        grads = torch.autograd.grad(loss, list(net.parameters()), allow_unused=True, materialize_grads=True)
        return torch.cat([g.flatten() for g in grads])

    return gradient


def prepare(name: str, d: int, n: int, by_parameters: bool, device: torch.device) -> Callable[[], Any]:
    """A contestant in a process of its own."""
    net, x = network(d, device), torch.rand(n, d, dtype=torch.float64, device=device)
    contestant(name, net, x[:8], by_parameters=by_parameters)()
    return contestant(name, net, x, by_parameters=by_parameters)


def run(report: Report, d: int, n: int, points: int) -> None:
    """Check and time all contestants at n points, and measure their memory at ``points``."""
    net, x = network(d, report.device), torch.rand(n, d, dtype=torch.float64, device=report.device)

    def jacobian() -> Tensor:
        J: Tensor = vmap(jacfwd(net))(x)
        return J.detach()

    for by_parameters, what in ((False, "Laplacian"), (True, "gradient of ½ mean (Δu)²")):
        section = f"{what}: d = {d}, n = {n}"
        entries = {name: contestant(name, net, x, by_parameters=by_parameters) for name in LAPLACIANS}
        report.agree(section, entries, tolerance=1e-10)
        result = report.race(section, {UNIT: jacobian, **entries}, UNIT, report.rounds)
        faster = result.ratio(NESTED, OURS).median
        note = (
            f"matrix products alone: {(2 * d + 2) / (d + 2):.2f}, since nested autograd has 2d + 2 where we have d + 2"
        )
        report.targets.append(Target(f"{section}: time of nested autograd over natgrad's", faster, 3.0, False, note))
        arguments = d, points, by_parameters, report.device
        peaks = {name: peak_memory(prepare, name, *arguments, device=report.device) for name in LAPLACIANS}
        note = ", ".join(f"{name} {peak / 2**20:.0f} MB" for name, peak in peaks.items())
        less, claim = peaks[NESTED] / peaks[OURS], f"{what}: d = {d}, n = {points}: memory"
        report.targets.append(Target(f"{claim} of nested autograd over natgrad's", less, 3.0, False, note))
        if not by_parameters:
            ratio = result.ratio(OURS, UNIT).median
            report.targets.append(Target(f"{section}: time over that of one Jacobian", ratio, 2.0, True))


def main(arguments: list[str] | None = None) -> None:
    """Run everything, print the table, save the numbers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=7, help="rounds of the timing")
    parser.add_argument("--dimension", type=int, default=10, help="d")
    parser.add_argument("--points", type=int, default=None, help="n; 200 on a CPU and 3000 on a GPU")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args(arguments)
    device = torch.device(args.device)
    on_cpu = device.type == "cpu"
    settle()
    start, report = time.perf_counter(), Report(device, args.rounds)
    run(report, args.dimension, args.points or (200 if on_cpu else 3000), args.points or (1000 if on_cpu else 3000))
    seconds = time.perf_counter() - start
    name = "pde.json" if on_cpu else f"pde-{device.type}.json"
    save(report, args.output or Path(__file__).parent / "results" / name, seconds)
    print(table(report))
    print(f"\n{seconds:.0f} s; torch {torch.__version__}, {machine(device)['device']}")


if __name__ == "__main__":
    main()
