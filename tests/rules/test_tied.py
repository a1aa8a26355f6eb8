"""A weight that is an embedding and a linear head: exact rows, and one Kronecker product for both uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import UncoveredError
from natgrad.operators import Operator
from natgrad.structures import Structure
from tests import oracle
from tests.pulled import close, covered, normal, oracle_rows, pull, random_roots, rows
from tests.zoo import Case, Problem

V, D, T, N, K = 7, 3, 4, 5, 3
NAME = "wte.weight"


class Language(nn.Module):
    """Tokens [n t] to logits [n t V]; the head is the embedding."""

    def __init__(self, *, bias: bool = False, twice: bool = False, words: int = V, **options: Any) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(words, D, **options), nn.Embedding(T, D)
        self.body, self.head, self.twice = nn.Linear(D, D), nn.Linear(D, words, bias=bias), twice
        self.head.weight = self.wte.weight

    def inside(self, e: Tensor) -> Tensor:
        """From the words [n t d] to what the head is given."""
        return torch.tanh(self.body(e + self.wpe(torch.arange(e.shape[1]))))

    def forward(self, tokens: Tensor) -> Tensor:
        e = self.wte(tokens)
        return self.head(self.inside(e + self.wte(tokens.flip(1)) if self.twice else e))


class Bag(nn.Module):
    """A bag of words to the scores of the words."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.head = nn.EmbeddingBag(V, D, mode="sum"), nn.Linear(D, V)
        self.head.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.wte(tokens)))


class Twice(nn.Module):
    """An embedding, and two linear layers with its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.wte, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight = self.wte.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(self.wte(tokens % 4))))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "gpt": Language,
    "bias": lambda: Language(bias=True),
    "embedding called twice": lambda: Language(twice=True),
    "padding": lambda: Language(padding_idx=2),
    "square": lambda: Language(words=D),
    "bag": Bag,
    "two linear layers": Twice,
}
every_model = pytest.mark.parametrize("name", MODELS)
STRUCTURES: list[Structure] = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()]


def words_of(model: nn.Module) -> int:
    return cast(nn.Embedding, model.wte).num_embeddings


def problem_of(build: Callable[[], nn.Module], n: int = N, t: int = T) -> Problem:
    torch.manual_seed(0)
    tokens = torch.randint(words_of(build()), (n, t), generator=torch.Generator().manual_seed(1))
    return Case("tied", lambda: Problem(build(), tokens)).make()


def both(problem: Problem, s: Tensor, sharing: str) -> list[tuple[Tensor, Tensor]]:
    """(S_u, A_u) of the head and of the embedding, on the sides of V and d, one loop per sum sign."""
    model, tokens = cast(Language, problem.module), cast(Tensor, problem.x)
    n_all, t_all = tokens.shape
    words = model.wte.num_embeddings
    S, A = (torch.zeros(d, d, dtype=torch.float64) for d in (words, D))
    counts, H = torch.zeros(words, dtype=torch.float64), torch.zeros(D, D, dtype=torch.float64)
    for n in range(n_all):
        e = model.wte(tokens[n : n + 1]).detach().requires_grad_()
        a = model.inside(e)
        g_h = [torch.autograd.grad(model.head(a), e, s[k, n : n + 1], retain_graph=True)[0][0] for k in range(len(s))]
        one_hot = nn.functional.one_hot(tokens[n], words).double()
        for k in range(len(s)):
            pairs = [(s[k, n, r], g_h[k][r]) for r in range(t_all)]
            if sharing == "reduce":
                pairs = [(s[k, n].sum(0), g_h[k].sum(0))]
            for g, h in pairs:
                S += torch.outer(g, g) / n_all
                H += torch.outer(h, h) / n_all
        inputs = [(a[0, r].detach(), one_hot[r]) for r in range(t_all)]
        if sharing == "reduce":
            inputs = [(a[0].detach().mean(0), one_hot.mean(0))]
        for x, word in inputs:
            A += torch.outer(x, x) / (n_all * len(inputs))
            counts += word.square() / (n_all * len(inputs))
    return [(S, A), (counts.diag(), H)]


def join(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """S ⊗ A with the partial traces of Σ S_u ⊗ A_u."""
    S = sum((s * a.trace() for s, a in pairs), start=torch.zeros_like(pairs[0][0]))
    A = sum((a * s.trace() for s, a in pairs), start=torch.zeros_like(pairs[0][1]))
    total = sum((s.trace() * a.trace() for s, a in pairs), start=torch.zeros((), dtype=torch.float64))
    return torch.kron(S, A / total)


def block(G: Operator) -> Tensor:
    """The tied weight's block of a metric; it comes first."""
    first = next(iter(G.layout.like.values())).numel()
    return G.dense()[:first, :first]


# Rows


@every_model
def test_rows_of_a_tied_weight_are_the_gradients_of_the_examples(name: str) -> None:
    problem = problem_of(MODELS[name])
    metric = random_roots(problem, K)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    assert len(pb.layers[0].facets) == 2
    close(rows(pb), oracle_rows(problem, metric.s))


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
    pb = replace(pb, tapes=pull(problem, metric).tapes, parts=[(0, 8)])
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
    assert G.rest is None
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


def test_parts_of_a_batch_make_one_product() -> None:
    problem = problem_of(Language, n=9)
    whole, cut = (pull(problem, random_roots(problem, K), memory=memory) for memory in (2**32, 12_000))
    assert len(cut.parts) > 1
    close(ng.Kronecker().estimate(replace(cut, memory=2**32)).dense(), ng.Kronecker().estimate(whole).dense())


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
    again = ng.EigenKronecker().estimate_like(pb, E)  # in the same basis, in one pass
    close(again.dense(), E.dense())


def test_a_coupled_metric_has_a_product_too() -> None:
    """With a coupling of every example with itself alone it is the product without one."""
    problem = problem_of(Language)
    pb = pull(problem, random_roots(problem, K))
    coupled = replace(pb, coupling=torch.eye(pb.n, dtype=torch.float64))
    for structure in (ng.Kronecker(), ng.EigenKronecker(), ng.Diagonal()):
        close(structure.estimate(coupled).dense(), structure.estimate(pb).dense())


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
    assert ng.Kronecker(strict=True).estimate(pb).rest is None


class Outside(Language):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) + nn.functional.linear(self.wpe(torch.arange(T)), self.wte.weight)


def test_a_tied_weight_that_is_used_outside_its_modules_falls_back() -> None:
    problem = problem_of(Outside)
    metric = random_roots(problem, K)
    pb = pull(problem, metric)
    assert NAME not in covered(pb)
    close(rows(pb), oracle_rows(problem, metric.s))
    with pytest.raises(UncoveredError, match=NAME):
        ng.Kronecker(strict=True).estimate(pb)


# Training


def _training(structure: Structure | None = None) -> tuple[Language, ng.NaturalGradient, Tensor]:
    torch.manual_seed(0)
    model = Language(bias=True).double()
    tokens = torch.randint(V, (32, T), generator=torch.Generator().manual_seed(2)).cumsum(1) % V
    metric = ng.Fisher(ng.Categorical(), samples=1)
    if structure is None:
        return model, ng.KFAC(model, metric, lr=0.3, damping=1e-2), tokens
    return model, ng.NaturalGradient(model, metric, structure=structure, lr=0.3, damping=1e-2), tokens


def _steps(model: Language, opt: ng.NaturalGradient, tokens: Tensor, count: int) -> list[float]:
    out = []
    for _ in range(count):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        opt.step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("structure", [None, ng.EigenKronecker(strict=True)], ids=["KFAC", "EigenKronecker"])
def test_a_tied_language_model_is_trained(structure: Structure | None) -> None:
    torch.manual_seed(3)
    model, opt, tokens = _training(structure)
    assert NAME not in opt.plan().uncovered
    losses = _steps(model, opt, tokens, 20)
    assert losses[-1] < 0.9 * losses[0]
    assert model.head.weight is model.wte.weight
    rows = {row.names: row for row in opt.plan().rows}
    assert rows[(NAME,)].shape == (1, V, D)
    assert NAME in str(opt.plan())


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, opt, tokens = _training()
    _steps(model, opt, tokens, 4)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    expected = _steps(model, opt, tokens, 4)
    fresh, other, _ = _training()
    fresh.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert _steps(fresh, other, tokens, 4) == expected


def test_half_precision_of_a_forward_pass_leaves_the_factors_in_single() -> None:
    torch.manual_seed(0)
    model, tokens = Language(), torch.randint(V, (N, T))
    with torch.autocast("cpu", torch.bfloat16):
        G = ng.Kronecker(strict=True).estimate(ng.pullback(model, tokens, ng.Fisher(ng.Categorical())))
    exact = ng.Kronecker().estimate(ng.pullback(model, tokens, ng.Fisher(ng.Categorical())))
    for name, t in G.tensors().items():
        assert t.dtype == torch.float32
        torch.testing.assert_close(
            t, exact.tensors()[name], rtol=0, atol=0.05 * float(exact.tensors()[name].abs().max())
        )


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
    assert not covered(pb)
    close(rows(pb), oracle_rows(problem, metric.s))
