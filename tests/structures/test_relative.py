"""Relative damping, λ = ε·(mean eigenvalue) factor by factor, has no units; a factor that is zero has no step."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NonFiniteError, SingularMetricError
from natgrad.solve import Solver
from natgrad.structures import Structure
from tests.oracle import damped_power
from tests.pulled import POWERED, close, covector, normal

SOLVERS = {name: [ng.Cholesky()] for name in POWERED} | {"Kronecker": [ng.Cholesky(), ng.Factored()]}
EPSILON = 0.03


class Times(nn.Module):
    """A number: the units of what comes after it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = number

    def forward(self, x: Tensor) -> Tensor:
        return self.number * x


def network(before: float = 1.0, after: float = 1.0, bias: bool = False) -> nn.Sequential:
    """One function, whatever the units of the inputs and the outputs of its middle layer are."""
    torch.manual_seed(0)
    layers = nn.Linear(3, 4), nn.Linear(4, 4, bias=bias), nn.Linear(4, 2)
    model = nn.Sequential(layers[0], nn.Tanh(), Times(before), layers[1], Times(after), nn.Tanh(), layers[2]).double()
    with torch.no_grad():
        model.get_parameter("3.weight").div_(before * after)
        if bias:
            model.get_parameter("3.bias").div_(after)
    return model


def loss_of(y: Tensor, target: Tensor) -> Tensor:
    """Not a likelihood: its scale is anybody's choice."""
    return (F.softplus(y) + 0.5 * (y - target) ** 2).sum(-1).mean()


def mean_damped(matrix: Tensor, power: float) -> Tensor:
    return damped_power(matrix, EPSILON * float(matrix.trace()) / len(matrix), power)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.75])
@pytest.mark.parametrize("structure", POWERED)
def test_the_damping_is_a_share_of_the_mean_eigenvalue_of_every_part(structure: str, power: float) -> None:
    model = network()
    pb = ng.pullback(model, normal(20, 3), ng.Fisher(ng.Categorical()))
    G = POWERED[structure](power=power).estimate(pb)
    matrix, ω = G.with_power(1.0).dense(), covector(pb)
    sizes = [p.numel() for p in model.parameters()]
    if structure in ("Dense", "LowRank", "Kernel"):
        expected = mean_damped(matrix, power)
    elif structure == "Diagonal":
        pieces = [d + EPSILON * d.mean() for d in matrix.diagonal().split(sizes)]
        expected = torch.cat(pieces).pow(-power).diag()
    else:
        expected = torch.zeros_like(matrix)
        for b, index in enumerate(torch.arange(len(matrix)).split([sizes[0] + sizes[1], sizes[2], sum(sizes[3:])])):
            block = matrix[index[:, None], index]
            if structure == "Kronecker":
                at = G.blocks[b].index
                inverses = (mean_damped(factor[b][0], power) for factor in (G.left, G.right))
                expected[at[:, None], at] = torch.kron(*inverses)
            else:
                expected[index[:, None], index] = mean_damped(block, power)
    for solver in SOLVERS[structure]:
        close(ng.sharp(G, ω, solver, ng.Relative(EPSILON)).flatten(), expected @ ω.flatten(), 1e-9)
    if structure != "Kronecker":  # which damps its factors, not their product
        close(G.logdet(ng.Relative(EPSILON)), -torch.linalg.slogdet(expected).logabsdet, 1e-9)


def test_conjugate_gradients_take_the_mean_eigenvalue_of_the_whole() -> None:
    pb = ng.pullback(network(), normal(20, 3), ng.Fisher(ng.Categorical()))
    ω, exact = covector(pb), ng.CG(tol=1e-13, max_steps=1000)
    expected = ng.sharp(ng.Dense().estimate(pb), ω, damping=ng.Relative(EPSILON)).flatten()
    for structure in (ng.Dense(), ng.Implicit(), ng.Kernel()):
        close(ng.sharp(structure.estimate(pb), ω, exact, ng.Relative(EPSILON)).flatten(), expected, 1e-8)
    with pytest.raises(IncompatibleError, match=r"one number for Relative\(0\.03\) does not work with KroneckerOp"):
        ng.sharp(ng.Kronecker().estimate(pb), ω, exact, ng.Relative(EPSILON))


def step(model: nn.Module, structure: Structure, solver: Solver, scale: float, damping: Any) -> Any:
    """The damped direction of ``scale`` times the loss, in the metric of that loss."""
    x, target = normal(20, 3), normal(20, 2, seed=1)

    def loss(y: Tensor, t: Tensor) -> Tensor:
        return scale * loss_of(y, t)

    metric = ng.Empirical(lambda y, t: len(y) * loss(y, t))
    G = structure.estimate(ng.pullback(model, x, metric, target))
    return ng.sharp(G, ng.differential(model, loss(model(x), target)), solver, damping)


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("structure", POWERED)
def test_scaling_the_loss_leaves_the_direction(structure: str, power: float) -> None:
    """L → cL takes G to c²G and ω to cω, so that v → c^(1−2p) v. With an absolute damping it does not."""
    for solver in SOLVERS[structure]:
        kind, c = POWERED[structure](power=power), 7.0
        v, w = (step(network(), kind, solver, scale, ng.Relative(EPSILON)).flatten() for scale in (1.0, c))
        close(w, c ** (1 - 2 * power) * v, 1e-9)
        v, w = (step(network(), kind, solver, scale, 0.1).flatten() for scale in (1.0, c))
        assert float((w - c ** (1 - 2 * power) * v).norm()) > 0.1 * float(w.norm())


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("structure", ["Diagonal", "BlockDense", "Kronecker", "EigenKronecker"])
@pytest.mark.parametrize("units", [{"before": 5.0}, {"after": 0.2}], ids=["inputs", "outputs"])
def test_the_units_of_a_layer_do_not_matter(units: dict[str, float], structure: str, power: float) -> None:
    """a → ca or g → cg, with W → W/c: the layer has G → c²G and ω → cω, and no other layer notices."""
    (c,) = units.values()
    for solver in SOLVERS[structure]:
        kind = POWERED[structure](power=power)
        v, w = (step(network(**of, bias=False), kind, solver, 1.0, ng.Relative(EPSILON)) for of in ({}, units))
        for name in v:
            factor = c ** (1 - 2 * power) if name == "3.weight" else 1.0
            close(w[name], factor * v[name], 1e-9)


APART: dict[str, Any] = {
    "Diagonal": ng.Diagonal,
    "Kronecker": lambda power: ng.Kronecker(bias="separate", power=power),
    "EigenKronecker": lambda power: ng.EigenKronecker(bias="separate", power=power),
    "diagonals": lambda power: ng.Kronecker(bias="separate", largest=1, power=power),
}


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("structure", APART)
@pytest.mark.parametrize("units", [{"before": 5.0}, {"after": 0.2}], ids=["inputs", "outputs"])
def test_the_units_of_a_layer_with_a_bias_of_its_own_do_not_matter(
    units: dict[str, float], structure: str, power: float
) -> None:
    """Where the bias has its own block: the weight as above; the input 1 of the bias has no units, its g has."""
    (c,) = units.values()
    changed = {"3.weight", "3.bias"} if "after" in units else {"3.weight"}
    for solver in SOLVERS.get(structure, SOLVERS["Kronecker"]):
        kind = APART[structure](power=power)
        v, w = (step(network(**of, bias=True), kind, solver, 1.0, ng.Relative(EPSILON)) for of in ({}, units))
        for name in v:
            factor = c ** (1 - 2 * power) if name in changed else 1.0
            close(w[name], factor * v[name], 1e-9)


@pytest.mark.parametrize("structure", ["BlockDense", "Kronecker", "EigenKronecker"])
def test_beside_a_bias_in_one_block_the_units_of_the_inputs_matter_and_those_of_the_outputs_do_not(
    structure: str,
) -> None:
    """The inputs (ca, 1) have other ratios than (a, 1); (cg)(a, 1)ᵀ is c times as large in all entries."""
    kind, solver, c = POWERED[structure](), SOLVERS[structure][-1], 5.0
    v, inputs, outputs = (
        step(network(**of, bias=True), kind, solver, 1.0, ng.Relative(EPSILON))
        for of in ({}, {"before": c}, {"after": c})
    )
    assert float((c * inputs["3.weight"] - v["3.weight"]).norm()) > 0.01 * float(v["3.weight"].norm())
    for name in v:
        close(outputs[name], v[name] / (c if name.startswith("3.") else 1.0), 1e-9)


@pytest.mark.parametrize("power", [1.0, 0.5, 0.25])
@pytest.mark.parametrize("structure", POWERED)
def test_what_is_zero_has_no_step(structure: str, power: float) -> None:
    """All of the metric, in a layer whose inputs are zero; no NaN, and no 0/0."""
    model = nn.Linear(3, 2, bias=False).double()
    pb = ng.pullback(model, torch.zeros(4, 3, dtype=torch.float64), ng.Euclidean())
    for solver in SOLVERS[structure]:
        v = ng.sharp(POWERED[structure](power=power).estimate(pb), covector(pb), solver, ng.Relative(0.01))
        close(v.flatten(), torch.zeros(6, dtype=torch.float64), 0.0)


@pytest.mark.parametrize("power", [1.0, 0.5])
@pytest.mark.parametrize("structure", ["Diagonal", "BlockDense", "Kronecker", "EigenKronecker"])
def test_a_dead_layer_stands_still_and_the_others_do_not_notice(structure: str, power: float) -> None:
    """Units that never fire have S = 0, and the layer after them A = 0 but for its bias."""
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        model.get_parameter("0.bias").fill_(-100.0)
    pb = ng.pullback(model, normal(10, 3), ng.Euclidean())
    for solver in SOLVERS[structure]:
        v = ng.sharp(POWERED[structure](power=power).estimate(pb), covector(pb), solver, ng.Relative(0.01))
        assert not v["0.weight"].any()
        assert not v["0.bias"].any()
        assert bool(v.flatten().isfinite().all())
        assert bool(v["2.bias"].all())


class Shifted(nn.Module):
    """A layer that moves all logits alike, so that its gradient is rounding, beside weights in the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.shift = nn.Parameter(torch.randn(3, 4)), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Tensor:
        return 3 * torch.atan2(x.unsqueeze(-1), self.w).sum(1) + self.shift(x)  # an operation that no rule knows


LAYERED: dict[str, tuple[Structure, Solver]] = {
    "Kronecker": (ng.Kronecker(), ng.Cholesky()),
    "factored": (ng.Kronecker(), ng.Factored()),
    "root": (ng.Kronecker(power=0.5), ng.Factored()),
    "EigenKronecker": (ng.EigenKronecker(), ng.Cholesky()),
    "BlockDense below": (ng.Kronecker(fallback=ng.BlockDense()), ng.Factored()),
}


@pytest.mark.parametrize("name", LAYERED)
def test_a_layer_that_is_rounding_beside_the_fallback_stands_still(name: str) -> None:
    """In the inverse, in that of an optimizer, which is computed in place, and in an undamped metric, which refuses."""
    structure, solver = LAYERED[name]
    torch.manual_seed(0)
    model, x, t = Shifted().double(), normal(9, 3), torch.arange(9) % 4
    start = {key: p.detach().clone() for key, p in model.named_parameters()}
    G = structure.estimate(ng.pullback(model, x, ng.Empirical(F.cross_entropy), target=t))
    assert 0 < G.tensors()["shift.weight/S"].max() < 1e-30
    ω = ng.differential(model, F.cross_entropy(model(x), t))
    assert 0 < float(ω["shift.weight"].abs().max()) < 1e-15
    v = ng.sharp(G, ω, solver, damping=ng.Relative(EPSILON))
    assert not v["shift.weight"].any()
    assert v["w"].all()
    with pytest.raises(SingularMetricError):
        ng.sharp(G, ω, ng.Cholesky())
    opt = ng.NaturalGradient(
        model, ng.Empirical(F.cross_entropy), structure=structure, solver=solver, lr=0.1, damping=ng.Relative(EPSILON)
    )
    for _ in range(3):
        opt.zero_grad()
        opt.refresh(x, t)
        F.cross_entropy(model(x), t).backward()
        opt.step()
    assert torch.equal(model.shift.weight, start["shift.weight"])
    assert 0.01 < float((model.w.detach() - start["w"]).abs().max()) < 10


class Turned(nn.Module):
    """A weight in the fallback that moves all logits alike, so that its gradient is rounding, beside a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.angle, self.layer = nn.Parameter(torch.randn(3)), nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + torch.atan2(x, self.angle).sum(1, keepdim=True)


@pytest.mark.parametrize("damping", [0.0, ng.Relative(EPSILON)], ids=repr)
@pytest.mark.parametrize("below", [ng.Diagonal(), ng.BlockDense()], ids=repr)
@pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])
@pytest.mark.parametrize("power", [1.0, 0.5])
def test_a_pseudo_inverse_has_nothing_of_a_fallback_that_is_rounding(
    kind: Any, below: Structure, damping: Any, power: float
) -> None:
    """It is zero there, and on the layer what it is without a fallback."""
    torch.manual_seed(0)
    model, x, t = Turned().double(), normal(9, 3), torch.arange(9) % 4
    pb = ng.pullback(model, x, ng.Empirical(F.cross_entropy), target=t)
    G, ω = kind(fallback=below, power=power).estimate(pb), ng.differential(model, F.cross_entropy(model(x), t))
    assert 0 < float(G.fallback.with_power(1.0).diagonal().max()) < 1e-28
    assert 0 < float(ω["angle"].abs().max()) < 1e-14
    v = ng.sharp(G, ω, ng.Pinv(), damping)
    assert not v["angle"].any()
    with pytest.raises(SingularMetricError, match="is singular"):
        G.logdet(damping)
    alone = nn.Sequential(model.layer)
    G = kind(power=power).estimate(ng.pullback(alone, x, ng.Empirical(F.cross_entropy), target=t))
    expected = ng.sharp(G, ng.differential(alone, F.cross_entropy(alone(x), t)), ng.Pinv(), damping)
    close(v["layer.weight"], expected["0.weight"], 1e-9)


OVERFLOWN: dict[str, tuple[Structure, list[Solver]]] = {
    "Diagonal": (ng.Diagonal(), [ng.Cholesky(), ng.Pinv()]),
    "BlockDense": (ng.BlockDense(), [ng.Cholesky(), ng.Pinv()]),
    "BlockDense, root": (ng.BlockDense(power=0.5), [ng.Cholesky(), ng.Pinv()]),
    "Kronecker": (ng.Kronecker(), [ng.Cholesky(), ng.Factored(), ng.Pinv()]),
    "Kronecker, root": (ng.Kronecker(power=0.5), [ng.Cholesky(), ng.Factored(), ng.Pinv()]),
    "EigenKronecker": (ng.EigenKronecker(), [ng.Cholesky(), ng.Pinv()]),
}


@pytest.mark.parametrize("damping", [0.0, 0.1, ng.Relative(EPSILON)], ids=repr)
@pytest.mark.parametrize("name", OVERFLOWN)
def test_a_second_moment_that_overflows_is_refused_by_name(name: str, damping: Any) -> None:
    """In single precision 10²⁵ has no square: no other parameter is rounding beside it, and no step is NaN."""
    structure, solvers = OVERFLOWN[name]
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), torch.randn(6, 3)
    x[0, 0] = 1e25
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
    assert not all(bool(t.isfinite().all()) for t in G.tensors().values())
    ω = ng.Covector({key: torch.ones_like(p) for key, p in model.named_parameters()})
    for solver in solvers:
        with pytest.raises(NonFiniteError, match="holds NaN or infinity"):
            ng.sharp(G, ω, solver, damping)


def test_beside_infinity_nothing_is_rounding() -> None:
    """The mean of large second moments overflows; a parameter with ordinary ones moves as it does alone."""
    layout = ng.operators.Layout.of({"a": torch.ones(2), "b": torch.ones(1)})
    G = ng.operators.DiagonalOperator(layout, torch.tensor([3e38, 3e38, 2.0]))
    v = ng.sharp(G, ng.Covector({"a": torch.ones(2), "b": torch.ones(1)}), damping=ng.Relative(0.5))
    close(v["b"], torch.tensor([1 / 3]), 1e-6)
    assert float(v["a"].abs().max()) < 1e-30


def test_a_determinant_of_zero_is_refused() -> None:
    pb = ng.pullback(nn.Linear(3, 2).double(), torch.zeros(4, 3, dtype=torch.float64), ng.Euclidean())
    with pytest.raises(
        SingularMetricError, match=r"the block weight \+ bias of the metric is singular|diagonal metric"
    ):
        ng.Diagonal().estimate(pb).logdet(ng.Relative(0.01))


# The optimizer.


def trained(opt: Any, model: nn.Module, steps: int, x: Tensor | None = None) -> None:
    x, target = normal(20, 3) if x is None else x, normal(20, 2, seed=1)
    for _ in range(steps):
        opt.zero_grad()
        loss_of(model(x), target).backward()
        opt.step()


@pytest.mark.parametrize("power", [1.0, 0.5, 0.0])
@pytest.mark.parametrize("structure", ["Diagonal", "Dense", "BlockDense", "Kronecker", "EigenKronecker", "LowRank"])
def test_an_optimizer_holds_the_number_and_resumes_exactly(structure: str, power: float) -> None:
    model = network()
    solver = SOLVERS[structure][-1]

    def make(of: nn.Module) -> ng.NaturalGradient:
        schedule = ng.Refresh(POWERED[structure](power=power), every=2, decay=0.9, inverse=3)
        damping = ng.Relative(0.02)
        return ng.NaturalGradient(
            of, ng.Euclidean(), structure=schedule, solver=solver, damping=damping, lr=0.01, momentum=0.9
        )

    opt = make(model)
    trained(opt, model, 4)
    assert opt.param_groups[0]["damping"] == 0.02
    twin = copy.deepcopy(model)
    other = make(twin)
    other.load_state_dict(opt.state_dict())
    trained(opt, model, 5)
    trained(other, twin, 5)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    if power > 0:  # the identity has no damping to speak of
        assert "mean eigenvalue, factor by factor" in str(opt.plan())
        assert "Relative(0.02)" in str(opt.diagnostics())


def test_a_scheduler_may_change_the_number() -> None:
    """As a new optimizer with it would, from the same metric."""
    steps = []
    for damping in (ng.Relative(0.5), ng.Relative(0.1)):
        model = network()
        opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(), damping=damping, lr=0.01)
        opt.param_groups[0]["damping"] = 0.1
        trained(opt, model, 1)
        steps.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(steps[0], steps[1], 0.0)


def test_a_batch_of_zeros_moves_only_what_it_can() -> None:
    """The first layer has A = 0 but for its bias."""
    model = network()
    opt = ng.KFAC(model, ng.Euclidean(), damping=ng.Relative(0.01), lr=0.01)
    before = model.get_parameter("0.weight").detach().clone()
    trained(opt, model, 2, torch.zeros(20, 3, dtype=torch.float64))
    close(model.get_parameter("0.weight").detach(), before, 0.0)
    assert all(bool(p.isfinite().all()) for p in model.parameters())


def test_states_of_absolute_and_relative_damping_are_not_mixed() -> None:
    relative, absolute = (
        ng.NaturalGradient(network(), ng.Euclidean(), damping=damping) for damping in (ng.Relative(0.1), 0.1)
    )
    with pytest.raises(ValueError, match=r"another optimizer: its damping is relative, here it is absolute"):
        absolute.load_state_dict(relative.state_dict())


@pytest.mark.parametrize("epsilon", [0.0, -1.0, float("nan"), float("inf")])
def test_a_share_is_a_positive_number(epsilon: float) -> None:
    with pytest.raises(ValueError, match=r"Relative\(epsilon\) must be positive and finite, got .*give damping=0"):
        ng.Relative(epsilon)


@pytest.mark.parametrize("rule", [ng.LevenbergMarquardt(), ng.SelfTuned()])
def test_rules_that_adapt_the_damping_refuse_a_relative_one(rule: Any) -> None:
    message = rf"{type(rule).__name__} does not work with damping=Relative\(epsilon=0\.1\): it adapts the number λ"
    for step_rule in (rule, ng.Constrained(rule, ng.Clipping({"0.bias": (-1.0, 1.0)}))):
        with pytest.raises(IncompatibleError, match=message if step_rule is rule else "it adapts the number λ"):
            ng.NaturalGradient(network(), ng.Euclidean(), step=step_rule, damping=ng.Relative(0.1))


def test_levenberg_marquardt_refuses_other_powers() -> None:
    model = network()
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Dense(power=0.5), step=ng.LevenbergMarquardt())

    def closure() -> Tensor:
        opt.zero_grad()
        loss = loss_of(model(normal(20, 3)), normal(20, 2, seed=1))
        loss.backward()
        return loss

    with pytest.raises(IncompatibleError, match=r"LevenbergMarquardt at the power 0\.5 does not work with DenseOp"):
        opt.step(closure)


def test_a_group_holds_a_number() -> None:
    model = network()
    groups = [{"params": [model.get_parameter("0.weight")], "damping": ng.Relative(0.1)}]
    with pytest.raises(ValueError, match=r"a parameter group holds the number ε of Relative\(epsilon=0\.1\)"):
        ng.NaturalGradient(model, ng.Euclidean(), groups=groups)


def test_where_one_number_is_needed_a_share_is_refused() -> None:
    frame = ng.functionspace.TangentFrame.of(ng.pullback(network(), normal(5, 3), ng.Euclidean()))
    with pytest.raises(TypeError, match=r"damping must be a number here, got Relative\(epsilon=0\.1\)"):
        ng.functionspace.TangentKernel(frame, ng.Relative(0.1))  # type: ignore[arg-type]


class Beside(nn.Module):
    """A layer, and a parameter without numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.empty = nn.Linear(3, 2), nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) + self.empty.sum()


@pytest.mark.parametrize("damping", [0.1, ng.Relative(0.1)], ids=repr)
@pytest.mark.parametrize("name", SOLVERS)
def test_a_parameter_without_numbers_changes_nothing(name: str, damping: Any) -> None:
    torch.manual_seed(0)
    model, x = Beside().double(), normal(8, 3)
    alone = nn.Sequential(model.layer, nn.Tanh())
    for solver in SOLVERS[name]:
        found = []
        for each, of_layer in ((model, "layer"), (alone, "0")):
            pb = ng.pullback(each, x, ng.Euclidean())
            G = POWERED[name]().estimate(pb)
            v = ng.sharp(G, covector(pb), solver, damping)
            found.append((v[f"{of_layer}.weight"], v[f"{of_layer}.bias"], G.logdet(damping)))
        for one, other in zip(*found, strict=True):
            close(one, other)
