"""A parameter that the outputs do not depend on has a curvature of zero, also where rounding has made it 10⁻³⁶."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import SingularMetricError
from natgrad.structures import Structure
from tests.pulled import close, normal
from tests.structures.test_relative import Times


class Shift(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.b


class Normed(nn.Module):
    """A shift of all positions, which the normalisation over the positions takes away again."""

    def __init__(self, shifted: bool, gained: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.gain = nn.InstanceNorm1d(3, affine=gained).double()
        self.head = nn.Linear(3, 2, bias=False).double()
        self.shift = Shift(3) if shifted else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(torch.tanh(self.gain(self.shift(x).mT)).square().mean(2))
        return y


class Cross(nn.Module):
    """Queries of one sequence look at keys of another: all keys may have any bias."""

    def __init__(self, shifted: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.q, self.v, self.head = nn.Linear(3, 4).double(), nn.Linear(3, 4).double(), nn.Linear(4, 2).double()
        self.k = nn.Linear(3, 4, bias=shifted).double()
        with torch.no_grad():
            self.k.weight.copy_(normal(4, 3, seed=3))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x[:, :2]), self.k(x[:, 2:]), self.v(x[:, 2:])
        y: Tensor = self.head(F.scaled_dot_product_attention(q, k, v).mean(1))
        return y


NULL = {Normed: "shift.b", Cross: "k.bias"}
X = normal(40, 6, 3)


def pulled(model: nn.Module) -> tuple[Any, ng.Covector]:
    loss = F.mse_loss(model(X), normal(40, 2, seed=1))
    return ng.pullback(model, X, ng.Euclidean()), ng.differential(model, loss)


EVERY: dict[str, Callable[[], Structure]] = {
    "Diagonal": ng.Diagonal,
    "root": lambda: ng.Diagonal(power=0.5),
    "Dense": ng.Dense,
    "BlockDense": ng.BlockDense,
    "root of blocks": lambda: ng.BlockDense(power=0.5),
    "LowRank": lambda: ng.LowRank(2),
    "Kronecker": ng.Kronecker,
    "EigenKronecker": ng.EigenKronecker,
}


@pytest.mark.parametrize("structure", EVERY)
def test_without_damping_it_makes_the_metric_singular_and_without_it_the_metric_is_regular(structure: str) -> None:
    for shifted in (False, True):
        pb, ω = pulled(Normed(shifted))
        G = EVERY[structure]().estimate(pb)
        if not shifted:
            assert bool(ng.sharp(G, ω).flatten().isfinite().all())
            assert bool(G.logdet().isfinite())
            continue
        for act in (lambda G=G, ω=ω: ng.sharp(G, ω), lambda G=G: G.logdet()):
            with pytest.raises(SingularMetricError, match="is singular"):
                act()


APART: dict[str, tuple[Structure, Any]] = {
    "Diagonal": (ng.Diagonal(), ng.Cholesky()),
    "Diagonal, power": (ng.Diagonal(power=0.5), ng.Cholesky()),
    "Kronecker": (ng.Kronecker(bias="separate", sharing="reduce"), ng.Factored()),
    "Kronecker, exact": (ng.Kronecker(bias="separate", sharing="reduce"), ng.Cholesky()),
    "Kronecker, power": (ng.Kronecker(bias="separate", sharing="reduce", power=0.5), ng.Factored()),
    "EigenKronecker": (ng.EigenKronecker(bias="separate"), ng.Cholesky()),
}


@pytest.mark.parametrize("model", NULL)
@pytest.mark.parametrize("of", APART)
def test_with_relative_damping_it_stands_still_and_the_others_move_as_without_it(
    of: str, model: Callable[[bool], nn.Module]
) -> None:
    structure, solver = APART[of]
    steps = []
    for shifted in (False, True):
        pb, ω = pulled(model(shifted))
        steps.append(ng.sharp(structure.estimate(pb), ω, solver, ng.Relative(0.03)))
    without, with_it = steps
    assert not with_it[NULL[model]].any()  # type: ignore[index]
    for name, v in without.items():
        close(with_it[name], v, 1e-9)


def test_a_block_of_its_own_stands_still_too() -> None:
    for power in (1.0, 0.5):
        steps = []
        for shifted in (False, True):
            pb, ω = pulled(Normed(shifted))
            G = ng.BlockDense(power=power).estimate(pb)
            steps.append((ng.sharp(G, ω, damping=ng.Relative(0.03)), ng.sharp(G, ω, ng.Pinv())))
        for without, with_it in zip(*steps, strict=True):
            assert not with_it["shift.b"].any()
            for name, v in without.items():
                close(with_it[name], v, 1e-9)


@pytest.mark.parametrize("solver", [ng.Factored(), ng.Cholesky()], ids=repr)
def test_keys_whose_cotangents_are_summed_over_the_positions_have_no_step(solver: Any) -> None:
    """Beside the queries and values of the same layer, which step as their factors say."""
    torch.manual_seed(0)
    attention = nn.MultiheadAttention(4, 2, batch_first=True).double()

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention, self.head = attention, nn.Linear(4, 2).double()

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.head(self.attention(x, x, x, need_weights=False)[0].mean(1))
            return y

    model, x = Outer(), normal(20, 5, 4)
    G = ng.Kronecker(sharing="reduce").estimate(ng.pullback(model, x, ng.Fisher(ng.Categorical())))
    ω = ng.differential(model, F.cross_entropy(model(x), torch.arange(20) % 2))
    v = ng.sharp(G, ω, solver, ng.Relative(0.03))
    at = [block.names[0] for block in G.blocks].index("attention.in_proj_weight")
    S, A, damped = G.left[at], G.right[at], []
    for side in (S, A):
        mean = side.diagonal(dim1=1, dim2=2).mean()
        damped.append(side + 0.03 * mean * torch.eye(side.shape[-1], dtype=side.dtype))
    W = torch.cat([ω["attention.in_proj_weight"], ω["attention.in_proj_bias"][:, None]], 1).view(3, 4, 5)
    expected = torch.linalg.solve(damped[0], W) @ torch.linalg.inv(damped[1])
    expected[1] = 0
    close(v["attention.in_proj_weight"].view(3, 4, 4), expected[..., :4], 1e-9)
    close(v["attention.in_proj_bias"].view(3, 4), expected[..., 4], 1e-9)


def test_what_has_no_factors_is_zero_beside_the_layers_too() -> None:
    """The shift is all that the fallback has, and nothing in there tells that it is rounding."""
    model = Normed(True, gained=False)
    opt = ng.NaturalGradient(
        model, ng.BatchGradient(), structure=ng.Kronecker(), solver=ng.Factored(), damping=ng.Relative(0.1), lr=0.1
    )
    before = model.head.weight.detach().clone()
    for _ in range(3):
        opt.zero_grad()
        F.mse_loss(model(X), normal(40, 2, seed=1)).backward()
        opt.step()
    assert not model.get_parameter("shift.b").any()
    assert float((model.head.weight.detach() - before).abs().max()) > 1e-3


@pytest.mark.parametrize("structure", [ng.Diagonal(), ng.BlockDense(), ng.Kronecker(), ng.EigenKronecker()], ids=repr)
def test_a_small_curvature_is_not_zero(structure: Structure) -> None:
    """At 10⁻²⁰ of the others it is far below p·ε, and steps as it does at the same size."""

    def network(unit: float) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Linear(3, 4, bias=False), nn.Linear(4, 2, bias=False)
        model = nn.Sequential(layers[0], Times(unit), nn.Tanh(), layers[1]).double()
        with torch.no_grad():
            layers[0].weight.div_(unit)
        return model

    x, steps = normal(20, 3), []
    for unit in (1.0, 1e-10):
        model = network(unit)
        G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
        ω = ng.differential(model, model(x).square().sum(1).mean())
        steps.append(ng.sharp(G, ω, damping=ng.Relative(0.03)))
        assert bool(ng.sharp(G, ω, damping=0.0 if isinstance(structure, ng.Diagonal) else 1e-30).flatten().all())
    close(steps[1]["0.weight"] * 1e-10, steps[0]["0.weight"], 1e-9)
    close(steps[1]["3.weight"], steps[0]["3.weight"], 1e-9)


# Step rules.


@pytest.mark.parametrize("structure", [ng.Dense(), ng.BlockDense()], ids=repr)
def test_levenberg_and_marquardt_in_units_leave_it_where_it_is(structure: Structure) -> None:
    model, rule = Cross(True), ng.LevenbergMarquardt(scaled=True)
    opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, step=rule, lr=1.0, damping=0.1)

    def closure() -> Tensor:
        opt.zero_grad()
        loss = 0.5 * (model(X) - normal(40, 2, seed=1)).square().sum(1).mean()
        loss.backward()
        return loss

    start, before = float(opt.step(closure)), model.k.bias.detach().clone()
    for _ in range(4):
        last = float(opt.step(closure))
    assert last < start
    assert float((model.k.bias.detach() - before).abs().max()) < 1e-9


def test_levenberg_and_marquardt_take_the_same_steps_in_every_form_of_the_whole_metric() -> None:
    ends = []
    for structure in (ng.Dense(), ng.Kernel()):
        model = Cross(True)
        opt = ng.NaturalGradient(model, ng.Euclidean(), structure=structure, step=ng.LevenbergMarquardt(), damping=0.1)

        def closure(opt: ng.NaturalGradient = opt, model: nn.Module = model) -> Tensor:
            opt.zero_grad()
            loss = 0.5 * (model(X) - normal(40, 2, seed=1)).square().sum(1).mean()
            loss.backward()
            return loss

        for _ in range(4):
            opt.step(closure)
        ends.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(ends[0], ends[1], 1e-7)


class Context(nn.Module):
    """A matrix whose product with a constant is a shift of all positions."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.context, self.body = nn.Linear(5, 4, bias=False).double(), nn.Linear(3, 4, bias=False).double()
        self.norm, self.head = nn.InstanceNorm1d(4), nn.Linear(4, 2, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x) + self.context(normal(5, seed=7))
        y: Tensor = self.head(torch.tanh(self.norm(h.mT)).square().mean(2))
        return y


@pytest.mark.parametrize("momentum_on", ["steps", "gradients"])
@pytest.mark.parametrize(
    "step",
    [ng.Normalised(), ng.Polar(), ng.Constrained(ng.Normalised(), ng.Clipping({}))],
    ids=["rms", "polar", "take"],
)
def test_a_gradient_of_rounding_is_not_stretched_to_a_whole_step(step: Any, momentum_on: Any) -> None:
    model = Context()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    opt = ng.NaturalGradient(
        model,
        ng.Euclidean(),
        structure=ng.Diagonal(power=0),
        step=step,
        lr=0.1,
        momentum=0.9,
        momentum_on=momentum_on,
    )
    for _ in range(2):
        opt.zero_grad()
        F.mse_loss(model(X), normal(40, 2, seed=1)).backward()
        opt.step()
    grad = model.context.weight.grad
    assert grad is not None
    assert bool(grad.any())  # 10⁻¹⁸, and not zero
    assert torch.equal(model.context.weight, before["context.weight"])
    for name in ("body.weight", "head.weight"):
        assert float((model.get_parameter(name).detach() - before[name]).square().mean().sqrt()) > 0.01
