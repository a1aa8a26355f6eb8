"""A pullback changes nothing of the user's: gradients, parameters, buffers, hooks, random state."""

from typing import Any

import pytest
import torch
from torch import nn

import natgrad as ng
from tests import zoo
from tests.pulled import close, covector, normal, pull

STRUCTURES = [ng.Dense(), ng.BlockDense(), ng.Diagonal(), ng.LowRank(2), ng.Kernel(), ng.Implicit()]
every_structure = pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
mixed = pytest.mark.parametrize("name", ["mlp_tanh", "layer_norm", "attention"])


def work(structure: ng.structures.Structure, pb: ng.Pullback) -> None:
    """Everything that can be asked of an estimate."""
    G = structure.estimate(pb)
    G.flat(pb.template)
    G.diagonal()
    ng.sharp(G, covector(pb), ng.CG(), damping=0.1)


@mixed
@every_structure
def test_gradients_parameters_and_random_stream_stay(name: str, structure: ng.structures.Structure) -> None:
    problem = zoo.case(name).make()
    for p in problem.module.parameters():
        p.grad = torch.ones_like(p)
    before = {key: t.clone() for key, t in problem.module.state_dict().items()}
    versions = [p._version for p in problem.module.parameters()]
    stream = torch.get_rng_state()
    work(structure, pull(problem, ng.Sampled(ng.Euclidean(), samples=2)))
    work(structure, ng.pullback(problem.model, problem.x, ng.Fisher(ng.Categorical(axis=-1), samples=1)))
    assert torch.equal(torch.get_rng_state(), stream)
    assert [p._version for p in problem.module.parameters()] == versions
    for p in problem.module.parameters():
        assert p.grad is not None
        assert torch.equal(p.grad, torch.ones_like(p))
    for key, t in problem.module.state_dict().items():
        assert torch.equal(t, before[key])


@mixed
def test_hooks_and_modes_stay(name: str) -> None:
    problem = zoo.case(name).make()
    model = problem.module
    model.train()
    watched = [m for m in model.modules() if isinstance(m, nn.Linear)][-1]
    watched.eval()
    modes = [m.training for m in model.modules()]
    calls: list[int] = []

    def count(module: nn.Module, args: Any, output: Any) -> None:
        calls.append(1)

    watched.register_forward_hook(count)
    hooks = [list(m._forward_hooks) for m in model.modules()]
    work(ng.Dense(), pull(problem, ng.Euclidean()))
    assert [m.training for m in model.modules()] == modes
    assert [list(m._forward_hooks) for m in model.modules()] == hooks
    assert all(not m._backward_hooks and not m._forward_pre_hooks for m in model.modules())
    seen = len(calls)
    problem.outputs()
    assert len(calls) == seen + 1


def test_hooks_are_gone_after_a_forward_pass_that_raises() -> None:
    def fail(module: nn.Module, args: Any) -> None:
        raise RuntimeError("on purpose")

    model = zoo.mlp(3, 4, 2).double()
    handle = model[2].register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        ng.pullback(model, normal(5, 3), ng.Euclidean())
    handle.remove()
    assert all(not m._forward_hooks for m in model.modules())


def test_backward_of_the_users_graph_still_works() -> None:
    problem = zoo.case("relu_inplace").make()
    loss = problem.outputs().square().sum()
    expected = ng.differential(problem.module, loss)
    work(ng.Dense(), pull(problem, ng.Euclidean()))
    loss.backward()
    for name, p in problem.parameters().items():
        assert p.grad is not None
        close(p.grad, expected[name])


@pytest.mark.parametrize("guard", [torch.no_grad, torch.enable_grad])
def test_pullback_does_not_depend_on_the_grad_mode(guard: Any) -> None:
    problem = zoo.case("layer_norm").make()
    expected = ng.Dense().estimate(pull(problem, ng.Euclidean())).dense()
    with guard():
        G = ng.Dense().estimate(pull(problem, ng.Euclidean()))
        assert not G.dense().requires_grad
        close(G.dense(), expected)
        close(ng.Implicit().estimate(pull(problem, ng.Euclidean())).dense(), expected)


def test_sampled_roots_are_drawn_once_and_reproduced_by_their_generator() -> None:
    problem = zoo.case("mlp_tanh").make()
    metric = ng.Fisher(ng.Categorical(axis=-1), samples=2)
    first, second = pull(problem, metric), pull(problem, metric)
    assert torch.equal(first.root, second.root)
    other = ng.pullback(problem.model, problem.x, metric, generator=torch.Generator().manual_seed(1))
    assert not torch.equal(first.root, other.root)
    dense = ng.Dense().estimate(first).dense()
    close(ng.Kernel().estimate(first).dense(), dense)
    close(ng.Implicit().estimate(first).dense(), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_structure
def test_half_precision_outputs_give_a_metric_in_single_precision(
    structure: ng.structures.Structure, dtype: torch.dtype
) -> None:
    """Layers compute in bfloat16, good to 2⁻⁸; the metric is made of their numbers in float32, also under autocast."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        model, x = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 2)), torch.randn(6, 3)
    exact = structure.estimate(ng.pullback(model, x, ng.Euclidean())).diagonal()
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        cast = model if dtype == torch.float32 else model.to(dtype)
        pb = ng.pullback(cast, x.to(dtype), ng.Euclidean())
        inside = structure.estimate(pb)
    assert all(t.dtype == torch.float32 for t in inside.tensors().values())
    got = inside.diagonal()
    assert got.dtype == torch.float32
    assert float((got - exact).norm() / exact.norm()) < 0.05
    close(structure.estimate(pb).diagonal(), got, 1e-6)
