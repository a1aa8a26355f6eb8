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
from natgrad.optim.optimizer import NaturalGradient, Owning
from natgrad.optim.update import MomentumOn
from natgrad.output.batch_gradient import BatchGradient
from natgrad.output.fubini_study import FubiniStudy
from natgrad.output.losses import NO_LOSS, Criterion, metric_of
from natgrad.output.metric import OutputMetric
from natgrad.output.sobolev import Sobolev
from natgrad.pullbacks.layer import LARGEST
from natgrad.rules.base import Rule
from natgrad.solve.solvers import Cholesky, Factored, Solver
from natgrad.step.base import Fixed, KLClip, StepRule
from natgrad.step.normalised import Normalised
from natgrad.step.polar import Polar
from natgrad.structures.base import Refresh, Structure
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.eigen_kronecker import EigenKronecker
from natgrad.structures.kernel import Kernel
from natgrad.structures.kronecker import Kronecker

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
    metric: OutputMetric | Criterion = NO_LOSS,
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
    owners: Owning = None,
) -> NaturalGradient:
    """K-FAC: natural-gradient steps with two small matrices per layer (Martens and Grosse 2015).

    Replaces a torch optimizer without a change to the training loop. Evaluate under ``torch.no_grad()``: the metric is
    estimated from all forward passes with gradients between two steps, so gradient accumulation works. ``opt.plan()``
    lists the rule and the structure of every parameter.

    Args:
        model: The module to train; compiled and DDP-wrapped ones as they are.
        metric: The loss you train, such as ``nn.CrossEntropyLoss()``, which stands for ``metric_of(loss, samples=1)``;
            or a metric on the outputs. A metric is a mean over the examples and a sum over the terms of an example: if
            the loss is a mean over tokens, give ``Fisher(family, reduction="mean")``.
        lr: Learning rate, not on AdamW's scale. Tune by factors of 3.
        damping: λ ≥ 0, added to the metric; or ``Relative(ε)``, without units. Tune by factors of 10.
        momentum: μ, how much of the last step is added to this one; 0 for none.
        momentum_on: "steps" averages steps, "gradients" averages gradients and applies the current metric to their
            mean; take the latter if gradients are noisy.
        weight_decay: Decoupled weight decay: θ ← (1 − lr·wd)θ in every step.
        metric_every: Steps between estimates of the metric (default 10; 2 with ``SelfTuned``).
        inverse_every: Steps between inverses (default 100; 5 with ``SelfTuned``).
        early: In the beginning, when the metric changes fastest, invert it also in the steps 1, 2, 4, 8, … and estimate
            it in each of the first 16.
        decay: That of the moving average of the metric: 0.95 remembers about twenty estimates.
        step: The step rule. ``SelfTuned()`` chooses learning rate, momentum and damping by itself and needs
            ``opt.step(closure)``.
        solver: How the metric is inverted; ``Factored()`` by default.
        sharing: How positions that share a weight (pixels, tokens) are treated: "expand" as independent examples,
            "reduce" sums over them first.
        fallback: What keeps parameters that no layer rule covers: a structure, or "adamw" to have AdamW step them, and
            embeddings, gains and biases too.
        strict: Make an error of warnings: parameters without a layer rule, and a loss other than the one given.
        largest: Of a Kronecker factor with more rows than this, such as a vocabulary, only the diagonal is kept.
        groups: Parameter groups as in torch.optim, such as ``[{"params": head.parameters(), "lr": 0.01}]``; parameters
            that no group names form the first one.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        examples: "inputs" if the model flattens its outputs over positions, [n·t *out], and the examples are the n rows
            of its first input.
        generator: Random numbers of sampled metrics; by default the optimizer has its own, so that the global random
            state is not used.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.
        owners: How many of several processes keep the metric of a layer: "one", "all", or the share of them, such as
            1/4. By default one where the parameters are divided (``fully_shard``), and all with
            ``DistributedDataParallel``, so that one process alone may write a checkpoint.

    Returns:
        The optimizer, a ``torch.optim.Optimizer``.

    Raises:
        UncoveredError: with ``strict=True``, if a parameter has no layer rule.

    Method:
        θ ← θ − lr·m, m ← μm + (S + √λ/π)⁻¹ ∇ (A + π√λ)⁻¹ in every layer, with the factors S and A of ``Kronecker``.

    Example:
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
    """EK-FAC: K-FAC with second moments in the factors' eigenvectors (George et al. 2018).

    The damping is exact, (G + λ)⁻¹. Eigenvectors are computed where ``KFAC`` inverts.

    Args:
        model: The module to train; compiled and DDP-wrapped ones as they are.
        metric: The loss you train, such as ``nn.CrossEntropyLoss()``, or a metric on the outputs. A loss stands for
            ``metric_of(loss, samples=1)``.
        lr: Learning rate, not on AdamW's scale. Tune by factors of 3.
        damping: λ ≥ 0, added to the metric; or ``Relative(ε)``, without units. Tune by factors of 10.
        momentum: μ, how much of the last step is added to this one; 0 for none.
        momentum_on: "steps" averages steps, "gradients" averages gradients and applies the current metric to their
            mean; take the latter if gradients are noisy.
        weight_decay: Decoupled weight decay: θ ← (1 − lr·wd)θ in every step.
        metric_every: Steps between estimates of the metric (default 10; 2 with ``SelfTuned``).
        inverse_every: Steps between inverses (default 100; 5 with ``SelfTuned``).
        early: In the beginning, when the metric changes fastest, invert it also in the steps 1, 2, 4, 8, … and estimate
            it in each of the first 16.
        decay: That of the moving average of the metric: 0.95 remembers about twenty estimates.
        step: The step rule. ``SelfTuned()`` chooses learning rate, momentum and damping by itself and needs
            ``opt.step(closure)``.
        solver: How the metric is inverted; ``Cholesky()`` by default, exactly.
        sharing: How positions that share a weight (pixels, tokens) are treated: "expand" as independent examples,
            "reduce" sums over them first.
        fallback: What keeps parameters that no layer rule covers: a structure, or "adamw" to have AdamW step them, and
            embeddings, gains and biases too.
        strict: Make an error of warnings: parameters without a layer rule, and a loss other than the one given.
        largest: Of a Kronecker factor with more rows than this, such as a vocabulary, only the diagonal is kept.
        groups: Parameter groups as in torch.optim, such as ``[{"params": head.parameters(), "lr": 0.01}]``; parameters
            that no group names form the first one.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        examples: "inputs" if the model flattens its outputs over positions, [n·t *out], and the examples are the n rows
            of its first input.
        generator: Random numbers of sampled metrics; by default the optimizer has its own, so that the global random
            state is not used.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.
        owners: How many of several processes keep the metric of a layer: "one", "all", or the share of them, such as
            1/4. By default one where the parameters are divided (``fully_shard``), and all with
            ``DistributedDataParallel``, so that one process alone may write a checkpoint.

    Returns:
        The optimizer, a ``torch.optim.Optimizer``.

    Method:
        As ``KFAC``, scaled by second moments in the eigenbasis of the factors (``EigenKronecker``).

        With gradient accumulation the first step differs from that of the joint batch: its second moments are measured
        in the eigenbasis of the first micro-batch, later ones in that of all examples so far. To make the first step
        exact, call ``opt.refresh(x)`` with the joint batch before it.

    Example:
        >>> import torch, natgrad as ng
        >>> model, x, t = torch.nn.Linear(4, 3), torch.randn(32, 4), torch.arange(32) % 3
        >>> opt = ng.EKFAC(model, torch.nn.CrossEntropyLoss(), lr=0.1)
        >>> torch.nn.functional.cross_entropy(model(x), t).backward()
        >>> opt.step()
    """
    return _kfac(EigenKronecker, _CHOLESKY, arguments)


def SobolevKFAC(
    model: nn.Module,
    metric: OutputMetric | Criterion = NO_LOSS,
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
    owners: Owning = None,
) -> NaturalGradient:
    """K-FAC with a metric on functions that prefers smooth changes (Bai, Rosenberg and Xu 2022).

    Args:
        model: The module to train; compiled and DDP-wrapped ones as they are.
        metric: The loss you train, such as ``nn.CrossEntropyLoss()``, or a metric on the outputs. A loss stands for
            ``metric_of(loss, samples=1)``.
        nu: The smoothness ν of the kernel: ½, 3/2, 5/2, or any other positive number.
        lengthscale: A number, or a rule that is measured on every batch: ``Median(divisor=4)`` (the default), or
            ``Alike(0.1)``, which fixes the mean of the kernel.
        jitter: A small number that is added to the kernel's diagonal, relative to it.
        features: Called as the model is, for inputs that are no points (tokens) or say little; returns points [n d].
        lr: Learning rate. ``KLClip`` bounds the length of a step in its own metric, which makes that of K-FAC safe
            here. With ``step=Fixed()`` divide it by λ_max(K), at most the largest row sum of ``Sobolev(…).gram(x, n)``.
        damping: λ ≥ 0, added to the metric; or ``Relative(ε)``, without units. Tune by factors of 10.
        momentum: μ, how much of the last step is added to this one; 0 for none.
        momentum_on: "steps" averages steps, "gradients" averages gradients and applies the current metric to their
            mean; take the latter if gradients are noisy.
        weight_decay: Decoupled weight decay: θ ← (1 − lr·wd)θ in every step.
        metric_every: Steps between estimates of the metric (default 10; 2 with ``SelfTuned``).
        inverse_every: Steps between inverses (default 100; 5 with ``SelfTuned``).
        early: In the beginning, when the metric changes fastest, invert it also in the steps 1, 2, 4, 8, … and estimate
            it in each of the first 16.
        decay: That of the moving average of the metric: 0.95 remembers about twenty estimates.
        step: The step rule. ``SelfTuned()`` chooses learning rate, momentum and damping by itself and needs
            ``opt.step(closure)``.
        solver: How the metric is inverted; ``Factored()`` by default.
        sharing: How positions that share a weight (pixels, tokens) are treated: "expand" as independent examples,
            "reduce" sums over them first.
        fallback: What keeps parameters that no layer rule covers: a structure, or "adamw" to have AdamW step them, and
            embeddings, gains and biases too.
        strict: Make an error of warnings: parameters without a layer rule, and a loss other than the one given.
        largest: Of a Kronecker factor with more rows than this, such as a vocabulary, only the diagonal is kept.
        groups: Parameter groups as in torch.optim, such as ``[{"params": head.parameters(), "lr": 0.01}]``; parameters
            that no group names form the first one.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        examples: "inputs" if the model flattens its outputs over positions, [n·t *out], and the examples are the n rows
            of its first input.
        generator: Random numbers of sampled metrics; by default the optimizer has its own, so that the global random
            state is not used.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.
        owners: How many of several processes keep the metric of a layer: "one", "all", or the share of them, such as
            1/4. By default one where the parameters are divided (``fully_shard``), and all with
            ``DistributedDataParallel``, so that one process alone may write a checkpoint.

    Returns:
        The optimizer, a ``torch.optim.Optimizer``.

    Method:
        ``KFAC`` with the metric ``Sobolev(metric, …)``: A = Σ_nm C_nm a_n a_mᵀ/(N R), S = κ Σ_nm C_nm g_n g_mᵀ/N.

        Here C = K⁻¹, K the Sobolev kernel of the inputs of the batch, and κ the scale that gives A ⊗ S the trace of its
        block as far as K-FAC has it (in large layers estimated, from random signs that stay the same).

        Where K = 1 (ℓ small beside all distances, or a batch of one) every step is that of ``KFAC``. A sampled metric
        shares its samples between the examples. Equal examples count as one.

        Smooth changes of the function cost less than in K-FAC, down to 1/λ_max(K), and λ_max(K) is up to N: undamped
        and over-parametrised, outputs move by −lr·K e, which descends for lr < 2/λ_max(K).

        Micro-batches of gradient accumulation, and the batches of several processes, are coupled each by itself, and
        averaged as those of ``KFAC`` are.

    Example:
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
    """``ng.Natural(model, metric)``: its steps with a metric on the outputs.

    AdamW steps embeddings, vectors (also matrices with one row or one column, if there are others), parameters with
    three axes outside of ``nn.Conv1d``, and what no layer rule covers.

    Args:
        model: The module to train; compiled and DDP-wrapped ones as they are.
        metric: The loss you train, or a metric on the outputs. ``ng.Fisher(family, samples=1)`` and a loss have the
            factors of K-FAC, from one more backward pass, and ``ng.Empirical()`` those of the cotangents of your own
            backward pass.
        lr: Learning rate. AdamW's best is no guide: search in factors of 2 from the default, mostly upwards.
        weight_decay: Decoupled weight decay, as AdamW's.
        momentum: μ of the moving average of gradients.
        power: p: the metric is G^p. 1 is the natural gradient, ½ the metric of Adam and Shampoo, 0 the identity.
        damping: λ ≥ 0, added to the metric; or ``Relative(ε)``, without units. Tune by factors of 10.
        rms: The root mean square of a step, as a multiple of the learning rate.
        polar: Steps by polar factors. False takes v = G^-p M with the root mean square lr·rms (``Normalised``).
        factors: The "diagonal" of S and A, or the "whole" matrices.
        decay: That of the moving average of the metric: 0.95 remembers about twenty estimates.
        metric_every: Steps between estimates of the metric.
        inverse_every: Steps between powers of it (default: 1, and 25 with ``factors="whole"``).
        early: In the beginning, when the metric changes fastest, invert it also in the steps 1, 2, 4, 8, … and estimate
            it in each of the first 16.
        sharing: How positions that share a weight (pixels, tokens) are treated: "expand" as independent examples,
            "reduce" sums over them first.
        largest: Of a Kronecker factor with more rows than this, such as a vocabulary, only the diagonal is kept.
        fallback: What steps the parameters without factors: "adamw". ``ng.Diagonal()`` keeps them in that structure: it
            needs ``polar=False``, since a vector has no polar factor.
        groups: Parameter groups as in torch.optim, such as ``[{"params": head.parameters(), "lr": 0.01}]``; parameters
            that no group names form the first one.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        output: A function that picks the outputs of interest out of what the model returns, such as ``lambda out:
            out.logits``.
        examples: "inputs" if the model flattens its outputs over positions, [n·t *out], and the examples are the n rows
            of its first input.
        generator: Random numbers of sampled metrics; by default the optimizer has its own, so that the global random
            state is not used.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.
        strict: Make an error of warnings: parameters without a layer rule, and a loss other than the one given.

    Returns:
        The optimizer, a ``NaturalGradient``.

    Example:
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
    structure: Structure | Refresh = _KERNEL,
    solver: Solver = _CHOLESKY,
    step: StepRule = _FIXED,
    groups: Iterable[dict[str, Any]] = (),
    rules: Sequence[Rule] = (),
    memory: int | None = None,
) -> NaturalGradient:
    """Optimise a wave function by natural gradient: stochastic reconfiguration (Sorella 1998).

    Args:
        model: Maps configurations x [n *in], drawn from |ψ|², to log ψ(x), [n] or [n 1], real or complex; its
            parameters are real.
        lr: Learning rate; a step of imaginary time Δτ is lr = Δτ/2.
        damping: λ ≥ 0, added to the metric before it is inverted; ``Relative(ε)`` scales it with the metric.
        structure: How the metric is held. With fewer samples than parameters the default ``Kernel()`` solves in the
            space of samples (Chen and Heyl 2024).
        solver: How the metric is inverted: ``Cholesky()``, ``Pinv()`` for singular ones, ``CG()``, or ``Factored()``
            for Kronecker factors.
        step: The step rule; ``ng.Spring(norm=…)`` adds the projected momentum of SPRING (Goldshlager et al. 2024).
        groups: Parameter groups as in torch.optim, such as ``[{"params": head.parameters(), "lr": 0.01}]``; parameters
            that no group names form the first one.
        rules: Layer rules for your own modules; they take precedence over those of the library.
        memory: The largest number of bytes that the metric may occupy; None is half of those of the device.

    Returns:
        The optimizer, a ``NaturalGradient`` with the metric ``FubiniStudy()``.

    Method:
        θ ← θ − lr·(G + λ)⁻¹∇E. With O = ∂ log ψ/∂θ and local energies e(x) = ⟨x|H|ψ⟩/⟨x|ψ⟩ the gradient of the energy
        is ∇E = 2 Re E[(Ō − E[Ō]) e], that of the loss below.

    Example:
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
