"""K-FAC trains language models whose head is their embedding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures import Structure
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
