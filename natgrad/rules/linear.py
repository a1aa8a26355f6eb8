"""The rules of layers that multiply by a weight: linear layers, embeddings, convolutions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from natgrad.accelerate.patches import Axis
from natgrad.rules.base import Call, Keys, Rule, plain
from natgrad.rules.features import DenseFeatures, Features, OneHot, Patches, Rows


@final
class LinearRule(Rule):
    """The layer rule of ``nn.Linear``.

    Method:
        z = W̄ ā with W̄ = [W b] and ā = (a, 1): the gradient of example n is Σ_r g āᵀ (Martens and Grosse 2015).

        Shapes: input [n *r in] gives a [n r 1 i], output cotangents [k n *r out] give g [k n r 1 o].

        Called with a ``Jet``, the layer sees value, derivatives and Laplacian as positions. The bias is added to the
        value alone: the homogeneous coordinate, 1 there and 0 elsewhere, is the second argument of the call.
    """

    capturable = True
    takes_jets = True

    def covers(self, module: nn.Module) -> bool:
        return plain(module, nn.Linear, "weight", "bias")

    def leading(self, module: nn.Module, shape: Sequence[int]) -> int:
        return len(shape) - 1

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return True

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        x = positions_in_one_axis(call.x if call.x.ndim > 1 else call.x.unsqueeze(0), 0)
        x, homogeneous = x if "weight" in keys else x[..., :0], call.argument(1, "homogeneous")
        if homogeneous is None or "bias" not in keys:
            return Rows(x, "bias" in keys)
        return Rows(torch.cat([x, positions_in_one_axis(homogeneous, 0)], -1))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Rows:
        return Rows(positions_in_one_axis(g if g.ndim > 2 else g.unsqueeze(1), 1))


def positions_in_one_axis(x: Tensor, examples: int) -> Tensor:
    """[*k n r d] of x [*k n *r d]; ``examples`` is the index of the axis n. A view if possible."""
    if x.ndim == examples + 3:
        return x
    return x.unsqueeze(examples + 1) if x.ndim == examples + 2 else x.flatten(examples + 1, -2)


# Embeddings: a linear layer W [d V] without bias whose inputs are one-hot vectors of the vocabulary.


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
    """The layer rule of ``nn.Embedding``.

    Method:
        z = W a with a one-hot: the gradient of example n is Σ_r g aᵀ, whose column v sums g over the places of v.

        Shapes: indices [n *r] give a [n r 1 V], output cotangents [k n *r d] give g [k n r 1 d]. Σ a aᵀ is diagonal,
        the counts [1 V]. Positions that hold ``padding_idx`` have no gradient: their a is zero, and they are not
        counted.
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
        values = _counted(layer, index)
        return OneHot(index, layer.num_embeddings, values, masked=layer.padding_idx is not None)


@final
class EmbeddingBagRule(LookupRule):
    """The layer rule of ``nn.EmbeddingBag``.

    Method:
        z = W a with a ∈ ℝ^V the number of times that the bag of example n has every word, or its mean.

        Shapes: indices [n b], or [m] with offsets [n], give a [n 1 1 V]; output cotangents [k n d] give g [k n 1 1 d].
    """

    def covers(self, module: nn.Module) -> bool:
        if not plain(module, nn.EmbeddingBag, "weight"):
            return False
        layer = cast(nn.EmbeddingBag, module)
        return _constant(layer) and layer.mode in ("sum", "mean")

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Rows:
        layer = cast(nn.EmbeddingBag, module)
        index, offsets = call.argument(0, "input"), call.argument(1, "offsets")
        weights = call.argument(2, "per_sample_weights")
        bag, bags = _membership(layer, index, offsets)
        words = index.long().reshape(-1)
        ones = _counted(layer, words)
        counts = ones if weights is None else ones * weights.detach().reshape(-1).to(ones.dtype)
        a = ones.new_zeros(bags, layer.num_embeddings).index_put_((bag, words), counts, accumulate=True)
        if layer.mode == "mean":
            a = a / a.sum(1, keepdim=True).clamp(min=1)  # an empty bag has output zero
        return Rows(a.unsqueeze(1))


def _constant(layer: nn.Embedding | nn.EmbeddingBag) -> bool:
    return layer.max_norm is None and not layer.scale_grad_by_freq


def _counted(layer: nn.Embedding | nn.EmbeddingBag, index: Tensor) -> Tensor:
    """One at every index, zero at the padding; in single precision at least, as half counts to 2¹¹ only."""
    dtype = torch.promote_types(layer.weight.dtype, torch.float32)
    if layer.padding_idx is None:
        return torch.ones_like(index, dtype=dtype)
    return (index != layer.padding_idx).to(dtype)


def _membership(layer: nn.EmbeddingBag, index: Tensor, offsets: Tensor | None) -> tuple[Tensor, int]:
    """The bag of every index, and the number of bags."""
    if offsets is None:
        n, size = index.shape
        return torch.arange(n, device=index.device).repeat_interleave(size), n
    starts = offsets[:-1] if layer.include_last_offset else offsets
    positions = torch.arange(index.numel(), device=index.device, dtype=starts.dtype)
    return torch.searchsorted(starts, positions, right=True) - 1, starts.numel()


# Convolutions in one, two and three dimensions.


_Conv: TypeAlias = nn.Conv1d | nn.Conv2d | nn.Conv3d
_CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


@final
class ConvRule(Rule):
    """The layer rule of convolutions.

    Method:
        z_r = W̄ ā_r with ā_r the patch that output position r reads, and a 1: Σ_r g āᵀ (Grosse and Martens 2016).

        Any stride, padding, dilation and groups. Zero padding is part of the patches, and so of A. Groups are
        independent layers c.

        Shapes: input [n ch *spatial] gives a [n r c i], output cotangents [k n (c o) *spatial] give g [k n r c o].
    """

    capturable = True
    pixels = True

    def covers(self, module: nn.Module) -> bool:
        return any(plain(module, kind, "weight", "bias") for kind in _CONVS)

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        # None for one example without a batch axis: its first axis is that of the channels.
        return 0 if call.argument(0, "input").ndim == cast(_Conv, module).weight.ndim else None

    def paddable(self, module: nn.Module, keys: Keys) -> bool:
        return "weight" in keys

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        layer = cast(_Conv, module)
        patches = Patches(*_padded(layer, call.x), layer.groups, "bias" in keys)
        if "weight" in keys:
            return patches
        return DenseFeatures(patches.x.new_ones(()).expand(*patches.shape[:3], 1))

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Patches:
        layer = cast(_Conv, module)
        g = g if g.ndim == layer.weight.ndim + 1 else g.unsqueeze(1)  # one example without a batch axis
        return Patches(g, (Axis(1),) * len(layer.kernel_size), layer.groups)

    def groups_of(self, module: nn.Module, keys: Keys) -> int:
        return cast(_Conv, module).groups


def padding(layer: _Conv) -> list[int]:
    """The numbers of zeros before and after the last axis, then the axis before it, …, as ``F.pad`` takes them.

    >>> padding(nn.Conv2d(1, 1, (3, 4), padding="same"))
    [1, 2, 1, 1]
    """
    if layer.padding == "valid":
        around = [(0, 0) for _ in layer.kernel_size]
    elif layer.padding == "same":
        total = [d * (k - 1) for d, k in zip(layer.dilation, layer.kernel_size, strict=True)]
        around = [(n // 2, n - n // 2) for n in total]
    else:
        around = [(int(n), int(n)) for n in layer.padding]
    return [n for pair in reversed(around) for n in pair]


def _padded(layer: _Conv, x: Tensor) -> tuple[Tensor, tuple[Axis, ...]]:
    """The input, padded where that is not with zeros, and how the axes are read."""
    x = x if x.ndim == layer.weight.ndim else x.unsqueeze(0)
    given = padding(layer)
    pairs = [(given[at], given[at + 1]) for at in range(len(given) - 2, -1, -2)]
    if layer.padding_mode != "zeros":
        x = F.pad(x, given, mode=layer.padding_mode)
        pairs = [(0, 0)] * len(pairs)
    sizes = zip(layer.kernel_size, layer.stride, layer.dilation, pairs, strict=True)
    return x, tuple(Axis(k, s, d, before, after) for k, s, d, (before, after) in sizes)
