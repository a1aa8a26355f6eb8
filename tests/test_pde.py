"""Differential operators of networks, against nested automatic differentiation point by point."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, jacfwd, jacrev, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import natgrad as ng
from natgrad import jet
from natgrad.log import OnceLogger

Function = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def points(n: int = 5, d: int = 3) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64)


def by_points(f: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """u [n *out], ∇u [n *out d] and ∇²u [n *out d d] by nested automatic differentiation, one point at a time."""

    def one(point: Tensor) -> Tensor:
        return f(point.unsqueeze(0)).squeeze(0)

    with sdpa_kernel(SDPBackend.MATH):
        each = [(one(p), jacrev(one)(p), jacfwd(jacrev(one))(p)) for p in x]
    u, slope, curvature = (torch.stack(parts) for parts in zip(*each, strict=True))
    return u, slope, curvature


def trace(H: Tensor) -> Tensor:
    return H.diagonal(dim1=-2, dim2=-1).sum(-1)


def check(f: Any, x: Tensor) -> None:
    value, slope, curvature = by_points(f, x)
    u = ng.pde.derivatives(f, x)
    torch.testing.assert_close(u.value, value, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(u.gradient, slope, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(u.laplacian, trace(curvature), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ng.pde.gradient(f, x), slope, rtol=1e-10, atol=1e-10)


def mlp(activation: nn.Module, d: int = 3, out: int = 2) -> nn.Sequential:
    layers = nn.Linear(d, 8), activation, nn.Linear(8, 8), copy.deepcopy(activation), nn.Linear(8, out)
    return nn.Sequential(*layers).double()


ACTIVATIONS = (
    *(nn.Tanh(), nn.Sigmoid(), nn.SiLU(), nn.SiLU(inplace=True), nn.GELU(), nn.GELU("tanh"), nn.Softplus(beta=2)),
    *(nn.Mish(), nn.LogSigmoid(), nn.ELU(0.7), nn.CELU(), nn.SELU(), nn.Softsign(), nn.Tanhshrink(), nn.Softmax(-1)),
    *(nn.LayerNorm(8), nn.RMSNorm(8), nn.GroupNorm(2, 8), nn.LogSoftmax(-1), nn.Dropout().eval()),
)


@pytest.mark.parametrize("activation", ACTIVATIONS, ids=repr)
def test_networks(activation: nn.Module) -> None:
    check(mlp(activation), points())


def _functions() -> dict[str, Function]:
    layer, matrix = nn.Linear(3, 8).double(), torch.randn(8, 8, dtype=torch.float64)
    mask = torch.arange(8) % 2 == 0

    def h(x: Tensor) -> Tensor:
        return layer(x).tanh()

    def grown(x: Tensor) -> Tensor:
        y = layer(x)
        y += x[:, :1]
        y *= 2
        y /= 3
        return y.tanh()

    def seen_by_two_names(x: Tensor) -> Tensor:
        y = layer(x).sin()
        z = y
        y += 1
        return z.square()

    def counting_in_place(x: Tensor) -> Tensor:
        steps = torch.zeros(1, dtype=x.dtype)
        each = []
        for _ in range(3):
            each.append(x + steps)
            steps += 1
        return each[0] * each[1] * each[2]

    def reshaped_in_place(x: Tensor) -> Tensor:
        y = layer(x).sin()
        y.unsqueeze_(1)
        return y * torch.ones(1, 2, 1, dtype=x.dtype)

    def attended(x: Tensor) -> Tensor:
        q = h(x).unsqueeze(1) * matrix
        return F.scaled_dot_product_attention(q, q, q).flatten(1)

    return {
        "linear": layer,
        "constant second derivative": lambda x: x.square().sum(-1),
        "sum of a value and a bias": lambda x: layer(x) + h(x),
        "difference": lambda x: 1 - 2 * h(x) - (3 - x[:, :1]),
        "product": lambda x: layer(x) * torch.sigmoid(layer(x)),
        "broadcast product": lambda x: h(x) * x[:, :1] * x.sum(-1, keepdim=True),
        "quotient": lambda x: layer(x) / (1 + x.square().sum(-1, keepdim=True)),
        "reciprocal": lambda x: 1 / (2 + h(x)),
        "power": lambda x: layer(x) ** 3 + (2 + h(x)) ** -1.5 + x[:, :1] ** 1 + x[:, :1] ** 2,
        "exponential": lambda x: 2 ** h(x) + (2 + h(x)) ** layer(x),
        "roots": lambda x: torch.sqrt(1 + h(x) ** 2) + torch.rsqrt(2 + h(x)) + torch.log(2 + h(x)),
        "elementary": lambda x: torch.erf(x) + x.exp() + torch.sin(x) * x.cos() + torch.atan(x) + torch.sinc(x),
        "features": lambda x: torch.cat([torch.sin(x @ matrix[:3]), torch.cos(math.pi * x)], -1),
        "radial": lambda x: torch.exp(-(x[:, None] - matrix[:, :3]).square().sum(-1)),
        "cat with a tensor": lambda x: torch.cat([h(x), torch.ones_like(x)], -1).prod(-1),
        "difference of entries beside tensors": lambda x: (
            torch.diff(h(x), prepend=torch.ones_like(x[:, :1])) * torch.diff(torch.ones_like(x[:, :1]), append=h(x))
        ),
        "columns": lambda x: torch.column_stack([x[:, 0].sin(), h(x), torch.ones_like(x[:, 1])]).square(),
        "bounds with more axes": lambda x: h(x).sum(-1).clamp(min=matrix[:, :1]).T.square(),
        "stack": lambda x: torch.stack([a * a for a in x.T], -1),
        "unbind": lambda x: x.unbind(-1)[0] * x.unbind(-1)[2],
        "chunks": lambda x: x.chunk(3, -1)[1] * x.split([1, 2], -1)[1],
        "index": lambda x: h(x)[:, [0, 2]] * h(x)[:, mask][..., :2] + h(x)[..., None, 1],
        "reshape": lambda x: h(x).reshape(-1, 2, 4).transpose(1, 2).flatten(1).square(),
        "matrix from the left": lambda x: (matrix @ h(x).mT).mT.square(),
        "product of matrices": lambda x: torch.bmm(h(x)[:, :, None] * matrix, h(x)[:, :, None]).flatten(1),
        "einsum": lambda x: torch.einsum("ni,ij,nj->n", h(x), matrix, h(x)),
        "outer product": lambda x: torch.einsum("ni,nj->nij", h(x), x).flatten(1),
        "variance": lambda x: h(x).var(-1) + torch.logsumexp(h(x), -1) + h(x).norm(dim=-1),
        "where": lambda x: torch.where((h(x) > 0) & (x[:, :1] != 0.5), h(x), layer(x)),
        "sizes": lambda x: h(x).view(x.size(0), -1).to(x.dtype) * len(x) * h(x).dim() / x.numel(),
        "addmm": lambda x: torch.addmm(matrix[0], h(x), matrix),
        "padding": lambda x: F.pad(h(x), (1, 1), value=2.0).square(),
        "gate": lambda x: F.glu(layer(x)),
        "attention": attended,
        "in place": grown,
        "in place, under two names": seen_by_two_names,
        "in place, on a constant that was added": counting_in_place,
        "in place, another shape": reshaped_in_place,
        "remainder": lambda x: (3 * h(x) ** 2) % 0.7,
        "complex": lambda x: (x + 1j * x.square()).abs() + (1j * h(x)[:, :3]).exp().real + (1j * x).sin().imag,
        "made complex": lambda x: (
            x[:, :1]
            + x.to(torch.complex128).abs().square()
            + torch.complex(h(x)[:, :3], x).abs()
            + torch.view_as_complex(torch.stack([h(x)[:, :3], x], -1)).square().imag
        ),
        "transform of Fourier": lambda x: x.sum(-1, keepdim=True) + torch.fft.rfft(h(x)).abs().square(),
        "numbers of numpy": lambda x: np.sqrt(2.0) * h(x) + np.float64(1.5) - np.float64(2) / (2 + layer(x).square()),
        "named operands": lambda x: torch.add(
            input=torch.mul(h(x), other=layer(x)), other=torch.div(x, other=2)[:, :1]
        ),
        "named matrices": lambda x: torch.matmul(h(x), other=matrix).square(),
        "named attention": lambda x: F.scaled_dot_product_attention(
            query=h(x)[:, :, None], key=layer(x)[:, :, None], value=h(x)[:, :, None]
        ),
    }


@pytest.mark.parametrize("name", _functions())
def test_operations(name: str) -> None:
    check(_functions()[name], points(3))


def test_a_transformer() -> None:
    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Linear(1, 4)
            self.layer = nn.TransformerEncoderLayer(4, 2, 8, activation="gelu", batch_first=True)
            self.read = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.read(self.layer(self.embed(x[..., None])).mean(1))

    check(Encoder().double().eval(), points(2))


def test_weighted_second_derivatives() -> None:
    net, x = mlp(nn.Tanh()), points()
    _, slope, H = by_points(net, x)
    D = torch.randn(3, 3, dtype=torch.float64)
    D = D + D.mT
    for f in (net, lambda x: torch.softmax(net(x), -1), lambda x: net(x) * net(x)):
        H = by_points(f, x)[2]
        torch.testing.assert_close(ng.pde.laplacian(f, x, diffusion=D), (D * H).sum((-2, -1)))
    H = by_points(net, x)[2]
    torch.testing.assert_close(ng.pde.laplacian(net, x, diffusion=D.diag()), (D.diag().diag() * H).sum((-2, -1)))
    torch.testing.assert_close(ng.pde.laplacian(net, x, space=slice(1, None)), H[..., 1, 1] + H[..., 2, 2])
    torch.testing.assert_close(
        ng.pde.laplacian(net, x, space=[2, 0], diffusion=D[:2, :2]),
        D[0, 0] * H[..., 2, 2] + D[1, 1] * H[..., 0, 0] + 2 * D[0, 1] * H[..., 0, 2],
    )
    torch.testing.assert_close(ng.pde.partial(net, x, 1), slope[..., 1])
    torch.testing.assert_close(ng.pde.partial(net, x, -1), slope[..., 2])
    torch.testing.assert_close(ng.pde.partial(net, x, (0, 2)), H[..., 0, 2])
    torch.testing.assert_close(ng.pde.partial(net, x, (1, 1)), H[..., 1, 1])


def test_the_divergence_and_time_derivatives() -> None:
    net, x = mlp(nn.Tanh(), out=3), points()
    _, slope, H = by_points(net, x)
    torch.testing.assert_close(ng.pde.divergence(net, x), trace(slope))
    u = ng.pde.derivatives(net, x, space=slice(1, None))
    torch.testing.assert_close(u.d(0), slope[..., 0])
    torch.testing.assert_close(u.laplacian, H[..., 1, 1] + H[..., 2, 2])


def test_exact_solutions_have_no_residual() -> None:
    """The heat equation, and Kovasznay's solution of the Navier–Stokes equations."""
    x = points(7, 5)
    heat = ng.pde.derivatives(lambda x: torch.exp(-x[:, 0]) * torch.sin(2 * x[:, 1:]).sum(-1), x, space=range(1, 5))
    torch.testing.assert_close(heat.d(0), heat.laplacian / 4, rtol=1e-12, atol=1e-12)

    re = 40.0
    rate = re / 2 - math.sqrt(re**2 / 4 + 4 * math.pi**2)

    def kovasznay(x: Tensor) -> Tensor:
        growth, angle = torch.exp(rate * x[:, 0]), 2 * math.pi * x[:, 1]
        v = 1 - growth * torch.cos(angle), rate / (2 * math.pi) * growth * torch.sin(angle)
        return torch.stack([*v, 0.5 * (1 - growth.square())], -1)

    u = ng.pde.derivatives(kovasznay, points(7, 2))
    v, slope = u.value[:, :2], u.gradient[:, :2]
    momentum = (slope * v[:, None]).sum(-1) + u.gradient[:, 2] - u.laplacian[:, :2] / re
    torch.testing.assert_close(momentum, torch.zeros_like(momentum), rtol=0, atol=1e-12)
    torch.testing.assert_close(trace(slope), torch.zeros(7).double(), rtol=0, atol=1e-12)


def test_the_sine_over_its_argument_has_its_second_derivative_at_zero() -> None:
    x = torch.tensor([[0.0], [1e-9], [-0.2], [1 / math.pi], [0.7]], dtype=torch.float64)
    u = ng.pde.derivatives(torch.sinc, x)
    t = math.pi * x[2:]
    slope = math.pi * (t.cos() - t.sin() / t) / t
    curvature = -(math.pi**2) * t.sin() / t - 2 * slope / x[2:]
    torch.testing.assert_close(u.value, torch.sinc(x), rtol=1e-14, atol=0)
    torch.testing.assert_close(u.d(0)[2:], slope, rtol=1e-12, atol=0)
    torch.testing.assert_close(u.laplacian[2:], curvature, rtol=1e-12, atol=0)
    torch.testing.assert_close(u.d(0)[:2], -(math.pi**2) / 3 * x[:2], rtol=1e-12, atol=0)
    torch.testing.assert_close(u.laplacian[:2], torch.full_like(x[:2], -(math.pi**2) / 3), rtol=1e-12, atol=0)


def test_a_power_in_double_precision_has_that_precision() -> None:
    x = points().float()
    u = ng.pde.derivatives(lambda x: torch.float_power(x, 3), x)
    torch.testing.assert_close(u.value, x.double() ** 3, rtol=1e-14, atol=0)
    torch.testing.assert_close(u.laplacian, 6 * x.double(), rtol=1e-14, atol=0)


def test_coordinates_may_be_integers_of_numpy() -> None:
    net, x = mlp(nn.Tanh()), points()
    for i in (1, -1):
        assert torch.equal(ng.pde.partial(net, x, np.int64(i)), ng.pde.partial(net, x, i))  # type: ignore[arg-type]
    assert torch.equal(ng.pde.partial(net, x, tuple(np.array([0, 2]))), ng.pde.partial(net, x, (0, 2)))
    assert torch.equal(ng.pde.laplacian(net, x, space=np.array([0, 2])), ng.pde.laplacian(net, x, space=(0, 2)))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"coordinates 1\.5 of points that have 3"):
        ng.pde.partial(net, x, 1.5)  # type: ignore[arg-type]


def test_points_with_any_leading_axes() -> None:
    net, x = mlp(nn.Tanh()), points(6)
    u = ng.pde.derivatives(net, x)
    for got, expected in (
        (ng.pde.derivatives(net, x.view(2, 3, 3)).gradient, u.gradient.view(2, 3, 2, 3)),
        (ng.pde.laplacian(net, x[0]), ng.pde.laplacian(net, x[:1])[0]),
    ):
        torch.testing.assert_close(got, expected)


def residual(net: nn.Module, params: dict[str, Tensor], x: Tensor) -> Tensor:
    u = ng.pde.derivatives(lambda x: functional_call(net, params, (x,)), x)
    return (u.laplacian + u.value * u.d(0)).squeeze(-1)


class Elementary(nn.LayerNorm):
    """In elementary operations: torch's own third derivatives of ``F.layer_norm`` are wrong."""

    def forward(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        return self.weight * centred / (centred.square().mean(-1, keepdim=True) + self.eps).sqrt() + self.bias


def test_parameter_derivatives() -> None:
    """∂r/∂θ by autograd, jacrev, jacfwd and vmap over examples is that of nested automatic differentiation."""
    net = mlp(nn.Sequential(nn.Tanh(), nn.LayerNorm(8), nn.GELU("tanh")), out=1)
    plain, x = mlp(nn.Sequential(nn.Tanh(), Elementary(8), nn.GELU("tanh")), out=1), points()
    params = {name: p.detach() for name, p in net.named_parameters()}

    def expected(params: dict[str, Tensor], point: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return functional_call(plain, params, (point,)).squeeze(-1)

        return jacrev(jacrev(u))(point).trace() + u(point) * jacrev(u)(point)[0]

    right = vmap(jacrev(expected), (None, 0))(params, x)
    ours = (
        jacrev(lambda p: residual(net, p, x))(params),
        jacfwd(lambda p: residual(net, p, x))(params),
        vmap(jacrev(lambda p, one: residual(net, p, one)), (None, 0))(params, x),
        vmap(jacrev(lambda p, one: residual(net, p, one.unsqueeze(0)).squeeze(0)), (None, 0))(params, x),
    )
    for jacobian in ours:
        for name in params:
            torch.testing.assert_close(jacobian[name], right[name], rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(residual(net, dict(net.named_parameters()), x).sum(), list(net.parameters()))
    for name, g in zip(params, grads, strict=True):
        torch.testing.assert_close(g, right[name].sum(0), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("activation", [torch.tanh, torch.sigmoid, F.silu, F.gelu, torch.sin, torch.cos, torch.exp])
@pytest.mark.parametrize("shape", [(2,), (2, 2)])
def test_derivatives_of_every_order(activation: Any, shape: tuple[int, ...]) -> None:
    """By weights, biases, points and the diffusion, in reverse mode, in forward mode, batched, and twice."""
    torch.manual_seed(2)
    x, D, W, b, V = (torch.randn(s, dtype=torch.float64) for s in ((2, 2), shape, (2, 2), (2,), (1, 2)))

    def operator(x: Tensor, D: Tensor, W: Tensor, b: Tensor, V: Tensor) -> Tensor:
        def net(x: Tensor) -> Tensor:
            return F.linear(activation(F.linear(activation(F.linear(x, W, b)), W, b)), V)

        u = ng.pde.derivatives(net, x, diffusion=D)
        return u.laplacian + u.gradient.sum(-1) + u.value

    inputs = tuple(t.requires_grad_() for t in (x, D, W, b, V))
    assert torch.autograd.gradcheck(operator, inputs, check_forward_ad=True, check_batched_grad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(operator, inputs, check_fwd_over_rev=True, fast_mode=True)


def test_the_last_bias_is_in_the_graph_of_the_laplacian() -> None:
    net = mlp(nn.Tanh())
    grads = torch.autograd.grad(ng.pde.laplacian(net, points()).sum(), list(net.parameters()))
    assert not grads[-1].any()


def test_a_kink_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    net, x = mlp(nn.LeakyReLU()), points()
    with caplog.at_level(logging.WARNING, "natgrad"):
        assert not ng.pde.laplacian(net, x).any()
        ng.pde.laplacian(net, x)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "leaky_relu has a kink, at which its second derivative is no function"
    ]
    torch.testing.assert_close(ng.pde.gradient(net, x), by_points(net, x)[1])


def test_a_jump_of_the_second_derivative_is_said_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jet, "_once", OnceLogger())  # another test may have said it
    net, x = mlp(nn.ELU()), points()
    with caplog.at_level(logging.WARNING, "natgrad"):
        ng.pde.laplacian(net, x)
        ng.pde.laplacian(net, x)
    assert [record.getMessage().split(":")[0] for record in caplog.records] == [
        "elu has a second derivative that jumps"
    ]


@pytest.mark.parametrize("activation", [nn.Tanh(), nn.SiLU(), nn.GELU(), nn.Softplus()], ids=lambda m: type(m).__name__)
def test_forward_mode_inside_of_forward_mode_has_the_derivatives_of_reverse_mode(activation: nn.Module) -> None:
    net, x = mlp(activation), points()

    def laplacian(point: Tensor) -> Tensor:
        return ng.pde.laplacian(net, point.unsqueeze(0)).sum()

    forward, reverse = (d(d(laplacian)) for d in (torch.func.jacfwd, torch.func.jacrev))
    assert reverse(x[0]).abs().max() > 1e-5
    torch.testing.assert_close(forward(x[0]), reverse(x[0]))


def test_a_product_of_coordinates_has_the_laplacian_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jet, "_checked", set())
    for seed in range(10):
        torch.manual_seed(seed)
        jet._checked.clear()
        check(lambda x: x.prod(-1), points())
        check(lambda x: x.cumprod(-1), points())


@pytest.mark.parametrize(
    "f",
    [
        lambda x: torch.atan2(x[:, 0], x[:, 1] * x[:, 2]),
        lambda x: torch.special.i0(x).sum(-1),
        lambda x: F.gelu(x, approximate="tanh").prod(-1),
        lambda x: torch.lgamma(2 + x.square()).sum(-1),
    ],
)
@pytest.mark.parametrize("inside", [False, True])
def test_functions_without_a_rule_have_derivatives_in_inference_mode(
    f: Any, inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jet, "_checked", set())
    x, w = points(), torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    expected = trace(by_points(lambda x: f(1.5 * x), x)[2])
    with torch.inference_mode():
        found = ng.pde.laplacian(lambda x: f(w * x), x.clone() if inside else x)
        by_rows = torch.func.vmap(lambda row: ng.pde.laplacian(lambda x: f(w * x), row[None])[0])(x)
    assert not found.requires_grad
    torch.testing.assert_close(found.clone(), expected)
    torch.testing.assert_close(by_rows.clone(), expected)


def _whitened(x: Tensor) -> Tensor:
    """A function of torch whose second derivative in forward mode is wrong."""
    return torch.native_layer_norm(x, x.shape[-1:], None, None, 1e-5)[0]


def test_a_wrong_second_derivative_of_torch_is_refused_in_inference_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jet, "_checked", set())
    with torch.inference_mode(), pytest.raises(ng.errors.NoDerivativeError, match=r"layer_norm has no rule.*is wrong"):
        ng.pde.laplacian(_whitened, points())


@pytest.mark.parametrize("transform", [torch.func.grad, jacrev, lambda f: lambda a: torch.func.jvp(f, (a,), (a,))])
def test_a_wrong_second_derivative_of_torch_is_refused_inside_a_transform(transform: Any) -> None:
    x = points()

    def loss(a: Tensor) -> Tensor:
        return ng.pde.laplacian(lambda x: _whitened(a * x), x).sum()

    with pytest.raises(ng.errors.NoDerivativeError, match=r"layer_norm has no rule.*is wrong"):
        transform(loss)(torch.tensor(2.0, dtype=torch.float64))


def test_a_point_without_derivatives_does_not_vouch_for_a_function(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jet, "_checked", set())

    def cube(x: Tensor) -> Tensor:
        return torch.cat([x, x, x], -1).cumprod(-1)

    ng.pde.laplacian(cube, torch.full((2, 1), math.nan, dtype=torch.float64))
    with pytest.raises(ng.errors.NoDerivativeError, match=r"cumprod has no rule.*is wrong"):
        ng.pde.laplacian(cube, torch.zeros(2, 1, dtype=torch.float64))


class Writes(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        out[:, 0] = x[:, 1]
        return out


class WritesToAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        y[:, :1].mul_(2)
        return y


class ReadsAView(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        first = y[:, :1]
        y.mul_(2)
        return first + 1


class Assigns(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x.sin()
        y[:, 0] = 1
        return y


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x - x.mean(0)).exp()


class WithoutGradients(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.exp()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)), r"1 \(BatchNorm1d\): in training mode.*Call model.eval"),
        (nn.Sequential(nn.Linear(3, 3), nn.Dropout()), r"1 \(Dropout\): in training mode"),
        (lambda x: F.dropout(x), "calls dropout in training mode.*Call model.eval"),
        (lambda x: F.batch_norm(x, None, None, training=True), "calls batch_norm with batch statistics"),
        (lambda x: _whitened(x), "layer_norm has no rule.*is wrong"),
        (lambda x: torch.cdist(x, torch.ones(2, 3)), "_?cdist has no rule, and torch cannot differentiate it twice"),
        (lambda x: x * math.sin(x[0, 0]), "calls item: a number has no derivative"),
        (lambda x: x * torch.tensor([x[0, 0], x[0, 1], 2.0]), "as torch.tensor.* does.*with torch.stack"),
        (lambda x: x * torch.from_numpy(np.asarray(x)), "calls array: a number has no derivative"),
        (F.hardsigmoid, "hardsigmoid has no rule, and torch cannot differentiate it twice.*smooth operations"),
        (lambda x: x * x[0, 0].item(), "calls item: a number has no derivative"),
        (Writes(), "calls setitem: a tensor cannot hold derivatives. Build it with torch.cat"),
        (Assigns(), "calls setitem: a tensor cannot hold derivatives"),
        (WritesToAView(), "returns a tensor after an operation in place on another view"),
        (ReadsAView(), "calls add on a tensor after an operation in place on another view"),
        (lambda x: F.rrelu(x, training=True), "calls rrelu in training mode"),
        (Centred(), "Centred: the value at a point changes by .* if the others move"),
        (lambda x: x.exp() - x.exp().mean(0), "<lambda>: the value at a point changes by .* if the others move"),
        (WithoutGradients(), "calls exp where gradients are switched off"),
        (lambda x: torch.ones(len(x)), "returned a tensor that does not depend on x"),
        (lambda x: (x, x), "returned a tuple: it must return one tensor"),
        (lambda x: torch.zeros(2, 3).add_(x), "calls add_ on a tensor"),
        (lambda x: x.requires_grad_(), "calls requires_grad_, which is not for derivatives"),
        (lambda x: ng.pde.laplacian(torch.exp, x), "third derivatives, which are not propagated"),
    ],
)
def test_models_without_derivatives(model: Any, message: str) -> None:
    with pytest.raises((ng.errors.NoDerivativeError, ng.errors.BatchStatisticsError), match=message):
        ng.pde.laplacian(model, torch.rand(2, 3))


SQUARED_NORMS: dict[str, Function] = {
    "norm": lambda x: x.norm(dim=-1) ** 2,
    "norm times itself": lambda x: (lambda r: r * r)(torch.norm(x, 2, -1)),
    "linalg.norm": lambda x: torch.linalg.norm(x, dim=-1).square(),
    "vector_norm": lambda x: torch.linalg.vector_norm(x, dim=-1, keepdim=True).pow(2).squeeze(-1),
    "root": lambda x: x.square().sum(-1).sqrt() ** 2,
    "distance": lambda x: torch.stack([torch.dist(point, torch.zeros_like(point)) ** 2 for point in x]),
}


@pytest.mark.parametrize("name", SQUARED_NORMS)
@pytest.mark.parametrize("graph", [True, False])
def test_the_square_of_a_norm_has_its_derivatives_at_zero(name: str, graph: bool) -> None:
    """∇‖x‖² = 2x and Δ‖x‖² = 2d everywhere, and so for smooth functions of ‖x‖²."""
    f, x = SQUARED_NORMS[name], torch.cat([torch.zeros(1, 3, dtype=torch.float64), points(2)])
    square, d = x.square().sum(-1), x.shape[-1]
    with torch.set_grad_enabled(graph):
        u = ng.pde.derivatives(f, x)
        bump = ng.pde.derivatives(lambda x: torch.exp(-f(x)), x)
        fourth = ng.pde.laplacian(lambda x: f(x) ** 2, x)
    torch.testing.assert_close(u.value, square)
    torch.testing.assert_close(u.gradient, 2 * x)
    torch.testing.assert_close(u.laplacian, torch.full_like(square, 2 * d))
    torch.testing.assert_close(bump.laplacian, (4 * square - 2 * d) * torch.exp(-square))
    torch.testing.assert_close(fourth, (8 + 4 * d) * square)
    torch.testing.assert_close(ng.pde.gradient(SQUARED_NORMS["norm"], x), 2 * x)


def test_even_powers_of_roots_and_a_layer_after_them() -> None:
    layer = nn.Linear(2, 3).double()
    check(lambda x: x.norm(dim=-1) ** 4 + x.norm(dim=-1) ** -2 + (1 + x.norm(dim=-1)) ** 3, points())
    check(lambda x: layer((0.5 + x[:, :2].square()).sqrt()) + torch.std(x, -1, keepdim=True), points())
    zero = torch.zeros(1, 3, dtype=torch.float64)
    torch.testing.assert_close(ng.pde.laplacian(lambda x: x.std(-1) ** 2, zero), zero[:, 0] + 2)  # of the variance
    negative = ng.pde.derivatives(lambda x: x.sqrt() ** 2, -points(1))
    assert bool(negative.value.isnan().all())  # as that of torch
    assert bool(negative.laplacian.isnan().all())


@pytest.mark.parametrize(
    ("f", "name"),
    [
        (lambda x: x.norm(dim=-1), "norm"),
        (lambda x: torch.tanh(x.norm(dim=-1)), "norm"),
        (lambda x: x.norm(dim=-1) * x.norm(dim=-1), "norm"),
        (lambda x: x[:, 0].square() ** 0.5, "pow"),
        (lambda x: torch.atan2(x[:, 0], x[:, 1]), "atan2"),
        (lambda x: torch.hypot(x[:, 0], x[:, 1]), "hypot"),
    ],
)
def test_a_point_without_derivatives_is_refused_by_the_name_of_the_operation(f: Function, name: str) -> None:
    x = torch.cat([torch.ones(1, 3), torch.zeros(1, 3)])
    message = rf"at x\[1\] = \[0.0, 0.0, 0.0\] the model calls {name} where .* x.square\(\).sum\(-1\) for the square"
    with pytest.raises(ng.errors.NoDerivativeError, match=message):
        ng.pde.laplacian(f, x)
    elsewhere = ng.pde.laplacian(lambda x: torch.where(x[:, 0] > 0, f(x), x.square().sum(-1)), x)
    torch.testing.assert_close(elsewhere, torch.cat([ng.pde.laplacian(f, x[:1]), torch.tensor([6.0])]))


def test_derivatives_that_overflow_are_returned_as_they_are() -> None:
    """A trial step that is too long is refused by its loss, which is not finite."""
    u = ng.pde.derivatives(lambda x: torch.tanh(1e30 * x).sum(-1), torch.full((1, 2), 1e-31))
    assert bool(u.value.isfinite().all())
    assert not bool(u.laplacian.isfinite().any())


def test_the_transpose_of_any_number_of_axes_reverses_them() -> None:
    x = points(1)
    torch.testing.assert_close(ng.pde.derivatives(lambda x: x[:, :, None].sin().T, x).value, x.mT.sin()[None])
    torch.testing.assert_close(ng.pde.derivatives(lambda x: x[0].sin().T, x).value, x[0].sin())


@pytest.mark.parametrize(("random", "slope"), [(F.rrelu, 11 / 48), (nn.RReLU(0.1, 0.5).eval(), 0.3)])
@pytest.mark.parametrize("n", [1, 4])
def test_a_randomised_activation_has_its_mean_slope_in_evaluation(random: Function, slope: float, n: int) -> None:
    x = points(n) - 0.5
    found = ng.pde.derivatives(lambda x: random(x) ** 3, x)
    leaky = ng.pde.derivatives(lambda x: F.leaky_relu(x, slope) ** 3, x)
    torch.testing.assert_close(found.value, F.leaky_relu(x, slope) ** 3)
    torch.testing.assert_close(found.laplacian, leaky.laplacian)


def test_a_function_may_hold_a_number_for_every_point() -> None:
    x, factor = points(), torch.arange(1.0, len(points()) + 1, dtype=points().dtype)
    u = ng.pde.derivatives(lambda x: factor * x.square().sum(-1), x)
    torch.testing.assert_close(u.laplacian, 2 * x.shape[1] * factor)
    torch.testing.assert_close(u.gradient, 2 * factor[:, None] * x)


def test_bad_input() -> None:
    net, x = mlp(nn.Tanh()), points()
    with pytest.raises(TypeError, match=r"real floating-point tensor, not torch\.int64: write x\.double"):
        ng.pde.laplacian(net, torch.arange(3)[None])
    with pytest.raises(TypeError, match="not list"):
        ng.pde.gradient(net, [[0.0, 1.0, 2.0]])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="have no coordinates: they lie on the last axis"):
        ng.pde.gradient(net, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"order= is 1 .* not 3"):
        ng.pde.derivatives(net, x, order=3)
    with pytest.raises(ValueError, match="has no Laplacian: leave out order=1"):
        _ = ng.pde.derivatives(net, x, order=1).laplacian
    with pytest.raises(ValueError, match="coordinates 3 of points that have 3"):
        ng.pde.partial(net, x, 3)
    with pytest.raises(ValueError, match="a pair of them"):
        ng.pde.partial(net, x, (0, 1, 2))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="names a coordinate twice"):
        ng.pde.laplacian(net, x, space=(0, 0))
    with pytest.raises(ValueError, match=r"diffusion= has shape \(2,\): it must be \[3\] or \[3, 3\]"):
        ng.pde.laplacian(net, x, diffusion=torch.ones(2))
    with pytest.raises(ValueError, match="as many outputs as coordinates: the model returns 2 for points of 3"):
        ng.pde.divergence(net, x)


# Metrics through the operator.


class Residual(nn.Module):
    """r(x) = Δu + u ∂₀u, or Δu alone."""

    def __init__(self, net: nn.Module, *, only_laplacian: bool = False) -> None:
        super().__init__()
        self.net, self.only_laplacian = net, only_laplacian

    def forward(self, x: Tensor) -> Tensor:
        u = ng.pde.derivatives(self.net, x)
        return u.laplacian if self.only_laplacian else u.laplacian + u.value * u.d(0)


def jacobian(model: Residual, x: Tensor) -> Tensor:
    """J [n P] of a residual with one output, by nested automatic differentiation."""
    net = model.net

    def r(params: dict[str, Tensor], point: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return functional_call(net, params, (point,)).squeeze(-1)

        laplacian = jacrev(jacrev(u))(point).trace()
        return laplacian if model.only_laplacian else laplacian + u(point) * jacrev(u)(point)[0]

    params = {name: p.detach() for name, p in net.named_parameters()}
    J = vmap(jacrev(r), (None, 0))(params, x)
    return torch.cat([J[name].flatten(1) for name in params], 1)


def layers_of(net: nn.Sequential, x: Tensor, only_laplacian: bool) -> list[tuple[Tensor, Tensor]]:
    """a [n c i] and g [n c o] of the linear layers of a tanh network: value, d derivatives and Laplacian, by hand."""
    n, d = x.shape
    a = torch.cat([x[:, None], torch.eye(d).double().expand(n, d, d), torch.zeros(n, 1, d).double()], 1)
    inputs, outputs = list[Tensor](), list[Tensor]()
    for layer in net:
        if isinstance(layer, nn.Linear):
            one = torch.zeros(n, d + 2, 1).double()
            one[:, 0] = 1  # the bias belongs to the value
            inputs.append(torch.cat([a, one], -1)[:, : d + 2 if outputs else d + 1])  # Δx = 0 is not propagated
            outputs.append(z := (inputs[-1] @ torch.cat([layer.weight, layer.bias[:, None]], 1).mT).requires_grad_())
            a = z if len(outputs) > 1 else torch.cat([z, torch.zeros_like(z[:, :1])], 1)
        else:
            value, first, second = a[:, 0], a[:, 1:-1], a[:, -1]
            t = value.tanh()
            slope = 1 - t**2
            curved = slope * second - 2 * t * slope * first.square().sum(1)
            a = torch.cat([t[:, None], slope[:, None] * first, curved[:, None]], 1)
    r = a[:, -1] if only_laplacian else a[:, -1] + a[:, 0] * a[:, 1]
    g = torch.autograd.grad(r.sum(), outputs)
    return [(each.detach(), cotangent) for each, cotangent in zip(inputs, g, strict=True)]


@pytest.mark.parametrize("only_laplacian", [False, True])
def test_metrics_through_the_operator(only_laplacian: bool) -> None:
    """Exact structures are exact; K-FAC has value, gradient and Laplacian as positions of every linear layer."""
    net, x = mlp(nn.Tanh(), out=1), points(6)
    model = Residual(net, only_laplacian=only_laplacian)
    J = jacobian(model, x)
    pulled = ng.pullback(model, x, ng.Euclidean())
    for structure in (ng.Dense(), ng.Kernel(), ng.Implicit()):
        torch.testing.assert_close(structure.estimate(pulled).dense(), J.mT @ J / 6, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(ng.Diagonal().estimate(pulled).diagonal(), J.square().mean(0), rtol=1e-10, atol=1e-10)

    kfac, start = ng.Kronecker().estimate(pulled).dense(), 0
    for a, g in layers_of(net, x, only_laplacian):
        rows = torch.einsum("nro,nri->noi", g, a)
        size = rows[0].numel()
        weight, bias = rows[..., :-1].flatten(1), rows[..., -1]
        torch.testing.assert_close(torch.cat([weight, bias], 1), J[:, start : start + size], rtol=1e-10, atol=1e-10)
        counted = g.flatten(0, 1)[(g != 0).any(-1).flatten()], a.flatten(0, 1)[(g != 0).any(-1).flatten()]
        A, S = counted[1].mT @ counted[1] / len(counted[1]), counted[0].mT @ counted[0] / len(x)
        o, i = len(S), len(A) - 1
        G = torch.einsum("op,ij->oipj", S, A)  # [o i+1 o i+1], in the order weight, bias
        order = [(row, column) for row in range(o) for column in range(i)] + [(row, i) for row in range(o)]
        flat = torch.tensor([row * (i + 1) + column for row, column in order])
        expected = G.reshape(size, size)[flat][:, flat]
        block = kfac[start : start + size, start : start + size]
        torch.testing.assert_close(block, expected, rtol=1e-10, atol=1e-10)
        start += size


def test_the_residual_is_the_model() -> None:
    net, x = mlp(nn.Tanh(), out=1), points()
    opt = ng.KFAC(net, nn.MSELoss())
    with pytest.raises(TypeError, match=r"called by natgrad\.pde.*a module whose forward .* under torch\.no_grad"):
        ng.pde.laplacian(net, x)
    with torch.no_grad():
        assert ng.pde.laplacian(net, x).shape == (5, 1)
    del opt


def test_metrics_through_layers_without_a_rule_for_jets() -> None:
    """Operations on parameters are recognised: a gain, a product outside its module, attention."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last = nn.Linear(2, 4), Elementary(4), nn.Linear(4, 1)
            self.gain, self.matrix = nn.Parameter(torch.rand(4)), nn.Parameter(torch.rand(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(torch.tanh(self.first(x))) * self.gain
            return self.last(torch.sin(h @ self.matrix) * h + F.linear(torch.tanh(h), self.matrix.T))

    model, x = Residual(Net().double()), points(5, 2)
    J = jacobian(model, x)
    pulled = ng.pullback(model, x, ng.Euclidean())
    assert all(kind.rule is not None for block in pulled.blocks for kind in block.kinds)
    torch.testing.assert_close(ng.Dense().estimate(pulled).dense(), J.mT @ J / 5, rtol=1e-10, atol=1e-10)


class Tokens(nn.Module):
    """Every coordinate is a token: linear layers see channels and tokens as positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix, self.read = nn.Linear(1, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.embed(x.unsqueeze(-1)))
        weights = torch.softmax(h @ self.mix(h).mT, -1)
        return self.read(torch.sin(self.mix(weights @ h))).mean(-2)


def test_metrics_of_a_model_with_positions() -> None:
    model, x = Residual(Tokens().double()), points(4)
    check(model.net, x)
    J, pulled = jacobian(model, x), ng.pullback(model, x, ng.Euclidean())
    assert [block.names for block in pulled.blocks] == [
        (f"net.{name}.weight", f"net.{name}.bias") for name in ("embed", "mix", "read")
    ]
    torch.testing.assert_close(ng.Dense().estimate(pulled).dense(), J.mT @ J / 4, rtol=1e-10, atol=1e-10)


def test_third_derivatives_by_autograd() -> None:
    """∂₀Δu, by reverse and by forward mode around the operator."""
    net, x = mlp(nn.Tanh(), out=1), points()

    def laplacian(x: Tensor) -> Tensor:
        return ng.pde.laplacian(net, x)

    right = torch.stack([jacrev(lambda p: trace(jacrev(jacrev(net))(p)[0]))(point)[0] for point in x])
    (reverse,) = torch.autograd.grad(laplacian(x.requires_grad_()).sum(), x)
    torch.testing.assert_close(reverse[:, 0], right, rtol=1e-10, atol=1e-10)
    e = torch.tensor([1.0, 0.0, 0.0], dtype=torch.float64).expand_as(x)
    forward = torch.func.jvp(laplacian, (x.detach(),), (e,))[1].squeeze(-1)
    torch.testing.assert_close(forward, right, rtol=1e-10, atol=1e-10)


def test_compiled_models_autocast_and_no_grad() -> None:
    net, x = mlp(nn.Tanh()), points()
    u = ng.pde.laplacian(net, x)
    torch.testing.assert_close(ng.pde.laplacian(torch.compile(net, backend="eager"), x), u)
    with torch.no_grad():
        out = ng.pde.laplacian(net, x)
    torch.testing.assert_close(out, u)
    assert not out.requires_grad
    with torch.autocast("cpu", torch.bfloat16):
        rough = ng.pde.laplacian(net.float(), x.float())
    rough.sum().backward()
    torch.testing.assert_close(rough.double(), u, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("optimizer", [ng.KFAC, ng.EKFAC])
def test_kfac_trains_through_the_operator(optimizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model, x = Residual(mlp(nn.Tanh(), d=2, out=1), only_laplacian=True), points(20, 2)
    opt = optimizer(model, nn.MSELoss(), lr=0.1, damping=1e-3)
    losses = []
    for _ in range(10):
        opt.zero_grad()
        loss = F.mse_loss(model(x), torch.ones(20, 1).double())
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]
