"""The tangent space of a model inside a space of functions, and the projection on it: the Sobolev natural gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.accelerate.devices import full_precision
from natgrad.errors import MemoryBoundError
from natgrad.functionspace.ntk import check_size, jacobian_rows, ntk
from natgrad.geometry import Vector, value_and_differential
from natgrad.kernels.gram import KernelMatrix
from natgrad.kernels.sobolev import ReproducingKernel
from natgrad.linalg import check_damping, check_finite, eigh, svd
from natgrad.log import listed
from natgrad.model import Inputs, Model, check_slots
from natgrad.output.metric import Euclidean
from natgrad.pullbacks.pullback import Observer, Pullback, layers_of
from natgrad.show import brief
from natgrad.structures.kernel import Kernel, KernelOperator, PushThrough


@final
@dataclass(frozen=True)
class PushforwardMetric:
    """The length of a change of function, measured by the shortest change of parameters.

    Functions that are not tangent have no length, and are refused. Construct it with ``PushforwardMetric.of``.

    Args:
        values: The nonzero eigenvalues of Θ [t].
        vectors: The eigenvectors [(n k) t].
        precision: The precision of Θ.

    Method:
        (φ_*g)(X, Y) = g(dφ⁻¹X, dφ⁻¹Y) = XᵀΘ⁺Y of tangent functions X, Y known at the points.

        See Bai, Rosenberg and Xu (2022), section 5. Θ = J g⁻¹Jᵀ is the kernel of the tangent space under a metric g on
        the parameters: ``ntk`` for the Euclidean one, in which the ∂φ/∂θ^p are orthonormal. Kernel and metric are dual:
        under θ' = 2θ the kernel is divided by 4 and the metric multiplied by 4.

        Where φ is not an immersion, dφ⁻¹X is the shortest vector that moves the outputs by X. For the kernel of a
        pulled-back metric (``TangentKernel``) the pushforward is the metric on functions itself, which depends on no
        parametrisation.
    """

    values: Tensor  # nonzero eigenvalues of Θ, [t]
    vectors: Tensor  # [(n k) t]
    precision: float  # of Θ

    __repr__ = brief

    @staticmethod
    def of(kernel: Tensor) -> PushforwardMetric:
        """The dual of the kernel [n n k k] between the points.

        >>> from natgrad.functionspace import ntk
        >>> model, x = torch.nn.Linear(1, 1), torch.tensor([[0.0], [1.0]])
        >>> φ_1 = torch.tensor([[0.0], [1.0]])  # ∂φ/∂weight at the points; that of the bias is 1
        >>> metric = PushforwardMetric.of(ntk(model, x))
        >>> [round(float(metric.inner(φ_1, X)), 5) + 0.0 for X in (φ_1, torch.ones(2, 1))]
        [1.0, 0.0]
        """
        if kernel.ndim != 4 or kernel.shape[0] != kernel.shape[1] or kernel.shape[2] != kernel.shape[3]:
            raise ValueError(
                f"the kernel has the shape {tuple(kernel.shape)}: give that of points with themselves, [n n k k], as "
                "ntk(model, x)"
            )
        n, _, k, _ = kernel.shape
        values, vectors = eigh(kernel.transpose(1, 2).reshape(n * k, n * k).double(), "the kernel")
        precision = 8 * n * k * torch.finfo(kernel.dtype).eps
        nonzero = values > precision * values[-1]
        return PushforwardMetric(values[nonzero], vectors[:, nonzero], precision)

    @property
    def rank(self) -> int:
        """The dimension of the tangent space, restricted to the points."""
        return self.values.numel()

    def flat(self, v: Tensor) -> Tensor:
        """Θ⁺v [n *out], for a tangent function with the values v at the points."""
        inside = self._coordinates(v)
        return (self.vectors @ (inside / self.values)).view(v.shape).to(v.dtype)

    def inner(self, v: Tensor, w: Tensor) -> Tensor:
        """vᵀΘ⁺w of two tangent functions."""
        return (self._coordinates(v) / self.values @ self._coordinates(w)).to(v.dtype)

    def _coordinates(self, v: Tensor) -> Tensor:
        if v.numel() != self.vectors.shape[0]:
            raise ValueError(f"v has the shape {tuple(v.shape)}: it needs {self.vectors.shape[0]} values at the points")
        check_finite(v, "the function")
        flat = v.detach().reshape(-1).double()
        inside = self.vectors.T @ flat
        outside = float((flat - self.vectors @ inside).norm() / flat.norm().clamp(min=torch.finfo(v.dtype).tiny))
        # Eigenvalues of Θ that were cut off are this large in J.
        if outside > 4 * math.sqrt(self.precision):
            raise ValueError(
                f"v is not tangent to the model: {100 * outside:.2g} % of it lie outside the span of ∂φ/∂θ, where the "
                "pushforward metric is not defined. Project it first, with TangentSpace.project or "
                "TangentKernel.project"
            )
        return inside


@final
@dataclass(frozen=True)
class Spectrum:
    """The pulled-back metric g on its range: eigenvalues σ², and orthonormal eigenvectors d_e = Uᵀ E_e.

    U are the rows of a frame, R = MᵀU. ``images``: R d_e/σ_e, orthonormal tangent functions h_e in coordinates.
    """

    values: Tensor  # σ² ascending [e]
    directions: Tensor  # E [(k n) e]
    images: Tensor  # [(k t) e]

    @staticmethod
    def of(square: Tensor, mixing: Tensor | None, eps: float) -> Spectrum:
        """From U Uᵀ [(k n) (l m)] in double precision, where U has the relative error ``eps``, and M [n t].

        The range of U comes first: M is as ill-conditioned as a kernel matrix, and would hide the rank.
        """
        squares, W = eigh(square, "the kernel of the frame")
        rounding = 8 * len(squares)
        nonzero = squares > max((rounding * eps) ** 2, rounding * torch.finfo(square.dtype).eps) * squares[-1]
        ρ, W = squares[nonzero].sqrt(), W[:, nonzero]
        inner = W * ρ  # [(k n) e], the coordinates of an orthonormal basis
        if mixing is not None:
            inner = torch.einsum("nt,kne->kte", mixing, inner.view(-1, len(mixing), ρ.numel())).flatten(0, 1)
        images, σ, V = svd(inner, "the frame")
        large = σ > 8 * len(square) * torch.finfo(σ.dtype).eps * σ[:1]
        order = large.nonzero().flatten().flip(0)
        return Spectrum(σ[order].square(), (W / ρ @ V.T)[:, order], images[:, order])


@final
@dataclass(frozen=True)
class TangentFrame:
    """The derivatives of a model's function, in coordinates in which its metric is Euclidean.

    Make it with ``TangentFrame.of(pullback)`` or ``TangentFrame.within(model, x, kernel)``.

    Attributes:
        model: The model.
        rows: U = s·J/√N, in the factors of the layers.
        root: The root s [k n d] of the metric on the outputs.
        shape: The shape of the outputs, [n *out].
        memory: Bytes that a temporary may take.
        mixing: M [n t], where M Mᵀ is the coupling of the examples; None where there is none.
        params: A copy of the parameters at which the rows were computed.

    Method:
        ∂φ/∂θ^p in coordinates in which the metric on functions is Euclidean: R [(k t) p], G = RᵀR.

        A function with the values v [n *out] at the points has the coordinates ξ(v) = Σ_n M_nt ⟨s_kn, v_n⟩/√N. Then R w
        is ξ(J w), ⟨u, v⟩ is ξ(u)·ξ(v), and R Rᵀ comes from the factors of the layers: J is not formed.
    """

    model: Model
    rows: KernelOperator  # U = s·J/√N, in factors
    root: Tensor  # s [k n d]
    shape: torch.Size  # of the outputs, [n *out]
    memory: int
    mixing: Tensor | None = None  # M [n t]
    params: Mapping[str, Tensor] = field(default_factory=dict)  # a copy of those at which the rows were computed

    __repr__ = brief

    @staticmethod
    def of(pb: Pullback) -> TangentFrame:
        """Under the metric of a pullback (L² at the points, Fisher, Sobolev): a mean over the examples.

        >>> import natgrad as ng
        >>> pb = ng.pullback(nn.Linear(2, 3), torch.randn(5, 2), ng.Fisher(ng.Categorical()))
        >>> TangentFrame.of(pb).spectrum.values.shape  # a constant added to the logits has no length
        torch.Size([6])
        """
        check_slots(pullback=(pb, Pullback))
        _admit(pb)
        mixing = None
        if pb.coupled is not None and pb.coupled.K is not None:
            mixing = KernelMatrix.of(pb.coupled.K).inverse_root()
        elif pb.coupling is not None:
            mixing = pb.mixing().double()
        root = pb.root.reshape(*pb.root.shape[:2], -1).double()
        params = {name: p.detach().clone() for name, p in pb.model.params.items()}
        return TangentFrame(pb.model, Kernel().estimate(pb.unmixed()), root, pb.y.shape, pb.memory, mixing, params)

    @staticmethod
    def within(
        model: nn.Module | Callable[..., Any],
        x: Inputs,
        kernel: ReproducingKernel,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> TangentFrame:
        """In the Hilbert space of a kernel: ‖v‖² = Σ_k v_kᵀK⁺v_k, the least norm of a function with the values v.

        It is a sum over the examples, not a mean, without jitter: equal points count once.

        >>> from natgrad.functionspace import SobolevKernel
        >>> TangentFrame.within(nn.Linear(2, 1), torch.randn(5, 2), SobolevKernel(1.5)).spectrum.values.shape
        torch.Size([3])
        """
        return _in_hilbert_space(model, x, kernel, params, output)[0]

    @cached_property
    def spectrum(self) -> Spectrum:
        """The spectrum of the pulled-back metric."""
        with torch.no_grad():
            square = self.exact.gram()
            check_finite(square, "the Gram matrix of the tangent space")
            return Spectrum.of(square, self.mixing, torch.finfo(self.rows.layout.dtype).eps)

    @cached_property
    def exact(self) -> KernelOperator:
        """The rows in double precision: products in single precision would lose everything below √eps."""
        return self.rows.to(torch.float64)

    def coordinates(self, v: Tensor) -> Tensor:
        """ξ(v) [(k t)], of a function with the values v [n *out] at the points."""
        self.check(v)
        ξ = torch.einsum("knd,nd->kn", self.root, v.detach().reshape(self.shape[0], -1).double())
        return (ξ if self.mixing is None else ξ @ self.mixing).reshape(-1) / math.sqrt(self.shape[0])

    def check(self, v: Tensor) -> None:
        """Refuse values that are not those of a function at the points."""
        if v.shape != self.shape:
            raise ValueError(f"v has the shape {tuple(v.shape)}, and the outputs at the points {tuple(self.shape)}")
        check_finite(v, "the function")

    def pull(self, ξ: Tensor) -> Vector:
        """Rᵀξ, a vector of the parameters, for coordinates ξ [(k t)]."""
        ξ = ξ.view(self.root.shape[0], -1)
        return self.combine(ξ if self.mixing is None else ξ @ self.mixing.T)

    def combine(self, t: Tensor) -> Vector:
        """Uᵀt, a vector of the parameters, for t of k n numbers."""
        pulled = self.exact.pull(t.reshape(self.root.shape[:2]).double())
        return self.rows.layout.vector(pulled.to(self.rows.layout.dtype))

    def along(self, x: Inputs) -> Tensor:
        """J_x d_e [m d e]: the derivatives of the outputs at any points x along the eigenvectors d_e."""
        changed = [name for name, p in self.model.params.items() if not torch.equal(p, self.params[name])]
        if changed:
            raise ValueError(
                f"{listed(changed)} changed since the tangent frame was computed, and at new points it would mix two "
                "models: make a new TangentFrame"
            )
        rows = jacobian_rows(self.model, x, self.memory)
        d, m = rows.factors[0].g.shape[:2]
        k, n = self.root.shape[:2]
        check_size(d * m * k * n * 8, (m, n), self.memory)
        with torch.no_grad(), full_precision(self.root.device):
            inner = rows.to(torch.float64).gram_with(self.exact) * math.sqrt(m)  # J_x Uᵀ
            return (inner @ self.spectrum.directions).view(d, m, -1).transpose(0, 1)


def _admit(pb: Pullback) -> None:
    """Refuse rows that do not fit into memory with their copy in double precision."""
    size = pb.y.element_size()
    needed = Kernel().elements(pb.unmixed()) * (size + 8)
    if size < 8 and needed > pb.memory:
        raise MemoryBoundError(
            f"the tangent space of {pb.n} points with {pb.columns} outputs and {pb.model.size:,} parameters needs "
            f"{needed:,} bytes, in double precision too, over the bound memory={pb.memory:,}: take fewer points, or "
            "raise memory= of the pullback"
        )


def _in_hilbert_space(
    model: nn.Module | Callable[..., Any],
    x: Inputs,
    kernel: ReproducingKernel,
    params: Mapping[str, Tensor] | None,
    output: Callable[[Any], Tensor] | None,
) -> tuple[TangentFrame, Tensor, Tensor]:
    """The frame of the Hilbert space of a kernel, K [n n] and the outputs y [n *out] at the points x."""
    check_slots(kernel=(kernel, ReproducingKernel))
    wrapped = Model.of(model, params, output)
    pb = Observer(wrapped, Euclidean(), layers_of(wrapped), None).checked(x)
    with torch.no_grad():
        K = kernel(x)
    if K.shape[0] != pb.n:
        raise ValueError(f"the kernel sees {K.shape[0]} inputs and the model has {pb.n} outputs: one each is needed")
    check_finite(K, "the Gram matrix of the kernel")
    matrix = KernelMatrix.of(K, max(torch.finfo(t.dtype).eps for t in (K, pb.y)))
    mixing = matrix.inverse_root() * math.sqrt(pb.n)  # the rows have 1/√n
    return replace(TangentFrame.of(pb), mixing=mixing), K, pb.y.detach()


@final
@dataclass(frozen=True)
class TangentKernel:
    """A kernel of tangent functions that, unlike ``ntk``, does not depend on parametrisation.

    Args:
        frame: The derivatives of the model in the metric on functions.
        damping: λ ≥ 0: with it the kernel is J(g + λ)⁻¹Jᵀ, for large λ that is ntk/λ.

    Method:
        K_f(x, y) = g^{pq} ∂φ/∂θ^p(x) ⊗ ∂φ/∂θ^q(y), the reproducing kernel of the tangent space.

        See Bai, Rosenberg and Xu (2022), (18) and (19). g is the metric on functions, pulled back, and g^{pq} its
        inverse, on its range where it is singular. ⟨K_f(x, ·)u, v⟩ is u·v(x) for every tangent function v, at points x
        where ∂φ lies in the range of g.

        At the points themselves it is N times the orthogonal projection for the empirical L², and the projection times
        K in the Hilbert space of a kernel K.

    Example:
        >>> import natgrad as ng
        >>> model, x = nn.Linear(1, 1), torch.tensor([[-1.0], [0.0], [1.0]])
        >>> K_f = TangentKernel(TangentFrame.of(ng.pullback(model, x, ng.Euclidean())))
        >>> K_f(torch.tensor([[2.0]]), x)[0, :, 0, 0].round(decimals=4) + 0.0  # 1 + x y/⟨x²⟩
        tensor([-2.,  1.,  4.])
    """

    frame: TangentFrame
    damping: float = 0.0

    def __post_init__(self) -> None:
        check_damping(self.damping, relative=False)

    def __call__(self, x: Inputs, y: Inputs = None) -> Tensor:
        """K_f [n m k l] between points x and y, in the precision of the model; y = None is x itself."""
        frame, λ, σ2 = self.frame, self.damping, self.frame.spectrum.values
        left = frame.along(x)
        right = left if y is None else frame.along(y)
        check_size(8 * left[..., 0].numel() * right[..., 0].numel(), (len(left), len(right)), frame.memory)
        kernel = torch.einsum("nke,e,mle->nmkl", left, 1 / (σ2 + λ), right)
        if λ > 0:  # outside the range of g there is only the damping
            whole = ntk(frame.model, x, y, memory=frame.memory).double()
            kernel += (whole - torch.einsum("nke,mle->nmkl", left, right)) / λ
        return kernel.to(frame.rows.layout.dtype)

    def project(self, v: Tensor) -> Vector:
        """w of the projection P v = J w of a function with the values v [n *out] at the points.

        With damping, w minimises ‖v − J w‖² + λ‖w‖². P of a functional gradient is how the natural gradient moves the
        function (Bai, Rosenberg & Xu 2022, lemma 3).
        """
        spectrum = self.frame.spectrum
        σ2 = spectrum.values
        inside = spectrum.images.T @ self.frame.coordinates(v)  # ⟨h_e, v⟩
        return self.frame.combine(spectrum.directions @ (inside * σ2.sqrt() / (σ2 + self.damping)))


@final
@dataclass(frozen=True)
class NTKMap:
    """How gradient descent on parameters moves functions, and how far it is from a projection.

    Args:
        frame: The derivatives of the model in the metric on functions.

    Method:
        S v = Σ_p ⟨v, ∂φ/∂θ^p⟩ ∂φ/∂θ^p, from functions to tangent functions (Bai, Rosenberg & Xu 2022, section 5.1).

        S and the projection P have the same kernel. S maps the functional gradient of a loss to how plain gradient
        descent moves the function.

        S is self-adjoint but no projection: its eigenvalues on the tangent space are those of the pulled-back metric g,
        as S(J w) = J g w, and S = P only where they are all 1, that is, where the ∂φ/∂θ^p are orthonormal.

        In a metric that makes them orthonormal (``PushforwardMetric``) and leaves the orthogonal complement as it is,
        S is P.

    Example:
        >>> import natgrad as ng
        >>> x = torch.tensor([[-1.0], [1.0]])
        >>> pb = ng.pullback(nn.Linear(1, 1), x, ng.Euclidean())  # 1 and x are orthonormal at these points
        >>> bool(NTKMap(TangentFrame.of(pb)).projection_defect() < 1e-6)
        True
        >>> pb = ng.pullback(nn.Linear(1, 1), 2 * x, ng.Euclidean())  # 1 and 2x are not: eigenvalues 1 and 4
        >>> round(float(NTKMap(TangentFrame.of(pb)).projection_defect()), 5)  # (16 − 4)/4
        3.0
    """

    frame: TangentFrame

    def __call__(self, v: Tensor) -> Vector:
        """w of S v = J w, w^p = ⟨v, ∂φ/∂θ^p⟩, for a function with the values v [n *out] at the points."""
        return self.frame.pull(self.frame.coordinates(v))

    def eigenvalues(self) -> Tensor:
        """The eigenvalues of S on the tangent space, ascending: the nonzero ones of the pulled-back metric."""
        return self.frame.spectrum.values

    def projection_defect(self) -> Tensor:
        """‖S² − S‖/‖S‖ in the norm of operators, max|λ² − λ|/max λ: zero if and only if S is a projection."""
        λ = self._nonzero()
        return (λ.square() - λ).abs().max() / λ.max()

    def distance(self) -> Tensor:
        """‖S − P‖ = max|λ − 1|: the worst relative error of taking S for P."""
        return (self._nonzero() - 1).abs().max()

    def scaled_distance(self) -> Tensor:
        """min_η ‖ηS − P‖ = (κ − 1)/(κ + 1), κ = max λ/min λ: the error that no learning rate removes."""
        λ = self._nonzero()
        return (λ.max() - λ.min()) / (λ.max() + λ.min())

    def _nonzero(self) -> Tensor:
        if self.eigenvalues().numel() == 0:
            raise ValueError(
                "the tangent space has no dimension that the metric sees at these points: S is zero. Take points where "
                "the outputs depend on the parameters"
            )
        return self.eigenvalues()


@final
@dataclass(frozen=True)
class TangentSpace:
    """The directions in which a model's function can move, and projections onto them.

    Construct it with ``TangentSpace.of``. Equal points count once.

    Args:
        frame: The derivatives of the model at the points.
        K: The kernel matrix of the points [n n].
        y: The outputs of the model φ(x) [n *out].

    Method:
        The span of ∂φ/∂θ^i, known at the points x, with the norm ‖v‖² = Σ_k v_kᵀK⁻¹v_k over the outputs k.

        That is the least norm of a function with the values v at the points (Bai, Rosenberg & Xu 2022, (22)). The
        projection of v [n *out] is J w, with the shortest w that minimises ‖v − J w‖² + λ‖w‖²:

            w = (JᵀK⁻¹J + λ)⁻¹JᵀK⁻¹v = Jᵀ(λK + JJᵀ)⁻¹v.

        With damping the second form is used: K is not inverted. Sums run over the examples; a mean loss with a mean
        metric has the same projection, and n times less damping.
    """

    frame: TangentFrame
    K: Tensor  # [n n]
    y: Tensor  # φ(x) [n *out]

    __repr__ = brief

    @staticmethod
    def of(
        model: nn.Module | Callable[..., Any],
        x: Inputs,
        kernel: ReproducingKernel,
        params: Mapping[str, Tensor] | None = None,
        output: Callable[[Any], Tensor] | None = None,
    ) -> TangentSpace:
        """The tangent space of a model at its parameters, known at the inputs x.

        >>> from natgrad.functionspace import SobolevKernel
        >>> model, x = nn.Linear(2, 1), torch.randn(5, 2)
        >>> TangentSpace.of(model, x, SobolevKernel(1.5)).natural_gradient(lambda y: y.square().sum())
        Vector(weight: (1, 2), bias: (1,))
        """
        return TangentSpace(*_in_hilbert_space(model, x, kernel, params, output))

    def natural_gradient(self, loss: Callable[[Tensor], Tensor], damping: float = 0.0) -> Vector:
        """w of the projection of ∇ℓ, for a loss of the outputs; subtract it to descend.

        ∇ℓ has the values K e at the points, e = ∂L/∂y. Over-parametrised and undamped, a step −ηw moves the outputs by
        −ηK e to first order: descent in the space of functions (Bai, Rosenberg & Xu 2022, proposition 5).
        """
        e = value_and_differential(loss, self.y)[1]
        return self.project(torch.tensordot(self.K.to(e.dtype), e, dims=1), damping)

    def project(self, v: Tensor, damping: float = 0.0) -> Vector:
        """w of the projection J w of a function with the values v [n *out] at the points."""
        projection = TangentKernel(self.frame, damping)
        if damping == 0:
            return projection.project(v)
        self.frame.check(v)
        n = len(self.K)
        K = KernelMatrix.of(self.K, max(torch.finfo(t.dtype).eps for t in (self.K, self.y)))
        dual = PushThrough.of(self.frame.exact, K, damping / n).solve(v.reshape(n, -1).T.double())
        return self.frame.combine(dual / math.sqrt(n))
