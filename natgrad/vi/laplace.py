"""The Laplace approximation: a Gaussian posterior around a trained model, from any structure of the metric."""

from __future__ import annotations

import math
from copy import copy
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.model import Inputs, Model
from natgrad.operators import ImplicitOperator
from natgrad.operators.base import Operator
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.slots import check_slots
from natgrad.solve import CG, Cholesky, Solver
from natgrad.structures import Dense, Structure
from natgrad.vi.curvature import Curvature
from natgrad.vi.evidence import most_evident


@final
@dataclass(frozen=True)
class Predictive:
    """The outputs as Gaussians: a mean [n *out] and, for every example, a covariance [n d d] of its d outputs."""

    mean: Tensor
    covariance: Tensor

    @property
    def variance(self) -> Tensor:
        """Of every output by itself [n *out]."""
        return self.covariance.diagonal(dim1=1, dim2=2).reshape(self.mean.shape)


@final
class Laplace:
    """p(θ | data) ≈ N(θ*, (N·G + δ)⁻¹) at the mode θ* of the posterior (MacKay 1992; Daxberger et al. 2021).

    G is the metric of ``metric`` in any ``structure``, the mean over the N examples of ``x``: one batch, or a
    ``DataLoader`` of x or of pairs (x, target). δ is the precision of the prior N(0, 1/δ). With a Fisher metric N·G is
    the generalised Gauss–Newton matrix of −Σ_n log p(t_n | y_n), the *sum* over the examples; for a linear model with
    a Gaussian likelihood it is the Hessian, and the posterior exact. The model must be trained with the same prior:

    - a sum, −Σ log p + (c/2)‖θ‖²: δ = c;
    - a mean, −(1/N) Σ log p + (c/2)‖θ‖² (``F.cross_entropy`` with weight decay c): δ = N·c;
    - ``nn.MSELoss()`` + (c/2)‖θ‖² is a mean over the D outputs too, of 2σ²/D times −log p of ``Gaussian(scale=σ)``:
      δ = N·c·D/(2σ²).

    A metric with ``reduction="mean"`` counts the terms of an example as one. ``Implicit`` is solved by CG, one solve a
    sample, and has no determinant. The parameters of the model are copied, and never changed.

    >>> import natgrad as ng
    >>> model, x = nn.Linear(2, 1), torch.randn(20, 2)
    >>> posterior = ng.vi.Laplace(model, x, ng.Fisher(ng.Gaussian(scale=0.1)), prior_precision=2.0)
    >>> posterior.sample(7)["weight"].shape
    torch.Size([7, 1, 2])
    >>> posterior.predictive(torch.randn(3, 2)).variance.shape
    torch.Size([3, 1])
    """

    def __init__(
        self,
        model: nn.Module | Model,
        x: Inputs | DataLoader[Any],
        metric: OutputMetric,
        structure: Structure | None = None,
        prior_precision: float = 1.0,
        target: Any = None,
        generator: torch.Generator | None = None,
    ) -> None:
        structure = structure or Dense()
        check_slots(metric=(metric, OutputMetric), structure=(structure, Structure))
        _check_precision(prior_precision)
        self.curvature = Curvature.of(Model.of(model), x, metric, structure, target, generator)
        self.solver: Solver = _solver(self.operator)
        self._factor(prior_precision)

    @property
    def operator(self) -> Operator:
        """G, the mean over the examples."""
        return self.curvature.operator

    @property
    def examples(self) -> int:
        """N."""
        return self.curvature.examples

    def with_prior(self, prior_precision: float) -> Laplace:
        """The same with another δ: G is not estimated again."""
        _check_precision(prior_precision)
        other = copy(self)
        other._factor(prior_precision)
        return other

    def with_solver(self, solver: Solver) -> Laplace:
        """The same with another solver, as ``CG(tol=…, preconditioner=…)`` for ``Implicit``."""
        check_slots(solver=(solver, Solver))
        other = copy(self)
        other.solver = solver
        other._factor(self.prior_precision)
        return other

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters [s *shape] by name, drawn from the posterior; the global random stream is not touched."""
        if count < 1:
            raise ValueError(f"Laplace.sample(count) needs a count ≥ 1, got {count}")
        θ = self._flat_mode
        generator = generator or fresh_generator(θ.device)
        ξ = torch.randn(count, self.inverse.noise, generator=generator, dtype=θ.dtype, device=θ.device)
        return self._named(θ + self.coloured(ξ))

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
        for y, J in self.curvature.rows(x):
            half = self.inverse.whitened(J.flatten(0, 1)).view(*J.shape[:2], -1)  # [d n q]
            means.append(y)
            covariances.append(torch.einsum("dnq,enq->nde", half, half) / self.examples)
        return Predictive(torch.cat(means), torch.cat(covariances))

    def outputs(self, x: Inputs, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """y [s n *out] of the model itself, not linearised, at parameters drawn from the posterior."""
        drawn = self.sample(samples, generator)
        with torch.no_grad():
            return torch.stack(
                [self.curvature.model({name: t[s] for name, t in drawn.items()}, x) for s in range(samples)]
            )

    def log_marginal_likelihood(self, log_likelihood: Tensor | float) -> Tensor:
        """log p(data) ≈ log p(data | θ*) − ½δ‖θ*‖² + ½P log δ − ½ log det(N·G + δ) (MacKay 1992, (2.4), (2.5)).

        ``log_likelihood``: Σ_n log p(t_n | θ*), the sum over the N examples, with all constants.
        """
        ll = torch.as_tensor(log_likelihood, device=self._flat_mode.device)
        if ll.ndim > 0:
            raise ValueError(
                f"log_likelihood must be one number, the sum over all examples, got shape {tuple(ll.shape)}: sum it"
            )
        return ll.detach() + self._occam(self.prior_precision)

    def tuned(self) -> Laplace:
        """The same with the δ that maximises the marginal likelihood at this θ*.

        θ* was trained with another prior: to be exact, train again with the new one and repeat.
        """
        square = float(self._flat_mode.square().sum())
        trace = self.examples * float(self.operator.trace())
        δ = most_evident(lambda δ: float(self._occam(δ)), square, trace, self.operator.layout.size)
        return self.with_prior(δ)

    def _occam(self, δ: float) -> Tensor:
        """What is beside the likelihood. log det(N·G + δ) = P log N + log det(G + δ/N)."""
        P, N = self.operator.layout.size, self.examples
        logdet = P * math.log(N) + self.operator.logdet(δ / N)
        return 0.5 * (P * math.log(δ) - logdet - δ * self._flat_mode.square().sum())

    def _factor(self, prior_precision: float) -> None:
        """N·G + δ = N (G + δ/N): the prior is a damping of G."""
        self.prior_precision = float(prior_precision)
        self.inverse = self.solver.init(self.operator, self.prior_precision / self.examples)

    @property
    def _flat_mode(self) -> Tensor:
        return self.operator.layout.flatten(self.curvature.mode)

    def _named(self, θ: Tensor) -> dict[str, Tensor]:
        like = self.operator.layout.like
        parts = θ.split([t.numel() for t in like.values()], dim=1)
        return {name: p.reshape(-1, *t.shape).to(t.dtype) for (name, t), p in zip(like.items(), parts, strict=True)}


def _check_precision(prior_precision: float) -> None:
    if not (prior_precision > 0 and math.isfinite(prior_precision)):
        raise ValueError(
            f"prior_precision must be positive and finite, got {prior_precision}: it is 1/variance of the prior of "
            "every parameter (N times the weight decay of a mean loss)"
        )


def _solver(G: Operator) -> Solver:
    if not isinstance(G, ImplicitOperator):
        return Cholesky()
    return CG(tol=64 * torch.finfo(G.layout.dtype).eps ** 0.75, max_steps=10 * G.layout.size + 100)
