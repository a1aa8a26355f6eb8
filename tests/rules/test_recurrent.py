"""Recurrent layers: the replay gives every per-example gradient, and K-FAC's factors of time steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from tests.pulled import close, covered, oracle_rows, pull, random_roots, rows
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


KINDS: dict[str, type[nn.RNNBase]] = {"rnn": nn.RNN, "lstm": nn.LSTM, "gru": nn.GRU}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_bias": {"bias": False},
    "two_layers": {"num_layers": 2},
    "both_ways": {"bidirectional": True},
    "deep_both_ways": {"num_layers": 2, "bidirectional": True},
}


def _sequence(kind: type[nn.RNNBase], n: int = 3, t: int = 3, batch_first: bool = True, **options: Any) -> Problem:
    body = kind(2, 2, batch_first=batch_first, **options)
    read = _everything if batch_first else _time_first
    return Problem(Read(body, read, 0 if batch_first else 1), _x(n, t, 2))


def _with_state(kind: type[nn.RNNBase], **options: Any) -> Problem:
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


def _packed(kind: type[nn.RNNBase], lengths: list[int], in_order: bool) -> Problem:
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


def _cases() -> list[Case]:
    cases = []
    for name, kind in KINDS.items():
        for option, given in OPTIONS.items():
            cases.append(Case(f"{name}_{option}", lambda kind=kind, given=given: _sequence(kind, **given)))
        cases.append(Case(f"{name}_time_first", lambda kind=kind: _sequence(kind, batch_first=False, num_layers=2)))
        # As many steps as examples: a shape alone cannot say which is which.
        cases.append(Case(f"{name}_square", lambda kind=kind: _sequence(kind, n=4, t=4, batch_first=False)))
        cases.append(Case(f"{name}_state", lambda kind=kind: _with_state(kind)))
        cases.append(Case(f"{name}_packed_in_order", lambda kind=kind: _packed(kind, [4, 3, 3, 1], True)))
        cases.append(Case(f"{name}_packed", lambda kind=kind: _packed(kind, [2, 4, 1, 3], False)))
    relu: dict[str, Any] = {"nonlinearity": "relu"}
    cases.append(Case("rnn_relu", lambda: _sequence(nn.RNN, **relu)))
    projected: dict[str, Any] = {"num_layers": 2, "bidirectional": True, "proj_size": 1}
    cases.append(Case("lstm_projected", lambda: _sequence(nn.LSTM, **projected)))
    cases.append(Case("lstm_projected_state", lambda: _with_state(nn.LSTM, proj_size=2)))
    for given in (False, True):
        for cell in (nn.RNNCell, nn.LSTMCell, nn.GRUCell):
            build = lambda cell=cell, given=given: Problem(Unrolled(cell(2, 3), given), _x(4, 3, 2))  # noqa: E731
            cases.append(Case(f"{cell.__name__}_{given}", build))
    no_bias = lambda: Problem(Unrolled(nn.RNNCell(2, 3, bias=False, nonlinearity="relu"), True), _x(4, 3, 2))  # noqa: E731
    cases.append(Case("cell_no_bias", no_bias))
    cases.append(Case("chunks", lambda: Problem(Chunks(False), _x(3, 4, 2))))
    cases.append(Case("chunks_detached", lambda: Problem(Chunks(True), _x(3, 4, 2))))
    return cases


CASES = _cases()


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_replay_gives_every_per_example_gradient(case: Case) -> None:
    problem = case.make()
    metric = random_roots(problem)
    pb = pull(problem, metric)
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(problem, metric.s))
