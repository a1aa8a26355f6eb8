"""Several outputs, each with its own loss: the metric of their weighted sum."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.model import Shapes, side_by_side
from natgrad.output.metric import OutputMetric


@final
@dataclass(frozen=True, eq=False)
class Heads(OutputMetric):
    """The metric of a model with several outputs, each with its own loss.

    ``ng.metric_of({"kind": F.cross_entropy, "box": F.mse_loss}, weights={"box": 0.5})`` makes it of losses. What the
    model returns beside the heads does not count. An auxiliary loss on activations is that of a head: let the model
    return them.

    Args:
        metrics: The metric of every head, by the keys of the dict that the model returns, or by the places in its
            tuple. The targets are a dict or tuple, too.
        weights: The weights w_k of the heads in the loss; 1 where none is given.
        shapes: The shapes [n *out] of the heads; the library fills them in.

    Method:
        h = ⊕_k w_k h_k, the metric of L = Σ_k w_k L_k(y_k, t_k). Each head counts its own terms, as its loss does. In
        memory the heads [n *out_k] lie side by side, y [n d].

    Example:
        >>> from natgrad.output.metric import Euclidean
        >>> heads = Heads({"kind": Euclidean(), "box": Euclidean()}, {"box": 0.25})
        >>> heads.shaped((torch.Size([1, 1]), torch.Size([1, 2]))).flat(torch.zeros(1, 3), torch.ones(1, 3))
        tensor([[1.0000, 0.2500, 0.2500]])
    """

    metrics: Mapping[Any, OutputMetric]
    weights: Mapping[Any, float] = field(default_factory=dict)
    shapes: Shapes = field(default=(), repr=False)  # [n *out] of the heads in the pass that is looked at

    def __post_init__(self) -> None:
        if not isinstance(self.metrics, Mapping):
            raise TypeError(
                "Heads takes a dict of metrics by the keys or places of the heads, not a "
                f"{type(self.metrics).__name__}: write Heads({{0: …, 1: …}}) for a model that returns a tuple"
            )
        if not self.metrics:
            raise ValueError("Heads needs a metric for every head, and got none")
        strange = [key for key in self.weights if key not in self.metrics]
        if strange:
            heads = ", ".join(map(repr, self.metrics))
            raise ValueError(f"weights= names {', '.join(map(repr, strange))}, and the heads are {heads}")
        wrong = [f"{w} for {key!r}" for key, w in self.weights.items() if not 0 <= w < float("inf")]
        if wrong:
            raise ValueError(f"the weight of a loss is finite and ≥ 0 in a metric, got {', '.join(wrong)}")
        for key, metric in self.metrics.items():
            if not isinstance(metric, OutputMetric):
                raise TypeError(f"the head {key!r} needs a metric, got {metric!r}: ng.metric_of makes one of a loss")
            if metric.source != "outputs" or isinstance(metric, Heads):
                raise TypeError(f"the head {key!r} needs a metric on its outputs, got {metric!r}")

    @property
    def heads(self) -> tuple[Any, ...]:
        return tuple(self.metrics)

    @property
    def exact(self) -> bool:
        return all(metric.exact for metric in self.metrics.values())

    def denominator(self, y: Tensor, target: Any = None) -> Tensor:
        """That of every head."""
        heads = self._by_head(y, target)
        return torch.stack([torch.as_tensor(m.denominator(head, t), device=y.device) for m, _, head, t in heads])

    @property
    def grows(self) -> bool:
        return any(metric.grows for metric in self.metrics.values())

    @property
    def needs_target(self) -> bool:
        return any(metric.needs_target for metric in self.metrics.values())

    @property
    def leaves_out(self) -> bool:
        return any(metric.leaves_out for metric in self.metrics.values())

    @property
    def pending_loss(self) -> bool:
        """The cotangents tell which heads a pass trains; tasks may take turns."""
        return True

    @property
    def pending_losses(self) -> tuple[nn.Module, ...]:
        return tuple({id(m): m for metric in self.metrics.values() for m in metric.pending_losses}.values())

    def lacks(self, target: Any) -> bool:
        pairs = zip(self.metrics.values(), self.targets(target), strict=True)
        return any(metric.lacks(t) for metric, t in pairs)

    def unsampled(self) -> Heads:
        return replace(self, metrics={key: metric.unsampled() for key, metric in self.metrics.items()})

    def check_everywhere(self, what: str) -> None:
        for metric in self.metrics.values():
            metric.check_everywhere(what)

    def only(self, keys: Sequence[Any]) -> Heads:
        weights = {key: w for key, w in self.weights.items() if key in keys}
        return replace(self, metrics={key: self.metrics[key] for key in keys}, weights=weights)

    def of_sum(self) -> Heads:
        return replace(self, metrics={key: metric.of_sum() for key, metric in self.metrics.items()})

    def shaped(self, shapes: Shapes) -> Heads:
        return replace(self, shapes=shapes) if shapes else self  # outputs that are side by side already

    def prepared(self, y: Tensor, target: Any = None, cotangent: Tensor | None = None) -> tuple[Any, ...]:
        cotangents = [None] * len(self.metrics) if cotangent is None else self.split(cotangent)
        heads = zip(self._by_head(y, target), cotangents, strict=True)
        return tuple(metric.prepared(head, t, g) for (metric, _, head, t), g in heads)

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        heads = zip(self._by_head(y, target), self.split(u), strict=True)
        return side_by_side([w * metric.flat(head, v, t) for (metric, w, head, t), v in heads])

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self._beside(y, [m.root(head, t, generator) * w**0.5 for m, w, head, t in self._by_head(y, target)])

    def shared_root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        heads = self._by_head(y, target)
        return self._beside(y, [m.shared_root(head, t, generator) * w**0.5 for m, w, head, t in heads])

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        heads = zip(self._by_head(y, target), self.split(y0), strict=True)
        total: Tensor = sum((w * m.divergence(head, head0, t) for (m, w, head, t), head0 in heads), y.new_zeros(()))
        return total

    def split(self, y: Tensor) -> list[Tensor]:
        """The heads [n *out] of y [n d]."""
        sizes = [shape[1:].numel() for shape in self.shapes]
        if len(sizes) != len(self.metrics) or sum(sizes) != y.shape[1]:
            raise ValueError(
                f"outputs of {y.shape[1]} numbers an example are not {len(self.metrics)} heads of {sizes} numbers: the "
                "heads of a model are read by an optimizer, ng.pullback and what is made from it"
            )
        pieces = y.split(sizes, 1)
        return [piece.reshape(-1, *shape[1:]) for piece, shape in zip(pieces, self.shapes, strict=True)]

    def targets(self, target: Any) -> list[Any]:
        """The targets of every head; None where there are none."""
        if target is None:
            return [None] * len(self.metrics)
        if isinstance(target, Mapping):
            return [target.get(key) for key in self.metrics]
        if not isinstance(target, Sequence) or len(target) != len(self.metrics):
            keys = ", ".join(map(repr, self.metrics))
            raise ValueError(f"the targets of heads are a dict or tuple with one for each of {keys}, got {target!r}")
        return list(target)

    def weight(self, key: Any) -> float:
        """w_k."""
        return float(self.weights.get(key, 1.0))

    def _by_head(self, y: Tensor, target: Any) -> list[tuple[OutputMetric, float, Tensor, Any]]:
        heads = zip(self.metrics.items(), self.split(y), self.targets(target), strict=True)
        return [(metric, self.weight(key), head, t) for (key, metric), head, t in heads]

    def _beside(self, y: Tensor, roots: Sequence[Tensor]) -> Tensor:
        """The roots [k n *out] of the heads as one [k n d].

        Columns of one head are zero on the others. Sampled columns have mean zero and are independent, so one column
        may hold a sample of every head: the products between heads vanish in expectation.
        """
        flat = [root.unsqueeze(-1).flatten(2) for root in roots]
        if not any(metric.exact for metric in self.metrics.values()) and len({root.shape[0] for root in flat}) == 1:
            return torch.cat(flat, 2)
        before, d, columns = 0, y.shape[1], []
        for root in flat:
            columns.append(F.pad(root, (before, d - before - root.shape[2])))
            before += root.shape[2]
        return torch.cat(columns)
