"""Presets: one choice in each slot of the natural gradient. K-FAC and its kin; optimizers to train networks with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from inspect import signature
from typing import Any, Literal, ParamSpec

import torch
from torch import Tensor, nn

from natgrad.errors import IncompatibleError
from natgrad.kernels.sobolev import Lengthscale, Median
from natgrad.linalg import Damping, Relative, is_number
from natgrad.model import check_types
from natgrad.optim.optimizer import NaturalGradient
from natgrad.optim.update import MomentumOn
from natgrad.output.batch_gradient import BatchGradient
from natgrad.output.fubini_study import FubiniStudy
from natgrad.output.losses import Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.output.sobolev import Sobolev
from natgrad.pullbacks.layer import LARGEST
from natgrad.rules.base import Rule
from natgrad.solve.solvers import Cholesky, Factored, Solver
from natgrad.step.base import StepRule
from natgrad.step.normalised import Normalised
from natgrad.step.polar import Polar
from natgrad.step.rules import Fixed, KLClip
from natgrad.structures.base import Structure
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.eigen_kronecker import EigenKronecker
from natgrad.structures.kernel import Kernel
from natgrad.structures.kronecker import Kronecker
from natgrad.structures.refresh import Refresh

_DIAGONAL, _CHOLESKY, _CLIP, _QUARTER = Diagonal(), Cholesky(), KLClip(), Median(divisor=4.0)
_FIXED, _KERNEL = Fixed(), Kernel()
_GRADIENTS, _SHARE, _TINY = BatchGradient(), Relative(1e-2), Relative(1e-6)


# Arguments that a preset hands to ``NaturalGradient`` as they are.
_PASSED = [
    *("lr", "damping", "momentum", "weight_decay", "groups", "fallback"),
    *("rules", "output", "examples", "generator", "memory", "strict"),
]

_Arguments = ParamSpec("_Arguments")


def _with_arguments_of(
    other: Callable[_Arguments, NaturalGradient],
) -> Callable[[Callable[..., NaturalGradient]], Callable[_Arguments, NaturalGradient]]:
    """A preset with the arguments of another one, in ``help()`` and for type checkers; it gets all of them by name."""

    def decorate(preset: Callable[..., NaturalGradient]) -> Callable[_Arguments, NaturalGradient]:
        @wraps(preset)
        def made(*args: _Arguments.args, **kwargs: _Arguments.kwargs) -> NaturalGradient:
            bound = signature(other).bind(*args, **kwargs)
            bound.apply_defaults()
            return preset(**bound.arguments)

        vars(made).update(__signature__=signature(other), __annotations__=other.__annotations__)
        return made

    return decorate


def KFAC(
    model: nn.Module,
    metric: OutputMetric | Criterion,
    *,
    lr: float = 0.1,
    damping: Damping = 1e-2,
    momentum: float = 0.9,
    momentum_on: MomentumOn = "steps",
    weight_decay: float = 0.0,
    metric_every: int | None = None,
    inverse_every: int | None = None,
    early: bool = True,
    decay: float = 0.95,
    step: StepRule = _CLIP,
    solver: Solver | None = None,
    sharing: Literal["expand", "reduce"] = "expand",
    fallback: Structure | Literal["adamw"] = _DIAGONAL,
    strict: bool = False,
    largest: int = LARGEST,
    groups: Iterable[dict[str, Any]] = (),
    rules: Sequence[Rule] = (),
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    generator: torch.Generator | None = None,
    memory: int | None = None,
) -> NaturalGradient:
    """K-FAC (Martens and Grosse 2015): θ ← θ − lr·m, m ← μm + (S + √λ/π)⁻¹ ∇ (A + π√λ)⁻¹ in every layer.

    A drop-in optimizer for any model and any metric on its outputs. The metric is estimated every ``metric_every``
    steps (default 10; 2 with ``SelfTuned``), enters a moving average with ``decay``, and is inverted every
    ``inverse_every`` steps (default 100; 5 with ``SelfTuned``). ``early``: in the beginning, when the metric changes
    fastest, it is also inverted in the steps 1, 2, 4, 8, … and estimated in each of the first 16 steps (``Refresh``).
    The default ``solver`` is ``Factored()``. ``opt.plan()`` lists the rule and the structure of every parameter.
    ``step=ng.SelfTuned()`` chooses learning rate, momentum and damping by itself and needs ``opt.step(closure)``.

    ``sharing``, ``fallback``, ``strict`` and ``largest`` are arguments of ``Kronecker``: parameters that no layer rule
    covers have the structure ``fallback``, and of factors with more than ``largest`` rows only the diagonal is kept.
    With ``fallback="adamw"`` AdamW steps embeddings, gains, biases, and parameters that the first estimated pass uses
    without a layer rule. ``strict=True`` also raises an error if the first step trains another loss than the one given.
    ``NaturalGradient`` describes the other arguments.

    ``metric``: a metric, or the loss that is trained. A loss is replaced by ``metric_of(loss, samples=1)``, which has
    the same reduction. A metric is a mean over the examples and a sum over the terms of an example: if the loss is a
    mean over tokens, give ``Fisher(family, reduction="mean")``; otherwise S is too large by the number of tokens, and
    the steps are too short.

    The metric is estimated from all forward passes with gradients between two steps, so gradient accumulation works.
    Call the model under ``torch.no_grad()`` to evaluate it.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> x, t = torch.randn(32, 4), torch.arange(32) % 3
    >>> opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     nn.functional.cross_entropy(model(x), t).backward()
    ...     opt.step()
    """
    return _kfac(Kronecker, Factored(), locals())


@_with_arguments_of(KFAC)
def EKFAC(**arguments: Any) -> NaturalGradient:
    """EK-FAC (George et al. 2018): as ``KFAC``, scaled by second moments in the eigenbasis of the factors.

    The damping is exact, (G + λ)⁻¹. Eigenvectors are computed where ``KFAC`` inverts. The arguments are those of
    ``KFAC``; the default ``solver`` is ``Cholesky()``.

    With gradient accumulation the first step differs from that of the joint batch: its second moments are measured in
    the eigenbasis of the first micro-batch, later ones in that of all examples so far. To make the first step exact,
    call ``opt.refresh(x)`` with the joint batch before it.
    """
    return _kfac(EigenKronecker, _CHOLESKY, arguments)


def SobolevKFAC(
    model: nn.Module,
    metric: OutputMetric | Criterion,
    *,
    nu: float = 1.5,
    lengthscale: float | Tensor | Lengthscale = _QUARTER,
    jitter: float = 1e-6,
    features: Callable[..., Tensor] | None = None,
    lr: float = 0.1,
    damping: Damping = 1e-2,
    momentum: float = 0.9,
    momentum_on: MomentumOn = "steps",
    weight_decay: float = 0.0,
    metric_every: int | None = None,
    inverse_every: int | None = None,
    early: bool = True,
    decay: float = 0.95,
    step: StepRule = _CLIP,
    solver: Solver | None = None,
    sharing: Literal["expand", "reduce"] = "expand",
    fallback: Structure | Literal["adamw"] = _DIAGONAL,
    strict: bool = False,
    largest: int = LARGEST,
    groups: Iterable[dict[str, Any]] = (),
    rules: Sequence[Rule] = (),
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    generator: torch.Generator | None = None,
    memory: int | None = None,
) -> NaturalGradient:
    """Sobolev K-FAC (Bai, Rosenberg and Xu 2022): ``KFAC`` with the metric of functions ``Sobolev(metric, …)``.

    A = Σ_nm C_nm a_n a_mᵀ/(N R), S = κ Σ_nm C_nm g_n g_mᵀ/N with C = K⁻¹, K the Sobolev kernel of the inputs of the
    batch, and κ the scale that gives A ⊗ S the trace of its block as far as K-FAC has it (in large layers estimated,
    from random signs that stay the same). Where K = 1 (ℓ small beside all distances, or a batch of one) every step is
    that of ``KFAC``. A sampled metric shares its samples between the examples.

    ``lengthscale``: a number, or a rule that is measured on every batch: ``Median(divisor=4)`` (the default), or
    ``Alike(0.1)``, which fixes the mean of the kernel. ``features`` is called as the model is, for inputs that are no
    points (tokens) or say little. ``nu`` and ``jitter`` are those of ``Sobolev``, the other arguments those of
    ``KFAC``.

    Smooth changes of the function cost less than in K-FAC, down to 1/λ_max(K), and λ_max(K) is up to N: undamped and
    over-parametrised, outputs move by −lr·K e, which descends for lr < 2/λ_max(K). ``KLClip`` bounds the length of a
    step in its own metric; this is what makes the learning rate of K-FAC safe here. With ``step=Fixed()`` divide it by
    λ_max(K) yourself, which is at most the largest row sum of ``Sobolev(…).gram(x, n)``.

    Micro-batches of gradient accumulation, and the batches of several processes, are coupled each by itself, and
    averaged as those of ``KFAC`` are. Equal examples count as one.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.randn(32, 4)
    >>> opt = ng.SobolevKFAC(model, ng.Euclidean(), lr=0.1, lengthscale=2.0)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
    ...     opt.step()
    """
    arguments = locals()
    own = {name: arguments.pop(name) for name in ("nu", "lengthscale", "jitter", "features")}
    return KFAC(**arguments | {"metric": Sobolev(metric_of(metric, samples=1), **own)})


def natural_of_outputs(
    model: nn.Module,
    metric: OutputMetric | Criterion,
    *,
    lr: float = 3e-3,
    weight_decay: float = 0.1,
    momentum: float = 0.9,
    power: float = 0.5,
    damping: Damping = _SHARE,
    rms: float = 0.4,
    polar: bool = True,
    factors: Literal["diagonal", "whole"] = "diagonal",
    decay: float = 0.95,
    metric_every: int = 1,
    inverse_every: int | None = None,
    early: bool = True,
    sharing: Literal["expand", "reduce"] = "expand",
    largest: int = LARGEST,
    fallback: Structure | Literal["adamw"] | None = "adamw",
    groups: Iterable[dict[str, Any]] = (),
    rules: Sequence[Rule] = (),
    output: Callable[[Any], Tensor] | None = None,
    examples: Literal["inputs"] | None = None,
    generator: torch.Generator | None = None,
    memory: int | None = None,
    strict: bool = False,
) -> NaturalGradient:
    """``ng.Natural(model, metric)``: its steps with a metric on the outputs in place of the second moment of gradients.

    ``metric``: a metric, or the loss that is trained. ``ng.Fisher(family, samples=1)`` and a loss (``ng.metric_of``)
    have the factors of K-FAC, from one more backward pass, and ``ng.Empirical()`` those of the cotangents of your own
    backward pass. ``factors``: the "diagonal" of S and A, or the "whole" matrices. ``polar=False`` takes v = G^-p M
    with the root mean square lr·rms (``Normalised``). The metric is estimated every ``metric_every`` steps. Its powers
    are computed every ``inverse_every`` steps (default: 1, and 25 with ``factors="whole"``) and (``early``) in the
    steps 1, 2, 4, … before.

    AdamW steps embeddings, vectors (also matrices with one row or one column, if there are others), parameters with
    three axes outside of ``nn.Conv1d``, and what no layer rule covers. ``fallback=ng.Diagonal()`` leaves nothing to
    AdamW, and keeps what has no factors, such as vectors, in that structure: it needs ``polar=False``, since a vector
    has no polar factor. ``strict`` is that of ``NaturalGradient``, and the other arguments those of ``KFAC``.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> model, x, t = nn.Linear(4, 3), torch.randn(32, 4), torch.arange(32) % 3
    >>> opt = ng.Natural(model, nn.CrossEntropyLoss(), lr=1e-2)
    >>> nn.functional.cross_entropy(model(x), t).backward()
    >>> opt.step()
    """
    given = locals()
    if factors not in ("diagonal", "whole"):
        raise ValueError(f'Natural(factors=…) is "diagonal" or "whole", not {factors!r}')
    if factors == "diagonal" and largest != LARGEST:
        raise ValueError(f'Natural(largest={largest}) bounds whole factors, and these are diagonals: factors="whole"')
    check_types(polar=(polar, bool, "True or False"))
    rows = largest if factors == "whole" else 1  # rows of a factor that is more than a diagonal
    if inverse_every is None:
        inverse_every = 25 if factors == "whole" else 1
    structure = Refresh(Kronecker(sharing, largest=rows, power=power), metric_every, decay, inverse_every, early=early)
    return NaturalGradient(
        model,
        metric_of(metric, samples=1),
        structure=structure,
        solver=Factored(),
        step=Polar(rms) if polar else Normalised(rms),
        momentum_on="gradients",
        **{name: given[name] for name in _PASSED},
    )


def StochasticReconfiguration(
    model: nn.Module,
    *,
    lr: float = 0.05,
    damping: Damping = 1e-3,
    structure: Structure = _KERNEL,
    solver: Solver = _CHOLESKY,
    step: StepRule = _FIXED,
    groups: Iterable[dict[str, Any]] = (),
    rules: Sequence[Rule] = (),
    memory: int | None = None,
) -> NaturalGradient:
    """Stochastic reconfiguration (Sorella 1998): θ ← θ − lr·(G + λ)⁻¹∇E, the natural gradient of a wave function.

    ``model`` maps configurations x [n *in], drawn from |ψ|², to log ψ(x), [n] or [n 1], real or complex; its
    parameters are real. G is the ``FubiniStudy`` metric. With O = ∂ log ψ/∂θ and local energies e(x) = ⟨x|H|ψ⟩/⟨x|ψ⟩
    the gradient of the energy is ∇E = 2 Re E[(Ō − E[Ō]) e], that of the loss below. A step of imaginary time Δτ is
    lr = Δτ/2.

    With fewer samples than parameters the default ``structure`` solves in the space of samples (Chen and Heyl 2024).
    ``step=ng.Spring(norm=…)`` adds the projected momentum of SPRING (Goldshlager et al. 2024). The other arguments are
    those of ``NaturalGradient``.

    >>> import torch, natgrad as ng
    >>> from torch import nn
    >>> psi = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> opt = ng.StochasticReconfiguration(psi, step=ng.Spring())
    >>> x, e = torch.randn(16, 4).sign(), torch.randn(16)  # samples, and their local energies
    >>> log_psi = psi(x).squeeze(-1)
    >>> loss = 2 * ((e - e.mean()).conj() * log_psi).real.mean()
    >>> loss.backward()
    >>> opt.step()
    """
    given = locals()
    inner = structure.structure if isinstance(structure, Refresh) else structure
    if isinstance(inner, (Kronecker, EigenKronecker)):
        raise IncompatibleError(
            f"{type(inner).__name__} does not work for stochastic reconfiguration: its factors are centred "
            "separately, and S of a linear last layer, whose cotangents are constant, is zero up to rounding. Use "
            "Kernel, Dense, or Implicit with solver=CG()"
        )
    return NaturalGradient(**given, metric=FubiniStudy(), output=_real_parts)


def _real_parts(log_psi: Tensor) -> Tensor:
    """Complex outputs [n *out] as real ones [n *out 2]."""
    return torch.view_as_real(log_psi) if log_psi.is_complex() else log_psi


def _kfac(
    factors: type[Kronecker] | type[EigenKronecker], solver: Solver, arguments: Mapping[str, Any]
) -> NaturalGradient:
    """From the ``arguments`` of ``KFAC``: those of its structure and of its schedule, and those of the optimizer."""
    rest = dict(arguments)
    of_structure = {name: rest.pop(name) for name in ("sharing", "largest")}
    every, inverse, early, decay = (rest.pop(name) for name in ("metric_every", "inverse_every", "early", "decay"))
    usual = rest["step"].schedule if isinstance(rest["step"], StepRule) else (10, 100)  # the rest is refused later
    every, inverse = (usual[at] if count is None else count for at, count in enumerate((every, inverse)))
    for name, count in (("metric_every", every), ("inverse_every", inverse)):
        if is_number(count) and count < 1:
            raise ValueError(f"{name} must be at least 1 step, got {count}")
    structure = Refresh(factors(**of_structure, strict=rest["strict"]), every, decay, inverse, early=early)
    own = {"metric": metric_of(rest["metric"], samples=1), "structure": structure}
    return NaturalGradient(**rest | own | {"solver": solver if rest["solver"] is None else rest["solver"]})
