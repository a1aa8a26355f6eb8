"""A weight that is an embedding and a linear head: exact rows, and one Kronecker product for both uses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.output.metric import Coupling
from natgrad.structures import Structure
from tests import oracle
from tests.pulled import check_rows, close, covered, normal, oracle_rows, pull, random_roots, rows
from tests.tied_models import MODELS, NAME, D, K, Language, N, T, V, block, both, join, problem_of, words_of
from tests.zoo import Case, Problem

every_model = pytest.mark.parametrize("name", MODELS)
STRUCTURES: list[Structure] = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()]


# Rows


@every_model
def test_rows_of_a_tied_weight_are_the_gradients_of_the_examples(name: str) -> None:
    problem = problem_of(MODELS[name])
    pb = check_rows(problem, K)
    assert len(pb.layers[0].facets) == 2


@pytest.mark.parametrize("memory", [2**32, 12_000])
@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
def test_exact_structures_are_exact_whatever_the_memory(structure: Structure, memory: int) -> None:
    problem = problem_of(Language)
    metric = random_roots(problem, K)
    R = oracle_rows(problem, metric.s).flatten(0, 1)
    G = R.T @ R
    expected = {
        ng.Dense: G,
        ng.Kernel: G,
        ng.Diagonal: G.diagonal().diag(),
        ng.BlockDense: oracle.block_diagonal(G, [list(b) for b in _spans(problem)]),
    }[type(structure)]
    pb = pull(problem, metric, memory=memory)
    close(structure.estimate(replace(pb, memory=2**32)).dense(), expected)
    limited = pull(problem, metric, memory=memory)
    close(limited.square(), G.diagonal())


def _spans(problem: Problem) -> list[range]:
    """Positions in θ of the words, of the table of positions, and of the body with its bias."""
    sizes = [V * D, T * D, D * D + D]
    return [range(sum(sizes[:at]), sum(sizes[: at + 1])) for at in range(3)]


def test_rows_of_a_tied_weight_come_some_examples_at_a_time() -> None:
    """No more numbers than the bound allows, from one forward pass: of a random model there is no second one."""
    problem = problem_of(Language, n=8)
    metric = random_roots(problem, K)
    pb = pull(problem, metric, memory=8 * 8 * (2 * V * D))
    chunks = list(pb.factors())
    assert {f.g.shape[:2] for factors in chunks for f in factors} == {(1, 2)}
    assert len(chunks) == 4 * K
    close(pb.square(), pull(problem, metric).square())


# The product


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", ["gpt", "bias", "square"])
def test_the_product_has_the_partial_traces_of_the_sum(name: str, sharing: Any) -> None:
    problem = problem_of(MODELS[name])
    metric = random_roots(problem, K)
    G = ng.Kronecker(sharing, strict=True).estimate(pull(problem, metric))
    assert G.fallback is None
    pairs = both(problem, metric.s, sharing)
    close(block(G), join(pairs))
    close(block(G).trace(), sum((s.trace() * a.trace() for s, a in pairs), start=torch.zeros((), dtype=torch.float64)))
    whole = sum((torch.kron(s, a) for s, a in pairs), start=torch.zeros((), dtype=torch.float64))
    words = words_of(problem.module)
    four, expected = (t.view(words, D, words, D) for t in (block(G), whole))
    close(torch.einsum("oipi->op", four), torch.einsum("oipi->op", expected))
    close(torch.einsum("oioj->ij", four), torch.einsum("oioj->ij", expected))


def test_of_a_large_vocabulary_the_diagonal_is_kept_on_its_side_only() -> None:
    problem = problem_of(Language)
    metric = random_roots(problem, K)
    G = ng.Kronecker(largest=D + 1).estimate(pull(problem, metric))
    tensors = G.tensors()
    assert (tensors[f"{NAME}/S"].shape, tensors[f"{NAME}/A"].shape) == ((1, V), (1, D, D))
    (S, A), other = both(problem, metric.s, "expand")
    close(block(G), join([(S.diagonal().diag(), A), other]))


def test_product_is_exact_for_one_word_if_the_embedding_has_no_gradient() -> None:
    """One datum, and a body that forgets it: what is left is the head."""
    problem = problem_of(Language, n=1, t=1)
    model = cast(Language, problem.module)
    with torch.no_grad():
        model.body.weight.zero_()
    metric = random_roots(problem, K)
    R = oracle_rows(problem, metric.s).flatten(0, 1)[:, : V * D]
    assert R.abs().max() > 0.1
    for structure in (ng.Kronecker(), ng.Kronecker("reduce"), ng.EigenKronecker()):
        close(block(structure.estimate(pull(problem, metric))), R.T @ R)


def test_product_of_a_weight_without_gradient_is_zero() -> None:
    problem = problem_of(Language)
    metric = random_roots(problem, K)
    pb = pull(problem, replace(metric, s=torch.zeros_like(metric.s)))
    G = ng.Kronecker().estimate(pb)
    assert all(bool(t.isfinite().all()) for t in G.tensors().values())
    close(G.dense(), torch.zeros_like(G.dense()))


@every_model
def test_ekfac_is_nearer_and_has_the_trace_of_the_metric(name: str) -> None:
    problem = problem_of(MODELS[name])
    metric = random_roots(problem, K)
    pb = pull(problem, metric)
    E, G = ng.EigenKronecker().estimate(pb), ng.Kronecker().estimate(pb)
    R = oracle_rows(problem, metric.s).flatten(0, 1)[:, : pb.layers[0].size]
    exact = R.T @ R
    close(block(E).trace(), exact.trace())
    assert (block(E) - exact).norm() <= (block(G) - exact).norm()
    again = ng.EigenKronecker().estimate(pb, E)  # in the same basis, in one pass
    close(again.dense(), E.dense())


def test_a_coupled_metric_has_a_product_too() -> None:
    """With a coupling of every example with itself alone it is the product without one."""
    problem = problem_of(Language)
    pb = pull(problem, random_roots(problem, K))
    coupled = replace(pb, coupled=Coupling(torch.eye(pb.n, dtype=torch.float64)))
    for structure in (ng.Kronecker(), ng.EigenKronecker(), ng.Diagonal()):
        close(structure.estimate(coupled).dense(), structure.estimate(pb).dense())


def test_rows_of_a_coupled_metric_are_mixed() -> None:
    problem = problem_of(Language)
    metric = random_roots(problem, K)
    mix = normal(N, N)
    coupled = replace(pull(problem, metric), coupled=Coupling(mix @ mix.T))
    R = oracle_rows(problem, metric.s)
    expected = torch.einsum("knp,nm,kmq->pq", R, mix @ mix.T, R)
    close(ng.Dense().estimate(coupled).dense(), expected)
    close(block(ng.EigenKronecker().estimate(coupled)).trace(), expected[: V * D, : V * D].trace())


# What is not tied, or not seen whole


@pytest.mark.parametrize("frozen", ["weight", "bias", "both"])
def test_a_frozen_weight_or_bias_has_no_block(frozen: str) -> None:
    def build() -> nn.Module:
        model = Language(bias=True)
        model.wte.weight.requires_grad_(frozen == "bias")
        assert model.head.bias is not None
        model.head.bias.requires_grad_(frozen == "weight")
        return model

    problem = problem_of(build)
    metric = random_roots(problem, K)
    pb = pull(problem, metric)
    assert (NAME in covered(pb), "head.bias" in covered(pb)) == (frozen == "bias", frozen == "weight")
    close(rows(pb), oracle_rows(problem, metric.s))
    assert ng.Kronecker(strict=True).estimate(pb).fallback is None


class Outside(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + nn.functional.linear(self.wpe(torch.arange(T)), self.wte.weight)


def test_a_tied_weight_that_is_used_outside_its_modules_too_has_the_rows_of_its_operations() -> None:
    problem = problem_of(Outside)
    pb = check_rows(problem, K)
    assert ng.Kronecker(strict=True).estimate(pb).fallback is None


def test_a_parameter_with_two_names_in_one_module_has_no_facets() -> None:
    class Doubled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(D)
            self.norm.bias = self.norm.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x)

    problem = Case("doubled", lambda: Problem(Doubled(), normal(N, D))).make()
    metric = random_roots(problem, K)
    pb = pull(problem, metric)
    assert not any(layer.facets for layer in pb.layers)
    close(rows(pb), oracle_rows(problem, metric.s))
