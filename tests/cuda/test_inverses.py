"""Inverses that a GPU makes again and again, from a recording."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.accelerate import inverses as inverting
from natgrad.accelerate.inverses import inverse as by_cholesky
from natgrad.errors import FactorisationError, SingularMetricError
from natgrad.operators import KroneckerOperator
from natgrad.structures.kronecker import ProductInverse, retry
from tests.cuda.emulator import EMULATED
from tests.cuda.waiting import no_waiting


@pytest.fixture(autouse=True)
def widths(monkeypatch: pytest.MonkeyPatch) -> tuple[int, ...]:
    """Stacks, matrices that are alone, and one that is too large to be recorded; small ones where no GPU is fast."""
    if not EMULATED:
        return 20, 30, 30, 30, 900, 2100, 3
    for name, rows in (("_BATCHED", (64, 64)), ("_LARGE", 100), ("_CAPTURED", 150)):
        monkeypatch.setattr(inverting, name, rows)
    return 20, 30, 30, 30, 90, 160, 3


def estimated(*widths: int) -> KroneckerOperator:
    torch.manual_seed(0)
    layers = [nn.Linear(i, o) for i, o in pairwise(widths)]
    pb = ng.pullback(nn.Sequential(*layers).cuda(), torch.randn(64, widths[0], device="cuda"), ng.Euclidean())
    G = ng.Kronecker().estimate(pb)
    assert isinstance(G, KroneckerOperator)
    return G


def test_recorded_inverses_follow_their_factors_and_the_damping(widths: tuple[int, ...]) -> None:
    G = estimated(*widths)
    solver = ng.Factored()
    inverse = solver.init(G, 0.1)
    factors: list[Tensor] = [*G.left, *G.right]
    for turn in range(5):
        damping = 0.1 + 0.02 * turn
        torch._foreach_mul_(factors, 1.1)
        if turn > 1:
            with no_waiting():
                solver.again(inverse, G, damping)
        else:
            solver.again(inverse, G, damping)  # and the second time recorded
        expected = solver.init(G, damping).tensors()
        for key, found in inverse.tensors().items():
            torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-4 * float(expected[key].abs().max()))
    assert isinstance(inverse, ProductInverse)
    assert not inverse.failed()


@pytest.mark.parametrize("power", [0.5, 0.7, 0.75, 1.0])
def test_recorded_powers_are_those_of_the_eigenvalues_of_the_cpu(power: float, widths: tuple[int, ...]) -> None:
    G = replace(estimated(*widths), power=power)
    solver, factors = ng.Factored(), [*G.left, *G.right]
    inverse = solver.init(G, ng.Relative(0.1))
    for turn in range(4):
        ε = ng.Relative(0.1 + 0.005 * turn)
        torch._foreach_mul_(factors, 1.1)
        if turn > 1:
            with no_waiting():
                solver.again(inverse, G, ε)
        else:
            solver.again(inverse, G, ε)  # and the second time recorded
    assert isinstance(inverse, ProductInverse)
    assert not inverse.failed()
    with torch.device("cpu"):
        there = replace(G, left=tuple(f.cpu() for f in G.left), right=tuple(f.cpu() for f in G.right))
        expected = solver.init(there, ε).tensors()
    for key, found in inverse.tensors().items():  # condition numbers up to 10⁴, products that are split: 2⁻²² of a sum
        scale = float(expected[key].abs().max())
        torch.testing.assert_close(found.cpu(), expected[key], rtol=3e-3, atol=3e-3 * scale)


def test_a_factor_that_fails_in_a_recording_is_heard_of_and_keeps_its_inverse() -> None:
    G = estimated(20, 30, 30, 90 if EMULATED else 900, 3)
    solver = ng.Factored()
    inverse = solver.init(G, 0.1)
    assert isinstance(inverse, ProductInverse)
    for _ in range(3):
        solver.again(inverse, G, 0.1)
    before = {key: t.clone() for key, t in inverse.tensors().items()}
    kept = G.left[1].clone()
    G.left[1].sub_(100 * torch.eye(30, device="cuda"))
    solver.again(inverse, G, 0.1)
    torch.cuda.synchronize()
    assert inverse.failed()
    assert torch.equal(inverse.tensors()["1.weight/S"], before["1.weight/S"])
    G.left[1].copy_(kept)
    solver.again(inverse, G, 0.1)
    torch.cuda.synchronize()
    assert not inverse.failed()


def test_what_single_precision_could_not_invert_is_mended_in_double(monkeypatch: pytest.MonkeyPatch) -> None:
    """Single precision is made to fail, whatever rounding would do."""
    G = estimated(20, 30, 30, 3)
    inverse = ng.Factored().init(G, 0.1)
    expected = {key: t.clone() for key, t in inverse.tensors().items()}
    asked: list[torch.dtype] = []

    def failing(M: Tensor) -> tuple[Tensor, Tensor]:
        asked.append(M.dtype)
        found, good = by_cholesky(M)
        return found, good if M.dtype == torch.float64 else torch.zeros_like(good)

    monkeypatch.setattr(inverting, "inverse", failing)
    for t in inverse.tensors().values():
        t.fill_(torch.nan)
    retry(G, inverse, 0.1)
    assert set(asked) == {torch.float32, torch.float64}
    assert isinstance(inverse, ProductInverse)
    assert not inverse.failed()
    for key, found in inverse.tensors().items():
        torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-4 * float(expected[key].abs().max()))


def test_a_factor_that_no_precision_helps_is_named_and_keeps_its_inverse() -> None:
    G = estimated(20, 30, 30, 3)
    inverse = ng.Factored().init(G, 0.1)
    before = inverse.tensors()["1.weight/S"].clone()
    G.left[1].sub_(100 * torch.eye(30, device="cuda"))
    with pytest.raises(FactorisationError, match=r"the factor S of 1\.weight \+ 1\.bias is not positive after damping"):
        retry(G, inverse, 0.1)
    assert torch.equal(inverse.tensors()["1.weight/S"], before)
    with pytest.raises(SingularMetricError, match=r"the factor S of 1\.weight \+ 1\.bias is not positive after damp"):
        ng.Factored().init(G, 0.1)


def test_other_factors_in_other_places_are_not_those_that_were_recorded() -> None:
    G = estimated(20, 30, 30, 3)
    other = replace(G, left=tuple(2 * s for s in G.left), right=tuple(3 * a for a in G.right))
    solver = ng.Factored()
    inverse = solver.init(G, 0.1)
    for operator in (G, other, G, other, other):
        solver.again(inverse, operator, 0.1)
        expected = solver.init(operator, 0.1).tensors()
        for key, found in inverse.tensors().items():
            torch.testing.assert_close(found, expected[key], rtol=1e-4, atol=1e-5)
