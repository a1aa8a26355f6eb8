"""A model that the optimizer cannot observe, or no longer observes: the error names the cause and the fix."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import NatgradError, UncoveredError
from tests.optim.tasks import seeded
from tests.pulled import normal
from tests.zoo import mlp, opaque

PRESETS = pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC], ids=["KFAC", "EKFAC"])


def train(opt: ng.NaturalGradient, model: Callable[[Tensor], Tensor], steps: int = 1) -> None:
    for _ in range(steps):
        opt.zero_grad()
        model(normal(6, 3)).square().mean().backward()
        opt.step()


# Passes that are not seen


@pytest.mark.parametrize("metric", [F.cross_entropy, ng.Empirical(), ng.Euclidean()], ids=["loss", "own", "outputs"])
def test_a_pass_that_asks_for_shapes_is_no_pass_of_the_metric(metric: Any) -> None:
    found = []
    for asked in (True, False):
        model = seeded(lambda: mlp(3, 4, 2).double())
        opt = ng.NaturalGradient(model, metric, structure=ng.Kronecker())
        if asked:
            with FakeTensorMode(allow_non_fake_inputs=True):
                assert model(torch.empty(5, 3, dtype=torch.float64)).shape == (5, 2)
        F.cross_entropy(model(normal(6, 3)), torch.arange(6) % 2).backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)


UNSEEN = (
    r"no forward pass with gradients was seen .*compiled, and the optimizer was made with the plain one \(give "
    r"torch\.compile\(model\) to the optimizer\), or its hooks were removed \(make a new optimizer\)"
)


def test_a_model_that_is_called_compiled_and_was_given_plain_is_a_cause_that_is_named() -> None:
    """Where it has run before, the compiled pass leaves out the hook of the optimizer."""
    torch.compiler.reset()
    model = mlp(3, 4, 2).double()
    compiled: Any = torch.compile(model, backend="eager")
    compiled(normal(6, 3))
    opt = ng.KFAC(model, ng.Euclidean())
    with pytest.raises(NatgradError, match=UNSEEN):
        train(opt, compiled)
    train(ng.KFAC(compiled, ng.Euclidean()), compiled)  # the way out that the message names


def test_a_model_compiled_as_one_graph_and_given_plain_is_told_to_give_the_compiled_one() -> None:
    torch.compiler.reset()
    model, other = mlp(3, 4, 2).double(), mlp(3, 4, 2).double()
    compiled: Any = torch.compile(model, backend="eager", fullgraph=True)
    compiled_other: Any = torch.compile(other, backend="eager", fullgraph=True)
    with pytest.raises(RuntimeError, match="give the compiled model to the optimizer"):
        train(ng.KFAC(model, ng.Euclidean()), compiled)
    train(ng.KFAC(compiled_other, ng.Euclidean()), compiled_other)


DERIVATIVES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,))[1],
    "jacobian": lambda model, x: torch.func.vmap(torch.func.jacrev(lambda one: model(one[None])[0]))(x),
}


@pytest.mark.parametrize("metric", [F.mse_loss, F.cross_entropy, ng.Empirical()], ids=["mse", "classes", "empirical"])
@pytest.mark.parametrize("name", DERIVATIVES)
def test_derivatives_by_the_inputs_in_torch_func_are_no_passes_of_the_metric(name: str, metric: Any) -> None:
    """The metric is that of the plain pass; where there is none, the error says so."""
    found = []
    for penalised in (True, False):
        model = seeded(lambda: mlp(3, 4, 2).double())
        opt = ng.NaturalGradient(model, metric, structure=ng.Kronecker())
        if penalised:
            DERIVATIVES[name](model, normal(6, 3))
        F.cross_entropy(model(normal(6, 3)), torch.arange(6) % 2).backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    torch.testing.assert_close(*found, rtol=0, atol=0)
    opt.zero_grad()
    DERIVATIVES[name](model, normal(6, 3)).square().mean().backward()
    with pytest.raises(NatgradError, match=r"torch\.no_grad\(\)"):
        opt.step()


def test_hooks_that_were_removed_are_a_cause_that_is_named() -> None:
    model = mlp(3, 4, 2).double()
    opt = ng.KFAC(model, ng.Euclidean())
    model._forward_pre_hooks.clear()
    with pytest.raises(NatgradError, match=UNSEEN):
        train(opt, model)
    train(ng.KFAC(model, ng.Euclidean()), model)


# Models that cannot be seen


def _lazy() -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that lazy modules are new
        return nn.Sequential(nn.LazyLinear(4, dtype=torch.float64), nn.Tanh(), nn.Linear(4, 2, dtype=torch.float64))


@PRESETS
def test_lazy_modules_are_refused_by_name_until_they_have_seen_a_batch(preset: Any) -> None:
    model = _lazy()
    match = r"0\.weight, 0\.bias: lazy parameters of the module Sequential.*Run a batch through the model first"
    with pytest.raises(ValueError, match=match):
        preset(model, ng.Euclidean())
    model(normal(6, 3))
    train(preset(model, ng.Euclidean()), model)


def _scripted(module: nn.Module, trace: bool) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch.jit is on its way out
        return torch.jit.trace(module, normal(1, 3)) if trace else torch.jit.script(module)


@pytest.mark.parametrize("trace", [False, True])
def test_torch_jit_modules_are_refused_wherever_they_are_in_the_model(trace: bool) -> None:
    fix = "inside which no layer can be seen: natgrad needs the eager module"
    inner = _scripted(mlp(3, 4, 2).double(), trace)
    with pytest.raises(TypeError, match=f"the model is a torch.jit module .*{fix}"):
        ng.KFAC(inner, ng.Euclidean())
    with pytest.raises(TypeError, match=f"1 is a torch.jit module .*{fix}"):
        ng.KFAC(nn.Sequential(nn.Identity(), inner), ng.Euclidean())


class Bare(nn.Module):
    """A layer, and a matrix that no layer rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(3, 4).double(), nn.Parameter(normal(2, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2]."""
        return opaque(self.layer(x), self.mix)


@PRESETS
def test_the_plan_of_a_strict_optimizer_says_what_the_first_pass_will_refuse(preset: Any) -> None:
    model = Bare()
    opt = preset(model, ng.Euclidean(), strict=True)
    text = str(opt.plan())
    assert "fallback)" not in text
    assert {row.names: row.structure for row in opt.plan().rows}[("mix",)] == "found at the first pass"
    assert (
        "refuses them in the first pass that uses them by an operation without a rule (strict=False: Diagonal())"
        in text
    )
    with pytest.raises(UncoveredError, match="no layer rule covers mix, and strict=True"):
        train(opt, model)
    assert "found at the first pass" in str(preset(model, ng.Euclidean()).plan())


# A forward that is replaced


def _patch(layer: Any) -> None:
    layer.forward = lambda x: 2 * F.linear(x, layer.weight, layer.bias)


@PRESETS
@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("of_ours", [False, True])
def test_a_forward_that_is_replaced_after_the_optimizer_was_made_is_refused_by_name(
    preset: Any, steps: int, of_ours: bool
) -> None:
    model = mlp(3, 4, 2).double()
    opt = preset(model, ng.Euclidean(), metric_every=2)
    train(opt, model, steps)
    _patch(model[0])
    before = [p.detach().clone() for p in model.parameters()]
    match = (
        r"the forward of the layer 0\.weight \+ 0\.bias was replaced after the optimizer was made.*Make a new optimizer"
    )
    estimate = (lambda: opt.refresh(normal(6, 3))) if of_ours else (lambda: train(opt, model))
    with pytest.raises(NatgradError, match=match):
        estimate()
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True))
    del model[0].forward
    train(opt, model)
    _patch(model[0])
    train(preset(model, ng.Euclidean()), model)  # the way out, while the first one is there


def test_a_forward_that_a_rule_of_ones_own_has_accepted_must_stay_what_it_was() -> None:
    from tests.optim.test_kfac_bad_input import Scaled, ScaledRule

    layer: Any = Scaled(3, 2).double()
    layer.forward = lambda x: 3.0 * x @ layer.weight.T
    opt = ng.KFAC(layer, ng.Euclidean(), rules=[ScaledRule()], metric_every=1)
    train(opt, layer)
    layer.forward = lambda x: 4.0 * x @ layer.weight.T
    with pytest.raises(NatgradError, match="the forward of the layer weight was replaced"):
        train(opt, layer)
    del layer.forward
    with pytest.raises(NatgradError, match="the forward of the layer weight was replaced"):
        train(opt, layer)


def test_layers_without_a_rule_and_modules_around_layers_may_be_given_another_forward() -> None:
    """Their part of the metric comes from the pass itself."""

    class Doubled(Bare):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * self.layer(x) @ self.mix.T

    model: Any = nn.Sequential(Bare(), nn.Linear(2, 2).double())
    other: Any = nn.Sequential(Doubled(), copy.deepcopy(model[1]))
    other.load_state_dict(model.state_dict())
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
    bare = model[0]
    bare.forward = lambda x: 2 * bare.layer(x) @ bare.mix.T
    train(opt, model, 2)
    train(ng.KFAC(other, ng.Euclidean(), metric_every=1), other, 2)
    torch.testing.assert_close(other.state_dict(), model.state_dict())


def test_a_forward_that_is_compiled_or_kept_from_it_is_the_same_forward() -> None:
    model: Any = mlp(3, 4, 2).double()
    opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    train(opt, model)
    model[2].forward = torch.compiler.disable(model[2].forward)
    train(opt, model)
    _patch(model[0])
    model[0].forward = torch.compile(model[0].forward, backend="eager")
    with pytest.raises(NatgradError, match=r"the forward of the layer 0\.weight \+ 0\.bias was replaced"):
        train(opt, model)


def test_torch_jit_modules_with_nothing_to_train_may_be_in_the_model() -> None:
    first, layers = mlp(3, 3, 3).double().requires_grad_(False), nn.ModuleList([nn.Linear(3, 4), nn.Linear(4, 2)])
    plain = nn.Sequential(first, layers[0], nn.Tanh(), layers[1]).double()
    own = copy.deepcopy(layers)
    model = nn.Sequential(_scripted(first, trace=True), own[0], _scripted(nn.Tanh(), trace=False), own[1])
    for one in (plain, model):
        train(ng.KFAC(one, ng.Euclidean(), lr=0.1), one, 2)
    torch.testing.assert_close(own.state_dict(), layers.state_dict())


def test_a_layer_that_is_given_another_class_is_refused_and_one_that_is_given_its_own_forward_is_not() -> None:
    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    model = mlp(3, 4, 2).double()
    opt = ng.KFAC(model, ng.Euclidean(), lr=0.1)
    layer: Any = model[0]
    layer.forward = layer.forward
    train(opt, model)
    del layer.forward
    layer.__class__ = Doubled
    with pytest.raises(NatgradError, match=r"the forward of the layer 0\.weight \+ 0\.bias was replaced after"):
        train(opt, model)
