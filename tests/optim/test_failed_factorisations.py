"""Factorisations that fail: tried again in double precision, and the last good inverse is kept."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, final

import pytest
import torch
from torch import Tensor

import natgrad as ng
from natgrad.accelerate.roots import spectrum
from natgrad.errors import FactorisationError, SingularMetricError
from natgrad.linalg import Damping
from natgrad.operators import KroneckerOperator
from natgrad.solve import Solver
from natgrad.structures.base import Inverse, Operator
from natgrad.structures.kronecker import ProductInverse, retry
from tests.optim.tasks import seeded, task
from tests.pulled import normal
from tests.zoo import mlp

FISHER = ng.Fisher(ng.Bernoulli())
PRESETS = pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC], ids=["KFAC", "EKFAC"])


@final
@dataclass
class Failing(Solver):
    """Another solver, which fails at chosen calls."""

    inner: Solver
    at: frozenset[int]
    calls: list[int] = field(default_factory=list)

    def init(self, G: Operator, damping: Damping = 0.0, warm: Mapping[str, Tensor] | None = None) -> Inverse:
        self.calls.append(len(self.calls))
        if self.calls[-1] in self.at:
            raise FactorisationError("the eigenvalues of a factor of size 3 cannot be found")
        return self.inner.init(G, damping, warm)


def test_a_factorisation_that_fails_keeps_the_last_inverse_and_says_so_once(caplog: pytest.LogCaptureFixture) -> None:
    of = task("coins")
    solver = Failing(ng.Factored(), frozenset({2, 3}))
    opt = ng.KFAC(of.model, of.kind.metric, solver=solver, metric_every=1, inverse_every=1)
    inverses = []
    with caplog.at_level(logging.WARNING, "natgrad"):
        for _ in range(5):
            of.step(opt)
            assert opt.preconditioner.inverse is not None
            inverses.append(opt.preconditioner.inverse.tensors()["0.weight/S"].clone())
    assert [torch.equal(a, b) for a, b in pairwise(inverses)] == [False, True, True, False]
    (said,) = [record.getMessage() for record in caplog.records]
    assert "The last good inverse is used until the next one is due" in said
    assert opt.diagnostics().inverse_age == 0


def test_the_age_of_an_inverse_that_was_kept_is_its_own() -> None:
    of = task("coins")
    solver = Failing(ng.Factored(), frozenset({2, 3}))
    opt = ng.KFAC(of.model, of.kind.metric, solver=solver, metric_every=1, inverse_every=1)
    ages = []
    for _ in range(5):
        of.step(opt)
        ages.append(opt.diagnostics().inverse_age)
    assert ages == [0, 0, 1, 2, 0]


def test_a_factorisation_that_fails_at_first_raises_and_nothing_has_changed() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, solver=Failing(ng.Factored(), frozenset({0})))
    before = of.theta()
    with pytest.raises(FactorisationError, match="a factor of size 3 cannot be found"):
        of.step(opt)
    assert torch.equal(of.theta(), before)
    of.step(opt)


def test_eigenvalues_that_are_not_found_are_looked_for_in_double_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = torch.linalg.eigh, []

    def eigh(matrix: Tensor) -> Any:
        asked.append(matrix.dtype)
        if matrix.dtype == torch.float32:
            raise RuntimeError("the algorithm failed to converge")
        return real(matrix)

    monkeypatch.setattr(torch.linalg, "eigh", eigh)
    A = normal(2, 3, 3).float()
    values, vectors = spectrum(A @ A.mT)
    assert asked == [torch.float32, torch.float64]
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(vectors @ torch.diag_embed(values) @ vectors.mT, A @ A.mT, rtol=1e-4, atol=1e-4)


def test_eigenvalues_that_are_never_found_keep_the_last_basis(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def eigh(matrix: Tensor) -> Any:
        raise RuntimeError("the algorithm failed to converge")

    of = task("coins")
    opt = ng.EKFAC(of.model, of.kind.metric, metric_every=1, inverse_every=1)
    of.step(opt)
    G = opt.tracker.average
    assert isinstance(G, ng.operators.EigenKroneckerOperator)
    with monkeypatch.context() as failing:
        failing.setattr(torch.linalg, "eigh", eigh)
        with caplog.at_level(logging.WARNING, "natgrad"):
            of.step(opt)
            of.step(opt)
    kept = opt.tracker.average
    assert isinstance(kept, ng.operators.EigenKroneckerOperator)
    assert kept.basis is G.basis
    assert len(caplog.records) == 1
    assert "cannot be found, in double precision neither: raise the damping" in caplog.records[0].getMessage()
    of.step(opt)
    assert isinstance(opt.tracker.average, ng.operators.EigenKroneckerOperator)
    assert opt.tracker.average.basis is not G.basis


def _indefinite(opt: ng.NaturalGradient) -> None:
    """Put a factor into the average that no damping of this size makes positive."""
    G = opt.tracker.average
    assert isinstance(G, KroneckerOperator)
    opt.tracker.average = replace(G, left=(G.left[0] - 1e6 * torch.eye(3, dtype=torch.float64), *G.left[1:]))


def test_a_factor_that_cholesky_cannot_invert_keeps_its_last_inverse_and_the_others_are_new(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=1, inverse_every=1)
    of.step(opt)
    assert opt.preconditioner.inverse is not None
    before = {key: t.clone() for key, t in opt.preconditioner.inverse.tensors().items()}
    _indefinite(opt)
    of.step(opt)
    kept = {key for key, t in opt.preconditioner.inverse.tensors().items() if torch.equal(t, before[key])}
    assert kept == {"0.weight/S"}
    assert bool(of.theta().isfinite().all())
    assert opt.diagnostics().inverse_age == 1
    of.step(opt)
    (said,) = caplog.messages  # once
    assert "the factor S of 0.weight + 0.bias is not positive after damping, in double precision neither: rai" in said
    assert "The last good inverse is used until the next one is due" in said


def _flagged(opt: ng.NaturalGradient) -> None:
    """As a GPU says that it could not invert a factor."""
    assert isinstance(opt.preconditioner.inverse, ProductInverse)
    opt.preconditioner.inverse.batch.failures = [torch.ones(())]


def test_what_a_gpu_could_not_invert_is_inverted_with_more_care_in_the_next_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=2, inverse_every=2)
    of.step(opt)
    assert opt.preconditioner.inverse is not None
    for t in opt.preconditioner.inverse.tensors().values():
        t.fill_(torch.nan)
    _flagged(opt)
    of.step(opt)
    assert opt.tracker.average is not None
    expected = opt.preconditioner.solver.init(opt.tracker.average, opt.preconditioner.damping).tensors()
    for key, t in opt.preconditioner.inverse.tensors().items():
        torch.testing.assert_close(t, expected[key])
    assert bool(of.theta().isfinite().all())
    assert not caplog.messages
    assert isinstance(opt.preconditioner.inverse, ProductInverse)
    assert not opt.preconditioner.inverse.failed()


def test_what_a_gpu_could_not_invert_and_care_cannot_either_stays_and_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=1, inverse_every=2, early=False)
    for _ in range(3):
        of.step(opt)
    assert opt.diagnostics().inverse_age == 0
    for age in (3, 5):  # the inverse of step 0 was kept in step 2, and again in step 4
        good = opt.tracker.average
        assert isinstance(good, KroneckerOperator)
        _indefinite(opt)
        _flagged(opt)
        of.step(opt)
        assert opt.diagnostics().inverse_age == age
        opt.tracker.average = good
        of.step(opt)
    (said,) = caplog.messages
    assert "the factor S of 0.weight + 0.bias is not positive after damping, in double precision neither" in said
    assert "The last good inverse is used until the next one is due" in said


def test_what_a_gpu_could_not_invert_at_first_and_care_cannot_either_raises_in_the_next_step() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric)
    of.step(opt)
    _indefinite(opt)
    _flagged(opt)
    with pytest.raises(SingularMetricError, match=r"the factor S of 0\.weight \+ 0\.bias is not positive after damp"):
        of.step(opt)


def test_processes_that_share_their_inverses_keep_the_last_one(caplog: pytest.LogCaptureFixture) -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=1, inverse_every=1)
    of.step(opt)
    of.step(opt)
    _flagged(opt)
    opt.preconditioner.world = SimpleNamespace(size=2)  # type: ignore[assignment]
    opt.preconditioner.handle_async_failure(opt.tracker.average)
    (said,) = caplog.messages
    assert "a factor of the metric was not positive after damping: raise the damping, or use a larger batch. Th" in said


def test_a_metric_whose_inverses_never_fail_is_not_inverted_again() -> None:
    of = task("coins")
    pb = ng.pullback(of.model, normal(4, 2), of.kind.metric)
    G = ng.Diagonal().estimate(pb)
    with pytest.raises(FactorisationError, match="a factor of the metric was not positive after damping"):
        retry(G, G.inverse(0.1), 0.1)


def test_a_factor_that_cholesky_cannot_invert_at_first_raises() -> None:
    of = task("coins")
    opt = ng.KFAC(of.model, of.kind.metric, metric_every=1, inverse_every=1)
    of.step(opt)
    _indefinite(opt)
    opt.preconditioner.inverse = None
    before = of.theta()
    with pytest.raises(
        SingularMetricError, match=r"the factor S of 0\.weight \+ 0\.bias is not positive after damping, in double"
    ):
        of.step(opt)
    assert torch.equal(of.theta(), before)


def test_without_damping_a_singular_factor_is_named_with_its_layer() -> None:
    model = seeded(lambda: mlp(3, 4, 2).double())
    opt = ng.KFAC(model, FISHER, damping=0.0)
    model(normal(2, 3)).square().sum().backward()  # two examples, A [4 4] has rank two
    with pytest.raises(SingularMetricError, match=r"the factor [SA] of 0\.weight \+ 0\.bias.*singular"):
        opt.step()
