"""The metric of a model over all of its data, at a snapshot of the parameters."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from natgrad.errors import IncompatibleError, NatgradError
from natgrad.geometry import Vector
from natgrad.model import Inputs, Model, map_tensors
from natgrad.operators.base import Operator
from natgrad.output.metric import Euclidean, OutputMetric
from natgrad.pullback import Pullback
from natgrad.pullback.assemble import View, layers_of
from natgrad.pullback.batch import Batch
from natgrad.pullback.parts import examples
from natgrad.slots import check_slots
from natgrad.structures import Kernel, Structure

_ELEMENTS = 2**24  # of explicit rows at a time


@final
@dataclass(frozen=True)
class Curvature:
    """G, the mean over N examples, at the parameters θ* of a model.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> at = Curvature.of(Model.of(model), torch.ones(5, 2), ng.Euclidean(), ng.Dense())
    >>> at.examples, at.operator.dense().shape
    (5, torch.Size([2, 2]))
    """

    model: Model
    mode: Vector  # θ*, a copy
    operator: Operator  # G
    examples: int  # N

    @staticmethod
    def of(
        model: Model,
        x: Inputs | DataLoader[Any],
        metric: OutputMetric,
        structure: Structure,
        target: Any = None,
        generator: torch.Generator | None = None,
    ) -> Curvature:
        """G of all batches of a loader is the mean of theirs, each with the weight of its examples."""
        operator, n = None, 0
        check_slots(metric=(metric, OutputMetric))
        view = View(model, metric, layers_of(model), generator)
        for batch in _batches(model, x, target):
            pb = view.checked(batch.x, batch.target)
            _refuse_coupling(pb)
            n += pb.n
            new = structure.estimate_like(pb, operator)
            operator = new if operator is None else operator.lerp(new, pb.n / n)
        if operator is None:
            raise ValueError("the loader has no batch: there is no data to take the curvature at")
        mode = Vector({name: p.detach().clone() for name, p in model.params.items()})
        return Curvature(model, mode, operator.finite(wait=True), n)

    def rows(self, x: Inputs) -> Iterator[tuple[Tensor, Tensor]]:
        """y [n *out] and its Jacobian [d n p] at the mode, for some of the examples at a time."""
        self._check_unmoved()
        with torch.no_grad():
            y = self.model(None, x)
        n, d = y.shape[0], y[0].numel()
        step = max(1, _ELEMENTS // (d * self.model.size))
        view = View(self.model, Euclidean(), layers_of(self.model), None)
        for start in range(0, n, step):
            part = (start, min(start + step, n))
            pb = view.checked(examples(x, part, n) if step < n else x)
            yield pb.y, Kernel().estimate(pb).rows().view(d, pb.n, -1) * pb.n**0.5

    def _check_unmoved(self) -> None:
        """The Jacobian must be that of the mode."""
        moved = [name for name, p in self.model.params.items() if not torch.equal(p.detach(), self.mode[name])]
        if moved:
            raise NatgradError(
                f"the parameters {', '.join(moved)} have changed since the approximation was made, which is around "
                "where they were: make a new one, or put them back"
            )


def _refuse_coupling(pb: Pullback) -> None:
    if pb.coupling is not None:
        raise IncompatibleError(
            f"a Laplace approximation does not work with {pb.metric!r}: it couples the examples, so it is not the "
            "Hessian of a log-likelihood, which is a sum over them. Use its base, or Fisher(family)"
        )


def _batches(model: Model, x: Inputs | DataLoader[Any], target: Any) -> Iterator[Batch]:
    if not isinstance(x, DataLoader):
        yield Batch(model, x, target)
        return
    if target is not None:
        raise TypeError("target= belongs to one batch x; a loader brings its targets, as pairs (x, target)")
    for item in x:
        found = map_tensors(item, lambda t: t.to(model.example.device))
        if isinstance(found, Tensor):
            yield Batch(model, found)
        elif isinstance(found, (list, tuple)) and 1 <= len(found) <= 2:
            yield Batch(model, *found)
        else:
            raise TypeError(
                f"a loader must give tensors x or pairs (x, target), and this one gave a {type(item).__name__}: put "
                "several inputs into a tuple x of their own"
            )
