"""Who exports a family, a metric, a structure, a layer rule or a step rule gives it a row in a table of theorems."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.rules import RULES
from tests import oracle, test_product, zoo
from tests.families.members import MEMBERS
from tests.pulled import close, normal, pull

# Layer rules: with each of them G is that of the Jacobian.


def _indices(*shape: int) -> Tensor:
    return torch.arange(torch.Size(shape).numel()).view(shape) * 7 % 5


@dataclass(frozen=True)
class Layer:
    """A module of one rule, between an input and a head that tells its outputs apart."""

    make: Callable[[], nn.Module]
    x: Tensor
    pick: Callable[[object], object] = lambda y: y


class Headed(nn.Module):
    """The layer, tanh, and a fixed linear function of all that an example has."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.layer, self._pick = layer.make(), layer.pick

    def forward(self, x: Tensor) -> Tensor:
        attends = isinstance(self.layer, nn.MultiheadAttention)
        y = self._pick(self.layer(x, x, x, need_weights=False) if attends else self.layer(x))
        assert isinstance(y, Tensor)
        y = torch.tanh(y).flatten(1)
        return y @ torch.linspace(-1, 1, 3 * y.shape[1], dtype=y.dtype).cos().view(y.shape[1], 3)


LAYERS: dict[str, Layer] = {
    "LinearRule": Layer(lambda: nn.Linear(3, 4), normal(5, 2, 3)),
    "EmbeddingRule": Layer(lambda: nn.Embedding(5, 3), _indices(4, 3)),
    "EmbeddingBagRule": Layer(lambda: nn.EmbeddingBag(5, 3, mode="sum"), _indices(4, 3)),
    "LayerNormRule": Layer(lambda: nn.LayerNorm(4), normal(5, 3, 4)),
    "RMSNormRule": Layer(lambda: nn.RMSNorm(4), normal(5, 3, 4)),
    "GroupNormRule": Layer(lambda: nn.GroupNorm(2, 4), normal(3, 4, 5)),
    "BatchNormRule": Layer(lambda: nn.BatchNorm1d(4), normal(5, 4, 3)),
    "InstanceNormRule": Layer(lambda: nn.InstanceNorm1d(4, affine=True), normal(3, 4, 5)),
    "EntriesRule": Layer(lambda: nn.PReLU(3), normal(5, 3, 2)),
    "ConvRule": Layer(lambda: nn.Conv2d(2, 4, (2, 3), padding=1, stride=(2, 1), groups=2), normal(3, 2, 4, 3)),
    "ProductRule": Layer(lambda: nn.ConvTranspose1d(3, 2, 3, stride=2, padding=1), normal(3, 3, 4)),
    "RecurrentRule": Layer(lambda: nn.LSTM(3, 2, batch_first=True), normal(4, 3, 3), lambda y: y[0]),  # type: ignore[index]
    "CellRule": Layer(lambda: nn.GRUCell(3, 4), normal(5, 3)),
    "AttentionRule": Layer(lambda: nn.MultiheadAttention(4, 2, batch_first=True), normal(4, 3, 4), lambda y: y[0]),  # type: ignore[index]
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_has_the_metric_of_its_jacobian(name: str) -> None:
    layer = LAYERS[name]
    problem = zoo.Case(name, lambda: zoo.Problem(Headed(layer).eval(), layer.x)).make()
    pb = pull(problem, ng.Fisher(ng.Poisson()))
    assert name in {type(block.rule).__name__ for block in pb.layers}
    G = oracle.dense(problem.jacobian(), oracle.poisson(problem.outputs()))
    for structure in (ng.Kernel(), ng.Dense()):
        close(structure.estimate(pb).dense(), G)


# Step rules: the first step on ½‖y − t‖² of a linear model, where G is the Hessian of the loss.

LR, Λ, DENSE = 0.3, 0.2, ng.Dense()


@dataclass(frozen=True)
class Quadratic:
    """G, ω and v = (G + λ)⁻¹ω."""

    G: Tensor
    ω: Tensor
    v: Tensor


@dataclass(frozen=True)
class Row:
    """A step rule, and its first step."""

    rule: ng.step.StepRule
    step: Callable[[Quadratic], Tensor]
    structure: ng.structures.Structure = DENSE


def _polar(at: Quadratic) -> Tensor:
    U, _, Vh = torch.linalg.svd(at.ω.view(2, 3), full_matrices=False)
    return -LR * 0.2 * 3**0.5 * (U @ Vh).flatten()


STEPS: dict[str, Row] = {
    "Fixed": Row(ng.Fixed(), lambda at: -LR * at.v),
    "KLClip": Row(ng.KLClip(1e-3), lambda at: -at.v * (1e-3 / (at.ω @ at.v)).sqrt()),
    "Normalised": Row(ng.Normalised(0.2), lambda at: -LR * 0.2 * at.v / at.v.square().mean().sqrt()),
    "Polar": Row(ng.Polar(0.2, "minimax"), _polar, ng.Kronecker(power=0)),
    "GeodesicCorrected": Row(ng.GeodesicCorrected(), lambda at: -LR * at.v),  # a linear model has no curvature
    "TrustRegion": Row(ng.TrustRegion(0.01), lambda at: -at.v * (0.02 / (at.v @ at.G @ at.v)).sqrt()),
    "LevenbergMarquardt": Row(ng.LevenbergMarquardt(), lambda at: -LR * at.v),
    "SelfTuned": Row(ng.SelfTuned(), lambda at: -at.v),  # α is 1 where G is whole
    "Spring": Row(ng.Spring(), lambda at: -LR * at.v),  # there is no last step
    "Armijo": Row(ng.Armijo(), lambda at: -LR * at.v),
    "GridSearch": Row(ng.GridSearch(), lambda at: -LR * at.v),
    "GeodesicSearch": Row(ng.GeodesicSearch(), lambda at: -LR * at.v),
    "Constrained": Row(
        ng.step.Constrained(ng.Fixed(), ng.step.Clipping({"weight": (-0.3, 0.3)})),
        lambda at: (normal(6, seed=3) - LR * at.v).clamp(-0.3, 0.3) - normal(6, seed=3),
    ),
}


@pytest.mark.parametrize("name", STEPS)
def test_the_first_step_on_a_quadratic_is_that_of_the_formula(name: str) -> None:
    row, model = STEPS[name], nn.Linear(3, 2, bias=False).double()
    x, t, θ = normal(7, 3), normal(7, 2, seed=1), normal(6, seed=3)
    model.weight.data.copy_(θ.view(2, 3))
    G = torch.kron(torch.eye(2, dtype=torch.float64), x.T @ x / len(x))
    ω = ((x @ θ.view(2, 3).T - t).T @ x / len(x)).flatten()
    solver = ng.Factored() if isinstance(row.structure, ng.Kronecker) else ng.Cholesky()
    opt = ng.NaturalGradient(
        model, ng.Euclidean(), structure=row.structure, solver=solver, step=row.rule, lr=LR, damping=Λ, momentum=0.0
    )

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(x) - t).square().sum(1).mean()
        loss.backward()
        return loss

    opt.step(closure)
    expected = row.step(Quadratic(G, ω, torch.linalg.solve(G + Λ * torch.eye(6, dtype=G.dtype), ω)))
    close(model.weight.detach().flatten() - θ, expected, 1e-7 if name == "Polar" else 1e-9)


# Every name has its row.

ELSEWHERE: dict[str, str] = {
    "Refresh": "the schedule of a structure: tests/optim/test_refresh.py",
    "Nystrom": "a preconditioner of CG: tests/solve/test_cg.py",
    "BatchGradient": "of gradients, not of outputs: tests/optim/test_batch_gradient.py",
    "Heads": "metrics of several outputs: tests/output/test_heads.py",
    "FubiniStudy": "of wave functions: tests/output/test_fubini_study.py",
    "Backtracking": "a part of TrustRegion: tests/step/test_trust_region.py",
}


def exported(package: ModuleType, base: type) -> set[str]:
    """The concrete subclasses that a package exports."""
    members = vars(package).items()
    return {
        name
        for name, cls in members
        if isinstance(cls, type) and issubclass(cls, base) and not inspect.isabstract(cls) and not name.startswith("_")
    }


def names(rows: Iterable[object]) -> set[str]:
    return {type(row).__name__ for row in rows}


TABLES: dict[str, tuple[set[str], set[str]]] = {
    "families": (
        exported(ng.families, ng.families.ExponentialFamily),
        names(member.family for member in MEMBERS.values()),
    ),
    "metrics": (exported(ng.output, ng.OutputMetric), names(cell.metric for cell in test_product.METRICS.values())),
    "structures": (exported(ng.structures, ng.structures.Structure), names(test_product.STRUCTURES.values())),
    "layer rules": (names(RULES), set(LAYERS)),
    "step rules": (exported(ng.step, ng.step.StepRule), names(row.rule for row in STEPS.values())),
}


@pytest.mark.parametrize("kind", TABLES)
def test_every_public_name_has_a_row(kind: str) -> None:
    public, rows = TABLES[kind]
    missing = sorted(public - rows - ELSEWHERE.keys())
    assert not missing, f"{', '.join(missing)}: no theorem is tested of {kind} without a row in a table"
