"""S and A of weights that products use more than once, in part, transposed or in stacks, by brute force in float64.

A case is a function of ``use``, the weight and the inputs. It calls ``use(z, a, …)`` for every product z = W a, with
the groups c, outputs o and inputs i of W [c o i] that it has. The brute force takes a and z from there, and one
gradient an example. The library is given the function without ``use``, and sees nothing but operations of torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests.pulled import Rooted, close, normal

IDS = torch.randint(7, (5, 2), generator=torch.Generator().manual_seed(0))
X = normal(5, 2, 4)
SLOTS = torch.tensor([[3, 0, 4, 1, 2], [1, 1, 3, 2, 0]])


def embedding_and_head(use: Any, w: Tensor, tokens: Tensor) -> Tensor:
    h = torch.tanh(use(F.embedding(tokens, w), F.one_hot(tokens, 7).double(), transposed=True, lookup=True))
    return use(h @ w.T, h)


def shared(use: Any, w: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(use(F.linear(x, w), x))
    return use(h @ w.T, h)


def there_and_back(use: Any, w: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(use(F.linear(x, w), x))
    return use(F.linear(h, w.T), h, transposed=True)


def sliced(use: Any, w: Tensor, x: Tensor) -> Tensor:
    return use(F.linear(x, w[:2]), x, o=slice(0, 2)) * use(x @ w[2:4].T, x, o=slice(2, 4))


def sliced_inputs(use: Any, w: Tensor, x: Tensor) -> Tensor:
    left, right = x[..., :2], x[..., 2:]
    return use(F.linear(left, w[:, :2]), left, i=slice(0, 2)) * use(right @ w[:, 2:].T, right, i=slice(2, 4))


def slice_there_and_back(use: Any, w: Tensor, x: Tensor) -> Tensor:
    h = torch.tanh(use(F.linear(x, w[1:3]), x, o=slice(1, 3)))
    return use(h @ w[1:3], h, o=slice(1, 3), transposed=True)


def heads(use: Any, w: Tensor, x: Tensor) -> Tensor:
    z = torch.einsum("hkd,nhd->nhk", w, x)
    return z if use is plain else torch.cat([use(x[:, c : c + 1] @ w[c].T, x[:, c : c + 1], c=c) for c in range(2)], 1)


def layers_of_a_stack(use: Any, w: Tensor, x: Tensor) -> Tensor:
    for c in range(2):
        x = torch.tanh(use(F.linear(x, w[c]), x, c=c))
    return x


def experts(use: Any, w: Tensor, x: Tensor) -> Tensor:
    """Nobody asks the third."""
    which, out = (x[:, 0, 0] > 0).long(), x.new_zeros(5, 2, 3)
    for c in range(2):
        at = (which == c).nonzero().squeeze(1)
        out = out.index_add(0, at, use(F.linear(x[at], w[c]), x[at], c=c))
    return out


def experts_with_a_capacity(use: Any, w: Tensor, x: Tensor) -> Tensor:
    a = x[:, 0][SLOTS]  # [c slot i]
    z = torch.stack([use(a[c] @ w[c].T, a[c], c=c) for c in range(2)]) if use is not plain else torch.bmm(a, w.mT)
    return x.new_zeros(5, 3).index_add(0, SLOTS.flatten(), torch.tanh(z).flatten(0, 1))


def plain(z: Tensor, *_: Any, **__: Any) -> Tensor:
    return z


@dataclass
class Product:
    """z = W a for the groups, outputs and inputs c, o, i of W, or z = Wᵀ a."""

    z: Tensor
    a: Tensor
    c: int = 0
    o: slice = field(default_factory=lambda: slice(None))
    i: slice = field(default_factory=lambda: slice(None))
    transposed: bool = False
    lookup: bool = False


Pair = tuple[Tensor, Tensor]


def brute_force(run: Callable[..., Tensor], w: Tensor, x: Tensor, s: Tensor, sharing: str) -> Pair:
    """S [c o o] and A [c i i] for a root s[k n *out]."""
    products: list[Product] = []

    def use(z: Tensor, a: Tensor, **where: Any) -> Tensor:
        products.append(Product(z, a.detach(), **where))
        return z

    y = run(use, w, x)
    shape = tuple(w.shape) if w.ndim == 3 else (1, *w.shape)
    pairs = [_pair(products, y, s, shape, sharing, flip) for flip in (False, True)]
    present = [
        pair for pair, flip in zip(pairs, (False, True), strict=True) if any(p.transposed == flip for p in products)
    ]
    if len(present) == 1:
        return present[0]
    # One product with the partial traces of Σ S_u ⊗ A_u.
    (S, A), (T, B) = present
    trace_S, trace_A, trace_T, trace_B = (factor.diagonal(0, 1, 2).sum(-1).view(-1, 1, 1) for factor in (S, A, T, B))
    return S * trace_A + T * trace_B, (A * trace_S + B * trace_T) / (trace_S * trace_A + trace_T * trace_B)


def _pair(products: list[Product], y: Tensor, s: Tensor, shape: Any, sharing: str, flip: bool) -> Pair:
    """Of all products with W, or of all with its transpose."""
    c, o, i = shape
    S, A, count = normal(c, o, o) * 0, normal(c, i, i) * 0, [0] * c
    mine = [p for p in products if p.transposed == flip]
    of_inputs, of_outputs = (S, A) if flip else (A, S)

    def wide(t: Tensor, at: slice, size: int) -> Tensor:
        """At its place among all coordinates, zero elsewhere."""
        out = t.new_zeros(*t.shape[:-1], size)
        out[..., at] = t
        return out

    sizes = (o, i) if flip else (i, o)
    for group in range(c):
        of_group = [p for p in mine if p.c == group]
        a = [wide(p.a, p.o if flip else p.i, sizes[0]) for p in of_group]
        if sharing == "reduce" and a:  # the mean over all positions of an example
            a = [torch.cat([t.reshape(len(y), -1, sizes[0]) for t in a], 1).mean(1)]
        for t in a:
            for row in t.reshape(-1, sizes[0]):
                of_inputs[group] += torch.outer(row, row)
                count[group] += 1
        of_inputs[group] /= max(1, count[group])
        if any(p.lookup for p in of_group):  # of one-hot inputs only the diagonal is kept
            of_inputs[group] = of_inputs[group].diagonal().diag()
        for k in range(len(s)):
            for n in range(len(y)):
                grads = (
                    torch.autograd.grad(
                        y[n], [p.z for p in of_group], s[k, n], retain_graph=True, materialize_grads=True
                    )
                    if of_group
                    else ()
                )
                g = [
                    wide(t, p.i if flip else p.o, sizes[1]).reshape(-1, sizes[1])
                    for p, t in zip(of_group, grads, strict=True)
                ]
                if sharing == "reduce" and g:
                    g = [torch.cat(g).sum(0, keepdim=True)]
                for t in g:
                    of_outputs[group] += t.T @ t / len(y)
    return S, A


CASES: dict[str, tuple[Callable[..., Tensor], tuple[int, ...], Tensor, tuple[str, ...]]] = {
    "embedding and head": (embedding_and_head, (7, 4), IDS, ("expand", "reduce")),
    "shared linear": (shared, (4, 4), X, ("expand", "reduce")),
    "transposed": (there_and_back, (3, 4), X, ("expand", "reduce")),
    "sliced": (sliced, (4, 4), X, ("expand", "reduce")),
    "sliced inputs": (sliced_inputs, (3, 4), X, ("expand", "reduce")),
    "a slice and its transpose": (slice_there_and_back, (4, 4), X, ("expand", "reduce")),
    "stacked heads": (heads, (2, 3, 4), X, ("expand", "reduce")),
    "a stack of layers": (layers_of_a_stack, (2, 4, 4), X, ("expand", "reduce")),
    "experts": (experts, (3, 3, 4), X, ("expand",)),
    "experts with a capacity": (experts_with_a_capacity, (2, 3, 4), X, ("expand",)),
}


class Model(nn.Module):
    """A case as the library sees it."""

    def __init__(self, run: Callable[..., Tensor], w: Tensor) -> None:
        super().__init__()
        self.run, self.w = run, nn.Parameter(w)

    def forward(self, x: Tensor) -> Tensor:
        """Torch's operations alone."""
        return self.run(plain, self.w, x)


@pytest.mark.parametrize(
    ("name", "sharing"), [(name, sharing) for name, (*_, sharings) in CASES.items() for sharing in sharings]
)
def test_factors_are_those_of_brute_force(name: str, sharing: Any) -> None:
    run, shape, x, _ = CASES[name]
    model = Model(run, normal(*shape, seed=3))
    y = model(x)
    s = normal(2, *y.shape, seed=4)
    S, A = brute_force(run, model.w, x, s, sharing)
    G = ng.Kronecker(sharing, strict=True).estimate(ng.pullback(model, x, Rooted(s))).tensors()
    for factor, expected in ((G["w/S"], S), (G["w/A"], A)):
        close(factor, expected if factor.ndim == 3 else expected.diagonal(0, 1, 2))
