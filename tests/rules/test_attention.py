"""Attention: the replay gives every per-example gradient, whatever the masks, and transformers are made of rules."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import AttentionRule, Call
from natgrad.rules.base import cotangent_features, input_features
from tests import oracle
from tests.pulled import check_rows, close, covered, normal, pull
from tests.zoo import Case, Problem


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


def _read(out: Any) -> Tensor:
    """Outputs [n l e] and, where they are returned, the weights [n ·], so that both have cotangents: [n ·]."""
    y, weights = out
    return y.flatten(1) if weights is None else torch.cat([y.flatten(1), weights.flatten(1)], dim=1).square()


def _time_first(attention: nn.Module, *tokens: Tensor) -> Tensor:
    y, weights = attention(*(t.transpose(0, 1) for t in tokens))
    return _read((y.transpose(0, 1), weights))


class Attend(nn.Module):
    """Attention between a Linear layer and what is read of its outputs; the first input is x [n l 4]."""

    def __init__(self, run: Callable[..., Tensor], **options: Any) -> None:
        super().__init__()
        options = {"batch_first": True, **options}
        self.first, self.attention, self.run = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, **options), run

    def forward(self, x: Tensor, *others: Tensor) -> Tensor:
        return self.run(self.attention, torch.tanh(self.first(x)), *others)


def _self(attention: nn.Module, x: Tensor, **options: Any) -> Tensor:
    return _read(attention(x, x, x, **options))


def _cross(attention: nn.Module, x: Tensor, memory: Tensor) -> Tensor:
    return _read(attention(x, memory, 0.5 * memory, need_weights=False))


def _three(attention: nn.Module, x: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    return _read(attention(x, keys, values))


def _padded(attention: nn.Module, x: Tensor, out: Tensor) -> Tensor:
    return _read(attention(x, x, x, key_padding_mask=out))


def _padded_and_masked(attention: nn.Module, x: Tensor, out: Tensor, mask: Tensor) -> Tensor:
    return _read(attention(x, x, x, out, False, mask.flatten(0, 1), is_causal=True))


def _masked(attention: nn.Module, x: Tensor, mask: Tensor) -> Tensor:
    """A mask [n h l s] of every example and head."""
    return _read(attention(x, x, x, attn_mask=mask.flatten(0, 1), need_weights=False))


def _causal(need_weights: bool) -> Callable[..., Tensor]:
    def run(attention: nn.Module, x: Tensor) -> Tensor:
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        return _self(attention, x, attn_mask=mask, is_causal=True, need_weights=need_weights)

    return run


def _float_mask(attention: nn.Module, x: Tensor) -> Tensor:
    return _self(attention, x, attn_mask=normal(x.shape[1], x.shape[1]), average_attn_weights=False)


def _keywords(attention: nn.Module, x: Tensor) -> Tensor:
    return _read(attention(value=x, key=0.5 * x, query=x, need_weights=True))


def _one_sequence(attention: nn.Module, x: Tensor) -> Tensor:
    y, weights = attention(x[0], x[0], x[0])
    return torch.cat([y.flatten(), weights.flatten()]).unsqueeze(0)


PADDED = torch.tensor([[False, False, True], [False, False, False], [False, True, True]])
ALONE = torch.zeros(3, 2, 3, 3, dtype=torch.bool)
ALONE[0, 1, 2] = True  # a query that sees no key
ALONE[1, 0, 0, 1:] = ALONE[2, 1, 1, :2] = True


def _case(name: str, run: Callable[..., Tensor], *others: Tensor, n: int = 3, **options: Any) -> Case:
    return Case(name, lambda: Problem(Attend(run, **options).eval(), (_x(n, 3, 4), *others) if others else _x(n, 3, 4)))


CASES = [
    _case("self", _self),
    _case("self_without_weights", lambda a, x: _self(a, x, need_weights=False)),
    _case("self_no_bias", _self, bias=False),
    _case("weights_of_every_head", lambda a, x: _self(a, x, average_attn_weights=False)),
    _case("keywords", _keywords),
    _case("time_first", lambda a, x: _time_first(a, x, x, x), batch_first=False),
    _case("one_sequence", _one_sequence, n=1),
    _case("cross", _cross, normal(3, 2, 4)),
    _case("cross_longer", _cross, normal(3, 5, 4)),
    _case("cross_same_length", _cross, normal(3, 3, 4)),
    _case("cross_time_first", _time_first, normal(3, 2, 4), normal(3, 2, 4, seed=1), batch_first=False),
    _case("own_widths", _three, normal(3, 3, 5), normal(3, 3, 2), kdim=5, vdim=2),
    _case("own_widths_longer", _three, normal(3, 5, 4), normal(3, 5, 2), vdim=2),
    _case("own_widths_no_bias", _three, normal(3, 2, 5), normal(3, 2, 4), kdim=5, bias=False),
    _case("learned_key", _self, add_bias_kv=True),
    _case("zero_key", _self, add_zero_attn=True),
    _case("learned_and_zero_key", _padded, PADDED, add_bias_kv=True, add_zero_attn=True),
    _case("causal", _causal(False)),
    _case("causal_with_weights", _causal(True)),
    _case("causal_and_learned", _causal(False), add_bias_kv=True),
    _case("float_mask", _float_mask),
    _case("mask_of_every_head", _masked, normal(3, 2, 3, 3)),
    _case("query_that_sees_nothing", _masked, ALONE),
    _case("padded", _padded, PADDED),
    _case("padded_softly", _padded, normal(3, 3).masked_fill(PADDED, -torch.inf)),
    _case("padded_and_masked", _padded_and_masked, PADDED, ALONE),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_replay_gives_every_per_example_gradient(case: Case) -> None:
    problem = case.make()
    check_rows(problem)


NAMES = ("in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias")
SUBSETS = list(chain.from_iterable(combinations(NAMES, size) for size in range(1, 4)))


@pytest.mark.parametrize("trained", SUBSETS, ids=[str(len(names)) + "_".join(names) for names in SUBSETS])
def test_every_subset_of_the_parameters_may_be_frozen(trained: tuple[str, ...]) -> None:
    def build() -> Problem:
        model = Attend(_cross)
        for name, p in model.attention.named_parameters():
            p.requires_grad_(name in trained)
        return Problem(model, (_x(3, 3, 4), _x(3, 2, 4)))

    problem = Case("frozen", build).make()
    check_rows(problem)


def test_a_projection_that_is_shared_without_its_bias_is_a_layer_of_its_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = (nn.MultiheadAttention(4, 2, batch_first=True) for _ in range(2))
            self.two.in_proj_weight = self.one.in_proj_weight

        def forward(self, x: Tensor) -> Tensor:
            x = self.one(x, x, x)[0]
            return self.two(x, x, x)[0]

    problem = Case("shared", lambda: Problem(Shared(), _x(3, 2, 4))).make()
    pb = check_rows(problem)
    assert ("one.in_proj_weight",) in [layer.names for layer in pb.layers]


@pytest.mark.parametrize(("queries", "keys"), [(3, 3), (2, 5)])
def test_moments_and_means_leave_out_what_is_masked(queries: int, keys: int) -> None:
    """Σ ā āᵀ and its number of terms go over the tokens that take part, for every projection by itself."""
    attention, rule = nn.MultiheadAttention(4, 2, batch_first=True).double(), AttentionRule()
    query, key, value = normal(3, queries, 4), normal(3, keys, 4, seed=1), normal(3, keys, 4, seed=2)
    out = torch.zeros(3, keys, dtype=torch.bool)
    out[0, 1:] = True
    call = Call((query, key, value), {"key_padding_mask": out})
    moment = input_features(rule, attention, NAMES[:2], call).moment()
    mean = input_features(rule, attention, NAMES[:2], call).reduced("mean").dense().squeeze(1)
    for c, (tokens, kept) in enumerate([(query, torch.ones(3, queries).bool()), (key, ~out), (value, ~out)]):
        ā = torch.cat([tokens, tokens.new_ones(3, tokens.shape[1], 1)], dim=2)
        close(moment.total[c], sum((torch.outer(row, row) for row in ā[kept]), torch.zeros(5, 5).double()))
        assert int(torch.as_tensor(moment.count)[c]) == int(kept.sum())
        close(mean[:, c], torch.stack([own[seen].mean(0) for own, seen in zip(ā, kept, strict=True)]))
    a = input_features(rule, attention, NAMES[:2], call).dense()
    close(moment.total, torch.einsum("nrci,nrcj->cij", a, a))


def test_self_attention_has_one_input_moment_for_its_three_projections() -> None:
    attention, x = nn.MultiheadAttention(4, 2, batch_first=True).double(), normal(3, 2, 4)
    moment = input_features(AttentionRule(), attention, NAMES[:2], Call((x, x, x), {})).moment()
    ā = torch.cat([x, x.new_ones(3, 2, 1)], dim=2).flatten(0, 1)
    close(moment.total, (ā.T @ ā).expand(3, 5, 5))
    assert moment.count == 6


@pytest.mark.parametrize("keys", [NAMES[:2], NAMES[2:], NAMES[:1], NAMES[1:2], NAMES[3:]])
def test_packing_is_undone_by_unpacking(keys: tuple[str, ...]) -> None:
    attention, rule = nn.MultiheadAttention(4, 2), AttentionRule()
    block = {key: torch.randn(attention.get_parameter(key).shape) for key in keys}
    packed = rule.pack(attention, block)
    assert packed.shape == rule.shape(attention, keys)
    back = rule.unpack(attention, keys, packed.expand(2, *packed.shape))
    assert all(torch.equal(back[key], block[key].expand(2, *block[key].shape)) for key in keys)


def test_dropout_is_replayed_by_its_mean() -> None:
    """In training mode the replay is the evaluation of the module, and exact where there is no dropout."""
    attention, x = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double(), normal(3, 2, 4)
    call, rule = Call((x, x, x), {}, training=True), AttentionRule()
    with torch.no_grad():
        replayed = rule.replay(attention.train(), call)
        expected = attention.eval()(x, x, x)
    for got, want in zip(replayed.outputs, expected, strict=True):
        close(got, want)


def test_a_module_with_another_forward_or_other_parameters_is_left_alone() -> None:
    class Other(nn.MultiheadAttention):
        """A subclass, which inherits."""

    patched, projected = nn.MultiheadAttention(4, 2), nn.MultiheadAttention(4, 2)
    patched.forward = lambda *args: args  # type: ignore[method-assign]
    projected.out_proj = torch.nn.utils.parametrizations.weight_norm(projected.out_proj)
    assert all(AttentionRule().covers(module) for module in (nn.MultiheadAttention(4, 2), Other(4, 2)))
    assert not any(AttentionRule().covers(module) for module in (patched, projected, nn.Linear(2, 2)))


def test_cotangents_of_an_output_alone_are_refused() -> None:
    with pytest.raises(TypeError, match="the cotangents of MultiheadAttention are those of its replay"):
        cotangent_features(AttentionRule(), nn.MultiheadAttention(4, 2), NAMES[:2], torch.ones(1, 2, 3, 4)).dense()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kfac_of_attention_is_exact_for_one_datum_with_one_token(sharing: Any) -> None:
    """One token attends to itself only: q and k have no gradient, and every layer's block is one product."""
    problem = Case("one", lambda: Problem(Attend(lambda a, x: _self(a, x, need_weights=False)), _x(1, 1, 4))).make()
    pb = pull(problem, ng.Euclidean())
    exact = oracle.dense(problem.jacobian(), oracle.euclidean(problem.outputs()))
    exact = oracle.block_diagonal(exact, [layer.index.tolist() for layer in pb.layers])
    close(ng.Kronecker(sharing=sharing, strict=True).estimate(pb).dense(), exact)


def test_single_precision_under_autocast_is_close_to_double() -> None:
    problem = Case("autocast", lambda: Problem(Attend(_self), _x(3, 3, 4))).make()
    metric = ng.Euclidean()
    exact = ng.Kronecker().estimate(pull(problem, metric)).dense()
    model = problem.module.float()
    with torch.autocast("cpu", torch.bfloat16):
        pb = ng.pullback(model, problem.x.float(), metric)  # type: ignore[union-attr]
    assert covered(pb) == set(pb.model.params)
    got = ng.Kronecker().estimate(pb).dense()
    assert got.dtype == torch.float32
    assert float((got.double() - exact).norm() / exact.norm()) < 0.05
