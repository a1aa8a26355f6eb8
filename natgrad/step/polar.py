"""Steepest descent in the spectral norm of a metric: Muon, and Muon in coordinates whitened by the metric."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, final

import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.roots import MUON, Coefficients, minimax, polar
from natgrad.errors import IncompatibleError
from natgrad.geometry import Covector, Vector
from natgrad.linalg import check_number_fields
from natgrad.step.base import PlainRule, SharpMap, rescale_
from natgrad.step.normalised import check_rms, ratios

_CONDITION = 1e4  # singular values below the largest by this factor need not become one


@final
@dataclass(frozen=True)
class Polar(PlainRule):
    """Give all singular values of a matrix's step the same size, as Muon does.

    Parameters with fewer than two axes have no polar factor: give them to ``fallback="adamw"``. It also takes matrices
    with one row or one column, unless there are no others: their polar factor has one length, however small the
    gradient is.

    Args:
        rms: The root mean square of a step of full rank, as a multiple of the learning rate.
        iteration: "muon" is five quintic steps in bfloat16, as in torch, after which singular values are between 0.7
            and 1.2; "minimax" converges for those that are at least 10⁻⁴ of the norm, in the precision of the
            parameters (Amsel et al. 2025).

    Method:
        v = G^-p/2 polar(G^-p/2 ω) of every matrix, where polar(UΣVᵀ) = UVᵀ. In the identity metric this is Muon (Jordan
        et al. 2024). p is the power of the structure (``Kronecker(power=…)``); with ``power=0`` nothing is estimated.

        Of all steps with ‖G^p/2 v‖ ≤ 1 in the spectral norm it descends most: in a layer with G = S ⊗ A no unit vector
        of inputs changes the outputs by more than one, both measured in the metric.

        Then v is made as long as rms·√max(o, i) times polar(…). In the identity metric this is
        ``torch.optim.Muon(adjust_lr_fn="match_rms_adamw")`` for ``rms=0.2`` (Liu et al. 2025), with
        ``momentum_on="gradients"``. A step that is zero stays zero, and so does that of a gradient of which only
        rounding is left beside the largest one (``natgrad.linalg.is_rounding``).

        A kernel [o i h w] is the matrix [o i·h·w]. A stack of experts [e i o] cannot be told from a kernel here:
        ``fallback="adamw"`` takes it, unless the metric is one of outputs.

        In "muon" the scale of the loss, or of the metric, changes a step by the rounding of bfloat16, which the steps
        enlarge: by less than 3 % where the gradients have full rank, and by up to 20 % where their rank is low. By
        "minimax" it changes by the rounding of the parameters.

        In the identity metric the gradient itself is rounded, as in torch: a step of 60 × 30 numbers changes by less
        than 10 %, one of a smaller matrix by more. Where the rank is low, directions without a gradient are rounding,
        and most of the step changes.

    Example:
        >>> Polar()
        Polar(rms=0.2, iteration='muon')
        >>> def change(rank, iteration, identity=False):
        ...     torch.manual_seed(0)
        ...     ω = Covector({"w": torch.randn(60, rank) @ torch.randn(rank, 30)})
        ...     rule, same = Polar(iteration=iteration), SharpMap(lambda ω: Vector(dict(ω)), identity)
        ...     one, other = (rule.direction(k * ω, same)["w"] for k in (1.0, 3.0))
        ...     return float((other - one).norm() / one.norm())
        >>> change(30, "muon") < 0.03, change(4, "muon") < 0.2, change(30, "minimax") < 1e-3
        (True, True, True)
        >>> change(30, "muon", identity=True) < 0.1, change(4, "muon", identity=True) > 0.5
        (True, True)
    """

    bounded: ClassVar[bool] = True
    measured: ClassVar[bool] = False
    rms: float = 0.2
    iteration: Literal["muon", "minimax"] = "muon"

    def __post_init__(self) -> None:
        check_number_fields(self)
        check_rms("Polar", self.rms)
        if self.iteration not in ("muon", "minimax"):
            raise ValueError(f'Polar(iteration=…) is "muon" or "minimax", not {self.iteration!r}')

    @property
    def power_share(self) -> float:  # type: ignore[override]
        return 0.5

    def admit(self, params: Mapping[str, Tensor]) -> None:
        flat = [name for name, p in params.items() if p.ndim < 2]
        if flat:
            raise IncompatibleError(
                f"Polar is for matrices, and these have fewer than two axes: {', '.join(flat)}. "
                'NaturalGradient(fallback="adamw") gives them to AdamW; elsewhere, take another step rule, as '
                "Natural(polar=False) does"
            )

    def direction(self, ω: Covector, sharp: SharpMap) -> Vector:
        factors, norms = self._polar(sharp(ω), sharp.identity)
        # As long as the gradient, so that v is as large as the natural gradient, and in the range of float16.
        size = torch.stack(fused.norms(list(ω.values()))).sum()
        v = sharp(Covector({name: factors[name] * size for name in ω}))
        lengths = {name: self.rms * math.sqrt(max(_shape(t))) for name, t in v.items()}
        rescale_(v, ratios(lengths, v, ω, torch.stack([norms[name] for name in v])))
        return Vector({name: t.to(ω[name].dtype) for name, t in v.items()})

    def scale(self, v: Vector, square: Tensor) -> None:
        return None

    def _polar(self, matrices: Vector, identity: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The polar factor of every matrix, and its norm []: all of one shape at once, the tall ones transposed.

        In the ``identity`` metric they are rounded first, as torch's Muon does. Else they are divided by their norm
        first: a metric has any unit, and the iteration enlarges rounding.
        """
        alike: dict[tuple[int, int, torch.dtype], list[str]] = defaultdict(list)
        for name, t in matrices.items():
            alike[min(_shape(t)), max(_shape(t)), t.dtype].append(name)
        out, norms = dict[str, Tensor](), dict[str, Tensor]()
        for (_, _, dtype), names in alike.items():
            precision, single = self._precision(dtype), torch.promote_types(dtype, torch.float32)
            X = torch.stack([_wide(matrices[name]) for name in names]).to(precision if identity else single)
            if not identity:
                X = X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp(min=torch.finfo(single).tiny)
            X = polar(X, schedule=self._schedule(dtype), dtype=precision)
            norms |= zip(names, torch.linalg.vector_norm(X, dim=(1, 2), dtype=single).unbind(), strict=True)
            for name, M in zip(names, X.to(single if dtype == torch.float16 else dtype).unbind(), strict=True):
                of_matrix = M.mT if _is_tall(matrices[name]) else M
                out[name] = of_matrix.reshape(matrices[name].shape)
        return out, norms

    def _precision(self, dtype: torch.dtype) -> torch.dtype:
        return torch.bfloat16 if self.iteration == "muon" else torch.promote_types(dtype, torch.float32)

    def _schedule(self, dtype: torch.dtype) -> Sequence[Coefficients]:
        if self.iteration == "muon":
            return MUON
        return minimax(_CONDITION, 1e-12 if dtype == torch.float64 else 1e-6)


def _shape(t: Tensor) -> tuple[int, int]:
    """o and i of a matrix, or of a kernel as one."""
    return t.shape[0], math.prod(t.shape[1:])


def _wide(t: Tensor) -> Tensor:
    """A matrix, or a kernel as one, that has at least as many columns as rows."""
    M = t.reshape(len(t), -1)
    return M.mT if _is_tall(t) else M


def _is_tall(t: Tensor) -> bool:
    o, i = _shape(t)
    return o > i
