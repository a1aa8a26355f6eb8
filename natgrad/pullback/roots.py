"""The root of the output metric at the outputs, made when and where it is needed, and checked."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.model import map_tensors, tensors_of
from natgrad.output.metric import OutputMetric
from natgrad.pullback.parts import Part, chunk_bytes, examples, ranges

if TYPE_CHECKING:
    from natgrad.pullback.assemble import View


@final
@dataclass
class Root:
    """s [k n *out] with Σ_k s_k s_kᵀ = h at the outputs y [n *out], for any range of the examples.

    Samples are drawn once and kept. An exact root has K·D numbers an example, D² for most metrics: it is made for the
    examples that are processed together, and not kept.
    """

    metric: OutputMetric
    y: Tensor  # [n *out]
    target: Any
    memory: int  # bytes that the root of one range may occupy
    check: bool = True  # whether it is finite
    kept: Tensor | None = None

    @staticmethod
    def of(view: View, target: Any, y: Tensor, coupled: bool) -> Root:
        """Nothing is computed for an exact metric, unless it is ``coupled`` and all examples will be needed at once."""
        metric, check = view.metric, not view.deferred
        kept = root_at(metric, y, target, view.generator, check) if coupled or not metric.exact else None
        return Root(metric, y, target, view.memory, check, kept)

    @property
    def columns(self) -> int:
        """K, from one example where the root is not kept."""
        kept = self._kept()
        return kept.shape[0] if kept is not None else self._alone or 0

    def at(self, part: Part) -> Tensor:
        """s [k n *out] of a range of examples."""
        n = self.y.shape[0]
        kept = self.kept if part == (0, n) else self._kept()
        if kept is not None:
            return kept[:, part[0] : part[1]]
        self._admit(part[1] - part[0])
        return root_at(self.metric, self.y[part[0] : part[1]], examples(self.target, part, n), None, self.check)

    def cut(self, part: Part, limit: int) -> list[Part]:
        """A range in pieces, so that the root of each has no more than ``limit`` numbers."""
        n, d = part[1] - part[0], self.y.shape[1:].numel()
        if n * d**2 <= limit or self._kept() is not None:
            return [part]
        self._admit(1)
        return ranges(*part, max(1, limit // (self.columns * d)))

    def _kept(self) -> Tensor | None:
        """The root of all examples, where they have one only together."""
        if self.kept is None and self._alone is None:
            self.kept = root_at(self.metric, self.y, self.target, None, self.check)
        return self.kept

    def _admit(self, n: int) -> None:
        """Refuse, before it is made, a root that exceeds the memory bound."""
        d, bytes_each = self.y.shape[1:].numel(), self.y.element_size()
        if n * d**2 * bytes_each <= self.memory:
            return  # as good as certain: no metric that ships has many more columns than outputs
        needed = n * self.columns * d * bytes_each
        if needed > self.memory:
            what = "an example" if n == 1 else f"{n} examples that cannot be cut apart"
            raise MemoryBoundError(
                f"the exact root of {self.metric!r} has {self.columns:,} columns: for {what} with {d:,} outputs it "
                f"needs {needed:,} bytes, over the bound memory={self.memory:,}. Sample it, with "
                "Fisher(family, samples=k) or Sampled(metric, k), or use Implicit, which needs no root"
            )

    @cached_property
    def _alone(self) -> int | None:
        """K at one example; None for a metric or targets that were made for one batch and know only all of it."""
        n = self.y.shape[0]
        if not all(t.ndim and t.shape[0] == n for t in tensors_of(self.target)):
            return None
        try:
            shape = self._shape(self.y[:1], examples(self.target, (0, 1), n))
        except Exception:  # whatever it is, the whole batch will raise it again if it is not about one example
            return None
        return shape[0] if shape[1:] == (1, *self.y.shape[1:]) else None

    def _shape(self, y: Tensor, target: Any) -> tuple[int, ...]:
        """The shape of the root at one example; a large root is not made to learn it."""
        with torch.no_grad(), unrounded(y.device):
            if y.numel() ** 2 * y.element_size() <= chunk_bytes(self.memory):
                return tuple(self.metric.root(y, target).shape)
            try:
                with FakeTensorMode(allow_non_fake_inputs=True) as mode:
                    return tuple(self.metric.root(mode.from_tensor(y), map_tensors(target, mode.from_tensor)).shape)
            except Exception:  # the metric looks at values, which are not there: Hessians do, and have D columns
                return (y.numel(), *y.shape)


def unrounded(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, nothing is cast to half precision. To switch autocast off takes time, so only where it is on."""
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)


def root_at(
    metric: OutputMetric, y: Tensor, target: Any, generator: torch.Generator | None, check: bool = True
) -> Tensor:
    """s [k n *out] at y [n *out], of the right shape and, where that may be looked at, finite."""
    before = 0 if y.is_inference() else y._version
    with torch.no_grad(), unrounded(y.device):
        root = metric.root(y, target, generator).detach()
    if not y.is_inference() and y._version != before:
        raise ValueError(f"{metric!r}.root has changed the outputs of the model in place: let it work on y.clone()")
    if root.shape[1:] != y.shape:
        raise ValueError(
            f"{metric!r}.root must be [k n *out] with [n *out] = {tuple(y.shape)}, got {tuple(root.shape)}"
        )
    if check:
        _check_finite(metric, root)
    return root


def flat_at(metric: OutputMetric, y: Tensor, u: Tensor, target: Any) -> Tensor:
    """h u [n *out], of the right shape and finite: what stands for the root's checks where no root is made."""
    with torch.no_grad(), unrounded(y.device):
        hu = metric.flat(y, u, target)
    if hu.shape != y.shape:
        raise ValueError(f"{metric!r}.flat must be [n *out] = {tuple(y.shape)}, got {tuple(hu.shape)}")
    _check_finite(metric, hu)
    return hu


def _check_finite(metric: OutputMetric, values: Tensor) -> None:
    if not bool(values.isfinite().all()):
        raise NonFiniteError(f"{metric!r} is not finite at the outputs: they are too large, or outside its domain")
