"""What the Sobolev metric refuses: each by name, with what to do."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NonFiniteError
from tests.pulled import Rooted, normal

REFUSED: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "nu": (lambda: ng.Sobolev(nu=0.0), ValueError, r"nu=0.0 must be positive and finite"),
    "nu not a number": (lambda: ng.Sobolev(nu="3/2"), TypeError, r"smoothness is a real number"),  # type: ignore[arg-type]
    "lengthscale": (lambda: ng.Sobolev(lengthscale=-1.0), ValueError, r"lengthscale=-1 must be positive"),
    "jitter": (lambda: ng.Sobolev(jitter=-1e-6), ValueError, r"jitter=-1e-06 must be finite and not negative"),
    "jitter nan": (lambda: ng.Sobolev(jitter=float("nan")), ValueError, r"jitter=nan must be finite"),
    "jitter bool": (lambda: ng.Sobolev(jitter=True), TypeError, r"jitter=True: give a number"),
    "no metric": (lambda: ng.Sobolev(1.5), TypeError, r"base is a metric on the outputs"),  # type: ignore[arg-type]
    "twice": (lambda: ng.Sobolev(ng.Sobolev()), ValueError, r"would couple the examples twice"),
    "coupled base": (
        lambda: ng.Sobolev(ng.GradientCovariance(F.mse_loss)).coupling(normal(3, 2), 3),
        ValueError,
        r"GradientCovariance.* couples the examples itself",
    ),
    "sampled outside": (
        lambda: ng.pullback(nn.Linear(2, 1), torch.ones(3, 2), ng.Sampled(ng.Sobolev())),
        ValueError,
        r"independent samples would erase the coupling",
    ),
    "tokens": (
        lambda: ng.pullback(nn.Embedding(5, 2), torch.tensor([1, 3]), ng.Sobolev()),
        TypeError,
        r"the inputs are torch.int64, which are no points in R\^d.*Pass features=",
    ),
    "several inputs": (
        lambda: ng.pullback(nn.Bilinear(2, 2, 1), (torch.ones(3, 2), torch.ones(3, 2)), ng.Sobolev()),
        TypeError,
        r"the inputs are tuple, which are no points.*Pass features=",
    ),
    "features of tokens": (
        lambda: ng.Sobolev(features=lambda x: x).coupling(torch.tensor([1, 3]), 2),
        TypeError,
        r"features= returned torch.int64, which are no points",
    ),
    "points": (
        lambda: ng.Sobolev(features=lambda x: x[:2]).coupling(normal(3, 2), 3),
        ValueError,
        r"found 2 points in the inputs of 3 examples.*Pass features=",
    ),
    "not finite": (
        lambda: ng.Sobolev().coupling(torch.tensor([[0.0], [torch.nan]]), 2),
        NonFiniteError,
        r"the tensor of points of the Sobolev metric holds NaN",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_says_what_and_what_to_do(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error, match=message):
        make()


def test_samples_of_a_metric_that_shares_none_are_refused() -> None:
    with pytest.raises(ValueError, match=r"(?s)Rooted.* is sampled, an example at a time.*Sampled\(metric, samples\)"):
        ng.Sobolev(Rooted(normal(1, 3, 2))).root(normal(3, 2))
