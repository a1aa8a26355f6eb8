"""Kernels of circles, tori and spheres, sums and products, against their spectra, closed forms and NumPy."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.functionspace import Median, ReproducingKernel, SobolevKernel, SphereKernel, TorusKernel
from tests.output.table import close, normal


def angles(*shape: int) -> Tensor:
    return 2 * math.pi * torch.rand(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("lengthscale", [0.3, 2.0])
def test_the_kernel_of_a_circle_is_that_of_the_textbook(lengthscale: float) -> None:
    """cosh((π − θ)/ℓ)/cosh(π/ℓ) for ν = ½ solves (1 − ℓ²∂²)K = δ."""
    x = angles(9)
    apart = (x[:, None] - x).abs()
    expected = torch.cosh((math.pi - apart) / lengthscale) / math.cosh(math.pi / lengthscale)
    close(TorusKernel(0.5, lengthscale=lengthscale, images=15)(x), expected, 1e-12)


@pytest.mark.parametrize("dimension", [1, 2])
def test_the_kernel_of_a_torus_has_its_spectrum(dimension: int) -> None:
    """Σ_k (1 + ℓ²|k|²)^{−ν−d/2} cos⟨k, x − y⟩ over the frequencies, at any period."""
    period, lengthscale, nu = 3.0, 0.7, 4.5
    x = period * (angles(6, dimension) / (2 * math.pi)) + 5 * period
    grid = (
        torch.cartesian_prod(*[torch.arange(-60, 61)] * dimension).double().view(-1, dimension) * 2 * math.pi / period
    )
    weights = (1 + lengthscale**2 * grid.square().sum(1)) ** (-nu - dimension / 2)
    K = torch.cos((x[:, None] - x) @ grid.T) @ weights / weights.sum()
    close(TorusKernel(nu, lengthscale=lengthscale, period=period, images=10)(x), K, 1e-12)


def test_the_kernel_of_a_sphere_has_its_spectrum() -> None:
    x = normal(7, 3)
    unit = (x / x.norm(dim=1, keepdim=True)).numpy()
    degrees = np.arange(41)
    weights = (2 * degrees + 1) * (1 + 0.25 * degrees * (degrees + 1.0)) ** -3.5
    K = np.polynomial.legendre.legval(unit @ unit.T, weights) / weights.sum()
    close(SphereKernel(2.5, lengthscale=0.5, degree=40)(x), torch.as_tensor(K), 1e-12)


def test_the_kernel_of_a_sphere_in_three_dimensions_is_that_of_the_unit_quaternions() -> None:
    """p_l(cos θ) = sin((l + 1)θ)/((l + 1) sin θ), and (l + 1)² dimensions."""
    x = normal(5, 4)
    θ = torch.acos(torch.nn.functional.normalize(x[:4], dim=1) @ torch.nn.functional.normalize(x[4:], dim=1).T)
    l = torch.arange(31, dtype=torch.float64)
    weights = (l + 1) ** 2 * (1 + l * (l + 2)) ** -3.0
    K = (weights * ((l + 1) * θ).sin() / ((l + 1) * θ.sin())).sum(1, keepdim=True) / weights.sum()
    close(SphereKernel(1.5, degree=30)(x[:4], x[4:]), K, 1e-12)


def test_a_circle_is_a_sphere_and_a_torus_within_the_errors_that_they_tell() -> None:
    x = angles(20)
    sphere, torus = SphereKernel(1.5, lengthscale=0.5, degree=50), TorusKernel(1.5, lengthscale=0.5, images=2)
    apart = (sphere(torch.stack([x.cos(), x.sin()], 1)) - torus(x)).abs().max()
    assert 1e-8 < float(apart) < sphere.error(1) + torus.error(1) < 1e-4


@pytest.mark.parametrize("dimension", [1, 2, 3])
def test_errors_of_truncated_series_are_bounds(dimension: int) -> None:
    x = normal(10, dimension + 1)
    for degree in (3, 10):
        short, long = (SphereKernel(0.5, lengthscale=0.5, degree=n) for n in (degree, 3000))
        difference = float((short(x) - long(x)).abs().max())
        assert difference < short.error(dimension) < 40 * difference
    y = angles(10, dimension)
    rough, fine = (TorusKernel(0.5, lengthscale=3.0, images=n) for n in (1, 8))
    assert float((rough(y) - fine(y)).abs().max()) < rough.error(dimension)


def test_sums_and_products_of_kernels_are_those_of_their_matrices() -> None:
    x, y = normal(4, 2), normal(3, 2, seed=1)
    a, b = SobolevKernel(0.5), SobolevKernel(2.5, lengthscale=2.0)
    close((2.0 * a + b)(x), 2 * a(x) + b(x), 1e-15)
    close((a * b + a * 3.0)(x, y), a(x, y) * b(x, y) + 3 * a(x, y), 1e-15)
    measured = (SobolevKernel(0.5, lengthscale=Median()) + b).at(x)
    close(measured(x, y), SobolevKernel(0.5, lengthscale=Median()).at(x)(x, y) + b(x, y), 1e-15)
    with pytest.raises(ValueError, match=r"factor of a kernel must be positive and finite, got -1\.0"):
        -1.0 * a


class Bounded(ReproducingKernel):
    """min(x, y) on (0, 1): the kernel of functions with f(0) = 0 and the norm ∫f'²."""

    def __call__(self, x: Any, y: Any = None) -> Tensor:
        """K [n m]."""
        return torch.minimum(x, (x if y is None else y).T)


def test_a_metric_takes_any_kernel() -> None:
    """Jᵀ K⁻¹ J/N with a K of one's own, in every structure's dense form; vᵀGv is the norm ∫f'² of an interpolant."""
    x = torch.tensor([[0.2], [0.5], [0.9]], dtype=torch.float64)
    model = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh(), torch.nn.Linear(3, 1)).double()
    metric = ng.Sobolev(kernel=Bounded(), jitter=0.0)
    pb = ng.pullback(model, x, metric)
    rows = ng.jacobian(model, x)
    G = ng.Dense().estimate(pb)
    v = ng.Vector({name: torch.randn_like(p) for name, p in model.named_parameters()})
    f = torch.cat([torch.zeros(1, dtype=torch.float64), rows.push(v)[:, 0]])
    knots = torch.cat([torch.zeros(1, dtype=torch.float64), x[:, 0]])
    energy = (f.diff().square() / knots.diff()).sum()  # of the broken line, and flat behind the last point
    close((G.flat(v) @ v) * 3, energy, 1e-10)
    close(ng.Kernel().estimate(pb).dense(), G.dense(), 1e-10)


def test_on_more_points_the_norm_grows_up_to_that_of_the_function() -> None:
    """The function J v = v x on points z, which are others than the batch: its least norm through them."""
    line = torch.nn.Linear(1, 1, bias=False).double()
    v = ng.Vector({"weight": torch.ones(1, 1, dtype=torch.float64)})

    def norm(z: Tensor, metric: ng.OutputMetric) -> float:
        G = ng.Dense().estimate(ng.pullback(line, z[:, None], metric))
        return len(z) * float(G.flat(v) @ v)

    grids = [torch.linspace(0, 1, 2**k + 1, dtype=torch.float64) for k in range(1, 6)]
    own = [norm(z[1:], ng.Sobolev(kernel=Bounded(), jitter=0.0)) for z in grids]
    close(torch.tensor(own), torch.ones(5), 1e-6)  # ∫ (x')², from any points that reach 1
    norms = torch.tensor([norm(z, ng.Sobolev(nu=0.5, jitter=0.0)) for z in grids], dtype=torch.float64)
    # ν = ½ on the line is ½∫f² + f'², with e^{−|x|} beyond the ends: ½(1/3 + 1) + ½ f(1)²
    assert bool((norms.diff() > 0).all())
    close(norms[-1], torch.tensor(7 / 6, dtype=torch.float64), 1e-3)


def test_what_is_no_kernel_is_refused() -> None:
    with pytest.raises(TypeError, match=r"kernel=.* give a functionspace.ReproducingKernel"):
        ng.Sobolev(kernel=torch.cdist)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="leave nu= and lengthscale= out"):
        ng.Sobolev(kernel=Bounded(), nu=0.5)
    wrong = ng.Sobolev(kernel=Bounded(), features=lambda x: x[:2])
    with pytest.raises(ValueError, match=r"returned \(2, 2\) for 3 examples"):
        wrong.coupling(torch.ones(3, 1), 3)
    with pytest.raises(ValueError, match=r"SphereKernel\(degree=0\): give a positive integer"):
        SphereKernel(1.5, degree=0)
    with pytest.raises(ValueError, match="SphereKernel needs points of R² or more"):
        SphereKernel(1.5)(torch.ones(3))
