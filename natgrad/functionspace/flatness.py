"""The flatness of a minimum: the volume of its basin in the pullback metric, which depends on no coordinates.

Read from top to bottom: ``flatness`` and its result; which points belong to the basin (``Basin``); random lines through
it (``Lines``) and coordinates in which it is round (``fit_coordinates``); the mean of line integrals, with an error bar
that survives heavy tails (``TailedMean``).

None of these can go without a silently wrong answer. A basin is a connected component, and whether a point is seen from
θ0 along a straight ray depends on the coordinates: without paths around corners the volume of a ring would depend on
them. Basins of networks are long and thin: lines that are uniform in the wrong coordinates miss most of the volume, and
a standard error does not notice.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.temporaries import TEMPORARY, at_once
from natgrad.errors import MemoryBoundError, NonFiniteError, SingularMetricError
from natgrad.geometry import unflatten
from natgrad.linalg import eigh, is_number, svd, svdvals
from natgrad.model import Inputs, Model, map_tensors
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.pullbacks.pullback import Pullback, pullback, root_at

_log = logging.getLogger("natgrad")

_DOUBLINGS = 20  # of the distance at which the loss reaches the level: the default radius
# Lines: a ray is cut on a logarithmic scale into so many octaves, with so many pieces each.
_OCTAVES, _PIECES = 8, 8
_PILOT, _PILOT_ROUNDS = 256, 64  # lines in a round that fits the coordinates, and rounds at most
_ROUNDNESS = 0.05  # share of the mean second moment in all directions: a few lines must not flatten the coordinates
_ROUND_ENOUGH = 5.0  # ratio of the second moments of a basin in fitted coordinates
# Paths: points are joined to the nearest landmarks, half of them new, by segments on which the loss is evaluated.
_LANDMARKS, _NEAREST, _SEGMENT_POINTS, _PATH_ROUNDS = 512, 4, 8, 256
# Tails: the fewest numbers that show a tail, and the index of one that is not shown (the largest with a variance).
_FEWEST, _UNKNOWN_INDEX = 5, 0.5


@final
@dataclass(frozen=True)
class Volume:
    """An estimate of a volume with its error, kept as a logarithm.

    Args:
        log: The logarithm of the volume: in many dimensions the volume itself over- or underflows.
        relative_error: The standard error or, where a few of the random lines hold most of the volume, a larger number:
            it then includes what heavier lines than all that were drawn are expected to add, and is infinite where they
            have no mean.

    Example:
        >>> Volume(math.log(2.0), 0.01)
        2 ± 0.02
    """

    log: float
    relative_error: float

    @property
    def value(self) -> float:
        """The volume itself; infinite if it overflows."""
        return math.exp(self.log) if self.log < 709 else math.inf

    @property
    def error(self) -> float:
        """The error of ``value``."""
        return self.value * self.relative_error if self.relative_error < math.inf else math.inf

    def __repr__(self) -> str:
        return f"{self.value:.4g} ± {self.error:.2g}"


@final
@dataclass(frozen=True)
class Flatness:
    """The volume of a basin of the loss, in coordinates-free and in Euclidean units.

    Attributes:
        volume: ∫ √det G dθ, which does not depend on coordinates.
        euclidean: ∫ dθ, which does.
        radius: The distance from θ0 of the farthest point of the basin, a length in the pullback metric at θ0.
        fraction: The fraction of the drawn points that lie in the basin.
        elsewhere: Of the points below the level, the fraction with no path to θ0: other basins, or missed ones.
        heaviest: The largest share of one line in the volume: errors are large where it is many times 1/samples.
    """

    volume: Volume  # ∫ √det G dθ
    euclidean: Volume  # ∫ dθ
    radius: float  # the distance from θ0 of the farthest point of the basin, a length in the pullback metric at θ0
    fraction: float  # the fraction of the drawn points that lie in the basin
    elsewhere: float  # of the points below the level, the fraction with no path to θ0: other basins, or missed ones
    heaviest: float  # the largest share of one line in the volume: errors are large where it is many times 1/samples


def flatness(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    epsilon: float,
    metric: OutputMetric | Criterion,
    target: Any = None,
    *,
    loss: Callable[[Tensor], Tensor] | None = None,
    samples: int = 1024,
    radius: float | None = None,
    generator: torch.Generator | None = None,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
) -> Flatness:
    """The volume of the basin around a minimum, the same in all coordinates; for few parameters.

    For networks use ``basin_volume``, of second order. An over-parametrised model has det G = 0 everywhere, and is
    refused.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        x: The inputs at which the outputs are compared.
        epsilon: ε > 0, the level: how much the loss may rise inside the basin.
        metric: The metric on the outputs, or the loss.
        target: What a batch holds besides the inputs and the metric needs, such as labels or a mask.
        loss: A function of the outputs [n *out]; by default the mean divergence of the metric from the present outputs,
            so that θ0 is a minimum.
        samples: The number of random lines through θ0.
        radius: Refuse a basin that reaches farther from θ0, a length in the metric there; by default 2^20 times the
            distance at which the loss reaches the level.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.
        params: The parameters of a pure function, by name; a module has its own.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.

    Returns:
        A ``Flatness``: the volume, the Euclidean one, and how well both are known.

    Method:
        ∫_S √det G dθ (Bai, Rosenberg and Xu 2022, definition 7), where S is the connected component of {L < L(θ0) + ε}
        that contains θ0, and G the pullback of ``metric`` at every θ in it.

        Monte Carlo: random lines, uniform in coordinates in which S is about round, are cut into 65 pieces on either
        side, and a point is drawn in each. Each line gives an unbiased estimate. The error grows with the number of
        parameters, the faster the less S is an ellipsoid.

        S need not be convex, nor star-shaped: a point behind a gap counts if it can be joined to θ0 through other drawn
        points (``Basin``). Gaps, bridges and spikes thinner than the spacing of the points are missed.

        Where S has long arms that few lines meet, as for a network with units that hardly matter, the error includes
        what a fitted power-law tail leads to expect (``TailedMean``), and the log "natgrad" warns. An arm that no line
        has met is in no error.

    Example:
        >>> import natgrad as ng
        >>> line = {"w": torch.zeros(1, dtype=torch.float64)}  # y = 3w, L = y²: the interval |w| < 1/3, and |y| < 1
        >>> result = flatness(
        ...     lambda p, x: 3 * p["w"], None, 1.0, ng.Euclidean(), loss=lambda y: y.square().sum(), params=line
        ... )
        >>> abs(result.volume.value - 2) < 0.02, abs(result.euclidean.value - 2 / 3) < 0.01
        (True, True)
    """
    metric = metric_of(metric)
    _check_arguments(epsilon, samples, radius, metric)
    pb = pullback(model, x, metric, target, params=params, output=output)
    _check_loss(loss, pb)
    generator = generator or fresh_generator(pb.y.device)
    with torch.no_grad():
        basin = Basin.around(pb, loss, epsilon, generator)
        scale = _scale(basin, math.sqrt(2 * epsilon), generator)
        limit = scale * 2.0**_DOUBLINGS if radius is None else radius
        lines = Lines.through(fit_coordinates(basin, scale, limit, generator), 2.0, samples, limit, generator)
    volume, euclidean = lines.volume(), lines.euclidean()
    inside, below = int(lines.inside.sum()), int(lines.below.sum())
    return Flatness(
        volume=_warn_if_guessed("volume", volume, samples),
        euclidean=_warn_if_guessed("euclidean", euclidean, samples),
        radius=lines.length,
        fraction=inside / lines.inside.numel(),
        elsewhere=(below - inside) / max(below, 1),
        heaviest=volume.heaviest,
    )


def _warn_if_guessed(name: str, mean: TailedMean, samples: int) -> Volume:
    """The volume; warn when its error bar is an extrapolation."""
    if mean.guessed:
        _log.warning(
            "flatness: the error of %s is a guess, %.2g of its value. One of %d random lines holds %.0f %% of it, and "
            "heavier ones than all that were drawn are to be expected (tail index %.2f; from 1 on they have no mean, "
            "and the error is infinite): the basin has long arms that few lines meet. Lower epsilon=, raise samples=, "
            "or freeze the parameters that the outputs hardly determine. basin_volume is for networks",
            *(name, mean.relative_error, samples, 100 * mean.heaviest, mean.index),
        )
    return Volume(mean.log, mean.relative_error)


def _scale(basin: Basin, start: float, generator: torch.Generator) -> float:
    """A radius, to a factor of two, at which there are points below the level."""
    u = _directions(_PILOT, basin.θ0, generator)
    radius = start
    for _ in range(_DOUBLINGS**2):
        if bool(basin.below(radius * u).any()):
            return radius
        radius /= 2
    raise ValueError(
        "the loss is above its value at the parameters plus epsilon at all distances: it is not continuous there, or "
        "epsilon= is below its rounding"
    )


def _check_loss(loss: Callable[[Tensor], Tensor] | None, pb: Pullback) -> None:
    if loss is None and pb.coupling is not None:
        raise ValueError(
            f"{pb.metric!r} couples the examples, and its divergence does not know that: pass loss=, a function of the "
            "outputs [n *out]"
        )
    if loss is not None:
        value = loss(pb.y.detach())
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise ValueError("loss= must be a function from the outputs [n *out] to one number: reduce it by .mean()")


def _check_arguments(epsilon: float, samples: int, radius: float | None, metric: OutputMetric) -> None:
    if not is_number(epsilon) or not 0 < epsilon < math.inf:
        raise ValueError(f"epsilon={epsilon!r} must be a positive, finite number: how far the loss may rise")
    if not is_number(samples, whole=True) or samples < 2:
        raise ValueError(f"samples={samples!r} must be an integer of at least 2: one line has no error bar")
    if radius is not None and not 0 < radius < math.inf:
        raise ValueError(f"radius={radius!r} must be positive and finite, or None to look as far as is needed")
    metric.check_everywhere("flatness")
    if not metric.exact:
        raise ValueError(
            f"{metric!r} is sampled, and the determinant of a sampled metric is biased: take the exact one"
        )


@final
@dataclass(frozen=True)
class Basin:
    """The connected component of {L < level} that contains θ0, in coordinates η of the parameters, θ = θ0 + A T η.

    In the frame A alone G is the identity at η = 0; T stretches it. log |det T| is accumulated: that of a long and thin
    T cannot be computed from its entries.

    A point of a ray is in the basin if all points of the ray up to it are below the level. A point behind a gap is in
    it if a path of segments below the level joins it, by way of other drawn points, to such a point. Points without a
    path count as another component.
    """

    pullback: Pullback  # at θ0
    loss: Callable[[Tensor], Tensor] | None  # of outputs [n *out]; None: the mean divergence of the metric from y0
    frame: Tensor  # A [p p]
    stretch: Tensor  # T [p p]
    log_stretch: float = 0.0  # log |det T|
    level: float | Tensor = math.inf

    @staticmethod
    def around(
        pb: Pullback, loss: Callable[[Tensor], Tensor] | None, epsilon: float, generator: torch.Generator
    ) -> Basin:
        """In coordinates in which G is the identity at θ0, or around it, where G is singular at θ0 alone."""
        θ0 = pb.template.flatten()
        p = len(θ0)
        _check_size(pb, p)
        eye = torch.eye(p, dtype=θ0.dtype, device=θ0.device)
        basin = Basin(pb, loss, frame=eye, stretch=eye)
        B = basin._roots(θ0[None])[0]
        if not _has_full_rank(B):
            noise = torch.randn(8, p, generator=generator, dtype=θ0.dtype, device=θ0.device)
            around = basin._roots(θ0 + 1e-2 * (1 + θ0.abs()) * noise)
            if not any(_has_full_rank(b) for b in around):
                values = svdvals(around, "the root of the metric")
                _refuse_rank(int((values > _rank_tolerance(around) * values[:, :1]).sum(1).max()), p)
            B = around.flatten(0, 1) / len(around) ** 0.5
        _, σ, Vh = svd(B, "the root of the metric")
        basin = replace(basin, frame=Vh.T / σ)
        lowest = basin.losses(torch.zeros_like(θ0)[None])[0]
        if not bool(lowest.isfinite()):
            raise NonFiniteError(f"the loss is {float(lowest)} at the parameters: there is no basin around them")
        if not bool(lowest + epsilon > lowest):
            raise ValueError(
                f"epsilon={epsilon:g} is below the rounding of the loss {float(lowest):g} in {lowest.dtype}: raise it, "
                "or use a double model"
            )
        return replace(basin, level=lowest + epsilon)

    def stretched(self, F: Tensor) -> Basin:
        """Other coordinates η', η = F η' with F [p p]."""
        log_det = float(torch.linalg.slogdet(F.double()).logabsdet)
        return replace(self, stretch=self.stretch @ F, log_stretch=self.log_stretch + log_det)

    @cached_property
    def θ0(self) -> Tensor:
        """The parameters [p]."""
        return self.pullback.template.flatten()

    @cached_property
    def _chart(self) -> Tensor:
        """A T [p p]."""
        return self.frame @ self.stretch

    @cached_property
    def _mixing(self) -> Tensor | None:
        """L [n m] of a coupling C = L Lᵀ of the examples."""
        return None if self.pullback.coupling is None else self.pullback.mixing()

    def lengths(self, η: Tensor) -> Tensor:
        """The distance from θ0 [m], as a length in the metric there."""
        return (η @ self.stretch.T).norm(dim=-1)

    @property
    def log_frame(self) -> float:
        """log |det A T|: a volume in η times |det A T| is one in θ."""
        return float(torch.linalg.slogdet(self.frame.double()).logabsdet) + self.log_stretch

    def losses(self, η: Tensor) -> Tensor:
        """L [m] at η [m p]; infinity is a loss, NaN is refused."""
        numbers = self.pullback.y.numel() + len(self.θ0)
        losses = torch.cat([self._losses(chunk) for chunk in _chunks(η, numbers)]) if len(η) else η.new_empty(0)
        if bool(losses.isnan().any()):
            at = float(self.lengths(η[losses.isnan()]).min())
            raise NonFiniteError(
                f"the loss is NaN at the distance {at:.3g} from the parameters (a length in the metric there), where "
                "the basin was looked for: lower epsilon=, or give a loss that is a number or infinite there"
            )
        return losses

    def _losses(self, η: Tensor) -> Tensor:
        y = torch.func.vmap(self._outputs)(self.θ0 + η @ self._chart.T)
        if self.loss is not None:
            return torch.func.vmap(self.loss)(y).reshape(len(η))
        m, n = y.shape[:2]
        y0 = self.pullback.y.detach()
        ρ = self.pullback.metric.divergence(y.flatten(0, 1), y0.expand(m, *y0.shape).flatten(0, 1), self._targets(m))
        return ρ.view(m, n).mean(1)

    def log_volumes(self, η: Tensor) -> Tensor:
        """log √det G [m] of the volume form in the coordinates η; −∞ where G is singular."""
        logs = [self._log_volumes(chunk) for chunk in _chunks(η, self.pullback.y.numel() * len(self.θ0))]
        return torch.cat(logs) if logs else η.new_empty(0, dtype=torch.float64)

    def _log_volumes(self, η: Tensor) -> Tensor:
        # √det(BᵀB) is the product of the diagonal of R in B = QR; forming BᵀB would lose half of the digits. In the
        # frame B is near the identity, and det T is a factor.
        B = self._roots(self.θ0 + η @ self._chart.T) @ self.frame
        R = torch.linalg.qr(B.double(), mode="r").R
        return R.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) + self.log_stretch

    def _roots(self, θ: Tensor) -> Tensor:
        """B [m (k n) p] with G = BᵀB at every θ [m p]."""

        def outputs_twice(θ: Tensor) -> tuple[Tensor, Tensor]:
            y = self._outputs(θ)
            return y, y

        J, y = torch.func.vmap(torch.func.jacfwd(outputs_twice, has_aux=True))(θ)  # [m n *out p], [m n *out]
        m, n = y.shape[:2]
        s = root_at(self.pullback.metric, y.flatten(0, 1), self._targets(m), None)
        s = s.reshape(len(s), m, n, -1)
        rows = torch.einsum("mndp,kmnd->mknp", J.reshape(m, n, -1, θ.shape[1]), s) / n**0.5
        if self._mixing is not None:
            rows = torch.einsum("nl,mknp->mklp", self._mixing.to(rows.dtype), rows)
        return rows.flatten(1, 2)

    def _outputs(self, θ: Tensor) -> Tensor:
        pb = self.pullback
        return pb.model(unflatten(θ, pb.model.params), pb.batch.x)

    def _targets(self, m: int) -> Any:
        return map_tensors(self.pullback.batch.target, lambda t: t.expand(m, *t.shape).flatten(0, 1))

    def below(self, η: Tensor) -> Tensor:
        """L < level [...] at η [... p]."""
        return (self.losses(η.flatten(0, -2)) < self.level).view(η.shape[:-1])

    def inside(self, η: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which points η [u j p] of rays u, from the inside out, are in the basin, and which are below the level."""
        below = self.below(η)
        inside = below.cummin(1).values
        behind = below & ~inside
        if bool(behind.any()):
            inside[behind] = self._connected(η[inside], η[behind], generator)
        return inside, below

    def _connected(self, members: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
        """Which of the others [m p] a path below the level joins to a member of the basin, or to η = 0."""
        connected = torch.zeros(len(others), dtype=torch.bool, device=others.device)
        newest = members = torch.cat([others.new_zeros(1, others.shape[1]), members])
        for _ in range(_PATH_ROUNDS):
            landmarks = torch.cat([_some(newest, generator), _some(members, generator)])
            open_ones = (~connected).nonzero()[:, 0]
            visible = [self._sees(chunk, landmarks) for chunk in _chunks(others[open_ones], len(landmarks))]
            new = open_ones[torch.cat(visible)] if visible else open_ones
            if len(new) == 0:
                break
            connected[new] = True
            newest = others[new]
            members = torch.cat([members, newest])
        return connected

    def _sees(self, points: Tensor, landmarks: Tensor) -> Tensor:
        """Which points [m p] have a segment below the level to one of their nearest landmarks [l p]."""
        count = min(_NEAREST, len(landmarks))
        near = torch.cdist(points, landmarks).topk(count, largest=False).indices  # [m c]
        t = torch.linspace(0, 1, _SEGMENT_POINTS + 2, dtype=points.dtype, device=points.device)[1:-1, None]
        segments = torch.lerp(points[:, None, None], landmarks[near][:, :, None], t)  # [m c t p]
        return self.below(segments).all(-1).any(-1)


def _check_size(pb: Pullback, p: int) -> None:
    """Refuse, before anything is allocated, more parameters than rows, and matrices that do not fit."""
    if pb.columns * pb.n < p:
        _refuse_rank(pb.columns * pb.n, p)
    needed = (pb.columns * pb.n + pb.y.numel()) * p * pb.y.element_size()
    if needed > pb.memory:
        raise MemoryBoundError(
            f"the Jacobian and the rows of the metric for {pb.n} examples and {p:,} parameters need {needed:,} "
            f"bytes at every point, over {pb.memory:,}: flatness is for small models; give fewer inputs, freeze "
            "parameters, or use basin_volume"
        )


def _refuse_rank(rank: int, p: int) -> None:
    raise SingularMetricError(
        f"the pullback metric has rank {rank} of {p} parameters, here and around: the model is over-parametrised on "
        "these inputs, √det G = 0, and the volume of every basin is exactly 0. Freeze the parameters that the outputs "
        "do not determine with requires_grad_(False), or give more inputs; basin_volume has a volume for such a model"
    )


def _chunks(points: Tensor, numbers: int) -> Iterator[Tensor]:
    """The points in chunks that fit into memory, where each point needs so many numbers."""
    return iter(points.split(at_once(numbers, TEMPORARY)) if len(points) else ())


def _has_full_rank(B: Tensor) -> bool:
    values = svdvals(B, "the root of the metric")
    return len(values) == B.shape[1] and bool(values[-1] > _rank_tolerance(B) * values[0])


def _rank_tolerance(B: Tensor) -> float:
    return max(B.shape[-2:]) * torch.finfo(B.dtype).eps


def _some(points: Tensor, generator: torch.Generator) -> Tensor:
    """A random half set of landmarks from the points."""
    order = torch.randperm(len(points), generator=generator, device=points.device)
    return points[order[: _LANDMARKS // 2]]


def _directions(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere, [u p]."""
    u = torch.randn(count, len(like), generator=generator, dtype=like.dtype, device=like.device)
    return u / u.norm(dim=1, keepdim=True)


def fit_coordinates(basin: Basin, scale: float, limit: float, generator: torch.Generator) -> Basin:
    """The basin in coordinates in which it is about as large in all directions, fitted by rounds of pilot lines.

    The second moments E[η ηᵀ] of all rounds count, each with the volume that its lines found: an arm that was met once
    is not forgotten, and what a few lines happen to meet matters the less, the more lines there were before. It ends
    when two rounds in a row had little to add.
    """
    p = len(basin.θ0)
    reach, settled = 2 * scale, 0
    log_volume: Tensor | None = None  # log ∫ dθ summed over the rounds, up to a constant
    moment = basin.θ0.new_zeros(p, p)  # E[η ηᵀ] in the present coordinates
    for _ in range(_PILOT_ROUNDS):
        new_log, new_moment = Lines.through(basin, reach, _PILOT, limit, generator).extent()
        logs = new_log[None] if log_volume is None else torch.stack([log_volume, new_log])
        moment = torch.lerp(moment, new_moment, logs.softmax(0)[-1])
        log_volume = logs.logsumexp(0)
        # (p + 2) E[η ηᵀ] is the identity for the unit ball.
        ball = (p + 2) * moment
        sphere = ball.trace() / p * torch.eye(p, dtype=ball.dtype, device=ball.device)
        squares, vectors = eigh(torch.lerp(ball, sphere, _ROUNDNESS), "the second moment of the basin")
        root = squares.sqrt()
        basin = basin.stretched(vectors * root)
        dual = vectors / root  # F⁻ᵀ
        moment = dual.T @ moment @ dual
        settled = settled + 1 if bool(squares[-1] < _ROUND_ENOUGH * squares[0]) else 0
        if settled == 2:
            return basin
        reach = 2.0
    raise ValueError(
        f"the basin did not fit into an ellipsoid after {_PILOT_ROUNDS} rounds of {_PILOT} random lines: each had more "
        "to add to its extent. It is unbounded, with an infinite volume (a direction in which the loss does not "
        "rise), or too long and thin. Lower epsilon=, or freeze the parameters that the loss does not determine with "
        "requires_grad_(False)"
    )


@final
@dataclass(frozen=True)
class Lines:
    """Random lines through η = 0: a point in each piece j of each ray u; the second half of the rays is −u."""

    basin: Basin
    η: Tensor  # [u j p]
    r: Tensor  # [u j]
    width: Tensor  # [j]
    inside: Tensor  # [u j]
    below: Tensor  # [u j]

    @staticmethod
    def through(basin: Basin, reach: float, count: int, limit: float, generator: torch.Generator) -> Lines:
        """So many lines, as long as the basin reaches and an octave more."""
        θ0 = basin.θ0
        while True:
            u = _directions(count, θ0, generator)
            exponents = torch.arange(-_OCTAVES * _PIECES, 1, dtype=θ0.dtype, device=θ0.device) / _PIECES
            outer = reach * torch.exp2(exponents)
            inner = torch.cat([outer.new_zeros(1), outer[:-1]])
            chance = torch.rand(2 * count, len(outer), generator=generator, dtype=θ0.dtype, device=θ0.device)
            r = torch.lerp(inner, outer, chance)  # [u j]
            η = r[..., None] * torch.cat([u, -u])[:, None]
            inside, below = basin.inside(η, generator)
            lines = Lines(basin, η, r, outer - inner, inside, below)
            if lines.length > limit:
                raise ValueError(
                    f"the basin reaches beyond the radius {limit:.3g} (a length in the metric at the parameters), "
                    "where the search ends: its volume may be infinite, as that of a loss with a flat direction, which "
                    "a network has where epsilon= allows to switch a hidden unit off. Lower epsilon=, raise radius=, "
                    "or freeze the parameters that the loss does not determine"
                )
            if not bool(lines.inside[:, -_PIECES:].any()):
                return lines
            reach = 2 * reach

    @property
    def length(self) -> float:
        """The distance from θ0 of the farthest point in the basin, a length in the metric there."""
        return float(self.basin.lengths(self.η[self.inside]).max()) if bool(self.inside.any()) else 0.0

    def extent(self) -> tuple[Tensor, Tensor]:
        """log ∫ dθ up to a constant, and E[η ηᵀ] [p p] over the basin."""
        p = self.η.shape[-1]
        logs = torch.where(self.inside, (p - 1) * self.r.log() + self.width.log(), -math.inf).flatten()
        moment = torch.einsum("m,mp,mq->pq", logs.softmax(0), *[self.η.flatten(0, 1)] * 2)
        return logs.logsumexp(0) + self.basin.log_frame, moment

    def volume(self) -> TailedMean:
        """∫ √det G dθ."""
        outside = torch.full_like(self.r, -math.inf, dtype=torch.float64)
        return self._integral(outside.masked_scatter(self.inside, self.basin.log_volumes(self.η[self.inside])))

    def euclidean(self) -> TailedMean:
        """∫ dθ."""
        outside = torch.full_like(self.r, -math.inf, dtype=torch.float64)
        return self._integral(outside.masked_fill(self.inside, self.basin.log_frame))

    def _integral(self, log_form: Tensor) -> TailedMean:
        """∫ v dη = |S^{p−1}| E_u ∫ v r^{p−1} dr, for log v [u j] at the points: the mean of one number per line."""
        p = self.η.shape[-1]
        half_sphere = p / 2 * math.log(math.pi) - math.lgamma(p / 2)  # a line is two rays
        terms = log_form + (p - 1) * self.r.double().log() + self.width.double().log()  # [u j]
        return TailedMean.of(torch.stack(terms.chunk(2), dim=1).flatten(1).logsumexp(1) + half_sphere)


@final
@dataclass(frozen=True)
class TailedMean:
    """The mean of n positive numbers with a power-law tail, P(X > x) ~ x^{−1/k} with the ``index`` k, and its error.

    With k below ½ there is a variance, and the standard error is right. With more, numbers larger than all that were
    drawn decide. In a sample one number is expected beyond the quantile 1 − 1/n, where the largest lies, but the mean
    of what lies there is 1/(1 − k) times as large: ``missed`` is thus k/(1 − k) of the share of the largest, and
    infinite from k = 1 on, where there is no mean. The index is that of Hill (1975), from the 1.5√n largest numbers,
    plus one standard error.

    A tail from which no number was drawn is not noticed.

    >>> import torch
    >>> TailedMean.of(torch.tensor([1.0, 2.0, 3.0] * 100).log())
    TailedMean(log=0.693..., standard_error=0.0236..., heaviest=0.005..., index=0.0)
    """

    log: float
    standard_error: float  # over the mean
    heaviest: float  # the share of the largest number in the sum
    index: float

    @staticmethod
    def of(logs: Tensor) -> TailedMean:
        """From the logarithms [n] of the numbers, n > 1. A number may be zero."""
        logs, largest = logs.double(), logs.max()
        if bool(largest == -math.inf):
            return TailedMean(-math.inf, 0.0, 0.0, 0.0)
        values = (logs - largest).exp()
        mean = values.mean()
        return TailedMean(
            log=float(largest + mean.log()),
            standard_error=float(values.std() / mean) / len(values) ** 0.5,
            heaviest=float(1 / values.sum()),
            index=_tail_index(logs),
        )

    @property
    def missed(self) -> float:
        """What numbers larger than all that were drawn are expected to add, over the mean."""
        return self.heaviest * self.index / (1 - self.index) if self.index < 1 else math.inf

    @property
    def relative_error(self) -> float:
        """Standard error and missed tail, combined."""
        return math.hypot(self.standard_error, self.missed)

    @property
    def guessed(self) -> bool:
        """Whether the error is mostly about numbers that were not drawn."""
        return self.missed > self.standard_error


def _tail_index(logs: Tensor) -> float:
    """Hill's k plus its standard error, from logarithms [n]: the mean of log x − log u over the numbers x beyond u."""
    n = len(logs)
    size = int(min(n / 5, 1.5 * n**0.5))
    if size < _FEWEST:
        return _UNKNOWN_INDEX
    largest = logs.topk(size + 1).values
    if bool(largest[-1] == -math.inf):  # nearly all are zero
        return math.inf
    return float((largest - largest[-1]).sum() / size) * (1 + 1 / size**0.5)
