"""The traces of a layer's metric with and without a coupling C = L Lᵀ of the examples.

    tr G_C = Σ_k Σ_nm C_nm ⟨R_kn, R_km⟩ = Σ_k ‖Lᵀ R_k‖²,   R_kn = Σ_r g aᵀ

From products of pairs of positions, from the rows themselves, or, where both are many numbers, estimated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.pullback.factors import Factors

_ROWS = 2**23  # numbers, of explicit rows at a time: they stay in the cache of a large GPU
_PAIRS = 2**23  # numbers, of products of pairs of positions at a time


def traces(f: Factors, C: Tensor, mix: Tensor, one: bool = False) -> tuple[Tensor, Tensor]:
    """The traces [c] of G at C = 1 and at C = L Lᵀ, in double precision. ``one``: a lacks the 1 of a bias.

    >>> f = Factors(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1))
    >>> traces(f, torch.ones(2, 2).double(), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # 1² + 6² and (1 + 6)²
    (tensor([37.], dtype=torch.float64), tensor([49.], dtype=torch.float64))
    """
    return _by_pairs(f, C, one) if paired(f.g, f.a.shape[3]) else _by_rows(f, mix, one)


def paired(g: Tensor, i: int) -> bool:
    """Whether products of pairs of positions, in double precision, cost less than rows; they need no rows."""
    _, _, r, c, o = g.shape
    return c == 1 and pairs_pay(r, o, i)


def pairs_pay(r: int, o: int, i: int) -> bool:
    return r == 1 or 4 * r**2 * (o + i + 100) < o * i


def _by_pairs(f: Factors, C: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """From ⟨R_n, R_m⟩ = Σ_rs ⟨a_nr, a_ms⟩⟨g_nr, g_ms⟩, whose sum with C cancels: in double precision."""
    n, r = f.a.shape[:2]
    a = f.a[:, :, 0].double().flatten(0, 1)  # [(n r) i]
    g = f.g[:, :, :, 0].double().permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [(n r) (k o)]
    plain, coupled = C.new_zeros(1), C.new_zeros(1)
    step = max(1, _PAIRS // (n * r * r))
    for start in range(0, n, step):
        part = slice(start * r, (start + step) * r)
        products = (a @ a[part].T).add_(float(one)).mul_(g @ g[part].T)
        gram = products.view(n, r, -1, r).sum((1, 3))  # [n m]
        plain += gram.diagonal(-start).sum()
        coupled += (gram * C[:, start : start + step]).sum()
    return plain, coupled.clamp_(min=0)  # a sum of squares; below zero it is rounding


def _by_rows(f: Factors, mix: Tensor, one: bool) -> tuple[Tensor, Tensor]:
    """From the rows of one root after the other, some outputs at a time."""
    n, _, c, i = f.a.shape
    a = f.a.permute(0, 2, 1, 3)  # [n c r i]
    g = f.g.permute(0, 1, 3, 4, 2)  # [k n c o r]
    step, sums = max(1, _ROWS // (n * c * i)), Sums.zero(mix, c)
    for column in g:
        for part in column.split(step, dim=2):
            sums.add(part @ a)
        if one:
            sums.add(column.sum(3, keepdim=True))
    return sums.plain, sums.coupled


@final
@dataclass(frozen=True)
class Sums:
    """Squares [c] of rows, and of rows that are mixed: they do not cancel, as products with C do."""

    mix: Tensor
    plain: Tensor
    coupled: Tensor

    @staticmethod
    def zero(mix: Tensor, c: int) -> Sums:
        plain, coupled = torch.zeros(2, c, dtype=torch.float64, device=mix.device)
        return Sums(mix, plain, coupled)

    def add(self, rows: Tensor | None) -> bool:
        """More of them [n c o i], if there are."""
        if rows is None:
            return False
        self.plain.add_(squares(rows, (0, 2, 3)))
        flat = rows.reshape(len(rows), -1).to(self.mix.dtype)
        self.coupled.add_(squares((self.mix.T @ flat).view(rows.shape), (0, 2, 3)))
        return True


def squares(t: Tensor, axes: tuple[int, ...]) -> Tensor:
    """Σ t² over these axes."""
    return torch.linalg.vector_norm(t, dim=axes).square()
