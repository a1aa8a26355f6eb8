"""Kernels of many points and of near ones: what memory they take, and how small a distance may be."""

from __future__ import annotations

import pytest
import torch

from natgrad.functionspace import Alike, Lengthscale, Median, SobolevKernel
from tests.memory import peak
from tests.pulled import close, normal


@pytest.mark.parametrize(("nu", "n", "temporaries"), [(0.5, 2500, 8), (1.5, 2500, 8), (0.3, 1200, 24), (1.3, 1200, 24)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_gram_matrix_takes_little_memory_beside_itself(
    nu: float, n: int, temporaries: int, dtype: torch.dtype
) -> None:
    """Some temporaries of a fixed size, whatever n is; those of Bessel functions are in double precision."""
    x = normal(n, 4).to(dtype)
    matrix, more = n**2 * x.element_size(), temporaries * 2**18 * (8 if temporaries > 8 else x.element_size())
    assert peak(lambda: SobolevKernel(nu)(x)) < matrix + more
    assert peak(lambda: SobolevKernel(nu)(x, x[: n // 2])) < matrix / 2 + more


@pytest.mark.parametrize("rule", [Median(), Alike(0.1)], ids=repr)
def test_a_lengthscale_is_measured_in_the_memory_of_some_matrices(rule: Lengthscale) -> None:
    """Of distances, what they are sorted in, and kernels of some rows at a time."""
    x = normal(1000, 4)
    assert peak(lambda: rule.of(x)) < 4 * len(x) ** 2 * x.element_size() + 10 * 2**20 * 8


@pytest.mark.parametrize("nu", [0.3, 1.3, 1.5, 2.0])
def test_rows_that_are_made_a_few_at_a_time_are_those_that_are_made_at_once(nu: float) -> None:
    x, z = normal(600, 3), normal(500, 3, seed=1)
    x[7] = x[550]
    kernel = SobolevKernel(nu, 0.7)
    whole = torch.cat([kernel(x, part) for part in z.split(100)], dim=1)
    close(kernel(x, z), whole, 1e-14)
    K = kernel(x)
    close(K, torch.cat([kernel(x, part) for part in x.split(100)], dim=1), 1e-14)
    assert torch.equal(K, K.T)
    assert bool((K.diagonal() == 1).all())
    assert K[7, 550] == 1
    close(kernel(x.clone().requires_grad_()).detach(), K, 1e-14)


@pytest.mark.parametrize("nu", [0.01, 0.1, 0.3, 0.5, 0.8])
def test_near_points_in_single_precision_have_the_gradient_of_double_precision(nu: float) -> None:
    """k' grows as r^{2ν−2}: in r² it overflows long before it does in r."""
    kernel = SobolevKernel(nu)

    def gradient(dtype: torch.dtype, r: float) -> torch.Tensor:
        x = torch.tensor([[0.0], [r]], dtype=dtype, requires_grad=True)
        (found,) = torch.autograd.grad(kernel(x)[0, 1], x)
        return found.double()

    for r in (1e-30, 1e-20, 1e-10, 1e-2, 1.0):
        single, double = gradient(torch.float32, r), gradient(torch.float64, r)
        assert bool(single.isfinite().all())
        torch.testing.assert_close(single, double, rtol=1e-5, atol=0)


def test_the_gradient_of_a_rough_kernel_at_a_small_distance_is_that_of_its_expansion() -> None:
    """k = 1 − Γ(1 − ν)/Γ(1 + ν) (r/2)^{2ν} + …, so that k' = −2ν Γ(1 − ν)/Γ(1 + ν) (r/2)^{2ν}/r."""
    nu, r = torch.tensor(0.01, dtype=torch.float64), 1e-20
    x = torch.tensor([[0.0], [r]], requires_grad=True)
    (found,) = torch.autograd.grad(SobolevKernel(0.01)(x)[0, 1], x)
    ratio = (torch.lgamma(1 - nu) - torch.lgamma(1 + nu)).exp()
    expected = -2 * nu * ratio * (r / 2) ** (2 * nu) / r
    torch.testing.assert_close(found[1, 0].double(), expected, rtol=1e-3, atol=0)


def test_values_of_a_rough_kernel_in_single_precision_do_not_jump_to_one() -> None:
    x = torch.tensor([[0.0], [1e-25]])
    close(SobolevKernel(0.01)(x).double(), SobolevKernel(0.01)(x.double()), 1e-6)
