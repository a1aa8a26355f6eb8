"""Language models whose head is their embedding, and the two products of that weight from the textbook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn

from natgrad.operators import Operator
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
