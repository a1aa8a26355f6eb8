"""ng.Muon: steps along polar factors."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.roots import MUON, minimax, polar_of_wide
from natgrad.gradients.optimizer import GradientOptimizer, Groups, Parameters, ShapeBatch
from natgrad.linalg import Relative
from natgrad.model import check_types
from natgrad.step.normalised import check_rms

Iteration: TypeAlias = Literal["muon", "minimax"]

_CONDITION = 1e4  # singular values below the largest by this factor need not become one


@final
class Muon(GradientOptimizer):
    """Muon: steps with equal singular values, for matrices (Jordan et al. 2024).

    Its steps are those of ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` (Liu et al. 2025), matrices of one shape
    as one batch; AdamW steps what it steps in ``Natural``.

    Args:
        params: The model, ``model.parameters()``, ``model.named_parameters()``, or parameter groups of these. Of a
            plain list it is not known which are embeddings and the head.
        lr: Learning rate. AdamW's best is no guide: search in factors of 2 from the default, mostly upwards.
        weight_decay: Decoupled weight decay, as AdamW's.
        momentum: μ of the moving average of gradients.
        nesterov: Nesterov's momentum; with False M is m/(1 − μᵗ).
        rms: The root mean square of a step of full rank, as a multiple of the learning rate.
        iteration: "muon" is five quintic steps in bfloat16, as in torch, after which singular values are between 0.7
            and 1.2; "minimax" converges for those that are at least 10⁻⁴ of the norm, in the precision of the
            parameters (Amsel et al. 2025).
        groups: Parameter groups beside ``params``, see ``Natural``.

    Method:
        θ ← (1 − lr·wd)θ − lr·rms·√max(o, i)·polar(M), polar(UΣVᵀ) = UVᵀ: steepest descent in the spectral norm, with
        the identity as the metric. Nothing is estimated.

        For matrices with both sides of 256 or more, other products than torch's compute the same iteration in less
        time, and the two steps differ by up to 8 % of UVᵀ (of a matrix of low rank by up to 40 % of its step: the
        iteration enlarges rounding).

        Five iterations do not converge: both steps are more than 10 % away from UVᵀ, and the distance of this one
        exceeds that of torch's by at most 1 %.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> opt = ng.Muon(nn.Linear(4, 3), lr=3e-3)
    """

    polar = True
    largest: int = 1

    def __init__(
        self,
        params: Parameters,
        *,
        lr: float = 3e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        rms: float = 0.2,
        iteration: Iteration = "muon",
        groups: Groups = (),
    ) -> None:
        check_rms("Muon", rms)
        check_iteration("Muon", iteration)
        check_types(nesterov=(nesterov, bool, "True or False"))
        self.nesterov: bool = nesterov
        self.rms: float = rms
        self.iteration = iteration
        super().__init__(params, groups, lr=lr, weight_decay=weight_decay, momentum=momentum, damping=Relative(1e-2))

    def directions(self, batches: Sequence[ShapeBatch], step: int) -> list[Tensor]:
        out = []
        for batch, X in zip(batches, polar_factors([batch.M for batch in batches], self.iteration), strict=True):
            unit = self.rms * max(batch.M.shape[2:]) ** 0.5
            out.append((X * unit).masked_fill(batch.is_zero[:, None, None, None], 0.0))
        return out


def check_iteration(optimizer: str, iteration: str) -> None:
    """An iteration has a name."""
    if iteration not in ("muon", "minimax"):
        raise ValueError(f'{optimizer}(iteration=…) is "muon" or "minimax", not {iteration!r}')


def polar_factors(stacks: Sequence[Tensor], iteration: Iteration) -> list[Tensor]:
    """UVᵀ of all matrices UΣVᵀ [N 1 o i] of stacks of several shapes: a wide matrix and a tall one as one batch.

    >>> polar_factors([torch.tensor([[[[3.0], [4.0]]]])], "minimax")[0].flatten()
    tensor([0.6000, 0.8000])
    """
    alike: dict[Hashable, list[tuple[int, Tensor]]] = {}
    for number, M in enumerate(stacks):
        wide = M.squeeze(1) if M.shape[2] <= M.shape[3] else M.squeeze(1).mT
        alike.setdefault((wide.shape[1:], wide.dtype), []).append((number, wide))
    out = list(stacks)
    for members in alike.values():
        numbers, wides = zip(*members, strict=True)
        W, schedule, dtype = wides[0] if len(wides) == 1 else torch.cat(wides), MUON, torch.bfloat16
        if iteration == "minimax":
            schedule, dtype = minimax(_CONDITION, 1e-12 if W.dtype == torch.float64 else 1e-6), W.dtype
        X = polar_of_wide(W, schedule=schedule, dtype=dtype).to(W.dtype)
        each = (X,) if len(wides) == 1 else X.split_with_sizes([wide.shape[0] for wide in wides])
        for number, mine in zip(numbers, each, strict=True):
            out[number] = (mine if stacks[number].shape[2] <= stacks[number].shape[3] else mine.mT).unsqueeze(1)
    return out
