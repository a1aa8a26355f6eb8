"""The tangent space of a model inside a space of functions, and the projection on it: the Sobolev natural gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.functionspace.kernels import ReproducingKernel
from natgrad.functionspace.projection import Spectrum
from natgrad.functionspace.rkhs import differentiated
from natgrad.geometry import Vector
from natgrad.linalg import check_damping, check_finite
from natgrad.model import Inputs, Model
from natgrad.operators.gram import KernelMatrix
from natgrad.operators.kernel import KernelOperator
from natgrad.operators.pushthrough import PushThrough
from natgrad.output.metric import Euclidean
from natgrad.pullback import pullback
from natgrad.slots import check_slots
from natgrad.structures import Kernel


@final
@dataclass(frozen=True)
class TangentSpace:
    """Span of ∂φ/∂θ^i, known at the points x, in the norm ‖v‖² = Σ_k v_kᵀK⁻¹v_k over the outputs k (000 (3), (22)).

    That is the norm of the smallest function with the values v at the points. The projection of v [n *out] is J w, with
    the least w that minimises ‖v − J w‖² + λ‖w‖²:

        w = (JᵀK⁻¹J + λ)⁻¹JᵀK⁻¹v = Jᵀ(λK + JJᵀ)⁻¹v

    in the second form (ERRATA 13): K is not inverted, and equal points count once. Sums over the examples, not means
    (ERRATA 11): a mean loss and a mean metric have the same projection, and n times less damping.

    JJᵀ [(k n) (l m)] is formed, J is not. ``TangentSpace.of`` makes one.
    """

    rows: KernelOperator  # J/√n, in factors
    K: Tensor  # [n n]
    y: Tensor  # φ(x) [n *out]

    @staticmethod
    def of(
        model: nn.Module | Callable[..., Any],
        x: Inputs,
        kernel: ReproducingKernel,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> TangentSpace:
        """The tangent space of a model at its parameters, known at the inputs x.

        >>> from natgrad.functionspace import SobolevKernel
        >>> model, x = nn.Linear(2, 1), torch.randn(5, 2)
        >>> TangentSpace.of(model, x, SobolevKernel(1.5)).natural_gradient(lambda y: y.square().sum())
        Vector(weight: (1, 2), bias: (1,))
        """
        check_slots(kernel=(kernel, ReproducingKernel))
        pb = pullback(Model.of(model, params, output), x, Euclidean())
        with torch.no_grad():
            K = kernel(x)
        if K.shape[0] != pb.n:
            raise ValueError(
                f"the kernel sees {K.shape[0]} inputs and the model has {pb.n} outputs: one each is needed"
            )
        check_finite(K, "the Gram matrix of the kernel")
        return TangentSpace(Kernel().estimate(pb), K, pb.y.detach())

    def natural_gradient(self, loss: Callable[[Tensor], Tensor], damping: float = 0.0) -> Vector:
        """w of the projection of ∇ℓ, for a loss of the outputs (000 proposition 5, (10), (20)); subtract it to descend.

        ∇ℓ has the values K e at the points, e = ∂L/∂y. Over-parametrised and undamped, a step −ηw moves the outputs by
        −ηK e to first order: it is descent in the space of functions.
        """
        e = differentiated(loss, self.y)[1]
        return self.project(torch.tensordot(self.K.to(e.dtype), e, dims=1), damping)

    def project(self, v: Tensor, damping: float = 0.0) -> Vector:
        """w of the projection J w of a function with the values v [n *out] at the points."""
        check_damping(damping)
        if v.shape != self.y.shape:
            raise ValueError(f"v has the shape {tuple(v.shape)}, and the outputs at the points {tuple(self.y.shape)}")
        n = self.K.shape[0]
        check_finite(v, "the function to project")
        values = v.reshape(n, -1).T.double()  # [k n]
        dual = self._damped(values, damping) if damping > 0 else self._undamped(values)
        return self.rows.layout.vector((self._exact.pull(dual) * math.sqrt(n)).to(self.rows.layout.dtype))

    @cached_property
    def _exact(self) -> KernelOperator:
        """The rows in double precision: products of single ones would hide all that is below the root of their eps."""
        return self.rows.to(torch.float64)

    def _damped(self, v: Tensor, damping: float) -> Tensor:
        """z [k n] with w = Jᵀz; the rows are J/√n."""
        n = self.K.shape[0]
        return PushThrough.of(self._exact, KernelMatrix.of(self.K, self._eps), damping / n).solve(v) / n

    def _undamped(self, v: Tensor) -> Tensor:
        """z [k n] with w = Jᵀz, for v [k n]."""
        k, n = v.shape
        K, gram = self.K.double(), self._exact.gram() * n
        values, vectors = torch.linalg.eigh(gram)
        if bool(values[0] > max((k * n * self._eps) ** 2, k * n * torch.finfo(gram.dtype).eps) * values[-1]):
            # J w = v has a solution, which is at distance zero in any norm.
            return (vectors @ (vectors.T @ v.reshape(-1) / values)).view(k, n)
        # In coordinates in which the norm is the Euclidean one: v = L t, K = L Lᵀ, without what K does not see.
        values, vectors = torch.linalg.eigh(K)
        seen = values > n * self._eps * values[-1]
        back = vectors[:, seen] / values[seen].sqrt()  # L⁺ᵀ [n t]
        spectrum = Spectrum.of(gram, back, self._eps)
        inside = spectrum.images.T @ (v @ back).reshape(-1)
        return (spectrum.directions @ (inside / spectrum.values.sqrt())).view(k, n)

    @property
    def _eps(self) -> float:
        return max(torch.finfo(t.dtype).eps for t in (self.K, self.y))
