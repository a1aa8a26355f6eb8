"""The volume of a basin in the pullback metric: closed forms, components, error bars that are true, refusals."""

from __future__ import annotations

import copy
import math
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import MemoryBoundError, NonFiniteError, SingularMetricError
from natgrad.functionspace import Flatness, Quadrature, Volume, flatness
from natgrad.functionspace.flatness import TailedMean
from tests import oracle
from tests.golden import tensor
from tests.pulled import normal

Params = dict[str, Tensor]


def _seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _itself(params: Params, x: Any) -> Tensor:
    """The model y = w: its outputs are its parameters, one example."""
    return params["w"][None]


def _squares(y: Tensor) -> Tensor:
    return y.square().sum()


def _at(
    w: list[float], epsilon: float, loss: Callable[[Tensor], Tensor], model: Any = _itself, **options: Any
) -> Flatness:
    options = {"generator": _seeded(), **options}
    return flatness(model, None, epsilon, ng.Euclidean(), loss=loss, params={"w": tensor(w)}, **options)


def _ball(p: int, radius: float) -> float:
    return math.pi ** (p / 2) / math.gamma(p / 2 + 1) * radius**p


def _within(volume: Volume, expected: float, percent: float) -> None:
    """The estimate is right to four of its error bars, which are no more than so many percent long."""
    assert abs(volume.value - expected) < 4 * volume.error + 1e-9 * expected
    assert volume.relative_error < percent / 100


class TestClosedForms:
    def test_the_basin_is_the_whole_interval_around_the_minimum_and_not_a_half(self) -> None:
        """F = w², ε = 1 has the volume 2; a set on which F > F(w0), as printed, would have 1."""
        found = _at([0.0], 1.0, _squares)
        _within(found.volume, 2.0, 1)
        assert abs(found.radius - 1) < 0.1

    @pytest.mark.parametrize("p", [2, 4, 9])
    def test_a_linear_model_has_a_ball_whatever_its_jacobian(self, p: int) -> None:
        J = normal(p + 2, p)
        found = _at([0.0] * p, 0.3, _squares, lambda params, x: (J @ params["w"])[None], samples=512)
        _within(found.volume, _ball(p, math.sqrt(0.3)), 3)
        root = float((J.T @ J).det().sqrt())
        _within(found.euclidean, _ball(p, math.sqrt(0.3)) / root, 3)
        assert found.elsewhere == 0.0

    def test_the_default_loss_is_the_mean_divergence_of_the_metric(self) -> None:
        """½‖y − y0‖² for the Euclidean one: the ball of radius √(2ε), in a mean over the examples."""
        model, x = nn.Linear(2, 1).double(), normal(7, 2)
        found = flatness(model, x, 0.1, ng.Euclidean(), generator=_seeded())
        _within(found.volume, _ball(3, math.sqrt(0.2)), 1)

    def test_a_coin_has_the_arc_length_of_the_fisher_metric(self) -> None:
        """∫ √(p(1 − p)) dy = 2 arcsin √p for the logit y, between the two logits with KL(p0 ‖ p) = ε."""
        p0, ε = torch.sigmoid(tensor(0.7)), 0.2

        def rise(y: float) -> float:
            p = torch.sigmoid(tensor(y))
            return float(p0 * (p0 / p).log() + (1 - p0) * ((1 - p0) / (1 - p)).log()) - ε

        ends = [_bisect(rise, 0.7, far) for far in (-20.0, 20.0)]
        low, high = (2 * torch.asin(torch.sigmoid(tensor(end)).sqrt()) for end in ends)
        found = flatness(_itself, None, ε, ng.Fisher(ng.Bernoulli()), params={"w": tensor([0.7])}, generator=_seeded())
        _within(found.volume, float(high - low), 1)
        _within(found.euclidean, ends[1] - ends[0], 1)

    def test_a_coupled_metric_has_the_ratio_of_the_determinants(self) -> None:
        model, x = nn.Linear(2, 1).double(), normal(6, 2)
        y0 = model(x).detach()
        metric = ng.Sobolev(lengthscale=0.7, jitter=0.0)
        found = flatness(model, x, 0.1, metric, loss=lambda y: (y - y0).square().mean() / 2, generator=_seeded())
        J = oracle.module_jacobian(model, x)
        H = oracle.dense(J, oracle.euclidean(y0))
        G = oracle.dense_coupled(J, oracle.euclidean_roots(y0), oracle.sobolev_coupling(x, 0.7))
        _within(found.volume, _ball(3, math.sqrt(0.2)) * float((G.det() / H.det()).sqrt()), 1)

    def test_a_measure_on_the_inputs(self) -> None:
        """y = ax + b under N(0, 1): the norm of a function is that of (a, b)."""
        rule = Quadrature.of(D.Normal(tensor(0.0), tensor(1.0)), order=5)
        model = nn.Linear(1, 1).double()
        y0 = model(rule.nodes).detach()
        loss = lambda y: rule.integral((y - y0).square())[0]  # noqa: E731
        found = flatness(model, rule.nodes, 0.5, rule.metric(), loss=loss, generator=_seeded())
        _within(found.volume, math.pi * 0.5, 1)
        _within(found.euclidean, math.pi * 0.5, 1)

    def test_a_metric_that_is_made_from_the_loss_gets_the_targets(self) -> None:
        """The Hessian of ½‖y − t‖²·3 is 3, and so is the determinant's root √3 a dimension."""
        model, x, t = nn.Linear(1, 1).double(), normal(5, 1), normal(5, 1, seed=1)
        metric = ng.LossHessian(lambda y, target: 1.5 * (y - target).square().sum())
        y0 = model(x).detach()
        loss = lambda y: (y - y0).square().mean() / 2  # noqa: E731
        found = flatness(model, x, 0.1, metric, t, loss=loss, samples=128, generator=_seeded())
        _within(found.volume, 3 * _ball(2, math.sqrt(0.2)), 1)

    def test_a_point_where_the_metric_is_singular_alone_does_no_harm(self) -> None:
        """y = w³ at 0: the volume is the length of |y| < √ε."""
        found = _at([0.0], 0.5, _squares, lambda params, x: params["w"][None] ** 3)
        _within(found.volume, 2 * math.sqrt(0.5), 1)
        _within(found.euclidean, 2 * 0.5 ** (1 / 6), 1)


def _bisect(rise: Callable[[float], float], inside: float, outside: float) -> float:
    for _ in range(60):
        middle = (inside + outside) / 2
        inside, outside = (middle, outside) if rise(middle) < 0 else (inside, middle)
    return inside


class TestComponents:
    def test_another_basin_below_the_level_does_not_count(self) -> None:
        """(y² − 1)² < ½ around 1 and −1: one of the two intervals."""
        found = _at([1.0], 0.5, lambda y: (y.square() - 1).square().sum(), samples=512)
        half = math.sqrt(0.5)
        _within(found.volume, math.sqrt(1 + half) - math.sqrt(1 - half), 1)

    def test_a_wider_level_joins_two_basins(self) -> None:
        """(y² − 1)² < 1.5 has no barrier at 0."""
        found = _at([1.0], 1.5, lambda y: (y.square() - 1).square().sum(), samples=512)
        _within(found.volume, 2 * math.sqrt(1 + math.sqrt(1.5)), 2)

    def test_four_basins_around_a_barrier_are_told_apart(self) -> None:
        """One of four discs, between which lines from the first find points of the others."""

        def loss(y: Tensor) -> Tensor:
            centres = tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
            return (y - centres).square().sum(1).amin()

        found = _at([1.0, 0.0], 0.25, loss)
        _within(found.volume, math.pi * 0.25, 2)

    def test_a_ring_counts_all_around(self) -> None:
        """(‖y‖² − 1)² < ε is an annulus. Most of it is behind the hole, seen from a point of it."""
        found = _at([1.0, 0.0], 0.3, lambda y: (_squares(y) - 1).square())
        _within(found.volume, 2 * math.pi * math.sqrt(0.3), 3)
        assert found.elsewhere < 0.01

    def test_parameters_need_not_be_at_a_minimum(self) -> None:
        """From y = 0.5, where the loss is ¼, the level ¼ + ¾ is |y| < 1 all the same."""
        _within(_at([0.5], 0.75, _squares).volume, 2.0, 2)


class TestErrorBars:
    def test_the_standard_error_is_true(self) -> None:
        """Over 40 seeds the errors in units of their bars have mean 0 and standard deviation 1, on a bent basin."""

        def bent(params: Params, x: Any) -> Tensor:
            w = params["w"]
            return torch.stack([w[0], 5 * (w[1] - w[0] ** 2)])[None]

        found = [
            _at([0.0, 0.0], 0.3, _squares, bent, samples=128, generator=_seeded(seed)).volume for seed in range(40)
        ]
        z = torch.tensor([(v.value - 0.3 * math.pi) / v.error for v in found])
        assert abs(float(z.mean())) < 0.5  # three standard errors
        assert 0.7 < float(z.std()) < 1.4

    def test_four_times_the_lines_halve_it(self) -> None:
        errors = [
            _at([1.0, 0.0], 0.3, lambda y: (_squares(y) - 1).square(), samples=s).volume.error for s in (256, 4096)
        ]
        assert 3 < errors[0] / errors[1] < 5.5

    def test_a_generator_makes_it_reproducible_and_nothing_else_moves(self) -> None:
        model, x = nn.Linear(1, 1).double(), normal(4, 1)
        before, stream = copy.deepcopy(model.state_dict()), torch.get_rng_state()
        first = flatness(model, x, 0.1, ng.Euclidean(), samples=16, generator=_seeded(3))
        again = flatness(model, x, 0.1, ng.Euclidean(), samples=16, generator=_seeded(3))
        free = flatness(model, x, 0.1, ng.Euclidean(), samples=16)
        assert first == again != free
        assert torch.equal(stream, torch.get_rng_state())
        assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())

    def test_single_precision(self) -> None:
        found = flatness(nn.Linear(1, 1), torch.randn(9, 1), 0.01, ng.Euclidean(), generator=_seeded())
        _within(found.volume, _ball(2, math.sqrt(0.02)), 2)

    def test_a_volume_that_underflows_has_a_logarithm(self) -> None:
        tiny = Volume(-1000.0, 0.1)
        assert tiny.value == tiny.error == 0.0
        assert Volume(1000.0, 0.1).value == math.inf
        assert str(Volume(math.log(0.25), 0.04)) == "0.25 ± 0.01"


class TestRefusals:
    @pytest.mark.parametrize("epsilon", [0.0, -1.0, math.nan, math.inf, True, "1"])
    def test_epsilon(self, epsilon: float) -> None:
        with pytest.raises(ValueError, match="must be a positive, finite number: how far the loss may rise"):
            _at([0.0], epsilon, _squares)

    def test_epsilon_below_rounding(self) -> None:
        with pytest.raises(ValueError, match="epsilon=1e-20 is below the rounding of the loss 1 "):
            _at([1.0], 1e-20, _squares)

    @pytest.mark.parametrize("samples", [1, 0, 2.0, True])
    def test_samples(self, samples: int) -> None:
        with pytest.raises(ValueError, match="at least 2: one line has no error bar"):
            _at([0.0], 1.0, _squares, samples=samples)

    @pytest.mark.parametrize("radius", [0.0, -1.0, math.nan, math.inf])
    def test_radius(self, radius: float) -> None:
        with pytest.raises(ValueError, match="must be positive and finite, or None"):
            _at([0.0], 1.0, _squares, radius=radius)

    def test_metrics(self) -> None:
        x = normal(3, 1)
        with pytest.raises(ValueError, match="the determinant of a sampled metric is biased: take the exact one"):
            flatness(nn.Linear(1, 1).double(), x, 0.1, ng.Fisher(ng.Bernoulli(), samples=1))
        with pytest.raises(TypeError, match="metric must be a natgrad OutputMetric"):
            flatness(nn.Linear(1, 1).double(), x, 0.1, ng.Euclidean)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="couples the examples, and its divergence does not know that: pass loss="):
            flatness(nn.Linear(1, 1).double(), x, 0.1, ng.Sobolev())

    def test_losses(self) -> None:
        with pytest.raises(ValueError, match=r"to one number: reduce it by \.mean\(\)"):
            _at([0.0, 1.0], 1.0, lambda y: y.square())
        with pytest.raises(NonFiniteError, match="the loss is inf at the parameters: there is no basin"):
            _at([0.0], 1.0, lambda y: y.square().reciprocal().sum())
        with pytest.raises(NonFiniteError, match=r"the loss is NaN at the distance .* where the basin was looked for"):
            _at([1.0], 9.0, lambda y: y.log().square().sum())
        with pytest.raises(ValueError, match="it is not continuous there"):
            _at([0.0], 1.0, lambda y: (y != 0).double().sum() * 2)

    def test_a_loss_that_is_nan_at_the_parameters(self) -> None:
        with pytest.raises(NonFiniteError, match="the loss is NaN at the distance 0"):
            _at([-1.0], 1.0, lambda y: y.log().sum())

    def test_an_overparametrised_model_has_volume_zero(self) -> None:
        """Also where there are as many outputs as parameters, and they are not independent."""
        message = "rank 1 of 2 parameters, here and around: .* the volume of every basin is exactly 0"
        with pytest.raises(SingularMetricError, match=message):
            _at([0.0, 1.0], 1.0, _squares, lambda params, x: params["w"].sum()[None, None])
        with pytest.raises(SingularMetricError, match=message):
            _at([0.0, 1.0], 1.0, _squares, lambda params, x: params["w"].sum().expand(1, 3))
        with pytest.raises(SingularMetricError, match="rank 6 of 9 parameters"):  # a constant in the logits
            flatness(nn.Linear(2, 3).double(), normal(20, 2), 0.1, ng.Fisher(ng.Categorical()))

    def test_a_basin_that_is_too_long_to_be_fitted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """10³⁰ times as long as wide: the coordinates stretch a few times a round, and there are three."""
        monkeypatch.setattr(sys.modules["natgrad.functionspace.flatness"], "_PILOT_ROUNDS", 3)
        with pytest.raises(ValueError, match="did not fit into an ellipsoid after 3 rounds of 256 random lines"):
            _at([0.0, 0.0], 0.5, lambda y: y[0, 0].square() + (1e-30 * y[0, 1]).square(), radius=1e40)

    def test_a_direction_in_which_the_loss_does_not_rise(self) -> None:
        with pytest.raises(ValueError, match=r"the basin reaches beyond the radius .* its volume may be infinite"):
            _at([0.0, 0.0], 0.5, lambda y: y[0, 0].square())

    def test_more_than_fits_into_memory(self) -> None:
        model, x = nn.Linear(300, 300).double(), torch.zeros(400, 300, dtype=torch.float64)
        with pytest.raises(
            MemoryBoundError, match=r"90,300 parameters need .* at every point, over .*: flatness is for small"
        ):
            flatness(model, x, 0.1, ng.Euclidean())

    def test_a_basin_that_is_larger_than_the_radius(self) -> None:
        with pytest.raises(ValueError, match=r"the basin reaches beyond the radius 0\.5 "):
            _at([0.0, 0.0], 1.0, _squares, radius=0.5)
        _within(_at([0.0, 0.0], 1.0, _squares, radius=1.01).volume, math.pi, 1)


def test_the_basin_of_a_classifier_is_the_same_in_two_estimates() -> None:
    """Cross-entropy of a logistic regression: no closed form, two seeds, and the loss not that of the metric."""
    model, x = nn.Linear(2, 1).double(), normal(30, 2)
    t = (normal(30, 1, seed=1) + x[:, :1] > 0).double()
    loss = lambda y: F.binary_cross_entropy_with_logits(y, t)  # noqa: E731
    one, two = (
        flatness(model, x, 0.05, ng.Fisher(ng.Bernoulli()), loss=loss, samples=256, generator=_seeded(seed)).volume
        for seed in (0, 1)
    )
    assert abs(one.value - two.value) < 4 * math.hypot(one.error, two.error)


# Long basins, and arms that few lines meet: the estimate does not know how much it has missed, and says so.


SAMPLES = 512


def estimate(bend: float, p: int) -> Flatness:
    """Of ‖y‖² < ½ with y = A(w + bend·sinh w), a ball in y whatever A is; A is nearly singular."""
    generator = torch.Generator().manual_seed(1)
    A = torch.randn(p, p, generator=generator, dtype=torch.float64) + torch.eye(p, dtype=torch.float64)

    def model(params: dict[str, Tensor], x: None) -> Tensor:
        return (A @ (params["w"] + bend * torch.sinh(params["w"])))[None]

    return flatness(
        *(model, None, 0.5, ng.Euclidean()),
        loss=lambda y: y.square().sum(),
        samples=SAMPLES,
        params={"w": torch.zeros(p, dtype=torch.float64)},
        generator=generator,
    )


def test_an_ellipsoid_has_no_heavy_line_and_a_true_error(caplog: pytest.LogCaptureFixture) -> None:
    p = 8
    found, ball = estimate(0.0, p), math.pi ** (p / 2) / math.gamma(p / 2 + 1) * 0.5 ** (p / 2)
    assert abs(found.volume.value - ball) < 4 * found.volume.error
    assert found.volume.relative_error < 0.03
    assert found.heaviest < 10 / SAMPLES
    assert not caplog.records


def test_where_most_of_a_basin_is_missed_lines_are_heavy_and_the_error_is_said_to_be_a_guess(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """An estimate far below the truth: most of the volume is where no line has been."""
    p = 8
    found, ball = estimate(0.2, p), math.pi ** (p / 2) / math.gamma(p / 2 + 1) * 0.5 ** (p / 2)
    assert found.volume.value < 0.5 * ball
    assert found.heaviest > 20 / SAMPLES
    assert found.volume.relative_error > 2 * found.heaviest
    assert any("flatness: the error of volume is a guess" in message for message in caplog.messages)


def ellipse(length: float, radius: float) -> Flatness:
    """y₁² + (y₂/length)² < ½ in y = w."""
    return flatness(
        *(lambda params, x: params["w"][None], None, 0.5, ng.Euclidean()),
        loss=lambda y: y[0, 0].square() + (y[0, 1] / length).square(),
        radius=radius,
        params={"w": torch.zeros(2, dtype=torch.float64)},
        generator=torch.Generator().manual_seed(0),
    )


def test_a_basin_that_is_longer_than_numbers_have_digits() -> None:
    """10³⁰ times as long as wide: coordinates in which it is round have a determinant all the same."""
    found = ellipse(1e30, radius=1e40)
    for volume in (found.volume, found.euclidean):
        assert abs(volume.value - 0.5 * math.pi * 1e30) < 4 * volume.error
        assert volume.relative_error < 0.01


def test_a_basin_that_is_too_long_to_be_fitted() -> None:
    """10⁶⁰ times as long as wide: the coordinates stretch a few times a round, and there are 64 rounds."""
    with pytest.raises(ValueError, match=r"after 64 rounds of 256 random lines: .* It is unbounded, .* or too long"):
        ellipse(1e60, radius=1e80)


# The mean of numbers of which few hold the most: an error that is true where the standard error is not.


def pareto(n: int, k: float, generator: torch.Generator) -> Tensor:
    """log X of n numbers with P(X > x) = x^{−1/k}, whose mean is 1/(1 − k)."""
    return -k * torch.rand(n, generator=generator, dtype=torch.float64).log()


def covered(k: float, n: int, *, standard: bool = False) -> tuple[float, float]:
    """How often the mean is within one and two errors, or standard errors, in 400 repetitions."""
    generator = torch.Generator().manual_seed(0)
    found = [TailedMean.of(pareto(n, k, generator)) for _ in range(400)]
    errors = torch.tensor([m.standard_error if standard else m.relative_error for m in found])
    off = torch.tensor([abs(m.log + math.log(1 - k)) for m in found])
    return float((off < errors).double().mean()), float((off < 2 * errors).double().mean())


@pytest.mark.parametrize("n", [256, 1024])
@pytest.mark.parametrize("k", [0.1, 0.3, 0.5, 0.7, 0.9])
def test_the_error_is_true_whatever_the_tail(k: float, n: int) -> None:
    """The shares that it promises are 68 % and 95 %."""
    one, two = covered(k, n)
    assert 0.63 < one < 0.9
    assert two > 0.85


def test_the_standard_error_is_not() -> None:
    """It is where there is a variance, k < ½."""
    assert covered(0.3, 1024, standard=True)[1] > 0.92
    assert covered(0.7, 1024, standard=True)[1] < 0.8
    assert covered(0.9, 1024, standard=True)[1] < 0.4


def test_light_tails_have_the_standard_error() -> None:
    """Of a uniform distribution to a few parts in a hundred, and of numbers that are equal exactly."""
    m = TailedMean.of((1 + torch.rand(1000, generator=torch.Generator().manual_seed(0)).double()).log())
    assert m.standard_error <= m.relative_error < 1.05 * m.standard_error
    assert not m.guessed
    assert TailedMean.of(torch.full((100,), 3.0)) == TailedMean(3.0, 0.0, 0.01, 0.0)


def test_numbers_without_a_mean_have_an_infinite_error() -> None:
    m = TailedMean.of(pareto(1000, 2.0, torch.Generator().manual_seed(0)))
    assert m.index > 1.5
    assert m.missed == m.relative_error == math.inf
    assert m.guessed


def test_a_scale_is_only_a_scale() -> None:
    """Also where the numbers underflow."""
    logs = normal(200)
    near, far = TailedMean.of(logs), TailedMean.of(logs - 5000)
    assert abs(near.log - far.log - 5000) < 1e-9
    assert abs(near.relative_error - far.relative_error) < 1e-9


def test_the_index_is_hills_of_the_largest_numbers() -> None:
    """Of quantiles (n/i)^k with another tail beyond the 1.5√n largest, which must not be looked at."""
    n, k = 400, 0.6
    size, i = int(1.5 * n**0.5), torch.arange(1, n + 1, dtype=torch.float64)
    logs = torch.where(i <= size + 1, k * (n / i).log(), -10 * i)
    expected = float((logs[:size] - logs[size]).mean()) * (1 + size**-0.5)
    assert abs(TailedMean.of(logs.flip(0)).index - expected) < 1e-12


def test_few_numbers_show_no_tail() -> None:
    """A variance is all that is assumed then, k = ½: the share of the largest may be missed."""
    m = TailedMean.of(normal(10))
    assert m.index == 0.5
    assert abs(m.missed - m.heaviest) < 1e-12


def test_zeros() -> None:
    nothing = torch.full((100,), -math.inf)
    assert TailedMean.of(nothing) == TailedMean(-math.inf, 0.0, 0.0, 0.0)
    nothing[3] = 0.0
    one = TailedMean.of(nothing)
    assert abs(one.log + math.log(100)) < 1e-6
    assert one.heaviest == 1.0
    assert one.relative_error == math.inf
