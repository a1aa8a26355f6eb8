"""Steps of any length, in any family, chart and precision: every iterate is a member, and the next step works."""

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import DomainError, NonFiniteError, UnsolvedError
from natgrad.mirror import Forbid, MeanChart, Member, NaturalChart, mirror_step, natural_step
from tests.mirror.members import CASES, Case, t

every = pytest.mark.parametrize("case", CASES, ids=repr)
CHARTS = [NaturalChart(), MeanChart()]
STEPS, MEMBERS = 4, 4


def gradients(case: Case, chart: ng.mirror.Chart, generator: torch.Generator) -> Tensor:
    """Covectors of a chart for every member, of scales from 1e-12 to 1e12."""
    start = case.eta.expand(MEMBERS, *case.eta.shape)
    noise = torch.randn(start.shape, dtype=torch.float64, generator=generator).reshape(MEMBERS, -1)
    along = noise @ (case.fisher if chart == CHARTS[0] else case.projector)
    scale = 10 ** (24 * torch.rand(MEMBERS, 1, dtype=torch.float64, generator=generator) - 12)
    return (scale * along).view_as(start)


@every
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_every_iterate_of_mirror_descent_is_a_member_in_both_charts(
    case: Case, chart: ng.mirror.Chart, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = (case.eta if chart == CHARTS[0] else case.xi).to(dtype)
    member = Member(case.family, start.expand(MEMBERS, *start.shape), chart)
    opt = ng.MirrorDescent([member], lr=1.0, momentum=0.5, descent=mirror_step)
    for _ in range(STEPS):
        member.point.grad = gradients(case, chart, generator).to(dtype)
        opt.step()
        assert bool(case.family.natural_domain.contains(member.natural()).all())
        assert bool(case.family.mean_domain.contains(member.mean()).all())
        ((_, move),) = opt.last
        assert len(opt.reasons()) == int(move.shortened.sum())


@every
@pytest.mark.parametrize("chart", CHARTS, ids=lambda chart: type(chart).__name__)
def test_every_iterate_of_natural_gradient_is_a_member_or_its_step_overflows(
    case: Case, chart: ng.mirror.Chart
) -> None:
    generator = torch.Generator().manual_seed(0)
    start = case.eta if chart == CHARTS[0] else case.xi
    member = Member(case.family, start.expand(MEMBERS, *start.shape), chart)
    opt = ng.MirrorDescent([member], lr=1.0, descent=natural_step)
    for _ in range(STEPS):
        before, member.point.grad = member.point.detach().clone(), gradients(case, chart, generator)
        try:
            opt.step()
        except NonFiniteError:
            assert torch.equal(before, member.point)
        assert bool(chart.domain(case.family).contains(member.point).all())


def test_a_step_onto_a_probability_of_1_in_rounding_is_shortened_and_says_so() -> None:
    """η = 10⁷ is in the domain of η, and its ξ is rounded to 1: from there no step would lead back."""
    b = ng.families.Bernoulli()
    move = mirror_step(b, t(0.5, 0.5), t(-1e7, -1.0), 1.0, CHARTS[1])
    assert move.shortened.tolist() == [True, False]
    assert 0.999 < float(move.point[0]) < 1.0
    torch.testing.assert_close(move.point[1], t(1.0)[0].sigmoid())
    (reason,) = move.reasons
    assert "ξ of Bernoulli[0] = 1 must be below 1" in reason
    back = mirror_step(b, move.point, t(1.0, 0.0), 1.0, CHARTS[1])
    assert float(back.point[0]) < float(move.point[0])
    with pytest.raises(DomainError, match=r"ξ of Bernoulli\[0\] = 1 must be below 1.*shorter steps"):
        mirror_step(b, t(0.5, 0.5), t(-1e7, -1.0), 1.0, CHARTS[1], Forbid())


def test_a_member_that_starts_where_xi_is_rounded_may_still_take_natural_steps() -> None:
    b = ng.families.Bernoulli()
    move = natural_step(b, t(50.0), b.fisher(t(50.0)).flat(t(5.0)), 1.0, CHARTS[0])
    torch.testing.assert_close(move.point, t(45.0))


def test_a_step_that_overflows_is_refused_by_name() -> None:
    p = ng.families.Poisson()
    with pytest.raises(NonFiniteError, match=r"the step in η of Poisson is -inf at \[0\].*Nothing was changed"):
        natural_step(p, t(-600.0, 0.0), t(1e100, 0.0), 1.0, CHARTS[0])


def test_negative_moments_are_outside_an_inverse_gaussian() -> None:
    """E 1/x below 0 makes 1 − 1/(E x E 1/x) positive as well: the sign is asked by itself."""
    family = ng.families.InverseGaussian()
    assert not bool(family.mean_domain.contains(t(2.0, -3.0)))
    with pytest.raises(DomainError, match="E 1/x above 0"):
        family.natural(t(2.0, -3.0))


def test_newton_names_the_members_that_it_did_not_find_and_finds_the_others() -> None:
    """ξ of a beta distribution with a + b = 10¹⁷ is told from the boundary by less than rounding."""
    family = ng.families.Beta()
    good = family.mean(t(1.2, 2.1))
    far = t(0.5, 0.5).log() - 4e-16
    with pytest.raises(UnsolvedError, match="too near the boundary of their domain for this precision") as caught:
        family.natural(torch.stack([good, far]))
    assert caught.value.solved.tolist() == [True, False]
