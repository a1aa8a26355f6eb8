"""The same network in other affine bases, or with other parameters."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.modules import children_in, parameters_in
from natgrad.diagnosis import diagnose
from natgrad.errors import IncompatibleError
from natgrad.geometry import Vector, unflatten
from natgrad.invariance.affine import Bases, Random, Transformed, TransformedRecurrent
from natgrad.linearise import linearise
from natgrad.model import Inputs, Model, OpaqueNetwork
from natgrad.musical import natural_gradient
from natgrad.output.metric import Euclidean, OutputMetric
from natgrad.pullbacks.pullback import Pullback, pullback
from natgrad.rules.base import trainable
from natgrad.show import brief
from natgrad.solve.solvers import Pinv, Solver
from natgrad.structures.base import Structure
from natgrad.structures.dense import Dense
from natgrad.structures.implicit import Implicit
from natgrad.structures.kernel import Kernel

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def reparametrise(model: nn.Module, seed: int | Bases = 0, *, keep: Collection[str] = ()) -> nn.Module:
    """Write a network in other coordinates: a new network that computes the same function.

    Args:
        model: The network. Every ``Linear``, convolution and ``RNN``/``LSTM``/``GRU`` of a copy is replaced by one in
            other bases.
        seed: Draws random bases, or is a ``Bases`` object: ``Original()`` keeps the bases, ``Chosen({name:
            Coordinates(…)})`` sets them.
        keep: Names of modules that stay as they are, with all their children. Trainable parameters of other layers must
            be frozen or kept; the error names them.

    Returns:
        The new network.

    Method:
        Every layer has a† = Ωa + γ and z = Φz† + τ. Everything between the layers (activation functions, pooling,
        residual sums) stays, so the transformed activation function of a layer is Ωφ(Φ· + τ) + γ. The inputs and
        outputs of the network keep their bases; without that it would be another function.

    Example:
        >>> import torch
        >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        >>> x = torch.randn(5, 3, dtype=torch.float64)
        >>> torch.allclose(reparametrise(model, seed=1)(x), model(x))
        True
    """
    copied = copy.deepcopy(model)
    unknown = sorted(set(keep) - {name for name, _ in copied.named_modules()})
    if unknown:
        raise ValueError(f"keep names no module of the model: {', '.join(unknown)}")
    skipped = {child for name, module in copied.named_modules() if name in keep for child in module.modules()}
    _check(copied, skipped)
    bases = Random(seed) if isinstance(seed, int) else seed
    moved: dict[nn.Module, nn.Module] = {}
    for name, module in copied.named_modules():
        if module in skipped or _reason(module):
            continue
        if isinstance(module, _RECURRENT):
            moved[module] = TransformedRecurrent(name, module, bases)
        elif isinstance(module, _LAYERS):
            moved[module] = Transformed(name, module, bases)
    if not moved:
        raise ValueError(f"there is nothing to transform in {type(model).__name__}: it has no {_names()} outside keep=")
    for parent in copied.modules():
        for name, child in children_in(parent).items():  # named_children() would skip the second use of a layer
            if child in moved:
                children_in(parent)[name] = moved[child]
    return moved.get(copied, copied)


def _names() -> str:
    *first, last = (kind.__name__ for kind in (*_LAYERS, *_RECURRENT))
    return f"{', '.join(first)} or {last}"


def _check(model: nn.Module, skipped: set[nn.Module]) -> None:
    """Refuse, by name, layers whose bases cannot be changed."""
    others = []
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        for parameter in [p for p in parameters_in(module).values() if p is not None and p.requires_grad]:
            first, owner = owners.setdefault(parameter, (name, module))
            if owner is not module and not {owner, module} <= skipped:
                raise IncompatibleError(
                    f"{first} and {name} share a parameter, so that one change of basis would have to fit both: "
                    f"give them parameters of their own, or keep both, keep=({first!r}, {name!r})"
                )
        if module not in skipped and (reason := _reason(module)) and trainable(module):
            others.append(f"{name or 'the model'} ({reason})")
    if others:
        raise IncompatibleError(
            f"there is no change of basis for {', '.join(others)}: a layer must be exactly a {_names()}. Freeze its "
            "parameters with requires_grad_(False), or leave it as it is with keep=(name,)"
        )


def _reason(module: nn.Module) -> str:
    """Why the parameters of a module cannot be transformed; empty if they can."""
    if type(module) not in (*_LAYERS, *_RECURRENT):
        return type(module).__name__
    if "forward" in vars(module):
        return f"{type(module).__name__} with another forward"
    if isinstance(module, nn.RNNBase) and module.proj_size:
        return f"{type(module).__name__} with proj_size={module.proj_size}"
    if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
        return f"{type(module).__name__} with dropout={module.dropout}"
    extra = set(parameters_in(module)) - {"weight", "bias"}
    if extra and not isinstance(module, nn.RNNBase):
        return f"{type(module).__name__} with the parameter {', '.join(sorted(extra))}"
    return ""


# Nonlinear changes of the parameters: the natural gradient on the model is invariant; the one on the parameters need
# not.

Point = dict[str, Tensor]


@final
@dataclass(frozen=True)
class Reparametrisation:
    """Two natural gradients of the same loss, in two coordinate systems of one model.

    Attributes:
        model_gap: ‖dψ v_θ − dφ v_ξ‖/‖dφ v_ξ‖, in coordinates ξ and θ with ξ = f(θ).
        parameter_gap: ‖df v_θ − v_ξ‖/‖v_ξ‖.
        on_model: The changes of the outputs dφ v_ξ and dψ v_θ [n *out].
        on_parameters: The steps v_ξ and df v_θ.
        caveats: Why the gap on the model need not be rounding, or says less than it seems; empty if the theorem holds.
    """

    model_gap: float
    parameter_gap: float
    on_model: tuple[Tensor, Tensor]  # dφ v_ξ and dψ v_θ [n *out]
    on_parameters: tuple[Vector, Vector]  # v_ξ and df v_θ
    caveats: tuple[str, ...] = ()

    __repr__ = brief

    def __str__(self) -> str:
        gaps = f"gap on the model {self.model_gap:.2g}, on the parameters {self.parameter_gap:.2g}"
        return "\n".join([gaps, *self.caveats])


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
    """Compare the natural gradients of one model in two coordinate systems of its parameters.

    Args:
        model: A module or a pure function f(params, x); it is not changed.
        f: A diffeomorphism of the parameters, from a dict of tensors to one with the same names and shapes.
        x: The inputs.
        loss: A function of the outputs.
        metric: The metric on the outputs; ``Euclidean()`` by default.
        structure: How the metric is held; ``Dense()`` by default.
        solver: How it is inverted; ``Pinv()`` by default.
        damping: λ ≥ 0; with it the gaps show how much damping breaks the invariance.
        params: The parameters θ, where the model is a pure function; by default its present ones.

    Returns:
        A ``Reparametrisation``.

    Method:
        Compare the natural gradient of φ at ξ = f(θ) with that of ψ = φ∘f at θ (van Oostrum, Müller and Ay (2023)).

        For an over-parametrised model the gap on the model is rounding, and the gap on the parameters is not. This is
        their theorem 2, for the whole metric and a generalised inverse; ``caveats`` says where it does not apply: with
        damping, a part of the metric or samples of it.

        It also says where the rank of the metric is not constant, as ``diagnose`` finds: there parametrisations that no
        map relates can differ.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
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
        caveats=_caveats(φ, x, metric or Euclidean(), structure, damping),
    )


def _caveats(φ: Model, x: Inputs, metric: OutputMetric, structure: Structure | None, damping: float) -> tuple[str, ...]:
    """Where theorem 2 does not apply, and where its conclusion needs the map."""
    caveats = []
    if damping:
        caveats.append(f"theorem 2 does not apply: damping {damping:g} is another metric in every coordinate system")
    if structure is not None and not isinstance(structure, Dense | Kernel | Implicit):
        caveats.append(f"theorem 2 does not apply: {type(structure).__name__} keeps a part of the metric only")
    if not metric.exact:
        return (*caveats, "theorem 2 does not apply: two samples of a metric are two metrics")
    found = diagnose(cast(Pullback, pullback(φ, x, metric)))
    if found.constant_rank is False:
        caveats.append(
            f"no constant rank: it is {found.rank} here and {found.nearby_rank} nearby, so that a parametrisation that "
            "is not f away from this one can have another natural gradient"
        )
    return tuple(caveats)


@final
class Rewritten(OpaqueNetwork):
    """A network whose parameters θ are written in other coordinates: it computes with f(θ)."""

    def __init__(self, model: nn.Module, f: Callable[[Point], Point], θ: Point) -> None:
        super().__init__(model, θ)
        self._map = f

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return torch.func.functional_call(self.network, self._map(self.point), args, kwargs)


def rewritten(model: nn.Module, f: Callable[[Point], Point]) -> tuple[nn.Module, nn.Module]:
    """The network at ξ = f(θ), with θ the parameters of ``model``, and the same function with the parameters θ."""
    θ = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    return Rewritten(model, lambda ξ: ξ, _image(f, θ)), Rewritten(model, f, θ)


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
    """∂ξ/∂θ [p q], with ξ along the rows; refused if it is singular."""

    def flat(t: Tensor) -> Tensor:
        image = f(unflatten(t, θ))
        return torch.cat([image[name].reshape(-1) for name in θ])

    jacobian: Tensor = torch.func.jacrev(flat)(torch.cat([p.reshape(-1) for p in θ.values()]))
    rank = int(torch.linalg.matrix_rank(jacobian))
    if rank < jacobian.shape[0]:
        raise ValueError(
            f"f is not a diffeomorphism at the parameters: its derivative has rank {rank} of {jacobian.shape[0]}. "
            "Take a map with an invertible derivative"
        )
    return jacobian


def _relative(difference: Tensor, reference: Tensor) -> float:
    size = float(torch.linalg.vector_norm(reference))
    return float(torch.linalg.vector_norm(difference)) / (size if size > 0 else 1.0)
