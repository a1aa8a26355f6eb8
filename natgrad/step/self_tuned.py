"""K-FAC's own steps: the KL clip, and the self-tuning step of Martens and Grosse."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.accelerate.fused import pairing
from natgrad.errors import IncompatibleError
from natgrad.geometry import Vector
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model, map_tensors, tensors_of
from natgrad.output.metric import OutputMetric
from natgrad.pullback.chunks import separable
from natgrad.pullback.pullback import Batch
from natgrad.step.base import Proposal, Step, StepRule

# Exact quadratic forms of the metric, ⟨v, Gw⟩ = (1/N) Σ_n ⟨J_n v, h J_n w⟩: products with J only, G is not formed.


_FEWEST = 256  # examples that a part of a batch has, where the batch has them
_GOLDEN = (math.sqrt(5) - 1) / 2


def quadratic_forms(batch: Batch, metric: OutputMetric, vectors: Sequence[Vector], fraction: float = 1.0) -> Tensor:
    """⟨v, G w⟩ [v w] of all pairs of ``vectors``, on a ``fraction`` of the batch, but on 256 examples at least.

    The examples are spread over all of it: a batch may be sorted. A sampled metric stands here for the one that it
    samples, ``metric.flat``.

    >>> import natgrad as ng
    >>> model = torch.nn.Linear(2, 1, bias=False)
    >>> at = Batch(Model.of(model), torch.tensor([[3.0, 4.0]]))
    >>> quadratic_forms(at, ng.Euclidean(), [Vector({"weight": torch.tensor([[1.0, 0.0]])})])
    tensor([[9.]])
    """
    n = _examples(batch.x)
    m = max(min(n, _FEWEST), round(fraction * n))
    x, target = batch.x, batch.target
    cut = 0 < m < n and separable(x, n) and (target is None or separable(target, n))
    if cut:
        x, target = _spread(x, m, n), _spread(target, m, n)
    y, pushed = _pushed(batch.model, x, vectors)
    if cut and y.shape[0] != m:  # the first axis was not that of the examples
        target = batch.target
        y, pushed = _pushed(batch.model, batch.x, vectors)
    with torch.no_grad(), torch.autocast(y.device.type, enabled=False):
        wide = torch.promote_types(y.dtype, torch.float32)
        y, pushed = y.to(wide), [u.to(wide) for u in pushed]
        lowered = torch.stack([metric.flat(y, u, target).flatten() for u in pushed])
        return torch.stack([u.flatten() for u in pushed]) @ lowered.T / y.shape[0]


def _spread(x: Inputs, m: int, n: int) -> Inputs:
    """m of n examples, number i·p mod n for i < m: no two are one, and none are missed for long.

    p is near n over the golden ratio, so that what is sorted is met evenly, and has no divisor in common with n, so
    that what comes in turns is, too.
    """
    p = next(p for p in range(round(_GOLDEN * n), n) if math.gcd(p, n) == 1)
    return map_tensors(x, lambda t: t.index_select(0, torch.arange(m, device=t.device) * p % n))


def _examples(x: Inputs) -> int:
    tensors = tensors_of(x)
    return tensors[0].shape[0] if tensors and tensors[0].ndim else 0


def _pushed(model: Model, x: Inputs, vectors: Sequence[Vector]) -> tuple[Tensor, list[Tensor]]:
    """The outputs, and J v of every vector: forward mode, or twice backward for a model that has none."""
    params = {name: p.detach() for name, p in model.params.items()}
    tangents = {name: torch.stack([v[name].to(p.dtype) for v in vectors]) for name, p in params.items()}

    def push(t: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        y, jv = torch.func.jvp(lambda θ: model(θ, x), (params,), (t,))[:2]
        return y, jv

    try:
        with torch.no_grad():
            ys, jvs = torch.func.vmap(push, out_dims=(None, 0))(tangents)  # type: ignore[arg-type]
        return ys, list(jvs)
    except (RuntimeError, ValueError):  # no rule for forward mode, or for vmap
        try:
            linear = linearise(model, x)
            return linear.y, [linear.push(v).detach() for v in vectors]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise IncompatibleError(
                "the step rule needs products J v with the Jacobian of the outputs, and the model has an operation "
                f"without a derivative in forward mode and without a second derivative ({error}): use step=KLClip() or "
                "step=Fixed(), which do without, in place of SelfTuned()"
            ) from error


_CUT, _CUTS = 4.0, 3  # a step that is too long, or a damping that is most of the model: divided by; and how often
_GROWTH = 3.0  # of a step that is not tried, over the one before


@final
@dataclass(frozen=True)
class KLClip(StepRule):
    """v ← v·min(1, √(radius/⟨lr·ω, lr·v⟩)): the natural gradient shortened, before it enters the momentum (ERRATA D).

    ⟨ω, v⟩ = vᵀ(G + λ)v is, for Fisher, twice the KL divergence that a step v would make. Nothing waits for a GPU.

    >>> KLClip()
    KLClip(radius=0.001)
    """

    radius: float = 1e-3

    def __post_init__(self) -> None:
        if not self.radius > 0:
            raise ValueError(f"KLClip(radius=…) must be positive, got {self.radius}")

    @property
    def capturable(self) -> bool:
        return True

    def take(self, proposal: Proposal) -> Step:
        v = proposal.sharp(proposal.differential, proposal.damping)
        if not proposal.rates:  # all parameters rest
            return proposal.plain(v)
        pairings = []
        for names, _ in proposal.rates:
            pairings.append(pairing([(proposal.differential[name], v[name]) for name in names]))
        square = sum(one * rate**2 for one, (_, rate) in zip(pairings, proposal.rates, strict=True))
        assert isinstance(square, Tensor)
        # Rounding below zero, or a zero gradient: nothing to shorten.
        shrink = torch.where(square > self.radius, (self.radius / square.clamp(min=self.radius)).sqrt(), 1.0)
        return proposal.shrunk(v, shrink, torch.stack(pairings).sum())


@final
@dataclass(frozen=True)
class SelfTuned(StepRule):
    """δ = α·Δ + μ·δ₀ with the α and μ that are best for the quadratic model, and λ by Levenberg–Marquardt.

    Δ = −(G + λ)⁻¹ω in the structure, δ₀ the last step, and m(δ) = ⟨ω, δ⟩ + ½⟨δ, (G + λ)δ⟩ with *exact* products
    ⟨Δ, GΔ⟩, ⟨Δ, Gδ₀⟩, ⟨δ₀, Gδ₀⟩ (Martens and Grosse 2015, sections 6.4, 6.5 and 7): learning rate and momentum need
    no tuning and are not used.

    In the first step, and then every ``every`` steps, the loss is evaluated where the step lands. λ is multiplied or
    divided by ``factor`` where it has fallen by less than a quarter, or by more than three quarters, of what the model
    said. Were G the whole curvature, the ratio would be 1 + λ⟨δ, δ⟩/⟨δ, (G + λ)δ⟩: above three halves the model is more
    damping than metric, and λ becomes four times smaller. A step after which the loss is higher is cut to a quarter,
    three times at most, and λ becomes four times larger; one that no cut helps is refused. The steps in between are at
    most three times as long, in the metric, as the one before: a small batch may say little about most directions.
    ``fraction``: the part of the batch that the exact products are taken on (a quarter, section 8 of the paper; of
    256 examples at least). With gradient accumulation that is a part of the last micro-batch: only the gradient, the
    structure and the losses are those of all. Needs ``opt.step(closure)``; where it is evaluated again it draws the
    same random numbers. The exact products are those of the function that is trained, batch statistics included, with
    dropout off.

    >>> SelfTuned()
    SelfTuned(every=5, factor=1.3, fraction=0.25, smallest=1e-06)
    """

    every: int = 5
    factor: float = 1.3
    fraction: float = 0.25
    smallest: float = 1e-6  # λ; below, a batch is fitted at the expense of the others

    def __post_init__(self) -> None:
        if self.every < 1 or not self.factor > 1 or not 0 < self.fraction <= 1 or not self.smallest > 0:
            raise ValueError(f"SelfTuned needs every ≥ 1, factor > 1, 0 < fraction ≤ 1 and smallest > 0, got {self}")

    @property
    def needs_closure(self) -> bool:
        return True

    def take(self, proposal: Proposal) -> Step:
        λ = max(proposal.damping, self.smallest)
        Δ = -proposal.sharp(proposal.differential, λ)
        last = proposal.model.velocity()
        basis = [Δ] if last is None else [Δ, last]
        flat = torch.stack([v.flatten() for v in basis])
        slope = flat @ proposal.differential.flatten().to(flat.dtype)
        H = proposal.model.curvature(basis, self.fraction).to(flat.dtype) + λ * (flat @ flat.T)
        weights = _best(H, slope)
        untried = bool(proposal.model.step % self.every)
        if untried and last is not None:
            weights = weights * _no_longer(_GROWTH**2 * H[1, 1], weights @ H @ weights)
        δ = Vector({name: t.to(Δ[name].dtype) for name, t in Δ.unflatten(weights @ flat).items()})
        if untried:
            return Step(δ, λ, velocity=δ)
        return self._tried(proposal, δ, float(weights @ slope + 0.5 * weights @ H @ weights), λ)

    def _tried(self, proposal: Proposal, δ: Vector, predicted: float, λ: float) -> Step:
        """The step, or a part of it, after which the loss is not higher, and the damping that follows from it."""
        here = proposal.loss(None)
        rounding = 10 * max(torch.finfo(t.dtype).eps for t in δ.values()) * abs(here)
        actual = proposal.loss(δ) - here
        if -predicted <= rounding and abs(actual) <= rounding:
            return Step(δ, λ, velocity=δ)  # nothing can be said
        ratio = actual / predicted if predicted < 0 and math.isfinite(actual) else -math.inf
        if actual <= rounding:
            return Step(δ, self._adapted(λ, ratio), ratio=ratio, velocity=δ)
        more = min(_CUT * λ, 1 / self.smallest)
        for _ in range(_CUTS):
            δ = δ / _CUT
            if proposal.loss(δ) - here <= rounding:
                return Step(δ, more, ratio=ratio, velocity=δ, reason="cut: the loss was higher at its end")
        return Step(δ, more, accepted=False, ratio=ratio, reason=f"the loss is higher even after {_CUTS} cuts")

    def _adapted(self, λ: float, ratio: float) -> float:
        if ratio > 0.75:
            return max(λ / (_CUT if ratio > 1.5 else self.factor), self.smallest)
        return min(λ * self.factor, 1 / self.smallest) if ratio < 0.25 else λ


def _no_longer(bound: Tensor, square: Tensor) -> Tensor:
    """What a step of squared length ``square`` is multiplied by to be no longer than ``bound`` allows."""
    return (bound / square.clamp(min=torch.finfo(square.dtype).tiny)).clamp(max=1).sqrt()


def _best(H: Tensor, slope: Tensor) -> Tensor:
    """The minimum of ⟨slope, w⟩ + ½⟨w, Hw⟩, for one or two directions, without looking at numbers.

    Where two directions are one, up to rounding, the first alone.
    """
    alone = torch.zeros_like(slope)
    alone[0] = -slope[0] / H[0, 0]
    alone = torch.where(H[0, 0] > 0, alone, torch.zeros_like(alone))  # a zero gradient: stay
    if slope.numel() == 1:
        return alone
    det = H[0, 0] * H[1, 1] - H[0, 1] * H[1, 0]
    both = torch.stack([H[0, 1] * slope[1] - H[1, 1] * slope[0], H[1, 0] * slope[0] - H[0, 0] * slope[1]]) / det
    rounding = 1e3 * torch.finfo(H.dtype).eps * H[0, 0] * H[1, 1]
    return torch.where(det > rounding, both, alone)
