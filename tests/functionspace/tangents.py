"""Models with metrics on functions, and the dense ground truth of their tangent spaces."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.functionspace import SobolevKernel, TangentFrame
from tests import oracle

_block_diag: Callable[..., Tensor] = torch.block_diag  # torch leaves it untyped
KERNEL = SobolevKernel(1.5)
METRICS = [ng.Euclidean(), ng.Fisher(ng.Categorical()), ng.Sobolev(jitter=0.0)]
NAMES = ["L2", "Fisher", "Sobolev"]
EVERY = pytest.mark.parametrize("metric", METRICS, ids=NAMES)


def network(hidden: int = 1) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, hidden), nn.Tanh(), nn.Linear(hidden, 3)).double()


def framed(model: nn.Module, x: Tensor, metric: ng.OutputMetric) -> TangentFrame:
    return TangentFrame.of(ng.pullback(model, x, metric))


def inner_product(model: nn.Module, x: Tensor, metric: ng.OutputMetric) -> Tensor:
    """H [(n d) (m e)] with ⟨u, v⟩ = uᵀHv, from the textbook."""
    n = len(x)
    if isinstance(metric, ng.Fisher):
        return _block_diag(*oracle.categorical(model(x))) / n
    K = KERNEL(x) if isinstance(metric, ng.Sobolev) else torch.eye(n, dtype=x.dtype)
    return torch.kron(torch.linalg.inv(K).contiguous(), torch.eye(3, dtype=x.dtype)) / n


def dense(model: nn.Module, x: Tensor, metric: ng.OutputMetric) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """J [(n d) p], H, g = JᵀHJ and g⁺."""
    J = oracle.module_jacobian(model, x).flatten(0, 1)
    H = inner_product(model, x, metric)
    g = J.T @ H @ J
    return J, H, g, torch.linalg.pinv(g, rtol=1e-11, hermitian=True)


def matrix(kernel: Tensor) -> Tensor:
    """[(n k) (m l)] of [n m k l]."""
    n, m, k, l = kernel.shape
    return kernel.transpose(1, 2).reshape(n * k, m * l)
