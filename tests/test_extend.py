"""The examples that extend the library are right: each is compared with what it should be, by other means."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from examples.extend import family, layer_rule, step_rule, structure
from examples.extend.family import LogisticNoise
from examples.extend.layer_rule import Interaction, InteractionRule, Recommender
from examples.extend.step_rule import Polyak
from examples.extend.structure import Scales
from tests import oracle
from tests.pulled import close, normal


def test_the_rule_of_a_layer_gives_the_metric_of_its_jacobian() -> None:
    torch.manual_seed(0)
    model, x = Recommender().double(), normal(7, 11)
    nn.init.normal_(model.match.bias)
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.poisson(model(x)))
    pb = ng.pullback(model, x, ng.Fisher(ng.Poisson()), rules=[InteractionRule()])
    assert "InteractionRule" in {type(block.rule).__name__ for block in pb.layers}
    close(ng.Kernel().estimate(pb).dense(), G)


@pytest.mark.parametrize("frozen", [None, "weight", "bias"])
def test_its_factors_are_those_of_the_products_of_its_inputs(frozen: str | None) -> None:
    """Of one layer on its own: A = E[a aᵀ], and S = 1 for ½‖y − t‖²."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.match = Interaction(2, 3, 4)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.match(x[:, :2], x[:, 2:])
            return y

    model, x = Alone().double(), normal(6, 5)
    if frozen is not None:
        model.match.get_parameter(frozen).requires_grad_(False)
    a = torch.stack([torch.outer(row[:2], row[2:]).flatten() for row in x])
    columns = {"weight": a, "bias": torch.ones(6, 1, dtype=a.dtype)}
    a = torch.cat([t for key, t in columns.items() if key != frozen], 1)
    G = ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean(), rules=[InteractionRule()]))
    expected = torch.kron(torch.eye(4, dtype=a.dtype), a.T @ a / 6)
    order = torch.arange(4 * a.shape[1]).view(4, -1)
    order = torch.cat([order[:, :6].flatten(), order[:, 6:].flatten()]) if frozen is None else order.flatten()
    close(G.dense(), expected[order][:, order])


def test_k_fac_trains_a_model_with_the_layer() -> None:
    losses = layer_rule.train()
    assert losses[-1] < 0.1 * losses[0]


def _logistic(t: Tensor, y: Tensor, scale: float) -> Tensor:
    """log p(t | y) by torch: the logit of a uniform number, scaled and moved."""
    uniform = torch.distributions.Uniform(torch.zeros_like(y), torch.ones_like(y))
    sigmoid = torch.distributions.SigmoidTransform().inv
    moved = torch.distributions.AffineTransform(y, scale)
    logistic = torch.distributions.TransformedDistribution(uniform, [sigmoid, moved], validate_args=False)
    return logistic.log_prob(t)


def test_the_information_of_the_family_is_the_variance_of_its_scores_by_quadrature() -> None:
    y, scale = normal(3, 2), 0.7
    ε = torch.linspace(-40, 40, 200_001, dtype=torch.float64)
    leaf = torch.zeros((), dtype=torch.float64, requires_grad=True)
    t = scale * ε
    log_p = _logistic(t, leaf.expand_as(t), scale)
    score = torch.func.jvp(lambda y: _logistic(t, y.expand_as(t), scale), (leaf.detach(),), (torch.ones_like(leaf),))[1]
    F = torch.trapezoid(log_p.detach().exp() * score.square(), t)
    u, family = normal(3, 2, seed=1), LogisticNoise(scale)
    close(family.flat(y, u), F * u)
    s = family.root(y).flatten(2)
    close(torch.einsum("knd,kne->nde", s, s), F * torch.eye(2, dtype=y.dtype).expand(3, 2, 2))


@pytest.mark.parametrize("distance", [1e-6, 0.05, 0.099, 0.101, 1.0, 30.0])
def test_its_divergence_is_that_of_the_density_by_quadrature(distance: float) -> None:
    t = torch.linspace(-90, 90, 400_001, dtype=torch.float64)
    here, there = (_logistic(t, torch.full_like(t, y), 1.0) for y in (0.0, distance))
    expected = torch.trapezoid(here.exp() * (here - there), t)
    y = torch.tensor([[0.0]], dtype=torch.float64)
    got = LogisticNoise().kl(y, y + distance)
    torch.testing.assert_close(got, expected.reshape(1), rtol=1e-9, atol=1e-15)


def test_its_samples_are_scores_of_the_model() -> None:
    y = normal(2, 1)
    s = LogisticNoise(0.5).scores(y, 400_000, torch.Generator().manual_seed(0))
    assert float(s.mean(0).abs().max()) < 0.01
    close(s.square().mean(0), torch.full_like(y, 4 / 3), 0.01)


def test_outliers_do_not_turn_the_line_of_logistic_noise() -> None:
    noise = LogisticNoise(0.1)
    assert abs(family.slope(noise, noise.loss) - 2) < 0.2 < abs(family.slope(ng.Gaussian(), nn.functional.mse_loss) - 2)


def test_polyaks_step_reaches_the_minimum_of_a_linear_loss_model() -> None:
    """On ½‖y − t‖² of a linear model that fits, L − L* = ½⟨ω, v⟩: the first step is half of Newton's."""
    model, x = nn.Linear(3, 2, bias=False).double(), normal(8, 3)
    θ, best = model.weight.detach().clone(), normal(2, 3, seed=2)
    t = x @ best.T
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=Polyak(), damping=0.0)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - t).square().sum(1).mean()
        loss.backward()
        return loss

    opt.step(closure)
    close(model.weight.detach(), 0.5 * (θ + best), 1e-9)


def test_polyaks_length_trains_a_network_to_its_minimum() -> None:
    losses = step_rule.train()
    assert losses[-1] < 1e-6 * losses[0]


def test_polyaks_rule_stops_where_the_gradient_is_zero() -> None:
    model, x = nn.Linear(2, 1).double(), normal(4, 2)
    t = model(x).detach()
    opt = ng.NaturalGradient(model, ng.Euclidean(), step=Polyak())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = (model(x) - t).square().mean()
        loss.backward()
        return loss

    opt.step(closure)
    assert opt.last is not None
    assert opt.last.converged
    assert not opt.last.accepted


def _scales() -> tuple[ng.operators.Operator, Tensor, list[int]]:
    """The operator of a network, the diagonal that it stands for by the oracle, and the sizes of the parameters."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), normal(9, 3)
    exact = oracle.dense(oracle.module_jacobian(model, x), oracle.poisson(model(x))).diagonal()
    sizes = [p.numel() for p in model.parameters()]
    means = torch.cat([piece.mean().expand(len(piece)) for piece in exact.split(sizes)])
    return Scales().estimate(ng.pullback(model, x, ng.Fisher(ng.Poisson()))), means, sizes


def test_the_structure_keeps_the_mean_of_the_diagonal_of_every_parameter() -> None:
    G, d, sizes = _scales()
    v = normal(sum(sizes))
    close(G.dense(), d.diag())
    close(G.diagonal(), d)
    close(G.trace(), d.sum())
    close(G.product(v), d * v)


def test_its_inverses_determinant_and_averages_follow_from_functions_of_it() -> None:
    G, d, sizes = _scales()
    ω, λ = normal(sum(sizes), seed=1), 0.1
    for inverse in (G.inverse(λ), G.pseudo_inverse(λ, None, None), G.inverse_from(G.inverse(λ).tensors())):
        assert inverse is not None
        close(inverse.solve(ω), ω / (d + λ))
    close(G.inverse(ng.Relative(0.5)).solve(ω), ω / (d + 0.5 * d.mean()))
    close(G.logdet(λ), (d + λ).log().sum())
    close(G.lerp(G.map(torch.square), 0.25).dense(), (0.75 * d + 0.25 * d.square()).diag())
    T = G.inverse(λ).root_times(torch.eye(len(d), dtype=d.dtype))
    close(T @ T.mT, (d + λ).reciprocal().diag())
    dead = G.map(lambda w: torch.where(w == w.max(), 0.0, w))
    close(dead.pseudo_inverse(0.0, None, None).solve(dead.product(ω)), torch.where(dead.diagonal() > 0, ω, 0.0))
    with pytest.raises(ng.errors.SingularMetricError, match="the metric is singular at damping 0"):
        dead.inverse(0.0)


def test_a_run_with_it_is_resumed_bit_for_bit_between_two_inversions() -> None:
    def task(seed: int) -> tuple[nn.Module, ng.NaturalGradient]:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        schedule = ng.Refresh(Scales(), every=2, decay=0.9, inverse=3, early=False)
        return model, ng.NaturalGradient(model, ng.Euclidean(), structure=schedule, lr=0.1, damping=0.5, momentum=0.9)

    def train(model: nn.Module, opt: ng.NaturalGradient, steps: int) -> None:
        for _ in range(steps):
            opt.zero_grad()
            model(normal(8, 3, seed=5)).square().mean().backward()
            opt.step()

    (whole, opt), (part, first), (resumed, again) = task(0), task(0), task(1)
    train(whole, opt, 8)
    train(part, first, 5)
    resumed.load_state_dict(part.state_dict())
    again.load_state_dict(first.state_dict())
    train(resumed, again, 3)
    for p, q in zip(whole.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(p, q)


def test_its_plan_its_bound_on_memory_and_its_identity_follow_from_its_shapes() -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), normal(9, 3)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=Scales(), damping=0.5)
    assert opt.plan().bytes == 2 * 4 * 8
    with pytest.raises(ng.errors.MemoryBoundError, match="Scales of 26 parameters needs 32 bytes"):
        Scales().estimate(ng.pullback(model, x, ng.Euclidean(), memory=31))
    pb = ng.pullback(model, x, ng.Euclidean())
    one = Scales().identity(pb.model, pb.blocks, torch.float64)
    assert one is not None
    close(one.dense(), torch.eye(26, dtype=torch.float64))
    model(x).square().mean().backward()
    opt.step()
    state = opt.state_dict()
    state["state"][0]["natgrad"]["operator//scales"] = torch.ones(3, dtype=torch.float64)
    with pytest.raises(ValueError, match=r"scales of the metric in the state has the shape \[3\], here it is \[4\]"):
        opt.load_state_dict(state)


def test_the_structure_trains_a_classifier() -> None:
    losses = structure.train()
    assert losses[-1] < 0.2 * losses[0]
