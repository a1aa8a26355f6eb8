"""From a loss to the metric of its outputs: ``metric_of(loss)``, for the losses of torch and any other."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeAlias, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.families.base import Family
from natgrad.families.categorical import Categorical, Mask, Masked
from natgrad.families.diagonal_gaussian import Gaussian
from natgrad.model import check_slots
from natgrad.output.fisher import Fisher
from natgrad.output.heads import Heads
from natgrad.output.metric import OutputMetric, check_samples

OneLoss: TypeAlias = Callable[..., Tensor]  # (outputs, targets) ↦ one number
Criterion: TypeAlias = OneLoss | Mapping[Any, Any] | tuple[Any, ...] | list[Any]  # a loss, or one for every head


def metric_of(
    loss: OutputMetric | Criterion,
    *,
    samples: int | None = None,
    axis: int | None = None,
    weights: Mapping[Any, float] | Sequence[float] | None = None,
) -> OutputMetric:
    """The metric of a loss L(y, t): G = Jᵀ ∇²L J, its generalised Gauss–Newton matrix, as L is reduced (Martens 2020).

    ``loss``: a loss of torch as a module, a function, or a ``functools.partial`` of one with its options. A metric is
    returned as it is. ``samples``: None for the exact metric, k for k targets an example that are drawn from the model.
    ``axis``: that of the classes in the outputs of the model; by default 1, as in torch's losses. A dict or tuple of
    losses, with their ``weights`` in the sum that is trained, is for a model that returns as many outputs (``Heads``).

    >>> metric_of(nn.CrossEntropyLoss(ignore_index=0))
    metric_of(CrossEntropyLoss(ignore_index=0)): Fisher(Categorical()), mean over the terms
    """
    if isinstance(loss, Mapping | tuple | list):
        losses = loss if isinstance(loss, Mapping) else dict(enumerate(loss))
        shares = weights if isinstance(weights, Mapping) else dict(enumerate(weights or ()))
        return Heads({key: metric_of(one, samples=samples, axis=axis) for key, one in losses.items()}, shares)
    if weights is not None:
        raise ValueError("weights= are those of several losses, of a dict or tuple: one loss has none")
    if isinstance(loss, OutputMetric):
        return loss
    if isinstance(loss, type) or not callable(loss):
        check_slots(metric=(loss, OutputMetric))  # raises
    check_samples(samples)
    module = _module_of(loss)
    if isinstance(module, nn.CrossEntropyLoss):
        return ClassLoss(module, samples, axis)
    if isinstance(module, nn.MSELoss):
        return ElementLoss(module, samples, Gaussian(), 2.0)
    raise TypeError(f"metric_of({loss!r}): no metric is known for this loss")


class Terms(NamedTuple):
    """The terms of a batch of outputs: their weights w [n *terms] in N·L, and the axis of the classes, if there is one.

    It stands for the target wherever a metric of a loss takes one, and is cut along the examples as targets are.
    """

    weights: Tensor
    axis: int | None = None


class TermLoss(OutputMetric):
    """h_n = ⊕_τ w_nτ F(y_nτ): the metric of a loss L = (1/N) Σ_nτ w_nτ ℓ(y_nτ, t_nτ), F the Hessian of ℓ.

    The weights hold the reduction: N for "sum", N over the number of terms that count, or over the sum of their class
    weights, for "mean". So G = (1/N) Σ_n J_nᵀ h_n J_n = Jᵀ ∇²L J.
    """

    loss: nn.Module
    samples: int | None

    @abstractmethod
    def family_of(self, axis: int | None) -> Family:
        """The distribution of the targets whose −log p has the Hessian of the loss, a term."""

    @abstractmethod
    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> Terms:
        """The weights of the terms, from the targets, or from the cotangent that the user's loss sends into y."""

    @property
    def reduction(self) -> str:
        """That of the loss."""
        return str(self.loss.reduction)

    @property
    def exact(self) -> bool:
        return self.samples is None

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return self._fisher(y, target).unsampled().flat(y, u)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self._fisher(y, target).root(y, None, generator)

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self._fisher(y, target).shared_root(y, None, generator)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return self._fisher(y0, target).divergence(y, y0)

    def cotangent(self, y: Tensor, target: Any) -> Tensor:
        """∂L/∂y [n *out], of the loss itself."""
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            (g,) = torch.autograd.grad(self.value(leaf, target), leaf)
        return g

    def value(self, y: Tensor, target: Any) -> Tensor:
        """L(y, t), by the loss itself."""
        value: Tensor = self.loss(y, target)
        return value

    def __repr__(self) -> str:
        sampled = "" if self.samples is None else f", samples={self.samples}"
        return (
            f"metric_of({described(self.loss)}{sampled}): Fisher({self.family_of(None)!r}), "
            f"{self.reduction} over the terms"
        )

    def _fisher(self, y: Tensor, target: Any) -> Fisher:
        weights, axis = target if isinstance(target, Terms) else self.prepared(y, target)
        return Fisher(Masked(self.family_of(axis), Mask(steps=weights)), self.samples)

    def _reduced(self, w: Tensor, total: Tensor | float) -> Tensor:
        """w·N/total for a mean, w·N for a sum."""
        n = w.shape[0]
        return w * n if self.reduction == "sum" else w * (n / total)


@final
@dataclass(frozen=True, repr=False)
class ClassLoss(TermLoss):
    """Of logits or log-probabilities y [n c *terms]: ``CrossEntropyLoss``."""

    loss: nn.Module
    samples: int | None = None
    axis: int | None = None

    def family_of(self, axis: int | None) -> Family:
        return Categorical(axis=self.axis if axis is None else axis)

    @property
    def needs_target(self) -> bool:
        return self.loss.weight is not None

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> Terms:
        if isinstance(target, Terms):
            return target
        axis = self._axis_of(y, target)
        last = y.movedim(axis, -1)
        terms = last.shape[:-1]
        if target is None:
            self.check_target(target)
            w = y.new_ones(terms) if cotangent is None else (cotangent != 0).any(axis).to(y.dtype)
            return Terms(self._reduced(w, w.sum()), axis)
        loss: Any = self.loss
        weight: Tensor | None = loss.weight
        ε, c = float(loss.label_smoothing), last.shape[-1]
        if target.is_floating_point():  # probabilities: ignore_index plays no part, and a mean is over all terms
            q = target.reshape(last.shape) if target.shape != y.shape else target.movedim(axis, -1)
            q = q.to(y.dtype) * (1 - ε) + ε / c
            w = q.sum(-1) if weight is None else q @ weight.to(y)
            return Terms(self._reduced(w, terms.numel()), axis)
        t = target.reshape(terms)
        valid = t != self.loss.ignore_index
        if weight is None:
            w = valid.to(y.dtype)
            return Terms(self._reduced(w, w.sum()), axis)
        of_class = weight.to(y)[t.where(valid, 0)] * valid
        return Terms(self._reduced((1 - ε) * of_class + ε * weight.to(y).mean() * valid, of_class.sum()), axis)

    def unflattened(self) -> ClassLoss:
        return replace(self, axis=-1 if self.axis is None or self.axis < 0 else self.axis + 1)

    def value(self, y: Tensor, target: Any) -> Tensor:
        y = y.movedim(self._axis_of(y, target), 1)
        shaped = target if target.ndim in (y.ndim - 1, y.ndim) else target.reshape(y.shape[0], *y.shape[2:])
        return super().value(y, shaped)

    def _axis_of(self, y: Tensor, target: Any) -> int:
        """The axis of the classes: that of the losses of torch, 1, unless the shape of the targets says the last."""
        if y.ndim < 2:
            raise ValueError(
                f"{type(self.loss).__name__} needs outputs [n c *terms] with the classes on axis 1, got outputs of "
                f"shape {tuple(y.shape)}"
            )
        if self.axis is not None:
            return self.axis
        if y.ndim == 2 or target is None:
            return 1
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
    """Of outputs y [n *terms], each a term of its own: ``MSELoss``."""

    loss: nn.Module
    samples: int | None
    family: Family
    factor: float

    def family_of(self, axis: int | None) -> Family:
        return self.family

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> Terms:
        if isinstance(target, Terms):
            return target
        w = y.new_full((), self.factor).expand(y.shape)
        return Terms(self._reduced(w, y.numel()))


# Losses as functions and partial functions become the module of the same name.


_FUNCTIONS: dict[Any, type[nn.Module]] = {F.cross_entropy: nn.CrossEntropyLoss, F.mse_loss: nn.MSELoss}


def _module_of(loss: OneLoss) -> nn.Module:
    """The loss as a module, with a reduction that has a metric."""
    options: dict[str, Any] = {}
    function: Any = loss
    if isinstance(loss, functools.partial):
        if loss.args:
            raise TypeError(f"metric_of({loss!r}): bind the options of a loss by name, and not its outputs")
        function, options = loss.func, dict(loss.keywords)
    if function in _FUNCTIONS:
        module = _FUNCTIONS[function](**options)
    elif isinstance(loss, nn.Module):
        module = loss
    else:
        raise TypeError(f"metric_of({loss!r}): no metric is known for this loss")
    if module.reduction not in ("mean", "sum"):
        raise ValueError(
            f"{described(module)} has no metric: a metric is that of one number, and reduction={module.reduction!r} "
            'leaves a loss for every term. Give the loss with the reduction that you train, "mean" or "sum"'
        )
    return module


def described(loss: nn.Module) -> str:
    """The loss with those of its options that are not the default."""
    try:
        default = vars(type(loss)())
    except TypeError:
        return repr(loss)
    now = {name: value for name, value in vars(loss).items() if name in default and not name.startswith("_")}
    options = [f"{name}={value!r}" for name, value in now.items() if value != default[name] and name != "training"]
    options += [f"{name}=[{w.numel()}]" for name, w in loss.named_buffers()]
    return f"{type(loss).__name__}({', '.join(options)})"
