"""EK-FAC: the diagonal of G in the eigenbasis of its factors, and what becomes of it when the basis moves."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate.roots import spectrum
from natgrad.errors import FactorisationError, NonFiniteError
from natgrad.operators import EigenKroneckerOperator
from tests import kronecker_oracle, oracle, zoo
from tests.pulled import close, normal, pull, random_roots

SHARINGS: list[Any] = ["expand", "reduce"]
both = pytest.mark.parametrize("sharing", SHARINGS)


def network(kind: str, seed: int) -> zoo.Problem:
    """A random network of a kind."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        modules: dict[str, tuple[nn.Module, Tensor]] = {
            "mlp": (zoo.mlp(4, 6, 5, 3), normal(7, 4, seed=seed)),
            "sequence": (zoo.mlp(3, 5, 4), normal(5, 3, 3, seed=seed)),
            "conv": (
                nn.Sequential(nn.Conv2d(2, 4, 3, padding=1, groups=2), nn.ReLU(), nn.Conv2d(4, 2, 2, stride=2)),
                normal(4, 2, 4, 4, seed=seed),
            ),
            "norm": (nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), normal(6, 3, seed=seed)),
        }
        module, x = modules[kind]
        return zoo.Problem(module.double(), x)


def layers(problem: zoo.Problem, s: Tensor) -> tuple[Tensor, list[kronecker_oracle.Layer]]:
    """The oracle's G for a root, and its layers."""
    flat = s.reshape(*s.shape[:2], -1)
    G = oracle.dense(problem.jacobian(), torch.einsum("knd,kne->nde", flat, flat))
    return G, kronecker_oracle.layers(problem.module, problem.x, s)


# Against the exact blocks


@both
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv", "norm"])
@pytest.mark.parametrize("metric", ["random roots", "Fisher", "Euclidean"])
def test_ekfac_is_never_further_from_the_metric_than_kfac(metric: str, kind: str, seed: int, sharing: Any) -> None:
    """George et al. (2018, section 4): in the Frobenius norm, in every layer."""
    problem = network(kind, seed)
    metrics = {"random roots": random_roots(problem), "Fisher": ng.Fisher(ng.Poisson()), "Euclidean": ng.Euclidean()}
    pb = pull(problem, metrics[metric])
    G, found = layers(problem, pb.root)
    kfac, ekfac = ng.Kronecker(sharing).estimate(pb).dense(), ng.EigenKronecker(sharing).estimate(pb).dense()
    better = False
    for layer in found:
        at = layer.index.reshape(-1)
        exact = G[at[:, None], at]
        far, near = (float((kept[at[:, None], at] - exact).norm()) for kept in (kfac, ekfac))
        assert near <= far + 1e-12 * float(exact.norm())
        better |= near < 0.99 * far
    assert better or metric == "Euclidean"
    close(torch.diag(ekfac).sum(), torch.diag(G).sum())


@both
@pytest.mark.parametrize("kind", ["mlp", "norm"])
def test_ekfac_is_exact_for_one_datum(kind: str, sharing: Any) -> None:
    problem = network(kind, 0)
    one = zoo.Problem(problem.model, oracle.example(problem.x, 0))
    metric = random_roots(one)
    G, found = layers(one, metric.s)
    expected = oracle.block_diagonal(G, [layer.index.reshape(-1).tolist() for layer in found])
    close(ng.EigenKronecker(sharing).estimate(pull(one, metric)).dense(), expected)


@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv", "norm"])
def test_scales_are_the_second_moments_of_the_rows_in_the_basis(kind: str) -> None:
    """D = Σ_kn (Qᵀ R_kn P)², from explicit rows."""
    problem = network(kind, 1)
    metric = random_roots(problem)
    operator = ng.EigenKronecker().estimate(pull(problem, metric))
    found = iter(layers(problem, metric.s)[1])
    for b, block in enumerate(operator.blocks):
        for c in range(block.shape[0]):
            q, p = (side[b] for side in (operator.basis.left, operator.basis.right))
            assert q is not None
            assert p is not None
            rows = q[c].T @ next(found).rows() @ p[c]
            close(operator.scales[b][c], rows.square().sum((0, 1)))


@pytest.mark.parametrize("memory", [2**32, 2**14])
@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv"])
def test_scales_do_not_depend_on_the_chunks(kind: str, memory: int) -> None:
    """Nor on whether rows or positions are rotated."""
    problem = network(kind, 2)
    metric = random_roots(problem, 5)
    whole = ng.EigenKronecker().estimate(pull(problem, metric))
    in_parts = ng.EigenKronecker().estimate(pull(problem, metric, memory=memory), whole)
    for got, expected in zip(in_parts.scales, whole.scales, strict=True):
        close(got, expected, 1e-13)


@pytest.mark.parametrize(("positions", "width"), [(2, 9), (40, 2)])
def test_rows_and_positions_are_rotated_to_the_same_scales(positions: int, width: int) -> None:
    """Few positions of wide layers are rotated themselves; of many, the rows."""
    problem = zoo.Problem(zoo.mlp(width, width, 2).double(), normal(3, positions, width))
    metric = random_roots(problem, 2)
    operator = ng.EigenKronecker().estimate(pull(problem, metric))
    _, found = layers(problem, metric.s)
    for b, layer in enumerate(found):
        q, p = operator.basis.left[b], operator.basis.right[b]
        assert q is not None
        assert p is not None
        close(operator.scales[b][0], (q[0].T @ layer.rows() @ p[0]).square().sum((0, 1)))


class Words(nn.Module):
    """An embedding that is looked up twice, and a linear layer."""

    def __init__(self, padding: int | None) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(5, 3, padding_idx=padding), nn.Linear(3, 2)

    def forward(self, words: Tensor) -> Tensor:
        """Words [n t] to outputs [n t 2]."""
        return self.head(torch.tanh(self.table(words)) * self.table(words.flip(1)))


@pytest.mark.parametrize("padding", [None, 2])
def test_scales_of_words_need_no_one_hot_vectors(padding: int | None) -> None:
    """The eigenvectors of A are the words; words that come again in one example are summed before they are squared."""
    words = torch.tensor([[0, 1, 1, 2], [3, 3, 3, 0], [2, 2, 1, 1]])
    problem = zoo.Problem(Words(padding).double(), words)
    metric = random_roots(problem)
    operator = ng.EigenKronecker().estimate(pull(problem, metric))
    q, p = operator.basis.left[0], operator.basis.right[0]
    assert q is not None
    assert p is None
    G = layers(problem, metric.s)[0][:15, :15].view(5, 3, 5, 3)
    expected = torch.einsum("vawb,ao,bo,vw->ov", G, q[0], q[0], torch.eye(5, dtype=torch.float64))
    close(operator.scales[0][0], expected)


# When the basis moves


def estimates(kind: str = "mlp") -> tuple[EigenKroneckerOperator, EigenKroneckerOperator, ng.Pullback]:
    """Of one network at two batches, and the second pullback."""
    problem = network(kind, 3)
    assert isinstance(problem.x, Tensor)
    other = zoo.Problem(problem.model, normal(*problem.x.shape, seed=9))
    s = random_roots(problem)
    pb = pull(other, s)
    return ng.EigenKronecker().estimate(pull(problem, s)), ng.EigenKronecker().estimate(pb), pb


def diagonal_in(basis: EigenKroneckerOperator, G: Tensor) -> Tensor:
    """What is kept of G in the basis of another operator, from dense matrices."""
    out = torch.zeros_like(G)
    for b, block in enumerate(basis.blocks):
        index = block.index.view(block.shape[0], -1)
        for c, at in enumerate(index):
            q, p = basis.basis.left[b], basis.basis.right[b]
            assert q is not None
            assert p is not None
            B = torch.kron(q[c].contiguous(), p[c].contiguous())
            out[at[:, None], at] = B @ torch.diag(torch.diag(B.T @ G[at[:, None], at] @ B)) @ B.T
    return out


@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv", "norm"])
@pytest.mark.parametrize("weight", [0.0, 0.3, 1.0])
def test_average_is_the_diagonal_of_the_average_in_the_newer_basis(kind: str, weight: float) -> None:
    old, new, _ = estimates(kind)
    average = old.lerp(new, weight)
    assert average.basis is new.basis
    close(average.dense(), diagonal_in(new, (1 - weight) * old.dense() + weight * new.dense()))


@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv", "norm"])
def test_average_in_one_basis_is_the_average(kind: str) -> None:
    """An estimate like the average has its basis, and nothing is lost."""
    old, _, pb = estimates(kind)
    new = ng.EigenKronecker().estimate(pb, old)
    assert new.basis is old.basis
    average = old.lerp(new, 0.3)
    assert average.basis is old.basis
    close(average.dense(), 0.7 * old.dense() + 0.3 * new.dense())
    close(new.dense(), diagonal_in(old, ng.BlockDense().estimate(pb).dense()))


@pytest.mark.parametrize("kind", ["mlp", "sequence", "conv", "norm"])
def test_renewal_is_in_the_eigenvectors_of_the_averaged_factors(kind: str) -> None:
    old, _, pb = estimates(kind)
    average = old.lerp(ng.EigenKronecker().estimate(pb, old), 0.3)
    renewed = average.with_new_basis()
    for b in range(len(renewed.blocks)):
        for side, factor in ((renewed.basis.left[b], renewed.left[b]), (renewed.basis.right[b], renewed.right[b])):
            assert side is not None
            rotated = side.mT @ factor @ side
            close(rotated, torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1)))
    close(renewed.dense(), diagonal_in(renewed, average.dense()))
    close(renewed.trace(), average.trace())


def test_renewal_of_an_estimate_changes_nothing() -> None:
    operator, _, _ = estimates()
    close(operator.with_new_basis().dense(), operator.dense())


def test_an_estimate_like_something_else_has_a_basis_of_its_own() -> None:
    """Nothing to start from, another structure, or other layers."""
    old, new, pb = estimates()
    other = ng.EigenKronecker().estimate(pull(network("conv", 0), ng.Euclidean()))
    for like in (None, ng.Kronecker().estimate(pb), other):
        close(ng.EigenKronecker().estimate(pb, like).dense(), new.dense(), 0.0)
    assert ng.EigenKronecker().estimate(pb, old).tensors()["0.weight/Q"] is old.basis.left[0]
    for structure in (ng.Dense(), ng.Kronecker(), ng.Diagonal()):
        close(structure.estimate(pb, None).dense(), structure.estimate(pb).dense(), 0.0)


def test_an_estimate_like_another_needs_one_backward_pass() -> None:
    old, _, pb = estimates()
    with counted() as calls:
        ng.EigenKronecker().estimate(pb, old)
    assert calls == [1]
    with counted() as calls:
        ng.EigenKronecker().estimate(pb)
    assert calls == [2]


@contextmanager
def counted() -> Iterator[list[int]]:
    """How many backward passes there are inside."""
    calls, original = [0], torch.autograd.grad

    def grad(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd, "grad", grad)
        yield calls


# Solves


@pytest.mark.parametrize("damping", [1e-3, 0.1, 10.0])
def test_damping_is_exact(damping: float) -> None:
    problem = network("mlp", 5)
    operator = ng.EigenKronecker().estimate(pull(problem, random_roots(problem)))
    v = normal(operator.layout.size)
    close(operator.inverse(damping).solve(v), oracle.damped(operator.dense(), v, damping))


def test_a_layer_without_gradient_has_a_finite_step() -> None:
    """Dead units: its scales are zero, and the damping is what is left."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(-1e3)
    operator = ng.EigenKronecker().estimate(pull(zoo.Problem(model, normal(5, 3)), ng.Euclidean()))
    v = operator.inverse(0.5).solve(torch.ones(operator.layout.size, dtype=torch.float64))
    close(v[:16], torch.full((16,), 2.0, dtype=torch.float64))


def test_eigenvalues_are_sought_in_double_precision_before_giving_up() -> None:
    calls: list[torch.dtype] = []
    original = torch.linalg.eigh

    def fails_once(matrix: Tensor) -> Any:
        calls.append(matrix.dtype)
        if matrix.dtype is torch.float32:
            raise RuntimeError("the algorithm failed to converge")
        return original(matrix)

    A = normal(2, 3, 3).float()
    A = A + A.mT
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.linalg, "eigh", fails_once)
        values, vectors = spectrum(A)
    assert calls == [torch.float32, torch.float64]
    assert values.dtype is vectors.dtype is torch.float32
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, A)


def test_eigenvalues_that_cannot_be_found_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NonFiniteError, match="a factor of size 3 holds NaN or infinity: clean the batch"):
        spectrum(torch.full((1, 3, 3), torch.nan))

    def fails(_: torch.Tensor) -> NoReturn:
        raise RuntimeError

    monkeypatch.setattr(torch.linalg, "eigh", fails)
    with pytest.raises(
        FactorisationError, match=r"eigenvalues of a factor of size 3 cannot be found, in double.*raise"
    ):
        spectrum(torch.eye(3)[None])
