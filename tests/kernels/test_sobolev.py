"""Sobolev kernels: golden values, SciPy, derivatives, and what the paper prints for them and must not be returned."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special
from torch import Tensor

import natgrad as ng
from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.functionspace import Alike, Lengthscale, Median, SobolevKernel
from tests.golden import agrees, golden, names, tensor
from tests.memory import peak
from tests.pulled import close, normal

NUS = [0.2, 0.5, 0.8, 1.0, 1.3, 1.5, 2.0, 2.5, 3.7, 5.5, 12.5, 40.25]


def _at(kernel: SobolevKernel, r: float, d: int = 1) -> Tensor:
    """K between the origin of R^d and a point at distance r."""
    x = torch.zeros(1, d, dtype=torch.float64)
    y = x.clone()
    y[0, -1] = r
    return kernel(x, y)[0, 0]


# Values


@pytest.mark.parametrize("name", names("sobolev.kernel.n"))
def test_the_unnormalised_kernel_is_the_reproducing_kernel_of_h_s_in_every_dimension(name: str) -> None:
    case = golden(name)
    n, s, r = (case["inputs"][key] for key in ("n", "s", "r"))
    agrees(case, _at(SobolevKernel((s - n) / 2, normalised=False), r, n), "value")


@pytest.mark.parametrize("name", names("sobolev.profile"))
def test_the_normalised_kernel_has_no_root_of_two_nu(name: str) -> None:
    case = golden(name)
    nu, r = case["inputs"]["nu"], case["inputs"]["r"]
    agrees(case, _at(SobolevKernel(nu), r), "value")
    if nu > 0.5:
        assert abs(_at(SobolevKernel(nu), math.sqrt(2 * nu) * r) - case["expected"]["value"]) > 1e-3


@pytest.mark.parametrize("name", names("sobolev.lemma9"))
def test_lemma_9_is_the_kernel_on_the_line(name: str) -> None:
    case = golden(name)
    A, r = case["inputs"]["A"], case["inputs"]["r"]
    agrees(case, _at(SobolevKernel(A - 0.5, normalised=False), r), "value")


@pytest.mark.parametrize("nu", NUS)
def test_the_kernel_is_that_of_scipy_for_every_smoothness(nu: float) -> None:
    r = torch.tensor([[1e-4], [0.03], [0.4], [1.0], [1.99], [2.01], [4.0], [11.0]], dtype=torch.float64)
    log_factor = (1 - nu) * math.log(2) - math.lgamma(nu) + nu * r.log() - r
    expected = log_factor.exp() * torch.as_tensor(special.kve(nu, r.numpy()))
    close(SobolevKernel(nu)(torch.zeros_like(r[:1]), r).T, expected, 2e-13)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5, 7.5, 10.5, 11.5])
def test_closed_forms_and_bessel_functions_agree_at_half_integers(nu: float) -> None:
    x = torch.linspace(0, 30, 40, dtype=torch.float64)
    close(SobolevKernel(nu)(x), SobolevKernel(nu + 1e-13)(x), 1e-11)


@pytest.mark.parametrize("nu", NUS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_point_and_itself_have_kernel_one_exactly_and_far_points_zero(nu: float, dtype: torch.dtype) -> None:
    x = torch.tensor([[3.0, -7.0], [3.0, -7.0], [1e5, 0.0], [-1e30, 1e30]], dtype=dtype)
    K = SobolevKernel(nu)(x)
    assert K.dtype == dtype
    close(K, torch.block_diag(torch.ones(2, 2), torch.eye(2)).to(dtype), 0)


@pytest.mark.parametrize("nu", [0.5, 1.2, 1.5, 10.5])
def test_single_precision_is_double_precision_rounded(nu: float) -> None:
    x = normal(6, 4)
    close(SobolevKernel(nu, 2.0)(x.float()).double(), SobolevKernel(nu, 2.0)(x), 1e-6)


@pytest.mark.parametrize("nu", [0.3, 0.5, 1.0, 1.7])
@pytest.mark.parametrize("d", [1, 3])
def test_the_fourier_transform_of_the_kernel_is_a_power_of_one_plus_xi_squared(nu: float, d: int) -> None:
    # On a line and in space, ∫ K(x) e^{−iξx} dx = (1 + ξ²)^{−s/2}: a cosine transform, and a sine transform over ξ.
    kernel, ξ = SobolevKernel(nu, normalised=False), 0.7

    points, weights = np.polynomial.legendre.leggauss(1000)
    u, w = (torch.as_tensor(numbers, dtype=torch.float64) for numbers in ((points + 1) / 2, weights / 2))
    r = 60 * u**5  # whose derivative is zero where the kernel's is infinite
    far = torch.zeros(len(r), d, dtype=torch.float64)
    far[:, -1] = r
    wave = (ξ * r).cos() if d == 1 else 2 * math.pi * r * (ξ * r).sin() / ξ
    value = (2 * kernel(torch.zeros_like(far[:1]), far)[0] * wave * 300 * u**4 * w).sum()
    assert float(value) == pytest.approx((1 + ξ**2) ** (-(d + 2 * nu) / 2), rel=1e-6)


@pytest.mark.parametrize("name", names("sobolev.gram"))
def test_the_gram_matrix_and_its_inverse_are_golden(name: str) -> None:
    case = golden(name)
    K = ng.functionspace.SobolevKernel(1.5, case["inputs"]["ell"])(tensor(case["inputs"]["X"]))
    agrees(case, K, "K")
    agrees(case, torch.linalg.inv(K), "Kinv")
    agrees(case, torch.logdet(K), "logdet")


@pytest.mark.parametrize("name", names("sobolev.quadform"))
def test_the_squared_norm_converges_for_smooth_functions_and_diverges_for_a_step(name: str) -> None:
    case = golden(name)
    x = torch.linspace(-1, 1, case["inputs"]["N"], dtype=torch.float64)
    K = SobolevKernel(1.5)(x)
    for key, f in (("const", torch.ones_like(x)), ("tanh3", (3 * x).tanh()), ("step", (x > 0).double())):
        agrees(case, f @ torch.linalg.solve(K, f), key)


# The constant


@pytest.mark.parametrize("name", names("sobolev.C_n"))
def test_the_constant_is_not_what_the_paper_prints(name: str) -> None:
    case = golden(name)
    kernel, n = SobolevKernel(1.5, normalised=False), case["inputs"]["n"]
    agrees(case, _at(kernel, 0.0, n), "C_n")
    agrees(case, torch.tensor(kernel.log_constant(n), dtype=torch.float64).exp(), "C_n")
    printed = case["printed_wrong"]["C_n"]  # (38), (39)
    assert abs(math.exp(kernel.log_constant(n)) / printed - 1) > 0.3


@pytest.mark.parametrize("name", names("sobolev.log_C_n"))
def test_the_log_constant_does_not_underflow_in_high_dimension(name: str) -> None:
    case = golden(name)
    got = SobolevKernel(1.5).log_constant(case["inputs"]["n"])
    agrees(case, torch.tensor(got, dtype=torch.float64), "log_C_n")


def test_the_normalised_kernel_does_not_underflow_in_dimension_3072_and_the_constant_is_refused() -> None:
    x = normal(8, 3, 32, 32)
    K = SobolevKernel(1.5, lengthscale=20.0)(x)
    assert 0.05 < K[0, 1] < 0.2  # r ≈ 3.9
    assert SobolevKernel(1.5).log_constant(3072) == pytest.approx(-5919.25 * math.log(10), abs=0.02)
    with pytest.raises(ValueError, match=r"in dimension 3072 the constant .* is e\^-13630.*Use normalised=True"):
        SobolevKernel(1.5, normalised=False)(x)


@pytest.mark.parametrize("name", names("sobolev.radial"))
def test_the_constant_is_an_integral_over_spheres_with_the_right_radial_part(name: str) -> None:
    case = golden(name)
    n, s = case["inputs"]["n"], case["inputs"]["s"]
    line = SobolevKernel((s - n) / 2).log_constant(1)  # the last coordinate of ξ, over 2π
    sphere = 2 * math.pi ** ((n - 1) / 2) / math.gamma((n - 1) / 2)
    whole = math.exp(SobolevKernel((s - n) / 2).log_constant(n)) * (2 * math.pi) ** n
    # ∫(1+|ξ|²)^{−s/2} dξ = ∫dζ (1+ζ²)^{−(s−n+1)/2} · vol(S^{n−2}) · radial, and the first is of order s − n + 1
    radial = whole / (2 * math.pi * math.exp(line) * sphere)
    agrees(case, torch.tensor(radial, dtype=torch.float64), "value")


# Derivatives


@pytest.mark.parametrize("nu", [0.3, 0.5, 0.9, 1.0, 1.5, 2.0, 2.2, 2.5, 3.5])
def test_first_and_second_derivatives_are_those_of_finite_differences(nu: float) -> None:
    kernel = SobolevKernel(nu, 1.3)
    x, y = normal(2, 2).requires_grad_(), normal(2, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(kernel, (x, y), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(kernel, (x, y))
    assert torch.autograd.gradcheck(kernel, (x,))
    assert torch.autograd.gradgradcheck(kernel, (x,))


@pytest.mark.parametrize("nu", [0.2, 0.5, 0.7, 1.0, 1.5, 2.0, 2.6])
def test_the_gradient_at_equal_points_is_zero(nu: float) -> None:
    x = normal(3, 2).requires_grad_()
    y = x.detach().clone().requires_grad_()
    gradients = torch.autograd.grad(SobolevKernel(nu)(x, y).diagonal().sum(), (x, y))
    assert all((g == 0).all() for g in gradients)


@pytest.mark.parametrize("nu", [1.1, 1.5, 2.0, 2.5, 3.3])
def test_the_hessian_at_equal_points_is_minus_one_over_two_nu_minus_one(nu: float) -> None:
    y = normal(1, 3)
    hessian: Tensor = torch.autograd.functional.hessian(lambda x: SobolevKernel(nu)(x[None], y).sum(), y[0].clone())
    close(hessian, -torch.eye(3, dtype=torch.float64) / (2 * (nu - 1)), 1e-14)
    forward: Tensor = torch.func.hessian(lambda x: SobolevKernel(nu)(x[None], y).sum())(y[0].clone())
    close(forward, hessian, 1e-14)


def test_the_mixed_derivative_at_equal_points_is_the_covariance_of_gradients() -> None:
    kernel, x = SobolevKernel(2.5), normal(1, 2)
    mixed = torch.func.jacrev(torch.func.jacrev(lambda a, b: kernel(a, b)[0, 0], 0), 1)(x, x.clone())
    close(mixed.reshape(2, 2), torch.eye(2, dtype=torch.float64) / 3, 1e-14)


@pytest.mark.parametrize("nu", [0.5, 0.8, 1.0])
def test_second_derivatives_that_are_infinite_are_refused(nu: float) -> None:
    x = normal(2, 2).requires_grad_()
    (g,) = torch.autograd.grad(SobolevKernel(nu)(x, x.detach().clone()).sum(), x, create_graph=True)
    with pytest.raises(NonFiniteError, match=r"order 2 .* nu=.* is infinite where two points coincide. Use nu > 1"):
        torch.autograd.grad(g.sum(), x)


@pytest.mark.parametrize("nu", [0.3, 0.5, 1.0, 1.5])
def test_the_diagonal_of_a_gram_matrix_is_constant_however_often_it_is_differentiated(nu: float) -> None:
    x = normal(4, 2).requires_grad_()
    (g,) = torch.autograd.grad(SobolevKernel(nu)(x).diagonal().sum(), x, create_graph=True)
    assert (g == 0).all()
    (second,) = torch.autograd.grad(g.sum(), x)
    assert (second == 0).all()


def test_the_kernel_of_smoothness_three_halves_is_twice_and_not_three_times_differentiable() -> None:
    # The paper claims [n/2] + 1 derivatives. The third one of e⁻ʳ(1 + r) jumps from −2 to 2 at r = 0.
    y = torch.zeros(1, 4, dtype=torch.float64)
    thirds = []
    for side in (-1e-6, 1e-6):
        r = torch.tensor(side, dtype=torch.float64, requires_grad=True)
        value = SobolevKernel(1.5)(torch.cat([r[None], y[0, 1:]])[None], y).sum()
        for _ in range(3):
            (value,) = torch.autograd.grad(value, r, create_graph=True)
        thirds.append(value.detach())
    close(torch.stack(thirds), torch.tensor([-2.0, 2.0], dtype=torch.float64), 1e-5)


def test_the_lengthscale_may_be_trained() -> None:
    x = normal(3, 2)
    ℓ = torch.tensor(1.3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda scale: SobolevKernel(1.2, scale)(x), (ℓ,))


# Lengthscale, features, and what is refused


@pytest.mark.parametrize("unit", [1e-30, 1e30])
@pytest.mark.parametrize("trained", [False, True])
def test_a_lengthscale_that_is_a_tensor_may_have_a_square_outside_of_single_precision(
    unit: float, trained: bool
) -> None:
    x = torch.tensor([0.0, 1.0, 3.0])
    K = SobolevKernel(0.5, torch.tensor(unit, requires_grad=trained))(unit * x)
    torch.testing.assert_close(K.detach(), (-(x[:, None] - x).abs()).exp(), rtol=1e-5, atol=0)


def test_a_lengthscale_divides_distances() -> None:
    x = normal(5, 3)
    close(SobolevKernel(1.2, 4.0)(x), SobolevKernel(1.2)(x / 4), 1e-14)


def test_the_median_rule_takes_the_median_distance_of_distinct_points() -> None:
    x = normal(7, 3)
    pairs = torch.pdist(x)
    close(Median().of(x), pairs.median(), 1e-14)
    close(Median(divisor=4).of(torch.cat([x, x, x])), pairs.median() / 4, 1e-14)
    close(SobolevKernel(1.5, Median())(x), SobolevKernel(1.5, float(pairs.median()))(x), 1e-14)


def test_the_median_rule_is_one_where_all_points_are_equal_and_the_kernel_is_one() -> None:
    for x in (torch.ones(1, 2), torch.ones(4, 2)):
        assert Median().of(x) == 1
        assert (SobolevKernel(0.5, Median())(x) == 1).all()


def test_a_measured_lengthscale_is_kept_for_other_points() -> None:
    x, y = normal(7, 3), 10 * normal(4, 3, seed=1)
    rule = SobolevKernel(1.5, Median())
    close(rule.at(x)(y, x), SobolevKernel(1.5, float(torch.pdist(x).median()))(y, x), 1e-14)
    assert rule.at(x).at(y).lengthscale == rule.at(x).lengthscale
    with pytest.raises(ValueError, match=r"two sets of points were given: say which by kernel = kernel.at\(x\)"):
        rule(y, x)


def test_tokens_have_a_kernel_through_their_features() -> None:
    table = normal(10, 4)
    tokens = torch.tensor([[1, 2], [3, 4], [1, 2]])
    with pytest.raises(TypeError, match=r"torch\.int64, which are no points.*Pass features="):
        SobolevKernel(1.5)(tokens)
    close(SobolevKernel(1.5, features=lambda t: table[t])(tokens), SobolevKernel(1.5)(table[tokens].flatten(1)))


def test_what_is_no_number_is_refused() -> None:
    with pytest.raises(TypeError, match=r"nu='1\.5': the smoothness is a real number"):
        SobolevKernel("1.5")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"it must be one real number\. Scale the inputs by features="):
        SobolevKernel(1.5, torch.ones(3))
    with pytest.raises(ValueError, match="the median distance is divided by a positive number"):
        Median(divisor=0)
    with pytest.raises(ValueError, match="dimension=0 must be a positive integer"):
        SobolevKernel(1.5).log_constant(0)


# Kernels of many points and of near ones: what memory they take, and how small a distance may be.


@pytest.mark.parametrize(
    ("nu", "n", "temporaries", "dtype"), [(1.5, 2500, 8, torch.float64), (1.3, 1200, 24, torch.float32)]
)
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


@pytest.mark.parametrize("nu", [1.3, 1.5])
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


# Lengthscales that are measured on the points: what they promise, whatever the points are.


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.2])
@pytest.mark.parametrize("value", [0.01, 0.1, 0.5, 0.95])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_the_kernel_has_the_mean_that_was_asked_for(nu: float, value: float, scale: float) -> None:
    x = scale * torch.cat([normal(12, 3), 50 + normal(5, 3, seed=1)])  # two clusters
    K = SobolevKernel(nu, Alike(value, nu))(x)
    close(K[~torch.eye(17, dtype=torch.bool)].mean(), torch.tensor(value, dtype=torch.float64), 1e-6)


def test_points_that_are_equal_are_left_out() -> None:
    x = normal(9, 2)
    close(Alike(0.3).of(torch.cat([x, x, x])), Alike(0.3).of(x), 1e-6)


def test_one_lengthscale_of_two_points_is_exact() -> None:
    """k(d/ℓ) = value: e^{−2/ℓ} = 0.1."""
    ℓ = Alike(0.1, nu=0.5).of(torch.tensor([[1.0], [3.0]]).double())
    close(ℓ, -2 / torch.tensor(0.1, dtype=torch.float64).log(), 1e-12)


@pytest.mark.parametrize("x", [normal(1, 3), torch.ones(4, 3).double()], ids=["one", "copies"])
def test_points_that_are_all_equal_have_the_lengthscale_one(x: torch.Tensor) -> None:
    assert Alike().of(x) == Median().of(x) == 1
    assert (SobolevKernel(1.5, Alike())(x) == 1).all()


def test_lengthscales_follow_the_points() -> None:
    x = normal(20, 4)
    for rule in (Alike(0.2), Median()):
        close(rule.of(7 * x), 7 * rule.of(x), 1e-6)


@pytest.mark.parametrize("value", [0.0, 1.0, -0.5, float("nan")])
def test_a_mean_that_no_kernel_has_is_refused(value: float) -> None:
    with pytest.raises(ValueError, match="the mean of a kernel between 0 and 1 lies between 0 and 1"):
        Alike(value)


@pytest.mark.parametrize("nu", [0.0, -1.5, float("inf")])
def test_a_rule_with_a_smoothness_that_is_not_positive_is_refused(nu: float) -> None:
    with pytest.raises(ValueError, match="the smoothness of the kernel is a positive number"):
        Alike(nu=nu)


def test_a_rule_that_keeps_the_mean_of_another_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match=r"another smoothness than ν = 2.5: give Alike\(0.1, nu=2.5\)"):
        ng.Sobolev(nu=2.5, lengthscale=Alike(0.1))


@pytest.mark.parametrize("rule", [Alike(), Median()], ids=repr)
def test_no_points_have_no_lengthscale(rule: Lengthscale) -> None:
    for x in (torch.empty(0, 3), torch.zeros(3)):
        with pytest.raises(ValueError, match=r"a lengthscale on points \[n d\], at least one, and got \(.*give"):
            rule.of(x)


WORDS: dict[str, Callable[[Any], Any]] = {
    r"Median\(divisor=…\)": Median,
    r"Alike\(value=…\)": Alike,
    r"Alike\(nu=…\)": lambda word: Alike(0.1, word),
}


@pytest.mark.parametrize("word", ["a", None, True, 1j], ids=repr)
@pytest.mark.parametrize("where", WORDS)
def test_words_are_refused_where_a_number_belongs(where: str, word: Any) -> None:
    with pytest.raises(TypeError, match=rf"{where} must be a number, got "):
        WORDS[where](word)


@pytest.mark.parametrize("number", [np.float32, np.float64, np.float16, Fraction], ids=lambda kind: kind.__name__)
def test_real_numbers_of_every_kind_are_alike(number: Callable[[float], Any]) -> None:
    x = normal(5, 2)
    half, quarter = number(0.5), number(0.25)
    close(SobolevKernel(half, quarter)(x), SobolevKernel(0.5, 0.25)(x), 0)
    close(SobolevKernel(quarter, half)(x, x[:2]), SobolevKernel(0.25, 0.5)(x, x[:2]), 0)
    close(Median(half).of(x), Median(0.5).of(x), 0)
    close(Alike(half, quarter).of(x), Alike(0.5, 0.25).of(x), 0)
    metric = ng.Sobolev(nu=half, lengthscale=quarter, jitter=number(0.125))
    close(metric.coupling(x, 5), ng.Sobolev(nu=0.5, lengthscale=0.25, jitter=0.125).coupling(x, 5), 0)


def test_distances_that_do_not_fit_are_refused_before_they_are_made() -> None:
    x = torch.zeros(20_000, 1, dtype=torch.float64)
    for rule in (Median(), Alike()):
        with pytest.raises(MemoryBoundError, match=r"the distances of 20,000 points, over .*kernel.at\(x\[:1000\]\)"):
            rule.of(x)


@pytest.mark.parametrize("rule", [Median(), Alike(0.3)], ids=repr)
@pytest.mark.parametrize("scale", [1e-25, 1e25])
@pytest.mark.parametrize("grad", [False, True])
def test_points_whose_squares_leave_single_precision_have_the_kernel_of_points_that_do_not(
    rule: Lengthscale, scale: float, grad: bool
) -> None:
    x = torch.tensor([[0.0], [1.0], [3.0]])
    expected = SobolevKernel(1.5, rule)(x)
    found = SobolevKernel(1.5, rule)((scale * x).requires_grad_(grad))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.detach(), expected)
    given = SobolevKernel(1.5, float(rule.of(scale * x)))((scale * x).requires_grad_(grad))
    torch.testing.assert_close(given.detach(), expected)


def test_a_lengthscale_that_is_zero_in_single_precision_keeps_points_apart() -> None:
    x = torch.tensor([0.0, 1.0])
    for nu in (0.3, 1.5, 40.0):
        assert torch.equal(SobolevKernel(nu, 1e-46)(x), torch.eye(2))
        assert torch.equal(SobolevKernel(nu, 1e-46)(x, x), torch.eye(2))


@pytest.mark.parametrize("rule", [Median(), Alike(0.3)], ids=repr)
def test_points_whose_squares_leave_double_precision_are_refused(rule: Lengthscale) -> None:
    x = torch.tensor([[0.0], [1e160], [3e160]], dtype=torch.float64)
    with pytest.raises(ValueError, match=r"cannot measure points that are 3e\+160 apart in a coordinate: .*Scale the"):
        rule.of(x)
