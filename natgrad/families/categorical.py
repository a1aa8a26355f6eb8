"""Families with a mask: actions that are not possible, and steps of an episode that are not there."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.distributions import Categorical as TorchCategorical
from torch.distributions import Distribution, OneHotCategorical
from torch.distributions import constraints as C
from torch.nn import functional as F

from natgrad.families.base import Family, by_terms, check_terms, drawn_once, over_terms
from natgrad.families.domains import Box, Corner, Domain, Simplex, entry, first
from natgrad.families.exponential import ExponentialFamily, expect
from natgrad.families.information import Centred, Downdated, Information

# The categorical family, over one-hot data, in its redundant and in its minimal chart.


@final
@dataclass(frozen=True)
class Categorical(ExponentialFamily):
    """Softmax of logits y [n *terms c]: F = diag p − p pᵀ a term, singular along the constant vector (ERRATA 34).

    Root: √p_k (e_k − p), one column a class, the rows of the Hellinger embedding 2√p (ERRATA 12).

    As a distribution: x one-hot [*batch c], t(x) = x, log Z = log Σ exp η, ξ = p. The natural parameters are
    log-probabilities up to a constant, not log-odds, and ``natural`` returns those of zero mean. ``minimal=True``:
    log-odds against the last class [*batch c−1], in which F is regular.

    >>> Categorical().flat(torch.zeros(1, 2), torch.tensor([[1.0, 1.0]]))
    tensor([[0., 0.]])
    >>> Categorical(minimal=True).natural(torch.tensor([0.25, 0.5]))
    tensor([0.0000, 0.6931])
    """

    minimal: bool = False

    def __repr__(self) -> str:
        return "Categorical(minimal=True)" if self.minimal else "Categorical()"

    # As an output family

    def check(self, y: Tensor) -> None:
        if self.minimal:
            check_terms(self, y, 1, "the log-odds of the classes against the last")
        else:
            check_terms(self, y, 2, "the logits of the classes")

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        p = self._mean(y)
        return p * (u - (p * u).sum(-1, keepdim=True))

    def root(self, y: Tensor) -> Tensor:
        p = self._full(y).softmax(-1)
        centred = torch.eye(p.shape[-1], dtype=y.dtype, device=y.device) - p.unsqueeze(-2)  # [n *terms k c]
        columns = p.sqrt().unsqueeze(-1) * centred
        return by_terms(self._kept(columns).movedim(-2, 0))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(y).softmax(-1)
        t = _drawn(p, samples, generator)
        return self._kept(torch.zeros(samples, *p.shape, dtype=y.dtype, device=y.device).scatter_(-1, t, 1.0).sub_(p))

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(y).softmax(-1)
        combined = drawn_once(p, samples, generator) * p.sqrt()
        return self._kept(combined - p * combined.sum(-1, keepdim=True))

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        self._alike(y, y2, "y2")
        log_p, log_q = self._full(y).log_softmax(-1), self._full(y2).log_softmax(-1)
        return over_terms((log_p.exp() * (log_p - log_q)).sum(-1))

    # As a distribution

    @property
    def natural_domain(self) -> Domain:
        return Box()

    @property
    def mean_domain(self) -> Domain:
        return Corner() if self.minimal else Simplex()

    @property
    def support(self) -> C.Constraint:
        return C.one_hot

    def statistics(self, x: Tensor) -> Tensor:
        return self._kept(x)

    def log_base(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x[..., 0])

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p + self.minimal,)

    def log_prob(self, eta: Tensor, x: Tensor) -> Tensor:
        """As of every family; classes may be given by their numbers, integers [*batch], too."""
        if x.is_floating_point() or x.dtype is torch.bool:
            return super().log_prob(eta, x)
        return super().log_prob(eta, _one_hot(x, eta.shape[-1] + self.minimal).to(eta.dtype))

    def distribution(self, eta: Tensor) -> Distribution:
        return OneHotCategorical(logits=self._full(self._inside(eta, self.natural_domain, "eta")))

    def from_distribution(self, d: Distribution) -> Tensor:
        expect(self, d, OneHotCategorical, TorchCategorical)
        assert isinstance(d, (OneHotCategorical, TorchCategorical))
        return d.logits[..., :-1] - d.logits[..., -1:] if self.minimal else d.logits

    def _width(self, p: int) -> str:
        return "" if p else "the logits of the classes"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._full(eta).logsumexp(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._kept(self._full(eta).softmax(-1))

    def _natural(self, xi: Tensor) -> Tensor:
        if self.minimal:
            return xi.log() - torch.log1p(-xi.sum(-1, keepdim=True))
        log_p = xi.log()
        return log_p - log_p.mean(-1, keepdim=True)

    def _fisher(self, eta: Tensor) -> Information:
        p = self._full(eta).softmax(-1)
        return (
            Downdated(p[..., :-1], p[..., :-1], torch.ones_like(p[..., 0]), p[..., -1]) if self.minimal else Centred(p)
        )

    def _expected_log_base(self, eta: Tensor) -> Tensor:
        return torch.zeros_like(eta[..., 0])

    def _full(self, eta: Tensor) -> Tensor:
        """The logits of all classes."""
        return F.pad(eta, (0, 1)) if self.minimal else eta

    def _kept(self, x: Tensor) -> Tensor:
        """The entries that the chart has."""
        return x[..., :-1] if self.minimal else x


def _one_hot(x: Tensor, classes: int) -> Tensor:
    """[*batch c] of numbers; a GPU is not waited for, and a number that is no class has no 1."""
    if x.device.type != "cuda" and not torch._C._are_functorch_transforms_active():
        wrong = (x < 0) | (x >= classes)
        if bool(wrong.any()):
            at = first(wrong)
            raise ValueError(
                f"x{entry(at)} = {int(x[at])} is not one of the {classes} classes of Categorical: count them from 0"
            )
    return x.unsqueeze(-1) == torch.arange(classes, device=x.device)


def _drawn(p: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """t [k n *terms 1] with probabilities p [n *terms c].

    As ``torch.multinomial``, which looks at its argument first, so that a GPU waits. What is not finite is not refused
    here: it stays so in the scores.
    """
    if p.device.type == "cpu":  # numbers are dear: one a term, and the class where the sum of p exceeds it
        u = torch.rand(samples, *p.shape[:-1], 1, dtype=torch.float64, generator=generator)
        below = p.cumsum(-1, dtype=torch.float64)
        # Rounded probabilities do not sum to 1: what is missing would be drawn as the last class, though it had p = 0.
        return (below[..., :-1] <= u * below[..., -1:]).sum(-1, keepdim=True)
    # Of independent events with rates p the first is t with probability p_t. It needs no sum, which depends on its
    # order, and fewer launches.
    waiting = torch.empty(samples, *p.shape, dtype=p.dtype, device=p.device).exponential_(generator=generator)
    return (p / waiting).argmax(-1, keepdim=True)


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
