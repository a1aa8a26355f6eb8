"""Classes of residuals: a function of a model, and the points at which it is evaluated."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, Literal, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import is_asynchronous
from natgrad.errors import NonFiniteError
from natgrad.linalg import check_finite
from natgrad.log import listed
from natgrad.model import NETWORK_CHILD, Model, check_types, plain_name, tensors_of
from natgrad.output.metric import Euclidean
from natgrad.pullbacks.pullback import Batch, Observer, Pullback, layers_of
from natgrad.residual_check import flat_activations, refuse_pairs
from natgrad.show import brief

Points: TypeAlias = Tensor | tuple[Tensor, ...] | None
Reduction: TypeAlias = Literal["mean", "sum"]


@final
@dataclass(frozen=True)
class Residuals:
    """One class of residuals, such as an equation in a domain or the data of a curve.

    Args:
        function: r = ``function(model, x)`` [n *out]; row n belongs to point n alone. Without points it is a function
            of the model only, and may return one number, such as an integral.
        points: x [n *in], a tuple of such tensors, which the function gets one by one, or a function without arguments
            that draws new points for every step.
        weight: The weight of the class, positive.
        reduction: "mean" over the points, or "sum".

    Method:
        ½·weight·(1/N) Σ_n ‖r(x_n)‖²; "sum" leaves out 1/N.

    Example:
        >>> square = Residuals(lambda net, x: net(x) - x.square(), torch.rand(10, 1), weight=2.0)
        >>> square.weight
        2.0
    """

    function: Callable[..., Tensor]
    points: Points | Callable[[], Points] = None
    weight: float = field(default=1.0, kw_only=True)
    reduction: Reduction = field(default="mean", kw_only=True)

    __repr__ = brief

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"Residuals(function, points): a function of the model, not {type(self.function).__name__}")
        allowed = (Tensor, Callable, type(None))
        for each in self.points if isinstance(self.points, tuple) else (self.points,):
            check_types(points=(each, allowed, "a tensor, a tuple of tensors or a function that draws them"))
        words = "a number for the class; for one of each point multiply r by their roots"
        check_types(weight=(self.weight, Real, words))
        if not 0 < self.weight < math.inf:
            raise ValueError(f"Residuals(weight=…) must be positive and finite, got {self.weight}")
        if self.reduction not in ("mean", "sum"):
            raise ValueError(f'Residuals(reduction=…) is "mean" or "sum", not {self.reduction!r}')

    @property
    def resampled(self) -> bool:
        """Whether every step has points of its own."""
        return callable(self.points)

    def draw(self) -> Points:
        """The points of a step."""
        return self.points() if callable(self.points) else self.points


def _rows(name: str, r: Any, points: tuple[Tensor, ...], params: Iterable[Tensor]) -> Tensor:
    """The residuals, if they are some; one number is the row of no point, if there are none."""
    if not isinstance(r, Tensor):
        raise TypeError(f"the residuals {name!r} must be a tensor [n *out], a row for each point, got {r!r:.60}")
    if not r.is_floating_point():
        fix = "return torch.view_as_real of them" if r.is_complex() else "nothing can be differentiated"
        raise TypeError(f"the residuals {name!r} are {r.dtype}, and must be real floating-point numbers: {fix}")
    if r.numel() == 0:
        raise ValueError(f"the residuals {name!r} are a tensor {list(r.shape)} without entries: leave the class out")
    if torch.is_inference_mode_enabled():
        raise ValueError(
            "least squares differentiates the residuals, and torch.inference_mode() has no graphs: leave it"
        )
    if torch.is_grad_enabled() and not r.requires_grad and all(p.requires_grad for p in params):  # none is frozen
        raise ValueError(
            f"the residuals {name!r} do not depend on the parameters: compute them from the model by torch operations, "
            "without detach(), item() and torch.no_grad()"
        )
    return r.reshape(1) if not points and r.ndim == 0 else r


@final
class ResidualsOfNetwork(nn.Module):
    """The residuals as a module around the network, so that the layers of the network are seen.

    The parameters keep the names that they have in the network. Errors about NaN print the name of this class.
    """

    def __init__(self, name: str, net: nn.Module, function: Callable[..., Tensor]) -> None:
        super().__init__()
        self.add_module(NETWORK_CHILD, net)
        self.name: str = name
        self.function = function

    def forward(self, *points: Tensor) -> Tensor:
        # A function may differentiate the network in x, also where nobody asks for a graph.
        wanted, net = torch.is_grad_enabled(), self.get_submodule(NETWORK_CHILD)
        with torch.enable_grad():
            r = _rows(self.name, self.function(net, *points), points, net.parameters())
        return r if wanted else r.detach()


@final
@dataclass(frozen=True)
class ResidualClass:
    """A class of residuals of the given parameters: what it is called, its observer and how it is scaled."""

    name: str
    residuals: Residuals
    observer: Observer

    @property
    def model(self) -> Model:
        return self.observer.model

    def check(self, points: Points) -> None:
        """Refuse a class without points by name."""
        for t in tensors_of(points):
            if t.ndim and t.shape[0] == 0:
                raise ValueError(f"the residuals {self.name!r} have no points: leave the class out, or give it some")

    def pullback(self, points: Points) -> Pullback:
        """The residuals, as the outputs y [n *out] of a model, with the metric 1."""
        self.check(points)
        try:
            pb = self.observer.checked(points) if points is not None else self.observer.of(Batch(self.model, None))
            check_finite(pb.y, "what the function returns")
        except NonFiniteError as error:
            raise NonFiniteError(f"the residuals {self.name!r} where the step starts: {error}") from error
        return pb

    def weight(self, n: int) -> float:
        """The factor of the mean (1/N) Σ_n ‖r_n‖²."""
        return self.residuals.weight * (n if self.residuals.reduction == "sum" else 1)

    def rows(self, y: Tensor) -> Tensor:
        """The residuals [(k n)] from y [n *out], scaled so that the loss is half of their sum of squares."""
        n = y.shape[0]
        return y.reshape(n, -1).T.reshape(-1) * math.sqrt(self.weight(n) / n)

    def refuse_pairs(self, points: Points, shape: torch.Size) -> None:
        """Refuse residuals [n, n] that are differences of all pairs by mistake."""
        try:
            refuse_pairs(lambda: self._with_graph(points), shape)
        except ValueError as error:
            raise ValueError(f"the residuals {self.name!r}: {error}") from error

    def refuse_flat(self, points: Points) -> None:
        """Refuse residuals that depend on no parameter, because an activation is flat at all points."""
        flat = listed(map(plain_name, flat_activations(lambda: self._with_graph(points), self.model.module)))
        if flat:
            raise ValueError(
                f"the residuals {self.name!r} do not depend on the parameters where they are: {flat} returns one value "
                "for all that it gets, with the derivative zero; initialise the network otherwise, or use an "
                "activation without a flat part"
            )

    def _with_graph(self, points: Points) -> Any:
        leaves = {name: p.detach().clone().requires_grad_() for name, p in self.model.params.items()}
        with torch.enable_grad():
            return self.model(leaves, points)

    def at(self, params: Mapping[str, Tensor], points: Points) -> Tensor:
        """``rows`` at other parameters."""
        with torch.enable_grad():
            return self.rows(self.model(params, points).detach())


def classes_of(
    residuals: Residuals | Callable[..., Tensor] | Mapping[str, Residuals] | Sequence[Residuals],
    params: nn.Module | Mapping[str, Tensor],
    memory: int | None,
) -> list[ResidualClass]:
    """The classes with their models, all over the same parameters."""
    if isinstance(params, Mapping) and any(isinstance(each, Residuals) for each in params.values()):
        raise TypeError("LeastSquares(residuals, params) takes the residuals first, and then the model")
    out = []
    for name, each in _named(residuals):
        if not isinstance(each, Residuals):
            raise TypeError(f"the residuals {name!r} must be ng.Residuals(function, points), got {type(each).__name__}")
        model = _model(name, each.function, params)
        generator = None
        deferred = is_asynchronous(model.example.device)
        observer = Observer(model, Euclidean(), layers_of(model), generator, memory, deferred=deferred)
        out.append(ResidualClass(name, each, observer))
    if not out:
        raise ValueError("LeastSquares needs residuals: there is no class of them")
    return out


def _named(residuals: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(residuals, Residuals):
        yield "residuals", residuals
    elif isinstance(residuals, Mapping):
        yield from residuals.items()
    elif callable(residuals):
        yield "residuals", Residuals(residuals, reduction="sum")
    elif isinstance(residuals, Sequence):
        yield from ((str(at), each) for at, each in enumerate(residuals))
    else:
        raise TypeError(
            "LeastSquares(residuals, params): residuals are ng.Residuals(function, points), a dict or a list of "
            f"these, or a function of the parameters alone, not {type(residuals).__name__}"
        )


def _model(name: str, function: Callable[..., Tensor], params: nn.Module | Mapping[str, Tensor]) -> Model:
    if isinstance(params, nn.Module):
        Model.of(params)  # refuses parameters under the names that they have in the network
        return Model.of(ResidualsOfNetwork(name, params, function))
    if not isinstance(params, Mapping):
        raise TypeError(
            f"LeastSquares(residuals, params): params is a module, or a dict of tensors by name, not "
            f"{type(params).__name__}; the residuals are functions of it, function(params, points)"
        )

    def evaluated(θ: Mapping[str, Tensor], points: Points) -> Tensor:
        given = () if points is None else points if isinstance(points, tuple) else (points,)
        with torch.enable_grad():
            return _rows(name, function(θ, *given), given, θ.values())

    return Model.of(evaluated, params)
