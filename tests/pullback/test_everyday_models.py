"""Small versions of models that people train: their rows, and a step in the dense metric, against plain autograd."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import natgrad as ng
from tests import oracle
from tests.pulled import Rooted, close, normal, rows

N, T = 6, 5
TOKENS = torch.randint(7, (N, T), generator=torch.Generator().manual_seed(0))
LENGTHS = torch.tensor([5, 2, 3, 1, 4, 5])


class PackedRecurrence(nn.Module):
    """A bidirectional LSTM over sequences of different lengths."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(7, 3), nn.LSTM(3, 2, batch_first=True, bidirectional=True)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(self.table(tokens), lengths, batch_first=True, enforce_sorted=False)
        h, _ = pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(h.sum(1) / lengths[:, None])


class GraphAttention(nn.Module):
    """Attention over the edges of small graphs, one graph an example."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.attend, self.head = nn.Linear(3, 4, bias=False), nn.Parameter(torch.randn(8)), nn.Linear(4, 2)

    def forward(self, x: Tensor, adjacency: Tensor) -> Tensor:
        h = self.body(x)
        score = F.leaky_relu((h @ self.attend[:4])[:, :, None] + (h @ self.attend[4:])[:, None], 0.2)
        weights = score.masked_fill(adjacency == 0, -1e9).softmax(-1)
        return self.head(torch.tanh(weights @ h).mean(1))


def _block(i: int, o: int) -> nn.Module:
    return nn.Sequential(nn.Conv2d(i, o, 3, padding=1), nn.GroupNorm(1, o), nn.ReLU(inplace=True))


class UNet(nn.Module):
    """Down, up, and a skip connection; a class for every pixel."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.bottom, self.merge = _block(1, 2), _block(2, 3), _block(4, 2)
        self.up, self.head = nn.ConvTranspose2d(3, 2, 2, stride=2), nn.Conv2d(2, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        skip = self.down(x)
        return self.head(self.merge(torch.cat([skip, self.up(self.bottom(F.max_pool2d(skip, 2)))], 1)))


class VAE(nn.Module):
    """Returns the reconstruction, the mean and the logarithm of the variance."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.mean, self.log_var, self.decode = (nn.Linear(*s) for s in ((4, 5), (5, 2), (5, 2), (2, 4)))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = torch.tanh(self.encode(x))
        μ, log_var = self.mean(h), self.log_var(h)
        noise = torch.randn(μ.shape, dtype=μ.dtype, generator=torch.Generator().manual_seed(0))  # one draw for the test
        return self.decode(μ + (log_var / 2).exp() * noise), μ, log_var


class TiedLanguageModel(nn.Module):
    """A causal transformer whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.positions, self.norm = nn.Embedding(7, 4), nn.Embedding(T, 4), nn.LayerNorm(4)
        self.block = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens) + self.positions(torch.arange(T))
        mask = nn.Transformer.generate_square_subsequent_mask(T, dtype=x.dtype)
        return self.head(self.norm(self.block(x, src_mask=mask, is_causal=True)))


class Experts(nn.Module):
    """The two best of three experts, each on the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(3, 3), nn.ModuleList(nn.Linear(3, 2) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = x.new_zeros(len(x), 2)
        for number, expert in enumerate(self.experts):
            row, slot = (chosen == number).nonzero(as_tuple=True)
            out = out.index_add(0, row, weights[row, slot, None] * torch.tanh(expert(x[row])))
        return out


class LoRA(nn.Module):
    """A frozen layer with an update of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.head = nn.Linear(4, 5).requires_grad_(False), nn.Linear(5, 2)
        self.a, self.b = nn.Parameter(torch.randn(2, 4)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.frozen(x) + F.linear(F.linear(x, self.a), self.b) / 2)).mean(1)


class ConvNet(nn.Module):
    """Strided and grouped convolutions in the memory layout channels_last."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.Conv2d(4, 4, 3, groups=2, padding=1)
        self.head = nn.Linear(4, 2)
        self.to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.gelu(self.second(F.relu(self.first(x)))).mean((2, 3)))


class RunningScale(nn.Module):
    """A buffer that every pass updates and reads, and a count of passes."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.calls = nn.Linear(3, 4), nn.Linear(4, 2), 0
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.body(x))
        y = self.head(h * self.scale)
        self.scale, self.calls = 0.9 * self.scale + 0.1 * h.detach().abs().mean(0), self.calls + 1
        return y


class NestedInputs(nn.Module):
    """Inputs in a dict of dicts and lists, outputs in a dict of dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.head = nn.Linear(3, 4), nn.Linear(2, 4), nn.Linear(4, 2)

    def forward(self, batch: dict[str, Any]) -> dict[str, dict[str, Tensor]]:
        h = torch.tanh(self.left(batch["image"]["x"]) + self.right(batch["meta"][0]) * batch["weight"][:, None])
        return {"out": {"y": self.head(h)}}


class ByKeyword(nn.Module):
    """Keyword arguments only, one of them no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, *, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
        return self.head(torch.tanh(scale * self.body(x)) * mask[:, None])


class Checkpointed(nn.Module):
    """A transformer with a class token, whose blocks are computed again in the backward pass."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True)
        self.blocks, self.token = nn.ModuleList(copy.deepcopy(layer) for _ in range(2)), nn.Parameter(torch.randn(4))
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.cat([self.token.expand(len(x), 1, 4), x], 1)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x[:, 0])


class Siamese(nn.Module):
    """One network on both inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, left: Tensor, right: Tensor) -> Tensor:
        u, v = self.body(left), self.body(right)
        return torch.stack([(u - v).square().sum(-1), F.cosine_similarity(u, v)], -1)


class SharedRepeats(nn.Module):
    """A layer that is applied until it has settled, and a force −∂E/∂x: autograd inside of the forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.repeat, self.energy = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        z = self.body(x)
        for _ in range(3):
            z = torch.tanh(self.repeat(z) / 3 + self.body(x))
        return -torch.autograd.grad(self.energy(z).sum(), x, create_graph=True)[0]


def _compiled() -> Any:
    return torch.compile(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), backend="eager")


Make = Callable[[], nn.Module]
PAIR = {"image": {"x": normal(N, 3)}, "meta": [normal(N, 2, seed=1)], "weight": normal(N, seed=2)}
EDGES = (normal(N, 4, 4) > 0).double() + torch.eye(4, dtype=torch.float64)
MODELS: dict[str, tuple[Make, Any, Callable[[Any], Tensor] | None]] = {
    "packed LSTM": (PackedRecurrence, (TOKENS, LENGTHS), None),
    "graph attention": (GraphAttention, (normal(N, 4, 3), EDGES), None),
    "U-Net": (UNet, (normal(N, 1, 4, 4),), None),
    "VAE": (VAE, (normal(N, 4),), lambda out: torch.cat(out, -1)),
    "tied language model": (TiedLanguageModel, (TOKENS,), None),
    "experts": (Experts, (normal(N, 3),), None),
    "LoRA": (LoRA, (normal(N, 3, 4),), None),
    "compiled": (_compiled, (normal(N, 3),), None),
    "channels last": (ConvNet, (normal(N, 2, 6, 6).to(memory_format=torch.channels_last),), None),
    "running buffers": (RunningScale, (normal(N, 3),), None),
    "nested inputs": (NestedInputs, (PAIR,), lambda out: out["out"]["y"]),
    "keywords only": (ByKeyword, {"x": normal(N, 3), "mask": normal(N, seed=1), "scale": 0.7}, None),
    "checkpointed transformer": (Checkpointed, (normal(N, 3, 4),), None),
    "siamese": (Siamese, (normal(N, 3), normal(N, 3, seed=1)), None),
    "repeats and forces": (SharedRepeats, (normal(N, 3),), None),
}
every_model = pytest.mark.parametrize("name", MODELS)


def made(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        return MODELS[name][0]().double()


def called(model: nn.Module, name: str) -> Tensor:
    _, x, output = MODELS[name]
    raw = model(**x) if isinstance(x, dict) else model(*x)
    return raw if output is None else output(raw)


def jacobian(name: str) -> tuple[Tensor, Tensor]:
    """y [n d] and J [n d p], one backward pass an output."""
    model = made(name)
    y, params = called(model, name), [p for p in model.parameters() if p.requires_grad]
    grads = (torch.autograd.grad(y_d, params, retain_graph=True, materialize_grads=True) for y_d in y.flatten())
    J = torch.stack([oracle.flatten(grad) for grad in grads])
    return y.detach(), J.view(len(y), -1, J.shape[1])


@every_model
def test_rows_are_those_of_plain_autograd(name: str) -> None:
    y, J = jacobian(name)
    s = normal(2, *y.shape)
    pb = ng.pullback(made(name), MODELS[name][1], Rooted(s), output=MODELS[name][2])
    assert not pb.reasons
    close(rows(pb), torch.einsum("ndp,knd->knp", J, s.flatten(2)) / len(y) ** 0.5)


@every_model
def test_a_step_is_that_of_the_dense_metric_and_leaves_no_trace(name: str) -> None:
    """Buffers and attributes are those of one pass, the user's."""
    (y, J), model, plain = jacobian(name), made(name), made(name)
    opt = ng.NaturalGradient(model, ng.Euclidean(), output=MODELS[name][2], lr=0.1, damping=0.1)
    θ = oracle.flatten(p for p in model.parameters() if p.requires_grad)
    for net in (model, plain):
        called(net, name).square().mean().backward()
    trained = [p for p in plain.parameters() if p.requires_grad]
    ω = oracle.flatten(torch.zeros_like(p) if p.grad is None else p.grad for p in trained)
    opt.step()
    expected = θ - 0.1 * oracle.damped(oracle.dense(J, oracle.euclidean(y)), ω, 0.1)
    close(oracle.flatten(p for p in model.parameters() if p.requires_grad), expected)
    for key, buffer in plain.named_buffers():
        assert torch.equal(model.get_buffer(key), buffer), key
    assert getattr(model, "calls", 0) == getattr(plain, "calls", 0)


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC], ids=["K-FAC", "EK-FAC"])
@every_model
def test_k_fac_trains_them(name: str, preset: Callable[..., ng.NaturalGradient]) -> None:
    model = made(name)
    opt, losses = preset(model, ng.Euclidean(), output=MODELS[name][2], lr=0.02, strict=True), []
    for _ in range(4):
        opt.zero_grad()
        loss = called(model, name).square().mean()
        loss.backward()
        opt.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
