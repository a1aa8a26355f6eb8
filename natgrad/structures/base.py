"""The operator: a metric G on parameter space, kept in some structure, that can be applied and inverted."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import NoReturn, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.fused import nonfinite
from natgrad.accelerate.inverses import Newton
from natgrad.errors import FactorisationError, IncompatibleError, NonFiniteError
from natgrad.geometry import Covector, Vector, unflatten

NOT_POSITIVE = "a factor of the metric was not positive after damping: raise the damping, or use a larger batch"


@final
@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters, in flattening order, and the precision of the metric over them.

    Parameters may be in half precision; a metric is not, and is applied to flattened elements in its own. What comes
    back as a vector or a covector has the precision of every parameter.
    """

    like: dict[str, Tensor]  # tensors on the meta device: shapes without values
    dtype: torch.dtype

    @staticmethod
    def of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Layout:
        """``dtype``: of the metric, where it is known; else that of the parameters, and single at least."""
        like = {name: torch.empty_like(t, device="meta", requires_grad=False) for name, t in tensors.items()}
        if dtype is None:
            dtype = reduce(torch.promote_types, (t.dtype for t in like.values()), torch.float32)
        return Layout(like, dtype)

    @property
    def size(self) -> int:
        return sum(t.numel() for t in self.like.values())

    def flatten(self, element: Mapping[str, Tensor]) -> Tensor:
        """[p] in the precision of the metric, from a vector or a covector, checked against the names."""
        if list(element) != list(self.like):
            raise ValueError(f"the metric is over {list(self.like)}, and this is over {list(element)}")
        for name, t in element.items():
            if t.shape != self.like[name].shape:
                shapes = f"{tuple(self.like[name].shape)}, and this has {tuple(t.shape)}"
                raise ValueError(f"the metric is over {name} of shape {shapes}")
        return torch.cat([t.reshape(-1).to(self.dtype) for t in element.values()])

    def vector(self, flat: Tensor) -> Vector:
        return Vector(self._named(flat))

    def covector(self, flat: Tensor) -> Covector:
        return Covector(self._named(flat))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: t.to(self.like[name].dtype) for name, t in unflatten(flat, self.like).items()}


class Inverse(ABC):
    """(G + λ)⁻¹ or G⁺, factored once and applied to many covectors."""

    layout: Layout

    @abstractmethod
    def solve(self, ω: Tensor) -> Tensor:
        """v [p] from ω [p]."""

    def sharp(self, ω: Covector) -> Vector:
        """ω♯: the vector of the covector."""
        return self.layout.vector(self.solve(self.layout.flatten(ω)))

    @property
    def noise(self) -> int:
        """q: how many numbers of white noise ``coloured`` takes."""
        return self.layout.size

    def coloured(self, ξ: Tensor) -> Tensor:
        """T ξ [s p] of white noise ξ [s q], for a root T of this inverse, T Tᵀ = (G + λ)⁻¹, which is its covariance."""
        self.refuse_root()

    def whitened(self, ω: Tensor) -> Tensor:
        """Tᵀω [s q] of covectors ω [s p], for the same root: ‖Tᵀω‖² = ωᵀ(G + λ)⁻¹ω."""
        self.refuse_root()

    def refuse_root(self) -> NoReturn:
        """Raise the error of an inverse that has no root."""
        raise IncompatibleError(
            f"{type(self).__name__} has no root to draw Gaussian samples with: use Cholesky(), or CG() for Implicit, "
            "with damping > 0 and a metric that does not couple the examples"
        )

    def memory(self, ω: Covector) -> dict[str, Tensor]:
        """Memory for covectors like ω, by name, laid out as ``sharp`` likes them best."""
        return {name: torch.empty_like(t) for name, t in ω.items()}

    def tensors(self) -> dict[str, Tensor]:
        """What it is made of, for ``inverse_from``; of an iterative one, the last solution, to start from."""
        return {}

    @property
    def remembers(self) -> bool:
        """Whether what ``sharp`` returns lies in memory that a later solve starts from."""
        return False

    def failed(self) -> bool:
        """Whether a GPU could not make a part of it, as far as the host has heard; that part is of an earlier one."""
        return False

    def inherit(self, other: Inverse) -> None:  # noqa: B027 - what never fails has nothing to hear of
        """This one is made of the other, and has ``failed`` where that has."""

    def forgive(self) -> None:  # noqa: B027 - what never fails has nothing to forget
        """What has ``failed`` has been heard."""

    def overwritten(self, new: Inverse) -> Inverse:
        """The new inverse in the memory of this one, where that is possible; else the new one as it is."""
        return new


class Operator(ABC):
    """A metric on parameter space. ``product`` and the rest work on flattened [p]; ``flat`` on vectors.

    A new structure is a new operator: it says how it is inverted, and refuses, by name, what it cannot do.
    """

    layout: Layout
    unseen: frozenset[str] = frozenset()  # parameters of layers that no forward pass has used so far

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """G v [p]."""

    @abstractmethod
    def diagonal(self) -> Tensor:
        """The diagonal of G [p]."""

    @abstractmethod
    def dense(self) -> Tensor:
        """G as a matrix [p q]."""

    @abstractmethod
    def logdet(self, damping: float = 0.0) -> Tensor:
        """log det(G + λ); a singular G raises."""

    @abstractmethod
    def lerp(self, other: Operator, weight: float) -> Operator:
        """(1 − w) G + w G': the moving average."""

    def merged(self, other: Operator, weight: float) -> Operator:
        """As ``lerp``; on a GPU, where nobody has looked at ``other``, it stays what it is if that is not finite."""
        values = [t for t in other.tensors().values() if t.is_floating_point() and t.numel()]
        if not values or values[0].device.type != "cuda":
            return self.lerp(other, weight)
        found = nonfinite(values)
        new, before = self.lerp(other, weight), self.tensors()
        for key, its in new.tensors().items():  # a layer that is seen for the first time was nothing before
            its.copy_(torch.where(found > 0, before.get(key, torch.zeros_like(its)), its))
        return new

    def finite(self, wait: bool = False) -> Self:
        """Itself; if it holds NaN or infinity it raises, on a CPU. A GPU is waited for only where that is asked."""
        for key, t in self.tensors().items():
            # A sum is quick, and finite only if every number is; one that overflows is looked at again.
            if (wait or t.device.type == "cpu") and not bool(t.sum().isfinite()) and not bool(t.isfinite().all()):
                raise NonFiniteError(
                    f"the estimate of the metric ({key}) holds NaN or infinity, and was not averaged: clean the batch, "
                    "or lower the learning rate"
                )
        return self

    @abstractmethod
    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the operator by name, from which its structure can restore it."""

    def averaged(self) -> dict[str, Tensor] | None:
        """Those of ``tensors()`` that an average is taken of, number by number, while the others stay as they are.

        None where an average is more than that. Several processes average their estimates in this memory.
        """
        return None

    @abstractmethod
    def inverse(self, damping: float) -> Inverse:
        """(G + λ)⁻¹ by the direct method of this structure."""

    @abstractmethod
    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        """(G + λ)⁺, or the solution of least weighted norm; weight is [p] or [p q]."""

    def factored_inverse(
        self,
        damping: float,
        warm: Mapping[str, Tensor],
        newton: Newton | None = None,
        into: Inverse | None = None,
    ) -> Inverse:
        """An approximate (G + λ)⁻¹ from the damped factors of a structure that has two.

        ``warm``: the ``tensors()`` of the last one, which is kept where a factor cannot be inverted, and refreshed by
        ``newton`` where that is given. ``into``: the last one itself, where it may be used up: the new one is made in
        its memory.
        """
        self.refuse("Factored", "it has no Kronecker factors to be damped one by one; use Cholesky or CG")

    def mend(self, inverse: Inverse, damping: float) -> None:
        """Make an inverse that has ``failed`` again where it is, from this metric. A GPU is waited for.

        Raises where it fails again.
        """
        raise FactorisationError(NOT_POSITIVE)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        """The inverse with these ``tensors()``, of this metric or of an earlier one; None if it must be made again."""
        return None

    def renewed(self) -> Operator:
        """The same metric, with what is amortised over many estimates (eigenvectors) computed anew."""
        return self

    def flat(self, v: Vector) -> Covector:
        """v♭ = G v."""
        return self.layout.covector(self.product(self.layout.flatten(v)))

    def trace(self) -> Tensor:
        return self.diagonal().sum()

    def refuse(self, action: str, reason: str) -> NoReturn:
        """Raise the error of a pair of slots that cannot work together."""
        raise IncompatibleError(f"{action} does not work with {type(self).__name__}: {reason}")

    def same_kind(self, other: Operator) -> None:
        """Check that a moving average joins two operators of one structure over the same parameters."""
        if type(other) is not type(self):
            raise IncompatibleError(
                f"a moving average joins operators of one kind, not {type(self).__name__} and {type(other).__name__}"
            )
        if list(other.layout.like) != list(self.layout.like):
            raise ValueError("a moving average joins operators over the same parameters")


# Some of the parameters of a larger set, by their places in its flattening order.


REST = "rest/"  # before the names of the tensors of what is over the other parameters


@final
@dataclass(frozen=True)
class Subset:
    """Where the parameters ``names`` lie among all, flattened."""

    names: tuple[str, ...]
    spans: tuple[slice, ...]

    @staticmethod
    def of(layout: Layout, names: Sequence[str]) -> Subset:
        spans, start = {}, 0
        for name, t in layout.like.items():
            spans[name] = slice(start, start + t.numel())
            start += t.numel()
        return Subset(tuple(names), tuple(spans[name] for name in names))

    def take(self, flat: Tensor) -> Tensor:
        """The elements of these parameters, from the elements [*batch p] of all."""
        return torch.cat([flat[..., span] for span in self.spans], dim=-1)

    def put(self, part: Tensor, flat: Tensor) -> None:
        """The inverse of ``take``."""
        sizes = [span.stop - span.start for span in self.spans]
        for span, values in zip(self.spans, part.split(sizes, dim=-1), strict=True):
            flat[..., span] = values

    def index(self, device: torch.device) -> Tensor:
        """The positions."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans])

    def named(self, element: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """These parameters of a vector or a covector."""
        return {name: element[name] for name in self.names}
