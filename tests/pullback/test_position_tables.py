"""Position embeddings: looked up once without a batch axis, and added to every example."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.pullbacks.operation_layers import EntriesRule
from natgrad.rules import EmbeddingRule
from tests import zoo
from tests.pulled import close, oracle_rows, pull, random_roots, rows

T, D, N = 4, 3, 5


class Language(nn.Module):
    """Tokens and positions, as nanoGPT and as Hugging Face write them."""

    def __init__(self, positions: Callable[[int], Tensor], *, twice: bool = False, scaled: bool = False) -> None:
        super().__init__()
        self.wte, self.wpe, self.head = nn.Embedding(7, D), nn.Embedding(T + 1, D), nn.Linear(D, 2)
        self.positions, self.twice, self.scaled = positions, twice, scaled
        self.calls = 0

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n T] to [n T 2]."""
        self.calls += 1
        where = self.wpe(self.positions(tokens.shape[1]))
        h = torch.tanh(self.wte(tokens) + (2 * where if self.scaled else where))
        return self.head(torch.tanh(h + where) if self.twice else h)


POSITIONS: dict[str, Callable[[int], Tensor]] = {
    "arange": torch.arange,
    "with an axis of examples": lambda t: torch.arange(t).unsqueeze(0),
    "one for all": lambda t: torch.zeros(1, dtype=torch.int64),
}


@pytest.mark.parametrize("twice", [False, True], ids=["once", "twice"])
@pytest.mark.parametrize("n", [1, T, N])
@pytest.mark.parametrize("kind", POSITIONS)
def test_a_table_of_positions_is_an_embedding_that_every_example_asks(kind: str, n: int, twice: bool) -> None:
    tokens = torch.randint(7, (n, T), generator=torch.Generator().manual_seed(0))
    of = zoo.Case("language", lambda: zoo.Problem(Language(POSITIONS[kind], twice=twice), tokens)).make()
    metric = random_roots(of)
    expected = oracle_rows(of, metric.s)
    model = of.module
    assert isinstance(model, Language)
    model.calls = 0
    pb = pull(of, metric)
    close(rows(pb), expected)
    assert {layer.names[0]: type(layer.rule) for layer in pb.layers}["wpe.weight"] is EmbeddingRule
    assert model.calls <= 1
    A = ng.Kronecker().estimate(pb).tensors()["wpe.weight/A"]
    counts = torch.zeros(T + 1, dtype=torch.float64).index_add_(
        0, POSITIONS[kind](T).flatten(), torch.ones(POSITIONS[kind](T).numel(), dtype=torch.float64)
    )
    close(A, (counts / counts.sum())[None])


def test_a_table_that_is_used_otherwise_is_right_too() -> None:
    tokens = torch.randint(7, (N, T), generator=torch.Generator().manual_seed(0))
    of = zoo.Case("language", lambda: zoo.Problem(Language(torch.arange, scaled=True), tokens)).make()
    metric = random_roots(of)
    pb = pull(of, metric)
    assert {layer.names[0]: type(layer.rule) for layer in pb.layers}["wpe.weight"] is EntriesRule
    close(rows(pb), oracle_rows(of, metric.s))
