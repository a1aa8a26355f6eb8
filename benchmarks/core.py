"""The core quantities beside hand-written code and other libraries: ratios, all measured in one run.

    make bench
    python benchmarks/core.py                 # on the CPU, one thread
    python benchmarks/core.py --device cuda
    python benchmarks/core.py --output my.json

Times include the pullback and the estimate, unless a row says otherwise. Contestants of exact quantities are checked
to compute the same numbers before they are timed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from torch import Tensor
from torch.func import functional_call, jacrev, jvp, vjp, vmap

import natgrad as ng
from benchmarks import networks, peers
from benchmarks.harness import machine, peak_memory, settle
from benchmarks.networks import Problem, gradient
from benchmarks.peers import Contestant
from benchmarks.report import Report as Report
from benchmarks.report import Target
from benchmarks.report import save as save
from benchmarks.report import table as table
from natgrad.geometry import unflatten
from natgrad.operators import DiagonalOperator

OURS = "natgrad"
EXACT = ng.Fisher(ng.Categorical(axis=-1))
ONE_SAMPLE = ng.Fisher(ng.Categorical(axis=-1), samples=1)


def product(problem: Problem, v: Tensor) -> Contestant:
    """G v by ``Implicit``, linearised beforehand."""
    G = ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT))
    return lambda: G.product(v)


def cold_product(problem: Problem, v: Tensor) -> Contestant:
    """One G v by ``Implicit``, including the linearisation."""
    return lambda: ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT)).product(v)


def solve(problem: Problem, ω: Tensor, steps: int) -> Contestant:
    """So many steps of conjugate gradients: as many products, and one more for the reported residual."""
    G = ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT))
    return lambda: ng.CG(tol=1e-30, max_steps=steps).init(G, damping=1.0).solve(ω)


def product_by_hand(problem: Problem, v: Tensor) -> Contestant:
    """Jᵀ h J v by jvp, the closed form of h = diag p − p pᵀ, and vjp."""
    params, tangent = problem.params, unflatten(v, problem.params)

    def f(θ: dict[str, Tensor]) -> Tensor:
        return functional_call(problem.model, θ, (problem.x,))

    def contestant() -> Tensor:
        y, u, *_ = jvp(f, (params,), (tangent,))
        p = y.softmax(-1)
        hu = p * (u - (p * u).sum(-1, keepdim=True)) / len(y)
        pull: Callable[..., Any] = vjp(f, params)[1]
        return torch.cat([g.reshape(-1) for g in pull(hu)[0].values()])

    return contestant


def jacobian(problem: Problem) -> Tensor:
    """J [n c p] by vmap(jacrev)."""

    def one(θ: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(problem.model, θ, (x.unsqueeze(0),)).squeeze(0)

    blocks: dict[str, Tensor] = vmap(jacrev(one), in_dims=(None, 0))(problem.params, problem.x)
    return torch.cat([block.flatten(2) for block in blocks.values()], dim=2)


def output_fisher(problem: Problem) -> Tensor:
    """h [n c c] = diag p − p pᵀ."""
    with torch.no_grad():
        p = problem.model(problem.x).softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def matrix(problem: Problem) -> Contestant:
    """G by ``Dense``."""
    return lambda: ng.Dense().estimate(ng.pullback(problem.model, problem.x, EXACT)).matrix


def matrix_by_hand(problem: Problem) -> Contestant:
    """G = (1/N) Σ Jᵀ h J: the Jacobian of every example, then one einsum."""

    def contestant() -> Tensor:
        J = jacobian(problem)
        return torch.einsum("ncp,ncd,ndq->pq", J, output_fisher(problem), J) / len(J)

    return contestant


def diagonal(problem: Problem, metric: ng.Fisher, generator: torch.Generator | None = None) -> Contestant:
    """diag G by ``Diagonal``."""
    return lambda: ng.Diagonal().estimate(ng.pullback(problem.model, problem.x, metric, generator=generator)).values


def step(problem: Problem, ω: Tensor, damping: float) -> Contestant:
    """(G + λ)⁻¹ω by ``Kernel``."""

    def contestant() -> Tensor:
        G = ng.Kernel().estimate(ng.pullback(problem.model, problem.x, EXACT))
        return G.inverse(damping).solve(ω)

    return contestant


def step_by_hand(problem: Problem, ω: Tensor, damping: float) -> Contestant:
    """(G + λ)⁻¹ω by Woodbury's identity from the Jacobian: R = √h J, v = (ω − Rᵀ(RRᵀ + λN)⁻¹Rω)/λ."""

    def contestant() -> Tensor:
        with torch.no_grad():
            p = problem.model(problem.x).softmax(-1)
            root = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)  # [n c k]
        R = torch.einsum("nck,ncp->knp", root, jacobian(problem)).flatten(0, 1)
        gram = R @ R.T + damping * len(p) * torch.eye(len(R), dtype=R.dtype, device=R.device)
        inner = torch.cholesky_solve((R @ ω).unsqueeze(-1), torch.linalg.cholesky(gram))
        return (ω - R.T @ inner.squeeze(-1)) / damping

    return contestant


def products(report: Report, problem: Problem, steps: int = 10) -> None:
    """G v by Implicit, alone and inside conjugate gradients."""
    section = f"Fisher-vector product, {problem.name}"
    v = torch.randn(problem.size, device=problem.x.device, dtype=problem.x.dtype)
    others = peers.products(problem.model, problem.x, v)
    exact: dict[str, Contestant] = {
        OURS: product(problem, v),
        f"{OURS}, from nothing": cold_product(problem, v),
        "jvp, h, vjp": product_by_hand(problem, v),
        **others,
    }
    report.agree(section, exact)
    inside = f"{OURS}, {steps} steps of CG"
    entries = {"gradient": gradient(problem), **exact, inside: solve(problem, v, steps)}
    result = report.race(section, entries, "gradient", report.rounds)
    by_hand, unit = result.ratio(OURS, "jvp, h, vjp").median, result.ratio(OURS, "gradient").median
    a_product = result.ratio(inside, "gradient").median / (steps + 1)
    report.targets += [
        Target(f"Implicit product over jvp, h, vjp ({problem.name})", by_hand, 1.1, True),
        Target(f"Implicit product over a gradient ({problem.name})", unit, 1.5, True),
        Target(
            f"a product inside CG over a gradient ({problem.name})",
            a_product,
            1.5,
            True,
            f"time of {steps} steps, with all their vector operations, over the {steps + 1} products",
        ),
    ]


def matrices(report: Report, problem: Problem) -> None:
    """The exact dense Fisher matrix."""
    section = f"exact dense Fisher, {problem.size:,} parameters, {problem.name}"
    others = peers.matrices(problem.model, problem.x)
    entries = {OURS: matrix(problem), "vmap(jacrev), einsum": matrix_by_hand(problem), **others}
    report.agree(section, entries)
    result = report.race(section, entries, OURS, max(2, report.rounds // 3))
    by_hand = result.ratio("vmap(jacrev), einsum", OURS).median
    report.targets.append(Target("Dense: vmap(jacrev) and einsum over natgrad", by_hand, 4.0, False))
    if best := report.fastest_peer(result, OURS, others):
        report.targets.append(Target(f"Dense: the fastest peer ({best[0]}) over natgrad", best[1], 1.0, False))


def diagonals(report: Report, problem: Problem) -> None:
    """The diagonal of the Fisher metric, from one sample per example and exactly."""
    for sampled, bound, best in ((True, 1.15, 1.07), (False, 4.0, 5.1)):
        kind = "one sample" if sampled else "exact"
        section = f"diagonal Fisher, {kind}, {problem.name}"
        others = peers.diagonals(problem.model, problem.x, sampled)
        ours = diagonal(problem, ONE_SAMPLE if sampled else EXACT)
        if not sampled:
            report.agree(section, {OURS: ours, **others})
        entries = {"gradient": gradient(problem), OURS: ours, **others}
        result = report.race(section, entries, "gradient", report.rounds)
        ratio = result.ratio(OURS, "gradient").median
        note = f"the best peer on record: {best}"
        report.targets.append(Target(f"Diagonal, {kind}, over a gradient ({problem.name})", ratio, bound, True, note))


def diagonal_memory(report: Report, widths: tuple[int, ...], examples: tuple[int, ...], memory: int) -> None:
    """Peak memory of the exact diagonal under a memory bound, for growing batches."""
    peaks = {n: peak_memory(prepare_diagonal, widths, n, memory, report.device, device=report.device) for n in examples}
    growth = max(peaks.values()) / min(peaks.values())
    listed = ", ".join(f"{n:,} examples: {peak / 2**20:.0f} MB" for n, peak in peaks.items())
    report.targets.append(
        Target(
            f"Diagonal: largest over smallest peak memory, {examples[0]:,} to {examples[-1]:,} examples",
            growth,
            1.25,
            True,
            f"{listed}; memory={memory / 2**20:.0f} MB, inputs not counted",
        )
    )


def prepare_diagonal(widths: tuple[int, ...], n: int, memory: int, device: torch.device) -> Callable[[], Any]:
    """The exact diagonal of a batch of n under a memory bound."""
    problem = networks.mlp(widths, n, device)

    def run(x: Tensor) -> DiagonalOperator:
        return ng.Diagonal().estimate(ng.pullback(problem.model, x, EXACT, memory=memory))

    run(problem.x[:64])
    return lambda: run(problem.x)


def kernels(report: Report, widths: tuple[int, ...], n: int, few: int, damping: float = 0.1) -> None:
    """The damped step by Kernel beside forming the Jacobian, which is timed for a few examples only."""
    problem = networks.mlp(widths, n, report.device)
    ω = torch.randn(problem.size, device=report.device)
    small, section = problem.first(few), f"damped step, {problem.size:,} parameters, {problem.name}"
    both = {OURS: step(small, ω, damping), "Jacobian, Woodbury": step_by_hand(small, ω, damping)}
    report.agree(f"{section}: {few} examples", both)
    report.race(f"{section}: {few} examples, in full", both, OURS, 5)
    entries = {OURS: step(problem, ω, damping), f"Jacobian of {few} examples": lambda: jacobian(small)}
    result = report.race(section, entries, OURS, max(3, report.rounds // 3))
    faster = result.ratio(f"Jacobian of {few} examples", OURS).median * n / few
    note = f"forming the Jacobian of {few} examples, times {n / few:g}: its work is linear in the examples"
    report.targets.append(Target("Kernel: forming the Jacobian over the whole damped step", faster, 3.0, False, note))
    extra = peak_memory(prepare_step, widths, n, damping, report.device, device=report.device)
    full = n * widths[-1] * problem.size * 4 / 1e9
    note = f"the Jacobian would take {full:.1f} GB"
    report.targets.append(Target("Kernel: peak extra memory, GB", extra / 1e9, 1.0, True, note))


def prepare_step(widths: tuple[int, ...], n: int, damping: float, device: torch.device) -> Callable[[], Any]:
    """The damped step of n examples."""
    problem = networks.mlp(widths, n, device)
    ω = torch.randn(problem.size, device=device)
    step(problem.first(4), ω, damping)()
    return step(problem, ω, damping)


def main() -> None:
    """Run everything, print the table, save the numbers."""
    parser = argparse.ArgumentParser(description="Ratios of the core quantities, in one run.")
    parser.add_argument("--device", default="cpu", help="cpu (one thread) or cuda")
    parser.add_argument("--rounds", type=int, default=9, help="rounds of the timing")
    parser.add_argument("--output", type=Path, default=None, help="where the JSON goes")
    args = parser.parse_args()
    settle()
    start, device = time.perf_counter(), torch.device(args.device)
    report = Report(device, args.rounds)
    products(report, networks.mlp((784, 1000, 1000, 10), 512, device))
    products(report, networks.resnet(16, 64, device))
    matrices(report, networks.mlp((64, 26, 10, 10), 1000, device))
    diagonals(report, networks.mlp((784, 1000, 1000, 10), 512, device))
    diagonal_memory(report, (784, 256, 256, 10), (2048, 8192, 32768), 2**24)
    kernels(report, (784, 800, 440, 10), 200, 20)
    seconds = time.perf_counter() - start
    name = "core.json" if device.type == "cpu" else f"core-{device.type}.json"
    save(report, args.output or Path(__file__).parent / "results" / name, seconds)
    print(table(report))
    print(f"\n{seconds:.0f} s; torch {torch.__version__}, {machine(device)['device']}")


if __name__ == "__main__":
    main()
