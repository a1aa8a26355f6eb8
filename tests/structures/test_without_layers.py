"""Kronecker structures of models in which no parameter has a layer rule."""

from typing import Any

import pytest

import natgrad as ng
from natgrad.operators import KroneckerOperator
from tests import zoo
from tests.pulled import close, normal, pull


@pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])
@pytest.mark.parametrize("fallback", [ng.Diagonal(), ng.BlockDense(), ng.Dense()])
def test_without_any_layer_the_metric_is_the_fallback(kind: Any, fallback: Any) -> None:
    pb = pull(zoo.opaque_parameters(), ng.Euclidean())
    structure, expected = kind(fallback=fallback), fallback.estimate(pb)
    G = structure.estimate(pb)
    assert not G.blocks
    close(G.dense(), expected.dense())
    close(G.diagonal(), expected.diagonal())
    close(G.logdet(0.1), expected.logdet(0.1))
    again = structure.restore(pb.model, pb.layers, G.tensors())
    v = normal(pb.model.size)
    close(again.with_new_basis().product(v), expected.product(v))
    close(G.lerp(again, 0.25).dense(), expected.dense())
    close(G.merged(structure.estimate(pb), 0.25).dense(), expected.dense())
    for inverse in (G.inverse(0.1), G.pseudo_inverse(0.1, None, None)):
        close(inverse.solve(v), expected.inverse(0.1).solve(v))
        restored = G.inverse_from(inverse.tensors())
        assert restored is not None
        close(restored.solve(v), expected.inverse(0.1).solve(v))
    if isinstance(G, KroneckerOperator):
        close(G.factored_inverse(0.1, {}).solve(v), expected.inverse(0.1).solve(v))
