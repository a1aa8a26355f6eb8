"""What a Gauss–Newton step costs beside one that forms J with ``torch.func``: seconds and memory.

    python -m experiments.pde.step_cost --device cuda

The lines that it prints are also written to ``experiments/results/pde/step_cost.jsonl``.
Δu = 0 at n points by a network d-768-768-512-512-1 (1.3 million parameters, float64): v = Jᵀ(JJᵀ + λ)⁻¹r, once from
the factors of ``Kernel`` and once from per-example gradients by ``torch.func``, 64 points at a time, which fill J.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import natgrad as ng
from benchmarks.harness import machine

RESULTS = Path(__file__).resolve().parents[1] / "results" / "pde" / "step_cost.jsonl"
_DAMPING = 1e-6
_CHUNK = 64


def network(d: int, widths: list[int], device: str) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [each for i, o in pairwise([d, *widths, 1]) for each in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double().to(device)


def ours(net: nn.Module, x: Tensor) -> Tensor:
    """The step of ``LeastSquares``."""
    before = torch.cat([p.detach().flatten() for p in net.parameters()])
    residuals = ng.Residuals(lambda net, x: ng.pde.laplacian(net, x), x)
    problem = ng.LeastSquares(residuals, net, structure=ng.Kernel(), step=ng.Fixed(), damping=_DAMPING, memory=2**37)
    problem.step()
    after = torch.cat([p.detach().flatten() for p in net.parameters()])
    torch.nn.utils.vector_to_parameters(before, net.parameters())
    return before - after


def by_func(net: nn.Module, x: Tensor) -> Tensor:
    """The same step with J [n p] from ``vmap(grad)`` of the trace of the Hessian."""
    params = {name: p.detach() for name, p in net.named_parameters()}

    def residual(θ: dict[str, Tensor], point: Tensor) -> tuple[Tensor, Tensor]:
        u: Callable[[Tensor], Tensor] = lambda at: functional_call(net, θ, (at,)).squeeze(-1)  # noqa: E731
        r = hessian(u)(point).diagonal().sum()
        return r, r

    per_point = vmap(grad(residual, has_aux=True), in_dims=(None, 0))
    J, r = x.new_empty(len(x), sum(p.numel() for p in params.values())), x.new_empty(len(x))
    for start in range(0, len(x), _CHUNK):
        rows, r[start : start + _CHUNK] = per_point(params, x[start : start + _CHUNK])
        torch.cat([t.flatten(1) for t in rows.values()], 1, out=J[start : start + _CHUNK])
    J, r = J.mul_(len(x) ** -0.5), r.mul_(len(x) ** -0.5)
    kernel = J @ J.T
    kernel.diagonal().add_(_DAMPING)
    return J.T @ torch.cholesky_solve(r[:, None], torch.linalg.cholesky(kernel)).squeeze(1)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pde.step_cost")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--dimension", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 768, 512, 512])
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args(arguments)
    device = torch.device(options.device)
    net = network(options.dimension, options.widths, options.device)
    x = torch.rand(options.points, options.dimension, dtype=torch.float64).to(device)
    sizes = {"points": options.points, "dimension": options.dimension, "widths": options.widths}
    lines: list[dict[str, Any]] = [{**sizes, "parameters": sum(p.numel() for p in net.parameters()), **machine(device)}]
    print(json.dumps(lines[0]), flush=True)
    steps = []
    for name, make in (("natgrad", ours), ("torch.func", by_func)):
        line, step = measured(name, make, net, x)
        print(json.dumps(line), flush=True)
        lines.append(line)
        steps.append(step)
    one, other = steps
    if one is not None and other is not None:
        lines.append(compared(lines[1], lines[2], float((one - other).norm() / other.norm())))
        print(json.dumps(lines[-1]), flush=True)
    options.results.parent.mkdir(parents=True, exist_ok=True)
    options.results.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def compared(ours: dict[str, Any], theirs: dict[str, Any], difference: float) -> dict[str, Any]:
    """How many times faster we are, how many times less memory we need, and how far the two steps are apart."""
    less = round(theirs["memory"] / ours["memory"], 2) if ours["memory"] else None
    faster = round(theirs["seconds"] / ours["seconds"], 2)
    return {"times faster": faster, "times less memory": less, "relative difference": difference}


def measured(
    name: str, make: Callable[[nn.Module, Tensor], Tensor], net: nn.Module, x: Tensor
) -> tuple[dict[str, Any], Tensor | None]:
    """The seconds of a step and, on a GPU, the memory beside network and points; the step itself, if it fits."""
    on_gpu, seconds, memory = x.is_cuda, [], 0
    try:
        make(net, x[:64])  # once, to load what is loaded once
        for _ in range(3):
            if on_gpu:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                memory = torch.cuda.memory_allocated()
            start = time.perf_counter()
            step = make(net, x).cpu()
            seconds.append(time.perf_counter() - start)
    except torch.OutOfMemoryError:
        return {"name": name, "failure": "out of memory"}, None
    used = torch.cuda.max_memory_allocated() - memory if on_gpu else None
    return {"name": name, "seconds": round(min(seconds), 4), "memory": used}, step


if __name__ == "__main__":
    main()
