"""An optimizer leaves no trace in the model: it is saved, copied, scripted and exported as if there were none."""

import copy
import gc
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from tests.optim.tasks import seeded

# torch's own: scripting is deprecated
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.")
FISHER = ng.Fisher(ng.Categorical())
WITHOUT = """
import sys
sys.modules["natgrad"] = None  # any import of it fails
import torch
for where in sys.argv[2:]:
    model = torch.load(f"{sys.argv[1]}/{where}.pt", weights_only=False)
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    torch.save(model(torch.ones(2, 3)), f"{sys.argv[1]}/{where}-outputs.pt")
"""
WHERE: dict[str, Callable[[nn.Module], nn.Module]] = {
    "itself": lambda model: model,
    "inside": lambda model: nn.Sequential(model, nn.Softmax(dim=1)),
}
inside = pytest.mark.parametrize("where", WHERE)


def network() -> nn.Sequential:
    return seeded(lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)))


def step(model: nn.Module, opt: torch.optim.Optimizer) -> None:
    opt.zero_grad()
    model(torch.ones(2, 3)).square().sum().backward()
    opt.step()


def hooks(model: nn.Module) -> list[object]:
    return [hook for m in model.modules() for hook in (*m._forward_pre_hooks.values(), *m._forward_hooks.values())]


def test_a_saved_model_loads_where_natgrad_is_not_installed(tmp_path: Path) -> None:
    model = network()
    opt = ng.KFAC(model, FISHER)
    step(model, opt)
    for where, wrapped in WHERE.items():
        torch.save(wrapped(model), tmp_path / f"{where}.pt")
    subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path), *WHERE], check=True, timeout=120)
    for where, wrapped in WHERE.items():
        torch.testing.assert_close(torch.load(tmp_path / f"{where}-outputs.pt"), wrapped(model)(torch.ones(2, 3)))
    step(model, opt)  # and the optimizer goes on


@inside
def test_a_copy_carries_no_hook(where: str) -> None:
    model = network()
    opt = ng.KFAC(model, FISHER)
    twin, plain = copy.deepcopy(WHERE[where](model)), WHERE[where](network())
    assert hooks(twin) == []
    assert {key for m in twin.modules() for key in vars(m)} == {key for m in plain.modules() for key in vars(m)}
    twin(torch.ones(2, 3)).sum().backward()
    assert not opt.tracker.has_estimate
    step(model, opt)


def test_the_loss_that_a_first_pass_waits_for_is_saved_and_freed_as_if_there_were_no_optimizer() -> None:
    loss = nn.CrossEntropyLoss()
    model = network()
    opt = ng.KFAC(model, loss)
    model(torch.ones(2, 3))
    assert hooks(loss) != []
    assert hooks(pickle.loads(pickle.dumps(loss))) == []
    assert hooks(copy.deepcopy(loss)) == []
    gc.disable()
    try:
        del opt
        assert hooks(loss) == []
    finally:
        gc.enable()
    assert vars(loss).keys() == vars(nn.CrossEntropyLoss()).keys()


def test_the_hooks_of_the_user_are_copied_and_removed_as_always() -> None:
    model, calls = network(), list[int]()
    before = model.register_forward_pre_hook(lambda module, args: calls.append(1))
    opt = ng.KFAC(model, FISHER)
    after = model.register_forward_pre_hook(lambda module, args: calls.append(2))
    twin = copy.deepcopy(model)
    assert len(hooks(twin)) == 2
    before.remove()
    after.remove()
    step(model, opt)
    assert calls == []
    twin(torch.ones(2, 3))
    assert calls == [1, 2]


@inside
def test_a_model_is_scripted_while_its_optimizer_lives(where: str) -> None:
    model = network()
    opt = ng.KFAC(model, FISHER)
    whole, x = WHERE[where](model), torch.ones(2, 3)
    scripted = torch.jit.script(whole)
    torch.testing.assert_close(scripted(x), whole(x))
    step(model, opt)
    torch.testing.assert_close(scripted(x), whole(x))  # the parameters are shared


def test_a_trace_is_no_training_pass() -> None:
    def trained(traces: bool) -> Tensor:
        model = network()
        opt = ng.KFAC(model, FISHER, metric_every=1, inverse_every=1)
        for _ in range(2):
            if traces:
                torch.jit.trace(model, torch.randn(2, 3), check_trace=False)
                assert not opt.tracker.has_estimate
            step(model, opt)
        return torch.cat([p.detach().flatten() for p in model.parameters()])

    assert torch.equal(trained(True), trained(False))


def test_when_the_last_optimizer_is_gone_the_model_is_as_it_was() -> None:
    model = network()
    before = {key: type(value) for key, value in vars(model).items()}
    first, second = ng.KFAC(model, FISHER), ng.EKFAC(model, FISHER)
    del first
    assert hooks(copy.deepcopy(model)) == []
    step(model, second)
    del second
    assert {key: type(value) for key, value in vars(model).items()} == before
    assert hooks(model) == []


class Stateful(nn.Module):
    """It says itself what is saved of it."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.cache = nn.Linear(3, 2), torch.zeros(10_000)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out

    def __getstate__(self) -> dict[str, object]:
        return {key: value for key, value in vars(self).items() if key != "cache"}


def test_a_model_that_says_what_is_saved_of_it_is_asked() -> None:
    model = Stateful()
    opt = ng.KFAC(model, FISHER)
    twin = copy.deepcopy(model)
    assert "cache" not in vars(twin)
    assert hooks(twin) == []
    step(model, opt)


def test_parameters_on_the_meta_device_are_refused_by_name() -> None:
    with torch.device("meta"):
        model = nn.Linear(3, 2)
    with pytest.raises(ValueError, match=r"weight, bias on the meta device, where .* model.to_empty"):
        ng.KFAC(model, FISHER)
