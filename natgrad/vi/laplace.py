"""The Laplace approximation: a Gaussian posterior around a trained model, from any structure of the metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.accelerate.temporaries import at_once
from natgrad.errors import BatchStatisticsError, IncompatibleError, NatgradError, SingularMetricError
from natgrad.families.categorical import Categorical
from natgrad.families.diagonal_gaussian import Gaussian
from natgrad.families.discrete import Bernoulli
from natgrad.geometry import Vector
from natgrad.linalg import check_finite, check_positive, is_number
from natgrad.model import Inputs, Model, check_slots, check_types, examples
from natgrad.output.losses import Criterion, ElementLoss, TermLoss, metric_of
from natgrad.output.metric import Euclidean, Fisher, OutputMetric, fresh_generator
from natgrad.pullbacks.pullback import LoaderPullback, Observer, Pullback, layers_of
from natgrad.pullbacks.rows import check_independent, separable
from natgrad.show import as_html, brief
from natgrad.solve.cg import CG
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Inverse, Operator, Structure
from natgrad.structures.dense import Dense
from natgrad.structures.implicit import ImplicitOperator
from natgrad.structures.kronecker import KroneckerOperator
from natgrad.vi.links import Link, Probit

_GOLDEN = (math.sqrt(5) - 1) / 2


@final
@dataclass(frozen=True)
class Predictive:
    """The outputs of a model with their uncertainty, as Gaussians.

    Attributes:
        mean: The means [n *out].
        covariance: For every example, the covariance [n d d] of its d outputs.
    """

    mean: Tensor
    covariance: Tensor

    __repr__ = brief

    @property
    def variance(self) -> Tensor:
        """The variances of the single outputs [n *out]."""
        return self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)


@final
class SharedSpectrum:
    """What inverses and determinants of one G at many priors have in common; computed when it is first needed."""

    def __init__(self, operator: Operator) -> None:
        self.operator = operator

    @cached_property
    def diagonalised(self) -> Operator:
        """G by its eigenvectors."""
        return self.operator.in_eigenbasis() if isinstance(self.operator, KroneckerOperator) else self.operator

    @cached_property
    def eigenvalues(self) -> Tensor | None:
        """The eigenvalues of G [p], if it has them."""
        return self.diagonalised.eigenvalues()


@final
class Laplace:
    """A Gaussian posterior around a trained model: error bars without another training.

    The model must be trained with the same prior; ``prior_precision`` says which that is. The parameters of the model
    are copied, and never changed. ``with_prior`` and ``tuned`` try other priors without estimating the metric again.

    Args:
        model: The trained module, or a ``Model``.
        x: The training inputs: one batch, or a ``DataLoader`` of x or of pairs (x, target).
        metric: A Fisher metric, or the loss that was trained, taken as −log p of one term; see below.
        structure: How the metric is held; ``Dense()`` by default, ``Kronecker()`` for large networks. ``Implicit``
            needs one CG solve per sample, and has no determinant. ``EigenKronecker`` reads a loader with several
            batches twice.
        prior_precision: δ of the prior N(0, 1/δ), a number or a tensor with one number. Where it requires a gradient,
            ``log_marginal_likelihood`` is differentiable in it; samples and predictions take its value.
        target: The targets of x, for a metric that needs them.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.

    Method:
        p(θ | data) ≈ N(θ*, (N·G + δ)⁻¹) at the mode θ* of the posterior, G the mean over the N examples (MacKay 1992;
        Daxberger et al. 2021).

        With a Fisher metric N·G is the generalised Gauss–Newton matrix of −Σ_n log p(t_n | y_n), the *sum* over the
        examples. For a linear model with a Gaussian likelihood it is the Hessian, and the posterior exact.

        The precision δ that belongs to the loss that was trained:

        - a sum, −Σ log p + (c/2)‖θ‖²: δ = c;
        - a mean, −(1/N) Σ log p + (c/2)‖θ‖² (``F.cross_entropy`` with weight decay c): δ = N·c;
        - ``nn.MSELoss()`` + (c/2)‖θ‖² is a mean over the D outputs too, of 2σ²/D times −log p of ``Gaussian(scale=σ)``:
          δ = N·c·D/(2σ²).

        A loss in the place of the metric is summed over all examples and terms that count, whatever its reduction. So
        ``nn.MSELoss()`` is Σ(y − t)², of σ² = ½; trained as a mean over the N·D outputs, + (c/2)‖θ‖², it has δ = N·D·c.

        A loss that is none of torch's is taken for a mean over the examples, or for their sum if it is a module or a
        ``functools.partial`` with ``reduction="sum"``. With a loss for every head, the outputs [n d] are the heads side
        by side. A metric with ``reduction="mean"`` counts the terms of an example as one.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x = nn.Linear(2, 1), torch.randn(20, 2)
        >>> posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.1)), prior_precision=2.0)
        >>> posterior.sample(7)["weight"].shape
        torch.Size([7, 1, 2])
        >>> posterior.predictive(torch.randn(3, 2)).variance.shape
        torch.Size([3, 1])
    """

    _prior: float | Tensor
    _noise: float | Tensor | None
    _inverse: Inverse | None

    _repr_html_ = as_html

    def __init__(
        self,
        model: nn.Module | Model,
        x: Inputs | DataLoader[Any],
        metric: OutputMetric | Criterion,
        structure: Structure | None = None,
        prior_precision: float | Tensor = 1.0,
        target: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        structure = structure or Dense()
        metric = metric_of(metric).of_sum()
        check_slots(structure=(structure, Structure))
        structure.require_whole("Laplace")
        check_precision(prior_precision, learnable=True)
        self.model: Model = Model.of(model, heads=metric.heads)
        self.mode: Vector = Vector({name: p.detach().clone() for name, p in self.model.params.items()})  # θ*
        self.operator, self.examples, self._outputs = _mean_metric(
            self.model, x, metric, structure, target, generator
        )  # G, N and the number of all outputs
        self.solver: Solver = _solver(self.operator)
        self._square = self._flat_mode.double().square().sum()  # ‖θ*‖²
        self._spectrum = SharedSpectrum(self.operator)
        self._metric, self._scale = metric, _scale_of(metric)  # σ₀ that G was estimated with
        self._assume(prior_precision, self._scale)

    def __repr__(self) -> str:
        size, δ = self.operator.layout.size, float(self.prior_precision)
        return f"Laplace({type(self.operator).__name__}, {size} parameters, {self.examples} examples, δ = {δ:.4g})"

    def with_prior(self, prior_precision: float | Tensor) -> Laplace:
        """The same with another δ: G is not estimated again, and Kronecker factors are diagonalised once for all."""
        check_precision(prior_precision, learnable=True)
        return self._with(prior_precision, self._noise)

    def with_noise(self, scale: float | Tensor) -> Laplace:
        """The same for a Gaussian likelihood N(y, σ²) with another ``scale`` σ: G is not estimated again.

        For ``Fisher(Gaussian(scale=…))``, ``Euclidean()`` (σ = 1) and ``nn.MSELoss()`` (σ² = ½): N·G is in proportion
        to 1/σ². σ may be a tensor with one number; where it requires a gradient, ``log_marginal_likelihood`` is
        differentiable in it.

        >>> import torch, natgrad as ng
        >>> model, x, t = torch.nn.Linear(1, 1), torch.randn(50, 1), torch.randn(50, 1)
        >>> posterior, residuals = ng.vi.Laplace(model, x, ng.Euclidean()), (t - model(x)).detach()
        >>> σ = torch.tensor(0.5, requires_grad=True)
        >>> ll = torch.distributions.Normal(0.0, σ).log_prob(residuals).sum()
        >>> posterior.with_noise(σ).log_marginal_likelihood(ll).backward()
        >>> bool(σ.grad > 0)  # the residuals are larger than ½
        True
        """
        _ = self._own_scale
        what = "with_noise(scale)"
        check_one_number(scale, what, "σ of the noise of every output")
        check_positive(scale.detach() if isinstance(scale, Tensor) else scale, what, ": it is σ of the noise")
        return self._with(self._prior, scale)

    def with_solver(self, solver: Solver) -> Laplace:
        """The same with another solver, as ``CG(tol=…, preconditioner=…)`` for ``Implicit``."""
        check_slots(solver=(solver, Solver))
        other = copy(self)
        other.solver = solver
        other._assume(self._prior, self._noise)
        return other

    @property
    def prior_precision(self) -> float:
        """δ."""
        return float(self._prior.detach()) if isinstance(self._prior, Tensor) else float(self._prior)

    @property
    def noise_scale(self) -> float | None:
        """σ of a Gaussian likelihood; None of another one."""
        return float(self._noise.detach()) if isinstance(self._noise, Tensor) else self._noise

    @property
    def inverse(self) -> Inverse:
        """(G + δ/N)⁻¹, made when it is first needed. N·G + δ = N (G + δ/N): the prior is a damping of G.

        With another σ than that of G, N is N·(σ₀/σ)².
        """
        if self._inverse is None:
            G = self._spectrum.diagonalised if isinstance(self.solver, Cholesky) else self.operator
            try:
                self._inverse = self.solver.init(G, self.prior_precision / self._count)
            except SingularMetricError as error:
                double = "" if G.layout.dtype == torch.float64 else "model.double() and inputs in double precision, or "
                raise SingularMetricError(
                    f"a prior precision of {self.prior_precision:g} is lost in the rounding of N·G: give {double}a "
                    f"larger prior_precision, or use Kronecker(). In detail: {error}"
                ) from error
        return self._inverse

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters [s *shape] by name, drawn from the posterior; the global random stream is not touched."""
        return draw(self.mode, self.operator, self.inverse, self._count, count, generator)

    def coloured(self, ξ: Tensor) -> Tensor:
        """T ξ [s p] for white noise ξ [s q], with T Tᵀ the covariance of the posterior."""
        return self.inverse.root_times(ξ) / math.sqrt(self._count)

    def covariance(self) -> Tensor:
        """(N·G + δ)⁻¹ [p q], for small models."""
        θ = self._flat_mode
        half = self.inverse.root_transpose_times(torch.eye(len(θ), dtype=θ.dtype, device=θ.device))
        return half @ half.T / self._count

    def predictive(self, x: Inputs) -> Predictive:
        """The outputs of the model linearised at θ*: N(y, J (N·G + δ)⁻¹ Jᵀ), without the noise of the targets."""
        means, covariances = [], []
        for pb in self._pullbacks(x):
            means.append(pb.y)
            covariance = self.inverse.output_covariance(pb) * (pb.n / self._count)
            covariances.append(0.5 * (covariance + covariance.mT))  # torch.distributions refuses what rounding leaves
        return Predictive(torch.cat(means), torch.cat(covariances))

    def probabilities(self, x: Inputs, link: Link | None = None) -> Tensor:
        """Probabilities of the classes [n *out], for a classifier: the mean over ``predictive(x)`` of the softmax.

        Of the sigmoid for ``Fisher(Bernoulli())`` and ``nn.BCEWithLogitsLoss()``, number by number. ``link``: how that
        mean is taken, ``Probit()`` by default, ``Bridge()`` or ``MonteCarlo(samples)``. For the mean over the network
        itself, not linearised: ``outputs(x, samples).softmax(-1).mean(0)``.

        >>> import torch, natgrad as ng
        >>> model, x = torch.nn.Linear(2, 3), torch.randn(20, 2)
        >>> posterior = ng.vi.Laplace(model, x, torch.nn.CrossEntropyLoss())
        >>> p = posterior.probabilities(100 * x)  # far from the data
        >>> bool(p.amax(1).mean() < model(100 * x).softmax(1).amax(1).mean())
        True
        """
        link = link or Probit()
        check_slots(link=(link, Link))
        family, q = _classes(self._metric), self.predictive(x)
        if isinstance(family, Bernoulli):
            return link.sigmoid(q.mean, q.variance)
        if q.mean.ndim > 2 and family.axis is None:
            raise ValueError(
                f"{self._metric!r} does not say which axis of outputs of shape {tuple(q.mean.shape)} has the classes: "
                "give metric_of(loss, axis=1)"
            )
        mean = family.last(q.mean)
        at = family.last(torch.arange(q.mean[0].numel(), device=mean.device).view(1, *q.mean.shape[1:]))
        at = at.reshape(-1, mean.shape[-1])  # [terms c], in the outputs of an example
        covariance = q.covariance[:, at[:, :, None], at[:, None, :]]
        p = link.softmax(mean.reshape(len(mean), *at.shape), covariance).reshape(mean.shape)
        return p if family.axis is None else p.movedim(-1, family.axis)

    def outputs(self, x: Inputs, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """y [s n *out] of the model itself, not linearised, at parameters drawn from the posterior."""
        return outputs_at(self.model, self.sample(samples, generator), x)

    def log_marginal_likelihood(self, log_likelihood: Tensor | float) -> Tensor:
        """log p(data) ≈ log p(data | θ*) − ½δ‖θ*‖² + ½P log δ − ½ log det(N·G + δ) (MacKay 1992, (2.4), (2.5)).

        ``log_likelihood``: Σ_n log p(t_n | θ*), the sum over the N examples, with all constants. The result is
        differentiable in δ where that requires a gradient, and in σ (``with_noise``): then the log-likelihood must be
        computed from the same σ, and from residuals that are detached.
        """
        ll = torch.as_tensor(log_likelihood, device=self._square.device)
        if ll.ndim > 0:
            raise ValueError(
                f"log_likelihood must be one number, the sum over all examples, got shape {tuple(ll.shape)}: sum it"
            )
        occam, learned = self._occam(self._prior, self._noise), _requires_grad(self._noise)
        if learned and not ll.requires_grad:
            raise ValueError(
                "the scale of with_noise(σ) requires a gradient, and log_likelihood has none: compute it from this σ, "
                "or detach σ"
            )
        return (ll if learned else ll.detach()) + occam.to(self.operator.layout.dtype)

    def tuned(self, residuals: Tensor | None = None) -> Laplace:
        """The same with the δ that maximises the marginal likelihood at this θ*; with ``residuals``, also with its σ.

        ``residuals``: t − y at θ* [n *out], of all N examples of a Gaussian likelihood. Either maximum is the only one
        (``most_evident``). θ* was trained with another prior: to be exact, train again with the new one and repeat.

        >>> import torch, natgrad as ng
        >>> x, model = torch.linspace(-1, 1, 500)[:, None], torch.nn.Linear(1, 1)
        >>> residuals = 0.1 * torch.randn(500, 1)
        >>> tuned = ng.vi.Laplace(model, x, ng.Euclidean()).tuned(residuals)
        >>> round(tuned.noise_scale, 1)
        0.1
        """
        square, size = float(self._square), self.operator.layout.size
        trace = self.examples * float(self.operator.trace())
        if residuals is None:
            shrunk = self._count / self.examples
            δ = most_evident(lambda δ: float(self._occam(δ, self._noise)), square, shrunk * trace, size)
            return self.with_prior(δ)
        σ0 = self._own_scale
        check_types(residuals=(residuals, Tensor, "a tensor, t − y"))
        if residuals.ndim == 0 or len(residuals) != self.examples or residuals.numel() != self._outputs:
            raise ValueError(
                f"residuals must be t − y of all {self.examples} examples, with {self._outputs // self.examples} each, "
                f"got shape {tuple(residuals.shape)}: give t and y one shape before they are subtracted"
            )
        check_finite(residuals, "the tensor of residuals t − y")
        error, terms = float(residuals.detach().double().square().sum()) / σ0**2, residuals.numel()

        def evidence(ρ: float) -> float:  # of δ = κρ and σ² = σ₀²/κ, at the best κ
            return float(self._occam(ρ, σ0)) + 0.5 * (ρ * square - terms * math.log(ρ * square + error))

        ρ = most_evident(evidence, square, trace, size, error=error, terms=terms)
        κ = terms / (ρ * square + error)
        return self.with_noise(σ0 / math.sqrt(κ)).with_prior(κ * ρ)

    def _occam(self, prior: float | Tensor, noise: float | Tensor | None) -> Tensor:
        """The evidence without the likelihood. log det(N·G + δ) = P log N + log det(G + δ/N)."""
        P, square = self.operator.layout.size, self._square
        N = self._examples_at(noise)
        learned = [_requires_grad(prior), _requires_grad(noise)]
        values = self._spectrum.eigenvalues
        if any(learned) and values is None:
            what = "prior precision" if learned[0] else "scale of the noise"
            why = "its eigenvalues are not at hand; use another structure"
            self.operator.refuse(f"a {what} that requires a gradient", why)
        δ = torch.as_tensor(prior, dtype=torch.float64, device=square.device).reshape(())
        if values is None:
            logdet = P * N.log() + self._spectrum.diagonalised.logdet(float(δ / N)).double()
        else:
            logdet = (N * values + δ).log().sum()
        return 0.5 * (P * δ.log() - logdet - δ * square)

    def _examples_at(self, noise: float | Tensor | None) -> Tensor:
        """N (σ₀/σ)² [], as N·G is in proportion to 1/σ²; N without a σ."""
        like = self._square
        N = torch.as_tensor(self.examples, dtype=like.dtype, device=like.device)
        if noise is None or self._scale is None:
            return N
        return N * (self._scale / torch.as_tensor(noise, dtype=like.dtype, device=like.device).reshape(())) ** 2

    @property
    def _own_scale(self) -> float:
        """σ₀."""
        if self._scale is None:
            raise IncompatibleError(
                f"there is no σ to choose with {self._metric!r}: it is not of a Gaussian likelihood with one σ. Use "
                "Fisher(Gaussian(scale=σ)), Euclidean() or nn.MSELoss()"
            )
        return self._scale

    @property
    def _count(self) -> float:
        """N (σ₀/σ)² of this posterior."""
        return float(self._examples_at(self.noise_scale))

    def _with(self, prior_precision: float | Tensor, noise: float | Tensor | None) -> Laplace:
        other = copy(self)
        other._assume(prior_precision, noise)
        return other

    def _assume(self, prior_precision: float | Tensor, noise: float | Tensor | None) -> None:
        self._prior, self._noise, self._inverse = prior_precision, noise, None

    def _pullbacks(self, x: Inputs) -> Iterator[Pullback]:
        """Of the identity of the outputs, whose rows are J/√n, at the mode, a chunk of examples at a time."""
        changed = [name for name, p in self.model.params.items() if not torch.equal(p.detach(), self.mode[name])]
        if changed:
            raise NatgradError(
                f"the parameters {', '.join(changed)} have changed since the approximation was made, which is around "
                "where they were: make a new one, or put them back"
            )
        with torch.no_grad():
            y = self.model(None, x)
        n, d = y.shape[0], y[0].numel()
        step = at_once(d * self.model.size) if separable(x, n) else n
        if step < n:
            try:
                check_independent(self.model, x, step, n)
            except BatchStatisticsError:  # examples that influence each other are taken together
                step = n
        view = Observer(self.model, Euclidean(), layers_of(self.model), None)
        start = 0
        while start < n:
            stop = min(start + step, n)
            pb = view.checked(examples(x, (start, stop), n))
            yield pb
            start = stop
            step = at_once(pb.factor_size)

    @property
    def _flat_mode(self) -> Tensor:
        return self.operator.layout.flatten(self.mode)


def draw(
    mean: Mapping[str, Tensor], G: Operator, inverse: Inverse, n: float, count: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Parameters [s *shape] by name ~ N(mean, (n·(G + λ))⁻¹), for ``inverse`` of G + λ."""
    if count < 1:
        raise ValueError(f"sample(count) needs a count ≥ 1, got {count}")
    θ, like = G.layout.flatten(mean), G.layout.like
    generator = generator or fresh_generator(θ.device)
    ξ = torch.randn(count, inverse.root_size, generator=generator, dtype=θ.dtype, device=θ.device)
    columns = (θ + inverse.root_times(ξ) / math.sqrt(n)).split([t.numel() for t in like.values()], dim=1)
    return {name: c.reshape(-1, *t.shape).to(t.dtype) for (name, t), c in zip(like.items(), columns, strict=True)}


@torch.no_grad()
def outputs_at(model: Model, drawn: Mapping[str, Tensor], x: Inputs) -> Tensor:
    """y [s n *out] at parameters [s *shape]."""
    samples = len(next(iter(drawn.values())))
    return torch.stack([model({name: t[s] for name, t in drawn.items()}, x) for s in range(samples)])


def _mean_metric(
    model: Model,
    x: Inputs | DataLoader[Any],
    metric: OutputMetric,
    structure: Structure,
    target: Any,
    generator: torch.Generator | None,
) -> tuple[Operator, int, int]:
    """G, N and the number of all outputs; G of a loader is the mean over its batches, weighted by their examples."""
    view = Observer(model, metric, layers_of(model), generator)
    if isinstance(x, DataLoader):
        return LoaderPullback.of(view, x, target).mean(structure)
    pb = view.checked(x, target)
    if pb.coupling is not None:
        raise IncompatibleError(
            f"a Laplace approximation does not work with {pb.metric!r}: it couples the examples, so it is not the "
            "Hessian of a log-likelihood, which is a sum over them. Use its base, or Fisher(family)"
        )
    return structure.estimate(pb).finite(wait=True), pb.n, pb.y.numel()


def most_evident(
    evidence: Callable[[float], float],
    square: float,
    trace: float,
    size: int,
    *,
    error: float = math.inf,
    terms: int = 0,
) -> float:
    """argmax over δ of ½P log δ − ½ log det(Λ + δ) − ½δ‖θ‖², Λ = N·G (MacKay 1992, section 4).

    It is strictly concave in log δ, so that there is one maximum, at δ‖θ‖² = γ = Σ_p λ_p/(λ_p + δ), the number of
    parameters that the data determine. As τ/(τ + δ) ≤ γ ≤ P for the mean eigenvalue τ, it lies between

        (2/‖θ‖²) / (1 + √(1 + 4/(τ‖θ‖²)))   and   P/‖θ‖²,

    where a golden-section search finds it. ``square`` is ‖θ‖², ``trace`` is tr Λ, ``size`` is P.

    With σ of a Gaussian likelihood, σ² = σ₀²/κ and δ = κρ, the evidence is

        ½P log ρ − ½ log det(Λ + ρ) − ½κ(ρ‖θ‖² + E) + ½T log κ,

    where E, ``error``, is the sum of the T = ``terms`` squared residuals over σ₀². It is strictly concave in log ρ and
    log κ together. The best κ is T/(ρ‖θ‖² + E), with which γ(ρ) = Tρ‖θ‖²/(ρ‖θ‖² + E). The right side is at most
    Tρ‖θ‖²/E, and at least ½T from ρ = E/‖θ‖² on; γ(ρ) ≤ tr Λ/ρ, and ≥ ½ up to ρ = τ.

    >>> δ = most_evident(lambda δ: 0.5 * math.log(δ / (δ + 2.0)) - 0.5 * δ, square=1.0, trace=2.0, size=1)
    >>> round(δ * (δ + 2.0), 6)  # γ = 2/(2 + δ) is δ
    2.0
    """
    if not square > 0 or not trace > 0:
        what = "the mode is zero" if not square > 0 else "the metric is zero"
        raise SingularMetricError(
            f"{what}: the evidence has no maximum over the prior precision. Train the model first, or set "
            "prior_precision by hand"
        )
    if terms and not error > 0:
        raise SingularMetricError("the residuals are zero: the evidence has no maximum over σ. Set it by hand")
    if terms:
        a = math.log(min(trace / size, error / (2 * terms * square)))
        b = math.log(max(error / square, 2 * trace / terms))
    else:
        a = math.log(2 / square / (1 + math.sqrt(1 + 4 * size / (trace * square))))
        b = math.log(size / square)
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    at_c, at_d = evidence(math.exp(c)), evidence(math.exp(d))
    while b - a > 1e-9 * (1 + abs(a)):
        if at_c >= at_d:
            b, d, at_d = d, c, at_c
            c = b - _GOLDEN * (b - a)
            at_c = evidence(math.exp(c))
        else:
            a, c, at_c = c, d, at_d
            d = a + _GOLDEN * (b - a)
            at_d = evidence(math.exp(d))
    return math.exp(0.5 * (a + b))


def check_precision(precision: float | Tensor, what: str = "prior_precision", *, learnable: bool = False) -> None:
    """Refuse what is not one positive number, or, where it is not ``learnable``, requires a gradient."""
    meaning = "1/variance of the prior of every parameter"
    other = ": one for each parameter or layer is not supported; scale the parameters instead"
    check_one_number(precision, what, meaning, other)
    if isinstance(precision, Tensor) and precision.requires_grad and not learnable:
        raise TypeError(
            f"{what} requires a gradient, and only its value is used here: detach it, or learn it with "
            "Laplace.log_marginal_likelihood, which is differentiable in it"
        )
    advice = ": it is 1/variance of the prior of every parameter (N times the weight decay of a mean loss)"
    check_positive(precision.detach() if isinstance(precision, Tensor) else precision, what, advice)


def check_one_number(value: float | Tensor, what: str, meaning: str, advice: str = "") -> None:
    """Refuse what is not one number."""
    if isinstance(value, Tensor):
        one = value.numel() == 1 and value.dtype != torch.bool and not value.is_complex()
        given = f"a tensor of shape {tuple(value.shape)} and type {value.dtype}"
    else:
        one, given = is_number(value), repr(value)
    if not one:
        raise TypeError(f"{what} must be one number, {meaning}, got {given}{advice}")


def _requires_grad(value: float | Tensor | None) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


def _scale_of(metric: OutputMetric) -> float | None:
    """σ of the Gaussian likelihood of a metric that is 1/σ²; None of another."""
    metric = metric.unsampled()
    if isinstance(metric, ElementLoss) and isinstance(metric.loss, nn.MSELoss):
        return metric.factor**-0.5
    if isinstance(metric, (Euclidean, Fisher)) and metric.reduction != "sum":
        return None
    if isinstance(metric, Fisher) and isinstance(metric.family, Gaussian) and metric.family.scale is not None:
        return float(metric.family.scale)
    return 1.0 if isinstance(metric, Euclidean) else None


def _classes(metric: OutputMetric) -> Categorical | Bernoulli:
    """The family of the targets of a classifier."""
    metric = metric.unsampled()
    family = metric.family_of(None) if isinstance(metric, TermLoss) else getattr(metric, "family", None)
    if isinstance(family, Bernoulli) or (isinstance(family, Categorical) and not family.minimal):
        return family
    raise IncompatibleError(
        f"probabilities(x) does not work with {metric!r}: it is of no classes. Use Fisher(Categorical()), "
        "Fisher(Bernoulli()), nn.CrossEntropyLoss() or nn.BCEWithLogitsLoss()"
    )


def _solver(G: Operator) -> Solver:
    if not isinstance(G, ImplicitOperator):
        return Cholesky()
    return CG(tol=64 * torch.finfo(G.layout.dtype).eps ** 0.75, max_steps=10 * G.layout.size + 100)
