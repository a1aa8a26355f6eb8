"""A structure keeps a part of the metric, an operator is that part, and an inverse is the metric of covectors.

    G = Structure.estimate(pullback)      Operator: products, averages, functions f(G)
    v = G.inverse(damping).solve(ω)       Inverse: factored once, applied to many covectors
    Refresh(Structure, every=…, decay=…)  when it is estimated and inverted, and how it is averaged over time

A new structure is one file with two classes, a ``Structure`` that estimates and an ``Operator`` that is closed under
functions of itself (``map``), and one line in ``natgrad/structures/__init__.py``. What the optimizer asks of metrics
that have layers is in ``layered.py``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, dataclass, field, fields, is_dataclass, replace
from functools import cached_property, reduce
from typing import Any, ClassVar, NoReturn, cast, final

import torch
from torch import Tensor
from typing_extensions import Self

from natgrad.accelerate.devices import can_read, is_asynchronous
from natgrad.accelerate.fused import copy_, nonfinite, pairing, scaled
from natgrad.accelerate.temporaries import at_once
from natgrad.errors import IncompatibleError, MemoryBoundError, NonFiniteError
from natgrad.geometry import Covector, Vector, check_kind, unflatten
from natgrad.linalg import (
    Damping,
    Relative,
    check_finite,
    check_power,
    inverse_powered,
    is_number,
    refuse_indefinite,
    refuse_singular,
)
from natgrad.model import Model, check_slots, check_types
from natgrad.pullbacks.example_grads import ExampleGrads, slices
from natgrad.pullbacks.gradient import GradientSample
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.pullback import Pullback, without_autocast
from natgrad.sharding import shape_of
from natgrad.show import brief


@final
@dataclass(frozen=True)
class Layout:
    """Names and shapes of the parameters, in order, and the precision of the metric on them.

    Parameters may be in half precision, a metric is not: products are computed in the precision of the metric, and
    vectors and covectors come back in the precision of every parameter. ``Layout.of(tensors)`` makes one.

    Args:
        like: Tensors on the meta device by name: shapes without values.
        dtype: The precision of the metric.
    """

    like: dict[str, Tensor]  # tensors on the meta device: shapes without values
    dtype: torch.dtype

    __repr__ = brief

    @staticmethod
    def of(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None) -> Layout:
        """``dtype``: of the metric; by default that of the parameters, and at least single."""
        like = {name: shape_of(t) for name, t in tensors.items()}
        if dtype is None:
            dtype = reduce(torch.promote_types, (t.dtype for t in like.values()), torch.float32)
        return Layout(like, dtype)

    @property
    def size(self) -> int:
        """The number of parameters p."""
        return sum(t.numel() for t in self.like.values())

    def flatten(self, element: Mapping[str, Tensor]) -> Tensor:
        """[p] in the precision of the metric, from a vector or a covector, checked against the names."""
        self.check(element)
        return torch.cat([t.reshape(-1).to(self.dtype) for t in element.values()])

    def check(self, element: Mapping[str, Tensor]) -> None:
        """Refuse other parameters, another order of them, and other shapes."""
        if list(element.keys()) != list(self.like):
            raise ValueError(f"the metric is over {list(self.like)}, and this is over {list(element)}")
        for name, t in element.items():
            if t.shape != self.like[name].shape:
                shapes = f"{tuple(self.like[name].shape)}, and this has {tuple(t.shape)}"
                raise ValueError(f"the metric is over {name} of shape {shapes}")
            if t.is_complex():
                raise TypeError(
                    f"the metric is over real numbers, and {name} is of {t.dtype}: torch.view_as_real(z) makes real "
                    "parameters of complex ones"
                )

    def vector(self, flat: Tensor) -> Vector:
        """A vector from flat numbers [p]."""
        return Vector(self._named(flat))

    def covector(self, flat: Tensor) -> Covector:
        """A covector from flat numbers [p]."""
        return Covector(self._named(flat))

    def _named(self, flat: Tensor) -> dict[str, Tensor]:
        return {name: t.to(self.like[name].dtype) for name, t in unflatten(flat, self.like).items()}


@final
@dataclass(frozen=True)
class Cost:
    """What a metric and its inverse occupy, as far as shapes tell.

    ``numbers``: of the metric and its inverse. ``factors``: shapes of what is kept of the metric by letter, [c d d], or
    [c d] for a diagonal.
    """

    numbers: int
    factors: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


_NONE_FITS = "No structure fits: raise memory=, or take smaller batches (a DataLoader in place of x)"


class Structure(ABC):
    """The base class of structures: what to keep of the metric.

    Method:
        G = RᵀCR/N for the rows R of all examples.

        With ``power`` p its operators are the metric G^p, the point at p on the geodesic from the identity to G among
        positive matrices (Bhatia 2007): p = 1 is the natural gradient, p = 0 the gradient.
    """

    power: float = 1.0
    operator: ClassVar[type[Operator]]  # of its estimates, where ``restore`` makes it of its tensors alone
    bounded: ClassVar[bool] = True  # a moving average of its operators stays as small as one of them

    def __post_init__(self) -> None:
        check_power(self.power, f"{type(self).__name__}(power=…)")

    # What a structure says of itself: ``estimate``, and the rest where its default is not right.

    @abstractmethod
    def estimate(self, pullback: Pullback, like: Operator | None = None) -> Operator:
        """The operator of this structure, at the model and the batch of the pullback, or the batches of a loader.

        ``like``: what it will be averaged with; what is amortised over many estimates (a basis) is taken from it.
        """

    def shapes(self, blocks: Sequence[Block]) -> dict[str, tuple[int, ...]] | None:
        """Of the ``tensors()`` of an operator over these layers, by name; None where they depend on the batch."""
        return None

    def elements(self, pullback: Pullback) -> int:
        """How many numbers the operator will hold, for the bound on its memory: one a parameter without ``shapes``."""
        shapes = self.shapes(pullback.blocks)
        return pullback.model.size if shapes is None else sum(map(math.prod, shapes.values()))

    def restore(self, model: Model, blocks: Sequence[Block], tensors: Mapping[str, Tensor]) -> Operator | None:
        """The operator with these ``tensors()``; None if nothing is stored and it must be estimated again.

        Raises ``StateError`` where they do not fit the model.
        """
        kind = cast(Any, self.operator)
        own = {f.name: tensors[f.name] for f in fields(kind) if f.type == "Tensor"}
        for key, shape in (self.shapes(blocks) or {}).items():
            check_shape(f"{key} of the metric", own[key], shape)
        layout = Layout.of(model.params, next(iter(own.values())).dtype)
        return kind(layout, **own, **({} if self.power == 1 else {"power": self.power}))

    def cost(self, blocks: Sequence[Block], *, exact: bool = False, iterative: bool = False) -> Cost | None:
        """Of these layers together; None where it depends on the batch. By default an inverse is as large as G.

        ``exact``: a damping is added to G, and not to its factors. ``iterative``: the metric is not inverted, but
        solved with products.
        """
        shapes = self.shapes(blocks)
        if shapes is None:
            return None
        factors = {"G": (1, *next(iter(shapes.values())))} if len(shapes) == 1 else {}
        return Cost(sum(map(math.prod, shapes.values())) * (1 if iterative else 2), factors)

    def uncovered(self) -> str | None:
        """What becomes of parameters that no layer rule covers, in words; None where rules do not matter."""
        return "their rows come from torch.func, which is slow"

    # What the optimizer asks: how it is averaged, and the second moment of gradients.

    stored: ClassVar[bool] = True  # an operator holds numbers, so that keeping it for several steps saves work
    by_layer: ClassVar[bool] = False  # kept layer by layer, from one forward pass whose random numbers are constants
    has_basis: ClassVar[bool] = False  # its operators have eigenvectors, which may be kept while they are averaged
    suggested: ClassVar[bool] = False  # an error about memory may name this structure as one that fits

    def absorb(self, pullback: Pullback, average: Operator, weight: float) -> Operator:
        """The moving average (1 − w) Ḡ + w G."""
        return average.lerp(self.estimate(pullback, average), weight)

    def gradient_blocks(self, blocks: Sequence[Block]) -> list[Block]:
        """The layers as this structure keeps them where it is estimated from gradients; refuses where it cannot be."""
        raise IncompatibleError(
            f"BatchGradient does not work with {type(self).__name__}, which has no estimate from a gradient: use "
            "Diagonal, BlockDense, Dense, Kronecker or EigenKronecker, or a metric on the outputs (Fisher, Empirical)"
        )

    def of_gradient(self, sample: GradientSample, like: Operator | None = None) -> Operator:
        """g gᵀ of one gradient in this structure. What is without a gradient is taken from ``like``, or is zero."""
        raise NotImplementedError

    def extract(self, G: Operator) -> Operator | None:
        """This structure of a metric that is kept in another one; None where that needs the pullback."""
        return None

    def identity(self, model: Model, blocks: Sequence[Block], dtype: torch.dtype) -> Operator | None:
        """The identity, with tensors as large as those of every estimate; None where these depend on the batch."""
        shapes, device = self.shapes(blocks), model.example.device
        if shapes is None:
            return None
        tensors = {key: torch.ones(shape, dtype=dtype, device=device) for key, shape in shapes.items()}
        for t in tensors.values():
            if t.ndim > 1 and t.shape[-1] == t.shape[-2]:
                t.copy_(torch.eye(t.shape[-1], dtype=dtype, device=device))
        return self.restore(model, blocks, tensors)

    # What follows.

    def __repr__(self) -> str:
        return _in_words(self)

    def require_whole(self, user: str) -> None:
        """Refuse a power on behalf of a user for whom G is the curvature of a loss, and not only a metric."""
        if self.power != 1:
            raise IncompatibleError(f"{user} does not work with {self!r}: its curvature is G, not G^p. Use power=1")

    def admit(self, pullback: Pullback) -> None:
        """Refuse, before anything is allocated, what exceeds the memory bound, and say what would fit."""
        size, memory = pullback.y.element_size(), pullback.memory
        needed = self.elements(pullback) * size
        if needed > memory:
            others = [kind() for kind in _kinds(Structure) if kind.suggested and kind is not type(self)]
            sizes = sorted((other.elements(pullback) * size, type(other).__name__) for other in others)
            fitting = ", ".join(f"{name} ({b:,} bytes)" for b, name in sizes if b <= memory)
            self.refuse_size(pullback.model.size, needed, memory, f"These fit: {fitting}" if fitting else _NONE_FITS)

    def refuse_size(self, parameters: int, needed: int, memory: int, remedy: str) -> NoReturn:
        """Raise the error of an operator of so many bytes."""
        raise MemoryBoundError(
            f"{type(self).__name__} of {parameters:,} parameters needs {needed:,} bytes, over the bound "
            f"memory={memory:,}. {remedy}"
        )

    def admit_gradient(self, blocks: Sequence[Block], layout: Layout, memory: int) -> None:
        """As ``admit``, of the second moment of the gradients of these layers."""
        needed = sum(map(math.prod, (self.shapes(blocks) or {}).values())) * layout.dtype.itemsize
        if needed > memory:
            self.refuse_size(layout.size, needed, memory, "Raise memory=, or use Kronecker or Diagonal")


def _kinds(kind: Any) -> Iterator[type[Structure]]:
    """All classes below one."""
    for below in kind.__subclasses__():
        yield below
        yield from _kinds(below)


class StateError(ValueError):
    """The tensors of a checkpoint do not fit the model."""


def check_shape(name: str, t: Tensor, shape: Sequence[int]) -> None:
    """Raise if a tensor of a checkpoint has another shape than here, or is none."""
    if not isinstance(t, Tensor):
        raise StateError(f"{name} in the state is a {type(t).__name__}, where a tensor belongs")
    if tuple(t.shape) != tuple(shape):
        raise StateError(f"{name} in the state has the shape {list(t.shape)}, here it is {list(shape)}")


class Operator(ABC):
    """The base class of metrics on the parameters, in whatever structure they are held.

    ``product`` and the rest work on flattened [p], ``flat`` on vectors. A new operator is a dataclass whose fields are
    its tensors, with three methods: ``product``, ``eigenvalues``, and ``map``, which is a function of it in the same
    structure.

    What follows from these (inverses, powers, log det, Gaussian samples) and from the fields (averages, checkpoints)
    has a default, which is overridden where there is a faster way. An operator refuses by name what it cannot do.

    With ``power`` p it is the metric G^p: products, diagonal, matrix, determinant and trace are those of G^p, and
    ``inverse(λ)`` is (G + λ)^-p. Averages, checkpoints, ``eigenvalues`` and ``map`` are those of G. G⁰ is the identity.
    """

    power: float = 1.0
    damps_per_block: ClassVar[bool] = False  # relative damping has a number for every block of it, not one for all
    layout: Layout
    unseen: frozenset[str] = frozenset()  # parameters of layers that no forward pass has used so far

    __repr__ = brief

    @property
    def device(self) -> torch.device:
        """Where its products are computed."""
        return next((t.device for t in self.tensors().values()), torch.device("cpu"))

    # Linear algebra.

    @abstractmethod
    def product(self, v: Tensor) -> Tensor:
        """G v [p]."""

    def map(self, f: Callable[[Tensor], Tensor]) -> Operator:
        """f(G), with the eigenvectors of G and the eigenvalues f(w).

        >>> from natgrad.operators import DiagonalOperator
        >>> G = DiagonalOperator(Layout.of({"w": torch.ones(2)}), torch.tensor([1.0, 4.0]))
        >>> G.map(torch.sqrt).values
        tensor([1., 2.])
        """
        self.refuse("a function of it", "it is not kept by its eigenvalues; use Dense or Kronecker")

    def eigenvalues(self) -> Tensor | None:
        """All eigenvalues of G = RᵀR [p], not of its power, in any order and in double precision; rounding is zero.

        None where it has none.
        """
        return None

    def diagonal(self) -> Tensor:
        """The diagonal of G [p]."""
        return self.dense().diagonal().clone()

    def dense(self) -> Tensor:
        """G as a matrix [p q]."""
        eye = torch.eye(self.layout.size, dtype=self.layout.dtype, device=self.device)
        return torch.stack([self.product(column) for column in eye], dim=1)

    def trace(self) -> Tensor:
        """tr G."""
        return self.diagonal().sum()

    def logdet(self, damping: Damping = 0.0) -> Tensor:
        """log det (G + λ)^p; a singular G raises."""
        if self.power == 0:
            return torch.zeros((), dtype=self.layout.dtype, device=self.device)
        return self.power * self._logdet(damping)

    def _logdet(self, damping: Damping) -> Tensor:
        """Of G + λ, whatever the power."""
        return self._damped_eigenvalues("logdet", damping).log().sum().to(self.layout.dtype)

    def flat(self, v: Vector) -> Covector:
        """v♭ = G v."""
        check_kind(v, Vector, "G.flat(v)")
        return self.layout.covector(self.product(self.layout.flatten(v)))

    @without_autocast
    def output_gram(self, pullback: Pullback) -> Tensor:
        """R_n G R_nᵀ [n k l] of every example by itself, for the rows R_n [k p] of a pullback."""
        return DualMetric(self.layout, self).covariance_of(pullback.blocks, pullback.collect())

    def with_power(self, power: float) -> Self:
        """The metric at another point of the geodesic: G^power of the same G, whatever the power of this one.

        It has the same tensors.
        """
        check_power(power, f"{type(self).__name__}.with_power(power)")
        if power == self.power:
            return self
        if "power" not in getattr(self, "__dataclass_fields__", {}):
            self.refuse(f"the power {power:g}", "only G itself is known; use Dense, Kernel, Kronecker or Diagonal")
        return replace(self, power=power)  # type: ignore[type-var]  # a dataclass, as its fields say

    def absolute(self, damping: Damping) -> float:
        """λ as one number, ε·tr G/p where it is relative. This waits for the device."""
        if not isinstance(damping, Relative):
            return damping
        if self.damps_per_block:
            self.refuse(f"one number for {damping:g}", "every part of it has its own mean eigenvalue; use Cholesky()")
        return damping.epsilon * float(self.with_power(1.0).trace()) / self.layout.size

    # Inverses.

    def inverse(self, damping: Damping) -> Inverse:
        """(G + λ)^-p by the direct method of this structure. A metric that is zero has the inverse zero, relatively."""
        return IdentityInverse(self.layout) if self.power == 0 else self._inverse(damping)

    def _shift(self, damping: Damping) -> float | Tensor:
        """λ, added to the argument of ``map``: one number, or where there are means of blocks a number for each."""
        return self.absolute(damping)

    def _inverse(self, damping: Damping) -> Inverse:
        """Where the power is not zero."""
        λ = self.absolute(damping)
        if λ > 0 or not isinstance(damping, Relative):
            self._damped_eigenvalues("Cholesky", damping)
        return DualMetric(self.layout, self.map(lambda w: inverse_powered(w.clamp(min=0) + λ, self.power)))

    def pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        """((G + λ)⁺)^p, or for p = 1 the solution of least weighted norm; weight is [p] or [p q]."""
        if self.power == 0 and weight is None:
            return IdentityInverse(self.layout)
        return self._pseudo_inverse(damping, rtol, weight)

    def _pseudo_inverse(self, damping: Damping, rtol: float | None, weight: Tensor | None) -> Inverse:
        """Where the power is not zero, or there is a weight."""
        if weight is not None:
            self.refuse("Pinv(weight=…)", "it knows no other norm; leave it out, or use Dense, BlockDense or Kernel")
        values, λ = self._spectrum("Pinv"), self._shift(damping)
        damped, rtol = values + λ, len(values) * torch.finfo(self.layout.dtype).eps if rtol is None else rtol
        refuse_indefinite(damped, rtol, damping, "the metric")
        cut = (rtol * damped.max()).to(self.layout.dtype)
        return DualMetric(self.layout, self.map(lambda w: torch.where(w + λ > cut, w + λ, torch.inf).pow(-self.power)))

    def _spectrum(self, user: str) -> Tensor:
        """The eigenvalues, on behalf of a ``user``."""
        values = self.eigenvalues()
        if values is None:
            self.refuse(user, "it has products only; solve with CG(), or use Dense or Kernel")
        check_finite(values, "the metric")
        return values

    def _damped_eigenvalues(self, user: str, damping: Damping) -> Tensor:
        """The eigenvalues of G + λ [p], of which none is zero up to rounding."""
        damped = self._spectrum(user) + self.absolute(damping)
        rounding = len(damped) * torch.finfo(self.layout.dtype).eps
        refuse_singular(damped, what="the metric", damping=damping, rtol=rounding)
        return damped

    # Averages.

    def lerp(self, other: Operator, weight: float) -> Self:
        """(1 − w) G + w G': the moving average, here of every tensor by itself."""
        self.same_kind(other)
        means = {key: torch.lerp(t, getattr(other, key), weight) for key, t in tensor_fields(self).items()}
        return replace(self, **means)  # type: ignore[type-var]  # a dataclass

    def pool(self, other: Operator, weight: float) -> Operator:
        """(1 − w) G + w G' of two parts of the data: as ``lerp``, but what is a mean over positions remains one."""
        return self.lerp(other, weight)

    def merged(self, other: Operator, weight: float) -> Operator:
        """As ``lerp``; on a GPU, where nobody has looked at ``other``, nothing changes if that is not finite."""
        values = [t for t in other.tensors().values() if t.is_floating_point() and t.numel()]
        if not values or not is_asynchronous(values[0].device):
            return self.lerp(other, weight)
        finite = 1 - nonfinite(values)
        new, old = self.lerp(other, weight), self.tensors()
        after = new.tensors()
        # A layer that is seen for the first time was nothing before.
        before = [old.get(key, torch.zeros_like(t)) for key, t in after.items()]
        copy_(list(after.values()), before, gate=finite)
        return new

    def finite(self, wait: bool = False) -> Self:
        """Itself; raises if it holds NaN or infinity. On a GPU it looks only where it may ``wait`` for the device."""
        for key, t in self.tensors().items():
            # A sum is quick, and finite only if every number is; one that overflows is looked at again.
            if (wait or can_read(t)) and not bool(t.sum().isfinite()) and not bool(t.isfinite().all()):
                raise NonFiniteError(
                    f"the estimate of the metric ({key}) holds NaN or infinity, and was not averaged: clean the batch, "
                    "or lower the learning rate"
                )
        return self

    def averaged(self) -> dict[str, Tensor] | None:
        """The tensors that ``lerp`` averages elementwise; None where an average is more than that.

        Several processes average their estimates in this memory.
        """
        return self.tensors() if type(self).lerp is Operator.lerp else None

    def same_kind(self, other: Operator) -> None:
        """Check that a moving average joins two operators of one structure over the same parameters."""
        if type(other) is not type(self):
            raise IncompatibleError(
                f"a moving average joins operators of one kind, not {type(self).__name__} and {type(other).__name__}"
            )
        if list(other.layout.like) != list(self.layout.like):
            raise ValueError("a moving average joins operators over the same parameters")
        if other.power != self.power:
            raise ValueError(f"a moving average joins operators of one power, not {self.power:g} and {other.power:g}")

    # Checkpoints.

    def tensors(self) -> dict[str, Tensor]:
        """All tensors of the operator by name, from which ``Structure.restore`` builds it again."""
        return tensor_fields(self)

    def nonnegative(self) -> dict[str, Tensor]:
        """What cannot be below zero in ``tensors()``, by their names: second moments, or the diagonals of matrices."""
        return {}

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        """The inverse with these ``tensors()``, of this metric or an earlier one; None if it must be computed again."""
        if not tensors or type(self).map is Operator.map or tensors.keys() != tensor_fields(self).keys():
            return None
        whole = self.with_power(1.0)
        return DualMetric(self.layout, replace(whole, **tensors))  # type: ignore[type-var]  # a dataclass

    # Reports.

    @property
    def layers(self) -> tuple[Block, ...]:
        """The layers that are kept by a rule, each by itself."""
        return ()

    def refuse(self, action: str, reason: str) -> NoReturn:
        """Raise the error of a pair of slots that cannot work together."""
        raise IncompatibleError(f"{action} does not work with {type(self).__name__}: {reason}")


class RootedOperator(Operator):
    """G = RᵀR with a root R [m p] that can be applied."""

    @property
    @abstractmethod
    def root_columns(self) -> int | None:
        """m; None where its examples are coupled, and there is no such root."""

    @abstractmethod
    def push_root(self, v: Tensor) -> Tensor:
        """R v [m]."""

    @abstractmethod
    def pull_root(self, t: Tensor) -> Tensor:
        """Rᵀ t [p]."""


def tensor_fields(value: Any) -> dict[str, Tensor]:
    """The fields of a dataclass that are tensors, by name."""
    pairs = ((f.name, getattr(value, f.name)) for f in fields(value))
    return {name: t for name, t in pairs if isinstance(t, Tensor)}


def rows_of(blocks: Sequence[Block], factors: Sequence[ExampleGrads], size: int) -> Iterator[Tensor]:
    """R_n [n k p] in flattening order, some examples at a time; zero for parameters that are not in these blocks."""
    k, n = factors[0].g.shape[:2]
    for some in slices(n, at_once(k * size)):
        taken = [f.at(some) for f in factors]
        rows = taken[0].g.new_zeros(*taken[0].g.shape[:2], size)
        for block, f in zip(blocks, taken, strict=True):
            block.unpack(f.rows(), rows)
        yield rows.transpose(0, 1)


class Inverse(ABC):
    """(G + λ)⁻¹ or G⁺, factored once and applied to many covectors: the metric of covectors.

    A root T of it, T Tᵀ = (G + λ)⁻¹, gives the samples of a Gaussian with this covariance.
    """

    layout: Layout

    __repr__ = brief

    @abstractmethod
    def solve(self, ω: Tensor) -> Tensor:
        """v [p] from ω [p]."""

    def sharp(self, ω: Covector) -> Vector:
        """ω♯: the vector of the covector."""
        check_kind(ω, Covector, "inverse.sharp(ω)")
        return self.layout.vector(self.solve(self.layout.flatten(ω)))

    def sharp_with_pairing(self, ω: Covector) -> tuple[Vector, Tensor]:
        """ω♯ and ⟨ω, ω♯⟩ [], the squared length of ω in the dual metric."""
        v = self.sharp(ω)
        return v, pairing([(ω[name], t) for name, t in v.items()])

    @property
    def root_size(self) -> int:
        """q: how many numbers of white noise ``root_times`` takes."""
        return self.layout.size

    def root_times(self, ξ: Tensor) -> Tensor:
        """T ξ [s p] of white noise ξ [s q]."""
        self.refuse_root()

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        """Tᵀω [s q] of covectors ω [s p], for the same root: ‖Tᵀω‖² = ωᵀ(G + λ)⁻¹ω."""
        self.refuse_root()

    @without_autocast
    def output_covariance(self, pullback: Pullback) -> Tensor:
        """R_n (G + λ)⁻¹R_nᵀ [n k l] of every example by itself, for the rows R_n [k p] of a pullback."""
        return self.covariance_of(pullback.blocks, pullback.collect())

    def covariance_of(self, blocks: Sequence[Block], factors: Sequence[ExampleGrads]) -> Tensor:
        """As ``output_covariance``, of the rows of some parameters; they are formed."""
        out = []
        for rows in rows_of(blocks, factors, self.layout.size):
            half = self.root_transpose_times(rows.flatten(0, 1)).unflatten(0, rows.shape[:2])
            out.append(half @ half.mT)
        return torch.cat(out)

    def refuse_root(self) -> NoReturn:
        """Raise the error of an inverse that has no root."""
        raise IncompatibleError(
            f"{type(self).__name__} has no root to draw Gaussian samples with: use Cholesky(), or CG() for Implicit, "
            "with damping > 0 and a metric that does not couple the examples"
        )

    def tensors(self) -> dict[str, Tensor]:
        """All its tensors by name, for ``Operator.inverse_from``; of an iterative inverse, the last solution."""
        return {}

    def nonnegative(self) -> dict[str, Tensor]:
        """What cannot be below zero in ``tensors()``, as in ``Operator.nonnegative``."""
        return {}


@final
@dataclass(frozen=True, repr=False)
class DualMetric(Inverse):
    """An inverse that is an operator of the same structure as the metric, f(G): what ``Operator.map`` returns."""

    layout: Layout
    operator: Operator

    def solve(self, ω: Tensor) -> Tensor:
        return self.operator.product(ω)

    @cached_property
    def _root(self) -> Operator:
        return self.operator.map(torch.sqrt)

    def root_times(self, ξ: Tensor) -> Tensor:
        return torch.func.vmap(self._root.product)(ξ)

    def root_transpose_times(self, ω: Tensor) -> Tensor:
        return self.root_times(ω)

    @without_autocast
    def output_covariance(self, pullback: Pullback) -> Tensor:
        return self.operator.output_gram(pullback)

    def tensors(self) -> dict[str, Tensor]:
        return self.operator.tensors()

    def nonnegative(self) -> dict[str, Tensor]:
        return self.operator.nonnegative()


@final
@dataclass(frozen=True, repr=False)
class IdentityInverse(Inverse):
    """The inverse of G⁰ = 1, whatever G is: it changes the type, and no number."""

    layout: Layout

    def solve(self, ω: Tensor) -> Tensor:
        return ω.clone()

    def sharp(self, ω: Covector) -> Vector:
        check_kind(ω, Covector, "inverse.sharp(ω)")
        self.layout.check(ω)
        names = list(self.layout.like)
        return Vector(dict(zip(names, scaled([ω[name] for name in names], 1.0), strict=True)))


FALLBACK = "fallback/"  # before the names of tensors of what is over uncovered parameters


@final
@dataclass(frozen=True)
class Subset:
    """Where some parameters lie in the flattening order of all."""

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

    def put(self, values: Tensor, flat: Tensor) -> None:
        """The inverse of ``take``."""
        sizes = [span.stop - span.start for span in self.spans]
        for span, piece in zip(self.spans, values.split(sizes, dim=-1), strict=True):
            flat[..., span] = piece

    def index(self, device: torch.device) -> Tensor:
        """The positions."""
        return torch.cat([torch.arange(span.start, span.stop, device=device) for span in self.spans])


def mean_of(terms: Sequence[tuple[float, Operator]]) -> Operator:
    """Σ_c w_c G_c / Σ_c w_c, as a structure averages: exact for matrices, factor by factor for Kronecker products."""
    done, average = terms[0]
    for weight, operator in terms[1:]:
        done += weight
        average = average.lerp(operator, weight / done)
    return average


def constant(structure: Structure, model: Model) -> IdentityOperator | None:
    """The operator of a structure that asks for no data, because its power is 0; None for every other.

    >>> import natgrad as ng
    >>> constant(ng.Diagonal(), Model.of(torch.nn.Linear(2, 1))) is None
    True
    """
    return IdentityOperator(Layout.of(model.params)) if structure.power == 0 else None


@final
@dataclass(frozen=True, repr=False)
class IdentityOperator(Operator):
    """G⁰ = 1, whatever G is: ♭ and ♯ change the type, and no number.

    >>> v = IdentityOperator(Layout.of({"w": torch.ones(2)})).product(torch.tensor([1.0, 2.0]))
    >>> v
    tensor([1., 2.])
    """

    layout: Layout
    power: float = 0.0

    def product(self, v: Tensor) -> Tensor:
        return v

    def diagonal(self) -> Tensor:
        return torch.ones(self.layout.size, dtype=self.layout.dtype)

    def with_power(self, power: float) -> Self:
        return self

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> IdentityInverse:
        return IdentityInverse(self.layout)


def _in_words(choice: Structure | Refresh) -> str:
    """Without keyword-only options at their defaults, so that checkpoints from before an option can be loaded."""
    options: tuple[Field[Any], ...] = fields(choice) if is_dataclass(choice) else ()
    names = [f.name for f in options if not f.kw_only or getattr(choice, f.name) != f.default]
    return f"{type(choice).__name__}({', '.join(f'{name}={getattr(choice, name)!r}' for name in names)})"


_EVERY_STEP = 16  # steps in which an early schedule estimates the metric every time


@final
@dataclass(frozen=True, repr=False)
class Refresh:
    """The schedule of an optimizer: estimate a structure now and then, and average it over time.

    Args:
        structure: The structure to average.
        every: Steps between estimates.
        decay: β of the moving average; 0 keeps the last estimate only, and 1 is the mean of all estimates so far.
        inverse: Steps between inverses. In between the last inverse is used, and a change of the damping has no effect.
            With 1 the metric is inverted whenever it or the damping has changed.
        early: In the beginning, when the metric changes fastest, it is also inverted in the steps 1, 2, 4, 8, … before
            the first period is over, and estimated in each of the first 16 of them.

    Method:
        The average is corrected for its start, Ḡ_t = Σ_s β^{t−s} G_s / Σ_s β^{t−s}, so that the first estimate has the
        full weight (Grosse 2021, (32)). Kronecker factors of one process are also weighted by their numbers of
        examples.

    Example:
        >>> from natgrad.structures import Dense, Diagonal
        >>> schedule = Refresh(Diagonal(), every=10, decay=0.95, inverse=20)
        >>> [step for step in range(1, 50) if schedule.inverse_due(step - 1)]
        [1, 2, 4, 8, 16, 21, 41]
        >>> Refresh(Dense(), every=10, decay=0.95)
        Refresh(structure=Dense(), every=10, decay=0.95, inverse=1)
    """

    structure: Structure
    every: int = 1
    decay: float = 0.0
    inverse: int = 1
    early: bool = field(default=True, kw_only=True)

    __repr__ = _in_words

    def __post_init__(self) -> None:
        check_slots(structure=(self.structure, Structure))
        check_types(early=(self.early, bool, "True or False"))
        for which, got in (("every", self.every), ("inverse", self.inverse)):
            if not is_number(got, whole=True):
                raise TypeError(f"Refresh({which}=…) must be a whole number of steps, got {got!r}")
            if got < 1:
                raise ValueError(f"Refresh({which}=…) must be at least 1, got {got}")
        if not is_number(self.decay) or not 0 <= self.decay <= 1:
            raise ValueError(f"Refresh(decay=…) must be in [0, 1], got {self.decay}")
        name = type(self.structure).__name__
        if self.decay > 0 and not self.structure.bounded:
            raise IncompatibleError(
                f"Refresh(decay={self.decay}) does not work with {name}: every average would be larger than the last. "
                "Use decay=0, or LowRank, Diagonal, BlockDense or Dense"
            )
        if self.every > 1 and not self.structure.stored:
            raise IncompatibleError(
                f"Refresh(every={self.every}) does not work with {name}: it is never factored, so nothing is saved "
                "by keeping it, and its graph would be held. Use every=1"
            )

    def metric_due(self, step: int) -> bool:
        """Whether the metric is estimated for the step number 0, 1, …"""
        return step % self.every == 0 or (self.early and step < min(_EVERY_STEP, self.inverse))

    def inverse_due(self, step: int) -> bool:
        """Whether a metric that has changed is inverted for the step number 0, 1, …"""
        early = self.early and step < self.inverse and (step + 1) & step == 0  # a power of 2
        return step % self.inverse == 0 or early

    def weight(self, step: int) -> float:
        """The weight of the estimate number ``step`` = 1, 2, … in the corrected average: (1 − β)/(1 − β^t), or 1/t."""
        return 1 / step if self.decay == 1 else (1 - self.decay) / (1 - self.decay**step)
