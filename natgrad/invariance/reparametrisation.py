"""Is the natural gradient the same in other coordinates? On the model it is; on the parameters it need not be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.geometry import Vector, unflatten
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model
from natgrad.natural import natural_gradient
from natgrad.output.metric import Euclidean, OutputMetric
from natgrad.solve import Pinv, Solver
from natgrad.structures import Structure

Point = dict[str, Tensor]


@final
@dataclass(frozen=True)
class Reparametrisation:
    """Two natural gradients of the same loss at the same function, in coordinates ξ and θ with ξ = f(θ).

    ``model_gap`` = ‖dψ v_θ − dφ v_ξ‖/‖dφ v_ξ‖ (001 (19)); ``parameter_gap`` = ‖df v_θ − v_ξ‖/‖v_ξ‖ (001 (25)).
    """

    model_gap: float
    parameter_gap: float
    on_model: tuple[Tensor, Tensor]  # dφ v_ξ and dψ v_θ [n *out]
    on_parameters: tuple[Vector, Vector]  # v_ξ and df v_θ

    def __str__(self) -> str:
        return f"gap on the model {self.model_gap:.2g}, on the parameters {self.parameter_gap:.2g}"


def reparametrisation(
    model: nn.Module | Callable[..., Any],
    f: Callable[[Point], Point],
    x: Inputs,
    loss: Callable[[Tensor], Tensor],
    metric: OutputMetric | None = None,
    *,
    structure: Structure | None = None,
    solver: Solver | None = None,
    damping: float = 0.0,
    params: Mapping[str, Tensor] | None = None,
) -> Reparametrisation:
    """Compare the natural gradient of φ at ξ = f(θ) with that of ψ = φ∘f at θ (001 theorem 2 and section 3.2).

    ``f`` is a diffeomorphism of the parameters, from a dict of tensors to one with the same names and shapes; θ is
    where the model's parameters (or ``params``) are now. ``loss`` is a function of the outputs. By default the metric
    is Euclidean and the inverse Moore–Penrose: the gap on the model is rounding, and the gap on the parameters is not,
    where the model is over-parametrised. Damping shows how much it breaks the invariance.

    >>> import natgrad as ng
    >>> model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    >>> double = lambda θ: {name: 2 * p + p**3 for name, p in θ.items()}
    >>> x = torch.randn(4, 2, dtype=torch.float64)
    >>> gap = ng.invariance.reparametrisation(model, double, x, lambda y: y.square().mean())
    >>> gap.model_gap < 1e-8 < gap.parameter_gap
    True
    """
    base = Model.of(model, params)
    θ = {name: p.detach() for name, p in base.params.items()}
    ξ = _image(f, θ)
    jacobian = _jacobian(f, θ)
    φ = Model(lambda p, inputs: base(p, inputs), ξ)
    ψ = Model(lambda p, inputs: base(f(dict(p)), inputs), θ)

    def gradient(of: Model) -> Vector:
        chosen = metric or Euclidean()
        return natural_gradient(of, x, loss, chosen, structure=structure, solver=solver or Pinv(), damping=damping)

    v_ξ, v_θ = gradient(φ), gradient(ψ)
    pushed = v_ξ.unflatten(jacobian @ v_θ.flatten())
    on_model = (linearise(φ, x).push(v_ξ), linearise(ψ, x).push(v_θ))
    return Reparametrisation(
        model_gap=_relative(on_model[1] - on_model[0], on_model[0]),
        parameter_gap=_relative((pushed - v_ξ).flatten(), v_ξ.flatten()),
        on_model=on_model,
        on_parameters=(v_ξ, pushed),
    )


def _image(f: Callable[[Point], Point], θ: Point) -> dict[str, Tensor]:
    """ξ = f(θ), with the names and shapes of θ."""
    ξ = {name: p.detach() for name, p in f(dict(θ)).items()}
    names = [*θ, *(name for name in ξ if name not in θ)]
    wrong = [name for name in names if name not in ξ or name not in θ or ξ[name].shape != θ[name].shape]
    if wrong:
        raise ValueError(
            f"f must map the parameters to parameters with the same names and shapes, and does not for "
            f"{', '.join(wrong)}: return a tensor like the one that came in for every name, and no other"
        )
    return {name: ξ[name] for name in θ}


def _jacobian(f: Callable[[Point], Point], θ: Point) -> Tensor:
    """∂ξ/∂θ [p q] (torch's order; the F of 001 is its transpose, ERRATA 27), checked to be invertible."""

    def flat(t: Tensor) -> Tensor:
        image = f(unflatten(t, θ))
        return torch.cat([image[name].reshape(-1) for name in θ])

    jacobian: Tensor = torch.func.jacrev(flat)(torch.cat([p.reshape(-1) for p in θ.values()]))
    rank = int(torch.linalg.matrix_rank(jacobian))
    if rank < jacobian.shape[0]:
        raise ValueError(
            f"f is not a diffeomorphism at the parameters: its derivative has rank {rank} of {jacobian.shape[0]} "
            "(001, proposition 2: no gradient survives that)"
        )
    return jacobian


def _relative(difference: Tensor, reference: Tensor) -> float:
    size = float(torch.linalg.vector_norm(reference))
    return float(torch.linalg.vector_norm(difference)) / (size if size > 0 else 1.0)
