"""Unusual forward passes: G does not depend on how the model is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.errors import BatchStatisticsError, IncompatibleError
from natgrad.rules import LinearRule
from natgrad.structures import Structure


class Written(nn.Module):
    """Two layers, a norm without a rule, a scalar parameter, and a forward pass that the test writes."""

    def __init__(self, forward: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.l, self.o = nn.Linear(3, 3), nn.Linear(3, 2)
        self.norm = nn.LayerNorm(3)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("calls", torch.zeros(()))
        self.calls: Tensor
        self.aux: Tensor | None = None
        self._written = forward
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self._written(self, x)


def dense(model: nn.Module, x: Tensor) -> Tensor:
    """(1/N) JᵀJ of the whole batch, one output at a time, by plain autograd."""
    params = list(model.parameters())
    rows = []
    for value in model(x).flatten():
        grads = torch.autograd.grad(value, params, retain_graph=True, allow_unused=True)
        pairs = zip(grads, params, strict=True)
        rows.append(torch.cat([(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]))
    J = torch.stack(rows)
    return J.T @ J / len(x)


def inputs(seed: int = 0) -> Tensor:
    return torch.randn(6, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def called_in_vain(m: Written, x: Tensor) -> Tensor:
    m.l(x)
    return m.o(torch.tanh(F.linear(x, m.l.weight, m.l.bias)))


def detached(m: Written, x: Tensor) -> Tensor:
    return m.o(torch.tanh(F.linear(x, m.l.weight, m.l.bias)) + m.l(x).detach())


def sorting(m: Written, x: Tensor) -> Tensor:
    order = x[:, 0].argsort()
    return m.o(torch.tanh(m.l(x[order]))[order.argsort()])


def flipped_and_scaled(m: Written, x: Tensor) -> Tensor:
    return m.o(x + m.scale * torch.tanh(m.l(x.flip(0))).flip(0))


def products_of_activations(m: Written, x: Tensor) -> Tensor:
    h = torch.tanh(m.l(x))
    return m.o(h) + 0.1 * (h @ h.T @ x)[:, :2]


def scalar_and_norm(m: Written, x: Tensor) -> Tensor:
    return m.o(m.scale * m.norm(torch.tanh(m.l(x))))


def weakly_coupled(m: Written, x: Tensor) -> Tensor:
    h = m.norm(torch.tanh(m.l(x)))
    return m.o(h + 0.01 * h.mean(0))


def spectral(m: Written, x: Tensor) -> Tensor:
    filters = torch.complex(m.l.weight[:2].T, m.o.weight.T)
    return torch.fft.irfft(torch.fft.rfft(torch.tanh(m.l(x))) @ filters[1:] * (1j * m.scale), n=2) + m.o(x)


def distances(m: Written, x: Tensor) -> Tensor:
    return torch.exp(-m.scale * torch.cdist(x, m.o.weight))


def weighted_bags(m: Written, x: Tensor) -> Tensor:
    index = torch.arange(3).expand(len(x), 3)
    return F.embedding_bag(index, m.l.weight, mode="sum", per_sample_weights=m.l(x))


def gated_in_place(m: Written, x: Tensor) -> Tensor:
    h = m.l(torch.stack([x, x.sin()], 1))  # a view [6 2 3] of a product [12 3], which is written to
    h *= h.sigmoid()
    return m.o(h.mean(1))


def written_in_part(m: Written, x: Tensor) -> Tensor:
    h = m.l(torch.stack([x, x.sin()], 1))
    h[..., 0] += 2 * h[..., 1]
    return m.o(h.sin().mean(1))


APART = [
    called_in_vain,
    detached,
    sorting,
    flipped_and_scaled,
    scalar_and_norm,
    spectral,
    gated_in_place,
    written_in_part,
]
TOGETHER = [products_of_activations, weakly_coupled]
STRUCTURES = [ng.Dense(), ng.Kernel(), ng.LowRank(100), ng.Implicit()]


@pytest.mark.parametrize("structure", STRUCTURES, ids=repr)
@pytest.mark.parametrize("forward", APART, ids=lambda f: f.__name__)
def test_the_metric_does_not_depend_on_how_the_forward_pass_is_written(
    forward: Callable[[Written, Tensor], Tensor], structure: Structure
) -> None:
    model, x = Written(forward), inputs()
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    torch.testing.assert_close(G, dense(model, x), rtol=1e-10, atol=1e-10)


class Unbatched(nn.Module):
    """A convolution of one example, whose output is squeezed, and written to in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv(x.squeeze(0))
        g = h.tanh()
        h += 1
        return (h + g).flatten().unsqueeze(0)


@pytest.mark.parametrize("structure", STRUCTURES[:3], ids=repr)
def test_a_convolution_without_a_batch_axis_may_be_written_to_in_place(structure: Structure) -> None:
    model, x = Unbatched(), inputs().reshape(1, 3, 6)
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    torch.testing.assert_close(G, dense(model, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("structure", STRUCTURES[:3], ids=repr)
def test_an_operation_with_a_wrong_derivative_under_vmap_is_noticed(structure: Structure) -> None:
    """torch.cdist has one, in torch 2.13."""
    model, x = Written(distances), inputs()
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    torch.testing.assert_close(G, dense(model, x), rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize(("forward", "name"), [(distances, "cdist_backward"), (weighted_bags, "weights_backward")])
def test_an_operation_without_a_second_derivative_is_named(
    forward: Callable[[Written, Tensor], Tensor], name: str
) -> None:
    """In torch 2.15 torch.cdist has one, and the metric is right."""
    model, x = Written(forward), inputs()
    G = ng.Implicit().estimate(ng.pullback(model, x, ng.Euclidean()))
    if forward is distances and "derivative for '_cdist_backward'" not in _second_derivative(model, x):
        torch.testing.assert_close(G.dense(), dense(model, x), rtol=1e-10, atol=1e-10)
        return
    with pytest.raises(IncompatibleError, match=rf"{name}.*use a structure that needs none, such as Dense"):
        G.dense()


def _second_derivative(model: Written, x: Tensor) -> str:
    """What torch says when it is asked for one."""
    (g,) = torch.autograd.grad(model(x).sum(), model.o.weight, create_graph=True)
    try:
        torch.autograd.grad(g.sum(), model.o.weight)
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_module_with_two_names_is_left_as_it_was() -> None:
    layer = nn.Linear(3, 3)
    model, x = nn.Sequential(layer, nn.Tanh(), layer, nn.Tanh(), nn.Linear(3, 2)).double(), inputs()
    before = list(model.parameters())
    for structure in (ng.Dense(), ng.Implicit(), ng.Kronecker()):
        G = structure.estimate(ng.pullback(model, x, ng.Euclidean()))
        if not isinstance(structure, ng.Kronecker):
            torch.testing.assert_close(G.dense(), dense(model, x), rtol=1e-10, atol=1e-10)
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("forward", TOGETHER, ids=lambda f: f.__name__)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_outputs_that_see_the_whole_batch_are_differentiated_as_a_whole(
    forward: Callable[[Written, Tensor], Tensor], dtype: torch.dtype
) -> None:
    model, x = Written(forward).to(dtype), inputs().to(dtype)
    G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    tolerance = 1e-10 if dtype == torch.float64 else 1e-5
    torch.testing.assert_close(G, dense(model, x), rtol=tolerance, atol=tolerance)


def test_a_batch_that_happens_to_be_in_order_teaches_nothing_about_the_next() -> None:
    model = Written(sorting)
    x = inputs()
    ng.Dense().estimate(ng.pullback(model, x[x[:, 0].argsort()], ng.Euclidean()))
    G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense()
    torch.testing.assert_close(G, dense(model, x), rtol=1e-10, atol=1e-10)


def test_a_point_without_cotangents_teaches_nothing_about_the_next() -> None:
    model, x = Written(flipped_and_scaled), inputs()
    for scale in (0.0, 1.0):
        with torch.no_grad():
            model.scale.fill_(scale)
        G = ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean())).dense()
        torch.testing.assert_close(G, dense(model, x), rtol=1e-10, atol=1e-10)


def counting(m: Written, x: Tensor) -> Tensor:
    m.calls += 1
    h = m.norm(torch.tanh(m.l(x)))
    m.aux = h.square().mean()
    return m.o(h) * m.calls


@pytest.mark.parametrize("structure", [*STRUCTURES, ng.Diagonal()], ids=repr)
def test_our_passes_leave_buffers_and_attributes_as_they_were(structure: Structure) -> None:
    model, x = Written(counting), inputs()
    structure.estimate(ng.pullback(model, x, ng.Euclidean())).product(torch.ones(27, dtype=torch.float64))
    assert float(model.calls) == 0
    assert model.aux is None


def test_a_loss_kept_on_the_model_trains() -> None:
    model, x = Written(counting), inputs()
    opt = ng.NaturalGradient(model, ng.Euclidean(), lr=0.1, damping=1e-1)
    for step in range(3):
        opt.zero_grad()
        y = model(x)
        assert model.aux is not None
        (y.square().mean() + 0.1 * model.aux + 0.01 * model.scale.square()).backward()
        opt.step()
        assert float(model.calls) == step + 1


def test_chance_outside_every_module_is_noticed_and_the_stream_put_back() -> None:
    model = Written(lambda m, x: m.o(F.dropout(torch.tanh(m.l(x)), 0.5, m.training)))
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        with pytest.raises(BatchStatisticsError, match=r"draws random numbers.*model\.eval\(\)"):
            ng.pullback(model, inputs(), ng.Euclidean())
        assert torch.equal(before, torch.get_rng_state())
    with ng.evaluating(model):
        ng.pullback(model, inputs(), ng.Euclidean())


def test_numbers_that_are_drawn_and_not_used_do_no_harm() -> None:
    """Models of speech draw whether they skip a layer in evaluation mode too, and do not skip it."""
    skipping = Written(lambda m, x: m.o(m.l(x) * (0.0 if torch.rand([]) < 0.5 and m.training else 1.0)))
    plain, x = Written(lambda m, x: m.o(m.l(x))), inputs()
    plain.load_state_dict(skipping.state_dict())
    with torch.random.fork_rng(), ng.evaluating(skipping), ng.evaluating(plain):
        before = torch.get_rng_state()
        found, expected = (ng.Dense().estimate(ng.pullback(m, x, ng.Euclidean())).dense() for m in (skipping, plain))
        assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-10)
    noisy = Written(lambda m, x: m.o(m.l(x) + torch.rand([]))).eval()
    with torch.random.fork_rng(), pytest.raises(BatchStatisticsError, match="draws random numbers"):
        ng.pullback(noisy, x, ng.Euclidean())


def test_chance_in_a_training_pass_is_noticed_and_refresh_lets_it_train() -> None:
    model, x = Written(lambda m, x: m.o(F.dropout(m.norm(m.l(x)) * m.scale, 0.5, m.training))), inputs()
    opt = ng.NaturalGradient(model, ng.Euclidean(), lr=0.1, damping=1e-1)
    with torch.random.fork_rng():
        with pytest.raises(BatchStatisticsError, match="draws random numbers"):
            model(x)
        for _ in range(2):
            with ng.evaluating(model):
                opt.refresh(x)
            opt.zero_grad()
            model(x).square().mean().backward()
            opt.step()
    assert opt.tracker.step == 2


@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",)])
def test_the_packed_shape_of_a_rule_is_the_shape_of_what_it_packs(frozen: tuple[str, ...]) -> None:
    layer = nn.Linear(4, 3)
    for name in frozen:
        layer.get_parameter(name).requires_grad_(False)
    own = {name: p.detach() for name, p in layer.named_parameters() if p.requires_grad}
    assert LinearRule().pack(layer, own).shape == LinearRule().shape(layer, tuple(own))
