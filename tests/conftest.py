"""Every test draws the same random numbers, whatever ran before it and however many jobs there are."""

from collections.abc import Iterator

import pytest
import torch

GPU = torch.cuda.is_available()


def seed() -> None:
    """As ``torch.manual_seed(0)``, which without a GPU formats the call stack for each kind of device: 2 ms a test."""
    if GPU:
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Parameters of a test are made when its file is imported."""
    if isinstance(collector, pytest.Module):
        seed()


@pytest.fixture(autouse=True)
def _seed() -> None:
    seed()


@pytest.fixture
def double_precision() -> Iterator[None]:
    """New tensors are float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)
