"""Powers M⁻ᵖ of many symmetric positive matrices, and polar factors, by matrix products only.

On a GPU products are much faster than eigenvalues, and those of half precision the fastest. The iterations here are
Newton and Schulz's for the matrix sign, with the coefficients that are best for a given condition number (Amsel et al.
2025), in products that are split into halves (Ootomo and Yokota 2022). Nothing waits for the device: every root comes
with its measured residual as a tensor, by which a caller tells whether it has failed. On a CPU, and where eigenvalues
are asked for, the powers come from an eigendecomposition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision, is_asynchronous
from natgrad.errors import FactorisationError, NonFiniteError

Coefficients: TypeAlias = tuple[float, ...]  # of σ ↦ aσ + bσ³ + cσ⁵ + …
Operand: TypeAlias = tuple[Tensor, ...]  # a stack of matrices, or its two halves
Precision: TypeAlias = Literal["single", "split"]
Method: TypeAlias = Literal["auto", "products", "eigenvalues"]

MUON: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024
_SMALLEST = 1e-7  # norm that a matrix is divided by, as in torch.optim.Muon
_MOST = 2**22  # condition number that single precision can tell from a singular matrix
_SINGLE = range(2**12, 2**20)  # multiplications, for which a processor is quicker with halves in single precision
_SPLIT = 2**29  # multiplications, from which a split product takes less time than one in single precision
_TERMS = 5  # of the polynomials for roots: the odd ones of ninth degree take two products, those of fifth degree one
_UNIT = 2.0**11  # the largest eigenvalue: halves then have small numbers too, and 16 of it, the square of a T up to 4
_MARGIN = 1 + 2.0**-10  # of a bound, against rounding: the first polynomials are steep at 1, and would enlarge it
_PROBES = 32  # by which a residual is measured; it then has a relative deviation of at most 1/8
NOISE = 1e-3  # the error of a root of statistics, which are not as exact themselves
_LARGE = 256  # rows, from which copies of matrices take longer than launches
_WIDE = 2  # columns over rows, from which several steps of a polar factor at once take fewer operations
_TOGETHER = 3  # such steps: the error 2⁻⁹ of the smallest eigenvalues has grown to about 1/4 then
STACKS = 10  # of a batch that the iteration holds


# The coefficients.


@lru_cache(maxsize=256)
def minimax(condition: float, error: float = 1e-6, terms: int = 3) -> tuple[Coefficients, ...]:
    """Odd polynomials whose composition takes all σ in [1/condition, 1] to 1 ± ``error``, in as few steps as possible.

    Each is the best approximation of 1 on the interval that the last one leaves, which is optimal for the composition
    too (Amsel et al. 2025). The interval is wider by 10⁻³, from which rounding cannot lead: beyond it the composition
    grows by 10⁷ times the distance, as for σ = 1 of a matrix of rank one.

    Near 1 they become Newton and Schulz's, σ Σⱼ (2j choose j)(1 − σ²)ʲ/4ʲ.

    >>> def compose(schedule, s):
    ...     for a, b, c in schedule:
    ...         s = a * s + b * s**3 + c * s**5
    ...     return s
    >>> schedule = minimax(1000.0)
    >>> len(schedule), all(abs(compose(schedule, s) - 1) < 1e-6 for s in (0.001, 0.01, 0.3, 1.0))
    (7, True)
    >>> len(minimax(1000.0, terms=5))
    5
    """
    if not 1 <= condition < math.inf or not 1e-12 <= error < 1:
        raise ValueError(f"minimax needs 1 ≤ condition < ∞ and 1e-12 ≤ error < 1, got {condition}, {error}")
    low, high = 1 / condition, 1.0
    schedule: list[Coefficients] = []
    while 1 - low > error or not schedule:
        if low > 0.9:  # a power of the error is left, of values that rounding has raised above 1 too
            # Σⱼ dⱼ(σ² − 1)ʲ in powers of σ² is the same shift as to powers of σ² − 1, by minus one.
            coefficients = _shifted([math.comb(2 * j, j) / (-4) ** j for j in range(terms)], by=-1)
            high = 1.0
        else:
            coefficients, deviation = _best_odd(low, high * _MARGIN, terms)
            high = 1 + deviation
        schedule.append(coefficients)
        low = min(sum(c * low ** (2 * j + 1) for j, c in enumerate(coefficients)), 1.0)
    return tuple(schedule)


def _best_odd(low: float, high: float, terms: int) -> tuple[Coefficients, float]:
    """The odd polynomial that is nearest to 1 on [low, high], and how far it is from 1 (Remez's algorithm).

    Its error has alternating signs at low, at the extrema between, and at high: the extrema are the square roots of the
    roots of Σⱼ (2j + 1)cⱼtʲ, eigenvalues of a companion matrix.
    """
    middle, radius = (low + high) / 2, (high - low) / 2
    points = [middle - radius * math.cos(math.pi * j / terms) for j in range(terms + 1)]
    while True:
        rows = [[*(x ** (2 * j + 1) for j in range(terms)), (-1.0) ** i] for i, x in enumerate(points)]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        *coefficients, deviation = torch.linalg.solve(
            system, torch.ones(terms + 1, dtype=torch.float64, device="cpu")
        ).tolist()
        slope = torch.tensor([(2 * j + 1) * c for j, c in enumerate(coefficients)], dtype=torch.float64, device="cpu")
        companion = torch.diag(torch.ones(terms - 2, dtype=torch.float64, device="cpu"), -1)
        companion[:, -1] = -slope[:-1] / slope[-1]
        extrema = torch.linalg.eigvals(companion).real.sqrt().sort().values.tolist()
        before, points = points, [low, *extrema, high]
        if max(abs(x - y) for x, y in zip(before, points, strict=True)) < 1e-9 * high:
            return tuple(coefficients), deviation


@lru_cache(maxsize=256)
def _expansion(power: float, condition: float, error: float) -> tuple[tuple[int, ...], int, Coefficients]:
    """How x⁻ᵖ on [1/condition, 1] is made of roots: the j of its factors x^-(1/2ʲ), and m and a quartic q.

    With m as small as ``error`` allows, and k the whole number next to 2ᵐp, x⁻ᵖ is x^-(k/2ᵐ) q(x^-(1/2ᵐ)): q is that
    power, between −½ and ½, of a number above 1. The digits of k in binary are the factors. If 2ᵐp = k there is no q.

    >>> _expansion(0.75, 1e4, 1e-3), _expansion(1.0, 1e4, 1e-3), _expansion(0.0, 1e4, 1e-3)
    (((1, 2), 2, ()), ((1, 1), 1, ()), ((), 0, ()))
    >>> _expansion(0.7, 1e4, 1e-3)[:2]  # x^-¾ times a quartic of x^-⅛
    ((1, 2), 3)
    """
    if power == 0:
        return (), 0, ()
    m, off = 0, math.inf
    while m == 0 or off > error:
        m += 1
        k = round(power * 2**m)
        quartic, off = _quartic(power * 2**m - k, condition ** (0.5**m))
    factors = (1, 1) if k == 2**m else tuple(j for j in range(1, m + 1) if k >> (m - j) & 1)
    return factors, m, () if k == power * 2**m else quartic


def _quartic(exponent: float, high: float) -> tuple[Coefficients, float]:
    """The quartic in u that interpolates x^exponent at Chebyshev's points of [1, high] ∋ x, u ∈ [−1, 1]; its error."""
    middle, radius = (high + 1) / 2, (high - 1) / 2
    points = [math.cos(math.pi * (j + 0.5) / _TERMS) for j in range(_TERMS)]

    def values(points: Sequence[float]) -> Tensor:
        return torch.tensor([(middle + radius * u) ** exponent for u in points], dtype=torch.float64, device="cpu")

    def powers(points: Sequence[float]) -> Tensor:
        return torch.tensor([[u**j for j in range(_TERMS)] for u in points], dtype=torch.float64, device="cpu")

    solution = torch.linalg.solve(powers(points), values(points))
    between = [j / 32 - 1 for j in range(65)]
    off = float((powers(between) @ solution / values(between) - 1).abs().max())
    return tuple(solution.tolist()), off


def _shifted(coefficients: Sequence[float], by: float) -> Coefficients:
    """The coefficients in powers of t − ``by`` of Σⱼ cⱼtʲ.

    >>> _shifted([0.0, 0.0, 1.0], by=1)
    (1.0, 2.0, 1.0)
    """
    degree = range(len(coefficients))
    return tuple(sum(coefficients[i] * math.comb(i, j) * by ** (i - j) for i in degree[j:]) for j in degree)


# Products in a chosen precision.


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[Products]:
    """Products of float32 stacks in single precision, whatever the user has set, which is set back.

    "split": those of ``Products`` are made of halves, and all others are in tf32. On a CPU single precision is single
    precision.
    """
    products = Products(precision == "split")
    if not is_asynchronous(device):
        yield products
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "ieee" if precision == "single" else "tf32"
        yield products
    finally:
        settings.fp32_precision = before


@final
@dataclass(frozen=True)
class Products:
    """A B [b n n]: as such, or A₁B₂ + A₂B₁ + A₁B₁, with A₁ the nearest to A in half precision and A₂ that to A − A₁.

    Products of halves are exact and are summed in single precision: about 2⁻²¹ is left (Ootomo and Yokota 2022), and
    what tensor cores cut off in the sums. The largest numbers of A should be between 1 and 10⁴.

    >>> Products(split=True)(torch.full((1, 1, 1), 1.0001), torch.full((1, 1, 1), 3.0))
    tensor([[[3.0003]]])
    """

    split: bool

    def operand(self, A: Tensor) -> Operand:
        """What products with A are made of; those with several share it."""
        if not self.split or A.dtype != torch.float32:
            return (A,)
        first = A.half()
        return first, torch.sub(A, first, out=torch.empty_like(first))

    def __call__(self, A: Tensor | Operand, B: Tensor | Operand, *, alpha: float = 1.0) -> Tensor:
        """α A B."""
        left, right = (X if isinstance(X, tuple) else self.operand(X) for X in (A, B))
        like = left[0]
        out = like.new_empty(*like.shape[:2], right[0].shape[2], dtype=torch.float32 if len(left) == 2 else like.dtype)
        return self.add_(out, left, right, beta=0.0, alpha=alpha)

    def add_(self, out: Tensor, A: Operand, B: Operand, *, beta: float = 1.0, alpha: float = 1.0) -> Tensor:
        """β out + α A B, in the memory of ``out``."""
        if len(A) == 1:
            return out.baddbmm_(A[0], B[0], beta=beta, alpha=alpha)
        for left, right, β in ((A[0], B[1], beta), (A[1], B[0], 1.0), (A[0], B[0], 1.0)):
            if out.device.type == "cuda":
                torch.baddbmm(out, left, right, out_dtype=out.dtype, beta=β, alpha=alpha, out=out)
            else:
                out.baddbmm_(left.float(), right.float(), beta=β, alpha=alpha)
        return out


# Powers.


@torch.no_grad()
def inverse_powers(
    A: Tensor,
    powers: Sequence[float],
    *,
    shift: Tensor | None = None,
    condition: float = 1e6,
    error: float | None = None,
    precision: Precision = "single",
    method: Method = "auto",
) -> tuple[list[Tensor], Tensor]:
    """(A + λ)⁻ᵖ [b n n] for some p, of symmetric positive semidefinite A [b n n], and the residual [b] of the roots.

    λ is ``shift`` [b], and p is between 0 and 1. With M the damped matrix over a bound of its largest eigenvalue,
    Y₀ = M and Z₀ = 1,

        Y ← Y h(ZY), Z ← h(ZY) Z,  h(T) = c₀ + c₁T + (c₂ + c₃T + c₄T²)T²,

    tends to Y = M^½ and Z = M^-½ (Higham 2008, chapter 6). The same again from Y gives the fourth roots, and so on;
    products of these are the powers k/2ᵐ, so that M⁻¹ beside M^-½ is one more product. Any other power is one of these
    times a quartic of M^-(1/2ᵐ). The order of the factors matters: symmetrising T makes the iteration unstable.

    Every root begins at 1, and ``minimax`` makes that short: 4 steps for a condition number of 10⁵. From the last root,
    L^-½ of another matrix L, it would take fewer steps, but to a root of M⁻¹ that is not symmetric. Its symmetric part
    has (r + 1/r + 2)/4 times the change that M^-½ has between eigenvectors of L with the eigenvalues l and r²l: above
    twice of it from r² = 34 on, so that errors grow from root to root.

    The last step sees a T near 1, in which E = T − 1 is rounded and not T: its polynomial may be in tf32. Z may not,
    which is large where M is small: rounding it there would change it where M is large.

    The residual is ‖1 − Z M Z‖_F/√n of Z = M^-½, and the largest of all roots that the powers are made of, measured in
    single precision by products with a few signs (Hutchinson 1990); the error of a quartic is not in it. Rounding
    leaves at most about 10⁻⁷ times the condition number; ``precision`` "split" 10⁻³ besides, in the last step.

    ``condition``: the largest condition number that is expected. ``error``: of M^½ M^-½, before rounding; about that of
    the precision if it is None, and so is that of a power beside its roots. ``method`` "auto" is products on a GPU,
    below double precision. Half precision becomes single. A matrix of zeros without a shift has no scale: its powers
    are 1.

    >>> A = torch.diag_embed(torch.tensor([[3.0, 0.0]]))
    >>> (root, inverse), _ = inverse_powers(A, [0.5, 1], shift=torch.ones(1), method="products")
    >>> root.diagonal(dim1=1, dim2=2), inverse.diagonal(dim1=1, dim2=2)
    (tensor([[0.5000, 1.0000]]), tensor([[0.2500, 1.0000]]))
    """
    for power in powers:
        if not 0 <= power <= 1:
            raise ValueError(f"a power of a metric is between 0 and 1, got {power}: 1 is the inverse, 0 the identity")
    if A.ndim != 3 or A.shape[-1] != A.shape[-2]:
        raise ValueError(f"roots are of a stack of square matrices [b n n], got {list(A.shape)}")
    with full_precision(A.device):
        M, scale, least, good = _damped(A, shift)
        if by_eigenvalues(A, method):
            unscaled, residual = _by_eigenvalues(M, powers, least, good)
        else:
            worst = _scaled_condition(condition, A.shape[-1])
            error = error or (1e-12 if M.dtype == torch.float64 else 1e-6)
            unscaled, residual = _by_products(M, powers, worst, error, precision)
    out = [X.mul_(scale.pow(-power)[:, None, None]) for X, power in zip(unscaled, powers, strict=True)]
    for X in out:
        good = good & (torch.linalg.vector_norm(X, math.inf, dim=(1, 2)) < math.inf)
    return out, torch.where(good & (residual < math.inf), residual, math.inf)


def _scaled_condition(condition: float, n: int) -> float:
    """The bound that a matrix is divided by, over its smallest eigenvalue, at most.

    The bound is (Σλ⁴)^¼. With one large eigenvalue that is the condition number, with n equal ones n^¼.

    >>> f"{_scaled_condition(1.0, 15):.3g}, {_scaled_condition(1e4, 15):.3g}"
    '2, 1e+04'
    """
    return min(_MARGIN * (max(1.0, condition) ** 4 + n) ** 0.25, float(_MOST))


def suited_precision(matrices: Tensor) -> Precision:
    """The quickest for roots of these matrices [b n n] on a GPU, if 10⁻³ of a root is noise."""
    return "split" if matrices.numel() * matrices.shape[-1] >= _SPLIT else "single"


def spectrum(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Ascending eigenvalues [b d] and eigenvectors [b d d] of symmetric matrices [b d d].

    The routines for GPUs sometimes fail to converge, and that for processors may return NaN for small numbers of low
    rank: they are then repeated in double precision.
    """
    if matrices.shape[-1] == 1:  # a normalisation has one number for every channel
        return matrices.squeeze(-1), torch.ones_like(matrices)
    symmetric = 0.5 * (matrices + matrices.mT)
    try:
        values, vectors = torch.linalg.eigh(symmetric)
        converged = is_asynchronous(vectors.device) or bool(vectors.isfinite().all())
    except RuntimeError:
        converged = False
    if not converged:
        try:
            values, vectors = torch.linalg.eigh(symmetric.double())
        except RuntimeError as error:
            if not bool(symmetric.isfinite().all()):
                raise NonFiniteError(
                    f"a factor of size {matrices.shape[-1]} holds NaN or infinity: clean the batch, or lower the "
                    "learning rate"
                ) from error
            raise FactorisationError(
                f"the eigenvalues of a factor of size {matrices.shape[-1]} cannot be found, in double precision "
                "neither: raise the damping, lower the learning rate, or use a larger batch"
            ) from error
    return values.to(matrices.dtype), vectors.to(matrices.dtype)


def by_eigenvalues(A: Tensor, method: Method = "auto") -> bool:
    """Whether powers of such matrices come from eigenvalues, and not from products."""
    if method == "auto":
        return A.dtype == torch.float64 or not is_asynchronous(A.device)
    return method == "eigenvalues"


def _damped(A: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M = (A + λ)/s [b n n] of entries that are at most 1, the scale s [b], λ/s [b], and whether A is finite [b].

    Matrices of zeros become 1.
    """
    M = A.float() if A.dtype in (torch.float16, torch.bfloat16) else A
    scale = torch.linalg.vector_norm(M, math.inf, dim=(1, 2))
    scale = scale if shift is None else scale + shift
    zero = (scale == 0).to(scale.dtype)
    scale = scale + zero
    least = (zero if shift is None else zero + shift) / scale
    M = M / scale[:, None, None]
    M.diagonal(dim1=1, dim2=2).add_(least.to(M.dtype).unsqueeze(1))
    return M, scale, least, scale < math.inf


def _by_eigenvalues(M: Tensor, powers: Sequence[float], least: Tensor, good: Tensor) -> tuple[list[Tensor], Tensor]:
    """V w⁻ᵖ Vᵀ. Eigenvalues are at ``least`` [b] the damping, whatever rounding has made of them."""
    M = torch.where(good[:, None, None], M, 0.0)  # of NaN there are no eigenvalues
    values, vectors = spectrum(M)
    values = torch.maximum(values, least.unsqueeze(1))
    root = (vectors * values.rsqrt().unsqueeze(1)) @ vectors.mT
    out = [(vectors * values.pow(-power).unsqueeze(1)) @ vectors.mT for power in powers]
    return out, residual_of([root, M, root])


def _by_products(
    M: Tensor, powers: Sequence[float], condition: float, error: float, precision: Precision
) -> tuple[list[Tensor], Tensor]:
    """M⁻ᵖ of matrices of numbers up to 1, and the largest residual of the roots M^-(1/2ʲ) that they are products of.

    M is overwritten. M, Y, T and squares are held ``_UNIT`` times as large as they are.
    """
    expansions = [_expansion(power, condition, error) for power in powers]
    needed = {j for factors, m, quartic in expansions for j in (*factors, *([m] if quartic else ()))}
    last = max(needed, default=0)
    roots: dict[int, Tensor] = {}
    with products_in(precision, M.device) as product:
        square = _squared(M.mul_(_UNIT), product)
        # The fourth root of the sum of fourth powers: above the largest eigenvalue, and near it.
        bound = _MARGIN * (torch.linalg.matrix_norm(square) / _UNIT).sqrt()[:, None, None]
        Y, square = M.div_(bound), square.div_(bound.square())
        for j in range(1, last + 1):
            square = square if j == 1 else _squared(Y, product)
            # Y has eigenvalues from condition^-(1/2ʲ⁻¹) to 1, and the iteration sees their square roots.
            schedule = minimax(condition ** (0.5**j), error, _TERMS)
            Y, Z = _square_roots(Y, square, schedule, product, last=j == last)
            if j in needed:
                roots[j] = Z
        out = []
        for power, (factors, m, quartic) in zip(powers, expansions, strict=True):
            matrices = [roots[j] for j in factors]
            if quartic:
                matrices.append(_evaluated(quartic, roots[m], condition ** (0.5**m), product))
            X = matrices[0] if matrices else torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
            for other in matrices[1:]:
                X = product(X, other)
            out.append(torch.add(X, X.mT).mul_(0.5 * bound.pow(-power)))
    halves = [[Z] * 2 ** (j - 1) for j, Z in roots.items()]  # factors of M^-½
    residuals = [residual_of([*half, M, *half], _UNIT) for half in halves] or [M.new_zeros(len(M))]
    return out, residuals[0] if len(residuals) == 1 else torch.stack(residuals).amax(0)


def _evaluated(quartic: Coefficients, Z: Tensor, high: float, product: Products) -> Tensor:
    """c₀ + c₁E + (c₂ + c₃E + c₄E²)E² with E = (2Z − high − 1)/(high − 1), which is between −1 and 1."""
    c0, c1, c2, c3, c4 = quartic
    E = Z * (2 / (high - 1))
    E.diagonal(dim1=1, dim2=2).sub_((high + 1) / (high - 1))
    operand = product.operand(E)
    square = product(operand, operand)
    G = torch.mul(square, c4).add_(E, alpha=c3)
    G.diagonal(dim1=1, dim2=2).add_(c2)
    H = product.add_(E, product.operand(G), product.operand(square), beta=c1)
    H.diagonal(dim1=1, dim2=2).add_(c0)
    return H


def _squared(T: Tensor, product: Products) -> Tensor:
    operand = product.operand(T)
    return product(operand, operand, alpha=1 / _UNIT)


def _square_roots(
    Y: Tensor, square: Tensor, schedule: Sequence[Coefficients], product: Products, *, last: bool
) -> tuple[Tensor, Tensor]:
    """Y^½ and Y^-½ for eigenvalues in (0, 1]; ``square`` is Y². ``last``: only Y^-½ is needed, Y is anything."""
    first, *others = schedule
    Z = _polynomial(Y.clone(), square, first, product)
    z = product.operand(Z)
    Y = Y if last and not others else product(product.operand(Y), z)
    for step, coefficients in enumerate(others, 1):
        y = product.operand(Y)
        if step == len(others):
            c, G = _near_one(product(z, y, alpha=1 / _UNIT), coefficients)
            g = product.operand(G)
            return Y if last else product.add_(Y.clone(), y, g, beta=c), product.add_(Z.clone(), g, z, beta=c)
        T = product(z, y)
        h = product.operand(_polynomial(T, _squared(T, product), coefficients, product))
        Y, Z = product(y, h), product(h, z)
        z = product.operand(Z)
    return Y, Z


def _polynomial(T: Tensor, square: Tensor, coefficients: Coefficients, product: Products) -> Tensor:
    """c₀ + c₁T + (c₂ + c₃T + c₄T²)T², in the memory of T."""
    c0, c1, c2, c3, c4 = coefficients
    G = torch.add(T, square, alpha=c4 / c3)
    G.diagonal(dim1=1, dim2=2).add_(_UNIT * c2 / c3)
    H = product.add_(T, product.operand(G), product.operand(square), beta=c1 / _UNIT, alpha=c3 / _UNIT**2)
    H.diagonal(dim1=1, dim2=2).add_(c0)
    return H


def _near_one(T: Tensor, coefficients: Coefficients) -> tuple[float, Tensor]:
    """d₀ and d₁E + (d₂ + d₃E + d₄E²)E², whose sum is the same polynomial of T = 1 + E, in the memory of T."""
    d0, d1, d2, d3, d4 = _shifted(coefficients, by=1)
    T.diagonal(dim1=1, dim2=2).sub_(1.0)
    square = torch.bmm(T, T)
    G = torch.mul(square, d4).add_(T, alpha=d3)
    G.diagonal(dim1=1, dim2=2).add_(d2)
    return d0, T.baddbmm_(G, square, beta=d1)


def residual_of(factors: Sequence[Tensor], unit: float = 1.0) -> Tensor:
    """‖1 − ABC…/u‖_F/√n [b] in single precision, for factors [b n n]: exact for small n, else by products with signs.

    >>> residual_of([torch.eye(40)[None], 1.1 * torch.eye(40)[None]])
    tensor([0.1000])
    """
    like = factors[0]
    n, probes = like.shape[-1], min(like.shape[-1], _PROBES)
    exact = n == probes
    few = torch.eye(n, dtype=like.dtype, device=like.device) if exact else _signs(n, like.dtype, like.device, probes)
    X = few = few.expand(len(like), -1, -1)
    with products_in("single", like.device) as product:
        for factor in reversed(factors):
            X = product(factor, X)
    return torch.linalg.matrix_norm(X.sub_(few, alpha=unit)) / (unit * math.sqrt(n if exact else n * probes))


@cache  # for ever: captured kernels read them
def _signs(n: int, dtype: torch.dtype, device: torch.device, columns: int) -> Tensor:
    """Random signs [n k], always the same ones."""
    drawn = torch.randint(2, (n, columns), generator=torch.Generator().manual_seed(n), device="cpu")
    return (2 * drawn - 1).to(device, dtype)


# Polar factors.


def polar(M: Tensor, *, schedule: Sequence[Coefficients] = MUON, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """The orthogonal factor U Vᵀ of M = U Σ Vᵀ, [… o i], about: every singular value goes through the quintics.

    X ← (a + bG + cG²)X with G = XXᵀ, from X = M/‖M‖_F, on the shorter side. The default is what ``torch.optim.Muon``
    does: singular values end between 0.7 and 1.2, in bfloat16. ``polar(M, schedule=minimax(1e4), dtype=torch.float32)``
    has converged for all that are at least 10⁻⁴‖M‖_F. Singular values that are zero stay zero.

    >>> M = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.5, 0.0]])
    >>> polar(M, schedule=minimax(100.0), dtype=torch.float32)
    tensor([[1., 0., 0.],
            [0., 1., 0.]])
    """
    if M.ndim < 2:
        raise ValueError(f"only matrices have polar factors, got a tensor of shape {list(M.shape)}")
    tall = M.shape[-2] > M.shape[-1]
    stack = M.reshape(-1, *M.shape[-2:])
    with full_precision(M.device):
        X = polar_of_wide(stack.mT if tall else stack, schedule=schedule, dtype=dtype)
    return (X.mT if tall else X).reshape(M.shape)


def polar_of_wide(M: Tensor, *, schedule: Sequence[Coefficients] = MUON, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """``polar`` of wide matrices [b o i], where autocast is off."""
    X = M.to(dtype)
    X = X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp(min=_SMALLEST)
    if dtype == torch.bfloat16 and X.shape[1] >= _LARGE:
        together = _TOGETHER if X.shape[2] >= _WIDE * X.shape[1] else 1
        for start in range(0, len(schedule), together):
            X = _several(X, schedule[start : start + together])
    elif dtype == torch.bfloat16 and X.numel() * X.shape[1] in _SINGLE and not is_asynchronous(X.device):
        x, X, g = X, X.float(), X.new_empty(*X.shape[:2], X.shape[1])  # in single precision, and rounded in x and g
        for a, b, c in schedule:
            (G := torch.bmm(X, X.mT)).copy_(g.copy_(G))
            (P := torch.baddbmm(G, G, G, beta=b, alpha=c)).copy_(g.copy_(P))
            (X := torch.baddbmm(X, P, X, beta=a)).copy_(x.copy_(X))
    else:
        for a, b, c in schedule:  # of the fifth degree
            G = torch.bmm(X, X.mT)
            X = torch.baddbmm(X, torch.baddbmm(G, G, G, beta=b, alpha=c), X, beta=a)
    return X.to(dtype)


def _several(X: Tensor, schedule: Sequence[Coefficients]) -> Tensor:
    """X ← PX with P = a + bG + cG² and G = XXᵀ, step by step, for large X: with few copies, and few products with X.

    P is c(G + s)² + d, whose product needs no other matrix. Of several steps, PGP is the next G, and X is multiplied by
    the product Q of all P at the end: the others are products of small matrices [b o o]. Errors in the small
    eigenvalues of G grow by a² ≈ 12 a step, so that the next call computes G from X again.
    """
    G, Q = torch.bmm(X, X.mT), X.new_empty(0)
    for step, (a, b, c) in enumerate(schedule, 1):
        s, last = b / (2 * c), step == len(schedule)
        H = G if last else G.clone()
        H.diagonal(dim1=1, dim2=2).add_(s)
        P = torch.baddbmm(H, H, H, beta=0.0, alpha=c)
        P.diagonal(dim1=1, dim2=2).add_(a - c * s**2)
        Q = P if step == 1 else torch.bmm(P, Q)
        G = G if last else torch.bmm(P, torch.bmm(G, P))
    return torch.bmm(Q, X)
