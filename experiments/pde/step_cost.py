"""What a Gauss–Newton step costs beside one that forms J with ``torch.func``: seconds and memory.

    python -m experiments.pde.step_cost --device cuda

Δu = 0 at n points by a network d-768-768-512-512-1 (1.3 million parameters, float64): v = Jᵀ(JJᵀ + λ)⁻¹r, once from
the factors of ``Kernel`` and once from per-example gradients by ``torch.func``, which are as many numbers as J has.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, vmap

import natgrad as ng
from benchmarks.harness import machine

_DAMPING = 1e-6


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

    rows, r = vmap(grad(residual, has_aux=True), in_dims=(None, 0), chunk_size=64)(params, x)
    scale = len(x) ** -0.5
    J = torch.cat([t.flatten(1) for t in rows.values()], 1) * scale
    kernel = J @ J.T
    kernel.diagonal().add_(_DAMPING)
    return J.T @ torch.cholesky_solve((scale * r)[:, None], torch.linalg.cholesky(kernel)).squeeze(1)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m experiments.pde.step_cost")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--points", type=int, default=4000)
    parser.add_argument("--dimension", type=int, default=10)
    parser.add_argument("--widths", type=int, nargs="+", default=[768, 768, 512, 512])
    options = parser.parse_args()
    device = torch.device(options.device)
    net = network(options.dimension, options.widths, options.device)
    x = torch.rand(options.points, options.dimension, dtype=torch.float64).to(device)
    print(json.dumps({**vars(options), "parameters": sum(p.numel() for p in net.parameters()), **machine(device)}))
    steps = {name: measured(name, make, net, x) for name, make in (("natgrad", ours), ("torch.func", by_func))}
    one, other = steps.values()
    if one is not None and other is not None:
        print(json.dumps({"relative difference": float((one - other).norm() / other.norm())}))


def measured(name: str, make: Callable[[nn.Module, Tensor], Tensor], net: nn.Module, x: Tensor) -> Tensor | None:
    """Print the seconds of a step and, on a GPU, the memory beside network and points; the step itself, if it fits."""
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
        print(json.dumps({"name": name, "failure": "out of memory"}), flush=True)
        return None
    used = torch.cuda.max_memory_allocated() - memory if on_gpu else None
    print(json.dumps({"name": name, "seconds": round(min(seconds), 4), "memory": used}), flush=True)
    return step


if __name__ == "__main__":
    main()
