"""Hyperparameters by the bound at its maximum over q: the envelope theorem makes its gradient free."""

from __future__ import annotations

import torch
from torch import Tensor

from natgrad.vi.ascent import ascend_at
from natgrad.vi.latent import LatentGaussian, Projection


def learn(
    model: LatentGaussian, x: Tensor, y: Tensor, steps: int = 50, tolerance: float = 1e-2, rate: float = 1.0
) -> tuple[float, ...]:
    """Maximise max_q ELBO over the parameters of the model that require a gradient; the bound after every evaluation.

    At the maximum over q the gradient of max_q ELBO is that of the ELBO with q fixed. So q is stepped by natural
    gradient until a step gains less than ``tolerance`` nats (one step, with Gaussian noise), and L-BFGS moves the
    hyperparameters. It ends after about ``steps`` evaluations, or when no entry of the gradient exceeds ``tolerance``.

    >>> import natgrad as ng
    >>> x = torch.linspace(0, 1, 20).unsqueeze(1)
    >>> gp = ng.vi.SparseGP(ng.vi.SquaredExponential(1.0), ng.vi.GaussianNoise(1.0), inducing=x[::4])
    >>> bounds = ng.vi.learn(gp, x, (6 * x[:, 0]).sin(), steps=20)
    >>> bounds[-1] > bounds[0] + 20
    True
    """
    model.check(x, y)
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("no parameter of the model requires a gradient: there is nothing to learn, use ascend")
    bounds: list[float] = []

    def evaluate() -> float:
        at = model.project(x)
        ascend_at(model, Projection(at.a.detach(), at.r.detach()), y, rate, tolerance)
        loss = -model.bound(at, y)
        for p, slope in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = slope
        bounds.append(-float(loss.detach()))
        return -bounds[-1]

    kept = [p.grad for p in parameters]
    optimizer = torch.optim.LBFGS(
        parameters, max_iter=steps, max_eval=steps, tolerance_grad=tolerance, line_search_fn="strong_wolfe"
    )
    optimizer.step(evaluate)
    for p, slope in zip(parameters, kept, strict=True):
        p.grad = slope
    with torch.no_grad():  # q at the parameters where the search ended, which need not be the last it looked at
        ascend_at(model, model.project(x), y, rate, tolerance)
    return tuple(bounds)
