"""The certificate: K-FAC does not see affine bases, SGD, Adam and diagonal metrics do.

Theorems 2.1, 4.2 and 5.2 of Luk and Grosse (2018).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from natgrad.invariance import (
    Certificate,
    Change,
    Chosen,
    Coordinates,
    Original,
    Random,
    Space,
    certify,
    damping_sweep,
    reparametrise,
)
from natgrad.invariance.certificate import half_squares
from tests.golden import agrees, golden, tensor
from tests.invariance.reference import TASKS, Cells, Recurrent, Task, TextbookKFAC
from tests.pulled import normal
from tests.zoo import mlp

Make = Callable[[nn.Module], torch.optim.Optimizer]


def natural(structure: Any, **options: Any) -> Make:
    """The natural gradient of the Euclidean metric, undamped."""
    settings = {"lr": 0.1, "damping": 0.0, **options}
    metric = settings.pop("metric", ng.Euclidean())
    return lambda model: ng.NaturalGradient(model, metric, structure=structure, **settings)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-2)


@pytest.mark.parametrize("kind", TASKS)
def test_undamped_textbook_kfac_is_invariant(kind: str) -> None:
    task = TASKS[kind]
    found = certify(lambda model: TextbookKFAC(model, lr=0.1), task.model(), task.batch(), steps=10)
    assert found.invariant
    assert found.tolerance == 1e-9
    assert len(found.differences) == 11
    assert found.moved > 0.1


KFACS: dict[str, Callable[[float], Make]] = {
    "expand": lambda lr: natural(ng.Kronecker(), lr=lr),
    "averaged": lambda lr: natural(ng.Refresh(ng.Kronecker(), every=2, decay=0.9), lr=lr / 2, momentum=0.5),
    "sampled": lambda lr: natural(ng.Kronecker(), lr=lr, metric=ng.Fisher(ng.Gaussian(), samples=2)),
    "preset": lambda lr: lambda model: ng.KFAC(model, ng.Euclidean(), lr=lr, damping=0.0),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", KFACS)
def test_undamped_kfac_is_invariant(kind: str, name: str) -> None:
    """Over ten steps, with momentum, averaged factors and the same samples of sampled ones."""
    task = TASKS[kind]
    found = certify(KFACS[name](0.1), task.model(), task.batch(), steps=10)
    assert found.invariant, str(found)
    assert found.moved > 0.1


@pytest.mark.parametrize(("kind", "lr"), [("convolutional", 1e-6), ("recurrent", 1e-2)])
def test_undamped_kfac_that_reduces_positions_is_invariant(kind: str, lr: float) -> None:
    """Sums over positions that cancel make a small metric and long steps, so the step size is small."""
    task = TASKS[kind]
    found = certify(natural(ng.Kronecker(sharing="reduce"), lr=lr), task.model(), task.batch(), steps=10)
    assert found.invariant, str(found)
    assert found.moved > 0.1


@pytest.mark.parametrize("kind", TASKS)
def test_kfac_trains_as_the_textbook_says(kind: str) -> None:
    task = TASKS[kind]
    ours, theirs = (
        certify(make, task.model(), task.batch(), steps=3, seed=1).moved
        for make in (KFACS["expand"](0.1), lambda model: TextbookKFAC(model, lr=0.1))
    )
    assert ours == pytest.approx(theirs, rel=1e-9)


OTHERS: dict[str, Make] = {
    "SGD": sgd,
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.5),
    "Adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "Diagonal": natural(ng.Diagonal(), lr=1e-2),
}


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("name", OTHERS)
def test_coordinate_wise_optimizers_are_not_invariant(kind: str, name: str) -> None:
    task = TASKS[kind]
    found = certify(OTHERS[name], task.model(), task.batch(), steps=5)
    assert not found.invariant
    assert found.largest > 1e-3
    assert found.differences[0] < 1e-13  # they begin as the same function


@pytest.mark.parametrize("kind", TASKS)
@pytest.mark.parametrize("power", [0.75, 0.5, 0.0])
@pytest.mark.parametrize("structure", [ng.Kronecker, ng.BlockDense])
def test_powers_below_one_are_not_invariant(kind: str, power: float, structure: Any) -> None:
    """(BᵀGB)^p is not Bᵀ G^p B, and rounding has nothing to do with it."""
    below = _with_power(kind, power, structure)
    assert not below.invariant
    assert below.rounded is None
    assert below.largest > max(1e-4, 100 * _with_power(kind, 1.0, structure).largest)


@cache
def _with_power(kind: str, power: float, structure: Any) -> Certificate:
    task = TASKS[kind]
    return certify(natural(structure(power=power), lr=1e-2), task.model(), task.batch(), steps=2)


@pytest.mark.parametrize("kind", TASKS)
def test_the_natural_gradient_of_every_layer_is_invariant(kind: str) -> None:
    task = TASKS[kind]
    assert certify(natural(ng.BlockDense()), task.model(), task.batch(), tolerance=1e-7).invariant


WELL = Task(lambda: wide(mlp(2, 3, 2)), (2,))


def wide(model: nn.Module) -> nn.Module:
    """Weights large enough for tanh to bend, so that the whole metric has an inverse."""
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(2)
    return model


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.5},
        {"step": ng.TrustRegion(1e-4)},
        {"metric": ng.Fisher(ng.Gaussian(), samples=3)},
        {"metric": ng.Empirical(lambda y, t: 0.5 * (y - t).square().sum()), "lr": 1e-3},
    ],
    ids=["plain", "momentum", "trust region", "sampled", "empirical"],
)
def test_the_whole_natural_gradient_is_exactly_invariant_to_affine_bases(options: dict[str, Any]) -> None:
    """Not only to first order, with the same samples for both networks, and whatever the step rule."""
    found = certify(natural(ng.Dense(), **{"lr": 0.02, **options}), WELL.model(), WELL.batch(), steps=5)
    assert found.invariant, str(found)


def test_rules_that_evaluate_the_loss_again_can_be_certified() -> None:
    """Levenberg and Marquardt's λ is a damping, so theirs is not invariant."""
    found = certify(natural(ng.Dense(), step=ng.LevenbergMarquardt(), damping=1e-2), WELL.model(), WELL.batch(), 3)
    assert not found.invariant
    assert certify(lambda m: torch.optim.LBFGS(m.parameters(), max_iter=2), WELL.model(), WELL.batch(), 2).moved > 0


def test_a_network_of_linear_cells_and_gated_ones_are_certified_too() -> None:
    for task in (Task(Cells, (4, 2)), Task(lambda: Recurrent(nn.GRU(2, 2, batch_first=True)), (3, 2))):
        x, t = task.batch()
        assert certify(natural(ng.BlockDense()), task.model(), (x, t), steps=3, tolerance=1e-8).invariant
        assert not certify(sgd, task.model(), (x, t), steps=3).invariant


@pytest.mark.parametrize("kind", [nn.RNN, nn.LSTM, nn.GRU])
def test_a_fused_recurrent_module_trains_as_its_unrolled_form(kind: Callable[..., nn.RNNBase]) -> None:
    """The certificate compares unrolled networks; what it says of K-FAC holds for the module as it was given."""
    task = Task(lambda: Recurrent(kind(2, 2, batch_first=True)), (4, 2))
    x, t = task.batch()
    found = []
    for network in (task.model(), reparametrise(task.model(), Original()), reparametrise(task.model(), 1)):
        optimizer = natural(ng.Kronecker(), lr=1e-3)(network)
        for _ in range(4):
            optimizer.zero_grad()
            half_squares(network(x), t).backward()
            optimizer.step()
        found.append(network(x).detach())
    assert all(float((y - found[0]).abs().max()) < 1e-9 for y in found)
    assert float((found[0] - task.model()(x)).detach().abs().max()) > 1e-4


def test_one_step_on_the_logistic_and_on_the_tanh_network() -> None:
    case = golden("invariance.kfac_logistic_tanh")
    inputs = {name: tensor(value) for name, value in case["inputs"].items()}
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1)).double()
    W1, W2 = inputs["W1bar"], inputs["W2bar"]
    for p, value in zip(model.parameters(), (W1[:, :2], W1[:, 2], W2[:, :3], W2[:, 3]), strict=True):
        p.data.copy_(value)
    tanh = {
        "0": Coordinates(Change.scaled(Space(1, 2)), Change.scaled(Space(1, 3), 2.0)),
        "2": Coordinates(Change.scaled(Space(1, 3), 2.0, -1.0), Change.scaled(Space(1, 1))),
    }
    for bases, suffix in ((Original(), ""), (Chosen(tanh), "_tanh")):
        network = reparametrise(model, bases)
        for make in (lambda model: TextbookKFAC(model, lr=0.01), KFACS["expand"](0.01)):
            other = reparametrise(network, Original())
            optimizer = make(other)

            def closure(network: nn.Module = other, opt: torch.optim.Optimizer = optimizer) -> Tensor:
                opt.zero_grad()
                loss = (network(inputs["X"]) - inputs["Y"]).square().sum() / 16
                loss.backward()
                return loss

            optimizer.step(closure)  # type: ignore[arg-type]
            w1, b1, w2, b2 = (p.detach() for p in other.parameters())
            agrees(case, torch.cat([w1, b1[:, None]], 1), f"W1bar{suffix}_new")
            agrees(case, torch.cat([w2, b2[:, None]], 1), f"W2bar{suffix}_new")
            agrees(case, other(inputs["X_test"]).detach(), "out_after")


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Factored()], ids=repr)
def test_damping_breaks_the_invariance_and_by_how_much_is_reported(solver: Any) -> None:
    found = damping_sweep(
        lambda model, damping: natural(ng.Kronecker(), solver=solver, damping=damping)(model),
        WELL.model(),
        WELL.batch(),
        dampings=(0.0, 1e-6, 1e-4, 1e-2),
    )
    gaps = [certificate.largest for certificate in found.certificates.values()]
    assert gaps == sorted(gaps)
    assert gaps[0] < 1e-9 < gaps[1]
    assert gaps[3] > 1e-3
    lines = str(found).splitlines()
    assert lines[0] == " damping  difference in function"
    assert [float(line.split()[0]) for line in lines[1:]] == [0.0, 1e-6, 1e-4, 1e-2]


def test_the_certificate_prints_a_table() -> None:
    lines = str(certify(sgd, WELL.model(), WELL.batch(), steps=2)).splitlines()
    assert lines[0] == "step  difference in function"
    assert [line.split()[0] for line in lines[1:4]] == ["0", "1", "2"]
    assert lines[4].startswith("not invariant: at most ")


def test_bases_are_the_users_choice() -> None:
    """In bases that differ by a rotation only, SGD is invariant."""
    found = certify(sgd, WELL.model(), WELL.batch(), seed=Random(seed=5, stretch=1.0, shift=0.0))
    assert found.invariant
    assert not certify(sgd, WELL.model(), WELL.batch(), seed=5).invariant


def test_outputs_losses_and_several_inputs_are_the_users_choice() -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm = mlp(4, 3, 3), nn.LayerNorm(3)

        def forward(self, a: Tensor, flip: Tensor) -> dict[str, Tensor]:
            return {"logits": self.norm(self.body(torch.where(flip, -a, a)))}

    x = (normal(60, 4), normal(60, 1) > 0)
    found = certify(
        sgd,
        Task(Pair, ()).model(),
        (x, torch.arange(60) % 3),
        steps=2,
        loss=nn.functional.cross_entropy,
        output=lambda raw: raw["logits"],
        keep=("norm",),
    )
    assert 0 < found.moved < 1


def test_chance_is_the_same_for_both_networks_and_the_users_stream_stays() -> None:
    model = Task(lambda: nn.Sequential(nn.Linear(2, 4), nn.Dropout(0.5), nn.Linear(4, 2)), (2,)).model()
    before, state = [p.clone() for p in model.parameters()], torch.random.get_rng_state()
    found = certify(sgd, model, WELL.batch(), steps=3, seed=Random(stretch=1.0, shift=0.0))
    assert found.invariant
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(p.grad is None for p in model.parameters())


class Decaying(nn.Module):
    """The outputs depend on the sizes of the weights as numbers: no function of another basis."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * sum(p.square().sum() for p in self.parameters())


def test_what_would_certify_nothing_is_refused() -> None:
    model, batch = WELL.model(), WELL.batch()
    with pytest.raises(ValueError, match="must make the optimizer of the model that it is given"):
        certify(lambda _: sgd(model), model, batch)
    with pytest.raises(ValueError, match="did not move the function"):
        certify(lambda m: torch.optim.SGD(m.parameters(), lr=0.0), model, batch)
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        certify(sgd, model, batch, steps=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'sede'"):
        certify(sgd, model, batch, sede=1)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"outputs \[120, 2\] and targets \[120\] differ in shape: pass loss="):
        certify(sgd, model, (batch[0], batch[1][:, 0]))
    with pytest.raises(ValueError, match="another function to begin with"):
        certify(sgd, Task(Decaying, (2,)).model(), batch)
    with pytest.raises(
        NonFiniteError, match=r"the outputs of the network are not finite after step \d+: take a smaller"
    ):
        certify(lambda m: torch.optim.SGD(m.parameters(), lr=1e300), model, batch)
