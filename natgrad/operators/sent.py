"""Numbers that a device sends to the host, which does not wait for them."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sent(number: Tensor) -> Tensor:
    """The number [] on its way to the host: not a number until it has arrived, and infinity where it is none itself.

    >>> float(sent(torch.tensor(2.0))), float(sent(torch.tensor(math.nan)))
    (2.0, inf)
    """
    host = torch.full((), math.nan, pin_memory=number.device.type == "cuda")  # others would be waited for
    return host.copy_(number.nan_to_num(nan=math.inf), non_blocking=True)
