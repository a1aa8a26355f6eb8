"""Metrics of losses: G = Jᵀ ∇²L J of torch's own loss, in float64, against Jacobians and Hessians by autograd."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import IncompatibleError
from natgrad.step import christoffel
from tests.optim.tasks import resumes

N = 5


def model(*shape: int, last: Callable[[Tensor], Tensor] = lambda y: y) -> nn.Module:
    """A network from [n 3] to [n *shape]."""

    class Last(nn.Module):
        def forward(self, y: Tensor) -> Tensor:
            return last(y.unflatten(1, shape))

    torch.manual_seed(0)
    d = torch.Size(shape).numel()
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, d), Last()).double()


def inputs() -> Tensor:
    return torch.randn(N, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def gauss_newton(net: nn.Module, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """Jᵀ ∇²L J [p p] of a loss of all outputs, brute force, with negative eigenvalues of ∇²L set to 0."""
    params = dict(net.named_parameters())
    sizes = {name: p.numel() for name, p in params.items()}

    def outputs(flat: Tensor) -> Tensor:
        parts = flat.split(list(sizes.values()))
        placed = {name: v.view_as(params[name]) for name, v in zip(sizes, parts, strict=True)}
        y: Tensor = torch.func.functional_call(net, placed, (x,))
        return y

    θ = torch.cat([p.detach().flatten() for p in params.values()])
    y = outputs(θ).detach()
    J = torch.autograd.functional.jacobian(outputs, θ).reshape(y.numel(), -1)
    H = torch.autograd.functional.hessian(loss, y).reshape(y.numel(), y.numel())
    λ, V = torch.linalg.eigh(H)
    return J.T @ (V * λ.clamp(min=0)) @ V.T @ J


def dense(net: nn.Module, x: Tensor, loss: Any, target: Any) -> Tensor:
    return ng.Dense().estimate(ng.pullback(net, x, loss, target=target)).dense()


def labels(*shape: int, classes: int = 3, ignored: int | None = None) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    t = torch.randint(classes, (N, *shape), generator=generator)
    if ignored is not None:
        t[torch.rand(t.shape, generator=generator) < 0.4] = ignored
    return t


def uniform(*shape: int) -> Tensor:
    return torch.rand(N, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def probabilities(*shape: int, axis: int = 1) -> Tensor:
    q = uniform(*shape)
    return q / q.sum(axis, keepdim=True)


@dataclass
class Case:
    """A loss, a network for it and targets; ``oracle`` where the Hessian of the loss itself is not the metric."""

    loss: Any
    net: Callable[[], nn.Module]
    target: Tensor
    oracle: Callable[[Tensor, Tensor], Tensor] | None = None


W3 = torch.tensor([0.5, 2.0, 1.5], dtype=torch.float64)
LOG = partial(torch.log_softmax, dim=1)


def expects(ℓ: Callable[..., Tensor], **options: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """½κ(y − y0)² with κ = E ℓ'² over residuals with density ∝ exp(−ℓ), by a sum over a fine grid without a kink."""
    r = torch.linspace(-60, 60, 1_200_000, dtype=torch.float64).requires_grad_()
    values = ℓ(r, torch.zeros_like(r), reduction="none", **options)
    (slope,) = torch.autograd.grad(values.sum(), r)
    p = (-values.detach()).exp()
    κ = float((p * slope.square()).sum() / p.sum())
    return lambda y, t: 0.5 * κ * (y - y.detach()).square().mean()


def spread(y: Tensor, t: Tensor) -> Tensor:
    """E over targets N(μ, σ²) of the Gaussian loss, which is quadratic in them: the mean at μ ± σ."""
    μ, v = y.detach().unbind(-1)
    losses = [F.gaussian_nll_loss(y[..., 0], μ + s * v.sqrt(), y[..., 1], reduction="sum") for s in (-1, 1)]
    return 0.5 * (losses[0] + losses[1]) / μ.numel()


def mean_and_variance(y: Tensor) -> Tensor:
    return torch.stack([y[..., 0], F.softplus(y[..., 1])], -1)


CASES = {
    "cross entropy": Case(nn.CrossEntropyLoss(), partial(model, 3), labels()),
    "function": Case(F.cross_entropy, partial(model, 3), labels()),
    "sum": Case(nn.CrossEntropyLoss(reduction="sum"), partial(model, 3), labels()),
    "ignored": Case(nn.CrossEntropyLoss(ignore_index=1), partial(model, 3), labels()),
    "ignored, partial": Case(partial(F.cross_entropy, ignore_index=-1), partial(model, 3), labels(ignored=-1)),
    "weights": Case(nn.CrossEntropyLoss(weight=W3, ignore_index=-1), partial(model, 3), labels(ignored=-1)),
    "smoothing": Case(nn.CrossEntropyLoss(label_smoothing=0.2), partial(model, 3), labels(ignored=-100)),
    "weights, smoothing": Case(nn.CrossEntropyLoss(weight=W3, label_smoothing=0.2), partial(model, 3), labels()),
    "probabilities": Case(nn.CrossEntropyLoss(), partial(model, 3), probabilities(3)),
    "probabilities, weights": Case(
        nn.CrossEntropyLoss(weight=W3, label_smoothing=0.1), partial(model, 3), probabilities(3)
    ),
    "pixels": Case(nn.CrossEntropyLoss(ignore_index=0), partial(model, 3, 2, 2), labels(2, 2)),
    "pixels, weights, sum": Case(nn.CrossEntropyLoss(weight=W3, reduction="sum"), partial(model, 3, 2), labels(2)),
    "pixels, probabilities": Case(nn.CrossEntropyLoss(weight=W3), partial(model, 3, 2), probabilities(3, 2)),
    "log-probabilities": Case(
        nn.NLLLoss(weight=W3, ignore_index=-1),
        partial(model, 3, 2, last=LOG),
        labels(2, ignored=-1),
        partial(F.cross_entropy, weight=W3, ignore_index=-1),
    ),
    "kl": Case(
        nn.KLDivLoss(reduction="batchmean"),
        partial(model, 3, last=LOG),
        probabilities(3),
        lambda y, q: F.kl_div(LOG(y), q, reduction="batchmean"),
    ),
    "kl, mean, logarithms": Case(
        partial(F.kl_div, log_target=True),
        partial(model, 3, last=LOG),
        probabilities(3).log(),
        lambda y, q: F.kl_div(LOG(y), q, log_target=True, reduction="sum") / y.numel(),  # torch warns of its mean
    ),
    "squares": Case(nn.MSELoss(), partial(model, 2, 2), uniform(2, 2)),
    "squares, sum": Case(partial(F.mse_loss, reduction="sum"), partial(model, 2), uniform(2)),
    "absolute": Case(nn.L1Loss(), partial(model, 2), uniform(2), expects(F.l1_loss)),
    "huber": Case(nn.HuberLoss(delta=0.7), partial(model, 2), uniform(2), expects(F.huber_loss, delta=0.7)),
    "smooth": Case(nn.SmoothL1Loss(beta=2.0), partial(model, 2), uniform(2), expects(F.smooth_l1_loss, beta=2.0)),
    "coins": Case(nn.BCEWithLogitsLoss(), partial(model, 2), uniform(2).round()),
    "coins, weights": Case(
        nn.BCEWithLogitsLoss(weight=W3[:2], pos_weight=W3[1:]), partial(model, 2), uniform(2).round()
    ),
    "coins, soft": Case(
        partial(F.binary_cross_entropy_with_logits, pos_weight=W3[1:], reduction="sum"), partial(model, 2), uniform(2)
    ),
    "coins, p": Case(
        nn.BCELoss(weight=W3[:2]),
        partial(model, 2, last=torch.sigmoid),
        uniform(2).round(),
        lambda y, t: F.binary_cross_entropy(y, y.detach(), weight=W3[:2]),
    ),
    "counts": Case(nn.PoissonNLLLoss(), partial(model, 2), uniform(2).mul(4).round()),
    "counts, rate": Case(
        nn.PoissonNLLLoss(log_input=False, full=True),
        partial(model, 2, last=F.softplus),
        uniform(2).mul(4).round(),
        lambda y, t: F.poisson_nll_loss(y, y.detach(), log_input=False),
    ),
    "gaussian": Case(nn.GaussianNLLLoss(), partial(model, 3, 2, last=mean_and_variance), uniform(3), spread),
    "other module": Case(nn.SoftMarginLoss(), partial(model, 2), 2 * uniform(2).round() - 1),
    "other module, sum": Case(nn.SoftMarginLoss(reduction="sum"), partial(model, 2), 2 * uniform(2).round() - 1),
    "other function of torch": Case(
        partial(F.multilabel_soft_margin_loss, weight=W3[:2]), partial(model, 2), uniform(2).round()
    ),
    "other function": Case(lambda y, t: (y - t).cosh().sum(1).mean(), partial(model, 2), uniform(2)),
    "other, weighted": Case(
        lambda y, t: F.cross_entropy(y.transpose(1, 2), t, weight=W3), partial(model, 2, 3), labels(2)
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_metric_is_the_gauss_newton_matrix_of_the_loss_as_it_is_reduced(name: str) -> None:
    case, x = CASES[name], inputs()
    net = case.net()
    value = case.oracle or case.loss
    expected = gauss_newton(net, x, lambda y: value(y, case.target))
    G = dense(net, x, case.loss, case.target)
    torch.testing.assert_close(G, expected, rtol=1e-6 if case.oracle else 1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CASES)
def test_flat_root_divergence_and_chunks_agree(name: str) -> None:
    """h u = Σ_k s_k⟨s_k, u⟩ = ∂²ρ u, and the root of a range of examples is the range of the root."""
    case = CASES[name]
    metric, y = ng.metric_of(case.loss), case.net()(inputs()).detach()
    u = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(4))
    terms = metric.prepared(y, case.target)
    s = metric.root(y, terms)
    products = torch.einsum("kn,kn...->n...", (s * u).flatten(2).sum(-1), s)
    torch.testing.assert_close(metric.flat(y, u, terms), products)
    piece = type(terms)(*(t[1:3] if isinstance(t, Tensor) else t for t in terms))
    torch.testing.assert_close(metric.root(y[1:3], piece), s[:, 1:3])
    if name in ("log-probabilities", "kl", "kl, mean, logarithms"):
        return  # the divergence is between normalised outputs only
    ε = 1e-4
    quadratic = 0.5 * (u * metric.flat(y, u, terms)).flatten(1).sum(1)
    both = metric.divergence(y + ε * u, y, terms) + metric.divergence(y - ε * u, y, terms)
    torch.testing.assert_close(both / (2 * ε**2), quadratic, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["pixels", "coins, p", "gaussian", "squares", "other module"])
def test_sampled_roots_have_the_metric_as_their_mean(name: str) -> None:
    case = CASES[name]
    y = case.net()(inputs()).detach()
    exact, sampled = ng.metric_of(case.loss), ng.metric_of(case.loss, samples=20_000)
    generator = torch.Generator().manual_seed(0)
    s, root = (m.root(y, m.prepared(y, case.target), generator).flatten(2) for m in (sampled, exact))
    h, mean = (torch.einsum("knd,kne->nde", r, r) for r in (root, s))
    assert float((mean - h).norm() / h.norm()) < 0.05


# What is refused, and what is said.


class Bounded(nn.CrossEntropyLoss):
    """1 − p of the true class."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return 1 - (-F.cross_entropy(y, t, reduction="none")).exp().mean()


def test_a_loss_that_is_not_convex_is_projected_and_this_is_said(caplog: pytest.LogCaptureFixture) -> None:
    """A subclass of a loss of torch with a forward of its own is another loss."""
    net, x, t = model(3), inputs(), labels()
    y = net(x).detach()
    H = torch.func.vmap(torch.func.hessian(lambda a, s: Bounded()(a[None], s[None])))(y, t)
    λ, V = torch.linalg.eigh(H)
    assert float(λ.min()) < -1e-3
    metric = ng.metric_of(Bounded())
    assert "Hessian at the outputs" in repr(metric)
    u = torch.ones_like(y) * torch.arange(3.0)
    expected = (V @ (λ.clamp(min=0).unsqueeze(-1) * V.mT) @ u.unsqueeze(-1)).squeeze(-1)
    with caplog.at_level(logging.INFO, "natgrad"):
        torch.testing.assert_close(metric.flat(y, u, t), expected)
    assert "Bounded() is not convex in the outputs" in caplog.text


def test_a_loss_that_is_given_as_a_function_of_torch_takes_its_targets_from_refresh() -> None:
    """It is the module of the same name, which nobody calls, so that no step waits for a call of it."""
    net, x, t = model(2), inputs(), 2 * uniform(2).round() - 1
    opt = ng.NaturalGradient(net, F.soft_margin_loss, structure=ng.Dense(), lr=0.0)
    F.soft_margin_loss(net(x), t).backward()
    opt.refresh(x, t)
    opt.step()
    assert opt.tracker.average is not None
    expected = gauss_newton(net, x, lambda y: F.soft_margin_loss(y, t))
    torch.testing.assert_close(opt.tracker.average.dense(), expected, rtol=1e-9, atol=1e-10)
    assert repr(ng.metric_of(F.soft_margin_loss)) == repr(ng.metric_of(nn.SoftMarginLoss()))
    assert ng.metric_of(F.soft_margin_loss).pending_losses == ()


def test_two_embeddings_are_stacked() -> None:
    net, x, t = model(2, 3), inputs(), 2 * (torch.arange(N) % 2) - 1
    metric = ng.metric_of(nn.CosineEmbeddingLoss(margin=-0.5))
    assert ng.Dense().estimate(ng.pullback(net, x, metric, target=t)).dense().trace() > 0


def call(loss: Any, target: Any, *shape: int) -> Callable[[], Any]:
    return lambda: ng.pullback(model(*shape), inputs(), loss, target=target)


class OfItself(nn.Module):
    """A model that computes its own loss, as those of ``transformers``."""

    config, loss_function, loss_type = None, None, "ForCausalLM"


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: ng.metric_of(OfItself(), axis=1), ValueError, "OfItself computes its loss itself"),
        (lambda: ng.metric_of(OfItself(), weights=[1.0]), ValueError, "OfItself computes its loss itself"),
        (lambda: ng.metric_of(nn.MSELoss(reduction="none")), ValueError, r"MSELoss\(reduction='none'\) has no metric"),
        (lambda: ng.metric_of(nn.CTCLoss()), TypeError, "CTCLoss has no metric in closed form"),
        (lambda: ng.metric_of(F.ctc_loss), TypeError, "CTCLoss has no metric in closed form"),
        (lambda: ng.metric_of(nn.MSELoss), TypeError, r"write MSELoss\(…\)"),  # type: ignore[arg-type]
        (lambda: ng.metric_of(ng.Categorical()), TypeError, "a family: write Fisher"),  # type: ignore[arg-type]
        (lambda: ng.metric_of(nn.TripletMarginLoss()), TypeError, r"does not take outputs and targets, loss\(y, t\)"),
        (lambda: ng.metric_of(partial(F.mse_loss, inputs())), TypeError, "bind the options of a loss by name"),
        (lambda: ng.metric_of(partial(F.mse_loss, beta=1)), TypeError, "has no such option"),  # type: ignore[call-arg]
        (lambda: ng.metric_of(nn.MSELoss(), axis=1), TypeError, "has no axis of classes"),
        (lambda: ng.metric_of(nn.MSELoss(), samples=0), ValueError, "samples must be"),
        (call(nn.CrossEntropyLoss(weight=W3), None, 3), ValueError, "needs the targets: pass target="),
        (call(nn.BCEWithLogitsLoss(pos_weight=W3), None, 3), ValueError, "needs the targets: pass target="),
        (call(nn.CrossEntropyLoss(), labels(4), 3, 2), ValueError, r"targets of shape \(5, 4\) do not belong to"),
        (
            lambda: ng.metric_of(F.cross_entropy).root(torch.ones(4)),
            ValueError,
            "with the classes on axis 1, got outputs of shape",
        ),
        (call(nn.NLLLoss(), labels(), 3), ValueError, "NLLLoss takes log-probabilities, and the outputs are not"),
        (call(nn.KLDivLoss(), None, 3, 2), ValueError, r"write metric_of\(loss, axis=-1\), or axis=1"),
        (call(nn.GaussianNLLLoss(), None, 3), ValueError, "needs mean and variance on the last axis"),
        (call(lambda y, t: (y - t).abs().mean(), uniform(3), 3), IncompatibleError, "has no curvature at the outputs"),
        (call(nn.MultiMarginLoss(), labels(), 3), IncompatibleError, r"MultiMarginLoss\(\) has no second derivative"),
        (call(lambda y, t: y.std(0).sum(), uniform(3), 3), IncompatibleError, "couples the examples of a batch"),
        (call(lambda y, t: y - t, uniform(3), 3), TypeError, "must return one number for a batch, and it returned"),
    ],
)
def test_what_has_no_metric_is_refused_by_name(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def fourth(y: Tensor, t: Tensor) -> Tensor:
    return (y - t).pow(4).mean()


@pytest.mark.parametrize(
    ("what", "call"),
    [
        ("flatness", lambda m, x, t: ng.functionspace.flatness(m, x, 0.1, fourth, t)),
        ("a geodesic", lambda m, x, t: geodesic(m, x, fourth, t)),
        ("a geodesic", lambda m, x, t: geodesic(m, x, {0: fourth}, (t,), output=lambda y: (y,))),
        ("the divergence from", lambda m, x, t: ng.proximal.pulled_back(m, x, fourth, target=t, reverse=True)),
    ],
)
def test_a_hessian_that_is_known_at_one_point_is_not_taken_for_that_of_others(
    what: str, call: Callable[[nn.Module, Tensor, Tensor], Any]
) -> None:
    with pytest.raises(IncompatibleError, match=f"{what}.* needs the metric at other outputs, too, and metric_of"):
        call(nn.Linear(3, 1, bias=False).double(), inputs(), uniform(1))


def geodesic(net: nn.Module, x: Tensor, loss: Any, target: Any, **options: Any) -> Any:
    pb = ng.pullback(net, x, loss, target=target, **options)
    return christoffel(pb, ng.Vector({"weight": torch.ones(1, 3).double()}))


def test_metrics_print_the_loss_and_what_they_are() -> None:
    metric = ng.metric_of(nn.CrossEntropyLoss(weight=W3, reduction="sum"), samples=2, axis=1)
    words = "metric_of(CrossEntropyLoss(reduction='sum', weight=[3]), samples=2): Fisher(Categorical(axis=1)), sum"
    assert repr(metric).startswith(words)
    assert ng.metric_of(metric) is metric
    assert metric.unsampled().exact
    assert repr(ng.metric_of(F.mse_loss)) == "metric_of(MSELoss()): 2·Fisher(Gaussian(scale=1.0)), mean over the terms"


# In a training loop: the user's own loss tells what counts.


class Talker(nn.Module):
    """Tokens [n t] ↦ logits [n t c]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.body, self.head = nn.Embedding(4, 3), nn.Linear(3, 3), nn.Linear(3, 4)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.body(self.embed(ids)).tanh())
        return logits


IDS = torch.randint(4, (N, 3), generator=torch.Generator().manual_seed(5))


def flat_loss(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.reshape(-1, 4), t.reshape(-1))


def shifted_loss(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y[:, :-1].reshape(-1, 4), t[:, 1:].reshape(-1))


def channels_loss(y: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(y.transpose(1, 2), t)


def metric_in_a_loop(net: nn.Module, x: Tensor, given: Any, loss: Callable[[Tensor], Tensor]) -> Tensor:
    """G of an optimizer after one step, with the loss that the loop computes from the outputs."""
    before = {name: p.detach().clone() for name, p in net.named_parameters()}
    opt = ng.NaturalGradient(net, given, lr=0.0)
    loss(net(x)).backward()
    opt.step()
    net.load_state_dict(before)
    average = opt.tracker.average
    assert average is not None
    return average.dense()


@pytest.mark.parametrize("ignored", [None, -100])
@pytest.mark.parametrize("loss", [flat_loss, shifted_loss, channels_loss])
def test_a_language_model_has_the_metric_of_the_mean_over_its_valid_tokens(
    loss: Callable[[Tensor, Tensor], Tensor], ignored: int | None
) -> None:
    """The loop flattens, shifts and ignores; the optimizer is given the loss, and nothing else."""
    net, t = Talker(), labels(3, classes=4, ignored=ignored)
    expected = gauss_newton(net, IDS, lambda y: loss(y, t))
    G = metric_in_a_loop(net, IDS, nn.CrossEntropyLoss(), lambda y: loss(y, t))
    torch.testing.assert_close(G, expected, rtol=1e-9, atol=1e-12)


def test_a_language_model_is_resumed_and_the_loss_is_named_where_it_is_another() -> None:
    """What a backward pass has shown is no part of the metric's name; nor is whether the loss is a module."""
    t = labels(3, classes=4, ignored=-100)

    def made(loss: Any) -> tuple[nn.Module, ng.NaturalGradient]:
        net = Talker()
        return net, ng.KFAC(net, loss, lr=0.01, generator=torch.Generator().manual_seed(0))

    def step(net: nn.Module, opt: ng.NaturalGradient, seed: int) -> None:
        opt.zero_grad()
        flat_loss(net(IDS), t.roll(seed, 0)).backward()
        opt.step()

    resumes(lambda: made(nn.CrossEntropyLoss()), step)
    net, opt = made(nn.CrossEntropyLoss())
    step(net, opt, 0)
    made(F.cross_entropy)[1].load_state_dict(opt.state_dict())
    made(ng.metric_of(F.cross_entropy, samples=3))[1].load_state_dict(opt.state_dict())
    with pytest.raises(ValueError, match=r"its metric is ClassLoss\(loss=CrossEntropyLoss\(\)\), here it is .*'sum'"):
        made(nn.CrossEntropyLoss(reduction="sum"))[1].load_state_dict(opt.state_dict())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_cotangent_tells_the_axis_of_the_classes_in_any_precision_and_after_one_that_is_not_finite(
    dtype: torch.dtype,
) -> None:
    """A GradScaler skips the first steps; what came to them tells no axis."""
    torch.manual_seed(0)
    y, t = torch.randn(8, 16, 50).to(dtype).requires_grad_(), torch.randint(50, (8, 16))
    F.cross_entropy(y.flatten(0, 1).to(torch.promote_types(dtype, torch.float32)), t.flatten()).backward()
    for at, axis in ((y, -1), (y.mT, 1)):
        metric = ng.metric_of(F.cross_entropy)
        assert y.grad is not None
        arrived = y.grad if axis == -1 else y.grad.mT
        for bad in (torch.nan, 0.0):
            metric.prepared(at.detach(), None, torch.full_like(arrived, bad))
        assert metric.prepared(at.detach(), None, arrived).axis == axis


def _scaled(y: Tensor, t: Tensor, factor: float) -> Tensor:
    return factor * flat_loss(y, t)


def test_the_scale_of_the_loss_and_accumulation_do_not_change_the_metric() -> None:
    net, t = Talker(), labels(3, classes=4, ignored=-100)
    expected = gauss_newton(net, IDS, lambda y: flat_loss(y, t))
    for factor in (2.0**16, 0.25):
        G = metric_in_a_loop(net, IDS, nn.CrossEntropyLoss(), partial(_scaled, t=t, factor=factor))
        torch.testing.assert_close(G, expected, rtol=1e-9, atol=1e-12)
    opt = ng.NaturalGradient(net, F.cross_entropy, lr=0.0)
    halves = [slice(0, 2), slice(2, N)]
    for each in halves:
        flat_loss(net(IDS[each]), t[each]).backward()
    opt.step()
    parts = [gauss_newton(net, IDS[each], partial(flat_loss, t=t[each])) for each in halves]
    assert opt.tracker.average is not None
    torch.testing.assert_close(opt.tracker.average.dense(), (2 * parts[0] + 3 * parts[1]) / 5, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if isinstance(case.loss, nn.Module)])
def test_a_loop_that_calls_the_loss_has_its_metric(name: str) -> None:
    """With class weights, probabilities and other losses the targets are those of the call."""
    case, x = CASES[name], inputs()
    net = case.net()

    def value(y: Tensor) -> Tensor:
        if isinstance(case.loss, nn.GaussianNLLLoss):
            return case.loss(y[..., 0], case.target, y[..., 1])
        result: Tensor = case.loss(y, target=case.target)
        return result

    expected = dense(net, x, case.loss, case.target)
    torch.testing.assert_close(metric_in_a_loop(net, x, case.loss, value), expected)
    case.loss.__getstate__()


def test_flattened_tokens_with_class_weights() -> None:
    net, t, loss = (
        Talker(),
        labels(3, classes=4, ignored=-100),
        nn.CrossEntropyLoss(weight=torch.arange(1.0, 5).double()),
    )
    expected = gauss_newton(net, IDS, lambda y: loss(y.reshape(-1, 4), t.reshape(-1)))
    G = metric_in_a_loop(net, IDS, loss, lambda y: loss(y.view(-1, 4), t.view(-1)))
    torch.testing.assert_close(G, expected, rtol=1e-9, atol=1e-12)


def test_targets_that_nobody_shows_are_asked_for() -> None:
    loss = nn.CrossEntropyLoss(weight=W3)
    with pytest.raises(ng.errors.NatgradError, match=r"call the loss that the optimizer was given, CrossEntropyLoss"):
        metric_in_a_loop(model(3), inputs(), loss, lambda y: F.cross_entropy(y, labels(), weight=W3))
    with pytest.raises(ng.errors.NatgradError, match=r"call opt.refresh\(x, target\) before opt.step"):
        metric_in_a_loop(model(3), inputs(), partial(F.cross_entropy, weight=W3), lambda y: loss(y, labels()))
    net = model(3)
    opt = ng.NaturalGradient(net, nn.CrossEntropyLoss())
    net(inputs())
    next(net.parameters()).grad = torch.ones(4, 3).double()
    with pytest.raises(ng.errors.NatgradError, match="no backward pass came through the outputs of a forward pass"):
        opt.step()


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC, ng.SobolevKFAC, ng.Natural])
@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=W3.float())])
def test_every_preset_trains_with_a_loss(preset: Any, loss: nn.Module) -> None:
    net, x, t = model(3).float(), torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 3
    x[:, 0] += t
    opt, values = preset(net, loss, lr=0.05), []
    for _ in range(30):
        opt.zero_grad()
        value = loss(net(x), t)
        value.backward()
        opt.step()
        values.append(float(value.detach()))
    assert values[-1] < 0.8 * values[0]


def test_what_cannot_be_seen_is_said_and_a_refresh_with_targets_counts(caplog: pytest.LogCaptureFixture) -> None:
    """A compiled model shows no cotangent: all terms count, unless the targets are given."""
    net, t = Talker(), labels(3, classes=4, ignored=-100)
    compiled, metric = torch.compile(net, backend="eager"), ng.metric_of(nn.CrossEntropyLoss(), axis=-1)
    with caplog.at_level(logging.INFO, "natgrad"):
        opt = ng.NaturalGradient(compiled, metric, lr=0.0)  # type: ignore[arg-type]
        flat_loss(compiled(IDS), t).backward()
        opt.step()
    assert "cannot be seen at the outputs (a compiled model" in caplog.text
    G = opt.tracker.average
    assert G is not None
    torch.testing.assert_close(G.dense(), gauss_newton(net, IDS, lambda y: flat_loss(y, 0 * t)))
    opt.refresh(IDS, t)
    opt.step()
    G = opt.tracker.average
    assert G is not None
    torch.testing.assert_close(G.dense(), gauss_newton(net, IDS, lambda y: flat_loss(y, t)))


def test_a_pass_that_waits_is_held_until_the_step_only() -> None:
    net, x, t = model(3), inputs(), labels()
    opt = ng.NaturalGradient(net, nn.CrossEntropyLoss())
    unused, y = net(x), net(x)
    dead = [weakref.ref(unused), weakref.ref(y)]
    F.cross_entropy(y, t).backward()
    opt.step()
    del unused, y
    assert [each() for each in dead] == [None, None]


# Elsewhere a loss stands for its metric, too.


@pytest.mark.parametrize("loss", [nn.CrossEntropyLoss(), nn.CrossEntropyLoss(weight=W3.new_ones(4), reduction="sum")])
def test_laplace_counts_every_term_in_full(loss: nn.Module) -> None:
    """The posterior of −Σ log p over the valid tokens, whatever the reduction; the batches of a loader add up."""
    net, t, δ = Talker(), labels(3, classes=4, ignored=-100), 2.0
    H = gauss_newton(net, IDS, lambda y: F.cross_entropy(y.reshape(-1, 4), t.reshape(-1), reduction="sum"))
    expected = torch.linalg.inv(H + δ * torch.eye(len(H), dtype=H.dtype))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(IDS, t), batch_size=2)
    for x, target in ((IDS, t), (loader, None)):
        posterior = ng.vi.Laplace(net, x, loss, prior_precision=δ, target=target)
        torch.testing.assert_close(posterior.covariance(), expected)


class Cosh(nn.Module):
    """A loss of the user, which says how it is reduced, or does not."""

    def __init__(self, reduction: str | None = None) -> None:
        super().__init__()
        if reduction is not None:
            self.reduction = reduction

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return cosh(y, t, reduction=getattr(self, "reduction", "mean"))


class Halved(nn.SoftMarginLoss):
    """A subclass of a loss of torch with a forward of its own is another loss, here a mean over the examples."""

    def forward(self, y: Tensor, t: Tensor) -> Tensor:
        return F.soft_margin_loss(y, t, reduction="sum") / (2 * len(y))


def cosh(y: Tensor, t: Tensor, reduction: str = "mean") -> Tensor:
    each = (y - t).cosh().flatten(1).sum(1)
    return each.sum() if reduction == "sum" else each.mean()


Sum = Callable[[Tensor, Tensor], Tensor]
SIGNS, PAIRS = 2 * uniform(2).round() - 1, 2 * (torch.arange(N) % 2) - 1
SOFT: Sum = partial(F.soft_margin_loss, reduction="sum")
LABELS: Sum = partial(F.multilabel_soft_margin_loss, weight=W3, reduction="sum")
COSH: Sum = partial(cosh, reduction="sum")
SUMS: dict[str, tuple[Any, tuple[int, ...], Tensor, Sum]] = {
    "mean": (nn.SoftMarginLoss(), (2,), SIGNS, SOFT),
    "sum": (nn.SoftMarginLoss(reduction="sum"), (2,), SIGNS, SOFT),
    "several terms": (nn.SoftMarginLoss(), (2, 3), 2 * uniform(2, 3).round() - 1, SOFT),
    "function": (F.soft_margin_loss, (2,), SIGNS, SOFT),
    "function, sum": (SOFT, (2,), SIGNS, SOFT),
    "labels, mean": (nn.MultiLabelSoftMarginLoss(weight=W3), (3,), uniform(3).round(), LABELS),
    "labels, sum": (nn.MultiLabelSoftMarginLoss(weight=W3, reduction="sum"), (3,), uniform(3).round(), LABELS),
    "labels, terms": (nn.MultiLabelSoftMarginLoss(weight=W3), (2, 3), uniform(2, 3).round(), LABELS),
    "labels, function": (partial(F.multilabel_soft_margin_loss, weight=W3), (3,), uniform(3).round(), LABELS),
    **{
        f"embeddings, {reduction}": (
            nn.CosineEmbeddingLoss(reduction=reduction),
            (2, 3),
            PAIRS,
            lambda y, t: F.cosine_embedding_loss(y[:, 0], y[:, 1], t, reduction="sum"),
        )
        for reduction in ("mean", "sum")
    },
    "user, mean": (Cosh("mean"), (2, 3), uniform(2, 3), COSH),
    "user, sum": (Cosh("sum"), (2, 3), uniform(2, 3), COSH),
    "user, unsaid": (Cosh(), (2, 3), uniform(2, 3), COSH),
    "user, function": (cosh, (2, 3), uniform(2, 3), COSH),
    "user, function, mean": (partial(cosh, reduction="mean"), (2, 3), uniform(2, 3), COSH),
    "user, function, sum": (COSH, (2, 3), uniform(2, 3), COSH),
    "user, subclass": (Halved(), (2,), SIGNS, lambda y, t: 0.5 * SOFT(y, t)),
}


@pytest.mark.parametrize("name", SUMS)
def test_laplace_sums_a_loss_without_a_closed_form_over_the_examples(name: str) -> None:
    loss, shape, t, total = SUMS[name]
    net, x = model(*shape), inputs()
    H = gauss_newton(net, x, lambda y: total(y, t))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, t), batch_size=2)
    for given, target in ((x, t), (loader, None)):
        posterior = ng.vi.Laplace(net, given, loss, target=target)
        torch.testing.assert_close(N * posterior.operator.dense(), H, rtol=1e-9, atol=1e-9)


def test_laplace_sums_the_loss_of_every_head_and_leaves_the_loss_as_it_is() -> None:
    class Halves(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x).split(2, 1)

    x, loss = inputs(), nn.SoftMarginLoss()
    net, whole = Halves(3, 4).double(), nn.Linear(3, 4).double()
    whole.load_state_dict(net.state_dict())
    H = gauss_newton(whole, x, lambda y: SOFT(y[:, :2], SIGNS) + 0.5 * COSH(y[:, 2:], uniform(2)))
    heads = ng.metric_of((loss, Cosh("sum")), weights=(1.0, 0.5))
    posterior = ng.vi.Laplace(net, x, heads, target=(SIGNS, uniform(2)))
    torch.testing.assert_close(N * posterior.operator.dense(), H, rtol=1e-9, atol=1e-9)
    assert loss.reduction == "mean"


@pytest.mark.parametrize("loss", [nn.SoftMarginLoss(reduction="none"), partial(F.soft_margin_loss, reduction="none")])
def test_laplace_refuses_a_loss_for_every_term(loss: Any) -> None:
    with pytest.raises(TypeError, match=r"SoftMarginLoss\(reduction='none'\) must return one number for a batch"):
        ng.vi.Laplace(model(2), inputs(), loss, target=SIGNS)


def test_the_natural_gradient_of_a_loss_in_its_own_metric() -> None:
    net, x, t = model(3), inputs(), labels()
    G = gauss_newton(net, x, lambda y: F.cross_entropy(y, t))
    ω = torch.cat([g.flatten() for g in torch.autograd.grad(F.cross_entropy(net(x), t), list(net.parameters()))])
    v = ng.natural_gradient(net, x, F.cross_entropy(net(x), t), F.cross_entropy, target=t, damping=0.1)
    expected = torch.linalg.solve(G + 0.1 * torch.eye(len(G), dtype=G.dtype), ω)
    torch.testing.assert_close(torch.cat([p.flatten() for p in v.values()]), expected)


@pytest.mark.parametrize(
    ("target", "match"),
    [
        (torch.tensor([0, 1]), r"targets of shape \(2,\) do not belong to outputs of shape \(4, 3\)"),
        (torch.tensor([0, 1, 2, 5]), "targets from 0 to 5 for 3 classes: they are 0 to 2, or ignore_index = -100"),
        (torch.tensor([0, 1, 2, -1]), "targets from -1 to 2 for 3 classes"),
    ],
)
def test_targets_that_are_no_classes_of_the_outputs_are_refused(target: Tensor, match: str) -> None:
    loss = nn.CrossEntropyLoss(weight=torch.ones(3))
    with pytest.raises(ValueError, match=match):
        ng.Dense().estimate(ng.pullback(nn.Linear(2, 3), torch.ones(4, 2), loss, target=target))
