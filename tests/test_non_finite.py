"""NaN and infinity inside a model or its metric: named, and never stepped along."""

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import NonFiniteError
from tests.optim.tasks import task


class _Switch(nn.Module):
    """A layer that can break."""

    broken = False

    def forward(self, x: Tensor) -> Tensor:
        return x / 0 if self.broken else x


def test_the_first_layer_whose_output_is_not_finite_is_named_with_the_step() -> None:
    switch = _Switch()
    of = task()
    model = nn.Sequential(of.model.get_submodule("0"), switch, nn.Tanh(), nn.Sequential(nn.Identity(), _Switch()))
    opt = ng.NaturalGradient(model, ng.Euclidean(), damping=0.1)
    model(of.x).sum().backward()
    opt.step()
    model.get_submodule("3.1").broken = True  # type: ignore[assignment]
    with pytest.raises(NonFiniteError, match=r"at step 1: .*first layer with NaN or infinity is 3.1 \(_Switch\)"):
        model(of.x)
    model.get_submodule("3.1").broken = False  # type: ignore[assignment]
    model(of.x).sum().backward()
    opt.step()


STRUCTURES: dict[str, tuple[ng.structures.Structure, ng.solve.Solver]] = {
    "dense": (ng.Dense(), ng.Cholesky()),
    "dense_pinv": (ng.Dense(), ng.Pinv()),
    "dense_cg": (ng.Dense(), ng.CG()),
    "block_dense": (ng.BlockDense(), ng.Cholesky()),
    "diagonal": (ng.Diagonal(), ng.Cholesky()),
    "diagonal_pinv": (ng.Diagonal(), ng.Pinv()),
    "low_rank": (ng.LowRank(3), ng.Cholesky()),
    "kernel": (ng.Kernel(), ng.Cholesky()),
    "kernel_pinv": (ng.Kernel(), ng.Pinv()),
    "implicit": (ng.Implicit(), ng.CG()),
}


@pytest.mark.parametrize("name", STRUCTURES)
def test_a_metric_that_is_not_finite_is_refused_by_every_structure(name: str) -> None:
    """An infinite input behind a tanh: the outputs and the gradients given here are finite, the metric is not."""
    structure, solver = STRUCTURES[name]
    of = task()
    opt = of.optimizer(structure=structure, solver=solver, damping=0.1)
    of.step(opt)
    for p in of.model.parameters():
        p.grad = torch.ones_like(p)
    before = of.theta()

    def attempt() -> None:
        x = of.x.clone()
        x[3, 0] = float("inf")
        of.model(x)
        opt.step()

    with pytest.raises(NonFiniteError, match="NaN or infinity"):
        attempt()
    assert torch.equal(of.theta(), before)
    of.step(opt)
    assert bool(of.theta().isfinite().all())


def test_logits_of_minus_infinity_are_to_be_masked() -> None:
    model = nn.Linear(2, 3).double()
    model.register_forward_hook(lambda _m, _x, y: y.masked_fill(torch.tensor([False, False, True]), -torch.inf))
    with pytest.raises(NonFiniteError, match=r"If −inf excludes a class, .* Fisher\(Masked\(Categorical\(\)\)\)"):
        ng.pullback(model, torch.ones(3, 2, dtype=torch.float64), ng.Fisher(ng.Categorical()))


def test_a_metric_that_is_not_finite_at_the_outputs_is_named() -> None:
    model = nn.Linear(2, 1).double()
    model.bias.data.fill_(800.0)  # e^800
    opt = ng.NaturalGradient(model, ng.Fisher(ng.Poisson()))
    with pytest.raises(NonFiniteError, match=r"at step 0: Fisher\(family=Poisson.*is not finite at the outputs"):
        model(torch.ones(3, 2, dtype=torch.float64))
    assert opt.tracker.step == 0


def _normal(y: Tensor) -> torch.distributions.Distribution:
    return torch.distributions.Normal(y[..., 0], y[..., 1].exp())


OVERFLOWS: dict[str, tuple[ng.OutputMetric, Tensor | None, float]] = {
    "Bregman": (ng.Bregman(lambda y: y.exp().sum()), None, 800.0),
    "Divergence": (ng.Divergence(lambda y, y0: ((y0.exp() * (y - y0)).square()).sum()), None, 800.0),
    "LossHessian": (ng.LossHessian(lambda y, t: (y - t).exp().sum()), torch.zeros(5, 4, dtype=torch.float64), 800.0),
    "Fisher of a distribution": (ng.Fisher(_normal), None, -400.0),
}


@pytest.mark.parametrize("structure", [ng.Dense(), ng.LowRank(2), ng.Kernel(), ng.Kronecker()], ids=repr)
@pytest.mark.parametrize("name", OVERFLOWS)
def test_the_example_whose_hessian_overflows_is_named(name: str, structure: ng.structures.Structure) -> None:
    """Whatever LAPACK makes of it: NaN, finite numbers or an error, according to the number of outputs."""
    metric, target, large = OVERFLOWS[name]
    torch.manual_seed(0)
    model, x = nn.Linear(2, 4).double(), torch.randn(5, 2, dtype=torch.float64)
    model.register_forward_hook(lambda _m, _x, y: y + large * torch.eye(5, dtype=torch.float64)[:, 3:4])
    with pytest.raises(NonFiniteError, match="at the outputs of example 3 holds NaN or infinity: the outputs are too"):
        structure.estimate(ng.pullback(model, x, metric, target=target))


def test_a_loss_by_number_whose_hessian_overflows_is_named() -> None:
    class Exponential(nn.Module):
        def forward(self, y: Tensor, t: Tensor) -> Tensor:
            return (y - t).exp().sum(1).mean()

    torch.manual_seed(0)
    model, x = nn.Linear(2, 3).double(), torch.randn(5, 2, dtype=torch.float64)
    model.bias.data.fill_(800.0)
    with pytest.raises(NonFiniteError, match=r"the Hessian of Exponential.* at the outputs holds NaN or infinity"):
        ng.Dense().estimate(ng.pullback(model, x, Exponential(), target=torch.zeros(5, 3, dtype=torch.float64)))


@pytest.mark.parametrize("d", [1, 2, 3, 5, 40])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_no_spectrum_is_made_of_numbers_that_are_not_finite(d: int, bad: float) -> None:
    matrix = torch.eye(d, dtype=torch.float64)
    matrix[0, 0] = bad
    layout = ng.operators.Layout.of({"w": matrix[0]})
    with pytest.raises(NonFiniteError, match="the metric holds NaN or infinity"):
        ng.operators.DenseOperator(layout, matrix).eigenvalues()
