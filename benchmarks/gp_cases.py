"""Data sets and contestants of the benchmark of sparse Gaussian processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

import natgrad as ng
from benchmarks.peers import installed

JITTER = 1e-8
BUDGET = 1500  # steps of every contestant at most
RATES = tuple((lr, hyper) for lr in (1.0, 0.1) for hyper in (0.1, 0.03))  # of q, and of hyperparameters


@final
@dataclass(frozen=True)
class Case:
    """A data set with its model; ``learned``: whether the hyperparameters are learned."""

    name: str
    x: Tensor
    y: Tensor
    labels: bool
    learned: bool
    lengthscale: float
    inducing: int

    def likelihood(self) -> ng.vi.Likelihood:
        return ng.vi.BernoulliLogit() if self.labels else ng.vi.GaussianNoise(0.1)

    def model(self) -> ng.vi.SparseGP:
        kernel = ng.vi.SquaredExponential(self.lengthscale)
        gp = ng.vi.SparseGP(kernel, self.likelihood(), self.x[: self.inducing], jitter=JITTER)
        gp.inducing.requires_grad_(False)
        if not self.learned:
            gp.requires_grad_(False)
        return gp


def cases(n: int, inducing: int) -> list[Case]:
    """Regression and classification in two dimensions, with hyperparameters that are given and that are learned."""
    g = torch.Generator().manual_seed(0)
    x = torch.rand(n, 2, generator=g, dtype=torch.float64)
    f = (6 * x[:, 0]).sin() * (4 * x[:, 1]).cos() + x[:, 0]
    y = f + 0.3 * torch.randn(n, generator=g, dtype=torch.float64)
    t = (torch.rand(n, generator=g, dtype=torch.float64) < torch.sigmoid(4 * f)).double()
    out = []
    for learned, how in ((False, "given"), (True, "learned")):
        for labels, kind in ((False, "regression"), (True, "classification")):
            name, data = f"{kind}, hyperparameters {how}", t if labels else y
            out.append(Case(name, x, data, labels, learned, 1.0 if learned else 0.3, inducing))
    return out


class Steps(ABC):
    """A running contestant."""

    @abstractmethod
    def run(self, count: int) -> list[float]:
        """Take at most this many steps; the bound after each."""


class Contestant(ABC):
    """A method to maximise the bound, with its settings; ``limit``: its largest number of steps."""

    limit: int
    label: str

    @abstractmethod
    def start(self, case: Case) -> Steps: ...


@final
@dataclass(frozen=True)
class Adam(Contestant):
    """Adam on the mean and the Cholesky factor of the covariance, in whitened coordinates, and on hyperparameters.

    It has the same model code as ours. With given hyperparameters the projection is computed once.
    """

    lr: float
    limit: int = BUDGET

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"lr {self.lr:g}"

    @staticmethod
    def candidates() -> list[Contestant]:
        return [Adam(lr) for lr in (0.1, 0.03, 0.01)]

    def start(self, case: Case) -> Steps:
        return _AdamSteps(case, self.lr)


@final
class _AdamSteps(Steps):
    def __init__(self, case: Case, lr: float) -> None:
        self.case, self.gp = case, case.model()
        m = case.inducing
        self.μ, self.L = torch.zeros(m).requires_grad_(), torch.eye(m).requires_grad_()
        self.hyper = [p for p in self.gp.parameters() if p.requires_grad]
        self.optimizer = torch.optim.Adam([self.μ, self.L, *self.hyper], lr=lr)
        self.projection = None if case.learned else self.gp.project(case.x)

    def run(self, count: int) -> list[float]:
        bounds = []
        for _ in range(count):
            loss = -self._bound()
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            bounds.append(-float(loss.detach()))
        return bounds

    def _bound(self) -> Tensor:
        a, r = self.projection or self.gp.project(self.case.x)
        L = self.L.tril()
        half = a @ L
        kl = 0.5 * (L.square().sum() + self.μ.square().sum() - len(L)) - L.diagonal().abs().log().sum()
        v = r + half.square().sum(1)
        return self.gp.likelihood.expected(self.case.y, a @ self.μ, v).sum() - kl


@final
@dataclass(frozen=True)
class Natural(Contestant):
    """``ascend`` where hyperparameters are given, ``learn`` where they are learned."""

    limit: int = 40
    label: str = "steps of size 1"

    @staticmethod
    def candidates(case: Case) -> list[Contestant]:
        return [Natural()]

    def start(self, case: Case) -> Steps:
        return _NaturalSteps(case)


@final
class _NaturalSteps(Steps):
    def __init__(self, case: Case) -> None:
        self.case, self.gp = case, case.model()

    def run(self, count: int) -> list[float]:
        x, y = self.case.x, self.case.y
        if not self.case.learned:
            return list(ng.vi.ascend(self.gp, x, y, tolerance=1e-4, steps=count).elbo[1:])
        bounds = ng.vi.learn(self.gp, x, y, steps=count, tolerance=1e-2)
        return [max(bounds[: k + 1]) for k in range(len(bounds))]


@final
@dataclass(frozen=True)
class NaturalAdam(Contestant):
    """Our steps of q with Adam for the hyperparameters, with the loop and the rates of the peer.

    Beside ``Natural``, which has L-BFGS, it separates the effect of the step from that of the other optimizer.
    """

    lr: float
    hyper_lr: float
    limit: int = BUDGET

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"lr {self.lr:g}, Adam {self.hyper_lr:g}"

    @staticmethod
    def candidates(case: Case) -> list[Contestant]:
        return [NaturalAdam(lr, hyper) for lr, hyper in RATES]

    def start(self, case: Case) -> Steps:
        return _NaturalAdamSteps(case, self.lr, self.hyper_lr)


@final
class _NaturalAdamSteps(Steps):
    def __init__(self, case: Case, lr: float, hyper_lr: float) -> None:
        self.case, self.gp, self.lr = case, case.model(), lr
        self.optimizer = torch.optim.Adam([p for p in self.gp.parameters() if p.requires_grad], lr=hyper_lr)

    def run(self, count: int) -> list[float]:
        bounds, y = [], self.case.y
        for _ in range(count):
            at, belief = self.gp.project(self.case.x), self.gp.belief
            μ, v, kl = belief.marginals(at)
            bound = self.gp.likelihood.expected(y, μ, v).sum() - kl
            self.optimizer.zero_grad()
            (-bound).backward()
            with torch.no_grad():
                self.gp.assume(belief.moved(self.gp.target(at, y, μ, v), self.lr))
            self.optimizer.step()
            bounds.append(float(bound.detach()))
        with torch.no_grad():
            last = float(self.gp.elbo(self.case.x, y))
        return [*bounds[1:], last]


@final
@dataclass(frozen=True)
class Peer(Contestant):
    """GPyTorch: ``NaturalVariationalDistribution`` with ``NGD`` and, for hyperparameters, Adam, as in its tutorial."""

    lr: float
    hyper_lr: float = 0.0
    limit: int = 100

    @property
    def label(self) -> str:  # type: ignore[override]
        return f"lr {self.lr:g}" + (f", Adam {self.hyper_lr:g}" if self.hyper_lr else "")

    @staticmethod
    def installed() -> bool:
        return bool(installed("gpytorch"))

    @staticmethod
    def candidates(case: Case) -> list[Contestant]:
        if not case.learned:
            return [Peer(lr) for lr in (1.0, 0.5, 0.1)]
        return [Peer(lr, hyper, BUDGET) for lr, hyper in RATES]

    def start(self, case: Case) -> Steps:
        return _PeerSteps(installed("gpytorch"), case, self.lr, self.hyper_lr, JITTER)


@final
class _PeerSteps(Steps):
    def __init__(self, gpytorch: Any, case: Case, lr: float, hyper_lr: float, jitter: float) -> None:
        self.case = case
        n = len(case.x)
        self.model = _model(gpytorch, case, jitter)
        self.likelihood = _likelihood(gpytorch, case)
        hyper = [*self.model.hyperparameters(), *self.likelihood.parameters()]
        for p in hyper:
            p.requires_grad_(case.learned and p is not self.model.variational_strategy.inducing_points)
        self.optimizers = [gpytorch.optim.NGD(self.model.variational_parameters(), num_data=n, lr=lr)]
        if case.learned:
            self.optimizers.append(torch.optim.Adam([p for p in hyper if p.requires_grad], lr=hyper_lr))
        self.objective = gpytorch.mlls.VariationalELBO(self.likelihood, self.model, num_data=n)
        self.model.train()
        self.likelihood.train()

    def run(self, count: int) -> list[float]:
        """The bound of a forward pass is that before its step: one more pass at the end has the last one."""
        bounds = []
        for _ in range(count):
            for optimizer in self.optimizers:
                optimizer.zero_grad()
            loss = -self.objective(self.model(self.case.x), self.case.y)
            loss.backward()
            for optimizer in self.optimizers:
                optimizer.step()
            bounds.append(-float(loss.detach()) * len(self.case.x))
        with torch.no_grad():
            last = float(self.objective(self.model(self.case.x), self.case.y)) * len(self.case.x)
        return [*bounds[1:], last]


def _model(gpytorch: Any, case: Case, jitter: float) -> Any:
    @final
    class Sparse(gpytorch.models.ApproximateGP):  # type: ignore[misc]
        def __init__(self) -> None:
            q = gpytorch.variational.NaturalVariationalDistribution(case.inducing)
            strategy = gpytorch.variational.VariationalStrategy(
                self, case.x[: case.inducing].clone(), q, learn_inducing_locations=True, jitter_val=jitter
            )
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())
            self.covar_module.outputscale = 1.0
            self.covar_module.base_kernel.lengthscale = case.lengthscale

        def forward(self, x: Any) -> Any:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    return Sparse()


def _likelihood(gpytorch: Any, case: Case) -> Any:
    if not case.labels:
        likelihood = gpytorch.likelihoods.GaussianLikelihood()
        likelihood.noise = 0.1
        return likelihood

    @final
    class Logit(gpytorch.likelihoods.likelihood._OneDimensionalLikelihood):  # type: ignore[misc]
        def forward(self, f: Any, *args: Any, **kwargs: Any) -> Any:
            return torch.distributions.Bernoulli(logits=f)

    return Logit()
