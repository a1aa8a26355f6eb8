"""``fallback=``: what becomes of parameters that no layer rule covers. By name AdamW steps them, as a structure it
keeps their metric.
"""

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.errors import IncompatibleError, UncoveredError
from natgrad.optim import natural_of_outputs
from natgrad.structures import Structure
from tests import oracle
from tests.optim.states import alike
from tests.optim.tasks import resumes, seeded
from tests.pulled import normal
from tests.zoo import Opaque, opaque

EXACT = ng.Fisher(ng.Categorical(axis=-1))
BETAS = (0.9, 0.95)
Make = Callable[..., Any]


class Mixed(nn.Module):
    """Two layers; between them a matrix in a product, and one that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 3)
        self.dark, self.product = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return self.last(torch.tanh(opaque(torch.tanh(self.first(x)), self.dark) @ self.product))


def mixed() -> Mixed:
    return seeded(lambda: Mixed().double())


def backward(model: nn.Module, step: int = 0) -> None:
    x = normal(6, 3, seed=step)
    nn.functional.cross_entropy(model(x), torch.arange(6) % 3).backward()


def train(model: nn.Module, opt: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        opt.zero_grad()
        backward(model, step)
        opt.step()


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


MAKES: dict[str, Make] = {
    "kfac": lambda m, **o: ng.KFAC(m, EXACT, **{"fallback": "adamw", "lr": 0.1, **o}),
    "kfac_sampled": lambda m, **o: ng.KFAC(
        m, nn.CrossEntropyLoss(), generator=torch.Generator().manual_seed(0), **{"fallback": "adamw", **o}
    ),
    "ekfac": lambda m, **o: ng.EKFAC(m, EXACT, **{"fallback": "adamw", "lr": 0.1, **o}),
    "sobolev": lambda m, **o: ng.SobolevKFAC(m, EXACT, lengthscale=2.0, **{"fallback": "adamw", **o}),
    "natural_fisher": lambda m, **o: ng.Natural(m, EXACT, lr=0.01, **o),
    "natural_empirical": lambda m, **o: ng.Natural(m, ng.Empirical(), lr=0.01, **o),
    "dense": lambda m, **o: ng.NaturalGradient(m, EXACT, lr=0.1, **{"fallback": "adamw", **o}),
    "searched": lambda m, **o: ng.NaturalGradient(
        m, EXACT, step=ng.Constrained(ng.Fixed(), ng.Clipping({})), lr=0.1, momentum=0.5, **{"fallback": "adamw", **o}
    ),
}
EVERY = pytest.mark.parametrize("name", MAKES)


@EVERY
def test_what_has_no_rule_is_stepped_by_adamw_and_the_others_as_if_a_group_had_said_so(name: str) -> None:
    model, told = mixed(), mixed()
    groups = [{"params": [model.dark], "weight_decay": 0.1}]
    opt = MAKES[name](model, groups=groups)
    said = MAKES[name](told, groups=[{"params": [told.dark], "weight_decay": 0.1, "fallback": "adamw"}])
    copy = nn.Parameter(model.dark.detach().clone())
    adamw = torch.optim.AdamW([copy], lr=opt.param_groups[1]["lr"], betas=BETAS, weight_decay=0.1)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.9) for o in (opt, said, adamw)]
    for step in range(5):
        for m, o in ((model, opt), (told, said)):
            o.zero_grad()
            backward(m, step)
        assert model.dark.grad is not None
        copy.grad = model.dark.grad.clone()
        for optimizer in (opt, said, adamw):
            optimizer.step()
        for schedule in schedules:
            schedule.step()
        torch.testing.assert_close(model.dark, copy, rtol=1e-12, atol=1e-14)
        for what, mine in values(model).items():
            torch.testing.assert_close(mine, values(told)[what], rtol=1e-12, atol=1e-14)
    assert opt.last is not None
    assert "dark" not in opt.last.displacement
    assert str(opt.plan()).splitlines()[-1].split(", ")[-1] == "dark"
    assert repr(opt).count("AdamW for 3 of 6 parameters") == 1


def test_the_metric_is_the_block_of_the_others() -> None:
    """Against the dense oracle, in the first and the only step."""
    model = mixed()
    x, before = normal(6, 3, seed=0), values(model)
    names = list(oracle.parameters(model))
    G = oracle.dense(oracle.module_jacobian(model, x), oracle.categorical(model(x).detach()))
    backward(model)
    sizes = [p.numel() for p in model.parameters()]
    index = torch.arange(sum(sizes)).split(sizes)
    kept = [n for n in names if n not in ("dark", "first.bias", "last.bias")]
    block = torch.cat([at for at, n in zip(index, names, strict=True) if n in kept])
    ω = oracle.flatten([model.get_parameter(n).grad for n in kept])  # type: ignore[misc]
    expected = oracle.damped(G[block[:, None], block], ω, 0.1)
    model.zero_grad()
    opt = ng.NaturalGradient(model, EXACT, lr=0.5, damping=0.1, fallback="adamw")
    train(model, opt, range(1))
    moved = oracle.flatten([before[n] - model.get_parameter(n) for n in kept])
    torch.testing.assert_close(moved, 0.5 * expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["kfac", "kfac_sampled", "natural_fisher", "natural_empirical"])
def test_nothing_is_differentiated_example_by_example(
    name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A step goes back through it as often as where a group gives it to AdamW, and more often where it has a metric."""
    calls: list[int] = []
    pulled = Opaque.backward

    def counted(ctx: Any, *g: Tensor) -> tuple[Tensor, Tensor]:
        calls.append(1)
        return pulled(ctx, *g)

    monkeypatch.setattr(Opaque, "backward", staticmethod(counted))

    def passes(**group: Any) -> int:
        model = mixed()
        opt = MAKES[name](model, groups=[{"params": [model.dark], **group}])
        train(model, opt, range(1))
        calls.clear()
        train(model, opt, range(1, 3))
        return len(calls)

    mine = passes()
    assert "dark have no layer rule, and AdamW steps them: they are read by OpaqueBackward" in caplog.text
    assert "slow" not in caplog.text
    assert mine == passes(fallback="adamw")
    if name != "natural_empirical":  # there the diagonal is that of the gradients
        assert mine < passes(fallback=None)


def test_the_plan_says_before_the_first_pass_what_becomes_of_them() -> None:
    model = mixed()
    opt = MAKES["kfac"](model)
    pending = "the rule of dark, product is found at the first pass, from the operations that use them; if there is "
    assert f"{pending}none, AdamW steps them" in opt.plan().notes
    train(model, opt, range(1))
    rows = {row.names: (row.rule, row.structure) for row in opt.plan().rows}
    assert ("dark",) not in rows
    assert rows[("product",)][1] == "Kronecker"
    assert opt.plan().notes[-1] == "AdamW steps dark, first.bias, last.bias"
    strict = MAKES["kfac"](mixed(), strict=True)
    assert f"{pending}none, strict=True refuses them" in strict.plan().notes


def test_strict_refuses_them() -> None:
    model = mixed()
    opt = MAKES["kfac"](model, strict=True)
    with pytest.raises(UncoveredError, match=r"no layer rule covers dark, and strict=True: .* let AdamW step them"):
        train(model, opt, range(1))


class Dark(nn.Module):
    """No rule covers its only matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.dark = nn.Parameter(torch.randn(3, 3))

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        return opaque(x, self.dark)


@pytest.mark.parametrize("name", ["kfac", "natural_empirical"])
def test_a_model_that_no_rule_covers_is_refused(name: str) -> None:
    model = seeded(lambda: Dark().double())
    before = values(model)
    opt = MAKES[name](model)
    with pytest.raises(
        UncoveredError, match=r'dark, and fallback="adamw" leaves no parameter for the metric: .*groups'
    ):
        train(model, opt, range(1))
    assert alike(values(model), before)


def test_a_group_may_keep_them_in_the_structure() -> None:
    """The steps of a group with "fallback": None are those of an optimizer without AdamW, but for vectors."""
    model, frozen = mixed(), mixed()
    for p in (frozen.first.bias, frozen.last.bias):
        p.requires_grad_(False)
    opt = MAKES["kfac"](model, groups=[{"params": [model.dark], "fallback": None}], step=ng.Fixed())
    alone = ng.KFAC(frozen, EXACT, lr=0.1, step=ng.Fixed())
    train(model, opt, range(1))
    train(frozen, alone, range(1))
    for what in ("dark", "product", "first.weight", "last.weight"):
        torch.testing.assert_close(values(model)[what], values(frozen)[what], rtol=1e-12, atol=1e-14)
    assert "Diagonal (fallback)" in str(opt.plan())


@EVERY
def test_a_run_is_resumed_bit_for_bit(name: str) -> None:
    def made() -> tuple[nn.Module, ng.NaturalGradient]:
        model = mixed()
        return model, MAKES[name](model)

    resumes(made, lambda model, opt, step: train(model, opt, range(step, step + 1)))


def test_a_state_from_before_goes_on_with_the_metric_it_has() -> None:
    """A state that keeps them in the structure, as all did, is gone on with, also where they were left to AdamW."""
    old, new = mixed(), mixed()
    first = MAKES["kfac"](old, groups=[{"params": [old.dark], "fallback": None}])
    train(old, first, range(3))
    again = MAKES["kfac"](new, groups=[{"params": [new.dark]}])
    train(new, again, range(1))
    file = io.BytesIO()
    torch.save((old.state_dict(), first.state_dict()), file)
    file.seek(0)
    of_model, of_opt = torch.load(file, weights_only=True)
    new.load_state_dict(of_model)
    again.load_state_dict(of_opt)
    train(old, first, range(3, 6))
    train(new, again, range(3, 6))
    assert alike(values(old), values(new))
    assert "Diagonal (fallback)" in str(again.plan())
    left = MAKES["kfac"](new, groups=[{"params": [new.dark]}])
    train(new, left, range(1))
    with pytest.raises(ValueError, match=r'AdamW steps dark, which no layer rule covered.* Give fallback="adamw"'):
        first.load_state_dict(left.state_dict())


def test_they_are_found_by_a_refresh() -> None:
    model, told = mixed(), mixed()
    opts = MAKES["kfac"](model), MAKES["kfac"](told, groups=[{"params": [told.dark], "fallback": "adamw"}])
    for m, opt in zip((model, told), opts, strict=True):
        opt.refresh(normal(6, 3, seed=9))
        train(m, opt, range(2))
    for what, mine in values(model).items():
        torch.testing.assert_close(mine, values(told)[what], rtol=1e-12, atol=1e-14)


def test_gradient_accumulation_is_the_joint_batch() -> None:
    joint, apart = mixed(), mixed()
    one, two = (ng.KFAC(m, EXACT, fallback="adamw") for m in (joint, apart))
    for step in range(3):
        x, t = normal(8, 3, seed=step), torch.arange(8) % 3
        for m, opt, pieces in ((joint, one, 1), (apart, two, 2)):
            opt.zero_grad()
            for xs, ts in zip(x.chunk(pieces), t.chunk(pieces), strict=True):
                (nn.functional.cross_entropy(m(xs), ts) / pieces).backward()
            opt.step()
    for what, mine in values(joint).items():
        torch.testing.assert_close(mine, values(apart)[what], rtol=1e-9, atol=1e-11)


class Late(nn.Module):
    """A matrix that no rule covers, which the first pass does not use."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.dark = nn.Linear(3, 4), nn.Linear(4, 3), nn.Parameter(torch.randn(4, 4))
        self.steps = 0

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        h = torch.tanh(self.first(x))
        self.steps += 1
        return self.last(h if self.steps == 1 else opaque(h, self.dark))


def test_one_that_a_later_pass_uses_for_the_first_time_is_in_the_structure() -> None:
    """An average keeps its structure; by then there is one."""
    model = seeded(lambda: Late().double())
    opt, before = MAKES["kfac"](model), model.dark.detach().clone()
    train(model, opt, range(3))
    assert "Diagonal (fallback)" in str(opt.plan())
    assert not torch.equal(model.dark, before)


class Flattened(nn.Module):
    """Attention, and a matrix that no rule covers; the outputs of all positions are rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dark, self.last = nn.Linear(3, 4), nn.Parameter(torch.randn(4, 4)), nn.Linear(4, 5)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """[n·t 5] of x [n t 3]."""
        h = self.first(x)
        return self.last(opaque(self.attention(h, h, h)[0], self.dark)).flatten(0, 1)


@pytest.mark.parametrize("metric", [ng.Fisher(ng.Categorical()), nn.CrossEntropyLoss()], ids=["Fisher", "loss"])
def test_flattened_outputs_are_still_found_and_one_matrix_is_left(metric: Any) -> None:
    """Read as examples, rows of one sequence depend on each other, and no layer below attention would have a rule."""
    model = seeded(lambda: Flattened().double())
    opt = ng.KFAC(model, metric, fallback="adamw")
    nn.functional.cross_entropy(model(normal(6, 7, 3)), torch.arange(42) % 5).backward()
    opt.step()
    rules = {name: row.rule for row in opt.plan().rows for name in row.names}
    assert rules["first.weight"] == rules["last.weight"] == "Linear"
    left = ["dark", "first.bias", "last.bias", "attention.in_proj_bias", "attention.out_proj.bias"]
    assert opt.plan().notes[-1] == f"AdamW steps {', '.join(left)}"


# A structure as the fallback.


@pytest.mark.parametrize("structure", [ng.Kronecker(), ng.EigenKronecker()], ids=repr)
@pytest.mark.parametrize("fallback", [ng.Diagonal(), ng.BlockDense()], ids=repr)
def test_it_is_that_of_the_structure(structure: Any, fallback: Structure) -> None:
    inner = type(structure)(fallback=fallback)
    a, b, c = mixed(), mixed(), mixed()
    options: dict[str, Any] = {"lr": 0.1, "damping": 0.1}
    opts = (
        ng.NaturalGradient(a, EXACT, structure=structure, fallback=fallback, **options),
        ng.NaturalGradient(b, EXACT, structure=inner, **options),
        ng.NaturalGradient(c, EXACT, structure=ng.Refresh(structure, decay=0.0), fallback=fallback, **options),
    )
    for m, opt in zip((a, b, c), opts, strict=True):
        train(m, opt, range(2))
    assert alike(values(a), values(b))
    assert alike(values(a), values(c))
    opts[1].load_state_dict(opts[0].state_dict())
    assert f"{type(fallback).__name__} (fallback)" in str(opts[0].plan())
    assert "AdamW" not in str(opts[0].plan())


def test_where_a_structure_makes_no_sense_the_error_says_why() -> None:
    model = mixed()
    with pytest.raises(IncompatibleError, match=r"Dense\(\) is one structure for all parameters: use Kronecker"):
        ng.NaturalGradient(model, EXACT, fallback=ng.Diagonal())
    with pytest.raises(IncompatibleError, match=r"is one structure for all parameters: .* or fallback=\"adamw\""):
        ng.NaturalGradient(model, ng.BatchGradient(), structure=ng.Diagonal(), fallback=ng.Diagonal())
    with pytest.raises(IncompatibleError, match=r"Polar is for matrices, .* first\.bias, last\.bias"):
        natural_of_outputs(model, EXACT, fallback=ng.Diagonal())
    with pytest.raises(ValueError, match=r"fallback=Diagonal\(\), and Kronecker\(.*BlockDense.* leave one of them out"):
        ng.NaturalGradient(model, EXACT, structure=ng.Kronecker(fallback=ng.BlockDense()), fallback=ng.Diagonal())
    with pytest.raises(ValueError, match=r"cannot be averaged over time: use Diagonal\(\)"):
        ng.EKFAC(model, EXACT, fallback=ng.Kernel())


@pytest.mark.parametrize("make", [ng.KFAC, ng.EKFAC, ng.SobolevKFAC, natural_of_outputs])
def test_what_is_no_fallback_is_refused(make: Make) -> None:
    arguments = mixed(), EXACT
    with pytest.raises(ValueError, match=r'fallback= is "adamw", the structure of parameters .* or None, got \'sgd\''):
        make(*arguments, fallback="sgd")
    with pytest.raises(TypeError, match=r"got the class Diagonal: write Diagonal\(…\)"):
        make(*arguments, fallback=ng.Diagonal)
    model = arguments[0]
    for wrong in ("sgd", ng.Diagonal()):
        group = {"params": [model.dark], "fallback": wrong}
        with pytest.raises(ValueError, match=r'of a parameter group is "adamw" or None, the metric, got .*all groups'):
            make(*arguments, groups=[group])
