"""The tests of this folder are of a GPU. Where there is none, ``emulator.py`` takes its place: CI runs them too.

``make cuda PYTHON=…`` runs them on a GPU, with an interpreter that has torch with CUDA and pytest; it installs nothing.
What has the mark ``gpu`` needs one: the mark says why.
"""

from collections.abc import Iterator

import pytest
import torch

from tests.cuda.emulator import emulated_gpu


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "gpu(why): needs a GPU")


def pytest_itemcollected(item: pytest.Item) -> None:
    # torch's own: raised once, by the first backward pass of the process on a GPU
    item.add_marker(pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS:UserWarning"))
    if not torch.cuda.is_available() and (mark := item.get_closest_marker("gpu")) is not None:
        item.add_marker(pytest.mark.skip(reason=f"needs a GPU: {mark.args[0]}"))


@pytest.fixture(autouse=True)
def _gpu() -> Iterator[None]:
    if torch.cuda.is_available():
        yield
        return
    with emulated_gpu():
        yield
