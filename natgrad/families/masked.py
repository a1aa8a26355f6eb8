"""Families with a mask: actions that are not possible, and steps of an episode that are not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from natgrad.families.base import Family, over_terms
from natgrad.families.categorical import Categorical
from natgrad.families.domain import first

_BELOW = 2000.0  # under the lowest possible logit: e^−2000 is 0 in every precision


class Mask(NamedTuple):
    """What is there in a batch of outputs y [n *terms *out].

    ``steps`` [n *terms]: False where an episode is over (padding), or weights w ≥ 0 of the terms, as γ^t.
    ``actions`` [n *terms c]: False where the action is not possible. None: all.
    """

    steps: Tensor | None = None
    actions: Tensor | None = None


@final
@dataclass(frozen=True)
class Masked(Family):
    """Any family, over the steps and the actions that its ``Mask`` leaves: F = Σ_t w_t F_t, KL = Σ_t w_t KL_t.

    The mask is the target of the batch: ``pullback(policy, x, Fisher(Masked(family)), target=mask)``, and
    ``opt.refresh(x, mask)`` before ``opt.step()``. What is masked has no length in the metric, and outputs there may be
    anything finite that is in the domain of the family. Examples are averaged over all n, whatever their steps: for the
    mean over the steps that are there, give weights ``valid * n / valid.sum()``. ``actions`` are for ``Categorical``: F
    is that of the softmax over the possible ones.

    >>> family = Masked(Categorical(), Mask(actions=torch.tensor([[True, True, False]])))
    >>> family.flat(torch.zeros(1, 3), torch.tensor([[1.0, 0.0, 5.0]]))
    tensor([[ 0.2500, -0.2500,  0.0000]])
    """

    family: Family
    mask: Mask | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.family, Family) or isinstance(self.family, Masked):
            raise TypeError(f"Masked takes a family, as Masked(Categorical()), got {self.family!r}")
        if self.mask is not None:
            _check_mask(self.mask, self.family)

    @property
    def needs_target(self) -> bool:
        return self.mask is None

    def given(self, target: Any) -> Family:
        return self if self.mask is not None else replace(self, mask=target)

    def check(self, y: Tensor) -> None:
        self.family.check(y)
        steps, actions = self._mask
        if actions is not None:
            _check_actions(actions, steps, y)
        if steps is not None:
            _check_steps(steps, self.family.terms(y), y)

    def terms(self, y: Tensor) -> int:
        return self.family.terms(y)

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._weighted(self.family.flat(self._possible(y), u), 1.0)

    def root(self, y: Tensor) -> Tensor:
        return self._weighted(self.family.root(self._possible(y)), 0.5)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return self._weighted(self.family.scores(self._possible(y), samples, generator), 0.5)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor | None:
        found = self.family.shared(self._possible(y), samples, generator)
        return None if found is None else self._weighted(found, 0.5)

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        y, y2, steps = self._possible(y), self._possible(y2), self._mask.steps
        if steps is None:
            return self.family.kl(y, y2)
        # Examples are independent, as terms are: every term as an example of its own.
        alone = self.family.kl(y.flatten(0, steps.ndim - 1), y2.flatten(0, steps.ndim - 1))
        return over_terms(alone.view(steps.shape) * steps.to(y.dtype))

    @property
    def _mask(self) -> Mask:
        if self.mask is None:
            raise ValueError(
                f"{self!r} has no mask: give the batch one, target=Mask(steps=…, actions=…), or Masked(family, mask)"
            )
        return self.mask

    def _weighted(self, values: Tensor, power: float) -> Tensor:
        """Times w^power, for values [* n *terms *out]; a column of a root touches one term only."""
        steps = self._mask.steps
        if steps is None:
            return values
        w = steps.to(values.dtype).pow(power)
        return values * _over_outputs(w, values.ndim - int(power != 1.0))

    def _possible(self, y: Tensor) -> Tensor:
        """y, with logits of impossible actions so low that their probability is zero, and KL finite."""
        steps, actions = self._mask
        if actions is None:
            return y
        none = ~actions.any(-1, keepdim=True)
        kept = actions | none
        lowest = y.detach().masked_fill(~kept, torch.inf).amin(-1, keepdim=True)
        filled = torch.where(kept, y, lowest - _BELOW)
        # A GPU is not waited for to refuse a step without actions: what is not finite is found later.
        return filled.masked_fill(none & _there(steps, none), torch.nan)


def _over_outputs(w: Tensor, ndim: int) -> Tensor:
    """w [n *terms] beside outputs [n *terms *out] with so many axes."""
    return w.reshape(*w.shape, *[1] * (ndim - w.ndim))


def _there(steps: Tensor | None, like: Tensor) -> Tensor:
    """Which steps count, beside ``like`` [n *terms 1]."""
    return torch.ones_like(like) if steps is None else _over_outputs(steps != 0, like.ndim)


def _check_mask(mask: Mask, family: Family) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(
            f"the mask of Masked({family!r}) must be a Mask(steps=…, actions=…), got {type(mask).__name__}: pass "
            "target=Mask(…), or opt.refresh(x, Mask(…))"
        )
    if any(part is not None and not isinstance(part, Tensor) for part in mask):
        raise TypeError("Mask(steps=…, actions=…) takes tensors, as torch.tensor([[True, False]])")
    if mask.actions is None:
        return
    if not isinstance(family, Categorical) or family.minimal:
        raise TypeError(f"Mask(actions=…) is for the logits of Categorical(), not of {family!r}: use Mask(steps=…)")
    if mask.actions.dtype is not torch.bool:
        raise TypeError(f"Mask(actions=…) must be of booleans, True where possible, got {mask.actions.dtype}")


def _check_steps(steps: Tensor, terms: int, y: Tensor) -> None:
    if steps.shape != y.shape[: steps.ndim] or terms % max(1, steps.shape[1:].numel()):
        raise ValueError(
            f"Mask(steps=…) must be [n *terms], one number a term, and not within one: got shape {tuple(steps.shape)} "
            f"for outputs of shape {tuple(y.shape)} with {terms} terms an example"
        )
    if steps.dtype is torch.bool or steps.device.type != "cpu":
        return
    wrong = ~((steps >= 0) & steps.isfinite())
    if bool(wrong.any()):
        at = first(wrong)
        raise ValueError(
            f"Mask(steps=…) are finite weights ≥ 0, got {float(steps[at]):.3g} at {at}: a metric is not negative"
        )


def _check_actions(actions: Tensor, steps: Tensor | None, y: Tensor) -> None:
    if actions.shape != y.shape:
        raise ValueError(
            f"Mask(actions=…) must have the shape of the logits, got {tuple(actions.shape)} for {tuple(y.shape)}"
        )
    none = ~actions.any(-1, keepdim=True)
    if actions.device.type == "cpu" and bool((none & _there(steps, none)).any()):
        where = tuple((none & _there(steps, none)).squeeze(-1).nonzero()[0].tolist())
        raise ValueError(f"no action is possible at {where} [n *terms]: mark the step as padding, Mask(steps=…)")
