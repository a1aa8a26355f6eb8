"""Checkpoints of K-FAC and EK-FAC: bit for bit, at every phase of the schedules, across precisions; or refused."""

import io
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import natgrad as ng
from natgrad.rules.base import Call, Keys, Rule
from natgrad.rules.features import Rows
from natgrad.rules.linear import LinearRule
from tests.optim.tasks import seeded

EXACT, SAMPLED = ng.Fisher(ng.Categorical()), ng.Fisher(ng.Categorical(), samples=1)
SCHEDULE: dict[str, Any] = {"metric_every": 2, "inverse_every": 3, "lr": 0.1}
SIZES = (12, 9, 5, 16, 7, 20, 3, 11, 6)
Make = Callable[[nn.Module], ng.NaturalGradient]

RUNS: dict[str, Make] = {
    "kfac": lambda m: ng.KFAC(m, EXACT, **SCHEDULE),
    "kfac_sampled": lambda m: ng.KFAC(m, SAMPLED, generator=torch.Generator().manual_seed(3), **SCHEDULE),
    "kfac_cholesky": lambda m: ng.KFAC(m, EXACT, solver=ng.Cholesky(), **SCHEDULE),
    "kfac_reduce": lambda m: ng.KFAC(m, EXACT, sharing="reduce", **SCHEDULE),
    "kfac_block_fallback": lambda m: ng.KFAC(m, EXACT, fallback=ng.BlockDense(), **SCHEDULE),
    "ekfac": lambda m: ng.EKFAC(m, EXACT, **SCHEDULE),
    "ekfac_sampled": lambda m: ng.EKFAC(m, SAMPLED, generator=torch.Generator().manual_seed(3), **SCHEDULE),
}


class Net(nn.Module):
    """A convolution, a linear layer, and a weight that is used past its module, for the fallback."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.hidden, self.last = nn.Conv1d(1, 2, 2), nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        """[n 3]."""
        h = torch.tanh(self.conv(x.unsqueeze(1))).flatten(1)
        return self.last(torch.tanh(F.linear(h, self.hidden.weight, self.hidden.bias)))


def _net(dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    return seeded(lambda: Net().to(dtype), seed)


def _batch(n: int) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 3, dtype=torch.float64), torch.randint(3, (n,))


def _train(model: nn.Module, opt: ng.NaturalGradient, steps: range, sizes: Sequence[int] = (10,)) -> Tensor:
    dtype = next(model.parameters()).dtype
    for step in steps:
        n = sizes[step % len(sizes)]
        x, t = seeded(partial(_batch, n), 100 + step)
        opt.zero_grad()
        F.cross_entropy(model(x.to(dtype)).float() if dtype == torch.bfloat16 else model(x.to(dtype)), t).backward()
        opt.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _saved(model: nn.Module, opt: ng.NaturalGradient) -> dict[str, Any]:
    """Through a file that holds tensors and numbers only."""
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "opt": opt.state_dict()}, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def _loaded(make: Make, saved: dict[str, Any], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Any]:
    model = _net(dtype, seed=9)
    opt = make(model)
    model.load_state_dict(saved["model"])
    opt.load_state_dict(saved["opt"])
    return model, opt


@pytest.mark.parametrize("at", range(7))
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_goes_on_bit_for_bit_at_every_phase_of_the_schedules(name: str, at: int) -> None:
    """The metric every 2 steps and the inverse every 3: after 6 steps all combinations have been."""
    model = _net()
    opt = RUNS[name](model)
    _train(model, opt, range(at))
    saved = _saved(model, opt)
    expected = _train(model, opt, range(at, at + 7))
    got = _train(*_loaded(RUNS[name], saved), range(at, at + 7))
    assert torch.equal(got, expected)


@pytest.mark.parametrize("at", [1, 2, 3, 4])
@pytest.mark.parametrize("name", RUNS)
def test_a_resumed_run_goes_on_bit_for_bit_where_batches_differ_in_size(name: str, at: int) -> None:
    """A batch counts by its examples over those of the step before, which are in the state with the average."""
    model = _net()
    opt = RUNS[name](model)
    _train(model, opt, range(at), SIZES)
    saved = _saved(model, opt)
    assert saved["opt"]["natgrad"]["mass"][1] in SIZES
    expected = _train(model, opt, range(at, at + 5), SIZES)
    assert torch.equal(_train(*_loaded(RUNS[name], saved), range(at, at + 5), SIZES), expected)


@pytest.mark.parametrize("at", [0, 3])
@pytest.mark.parametrize("name", RUNS)
def test_a_state_of_before_the_average_had_a_mass_is_resumed_as_well(name: str, at: int) -> None:
    """All batches have as many examples: the number of estimates says how much is in the average."""
    model = _net()
    opt = RUNS[name](model)
    _train(model, opt, range(at))
    saved = _saved(model, opt)
    del saved["opt"]["natgrad"]["mass"]
    expected = _train(model, opt, range(at, at + 4))
    torch.testing.assert_close(_train(*_loaded(RUNS[name], saved), range(at, at + 4)), expected)


@pytest.mark.parametrize("name", RUNS)
def test_a_state_can_be_loaded_again_after_steps_have_been_made_with_it(name: str) -> None:
    model = _net()
    opt = RUNS[name](model)
    _train(model, opt, range(3))
    saved = _saved(model, opt)
    runs = []
    for _ in range(2):
        model.load_state_dict(saved["model"])
        opt.load_state_dict(saved["opt"])
        runs.append(_train(model, opt, range(3, 6)).clone())
    assert torch.equal(*runs)


@pytest.mark.parametrize("name", ["kfac", "ekfac"])
def test_a_bfloat16_model_is_resumed_with_factors_in_single_precision(name: str) -> None:
    model = _net(torch.bfloat16)
    opt = RUNS[name](model)
    _train(model, opt, range(4))
    saved = _saved(model, opt)
    held = [*saved["opt"]["natgrad"]["operator"].values(), *saved["opt"]["natgrad"]["inverse"].values()]
    assert {t.dtype for t in held} == {torch.float32}
    assert any(not torch.equal(t, t.bfloat16().float()) for t in held)  # a cast would have lost digits
    other, loaded = _loaded(RUNS[name], saved, torch.bfloat16)
    got, expected = (opt.state_dict()["natgrad"]["operator"] for opt in (loaded, opt))
    assert all(torch.equal(got[key], t) for key, t in expected.items())
    assert torch.equal(_train(other, loaded, range(4, 9)), _train(model, opt, range(4, 9)))


@pytest.mark.parametrize("at", [1, 2, 4])
@pytest.mark.parametrize("name", ["kfac", "ekfac", "kfac_block_fallback"])
def test_a_run_goes_on_in_another_precision_and_comes_back(name: str, at: int) -> None:
    """float32 to float64 and back: the metric has the precision of the model that it is loaded into."""
    model = _net(torch.float32)
    opt = RUNS[name](model)
    _train(model, opt, range(at))
    saved = _saved(model, opt)
    expected = _train(model, opt, range(at, at + 5))
    wide, wide_opt = _loaded(RUNS[name], saved, torch.float64)
    assert {t.dtype for t in wide_opt.state_dict()["natgrad"]["operator"].values()} == {torch.float64}
    back = _saved(wide, wide_opt)
    got = _train(wide, wide_opt, range(at, at + 5))
    torch.testing.assert_close(got.float(), expected, rtol=1e-3, atol=1e-4)
    narrow, narrow_opt = _loaded(RUNS[name], back, torch.float32)
    assert torch.equal(_train(narrow, narrow_opt, range(at, at + 5)), expected)  # nothing was lost on the way


class Named(Rule):
    """A rule of the user's, which does what the library's does."""

    def covers(self, module: nn.Module) -> bool:
        """As the library's."""
        return LinearRule().covers(module)

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        """As the library's."""
        return LinearRule().shape(module, keys)

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        """As the library's."""
        return LinearRule().inputs(module, keys, call)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        """As the library's."""
        return LinearRule().cotangents(module, keys, g)

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        """As the library's."""
        return LinearRule().pack(module, block)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        """As the library's."""
        return LinearRule().unpack(module, keys, packed)


def _linear(out: int = 2) -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, out))


OTHERS: dict[str, tuple[Callable[[], ng.NaturalGradient], str]] = {
    "structure": (
        lambda: ng.EKFAC(_linear(), EXACT),
        r"its structure is EigenKronecker\(.*\), here it is Kronecker\(",
    ),
    "sharing": (
        lambda: ng.KFAC(_linear(), EXACT, sharing="reduce"),
        r"its structure is Kronecker\(sharing='reduce'.*, here it is Kronecker\(sharing='expand'",
    ),
    "fallback": (
        lambda: ng.KFAC(_linear(), EXACT, fallback=ng.BlockDense()),
        r"fallback=BlockDense\(\).*, here it is .*fallback=Diagonal\(\)",
    ),
    "shape": (
        lambda: ng.KFAC(_linear(3), EXACT),
        r"of its parameters, 2.weight is \[3, 4\] and here \[2, 4\], 2.bias is \[3\] and here \[2\]\. Nothing",
    ),
    "name": (
        lambda: ng.KFAC(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), EXACT),
        r"of its parameters, 1.weight is \[2, 4\] and here not there, .*2.weight is not there and here \[2, 4\]",
    ),
    "rules": (
        lambda: ng.KFAC(_linear(), EXACT, rules=[Named()]),
        r"of its layers, 0.weight \+ 0.bias is Named and here LinearRule",
    ),
    "order": (
        lambda: ng.KFAC(_Reversed(), EXACT),
        "its parameters are in the order 2.weight, 2.bias, 0.weight, 0.bias, here it is 0.weight, 0.bias, 2.weight",
    ),
}


class _Reversed(nn.Module):
    """The same parameters in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.add_module("2", nn.Linear(4, 2))
        self.add_module("0", nn.Linear(3, 4))


@pytest.mark.parametrize("name", OTHERS)
def test_the_state_of_another_optimizer_is_refused_and_nothing_is_loaded(name: str) -> None:
    make, match = OTHERS[name]
    model = _linear()
    opt = ng.KFAC(model, EXACT, metric_every=1)
    x = torch.randn(6, 3)
    for _ in range(2):
        opt.zero_grad()
        model(x).square().mean().backward()
        opt.step()
    before = _saved(model, opt)["opt"]
    with pytest.raises(ValueError, match=f"this is the state of another optimizer: .*{match}"):
        opt.load_state_dict(make().state_dict())
    after = opt.state_dict()
    assert str(before["param_groups"]) == str(after["param_groups"])
    for part in ("operator", "inverse"):
        assert all(torch.equal(t, before["natgrad"][part][key]) for key, t in after["natgrad"][part].items())
    assert (after["natgrad"]["step"], after["natgrad"]["count"]) == (2, 2)
