"""What is cached about one forward pass is not applied to a different one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.model import Model
from natgrad.pullbacks.batch_axis import StatusCache
from natgrad.pullbacks.pullback import Batch, Observer, layers_of
from natgrad.pullbacks.row_examples import Probe
from natgrad.pullbacks.tape import record


class Written(nn.Module):
    """Layers of one shape, and a forward pass that can be exchanged."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.a, self.b, self.o = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)
        self.written: Callable[[Written, Tensor], Tensor] = by_a
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.written(self, x)


def past(m: Written, x: Tensor, weight: Tensor) -> Tensor:
    return m.o(m.a(x) + m.b(x) + F.linear(x, weight))


def by_a(m: Written, x: Tensor) -> Tensor:
    return past(m, x, m.a.weight)


def by_b(m: Written, x: Tensor) -> Tensor:
    return past(m, x, m.b.weight)


def with_running_statistics(m: Written, x: Tensor) -> Tensor:
    return m.o(F.batch_norm(m.a(x) + m.b(x), x.new_zeros(3), x.new_ones(3), training=False))


def with_those_of_the_batch(m: Written, x: Tensor) -> Tensor:
    return m.o(F.batch_norm(m.a(x) + m.b(x), x.new_zeros(3), x.new_ones(3), training=True))


def plainly(m: Written, x: Tensor) -> Tensor:
    return m.o(m.a(x) + m.b(x))


def with_another_weight(m: Written, x: Tensor) -> Tensor:
    other = {"weight": m.b.weight.T.T, "bias": m.b.bias}
    return m.o(torch.func.functional_call(m.a, other, (x,)) + m.b(x))


def without_b(m: Written, x: Tensor) -> Tensor:
    return m.o(m.a(x) + m.a(x))


def transposed(m: Written, x: Tensor) -> Tensor:
    return m.o(m.a(x) @ m.b.weight.T + m.b.bias)


def along(axis: int) -> dict[str, Callable[[Written, Tensor], Tensor]]:
    """Operations that mix the examples along axis 0, and along axis 1 do not."""
    return {
        "softmax": lambda m, x: m.o(m.a(x).softmax(axis) + m.b(x)),
        "mean": lambda m, x: m.o(m.a(x) - m.a(x).mean(axis, keepdim=True) + m.b(x)),
        "norm": lambda m, x: m.o(F.normalize(m.a(x), dim=axis) + m.b(x)),
        "unfold": lambda m, x: m.o(m.a(x).unfold(axis, 3, 1).flatten(1 - axis).view(3, 3) + m.b(x)),
        "keepdim": lambda m, x: m.o(m.a(x) - m.a(x).mean(1, keepdim=axis == 1) + m.b(x)),
        "product": lambda m, x: m.o((torch.mm(m.a(x), x) if axis else torch.mm(x, m.a(x))) + m.b(x)),
        "view": lambda m, x: m.o((m.a(x).view((3, 1, 3) if axis else (1, 3, 3)) + x.view(3, 3, 1)).mean(1) + m.b(x)),
        "expand": lambda m, x: m.o(m.a(x).mean(axis, keepdim=True).expand(3, 3) + m.b(x)),
        "joints": lambda m, x: m.o(m.a(x) + (m.a(x) if axis else m.b(x)).softmax(0) + m.b(x)),
    }


PASSES = (
    by_a,
    by_b,
    with_running_statistics,
    with_those_of_the_batch,
    plainly,
    with_another_weight,
    without_b,
    transposed,
)


def inputs(n: int = 4) -> Tensor:
    return torch.randn(n, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def view_of(m: Written) -> Observer:
    model = Model.of(m)
    return Observer(model, ng.Euclidean(), layers_of(model), None)


def shown(view: Observer, m: Written, written: Callable[[Written, Tensor], Tensor], n: int = 4) -> object:
    m.written = written
    pb = view.of(Batch(view.model, inputs(n)))
    covered = {name for block in pb.layers if block.rule is not None for name in block.names}
    unused = {name for block in pb.unused.values() for name in block.names}
    return covered, set(pb.reasons), unused


@pytest.mark.parametrize("first", PASSES)
@pytest.mark.parametrize("second", PASSES)
def test_a_pass_is_seen_as_if_it_were_the_first(
    first: Callable[[Written, Tensor], Tensor], second: Callable[[Written, Tensor], Tensor]
) -> None:
    m = Written()
    view = view_of(m)
    shown(view, m, first)
    assert shown(view, m, second) == shown(view_of(m), m, second)


@pytest.mark.parametrize("name", along(0))
@pytest.mark.parametrize("axes", [(0, 1), (1, 0)])
def test_a_pass_along_one_axis_says_nothing_of_one_along_another(name: str, axes: tuple[int, int]) -> None:
    m = Written()
    view = view_of(m)
    first, second = (along(axis)[name] for axis in axes)
    before = shown(view, m, first, 3)
    assert shown(view, m, second, 3) == shown(view_of(m), m, second, 3) != before


def test_statistics_of_the_batch_are_noticed_after_a_pass_without() -> None:
    m = Written()
    view = view_of(m)
    shown(view, m, with_running_statistics)
    m.written = with_those_of_the_batch
    assert {"a.weight", "b.weight"} <= view.of(Batch(view.model, inputs())).reasons.keys()


def test_a_pass_that_looks_like_one_before_is_not_judged_again() -> None:
    m = Written()
    model, blocks = Model.of(m), layers_of(Model.of(m))
    cache = StatusCache()
    statuses = [cache.of(model, blocks, record(model, blocks, inputs(n)))[0] for n in (4, 4, 5, 1)]
    assert statuses[0] is statuses[1] is statuses[2]  # whatever the number of examples
    assert statuses[0] is not statuses[3]  # of one example nothing can be confused with another


class Folded(nn.Module):
    """n examples [t d] through layers, by a product, after ``fold`` and before ``unfold`` of the axes."""

    def __init__(self, fold: Callable[[Tensor], Tensor], unfold: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.fold, self.unfold = fold, unfold

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.unfold(self.a(self.fold(x)).tanh(), x))


def rows_of_examples(x: Tensor) -> Tensor:
    return x.flatten(0, 1)


def back(z: Tensor, x: Tensor) -> Tensor:
    return z.view(x.shape)


def rows_of_positions(x: Tensor) -> Tensor:
    return x.transpose(0, 1).reshape(-1, 3)


def back_from_positions(z: Tensor, x: Tensor) -> Tensor:
    return z.view(x.shape[1], x.shape[0], 3).transpose(0, 1)


@pytest.mark.parametrize(
    ("fold", "unfold", "once"),
    [
        pytest.param(rows_of_examples, back, True, id="positions of an example side by side"),
        pytest.param(rows_of_positions, back_from_positions, False, id="examples of a position side by side"),
    ],
)
def test_sizes_count_only_where_the_proof_needs_them(
    fold: Callable[[Tensor], Tensor], unfold: Callable[[Tensor, Tensor], Tensor], once: bool
) -> None:
    """Whatever was seen before, rows are those of a new observer."""
    m = Folded(fold, unfold)
    model, blocks = Model.of(m), layers_of(Model.of(m))
    view, cache = Observer(model, ng.Euclidean(), blocks, None), StatusCache()
    shapes = [(4, 6), (6, 4), (3, 8), (12, 2), (8, 3), (5, 5), (2, 12)]
    statuses = []
    for n, t in shapes:
        x = torch.randn(n, t, 3, generator=torch.Generator().manual_seed(n))
        statuses.append(cache.of(model, blocks, record(model, blocks, x))[0])
        alone = Observer(model, ng.Euclidean(), blocks, None)
        (mine,), (new,) = (list(each.of(Batch(model, x)).factors()) for each in (view, alone))
        for f, g in zip(mine, new, strict=True):
            assert torch.equal(f.rows(), g.rows())
    apart = [(n, t) for n, t in shapes if n != t and 3 not in (n, t)]
    first = statuses[0]
    same = [status is first for (n, t), status in zip(shapes, statuses, strict=True) if (n, t) in apart]
    assert all(same) if once else not any(same[1:])


@pytest.mark.parametrize("written", PASSES)
def test_a_parameter_is_unused_where_no_gradient_comes_to_it(written: Callable[[Written, Tensor], Tensor]) -> None:
    m, x = Written(), inputs()
    m.written = written
    pb = ng.pullback(m, x, ng.Euclidean())
    grads = torch.autograd.grad(m(x).sum(), list(m.parameters()), allow_unused=True)
    without = {name for (name, _), g in zip(m.named_parameters(), grads, strict=True) if g is None}
    assert {name for block in pb.unused.values() for name in block.names} == without


class Sequence(nn.Module):
    """Tokens and their positions, attention, and a bare weight."""

    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe, self.out = nn.Embedding(7, 4), nn.Embedding(32, 4), nn.Linear(4, 3)
        self.w = nn.Parameter(torch.eye(4))

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        return self.out((F.scaled_dot_product_attention(h, h, h) @ self.w).mean(1))


def test_batches_of_any_length_are_probed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for modules and once for operations, in all pullbacks, as long as no two sizes agree by chance."""
    probes: list[Probe] = []
    show = Probe.show

    def counted(self: Probe, rows: Callable[[Tensor], Any]) -> list[Tensor]:
        probes.append(self)
        return show(self, rows)

    monkeypatch.setattr(Probe, "show", counted)
    m = Sequence()
    for n, t in ((5, 6), (5, 9), (11, 13), (6, 19)):
        pb = ng.pullback(m, torch.randint(7, (n, t)), ng.Euclidean())
        assert pb.reasons == {}
    assert len(probes) == 2
    ng.pullback(m, torch.randint(7, (4, 6)), ng.Euclidean())  # as many examples as features
    assert len(probes) == 4
