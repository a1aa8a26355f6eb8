"""Inputs that number other examples: neighbours [n k], edges [n 2]. No example is evaluated without the others."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullbacks.pullback import Batch
from natgrad.pullbacks.rows import number_examples
from natgrad.step.queries import quadratic_forms
from tests import oracle
from tests.optim.tasks import seeded
from tests.pulled import close, normal, opaque


class Graph(nn.Module):
    """A layer, a mean over neighbours, another layer. It refuses fewer examples than there are."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor], first: bool, n: int) -> None:
        super().__init__()
        self.combine, self.first, self.n = combine, first, n
        self.body, self.mix, self.head = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 2)

    def forward(self, x: Tensor, at: Tensor) -> Tensor:
        """[n 3] and [n k] to [n 2]."""
        assert len(x) == self.n, "an example without its neighbours"
        if self.first:
            return self.head(opaque(torch.tanh(self.body(self.combine(x, at))), self.mix))
        return self.head(opaque(self.combine(torch.tanh(self.body(x)), at), self.mix))


COMBINE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "index": lambda h, at: h[at].mean(1),
    "index_select": lambda h, at: h.index_select(0, at[:, 0]) + h,
    "gather": lambda h, at: h.gather(0, at[:, :1].expand_as(h)),
    "embedding": lambda h, at: F.embedding(at, h).sum(1),
    "shifted": lambda h, at: h[(at[:, 1] + 1) % len(h)],
    "edges": lambda h, at: h.index_add(0, at[:, 0], h[at[:, 1]]),
    "scatter": lambda h, at: h + torch.zeros_like(h).scatter_add(0, at[:, :1].expand_as(h), h),
    "degrees": lambda h, at: (
        h / (1 + torch.zeros(len(h), 1).double().index_add_(0, at[:, 0], torch.ones_like(h[:, :1])))
    ),
    "written": lambda h, at: h.clone().index_put_((at[:, 0],), torch.ones_like(h), accumulate=True),
}


def graph(kind: str, first: bool = False, n: int = 6) -> tuple[Graph, tuple[Tensor, Tensor]]:
    model = seeded(lambda: Graph(COMBINE[kind], first, n).double())
    return model, (normal(n, 3), torch.randint(n, (n, 2), generator=torch.Generator().manual_seed(1)))


def jacobian(model: nn.Module, x: tuple[Tensor, ...]) -> Tensor:
    """J [n d p] of all examples together."""
    y = model(*x)
    rows = [torch.autograd.grad(y_d, list(model.parameters()), retain_graph=True) for y_d in y.flatten()]
    return torch.stack([oracle.flatten(row) for row in rows]).view(*y.shape, -1)


@pytest.mark.parametrize("first", [False, True], ids=["after a layer", "before all layers"])
@pytest.mark.parametrize("kind", COMBINE)
def test_the_metric_is_that_of_all_examples_together(kind: str, first: bool) -> None:
    model, x = graph(kind, first)
    J = jacobian(model, x)
    G = oracle.dense(J, oracle.euclidean(model(*x)))
    close(ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense(), G)


@pytest.mark.parametrize("kind", ["index", "edges"])
def test_optimizers_train_such_models(kind: str) -> None:
    model, x = graph(kind)
    for opt in (ng.KFAC(model, ng.Euclidean(), lr=0.01), ng.KFAC(model, ng.Euclidean(), step=ng.SelfTuned())):

        def closure(opt: ng.NaturalGradient = opt) -> Tensor:
            opt.zero_grad()
            loss = model(*x).square().mean()
            loss.backward()
            return loss

        losses = [float(opt.step(closure).detach()) for _ in range(4)]
        assert losses[-1] < losses[0]


def test_a_batch_that_numbers_its_examples_is_not_cut() -> None:
    model, x = graph("index", n=40)
    with pytest.raises(BatchStatisticsError, match=r"integers among the inputs number its examples.*all of them at"):
        ng.functionspace.ntk(model, x, batch=8)


class Adjacent(nn.Module):
    """The neighbours of an example are a row of a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 4)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        """[n 3] and [n n] to [n 4]."""
        return adjacency @ torch.tanh(self.body(x))


def test_a_batch_that_the_model_cannot_see_in_part_is_not_cut() -> None:
    x = (normal(40, 3), normal(40, 40, seed=1))
    with pytest.raises(BatchStatisticsError, match=r"cannot be taken apart: on \d+ of them the model fails \(.*shapes"):
        ng.functionspace.ntk(Adjacent().double(), x, batch=8)


@pytest.mark.parametrize("kind", ["index", "matrix"])
def test_exact_products_of_such_a_batch_are_those_of_all_its_examples(kind: str) -> None:
    model: nn.Module
    x: tuple[Tensor, ...]
    if kind == "index":
        model, x = graph("index", n=100)
    else:
        model, x = seeded(lambda: Adjacent().double()), (normal(100, 3), normal(100, 100, seed=1))
    v = ng.Vector({name: normal(*p.shape) for name, p in model.named_parameters()})
    Jv = jacobian(model, x) @ v.flatten()
    found = quadratic_forms(Batch(Model.of(model), x), ng.Euclidean(), [v], fraction=0.25)
    close(found, (Jv.square().sum() / 100).view(1, 1))


class Tokens(nn.Module):
    """Tokens number rows of a table, and lengths sort the examples: neither numbers examples."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.rnn = nn.Embedding(12, 3), nn.GRU(3, 4, batch_first=True)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """[n t] to [n 4]."""
        h = nn.utils.rnn.pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        return self.rnn(h)[1][0] + self.table.weight[tokens[:, 0], :1]


def test_tokens_and_lengths_do_not_number_examples() -> None:
    tokens = torch.randint(12, (6, 5), generator=torch.Generator().manual_seed(0))
    x = (tokens, torch.tensor([5, 2, 3, 1, 4, 5]))
    assert not number_examples(Model.of(Tokens().double()), x)


# Numbers that the model holds.


class Held(nn.Module):
    """The same network with the numbers in a buffer, in an attribute, or in a collection."""

    def __init__(self, kind: str, where: str, n: int = 6) -> None:
        super().__init__()
        self.graph, (self.x, at) = graph(kind, n=n)
        if where == "buffer":
            self.register_buffer("at", at)
        else:
            self.at = at if where == "attribute" else {"edges": [at]}

    def forward(self, x: Tensor) -> Tensor:
        return self.graph(x, self.at if isinstance(self.at, Tensor) else self.at["edges"][0])


@pytest.mark.parametrize("where", ["buffer", "attribute", "collection"])
@pytest.mark.parametrize("kind", ["index_select", "shifted", "edges", "scatter"])
def test_the_metric_is_that_of_all_examples_together_where_the_model_holds_the_numbers(kind: str, where: str) -> None:
    model = Held(kind, where)
    G = oracle.dense(jacobian(model, (model.x,)), oracle.euclidean(model(model.x)))
    close(ng.Dense().estimate(ng.pullback(model, model.x, ng.Euclidean())).dense(), G)


class Written(nn.Module):
    """The numbers are in the program, where nobody sees them before they are used."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x))[[3, 3, 0, 5, 1, 1]])


def test_the_metric_is_that_of_all_examples_together_where_the_program_has_the_numbers() -> None:
    model, x = seeded(Written).double(), normal(6, 3)
    G = oracle.dense(jacobian(model, (x,)), oracle.euclidean(model(x)))
    close(ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense(), G)


@pytest.mark.parametrize("where", ["buffer", "attribute", "collection"])
def test_no_example_is_alone_where_the_model_holds_the_numbers(where: str) -> None:
    """On a GPU it could not be put right afterwards."""
    model = Held("index", where)
    assert number_examples(Model.of(model), model.x)


def test_a_batch_whose_examples_the_model_numbers_is_not_cut() -> None:
    model = Held("edges", "buffer", n=40)
    with pytest.raises(BatchStatisticsError, match=r"integers of the model do \(a table of neighbours.*at once"):
        ng.functionspace.ntk(model, model.x, batch=8)


@pytest.mark.parametrize("make", [ng.KFAC, ng.EKFAC, ng.NaturalGradient])
def test_optimizers_train_models_that_hold_the_numbers(make: Callable[..., ng.NaturalGradient]) -> None:
    model = Held("shifted", "buffer")
    opt = make(model, ng.Euclidean(), lr=0.01)
    losses = []
    for _ in range(3):
        opt.zero_grad()
        losses.append(model(model.x).square().sum(1).mean() / 2)
        losses[-1].backward()
        opt.step()
    assert losses[-1] < losses[0]


class Positions(nn.Module):
    """Positions of tokens, and heads in another order, number no examples; nor do numbers that the pass makes."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(5, 3), nn.Linear(3, 4)
        self.register_buffer("places", torch.arange(5))
        self.register_buffer("order", torch.tensor([2, 0, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        """[n 5 3] to [n 4]."""
        h = self.body(x + self.table(self.places))[..., self.order].index_select(1, self.places)
        return h[torch.arange(len(h)), h.argmax(1)[:, 0]]


def test_positions_and_numbers_of_the_pass_do_not_number_examples() -> None:
    assert not number_examples(Model.of(Positions().double()), normal(10, 5, 3))
