"""Any ``torch.distributions`` distribution as an output family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import final

import torch
from torch import Tensor
from torch.distributions import Distribution, Independent, Laplace, TransformedDistribution, kl_divergence

from natgrad.families.base import Family, over_terms
from natgrad.linalg import symmetric_root


@final
@dataclass(frozen=True)
class FromDistribution(Family):
    """The family y ↦ build(y), a ``torch.distributions`` distribution with the examples on its first batch axis.

    Exact where the KL divergence is in closed form, F = ∂² KL(p_y0 ‖ p_y)/∂y² (004 (12)), or where the support can be
    enumerated, F = Σ_t p(t) ∇log p ∇log pᵀ; sampled otherwise.

    >>> family = FromDistribution(lambda y: torch.distributions.Exponential(y.exp()))
    >>> family.flat(torch.zeros(1, 1), torch.ones(1, 1))
    tensor([[1.]])
    """

    build: Callable[[Tensor], Distribution]

    def check(self, y: Tensor) -> None:
        shape = self.build(y).batch_shape
        if not shape or shape[0] != y.shape[0]:
            raise ValueError(
                f"the distribution built from outputs of shape {tuple(y.shape)} has batch shape {tuple(shape)}: the "
                "examples must be its first batch axis (torch.distributions.Independent takes an axis too many away)"
            )

    def terms(self, y: Tensor) -> int:
        return self.build(y).batch_shape.numel() // y.shape[0]

    def flat(self, y: Tensor, u: Tensor) -> Tensor:
        if not self._closed_form(y):
            _support(self.build(y.detach()))  # refuses what cannot be exact
        gradient = torch.func.grad(lambda a: self.kl(y, a).sum())
        product: Tensor = torch.func.grad(lambda a: (gradient(a) * u).sum())(y)
        return product

    def root(self, y: Tensor) -> Tensor:
        if not self._closed_form(y):
            return self._enumerated(y)
        d = y[0].numel()
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            kl = self.kl(y.detach(), leaf).sum()
            (g,) = torch.autograd.grad(kl, leaf, create_graph=True)
            eye = torch.eye(d, dtype=y.dtype, device=y.device).view(d, 1, *y.shape[1:]).expand(d, *y.shape)
            (h,) = torch.autograd.grad(g, leaf, eye, is_grads_batched=True)
        root = symmetric_root(
            h.reshape(d, -1, d).transpose(0, 1), "the Fisher metric of the distribution is indefinite"
        )
        return root.transpose(0, 1).reshape(d, *y.shape)

    def scores(self, y: Tensor, samples: int, generator: torch.Generator) -> Tensor:
        seed = int(torch.randint(2**62, (), generator=generator, device=generator.device))
        # torch.distributions draw from the global stream only: borrow it, and give it back as it was. Seed no other:
        # torch.manual_seed would move the streams of every device.
        devices = [y.device] if y.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            torch.default_generator.manual_seed(seed)
            for device in devices:
                with torch.cuda.device(device):
                    torch.cuda.manual_seed(seed)
            t = self.build(y.detach()).sample((samples,))
        each = torch.eye(samples, dtype=y.dtype, device=y.device)
        return self._scores_at(y, t, lambda log_p: each.view(samples, samples, *[1] * (log_p.ndim - 1)))

    def kl(self, y: Tensor, y2: Tensor) -> Tensor:
        p, q = self.build(y), self.build(y2)
        try:
            return over_terms(kl_divergence(p, q))
        except NotImplementedError:
            t = _support(p)
        log_p = p.log_prob(t)
        return over_terms((log_p.exp() * (log_p - q.log_prob(t))).sum(0))

    def _scores_at(self, y: Tensor, t: Tensor, weights: Callable[[Tensor], Tensor]) -> Tensor:
        """Σ_k w[c k n *terms] ∂log p(t_k)/∂y as [c n *out], the weights made from (the shape of) log p [k n *terms]."""
        with torch.enable_grad():
            leaf = y.detach().requires_grad_()
            log_p = self.build(leaf).log_prob(t)
        w = weights(log_p.detach())
        (s,) = torch.autograd.grad(log_p, leaf, w.expand(w.shape[0], *log_p.shape), is_grads_batched=True)
        return s

    def _enumerated(self, y: Tensor) -> Tensor:
        p = self.build(y.detach())
        t = _support(p)
        k, terms = t.shape[0], p.batch_shape[1:]
        term = torch.eye(terms.numel(), dtype=y.dtype, device=y.device).view(-1, 1, 1, 1, *terms)
        value = torch.eye(k, dtype=y.dtype, device=y.device).view(1, k, k, 1, *[1] * len(terms))
        columns = (term * value).flatten(0, 1)  # one value of one term a column: [(term k) k 1 *terms]
        return self._scores_at(y, t, lambda log_p: columns * (0.5 * log_p).exp())

    def _closed_form(self, y: Tensor) -> bool:
        p = q = self.build(y.detach())
        base = p
        while isinstance(base, (Independent, TransformedDistribution)):
            if isinstance(base, TransformedDistribution):
                # torch compares the transforms by value and drops what the KL owes to them: compare at two points.
                q = self.build(y.detach() + torch.finfo(y.dtype).eps ** 0.5 * (1 + y.detach().abs()))
            base = base.base_dist
        if isinstance(base, Laplace):
            return False  # KL has |μ − μ0| in it, whose second derivative automatic differentiation takes to be 0
        try:
            kl_divergence(p, q)
        except NotImplementedError:
            return False
        return True


def _support(p: Distribution) -> Tensor:
    """All values t [k n *terms] of a discrete distribution."""
    if not p.has_enumerate_support:
        raise ValueError(
            f"{type(p).__name__} has neither a smooth closed-form KL divergence nor an enumerable support, so its "
            "Fisher metric cannot be exact: sample it with Fisher(family, samples=k)"
        )
    return p.enumerate_support(expand=True)
