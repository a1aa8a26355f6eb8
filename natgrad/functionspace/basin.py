"""The volume of a basin to second order, for networks: from the spectrum of the metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import MemoryBoundError
from natgrad.lanczos import SpectralDensity, spectral_density
from natgrad.linalg import is_number
from natgrad.model import Inputs, Model
from natgrad.output.losses import Criterion
from natgrad.output.metric import OutputMetric
from natgrad.pullbacks.pullback import LoaderPullback, Pullback, pullback
from natgrad.show import as_html
from natgrad.structures.kernel import Kernel

_LARGEST = 4096  # rows of a Gram matrix whose eigenvalues are computed


@final
@dataclass(frozen=True)
class BasinVolume:
    """How much of a ball of parameters a basin of the loss holds, to second order; ``print`` it.

    All numbers but ``rank_bounds`` change with the units of the parameters. Standard errors are over the probes, and 0
    where all eigenvalues are known.

    Attributes:
        log_volume: −½ log det(1 + σ²G/ε), at most 0.
        error: The standard error of ``log_volume``.
        effective_dimension: Σ λ/(λ + ε/σ²), how many directions ε limits within σ (MacKay 1992).
        effective_dimension_error: Its standard error.
        trace: tr G. An estimate of it may be below the sharpness.
        trace_error: Its standard error.
        sharpness: λ_max, which all probes find, so that it has no error.
        rank_bounds: Two numbers between which the number of directions that the outputs see lies.
        density: The spectrum of G that all of them come from.
    """

    log_volume: float
    error: float
    effective_dimension: float
    effective_dimension_error: float
    trace: float
    trace_error: float
    sharpness: float
    rank_bounds: tuple[float, float]
    density: SpectralDensity

    _repr_html_ = as_html

    def __str__(self) -> str:
        low, high = self.rank_bounds
        return (
            f"log-volume {self.log_volume:.6g} ± {self.error:.2g}, to second order, as a share of a Gaussian ball\n"
            f"effective dimension {self.effective_dimension:.4g} ± {self.effective_dimension_error:.2g} of "
            f"{self.density.size}, rank {low:.0f} to {high:.0f}\n"
            f"trace {self.trace:.4g} ± {self.trace_error:.2g}, sharpness {self.sharpness:.4g}"
        )


def basin_volume(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    epsilon: float,
    metric: OutputMetric | Criterion,
    target: Any = None,
    *,
    scale: float = 1.0,
    probes: int = 8,
    steps: int = 100,
    generator: torch.Generator | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int | None = None,
) -> BasinVolume:
    """How flat a minimum of a network is, as the log of a volume of parameters, to second order.

    Over-parametrised models are welcome: a direction that the outputs do not see counts as the whole ball. The result
    depends on the units of the parameters, through ``scale``; ``flatness`` does not, and is for few parameters.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        x: The inputs at which the outputs are compared.
        epsilon: ε > 0, the level: how much the loss may rise inside the basin.
        metric: The metric on the outputs, or the loss: ``Fisher`` measures KL divergence.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        scale: σ, the standard deviation of the ball.
        probes: The number of random vectors, over which errors are estimated.
        steps: Products with G for each of them. With at most this many parameters or rows, all eigenvalues are
            computed.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.
        params: The parameters of a pure function, by name; a module has its own.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        memory: Bytes that a temporary may take; larger work is done in chunks.

    Returns:
        A ``BasinVolume``.

    Method:
        log E exp(−L(θ + δ)/ε) over δ ~ N(0, σ²), σ = ``scale``, for the loss L = ½δᵀGδ: −½ log det(1 + σ²G/ε).

        L is the divergence of the outputs from the present ones to second order, for ``Fisher`` the KL divergence. The
        number is the log of the share of the ball of radius about σ√P on which L stays below about ε: the Occam factor
        of MacKay (1992), with the ball as prior.

        With at most 4096 rows (examples times outputs, N·K) all eigenvalues come from the Gram matrix RRᵀ of the rows,
        which has those of G that are not zero: nothing is estimated, and the errors are 0. Above, or where that does
        not fit into memory, they come from products with G, by the Lanczos process.

        To second order a quantity without units knows nothing but the rank: in the metric G itself the basin of ½δᵀGδ
        is a ball of radius √2ε, of that dimension, at every minimum.

    Example:
        >>> import natgrad as ng
        >>> x = torch.eye(2, dtype=torch.float64)
        >>> found = basin_volume(nn.Linear(2, 1, bias=False).double(), x, 0.5, ng.Euclidean())  # G = ½·1, σ²G/ε = 1
        >>> round(found.log_volume, 9) == round(-math.log(2), 9), round(found.effective_dimension, 9)
        (True, 1.0)
    """
    for name, value in (("epsilon", epsilon), ("scale", scale)):
        if not is_number(value) or not 0 < value < math.inf:
            raise ValueError(f"{name}={value!r} must be a positive, finite number")
    pb = pullback(model, x, metric, target, generator, params=params, output=output, memory=memory)
    density = _of_rows(pb) or spectral_density(pb, probes=probes, steps=steps, generator=generator)
    ratio = scale**2 / epsilon
    positive = density.rounding  # below, eigenvalues are noise of either sign

    def clean(λ: Tensor) -> Tensor:
        return torch.where(λ > positive, λ, 0.0)

    halves, error = density.trace_of(lambda λ: 0.5 * torch.log1p(ratio * clean(λ)))
    dimension, dimension_error = density.trace_of(lambda λ: ratio * clean(λ) / (1 + ratio * clean(λ)))
    trace, trace_error = density.trace_of(clean)
    return BasinVolume(
        log_volume=-halves,
        error=error,
        effective_dimension=dimension,
        effective_dimension_error=dimension_error,
        trace=trace,
        trace_error=trace_error,
        sharpness=density.largest,
        rank_bounds=density.bounds_above(positive),
        density=density,
    )


def _of_rows(pb: Pullback | LoaderPullback) -> SpectralDensity | None:
    """All eigenvalues, from the Gram matrix of the rows; None where there are too many of them."""
    if isinstance(pb, LoaderPullback) or pb.columns * pb.n > _LARGEST:
        return None
    try:
        G = Kernel().estimate(pb)
    except MemoryBoundError:
        return None
    values = G.eigenvalues()
    zeros = G.layout.size - len(values)
    return SpectralDensity(
        G.layout.size, values[None], torch.ones_like(values)[None], len(values), zeros, G.layout.dtype, True
    )
