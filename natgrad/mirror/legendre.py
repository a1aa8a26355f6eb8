"""The Legendre transform of any smooth convex function, by Newton's method."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.errors import DomainError, NatgradError, SingularMetricError
from natgrad.mirror.domains import Domain, Space
from natgrad.mirror.potentials import Potential, dense, inverted, scaled_cholesky
from natgrad.operators.base import Operator

_HALVINGS = 60
_ROUNDING = 256  # units in the last place


@final
@dataclass(frozen=True)
class Convex(Potential):
    """Any smooth strictly convex ψ(x) → [], with its gradient by automatic differentiation.

    ∇ψ*(z) = argmin_x ψ(x) − ⟨z, x⟩ by Newton steps that are halved until they stay in the domain and descend; its
    derivative is (∇²ψ)⁻¹, by the implicit function theorem. The Hessian is dense: for small spaces. ``within``: where ψ
    is defined; ``image``: the domain of z, where it is known (a z outside it has no x, and Newton cannot find one).

    >>> ψ = Convex(lambda x: torch.logaddexp(x, -x).sum())  # z = tanh x
    >>> ψ.inverse_gradient(torch.tensor([0.5], dtype=torch.float64))
    tensor([0.5493], dtype=torch.float64)
    """

    function: Callable[[Tensor], Tensor]
    within: Domain = field(default_factory=Space)
    image: Domain = field(default_factory=Space)
    max_steps: int = 100

    @property
    def domain(self) -> Domain:
        return self.within

    @property
    def dual_domain(self) -> Domain:
        return self.image

    def value(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        return self.function(x).reshape(())

    def gradient(self, x: Tensor) -> Tensor:
        self.domain.check(x, "x")
        leaf = x if x.requires_grad else x.detach().requires_grad_()
        with torch.enable_grad():
            (z,) = torch.autograd.grad(self.function(leaf).sum(), leaf, create_graph=x.requires_grad)
        return z

    def inverse_gradient(self, z: Tensor) -> Tensor:
        self.image.check(z, "z")
        x = self._solved(z.detach())
        # One more Newton step, in which z is differentiated and the Hessian is not: the implicit function theorem.
        return x + self._newton(x, z - self.gradient(x))

    def bregman(self, y: Tensor, x: Tensor) -> Tensor:
        here, there, slope = self.value(x), self.value(y), self.gradient(x)
        plain = there - here - (slope * (y - x)).sum()
        # Where the difference of values is lost in rounding, half of V_x(y) + V_y(x) is not, and does not differ.
        both = ((self.gradient(y) - slope) * (y - x)).sum()
        lost = _ROUNDING * torch.finfo(x.dtype).eps * (here.abs() + there.abs())
        return torch.where((plain - 0.5 * both).abs() <= lost, 0.5 * both, plain)

    def hessian(self, x: Tensor) -> Operator:
        self.domain.check(x, "x")
        h = torch.autograd.functional.hessian(lambda a: self.function(a).sum(), x.detach())
        matrix = h.reshape(x.numel(), x.numel())
        return dense(0.5 * (matrix + matrix.T))

    def conjugate_hessian(self, z: Tensor) -> Operator:
        return inverted(self.hessian(self.inverse_gradient(z).detach()))

    def _solved(self, z: Tensor) -> Tensor:
        x = self.domain.centre(z)
        residual = self.gradient(x) - z
        rounding = _ROUNDING * torch.finfo(z.dtype).eps
        for _ in range(self.max_steps):
            if bool((residual.abs() <= rounding * z.abs()).all()):
                return x
            try:
                δ = -self._newton(x, residual)
            except SingularMetricError:
                break  # far out, where ψ is flat
            found = self._shortened(x, z, δ, residual)
            if found is None:
                break
            x, residual = found
        off = float(residual.abs().max())
        if off <= _ROUNDING * rounding * (1 + float(z.abs().max())):
            return x  # no step improves it: ∇ψ itself is not known better
        raise NatgradError(
            f"no x with ∇ψ(x) = z was found: after at most {self.max_steps} Newton steps ∇ψ differs from z by "
            f"{off:.3g}. z may lie outside the range of ∇ψ, or ψ is not strictly convex: give the image= of the "
            "potential, or take shorter steps (a larger alpha)"
        )

    def _newton(self, x: Tensor, residual: Tensor) -> Tensor:
        """(∇²ψ(x))⁻¹ applied to a residual of the shape of x."""
        factor, scale = scaled_cholesky(self.hessian(x).dense())
        solved = torch.cholesky_solve((scale * residual.reshape(-1)).unsqueeze(-1), factor).squeeze(-1)
        return (scale * solved).view_as(x)

    def _shortened(self, x: Tensor, z: Tensor, δ: Tensor, residual: Tensor) -> tuple[Tensor, Tensor] | None:
        """Halve the step until ψ − ⟨z, ·⟩ falls inside the domain or, where it is flat to rounding, its slope does."""
        here, slope = float(self.value(x) - (z * x).sum()), float((residual * δ).sum())
        flat = _ROUNDING * torch.finfo(z.dtype).eps * (1 + abs(here))
        for _ in range(_HALVINGS):
            moved = x + δ
            try:
                there = float(self.value(moved) - (z * moved).sum())
            except DomainError:
                δ, slope = 0.5 * δ, 0.5 * slope
                continue
            new = self.gradient(moved) - z
            falls = there <= here + 1e-4 * slope
            if falls or (abs(there - here) <= flat and float(new.norm()) < float(residual.norm())):
                return moved, new
            δ, slope = 0.5 * δ, 0.5 * slope
        return None
