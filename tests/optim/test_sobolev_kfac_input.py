"""What Sobolev K-FAC takes: tokens with features, half precision; and what it refuses."""

from __future__ import annotations

from typing import Any, final

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from tests.optim.tasks import seeded
from tests.optim.test_sobolev_kfac import EXACT, Net, batch, perceptron


@final
class Words(nn.Module):
    """Attention over tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.attention = nn.Embedding(7, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.last = nn.Linear(4, 3)

    def forward(self, words: Tensor) -> Tensor:
        """[n t] to [n 3]."""
        h = self.table(words)
        return self.last((h + self.attention(h, h, h, need_weights=False)[0]).mean(1))


def test_tokens_train_with_features() -> None:
    """The points are the mean embeddings, which are learned: the kernel follows them."""
    words = torch.randint(7, (12, 5), generator=torch.Generator().manual_seed(0))
    t = (words == 3).any(1).long()
    model = seeded(lambda: Words().double())
    opt = ng.SobolevKFAC(model, EXACT, lr=0.3, features=lambda words: model.table(words).mean(1), metric_every=1)
    first = last = F.cross_entropy(model(words), t).item()
    opt.tracker.discard()
    for _ in range(30):
        opt.zero_grad()
        loss = F.cross_entropy(model(words), t)
        loss.backward()
        opt.step()
        last = loss.item()
    assert last < 0.5 * first


def test_half_precision_trains_in_factors_of_single_precision() -> None:
    model = seeded(Net)
    opt = ng.SobolevKFAC(model, EXACT, lr=0.3, lengthscale=3.0, metric_every=1, inverse_every=1)
    x, t = batch(0, 2, 4, 4)
    losses = []
    for _ in range(20):
        opt.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = model(x.float())
        loss = F.cross_entropy(y.float(), t)
        loss.backward()
        opt.step()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]
    assert opt.tracker.average is not None
    assert {s.dtype for s in opt.tracker.average.tensors().values()} == {torch.float32}


def test_factors_under_autocast_are_near_those_without() -> None:
    x, _ = batch(0, 2, 4, 4)
    model = seeded(Net)
    found = []
    for enabled in (False, True):
        opt = ng.SobolevKFAC(model, EXACT, lengthscale=3.0)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            model(x.float())
        assert opt.tracker.fresh is not None
        found.append(opt.tracker.fresh.dense())
        del opt
    assert (found[0] - found[1]).norm() < 0.05 * found[0].norm()


# What is refused


def test_tokens_without_features_ask_for_them() -> None:
    model = Words()
    opt = ng.SobolevKFAC(model, EXACT)  # held: one that is forgotten looks at nothing
    with pytest.raises(TypeError, match=r"torch.int64, which are no points in R\^d: .*Pass features=, a function"):
        model(torch.zeros(3, 5, dtype=torch.long))
    assert opt.last is None


REFUSED: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "nu": ({"nu": 0.0}, ValueError, r"nu=0.0 must be positive and finite"),
    "lengthscale": ({"lengthscale": 0.0}, ValueError, r"lengthscale=0 must be positive"),
    "rule": ({"lengthscale": "median"}, TypeError, r"give a positive number, or a rule such as Median\(\)"),
    "jitter": ({"jitter": -1.0}, ValueError, r"jitter=-1.0 must be finite and not negative"),
    "unknown": ({"nus": 1.5}, TypeError, "unexpected keyword argument .nus."),
    "every": ({"metric_every": 0}, ValueError, r"metric_every must be at least 1 step, got 0"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_options_that_make_no_sense_are_refused(case: str) -> None:
    options, error, message = REFUSED[case]
    with pytest.raises(error, match=message):
        ng.SobolevKFAC(perceptron(), EXACT, **options)


def test_a_metric_that_is_one_of_functions_already_is_refused() -> None:
    with pytest.raises(ValueError, match="would couple the examples twice: give the metric inside"):
        ng.SobolevKFAC(perceptron(), ng.Sobolev())


def test_kfac_has_no_option_of_the_kernel() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'nu'"):
        ng.KFAC(perceptron(), EXACT, nu=1.5)  # type: ignore[call-arg]
