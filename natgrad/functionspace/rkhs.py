"""Functions of a reproducing kernel Hilbert space, and the gradient of an empirical loss there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.functionspace.kernels import ReproducingKernel


@final
@dataclass(frozen=True)
class KernelSum:
    """f = Σ_n K(x_n, ·) c_n: centres x [n *shape], coefficients c [n *out]; what gradients in the space are made of.

    They add, scale, and have the inner product of the space, ⟨f, g⟩ = Σ_nm c_n · d_m K(x_n, z_m), so that
    ⟨K(x, ·), f⟩ = f(x).

    >>> from natgrad.functionspace import SobolevKernel
    >>> f = KernelSum(SobolevKernel(0.5), torch.tensor([0.0, 1.0]), torch.tensor([2.0, -1.0]))
    >>> f(torch.tensor([0.0]))  # 2 − 1/e
    tensor([1.6321])
    >>> round(float((f - 3 * f).norm() / f.norm()), 6)
    2.0
    """

    kernel: ReproducingKernel
    centres: Tensor
    coefficients: Tensor

    def __post_init__(self) -> None:
        if self.centres.ndim == 0 or self.coefficients.ndim == 0 or len(self.centres) != len(self.coefficients):
            raise ValueError(
                f"centres {tuple(self.centres.shape)} and coefficients {tuple(self.coefficients.shape)}: one "
                "coefficient [*out] belongs to every centre [*shape]"
            )

    def __call__(self, x: Any) -> Tensor:
        """f(x) [m *out] for inputs x [m *shape]."""
        return torch.tensordot(self.kernel(x, self.centres).to(self.coefficients.dtype), self.coefficients, dims=1)

    def inner(self, other: KernelSum) -> Tensor:
        """⟨f, g⟩ in the space, summed over the outputs (000 (32))."""
        self._same_space(other)
        return (self(other.centres) * other.coefficients).sum()

    def norm(self) -> Tensor:
        """√⟨f, f⟩."""
        return self.inner(self).clamp(min=0).sqrt()  # what is below zero is rounding: K is positive

    def __add__(self, other: KernelSum) -> KernelSum:
        if not isinstance(other, KernelSum):
            return NotImplemented
        self._same_space(other)
        centres = torch.cat([self.centres, other.centres])
        return replace(self, centres=centres, coefficients=torch.cat([self.coefficients, other.coefficients]))

    def __mul__(self, factor: float | Tensor) -> KernelSum:
        return replace(self, coefficients=self.coefficients * factor)

    __rmul__ = __mul__

    def __neg__(self) -> KernelSum:
        return self * -1

    def __sub__(self, other: KernelSum) -> KernelSum:
        return self + -other if isinstance(other, KernelSum) else NotImplemented

    def _same_space(self, other: KernelSum) -> None:
        if self.kernel != other.kernel:
            raise ValueError(
                f"functions of two spaces, {self.kernel!r} and {other.kernel!r}, have no sum and no inner product: "
                "build both with the same kernel"
            )
        if self.coefficients.shape[1:] != other.coefficients.shape[1:]:
            raise ValueError(
                f"functions with outputs {tuple(self.coefficients.shape[1:])} and "
                f"{tuple(other.coefficients.shape[1:])} have no sum and no inner product: outputs must match"
            )


def functional_gradient(
    kernel: ReproducingKernel, f: Callable[[Any], Tensor], x: Any, loss: Callable[[Tensor], Tensor]
) -> KernelSum:
    """∇ℓ = Σ_n K(x_n, ·) ∂L/∂f(x_n), the gradient at f of the empirical loss ℓ(f) = L(f(x)) (000 lemma 4, (11)).

    ``f``: any function from x [n *shape] to outputs [n *out], a model or a ``KernelSum``. ``loss``: from the outputs to
    one number; sums or means over the examples as it likes, and the gradient with it ((5) is a sum: ERRATA 11). The
    gradient is that of the Hilbert space of the kernel. In L² there is none: it would be a sum of delta functions. It
    points uphill: descent subtracts it (ERRATA 24).

    >>> from natgrad.functionspace import SobolevKernel
    >>> x, t = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
    >>> gradient = functional_gradient(SobolevKernel(0.5), torch.zeros_like, x, lambda y: (y - t).square().sum() / 2)
    >>> gradient.coefficients
    tensor([-1., -1.])
    """
    with torch.no_grad():
        y = f(x)
    return KernelSum(kernel.at(x), centres_of(x), differentiated(loss, y)[1])


def differentiated(loss: Callable[[Tensor], Tensor], y: Tensor) -> tuple[Tensor, Tensor]:
    """L(y) [] and ∂L/∂y [n *out] of a loss of the outputs, which must be one number that depends on them."""
    leaf = y.detach().requires_grad_()
    with torch.enable_grad():
        value = loss(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the loss returned {shape}: it must be one number (reduce it by a sum or a mean)")
    if not value.requires_grad:
        raise ValueError("the loss does not depend on the outputs: it must be a differentiable function of them")
    (gradient,) = torch.autograd.grad(value, leaf)
    return value.detach().reshape(()), gradient


def centres_of(x: Any) -> Tensor:
    """The inputs as centres of a ``KernelSum``: one tensor [n *shape]."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"the inputs are a {type(x).__name__}: a function of a kernel has its centres in one [n *shape] tensor"
        )
    return x.detach()
