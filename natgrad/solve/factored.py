"""Factored damping: each factor of a Kronecker product is damped by itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import final

from torch import Tensor

from natgrad.linalg import check_damping
from natgrad.operators.base import Inverse, Operator
from natgrad.operators.newton import Newton
from natgrad.solve.base import Solver


@final
@dataclass(frozen=True)
class Factored(Solver):
    """(S + √λ/π)⁻¹ ⊗ (A + π√λ)⁻¹, π² = (tr A/dim A)/(tr S/dim S) (Martens and Grosse 2015, section 6.3; ERRATA D).

    The inverse of G + λM with the reference metric M = 1 ⊗ 1, up to the cross terms √λ(π S ⊗ 1 + 1 ⊗ A/π): the step
    is shorter than that of ``Cholesky``, which damps by exactly λM through the eigenvalues. It needs no eigenvalues.
    ``newton=Newton()`` refreshes an inverse that is nearly right by matrix products, and falls back to Cholesky.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Linear(2, 3)
    >>> pb = ng.pullback(model, torch.randn(8, 2), ng.Euclidean())
    >>> ω = ng.Covector({name: torch.ones_like(p) for name, p in model.named_parameters()})
    >>> ng.sharp(ng.Kronecker().estimate(pb), ω, Factored(), damping=0.1)
    Vector(weight: (3, 2), bias: (3,))
    """

    newton: Newton | None = None

    @property
    def by_layer(self) -> bool:
        return True

    @property
    def doubtful(self) -> bool:
        return self.newton is not None and self.newton.failed()

    def init(self, G: Operator, damping: float = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        check_damping(damping, G.layout.dtype)
        return G.factored_inverse(damping, warm or {}, self.newton)

    def again(self, last: Inverse, G: Operator, damping: float = 0.0) -> Inverse:
        check_damping(damping, G.layout.dtype)
        return G.factored_inverse(damping, last.tensors(), self.newton, last)
