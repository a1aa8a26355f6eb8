"""Bayesian neural networks: exact for linear models, against dense oracles elsewhere."""

from __future__ import annotations

import logging
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError, NonFiniteError

N, δ, β = 30, 0.7, 0.3


def _generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _regression() -> tuple[Tensor, Tensor]:
    x = torch.randn(N, 3, generator=_generator(), dtype=torch.float64)
    return x, x @ torch.tensor([[1.0], [-2.0], [0.5]], dtype=torch.float64) + 0.3


def _squared(y: Tensor, t: Tensor) -> Tensor:
    return 0.5 * (y - t).square().sum(1).mean()


def _linear(structure: ng.structures.Structure, rates: ng.vi.Rates, **options: int) -> ng.vi.VariationalNetwork:
    model = nn.Linear(3, 1).double()
    prior = ng.vi.Prior(precision=δ, examples=N)
    metric = ng.Fisher(ng.Gaussian())
    return ng.vi.VariationalNetwork(model, metric, structure, prior, rates, generator=_generator(), **options)


def _exact() -> tuple[Tensor, Tensor]:
    """Bayesian linear regression in the order (weight, bias)."""
    x, t = _regression()
    X = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    Λ = X.T @ X + δ * torch.eye(4, dtype=torch.float64)
    return torch.linalg.solve(Λ, X.T @ t).squeeze(1), Λ


def _mean(net: ng.vi.VariationalNetwork) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.model.params.values()])


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense(), ng.Kronecker()], ids=lambda s: type(s).__name__)
def test_one_step_of_size_one_is_the_exact_posterior_of_a_linear_model(structure: ng.structures.Structure) -> None:
    """One layer with a Gaussian likelihood: G = 1 ⊗ E[aaᵀ], which K-FAC has without error."""
    x, t = _regression()
    net = _linear(structure, ng.vi.Rates(1.0, 1.0))
    μ, Λ = _exact()
    for _ in range(2):  # at the mean, and from samples: both are exact
        net.step(x, t, _squared)
        torch.testing.assert_close(_mean(net), μ, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(
            N * net.operator.dense() + δ * torch.eye(4, dtype=torch.float64), Λ, rtol=1e-10, atol=1e-10
        )


def _averages(structure: ng.structures.Structure) -> list[tuple[Tensor, Tensor]]:
    """G of a posterior after every step on a batch of its own, and the second moment A [4 4] of the batch.

    For one output with a Gaussian likelihood G of a batch is A. Its inputs have other eigenvectors in every batch.
    """
    x, t = _regression()
    x = x * torch.tensor([30.0, 10.0, 3.0], dtype=torch.float64)
    net, out = _linear(structure, ng.vi.Rates(1.0, β)), []
    for batch_x, batch_t in zip(x.split(5), t.split(5), strict=True):
        net.step(batch_x, batch_t, _squared)
        a = torch.cat([batch_x, torch.ones(5, 1, dtype=torch.float64)], 1)
        out.append((net.operator.dense(), a.T @ a / 5))
    return out


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Kronecker()])
def test_the_metric_of_a_linear_model_is_the_average_of_its_batches(structure: ng.structures.Structure) -> None:
    """S = 1 in every batch, so that S ⊗ A of the averages is the average."""
    mean = None
    for G, A in _averages(structure):
        mean = A if mean is None else (1 - β) * mean + β * A
        torch.testing.assert_close(G, mean, rtol=1e-10, atol=1e-10)


def test_the_eigenvectors_are_those_of_the_average_in_every_step() -> None:
    """D is measured in the eigenvectors P of the last average Ā, and carried to those of the new one."""
    Ā = D = P = None
    for G, A in _averages(ng.EigenKronecker()):
        if Ā is None or D is None or P is None:
            Ā = A
            D, P = torch.linalg.eigh(Ā)
        else:
            measured = P @ torch.diag((1 - β) * D + β * (P.T @ A @ P).diagonal()) @ P.T
            Ā = (1 - β) * Ā + β * A
            P = torch.linalg.eigh(Ā)[1]
            D = (P.T @ measured @ P).diagonal()
        torch.testing.assert_close(G, P @ torch.diag(D) @ P.T, rtol=1e-10, atol=1e-10)


def test_draws_have_the_mean_and_the_covariance_of_the_posterior() -> None:
    x, t = _regression()
    net = _linear(ng.Kronecker(), ng.vi.Rates(1.0, 1.0))
    net.step(x, t, _squared)
    μ, Λ = _exact()
    drawn = net.sample(40_000, _generator(1))
    flat = torch.cat([t.flatten(1) for t in drawn.values()], 1)
    torch.testing.assert_close(flat.mean(0), μ, rtol=0, atol=0.01)
    torch.testing.assert_close(flat.T.cov(), torch.linalg.inv(Λ), rtol=0, atol=0.002)


def test_the_bound_of_a_linear_model_is_its_evidence() -> None:
    x, t = _regression()
    net = _linear(ng.Dense(), ng.vi.Rates(1.0, 1.0))
    net.step(x, t, _squared)
    X = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    marginal = torch.distributions.MultivariateNormal(
        torch.zeros(N, dtype=torch.float64), torch.eye(N, dtype=torch.float64) + X @ X.T / δ
    )
    constant = 0.5 * N * math.log(2 * math.pi)  # which the loss leaves out
    found = net.elbo(x, t, _squared, samples=4000) - constant
    torch.testing.assert_close(found, marginal.log_prob(t.squeeze(1)), rtol=0, atol=0.15)


def test_the_diagonal_posterior_of_a_linear_model_has_the_exact_mean_and_the_diagonal_of_the_precision() -> None:
    x, t = _regression()
    net = _linear(ng.Diagonal(), ng.vi.Rates(0.5, 0.5))
    for _ in range(150):
        net.step(x, t, _squared)
    μ, Λ = _exact()
    torch.testing.assert_close(_mean(net), μ, rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(N * net.operator.diagonal() + δ, Λ.diagonal(), rtol=1e-10, atol=1e-10)


def test_the_first_step_of_a_network_is_the_damped_gauss_newton_step_of_the_posterior() -> None:
    """Dense oracle: Jacobians by torch.func, softmax Fisher in closed form."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x, _ = _regression()
    t = (x[:, 0] > 0).long()
    params = {name: p.detach().clone() for name, p in model.named_parameters()}
    θ = torch.cat([p.flatten() for p in params.values()])

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split([p.numel() for p in params.values()])
        named = {name: part.view_as(p) for (name, p), part in zip(params.items(), parts, strict=True)}
        return torch.func.functional_call(model, named, (x,))

    J = torch.func.jacrev(outputs)(θ)  # [n c p]
    p = outputs(θ).softmax(1)
    H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
    G = torch.einsum("ncp,ncd,ndq->pq", J, H, J) / N
    slope = torch.func.grad(lambda flat: F.cross_entropy(outputs(flat), t))(θ)
    expected = θ - 0.3 * torch.linalg.solve(G + δ / N * torch.eye(len(θ), dtype=torch.float64), slope + δ / N * θ)
    prior = ng.vi.Prior(δ, N)
    net = ng.vi.VariationalNetwork(model, ng.Fisher(ng.Categorical()), ng.Dense(), prior, ng.vi.Rates(0.3, 0.1))
    net.step(x, t, F.cross_entropy)
    torch.testing.assert_close(_mean(net), expected.detach(), rtol=1e-9, atol=1e-9)


def test_a_step_averages_the_metric_and_the_gradient_over_pairs_of_samples() -> None:
    """Dense oracle with the same noise: Λ ← (1 − β)Λ + β mean, μ ← μ − α Λ⁻¹(…)."""
    x, _ = _regression()
    t = (x[:, 0] > 0).long()
    torch.manual_seed(1)
    model = nn.Linear(3, 2).double()
    metric, prior = ng.Fisher(ng.Categorical()), ng.vi.Prior(δ, N)
    net = ng.vi.VariationalNetwork(model, metric, ng.Dense(), prior, ng.vi.Rates(0.4, 0.25), 2, _generator())
    net.step(x, t, F.cross_entropy)
    μ, G = _mean(net), net.operator.dense()
    state = net.generator.get_state()
    ξ = torch.randn(2, 8, generator=torch.Generator().set_state(state), dtype=torch.float64)
    ε = net.inverse.root_times(ξ) / math.sqrt(N)
    a = torch.cat([x, torch.ones(N, 1, dtype=torch.float64)], 1)
    total, slopes = torch.zeros(8, 8, dtype=torch.float64), torch.zeros(8, dtype=torch.float64)
    for θ in (μ + ε[0], μ - ε[0], μ + ε[1], μ - ε[1]):
        W = torch.cat([θ[:6].view(2, 3), θ[6:].unsqueeze(1)], 1)
        p = (a @ W.T).softmax(1)
        H = torch.diag_embed(p) - p.unsqueeze(2) * p.unsqueeze(1)
        order = [0, 1, 2, 4, 5, 6, 3, 7]  # (output, input) → weight first, then bias
        total += torch.einsum("ncd,ni,nj->cidj", H, a, a).reshape(8, 8)[order][:, order] / N / 4
        residual = p - F.one_hot(t, 2)
        slopes += torch.einsum("nc,ni->ci", residual, a).reshape(8)[order] / N / 4
    expected_G = 0.75 * G + 0.25 * total
    expected = μ - 0.4 * torch.linalg.solve(expected_G + δ / N * torch.eye(8, dtype=torch.float64), slopes + δ / N * μ)
    net.step(x, t, F.cross_entropy)
    torch.testing.assert_close(net.operator.dense(), expected_G, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(_mean(net), expected, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(
    ("metric", "structure", "steps"),
    [
        (ng.Empirical(lambda y, t: F.cross_entropy(y, t, reduction="none")), ng.Diagonal(), 300),
        (ng.Fisher(ng.Categorical()), ng.Kronecker(), 120),
    ],
    ids=["VOGN", "noisy K-FAC"],
)
def test_a_network_learns_and_is_less_certain_away_from_its_data(
    metric: ng.output.OutputMetric, structure: ng.structures.Structure, steps: int
) -> None:
    torch.manual_seed(0)
    x = torch.randn(100, 2, generator=_generator())
    t = (x[:, 0] * x[:, 1] > 0).long()
    model = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 2))
    net = ng.vi.VariationalNetwork(model, metric, structure, ng.vi.Prior(0.5, 100), generator=_generator())
    for _ in range(10):
        net.step(x, t, F.cross_entropy)
    early = float(net.elbo(x, t, F.cross_entropy))
    for _ in range(steps):
        net.step(x, t, F.cross_entropy)
    assert float(net.elbo(x, t, F.cross_entropy)) > early + 20
    predicted = net.outputs(x, 30).softmax(-1).mean(0)
    assert float((predicted.argmax(1) == t).double().mean()) > 0.85
    logits = net.outputs(torch.cat([x, 20 * x]), 60)
    spread = (logits[..., 1] - logits[..., 0]).std(0)
    assert float(spread[100:].mean()) > 1.2 * float(spread[:100].mean())


class Loose(nn.Module):
    """A layer whose examples have met has lost its rule, and a warning says so."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        found: Tensor = self.last(h + 0.1 * (h @ h.T).mean(1, keepdim=True))
        return found


def test_what_is_found_out_about_the_model_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.randn(20, 2, generator=_generator())
    t = (x[:, 0] > 0).long()
    metric = ng.Fisher(ng.Categorical(), samples=1)
    net = ng.vi.VariationalNetwork(Loose(), metric, ng.Diagonal(), ng.vi.Prior(0.5, 20), generator=_generator())
    with caplog.at_level(logging.WARNING, "natgrad"):
        for _ in range(3):
            net.step(x, t, F.cross_entropy)
    assert len(caplog.records) == 1
    assert "first.bias, first.weight have no layer rule" in caplog.records[0].getMessage()


class TestBadInput:
    def test_numbers_that_make_no_sense_are_refused(self) -> None:
        with pytest.raises(ValueError, match=r"Prior\(precision=…\) must be positive"):
            ng.vi.Prior(0.0, 3)
        with pytest.raises(ValueError, match=r"Prior\(examples=…\) is the number of all training examples"):
            ng.vi.Prior(1.0, 0)
        with pytest.raises(ValueError, match=r"rate=2.0 must lie in \(0, 1\]"):
            ng.vi.Rates(mean=2.0)
        with pytest.raises(ValueError, match=r'a mean over the examples, and .*sum.* with reduction="mean"'):
            ng.vi.VariationalNetwork(
                nn.Linear(2, 1), nn.CrossEntropyLoss(reduction="sum"), ng.Dense(), ng.vi.Prior(1.0, 4)
            )
        with pytest.raises(ValueError, match="needs one pair of samples or more, got 0"):
            _linear(ng.Dense(), ng.vi.Rates(), pairs=0)

    def test_there_is_nothing_to_draw_from_before_the_first_step(self) -> None:
        with pytest.raises(NatgradError, match="there is no posterior before the first step"):
            _linear(ng.Dense(), ng.vi.Rates()).sample(1)

    def test_a_batch_that_is_not_finite_leaves_all_as_it_was(self) -> None:
        x, t = _regression()
        net = _linear(ng.Dense(), ng.vi.Rates())
        net.step(x, t, _squared)
        μ, G = _mean(net), net.operator.dense()
        with pytest.raises(NonFiniteError, match="the loss is NaN or infinity at a sample of q"):
            net.step(x, t * math.nan, _squared)
        assert torch.equal(_mean(net), μ)
        assert torch.equal(net.operator.dense(), G)

    def test_a_gradient_that_is_not_finite_leaves_all_as_it_was(self) -> None:
        """√0 = 0 has the derivative ∞, and 0·∞ is NaN: the loss is finite."""
        x, t = _regression()
        net = _linear(ng.Dense(), ng.vi.Rates())
        net.step(x, t, _squared)
        μ, G = _mean(net), net.operator.dense()
        with pytest.raises(NonFiniteError, match="the gradient of the loss is NaN or infinity at a sample of q"):
            net.step(x, t, lambda y, t: _squared(y, t) + (0 * y).square().sum().sqrt())
        assert torch.equal(_mean(net), μ)
        assert torch.equal(net.operator.dense(), G)

    def test_a_loss_without_a_graph_is_refused(self) -> None:
        x, t = _regression()
        with pytest.raises(ValueError, match="has no graph: compute it from the outputs"):
            _linear(ng.Dense(), ng.vi.Rates()).step(x, t, lambda y, t: _squared(y.detach(), t))

    def test_a_loss_that_is_not_one_number_is_refused(self) -> None:
        x, t = _regression()
        with pytest.raises(ValueError, match="must be one number, the mean over the batch"):
            _linear(ng.Dense(), ng.vi.Rates()).step(x, t, lambda y, t: (y - t).square())

    def test_a_structure_that_cannot_be_inverted_is_refused(self) -> None:
        x, t = _regression()
        with pytest.raises(IncompatibleError, match="does not work with ImplicitOperator"):
            _linear(ng.Implicit(), ng.vi.Rates()).step(x, t, _squared)

    def test_no_draws_are_refused(self) -> None:
        x, t = _regression()
        net = _linear(ng.Dense(), ng.vi.Rates())
        net.step(x, t, _squared)
        with pytest.raises(ValueError, match="needs a count ≥ 1, got 0"):
            net.sample(0)


# The state of a Bayesian neural network: a run that was cut in two is the run.


STRUCTURES = [ng.Dense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker()]


def _data() -> tuple[Tensor, Tensor]:
    x = torch.randn(20, 2, generator=_generator(), dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


def _classifier(structure: ng.structures.Structure, width: int = 4) -> ng.vi.VariationalNetwork:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 2)).double()
    metric, prior = ng.Fisher(ng.Categorical(), samples=1), ng.vi.Prior(0.5, 20)
    return ng.vi.VariationalNetwork(model, metric, structure, prior, generator=_generator())


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
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
