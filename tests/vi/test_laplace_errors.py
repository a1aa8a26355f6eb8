"""What a Laplace approximation refuses."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad as ng

DOUBLE = torch.float64


def _posterior() -> tuple[ng.vi.Laplace, nn.Linear, Tensor]:
    model, x = nn.Linear(3, 2).double(), torch.ones(4, 3, dtype=DOUBLE)
    return ng.vi.Laplace(model, x, ng.Euclidean()), model, x


def _moved() -> None:
    posterior, model, x = _posterior()
    with torch.no_grad():
        model.bias.add_(1.0)
    posterior.predictive(x)


def _silent() -> None:
    model, x = nn.Linear(3, 2), torch.ones(4, 3)
    for p in model.parameters():
        nn.init.zeros_(p)
    ng.vi.Laplace(model, x, ng.Euclidean()).tuned()


def _of(**options: Any) -> Callable[[], ng.vi.Laplace]:
    def make() -> ng.vi.Laplace:
        given: dict[str, Any] = {"x": torch.ones(7, 3, dtype=DOUBLE), "metric": ng.Euclidean()}
        return ng.vi.Laplace(nn.Linear(3, 2).double(), **(given | options))

    return make


def _loader(*tensors: Tensor) -> DataLoader[Any]:
    return DataLoader(TensorDataset(*tensors), batch_size=2)


ONES = torch.ones(2, 3, dtype=DOUBLE)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (_of(prior_precision=0.0), ValueError, "prior_precision must be positive and finite, got 0.0"),
        (_of(prior_precision=math.nan), ValueError, "prior_precision must be positive and finite, got nan"),
        (lambda: _of()().with_prior(-1.0), ValueError, "prior_precision must be positive"),
        (lambda: _of()().sample(0), ValueError, r"needs a count ≥ 1, got 0"),
        (_of(metric=ng.Sobolev()), ng.errors.IncompatibleError, "it couples the examples, so it is not the Hessian"),
        (_of(structure=ng.Euclidean()), TypeError, "structure"),
        (_of(x=_loader(ONES), target=1), TypeError, "a loader brings its targets"),
        (_of(x=_loader(ONES, ONES, ONES)), TypeError, "a loader must give tensors x or pairs"),
        (_of(x=_loader(ONES[:0])), ValueError, "the loader has no batch"),
        (_moved, ng.errors.NatgradError, "the parameters bias have changed since the approximation was made"),
        (_silent, ng.errors.SingularMetricError, "the mode is zero: the evidence has no maximum"),
        (
            lambda: _of()().log_marginal_likelihood(torch.ones(3)),
            ValueError,
            r"must be one number, .* got shape \(3,\)",
        ),
        (
            lambda: _of(structure=ng.Implicit())().log_marginal_likelihood(0.0),
            ng.errors.IncompatibleError,
            "logdet does not work with ImplicitOperator: it has products only",
        ),
        (
            lambda: _of(structure=ng.Implicit())().with_solver(ng.CG(max_steps=1)).sample(1),
            ng.errors.SingularMetricError,
            "conjugate gradients did not reach tol=1e-06",
        ),
        (
            lambda: _of()().with_solver(ng.Pinv()).sample(1),
            ng.errors.IncompatibleError,
            "PseudoInverse has no root to draw Gaussian samples with: use Cholesky",
        ),
        (
            lambda: _of()().with_solver(ng.CG()).covariance(),
            ng.errors.IncompatibleError,
            "CGInverse has no root to draw Gaussian samples with",
        ),
    ],
)
def test_what_cannot_be_approximated_is_refused_with_the_reason(
    make: Callable[[], Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        make()
