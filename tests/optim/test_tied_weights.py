"""K-FAC trains language models whose head is their embedding."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.structures import Structure
from tests import oracle
from tests.pulled import close
from tests.tied_models import NAME, D, Language, N, T, V


def _training(structure: Structure | None = None) -> tuple[Language, ng.NaturalGradient, Tensor]:
    torch.manual_seed(0)
    model = Language(bias=True).double()
    tokens = torch.randint(V, (32, T), generator=torch.Generator().manual_seed(2)).cumsum(1) % V
    metric = ng.Fisher(ng.Categorical(axis=-1), samples=1)
    if structure is None:
        return model, ng.KFAC(model, metric, lr=0.3, damping=1e-2), tokens
    return model, ng.NaturalGradient(model, metric, structure=structure, lr=0.3, damping=1e-2), tokens


def _steps(model: Language, opt: ng.NaturalGradient, tokens: Tensor, count: int) -> list[float]:
    out = []
    for _ in range(count):
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.roll(-1, 1).flatten())
        loss.backward()
        opt.step()
        out.append(float(loss.detach()))
    return out


@pytest.mark.parametrize("structure", [None, ng.EigenKronecker(strict=True)], ids=["KFAC", "EigenKronecker"])
def test_a_tied_language_model_is_trained(structure: Structure | None) -> None:
    torch.manual_seed(3)
    model, opt, tokens = _training(structure)
    assert NAME not in opt.plan().uncovered
    losses = _steps(model, opt, tokens, 20)
    assert losses[-1] < 0.9 * losses[0]
    assert model.head.weight is model.wte.weight
    rows = {row.names: row for row in opt.plan().rows}
    assert rows[(NAME,)].shape == (1, V, D)
    assert NAME in str(opt.plan())


def test_a_resumed_run_goes_on_bit_for_bit() -> None:
    model, opt, tokens = _training()
    _steps(model, opt, tokens, 4)
    saved = copy.deepcopy((model.state_dict(), opt.state_dict()))
    expected = _steps(model, opt, tokens, 4)
    fresh, other, _ = _training()
    fresh.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    assert _steps(fresh, other, tokens, 4) == expected


def test_half_precision_of_a_forward_pass_leaves_the_factors_in_single() -> None:
    torch.manual_seed(0)
    model, tokens = Language(), torch.randint(V, (N, T))
    with torch.autocast("cpu", torch.bfloat16):
        G = ng.Kronecker(strict=True).estimate(ng.pullback(model, tokens, ng.Fisher(ng.Categorical(axis=-1))))
    exact = ng.Kronecker().estimate(ng.pullback(model, tokens, ng.Fisher(ng.Categorical(axis=-1))))
    for name, t in G.tensors().items():
        assert t.dtype == torch.float32
        torch.testing.assert_close(
            t, exact.tensors()[name], rtol=0, atol=0.05 * float(exact.tensors()[name].abs().max())
        )


class Retrieval(nn.Module):
    """Patches that are put back by the filters that took them, and a class: the metric of two heads waits for both."""

    def __init__(self) -> None:
        super().__init__()
        self.filters, self.kind = nn.Conv1d(2, 3, 2), nn.Linear(9, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """[n 2 4] → [n 2 4] and [n 4]."""
        z = torch.tanh(self.filters(x))
        return F.conv_transpose1d(z, self.filters.weight), self.kind(z.flatten(1))


class Tags(nn.Module):
    """Labels of tokens that are compared with the weight of a layer below, flattened: [n t 3] → [n·t 3]."""

    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(3, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        """[n·t 3]."""
        return F.linear(torch.tanh(self.high(torch.tanh(self.low(x)))), self.low.weight.T).flatten(0, 1)


LABELS = torch.tensor([[0, 1, -100], [2, 2, 1], [-100, 0, 1], [0, 0, 2], [1, 2, 0]])


def _two_heads(y: Tensor, x: Tensor) -> Tensor:
    back, kind = y.split([8, 4], dim=1)
    return F.mse_loss(back, x.flatten(1)) + F.cross_entropy(kind, LABELS[:, 1])


def _tags(y: Tensor, x: Tensor) -> Tensor:
    return F.cross_entropy(y.reshape(-1, 3), LABELS.flatten())


@pytest.mark.parametrize(
    ("model", "loss", "inputs", "options"),
    [
        (Retrieval, _two_heads, (2, 4), {"metric": (nn.MSELoss(), nn.CrossEntropyLoss())}),
        (Tags, _tags, (3, 3), {"metric": nn.CrossEntropyLoss(), "examples": "inputs"}),
    ],
)
def test_a_metric_that_waits_for_the_loss_sees_all_uses_of_a_weight(
    model: Any, loss: Callable[[Tensor, Tensor], Tensor], inputs: tuple[int, int], options: dict[str, Any]
) -> None:
    """The step is (Jᵀ h J + λ)⁻¹ ∇L with the Hessian h of the loss by the outputs of the whole batch."""
    torch.manual_seed(0)
    net, x = model().double(), torch.randn(len(LABELS), *inputs, dtype=torch.float64)

    def flat(out: Any) -> Tensor:
        return out if isinstance(out, Tensor) else torch.cat([t.flatten(1) for t in out], 1)

    y = flat(net(x))
    J = torch.stack([oracle.differential(net, each) for each in y.flatten()])
    h = torch.autograd.functional.hessian(lambda y: loss(y, x), y.detach()).reshape(len(J), len(J))
    start = oracle.flatten(net.parameters())
    step = torch.linalg.solve(
        J.T @ h @ J + 0.1 * torch.eye(len(start), dtype=torch.float64), oracle.differential(net, loss(y, x))
    )
    opt = ng.NaturalGradient(net, lr=0.5, damping=0.1, **options)
    loss(flat(net(x)), x).backward()
    opt.step()
    close(oracle.flatten(net.parameters()), start - 0.5 * step)
