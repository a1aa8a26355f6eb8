"""The Fisher metric of any output family: exact, or by sampling targets from the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor
from torch.distributions import Distribution

from natgrad.families.base import Family
from natgrad.families.categorical import Masked
from natgrad.families.distribution import FromDistribution
from natgrad.output.metric import OutputMetric, Reduction, Sampled, check_samples, fresh_generator, weight


@final
@dataclass(frozen=True)
class Fisher(OutputMetric):
    """h = F_y = E_{t ~ p(·|y)}[∇log p ∇log pᵀ], the Hessian of ρ(y, y0) = KL(p_y0 ‖ p_y) at y0 (Amari 1998).

    ``family``: an output family, or a function from the outputs to a ``torch.distributions`` distribution.
    ``samples``: None for the exact metric; k to draw k targets from the model for each example, s = ∇log p(t)/√k.
    ``reduction="mean"`` divides by the number of terms (tokens, pixels) of an example.
    For a ``Masked`` family (invalid actions, padded steps) the target is the mask of the batch.

    >>> from natgrad.families import Categorical
    >>> Fisher(Categorical()).root(torch.zeros(4, 3)).shape
    torch.Size([3, 4, 3])
    >>> Fisher(lambda y: torch.distributions.Poisson(y.exp()), samples=1).root(torch.zeros(4, 3)).shape
    torch.Size([1, 4, 3])
    """

    family: Family | Callable[[Tensor], Distribution]
    samples: int | None = None
    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        if isinstance(self.family, type) and issubclass(self.family, Family):
            raise TypeError(f"Fisher takes an instance: write Fisher({self.family.__name__}())")
        if not isinstance(self.family, Family) and not callable(self.family):
            raise TypeError(f"Fisher takes a family or a function to a distribution, got {type(self.family).__name__}")
        check_samples(self.samples)
        weight(self.reduction, 1)
        if isinstance(self.family, Masked) and self.reduction == "mean":
            raise ValueError(
                'Fisher(Masked(…), reduction="mean") would count padded steps: leave reduction="sum", and give weights '
                "as the mask, Mask(steps=valid / valid.sum(1, keepdim=True))"
            )

    def unsampled(self) -> Fisher:
        return replace(self, samples=None)

    def unflattened(self) -> Fisher:
        return replace(self, family=self.family.unflattened()) if isinstance(self.family, Family) else self

    @property
    def needs_target(self) -> bool:
        return isinstance(self.family, Family) and self.family.needs_target

    def check_target(self, target: Any) -> None:
        if self.needs_target and target is None:
            raise ValueError(
                f"{self.family!r} needs the mask of the batch: pass target=Mask(steps=…, actions=…) (in a training "
                "loop: opt.refresh(x, mask) before opt.step())"
            )

    @property
    def exact(self) -> bool:
        return self.samples is None

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        family, w = self._at(y, target)
        return family.flat(y, u) * w

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        family, w = self._at(y, target)
        if self.samples is None:
            return family.root(y) * w**0.5
        generator = generator or fresh_generator(y.device)
        scores = family.scores(y, self.samples, generator)
        return scores if w == self.samples == 1 else scores * (w / self.samples) ** 0.5

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        """Sampled targets belong to one example, so all examples share a random combination of the root's columns."""
        if self.samples is None:
            return self.root(y, target)
        family, w = self._at(y, target)
        generator = generator or fresh_generator(y.device)
        root = family.shared(y, self.samples, generator)
        if root is None:
            return Sampled(replace(self, samples=None), self.samples).shared_root(y, target, generator)
        return root * (w / self.samples) ** 0.5

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        family, w = self._at(y, target)
        return family.kl(y0, y) * w

    def terms(self, y: Tensor) -> int:
        """The number of terms (tokens, pixels) of an example, including masked ones."""
        family = self._family
        if not family.needs_target:
            family.check(y)
        return family.terms(y)

    @property
    def _family(self) -> Family:
        return self.family if isinstance(self.family, Family) else FromDistribution(self.family)

    def _at(self, y: Tensor, target: Any) -> tuple[Family, float]:
        family = self._family.given(target)
        family.check(y)
        return family, weight(self.reduction, family.terms(y))
