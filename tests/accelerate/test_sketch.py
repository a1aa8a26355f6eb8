"""Sketches: how far matrices have moved, from products with random signs."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from natgrad.accelerate.sketch import Sketch, signs


def _moments(sizes: list[int]) -> list[Tensor]:
    roots = (torch.randn(1, d, 2 * d, dtype=torch.float64) for d in sizes)
    return [root @ root.mT / (2 * root.shape[1]) for root in roots]


def test_the_drift_is_that_of_frobenius_norms_in_the_mean() -> None:
    torch.manual_seed(0)
    sizes = list(range(2, 102))
    then, other = _moments(sizes), _moments(sizes)
    now = [0.9 * a + 0.1 * b for a, b in zip(then, other, strict=True)]
    squares = [((a - b).norm() / b.norm()).square() for a, b in zip(now, then, strict=True)]
    exact = torch.stack(squares).mean().sqrt()
    drift = Sketch.of(now).drift(Sketch.of(then).values)
    torch.testing.assert_close(drift, exact, rtol=0.05, atol=0.0)


def test_a_change_of_scale_is_measured_exactly() -> None:
    torch.manual_seed(1)
    then = [*_moments([3, 5]), torch.rand(1, 7, dtype=torch.float64), torch.rand(4, dtype=torch.float64)]
    now = [1.3 * m for m in then]
    drift = Sketch.of(now).drift(Sketch.of(then).values)
    torch.testing.assert_close(drift, torch.tensor(0.3, dtype=torch.float64))


def test_zeros_that_stay_have_not_moved_and_zeros_that_move_have() -> None:
    zero, one = torch.zeros(1, 3, 3), torch.eye(3)[None]
    then = Sketch.of([zero, one]).values
    assert float(Sketch.of([zero, one]).drift(then)) == 0.0
    assert float(Sketch.of([1e-6 * one, one]).drift(then)) == float("inf")


class NoReading(TorchDispatchMode):
    """Inside, the host may not look at a number of a tensor, for which it would wait for a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """As it is, but for reading."""
        assert func is not torch.ops.aten._local_scalar_dense.default, "the host reads a number"
        return func(*args, **(kwargs or {}))


def test_no_number_is_read_on_the_way() -> None:
    then, now = ([c * torch.eye(3)[None], c * torch.ones(1, 4)] for c in (1.0, 2.0))
    with NoReading():  # type: ignore[no-untyped-call]
        drift = Sketch.of(now).drift(Sketch.of(then).values)
    assert float(drift) == 1.0


def test_signs_stay_where_captured_kernels_read_them() -> None:
    first, *_ = [signs(n, torch.float32, torch.device("cpu"), 1) for n in range(1, 600)]
    assert signs(1, torch.float32, torch.device("cpu"), 1) is first
