"""Weight and bias as layers of their own: ``bias="separate"``."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests import zoo
from tests.optim.tasks import resumes
from tests.pulled import close, normal, pull, random_roots

KINDS = pytest.mark.parametrize("kind", [ng.Kronecker, ng.EigenKronecker])


class Functional(nn.Module):
    """A weight and a bias that no module has."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b, self.head = nn.Parameter(normal(4, 3)), nn.Parameter(normal(4)), nn.Linear(4, 2).double()

    def forward(self, x: Tensor) -> Tensor:
        """[n 3] to [n 2]."""
        return self.head(torch.tanh(F.linear(x, self.w, self.b)))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": lambda: zoo.mlp(3, 4, 2),
    "norms": lambda: nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)),
    "functional": Functional,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 3)), nn.Conv1d(1, 2, 2), nn.Flatten(), nn.Linear(4, 2)),
}


@KINDS
@pytest.mark.parametrize("name", MODELS)
def test_factors_are_the_corners_of_the_joint_ones(kind: Any, name: str) -> None:
    """S is that of the joint layer; A is its part of the weights, and the mean square of the ones, which is 1."""
    problem = zoo.Case(name, lambda: zoo.Problem(MODELS[name](), torch.randn(5, 3, dtype=torch.float64))).make()
    pb = pull(problem, random_roots(problem))
    joint, apart = (kind(bias=bias, strict=True).estimate(pb).tensors() for bias in ("joint", "separate"))
    weights = [key.removesuffix("/S") for key in joint if key.endswith("/S")]
    assert len([key for key in apart if key.endswith("/S")]) == 2 * len(weights)
    for weight in weights:
        path, _, last = weight.rpartition(".")
        bias = ".".join(filter(None, [path, {"weight": "bias", "w": "b"}[last]]))
        A = joint[f"{weight}/A"]
        close(apart[f"{weight}/A"], A[..., :-1, :-1])
        close(apart[f"{bias}/A"], A[..., -1:, -1:])
        for own in (weight, bias):
            close(apart[f"{own}/S"], joint[f"{weight}/S"])


@KINDS
def test_an_optimizer_resumes_with_biases_apart(kind: Any) -> None:
    def made() -> tuple[nn.Module, ng.NaturalGradient]:
        model = Functional()
        refresh = ng.Refresh(kind(bias="separate"), decay=0.9)
        opt = ng.NaturalGradient(model, ng.Euclidean(), structure=refresh, damping=0.1, lr=0.1)
        assert [row.names for row in opt.plan().rows][-2:] == [("head.weight",), ("head.bias",)]
        return model, opt

    def step(model: nn.Module, opt: ng.NaturalGradient, seed: int) -> None:
        opt.zero_grad()
        model(normal(6, 3, seed=seed)).square().sum().backward()
        opt.step()

    resumes(made, step)


@KINDS
def test_another_word_is_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=r'bias=…\) is "joint" or "separate", not \'both\''):
        kind(bias="both")
