"""The prior precision with the largest evidence."""

from __future__ import annotations

import math
from collections.abc import Callable

from natgrad.errors import SingularMetricError

_GOLDEN = (math.sqrt(5) - 1) / 2


def most_evident(evidence: Callable[[float], float], square: float, trace: float, size: int) -> float:
    """argmax over δ of ½P log δ − ½ log det(Λ + δ) − ½δ‖θ‖², Λ = N·G (MacKay 1992, section 4).

    It is strictly concave in log δ, so the maximum is the only one. There δ‖θ‖² = γ = Σ_p λ_p/(λ_p + δ), the number
    of parameters that the data determine. From τ/(τ + δ) ≤ γ ≤ P with the mean eigenvalue τ, it lies between

        (2/‖θ‖²) / (1 + √(1 + 4/(τ‖θ‖²)))   and   P/‖θ‖²,

    and a golden-section search finds it. ``square`` is ‖θ‖², ``trace`` is tr Λ, ``size`` is P.

    >>> δ = most_evident(lambda δ: 0.5 * math.log(δ / (δ + 2.0)) - 0.5 * δ, square=1.0, trace=2.0, size=1)
    >>> round(δ * (δ + 2.0), 6)  # γ = 2/(2 + δ) is δ
    2.0
    """
    if not square > 0 or not trace > 0:
        what = "the mode is zero" if not square > 0 else "the metric is zero"
        raise SingularMetricError(
            f"{what}: the evidence has no maximum over the prior precision. Train the model first, or set "
            "prior_precision by hand"
        )
    low = 2 / square / (1 + math.sqrt(1 + 4 * size / (trace * square)))
    return math.exp(_golden(lambda t: evidence(math.exp(t)), math.log(low), math.log(size / square)))


def _golden(f: Callable[[float], float], a: float, b: float, tol: float = 1e-9) -> float:
    """The place of the maximum of a concave function between a and b."""
    c, d = b - _GOLDEN * (b - a), a + _GOLDEN * (b - a)
    at_c, at_d = f(c), f(d)
    while b - a > tol * (1 + abs(a)):
        if at_c >= at_d:
            b, d, at_d = d, c, at_c
            c = b - _GOLDEN * (b - a)
            at_c = f(c)
        else:
            a, c, at_c = c, d, at_d
            d = a + _GOLDEN * (b - a)
            at_d = f(d)
    return 0.5 * (a + b)
