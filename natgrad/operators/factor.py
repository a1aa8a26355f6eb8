"""One factor of a Kronecker product: a symmetric matrix a group [c d d], or only its diagonal [c d]."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from natgrad.errors import FactorisationError
from natgrad.linalg import refuse_singular
from natgrad.operators.triangular import gram_of_upper, invert_upper

Factor: TypeAlias = Tensor  # [c d d], or [c d] where it is diagonal
_ALIGNED = 8  # numbers
_LARGE = 1024  # rows, from which the many small kernels of a triangular solve cost more than products
_BATCHED = {"cuda": 768, "cpu": 256}  # above these sizes one matrix at a time is as fast, and takes less memory
_ROOM = {"cuda": 2**24, "cpu": 2**22}  # bytes of a stack of matrices that are worked on at once


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


def two_sided(left: Factor, w: Tensor, right: Factor, out: Tensor | None = None) -> Tensor:
    """L W Rᵀ [c o i], for W [c o i] (004 (38), ERRATA 51); R is symmetric where it is a metric.

    ``out``: memory of the shape of W for the result, W itself where that is not needed any more.
    """
    o, i = w.shape[-2:]
    more = (0, right.shape[-1] - i, 0, left.shape[-1] - o)  # where the factors are aligned
    if any(more):
        w = out = torch.nn.functional.pad(w, more)
    half = left @ w if full(left) else left.unsqueeze(-1) * w
    w = torch.matmul(half, right.mT, out=out) if full(right) else half.mul_(right.unsqueeze(-2))
    return w[..., :o, :i] if any(more) else w


def two_sided_columns(left: Tensor, parts: Sequence[Tensor], right: Tensor) -> list[Tensor]:
    """L W R part by part, for the W [c o i] whose parts [c o j] lie side by side, without putting them there.

    Left and right may be aligned, with zeros. R is symmetric, and is read by its rows: tensor cores want both factors
    contiguous along the index that is summed.

    >>> L, W, R = torch.eye(2)[None], torch.tensor([[[1.0, 2.0], [3.0, 4.0]]]), 2 * torch.eye(2)[None]
    >>> two_sided_columns(L, W.split(1, -1), R)[1]
    tensor([[[4.],
             [8.]]])
    """
    c, o = parts[0].shape[:2]
    half, at = left.new_empty(c, o, right.shape[-1]), 0
    spans = []
    for part in parts:
        spans.append(slice(at, at := at + part.shape[-1]))
        torch.bmm(left[:, :o, :o], part.to(left.dtype), out=half[..., spans[-1]])
    half[..., at:].zero_()
    return [torch.bmm(half, right[:, span].mT) for span in spans]


def room(factor: Factor) -> int:
    """The bytes of a stack that a factor may be in; one that is larger than that is alone."""
    alone = factor.shape[-1] > _BATCHED.get(factor.device.type, _BATCHED["cuda"])
    return 0 if alone else room_on(factor.device)


def room_on(device: torch.device, rooms: Mapping[str, int] = _ROOM) -> int:
    """The bytes of a stack that is worth being worked on at once; of devices that are not listed as on a GPU."""
    return rooms.get(device.type, rooms["cuda"])


def by_size(factors: Sequence[Factor], held: Callable[[int], int] = lambda size: 1) -> list[list[int]]:
    """The positions of full factors that are worked on at once: of one size, and as many as there is room for.

    ``held``: how many stacks are held where one of matrices of this size is worked on, over those of Cholesky.
    """
    stacks: dict[int, list[list[int]]] = defaultdict(list)
    used: dict[int, int] = {}
    for at, factor in enumerate(factors):
        d = factor.shape[-1]
        used[d] = used.get(d, 0) + factor.nbytes
        if not stacks[d] or used[d] * held(d) > room(factor):
            stacks[d].append([])
            used[d] = factor.nbytes
        stacks[d][-1].append(at)
    return [stack for of_size in stacks.values() for stack in of_size]


def stacked(factors: Sequence[Factor]) -> Factor:
    """[b·c …]; a single one is itself, no copy."""
    return factors[0] if len(factors) == 1 else torch.cat(list(factors))


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


def inverse(M: Tensor) -> tuple[Tensor, Tensor]:
    """The inverses of positive matrices [b d d] by Cholesky, and which succeeded [b]. M is used up.

    At most two stacks are held at a time. A GPU is not waited for.

    >>> found, good = inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]], [[1.0, 2.0], [2.0, 1.0]]]))
    >>> found[0].diagonal(), good
    (tensor([0.5000, 0.2500]), tensor([ True, False]))
    """
    if M.shape[-1] == 1:
        return M.reciprocal(), (M > 0).flatten()
    return inverse_in_place(M) if M.device.type == "cpu" else inverse_by_products(M)


def inverse_in_place(M: Tensor) -> tuple[Tensor, Tensor]:
    """In the memory of M, by LAPACK."""
    lower, info = _cholesky_in_place(M)
    good = info == 0
    if not bool(good.all()):
        M[~good] = torch.eye(M.shape[-1], dtype=M.dtype)  # nothing that the second routine could complain of
    torch.cholesky_inverse(lower, out=lower)
    return M, good


def inverse_by_products(M: Tensor, large: int = _LARGE) -> tuple[Tensor, Tensor]:
    """L⁻ᵀL⁻¹: L⁻¹ by a solve in the memory of a unit matrix or, of one ``large`` matrix, by products; and a product."""
    stack = M[0] if M.shape[0] == 1 else M  # a batch of one would go to slower routines
    lower, info = _cholesky_in_place(stack)
    if stack.ndim == 2 and stack.shape[-1] >= large:
        invert_upper(stack)  # whose rows are the columns of L
        return gram_of_upper(stack).unsqueeze(0), (info == 0).view(-1)
    root = torch.zeros_like(stack)
    root.diagonal(dim1=-2, dim2=-1).fill_(1.0)
    torch.linalg.solve_triangular(lower, root, upper=False, out=root)
    torch.matmul(root.mT, root, out=stack)
    return M, (info == 0).view(-1)


def _cholesky_in_place(M: Tensor) -> tuple[Tensor, Tensor]:
    """L in the memory of contiguous M, and whether it failed: LAPACK works on columns, the rows of a symmetric M."""
    columns, info = M.mT, torch.empty(M.shape[:-2], dtype=torch.int32, device=M.device)
    torch.linalg.cholesky_ex(columns, out=(columns, info))
    return columns, info
