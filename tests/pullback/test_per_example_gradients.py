"""Factors are the per-example gradients, with and without layer rules, for every use of a parameter in the zoo."""

import pytest
import torch
from torch import nn

import natgrad as ng
from tests import oracle, zoo
from tests.pulled import Rooted, close, covered, oracle_rows, pull, random_roots, rows, without_rules

every_case = pytest.mark.parametrize("case", zoo.ZOO, ids=zoo.IDS)
every_module = pytest.mark.parametrize("case", [c for c in zoo.ZOO if c.name != "pure_function"], ids=lambda c: c.name)


@every_case
def test_factors_are_the_gradients_of_the_examples(case: zoo.Case) -> None:
    problem = case.make()
    metric = random_roots(problem)
    pb = pull(problem, metric)
    expected = oracle_rows(problem, metric.s)
    close(rows(pb), expected)
    close(rows(without_rules(pb)), expected)
    close(rows(pb), rows(without_rules(pb)))


@every_case
def test_every_parameter_is_covered_by_its_module_or_by_the_operations_that_use_it(case: zoo.Case) -> None:
    problem = case.make()
    pb = pull(problem, ng.Euclidean())
    assert covered(pb) == set(pb.model.params)


@every_case
def test_blocks_partition_the_parameters(case: zoo.Case) -> None:
    problem = case.make()
    pb = pull(problem, ng.Euclidean())
    index = torch.cat([block.index for block in pb.blocks])
    assert torch.equal(index.sort().values, torch.arange(pb.model.size))
    assert [name for block in pb.blocks for name in block.names] == list(pb.model.params)


@every_module
def test_nothing_is_dropped(case: zoo.Case) -> None:
    """With s = ∂loss/∂y the rows of all examples sum to `.grad`, whatever path each parameter takes."""
    problem = case.make()
    loss_of = nn.MSELoss(reduction="sum")
    y = problem.outputs().detach().requires_grad_()
    (s,) = torch.autograd.grad(loss_of(y, torch.ones_like(y)), y)
    pb = pull(problem, Rooted(s.unsqueeze(0)))
    out = problem.outputs()
    loss_of(out, torch.ones_like(out)).backward()
    grads = oracle.flatten(p.grad for p in oracle.parameters(problem.module).values() if p.grad is not None)
    close(rows(pb).sum((0, 1)) * len(s) ** 0.5, grads)


@every_case
def test_pushing_and_pulling_factors_is_multiplying_by_the_rows(case: zoo.Case) -> None:
    problem = case.make()
    metric = random_roots(problem)
    G = ng.Kernel().estimate(pull(problem, metric))
    R = oracle_rows(problem, metric.s)
    v, t = torch.linspace(-1, 1, R.shape[2]).double(), torch.linspace(-1, 2, R[..., 0].numel()).double()
    t = t.view(R.shape[:2])
    close(G.push(v), R @ v)
    close(G.pull(t), torch.einsum("knp,kn->p", R, t))
    close(G.gram(), R.flatten(0, 1) @ R.flatten(0, 1).T)
    close(G.rows(), R.flatten(0, 1))
