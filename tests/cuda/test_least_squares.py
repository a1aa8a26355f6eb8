"""On a GPU: fits are those of the processor, alone, in a batch and in a box."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import natgrad as ng


def decay(x: Tensor, t: Tensor, y: Tensor) -> Tensor:
    return x[0] * torch.exp(-x[1] * t) + x[2] - y


@pytest.mark.parametrize("options", [{}, {"loss": "soft_l1", "f_scale": 0.1}, {"bounds": (0.0, [9.0, 9.0, 0.4])}])
@pytest.mark.parametrize("count", [None, 1, 50])
def test_fits_are_those_of_the_processor(count: int | None, options: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(0)
    lead = () if count is None else (count,)
    t = torch.linspace(0, 4, 20, dtype=torch.float64).expand(*lead, 20)
    noise = torch.randn(*lead, 20, dtype=torch.float64, generator=generator)
    y = 3 * torch.exp(-0.7 * t) + 0.5 + 0.05 * noise
    x0 = torch.tensor([1.0, 1.0, 0.2], dtype=torch.float64).expand(*lead, 3).contiguous()
    here, there = (
        ng.least_squares(decay, x0.to(device), (t.to(device), y.to(device)), batch=count is not None, **options)
        for device in ("cpu", "cuda")
    )
    assert there.x.device.type == "cuda"
    assert bool(torch.as_tensor(there.success).all())
    torch.testing.assert_close(there.x.cpu(), here.x, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(there.covariance.cpu(), here.covariance, rtol=1e-4, atol=1e-9)


def test_the_solution_is_differentiable() -> None:
    t = torch.linspace(0, 4, 20, dtype=torch.float64, device="cuda")
    y = (3 * torch.exp(-0.7 * t) + 0.5).requires_grad_()
    x = ng.least_squares(decay, torch.ones(3, dtype=torch.float64, device="cuda"), (t, y)).x
    x.sum().backward()
    assert y.grad is not None
    assert bool(y.grad.isfinite().all())
