"""Hyperparameters at the maximum over q, and the benchmark at tiny sizes."""

from __future__ import annotations

import pytest

import natgrad as ng
from benchmarks.gp_cases import Adam, Natural, cases

pytestmark = pytest.mark.usefixtures("double_precision")


def test_learning_ends_where_the_gradient_of_the_collapsed_bound_vanishes() -> None:
    case = cases(60, 8)[2]
    gp = case.model()
    bounds = ng.vi.learn(gp, case.x, case.y, steps=60, tolerance=1e-3)
    assert max(bounds) > bounds[0] + 5
    assert all(p.grad is None for p in gp.parameters())
    gp.elbo(case.x, case.y).backward()
    for p in gp.parameters():
        if p.requires_grad:
            assert p.grad is not None
            assert float(p.grad.abs().max()) < 0.05
    assert float(gp.elbo(case.x, case.y).detach()) >= max(bounds) - 1e-3


def test_learning_without_parameters_is_refused() -> None:
    case = cases(20, 4)[0]
    with pytest.raises(ValueError, match="no parameter of the model requires a gradient"):
        ng.vi.learn(case.model(), case.x, case.y)


@pytest.mark.parametrize("number", range(4))
def test_natural_steps_end_above_adam_in_fewer_steps(number: int) -> None:
    case = cases(60, 8)[number]
    adam = Adam(0.1, 300).start(case).run(300)
    natural = Natural().start(case).run(40)
    assert natural[-1] > adam[-1] - 0.1
    assert len(natural) <= 60
