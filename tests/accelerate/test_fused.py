"""Updates of many tensors at once, and the gate that keeps NaN out."""

import pytest
import torch
from torch import Tensor

from natgrad.accelerate import fused
from natgrad.accelerate.fused import (
    Flag,
    add_,
    average_,
    copy_,
    descend_,
    momentum_update_,
    move_,
    pairing,
    scale_,
    scale_each_,
)
from natgrad.errors import NonFiniteError
from tests.pulled import normal


@pytest.mark.parametrize("gpu", [False, True])
def test_a_pairing_is_the_sum_of_all_products(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where small tensors are joined, as on a GPU."""
    monkeypatch.setattr(fused, "is_asynchronous", lambda device: gpu)
    shapes = ((3,), (100, 200), (1, 1), (2, 3))
    pairs = [(normal(*shape, seed=at), normal(*shape, seed=at + 9)) for at, shape in enumerate(shapes)]
    pairs += [(x.T, y.T) for x, y in pairs if x.ndim == 2]
    expected = torch.stack([(x * y).sum() for x, y in pairs]).sum()
    torch.testing.assert_close(pairing(pairs), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(pairing(pairs[1:2]), (pairs[1][0] * pairs[1][1]).sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_pairing_of_half_precision_is_a_sum_in_single(dtype: torch.dtype) -> None:
    x, y = torch.full((1000,), 1e3, dtype=dtype), torch.full((1000,), 1e3, dtype=dtype)
    found = pairing([(x, y), (x.float(), y)])
    assert found.dtype is torch.float32
    torch.testing.assert_close(found, 2 * (x.float() @ y.float()))  # float16 ends at 65504


def _three() -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of different memory formats, over which torch's fused kernels would read wrongly."""
    xs, ys, ms = (list(torch.randn(3, 2, 3, 2, 2, generator=torch.Generator().manual_seed(at))) for at in range(3))
    xs[0], ms[0], ys[1] = (t.contiguous(memory_format=torch.channels_last) for t in (xs[0], ms[0], ys[1]))
    return xs, ys, ms


GATES = {"without a gate": None, "through an open gate": torch.zeros(())}


@pytest.mark.parametrize("gate", GATES.values(), ids=GATES)
def test_updates_are_those_of_every_tensor_by_itself(gate: Tensor | None) -> None:
    xs, ys, ms = _three()
    added, descended, rolled, momenta, copied, moved, scaled = (
        [t.clone() for t in of] for of in (xs, xs, xs, ms, xs, xs, xs)
    )
    add_(added, ys, alpha=0.5, gate=gate)
    descend_(descended, ys, 0.5, gate=gate)
    momentum_update_(
        rolled,
        [y.clone() for y in ys],
        momenta,
        rate=0.1,
        momentum=0.5,
        divisor=torch.full((), 2.0),
        gate=gate,
    )
    copy_(copied, ys, gate=gate)
    move_(moved, [y.clone() for y in ys], gate=gate)
    scale_(scaled, 0.5, gate=gate)
    for at, (x, y, m) in enumerate(zip(xs, ys, ms, strict=True)):
        torch.testing.assert_close(added[at], x + 0.5 * y)
        torch.testing.assert_close(descended[at], x - 0.5 * y)
        torch.testing.assert_close(momenta[at], 0.5 * m + y / 2)
        torch.testing.assert_close(rolled[at], x - 0.1 * (0.5 * m + y / 2))
        assert torch.equal(copied[at], y)
        torch.testing.assert_close(moved[at], y)
        assert torch.equal(scaled[at], 0.5 * x)


def test_a_moving_average_divides_the_new_part_by_its_count() -> None:
    xs, ys, _ = _three()
    averaged = [t.clone() for t in xs]
    average_(averaged, ys, 0.25, count=4, gate=torch.zeros(()))
    for at, (x, y) in enumerate(zip(xs, ys, strict=True)):
        torch.testing.assert_close(averaged[at], 0.75 * x + 0.25 * y / 4)


def test_nothing_passes_a_closed_gate() -> None:
    xs, ys, ms = _three()
    bad = [torch.full_like(y, torch.nan) for y in ys]
    gate = fused.nonfinite(bad)
    before = [t.clone() for t in (*xs, *ms)]
    add_(xs, bad, gate=gate)
    descend_(xs, bad, 1.0, gate=gate)
    momentum_update_(xs, [t.clone() for t in bad], ms, rate=0.1, momentum=0.9, divisor=torch.ones(()), gate=gate)
    average_(xs, bad, 0.5, count=1, gate=gate)
    copy_(xs, bad, gate=gate)
    move_(xs, [t.clone() for t in bad], gate=gate)
    scale_(xs, 0.5, gate=gate)
    assert all(torch.equal(t, old) for t, old in zip((*xs, *ms), before, strict=True))


def test_a_flag_raises_when_it_has_arrived() -> None:
    flag = Flag()
    for step, value in enumerate([0.0, 1.0]):
        flag.value = torch.tensor(value)
        flag.send("the step", step)
    (_, late) = [host for host, *_ in flag._readings._sent]
    late.fill_(torch.nan)  # on its way from the device
    flag.raise_pending()
    late.fill_(1.0)
    with pytest.raises(NonFiniteError, match="the step held NaN or infinity at step 1: that step changed nothing"):
        flag.raise_pending()
    flag.raise_pending()


@pytest.mark.parametrize("gpu", [False, True])
def test_every_tensor_has_its_own_factor_wherever_it_lies(gpu: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Side by side, alone, of another shape, and with other strides."""
    monkeypatch.setattr(fused, "is_asynchronous", lambda device: gpu)
    stack, other = normal(3, 2, 4), normal(4, 2)
    tensors = [stack[2], other.T, normal(5), stack[0], normal(2, 4), stack[1]]
    factors = normal(len(tensors), seed=1).unbind()
    expected = [t * factor for t, factor in zip(tensors, factors, strict=True)]
    scale_each_(tensors, factors)
    for found, right in zip(tensors, expected, strict=True):
        assert torch.equal(found, right)


def test_descent_with_decay_is_the_same_with_a_gate() -> None:
    x, y = normal(4, 3).float(), normal(4, 3, seed=1).float()
    expected = (1 - 0.1 * 0.5) * x - 0.1 * y
    for gate in (None, torch.zeros(())):
        moved = x.clone()
        descend_([moved], [y], 0.1, decay=0.5, gate=gate)
        torch.testing.assert_close(moved, expected)
    descend_([moved], [y], 0.1, decay=0.5, gate=torch.ones(()))
    torch.testing.assert_close(moved, expected)
