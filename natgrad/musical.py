"""♯ in one call, from a metric and a differential to the natural gradient; and the Hessian beside the metric."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.geometry import Covector, Vector, differential
from natgrad.linalg import Damping, check_finite
from natgrad.model import Inputs, Model, batches_of, check_slots, count_examples
from natgrad.output.losses import Criterion, as_quotient, is_sum, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import pullback
from natgrad.solve.solvers import Cholesky, Solver
from natgrad.structures.base import Operator, Structure
from natgrad.structures.dense import Dense
from natgrad.structures.implicit import HessianOperator


def sharp(G: Operator, ω: Covector, solver: Solver | None = None, damping: Damping = 0.0) -> Vector:
    """Turn a covector into a vector by inverting the metric; the result is an ascent direction.

    Args:
        G: The metric, as a structure has estimated it.
        ω: The covector, such as a ``differential``.
        solver: How the metric is inverted; ``Cholesky()`` by default, ``Pinv()`` for singular ones.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.

    Returns:
        ω♯ = (G + λ)⁻¹ω, a ``Vector`` (Grosse 2021, section 6.1).

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model = nn.Linear(2, 1)
        >>> G = ng.Dense().estimate(ng.pullback(model, torch.randn(8, 2), ng.Euclidean()))
        >>> ω = ng.differential(model, model(torch.ones(1, 2)).sum())
        >>> bool((G.flat(ng.sharp(G, ω)) - ω).flatten().norm() < 1e-4)
        True
    """
    solver = solver or Cholesky()
    check_slots(G=(G, Operator), ω=(ω, Covector), solver=(solver, Solver))
    check_finite(ω.flatten(), "the differential")
    return solver.init(G, damping).sharp(ω)


def natural_gradient(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    loss: Tensor | Callable[[Any], Tensor],
    metric: OutputMetric | Criterion,
    *,
    structure: Structure | None = None,
    solver: Solver | None = None,
    damping: Damping = 0.0,
    target: Any = None,
    generator: torch.Generator | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Vector:
    """The natural gradient of a loss at a batch (Amari 1998); subtract it to descend.

    Args:
        model: A module or a pure function f(params, x).
        x: The inputs of the batch.
        loss: A scalar tensor computed from the model, or a function of the outputs y; where the metric is on several
            heads, y is a dict of them by their keys or places.
        metric: The metric on the outputs, or the loss.
        structure: How the metric is held; ``Dense()`` by default.
        solver: How it is inverted; ``Cholesky()`` by default.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.
        params: The parameters of a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        (G + λ)⁻¹ dL, a ``Vector``.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x, t = nn.Linear(2, 3), torch.randn(8, 2), torch.randint(3, (8,))
        >>> loss = lambda y: nn.functional.cross_entropy(y, t)
        >>> ng.natural_gradient(model, x, loss, ng.Fisher(ng.Categorical()), damping=1e-3)
        Vector(weight: (3, 2), bias: (3,))
    """
    structure, solver = structure or Dense(), solver or Cholesky()
    metric = metric_of(metric)
    check_slots(structure=(structure, Structure), solver=(solver, Solver))
    wrapped = Model.of(model, params, output, heads=metric.heads)
    pb = pullback(wrapped, x, metric, target, generator)
    if isinstance(loss, Tensor):
        ω = differential(wrapped.params, loss)
    else:
        _check_of_outputs(loss)
        leaves = {name: p.detach().requires_grad_() for name, p in wrapped.params.items()}
        with torch.enable_grad():
            ω = differential(leaves, loss(wrapped.given_to_loss(*wrapped.evaluated(leaves, x))))
    return sharp(structure.estimate(pb), ω, solver, damping)


def hessian(
    model: nn.Module | Callable[..., Any],
    x: Inputs | DataLoader[Any],
    loss: Callable[..., Tensor],
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> HessianOperator:
    """The Hessian of a loss in the parameters of a model, as products (Pearlmutter 1994).

    A loader that shuffles is welcome, and one that changes its examples (random crops) has no Hessian.

    Args:
        model: A module or a pure function f(params, x).
        x: A batch, or a ``DataLoader``, which every product then reads, in the memory of one batch.
        loss: A function of the outputs y; of a loader of pairs (x, target) a function of y and the target, as
            ``nn.CrossEntropyLoss()`` is.
        params: The parameters of a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        H = ∇²L, a ``HessianOperator``.

    Method:
        L is the mean over all that a loss of torch counts (labels that are not ignored, by their class weights); any
        other loss of a batch is taken for the mean over its examples, and L is that over all examples. With
        ``reduction="sum"`` both are sums.

        H = JᵀMJ + Σ_d (∂L/∂y_d) ∇²y_d with M = ∇²L at the outputs (Johnson 2017, (40)). The first term is a metric, the
        generalised Gauss–Newton matrix; the second one can be negative, and H with it. At an exact fit the second term
        is zero.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model, x, t = nn.Linear(2, 3), torch.randn(8, 2), torch.randint(3, (8,))
        >>> H = ng.hessian(model, x, lambda y: nn.functional.cross_entropy(y, t))
        >>> H.dense().shape, H.differential  # a loss that is convex in the parameters: H is the metric
        (torch.Size([9, 9]), Covector(weight: (3, 2), bias: (3,)))
    """
    wrapped = Model.of(model, params, output)
    if not isinstance(x, DataLoader):
        _check_of_outputs(loss)
        return HessianOperator.at(lambda θ: loss(wrapped(θ, x)), wrapped.params)
    loader, summed = x, is_sum(loss)
    quotient = None if summed else as_quotient(loss)
    total, divisor = 0, 0.0
    for each, target in batches_of(wrapped, loader):
        total += count_examples(each)
        quotient = None if target is None else quotient  # a loss of outputs alone
        if quotient is not None:
            with torch.no_grad():
                divisor += float(quotient[1](wrapped(wrapped.params, each), target))
    if not total:
        raise ValueError("the loader has no batch: there is no loss to differentiate")
    if quotient is not None and not divisor > 0:
        raise ValueError(f"no target of the loader counts in {loss!r}: all are ignored, or their class weights are 0")

    def objectives() -> Iterator[tuple[float, Callable[[Mapping[str, Tensor]], Tensor]]]:
        count = 0
        for each, target in batches_of(wrapped, loader):
            n, given = count_examples(each), () if target is None else (target,)
            count += n
            if quotient is not None:
                yield 1 / divisor, partial(_loss_at, wrapped, each, quotient[0], given)
            else:
                yield 1.0 if summed else n / total, partial(_loss_at, wrapped, each, loss, given)
        if count != total:
            raise ValueError(
                f"the loader gave {total} examples at first, and {count} now: a product with the Hessian needs all of "
                "them every time. Give a loader that can be read again"
            )

    return HessianOperator.of_sum(objectives, wrapped.params)


def _loss_at(
    model: Model, x: Inputs, loss: Callable[..., Tensor], given: tuple[Any, ...], θ: Mapping[str, Tensor]
) -> Tensor:
    return loss(model(θ, x), *given)


def _check_of_outputs(loss: Callable[..., Any]) -> None:
    """Refuse a loss of outputs and targets, as those of torch are."""
    try:
        signature = inspect.signature(loss.forward if isinstance(loss, nn.Module) else loss)
    except ValueError:  # of a builtin function
        return
    try:
        signature.bind(None)
    except TypeError:
        name = getattr(loss, "__name__", type(loss).__name__)
        raise TypeError(
            f"the loss is a function of the outputs alone, and {name} is not: write lambda y: loss(y, target)"
        ) from None
