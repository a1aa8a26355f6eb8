"""Bayesian neural networks: a Gaussian posterior whose precision is a metric in any structure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import can_read
from natgrad.errors import NatgradError, NonFiniteError
from natgrad.geometry import Covector
from natgrad.model import Inputs, Model, check_slots
from natgrad.optim.checkpoint import (
    check_entries,
    check_finite,
    check_generator,
    check_signature,
    in_words,
    operator_of,
    renamed,
    structure_in_words,
)
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.pullbacks.operation_layers import loaded, with_layers
from natgrad.pullbacks.pullback import Observer, layers_of
from natgrad.solve.solvers import Cholesky
from natgrad.structures.base import Inverse, Operator, Structure
from natgrad.structures.eigen_kronecker import EigenKroneckerOperator
from natgrad.vi.laplace import check_precision, draw, outputs_at
from natgrad.vi.posterior import check_rate

_EXACT = 2048  # the largest dimension whose trace of the covariance is exact
_DRAWS = 64  # samples of the trace beyond that


@final
@dataclass(frozen=True)
class Prior:
    """The Gaussian prior of a variational network, and the size of its training set.

    Args:
        precision: δ of the prior θ ~ N(0, 1/δ).
        examples: N, the number of all training examples.
    """

    precision: float
    examples: int

    def __post_init__(self) -> None:
        check_precision(self.precision, "Prior(precision=…)")
        if self.examples < 1:
            raise ValueError(f"Prior(examples=…) is the number of all training examples, got {self.examples}")

    @property
    def damping(self) -> float:
        """δ/N: N·G + δ = N (G + δ/N)."""
        return self.precision / self.examples


@final
@dataclass(frozen=True)
class Rates:
    """The step sizes of a variational network, for its mean and for its precision.

    Args:
        mean: α of the mean, in (0, 1].
        precision: β of the precision, in (0, 1]. Both are 1 in a step that is exact for linear models.
    """

    mean: float = 0.1
    precision: float = 0.1

    def __post_init__(self) -> None:
        check_rate(self.mean)
        check_rate(self.precision)


@final
class VariationalNetwork:
    """Train a Gaussian distribution over the weights of a network, by natural gradient.

    Between steps the model's parameters are the means μ. ``Diagonal`` with ``Empirical`` is VOGN, ``Kronecker`` with
    ``Fisher`` is noisy K-FAC (Zhang et al. 2018).

    Args:
        model: The network to train.
        metric: The metric of the outputs, or the loss.
        structure: How the metric is held, in any structure that can be drawn from. ``EigenKronecker`` is measured in
            the eigenvectors of the last Λ, and carried to those of the new one.
        prior: The prior of the weights, and the number of training examples.
        rates: The step sizes; 0.1 for mean and precision by default.
        pairs: Expectations are means over this many pairs of samples μ ± ε: terms that are odd in ε cancel, and linear
            models are exact.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.

    Method:
        q(θ) = N(μ, (N·G + δ)⁻¹). In the natural parameters of a Gaussian the natural gradient of the ELBO is its
        gradient in the mean parameters (Grosse 2021); with the Gauss–Newton matrix N·G for the Hessian of Σ −log p, a
        step is (Khan et al. 2018)

            Λ ← (1 − β) Λ + β E_q[N·G(θ) + δ],    μ ← μ − α Λ⁻¹ (N E_q[∇ℓ(θ)] + δ μ),

        ℓ the mean of −log p over the examples. As G ⪰ 0, Λ ⪰ (1 − β)Λ + βδ after every step: no step can leave the
        domain, and none has to be shortened. The first step, before there is a Λ, is taken at μ itself.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x, y = nn.Linear(2, 1), torch.randn(20, 2), torch.randn(20, 1)
        >>> metric, prior = ng.Fisher(ng.Gaussian()), ng.vi.Prior(precision=1.0, examples=20)
        >>> net = ng.vi.VariationalNetwork(model, metric, ng.Kronecker(), prior, rates=ng.vi.Rates(1.0, 1.0))
        >>> loss = net.step(x, y, lambda out, y: 0.5 * (out - y).square().sum(1).mean())
        >>> net.outputs(x, samples=5).shape
        torch.Size([5, 20, 1])
    """

    def __init__(
        self,
        model: nn.Module,
        metric: OutputMetric | Criterion,
        structure: Structure,
        prior: Prior,
        rates: Rates | None = None,
        pairs: int = 1,
        generator: torch.Generator | None = None,
    ) -> None:
        metric = metric_of(metric)
        if metric.heads is not None:
            raise TypeError(
                f"VariationalNetwork takes one output, and {metric!r} is on {len(metric.heads)} heads: let the model "
                "return one, or use an optimizer"
            )
        given = getattr(metric, "loss", None)
        if getattr(given, "reduction", None) == "sum":
            raise ValueError(
                f"VariationalNetwork takes the metric of ℓ, a mean over the examples, and {given!r} is their sum: its "
                'precision would grow with the batch. Give it with reduction="mean"'
            )
        check_slots(structure=(structure, Structure), prior=(prior, Prior))
        structure.require_whole("VariationalNetwork")
        if pairs < 1:
            raise ValueError(f"VariationalNetwork(pairs=…) needs one pair of samples or more, got {pairs}")
        self.model: Model = Model.of(model)
        self.metric: OutputMetric = metric
        self.structure: Structure = structure
        self.prior: Prior = prior
        self.rates: Rates = rates or Rates()
        self.pairs: int = pairs
        self.generator: torch.Generator = generator or fresh_generator(self.model.example.device)
        # One for all steps: it caches what it learns about the model, and logs it once.
        self._view = Observer(self.model, metric, layers_of(self.model), self.generator)
        self._posterior: tuple[Operator, Inverse] | None = None

    def __repr__(self) -> str:
        return f"VariationalNetwork({self.metric!r}, {self.structure!r}, {self.prior!r})"

    @property
    def operator(self) -> Operator:
        """G, averaged over the steps."""
        return self._state[0]

    @property
    def inverse(self) -> Inverse:
        """(G + δ/N)⁻¹: N times the covariance."""
        return self._state[1]

    def step(self, x: Inputs, target: Any, loss: Callable[[Tensor, Any], Tensor]) -> Tensor:
        """One step on a batch. ``loss(outputs, target)``: ℓ, the mean of −log p over the batch, which is returned."""
        slopes, values, new = [], [], None
        last = None if self._posterior is None else self.operator
        for k, ε in enumerate(self._noise()):
            with self._at(ε):
                pb = self._view.checked(x, target)
                G = self.structure.estimate(pb, new or last)
                new = G if new is None else new.lerp(G, 1 / (k + 1))
                value, slope = self._differential(x, target, loss)
            slopes.append(slope)
            values.append(value)
        assert new is not None
        G = new.finite()
        if last is not None:
            G = last.lerp(G, self.rates.precision)
            G = G.with_new_basis() if isinstance(G, EigenKroneckerOperator) else G
        inverse = Cholesky().init(G, self.prior.damping)
        layout = G.layout
        μ = layout.flatten({name: p.detach() for name, p in self.model.params.items()})
        total = torch.stack([layout.flatten(slope) for slope in slopes]).mean(0) + self.prior.damping * μ
        moved = layout.vector(μ - self.rates.mean * inverse.solve(total))
        with torch.no_grad():
            for name, p in self.model.params.items():
                p.copy_(moved[name])
        self._posterior = G, inverse
        return torch.stack(values).mean()

    def sample(self, count: int, generator: torch.Generator | None = None) -> dict[str, Tensor]:
        """Parameters [s *shape] by name, drawn from q."""
        μ = {name: p.detach() for name, p in self.model.params.items()}
        return draw(μ, self.operator, self.inverse, self.prior.examples, count, generator or self.generator)

    def outputs(self, x: Inputs, samples: int, generator: torch.Generator | None = None) -> Tensor:
        """y [s n *out] at parameters drawn from q."""
        return outputs_at(self.model, self.sample(samples, generator), x)

    def divergence(self) -> Tensor:
        """KL(q ‖ prior) = ½(δ tr Σ + δ‖μ‖² − P − P log δ + log det Λ) [].

        tr Σ is exact up to 2048 parameters, and the mean of 64 draws of ‖ε‖² beyond.
        """
        δ, N, P = self.prior.precision, self.prior.examples, self.operator.layout.size
        μ = self.operator.layout.flatten({name: p.detach() for name, p in self.model.params.items()})
        logdet = P * math.log(N) + self.operator.logdet(self.prior.damping)
        return 0.5 * (δ * (self._trace() + μ.square().sum()) - P * (1 + math.log(δ)) + logdet)

    def elbo(self, x: Inputs, target: Any, loss: Callable[[Tensor, Any], Tensor], samples: int = 16) -> Tensor:
        """−N E_q ℓ − KL(q ‖ prior) [], with ℓ on this batch, by samples."""
        y = self.outputs(x, samples)
        expected = torch.stack([loss(each, target) for each in y]).mean()
        return -self.prior.examples * expected - self.divergence()

    def state_dict(self) -> dict[str, Any]:
        """The metric and the random stream. μ is in the model, whose own state belongs beside this one."""
        tensors = {} if self._posterior is None else self.operator.tensors()
        operator = {key: t.clone() for key, t in tensors.items()}
        layers = {"operations": self._view.cache.operations.state()}  # of parameters that are used outside of modules
        return {**self._signature(), **layers, "operator": operator, "generator": self.generator.get_state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume, bit for bit, from the state of a posterior over the same parameters in the same structure.

        A state that does not fit is refused, and nothing changes.
        """
        state, signature = renamed(state), self._signature()
        kinds = {name: type(value) for name, value in signature.items()}
        check_entries(state, {**kinds, "operator": dict, "generator": Tensor}, "the state")
        words = structure_in_words(self.structure, state["structure"])
        check_signature("posterior", state | {"structure": words}, signature)
        check_finite("the metric", state["operator"])
        check_generator(state["generator"], self.generator)
        tensors = {key: t.to(self.model.example.device, copy=True) for key, t in state["operator"].items()}
        blocks, operations = self._view.blocks, self._view.cache.operations
        layers = loaded(self.model, blocks, state.get("operations", ()))
        G = operator_of(self.structure, self.model, with_layers(blocks, layers), tensors) if tensors else None
        self._posterior = None if G is None else (G, Cholesky().init(G, self.prior.damping))
        operations.put(layers, blocks)
        if state["generator"].shape == self.generator.get_state().shape:  # else it is of another kind of device
            self.generator.set_state(state["generator"].cpu())

    def _signature(self) -> dict[str, Any]:
        """What a saved state must agree with."""
        return {
            "metric": in_words(self.metric.unsampled()),
            "structure": structure_in_words(self.structure),
            "dtype": str(self.model.example.dtype),
            "parameters": {name: list(p.shape) for name, p in self.model.params.items()},
        }

    @property
    def _state(self) -> tuple[Operator, Inverse]:
        if self._posterior is None:
            raise NatgradError("there is no posterior before the first step: call step(x, target, loss)")
        return self._posterior

    def _noise(self) -> list[Tensor | None]:
        """ε and −ε of every pair; None before the first step."""
        if self._posterior is None:
            return [None]
        return [sign * ε for ε in self._drawn(self.pairs, self.generator) for sign in (1, -1)]

    def _drawn(self, count: int, generator: torch.Generator) -> Tensor:
        """ε [s p] ~ N(0, (N·G + δ)⁻¹)."""
        like = self.model.example
        dtype = self.operator.layout.dtype
        ξ = torch.randn(count, self.inverse.root_size, generator=generator, dtype=dtype, device=like.device)
        return self.inverse.root_times(ξ) / math.sqrt(self.prior.examples)

    def _trace(self) -> Tensor:
        q, layout = self.inverse.root_size, self.operator.layout
        if q > _EXACT:
            return self._drawn(_DRAWS, self.generator).square().sum(1).mean()
        eye = torch.eye(q, dtype=layout.dtype, device=self.model.example.device)
        return self.inverse.root_times(eye).square().sum() / self.prior.examples

    @contextmanager
    def _at(self, ε: Tensor | None) -> Iterator[None]:
        """Inside, the parameters are μ + ε; afterwards they are μ, bit for bit."""
        if ε is None:
            yield
            return
        μ = {name: p.detach().clone() for name, p in self.model.params.items()}
        shift = self.operator.layout.vector(ε)
        try:
            with torch.no_grad():
                for name, p in self.model.params.items():
                    p.add_(shift[name])
            yield
        finally:
            with torch.no_grad():
                for name, p in self.model.params.items():
                    p.copy_(μ[name])

    def _differential(self, x: Inputs, target: Any, loss: Callable[[Tensor, Any], Tensor]) -> tuple[Tensor, Covector]:
        with torch.enable_grad():
            value = loss(self.model(None, x), target)
            if value.ndim > 0:
                shape = tuple(value.shape)
                raise ValueError(
                    f"loss(outputs, target) must be one number, the mean over the batch, got shape {shape}"
                )
            if not value.requires_grad:
                raise ValueError("loss(outputs, target) has no graph: compute it from the outputs, undetached")
            slopes = torch.autograd.grad(value, list(self.model.params.values()), allow_unused=True)
        numbers = {"loss": [value.detach()], "gradient of the loss": [s for s in slopes if s is not None]}
        for what, tensors in numbers.items():
            if can_read(value) and not all(bool(t.isfinite().all()) for t in tensors):
                raise NonFiniteError(
                    f"the {what} is NaN or infinity at a sample of q. Nothing was changed: check the batch"
                )
        named = zip(self.model.params.items(), slopes, strict=True)
        return value.detach(), Covector({name: torch.zeros_like(p) if s is None else s for (name, p), s in named})
