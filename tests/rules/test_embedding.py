"""Embeddings: linear layers with one-hot inputs, and bags of words."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import Call, EmbeddingBagRule, EmbeddingRule, Rule
from natgrad.rules.base import cotangent_features, input_features
from tests import zoo
from tests.optim.tasks import seeded
from tests.pulled import check_rows, close, covered, normal, oracle_rows, pull, random_roots, rows

SHAPES = {"one token": (4,), "sequence": (4, 3), "square": (4, 4), "table": (4, 2, 3)}


def _tokens(*shape: int, words: int = 5, seed: int = 0) -> Tensor:
    return torch.randint(words, shape, generator=torch.Generator().manual_seed(seed))


def problem(layer: Callable[[], nn.Module], x: Any) -> zoo.Problem:
    """The layer, and something after it."""
    return zoo.Case("embedding", lambda: zoo.Problem(Words(layer()), x)).make()


class Words(nn.Module):
    """An embedding with a head."""

    def __init__(self, words: nn.Module) -> None:
        super().__init__()
        self.words, self.head = words, nn.Linear(3, 2)

    def forward(self, *x: Tensor) -> Tensor:
        """tanh, and a linear layer on every position."""
        return self.head(torch.tanh(self.words(*x)))


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_gradient_of_an_example_is_the_sum_over_positions(shape: tuple[int, ...], padding: int | None) -> None:
    of = problem(lambda: nn.Embedding(5, 3, padding_idx=padding), _tokens(*shape))
    check_rows(of)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_moments_are_those_of_inputs_and_cotangents(
    shape: tuple[int, ...], padding: int | None, dtype: torch.dtype
) -> None:
    layer, rule = nn.Embedding(5, 3, padding_idx=padding).double(), EmbeddingRule()
    tokens = _tokens(*shape).to(dtype)
    call = Call((tokens,), {})
    a = input_features(rule, layer, ("weight",), call).dense()
    moment = input_features(rule, layer, ("weight",), call).moment()
    close(torch.diag_embed(moment.total), torch.einsum("nrci,nrcj->cij", a, a))
    assert int(moment.count) == tokens.numel() - int((tokens == padding).sum() if padding is not None else 0)
    counted = a.sum((1, 2, 3)).clamp(min=1).view(-1, 1, 1)  # without padding
    close(input_features(rule, layer, ("weight",), call).reduced("mean").dense().squeeze(1), a.sum(1) / counted)
    cotangents = normal(2, *shape, 3)
    g = cotangent_features(rule, layer, ("weight",), cotangents).dense()
    close(
        cotangent_features(rule, layer, ("weight",), cotangents).moment().total, torch.einsum("knrco,knrcp->cop", g, g)
    )
    close(torch.einsum("nrci,coi->nrco", a, rule.pack(layer, {"weight": layer.weight.detach()})).flatten(),
          torch.where((tokens == padding).unsqueeze(-1), 0, layer(tokens).detach()).flatten() if padding is not None
          else layer(tokens).detach().flatten())  # fmt: skip


@pytest.mark.parametrize(
    ("layer", "rule"), [(nn.Embedding(5, 3), EmbeddingRule()), (nn.EmbeddingBag(5, 3, mode="sum"), EmbeddingBagRule())]
)
def test_packing_and_unpacking_are_inverse(layer: nn.Module, rule: Rule) -> None:
    weight = normal(5, 3)
    packed = rule.pack(layer, {"weight": weight})
    assert packed.shape == rule.shape(layer, ("weight",)) == (1, 3, 5)
    again = rule.unpack(layer, ("weight",), torch.stack([packed, 2 * packed]))["weight"]
    close(again, torch.stack([weight, 2 * weight]))


def test_counts_of_a_half_precision_table_are_exact() -> None:
    """Half precision stops counting at 2048."""
    layer = nn.Embedding(2, 3, dtype=torch.float16)
    moment = input_features(
        EmbeddingRule(), layer, ("weight",), Call((torch.zeros(5001, dtype=torch.int64),), {})
    ).moment()
    assert moment.total.tolist() == [[5001.0, 0.0]]


def test_kronecker_keeps_the_counts_of_a_vocabulary_and_nothing_else() -> None:
    of = problem(lambda: nn.Embedding(5, 3), _tokens(4, 3))
    tensors = ng.Kronecker().estimate(pull(of, ng.Euclidean())).tensors()
    counts = torch.bincount(of.x.flatten(), minlength=5).double()  # type: ignore[union-attr]
    close(tensors["words.weight/A"], counts[None] / 12)
    assert tensors["words.weight/S"].shape == (1, 3, 3)
    reduced = ng.Kronecker(sharing="reduce").estimate(pull(of, ng.Euclidean())).tensors()
    assert reduced["words.weight/A"].shape == (1, 5)


def test_kronecker_is_exact_for_one_datum_with_one_token() -> None:
    of = problem(lambda: nn.Embedding(5, 3), _tokens(1))
    metric = random_roots(of, 1)
    pb = pull(of, metric)
    R = oracle_rows(of, metric.s).flatten(0, 1)[:, :15]
    close(ng.Kronecker().estimate(pb).dense()[:15, :15], R.T @ R)


@pytest.mark.parametrize("options", [{"max_norm": 100.0}, {"scale_grad_by_freq": True}], ids=["max_norm", "frequency"])
def test_what_is_not_linear_in_the_table_has_no_rule(options: dict[str, Any]) -> None:
    for layer, rule in ((nn.Embedding(5, 3, **options), EmbeddingRule()),
                        (nn.EmbeddingBag(5, 3, **options), EmbeddingBagRule())):  # fmt: skip
        assert not rule.covers(layer)


def test_a_table_with_a_largest_norm_falls_back_and_is_right() -> None:
    of = problem(lambda: nn.Embedding(5, 3, max_norm=1.0), _tokens(4, 3))
    of.outputs()  # the forward pass shortens the rows of the table
    metric = random_roots(of)
    pb = pull(of, metric)
    assert covered(pb) == {"head.weight", "head.bias"}
    close(rows(pb), oracle_rows(of, metric.s))


def test_sparse_gradients_are_refused_by_name() -> None:
    model = seeded(lambda: Words(nn.Embedding(5, 3, sparse=True)).double())
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker())
    model(_tokens(4, 3)).square().sum().backward()
    with pytest.raises(TypeError, match=r"gradient of words.weight is sparse.*sparse=False"):
        opt.step()


# Bags of words


BAGS: dict[str, tuple[dict[str, Any], tuple[Any, ...]]] = {
    "sum": ({"mode": "sum"}, (_tokens(4, 3),)),
    "mean": ({"mode": "mean"}, (_tokens(4, 3),)),
    "mean padded": ({"mode": "mean", "padding_idx": 1}, (_tokens(4, 3),)),
    "weighted": ({"mode": "sum"}, (_tokens(4, 3), None, normal(4, 3))),
}


@pytest.mark.parametrize("kind", BAGS)
def test_the_gradient_of_a_bag_is_its_cotangent_times_its_counts(kind: str) -> None:
    options, x = BAGS[kind]
    tensors = tuple(t for t in x if t is not None)

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.head = nn.EmbeddingBag(5, 3, **options), nn.Linear(3, 2)

        def forward(self, tokens: Tensor, weights: Tensor | None = None) -> Tensor:
            return self.head(torch.tanh(self.words(tokens, per_sample_weights=weights)))

    of = zoo.Case("bag", lambda: zoo.Problem(Bag(), tensors)).make()
    check_rows(of)


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_different_sizes_are_cut_at_their_offsets(mode: str, last: bool) -> None:
    layer = nn.EmbeddingBag(5, 3, mode=mode, include_last_offset=last).double()
    tokens, starts = _tokens(7), torch.tensor([0, 2, 2, 6, *([7] if last else [])])
    rule = EmbeddingBagRule()
    a = input_features(rule, layer, ("weight",), Call((tokens, starts), {})).dense()
    z = torch.einsum("nrci,coi->nro", a, rule.pack(layer, {"weight": layer.weight.detach()})).squeeze(1)
    close(z, layer(tokens, starts).detach())


def test_the_largest_of_a_bag_has_no_rule() -> None:
    assert not EmbeddingBagRule().covers(nn.EmbeddingBag(5, 3, mode="max"))
