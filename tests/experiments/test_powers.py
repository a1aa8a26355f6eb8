"""The model behind the page on optimizers: what noise asks of the power of the metric."""

from pathlib import Path

import pytest
import torch

from experiments import powers


def test_without_steps_of_noise_the_whole_inverse_solves_a_quadratic_in_one_step() -> None:
    """E e² ← (1 − η)² e² + η²/(hB): with p = 1, η = 1 and no noise nothing is left, whatever the eigenvalues."""
    assert powers.remaining(1.0, 1e12) < 1e-6


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0])
def test_the_expectation_is_the_mean_of_runs(power: float) -> None:
    """The recursion for E e², beside many runs with sampled noise and the same learning rates."""
    generator = torch.Generator().manual_seed(0)
    h, batch, rate = torch.tensor([1.0, 0.3, 0.05], dtype=torch.float64), 4.0, 0.1
    e, squares = torch.ones(20_000, 3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
    for step in range(20):
        η = rate * powers.schedule(step, 20)
        noise = torch.randn(e.shape, dtype=torch.float64, generator=generator) * (h / batch).sqrt()
        e = e - η * h**-power * (h * e + noise)
        squares = powers.expected(squares, h, torch.tensor(η), power, batch)
    torch.testing.assert_close(e.square().mean(0), squares, rtol=0.05, atol=1e-3)


def test_the_larger_the_batch_the_more_of_the_inverse_pays() -> None:
    best = [powers.best(batch) for batch in powers.BATCHES]
    assert best == sorted(best)
    assert best[0] <= 0.5 < best[-1]
    assert all(float(powers.worse(0.5, batch)) < 1.5 for batch in powers.BATCHES)


def test_the_figure_is_drawn_and_small(tmp_path: Path) -> None:
    assert powers.draw(tmp_path).stat().st_size < 100_000
