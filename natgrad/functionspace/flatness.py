"""The flatness of a minimum as a volume of functions, which no choice of coordinates changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import NonFiniteError
from natgrad.functionspace.basin import Basin, Landscape
from natgrad.model import Inputs, Model
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.pullback import pullback
from natgrad.slots import check_slots

_OCTAVES, _STRATA = 8, 8  # how far down a ray is cut on a logarithmic scale, and in how many pieces an octave
_PILOT = 256  # lines that find out how far the basin reaches
_ROUNDS = 32  # of pilot lines
_ROUNDNESS = 0.05  # of the mean second moment, added to all: a few lines must not flatten the coordinates
_SETTLED = 5.0  # the ratio of second moments of a basin that is round enough
_DOUBLINGS = 20  # of the distance at which the loss reaches the level
_HEAVY = 10.0  # times the share that a line has where all are alike, with which the standard error is no longer known

_log = logging.getLogger("natgrad")


@final
@dataclass(frozen=True)
class Volume:
    """An estimate of a volume with its standard error, kept as a logarithm: of many dimensions it under- or overflows.

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
        """The standard error of ``value``."""
        return self.value * self.relative_error

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
    heaviest: float  # the share of one line in the volume, at most: where it is many times 1/samples, doubt the errors


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
    seen. It is for few parameters: the error grows with their number, the faster the less S is an ellipsoid. Where S
    has long arms that few lines meet, the standard error knows nothing of what all lines missed: the log says so where
    ``heaviest`` is above 10/``samples``.

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
        found = _reached(_fitted(basin, scale, limit, generator), 2.0, samples, limit, generator).flatness()
    if found.heaviest * samples > _HEAVY:
        _log.warning(
            "one line of %d has %.2g of the volume of the basin, %.0f times its share: the basin has arms that few "
            "lines meet, the volume may be larger than it seems and its error bar too small. Raise samples= until "
            "neither changes, or lower epsilon=, where a basin is rounder",
            *(samples, found.heaviest, found.heaviest * samples),
        )
    return found


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
    u = _directions(_PILOT, basin.landscape.θ0, generator)
    radius = start
    for _ in range(_DOUBLINGS**2):
        if bool(basin.below(radius * u).any()):
            return radius
        radius /= 2
    raise ValueError(
        "the loss is above its value at the parameters plus epsilon at all distances: it is not continuous there, or "
        "epsilon= is below its rounding"
    )


def _fitted(basin: Basin, scale: float, limit: float, generator: torch.Generator) -> Basin:
    """The same basin, in coordinates in which it is about as large in all directions: found by pilot lines."""
    reach = 2 * scale
    for _ in range(_ROUNDS):
        drawn = _reached(basin, reach, _PILOT, limit, generator)
        moments, vectors = torch.linalg.eigh(drawn.second_moment())
        basin = replace(basin, landscape=basin.landscape.stretched(vectors * moments.sqrt()))
        reach = 2.0
        if bool(moments[-1] < _SETTLED * moments[0]):
            return basin
    raise ValueError(
        f"the basin did not fit into an ellipsoid after {_ROUNDS} rounds: it is unbounded, with an infinite volume (a "
        "direction in which the loss does not rise), or too thin and bent for random lines. Lower epsilon=, or freeze "
        "the parameters that the loss does not determine"
    )


def _reached(basin: Basin, reach: float, lines: int, limit: float, generator: torch.Generator) -> _Drawn:
    """Points of so many lines, as far out as the basin reaches and an octave more."""
    while True:
        drawn = _draw(basin, reach, lines, generator)
        if drawn.length > limit:
            raise ValueError(
                f"the basin reaches beyond the radius {limit:.3g} (a length in the metric at the parameters), where "
                "the search ends: its volume may be infinite, as that of a loss with a flat direction. Lower epsilon=, "
                "raise radius=, or freeze the parameters that the loss does not determine"
            )
        if not drawn.touches:
            return drawn
        reach = 2 * reach


def _draw(basin: Basin, reach: float, lines: int, generator: torch.Generator) -> _Drawn:
    like = basin.landscape.θ0
    u = _directions(lines, like, generator)
    exponents = torch.arange(-_OCTAVES * _STRATA, 1, dtype=like.dtype, device=like.device) / _STRATA
    outer = reach * torch.exp2(exponents)
    inner = torch.cat([outer.new_zeros(1), outer[:-1]])
    chance = torch.rand(2 * lines, len(outer), generator=generator, dtype=like.dtype, device=like.device)
    r = torch.lerp(inner, outer, chance)  # [u j]
    η = r[..., None] * torch.cat([u, -u])[:, None]
    inside, below = basin.inside(η, generator)
    return _Drawn(basin.landscape, η, r, outer - inner, inside, below)


def _directions(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere, [u p]."""
    u = torch.randn(count, len(like), generator=generator, dtype=like.dtype, device=like.device)
    return u / u.norm(dim=1, keepdim=True)


@final
@dataclass(frozen=True)
class _Drawn:
    """A point in each piece j of each ray u; the first half of the rays are opposite to the second."""

    landscape: Landscape
    η: Tensor  # [u j p]
    r: Tensor  # [u j]
    width: Tensor  # [j]
    inside: Tensor  # [u j]
    below: Tensor  # [u j]

    @property
    def touches(self) -> bool:
        """Whether the basin has points in the last octave."""
        return bool(self.inside[:, -_STRATA:].any())

    @property
    def length(self) -> float:
        """The distance from θ0 of the farthest point in the basin, a length in the metric there."""
        return float(self.landscape.lengths(self.η[self.inside]).max()) if bool(self.inside.any()) else 0.0

    def second_moment(self) -> Tensor:
        """(p + 2) E[η ηᵀ] of the basin [p p], the identity for the unit ball, made rounder to be safe from chance."""
        p = self.η.shape[-1]
        weights = torch.where(self.inside, (p - 1) * self.r.log() + self.width.log(), -math.inf).flatten().softmax(0)
        moment = (p + 2) * torch.einsum("m,mp,mq->pq", weights, *[self.η.flatten(0, 1)] * 2)
        round_part = moment.trace() / p * torch.eye(p, dtype=moment.dtype, device=moment.device)
        return torch.lerp(moment, round_part, _ROUNDNESS)

    def flatness(self) -> Flatness:
        outside = torch.full_like(self.r, -math.inf, dtype=torch.float64)
        form = outside.masked_scatter(self.inside, self.landscape.log_volumes(self.η[self.inside]))
        flat = outside.masked_fill(self.inside, self.landscape.log_frame)
        below = int(self.below.sum())
        return Flatness(
            volume=self._volume(form),
            euclidean=self._volume(flat),
            radius=self.length,
            fraction=int(self.inside.sum()) / self.inside.numel(),
            elsewhere=(below - int(self.inside.sum())) / max(below, 1),
            heaviest=self._heaviest(form),
        )

    def _volume(self, form: Tensor) -> Volume:
        """∫ v dη = |S^{p−1}| E_u ∫ v r^{p−1} dr, for log v [u j] at the points: one number a line, their mean."""
        p, lines = self.η.shape[-1], self._lines(form)
        largest = lines.max()
        if bool(largest == -math.inf):
            return Volume(-math.inf, 0.0)
        values = (lines - largest).exp() / 2
        mean, error = values.mean(), values.std() / len(values) ** 0.5
        sphere = math.log(2) + p / 2 * math.log(math.pi) - math.lgamma(p / 2)
        return Volume(float(largest + mean.log()) + sphere, float(error / mean))

    def _heaviest(self, form: Tensor) -> float:
        lines = self._lines(form)
        return float(lines.softmax(0).max()) if bool(lines.max() > -math.inf) else 0.0  # of no volume

    def _lines(self, form: Tensor) -> Tensor:
        """log Σ v r^{p−1} dr [line] over both sides."""
        terms = form + (self.η.shape[-1] - 1) * self.r.double().log() + self.width.double().log()  # [u j]
        return torch.stack(terms.chunk(2), dim=1).flatten(1).logsumexp(1)


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
