"""Memory bounds: the same G from chunks of roots, and refusals before anything is allocated."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import natgrad as ng
from natgrad.errors import MemoryBoundError
from natgrad.pullbacks import ExampleGrads
from natgrad.structures import Structure
from tests import zoo
from tests.pulled import close, normal, pull, random_roots

CASES = ["mlp_tanh", "sequence", "layer_norm", "conv", "called_twice", "tied_embedding", "two_inputs", "pure_function"]


def chunks(pb: ng.Pullback) -> list[tuple[int, int]]:
    """Roots and examples of every chunk."""
    return [(f[0].g.shape[0], f[0].g.shape[1]) for f in pb.factors()]


@pytest.mark.parametrize("memory", [8, 3_000, 12_000, 60_000])
@pytest.mark.parametrize("name", CASES)
def test_chunks_of_any_size_sum_to_the_same_metric(name: str, memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # The bounds are so tiny, to cut small models, that no structure would be admitted.
    monkeypatch.setattr(Structure, "admit", lambda structure, pb: None)
    problem = zoo.case(name).make()
    metric = random_roots(problem, k=5)
    whole, cut = pull(problem, metric), pull(problem, metric, memory=memory)
    for structure in (ng.Dense(), ng.BlockDense(), ng.Diagonal()):
        close(structure.estimate(cut).dense(), structure.estimate(whole).dense())
    close(ng.Kernel().estimate(cut).rows(), ng.Kernel().estimate(whole).rows())
    assert chunks(whole) == [(5, whole.n)]


@pytest.mark.parametrize("name", CASES)
def test_tiny_bounds_cut_the_roots_one_by_one(name: str) -> None:
    problem = zoo.case(name).make()
    cut = pull(problem, random_roots(problem, k=5), memory=8)
    assert {k for k, _ in chunks(cut)} == {1}


def test_bounded_sampled_metric_has_the_root_of_the_whole_batch() -> None:
    problem = zoo.case("mlp_tanh").make()
    metric = ng.Fisher(ng.Categorical(axis=-1), samples=3)
    close(pull(problem, metric, memory=8).root, pull(problem, metric).root)


# Refusals


def big() -> tuple[nn.Module, Tensor]:
    model = nn.Sequential(nn.Linear(900, 1000), nn.Tanh(), nn.Linear(1000, 100))
    return model, torch.zeros(4, 900)


REFUSALS = [
    (ng.Dense(), 2**32, r"Dense of 1,001,100 parameters needs 4,008,804,840,000 bytes.*memory=4,294,967,296"),
    (ng.Dense(), 2**32, r"These fit: Kernel .* Diagonal \(4,004,400 bytes\), Implicit \(4,004,400 bytes\)"),
    (ng.BlockDense(), 2**32, r"BlockDense of 1,001,100 parameters needs"),
    (ng.Kernel(), 8_000, r"Kernel of 1,001,100 parameters needs"),
    (ng.LowRank(5), 2**24, r"LowRank of 1,001,100 parameters needs"),
    (ng.Diagonal(), 8_000, r"Diagonal of 1,001,100 parameters needs 4,004,400 bytes.*No structure fits: raise memory"),
    (ng.Implicit(), 1_000_000, r"Implicit of 1,001,100 parameters needs 4,004,400 bytes"),
]


@pytest.mark.parametrize(("structure", "memory", "message"), REFUSALS, ids=lambda v: repr(v)[:24])
def test_too_large_structures_are_refused_before_anything_is_allocated(
    structure: Structure, memory: int, message: str
) -> None:
    model, x = big()
    pb = ng.pullback(model, x, ng.Sampled(ng.Euclidean()), memory=memory)
    with Largest() as largest, pytest.raises(MemoryBoundError, match=message):
        structure.estimate(pb)
    assert largest.elements == 0


def test_too_large_coupled_rows_are_refused() -> None:
    model, x = big()
    metric = ng.GradientCovariance(nn.functional.mse_loss)
    pb = ng.pullback(model, x, metric, torch.zeros(4, 100), memory=5_000_000)
    with pytest.raises(MemoryBoundError, match=r"coupled rows of 4 examples .* need 30,433,600 bytes.*Implicit"):
        ng.Diagonal().estimate(pb)


# What is held


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that is created inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        real = [
            t for t in tree_leaves(out) if isinstance(t, Tensor) and not t.is_meta and not isinstance(t, FakeTensor)
        ]
        sizes = [t.untyped_storage().nbytes() // t.element_size() for t in real]
        self.elements = max([self.elements, *sizes])
        return out


def test_diagonal_of_a_sampled_metric_never_holds_the_gradients_of_the_examples() -> None:
    """N·P would be 64 · 3,300; the largest tensor is one of the size of the parameters or of the activations."""
    model, x = zoo.mlp(30, 50, 34).double(), normal(64, 30)
    with Largest() as largest:
        pb = ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1), samples=1))
        ng.Diagonal().estimate(pb)
    activations = 64 * 50
    assert largest.elements <= max(pb.model.size, 2 * activations)


def test_diagonal_of_a_sequence_stays_within_its_bound() -> None:
    model, x = zoo.mlp(10, 20, 5).double(), normal(32, 7, 10)
    exact = ng.pullback(model, x, ng.Euclidean()).square()
    memory = 8 * 40_000
    with Largest() as largest:
        pb = ng.pullback(model, x, ng.Euclidean(), memory=memory)
        G = ng.Diagonal().estimate(pb)
    close(G.diagonal(), exact)
    everything = 35 * 32 * pb.model.size
    assert everything > 8 * 40_000
    assert largest.elements <= 40_000


def test_a_sampled_euclidean_root_is_never_whole() -> None:
    """One pseudo-gradient an example of 300 outputs: nothing as large as the exact root [d n d] is made."""
    y = torch.zeros(200, 300, dtype=torch.float64)
    with Largest() as seen:
        root = ng.Sampled(ng.Euclidean()).root(y, generator=torch.Generator().manual_seed(0))
    assert root.shape == (1, 200, 300)
    assert seen.elements < 300 * 200 * 300 / 2


def test_the_kernel_of_a_sequence_counts_its_positions() -> None:
    """g [k n r c o] and a [n r c i] grow with the sequence: so does what is forecast, and what is allocated fits it."""
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    for length in (1, 5):
        pb = ng.pullback(layer, torch.ones(4, length, 3, dtype=torch.float64), ng.Euclidean())
        rows = pb.columns * 4
        held = sum(t.numel() for t in ng.Kernel().estimate(pb).tensors().values())
        assert held == rows * length * 2 + 4 * length * 4
        assert ng.Kernel().elements(pb) == held + 2 * rows**2


GRAMS = {
    "by positions": (2, 9, 3, 1, 40, 41),
    "by rows": (2, 9, 7, 1, 5, 6),
    "groups": (2, 9, 3, 4, 5, 6),
    "plain": (2, 9, 1, 1, 5, 6),
}


@pytest.mark.parametrize("limit", [1, 500, 2_000, 2**25])
@pytest.mark.parametrize("name", GRAMS)
def test_gram_matrices_from_blocks_of_any_size_are_those_of_the_rows(name: str, limit: int) -> None:
    k, n, r, c, o, i = GRAMS[name]
    f = ExampleGrads(normal(n, r, c, i), normal(k, n, r, c, o, seed=1))
    rows = f.rows().flatten(0, 1)
    with Largest() as largest:
        got = f.gram(limit=limit)
    close(got, rows @ rows.T)
    if name != "plain":
        smallest = max((k * r) ** 2, k * n * c * i)  # a pair of examples; a slice of the rows
        assert largest.elements <= max(limit, smallest, (k * n) ** 2, f.g.numel())


def test_the_kernel_of_a_sequence_never_forms_its_rows() -> None:
    """Linear(256, 256) on 128 sequences of 4: the rows would have 8.4 million numbers."""
    model, x = nn.Linear(256, 256), torch.ones(128, 4, 256)
    G = ng.Kernel().estimate(ng.pullback(model, x, ng.Sampled(ng.Euclidean())))
    with Largest() as largest:
        G.gram()
    assert largest.elements <= 2**19


def test_rows_of_a_whole_batch_count_a_cotangent_of_all_outputs_an_example() -> None:
    """Time comes first, so that examples cannot be taken apart: k·n cotangents of n·d numbers."""
    params, x = {"w": normal(3, 4)}, normal(5, 20, 3)
    metric, chunk = ng.Sampled(ng.Euclidean(), samples=50), 5_000
    pb = ng.pullback(lambda θ, x: x.mean(0) @ θ["w"], x, metric, params=params, memory=8 * 8 * chunk)
    with Largest() as largest:
        pb.square()
    assert chunk < 50 * 20 * 20 * 4
    assert largest.elements <= chunk


def test_the_diagonal_of_a_long_sequence_never_forms_all_its_rows() -> None:
    layer = torch.nn.Linear(60, 60, dtype=torch.float64)
    x = torch.ones(50, 2, 60, dtype=torch.float64)
    G = ng.Kernel().estimate(ng.pullback(layer, x, ng.Sampled(ng.Euclidean(), samples=120)))
    with Largest() as largest:
        diagonal = G.diagonal()
    assert largest.elements < G.factors[0].g.shape[0] * 50 * layer.weight.numel()
    squares = G.factors[0].g.sum((2, 3)).square().sum((0, 1))  # the inputs are ones
    torch.testing.assert_close(diagonal, torch.cat([squares.repeat_interleave(60), squares]))


def test_outputs_that_the_user_changes_in_place_do_not_reach_the_metric() -> None:
    """A temperature, y /= 2, after the forward pass and before the step."""
    layer = torch.nn.Linear(3, 2, dtype=torch.float64)
    x = torch.arange(12, dtype=torch.float64).view(4, 3) / 12
    metric = ng.Fisher(ng.Categorical(axis=-1))
    opt = ng.NaturalGradient(layer, metric, structure=ng.Implicit(), solver=ng.CG())
    y = layer(x)
    h = metric.flat(y.detach().clone(), torch.stack([x[:, 0], torch.zeros(4, dtype=torch.float64)], dim=1))
    y.data.mul_(100.0)
    y.sum().backward()
    assert opt.tracker.fresh is not None
    v = torch.zeros(8, dtype=torch.float64)
    v[0] = 1.0  # moves the first output by the first input
    expected = torch.cat([(h.T @ x / 4).flatten(), h.mean(0)])
    torch.testing.assert_close(opt.tracker.fresh.product(v), expected)
