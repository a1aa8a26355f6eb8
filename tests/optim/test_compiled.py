"""Compiled models take the steps of the same model uncompiled, bit for bit, and nothing is compiled twice."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError, NatgradError
from tests import oracle
from tests.optim.tasks import seeded

FISHER = ng.Fisher(ng.Categorical())
PRESETS: dict[str, Callable[..., Any]] = {"kfac": ng.KFAC, "ekfac": ng.EKFAC}
# torch's own: the compiler looks at a tensor between two graphs, and loads what is deprecated
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]
Called = tuple[nn.Module, Callable[[Tensor], Tensor]]  # what the optimizer is given, and what is called


class Net(nn.Module):
    """Two layers, and dropout between them: what a pass draws is what the compiled pass draws again."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.drop = nn.Linear(3, 4), nn.Linear(4, 2), nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        return self.b(self.drop(torch.tanh(self.a(x))))


def _wrapped(model: nn.Module, backend: str) -> Called:
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    assert isinstance(compiled, nn.Module)
    return compiled, compiled


def _unwrapped(model: nn.Module, backend: str) -> Called:
    return model, torch.compile(model, backend=backend)


def _in_place(model: nn.Module, backend: str) -> Called:
    model.compile(backend=backend)
    return model, model


def _inside(model: nn.Module, backend: str) -> Called:
    compiled = torch.compile(model.get_submodule("a"), backend=backend)
    assert isinstance(compiled, nn.Module)
    model.add_module("a", compiled)
    return model, model


def _forward(model: nn.Module, backend: str) -> Called:
    model.forward = torch.compile(model.forward, backend=backend)
    return model, model


def _function(model: nn.Module, backend: str) -> Called:
    return model, torch.compile(lambda x: 1 * model(x), backend=backend)


WAYS = {
    "wrapped": _wrapped,
    "unwrapped": _unwrapped,
    "in_place": _in_place,
    "inside": _inside,
    "forward": _forward,
    "function": _function,
}


def _trained(make: Callable[..., Any], way: Callable[[nn.Module], Called]) -> tuple[Tensor, ng.NaturalGradient]:
    """θ after five steps; the metric is estimated in three of them."""
    torch._dynamo.reset()
    counters.clear()
    model = seeded(lambda: Net().double())
    x, t = seeded(lambda: (torch.randn(12, 3, dtype=torch.float64), torch.randint(2, (12,))), 1)
    given, call = way(model)
    opt = make(given, FISHER, metric_every=2, inverse_every=2)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(5)
        for _ in range(5):
            opt.zero_grad()
            F.cross_entropy(call(x), t).backward()
            opt.step()
    return oracle.flatten(model.parameters()), opt


CASES = [
    *(("kfac", way, "aot_eager") for way in WAYS),
    ("kfac", "wrapped", "eager"),
    ("kfac", "inside", "eager"),
    ("ekfac", "wrapped", "aot_eager"),
    ("ekfac", "unwrapped", "eager"),
]


@pytest.mark.parametrize(("name", "way", "backend"), CASES)
def test_a_compiled_model_takes_the_same_steps(name: str, way: str, backend: str) -> None:
    expected, plain = _trained(PRESETS[name], lambda model: (model, model))
    got, opt = _trained(PRESETS[name], lambda model: WAYS[way](model, backend))
    assert torch.equal(got, expected)
    assert list(opt.tracker.model.params) == list(plain.tracker.model.params)
    frames = counters["stats"]["unique_graphs"]
    assert 0 < frames <= (2 if way == "function" else 1)  # the model, once; a function is cut where the model begins


@pytest.mark.parametrize("way", ["wrapped", "inside"])
def test_a_state_moves_between_a_model_and_the_same_model_compiled(way: str) -> None:
    _, plain = _trained(ng.KFAC, lambda model: (model, model))
    _, opt = _trained(ng.KFAC, lambda model: WAYS[way](model, "eager"))
    opt.load_state_dict(plain.state_dict())
    plain.load_state_dict(opt.state_dict())


def test_the_fallback_sees_a_compiled_layer_by_its_plain_name() -> None:
    """Rows of parameters that no rule covers are computed by calls at other parameters, which need the real names."""
    model = seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    x = seeded(lambda: torch.randn(6, 3, dtype=torch.float64))
    expected = ng.Dense().estimate(ng.pullback(model, x, FISHER)).dense()
    model[0] = torch.compile(model[0], backend="eager")  # type: ignore[assignment]
    torch.testing.assert_close(ng.Dense().estimate(ng.pullback(model, x, FISHER)).dense(), expected)
    v = ng.Vector({name: torch.ones_like(p) for name, p in zip(_names(model), model.parameters(), strict=True)})
    product = ng.Implicit().estimate(ng.pullback(model, x, FISHER)).flat(v)
    torch.testing.assert_close(oracle.flatten(product.values()), expected.sum(1))


def _names(model: nn.Module) -> list[str]:
    return [name.replace("_orig_mod.", "") for name, _ in model.named_parameters()]


def test_a_whole_graph_around_the_model_is_refused_with_the_way_out() -> None:
    model, x = Net(), torch.randn(4, 3)
    opt = ng.KFAC(model, FISHER)
    call = torch.compile(lambda x: 1 * model(x), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"compile the model by torch.compile\(model\) and give the compiled model"):
        call(x)
    with pytest.raises(NatgradError, match="no forward pass"):
        opt.source.operator()


@pytest.mark.parametrize("preset", [ng.KFAC, ng.SOAP, ng.Natural])
def test_a_compiled_step_is_the_same_step(preset: Callable[..., Any]) -> None:
    def trained(*, compiled: bool) -> Tensor:
        torch._dynamo.reset()
        model, x = seeded(lambda: (Net().double().eval(), torch.randn(12, 3, dtype=torch.float64)))
        opt = preset(model, nn.CrossEntropyLoss()) if preset is ng.KFAC else preset(model)
        step = torch.compile(opt.step, backend="eager") if compiled else opt.step
        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(model(x), torch.arange(12) % 2).backward()
            step()
        return oracle.flatten(model.parameters())

    assert torch.equal(trained(compiled=True), trained(compiled=False))


def test_a_step_in_one_whole_graph_is_refused_with_the_way_out() -> None:
    torch._dynamo.reset()
    model = seeded(lambda: Net().double())
    opt = ng.Natural(model)
    model(torch.ones(12, 3, dtype=torch.float64)).sum().backward()
    with pytest.raises(Exception, match=r"compile the model alone, and call opt\.step\(\) outside"):
        torch.compile(lambda: opt.step(), backend="eager", fullgraph=True)()


def test_a_compiled_model_stays_compiled_in_a_closure() -> None:
    torch._dynamo.reset()
    model = seeded(lambda: Net().double())
    compiled, x = torch.compile(model, backend="eager"), torch.ones(12, 3, dtype=torch.float64)
    opt, ran = ng.Natural(model), list[bool]()

    def closure() -> Tensor:
        opt.zero_grad()
        loss: Tensor = compiled(x).square().sum()
        loss.backward()
        ran.append(bool(counters["stats"]["unique_graphs"]))
        return loss

    counters.clear()
    opt.step(closure)
    assert ran == [True]


# Compiled backward passes.


def _steps(make: Callable[[nn.Module], Any], compiled: bool) -> Tensor:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    opt = make(model)
    for seed in range(2):
        x = torch.randn(6, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        opt.zero_grad()
        loss = nn.functional.cross_entropy(model(x), torch.arange(6) % 2)
        with torch._dynamo.compiled_autograd._enable(lambda graph: graph) if compiled else nullcontext():
            loss.backward()
        opt.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize(
    "make", [lambda m: ng.KFAC(m, ng.Fisher(ng.Categorical())), lambda m: ng.SOAP(m, lr=0.01)], ids=["fisher", "soap"]
)
def test_a_compiled_backward_pass_changes_no_step(make: Callable[[nn.Module], Any]) -> None:
    torch.testing.assert_close(_steps(make, True), _steps(make, False), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("metric", [nn.CrossEntropyLoss(), ng.Empirical()], ids=["loss", "empirical"])
def test_a_metric_that_waits_for_a_backward_pass_refuses_a_compiled_one(metric: Any) -> None:
    with pytest.raises(IncompatibleError, match=r"pass is compiled .*compiled_autograd.*outside of compiled functions"):
        _steps(lambda m: ng.KFAC(m, metric), True)
