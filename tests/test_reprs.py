"""Every public object fits into a cell of a notebook: ``repr`` has at most ten lines, and no numbers of a tensor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import natgrad as ng
from natgrad.data import load_digits

N, SEED = 40, 0
(X, T), _ = load_digits()
X, T = X[:N], T[:N]


@cache
def model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(SEED)
        return nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 10))


@cache
def pulled() -> ng.Pullback:
    pb = ng.pullback(model(), X, ng.Fisher(ng.Categorical()))
    assert isinstance(pb, ng.Pullback)
    return pb


@cache
def frame() -> Any:
    double = nn.Sequential(nn.Linear(64, 2)).double()
    return ng.functionspace.TangentFrame.of(ng.pullback(double, X.double(), ng.Euclidean()))


def differential() -> ng.Covector:
    return ng.differential(model(), F.cross_entropy(model()(X), T))


def trained() -> torch.optim.Optimizer:
    net = copy.deepcopy(model())
    opt = ng.KFAC(net, nn.CrossEntropyLoss())
    F.cross_entropy(net(X), T).backward()
    opt.step()
    return opt


def curve() -> Any:
    t = torch.linspace(0, 4, 30).double()
    return ng.curve_fit(lambda t, a, b: a * torch.exp(-b * t), t, 3 * torch.exp(-0.7 * t) + 0.01 * torch.sin(9 * t))


def problem() -> ng.LeastSquares:
    return ng.LeastSquares(ng.Residuals(lambda net, x: net(x) - 1, X), nn.Linear(64, 2))


def descent() -> Any:
    metric = ng.mirror.MatrixMetric(lambda x: torch.eye(20))
    return ng.mirror.PrimalDescent(metric, lipschitz=1.0).run(lambda x: x.square().sum() / 2, torch.ones(20), steps=3)


def certificate() -> Any:
    net = nn.Linear(2, 2).double()
    batch = torch.randn(9, 2).double(), torch.randn(9, 2).double()
    return ng.invariance.certify(lambda m: torch.optim.SGD(m.parameters(), lr=0.1), net, batch, steps=2)


GAMMA = ng.families.Gamma()
POINTS = torch.linspace(0, 1, 30)[:, None]
OBJECTS: dict[str, Callable[[], Any]] = {
    "Pullback": pulled,
    "LoaderPullback": lambda: ng.pullback(
        model(), DataLoader(TensorDataset(X), batch_size=10), ng.Fisher(ng.Categorical())
    ),
    "Block": lambda: pulled().layers[0],
    "ExampleGrads": lambda: next(iter(pulled().factors()))[0],
    "DenseOperator": lambda: ng.Dense().estimate(pulled()),
    "BlockDenseOperator": lambda: ng.BlockDense().estimate(pulled()),
    "DiagonalOperator": lambda: ng.Diagonal().estimate(pulled()),
    "KroneckerOperator": lambda: ng.Kronecker().estimate(pulled()),
    "EigenKroneckerOperator": lambda: ng.EigenKronecker().estimate(pulled()),
    "LowRankOperator": lambda: ng.LowRank(3).estimate(pulled()),
    "KernelOperator": lambda: ng.Kernel().estimate(pulled()),
    "ImplicitOperator": lambda: ng.Implicit().estimate(pulled()),
    "HessianOperator": lambda: ng.hessian(model(), X, lambda y: F.cross_entropy(y, T)),
    "Layout": lambda: ng.Diagonal().estimate(pulled()).layout,
    "an inverse": lambda: ng.Cholesky().init(ng.Kronecker().estimate(pulled()), damping=1e-2),
    "another inverse": lambda: ng.CG().init(ng.Implicit().estimate(pulled()), damping=1e-2),
    "Covector": differential,
    "Vector": lambda: ng.sharp(ng.Kronecker().estimate(pulled()), differential(), damping=1e-2),
    "Jacobian": lambda: ng.jacobian(model(), X),
    "Diagnosis": lambda: ng.diagnose(pulled()),
    "SpectralDensity": lambda: ng.spectral_density(pulled()),
    "NaturalGradient": trained,
    "Natural": lambda: ng.Natural(model()),
    "Plan": lambda: trained().plan(),  # type: ignore[attr-defined]
    "GradientPlan": lambda: ng.Natural(model()).plan(),
    "Diagnostics": lambda: trained().diagnostics(),  # type: ignore[attr-defined]
    "step.Step": lambda: trained().last,  # type: ignore[attr-defined]
    "CurveFit": curve,
    "FitResult": lambda: curve().fit,
    "LeastSquares": problem,
    "Residuals": lambda: ng.Residuals(lambda net, x: net(x), X),
    "FitResult of a network": lambda: problem().solve(max_steps=2),
    "Derivatives": lambda: ng.pde.derivatives(lambda x: x.square().sum(-1), torch.rand(50, 3)),
    "Laplace": lambda: ng.vi.Laplace(model(), X, ng.Fisher(ng.Categorical()), ng.Kronecker()),
    "Predictive": lambda: ng.vi.Laplace(model(), X, ng.Fisher(ng.Categorical()), ng.Kronecker()).predictive(X),
    "VariationalNetwork": lambda: ng.vi.VariationalNetwork(
        nn.Linear(64, 10), ng.Fisher(ng.Categorical()), ng.Kronecker(), ng.vi.Prior(precision=1.0, examples=N)
    ),
    "Posterior": lambda: ng.vi.Posterior(GAMMA, prior=torch.tensor([0.0, -1.0]), sites=torch.tensor([1.0, -1.0])),
    "Fit": lambda: ng.vi.fit(
        ng.vi.Posterior(GAMMA, prior=torch.tensor([0.0, -1.0])), torch.tensor([1.0, -2.0]), steps=3
    ),
    "SparseGP": lambda: ng.vi.SparseGP(ng.vi.SquaredExponential(0.3), ng.vi.BernoulliLogit(), inducing=POINTS),
    "Member": lambda: ng.mirror.Member(GAMMA, torch.tensor([0.0, -1.0]).expand(40, 2)),
    "Online": lambda: ng.mirror.Online.of(ng.Poisson(), torch.ones(5, 30)),
    "Trace": descent,
    "Box": lambda: ng.mirror.Box(torch.zeros(40), torch.ones(40)),
    "Quadratic": lambda: ng.mirror.Quadratic.of(torch.eye(20)),
    "Information": lambda: GAMMA.fisher(torch.tensor([0.0, -1.0]).expand(40, 2)),
    "GaussianKnownCovariance": lambda: ng.families.GaussianKnownCovariance(torch.eye(30)),
    "Mask": lambda: ng.families.Mask(steps=torch.ones(30, 30)),
    "TangentFrame": frame,
    "NTKMap": lambda: ng.functionspace.NTKMap(frame()),
    "TangentKernel": lambda: ng.functionspace.TangentKernel(frame()),
    "TangentSpace": lambda: ng.functionspace.TangentSpace.of(model(), X, ng.functionspace.SobolevKernel(1.5)),
    "PushforwardMetric": lambda: ng.functionspace.PushforwardMetric.of(ng.functionspace.ntk(nn.Linear(64, 2), X)),
    "KernelSum": lambda: ng.functionspace.KernelSum(ng.functionspace.SobolevKernel(0.5), POINTS, POINTS),
    "Quadrature": lambda: ng.functionspace.Quadrature.of(
        torch.distributions.Normal(torch.zeros(2), torch.ones(2)), order=8
    ),
    "Weighted": lambda: ng.functionspace.Weighted(torch.full((50,), 0.02)),
    "BasinVolume": lambda: ng.functionspace.basin_volume(nn.Linear(64, 2).double(), X.double(), 0.1, ng.Euclidean()),
    "FunctionalGradientDescent": lambda: ng.functionspace.FunctionalGradientDescent(
        ng.functionspace.SobolevKernel(1.5), lambda y, t: (y - t).square().sum(), step=0.1
    ),
    "Certificate": certificate,
    "Sweep": lambda: ng.invariance.Sweep({damping: certificate() for damping in (0.0, 1.0)}),
    "Change": lambda: ng.invariance.Change(torch.eye(30)[None], torch.zeros(1, 30)),
    "Call": lambda: ng.rules.Call((X,), {"t": T}),
    "DenseFeatures": lambda: ng.rules.DenseFeatures(torch.ones(30, 1, 1, 30)),
    "Moment": lambda: ng.rules.DenseFeatures(torch.ones(30, 1, 1, 30)).moment(),
    "Examples": lambda: load_digits(),
}
REPORTS = (
    "Plan",
    "GradientPlan",
    "Diagnostics",
    "Diagnosis",
    "SpectralDensity",
    "FitResult",
    "Laplace",
    "Certificate",
    "Sweep",
)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_repr_is_short_and_has_shapes_for_tensors(name: str) -> None:
    text = repr(OBJECTS[name]())
    assert len(text.splitlines()) <= 10
    assert len(text) < 1000
    assert "tensor(" not in text
    assert " object at 0x" not in text


@pytest.mark.parametrize("name", REPORTS)
def test_a_notebook_shows_what_print_says(name: str) -> None:
    thing = OBJECTS[name]()
    shown = thing._repr_html_()
    assert shown.startswith("<pre")
    for line in str(thing).splitlines():
        assert line.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split("'")[0] in shown


def test_a_repr_of_numbers_says_them() -> None:
    assert repr(ng.vi.Step(1.0, torch.tensor(0.25), "a bound")) == "Step(asked=1, taken=0.25, bound='a bound')"


def test_the_shape_of_every_tensor_is_told() -> None:
    values: Tensor = torch.zeros(3, 2)
    assert repr(ng.vi.Predictive(values, torch.zeros(3, 2, 2))) == "Predictive(mean=[3 2], covariance=[3 2 2])"
