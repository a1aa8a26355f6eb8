"""ng.SOAP: Adam in the eigenbasis of Shampoo's factors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.bases import iterate_bases
from natgrad.accelerate.roots import spectrum
from natgrad.gradients.optimizer import (
    GradientOptimizer,
    Groups,
    Parameters,
    ShapeBatch,
    check_period,
    is_due,
    none_of_zero,
)
from natgrad.gradients.shampoo import moment
from natgrad.linalg import Damping, Relative
from natgrad.model import check_types
from natgrad.pullbacks.layer import LARGEST

Moments: TypeAlias = Literal["carried", "sorted"]

_TINY = Relative(1e-6)


@final
class SOAP(GradientOptimizer):
    """SOAP: Adam in the eigenbasis of Shampoo's factors (Vyas et al. 2024).

    AdamW steps the parameters that it steps in ``Natural``, except matrices with one row or one column.

    Args:
        params: The model, ``model.parameters()``, ``model.named_parameters()``, or parameter groups of these. Of a
            plain list it is not known which are embeddings and the head.
        lr: Learning rate. AdamW's best is no guide: search in factors of 2 from the default, mostly upwards.
        weight_decay: Decoupled weight decay, as AdamW's.
        momentum: μ of the moving average of gradients.
        nesterov: Nesterov's momentum, which is not corrected for its start; with False that of Adam.
        damping: λ, added to D; the default is 10⁻⁶ of its mean, so that rounding along directions without a gradient is
            not amplified.
        decay: That of the moving averages S, A and D.
        basis_every: Steps between new eigenvectors.
        early: Renew them also in the steps 1, 2, 4, 8, …
        moments: What D becomes then: "carried" into the new basis, or "sorted" with the columns, and the basis is
            renewed after the step, so that the next gradient is measured in the basis in which it is divided (Vyas et
            al. 2024).
        largest: A side with more rows than this has no basis.
        groups: Parameter groups beside ``params``, see ``Natural``.

    Method:
        v = Q (QᵀMP/√(D + λ)) Pᵀ. Q and P are the eigenvectors of S = E[∇∇ᵀ]/i and A = E[∇ᵀ∇]/o, and D = E[(Qᵀ∇P)²], in
        every step.

        Q ← QR((S + τ)Q), P ← QR((A + τ)P), with the columns sorted by qᵀSq, and τ = λ, but at most 10⁻⁶ of the mean
        eigenvalue. "carried" is D' = (Q'ᵀQ)² D (PᵀP')². The offsets of a kernel share Q and P.

        The first basis are eigenvectors, and any fixed basis where eigenvalues are below τ, as in the null space of the
        first gradients. Rounding does not choose it: processes, or parts of a batch, that add up a gradient in another
        order take the same steps.

        ``ng.SOAP(model, nesterov=False, moments="sorted", early=False, damping=1e-16)`` takes the steps of the paper's
        algorithm for matrices; the authors' code takes none with the first gradient.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> opt = ng.SOAP(nn.Linear(4, 3), lr=1e-3)
    """

    letters: tuple[str, ...] = ("S", "A", "Q", "P", "D")
    decomposed: tuple[str, ...] = ("Q", "P", "D")

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        damping: Damping = _TINY,
        decay: float = 0.95,
        basis_every: int = 10,
        early: bool = True,
        moments: Moments = "carried",
        largest: int = LARGEST,
        groups: Groups = (),
    ) -> None:
        check_period("SOAP", "basis_every", basis_every, early=early, largest=largest)
        check_types(nesterov=(nesterov, bool, "True or False"))
        if moments not in ("carried", "sorted"):
            raise ValueError(f'SOAP(moments=…) is "carried" or "sorted", not {moments!r}')
        self.nesterov: bool = nesterov
        self.decay: float = decay
        self.every: int = basis_every
        self.early: bool = early
        self.largest: int = largest
        self.moments = moments
        super().__init__(params, groups, lr=lr, weight_decay=weight_decay, momentum=momentum, damping=damping)

    def refreshes(self, step: int) -> bool:
        if self.moments == "carried":
            return is_due(step, self.every, early=self.early)
        doubled = self.early and step < self.every and (step + 1) & step == 0
        return step > 0 and (doubled or (step + 1) % self.every == 0)  # after the step, for the next one

    def statistics(self, batch: ShapeBatch) -> dict[str, Tensor]:
        """S and A and, in the basis that there is, D."""
        _, k, o, i = batch.G.shape
        S, A = moment(batch.G, self.largest) / (i * k), moment(batch.G.mT, self.largest) / (o * k)
        if not batch.has("S"):
            for letter, F in (("Q", S), ("P", A)):
                if F.ndim == 3:
                    batch.put(letter, self._first_basis(F))
        Q, P = _basis(batch)
        return {"S": S, "A": A, "D": _rotated(Q, batch.G, P).square().flatten(0, 1)}

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        if self.moments == "carried" and self.refreshes(step):
            self.refresh(batches)
        out = []
        for batch in batches:
            Q, P, D = *_basis(batch), batch.get("D").view_as(batch.M)
            λ = self.param_groups[0]["damping"]
            λ = none_of_zero(λ * D.mean((1, 2, 3), keepdim=True)) if self._relative else λ
            Qt, Pt = (None if q is None else q.mT for q in (Q, P))
            v = _rotated(Qt, _rotated(Q, batch.M, P) * (D + λ).rsqrt(), Pt)
            out.append(v.masked_fill(batch.is_zero[:, None, None, None], 0.0))
        if self.moments == "sorted" and self.refreshes(step):
            self.refresh(batches)
        return out

    def refresh(self, batches: Sequence[ShapeBatch]) -> None:
        """Q ← QR((S + τ)Q), P ← QR((A + τ)P) and D with them, all sizes at once."""
        scales = [batch.get("D").view_as(batch.M) for batch in batches]
        sides = [(at, side, q) for at, b in enumerate(batches) for side, q in enumerate(_basis(b)) if q is not None]
        factors, old = list[Tensor](), list[Tensor]()
        for at, side, q in sides:
            F = batches[at].get("SA"[side])
            if self.moments == "sorted":
                order = (q * (F @ q)).sum(1).argsort(dim=1, descending=True)
                q = torch.take_along_dim(q, order[:, None], 2)
                along = order[:, None, :, None] if side == 0 else order[:, None, None, :]
                scales[at] = torch.take_along_dim(scales[at], along, 2 + side)
            factors.append(F + torch.diag_embed(self._shift(F).expand(F.shape[:2])))
            old.append(q)
        new, _ = iterate_bases(factors, old, sort=self.moments == "carried")
        for (at, side, q), now in zip(sides, new, strict=True):
            if self.moments == "carried":
                U = (q.mT @ now.to(q.dtype)).square()  # bases of two types come in one
                scales[at] = _rotated(U, scales[at], None) if side == 0 else _rotated(None, scales[at], U)
            batches[at].put("QP"[side], now)
        for batch, D in zip(batches, scales, strict=True):
            batch.put("D", D.flatten(0, 1))

    def _first_basis(self, F: Tensor) -> Tensor:
        """Eigenvectors of F [N d d], and a fixed basis of those below τ."""
        values, vectors = (t.flip(-1) for t in spectrum(F))
        low = ((values <= self._shift(F)) & (values[:, :1] > 0)).unsqueeze(1)
        fixed = torch.randn(F.shape[1:], generator=torch.Generator().manual_seed(0), dtype=F.dtype, device="cpu")
        return torch.linalg.qr(torch.where(low, fixed.to(F.device), vectors)).Q

    def _shift(self, F: Tensor) -> Tensor:
        """τ [N 1], at least about the rounding of F."""
        mean, λ = F.diagonal(dim1=1, dim2=2).mean(1, keepdim=True), self.param_groups[0]["damping"]
        τ = torch.minimum(λ * mean if self._relative else torch.full_like(mean, λ), _TINY.epsilon * mean)
        return torch.maximum(τ, F.shape[1] * torch.finfo(F.dtype).eps * mean)


def _basis(batch: ShapeBatch) -> tuple[Tensor | None, Tensor | None]:
    """Q [N o o] and P [N i i]; None for the axes."""
    Q, P = (batch.get(letter) if batch.has(letter) else None for letter in "QP")
    return Q, P


def _rotated(Q: Tensor | None, W: Tensor, P: Tensor | None) -> Tensor:
    """QᵀWP of matrices [N k o i]."""
    W = W if Q is None else Q.mT.unsqueeze(1) @ W
    return W if P is None else W @ P.unsqueeze(1)
