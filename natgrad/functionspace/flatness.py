"""The flatness of a minimum as a volume of functions, which no choice of coordinates changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import NonFiniteError
from natgrad.functionspace.basin import Basin, Landscape
from natgrad.functionspace.lines import PILOT, directions, fitted, reached
from natgrad.functionspace.tail import TailedMean
from natgrad.model import Inputs, Model
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.pullback import pullback
from natgrad.slots import check_slots

_log = logging.getLogger("natgrad")
_DOUBLINGS = 20  # of the distance at which the loss reaches the level


@final
@dataclass(frozen=True)
class Volume:
    """An estimate of a volume with its error, kept as a logarithm: of many dimensions it under- or overflows.

    The error is the standard error or, where a few of the random lines hold most of the volume, larger: then it counts
    what heavier lines than all that were drawn are expected to add, and is infinite where they have no mean.

    >>> Volume(math.log(2.0), 0.01)
    2 ± 0.02
    """

    log: float
    relative_error: float

    @property
    def value(self) -> float:
        return math.exp(self.log) if self.log < 709 else math.inf

    @property
    def error(self) -> float:
        """Of ``value``."""
        return self.value * self.relative_error if self.relative_error < math.inf else math.inf

    def __repr__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


@final
@dataclass(frozen=True)
class Flatness:
    """The volume of a basin in the pullback metric, and beside it the Euclidean one, which depends on coordinates."""

    volume: Volume  # ∫ √det G dθ
    euclidean: Volume  # ∫ dθ
    radius: float  # the distance from θ0 of the farthest point found, a length in the pullback metric at θ0
    fraction: float  # of the points that were drawn, how many are in the basin
    elsewhere: float  # of the points drawn below the level, how many no path was found to: other basins, or missed
    heaviest: float  # the share of one line in the volume, at most: where it is many times 1/samples, errors are large


def flatness(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    epsilon: float,
    metric: OutputMetric,
    target: Any = None,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    samples: int = 1024,
    radius: float | None = None,
    generator: torch.Generator | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Flatness:
    """The ε-flatness ∫_S √det G dθ of the loss at the model's parameters θ0 (000 definition 7, ERRATA 19).

    S is the connected component of {L < L(θ0) + ε} that contains θ0, and G the pullback of ``metric`` at every θ in
    it; the integral is the same in all coordinates. ``loss`` is a function of the outputs [n *out]; by default it is
    the mean divergence of the metric from the present outputs (for ``Fisher`` the KL divergence), so that θ0 is a
    minimum. An over-parametrised model has det G = 0 everywhere, and is refused.

    Monte Carlo: ``samples`` random lines through θ0, uniform in coordinates in which S is about round, are cut into
    65 pieces on either side, and a point is drawn in each. Each line gives an unbiased estimate, and together they give
    the standard error. S need not be convex, nor star-shaped: a point behind a gap counts if it can be joined to θ0
    through other points drawn (``Basin``). Gaps, bridges and spikes thinner than the distance of the points are not
    seen. It is for few parameters: the error grows with their number, the faster the less S is an ellipsoid.

    Where S has long arms that few lines meet, as that of a network with units that hardly matter, the lines that were
    drawn say little about those that were not. Their values then fall off like a power, which is fitted, and the error
    counts what it leads to expect (``TailedMean``); it is infinite where a mean of such values does not exist. A
    warning says so, in the log "natgrad". An arm that no line has met is in no error.

    ``radius``: refuse an S that reaches farther from θ0, a length in the metric there; by default 2^20 times the
    distance at which the loss reaches the level. An S that is seen to be unbounded is refused.

    >>> import natgrad as ng
    >>> line = {"w": torch.zeros(1, dtype=torch.float64)}  # y = 3w, L = y²: the interval |w| < 1/3, and |y| < 1
    >>> found = flatness(
    ...     lambda p, x: 3 * p["w"], None, 1.0, ng.Euclidean(), loss=lambda y: y.square().sum(), params=line
    ... )
    >>> abs(found.volume.value - 2) < 0.02, abs(found.euclidean.value - 2 / 3) < 0.01
    (True, True)
    """
    _check(epsilon, samples, radius, metric)
    landscape = _landscape(Model.of(model, params, output), x, metric, target, loss)
    generator = generator or fresh_generator(landscape.θ0.device)
    with torch.no_grad():
        landscape = landscape.framed(generator)
        lowest = landscape.losses(torch.zeros_like(landscape.θ0)[None])[0]
        basin = Basin(landscape, _level(lowest, epsilon))
        scale = _scale(basin, math.sqrt(2 * epsilon), generator)
        limit = scale * 2.0**_DOUBLINGS if radius is None else radius
        lines = reached(fitted(basin, scale, limit, generator), 2.0, samples, limit, generator)
    volume, euclidean = lines.volume(), lines.euclidean()
    return Flatness(
        volume=_told("volume", volume, samples),
        euclidean=_told("euclidean", euclidean, samples),
        radius=lines.length,
        fraction=lines.fraction,
        elsewhere=lines.elsewhere,
        heaviest=volume.heaviest,
    )


def _told(name: str, found: TailedMean, samples: int) -> Volume:
    """The volume; where its error is a guess, that is said."""
    if found.guessed:
        _log.warning(
            "flatness: the error of %s is a guess, %.2g of its value. One of %d random lines holds %.0f %% of it, and "
            "heavier ones than all that were drawn are to be expected (tail index %.2f; from 1 on they have no mean, "
            "and the error is infinite): the basin has long arms that few lines meet. Lower epsilon=, raise samples=, "
            "or freeze the parameters that the outputs hardly determine",
            *(name, found.relative_error, samples, 100 * found.heaviest, found.index),
        )
    return Volume(found.log, found.relative_error)


def _landscape(
    model: Model, x: Inputs, metric: OutputMetric, target: Any, loss: Callable[[Tensor], Tensor] | None
) -> Landscape:
    pb = pullback(model, x, metric, target)
    if loss is None and pb.coupling is not None:
        raise ValueError(
            f"{metric!r} couples the examples, and its divergence does not know that: pass loss=, a function of the "
            "outputs [n *out]"
        )
    if loss is not None:
        value = loss(pb.y.detach())
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("loss= must be a function from the outputs [n *out] to one number: reduce it by .mean()")
    return Landscape(pb, loss)


def _level(lowest: Tensor, epsilon: float) -> Tensor:
    if not bool(lowest.isfinite()):
        raise NonFiniteError(f"the loss is {float(lowest)} at the parameters: there is no basin around them")
    level = lowest + epsilon
    if not bool(level > lowest):
        raise ValueError(
            f"epsilon={epsilon:g} is below the rounding of the loss {float(lowest):g} in {lowest.dtype}: raise it, or "
            "use a double model"
        )
    return level


def _scale(basin: Basin, start: float, generator: torch.Generator) -> float:
    """A radius, to a factor of two, at which there are points below the level."""
    u = directions(PILOT, basin.landscape.θ0, generator)
    radius = start
    for _ in range(_DOUBLINGS**2):
        if bool(basin.below(radius * u).any()):
            return radius
        radius /= 2
    raise ValueError(
        "the loss is above its value at the parameters plus epsilon at all distances: it is not continuous there, or "
        "epsilon= is below its rounding"
    )


def _check(epsilon: float, samples: int, radius: float | None, metric: OutputMetric) -> None:
    if isinstance(epsilon, bool) or not isinstance(epsilon, (int, float)) or not (0 < epsilon < math.inf):
        raise ValueError(f"epsilon={epsilon!r} must be a positive, finite number: how far the loss may rise")
    if isinstance(samples, bool) or not isinstance(samples, int) or samples < 2:
        raise ValueError(f"samples={samples!r} must be an integer of at least 2: one line has no error bar")
    if radius is not None and not 0 < radius < math.inf:
        raise ValueError(f"radius={radius!r} must be positive and finite, or None to look as far as is needed")
    check_slots(metric=(metric, OutputMetric))
    if not metric.exact:
        raise ValueError(
            f"{metric!r} is sampled, and the determinant of a sampled metric is biased: take the exact one"
        )
