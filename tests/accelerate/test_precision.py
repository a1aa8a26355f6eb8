"""In which types second moments are multiplied and summed, on a processor and, as far as can be told here, on a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from natgrad.accelerate.moments import (
    bfloat16_allowed,
    in_half,
    multiplied,
    multiply,
    multiply_add,
    rounded,
    single,
    summed,
)


@dataclass(frozen=True)
class _There:
    """As much of a tensor on a GPU as is asked for."""

    dtype: torch.dtype

    @property
    def device(self) -> torch.device:
        return torch.device("cuda")


@pytest.fixture
def precision() -> Iterator[None]:
    """What the test sets is set back."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


MUCH = 2**29  # products
HALVES = [torch.float16, torch.bfloat16]


@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_summed_in_single(half: torch.dtype) -> None:
    assert summed(half) is torch.float32
    assert single(torch.zeros(2, dtype=half)).dtype is torch.float32
    assert summed(torch.float64) is torch.float64


@pytest.mark.parametrize("half", HALVES)
def test_half_precision_is_multiplied_as_it_is_on_a_gpu_and_widened_on_a_processor(half: torch.dtype) -> None:
    there, here = _There(half), torch.zeros(2, dtype=half)
    for work in (1, MUCH):
        assert multiplied(there, work) is half  # type: ignore[arg-type]
        assert multiplied(here, work) is torch.float32
    assert in_half(there)  # type: ignore[arg-type]
    assert not in_half(rounded(here, 1))


def test_where_torch_may_sum_in_float16_it_is_widened_for_torch_would_refuse() -> None:
    before = torch.backends.cuda.matmul.allow_fp16_accumulation
    try:
        torch.backends.cuda.matmul.allow_fp16_accumulation = True
        assert multiplied(_There(torch.float16), 1) is torch.float32  # type: ignore[arg-type]
        assert multiplied(_There(torch.bfloat16), 1) is torch.bfloat16  # type: ignore[arg-type]
    finally:
        torch.backends.cuda.matmul.allow_fp16_accumulation = before


@pytest.fixture(params=[(7, 5), (9, 0)], ids=["Turing", "Hopper"])
def ampere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the GPU there is as new as that."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: request.param)
    return bool(request.param >= (8, 0))


@pytest.mark.usefixtures("precision")
@pytest.mark.parametrize(("setting", "found"), [("highest", False), ("high", False), ("medium", True)])
def test_single_precision_is_rounded_only_where_it_pays_and_torch_was_told_that_it_may_be(
    setting: str, found: bool, ampere: bool
) -> None:
    torch.set_float32_matmul_precision(setting)
    there, expected = _There(torch.float32), torch.bfloat16 if found and ampere else torch.float32
    assert bfloat16_allowed() is found
    assert multiplied(there, MUCH) is expected  # type: ignore[arg-type]
    assert multiplied(there, MUCH - 1) is torch.float32  # type: ignore[arg-type]
    assert multiplied(_There(torch.float64), MUCH) is torch.float64  # type: ignore[arg-type]
    assert multiplied(torch.zeros(2), MUCH) is torch.float32  # torch itself does so on a processor, where it can


@pytest.mark.usefixtures("precision")
def test_the_newer_switches_of_torch_do_not_stand_in_the_way() -> None:
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        assert not bfloat16_allowed()
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


def test_products_go_where_they_belong() -> None:
    a, b = torch.randn(3, 5, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    out = torch.zeros(5, 6, dtype=torch.float64)[:3, :4]
    multiply(a, b, out)
    torch.testing.assert_close(out, a @ b)
    multiply_add(out, a, b, out, alpha=-3.0)
    torch.testing.assert_close(out, -2 * a @ b)
