"""Every exponential family: two charts, one convex function, one metric (Grosse 2021, section 4)."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch import distributions as D

import natgrad as ng
from tests.families.members import MEMBERS, Member, hessian
from tests.output.table import close, normal, outer

every_family = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())
COUNT = 20_000
SIGMAS = 5.0  # a sampled number may be this many of its standard errors off


def drawn(member: Member) -> Tensor:
    """t(x) [k n p] of samples."""
    x = member.family.sample(member.eta, (COUNT,), torch.Generator().manual_seed(0))
    return member.dense(member.family.statistics(x))


def tolerance(member: Member) -> float:
    """The derivative of torch's digamma function is good to 5e-10 only; that of the library is not it."""
    special = (ng.families.Gamma, ng.families.Beta, ng.families.Dirichlet, ng.families.Wishart, ng.families.Product)
    return 1e-8 if isinstance(member.family, special) else 1e-10


def agrees_within_its_error(samples: Tensor, expected: Tensor) -> None:
    """The mean over the first axis is the expected one within five standard errors."""
    error = samples.std(0) / COUNT**0.5
    assert bool(((samples.mean(0) - expected).abs() <= SIGMAS * error + 1e-12).all())


@every_family
def test_the_mean_parameters_are_the_gradient_of_log_z(member: Member) -> None:
    leaf = member.eta.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(member.family.log_partition(leaf).sum(), leaf)
    close(member.family.mean(member.eta), gradient, 1e-12)


@every_family
def test_the_mean_parameters_are_the_expected_statistics(member: Member) -> None:
    agrees_within_its_error(drawn(member), member.dense(member.family.mean(member.eta)))


@every_family
def test_the_information_is_the_hessian_of_log_z(member: Member) -> None:
    close(member.family.fisher(member.eta).dense(), hessian(member.family, member.eta), tolerance(member))


@every_family
def test_the_information_is_the_covariance_of_the_statistics(member: Member) -> None:
    centred = drawn(member) - member.dense(member.family.mean(member.eta))
    products = centred.unsqueeze(-1) * centred.unsqueeze(-2)
    agrees_within_its_error(products, member.family.fisher(member.eta).dense())


@every_family
def test_flat_is_the_product_with_the_dense_information(member: Member) -> None:
    v, F = normal(*member.eta.shape, seed=3), member.family.fisher(member.eta)
    close(member.dense(F.flat(v)), (F.dense() @ member.dense(v).unsqueeze(-1)).squeeze(-1), 1e-10)


@every_family
def test_the_informations_of_the_two_charts_are_inverse_on_the_tangent_space(member: Member) -> None:
    family, v = member.family, normal(*member.eta.shape, seed=3)
    F_η, F_ξ = family.fisher(member.eta), family.fisher_mean(family.mean(member.eta))
    close(F_ξ.flat(F_η.flat(v)), member.tangent(v), 1e-8)
    close(F_η.sharp(F_η.flat(v)), member.tangent(v), 1e-8)
    close(F_ξ.sharp(v), F_η.flat(v), 1e-8)
    projector = F_ξ.dense() @ F_η.dense()
    close((projector @ member.dense(v).unsqueeze(-1)).squeeze(-1).view_as(v), member.tangent(v), 1e-8)


@every_family
def test_the_natural_parameters_depend_on_the_mean_ones_by_the_inverse_information(member: Member) -> None:
    """∂η/∂ξ = F⁻¹ on changes of ξ that a change of η makes, also through a Newton iteration."""
    family, v, w = member.family, normal(*member.eta.shape, seed=3), normal(*member.eta.shape, seed=4)
    leaf = family.mean(member.eta).requires_grad_()
    (pulled,) = torch.autograd.grad(family.natural(leaf), leaf, member.tangent(w))
    F = family.fisher(member.eta)
    close(family.pair(pulled, F.flat(v)), family.pair(member.tangent(w), member.tangent(v)), 1e-8)


@every_family
def test_both_charts_lead_back_to_where_they_came_from(member: Member) -> None:
    family = member.family
    xi = family.mean(member.eta)
    close(family.mean(family.natural(xi)), xi, 1e-10)
    back = family.natural(xi)
    close(back, member.eta - (member.eta - back).mean(-1, keepdim=True) if _gauge(member) else member.eta, 1e-10)


def _gauge(member: Member) -> bool:
    """Whether η is known up to a constant only."""
    return member.family == ng.families.Categorical()


@every_family
def test_kl_is_the_bregman_divergence_with_its_arguments_turned_round(member: Member) -> None:
    """KL(p_η ‖ p_η2) = D_logZ(η2, η), by the definition of D, not D_logZ(η, η2)."""
    family, η, η2 = member.family, member.eta, member.eta2
    turned = family.log_partition(η2) - family.log_partition(η) - family.pair(family.mean(η), η2 - η)
    close(family.bregman(η2, η), turned, 1e-10)
    close(family.kl(η, η2), turned, 1e-10)
    if not isinstance(family, ng.families.GaussianKnownCovariance):  # whose log Z is quadratic, and KL symmetric
        assert bool(((family.kl(η, η2) - family.bregman(η, η2)).abs() > 1e-4).any())


def _kl_of_torch(p: D.Distribution, q: D.Distribution) -> Tensor | None:
    try:
        return D.kl_divergence(p, q)
    except NotImplementedError:  # torch's word for a pair that it has no formula for
        return None


@every_family
def test_kl_is_that_of_torch_or_that_of_samples(member: Member) -> None:
    family, p, q = member.family, member.family.distribution(member.eta), member.family.distribution(member.eta2)
    expected = _kl_of_torch(p, q)
    if expected is None or isinstance(family, ng.families.Wishart):  # torch's is wrong there: samples do not agree
        x = family.sample(member.eta, (COUNT,), torch.Generator().manual_seed(1))
        agrees_within_its_error(p.log_prob(x) - q.log_prob(x), family.kl(member.eta, member.eta2))
        return
    close(family.kl(member.eta, member.eta2), expected, 1e-10)


@every_family
def test_kl_between_near_points_is_half_the_squared_length_of_the_step(member: Member) -> None:
    """Where the difference of log Z is rounding alone."""
    family, v = member.family, 1e-7 * normal(*member.eta.shape, seed=3)
    length = family.pair(v, family.fisher(member.eta).flat(v))
    torch.testing.assert_close(family.bregman(member.eta + v, member.eta), 0.5 * length, rtol=1e-5, atol=1e-18)


@every_family
def test_the_density_is_that_of_torch(member: Member) -> None:
    x = member.family.sample(member.eta, (6,), torch.Generator().manual_seed(1))
    # torch has the Bessel function of its von Mises density in single precision
    tol = 1e-6 if isinstance(member.family, ng.families.VonMises) else 1e-9
    close(member.family.log_prob(member.eta, x), member.family.distribution(member.eta).log_prob(x), tol)


@every_family
def test_entropy_is_that_of_torch_and_that_of_samples(member: Member) -> None:
    family = member.family
    found = family.entropy(member.eta)
    x = family.sample(member.eta, (COUNT,), torch.Generator().manual_seed(1))
    agrees_within_its_error(-family.log_prob(member.eta, x), found)
    try:
        expected = family.distribution(member.eta).entropy()
    except NotImplementedError:  # torch has no formula; the samples above have told
        return
    close(found, expected, 1e-9)


@every_family
def test_torch_distributions_are_converted_both_ways(member: Member) -> None:
    family = member.family
    back = family.from_distribution(family.distribution(member.eta))
    close(family.mean(back), family.mean(member.eta), 1e-10)


@every_family
def test_maximum_likelihood_matches_the_moments(member: Member) -> None:
    family = member.family
    x = family.sample(member.eta, (500,), torch.Generator().manual_seed(2))
    eta = family.fit(x)
    close(family.mean(eta), family.statistics(x).mean(0), 1e-9)
    assert bool((family.log_prob(eta, x).mean(0) >= family.log_prob(member.eta, x).mean(0)).all())


@every_family
def test_points_of_a_batch_do_not_see_each_other(member: Member) -> None:
    """Of a batch [2 3 *point], as of its points alone."""
    family, η = member.family, torch.stack([member.eta, member.eta2])
    xi = family.mean(η)
    for b in range(2):
        for n in range(3):
            close(xi[b, n], family.mean(η[b, n]), 1e-12)
            close(family.log_partition(η)[b, n], family.log_partition(η[b, n]), 1e-12)
            close(family.natural(xi)[b, n], family.natural(xi[b, n]), 1e-9)
            close(family.entropy(η)[b, n], family.entropy(η[b, n]), 1e-10)
            close(family.fisher(η).dense()[b, n], family.fisher(η[b, n]).dense(), 1e-12)


@every_family
def test_draws_depend_on_the_generator_alone_and_leave_the_global_stream(member: Member) -> None:
    state = torch.get_rng_state()
    first = member.family.sample(member.eta, (2, 3), torch.Generator().manual_seed(5))
    again = member.family.sample(member.eta, (2, 3), torch.Generator().manual_seed(5))
    assert torch.equal(first, again)
    assert torch.equal(state, torch.get_rng_state())
    assert first.shape[:3] == (2, 3, 3)


@every_family
def test_as_an_output_family_its_root_is_that_of_the_information(member: Member) -> None:
    family, y = member.family, torch.stack([member.eta, member.eta2], 1)  # [n terms *point]
    if isinstance(family, ng.Categorical):
        family = replace(family, axis=-1)
    family.check(y)
    assert family.terms(y) == 2
    dense = torch.stack([hessian(family, member.eta), hessian(family, member.eta2)], 1)
    expected = torch.stack([torch.block_diag(*blocks) for blocks in dense])
    close(outer(family.root(y)), expected, 1e-8)
    u = normal(*y.shape, seed=3)
    close(family.flat(y, u).flatten(1), (expected @ u.flatten(1).unsqueeze(-1)).squeeze(-1), 1e-8)
    close(ng.Fisher(family).flat(y, u), family.flat(y, u), 1e-12)
    divergence = family.bregman(member.eta2, member.eta) + family.bregman(member.eta, member.eta2)
    close(family.kl(y, y.flip(1)), divergence, 1e-10)  # summed over the two terms
    scores = family.scores(y, 3, torch.Generator().manual_seed(0))
    assert scores.shape == (3, *y.shape)


@every_family
def test_single_precision_stays_single_and_close(member: Member) -> None:
    family, η = member.family, member.eta.float()
    x = family.sample(η, (), torch.Generator().manual_seed(0))
    xi = family.mean(η)
    values = (family.log_partition(η), xi, family.natural(xi), family.kl(η, η), family.entropy(η), x)
    assert {value.dtype for value in (*values, family.log_prob(η, x), family.fisher(η).flat(η))} == {torch.float32}
    close(family.mean(family.natural(xi)), xi, 1e-4)
    close(family.log_partition(η).double(), family.log_partition(member.eta), 1e-4)


@every_family
def test_function_transforms_see_the_charts(member: Member) -> None:
    """torch.func differentiates log Z, where no value can be looked at."""
    family, point = member.family, member.eta[0]
    found = torch.func.hessian(lambda a: family.log_partition(a).sum())(point)
    close(found.reshape(member.size, member.size), family.fisher(point).dense(), 1e-8)


@every_family
def test_function_transforms_see_the_information(member: Member) -> None:
    family, v = member.family, normal(*member.eta.shape, seed=3)
    for kind in ("flat", "sharp"):
        w = family.fisher(member.eta).flat(v) if kind == "sharp" else v
        got = torch.func.vmap(lambda η, w, kind=kind: getattr(family.fisher(η), kind)(w))(member.eta, w)
        close(got, getattr(family.fisher(member.eta), kind)(w), 1e-12)


@every_family
def test_the_information_is_differentiable_in_the_point_and_in_the_vector(member: Member) -> None:
    """∂(F v)/∂v is F, and ∂⟨u, F v⟩/∂η along w is the third derivative of log Z, which is symmetric."""
    family = member.family
    u, v, w = (normal(*member.eta.shape, seed=s) for s in (3, 4, 5))
    η, leaf = member.eta.clone().requires_grad_(), v.clone().requires_grad_()
    product = family.pair(u, family.fisher(η).flat(leaf)).sum()
    third, F_u = torch.autograd.grad(product, (η, leaf), materialize_grads=True)
    close(F_u, family.fisher(member.eta).flat(u), 1e-10)
    (turned,) = torch.autograd.grad(family.pair(w, family.fisher(η).flat(leaf)).sum(), η, materialize_grads=True)
    close((third * w).sum(), (turned * u).sum(), 1e-8)
    with torch.no_grad():
        assert not family.fisher(η).flat(leaf).requires_grad
