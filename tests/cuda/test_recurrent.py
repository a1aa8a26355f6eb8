"""Recurrences on a GPU: cuDNN goes back one cotangent at a time, and in training mode only; nothing of that shows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from tests.pulled import close, covered

pytestmark = pytest.mark.gpu("cuDNN")


class Sequences(nn.Module):
    """A recurrence above a Linear layer, on packed sequences or on padded ones."""

    def __init__(self, kind: type[nn.RNNBase], packed: bool) -> None:
        super().__init__()
        self.first, self.head, self.packed = nn.Linear(3, 3), nn.Linear(8, 2), packed
        self.body = kind(3, 4, 2, batch_first=True, bidirectional=True)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        if not self.packed:
            return self.head(self.body(x)[0])
        lengths = torch.tensor([3, 6, 1, 2, 6])
        out, _ = self.body(pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return self.head(pad_packed_sequence(out, batch_first=True)[0])


class Steps(nn.Module):
    """A cell that is called once a step."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.cell, self.head = cell, nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        state, outputs = None, []
        for x_t in x.unbind(1):
            state = self.cell(x_t, state)
            outputs.append(self.head(state[0] if isinstance(state, tuple) else state))
        return torch.stack(outputs, dim=1)


MODELS = {
    **{f"{kind.__name__}_{packed}": (kind, packed) for kind in (nn.RNN, nn.LSTM, nn.GRU) for packed in (False, True)},
    **{kind.__name__: (kind, None) for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell)},
}


def _model(name: str) -> nn.Module:
    torch.manual_seed(0)
    kind, packed = MODELS[name]
    model = Steps(kind(3, 4)) if packed is None else Sequences(kind, packed)  # type: ignore[arg-type]
    return model.double()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_the_factors_of_a_processor(name: str, training: bool) -> None:
    model, x = _model(name).train(training), torch.randn(5, 6, 3, dtype=torch.float64)
    metric, structure = ng.Fisher(ng.Categorical(axis=-1)), ng.Kronecker(strict=True)
    expected = structure.estimate(ng.pullback(model, x, metric)).dense()
    pb = ng.pullback(model.cuda(), x.cuda(), metric)
    assert covered(pb) == set(pb.model.params)
    close(structure.estimate(pb).dense().cpu(), expected)


@pytest.mark.parametrize("name", MODELS)
def test_the_users_own_pass_with_fused_kernels_gives_the_same_step(name: str) -> None:
    """Every class of the exact Fisher metric is a cotangent, and cuDNN takes one at a time."""
    x = torch.randn(5, 6, 3, dtype=torch.float64)
    stepped = []
    for device in ("cpu", "cuda"):
        model = _model(name).to(device)
        optimizer = ng.NaturalGradient(
            model, ng.Fisher(ng.Categorical(axis=-1)), structure=ng.Kronecker(strict=True), damping=0.1, lr=0.1
        )
        model(x.to(device)).square().mean().backward()
        optimizer.step()
        stepped.append(torch.cat([p.detach().cpu().flatten() for p in model.parameters()]))
    close(stepped[1], stepped[0])
