"""The Laplace approximation: a Gaussian posterior around a trained model, from any structure of the metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.accelerate.temporaries import at_once
from natgrad.errors import BatchStatisticsError, IncompatibleError, NatgradError, SingularMetricError
from natgrad.geometry import Vector
from natgrad.linalg import check_positive
from natgrad.model import Inputs, Model, check_slots, map_tensors
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import Euclidean, OutputMetric, fresh_generator
from natgrad.pullback.chunks import check_independent, examples, separable
from natgrad.pullback.pullback import Observer, Pullback, layers_of
from natgrad.solve.cg import CG
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Inverse, Operator, Structure
from natgrad.structures.dense import Dense

_GOLDEN = (math.sqrt(5) - 1) / 2


@final
@dataclass(frozen=True)
class Predictive:
    """The outputs as Gaussians: a mean [n *out] and, for every example, a covariance [n d d] of its d outputs."""

    mean: Tensor
    covariance: Tensor

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
        return self.operator.diagonalised()

    @cached_property
    def eigenvalues(self) -> Tensor | None:
        """Those of G [p], if it has them, in double precision. G is a mean of squares: below zero is rounding."""
        values = self.diagonalised.eigenvalues()
        return None if values is None else values.clamp(min=0)


@final
class Laplace:
    """p(θ | data) ≈ N(θ*, (N·G + δ)⁻¹) at the mode θ* of the posterior (MacKay 1992; Daxberger et al. 2021).

    G is the metric of ``metric`` in any ``structure`` (by default ``Dense()``), the mean over the N examples of ``x``:
    one batch, or a ``DataLoader`` of x or of pairs (x, target). δ is the precision of the prior N(0, 1/δ). With a
    Fisher metric N·G is the generalised Gauss–Newton matrix of −Σ_n log p(t_n | y_n), the *sum* over the examples; for
    a linear model with a Gaussian likelihood it is the Hessian, and the posterior exact. The model must be trained with
    the same prior:

    - a sum, −Σ log p + (c/2)‖θ‖²: δ = c;
    - a mean, −(1/N) Σ log p + (c/2)‖θ‖² (``F.cross_entropy`` with weight decay c): δ = N·c;
    - ``nn.MSELoss()`` + (c/2)‖θ‖² is a mean over the D outputs too, of 2σ²/D times −log p of ``Gaussian(scale=σ)``:
      δ = N·c·D/(2σ²).

    A loss in the place of the metric is −log p of one term, up to constants: it is summed over all examples and terms
    that count, whatever its reduction, as torch does with ``reduction="sum"``. So ``nn.MSELoss()`` is Σ(y − t)², of
    σ² = ½; trained as a mean over the N·D outputs, + (c/2)‖θ‖², it has δ = N·D·c. A loss that is none of torch's is
    taken for a mean over the examples, or for their sum if it is a module or a ``functools.partial`` with
    ``reduction="sum"``. With a loss for every head, the outputs [n d] are the heads side by side.

    δ may be a tensor with one number. Where it requires a gradient, ``log_marginal_likelihood`` is differentiable in
    it; samples and predictions take its value. A metric with ``reduction="mean"`` counts the terms of an example as
    one. ``Implicit`` needs one CG solve per sample, and has no determinant. ``EigenKronecker`` reads a loader with more
    than one batch twice, first for the eigenvectors of all examples and then for the eigenvalues, at twice the cost.
    The parameters of the model are copied, and never changed.

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
    _inverse: Inverse | None

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
        self.model = Model.of(model, heads=metric.heads)
        self.mode = Vector({name: p.detach().clone() for name, p in self.model.params.items()})  # θ*
        self.operator, self.examples = _mean_metric(self.model, x, metric, structure, target, generator)  # G and N
        self.solver: Solver = _solver(self.operator)
        self._square = self._flat_mode.double().square().sum()  # ‖θ*‖²
        self._spectrum = SharedSpectrum(self.operator)
        self._assume(prior_precision)

    def with_prior(self, prior_precision: float | Tensor) -> Laplace:
        """The same with another δ: G is not estimated again, and Kronecker factors are diagonalised once for all."""
        check_precision(prior_precision, learnable=True)
        other = copy(self)
        other._assume(prior_precision)
        return other

    def with_solver(self, solver: Solver) -> Laplace:
        """The same with another solver, as ``CG(tol=…, preconditioner=…)`` for ``Implicit``."""
        check_slots(solver=(solver, Solver))
        other = copy(self)
        other.solver = solver
        other._assume(self._prior)
        return other

    @property
    def prior_precision(self) -> float:
        """δ."""
        return float(self._prior.detach()) if isinstance(self._prior, Tensor) else float(self._prior)

    @property
    def inverse(self) -> Inverse:
        """(G + δ/N)⁻¹, made when it is first needed. N·G + δ = N (G + δ/N): the prior is a damping of G."""
        if self._inverse is None:
            G = self._spectrum.diagonalised if isinstance(self.solver, Cholesky) else self.operator
            self._inverse = self.solver.init(G, self.prior_precision / self.examples)
        return self._inverse

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters [s *shape] by name, drawn from the posterior; the global random stream is not touched."""
        return draw(self.mode, self.operator, self.inverse, self.examples, count, generator)

    def coloured(self, ξ: Tensor) -> Tensor:
        """T ξ [s p] for white noise ξ [s q], with T Tᵀ the covariance of the posterior."""
        return self.inverse.coloured(ξ) / math.sqrt(self.examples)

    def covariance(self) -> Tensor:
        """(N·G + δ)⁻¹ [p q], for small models."""
        θ = self._flat_mode
        half = self.inverse.whitened(torch.eye(len(θ), dtype=θ.dtype, device=θ.device))
        return half @ half.T / self.examples

    def predictive(self, x: Inputs) -> Predictive:
        """The outputs of the model linearised at θ*: N(y, J (N·G + δ)⁻¹ Jᵀ), without the noise of the targets."""
        means, covariances = [], []
        for pb in self._pullbacks(x):
            means.append(pb.y)
            covariance = self.inverse.output_covariance(pb) * (pb.n / self.examples)
            covariances.append(0.5 * (covariance + covariance.mT))  # torch.distributions refuses what rounding leaves
        return Predictive(torch.cat(means), torch.cat(covariances))

    def outputs(self, x: Inputs, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """y [s n *out] of the model itself, not linearised, at parameters drawn from the posterior."""
        return outputs_at(self.model, self.sample(samples, generator), x)

    def log_marginal_likelihood(self, log_likelihood: Tensor | float) -> Tensor:
        """log p(data) ≈ log p(data | θ*) − ½δ‖θ*‖² + ½P log δ − ½ log det(N·G + δ) (MacKay 1992, (2.4), (2.5)).

        ``log_likelihood``: Σ_n log p(t_n | θ*), the sum over the N examples, with all constants. The result is
        differentiable in δ where that requires a gradient.
        """
        ll = torch.as_tensor(log_likelihood, device=self._square.device)
        if ll.ndim > 0:
            raise ValueError(
                f"log_likelihood must be one number, the sum over all examples, got shape {tuple(ll.shape)}: sum it"
            )
        return ll.detach() + self._occam(self._prior)

    def tuned(self) -> Laplace:
        """The same with the δ that maximises the marginal likelihood at this θ*.

        θ* was trained with another prior: to be exact, train again with the new one and repeat.
        """
        trace = self.examples * float(self.operator.trace())
        δ = most_evident(lambda δ: float(self._occam(δ)), float(self._square), trace, self.operator.layout.size)
        return self.with_prior(δ)

    def _occam(self, prior: float | Tensor) -> Tensor:
        """The evidence without the likelihood. log det(N·G + δ) = P log N + log det(G + δ/N)."""
        P, N, square = self.operator.layout.size, self.examples, self._square
        learned = isinstance(prior, Tensor) and prior.requires_grad
        values = self._spectrum.eigenvalues
        if learned and values is None:
            self.operator.refuse(
                "a prior precision that requires a gradient", "its eigenvalues are not at hand; use another structure"
            )
        δ = torch.as_tensor(prior, dtype=torch.float64, device=square.device).reshape(())
        if values is None:
            logdet = P * math.log(N) + self._spectrum.diagonalised.logdet(float(δ.detach()) / N).double()
        else:
            logdet = (N * values + δ).log().sum()
        return (0.5 * (P * δ.log() - logdet - δ * square)).to(self.operator.layout.dtype)

    def _assume(self, prior_precision: float | Tensor) -> None:
        self._prior, self._inverse = prior_precision, None

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
            if self.inverse.by_layer:
                step = at_once(pb.factor_size)

    @property
    def _flat_mode(self) -> Tensor:
        return self.operator.layout.flatten(self.mode)


def draw(
    mean: Mapping[str, Tensor], G: Operator, inverse: Inverse, n: int, count: int, generator: torch.Generator | None
) -> dict[str, Tensor]:
    """Parameters [s *shape] by name ~ N(mean, (n·(G + λ))⁻¹), for ``inverse`` of G + λ."""
    if count < 1:
        raise ValueError(f"sample(count) needs a count ≥ 1, got {count}")
    θ, like = G.layout.flatten(mean), G.layout.like
    generator = generator or fresh_generator(θ.device)
    ξ = torch.randn(count, inverse.noise, generator=generator, dtype=θ.dtype, device=θ.device)
    columns = (θ + inverse.coloured(ξ) / math.sqrt(n)).split([t.numel() for t in like.values()], dim=1)
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
) -> tuple[Operator, int]:
    """G and N; G of a loader is the mean over its batches, weighted by their examples.

    A structure with eigenvectors takes those of the first batch for all estimates of a pass. Those of all batches are
    known at the end of it, and D is measured in them in a second pass.
    """
    view = Observer(model, metric, layers_of(model), generator)
    G, n, count = _one_pass(view, _batches(model, x, target), structure)
    if G is None:
        raise ValueError("the loader has no batch: there is no data to take the curvature at")
    G = G.finite(wait=True)
    if not structure.has_basis or count == 1:
        return G, n
    again, n2, _ = _one_pass(view, _batches(model, x, target), structure, G.renewed(exact=True))
    if again is None or n2 != n:
        raise ValueError(
            f"the loader gave {n} examples in a first pass, and {n2} in a second one, which {structure!r} needs: its "
            "eigenvalues are measured in the eigenvectors of all examples. Give a loader that can be read twice, or "
            "use Kronecker()"
        )
    return again.finite(wait=True), n


def _one_pass(
    view: Observer, batches: Iterable[tuple[Inputs, Any]], structure: Structure, like: Operator | None = None
) -> tuple[Operator | None, int, int]:
    """The mean metric of all examples (None if there are none), their number, and that of the batches.

    ``like``: the operator whose basis it is measured in; by default that of the first batch.
    """
    operator, n, count = None, 0, 0
    for batch_x, batch_target in batches:
        pb = view.checked(batch_x, batch_target)
        if pb.coupling is not None:
            raise IncompatibleError(
                f"a Laplace approximation does not work with {pb.metric!r}: it couples the examples, so it is not the "
                "Hessian of a log-likelihood, which is a sum over them. Use its base, or Fisher(family)"
            )
        n, count = n + pb.n, count + 1
        new = structure.estimate(pb, operator or like)
        operator = new if operator is None else operator.lerp(new, pb.n / n)
    return operator, n, count


def _batches(model: Model, x: Inputs | DataLoader[Any], target: Any) -> Iterator[tuple[Inputs, Any]]:
    if not isinstance(x, DataLoader):
        yield x, target
        return
    if target is not None:
        raise TypeError("target= belongs to one batch x; a loader brings its targets, as pairs (x, target)")
    for item in x:
        batch = map_tensors(item, lambda t: t.to(model.example.device))
        if isinstance(batch, Tensor):
            yield batch, None
        elif isinstance(batch, (list, tuple)) and 1 <= len(batch) <= 2:
            yield batch[0], batch[1] if len(batch) == 2 else None
        else:
            raise TypeError(
                f"a loader must give tensors x or pairs (x, target), and this one gave a {type(item).__name__}: put "
                "several inputs into a tuple x of their own"
            )


def most_evident(evidence: Callable[[float], float], square: float, trace: float, size: int) -> float:
    """argmax over δ of ½P log δ − ½ log det(Λ + δ) − ½δ‖θ‖², Λ = N·G (MacKay 1992, section 4).

    It is strictly concave in log δ, so that there is one maximum, at δ‖θ‖² = γ = Σ_p λ_p/(λ_p + δ), the number of
    parameters that the data determine. As τ/(τ + δ) ≤ γ ≤ P for the mean eigenvalue τ, it lies between

        (2/‖θ‖²) / (1 + √(1 + 4/(τ‖θ‖²)))   and   P/‖θ‖²,

    where a golden-section search finds it. ``square`` is ‖θ‖², ``trace`` is tr Λ, ``size`` is P.

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
    low = 2 / square / (1 + math.sqrt(1 + 4 * size / (trace * square)))
    a, b = math.log(low), math.log(size / square)
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
    if isinstance(precision, Tensor):
        one = precision.numel() == 1 and precision.dtype != torch.bool and not precision.is_complex()
        given = f"a tensor of shape {tuple(precision.shape)} and type {precision.dtype}"
    else:
        one, given = not isinstance(precision, bool), repr(precision)
    if not one:
        raise TypeError(
            f"{what} must be one number, 1/variance of the prior of every parameter, got {given}: one for each "
            "parameter or layer is not supported; scale the parameters instead"
        )
    if isinstance(precision, Tensor) and precision.requires_grad and not learnable:
        raise TypeError(
            f"{what} requires a gradient, and only its value is used here: detach it, or learn it with "
            "Laplace.log_marginal_likelihood, which is differentiable in it"
        )
    advice = ": it is 1/variance of the prior of every parameter (N times the weight decay of a mean loss)"
    check_positive(precision.detach() if isinstance(precision, Tensor) else precision, what, advice)


def _solver(G: Operator) -> Solver:
    if not G.products_only:
        return Cholesky()
    return CG(tol=64 * torch.finfo(G.layout.dtype).eps ** 0.75, max_steps=10 * G.layout.size + 100)
