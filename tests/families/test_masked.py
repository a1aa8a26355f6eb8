"""Masks: what is masked is as if it were not there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.families import Mask, Masked
from tests import oracle
from tests.optim.tasks import seeded

DOUBLE = torch.float64
N, T, C = 4, 3, 4

FAMILIES: dict[str, tuple[ng.families.Family, Callable[[Tensor], Tensor]]] = {
    "categorical": (ng.Categorical(), oracle.categorical),
    "gaussian": (ng.Gaussian(scale=0.5), lambda y: oracle.gaussian(y, 0.5)),
    "learned scale": (ng.Gaussian(scale=None), oracle.gaussian_learned),
    "coins": (ng.Bernoulli(), oracle.bernoulli),
}


def _outputs() -> tuple[Tensor, Tensor]:
    """y [n t c], and which steps are there: 3, 2, 1 and 0 of them."""
    y = seeded(lambda: torch.randn(N, T, C, dtype=DOUBLE), seed=1)
    return y, torch.arange(T) < torch.tensor([[3], [2], [1], [0]])


def _actions() -> Tensor:
    """[n t c]: two, three or four actions are possible."""
    possible = seeded(lambda: torch.rand(N, T, C) < 0.5, seed=2)
    possible[..., 1] = possible[..., 3] = True
    return possible


def _kl(y: Tensor, y2: Tensor, possible: Tensor) -> float:
    """KL of two softmaxes over the possible of the logits [c]."""
    p, q = y[possible].log_softmax(0), y2[possible].log_softmax(0)  # a probability may be below the smallest number
    return float((p.exp() * (p - q)).sum())


def _gram(root: Tensor) -> Tensor:
    """Σ_k s sᵀ [n d d]."""
    s = root.flatten(2)
    return torch.einsum("knd,kne->nde", s, s)


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize("weighted", [False, True])
def test_the_metric_is_the_weighted_sum_over_the_steps_that_are_there(kind: str, weighted: bool) -> None:
    y, there = _outputs()
    family, h = FAMILIES[kind]
    w = there.double() * (0.9 ** torch.arange(T) if weighted else 1.0)
    metric = ng.Fisher(Masked(family))
    mask = Mask(steps=w if weighted else there)
    expected = h(y) * w.repeat_interleave(C, dim=1)[:, :, None]
    torch.testing.assert_close(_gram(metric.root(y, mask)), expected, rtol=0, atol=1e-12)
    u = torch.ones_like(y)
    flat = metric.flat(y, u, mask).flatten(1)
    torch.testing.assert_close(flat, expected.sum(2), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_divergence_is_the_weighted_sum_over_the_steps_that_are_there(kind: str) -> None:
    y, there = _outputs()
    family, _ = FAMILIES[kind]
    y2 = y + 0.3 * y.cos()
    w = there * 0.9 ** torch.arange(T)
    steps = [[float(family.kl(y[n, t][None], y2[n, t][None])) for t in range(T)] for n in range(N)]
    expected = (torch.tensor(steps, dtype=DOUBLE) * w).sum(1)
    found = ng.Fisher(Masked(family)).divergence(y2, y, Mask(steps=w))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_the_metric_of_possible_actions_is_that_of_the_softmax_over_them() -> None:
    y, there = _outputs()
    possible = _actions()
    metric, mask = ng.Fisher(Masked(ng.Categorical())), Mask(there, possible)
    expected = torch.zeros(N, T * C, T * C, dtype=DOUBLE)
    for n, t in there.nonzero().tolist():
        index = t * C + possible[n, t].nonzero().squeeze(1)
        expected[n, index[:, None], index] = oracle.categorical(y[n, t, possible[n, t]][None])[0]
    torch.testing.assert_close(_gram(metric.root(y, mask)), expected, rtol=0, atol=1e-12)
    u = y.sin()
    flat = metric.flat(y, u, mask).flatten(1)
    torch.testing.assert_close(flat, (expected @ u.flatten(1)[:, :, None])[..., 0], rtol=0, atol=1e-12)


@pytest.mark.parametrize("far", [1.0, 1e5])
def test_the_divergence_of_possible_actions_is_that_of_the_softmax_over_them(far: float) -> None:
    y, there = _outputs()
    possible = _actions()
    y2 = y + 0.4 * y.sin()
    y2[~possible] *= far  # whatever a network says of what is not possible
    expected = torch.zeros(N, dtype=DOUBLE)
    for n, t in there.nonzero().tolist():
        expected[n] += _kl(y[n, t], y2[n, t], possible[n, t])
    found = ng.Fisher(Masked(ng.Categorical())).divergence(y2, y, Mask(there, possible))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shared", [False, True])
def test_sampled_roots_have_the_masked_metric_as_covariance_and_nothing_where_it_is_masked(shared: bool) -> None:
    """20000 samples: five standard errors of entries at most 1."""
    y, there = _outputs()
    possible, generator = _actions(), torch.Generator().manual_seed(0)
    metric, mask = ng.Fisher(Masked(ng.Categorical()), samples=20000), Mask(there, possible)
    s = (metric.shared_root if shared else metric.root)(y, mask, generator)
    assert bool((s[:, ~(possible & there[..., None])] == 0).all())
    exact = _gram(ng.Fisher(Masked(ng.Categorical())).root(y, mask))
    term = torch.arange(T * C) // C  # shared samples have one number a column: terms are independent in expectation
    within = term[:, None] == term
    assert float(((_gram(s) - exact) * within).abs().max()) < 5 / 20000**0.5


class Policy(nn.Module):
    """A recurrent policy: the logits [n t c] of every step depend on those before it."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.RNN(2, 3, batch_first=True)
        self.head = nn.Linear(3, C)

    def forward(self, x: Tensor) -> Tensor:
        """[n t c]."""
        return self.head(self.cell(x)[0])


def _policy() -> tuple[Policy, Tensor]:
    return seeded(lambda: (Policy().double(), torch.randn(N, T, 2, dtype=DOUBLE)), seed=4)


@pytest.mark.parametrize("memory", [2**32, 2**17])
def test_the_pullback_is_that_of_the_episodes_without_their_padding(memory: int) -> None:
    policy, x = _policy()
    _, there = _outputs()
    G = torch.zeros(1)
    for n in range(N - 1):  # the last episode has no step
        short = x[n : n + 1, : int(there[n].sum())]
        J = oracle.module_jacobian(policy, short)
        G = G + oracle.dense(J, oracle.categorical(policy(short))) / N
    metric = ng.Fisher(Masked(ng.Categorical()))
    found = ng.Dense().estimate(ng.pullback(policy, x, metric, Mask(there), memory=memory))
    torch.testing.assert_close(found.dense(), G, rtol=0, atol=1e-12)
    implicit = ng.Implicit().estimate(ng.pullback(policy, x, metric, Mask(there))).dense()
    torch.testing.assert_close(implicit, G, rtol=0, atol=1e-12)


def test_an_optimizer_with_masks_keeps_to_the_trust_region_of_what_is_there() -> None:
    policy, x = _policy()
    (_, there), possible, radius = _outputs(), _actions(), 0.3
    mask = Mask(there, possible)
    rule = ng.TrustRegion(radius, ng.Backtracking())
    opt = ng.NaturalGradient(policy, ng.Fisher(Masked(ng.Categorical())), step=rule, damping=1e-6)
    for _ in range(5):
        before = policy(x).detach()
        opt.zero_grad()
        opt.refresh(x, mask)
        y = policy(x).masked_fill(~possible, -torch.inf)[there]
        (-y.log_softmax(-1)[:, 1]).mean().backward()
        opt.step()
        assert opt.last is not None
        assert opt.last.accepted
        after = policy(x).detach()
        moved = sum(_kl(before[n, t], after[n, t], possible[n, t]) for n, t in there.nonzero().tolist()) / N
        assert 0 < moved <= radius


def test_a_step_without_actions_is_not_finite_where_nobody_looks() -> None:
    """On a GPU nothing is read back: the numbers themselves say it."""
    y = torch.zeros(1, 2, dtype=DOUBLE)
    family = Masked(ng.Categorical(), Mask(actions=torch.zeros(1, 2, dtype=torch.bool)))
    assert bool(family.root(y).isnan().any())


Y = torch.zeros(2, 3, 4)
YES = torch.ones(2, 3, 4, dtype=torch.bool)


def _at(mask: Any, family: ng.families.Family | None = None) -> Callable[[], Any]:
    return lambda: ng.Fisher(Masked(family or ng.Categorical())).flat(Y, Y, mask)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Masked(Masked(ng.Categorical())), TypeError, "Masked takes a family"),
        (lambda: Masked(ng.Categorical()).flat(Y, Y), ValueError, "has no mask: give the batch one"),
        (lambda: ng.Fisher(Masked(ng.Categorical()), reduction="mean"), ValueError, "would count padded steps"),
        (_at(YES), TypeError, r"must be a Mask\(steps=…, actions=…\), got Tensor"),
        (_at(Mask(actions=YES), ng.Bernoulli()), TypeError, "is for the logits of Categorical"),
        (_at(Mask(actions=YES), ng.Categorical(minimal=True)), TypeError, "not of Categorical.minimal=True"),
        (_at(Mask(actions=YES.float())), TypeError, "must be of booleans, True where possible, got torch.float32"),
        (_at(Mask(actions=YES[0])), ValueError, r"must have the shape of the logits, got \(3, 4\) for \(2, 3, 4\)"),
        (_at(Mask(actions=YES & (torch.arange(3) != 1)[:, None])), ValueError, r"no action is possible at \(0, 1\)"),
        (_at(Mask(steps=YES)), ValueError, r"one number a term, and not within one: got shape \(2, 3, 4\)"),
        (_at(Mask(steps=YES[:, :2, 0])), ValueError, r"must be \[n \*terms\].* got shape \(2, 2\)"),
        (_at(Mask(steps=-Y[..., 0] - 1)), ValueError, r"are finite weights ≥ 0, got -1 at \(0, 0\): a metric is not"),
        (_at(Mask(steps=Y[..., 0] / 0)), ValueError, "are finite weights ≥ 0, got nan"),
        (_at(Mask(steps=[[True]])), TypeError, "takes tensors, as torch.tensor"),  # type: ignore[arg-type]
        (
            lambda: ng.pullback(_policy()[0], _policy()[1], ng.Fisher(Masked(ng.Categorical()))),
            ValueError,
            r"needs the mask of the batch: pass target=Mask\(steps=…, actions=…\)",
        ),
    ],
)
def test_masks_that_do_not_fit_are_refused(make: Callable[[], Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()
