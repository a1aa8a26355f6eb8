"""Special functions that torch has not, or not in double precision."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def trigamma(x: Tensor) -> Tensor:
    """ψ'(x) = ζ(2, x), to rounding; ``torch.polygamma(1, x)`` is good to 5e-10 only.

    >>> trigamma(torch.tensor(1.0))
    tensor(1.6449)
    """
    return torch.special.zeta(torch.full_like(x, 2.0), x)


def log1mexp(eta: Tensor) -> Tensor:
    """log(1 − e^η) of η < 0, precise at both ends.

    >>> log1mexp(torch.tensor(-0.5)) + log1mexp(torch.tensor(-20.0))
    tensor(-0.9328)
    """
    near = eta > -math.log(2)
    small = torch.where(near, eta, torch.full_like(eta, -0.5))  # each branch sees numbers that do not overflow it
    large = torch.where(near, torch.full_like(eta, -1.0), eta)
    return torch.where(near, torch.log(-torch.expm1(small)), torch.log1p(-large.exp()))
