"""Two unrelated parametrisations of one model: definition 4 of van Oostrum, Müller and Ay (2023)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.golden import agrees, golden, names, tensor
from tests.pulled import close, normal


def curve(p: dict[str, Tensor], x: object) -> Tensor:
    return torch.stack([torch.sin(2 * p["t"]), torch.sin(p["t"])], dim=-1)


@pytest.mark.parametrize("name", names("oostrum.A2"))
def test_at_a_crossing_of_the_image_the_natural_gradients_differ(name: str) -> None:
    """A.2: two points of one curve, whose tangents at the common point of the plane are not the same line."""
    case = golden(name)
    dL = tensor(case["inputs"]["grad_L_at_origin"])
    here, there = ({"t": tensor([case["inputs"][key]])} for key in ("xi1", "xi2"))
    found = ng.invariance.compare(curve, curve, None, lambda y: (y * dL).sum(), params=here, other_params=there)
    agrees(case, found.on_model[0][0], "pushforward_xi1")
    agrees(case, found.on_model[1][0], "pushforward_theta1")
    assert (found.ranks, found.common, found.reparametrisation) == ((1, 1), 0, False)
    assert found.span_gap == pytest.approx(0.8)  # of the angle between (2, 1) and (−2, 1)
    assert found.model_gap > 0.3
    assert "span 1 and 1 dimensions, 0 of them common" in str(found)


def deep_line() -> tuple[nn.Linear, nn.Sequential]:
    """The same affine function with 3 and with 13 parameters."""
    torch.manual_seed(0)
    line, deep = nn.Linear(2, 1).double(), nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1)).double()
    first, second = deep[0], deep[1]
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    with torch.no_grad():
        line.weight.copy_(second.weight @ first.weight)
        line.bias.copy_(second(first.bias))
    return line, deep


@pytest.mark.parametrize("metric", [ng.Euclidean(), ng.Fisher(ng.Bernoulli()), ng.Sobolev(lengthscale=2.0)], ids=repr)
def test_with_equal_spans_the_natural_gradients_agree_for_every_loss(metric: ng.OutputMetric) -> None:
    line, deep = deep_line()
    x = normal(7, 2)
    for seed in range(3):
        u = normal(7, 1, seed=seed)
        found = ng.invariance.compare(line, deep, x, lambda y, u=u: (u * y.sin()).sum(), metric)  # type: ignore[misc]
        assert found.reparametrisation
        assert (found.ranks, found.common) == ((3, 3), 3)
        assert found.model_gap < 1e-7
    assert "span the same 3 dimensions" in str(found)


def test_a_parametrisation_that_is_stuck_allows_less() -> None:
    """A narrow deep line, whose second weight is zero, sees only its hidden unit and the constants."""
    line, deep = nn.Linear(2, 1).double(), nn.Sequential(nn.Linear(2, 1), nn.Linear(1, 1)).double()
    with torch.no_grad():
        for p in (*line.parameters(), *deep[1].parameters()):
            p.zero_()
    x = normal(7, 2)
    found = ng.invariance.compare(line, deep, x, lambda y: (y * x[:, :1].sin()).sum())
    assert (found.ranks, found.common, found.span_gap, found.reparametrisation) == ((3, 2), 2, 1.0, False)
    ones = x.new_ones(7, 1)
    hidden = deep[0](x).detach()
    for got, J in zip(found.on_model, (torch.cat([x, ones], 1), torch.cat([hidden, ones], 1)), strict=True):
        close(got[:, 0], 7 * J @ torch.linalg.pinv(J) @ x[:, 0].sin(), 1e-9)  # the metric is a mean, the loss a sum


def test_different_functions_are_refused() -> None:
    line, deep = deep_line()
    with torch.no_grad():
        line.bias.add_(1e-3)
    with pytest.raises(ValueError, match=r"other outputs at x .relative difference .*e-0"):
        ng.invariance.compare(line, deep, normal(7, 2), lambda y: y.sum())
    with pytest.raises(ValueError, match=r"shapes \(7, 1\) and \(7, 2\)"):
        ng.invariance.compare(line, nn.Linear(2, 2).double(), normal(7, 2), lambda y: y.sum())
    with pytest.raises(ValueError, match="two samples are two metrics"):
        ng.invariance.compare(*deep_line(), normal(7, 2), lambda y: y.sum(), ng.Fisher(ng.Bernoulli(), samples=1))
