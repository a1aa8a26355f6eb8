"""The Kronecker-factored metric: one product S ⊗ A a layer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import cast, final

import torch
from torch import Tensor

from natgrad.errors import IncompatibleError
from natgrad.linalg import refuse_singular
from natgrad.operators.base import Inverse, Layout, Operator
from natgrad.operators.factor import Factor, by_size, diagonal, full, matrix, spectrum, two_sided
from natgrad.operators.kronecker_inverse import Damped, ProductInverse, SpectralInverse, factored, undamped
from natgrad.operators.subset import REST, Subset
from natgrad.pullback.blocks import Block


@final
@dataclass(frozen=True)
class KroneckerOperator(Operator):
    """G = S ⊗ A on every layer: v = W [c o i] goes to S W A (003 (2.8), (4.5), (5.3); ERRATA 51: row-major, S first).

    ``rest`` is the metric on the parameters that no layer rule covers, in another structure.
    """

    layout: Layout
    blocks: tuple[Block, ...]
    left: tuple[Factor, ...]  # S [c o o] of every block, or its diagonal [c o]
    right: tuple[Factor, ...]  # A [c i i] of every block, or its diagonal [c i]
    rest: Operator | None = None

    @cached_property
    def others(self) -> Subset | None:
        """The parameters of ``rest`` among all."""
        return None if self.rest is None else Subset.of(self.layout, list(self.rest.layout.like))

    def _layers(self) -> Iterator[tuple[Block, Factor, Factor]]:
        return zip(self.blocks, self.left, self.right, strict=True)

    def product(self, v: Tensor) -> Tensor:
        out = torch.empty_like(v)
        for block, s, a in self._layers():
            block.unpack(two_sided(s, block.pack(v), a), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.product(self.others.take(v)), out)
        return out

    def diagonal(self) -> Tensor:
        out = self._empty(self.layout.size)
        for block, s, a in self._layers():
            block.unpack(diagonal(s).unsqueeze(-1) * diagonal(a).unsqueeze(-2), out)
        if self.rest is not None and self.others is not None:
            self.others.put(self.rest.diagonal(), out)
        return out

    def dense(self) -> Tensor:
        out = self._empty(self.layout.size, self.layout.size).zero_()
        for block, s, a in self._layers():
            index = block.index.view(block.shape[0], -1)
            for c, (left, right) in enumerate(zip(matrix(s), matrix(a), strict=True)):
                out[index[c][:, None], index[c]] = torch.kron(left.contiguous(), right.contiguous())
        if self.rest is not None and self.others is not None:
            index = self.others.index(out.device)
            out[index[:, None], index] = self.rest.dense()
        return out

    def logdet(self, damping: float = 0.0) -> Tensor:
        total = self._empty().zero_()
        for block, values in zip(self.blocks, self.eigenvalues(), strict=True):
            damped = values.flatten() + damping
            rounding = damped.numel() * torch.finfo(damped.dtype).eps
            refuse_singular(damped.sort().values, rounding, False, damping, self.title(block))
            total = total + damped.log().sum()
        return total if self.rest is None else total + self.rest.logdet(damping)

    def eigenvalues(self) -> list[Tensor]:
        """s_o a_i [c o i] of every block."""
        left, right = (self._spectra(side)[0] for side in (self.left, self.right))
        return [s.unsqueeze(-1) * a.unsqueeze(-2) for s, a in zip(left, right, strict=True)]

    def lerp(self, other: Operator, weight: float) -> KroneckerOperator:
        """A and S are averaged, each by itself, as in Martens and Grosse (2015, section 5)."""
        self.same_kind(other)
        there = cast(KroneckerOperator, other)
        self._same_layers(there)
        left = tuple(torch.lerp(a, b, weight) for a, b in zip(self.left, there.left, strict=True))
        right = tuple(torch.lerp(a, b, weight) for a, b in zip(self.right, there.right, strict=True))
        rest = None if self.rest is None else self.rest.lerp(cast(Operator, there.rest), weight)
        return replace(self, left=left, right=right, rest=rest)

    def _same_layers(self, other: KroneckerOperator) -> None:
        here, there = ({b.names for b in operator.blocks} for operator in (self, other))
        if here != there:
            names = ", ".join(sorted({name for block in here ^ there for name in block}))
            raise IncompatibleError(
                f"the layers of {names} were seen by their rule in one batch and not in another: they are called in "
                "different ways. Leave them to the fallback, with a rule that does not cover them, or call them alike"
            )

    def tensors(self) -> dict[str, Tensor]:
        out = {}
        for block, s, a in self._layers():
            out[f"{block.names[0]}/S"], out[f"{block.names[0]}/A"] = s, a
        if self.rest is not None:
            out |= {REST + key: t for key, t in self.rest.tensors().items()}
        return out

    def inverse(self, damping: float) -> Inverse:
        """(G + λ)⁻¹ exactly: by Cholesky of the factors without damping, through their eigenvalues with it."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        if damping == 0:
            return undamped(self, rest)
        return self._spectral(rest, damping, None)

    def pseudo_inverse(self, damping: float, rtol: float | None, weight: Tensor | None) -> Inverse:
        if weight is not None:
            self.refuse("Pinv(weight=…)", "a weight has no Kronecker factors; use Dense or BlockDense")
        rest = None if self.rest is None else self.rest.pseudo_inverse(damping, rtol, None)
        if rtol is None:
            rtol = max(block.size for block in self.blocks) * torch.finfo(self.layout.dtype).eps
        return self._spectral(rest, damping, rtol)

    def factored_inverse(self, damping: float, warm: Mapping[str, Tensor]) -> Inverse:
        """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹: an approximation of (G + λ)⁻¹ that needs no eigenvalues (ERRATA D)."""
        rest = None if self.rest is None else self.rest.inverse(damping)
        last = None if f"{self.blocks[0].names[0]}/S" not in warm else self._sides(warm, "S", "A")
        return factored(self, rest, damping, last)

    def inverse_from(self, tensors: Mapping[str, Tensor]) -> Inverse | None:
        below = {key.removeprefix(REST): t for key, t in tensors.items() if key.startswith(REST)}
        rest = None if self.rest is None else self.rest.inverse_from(below)
        first = self.blocks[0].names[0]
        if f"{first}/S" in tensors:
            left, right = self._sides(tensors, "S", "A")
            return ProductInverse(self.layout, self.blocks, rest, self.others, tuple(left), tuple(right))
        if f"{first}/d" not in tensors:
            return None
        q, p = ([tensors.get(f"{block.names[0]}/{side}") for block in self.blocks] for side in "QP")
        d = [tensors[f"{block.names[0]}/d"] for block in self.blocks]
        return SpectralInverse(self.layout, self.blocks, rest, self.others, tuple(q), tuple(p), tuple(d))

    def _sides(self, tensors: Mapping[str, Tensor], left: str, right: str) -> tuple[list[Tensor], list[Tensor]]:
        names = [block.names[0] for block in self.blocks]
        return [tensors[f"{name}/{left}"] for name in names], [tensors[f"{name}/{right}"] for name in names]

    def _spectral(self, rest: Inverse | None, damping: float, rtol: float | None) -> SpectralInverse:
        (s, q), (a, p) = self._spectra(self.left), self._spectra(self.right)
        scales = [Damped(damping, rtol).of(x.unsqueeze(-1) * y.unsqueeze(-2)) for x, y in zip(s, a, strict=True)]
        return SpectralInverse(self.layout, self.blocks, rest, self.others, tuple(q), tuple(p), tuple(scales))

    def _spectra(self, side: Sequence[Factor]) -> tuple[list[Tensor], list[Tensor | None]]:
        """Eigenvalues [c d] and eigenvectors [c d d] of the factors of one side; a diagonal one has its own axes."""
        which = [at for at, factor in enumerate(side) if full(factor)]
        values: list[Tensor] = list(side)
        vectors: list[Tensor | None] = [None] * len(side)

        def decompose(stack: Tensor, _: list[int]) -> list[Tensor]:
            λ, q = spectrum(stack)
            return [torch.cat([λ.unsqueeze(-2), q], dim=-2)]

        for at, found in zip(which, by_size([side[at] for at in which], decompose), strict=True):
            values[at], vectors[at] = found[:, 0], found[:, 1:]
        return values, vectors

    def title(self, block: Block) -> str:
        """How an error speaks of a block."""
        return f"the block {block.title} of the metric"

    def _empty(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self.layout.dtype, device=self.blocks[0].device)
