"""Transformers are made of layers with rules: attention, Linear, normalisation. In evaluation mode, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import natgrad as ng
from natgrad.model import Arguments, Model
from tests.pulled import check_rows, close
from tests.zoo import Case, Problem


class Transform(nn.Module):
    """A part of a transformer on x [n l 4], with a memory for a decoder."""

    def __init__(self, part: nn.Module, decodes: bool = False) -> None:
        super().__init__()
        self.part, self.decodes = part, decodes

    def forward(self, x: Tensor) -> Tensor:
        return self.part(x, 0.5 * x[:, :2]) if self.decodes else self.part(x)


_OPTIONS: dict[str, Any] = {"dim_feedforward": 3, "dropout": 0.0, "batch_first": True}


def _encoder(**options: Any) -> nn.Module:
    return nn.TransformerEncoderLayer(4, 2, **{**_OPTIONS, **options})


def _decoder(**options: Any) -> nn.Module:
    return nn.TransformerDecoderLayer(4, 2, **{**_OPTIONS, **options})


PARTS: dict[str, Callable[[], nn.Module]] = {
    "encoder": lambda: Transform(_encoder()),
    "encoder_norm_first": lambda: Transform(_encoder(norm_first=True)),
    "encoder_evaluated": lambda: Transform(_encoder(dropout=0.1)).eval(),
    "encoder_norm_first_evaluated": lambda: Transform(_encoder(norm_first=True, dropout=0.1)).eval(),
    "encoder_no_bias": lambda: Transform(_encoder(bias=False)),
    "decoder": lambda: Transform(_decoder(), True),
    "decoder_norm_first": lambda: Transform(_decoder(norm_first=True), True),
    "encoder_of_two": lambda: Transform(nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **_OPTIONS), 2)).eval(),
    "transformer": lambda: Transform(nn.Transformer(4, 2, 1, 1, **_OPTIONS), True),
}


@pytest.mark.parametrize("name", PARTS)
def test_transformers_are_covered_whole(name: str) -> None:
    """In evaluation mode, too, where the fused kernel of inference would call none of the parts."""
    problem = Case(name, lambda: Problem(PARTS[name](), torch.randn(2, 3, 4, dtype=torch.float64))).make()
    check_rows(problem, k=2)


def test_attention_in_training_mode_with_dropout_is_covered() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(4, 2, 3, dropout=0.3, batch_first=True)
    optimizer = ng.NaturalGradient(model, ng.Euclidean(), structure=ng.Kronecker(strict=True), damping=0.1, lr=0.1)
    before = [p.detach().clone() for p in model.parameters()]
    model(torch.randn(8, 3, 4)).square().mean().backward()
    optimizer.step()
    assert all(not torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_outputs_do_not_depend_on_whether_gradients_are_taken() -> None:
    """Without gradients torch would take a fused encoder, which leaves padded positions out: zeros."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, **_OPTIONS), 1).double().eval()
    x, padded = torch.randn(3, 2, 4, dtype=torch.float64), torch.tensor([[False, True], [False, False], [False, True]])
    model = Model.of(encoder)
    inputs = Arguments((x,), {"src_key_padding_mask": padded})
    with torch.no_grad():
        fast = model(None, inputs)
    close(fast, model(None, inputs).detach())
    assert torch.backends.mha.get_fastpath_enabled()
