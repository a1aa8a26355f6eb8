"""Implicit: the metric as a product v ↦ Jᵀ(C ⊗ h)Jv, of which nothing is stored; also Hessians."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import ClassVar, cast, final

import torch
from torch import Tensor

from natgrad.accelerate.autograd import vjp
from natgrad.accelerate.devices import without_fused_recurrence
from natgrad.accelerate.temporaries import HESSIAN_COLUMNS
from natgrad.geometry import Covector, unflatten
from natgrad.isolation import unfused
from natgrad.linalg import Damping
from natgrad.linearise import Linearisation, linearise
from natgrad.model import Model
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.structures.base import Inverse, Layout, Operator, RootedOperator, Structure
from natgrad.structures.dense import FormedOperator


@final
@dataclass(frozen=True)
class Implicit(Structure):
    """Keep nothing but products with the metric, for conjugate gradients and any model size.

    Method:
        Only v ↦ Jᵀ(C ⊗ h)Jv, through the model linearised once (Grosse 2021, section 5.2); solved by ``CG``.

    Example:
        >>> import natgrad as ng
        >>> model = torch.nn.Linear(2, 1)
        >>> pb = ng.pullback(model, torch.tensor([[1.0, 2.0]]), ng.Euclidean())
        >>> Implicit().estimate(pb).product(torch.tensor([1.0, 0.0, 0.0]))
        tensor([1., 2., 1.])
    """

    bounded: ClassVar[bool] = False
    stored: ClassVar[bool] = False
    suggested: ClassVar[bool] = True

    def uncovered(self) -> None:
        return None

    @without_autocast
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> ImplicitOperator:
        self.admit(pullback)
        linear = linearise(pullback.model, pullback.batch.x)
        return ImplicitOperator(Layout(pullback.model.like, pullback.y.dtype), ((1.0, pullback, linear),))

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> None:
        return None


@final
@dataclass(frozen=True, repr=False)
class ImplicitOperator(RootedOperator):
    """A metric as products with vectors alone.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        terms: The weighted terms of a moving average, each a model that was linearised once, at a snapshot of the
            parameters.

    Method:
        G v = Jᵀ h J v (Johnson 2017, (43)).
    """

    layout: Layout
    terms: tuple[tuple[float, Pullback, Linearisation], ...]

    def __post_init__(self) -> None:
        for _, pullback, _ in self.terms:
            pullback.check_metric()

    def product(self, v: Tensor) -> Tensor:
        named = unflatten(v, self.layout.like)
        terms = []
        for weight, pullback, linear in self.terms:
            pushed = linear.push(named).to(pullback.y.dtype)
            # The weight goes where there are few numbers: onto the outputs.
            pulled = linear.pull((pullback.output_flat(pushed) * weight).to(linear.y.dtype))
            terms.append(torch.cat([t.reshape(-1) for t in pulled.values()]).to(v.dtype))
        return terms[0] if len(terms) == 1 else torch.stack(terms).sum(0)

    @property
    def device(self) -> torch.device:
        return self.terms[0][1].y.device

    @property
    def root_columns(self) -> int | None:
        """K·N, where no metric couples its examples."""
        if any(pullback.coupling is not None for _, pullback, _ in self.terms):
            return None
        return sum(pullback.columns * pullback.n for _, pullback, _ in self.terms)

    @cached_property
    def _roots(self) -> list[Tensor]:
        """s [k n *out] of every term: an exact root is not kept by its pullback."""
        return [pullback.root for _, pullback, _ in self.terms]

    def push_root(self, v: Tensor) -> Tensor:
        """R v [(k n)], where a row of R is J_nᵀs_kn √(w/N)."""
        named, pushes = unflatten(v, self.layout.like), []
        for (weight, pullback, linear), s in zip(self.terms, self._roots, strict=True):
            pushed = linear.push(named).to(pullback.y.dtype)
            t = torch.einsum("knd,nd->kn", s.reshape(*s.shape[:2], -1), pushed.reshape(pullback.n, -1))
            pushes.append(t.flatten() * math.sqrt(weight / pullback.n))
        return torch.cat(pushes)

    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p] for t [(k n)]."""
        total = t.new_zeros(self.layout.size)
        sizes = [pullback.columns * pullback.n for _, pullback, _ in self.terms]
        for (weight, pullback, linear), column, s in zip(self.terms, t.split(sizes), self._roots, strict=True):
            u = torch.einsum("kn...,kn->n...", s, column.view(-1, pullback.n))
            u = u * math.sqrt(weight / pullback.n)
            pulled = linear.pull(u.to(linear.y.dtype))
            total += torch.cat([g.reshape(-1) for g in pulled.values()]).to(t.dtype)
        return total

    def diagonal(self) -> Tensor:
        for _, pullback, _ in self.terms:  # products have a snapshot of the parameters, and the factors do not
            pullback.check_current("take diagonal() or trace()")
        return torch.stack([weight * pullback.square() for weight, pullback, _ in self.terms]).sum(0)

    def lerp(self, other: Operator, weight: float) -> ImplicitOperator:
        self.same_kind(other)
        old = tuple(((1 - weight) * w, pullback, linear) for w, pullback, linear in self.terms)
        new = tuple((weight * w, pullback, linear) for w, pullback, linear in cast(ImplicitOperator, other).terms)
        return ImplicitOperator(self.layout, old + new)


@final
@dataclass(frozen=True, repr=False)
class HessianOperator(FormedOperator):
    """The Hessian of a loss as products with vectors; it need not be positive.

    Made by ``natgrad.hessian``, or from any function of named parameters by ``HessianOperator.at``.

    Attributes:
        layout: The names and shapes of the parameters, and the precision.
        point: A snapshot of the parameters.
        terms: A function that returns the terms of the loss, with their weights.

    Example:
        >>> H = HessianOperator.at(lambda θ: θ["w"].prod(), {"w": torch.tensor([2.0, 3.0])})
        >>> H.dense(), H.product(torch.tensor([1.0, 0.0])), H.differential["w"]
        (tensor([[0., 1.],
                [1., 0.]]), tensor([0., 1.]), tensor([3., 2.]))
    """

    layout: Layout
    point: Mapping[str, Tensor]
    terms: Callable[[], Iterable[tuple[float, GradientGraph]]]  # with their weights

    @staticmethod
    def at(objective: Callable[[Mapping[str, Tensor]], Tensor], point: Mapping[str, Tensor]) -> HessianOperator:
        """The Hessian of a function of named parameters, at a snapshot of the point."""
        graph = GradientGraph.of(objective, point)
        return HessianOperator(Layout.of(point), dict(point), lambda: [(1.0, graph)])

    @staticmethod
    def of_sum(
        objectives: Callable[[], Iterable[tuple[float, Callable[[Mapping[str, Tensor]], Tensor]]]],
        point: Mapping[str, Tensor],
    ) -> HessianOperator:
        """The Hessian of Σ w J of objectives that are asked for, one at a time, for every product or differential."""
        point = {name: p.detach().clone() for name, p in point.items()}

        def terms() -> Iterator[tuple[float, GradientGraph]]:
            for weight, objective in objectives():
                yield weight, GradientGraph.of(objective, point)

        return HessianOperator(Layout.of(point), point, terms)

    @property
    def device(self) -> torch.device:
        return next(iter(self.point.values())).device

    @cached_property
    def differential(self) -> Covector:
        """dJ at the same point."""
        return self.layout.covector(sum_of(self.terms(), GradientGraph.gradient))

    def product(self, v: Tensor) -> Tensor:
        tangents = self.layout.vector(v)
        return sum_of(self.terms(), lambda graph: graph.product(list(tangents.values()))).to(v.dtype)

    def dense(self) -> Tensor:
        eye = torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.device)
        columns = eye.split(HESSIAN_COLUMNS)
        matrix = sum_of(self.terms(), lambda graph: torch.cat([graph.products(some) for some in columns]))
        return 0.5 * (matrix + matrix.T)

    def pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        self.refuse("Pinv", "a Hessian can be indefinite, and then it need not descend; use CG() or Cholesky()")


@final
@dataclass(frozen=True, eq=False)
class GradientGraph:
    """The gradients of a function in ``leaves``, with the graph that differentiates them again."""

    leaves: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]

    @staticmethod
    def of(objective: Callable[[Mapping[str, Tensor]], Tensor], point: Mapping[str, Tensor]) -> GradientGraph:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in point.items()}
        device = next(iter(leaves.values())).device
        # Fused attention, and the recurrent layers of cuDNN, have no second derivative.
        with torch.enable_grad(), unfused(None, device), without_fused_recurrence(device):
            # 0·θ² keeps a graph for parameters in which J is linear or constant: their Hessian is zero, not missing.
            value = objective(leaves)
            if not isinstance(value, Tensor) or value.numel() != 1:
                given = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
                raise TypeError(f"a Hessian is that of a loss, a tensor with one number, and this is {given}")
            if not value.requires_grad:
                raise ValueError("the loss has no graph: compute it from the outputs, undetached, in torch")
            value = value.reshape(()) + sum((0 * p.square()).sum() for p in leaves.values())
            gradients = torch.autograd.grad(value, list(leaves.values()), create_graph=True)
        return GradientGraph(tuple(leaves.values()), tuple(gradients))

    def gradient(self) -> Tensor:
        """dJ [p]."""
        return torch.cat([g.detach().reshape(-1) for g in self.gradients])

    def product(self, tangents: Sequence[Tensor]) -> Tensor:
        """H v [p]."""
        products = torch.autograd.grad(self.gradients, self.leaves, tangents, retain_graph=True)
        return torch.cat([t.reshape(-1) for t in products])

    def products(self, v: Tensor) -> Tensor:
        """H v [k p] of several vectors [k p]: one batched backward pass, where the kernels allow it."""
        pieces = v.split([t.numel() for t in self.leaves], dim=1)
        tangents = tuple(t.reshape(len(v), *g.shape).to(g.dtype) for t, g in zip(pieces, self.gradients, strict=True))
        products = vjp(self.gradients, self.leaves, tangents)
        columns = [t.reshape(len(v), p.numel()) for t, p in zip(products, self.leaves, strict=True) if t is not None]
        return torch.cat(columns, dim=1).to(v.dtype)


def sum_of(terms: Iterable[tuple[float, GradientGraph]], query: Callable[[GradientGraph], Tensor]) -> Tensor:
    """Σ w q of the terms; one alone has the weight 1 and is returned as it is."""
    values = (query(graph) if weight == 1.0 else query(graph) * weight for weight, graph in terms)
    return reduce(torch.add, values)
