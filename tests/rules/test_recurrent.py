"""Recurrent layers: the replay gives every per-example gradient, and K-FAC's factors of time steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import chain, combinations
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from natgrad.operators import KroneckerOperator
from natgrad.rules import Call, CellRule, RecurrentRule
from natgrad.rules.base import cotangent_features, input_features
from tests import oracle
from tests.golden import agrees, golden, tensor
from tests.machine import needs_autocast
from tests.pulled import check_rows, close, covered, normal, pull
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
    check_rows(problem)


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
    check_rows(problem)


def test_a_weight_that_is_shared_without_its_bias_is_a_layer_of_its_own() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.GRUCell(2, 2), nn.GRUCell(2, 2)
            self.two.weight_hh = self.one.weight_hh

        def forward(self, x: Tensor) -> Tensor:
            return self.two(x, self.one(x))

    problem = Case("shared", lambda: Problem(Shared(), _x(3, 2))).make()
    pb = check_rows(problem)
    assert ("one.weight_hh",) in [layer.names for layer in pb.layers]


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


# K-FAC of recurrent layers: golden values of Luk and Grosse (2018), (5.3), where it is exact, and what is masked.


CASE = golden("rnn.kfac")


class Golden(nn.Module):
    """z_t = W a_{t−1} + b, a_t = tanh(z_t + V x_t), logits U a_t + c at every step; x [n t 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.given, self.head = nn.Linear(2, 2), nn.Linear(1, 2, bias=False), nn.Linear(2, 2)
        self.start = tensor(CASE["inputs"]["a0"])

    def forward(self, x: Tensor) -> Tensor:
        a, logits = self.start.expand(len(x), -1), []
        for x_t in x.unbind(1):
            a = torch.tanh(self.recurrent(a) + self.given(x_t))
            logits.append(self.head(a))
        return torch.stack(logits, dim=1)


class Fused(nn.Module):
    """The same network with ``nn.RNN``; its second bias is zero, and not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.RNN(1, 2, batch_first=True), nn.Linear(2, 2)
        self.start = tensor(CASE["inputs"]["a0"])

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x, self.start.expand(1, len(x), -1).contiguous())[0])


FACTORED = {
    Golden: {"recurrent.weight": "W", "recurrent.bias": "b", "given.weight": "V"},
    Fused: {"body.weight_hh_l0": "W", "body.bias_hh_l0": "b", "body.weight_ih_l0": "V"},
}


def _golden(kind: type[nn.Module]) -> tuple[nn.Module, Tensor, list[str]]:
    """The model with the golden parameters, its inputs, and the names of W and b."""
    model = kind().double()
    own = FACTORED[kind] | {"head.weight": "U", "head.bias": "c"}
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(tensor(CASE["inputs"][own[name]])) if name in own else p.zero_().requires_grad_(False)
    return model, tensor(CASE["inputs"]["X"]), list(own)[:2]


def _kfac(model: nn.Module, x: Tensor) -> KroneckerOperator:
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1)))
    return ng.Kronecker(strict=True).estimate(pb)


@pytest.mark.parametrize("kind", FACTORED)
def test_factors_are_the_golden_ones(kind: type[nn.Module]) -> None:
    """A is the mean over sequences and times, and S holds the T of Luk and Grosse (2018), (5.3)."""
    model, x, names = _golden(kind)
    agrees(CASE, model(x).detach(), "logits")
    G = _kfac(model, x)
    at = next(at for at, block in enumerate(G.blocks) if set(block.names) == set(names))
    agrees(CASE, G.right[at][0], "A")
    agrees(CASE, G.left[at][0] / CASE["expected"]["T"], "G")


@pytest.mark.parametrize("kind", FACTORED)
def test_block_and_damped_step_are_the_golden_ones(kind: type[nn.Module]) -> None:
    """Our blocks are row-major, S ⊗ A; the golden ones stack columns, T A ⊗ G."""
    model, x, names = _golden(kind)
    G = _kfac(model, x)
    block = next(block for block in G.blocks if set(block.names) == set(names))
    index = block.index.view(2, 3).T.flatten()  # by columns of W̄ = [W b]
    agrees(CASE, G.dense()[index[:, None], index], "F_hat")
    loss = nn.functional.cross_entropy(model(x).flatten(0, 1), torch.tensor(CASE["inputs"]["y"]).flatten())
    ω = ng.differential(model, loss * CASE["expected"]["T"])
    agrees(CASE, block.packed(dict(ω.items()))[0], "grad_Wbar")
    v = ng.sharp(G, ω, damping=CASE["inputs"]["damping"])
    agrees(CASE, block.packed(dict(v.items()))[0], "natgrad_damped")


class Network(nn.Module):
    """Two layers of a recurrence and a head on the last step."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM, **options: Any) -> None:
        super().__init__()
        self.body = kind(2, 3, 2, batch_first=True, **options)  # type: ignore[arg-type]
        self.head = nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x)[0][:, -1])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_kfac_covers_a_recurrence_whole_and_is_positive(kind: type[nn.RNNBase], sharing: Any) -> None:
    problem = Case("kfac", lambda: Problem(Network(kind), normal(5, 4, 2))).make()
    pb = pull(problem, ng.Fisher(ng.Categorical(axis=-1)))
    G = ng.Kronecker(sharing=sharing, strict=True).estimate(pb)
    assert covered(pb) == set(pb.model.params)
    assert G.fallback is None
    values = torch.linalg.eigvalsh(G.dense())
    assert float(values[0]) > -1e-12 * float(values[-1])


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_kfac_is_exact_for_one_datum_and_one_step(kind: type[nn.RNNBase], sharing: Any) -> None:
    problem = Case("one", lambda: Problem(Network(kind), normal(1, 1, 2))).make()
    pb = pull(problem, ng.Fisher(ng.Categorical(axis=-1)))
    exact = oracle.dense(problem.jacobian(), oracle.categorical(problem.outputs()))
    exact = oracle.block_diagonal(exact, [layer.index.tolist() for layer in pb.layers])
    close(ng.Kronecker(sharing=sharing, strict=True).estimate(pb).dense(), exact)


class Outputs(nn.Module):
    """Of a recurrence, without its last state."""

    def forward(self, out: tuple[Tensor, Tensor]) -> Tensor:
        return out[0]


class Lengths(nn.Module):
    """A recurrence on packed sequences, and the sum of its outputs over time."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.GRU(2, 3, batch_first=True), nn.Linear(3, 2)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return self.head(pad_packed_sequence(self.body(packed)[0], batch_first=True)[0].sum(1))


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_steps_after_the_end_of_a_sequence_count_nowhere(sharing: Any) -> None:
    """Other values there, and more of them, change nothing."""
    model = Lengths().double()
    x, lengths = normal(3, 4, 2), torch.tensor([2, 4, 1])
    structure = ng.Kronecker(sharing=sharing, strict=True)
    G = structure.estimate(ng.pullback(model, (x, lengths), ng.Euclidean()))
    beyond = torch.arange(4) >= lengths[:, None]
    changed = torch.where(beyond[:, :, None], 7.0, x)
    close(structure.estimate(ng.pullback(model, (changed, lengths), ng.Euclidean())).dense(), G.dense())
    A = G.right[0][0]
    large = ng.Kronecker(sharing=sharing, largest=1).estimate(ng.pullback(model, (x, lengths), ng.Euclidean()))
    close(large.right[0][0], A.diagonal())
    if sharing == "expand":  # the mean over the steps that are there
        ā = torch.cat([x, x.new_ones(3, 4, 1)], dim=2)[~beyond]
    else:
        ā = torch.stack([torch.cat([row[:t].mean(0), row.new_ones(1)]) for row, t in zip(x, lengths, strict=True)])
    close(A, ā.T @ ā / len(ā))


@pytest.mark.parametrize("fused", [True, False])
def test_steps_whose_units_are_all_off_count_as_the_others(fused: bool) -> None:
    """Behind the ReLU of a recurrence: A is the mean over all steps, though some have no cotangent."""
    body = nn.RNN(2, 3, batch_first=True, nonlinearity="relu") if fused else nn.RNNCell(2, 3, nonlinearity="relu")
    model = (nn.Sequential(body, Outputs(), nn.Linear(3, 2)) if fused else Unrolled(body, given=False)).double()
    W, V, b, c = (p.detach() for p in body.parameters())
    x, before, h = normal(6, 4, 2), [], torch.zeros(6, 3, dtype=torch.float64)
    b.sub_(1.0)
    for x_t in x.unbind(1):
        before.append(h)
        h = F.relu(x_t @ W.T + b + h @ V.T + c)
    assert (h == 0).all(-1).any()
    G = ng.Kronecker(strict=True).estimate(ng.pullback(model, x, ng.Euclidean())).tensors()
    for key, given in (("weight_ih", x.transpose(0, 1)), ("weight_hh", torch.stack(before))):
        a = F.pad(given, (0, 1), value=1.0).flatten(0, 1)
        close(next(t for name, t in G.items() if key in name and name.endswith("/A"))[0], a.T @ a / len(a))


def test_moments_are_those_of_the_inputs() -> None:
    rnn, rule, x = nn.LSTM(2, 3, batch_first=True).double(), RecurrentRule(), normal(4, 5, 2)
    for keys in rule.layers(rnn):
        a = input_features(rule, rnn, keys, Call((x,), {})).dense()
        close(input_features(rule, rnn, keys, Call((x,), {})).moment().total, torch.einsum("nrci,nrcj->cij", a, a))
        close(input_features(rule, rnn, keys, Call((x,), {})).reduced("mean").dense().squeeze(1), a.mean(1))
        assert rule.positions(rnn, keys, Call((x,), {})) == a.shape[1]


@pytest.mark.parametrize(
    ("module", "rule"), [(nn.LSTM(2, 3, proj_size=2), RecurrentRule()), (nn.GRUCell(2, 3), CellRule())]
)
def test_packing_is_undone_by_unpacking(module: nn.Module, rule: RecurrentRule | CellRule) -> None:
    for keys in rule.layers(module):
        block = {key: torch.randn(module.get_parameter(key).shape) for key in keys}
        packed = rule.pack(module, block)
        assert packed.shape == rule.shape(module, keys)
        back = rule.unpack(module, keys, packed.expand(2, *packed.shape))
        assert all(torch.equal(back[key], block[key].expand(2, *block[key].shape)) for key in keys)


def test_dropout_between_layers_is_replayed_by_its_mean() -> None:
    """In training mode the replay is the evaluation of the module."""
    rnn, x = nn.LSTM(2, 3, 3, dropout=0.5).double(), normal(4, 3, 2)
    with torch.no_grad():
        replayed = RecurrentRule().replay(rnn.train(), Call((x,), {}, training=True))
        output, (h, c) = rnn.eval()(x)
    for got, want in zip(replayed.outputs, (output, h, c), strict=True):
        close(got, want)


def test_a_recurrence_in_training_mode_with_dropout_is_covered() -> None:
    torch.manual_seed(0)
    model = Network(dropout=0.3)
    optimizer = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(strict=True), damping=0.1, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 3, 2)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_a_module_with_another_forward_or_other_parameters_is_left_alone() -> None:
    class Other(nn.LSTM):
        """A subclass, which inherits."""

    pruned = nn.GRU(2, 3)
    prune.identity(pruned, "weight_hh_l0")
    assert RecurrentRule().covers(Other(2, 3))
    assert not any(RecurrentRule().covers(module) for module in (pruned, nn.GRUCell(2, 3)))
    assert not any(CellRule().covers(module) for module in (nn.LSTM(2, 3), nn.Linear(2, 3)))


def test_cotangents_of_an_output_alone_are_refused() -> None:
    with pytest.raises(TypeError, match="the cotangents of LSTM are those of its replay"):
        cotangent_features(RecurrentRule(), nn.LSTM(2, 3), ("weight_ih_l0",), torch.ones(1, 2, 3, 3)).dense()


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_single_precision_under_autocast_is_close_to_double(kind: type[nn.RNNBase]) -> None:
    problem = Case("autocast", lambda: Problem(Network(kind), normal(5, 4, 2))).make()
    exact = ng.Kronecker().estimate(pull(problem, ng.Euclidean())).dense()
    model, x = problem.module.float(), normal(5, 4, 2).float()
    needs_autocast(lambda: model(x))
    with torch.autocast("cpu", torch.bfloat16):
        pb = ng.pullback(model, x, ng.Euclidean())
    assert covered(pb) == set(pb.model.params)
    got = ng.Kronecker().estimate(pb).dense()
    assert got.dtype == torch.float32
    assert float((got.double() - exact).norm() / exact.norm()) < 0.05


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_eigenvalues_in_the_basis_of_kfac_keep_the_trace(kind: type[nn.RNNBase]) -> None:
    problem = Case("trace", lambda: Problem(Network(kind), normal(5, 4, 2))).make()
    exact = oracle.dense(problem.jacobian(), oracle.euclidean(problem.outputs())).trace()
    close(ng.EigenKronecker(strict=True).estimate(pull(problem, ng.Euclidean())).dense().trace(), exact)
