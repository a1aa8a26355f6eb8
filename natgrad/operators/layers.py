"""What metrics that are kept layer by layer have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import cast

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.linalg import refuse_singular
from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.basis import Basis
from natgrad.operators.kronecker_inverse import Damped, SpectralInverse
from natgrad.operators.subset import REST, Subset
from natgrad.pullback.blocks import Block

UNSEEN = "unseen"  # in place of the letters of a layer's tensors


class LayerOperator(Operator):
    """A metric with one block a layer, on W [c o i], which is diagonal in a basis Q ⊗ P of the layer.

    A layer that the forward pass did not use (an expert, a block that was dropped) is zero, and its parameters are
    ``unseen``: in an average, which is over the passes that used a layer, it does not count.
    ``rest`` is the metric on the parameters that no layer rule covers, in another structure.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    rest: Operator | None
    unseen: frozenset[str]

    @abstractmethod
    def applied(self, b: int, w: Tensor) -> Tensor:
        """G W [c o i] of the layer number b."""

    @abstractmethod
    def layer_diagonal(self, b: int) -> Tensor:
        """The diagonal of the layer's block, packed [c o i]."""

    @abstractmethod
    def layer_dense(self, b: int) -> Iterable[Tensor]:
        """The layer's block of every group, [(o i) (o i)] each."""

    @abstractmethod
    def spectrum(self) -> tuple[list[Tensor], Basis]:
        """The eigenvalues [c o i] of every block, and the basis they belong to."""

    @cached_property
    def others(self) -> Subset | None:
        """The parameters of ``rest`` among all."""
        return None if self.rest is None else Subset.of(self.layout, list(self.rest.layout.like))

    def product(self, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for b, block in enumerate(self.blocks):
            block.unpack(self.applied(b, block.pack(v)), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.product(self.others.take(v)), out)
        return out

    def diagonal(self) -> Tensor:
        out = self._empty(self.layout.size)
        for b, block in enumerate(self.blocks):
            block.unpack(self.layer_diagonal(b), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.diagonal(), out)
        return out

    def dense(self) -> Tensor:
        out = self._empty(self.layout.size, self.layout.size).zero_()
        for b, block in enumerate(self.blocks):
            index = block.index.view(block.shape[0], -1)
            for own, matrix in zip(index, self.layer_dense(b), strict=True):
                out[own[:, None], own] = matrix
        if self.rest is not None and self.others is not None:
            index = self.others.index(out.device)
            out[index[:, None], index] = self.rest.dense()
        return out

    def logdet(self, damping: float = 0.0) -> Tensor:
        total = self._empty().zero_()
        for block, values in zip(self.blocks, self.spectrum()[0], strict=True):
            self.refuse_singular(block, values, damping)
            total = total + (values + damping).log().sum()
        return total if self.rest is None else total + self.rest.logdet(damping)

    def refuse_singular(self, block: Block, values: Tensor, damping: float) -> None:
        """Raise, by the name of its layer, if one of the eigenvalues [c o i] + λ is zero up to rounding."""
        what = f"the block {block.title} of the metric"
        refuse_singular((values + damping).flatten().sort().values, self._rounding(block), False, damping, what)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None:
            self.refuse("Pinv(weight=…)", "a weight has no Kronecker factors; use Dense or BlockDense")
        rest = None if self.rest is None else self.rest.pseudo_inverse(damping, rtol, None)
        return self.spectral(
            rest, Damped(damping, rtol if rtol is not None else max(map(self._rounding, self.blocks), default=0.0))
        )

    def spectral(self, rest: Inverse | None, damped: Damped) -> SpectralInverse:
        """The inverse by the eigenvalues."""
        values, basis = self.spectrum()
        scales = tuple(map(damped.of, values))
        return SpectralInverse(self.layout, self.blocks, rest, self.others, basis.left, basis.right, scales)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        below = {key.removeprefix(REST): t for key, t in tensors.items() if key.startswith(REST)}
        rest = None if self.rest is None else self.rest.inverse_from(below)
        return None if self.rest is not None and rest is None else self.layers_from(tensors, rest)

    def layers_from(self, tensors: Mapping[str, Tensor], rest: Inverse | None) -> Inverse | None:
        """The inverse with these tensors and, over the other parameters, the inverse ``rest``."""
        if any(f"{block.names[0]}/d" not in tensors for block in self.blocks[:1]):
            return None
        q, p = (tuple(tensors.get(f"{block.names[0]}/{side}") for block in self.blocks) for side in "QP")
        d = tuple(tensors[f"{block.names[0]}/d"] for block in self.blocks)
        return SpectralInverse(self.layout, self.blocks, rest, self.others, q, p, d)

    def rest_lerp(self, other: LayerOperator, weight: float) -> Operator | None:
        """The average over the other parameters."""
        self.same_layers(other.blocks)
        return None if self.rest is None else self.rest.lerp(cast(Operator, other.rest), weight)

    def same_layers(self, blocks: Iterable[Block]) -> None:
        """An estimate must have the same layers."""
        here, there = {b.names for b in self.blocks}, {b.names for b in blocks}
        if here != there:
            names = ", ".join(sorted({name for block in here ^ there for name in block}))
            raise IncompatibleError(
                f"the layers of {names} were seen by their rule in one batch and not in another: they are called in "
                "different ways. Leave them to the fallback, with a rule that does not cover them, or call them alike"
            )

    def saw(self, b: int) -> bool:
        """Whether the layer number b has been used."""
        return self.blocks[b].names[0] not in self.unseen

    def joined(
        self, other: LayerOperator, old: Iterable[Tensor], new: Iterable[Tensor], mean: Iterable[Tensor]
    ) -> tuple[Tensor, ...]:
        """Of every layer the mean, or what it is in the one operator that has seen it."""
        if not self.unseen and not other.unseen:
            return tuple(mean)
        choices = enumerate(zip(old, new, mean, strict=True))
        return tuple((m if self.saw(b) else y) if other.saw(b) else x for b, (x, y, m) in choices)

    def named(self, parts: Mapping[str, Iterable[Tensor | None]]) -> dict[str, Tensor]:
        """As ``every``; of a layer that is unseen only that."""
        hidden = [block.names[0] for b, block in enumerate(self.blocks) if not self.saw(b)]
        out = {key: t for key, t in self.every(parts).items() if key.rpartition("/")[0] not in hidden}
        return out | {f"{name}/{UNSEEN}": self._empty(0) for name in hidden}

    def every(self, parts: Mapping[str, Iterable[Tensor | None]]) -> dict[str, Tensor]:
        """Tensors of every layer by the layer's first name and their letter, with those of ``rest``."""
        out = {} if self.rest is None else {REST + key: t for key, t in self.rest.tensors().items()}
        for letter, side in parts.items():
            pairs = zip(self.blocks, side, strict=True)
            out |= {f"{block.names[0]}/{letter}": t for block, t in pairs if t is not None}
        return out

    def _rounding(self, block: Block) -> float:
        """Eigenvalues of this part of the largest are noise. Each side has the noise of its own size."""
        return sum(block.shape[1:]) * torch.finfo(self.layout.dtype).eps

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.layout.dtype, device=self._device)

    @property
    def _device(self) -> torch.device:
        if self.blocks or self.rest is None:
            return self.blocks[0].device
        return next(iter(self.rest.tensors().values())).device  # no layer has a rule
