"""Powers (F + shift)⁻ᵖ of many factors: in batches, in place, from a graph, and with what failed told."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from natgrad.accelerate import inverses, replay, roots
from natgrad.accelerate.inverses import BatchedInverse, Inversion, invert
from natgrad.accelerate.replay import Scalar
from natgrad.errors import FactorisationError, SingularMetricError
from tests.accelerate.eager_graphs import EagerGraphs

SHAPES = [(1, 6), (2, 4), (3, 6), (1, 1)]


def factors_of(dtype: torch.dtype) -> list[Tensor]:
    """Matrices of half of the rank, and a diagonal."""
    generator = torch.Generator().manual_seed(0)
    halves = [torch.randn(c, d, -(-d // 2), dtype=torch.float64, generator=generator) for c, d in SHAPES]
    diagonal = torch.rand(2, 5, dtype=torch.float64, generator=generator)
    return [f.to(dtype) for f in (*(a @ a.mT for a in halves), diagonal)]


def jobs_of(factors: Sequence[Tensor], shift: Scalar, outs: Sequence[Tensor]) -> list[Inversion]:
    each = zip(factors, outs, strict=True)
    return [Inversion(f, shift * torch.ones(len(f), dtype=f.dtype), x) for f, x in each]


def expected(factor: Tensor, shift: float, power: float) -> Tensor:
    if factor.ndim == 2:
        return (factor.double() + shift).pow(-power)
    values, vectors = torch.linalg.eigh(factor.double() + shift * torch.eye(factor.shape[-1], dtype=torch.float64))
    return (vectors * values.pow(-power).unsqueeze(-2)) @ vectors.mT


def check(factors: Sequence[Tensor], shift: float, power: float, found: Sequence[Tensor], tol: float) -> None:
    for factor, x in zip(factors, found, strict=True):
        torch.testing.assert_close(x.double(), expected(factor, shift, power), rtol=tol, atol=tol)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that is taken for a GPU."""
    for module in (inverses, roots):
        monkeypatch.setattr(module, "is_asynchronous", lambda device: True)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("power", [0.25, 0.3, 0.5, 0.75, 1.0])
def test_factors_of_several_sizes_have_their_powers(power: float, dtype: torch.dtype) -> None:
    factors = factors_of(dtype)
    outs = [torch.empty_like(f) for f in factors]
    assert invert(jobs_of(factors, 0.1, outs), power=power) is None
    tol = 1e-9 if dtype == torch.float64 else 1e-3
    check(factors, 0.1, power, outs, tol)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("epsilon", [None, 1e-3])
@pytest.mark.parametrize("power", [0.25, 0.3, 0.5, 0.7, 0.75])
def test_a_gpu_makes_them_by_products_of_padded_matrices(
    power: float, epsilon: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.linalg, "eigh", None)
    monkeypatch.setattr(torch.linalg, "cholesky_ex", None)
    factors = factors_of(torch.float32)
    outs = [torch.empty_like(f) for f in factors]
    failures = invert(jobs_of(factors, 0.1, outs), power=power, epsilon=epsilon)
    assert failures is not None
    assert float(failures) == 0
    monkeypatch.undo()
    check(factors, 0.1, power, outs, 3 * roots.NOISE)


@pytest.mark.parametrize("power", [0.5, 1.0])
@pytest.mark.parametrize("on_gpu", [False, True])
@pytest.mark.parametrize("warm", [False, True])
def test_a_factor_of_zeros_without_a_shift_has_the_inverse_zero(
    power: float, on_gpu: bool, warm: bool, request: pytest.FixtureRequest
) -> None:
    """It has no scale that its damping could be relative to."""
    if on_gpu:
        request.getfixturevalue("gpu")
    factors = [torch.zeros(1, 3, 3), torch.zeros(2, 4), 4 * torch.eye(3)[None]]
    shifts = [torch.zeros(1), torch.zeros(2), torch.zeros(1)]
    shifts[2] += 1e-30
    outs = [torch.zeros_like(f) for f in factors]
    outs[2] += 0.25 * torch.eye(3)
    jobs = [Inversion(f, λ, x) for f, λ, x in zip(factors, shifts, outs, strict=True)]
    failures = invert(jobs, power=power, epsilon=0.1, warm=warm)
    assert failures is None or float(failures) == 0
    for x in outs[:2]:
        assert not x.any()
    torch.testing.assert_close(outs[2][0], 4.0**-power * torch.eye(3))


@pytest.mark.parametrize("warm", [False, True])
def test_a_power_that_fails_keeps_the_last_one_or_raises(warm: bool) -> None:
    factor = torch.stack([4 * torch.eye(3), -torch.eye(3)])
    job = Inversion(factor, torch.zeros(2), torch.full((2, 3, 3), 7.0), "S")
    kind = FactorisationError if warm else SingularMetricError
    with pytest.raises(kind, match="S is not positive after damping"):
        invert([job], power=0.5, warm=warm)
    if warm:
        torch.testing.assert_close(job.out[0], 0.5 * torch.eye(3))
        assert torch.equal(job.out[1], torch.full((3, 3), 7.0))


@pytest.mark.usefixtures("gpu")
def test_a_gpu_tells_later_of_a_power_that_failed_and_mends_it_in_double() -> None:
    """c vvᵀ + ½ is exact in single precision, and its spread of 10⁷ too much for products."""
    v = (1 + torch.arange(4) % 3).float()
    bad = 700001 * torch.outer(v, v) + 0.5 * torch.eye(4)
    factors = [torch.stack([torch.eye(4), bad])]
    outs = [torch.ones(2, 4, 4)]
    batch = BatchedInverse()

    def jobs(factors: Sequence[Tensor], damping: Scalar) -> list[Inversion]:
        return [Inversion(f, damping * torch.ones(len(f)), x, "S") for f, x in zip(factors, outs, strict=True)]

    batch.refresh_(jobs, factors, 1e-9, "key", power=0.5)
    assert batch.failed()
    torch.testing.assert_close(outs[0][0], torch.eye(4))
    assert torch.equal(outs[0][1], torch.ones(4, 4))
    batch.compute_(jobs(factors, 1e-9), power=0.5, warm=True)
    torch.testing.assert_close(outs[0][1:].double(), expected(bad[None], 1e-9, 0.5), rtol=1e-5, atol=1e-5)
    assert not batch.failed()


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize("relative", [False, True])
def test_powers_from_a_graph_follow_the_factors_and_the_damping(
    relative: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = EagerGraphs()
    monkeypatch.setattr(replay, "CudaGraphs", lambda: graphs)
    factors = factors_of(torch.float32)
    outs = [torch.empty_like(f) for f in factors]
    batch = BatchedInverse()

    def mean(factor: Tensor) -> Tensor:
        return (factor.diagonal(dim1=1, dim2=2) if factor.ndim == 3 else factor).mean()

    def jobs(tensors: Sequence[Tensor], damping: Scalar) -> list[Inversion]:
        each = zip(tensors, outs, strict=True)
        shifts = [damping * mean(f) if relative else damping * torch.ones(()) for f in tensors]
        return [Inversion(f, λ.expand(len(f)), x) for (f, x), λ in zip(each, shifts, strict=True)]

    for turn in range(4):
        torch._foreach_mul_(factors, 1.3)
        damping = 0.13 + 0.01 * turn
        batch.refresh_(jobs, factors, damping, "key", power=0.75, relative=relative)
        for f, x in zip(factors, outs, strict=True):
            λ = damping * float(mean(f)) if relative else damping
            check([f], λ, 0.75, [x], 1e-3)
    assert graphs.log == ["capture", *3 * ["replay"]]
    assert not batch.failed()


def test_roots_are_counted_by_what_they_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU takes more matrices at once for products than for Cholesky; a processor has nothing to gain."""
    held, factors = roots.STACKS, [torch.empty(1, 384, 384, device="meta") for _ in range(24)]
    monkeypatch.setattr(inverses, "is_asynchronous", lambda device: True)
    assert len(inverses.batch_by_size(factors, stacks=held, roots=True)) < len(
        inverses.batch_by_size(factors, stacks=held)
    )
