"""The per-example gradients of one layer, as a sum of outer products Σ_r g aᵀ that is formed as late as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.moments import add_gram_, mirror_
from natgrad.accelerate.temporaries import TEMPORARY, at_once
from natgrad.show import brief

_LINE = 16  # numbers


@final
@dataclass(frozen=True)
class ExampleGrads:
    """The per-example gradients of a layer, as inputs and cotangents.

    Rows that come without a rule are factors too, with i = 1, a = 1 and g = R: structures see one thing.

    Attributes:
        a: The inputs [n r c i].
        g: The cotangents [k n r c o].

    Method:
        R[k n (c o i)] = Σ_r g[k n r c o] a[n r c i], with the 1/√N of the mean already in g, so that G = Σ_kn R Rᵀ.
    """

    a: Tensor  # [n r c i]
    g: Tensor  # [k n r c o]

    __repr__ = brief

    @staticmethod
    def of_rows(rows: Tensor) -> ExampleGrads:
        """Factors of explicit rows R [k n p]."""
        return ExampleGrads(rows.new_ones(rows.shape[1], 1, 1, 1), rows[:, :, None, None, :])

    def at(self, examples: slice) -> ExampleGrads:
        """Of some of the examples."""
        return self if examples == slice(None) else ExampleGrads(self.a[examples], self.g[:, examples])

    @property
    def plain(self) -> bool:
        """One position and one group: R is one outer product per example."""
        return self.a.shape[1] == 1 and self.a.shape[2] == 1

    def rows(self) -> Tensor:
        """R [k n p], packed."""
        return torch.einsum("knrco,nrci->kncoi", self.g, self.a).flatten(2)

    def square(self) -> Tensor:
        """Σ_kn R² [c o i], the diagonal of G; with one position the roots k are summed before the parameters."""
        return Squares().add(self).total()

    def push(self, packed: Tensor) -> Tensor:
        """R v [k n] for v packed as [c o i]."""
        return torch.einsum("knrco,nrco->kn", self.g, torch.einsum("nrci,coi->nrco", self.a, packed))

    def pull(self, t: Tensor) -> Tensor:
        """Rᵀ t, packed [c o i], for t [k n]."""
        return torch.einsum("nrco,nrci->coi", torch.einsum("knrco,kn->nrco", self.g, t), self.a)

    def weighed_gram(self, d: Tensor) -> Tensor:
        """R_n diag(d) R_nᵀ [n k l] of every example by itself, for d [c o i].

        With one position it is Σ_o g_ko g_lo Σ_i d_oi a_i², and no row is formed.

        >>> f, d = ExampleGrads(torch.randn(3, 1, 1, 4), torch.randn(2, 3, 1, 1, 5)), torch.rand(1, 5, 4)
        >>> R = f.rows().transpose(0, 1)
        >>> torch.allclose(f.weighed_gram(d), R @ (d.view(-1, 1) * R.mT), atol=1e-5)
        True
        """
        if self.a.shape[1] == 1:
            weights = torch.einsum("nci,coi->nco", self.a[:, 0].square(), d).flatten(1)
            g = self.g[:, :, 0].flatten(2).transpose(0, 1)  # [n k (c o)]
            return (g * weights.unsqueeze(1)) @ g.mT
        step, weights = at_once(self.g.shape[0] * d.numel()), d.flatten()
        rows = (self.at(some).rows().transpose(0, 1) for some in slices(len(self.a), step))
        return torch.cat([(R * weights) @ R.mT for R in rows])

    def gram(self, other: ExampleGrads | None = None, limit: int = TEMPORARY) -> Tensor:
        """R R'ᵀ [(k n) (l m)] with the rows at other examples; None: at the same ones.

        For one position it is ⟨g_kn, h_lm⟩⟨a_n, b_m⟩. With several it is that product summed over pairs of positions,
        or the product of the rows, whichever is less work; temporaries stay within ``limit`` elements, where one pair
        of examples allows.

        >>> f = ExampleGrads(torch.randn(3, 1, 1, 4).double(), torch.randn(2, 3, 1, 1, 5).double())
        >>> torch.allclose(f.gram(), f.rows().flatten(0, 1) @ f.rows().flatten(0, 1).T)
        True
        """
        right = self if other is None else other
        (k, n, r, c, o), (l, m, s) = self.g.shape, right.g.shape[:3]
        i = self.a.shape[3]
        if self.plain and right.plain:
            inner = self.g[:, :, 0, 0].flatten(0, 1) @ right.g[:, :, 0, 0].flatten(0, 1).T
            return (inner.view(k, n, l, m) * (self.a[:, 0, 0] @ right.a[:, 0, 0].T)[None, :, None, :]).view(k * n, -1)
        # Work for a pair of rows: r s products of length o, the inner products of a shared by k l pairs; or one of
        # c o i. A multiplication entry by entry, with its sum, takes as long as a hundred inside a matrix product.
        if c == 1 and r * s * (o + i / (k * l) + 100) < o * i:
            return self._gram_by_positions(right, limit)
        # By slices of the parameters: outputs o, and all of c and i.
        total = self.g.new_zeros(k * n, l * m)
        step = max(1, limit // max(1, max(k * n, l * m) * c * i))
        for g, h in zip(self.g.split(step, dim=4), right.g.split(step, dim=4), strict=True):
            rows = ExampleGrads(self.a, g).rows().flatten(0, 1)
            if other is None:
                add_gram_(total, rows)
            else:
                total.addmm_(rows, ExampleGrads(right.a, h).rows().flatten(0, 1).T)
        return mirror_(total) if other is None else total

    def _gram_by_positions(self, other: ExampleGrads, limit: int) -> Tensor:
        """Σ_rs ⟨g_knr, h_lms⟩⟨a_nr, b_ms⟩, for blocks of pairs of examples (n, m)."""
        (k, n, r, _, o), (l, m, s) = self.g.shape, other.g.shape[:3]
        total = self.g.new_empty(k, n, l, m)
        step = max(1, math.isqrt(limit // (k * r * l * s)))
        for top in range(0, n, step):
            g, a = self.g[:, top : top + step, :, 0].reshape(-1, o), self.a[top : top + step, :, 0].flatten(0, 1)
            for start in range(0, top + 1 if other is self else m, step):
                h, b = other.g[:, start : start + step, :, 0].reshape(-1, o), other.a[start : start + step, :, 0]
                inner = (g @ h.T).view(k, -1, r, l, b.shape[0], s)
                inner *= (a @ b.flatten(0, 1).T).view(-1, r, 1, b.shape[0], s)
                block = inner.sum((2, 5))  # [k n l m]
                total[:, top : top + step, :, start : start + step] = block
                if other is self:
                    total[:, start : start + step, :, top : top + step] = block.permute(2, 3, 0, 1)
        return total.view(k * n, l * m)


def slices(n: int, step: int) -> list[slice]:
    """Slices of n examples, ``step`` (at least one) at a time."""
    size = max(1, step)
    return [slice(None)] if size >= n else [slice(start, start + size) for start in range(0, n, size)]


@final
class Squares:
    """Σ_kn R² [c o i] of one block, over chunks of examples and roots.

    With one position it is (Σ_k g²)ᵀ a²: while the chunks share their inputs, g² is summed over the roots, so that
    the number of roots does not show in the product.
    """

    def __init__(self) -> None:
        self._total: Tensor | None = None
        self._a: Tensor | None = None
        self._g2: Tensor | None = None  # [n c o]

    def add(self, f: ExampleGrads) -> Squares:
        if f.a.shape[1] > 1:
            shape = (f.g.shape[3], f.g.shape[4], f.a.shape[3])
            step = at_once(f.g.shape[0] * math.prod(shape))
            for a, g in zip(f.a.split(step), f.g.split(step, dim=1), strict=True):
                self.accumulate(ExampleGrads(a, g).rows().square().sum((0, 1)).view(shape))
            return self
        g2 = f.g[0, :, 0].square() if f.g.shape[0] == 1 else f.g[:, :, 0].square().sum(0)
        if f.a is self._a and self._g2 is not None:
            self._g2 += g2
        else:
            self._flush()
            self._a, self._g2 = f.a, g2
        return self

    def total(self) -> Tensor:
        self._flush()
        assert self._total is not None, "no chunk was added"
        return self._total

    def _flush(self) -> None:
        if self._a is None or self._g2 is None:
            return
        a, g2 = self._a[:, 0], self._g2
        if a.shape[1] == 1:
            self.accumulate(_product(g2[:, 0], a[:, 0]).unsqueeze(0))
        elif g2.shape[2] == 1:
            self.accumulate((g2 * a.square()).sum(0).unsqueeze(1))
        else:
            self.accumulate(torch.einsum("nco,nci->coi", g2, a.square()))
        self._a = self._g2 = None

    def accumulate(self, square: Tensor) -> None:
        """Add a term [c o i] of the sum."""
        self._total = square if self._total is None else self._total.add_(square)


def _product(g2: Tensor, a: Tensor) -> Tensor:
    """g2ᵀ a² [o i]. The homogeneous 1 makes i odd, and rows that start off the cache lines cost a third more time."""
    i = a.shape[1]
    width = -(-i // _LINE) * _LINE
    a2 = torch.square(a, out=a.new_empty(a.shape[0], width)[:, :i])
    return torch.mm(g2.T, a2, out=a.new_empty(g2.shape[1], width)[:, :i])


def cross(left: ExampleGrads, right: ExampleGrads, limit: int) -> Tensor:
    """Σ_kn R_left R_rightᵀ [p q], packed; temporaries stay within ``limit`` elements where the contraction allows.

    Contracting the roots k first makes the cost of a pair of plain layers independent of their number:
    Σ_n (Σ_k g gᵀ) ⊗ (a aᵀ), that is (K + ij) op products an example instead of K ij op.
    """
    k, n = left.g.shape[:2]
    i, j = left.a.shape[3], right.a.shape[3]
    if not (left.plain and right.plain) or k + i * j >= k * i * j:
        return left.rows().flatten(0, 1).T @ right.rows().flatten(0, 1)
    o, p = left.g.shape[4], right.g.shape[4]
    total = left.g.new_zeros(o * p, i * j)
    step = max(1, limit // (o * p + i * j))
    for start in range(0, n, step):
        examples = slice(start, start + step)
        g, h = left.g[:, examples, 0, 0], right.g[:, examples, 0, 0]
        s = torch.bmm(g.permute(1, 2, 0), h.transpose(0, 1)).flatten(1)  # [n (o p)]
        a = (left.a[examples, 0, 0, :, None] * right.a[examples, 0, 0, None, :]).flatten(1)  # [n (i j)]
        total.addmm_(s.T, a)
    return total.view(o, p, i, j).transpose(1, 2).reshape(o * i, p * j)
