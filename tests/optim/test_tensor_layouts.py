"""Nested tensors are refused by name where a metric is on outputs, and sparse inputs are those numbers, laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.pulled import close, normal

FISHER = ng.Fisher(ng.Categorical())
ON_OUTPUTS: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda m: ng.KFAC(m, FISHER),
    "loss": lambda m: ng.KFAC(m, nn.CrossEntropyLoss()),
    "empirical": lambda m: ng.KFAC(m, ng.Empirical()),
    "dense": lambda m: ng.NaturalGradient(m, FISHER, structure=ng.Dense(), damping=0.1),
    "natural": lambda m: ng.Natural(m, nn.CrossEntropyLoss(), lr=0.01),
}
OF_GRADIENTS: dict[str, Callable[[nn.Module], Any]] = {
    "natural": lambda m: ng.Natural(m, lr=0.01),
    "soap": lambda m: ng.SOAP(m, lr=0.01),
    "muon": lambda m: ng.Muon(m, lr=0.01),
}


class Sentences(nn.Module):
    """Words of examples of several lengths, whose mean is classified."""

    def __init__(self, inside: bool = False) -> None:
        super().__init__()
        self.word, self.head, self.inside = nn.Linear(3, 5), nn.Linear(5, 2), inside

    def forward(self, x: Any) -> Tensor:
        """[n 2] of a nested tensor, or of a list of examples that it is made of."""
        words = torch.nested.nested_tensor(x, layout=torch.jagged) if self.inside else x
        return self.head(torch.stack([z.tanh().mean(0) for z in self.word(words).unbind()]))


def examples() -> list[Tensor]:
    return [torch.randn(t, 3) for t in (2, 4, 3)]


def jagged() -> Tensor:
    return torch.nested.nested_tensor(examples(), layout=torch.jagged)


def step(model: nn.Module, opt: Any, x: Any) -> None:
    opt.zero_grad()
    nn.functional.cross_entropy(model(x), torch.arange(len(model(x))) % 2).backward()
    opt.step()


@pytest.mark.parametrize("name", ON_OUTPUTS)
def test_nested_inputs_are_refused_before_the_pass(name: str) -> None:
    model = Sentences()
    opt = ON_OUTPUTS[name](model)
    with pytest.raises(TypeError, match=r"the inputs hold a nested tensor.*pad it, torch.nested.*Natural, Muon"):
        model(jagged())
    with torch.no_grad():
        model(jagged())
    assert opt.tracker.fresh is None


@pytest.mark.parametrize("name", ["kfac", "loss", "empirical"])
def test_nested_inputs_of_a_layer_are_refused(name: str) -> None:
    model = Sentences(inside=True)
    opt = ON_OUTPUTS[name](model)
    with pytest.raises(TypeError, match=r"the inputs of a layer hold a nested tensor.*pad it"):
        step(model, opt, examples())


def test_nested_inputs_of_a_pullback_and_nested_outputs_are_refused() -> None:
    with pytest.raises(TypeError, match="the inputs hold a nested tensor"):
        ng.pullback(Sentences(), jagged(), ng.Euclidean())
    θ = {"w": torch.randn(3, 2)}
    with pytest.raises(TypeError, match="the outputs hold a nested tensor"):
        ng.pullback(
            lambda θ, x: torch.nested.nested_tensor([x @ θ["w"], x @ θ["w"]], layout=torch.jagged),
            torch.randn(5, 3),
            ng.Euclidean(),
            params=θ,
        )


@pytest.mark.parametrize("name", OF_GRADIENTS)
def test_a_metric_of_gradients_takes_nested_inputs(name: str) -> None:
    model = Sentences()
    opt = OF_GRADIENTS[name](model)
    before = model.word.weight.detach().clone()
    step(model, opt, jagged())
    assert not torch.equal(model.word.weight, before)


class Sparse(nn.Module):
    """By a layer, or by a product."""

    def __init__(self, product: bool) -> None:
        super().__init__()
        self.product, self.body, self.head = product, nn.Linear(6, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        sparse = self.product and x.layout is torch.sparse_coo
        h = torch.sparse.mm(x, self.body.weight.T) + self.body.bias if sparse else self.body(x)
        return self.head(torch.tanh(h))


STRUCTURES = [ng.Dense(), ng.Diagonal(), ng.BlockDense(), ng.Kronecker(), ng.EigenKronecker(), ng.Kernel()]


@pytest.mark.parametrize("structure", STRUCTURES, ids=lambda s: type(s).__name__)
def test_the_metric_at_sparse_inputs_is_that_at_the_same_numbers(structure: ng.structures.Structure) -> None:
    torch.manual_seed(0)
    model, x = Sparse(product=False).double(), normal(7, 6).clamp(min=0)
    metrics = [structure.estimate(ng.pullback(model, each, ng.Euclidean())).dense() for each in (x, x.to_sparse())]
    close(metrics[1], metrics[0])


@pytest.mark.parametrize(("name", "product"), [*((name, False) for name in ON_OUTPUTS), ("dense", True)])
def test_steps_with_sparse_inputs_are_those_with_the_same_numbers(name: str, product: bool) -> None:
    found = []
    for sparse in (False, True):
        torch.manual_seed(0)
        model = Sparse(product).double()
        opt = ON_OUTPUTS[name](model)
        for seed in range(3):
            x = normal(7, 6, seed=seed).clamp(min=0)
            step(model, opt, x.to_sparse() if sparse else x)
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[1], found[0])
