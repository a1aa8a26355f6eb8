"""Online maximum likelihood: with the right schedule every iterate of mirror descent is the batch estimate."""

import pytest
import torch

import natgrad as ng
from natgrad.errors import DomainError
from natgrad.mirror import MeanChart, Member, Online, natural_step
from tests.mirror.members import CASES, Case, t

every = pytest.mark.parametrize("case", CASES, ids=repr)


def samples(case: Case, n: int) -> torch.Tensor:
    return case.family.sample(case.eta, (n,), torch.Generator().manual_seed(1))


@every
def test_one_datum_at_a_time_is_the_batch_estimate_of_all(case: Case) -> None:
    """Grosse (2021), (24)–(25) with α_k = 1/(k + 1), from the first datum on."""
    x = samples(case, 40)
    estimate = Online.of(case.family, x[:1])
    for k in range(1, 40):
        estimate = estimate.update(x[k : k + 1])
        torch.testing.assert_close(estimate.xi, case.family.statistics(x[: k + 1]).mean(0), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(estimate.eta, case.family.fit(x), rtol=1e-8, atol=1e-8)
    assert estimate.count == 40


@every
def test_data_in_pieces_of_any_size_give_the_same_estimate(case: Case) -> None:
    x = samples(case, 40)
    estimate = Online.of(case.family, x[:7]).update(x[7:20]).update(x[20:])
    torch.testing.assert_close(estimate.xi, case.family.statistics(x).mean(0), rtol=1e-12, atol=1e-12)


@every
def test_the_update_is_a_natural_gradient_step_of_the_log_likelihood(case: Case) -> None:
    """In the mean chart, where −∇_ξ log p = F_ξ(ξ − t), from autodiff of ``log_prob`` through the chart."""
    family, x = case.family, samples(case, 1)
    xi = case.xi.requires_grad_()
    (-family.log_prob(family.natural(xi), x)).sum().backward()
    assert xi.grad is not None
    move = natural_step(family, xi.detach(), xi.grad, 1 / 11, MeanChart())
    assert not bool(move.shortened.any())
    torch.testing.assert_close(move.point, Online(family, xi.detach(), 10).update(x).xi, rtol=1e-9, atol=1e-9)


@every
def test_the_optimizer_with_the_schedule_one_over_k_plus_one_is_the_batch_estimate(case: Case) -> None:
    first, n = 20, 30
    x = samples(case, n)
    start = case.family.fit(x[:first])
    member = Member(case.family, start)
    opt = ng.MirrorDescent([member], lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(opt, lambda k: 1 / (first + k + 1))
    for k in range(first, n):
        opt.zero_grad()
        (-case.family.log_prob(member.natural(), x[k])).sum().backward()
        opt.step()
        schedule.step()
        assert opt.reasons() == ()
    expected = case.family.statistics(x).mean(0)
    torch.testing.assert_close(member.mean().detach(), expected, rtol=1e-9, atol=1e-9)


def test_a_prior_counts_as_so_many_data() -> None:
    prior = Online(ng.families.Bernoulli(), t(0.5)[0], 2)
    torch.testing.assert_close(prior.update(t(1.0)).xi, t(2 / 3)[0])
    assert bool(prior.update(t(1.0)).eta > 0)


def test_counts_may_be_integers() -> None:
    for family, x in ((ng.families.Poisson(), [3, 1, 4]), (ng.families.Bernoulli(), [1, 0, 1])):
        data = torch.tensor(x)
        estimate = Online.of(family, data[:2]).update(data[2:])
        torch.testing.assert_close(estimate.xi, data.float().mean())
        exact = Online(family, data[:2].double().mean(), 2).update(data[2:])
        torch.testing.assert_close(exact.xi, data.double().mean())


def test_moments_on_the_boundary_have_no_natural_parameters_and_say_so() -> None:
    one = Online.of(ng.families.FullGaussian(), t(1.0, 2.0)[None])
    with pytest.raises(DomainError, match=r"FullGaussian has no member with the moments of these 1 data.*from a prior"):
        _ = one.eta
    with pytest.raises(DomainError, match=r"Bernoulli has no member.*Wait for more data"):
        _ = Online.of(ng.families.Bernoulli(), t(1.0, 1.0)).eta


def test_data_of_a_wrong_kind_are_refused_and_the_estimate_is_as_it_was() -> None:
    estimate = Online.of(ng.families.Poisson(), t(3.0))
    with pytest.raises(ValueError, match="outside the support of Poisson"):
        estimate.update(t(-1.0))
    with pytest.raises(ValueError, match=r"statistics of the data have shape \(2,\) and ξ has \(\)"):
        estimate.update(torch.ones(1, 2, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"data must be \[n \*batch \*event\] with n ≥ 1"):
        estimate.update(torch.empty(0, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"count=0 must be positive"):
        Online(ng.families.Poisson(), t(1.0)[0], 0)
    assert float(estimate.xi) == 3.0
