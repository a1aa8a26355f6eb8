"""Gauss quadrature of a probability measure on the inputs: the L² metric of functions without sampling."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn
from torch import distributions as D

from natgrad.errors import MemoryBoundError
from natgrad.linalg import check_finite, check_positive, gauss_rule, is_number
from natgrad.model import Inputs
from natgrad.output.metric import Coupling, DerivedMetric, Euclidean, OutputMetric
from natgrad.pullbacks.pullback import Pullback, pullback
from natgrad.show import brief
from natgrad.structures.implicit import Implicit

_log = logging.getLogger("natgrad")
_NODES = 2**12  # of a product rule: the coupling has n² entries
_ORDER = 512  # where doubling ends: the nodes of an axis are the eigenvalues of a matrix of this size
_PROBES = 8  # products with the metric that are compared between two orders


@final
@dataclass(frozen=True)
class Quadrature:
    """Nodes and weights that turn an integral over inputs into a sum.

    ``Quadrature.of`` makes them for a distribution of inputs, and ``metric`` is the metric on the outputs at the nodes
    whose pullback is the L² metric of functions.

    Args:
        nodes: The points x_n [n d].
        weights: The weights w_n > 0 [n], which sum to 1.
        gap: How far G is from that of half the order, relative to its Frobenius norm; None where no model was compared.

    Method:
        Σ_n w_n f(x_n) ≈ ∫ f dμ, and in any structure (Bai, Rosenberg and Xu 2022, appendix E)

            G_ij = ∫ ⟨∂φ/∂θ^i(x), ∂φ/∂θ^j(x)⟩ dμ(x) = Σ_n w_n J_nᵀ h_n J_n

        For Lebesgue's measure the integral diverges wherever ∂φ/∂θ does not decay (a bias never does): μ must be a
        probability measure.

    Example:
        >>> import natgrad as ng
        >>> rule = Quadrature.of(D.Normal(torch.zeros(1), torch.ones(1)), order=8)
        >>> pb = ng.pullback(torch.nn.Linear(1, 1), rule.nodes, rule.metric())
        >>> ng.Dense().estimate(pb).dense().round(decimals=4) + 0.0  # E x², E x, 1
        tensor([[1., 0.],
                [0., 1.]])
    """

    nodes: Tensor  # [n d]
    weights: Tensor  # [n]
    gap: float | None = None

    __repr__ = brief

    def __post_init__(self) -> None:
        if self.weights.ndim != 1 or self.nodes.ndim == 0 or len(self.nodes) != len(self.weights):
            raise ValueError(
                f"nodes {tuple(self.nodes.shape)} and weights {tuple(self.weights.shape)}: a rule has nodes [n d] and "
                "one weight each, [n]"
            )
        check_finite(self.nodes, "the nodes of a quadrature")
        _check_weights(self.weights)

    @staticmethod
    def of(
        measure: D.Distribution,
        order: int | None = None,
        *,
        model: nn.Module | Callable[..., Any] | None = None,
        params: Mapping[str, Tensor] | None = None,
        base: OutputMetric | None = None,
        tol: float = 1e-3,
    ) -> Quadrature:
        """Gauss's rule with ``order`` nodes per axis, exact for polynomials of degree 2·order − 1 along each.

        ``measure``: ``Normal`` (Gauss–Hermite), ``Uniform`` (Legendre), ``Gamma`` and ``Exponential`` (Laguerre),
        ``Beta`` (Jacobi); with parameters [d], or as ``Independent``, it is the product measure on R^d.
        ``MultivariateNormal`` and transformed distributions (``LogNormal``) are images of these. The nodes have the
        dtype and device of the measure's parameters; the work is in float64.

        How many nodes are enough depends on what is integrated: convergence is geometric for analytic functions on an
        interval, and slow for a tanh network under a Gaussian (poles near the line). With a ``model`` (and ``params``,
        as ``pullback`` takes them) the metric of the rule is compared with that of half the order, and ``gap`` is the
        difference. Without an ``order`` it is doubled until the gap is at most ``tol``; where 512 nodes per axis or
        4,096 in all are not enough, a warning tells the gap. ``base``: the metric on the outputs, Euclidean by default.

        >>> rule = Quadrature.of(D.Uniform(-1.0, 1.0), order=2)
        >>> rule.nodes.flatten(), rule.weights
        (tensor([-0.5774,  0.5774]), tensor([0.5000, 0.5000]))
        >>> line = nn.Linear(1, 1).double()  # its metric has polynomials of degree 2
        >>> standard = D.Normal(torch.zeros(1).double(), torch.ones(1).double())
        >>> found = Quadrature.of(standard, model=line)
        >>> len(found.nodes), found.gap < 1e-12
        (4, True)
        """
        if not isinstance(measure, D.Distribution):
            raise TypeError(
                f"Quadrature.of takes a torch.distributions distribution of the inputs, got {type(measure).__name__}"
            )
        if order is None and model is None:
            raise TypeError(
                "Quadrature.of(measure) does not know how many nodes are enough: give model=, for whose metric the "
                "order is doubled until it stands still, or order=, the number of nodes per axis"
            )
        if order is not None and (not is_number(order, whole=True) or order < 1):
            raise ValueError(f"order={order!r} must be a positive integer, the number of nodes per axis")
        if model is None:
            assert order is not None
            return _rule(measure, order)
        check_positive(tol, "Quadrature.of(tol)")

        def products(rule: Quadrature) -> Tensor:
            pb = pullback(model, rule.nodes, rule.metric(base), params=params)
            return _products(pb)

        if order is not None:
            rule = _rule(measure, order)
            coarse = _rule(measure, (order + 1) // 2) if order > 1 else _rule(measure, 2)
            return replace(rule, gap=_relative(products(rule), products(coarse)))
        return _adapted(measure, products, tol)

    def metric(self, base: OutputMetric | None = None) -> Weighted:
        """The weighted metric on the outputs at the nodes; ``base`` is Euclidean by default."""
        return Weighted(self.weights, base or Euclidean())

    def integral(self, values: Tensor) -> Tensor:
        """Σ_n w_n f(x_n) [*shape], for values f(x_n) [n *shape] at the nodes."""
        if values.ndim == 0 or len(values) != len(self.weights):
            raise ValueError(
                f"values {tuple(values.shape)} of {len(self.weights)} nodes: one each is needed, [n *shape]"
            )
        return torch.tensordot(self.weights.to(values), values, dims=1)


@final
@dataclass(frozen=True)
class Weighted(DerivedMetric):
    """A metric whose examples have weights, in place of a mean over the batch.

    Args:
        weights: w [n], one for each example of the batch, with sum 1.
        base: The metric of one example; ``Euclidean()`` by default.

    Method:
        Σ_n w_n h_n in place of the mean (1/N) Σ_n h_n, for one batch of N examples with weights w [n], Σ w_n = 1.

        The weights are a coupling C = N diag(w) with N² entries, which every structure understands. The factors of
        K-FAC are Σ w_n a aᵀ / Σ w_n and Σ w_n g gᵀ: weights proportional to numbers of repetitions give the factors of
        the repeated batch. ``flat`` and ``divergence`` are those of the base, example by example.

    Example:
        >>> Weighted(torch.tensor([0.25, 0.75])).coupling(torch.zeros(2, 1), 2)
        tensor([[0.5000, 0.0000],
                [0.0000, 1.5000]], dtype=torch.float64)
    """

    weights: Tensor  # [n]
    base: OutputMetric = field(default_factory=Euclidean)

    __repr__ = brief

    def __post_init__(self) -> None:
        if not isinstance(self.base, OutputMetric):
            raise TypeError(f"Weighted(base={self.base!r}): the base is a metric on the outputs, such as Euclidean()")
        _check_weights(self.weights)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.base.root(y, target, generator)

    def coupling(self, x: Inputs, n: int) -> Tensor:
        return self.coupled(x, n).C

    def coupled(self, x: Inputs, n: int, dtype: torch.dtype = torch.float64) -> Coupling:
        if n != len(self.weights):
            raise ValueError(f"{len(self.weights)} weights and {n} examples: a Weighted metric belongs to one batch")
        if self.base.coupling(x, n) is not None:
            raise ValueError(f"{self.base!r} couples the examples itself: weights need a base that does not")
        return Coupling.of_weights(self.weights.double() * n, dtype)


def _check_weights(weights: Tensor) -> None:
    check_finite(weights, "the weights of a quadrature")
    total, smallest = float(weights.sum()), float(weights.min()) if weights.numel() else 0.0
    if smallest < 0 or abs(total - 1) > 1e-4:
        raise ValueError(
            f"weights with the sum {total:g} and the smallest {smallest:g} are no probability measure: they must not "
            "be negative, and sum to 1. Under Lebesgue's measure the L² metric diverges; divide by the volume"
        )


def _products(pb: Pullback) -> Tensor:
    """G z [p k] for a few random signs z: E‖Gz‖² = ‖G‖² in the Frobenius norm."""
    G = Implicit().estimate(pb)
    generator = torch.Generator().manual_seed(0)
    z = 2.0 * torch.randint(2, (_PROBES, G.layout.size), generator=generator) - 1
    return torch.stack([G.product(column) for column in z.to(pb.y)])


def _relative(fine: Tensor, coarse: Tensor) -> float:
    """‖G − G′‖/‖G‖; 0 for a model that is constant in its parameters."""
    norm = torch.linalg.vector_norm(fine)
    return float(torch.linalg.vector_norm(fine - coarse) / norm) if float(norm) > 0 else 0.0


def _adapted(measure: D.Distribution, products: Callable[[Quadrature], Tensor], tol: float) -> Quadrature:
    """The rule of the first order 4, 8, 16, … whose metric is within tol of that of half the order, or the last one."""
    rule = _rule(measure, 2)
    before, d = products(rule), rule.nodes[0].numel()
    order = 2
    while True:
        order *= 2
        rule = _rule(measure, order)
        after = products(rule)
        gap = _relative(after, before)
        if gap <= tol:
            break
        if 2 * order > _ORDER or (2 * order) ** d > _NODES:
            _log.warning(
                "the metric of %d nodes per axis still differs by %.2g from that of %d, over tol=%g, and this is the "
                "largest rule: raise tol, or take a Monte-Carlo batch of inputs",
                order,
                gap,
                order // 2,
                tol,
            )
            break
        before = after
    return replace(rule, gap=gap)


def _rule(measure: D.Distribution, order: int) -> Quadrature:
    """The rule of a measure, or of the measure that it is an image or a product of."""
    if isinstance(measure, D.Independent):
        return _rule(measure.base_dist, order)
    if isinstance(measure, D.MultivariateNormal):
        loc, L = measure.loc, measure.scale_tril
        _check_one(measure, loc.ndim - 1)
        standard = _rule(D.Normal(torch.zeros_like(loc), torch.ones_like(loc)), order)
        return Quadrature(loc + standard.nodes @ L.T, standard.weights)
    if isinstance(measure, D.TransformedDistribution):
        below = _rule(measure.base_dist, order)
        x = below.nodes
        for transform in measure.transforms:
            x = transform(x)
        return Quadrature(x, below.weights)
    like, diagonal, beside = _recurrence(measure, order)
    _check_one(measure, like.ndim - 1)
    return _product(*gauss_rule(diagonal, beside), like)


def _recurrence(measure: D.Distribution, order: int) -> tuple[Tensor, Tensor, Tensor]:
    """A parameter [d] or [], and the Jacobi matrices of the axes: diagonal α [d q] and off-diagonal β [d q−1]."""
    if isinstance(measure, D.Normal):
        loc, scale = _axes(measure.loc), _axes(measure.scale)
        k = torch.arange(order, dtype=torch.float64, device=loc.device)
        return measure.loc, loc + 0 * k, scale * k[1:].sqrt()
    if isinstance(measure, D.Uniform):
        low, high = _axes(measure.low), _axes(measure.high)
        if not bool((high - low).isfinite().all()):
            raise ValueError(
                "Uniform over an infinite range is Lebesgue's measure, and the L² metric of functions diverges under "
                "it: take a probability measure, as Normal, or Uniform on an interval"
            )
        k = torch.arange(order, dtype=torch.float64, device=low.device)
        return measure.low, (low + high) / 2 + 0 * k, (high - low) / 2 * k[1:] / (4 * k[1:].square() - 1).sqrt()
    if isinstance(measure, (D.Gamma, D.Exponential)):
        rate = _axes(measure.rate)
        a = _axes(measure.concentration) if isinstance(measure, D.Gamma) else torch.ones_like(rate)
        k = torch.arange(order, dtype=torch.float64, device=rate.device)
        return measure.rate, (2 * k + a) / rate, (k[1:] * (k[1:] + a - 1)).sqrt() / rate
    if isinstance(measure, D.Beta):
        return measure.concentration1, *_jacobi(_axes(measure.concentration1), _axes(measure.concentration0), order)
    raise TypeError(
        f"there is no Gauss rule for {type(measure).__name__}: Normal, MultivariateNormal, Uniform, Gamma, "
        "Exponential, Beta, products and images of them have one. Take a Monte-Carlo batch of inputs instead, "
        "pullback(model, measure.sample((n,)), metric), or a Quadrature(nodes, weights) of your own"
    )


def _jacobi(p: Tensor, q: Tensor, order: int) -> tuple[Tensor, Tensor]:
    """α and β of t^{p−1}(1 − t)^{q−1} on [0, 1]. The first entries are limits, where the general form may be 0/0."""
    k = torch.arange(1, order, dtype=torch.float64, device=p.device)
    s = p + q
    m = 2 * k + s - 2
    later = 0.5 + ((p - 1).square() - (q - 1).square()) / (2 * m * (m + 2))
    square = k * (k + p - 1) * (k + q - 1) * (k + s - 2) / (m.square() * (m.square() - 1))
    square = torch.where(k == 1, p * q / (s.square() * (s + 1)), square)
    return torch.cat([p / s, later], dim=-1), square.sqrt()


def _axes(parameter: Tensor) -> Tensor:
    """A parameter [d] or [] as [d 1], in float64."""
    return parameter.detach().double().reshape(-1, 1)


def _check_one(measure: D.Distribution, extra: int) -> None:
    if extra > 0:
        raise ValueError(
            f"{type(measure).__name__} with the batch shape {tuple(measure.batch_shape)} is several measures: give one "
            "on R^d, with parameters [d]"
        )


def _product(nodes: Tensor, weights: Tensor, like: Tensor) -> Quadrature:
    """The product rule [q^d d] of the axes' nodes and weights [d q]."""
    d, q = nodes.shape
    if q**d > _NODES:
        fits = int(_NODES ** (1 / d) + 1e-9)
        raise MemoryBoundError(
            f"a product rule of {q} nodes on {d} axes has {q}^{d} nodes, over {_NODES:,}: lower order= (to {fits}), or "
            "take a Monte-Carlo batch of inputs, pullback(model, measure.sample((n,)), metric)"
        )
    x = torch.stack(torch.meshgrid(*nodes, indexing="ij"), dim=-1).reshape(-1, d)
    w = torch.stack(torch.meshgrid(*weights, indexing="ij"), dim=-1).reshape(-1, d).prod(-1)
    return Quadrature(x.to(like), (w / w.sum()).to(like))
