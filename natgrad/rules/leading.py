"""Leading axes of a layer that are all alike."""

from __future__ import annotations

from torch import Tensor


def rows(x: Tensor, trailing: int = 1) -> Tensor:
    """x [* *rest] as [m *rest], for sums over all rows: in the order that they have in memory, so without a copy.

    A layer whose examples are on another axis than the first is seen through a view that has them there.

    >>> import torch
    >>> x = torch.arange(6.0).view(3, 2, 1)
    >>> rows(x.transpose(0, 1)).flatten()
    tensor([0., 1., 2., 3., 4., 5.])
    """
    lead = x.ndim - trailing
    if lead > 1 and not x.is_contiguous():
        order = sorted(range(lead), key=x.stride, reverse=True)
        x = x.permute(*order, *range(lead, x.ndim))
    return x.reshape(-1, *x.shape[lead:])
