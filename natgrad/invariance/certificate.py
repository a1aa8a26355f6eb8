"""The invariance certificate: do the steps of an optimizer depend on the coordinates of the network?"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import seeded_streams
from natgrad.errors import NonFiniteError
from natgrad.invariance.affine import Bases, Original
from natgrad.invariance.reparametrise import reparametrise, rewritten
from natgrad.model import Inputs, Model, arguments, evaluating, map_tensors
from natgrad.optim.optimizer import NaturalGradient
from natgrad.show import as_html

_HALVINGS = 4  # of the learning rate, for an order of convergence
_NOISE = 100.0  # differences up to this multiple of those that one rounding causes count as rounding

MakeOptimizer: TypeAlias = Callable[[nn.Module], torch.optim.Optimizer]


@final
@dataclass(frozen=True)
class Certificate:
    """How far one network drifts from itself in other coordinates during training; ``print`` it.

    All differences are max|y† − y|/max|y| over the batch and fresh inputs.

    Attributes:
        differences: Between the two networks, before the first step and after each step.
        moved: Between the functions at the end and at the start, in the original bases.
        tolerance: The largest difference that counts as rounding.
        rounding: If the tolerance is exceeded, between the transformed network and a copy that is trained with
            parameters and inputs perturbed by one rounding error each; otherwise empty.
        shorter: With a ``map`` that does not keep the steps, the difference at the end of runs with the learning rate
            times 1, ½, ¼, ….
    """

    differences: tuple[float, ...]
    moved: float
    tolerance: float = 1e-9
    rounding: tuple[float, ...] = ()
    shorter: tuple[float, ...] = ()

    @property
    def order(self) -> float | None:
        """q in difference ∝ lrᵠ, from the two shortest learning rates; None without ``shorter``.

        About 1: not invariant, as the gradient. About 2: invariant to first order, as the natural gradient. About 3: to
        second order, as with the geodesic correction.
        """
        if len(self.shorter) < 2 or min(self.shorter[-2:]) == 0:
            return None
        return math.log2(self.shorter[-2] / self.shorter[-1])

    _repr_html_ = as_html

    @property
    def largest(self) -> float:
        """The largest of the differences."""
        return max(self.differences)

    @property
    def invariant(self) -> bool:
        """Whether the largest difference is within the tolerance."""
        return self.largest <= self.tolerance

    @property
    def rounded(self) -> int | None:
        """The step from which on the certificate is lost to rounding, or None.

        It is the first step whose difference exceeds the tolerance, if one rounding of the parameters and inputs causes
        as large a difference, within a factor of 100. An undamped step multiplies rounding by the condition number of
        the metric.
        """
        pairs = zip(self.differences, self.rounding, strict=False)
        beyond = ((step, change, noise) for step, (change, noise) in enumerate(pairs) if change > self.tolerance)
        return next((step if change <= _NOISE * noise else None for step, change, noise in beyond), None)

    def __str__(self) -> str:
        head, lost = "step  difference in function", self.rounded
        rows = [f"{step:>4}  {difference:.1e}" for step, difference in enumerate(self.differences)]
        verdict = "invariant" if self.invariant else "not invariant"
        if lost is not None:
            head, verdict = f"{head}  of one rounding", f"lost to rounding from step {lost} on"
            rows = [f"{row:<30}{noise:.1e}" for row, noise in zip(rows, self.rounding, strict=True)]
        if self.order is not None:
            rows = [f"   ÷{2**k:<5}{difference:.1e}" for k, difference in enumerate(self.shorter)]
            head, verdict = "  lr      difference in function", f"of order lr^{self.order:.2f}"
        sizes = f"at most {self.largest:.1e} (tolerance {self.tolerance:.0e}); it moved by {self.moved:.1e}"
        return "\n".join([head, *rows, f"{verdict}: {sizes}"])


@final
@dataclass(frozen=True)
class Sweep:
    """The certificates of one optimizer at several dampings: how much damping breaks invariance.

    Attributes:
        certificates: The certificates by damping.
    """

    certificates: Mapping[float, Certificate]

    _repr_html_ = as_html

    def __str__(self) -> str:
        rows = [f"{damping:>8.0e}  {certificate.largest:.1e}" for damping, certificate in self.certificates.items()]
        return "\n".join([" damping  difference in function", *rows])


def certify(
    make_optimizer: MakeOptimizer,
    model: nn.Module,
    batch: tuple[Inputs, Any],
    steps: int = 10,
    *,
    map: Callable[[dict[str, Tensor]], dict[str, Tensor]] | None = None,
    loss: Callable[[Tensor, Any], Tensor] | None = None,
    seed: int | Bases = 0,
    keep: Collection[str] = (),
    output: Callable[[Any], Tensor] | None = None,
    tolerance: float = 1e-9,
) -> Certificate:
    """Test whether an optimizer takes the same steps in other coordinates of the network.

    Use float64: every step multiplies rounding by the condition numbers of the metrics. Undamped natural-gradient and
    K-FAC steps are invariant if the metric is not singular (on softmax logits it always is).

    Args:
        make_optimizer: ``make_optimizer(model)`` makes the optimizer for a given network. A generator must be made
            inside it, so that all networks get the same random numbers.
        model: The network.
        batch: (x, target).
        steps: The number of training steps to compare.
        map: A smooth, invertible function f of the trained parameters by name, in place of bases: the network with the
            parameters f(θ) is compared with itself in the coordinates θ.
        loss: A function of outputs and target, by default ½‖y − t‖² summed over the outputs and averaged over the
            examples.
        seed: The seed of random bases, or ``Bases``, as in ``reparametrise``.
        keep: Names of modules that stay as they are.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        tolerance: The largest relative difference that counts as rounding.

    Returns:
        The ``Certificate``.

    Method:
        The model and its affine reparametrisation are trained alike, and their functions compared (Luk and Grosse
        2018). Both networks have the form of ``reparametrise``, one of them in the original bases. If they differ, a
        third network shows whether rounding alone explains it (``rounded``).

        Along a nonlinear ``map`` only infinitesimal steps of the natural gradient agree (van Oostrum, Müller and Ay
        2023, section 4). If the steps differ, the runs are repeated with the learning rate halved four times, and
        ``order`` is the exponent of lr in the difference: 2 for an undamped natural gradient, 3 with its
        ``GeodesicCorrected``, 1 for gradients.

        Both networks are then opaque functions of their parameters, without layers.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()
        >>> batch = torch.randn(64, 2, dtype=torch.float64), torch.randn(64, 2, dtype=torch.float64)
        >>> make = lambda model: torch.optim.SGD(model.parameters(), lr=0.1)
        >>> sgd = ng.invariance.certify(make, model, batch, steps=3)
        >>> sgd.invariant, len(sgd.differences)
        (False, 4)
        >>> cubic = lambda θ: {name: p + p**3 for name, p in θ.items()}
        >>> round(ng.invariance.certify(make, model, batch, steps=1, map=cubic).order)
        1
    """
    if map is not None and (keep or seed != 0):
        raise ValueError(
            "map= writes all parameters in other coordinates, and takes neither seed= nor keep=: leave them"
        )
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    run = _Run(make_optimizer, batch, steps, half_squares if loss is None else loss, output)
    if map is None:
        network, dagger = (reparametrise(model, bases, keep=keep) for bases in (Original(), seed))
    else:
        network, dagger = rewritten(model, map)
    run.check_equal(model if map is None else network, network, dagger)
    original, transformed = run.outputs(network, "the network"), run.outputs(dagger, "the transformed network")
    differences = [_relative(y_dagger, y) for y_dagger, y in zip(transformed, original, strict=True)]
    moved = _relative(original[-1], original[0])
    if moved == 0:
        raise ValueError("the optimizer did not move the function, so there is nothing to certify: is its lr zero?")
    certificate = Certificate(tuple(differences), moved, tolerance)
    if certificate.invariant:
        return certificate
    if map is not None:
        halved = [run.shortened(2.0**-k).difference(model, map) for k in range(1, _HALVINGS + 1)]
        return replace(certificate, shorter=(differences[-1], *halved))
    again = reparametrise(model, seed, keep=keep)
    twin = run.nudged(again).outputs(_nudged(again), "the transformed network, nudged by a rounding,")
    return replace(certificate, rounding=tuple(_relative(other, y) for other, y in zip(twin, transformed, strict=True)))


def damping_sweep(
    make_optimizer: Callable[[nn.Module, float], torch.optim.Optimizer],
    model: nn.Module,
    batch: tuple[Inputs, Any],
    dampings: Sequence[float],
    steps: int = 10,
    *,
    loss: Callable[[Tensor, Any], Tensor] | None = None,
    seed: int | Bases = 0,
    keep: Collection[str] = (),
    output: Callable[[Any], Tensor] | None = None,
    tolerance: float = 1e-9,
) -> Sweep:
    """Certify an optimizer at several dampings.

    Args:
        make_optimizer: ``make_optimizer(model, damping)`` makes the optimizer for a given network.
        model: The network.
        batch: (x, target).
        dampings: The values of λ.
        steps: The number of training steps to compare.
        loss: A function of outputs and target, by default ½‖y − t‖² summed over the outputs and averaged over the
            examples.
        seed: The seed of random bases, or ``Bases``, as in ``reparametrise``.
        keep: Names of modules that stay as they are.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        tolerance: The largest relative difference that counts as rounding.

    Returns:
        A ``Sweep``, with one certificate for every damping.

    Example:
        >>> import torch, natgrad as ng
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Tanh()).double()
        >>> batch = torch.randn(64, 2, dtype=torch.float64), torch.rand(64, 2, dtype=torch.float64)
        >>> make = lambda model, damping: ng.NaturalGradient(model, ng.Euclidean(), lr=0.1, damping=damping)
        >>> sweep = ng.invariance.damping_sweep(make, model, batch, dampings=[0.0, 0.1], steps=3)
        >>> [certificate.invariant for certificate in sweep.certificates.values()]
        [True, False]
    """

    def at(damping: float) -> MakeOptimizer:
        return lambda network: make_optimizer(network, damping)

    return Sweep(
        {
            damping: certify(
                at(damping), model, batch, steps, loss=loss, seed=seed, keep=keep, output=output, tolerance=tolerance
            )
            for damping in dampings
        }
    )


def half_squares(y: Tensor, target: Tensor) -> Tensor:
    """½‖y − t‖² summed over the outputs and averaged over the examples; its metric is Euclidean.

    >>> half_squares(torch.ones(4, 3), torch.zeros(4, 3))
    tensor(1.5000)
    """
    if y.shape != target.shape:
        raise ValueError(f"outputs {list(y.shape)} and targets {list(target.shape)} differ in shape: pass loss=")
    return (y - target).square().sum() / (2 * len(y))


@final
@dataclass(frozen=True)
class _Run:
    """One training run: what all networks have in common."""

    make_optimizer: MakeOptimizer
    batch: tuple[Inputs, Any]
    steps: int
    loss: Callable[[Tensor, Any], Tensor]
    output: Callable[[Any], Tensor] | None

    def outputs(self, network: nn.Module, what: str) -> list[Tensor]:
        """The function before the first step and after each step."""
        x, target = self.batch
        model = Model.of(network, output=self.output)
        with seeded_streams(0, model.example.device):
            optimizer = self.make_optimizer(network)
            _check_parameters(optimizer, network)

            def closure() -> Tensor:
                optimizer.zero_grad()
                args, kwargs = arguments(x)
                value = self.loss(model.outputs(network(*args, **kwargs), x), target)
                value.backward()
                return value

            history = [self.function(model, what, 0)]
            for step in range(1, self.steps + 1):
                if isinstance(optimizer, NaturalGradient) and optimizer.tracker.metric.needs_target:
                    optimizer.refresh(x, target)
                optimizer.step(closure)  # type: ignore[arg-type]  # torch types the value as a float
                history.append(self.function(model, what, step))
        return history

    def shortened(self, factor: float) -> _Run:
        """The same run with the learning rates times a factor."""

        def make_optimizer(network: nn.Module) -> torch.optim.Optimizer:
            optimizer = self.make_optimizer(network)
            for group in optimizer.param_groups:
                group["lr"] *= factor
            return optimizer

        return replace(self, make_optimizer=make_optimizer)

    def difference(self, model: nn.Module, f: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> float:
        """Between the functions at the end, with the parameters f(θ) and with θ."""
        y, other = (self.outputs(network, "the network")[-1] for network in rewritten(model, f))
        return _relative(other, y)

    def check_equal(self, *models: nn.Module) -> None:
        """Refuse networks that do not start as the same function."""
        given, *others = (self.function(Model.of(m, output=self.output), "the model", 0) for m in models)
        worst = max(_relative(other, given) for other in others)
        if worst > torch.finfo(given.dtype).eps ** 0.5:
            raise ValueError(
                f"the transformed network is another function to begin with (relative difference {worst:.1e}): the "
                "model uses the parameters of a layer in some other way than by calling it, or it is random"
            )

    def nudged(self, network: nn.Module) -> _Run:
        """The same run with inputs perturbed by one rounding error (perturbing parameters does not reach the inputs).

        Inputs are left alone if the function jumps, as it does if they are compared or serve as indices.
        """
        model = Model.of(network, output=self.output)
        eps, generator = torch.finfo(model.example.dtype).eps, torch.Generator().manual_seed(1)
        inputs = map_tensors(self.batch[0], lambda t: _nudge(t, eps, generator) if t.is_floating_point() else t)
        other = replace(self, batch=(inputs, self.batch[1]))
        given, perturbed = (run.function(model, "the transformed network", 0) for run in (self, other))
        return other if _relative(perturbed, given) <= eps**0.5 else self

    def function(self, model: Model, what: str, step: int) -> Tensor:
        """The outputs on the batch and on fresh inputs, in one vector."""
        assert model.module is not None
        with torch.no_grad(), evaluating(model.module):
            y = torch.cat([model(None, inputs).flatten() for inputs in (self.batch[0], _fresh(self.batch[0]))])
        if not bool(y.isfinite().all()):
            raise NonFiniteError(f"the outputs of {what} are not finite after step {step}: take a smaller step size")
        return y


def _relative(other: Tensor, y: Tensor) -> float:
    """max|y′ − y|/max|y|."""
    size = float(y.abs().max())
    return float((other - y).abs().max()) / (size if size > 0 else 1.0)


def _nudged(network: nn.Module) -> nn.Module:
    """Perturb every parameter by one rounding error, in place."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(_nudge(p, torch.finfo(p.dtype).eps, generator))
    return network


@torch.no_grad()
def _nudge(t: Tensor, eps: float, generator: torch.Generator) -> Tensor:
    """t(1 ± eps), which is t itself in a coarser dtype."""
    signs = 2 * torch.randint(2, t.shape, generator=generator).to(t) - 1
    return t * (1 + eps * signs)


def _fresh(x: Inputs) -> Inputs:
    """Inputs outside the batch: floating-point ones have the mean and deviation of the batch, others are shuffled."""
    generator = torch.Generator().manual_seed(0)

    def other(t: Tensor) -> Tensor:
        if not t.is_floating_point():
            return t.flatten()[torch.randperm(t.numel(), generator=generator).to(t.device)].view(t.shape)
        noise = torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t)
        return t.mean(0) + t.std(0, correction=0) * noise

    return map_tensors(x, other)


def _check_parameters(optimizer: torch.optim.Optimizer, network: nn.Module) -> None:
    parameters = set(network.parameters())
    if not all(p in parameters for group in optimizer.param_groups for p in group["params"]):
        raise ValueError(
            "make_optimizer(model) must make the optimizer of the model that it is given, a copy in other bases; "
            "this one has other parameters"
        )
