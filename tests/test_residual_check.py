"""Mistakes in residuals that raise no error by themselves: differences of all pairs, activations that are flat."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.structures.base import Structure

N = 16
COLUMN = torch.linspace(-2, 2, N, dtype=torch.float64)[:, None]
ROW = COLUMN[:, 0].cos()
MATRIX = torch.outer(ROW, ROW) + 0.1 * COLUMN


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1)).double()


PAIRS: dict[str, Callable[[Tensor], Tensor]] = {
    "model − data": lambda x: torch.cos(x[0] * COLUMN) - ROW,
    "data − model, weighted": lambda x: (ROW - torch.cos(x[0] * COLUMN)) / 0.1,
    "flattened": lambda x: (torch.cos(x[0] * COLUMN) - ROW).reshape(-1),
    "a row of the model": lambda x: torch.sub(torch.cos(x[0] * COLUMN[:, 0]), ROW[:, None]),
}


@pytest.mark.parametrize("name", list(PAIRS))
def test_a_difference_of_all_pairs_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"tensors \[16\] and \[16, 1\] meet in a sum or.* y\[:, None\]"):
        ng.least_squares(PAIRS[name], [1.0])


def test_a_difference_of_all_pairs_in_a_batch_is_refused() -> None:
    z, y = COLUMN.expand(3, N, 1), ROW.expand(3, N)
    with pytest.raises(ValueError, match="broadcasting makes all 16 × 16 pairs"):
        ng.least_squares(lambda x, z, y: x * z - y, torch.ones(3, 1).double(), (z, y), batch=True)


@pytest.mark.parametrize("structure", [None, ng.Implicit()])
@pytest.mark.parametrize("as_optimizer", [False, True])
def test_a_network_that_is_compared_with_all_pairs_is_refused(structure: Structure | None, as_optimizer: bool) -> None:
    residuals = ng.Residuals(lambda net, x, y: net(x) - y, (COLUMN, ROW))
    problem = ng.LeastSquares(residuals, network(), structure=structure)
    with pytest.raises(ValueError, match=r"'residuals': the residuals have the shape \[16, 16\], because"):
        (ng.GaussNewton(network(), residuals, structure=structure) if as_optimizer else problem).step()


HONEST: dict[str, Callable[[Tensor], Tensor]] = {
    "a matrix of rank one": lambda x: torch.outer(x, x) - MATRIX,
    "effects of rows, before the data": lambda x: (x[:, None] - ROW) - MATRIX,
    "effects of rows, after the data": lambda x: MATRIX - (ROW - x[:, None]),
    "the data made beside the effects": lambda x: (MATRIX + x[0]) - (ROW - x[:, None]),
    "a kernel": lambda x: torch.exp(-(x[0] ** 2) * (COLUMN - ROW) ** 2) - MATRIX,
    "distances between points": lambda x: (x[:, None] - x) - MATRIX,
    "pairs that are written as such": lambda x: x[:, None] - ROW[None],
    "n² residuals of n² data": lambda x: (x[:, None] * ROW - MATRIX).flatten(),
}


@pytest.mark.parametrize("name", list(HONEST))
def test_residuals_of_a_matrix_are_fitted(name: str) -> None:
    assert ng.least_squares(HONEST[name], 0.1 + ROW).success


def dead(module: nn.Module) -> nn.Module:
    """A network whose last activation is flat at all points."""
    net = nn.Sequential(nn.Linear(1, 5), nn.Tanh(), nn.Linear(5, 1), module).double()
    with torch.no_grad():
        net[2].bias.fill_(-50.0)  # type: ignore[operator]
    return net


@pytest.mark.parametrize("structure", [None, ng.Kernel(), ng.Implicit(), ng.Kronecker()])
def test_a_network_that_is_dead_at_all_points_is_refused_with_the_name_of_the_layer(
    structure: Structure | None,
) -> None:
    residuals = ng.Residuals(lambda net, x, y: net(x) - y, (COLUMN, ROW[:, None]))
    for module in (nn.ReLU(), nn.Hardtanh()):
        problem = ng.LeastSquares(residuals, dead(module), structure=structure)
        name = type(module).__name__
        with pytest.raises(ValueError, match=rf"'residuals' do not depend on the parameters .*: 3 \({name}\) returns"):
            problem.solve(max_steps=3)


def test_a_network_with_one_dead_layer_below_a_bias_is_fitted() -> None:
    net = nn.Sequential(dead(nn.ReLU()), nn.Linear(1, 1).double())
    residuals = ng.Residuals(lambda net, x, y: net(x) - y, (COLUMN, ROW[:, None]))
    result = ng.LeastSquares(residuals, net).solve(max_steps=20)
    assert float(result.cost) == pytest.approx(float(0.5 * (ROW - ROW.mean()).square().mean()))


@pytest.mark.parametrize("flat", [torch.relu, lambda z: z.clamp(min=0)], ids=["relu", "clamp"])
def test_a_model_that_is_dead_at_the_start_is_refused_with_the_name_of_the_operation(
    flat: Callable[[Tensor], Tensor],
) -> None:
    with pytest.raises(ValueError, match=r"do not depend on the unknowns at x0: (relu|clamp) returns one value"):
        ng.least_squares(lambda x: flat(x[0] * ROW - x[1]) - ROW, [1.0, 9.0])


def test_unknowns_behind_a_dead_activation_are_named_with_it(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="natgrad"):
        fit = ng.least_squares(lambda x: torch.relu(x[0] * ROW - 9) + x[1] - ROW, [1.0, 2.0])
    assert float(fit.x[1]) == pytest.approx(float(ROW.mean()))
    (message,) = (record.getMessage() for record in caplog.records)
    assert message.startswith("least_squares: x[0] does not change the residuals")
    assert message.endswith("relu returns one value for all that it gets")
