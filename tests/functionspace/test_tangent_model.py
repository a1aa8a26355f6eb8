"""The linearised network: its path under gradient descent in closed form, its metric, one Gauss–Newton step."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.functionspace import TangentModel
from tests.output.table import close, normal


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 6), nn.Tanh(), nn.Linear(6, 2)).double()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    """[(n o) p], by torch."""
    θ = {name: p.detach() for name, p in model.named_parameters()}
    J = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(θ)
    return torch.cat([J[name].flatten(2) for name in θ], 2).flatten(0, 1)


def test_it_is_the_first_two_terms_of_taylors_series() -> None:
    model, x, δ = network(), normal(4, 2), normal(32)
    tangent = TangentModel(model)
    close(tangent(x), model(x))
    with torch.no_grad():
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(tangent.parameters()) + δ, tangent.parameters())
    close(tangent(x), model(x) + (jacobian(model, x) @ δ).view(4, 2))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(2, 1, batch_first=True), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(1) * torch.linspace(-1, 1, 3, dtype=x.dtype).view(3, 1)
        return self.head(self.attention(x, x, x, need_weights=False)[0].sum(1))


def normalised(training: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    model.train(training)[3].eval()
    return model


@pytest.mark.parametrize(
    "make",
    [Attending, lambda: normalised(True), lambda: normalised(False)],
    ids=["attention", "training", "evaluation"],
)
def test_fused_attention_and_batch_statistics_are_those_of_the_network(make: Callable[[], nn.Module]) -> None:
    """Modules keep their modes, running averages their values: f(θ₀) + d/dt f(θ₀ + tδ), by differences."""
    torch.manual_seed(0)
    model, x, h = make().double(), normal(5, 2), 1e-5
    tangent, before = TangentModel(model), {name: b.clone() for name, b in model.named_buffers()}
    assert tangent.training == model.training
    start = nn.utils.parameters_to_vector(model.parameters()).detach()
    δ = normal(len(start))

    def at(θ: Tensor, of: nn.Module) -> Tensor:
        nn.utils.vector_to_parameters(θ, of.parameters())
        return of(x).detach()

    got = at(start + δ, tangent)
    assert all(torch.equal(b, before[name]) for name, b in tangent.network.named_buffers())
    slope = (at(start + h * δ, model) - at(start - h * δ, model)) / (2 * h)
    close(got, at(start, model) + slope, 1e-7)
    assert [m.training for m in tangent.eval().network.modules()] == [False] * len(list(model.modules()))


def test_gradient_descent_follows_the_kernel_of_the_start() -> None:
    """y_k − t = (1 − ηΘ/N)ᵏ(y₀ − t) for ½‖y − t‖²/N, with Θ = JJᵀ of the network; the network itself leaves it."""
    model, x, t, η = network(), normal(5, 2), normal(5, 2, seed=1), 0.2
    tangent, net = TangentModel(model), copy.deepcopy(model)
    Θ = jacobian(model, x) @ jacobian(model, x).T
    propagator = torch.linalg.matrix_power(torch.eye(10).double() - η * Θ / 5, 30)
    expected = t + (propagator @ (model(x) - t).flatten()).view(5, 2).detach()
    for trained in (tangent, net):
        opt = torch.optim.SGD(trained.parameters(), lr=η)
        for _ in range(30):
            opt.zero_grad()
            ((trained(x) - t).square().sum() / 10).backward()
            opt.step()
    close(tangent(x).detach(), expected)
    assert float((net(x).detach() - expected).abs().max()) > 1e-3


def test_its_metric_is_that_of_the_network_at_the_start_wherever_it_goes() -> None:
    model, x = network(), normal(7, 2)
    tangent = TangentModel(model)
    J = jacobian(model, x)
    with torch.no_grad():
        for p in tangent.parameters():
            p.add_(0.3)
    for structure in (ng.Dense(), ng.Kernel(), ng.Implicit()):
        G = structure.estimate(ng.pullback(tangent, x, ng.Euclidean()))
        close(G.dense(), J.T @ J / 7)
    close(ng.functionspace.ntk(tangent, x).sum(), (J @ J.T).sum())


def test_one_gauss_newton_step_is_least_squares() -> None:
    model, x, t, λ = network(), normal(9, 2), normal(9, 2, seed=1), 1e-2
    tangent = TangentModel(model)
    opt = ng.NaturalGradient(tangent, ng.Euclidean(), structure=ng.Kernel(), lr=1.0, damping=λ)
    ((tangent(x) - t).square().sum() / 18).backward()
    opt.step()
    J, r = jacobian(model, x), (model(x) - t).flatten().detach()
    δ = torch.linalg.solve(J.T @ J / 9 + λ * torch.eye(32).double(), J.T @ r / 9)
    close(tangent(x).flatten().detach(), (model(x).flatten() - J @ δ).detach())


def test_it_moves_copies_and_saves_as_any_module() -> None:
    model, x = network(), normal(3, 2)
    tangent = TangentModel(model)
    with torch.no_grad():
        for p in tangent.parameters():
            p.mul_(1.1)
    other = TangentModel(model)
    other.load_state_dict(tangent.state_dict())
    close(other(x), tangent(x))
    close(copy.deepcopy(tangent)(x), tangent(x))
    assert tangent.float()(x.float()).dtype == torch.float32
    assert all(p.grad is None for p in model.parameters())
