"""Functions in a reproducing kernel Hilbert space, the gradient of an empirical loss there, and descent along it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.geometry import value_and_differential
from natgrad.kernels.sobolev import ReproducingKernel
from natgrad.linalg import check_finite, is_number
from natgrad.model import check_slots
from natgrad.show import brief

_MEMORY = 2**32  # bytes of a Gram matrix


@final
@dataclass(frozen=True)
class KernelSum:
    """A function that is a weighted sum of kernels at some centres; gradients have this form.

    Args:
        kernel: The reproducing kernel K.
        centres: The points x [n *shape].
        coefficients: The weights c [n *out].

    Method:
        f = Σ_n K(x_n, ·) c_n. They form a vector space with the inner product ⟨f, g⟩ = Σ_nm c_n · d_m K(x_n, z_m), so
        that ⟨K(x, ·), f⟩ = f(x).

    Example:
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

    __repr__ = brief

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
        """⟨f, g⟩, summed over the outputs."""
        self._same_space(other)
        return (self(other.centres) * other.coefficients).sum()

    def norm(self) -> Tensor:
        """√⟨f, f⟩."""
        return self.inner(self).clamp(min=0).sqrt()  # K is positive: below zero there is rounding only

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
    """The gradient of a loss with respect to a function, in the Hilbert space of a kernel.

    It points uphill: descent subtracts it.

    Args:
        kernel: The reproducing kernel K of the space.
        f: Any function from x [n *shape] to outputs [n *out], a model or a ``KernelSum``.
        x: The inputs of the examples.
        loss: A function from the outputs to one number, a sum or a mean over the examples.

    Returns:
        The gradient, a ``KernelSum`` with the inputs as centres.

    Method:
        ∇ℓ = Σ_n K(x_n, ·) ∂L/∂f(x_n), the gradient at f of the empirical loss ℓ(f) = L(f(x)).

        See Bai, Rosenberg and Xu (2022), lemma 4. In L² there is no such gradient, as it would be a sum of delta
        functions.

    Example:
        >>> from natgrad.functionspace import SobolevKernel
        >>> x, t = torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])
        >>> half_square = lambda y: (y - t).square().sum() / 2
        >>> gradient = functional_gradient(SobolevKernel(0.5), torch.zeros_like, x, half_square)
        >>> gradient.coefficients
        tensor([-1., -1.])
    """
    with torch.no_grad():
        y = f(x)
    return KernelSum(kernel.at(x), centres_of(x), value_and_differential(loss, y)[1])


def centres_of(x: Any) -> Tensor:
    """The inputs as centres of a ``KernelSum``: one tensor [n *shape]."""
    if not isinstance(x, Tensor):
        raise TypeError(
            f"the inputs are a {type(x).__name__}: a function of a kernel has its centres in one [n *shape] tensor"
        )
    return x.detach().clone()  # the caller may write into x


@final
class FunctionalGradientDescent:
    """Gradient descent on a function itself, in the Hilbert space of a kernel.

    Args:
        kernel: The reproducing kernel of the space.
        loss: ``loss(y, target)`` is one number, usually a sum over the examples.
        step: η, one number or a function of t = 1, 2, … It must be below 2/λ_max(K) for squares.
        passes: The number of passes over the data in ``fit``.
        batch: How many examples a step takes; all by default.
        outputs: The shape of f(x_n), where it is not that of a target (for classes: ``(10,)``).
        generator: Shuffles the examples in every pass; without one they keep their order.

    Method:
        f_t = f_{t−1} − η_t ∇ℓ(f_{t−1}) from f_0 = 0 in the Hilbert space of a kernel (Bai, Rosenberg & Xu 2022):

            f_T = −Σ_t η_t Σ_n K(x_n, ·) ∂L/∂f_{t−1}(x_n)

        For ½‖y − t‖², residuals follow e ← (1 − ηK)e: descent converges to the function of least norm through the data
        for η < 2/λ_max(K), and diverges above.

    Example:
        >>> from natgrad.functionspace import SobolevKernel
        >>> x = torch.linspace(-1, 1, 9, dtype=torch.float64)
        >>> squares = lambda y, t: (y - t).square().sum() / 2
        >>> descent = FunctionalGradientDescent(SobolevKernel(1.5), squares, step=0.2, passes=400).fit(x, x.sin())
        >>> bool((descent.predict(x) - x.sin()).abs().max() < 0.01)
        True
    """

    def __init__(
        self,
        kernel: ReproducingKernel,
        loss: Callable[[Tensor, Any], Tensor],
        step: float | Callable[[int], float],
        *,
        passes: int = 100,
        batch: int | None = None,
        outputs: tuple[int, ...] | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        check_slots(kernel=(kernel, ReproducingKernel))
        if not callable(step):
            _check_step(step)
        for name, value in (("passes", passes), ("batch", 1 if batch is None else batch)):
            if not is_number(value, whole=True) or value < 1:
                raise ValueError(f"{name}={value!r} must be a positive integer")
        self.kernel: ReproducingKernel = kernel
        self.passes: int = passes
        self.loss, self.step = loss, step
        self.batch: int | None = batch
        self.outputs: tuple[int, ...] | None = outputs
        self.generator: torch.Generator | None = generator
        self._function: KernelSum | None = None
        self._losses: tuple[Tensor, ...] = ()
        self._targets: torch.Size | None = None  # the shape of one

    def __repr__(self) -> str:
        return f"FunctionalGradientDescent({self.kernel!r}, step={self.step!r}, passes={self.passes})"

    @property
    def function(self) -> KernelSum:
        """The present f."""
        if self._function is None:
            raise RuntimeError("there is no function yet: call fit(x, target) or partial_fit(x, target) first")
        return self._function

    @property
    def loss_curve(self) -> Tensor:
        """The loss of every step's examples before that step, [t]."""
        return torch.stack(self._losses) if self._losses else torch.empty(0)

    def predict(self, x: Any) -> Tensor:
        """f(x) [m *out] for inputs x [m *shape]."""
        with torch.no_grad():
            return self.function(x)

    def fit(self, x: Tensor, target: Tensor) -> FunctionalGradientDescent:
        """``passes`` passes over the data x [n *shape], target [n …], from f = 0. The centres are the data."""
        centres = centres_of(x)
        n = _check_data(centres, target)
        needed = n**2 * max(centres.element_size(), 4)
        if self.batch is None and needed > _MEMORY:
            raise MemoryBoundError(
                f"the Gram matrix of {n} examples needs {needed:,} bytes, over {_MEMORY:,}: take a few examples a step "
                "with batch="
            )
        kernel = self.kernel.at(x)
        with torch.no_grad():
            rows = kernel(centres) if self.batch is None else None
            first = kernel(centres[:1], centres) if rows is None else rows
            c = first.new_zeros(n, *self._shape(target))
            losses = []
            for t, chosen in enumerate(self._choices(n, centres.device), start=1):
                K = kernel(centres[chosen], centres) if rows is None else rows[chosen]
                loss, gradient = self._differentiated(torch.tensordot(K, c, dims=1), target[chosen])
                losses.append(loss)
                c[chosen] -= self._step(t) * gradient
        self._accept(KernelSum(kernel, centres, c), tuple(losses), target)
        return self

    def partial_fit(self, x: Tensor, target: Tensor) -> FunctionalGradientDescent:
        """One step on the given examples, which become new centres of f. The first call starts from f = 0.

        A lengthscale that is measured comes from the examples of the first call, which must differ.
        """
        centres = centres_of(x)
        n, f = _check_data(centres, target), self._function
        if self._targets is not None and target.shape[1:] != self._targets:  # a loss might broadcast them
            raise ValueError(
                f"targets {tuple(target.shape)}: one of them has the shape {tuple(target.shape[1:])}, and those before "
                f"had {tuple(self._targets)}. Reshape them to the shape of the first, or start anew with fit"
            )
        with torch.no_grad():
            kernel = self.kernel.at(x) if f is None else f.kernel
            y = kernel(centres[:1], centres).new_zeros(n, *self._shape(target)) if f is None else f(centres)
            loss, gradient = self._differentiated(y, target)
            added = KernelSum(kernel, centres, -self._step(len(self._losses) + 1) * gradient)
            self._accept(added if f is None else f + added, (*self._losses, loss), target)
        return self

    def _accept(self, f: KernelSum, losses: tuple[Tensor, ...], target: Tensor) -> None:
        """Take the new state if it is finite."""
        if not bool(f.coefficients.isfinite().all()):
            raise NonFiniteError(
                "functional gradient descent holds NaN or infinity. The step is too long (for ½‖y − t‖² it must be "
                "below 2/λ_max(K), and λ_max ≤ n for a normalised kernel), or the data are not finite. Nothing was "
                "changed"
            )
        self._function, self._losses, self._targets = f, losses, target.shape[1:]

    def _differentiated(self, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        return value_and_differential(lambda outputs: self.loss(outputs, target), y)

    def _step(self, t: int) -> float:
        η = self.step(t) if callable(self.step) else self.step
        _check_step(η)
        return η

    def _shape(self, target: Tensor) -> tuple[int, ...]:
        if self.outputs is None and not target.is_floating_point():
            raise ValueError(f"targets are {target.dtype}, no function values: pass outputs=, the shape of f(x_n)")
        return tuple(target.shape[1:]) if self.outputs is None else self.outputs

    def _choices(self, n: int, device: torch.device) -> Iterator[Tensor | slice]:
        """The examples of every step."""
        for _ in range(self.passes):
            if self.batch is None:
                yield slice(None)
                continue
            order = torch.arange(n) if self.generator is None else torch.randperm(n, generator=self.generator)
            yield from order.to(device).split(self.batch)


def _check_step(step: float) -> None:
    if not is_number(step) or not (math.isfinite(step) and step > 0):
        raise ValueError(f"step={step!r} must be a positive, finite number, or a function of t = 1, 2, … to one")


def _check_data(x: Tensor, target: Tensor) -> int:
    if x.ndim == 0 or target.ndim == 0 or len(x) != len(target) or len(x) == 0:
        raise ValueError(
            f"inputs {tuple(x.shape)} and targets {tuple(target.shape)}: they need the same number of examples, at "
            "least one, on the first axis"
        )
    for what, values in (("the tensor of inputs", x), ("the tensor of targets", target)):
        if values.is_floating_point():
            check_finite(values, what)
    return len(x)
