"""opt.metrics(): its numbers are those of a dense computation, and no number is read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng
from tests.optim.tasks import seeded
from tests.pulled import close, normal

λ = 0.03


class Ops(TorchDispatchMode):
    """Counts the operations of torch, and refuses, if it should, those that bring a number to the host."""

    def __init__(self, *, waiting: bool = True) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count, self.waiting = 0, waiting

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        assert self.waiting or "_local_scalar_dense" not in str(func), "a number is read on the host"
        return func(*args, **(kwargs or {}))


class Line:
    """A linear model of one output with ½‖y − t‖²/n, whose metric is XᵀX/n, in double precision."""

    def __init__(self) -> None:
        self.x, self.t = normal(40, 4), normal(40, 1, seed=1)
        self.model = seeded(lambda: nn.Linear(4, 1, bias=False)).double()
        self.G = self.x.T @ self.x / len(self.x)

    def gradient(self) -> Tensor:
        return self.x.T @ (self.x @ self.model.weight.detach().flatten() - self.t.flatten()) / len(self.x)

    def closure(self, opt: torch.optim.Optimizer) -> Callable[[], Tensor]:
        def closure() -> Tensor:
            opt.zero_grad()
            loss = 0.5 * (self.model(self.x) - self.t).square().mean()
            loss.backward()
            return loss

        return closure


def numbers(opt: Any, **options: Any) -> dict[str, float]:
    return {name.removeprefix("natgrad/"): float(value) for name, value in opt.metrics(**options).items()}


@pytest.mark.parametrize("step", [ng.Fixed(), ng.KLClip(1e-4), ng.TrustRegion(1e-3)], ids=repr)
def test_length_and_decrease_are_those_of_the_dense_metric(step: Any) -> None:
    line = Line()
    opt = ng.NaturalGradient(line.model, ng.Euclidean(), lr=0.3, damping=λ, step=step)
    for _ in range(2):
        before, ω = line.model.weight.detach().flatten().clone(), line.gradient()
        loss = float(opt.step(line.closure(opt)))
    δ, found = line.model.weight.detach().flatten() - before, numbers(opt)
    metric = line.G if isinstance(step, ng.TrustRegion) else line.G + λ * torch.eye(4).double()
    assert found["loss"] == loss
    assert found["step_rms"] == pytest.approx(float(δ.square().mean().sqrt()))
    assert found["step_length"] == pytest.approx(float((δ @ metric @ δ).sqrt()))
    if not isinstance(step, ng.TrustRegion):
        assert found["predicted_decrease"] == pytest.approx(float(-ω @ δ - 0.5 * δ @ metric @ δ))
        whole = 0.3 * torch.linalg.solve(metric, ω)
        assert found["lr_effective"] == pytest.approx(0.3 * float(δ.norm() / whole.norm()))
    assert found.get("clipped_share", 1.0) == 1.0


def test_self_tuned_tells_the_rate_and_the_momentum_that_it_chose() -> None:
    line, one = Line(), torch.eye(4).double()
    rule = ng.SelfTuned(every=1, fraction=1.0)
    opt = ng.NaturalGradient(line.model, ng.Euclidean(), damping=λ, step=rule)
    opt.step(line.closure(opt))
    last = -opt.last.velocity["weight"].flatten() if opt.last and opt.last.velocity else None
    assert last is not None
    line.x, line.t = line.x[:30], line.t[:30]
    G, ω = line.x.T @ line.x / 30, line.gradient()
    before, damping = line.model.weight.detach().flatten().clone(), float(opt.param_groups[0]["damping"])
    opt.step(line.closure(opt))
    found, δ = numbers(opt), line.model.weight.detach().flatten() - before
    Δ = -torch.linalg.solve(G + damping * one, ω)
    close(δ, found["lr_effective"] * Δ - found["momentum_effective"] * last)
    metric = G + damping * one
    assert found["predicted_decrease"] == pytest.approx(float(-ω @ δ - 0.5 * δ @ metric @ δ))
    assert found["step_length"] == pytest.approx(float((δ @ metric @ δ).sqrt()))


def test_levenberg_marquardt_tells_what_it_compared() -> None:
    line = Line()
    opt = ng.NaturalGradient(line.model, ng.Euclidean(), damping=λ, step=ng.LevenbergMarquardt())
    first = float(opt.step(line.closure(opt)))
    found, second = numbers(opt), float(line.closure(opt)().detach())
    assert found["reduction_ratio"] == pytest.approx((first - second) / found["predicted_decrease"])


def test_a_step_that_is_refused_is_counted() -> None:
    line = Line()
    opt = ng.NaturalGradient(line.model, ng.Euclidean(), lr=1e3, step=ng.Armijo(tries=1))
    opt.step(line.closure(opt))
    assert numbers(opt)["rejected_steps"] == 1
    assert numbers(opt)["step_rms"] == 0


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


LOSS = nn.CrossEntropyLoss()
MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "K-FAC": lambda m: ng.KFAC(m, LOSS),
    "EK-FAC": lambda m: ng.EKFAC(m, LOSS),
    "tuned": lambda m: ng.KFAC(m, LOSS, step=ng.SelfTuned()),
    "groups": lambda m: ng.KFAC(m, LOSS, groups=[{"params": m[2].parameters(), "lr": 0.01}]),  # type: ignore[index]
    "outputs": lambda m: ng.Natural(m, LOSS),
    "natural": lambda m: ng.Natural(m),
    "muon": lambda m: ng.Muon(m),
    "shampoo": lambda m: ng.Shampoo(m),
    "soap": lambda m: ng.SOAP(m),
}


def trained(
    make: Callable[[nn.Module], Any], steps: int, **options: Any
) -> tuple[nn.Module, Any, Callable[[], Tensor]]:
    model = seeded(network)
    opt, x, t = make(model), normal(16, 4).float(), torch.arange(16) % 3

    def closure() -> Tensor:
        opt.zero_grad()
        loss = LOSS(model(x), t)
        loss.backward()
        return loss

    for _ in range(steps):
        opt.step(closure)
    return model, opt, closure


@pytest.mark.parametrize("name", MAKE)
def test_no_number_is_read_and_fifty_steps_have_a_hundred_times_as_many_operations(name: str) -> None:
    _model, opt, closure = trained(MAKE[name], 3)
    assert opt.metrics().keys() >= {"natgrad/step", "natgrad/lr", "natgrad/loss", "natgrad/step_rms"}
    with Ops(waiting=False) as told:
        found = opt.metrics()
    assert all(value.ndim == 0 and not value.requires_grad for value in found.values())
    with Ops() as stepped:
        for _ in range(5):
            opt.step(closure)
    assert told.count <= 0.01 * 10 * stepped.count


@pytest.mark.parametrize("name", ["natural", "muon", "shampoo", "soap", "outputs", "K-FAC"])
def test_step_rms_is_that_of_the_parameters_that_the_metric_moves(name: str) -> None:
    model, opt, closure = trained(MAKE[name], 2)
    for group in opt.param_groups:
        group["weight_decay"] = 0.0
    before = [p.detach().clone() for p in model.parameters()]
    opt.step(closure)
    moved = [p.detach() - q for p, q in zip(model.parameters(), before, strict=True) if name == "K-FAC" or p.ndim == 2]
    rms = torch.cat([t.flatten() for t in moved]).double().square().mean().sqrt()
    found = numbers(opt)
    assert found["step_rms"] == pytest.approx(float(rms), rel=1e-3)
    assert found["params_metric"] == sum(t.numel() for t in moved)
    assert found["params_metric"] + found["params_adamw"] == sum(p.numel() for p in model.parameters())


def test_ages_and_counts_follow_the_schedule() -> None:
    make = lambda m: ng.KFAC(m, LOSS, metric_every=3, inverse_every=4, early=False)  # noqa: E731
    _model, opt, closure = trained(make, 0)
    seen = []
    for _ in range(9):
        opt.step(closure)
        found = numbers(opt)
        names = ("step", "metric_age", "inverse_age", "metric_updates", "inverse_updates")
        seen.append([int(found[name]) for name in names])
    assert [row[1] for row in seen] == [0, 1, 2, 0, 1, 2, 0, 1, 2]
    assert [row[3] for row in seen] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert [row[2] for row in seen] == [0, 1, 2, 3, 0, 1, 2, 3, 0]
    assert [row[4] for row in seen] == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert [row[0] for row in seen] == list(range(1, 10))


def test_layers_are_those_of_the_diagnostics() -> None:
    _model, opt, _ = trained(MAKE["K-FAC"], 3)
    found, layer = numbers(opt, layers=True), opt.diagnostics().layers[1]
    assert found["layer/2.weight/cond_S"] == layer.factors["S"].condition
    assert found["layer/2.weight/damping_share"] == layer.share
    assert found["layer/2.weight/step_length"] == layer.step
    assert found["layer/0.weight/dead_units"] == 0


def test_conditions_of_shampoo_are_those_of_its_factors() -> None:
    model, opt, _ = trained(MAKE["shampoo"], 3)
    for p, name in ((model[0].weight, "0.weight"), (model[2].weight, "2.weight")):  # type: ignore[index]
        S = torch.linalg.eigvalsh(opt.state[p]["S"][0])
        assert numbers(opt, layers=True)[f"layer/{name}/cond_S"] == pytest.approx(float(S[-1] / S[0].clamp(min=0)))


def test_state_bytes_are_those_of_what_is_kept() -> None:
    model, opt, _ = trained(MAKE["K-FAC"], 3)
    factors = [opt.tracker.average.tensors(), opt.preconditioner.inverse.tensors()]
    kept = sum(t.nbytes for of in factors for t in of.values())
    assert numbers(opt)["state_bytes"] == kept + sum(p.nbytes for p in model.parameters())  # momentum


def test_gauss_newton_tells_of_its_problem() -> None:
    net, x = seeded(lambda: nn.Linear(1, 2)).double(), normal(20, 1)
    opt = ng.GaussNewton(net, ng.Residuals(lambda net, x: net(x) - x.exp(), x))
    assert "natgrad/loss" not in opt.metrics()
    before, loss = [p.detach().clone() for p in net.parameters()], float(opt.step())
    δ = torch.cat([(p.detach() - q).flatten() for p, q in zip(net.parameters(), before, strict=True)])
    found = numbers(opt)
    assert found["loss"] == loss
    assert found["step_rms"] == pytest.approx(float(δ.square().mean().sqrt()))
