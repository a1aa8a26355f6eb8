"""Every test draws the same random numbers, whatever ran before it and however many jobs there are."""

import pytest
import torch


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Parameters of a test are made when its file is imported."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)
