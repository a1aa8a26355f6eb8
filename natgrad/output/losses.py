"""From a loss to the metric of its outputs: ``metric_of(loss)``, for the losses of torch and any other."""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.accelerate.devices import can_read, outside_inference_mode
from natgrad.errors import IncompatibleError
from natgrad.families.base import Family, diagonal_root, over_terms, shared_normals
from natgrad.families.categorical import Categorical, Mask, Masked
from natgrad.families.diagonal_gaussian import Gaussian
from natgrad.families.discrete import Bernoulli, Poisson
from natgrad.linalg import eigh
from natgrad.model import check_slots
from natgrad.output.heads import Heads
from natgrad.output.metric import Fisher, OutputMetric, Sampled, check_samples, one_hot_columns

OneLoss: TypeAlias = Callable[..., Tensor]  # (outputs, targets) ↦ one number
Criterion: TypeAlias = OneLoss | Mapping[Any, Any] | tuple[Any, ...] | list[Any]  # a loss, or one for every head
_log = logging.getLogger("natgrad")
_WIDEST = 4096  # outputs of an example whose Hessian is computed
_ROUNDING = 1e-3  # of single precision in a sum that is zero, over its terms; √ε where that is more


NO_LOSS: Any = None  # where no loss is given, for an error that says more than Python's


def metric_of(
    loss: OutputMetric | Criterion,
    *,
    samples: int | None = None,
    axis: int | None = None,
    weights: Mapping[Any, float] | Sequence[float] | None = None,
) -> OutputMetric:
    """The metric that belongs to a loss; wherever a metric is expected, a loss stands for it.

    ``KFAC``, ``EKFAC`` and ``SobolevKFAC`` take ``metric_of(loss, samples=1)`` of a loss. A metric is returned as it
    is.

    Args:
        loss: A loss of torch as a module, a function, or a ``functools.partial`` of one with its options; or any other
            ``loss(y, t)`` that returns one number. A dict or tuple of losses is for a model that returns as many
            outputs (``Heads``). A model of ``transformers`` stands for the loss that it computes itself from
            ``labels``.
        samples: None for the exact metric; k for k random roots an example, which are targets drawn from the model.
        axis: That of the classes in the outputs of the model. By default it is that of torch's losses, 1, unless the
            targets or the user's backward pass show that the loss is over the last axis, as of tokens [n t c].
        weights: Of several losses: their weights in the sum that is trained, 1 where none is given.

    Returns:
        The metric.

    Method:
        G = Jᵀ ∇²L J, the generalised Gauss–Newton matrix of L(y, t), as L is reduced (Martens 2020). Of a loss that is
        none of torch's the Hessian at the outputs is computed, with negative eigenvalues set to 0.

        In a training loop the metric learns from the user's own loss what it must know: positions without a cotangent
        (ignored labels) do not count; where the targets themselves matter (class weights, ``pos_weight``, other losses)
        they are those of a call of this loss module on the outputs, or of ``opt.refresh(x, target)``.

    Example:
        >>> metric_of(nn.CrossEntropyLoss(ignore_index=0))
        metric_of(CrossEntropyLoss(ignore_index=0)): Fisher(Categorical()), mean over the terms
        >>> metric_of(functools.partial(F.huber_loss, delta=2.0))
        metric_of(HuberLoss(delta=2.0)): 0.946·Fisher(Gaussian(scale=1.0)), mean over the terms
        >>> metric_of(nn.SoftMarginLoss())
        metric_of(SoftMarginLoss()): its Hessian at the outputs, negative eigenvalues set to 0
    """
    if isinstance(loss, Mapping | tuple | list):
        losses = loss if isinstance(loss, Mapping) else dict(enumerate(loss))
        shares = weights if isinstance(weights, Mapping) else dict(enumerate(weights or ()))
        return Heads({key: metric_of(one, samples=samples, axis=axis) for key, one in losses.items()}, shares)
    if isinstance(loss, nn.Module) and computes_loss(loss):
        of_model = own_loss(loss)
        if axis is not None or weights is not None:
            raise ValueError(f"{type(loss).__name__} computes its loss itself, and knows its axis= and weights=")
        return metric_of(of_model.loss, samples=samples, axis=of_model.axis, weights=of_model.weights)
    if weights is not None:
        raise ValueError("weights= are those of several losses, of a dict or tuple: one loss has none")
    if isinstance(loss, OutputMetric):
        return loss
    if loss is None:
        raise TypeError(
            "missing the loss: give the one you train after the model, such as KFAC(model, nn.CrossEntropyLoss()), "
            "or a metric on the outputs"
        )
    if isinstance(loss, type) or not callable(loss):
        check_slots(metric=(loss, OutputMetric))  # raises
    check_samples(samples)
    module, is_user_module = _module_of(loss), isinstance(loss, nn.Module)
    kind = next((kind for kind in _KINDS if _is(module, kind)), None)
    if kind is nn.CTCLoss:
        raise TypeError(
            "CTCLoss has no metric in closed form: its terms are alignments, not positions. Use Empirical(), which is "
            "made of its own cotangents, or Fisher(Categorical(axis=-1)) on the frames"
        )
    if kind is None:
        two = _two_arguments(module if isinstance(module, nn.Module) else loss)
        metric: OutputMetric = HessianLoss(two, is_user_module=is_user_module)
        _log.info("%r", metric)
        return metric if samples is None else Sampled(metric, samples)
    assert isinstance(module, nn.Module)
    if axis is not None and kind not in _OF_CLASSES:
        raise TypeError(f"{described(module)} has no axis of classes: leave out axis=")
    _check_reduction(module)
    if kind in _OF_CLASSES:
        return ClassLoss(module, samples, axis, is_user_module=is_user_module)
    family, factor = _KINDS[kind](module)
    return ElementLoss(module, samples, family, factor, is_user_module=is_user_module)


class LossWeights(NamedTuple):
    """The terms of a batch of outputs: their weights w [n *terms] in N·L, and the axis of the classes, if there is one.

    It stands for the target wherever a metric of a loss takes one, and is cut along the examples as targets are.
    """

    weights: Tensor
    axis: int | None = None


class CountedTerms(NamedTuple):
    """The weights w [n *terms] of the terms of a batch in the sum, what a mean divides it by, and the axis."""

    weights: Tensor
    total: Tensor | int
    axis: int | None = None


class TermLoss(OutputMetric):
    """h_n = ⊕_τ w_nτ F(y_nτ): the metric of a loss L = (1/N) Σ_nτ w_nτ ℓ(y_nτ, t_nτ), F the Hessian of ℓ.

    F is the Fisher metric of the distribution with −log p = ℓ, the mean of ∇²ℓ over its targets, which for most losses
    is ∇²ℓ itself. The weights hold the reduction: N for "sum"; for "mean" N over the number of terms that count, or
    over the sum of their class weights, as the loss has it. So G = (1/N) Σ_n J_nᵀ h_n J_n = Jᵀ ∇²L J.
    """

    loss: nn.Module
    samples: int | None
    summed: bool  # the terms count as in −Σ log p, whatever the reduction
    is_user_module: bool  # the loss is a module that the user calls

    @abstractmethod
    def family_of(self, axis: int | None) -> Family:
        """The distribution of the targets whose −log p has the Hessian of the loss, a term."""

    @abstractmethod
    def counted(self, y: Tensor, target: Any, cotangent: Tensor | None) -> CountedTerms:
        """The terms, from the targets, or from the cotangent that the user's loss sends into y."""

    @property
    def reduction(self) -> str:
        """That of the loss."""
        return str(self.loss.reduction)

    @property
    def grows(self) -> bool:
        return self.reduction == "sum" and not self.summed

    @property
    def pending_loss(self) -> nn.Module | bool:
        return self.needs_target and self.is_user_module and self.loss

    @property
    def exact(self) -> bool:
        return self.samples is None

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> LossWeights:
        if isinstance(target, LossWeights):
            return target
        self.check_target(target)
        w, total, axis = self.counted(y, target, cotangent)
        return LossWeights(self._reduced(w, total), axis)

    def denominator(self, y: Tensor, target: Any = None) -> Tensor | int:
        mean = self.reduction == "mean" and not self.summed
        return self.counted(y, target, None).total if mean else y.shape[0]

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return self._fisher(y, target).unsampled().flat(y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self._fisher(y, target).root(y, None, generator)

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self._fisher(y, target).shared_root(y, None, generator)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return self._fisher(y0, target).divergence(y, y0)

    def value(self, y: Tensor, target: Any) -> Tensor:
        """L(y, t), by the loss itself."""
        value: Tensor = self.loss.forward(y, target)
        return value

    def __repr__(self) -> str:
        sampled = "" if self.samples is None else f", samples={self.samples}"
        how = "sum" if self.summed else self.reduction
        return f"metric_of({described(self.loss)}{sampled}): {self._in_words}, {how} over the terms"

    @property
    def _in_words(self) -> str:
        return f"Fisher({self.family_of(None)!r})"

    def _fisher(self, y: Tensor, target: Any) -> Fisher:
        weights, axis = self.prepared(y, target)
        return Fisher(Masked(self.family_of(axis), Mask(steps=weights)), self.samples)

    def _reduced(self, w: Tensor, total: Tensor | int) -> Tensor:
        """w·N/total for a mean, w·N for a sum."""
        n = w.shape[0]
        if self.summed or self.reduction == "batchmean":
            return w
        if self.reduction == "sum":
            return w * n
        # Without any term the weights are 0: a head that no loss came to.
        return w / (total.clamp(min=torch.finfo(total.dtype).tiny) if isinstance(total, Tensor) else total) * n


@final
@dataclass(frozen=True, repr=False)
class ClassLoss(TermLoss):
    """Of logits or log-probabilities y [n c *terms]: ``CrossEntropyLoss``, ``NLLLoss``, ``KLDivLoss``.

    The Hessian of a term is that of log Z, diag p − p pᵀ, times Σ_c w_c q_c for a target q with class weights w: with
    label smoothing ε, q = (1 − ε)t + ε/c. Log-probabilities are logits whose log Z is 0. ``NLLLoss`` and ``KLDivLoss``
    are linear in them, and the metric is that of the logits they come from.
    """

    loss: nn.Module
    samples: int | None = None
    axis: int | None = None
    summed: bool = False
    # Not named in a checkpoint, nor are the axes, which are found again.
    is_user_module: bool = field(default=True, repr=False)
    axes: dict[int, int] = field(default_factory=dict, repr=False, compare=False)  # of the classes, by those of outputs

    def family_of(self, axis: int | None) -> Family:
        return Categorical(axis=self.axis if axis is None else axis)

    @property
    def needs_target(self) -> bool:
        return getattr(self.loss, "weight", None) is not None

    @property
    def pending_loss(self) -> nn.Module | bool:
        """Ignored labels are where no cotangent comes from."""
        return super().pending_loss if self.needs_target else not _is(self.loss, nn.KLDivLoss)

    def of_sum(self) -> ClassLoss:
        return replace(self, summed=True)

    def unsampled(self) -> ClassLoss:
        return replace(self, samples=None)

    def unflattened(self) -> ClassLoss:
        return replace(self, axis=-1 if self.axis is None or self.axis < 0 else self.axis + 1)

    def counted(self, y: Tensor, target: Any, cotangent: Tensor | None) -> CountedTerms:
        axis = self._axis_of(y, target, cotangent)
        last = y.movedim(axis, -1)
        self._check_normalised(last)
        terms, loss = last.shape[:-1], self.loss
        if target is None:
            w = y.new_ones(terms) if cotangent is None else (cotangent != 0).any(axis).to(y.dtype)
            return CountedTerms(w, self._mean_of_elements(y) or w.sum(), axis)
        weight = getattr(loss, "weight", None)
        ε = float(getattr(loss, "label_smoothing", 0.0))
        if target.is_floating_point():  # probabilities: ignore_index plays no part, and a mean is over all terms
            q = (target.reshape(last.shape) if target.shape != y.shape else target.movedim(axis, -1)).to(y.dtype)
            q = (q.exp() if getattr(loss, "log_target", False) else q) * (1 - ε) + ε / last.shape[-1]
            w = q.sum(-1) if weight is None else q @ weight.to(y)
            return CountedTerms(w, self._mean_of_elements(y) or terms.numel(), axis)
        t = target.reshape(terms)
        valid = t != loss.ignore_index
        if weight is None:
            w = valid.to(y.dtype)
            return CountedTerms(w, w.sum(), axis)
        if can_read(t) and bool((valid & ((t < 0) | (t >= len(weight)))).any()):
            raise ValueError(
                f"targets from {int(t.min())} to {int(t.max())} for {len(weight)} classes: they are 0 to "
                f"{len(weight) - 1}, or ignore_index = {loss.ignore_index}"
            )
        of_class = weight.to(y)[t.where(valid, 0)] * valid
        return CountedTerms((1 - ε) * of_class + ε * weight.to(y).mean() * valid, of_class.sum(), axis)

    def denominator(self, y: Tensor, target: Any = None) -> Tensor | int:
        elements = self.reduction == "mean" and not self.summed and self._mean_of_elements(y)
        return elements or super().denominator(y, target)

    def value(self, y: Tensor, target: Any) -> Tensor:
        if _is(self.loss, nn.KLDivLoss):
            return super().value(y, target)
        axis = self._axis_of(y, target, None)
        y = y.movedim(axis, 1)
        if target.is_floating_point():
            return super().value(y, target if target.shape == y.shape else target.movedim(axis, 1))
        return super().value(y, target.reshape(y.shape[0], *y.shape[2:]))

    def _mean_of_elements(self, y: Tensor) -> int:
        """``KLDivLoss`` takes a mean over all numbers; 0 for the others."""
        return y.numel() if _is(self.loss, nn.KLDivLoss) else 0

    def _check_normalised(self, last: Tensor) -> None:
        """Refuse outputs that are no log-probabilities where the loss takes them for such."""
        if _is(self.loss, nn.CrossEntropyLoss) or not can_read(last):
            return
        log_Z = last.detach().logsumexp(-1).abs().max()
        if not bool(log_Z <= torch.finfo(last.dtype).eps ** 0.5):
            raise ValueError(
                f"{type(self.loss).__name__} takes log-probabilities, and the outputs are not normalised over the "
                f"classes: log Σ exp y is off 0 by {float(log_Z):.2g}. Give log_softmax outputs, or train with "
                "CrossEntropyLoss"
            )

    def _axis_of(self, y: Tensor, target: Any, cotangent: Tensor | None) -> int:
        """The axis of the classes: that of the losses of torch, 1, unless the targets or the cotangent say the last.

        A cotangent of cross entropy sums to 0 over the classes. It is read once for a number of axes, and not where it
        is zero or not finite, as in a step that a ``GradScaler`` skips.
        """
        if y.ndim < 2:
            raise ValueError(
                f"{type(self.loss).__name__} needs outputs [n c *terms] with the classes on axis 1, got outputs of "
                f"shape {tuple(y.shape)}"
            )
        if self.axis is not None:
            return self.axis
        if y.ndim == 2:
            if target is not None:
                self._axis_of_target(y, target)  # raises if they do not belong together
            return 1
        if _is(self.loss, nn.KLDivLoss):
            raise ValueError(
                f"KLDivLoss does not say which axis of outputs of shape {tuple(y.shape)} has the classes: write "
                "metric_of(loss, axis=-1), or axis=1"
            )
        if target is not None:
            return self._axis_of_target(y, target)
        if cotangent is not None and y.ndim not in self.axes:
            c = cotangent.to(torch.promote_types(cotangent.dtype, torch.float32))
            first, last = (float(c.sum(axis).norm() / c.norm()) for axis in (1, -1))
            rounding = max(_ROUNDING, torch.finfo(cotangent.dtype).eps ** 0.5)
            if math.isfinite(first + last):
                self.axes[y.ndim] = -1 if last < min(rounding, first) else 1
        return self.axes.get(y.ndim, 1)

    def _axis_of_target(self, y: Tensor, target: Tensor) -> int:
        if target.shape in ((y.shape[0], *y.shape[2:]), y.shape):
            return 1
        if target.numel() in (y.shape[:-1].numel(), y.numel()):  # [n t c] with targets [n t], or flattened
            return -1
        raise ValueError(
            f"targets of shape {tuple(target.shape)} do not belong to outputs of shape {tuple(y.shape)}: they are "
            "[n *terms], or probabilities of the shape of the outputs"
        )


@final
@dataclass(frozen=True, repr=False)
class ElementLoss(TermLoss):
    """Of outputs y [n *terms], each a term of its own: errors, coins, counts; ℓ'' is ``factor`` times F of the family.

    ``GaussianNLLLoss`` has terms of two outputs, mean and variance.
    """

    loss: nn.Module
    samples: int | None
    family: Family
    factor: float = 1.0
    summed: bool = False
    is_user_module: bool = field(default=True, repr=False)

    def family_of(self, axis: int | None) -> Family:
        return self.family

    def of_sum(self) -> ElementLoss:
        return replace(self, summed=True)

    def unsampled(self) -> ElementLoss:
        return replace(self, samples=None)

    @property
    def needs_target(self) -> bool:
        return getattr(self.loss, "pos_weight", None) is not None

    @property
    def leaves_out(self) -> bool:
        return self.needs_target or getattr(self.loss, "weight", None) is not None

    def counted(self, y: Tensor, target: Any, cotangent: Tensor | None) -> CountedTerms:
        shape = y.shape[:-1] if _is(self.loss, nn.GaussianNLLLoss) else y.shape
        self.family.check(y)
        w = y.new_full((), self.factor).expand(shape)
        weight, of_ones = getattr(self.loss, "weight", None), getattr(self.loss, "pos_weight", None)
        if weight is not None:
            w = w * weight.to(y)
        if of_ones is not None:
            w = w * (1 + (of_ones.to(y) - 1) * target.reshape(shape).to(y.dtype))
        return CountedTerms(w, shape.numel())

    def value(self, y: Tensor, target: Any) -> Tensor:
        if not _is(self.loss, nn.GaussianNLLLoss):
            return super().value(y, target)
        value: Tensor = self.loss.forward(y[..., 0], target, y[..., 1])
        return value

    @property
    def _in_words(self) -> str:
        return super()._in_words if self.factor == 1 else f"{self.factor:.3g}·{super()._in_words}"


@final
@dataclass(frozen=True, eq=False)
class DiagonalChart(Family):
    """A family whose information is diagonal in the chart of a loss: ``information(y)``, and KL(p_y ‖ p_y2) a term."""

    name: str
    information: Callable[[Tensor], Tensor]
    divergence: Callable[[Tensor, Tensor], Tensor]
    axes: int = 0  # of a term

    def __repr__(self) -> str:
        return self.name

    def check(self, y: Tensor) -> None:
        if self.axes and (y.ndim < 2 or y.shape[-1] != 2):
            raise ValueError(
                f"{self.name} needs mean and variance on the last axis, outputs [n *terms 2], got outputs of shape "
                f"{tuple(y.shape)}: pass output=lambda out: torch.stack(out, -1) where the model returns a pair"
            )

    def terms(self, y: Tensor) -> int:
        return y.shape[1 : y.ndim - self.axes].numel()

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        return self.information(y) * u

    def root(self, y: Tensor) -> Tensor:
        return diagonal_root(y, self.information(y))

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        ε = torch.randn(samples, *y.shape, generator=generator, dtype=y.dtype, device=y.device)
        return ε * self.information(y).sqrt()

    def shared(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        return shared_normals(y, samples, generator) * self.information(y).sqrt()

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        return over_terms(self.divergence(y, y2))


# Any other loss: its Hessian at the outputs of the whole batch.


class HessianRoot(NamedTuple):
    """A root of the Hessian of a loss at every example, h_n = root_n root_nᵀ, [n d d]. It stands for the target."""

    root: Tensor


@final
@dataclass(frozen=True, repr=False)
class HessianLoss(OutputMetric):
    """h_n = N·∂²L/∂y_n², with negative eigenvalues set to 0, for any loss L(y, t) of a batch of outputs y [n *out].

    L is differentiated as it is reduced, whatever its weights and masks; its examples must not depend on each other.
    ``summed``: L is the sum −Σ log p over the examples, and h_n = ∂²L/∂y_n². ρ is the quadratic form
    ½(y − y0)ᵀh(y − y0).
    """

    loss: OneLoss
    summed: bool = False
    is_user_module: bool = field(default=True, repr=False)  # if the loss is a module
    checks: set[str] = field(default_factory=set, repr=False, compare=False)  # what has been checked, or said

    @property
    def needs_target(self) -> bool:
        return True

    @property
    def pending_loss(self) -> nn.Module | bool:
        return self.loss if isinstance(self.loss, nn.Module) and self.is_user_module else False

    @property
    def grows(self) -> bool:
        return not self.summed and is_sum(self.loss)

    def of_sum(self) -> HessianLoss:
        """Of the loss with ``reduction="sum"``. One that does not tell its reduction is taken for a mean, N·L = Σ."""
        total = _sum_of(self.loss)
        return self if total is None else replace(self, loss=total, summed=True)

    @outside_inference_mode()
    @torch.no_grad()  # also where the loss has parameters
    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> HessianRoot:
        if isinstance(target, HessianRoot):
            return target
        self.check_target(target)
        n, d = y.shape[0], y[0].numel()
        if d > _WIDEST:
            raise ValueError(
                f"{self!r}: an example has {d:,} outputs, and its Hessian {d:,}² numbers. Use a loss with a closed "
                "form (docs/losses.md), or Empirical()"
            )
        y, scale = y.detach(), 1 if self.summed else n
        slope = torch.func.grad(lambda a: self.value(a, target))

        def product(u: Tensor) -> Tensor:
            pushed: Tensor = torch.func.grad(lambda a: (slope(a) * u).sum())(y)
            return scale * pushed

        try:
            columns = torch.stack([product(u) for u in one_hot_columns(y)])
        except RuntimeError as error:
            if "is not implemented" not in str(error):
                raise
            raise IncompatibleError(
                f"{self._name} has no second derivative in torch: {error}. Use Empirical(), which is made of its "
                "cotangents, or Euclidean()"
            ) from error
        H = columns.reshape(d, n, d).transpose(0, 1)
        λ, V = eigh(0.5 * (H + H.mT), f"the Hessian of {self._name} at the outputs")
        if can_read(y) or "checked" not in self.checks:
            self._check(y, λ, H, product)
            self.checks.add("checked")
        return HessianRoot(V * λ.clamp(min=0).sqrt().unsqueeze(-2))

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        (s,) = self.prepared(y, target)
        return (s @ (s.mT @ u.reshape(u.shape[0], -1, 1))).view(u.shape)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        (s,) = self.prepared(y, target)
        return s.permute(2, 0, 1).reshape(-1, *y.shape)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        u = y - y0
        return 0.5 * over_terms(u * self.flat(y0, u, target))

    def check_everywhere(self, what: str) -> None:
        raise IncompatibleError(
            f"{what} needs the metric at other outputs, too, and {self!r} is computed at those of one pass. Use a loss "
            "with a closed form (docs/losses.md), LossHessian(loss) or Fisher(family)"
        )

    def value(self, y: Tensor, target: Any) -> Tensor:
        """L(y, t), by the loss itself; hooks of a module hear of calls by the user only."""
        value = (self.loss.forward if isinstance(self.loss, nn.Module) else self.loss)(y, target)
        if not isinstance(value, Tensor) or value.ndim:
            raise TypeError(
                f"{self._name} must return one number for a batch, and it returned "
                f"{f'shape {tuple(value.shape)}' if isinstance(value, Tensor) else type(value).__name__}: give the "
                'loss that you train, with reduction="mean" or "sum"'
            )
        return value

    def __repr__(self) -> str:
        return f"metric_of({self._name}): its Hessian at the outputs, negative eigenvalues set to 0"

    @property
    def _name(self) -> str:
        if isinstance(self.loss, nn.Module):
            return described(self.loss)
        return str(getattr(self.loss, "__name__", repr(self.loss)))

    def _check(self, y: Tensor, λ: Tensor, H: Tensor, product: Callable[[Tensor], Tensor]) -> None:
        n, largest = y.shape[0], float(λ.abs().max())
        if largest == 0:
            raise IncompatibleError(
                f"{self._name} has no curvature at the outputs: its Hessian is 0, as of a piecewise linear loss. Use "
                "Empirical(), which is made of its cotangents, or Euclidean()"
            )
        tolerance = largest * torch.finfo(y.dtype).eps ** 0.5
        # Different numbers for the examples: what their products mix is no block of one example.
        weights = torch.linspace(1, 2, n, dtype=y.dtype, device=y.device).view(-1, *[1] * (y.ndim - 1))
        alone = (H @ weights.expand_as(y).reshape(n, -1, 1)).view(y.shape)
        if bool(((product(weights.expand_as(y)) - alone).abs() > tolerance * n).any()):
            raise IncompatibleError(
                f"{self._name} couples the examples of a batch: its Hessian has no block for one example. Use "
                "Empirical(), or a metric on the outputs such as Euclidean()"
            )
        if bool((λ < -tolerance).any()) and "indefinite" not in self.checks:
            self.checks.add("indefinite")
            _log.info("%s is not convex in the outputs: negative eigenvalues of its Hessian are set to 0", self._name)


# The losses of torch.


def _huber(δ: float, β: float) -> float:
    """E ℓ'² over residuals r with density ∝ exp(−ℓ(r)), for ℓ = r²/2β if |r| < δβ, else δ|r| − δ²β/2.

    The Hessian of such a loss is 0 where residuals are large. Its mean over the residuals that the loss itself expects
    is E ℓ'' = E ℓ'², the Fisher information of their location: the generalised Gauss–Newton matrix of these losses.

    >>> round(_huber(1e3, 1.0), 6), round(_huber(1.0, 1e-12), 6)  # of ½r² and of |r|
    (1.0, 1.0)
    """
    inside = math.sqrt(2 * math.pi * β) * math.erf(δ * math.sqrt(β / 2))
    outside = 2 * math.exp(-0.5 * δ * δ * β) / δ
    return inside / β / (inside + outside)


def _gaussian_kl(y: Tensor, y2: Tensor, eps: float) -> Tensor:
    (μ, v), (μ2, v2) = y.unbind(-1), y2.unbind(-1)
    v, v2 = v.clamp(min=eps), v2.clamp(min=eps)
    return 0.5 * ((v + (μ - μ2).square()) / v2 - 1 - (v / v2).log())


def _of_gaussian(loss: Any) -> tuple[Family, float]:
    def information(y: Tensor) -> Tensor:
        precision = 1 / y[..., 1].clamp(min=loss.eps)
        return torch.stack([precision, 0.5 * precision.square()], -1)

    return DiagonalChart("Normal(μ, σ²)", information, lambda y, y2: _gaussian_kl(y, y2, loss.eps), axes=1), 1.0


def _of_poisson(loss: Any) -> tuple[Family, float]:
    if loss.log_input:
        return Poisson(), 1.0
    return (
        DiagonalChart(
            "Poisson(rate)",
            lambda y: y / (y + loss.eps).square(),  # E t/(y + ε)², as ε is in the loss
            lambda y, y2: y2 - y + torch.special.xlogy(y, y / y2),
        ),
        1.0,
    )


def _of_coin(loss: nn.Module) -> tuple[Family, float]:
    def divergence(y: Tensor, y2: Tensor) -> Tensor:
        cross = F.binary_cross_entropy
        return cross(y2, y, reduction="none") - cross(y, y, reduction="none")

    return DiagonalChart("Bernoulli(p)", lambda y: 1 / (y * (1 - y)), divergence), 1.0


def _smooth(loss: Any) -> tuple[Family, float]:
    return Gaussian(), _huber(1.0, loss.beta) if loss.beta > 0 else 1.0


_KINDS: dict[type[nn.Module], Callable[[Any], tuple[Family, float]]] = {
    nn.CrossEntropyLoss: lambda loss: (Categorical(), 1.0),
    nn.NLLLoss: lambda loss: (Categorical(), 1.0),
    nn.KLDivLoss: lambda loss: (Categorical(), 1.0),
    nn.MSELoss: lambda loss: (Gaussian(), 2.0),
    nn.L1Loss: lambda loss: (Gaussian(), 1.0),
    nn.SmoothL1Loss: _smooth,
    nn.HuberLoss: lambda loss: (Gaussian(), _huber(loss.delta, 1.0)),
    nn.BCEWithLogitsLoss: lambda loss: (Bernoulli(), 1.0),
    nn.BCELoss: _of_coin,
    nn.PoissonNLLLoss: _of_poisson,
    nn.GaussianNLLLoss: _of_gaussian,
    nn.CTCLoss: lambda loss: (Categorical(), 1.0),
}
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss, nn.KLDivLoss)
_FUNCTIONS: dict[Any, type[nn.Module]] = {
    F.cross_entropy: nn.CrossEntropyLoss,
    F.nll_loss: nn.NLLLoss,
    F.kl_div: nn.KLDivLoss,
    F.mse_loss: nn.MSELoss,
    F.l1_loss: nn.L1Loss,
    F.smooth_l1_loss: nn.SmoothL1Loss,
    F.huber_loss: nn.HuberLoss,
    F.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    F.binary_cross_entropy: nn.BCELoss,
    F.poisson_nll_loss: nn.PoissonNLLLoss,
    F.gaussian_nll_loss: nn.GaussianNLLLoss,
    F.cosine_embedding_loss: nn.CosineEmbeddingLoss,
    F.ctc_loss: nn.CTCLoss,
    F.soft_margin_loss: nn.SoftMarginLoss,
    F.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
    F.multi_margin_loss: nn.MultiMarginLoss,
    F.multilabel_margin_loss: nn.MultiLabelMarginLoss,
    F.hinge_embedding_loss: nn.HingeEmbeddingLoss,
}


def _module_of(loss: OneLoss) -> nn.Module | None:
    """The loss as a module of torch, if it is one, or a function of the same name with its options."""
    if isinstance(loss, nn.Module):
        return loss
    function, options = (loss.func, loss.keywords) if isinstance(loss, functools.partial) else (loss, {})
    kind = next((kind for of, kind in _FUNCTIONS.items() if function is of), None)
    if kind is None:
        return None
    if isinstance(loss, functools.partial) and loss.args:
        raise TypeError(f"metric_of({loss!r}): bind the options of a loss by name, and not its outputs")
    try:
        return kind(**options)
    except TypeError as error:
        raise TypeError(
            f"metric_of({loss!r}): {kind.__name__} has no such option ({error}). Write the loss as a function of "
            "outputs and targets, loss(y, t), whose Hessian is then computed"
        ) from None


def _is(module: Any, kind: type[nn.Module]) -> bool:
    """Whether it is a loss of torch. A subclass with a ``forward`` of its own (a focal loss) is another loss."""
    return isinstance(module, kind) and type(module).forward is kind.forward


def as_quotient(loss: OneLoss) -> tuple[OneLoss, Callable[[Tensor, Any], Tensor | int]] | None:
    """A mean as the sum over its terms and what that is divided by; None for a loss that is none of torch's."""
    module = _module_of(loss)
    if module is None or not any(_is(module, kind) for kind in _KINDS if kind is not nn.CTCLoss):
        return None
    total: Any = copy.copy(module)  # that of the user stays as it is
    total.reduction = "sum"
    return total.forward, metric_of(loss).denominator


def is_sum(loss: OneLoss) -> bool:
    """Whether a loss says that it is a sum over the examples."""
    if isinstance(loss, Stacked):
        return is_sum(loss.loss)
    given = loss.keywords.get("reduction") if isinstance(loss, functools.partial) else getattr(loss, "reduction", None)
    return bool(given == "sum")


def _sum_of(loss: OneLoss) -> OneLoss | None:
    """The loss as a sum over the examples; None where nothing tells how it is reduced, or that it is a sum.

    The losses of torch are summed as they are with ``reduction="sum"``. In a loss of somebody else "mean" may be over
    examples, terms or weights, and only "sum" says what it is.
    """
    if isinstance(loss, Stacked):
        both = _sum_of(loss.loss)
        return Stacked(both) if isinstance(both, nn.Module) else None
    if isinstance(loss, functools.partial):
        return loss if is_sum(loss) else None
    reduction = getattr(loss, "reduction", None) if isinstance(loss, nn.Module) else None
    if reduction == "mean" and type(loss).forward.__module__.startswith("torch.nn."):  # type: ignore[attr-defined]
        total: Any = copy.copy(loss)  # that of the user stays as it is
        total.reduction = "sum"
        return cast(OneLoss, total)
    return loss if reduction == "sum" else None


def _check_reduction(loss: nn.Module) -> None:
    allowed = ("mean", "sum", "batchmean") if _is(loss, nn.KLDivLoss) else ("mean", "sum")
    if loss.reduction not in allowed:
        raise ValueError(
            f"{described(loss)} has no metric: a metric is that of one number, and reduction={loss.reduction!r} leaves "
            'a loss for every term. Give the loss with the reduction that you train, "mean" or "sum"'
        )


def _two_arguments(loss: OneLoss) -> OneLoss:
    """The loss as a function of outputs and targets; two inputs are stacked on axis 1 of the outputs, [n 2 d]."""
    if isinstance(loss, nn.CosineEmbeddingLoss):
        return Stacked(loss)
    try:
        inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss).bind(None, None)
    except TypeError:
        raise TypeError(
            f"{loss!r} does not take outputs and targets, loss(y, t): write a function that does, as lambda y, t: "
            "loss(y[:, 0], y[:, 1], t) of two outputs that are stacked on axis 1"
        ) from None
    except ValueError:  # a function of C has no signature
        pass
    return loss


@final
class Stacked:
    """A loss of two inputs and a target as one of outputs [n 2 d] and a target."""

    def __init__(self, loss: nn.Module) -> None:
        self.loss = loss

    def __call__(self, y: Tensor, target: Tensor) -> Tensor:
        value: Tensor = self.loss(y[:, 0], y[:, 1], target)
        return value

    def __repr__(self) -> str:
        return described(self.loss)


def described(loss: nn.Module) -> str:
    """A loss of torch with those of its options that are not the default; another one as it prints in one line."""
    if not type(loss).__module__.startswith("torch.nn."):  # to make one may cost much, and draw random numbers
        return f"{type(loss).__name__}(…)" if any(loss.children()) else repr(loss)
    try:
        default = vars(type(loss)())
    except TypeError:
        return repr(loss)
    now = {name: value for name, value in vars(loss).items() if name in default and not name.startswith("_")}
    options = [f"{name}={value!r}" for name, value in now.items() if value != default[name] and name != "training"]
    options += [f"{name}=[{w.numel()}]" for name, w in loss.named_buffers()]
    return f"{type(loss).__name__}({', '.join(options)})"


_TOKENS = ("ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration")
_EXAMPLES = (
    "ForSequenceClassification",
    "ForImageClassification",
    "ForVideoClassification",
    "ForAudioClassification",
)
_PROBLEMS: dict[str, type[nn.Module]] = {
    "regression": nn.MSELoss,
    "single_label_classification": nn.CrossEntropyLoss,
    "multi_label_classification": nn.BCEWithLogitsLoss,
}


class OwnLoss(NamedTuple):
    """The loss of ``logits``, or of every head, with the axis of its classes and the weights of the heads."""

    loss: Any
    axis: int | None = None
    weights: dict[str, float] | None = None


def computes_loss(module: object) -> bool:
    """Whether this is a model of ``transformers`` with a loss of its own."""
    return isinstance(module, nn.Module) and hasattr(module, "config") and hasattr(type(module), "loss_function")


def own_loss(model: nn.Module) -> OwnLoss:
    """The loss that a model of ``transformers`` computes when it is given ``labels``; others are refused by name.

    Labels of −100, and the last token of a causal language model, have no term.
    """
    config: Any = model.config
    kind = getattr(model, "loss_type", None) or "ForCausalLM"  # as transformers has it
    if kind in _TOKENS:
        return OwnLoss(nn.CrossEntropyLoss(), axis=-1)
    if kind in _EXAMPLES:
        problem = getattr(config, "problem_type", None)  # where it is None, labels that are integers are classes
        problem = problem or ("regression" if config.num_labels == 1 else "single_label_classification")
        return OwnLoss(_PROBLEMS[problem]())
    if kind == "ForQuestionAnswering":
        heads = ("start_logits", "end_logits")
        return OwnLoss({key: nn.CrossEntropyLoss() for key in heads}, weights=dict.fromkeys(heads, 0.5))
    raise TypeError(
        f"{type(model).__name__} computes a loss of the kind {kind}, of which no metric is known: give a loss of its "
        "outputs, or one for every head"
    )
