"""Domains: what is inside, how far the boundary is, and the longest step that stays inside."""

import math

import pytest
import torch

from natgrad import families as f
from natgrad.errors import DomainError
from natgrad.families.domains import Concave, Cone, Domain, DomainProduct, OpenBox, Simplex, Space
from tests.families.members import MEMBERS, Member
from tests.output.table import close, normal

every_family = pytest.mark.parametrize("member", MEMBERS.values(), ids=MEMBERS.keys())


def agrees_with_contains(domain: Domain, x: torch.Tensor, v: torch.Tensor, axes: int) -> None:
    """Points at 0.999 of the reach are inside, those at 1.001 outside; where it is infinite, far points are inside."""
    t = domain.reach(x, v)
    assert bool((t > 0).all())
    wide = t.unsqueeze(-1) if axes else t
    finite = t.isfinite()
    assert bool(domain.contains(x + 0.999 * wide.clamp(max=1e6) * v).all())
    assert not bool(domain.contains(x + 1.001 * wide.clamp(max=1e6) * v)[finite].any())


@every_family
def test_the_reach_ends_at_the_boundary_of_the_natural_domain(member: Member) -> None:
    family = member.family
    assert bool(family.contains(member.eta).all())
    for seed in range(4):
        agrees_with_contains(family.natural_domain, member.eta, normal(*member.eta.shape, seed=seed), family.axes)
        close(
            family.reach(member.eta, normal(*member.eta.shape, seed=seed)),
            family.natural_domain.reach(member.eta, normal(*member.eta.shape, seed=seed)),
        )


@every_family
def test_the_reach_ends_at_the_boundary_of_the_mean_domain(member: Member) -> None:
    family = member.family
    xi = family.mean(member.eta)
    for seed in range(4):
        v = family.fisher(member.eta).flat(normal(*member.eta.shape, seed=seed))  # a tangent vector of the chart
        agrees_with_contains(family.mean_domain, xi, v, family.axes)


@every_family
def test_the_margin_is_the_radius_of_a_ball_inside(member: Member) -> None:
    """Of both domains; a step of 0.999 of it in any direction stays inside."""
    family = member.family
    for domain, x in ((family.natural_domain, member.eta), (family.mean_domain, family.mean(member.eta))):
        radius = domain.margin(x).clamp(max=1e3)
        assert bool((radius > 0).all())
        for seed in range(6):
            v = normal(*x.shape, seed=seed)
            if isinstance(domain, Simplex):
                v = v - v.mean(-1, keepdim=True)
            unit = v / (v.norm(dim=-1, keepdim=True) if family.axes else v.abs())
            wide = radius.unsqueeze(-1) if family.axes else radius
            assert bool(domain.contains(x + 0.999 * wide * unit).all())


def test_the_margin_of_a_precision_is_its_distance_to_a_singular_matrix() -> None:
    member = MEMBERS["gaussian"]
    Λ = member.family.information_form(member.eta)[1]  # type: ignore[attr-defined]
    close(member.family.margin(member.eta), torch.linalg.eigvalsh(Λ)[..., 0])


def test_the_margin_is_negative_outside() -> None:
    assert float(OpenBox(0.0, axes=0).margin(torch.tensor(-2.0))) == -2.0
    assert float(OpenBox(0.0).margin(torch.tensor([1.0, -2.0]))) == -2.0
    assert float(OpenBox((-math.inf, 0.0)).margin(torch.tensor([1.0, -2.0]))) == -2.0
    assert float(f.FullGaussian().margin(torch.tensor([0.0, -3.0]))) == -3.0


def test_a_domain_without_a_boundary_has_an_infinite_margin() -> None:
    assert float(f.Poisson().margin(torch.tensor(3.0))) == math.inf
    assert float(f.VonMises().margin(torch.zeros(2))) == math.inf
    assert float(f.VonMises().reach(torch.zeros(2), torch.ones(2))) == math.inf


def test_a_product_contains_a_point_if_every_block_is_inside() -> None:
    product = DomainProduct((OpenBox(0.0, axes=0), OpenBox((0.0, -1.0))), (2, -1))
    x = torch.tensor([[1.0, 2.0, 3.0, 0.0], [1.0, -2.0, 3.0, 0.0], [1.0, 2.0, 3.0, -2.0]])
    assert product.contains(x).tolist() == [True, False, False]
    assert product.margin(x).tolist() == [1.0, -2.0, -1.0]
    assert product.reach(x[:1], torch.tensor([[-1.0, 1.0, -6.0, 0.0]])).tolist() == [0.5]
    close(product.slacks(x).amin(-1), product.margin(x))
    with pytest.raises(DomainError, match=r"x \(block 0\)\[1, 1\] = -2 must be above 0"):
        product.check(x, "x")


def test_a_point_that_is_not_a_number_is_not_inside() -> None:
    nan = torch.tensor([math.nan, 1.0])
    for domain in (
        Space(),
        OpenBox(),
        OpenBox((-math.inf, 0.0)),
        Simplex(),
        Concave(lambda x: x[..., :1], ("x above 0",)),
    ):
        assert not bool(domain.contains(nan))
        with pytest.raises(DomainError, match=r"x\[0\] = nan must be finite"):
            domain.check(nan, "x")
    assert not bool(Space(axes=0).contains(torch.tensor(math.inf)))
    cone = Cone(lambda x: torch.diag_embed(x), "the diagonal")
    with pytest.raises(DomainError, match=r"x\[0\] = nan must be finite"):
        cone.check(nan, "x")


@pytest.mark.parametrize("d", [2, 3, 5])
def test_a_member_that_is_not_a_number_leaves_the_others_of_its_batch_alone(d: int) -> None:
    A = normal(4, d, d)
    eta = torch.cat([normal(4, d), (A @ A.mT + torch.eye(d)).flatten(-2)], -1)
    with_nan = eta.clone()
    with_nan[1] = math.nan
    margins, rest = f.FullGaussian().margin(with_nan), [0, 2, 3]
    assert bool(margins[1].isnan())
    close(margins[rest], f.FullGaussian().margin(eta)[rest])


@pytest.mark.parametrize("domain", [Space(), OpenBox(0.0), OpenBox(upper=0.0), OpenBox(-1.0, 3.0), Simplex()], ids=repr)
def test_the_centre_lies_inside_and_the_closure_holds_the_boundary(domain: Domain) -> None:
    centre = domain.centre(torch.zeros(2, 3))
    domain.check(centre, "x")
    assert bool(domain.contains(centre).all())
    v = torch.tensor([-1.0, 0.5, 0.5]) if isinstance(domain, Simplex) else torch.tensor([-1.0, -1.0, -1.0])
    v = -v if domain == OpenBox(upper=0.0) else v
    t = domain.reach(centre, v)
    if bool(t.isfinite().all()):
        boundary = centre + t.unsqueeze(-1) * v
        domain.check_closure(boundary, "x")
        with pytest.raises(DomainError, match=r"x\[0, 0\] = .* must be (above|below)"):
            domain.check(boundary, "x")
        with pytest.raises(DomainError, match=r"x.* must be at (least|most)"):
            domain.check_closure(boundary + 0.5 * v, "x")


def test_a_closure_without_bounds_of_its_entries_is_told_by_its_slacks() -> None:
    disc = Concave(lambda x: 1 - x.norm(dim=-1, keepdim=True), ("a length below 1",))
    disc.check_closure(torch.tensor([[1.0, 0.0], [0.0, 0.5]]), "x")
    with pytest.raises(DomainError, match=r"x\[1\] lies outside Concave"):
        disc.check_closure(torch.tensor([[1.0, 0.0], [0.0, 1.5]]), "x")
    with pytest.raises(TypeError, match="has no centre to start from: use Space, OpenBox or Simplex"):
        disc.centre(torch.zeros(2))
