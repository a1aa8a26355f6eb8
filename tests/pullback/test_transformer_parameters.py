"""Parameters of ordinary transformers that belong to no layer are spread over the examples, and nothing falls back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import zoo
from tests.optim.tasks import resumes
from tests.pulled import check_rows, close, covered, normal, opaque, oracle_rows, pull, random_roots, rows

N, T, D, H = 5, 4, 6, 2


class Attention(nn.Module):
    """As it is written everywhere: one layer for q, k and v, and a permutation."""

    def __init__(self, fused: bool) -> None:
        super().__init__()
        self.qkv, self.proj, self.fused = nn.Linear(D, 3 * D), nn.Linear(D, D), fused

    def forward(self, x: Tensor) -> Tensor:
        """[n t d] to [n t d]."""
        n, t, d = x.shape
        q, k, v = self.qkv(x).reshape(n, t, 3, H, d // H).permute(2, 0, 3, 1, 4).unbind(0)
        if self.fused:
            x = F.scaled_dot_product_attention(q, k, v)
        else:
            x = (q * (d // H) ** -0.5 @ k.transpose(-2, -1)).softmax(-1) @ v
        return self.proj(x.transpose(1, 2).reshape(n, t, d))


class Own(nn.Module):
    """Attention of torch, as a function of one tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(D, H, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[n t d] to [n t d]."""
        return self.attention(x, x, x, need_weights=False)[0]


class Vision(nn.Module):
    """A vision transformer: patches, a class token, positions, attention, LayerScale, a head."""

    def __init__(self, attention: nn.Module) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, D, 2, 2)
        self.cls, self.pos = nn.Parameter(torch.randn(1, 1, D)), nn.Parameter(torch.randn(1, T + 1, D))
        self.norms = nn.ModuleList(nn.LayerNorm(D) for _ in range(2))
        self.attention, self.mlp = attention, nn.Sequential(nn.Linear(D, D), nn.GELU(), nn.Linear(D, D))
        self.scales = nn.ParameterList(torch.randn(D) for _ in range(2))
        self.head = nn.Linear(D, 3)

    def forward(self, x: Tensor) -> Tensor:
        """Images [n 1 4 4] to logits [n 3]."""
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.cls.expand(len(x), -1, -1), x], 1) + self.pos
        x = x + self.scales[0] * self.attention(self.norms[0](x))
        x = x + self.scales[1] * self.mlp(self.norms[1](x))
        return self.head(x[:, 0])


class Sequence(nn.Module):
    """Positions before a module of torch that hides its layers."""

    def __init__(self, body: nn.Module, first: bool) -> None:
        super().__init__()
        self.embed, self.body, self.head, self.first = nn.Linear(D, D), body, nn.Linear(D, 3), first
        self.pos = nn.Parameter(torch.randn(1, T + 2, D) if first else torch.randn(T + 2, 1, D))

    def forward(self, x: Tensor) -> Tensor:
        """[n t d] to [n 3]."""
        x = self.embed(x)
        x = x + self.pos[:, :T] if self.first else x.transpose(0, 1) + self.pos[:T]
        y: Any = self.body(x)
        return self.head((y[0] if isinstance(y, tuple) else y).mean(1 if self.first else 0))


def _encoder(first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(D, H, 2 * D, dropout=0.0, batch_first=first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "vision, fused": (lambda: Vision(Attention(True)), (1, 4, 4)),
    "vision, by hand": (lambda: Vision(Attention(False)), (1, 4, 4)),
    "vision, of torch": (lambda: Vision(Own()), (1, 4, 4)),
    "encoder": (lambda: Sequence(_encoder(True), True), (T, D)),
    "encoder, positions first": (lambda: Sequence(_encoder(False), False), (T, D)),
    "recurrence": (lambda: Sequence(nn.LSTM(D, D, 2, batch_first=True), True), (T, D)),
    "recurrence, positions first": (lambda: Sequence(nn.GRU(D, D), False), (T, D)),
}


def problem(kind: str, n: int) -> zoo.Problem:
    """A model with n random examples."""
    make, shape = MODELS[kind]
    return zoo.Case(kind, lambda: zoo.Problem(make(), torch.randn(n, *shape, dtype=torch.float64))).make()


@pytest.mark.parametrize("n", [1, T, N])
@pytest.mark.parametrize("kind", MODELS)
def test_nothing_of_a_transformer_falls_back(kind: str, n: int) -> None:
    of = problem(kind, n)
    check_rows(of, 2)


class Masked(nn.Module):
    """One parameter that is added to the examples, and is the mask of an attention as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.attention = nn.Linear(D, D), nn.MultiheadAttention(D, H, batch_first=True)
        self.mask, self.head = nn.Parameter(torch.randn(T, T)), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t d] to [n 2]."""
        x = self.embed(x)
        x = self.attention(x, x, x, attn_mask=self.mask, need_weights=False)[0]
        return self.head((x + self.mask[:, :1]).sum(1))


class Turned(nn.Module):
    """The last states [l n d] of a recurrence with as many layers as examples, read the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.GRU(D, D, 2, batch_first=True), nn.Linear(D, 2)
        self.bias = nn.Parameter(torch.randn(D))

    def forward(self, x: Tensor) -> Tensor:
        """[2 t d] to [2 2]."""
        return self.head(self.rnn(x + self.bias)[1].transpose(0, 1).sum(1))


@pytest.mark.parametrize(("make", "n"), [(Masked, N), (Turned, 2)])
def test_what_is_hidden_in_a_module_is_not_overlooked(make: Callable[[], nn.Module], n: int) -> None:
    of = zoo.Case("hidden", lambda: zoo.Problem(make(), torch.randn(n, T, D, dtype=torch.float64))).make()
    metric = random_roots(of)
    close(rows(pull(of, metric)), oracle_rows(of, metric.s))


class Siblings(nn.Module):
    """Positions that are added, and a matrix that is not, as parameters of one module."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.pos = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(T, D))
        self.gain, self.head = nn.Parameter(torch.randn(D)), nn.Linear(D, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t d] to [n 2]."""
        return self.head(torch.tanh(opaque(x + self.pos, self.mix) * self.gain).mean(1))


def siblings() -> zoo.Problem:
    """The same, in float64."""
    return zoo.Case("siblings", lambda: zoo.Problem(Siblings(), normal(N, T, D))).make()


def test_a_parameter_that_no_operation_shows_leaves_its_siblings_alone() -> None:
    of = siblings()
    metric = random_roots(of)
    pb = pull(of, metric)
    assert covered(pb) == {"pos", "gain", "head.weight", "head.bias"}
    close(rows(pb), oracle_rows(of, metric.s))
    R = oracle_rows(of, metric.s).flatten(0, 1)
    G = ng.BlockDense().estimate(pb).dense()
    own = slice(0, D * D + T * D + D)  # mix, pos and gain stay one block of what is exact
    close(G[own, own], R[:, own].T @ R[:, own])


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker()], ids=repr)
def test_an_optimizer_resumes_with_siblings_apart(structure: Any) -> None:
    def made() -> tuple[nn.Module, ng.NaturalGradient]:
        model = siblings().module
        return model, ng.NaturalGradient(
            model, ng.Euclidean(), structure=ng.Refresh(structure, decay=0.9), damping=0.1, lr=0.1
        )

    def step(model: nn.Module, opt: ng.NaturalGradient, seed: int) -> None:
        opt.zero_grad()
        model(normal(N, T, D, seed=seed)).square().sum().backward()
        opt.step()

    resumes(made, step)
