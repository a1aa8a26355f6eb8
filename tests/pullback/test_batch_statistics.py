"""Training mode: to the metric batch statistics are constants; to the user nothing has changed."""

import copy
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import checkpoint

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from natgrad.model import Model
from natgrad.pullbacks.pullback import Batch, Observer, OperationsNeededError, layers_of
from natgrad.pullbacks.tape import Recorder
from tests import zoo
from tests.pulled import Rooted, close, covered, normal, oracle_rows, rows


class Residual(nn.Module):
    """A block of a residual network, activations in place, with a projection on the way past."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1, bias=False), nn.Conv2d(4, 4, 3, padding=1, bias=False)
        self.one, self.two = nn.BatchNorm2d(4), nn.BatchNorm2d(4)
        self.past = nn.Sequential(nn.Conv2d(2, 4, 1, bias=False), nn.BatchNorm2d(4))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        """relu(norm(conv(relu(norm(conv x)))) + past x)."""
        inner = self.two(self.second(self.relu(self.one(self.first(x)))))
        inner += self.past(x)
        return self.relu(inner)


class ByKeyword(nn.Module):
    """A normalisation that is called with a keyword, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        """Two passes through the same layers."""
        return self.norm(input=self.body(torch.tanh(self.norm(input=self.body(x)))))


class Elsewhere(nn.Module):
    """A normalisation to which no rule applies: the rows come time step by time step, and its scale is used again."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        """[n t 3] to [n 2]."""
        h = self.body(x).transpose(0, 1)
        h = self.norm(h.reshape(-1, 4)).reshape(h.shape).transpose(0, 1)
        return self.head(torch.tanh(h) + self.norm.weight * h).sum(1)


def _mlp(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), norm, nn.ReLU(inplace=True), nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh())


def _images(norm: nn.Module) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), norm, nn.ReLU(inplace=True), nn.Conv2d(4, 2, 3), nn.Flatten(), nn.Linear(8, 2)
    )


def _volumes() -> nn.Module:
    return nn.Sequential(nn.Conv3d(1, 2, 2), nn.BatchNorm3d(2), nn.Tanh(), nn.Flatten(), nn.Linear(2, 2))


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: _mlp(nn.BatchNorm1d(4)), (3,)),
    "2d": (lambda: _images(nn.BatchNorm2d(4, eps=0.1)), (2, 4, 4)),
    "3d": (_volumes, (1, 2, 2, 2)),
    "cumulative": (lambda: _mlp(nn.BatchNorm1d(4, momentum=None)), (3,)),
    "without scale and shift": (lambda: _mlp(nn.BatchNorm1d(4, affine=False)), (3,)),
    "untracked": (lambda: _images(nn.BatchNorm2d(4, track_running_stats=False)), (2, 4, 4)),
    "untracked in evaluation mode": (lambda: _mlp(nn.BatchNorm1d(4, track_running_stats=False).eval()), (3,)),
    "synchronised alone": (lambda: _mlp(nn.SyncBatchNorm(4)), (3,)),
    "first and last": (lambda: nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2), nn.BatchNorm1d(2)), (3,)),
    "alone": (lambda: nn.BatchNorm1d(3), (3,)),
    "by keyword": (ByKeyword, (3,)),
    "elsewhere": (Elsewhere, (2, 3)),
    "residual": (lambda: nn.Sequential(Residual(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2)), (2, 3, 3)),
}
every_case = pytest.mark.parametrize("kind", CASES)


def problem(kind: str, n: int = 5) -> zoo.Problem:
    """In training mode, with parameters off their initial values."""
    build, shape = CASES[kind]
    return zoo.Case(kind, lambda: zoo.Problem(build(), torch.randn(n, *shape, dtype=torch.float64))).make()


def frozen(model: nn.Module, x: Tensor) -> nn.Module:
    """The same network with every batch normalisation replaced by the affine map that it was at this batch."""
    twin = copy.deepcopy(model)
    seen: dict[nn.Module, list[Tensor]] = {}

    def watch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.setdefault(module, []).append(args[0] if args else kwargs["input"])

    norms = [m for m in twin.modules() if isinstance(m, _BatchNorm)]
    handles = [m.register_forward_pre_hook(watch, with_kwargs=True) for m in norms]
    with torch.no_grad():
        twin(x)
    for handle in handles:
        handle.remove()
    for m in norms:
        m.eval()
        m.forward = _Calls(m, [v.transpose(0, 1).flatten(1) for v in seen[m]])  # type: ignore[method-assign]
    return twin


class _Calls:
    """γ (x − μ)/√(σ² + ε) + β with the μ and σ² that the module's calls had, one after the other."""

    def __init__(self, module: _BatchNorm, seen: list[Tensor]) -> None:
        self.module, self.seen, self.at = module, seen, 0

    def __call__(self, input: Tensor) -> Tensor:
        v = self.seen[self.at % len(self.seen)]
        self.at += 1
        shape = (-1, *[1] * (input.ndim - 2))
        out = (input - v.mean(1).view(shape)) / (v.var(1, correction=0) + self.module.eps).sqrt().view(shape)
        if self.module.weight is not None:
            out = out * self.module.weight.view(shape) + self.module.bias.view(shape)
        return out


def recorded(of: zoo.Problem, metric: ng.OutputMetric) -> ng.Pullback:
    """The pullback at the user's own forward pass, as in an optimizer's hook."""
    model = replace(Model.of(of.module), constant_statistics=True)
    view = Observer(model, metric, layers_of(model), None)
    for operations in (False, True):
        recorder = Recorder(model, view.blocks)
        recorder.start(of.x, operations=operations)
        try:
            y = of.module(of.x)
        finally:
            recorder.stop()
        with suppress(OperationsNeededError):
            return view.assemble(Batch(model, of.x), recorder.tape(y))
    raise AssertionError("operations were recorded, and are asked for again")


@pytest.mark.parametrize("k", [1, 3])
@every_case
def test_rows_are_those_of_the_network_with_frozen_statistics(kind: str, k: int) -> None:
    of = problem(kind)
    assert isinstance(of.x, Tensor)
    twin = zoo.Problem(frozen(of.module, of.x), of.x)
    close(of.outputs().detach(), twin.outputs().detach())
    s = normal(k, *of.outputs().shape)
    pb = recorded(of, Rooted(s))
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(twin, s))


def test_rows_of_channels_last_images_are_the_same() -> None:
    of = problem("residual")
    assert isinstance(of.x, Tensor)
    s = normal(2, *of.outputs().shape)
    expected = rows(recorded(of, Rooted(s)))
    last = zoo.Problem(
        of.module.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
        of.x.to(memory_format=torch.channels_last),
    )
    close(rows(recorded(last, Rooted(s))), expected)


def optimizer(model: nn.Module) -> ng.NaturalGradient:
    """K-FAC with the Euclidean metric."""
    return ng.NaturalGradient(
        model, ng.Euclidean(), structure=ng.Kronecker(), solver=ng.Cholesky(), damping=0.1, lr=0.01
    )


def _grads(model: nn.Module) -> list[Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@every_case
def test_the_users_gradient_and_running_statistics_are_what_they_are_without_us(kind: str, dtype: torch.dtype) -> None:
    of = problem(kind)
    model, plain = of.module.to(dtype), copy.deepcopy(of.module).to(dtype)
    assert isinstance(of.x, Tensor)
    x = of.x.to(dtype)
    opt = optimizer(model)
    for net in (model, plain):
        y = net(x)
        (y.square().sum() + y.sin().sum()).backward()
    assert opt.tracker.fresh is not None
    for mine, theirs in zip(_grads(model), _grads(plain), strict=True):
        assert torch.equal(mine, theirs)
    for name, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(name), buffer), name
    opt.step()


@every_case
def test_a_refresh_changes_no_running_statistics_and_gives_the_metric_of_the_hook(kind: str) -> None:
    of = problem(kind)
    other = copy.deepcopy(of.module)
    opt, hooked = optimizer(of.module), optimizer(other)
    before = {name: b.clone() for name, b in of.module.named_buffers()}
    opt.refresh(of.x)
    for name, buffer in of.module.named_buffers():
        assert torch.equal(buffer, before[name]), name
    other(of.x)
    assert opt.tracker.fresh is not None
    assert hooked.tracker.fresh is not None
    mine, theirs = opt.tracker.fresh.tensors(), hooked.tracker.fresh.tensors()
    assert mine.keys() == theirs.keys()
    for key, t in mine.items():
        close(t, theirs[key])


def test_two_optimizers_watch_one_model() -> None:
    of = problem("1d")
    alone = optimizer(copy.deepcopy(of.module))
    alone.tracker.model.module(of.x)  # type: ignore[misc]
    first, second = optimizer(of.module), optimizer(of.module)
    of.module(of.x)
    assert alone.tracker.fresh is not None
    for opt in (first, second):
        assert opt.tracker.fresh is not None
        for key, t in alone.tracker.fresh.tensors().items():
            close(opt.tracker.fresh.tensors()[key], t)


class Recomputed(nn.Module):
    """Two normalisations whose activations are computed again in the backward pass, or kept."""

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.again, self.head = again, nn.Linear(4, 3)
        self.body = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 4), nn.BatchNorm1d(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x))


@pytest.mark.parametrize("metric", [ng.Fisher(ng.Categorical()), nn.CrossEntropyLoss()], ids=["metric", "loss"])
def test_activations_that_are_computed_again_change_no_step(metric: Any) -> None:
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Recomputed(again).double()
        opt = ng.KFAC(model, metric, lr=0.1, generator=torch.Generator().manual_seed(0))
        for seed in range(3):
            x = torch.randn(8, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            opt.zero_grad()
            nn.functional.cross_entropy(model(x), torch.arange(8) % 3).backward()
            opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    kept, recomputed = found
    close(recomputed, kept)


def test_half_precision_inputs_have_statistics_in_single() -> None:
    """Under autocast the inputs of a normalisation come in bfloat16."""
    of = problem("1d", n=64)
    model = of.module.float()
    assert isinstance(of.x, Tensor)
    x = of.x.float()
    full, half = optimizer(copy.deepcopy(model)), optimizer(model)
    full.refresh(x)
    with torch.autocast("cpu", torch.bfloat16):
        half.refresh(x)
    assert full.tracker.fresh is not None
    assert half.tracker.fresh is not None
    for key, t in full.tracker.fresh.tensors().items():
        mine = half.tracker.fresh.tensors()[key]
        assert mine.dtype == torch.float32
        assert float((mine - t).norm()) < 0.05 * float(t.norm()), key


# What cannot be taken for a constant


class Own(nn.BatchNorm1d):
    """A subclass that computes its statistics itself."""

    def forward(self, input: Tensor) -> Tensor:
        return (input - input.mean(0)) / input.std(0) * self.weight + self.bias


def test_a_normalisation_that_is_not_known_is_refused_by_name_in_training_mode() -> None:
    model = nn.Sequential(nn.Linear(3, 4), Own(4)).double()
    opt = optimizer(model)  # noqa: F841 - it watches the model as long as it lives
    with pytest.raises(BatchStatisticsError, match=r"1 \(Own\).*natgrad.evaluating\(model\): opt.refresh\(x\)"):
        model(normal(5, 3))
    assert not model[0]._forward_hooks
    assert not model[1]._forward_hooks
    assert not model[1]._forward_pre_hooks


def test_the_pullback_itself_is_in_evaluation_mode() -> None:
    with pytest.raises(BatchStatisticsError, match=r"1 \(BatchNorm1d\).*natgrad.evaluating"):
        ng.pullback(problem("1d").module, normal(5, 3), ng.Euclidean())


def test_an_estimate_after_a_change_of_mode_is_that_of_the_mode_of_the_pass() -> None:
    of = problem("1d")
    with ng.evaluating(of.module):
        pb = ng.pullback(of.module, of.x, ng.Euclidean())
        expected = ng.Dense().estimate(pb).dense()
    close(ng.Dense().estimate(pb).dense(), expected)
