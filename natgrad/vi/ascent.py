"""Natural-gradient ascent of a Gaussian over latent variables on all of its data, until the bound stands still."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor

from natgrad.vi.latent import Belief, LatentGaussian, Projection
from natgrad.vi.step import Step, check_rate

_HALVINGS = 12


@final
@dataclass(frozen=True)
class Ascent:
    """The bound before the first step and after every one, and the steps."""

    elbo: tuple[float, ...]
    steps: tuple[Step, ...]

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why steps were shortened, if any were."""
        return tuple(step.reason for step in self.steps if step.reason is not None)


@torch.no_grad()
def ascend(
    model: LatentGaussian, x: Tensor, y: Tensor, rate: float = 1.0, tolerance: float = 1e-3, steps: int = 100
) -> Ascent:
    """Step q(v) with fixed hyperparameters until a step gains less than ``tolerance`` nats. The bound never falls.

    A step that would lower the bound is halved; the reason is reported. With Gaussian noise the first step is the
    optimum (Titsias 2009), and the second one only shows it.

    >>> import natgrad as ng
    >>> x = torch.linspace(0, 1, 30).unsqueeze(1)
    >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.BernoulliLogit(), inducing=x[::5])
    >>> ascent = ng.vi.ascend(gp, x, (x[:, 0] > 0.5).float())
    >>> ascent.elbo[-1] > ascent.elbo[0] and len(ascent.steps) < 20
    True
    """
    model.check(x, y)
    return ascend_at(model, model.project(x), y, rate, tolerance, steps)


@torch.no_grad()
def ascend_at(
    model: LatentGaussian, at: Projection, y: Tensor, rate: float = 1.0, tolerance: float = 1e-3, steps: int = 100
) -> Ascent:
    """As ``ascend``, at a projection that was kept."""
    check_rate(rate)
    search, belief = _Search(model, at, y, rate), model.belief
    here = search.state(belief)
    bounds, taken = [here.bound], []
    for _ in range(steps):
        belief, here, step = search.climb(belief, here)
        bounds.append(here.bound)
        taken.append(step)
        if bounds[-1] - bounds[-2] < tolerance:
            break
    model.assume(belief)
    return Ascent(tuple(bounds), tuple(taken))


@final
@dataclass(frozen=True)
class _State:
    μ: Tensor
    v: Tensor
    bound: float


@final
@dataclass(frozen=True)
class _Search:
    """A step, halved until the bound does not fall."""

    model: LatentGaussian
    at: Projection
    y: Tensor
    rate: float

    def state(self, belief: Belief) -> _State:
        μ, v, kl = belief.marginals(self.at)
        return _State(μ, v, float(self.model.likelihood.expected(self.y, μ, v).sum() - kl))

    def climb(self, belief: Belief, here: _State) -> tuple[Belief, _State, Step]:
        target, asked = self.model.target(self.at, self.y, here.μ, here.v), self.rate
        rounding = 64 * torch.finfo(here.μ.dtype).eps * abs(here.bound)
        for _ in range(_HALVINGS):
            step = self.model.limited(belief, target, asked)
            moved = belief.moved(target, step.taken)
            there = self.state(moved)
            if there.bound >= here.bound - rounding:
                bound = step.bound if asked == self.rate else "a longer step would lower the bound"
                return moved, there, Step(self.rate, step.taken, bound)
            asked /= 2
        still = "the bound is at its maximum, to the accuracy of the quadrature"
        return belief, here, Step(self.rate, torch.zeros_like(step.taken), still)
