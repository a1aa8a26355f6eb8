"""How far matrices have moved, from their products with a few random signs: no copy of the matrices is kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.fused import norms

_COLUMNS = 8  # of signs: ‖MZ‖² then has a relative deviation of at most 1/2


@final
@dataclass(frozen=True)
class Sketch:
    """M Z of several matrices, with fixed random signs Z [n k]: E‖M Z‖² = k‖M‖² (Hutchinson 1990).

    ``values`` [s]: all products, one after the other; ``sizes``: how many numbers belong to each matrix.

    >>> now, then = (Sketch.of([c * torch.eye(3)[None]]) for c in (3.0, 2.0))
    >>> now.drift(then.values)
    tensor(0.5000)
    """

    values: Tensor
    sizes: tuple[int, ...]

    @staticmethod
    def of(matrices: Sequence[Tensor]) -> Sketch:
        """Of matrices [*batch m n]; a vector [n] is kept as it is."""
        products = [(m @ signs(m.shape[-1], m.dtype, m.device) if m.ndim > 1 else m).flatten() for m in matrices]
        return Sketch(torch.cat(products), tuple(product.numel() for product in products))

    def drift(self, then: Tensor) -> Tensor:
        """√(mean over the matrices of ‖M − M'‖²/‖M'‖²) [], from the values of M'; infinite if a zero has moved."""
        moved = torch.stack(norms((self.values - then).split(self.sizes)))
        ratio = moved / torch.stack(norms(then.split(self.sizes)))
        return torch.where(moved == 0, 0.0, ratio).square().mean().sqrt().to(then.dtype)


@cache  # for ever: captured kernels read them
def signs(n: int, dtype: torch.dtype, device: torch.device, columns: int = _COLUMNS) -> Tensor:
    """Random signs Z [n k], always the same ones."""
    drawn = torch.randint(2, (n, columns), generator=torch.Generator().manual_seed(n), device="cpu")
    return (2 * drawn - 1).to(device, dtype)
