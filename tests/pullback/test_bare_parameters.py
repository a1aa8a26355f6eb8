"""Parameters outside every layer that are broadcast over the batch: their per-example gradients are exact."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.operators import KroneckerOperator
from natgrad.pullbacks.operation_layers import EntriesRule, ParameterGroup
from tests import oracle, zoo
from tests.optim.tasks import resumes
from tests.pulled import check_rows, close, covered, normal, oracle_rows, pull, random_roots, rows

T, D, N = 4, 3, 5
Run = Callable[["Spreading", Tensor], Tensor]


class Spreading(nn.Module):
    """Two layers around whatever the test does with one parameter. It counts its calls."""

    def __init__(self, run: Run, *shape: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(D, D), nn.Linear(D, 2)
        self.bare = Holder(*shape)
        self.run = run
        self.calls: list[torch.Size] = []

    @property
    def p(self) -> Tensor:
        """The parameter."""
        return self.bare.p

    def forward(self, x: Tensor) -> Tensor:
        """What the test says, and a head."""
        self.calls.append(x.shape)
        return self.head(torch.tanh(self.run(self, self.body(x))))


class Holder(nn.Module):
    """Only holds a parameter."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.randn(shape))


def _flat(m: Spreading, h: Tensor) -> Tensor:
    """Examples and positions on one axis."""
    return (h.flatten(0, 1) * m.p).view_as(h)


def _in_place(m: Spreading, h: Tensor) -> Tensor:
    h = h.clone()
    h += m.p
    return h


# How a parameter of some shape is spread over h [n T D].
SPREAD: dict[str, tuple[tuple[int, ...], Run]] = {
    "positions": ((T, D), lambda m, h: h + m.p),
    "positions with an axis of examples": ((1, T, D), lambda m, h: h + m.p),
    "positions from the left": ((1, T, D), lambda m, h: m.p + h),
    "first positions": ((1, T + 2, D), lambda m, h: h + m.p[:, :T]),
    "last positions": ((T + 2, D), lambda m, h: h + m.p[-T:]),
    "positions the other way": ((D, T), lambda m, h: h + m.p.T),
    "bias": ((D,), lambda m, h: h + m.p),
    "bias in place": ((D,), _in_place),
    "bias with a factor": ((D,), lambda m, h: torch.add(h, m.p, alpha=3)),
    "bias taken away": ((D,), lambda m, h: torch.sub(h, m.p, alpha=2)),
    "minuend": ((D,), lambda m, h: m.p - h),
    "scale": ((D,), lambda m, h: h * m.p),
    "scale from the left": ((D,), lambda m, h: m.p * h),
    "scale of positions": ((T, 1), lambda m, h: h * m.p),
    "scale on one axis": ((D,), _flat),
    "gain": ((), lambda m, h: h * m.p),
    "gain of one": ((1,), lambda m, h: m.p * h),
    "positive gain": ((D,), lambda m, h: h * F.softplus(m.p)),
    "expanded": ((T, D), lambda m, h: h * m.p.expand(h.shape[0], T, D)),
    "repeated": ((1, T, D), lambda m, h: h + m.p.repeat(h.shape[0], 1, 1)),
    "class token": ((1, 1, D), lambda m, h: torch.cat([m.p.expand(h.shape[0], -1, -1), h], dim=1)),
    "many times": ((D,), lambda m, h: torch.tanh(m.p * h + m.p) * (2 * m.p)),
    "residual scale": ((D,), lambda m, h: h + m.p * torch.tanh(h)),
}
# What is not.
OTHERWISE: dict[str, tuple[tuple[int, ...], Run]] = {
    "matrix": ((D, D), lambda m, h: h @ m.p),
    "divisor": ((D,), lambda m, h: h / (1 + m.p.square())),
    "scale and matrix": ((D, D), lambda m, h: (h @ m.p) * m.p[0]),
    "two tokens of one": ((1, 1, D), lambda m, h: torch.cat([m.p.repeat(h.shape[0], 2, 1), h], dim=1)),
    "out of order": ((T, D), lambda m, h: (h.flip(0) + m.p).flip(0)),
}


def problem(kind: str, n: int = N) -> zoo.Problem:
    """A model that spreads its parameter in this way."""
    shape, run = (SPREAD | OTHERWISE)[kind]
    return zoo.Case(kind, lambda: zoo.Problem(Spreading(run, *shape), torch.randn(n, T, D, dtype=torch.float64))).make()


@pytest.mark.parametrize("n", [1, T, N])
@pytest.mark.parametrize("kind", SPREAD)
def test_rows_of_what_is_spread_are_sums_of_cotangents(kind: str, n: int) -> None:
    of = problem(kind, n)
    metric = random_roots(of)
    expected = oracle_rows(of, metric.s)
    model = of.module
    assert isinstance(model, Spreading)
    model.calls.clear()
    pb = pull(of, metric)
    close(rows(pb), expected)
    assert covered(pb) == set(pb.model.params)
    assert model.calls == [torch.Size([n, T, D])]  # one pass, and none for every example


@pytest.mark.parametrize("n", [1, N])
@pytest.mark.parametrize("kind", OTHERWISE)
def test_rows_of_the_others_are_right_too(kind: str, n: int) -> None:
    """Whether a rule covers a parameter does not depend on the number of examples: metrics are averaged over time."""
    of = problem(kind, n)
    check_rows(of)


@pytest.mark.parametrize("kind", SPREAD)
def test_kronecker_has_the_diagonal_of_what_is_spread_once(kind: str) -> None:
    of = problem(kind)
    metric = random_roots(of)
    G = ng.Kronecker(strict=True).estimate(pull(of, metric))
    R = oracle_rows(of, metric.s).flatten(0, 1)
    names = list(oracle.parameters(of.module))
    sizes = [p.numel() for p in oracle.parameters(of.module).values()]
    start = sum(sizes[: names.index("bare.p")])
    own = slice(start, start + of.module.get_parameter("bare.p").numel())
    if kind != "many times":
        close(G.diagonal()[own], R[:, own].square().sum(0))
    block = G.dense()[own, own]
    close(block, torch.diag(block.diagonal()))


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel()], ids=repr)
@pytest.mark.parametrize("kind", ["first positions", "gain", "residual scale", "many times"])
def test_structures_that_are_exact_stay_so(kind: str, structure: Any) -> None:
    of = problem(kind)
    metric = random_roots(of)
    R = oracle_rows(of, metric.s).flatten(0, 1)
    close(structure.estimate(pull(of, metric)).diagonal(), R.square().sum(0))


def test_under_autocast_rows_come_in_single_precision() -> None:
    of = problem("residual scale")
    model = of.module.float()
    assert isinstance(of.x, Tensor)
    x = of.x.float()
    expected = ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean())).diagonal()
    with torch.autocast("cpu", torch.bfloat16):
        G = ng.Kronecker(strict=True).estimate(ng.pullback(model, x, ng.Euclidean()))
    assert G.diagonal().dtype == torch.float32
    assert float((G.diagonal() - expected).norm()) < 0.05 * float(expected.norm())


def test_two_passes_under_one_autocast_have_the_same_layers() -> None:
    """The second reads casts of the weights that the first has made."""
    torch.manual_seed(0)
    v, w = nn.Parameter(torch.randn(3, 4)), nn.Parameter(torch.randn(4, 2))

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.v, self.w = v, w

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.v) @ self.w

    model, x = Bare(), torch.randn(8, 3)
    opt = ng.KFAC(model, ng.Euclidean(), strict=True, metric_every=1)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            model.forward(x)  # which nobody sees
            y, z = model(x), model(x)
        opt.zero_grad()
        (y.float().square().mean() + z.float().square().mean()).backward()
        opt.step()
    assert [(row.names, row.rule) for row in opt.plan().rows] == [(("v",), "Product"), (("w",), "Product")]


# Optimizers


class Vision(nn.Module):
    """A small vision transformer: a class token, positions, LayerScale, dropout, a normalisation."""

    def __init__(self, chance: float = 0.0) -> None:
        super().__init__()
        self.patch = nn.Linear(D, D)
        self.cls, self.positions = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, T + 1, D))
        self.norm, self.mlp = nn.LayerNorm(D), nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Dropout(chance))
        self.gamma = nn.Parameter(torch.randn(D))
        self.head = nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        """Images as patches [n T D] to logits [n 2]."""
        h = torch.cat([self.cls.expand(len(x), -1, -1), self.patch(x)], dim=1) + self.positions
        h = h + self.gamma * self.mlp(self.norm(h))
        return self.head(h[:, 0])


def _vision(chance: float = 0.0) -> zoo.Problem:
    return zoo.Case("vision", lambda: zoo.Problem(Vision(chance), torch.randn(N, T, D, dtype=torch.float64))).make()


def test_nothing_of_a_vision_transformer_falls_back() -> None:
    of = _vision()
    check_rows(of)


@pytest.mark.parametrize("structure", [ng.Kronecker(strict=True), ng.EigenKronecker(strict=True)], ids=repr)
def test_an_optimizer_resumes_with_parameters_that_are_spread(structure: Any) -> None:
    def made() -> tuple[nn.Module, ng.NaturalGradient]:
        model = _vision(0.1).module
        return model, ng.NaturalGradient(
            model, ng.Euclidean(), structure=ng.Refresh(structure, decay=0.9), damping=0.1, lr=0.1
        )

    def step(model: nn.Module, opt: ng.NaturalGradient, seed: int) -> None:
        opt.zero_grad()
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(seed)
            model(normal(N, T, D, seed=seed)).square().sum().backward()
        opt.step()

    resumes(made, step)


def test_an_operator_does_not_hold_the_graph() -> None:
    of = problem("residual scale")
    G = ng.Kronecker().estimate(pull(of, ng.Euclidean()))
    assert isinstance(G, KroneckerOperator)
    ((block, rule),) = [(block, block.rule) for block in G.blocks if isinstance(block.rule, EntriesRule)]
    assert block.names == ("bare.p",)
    assert all(isinstance(m, ParameterGroup) for m in block.modules)
    assert rule.operation is None
    assert rule.operand is None
    assert rule.leaf is None
