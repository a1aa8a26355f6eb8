"""What a permutation of the images cannot change in the coupling of examples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import natgrad as ng
from experiments.cifar import CIFAR10
from experiments.sobolev_cifar.arms import without_images
from experiments.sobolev_cifar.command import RESULTS, main
from experiments.sobolev_cifar.kernel import coupling, exchangeable, save, table
from tests.experiments.test_cifar import images, write_archive


def test_the_exchangeable_part_is_the_mean_over_all_permutations_and_the_rest_is_orthogonal_to_it() -> None:
    torch.manual_seed(0)
    C = torch.randn(4, 4, dtype=torch.float64)
    C = C @ C.T
    orders = torch.cartesian_prod(*4 * [torch.arange(4)])
    orders = orders[[len(set(order.tolist())) == 4 for order in orders]]
    mean = torch.stack([C[order][:, order] for order in orders]).mean(0)
    torch.testing.assert_close(exchangeable(C), mean)
    assert float(((C - mean) * mean).sum()) == pytest.approx(0.0, abs=1e-12)


def test_the_kernel_of_equidistant_points_is_exchangeable_and_depends_on_no_image() -> None:
    metric = without_images().metric
    assert isinstance(metric, ng.Sobolev)
    one, other = (metric.gram(torch.randn(5, 3, 4, 4, dtype=torch.float64), 5) for _ in range(2))
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(one, 0.9 * torch.eye(5, dtype=torch.float64) + 0.1, rtol=1e-5, atol=0.0)


def test_the_numbers_of_a_kernel_are_those_of_its_inverse_by_hand() -> None:
    """(aI + b11ᵀ)⁻¹ = I/a − b11ᵀ/(a(a + nb)); a chain of three, whose inverse has other couplings, keeps less."""
    n, a, b = 4, 0.75, 0.25
    found = coupling(a * torch.eye(n, dtype=torch.float64) + b)
    assert found == pytest.approx(
        {"similarity": b, "diagonal": 1 / a - b / (a * (a + n * b)), "along_the_mean": 1 / (a + n * b), "kept": 1.0}
    )
    inverse = torch.tensor([[2.0, -1.0, 0.0], [-1.0, 2.0, -1.0], [0.0, -1.0, 2.0]], dtype=torch.float64)
    found = coupling(torch.linalg.inv(inverse))  # ¼ [3 2 1; 2 4 2; 1 2 3]
    assert found == pytest.approx(
        {"similarity": 5 / 12, "diagonal": 2.0, "along_the_mean": 2 / 3, "kept": (12 + 6 * 4 / 9) / 16}
    )


def test_the_command_measures_batches_of_the_training(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    write_archive(tmp_path / "data", images(CIFAR10, 64))
    places = ["--data", f"{tmp_path}/data", "--out", f"{tmp_path}/out", "--results", f"{tmp_path}"]
    main([*places, "--kernel", "--batch", "16", "--device", "cpu"])
    (found,) = json.loads((tmp_path / "kernel.json").read_text())
    assert (found["dataset"], found["batch"], found["batches"]) == ("cifar10", 16, 4)
    main([*places, "--kernel", "--batch", "2", "--device", "cpu"])
    (found,) = json.loads((tmp_path / "kernel.json").read_text())  # measured again
    assert found["kept"] == pytest.approx(1.0)  # two images have one coupling


def test_images_that_are_not_measured_again_stay(tmp_path: Path) -> None:
    def numbers(dataset: str, kept: float) -> dict[str, Any]:
        return {"dataset": dataset, "similarity": 0.1, "diagonal": 1.25, "along_the_mean": 0.5, "kept": kept}

    save([numbers("cifar10", 0.5), numbers("cifar100", 0.25)], tmp_path)
    rows = save([numbers("cifar10", 0.75)], tmp_path).splitlines()[2:]
    assert rows == ["| CIFAR-10 | 0.10 | 1.25 | 0.50 | 75 % |", "| CIFAR-100 | 0.10 | 1.25 | 0.50 | 25 % |"]
    assert (RESULTS / "kernel.md").read_text().strip() == table(json.loads((RESULTS / "kernel.json").read_text()))
