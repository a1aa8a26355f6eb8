"""Every test of this folder needs a GPU. They run with ``make cuda``, or without installing anything but pytest and
torch with ``python -m pytest tests/cuda`` in the root of the repository."""

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
    # torch's own: raised once, by the first backward pass of the process on a GPU
    item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))
