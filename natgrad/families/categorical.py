"""The categorical family, in its redundant and its minimal chart; and masks for impossible actions and padding."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, NamedTuple, final

import torch
from torch import Tensor
from torch import distributions as D
from torch.distributions import constraints as C
from torch.nn import functional as F

from natgrad.accelerate.devices import can_read, is_asynchronous
from natgrad.families.base import ExponentialFamily, Family, by_terms, expect, over_terms, shared_normals
from natgrad.families.domains import Corner, Domain, Simplex, Space, entry, first
from natgrad.families.information import Information
from natgrad.linalg import is_number
from natgrad.show import brief


@final
@dataclass(frozen=True)
class Categorical(ExponentialFamily):
    """The family of class labels, with logits as outputs: what a softmax classifier needs.

    Args:
        minimal: Describe a distribution by log-odds against the last class [*batch c−1], in which the Fisher matrix is
            regular. By default there are as many logits as classes, and adding a constant to all of them changes
            nothing.
        axis: The axis of the classes in the outputs of a model: −1 for tokens [n t c], 1 for pixels [n c h w], as
            torch's losses have it. Outputs [n c] need none; with more axes it must be given, here or by a loss
            (``ng.metric_of``).

    Method:
        Softmax of logits y [n *terms c]: F = diag p − p pᵀ a term, singular along the constant vector.

        Root: √p_k (e_k − p), one column a class: the derivative of the Hellinger embedding y ↦ 2√p.

        As a distribution: x one-hot [*batch c], t(x) = x, log Z = log Σ exp η, ξ = p. The natural parameters are
        log-probabilities up to a constant, and ``natural`` returns those with mean zero.

    Example:
        >>> Categorical().flat(torch.zeros(1, 2), torch.tensor([[1.0, 1.0]]))
        tensor([[0., 0.]])
        >>> Categorical(minimal=True).natural(torch.tensor([0.25, 0.5]))
        tensor([0.0000, 0.6931])
        >>> Categorical(axis=1).terms(torch.zeros(2, 3, 4, 5))
        20
    """

    minimal: bool = False
    axis: int | None = field(default=None, repr=False)  # not named in a checkpoint: those of 0.1.0 have none

    natural_domain: ClassVar[Domain] = Space()
    support: ClassVar[C.Constraint] = C.one_hot

    def __post_init__(self) -> None:
        if self.axis is not None and (not is_number(self.axis, whole=True) or self.axis == 0):
            raise ValueError(
                f"Categorical(axis={self.axis!r}) is the axis of the classes: −1, or 1 for outputs [n c *terms], and "
                "not 0, which is that of the examples"
            )

    def __repr__(self) -> str:
        given = {"minimal": self.minimal or None, "axis": self.axis}
        return f"Categorical({', '.join(f'{name}={value}' for name, value in given.items() if value is not None)})"

    # As an output family

    def check(self, y: Tensor) -> None:
        if self.axis is None and y.ndim > 2:
            raise ValueError(
                f"Categorical() does not know which axis of outputs of shape {tuple(y.shape)} has the classes: write "
                "Categorical(axis=-1) for [n *terms c], as of tokens, Categorical(axis=1) for [n c *terms], as of "
                "pixels, or give the loss itself, metric_of(nn.CrossEntropyLoss())"
            )
        if self.axis is not None and not -y.ndim < self.axis < y.ndim:
            raise ValueError(f"{self!r}: outputs of shape {tuple(y.shape)} have no such axis beside the examples")
        last = self.last(y)
        what = "log-odds of the classes against the last" if self.minimal else "logits of the classes"
        fewest = 1 if self.minimal else 2
        if last.ndim < 2 or last.shape[-1] < fewest:
            raise ValueError(
                f"Categorical needs the {what} on the last axis, outputs [n … {fewest} or more], got outputs of shape "
                f"{tuple(last.shape)}"
            )

    def terms(self, y: Tensor) -> int:
        return self.last(y).shape[1:-1].numel()

    def unflattened(self) -> Categorical:
        return replace(self, axis=-1 if self.axis is None or self.axis < 0 else self.axis + 1)

    def last(self, y: Tensor) -> Tensor:
        """Outputs with the classes on the last axis, [n *terms c]."""
        return y if self.axis is None else y.movedim(self.axis, -1)

    def over_outputs(self, w: Tensor, ndim: int) -> Tensor:
        return super().over_outputs(w, ndim - 1).unsqueeze(self._axis(ndim))

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._back(_covariance(self._mean(self.last(y)), self.last(u)), y)

    def root(self, y: Tensor) -> Tensor:
        p = self._full(self.last(y)).softmax(-1)
        centred = torch.eye(p.shape[-1], dtype=y.dtype, device=y.device) - p.unsqueeze(-2)  # [n *terms k c]
        columns = p.sqrt().unsqueeze(-1) * centred
        return self._back(by_terms(self._chart(columns).movedim(-2, 0)), y)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(self.last(y)).softmax(-1)
        t = _draw(p, samples, generator)
        drawn = torch.zeros(samples, *p.shape, dtype=y.dtype, device=y.device).scatter_(-1, t, 1.0)
        return self._back(self._chart(drawn.sub_(p)), y)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        p = self._full(self.last(y)).softmax(-1)
        combined = shared_normals(p, samples, generator) * p.sqrt()
        return self._back(self._chart(combined - p * combined.sum(-1, keepdim=True)), y)

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        y, y2 = self.last(y), self.last(y2)
        self._check_pair(y, y2, "y2")
        log_p, log_q = self._full(y).log_softmax(-1), self._full(y2).log_softmax(-1)
        p, δ = log_p.exp(), log_p - log_q
        # Σ (q − p) = 0 is added: each term is p(δ + e^−δ − 1) ≥ 0, and those of near points keep their digits.
        near = δ.clamp(-1, 1)
        each = torch.where(δ == near, p * (δ + torch.expm1(-near)), p * δ + log_q.exp() - p)
        each = torch.where(log_p == -torch.inf, log_q.exp(), each)  # 0 log 0 = 0, for logits of −inf
        return over_terms(each.sum(-1))

    # As a distribution

    @property
    def mean_domain(self) -> Domain:
        return Corner() if self.minimal else Simplex()

    def statistics(self, x: Tensor) -> Tensor:
        return self._chart(x)

    def event_shape(self, p: int) -> tuple[int, ...]:
        return (p + self.minimal,)

    def log_prob(self, eta: Tensor, x: Tensor) -> Tensor:
        """As for every family; x may also be class numbers, integers [*batch]."""
        if x.is_floating_point() or x.dtype is torch.bool:
            return super().log_prob(eta, x)
        return super().log_prob(eta, _one_hot(x, eta.shape[-1] + self.minimal).to(eta.dtype))

    def _distribution(self, eta: Tensor) -> D.Distribution:
        return D.OneHotCategorical(logits=self._full(eta))

    def from_distribution(self, d: D.Distribution) -> Tensor:
        expect(self, d, D.OneHotCategorical, D.Categorical)
        assert isinstance(d, (D.OneHotCategorical, D.Categorical))
        return d.logits[..., :-1] - d.logits[..., -1:] if self.minimal else d.logits

    def _wrong_size(self, p: int) -> str:
        return "" if p else "the logits of the classes"

    def _log_partition(self, eta: Tensor) -> Tensor:
        return self._full(eta).logsumexp(-1)

    def _mean(self, eta: Tensor) -> Tensor:
        return self._chart(self._full(eta).softmax(-1))

    def _natural(self, xi: Tensor) -> Tensor:
        if self.minimal:
            return xi.log() - torch.log1p(-xi.sum(-1, keepdim=True))
        log_p = xi.log()
        return log_p - log_p.mean(-1, keepdim=True)

    def _fisher(self, eta: Tensor) -> Information:
        """In closed form: from log-odds the last probability does not cancel; from logits ♯ is the pseudo-inverse."""
        p = self._full(eta).softmax(-1)
        if self.minimal:
            p, last = p[..., :-1], p[..., -1:]
            return Information(eta, 1, lambda v: _covariance(p, v), lambda w: w / p + w.sum(-1, keepdim=True) / last)
        return Information(eta, 1, lambda v: _covariance(p, v), lambda w: _centred(_centred(w) / p))

    def _axis(self, ndim: int) -> int:
        """The axis of the classes in outputs of so many axes, counted from the last."""
        axis = -1 if self.axis is None else self.axis
        return axis - ndim if axis > 0 else axis

    def _back(self, values: Tensor, y: Tensor) -> Tensor:
        """Values [* n *terms c] with the classes where the outputs y have them."""
        return values.movedim(-1, self._axis(y.ndim))

    def _full(self, eta: Tensor) -> Tensor:
        """The logits of all classes."""
        return F.pad(eta, (0, 1)) if self.minimal else eta

    def _chart(self, x: Tensor) -> Tensor:
        """The entries of a vector over the classes that belong to the chart."""
        return x[..., :-1] if self.minimal else x


def _covariance(p: Tensor, v: Tensor) -> Tensor:
    """(diag p − p pᵀ) v."""
    return p * (v - (p * v).sum(-1, keepdim=True))


def _centred(v: Tensor) -> Tensor:
    return v - v.mean(-1, keepdim=True)


def _one_hot(x: Tensor, classes: int) -> Tensor:
    """[*batch c]. Values on a GPU are not read; there, a number that is no class gives a row of zeros."""
    if can_read(x):
        wrong = (x < 0) | (x >= classes)
        if bool(wrong.any()):
            at = first(wrong)
            raise ValueError(
                f"x{entry(at)} = {int(x[at])} is not one of the {classes} classes of Categorical: count them from 0"
            )
    return x.unsqueeze(-1) == torch.arange(classes, device=x.device)


def _draw(p: Tensor, samples: int, generator: torch.Generator) -> Tensor:
    """t [k n *terms 1] with probabilities p [n *terms c].

    Like ``torch.multinomial``, which reads p first and so waits for a GPU. NaN and infinity are not refused here: they
    remain in the scores.
    """
    if not is_asynchronous(p.device):  # random numbers are slow: one a term, and the class where the sum exceeds it
        u = torch.rand(samples, *p.shape[:-1], 1, dtype=torch.float64, device=p.device, generator=generator)
        below = p.cumsum(-1, dtype=torch.float64)
        # Rounded probabilities do not sum to 1: scale u, or the remainder would go to the last class even at p = 0.
        return (below[..., :-1] <= u * below[..., -1:]).sum(-1, keepdim=True)
    # Exponential clocks with rates p: clock t rings first with probability p_t. No cumulative sum, fewer launches.
    waiting = torch.empty(samples, *p.shape, dtype=p.dtype, device=p.device).exponential_(generator=generator)
    return (p / waiting).argmax(-1, keepdim=True)


_BELOW = 2000.0  # below the lowest possible logit: e^−2000 is 0 in every precision


class Mask(NamedTuple):
    """Which terms and actions exist in a batch of outputs: the target of ``Masked``.

    Args:
        steps: Tensor [n *terms], False where an episode is over (padding), or weights w ≥ 0 of the terms, such as γ^t.
            None stands for all.
        actions: Tensor [n *terms c], False where the action is impossible. None stands for all.
    """

    steps: Tensor | None = None
    actions: Tensor | None = None

    def __repr__(self) -> str:
        return brief(self)


@final
@dataclass(frozen=True)
class Masked(Family):
    """Any family without the padded steps and the impossible actions of a batch.

    The mask is the target of the batch: ``pullback(policy, x, Fisher(Masked(family)), target=mask)``, and
    ``opt.refresh(x, mask)`` before ``opt.step()``. Masked outputs have no length in the metric; they may hold any
    finite numbers in the domain of the family.

    Args:
        family: The family of the outputs that exist. A mask with ``actions`` needs ``Categorical``: F is then that of
            the softmax over the possible actions.
        mask: The ``Mask`` of the outputs, if it is always the same; otherwise it comes with each batch, as its target.

    Method:
        F = Σ_t w_t F_t and KL = Σ_t w_t KL_t over the steps. Examples are averaged over all n, whatever their steps:
        for the mean over the valid steps, give weights ``valid * n / valid.sum()``.

    Example:
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

    def unflattened(self) -> Masked:
        return replace(self, family=self.family.unflattened())

    def check(self, y: Tensor) -> None:
        family = self.family
        if isinstance(family, Categorical) and family.axis is None:
            family = replace(family, axis=-1)  # a mask is [n *terms c]
        family.check(y)
        steps, actions = self._mask
        if actions is not None:
            _check_actions(actions, steps, y)
        if steps is not None:
            _check_steps(steps, self.family.terms(y), self.family.last(y))

    def terms(self, y: Tensor) -> int:
        return self.family.terms(y)

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self._weighted(self.family.flat(self._possible(y), u), 1.0)

    def root(self, y: Tensor) -> Tensor:
        return self._weighted(self.family.root(self._possible(y)), 0.5)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return self._weighted(self.family.scores(self._possible(y), samples, generator), 0.5)

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor | None:
        columns = self.family.shared(self._possible(y), samples, generator)
        return None if columns is None else self._weighted(columns, 0.5)

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        y, y2, steps = self._possible(y), self._possible(y2), self._mask.steps
        if steps is None:
            return self.family.kl(y, y2)
        # Terms are as independent as examples: take every term as an example of its own.
        y, y2 = self.family.last(y), self.family.last(y2)
        alone = replace(self.family, axis=-1) if isinstance(self.family, Categorical) else self.family
        each = alone.kl(y.flatten(0, steps.ndim - 1), y2.flatten(0, steps.ndim - 1))
        return over_terms(each.view(steps.shape) * steps.to(y.dtype))

    @property
    def _mask(self) -> Mask:
        if self.mask is None:
            raise ValueError(
                f"{self!r} has no mask: give the batch one, target=Mask(steps=…, actions=…), or Masked(family, mask)"
            )
        return self.mask

    def _weighted(self, values: Tensor, power: float) -> Tensor:
        """w^power times values [* n *out]; exact for roots, since a column touches one term only."""
        steps = self._mask.steps
        if steps is None:
            return values
        w = steps.to(values.dtype).pow(power)
        return values * self.family.over_outputs(w, values.ndim - int(power != 1.0))

    def _possible(self, y: Tensor) -> Tensor:
        """y with the logits of impossible actions so low that their probability is 0, and finite, so that KL is."""
        steps, actions = self._mask
        if actions is None:
            return y
        none = ~actions.any(-1, keepdim=True)
        possible = actions | none
        lowest = y.detach().masked_fill(~possible, torch.inf).amin(-1, keepdim=True)
        filled = torch.where(possible, y, lowest - _BELOW)
        # On a GPU ``check`` could not refuse a step without actions: NaN is reported where steps are checked.
        return filled.masked_fill(none & _counted(steps, none), torch.nan)


def _counted(steps: Tensor | None, like: Tensor) -> Tensor:
    """Which steps count, to go with ``like`` [n *terms 1]."""
    return torch.ones_like(like) if steps is None else (steps != 0).view(*steps.shape, *[1] * (like.ndim - steps.ndim))


def _check_mask(mask: Mask, family: Family) -> None:
    if not isinstance(mask, Mask):
        raise TypeError(
            f"the mask of Masked({family!r}) must be a Mask(steps=…, actions=…), got {type(mask).__name__}: pass "
            "target=Mask(…), or opt.refresh(x, Mask(…))"
        )
    if any(field is not None and not isinstance(field, Tensor) for field in mask):
        raise TypeError("Mask(steps=…, actions=…) takes tensors, as torch.tensor([[True, False]])")
    if mask.actions is None:
        return
    if not isinstance(family, Categorical) or family.minimal or family.axis not in (None, -1):
        raise TypeError(
            f"Mask(actions=…) is for the logits of Categorical() on the last axis, not of {family!r}: use Mask(steps=…)"
        )
    if mask.actions.dtype is not torch.bool:
        raise TypeError(f"Mask(actions=…) must be of booleans, True where possible, got {mask.actions.dtype}")


def _check_steps(steps: Tensor, terms: int, y: Tensor) -> None:
    if steps.shape != y.shape[: steps.ndim] or terms % max(1, steps.shape[1:].numel()):
        raise ValueError(
            f"Mask(steps=…) must be [n *terms], one number a term, and not within one: got shape {tuple(steps.shape)} "
            f"for outputs of shape {tuple(y.shape)} with {terms} terms an example"
        )
    if steps.dtype is torch.bool or not can_read(steps):
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
    if can_read(actions) and bool((none & _counted(steps, none)).any()):
        where = tuple((none & _counted(steps, none)).squeeze(-1).nonzero()[0].tolist())
        raise ValueError(f"no action is possible at {where} [n *terms]: mark the step as padding, Mask(steps=…)")
