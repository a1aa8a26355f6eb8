"""Degenerate metrics are detected and reported: rank, spectrum, null directions, range, constancy of the rank."""

from __future__ import annotations

import copy
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import MemoryBoundError
from tests.golden import golden, golden_mlp
from tests.zoo import IDS, ZOO, mlp


@pytest.mark.parametrize("case", ZOO, ids=IDS)
def test_rank_and_spectrum_are_those_of_the_dense_metric(case: object) -> None:
    problem = case.make()  # type: ignore[attr-defined]
    y = problem.outputs().detach()
    J = problem.jacobian()
    rows = J.reshape(-1, J.shape[-1]) / len(y) ** 0.5
    values = torch.linalg.svdvals(rows).square()
    pb = ng.pullback(problem.model, problem.x, ng.Euclidean(), params=problem.params, output=problem.output)
    found = ng.diagnose(pb, nearby=0)
    assert found.rank == int((values > values[0] * 1e-12).sum())
    assert found.size == J.shape[-1]
    torch.testing.assert_close(found.spectrum[: found.rank], values[: found.rank], rtol=1e-8, atol=1e-12)
    for direction in found.null_directions:
        torch.testing.assert_close(direction.flatten().norm(), torch.ones((), dtype=torch.float64))
        assert float((rows @ direction.flatten()).norm()) < 1e-7
    null = found.size - found.rank
    sizes = {name: p.numel() for name, p in pb.model.params.items()}
    assert sum(found.null_share[name] * sizes[name] for name in sizes) == pytest.approx(null, abs=1e-6)


def test_the_golden_fisher_has_rank_12() -> None:
    model, x, target = golden_mlp()
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical()))
    ω = ng.differential(model, F.cross_entropy(model(x), target))
    found = ng.diagnose(pb, ω)
    assert found.rank == golden("mlp.fisher.diag")["expected"]["rank"] == 12
    assert found.singular
    assert found.in_range  # the gradient of the likelihood is a combination of the rows of its Fisher metric
    assert "rank 12 of 21: singular, damp it or use Pinv()" in str(found)


def test_a_differential_outside_the_range_is_reported() -> None:
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]], dtype=torch.float64)
    pb = ng.pullback(model, x, ng.Euclidean())
    found = ng.diagnose(pb, ng.Covector({"weight": torch.tensor([[3.0, 0.0, 4.0]], dtype=torch.float64)}))
    assert found.in_range is False
    assert found.outside == pytest.approx(0.8)
    assert found.rank == 2
    torch.testing.assert_close(
        found.null_directions[0]["weight"].abs(), torch.tensor([[0.0, 0.0, 1.0]], dtype=torch.float64)
    )
    assert found.null_share == {"weight": pytest.approx(1 / 3)}
    assert "ω does not lie in the range of the metric (relative part outside 0.8)" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [10, 3000, 10**6])
def test_a_large_part_outside_is_not_rounding_whatever_the_size(size: int, dtype: torch.dtype) -> None:
    found = ng.Diagnosis(size, size, torch.ones(size, dtype=dtype), {}, (), size, outside=0.49)
    assert found.in_range is False
    assert "ω does not lie in the range" in str(found)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("n", "widths"), [(5, (4, 8, 2)), (40, (4, 8, 2)), (150, (20, 30, 3)), (300, (4, 8, 2))])
def test_the_differential_of_a_likelihood_lies_in_the_range_of_its_fisher_metric(
    n: int, widths: tuple[int, int, int], dtype: torch.dtype
) -> None:
    """Fisher's rows span the scores; a random covector is outside, as the metric is singular."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(*widths[:2]), nn.Tanh(), nn.Linear(*widths[1:])).to(dtype)
        x, target = torch.randn(n, widths[0], dtype=dtype), torch.randint(widths[2], (n,))
        random = ng.Covector({name: torch.randn_like(p) for name, p in model.named_parameters()})
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical()))
    assert ng.diagnose(pb, ng.differential(model, F.cross_entropy(model(x), target)), nearby=0).in_range
    assert ng.diagnose(pb, random, nearby=0).in_range is False


def test_a_dead_layer_is_named_and_the_rank_is_not_constant() -> None:
    """With a zero outgoing weight the incoming one has no effect here, and has one nearby."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = mlp(2, 3, 1).double()
    with torch.no_grad():
        model.get_parameter("2.weight").zero_()
    x = torch.randn(40, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ng.diagnose(ng.pullback(model, x, ng.Euclidean()))
    assert found.null_share["0.weight"] == pytest.approx(1.0)
    assert found.null_share["0.bias"] == pytest.approx(1.0)
    assert (found.nearby_rank or 0) > found.rank
    assert not found.constant_rank
    assert "no constant rank: it is 13 nearby" in str(found)
    assert "0.weight: 100.0% null" in str(found)


def test_the_rank_is_not_constant_at_a_cusp_and_is_on_a_parabola() -> None:
    """φ(ξ) = (ξ², ξ³) has dφ = 0 at 0 only (van Oostrum et al. (2023), section 4); φ(ξ) = (ξ, ξ²) is an immersion."""

    def look(φ: object, at: float) -> ng.Diagnosis:
        params = {"ξ": torch.tensor(at, dtype=torch.float64)}
        return ng.diagnose(ng.pullback(φ, None, ng.Euclidean(), params=params))  # type: ignore[call-overload]

    def cusp(p: dict[str, Tensor], x: None) -> Tensor:
        return torch.stack([p["ξ"] ** 2, p["ξ"] ** 3]).view(1, 2)

    def parabola(p: dict[str, Tensor], x: None) -> Tensor:
        return torch.stack([p["ξ"], p["ξ"] ** 2]).view(1, 2)

    assert (look(cusp, 0.0).rank, look(cusp, 0.0).constant_rank) == (0, False)
    assert "the metric is zero" in str(look(cusp, 0.0))
    assert (look(cusp, 1.0).rank, look(cusp, 1.0).constant_rank) == (1, True)
    assert look(parabola, 0.0).constant_rank


def test_constant_rank_does_not_show_that_the_image_has_no_crossing() -> None:
    """φ(t) = (sin 2t, sin t) is an immersion whose image crosses itself at 0 = φ(0) = φ(π): constant rank, not proper.

    The two branches have different tangents, so that the image has no tangent space there (van Oostrum et al. (2023)).
    """

    def figure_eight(p: dict[str, Tensor], x: None) -> Tensor:
        return torch.stack([(2 * p["t"]).sin(), p["t"].sin()]).view(1, 2)

    def look(at: float) -> ng.Diagnosis:
        params = {"t": torch.tensor(at, dtype=torch.float64)}
        return ng.diagnose(ng.pullback(figure_eight, None, ng.Euclidean(), params=params))

    for at in (0.0, torch.pi):
        assert look(at).constant_rank
        assert "constant rank: it is the same nearby" in str(look(at))
        assert "proper" not in str(look(at))
    assert not hasattr(look(0.0), "proper")
    assert "crosses itself" in str(ng.Diagnosis.__doc__)


def test_a_regular_metric_says_so() -> None:
    x = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = ng.diagnose(ng.pullback(nn.Linear(2, 1).double(), x, ng.Euclidean()))
    assert not found.singular
    assert found.null_directions == ()
    assert found.in_range is None
    assert str(found).startswith("rank 3 of 3\n")


def test_eigenvectors_beyond_the_memory_bound_are_refused() -> None:
    model = nn.Linear(100, 10)
    pb = ng.pullback(model, torch.randn(8, 100), ng.Euclidean(), memory=100_000)
    message = r"eigenvectors of 1,010 parameters need .* over the bound memory=100,000: use method=\"lanczos\""
    with pytest.raises(MemoryBoundError, match=message):
        ng.diagnose(pb, method="dense")
    found = ng.diagnose(pb)  # needs no eigenvectors
    assert found.density is not None
    assert found.rank <= 80


def network(*widths: int, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        layers = [m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.Tanh())]
        return nn.Sequential(*layers[:-1]).to(dtype)


def inputs(n: int, d: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float32).to(dtype)


@pytest.mark.parametrize(("n", "widths"), [(30, (6, 12, 4)), (12, (3, 20, 20, 3)), (200, (2, 8, 8, 2))])
@pytest.mark.parametrize("metric", [ng.Euclidean(), ng.Fisher(ng.Categorical())], ids=repr)
def test_single_and_double_precision_agree_on_the_rank(
    metric: ng.OutputMetric, n: int, widths: tuple[int, ...]
) -> None:
    """The numbers of a float32 model, computed in float64, are those of the same model in float64."""
    single = network(*widths, dtype=torch.float32)
    x = inputs(n, widths[0], torch.float32)
    found = ng.diagnose(ng.pullback(single, x, metric), nearby=0)
    double = ng.diagnose(ng.pullback(copy.deepcopy(single).double(), x.double(), metric), nearby=0)
    assert found.rank == double.rank
    torch.testing.assert_close(found.spectrum, double.spectrum)
    assert found.spectrum.dtype == torch.float64
    assert found.resolved == int((double.spectrum > double.spectrum[0] * len(double.spectrum) * 2.0**-23).sum())
    assert found.null_directions == () or found.null_directions[0]["0.weight"].dtype == torch.float32
    said = f"in float32 only {found.resolved} of them are above rounding" in str(found)
    assert said == (found.resolved < found.rank)
    assert "float32" not in str(double)


def test_a_precision_that_cannot_be_raised_is_said() -> None:
    """Single precision is written into the model, or the samples of the metric belong to it."""

    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).float()

    x = inputs(9, 3, torch.float32)
    for pb in (
        ng.pullback(Fixed(), x, ng.Euclidean()),
        ng.pullback(nn.Linear(3, 2), x, ng.Fisher(ng.Categorical(), samples=2)),
    ):
        found = ng.diagnose(pb)
        assert found.spectrum.dtype == torch.float32
        assert "computed in float32: in float64 the rank may be larger" in str(found)


def test_a_larger_model_is_diagnosed_by_products() -> None:
    """Against the dense eigenvalues of the same metric: the rank within its error, the largest eigenvalue exactly."""
    model, x = network(4, 8, 8, 2), inputs(20, 4)
    pb = ng.pullback(model, x, ng.Fisher(ng.Categorical()))
    exact = ng.diagnose(pb, nearby=0)
    ω = ng.differential(model, F.cross_entropy(model(x), torch.arange(20) % 2))
    found = ng.diagnose(pb, ω, method="lanczos", steps=30, generator=torch.Generator().manual_seed(0))
    assert (found.size, found.nearby_rank, found.constant_rank) == (exact.size, None, None)
    assert abs(found.rank - exact.rank) <= 4 * found.rank_error
    assert found.rank_error < 0.2 * exact.rank
    assert float(found.spectrum[0]) == pytest.approx(float(exact.spectrum[0]))
    assert found.in_range
    text = str(found)
    assert f"rank {found.rank} ± " in text
    assert "█" in text
    assert "ω lies in the range of the metric (relative part outside at most" in text
    random = ng.Covector({name: torch.randn_like(p) for name, p in model.named_parameters()})
    outside = ng.diagnose(pb, random, method="lanczos", probes=2)
    assert outside.in_range is None
    assert outside.outside == pytest.approx(ng.diagnose(pb, random, nearby=0).outside, rel=1e-6)
    assert "ω is not shown to lie in the range of the metric" in str(outside)
    assert (outside.rank, outside.rank_error) == (exact.rank, 0)  # more steps than the forty rows of the root
    assert f"rank {exact.rank} of " in str(outside)


def test_too_few_steps_show_in_the_error_of_the_rank() -> None:
    """A spectrum of fourteen decades after ten products: the bounds on the rank are far apart, and hold."""
    pb = ng.pullback(network(3, 16, 16, 2), inputs(60, 3), ng.Euclidean())
    exact = ng.diagnose(pb, nearby=0).rank
    found = ng.diagnose(pb, method="lanczos", steps=10, probes=4, generator=torch.Generator().manual_seed(0))
    assert abs(found.rank - exact) <= 4 * found.rank_error
    assert found.rank_error > 10


def test_an_unknown_method_is_refused() -> None:
    pb = ng.pullback(nn.Linear(1, 1), torch.ones(2, 1), ng.Euclidean())
    with pytest.raises(ValueError, match='"auto", "dense" or "lanczos", not \'qr\''):
        ng.diagnose(pb, method="qr")  # type: ignore[arg-type]
