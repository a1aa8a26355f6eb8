"""Damping of Kronecker products: exactly through the eigenvalues, or factor by factor."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import FactorisationError, IncompatibleError, SingularMetricError
from natgrad.operators import KroneckerOperator
from natgrad.structures import Structure
from tests import oracle, zoo
from tests.golden import agrees, golden, golden_mlp, tensor
from tests.pulled import close, covector, normal, pull, random_roots

MODELS = ["mlp_tanh", "sequence", "conv", "attention", "layer_norm", "tied_weights", "frozen_bias"]
every_model = pytest.mark.parametrize("name", MODELS)
dampings = pytest.mark.parametrize("damping", [1e-4, 0.1, 10.0])


def operator_of(name: str, structure: Structure | None = None) -> tuple[ng.Pullback, KroneckerOperator]:
    """An estimate of a random metric."""
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem))
    operator = (structure or ng.Kronecker()).estimate(pb)
    assert isinstance(operator, KroneckerOperator)
    return pb, operator


def factored_matrix(operator: KroneckerOperator, damping: float) -> Tensor:
    """(S + √λ/π) ⊗ (A + π√λ) in every layer, and G + λ elsewhere, from dense matrices."""
    out = operator.dense() + damping * torch.eye(operator.layout.size, dtype=torch.float64)
    for block, left, right in zip(operator.blocks, operator.left, operator.right, strict=True):
        for at, S, A in zip(block.index.view(block.shape[0], -1), left, right, strict=True):
            pi = math.sqrt(float((A.trace() / len(A)) / (S.trace() / len(S))))
            S = S + math.sqrt(damping) / pi * torch.eye(len(S), dtype=S.dtype)
            A = A + math.sqrt(damping) * pi * torch.eye(len(A), dtype=A.dtype)
            out[at[:, None], at] = torch.kron(S, A)
    return out


# The two ways


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize(("solver", "key"), [(ng.Cholesky(), "exact_kron_damping"), (ng.Factored(), "factored_pi")])
def test_mlp_has_the_golden_steps(layer: int, solver: ng.Cholesky | ng.Factored, key: str) -> None:
    """Damping of the product, and of each factor with the π of Martens and Grosse (2015)."""
    case = golden("mlp.kfac.natgrad")
    model, x, y = golden_mlp()
    operator = ng.Kronecker().estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1))))
    slope = ng.differential(model, nn.functional.cross_entropy(model(x), y))
    v = ng.sharp(operator, slope, solver, case["inputs"]["damping"])
    name = str(2 * (layer - 1))
    got = torch.cat([v[f"{name}.weight"], v[f"{name}.bias"].unsqueeze(1)], dim=1)
    expected = tensor(case["expected"][f"layer{layer}"][key])
    torch.testing.assert_close(got, expected, rtol=case["rtol"], atol=case["atol"])


def test_mlp_has_the_golden_undamped_step_and_balance() -> None:
    """The factors of the first layer are regular; the logits make the second one singular."""
    case = golden("mlp.kfac.natgrad")
    model, x, y = golden_mlp()
    for p in model[2].parameters():
        p.requires_grad_(False)
    operator = ng.Kronecker().estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical(axis=-1))))
    slope = ng.differential(model, nn.functional.cross_entropy(model(x), y))
    for solver in (ng.Cholesky(), ng.Factored(), ng.Pinv()):
        v = ng.sharp(operator, slope, solver)
        agrees(case, torch.cat([v["0.weight"], v["0.bias"].unsqueeze(1)], dim=1), "layer1_undamped")
    means = [side[0].diagonal(dim1=-2, dim2=-1).mean() for side in (operator.right, operator.left)]
    assert float((means[0] / means[1]).sqrt()) == pytest.approx(case["expected"]["layer1"]["pi"], rel=1e-10)


@dampings
@every_model
def test_cholesky_damps_the_product_by_exactly_lambda(name: str, damping: float) -> None:
    pb, operator = operator_of(name)
    w = covector(pb)
    close(
        ng.sharp(operator, w, ng.Cholesky(), damping).flatten(), oracle.damped(operator.dense(), w.flatten(), damping)
    )


@dampings
@every_model
def test_factored_damps_each_factor(name: str, damping: float) -> None:
    pb, operator = operator_of(name)
    w = covector(pb)
    expected = torch.linalg.solve(factored_matrix(operator, damping), w.flatten())
    close(ng.sharp(operator, w, ng.Factored(), damping).flatten(), expected)


@dampings
@every_model
def test_factored_damps_more_than_lambda(name: str, damping: float) -> None:
    """The cross terms √λ(π S ⊗ 1 + 1 ⊗ A/π) are positive: the step is shorter in the metric."""
    _, operator = operator_of(name)
    extra = factored_matrix(operator, damping) - operator.dense() - damping * torch.eye(operator.layout.size)
    assert float(torch.linalg.eigvalsh(extra)[0]) > -1e-10 * float(extra.norm())


@pytest.mark.parametrize("name", ["mlp_tanh", "sequence"])
def test_without_damping_both_are_the_inverse(name: str) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, 12))
    operator = ng.Kronecker().estimate(pb)
    w = covector(pb)
    expected = torch.linalg.solve(operator.dense(), w.flatten())
    for solver in (ng.Cholesky(), ng.Factored()):
        close(ng.sharp(operator, w, solver).flatten(), expected, 1e-8)


@dampings
def test_large_factors_are_damped_along_their_diagonal(damping: float) -> None:
    pb, operator = operator_of("mlp_tanh", ng.Kronecker(largest=3))
    w = covector(pb)
    close(
        ng.sharp(operator, w, ng.Cholesky(), damping).flatten(), oracle.damped(operator.dense(), w.flatten(), damping)
    )
    sides = ([f if f.ndim == 3 else torch.diag_embed(f) for f in side] for side in (operator.left, operator.right))
    left, right = map(tuple, sides)
    whole = KroneckerOperator(operator.layout, operator.blocks, left, right)
    expected = ng.sharp(whole, w, ng.Factored(), damping).flatten()
    close(ng.sharp(operator, w, ng.Factored(), damping).flatten(), expected)


@every_model
def test_layers_of_one_shape_are_solved_together_and_as_if_alone(name: str) -> None:
    """``sharp`` works on named tensors and stacks of layers, ``solve`` on flattened ones."""
    pb, operator = operator_of(name)
    w = covector(pb)
    for inverse in (operator.inverse(0.1), operator.factored_inverse(0.1, {})):
        close(inverse.sharp(w).flatten(), inverse.solve(w.flatten()), 1e-13)


# Singular, dead and indefinite


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Factored()], ids=repr)
def test_a_singular_factor_is_named(solver: ng.Cholesky | ng.Factored) -> None:
    problem = zoo.case("mlp_tanh").make()
    pb = pull(problem, ng.Fisher(ng.Categorical(axis=-1)))
    message = r"the factor S of 2.weight \+ 2.bias is singular at damping 0: rank 2 of 3.*Add damping"
    with pytest.raises(SingularMetricError, match=message):
        ng.sharp(ng.Kronecker().estimate(pb), covector(pb), solver)
    few = zoo.Problem(problem.model, normal(2, 3))
    pb = pull(few, random_roots(few, 9))
    with pytest.raises(SingularMetricError, match=r"the factor A of 0.weight \+ 0.bias is singular at damping 0"):
        ng.sharp(ng.Kronecker().estimate(pb), covector(pb), solver)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.Kronecker("reduce"), ng.Kronecker(largest=2)], ids=repr)
@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.Factored(), ng.Pinv(), ng.CG()], ids=repr)
def test_a_layer_without_gradient_has_a_finite_step(solver: Any, structure: Structure) -> None:
    """Dead units: S = 0, so π has no value and is 1, and (G + λ)⁻¹ is 1/λ."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(-1e3)
    pb = pull(zoo.Problem(model, normal(5, 3)), ng.Euclidean())
    operator = structure.estimate(pb)
    assert isinstance(operator, KroneckerOperator)
    assert float(operator.left[0].norm()) == 0
    v = ng.sharp(operator, covector(pb), solver, damping=0.5).flatten()
    assert bool(v.isfinite().all())
    if not isinstance(solver, ng.Factored):
        close(v[:16], 2 * covector(pb).flatten()[:16])


def test_a_factor_that_is_not_positive_is_refused() -> None:
    """A factor made negative by hand: no metric of outputs gives one."""
    pb, operator = operator_of("mlp_tanh")
    spoiled = KroneckerOperator(operator.layout, operator.blocks, tuple(-s for s in operator.left), operator.right)
    said = r"the factor S of 0\.weight \+ 0\.bias is not positive after damping, in double precision neither: raise the"
    with pytest.raises(SingularMetricError, match=said):
        ng.sharp(spoiled, covector(pb), ng.Factored(), damping=1e-3)
    with pytest.raises(SingularMetricError, match=r"is indefinite at damping 0"):
        ng.sharp(spoiled, covector(pb), ng.Cholesky())
    with pytest.raises(SingularMetricError, match=r"the metric is indefinite at damping 0.001"):
        ng.sharp(spoiled, covector(pb), ng.Pinv(), damping=1e-3)


def test_a_factor_that_cannot_be_inverted_is_named_and_the_last_inverse_is_as_it_was() -> None:
    _, operator = operator_of("mlp_tanh")
    last = operator.factored_inverse(0.1, {})
    before = {key: t.clone() for key, t in last.tensors().items()}
    spoiled = KroneckerOperator(
        operator.layout, operator.blocks, (-operator.left[0], operator.left[1]), operator.right, operator.fallback
    )
    with pytest.raises(FactorisationError, match=r"the factor S of 0\.weight \+ 0\.bias is not positive after damping"):
        spoiled.factored_inverse(0.1, last.tensors())
    assert all(torch.equal(t, before[key]) for key, t in last.tensors().items())


@pytest.mark.parametrize("damping", [-0.1, math.nan, math.inf])
def test_damping_that_is_no_damping_is_refused(damping: float) -> None:
    pb, operator = operator_of("mlp_tanh")
    for solver in (ng.Factored(), ng.Cholesky()):
        with pytest.raises(ValueError, match="damping must be a finite number ≥ 0, got"):
            ng.sharp(operator, covector(pb), solver, damping)


@pytest.mark.parametrize(
    "structure",
    [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(3), ng.Kernel(), ng.EigenKronecker()],
    ids=repr,
)
def test_factored_is_refused_by_the_name_of_a_structure_without_factors(structure: Structure) -> None:
    pb = pull(zoo.case("mlp_tanh").make(), ng.Euclidean())
    name = type(structure).__name__
    with pytest.raises(IncompatibleError, match=rf"Factored does not work with {name}Operator: .*Cholesky"):
        ng.sharp(structure.estimate(pb), covector(pb), ng.Factored(), damping=0.1)
