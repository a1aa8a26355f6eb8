"""The volume of a basin to second order, against dense determinants."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import natgrad as ng
from natgrad.functionspace import basin_volume
from tests import oracle
from tests.pulled import normal


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2)).double()


@pytest.mark.parametrize(("n", "epsilon", "scale"), [(10, 0.1, 1.0), (10, 1e-4, 0.3), (60, 0.01, 2.0), (400, 0.1, 1.0)])
def test_with_few_rows_the_numbers_are_those_of_the_dense_matrix(n: int, epsilon: float, scale: float) -> None:
    """From RRᵀ of 2n rows, fewer and more than the 78 parameters; no probes are drawn."""
    model, x = network(), normal(n, 3)
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    values = torch.linalg.eigvalsh(G)
    found = basin_volume(model, x, epsilon, ng.Fisher(ng.Categorical()), scale=scale, steps=5)
    logdet = torch.linalg.slogdet(torch.eye(len(G), dtype=torch.float64) + scale**2 / epsilon * G).logabsdet
    assert found.log_volume == pytest.approx(-0.5 * float(logdet), rel=1e-10)
    assert found.effective_dimension == pytest.approx(float((values / (values + epsilon / scale**2)).sum()), rel=1e-10)
    assert found.trace == pytest.approx(float(values.sum()), rel=1e-10)
    assert found.sharpness == pytest.approx(float(values[-1]), rel=1e-10)
    assert (found.error, found.effective_dimension_error, found.trace_error) == (0, 0, 0)


@pytest.mark.parametrize(("epsilon", "scale"), [(0.1, 1.0), (0.01, 2.0)])
def test_the_log_volume_is_the_determinant_within_its_error(epsilon: float, scale: float) -> None:
    model, x = network(), normal(2049, 3)  # one example too many for the Gram matrix
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x)))
    values = torch.linalg.eigvalsh(G)
    exact = -0.5 * torch.linalg.slogdet(torch.eye(len(G), dtype=torch.float64) + scale**2 / epsilon * G).logabsdet
    found = basin_volume(
        model,
        x,
        epsilon,
        ng.Fisher(ng.Categorical()),
        scale=scale,
        probes=32,
        steps=18,  # of 78 parameters
        generator=torch.Generator().manual_seed(0),
    )
    assert abs(found.log_volume - float(exact)) < 4 * found.error
    assert found.error < 0.15 * abs(float(exact))
    assert found.log_volume < 0
    dimension = float((values / (values + epsilon / scale**2)).sum())
    assert found.effective_dimension == pytest.approx(dimension, rel=0.2)
    assert abs(found.effective_dimension - dimension) < 4 * found.effective_dimension_error < dimension
    assert found.trace == pytest.approx(float(values.sum()), rel=0.3)
    assert abs(found.trace - float(values.sum())) < 4 * found.trace_error < 2 * float(values.sum())
    assert found.sharpness == pytest.approx(float(values[-1]))
    low, high = found.rank_bounds
    assert low <= high <= len(G)
    assert "log-volume -" in str(found)


@pytest.mark.parametrize("n", [10, 150], ids=["rows", "parameters"])
def test_a_small_metric_has_exact_numbers_without_errors(n: int) -> None:
    """Ten rows of a root, or sixty-one parameters, are fewer than the steps: the trace is at least the sharpness."""
    torch.manual_seed(2)
    model, epsilon = nn.Sequential(nn.Linear(1, 20), nn.Tanh(), nn.Linear(20, 1)).double(), 0.1
    x = torch.linspace(-1, 1, n).double()[:, None]
    values = torch.linalg.eigvalsh(oracle.dense(oracle.module_jacobian(model, x), oracle.euclidean(model(x))))
    found = basin_volume(model, x, epsilon, ng.Euclidean(), generator=torch.Generator().manual_seed(2))
    assert found.trace == pytest.approx(float(values.sum()), rel=1e-10)
    assert found.sharpness == pytest.approx(float(values[-1]), rel=1e-10)
    assert found.log_volume == pytest.approx(-0.5 * float((1 + values / epsilon).log().sum()), rel=1e-10)
    assert found.effective_dimension == pytest.approx(float((values / (values + epsilon)).sum()), rel=1e-10)
    assert (found.error, found.effective_dimension_error, found.trace_error) == (0, 0, 0)
    assert f"trace {found.trace:.4g} ± 0, sharpness" in str(found)


def test_it_is_the_volume_of_a_soft_basin() -> None:
    """E exp(−½δᵀGδ/ε) over δ ~ N(0, σ²), by a million draws, for a model that is linear."""
    model, x, epsilon, scale = nn.Linear(2, 1).double(), normal(4, 2), 0.3, 0.8
    J = torch.cat([x, x.new_ones(4, 1)], 1)
    δ = scale * normal(1_000_000, 3)
    exact = math.log(float((-(δ @ J.T).square().sum(1) / (2 * 4 * epsilon)).exp().mean()))
    found = basin_volume(
        model, x, epsilon, ng.Euclidean(), scale=scale, probes=200, generator=torch.Generator().manual_seed(0)
    )
    assert abs(found.log_volume - exact) < 4 * found.error + 0.01


def test_it_changes_with_the_units_and_the_flatness_does_not() -> None:
    """What the docs say about which is which, on a line."""
    x = torch.ones(1, 1, dtype=torch.float64)
    θ = {"w": torch.zeros(1, dtype=torch.float64)}
    steep, plain = (lambda p, x, a=a: a * p["w"] * x for a in (10.0, 1.0))
    soft = [basin_volume(f, x, 0.5, ng.Euclidean(), params=θ).log_volume for f in (steep, plain)]
    assert soft == pytest.approx([-0.5 * math.log(201), -0.5 * math.log(3)])
    hard = [
        ng.functionspace.flatness(f, x, 0.5, ng.Euclidean(), params=θ, generator=torch.Generator().manual_seed(0))
        for f in (steep, plain)
    ]
    assert hard[0].volume.value == pytest.approx(hard[1].volume.value, rel=0.05)


def test_a_network_that_flatness_refuses_has_a_volume() -> None:
    model, x = network(), normal(5, 3)  # ten outputs for 78 parameters
    with pytest.raises(ng.errors.SingularMetricError, match="basin_volume has a volume for such a model"):
        ng.functionspace.flatness(model, x, 0.1, ng.Euclidean())
    found = basin_volume(model, x, 0.1, ng.Euclidean())
    assert -100 < found.log_volume < 0
    assert list(found.rank_bounds) == pytest.approx([10, 10])


@pytest.mark.parametrize(
    ("epsilon", "scale", "name"), [(0.0, 1.0, "epsilon"), (1.0, -1.0, "scale"), (True, 1.0, "eps")]
)
def test_wrong_numbers_are_named(epsilon: float, scale: float, name: str) -> None:
    with pytest.raises(ValueError, match=rf"{name}.*must be a positive, finite number"):
        basin_volume(nn.Linear(1, 1), torch.ones(1, 1), epsilon, ng.Euclidean(), scale=scale)
