"""The flatness of a minimum as a volume of functions, which no choice of coordinates changes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import MemoryBoundError, NonFiniteError, SingularMetricError
from natgrad.geometry import unflatten
from natgrad.model import Inputs, Model, map_tensors
from natgrad.output.metric import OutputMetric, fresh_generator
from natgrad.pullback.pullback import Pullback, pullback, root_at
from natgrad.slots import check_slots

# The mean of positive numbers of which a few may hold the most, with an error that knows of those not yet seen.


_FEWEST = 5  # numbers that show a tail
_UNSEEN = 0.5  # the index of a tail that is not shown: the largest with a standard error


@final
@dataclass(frozen=True)
class TailedMean:
    """The mean of n numbers, which fall off like a power: P(X > x) ~ x^{−1/k} far out, with the ``index`` k.

    With k below ½ there is a variance, and the standard error is true. With more, numbers that are larger than all that
    were drawn decide. In a sample one is expected beyond the quantile 1 − 1/n, and the largest is there, but what may
    be there has a mean that is 1/(1 − k) times as large: ``missed`` is thus k/(1 − k) of the share of the largest, and
    from k = 1 on, where there is no mean, it is infinite. The index is that of Hill (1975), of the 1.5√n largest
    numbers, one standard error up.

    Of samples of 1024 numbers from a Pareto distribution the mean is within one and two such errors in 78 % and 93 %
    with k = 0.7, and in 86 % and 93 % with k = 0.9; within standard errors in 52 % and 76 %, and in 19 % and 36 %. Of a
    tail that no number comes from nothing is known.

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
        """Of the logarithms [n] of the numbers, n > 1. A number may be zero."""
        logs, largest = logs.double(), logs.max()
        if bool(largest == -math.inf):
            return TailedMean(-math.inf, 0.0, 0.0, 0.0)
        values = (logs - largest).exp()
        mean = values.mean()
        return TailedMean(
            log=float(largest + mean.log()),
            standard_error=float(values.std() / mean) / len(values) ** 0.5,
            heaviest=float(1 / values.sum()),
            index=_index(logs),
        )

    @property
    def missed(self) -> float:
        """What larger numbers than all that were drawn are expected to add, over the mean."""
        return self.heaviest * self.index / (1 - self.index) if self.index < 1 else math.inf

    @property
    def relative_error(self) -> float:
        """Of both."""
        return math.hypot(self.standard_error, self.missed)

    @property
    def guessed(self) -> bool:
        """Whether the error is mostly about numbers that were not drawn."""
        return self.missed > self.standard_error


def _index(logs: Tensor) -> float:
    """k and a standard error of it, from logarithms [n]: the mean of log x − log u over the numbers x beyond one, u."""
    n = len(logs)
    size = int(min(n / 5, 1.5 * n**0.5))
    if size < _FEWEST:
        return _UNSEEN
    largest = logs.topk(size + 1).values
    if bool(largest[-1] == -math.inf):  # nearly all are zero
        return math.inf
    return float((largest - largest[-1]).sum() / size) * (1 + 1 / size**0.5)


# A loss and the volume form of a pullback metric at many parameters at once, and which of them belong to one basin.


_ELEMENTS = 2**22  # numbers that are worked on at once
_LANDMARKS = 512  # points that others are joined to in one round, half of them new
_NEAREST = 4  # of them that a point is joined to
_STEPS = 8  # points of a segment at which the loss is looked at
_ROUNDS = 256


@final
@dataclass(frozen=True)
class Landscape:
    """L and √det G in coordinates η of the parameters, θ = θ0 + A T η, at many points η [m p] at once.

    In the frame A alone G is the identity at η = 0; T stretches it. Its determinant is kept: that of a long and thin
    T cannot be found from its entries.
    """

    pullback: Pullback  # at θ0
    loss: Callable[[Tensor], Tensor] | None  # of outputs [n *out]; None: the mean divergence of the metric from y0
    frame: Tensor | None = None  # A [p p]
    stretch: Tensor | None = None  # T [p p]
    log_stretch: float = 0.0  # log |det T|

    @cached_property
    def θ0(self) -> Tensor:
        """The parameters [p]."""
        return self.pullback.template.flatten()

    @property
    def y0(self) -> Tensor:
        """The outputs at θ0 [n *out]."""
        return self.pullback.y.detach()

    @cached_property
    def mixing(self) -> Tensor | None:
        """L [n m] of a coupling C = L Lᵀ of the examples."""
        return None if self.pullback.coupling is None else self.pullback.mixing()

    def framed(self, generator: torch.Generator) -> Landscape:
        """The same in coordinates in which G is the identity at θ0, or near it, where it is singular at θ0 alone."""
        self._admit()
        B = self._roots(self.θ0[None])[0]
        if not _regular(B):
            near = torch.randn(8, len(self.θ0), generator=generator, dtype=self.θ0.dtype, device=self.θ0.device)
            around = self._roots(self.θ0 + 1e-2 * (1 + self.θ0.abs()) * near)
            if not any(_regular(b) for b in around):
                values = torch.linalg.svdvals(around)
                rank = int((values > _cut(around) * values[:, :1]).sum(1).max())
                self._refuse(rank)
            B = around.flatten(0, 1) / len(around) ** 0.5
        _, σ, Vh = torch.linalg.svd(B, full_matrices=False)
        return replace(self, frame=Vh.T / σ, stretch=torch.eye(len(σ), dtype=σ.dtype, device=σ.device))

    def stretched(self, by: Tensor) -> Landscape:
        """The same in other coordinates, η = F η' with F [p p]."""
        assert self.stretch is not None
        more = float(torch.linalg.slogdet(by.double()).logabsdet)
        return replace(self, stretch=self.stretch @ by, log_stretch=self.log_stretch + more)

    def _admit(self) -> None:
        """Refuse, before anything is allocated, more parameters than rows, and more of both than fit."""
        pb, p = self.pullback, len(self.θ0)
        if pb.columns * pb.n < p:
            self._refuse(pb.columns * pb.n)
        needed = (pb.columns * pb.n + pb.y.numel()) * p * pb.y.element_size()
        if needed > pb.memory:
            raise MemoryBoundError(
                f"the Jacobian and the rows of the metric for {pb.n} examples and {p:,} parameters need {needed:,} "
                f"bytes at every point, over {pb.memory:,}: flatness is for small models; give fewer inputs, or freeze "
                "parameters"
            )

    def _refuse(self, rank: int) -> None:
        raise SingularMetricError(
            f"the pullback metric has rank {rank} of {len(self.θ0)} parameters, here and around: the model is "
            "over-parametrised on these inputs, √det G = 0, and the volume of every basin is exactly 0 (ERRATA 19). "
            "Freeze the parameters that the outputs do not determine with requires_grad_(False), or give more inputs"
        )

    def parameters(self, η: Tensor) -> Tensor:
        """θ [m p]."""
        return self.θ0 + (η if self._chart is None else η @ self._chart.T)

    @cached_property
    def _chart(self) -> Tensor | None:
        """A T [p p]."""
        return None if self.frame is None or self.stretch is None else self.frame @ self.stretch

    def lengths(self, η: Tensor) -> Tensor:
        """The distance from θ0 [m], as a length in the metric there."""
        return η.norm(dim=-1) if self.stretch is None else (η @ self.stretch.T).norm(dim=-1)

    @property
    def log_frame(self) -> float:
        """log |det A T|: a volume in η times |det A T| is one in θ."""
        assert self.frame is not None
        return float(torch.linalg.slogdet(self.frame.double()).logabsdet) + self.log_stretch

    def losses(self, η: Tensor) -> Tensor:
        """L [m]; infinity is a loss, NaN is refused."""
        each = self.y0.numel() + len(self.θ0)
        found = torch.cat([self._losses(part) for part in _split(η, each)]) if len(η) else η.new_empty(0)
        if bool(found.isnan().any()):
            at = float(self.lengths(η[found.isnan()]).min())
            raise NonFiniteError(
                f"the loss is NaN at the distance {at:.3g} from the parameters (a length in the metric there), where "
                "the basin was looked for: lower epsilon=, or give a loss that is a number or infinite there"
            )
        return found

    def _losses(self, η: Tensor) -> Tensor:
        y = torch.func.vmap(self._outputs)(self.parameters(η))
        if self.loss is not None:
            return torch.func.vmap(self.loss)(y).reshape(len(η))
        m, n = y.shape[:2]
        y0 = self.y0.expand(m, *self.y0.shape).flatten(0, 1)
        ρ = self.pullback.metric.divergence(y.flatten(0, 1), y0, self._targets(m))
        return ρ.view(m, n).mean(1)

    def log_volumes(self, η: Tensor) -> Tensor:
        """log √det G [m] of the volume form in the coordinates η; −∞ where G is singular."""
        assert self.frame is not None
        found = [self._log_volumes(part, self.frame) for part in _split(η, self.y0.numel() * len(self.θ0))]
        return torch.cat(found) if found else η.new_empty(0, dtype=torch.float64)

    def _log_volumes(self, η: Tensor, frame: Tensor) -> Tensor:
        # √det(BᵀB) is the product of the diagonal of the triangle of B. BᵀB itself would lose half of the digits.
        # In the frame B is near the identity, and T need not be multiplied.
        triangle = torch.linalg.qr((self._roots(self.parameters(η)) @ frame).double(), mode="r").R
        return triangle.diagonal(dim1=-2, dim2=-1).abs().log().sum(-1) + self.log_stretch

    def _roots(self, θ: Tensor) -> Tensor:
        """B [m (k n) p] with G = BᵀB at every θ [m p]."""
        J, y = torch.func.vmap(torch.func.jacfwd(self._twice, has_aux=True))(θ)  # [m n *out p], [m n *out]
        m, n = y.shape[:2]
        s = root_at(self.pullback.metric, y.flatten(0, 1), self._targets(m), None)
        s = s.reshape(len(s), m, n, -1)
        rows = torch.einsum("mndp,kmnd->mknp", J.reshape(m, n, -1, θ.shape[1]), s) / n**0.5
        if self.mixing is not None:
            rows = torch.einsum("nl,mknp->mklp", self.mixing.to(rows.dtype), rows)
        return rows.flatten(1, 2)

    def _outputs(self, θ: Tensor) -> Tensor:
        pb = self.pullback
        return pb.model(unflatten(θ, pb.model.params), pb.batch.x)

    def _twice(self, θ: Tensor) -> tuple[Tensor, Tensor]:
        y = self._outputs(θ)
        return y, y

    def _targets(self, m: int) -> Any:
        return map_tensors(self.pullback.batch.target, lambda t: t.expand(m, *t.shape).flatten(0, 1))


@final
@dataclass(frozen=True)
class Basin:
    """The connected component of {L < level} with η = 0 in it (000 definition 7 as ERRATA 19 has it).

    A point of a ray is in it if the ray is below the level all the way, as far as its points show. One behind a gap is
    in it if it can be joined to such a point by segments below the level, from point to point: the points drawn are the
    roadmap. What cannot be joined counts as another component.
    """

    landscape: Landscape
    level: Tensor

    def below(self, η: Tensor) -> Tensor:
        """L < level [...] at η [... p]."""
        return (self.landscape.losses(η.flatten(0, -2)) < self.level).view(η.shape[:-1])

    def inside(self, η: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Which of the points η [u j p] of rays u, from the inside out, are in the basin, and which below the level."""
        below = self.below(η)
        inside = below.cummin(1).values
        behind = below & ~inside
        if bool(behind.any()):
            inside[behind] = self._joined(η[inside], η[behind], generator)
        return inside, below

    def _joined(self, known: Tensor, others: Tensor, generator: torch.Generator) -> Tensor:
        """Which of the others [m p] a path of segments below the level joins to a known point, or to η = 0."""
        joined = torch.zeros(len(others), dtype=torch.bool, device=others.device)
        fresh = known = torch.cat([others.new_zeros(1, others.shape[1]), known])
        for _ in range(_ROUNDS):
            landmarks = torch.cat([_choose(fresh, generator), _choose(known, generator)])
            left = (~joined).nonzero()[:, 0]
            seen = [self._sees(part, landmarks) for part in _split(others[left], len(landmarks))]
            new = left[torch.cat(seen)] if seen else left
            if len(new) == 0:
                break
            joined[new] = True
            fresh = others[new]
            known = torch.cat([known, fresh])
        return joined

    def _sees(self, points: Tensor, landmarks: Tensor) -> Tensor:
        """Which points [m p] have a segment below the level to one of the nearest landmarks [l p]."""
        count = min(_NEAREST, len(landmarks))
        near = torch.cdist(points, landmarks).topk(count, largest=False).indices  # [m c]
        t = torch.linspace(0, 1, _STEPS + 2, dtype=points.dtype, device=points.device)[1:-1, None]
        segments = torch.lerp(points[:, None, None], landmarks[near][:, :, None], t)  # [m c t p]
        return self.below(segments).all(-1).any(-1)


def _choose(points: Tensor, generator: torch.Generator) -> Tensor:
    """Half of the landmarks, from the points."""
    order = torch.randperm(len(points), generator=generator, device=points.device)
    return points[order[: _LANDMARKS // 2]]


def _split(points: Tensor, each: int) -> Iterator[Tensor]:
    """The points in parts, of which each point needs so many numbers."""
    return iter(points.split(max(1, _ELEMENTS // max(each, 1))) if len(points) else ())


def _regular(B: Tensor) -> bool:
    values = torch.linalg.svdvals(B)
    return len(values) == B.shape[1] and bool(values[-1] > _cut(B) * values[0])


def _cut(B: Tensor) -> float:
    return max(B.shape[-2:]) * torch.finfo(B.dtype).eps


# Random lines through the parameters, the points of a basin on them, and coordinates in which it is about round.


OCTAVES, STRATA = 8, 8  # how far down a ray is cut on a logarithmic scale, and in how many pieces an octave
PILOT = 256  # lines that find out how far the basin reaches
_LINE_ROUNDS = 64  # of pilot lines
_ROUNDNESS = 0.05  # of the mean second moment, added to all: a few lines must not flatten the coordinates
_SETTLED = 5.0  # the ratio of second moments of a basin that is round enough


def directions(count: int, like: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform on the sphere, [u p]."""
    u = torch.randn(count, len(like), generator=generator, dtype=like.dtype, device=like.device)
    return u / u.norm(dim=1, keepdim=True)


def fitted(basin: Basin, scale: float, limit: float, generator: torch.Generator) -> Basin:
    """The same basin, in coordinates in which it is about as large in all directions: found by pilot lines.

    The lines of all rounds count, each round as much as the volume that it found: an arm that was met once is not
    forgotten, and what a few lines happen to meet matters the less, the more there were before. It ends where two
    rounds in turn had little to add.
    """
    reach, settled, seen = 2 * scale, 0, None
    for _ in range(_LINE_ROUNDS):
        found = reached(basin, reach, PILOT, limit, generator).extent()
        seen = found if seen is None else seen.joined(found)
        moments, vectors = torch.linalg.eigh(seen.rounded())
        root = moments.sqrt()
        basin = replace(basin, landscape=basin.landscape.stretched(vectors * root))
        seen = seen.seen_in(vectors / root)
        settled = settled + 1 if bool(moments[-1] < _SETTLED * moments[0]) else 0
        if settled == 2:
            return basin
        reach = 2.0
    raise ValueError(
        f"the basin did not fit into an ellipsoid after {_LINE_ROUNDS} rounds of {PILOT} random lines: each had more "
        "to add to its extent. It is unbounded, with an infinite volume (a direction in which the loss does not "
        "rise), or too long and thin. Lower epsilon=, or freeze the parameters that the loss does not determine with "
        "requires_grad_(False)"
    )


def reached(basin: Basin, reach: float, count: int, limit: float, generator: torch.Generator) -> Lines:
    """Points of so many lines, as far out as the basin reaches and an octave more."""
    while True:
        lines = _draw(basin, reach, count, generator)
        if lines.length > limit:
            raise ValueError(
                f"the basin reaches beyond the radius {limit:.3g} (a length in the metric at the parameters), where "
                "the search ends: its volume may be infinite, as that of a loss with a flat direction, which a network "
                "has where epsilon= allows to switch a hidden unit off. Lower epsilon=, raise radius=, or freeze the "
                "parameters that the loss does not determine"
            )
        if not lines.touches:
            return lines
        reach = 2 * reach


def _draw(basin: Basin, reach: float, count: int, generator: torch.Generator) -> Lines:
    like = basin.landscape.θ0
    u = directions(count, like, generator)
    exponents = torch.arange(-OCTAVES * STRATA, 1, dtype=like.dtype, device=like.device) / STRATA
    outer = reach * torch.exp2(exponents)
    inner = torch.cat([outer.new_zeros(1), outer[:-1]])
    chance = torch.rand(2 * count, len(outer), generator=generator, dtype=like.dtype, device=like.device)
    r = torch.lerp(inner, outer, chance)  # [u j]
    η = r[..., None] * torch.cat([u, -u])[:, None]
    inside, below = basin.inside(η, generator)
    return Lines(basin.landscape, η, r, outer - inner, inside, below)


@final
@dataclass(frozen=True)
class Extent:
    """How large a basin is: log ∫ dη up to a constant, in coordinates that stay, and E[η ηᵀ] [p p] in present ones."""

    log_volume: Tensor
    moment: Tensor

    def joined(self, other: Extent) -> Extent:
        """Both, by their volumes. That of the first counts as it is: the mean over the rounds is up to a constant."""
        logs = torch.stack([self.log_volume, other.log_volume])
        return Extent(logs.logsumexp(0), torch.lerp(self.moment, other.moment, logs.softmax(0)[1]))

    def seen_in(self, dual: Tensor) -> Extent:
        """In coordinates η = F η', from F⁻ᵀ [p p]."""
        return replace(self, moment=dual.T @ self.moment @ dual)

    def rounded(self) -> Tensor:
        """(p + 2) E[η ηᵀ] [p p], the identity for the unit ball, made rounder to be safe from chance."""
        p = len(self.moment)
        moment = (p + 2) * self.moment
        round_part = moment.trace() / p * torch.eye(p, dtype=moment.dtype, device=moment.device)
        return torch.lerp(moment, round_part, _ROUNDNESS)


@final
@dataclass(frozen=True)
class Lines:
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
        return bool(self.inside[:, -STRATA:].any())

    @property
    def length(self) -> float:
        """The distance from θ0 of the farthest point in the basin, a length in the metric there."""
        return float(self.landscape.lengths(self.η[self.inside]).max()) if bool(self.inside.any()) else 0.0

    @property
    def fraction(self) -> float:
        """Of the points, how many are in the basin."""
        return int(self.inside.sum()) / self.inside.numel()

    @property
    def elsewhere(self) -> float:
        """Of the points below the level, how many are not in the basin."""
        below = int(self.below.sum())
        return (below - int(self.inside.sum())) / max(below, 1)

    def extent(self) -> Extent:
        p = self.η.shape[-1]
        logs = torch.where(self.inside, (p - 1) * self.r.log() + self.width.log(), -math.inf).flatten()
        moment = torch.einsum("m,mp,mq->pq", logs.softmax(0), *[self.η.flatten(0, 1)] * 2)
        return Extent(logs.logsumexp(0) + self.landscape.log_frame, moment)

    def volume(self) -> TailedMean:
        """∫ √det G dθ."""
        outside = torch.full_like(self.r, -math.inf, dtype=torch.float64)
        return self._mean(outside.masked_scatter(self.inside, self.landscape.log_volumes(self.η[self.inside])))

    def euclidean(self) -> TailedMean:
        """∫ dθ."""
        outside = torch.full_like(self.r, -math.inf, dtype=torch.float64)
        return self._mean(outside.masked_fill(self.inside, self.landscape.log_frame))

    def _mean(self, form: Tensor) -> TailedMean:
        """∫ v dη = |S^{p−1}| E_u ∫ v r^{p−1} dr, for log v [u j] at the points: one number a line, their mean."""
        p = self.η.shape[-1]
        half_sphere = p / 2 * math.log(math.pi) - math.lgamma(p / 2)  # a line is two rays
        terms = form + (p - 1) * self.r.double().log() + self.width.double().log()  # [u j]
        return TailedMean.of(torch.stack(terms.chunk(2), dim=1).flatten(1).logsumexp(1) + half_sphere)


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
