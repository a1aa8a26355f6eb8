"""Squared distances without cancellation, and what counts as a point."""

import pytest
import torch

from natgrad.kernels.distances import points, squared_distances
from tests.pulled import close, normal


def test_distances_are_those_of_the_differences() -> None:
    x, y = normal(5, 3), normal(4, 3, seed=1)
    close(squared_distances(x, y), (x[:, None] - y).square().sum(2))


def test_equal_points_are_at_distance_zero_where_the_matrix_product_mode_is_not() -> None:
    x = normal(64, 3072).float() + 10
    u = squared_distances(x, x)
    assert (u.diagonal() == 0).all()
    product = torch.cdist(x, x, compute_mode="use_mm_for_euclid_dist")
    assert product.diagonal().max() > 1e-3
    close(u.double(), (x.double()[:, None] - x.double()).square().sum(2), 1e-5)


def test_near_points_far_from_the_origin_keep_their_digits() -> None:
    x = torch.tensor([[1e6, 1e6]], dtype=torch.float64)
    close(squared_distances(x, x + 2.0**-10), torch.full((1, 1), 2 * 2.0**-20, dtype=torch.float64), 1e-20)


def test_distances_have_first_and_second_derivatives() -> None:
    x, y = normal(3, 2).requires_grad_(), normal(4, 2, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(squared_distances, (x, y), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(squared_distances, (x, y))


def test_second_derivatives_in_forward_mode_are_those_of_reverse_mode() -> None:
    x, y = normal(3, 2), normal(4, 2)
    forward, reverse = (d(d(lambda x: squared_distances(x, y).sum())) for d in (torch.func.jacfwd, torch.func.jacrev))
    close(forward(x), reverse(x))


def test_derivatives_of_many_points_are_taken_a_few_rows_at_a_time_and_are_the_same() -> None:
    x, y, g = normal(9, 1000).requires_grad_(), normal(1000, 1000, seed=1), normal(9, 1000, seed=2)  # 4 rows together
    (gradient,) = torch.autograd.grad(squared_distances(x, y), x, g)
    close(gradient, 2 * (g.sum(1, keepdim=True) * x.detach() - g @ y), 1e-12)


def test_inputs_of_any_shape_are_flattened_to_points_and_half_precision_is_raised() -> None:
    assert points(torch.zeros(4, 3, 2, 2)).shape == (4, 12)
    assert points(torch.zeros(4)).shape == (4, 1)
    assert points(torch.zeros(0, 3, 2)).shape == (0, 6)
    assert points(torch.zeros(4, 2, dtype=torch.bfloat16)).dtype == torch.float32
    assert squared_distances(points(torch.zeros(2, 3)), points(torch.zeros(5, 3).double())).dtype == torch.float64


@pytest.mark.parametrize(
    "x", [torch.tensor([1, 2]), torch.tensor([True]), torch.zeros(2, dtype=torch.complex64), [1.0]]
)
def test_inputs_that_are_no_points_are_refused_and_features_asked_for(x: object) -> None:
    with pytest.raises(TypeError, match=r"no points in R\^d.*Pass features="):
        points(x)


def test_features_that_return_no_points_are_refused() -> None:
    with pytest.raises(TypeError, match=r"features= returned torch\.int64"):
        points(torch.tensor([1]), features=lambda x: x)


def test_shapes_that_are_no_points_are_refused() -> None:
    with pytest.raises(ValueError, match="examples on the first axis, got one number"):
        points(torch.tensor(1.0))
    with pytest.raises(ValueError, match="have no coordinate"):
        points(torch.zeros(3, 0))
    with pytest.raises(ValueError, match=r"points in R\^2 and in R\^3"):
        squared_distances(torch.zeros(1, 2), torch.zeros(1, 3))


@pytest.mark.parametrize("n", [0, 1, 2, 7])
def test_points_among_themselves_are_compared_once_and_alike(n: int) -> None:
    x = normal(n, 3)
    with torch.no_grad():
        u = squared_distances(x, x)
    close(u, squared_distances(x, x.clone()), 1e-14)
    assert torch.equal(u, u.T)
    assert bool((u.diagonal() == 0).all())


def test_a_point_that_is_not_finite_is_at_no_distance_from_itself() -> None:
    x = torch.tensor([[0.0], [torch.inf], [torch.nan]])
    with torch.no_grad():
        assert squared_distances(x, x).diagonal().isnan().tolist() == [False, True, True]
