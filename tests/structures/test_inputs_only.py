"""Kronecker(sides="inputs"): G = 1 ⊗ A, from the inputs of the layers alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError


def network() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(12, 4), nn.Tanh(), nn.Linear(4, 3)
    return nn.Sequential(*layers).double()


def images(n: int = 6) -> Tensor:
    return torch.randn(n, 2, 3, 3, dtype=torch.float64)


def inputs(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """a [m i] of every layer, with a 1 for the bias."""
    found = {"0": F.unfold(x, 2).transpose(1, 2).flatten(0, 1)}
    for at, layer in enumerate(model.children()):
        if isinstance(layer, nn.Linear):
            found[str(at)] = x
        x = layer(x)
    return {name: torch.cat([a, torch.ones(len(a), 1, dtype=a.dtype)], 1).detach() for name, a in found.items()}


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """1 ⊗ A on W̄ = [W b] of every layer, in the order weight, bias."""
    blocks = []
    for name, a in inputs(model, x).items():
        A = a.T @ a / len(a)
        o = model.get_parameter(f"{name}.bias").numel()
        whole = torch.kron(torch.eye(o, dtype=a.dtype), A)
        at = torch.arange(len(whole)).view(o, -1)
        order = torch.cat([at[:, :-1].flatten(), at[:, -1]])
        blocks.append(whole[order[:, None], order])
    return torch.block_diag(*blocks)


class NoRoot(ng.OutputMetric):
    """A metric that nobody may ask."""

    def flat(self, y: Tensor, u: Tensor, target: object = None) -> Tensor:
        raise AssertionError("flat")

    def root(self, y: Tensor, target: object = None, generator: torch.Generator | None = None) -> Tensor:
        raise AssertionError("root")

    def divergence(self, y: Tensor, y0: Tensor, target: object = None) -> Tensor:
        raise AssertionError("divergence")


def test_the_metric_is_that_of_the_inputs() -> None:
    """No root is asked for."""
    model, x = network(), images(40)
    pb = ng.pullback(model, x, NoRoot())
    torch.testing.assert_close(ng.Kronecker(sides="inputs").estimate(pb).dense(), expected(model, x))


def test_averages_and_steps() -> None:
    """M (A + λ)⁻¹ with the moving average of A, whatever the loss."""
    model, λ = network(), 0.3
    structure = ng.Refresh(ng.Kronecker(sides="inputs"), 1, 0.9)
    opt = ng.NaturalGradient(model, NoRoot(), structure=structure, lr=0.1, damping=λ)
    past: list[Tensor] = []
    for _ in range(3):
        x = images()
        past.append(expected(model, x))
        opt.zero_grad()
        model(x).square().sum().backward()
        ω = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        opt.step()
    G = sum(0.9 ** (2 - t) * g for t, g in enumerate(past)) / sum(0.9**t for t in range(3))
    assert opt.tracker.average is not None
    assert isinstance(G, Tensor)
    torch.testing.assert_close(opt.tracker.average.dense(), G)
    v = torch.linalg.solve(G + λ * torch.eye(len(G), dtype=G.dtype), ω)
    torch.testing.assert_close(torch.cat([p.detach().flatten() for p in model.parameters()]), before - 0.1 * v)
    again = network()
    resumed = ng.NaturalGradient(again, NoRoot(), structure=structure, lr=0.1, damping=λ)
    resumed.load_state_dict(opt.state_dict())
    assert resumed.tracker.average is not None
    assert torch.equal(resumed.tracker.average.dense(), opt.tracker.average.dense())


def test_one_side_of_the_gradient() -> None:
    """BatchGradient: A = GᵀG/o, and no S."""
    model = nn.Linear(3, 2, bias=False).double()
    structure = ng.Refresh(ng.Kronecker(sides="inputs"), 1, 0.9)
    opt = ng.NaturalGradient(model, ng.BatchGradient(), structure=structure, damping=0.1, lr=0.01)
    seen = []
    for _ in range(2):
        opt.zero_grad()
        model(torch.randn(4, 3, dtype=torch.float64)).square().sum().backward()
        assert model.weight.grad is not None
        seen.append(model.weight.grad.T @ model.weight.grad / 2)
        opt.step()
    A = (0.9 * seen[0] + seen[1]) / 1.9
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.dense(), torch.kron(torch.eye(2, dtype=A.dtype), A))


def test_a_layer_that_is_used_late_has_the_identity_too() -> None:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 2), nn.Linear(3, 2)

        def forward(self, x: Tensor, both: bool = True) -> Tensor:
            return self.one(x) + self.two(x) if both else self.one(x)

    model = Choice()
    structure = ng.Refresh(ng.Kronecker(sides="inputs"), 1, 0.9)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure)
    for both in (False, True):
        opt.zero_grad()
        model(torch.randn(5, 3), both=both).square().sum().backward()
        opt.step()
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.tensors()["two.weight/S"], torch.ones(1, 2))


def test_bad_input() -> None:
    with pytest.raises(ValueError, match='"both" or "inputs", not \'outputs\''):
        ng.Kronecker(sides="outputs")  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="needs no cotangents"):
        ng.NaturalGradient(network(), ng.Empirical(), structure=ng.Kronecker(sides="inputs"))
    pb = ng.pullback(network(), images(), ng.Sobolev(ng.Euclidean(), lengthscale=1.0))
    with pytest.raises(IncompatibleError, match="the coupling of the examples"):
        ng.Kronecker(sides="inputs").estimate(pb)
