"""Powers M⁻ᵖ of many symmetric positive matrices, and polar factors, by matrix products only.

On a GPU products are much faster than eigenvalues. The iterations here are Newton and Schulz's for the matrix sign,
with the coefficients that are best for a given condition number (Amsel et al. 2025). Nothing waits for the device:
every root comes with its measured residual as a tensor, by which a caller tells whether it has failed. On a CPU, and
where eigenvalues are asked for, the powers come from an eigendecomposition.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from functools import lru_cache
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from natgrad.accelerate.devices import full_precision, is_asynchronous
from natgrad.errors import FactorisationError

Coefficients: TypeAlias = tuple[float, float, float]  # of σ ↦ aσ + bσ³ + cσ⁵
Precision: TypeAlias = Literal["single", "split"]
Method: TypeAlias = Literal["auto", "products", "eigenvalues"]

MUON: tuple[Coefficients, ...] = ((3.4445, -4.7750, 2.0315),) * 5  # Jordan et al. 2024
_SMALLEST = 1e-7  # norm that a matrix is divided by, as in torch.optim.Muon
_MOST = 2**22  # condition number that single precision can tell from a singular matrix
_DENOMINATOR = 64  # of a power; each factor of two is an iteration of its own
_SPLIT = 1024  # rows, from which three products in tf32 take less time than one in single precision
EIGENVECTORS = 9  # times d³ operations, for eigenvalues and eigenvectors (Golub and Van Loan 2013, section 8.3)
STACKS = 6  # of a batch that the iteration holds


# The coefficients.


@lru_cache(maxsize=256)
def minimax(condition: float, error: float = 1e-6) -> tuple[Coefficients, ...]:
    """Odd quintics whose composition takes every σ in [1/condition, 1] to 1 ± ``error``, in as few steps as possible.

    Each is the best approximation of 1 on the interval that the last one leaves, which is optimal for the composition
    too (Amsel et al. 2025). Near 1 they become Newton and Schulz's (15σ − 10σ³ + 3σ⁵)/8.

    >>> def compose(schedule, s):
    ...     for a, b, c in schedule:
    ...         s = a * s + b * s**3 + c * s**5
    ...     return s
    >>> schedule = minimax(1000.0)
    >>> len(schedule), all(abs(compose(schedule, s) - 1) < 1e-6 for s in (0.001, 0.01, 0.3, 1.0))
    (7, True)
    """
    if not 1 <= condition < math.inf or not 1e-12 <= error < 1:
        raise ValueError(f"minimax needs 1 ≤ condition < ∞ and 1e-12 ≤ error < 1, got {condition}, {error}")
    low, high = 1 / condition, 1.0
    schedule: list[Coefficients] = []
    while 1 - low > error or not schedule:
        if low > 0.9:  # the third power of the error is left, of values that rounding has raised above 1 too
            a, b, c, high = 15 / 8, -10 / 8, 3 / 8, 1.0
        else:
            a, b, c, deviation = _best_quintic(low, high)
            high = 1 + deviation
        schedule.append((a, b, c))
        low = min(a * low + b * low**3 + c * low**5, 1.0)
    return tuple(schedule)


def _best_quintic(low: float, high: float) -> tuple[float, float, float, float]:
    """(a, b, c, E) of the odd quintic that is within E of 1 on [low, high], with the smallest E (Remez's algorithm).

    Its error has alternating signs at low, at two extrema between, and at high.
    """
    inner = [(3 * low + high) / 4, (low + 3 * high) / 4]
    while True:
        points = (low, *inner, high)
        rows = [[x, x**3, x**5, sign] for x, sign in zip(points, (1.0, -1.0, 1.0, -1.0), strict=True)]
        system = torch.tensor(rows, dtype=torch.float64, device="cpu")
        a, b, c, deviation = torch.linalg.solve(system, torch.ones(4, dtype=torch.float64, device="cpu")).tolist()
        root = math.sqrt(9 * b * b - 20 * a * c)
        before, inner = inner, [math.sqrt((-3 * b - root) / (10 * c)), math.sqrt((-3 * b + root) / (10 * c))]
        if max(abs(x - y) for x, y in zip(before, inner, strict=True)) < 1e-9 * high:
            return a, b, c, deviation


# Products in a chosen precision.


@contextmanager
def products_in(precision: Precision, device: torch.device) -> Iterator[Callable[[Tensor, Tensor], Tensor]]:
    """A product of float32 stacks: as such, or by three products in tf32 (about 2⁻²¹).

    Whatever the user has set; it is set back. On a CPU single precision is single precision.
    """
    product = _split_product if precision == "split" else torch.bmm
    if not is_asynchronous(device):
        yield product
        return
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        settings.fp32_precision = "ieee" if precision == "single" else "tf32"
        yield product
    finally:
        settings.fp32_precision = before


def _split_product(A: Tensor, B: Tensor) -> Tensor:
    """A B as A₁B₁ + (A₁B₂ + A₂B₁), where A₁ holds the leading bits that tf32 keeps and A₂ the others."""
    if A.dtype != torch.float32:
        return torch.bmm(A, B)
    A1 = leading_bits(A)
    B1 = A1 if B is A else leading_bits(B)
    A2 = A - A1
    B2 = A2 if B is A else B - B1
    small = torch.bmm(A1, B2)
    small.baddbmm_(A2, B1)
    return small.baddbmm_(A1, B1)


def leading_bits(x: Tensor) -> Tensor:
    """The numbers with the ten bits of mantissa that tf32 has, rounded towards zero.

    >>> leading_bits(torch.tensor([1.0, 1 + 2**-10 + 2**-12])).tolist() == [1.0, 1 + 2**-10]
    True
    """
    return (x.contiguous().view(torch.int32) & -(2**13)).view(torch.float32)


# Powers.


@torch.no_grad()
def inverse_powers(
    A: Tensor,
    powers: Sequence[float | Fraction],
    *,
    shift: Tensor | None = None,
    condition: float = 1e6,
    precision: Precision = "single",
    method: Method = "auto",
) -> tuple[list[Tensor], Tensor]:
    """(A + λ)⁻ᵖ [b n n] for some p, of symmetric positive semidefinite A [b n n], and the residual [b] of the roots.

    λ is ``shift`` [b]. By products, p is k/2ᵐ. With M the damped matrix over a bound of its largest
    eigenvalue, Y₀ = M and Z₀ = 1,

        Y ← Y h(ZY), Z ← h(ZY) Z,  h(T) = a + bT + cT²,

    tends to Y = M^½ and Z = M^-½ (Higham 2008, chapter 6). The same again from Y gives the fourth roots, and so on;
    products of these are all other powers, so that M⁻¹ beside M^-½ is one more product. The order of the factors
    matters: symmetrising T makes the iteration unstable, and so does a start from the previous root, which does not
    commute with M. Therefore every root begins at 1, and ``minimax`` makes that short: 7 steps for a condition number
    of 10⁶.

    The residual is ‖1 − Z M Z‖_F/√n of Z = M^-½, measured in single precision, and the largest of all roots that the
    powers are made of. Rounding leaves at most about 10⁻⁷ times the condition number, ``precision`` "split" (three
    products in tf32 for one) a little more.

    ``condition``: the largest condition number that is expected. ``method`` "eigenvalues" allows any p in [0, 1];
    "auto" is products on a GPU for p = k/2ᵐ below double precision. Half precision becomes single. A matrix of zeros
    without a shift has no scale: its powers are 1.

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
        if by_eigenvalues(A, powers, method):
            unscaled, residual = _by_eigenvalues(M, [float(power) for power in powers], least)
        else:
            worst = max(1.0, min(condition, float(_MOST)))
            unscaled, residual = _by_products(M, [_dyadic(power) for power in powers], worst, precision)
    out = [X * scale.pow(-float(power))[:, None, None] for X, power in zip(unscaled, powers, strict=True)]
    for X in out:
        good = good & X.abs().amax((1, 2)).isfinite()
    return out, torch.where(good & residual.isfinite(), residual, math.inf)


def root_flops(n: int, powers: Sequence[float], device: torch.device, condition: float = 1e6) -> int:
    """Operations, in leading terms, of these inverse powers of one matrix [n n] in single precision on a device.

    >>> root_flops(10, [0.5], torch.device("cpu")), root_flops(10, [0.5], torch.device("cuda"))
    (11000, 54000)
    """
    like = torch.empty(0, device="meta") if is_asynchronous(device) else torch.empty(0, device="cpu")
    if by_eigenvalues(like, powers):
        return (EIGENVECTORS + 2 * len(powers)) * n**3
    return 2 * product_count([_dyadic(power) for power in powers], max(1.0, min(condition, float(_MOST)))) * n**3


def product_count(powers: Sequence[Fraction], condition: float) -> int:
    """How many products of two matrices ``inverse_powers`` makes."""
    depth = max([1, *(power.denominator.bit_length() - 1 for power in powers)])
    needed = [_roots_of(power, depth) for power in powers]
    roots = sorted({j for of_power in needed for j in of_power if j})
    count = 1  # the square, for a bound of the largest eigenvalue
    for j in range(1, max(roots, default=0) + 1):
        steps = len(minimax(condition ** (0.5**j)))
        count += (j > 1) + 4 * steps - 3 - (j == roots[-1])
    count += sum(len(of_power) - 1 for of_power in needed)
    return count + sum(j + 1 for j in roots)  # the residuals


def suited_precision(n: int) -> Precision:
    """The quickest that leaves about 10⁻⁷ times the condition number."""
    return "split" if n >= _SPLIT else "single"


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
            raise FactorisationError(
                f"the eigenvalues of a factor of size {matrices.shape[-1]} cannot be found, in double precision "
                "neither: raise the damping, lower the learning rate, or use a larger batch"
            ) from error
    return values.to(matrices.dtype), vectors.to(matrices.dtype)


def by_eigenvalues(A: Tensor, powers: Sequence[float | Fraction], method: Method = "auto") -> bool:
    """Whether these powers of such matrices come from eigenvalues, and not from products."""
    if method == "auto":
        return A.dtype == torch.float64 or not is_asynchronous(A.device) or not all(map(_is_dyadic, powers))
    return method == "eigenvalues"


def _is_dyadic(power: float | Fraction) -> bool:
    denominator = Fraction(power).denominator
    return denominator <= _DENOMINATOR and denominator & (denominator - 1) == 0


def _dyadic(power: float | Fraction) -> Fraction:
    """The power as k/2ᵐ.

    >>> _dyadic(0.75)
    Fraction(3, 4)
    """
    if not _is_dyadic(power):
        raise ValueError(
            f"products give powers k/2ᵐ with 2ᵐ ≤ {_DENOMINATOR}, got {power}: take the nearest, "
            'or method="eigenvalues"'
        )
    return Fraction(power)


def _damped(A: Tensor, shift: Tensor | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """M = (A + λ)/s with norm 1 [b n n], the scale s [b], λ/s [b], and whether A is finite [b].

    Matrices of zeros, or with NaN or infinity, become 1.
    """
    M = A.float() if A.dtype in (torch.float16, torch.bfloat16) else A
    largest = M.abs().amax((1, 2))
    largest = largest if shift is None else largest + shift
    good = largest.isfinite()
    usable = good & (largest > 0)
    largest = torch.where(usable, largest, 1.0)
    M = torch.where(usable[:, None, None], M / largest[:, None, None], 0.0)
    least = torch.zeros_like(largest) if shift is None else torch.where(usable, shift / largest, 0.0)
    M.diagonal(dim1=1, dim2=2).add_(torch.where(usable, least, 1.0).to(M.dtype).unsqueeze(1))
    norm = torch.linalg.matrix_norm(M)
    return M / norm[:, None, None], largest * norm, least / norm, good


def _by_eigenvalues(M: Tensor, powers: Sequence[float], least: Tensor) -> tuple[list[Tensor], Tensor]:
    """V w⁻ᵖ Vᵀ. Eigenvalues are at ``least`` [b] the damping, whatever rounding has made of them."""
    values, vectors = spectrum(M)
    values = torch.maximum(values, least.unsqueeze(1))
    root = (vectors * values.rsqrt().unsqueeze(1)) @ vectors.mT
    out = [(vectors * values.pow(-power).unsqueeze(1)) @ vectors.mT for power in powers]
    return out, _residual(M, root, torch.bmm)


def _by_products(
    M: Tensor, powers: Sequence[Fraction], condition: float, precision: Precision
) -> tuple[list[Tensor], Tensor]:
    """M⁻ᵖ of matrices with norm 1, and the largest residual of the roots M^-(1/2ʲ) that they are products of."""
    depth = max([1, *(power.denominator.bit_length() - 1 for power in powers)])
    needed = [_roots_of(power, depth) for power in powers]
    last = max([j for of_power in needed for j in of_power], default=0)
    error = 1e-12 if M.dtype == torch.float64 else 1e-6
    roots: dict[int, Tensor] = {}
    with products_in(precision, M.device) as product:
        square = product(M, M)
        # The fourth root of the sum of fourth powers: no smaller than the largest eigenvalue, and near it.
        bound = torch.linalg.matrix_norm(square).sqrt()[:, None, None]
        Y, square = M / bound, square / bound.square()
        for j in range(1, last + 1):
            square = square if j == 1 else product(Y, Y)
            # Y has eigenvalues from condition^-(1/2ʲ⁻¹) to 1, and the iteration sees their square roots.
            schedule = minimax(condition ** (0.5**j), error)
            Y, Z = _square_roots(Y, square, schedule, product, last=j == last)
            if any(j in of_power for of_power in needed):
                roots[j] = Z
        out = []
        for power, (first, *others) in zip(powers, needed, strict=True):
            X = roots[first] if first else torch.eye(M.shape[-1], dtype=M.dtype, device=M.device).expand_as(M)
            for j in others:
                X = product(X, roots[j])
            X = X * bound.pow(-float(power))
            out.append(0.5 * (X + X.mT))
    residuals = [M.new_zeros(len(M))]
    with products_in("single", M.device) as product:
        for j, Z in roots.items():
            for _ in range(j - 1):
                Z = product(Z, Z)
            residuals.append(_residual(M, Z * bound.rsqrt(), product))
    return out, torch.stack(residuals).amax(0)


def _roots_of(power: Fraction, depth: int) -> list[int]:
    """The j whose 1/2ʲ sum to the power: its digits in binary, and ½ + ½ for 1; [0] for the power 0.

    >>> _roots_of(Fraction(3, 4), 3), _roots_of(Fraction(1), 3)
    ([1, 2], [1, 1])
    """
    digits = int(power * 2**depth)
    return [1, 1] if power == 1 else [j for j in range(1, depth + 1) if digits >> (depth - j) & 1] or [0]


def _square_roots(
    Y: Tensor,
    square: Tensor,
    schedule: Sequence[Coefficients],
    product: Callable[[Tensor, Tensor], Tensor],
    *,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """Y^½ and Y^-½ for eigenvalues in (0, 1]; ``square`` is Y². ``last``: only Y^-½ is needed, Y is anything."""
    T, Z = Y, None
    for step, (a, b, c) in enumerate(schedule, 1):
        if Z is not None:
            T = product(Z, Y)
            square = product(T, T)
        H = square.mul(c).add_(T, alpha=b)
        H.diagonal(dim1=1, dim2=2).add_(a)
        if not last or step < len(schedule):
            Y = product(Y, H)
        Z = H if Z is None else product(H, Z)
    assert Z is not None
    return Y, Z


def _residual(M: Tensor, root: Tensor, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """‖1 − Z M Z‖_F/√n [b]."""
    E = product(product(root, M), root)
    E.diagonal(dim1=1, dim2=2).sub_(1.0)
    return torch.linalg.matrix_norm(E) / math.sqrt(M.shape[-1])


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
    stack = M.reshape(-1, *M.shape[-2:]).to(dtype)
    X = stack.mT if tall else stack
    with full_precision(M.device):
        X = X / torch.linalg.vector_norm(X, dim=(1, 2), keepdim=True).clamp(min=_SMALLEST)
        for a, b, c in schedule:
            G = torch.bmm(X, X.mT)
            X = torch.baddbmm(X, torch.baddbmm(G, G, G, beta=b, alpha=c), X, beta=a)
    return (X.mT if tall else X).reshape(M.shape)
