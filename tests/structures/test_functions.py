"""A function of an operator, f(G), is that of its matrix, in every structure that is closed under functions."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.structures import Structure
from tests import zoo
from tests.pulled import close, pull, random_roots

CLOSED = [
    *(ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.Kronecker(), ng.EigenKronecker(), ng.Kernel()),
    ng.Nystrom(5),  # whose floor is one number
]
FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "root": lambda w: w.clamp(min=0).sqrt(),
    "damped inverse": lambda w: (w + 0.1).reciprocal(),
    "heat": lambda w: torch.exp(-w),
}


@pytest.mark.parametrize("structure", CLOSED, ids=repr)
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "attention", "opaque_parameters"])
@pytest.mark.parametrize("f", FUNCTIONS.values(), ids=FUNCTIONS)
def test_a_function_of_an_operator_is_that_of_its_matrix(
    structure: Structure, name: str, f: Callable[[Tensor], Tensor]
) -> None:
    problem = zoo.opaque_parameters() if name == "opaque_parameters" else zoo.case(name).make()
    G = structure.estimate(pull(problem, random_roots(problem, 3)))
    values, vectors = torch.linalg.eigh(G.dense())
    close(G.map(f).dense(), (vectors * f(values)) @ vectors.T, 1e-7)


@pytest.mark.parametrize("structure", [ng.LowRank(2), ng.Implicit()], ids=repr)
def test_what_is_not_closed_refuses_by_name(structure: Structure) -> None:
    problem = zoo.case("mlp_tanh").make()
    G = structure.estimate(pull(problem, random_roots(problem, 3)))
    with pytest.raises(IncompatibleError, match=r"a function of it does not work with \w+Operator.*Dense or Kronecker"):
        G.map(torch.sqrt)
