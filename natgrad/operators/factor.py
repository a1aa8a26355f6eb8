"""One factor of a Kronecker product: a symmetric matrix a group [c d d], or only its diagonal [c d]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from natgrad.errors import FactorisationError
from natgrad.linalg import refuse_singular

Factor: TypeAlias = Tensor  # [c d d], or [c d] where it is diagonal
_ALIGNED = 8  # numbers
_BATCHED = {"cuda": 1024, "cpu": 256}  # above these sizes one matrix at a time is as fast, and takes less memory


def full(factor: Factor) -> bool:
    """Whether all of the matrix is kept."""
    return factor.ndim == 3


def matrix(factor: Factor) -> Tensor:
    """[c d d]."""
    return factor if full(factor) else torch.diag_embed(factor)


def diagonal(factor: Factor) -> Tensor:
    """[c d]."""
    return factor.diagonal(dim1=-2, dim2=-1) if full(factor) else factor


def mean_diagonal(factor: Factor) -> Tensor:
    """tr/d [c], the mean of its eigenvalues."""
    return diagonal(factor).mean(-1)


def aligned(factor: Factor) -> Factor:
    """On a GPU a full factor with rows of whole vectors, zeros added: products of odd sizes are slow."""
    more = -factor.shape[-1] % _ALIGNED
    if not full(factor) or not more or factor.device.type != "cuda":
        return factor
    return torch.nn.functional.pad(factor, (0, more, 0, more))


def two_sided(left: Factor, w: Tensor, right: Factor) -> Tensor:
    """L W Rᵀ [c o i], for W [c o i] (004 (38), ERRATA 51); R is symmetric where it is a metric."""
    o, i = w.shape[-2:]
    more = (0, right.shape[-1] - i, 0, left.shape[-1] - o)  # where the factors are aligned
    w = torch.nn.functional.pad(w, more) if any(more) else w
    w = left @ w if full(left) else left.unsqueeze(-1) * w
    w = w @ right.mT if full(right) else w * right.unsqueeze(-2)
    return w[..., :o, :i] if any(more) else w


def by_size(factors: Sequence[Factor], function: Callable[[Tensor, list[int]], Sequence[Tensor]]) -> list[Tensor]:
    """Apply a function of stacked matrices [b d d] to full factors, those of the same size at once.

    ``function(stack, which)`` gets the positions in ``factors``; it returns one tensor a factor of the stack.
    """
    sizes: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for at, factor in enumerate(factors):
        alone = factor.shape[-1] > _BATCHED.get(factor.device.type, _BATCHED["cuda"])
        sizes[(factor.shape[-1], at) if alone else (factor.shape[-1],)].append(at)
    out: list[Tensor] = [torch.empty(0)] * len(factors)
    for group in sizes.values():
        counts = [factors[at].shape[0] for at in group]
        stack = factors[group[0]] if len(group) == 1 else torch.cat([factors[at] for at in group])
        for at, part in zip(group, torch.cat(list(function(stack, group))).split(counts), strict=True):
            out[at] = part
    return out


def spectrum(factor: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues [b d] and eigenvectors [b d d] of symmetric matrices [b d d].

    The routines for GPUs sometimes fail to converge: once more, in double precision.
    """
    if factor.shape[-1] == 1:  # numbers: a normalisation has one a channel
        return factor.squeeze(-1), torch.ones_like(factor)
    symmetric = 0.5 * (factor + factor.mT)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
    except RuntimeError:
        try:
            values, vectors = torch.linalg.eigh(symmetric.double())
        except RuntimeError as error:
            raise FactorisationError(
                f"the eigenvalues of a factor of size {factor.shape[-1]} cannot be found, in double precision neither: "
                "raise the damping, lower the learning rate, or use a larger batch"
            ) from error
    return values.to(factor.dtype), vectors.to(factor.dtype)


def refuse_singular_factor(factor: Tensor, what: str) -> None:
    """Raise if one of the matrices [b d d] is singular, as ``natgrad.linalg.cholesky`` does for a whole metric."""
    found = factor.amin(0) if factor.shape[-1] == 1 else torch.linalg.eigvalsh(factor.double())
    for values in found.reshape(-1, factor.shape[-1]):
        refuse_singular(values, factor.shape[-1] * torch.finfo(factor.dtype).eps, False, 0.0, what)


def inverse(factor: Tensor) -> tuple[Tensor, Tensor]:
    """The inverses of positive matrices [b d d] by Cholesky, and which succeeded [b]. A GPU is not waited for."""
    if factor.shape[-1] == 1:
        return factor.reciprocal(), (factor > 0).flatten()
    if factor.shape[0] == 1:  # a batch of one would go to slower routines on a GPU
        inverted, good = inverse(factor[0])
        return inverted.unsqueeze(0), good.view(1)
    lower, info = torch.linalg.cholesky_ex(factor)
    if factor.device.type == "cpu":
        return torch.cholesky_inverse(lower), info == 0
    d = factor.shape[-1]
    eye = torch.eye(d, dtype=factor.dtype, device=factor.device).expand_as(factor)
    # L⁻¹, and L⁻ᵀL⁻¹: a product in place of a second solve.
    root = aligned(torch.linalg.solve_triangular(lower, eye, upper=False))
    return (root.mT @ root)[..., :d, :d], info == 0
