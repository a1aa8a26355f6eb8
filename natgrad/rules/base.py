"""A layer rule: how one layer type writes its per-example gradients as Σ_r g aᵀ. It knows no structure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn

from natgrad.model import map_tensors
from natgrad.rules.modules import plain as plain
from natgrad.rules.modules import trainable as trainable
from natgrad.rules.packing import matrices, matrices_shape, pack_matrices, unpack_matrices
from natgrad.rules.precision import single
from natgrad.rules.products import symmetric_product
from natgrad.rules.shapes import check_cotangents, check_inputs

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
