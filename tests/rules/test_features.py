"""Every form of features has the algebra of the tensor that it stands for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from natgrad.accelerate.patches import Axis
from natgrad.rules import RULES, Call, DenseFeatures, Entries, Features, Joined, OneHot, Patches, Rows
from natgrad.rules.base import input_features
from tests.pulled import close, normal

N = 5
PADDED = (Axis(3, before=1, after=1), Axis(2, stride=2))
FORMS: dict[str, Callable[[], Features]] = {
    "dense": lambda: DenseFeatures(normal(N, 3, 2, 4)),
    "one input for all groups": lambda: DenseFeatures(normal(N, 3, 1, 4).expand(-1, -1, 2, -1)),
    "rows": lambda: Rows(normal(N, 3, 4)),
    "rows with ones": lambda: Rows(normal(N, 3, 4), ones=True),
    "rows with a column": lambda: Rows(normal(N, 3, 4), ones=normal(N, seed=1)),
    "rows, batch second": lambda: Rows(normal(3, N, 4).transpose(0, 1), ones=True),
    "many rows": lambda: Rows(normal(N, 60, 300), ones=True),
    "only ones": lambda: Rows(normal(N, 3, 0), ones=True),
    "patches": lambda: Patches(normal(N, 2, 5, 6), PADDED),
    "patches with ones": lambda: Patches(normal(N, 2, 5, 6), PADDED, ones=True),
    "patches with a column": lambda: Patches(normal(N, 2, 5, 6), PADDED, ones=normal(N, seed=1)),
    "few large patches": lambda: Patches(normal(N, 40, 2, 3), (Axis(2), Axis(2, stride=2)), ones=True),
    "patches in groups": lambda: Patches(normal(N, 4, 5, 6), PADDED, groups=2, ones=True),
    "pixels": lambda: Patches(normal(N, 4, 5, 6), (Axis(1), Axis(1)), groups=2),
    "entries": lambda: Entries(normal(N, 3, 4)),
    "entries with ones": lambda: Entries(normal(N, 3, 4), ones=True),
    "entries with a column": lambda: Entries(normal(N, 3, 4), ones=normal(N, seed=1)),
    "joined rows": lambda: Joined.of([Rows(normal(N, r, 4, seed=r), ones=True) for r in (2, 3)]),
    "joined patches": lambda: Joined.of([Patches(normal(N, 2, 5, 6, seed=at), PADDED) for at in range(2)]),
    "batch norm": lambda: _norm(torch.nn.BatchNorm2d(4), (N, 4, 3, 2)),
    "group norm": lambda: _norm(torch.nn.GroupNorm(2, 4), (N, 4, 3)),
}
COTANGENTS: dict[str, Callable[[], Features]] = {
    "dense": lambda: DenseFeatures(normal(2, N, 3, 2, 4)),
    "rows": lambda: Rows(normal(2, N, 3, 4)),
    "patches": lambda: Patches(normal(2, N, 4, 5, 6), PADDED, groups=2),
    "few large patches": lambda: Patches(normal(2, N, 40, 2, 3), (Axis(2), Axis(2, stride=2))),
    "pixels": lambda: Patches(normal(2, N, 4, 5, 6), (Axis(1), Axis(1))),
    "entries": lambda: Entries(normal(2, N, 3, 4)),
}
MIX = torch.eye(N, dtype=torch.float64) + 0.3 * normal(N, N, seed=5)
WEIGHTS = normal(N, seed=6).square()
every_form = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)
inputs_and_cotangents = pytest.mark.parametrize(
    "make", [*FORMS.values(), *COTANGENTS.values()], ids=[*FORMS, *(f"cotangents: {name}" for name in COTANGENTS)]
)


def _norm(layer: torch.nn.Module, shape: tuple[int, ...]) -> Features:
    rule = next(rule for rule in RULES if rule.covers(layer))
    return input_features(rule, layer.double(), ("weight", "bias"), Call((normal(*shape),), {}, training=True))


def _same(found: Features, x: Tensor) -> None:
    """Tensor, second moment and squares are those of x [*k n r c d]."""
    close(found.dense(), x)
    assert found.shape == tuple(x.shape)
    total = torch.einsum("...nrci,...nrcj->cij", x, x)
    moment = found.moment()
    close(moment.total, total)
    assert moment.count == x.shape[-4] * x.shape[-3]
    close(moment.mean(), total / moment.count)
    close(found.squares().total, x.square().sum(tuple(range(x.ndim - 2))))


@inputs_and_cotangents
def test_moments_are_those_of_the_tensor(make: Callable[[], Features]) -> None:
    _same(make(), make().dense())


@inputs_and_cotangents
def test_mixing_and_weighting_the_examples_acts_on_the_tensor_with_its_ones(make: Callable[[], Features]) -> None:
    x = make().dense()
    _same(make().mixed(MIX), torch.einsum("nm,...nrci->...mrci", MIX, x))
    _same(make().weight_examples(WEIGHTS), x * WEIGHTS.sqrt()[:, None, None, None])


@inputs_and_cotangents
def test_reducing_is_the_mean_or_the_sum_over_the_positions(make: Callable[[], Features]) -> None:
    x = make().dense()
    if not isinstance(make(), Joined):  # its uses count alike, however many positions they have
        _same(make().reduced("mean"), x.mean(-3, keepdim=True))
    _same(make().reduced("sum"), x.sum(-3, keepdim=True))


@inputs_and_cotangents
def test_projections_are_products_with_the_tensor(make: Callable[[], Features]) -> None:
    x = make().dense()
    if x.shape[-2] == 1:
        w = normal(x.shape[-1], 3, seed=2)
        close(make().project(w), x.squeeze(-2) @ w)


@every_form
def test_gradients_are_sums_of_outer_products_over_the_positions(make: Callable[[], Features]) -> None:
    a = make().dense()
    o = 1 if isinstance(make(), Entries) or a.shape[-1] == 2 else 3
    g = normal(2, *a.shape[:3], o, seed=4)
    rows = torch.einsum("knrco,nrci->kncoi", g, a)
    close(make().squared_gradients(g), rows.square().sum((0, 1)))
    for limit in (1, 10**9):
        squares = [part.square().sum((0, 2, 3)) for part in make().gradients(g, limit)]
        close(torch.stack(squares).sum(0), rows.square().sum((0, 1, 3, 4)))


@every_form
def test_an_average_takes_a_moment_in_place(make: Callable[[], Features]) -> None:
    total = make().moment().total
    average = torch.eye(total.shape[-1], dtype=torch.float64).expand_as(total).clone()
    expected = 0.7 * average + 0.3 * total / 8
    make().moment().over(8).average_into(average, 0.3)
    close(average, expected)


def test_one_hot_inputs_are_never_formed_and_keep_a_diagonal() -> None:
    index = torch.randint(6, (N, 7), generator=torch.Generator().manual_seed(0))
    valid = (index != 0).double()
    features = OneHot(index, 6, valid, masked=True)
    x = torch.nn.functional.one_hot(index, 6).double().unsqueeze(2) * valid[..., None, None]
    close(features.dense(), x)
    close(features.moment().total, x.square().sum((0, 1)))
    assert float(features.moment().count) == float(valid.sum())
    close(torch.as_tensor(features.count(WEIGHTS)), (WEIGHTS @ valid.sum(1)).view(1))
    close(features.reduced("mean").dense(), x.sum(1, keepdim=True) / valid.sum(1).view(-1, 1, 1, 1))
    close(features.mixed(MIX).dense(), torch.einsum("nm,nrci->mrci", MIX, x))
    close(features.weight_examples(WEIGHTS).moment().total, (WEIGHTS[:, None, None, None] * x).sum((0, 1)))
    w, g = normal(6, 3), normal(2, N, 7, 1, 3, seed=1)
    close(features.project(w), x.squeeze(2) @ w)
    close(features.squared_gradients(g), torch.einsum("knrco,nrci->kncoi", g, x).square().sum((0, 1)))


def test_masked_positions_count_nowhere() -> None:
    valid = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]]).double().unsqueeze(-1)  # [n r c]
    features = DenseFeatures(normal(2, 3, 1, 4) * valid.unsqueeze(-1), valid)
    assert torch.equal(torch.as_tensor(features.count()), torch.tensor([3.0]).double())
    weights = torch.tensor([2.0, 5.0]).double()
    assert torch.equal(torch.as_tensor(features.count(weights)), torch.tensor([9.0]).double())
    close(features.reduced("mean").dense()[0, 0], features.x[0, :2].mean(0))
    close(features.reduced("mean").dense()[1, 0], features.x[1, 0])


def test_a_sum_that_overflows_is_not_finite() -> None:
    """Rows are judged by their norm before anything is formed; no entry of the sum can be larger than its square."""
    assert Rows(torch.full((1, 2, 2), 1e18)).moment().is_finite()
    for wrong in (1e20, float("inf"), float("nan")):
        assert not Rows(torch.tensor([[[1.0, wrong]]])).moment().is_finite()
        assert not Entries(torch.tensor([[[1.0, wrong]]])).moment().is_finite()
    assert Rows(torch.tensor([[[1.0, 1e20]]]).double()).moment().is_finite()


@every_form
def test_positions_that_do_not_count_are_in_no_sum_and_no_mean(make: Callable[[], Features]) -> None:
    features = make()
    n, r, _, _ = features.shape
    there = torch.arange(n * r).view(n, r) % 3 != 0
    only, x = features.mask(there), features.dense() * there[..., None, None]
    close(only.dense(), x)
    close(only.moment().total, torch.einsum("nrci,nrcj->cij", x, x), 1e-9)
    close(only.squares().total, x.square().sum((0, 1)), 1e-9)
    assert float(torch.as_tensor(only.count()).flatten()[0]) == float(there.sum())
    close(only.reduced("mean").dense(), x.sum(1, keepdim=True) / there.sum(1).clamp(min=1).view(-1, 1, 1, 1), 1e-9)
    close(only.mixed(MIX).dense(), torch.einsum("nm,nrci->mrci", MIX, x), 1e-9)
    assert torch.equal(torch.as_tensor(DenseFeatures(x.unsqueeze(0)).reached()), (x != 0).flatten(2).any(-1))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_positions_in_half_precision_are_counted_exactly(dtype: torch.dtype) -> None:
    """bfloat16 knows no 2999."""
    there = torch.arange(3001).view(1, -1) > 1
    masked = DenseFeatures(torch.ones(1, 3001, 1, 1, dtype=dtype)).mask(there)
    assert masked.moment().mean().item() == 1.0
    assert masked.reduced("mean").dense().item() == 1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("ones", [False, True])
@pytest.mark.parametrize("kind", [Rows, Entries, lambda x, ones: DenseFeatures(x.unsqueeze(2))])
def test_positions_that_do_not_count_may_hold_anything(
    kind: Callable[[Tensor, bool], Features], ones: bool, dtype: torch.dtype
) -> None:
    x, there = normal(4, 5, 3).to(dtype), torch.arange(5) < torch.tensor([5, 0, 2, 3])[:, None]
    dirty = torch.where(there.unsqueeze(-1), x, torch.nan)
    found = kind(dirty, ones).mask(there).moment()
    alone = kind(x[there].unsqueeze(1), ones).moment()
    assert torch.as_tensor(found.count).flatten()[0] == 10
    close(found.total, alone.total, 1e-6 if dtype == torch.bfloat16 else 1e-12)
