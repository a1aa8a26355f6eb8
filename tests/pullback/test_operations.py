"""Uses of parameters found by operations: gradients from the uses alone, nothing missed, and factors by brute force."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.pullbacks.operation_layers import EntriesRule, ProductRule
from natgrad.pullbacks.operations import OperationRecorder, missed
from natgrad.pullbacks.row_examples import Probe, RowExamples
from tests.pulled import Rooted, close, normal, opaque, rows

Run = Callable[..., Tensor]


class Of(nn.Module):
    """A function of modules, of parameters with these shapes, and of x."""

    def __init__(self, run: Run, *shapes: tuple[int, ...], of: Sequence[nn.Module] = ()) -> None:
        super().__init__()
        self.of = nn.ModuleList(of)
        self.w = nn.ParameterList(
            torch.randn(shape, generator=torch.Generator().manual_seed(at)) for at, shape in enumerate(shapes)
        )
        self.run = run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """What the test says."""
        return self.run(*self.of, *self.w, x)


class Sub(nn.Linear):
    """A subclass, which inherits."""


def lora(w: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return x @ w + x @ a @ b


def merged(w: Tensor, a: Tensor, b: Tensor, x: Tensor) -> Tensor:
    return x @ (w + a @ b)


def dora(w: Tensor, a: Tensor, b: Tensor, m: Tensor, x: Tensor) -> Tensor:
    v = w + a @ b
    return x @ (m * v / v.norm(dim=0, keepdim=True))


def experts(w: Tensor, x: Tensor) -> Tensor:
    """Two of three experts of a stack, each for the rows that choose it."""
    which = (x[:, 0, 0] > 0).long()
    out = x.new_zeros(*x.shape[:2], w.shape[1])
    for e in range(2):
        at = (which == e).nonzero().squeeze(1)
        out = out.index_add(0, at, F.linear(x[at], w[e]))
    return out


SLOTS = torch.tensor([[3, 0, 4, 1, 2], [1, 1, 3, 2, 0]])  # [expert slot], of which token


def dispatched(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """Every expert has as many slots, each for the token of some example."""
    out = torch.baddbmm(b, x[:, 0][SLOTS], w)  # [expert slot o]
    return x.new_zeros(len(x), 3).index_add(0, SLOTS.flatten(), torch.tanh(out).flatten(0, 1))


def neighbours(w: Tensor, b: Tensor, x: Tensor) -> Tensor:
    """A graph network with a table of neighbours: example n has the nodes x[n]."""
    table = torch.tensor([[1, 2], [0, 3], [3, 0], [2, 1]])
    h = torch.tanh(x.repeat(1, 2, 1) @ w + b)
    return h[:, table].mean(2)


def edges(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """A graph network with a list of edges (from, to, graph): rows are gathered from all graphs."""
    nodes, n = x.flatten(0, 1), len(x)
    source, to = torch.tensor([0, 3, 5, 9, 2, 4, 7]), torch.tensor([1, 2, 4, 8, 3, 5, 6])
    h = torch.zeros(len(nodes), w.shape[0], dtype=x.dtype).index_add(0, to, torch.tanh(F.linear(nodes[source], w)))
    return F.linear(h, v).view(n, -1, v.shape[0])


def masked(w: Tensor, x: Tensor) -> Tensor:
    """A mask token in the place of some positions, as in models of speech."""
    h = torch.tanh(x)
    h[x[..., 0] > 0] = w
    return h * x


def headed(w: Tensor, x: Tensor) -> Tensor:
    """A token in the place of the first."""
    h = torch.tanh(x)
    h[:, 0] = w
    return h * x


def flattened(w: Tensor, x: Tensor) -> Tensor:
    return (x.reshape(-1, x.shape[-1]) @ w).view(*x.shape[:2], -1)


def time_major(w: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(x.transpose(0, 1) @ w).transpose(0, 1)


E, L = nn.Embedding(7, 4, 0), nn.Linear(4, 3)
IDS = torch.randint(7, (5, 2), generator=torch.Generator().manual_seed(0))
X = normal(5, 2, 4)
IMAGE = normal(3, 4, 7, 7)
# The model, its inputs, and the shape [c o i] of every layer.
CASES: dict[str, tuple[Callable[[], nn.Module], Tensor, list[tuple[int, int, int]]]] = {
    "subclass": (lambda: nn.Sequential(Sub(4, 3), nn.ReLU(True)), X, [(1, 3, 5)]),
    "x @ W": (lambda: Of(lambda w, x: x @ w, (4, 3)), X, [(1, 3, 4)]),
    "W @ x and x @ W": (lambda: Of(lambda w, x: w @ (x @ w).mT, (4, 4)), X, [(1, 4, 4)]),
    "F.linear": (lambda: Of(lambda w, b, x: F.linear(x, w, b), (3, 4), (3,)), X, [(1, 3, 5)]),
    "F.linear in time": (
        lambda: Of(lambda w, b, x: F.linear(x.mT.mT, w, b), (3, 4), (3,)),
        X.mT.contiguous().mT,
        [(1, 3, 5)],
    ),
    "Conv1D of transformers": (
        lambda: Of(lambda b, w, x: torch.addmm(b, x.view(-1, 4), w).view(5, 2, 3), (3,), (4, 3)),
        X,
        [(1, 3, 5)],
    ),
    "beside the module": (
        lambda: Of(lambda m, x: F.linear(m(x), m.weight.T), of=[nn.Linear(4, 3)]),
        X,
        [(1, 3, 4), (3, 1, 1)],
    ),
    "slices of W": (
        lambda: Of(lambda w, x: F.linear(x, w[:2]) * F.linear(x, w[2:4]), (4, 4)),
        X,
        [(1, 4, 4)],
    ),
    "slices of the inputs": (
        lambda: Of(lambda w, x: F.linear(x[..., :2], w[:, :2]) * F.linear(x[..., 2:], w[:, 2:]), (3, 4)),
        X,
        [(1, 3, 4)],
    ),
    "einsum": (lambda: Of(lambda w, x: torch.einsum("hdk,btd->bhtk", w, x), (3, 4, 2)), X, [(1, 6, 4)]),
    "einsum by heads": (
        lambda: Of(lambda w, x: torch.einsum("hdk,nhd->nhk", w, x), (2, 4, 3)),
        X,
        [(2, 3, 4)],
    ),
    "heads in one axis": (
        lambda: Of(lambda w, x: torch.einsum("hkd,nhd->nhk", w.view(2, 3, 4), x), (6, 4)),
        X,
        [(2, 3, 4)],
    ),
    "baddbmm": (
        lambda: Of(lambda b, w, x: torch.baddbmm(b, x.transpose(0, 1), w).transpose(0, 1), (2, 1, 3), (2, 4, 3)),
        X,
        [(2, 3, 5)],
    ),
    "experts": (lambda: Of(experts, (3, 3, 4)), X, [(3, 3, 4)]),
    "experts with a capacity": (lambda: Of(dispatched, (2, 4, 3), (2, 1, 3)), X, [(2, 3, 5)]),
    "a matrix an example": (lambda: Of(lambda w, x: torch.bmm(x, w), (5, 4, 3)), X, [(5, 3, 4)]),
    "LoRA": (lambda: Of(lora, (4, 3), (4, 2), (2, 3)), X, [(1, 3, 4), (1, 2, 4), (1, 3, 2)]),
    "LoRA, merged": (lambda: Of(merged, (4, 3), (4, 2), (2, 3)), X, [(12, 1, 1), (8, 1, 1), (6, 1, 1)]),
    "DoRA": (lambda: Of(dora, (4, 3), (4, 2), (2, 3), (1, 3)), X, [(12, 1, 1), (8, 1, 1), (6, 1, 1), (3, 1, 1)]),
    "weight_norm": (
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)).double(),
        X,
        [(3, 1, 1), (3, 1, 1), (12, 1, 1)],
    ),
    "offset of positions": (lambda: Of(lambda w, b, x: x @ w + b, (4, 2), (2, 1)), X, [(1, 2, 4), (2, 1, 1)]),
    "offset of columns": (
        lambda: Of(lambda w, b, x: F.conv2d(x, w, padding=1) + b, (7, 4, 3, 3), (7,)),
        IMAGE,
        [(1, 7, 36), (7, 1, 1)],
    ),
    "offset of experts": (
        lambda: Of(lambda w, b, x: (torch.bmm(x.transpose(0, 1), w) + b).transpose(0, 1), (2, 4, 2), (2, 1, 1)),
        X,
        [(2, 2, 4), (2, 1, 1)],
    ),
    "one bias of all experts": (
        lambda: Of(lambda w, b, x: (torch.bmm(x.transpose(0, 1), w) + b).transpose(0, 1), (2, 4, 3), (3,)),
        X,
        [(2, 3, 4), (3, 1, 1)],
    ),
    "bias of rows": (lambda: Of(lambda w, b, x: (w @ x.mT + b).mT, (2, 4), (2, 1)), X, [(1, 2, 4), (2, 1, 1)]),
    "layer_scale": (lambda: Of(lambda g, x: x + g * torch.tanh(x), (4,)), X, [(4, 1, 1)]),
    "offset in place": (lambda: Of(lambda m, b, x: m(x).add_(b).relu_(), (3,), of=[L]), X, [(1, 3, 5), (3, 1, 1)]),
    "two offsets in place": (
        lambda: Of(lambda w, b, c, x: (x @ w).add_(b).add_(c), (4, 3), (3,), (3,)),
        X,
        [(1, 3, 5), (3, 1, 1)],
    ),
    "numbers of a vector": (lambda: Of(lambda w, x: x @ w[:4] * w[4] + w[5], (6,)), X, [(6, 1, 1)]),
    "one number": (lambda: Of(lambda w, x: w * x, ()), X, [(1, 1, 1)]),
    "row of a matrix": (lambda: Of(lambda w, x: (x @ w) * w[1] + w[2, 0], (4, 4)), X, [(16, 1, 1)]),
    "divisor": (lambda: Of(lambda w, x: x / w, (4,)), X, [(4, 1, 1)]),
    "mask token": (lambda: Of(lambda w, x: torch.where(x > 0, w, x), (4,)), X, [(4, 1, 1)]),
    "mask token in place": (lambda: Of(masked, (4,)), X, [(4, 1, 1)]),
    "class token in place": (lambda: Of(headed, (4,)), X, [(4, 1, 1)]),
    "power": (lambda: Of(lambda w, x: x.square().pow(w), (1,)), X, [(1, 1, 1)]),
    "power in place": (lambda: Of(lambda w, x: x.square().pow_(w), (4,)), X, [(4, 1, 1)]),
    "lerp": (lambda: Of(lambda w, x: torch.lerp(x, x.roll(1, 1), w), (4,)), X, [(4, 1, 1)]),
    "addcmul": (lambda: Of(lambda b, w, x: torch.addcmul(b, x, w, value=2), (4,), (2, 4)), X, [(4, 1, 1), (8, 1, 1)]),
    "addcdiv": (lambda: Of(lambda w, x: torch.addcdiv(x, x, w), (4,)), X, [(4, 1, 1)]),
    "largest": (
        lambda: Of(lambda w, v, x: torch.maximum(torch.minimum(x, w), v), (4,), (1,)),
        X,
        [(4, 1, 1), (1, 1, 1)],
    ),
    "bilinear": (
        lambda: Of(lambda w, b, x: F.bilinear(x[:, :1], x[:, 1:, :3], w, b), (2, 4, 3), (2,)),
        X,
        [(1, 2, 13)],
    ),
    "prelu": (lambda: Of(lambda w, x: F.prelu(x, w), (2,)), X, [(2, 1, 1)]),
    "layer_norm": (lambda: Of(lambda w, b, x: F.layer_norm(x, (4,), w, b), (4,), (4,)), X, [(4, 1, 1), (4, 1, 1)]),
    "class token and ties": (
        lambda: Of(
            lambda e, p, c, i: torch.cat([c.expand(5, 1, 4), e(i) + p], 1) @ e.weight.T, (2, 4), (1, 1, 4), of=[E]
        ),
        IDS,
        [(1, 7, 4), (8, 1, 1), (4, 1, 1)],
    ),
    "F.embedding": (lambda: Of(lambda w, i: F.embedding(i, w), (7, 4)), IDS, [(1, 4, 7)]),
    "indexed": (lambda: Of(lambda w, i: torch.tanh(w[i]), (7, 4)), IDS, [(1, 4, 7)]),
    "conv2d": (
        lambda: Of(lambda w, b, x: F.conv2d(x, w, b, 2, 1, 2, 2), (6, 2, 3, 3), (6,)),
        IMAGE,
        [(2, 3, 19)],
    ),
    "conv_transpose2d": (
        lambda: Of(lambda w, x: F.conv_transpose2d(x, w, stride=2), (4, 6, 3, 3)),
        IMAGE,
        [(1, 54, 4)],
    ),
    "neighbour table": (lambda: Of(neighbours, (4, 3), (3,)), X, [(1, 3, 5)]),
    "edge list": (lambda: Of(edges, (3, 4), (2, 3)), X, [(1, 3, 4), (1, 2, 3)]),
    "flattened": (lambda: Of(flattened, (4, 3)), X, [(1, 3, 4)]),
    "time major": (lambda: Of(time_major, (4, 3)), X, [(1, 3, 4)]),
}
every_case = pytest.mark.parametrize("name", CASES)


def by_hand(model: nn.Module, x: Tensor, s: Tensor) -> Tensor:
    """R [k n p] by one backward pass an example."""
    y, params = model(x), [p for p in model.parameters() if p.requires_grad]
    out = []
    for column in s:
        grads = [torch.autograd.grad(y[n], params, column[n], retain_graph=True) for n in range(len(y))]
        out.append(torch.stack([torch.cat([g.reshape(-1) for g in one]) for one in grads]))
    return torch.stack(out)


@every_case
def test_gradients_come_from_the_uses_alone_and_nothing_is_missed(name: str) -> None:
    """Σ over uses of g aᵀ is autograd's gradient: the check of the tape itself, without layers."""
    make, x, _ = CASES[name]
    model = make().double()
    with OperationRecorder([x]) as recorder:
        y = model(x)
    params = dict(model.named_parameters())
    uses = recorder.uses()
    assert not missed(y, uses, params)
    s = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    cotangents = torch.autograd.grad(y, [use.edge for use in uses], s, retain_graph=True)
    total = {key: torch.zeros_like(p) for key, p in params.items()}
    for use, cotangent in zip(uses, cotangents, strict=True):
        g = use.write(cotangent)
        for operand in use.operands:
            if operand is use.bias or use.read is None:
                own = use.scale * g.sum(0)
            elif use.entrywise:
                own = (g * use.inputs()).sum(0)
            else:
                letters = dict.fromkeys("".join(use.roles))
                order = "".join([*(c for c in "cio" if c not in letters), *letters])
                own = torch.einsum(f"rco,rci->{order}", g, use.inputs())
            own = own.reshape(operand.unexpanded) * (own.numel() / max(1, operand.shape.numel()))
            grads = torch.autograd.grad(
                operand.edge, list(params.values()), own.expand(operand.shape), retain_graph=True, allow_unused=True
            )
            for key, grad in zip(params, grads, strict=True):
                total[key] += 0 if grad is None else grad
    for key, grad in zip(params, torch.autograd.grad(y, list(params.values()), s), strict=True):
        close(total[key], grad)


@every_case
def test_layers_are_packed_by_what_they_compute_and_rows_are_those_of_the_examples(name: str) -> None:
    make, x, shapes = CASES[name]
    model = make().double()
    y = model(x)
    s = torch.randn(2, *y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    pb = ng.pullback(model, x, Rooted(s))
    assert [layer.shape for layer in pb.layers] == shapes
    R = by_hand(model, x, s) / len(y) ** 0.5
    close(rows(pb), R)
    G = torch.einsum("knp,knq->pq", R, R)
    for structure in (ng.Dense(), ng.Kernel()):
        close(structure.estimate(pb).dense(), G)
    close(ng.Diagonal().estimate(pb).diagonal(), G.diagonal())
    ng.Kronecker(strict=True).estimate(pb)
    ng.EigenKronecker(strict=True).estimate(pb)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize(
    ("run", "shapes", "module"),
    [
        (lambda w, b, x: F.linear(x, w, b), [(3, 4), (3,)], lambda: nn.Linear(4, 3)),
        (lambda w, b, x: x @ w.T + b, [(3, 4), (3,)], lambda: nn.Linear(4, 3)),
        (lambda w, b, x: torch.einsum("oi,nti->nto", w, x) + b, [(3, 4), (3,)], lambda: nn.Linear(4, 3)),
        (lambda w, b, x: F.conv1d(x.mT, w, b), [(3, 4, 1), (3,)], lambda: nn.Conv1d(4, 3, 1)),
    ],
)
def test_factors_of_an_operation_are_those_of_the_module(run: Run, shapes: Any, module: Any, sharing: Any) -> None:
    model, layer = Of(run, *shapes), module().double()
    layer.weight.data, layer.bias.data = model.w[0].data, model.w[1].data
    images = isinstance(layer, nn.Conv1d)
    found = ng.Kronecker(sharing, strict=True).estimate(ng.pullback(model, X, ng.Euclidean())).tensors()
    expected = ng.Kronecker(sharing).estimate(ng.pullback(layer, X.mT if images else X, ng.Euclidean())).tensors()
    for side in "SA":
        close(found[f"w.0/{side}"], expected[f"weight/{side}"])


class Blurred(nn.Module):
    """A convolution with a bias, and a ReLU that is off at many pixels; by a module or without."""

    def __init__(self, layer: nn.Conv2d | None, w: Tensor, b: Tensor, groups: int) -> None:
        super().__init__()
        self.layer, self.groups = layer, groups
        if layer is None:
            self.weight, self.bias = nn.Parameter(w), nn.Parameter(b)
        else:
            layer.weight, layer.bias = nn.Parameter(w), nn.Parameter(b)

    def forward(self, x: Tensor) -> Tensor:
        """[n 4 h w] to [n 6]."""
        z = F.conv2d(x, self.weight, self.bias, 2, 1, 2, self.groups) if self.layer is None else self.layer(x)
        return F.max_pool2d(z.relu(), 2).flatten(1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("structure", [ng.Kronecker, ng.EigenKronecker])
def test_factors_of_a_functional_convolution_are_those_of_the_module(structure: Any, groups: int, sharing: Any) -> None:
    layer = nn.Conv2d(4, 6, 3, 2, 1, 2, groups).double()
    w, b = normal(6, 4 // groups, 3, 3), normal(6)
    pair = [ng.pullback(Blurred(each, w, b, groups), IMAGE, ng.Euclidean()) for each in (None, layer)]
    found, expected = (structure(sharing, strict=True).estimate(pb) for pb in pair)
    close(found.dense(), expected.dense())


def test_factors_of_stacked_experts_are_those_of_experts_as_modules() -> None:
    model = Of(experts, (3, 3, 4))
    apart = [nn.Linear(4, 3, bias=False).double() for _ in range(2)]
    for layer, w in zip(apart, model.w[0], strict=False):
        layer.weight.data = w.data
    found = ng.Kronecker(strict=True).estimate(ng.pullback(model, X, ng.Euclidean())).tensors()
    which = (X[:, 0, 0] > 0).long()
    for e, layer in enumerate(apart):
        own = X[which == e]
        expected = ng.Kronecker().estimate(ng.pullback(layer, own, ng.Euclidean())).tensors()
        close(found["w.0/A"][e], expected["weight/A"][0])
        close(found["w.0/S"][e], expected["weight/S"][0] * len(own) / len(X))
    assert not found["w.0/S"][2].any()  # nobody asked the third
    assert not found["w.0/A"][2].any()


MADE: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)),
    "spectral_norm": lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)).eval(),
    "orthogonal": lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 3)),
    "LoRA, merged": CASES["LoRA, merged"][0],
    "DoRA": CASES["DoRA"][0],
}


@pytest.mark.parametrize("name", MADE)
def test_weights_that_are_functions_of_parameters_are_exact_and_diagonal_under_kronecker(name: str) -> None:
    model = MADE[name]().double()
    with torch.no_grad():
        y = model(X)
    s = torch.randn(2, *y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    pb = ng.pullback(model, X, Rooted(s))
    R = by_hand(model, X, s) / len(y) ** 0.5
    G = torch.einsum("knp,knq->pq", R, R)
    for structure in (ng.Dense(), ng.Kernel(), ng.Implicit()):
        close(structure.estimate(pb).dense(), G)
    close(ng.Diagonal().estimate(pb).diagonal(), G.diagonal())
    sizes = [p.numel() for p in model.parameters()]
    blocks = zip(ng.BlockDense().estimate(pb).dense().split(sizes), G.split(sizes), strict=True)
    starts = [sum(sizes[:at]) for at in range(len(sizes))]
    for (found, expected), start, size in zip(blocks, starts, sizes, strict=True):
        close(found[:, start : start + size], expected[:, start : start + size])
    for factored in (ng.Kronecker(strict=True), ng.EigenKronecker(strict=True)):
        close(factored.estimate(pb).dense(), G.diagonal().diag())


def test_lora_that_is_written_as_products_has_the_factors_of_the_merged_weight() -> None:
    """S ⊗ A of W = W₀ + BC is that of W₀; B has S ⊗ CACᵀ, and C has BᵀSB ⊗ A."""
    model = Of(lora, (4, 3), (4, 2), (2, 3))
    _, a, b = (p.detach() for p in model.w)
    plain = Of(lambda w, x: x @ w, (4, 3))
    whole = ng.Kronecker(strict=True).estimate(ng.pullback(plain, X, ng.Euclidean())).tensors()
    found = ng.Kronecker(strict=True).estimate(ng.pullback(model, X, ng.Euclidean())).tensors()
    S, A = whole["w.0/S"][0], whole["w.0/A"][0]
    expected = {"w.0/S": S, "w.0/A": A, "w.1/S": b @ S @ b.T, "w.1/A": A, "w.2/S": S, "w.2/A": a.T @ A @ a}
    for key, factor in expected.items():
        close(found[key][0], factor)


class Experts(nn.Module):
    """Every example goes to the expert that its first number names; experts are a stack, or modules of their own."""

    def __init__(self, stacked: bool) -> None:
        super().__init__()
        stack = normal(3, 3, 4)
        if stacked:
            self.stack = nn.Parameter(stack)
        else:
            self.each = nn.ModuleList(nn.Linear(4, 3, bias=False).double() for _ in range(3))
            for layer, w in zip(self.each, stack, strict=True):
                layer.weight.data = w.clone()
        self.stacked = stacked

    def forward(self, x: Tensor) -> Tensor:
        """Experts that nobody asks are not called."""
        which, x = x[:, 0].long(), x[:, 1:]
        out = x.new_zeros(len(x), 3)
        for e in which.unique().tolist():
            at = (which == e).nonzero().squeeze(1)
            out = out.index_add(0, at, F.linear(x[at], self.stack[e]) if self.stacked else self.each[e](x[at]))
        return out


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC])
def test_an_expert_that_sees_no_token_keeps_its_average(preset: Any) -> None:
    """The averages of a stack are those of modules: unused ones do not decay, and the first estimate counts whole."""
    states = []
    for stacked in (True, False):
        model = Experts(stacked)
        opt = preset(model, ng.Fisher(ng.Gaussian()), lr=0.0, metric_every=1, decay=0.5, damping=0.1)
        for step, experts in enumerate(([0, 2], [1, 1], [0, 1], [2, 2])):
            x = torch.cat([torch.tensor(experts * 3, dtype=torch.float64)[:, None], normal(6, 4) * (1 + step)], dim=1)
            opt.zero_grad()
            model(x).square().sum().backward()
            opt.step()
        states.append(opt.tracker.average.tensors())
    for e in range(3):
        for side in "SA":
            close(states[0][f"stack/{side}"][e], states[1][f"each.{e}.weight/{side}"][0])


def test_a_pure_function_has_the_layers_of_its_operations() -> None:
    params = {"w": normal(3, 4), "b": normal(3), "g": normal(3)}
    pb = ng.pullback(lambda p, x: F.linear(x, p["w"], p["b"]) * p["g"], X, ng.Euclidean(), params=params)
    assert [(layer.names, type(layer.rule)) for layer in pb.layers] == [
        (("w", "b"), ProductRule),
        (("g",), EntriesRule),
    ]
    assert not any(p.requires_grad for p in params.values())
    ng.Kronecker(strict=True).estimate(pb)


IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "pow_ of a parameter": lambda w, x: w.exp().expand(len(x), 4).clone().pow_(x),
    "pow_ by a parameter": lambda w, x: x.exp().pow_(w),
    "lerp_ of a parameter": lambda w, x: w.expand(len(x), 4).clone().lerp_(x, w.sigmoid()),
    "addcmul_": lambda w, x: x.clone().addcmul_(x, w.expand(len(x), 4)),
    "addcdiv_": lambda w, x: x.clone().addcdiv_(x, w.exp().expand(len(x), 4)),
    "div_": lambda w, x: x.clone().div_(w),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_operations_in_place_have_the_metric_of_those_that_are_not(name: str) -> None:
    torch.manual_seed(0)
    w, x = torch.randn(4, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    J = torch.func.jacrev(lambda w: IN_PLACE[name](w, x))(w)  # [n 4 p]
    model = Of(IN_PLACE[name], (4,)).double()
    with torch.no_grad():
        next(model.parameters()).copy_(w)
    G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))
    torch.testing.assert_close(G.dense(), torch.einsum("nop,noq->pq", J, J) / len(x))


STACKED: dict[str, Run] = {
    "rows": lambda w, x: (x[:, :, None] @ w)[:, :, 0],
    "columns": lambda w, x: (w.mT @ x[..., None])[..., 0],
    "in parts": lambda w, x: torch.cat([(x[:, :1, None] @ w[:1])[:, :, 0], (x[:, 1:, None] @ w[1:])[:, :, 0]], 1),
}


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("name", STACKED)
def test_a_stack_that_matmul_broadcasts_has_the_factors_of_einsum(name: str, sharing: Any) -> None:
    runs = (STACKED[name], lambda w, x: torch.einsum("nei,eio->neo", x, w))
    one, other = (
        ng.Kronecker(sharing=sharing, strict=True).estimate(
            ng.pullback(Of(lambda w, x, run=run: run(w, x).tanh(), (2, 4, 3)), X, ng.Euclidean())
        )
        for run in runs
    )
    assert [block.shape for block in one.blocks] == [(2, 3, 4)]
    close(one.dense(), other.dense())


BROADCAST: dict[str, Run] = {
    "and used entry by entry": lambda w, x: (x[:, :, None] @ w)[:, :, 0] * w.sum(),
    "of a function": lambda w, x: (x[:, :, None] @ w.exp())[:, :, 0],
    "along another axis": lambda w, x: (x[:, None, None] @ w[:, None])[:, :, 0, 0],
}


@pytest.mark.parametrize("name", BROADCAST)
def test_other_uses_of_a_stack_that_matmul_broadcasts_are_exact(name: str) -> None:
    model = Of(BROADCAST[name], (2, 4, 3))
    s = normal(2, *model(X).shape)
    R = by_hand(model, X, s) / len(X) ** 0.5
    close(ng.Dense().estimate(ng.pullback(model, X, Rooted(s))).dense(), torch.einsum("knp,knq->pq", R, R))


def test_a_parameter_that_a_function_holds_is_differentiated_where_it_is() -> None:
    """Nothing can be put in its place; the first output, by which one could see it, does not depend on it."""
    held = nn.Parameter(normal(3, 1))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.held = held
            self.run: Run = lambda x: F.linear(x, held.expand(3, 4)).tanh()

        def forward(self, x: Tensor) -> Tensor:
            return F.pad(self.run(x).mean(1), (1, 0))

    model = Model()
    s = torch.eye(4).double()[:, None].expand(4, 5, 4)
    R = by_hand(model, X, s) / len(X) ** 0.5
    close(ng.Dense().estimate(ng.pullback(model, X, Rooted(s))).dense(), torch.einsum("knp,knq->pq", R, R))


def recurrent(zeros: Callable[[Tensor], Tensor], v: Tensor, w: Tensor, x: Tensor) -> Tensor:
    h = zeros(x)
    for t in range(x.shape[1]):
        h = torch.tanh(x[:, t] @ v + h @ w)
    return h


def test_a_first_state_of_zeros_is_data() -> None:
    shapes, made = [(4, 3), (3, 3)], []
    for zeros in (lambda x: x.new_zeros(len(x), 3), lambda x: torch.zeros(len(x), 3, dtype=x.dtype)):
        model = Of(partial(recurrent, zeros), *shapes)
        made.append(ng.Kronecker(strict=True).estimate(ng.pullback(model, X, ng.Euclidean())))
    assert [block.shape for block in made[1].blocks] == [(1, 3, 4), (1, 3, 3)]
    close(made[1].dense(), made[0].dense())


class Folded(nn.Module):
    """A recurrence over characters, with the words of a sentence folded into the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(2, 3, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        words: Tensor = self.lstm(x.flatten(0, 1))[0][:, -1]
        return words.unflatten(0, x.shape[:2]).mean(1)


def test_a_recurrence_over_folded_positions_has_factors(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Folded().double(), normal(2, 3, 4, 2)
    G = ng.Kronecker(strict=True).estimate(ng.pullback(model, x, ng.Euclidean()))
    assert "diagonal" not in caplog.text
    weights = [block for block in G.blocks if "lstm.weight_hh_l0" in block.names]
    assert [block.shape[1] for block in weights] == [12]


def test_products_with_positions_have_a_diagonal_and_say_so(caplog: pytest.LogCaptureFixture) -> None:
    def run(v: Tensor, w: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(x + torch.tanh(torch.arange(2.0).double()[:, None] @ v) @ w)

    model = Of(run, (1, 3), (3, 4))
    s = normal(2, 5, 2, 4)
    R = by_hand(model, X, s) / 5**0.5
    pb = ng.pullback(model, X, Rooted(s))
    close(ng.Kronecker(strict=True).estimate(pb).diagonal(), torch.einsum("knp,knp->p", R, R))
    (message,) = [record.message for record in caplog.records]
    assert re.match(r"w\.1 are multiplied by constants .*a diagonal in place of Kronecker factors.*as inputs", message)


def packed(w: Tensor, x: Tensor) -> Tensor:
    """The tokens that count, of all examples, one after the other."""
    counts = x[..., 0] > 0
    of = torch.arange(len(x))[:, None].expand(x.shape[:2])[counts]
    return x.new_zeros(len(x), 3).index_add(0, of, torch.tanh(x[counts] @ w))


def tokens_masked(w: Tensor, x: Tensor) -> Tensor:
    return (torch.tanh(x @ w) * (x[..., :1] > 0)).sum(1)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_packed_tokens_have_the_factors_of_masked_ones(sharing: Any) -> None:
    """Also where an example has no token that counts."""
    x = normal(5, 4, 4)
    x[..., 0] = x[..., 0].abs()
    x[4, :, 0] *= -1
    one, other = (
        ng.Kronecker(sharing=sharing, strict=True).estimate(ng.pullback(Of(run, (4, 3)), x, ng.Euclidean()))
        for run in (packed, tokens_masked)
    )
    close(one.dense(), other.dense())


EXPANDED: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...], Tensor]] = {
    "product": (lambda w, x: F.linear(x, w.expand(3, 4)).tanh(), (1, 4), X),
    "blur": (lambda w, x: F.conv2d(x, w.expand(4, 1, 3, 3), groups=4).tanh(), (1, 1, 3, 3), IMAGE),
    "of a function": (lambda w, x: F.linear(x, w.exp().expand(3, 4)).tanh(), (1, 4), X),
    "lookup": (lambda w, i: F.embedding(i, w.expand(7, 4)).tanh(), (1, 4), IDS),
    "bias": (lambda w, x: F.linear(x, w[:, :4], w[0, 4:].expand(3)).tanh(), (3, 5), X),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_a_parameter_that_is_expanded_to_a_weight_has_the_exact_metric(name: str) -> None:
    run, shape, x = EXPANDED[name]
    model = Of(run, shape)
    s = normal(2, *model(x).shape)
    R = by_hand(model, x, s) / len(x) ** 0.5
    G = torch.einsum("knp,knq->pq", R, R)
    close(ng.Dense().estimate(ng.pullback(model, x, Rooted(s))).dense(), G)
    close(ng.Kronecker().estimate(ng.pullback(model, x, Rooted(s))).diagonal(), G.diagonal())


def test_what_no_form_knows_is_missed_by_name() -> None:
    model = Of(lambda w, v, x: opaque(x, w) * v.cumsum(0).sort().values, (3, 4), (3,))
    with OperationRecorder([X]) as recorder:
        y = model(X)
    assert missed(y, recorder.uses(), dict(model.named_parameters())) == {"w.0": "OpaqueBackward"}
    lstm = nn.LSTM(4, 3).double()
    with OperationRecorder([X]) as recorder:
        y = lstm(X)[0]
    found = missed(y, recorder.uses(), dict(lstm.named_parameters()))
    assert found.keys() <= dict(lstm.named_parameters()).keys()


def test_an_input_that_is_overwritten_is_refused() -> None:
    def run(w: Tensor, x: Tensor) -> Tensor:
        h = x.clone()
        y = h @ w
        h.zero_()
        return y

    with pytest.raises(ng.errors.NatgradError, match=r"input of the operation product was changed in place.*clone"):
        ng.Kronecker().estimate(ng.pullback(Of(run, (4, 3)), X, ng.Euclidean()))


# The example of every row


def columns(probe: Probe) -> Tensor:
    return torch.stack(list(probe.columns())).unsqueeze(2)


@pytest.mark.parametrize("n", [1, 3, 20, 300])
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_probes_tell_examples_apart_in_every_precision(n: int, dtype: torch.dtype, half: bool) -> None:
    probe = Probe.of(torch.ones(n, 2, dtype=dtype), half)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(0))
    found = probe.examples_of(columns(probe)[:, order].float())
    assert found is not None
    assert torch.equal(found.gather(torch.arange(n)[order].float()).flatten(), torch.arange(n).float())


def test_rows_that_mix_examples_are_those_of_none() -> None:
    probe = Probe.of(torch.ones(4, 2, dtype=torch.float64))
    assert probe.examples_of(columns(probe) + columns(probe).roll(1, 1)) is None


def test_rows_without_cotangents_may_be_of_any_example() -> None:
    probe = Probe.of(torch.ones(4, 2, dtype=torch.float64))
    s = columns(probe)
    s[:, 2] = 0
    assert probe.examples_of(s) == RowExamples(4)


def test_rows_that_are_not_finite_may_be_of_any_example() -> None:
    probe = Probe.of(torch.ones(4, 2, dtype=torch.float64))
    s = columns(probe)
    s[:, 2], s[:, 3] = torch.nan, torch.inf
    assert probe.examples_of(s) == RowExamples(4)


def test_rows_of_rounding_may_be_of_any_example() -> None:
    """The cotangent of a first token's query is a sum that cancels, and what is left of it belongs to no example."""

    def run(w: Tensor, x: Tensor) -> Tensor:
        h = x * w
        return h[:, 1] + 1e-17 * h.sum((0, 1))

    model = Of(run, (4,))
    pb = ng.pullback(model, X, Rooted(normal(2, 5, 4)))
    close(rows(pb), by_hand(model, X, normal(2, 5, 4)) / 5**0.5)
    assert ng.Kronecker(strict=True).estimate(pb).tensors().keys() == {"w.0/S", "w.0/A"}


@pytest.mark.parametrize("rows", [RowExamples(2, before=3), RowExamples(2, index=torch.tensor([0, 1, 0, 1, 0, 1]))])
def test_rows_go_to_their_examples(rows: RowExamples) -> None:
    assert rows.gather(torch.arange(6.0)).tolist() == [[0, 2, 4], [1, 3, 5]]
    assert rows.total(torch.arange(6.0)).tolist() == [6, 9]


def test_ragged_rows_are_padded() -> None:
    examples = RowExamples(3, index=torch.tensor([2, 0, 2]))
    assert examples.gather(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[2, 0], [0, 0], [1, 3]]
    assert examples.gather(torch.ones(3)).tolist() == [[1, 0], [0, 0], [1, 1]]
    assert examples.total(torch.tensor([1.0, 2.0, 3.0])).tolist() == [2, 0, 4]


# Outputs that are flattened over positions


class Talker(nn.Module):
    """A language model with attention; its logits are [n t V], or flattened [n·t V]."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.table, self.mix, self.head = nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7)
        self.flat = flat
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        """Every position sees those before it."""
        h = self.table(tokens)
        h = h + (h @ self.mix(h).mT).tril().softmax(-1) @ h
        logits = self.head(torch.tanh(h.view(-1, 4))).view(*tokens.shape, 7)
        return logits.view(-1, 7) if self.flat else logits


def talkers() -> tuple[Talker, Talker]:
    torch.manual_seed(0)
    whole, flat = Talker(False), Talker(True)
    flat.load_state_dict(whole.state_dict())
    return whole, flat


@pytest.mark.parametrize(
    "structure", [ng.Dense(), ng.Diagonal(), ng.Kronecker(strict=True)], ids=lambda s: type(s).__name__
)
def test_outputs_that_are_flattened_are_those_of_their_examples(structure: Any) -> None:
    whole, flat = talkers()
    metric = ng.Fisher(ng.Categorical())  # of the rows [n·t c]
    expected = structure.estimate(ng.pullback(whole, IDS, ng.Fisher(ng.Categorical(axis=-1))))
    for examples in (None, "inputs"):
        pb = ng.pullback(flat, IDS, metric, examples=examples)
        assert pb.y.shape == (5, 2, 7)
        close(structure.estimate(pb).dense(), expected.dense())


def test_targets_are_flattened_as_outputs_are() -> None:
    whole, flat = talkers()
    target = torch.randint(7, (5, 2), generator=torch.Generator().manual_seed(1))
    metric = ng.GradientCovariance(lambda y, t: F.cross_entropy(y.transpose(-1, -2) if y.ndim > 2 else y, t))
    expected = ng.Diagonal().estimate(ng.pullback(whole, IDS, metric, target=target)).diagonal()
    for examples in (None, "inputs"):
        pb = ng.pullback(flat, IDS, metric, target=target.view(-1), examples=examples)
        close(ng.Diagonal().estimate(pb).diagonal(), expected)


@pytest.mark.parametrize("examples", [None, "inputs"])
def test_an_optimizer_takes_flattened_outputs(examples: Any) -> None:
    whole, flat = talkers()
    options: Any = {"strict": True, "lr": 0.1, "step": ng.SelfTuned(), "metric_every": 2}
    first = ng.KFAC(whole, ng.Fisher(ng.Categorical(axis=-1)), **options)
    second = ng.KFAC(flat, ng.Fisher(ng.Categorical()), **options, examples=examples)

    def train(opt: Any, model: nn.Module) -> None:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = model(IDS).square().mean()
            loss.backward()
            return loss

        opt.step(closure)

    for _ in range(3):
        train(first, whole)
        train(second, flat)
    resumed = ng.KFAC(flat, ng.Fisher(ng.Categorical()), **options, examples=examples)
    resumed.load_state_dict(second.state_dict())
    train(first, whole)
    train(resumed, flat)  # the metric is not due: what the outputs are is known from the state
    for p, q in zip(whole.parameters(), flat.parameters(), strict=True):
        close(q.detach(), p.detach())


def test_rows_that_are_examples_stay_so() -> None:
    model = Of(lambda w, x: torch.tanh(x @ w).flatten(0, 1), (4, 3))
    for structure in (ng.Dense(), ng.Kronecker(strict=True)):
        pb = ng.pullback(model, X, ng.Euclidean())
        assert pb.y.ndim == 2
        assert structure.estimate(pb).dense().isfinite().all()


@pytest.mark.parametrize("spelling", ["x @ W + b", "x @ W"])
def test_operations_that_are_flattened_are_those_of_their_examples(spelling: str) -> None:
    def run(w: Tensor, b: Tensor, x: Tensor, flat: bool) -> Tensor:
        h = x @ w + b if spelling == "x @ W + b" else x @ w * b
        y = torch.softmax(h @ h.mT, -1) @ h
        return y.flatten(0, 1) if flat else y

    for structure in (ng.Dense(), ng.Kronecker(strict=True)):
        whole, flat = (
            structure.estimate(ng.pullback(Of(partial(run, flat=flat), (4, 3), (3,)), X, ng.Euclidean())).dense()
            for flat in (False, True)
        )
        close(flat, whole)


class TimeMajor(Talker):
    """Row t n + r of the outputs is of example r."""

    def forward(self, tokens: Tensor) -> Tensor:
        """Positions first."""
        return super().forward(tokens).transpose(0, 1).reshape(-1, 7)


def test_rows_in_another_order_say_how_to_return_them() -> None:
    torch.manual_seed(0)
    fix = r"10 rows for 5 examples; return outputs \[n t \*out\] with the examples first"
    with pytest.raises(ng.errors.UncoveredError, match=fix):
        ng.Kronecker(strict=True).estimate(ng.pullback(TimeMajor(False), IDS, ng.Euclidean()))


def test_inputs_without_examples_say_what_to_pass() -> None:
    _, flat = talkers()
    scale = torch.ones(2, dtype=torch.float64)  # an input that has no examples
    model = Of(lambda m, x: m(x[0]) * x[1][0], of=[flat])
    with pytest.raises(ng.errors.UncoveredError, match=r'10 rows for 5 examples; pass examples="inputs"'):
        ng.Kronecker(strict=True).estimate(ng.pullback(model, ([IDS, scale],), ng.Euclidean()))


def test_outputs_that_no_example_can_have_are_refused() -> None:
    with pytest.raises(ValueError, match=r'examples="inputs": outputs of 9 rows cannot be given to examples'):
        ng.pullback(Of(lambda w, x: (x @ w).flatten(0, 1)[:9], (4, 3)), X, ng.Euclidean(), examples="inputs")


# Blocks of vision models


class ConvNeXt(nn.Module):
    """A depthwise convolution, channels last, and a scale for every channel."""

    def __init__(self) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(4, 4, 3, padding=1, groups=4), nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.layer_scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        """[n 4 h w] to [n 4 h w]."""
        h = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        return x + (self.layer_scale * self.down(F.gelu(self.up(h)))).permute(0, 3, 1, 2)


class Swin(nn.Module):
    """Attention in shifted windows with a table of relative positions."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.norm = nn.Linear(4, 12), nn.Linear(4, 4), nn.LayerNorm(4)
        self.table = nn.Parameter(normal(9, 2))
        at = torch.stack(torch.meshgrid(torch.arange(2), torch.arange(2), indexing="ij")).flatten(1)
        self.index = ((at[:, :, None] - at[:, None] + 1) * torch.tensor([3, 1])[:, None, None]).sum(0)

    def forward(self, x: Tensor) -> Tensor:
        """[n 4 4 4] to [n 4 4 4], windows of 2 × 2."""
        n = len(x)
        h = torch.roll(self.norm(x.permute(0, 2, 3, 1)), (-1, -1), (1, 2))
        windows = h.view(n, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(-1, 4, 4)
        q, k, v = self.qkv(windows).view(-1, 4, 3, 2, 2).permute(2, 0, 3, 1, 4)
        bias = self.table[self.index.view(-1)].view(4, 4, 2).permute(2, 0, 1)
        out = self.proj(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).reshape(-1, 4, 4))
        out = out.view(n, 2, 2, 2, 2, 4).permute(0, 1, 3, 2, 4, 5).reshape(n, 4, 4, 4)
        return x + torch.roll(out, (1, 1), (1, 2)).permute(0, 3, 1, 2)


class BEiT(nn.Module):
    """Biases of q and v put together with zeros for k, a mask token, and a scale of the residual branch."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj = nn.Linear(4, 12, bias=False), nn.Linear(4, 4)
        self.q_bias, self.v_bias, self.gamma = (nn.Parameter(normal(4, seed=seed)) for seed in range(3))
        self.mask_token, self.cls_token = nn.Parameter(normal(1, 1, 4)), nn.Parameter(normal(1, 1, 4, seed=1))

    def forward(self, x: Tensor) -> Tensor:
        """[n 4 h w] to [n 1 + h·w 4]."""
        x = x.flatten(2).mT
        mask = (x[..., :1] > 0.5).to(x.dtype)
        x = x * (1 - mask) + self.mask_token * mask
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], 1)
        bias = torch.cat([self.q_bias, torch.zeros_like(self.v_bias), self.v_bias])
        q, k, v = F.linear(x, self.qkv.weight, bias).chunk(3, -1)
        return x + self.gamma * self.proj((q @ k.mT).softmax(-1) @ v)


@pytest.mark.parametrize("block", [ConvNeXt, Swin, BEiT])
def test_blocks_of_vision_models_are_covered_whole(block: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = block().double(), normal(3, 4, 4, 4)
    y = model(x)
    s = torch.randn(2, *y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(0))
    pb = ng.pullback(model, x, Rooted(s))
    R = by_hand(model, x, s) / len(y) ** 0.5
    close(rows(pb), R)
    ng.Kronecker(strict=True).estimate(pb)
    G = ng.EigenKronecker(strict=True).estimate(pb)
    close(G.trace(), R.square().sum())
