"""The optimizer in the user's loop: groups, momentum, weight decay, schedulers, clipping."""

import copy
import io
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

import natgrad as ng
from natgrad.errors import NatgradError
from tests import oracle
from tests.optim.states import whole
from tests.optim.tasks import KINDS, Task, task


def _assign(of: Task, θ: Tensor) -> None:
    like = oracle.parameters(of.model)
    with torch.no_grad():
        for p, value in zip(like.values(), oracle.unflatten(θ, like).values(), strict=True):
            p.copy_(value)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.9, 0.0), (0.0, 0.3), (0.5, 0.1)])
@pytest.mark.parametrize("kind", ["regression", "classes"])
def test_momentum_is_of_vectors_and_weight_decay_is_decoupled(kind: str, momentum: float, weight_decay: float) -> None:
    """m ← μm + (G + λ)⁻¹ω, θ ← (1 − lr·wd)θ − lr·m."""
    hand, of = task(kind), task(kind)
    opt = of.optimizer(lr=0.2, damping=0.1, momentum=momentum, weight_decay=weight_decay)
    m = torch.zeros(17, dtype=torch.float64)
    for _ in range(5):
        m = momentum * m + oracle.damped(hand.metric(), hand.gradient(), 0.1)
        _assign(hand, (1 - 0.2 * weight_decay) * hand.theta() - 0.2 * m)
        of.step(opt)
        torch.testing.assert_close(of.theta(), hand.theta(), rtol=1e-9, atol=1e-11)


def test_groups_have_their_own_numbers_and_share_one_metric() -> None:
    """The metric, and so the natural gradient, is of all parameters; only then do the groups scale their part."""
    hand, of = task(), task()
    head = {"params": of.model.get_submodule("2").parameters(), "lr": 0.05, "weight_decay": 0.4, "momentum": 0.0}
    opt = of.optimizer(lr=0.2, damping=0.1, momentum=0.9, groups=[head])
    assert [len(group["params"]) for group in opt.param_groups] == [2, 2]  # the parameters nobody named come first
    body = torch.arange(17) < 9
    lr, momentum, decay = torch.tensor([[0.2, 0.9, 0.0], [0.05, 0.0, 0.4]], dtype=torch.float64)[(~body).long()].T
    m = torch.zeros(17, dtype=torch.float64)
    for _ in range(4):
        m = momentum * m + oracle.damped(hand.metric(), hand.gradient(), 0.1)
        _assign(hand, (1 - lr * decay) * hand.theta() - lr * m)
        of.step(opt)
    torch.testing.assert_close(of.theta(), hand.theta(), rtol=1e-9, atol=1e-11)


def test_frozen_parameters_stay_and_are_not_in_the_metric() -> None:
    of = task()
    of.model.get_submodule("0").requires_grad_(False)
    frozen = of.model.get_parameter("0.weight").detach().clone()
    opt = of.optimizer(damping=0.1, weight_decay=0.5)
    of.step(opt)
    assert torch.equal(of.model.get_parameter("0.weight"), frozen)
    assert whole(opt)["natgrad"]["operator"]["matrix"].shape == (8, 8)


@pytest.mark.parametrize("as_list", [True, False])
def test_a_group_of_one_tensor_is_accepted_as_in_torch(as_list: bool) -> None:
    of = task()
    weight = of.model.get_parameter("0.weight")
    opt = of.optimizer(groups=[{"params": [weight] if as_list else weight, "lr": 0.0}])
    before = weight.detach().clone()
    of.step(opt)
    assert torch.equal(weight, before)
    assert not torch.equal(of.theta(), task().theta())


SCHEDULERS: dict[str, tuple[Callable[[torch.optim.Optimizer], Any], list[float]]] = {
    "step": (lambda opt: StepLR(opt, step_size=2, gamma=0.1), [0.2, 0.2, 0.02, 0.02]),
    "lambda": (lambda opt: LambdaLR(opt, lambda k: 1 / (k + 1)), [0.2, 0.1, 0.2 / 3, 0.05]),
    "plateau": (lambda opt: ReduceLROnPlateau(opt, factor=0.5, patience=0), [0.2, 0.2, 0.1, 0.05]),
}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_set_the_learning_rate_of_the_next_step(name: str) -> None:
    make, rates = SCHEDULERS[name]
    hand, of = task(), task()
    opt = of.optimizer(lr=0.2, damping=0.1)
    scheduler = make(opt)
    for lr in rates:
        _assign(hand, hand.theta() - lr * oracle.damped(hand.metric(), hand.gradient(), 0.1))
        of.step(opt)
        scheduler.step(*([1.0] if name == "plateau" else []))  # a loss that never falls
    torch.testing.assert_close(of.theta(), hand.theta(), rtol=1e-9, atol=1e-11)


def test_one_cycle_moves_the_learning_rate_and_the_momentum() -> None:
    hand, of = task(), task()
    opt = of.optimizer(lr=0.2, damping=0.1, momentum=0.9)
    scheduler = OneCycleLR(opt, max_lr=0.5, total_steps=6)
    m = torch.zeros(17, dtype=torch.float64)
    seen = set()
    for _ in range(5):
        lr, momentum = opt.param_groups[0]["lr"], opt.param_groups[0]["momentum"]
        seen.add((lr, momentum))
        m = momentum * m + oracle.damped(hand.metric(), hand.gradient(), 0.1)
        _assign(hand, hand.theta() - lr * m)
        of.step(opt)
        scheduler.step()
    assert len(seen) == 5
    torch.testing.assert_close(of.theta(), hand.theta(), rtol=1e-9, atol=1e-11)


def test_the_damping_may_change_between_steps() -> None:
    hand, of = task(), task()
    opt = of.optimizer(lr=0.2, damping=0.1, structure=ng.Refresh(ng.Dense(), every=10))
    G = hand.metric()
    for damping in (0.1, 0.1, 1.0, 0.01):
        opt.param_groups[0]["damping"] = damping
        _assign(hand, hand.theta() - 0.2 * oracle.damped(G, hand.gradient(), damping))
        of.step(opt)
    torch.testing.assert_close(of.theta(), hand.theta(), rtol=1e-9, atol=1e-11)


def test_gradients_are_clipped_before_the_step_and_the_metric_is_not() -> None:
    of = task()
    ω = of.gradient()
    expected = of.theta() - 0.2 * oracle.damped(of.metric(), ω * (0.01 / ω.norm()), 0.1)
    opt = of.optimizer(lr=0.2, damping=0.1)
    of.closure(opt)()
    nn.utils.clip_grad_norm_(of.model.parameters(), 0.01)
    opt.step()
    torch.testing.assert_close(of.theta(), expected, rtol=1e-4, atol=1e-9)  # torch adds 1e-6 to the norm


@pytest.mark.parametrize("kind", KINDS)
def test_the_loop_of_torch_optim_trains(kind: str) -> None:
    of = task(kind)
    opt: torch.optim.Optimizer = of.optimizer(lr=0.5, damping=1e-2)
    first = float(of.loss().detach())
    for _ in range(30):
        opt.zero_grad()
        loss = of.kind.loss(of.model(of.x), of.t)
        loss.backward()
        opt.step()
    assert float(loss.detach()) < 0.9 * first
    assert isinstance(opt, torch.optim.Optimizer)


def test_backward_and_its_graph_are_the_user_s_own() -> None:
    """Estimating the metric writes to no .grad and frees no graph."""
    of, plain = task(), task()
    opt = of.optimizer()
    loss = of.loss()
    assert opt.tracker.has_estimate
    assert all(p.grad is None for p in of.model.parameters())
    loss.backward()
    plain.loss().backward()
    for p, q in zip(of.model.parameters(), plain.model.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)


@pytest.mark.parametrize("structure", [ng.Dense(), ng.Implicit()])
def test_a_copy_of_the_model_is_not_watched(structure: ng.structures.Structure) -> None:
    """Averaged and saved models are copies: they carry neither the metric nor its graph."""
    of = task()
    solver = ng.CG() if isinstance(structure, ng.Implicit) else ng.Cholesky()
    opt = of.optimizer(structure=structure, solver=solver)
    of.step(opt)
    twin = copy.deepcopy(of.model)
    average = torch.optim.swa_utils.AveragedModel(of.model)
    file = io.BytesIO()
    torch.save(of.model, file)
    assert file.tell() < 20_000
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    rest = task()
    other = rest.optimizer(structure=structure, solver=solver)
    rest.step(other)
    for _ in range(2):
        for model in (twin, average, loaded):
            model(torch.full((5, 2), 9.0, dtype=torch.float64))  # no training pass of opt
        of.step(opt)
        rest.step(other)
    assert torch.equal(of.theta(), rest.theta())


class Meeting(nn.Module):
    """Inside the first call another thread calls the whole model; its pass ends when ``leave`` is set."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.inside, self.leave, self.problems = threading.Event(), threading.Event(), list[Exception]()
        self.call, self.worker = call, threading.Thread(target=self.work)

    def work(self) -> None:
        try:
            self.call()
        except NatgradError as error:
            self.problems.append(error)
        self.inside.set()

    def forward(self, x: Tensor) -> Tensor:
        if threading.current_thread() is self.worker:
            self.inside.set()
            self.leave.wait(10)
        elif self.worker.ident is None:
            self.worker.start()
            self.inside.wait(10)
        return x


@pytest.mark.parametrize("metric", [ng.Euclidean(), nn.MSELoss(), ng.Empirical()])
def test_an_evaluation_in_another_thread_does_not_change_a_step(metric: Any) -> None:
    def step(*, together: bool) -> Tensor:
        torch.manual_seed(0)
        layers, x = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)], torch.randn(6, 3).double()
        model = nn.Sequential(*layers).double()
        meeting = Meeting(torch.no_grad()(lambda: model(x[:4])))
        if together:
            model.insert(1, meeting)
        opt = ng.KFAC(model, metric if isinstance(metric, ng.Empirical) else ng.metric_of(metric), lr=0.1)
        loss = nn.functional.mse_loss(model(x), x[:, :2])
        meeting.leave.set()
        if together:
            meeting.worker.join()
        loss.backward()
        opt.step()
        assert not meeting.problems
        return oracle.flatten(model.parameters())

    assert torch.equal(step(together=True), step(together=False))


def test_two_threads_that_train_one_model_at_once_are_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    meeting = Meeting(lambda: model(torch.ones(4, 3)))
    model.insert(1, meeting)
    opt = ng.KFAC(model, ng.Euclidean())
    loss = model(torch.ones(5, 3)).square().mean()
    meeting.worker.join()
    with pytest.raises(NatgradError, match=r"two threads call the model at once.*under torch\.no_grad\(\)"):
        raise meeting.problems[0]
    loss.backward()
    opt.step()


class _Empty(nn.Module):
    """A linear layer, beside one without outputs, one without inputs, and a parameter without entries."""

    def __init__(self) -> None:
        super().__init__()
        self.whole, self.rows = nn.Linear(3, 2, bias=False), nn.Parameter(torch.zeros(0, 3))
        self.outputs, self.inputs = nn.Linear(3, 0), nn.Linear(0, 2, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.whole(x) + self.inputs(x[:, :0]) + self.rows.sum()
        return torch.cat([y, self.outputs(x)], 1)


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize(
    "make",
    [
        lambda model: ng.KFAC(model, ng.Euclidean()),
        lambda model: ng.EKFAC(model, ng.Euclidean()),
        lambda model: ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kernel(), damping=0.1),
        lambda model: ng.NaturalGradient(model, ng.Euclidean(), damping=0.1),
        lambda model: ng.Natural(model),
        lambda model: ng.Natural(model, groups=[{"params": [p], "lr": 0.1} for p in model.parameters() if p.ndim == 1]),
    ],
)
def test_parameters_without_entries_do_not_change_a_step(make: Callable[[nn.Module], torch.optim.Optimizer]) -> None:
    empty = _Empty().double()
    plain = nn.Linear(3, 2, bias=False).double()
    plain.load_state_dict(empty.whole.state_dict())
    x = torch.randn(5, 3, dtype=torch.float64)
    for model in (empty, plain):
        opt = make(model)
        model(x).square().sum(1).mean().backward()
        opt.step()
    torch.testing.assert_close(empty.whole.weight, plain.weight)
