"""Random lines through the parameters, the points of a basin on them, and coordinates in which it is about round."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from natgrad.functionspace.basin import Basin, Landscape
from natgrad.functionspace.tail import TailedMean

OCTAVES, STRATA = 8, 8  # how far down a ray is cut on a logarithmic scale, and in how many pieces an octave
PILOT = 256  # lines that find out how far the basin reaches
_ROUNDS = 64  # of pilot lines
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
    for _ in range(_ROUNDS):
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
        f"the basin did not fit into an ellipsoid after {_ROUNDS} rounds of {PILOT} random lines: each had more to add "
        "to its extent. It is unbounded, with an infinite volume (a direction in which the loss does not rise), or too "
        "long and thin. Lower epsilon=, or freeze the parameters that the loss does not determine with "
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
