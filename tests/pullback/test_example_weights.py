"""Weighted examples: the factors of K-FAC are those of a batch in which examples are repeated."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch import distributions as D

import natgrad as ng
from natgrad.functionspace import Quadrature, Weighted
from natgrad.model import map_tensors
from natgrad.output.metric import Coupling
from natgrad.pullbacks.coupling import Weights
from natgrad.pullbacks.layer_factors import coupled_by
from natgrad.structures.layered import Layered
from tests import zoo
from tests.golden import tensor
from tests.pulled import Rooted, close, covered, normal, pull

STRUCTURES: list[Layered] = [
    ng.Kronecker(),
    ng.Kronecker("reduce"),
    ng.Kronecker(largest=3),
    ng.EigenKronecker(),
    ng.EigenKronecker("reduce"),
]
REPEATED = [3, 1, 0, 2, 1, 4, 1, 1]  # how often every example is there, as far as there are examples


class Padded(nn.Module):
    """A bag of words, of which those with the number 0 do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 3, padding_idx=0), nn.Linear(3, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        """[n t] to [n 2]."""
        return self.head(torch.tanh(self.embedding(tokens)).sum(1))


class Masked(nn.Module):
    """Attention to those keys that are not masked."""

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.head = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x: Tensor, masked: Tensor) -> Tensor:
        """[n t 4] and [n t] to [n t 2]."""
        return self.head(self.attention(x, x, x, key_padding_mask=masked, need_weights=False)[0])


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTM(2, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 2] to [n 2]; the examples are on the second axis inside."""
        return self.head(self.cell(x.transpose(0, 1))[0][-1])


def _normalised() -> zoo.Problem:
    layers = [nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.BatchNorm2d(4), nn.Tanh(), nn.GroupNorm(2, 4), nn.Flatten()]
    return zoo.Problem(nn.Sequential(*layers, nn.Linear(36, 2)).eval(), normal(4, 2, 3, 3))


def _transposed() -> zoo.Problem:
    layers = [nn.ConvTranspose2d(1, 2, 2, stride=2), nn.Tanh(), nn.Flatten(), nn.Linear(18 * 4, 2)]
    return zoo.Problem(nn.Sequential(*layers), normal(4, 1, 3, 3))


WORDS = torch.tensor([[1, 2, 0, 0], [3, 3, 5, 0], [2, 4, 1, 1], [5, 0, 0, 0]])
OWN = [
    zoo.Case("padded_embedding", lambda: zoo.Problem(Padded(), WORDS)),
    zoo.Case("masked_attention", lambda: zoo.Problem(Masked().eval(), (normal(4, 4, 4), WORDS == 0))),
    zoo.Case("recurrent", lambda: zoo.Problem(Recurrent(), normal(4, 3, 2))),
    zoo.Case("normalised", _normalised),
    zoo.Case("transposed", _transposed),
]
NAMES = (
    *("linear", "mlp_tanh", "frozen_weight", "frozen_bias", "called_twice", "tied_weights", "sequence", "two_inputs"),
    *("conv", "layer_norm", "attention", "tied_embedding"),
)


def weighted_and_repeated(problem: zoo.Problem) -> tuple[ng.Pullback, ng.Pullback]:
    """Examples with weights, and the same as a longer batch."""
    counts = torch.tensor(REPEATED[: problem.n_examples])
    s = normal(3, *problem.outputs().shape)
    weighted = pull(problem, Weighted(counts / counts.sum().double(), Rooted(s)))
    x = map_tensors(problem.x, lambda t: t.repeat_interleave(counts, dim=0))
    longer = zoo.Problem(problem.model, x, problem.output, problem.params)
    return weighted, pull(longer, Rooted(s.repeat_interleave(counts, dim=1)))


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("case", [zoo.case(name) for name in NAMES] + OWN, ids=lambda case: case.name)
def test_weights_that_are_repetitions_have_the_factors_of_the_repeated_batch(
    case: zoo.Case, structure: Layered
) -> None:
    weighted, repeated = weighted_and_repeated(case.make())
    assert covered(weighted)
    expected = structure.estimate(repeated)
    found = structure.estimate(weighted, expected)  # in its basis: eigenvectors of equal eigenvalues are any
    assert found.tensors().keys() == expected.tensors().keys()
    for name, t in expected.tensors().items():
        close(found.tensors()[name], t, 1e-12)


def test_two_examples_of_which_one_counts_twice() -> None:
    model, x = nn.Sequential(nn.Linear(1, 3), nn.Tanh(), nn.Linear(3, 1)).double(), tensor([[0.3], [-1.2]])
    for structure in STRUCTURES:
        two = structure.estimate(ng.pullback(model, x, Weighted(tensor([2 / 3, 1 / 3])))).dense()
        three = structure.estimate(ng.pullback(model, x[[0, 0, 1]], ng.Euclidean())).dense()
        close(two, three, 1e-14)


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
def test_examples_of_equal_weight_have_the_factors_of_no_weights(structure: Layered) -> None:
    problem = zoo.case("conv").make()
    n, s = problem.n_examples, normal(2, *problem.outputs().shape)
    plain = structure.estimate(pull(problem, Rooted(s)))
    equal = structure.estimate(pull(problem, Weighted(tensor([1 / n] * n), Rooted(s))), plain)
    for name, t in plain.tensors().items():
        close(equal.tensors()[name], t, 1e-12)


def test_weights_whose_sum_is_rounded_scale_the_metric_and_not_the_inputs() -> None:
    """A is a mean, and S ⊗ A has the scale of G."""
    model, x, w = nn.Linear(2, 3).double(), normal(3, 2), tensor([0.5, 0.3, 0.20005])
    pb = ng.pullback(model, x, Weighted(w))
    found = ng.Kronecker().estimate(pb)
    close(found.right[0][0, -1, -1], tensor(1.0), 1e-14)
    close(found.dense(), ng.Dense().estimate(pb).dense(), 1e-14)


def test_one_example_without_an_axis_of_examples() -> None:
    model, x = nn.Linear(2, 3).double(), normal(1, 2)
    plain = ng.Kronecker().estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    close(ng.Kronecker().estimate(ng.pullback(model, x, Weighted(tensor([1.0])))).dense(), plain, 1e-14)


def test_under_autocast_the_factors_are_in_single_precision() -> None:
    model, x, w = zoo.mlp(3, 4, 2), normal(4, 3).float(), torch.tensor([0.25, 0.25, 0.5, 0.0])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, plain = (
            ng.Kronecker().estimate(ng.pullback(model, inputs, metric)).tensors()
            for inputs, metric in ((x, Weighted(w)), (x[[0, 1, 2, 2]], ng.Euclidean()))
        )
    for name, t in plain.items():
        assert found[name].dtype == torch.float32
        torch.testing.assert_close(found[name], t, rtol=1e-5, atol=1e-6)


class Chain(nn.Module):
    """tanh(b tanh(a x)), the 1-1-1 network of Bai, Rosenberg and Xu (2022), appendix E."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)
        with torch.no_grad():
            self.first.weight.fill_(0.7)
            self.second.weight.fill_(1.3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 1] to [n 1]."""
        return torch.tanh(self.second(torch.tanh(self.first(x))))


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker()], ids=repr)
def test_the_factors_under_a_measure_converge_to_those_of_samples(structure: Layered) -> None:
    """A = E x² = 1 and S = E g² under N(0, 1): 0.72 in the first layer, whatever the order, where G has 0.149."""
    model = Chain().double()
    samples = ng.Kronecker().estimate(ng.pullback(model, normal(100_000, 1), ng.Euclidean()))
    off = []
    for order in (4, 8, 16, 32, 64):
        rule = Quadrature.of(D.Normal(tensor(0.0), tensor(1.0)), order)
        found = structure.estimate(ng.pullback(model, rule.nodes, rule.metric()))
        s, a = (found.tensors()[f"first.weight/{side}"] for side in "SA")
        close(a.flatten(), tensor([1.0]), 1e-12)
        off.append(abs(float(s) - 0.7194))
    assert off == sorted(off, reverse=True)
    assert off[-1] < 1e-4
    for s, a, expected in zip(samples.left, samples.right, (0.7194, 0.1489), strict=True):
        assert abs(float(s * a) - expected) < 0.01 * expected


def test_a_coupling_says_that_it_is_weights_and_another_is_matched_by_traces() -> None:
    """The same diagonal C as a matrix is a coupling as any: S ⊗ A has the share of the trace of G that it has at 1."""
    problem = zoo.case("mlp_tanh").make()
    n, s = problem.n_examples, normal(2, *problem.outputs().shape)
    w = torch.arange(1.0, n + 1).double()
    pb = pull(problem, Weighted(w / w.sum(), Rooted(s)))
    assert pb.coupled is not None
    assert pb.coupled.weights is not None
    assert isinstance(coupled_by(pb, pb.tape), Weights)
    pb.coupled = Coupling(pb.coupled.C)
    matched, plain = (ng.Kronecker().estimate(p) for p in (pb, pull(problem, Rooted(s))))
    exact, exact_plain = (ng.Diagonal().estimate(p).diagonal() for p in (pb, pull(problem, Rooted(s))))
    for block in plain.blocks:
        kept, kept_plain = matched.diagonal()[block.index].sum(), plain.diagonal()[block.index].sum()
        close(kept / exact[block.index].sum(), kept_plain / exact_plain[block.index].sum(), 1e-10)
