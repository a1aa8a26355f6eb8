"""The state of a Bayesian neural network: a run that was cut in two is the run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NonFiniteError

STRUCTURES = [ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()]


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _data() -> tuple[Tensor, Tensor]:
    x = torch.randn(20, 2, generator=_generator(), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def _classifier(structure: ng.structures.Structure, width: int = 4) -> ng.vi.VariationalNetwork:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)).double()
    metric, prior = ng.Fisher(ng.Categorical(), samples=1), ng.vi.Prior(0.5, 20)
    return ng.vi.VariationalNetwork(model, metric, structure, prior, generator=_generator())


def _mean(net: ng.vi.VariationalNetwork) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.model.params.values()])


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("before", [0, 3])
def test_a_posterior_goes_on_from_its_state_bit_for_bit(
    structure: ng.structures.Structure, before: int, tmp_path: Path
) -> None:
    (x, t), net = _data(), _classifier(structure)
    for _ in range(before):
        net.step(x, t, F.cross_entropy)
    assert isinstance(net.model.module, nn.Module)
    torch.save((net.model.module.state_dict(), net.state_dict()), tmp_path / "saved")
    parameters, state = torch.load(tmp_path / "saved", weights_only=True)
    again = _classifier(structure)
    assert isinstance(again.model.module, nn.Module)
    again.model.module.load_state_dict(parameters)
    again.generator.manual_seed(7)
    again.load_state_dict(state)
    for _ in range(3):
        net.step(x, t, F.cross_entropy)
        again.step(x, t, F.cross_entropy)
    assert torch.equal(_mean(net), _mean(again))
    assert torch.equal(net.operator.dense(), again.operator.dense())


def test_a_state_that_does_not_fit_changes_nothing() -> None:
    net = _classifier(ng.Dense())
    net.step(*_data(), F.cross_entropy)
    state, G = net.state_dict(), net.operator.dense()
    with pytest.raises(ValueError, match=r"its structure is Dense\(.*\), here it is Diagonal\(.*Nothing was"):
        _classifier(ng.Diagonal()).load_state_dict(state)
    with pytest.raises(
        ValueError, match=r"posterior: of its parameters, 0\.weight is \[4, 2\] and here \[3, 2\], 0\.bi"
    ):
        _classifier(ng.Dense(), width=3).load_state_dict(state)
    turned = {**state, "parameters": dict(reversed(state["parameters"].items()))}
    with pytest.raises(ValueError, match=r"its parameters are in the order 2\.bias, .*, here it is 0\.weight"):
        net.load_state_dict(turned)  # a dense metric has its rows in that order
    with pytest.raises(ValueError, match=r"its dtype is torch\.float32, here it is torch\.float64"):
        net.load_state_dict({**state, "dtype": "torch.float32"})
    with pytest.raises(ValueError, match='"operator" of the state is a list: it is damaged'):
        net.load_state_dict({**state, "operator": []})
    with pytest.raises(ValueError, match=r"the state has no operator: it is incomplete\. Nothing was loaded"):
        net.load_state_dict({key: value for key, value in state.items() if key != "operator"})
    with pytest.raises(NonFiniteError, match="of the metric in the state holds NaN or infinity"):
        net.load_state_dict({**state, "operator": {key: t * math.nan for key, t in state["operator"].items()}})
    with pytest.raises(ValueError, match=r"is no state of a torch\.Generator"):
        net.load_state_dict({**state, "generator": torch.zeros(3)})
    assert torch.equal(net.operator.dense(), G)
