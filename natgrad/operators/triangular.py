"""Inverses of large triangular matrices by products: few launches, where a solve on a GPU has a thousand."""

from __future__ import annotations

import torch
from torch import Tensor

_LEAF = 128  # rows that are solved for; above them there are products only
_PANELS = 4


def invert_upper(U: Tensor, leaf: int = _LEAF) -> None:
    """U⁻¹ in the memory of U [d d], upper triangular with zeros below and with rows that are contiguous.

    [[A, B], [0, C]]⁻¹ = [[A⁻¹, −A⁻¹ B C⁻¹], [0, C⁻¹]]: blocks on the diagonal are inverted, and joined two by two, all
    pairs of one size in one product. Beside U a quarter of it is held.

    >>> U = torch.tensor([[2.0, 1.0, 0.0], [0.0, 4.0, 2.0], [0.0, 0.0, 1.0]])
    >>> V = U.clone()
    >>> invert_upper(V, leaf=1)
    >>> torch.allclose(U @ V, torch.eye(3))
    True
    """
    d = U.shape[-1]
    sizes = [leaf] * (d // leaf) + ([d % leaf] if d % leaf else [])
    _invert_leaves(U, leaf, d // leaf)
    while len(sizes) > 1:
        alike = next((at for at, size in enumerate(sizes) if size != sizes[0]), len(sizes)) // 2  # pairs of one size
        _join(U, 0, sizes[0], sizes[0], alike)
        start, merged = alike * 2 * sizes[0], [2 * sizes[0]] * alike
        rest = sizes[2 * alike :]
        for at in range(0, len(rest) - 1, 2):
            _join(U, start, rest[at], rest[at + 1], 1)
            merged.append(rest[at] + rest[at + 1])
            start += merged[-1]
        sizes = merged + ([rest[-1]] if len(rest) % 2 else [])


def gram_of_upper(V: Tensor) -> Tensor:
    """V Vᵀ [d d] of an upper triangular V: (U Uᵀ)⁻¹-like products, without most of the zeros, mirrored.

    >>> gram_of_upper(torch.tensor([[1.0, 2.0], [0.0, 3.0]]))
    tensor([[5., 6.],
            [6., 9.]])
    """
    d = V.shape[-1]
    out, width = torch.empty_like(V), -(-d // _PANELS)
    for start in range(0, d, max(1, width)):
        stop = min(start + width, d)
        torch.mm(V[start:stop, start:], V[:stop, start:].T, out=out[start:stop, :stop])
        out[:start, start:stop].copy_(out[start:stop, :start].T)
    return out


def _blocks(U: Tensor, row: int, column: int, shape: tuple[int, int], step: int, count: int) -> Tensor:
    """[count *shape]: blocks of U, each ``step`` rows and columns after the one before."""
    ld = U.stride(0)
    return U.as_strided((count, *shape), (step * (ld + 1), ld, 1), U.storage_offset() + row * ld + column)


def _invert_leaves(U: Tensor, leaf: int, count: int) -> None:
    d, eye = U.shape[-1], torch.eye(leaf, dtype=U.dtype, device=U.device)
    if count:
        leaves = _blocks(U, 0, 0, (leaf, leaf), leaf, count)
        leaves.copy_(torch.linalg.solve_triangular(leaves, eye.expand(count, leaf, leaf), upper=True))
    if d > count * leaf:
        last = U[count * leaf :, count * leaf :]
        last.copy_(torch.linalg.solve_triangular(last, eye[: len(last), : len(last)], upper=True))


def _join(U: Tensor, start: int, a: int, c: int, count: int) -> None:
    """−A⁻¹ B C⁻¹ in the place of B, of so many pairs of blocks with a and c rows, one pair after the other."""
    if not count:
        return
    A = _blocks(U, start, start, (a, a), a + c, count)
    B = _blocks(U, start, start + a, (a, c), a + c, count)
    C = _blocks(U, start + a, start + a, (c, c), a + c, count)
    torch.baddbmm(B, A, torch.bmm(B, C), beta=0, alpha=-1, out=B)
