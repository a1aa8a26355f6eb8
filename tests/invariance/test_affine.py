"""Networks in other affine bases compute the same function: Luk and Grosse (2018), eq. 2.11, 3.3, 3.4."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.errors import IncompatibleError
from natgrad.invariance import Change, Chosen, Coordinates, Original, Random, Space, reparametrise
from tests.golden import agrees, golden, tensor
from tests.invariance.reference import TASKS, Cells, Recurrent, Task, convolutional
from tests.pulled import close, normal
from tests.zoo import Attention, CalledTwice, Tied, TiedEmbedding, WeightOutside, mlp


class Residual(nn.Module):
    """x + f(x), then a readout: two layers read the same activations."""

    def __init__(self) -> None:
        super().__init__()
        self.f, self.norm, self.out = mlp(3, 4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(x + self.f(x)))


class Sequences(nn.Module):
    """The outputs and all last states of a recurrent module, from given first states."""

    def __init__(self, rnn: nn.RNNBase) -> None:
        super().__init__()
        self.rnn = rnn

    def forward(self, x: Tensor, start: tuple[Tensor, ...] | Tensor | None = None) -> Tensor:
        y, states = self.rnn(x) if start is None else self.rnn(x, start)
        return torch.cat([t.flatten() for t in (y, *(states if isinstance(states, tuple) else (states,)))])


def twice() -> nn.Sequential:
    layer = nn.Linear(3, 3)
    return nn.Sequential(layer, nn.ReLU(inplace=True), layer)


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "one layer": (lambda: nn.Linear(3, 2), (3,)),
    "no bias": (lambda: nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2)), (3,)),
    "no bias after": (lambda: nn.Sequential(nn.Linear(3, 4), nn.ReLU(inplace=True), nn.Linear(4, 2, bias=False)), (3,)),
    "called twice": (CalledTwice, (3,)),
    "registered twice": (twice, (3,)),
    "tokens": (lambda: mlp(3, 4, 2), (5, 3)),
    "max-pooling": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 3), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(12, 2)),
        (2, 6, 6),
    ),
    "same padding": (lambda: nn.Conv2d(2, 3, (2, 3), padding="same", dilation=2), (2, 5, 4)),
    "reflected": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="reflect"), (2, 5, 4)),
    "circular": (lambda: nn.Conv1d(2, 3, 3, padding=1, padding_mode="circular"), (2, 5)),
    "one dimension": (lambda: nn.Conv1d(2, 3, 4, stride=2, padding=3), (2, 7)),
    "three dimensions": (lambda: nn.Conv3d(2, 3, 2, padding=(1, 0, 2)), (2, 3, 3, 3)),
    "groups": (
        lambda: nn.Sequential(nn.Conv2d(4, 6, 3, padding=1, groups=2), nn.Tanh(), nn.Conv2d(6, 2, 1)),
        (4, 4, 4),
    ),
    "depthwise": (lambda: nn.Conv2d(3, 6, 3, padding=1, groups=3), (3, 4, 4)),
    "relu rnn": (lambda: Recurrent(nn.RNN(2, 3, nonlinearity="relu", batch_first=True)), (4, 2)),
    "two layers, two directions": (lambda: Sequences(nn.RNN(2, 3, 2, bidirectional=True)), (4, 2)),
    "lstm": (lambda: Sequences(nn.LSTM(2, 3, 2, batch_first=True, bidirectional=True)), (4, 2)),
    "gru": (lambda: Sequences(nn.GRU(2, 3, 2, bias=False, batch_first=True, bidirectional=True)), (4, 2)),
    "linear cells": (Cells, (4, 2)),
    **{name: (task.build, task.shape) for name, task in TASKS.items()},
}


@pytest.mark.parametrize("name", NETWORKS)
def test_the_transformed_network_computes_the_same_function(name: str) -> None:
    build, shape = NETWORKS[name]
    model, x = Task(build, shape).model(), normal(5, *shape)
    y = model(x).detach()
    original = reparametrise(model, Original())
    close(original(x).detach(), y, 1e-14)
    for seed in (0, 1):
        other = reparametrise(model, seed)
        close(other(x).detach(), y, 1e-12)
        for before, after in zip(original.parameters(), other.parameters(), strict=True):
            assert float((before - after).detach().abs().max()) > 1e-2  # every parameter is another one
    assert torch.equal(model(x), y)  # the model itself is left alone


@pytest.mark.parametrize("rnn", [nn.RNN(2, 3, 2, bidirectional=True), nn.LSTM(2, 3, 2), nn.GRU(2, 3, batch_first=True)])
def test_first_states_that_are_given_are_in_the_original_basis(rnn: nn.RNNBase) -> None:
    model, x = Sequences(rnn).double(), normal(4, 4, 2)
    starts = [normal(rnn.num_layers * (1 + rnn.bidirectional), 4, 3, seed=seed) for seed in (1, 2)]
    start = tuple(starts) if isinstance(rnn, nn.LSTM) else starts[0]
    close(reparametrise(model, 1)(x, start).detach(), model(x, start).detach(), 1e-12)


def test_every_layer_reads_transformed_activations_and_gives_transformed_preactivations() -> None:
    """a† = Ωa + γ and z = Φz† + τ; between two layers that is a† = Ω φ(Φz† + τ) + γ (Luk and Grosse 2018, eq. 3.4)."""
    model, x = mlp(3, 4, 2).double(), normal(6, 3)
    bases = {
        name: Random(2).of(name, Space(1, layer.in_features), Space(1, layer.out_features))
        for name, layer in model.named_children()
        if isinstance(layer, nn.Linear)
    }
    other = reparametrise(model, Chosen(bases))
    inside: list[tuple[Tensor, Tensor]] = []
    for module in other.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(lambda m, args, z: inside.append((args[0].detach(), z.detach())))
    other(x)
    (Ω0, Φ1), (Ω1, Φ2) = ((c.inputs, c.outputs) for c in bases.values())
    W1, b1, W2, b2 = (p.detach() for p in model.parameters())
    z1 = x @ W1.T + b1
    (a0_dagger, z1_dagger), (a1_dagger, z2_dagger) = inside
    close(a0_dagger, x @ Ω0.matrix[0].T + Ω0.shift)
    close(z1_dagger @ Φ1.matrix[0].T + Φ1.shift, z1)
    close(a1_dagger, torch.tanh(z1_dagger @ Φ1.matrix[0].T + Φ1.shift) @ Ω1.matrix[0].T + Ω1.shift)
    close(z2_dagger @ Φ2.matrix[0].T + Φ2.shift, z1.tanh() @ W2.T + b2)


def test_zero_padding_becomes_padding_with_γ() -> None:
    case = golden("conv.affine_padding")
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    layer = nn.Conv2d(2, 2, 3, padding=1).double()
    layer.weight.data.copy_(inputs["W"].view(2, 2, 3, 3))
    layer.bias.data.copy_(inputs["b"])  # type: ignore[union-attr]
    change = Change(inputs["Omega"][None], inputs["gamma"][None])
    other = reparametrise(layer, Chosen({"": Coordinates(change, Change.scaled(Space(1, 2)))}))
    a = inputs["A"][None]
    agrees(case, other(a)[0].flatten(1).T.detach(), "Z")
    inner = next(m for m in other.modules() if isinstance(m, nn.Conv2d))
    weight, bias = (p.detach() for p in inner.parameters())
    agrees(case, weight.flatten(1), "W_dagger")
    agrees(case, bias, "b_dagger")
    transformed = torch.einsum("oi,nihw->nohw", inputs["Omega"], a) + inputs["gamma"].view(-1, 1, 1)
    wrong = (F.conv2d(transformed, weight, bias, padding=1) - other(a)).detach().abs()
    agrees(case, wrong.max(), "max_diff_zero_padding")
    assert float(wrong[0, :, 1, 1].max()) < 1e-12


def test_the_first_state_of_a_recurrent_network_is_transformed_too() -> None:
    """The network of the paper in its own coordinates: V† = Φ⁻¹V, W† = Φ⁻¹WΩ⁻¹ and a_0† = Ωa_0 + γ."""
    rnn, x = nn.RNN(2, 3, batch_first=True).double(), normal(5, 4, 2)
    drawn = Random(1).of("W", Space(1, 3), Space(1, 3))
    Ω, γ, Φ, τ = drawn.inputs.matrix[0], drawn.inputs.shift[0], drawn.outputs.matrix[0], drawn.outputs.shift[0]
    shared = Coordinates(Change.scaled(Space(1, 2)), Change(drawn.outputs.matrix, torch.zeros(1, 3).double()))
    other = reparametrise(rnn, Chosen({"recurrent_0": drawn, "inputs_0": shared}))
    V, b_V, W, b_W = (p.detach() for p in other.parameters())
    close(V, torch.linalg.solve(Φ, rnn.get_parameter("weight_ih_l0").detach()), 1e-12)

    def in_their_own_coordinates(a: Tensor) -> Tensor:
        states = []
        for x_t in x.unbind(1):
            z = a @ W.T + b_W + x_t @ V.T + b_V
            a = torch.tanh(z @ Φ.T + τ) @ Ω.T + γ
            states.append(a)
        return torch.linalg.solve(Ω, (torch.stack(states, 1) - γ).mT).mT

    expected = rnn(x)[0].detach()
    close(in_their_own_coordinates(γ.expand(5, 3)), expected, 1e-12)
    close(other(x)[0].detach(), expected, 1e-12)
    assert float((in_their_own_coordinates(torch.zeros(5, 3).double()) - expected).abs().max()) > 1e-1


def test_the_tanh_network_of_a_logistic_one() -> None:
    """tanh(x) = 2σ(2x) − 1: Φ = 2, τ = 0, Ω = 2, γ = −1."""
    case = golden("invariance.kfac_logistic_tanh")
    W1, W2 = (tensor(case["inputs"][name]) for name in ("W1bar", "W2bar"))
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)).double()
    for p, value in zip(model.parameters(), (W1[:, :2], W1[:, 2], W2[:, :3], W2[:, 3]), strict=True):
        p.data.copy_(value)
    inputs, hidden, outputs = Space(1, 2), Space(1, 3), Space(1, 1)
    bases = {
        "0": Coordinates(Change.scaled(inputs), Change.scaled(hidden, 2.0)),
        "2": Coordinates(Change.scaled(hidden, 2.0, -1.0), Change.scaled(outputs)),
    }
    parameters = [p.detach() for p in reparametrise(model, Chosen(bases)).parameters()]
    agrees(case, torch.cat([parameters[0], parameters[1][:, None]], 1), "W1bar_tanh")
    agrees(case, torch.cat([parameters[2], parameters[3][:, None]], 1), "W2bar_tanh")
    tanh = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)).double()
    for p, value in zip(tanh.parameters(), parameters, strict=True):
        p.data.copy_(value)
    agrees(case, tanh(tensor(case["inputs"]["X_test"])).detach(), "out_before")


def test_frozen_parameters_stay_frozen_and_move_no_origin_that_a_bias_would_have_to_follow() -> None:
    model, x = mlp(3, 4, 4, 2).double(), normal(5, 3)
    for name in ("0.weight", "2.bias"):
        model.get_parameter(name).requires_grad_(False)
    other = reparametrise(model, 1)
    close(other(x).detach(), model(x).detach(), 1e-12)
    assert [p.requires_grad for p in other.parameters()] == [p.requires_grad for p in model.parameters()]
    shifts = [float(m.before.shift.abs().max()) for m in other.children() if not isinstance(m, nn.Tanh)]  # type: ignore[union-attr, operator]
    assert shifts[1] == 0
    assert min(shifts[0], shifts[2]) > 0


def test_modules_that_are_kept_or_frozen_stay_as_they_are() -> None:
    model, x = Residual().double(), normal(5, 3)
    kept = reparametrise(model, 1, keep=("norm",))
    close(kept(x).detach(), model(x).detach(), 1e-12)
    assert torch.equal(kept.get_parameter("norm.weight"), model.norm.weight)
    model.norm.requires_grad_(False)
    close(reparametrise(model, 1)(x).detach(), model(x).detach(), 1e-12)
    whole = reparametrise(model, 1, keep=("f",))
    assert torch.equal(whole.get_parameter("f.0.weight"), model.get_parameter("f.0.weight"))
    tied = nn.Sequential(Tied(), nn.Tanh(), nn.Linear(4, 2)).double()
    other = reparametrise(tied, 1, keep=("0",))
    close(other(normal(5, 4)).detach(), tied(normal(5, 4)).detach(), 1e-12)
    assert len(list(other.parameters())) == len(list(tied.parameters()))  # still tied


def test_dtype_mode_and_random_stream_are_kept() -> None:
    model = nn.Sequential(convolutional(), nn.Dropout()).eval()
    state = torch.random.get_rng_state()
    other = reparametrise(model, 1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert {p.dtype for p in other.parameters()} == {torch.float32}
    assert all(p.is_contiguous() for p in other.parameters())
    assert not other.training
    x = torch.randn(3, 2, 8, 8)
    torch.testing.assert_close(other(x), model(x), rtol=1e-4, atol=1e-4)
    moved = dict(other.named_parameters())
    again = dict(reparametrise(model, 1).named_parameters())
    assert all(torch.equal(again[name], p) for name, p in moved.items())  # the same seed, the same bases


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "batch norm": (Residual, r"no change of basis for norm \(BatchNorm1d\).*keep=\(name,\)"),
    "tied": (Tied, r"first and second share a parameter.*keep=\('first', 'second'\)"),
    "attention": (
        Attention,
        r"attention \(MultiheadAttention\), attention.out_proj \(NonDynamicallyQuantizableLinear\)",
    ),
    "embedding": (TiedEmbedding, r"embedding and head share a parameter"),
    "projection": (lambda: nn.LSTM(2, 3, proj_size=2), r"the model \(LSTM with proj_size=2\)"),
    "dropout": (lambda: nn.RNN(2, 3, 2, dropout=0.1), r"the model \(RNN with dropout=0.1\)"),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), r"the model \(ConvTranspose2d\)"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_has_no_bases_to_change_is_refused_by_name(name: str) -> None:
    build, message = REFUSED[name]
    with pytest.raises(IncompatibleError, match=message):
        reparametrise(build())


def test_other_forwards_and_other_parameters_are_refused_by_name() -> None:
    patched, extended = nn.Linear(2, 2), nn.Linear(2, 2)
    patched.forward = lambda input: input  # type: ignore[method-assign]
    extended.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(
        IncompatibleError, match=r"0 \(Linear with another forward\), 1 \(Linear with the parameter scale"
    ):
        reparametrise(nn.Sequential(patched, extended))


def test_a_weight_that_is_read_from_outside_is_refused() -> None:
    with pytest.raises(TypeError, match=r"used outside its layer's forward.*keep=\(name,\)"):
        reparametrise(WeightOutside().double())(normal(2, 3))


def test_sequences_that_a_tensor_cannot_hold_are_refused() -> None:
    packed = nn.utils.rnn.pack_sequence([torch.ones(2, 2), torch.ones(1, 2)])
    with pytest.raises(TypeError, match="sequences of one length as a tensor"):
        reparametrise(nn.RNN(2, 3))(packed)


def test_nothing_to_transform_and_unknown_names_are_refused() -> None:
    with pytest.raises(ValueError, match="nothing to transform in Sequential: it has no Linear, "):
        reparametrise(nn.Sequential(nn.Tanh()))
    with pytest.raises(ValueError, match="keep names no module of the model: nose"):
        reparametrise(mlp(2, 2), keep=("nose",))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            Change.scaled(Space(1, 3)),
            r"the inputs of the model: .* matrix \[1, 3, 3\] .* needs \[1, 2, 2\] and \[1, 2\]",
        ),
        (Change.scaled(Space(1, 2), 0.0), "the inputs of the model: the matrix of the change of basis is singular"),
        (Change.scaled(Space(1, 2), 1.0, 1.0), "the inputs of the model: the layer trains no bias"),
    ],
)
def test_changes_of_basis_that_cannot_be_are_refused(change: Change, message: str) -> None:
    layer = nn.Linear(2, 2, bias=False)
    with pytest.raises(ValueError, match=message):
        reparametrise(layer, Chosen({"": Coordinates(change, Change.scaled(Space(1, 2)))}))
    with pytest.raises(ValueError, match=r"stretch must be at least 1, got 0\.5"):
        Random(stretch=0.5)
