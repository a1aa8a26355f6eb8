"""A gradient of a step as data: every parameter of two or more axes is a matrix, whatever the layer that has it.

    W [o i *k],   G its gradient:   S = Σ_k G_k G_kᵀ/(i·k),   A = Σ_k G_kᵀ G_k/(o·k)     (Gupta, Koren and Singer 2018)

The entries k (offsets of a convolution) are groups c of W [c o i] that share their two factors. The mean eigenvalue of
S is the mean of g², and so is that of A: S ⊗ A has the scale of the square of g gᵀ. A step of a given size
(``Normalised``, ``Polar``) does not depend on it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NoReturn, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.inverses import layers_at_once, stacked
from natgrad.accelerate.moments import gram
from natgrad.geometry import Covector
from natgrad.pullbacks.layer import Block
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.features import Features

Shapes: TypeAlias = Callable[
    [Block], tuple[tuple[int, ...], tuple[int, ...]]
]  # of S and A, [c d d] or a diagonal [c d]
Rotations: TypeAlias = tuple[Tensor | None, Tensor | None]  # Q [1 o o] and P [1 i i] of a matrix; None for the axes


@final
@dataclass(frozen=True)
class GradientSample:
    """A gradient of the batch, and what a structure needs to estimate g gᵀ from it.

    ``without``: parameters that have no gradient in this step, for which ω is zero. ``blocks``: the layers as the
    structure keeps them (``Structure.gradient_blocks``).
    """

    ω: Covector
    without: frozenset[str]
    blocks: Sequence[Block]
    memory: int  # bytes that the structure may occupy

    def over(self, names: Collection[str]) -> GradientSample:
        """The same sample, of some parameters."""
        return replace(self, ω=Covector({name: self.ω[name] for name in names}), without=self.without & set(names))


# Matrices.


@final
@dataclass(frozen=True)
class MatrixRule(Rule):
    """W [k o i] of a parameter [o i *k], of which nothing but its gradient is known; the groups k share their factors.

    ``flat``: W is [1 o i·k], and every offset of every input has its own entry of A.

    >>> MatrixRule(torch.Size([2, 3, 5, 5])).shape(nn.Module(), ("w",))
    (25, 2, 3)
    >>> MatrixRule(torch.Size([2, 3, 5, 5]), flat=True).shape(nn.Module(), ("w",))
    (1, 2, 75)
    """

    shares_factors: ClassVar[bool] = True
    param_shape: torch.Size
    flat: bool = False

    @property
    def groups(self) -> int:
        return 1 if self.flat else math.prod(self.param_shape[2:])

    def covers(self, module: nn.Module) -> bool:
        return False

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return self.groups, self.param_shape[0], self.param_shape[1:].numel() // self.groups

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        (t,) = block.values()
        return t.reshape(len(t), -1, self.groups).movedim(-1, 0)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {keys[0]: packed.movedim(-3, -1).reshape(*packed.shape[:-3], *self.param_shape)}

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
        """With one group W is the parameter itself."""
        ((key, t),) = block.items()
        return {key: t.reshape(1, len(t), -1)} if self.groups == 1 else None

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        self._refuse()

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise TypeError("a matrix of gradients has no inputs and no cotangents")


def matrices(blocks: Sequence[Block], largest: int) -> list[Block]:
    """A block for every parameter: of two or more axes a matrix, of fewer one without a rule.

    A kernel [o i *k] of which only diagonals are kept, as both sides have more than ``largest`` rows, is flat.
    """
    named = ((name, place, block.device) for block in blocks for name, place in block.named_slices.items())
    out = []
    for name, place, device in sorted(named, key=lambda entry: entry[1].start):
        bare = Block((name,), (replace(place, key=name),), (1, place.shape.numel(), 1), device)
        if len(place.shape) >= 2 and place.shape.numel():
            flat = largest == 1 or min(place.shape[:2]) > largest  # a matrix [1 1] is a diagonal, too
            rule, nobody = MatrixRule(place.shape, flat=flat), nn.Module()  # no module is called
            bare = replace(bare, shape=rule.shape(nobody, (name,)), rule=rule, modules=(nobody,))
        out.append(bare)
    return out


def gradient_factors(
    sample: GradientSample, blocks: Sequence[Block], shapes: Shapes, *, inputs_only: bool = False
) -> list[tuple[Tensor, Tensor]]:
    """S and A of every matrix in ``blocks``: three or four kernels for all of one shape. ``inputs_only``: S is 1."""
    gradients = [sample.ω[block.names[0]] for block in blocks]
    out: dict[int, tuple[Tensor, Tensor]] = {}
    for batch in _batches(gradients, lambda b: (blocks[b].shape, shapes(blocks[b]))):
        only_s, only_a = (len(side) == 2 for side in shapes(blocks[batch[0]]))
        G = _joined([gradients[b] for b in batch], blocks[batch[0]].shape)
        o, k, i = G.shape[1:]
        wide, tall = G.view(len(batch), o, k * i), G.view(len(batch), o * k, i)
        S = wide.new_ones(len(batch), o) if inputs_only else _moment(wide, i * k, only_diagonal=only_s)
        A = _moment(tall.mT, o * k, only_diagonal=only_a)
        out.update(zip(batch, zip(S.split(1), A.split(1), strict=True), strict=True))
    return [out[b] for b in range(len(blocks))]


def squared_gradients(sample: GradientSample, blocks: Sequence[Block], bases: Sequence[Rotations]) -> list[Tensor]:
    """D = (QᵀG_kP)² [k o i] of every matrix in its basis."""
    gradients = [sample.ω[block.names[0]] for block in blocks]
    squares: dict[int, Tensor] = {}
    for batch in _batches(gradients, lambda b: (blocks[b].shape, *(side is None for side in bases[b]))):
        G = _joined([gradients[b] for b in batch], blocks[batch[0]].shape)
        squares.update(zip(batch, _squares(G, [bases[b] for b in batch]), strict=True))
    return [squares[b] for b in range(len(blocks))]


def _batches(gradients: Sequence[Tensor], kind: Callable[[int], Hashable]) -> list[list[int]]:
    """The numbers of matrices of one kind, as many at once as a device likes."""
    alike: dict[Hashable, list[int]] = defaultdict(list)
    for b, _ in enumerate(gradients):
        alike[kind(b)].append(b)
    batches: list[list[int]] = []
    for numbers in alike.values():
        count = layers_at_once(gradients[numbers[0]].device, gradients[numbers[0]].nbytes)
        batches += [numbers[at : at + count] for at in range(0, len(numbers), count)]
    return batches


def _joined(gradients: Sequence[Tensor], shape: tuple[int, int, int]) -> Tensor:
    """G [b o k i] of the gradients of matrices W [k o i], in single precision at least."""
    k, o, i = shape
    reshaped = [g.reshape(o, i, k).mT for g in gradients]
    G = torch.stack(reshaped) if len(reshaped) > 1 else reshaped[0].unsqueeze(0)
    return G.to(torch.promote_types(G.dtype, torch.float32)).contiguous()


def _squares(G: Tensor, bases: Sequence[Rotations]) -> list[Tensor]:
    """(QᵀG_kP)² [k o i] of the gradients G [b o k i]."""
    (b, o, k, i), left, right = G.shape, [q for q, _ in bases if q is not None], [p for _, p in bases if p is not None]
    turned = G.to((*left, *right, G)[0].dtype)
    turned = torch.bmm(stacked(left).mT, turned.view(b, o, k * i)) if left else turned
    turned = torch.bmm(turned.view(b, o * k, i), stacked(right)) if right else turned
    return list(turned.view(b, o, k, i).square().transpose(1, 2).contiguous().unbind())


def _moment(x: Tensor, count: int, *, only_diagonal: bool) -> Tensor:
    """x xᵀ/count [b d d] of x [b d n], or its diagonal [b d]."""
    if only_diagonal:
        return torch.linalg.vector_norm(x, dim=2).square_() / count  # x is read once, and no square of it is written
    return gram(x, count)
