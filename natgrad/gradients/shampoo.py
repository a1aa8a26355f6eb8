"""ng.Shampoo: gradients divided by powers of their two whole covariances."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.roots import NOISE, inverse_powers, suited_precision
from natgrad.gradients.optimizer import (
    GradientOptimizer,
    Groups,
    Parameters,
    ShapeBatch,
    check_period,
    is_due,
    of_length,
)
from natgrad.linalg import Damping, Relative, check_power
from natgrad.pullbacks.layer import LARGEST
from natgrad.step.normalised import check_rms

Fit: TypeAlias = Literal["mean", "kl"]

_SHARE = Relative(1e-2)
_ROOT_ERROR = 0.1  # the largest residual of a root that is used


@final
class Shampoo(GradientOptimizer):
    """Shampoo: steps scaled by powers of two matrices per layer (Gupta, Koren and Singer 2018).

    AdamW steps the parameters that it steps in ``Natural``, except matrices with one row or one column.

    Args:
        params: The model, ``model.parameters()``, ``model.named_parameters()``, or parameter groups of these. Of a
            plain list it is not known which are embeddings and the head.
        lr: Learning rate. AdamW's best is no guide: search in factors of 2 from the default, mostly upwards.
        weight_decay: Decoupled weight decay, as AdamW's.
        momentum: μ of the moving average of gradients.
        power: p. The original has ¼; ½ is nearer to the inverse root of the second moment of all entries, and trains
            better.
        damping: λ ≥ 0; or ``Relative(ε)``, the default: ε·mean S and ε·mean A are added to S and A.
        rms: The root mean square of a step, as a multiple of the learning rate, where others take the length of a
            second optimizer's step ("grafting").
        fit: "mean", or "kl", a variant of KL-Shampoo (Lin et al. 2025).
        decay: That of the moving averages S and A, where the original has sums.
        inverse_every: Steps between powers of S and A.
        early: Compute them also in the steps 1, 2, 4, … before.
        largest: Of factors with more rows than this only the diagonal is kept.
        groups: Parameter groups beside ``params``, see ``Natural``.

    Method:
        v = (S + λ_S)^-p M (A + λ_A)^-p, S = E[∇∇ᵀ]/i, A = E[∇ᵀ∇]/o. Momentum is on gradients, with Nesterov's step. A
        kernel [o i *k] has one factor for o and one for i, which its offsets share, unless both have more than
        ``largest`` rows: then it is the matrix [o i·k].

        With ``fit="kl"`` S ⊗ A is nearest to the second moment of ∇ in KL divergence, S ← E[∇ A⁻¹ ∇ᵀ]/i and A ← E[∇ᵀ
        S⁻¹ ∇]/o with the inverses of the last refresh, scaled so that tr(A A⁻¹) = i, and before that 1/√mean(∇²).

        Powers are those of the factors themselves, where the authors let eigenvalues follow in a basis.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> opt = ng.Shampoo(nn.Linear(4, 3), power=0.25)
    """

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        power: float = 0.5,
        damping: Damping = _SHARE,
        rms: float = 0.2,
        fit: Fit = "mean",
        decay: float = 0.95,
        inverse_every: int = 10,
        early: bool = True,
        largest: int = LARGEST,
        groups: Groups = (),
    ) -> None:
        check_power(power, "the metric of Shampoo")
        check_rms("Shampoo", rms)
        check_period("Shampoo", "inverse_every", inverse_every, early=early, largest=largest)
        if fit not in ("mean", "kl"):
            raise ValueError(f'Shampoo(fit=…) is "mean" or "kl", not {fit!r}')
        self.power: float = power
        self.rms: float = rms
        self.decay: float = decay
        self.fit = fit
        self.every: int = inverse_every
        self.early: bool = early
        self.largest: int = largest
        self.decomposed: tuple[str, ...] = ("S^-p", "A^-p", *(("S^-½", "A^-½") if fit == "kl" else ()))
        self.letters: tuple[str, ...] = ("S", "A", *self.decomposed)
        super().__init__(params, groups, lr=lr, weight_decay=weight_decay, momentum=momentum, damping=damping)

    def refreshes(self, step: int) -> bool:
        return is_due(step, self.every, early=self.early)

    def statistics(self, batch: ShapeBatch) -> dict[str, Tensor]:
        (_, k, o, i), left, right = batch.G.shape, batch.G, batch.G
        if self.fit == "kl":
            scale = batch.G.square().mean((1, 2, 3)).pow(-0.25).nan_to_num(posinf=0.0)  # of a mean of zero, too
            if batch.has("S^-½"):
                left = _times(None, batch.G, _or_number(batch.get("A^-½"), scale))
                right = _times(_or_number(batch.get("S^-½"), scale), batch.G, None)
            else:
                left = right = scale[:, None, None, None] * batch.G
        return {"S": moment(left, self.largest) / (i * k), "A": moment(right.mT, self.largest) / (o * k)}

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        if self.refreshes(step) or not all(batch.has("S^-p") for batch in batches):
            self.refresh(batches)
        out = []
        for batch in batches:
            v = _times(batch.get("S^-p"), batch.M, batch.get("A^-p"))
            out.append(of_length(v, self.rms * v[0].numel() ** 0.5, batch))
        return out

    def refresh(self, batches: Sequence[ShapeBatch]) -> None:
        for batch in batches:
            means = [diagonal(batch.get(letter)).mean(1, keepdim=True) for letter in "SA"]
            for letter, λ in zip("SA", self.shifts(*means), strict=True):
                self._invert(batch, letter, λ)

    def _invert(self, batch: ShapeBatch, letter: str, λ: Tensor) -> None:
        """(F + λ)^-p and, in KL divergence, its root F^-½, scaled so that the mean of xᵀF⁻¹x is the length of x."""
        F = batch.get(letter)
        d, kl = F.shape[1], self.fit == "kl"
        powers = [self.power, 0.5] if kl else [self.power]
        if F.ndim == 2:
            each = [(F + λ).pow(-p) for p in powers]
        else:
            dead = λ.isinf().squeeze(1)
            each, residual = inverse_powers(
                F,
                powers,
                shift=λ.squeeze(1).masked_fill(dead, 1.0),
                condition=d / self.param_groups[0]["damping"] + 1 if self._relative else 1e6,
                error=NOISE,
                precision=suited_precision(F),
            )
            bad = (residual > _ROOT_ERROR)[:, None, None]
            for at, (root, X) in enumerate(zip(("-p", "-½"), each, strict=False)):
                # What did not converge keeps its last root; without one it is NaN, and the step raises.
                last = batch.get(f"{letter}^{root}") if batch.has(f"{letter}^{root}") else torch.nan
                each[at] = torch.where(bad, last, X.masked_fill(dead[:, None, None], 0.0))
        batch.put(f"{letter}^-p", each[0])
        if kl:
            R = each[1]
            trace = (F * R.square()).sum(1) if F.ndim == 2 else ((F @ R) * R).sum((1, 2))
            scale = torch.where(trace > 0, d / trace, 0.0).sqrt()
            batch.put(f"{letter}^-½", R * scale.view(-1, *[1] * (R.ndim - 1)))


def moment(X: Tensor, largest: float) -> Tensor:
    """Σ_k X_k X_kᵀ [N o o] of matrices [N k o i], or its diagonal [N o] where it has more than ``largest`` rows."""
    if X.shape[2] > largest:
        return X.square().sum((1, 3))
    wide = X.transpose(1, 2).flatten(2)
    return wide @ wide.mT


def diagonal(F: Tensor) -> Tensor:
    """[N d] of a factor, which may be a diagonal."""
    return F if F.ndim == 2 else F.diagonal(dim1=1, dim2=2)


def _times(left: Tensor | None, W: Tensor, right: Tensor | None) -> Tensor:
    """L W R of matrices [N k o i], where a side may be a diagonal."""
    if left is not None:
        W = left[:, None, :, None] * W if left.ndim == 2 else left.unsqueeze(1) @ W
    if right is not None:
        W = W * right[:, None, None] if right.ndim == 2 else W @ right.unsqueeze(1)
    return W


def _or_number(root: Tensor, number: Tensor) -> Tensor:
    """The root, or a number times the identity where it is zero: a factor that was always zero does not weigh."""
    numbers = diagonal(root)
    more = torch.where(numbers.sum(1) > 0, 0.0, number).unsqueeze(1).expand_as(numbers)
    return root + (more if root.ndim == 2 else torch.diag_embed(more))
