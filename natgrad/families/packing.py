"""Symmetric matrices inside a point: packed as vec, row by row, and read symmetrised, in one place (ERRATA 32)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from natgrad.families.domain import check_finite
from natgrad.families.regions import refuse_indefinite


def side(p: int, vectors: int) -> int:
    """d of p = d·vectors + d² entries, or 0 if there is none.

    >>> side(6, 1), side(9, 0), side(7, 1)
    (2, 3, 0)
    """
    d = (math.isqrt(vectors * vectors + 4 * p) - vectors) // 2
    return d if d * (d + vectors) == p else 0


def symmetric(A: Tensor) -> Tensor:
    """½(A + Aᵀ)."""
    return 0.5 * (A + A.mT)


def square(vec: Tensor) -> Tensor:
    """vec [*batch d²] → its symmetric part [*batch d d]."""
    d = math.isqrt(vec.shape[-1])
    return symmetric(vec.unflatten(-1, (d, d)))


def joined(vector: Tensor, matrix: Tensor) -> Tensor:
    """(v, vec A) [*batch d + d²]."""
    return torch.cat([vector, matrix.flatten(-2)], -1)


def moment_matrix(μ: Tensor, m: Tensor) -> Tensor:
    """E (1, x)(1, x)ᵀ [*batch 1+d 1+d] of E x and −½ E xxᵀ: positive definite where the covariance is."""
    one = torch.ones_like(μ[..., :1])
    top = torch.cat([one, μ], -1).unsqueeze(-2)
    return torch.cat([top, torch.cat([μ.unsqueeze(-1), -2 * m], -1)], -2)


def looked_at(x: Tensor) -> bool:
    """Whether values may be read: a GPU is not waited for, and a transform of functions has none."""
    return x.device.type != "cuda" and not torch._C._are_functorch_transforms_active()


def factored(A: Tensor, what: str, word: str) -> Tensor:
    """L with LLᵀ = A [*batch d d]. On a CPU an indefinite or infinite A raises; a GPU is not waited for."""
    watched = looked_at(A)
    if watched:
        check_finite(A.detach(), f"{what}: {word}")
    L, info = torch.linalg.cholesky_ex(A)
    if watched:
        refuse_indefinite(A, info, what, word)
    return L
