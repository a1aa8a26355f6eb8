"""A layer rule: how one layer type writes its per-example gradients as Σ_r g aᵀ. It knows no structure."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.modules import parameters_in
from natgrad.model import map_tensors
from natgrad.rules.features import DenseFeatures, Features
from natgrad.show import brief

Keys: TypeAlias = tuple[str, ...]  # local names of the parameters of one layer


@final
@dataclass(frozen=True)
class Call:
    """One call of a module: its arguments, detached.

    Args:
        args: The positional arguments.
        kwargs: Those by name.
        training: Whether the module was in training mode then.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    training: bool = False

    __repr__ = brief

    def map(self, function: Callable[[Tensor], Tensor]) -> Call:
        """The same call with other tensors."""
        args, kwargs = map_tensors((self.args, dict(self.kwargs)), function)
        return Call(args, kwargs, self.training)

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """The argument at this position, or with this name."""
        return self.args[at] if len(self.args) > at else self.kwargs.get(name, default)

    @property
    def x(self) -> Tensor:
        """The first argument, which for most layers is the only one."""
        return cast(Tensor, self.args[0] if self.args else next(iter(self.kwargs.values())))


class Rule(ABC):
    """The base class of layer rules: how a layer type multiplies its inputs by its parameters.

    A rule for a layer of one's own needs ``covers``, ``inputs`` and ``cotangents``, and, where its parameters are not
    weights [o *fan] and biases [o], ``shape``, ``pack`` and ``unpack``; hand it over as ``rules=[MyRule()]``.
    ``inputs`` and ``cotangents`` may return plain tensors; ``Features`` that are not dense make the metric cheaper.

    Method:
        The layer is W [c o i] acting on a [n r c i]: the gradient of example n is Σ_r g[n r c o] a[n r c i].

        ``keys`` are the local names of the parameters of one layer of the module (``layers``), without frozen ones. A
        frozen weight or bias has no coordinate in i. A weight that is shared with another module is a layer of its own,
        without the bias.
    """

    one_hot: ClassVar[bool] = False  # A is diagonal whatever the inputs, and structures keep it so
    stacked: ClassVar[bool] = False  # a group c (an expert) may be used by no row of a pass
    shares_factors: ClassVar[bool] = False  # the groups c have one S and one A for all
    pixels: ClassVar[bool] = False  # all positions count: a ReLU or a pooling leaves many of them without a cotangent
    needs_graph: ClassVar[bool] = False  # cotangents go on through the graph of the pass, which a backward pass frees
    takes_jets: ClassVar[bool] = False  # what a Jet carries are positions that share the weight (``natgrad.jet``)
    capturable: ClassVar[bool] = False  # inputs and cotangents read only the call, g and buffers, and never synchronise

    @abstractmethod
    def covers(self, module: nn.Module) -> bool:
        """Whether this rule holds for the module. A subclass may have another forward: see ``plain``."""

    @abstractmethod
    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features | Tensor:
        """a [n r c i] from a call of the module."""

    @abstractmethod
    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features | Tensor:
        """g [k n r c o] from cotangents [k *output] of the module's output."""

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        """(c, o, i) of the packed parameters; by default weights and biases lie side by side along i."""
        return matrices_shape(module, keys, self.groups_of(module, keys))

    def groups_of(self, module: nn.Module, keys: Keys) -> int:
        """How many groups c there are in weights [c·o *fan] and biases [c·o], each with outputs of its own."""
        return 1

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        """W [c o i] from the layer's own tensors, by their local names."""
        return pack_matrices(block, self.groups_of(module, tuple(block)))

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of ``pack``; leading axes before [c o i] are kept."""
        return unpack_matrices(module, keys, packed)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        """The trainable parameters that this rule covers, by local name; those of submodules have dots."""
        return trainable(module)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        """The layers of the module, each a tuple of parameter names, its ``keys``. Most modules are one layer."""
        return (tuple(self.parameters(module)),)

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        """Which axis of the output the examples are on; None for a packed sequence, or one example without a batch."""
        return 0

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        """How many leading axes of inputs and outputs are treated alike, so that any of them may be the batch axis.

        ``shape``: of the output. For a linear layer these are all axes but the last.
        """
        return 0

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        """Whether zero inputs give a = 0, except for the homogeneous 1: then a batch may be padded with zeros."""
        return False

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """By local name, the blocks of columns [c o j] of W, each a reshape of its tensor.

        None where a rule has its own ``pack``.
        """
        own = (type(self).pack, type(self).unpack) != (Rule.pack, Rule.unpack)
        return None if own else matrices(block, self.groups_of(module, tuple(block)))


def input_features(
    rule: Rule,
    module: nn.Module,
    keys: Keys,
    call: Call,
    names: Sequence[str] = (),
    promised: tuple[int, int, int] | None = None,
) -> Features:
    """a of a call. Raises if its shape is not that of ``rule.shape``: the rule may be the user's own.

    ``names``: of the parameters, for the message. ``promised``: ``rule.shape``, if it has been computed before.
    """
    a = rule.inputs(module, keys, call)
    features = DenseFeatures(a) if isinstance(a, Tensor) else a
    (c, _, i), shape = promised or rule.shape(module, keys), features.shape
    if len(shape) != 4 or shape[2:] != (c, i):
        raise _wrong_shape(rule, "inputs", names or keys, shape, f"[n r c i] with c = {c} and i = {i}")
    return features


def cotangent_features(
    rule: Rule, module: nn.Module, keys: Keys, g: Tensor, promised: tuple[int, int, int] | None = None
) -> Features:
    """g of a layer from cotangents [k *output], checked as in ``input_features``."""
    returned = rule.cotangents(module, keys, g)
    features = DenseFeatures(returned) if isinstance(returned, Tensor) else returned
    (c, o, _), shape = promised or rule.shape(module, keys), features.shape
    if len(shape) != 5 or shape[3:] != (c, o):
        raise _wrong_shape(rule, "cotangents", keys, shape, f"[k n r c o] with c = {c} and o = {o}")
    return features


def _wrong_shape(rule: Rule, method: str, names: Sequence[str], shape: tuple[int, ...], wanted: str) -> ValueError:
    name = type(rule).__name__
    return ValueError(
        f"{name}.{method} returns a tensor of shape {shape} for {' + '.join(names)}: it must be {wanted}, as "
        f"{name}.shape says"
    )


def check_packing(rule: Rule, names: Sequence[str], shape: tuple[int, int, int], size: int) -> None:
    """Raise if W [c o i] has not as many entries as the parameters."""
    if len(shape) != 3 or math.prod(shape) != size:
        raise ValueError(
            f"{type(rule).__name__}.shape gives {tuple(shape)} for {' + '.join(names)}, which has {size} numbers: it "
            "must be (c, o, i) with as many places"
        )


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters that the module itself owns, by local name."""
    # named_parameters(recurse=False) is slow, and this is asked for every layer of every estimate.
    return {name: p for name, p in parameters_in(module).items() if p is not None and p.requires_grad}


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
    missing = any(name not in parameters_in(module) and getattr(module, name, None) is not None for name in names)
    classes: tuple[Any, Any] = type(module), kind
    return not missing and parameters_in(module).keys() <= set(names) and _inherits(*classes)


@cache
def _inherits(subclass: Any, kind: Any) -> bool:
    """Whether a subclass leaves all that ``kind`` computes with as it is."""
    between = subclass.__mro__[: subclass.__mro__.index(kind)]
    return all(name in _HARMLESS or not hasattr(kind, name) for cls in between for name in vars(cls))


_HARMLESS = frozenset(
    (
        *("__init__", "__repr__", "__doc__", "__module__", "__qualname__", "__annotations__", "__constants__"),
        *("__dict__", "__weakref__", "__slots__", "__firstlineno__", "__static_attributes__", "__annotate__"),
        *("__annotate_func__", "__orig_bases__", "__parameters__", "__type_params__", "__hash__", "__eq__"),
        *("__init_subclass__", "__class_getitem__", "__abstractmethods__", "_abc_impl", "__jit_unused_properties__"),
        *("reset_parameters", "extra_repr", "__new__", "_apply"),  # the last two as in ``fully_shard``
    )
)


# The usual packing: weights and biases side by side, the bias last, W̄ = [W b], for every group c by itself.


def matrices_shape(module: nn.Module, keys: Sequence[str], c: int) -> tuple[int, int, int]:
    """(c, o, i) of weights [c·o *fan] and biases [c·o], side by side along i."""
    # get_parameter is slow, and this is asked for every use of every layer.
    shapes = [(module.get_parameter(key) if "." in key else getattr(module, key)).shape for key in keys]
    return c, shapes[0][0] // c, sum(shape[1:].numel() for shape in shapes)


def matrices(block: Mapping[str, Tensor], c: int) -> dict[str, Tensor]:
    """Every weight [c·o *fan] and bias [c·o] as a matrix [c o fan] of its own."""
    return {key: t.reshape(c, t.shape[0] // c, t.shape[1:].numel()) for key, t in block.items()}


def pack_matrices(block: Mapping[str, Tensor], c: int) -> Tensor:
    """W [c o i] from weights [c·o *fan] and biases [c·o], in the order given."""
    columns = list(matrices(block, c).values())
    return columns[0] if len(columns) == 1 else torch.cat(columns, dim=-1)


def unpack_matrices(module: nn.Module, keys: Sequence[str], packed: Tensor) -> dict[str, Tensor]:
    """The inverse of ``pack_matrices``; leading axes before [c o i] are kept."""
    shapes = [module.get_parameter(key).shape for key in keys]
    columns = packed.split([math.prod(shape[1:]) for shape in shapes], dim=-1)
    lead = packed.shape[:-3]
    return {key: column.reshape(*lead, *shape) for key, column, shape in zip(keys, columns, shapes, strict=True)}
