"""Models with convolutions, linearised: J and Jᵀ are those of torch.func, whatever the convolution."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jvp, vjp

from natgrad.linearise import linearise
from natgrad.model import Model

CONVOLUTIONS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "plain": (lambda: nn.Conv2d(2, 3, 3), (4, 2, 6, 6)),
    "no_bias": (lambda: nn.Conv2d(2, 3, 3, bias=False), (4, 2, 6, 6)),
    "strided": (lambda: nn.Conv2d(2, 4, (3, 2), stride=2, padding=(1, 0)), (4, 2, 7, 6)),
    "dilated_groups": (lambda: nn.Conv2d(4, 4, 3, dilation=2, groups=2), (4, 4, 7, 7)),
    "same": (lambda: nn.Conv2d(2, 3, 3, padding="same"), (4, 2, 5, 5)),
    "circular": (lambda: nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular"), (4, 2, 5, 5)),
    "one_dimension": (lambda: nn.Conv1d(2, 3, 3, stride=2), (4, 2, 9)),
    "three_dimensions": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 3, 3)),
    "transposed": (lambda: nn.ConvTranspose2d(2, 3, 3), (4, 2, 4, 4)),
}


class Twice(nn.Module):
    """The convolution, an in-place activation, and the same convolution's outputs mixed by another."""

    def __init__(self, first: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        with torch.no_grad():
            width = first(torch.zeros(shape)).shape[1]
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(shape) - 3]
        self.first, self.second = first, kind(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        """y [n d]."""
        return torch.tanh(self.second(torch.relu_(self.first(x)))).flatten(1)


class InnerGradient(nn.Module):
    """y = ∂E/∂x: the parameters are seen through a backward pass inside the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(1, 2, 2), nn.Conv2d(2, 1, 2)

    def forward(self, x: Tensor) -> Tensor:
        """The gradient of an energy in the inputs."""
        inputs = x.detach().requires_grad_()
        energy = self.head(torch.tanh(self.conv(inputs))).square().sum()
        (y,) = torch.autograd.grad(energy, inputs, create_graph=True)
        return y.flatten(1)


def check(model: nn.Module, x: Tensor) -> None:
    """push and pull beside torch.func's jvp and vjp."""
    model = model.double()
    params = {name: p.detach() for name, p in model.named_parameters()}
    v = {name: torch.randn_like(p) for name, p in params.items()}
    at = linearise(Model.of(model), x)
    u = torch.randn_like(at.y)
    for _ in range(2):  # every product anew
        pushed, pulled = at.push(v), at.pull(u)
    expected, moved = jvp(lambda θ: functional_call(model, θ, x), (params,), (v,))[:2]
    pull = vjp(lambda θ: functional_call(model, θ, x), params)[1]
    assert torch.allclose(at.y, expected, rtol=1e-12)
    assert torch.allclose(pushed, moved, rtol=1e-10, atol=1e-12)
    for name, g in pull(u)[0].items():
        assert torch.allclose(pulled[name], g, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_products_with_a_linearised_convolution_are_those_of_torch_func(name: str) -> None:
    make, shape = CONVOLUTIONS[name]
    torch.manual_seed(0)
    check(Twice(make(), shape), torch.randn(shape, dtype=torch.float64))


def test_frozen_weights_and_frozen_biases_keep_their_place() -> None:
    torch.manual_seed(0)
    for frozen in ("weight", "bias"):
        model = Twice(nn.Conv2d(1, 2, 2), (3, 1, 4, 4)).double()
        model.get_parameter(f"first.{frozen}").requires_grad_(False)
        x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
        wrapped = Model.of(model)
        v = {name: torch.randn_like(p) for name, p in wrapped.params.items()}
        params = {name: p.detach() for name, p in wrapped.params.items()}
        _, moved = jvp(lambda θ, m=model, a=x: functional_call(m, θ, a), (params,), (v,))  # type: ignore[misc]
        assert torch.allclose(linearise(wrapped, x).push(v), moved, rtol=1e-10)


def test_a_model_that_differentiates_in_its_forward_pass_is_linearised_through_it() -> None:
    torch.manual_seed(0)
    model, x = InnerGradient().double(), torch.randn(3, 1, 4, 4, dtype=torch.float64)
    wrapped, h = Model.of(model), 1e-5
    v = {name: torch.randn_like(p) for name, p in wrapped.params.items()}

    def y(step: float) -> Tensor:
        return functional_call(model, {name: p.detach() + step * v[name] for name, p in wrapped.params.items()}, x)

    at = linearise(wrapped, x)
    pushed: Any = at.push(v)
    assert torch.allclose(pushed, (y(h) - y(-h)).detach() / (2 * h), rtol=1e-6, atol=1e-8)
    u = torch.randn_like(pushed)
    pulled = at.pull(u)
    assert torch.allclose(sum((pulled[name] * v[name]).sum() for name in v), (u * pushed).sum(), rtol=1e-10)  # type: ignore[arg-type]
