"""Parameters of several dtypes: an optimizer whose metric is that of the gradients steps each in its own."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng

Make = Callable[[nn.Module], Any]
MAKES: dict[str, Make] = {
    "natural": lambda m: ng.Natural(m, lr=0.25, weight_decay=0.1),
    "muon": lambda m: ng.Muon(m, lr=0.25),
    "shampoo": lambda m: ng.Shampoo(m, lr=0.25),
    "soap": lambda m: ng.SOAP(m, lr=0.25),
    "adam": lambda m: ng.NaturalGradient(
        m, ng.BatchGradient(), structure=ng.Refresh(ng.Diagonal(power=0.5), decay=0.9), lr=0.25, damping=1e-8
    ),
    "kronecker": lambda m: ng.NaturalGradient(
        m, ng.BatchGradient(), structure=ng.Refresh(ng.Kronecker(power=0.25), decay=0.9), lr=0.25, damping=1e-3
    ),
    "dense": lambda m: ng.NaturalGradient(
        m, ng.BatchGradient(), structure=ng.Refresh(ng.Dense(), decay=0.9), lr=0.25, damping=0.1
    ),
}


class Mixed(nn.Module):
    """A body, a router and a head, of which body and head have equal shapes."""

    def __init__(self, narrow: torch.dtype, wide: torch.dtype) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).to(narrow)
        self.router, self.head = nn.Linear(4, 2).to(wide), nn.Linear(4, 4).to(wide)
        self.scale = nn.Parameter(torch.ones(4, dtype=wide))

    def forward(self, x: Tensor) -> Tensor:
        """[n 4]."""
        z = torch.tanh(self.body(x.to(self.get_parameter("body.0.weight").dtype))).to(self.scale.dtype)
        return self.head(z * self.scale) * self.router(z).softmax(1)[:, :1]


DTYPES = [(torch.bfloat16, torch.float32), (torch.float32, torch.float64), (torch.bfloat16, torch.float64)]


@pytest.mark.parametrize(("narrow", "wide"), DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in MAKES if name != "dense"])
def test_every_parameter_steps_as_in_a_model_of_its_dtype(name: str, narrow: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    mixed = Mixed(narrow, wide)
    pure = {dtype: copy.deepcopy(mixed).to(dtype) for dtype in (narrow, wide)}
    models = [mixed, *pure.values()]
    opts = [MAKES[name](model) for model in models]
    for seed in range(3):
        for model in models:
            generator = torch.Generator().manual_seed(seed)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
        for opt in opts:
            opt.step()
    for key, p in mixed.named_parameters():
        assert p.dtype in (narrow, wide)
        # Beside a wider parameter, the metric of a narrow one is kept in the wider dtype.
        gap = 1e-4 if (p.dtype, wide) == (torch.float32, torch.float64) else 16 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p, pure[p.dtype].get_parameter(key), rtol=gap, atol=gap)


@pytest.mark.parametrize(("narrow", "wide"), DTYPES, ids=str)
def test_a_metric_over_all_parameters_is_in_the_widest_dtype(narrow: torch.dtype, wide: torch.dtype) -> None:
    torch.manual_seed(0)
    model = Mixed(narrow, wide)
    twin = copy.deepcopy(model).to(wide)
    mine, its = MAKES["dense"](model), MAKES["dense"](twin)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        p.grad = torch.randn(p.shape).bfloat16().to(p.dtype)
        q.grad = p.grad.to(wide)
    mine.step()
    its.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        gap = 2 * torch.finfo(p.dtype).eps
        torch.testing.assert_close(p.to(wide), q, rtol=gap, atol=gap)


@pytest.mark.parametrize("name", MAKES)
def test_a_mixed_model_trains_and_resumes_bit_for_bit(name: str) -> None:
    def train(model: nn.Module, opt: Any, seeds: range) -> list[float]:
        losses = []
        for seed in seeds:
            x = torch.randn(16, 4, generator=torch.Generator().manual_seed(seed))
            opt.zero_grad()
            loss = (model(x) - x.sin()).square().mean()
            loss.backward()
            opt.step()
            losses.append(float(loss.detach()))
        return losses

    torch.manual_seed(0)
    model = Mixed(torch.bfloat16, torch.float32)
    opt = MAKES[name](model)
    train(model, opt, range(3))
    other = Mixed(torch.bfloat16, torch.float32)
    again = MAKES[name](other)
    other.load_state_dict(model.state_dict())
    again.load_state_dict(copy.deepcopy(opt.state_dict()))
    assert train(model, opt, range(3, 6)) == train(other, again, range(3, 6))


REFUSED: dict[str, Callable[[nn.Module], Any]] = {
    "kfac": lambda m: ng.KFAC(m, nn.MSELoss()),
    "natural": lambda m: ng.Natural(m, nn.MSELoss(), lr=0.01),
    "pullback": lambda m: ng.pullback(m, torch.randn(3, 4), ng.Euclidean()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_metric_on_outputs_needs_one_dtype_and_says_which_optimizers_do_not(name: str) -> None:
    with pytest.raises(ValueError, match=r"mixes dtypes: .*torch.autocast, or take .*Natural, Muon, SOAP, Shampoo"):
        REFUSED[name](Mixed(torch.bfloat16, torch.float32))
