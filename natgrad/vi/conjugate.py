"""Conjugate likelihoods: log p(data | z) is linear in the sufficient statistics of the family of z.

The posterior of a prior η₀ is η₀ + λ, with λ the ``sites`` of the data.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import constraints
from torch.distributions.constraints import Constraint

from natgrad.errors import DomainError
from natgrad.families import Bernoulli, Beta, Categorical, Dirichlet, ExponentialFamily, VonMises


class Conjugate(ABC):
    """p(x | z) with log p(x | z) = ⟨λ(x), t(z)⟩ + constant, for t of ``family``, the family of z."""

    @property
    @abstractmethod
    def family(self) -> ExponentialFamily:
        """The family of prior and posterior."""

    @property
    @abstractmethod
    def support(self) -> Constraint:
        """Where a datum may lie."""

    @abstractmethod
    def _sites(self, x: Tensor) -> Tensor: ...

    def sites(self, x: Tensor) -> Tensor:
        """λ of all data x [n *batch *event], summed over n; of the shape of a point."""
        if x.ndim == 0 or x.shape[0] == 0:
            raise ValueError(f"{type(self).__name__} needs data [n …] with n ≥ 1, got shape {tuple(x.shape)}")
        wrong = ~self.support.check(x)
        if bool(wrong.any()):
            at = [int(i) for i in wrong.nonzero()[0]]
            raise DomainError(
                f"datum x{at} of {type(self).__name__} lies outside its support, {self.support}: remove it, or choose "
                "another likelihood"
            )
        return self._sites(x)


class Probability(Conjugate):
    """z is a probability with a Beta prior, t = (log z, log(1 − z)); λ counts successes and failures."""

    @property
    def family(self) -> Beta:
        return Beta()

    @property
    def support(self) -> Constraint:
        return constraints.nonnegative_integer


@final
@dataclass(frozen=True)
class BernoulliProbability(Probability):
    """x ∈ {0, 1} with P(1) = z.

    >>> BernoulliProbability().sites(torch.tensor([1.0, 1.0, 0.0]))
    tensor([2., 1.])
    """

    @property
    def support(self) -> Constraint:
        return constraints.boolean

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(0), (1 - x).sum(0)], -1)


@final
@dataclass(frozen=True)
class BinomialProbability(Probability):
    """x of ``count`` trials succeed, each with probability z."""

    count: int

    @property
    def support(self) -> Constraint:
        return constraints.integer_interval(0, self.count)

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(0), (self.count - x).sum(0)], -1)


@final
@dataclass(frozen=True)
class NegativeBinomialProbability(Probability):
    """x successes, each of probability z, before ``count`` failures, as in torch.distributions."""

    count: float

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([x.sum(0), torch.full_like(x, self.count).sum(0)], -1)


@final
@dataclass(frozen=True)
class GeometricProbability(Probability):
    """x failures before the first success, which has probability z, as in torch.distributions."""

    def _sites(self, x: Tensor) -> Tensor:
        return torch.stack([torch.ones_like(x).sum(0), x.sum(0)], -1)


@final
@dataclass(frozen=True)
class CategoricalProbabilities(Conjugate):
    """x is one of ``classes`` classes 0, 1, … with probabilities z, of a Dirichlet prior, t = log z; λ counts them.

    >>> CategoricalProbabilities(3).sites(torch.tensor([0, 2, 2]))
    tensor([1., 0., 2.])
    """

    classes: int

    @property
    def family(self) -> Dirichlet:
        return Dirichlet()

    @property
    def support(self) -> Constraint:
        return constraints.integer_interval(0, self.classes - 1)

    def _sites(self, x: Tensor) -> Tensor:
        counted = torch.nn.functional.one_hot(x.long(), self.classes).sum(0)
        return counted.to(x.dtype if x.is_floating_point() else torch.get_default_dtype())


@final
@dataclass(frozen=True)
class MultinomialProbabilities(Conjugate):
    """x [c] are counts of classes with probabilities z, of a Dirichlet prior."""

    @property
    def family(self) -> Dirichlet:
        return Dirichlet()

    @property
    def support(self) -> Constraint:
        return constraints.independent(constraints.nonnegative_integer, 1)

    def _sites(self, x: Tensor) -> Tensor:
        return x.sum(0)


@final
@dataclass(frozen=True)
class VonMisesDirection(Conjugate):
    """Angles x around the direction z with a known concentration κ: log p = κ cos(x − z), t = (cos z, sin z)."""

    concentration: float

    def __post_init__(self) -> None:
        check_positive(self, "concentration", self.concentration)

    @property
    def family(self) -> VonMises:
        return VonMises()

    @property
    def support(self) -> Constraint:
        return constraints.real

    def _sites(self, x: Tensor) -> Tensor:
        return self.concentration * torch.stack([x.cos().sum(0), x.sin().sum(0)], -1)


@final
@dataclass(frozen=True)
class MixtureComponent(Conjugate):
    """z is the component that all data come from: x [n c] holds log p(datum n | component c), t = one-hot z.

    >>> MixtureComponent().sites(torch.tensor([[-1.0, -2.0], [-1.0, -3.0]]))
    tensor([-2., -5.])
    """

    @property
    def family(self) -> Categorical:
        return Categorical()

    @property
    def support(self) -> Constraint:
        return constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        return x.sum(0)


@final
@dataclass(frozen=True)
class Alternative(Conjugate):
    """z ∈ {0, 1} says which of two models the data come from: x [n 2] holds log p(datum | z) for z = 0 and z = 1."""

    @property
    def family(self) -> Bernoulli:
        return Bernoulli()

    @property
    def support(self) -> Constraint:
        return constraints.real_vector

    def _sites(self, x: Tensor) -> Tensor:
        return (x[..., 1] - x[..., 0]).sum(0)


def check_positive(likelihood: Conjugate, name: str, value: float | Tensor) -> None:
    """Refuse a known parameter that is not positive and finite."""
    inside = bool(((value > 0) & value.isfinite()).all()) if isinstance(value, Tensor) else 0 < value < math.inf
    if not inside:
        raise ValueError(f"{type(likelihood).__name__}({name}=…) must be positive and finite, got {value}")
