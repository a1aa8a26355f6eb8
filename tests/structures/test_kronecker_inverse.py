"""Exact damping through eigenvalues, where rounding has put some of them below zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import SingularMetricError
from natgrad.operators import KroneckerOperator
from natgrad.structures.layered import inverse_scales
from tests.pulled import close, covector, normal


def rounded(below: float) -> tuple[ng.Pullback, KroneckerOperator]:
    """A layer with S = diag(1, −below), as a factor of rank one may come out of its sum, and A = 1."""
    pb = ng.pullback(nn.Linear(3, 2, bias=False).double(), normal(8, 3), ng.Euclidean())
    G = ng.Kronecker().estimate(pb)
    S = torch.tensor([1.0, -below], dtype=torch.float64).diag()[None]
    return pb, replace(G, left=(S,), right=(torch.eye(3, dtype=torch.float64)[None],))


@pytest.mark.parametrize("damping", [1e-9, 1e-8, 2e-8, 1e-3])
def test_an_eigenvalue_that_rounding_has_put_below_zero_is_zero_and_leaves_the_damping(damping: float) -> None:
    """1/(−1e-8 + λ) would be negative, infinite or far too large: an ascent, or a step to nowhere."""
    pb, G = rounded(1e-8)
    ω = covector(pb)
    v = ng.Cholesky().init(G, damping).sharp(ω)
    w = ω["weight"]
    close(v["weight"], torch.stack([w[0] / (1 + damping), w[1] / damping]))


def test_damped_inverses_of_eigenvalues_are_never_larger_than_that_of_the_damping() -> None:
    values = torch.tensor([[[2.0, 1e-9, 0.0, -1e-9, -0.4, -3.0]]], dtype=torch.float64)
    expected: Tensor = torch.tensor([[[1 / 2.5, 1 / (0.5 + 1e-9), 2.0, 2.0, 2.0, 2.0]]], dtype=torch.float64)
    close(inverse_scales(values + 0.5, 1.0, 0.5, None), expected, 1e-14)


def test_without_damping_an_eigenvalue_below_zero_is_refused_and_not_made_zero() -> None:
    with pytest.raises(SingularMetricError, match=r"the factor S of weight is .*at damping 0"):
        ng.Cholesky().init(rounded(1e-8)[1], 0.0)
