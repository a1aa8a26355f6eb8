"""Quantities of the current batch that step rules need: divergence, curvature and Christoffel force."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision, get_rng_state, outside_inference_mode
from natgrad.errors import BatchStatisticsError, DomainError, IncompatibleError
from natgrad.geometry import Covector, Vector
from natgrad.isolation import same_draws
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model, count_examples, evaluating, map_tensors
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import Batch
from natgrad.pullbacks.rows import number_examples, separable
from natgrad.show import brief
from natgrad.step.geodesic import christoffel_at

_FEWEST = 256  # examples in a part of a batch, where the batch has them
_GOLDEN = (math.sqrt(5) - 1) / 2
Answer = TypeVar("Answer")


@final
@dataclass(frozen=True)
class BatchQueries:
    """Questions that a step rule may ask about the model and its metric on the batch of a step.

    Args:
        passes: The batches of gradient accumulation, or one, each with the metric on its outputs. Their answers are
            weighted by examples.
        mean: ``mean(values, n)``, the mean of tensors over all processes, weighted by their numbers of examples n.
    """

    passes: Sequence[tuple[Batch, OutputMetric]]
    mean: Callable[[Sequence[Tensor], int], list[Tensor]]

    __repr__ = brief

    def christoffel(self, v: Vector) -> Covector:
        """Γ♭(v, v) at the current parameters."""

        def force(batch: Batch, metric: OutputMetric) -> list[Tensor]:
            terms = self._separably(batch, lambda: christoffel_at(batch, metric, v))
            return [terms[name] for name in v]

        return Covector(dict(zip(v, self._joint(force), strict=True)))

    def divergence(self, params: Mapping[str, Tensor], *, reverse: bool = False) -> float:
        """Mean divergence of the outputs at ``params`` from the outputs now; infinite outside of their domain.

        ``reverse``: with the two exchanged. For Fisher it is KL(new‖old), in place of KL(old‖new).
        """

        @torch.no_grad()
        def of_one(batch: Batch, metric: OutputMetric) -> list[Tensor]:
            y0, y = batch.model(None, batch.x), batch.model(params, batch.x)
            try:
                return [metric.divergence(*((y0, y) if reverse else (y, y0)), batch.target).mean()]
            except DomainError:  # the outputs have left the family: no distribution is there, and none is near
                return [y0.new_tensor(math.inf)]

        (mean,) = self._joint(lambda batch, metric: self._separably(batch, lambda: of_one(batch, metric)))
        return float(mean)

    def curvature(self, vectors: Sequence[Vector], fraction: float) -> Tensor:
        """⟨v, G w⟩ [v w] with the exact metric of the function that is trained, on a fraction of the batch.

        Batch statistics move with the parameters: a model that has them is seen on the whole batch. Random numbers
        (masks of dropout) are drawn as in the pass over the batch: on the whole of it they are the same.
        """

        def forms(batch: Batch, metric: OutputMetric) -> list[Tensor]:
            whole = any(m.training for m in batch.model.batch_norms.values())
            with same_draws(_rng_state(batch)):
                return [quadratic_forms(batch, metric, vectors, 1.0 if whole else fraction)]

        return self._joint(forms)[0]

    def _joint(self, query: Callable[[Batch, OutputMetric], list[Tensor]]) -> list[Tensor]:
        """The mean over the examples of all passes, and of all processes."""
        numbers = [count_examples(batch.x) for batch, _ in self.passes]
        total = sum(numbers)
        means: list[Tensor] = []
        for n, (batch, metric) in zip(numbers, self.passes, strict=True):
            terms = [t * (n / total) for t in query(batch, metric)]
            means = [mean + t for mean, t in zip(means, terms, strict=True)] if means else terms
        return self.mean(means, total)

    def _separably(self, batch: Batch, query: Callable[[], Answer]) -> Answer:
        """In evaluation mode where the examples would mix or dropout would draw: the metric was taken there, too.

        What is random there as well draws the same numbers in all passes.
        """
        try:
            batch.model.check_separable()
            return query()
        except BatchStatisticsError:
            module = batch.model.module
            assert module is not None
            with evaluating(module), same_draws(_rng_state(batch)):
                return query()


def _rng_state(batch: Batch) -> Tensor:
    return get_rng_state(batch.model.example.device) if batch.rng_state is None else batch.rng_state


def quadratic_forms(batch: Batch, metric: OutputMetric, vectors: Sequence[Vector], fraction: float = 1.0) -> Tensor:
    """⟨v, G w⟩ [v w] of all pairs of ``vectors``, on a ``fraction`` of the batch, but on 256 examples at least.

    ⟨v, Gw⟩ = (1/N) Σ_n ⟨J_n v, h J_n w⟩ takes products with J only; G is never formed. The examples are spread over
    the whole batch, which may be sorted. A sampled metric stands here for the one that it samples, ``metric.flat``.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> at = Batch(Model.of(model), torch.tensor([[3.0, 4.0]]))
    >>> quadratic_forms(at, ng.Euclidean(), [Vector({"weight": torch.tensor([[1.0, 0.0]])})])
    tensor([[9.]])
    """
    n = count_examples(batch.x)
    m = max(min(n, _FEWEST), round(fraction * n))
    y, pushed, target = None, list[Tensor](), batch.target
    cut = 0 < m < n and separable(batch.x, n) and (target is None or separable(target, n))
    if cut and not number_examples(batch.model, batch.x):
        try:
            y, pushed = _pushed(batch.model, _spread(batch.x, m, n), vectors)
        except (IncompatibleError, IndexError):  # examples look for others (an adjacency matrix), or as below
            y = None
    if y is not None and y.shape[0] == m:
        target = _spread(target, m, n)
    else:  # all of them, also where the first axis was not that of the examples
        y, pushed = _pushed(batch.model, batch.x, vectors)
    with torch.no_grad(), full_precision(y.device):
        wide = torch.promote_types(y.dtype, torch.float32)
        y, pushed = y.to(wide), [u.to(wide) for u in pushed]
        lowered = torch.stack([metric.flat(y, u, target).flatten() for u in pushed])
        return torch.stack([u.flatten() for u in pushed]) @ lowered.T / y.shape[0]


def _spread(x: Inputs, m: int, n: int) -> Inputs:
    """m of n examples, number i·p mod n for i < m: all different, and evenly spread.

    p is near n over the golden ratio, so that a sorted batch is met evenly, and has no divisor in common with n, so
    that one whose classes take turns is, too.
    """
    p = next(p for p in range(round(_GOLDEN * n), n) if math.gcd(p, n) == 1)
    return map_tensors(x, lambda t: t.index_select(0, torch.arange(m, device=t.device) * p % n))


@outside_inference_mode()
def _pushed(model: Model, x: Inputs, vectors: Sequence[Vector]) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and J v of every vector: in forward mode, or by two backward passes for a model that has none."""
    params = {name: p.detach() for name, p in model.params.items()}
    tangents = {name: torch.stack([v[name].to(p.dtype) for v in vectors]) for name, p in params.items()}

    def push(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y, jv = torch.func.jvp(lambda θ: model(θ, x), (params,), (t,))[:2]
        return y, jv

    try:
        with torch.no_grad():
            ys, jvs = torch.func.vmap(push, out_dims=(None, 0), randomness="same")(tangents)  # type: ignore[arg-type]
        return ys, list(jvs)
    except (RuntimeError, ValueError):  # no rule for forward mode, or for vmap
        try:
            linear = linearise(model, x)
            return linear.y, [linear.push(v).detach() for v in vectors]
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IncompatibleError) as error:
            raise IncompatibleError(
                "the step rule needs products J v with the Jacobian of the outputs, and the model has an operation "
                f"without a derivative in forward mode and without a second derivative ({error}): use step=KLClip() or "
                "step=Fixed(), which do without, in place of SelfTuned()"
            ) from error
