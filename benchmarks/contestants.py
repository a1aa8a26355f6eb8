"""The quantities of the core benchmark: by this library, and by hand with ``torch.func`` as the text books say."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev, jvp, vjp, vmap
from torch.nn import functional as F

import natgrad as ng
from benchmarks.peers import Contestant
from natgrad.geometry import unflatten

EXACT = ng.Fisher(ng.Categorical())
ONE_SAMPLE = ng.Fisher(ng.Categorical(), samples=1)


def cross_entropy(y: Tensor, t: Tensor) -> Tensor:
    """Mean over all terms; y[n … c], t[n …]."""
    return F.cross_entropy(y.flatten(0, -2), t.flatten())


@dataclass(frozen=True)
class Problem:
    """A model with a batch, a classifier unless said otherwise. Its parameters require gradients, as in training."""

    name: str
    model: nn.Module
    x: Tensor
    t: Tensor
    loss: Callable[[Tensor, Tensor], Tensor] = cross_entropy
    family: ng.families.Family = field(default_factory=ng.Categorical)

    @property
    def size(self) -> int:
        return sum(p.numel() for p in self.model.parameters())

    @property
    def params(self) -> dict[str, Tensor]:
        return {name: p.detach() for name, p in self.model.named_parameters()}

    def own(self) -> Problem:
        """A copy for somebody who may change it: a library that asks for the gradient of x would do so for all."""
        return replace(self, model=copy.deepcopy(self.model), x=self.x.detach().clone(), t=self.t.clone())

    def first(self, n: int) -> Problem:
        """The same with fewer examples."""
        return replace(self, x=self.x[:n], t=self.t[:n])


def mlp(widths: tuple[int, ...], n: int, device: torch.device, dtype: torch.dtype = torch.float32) -> Problem:
    """Linear layers of these widths with ReLU between them."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for i, o in pairwise(widths):
        layers += [nn.Linear(i, o), nn.ReLU()]
    model = nn.Sequential(*layers[:-1]).to(device, dtype)
    return classification("MLP " + "-".join(map(str, widths)), model, (n, widths[0]), widths[-1])


def resnet(
    width: int, n: int, device: torch.device, dtype: torch.dtype = torch.float32, blocks: int = 1, pixels: int = 32
) -> Problem:
    """6·blocks + 2 layers of convolutions in residual blocks without normalisation, ten classes."""
    torch.manual_seed(0)
    stages: list[nn.Module] = []
    for i, o, stride in ((width, width, 1), (width, 2 * width, 2), (2 * width, 4 * width, 2)):
        stages += [Residual(i, o, stride), *(Residual(o, o, 1) for _ in range(blocks - 1))]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10)]
    model = nn.Sequential(nn.Conv2d(3, width, 3, padding=1), nn.ReLU(), *stages, *head).to(device, dtype)
    return classification(f"ResNet-{6 * blocks + 2} of width {width}", model, (n, 3, pixels, pixels), 10)


@final
class Residual(nn.Module):
    """relu(skip(x) + conv(relu(conv(x))))."""

    def __init__(self, i: int, o: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(i, o, 3, stride, padding=1)
        self.second = nn.Conv2d(o, o, 3, padding=1)
        self.skip = nn.Identity() if i == o and stride == 1 else nn.Conv2d(i, o, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """[n i h w] to [n o h/stride w/stride]."""
        return torch.relu(self.skip(x) + self.second(torch.relu(self.first(x))))


def classification(name: str, model: nn.Module, shape: tuple[int, ...], classes: int) -> Problem:
    """A random batch and random classes."""
    p = next(model.parameters())
    x = torch.randn(shape, dtype=p.dtype).to(p.device)
    return Problem(f"{name}, batch {shape[0]}", model, x, torch.randint(classes, shape[:1]).to(p.device))


def gradient(problem: Problem) -> Contestant:
    """One forward and backward pass: the unit of time."""

    def contestant() -> Tensor:
        problem.model.zero_grad(set_to_none=True)
        loss = problem.loss(problem.model(problem.x), problem.t)
        loss.backward()
        return loss.detach()

    return contestant


def product(problem: Problem, v: Tensor) -> Contestant:
    """G v by ``Implicit``, linearised beforehand."""
    G = ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT))
    return lambda: G.product(v)


def cold_product(problem: Problem, v: Tensor) -> Contestant:
    """One G v by ``Implicit``, with everything that comes before it."""
    return lambda: ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT)).product(v)


def solve(problem: Problem, ω: Tensor, steps: int) -> Contestant:
    """That many steps of conjugate gradients: as many products, and one more for the residual that is reported."""
    G = ng.Implicit().estimate(ng.pullback(problem.model, problem.x, EXACT))
    return lambda: ng.CG(tol=1e-30, max_steps=steps).init(G, damping=1.0).solve(ω)


def product_by_hand(problem: Problem, v: Tensor) -> Contestant:
    """Jᵀ h J v by jvp, the closed form of h = diag p − p pᵀ, and vjp."""
    params, tangent = problem.params, unflatten(v, problem.params)

    def f(θ: dict[str, Tensor]) -> Tensor:
        return functional_call(problem.model, θ, (problem.x,))

    def contestant() -> Tensor:
        y, u, *_ = jvp(f, (params,), (tangent,))
        p = y.softmax(-1)
        hu = p * (u - (p * u).sum(-1, keepdim=True)) / len(y)
        pull: Callable[..., Any] = vjp(f, params)[1]
        return torch.cat([g.reshape(-1) for g in pull(hu)[0].values()])

    return contestant


def jacobian(problem: Problem) -> Tensor:
    """J [n c p] by vmap(jacrev)."""

    def one(θ: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(problem.model, θ, (x.unsqueeze(0),)).squeeze(0)

    parts: dict[str, Tensor] = vmap(jacrev(one), in_dims=(None, 0))(problem.params, problem.x)
    return torch.cat([part.flatten(2) for part in parts.values()], dim=2)


def output_fisher(problem: Problem) -> Tensor:
    """h [n c c] = diag p − p pᵀ."""
    with torch.no_grad():
        p = problem.model(problem.x).softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def matrix(problem: Problem) -> Contestant:
    """G by ``Dense``."""
    return lambda: ng.Dense().estimate(ng.pullback(problem.model, problem.x, EXACT)).matrix


def matrix_by_hand(problem: Problem) -> Contestant:
    """G = (1/N) Σ Jᵀ h J: the Jacobian of every example, then one einsum."""

    def contestant() -> Tensor:
        J = jacobian(problem)
        return torch.einsum("ncp,ncd,ndq->pq", J, output_fisher(problem), J) / len(J)

    return contestant


def diagonal(problem: Problem, metric: ng.Fisher, generator: torch.Generator | None = None) -> Contestant:
    """diag G by ``Diagonal``."""
    return lambda: ng.Diagonal().estimate(ng.pullback(problem.model, problem.x, metric, generator=generator)).values


def step(problem: Problem, ω: Tensor, damping: float) -> Contestant:
    """(G + λ)⁻¹ω by ``Kernel``."""

    def contestant() -> Tensor:
        G = ng.Kernel().estimate(ng.pullback(problem.model, problem.x, EXACT))
        return G.inverse(damping).solve(ω)

    return contestant


def step_by_hand(problem: Problem, ω: Tensor, damping: float) -> Contestant:
    """(G + λ)⁻¹ω by Woodbury's identity from the Jacobian: R = √h J, v = (ω − Rᵀ(RRᵀ + λN)⁻¹Rω)/λ."""

    def contestant() -> Tensor:
        with torch.no_grad():
            p = problem.model(problem.x).softmax(-1)
            root = torch.diag_embed(p.sqrt()) - p.unsqueeze(-1) * p.sqrt().unsqueeze(-2)  # [n c k]
        R = torch.einsum("nck,ncp->knp", root, jacobian(problem)).flatten(0, 1)
        gram = R @ R.T + damping * len(p) * torch.eye(len(R), dtype=R.dtype, device=R.device)
        inner = torch.cholesky_solve((R @ ω).unsqueeze(-1), torch.linalg.cholesky(gram))
        return (ω - R.T @ inner.squeeze(-1)) / damping

    return contestant
