"""Every test of this folder needs a GPU. ``make cuda PYTHON=…`` runs them with an interpreter that has torch with CUDA
and pytest; it installs nothing."""

import pytest
import torch


def pytest_itemcollected(item: pytest.Item) -> None:
    item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
    # torch's own: raised once, by the first backward pass of the process on a GPU
    item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))
