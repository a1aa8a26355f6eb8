"""Families of distributions: ``Family``, what a metric needs to know of p(t | y), and ``ExponentialFamily``.

An exponential family has two charts (natural parameters η, mean parameters ξ), one convex function log Z between them,
and one metric, the Fisher information.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from hashlib import blake2b
from typing import Any, TypeVar, final

import torch
from torch import Tensor
from torch.distributions import Distribution
from torch.distributions.constraints import Constraint

from natgrad.accelerate.devices import can_read, seeded_streams
from natgrad.errors import DomainError, UnsolvedError
from natgrad.families.domains import Domain, entry, first, refuse_non_finite
from natgrad.families.information import Information
from natgrad.linalg import newton, symmetric_root

D = TypeVar("D", bound=Distribution)
_ROUNDING = 256  # units in the last place
_QUADRATIC = 1e-6  # nats: below this squared Newton decrement a full step squares the error


class Family(ABC):
    """The base class of output families: how a model's outputs define a distribution of targets.

    A Fisher metric (``ng.Fisher``) takes one. Several independent terms an example (pixels, tokens) multiply.

    Method:
        p(t | y) for outputs y [n *out].

        The Fisher metric in the chart y is F = E[∇log p ∇log pᵀ], with targets drawn from the model (Amari 1998).
    """

    @property
    def as_metric(self) -> str:
        """What to write where a metric is expected, for an error message."""
        return f"a family: write Fisher({self!r})"

    @property
    def needs_target(self) -> bool:
        """Whether the target of a batch holds something the outputs do not, such as a mask."""
        return False

    def given(self, target: Any) -> Family:
        """The family of the outputs of a batch with this target."""
        return self

    @abstractmethod
    def check(self, y: Tensor) -> None:
        """Raise if the shape of the outputs does not fit the family."""

    @abstractmethod
    def terms(self, y: Tensor) -> int:
        """The number of independent distributions an example has."""

    def unflattened(self) -> Family:
        """The same family for outputs whose first axis has been split in two, [n·t *out] → [n t *out]."""
        return self

    def last(self, y: Tensor) -> Tensor:
        """Outputs [n *terms *out], with the axes of a term behind those that count the terms."""
        return y

    def over_outputs(self, w: Tensor, ndim: int) -> Tensor:
        """w [n *terms] with axes of length 1 where outputs of ``ndim`` axes have those of a term."""
        return w.reshape(*w.shape, *[1] * (ndim - w.ndim))

    @abstractmethod
    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        """F_y u [n *out]."""

    @abstractmethod
    def root(self, y: Tensor) -> Tensor:
        """s [k n *out] with Σ_k s sᵀ = F, exactly."""

    @abstractmethod
    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        """∇_y log p(t | y) [k n *out] at targets t drawn from the model itself; mean 0, covariance F."""

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor | None:
        """Σ_d ε_kd s_d [k n *out] over the columns of the root, with ε ~ N(0, 1) shared by all n.

        None if there is no shortcut, and the root itself is needed.
        """
        return None

    @abstractmethod
    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        """KL(p_y ‖ p_y2) [n], in nats, summed over the terms."""


class ExponentialFamily(Family):
    """The base class of exponential families, with natural and mean parameters as two charts.

    It gives densities, entropies, divergences, Fisher information, samples and fits, all from a few functions of the
    subclass.

    As an output family the outputs y [n *terms p] are natural parameters, and ``kl`` sums over the terms.

    On a CPU a point outside its domain raises a DomainError. On a GPU only ``fit``, ``distribution`` and the Newton
    iterations of ``natural`` wait for the device.

    Method:
        p(x | η) = h(x) exp(⟨η, t(x)⟩ − log Z(η)).

        Natural parameters η and mean parameters ξ = E t(x) = ∇log Z(η) are two charts of the same family (Amari 1998).
        A point of either chart is one tensor [*batch p], or [*batch] where the parameter is one number (``axes`` = 0).
        Sizes come from its shape, and results have shape [*batch]. Data are [*batch *event], as in torch.distributions.

        A subclass gives h, t, log Z, the maps between the charts and their domains. The information comes from
        automatic differentiation of those maps, unless the subclass has a closed form (``_fisher``).
    """

    # The family itself

    axes = 1  # trailing axes of a point: 1, or 0 where the parameter is one number

    @property
    @abstractmethod
    def natural_domain(self) -> Domain:
        """Where η may lie."""

    @property
    @abstractmethod
    def mean_domain(self) -> Domain:
        """Where ξ may lie: the interior of the convex hull of the values of t."""

    @property
    @abstractmethod
    def support(self) -> Constraint:
        """Where x may lie."""

    def statistics(self, x: Tensor) -> Tensor:
        """t(x), with the shape of a point; the datum itself by default."""
        return x

    def log_base(self, x: Tensor) -> Tensor:
        """log h(x) [*batch], the base measure; 0 by default."""
        return x.new_zeros(x.shape[: x.ndim - self.support.event_dim])

    def distribution(self, eta: Tensor) -> Distribution:
        """The same distribution as a ``torch.distributions`` object."""
        return self._distribution(self._inside(eta, self.natural_domain, "eta"))

    @abstractmethod
    def from_distribution(self, d: Distribution) -> Tensor:
        """η of a ``torch.distributions`` object of this family."""

    def event_shape(self, p: int) -> tuple[int, ...]:
        """The shape of one datum, for points with p entries."""
        return ()

    def _wrong_size(self, p: int) -> str:
        """What the last axis of a point must hold, if p entries are wrong; "" if they are right."""
        return ""

    @abstractmethod
    def _distribution(self, eta: Tensor) -> Distribution: ...

    @abstractmethod
    def _log_partition(self, eta: Tensor) -> Tensor: ...

    @abstractmethod
    def _mean(self, eta: Tensor) -> Tensor: ...

    @abstractmethod
    def _natural(self, xi: Tensor) -> Tensor: ...

    def _fisher(self, eta: Tensor) -> Information:
        """F = ∂ξ/∂η by automatic differentiation. A closed form is for accuracy, speed, or a ``natural`` by Newton."""
        return Information.by_autodiff(eta, self.axes, self._mean, self._natural)

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        """E log h(x) [*batch]; 0 by default."""
        return eta.new_zeros(eta.shape[: eta.ndim - self.axes])

    # Charts

    def log_partition(self, eta: Tensor) -> Tensor:
        """log Z(η) = log ∫ h(x) exp⟨η, t(x)⟩ dx [*batch], convex and smooth."""
        return self._log_partition(self._inside(eta, self.natural_domain, "eta"))

    def mean(self, eta: Tensor) -> Tensor:
        """ξ = ∇log Z(η) = E t(x)."""
        return self._mean(self._inside(eta, self.natural_domain, "eta"))

    def natural(self, xi: Tensor) -> Tensor:
        """η with ∇log Z(η) = ξ, differentiable: the gradient of the conjugate of log Z."""
        return self._natural(self._inside(xi, self.mean_domain, "xi"))

    def fisher(self, eta: Tensor) -> Information:
        """F_η = Cov t = ∇²log Z = ∂ξ/∂η."""
        return self._fisher(self._inside(eta, self.natural_domain, "eta"))

    def fisher_mean(self, xi: Tensor) -> Information:
        """F_ξ = ∂η/∂ξ = F_η⁻¹, at the same distribution."""
        return self._fisher(self.natural(xi)).inverse()

    # Divergence, entropy, density

    def bregman(self, eta: Tensor, eta2: Tensor) -> Tensor:
        """D(η, η') = log Z(η) − log Z(η') − ⟨ξ', η − η'⟩ = KL(p_η' ‖ p_η) [*batch]. Mind the order of the arguments.

        Computed in double precision, as ``entropy``: log Z can be a small difference of large numbers.
        """
        self._check_pair(eta, eta2, "eta2")
        for point, what in ((eta, "eta"), (eta2, "eta2")):
            self._inside(point, self.natural_domain, what)
        return self._bregman(eta.double(), eta2.double()).to(torch.promote_types(eta.dtype, eta2.dtype))

    def _bregman(self, eta: Tensor, eta2: Tensor) -> Tensor:
        here, there = self._log_partition(eta2), self._log_partition(eta)
        slope, δ = self._mean(eta2), eta - eta2
        plain = there - here - self.pair(slope, δ)
        # Where that difference is lost in rounding, Simpson's rule for ∫₀¹ ⟨ξ(η' + sδ) − ξ', δ⟩ ds keeps its digits.
        middle = self.pair(self._mean(eta2 + 0.5 * δ) - slope, δ)
        near = (4 * middle + self.pair(self._mean(eta) - slope, δ)) / 6
        lost = _ROUNDING * torch.finfo(plain.dtype).eps * (here.abs() + there.abs())
        return torch.where((plain - near).abs() <= lost, near, plain)

    def kl(self, eta: Tensor, eta2: Tensor) -> Tensor:
        """KL(p_η ‖ p_η') = D(η', η), in nats: [] for one point, [n] for points [n *terms p], summed over the terms."""
        return over_terms(self.bregman(eta2, eta))

    def entropy(self, eta: Tensor) -> Tensor:
        """H = log Z − ⟨η, ξ⟩ − E log h [*batch], in nats; computed in double precision, since large terms cancel."""
        η = self._inside(eta, self.natural_domain, "eta").double()
        H = self._log_partition(η) - self.pair(η, self._mean(η)) - self._expected_log_base(η)
        return H.to(eta.dtype)

    def log_prob(self, eta: Tensor, x: Tensor) -> Tensor:
        """log p(x | η) = ⟨η, t(x)⟩ − log Z(η) + log h(x) [*batch]; x may have more batch axes in front."""
        self._check_shape(eta, "eta")
        dtype = torch.promote_types(x.dtype, eta.dtype)  # of both: large terms cancel, also those of log h
        eta = eta.to(dtype)
        self._inside(eta, self.natural_domain, "eta")
        self.check_data(x)
        check_event(type(self).__name__, self.event_shape(eta.shape[-1]) if self.axes else (), x)
        x = x.to(dtype)
        t = self.statistics(x)
        self._check_pair(eta, t, "the data")
        t = torch.where((eta == 0) & t.isinf(), torch.zeros_like(t), t)  # x⁰ = 1 also where log x is infinite
        return self._log_density(eta, t) + self.log_base(x)

    def _log_density(self, eta: Tensor, t: Tensor) -> Tensor:
        """⟨η, t⟩ − log Z(η) [*batch]."""
        return self.pair(eta, t) - self._log_partition(eta)

    def pair(self, eta: Tensor, xi: Tensor) -> Tensor:
        """⟨η, ξ⟩ [*batch]."""
        return (eta * xi).sum(-1) if self.axes else eta * xi

    # Samples and data

    def sample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """x [*shape *batch *event], without a gradient."""
        if eta.numel() == 0:
            return self._no_draws(eta, shape)
        with torch.no_grad(), seeded(generator, eta.device):
            return self.distribution(eta).sample(torch.Size(shape))

    def rsample(self, eta: Tensor, shape: tuple[int, ...] = (), generator: torch.Generator | None = None) -> Tensor:
        """x [*shape *batch *event], differentiable in η by reparametrisation; refused where there is none."""
        if eta.numel() == 0:
            return self._no_draws(eta, shape)
        d = self.distribution(eta)
        if not d.has_rsample:
            raise TypeError(
                f"draws of {type(self).__name__} cannot be differentiated: use sample, and the score t(x) − ξ"
            )
        with seeded(generator, eta.device):
            return d.rsample(torch.Size(shape))

    def _no_draws(self, eta: Tensor, shape: tuple[int, ...]) -> Tensor:
        """Draws of an empty batch, which torch.distributions refuses."""
        batch = self.log_partition(eta).shape
        return eta.new_empty(*shape, *batch, *(self.event_shape(eta.shape[-1]) if self.axes else ()))

    def fit(self, x: Tensor) -> Tensor:
        """η̂ of maximum likelihood: ξ̂ is the mean of t(x) over the first axis of x.

        Computed in double precision: far from 0 the spread of the data is in the last digits of their second moment.
        """
        self.check_data(x)
        if x.ndim == self.support.event_dim:
            raise ValueError(f"{type(self).__name__}.fit needs data along the first axis, [n *event], got one datum")
        xi = self.statistics(x.double()).mean(0)
        try:
            self.mean_domain.check(xi, "the mean of t")
            if bool(self.mean_domain.on_boundary(xi).any()):
                raise DomainError("the mean of t is on the boundary, as of data that are all the same")
            return self._natural(xi).to(x.dtype if x.is_floating_point() else torch.get_default_dtype())
        except DomainError as error:
            n = len(x)
            raise DomainError(
                f"{type(self).__name__} cannot be fitted to {n} {'datum' if n == 1 else 'data'}: the likelihood has no "
                f"maximum inside the family ({error}). Give more data, or start from a prior and step towards the mean"
            ) from error

    # Domain

    def contains(self, eta: Tensor) -> Tensor:
        """Whether η lies in the domain [*batch], booleans."""
        self._check_shape(eta, "eta")
        return self.natural_domain.contains(eta)

    def margin(self, eta: Tensor) -> Tensor:
        """The distance of η to the boundary of the domain [*batch]: negative outside, infinite if there is none."""
        self._check_shape(eta, "eta")
        return self.natural_domain.margin(eta)

    def reach(self, eta: Tensor, direction: Tensor) -> Tensor:
        """The longest step t [*batch] such that η + s·direction is in the domain for all 0 ≤ s < t."""
        self._check_shape(eta, "eta")
        self._check_shape(direction, "the direction")
        self._check_pair(eta, direction, "the direction")
        return self.natural_domain.reach(eta, direction)

    def check_data(self, x: Tensor) -> None:
        """Refuse data outside the support by entry. Values on a GPU are not read."""
        axes = self.support.event_dim
        if x.ndim < axes:
            raise ValueError(
                f"a datum of {type(self).__name__} has {axes} axes: data must be [*batch *event], got shape "
                f"{tuple(x.shape)}"
            )
        if not can_read(x) or x.numel() == 0:
            return
        refuse_non_finite(x, f"{type(self).__name__}: x")
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
        if can_read(point):
            domain.check(point, f"{type(self).__name__}: {what}")
        return point

    def _check_shape(self, point: Tensor, what: str) -> None:
        name = type(self).__name__
        if not isinstance(point, Tensor):
            raise TypeError(f"{what} of {name} must be a tensor, got a {type(point).__name__}: write torch.tensor(…)")
        if not point.is_floating_point():
            raise TypeError(f"{what} of {name} must be floating-point numbers, got {point.dtype}")
        if self.axes and point.ndim == 0:
            raise ValueError(f"{what} of {name} must have its entries on the last axis, [*batch p], got one number")
        wrong = self._wrong_size(point.shape[-1]) if self.axes else ""
        if wrong:
            raise ValueError(f"{what} of {name} must have {wrong} on the last axis, got shape {tuple(point.shape)}")

    def _check_pair(self, eta: Tensor, other: Tensor, what: str) -> None:
        """Refuse a second point whose batch does not broadcast with that of η, or whose size differs."""
        name = type(self).__name__
        mine, theirs = eta.shape[: eta.ndim - self.axes], other.shape[: other.ndim - self.axes]
        try:
            torch.broadcast_shapes(mine, theirs)
        except RuntimeError:
            raise ValueError(
                f"eta of {name} has the batch {tuple(mine)} and {what} has {tuple(theirs)}, which do not broadcast: "
                "give them the same batch, or 1 where one is shared"
            ) from None
        if self.axes and eta.shape[-1] != other.shape[-1]:
            raise ValueError(
                f"eta of {name} has {eta.shape[-1]} entries on the last axis and {what} has {other.shape[-1]}: they "
                "must be of one size"
            )


# From the mean chart to the natural one by Newton's method, where there is no closed form


def natural_by_newton(family: ExponentialFamily, xi: Tensor, start: Tensor) -> Tensor:
    """η with ∇log Z(η) = ξ, from a start inside the domain; ∂η/∂ξ = F⁻¹ by the implicit function theorem.

    η minimises the convex function log Z(η) − ⟨ξ, η⟩, in double precision. The family needs a ``_fisher`` of its own.
    """
    steps = 200
    target = xi.detach().double()
    with torch.no_grad():
        eta, decrement = newton(
            start.detach().double(),
            value=lambda η: family._log_partition(η) - family.pair(target, η),
            gradient=lambda η: family._mean(η) - target,
            direction=lambda η, g: -family._fisher(η).sharp(g),
            reach=family.natural_domain.reach,
            flat=_QUADRATIC,
            axes=family.axes,
            max_steps=steps,
        )
    solved = decrement.abs() < _QUADRATIC
    if not bool(solved.all()):
        raise UnsolvedError(
            f"no natural parameters of {type(family).__name__} were found for these mean parameters in {steps} Newton "
            "steps: they lie too near the boundary of their domain for this precision. Use float64, or moments of more "
            "data",
            solved,
        )
    natural: Tensor = _ImplicitNatural.apply(xi, eta.to(xi.dtype), family)  # type: ignore[no-untyped-call]
    return natural


@final
class _ImplicitNatural(torch.autograd.Function):
    """ξ ↦ η with a given value; the backward pass is F(η)⁻¹, which can be differentiated again."""

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


# Checks and shapes that several families share


def expect(family: ExponentialFamily, d: Distribution, *kinds: type[D]) -> D:
    """The distribution itself, if it is of one of these kinds; else a TypeError."""
    if not isinstance(d, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise TypeError(f"{type(family).__name__}.from_distribution needs a {names}, got {type(d).__name__}")
    return d


def expect_constant(family: ExponentialFamily, name: str, mine: float, theirs: Tensor) -> None:
    """Refuse a distribution whose fixed parameter differs from that of the family."""
    if not bool((theirs == mine).all()):
        raise ValueError(
            f"{type(family).__name__}({name}={mine:g}) cannot hold a distribution with {name} = "
            f"{theirs.reshape(-1)[0].item():g}: make a family with that {name}"
        )


def check_event(name: str, event: tuple[int, ...], x: Tensor) -> None:
    """Refuse data whose trailing axes are not those of one datum."""
    if tuple(x.shape[max(0, x.ndim - len(event)) :]) != event:
        raise ValueError(
            f"the data of {name} must have the shape [*batch, {', '.join(map(str, event))}], as the parameters say, "
            f"got shape {tuple(x.shape)}"
        )


def check_vector(m: Tensor, what: str) -> None:
    """Refuse anything but one vector of floating-point numbers."""
    if m.ndim != 1 or not m.is_floating_point():
        raise ValueError(
            f"{what} must be one vector [d] of floating-point numbers, got {m.dtype} of shape {tuple(m.shape)}"
        )


def broadcast(name: str, vector: Tensor, other: Tensor, axes: int) -> tuple[Tensor, Tensor]:
    """A vector [*batch d] and another one (axes = 1) or a matrix [*batch d d] (axes = 2), with one batch shape.

    >>> [tuple(t.shape) for t in broadcast("FullGaussian", torch.zeros(4, 2), torch.eye(2), 2)]
    [(4, 2), (4, 2, 2)]
    """
    fits = vector.ndim > 0 and tuple(other.shape[max(0, other.ndim - axes) :]) == (vector.shape[-1],) * axes
    try:
        batch = torch.broadcast_shapes(vector.shape[:-1], other.shape[: other.ndim - axes]) if fits else None
    except RuntimeError:
        batch = None
    if batch is None:
        raise ValueError(
            f"{name} needs a vector [*batch d] and {'a matrix [*batch d d]' if axes == 2 else 'another [*batch d]'} "
            f"whose batches broadcast, got shapes {tuple(vector.shape)} and {tuple(other.shape)}"
        )
    return vector.expand(*batch, -1), other.expand(*batch, *[-1] * axes)


def shared_normals(y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """ε [k 1 *out] ~ N(0, 1), shared by all examples: one number for each column of a root with a column an output."""
    return torch.randn(samples, 1, *y.shape[1:], generator=generator, dtype=y.dtype, device=y.device)


def diagonal_root(y: Tensor, information: Tensor) -> Tensor:
    """Columns of √F for a diagonal F [n *out]: column d is output d of every example."""
    d = y[0].numel()
    columns = torch.zeros(d, y.shape[0], d, dtype=y.dtype, device=y.device)
    index = torch.arange(d, device=y.device)
    columns[index, :, index] = information.sqrt().reshape(-1, d).T
    return columns.view(d, *y.shape)


def by_terms(columns: Tensor) -> Tensor:
    """Columns [k n *terms c] that act on all terms at once → [(terms k) n *terms c], one term a column.

    Terms are independent, so F has no entries between them: a column may touch one term only.
    """
    k, n, *terms, c = columns.shape
    flat = columns.reshape(k, n, -1, c)
    t = flat.shape[2]
    if t == 1:
        return columns
    separate = torch.diag_embed(flat.permute(0, 1, 3, 2))  # [k n c t t']
    return separate.permute(3, 0, 1, 4, 2).reshape(t * k, n, *terms, c)


def over_terms(values: Tensor) -> Tensor:
    """Sum [n *terms] over the terms of each example."""
    return values.flatten(1).sum(1) if values.ndim > 1 else values


# Draws from torch.distributions with a given generator


def seeded(generator: torch.Generator | None, device: torch.device) -> AbstractContextManager[None]:
    """Inside, torch.distributions, which draw from the global stream only, draw from ``generator`` if there is one.

    The seed is a hash of its state, which then advances: reading a drawn number would wait for a GPU.
    """
    if generator is None:
        return nullcontext()
    state = bytes(generator.get_state().tolist())
    torch.rand((), generator=generator, device=generator.device)
    return seeded_streams(int.from_bytes(blake2b(state, digest_size=7).digest(), "little"), device)
