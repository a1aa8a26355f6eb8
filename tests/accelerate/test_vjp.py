"""Cotangents through a graph: several at a time, or one by one where a kernel takes no more."""

from typing import Any

import pytest
import torch
from torch import Tensor

from natgrad.accelerate.autograd import vjp
from tests.pulled import close, normal


class Fused(torch.autograd.Function):
    """2x, with a backward pass that leaves torch, as fused kernels do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        if float(grads[0].sum()) == 7.0:
            raise RuntimeError("a mistake of the kernel")
        return torch.from_numpy(2 * grads[0].numpy())


@pytest.mark.parametrize("k", [1, 3])
def test_a_kernel_without_batches_gives_the_same_cotangents(k: int) -> None:
    x, unused = normal(2, 3).requires_grad_(), normal(2).requires_grad_()
    s = normal(k, 2, 3, seed=1)
    got = vjp((Fused.apply(x).square(),), [x, unused], (s,))  # type: ignore[no-untyped-call]
    assert got[0] is not None
    close(got[0], s * 8 * x.detach())
    assert got[1] is None


def test_a_mistake_is_raised() -> None:
    x = normal(2).requires_grad_()
    with pytest.raises(RuntimeError, match="a mistake of the kernel"):
        vjp((Fused.apply(x),), [x], (torch.full((2, 2), 3.5, dtype=torch.float64),))  # type: ignore[no-untyped-call]
