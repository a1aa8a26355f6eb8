"""K-FAC, EK-FAC and Sobolev K-FAC: one choice in each slot of the natural gradient."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from natgrad.accelerate.inverses import Newton
from natgrad.kernels.sobolev import Lengthscale, Median
from natgrad.optim.optimizer import NaturalGradient
from natgrad.optim.options import Options
from natgrad.output.metric import OutputMetric
from natgrad.output.sobolev import Sobolev
from natgrad.solve.solvers import Cholesky, Factored, Solver
from natgrad.step.base import StepRule
from natgrad.step.self_tuned import KLClip, SelfTuned
from natgrad.structures.base import Structure
from natgrad.structures.diagonal import Diagonal
from natgrad.structures.eigen_kronecker import EigenKronecker
from natgrad.structures.kronecker import Kronecker
from natgrad.structures.refresh import Refresh


class Preset(Options, total=False):
    """The options of ``NaturalGradient``, and those of K-FAC.

    The metric is estimated every ``metric_every`` steps (10; with ``SelfTuned`` 2), averaged with ``decay`` (0.95), and
    inverted every ``inverse_every`` (100; with ``SelfTuned`` 5); on a GPU by ``Newton`` where the last inverse is near
    enough. ``step``: ``KLClip()`` unless another rule is given. The others are those of ``Kronecker``.
    """

    metric_every: int
    inverse_every: int
    decay: float
    step: StepRule
    solver: Solver
    sharing: Literal["expand", "reduce"]
    fallback: Structure
    strict: bool


class SobolevPreset(Preset, total=False):
    """The options of ``KFAC``, and those of ``Sobolev``: the kernel that compares the inputs of a batch."""

    nu: float
    lengthscale: float | Tensor | Lengthscale
    jitter: float
    features: Callable[..., Tensor]


def KFAC(
    model: nn.Module, metric: OutputMetric, lr: float = 0.1, damping: float = 1e-2, **options: Unpack[Preset]
) -> NaturalGradient:
    """K-FAC (Martens and Grosse 2015; paper 003): θ ← θ − lr·m, m ← μm + (S + √λ/π)⁻¹ ∇ (A + π√λ)⁻¹, every layer.

    A drop-in optimizer for any model and any metric on its outputs. Momentum (0.9) is kept in the space of vectors,
    weight decay is decoupled, steps are clipped in KL. ``opt.plan()`` says what becomes of every parameter;
    ``step=ng.SelfTuned()`` chooses learning rate, momentum and damping by itself and needs ``opt.step(closure)``.

    G is a mean over the examples. For a loss that is a mean over tokens give ``Fisher(family, reduction="mean")``: by
    default the terms of an example are summed, S is larger by their number, and the steps are too short.

    All forward passes with gradients between two steps are seen by the metric, as with gradient accumulation: call the
    model under ``torch.no_grad()`` to evaluate it. What no layer rule covers falls back to ``fallback``.

    >>> import torch, natgrad as ng
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    >>> x, t = torch.randn(32, 4), torch.arange(32) % 3
    >>> opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), lr=0.1)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     nn.functional.cross_entropy(model(x), t).backward()
    ...     opt.step()
    """
    return _preset(Kronecker, Factored(_newton(model)), model, metric, lr, damping, options)


def EKFAC(
    model: nn.Module, metric: OutputMetric, lr: float = 0.1, damping: float = 1e-2, **options: Unpack[Preset]
) -> NaturalGradient:
    """EK-FAC (George et al. 2018): as ``KFAC``, scaled by second moments in the eigenbasis of the factors.

    The damping is exact, (G + λ)⁻¹; eigenvectors are computed where ``KFAC`` inverts.

    With gradient accumulation the first step is not that of the joint batch: its second moments are measured in the
    eigenbasis of the first micro-batch. Later ones are in that of all examples seen. ``opt.refresh(x)`` with the joint
    batch, before the first step, makes it exact.
    """
    return _preset(EigenKronecker, Cholesky(), model, metric, lr, damping, options)


def SobolevKFAC(
    model: nn.Module, metric: OutputMetric, lr: float = 0.1, damping: float = 1e-2, **options: Unpack[SobolevPreset]
) -> NaturalGradient:
    """Sobolev K-FAC (000 (24)–(25), ERRATA 8–14): ``KFAC`` with the metric of functions ``Sobolev(metric, …)``.

    A = Σ_nm C_nm a_n a_mᵀ/(N R), S = κ Σ_nm C_nm g_n g_mᵀ/N with C = K⁻¹, K the Sobolev kernel of the inputs of the
    batch, and κ the scale that gives A ⊗ S the trace of its block as far as K-FAC has it (in large layers estimated,
    from random signs that stay the same). Where K = 1 (ℓ small beside all distances, or a batch of one) every step is
    that of ``KFAC``. A sampled metric shares its samples (ERRATA 10).

    ``lengthscale``: a number, or a rule that adapts as it is measured on every batch: ``Median(divisor=4)`` (the
    default; about what the paper has, ERRATA 14), or ``Alike(0.1)``, which keeps the mean of the kernel. ``features``
    is called as the model is, for inputs that are no points (tokens) or say little. ``nu``, ``jitter``: as ``Sobolev``.

    Smooth changes of the function cost less than in K-FAC, down to 1/λ_max(K), and λ_max(K) is up to N: undamped and
    over-parametrised, outputs move by −lr·K e, which descends for lr < 2/λ_max(K). The clip of ``KLClip``, which bounds
    the length of a step in its own metric, is what makes the learning rate of K-FAC safe here; with ``step=Fixed()``
    divide it by λ_max(K) yourself, which is at most the largest row sum of ``Sobolev(…).gram(x, n)``.

    Micro-batches of gradient accumulation, and the batches of several processes, are coupled each by itself, and
    averaged as those of ``KFAC`` are. Examples that are equal count as one (ERRATA 13).

    >>> import torch, natgrad as ng
    >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
    >>> x = torch.randn(32, 4)
    >>> opt = ng.SobolevKFAC(model, ng.Euclidean(), lr=0.1, lengthscale=2.0)
    >>> for _ in range(3):
    ...     opt.zero_grad()
    ...     (model(x) - x.sin().sum(1, keepdim=True)).square().mean().backward()
    ...     opt.step()
    """
    _known(options, SobolevPreset.__annotations__)
    given: Any = {"lengthscale": Median(divisor=4.0), **options}
    own = {name: given.pop(name) for name in ("nu", "lengthscale", "jitter", "features") if name in given}
    return _preset(Kronecker, Factored(_newton(model)), model, Sobolev(metric, **own), lr, damping, given)


def _newton(model: nn.Module) -> Newton | None:
    """On a GPU and in single precision a few products take the place of a factorisation; elsewhere it is exact."""
    p = next(model.parameters(), None) if isinstance(model, nn.Module) else None  # refused below
    return Newton() if p is not None and p.device.type == "cuda" and p.dtype != torch.float64 else None


def _preset(
    kind: type[Kronecker] | type[EigenKronecker],
    solver: Solver,
    model: nn.Module,
    metric: OutputMetric,
    lr: float,
    damping: float,
    options: Preset,
) -> NaturalGradient:
    _known(options, Preset.__annotations__)
    given: dict[str, Any] = dict(options)
    structure = kind(given.pop("sharing", "expand"), given.pop("fallback", Diagonal()), given.pop("strict", False))
    solver, step = given.pop("solver", solver), given.pop("step", None) or KLClip()
    # Steps that are as long as the metric of the batch allows need a metric, and an inverse, that are new.
    often = (2, 5) if isinstance(step, SelfTuned) else (10, 100)
    every, inverse = given.pop("metric_every", often[0]), given.pop("inverse_every", often[1])
    for name, count in (("metric_every", every), ("inverse_every", inverse)):
        if count < 1:
            raise ValueError(f"{name} must be at least 1 step, got {count}")
    schedule = Refresh(structure, every, given.pop("decay", 0.95), inverse)
    given = {"momentum": 0.9, **given}
    return NaturalGradient(model, metric, schedule, solver, step, lr, damping, **given)


def _known(options: Mapping[str, Any], names: Iterable[str]) -> None:
    """Refuse options that there are not."""
    if unknown := sorted(set(options) - set(names)):
        raise TypeError(f"K-FAC has no option {', '.join(unknown)}: it has {', '.join(names)}")
