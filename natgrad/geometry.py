"""Vectors, covectors and the pairing between them.

A gradient is a covector, a step is a vector, and only a metric turns one into the other. Gradient descent adds a
covector to the parameters, which is a type error (Grosse (2021), section 6.1). Here it raises ``TypeError``.

Index legend, used in every einsum, docstring and shape annotation of the library:

====== ==============================================================================================
letter meaning
====== ==============================================================================================
n, m   example
r      position that shares the weight (time step, pixel, token)
c      independent group (grouped convolution; channel of a norm layer)
i, o   input / output feature of a layer (i includes the homogeneous 1 when there is a bias)
k      column of the root of the output metric (an output, a class, a Monte-Carlo sample)
p, q   flattened parameter
====== ==============================================================================================

**Flattening order**: parameters in the order of ``model.named_parameters()`` (each tied parameter once, trainable ones
only), every tensor row-major, as ``torch.nn.utils.parameters_to_vector`` does.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from dataclasses import dataclass
from functools import cached_property, reduce
from typing import Any, NoReturn, Protocol, TypeVar, final

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from natgrad.linalg import is_number
from natgrad.linearise import Linearisation, linearise
from natgrad.model import Inputs, Model, batches_of
from natgrad.show import brief

Self = TypeVar("Self", bound="NamedTensors")


class NamedTensors(Mapping[str, Tensor], ABC):
    """A point of a vector space whose coordinates are named tensors; arithmetic stays within one type."""

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        if type(self) is NamedTensors:
            raise TypeError("NamedTensors is abstract: make a Vector or a Covector")
        if not isinstance(tensors, Mapping):
            raise TypeError(f"{type(self).__name__}(tensors) takes tensors by name, not a {type(tensors).__name__}")
        for name in [name for name, tensor in tensors.items() if not isinstance(tensor, Tensor)]:
            raise TypeError(f"{type(self).__name__}[{name!r}] must be a tensor, got {type(tensors[name]).__name__}")
        self._tensors = dict(tensors)

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def keys(self) -> KeysView[str]:  # those of a Mapping go through ``__getitem__``, in Python
        return self._tensors.keys()

    def values(self) -> ValuesView[Tensor]:
        return self._tensors.values()

    def items(self) -> ItemsView[str, Tensor]:
        return self._tensors.items()

    # A Mapping compares its items, which is ambiguous for tensors: equality is identity.
    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(t.shape)}" for name, t in self.items())
        return f"{type(self).__name__}({shapes})"

    def map(self: Self, function: Callable[[Tensor], Tensor]) -> Self:
        """Apply a function to every tensor; the names and the type stay."""
        return type(self)({name: function(tensor) for name, tensor in self.items()})

    def flatten(self) -> Tensor:
        """One tensor [p], in the flattening order of the module docstring."""
        return torch.cat([tensor.reshape(-1) for tensor in self.values()])

    def unflatten(self: Self, flat: Tensor) -> Self:
        """The element of the same type and shapes whose ``flatten()`` is ``flat`` [p]."""
        return type(self)(unflatten(flat, self))

    def zip(self: Self, other: object, function: Callable[[Tensor, Tensor], Tensor]) -> Self:
        """``function`` of the tensors of both, name by name."""
        if type(other) is not type(self) or not isinstance(other, NamedTensors):
            _refuse(self, other)
        _match(self, other, f"two {type(self).__name__}s")
        return type(self)({name: function(tensor, other[name]) for name, tensor in self.items()})

    def __add__(self: Self, other: object) -> Self:
        return self.zip(other, torch.add)

    def __sub__(self: Self, other: object) -> Self:
        return self.zip(other, torch.sub)

    def __mul__(self: Self, scalar: float | Tensor) -> Self:
        if isinstance(scalar, NamedTensors):
            raise TypeError("a product of two elements is not defined: pair a covector with a vector by ω @ v")
        _check_scalar(self, scalar)
        return self.map(lambda tensor: tensor * scalar)

    __rmul__ = __mul__

    def __truediv__(self: Self, scalar: float | Tensor) -> Self:
        _check_scalar(self, scalar)
        return self.map(lambda tensor: tensor / scalar)

    def __neg__(self: Self) -> Self:
        return self.map(torch.neg)


@final
class Vector(NamedTensors):
    """A tangent vector of parameter space: a velocity, a step. Parameters can move along it.

    >>> v = Vector({"w": torch.tensor([3.0, 4.0])})
    >>> (2 * v - v)["w"]
    tensor([3., 4.])
    >>> ({"w": torch.ones(2)} + v)["w"]
    tensor([4., 5.])
    """

    def __radd__(self, point: object) -> dict[str, Tensor]:
        """θ + v: the parameters (a plain mapping) moved along v."""
        if isinstance(point, NamedTensors) or not isinstance(point, Mapping):
            _refuse(point, self)
        check_tangent(point, self)
        return {name: tensor + self[name] for name, tensor in point.items()}

    def __rsub__(self, point: object) -> dict[str, Tensor]:
        """θ − v: the parameters (a plain mapping) moved against v."""
        return (-self).__radd__(point)

    def norm(self, metric: Flat) -> Tensor:
        """‖v‖ = √⟨v♭, v⟩ in a metric, anything with a ``flat``.

        >>> from natgrad import Identity
        >>> Vector({"w": torch.tensor([3.0, 4.0])}).norm(Identity())
        tensor(5.)
        """
        if not hasattr(metric, "flat"):
            raise TypeError(f"v.norm(metric) takes a metric with a flat, such as G, not a {type(metric).__name__}")
        return (metric.flat(self) @ self).sqrt()


@final
class Covector(NamedTensors):
    """A cotangent vector of parameter space: a differential, what ``backward`` computes.

    It measures vectors, ``ω @ v``; it cannot be added to parameters or to a vector.

    >>> ω, v = Covector({"w": torch.ones(2)}), Vector({"w": torch.tensor([3.0, 4.0])})
    >>> ω @ v
    tensor(7.)
    >>> v + ω
    Traceback (most recent call last):
    ...
    TypeError: Vector + Covector: a Covector (a gradient) is not a Vector (a step). A metric turns one into the \
other: v = natgrad.sharp(G, ω)
    """

    def __matmul__(self, vector: object) -> Tensor:
        """⟨ω, v⟩ = Σ_p ω_p v_p, a number that no choice of coordinates can change."""
        if not isinstance(vector, Vector):
            raise TypeError(f"ω @ v pairs a Covector with a Vector, not with a {type(vector).__name__}")
        _match(self, vector, "ω and v")
        return torch.stack([(tensor * vector[name]).sum() for name, tensor in self.items()]).sum()

    def __radd__(self, point: object) -> NoReturn:
        _refuse(point, self)

    def __rsub__(self, point: object) -> NoReturn:
        """θ − ηω: gradient descent, a type error."""
        _refuse(point, self)

    def norm(self, metric: Sharp) -> Tensor:
        """‖ω‖ = √⟨ω, ω♯⟩, the dual norm; the metric is anything with a ``sharp``, as ``solver.init(G, damping)``."""
        if not hasattr(metric, "sharp"):
            raise TypeError(
                f"ω.norm(metric) takes a metric with a sharp, such as Cholesky().init(G), not a {type(metric).__name__}"
            )
        return (self @ metric.sharp(self)).sqrt()


class Flat(Protocol):
    """A metric as the map ♭ from vectors to covectors."""

    def flat(self, v: Vector) -> Covector: ...


class Sharp(Protocol):
    """A metric as the map ♯ from covectors to vectors."""

    def sharp(self, ω: Covector) -> Vector: ...


@final
class Identity:
    """The Euclidean metric of parameter space, in which ♭ and ♯ only change the type.

    >>> Identity().sharp(Covector({"w": torch.ones(1)}))
    Vector(w: (1,))
    """

    def flat(self, v: Vector) -> Covector:
        """The covector with the same numbers."""
        check_kind(v, Vector, "Identity().flat(v)")
        return Covector(v)

    def sharp(self, ω: Covector) -> Vector:
        """The vector with the same numbers."""
        check_kind(ω, Covector, "Identity().sharp(ω)")
        return Vector(ω)


_KINDS = {
    Vector: ("a Vector (a step)", "natgrad.sharp(G, ω) makes a Vector of a Covector"),
    Covector: ("a Covector (a gradient)", "G.flat(v) makes a Covector of a Vector"),
}


def check_kind(element: object, kind: type[Vector | Covector], call: str) -> None:
    """Refuse a covector in the place of a vector, or the reverse, and what is neither.

    ``call``: as the user has written it, with the name of the argument.
    """
    if type(element) is kind:
        return
    wanted, fix = _KINDS[kind]
    given = next((words for other, (words, _) in _KINDS.items() if type(element) is other), None)
    if given is None:
        given, fix = f"a {type(element).__name__}", f"natgrad.{kind.__name__}(tensors) makes one of tensors by name"
    raise TypeError(f"{call} takes {wanted}, not {given}: {fix}")


def _refuse(left: object, right: object) -> NoReturn:
    names = f"{_kind(left)} + {_kind(right)}"
    if Covector in (type(left), type(right)):
        raise TypeError(
            f"{names}: a Covector (a gradient) is not a Vector (a step). A metric turns one into the other: "
            "v = natgrad.sharp(G, ω)"
        )
    raise TypeError(f"{names}: vectors add to vectors, and parameters (a mapping of tensors) move along a Vector")


def check_tangent(point: Mapping[str, Tensor], v: object) -> None:
    """Refuse what the parameters of a point cannot move along: a covector, or a vector of other parameters."""
    if not isinstance(v, Vector):
        _refuse(dict(point), v)
    _match(dict(sorted(point.items())), dict(sorted(v.items())), "θ and v")


def _match(one: Mapping[str, Tensor], other: Mapping[str, Tensor], what: str) -> None:
    """Refuse different names, another order (that of ``flatten``), and shapes that would broadcast."""
    if list(one) != list(other):
        names = ", ".join(sorted(set(one) ^ set(other))) or "the order of their names"
        raise ValueError(f"{what} are over different parameters: they differ in {names}")
    for name, tensor in one.items():
        if tensor.shape != other[name].shape:
            raise ValueError(f"{what} differ in {name}: shapes {tuple(tensor.shape)} and {tuple(other[name].shape)}")
        if tensor.device != other[name].device:
            devices = f"{tensor.device} and {other[name].device}"
            raise ValueError(f"{what} lie on {devices}: move one of them, v.map(lambda t: t.to(device))")


def _check_scalar(element: NamedTensors, scalar: object) -> None:
    """Elements are multiplied by numbers: a tensor of several would be broadcast against every parameter."""
    if is_number(scalar) or (isinstance(scalar, Tensor) and scalar.numel() == 1):
        return
    given = f"a tensor of shape {tuple(scalar.shape)}" if isinstance(scalar, Tensor) else f"a {type(scalar).__name__}"
    raise TypeError(
        f"a {type(element).__name__} is multiplied and divided by numbers, not by {given}: to change single entries, "
        "v.map(function) or a new one of tensors by name"
    )


def _kind(thing: object) -> str:
    if isinstance(thing, NamedTensors):
        return type(thing).__name__
    return "parameters" if isinstance(thing, (Mapping, Tensor)) else type(thing).__name__


def unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Cut ``flat`` [p] into tensors shaped and named as in ``like``."""
    sizes = [tensor.numel() for tensor in like.values()]
    if flat.shape != (sum(sizes),):
        raise ValueError(f"expected a flat tensor of {sum(sizes)} entries, got shape {tuple(flat.shape)}")
    return {name: piece.view_as(t) for (name, t), piece in zip(like.items(), flat.split(sizes), strict=True)}


def differential(model: nn.Module | Mapping[str, Tensor], loss: Tensor) -> Covector:
    """The differential of a loss: a gradient as a covector, by parameter name.

    Nothing is written to ``.grad`` and the graph is kept, so ``loss.backward()`` still works.

    Args:
        model: A module, or the mapping of parameters of a pure function.
        loss: A tensor with one number that was computed from the model.

    Returns:
        ω_p = ∂L/∂θ_p, a ``Covector``.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> differential(model, model(torch.ones(3, 2)).sum())["bias"]
        tensor([3.])
    """
    if not isinstance(model, nn.Module | Mapping):
        raise TypeError(f"the model is a module, or the parameters by name of a function, not a {type(model).__name__}")
    if not isinstance(loss, Tensor):
        raise TypeError(
            f"the loss must be a tensor with one number, computed from the model, not a {type(loss).__name__}"
        )
    params = Model.of(model).params if isinstance(model, nn.Module) else dict(model)
    if loss.numel() != 1:
        raise ValueError(f"the loss must be one number, got shape {tuple(loss.shape)}: reduce it by .mean() or .sum()")
    if not loss.requires_grad:
        raise ValueError("the loss has no graph: compute it from the model outside torch.no_grad(), undetached")
    grads = torch.autograd.grad(loss.reshape(()), list(params.values()), retain_graph=True, allow_unused=True)
    return Covector(require_all(dict(zip(params, grads, strict=True))))


def value_and_differential(
    f: Callable[[Tensor], Tensor], x: Tensor, what: str = "the loss", of: str = "the outputs"
) -> tuple[Tensor, Tensor]:
    """f(x) [] and df(x), of the shape of x, of a function with one number, which messages call ``what``.

    >>> value_and_differential(lambda x: x.square().sum(), torch.tensor([1.0, 2.0]))
    (tensor(5.), tensor([2., 4.]))
    """
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = f(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1:
        kind = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"{what} returned {kind}: it must be one number (reduce it by a sum or a mean)")
    if not value.requires_grad:
        raise ValueError(f"{what} does not depend on {of}: it must be a differentiable function of it")
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach().reshape(()), gradient


def require_all(grads: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    """Refuse missing gradients by name: a parameter that the loss does not depend on has no natural gradient."""
    missing = [name for name, grad in grads.items() if grad is None]
    if missing:
        raise ValueError(
            f"the loss does not depend on {', '.join(missing)}: freeze what is not trained with .requires_grad_(False)"
        )
    there = {name: grad for name, grad in grads.items() if grad is not None}
    refuse_sparse(there)
    return there


def refuse_sparse(grads: Mapping[str, Tensor]) -> None:
    """No structure takes a sparse gradient."""
    if sparse := [name for name, grad in grads.items() if grad.is_sparse]:
        raise TypeError(
            f"the gradient of {', '.join(sparse)} is sparse: take a dense layer, nn.Embedding(sparse=False)"
        )


@final
@dataclass(frozen=True)
class Jacobian:
    """The Jacobian of a model's outputs, as products with vectors; made by ``jacobian``.

    J maps vectors to velocities of the outputs (``push``), and Jᵀ maps covectors of the outputs to covectors of the
    parameters (``pull``). Of a loader it is that of all its batches, one below the other.

    Method:
        J = ∂y/∂θ of the outputs y [n *out] at a batch: the model is linearised once, at a snapshot.
    """

    _batches: tuple[Linearisation, ...]

    __repr__ = brief

    @cached_property
    def y(self) -> Tensor:
        """The outputs [n *out] where the model was linearised."""
        return _below([linear.y for linear in self._batches])

    @property
    def _params(self) -> Mapping[str, Tensor]:
        return self._batches[0].params

    def push(self, v: Vector) -> Tensor:
        """J v [n *out]: the velocity of the outputs when the parameters move along v."""
        if not isinstance(v, Vector):
            raise TypeError(
                f"only a Vector can be pushed forward, not a {type(v).__name__}: natgrad.sharp(G, ω) makes a Vector of "
                "a Covector"
            )
        _match(dict(sorted(self._params.items())), dict(sorted(v.items())), "the model and v")
        return _below([linear.push(v) for linear in self._batches])

    def pull(self, u: Tensor) -> Covector:
        """Jᵀu, for a covector u [n *out] of the outputs; this is back-propagation."""
        if not isinstance(u, Tensor) or u.is_complex() != self.y.is_complex():
            given = f"of {u.dtype}" if isinstance(u, Tensor) else f"a {type(u).__name__}"
            raise TypeError(f"u must be a tensor of {self.y.dtype}, as the outputs, and is {given}")
        if u.shape != self.y.shape:
            raise ValueError(f"u has the shape {tuple(u.shape)}, and the outputs have {tuple(self.y.shape)}")
        pieces = u.split([len(linear.y) for linear in self._batches])
        pulled = [Covector(linear.pull(piece)) for linear, piece in zip(self._batches, pieces, strict=True)]
        return reduce(Covector.__add__, pulled)

    def dense(self) -> Tensor:
        """J as a matrix [n *out p], in flattening order: as many products as there are outputs, or parameters."""
        params = self._params
        size = sum(p.numel() for p in params.values())
        if self.y.numel() <= size:
            units = torch.eye(self.y.numel(), dtype=self.y.dtype, device=self.y.device)
            pulled = torch.stack([self.pull(unit.view_as(self.y)).flatten() for unit in units])
            return pulled.view(*self.y.shape, size)
        units = torch.eye(size, dtype=self.y.dtype, device=self.y.device)
        return torch.stack([self.push(Vector(unflatten(unit, params))) for unit in units], dim=-1)


def jacobian(
    model: nn.Module | Callable[..., Any],
    x: Inputs | DataLoader[Any],
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Jacobian:
    """The Jacobian of a model's outputs in its parameters, for repeated products with vectors.

    Args:
        model: A module or a pure function f(params, x).
        x: A batch, or a ``DataLoader``, whose batches are read once and kept: J is that of the joint batch, in its
            memory, with the examples in the order of that reading.
        params: The parameters of a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        A ``Jacobian`` with ``push``, ``pull`` and ``dense``.

    Example:
        >>> J = jacobian(nn.Linear(2, 1), torch.tensor([[3.0, 4.0]]))
        >>> J.push(Vector({"weight": torch.tensor([[1.0, 1.0]]), "bias": torch.ones(1)}))
        tensor([[8.]])
        >>> J.dense()
        tensor([[[3., 4., 1.]]])
    """
    wrapped = Model.of(model, params, output)
    inputs = [each for each, _ in batches_of(wrapped, x)] if isinstance(x, DataLoader) else [x]
    if not inputs:
        raise ValueError("the loader has no batch: there is nothing to linearise the model at")
    return Jacobian(tuple(linearise(wrapped, each) for each in inputs))


def _below(batches: list[Tensor]) -> Tensor:
    """[n *out] of all batches."""
    return batches[0] if len(batches) == 1 else torch.cat(batches)


def pushforward(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    v: Vector,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Tensor:
    """How the outputs move when the parameters do.

    Args:
        model: A module or a pure function f(params, x).
        x: The inputs of the batch.
        v: The velocity of the parameters, a ``Vector``.
        params: The parameters of a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        J v, the velocity [n *out] of the outputs (Luk and Grosse 2018, section 2.1).

    Example:
        >>> model = nn.Linear(2, 1)
        >>> pushforward(model, torch.ones(3, 2), Vector({"weight": torch.ones(1, 2), "bias": torch.ones(1)})).flatten()
        tensor([3., 3., 3.])
    """
    return jacobian(model, x, params=params, output=output).push(v)


def pullback_covector(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    u: Tensor,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Covector:
    """Pull a covector of the outputs back to the parameters: this is back-propagation.

    Args:
        model: A module or a pure function f(params, x).
        x: The inputs of the batch.
        u: The covector of the outputs [n *out].
        params: The parameters of a pure function.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        Jᵀu, a ``Covector``.

    Example:
        >>> model = nn.Linear(2, 1)
        >>> pullback_covector(model, torch.ones(3, 2), torch.ones(3, 1))["weight"]
        tensor([[3., 3.]])
    """
    return jacobian(model, x, params=params, output=output).pull(u)
