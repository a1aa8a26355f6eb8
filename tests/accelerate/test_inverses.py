"""Inverses of factors, made in memory that is already there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate import inverses as inverting
from natgrad.accelerate.inverses import (
    Inversion,
    batch_by_size,
    batch_bytes,
    gram_of_upper,
    inverse_by_lapack,
    inverse_by_products,
    invert,
    invert_upper,
    two_sided_columns,
)
from natgrad.errors import FactorisationError, SingularMetricError
from natgrad.operators import KroneckerOperator
from natgrad.structures.kronecker import ProductInverse
from tests import zoo
from tests.memory import peak
from tests.pulled import close, covector, normal, pull, random_roots

WAYS = [inverse_by_lapack, inverse_by_products]
every_way = pytest.mark.parametrize("way", WAYS, ids=["lapack", "products"])


def positive(b: int, d: int, seed: int = 0) -> Tensor:
    a = normal(b, d, 2 * d, seed=seed)
    return a @ a.mT / d + 0.1 * torch.eye(d, dtype=torch.float64)


def operator_of(name: str, largest: int = 8192) -> tuple[ng.Pullback, KroneckerOperator]:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem))
    operator = ng.Kronecker(largest=largest).estimate(pb)
    assert isinstance(operator, KroneckerOperator)
    return pb, operator


def scaled(G: KroneckerOperator, factor: float) -> KroneckerOperator:
    return replace(G, left=tuple(factor * s for s in G.left), right=tuple(factor * a for a in G.right))


@every_way
@pytest.mark.parametrize(("b", "d"), [(1, 1), (1, 5), (3, 2), (4, 17)])
def test_the_inverse_is_the_inverse_in_the_memory_of_the_matrix(
    way: Callable[[Tensor], tuple[Tensor, Tensor]], b: int, d: int
) -> None:
    M = positive(b, d)
    expected = torch.linalg.inv(M)
    found, good = way(M)
    close(found, expected)
    assert good.tolist() == [True] * b
    assert found.data_ptr() == M.data_ptr()


@every_way
def test_a_matrix_that_is_not_positive_is_told_and_does_not_disturb_the_others(
    way: Callable[[Tensor], tuple[Tensor, Tensor]],
) -> None:
    M = positive(4, 3)
    M[1], M[2] = -M[1], 0.0
    expected = torch.linalg.inv(M[[0, 3]])
    found, good = way(M)
    assert good.tolist() == [True, False, False, True]
    close(found[[0, 3]], expected)


@pytest.mark.parametrize("largest", [8192, 3])
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "attention", "layer_norm", "tied_weights"])
def test_an_inverse_made_again_is_the_new_one_in_the_memory_of_the_last(name: str, largest: int) -> None:
    pb, G = operator_of(name, largest)
    last, solver = ng.Factored().init(G, 0.1), ng.Factored()
    before = {key: t.data_ptr() for key, t in last.tensors().items()}
    moved = scaled(G, 1.7)
    again, w = solver.again(last, moved, 0.2), covector(pb)
    close(again.sharp(w).flatten(), solver.init(moved, 0.2).sharp(w).flatten(), 1e-13)
    assert {key: t.data_ptr() for key, t in again.tensors().items() if not key.startswith("fallback")} == {
        key: place for key, place in before.items() if not key.startswith("fallback")
    }


def test_an_inverse_that_is_only_looked_at_stays_as_it_is() -> None:
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    before = {key: t.clone() for key, t in last.tensors().items()}
    ng.Factored().init(scaled(G, 1.7), 0.2, last.tensors())
    for key, t in last.tensors().items():
        assert torch.equal(t, before[key])


def test_an_inverse_of_other_layers_is_not_overwritten() -> None:
    _, G = operator_of("mlp_tanh")
    _, other = operator_of("mlp_tanh", largest=3)
    last = ng.Factored().init(G, 0.1)
    assert isinstance(last, ProductInverse)
    assert last.fits(scaled(G, 2.0))
    assert not last.fits(other)
    assert not last.fits(replace(G, blocks=G.blocks[:1], left=G.left[:1], right=G.right[:1]))


def test_a_factor_that_cannot_be_inverted_keeps_its_last_inverse_and_the_others_get_theirs() -> None:
    _, G = operator_of("mlp_tanh")
    last = ng.Factored().init(G, 0.1)
    before = {key: t.clone() for key, t in last.tensors().items()}
    moved = scaled(G, 1.7)
    spoiled = replace(moved, left=(-moved.left[0], *moved.left[1:]))
    # π of the spoiled layer is 1, so its A is compared with itself.
    expected = ng.Factored().init(replace(moved, left=(0 * moved.left[0], *moved.left[1:])), 0.1).tensors()
    with pytest.raises(FactorisationError, match=r"the factor S of 0\.weight \+ 0\.bias is not positive after damping"):
        ng.Factored().again(last, spoiled, 0.1)
    found = last.tensors()
    assert torch.equal(found["0.weight/S"], before["0.weight/S"])
    for key in ("0.weight/A", "2.weight/S", "2.weight/A"):
        close(found[key], expected[key])


@pytest.mark.parametrize("wait", [False, True])
def test_what_single_precision_cannot_invert_is_inverted_in_double(wait: bool) -> None:
    """c vvᵀ + 1 of integers below 2²⁴: the factor is exact, and what single precision leaves of 1 is not positive."""
    v = torch.arange(41, 71).float()
    factor = (3001 * torch.outer(v, v) + torch.eye(30)).unsqueeze(0)
    job = Inversion(factor, torch.zeros(1), torch.full((1, 30, 30), torch.nan))
    _, failed = torch.linalg.cholesky_ex(factor)
    assert bool(failed.all())
    invert([job], wait=wait)
    close(job.out.double(), torch.linalg.inv(factor.double()), 1e-6)


def test_without_a_last_inverse_it_raises() -> None:
    job = Inversion(-positive(2, 3), torch.zeros(2, dtype=torch.float64), torch.empty(2, 3, 3, dtype=torch.float64))
    with pytest.raises(SingularMetricError, match="a factor of the metric is not positive after damping"):
        invert([job])


@pytest.mark.parametrize("warm", [False, True])
def test_a_matrix_that_single_precision_cannot_invert_is_inverted_in_double(warm: bool) -> None:
    """1 + 10⁻⁸ is 1 in single precision, and a matrix of ones is singular."""
    ones, eye, shift = torch.ones(9, 9), torch.eye(9), torch.full((2,), 1e-8)
    job = Inversion(torch.stack([ones, eye]), shift, torch.zeros(2, 9, 9))
    assert bool(torch.linalg.cholesky_ex(ones + shift[0] * eye)[1])
    assert invert([job], warm=warm) is None
    expected = torch.linalg.inv(ones.double() + shift[0].double() * eye.double())
    close(job.out[0].double() / expected.max(), expected / expected.max(), 1e-6)
    close(job.out[1], eye, 1e-6)


@pytest.mark.parametrize("warm", [False, True])
def test_on_a_gpu_nobody_waits_to_hear_of_a_matrix_that_cannot_be_inverted(
    warm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A processor that is taken for a GPU: the number of failures comes back, and what fails is the last."""
    monkeypatch.setattr(inverting, "is_asynchronous", lambda device: True)
    out = torch.full((2, 3, 3), 7.0)
    job = Inversion(torch.stack([torch.eye(3), -torch.eye(3)]), torch.full((2,), 0.25), out)
    assert invert([job], warm=warm) == torch.ones(())
    close(out[0], torch.eye(3) / 1.25, 1e-6)
    assert torch.equal(out[1], torch.full((3, 3), 7.0)) if warm else bool(out[1].isnan().all())


def test_stacks_are_of_one_size_and_no_larger_than_there_is_room_for() -> None:
    small, large = torch.zeros(1, 200, 200), torch.zeros(1, 300, 300)
    several = batch_bytes(small) // small.nbytes
    factors = [large, *[small] * (several + 1), large]
    stacks = batch_by_size(factors)
    assert sorted(at for stack in stacks for at in stack) == list(range(len(factors)))
    assert [len(stack) for stack in stacks] == [1, 1, several, 1]
    assert batch_by_size([torch.zeros(several + 1, 200, 200)]) == [[0]]


def test_layers_of_a_group_that_are_cut_into_several_stacks_have_their_own_inverses() -> None:
    several = batch_bytes(torch.zeros(1, 200, 200)) // torch.zeros(1, 200, 200).nbytes
    factors = [positive(1, 200, seed=at).float() for at in range(2 * several + 1)]
    shifts = [torch.tensor([0.01 * at]) for at in range(len(factors))]
    out = torch.empty(len(factors), 1, 200, 200)
    invert([Inversion(*job) for job in zip(factors, shifts, out, strict=True)])
    for factor, shift, found in zip(factors, shifts, out.squeeze(1), strict=True):
        close(found.double(), torch.linalg.inv(factor[0].double() + shift.double() * torch.eye(200)), 1e-3)


@pytest.mark.parametrize("warm", [False, True])
def test_inverting_holds_one_matrix_beside_what_is_kept(warm: bool) -> None:
    d, layers = 300, 6
    factors = [positive(1, d, seed=at) for at in range(layers)]
    jobs = [Inversion(factor, torch.ones(1).double(), torch.ones(1, d, d).double()) for factor in factors]
    one = factors[0].nbytes
    assert one <= peak(lambda: invert(jobs, warm=warm)) < 1.1 * one


class _Repeated(nn.Module):
    """Layers of one shape, and normalisations."""

    def __init__(self) -> None:
        super().__init__()
        layers = [module for _ in range(3) for module in (nn.Linear(5, 5), nn.LayerNorm(5), nn.Tanh())]
        self.layers = nn.Sequential(*layers, nn.Linear(5, 2, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def _repeated() -> tuple[ng.Pullback, KroneckerOperator]:
    problem = zoo.Problem(_Repeated().double(), normal(7, 5))
    pb = pull(problem, random_roots(problem))
    operator = ng.Kronecker().estimate(pb)
    assert isinstance(operator, KroneckerOperator)
    return pb, operator


@pytest.mark.parametrize("name", [*zoo.IDS, "repeated"])
def test_layers_that_are_not_packed_have_the_solution_of_those_that_are(name: str) -> None:
    pb, G = _repeated() if name == "repeated" else operator_of(name)
    ω, inverse = covector(pb), ng.Factored().init(G, 0.1)
    if not isinstance(inverse, ProductInverse):
        pytest.skip("no layer has a rule")
    found = inverse.sharp(ω)
    vars(inverse)["_columns"] = [None] * len(inverse.batches)  # as if every rule had its own packing
    expected = inverse.sharp(ω)
    for key, right in expected.items():
        close(found[key], right)


def test_products_by_columns_are_those_of_the_packed_matrix() -> None:
    left, right, w = positive(2, 4), positive(2, 5, seed=1), normal(2, 4, 5, seed=2)
    for widths in ([3, 2], [5], [1, 1, 3]):
        close(torch.cat(two_sided_columns(left, list(w.split(widths, -1)), right), -1), left @ w @ right)


def test_products_with_aligned_factors_are_those_without_padding(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU."""
    monkeypatch.setattr(inverting, "is_asynchronous", lambda device: True)
    left, right = positive(2, 4), positive(2, 5, seed=1)
    w, pad = normal(2, 4, 5, seed=2), torch.nn.functional.pad
    parts = two_sided_columns(pad(left, (0, 2, 0, 2)), list(w.split([3, 2], -1)), pad(right, (0, 3, 0, 3)))
    close(torch.cat(parts, -1), left @ w @ right)


@pytest.mark.parametrize("d", [1, 2, 3, 8, 13, 16, 37, 60])
@pytest.mark.parametrize("leaf", [1, 4, 5, 64])
def test_an_upper_matrix_is_inverted_by_products_of_its_blocks(d: int, leaf: int) -> None:
    U = torch.linalg.cholesky(positive(1, d)[0]).mT.contiguous()
    V = torch.nn.functional.pad(U, (0, 3))[:, :d]  # rows that are longer in memory
    invert_upper(V, leaf)
    close(U @ V, torch.eye(d, dtype=torch.float64))
    close(V.tril(-1), torch.zeros(d, d, dtype=torch.float64))
    close(gram_of_upper(V.contiguous()), torch.linalg.inv(U.mT @ U))


@pytest.mark.parametrize("d", [5, 130, 300])
def test_a_large_matrix_is_inverted_without_a_solve(d: int) -> None:
    M = positive(1, d)
    found, good = inverse_by_products(M.clone(), large=2)
    assert bool(good.all())
    close(found, torch.linalg.inv(M), 1e-9)
    bad = M.clone()
    bad[0, 0, 0] = -1.0
    assert not bool(inverse_by_products(bad, large=2)[1].any())


def test_fewer_matrices_are_worked_on_at_once_where_more_is_held_for_each() -> None:
    """As roots by products hold several stacks where Cholesky is reckoned to hold one."""
    d = 128
    size = torch.zeros(1, d, d).nbytes
    fits = batch_bytes(torch.zeros(1, d, d)) // size
    factors = [torch.zeros(1, d, d)] * fits + [torch.zeros(1, 64, 64)]
    assert sorted(map(len, batch_by_size(factors))) == [1, fits]
    assert sorted(map(len, batch_by_size(factors, stacks=4))) == [1, *[fits // 4] * 4]
