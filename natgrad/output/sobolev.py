"""The Sobolev metric: an inner product of functions and not of their values, which couples the examples by a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.kernels.distances import check_features, points
from natgrad.kernels.gram import KernelMatrix, rounding, unseen
from natgrad.kernels.sobolev import Lengthscale, SobolevKernel, is_number
from natgrad.linalg import check_finite
from natgrad.model import Inputs, arguments
from natgrad.output.metric import Coupling, Euclidean, OnBase, OutputMetric


@final
@dataclass(frozen=True)
class Sobolev(OnBase):
    """The norm of H_s, s = d + 2ν, in place of L²: G = (1/N) Σ_k Σ_nm (K⁻¹)_nm R_kn R_kmᵀ (000 (22); ERRATA 8–13).

    K_nm = k(‖x_n − x_m‖/ℓ) is the ``SobolevKernel`` of the model's own inputs, k(0) = 1. For R = ∂φ_k of the outputs
    (``base`` Euclidean), vᵀGv is 1/N of the squared norm of the smallest functions with the values J v at the inputs.
    Over-parametrised and undamped, one step moves the training outputs by −ηK e, where Gauss–Newton moves them by −ηe:
    descent needs η < 2/λ_max(K), and λ_max(K) is up to N.
    With ``Fisher(Categorical())`` it is the norm of x ↦ 2√p(·|x) (ERRATA 12). Where K = 1 (ℓ small beside all
    distances) G is that of the base: Gauss–Newton, Fisher, K-FAC. A mean over the examples, where (22) is a sum.

    ``lengthscale``: a number, or a rule such as ``Median(divisor=4)``, measured on every batch. ``features``: called as
    the model is, for inputs that are not points [n *shape] of real numbers; several arguments, tokens, images whose
    pixels say little. ``jitter``: K is (K + jitter)/(1 + jitter), in float64, so that K_nn = 1 still.

    Examples that are equal count as one and not as several (ERRATA 13), up to the jitter, and exactly where it is 0: a
    batch of copies has 1/N of the metric of one of them, a batch of one that of its base. A jitter below max(N, 4096)
    units in the last place of λ_max(K), about 10⁻¹²N, is none. Where K is singular to that rounding, and not because
    inputs are equal, functions that are as rough as that have the norm of the roughest that are known, 1/rounding: they
    hardly move, as where the jitter becomes small. Where the jitter is small beside N³ε², with the ε of the outputs
    (10⁻⁶ in single precision, from N = 416 on), rows are mixed in double precision, whatever their own. ``Kernel``
    solves without K⁻¹, Jᵀ(λK + JJᵀ)⁻¹K e (``PushThrough``), and keeps the digits that an ill-conditioned K costs the
    other structures.

    Where ``base`` is sampled, the whole batch shares its samples: column k is one random combination Σ_j ε_kj s_j of
    the columns of the exact root. Independent ones would erase K⁻¹ but for its diagonal (ERRATA 10).

    ``flat`` and ``divergence`` know no inputs: they are those of the base, an example at a time. A step rule that
    measures a step by them (``TrustRegion``, ``SelfTuned``) does so in the base.

    >>> metric = Sobolev(lengthscale=2.0, jitter=0.0)
    >>> metric.coupling(torch.tensor([[0.0], [2.0]]), 2)  # the inverse of [[1, 2/e], [2/e, 1]]
    tensor([[ 2.1803, -1.6042],
            [-1.6042,  2.1803]], dtype=torch.float64)
    """

    base: OutputMetric = field(default_factory=Euclidean)
    nu: float = 1.5
    lengthscale: float | Tensor | Lengthscale = 1.0
    jitter: float = 1e-6
    features: Callable[..., Tensor] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, OutputMetric):
            raise TypeError(f"Sobolev(base={self.base!r}): the base is a metric on the outputs, such as Euclidean()")
        if isinstance(self.base, Sobolev):
            raise ValueError("Sobolev(base=Sobolev(…)) would couple the examples twice: give the metric inside")
        _ = self._kernel  # it checks ν and ℓ
        check_features(self.features)
        if not is_number(self.jitter):
            raise TypeError(f"jitter={self.jitter!r}: give a number, what is added to the diagonal of K")
        if not (math.isfinite(self.jitter) and self.jitter >= 0):
            raise ValueError(
                f"jitter={self.jitter!r} must be finite and not negative: it is added to the diagonal of K"
            )

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.base.shared_root(y, target, generator)

    def coupling(self, x: Inputs, n: int) -> Tensor:
        return self.coupled(x, n).C

    def coupled(self, x: Inputs, n: int, dtype: torch.dtype = torch.float64) -> Coupling:
        if self.base.coupling(x, n) is not None:
            raise ValueError(f"{self.base!r} couples the examples itself: a Sobolev metric needs a base that does not")
        K = self.gram(x, n)
        regular = self.jitter > n * unseen(n)  # no eigenvalue is below the jitter, and none above n
        if not regular and bool(self.jitter <= rounding(K)):  # such a jitter only hides which points are equal
            K.mul_(1 + float(self.jitter)).fill_diagonal_(1.0)
        half = (KernelMatrix.regular(K) if regular else KernelMatrix.of(K)).inverse_root()
        # n columns of L, of size 1/√jitter, mix rows that are equal but for ε: in sums of n terms that is n³ε²/jitter.
        enough = self.jitter > n**3 * torch.finfo(dtype).eps ** 2
        return Coupling(half @ half.T, K, half.to(dtype) if enough else half)

    def gram(self, x: Inputs, n: int) -> Tensor:
        """K [n n] in float64, jitter included, of the inputs of n examples."""
        with torch.no_grad():
            found = self._points(x).detach().double()
            if found.shape[0] != n:
                raise ValueError(
                    f"the Sobolev metric found {found.shape[0]} points in the inputs of {n} examples: it needs one an "
                    "example, on the first axis. Pass features=, a function of the model's inputs that returns them"
                )
            if found.device.type == "cpu":  # a GPU is not waited for: there, what is made of them is looked at
                check_finite(found, "the tensor of points of the Sobolev metric")
            K = self._kernel(found)
            K.diagonal().add_(float(self.jitter))
            return K.div_(1 + float(self.jitter))

    @cached_property
    def _kernel(self) -> SobolevKernel:
        """Made once: a lengthscale on a GPU is read back when it is checked."""
        return SobolevKernel(self.nu, self.lengthscale)

    def _points(self, x: Inputs) -> Tensor:
        """The model's one input, or the features of its inputs, as points [n d]."""
        args, kwargs = arguments(x)
        if self.features is not None:
            given = self.features(*args, **kwargs)
            return points(x, lambda _: given)
        alone = (*args, *kwargs.values())
        return points(alone[0] if len(alone) == 1 else alone)
