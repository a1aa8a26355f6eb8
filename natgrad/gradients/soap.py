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

        Q ← QR(SQ), P ← QR(AP), with the columns sorted by qᵀSq; the first basis is exact. "carried" is D' = (Q'ᵀQ)² D
        (PᵀP')². The offsets of a kernel share Q and P.

        ``ng.SOAP(model, nesterov=False, moments="sorted", early=False, damping=1e-16)`` takes the steps of the paper's
        algorithm for matrices; the authors' code takes none with the first gradient.

        Factors of low rank, as after the first gradients, have a null space whose basis is determined by rounding, and
        later gradients are measured in that basis. Several processes and gradient accumulation round their sums in
        another way, and take the steps of the joint batch only up to the choice of this basis.

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
                    batch.put(letter, spectrum(F)[1])
        Q, P = _basis(batch)
        return {"S": S, "A": A, "D": _rotated(_mT(Q), batch.G, P).square().flatten(0, 1)}

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        if self.moments == "carried" and self.refreshes(step):
            self.refresh(batches)
        out = []
        for batch in batches:
            Q, P, D = *_basis(batch), batch.get("D").view_as(batch.M)
            λ = self.param_groups[0]["damping"]
            λ = none_of_zero(λ * D.mean((1, 2, 3), keepdim=True)) if self._relative else λ
            v = _rotated(Q, _rotated(_mT(Q), batch.M, P) * (D + λ).rsqrt(), _mT(P))
            out.append(v.masked_fill(batch.is_zero[:, None, None, None], 0.0))
        if self.moments == "sorted" and self.refreshes(step):
            self.refresh(batches)
        return out

    def refresh(self, batches: Sequence[ShapeBatch]) -> None:
        """Q ← QR(SQ), P ← QR(AP) and D with them, all sizes at once."""
        if not batches:
            return
        before = [tuple(q if q is None else q.clone() for q in _basis(batch)) for batch in batches]
        scales = [batch.get("D").view_as(batch.M) for batch in batches]
        sides = [(at, side) for at, basis in enumerate(before) for side in (0, 1) if basis[side] is not None]
        factors = [batches[at].get("SA"[side]) for at, side in sides]
        old = [q for basis in before for q in basis if q is not None]
        if self.moments == "sorted":
            for number, (at, side) in enumerate(sides):
                q = old[number]
                order = (q * (factors[number] @ q)).sum(1).argsort(dim=1, descending=True)
                old[number] = torch.take_along_dim(q, order[:, None], 2)
                along = order[:, None, :, None] if side == 0 else order[:, None, None, :]
                scales[at] = torch.take_along_dim(scales[at], along, 2 + side)
        new, _ = iterate_bases(factors, old, sort=self.moments == "carried")
        for (at, side), q in zip(sides, new, strict=True):
            batches[at].put("QP"[side], q)
        for batch, basis, D in zip(batches, before, scales, strict=True):
            if self.moments == "carried":
                U, V = (_overlap(now, q) for now, q in zip(_basis(batch), basis, strict=True))
                D = _rotated(U, D, _mT(V))
            batch.put("D", D.flatten(0, 1))


def _basis(batch: ShapeBatch) -> tuple[Tensor | None, Tensor | None]:
    """Q [N o o] and P [N i i]; None for the axes."""
    Q, P = (batch.get(letter) if batch.has(letter) else None for letter in "QP")
    return Q, P


def _mT(q: Tensor | None) -> Tensor | None:
    return None if q is None else q.mT


def _rotated(left: Tensor | None, W: Tensor, right: Tensor | None) -> Tensor:
    """L W R of matrices [N k o i]."""
    W = W if left is None else left.unsqueeze(1) @ W
    return W if right is None else W @ right.unsqueeze(1)


def _overlap(new: Tensor | None, old: Tensor | None) -> Tensor | None:
    """(Q'ᵀQ)², number by number."""
    return None if new is None or old is None else (new.mT @ old).square()
