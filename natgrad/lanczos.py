"""The spectrum of a metric or a Hessian that is too large to be formed, by the Lanczos process."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import final

import torch
from torch import Tensor

from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.linalg import eigh, eigvalsh, gauss_rule, is_number
from natgrad.model import check_slots
from natgrad.output.metric import fresh_generator
from natgrad.pullbacks.pullback import LoaderPullback, Pullback, memory_bound
from natgrad.show import as_html
from natgrad.structures.base import Operator
from natgrad.structures.implicit import Implicit, ImplicitOperator

_BAR = 40  # characters of the longest bar
_NOT_FINITE = "the Lanczos process met NaN or infinity in a product with the operator"


@final
@dataclass(frozen=True, repr=False)
class SpectralDensity:
    """How many eigenvalues of a metric or Hessian lie where; ``print`` it for a plot.

    Attributes:
        size: The number of eigenvalues of the operator.
        values: The eigenvalues [q k] that the q probes see.
        counts: How many each of them stands for [q k]; a row sums to the dimension of the space that was probed.
        exact: So many of the first columns are the same in all rows: eigenvalues whose eigenvectors are known, with the
            count 1.
        zeros: How many eigenvalues are known to be zero without a probe: G = RᵀR and RRᵀ have the same others.
        dtype: The precision of the products.
        exhausted: The process ended by itself, so that the values are eigenvalues, up to rounding, and each that the
            operator has is among them. The counts of those that are not exact are random nevertheless.

    Method:
        The Gauss rules of random probes, which see what is orthogonal to the exact eigenvectors. A probe sees how long
        it is in the space of an eigenvalue, and not the dimension of that.

        Where as many products as the space has dimensions were allowed, there are no probes: the values are all
        eigenvalues, in one row (q = 1), multiple ones several times. All are exact, and the standard errors are 0.

        Otherwise a trace has a standard error, which ``trace_of`` and ``repr`` tell. It is a larger share of the trace
        of a Hessian, whose positive and negative eigenvalues nearly cancel, than of that of a metric: take more probes.
    """

    size: int
    values: Tensor
    counts: Tensor
    exact: int
    zeros: int
    dtype: torch.dtype  # of the products
    exhausted: bool

    _repr_html_ = as_html

    def trace_of(self, f: Callable[[Tensor], Tensor]) -> tuple[float, float]:
        """Σ f(λ) over all eigenvalues, and its standard error over the probes (Ubaru, Chen and Saad 2017).

        The error is 0 where all eigenvalues are known, and elsewhere at least the rounding of the sum. It does not know
        of an f that changes much between neighbouring values, such as a step in the bulk: there, more steps help.
        """
        at_zero = float(f(self.values.new_zeros(1))[0]) if self.zeros else 0.0
        # Probes that ended early are padded by values without a count, at which f need not be finite
        sums = torch.where(self.counts > 0, self.counts * f(self.values), 0.0).sum(1) + self.zeros * at_zero
        if len(sums) == 1:
            return float(sums.mean()), 0.0
        mean = float(sums.mean())
        rounding = self.values.shape[1] * torch.finfo(self.dtype).eps * abs(mean)
        return mean, max(float(sums.std() / math.sqrt(len(sums))), rounding)

    @cached_property
    def largest(self) -> float:
        """The largest eigenvalue, from below; its error is that of the Lanczos process, which finds this one first."""
        return float(self.values[self.counts > 0].max())

    @property
    def smallest(self) -> float:
        """The smallest Ritz value: negative for a Hessian that is not positive."""
        return float(self.values[self.counts > 0].min())

    @property
    def rounding(self) -> float:
        """Eigenvalues that are not larger, in absolute value, are noise of the products."""
        size = self.values[self.counts > 0].abs().max()
        return self.probed * torch.finfo(self.dtype).eps * float(size)

    @property
    def probed(self) -> int:
        """The dimension of the space that was probed."""
        return self.size - self.zeros

    def count_above(self, cut: float) -> tuple[float, float]:
        """How many eigenvalues are larger than ``cut`` in absolute value, and the standard error."""
        return self.trace_of(lambda λ: (λ.abs() > cut).to(λ.dtype))

    def bounds_above(self, cut: float) -> tuple[float, float]:
        """Between which numbers the count of eigenvalues above ``cut`` lies, but for the error of the probes.

        A Gauss rule does not see where its weights lie between its nodes: the weight of the node on either side of the
        cut may be on the other one (inequalities of Chebyshev, Markov and Stieltjes). An exhausted process has no such
        doubt.
        """
        low = high = float((self.values[0, : self.exact] > cut).sum()) * len(self.values)
        for values, counts in zip(self.values[:, self.exact :], self.counts[:, self.exact :], strict=True):
            positive = counts > 0
            values, counts = values[positive], counts[positive]  # ascending
            first = int((values <= cut).sum())
            total = float(counts[first:].sum())
            low += total - (0.0 if self.exhausted else float(counts[first : first + 1].sum()))
            high += total + (0.0 if self.exhausted else float(counts[max(first - 1, 0) : first].sum()))
        return low / len(self.values), min(high / len(self.values), float(self.size))  # not more, by rounding

    def histogram(self, edges: Tensor) -> Tensor:
        """The number of eigenvalues in each of the intervals [e_i, e_i+1), for ascending ``edges`` [m + 1]."""
        inside = (self.values[:, None] >= edges[:-1, None]) & (self.values[:, None] < edges[1:, None])
        counts = (self.counts[:, None] * inside).sum(2).mean(0)
        return counts + self.zeros * ((edges[:-1] <= 0) & (edges[1:] > 0))

    def __str__(self) -> str:
        """A line for every decade, with the number of eigenvalues in it, on a logarithmic scale."""
        cut = self.rounding
        top = math.floor(math.log10(max(self.largest, -self.smallest, 1e-300)))
        bottom = max(math.floor(math.log10(max(cut, 1e-300))), top - 20)
        powers = 10.0 ** torch.arange(bottom, top + 2, dtype=torch.float64)
        edges = powers.clamp(min=cut)
        names = powers[:-1].flip(0).tolist()
        positive = zip(names, self.histogram(edges).flip(0).tolist(), strict=True)
        negative = zip(names, self.histogram(-edges.flip(0)).tolist(), strict=True)
        lines = _nonempty([(f"{p:8.0e}", count) for p, count in positive])
        lines.append(("       0", self.size - self.count_above(cut)[0]))
        lines += _nonempty([(f"{-p:8.0e}", count) for p, count in negative])[::-1]
        longest = math.log10(1 + max(count for _, count in lines))
        bars = [(name, count, "█" * round(_BAR * math.log10(1 + count) / longest)) for name, count in lines]
        return "\n".join(f"{name} │{bar} {count:,.1f}" for name, count, bar in bars)

    def __repr__(self) -> str:
        trace, error = self.trace_of(lambda λ: λ)
        ends = f"smallest={self.smallest:.4g}, largest={self.largest:.4g}"
        return f"SpectralDensity(size={self.size}, {ends}, trace={trace:.4g} ± {error:.2g})"


def _nonempty(lines: list[tuple[str, float]]) -> list[tuple[str, float]]:
    """The lines up to the last one that is not empty."""
    while lines and lines[-1][1] < 0.05:
        lines = lines[:-1]
    return lines


def spectral_density(
    G: Operator | Pullback | LoaderPullback,
    *,
    probes: int = 4,
    steps: int = 100,
    generator: torch.Generator | None = None,
    memory: int | None = None,
) -> SpectralDensity:
    """The distribution of the eigenvalues of a metric or a Hessian, from products with it.

    Args:
        G: An operator (``ng.hessian(…)``, or of any structure), or a pullback.
        probes: The number of random vectors, over which errors are estimated.
        steps: Products for each of them. In a space of at most this many dimensions all eigenvalues are computed.
        generator: Where random numbers come from; without one, from a new generator, and the global one is not used.
        memory: Bytes that the vectors may occupy; by default the bound of the pullback.

    Returns:
        A ``SpectralDensity``; ``print`` it for a plot.

    Method:
        Stochastic Lanczos quadrature (Golub and Welsch 1969; Ubaru, Chen and Saad 2017; for networks Ghorbani, Krishnan
        and Xiao 2019): every probe, a vector of signs, takes ``steps`` products, and all vectors of a process are kept
        and made orthogonal again.

        A process before them finds the eigenvectors at the ends of the spectrum, to which the probes are made
        orthogonal, as in Hutch++ (Meyer et al. 2021): the few large eigenvalues, which hold most of the trace of a
        network and would be counted as anything between zero and several by a probe, are counted once each.

        The bulk comes out as a density, with a standard error that falls as one over the root of the number of probes:
        ``repr`` shows that of the trace.

        Where the metric has a root with fewer rows N·K than there are parameters, the process runs on RRᵀ. Eigenvectors
        take what the vectors of a process leave, the largest eigenvalues first.

    Example:
        >>> import natgrad as ng
        >>> x = torch.eye(2, dtype=torch.float64).repeat(3, 1)
        >>> density = spectral_density(ng.pullback(torch.nn.Linear(2, 1, bias=False).double(), x, ng.Euclidean()))
        >>> round(density.largest, 9), density.count_above(0.1)[0]  # G = ½·1
        (0.5, 2.0)
    """
    if not isinstance(G, Pullback | LoaderPullback):
        check_slots(G=(G, Operator))
    if not (is_number(probes, whole=True) and is_number(steps, whole=True)):
        raise TypeError(f"probes and steps are whole numbers, got {probes!r} and {steps!r}")
    if memory is None:
        memory = memory_bound(None, G.device) if isinstance(G, Operator) else G.memory
    if isinstance(G, Pullback | LoaderPullback):
        G = Implicit().estimate(G)
    if probes < 2 or steps < 1:
        raise ValueError(f"spectral_density needs probes ≥ 2, for an error, and steps ≥ 1, got {probes} and {steps}")
    rooted = _rooted(G, memory)
    dimension, dtype = (rooted.root_columns if rooted else None) or G.layout.size, G.layout.dtype
    steps = min(steps, dimension)
    needed = steps * dimension * dtype.itemsize
    if needed > memory:
        raise MemoryBoundError(
            f"{steps} vectors of {dimension:,} numbers need {needed:,} bytes, over the bound memory={memory:,}: lower "
            "steps=, or raise memory="
        )
    product = G.product if rooted is None else lambda t: rooted.push_root(rooted.pull_root(t))
    device, rules, exhausted = G.device, [], True
    if steps == dimension:  # fewer products than those of two probes, which would not see multiplicities
        exact = _eigenvalues(product, dimension, dtype, device)
        rules.append((exact, torch.ones_like(exact)))
    else:
        generator = generator or fresh_generator(device)
        most = memory // (dimension * dtype.itemsize) - steps
        exact, V, size = _ends(product, _signs(dimension, dtype, device, generator), steps, most)
        for _ in range(probes):
            start = _outside(_signs(dimension, dtype, device, generator), V)
            while not float(start.abs().max()) > torch.finfo(dtype).eps ** 0.5:  # one of few dimensions may lie in V
                start = _outside(_signs(dimension, dtype, device, generator), V)
            diagonal, beside, ended = lanczos(lambda v: _outside(product(v), V), start, steps, size)
            values, weights = gauss_rule(diagonal.double().cpu(), beside[:-1].double().cpu())
            counts = (dimension - len(exact)) * weights
            rules.append((torch.cat([exact, values]), torch.cat([torch.ones_like(exact), counts])))
            exhausted &= ended
    return SpectralDensity(
        size=G.layout.size,
        values=torch.nn.utils.rnn.pad_sequence([values for values, _ in rules], batch_first=True),
        counts=torch.nn.utils.rnn.pad_sequence([counts for _, counts in rules], batch_first=True),
        exact=len(exact),
        zeros=G.layout.size - dimension,
        dtype=dtype,
        exhausted=exhausted,
    )


def _eigenvalues(
    product: Callable[[Tensor], Tensor], dimension: int, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """All eigenvalues of a symmetric operator, in ascending order, from its products with the unit vectors."""
    matrix = torch.stack([product(e) for e in torch.eye(dimension, dtype=dtype, device=device)])
    if not bool(matrix.isfinite().all()):
        raise NonFiniteError(_NOT_FINITE)
    matrix = matrix.double().cpu()
    return eigvalsh(0.5 * (matrix + matrix.T), "the operator")


def _signs(dimension: int, dtype: torch.dtype, device: torch.device, generator: torch.Generator) -> Tensor:
    return (2 * torch.randint(2, (dimension,), generator=generator, device=device) - 1).to(dtype)


def _outside(v: Tensor, V: Tensor) -> Tensor:
    """The part of v [d] that is orthogonal to the orthonormal rows of V [k d]; twice, against rounding."""
    for _ in range(2 if len(V) else 0):
        v = v - V.T @ (V @ v)
    return v


def _ends(product: Callable[[Tensor], Tensor], start: Tensor, steps: int, most: int) -> tuple[Tensor, Tensor, float]:
    """Eigenvalues [k] and orthonormal eigenvectors [k d] to which a process has converged, and ‖A‖, about.

    The residual ‖Ay − θy‖ of a Ritz vector is β_k times the last entry of its coordinates (Golub and Van Loan 2013,
    section 10.1.4). It is at most √ε·|θ| for the machine epsilon ε, so that the relative error of θ is nearer to ε.
    """
    basis = start.new_empty(steps, len(start))
    diagonal, beside, _ = lanczos(product, start, steps, basis=basis)
    k = len(diagonal)
    α, β = diagonal.double().cpu(), beside.double().cpu()
    values, vectors = eigh(torch.diag(α) + torch.diag(β[:-1], 1) + torch.diag(β[:-1], -1), "the Jacobi matrix")
    converged = (β[-1] * vectors[-1]).abs() <= torch.finfo(start.dtype).eps ** 0.5 * values.abs()
    largest = torch.where(converged, values.abs(), -1.0).argsort(descending=True)
    chosen = largest[: max(0, min(most, int(converged.sum())))].sort().values
    V = vectors[:, chosen].T.to(start) @ basis[:k]
    return values[chosen], V, float(values.abs().max())


def lanczos(
    product: Callable[[Tensor], Tensor], start: Tensor, steps: int, size: float = 0.0, basis: Tensor | None = None
) -> tuple[Tensor, Tensor, bool]:
    """The Jacobi matrix of a symmetric operator and a vector: its diagonal α [k], and β [k], k − 1 of them beside it.

    With the orthonormal vectors q of the process, A q_k = β_k q_k+1 + α_k q_k + β_k−1 q_k−1 (Lanczos 1950). Every new
    vector is made orthogonal to all earlier ones twice: without that, rounding finds eigenvalues again and again. The
    last value says whether the process ended before, or with, its last step: the vectors span an invariant space, and
    the last β is zero up to rounding. ``size``: of the numbers whose rounding counts, if it is more than ‖A‖. ``basis``
    [steps d] is where the vectors are written.

    >>> α, (*β, _), ended = lanczos(lambda v: torch.tensor([1.0, 2.0, 2.0]) * v, torch.ones(3), 3)
    >>> β = torch.tensor(β)
    >>> torch.linalg.eigvalsh(torch.diag(α) + torch.diag(β, 1) + torch.diag(β, -1)).round(decimals=5), ended
    (tensor([1., 2.]), True)
    """
    Q = start.new_empty(steps, start.numel()) if basis is None else basis
    q = start / torch.linalg.vector_norm(start)
    α: list[float] = []
    β: list[float] = []
    rounding = 8 * math.sqrt(start.numel()) * torch.finfo(start.dtype).eps
    for k in range(steps):
        Q[k] = q
        w = product(q)
        α.append(float(torch.dot(q, w)))
        size = max(size, abs(α[-1]), *β[-1:])
        for _ in range(2):
            w = w - Q[: k + 1].T @ (Q[: k + 1] @ w)
        β.append(float(torch.linalg.vector_norm(w)))
        if not math.isfinite(α[-1] + β[-1]):
            raise NonFiniteError(_NOT_FINITE)
        if β[-1] <= rounding * size:
            break
        q = w / β[-1]
    ended = len(α) == start.numel() or β[-1] <= rounding * size
    return start.new_tensor(α), start.new_tensor(β), ended


def residual(product: Callable[[Tensor], Tensor], ω: Tensor, steps: int) -> float:
    """The least ‖ω − Av‖/‖ω‖ over the v that so many products reach (Paige and Saunders 1975): 0 for ω in the range."""
    norm = float(torch.linalg.vector_norm(ω))
    if norm == 0:
        return 0.0
    diagonal, beside, ended = lanczos(product, ω, min(steps, len(ω)))
    α, β, k = diagonal.double().cpu(), beside.double().cpu(), len(diagonal)
    β = torch.where(torch.arange(k) == k - 1, 0.0, β) if ended else β
    T = torch.zeros(k + 1, k, dtype=torch.float64)
    T[:k] = torch.diag(α) + torch.diag(β[:-1], 1)
    T[1:] += torch.diag(β)
    unit = torch.zeros(k + 1, 1, dtype=torch.float64)
    unit[0] = 1.0
    return float(torch.linalg.vector_norm(unit - T @ (torch.linalg.pinv(T) @ unit)))


def _rooted(G: Operator, memory: int) -> ImplicitOperator | None:
    """G, where a root of it has fewer rows N·K than there are parameters, and the root itself is not too large."""
    if not isinstance(G, ImplicitOperator) or G.root_columns is None or G.root_columns >= G.layout.size:
        return None
    numbers = sum(pb.columns * pb.n * pb.y[0].numel() * pb.y.element_size() for _, pb, _ in G.terms)
    return G if numbers <= memory // 8 else None
