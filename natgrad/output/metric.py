"""The output metric: an inner product on the outputs of a model, at every output y."""

from __future__ import annotations

import copy
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, final

import torch
from torch import Tensor, nn
from torch.distributions import Distribution
from typing_extensions import Self

from natgrad.accelerate.temporaries import TEMPORARY, at_once
from natgrad.families.base import Family, over_terms
from natgrad.families.categorical import Masked
from natgrad.families.distribution import FromDistribution
from natgrad.linalg import check_positive, is_number
from natgrad.model import Inputs, Shapes, map_tensors

Reduction = Literal["sum", "mean"]
Source = Literal["outputs", "backward", "gradients"]


@final
@dataclass(frozen=True)
class Coupling:
    """C [n m], the coupling of the examples.

    ``K``: for C = K⁻¹, the kernel matrix; some structures solve with K and never invert it. ``L``: a root, C = L Lᵀ,
    which mixes rows; products with it use its dtype. ``weights``: c [n] if C = diag(c), which mixes no examples.
    ``matched``: whether S ⊗ A of a layer is given the trace of the coupled metric; without it, its factors are left as
    they are.
    """

    C: Tensor
    K: Tensor | None = None
    L: Tensor | None = None
    weights: Tensor | None = None
    matched: bool = True

    @staticmethod
    def of_weights(c: Tensor, dtype: torch.dtype) -> Coupling:
        """C = diag(c) for weights c [n] ≥ 0 and rows of type ``dtype``.

        >>> Coupling.of_weights(torch.tensor([0.25, 1.75]), torch.float32).L.diagonal()
        tensor([0.5000, 1.3229])
        """
        c = c.double()
        return Coupling(torch.diag(c), L=torch.diag(c.sqrt()).to(dtype), weights=c)


class OutputMetric(ABC):
    """An inner product h_y on output space: ♭, a root, and a divergence whose Hessian it is.

    Outputs are y [n *out]. The metric treats each example n separately, unless it has a ``coupling``. If an example has
    several terms (a sequence of tokens), the metric is the sum over the terms. ``target`` is used only by metrics made
    from the training loss, ``generator`` only by sampled metrics.
    """

    def __add__(self, other: OutputMetric) -> Sum:
        return Sum((self, other)) if isinstance(other, OutputMetric) else NotImplemented

    def __mul__(self, factor: float) -> Sum:
        return Sum((self,), (factor,))

    __rmul__ = __mul__

    @property
    def exact(self) -> bool:
        """Whether Σ_k s_k s_kᵀ = h holds exactly (True) or in expectation over samples (False)."""
        return True

    def unsampled(self) -> OutputMetric:
        """The exact metric that a sampled one estimates."""
        return self

    def unflattened(self) -> OutputMetric:
        """The same metric for outputs whose first axis has been split in two, [n·t *out] → [n t *out]."""
        return self

    def of_sum(self) -> OutputMetric:
        """For a metric of a loss with a reduction: the metric of the sum −Σ log p over all terms, without it."""
        return self

    def denominator(self, y: Tensor, target: Any = None) -> Tensor | int:
        """What the mean over a batch is divided by: its N examples, or what a loss has in their place.

        That is the number of terms that count, or the sum of their class weights; of several heads one for each. The
        batches of a loader are weighed by it.
        """
        return y.shape[0]

    @property
    def grows(self) -> bool:
        """Whether G is N times as large for N times the examples, as that of a loss with ``reduction="sum"``."""
        return False

    @property
    def needs_target(self) -> bool:
        """Whether the metric depends on the training targets."""
        return False

    @property
    def leaves_out(self) -> bool:
        """Whether targets can exclude all terms of an example (an ignored label, a mask, a weight of zero)."""
        return True

    @property
    def pending_loss(self) -> nn.Module | bool:
        """Whether an optimizer must see the user's own loss before it can estimate the metric of a pass.

        True: it waits for the cotangent of the loss at the outputs. A module: it also waits for a call of this loss
        on the outputs, whose targets it takes.
        """
        return False

    @property
    def pending_losses(self) -> tuple[nn.Module, ...]:
        """The losses whose calls an optimizer waits for."""
        return (self.pending_loss,) if isinstance(self.pending_loss, nn.Module) else ()

    def lacks(self, target: Any) -> bool:
        """Whether the metric needs targets that are missing in ``target``."""
        return self.needs_target and target is None

    @property
    def source(self) -> Source:
        """What an optimizer estimates G from: a root at the outputs, the user's backward pass, or the gradients."""
        return "outputs"

    @property
    def heads(self) -> tuple[Any, ...] | None:
        """The keys of the outputs of the model that it is on, if they are several (``Heads``)."""
        return None

    def only(self, keys: Sequence[Any]) -> OutputMetric:
        """The metric on these heads alone."""
        return self

    def shaped(self, shapes: Shapes) -> OutputMetric:
        """The metric at a pass whose heads, in the order of ``heads``, have these shapes [n *out]."""
        return self

    @abstractmethod
    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        """h_y u [n *out], for a vector u [n *out] of output space: vector → covector."""

    @abstractmethod
    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        """s [k n *out] with Σ_k s_kn s_knᵀ = h(y_n), exactly or in expectation."""

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        """A root [k n *out] whose column k means the same in every example; metrics with a coupling need one.

        Column k of an exact root is one output or one class. Samples that are independent between examples have
        mean-zero products, which would erase the off-diagonal part of the coupling. So a sampled metric draws one
        sample for all examples.
        """
        if not self.exact:
            raise ValueError(
                f"{self!r} is sampled, an example at a time: a metric that couples the examples needs samples that "
                "they share. Give it a shared_root, or use Sampled(metric, samples) of the exact metric"
            )
        return self.root(y, target, generator)

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> Any:
        """The target as ``flat``, ``root`` and ``divergence`` take it, which may be cut into ranges of examples.

        Metrics of a loss count the terms of the whole batch y [n *out] here: those of the targets or, without targets,
        those with a nonzero ``cotangent`` [n *out], the gradient of the user's own loss with respect to the outputs.
        """
        return target

    @abstractmethod
    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        """ρ(y, y0) [n] ≥ 0, zero at y = y0, with ∂²ρ/∂y² = h(y0) there."""

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        """C [n m] that couples the examples, or None for the identity."""
        return None

    def coupled(self, x: Inputs, n: int, dtype: torch.dtype = torch.float64) -> Coupling | None:
        """The coupling for rows of type ``dtype``, with its kernel matrix if there is one."""
        C = self.coupling(x, n)
        return None if C is None else Coupling(C)

    def check_everywhere(self, what: str) -> None:  # noqa: B027 - most metrics are known everywhere
        """Refuse ``what``, which moves the outputs, where h_y is known at those of one pass only."""

    def check_target(self, target: Any) -> None:
        """Refuse missing targets by name."""
        if self.lacks(target):
            raise ValueError(
                f"{type(self).__name__} is made from the training loss and needs the targets: pass target= (in a "
                "training loop: opt.refresh(x, target) before opt.step())"
            )


class DerivedMetric(OutputMetric):
    """A metric that is made of another one, ``base``, by sampling its roots or coupling its examples."""

    base: OutputMetric

    def _on(self, base: OutputMetric) -> Self:
        """The same, made of another metric. Every pass asks, so nothing is checked again: a GPU would be waited for."""
        derived = copy.copy(self)
        object.__setattr__(derived, "base", base)  # it is frozen
        return derived

    def unsampled(self) -> OutputMetric:
        return self._on(self.base.unsampled())

    def unflattened(self) -> Self:
        return self._on(self.base.unflattened())

    def only(self, keys: Sequence[Any]) -> Self:
        return self._on(self.base.only(keys))

    def shaped(self, shapes: Shapes) -> Self:
        return self._on(self.base.shaped(shapes)) if shapes else self

    @property
    def heads(self) -> tuple[Any, ...] | None:
        return self.base.heads

    @property
    def exact(self) -> bool:
        return self.base.exact

    @property
    def needs_target(self) -> bool:
        return self.base.needs_target

    @property
    def leaves_out(self) -> bool:
        return self.base.leaves_out

    @property
    def pending_loss(self) -> nn.Module | bool:
        return self.base.pending_loss

    @property
    def pending_losses(self) -> tuple[nn.Module, ...]:
        return self.base.pending_losses

    def lacks(self, target: Any) -> bool:
        return self.base.lacks(target)

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> Any:
        return self.base.prepared(y, target, cotangent)

    def denominator(self, y: Tensor, target: Any = None) -> Tensor | int:
        return self.base.denominator(y, target)

    def check_everywhere(self, what: str) -> None:
        self.base.check_everywhere(what)

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return self.base.flat(y, u, target)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return self.base.divergence(y, y0, target)


@final
@dataclass(frozen=True)
class Euclidean(OutputMetric):
    """The metric of squared error: its pullback is the Gauss–Newton matrix.

    Args:
        reduction: "sum" over the D outputs of an example, for the loss ½‖y − t‖²; "mean" divides by D. ``nn.MSELoss``
            is 2/D of ½‖y − t‖².

    Method:
        h = 1: the pullback is (1/N) Σ JᵀJ, and ρ = ½‖y − y0‖². It is the Fisher metric of a Gaussian with unit
        variance.

    Example:
        >>> Euclidean(reduction="mean").flat(torch.zeros(1, 3), torch.ones(1, 3))
        tensor([[0.3333, 0.3333, 0.3333]])
    """

    reduction: Reduction = "sum"

    def __post_init__(self) -> None:
        weight(self.reduction, 1)

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        return u * weight(self.reduction, y[0].numel())

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return one_hot_columns(y, weight(self.reduction, y[0].numel()) ** 0.5)

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        return 0.5 * over_terms((y - y0).square()) * weight(self.reduction, y[0].numel())


@final
@dataclass(frozen=True)
class Sampled(DerivedMetric):
    """A cheap random estimate of any metric, with the right mean.

    One backward pass for each sample replaces one for each output. ``Fisher(family, samples=1)`` samples targets
    instead.

    Args:
        base: The metric to estimate.
        samples: The number of random roots for every example.

    Method:
        s = Σ_k ε_k s_k with ε ~ N(0, 1), so that E[s sᵀ] = h (Grosse 2021, section 5.2).

    Example:
        >>> Sampled(Euclidean(), samples=2).root(torch.zeros(4, 3)).shape
        torch.Size([2, 4, 3])
    """

    base: OutputMetric
    samples: int = 1

    def __post_init__(self) -> None:
        if self.samples is None:
            raise ValueError("Sampled needs a number of samples; the exact metric is its base")
        check_samples(self.samples)
        if not self.base.exact:
            raise ValueError(f"{self.base!r} is sampled already: raise its own samples= instead of wrapping it")

    @property
    def exact(self) -> bool:
        return False

    def unsampled(self) -> OutputMetric:
        return self.base.unsampled()

    @property
    def grows(self) -> bool:
        return self.base.grows

    def of_sum(self) -> Sampled:
        return self._on(self.base.of_sum())

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        generator = generator or fresh_generator(y.device)
        mixed = []
        for s in self._exact_roots(y, target):
            ε = torch.randn(self.samples, *s.shape[:2], generator=generator, dtype=y.dtype, device=y.device)
            mixed.append(torch.einsum("skn,kn...->sn...", ε, s))
        return torch.cat(mixed, dim=1) / self.samples**0.5

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        """The same ε_k for all examples."""
        generator = generator or fresh_generator(y.device)
        mixed: list[Tensor] = []
        ε = y.new_empty(0)
        for s in self._exact_roots(y, target):
            if not mixed:
                ε = torch.randn(self.samples, s.shape[0], generator=generator, dtype=y.dtype, device=y.device)
            mixed.append(torch.einsum("sk,kn...->sn...", ε, s))
        return torch.cat(mixed, dim=1) / self.samples**0.5

    def _exact_roots(self, y: Tensor, target: Any) -> Iterator[Tensor]:
        """Exact roots, a few examples at a time, because they have a column for each output."""
        step = at_once(y[0].numel() ** 2, TEMPORARY)
        for start in range(0, y.shape[0], step):
            chunk = slice(start, start + step)
            yield self.base.root(y[chunk], map_tensors(target, operator.itemgetter(chunk)))

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        if self.base.coupling(x, n) is not None:
            raise ValueError(f"{self.base!r} couples the examples: independent samples would erase the coupling")
        return None


@final
@dataclass(frozen=True)
class Sum(OutputMetric):
    """A sum of metrics on the outputs with positive weights; ``2 * a + b`` makes it.

    Args:
        metrics: The metrics.
        weights: A number for each; 1 by default.

    Method:
        h = Σ_i w_i h_i, the metric of Σ_i w_i L_i for losses with these metrics (Luk and Grosse 2018): a label and a
        distance to a teacher, say. Its root is those of all side by side, so it works in every structure. For several
        outputs with a metric each there is ``Heads``.

    Example:
        >>> (Euclidean() + 0.5 * Euclidean()).flat(torch.zeros(1, 2), torch.ones(1, 2))
        tensor([[1.5000, 1.5000]])
    """

    metrics: tuple[OutputMetric, ...]
    weights: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.metrics or len(self.weights) not in (0, len(self.metrics)):
            raise ValueError(f"Sum has {len(self.metrics)} metrics and {len(self.weights)} weights: give one for each")
        for w in self.weights:
            check_positive(w, "the factor of a metric", ": a sum of metrics has positive weights")
        for metric in self.metrics:
            if not isinstance(metric, OutputMetric):
                raise TypeError(f"a sum of metrics has metrics only, got {metric!r}: ng.metric_of makes one of a loss")
            if metric.source != "outputs" or metric.heads is not None or metric.pending_loss:
                raise TypeError(
                    f"{metric!r} cannot be added: a term is a metric of every pass on one output, such as Fisher(…), "
                    "Euclidean(), Bregman(…). For the metric of a loss give that of its family, for several outputs "
                    "Heads({…}, weights={…})"
                )

    def __add__(self, other: OutputMetric) -> Sum:
        if not isinstance(other, OutputMetric):
            return NotImplemented
        more = other if isinstance(other, Sum) else Sum((other,))
        return Sum((*self.metrics, *more.metrics), (*self._weights, *more._weights))

    def __radd__(self, other: OutputMetric) -> Sum:
        return Sum((other, *self.metrics), (1.0, *self._weights))

    def __mul__(self, factor: float) -> Sum:
        return replace(self, weights=tuple(factor * w for w in self._weights))

    __rmul__ = __mul__

    @property
    def _weights(self) -> tuple[float, ...]:
        return self.weights or (1.0,) * len(self.metrics)

    @property
    def exact(self) -> bool:
        return all(metric.exact for metric in self.metrics)

    @property
    def needs_target(self) -> bool:
        return any(metric.needs_target for metric in self.metrics)

    def lacks(self, target: Any) -> bool:
        return any(metric.lacks(target) for metric in self.metrics)

    def unsampled(self) -> Sum:
        return replace(self, metrics=tuple(metric.unsampled() for metric in self.metrics))

    def unflattened(self) -> Sum:
        return replace(self, metrics=tuple(metric.unflattened() for metric in self.metrics))

    def check_everywhere(self, what: str) -> None:
        for metric in self.metrics:
            metric.check_everywhere(what)

    def coupling(self, x: Inputs, n: int) -> Tensor | None:
        for metric in self.metrics:
            if metric.coupling(x, n) is not None:
                raise ValueError(f"{metric!r} couples the examples, each its own way: add inside, Sobolev(2 * a + b)")
        return None

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        parts = [w * metric.flat(y, u, target) for metric, w in self._terms]
        return torch.stack(parts).sum(0)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return torch.cat([w**0.5 * metric.root(y, target, generator) for metric, w in self._terms])

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return torch.cat([w**0.5 * metric.shared_root(y, target, generator) for metric, w in self._terms])

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        parts = [w * metric.divergence(y, y0, target) for metric, w in self._terms]
        return torch.stack(parts).sum(0)

    @property
    def _terms(self) -> list[tuple[OutputMetric, float]]:
        return list(zip(self.metrics, self._weights, strict=True))


def weight(reduction: Reduction, terms: int) -> float:
    """The factor of the metric: 1, or one over the number of terms of an example."""
    if reduction not in ("sum", "mean"):
        raise ValueError(f'reduction must be "sum" or "mean" (over the terms of an example), got {reduction!r}')
    return 1.0 if reduction == "sum" else 1.0 / terms


def check_samples(samples: int | None) -> None:
    """Refuse a number of Monte-Carlo samples that is not a positive integer (None: exact)."""
    if samples is not None and (not is_number(samples, whole=True) or samples < 1):
        raise ValueError(f"samples must be None (exact) or a positive integer, got {samples!r}")


def one_hot_columns(y: Tensor, value: float = 1.0) -> Tensor:
    """e [d n *out]: column d is 1, or this value, at output d of every example, 0 elsewhere."""
    d = y[0].numel()
    eye = torch.eye(d, dtype=y.dtype, device=y.device) * value
    return eye.view(d, 1, *y.shape[1:]).expand(d, *y.shape).contiguous()


def fresh_generator(device: torch.device) -> torch.Generator:
    """A new generator with fresh entropy, so that the user's random stream does not change (pass one to reproduce)."""
    generator = torch.Generator(device=device)
    generator.seed()
    return generator


@final
@dataclass(frozen=True)
class Fisher(OutputMetric):
    """The Fisher metric: how different the predicted distributions are, to second order.

    Args:
        family: An output family such as ``Categorical()``, or a function from the outputs to a ``torch.distributions``
            distribution. For a ``Masked`` family (invalid actions, padded steps) the target is the mask of the batch.
        samples: None for the exact metric; k to draw k targets from the model for each example, s = ∇log p(t)/√k.
        reduction: "sum" over the terms (tokens, pixels) of an example; "mean" divides by their number.

    Method:
        h = F_y = E_{t ~ p(·|y)}[∇log p ∇log pᵀ], the Hessian of ρ(y, y0) = KL(p_y0 ‖ p_y) at y0 (Amari 1998).

    Example:
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
