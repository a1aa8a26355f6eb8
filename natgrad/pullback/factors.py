"""The per-example gradients of one layer, as a sum of outer products Σ_r g aᵀ that is formed as late as possible."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.rules.features import Features

_LINE = 16  # numbers
_ROWS = 2**24  # numbers, of explicit rows at a time
_GRAM = 2**22  # elements of a temporary


@final
@dataclass(frozen=True)
class Factors:
    """R[k n (c o i)] = Σ_r g[k n r c o] a[n r c i], with the 1/√N of the mean already in g, so that G = Σ_kn R Rᵀ.

    Rows that come without a rule are factors too, with i = 1, a = 1 and g = R: structures see one thing.
    """

    a: Tensor  # [n r c i]
    g: Tensor  # [k n r c o]

    @staticmethod
    def of_rows(rows: Tensor) -> Factors:
        """Factors of explicit rows R [k n p]."""
        return Factors(rows.new_ones(rows.shape[1], 1, 1, 1), rows[:, :, None, None, :])

    def at(self, examples: slice) -> Factors:
        """Of some of the examples."""
        return self if examples == slice(None) else Factors(self.a[examples], self.g[:, examples])

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

    def gram(self, limit: int = _GRAM) -> Tensor:
        """R Rᵀ [(k n) (l m)]: for one position, the Gram matrix of a times that of g, entry by entry.

        With several it is that product summed over pairs of positions, or the product of the rows, whichever is less
        work; temporaries stay within ``limit`` elements, where one pair of examples allows.
        """
        k, n, r, c, o = self.g.shape
        i = self.a.shape[3]
        if self.plain:
            a, g = self.a[:, 0, 0], self.g[:, :, 0, 0].flatten(0, 1)
            return ((g @ g.T).view(k, n, k, n) * (a @ a.T)[None, :, None, :]).view(k * n, k * n)
        # Work for a pair of rows: r² products of length o, the inner products of a shared by k² pairs; or one of c o i.
        # A multiplication entry by entry, with its sum, takes as long as a hundred inside a matrix product.
        if c == 1 and r**2 * (o + i / k**2 + 100) < o * i:
            return self._gram_by_positions(limit)
        return self._gram_by_rows(limit)

    def _gram_by_rows(self, limit: int) -> Tensor:
        """R Rᵀ summed over slices of the parameters: outputs o, and all of c and i."""
        k, n, _, c, o = self.g.shape
        total = self.g.new_zeros(k * n, k * n)
        step = max(1, limit // (k * n * c * self.a.shape[3]))
        for g in self.g.split(step, dim=4) if step < o else [self.g]:
            rows = Factors(self.a, g).rows().flatten(0, 1)
            total.addmm_(rows, rows.T)
        return total

    def _gram_by_positions(self, limit: int) -> Tensor:
        """Σ_rs ⟨g_knr, g_lms⟩⟨a_nr, a_ms⟩, for blocks of pairs of examples (n, m)."""
        k, n, r, _, o = self.g.shape
        total = self.g.new_empty(k, n, k, n)
        step = max(1, min(n, math.isqrt(limit // (k * r) ** 2)))
        for left in range(0, n, step):
            g, a = self.g[:, left : left + step, :, 0].reshape(-1, o), self.a[left : left + step, :, 0]
            for right in range(0, left + 1, step):
                h, b = self.g[:, right : right + step, :, 0].reshape(-1, o), self.a[right : right + step, :, 0]
                inner = (g @ h.T).view(k, -1, r, k, b.shape[0], r)
                inner *= torch.mm(a.flatten(0, 1), b.flatten(0, 1).T).view(-1, r, 1, b.shape[0], r)
                block = inner.sum((2, 5))  # [k n l m]
                total[:, left : left + step, :, right : right + step] = block
                total[:, right : right + step, :, left : left + step] = block.permute(2, 3, 0, 1)
        return total.view(k * n, k * n)


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

    def add(self, f: Factors) -> Squares:
        if f.a.shape[1] > 1:
            shape = (f.g.shape[3], f.g.shape[4], f.a.shape[3])
            step = max(1, _ROWS // (f.g.shape[0] * math.prod(shape)))
            for a, g in zip(f.a.split(step), f.g.split(step, dim=1), strict=True):
                self.accumulate(Factors(a, g).rows().square().sum((0, 1)).view(shape))
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


def cross(left: Factors, right: Factors, limit: int) -> Tensor:
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


# The traces of a layer's metric with and without a coupling C = L Lᵀ of the examples.
#
#     tr G_C = Σ_k Σ_nm C_nm ⟨R_kn, R_km⟩ = Σ_k ‖Lᵀ R_k‖²,   R_kn = Σ_r g aᵀ
#
# They come from products of pairs of positions or from the rows. Where both are too many, ``coupling`` estimates them.


_TRACE_ROWS = 2**23  # numbers, of explicit rows at a time: they stay in the cache of a large GPU
_PAIRS = 2**23  # numbers, of products of pairs of positions at a time


def traces(a: Features, g: Tensor, C: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """The traces [c] of G at C = 1 and at C = L Lᵀ, in double precision, from inputs and g [k n r c o].

    >>> from natgrad.rules.features import DenseFeatures
    >>> a, g = DenseFeatures(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1)
    >>> traces(a, g, torch.ones(2, 2).double(), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # 1² + 6² and (1 + 6)²
    (tensor([37.], dtype=torch.float64), tensor([49.], dtype=torch.float64))
    """
    _, _, r, c, o = g.shape
    if c == 1 and pairs_pay(r, o, a.shape[-1]):
        return _by_pairs(a.dense(), g, C)
    sums = Sums.zero(L, c)
    for rows in a.gradients(g, _TRACE_ROWS):
        sums.add(rows)
    return sums.plain, sums.coupled


def pairs_pay(r: int, o: int, i: int) -> bool:
    """Whether products of pairs of positions, in double precision, cost less than rows."""
    return r == 1 or 4 * r**2 * (o + i + 100) < o * i


def _by_pairs(a: Tensor, g: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """From ⟨R_n, R_m⟩ = Σ_rs ⟨a_nr, a_ms⟩⟨g_nr, g_ms⟩, whose sum with C cancels: in double precision."""
    n, r = a.shape[:2]
    a = a[:, :, 0].double().flatten(0, 1)  # [(n r) i]
    g = g[:, :, :, 0].double().permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [(n r) (k o)]
    plain, coupled = C.new_zeros(1), C.new_zeros(1)
    step = max(1, _PAIRS // (n * r * r))
    for start in range(0, n, step):
        rows = slice(start * r, (start + step) * r)
        products = (a @ a[rows].T).mul_(g @ g[rows].T)
        gram = products.view(n, r, -1, r).sum((1, 3))  # [n m]
        plain += gram.diagonal(-start).sum()
        coupled += (gram * C[:, start : start + step]).sum()
    return plain, coupled.clamp_(min=0)  # a sum of squares; below zero it is rounding


@final
@dataclass(frozen=True)
class Sums:
    """Sums of squares [c] of rows, and of rows mixed by L. Unlike products with C these do not cancel."""

    mix: Tensor
    plain: Tensor
    coupled: Tensor

    @staticmethod
    def zero(mix: Tensor, c: int) -> Sums:
        plain, coupled = torch.zeros(2, c, dtype=torch.float64, device=mix.device)
        return Sums(mix, plain, coupled)

    def add(self, rows: Tensor) -> None:
        """Add rows [n c o i]."""
        self.plain.add_(_squares(rows, (0, 2, 3)))
        flat = rows.reshape(len(rows), -1).to(self.mix.dtype)
        self.coupled.add_(_squares((self.mix.T @ flat).view(rows.shape), (0, 2, 3)))


def _squares(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Σ t² over these axes."""
    return torch.linalg.vector_norm(t, dim=axes).square()
