"""A batch normalisation is known by the operation that is called, in whatever module or function that is."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import handle_torch_function, has_torch_function
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils.checkpoint import checkpoint

import natgrad as ng
from natgrad.errors import BatchStatisticsError
from tests import zoo
from tests.pullback.test_batch_statistics import optimizer, recorded
from tests.pulled import Rooted, close, covered, normal, oracle_rows, rows

Statistics = tuple[Tensor, Tensor]
EPS = 0.1


def normalised(x: Tensor, given: Statistics | None) -> Tensor:
    """x̂ by its own statistics, or by those that are given."""
    axes = [axis for axis in range(x.ndim) if axis != 1]
    mean, variance = given or (x.mean(axes), x.var(axes, correction=0))
    shape = (-1, *[1] * (x.ndim - 2))
    return (x - mean.view(shape)) / (variance.view(shape) + EPS).sqrt()


class Activated(nn.BatchNorm2d):
    """A normalisation with its activation, changed in place."""

    given: Statistics | None = None

    def forward(self, input: Tensor) -> Tensor:
        if self.given is not None:
            scale, shift = (p.view(-1, 1, 1) for p in (self.weight, self.bias))
            return torch.relu(normalised(input, self.given) * scale + shift)
        mean, variance = (None, None) if self.running_mean is None else (self.running_mean, self.running_var)
        z = F.batch_norm(input, mean, variance, self.weight, self.bias, self.training, 0.1, self.eps)
        return z.relu_()


class Bare(Activated):
    """By the operation of torch itself, of weights in another form."""

    def forward(self, input: Tensor) -> Tensor:
        if self.given is not None:
            return super().forward(input)
        weight, bias = (p * 1.0 for p in (self.weight, self.bias))
        return torch.batch_norm(input, weight, bias, None, None, True, 0.1, self.eps, False).relu()


class Function(nn.Module):
    """A normalisation outside of all modules, of tokens that are folded into the batch, with a scale or without."""

    given: Statistics | None = None

    def __init__(self, affine: bool) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(2, 3), nn.Linear(3, 2)
        self.scale, self.shift = (nn.Parameter(torch.ones(3)) if affine else None for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2 t t] to [n 2]."""
        h = self.body(x.movedim(1, -1)).flatten(0, 2)
        if self.given is None:
            h = F.batch_norm(h, None, None, self.scale, self.shift, training=True, eps=EPS)
        else:
            h = normalised(h, self.given)
            h = h if self.scale is None or self.shift is None else h * self.scale + self.shift
        return self.head(h.tanh().view(len(x), -1, 3).mean(1))


def _network(norm: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(2, 4, 2, bias=False), norm, nn.Conv2d(4, 2, 2), nn.Flatten(), nn.Linear(8, 2))


CASES: dict[str, Callable[[], nn.Module]] = {
    "activated": lambda: _network(Activated(4, eps=EPS)),
    "untracked": lambda: _network(Activated(4, eps=EPS, track_running_stats=False)),
    "weights in another form": lambda: _network(Bare(4, eps=EPS)),
    "beside one of torch": lambda: nn.Sequential(
        _network(Activated(4, eps=EPS)), nn.Unflatten(1, (2, 1, 1)), nn.Flatten(), nn.Linear(2, 2)
    ),
    "function": lambda: Function(affine=True),
    "function without scale": lambda: Function(affine=False),
}


def problem(kind: str) -> zoo.Problem:
    return zoo.Case(kind, lambda: zoo.Problem(CASES[kind](), torch.randn(5, 2, 4, 4, dtype=torch.float64))).make()


def frozen(of: zoo.Problem, seen: Callable[[Tensor], Statistics]) -> zoo.Problem:
    """The same network with the statistics of what comes to its normalisation."""
    twin = zoo.Problem(of.module, of.x)
    norm = next(m for m in of.module.modules() if hasattr(m, "given"))
    arrived: list[Tensor] = []

    def watch(module: nn.Module, args: tuple[Any, ...]) -> None:
        x = args[0]
        arrived.append(module.body(x.movedim(1, -1)).flatten(0, 2) if isinstance(module, Function) else x)

    with norm.register_forward_pre_hook(watch), torch.no_grad():
        of.module(of.x)
    norm.given = seen(arrived[0].transpose(0, 1).flatten(1))  # type: ignore[assignment]
    return twin


def of_batch(x: Tensor) -> Statistics:
    return x.mean(1), x.var(1, correction=0)


@pytest.mark.parametrize("kind", CASES)
def test_rows_are_those_of_the_network_with_constant_statistics(kind: str) -> None:
    of = problem(kind)
    s = normal(2, *of.outputs().shape)
    pb = recorded(of, Rooted(s))
    mine = rows(pb)
    assert covered(pb) == set(pb.model.params)
    close(mine, oracle_rows(frozen(of, of_batch), s))


def test_the_users_gradient_is_what_it_is_without_us() -> None:
    for kind in CASES:
        of, alone = problem(kind), problem(kind)
        opt = optimizer(of.module)
        for each in (of, alone):
            each.module(each.x).square().sum().backward()
        for p, q in zip(of.module.parameters(), alone.module.parameters(), strict=True):
            assert p.grad is not None
            assert q.grad is not None
            assert torch.equal(p.grad, q.grad)
        opt.step()


def test_in_evaluation_mode_the_rule_has_the_running_statistics() -> None:
    of = problem("activated")
    norm = of.module[1]  # type: ignore[index]
    assert isinstance(norm, Activated)
    norm.running_mean, norm.running_var = normal(4), normal(4).exp()
    of.module.eval()
    s = normal(2, *of.outputs().shape)
    pb = ng.pullback(of.module, of.x, Rooted(s))
    assert not pb.reasons
    assert covered(pb) == set(pb.model.params)
    close(rows(pb), oracle_rows(of, s))


def test_standardised_weights_are_no_batch() -> None:
    """The same function, of a weight: its statistics depend on the parameters, and no example on another."""

    class Standardised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.head = nn.Parameter(torch.randn(4, 6)), nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            by_row = F.batch_norm(self.weight.view(1, 4, 6), None, None, training=True)[0]
            by_column = F.batch_norm(self.weight, None, None, training=True)
            return self.head(F.linear(x, by_row).tanh() + F.linear(x, by_column).tanh())

    of = zoo.Case("", lambda: zoo.Problem(Standardised(), torch.randn(5, 6, dtype=torch.float64))).make()
    s = normal(2, *of.outputs().shape)
    close(rows(recorded(of, Rooted(s))), oracle_rows(of, s))


def test_every_step_is_that_of_a_network_of_modules() -> None:
    """Its layers have the same rules, and no operation is recorded."""
    found = []
    for norm in (Activated(4, eps=EPS), nn.Sequential(nn.BatchNorm2d(4, eps=EPS), nn.ReLU())):
        torch.manual_seed(0)
        model = _network(norm).double()
        for p in model.parameters():
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()), dtype=p.dtype)
        opt = ng.KFAC(model, ng.Euclidean(), lr=0.1)
        for seed in range(4):
            opt.zero_grad()
            x = torch.randn(6, 2, 4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
            model(x).square().sum(1).mean().backward()
            opt.step()
        assert not opt.tracker.observer.operations
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[0], found[1])


@pytest.mark.parametrize("kind", CASES)
def test_two_optimizers_watch_one_model(kind: str) -> None:
    of = problem(kind)
    alone = optimizer(copy.deepcopy(of.module))
    assert alone.tracker.model.module is not None
    alone.tracker.model.module(of.x)
    opts = [optimizer(of.module) for _ in range(2)]
    of.module(of.x)
    assert alone.tracker.fresh is not None
    for opt in opts:
        assert opt.tracker.fresh is not None
        for key, t in alone.tracker.fresh.tensors().items():
            close(opt.tracker.fresh.tensors()[key], t)


def test_another_thread_may_evaluate_the_model_meanwhile() -> None:
    class Evaluated(nn.Module):
        """Its pass has the model evaluated in another thread, between the modules of its own."""

        def __init__(self) -> None:
            super().__init__()
            self.body, self.norm, self.head = nn.Conv2d(2, 4, 2), Activated(4, eps=EPS), nn.Linear(4, 2)
            self.meanwhile = True

        def forward(self, x: Tensor) -> Tensor:
            h = self.body(x)
            if self.meanwhile and torch.is_grad_enabled():
                thread = threading.Thread(target=torch.no_grad()(self), args=(x,))
                thread.start()
                thread.join()
            return self.head(self.norm(h).mean((2, 3)))

    found = []
    for meanwhile in (False, True):
        torch.manual_seed(0)
        model = Evaluated().double()
        model.meanwhile = meanwhile
        opt = optimizer(model)
        model(normal(5, 2, 4, 4)).square().sum().backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[0], found[1])


def test_activations_that_are_computed_again_change_no_step() -> None:
    class Recomputed(nn.Module):
        def __init__(self, again: bool) -> None:
            super().__init__()
            self.again, self.head = again, nn.Linear(4, 2)
            self.body = nn.Sequential(nn.Conv2d(2, 4, 2), Activated(4, eps=EPS), nn.Conv2d(4, 4, 2))

        def forward(self, x: Tensor) -> Tensor:
            h = checkpoint(self.body, x, use_reentrant=False) if self.again else self.body(x)
            return self.head(h.mean((2, 3)))

    found = []
    for again in (False, True):
        torch.manual_seed(0)
        model = Recomputed(again).double()
        opt = ng.KFAC(model, nn.MSELoss(), lr=0.1)
        for seed in range(3):
            opt.zero_grad()
            nn.functional.mse_loss(model(normal(5, 2, 4, 4, seed=seed)), normal(5, 2)).backward()
            opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[0], found[1])


# Over several processes.


@pytest.fixture
def one_of_two(monkeypatch: pytest.MonkeyPatch) -> Iterator[Tensor]:
    """A process group that says it is one of two, whose other batch is [9 c], and on a CPU the operations of a GPU."""
    other = torch.randn(9, 4, dtype=torch.float64)

    def statistics(x: Tensor, *_: Any) -> Statistics:
        mean, variance = of_batch(torch.cat([x, other]).T)
        return mean, (variance + EPS).rsqrt()

    def standardised(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, invstd: Tensor, eps: float) -> Tensor:
        if has_torch_function((x,)):
            result: Tensor = handle_torch_function(standardised, (x,), x, weight, bias, mean, invstd, eps)
            return result
        return (x - mean) * invstd * weight + bias

    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    monkeypatch.setattr(torch, "batch_norm_stats", statistics)
    monkeypatch.setattr(torch, "batch_norm_gather_stats_with_counts", statistics)
    monkeypatch.setattr(torch, "batch_norm_elemt", standardised)
    for name in ("all_gather_single", "all_gather_into_tensor"):  # of torch 2.13, and before
        monkeypatch.setattr(torch.distributed, name, lambda out, *_, **__: out.fill_(1), raising=False)
    monkeypatch.setattr(torch._C, "_get_privateuse1_backend_name", lambda: "cpu")
    yield other
    torch.distributed.destroy_process_group()


class Synchronised(nn.SyncBatchNorm):
    """With an activation, changed in place."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input).relu_()


@pytest.mark.parametrize("kind", [nn.SyncBatchNorm, Synchronised])
def test_statistics_of_several_processes_are_constants_too(kind: type[nn.SyncBatchNorm], one_of_two: Tensor) -> None:
    of = zoo.Case(
        "",
        lambda: zoo.Problem(
            nn.Sequential(nn.Linear(3, 4), kind(4, eps=EPS), nn.Linear(4, 2)), torch.randn(5, 3, dtype=torch.float64)
        ),
    ).make()
    s = normal(2, 5, 2)
    pb = recorded(of, Rooted(s))
    assert covered(pb) == set(pb.model.params)
    with torch.no_grad():
        given = of_batch(torch.cat([of.module[0](of.x), one_of_two]).T)  # type: ignore[index]

    class Twin(nn.Sequential):
        def forward(self, input: Tensor) -> Tensor:
            first, norm, last = self
            z = normalised(first(input), given) * self.get_parameter("1.weight") + self.get_parameter("1.bias")
            twin: Tensor = last(z.relu() if isinstance(norm, Synchronised) else z)
            return twin

    assert isinstance(of.module, nn.Sequential)
    close(rows(pb), oracle_rows(zoo.Problem(Twin(*of.module), of.x), s))


def test_statistics_in_functions_are_no_constants_to_other_structures() -> None:
    """Their metric is that of the outputs of the batch, J_n = ∂y_n/∂θ, through the statistics."""
    of = problem("function")
    pb = ng.pullback(of.module, of.x, ng.Euclidean())
    params = {name: p.detach() for name, p in of.module.named_parameters()}

    def outputs(θ: dict[str, Tensor]) -> Any:
        return torch.func.functional_call(of.module, θ, (of.x,))

    J = torch.cat([j.flatten(2) for j in torch.func.jacrev(outputs)(params).values()], 2)
    close(ng.Dense().estimate(pb).dense(), torch.einsum("ndp,ndq->pq", J, J) / len(J))


def test_a_module_that_normalises_by_itself_is_refused_once_its_pass_is_over() -> None:
    class Reduced(nn.BatchNorm2d):
        def forward(self, input: Tensor) -> Tensor:
            return (input - input.mean((0, 2, 3), keepdim=True)) * self.weight.view(-1, 1, 1)

    model = _network(nn.Sequential(Activated(4), Reduced(4))).double()
    opt = optimizer(model)
    with pytest.raises(BatchStatisticsError, match=r"^1.1 \(Reduced\): .*no call of torch.nn.functional.batch_norm"):
        model(normal(5, 2, 4, 4))
    opt.zero_grad()
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules() if m is not model)


# Two values a channel.


class Pooled(nn.Module):
    """An image that is pooled to so many pixels, and normalised."""

    def __init__(self, norm: nn.Module, pixels: int) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Conv2d(2, 4, 2), norm, nn.Linear(4 * pixels, 2)
        self.pool = nn.AdaptiveAvgPool2d((pixels, 1))

    def forward(self, x: Tensor) -> Tensor:
        """[n 2 5 5] to [n 2]."""
        return self.head(self.norm(self.pool(self.body(x))).flatten(1))


@pytest.mark.parametrize("kind", [nn.BatchNorm2d, Activated])
def test_statistics_of_two_values_are_told_once_with_their_module(
    kind: type[nn.BatchNorm2d], caplog: pytest.LogCaptureFixture
) -> None:
    def told(n: int, pixels: int, *, training: bool = True) -> list[str]:
        model = Pooled(kind(4).train(training), pixels).double()
        model.norm.train(training)
        opt = ng.KFAC(model, ng.Euclidean(), metric_every=1)
        caplog.clear()
        for seed in range(2):
            opt.zero_grad()
            model(normal(n, 2, 5, 5, seed=seed)).square().sum().backward()
            opt.step()
        return [record.getMessage() for record in caplog.records if "two values" in record.getMessage()]

    (message,) = told(2, 1)
    assert message.startswith(f"norm ({kind.__name__}): a batch normalisation of two values a channel makes them ±1")
    assert "nn.GroupNorm, or put the module into evaluation mode" in message
    assert told(3, 1) == told(2, 2) == told(2, 1, training=False) == []


def test_a_pass_leaves_no_cycle_behind() -> None:
    gc.collect()
    gc.disable()
    try:
        of = problem("activated")
        opt = optimizer(of.module)
        of.module(of.x).square().sum().backward()
        opt.step()
        opt.refresh(of.x)
        ghost = weakref.ref(of.module)
        del of, opt
        assert ghost() is None
    finally:
        gc.enable()
