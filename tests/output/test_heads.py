"""Several heads: the metric is the weighted sum of theirs, by every structure, in a dict and in a tuple."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.structures import Structure
from tests import oracle
from tests.families.test_families import Unread
from tests.optim.tasks import resumes, seeded, silent
from tests.pulled import close, normal

WEIGHTS = {"kind": 1.0, "box": 0.3}
METRICS = {"kind": ng.Fisher(ng.Categorical()), "box": ng.Euclidean()}


class Detector(nn.Module):
    """One body; classes [n 3] and boxes [n 2 2], as a dict, a tuple, or with something else beside them."""

    def __init__(self, kind: str = "dict") -> None:
        super().__init__()
        self.body, self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 4)
        self.kind = kind

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        kind, box = self.first(h), self.second(h).unflatten(1, (2, 2))
        return {"kind": kind, "box": box, "hidden": h} if self.kind == "dict" else (kind, box)


def detector(kind: str = "dict") -> Detector:
    return seeded(lambda: Detector(kind).double())


def heads(kind: str = "dict", **options: Any) -> ng.Heads:
    if kind == "dict":
        return ng.Heads(METRICS, WEIGHTS, **options)
    return ng.Heads(dict(enumerate(METRICS.values())), dict(enumerate(WEIGHTS.values())), **options)


def flat_head(key: str, out: Any) -> Tensor:
    head: Tensor = out[key] if isinstance(out, dict) else out[list(WEIGHTS).index(key)]
    return head.flatten(1)


def both(out: Any) -> Tensor:
    """The heads side by side."""
    return torch.cat([flat_head(key, out) for key in WEIGHTS], 1)


def expected(model: nn.Module, x: Tensor) -> Tensor:
    """Σ_k w_k J_kᵀ h_k J_k / N."""
    with silent(model):
        total = None
        for (key, w), h in zip(WEIGHTS.items(), (oracle.categorical, oracle.euclidean), strict=True):
            read = partial(flat_head, key)
            part = w * oracle.dense(oracle.module_jacobian(model, x, read), h(read(model(x)).detach()))
            total = part if total is None else total + part
    assert total is not None
    return total


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_the_metric_is_the_weighted_sum_of_those_of_the_heads(kind: str) -> None:
    model, x = detector(kind), normal(5, 3)
    pb = ng.pullback(model, x, heads(kind))
    G = expected(model, x)
    close(ng.Dense().estimate(pb).dense(), G)
    close(ng.Diagonal().estimate(pb).diagonal(), G.diagonal())
    v = ng.Vector({name: torch.ones_like(p) for name, p in model.named_parameters()})
    close(ng.Implicit().estimate(pb).flat(v).flatten(), G.sum(1))
    close(ng.Kernel().estimate(pb).dense(), G)


def test_examples_have_weights_as_with_one_output() -> None:
    model, x = detector(), normal(2, 3)
    weighted = ng.pullback(model, x, ng.functionspace.Weighted(torch.tensor([0.25, 0.75]), heads()))
    close(ng.Dense().estimate(weighted).dense(), expected(model, x[[0, 1, 1, 1]]))


@pytest.mark.parametrize(
    "metric",
    [
        ng.functionspace.Weighted(torch.tensor([0.25, 0.75]), heads()),
        ng.Sobolev(base=heads(), lengthscale=torch.tensor(2.0)),
        ng.Sampled(heads()),
    ],
)
def test_a_metric_that_is_made_of_heads_is_not_checked_again_in_every_pass(metric: Any) -> None:
    with Unread():  # type: ignore[no-untyped-call]
        made = metric.only(["kind"]).unflattened().shaped([torch.Size([2, 3])])
    assert type(made) is type(metric)
    assert made.heads == ("kind",)
    assert metric.heads == ("kind", "box")


def test_in_pieces_that_fit_into_memory_it_is_the_same() -> None:
    model, x = detector(), normal(40, 3)
    close(
        ng.Diagonal().estimate(ng.pullback(model, x, heads(), memory=30_000)).diagonal(), expected(model, x).diagonal()
    )


def test_a_sampled_metric_has_its_mean() -> None:
    model, x = detector(), normal(3, 3)
    metric = ng.Heads(
        {"kind": ng.Fisher(ng.Categorical(), samples=4000), "box": ng.Sampled(ng.Euclidean(), 4000)}, WEIGHTS
    )
    pb = ng.pullback(model, x, metric, generator=torch.Generator().manual_seed(0))
    assert pb.root.shape[0] == 4000
    G = expected(model, x)
    assert (ng.Dense().estimate(pb).dense() - G).norm() < 0.05 * G.norm()
    mixed = ng.Heads({"kind": ng.Fisher(ng.Categorical(), samples=2), "box": ng.Euclidean()})
    assert ng.pullback(model, x, mixed).root.shape == (2 + 4, 3, 7)


def test_one_head_is_the_metric_of_its_output() -> None:
    model, x = detector(), normal(5, 3)
    alone = ng.pullback(model, x, METRICS["kind"], output=lambda out: out["kind"])
    pb = ng.pullback(model, x, ng.Heads({"kind": METRICS["kind"]}))
    for structure in (ng.Kronecker(), ng.EigenKronecker(), ng.Dense()):
        one, other = structure.estimate(pb).tensors(), structure.estimate(alone).tensors()
        assert one.keys() == other.keys()
        for key in one:
            close(one[key].abs(), other[key].abs(), 1e-8)


def test_one_head_with_class_weights_has_the_targets_of_its_loss() -> None:
    loss, t, x = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]).double()), torch.arange(6) % 3, normal(6, 3)
    found = []
    for metric, output in (({"kind": loss}, None), (loss, lambda out: out["kind"])):
        model = detector()
        opt = ng.NaturalGradient(model, metric, output=output)
        loss(model(x)["kind"], t).backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[0], found[1])


def test_divergences_add_up() -> None:
    model, x = detector(), normal(5, 3)
    pb = ng.pullback(model, x, heads())
    y0 = pb.y
    y = y0 + 0.1 * normal(*y0.shape, seed=3)
    parts = [METRICS["kind"].divergence(y[:, :3], y0[:, :3]), 0.3 * METRICS["box"].divergence(y[:, 3:], y0[:, 3:])]
    close(pb.metric.divergence(y, y0), parts[0] + parts[1])


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    out = model(x)
    t, u = (x[:, 0] > 0).long(), x[:, :1, None].expand(-1, 2, 2)
    return F.cross_entropy(out["kind"], t) + 0.3 * 0.5 * (out["box"] - u).square().sum((1, 2)).mean()


STEPS: dict[str, tuple[Structure, dict[str, Any]]] = {
    "dense": (ng.Dense(), {}),
    "trust": (ng.Dense(), {"step": ng.TrustRegion(0.01)}),
}


@pytest.mark.parametrize("name", STEPS)
def test_a_step_is_that_of_the_dense_metric_of_all_heads(name: str) -> None:
    structure, options = STEPS[name]
    model, x = detector(), normal(6, 3)
    before = oracle.flatten(model.parameters())
    v = oracle.damped(expected(model, x), oracle.differential(model, loss_of(model, x)), 0.1)
    opt = ng.NaturalGradient(model, heads(), structure=structure, lr=0.5, damping=0.1, **options)
    loss_of(model, x).backward()
    opt.step()
    step = before - oracle.flatten(model.parameters())
    close(step / step.norm(), v / v.norm(), 1e-8)


class ActorCritic(nn.Module):
    """Actions [n 3], and the value of a state as one number an example, [n]."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actions, self.value = nn.Linear(3, 4), nn.Linear(4, 3), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.body(x))
        return self.actions(h), self.value(h).squeeze(-1)


@pytest.mark.parametrize("metric", ["heads", "losses"])
def test_a_head_may_have_one_number_an_example_and_no_axis_for_it(metric: str) -> None:
    model, x, t, r = seeded(lambda: ActorCritic().double()), normal(6, 3), torch.arange(6) % 3, normal(6)
    given: Any = (nn.CrossEntropyLoss(), nn.MSELoss())
    if metric == "heads":
        given = ng.Heads({0: ng.Fisher(ng.Categorical()), 1: ng.Euclidean()}, {1: 2.0})
    policy = oracle.dense(oracle.module_jacobian(model, x, lambda out: out[0]), oracle.categorical(model(x)[0]))
    J = oracle.module_jacobian(model, x, lambda out: out[1].unsqueeze(1))  # [n 1 P]
    G = policy + 2 * oracle.dense(J, oracle.euclidean(normal(6, 1)))  # the mean of r² has the Hessian 2
    logits, value = model(x)
    loss = F.cross_entropy(logits, t) + F.mse_loss(value, r)
    v = oracle.damped(G, oracle.differential(model, loss), 0.1)
    before = oracle.flatten(model.parameters())
    opt = ng.NaturalGradient(model, given, lr=0.5, damping=0.1, strict=True)
    logits, value = model(x)
    (F.cross_entropy(logits, t) + F.mse_loss(value, r)).backward()
    opt.step()
    close((before - oracle.flatten(model.parameters())) / 0.5, v, 1e-8)


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC, ng.Natural])
def test_presets_train_and_resume(preset: Any) -> None:
    x = normal(8, 3)

    def made() -> tuple[nn.Module, ng.NaturalGradient]:
        model = detector()
        return model, preset(model, heads(), lr=0.05)

    def step(model: nn.Module, opt: ng.NaturalGradient, at: int) -> None:
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()

    model, opt = made()
    first = loss_of(model, x).item()
    for at in range(20):
        step(model, opt, at)
    assert loss_of(model, x).item() < 0.7 * first
    resumes(made, step)


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_natural_gradient_gives_the_loss_the_heads_by_their_keys_in_their_shapes(kind: str) -> None:
    model, x = detector(kind), normal(5, 3)
    first, second = ("kind", "box") if kind == "dict" else (0, 1)

    def loss(y: Any) -> Tensor:
        assert y[second].shape == (5, 2, 2)
        return y[first].pow(3).sum() + y[second].square().sum()

    v = ng.natural_gradient(model, x, loss, heads(kind), damping=0.1)
    gradient = torch.autograd.grad(loss(model(x)), list(model.parameters()))
    ω = torch.cat([g.flatten() for g in gradient])
    G = expected(model, x)
    close(v.flatten(), torch.linalg.solve(G + 0.1 * torch.eye(len(G), dtype=G.dtype), ω))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_the_gradient_flow_of_two_heads_is_that_of_the_heads_side_by_side(kind: str) -> None:
    model, x = detector(kind), normal(5, 3)
    first, second = ("kind", "box") if kind == "dict" else (0, 1)
    metric = ng.Heads({first: ng.Euclidean(), second: ng.Euclidean()})
    flow = ng.functionspace.gradient_flow(
        model, x, lambda y: y[first].square().sum() + y[second].square().sum(), metric, 0.2, points=3, damping=0.1
    )
    joined = ng.functionspace.gradient_flow(
        model, x, lambda y: y.square().sum(), ng.Euclidean(), 0.2, points=3, damping=0.1, output=both
    )
    close(flow.outputs, joined.outputs)
    close(flow.losses, joined.losses)


def test_wrong_heads_are_refused_by_name() -> None:
    model, x = detector(), normal(5, 3)
    with pytest.raises(ValueError, match=r"the losses name a head 'mask', and the model returned 'kind', 'box'"):
        ng.pullback(model, x, ng.Heads({"mask": ng.Euclidean()}))
    with pytest.raises(ValueError, match=r"weights= names 'mask', and the heads are 'kind', 'box'"):
        ng.Heads(METRICS, {"mask": 1.0})
    with pytest.raises(ValueError, match=r"finite and ≥ 0 in a metric, got -1\.0 for 'box'"):
        ng.Heads(METRICS, {"box": -1.0})
    with pytest.raises(TypeError, match=r"the head 'kind' needs a metric, got <function.*ng\.metric_of makes one"):
        ng.Heads({"kind": F.cross_entropy})  # type: ignore[dict-item]
    with pytest.raises(TypeError, match=r"the head 'kind' needs a metric on its outputs, got BatchGradient"):
        ng.Heads({"kind": ng.BatchGradient()})
    with pytest.raises(TypeError, match=r"Heads takes a dict of metrics .* not a tuple: write Heads\(\{0: "):
        ng.Heads(tuple(METRICS.values()))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="needs a metric for every head, and got none"):
        ng.Heads({})
    with pytest.raises(ValueError, match=r"are not 2 heads of \[\] numbers"):
        heads().flat(torch.zeros(1, 7), torch.zeros(1, 7))
    with pytest.raises(ValueError, match='examples="inputs" is for one output'):
        ng.pullback(model, x, heads(), examples="inputs")
    short = nn.ModuleDict({"a": nn.Linear(3, 2)}).double()
    short.forward = lambda x: (short["a"](x), short["a"](x)[:2])
    with pytest.raises(ValueError, match="all heads need the n examples on their first axis, and have 0 5, 1 2"):
        ng.pullback(short, x, ng.Heads({0: ng.Euclidean(), 1: ng.Euclidean()}))


@pytest.mark.parametrize("kind", ["dict", "tuple"])
@pytest.mark.parametrize("targets", [False, True])
def test_a_dict_or_tuple_of_losses_is_the_hessian_of_their_weighted_sum(kind: str, targets: bool) -> None:
    """Each mean is over the terms of its own head: n classes, and 4 n coordinates."""
    model, x = detector(kind), normal(5, 3)
    t, u = torch.arange(5) % 3, normal(5, 2, 2)
    losses: Any = {"kind": F.cross_entropy, "box": nn.MSELoss()} if kind == "dict" else (F.cross_entropy, nn.MSELoss())
    metric = ng.metric_of(losses, weights=WEIGHTS if kind == "dict" else [1.0, 0.3])

    def total(y: Tensor) -> Tensor:
        return F.cross_entropy(y[:, :3], t) + 0.3 * F.mse_loss(y[:, 3:], u.flatten(1))

    with silent(model):
        J = oracle.module_jacobian(model, x, both)
        H: Tensor = torch.autograd.functional.hessian(total, both(model(x)).detach())
        J = J.flatten(0, 1)
        G = J.T @ H.reshape(len(J), len(J)) @ J
    target = ({"kind": t, "box": u} if kind == "dict" else (t, u)) if targets else None
    close(ng.Dense().estimate(ng.pullback(model, x, metric, target)).dense(), G)


def test_one_line_trains_two_heads() -> None:
    model, x = detector(), normal(8, 3)
    opt = ng.Natural(model, {"kind": F.cross_entropy, "box": F.mse_loss}, lr=0.02)
    first = loss_of(model, x).item()
    for _ in range(20):
        opt.zero_grad()
        loss_of(model, x).backward()
        opt.step()
    assert loss_of(model, x).item() < 0.7 * first


def test_weights_belong_to_several_losses() -> None:
    with pytest.raises(ValueError, match="weights= are those of several losses"):
        ng.metric_of(F.mse_loss, weights=[1.0])


@pytest.mark.parametrize("kind", ["dict", "tuple"])
def test_the_user_s_backward_pass_shows_which_labels_are_ignored_and_the_targets_of_each_head(kind: str) -> None:
    """The metric of the loop is that of the targets, by brute force: two heads, each with its own weights of terms."""
    model, x = detector(kind), normal(6, 3)
    t, b = torch.tensor([0, 1, -100, 2, -100, 1]), torch.arange(12).reshape(6, 2) % 2
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([0.2, 1.5], dtype=torch.float64))
    losses: Any = {"kind": F.cross_entropy, "box": weighted} if kind == "dict" else (F.cross_entropy, weighted)
    metric = ng.metric_of(losses)
    opt = ng.NaturalGradient(model, metric, lr=0.0, damping=0.1)

    def total(y: Tensor) -> Tensor:
        return F.cross_entropy(y[:, :3], t) + weighted(y[:, 3:].reshape(6, 2, 2), b)

    with silent(model):
        H: Tensor = torch.autograd.functional.hessian(total, both(model(x)).detach())
        J = oracle.module_jacobian(model, x, both).flatten(0, 1)
    for _ in range(2):
        out = model(x)
        kinds, boxes = (out["kind"], out["box"]) if kind == "dict" else out
        (F.cross_entropy(kinds, t) + weighted(boxes, b)).backward()
        opt.step()
        assert opt.tracker.average is not None
        close(opt.tracker.average.dense(), J.T @ H.reshape(len(J), len(J)) @ J)


@dataclass(frozen=True)
class Detection:
    """What a model may return in place of a dict."""

    kind: Tensor
    box: Tensor


class InDataclass(Detector):
    def forward(self, x: Tensor) -> Detection:
        kind, box, _ = super().forward(x).values()
        return Detection(kind, box)


class Fields:
    """An object that stores its attributes in its own way."""

    def __init__(self, **tensors: Tensor) -> None:
        vars(self)["tensors"] = tensors

    def __copy__(self) -> Fields:
        return Fields(**self.tensors)

    def __getattribute__(self, name: str) -> Any:
        stored = {} if name.startswith("_") else object.__getattribute__(self, "__dict__").get("tensors", {})
        return stored[name] if name in stored else object.__getattribute__(self, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self.tensors[name] = value


class InFields(Detector):
    def forward(self, x: Tensor) -> Any:
        kind, box, _ = super().forward(x).values()
        return Fields(kind=kind, box=box)


@pytest.mark.parametrize("several", [True, False])
def test_an_object_shows_which_labels_are_ignored_as_a_dict_does(several: bool) -> None:
    losses, t, x = {"kind": nn.CrossEntropyLoss(), "box": nn.MSELoss()}, torch.tensor([0, -100, 2, -100]), normal(4, 3)
    found = []
    cases: tuple[tuple[type[Detector], Callable[[Any], Tensor]], ...] = (
        (Detector, lambda out: out["kind"]),
        (InDataclass, lambda out: out.kind),
        (InFields, lambda out: out.kind),
    )
    for build, kind_of in cases:
        model = seeded(lambda build=build: build().double())  # type: ignore[misc]
        metric: Any = losses if several else losses["kind"]
        opt = ng.NaturalGradient(model, metric, output=None if several else kind_of, strict=True)
        out = model(x)
        loss = losses["kind"](kind_of(out), t)
        if several:
            box = out["box"] if isinstance(out, dict) else out.box
            loss = loss + losses["box"](box, torch.ones_like(box))
        loss.backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    of_dict, *of_objects = found
    for of_object in of_objects:
        close(of_dict, of_object)


class WithNumber(Detector):
    """A penalty beside the outputs, as the loss of a router; with None of ``kind`` the outputs alone."""

    def forward(self, x: Tensor) -> Any:
        h = torch.tanh(self.body(x))
        y, penalty = self.first(h), h.square().mean()
        return {"dict": {"penalty": penalty, "y": y}, "tuple": (y, penalty)}.get(self.kind, {"y": y})


@pytest.mark.parametrize(
    "weight", [None, torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)], ids=["plain", "weighted"]
)
@pytest.mark.parametrize("several", [True, False])
def test_a_number_beside_the_outputs_does_not_hide_which_labels_are_ignored(several: bool, weight: Any) -> None:
    loss, t, x = nn.CrossEntropyLoss(weight=weight), torch.tensor([0, -100, 2, -100]), normal(4, 3)
    found = []
    for kind in ("alone", "dict", "tuple"):
        key = 0 if kind == "tuple" else "y"
        model = seeded(lambda kind=kind: WithNumber(kind).double())  # type: ignore[misc]
        metric: Any = {key: loss} if several else loss
        opt = ng.NaturalGradient(model, metric, output=None if several else itemgetter(key))
        loss(model(x)[key], t).backward()
        opt.step()
        found.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
    close(found[1], found[0])
    close(found[2], found[0])


def test_a_loss_that_needs_its_targets_and_is_not_called_is_named() -> None:
    model, x = detector(), normal(6, 3)
    weighted = nn.CrossEntropyLoss(weight=torch.ones(3, dtype=torch.float64))
    opt = ng.KFAC(model, {"kind": weighted, "box": F.mse_loss})
    loss_of(model, x).backward()
    with pytest.raises(ng.errors.NatgradError, match=r"needs the targets: call the loss .* CrossEntropyLoss\(\)"):
        opt.step()


def test_a_head_that_one_batch_does_not_train_leaves_the_metric_of_the_others() -> None:
    model, x = detector(), normal(6, 3)
    opt = ng.NaturalGradient(model, {"kind": F.cross_entropy, "box": nn.CrossEntropyLoss()}, lr=0.1, damping=0.1)
    F.cross_entropy(model(x)["kind"], torch.arange(6) % 3).backward()
    assert model.second.weight.grad is None
    opt.step()
    alone = ng.pullback(detector(), x, ng.metric_of(F.cross_entropy), output=lambda out: out["kind"])
    assert opt.tracker.average is not None
    close(opt.tracker.average.dense(), ng.Dense().estimate(alone).dense())


def test_tasks_take_turns_and_a_head_keeps_its_average_while_another_is_trained() -> None:
    model, x = detector(), normal(6, 3)
    losses: dict[str, Any] = {"kind": F.cross_entropy, "box": F.mse_loss}
    opt = ng.KFAC(model, ng.metric_of(losses), lr=0.0, metric_every=1, decay=0.5)
    targets = {"kind": torch.arange(6) % 3, "box": normal(6, 2, 2)}
    seen = []
    for key in ("kind", "box", "kind", "box"):
        opt.zero_grad()
        losses[key](model(x)[key], targets[key]).backward()
        opt.step()
        assert opt.tracker.average is not None
        seen.append({name: t.clone() for name, t in opt.tracker.average.tensors().items()})
    assert "second.weight/S" not in seen[0]
    for side in "SA":
        for one, other in ((0, 1), (0, 3)):
            close(seen[one][f"first.weight/{side}"], seen[other][f"first.weight/{side}"])
        close(seen[1][f"second.weight/{side}"], seen[3][f"second.weight/{side}"])
    assert not torch.allclose(seen[0]["body.weight/S"], seen[1]["body.weight/S"])


def test_the_user_may_change_a_head_in_place() -> None:
    changed, kept, x = detector(), detector(), normal(6, 3)
    kept.load_state_dict(changed.state_dict())
    for model, sigmoid in ((changed, torch.sigmoid_), (kept, torch.sigmoid)):
        metric = {"kind": F.cross_entropy, "box": F.mse_loss}
        opt = ng.KFAC(model, metric, generator=torch.Generator().manual_seed(0))
        out = model(x)
        (F.cross_entropy(out["kind"], torch.arange(6) % 3) + sigmoid(out["box"]).mean()).backward()
        opt.step()
    torch.testing.assert_close(changed.state_dict(), kept.state_dict())


def test_laplace_and_divergences_of_several_heads_are_those_of_the_heads_side_by_side() -> None:
    model, x, losses = detector(), normal(5, 3), {"kind": F.mse_loss, "box": F.mse_loss}
    posterior = ng.vi.Laplace(model, x, losses)
    joined = ng.vi.Laplace(nn.Sequential(model, Joined()), x, ng.Fisher(ng.Gaussian(scale=0.5**0.5)))
    close(posterior.operator.dense(), joined.operator.dense())
    close(posterior.predictive(x).covariance, joined.predictive(x).covariance)
    u, w = ({name: normal(*p.shape, seed=k) for name, p in model.named_parameters()} for k in (1, 2))
    y, y0 = (torch.func.functional_call(model, at, (x,)) for at in (u, w))
    rho = ng.proximal.pulled_back(model, x, losses)
    close(rho(u, w), sum((F.mse_loss(y[key], y0[key]) for key in losses), torch.zeros(()).double()))
    assert ng.functionspace.basin_volume(model, x, 0.1, losses).trace > 0


class Joined(nn.Module):
    def forward(self, out: Any) -> Tensor:
        return both(out)


def test_a_variational_network_has_one_output() -> None:
    with pytest.raises(TypeError, match="VariationalNetwork takes one output, and Heads"):
        ng.vi.VariationalNetwork(detector(), heads(), ng.Dense(), ng.vi.Prior(1.0, 5))


def test_heads_are_diagnosed_in_double_precision_and_have_geodesics() -> None:
    model, x = detector(), normal(5, 3)
    found = ng.diagnose(ng.pullback(model, x, heads()))
    single = ng.diagnose(ng.pullback(detector().float(), x.float(), heads()))
    assert single.spectrum.dtype == torch.float64
    assert single.rank == found.rank == int(torch.linalg.matrix_rank(expected(model, x), hermitian=True))
    v = ng.Vector({name: 1e-3 * normal(*p.shape) for name, p in model.named_parameters()})
    end = ng.step.exponential(model, x, heads(), v, steps=2, damping=1e-3)
    assert all(torch.isfinite(p).all() for p in end.values())
