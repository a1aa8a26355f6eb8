"""Metrics have no graph, whatever a rule reads."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import Rule
from natgrad.rules.base import Call, Keys
from natgrad.structures import Structure


class Gained(nn.Module):
    """z = W (γ x), with a gain γ that is trained."""

    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.weight = nn.Parameter(torch.randn(o, i, dtype=torch.float64, generator=generator) / i)
        self.gain = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (self.gain * x) @ self.weight.T


class GainedRule(Rule):
    """Of the weight; its inputs are γ x, as the layer computes them."""

    def covers(self, module: nn.Module) -> bool:
        return type(module) is Gained

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        assert isinstance(module, Gained)
        return {"weight": module.weight}

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Tensor:
        assert isinstance(module, Gained)
        return (module.gain * call.x)[:, None, None]

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Tensor:
        return g[:, :, None, None]


STRUCTURES: Mapping[str, Structure] = {
    "Kronecker": ng.Kronecker(),
    "EigenKronecker": ng.EigenKronecker(),
    "Dense": ng.Dense(),
    "BlockDense": ng.BlockDense(),
    "Diagonal": ng.Diagonal(),
    "Kernel": ng.Kernel(),
    "LowRank": ng.LowRank(2),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_metric_holds_no_graph_of_a_parameter_that_a_rule_reads(name: str) -> None:
    x = torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    pb = ng.pullback(Gained(3, 2), x, ng.Euclidean(), rules=[GainedRule()])
    assert any(block.rule is not None and "weight" in block.names for block in pb.layers)
    tensors = STRUCTURES[name].estimate(pb).tensors()
    assert tensors
    assert not any(t.requires_grad for t in tensors.values())


def test_the_factors_of_a_wide_layer_are_those_of_the_inputs_that_a_rule_makes_of_a_parameter() -> None:
    """Products of wide inputs are written where they belong, which torch refuses for numbers that have a graph."""
    model, x = Gained(256, 2), torch.randn(2048, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    opt = ng.KFAC(model, ng.Euclidean(), rules=[GainedRule()], lr=0.0, metric_every=1)
    for _ in range(3):  # the first estimate is held, the others are averaged into it
        opt.zero_grad()
        model(x).sum().backward()
        opt.step()
    pb = ng.pullback(model, x, ng.Euclidean(), rules=[GainedRule()])
    A = ng.Kronecker().estimate(pb).tensors()["weight/A"]
    torch.testing.assert_close(A.squeeze(), 4 * x.T @ x / 2048, rtol=1e-10, atol=1e-10)
