"""What becomes of the metric where the kernel is multiplied by a number (ERRATA 4)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.output.metric import OnBase
from natgrad.structures import Structure
from tests.golden import agrees, golden, golden_mlp
from tests.pulled import close


@final
@dataclass(frozen=True)
class Scaled(OnBase):
    """The Sobolev metric of the kernel c·k."""

    c: float
    base: ng.OutputMetric = field(default_factory=ng.Euclidean)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.base.shared_root(y, target, generator)

    def coupling(self, x: Any, n: int) -> Tensor:
        return ng.Sobolev(jitter=0.0).coupling(x, n) / self.c


def estimated(structure: Structure, c: float) -> Tensor:
    model, x, _ = golden_mlp()
    return structure.estimate(ng.pullback(model, x, Scaled(c))).dense()


def printed(c: float) -> Tensor:
    """(Σ C a aᵀ) ⊗ (Σ C Ds Dsᵀ) of the first layer, as (25) has it."""
    model, x, _ = golden_mlp()
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear)
    assert isinstance(last, nn.Linear)
    C = Scaled(c).coupling(x, len(x))
    a = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], dim=1)[:, None]
    s = (last.weight * (1 - first(x).tanh().square())[:, None]).detach()  # ∂y/∂z [n o d]
    A, S = (torch.einsum("nm,nki,mkj->ij", C, rows, rows) for rows in (a, s))
    return torch.kron(A.contiguous(), S.contiguous())


def test_a_kernel_times_c_divides_the_metric_by_c_and_the_printed_product_by_its_square() -> None:
    """(22) and its factors, scaled by traces, follow the kernel; A ⊗ S as (25) prints it is off by one more 1/c."""
    case = golden("sobolev.kernel_scale_law")
    c, factor = case["inputs"]["c"], case["expected"]["metric_factor"]
    for structure in (ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()):
        close(estimated(structure, c), factor * estimated(structure, 1.0))
        agrees(case, estimated(structure, c).trace() / estimated(structure, 1.0).trace(), "metric_factor")
    agrees(case, printed(c).trace() / printed(1.0).trace(), "printed_kfac_factor")
