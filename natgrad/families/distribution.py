"""Any ``torch.distributions`` distribution as an output family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import (
    AffineTransform,
    Distribution,
    Independent,
    Laplace,
    MixtureSameFamily,
    TransformedDistribution,
    kl_divergence,
)
from torch.distributions import Wishart as TorchWishart

from natgrad.accelerate.devices import can_read, outside_inference_mode
from natgrad.families.base import Family, over_terms, seeded
from natgrad.families.support import each, points
from natgrad.families.wishart import Wishart
from natgrad.linalg import symmetric_root

Linear = Callable[[Tensor], tuple[Tensor]]
_TOGETHER = 8  # samples whose scores share a backward pass, whose cost grows with their number squared


@final
@dataclass(frozen=True)
class FromDistribution(Family):
    """Any ``torch.distributions`` distribution as an output family.

    Args:
        build: A function that maps the outputs y [n *out] to a distribution with the examples on its first batch axis.
        rtol: A metric with a larger error, relative to F, is refused. On a GPU it is not read, and ``error`` tells it.

    Method:
        Where torch has the KL divergence in closed form, F = ∂² KL(p_y0 ‖ p_y)/∂y².

        Else F = E[∇log p ∇log pᵀ], over all values of a discrete distribution, or by quadrature if the values are
        numbers: Laplace, StudentT, mixtures, ``Independent`` ones of these, your own with ``log_prob`` and ``sample``
        or ``icdf``. Distributions of vectors without a closed form must be sampled.

    Example:
        >>> family = FromDistribution(lambda y: torch.distributions.Exponential(y.exp()))
        >>> family.flat(torch.zeros(1, 1), torch.ones(1, 1))
        tensor([[1.]])
        >>> laplace = FromDistribution(lambda y: torch.distributions.Laplace(y, 0.5))
        >>> laplace.flat(torch.zeros(1, 1), torch.ones(1, 1)), bool(laplace.error(torch.zeros(1, 1)) < 1e-5)
        (tensor([[4.0000]]), True)
    """

    build: Callable[[Tensor], Distribution]
    rtol: float = 1e-3

    @outside_inference_mode()
    def check(self, y: Tensor) -> None:
        p = self.build(y)
        ends: list[Tensor] = []  # ends of the support that depend on the outputs; most families have none

        def combined(a: Tensor) -> Tensor:
            ends[:] = [end for end in _edges(self.build(a)) if end.requires_grad]
            return _combined(ends, a)

        moves = torch.func.grad(combined)(y) != 0
        if ends and bool(moves.any()):
            raise ValueError(
                f"the support of {type(p).__name__} moves with the outputs, so it has no Fisher metric: the KL "
                "divergence is infinite on one side, and its Hessian is not the covariance of the scores. Build a "
                "distribution with a fixed support, or use Euclidean() or LossHessian"
            )
        shape = p.batch_shape
        if not shape or shape[0] != y.shape[0]:
            raise ValueError(
                f"the distribution built from outputs of shape {tuple(y.shape)} has batch shape {tuple(shape)}: the "
                "examples must be its first batch axis (torch.distributions.Independent takes an axis too many away)"
            )

    def terms(self, y: Tensor) -> int:
        return self.build(y).batch_shape.numel() // y.shape[0]

    @outside_inference_mode()
    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        if not self._closed_form(y):
            return self._expected(y, u[None])[0]
        gradient = torch.func.grad(lambda a: self.kl(y, a).sum())
        product: Tensor = torch.func.grad(lambda a: (gradient(a) * u).sum())(y)
        return product

    @outside_inference_mode()
    def root(self, y: Tensor) -> Tensor:
        d = y[0].numel()
        eye = torch.eye(d, dtype=y.dtype, device=y.device).view(d, 1, *y.shape[1:]).expand(d, *y.shape)
        if self._closed_form(y):
            with torch.enable_grad():
                leaf = y.detach().requires_grad_()
                kl = self.kl(y.detach(), leaf).sum()
                (g,) = torch.autograd.grad(kl, leaf, create_graph=True)
                (h,) = torch.autograd.grad(g, leaf, eye, is_grads_batched=True)
        else:
            h = self._expected(y, eye)
        root = symmetric_root(
            h.reshape(d, -1, d).transpose(0, 1), "the Fisher metric of the distribution is indefinite"
        )
        return root.transpose(0, 1).reshape(d, *y.shape)

    @outside_inference_mode()
    def error(self, y: Tensor) -> Tensor:
        """An estimate of the relative error of F [n]; 0 where it has a closed form.

        The largest of |Σ π − 1|, of (Σ π a)² / Σ π a² and of |Σ π a² − Σ π' a²| / Σ π a², where π and π' are a rule and
        one with half of its points, and a the scores in a random direction, whose mean is 0. The third is the error of
        the coarser rule, so this is more than the error, unless values next to an end of the support are rounded to it.
        """
        return y.new_zeros(len(y)) if self._closed_form(y) else self._rule(y)[-1]

    def _expected(self, y: Tensor, u: Tensor) -> Tensor:
        """F u [k n *out] for u [k n *out]: the scores are the derivative of log p(t_k), pulled back with weights π."""
        push, pull, π, error = self._rule(y)
        if can_read(error) and not bool((error <= self.rtol).all()):
            n = int((~(error <= self.rtol)).nonzero()[0])
            raise ValueError(
                f"the Fisher metric of {type(self.build(y.detach())).__name__} by quadrature has an error of up to "
                f"{float(error[n]):.1e} at example {n}, and rtol={self.rtol:g} is allowed: its density has kinks or "
                "narrow peaks, its support is too long, or it is no density. Sample it with Fisher(family, samples=k), "
                "or raise rtol of FromDistribution"
            )
        return torch.func.vmap(lambda v: pull(π * push(v)[0])[0])(u)

    def _rule(self, y: Tensor) -> tuple[Linear, Linear, Tensor, Tensor]:
        """u ↦ (∂log p(t_k) u) [k n *terms], its transpose, the weights π of the values t_k, and the error [n]."""
        t, w, half = points(self.build(y.detach()), y.device)
        log_p, pull = torch.func.vjp(lambda a: each(self.build(a)).log_prob(t), y)[:2]
        π, half = w * log_p.exp(), half * log_p.exp()
        push = torch.func.vjp(lambda v: pull(v)[0], torch.zeros_like(log_p))[1]
        signs = torch.randn(y.shape[1:], generator=torch.Generator().manual_seed(0), dtype=torch.float64).sign()
        a = push(signs.to(y).expand_as(y))[0]
        size = (π * a.square()).sum(0).clamp(min=torch.finfo(y.dtype).tiny)
        parts = (π.sum(0) - 1).abs(), (π * a).sum(0).square() / size, ((π - half) * a.square()).sum(0).abs() / size
        return push, pull, π, torch.stack(parts).amax(0).reshape(len(y), -1).amax(1)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        with seeded(generator, y.device):
            t = self.build(y.detach()).sample((samples,))
        return torch.cat([self._scores_at(y, chunk, _each) for chunk in t.split(_TOGETHER)])

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        p, q = self.build(y), self.build(y2)
        try:
            return over_terms(_divergence(p, q))
        except NotImplementedError:  # torch has no formula
            t, w, _ = points(self.build(y.detach()), y.device)
        log_p, log_q = each(p).log_prob(t), each(q).log_prob(t)
        return over_terms((w * log_p.exp() * (log_p - log_q)).sum(0))

    def _scores_at(self, y: Tensor, t: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ_k w[c k n *terms] ∂log p(t_k)/∂y [c n *out], with w = weights(log p [k n *terms])."""
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            log_p = self.build(leaf).log_prob(t)
        w = weights(log_p.detach())
        (s,) = torch.autograd.grad(log_p, leaf, w.expand(w.shape[0], *log_p.shape), is_grads_batched=True)
        return s

    def _closed_form(self, y: Tensor) -> bool:
        p = q = self.build(y.detach())
        base = p
        while isinstance(base, (Independent, TransformedDistribution)):
            if isinstance(base, TransformedDistribution):
                # kl_divergence ignores transforms that are equal by value: compare distributions at two points.
                q = self.build(y.detach() + torch.finfo(y.dtype).eps ** 0.5 * (1 + y.detach().abs()))
            base = base.base_dist
        if isinstance(base, Laplace):
            return False  # KL contains |μ − μ0|, whose second derivative autograd takes to be 0
        try:
            _divergence(p, q)
        except NotImplementedError:  # torch has no formula
            return False
        return True


def _divergence(p: Distribution, q: Distribution) -> Tensor:
    """KL(p ‖ q) of torch, except for Wishart: torch's general formula sums its degrees of freedom over the batch."""
    if isinstance(p, Independent) and isinstance(q, Independent):
        each, axes = _divergence(p.base_dist, q.base_dist), p.reinterpreted_batch_ndims
        if axes == q.reinterpreted_batch_ndims:
            return each.flatten(-axes).sum(-1) if axes else each
    if isinstance(p, TorchWishart) and isinstance(q, TorchWishart):
        family = Wishart()
        return family.bregman(family.from_distribution(q), family.from_distribution(p))
    return kl_divergence(p, q)


def _each(log_p: Tensor) -> Tensor:
    """Weights that pick the samples one by one."""
    k = log_p.shape[0]
    return torch.eye(k, dtype=log_p.dtype, device=log_p.device).view(k, k, *[1] * (log_p.ndim - 1))


def _edges(p: Distribution) -> list[Tensor]:
    """The finite ends of the support."""
    if isinstance(p, Independent):
        return _edges(p.base_dist)
    if isinstance(p, MixtureSameFamily):
        return _edges(p.component_distribution)
    edges = []
    if isinstance(p, TransformedDistribution):
        edges = _edges(p.base_dist)
        if all(isinstance(t, AffineTransform) for t in p.transforms):  # torch claims that these reach all real numbers
            for transform in p.transforms:
                edges = [transform(edge) for edge in edges]
    try:
        support = p.support
    except NotImplementedError:  # the distribution does not declare a support
        return edges
    ends = [getattr(support, name, None) for name in ("lower_bound", "upper_bound")]
    return edges + [torch.as_tensor(end) for end in ends if end is not None]


def _combined(edges: list[Tensor], y: Tensor) -> Tensor:
    """A number that changes when any edge does; the weights are incommensurable, so that two cannot cancel."""
    return sum(((2 + i) ** 0.5 * edge.sum() for i, edge in enumerate(edges)), 0 * y.sum())
