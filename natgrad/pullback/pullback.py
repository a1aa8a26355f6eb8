"""The pullback of an output metric to the parameters: G = (1/N) Σ_k Σ_nm C_nm R_kn R_kmᵀ, R_kn = J_nᵀ s_kn."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor
from torch.nn import functional as F

from natgrad.errors import MemoryBoundError
from natgrad.geometry import Vector
from natgrad.model import Model
from natgrad.output.metric import Coupling, OutputMetric
from natgrad.pullback.batch import Batch, Passes, Seen
from natgrad.pullback.blocks import Block
from natgrad.pullback.broadcast import SpreadRule, spread_again
from natgrad.pullback.coupled import root_of
from natgrad.pullback.factors import Factors, Squares
from natgrad.pullback.parts import Part, check_apart, chunk_bytes, examples, separable
from natgrad.pullback.roots import Root, flat_at
from natgrad.pullback.rows import rows
from natgrad.pullback.separate import check_alike, check_unused
from natgrad.pullback.tables import over_examples
from natgrad.pullback.tape import Tape, record
from natgrad.pullback.tied import Tied, formed

MEMORY = 2**32  # bytes; what a structure may occupy unless the user says otherwise
_CACHE = 2**21  # elements; of a few layers in cotangents, on a processor


@final
@dataclass
class Pullback:
    """A model at a batch x with a metric on its outputs: everything a structure needs to estimate G.

    ``root`` [k n *out] satisfies Σ_k s_k s_kᵀ = h (exactly, or in expectation); all structures estimated from one
    pullback see the same samples. G is the mean over the examples and never depends on how a loss is reduced.
    """

    batch: Batch
    metric: OutputMetric
    y: Tensor  # [n *out]
    roots: Root
    seen: Seen
    passes: Passes
    coupled: Coupling | None = None  # C [n m] and K in float64: C may be large, and what it multiplies nearly cancel

    @property
    def model(self) -> Model:
        return self.batch.model

    @property
    def layers(self) -> list[Block]:
        """With their rules."""
        return self.seen.layers

    @property
    def memory(self) -> int:
        """Bytes that a structure may occupy."""
        return self.passes.memory

    @property
    def parts(self) -> list[Part]:
        """Ranges of examples that are processed together."""
        return self.passes.parts

    @property
    def coupling(self) -> Tensor | None:
        """C [n m]."""
        return None if self.coupled is None else self.coupled.C

    @property
    def root(self) -> Tensor:
        """s [k n *out] of all examples."""
        return self.roots.at((0, self.n))

    @property
    def columns(self) -> int:
        """K, the number of columns of the root."""
        return self.roots.columns

    @property
    def n(self) -> int:
        """N, the number of examples."""
        return self.y.shape[0]

    @property
    def blocks(self) -> list[Block]:
        """The layers as ``factors`` packs them: rows of a coupled metric, or a tied weight, are in flattening order."""
        coupled = self.coupling is not None
        return [layer.without_rule() if coupled or layer.facets else layer for layer in self.layers]

    def unmixed(self) -> Pullback:
        """The same examples, each by itself: the rows before a coupling mixes them."""
        return replace(self, coupled=None)

    @property
    def chunk(self) -> int:
        """Elements that a temporary may have."""
        return max(1, chunk_bytes(self.memory) // self.y.element_size())

    @property
    def template(self) -> Vector:
        """A vector of the right names and shapes (its values are the parameters)."""
        return Vector({name: p.detach() for name, p in self.model.params.items()})

    def output_flat(self, u: Tensor) -> Tensor:
        """The metric of the whole batch of outputs applied to u [n *out]: (1/N) Σ_m C_nm Σ_k s_kn ⟨s_km, u_m⟩."""
        if self.coupling is None and self.metric.exact:
            return self.metric.flat(self.y, u, self.batch.target) / self.n
        s = self.root
        s = s.reshape(*s.shape[:2], -1)  # [k n d], with d = 1 for outputs [n]
        t = torch.einsum("knd,nd->kn", s, u.reshape(self.n, -1))
        if self.coupling is not None:
            t = self._coupled_with(t.double()).to(t.dtype)
        return torch.einsum("knd,kn->nd", s, t).view_as(u) / self.n

    def check_metric(self) -> None:
        """Raise if the metric is not finite at the outputs, for a structure that makes products with it only."""
        if self.roots.kept is None:  # what is kept has been checked
            flat_at(self.metric, self.y, torch.ones_like(self.y), self.batch.target)

    def factors(self, limit: int | None = None) -> Iterator[list[Factors]]:
        """Factors of all blocks, chunk by chunk over examples and roots; G is the sum over the chunks.

        ``limit``: elements that a chunk of roots may have, where that is less than ``chunk``.
        A coupling mixes the examples, so its rows come whole in n and mixed by a root L of C = L Lᵀ.
        """
        if self.coupling is not None:
            yield from self._coupled()
            return
        for part in self.ranges():
            for found in self._of_part(part, limit):
                yield from formed(found, self.chunk)

    def ranges(self) -> list[Part]:
        """The parts, cut further where an exact root of all their examples would be too large."""
        if not separable(self.batch.x, self.n):
            return self.parts
        pieces = [piece for part in self.parts for piece in self.roots.cut(part, self.chunk)]
        if len(pieces) > len(self.parts) == 1:  # several parts have been checked already
            check_apart(self.model, self.batch.x, pieces[0][1], self.n)
        return pieces

    def _of_part(self, part: Part, limit: int | None = None) -> Iterator[list[Factors | Tied]]:
        tape = self.tape(part)
        inputs = self._inputs(tape)
        for s in self.roots.at(part).split(self.roots_at_once(tape, inputs, part, limit)):
            yield self._factors(tape, inputs, part, s / math.sqrt(self.n))

    def _whole(self, part: Part) -> Iterator[list[Factors]]:
        """Factors of all examples of a part, chunk by chunk over the roots."""
        return ([f.at(slice(None)) for f in found] for found in self._of_part(part))

    def collect(self) -> list[Factors]:
        """The factors of all examples and roots at once, for the kernel."""
        parts = [self._coupled()] if self.coupling is not None else map(self._whole, self.ranges())
        by_example = [
            [Factors(fs[0].a, torch.cat([f.g for f in fs])) for fs in zip(*chunks, strict=True)] for chunks in parts
        ]
        return [
            Factors(torch.cat([f.a for f in fs]), _side_by_side([f.g for f in fs]))
            for fs in zip(*by_example, strict=True)
        ]

    def square(self) -> Tensor:
        """The diagonal of G [p] = Σ_kn R², from the factors."""
        sums = [Squares() for _ in self.blocks]
        # Nothing is gained from many roots at once, as they are summed: chunks that stay in the cache are faster.
        for factors in self.factors(_CACHE if self.y.device.type == "cpu" else self.chunk):
            for total, f in zip(sums, factors, strict=True):
                total.add(f)
        out = self.y.new_empty(self.model.size)
        for block, total in zip(self.blocks, sums, strict=True):
            block.unpack(total.total(), out)
        return out

    def tape(self, part: Part) -> Tape:
        """The tape of a range of examples, recorded now unless it is there."""
        if part in self.passes.tapes:
            return self.passes.tapes[part]
        tape = over_examples(record(self.model, self.layers, examples(self.batch.x, part, self.n)))
        bare = [layer for layer in self.layers if isinstance(layer.rule, SpreadRule)]
        seating = check_alike(tape, [layer for layer in self.layers if layer not in bare], part)
        names = [name for block in self.seen.unused.values() for name in block.names]
        check_unused(tape, {name: p for name, p in self.model.params.items() if name in names}, part)
        return spread_again(bare, tape.turned(seating.axes))

    def _inputs(self, tape: Tape) -> list[Tensor | None]:
        factored = (block if block.rule and not block.facets else None for block in self.layers)
        return [None if block is None else tape.inputs(block).to(self.y.dtype) for block in factored]

    def roots_at_once(self, tape: Tape, inputs: Sequence[Tensor | None], part: Part, limit: int | None) -> int:
        """How many roots k fit into a chunk, with the rows that layers with several positions will form."""
        cost = sum(shape.numel() for use in tape.uses for shape in use.shapes)
        for block, a in zip(self.layers, inputs, strict=True):
            if a is None or a.shape[1] > 1:
                cost += block.size * (part[1] - part[0])
        if any(a is None for a in inputs) and not separable(self.batch.x, self.n):
            cost += self.n * self.y.numel()  # every example has a cotangent of the whole batch
        return max(1, min(self.chunk, limit or self.chunk) // max(cost, 1))

    def _factors(self, tape: Tape, inputs: Sequence[Tensor | None], part: Part, s: Tensor) -> list[Factors | Tied]:
        kinds = [kind for block in self.layers if block.rule for kind in block.kinds]
        cotangents = iter(tape.cotangents(s, kinds))
        unused = [block.names[0] in self.seen.unused for block in self.layers]
        ruleless = [block for block, out in zip(self.layers, unused, strict=True) if block.rule is None and not out]
        bare = [name for block in ruleless for name in block.names]
        x, y = examples(self.batch.x, part, self.n), self.y[part[0] : part[1]]
        explicit = rows(self.model, bare, x, y, s, self.passes.verdicts) if bare else s.new_empty(0)
        out: list[Factors | Tied] = []
        start = 0
        for block, a, nothing in zip(self.layers, inputs, unused, strict=True):
            if nothing:
                out.append(Factors.of_rows(s.new_zeros(*s.shape[:2], block.size, dtype=self.y.dtype)))
            elif block.facets:
                pairs = [(tape.inputs(kind), next(cotangents)) for kind in block.kinds]
                out.append(Tied.of(block, pairs, self.y.dtype))
            elif a is None or block.rule is None:
                out.append(Factors.of_rows(explicit[..., start : start + block.size]))
                start += block.size
            else:
                out.append(Factors(a, next(cotangents).to(a.dtype)))
        return out

    def mixing(self) -> Tensor:
        """L [n m] with C = L Lᵀ. Sums of squares of what is mixed by it do not cancel, as products with C do.

        It comes in the precision in which it must be multiplied, which may be more than that of the rows.
        """
        assert self.coupled is not None
        L = self.coupled.L
        return root_of(self.coupled.C.double()).to(self.y.dtype) if L is None else L

    def _coupled_with(self, t: Tensor) -> Tensor:
        """t C, for t [k n]; by a root of C where one is known to all its digits."""
        assert self.coupled is not None
        C, L = self.coupled.C, self.coupled.L
        return t @ L @ L.T if L is not None and L.dtype == C.dtype else t @ C.double()

    def _coupled(self) -> Iterator[list[Factors]]:
        mix, each = self.mixing(), self.y.element_size()
        # All rows that are mixed and, of one layer at a time, those that are not, and both in the precision of mixing.
        largest = max((layer.size for layer in self.layers), default=0)
        needed = self.n * (
            self.model.size * each + largest * (each + 2 * mix.element_size() * (mix.dtype != self.y.dtype))
        )
        if needed > self.memory:
            raise MemoryBoundError(
                f"the coupled rows of {self.n} examples and {self.model.size} parameters need {needed:,} bytes, "
                f"over the bound memory={self.memory:,}: use a smaller batch, or Implicit"
            )
        whole = (0, self.n)
        tape = self.tape(whole)
        inputs = self._inputs(tape)
        for s in self.root.split(1):
            factors = self._factors(tape, inputs, whole, s / math.sqrt(self.n))
            yield [_mixed(f, layer, mix) for f, layer in zip(factors, self.layers, strict=True)]


def _mixed(f: Factors | Tied, layer: Block, mix: Tensor) -> Factors:
    """The rows of a layer, mixed by L, in the order of its parameters."""
    rows = f.at(slice(None)).rows()
    dtype = rows.dtype
    rows = (rows if layer.facets else rows[..., layer.index.argsort()]).to(mix.dtype)
    return Factors.of_rows(torch.einsum("nm,knp->kmp", mix, rows).to(dtype))


def _side_by_side(parts: list[Tensor]) -> Tensor:
    """g [k n r c o] of all examples; a range whose root has fewer columns than another's gets columns of zeros."""
    k = max(g.shape[0] for g in parts)
    return torch.cat([g if g.shape[0] == k else F.pad(g, (*[0, 0] * 4, 0, k - g.shape[0])) for g in parts], dim=1)
