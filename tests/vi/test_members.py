"""Variational inference in every shipped family, in batches."""

from __future__ import annotations

import pytest
import torch

import natgrad as ng
from tests.families.members import MEMBERS


@pytest.mark.parametrize("name", MEMBERS)
def test_from_every_member_of_a_family_one_step_reaches_any_other_whose_density_is_given(name: str) -> None:
    """log p(z) of η2 up to a constant is the model, as a black box; compared in the mean chart."""
    member = MEMBERS[name]
    family, eta2 = member.family, member.eta2
    posterior = ng.vi.Posterior(family, lambda z: family.pair(eta2, family.statistics(z)) + family.log_base(z))
    rare = ng.vi.Regression(2000)  # so that every class is drawn
    move = posterior.step(member.eta, estimator=rare, generator=torch.Generator().manual_seed(0))
    assert not bool(move.shortened.any())
    torch.testing.assert_close(family.mean(move.point), family.mean(eta2), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("name", MEMBERS)
def test_half_a_step_is_half_way_in_the_natural_chart(name: str) -> None:
    member = MEMBERS[name]
    posterior = ng.vi.Posterior(member.family, prior=member.eta2)
    torch.testing.assert_close(posterior.step(member.eta, rate=0.5).point, 0.5 * (member.eta + member.eta2))


@pytest.mark.parametrize("name", MEMBERS)
def test_the_bound_of_a_prior_alone_is_minus_the_divergence_from_it(name: str) -> None:
    member = MEMBERS[name]
    family = member.family
    bound = ng.vi.Posterior(family, prior=member.eta2).elbo(member.eta)
    torch.testing.assert_close(bound, -family.bregman(member.eta2, member.eta), rtol=1e-8, atol=1e-9)
