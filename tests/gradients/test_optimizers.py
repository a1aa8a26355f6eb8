"""ng.Natural, ng.Muon, ng.SOAP and ng.Shampoo: the steps of the slots of NaturalGradient, and what only they have."""

from __future__ import annotations

import copy
import io
import pickle
import re
import sys
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from examples import natural_in_49_lines
from natgrad.errors import IncompatibleError
from tests.optim.tasks import seeded

Make = Callable[..., Any]
D = torch.float64


# Theorem: the steps are those of the slots.


class Tokens(nn.Module):
    """An embedding, matrices, a convolution with offsets, a norm, a head, and a matrix with one row."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.first = nn.Embedding(13, 8), nn.Linear(8, 8, bias=False)
        self.conv, self.norm, self.second = nn.Conv1d(8, 8, 3, padding=1), nn.LayerNorm(8), nn.Linear(8, 8)
        self.head, self.value = nn.Linear(8, 12), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens [n r] to logits [n·r 12]."""
        h = self.conv(self.first(self.words(x)).mT).mT.tanh()
        h = self.second(self.norm(h))
        return (self.head(h) + self.value(h) * torch.linspace(0, 1, 12, dtype=h.dtype)).flatten(0, 1)


def _mlp(*widths: int) -> nn.Module:
    layers = [m for i, o in pairwise(widths) for m in (nn.Linear(i, o), nn.Tanh())]
    return nn.Sequential(*layers[:-1])


def _image() -> nn.Module:
    convolutions = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3)
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(64, 10))


def _points(inputs: int, classes: int, n: int = 64) -> tuple[Tensor, Tensor]:
    return torch.randn(n, inputs, dtype=D), torch.randint(classes, (n,))


def _sentences() -> tuple[Tensor, Tensor]:
    x = torch.randint(13, (24, 6))
    return x, x.roll(-1, 1).flatten() % 12


NETWORKS: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]]]] = {
    "square": (lambda: _mlp(6, 6, 6), lambda: _points(6, 6)),
    "deep": (lambda: _mlp(8, 8, 8, 8, 8), lambda: _points(8, 8)),
    "wide and tall": (lambda: _mlp(5, 9, 5, 9), lambda: _points(5, 9)),
    "image": (_image, lambda: (torch.randn(32, 2, 6, 6, dtype=D), torch.randint(10, (32,)))),
    "tokens": (Tokens, _sentences),
}
SLOTS: dict[str, Any] = {"momentum_on": "gradients", "weight_decay": 0.1, "fallback": "adamw", "lr": 0.01}
FACTORED: dict[str, Any] = {"solver": ng.Factored(), "damping": ng.Relative(1e-2), **SLOTS}


def _slots(structure: ng.structures.Structure | ng.Refresh, momentum: float, **slots: Any) -> Make:
    return lambda model, **options: ng.NaturalGradient(
        model, ng.BatchGradient(), structure=structure, momentum=momentum, **{**slots, **options}
    )


DIAGONALS = ng.Refresh(ng.Kronecker(largest=1, power=0.5), decay=0.95)
PAIRS: dict[str, tuple[Make, Make]] = {
    "natural": (
        lambda model, **o: ng.Natural(model, lr=0.01, iteration="minimax", **o),
        _slots(DIAGONALS, 0.9, step=ng.Polar(0.4, "minimax"), **FACTORED),
    ),
    "natural without a polar factor": (
        lambda model, **o: ng.Natural(model, lr=0.01, polar=False, **o),
        _slots(DIAGONALS, 0.9, step=ng.Normalised(0.4), **FACTORED),
    ),
    "muon": (
        lambda model, **o: ng.Muon(model, lr=0.01, iteration="minimax", nesterov=False, **o),
        _slots(ng.Diagonal(power=0.0), 0.95, step=ng.Polar(0.2, "minimax"), nesterov=False, **SLOTS),
    ),
    "shampoo": (
        lambda model, **o: ng.Shampoo(model, lr=0.01, **o),
        _slots(ng.Refresh(ng.Kronecker(power=0.5), 1, 0.95, 10), 0.95, step=ng.Normalised(), **FACTORED),
    ),
    "shampoo with diagonals": (
        lambda model, **o: ng.Shampoo(model, lr=0.01, largest=6, power=0.25, **o),
        _slots(ng.Refresh(ng.Kronecker(power=0.25, largest=6), 1, 0.95, 10), 0.95, step=ng.Normalised(), **FACTORED),
    ),
}


def _run(
    model: nn.Module, opt: Any, batch: Callable[[], tuple[Tensor, Tensor]], steps: int = 15, **choices: Any
) -> Iterator[Tensor]:
    """θ after every step of a run with a schedule and, if they are chosen, micro-batches, clipping and gaps."""
    for step in range(steps):
        x, t = seeded(batch, step)
        opt.zero_grad()
        for group in opt.param_groups:
            group["lr"] *= 0.9
        for xs, ts in zip(x.chunk(choices.get("pieces", 1)), t.chunk(choices.get("pieces", 1)), strict=True):
            (F.cross_entropy(model(xs), ts) / choices.get("pieces", 1)).backward()
        if choices.get("clip"):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        if choices.get("missing") and step % 3 != 2:
            list(model.parameters())[2].grad = None
        opt.step()
        yield torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.parametrize("network", NETWORKS)
def test_the_steps_are_those_of_the_slots(name: str, network: str) -> None:
    (build, batch), (make, slots) = NETWORKS[network], PAIRS[name]
    model = seeded(lambda: build().double())
    other = copy.deepcopy(model)
    for found, expected in zip(_run(model, make(model), batch), _run(other, slots(other), batch), strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("choices", [{"pieces": 2}, {"clip": True}, {"missing": True}], ids=lambda c: next(iter(c)))
@pytest.mark.parametrize("name", ["natural", "muon", "shampoo"])
def test_they_are_so_with_micro_batches_clipping_and_missing_gradients(name: str, choices: dict[str, Any]) -> None:
    (build, batch), (make, slots) = NETWORKS["deep"], PAIRS[name]
    model = seeded(lambda: build().double())
    other = copy.deepcopy(model)
    runs = _run(model, make(model), batch, **choices), _run(other, slots(other), batch, **choices)
    for found, expected in zip(*runs, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-12


@pytest.mark.parametrize("name", ["natural", "muon", "shampoo"])
def test_groups_have_rates_momenta_and_weight_decays_of_their_own(name: str) -> None:
    (build, batch), pair = NETWORKS["deep"], PAIRS[name]
    model = seeded(lambda: build().double())
    other, runs = copy.deepcopy(model), []
    for net, make in zip((model, other), pair, strict=True):
        first, last = next(net.parameters()), list(net.parameters())[-2:]
        groups = [{"params": [first], "lr": 0.03, "momentum": 0.5}, {"params": last, "weight_decay": 0.0}]
        runs.append(_run(net, make(net, groups=groups), batch))
    for found, expected in zip(*runs, strict=True):
        assert float((found - expected).norm() / expected.norm()) < 1e-12


def _polar(M: Tensor) -> Tensor:
    """UVᵀ of M = UΣVᵀ in its range: the logits of a softmax have a gradient without mean."""
    U, σ, Vh = torch.linalg.svd(M, full_matrices=False)
    return (U * (σ > 1e-9 * σ[0])) @ Vh


@pytest.mark.parametrize(("iteration", "difference"), [("minimax", 1e-9), ("muon", 2e-3)])
def test_natural_is_49_lines_of_plain_torch(iteration: Any, difference: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """With exact polar factors in both; those of Muon round to bfloat16, in products of another order."""
    if iteration == "minimax":
        monkeypatch.setattr(natural_in_49_lines, "polar", _polar)
    model = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(64, 10))).double()
    other = copy.deepcopy(model)
    opt, small = ng.Natural(model, lr=0.01, iteration=iteration), natural_in_49_lines.SmallNatural(other, lr=0.01)
    for step in range(8):
        x, t = seeded(lambda: (torch.randn(32, 2, 6, 6, dtype=D), torch.randint(10, (32,))), step)
        for net, each in ((model, opt), (other, small)):
            net.zero_grad()
            F.cross_entropy(net(x), t).backward()
            each.step()
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            assert (p - q).norm() < difference * p.norm()


# Stacks and blocks.

FAMILY: dict[str, Make] = {
    "natural": lambda params, **o: ng.Natural(params, lr=0.01, iteration="minimax", **o),
    "muon": lambda params, **o: ng.Muon(params, lr=0.01, iteration="minimax", **o),
    "shampoo": lambda params, **o: ng.Shampoo(params, lr=0.01, fit="kl", **o),
    "soap": lambda params, **o: ng.SOAP(params, lr=0.01, **o),
}
EVERY = pytest.mark.parametrize("name", FAMILY)


def _with_gradients(params: list[nn.Parameter], gradients: list[Tensor]) -> None:
    for p, g in zip(params, gradients, strict=True):
        p.grad = g.clone()


@pytest.mark.parametrize("size", [1e-12, 1e-18, 1e-20, 1e-30])
@pytest.mark.parametrize("name", ["natural by default", *FAMILY])
def test_where_all_gradients_vanish_a_step_is_none_or_as_long_as_any(name: str, size: float) -> None:
    """In single precision their squares are zero below 10⁻²³: nothing else is larger beside which they are rounding."""
    steps = []
    for scale in (1.0, size):
        params = [nn.Parameter(torch.ones(4, 5)), nn.Parameter(torch.ones(6, 4))]
        opt = FAMILY[name](params) if name in FAMILY else ng.Natural(params, lr=0.01)
        opt.param_groups[0]["weight_decay"] = 0.0
        for step in range(3):
            a, b, c, d = seeded(lambda: (torch.randn(4), torch.randn(5), torch.randn(6), torch.randn(4)), step)
            _with_gradients(params, [scale * torch.outer(a, b), scale * torch.outer(c, d)])
            opt.step()
        steps.append(torch.cat([(p.detach() - 1).flatten() for p in params]).norm())
    assert 0 <= steps[1] < 1.5 * steps[0]
    assert size < 1e-15 or name == "muon" or steps[1] > 0.5 * steps[0]  # which divides by 10⁻⁷ at least, as torch does


@EVERY
def test_a_stack_of_matrices_is_stepped_as_its_matrices_are(name: str) -> None:
    stack = nn.Parameter(seeded(lambda: torch.randn(3, 4, 5, dtype=D)))
    apart = [nn.Parameter(W.detach().clone()) for W in stack]
    one, many = FAMILY[name]([stack]), FAMILY[name](apart)
    for step in range(12):
        g = seeded(lambda: torch.randn(3, 4, 5, dtype=D), step)
        _with_gradients([stack], [g])
        _with_gradients(apart, list(g))
        one.step()
        many.step()
        torch.testing.assert_close(stack.detach(), torch.stack([p.detach() for p in apart]), rtol=1e-10, atol=1e-12)
    assert "stack [3, 4, 5]" not in str(one.plan())  # without names
    assert "as 3 matrices [4, 5], a stack of matrices" in str(one.plan())


@EVERY
def test_an_expert_without_a_token_stands_still(name: str) -> None:
    """Its gradient is zero, not None: no NaN, and no special case."""
    stack = nn.Parameter(seeded(lambda: torch.randn(3, 4, 5)))
    opt, before = FAMILY[name]([stack], weight_decay=0.0), stack.detach().clone()
    for step in range(6):
        stack.grad = seeded(lambda: torch.randn(3, 4, 5), step)
        stack.grad[1] = 0.0
        opt.step()
    assert bool(stack.isfinite().all())
    assert torch.equal(stack[1], before[1])
    assert not torch.equal(stack[0], before[0])
    for step in range(6, 9):  # Shampoo has new powers in the eighth
        stack.grad = seeded(lambda: torch.randn(3, 4, 5), step)
        opt.step()
    assert bool(stack.isfinite().all())
    assert not torch.equal(stack[1], before[1])


@EVERY
@pytest.mark.parametrize(("blocks", "axis"), [(3, 0), ((3, 1), 0), ((1, 2), 1)], ids=["3", "rows", "columns"])
def test_a_matrix_that_is_several_is_stepped_as_these(name: str, blocks: Any, axis: int) -> None:
    count = blocks if isinstance(blocks, int) else max(blocks)
    shape = (4 * count, 4) if axis == 0 else (4, 4 * count)
    whole = nn.Parameter(seeded(lambda: torch.randn(shape, dtype=D)))
    apart = [nn.Parameter(W.detach().clone().contiguous()) for W in whole.chunk(count, axis)]
    one, many = FAMILY[name]([{"params": [whole], "blocks": blocks}]), FAMILY[name](apart)
    for step in range(12):
        g = seeded(lambda: torch.randn(shape, dtype=D), step)
        _with_gradients([whole], [g])
        _with_gradients(apart, [t.contiguous() for t in g.chunk(count, axis)])
        one.step()
        many.step()
        joined = torch.cat([p.detach() for p in apart], axis)
        torch.testing.assert_close(whole.detach(), joined, rtol=1e-10, atol=1e-12)


def test_blocks_that_do_not_divide_a_matrix_are_refused() -> None:
    model = nn.Linear(4, 3, bias=False)
    with pytest.raises(ValueError, match=r"\"blocks\": \(5, 1\) do not divide weight, of matrices \[3, 4\]"):
        ng.Muon(model, groups=[{"params": model.weight, "blocks": 5}])
    with pytest.raises(ValueError, match="is a number of blocks of rows, or"):
        ng.Muon([{"params": [nn.Parameter(torch.ones(2, 2))], "blocks": "heads"}])


# What steps what.


class Decoder(nn.Module):
    def __init__(self, width: int = 16, vocabulary: int = 50, tied: bool = False) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(32, width)
        self.blocks = nn.ModuleList(_mlp(width, 32, width) for _ in range(2))
        self.final = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.final.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.words(x) + self.places.weight[: x.shape[1]]
        for block in self.blocks:
            h = h + block(h)
        return self.final(h)


def _adamw(opt: Any) -> set[str]:
    return {a.name for a in opt.plan().assignments if not a.is_matrix and len(a.shape) > 1}


@EVERY
@pytest.mark.parametrize("given", ["model", "parameters", "named"])
def test_embeddings_and_the_head_are_known_from_the_modules(name: str, given: str) -> None:
    """Also where the positions are as many as the hidden units: the matrix that is nearest to the root is the head."""
    model = Decoder()
    params = {"model": model, "parameters": model.parameters(), "named": model.named_parameters()}[given]
    assert _adamw(FAMILY[name](params)) == {"words.weight", "places.weight", "final.weight"}
    assert _adamw(FAMILY[name](Decoder(tied=True))) == {"words.weight", "places.weight"}


def test_a_head_that_is_one_of_many_is_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Embedding(8, 8), *(nn.Linear(8, 8) for _ in range(3)))
    with caplog.at_level("INFO", "natgrad"):
        assert _adamw(ng.Muon(model)) == {"0.weight"}
    assert "as long as the vocabulary of an embedding, 8. If one of them is the head" in caplog.text


def test_a_model_that_names_its_head_is_believed() -> None:
    class Named(Decoder):
        def get_output_embeddings(self) -> nn.Module:
            return self.blocks[1][2]  # type: ignore[index]

    assert _adamw(ng.Natural(Named())) == {"words.weight", "places.weight", "blocks.1.2.weight"}


def test_bare_parameters_say_once_what_is_not_known(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "natgrad"):
        opt = ng.Natural(list(Decoder().parameters()))
    assert [record.getMessage()[:60] for record in caplog.records] == [
        "of parameters without their model it is not known which are "
    ]
    assert _adamw(opt) == set()


def test_a_group_decides_otherwise() -> None:
    model = Decoder()
    groups: list[dict[str, Any]] = [
        {"params": [model.words.weight, model.final.weight], "fallback": None},
        {"params": model.blocks[0].parameters(), "fallback": "adamw"},
    ]
    opt = ng.Natural(model, groups=groups)
    assert _adamw(opt) == {"places.weight", "blocks.0.0.weight", "blocks.0.2.weight"}
    assert "blocks.0.0.weight [32, 16]: AdamW, a group says so" in str(opt.plan())
    with pytest.raises(IncompatibleError, match=r"these have fewer than two axes: blocks\.1\.0\.bias"):
        ng.Natural(model, groups=[{"params": [model.blocks[1][0].bias], "fallback": None}])  # type: ignore[index]


# The contract of torch.optim.


@EVERY
def test_optimizers_are_made_by_a_class_and_groups_of_parameters(name: str) -> None:
    """As skorch, fastai, timm, LightningCLI and Hugging Face call them."""
    model = seeded(Decoder).double()
    decayed = [p for p in model.parameters() if p.ndim > 1]
    opt = FAMILY[name](
        [{"params": decayed, "weight_decay": 0.1}, {"params": [p for p in model.parameters() if p.ndim < 2]}]
    )
    assert isinstance(opt, torch.optim.Optimizer)
    assert [len(group["params"]) for group in opt.param_groups] == [7, 4]
    opt.add_param_group({"params": [nn.Parameter(torch.ones(3, 3, dtype=D))], "lr": 0.5})
    schedule = torch.optim.lr_scheduler.OneCycleLR(opt, [0.1, 0.2, 0.3], total_steps=5)
    model(torch.arange(12).view(3, 4)).square().mean().backward()
    opt.step()
    schedule.step()
    with pytest.raises(ValueError, match="a parameter group holds rms, which all parameters share"):
        opt.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))], "rms": 1.0})


@EVERY
@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda pair: pickle.loads(pickle.dumps(pair))], ids=["copy", "pickle"]
)
def test_a_copy_goes_on_as_the_optimizer_does(name: str, copied: Callable[[Any], Any]) -> None:
    model = seeded(lambda: _mlp(5, 4, 3).double())
    opt = FAMILY[name](model)
    torch.optim.lr_scheduler.StepLR(opt, step_size=3)  # wraps ``step``
    batch = lambda: _points(5, 3)  # noqa: E731
    *_, _last = _run(model, opt, batch, 4)
    other, again = copied((model, opt))
    for θ, here in zip(_run(model, opt, batch, 5), _run(other, again, batch, 5), strict=True):
        assert torch.equal(θ, here)
    assert str(again.plan()) == str(opt.plan())


@EVERY
def test_a_state_is_loaded_bit_for_bit_and_one_of_another_optimizer_is_refused(name: str) -> None:
    model = seeded(lambda: _mlp(5, 4, 3).bfloat16())

    def batches() -> tuple[Tensor, Tensor]:
        x, t = _points(5, 3)
        return x.bfloat16(), t

    opt = FAMILY[name](model)
    *_, _last = _run(model, opt, batches, 4)
    file = io.BytesIO()
    torch.save(opt.state_dict(), file)
    file.seek(0)
    saved, other = torch.load(file), copy.deepcopy(model)
    again = FAMILY[name](other)
    again.load_state_dict(saved)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert all(torch.equal(t, again.state[q][key]) for key, t in opt.state[p].items())  # in single precision
    for θ, here in zip(_run(model, opt, batches, 4), _run(other, again, batches, 4), strict=True):
        assert torch.equal(θ, here)
    with pytest.raises(ValueError, match=r"this is the state of another optimizer: 0\.weight has"):
        FAMILY["natural" if name == "soap" else "soap"](other).load_state_dict(saved)
    wrong = copy.deepcopy(saved)
    wrong["state"][0]["momentum"] = torch.zeros(2, 2)
    with pytest.raises(
        ValueError, match=r"momentum of 0\.weight in the state has the shape \[2, 2\], here it is \[4, 5\]"
    ):
        again.load_state_dict(wrong)


@EVERY
@pytest.mark.parametrize("shape", [(4, 1), (1, 4), (1, 1)], ids=str)
def test_a_matrix_with_one_row_or_column_has_a_state_that_can_be_loaded(name: str, shape: tuple[int, int]) -> None:
    model = nn.Linear(*shape).double()
    opt = FAMILY[name](model)
    batch = lambda: (torch.randn(9, shape[0], dtype=D), torch.zeros(9, dtype=torch.long))  # noqa: E731
    *_, _last = _run(model, opt, batch, 3)
    other = copy.deepcopy(model)
    again = FAMILY[name](other)
    again.load_state_dict(opt.state_dict())
    for θ, here in zip(_run(model, opt, batch, 3), _run(other, again, batch, 3), strict=True):
        assert torch.equal(θ, here)


@EVERY
def test_a_damaged_state_is_refused(name: str) -> None:
    """The root of a second moment below zero would be NaN, or a step would ascend; and what is no tensor has none."""
    model = seeded(lambda: _mlp(5, 4, 3).double())
    opt = FAMILY[name](model)
    for _ in _run(model, opt, lambda: _points(5, 3), 3):
        before = [p.detach().clone() for p in model.parameters()]
    letters = ["exp_avg_sq", *(letter for letter in ("S", "A", "D", "S^-p", "A^-½") if letter in opt.letters)]
    for letter in letters:
        saved = copy.deepcopy(opt.state_dict())
        next(state[letter] for state in saved["state"].values() if letter in state).view(-1)[0] = -7.0
        with pytest.raises(ValueError, match=rf"{re.escape(letter)} of 0\.\w+ in the state has negative entries"):
            opt.load_state_dict(saved)
    for what in ("momentum", "exp_avg", *(letter for letter in ("S", "D") if letter in opt.letters)):
        saved = copy.deepcopy(opt.state_dict())
        next(state for state in saved["state"].values() if what in state)[what] = None
        with pytest.raises(ValueError, match=rf"{what} of 0\.\w+ in the state is a NoneType, where a tensor belongs"):
            opt.load_state_dict(saved)
    saved = copy.deepcopy(opt.state_dict())
    saved["state"][1]["step"].fill_(-8.0)
    with pytest.raises(ValueError, match="is damaged"):
        opt.load_state_dict(saved)
    assert all(torch.equal(p, θ) for p, θ in zip(model.parameters(), before, strict=True))


def test_factors_are_decomposed_when_that_is_due_also_if_no_matrix_has_a_gradient() -> None:
    """Powers are due in the first and the third step, in which AdamW alone has a gradient; the fourth sees them."""
    W, b = nn.Parameter(torch.eye(3, dtype=D)), nn.Parameter(torch.ones(3, dtype=D))
    opt = ng.Shampoo(
        [W, b], lr=1.0, weight_decay=0.0, momentum=0.0, decay=0.5, inverse_every=2, early=False, damping=1e-16
    )
    first, second, last = 2 * torch.eye(3, dtype=D), torch.tensor([1.0, 5.0, 9.0], dtype=D).diag(), torch.ones_like(W)
    before = W.detach().clone()
    for gradient in (first, second, None, last):
        W.grad, b.grad, before = gradient, torch.ones_like(b), W.detach().clone()
        opt.step()
    S = (first.square() + 2 * second.square()).diagonal() / 9  # and A: averages with the weights ⅓ and ⅔
    v = (S[:, None] * S).rsqrt()
    torch.testing.assert_close(before - W.detach(), 0.2 * 3 * v / v.norm(), rtol=1e-6, atol=0)


@EVERY
def test_complex_and_sparse_are_refused_by_name(name: str) -> None:
    with pytest.raises(TypeError, match=r"parameter 0 is complex: optimize torch\.view_as_real of it"):
        FAMILY[name]([nn.Parameter(torch.ones(2, 2, dtype=torch.complex64))])
    model = nn.Sequential(nn.Embedding(4, 3, sparse=True), nn.Linear(3, 3))
    opt = FAMILY[name](model)
    model(torch.arange(3)).sum().backward()
    with pytest.raises(TypeError, match=r"the gradient of 0\.weight is sparse"):
        opt.step()


@EVERY
def test_a_layer_with_small_gradients_moves(name: str) -> None:
    """Rounding is 10⁻⁵ of the largest gradient in single precision: 10⁻³ of it is a gradient."""
    params = [nn.Parameter(torch.zeros(6, 8)) for _ in range(2)]
    opt = FAMILY[name](params)
    for step in range(3):
        large, small = seeded(lambda: torch.randn(2, 6, 8), step)
        _with_gradients(params, [large, 1e-3 * small])
        opt.step()
    assert 0.5 < float(params[1].detach().norm() / params[0].detach().norm()) < 2


def test_a_step_of_natural_is_few_calls_of_python() -> None:
    """At most 100 of the library's own, and with those of torch one and a half times as many as a step of AdamW."""
    ours, own, every = str(Path(ng.__file__).parent), dict[str, int](), dict[str, int]()
    makes: dict[str, Any] = {"natural": ng.Natural, "adamw": lambda model: torch.optim.AdamW(model.parameters())}
    for name, make in makes.items():
        model = seeded(lambda: _mlp(16, 32, 32, 10))
        opt, files = make(model), list[str]()

        def count(frame: Any, event: str, arg: Any, files: list[str] = files) -> None:
            if event == "call":
                files.append(frame.f_code.co_filename)

        for _ in range(3):
            opt.zero_grad()
            F.cross_entropy(model(torch.randn(8, 16)), torch.arange(8)).backward()
            files.clear()
            sys.setprofile(count)
            opt.step()
            sys.setprofile(None)
        own[name], every[name] = sum(file.startswith((ours, "<string>")) for file in files), len(files)
    assert 50 < own["natural"] <= 100, own
    assert every["natural"] <= 1.5 * every["adamw"], every
