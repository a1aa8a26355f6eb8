"""Gauss rules of probability measures on the inputs, and the metric of functions that they give exactly."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

import natgrad as ng
from natgrad.errors import MemoryBoundError, NonFiniteError
from natgrad.functionspace import Quadrature, Weighted
from natgrad.structures import Structure
from tests import oracle
from tests.golden import tensor
from tests.optim.tasks import seeded
from tests.pulled import close, normal
from tests.zoo import mlp

STRUCTURES: list[Structure] = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kernel(), ng.Implicit()]


def _double_factorial(k: int) -> float:
    return math.prod(range(k, 0, -2))


# E x^k of each measure, from the textbook.
MOMENTS: list[tuple[D.Distribution, Callable[[int], float]]] = [
    (D.Normal(tensor(0.0), tensor(1.0)), lambda k: 0.0 if k % 2 else _double_factorial(k - 1)),
    (D.Uniform(tensor(-1.0), tensor(1.0)), lambda k: 0.0 if k % 2 else 1 / (k + 1)),
    (D.Uniform(tensor(0.0), tensor(3.0)), lambda k: 3.0**k / (k + 1)),
    (D.Exponential(tensor(2.0)), lambda k: math.factorial(k) / 2.0**k),
    (D.Gamma(tensor(2.3), tensor(1.5)), lambda k: math.gamma(2.3 + k) / math.gamma(2.3) / 1.5**k),
    (D.Beta(tensor(0.5), tensor(0.5)), lambda k: math.prod((0.5 + j) / (1 + j) for j in range(k))),
    (D.Beta(tensor(1.0), tensor(1.0)), lambda k: 1 / (k + 1)),
    (D.Beta(tensor(2.5), tensor(0.2)), lambda k: math.prod((2.5 + j) / (2.7 + j) for j in range(k))),
]


@pytest.mark.parametrize(("measure", "moment"), MOMENTS, ids=[type(m).__name__ for m, _ in MOMENTS])
@pytest.mark.parametrize("order", [1, 2, 5, 8])
def test_a_rule_of_q_nodes_is_exact_to_degree_2q_minus_1_and_not_beyond(
    measure: D.Distribution, moment: Callable[[int], float], order: int
) -> None:
    rule = Quadrature.of(measure, order)
    assert rule.nodes.shape == (order, 1)
    assert bool((rule.weights > 0).all())
    for k in range(2 * order):
        scale = max(1.0, float(rule.integral(rule.nodes[:, 0].abs() ** k)))
        assert abs(float(rule.integral(rule.nodes[:, 0] ** k)) - moment(k)) < 1e-12 * scale
    beyond = float(rule.integral(rule.nodes[:, 0] ** (2 * order)))
    assert moment(2 * order) - beyond > 1e-12 * moment(2 * order)


def test_a_product_rule_integrates_products() -> None:
    """E x⁴ e^y over N(0, 1) × U(0, 1) has another rule on each axis; here both are normal, with their own scales."""
    measure = D.Independent(D.Normal(tensor([0.0, 1.0]), tensor([1.0, 0.5])), 1)
    rule = Quadrature.of(measure, order=20)
    x, y = rule.nodes.T
    assert rule.nodes.shape == (400, 2)
    close(rule.integral(x**4 * y.exp()), tensor(3 * math.exp(1 + 0.125)), 1e-12)
    close(rule.integral(rule.nodes), tensor([0.0, 1.0]), 1e-13)


def test_a_correlated_gaussian_keeps_its_covariance_and_an_image_its_mean() -> None:
    covariance = tensor([[2.0, 0.7], [0.7, 0.5]])
    rule = Quadrature.of(D.MultivariateNormal(tensor([1.0, -2.0]), covariance), order=3)
    centred = rule.nodes - tensor([1.0, -2.0])
    close(rule.integral(torch.einsum("np,nq->npq", centred, centred)), covariance, 1e-12)
    image = Quadrature.of(D.LogNormal(tensor(0.3), tensor(0.4)), order=20)
    close(image.integral(image.nodes)[0], tensor(math.exp(0.3 + 0.08)), 1e-12)


def test_nodes_have_the_dtype_of_the_measure() -> None:
    rule = Quadrature.of(D.Normal(torch.zeros(2), torch.ones(2)), order=4)
    assert rule.nodes.dtype == rule.weights.dtype == torch.float32


class TestMetric:
    """G = Σ w_n J_nᵀ h_n J_n of the oracle."""

    @staticmethod
    def weighted(J: Tensor, h: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("n,ndp,nde,neq->pq", w, J, h, J)

    @pytest.mark.parametrize("structure", STRUCTURES, ids=[type(s).__name__ for s in STRUCTURES])
    def test_every_exact_structure_sees_the_weights(self, structure: Structure) -> None:
        model = mlp(3, 4, 3).double()
        rule = Quadrature.of(D.Normal(torch.zeros(3).double(), torch.ones(3).double()), order=3)
        found = structure.estimate(ng.pullback(model, rule.nodes, rule.metric(ng.Fisher(ng.Categorical()))))
        J = oracle.module_jacobian(model, rule.nodes)
        G = self.weighted(J, oracle.categorical(model(rule.nodes)), rule.weights)
        if isinstance(structure, ng.Diagonal):
            G = oracle.diagonal(G)
        if isinstance(structure, ng.BlockDense):
            G = oracle.block_diagonal(G, oracle.layer_blocks(model).values())
        v = normal(len(G), seed=5)
        close(found.product(v), G @ v)

    def test_kfac_is_exact_for_one_layer(self) -> None:
        """A = ∫ a aᵀ dμ: the weights are in the inputs' factor too."""
        model = nn.Linear(2, 3).double()
        rule = Quadrature.of(D.Uniform(tensor([0.0, 0.0]), tensor([1.0, 2.0])), order=4)
        pb = ng.pullback(model, rule.nodes, rule.metric())
        close(ng.Kronecker().estimate(pb).dense(), ng.Dense().estimate(pb).dense(), 1e-12)
        close(ng.Kronecker().estimate(pb).right[0][0][0, 0], tensor(1 / 3), 1e-12)

    def test_positions_of_an_example_that_weighs_little_count_as_others_do(self) -> None:
        """A is a mean over the positions that count, here the two of the second example: (3² + 4²)/2."""

        class Gated(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.linear = nn.Linear(1, 1, bias=False).double()

            def forward(self, x: Tensor) -> Tensor:
                return (self.linear(x[..., :1]) * x[..., 1:]).sum(1)

        x = tensor([[[1.0, 0.0], [2.0, 0.0]], [[3.0, 1.0], [4.0, 1.0]]])
        for share in (0.5, 0.1, 0.01):
            G = ng.Kronecker().estimate(ng.pullback(Gated(), x, Weighted(tensor([1 - share, share]))))
            torch.testing.assert_close(G.tensors()["linear.weight/A"].squeeze(), tensor(12.5))

    def test_equal_weights_are_the_mean(self) -> None:
        model, x = mlp(3, 4, 3).double(), normal(6, 3)
        plain = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense()
        equal = Weighted(torch.full((6,), 1 / 6, dtype=torch.float64))
        close(ng.Dense().estimate(ng.pullback(model, x, equal)).dense(), plain, 1e-12)

    def test_twice_the_nodes_change_nothing_where_the_functions_are_smooth(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 1)).double()
        found = []
        for order in (40, 80):
            rule = Quadrature.of(D.Uniform(tensor(-1.0), tensor(1.0)), order)
            found.append(ng.Dense().estimate(ng.pullback(model, rule.nodes, rule.metric())).dense())
        close(found[0], found[1], 1e-10)

    def test_a_weighted_metric_delegates_what_is_about_one_example(self) -> None:
        metric = Weighted(tensor([0.5, 0.5]), ng.Fisher(ng.Bernoulli()))
        y, u = normal(2, 1), normal(2, 1, seed=1)
        close(metric.flat(y, u), ng.Fisher(ng.Bernoulli()).flat(y, u))
        close(metric.divergence(y, u), ng.Fisher(ng.Bernoulli()).divergence(y, u))
        assert metric.exact
        assert not metric.needs_target
        assert Weighted(tensor([1.0]), ng.LossHessian(nn.MSELoss())).needs_target


STANDARD = D.Normal(torch.zeros(1).double(), torch.ones(1).double())


def _tanh(scale: float) -> nn.Module:
    """A network whose functions have poles nearer to the line, the larger its weights are."""
    model = seeded(lambda: nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 1)).double(), seed=2)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(scale)
    return model


def _trapezoidal(model: nn.Module) -> Tensor:
    """∫ JᵀJ dN(0, 1) by the trapezoidal rule on [−10, 10], which converges geometrically; none of our code."""
    x = torch.linspace(-10, 10, 4001, dtype=torch.float64).unsqueeze(1)
    W, b, out, _ = (p.detach() for p in model.parameters())
    h = torch.tanh(x @ W.T + b)
    slope = out * (1 - h.square())
    J = torch.cat([slope * x, slope, h, torch.ones_like(x)], dim=1)
    w = (-0.5 * x[:, 0].square()).exp()
    return (J * (w / w.sum()).unsqueeze(1)).T @ J


class TestAdaptive:
    """Two orders are compared, and the order is doubled until they agree."""

    @staticmethod
    def error(rule: Quadrature, model: nn.Module) -> float:
        exact = _trapezoidal(model)
        found = ng.Dense().estimate(ng.pullback(model, rule.nodes, rule.metric())).dense()
        return float((found - exact).norm() / exact.norm())

    @pytest.mark.parametrize(("scale", "tol"), [(1.0, 1e-3), (3.0, 1e-3), (3.0, 1e-6)])
    def test_the_metric_under_a_gaussian_is_within_the_tolerance_and_the_gap_is_told(
        self, scale: float, tol: float
    ) -> None:
        model = _tanh(scale)
        rule = Quadrature.of(STANDARD, model=model, tol=tol)
        assert rule.gap is not None
        assert self.error(rule, model) < rule.gap <= tol
        assert self.error(Quadrature.of(STANDARD, 16), _tanh(8.0)) > 0.05  # a fixed order is not exact

    def test_the_gap_of_a_given_order_is_about_the_error_of_half_of_it(self) -> None:
        model = _tanh(3.0)
        rule = Quadrature.of(STANDARD, 32, model=model)
        assert len(rule.nodes) == 32
        assert rule.gap == pytest.approx(self.error(Quadrature.of(STANDARD, 16), model), rel=0.5)
        assert Quadrature.of(STANDARD, 32).gap is None

    def test_a_rule_that_is_too_small_at_its_largest_says_so(self, caplog: pytest.LogCaptureFixture) -> None:
        model = _tanh(3.0)
        rule = Quadrature.of(STANDARD, model=model, tol=1e-12)
        assert rule.gap is not None
        assert rule.gap > 1e-12
        assert len(rule.nodes) == 512
        assert "the metric of 512 nodes per axis still differs by" in caplog.text

    def test_functions_of_parameters_and_other_metrics_are_compared_too(self) -> None:
        rule = Quadrature.of(
            STANDARD,
            model=lambda p, x: (p["a"] * x).sin(),
            params={"a": tensor(2.0)},
            base=ng.Fisher(ng.Gaussian(scale=0.5)),
        )
        G = ng.Dense().estimate(
            ng.pullback(lambda p, x: (p["a"] * x).sin(), rule.nodes, rule.metric(), params={"a": tensor(2.0)})
        )
        # E x² cos² 2x = ½(1 + E x² cos 4x) = ½(1 + (1 − 16)e⁻⁸)
        assert float(G.dense()) == pytest.approx(0.5 * (1 - 15 * math.exp(-8)), rel=1e-3)


class TestRefusals:
    def test_lebesgue_measure(self) -> None:
        with pytest.raises(ValueError, match="Lebesgue's measure, and the L² metric of functions diverges"):
            Quadrature.of(D.Uniform(tensor(-math.inf), tensor(math.inf), validate_args=False), order=4)
        with pytest.raises(ValueError, match=r"sum 4 and the smallest 2 are no probability measure.*divide by the vol"):
            Quadrature(normal(2, 1), tensor([2.0, 2.0]))

    def test_too_many_axes(self) -> None:
        with pytest.raises(MemoryBoundError, match=r"16\^10 nodes, over 4,096: lower order= \(to 2\), or take a Monte"):
            Quadrature.of(D.Normal(torch.zeros(10), torch.ones(10)), order=16)

    @pytest.mark.parametrize("order", [0, -1, 2.0, True])
    def test_order(self, order: int) -> None:
        with pytest.raises(ValueError, match="must be a positive integer, the number of nodes per axis"):
            Quadrature.of(D.Normal(0.0, 1.0), order)

    def test_an_order_is_not_guessed(self) -> None:
        with pytest.raises(TypeError, match=r"does not know how many nodes are enough: give model=.*or order="):
            Quadrature.of(STANDARD)
        with pytest.raises(ValueError, match=r"Quadrature\.of\(tol\) must be positive and finite, got 0"):
            Quadrature.of(STANDARD, model=_tanh(1.0), tol=0.0)

    def test_measures_without_a_rule(self) -> None:
        with pytest.raises(TypeError, match=r"no Gauss rule for Cauchy: .*Monte-Carlo batch of inputs instead"):
            Quadrature.of(D.Cauchy(0.0, 1.0), order=4)
        with pytest.raises(TypeError, match=r"takes a torch\.distributions distribution of the inputs, got float"):
            Quadrature.of(1.0)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"the batch shape \(2, 3\) is several measures"):
            Quadrature.of(D.Normal(torch.zeros(2, 3), torch.ones(2, 3)), order=4)
        with pytest.raises(ValueError, match=r"the batch shape \(2,\) is several measures"):
            Quadrature.of(D.MultivariateNormal(torch.zeros(2, 3), torch.eye(3)), order=4)

    def test_rules_that_are_none(self) -> None:
        with pytest.raises(ValueError, match=r"nodes \(3, 1\) and weights \(2,\)"):
            Quadrature(normal(3, 1), tensor([0.5, 0.5]))
        with pytest.raises(NonFiniteError, match="the nodes of a quadrature holds NaN"):
            Quadrature(tensor([[math.nan]]), tensor([1.0]))
        with pytest.raises(ValueError, match="must not be negative"):
            Weighted(tensor([2.0, -1.0]))
        with pytest.raises(TypeError, match="the base is a metric on the outputs"):
            Weighted(tensor([1.0]), ng.Euclidean)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"values \(3,\) of 2 nodes: one each"):
            Quadrature(normal(2, 1), tensor([0.5, 0.5])).integral(normal(3))

    def test_another_batch_or_another_coupling(self) -> None:
        model, metric = nn.Linear(1, 1).double(), Weighted(tensor([0.5, 0.5]))
        with pytest.raises(ValueError, match="2 weights and 3 examples: a Weighted metric belongs to one batch"):
            ng.pullback(model, normal(3, 1), metric)
        with pytest.raises(ValueError, match="couples the examples itself: weights need a base that does not"):
            ng.pullback(model, normal(2, 1), Weighted(tensor([0.5, 0.5]), ng.Sobolev()))
