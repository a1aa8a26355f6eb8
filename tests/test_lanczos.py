"""Spectra by the Lanczos process, against dense eigenvalues."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.operators import DenseOperator, Layout, Operator
from tests import oracle
from tests.pulled import close, normal


def symmetric(values: Tensor, seed: int = 0) -> DenseOperator:
    """An operator with these eigenvalues."""
    Q = torch.linalg.qr(normal(len(values), len(values), seed=seed)).Q
    return DenseOperator(Layout.of({"w": values}), (Q * values) @ Q.T)


def network(*widths: int) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [m for a, b in itertools.pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).double()


def test_a_process_to_its_end_has_all_eigenvalues() -> None:
    """Thirty-five that are not zero, and many that are: the end comes before the last step."""
    distinct = torch.cat([torch.logspace(-6, 2, 30), -torch.logspace(-3, 0, 5), torch.zeros(1)]).double()
    density = ng.spectral_density(symmetric(torch.cat([distinct, torch.zeros(70).double()])), steps=100)
    assert density.exhausted
    found = density.values[0][density.counts[0] > 0]
    distances = (found[:, None] - distinct).abs()
    assert float(distances.min(0).values.max()) < 1e-9
    assert float(distances.min(1).values.max()) < 1e-9  # and no others
    assert density.largest == pytest.approx(100.0)
    assert density.smallest == pytest.approx(-1.0)


@pytest.mark.parametrize("f", [lambda λ: λ, torch.square, lambda λ: (1 + λ).log(), lambda λ: (λ > 1.5).double()])
@pytest.mark.parametrize("steps", [6, 100])
def test_with_as_many_steps_as_dimensions_nothing_is_random(f: Callable[[Tensor], Tensor], steps: int) -> None:
    """Also for multiple eigenvalues, of which a probe sees only how long it is in their space."""
    values = torch.tensor([3.0, 2.0, 2.0, 2.0, 0.5, 0.0], dtype=torch.float64)
    density = ng.spectral_density(symmetric(values), steps=steps)
    assert density.exhausted
    close(density.values, values.flip(0)[None], 1e-12)
    assert torch.equal(density.counts, torch.ones(1, 6, dtype=torch.float64))
    trace, error = density.trace_of(f)
    assert trace == pytest.approx(float(f(values).sum()), rel=1e-12)
    assert error == 0


def test_the_exact_spectrum_of_a_root_has_the_zeros_of_the_metric() -> None:
    """Twelve rows for forty-three parameters, two of them equal."""
    model, x = network(4, 6, 2), normal(6, 4)
    x[5] = x[0]
    exact = torch.linalg.eigvalsh(oracle.dense(oracle.module_jacobian(model, x), oracle.euclidean(model(x))))
    density = ng.spectral_density(ng.pullback(model, x, ng.Euclidean()))
    assert (density.size, density.probed, density.zeros) == (len(exact), 12, len(exact) - 12)
    close(density.values[0], exact[-12:], 1e-12)
    for f in (lambda λ: λ, lambda λ: (1 + λ).log(), torch.exp):
        trace, error = density.trace_of(f)
        assert trace == pytest.approx(float(f(exact).sum()), rel=1e-12)
        assert error == 0
    assert density.bounds_above(density.rounding) == (10, 10)


@pytest.mark.parametrize("f", [lambda λ: λ, torch.square, lambda λ: (1 + λ).log(), lambda λ: λ / (λ + 0.1)])
def test_traces_are_within_their_errors(f: Callable[[Tensor], Tensor]) -> None:
    values = torch.logspace(-8, 1, 80, dtype=torch.float64)
    exact = float(f(values).sum())
    errors = []
    for probes in (4, 48):
        density = ng.spectral_density(
            symmetric(values), probes=probes, steps=40, generator=torch.Generator().manual_seed(0)
        )
        found, error = density.trace_of(f)
        assert abs(found - exact) < 4 * error
        errors.append(error)
    assert errors[1] < 0.8 * errors[0]


@pytest.mark.parametrize("f", [lambda λ: λ, torch.square, lambda λ: (1 + λ).log(), lambda λ: λ / (λ + 0.1)])
def test_large_eigenvalues_are_counted_once_and_not_by_chance(f: Callable[[Tensor], Tensor]) -> None:
    """Of six that hold most of the trace, as in networks, a probe of signs sees anything between none and several."""
    large = torch.tensor([-900.0, 40.0, 100.0, 300.0, 350.0, 2000.0], dtype=torch.float64)
    values = torch.cat([large, torch.linspace(0.0, 1.0, 300, dtype=torch.float64)])

    def g(λ: Tensor) -> Tensor:
        return f(λ.abs())

    exact = float(g(values).sum())
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        density = ng.spectral_density(symmetric(values, seed), steps=60, generator=generator)
        known = density.values[:, : density.exact]
        assert torch.equal(density.counts[:, : density.exact], torch.ones_like(known))
        assert float((known[:1].T - large).abs().amin(0).max()) < 1e-9
        close(density.counts.sum(1), torch.full((4,), 306.0, dtype=torch.float64))
        found, error = density.trace_of(g)
        rest = values[6:]
        assert abs(found - exact) < 4 * error + 1e-9 * exact
        assert error < 0.2 * float(g(rest).sum())  # of what the probes see, whatever the large ones are
    assert abs(found - exact) < 0.1 * exact


def test_a_metric_of_low_rank_has_an_exact_trace() -> None:
    """The process finds all its eigenvectors: nothing is left to chance, in more dimensions than steps."""
    values = torch.cat([torch.logspace(-3, 2, 12), torch.zeros(90)]).double()
    density = ng.spectral_density(symmetric(values), steps=30, generator=torch.Generator().manual_seed(1))
    trace, error = density.trace_of(lambda λ: λ)
    assert trace == pytest.approx(float(values.sum()), rel=1e-10)
    assert error < 1e-10 * trace
    assert density.count_above(density.rounding)[0] == pytest.approx(12)


def test_eigenvectors_take_the_memory_that_is_left() -> None:
    G = symmetric(torch.cat([torch.logspace(0, 4, 8), torch.zeros(92)]).double())
    vectors = 100 * 8  # bytes of one
    for left in (0, 3):
        density = ng.spectral_density(G, steps=30, memory=(30 + left) * vectors)
        assert density.exact == left
        close(density.values[0, :left].sort().values, torch.logspace(0, 4, 8).double()[8 - left :], 1e-6)


def test_probes_that_end_early_do_not_add_values_at_zero() -> None:
    """Each eigenvector consists of signs, so that a probe may be one."""
    four = torch.tensor([[1, 1, 1, 1], [1, 1, -1, -1], [1, -1, 1, -1], [1, -1, -1, 1]]).double()
    signs = torch.kron(torch.tensor([[1, 1], [1, -1]]).double(), four)
    roots = torch.tensor([1.0, 2.0, 3.0, 4.0]).double().repeat(2)
    pb = ng.pullback(nn.Linear(8, 1, bias=False).double(), roots[:, None] * signs, ng.Euclidean())  # G has the roots²
    density = ng.spectral_density(pb, probes=256, steps=5, generator=torch.Generator().manual_seed(0))
    assert density.exhausted  # four different eigenvalues
    assert (density.counts == 0).any()
    for f in (torch.log, torch.reciprocal):
        found, error = density.trace_of(f)
        assert abs(found - float(f(roots.square()).sum())) <= 4 * error


def test_multiple_eigenvalues_are_counted() -> None:
    """Three values for forty directions: three steps see them all, with their numbers."""
    values = torch.tensor([3.0] * 10 + [1.0] * 20 + [0.0] * 10, dtype=torch.float64)
    density = ng.spectral_density(symmetric(values), probes=100, steps=10, generator=torch.Generator().manual_seed(0))
    assert density.exhausted
    edges = torch.tensor([-1.0, 0.5, 2.0, 4.0], dtype=torch.float64)
    found = density.histogram(edges)
    assert float(found.sum()) == pytest.approx(40.0)
    close(found, torch.tensor([10.0, 20.0, 10.0], dtype=torch.float64), 0.1)
    rank, error = density.count_above(density.rounding)
    assert abs(rank - 30) < 4 * error < 3


@pytest.mark.parametrize(("n", "widths"), [(5, (4, 6, 2)), (60, (2, 3, 1))])
def test_the_spectrum_of_a_pullback_on_the_smaller_side(n: int, widths: tuple[int, ...]) -> None:
    """N·K rows, or P parameters, whichever are fewer; the others are zero without a product."""
    model, x = network(*widths), normal(n, widths[0])
    J = oracle.module_jacobian(model, x)
    exact = torch.linalg.eigvalsh(oracle.dense(J, oracle.euclidean(model(x))))
    pb, generator = ng.pullback(model, x, ng.Euclidean()), torch.Generator().manual_seed(0)
    density = ng.spectral_density(pb, probes=16, generator=generator)
    rows, size = n * widths[-1], len(exact)
    assert density.values.shape[1] <= min(rows, size)
    assert density.zeros == max(0, size - rows)
    assert density.largest == pytest.approx(float(exact[-1]))
    trace, error = density.trace_of(lambda λ: λ)
    assert abs(trace - float(exact.sum())) <= 4 * error + 1e-9


def test_the_spectrum_of_a_hessian_has_its_negative_part() -> None:
    model, x, t = network(3, 5, 3), normal(20, 3), torch.randint(3, (20,))
    H = ng.hessian(model, x, lambda y: F.cross_entropy(y, t))
    exact = torch.linalg.eigvalsh(H.dense())
    density = ng.spectral_density(H, generator=torch.Generator().manual_seed(0))
    assert density.smallest == pytest.approx(float(exact[0]), rel=1e-6)
    assert density.largest == pytest.approx(float(exact[-1]), rel=1e-6)
    text = str(density)
    assert "\n  -1e-0" in text
    assert text.splitlines()[0].count("█") > 10
    assert sum(float(line.split()[-1]) for line in text.splitlines()) == pytest.approx(38, abs=1)


@pytest.mark.parametrize("seed", range(4))
def test_the_trace_of_a_hessian_at_initialisation_is_told_with_its_error(seed: int) -> None:
    """Positive and negative eigenvalues nearly cancel: four probes leave an error of more than a per cent."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(5, 12), nn.Tanh(), nn.Linear(12, 12), nn.Tanh(), nn.Linear(12, 4)).double()
    x, t = normal(30, 5), torch.arange(30) % 4
    H = ng.hessian(model, x, lambda y: F.cross_entropy(y, t))
    exact = float(torch.linalg.eigvalsh(H.dense()).sum())
    density = ng.spectral_density(H, steps=60, generator=torch.Generator().manual_seed(seed))
    trace, error = density.trace_of(lambda λ: λ)
    assert abs(trace - exact) <= 5 * error
    assert error > 0.01 * abs(exact)
    assert repr(density).endswith(f"trace={trace:.4g} ± {error:.2g})")


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Diagonal(), ng.Kernel(), ng.LowRank(3)], ids=repr)
def test_every_structure_has_a_spectrum(structure: ng.structures.Structure) -> None:
    model, x = network(3, 4, 2), normal(8, 3)
    G: Operator = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
    density = ng.spectral_density(G)
    assert density.largest == pytest.approx(float(torch.linalg.eigvalsh(G.dense())[-1]), rel=1e-6)


def test_what_is_too_much_is_refused() -> None:
    G = symmetric(torch.ones(50, dtype=torch.float64))
    with pytest.raises(ng.errors.MemoryBoundError, match=r"50 vectors of 50 numbers need 20,000 bytes.*lower steps="):
        ng.spectral_density(G, memory=10_000)
    with pytest.raises(ng.errors.MemoryBoundError, match="memory=8"):
        ng.spectral_density(ng.pullback(nn.Linear(2, 1), torch.ones(3, 2), ng.Euclidean()), memory=8)
    with pytest.raises(ValueError, match="needs probes ≥ 2, for an error"):
        ng.spectral_density(G, probes=1)
    with pytest.raises(ng.errors.NonFiniteError, match="the Lanczos process met NaN"):
        ng.spectral_density(DenseOperator(G.layout, G.matrix * torch.nan))
