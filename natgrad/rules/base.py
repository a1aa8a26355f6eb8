"""A layer rule: how one layer type writes its per-example gradients as Σ_r g aᵀ. It knows no structure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.moments import (
    absorb_product,
    affine_moment,
    matrices,
    matrices_shape,
    pack_matrices,
    single,
    symmetric_product,
    unpack_matrices,
)
from natgrad.accelerate.patches import affine_product
from natgrad.accelerate.vjp import vjp
from natgrad.model import map_tensors

# What a module is, and which parameters are its own.


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters that the module itself owns, by local name."""
    # named_parameters(recurse=False) is slow, and this is asked for every layer of every estimate.
    return {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}


def plain(module: nn.Module, kind: type[nn.Module], *names: str) -> bool:
    """Whether a module computes what its class ``kind`` of torch does, with no parameters but these.

    Subclasses inherit: one that adds attributes, or initialises in another way, computes the same. One that overrides
    a method of ``kind``, a module with a forward of its own, and pruning, weight normalisation and the like, which put
    other parameters in, do not.

    >>> class Ours(nn.Linear):
    ...     pass
    >>> plain(Ours(2, 2), nn.Linear, "weight", "bias")
    True
    >>> plain(nn.utils.parametrizations.weight_norm(nn.Linear(2, 2)), nn.Linear, "weight", "bias")
    False
    """
    if not isinstance(module, kind) or "forward" in vars(module):
        return False
    # A parameter that is not where the class puts it is a property, or computed from others.
    missing = any(name not in module._parameters and getattr(module, name, None) is not None for name in names)
    return not missing and module._parameters.keys() <= set(names) and _inherits(type(module), kind)


@cache
def _inherits(own: Any, kind: Any) -> bool:
    """Whether a subclass leaves all that ``kind`` computes with as it is."""
    between = own.__mro__[: own.__mro__.index(kind)]
    return all(name in _HARMLESS or not hasattr(kind, name) for cls in between for name in vars(cls))


_HARMLESS = frozenset(
    (
        *("__init__", "__repr__", "__doc__", "__module__", "__qualname__", "__annotations__", "__constants__"),
        *("__dict__", "__weakref__", "__slots__", "__firstlineno__", "__static_attributes__", "__annotate__"),
        *("__annotate_func__", "__orig_bases__", "__parameters__", "__type_params__", "__hash__", "__eq__"),
        *("__init_subclass__", "__class_getitem__", "__abstractmethods__", "_abc_impl", "__jit_unused_properties__"),
        *("reset_parameters", "extra_repr"),
    )
)


# Whether what a rule returns has the shapes that it promised: a rule may be the user's own.


def check_packing(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], size: int) -> None:
    """W [c o i] must have a place for every number."""
    if len(shape) != 3 or math.prod(shape) != size:
        raise ValueError(
            f"{_name(rule)}.shape gives {tuple(shape)} for {' + '.join(names)}, which has {size} numbers: it must be "
            "(c, o, i) with as many places"
        )


def check_inputs(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], a: Tensor) -> None:
    """a [n r c i]."""
    c, _, i = shape
    if a.ndim != 4 or a.shape[2:] != (c, i):
        raise ValueError(
            f"{_name(rule)}.inputs returns a tensor of shape {tuple(a.shape)} for {' + '.join(names)}: it must be "
            f"[n r c i] with c = {c} and i = {i}, as {_name(rule)}.shape says"
        )


def check_cotangents(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], g: Tensor) -> None:
    """g [k n r c o]."""
    c, o, _ = shape
    if g.ndim != 5 or g.shape[3:] != (c, o):
        raise ValueError(
            f"{_name(rule)}.cotangents returns a tensor of shape {tuple(g.shape)} for {' + '.join(names)}: it must be "
            f"[k n r c o] with c = {c} and o = {o}, as {_name(rule)}.shape says"
        )


def check_moment(rule: Rule, what: str, names: Sequence[str], shape: tuple[int, int], moment: Tensor) -> None:
    """S [c o o] or [c o], A [c i i] or [c i]; ``shape`` is (c, o) or (c, i)."""
    c, d = shape
    if tuple(moment.shape) not in ((c, d, d), (c, d)):
        raise ValueError(
            f"{_name(rule)}.{what} returns a tensor of shape {tuple(moment.shape)} for {' + '.join(names)}: it "
            f"must be [{c} {d} {d}], or the diagonal [{c} {d}], as {_name(rule)}.shape says"
        )


def check_length(rule: Rule, what: str, names: Sequence[str], c: int, d: int, size: int) -> None:
    """Rows of ``size`` numbers, of a layer with c groups whose factor is [c d d]."""
    if c != 1 or size != d:
        raise ValueError(
            f"{_name(rule)}.{what} returns rows of {size} numbers for {' + '.join(names)}: there must be {d} in each, "
            f"and one group, not {c}, as {_name(rule)}.shape says"
        )


def _name(rule: Rule) -> str:
    return type(rule).__name__


Keys: TypeAlias = tuple[str, ...]  # local names of the parameters of one layer


@final
@dataclass(frozen=True)
class Call:
    """One call of a module: its arguments, detached, and whether it was in training mode then."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with other tensors."""
        args, kwargs = map_tensors((self.args, dict(self.kwargs)), function)
        return Call(args, kwargs, self.training)

    @property
    def x(self) -> Tensor:
        """The first argument, which for most layers is the only one."""
        return cast(Tensor, self.args[0] if self.args else next(iter(self.kwargs.values())))


@final
@dataclass(frozen=True)
class Moment:
    """Σ_nr a aᵀ of a layer's inputs, and over how many positions the sum goes.

    ``total`` is [c i j], or [c i] where all but the diagonal is zero; ``count`` is N·R, or fewer where positions are
    masked (a tensor, for every group by itself where they differ).
    """

    total: Tensor
    count: int | Tensor

    @staticmethod
    def of(a: Tensor, count: int | Tensor | None = None) -> Moment:
        """Of explicit inputs a [n r c i]."""
        n, r, c, i = a.shape
        if c == 1 or a.stride(2) == 0:  # one input for all groups
            total = symmetric_product(a[:, :, 0].reshape(n * r, i)).expand(c, i, i).contiguous()
        else:
            flat = a.reshape(n * r, c, i)
            total = torch.einsum("nci,ncj->cij", flat, flat)
        return Moment(total, n * r if count is None else count)


class Rule(ABC):
    """One layer type, seen as W [c o i] acting on a [n r c i]: the gradient of example n is Σ_r g[n r c o] a[n r c i].

    ``keys`` names the parameters of the layer that take part: a frozen weight or bias has no coordinate in i, and a
    weight that is shared with another module is a layer of its own, apart from the biases.
    A rule for a layer of one's own needs ``covers``, ``inputs`` and ``cotangents``, and, where its parameters are not
    weights [o *fan] and biases [o], ``shape``, ``pack`` and ``unpack``; hand it over as ``rules=[MyRule()]``.
    """

    @abstractmethod
    def covers(self, module: nn.Module) -> bool:
        """Whether this rule speaks for the module, exactly (a subclass may have another forward)."""

    @abstractmethod
    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        """a [n r c i] from a call of the module."""

    @abstractmethod
    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        """g [k n r c o] from cotangents [k *output] of the module's output."""

    def groups(self, module: nn.Module, keys: Keys) -> int:
        """c, where the packing is that of weights [c·o *fan] and biases [c·o]."""
        return 1

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        """(c, o, i) of the packed parameters; unless a rule knows better, weights and biases lie side by side."""
        return matrices_shape(module, keys, self.groups(module, keys))

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        """W [c o i] from the layer's own tensors, by their local names."""
        return pack_matrices(block, self.groups(module, tuple(block)))

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """By local name, the parts [c o j] that ``pack`` lays side by side, each a reshape of its tensor; None where a
        rule packs in its own way.
        """
        usual = (type(self).pack, type(self).unpack) == (Rule.pack, Rule.unpack)
        return matrices(block, self.groups(module, tuple(block))) if usual else None

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of ``pack``; leading axes before [c o i] are kept."""
        return unpack_matrices(module, keys, packed)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """The trainable parameters that this rule speaks for, by local name; those of submodules have dots."""
        return trainable(module)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        """The layers that the module is made of. Most are one."""
        return (tuple(self.parameters(module)),)

    def axis(self, module: nn.Module, call: Call) -> int | None:
        """Which axis of the output the examples are on; None for a packed sequence, or one example without a batch."""
        return 0

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        """How many axes of an output of this shape are all treated alike, as are those of the input: any may have n."""
        return 0

    @property
    def pure(self) -> bool:
        """Whether the moments read nothing but the call, the cotangents and the module's buffers, and wait for nothing.

        Their kernels can then be recorded on a GPU, and replayed. Rules of the user are not asked to be.
        """
        return False

    @property
    def linear(self) -> bool:
        """Whether a is the one argument of a call, rearranged, and, last of i, the 1 of a parameter named "bias"."""
        return False

    @property
    def sparse(self) -> bool:
        """Whether the second moment of the inputs is diagonal whatever they are: one-hot vectors."""
        return False

    def gathered(self, calls: Sequence[Call]) -> Call | None:
        """One call whose moment is the sum of theirs, if there is one: a large product is cheaper than many."""
        return None

    def gathered_cotangents(self, g: Sequence[Tensor]) -> Tensor | None:
        """The same of the cotangents [k *output] of several calls."""
        return None

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        """Σ_nr a aᵀ, in memory of its own. A layer with inputs larger than its arguments (patches) knows better."""
        return Moment.of(single(self._checked(module, keys, call)))

    def valid(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        """[n r c], one where a position is counted, zero where it is masked."""
        return torch.ones_like(self.inputs(module, keys, call)[..., 0])

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        """The mean of a over the positions r [n c i]."""
        return single(self._checked(module, keys, call)).mean(1)

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        """Σ_knr g gᵀ [c o p] from cotangents [k *output], in memory of its own, no view: averages are made in it."""
        g = self.cotangents(module, keys, g)
        check_cotangents(self, keys, self.shape(module, keys), g)
        return Moment.of(single(g.flatten(0, 1))).total

    def gradients(self, module: nn.Module, keys: Keys, call: Call, g: Tensor) -> Tensor | None:
        """Σ_r g aᵀ [n c o i] of every example, from cotangents [*output], if there is a faster way than by a and g."""
        return None

    def normalised_entries(self, module: nn.Module, keys: Keys, call: Call) -> Tensor | None:
        """x̂ [n r c] of a layer z = γ x̂ + β, or γ x̂, whose groups c are its entries; None of another layer."""
        return None

    def projected(self, module: nn.Module, keys: Keys, call: Call, w: Tensor) -> Tensor:
        """a·w [n r p] for w [i p], of a layer that is one group."""
        return self.inputs(module, keys, call)[:, :, 0].to(w.dtype) @ w

    def _checked(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        """The inputs, with the shape that was promised."""
        a = self.inputs(module, keys, call)
        check_inputs(self, keys, self.shape(module, keys), a)
        return a


class OneHot(Rule):
    """A layer whose inputs are one-hot vectors of a vocabulary: what is made of them need not form them."""

    @property
    def sparse(self) -> bool:
        return True

    @abstractmethod
    def places(self, module: nn.Module, keys: Keys, call: Call) -> tuple[Tensor, Tensor]:
        """Where the inputs a [n r 1 i] are not zero [n r], and their values there [n r]: one, zero if masked."""


class Replayed(Rule):
    """A module that hides its layers (a fused recurrence, attention): they are seen when its forward is run again.

    ``inputs`` and ``cotangents`` are those of the replay: the cotangents of the module's outputs are taken through it.
    """

    @abstractmethod
    def replay(self, module: nn.Module, call: Call) -> Replay:
        """The forward pass again, in terms of the layers. Gradients are enabled, the arguments detached."""

    @abstractmethod
    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        """How many r·c of one example share the weight, without running anything."""

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        with torch.no_grad():
            return self.replay(module, call).layer(keys).a

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        with torch.no_grad():
            return self.replay(module, call).layer(keys).moment

    def valid(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        with torch.no_grad():
            layer = self.replay(module, call).layer(keys)
            return torch.ones_like(layer.a[..., 0]) if layer.valid is None else layer.valid

    def input_mean(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        with torch.no_grad():
            return self.replay(module, call).layer(keys).mean

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        raise TypeError(f"the cotangents of {type(module).__name__} are those of its replay")


def replaying(kinds: Iterable[type[Rule]]) -> frozenset[type[Rule]]:
    """Those of the types of rules that replay. To ask ``isinstance`` of an abstract class is slow, layer by layer."""
    return frozenset(kind for kind in set(kinds) if issubclass(kind, Replayed))


@final
@dataclass(frozen=True)
class Replayable:
    """The inputs of one parameter inside a replay. Those of a bias are ones."""

    a: Tensor  # [n r c i], zero where a position is masked
    valid: Tensor | None = None  # [n r c], one where a position is not masked

    @property
    def moment(self) -> Moment:
        """Σ_nr a aᵀ over the positions that are not masked."""
        return Moment.of(single(self.a.detach()), self._count)

    @property
    def squares(self) -> Moment:
        """The diagonal of that, [c i]."""
        return Moment(single(self.a.detach()).square().sum((0, 1)), self._count)

    @property
    def _count(self) -> int | Tensor:
        return self.a.shape[0] * self.a.shape[1] if self.valid is None else self.valid.sum((0, 1))

    @property
    def mean(self) -> Tensor:
        """[n c i], over the positions that are not masked."""
        a = single(self.a.detach())
        if self.valid is None:
            return a.mean(1)
        return a.sum(1) / self.valid.sum(1).clamp(min=1).unsqueeze(-1)  # no position at all: the sum is zero, too


@dataclass(frozen=True)
class Replay(ABC):
    """What a module computed, tensor by tensor as ``tensors_of`` lists them, and its layers by parameter name."""

    outputs: tuple[Tensor, ...]
    layers: Mapping[str, Replayable]

    @abstractmethod
    def pull(self, g: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        """Cotangents [k n r c o] of every layer from those of the outputs [k *output], by the names of the parameters.

        Parameters of one layer have the same tensor. The cotangents of an output that has none are zeros.
        """

    def layer(self, keys: Keys) -> Replayable:
        """The parameters ``keys`` of one layer: their inputs side by side along i."""
        parts = [self.layers[key] for key in keys]
        if len(parts) == 1:
            return parts[0]
        a = [part.a for part in parts]
        if all(t.stride(2) == 0 for t in a):  # the groups c have one input, as in self-attention: it is not repeated
            return replace(parts[0], a=torch.cat([t[:, :, :1] for t in a], dim=-1).expand(-1, -1, a[0].shape[2], -1))
        return replace(parts[0], a=torch.cat(a, dim=-1))


# Layers made of one weight and one bias under any names, as fused modules have them.


def weight_and_bias(keys: Keys, a: Tensor, valid: Tensor | None = None) -> dict[str, Replayable]:
    """The inputs of a layer W a + b; ``keys`` are the names of W and, where there is one, of b.

    ``a`` [n r c i] is zero where a position is masked, and so are the ones that belong to the bias.
    """
    a = a.detach()
    ones = a.new_ones(()).expand(*a.shape[:-1], 1) if valid is None else valid.unsqueeze(-1)
    return {key: Replayable(x, valid) for key, x in zip(keys, (a, ones), strict=False)}


def own(module: nn.Module, key: str) -> Tensor | None:
    """A parameter by its local name, without its graph and in single precision at least; None where there is none."""
    parent, _, name = key.rpartition(".")
    p = module.get_submodule(parent)._parameters.get(name)
    return None if p is None else single(p.detach())


def argument(call: Call, at: int, name: str, default: Any = None) -> Any:
    """The argument of a call that is at this position, or has this name."""
    return call.args[at] if len(call.args) > at else call.kwargs.get(name, default)


# A replay whose cotangents are taken by autograd.


@final
@dataclass(frozen=True)
class GraphReplay(Replay):
    """The outputs have a graph, in which ``z`` [n r c o] is what the layer of a parameter computed.

    The parameters of one layer have the same tensor. What only has to be seen in the graph may be a leaf.
    """

    z: Mapping[str, Tensor]

    def pull(self, g: tuple[Tensor, ...]) -> dict[str, Tensor]:
        own = {id(z): z for z in self.z.values()}
        pairs = [(y, s.to(y.dtype)) for y, s in zip(self.outputs, g, strict=True) if y.requires_grad]
        found = vjp(tuple(y for y, _ in pairs), list(own.values()), tuple(s for _, s in pairs))
        k = g[0].shape[0]
        by_id = {
            key: z.new_zeros(k, *z.shape) if got is None else got
            for (key, z), got in zip(own.items(), found, strict=True)
        }
        return {name: by_id[id(z)] for name, z in self.z.items()}


# Factors that are second moments of the rows of a matrix, and need not be formed to be averaged.


@final
@dataclass(frozen=True)
class Rows:
    """Vectors x [m i], or x̄ = (x, 1) where they are ``homogeneous``; d are their numbers."""

    x: Tensor
    homogeneous: bool = False

    @property
    def size(self) -> int:
        """d."""
        return self.x.shape[1] + self.homogeneous

    def product(self) -> Tensor:
        """Σ x xᵀ [d d], in memory of its own.

        >>> Rows(torch.tensor([[1.0, 2.0], [3.0, 4.0]]), homogeneous=True).product()
        tensor([[10., 14.,  4.],
                [14., 20.,  6.],
                [ 4.,  6.,  2.]])
        """
        if not self.homogeneous:
            return symmetric_product(self.x)
        if not self.x.shape[1]:
            return single(self.x).new_full((1, 1), self.x.shape[0])
        return affine_product(self.x) if self.x.device.type == "cuda" else affine_moment(self.x)

    @property
    def bounded(self) -> bool:
        """Whether no number of the product can be too large for its precision, or is none; this waits.

        By Cauchy and Schwarz none is above Σ ‖x‖².
        """
        return float(torch.linalg.vector_norm(self.x)) ** 2 < torch.finfo(self.x.dtype).max

    def absorb(self, average: Tensor, keep: float, weight: float) -> None:
        """keep·Ā + weight Σ x xᵀ in place of Ā [d d], on a processor; symmetric up to rounding.

        >>> average = torch.eye(2)
        >>> Rows(torch.tensor([[1.0], [3.0]]), homogeneous=True).absorb(average, 0.5, 0.25)
        >>> average
        tensor([[3., 1.],
                [1., 1.]])
        """
        m, i = self.x.shape
        absorb_product(self.x, average[:i, :i], keep, weight)
        if self.homogeneous:
            border = average[i]
            border[:i].mul_(keep).add_(self.x.sum(0), alpha=weight)
            border[i:].mul_(keep).add_(weight * m)
            average[:i, i] = border[:i]


class RowsRule(Rule):
    """A layer that is one group, with factors of rows."""

    @abstractmethod
    def input_rows(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        """The inputs a of all examples and positions [n·r i]."""

    @abstractmethod
    def output_rows(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        """All cotangents [k·n·r o], from those of the outputs [k *output]."""

    def input_moment(self, module: nn.Module, keys: Keys, call: Call) -> Moment:
        rows = self.input_rows(module, keys, call)
        return Moment(rows.product().unsqueeze(0), rows.x.shape[0])

    def output_moment(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return self.output_rows(module, keys, g).product().unsqueeze(0)
