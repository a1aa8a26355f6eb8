"""Recurrent layers: the replay gives every per-example gradient, and K-FAC's factors of time steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from tests import oracle
from tests.pulled import close, covered, normal, oracle_rows, pull, random_roots, rows
from tests.zoo import Case, Problem


def _x(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Read(nn.Module):
    """A recurrence between two Linear layers, and what is read of what it returns, [n ·]."""

    def __init__(self, body: nn.Module, read: Callable[[Any], Tensor], examples: int = 0) -> None:
        super().__init__()
        self.first, self.body, self.read = nn.Linear(2, 2), body, read
        self.examples = examples

    def forward(self, x: Tensor, *state: Tensor) -> Tensor:
        """x is [n t 2]; states are [n layer h], as examples are on the first axis of inputs."""
        x = torch.tanh(self.first(x))
        if self.examples:
            x = x.transpose(0, self.examples)
        given = [s.transpose(0, 1).contiguous() for s in state]
        out = self.body(x, *([tuple(given)] if len(given) == 2 else given))
        return self.read(out)


def _everything(out: Any) -> Tensor:
    """All tensors of the output, weighted so that no two of them have the same cotangents: [n t h] and states."""
    output, state = out
    states = state if isinstance(state, tuple) else (state,)
    flat = [output.flatten(1), *(0.7 * s.transpose(0, 1).flatten(1) for s in states)]
    return torch.cat(flat, dim=1).square()


def _time_first(out: Any) -> Tensor:
    return _everything((out[0].transpose(0, 1), out[1]))


Kind = Callable[..., nn.RNNBase]
KINDS: dict[str, Kind] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "two_layers": {"num_layers": 2},
    "both_ways": {"bidirectional": True},
    "deep_both_ways": {"num_layers": 2, "bidirectional": True},
}


def _sequence(kind: Kind, n: int = 3, t: int = 3, batch_first: bool = True, **options: Any) -> Problem:
    body = kind(2, 2, batch_first=batch_first, **options)
    read = _everything if batch_first else _time_first
    return Problem(Read(body, read, 0 if batch_first else 1), _x(n, t, 2))


def _with_state(kind: Kind, **options: Any) -> Problem:
    body = kind(2, 3, num_layers=2, bidirectional=True, batch_first=True, **options)
    h = _x(3, 4, options.get("proj_size", 3))
    state = (h, _x(3, 4, 3)) if kind is nn.LSTM else (h,)
    return Problem(Read(body, _everything), (_x(3, 2, 2), *state))


class Packed(nn.Module):
    """Sequences of different lengths, packed on the way in and padded on the way out."""

    def __init__(self, body: nn.Module, in_order: bool) -> None:
        super().__init__()
        self.first, self.body, self.in_order = nn.Linear(2, 2), body, in_order

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        """x [n t 2] and lengths [n]."""
        packed = pack_padded_sequence(torch.tanh(self.first(x)), lengths, True, enforce_sorted=self.in_order)
        out, state = self.body(packed)
        return _everything((pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])[0], state))


def _packed(kind: Kind, lengths: list[int], in_order: bool) -> Problem:
    body = kind(2, 2, num_layers=2, bidirectional=True)
    return Problem(Packed(body, in_order), (_x(len(lengths), 4, 2), torch.tensor(lengths)))


class Unrolled(nn.Module):
    """A cell that is called once a time step."""

    def __init__(self, cell: nn.Module, given: bool) -> None:
        super().__init__()
        self.cell, self.head, self.given = cell, nn.Linear(3, 2), given

    def forward(self, x: Tensor) -> Tensor:
        """x [n t 2]."""
        state: Any = None
        if self.given:
            start = x.new_full((x.shape[0], 3), 0.3)
            state = (start, start) if isinstance(self.cell, nn.LSTMCell) else start
        outputs = []
        for x_t in x.unbind(1):
            state = self.cell(x_t, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, dim=1)


class Chunks(nn.Module):
    """Truncated backpropagation: the state of one call is where the next one starts, without its gradient or with."""

    def __init__(self, detached: bool) -> None:
        super().__init__()
        self.body, self.head, self.detached = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2), detached

    def forward(self, x: Tensor) -> Tensor:
        """x [n t 2], two steps at a time."""
        state, outputs = None, []
        for part in x.split(2, dim=1):
            out, state = self.body(part, state)
            outputs.append(self.head(out))
            state = state.detach() if self.detached else state
        return torch.cat(outputs, dim=1)


class Alone(nn.Module):
    """One sequence, or one step, without a batch."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        """The only example of x, with a state of ones."""
        shape = (3,) if isinstance(self.body, nn.LSTMCell) else (4, 3)
        out, state = self.body(x[0], (x.new_ones(shape), x.new_ones(shape)))
        tensors = (out, state) if isinstance(state, Tensor) else (out, *state)
        return torch.cat([t.flatten() for t in tensors]).square().unsqueeze(0)


def _steps(cell: Callable[..., nn.Module], given: bool = True, **options: Any) -> Problem:
    return Problem(Unrolled(cell(2, 3, **options), given), _x(4, 3, 2))


def _cases() -> Iterator[Case]:
    for name, kind in KINDS.items():
        for option, given in OPTIONS.items():
            yield Case(f"{name}_{option}", partial(_sequence, kind, **given))
        yield Case(f"{name}_time_first", partial(_sequence, kind, batch_first=False, num_layers=2))
        # As many steps as examples: a shape alone cannot say which is which.
        yield Case(f"{name}_square", partial(_sequence, kind, n=4, t=4, batch_first=False))
        yield Case(f"{name}_state", partial(_with_state, kind))
        yield Case(f"{name}_packed_in_order", partial(_packed, kind, [4, 3, 3, 1], True))
        yield Case(f"{name}_packed", partial(_packed, kind, [2, 4, 1, 3], False))
    yield Case("rnn_relu", partial(_sequence, nn.RNN, nonlinearity="relu"))
    yield Case("lstm_projected", partial(_sequence, nn.LSTM, num_layers=2, bidirectional=True, proj_size=1))
    yield Case("lstm_projected_state", partial(_with_state, nn.LSTM, proj_size=2))
    for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
        yield Case(f"{cell.__name__}", partial(_steps, cell, given=False))
        yield Case(f"{cell.__name__}_state", partial(_steps, cell))
    yield Case("cell_no_bias", partial(_steps, nn.RNNCell, bias=False, nonlinearity="relu"))
    yield Case("chunks", lambda: Problem(Chunks(False), _x(3, 4, 2)))
    yield Case("chunks_detached", lambda: Problem(Chunks(True), _x(3, 4, 2)))
    yield Case("one_sequence", lambda: Problem(Alone(nn.LSTM(2, 3, 2, bidirectional=True)), _x(1, 4, 2)))
    yield Case("one_step", lambda: Problem(Alone(nn.LSTMCell(2, 3)), _x(1, 2)))


CASES = list(_cases())


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_replay_gives_every_per_example_gradient(case: Case) -> None:
    problem = case.make()
    metric = random_roots(problem)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(problem, metric.s))


NAMES = ("weight_ih_l0", "weight_hh_l0", "bias_ih_l0", "bias_hh_l0")
SUBSETS = list(chain.from_iterable(combinations(NAMES, size) for size in range(1, 4)))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("trained", SUBSETS, ids=["+".join(names) for names in SUBSETS])
def test_every_subset_of_the_parameters_may_be_frozen(trained: tuple[str, ...], kind: Kind) -> None:
    def build() -> Problem:
        problem = _sequence(kind, n=2, t=2)
        for name, p in problem.module.body.named_parameters():  # type: ignore[union-attr]
            p.requires_grad_(name in trained)
        return problem

    problem = Case("frozen", build).make()
    metric = random_roots(problem)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(problem, metric.s))


def test_a_weight_that_is_shared_without_its_bias_is_a_layer_of_its_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.GRUCell(2, 2), nn.GRUCell(2, 2)
            self.two.weight_hh = self.one.weight_hh

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x, self.one(x))

    problem = Case("shared", lambda: Problem(Shared(), _x(3, 2))).make()
    metric = random_roots(problem)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    assert ("one.weight_hh",) in [layer.names for layer in pb.layers]
    close(rows(pb), oracle_rows(problem, metric.s))


def test_a_sequence_without_a_batch_is_never_taken_for_many_examples() -> None:
    """Outputs [t h] of one sequence, used as t examples: they depend on each other, and no rule speaks for them."""
    model = nn.Sequential(nn.RNN(2, 3, batch_first=True), Take(), nn.Linear(3, 1)).double()
    x = normal(4, 2)
    pb = ng.pullback(model, x, ng.Euclidean())
    assert covered(pb) == {"2.weight", "2.bias"}
    alone = torch.stack([oracle.differential(model, y) for y in model(x)[:, 0]])
    close(ng.Dense().estimate(pb).dense(), alone.T @ alone / 4)


class Take(nn.Module):
    """The outputs of a recurrence without its state."""

    def forward(self, out: Any) -> Tensor:
        return out[0]
