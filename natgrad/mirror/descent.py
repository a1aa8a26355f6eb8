"""The two descents of paper 000, appendix F: Riemannian primal descent, and mirror descent."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from natgrad.linalg import check_finite
from natgrad.mirror.metrics import RiemannianMetric
from natgrad.mirror.potentials import Potential
from natgrad.mirror.proximity import BregmanProximity, Proposal, Proximity, RiemannianProximity
from natgrad.mirror.regions import Everywhere, Region
from natgrad.mirror.trace import Policy, Refuse, Trace, Trial
from natgrad.slots import check_slots

Objective = Callable[[Tensor], Tensor]
_ROUNDING = 4096  # units in the last place of what f is made of


@final
@dataclass(frozen=True)
class PrimalDescent:
    """x ← Grad(x) = x − ∇^g f(x)/CL, which lowers f by Prog(x) = ‖∇^g f‖²_g/2CL at least (000 lemma 13, corollary 14).

    ``lipschitz`` L: of the Euclidean gradient of f (45). ``C``: ‖v‖_E ≤ √C‖v‖_g (49), which ``compatibility`` measures.
    Only their product matters, and smoothness relative to g is enough: f(y) ≤ f(x) + df(y − x) + (CL/2)‖y − x‖²_{g,x}.
    The promise of every step is checked while it runs; ``policy`` says what follows from a broken one. ``region``: the
    set Q of definition 12. For convex f, f(x_T) − f(x*) ≤ 2LCR²/T (lemma 16): ``trace.bound(x*)``.

    >>> from natgrad.mirror import MatrixMetric
    >>> g = MatrixMetric(lambda x: torch.diag(torch.tensor([1.0, 100.0])))
    >>> f = lambda x: 0.5 * (x[0] ** 2 + 100 * x[1] ** 2)
    >>> trace = PrimalDescent(g, lipschitz=1.0).run(f, torch.tensor([3.0, 1.0]), steps=1)
    >>> trace.point, trace.progress
    (tensor([0., 0.]), tensor([54.5000]))
    """

    metric: RiemannianMetric
    lipschitz: float
    C: float = 1.0
    policy: Policy = field(default_factory=Refuse)
    region: Region = field(default_factory=Everywhere)

    def __post_init__(self) -> None:
        check_slots(metric=(self.metric, RiemannianMetric), policy=(self.policy, Policy), region=(self.region, Region))
        _check_positive("lipschitz", self.lipschitz)
        _check_positive("C", self.C)

    @property
    def proximity(self) -> Proximity:
        """½‖y − x‖²_{g(x)}."""
        return RiemannianProximity(self.metric, self.region)

    def grad(self, objective: Objective, x: Tensor) -> Tensor:
        """Grad(x), of the shape of x."""
        return _proposed(objective, self.proximity, x, self.C * self.lipschitz).point

    def prog(self, objective: Objective, x: Tensor) -> Tensor:
        """Prog(x) []."""
        return _proposed(objective, self.proximity, x, self.C * self.lipschitz).progress

    def run(self, objective: Objective, x: Tensor, steps: int) -> Trace:
        """``steps`` steps from x."""
        return _descend(objective, self.proximity, x, steps, self.C * self.lipschitz, self.policy)


@final
@dataclass(frozen=True)
class MirrorDescent:
    """x ← argmin_y ⟨∇f(x), y − x⟩ + αV_x(y), that is ∇ψ(x) ← ∇ψ(x) − ∇f(x)/α (000 F.2).

    It is natural gradient descent of f∘∇ψ* in the dual chart, with the metric ∇²ψ* and the step 1/α ((52), Raskutti and
    Mukherjee 2015), and, with ψ = ½‖y‖²_{g(x_k)} made anew at every step, that of f with the metric g (proposition 17).
    α multiplies the divergence: the step is 1/α (ERRATA 23). For f that is α-smooth relative to ψ, f falls by
    Prog(x) = αV_y(x) at least, and f(x_T) − f(x*) ≤ αV_{x_0}(x*)/T if it is convex.

    >>> from natgrad.mirror import SimplexEntropy
    >>> loss = torch.tensor([1.0, 0.0])  # of two experts
    >>> MirrorDescent(SimplexEntropy(), alpha=1.0).grad(lambda x: (loss * x).sum(), torch.tensor([0.5, 0.5]))
    tensor([0.2689, 0.7311])
    """

    potential: Potential
    alpha: float
    policy: Policy = field(default_factory=Refuse)

    def __post_init__(self) -> None:
        check_slots(potential=(self.potential, Potential), policy=(self.policy, Policy))
        _check_positive("alpha", self.alpha)

    @property
    def proximity(self) -> Proximity:
        """The divergence of ψ."""
        return BregmanProximity(self.potential)

    def grad(self, objective: Objective, x: Tensor) -> Tensor:
        """The next point, of the shape of x."""
        return _proposed(objective, self.proximity, x, self.alpha).point

    def prog(self, objective: Objective, x: Tensor) -> Tensor:
        """Prog(x) []."""
        return _proposed(objective, self.proximity, x, self.alpha).progress

    def run(self, objective: Objective, x: Tensor, steps: int) -> Trace:
        """``steps`` steps from x."""
        return _descend(objective, self.proximity, x, steps, self.alpha, self.policy)


def in_dual_chart(objective: Objective, potential: Potential) -> Objective:
    """F = f∘∇ψ*, the same objective as a function of z (000 (54)).

    >>> from natgrad.mirror import NegativeEntropy
    >>> in_dual_chart(lambda x: x.sum(), NegativeEntropy())(torch.zeros(2))  # e⁰ + e⁰
    tensor(2.)
    """
    return lambda z: objective(potential.inverse_gradient(z))


def _proposed(objective: Objective, proximity: Proximity, x: Tensor, α: float) -> Proposal:
    proximity.check(x)
    with torch.no_grad():
        return proximity.proposals(x.detach(), _differentiated(objective, x)[1])(α)


def _descend(objective: Objective, proximity: Proximity, start: Tensor, steps: int, α: float, policy: Policy) -> Trace:
    if not isinstance(steps, int) or steps < 1:
        raise ValueError(f"steps={steps!r} must be a positive integer")
    x = start.detach().clone()
    proximity.check(x)
    value, ω = _differentiated(objective, x)
    check_finite(torch.stack([value, ω.sum()]), "the objective, or its differential, at the start")
    points, trials = [x], []
    with torch.no_grad():
        for k in range(steps):
            trial = policy.take(k, α, _attempts(objective, proximity, x, value, ω))
            x, value, ω, α = trial.point, trial.value, trial.differential, trial.constant
            points.append(x)
            trials.append(trial)
    values = torch.stack([trials[0].before, *(trial.value for trial in trials)])
    check_finite(values, "the objective on the way (α is too small)")
    return Trace(
        objective,
        proximity,
        tuple(points),
        values,
        torch.stack([trial.progress for trial in trials]),
        torch.stack([trial.slack for trial in trials]),
        values.new_tensor([trial.constant for trial in trials]),
    )


def _attempts(
    objective: Objective, proximity: Proximity, x: Tensor, value: Tensor, ω: Tensor
) -> Callable[[float], Trial]:
    propose = proximity.proposals(x, ω)
    # f is not known better than to the rounding of its value, and to what the rounding of x does to it.
    rounding = _ROUNDING * torch.finfo(x.dtype).eps
    spread = value.abs() + (ω * x).abs().sum()

    def attempt(α: float) -> Trial:
        proposal = propose(α)
        proximity.check(proposal.point)
        there, differential = _differentiated(objective, proposal.point)
        slack = rounding * (spread + there.abs())
        return Trial(α, value, proposal.point, there, differential, proposal.progress, slack)

    return attempt


def _differentiated(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    """f(x) [] and df(x), of the shape of x."""
    leaf = x.detach().requires_grad_()
    with torch.enable_grad():
        value = objective(leaf)
    if not isinstance(value, Tensor) or value.numel() != 1:
        shape = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(f"the objective returned {shape}: it must be one number, a function of x")
    if not value.requires_grad:
        raise ValueError("the objective does not depend on x: it must be a differentiable function of it")
    (ω,) = torch.autograd.grad(value, leaf)
    return value.detach().reshape(()), ω


def _check_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name}={value!r} must be a positive, finite number")
