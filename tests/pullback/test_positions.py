"""Positions that do not count: padding a batch further, or appending ignored labels, does not change the metric.

A position that the loss does not see enters neither A nor its count, and adds nothing to S and G. One that it sees
counts, also where a ReLU lets no cotangent come there.
"""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import natgrad as ng
from natgrad.accelerate import moments
from natgrad.rules.features import Rows
from natgrad.structures.base import Operator, Structure
from tests.optim.tasks import seeded
from tests.pulled import Rooted, close, normal

LENGTHS = torch.tensor([5, 3, 4, 5, 2, 1])  # one key: its query has no cotangent, up to rounding
CLASSES = torch.tensor([0, 2, 1, 1, 0, 2])
FISHER = ng.Fisher(ng.Categorical())
Batch = tuple[Tensor, Tensor]  # inputs [n t *] and mask [n t]


class Sets(nn.Module):
    """A network on the elements of a set, their mean, and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.LayerNorm(4), nn.Linear(4, 4), nn.Tanh())
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(masked_mean(self.each(x), mask))


class Attention(nn.Module):
    """Written with linear layers, as in most libraries."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (f(x).unflatten(-1, (2, 2)).transpose(1, 2) for f in (self.q, self.k, self.v))
        return self.o(F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2))


class Encoder(nn.Module):
    """BERT: blocks of attention and feed-forward layers, read at the first token or as a mean."""

    def __init__(self, fused: bool = False, read: str = "mean", depth: int = 2) -> None:
        super().__init__()
        self.tokens, self.places, self.fused, self.read = nn.Embedding(7, 4), nn.Embedding(16, 4), fused, read
        mix: Callable[[], nn.Module] = (lambda: nn.MultiheadAttention(4, 2, batch_first=True)) if fused else Attention
        self.mix = nn.ModuleList([mix() for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(4) for _ in range(depth)])
        self.feed = nn.ModuleList([nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4)) for _ in range(depth)])
        self.head = nn.Linear(4, 3)

    def body(self, x: Tensor, mask: Tensor, causal: bool = False) -> Tensor:
        h = self.tokens(x) + self.places(torch.arange(x.shape[1]).expand(x.shape))
        for mix, norm, feed in zip(self.mix, self.norms, self.feed, strict=True):
            if self.fused:
                h = h + mix(h, h, h, key_padding_mask=~mask, need_weights=False)[0]
            else:
                past = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
                h = h + mix(h, past if causal else mask[:, None, None])
            h = h + feed(norm(h))
        return h

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.body(x, mask)
        return self.head(h[:, 0] if self.read == "first" else masked_mean(h, mask))


class Language(Encoder):
    """A causal model: logits [n t c] at all tokens, whose padding is on the right."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.head(self.body(x, mask, causal=True))


class Recurrent(nn.Module):
    """An LSTM on packed sequences, or on padded ones."""

    def __init__(self, packed: bool) -> None:
        super().__init__()
        self.tokens, self.lstm, self.head = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 3)
        self.packed = packed

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.tokens(x)
        if self.packed:
            packed = pack_padded_sequence(h, mask.sum(1), batch_first=True, enforce_sorted=False)
            out = pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]
        else:
            out = self.lstm(h)[0]
        return self.head(masked_mean(out, mask))


def masked_mean(h: Tensor, mask: Tensor) -> Tensor:
    return (h * mask.unsqueeze(-1)).sum(1) / mask.sum(1, keepdim=True)


def batch(model: nn.Module, t: int = 5, shortest: int = 1) -> Batch:
    """Sequences of these lengths, padded to t: with elements that are anything, or with a token."""
    mask = torch.arange(t) < LENGTHS.clamp(min=shortest)[:, None]
    if isinstance(model, Sets):
        x = normal(6, 16, 3)[:, :t]
        return torch.where(mask.unsqueeze(-1), x, normal(6, 16, 3, seed=1)[:, :t]), mask
    x = torch.randint(7, (6, 16), generator=torch.Generator().manual_seed(0))[:, :t]
    return torch.where(mask, x, 0), mask


MODELS: dict[str, Callable[[], nn.Module]] = {
    "sets": Sets,
    "encoder": Encoder,
    "first token": lambda: Encoder(read="first"),
    "fused": lambda: Encoder(fused=True, read="first"),
    "packed": lambda: Recurrent(packed=True),
    "padded": lambda: Recurrent(packed=False),
}
STRUCTURES: dict[str, Structure] = {
    "expand": ng.Kronecker(),
    "reduce": ng.Kronecker("reduce"),
    "separate": ng.Kronecker(bias="separate"),
    "eigen": ng.EigenKronecker(),
}


def made(name: str) -> nn.Module:
    return seeded(MODELS[name]).double()


def same_tensors(one: Operator, other: Operator, tol: float = 1e-11) -> None:
    assert one.tensors().keys() == other.tensors().keys()
    for key, t in one.tensors().items():
        if key.rpartition("/")[2] not in "QP":  # eigenvectors have a sign
            close(other.tensors()[key], t, tol)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("name", MODELS)
def test_padding_further_leaves_the_metric_alone(name: str, structure: Structure) -> None:
    model = made(name)
    short, long = (structure.estimate(ng.pullback(model, batch(model, t), FISHER)) for t in (5, 13))
    same_tensors(short, long)


@pytest.mark.parametrize("name", ["sets", "encoder", "first token"])
def test_a_is_the_mean_over_the_tokens_that_count(name: str) -> None:
    """Against forward hooks and the masks. A token that only its own layer reads counts where the loss sees it."""
    model, inputs = made(name), dict[str, Tensor]()
    x, mask = batch(model, 9)
    linear = {layer: m for layer, m in model.named_modules() if isinstance(m, nn.Linear)}
    hooks = [
        m.register_forward_pre_hook(lambda _, args, layer=layer: inputs.update({layer: args[0]}))
        for layer, m in linear.items()
    ]
    model(x, mask)
    for hook in hooks:
        hook.remove()
    G = ng.Kronecker().estimate(ng.pullback(model, (x, mask), FISHER))
    last = [f"{part}.1" + end for part, end in (("mix", ".o"), ("feed", ".0"), ("feed", ".2"))]
    for layer, a in inputs.items():
        a = a.detach()
        if a.ndim == 3:
            counted = mask.clone()
            if name == "first token" and layer in last:
                counted[:, 1:] = False
            a = a[counted]
        a = torch.cat([a, torch.ones_like(a[:, :1])], 1)
        close(G.tensors()[f"{layer}.weight/A"][0], a.T @ a / len(a))


def test_chunks_of_roots_and_examples_count_the_same_positions() -> None:
    model = made("encoder")
    pb = ng.pullback(model, batch(model, 9), FISHER)
    small = ng.pullback(model, batch(model, 9), FISHER, memory=2**14)
    for structure in (ng.Kronecker(), ng.EigenKronecker()):
        same_tensors(structure.estimate(pb), structure.estimate(small))


PRESETS: dict[str, Callable[[nn.Module], ng.NaturalGradient]] = {
    "KFAC": lambda model: ng.KFAC(model, FISHER, lr=0.1),
    "EKFAC": lambda model: ng.EKFAC(model, FISHER, lr=0.1),
    "own": lambda model: ng.NaturalGradient(model, ng.Empirical(), structure=ng.Kronecker(), lr=0.1, damping=0.1),
    "Sobolev": lambda model: ng.SobolevKFAC(
        model, FISHER, features=lambda x, mask: torch.stack([mask.sum(1), x[:, 0]], 1).double(), lr=0.1
    ),
}


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("name", ["encoder", "packed"])
def test_padding_further_leaves_the_steps_alone(name: str, preset: str) -> None:
    """Two steps: the fit in KL divergence begins with the second. Eigenvectors that are close have no second one."""

    def trained(t: int) -> list[Tensor]:
        model = made(name)
        opt = PRESETS[preset](model)
        for _ in range(1 if preset == "EKFAC" else 2):
            opt.zero_grad()
            F.cross_entropy(model(*batch(model, t, 2 if preset == "Sobolev" else 1)), CLASSES).backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    for short, long in zip(trained(5), trained(12), strict=True):
        close(long, short, 1e-7 if preset == "Sobolev" else 1e-10)


def test_padding_further_leaves_the_posterior_alone() -> None:
    model = made("sets")
    short, long = (ng.vi.Laplace(model, batch(model, t), FISHER, ng.Kronecker()) for t in (5, 13))
    same_tensors(short.operator, long.operator)


# Units that are off.


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "in place": lambda h: F.relu(h.clone(), inplace=True),
    "in place on a view": F.relu_,
    "in place on a view, of an own class": F.relu_,
    "squared": lambda h: F.relu(h) ** 2,
    "relu6": lambda h: F.relu6(40 * h),
    "clamp": lambda h: h.clamp(0, 0.5),
    "clamp below": lambda h: h.clamp(min=0),
    "maximum": lambda h: torch.maximum(h, torch.zeros(())),
    "threshold": lambda h: F.threshold(h, 0.1, 0.1),
    "hardswish": lambda h: F.hardswish(20 * h) / 20,
    "softshrink": F.softshrink,
    "absolute": lambda h: F.relu(h) + F.relu(-h) if len(h) > 1 else h.abs(),
}


class OwnLinear(nn.Linear):
    """A class of the user's, without a forward pass of its own."""


class Narrow(nn.Module):
    """A set whose elements, and whose means, have few units, so that all of some are off."""

    def __init__(self, activation: str = "relu") -> None:
        super().__init__()
        linear = OwnLinear if "own" in activation else nn.Linear
        self.first, self.second, self.third, self.head = (linear(i, o) for i, o in ((3, 2), (2, 2), (2, 2), (2, 3)))
        self.activation = ACTIVATIONS[activation]

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        h = self.activation(self.second(self.activation(self.first(x))))
        return self.head(self.activation(self.third(masked_mean(h, mask))))


def elements(t: int = 7) -> Batch:
    mask = torch.arange(t) < LENGTHS[:, None]
    return torch.where(mask.unsqueeze(-1), normal(6, 16, 3)[:, :t], normal(6, 16, 3, seed=1)[:, :t]), mask


def narrow(activation: str = "relu") -> nn.Module:
    return seeded(lambda: Narrow(activation), 8).double()


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_position_whose_units_are_off_counts_as_the_others(
    activation: str, sharing: Literal["expand", "reduce"]
) -> None:
    """A is the mean over the elements of the sets, whatever their units do; without a mask over all of them."""
    model, (x, mask) = narrow(activation), elements()
    inputs: dict[str, Tensor] = {}
    for name in ("first", "second"):
        keep = lambda _, args, name=name: inputs.update({name: args[0].detach()})  # noqa: E731
        model.get_submodule(name).register_forward_pre_hook(keep)
    G = ng.Kronecker(sharing).estimate(ng.pullback(model, (x, mask), FISHER)).tensors()
    for name, a in inputs.items():
        a = torch.cat([a, torch.ones_like(a[..., :1])], -1)
        rows = a[mask] if sharing == "expand" else masked_mean(a, mask)
        close(G[f"{name}.weight/A"][0], rows.T @ rows / len(rows))


def test_there_are_positions_whose_units_are_off() -> None:
    """Elements behind a ReLU, and all elements of a set behind one after the mean."""
    model, (x, mask) = narrow(), elements()
    z: list[Tensor] = []
    model.get_submodule("first").register_forward_hook(lambda *args: z.append(args[2]))
    (g,) = torch.autograd.grad(model(x, mask).sum(), z[0])
    off = mask & (g == 0).all(-1)
    assert off.any()
    assert (off == mask).all(1).any()
    assert not off.all()


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_padding_further_leaves_the_metric_alone_where_units_are_off(structure: Structure) -> None:
    model = narrow()
    short, long = (structure.estimate(ng.pullback(model, elements(t), FISHER)) for t in (5, 13))
    same_tensors(short, long)
    same_tensors(short, structure.estimate(ng.pullback(model, elements(13), FISHER, memory=2**12)))


@pytest.mark.parametrize("preset", ["KFAC", "EKFAC", "own", "Sobolev"])
def test_padding_further_leaves_the_steps_alone_where_units_are_off(preset: str) -> None:
    def trained(t: int) -> list[Tensor]:
        model = narrow()
        features = lambda x, mask: x[:, 0]  # noqa: E731
        opt = (
            ng.SobolevKFAC(model, FISHER, features=features, lr=0.1) if preset == "Sobolev" else PRESETS[preset](model)
        )
        x, mask = elements(t)
        for _ in range(1 if preset == "EKFAC" else 2):
            opt.zero_grad()
            F.cross_entropy(model(x, mask), CLASSES).backward()
            opt.step()
        return [p.detach() for p in model.parameters()]

    for short, long in zip(trained(5), trained(12), strict=True):
        close(long, short, 1e-7 if preset == "Sobolev" else 1e-10)


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker(), ng.Kronecker(bias="separate")], ids=repr)
def test_units_that_are_off_behind_a_root_of_one_column(structure: Structure) -> None:
    """Upper layers have their factors while the pass runs, and the lowest one asks after it what the loss sees."""

    each, whole, x = nn.Linear(3, 2).double(), nn.Linear(2, 1).double(), normal(9, 5, 3)
    model = nn.Sequential(each, nn.ReLU(), nn.AvgPool2d((5, 1)), nn.Flatten(), whole)
    z = each(x).detach().requires_grad_()
    (g,) = torch.autograd.grad(model[1:](z).sum(), z)
    assert bool((g == 0).all(-1).any())
    G = structure.estimate(ng.pullback(model, x, ng.Euclidean())).tensors()
    rows = torch.cat([x, torch.ones_like(x[..., :1])], -1).flatten(0, 1)[:, : G["0.weight/A"].shape[-1]]
    close(G["0.weight/A"][0], rows.T @ rows / len(rows))
    close(G["0.weight/S"][0], torch.einsum("nro,nrp->op", g, g) / len(x))
    opt = ng.KFAC(model, nn.MSELoss(), lr=0.1)  # which draws one target an example
    for _ in range(2):
        opt.zero_grad()
        F.mse_loss(model(x), normal(9, 1)).backward()
        opt.step()
    assert all(bool(p.isfinite().all()) for p in model.parameters())


PRODUCTS: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "relu(a) g": lambda a, g, m: torch.relu(a) * g * m,
    "g relu(a)²": lambda a, g, m: g * torch.relu(a).square() * m,
    "one unit for all": lambda a, g, m: F.hardtanh(a[..., :1], 0.0, 1.0) * g * m,
    "relu(a) relu(g)": lambda a, g, m: torch.relu(a) * torch.relu(g) * m,
    "mask inside": lambda a, g, m: torch.relu(a) * (g * m),
}


@pytest.mark.parametrize("product", PRODUCTS)
def test_a_position_that_a_product_turns_off_counts_for_both_of_its_factors(product: str) -> None:
    """Gated units relu(a) g, where all of a is off; masks in the same product hide padding from both."""

    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.g, self.head = nn.Linear(3, 2), nn.Linear(2, 2), nn.Linear(2, 3)

        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            units = PRODUCTS[product](self.a(x), self.g(x[..., 1:]), mask.unsqueeze(-1).to(x))
            return self.head(units).sum(1) / mask.sum(1, keepdim=True)

    model, (x, mask) = seeded(Gated, 3).double(), elements()
    with torch.no_grad():
        model.get_parameter("a.bias").sub_(0.8)
    assert 0.2 < float((model.get_submodule("a")(x) <= 0).all(-1)[mask].double().mean()) < 1
    G = ng.Kronecker().estimate(ng.pullback(model, (x, mask), FISHER)).tensors()
    for name, seen in (("a", x[mask]), ("g", x[mask][:, 1:])):
        rows = torch.cat([seen, torch.ones_like(seen[:, :1])], 1)
        close(G[f"{name}.weight/A"][0], rows.T @ rows / len(rows))


def test_batch_statistics_below_units_that_are_off_are_constants() -> None:
    """Factors S of two columns of a root are the sums of those of each, also where one column comes by itself."""

    class Normalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.below, self.norm, self.each, self.head = (
                nn.Linear(3, 4),
                nn.BatchNorm1d(4),
                nn.Linear(4, 2),
                nn.Linear(2, 3),
            )

        def forward(self, x: Tensor) -> Tensor:
            h = self.norm(self.below(x))
            return self.head(F.relu(self.each(torch.stack([h, -h, 2 * h], 1))).mean(1))

    x, s = normal(6, 3), normal(2, 6, 3, seed=1)
    both, *single = [
        ng.NaturalGradient(seeded(Normalised).double(), Rooted(root), structure=ng.Kronecker())
        for root in (s, s[:1], s[1:])
    ]
    for opt in (both, *single):
        opt.refresh(x)
    expected = [opt.tracker.fresh.tensors() for opt in single if opt.tracker.fresh is not None]
    assert both.tracker.fresh is not None
    for key, S in both.tracker.fresh.tensors().items():
        if key.endswith("/S"):
            close(S, expected[0][key] + expected[1][key])


# Ignored labels.


def language_batch(t: int) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, their mask, and labels that are ignored where there is padding."""
    mask = torch.arange(t) < LENGTHS[:, None]
    x = torch.randint(7, (6, 16), generator=torch.Generator().manual_seed(0))[:, :t]
    return torch.where(mask, x, 0), mask, torch.where(mask, (5 * x + 1) % 3, -100)


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
def test_padding_of_a_language_model_without_labels_leaves_the_metric_alone(structure: Structure) -> None:
    """By a mask, and by the targets of a loss."""
    model = seeded(Language).double()

    def estimates(t: int) -> list[Operator]:
        x, mask, labels = language_batch(t)
        masked = ng.Fisher(ng.families.Masked(ng.Categorical(axis=-1)))
        first = ng.pullback(model, (x, mask), masked, target=ng.families.Mask(steps=mask))
        second = ng.pullback(model, (x, mask), ng.metric_of(nn.CrossEntropyLoss(), axis=-1), target=labels)
        return [structure.estimate(pb) for pb in (first, second)]

    for short, long in zip(estimates(5), estimates(11), strict=True):
        same_tensors(short, long)


def networks() -> dict[str, nn.Module]:
    """Of points, and of images [n 2 4 4], whose pixels all count, in examples that do."""
    points = nn.Sequential(nn.Linear(32, 3), nn.ReLU(), nn.Linear(3, 3))
    images = nn.Sequential(
        *(nn.Unflatten(1, (2, 4, 4)), nn.Conv2d(2, 3, 3), nn.GroupNorm(1, 3), nn.ReLU(), nn.Flatten()), nn.Linear(12, 3)
    )
    return {"points": seeded(lambda: points).double(), "images": seeded(lambda: images).double()}


@pytest.mark.parametrize("structure", STRUCTURES.values(), ids=STRUCTURES)
@pytest.mark.parametrize("name", ["points", "images"])
def test_examples_with_ignored_labels_leave_the_metric_alone(name: str, structure: Structure) -> None:
    model, x = networks()[name], normal(11, 32)

    def estimate(n: int) -> Operator:
        labels = torch.where(torch.arange(n) < 6, torch.arange(n) % 3, -100)
        return structure.estimate(ng.pullback(model, x[:n], nn.CrossEntropyLoss(), target=labels))

    same_tensors(estimate(6), estimate(11))


@pytest.mark.parametrize("preset", [ng.KFAC, ng.EKFAC])
def test_ignored_labels_leave_the_steps_alone(preset: Callable[..., ng.NaturalGradient]) -> None:
    """In a training loop the cotangents of the user's own backward pass show them."""

    def trained(t: int) -> list[Tensor]:
        model, loss = seeded(Language).double(), nn.CrossEntropyLoss()
        opt = preset(model, ng.metric_of(loss), lr=0.1)
        x, mask, labels = language_batch(t)
        loss(model(x, mask).transpose(1, 2), labels).backward()
        opt.step()
        return [p.detach() for p in model.parameters()]

    for short, long in zip(trained(5), trained(12), strict=True):
        close(long, short)


@pytest.mark.parametrize("loss", [nn.MSELoss(), nn.BCEWithLogitsLoss()])
def test_a_loss_that_ignores_nothing_masks_nothing(loss: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, which nobody looks at, a mask would be a copy of the inputs of every layer."""
    monkeypatch.setattr(moments, "can_read", lambda t: False)
    monkeypatch.setattr(Rows, "weight_examples", None)
    model, x, target = networks()["points"], normal(4, 32), torch.zeros(4, 3).double()
    ng.Kronecker().estimate(ng.pullback(model, x, loss, target=target))
