"""The precisions of second moments: the one in which numbers are multiplied, and the one in which they are summed.

The product of two numbers in half precision is exact in single precision, and is summed in it: tensor cores are given
what a network computed in half precision as it is. Numbers in single precision are multiplied as such (in tf32 or not,
as torch was told), unless ``torch.set_float32_matmul_precision("medium")`` allows bfloat16: torch makes no use of
that on a GPU, the moments here do, where there is so much to multiply that it pays to round. A moment is a mean over a
batch, with more noise than the rounding of its terms.
"""

from __future__ import annotations

import torch
from torch import Tensor

_HALF = (torch.float16, torch.bfloat16)
_WORK = 2**29  # products of numbers, from which on an H200 they take longer in tf32 than to round in bfloat16


def single(t: Tensor) -> Tensor:
    """At least single precision: sums of products in half precision lose their small terms."""
    return t.float() if t.dtype in _HALF else t


def multiplied(x: Tensor, work: int) -> torch.dtype:
    """The type in which the entries of x are multiplied with one another, in so many products.

    >>> multiplied(torch.zeros(2), 4), multiplied(torch.zeros(2, dtype=torch.bfloat16), 4)
    (torch.float32, torch.float32)
    """
    if x.device.type != "cuda":
        return torch.float32 if x.dtype in _HALF else x.dtype
    if x.dtype == torch.float16 and torch.backends.cuda.matmul.allow_fp16_accumulation:
        return torch.float32  # torch would sum in float16, and refuses to write such sums in float32
    pays = x.dtype == torch.float32 and work >= _WORK and bfloat16_allowed() and _fast(x.device)
    return torch.bfloat16 if pays else x.dtype


def rounded(x: Tensor, work: int) -> Tensor:
    """x in that type. All that is summed beside its products is of these numbers too, or a moment would have λ < 0.

    >>> rounded(torch.ones(2, dtype=torch.bfloat16), 4)
    tensor([1., 1.])
    """
    return x.to(multiplied(x, work))


def in_half(x: Tensor) -> bool:
    """Whether products of x are sums of products in half precision."""
    return x.dtype in _HALF


def summed(dtype: torch.dtype) -> torch.dtype:
    """The type of a sum of products of such numbers."""
    return torch.float32 if dtype in _HALF else dtype


def bfloat16_allowed() -> bool:
    """Whether the user has said so, with ``torch.set_float32_matmul_precision``.

    >>> bfloat16_allowed()
    False
    """
    if torch.backends.cuda.matmul.fp32_precision != "tf32":
        return False
    try:
        return torch.get_float32_matmul_precision() == "medium"
    except RuntimeError:  # torch's newer switches were used, and torch refuses to put them in the older words
        return False


def _fast(device: torch.device) -> bool:
    """Whether its tensor cores know bfloat16: those of Ampere and later do."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def switches() -> tuple[str, bool, bool]:
    """What torch was told about products of matrices on a GPU: under other switches they are other computations."""
    matmul = torch.backends.cuda.matmul
    return matmul.fp32_precision, matmul.allow_fp16_accumulation, bfloat16_allowed()


def multiply(a: Tensor, b: Tensor, out: Tensor) -> None:
    """a b of matrices into ``out``, which may have a wider type.

    >>> out = torch.empty(1, 1)
    >>> multiply(torch.ones(1, 3), torch.ones(3, 1), out)
    >>> out
    tensor([[3.]])
    """
    if a.dtype == out.dtype:
        torch.mm(a, b, out=out)
    else:
        torch.mm(a, b, out.dtype, out=out)


def multiply_add(base: Tensor, a: Tensor, b: Tensor, out: Tensor, alpha: float = 1.0) -> None:
    """base + alpha a b into ``out``, likewise; the base may be ``out``.

    >>> out = torch.ones(1, 1)
    >>> multiply_add(out, torch.ones(1, 3), torch.ones(3, 1), out, alpha=-1.0)
    >>> out
    tensor([[-2.]])
    """
    if a.dtype == out.dtype:
        torch.addmm(base, a, b, alpha=alpha, out=out)
    else:
        torch.addmm(base, a, b, out.dtype, alpha=alpha, out=out)
