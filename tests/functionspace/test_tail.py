"""The mean of numbers of which few hold the most: an error that is true where the standard error is not."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch import Tensor

from natgrad.functionspace.flatness import TailedMean
from tests.pulled import normal


def pareto(n: int, k: float, generator: torch.Generator) -> Tensor:
    """log X of n numbers with P(X > x) = x^{−1/k}, whose mean is 1/(1 − k)."""
    return -k * torch.rand(n, generator=generator, dtype=torch.float64).log()


def covered(k: float, n: int, *, standard: bool = False) -> tuple[float, float]:
    """How often the mean is within one and two errors, or standard errors, in 400 repetitions."""
    generator = torch.Generator().manual_seed(0)
    found = [TailedMean.of(pareto(n, k, generator)) for _ in range(400)]
    errors = torch.tensor([m.standard_error if standard else m.relative_error for m in found])
    off = torch.tensor([abs(m.log + math.log(1 - k)) for m in found])
    return float((off < errors).double().mean()), float((off < 2 * errors).double().mean())


@pytest.mark.parametrize("n", [256, 1024])
@pytest.mark.parametrize("k", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_error_is_true_whatever_the_tail(k: float, n: int) -> None:
    """The shares that it promises are 68 % and 95 %."""
    one, two = covered(k, n)
    assert 0.63 < one < 0.9
    assert two > 0.85


def test_the_standard_error_is_not() -> None:
    """It is where there is a variance, k < ½."""
    assert covered(0.3, 1024, standard=True)[1] > 0.92
    assert covered(0.7, 1024, standard=True)[1] < 0.8
    assert covered(0.9, 1024, standard=True)[1] < 0.4


def test_the_shares_that_the_docstring_quotes_are_these() -> None:
    found = [covered(k, 1024, standard=standard) for standard in (False, True) for k in (0.7, 0.9)]
    shares = [float(share) / 100 for share in re.findall(r"(\d+) %", TailedMean.__doc__ or "")]
    assert shares == pytest.approx([share for pair in found for share in pair], abs=0.02)


def test_light_tails_have_the_standard_error() -> None:
    """Of a uniform distribution to a few parts in a hundred, and of numbers that are equal exactly."""
    m = TailedMean.of((1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()).log())
    assert m.standard_error <= m.relative_error < 1.05 * m.standard_error
    assert not m.guessed
    assert TailedMean.of(torch.full((100,), 3.0)) == TailedMean(3.0, 0.0, 0.01, 0.0)


def test_numbers_without_a_mean_have_an_infinite_error() -> None:
    m = TailedMean.of(pareto(1000, 2.0, torch.Generator().manual_seed(0)))
    assert m.index > 1.5
    assert m.missed == m.relative_error == math.inf
    assert m.guessed


def test_a_scale_is_only_a_scale() -> None:
    """Also where the numbers underflow."""
    logs = normal(200)
    near, far = TailedMean.of(logs), TailedMean.of(logs - 5000)
    assert abs(near.log - far.log - 5000) < 1e-9
    assert abs(near.relative_error - far.relative_error) < 1e-9


def test_few_numbers_show_no_tail() -> None:
    """A variance is all that is assumed then, k = ½: the share of the largest may be missed."""
    m = TailedMean.of(normal(10))
    assert m.index == 0.5
    assert abs(m.missed - m.heaviest) < 1e-12


def test_zeros() -> None:
    nothing = torch.full((100,), -math.inf)
    assert TailedMean.of(nothing) == TailedMean(-math.inf, 0.0, 0.0, 0.0)
    nothing[3] = 0.0
    one = TailedMean.of(nothing)
    assert abs(one.log + math.log(100)) < 1e-6
    assert one.heaviest == 1.0
    assert one.relative_error == math.inf
