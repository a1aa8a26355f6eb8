"""Two parametrisations of one model, at a point that both reach: do they allow the same steps?"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.linalg import Damping, svdvals
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model
from natgrad.musical import natural_gradient
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import Euclidean, OutputMetric
from natgrad.pullbacks.pullback import pullback
from natgrad.show import as_html, brief
from natgrad.solve.solvers import Pinv, Solver
from natgrad.structures.base import Structure
from natgrad.structures.kernel import Kernel


@final
@dataclass(frozen=True)
class Comparison:
    """How two parametrisations of the same outputs differ, to first order; ``print`` it.

    Attributes:
        model_gap: ‖dψ v_θ − dφ v_ξ‖/‖dφ v_ξ‖ of their natural gradients, for φ at ξ and ψ at θ.
        span_gap: The sine of the largest angle between the spans of their coordinate vectors in the metric, and 1 where
            these have different dimensions.
        ranks: The dimensions of the spans.
        common: The dimension of what lies in both spans.
        on_model: The changes of the outputs dφ v_ξ and dψ v_θ [n *out].
    """

    model_gap: float
    span_gap: float
    ranks: tuple[int, int]
    common: int
    on_model: tuple[Tensor, Tensor]  # dφ v_ξ and dψ v_θ [n *out]

    __repr__ = brief
    _repr_html_ = as_html

    @property
    def reparametrisation(self) -> bool:
        """Whether the spans agree, up to the square root of rounding.

        Where both ranks are constant nearby, one parametrisation is then locally the other one after a change of
        coordinates (and of what the outputs do not see), and the natural gradients of every loss agree.
        """
        return self.span_gap <= torch.finfo(self.on_model[0].dtype).eps ** 0.5

    def __str__(self) -> str:
        first, second = self.ranks
        spans = (
            f"the coordinate vectors span the same {first} dimensions"
            if self.reparametrisation
            else f"the coordinate vectors span {first} and {second} dimensions, {self.common} of them common"
        )
        return f"gap on the model {self.model_gap:.2g}; {spans} (largest sine {self.span_gap:.2g})"


def compare(
    model: nn.Module | Callable[..., Any],
    other: nn.Module | Callable[..., Any],
    x: Inputs,
    loss: Callable[[Tensor], Tensor],
    metric: OutputMetric | Criterion | None = None,
    *,
    structure: Structure | None = None,
    solver: Solver | None = None,
    damping: Damping = 0.0,
    target: Any = None,
    params: Mapping[str, Tensor] | None = None,
    other_params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    other_output: Callable[[Any], Tensor] | None = None,
) -> Comparison:
    """Compare the natural gradients of two models that compute the same outputs.

    The parameters may differ in number and names, and no map between them is needed. ``reparametrisation`` compares
    along a given map of parameters, where they always agree.

    Args:
        model: A module or a pure function f(params, x).
        other: Another one, with the same outputs at x.
        x: The inputs.
        loss: A function of the outputs.
        metric: The metric on the outputs, or the loss; ``Euclidean()`` by default.
        structure: How the metric is held; ``Dense()`` by default.
        solver: How it is inverted; ``Pinv()`` by default.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        params: The parameters of ``model``, where it is a pure function.
        other_params: The parameters of ``other``, where it is a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        other_output: The same for ``other``.

    Returns:
        A ``Comparison``.

    Method:
        This is parametrisation independence (van Oostrum, Müller and Ay 2023, definition 4). No method has it at all
        points. By their theorem 1 the natural gradient on the model is the projection of one gradient onto the span of
        the coordinate vectors; it agrees for all losses exactly where the spans agree.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> line = nn.Linear(2, 1).double()
        >>> deep = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()  # lines, with ten parameters more
        >>> with torch.no_grad():
        ...     _ = line.weight.copy_(deep[1].weight @ deep[0].weight)
        ...     _ = line.bias.copy_(deep[1](deep[0].bias))
        >>> x = torch.randn(5, 2, dtype=torch.float64)
        >>> found = ng.invariance.compare(line, deep, x, lambda y: y.square().mean())
        >>> found.reparametrisation, found.ranks, found.model_gap < 1e-8
        (True, (3, 3), True)
    """
    chosen = Euclidean() if metric is None else metric_of(metric)
    one, two = Model.of(model, params, output), Model.of(other, other_params, other_output)
    pulled = [pullback(m, x, chosen, target) for m in (one, two)]
    _check_outputs(pulled[0].y, pulled[1].y)
    if not chosen.exact:
        raise ValueError(f"{chosen!r} is sampled, and two samples are two metrics: take the exact one")

    def gradient(of: Model) -> Tensor:
        solve = solver or Pinv()
        v = natural_gradient(of, x, loss, chosen, structure=structure, solver=solve, damping=damping, target=target)
        return linearise(of, x).push(v)

    on_model = gradient(one), gradient(two)
    size = float(torch.linalg.vector_norm(on_model[0]))
    first, second = (Kernel().estimate(pb).range[1] for pb in pulled)  # orthonormal bases [(k n) r] of the spans
    cosines = svdvals(first.T @ second, "the product of two bases")
    # The sines of small angles, which the cosines do not resolve, from what of one span lies outside of the other.
    sines = svdvals(second - first @ (first.T @ second), "the difference of two spans")
    same = first.shape[1] == second.shape[1]
    return Comparison(
        model_gap=float(torch.linalg.vector_norm(on_model[1] - on_model[0])) / (size if size > 0 else 1.0),
        span_gap=float(sines.max().clamp(max=1.0)) if same and sines.numel() else float(not same),
        ranks=(first.shape[1], second.shape[1]),
        common=int((cosines > 1 - cosines.numel() * torch.finfo(cosines.dtype).eps ** 0.5).sum()),
        on_model=on_model,
    )


def _check_outputs(y: Tensor, other: Tensor) -> None:
    """Refuse models that are at different points of output space."""
    if y.shape != other.shape:
        raise ValueError(f"the models have outputs of the shapes {tuple(y.shape)} and {tuple(other.shape)} at x")
    difference = float((y - other).abs().max()) / max(float(y.abs().max()), 1.0)
    if not difference <= torch.finfo(y.dtype).eps ** 0.5:
        raise ValueError(
            f"the models have other outputs at x (relative difference {difference:.1e}), and so are at two points: "
            "give both the parameters at which they compute the same function"
        )
