"""Exact quadratic forms of the metric, ⟨v, Gw⟩ = (1/N) Σ_n ⟨J_n v, h J_n w⟩: products with J only, G is not formed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.geometry import Vector
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model, map_tensors, tensors_of
from natgrad.output.metric import OutputMetric
from natgrad.pullback.batch import Batch
from natgrad.pullback.parts import separable

_FEWEST = 256  # examples that a part of a batch has, where the batch has them
_GOLDEN = (math.sqrt(5) - 1) / 2


def quadratic_forms(batch: Batch, metric: OutputMetric, vectors: Sequence[Vector], fraction: float = 1.0) -> Tensor:
    """⟨v, G w⟩ [v w] of all pairs of ``vectors``, on a ``fraction`` of the batch, but on 256 examples at least.

    The examples are spread over all of it: a batch may be sorted. A sampled metric stands here for the one that it
    samples, ``metric.flat``.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> at = Batch(Model.of(model), torch.tensor([[3.0, 4.0]]))
    >>> quadratic_forms(at, ng.Euclidean(), [Vector({"weight": torch.tensor([[1.0, 0.0]])})])
    tensor([[9.]])
    """
    n = _examples(batch.x)
    m = max(min(n, _FEWEST), round(fraction * n))
    x, target = batch.x, batch.target
    cut = 0 < m < n and separable(x, n) and (target is None or separable(target, n))
    if cut:
        x, target = _spread(x, m, n), _spread(target, m, n)
    y, pushed = _pushed(batch.model, x, vectors)
    if cut and y.shape[0] != m:  # the first axis was not that of the examples
        target = batch.target
        y, pushed = _pushed(batch.model, batch.x, vectors)
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
        wide = torch.promote_types(y.dtype, torch.float32)
        y, pushed = y.to(wide), [u.to(wide) for u in pushed]
        lowered = torch.stack([metric.flat(y, u, target).flatten() for u in pushed])
        return torch.stack([u.flatten() for u in pushed]) @ lowered.T / y.shape[0]


def _spread(x: Inputs, m: int, n: int) -> Inputs:
    """m of n examples, number i·p mod n for i < m: no two are one, and none are missed for long.

    p is near n over the golden ratio, so that what is sorted is met evenly, and has no divisor in common with n, so
    that what comes in turns is, too.
    """
    p = next(p for p in range(round(_GOLDEN * n), n) if math.gcd(p, n) == 1)
    return map_tensors(x, lambda t: t.index_select(0, torch.arange(m, device=t.device) * p % n))


def _examples(x: Inputs) -> int:
    tensors = tensors_of(x)
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 0


def _pushed(model: Model, x: Inputs, vectors: Sequence[Vector]) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and J v of every vector: forward mode, or twice backward for a model that has none."""
    params = {name: p.detach() for name, p in model.params.items()}
    tangents = {name: torch.stack([v[name].to(p.dtype) for v in vectors]) for name, p in params.items()}

    def push(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y, jv = torch.func.jvp(lambda θ: model(θ, x), (params,), (t,))[:2]
        return y, jv

    try:
        with torch.no_grad():
            ys, jvs = torch.func.vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]
        return ys, list(jvs)
    except (RuntimeError, ValueError):  # no rule for forward mode, or for vmap
        try:
            linear = linearise(model, x)
            return linear.y, [linear.push(v).detach() for v in vectors]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise IncompatibleError(
                "the step rule needs products J v with the Jacobian of the outputs, and the model has an operation "
                f"without a derivative in forward mode and without a second derivative ({error}): use step=KLClip() or "
                "step=Fixed(), which do without, in place of SelfTuned()"
            ) from error
