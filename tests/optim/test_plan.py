"""The plan: what is going to become of every parameter, and the memory for it, before a forward pass is run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.optim.report import Plan
from tests.pulled import normal
from tests.zoo import case, opaque

FISHER = ng.Fisher(ng.Categorical(axis=-1), samples=1)


class Mixed(nn.Module):
    """One of everything: an embedding, a grouped convolution, a norm, a layer, and a matrix that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 8)
        self.conv = nn.Conv1d(8, 6, 3, groups=2)
        self.norm = nn.LayerNorm(6)
        self.mix = nn.Parameter(torch.randn(5, 6))
        self.head = nn.Linear(5, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        """Tokens [n t] to logits [n 4]."""
        h = self.conv(self.table(tokens).mT).mean(-1)
        return self.head(torch.tanh(opaque(self.norm(h), self.mix)))


def numbers(plan: Plan) -> dict[str, tuple[Any, ...]]:
    """Rule, structure, shape and factors by the first parameter."""
    return {row.names[0]: (row.rule, row.structure, row.shape, dict(row.factors)) for row in plan.rows}


def test_every_parameter_is_in_one_row_with_its_rule_its_packed_shape_and_its_factors() -> None:
    model = Mixed()
    opt = ng.KFAC(model, FISHER)
    plan = opt.plan()
    assert sorted(name for row in plan.rows for name in row.names) == sorted(dict(model.named_parameters()))
    before = numbers(plan)
    model(torch.randint(50, (8, 7))).square().sum().backward()
    opt.step()
    after = {"mix": (None, "Diagonal (fallback)", (1, 30, 1), {"G": (1, 30)})}
    assert numbers(opt.plan()) == before | after
    assert before == {
        "mix": (None, "found at the first pass", (1, 30, 1), {}),
        "table.weight": ("Embedding", "Kronecker", (1, 8, 50), {"S": (1, 8, 8), "A": (1, 50)}),
        "conv.weight": ("Conv", "Kronecker", (2, 3, 13), {"S": (2, 3, 3), "A": (2, 13, 13)}),
        "norm.weight": ("LayerNorm", "Kronecker", (6, 1, 2), {"S": (6, 1, 1), "A": (6, 2, 2)}),
        "head.weight": ("Linear", "Kronecker", (1, 4, 6), {"S": (1, 4, 4), "A": (1, 6, 6)}),
    }


def test_the_bytes_of_the_plan_are_those_of_the_metric_and_its_inverse_after_a_step() -> None:
    presets: list[Callable[..., ng.NaturalGradient]] = [ng.KFAC, ng.EKFAC]
    for preset in presets:
        for options in ({}, {"solver": ng.Cholesky()}):
            model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
            opt = preset(model, FISHER, **options)
            planned = opt.plan().bytes
            model(torch.randn(8, 5)).square().sum().backward()
            opt.step()
            assert opt.tracker.average is not None
            assert opt.preconditioner.inverse is not None
            kept = {
                **opt.tracker.average.tensors(),
                **{f"inverse {k}": t for k, t in opt.preconditioner.inverse.tensors().items()},
            }
            # The inverse of EK-FAC is in the same eigenvectors: they are there once.
            storage = {t.data_ptr(): t.numel() * t.element_size() for t in kept.values()}
            assert planned == sum(storage.values())


@pytest.mark.parametrize("power", [0.5, 0.75])
def test_the_bytes_of_a_power_are_those_of_the_metric_and_its_inverse(power: float) -> None:
    model, metric = nn.Linear(9, 4, bias=False), ng.BatchGradient()
    structure = ng.Refresh(ng.Kronecker(power=power), decay=0.9)
    opt = ng.NaturalGradient(model, metric, structure=structure, solver=ng.Factored(), damping=ng.Relative(0.1))
    plan = opt.plan()
    model(torch.randn(8, 9)).square().sum().backward()
    opt.step()
    assert opt.tracker.average is not None
    assert opt.preconditioner.inverse is not None
    tensors = [*opt.tracker.average.tensors().values(), *opt.preconditioner.inverse.tensors().values()]
    assert plan.bytes == sum({t.data_ptr(): t.nbytes for t in tensors}.values())


def test_a_factor_with_too_many_rows_is_listed_and_is_diagonal() -> None:
    model = nn.Sequential(nn.Linear(9, 4), nn.Tanh(), nn.Linear(4, 3))
    opt = ng.NaturalGradient(model, FISHER, structure=ng.Kronecker(largest=6), solver=ng.Factored())
    plan = opt.plan()
    assert plan.diagonals == ("A of 0.weight + 0.bias",)
    assert "only the diagonal is kept of A of 0.weight + 0.bias" in str(plan)
    model(torch.randn(8, 9)).square().sum().backward()
    opt.step()
    assert opt.tracker.average is not None
    shapes = {key: tuple(t.shape) for key, t in opt.tracker.average.tensors().items()}
    rows = {f"{row.names[0]}/{letter}": shape for row in plan.rows for letter, shape in row.factors.items()}
    assert shapes == rows


def test_the_table_says_what_no_rule_covers_and_what_becomes_of_it() -> None:
    plan = ng.KFAC(Mixed(), FISHER, fallback=ng.BlockDense()).plan()
    assert plan.uncovered == ("mix",)
    text = str(plan)
    assert "the rule of mix is found at the first pass, from the operations that use them; if there is none, " in text
    assert "the memory is known after the first pass" in text
    assert "fallback" not in text
    assert "their rows come from torch.func, which is slow, and their metric is BlockDense()" in text


def test_after_a_pass_the_plan_knows_what_the_pass_has_shown() -> None:
    class Outside(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner, self.outer, self.scale = nn.Linear(3, 3), nn.Linear(3, 2), nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            h = self.inner(x) + nn.functional.linear(x, self.inner.weight)  # past the module's forward
            return self.outer(torch.tanh(h) * self.scale)

    model = Outside()
    opt = ng.KFAC(model, FISHER)
    assert {row.names[0]: row.rule for row in opt.plan().rows} == {
        "scale": None,
        "inner.weight": "Linear",
        "outer.weight": "Linear",
    }
    model(torch.randn(8, 3)).square().sum().backward()
    opt.step()
    assert {row.names[0]: row.rule for row in opt.plan().rows} == {
        "scale": "Entries",
        "inner.weight": "Product",
        "outer.weight": "Linear",
    }


def test_parameters_of_one_module_that_a_pass_takes_apart_have_rows_of_their_own() -> None:
    problem = case("bare_parameter").make()
    opt = ng.KFAC(problem.module, ng.Euclidean())
    assert [(row.names, row.rule) for row in opt.plan().rows] == [(("scale", "mix"), None)]
    problem.outputs().square().sum().backward()
    opt.step()
    assert [(row.names, row.rule) for row in opt.plan().rows] == [(("scale",), "Entries"), (("mix",), "Product")]
    assert [layer.names for layer in opt.diagnostics().layers] == [("scale",), ("mix",)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "λ = 0.01, factored, (S + √λ/π) ⊗ (A + π√λ) in place of G + λ·1"),
        ({"solver": ng.Cholesky()}, "λ = 0.01, exact, (G + λ·1)⁻¹"),
        ({"solver": ng.Pinv()}, "exact, (G + λ·1)⁺"),
        ({"solver": ng.CG()}, "solved by conjugate gradients"),
        ({}, "1 the identity in the coordinates of the parameters"),
        ({}, "momentum 0.9 in the space of vectors"),
        ({}, "averaged with decay 0.95, inverted every 100 steps and at first in the steps 1, 2, 4, …"),
        ({"early": False}, "estimated every 10 steps, averaged with decay 0.95, inverted every 100 steps\n"),
        ({"metric_every": 1, "inverse_every": 1, "decay": 0.0}, "estimated every step, inverted when it has changed"),
        ({"weight_decay": 0.1}, "weight decay 0.1 (decoupled)"),
        (
            {"step": ng.SelfTuned()},
            "which needs opt.step(closure); it chooses learning rate, momentum and damping, weight",
        ),
        ({"step": ng.SelfTuned(), "weight_decay": 0.1}, "; lr 0.1 is of the decay, weight decay 0.1 (decoupled)"),
        ({}, "metric: Fisher(family=Categorical(axis=-1), samples=1"),
    ],
)
def test_the_notes_say_how_it_is_damped_moved_and_scheduled(options: dict[str, Any], said: str) -> None:
    assert said in str(ng.KFAC(nn.Linear(3, 2), FISHER, **options).plan())


@pytest.mark.parametrize(
    ("structure", "solver", "elements"),
    [
        (ng.Dense(), ng.Cholesky(), 2 * 21**2),
        (ng.Dense(), ng.CG(), 21**2),
        (ng.Diagonal(), ng.Cholesky(), 2 * 21),
        (ng.BlockDense(), ng.Cholesky(), 2 * (12**2 + 6**2 + 3**2)),
        (ng.LowRank(2), ng.Cholesky(), 2 * 3 * 21 + 2 + 2**2),
        (ng.Kernel(), ng.Cholesky(), None),
        (ng.Implicit(), ng.CG(), None),
    ],
)
def test_every_structure_has_a_plan(structure: Any, solver: Any, elements: int | None) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2, bias=False), nn.Linear(2, 1)).double()
    plan = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, solver=solver).plan()
    assert sum(row.size for row in plan.rows) == 21
    assert plan.bytes == (None if elements is None else 8 * elements)
    text = str(plan)
    assert "21 parameters" in text
    assert ("depends on the batch" in text) == (elements is None)


@pytest.mark.parametrize("solver", [ng.Cholesky(), ng.CG()], ids=["cholesky", "cg"])
@pytest.mark.parametrize(
    "structure", [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(3), ng.LowRank(3, power=0.5)], ids=repr
)
def test_the_bytes_of_a_plan_are_those_of_the_metric_and_its_inverse_after_a_step(structure: Any, solver: Any) -> None:
    """CG has no inverse; its last solution is not counted."""
    if structure.power != 1 and solver.iterative:
        return
    model, x = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 2)).double(), normal(9, 3)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, solver=solver, damping=0.1)
    planned = opt.plan().bytes
    model(x).square().sum().backward()
    opt.step()
    state = opt.tracker.average, opt.preconditioner.inverse
    named = [pair for part in state if part is not None for pair in part.tensors().items()]
    distinct = {t.data_ptr(): t.numel() * t.element_size() for name, t in named if name != "guess"}
    assert planned == opt.plan().bytes == sum(distinct.values())


def test_a_plan_runs_nothing_and_draws_nothing() -> None:
    class Never(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError

    model = nn.Sequential(Never(3, 2), nn.Linear(2, 2))
    before = torch.random.get_rng_state()
    ng.KFAC(model, FISHER).plan()
    assert torch.equal(torch.random.get_rng_state(), before)


def test_strict_refuses_by_name_at_the_first_pass_what_no_rule_covers() -> None:
    model = Mixed()
    opt = ng.KFAC(model, FISHER, strict=True)  # held: one that is forgotten looks at nothing
    with pytest.raises(ng.errors.UncoveredError, match=r"no layer rule covers mix, and strict=True.*rules=\[…\]"):
        model(torch.randint(50, (4, 7)))
    assert opt.last is None
