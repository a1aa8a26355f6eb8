"""Expectations under any one-dimensional ``torch.distributions`` distribution, by points and weights."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, MixtureSameFamily, VonMises

from natgrad.families.base import seeded

_PANELS = 16
_FARTHEST = 8  # the log-odds of the outer ends of panels, which are spaced evenly
_STEP = 1 / 8  # of the trapezoidal rule in each
_LONGEST = 65536  # values of a discrete distribution
_DRAWS = 1024


def points(p: Distribution, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """t [k n *terms] and weights w, w' of its shape with E f(t) ≈ Σ_k w_k p(t_k) f(t_k), and coarsely by w'_k.

    Discrete distributions: all values, or the first ones of an infinite support, of which the coarse rule has half.
    Continuous ones: the trapezoidal rule after a double-exponential map (Takahasi and Mori 1974) in panels between
    quantiles, which come from ``icdf`` or a fixed sample; the coarse rule has every second point. Infinite densities at
    an end and algebraic tails do no harm; a kink inside a panel does, and the coarse rule shows it.
    """
    p = each(p)
    if p.has_enumerate_support:
        t = p.enumerate_support(expand=True)
        return t, torch.ones_like(t), torch.ones_like(t)
    if p.event_shape:
        raise ValueError(
            f"{type(p).__name__} has neither a smooth closed-form KL divergence nor an enumerable support, and its "
            f"values have shape {tuple(p.event_shape)}, too many for quadrature, so its Fisher metric cannot be exact: "
            "sample it with Fisher(family, samples=k)"
        )
    try:
        support = getattr(p.support, "base_constraint", p.support)
    except NotImplementedError:  # not declared
        support = None
    discrete = support is not None and support.is_discrete
    low, high = getattr(support, "lower_bound", -math.inf), getattr(support, "upper_bound", math.inf)
    inner = _quantiles(p, device)
    low, high = (torch.as_tensor(end).to(inner).expand(inner[0].shape) for end in (low, high))
    if discrete:
        return _counts(p, low, high)
    if isinstance(p, VonMises):  # torch says that an angle may be any real number
        low, high = torch.full_like(low, -math.pi), torch.full_like(high, math.pi)
    farthest = 0.2 * -math.log(torch.finfo(inner.dtype).tiny)  # e^farthest has a square, and its reciprocal too
    steps = math.ceil(math.asinh(2 / math.pi * farthest) / _STEP)
    u = _STEP * torch.arange(-steps, steps + 1, dtype=inner.dtype, device=device).view(-1, *[1] * (inner.ndim - 1))
    spread = inner[-1] - inner[0]
    ends = [low, *inner, high]
    t, w = (torch.cat(x) for x in zip(*(_panel(a, b, spread, u) for a, b in pairwise(ends)), strict=True))
    kept = p.log_prob(t).exp() * w > torch.finfo(w.dtype).eps ** 3  # beyond, log p may have no finite derivatives
    t, w = torch.where(kept, t, inner[len(inner) // 2]), torch.where(kept, _STEP * w, 0)
    even = (torch.arange(len(u), device=device) % 2 == 0).repeat(len(ends) - 1)
    return t, w, 2 * w * even.view(-1, *[1] * (inner.ndim - 1))


def each(p: Distribution) -> Distribution:
    """The distribution of the entries of an ``Independent`` one, whose logarithms add up."""
    while isinstance(p, Independent):
        p = p.base_dist
    return p


def _counts(p: Distribution, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Integers from the lower end on, twice as many until nothing is missing in the first half, the coarse rule."""
    count, rounding = 64, 64 * torch.finfo(low.dtype).eps
    while True:
        k = torch.arange(count, dtype=low.dtype, device=low.device).view(-1, *[1] * low.ndim)
        inside = low + k <= high
        t = torch.where(inside, low + k, low)
        missing = 1 - (p.log_prob(t).exp() * inside)[: count // 2].sum(0)
        if bool((missing.abs() < rounding).all()) or count == _LONGEST:
            return t, inside.to(t), (inside & (k < count // 2)).to(t)
        count *= 2


def _quantiles(p: Distribution, device: torch.device) -> Tensor:
    """The ends of the panels [k n *terms]: quantiles of the distribution, of every component, or of a sample."""
    if isinstance(p, MixtureSameFamily):
        return _quantiles(p.component_distribution, device).movedim(-1, 1).flatten(0, 1).sort(0).values
    with seeded(torch.Generator().manual_seed(0), device):
        like = p.sample()
        levels = torch.linspace(-_FARTHEST, _FARTHEST, _PANELS - 1, dtype=like.dtype, device=like.device).sigmoid()
        try:
            return p.icdf(levels.view(-1, *[1] * like.ndim).expand(-1, *like.shape))
        except NotImplementedError:
            return p.sample(torch.Size([_DRAWS])).quantile(levels, dim=0)


def _panel(a: Tensor, b: Tensor, spread: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """t(u) in (a, b) and dt/du: tanh-sinh, or exp-sinh if an end is infinite; exact differences from the ends."""
    s, ds = math.pi / 2 * u.sinh(), math.pi / 2 * u.cosh()
    left, right = torch.sigmoid(2 * s), torch.sigmoid(-2 * s)
    t = torch.where(u < 0, a + (b - a) * left, b - (b - a) * right)
    t = torch.where(b.isinf(), a + spread * s.exp(), torch.where(a.isinf(), b - spread * s.exp(), t))
    return t, torch.where((b - a).isinf(), spread * s.exp(), 2 * (b - a) * left * right) * ds
