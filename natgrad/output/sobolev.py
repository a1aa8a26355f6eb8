"""The Sobolev metric: an inner product of functions instead of their values. It couples examples by a kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import can_read
from natgrad.kernels.distances import check_features, points
from natgrad.kernels.gram import KernelMatrix, relative_rounding, rounding
from natgrad.kernels.sobolev import Lengthscale, ReproducingKernel, SobolevKernel
from natgrad.linalg import check_finite, is_number
from natgrad.model import Inputs, arguments
from natgrad.output.metric import Coupling, DerivedMetric, Euclidean, OutputMetric


@final
@dataclass(frozen=True)
class Sobolev(DerivedMetric):
    """A metric on functions that prefers smooth changes: the norm of a Sobolev space.

    ``ng.SobolevKFAC`` is the optimizer that uses it with Kronecker factors.

    Args:
        base: The metric on the outputs of one example; ``Euclidean()`` by default.
        nu: The smoothness ν of the kernel: ½, 3/2, 5/2, or any other positive number.
        lengthscale: A number, or a rule such as ``Median(divisor=4)`` that is measured on every batch.
        jitter: K is replaced by (K + κ·jitter)/(1 + jitter), in float64, with κ the mean of its diagonal, which stays.
        features: Called with the model's inputs, if they are not real points [n *shape] (several arguments, tokens,
            images).
        kernel: Another reproducing kernel in place of ``SobolevKernel(nu, lengthscale)``: of a circle or a sphere, sums
            and products, or your own. It is called with the only input, or with what ``features`` returns.

    Method:
        The norm of H^(ν + d/2) instead of L² (Bai, Rosenberg and Xu 2022): G = (1/N) Σ_k Σ_nm (K⁻¹)_nm R_kn R_kmᵀ,
        where K_nm = k(‖x_n − x_m‖/ℓ) is the ``SobolevKernel`` of the model's inputs, with k(0) = 1.

        The paper writes the space as H_s with s = d + 2ν. G is a mean over the examples; the paper has a sum.

        With the Euclidean ``base``, vᵀGv is 1/N of the squared norm of the smallest functions that have the values J v
        at the inputs. With ``Fisher(Categorical())`` it is the norm of x ↦ 2√p(·|x), the Hellinger embedding. If ℓ is
        small compared with all distances, K = 1 and G is that of the base: Gauss–Newton, Fisher, K-FAC.

        For an over-parametrised model without damping, one step moves the training outputs by −ηK e, where Gauss–Newton
        moves them by −ηe. So descent needs η < 2/λ_max(K), and λ_max(K) can be as large as N.

        K is that of the points where the metric is estimated. These may be others than the batch of the loss, such as
        inputs without targets: ``ng.pullback(model, z, Sobolev())``, ``opt.refresh(z)`` before the forward pass.

        N·vᵀGv is the least squared norm of functions with the values J v at these points, so it grows with every point
        that is added, up to the norm of J v itself.

        Equal examples count once, up to the jitter (exactly if it is 0): a batch of copies has 1/N of the metric of one
        of them.

        A jitter below max(N, 4096) units in the last place of λ_max(K), about 10⁻¹²N, counts as 0. If the jitter is
        small compared with N³ε² (10⁻⁶ in single precision for N ≥ 416), rows are mixed in double precision.

        If K is singular to rounding although its inputs differ, its smallest eigenvalues are raised to the rounding
        level, so rough functions hardly move. The ``Kernel`` structure never inverts K: it solves Jᵀ(λK + JJᵀ)⁻¹K e,
        which stays accurate for ill-conditioned K.

        If ``base`` is sampled, the whole batch shares its samples: column k is one random combination Σ_j ε_kj s_j of
        the columns of the exact root. Independent samples would erase all of K⁻¹ but its diagonal. ``flat`` and
        ``divergence`` are those of the base, and step rules that measure a step by them (``TrustRegion``,
        ``SelfTuned``) do so in it.

    Example:
        >>> metric = Sobolev(lengthscale=2.0, jitter=0.0)
        >>> metric.coupling(torch.tensor([[0.0], [2.0]]), 2)  # the inverse of [[1, 2/e], [2/e, 1]]
        tensor([[ 2.1803, -1.6042],
                [-1.6042,  2.1803]], dtype=torch.float64)
    """

    base: OutputMetric = field(default_factory=Euclidean)
    nu: float = 1.5
    lengthscale: float | Tensor | Lengthscale = 1.0
    jitter: float = 1e-6
    features: Callable[..., Any] | None = None
    kernel: ReproducingKernel | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, OutputMetric):
            raise TypeError(
                f"Sobolev(base={self.base!r}): the base is a metric on the outputs, as Euclidean() or metric_of(loss)"
            )
        if isinstance(self.base, Sobolev):
            raise ValueError("Sobolev(base=Sobolev(…)) would couple the examples twice: give the metric inside")
        if self.kernel is not None and not isinstance(self.kernel, ReproducingKernel):
            raise TypeError(
                f"kernel={self.kernel!r}: give a functionspace.ReproducingKernel, which can be a class of yours"
            )
        if self.kernel is not None and (self.nu, self.lengthscale) != (1.5, 1.0):
            raise ValueError(
                f"kernel={self.kernel!r} has a smoothness and lengthscale of its own: leave nu= and lengthscale= out"
            )
        _ = self._kernel  # checks ν and ℓ
        check_features(self.features)
        if not is_number(self.jitter):
            raise TypeError(f"jitter={self.jitter!r}: give a number, which is added to the diagonal of K")
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
        K = self._matrix(x, n)
        regular = self.jitter > n * relative_rounding(n)  # all eigenvalues lie between the jitter and n, over K_nn
        if regular or bool(self.jitter * K.diagonal().mean() > rounding(K)):  # a smaller one hides which are equal
            K = self._jittered(K)
        half = (KernelMatrix.regular(K) if regular else KernelMatrix.of(K)).inverse_root()
        # n columns of L, of size 1/√jitter, mix rows that agree up to ε: their rounding sums to n³ε²/jitter.
        accurate = self.jitter > n**3 * torch.finfo(dtype).eps ** 2
        return Coupling(half @ half.T, K, half.to(dtype) if accurate else half)

    def gram(self, x: Inputs, n: int) -> Tensor:
        """K [n n] of the inputs of n examples, with the jitter, in float64."""
        return self._jittered(self._matrix(x, n))

    def _jittered(self, K: Tensor) -> Tensor:
        K.diagonal().add_(float(self.jitter) * K.diagonal().mean())
        return K.div_(1 + float(self.jitter))

    def _matrix(self, x: Inputs, n: int) -> Tensor:
        with torch.no_grad():
            z = self._points(x)
            if isinstance(z, Tensor) and can_read(z):  # on a GPU, the factors made from them are checked instead
                check_finite(z, "the tensor of points of the Sobolev metric")
            if self.kernel is None and len(z) != n:
                raise ValueError(
                    f"the Sobolev metric found {len(z)} points in the inputs of {n} examples: it needs one an "
                    "example, on the first axis. Pass features=, a function of the model's inputs that returns them"
                )
            K = self._kernel(z).double()
            if K.shape != (n, n):
                raise ValueError(
                    f"the kernel {self._kernel!r} of the Sobolev metric returned {tuple(K.shape)} for {n} examples: it "
                    "must be [n n]. Pass features=, a function of the model's inputs that returns a point an example"
                )
            return K

    @cached_property
    def _kernel(self) -> ReproducingKernel:
        """Cached, because checking a lengthscale on a GPU reads it back."""
        return SobolevKernel(self.nu, self.lengthscale) if self.kernel is None else self.kernel

    def _points(self, x: Inputs) -> Any:
        """The only input of the model, or the features of its inputs; as points [n d] for the kernel of R^d."""
        args, kwargs = arguments(x)
        alone = (*args, *kwargs.values())
        given: Any = alone[0] if len(alone) == 1 else alone
        if self.features is not None:
            given = self.features(*args, **kwargs)
        if self.kernel is not None:
            return given.detach().double() if isinstance(given, Tensor) and given.is_floating_point() else given
        return (points(given) if self.features is None else points(x, lambda _: given)).detach().double()
