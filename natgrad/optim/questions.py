"""What a step rule may ask of the batch of its step."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor, nn

from natgrad.errors import BatchStatisticsError, DomainError
from natgrad.geometry import Covector, Vector
from natgrad.model import evaluating, tensors_of, without_chance
from natgrad.optim.distributed import World
from natgrad.output.metric import OutputMetric
from natgrad.pullback.batch import Batch
from natgrad.step.forms import quadratic_forms
from natgrad.step.geodesic import christoffel_at


@final
@dataclass(frozen=True)
class Questions:
    """About the model and its metric on the batch of this step, the mean over the batches of all processes."""

    batch: Batch
    metric: OutputMetric
    world: World

    def christoffel(self, v: Vector) -> Covector:
        """Γ♭(v, v) at the parameters and the batch of this step."""
        with self._separable():
            own = christoffel_at(self.batch, self.metric, v)
        return Covector(dict(zip(own, self.world.mean_of(list(own.values()), self._examples), strict=True)))

    def divergence(self, params: Mapping[str, Tensor]) -> float:
        """Mean divergence of the outputs at other parameters from the outputs now; infinite outside their domain."""
        model, x = self.batch.model, self.batch.x
        with torch.no_grad(), self._separable():
            y0, y = model(None, x), model(params, x)
            try:
                own = self.metric.divergence(y, y0, self.batch.target).mean()
            except DomainError:  # the outputs have left the family: no distribution is there, and none is near
                own = y0.new_tensor(math.inf)
            return float(self._mean(own))

    def curvature(self, vectors: Sequence[Vector], fraction: float) -> Tensor:
        """⟨v, G w⟩ [v w] with the exact metric, on a part of the batch.

        Of the function that is trained: statistics of the batch move with the parameters, and need all of the batch.
        """
        whole = any(m.training for m in self.batch.model.batch_norms.values())
        with without_chance(self._module):
            return self._mean(quadratic_forms(self.batch, self.metric, vectors, 1.0 if whole else fraction))

    def _mean(self, own: Tensor) -> Tensor:
        return self.world.mean_of([own], self._examples)[0]

    @property
    def _module(self) -> nn.Module:
        module = self.batch.model.module
        assert module is not None
        return module

    @property
    def _examples(self) -> int:
        """How many the batch of this process has."""
        sizes = [t.shape[0] for t in tensors_of(self.batch.x) if t.ndim]
        return sizes[0] if sizes else 1

    @contextmanager
    def _separable(self) -> Iterator[None]:
        """Evaluation mode where the examples would mix or dropout would draw: the metric was taken there, too."""
        try:
            self.batch.model.check_separable()
        except BatchStatisticsError:
            with evaluating(self._module):
                yield
        else:
            yield
