"""The batch axis is read off cotangents: an axis that the probe shows keeps the examples apart."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.model import Model
from natgrad.pullbacks.batch_axis import find_batch_axes, survey
from natgrad.pullbacks.pullback import layers_of
from natgrad.pullbacks.row_examples import BatchAxis
from natgrad.pullbacks.tape import record
from tests.pulled import normal

N, T, D, H = 5, 4, 6, 2
Run = Callable[[Tensor], Tensor]


class Watched(nn.Module):
    """A layer of every position, and a function of what it returns."""

    def __init__(self, run: Run) -> None:
        super().__init__()
        self.layer, self.run = nn.Linear(D, D), run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.run(self.layer(x))


def axis_of(run: Run, x: Tensor) -> BatchAxis | None:
    """Where a layer has its examples, of which the outputs are a function."""
    torch.manual_seed(0)
    model = Model.of(Watched(run))
    tape = record(model, layers_of(model), x)
    axes = find_batch_axes(tape, survey(tape.y))
    return None if axes.missing else axes.axes.get(0, BatchAxis(0))


def separates(axis: BatchAxis, x: Tensor, y: Tensor) -> bool:
    """Whether output n depends on the entries of example n alone."""
    n = y.shape[0]
    size = x.shape[axis.index]
    example = (torch.arange(size) // (size // (axis.before * n))) % n
    for at in range(n):
        (g,) = torch.autograd.grad(y[at].sum(), x, retain_graph=True)
        if g.movedim(axis.index, 0)[example != at].any():
            return False
    return True


def _einsum(x: Tensor) -> Tensor:
    q, k = x.view(*x.shape[:2], H, -1).permute(2, 0, 1, 3), x.view(*x.shape[:2], H, -1)
    return torch.einsum("hntd,nshd->nhts", q, k).softmax(-1)


def _heads(x: Tensor) -> Tensor:
    q, k, v = torch.cat([x, x, x], -1).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4).unbind(0)
    return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape)


def _by_hand(x: Tensor) -> Tensor:
    q, k, v = torch.cat([x, x, x], -1).view(*x.shape[:2], 3, H, -1).permute(2, 0, 3, 1, 4)
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).transpose(1, 2).flatten(2)


def _layer(x: Tensor) -> Tensor:
    return (x.reshape(-1, D) @ normal(D, 2)).view(*x.shape[:2], 2)


# Of x [N T D]: the examples of x are on this axis.
APART: dict[str, tuple[BatchAxis, Run]] = {
    "attention": (BatchAxis(0), _heads),
    "attention by hand": (BatchAxis(0), _by_hand),
    "einsum": (BatchAxis(0), _einsum),
    "a layer on (position, example)": (BatchAxis(0), lambda x: _layer(x.transpose(0, 1)).transpose(0, 1)),
    "stack, sum, select": (BatchAxis(0), lambda x: torch.stack([x, x.square()]).sum(0, keepdim=True)[0].mean(-1)),
    "cat, split, slice": (BatchAxis(0), lambda x: torch.cat([x, x.flip(1)], 1).split(3, 1)[1][:, 1:]),
    "roll of positions": (BatchAxis(0), lambda x: x.roll(1, 1)),
    "token shift": (BatchAxis(0), lambda x: F.pad(x, (0, 0, 1, -1))),
    "norm": (BatchAxis(0), lambda x: F.layer_norm(x, (D,)) / x.norm(dim=-1, keepdim=True)),
    "norm of positions": (BatchAxis(0), lambda x: F.layer_norm(x, (T, D))),
    "largest": (BatchAxis(0), lambda x: x.max(1)[0] + x.amax(1) - x.logsumexp((1,))),
    "squeezed": (BatchAxis(0), lambda x: x.unsqueeze(0).unsqueeze(-1).squeeze(0).squeeze()),
    "pixels": (BatchAxis(0), lambda x: F.unfold(x.unsqueeze(1), 2).transpose(1, 2)),
    "product on the right": (BatchAxis(0), lambda x: (normal(2, D) @ x[:, 0].T).T),
    "second axis": (BatchAxis(1), lambda x: x.transpose(0, 1)[:4].softmax(1)),
    "half of the second axis": (BatchAxis(1), lambda x: (x.flatten(0, 1) * 2).view(N, 2, 2 * D).transpose(0, 1)),
    "every second of an axis": (BatchAxis(1, 2), lambda x: (x.flatten(0, 1) * 2).view(N, 2, 2, D).permute(2, 0, 1, 3)),
}
# Examples that change places or influence each other.
TOGETHER: dict[str, Run] = {
    "flipped": lambda x: x.flip(0),
    "flipped behind a transpose": lambda x: x.transpose(0, 1).flip(1).transpose(0, 1),
    "rolled": lambda x: x.roll(1, 0),
    "shifted by padding": lambda x: F.pad(x, (0, 0, 0, 0, 1, -1)),
    "mean of the batch": lambda x: x - x.mean(0),
    "softmax over the batch": lambda x: x.transpose(0, 1).softmax(1).transpose(0, 1),
    "similarities": lambda x: x.flatten(1) @ x.flatten(1).T,
    "normalised over all": lambda x: F.layer_norm(x, tuple(x.shape)),
    "batch statistics": lambda x: F.batch_norm(x, None, None, training=True),
    "two axes for one": lambda x: x + x[:, :1].transpose(0, 1).reshape(1, N, D).expand(N, N, D)[:, :T],
    "two ways": lambda x: x[:, :1] + x.flip(0),
    "sorted": lambda x: x[x[:, 0, 0].argsort()],
    "mixed by a reshape": lambda x: x.permute(1, 0, 2).reshape(N, T, D),
    "transposed square": lambda x: x[:, :1].expand(N, N, D).transpose(0, 1) * 1,
}  # fmt: skip


@pytest.mark.parametrize("kind", APART)
def test_an_axis_that_is_shown_keeps_the_examples_apart(kind: str) -> None:
    expected, run = APART[kind]
    x = normal(N, T, D)
    assert axis_of(run, x) == expected
    x.requires_grad_()
    assert separates(expected, x, run(x))


@pytest.mark.parametrize("kind", TOGETHER)
def test_no_axis_is_shown_of_examples_that_move_or_meet(kind: str) -> None:
    assert axis_of(TOGETHER[kind], normal(N, T, D)) is None
