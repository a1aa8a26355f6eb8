"""A loss and the volume form of a pullback metric at many parameters at once, and which of them belong to one basin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError, NonFiniteError, SingularMetricError
from natgrad.geometry import unflatten
from natgrad.model import map_tensors
from natgrad.pullback import Pullback
from natgrad.pullback.roots import root_at

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
