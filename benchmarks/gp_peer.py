"""GPyTorch on the cases of the benchmark: the same kernel, inducing points, likelihood, quadrature and precision."""

from __future__ import annotations

from typing import Any, final

import torch

from benchmarks.gp_cases import Case, Steps
from benchmarks.peers import installed


def start(case: Case, lr: float, hyper_lr: float, jitter: float) -> Steps:
    """The model with its optimizers, ready to step."""
    return _PeerSteps(installed("gpytorch"), case, lr, hyper_lr, jitter)


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
        """The bound is that of the forward pass, before the step: one more pass at the end shows the last."""
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
