"""The rules of embeddings: a linear layer W [d V] without bias whose inputs are one-hot vectors of the vocabulary."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast, final

import torch
from torch import Tensor, nn

from natgrad.rules.base import Call, Keys, Rule, plain
from natgrad.rules.features import OneHot, Rows


class LookupRule(Rule):
    """z = W a with W [1 d V], the transpose of the table, and a ∈ ℝ^V."""

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        v, d = cast(Tensor, module.weight).shape
        return 1, d, v

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(g.reshape(*g.shape[:2], -1, g.shape[-1]))

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return block["weight"].T.unsqueeze(0)

    def unpack(self, module: nn.Module, keys: Keys, packed: Tensor) -> dict[str, Tensor]:
        return {"weight": packed.squeeze(-3).mT}


@final
class EmbeddingRule(LookupRule):
    """z = W a with a one-hot: the gradient of example n is Σ_r g aᵀ, whose column v sums g over the places of v.

    Shapes: indices [n *r] give a [n r 1 V], output cotangents [k n *r d] give g [k n r 1 d]. Σ a aᵀ is diagonal, the
    counts [1 V]. Positions that hold ``padding_idx`` have no gradient: their a is zero, and they are not counted.
    """

    one_hot = True
    capturable = True

    def covers(self, module: nn.Module) -> bool:
        # With max_norm the forward pass changes the table; gradients scaled by frequency are those of no function.
        return plain(module, nn.Embedding, "weight") and _constant(cast(nn.Embedding, module))

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> OneHot:
        layer, index = cast(nn.Embedding, module), call.x.long().reshape(call.x.shape[0], -1)
        values = _counted(layer, index, _number_type(layer))
        return OneHot(index, layer.num_embeddings, values, masked=layer.padding_idx is not None)


@final
class EmbeddingBagRule(LookupRule):
    """z = W a with a ∈ ℝ^V the number of times that the bag of example n has every word, or its mean.

    Shapes: indices [n b], or [m] with offsets [n], give a [n 1 1 V]; output cotangents [k n d] give g [k n 1 1 d].
    """

    def covers(self, module: nn.Module) -> bool:
        if not plain(module, nn.EmbeddingBag, "weight"):
            return False
        layer = cast(nn.EmbeddingBag, module)
        return _constant(layer) and layer.mode in ("sum", "mean")

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        layer = cast(nn.EmbeddingBag, module)
        index, offsets, weights = _bags(*call.args, **call.kwargs)
        bag, bags = _membership(layer, index, offsets)
        words = index.long().reshape(-1)
        ones = _counted(layer, words, _number_type(layer))
        counts = ones if weights is None else ones * weights.detach().reshape(-1).to(ones.dtype)
        a = ones.new_zeros(bags, layer.num_embeddings).index_put_((bag, words), counts, accumulate=True)
        if layer.mode == "mean":
            a = a / a.sum(1, keepdim=True).clamp(min=1)  # an empty bag has output zero
        return Rows(a.unsqueeze(1))


def _constant(layer: nn.Embedding | nn.EmbeddingBag) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq


def _number_type(layer: nn.Embedding | nn.EmbeddingBag) -> torch.dtype:
    """Counts go in single precision at least, as half stops at 2¹¹."""
    return torch.promote_types(layer.weight.dtype, torch.float32)


def _counted(layer: nn.Embedding | nn.EmbeddingBag, index: Tensor, dtype: torch.dtype) -> Tensor:
    """One at every index, zero at the padding."""
    if layer.padding_idx is None:
        return torch.ones_like(index, dtype=dtype)
    return (index != layer.padding_idx).to(dtype)


def _bags(
    input: Tensor, offsets: Tensor | None = None, per_sample_weights: Tensor | None = None, **_: Any
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The arguments of ``nn.EmbeddingBag``, by position or by name."""
    return input, offsets, per_sample_weights


def _membership(layer: nn.EmbeddingBag, index: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The bag of every index, and the number of bags."""
    if offsets is None:
        n, size = index.shape
        return torch.arange(n, device=index.device).repeat_interleave(size), n
    starts = offsets[:-1] if layer.include_last_offset else offsets
    positions = torch.arange(index.numel(), device=index.device, dtype=starts.dtype)
    return torch.searchsorted(starts, positions, right=True) - 1, starts.numel()
