"""Exponential families: two charts, the convex function between them, and the information in both."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from natgrad.errors import DomainError, UnsolvedError
from natgrad.families.base import Family, by_terms, check_alike, check_event, check_event_axes, over_terms, seeded
from natgrad.families.domains import Domain, Interval, check_finite, entry, first
from natgrad.families.information import Information, Scalar
from natgrad.linalg import symmetric_root

_ROUNDING = 256  # units in the last place


class ExponentialFamily(Family):
    """p(x | η) = h(x) exp(⟨η, t(x)⟩ − log Z(η)) (002 (11)).

    Natural parameters η and mean parameters ξ = E t(x) = ∇log Z(η) (002 (13)) are two charts of the same family. A
    point of either chart is one tensor [*batch p], and [*batch] where one number is the parameter (``axes`` = 0); sizes
    come from its shape, and what is computed of it has shape [*batch]. Data are [*batch *event], as in
    torch.distributions.

    As an output family the outputs y [n *terms p] are natural parameters, and ``kl`` sums over the terms.

    On a CPU a point outside its domain raises a DomainError. A GPU is not waited for, except by ``fit``,
    ``distribution`` and the Newton iterations of ``natural``.
    """

    # The family itself

    @property
    def axes(self) -> int:
        """How many trailing axes make one point: 1, or 0 where the parameter is one number."""
        return 1

    @property
    @abstractmethod
    def natural_domain(self) -> Domain:
        """Where η may lie."""

    @property
    @abstractmethod
    def mean_domain(self) -> Domain:
        """Where ξ may lie: the inside of the convex hull of the values of t."""

    @property
    @abstractmethod
    def support(self) -> Constraint:
        """Where x may lie."""

    def statistics(self, x: Tensor) -> Tensor:
        """t(x), of the shape of a point: the datum itself, if a family does not say otherwise."""
        return x

    @abstractmethod
    def log_base(self, x: Tensor) -> Tensor:
        """log h(x) [*batch], the base measure."""

    @abstractmethod
    def distribution(self, eta: Tensor) -> Distribution:
        """The same as a ``torch.distributions`` object."""

    @abstractmethod
    def from_distribution(self, d: Distribution) -> Tensor:
        """η of a ``torch.distributions`` object of this family."""

    def event_shape(self, p: int) -> tuple[int, ...]:
        """The shape of one datum, of a point with p entries."""
        return ()

    def _width(self, p: int) -> str:
        """What the last axis of a point must hold, if p entries are wrong; nothing if they are right."""
        return ""

    @abstractmethod
    def _log_partition(self, eta: Tensor) -> Tensor: ...

    @abstractmethod
    def _mean(self, eta: Tensor) -> Tensor: ...

    @abstractmethod
    def _natural(self, xi: Tensor) -> Tensor: ...

    @abstractmethod
    def _fisher(self, eta: Tensor) -> Information: ...

    @abstractmethod
    def _expected_log_base(self, eta: Tensor) -> Tensor:
        """E log h(x) [*batch]."""

    # Charts

    def log_partition(self, eta: Tensor) -> Tensor:
        """log Z(η) = log ∫ h(x) exp⟨η, t(x)⟩ dx [*batch] (002 (12)), convex and smooth."""
        return self._log_partition(self._inside(eta, self.natural_domain, "eta"))

    def mean(self, eta: Tensor) -> Tensor:
        """ξ = ∇log Z(η) = E t(x) (002 (13))."""
        return self._mean(self._inside(eta, self.natural_domain, "eta"))

    def natural(self, xi: Tensor) -> Tensor:
        """η with ∇log Z(η) = ξ, differentiable; the gradient of the conjugate of log Z."""
        return self._natural(self._inside(xi, self.mean_domain, "xi"))

    def fisher(self, eta: Tensor) -> Information:
        """F_η = Cov t = ∇²log Z = ∂ξ/∂η (002 (16)–(19))."""
        return self._fisher(self._inside(eta, self.natural_domain, "eta"))

    def fisher_mean(self, xi: Tensor) -> Information:
        """F_ξ = ∂η/∂ξ = F_η⁻¹, at the same distribution (002 (19))."""
        return self._fisher(self.natural(xi)).inverse()

    # Divergence, entropy, density

    def bregman(self, eta: Tensor, eta2: Tensor) -> Tensor:
        """D(η, η') = log Z(η) − log Z(η') − ⟨ξ', η − η'⟩ = KL(p_η' ‖ p_η) [*batch]: the order turns (ERRATA 35)."""
        self._alike(eta, eta2, "eta2")
        for point, what in ((eta, "eta"), (eta2, "eta2")):
            self._inside(point, self.natural_domain, what)
        return self._bregman(eta, eta2)

    def _bregman(self, eta: Tensor, eta2: Tensor) -> Tensor:
        here, there = self._log_partition(eta2), self._log_partition(eta)
        slope, δ = self._mean(eta2), eta - eta2
        plain = there - here - self.pair(slope, δ)
        # Where the difference is lost in rounding, Simpson's rule for ∫₀¹ ⟨ξ(η' + sδ) − ξ', δ⟩ ds is not.
        middle = self.pair(self._mean(eta2 + 0.5 * δ) - slope, δ)
        near = (4 * middle + self.pair(self._mean(eta) - slope, δ)) / 6
        lost = _ROUNDING * torch.finfo(plain.dtype).eps * (here.abs() + there.abs())
        return torch.where((plain - near).abs() <= lost, near, plain)

    def kl(self, eta: Tensor, eta2: Tensor) -> Tensor:
        """KL(p_η ‖ p_η') = D(η', η), in nats: [] of one point, [n] of points [n *terms p], summed over the terms."""
        return over_terms(self.bregman(eta2, eta))

    def entropy(self, eta: Tensor) -> Tensor:
        """H = log Z − ⟨η, ξ⟩ − E log h [*batch], in nats; in double precision, for these are large and cancel."""
        η = self._inside(eta, self.natural_domain, "eta").double()
        H = self._log_partition(η) - self.pair(η, self._mean(η)) - self._expected_log_base(η)
        return H.to(eta.dtype)

    def log_prob(self, eta: Tensor, x: Tensor) -> Tensor:
        """log p(x | η) = ⟨η, t(x)⟩ − log Z(η) + log h(x) [*batch]; x may have more batch axes in front."""
        log_Z = self.log_partition(eta)
        self.check_data(x)
        check_event(type(self).__name__, self.event_shape(eta.shape[-1]) if self.axes else (), x)
        x = x if x.is_floating_point() else x.to(eta.dtype)
        t = self.statistics(x)
        self._alike(eta, t, "the data")
        t = torch.where((eta == 0) & t.isinf(), torch.zeros_like(t), t)  # x⁰ is 1 where log x is not finite, too
        return self.pair(eta, t) - log_Z + self.log_base(x)

    def pair(self, eta: Tensor, xi: Tensor) -> Tensor:
        """⟨η, ξ⟩ [*batch]."""
        return (eta * xi).sum(-1) if self.axes else eta * xi

    # Samples and data

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """x [*shape *batch *event], without a gradient."""
        if eta.numel() == 0:  # of which torch makes no distributions
            batch = self.log_partition(eta).shape
            return eta.new_empty(*shape, *batch, *(self.event_shape(eta.shape[-1]) if self.axes else ()))
        with torch.no_grad(), seeded(generator, eta.device):
            return self.distribution(eta).sample(torch.Size(shape))

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """x [*shape *batch *event], with the gradient of the draw with respect to η, where x can be reparametrised."""
        d = self.distribution(eta)
        if not d.has_rsample:
            raise TypeError(
                f"draws of {type(self).__name__} cannot be differentiated: use sample, and the score t(x) − ξ"
            )
        with seeded(generator, eta.device):
            return d.rsample(torch.Size(shape))

    def fit(self, x: Tensor) -> Tensor:
        """η̂ of maximum likelihood: ξ̂ is the mean of t(x) over the first axis of x (002 (15), ERRATA 33)."""
        self.check_data(x)
        if x.ndim == self.support.event_dim:
            raise ValueError(f"{type(self).__name__}.fit needs data along the first axis, [n *event], got one datum")
        xi = self.statistics(x if x.is_floating_point() else x.to(torch.get_default_dtype())).mean(0)
        try:
            self.mean_domain.check(xi, "the mean of t")
            if bool(self.mean_domain.edge(xi).any()):
                raise DomainError("the mean of t is on the boundary, as of data that are all the same")
            return self._natural(xi)
        except DomainError as error:
            n = len(x)
            raise DomainError(
                f"{type(self).__name__} cannot be fitted to {n} {'datum' if n == 1 else 'data'}: the likelihood has no "
                f"maximum inside the family ({error}). Give more data, or start from a prior and step towards the mean"
            ) from error

    # Domain

    def contains(self, eta: Tensor) -> Tensor:
        """Whether η is in the domain [*batch], of booleans."""
        self._check_shape(eta, "eta")
        return self.natural_domain.contains(eta)

    def margin(self, eta: Tensor) -> Tensor:
        """The distance of η to the boundary of the domain [*batch]: negative outside, infinite if there is none."""
        self._check_shape(eta, "eta")
        return self.natural_domain.margin(eta)

    def reach(self, eta: Tensor, direction: Tensor) -> Tensor:
        """The longest step t [*batch] for which η + s·direction is in the domain for all 0 ≤ s < t."""
        self._check_shape(eta, "eta")
        self._check_shape(direction, "the direction")
        self._alike(eta, direction, "the direction")
        return self.natural_domain.reach(eta, direction)

    def check_data(self, x: Tensor) -> None:
        """Refuse data outside the support by entry; a GPU is not waited for."""
        check_event_axes(type(self).__name__, self.support.event_dim, x)
        if x.device.type == "cuda" or torch._C._are_functorch_transforms_active() or x.numel() == 0:
            return
        check_finite(x, f"{type(self).__name__}: x")
        wrong = ~self.support.check(x)
        if bool(wrong.any()):
            at = first(wrong)
            value = f" = {float(x[at]):.6g}" if x[at].ndim == 0 else ""
            raise ValueError(
                f"x{entry(at)}{value} lies outside the support of {type(self).__name__}, {self.support}: remove it, or "
                "choose another family"
            )

    # As an output family

    def check(self, y: Tensor) -> None:
        """Refuse outputs that are not natural parameters [n *terms p]."""
        if y.ndim < 1 + self.axes:
            raise ValueError(f"{type(self).__name__} needs outputs [n … p], got outputs of shape {tuple(y.shape)}")
        self._inside(y, self.natural_domain, "y")

    def terms(self, y: Tensor) -> int:
        return y.shape[1 : y.ndim - self.axes].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._fisher(y).flat(u)

    def root(self, y: Tensor) -> Tensor:
        F = self._fisher(y).dense()
        p = F.shape[-1]
        root = symmetric_root(F.reshape(-1, p, p), "the Fisher metric is indefinite").view(F.shape)
        columns = by_terms(root.movedim(-1, 0))
        return columns if self.axes else columns.squeeze(-1)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return self.statistics(self.sample(y, (samples,), generator)) - self._mean(y)

    # Checks

    def _inside(self, point: Tensor, domain: Domain, what: str) -> Tensor:
        self._check_shape(point, what)
        if point.device.type != "cuda" and not torch._C._are_functorch_transforms_active():
            domain.check(point, f"{type(self).__name__}: {what}")
        return point

    def _check_shape(self, point: Tensor, what: str) -> None:
        name = type(self).__name__
        if not point.is_floating_point():
            raise TypeError(f"{what} of {name} must be floating-point numbers, got {point.dtype}")
        if self.axes and point.ndim == 0:
            raise ValueError(f"{what} of {name} must have its entries on the last axis, [*batch p], got one number")
        wrong = self._width(point.shape[-1]) if self.axes else ""
        if wrong:
            raise ValueError(f"{what} of {name} must have {wrong} on the last axis, got shape {tuple(point.shape)}")

    def _alike(self, eta: Tensor, other: Tensor, what: str) -> None:
        check_alike(type(self).__name__, self.axes, eta, other, what)


def expect(family: ExponentialFamily, d: Distribution, *kinds: type[Distribution]) -> None:
    """Refuse a distribution that is not of the family."""
    if not isinstance(d, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(family).__name__}.from_distribution needs a {names}, got {type(d).__name__}")


# The way from the mean chart to the natural one, where it has no closed form: a safeguarded Newton iteration.


_STEPS = 200
_HALVINGS = 40
_QUADRATIC = 1e-6  # below this squared decrement a full step squares it
_POLISHING = 3  # full steps from there


def solved(family: ExponentialFamily, xi: Tensor, start: Tensor) -> Tensor:
    """η with ∇log Z(η) = ξ, from a start inside the domain; ∂η/∂ξ = F⁻¹ by the implicit function theorem.

    η minimises the convex log Z(η) − ⟨ξ, η⟩. Newton steps −F⁻¹(∇log Z − ξ) are kept to nine tenths of the way to the
    boundary and halved until the function falls, every point of a batch by itself, in double precision.
    """
    with torch.no_grad():
        eta = _newton(family, xi.detach().double(), start.detach().double()).to(xi.dtype)
    found: Tensor = _Implicit.apply(xi, eta, family)  # type: ignore[no-untyped-call]
    return found


def _newton(family: ExponentialFamily, xi: Tensor, eta: Tensor) -> Tensor:
    left = _POLISHING
    for _ in range(_STEPS):
        residual = family._mean(eta) - xi
        δ = -family._fisher(eta).sharp(residual)
        decrement = -family.pair(residual, δ)
        near, lost = decrement.abs() < _QUADRATIC, decrement.isnan()
        δ = torch.where(lost.unsqueeze(-1) if family.axes else lost, 0.0, δ)  # such a member stays, and is named below
        t = (0.9 * family.reach(eta, δ)).clamp(max=1.0)
        if bool((near | lost).all()):
            if left == 0 or bool(lost.any()):
                break
            left -= 1
        eta = eta + _halved(family, xi, eta, δ, t, near | lost)
    if not bool(near.all()):
        raise UnsolvedError(
            f"no natural parameters of {type(family).__name__} were found for these mean parameters in {_STEPS} Newton "
            "steps: they lie too near the boundary of their domain for this precision. Use float64, or moments of more "
            "data",
            near,
        )
    return eta


def _halved(family: ExponentialFamily, xi: Tensor, eta: Tensor, δ: Tensor, t: Tensor, near: Tensor) -> Tensor:
    """The step, halved until the function falls; near the minimum its values are rounding, and are not asked."""
    here = family._log_partition(eta) - family.pair(xi, eta)
    slope = family.pair(family._mean(eta) - xi, δ)
    for _ in range(_HALVINGS):
        step = t.unsqueeze(-1) * δ if family.axes else t * δ
        there = family._log_partition(eta + step) - family.pair(xi, eta + step)
        falls = near | (there <= here + 1e-4 * t * slope)
        if bool(falls.all()):
            break
        t = torch.where(falls, t, 0.5 * t)
    return step


@final
class _Implicit(torch.autograd.Function):
    """ξ ↦ η, of which only the value was found: the backward pass is F(η)⁻¹, which may be differentiated again."""

    @staticmethod
    def forward(xi: Tensor, eta: Tensor, family: ExponentialFamily) -> Tensor:
        return eta.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, ExponentialFamily], output: Tensor) -> None:
        ctx.family = inputs[2]
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Any, *covectors: Tensor) -> tuple[Tensor, None, None]:
        (eta,) = ctx.saved_tensors
        return ctx.family._fisher(eta).sharp(covectors[0]), None, None


# Families of one number η < 0 whose statistic has a mean in (0, ∞): what they share.


class Decaying(ExponentialFamily):
    """e^{η t(x)} with t ≥ 0 can be normalised for η < 0 only."""

    @property
    def axes(self) -> int:
        return 0

    @property
    def natural_domain(self) -> Domain:
        return Interval(upper=0.0)

    @property
    def mean_domain(self) -> Domain:
        return Interval(0.0)


class ExponentialStatistic(Decaying):
    """t(x) is exponentially distributed: log Z = −log(−η) up to a constant, ξ = −1/η, G = 1/η²."""

    def _log_partition(self, eta: Tensor) -> Tensor:
        return -(-eta).log()

    def _mean(self, eta: Tensor) -> Tensor:
        return -1 / eta

    def _natural(self, xi: Tensor) -> Tensor:
        return -1 / xi

    def _fisher(self, eta: Tensor) -> Information:
        return Scalar(eta.square().reciprocal())
