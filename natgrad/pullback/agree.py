"""Whether examples give the same outputs in batches of different sizes, to rounding."""

from __future__ import annotations

from torch import Tensor

# Relative to the largest output of an example, by the bytes of a number. On a GPU products are done in tf32, in an
# order that depends on the batch.
_TOLERANCE = {"cpu": {8: 1e-8, 4: 1e-4, 2: 5e-2}, "cuda": {8: 1e-8, 4: 5e-3, 2: 5e-2}}


def agree(here: Tensor, there: Tensor) -> bool:
    """Whether two tensors of outputs [n *out] are those of the same examples, each by itself.

    >>> import torch
    >>> agree(torch.ones(2, 3), torch.ones(2, 3) + 1e-7), agree(torch.ones(2, 3), torch.ones(2, 3) + 1e-3)
    (True, False)
    """
    if here.shape != there.shape:
        return False
    tolerance = _TOLERANCE.get(there.device.type, _TOLERANCE["cuda"])[here.element_size()]
    gap, size = ((t.reshape(len(there), -1).norm(dim=1)).amax() for t in (here - there, there))
    return bool(gap <= tolerance * size)
