"""Pictures for the experiments, in memory and in files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from experiments.cifar import CIFAR10, write_pieces
from experiments.images import Images
from tests.experiments.test_cifar import images


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """A run chooses threads and convolutions for its whole process; one thread is most for what is so small."""
    threads, fastest = torch.get_num_threads(), torch.backends.cudnn.benchmark
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = fastest


@pytest.fixture(scope="module")
def pictures() -> Images:
    return images(CIFAR10, 64)


@pytest.fixture
def folder(pictures: Images, tmp_path: Path) -> Path:
    """The pictures in files."""
    for split, part in (("train", pictures.train), ("test", pictures.test)):
        write_pieces(tmp_path / "data", f"cifar10_{split}", part.x.numpy(), part.y.numpy())
    return tmp_path
