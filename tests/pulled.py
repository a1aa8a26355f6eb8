"""Problems of the zoo as pullbacks, and the rows, covectors and comparisons that their theorems are about."""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

import natgrad as ng
from natgrad.pullbacks import ExampleGrads
from tests import oracle, zoo
from tests.zoo import opaque as opaque


def close(got: Tensor, expected: Tensor, tol: float = 1e-10) -> None:
    """Every entry agrees to `tol`, relative to the largest one (and to 1 where that is smaller)."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    torch.testing.assert_close(got, expected, rtol=0, atol=tol * scale)


def normal(*shape: int, seed: int = 0) -> Tensor:
    """Independent standard normal numbers in float64."""
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@final
@dataclass(frozen=True)
class Rooted(ng.OutputMetric):
    """A metric that is given by its root s[k n *out], whatever the outputs are: as a sampled one, it is drawn once."""

    s: Tensor

    @property
    def exact(self) -> bool:
        return False

    def flat(self, y: Tensor, u: Tensor, target: Any = None) -> Tensor:
        t = (self.s * u).reshape(*self.s.shape[:2], -1).sum(2)
        return (self.s * t.view(*t.shape, *[1] * (y.ndim - 1))).sum(0)

    def root(self, y: Tensor, target: Any = None, generator: torch.Generator | None = None) -> Tensor:
        return self.s

    def divergence(self, y: Tensor, y0: Tensor, target: Any = None) -> Tensor:
        raise AssertionError("nobody asks for it here")


def pull(problem: zoo.Problem, metric: ng.OutputMetric, target: Any = None, memory: int = 2**32) -> ng.Pullback:
    """The pullback of a metric on the outputs of a problem of the zoo."""
    return ng.pullback(
        problem.model,
        problem.x,
        metric,
        target,
        torch.Generator().manual_seed(0),
        params=problem.params,
        output=problem.output,
        memory=memory,
    )


def random_roots(problem: zoo.Problem, k: int = 3) -> Rooted:
    """A metric with k random columns."""
    return Rooted(normal(k, *problem.outputs().shape))


def without_rules(pb: ng.Pullback) -> ng.Pullback:
    """The same pullback with every parameter on the path of `torch.func`."""
    return replace(pb, layers=[layer.without_rule() for layer in pb.layers])


def rows(pb: ng.Pullback, factors: Iterable[ExampleGrads] | None = None) -> Tensor:
    """R[k n p] in flattening order, from the factors of all blocks."""
    kept = list(pb.collect() if factors is None else factors)
    out = torch.full((*kept[0].g.shape[:2], pb.model.size), torch.nan, dtype=torch.float64)
    for block, f in zip(pb.blocks, kept, strict=True):
        block.unpack(f.rows(), out)
    return out


def oracle_rows(problem: zoo.Problem, s: Tensor) -> Tensor:
    """R[k n p] = J_nᵀ s_kn/√N of the oracle."""
    J = problem.jacobian()
    return torch.einsum("ndp,knd->knp", J, s.reshape(*s.shape[:2], -1)) / len(J) ** 0.5


def covered(pb: ng.Pullback) -> set[str]:
    """The names of the parameters that a layer rule speaks for."""
    return {name for layer in pb.layers if layer.rule for name in layer.names}


def check_rows(problem: zoo.Problem, k: int = 3) -> ng.Pullback:
    """The pullback of k random columns: every parameter has a layer rule, and the rows are those of the oracle."""
    metric = random_roots(problem, k)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(problem, metric.s))
    return pb


def covector(pb: ng.Pullback, seed: int = 7) -> ng.Covector:
    """A random covector."""
    return ng.Covector(oracle.unflatten(normal(pb.model.size, seed=seed), pb.model.params))


# Structures that have powers, by name.
POWERED: dict[str, Any] = {
    "Diagonal": ng.Diagonal,
    "Dense": ng.Dense,
    "BlockDense": ng.BlockDense,
    "Kronecker": ng.Kronecker,
    "EigenKronecker": ng.EigenKronecker,
    "LowRank": lambda power=1.0: ng.LowRank(3, power=power),
    "Kernel": ng.Kernel,
}
