"""The rule of ``nn.MultiheadAttention``: the call is replayed with plain products and softmax."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from natgrad.accelerate.moments import single
from natgrad.rules.base import (
    Call,
    GraphReplay,
    Keys,
    Replayed,
    detached_parameter,
    matrices,
    matrices_shape,
    pack_matrices,
    plain,
    trainable,
    weight_and_bias,
)
from natgrad.rules.features import DenseFeatures

_IN, _OUT = ("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")
_SPLIT = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@final
class AttentionRule(Replayed):
    """y = W̄_o ō, o = softmax(q kᵀ/√d + mask) v in every head, with (q, k, v) = W̄ (query, key, value).

    The three projections are groups, W̄ [3 o i] on a [n r 3 i]. In self-attention they have the same input. Elsewhere
    the shorter sequences are padded, and the padding is masked. Keys that ``key_padding_mask`` leaves out have no
    cotangents, and are masked too. If keys or values have another width, there are three layers W_q, W_k, W_v [1 o i]
    and one for their biases [3 o 1]. The last layer is W̄_o on the outputs of the heads; the module never calls the
    forward of ``out_proj``. ``bias_k`` and ``bias_v`` are left to the structure's fallback. A sequence without a batch
    is one example. All masks and options of the module are covered, and so is the gradient of the attention weights.

    The dropout mask of a fused call is not known. With dropout in training mode the replay therefore uses the attention
    weights before dropout, which are its mean: the inputs of ``out_proj``, and cotangents inside the module, are those
    of mean attention. Cotangents that pass through the module have seen the mask. In evaluation mode, and with
    dropout=0, everything is exact.

    >>> AttentionRule().layers(nn.MultiheadAttention(4, 2))
    (('in_proj_weight', 'in_proj_bias'), ('out_proj.weight', 'out_proj.bias'))
    """

    def covers(self, module: nn.Module) -> bool:
        if not plain(module, nn.MultiheadAttention, *_IN, *_SPLIT, "bias_k", "bias_v"):
            return False
        out = cast(nn.MultiheadAttention, module).out_proj
        return plain(out, type(out), "weight", "bias") and type(out) in (NonDynamicallyQuantizableLinear, nn.Linear)

    def parameters(self, module: nn.Module) -> dict[str, Tensor]:
        out = trainable(cast(nn.MultiheadAttention, module).out_proj)
        named = trainable(module) | {f"out_proj.{name}": p for name, p in out.items()}
        return {name: p for name, p in named.items() if name not in ("bias_k", "bias_v")}

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        names = self.parameters(module)
        layers = (tuple(n for n in layer if n in names) for layer in (_IN, *((name,) for name in _SPLIT), _OUT))
        return tuple(keys for keys in layers if keys)

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        if call.argument(0, "query").ndim == 2:
            return None
        return 0 if cast(nn.MultiheadAttention, module).batch_first else 1

    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        query, key = call.argument(0, "query"), call.argument(1, "key")
        at = 1 if cast(nn.MultiheadAttention, module).batch_first and query.ndim == 3 else 0
        queries, others = int(query.shape[at]), int(key.shape[at])
        if keys[0] in _IN:
            return 3 * max(queries, others)
        return others if keys[0] in _SPLIT[1:] else queries

    def shape(self, module: nn.Module, keys: Keys) -> tuple[int, int, int]:
        return matrices_shape(module, keys, _groups(keys))

    def pack(self, module: nn.Module, block: Mapping[str, Tensor]) -> Tensor:
        return pack_matrices(block, _groups(tuple(block)))

    def columns(self, module: nn.Module, block: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return matrices(block, _groups(tuple(block)))

    def replay(self, module: nn.Module, call: Call) -> GraphReplay:
        attention = _Attention.of(cast(nn.MultiheadAttention, module), call)
        z, tokens = attention.projected()
        mixed, weights = attention.mixed(*(projection.squeeze(2) for projection in tokens))
        weight, bias = (detached_parameter(module, key) for key in _OUT)
        assert weight is not None
        out = F.linear(mixed.unsqueeze(2), weight, bias)  # [n l 1 e]
        y = out.squeeze(2) if attention.batched else out[0, :, 0]
        if attention.batched and not attention.module.batch_first:
            y = y.transpose(0, 1)
        outputs = dict.fromkeys(_IN, z) | dict(zip(_SPLIT, tokens, strict=True)) | dict.fromkeys(_OUT, out)
        layers = attention.inputs() | weight_and_bias(_OUT, mixed.unsqueeze(2))
        return GraphReplay((y,) if weights is None else (y, weights), layers, {key: outputs[key] for key in layers})


@final
@dataclass(frozen=True)
class _Attention:
    """One call: query [n l e], key [n s ·] and value [n s ·], and its options."""

    module: nn.MultiheadAttention
    call: Call
    tokens: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def of(module: nn.MultiheadAttention, call: Call) -> _Attention:
        given = [single(call.argument(at, name)) for at, name in enumerate(("query", "key", "value"))]
        if given[0].ndim == 2:
            given = [t.unsqueeze(0) for t in given]
        elif not module.batch_first:
            given = [t.transpose(0, 1) for t in given]
        return _Attention(module, call, (given[0], given[1], given[2]))

    @property
    def batched(self) -> bool:
        return bool(self.call.argument(0, "query").ndim == 3)

    @property
    def rows(self) -> int:
        """The longer of the two lengths."""
        return max(t.shape[1] for t in self.tokens)

    def projected(self) -> tuple[Tensor, list[Tensor]]:
        """The projections z [n r 3 e], and of them q [n l 1 e], k and v [n s 1 e]."""
        projections = [F.linear(t, w) for t, w in zip(self.tokens, self._weights(), strict=True)]
        z = torch.stack([_longer(projection, self.rows) for projection in projections], dim=2)
        bias = detached_parameter(self.module, "in_proj_bias")
        # Below there is nothing to differentiate: the arguments are constants.
        z = (z if bias is None else z + bias.view(3, -1)).requires_grad_()
        return z, [z[:, : t.shape[1], at : at + 1] for at, t in enumerate(self.tokens)]

    def inputs(self) -> dict[str, DenseFeatures]:
        """The inputs of the three projections."""
        valid = self._valid()
        if detached_parameter(self.module, "in_proj_weight") is not None:
            return weight_and_bias(_IN, self._stacked(valid), valid)
        query = self.tokens[0]
        ones = query.new_ones(query.shape[0], self.rows, 3, 1) if valid is None else valid.unsqueeze(-1)
        inputs = weight_and_bias(_IN[1:], ones, valid)
        for at, (key, t) in enumerate(zip(_SPLIT, self.tokens, strict=True)):
            mask = None if valid is None else valid[:, : t.shape[1], at : at + 1]
            inputs |= weight_and_bias(
                (key,), t.unsqueeze(2) if mask is None else t.unsqueeze(2) * mask[..., None], mask
            )
        return inputs

    def mixed(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor | None]:
        """The outputs of all heads [n l e], and the attention weights as the module returns them."""
        length, e = q.shape[1:]
        k, v = (self._extended(t, name) for t, name in ((k, "bias_k"), (v, "bias_v")))
        heads = self.module.num_heads
        q, k, v = (t.unflatten(-1, (heads, e // heads)).transpose(1, 2) for t in (q, k, v))  # [n h l d]
        scores = (q / math.sqrt(e // heads)) @ k.transpose(-1, -2)
        mask = self._mask(length, k.shape[2], scores)
        if mask is None:
            weights = scores.softmax(-1)
        else:
            # A query that sees no key has output zero; the softmax would be NaN.
            blind = (mask == -math.inf).all(-1, keepdim=True)
            weights = (scores + mask.masked_fill(blind, 0.0)).softmax(-1).masked_fill(blind, 0.0)
        mixed = (weights @ v).transpose(1, 2).flatten(2)
        if not self.call.argument(4, "need_weights", True):
            return mixed, None
        returned = weights.mean(1) if self.call.argument(6, "average_attn_weights", True) else weights
        return mixed, returned if self.batched else returned.squeeze(0)

    def _weights(self) -> list[Tensor]:
        """W_q, W_k, W_v."""
        whole = detached_parameter(self.module, "in_proj_weight")
        if whole is not None:
            return list(whole.chunk(3))
        return [w for w in (detached_parameter(self.module, key) for key in _SPLIT) if w is not None]

    def _valid(self) -> Tensor | None:
        """[n r 3], zero where a shorter sequence is padded and where a key is left out."""
        padding, sizes = self._padding(), [t.shape[1] for t in self.tokens]
        if padding is None and len(set(sizes)) == 1:
            return None
        query = self.tokens[0]
        valid = query.new_zeros(query.shape[0], self.rows, 3)
        for at, size in enumerate(sizes):
            valid[:, :size, at] = 1
        if padding is not None:
            valid[:, : sizes[1], 1:] *= (padding != -math.inf).to(valid.dtype).unsqueeze(-1)
        return valid

    def _stacked(self, valid: Tensor | None) -> Tensor:
        """a [n r 3 i], zero where it is masked."""
        given = [self.call.argument(at, name) for at, name in enumerate(("query", "key", "value"))]
        if valid is None and _same(given[0], given[1]) and _same(given[0], given[2]):
            return self.tokens[0].unsqueeze(2).expand(-1, -1, 3, -1)
        a = torch.stack([_longer(t, self.rows) for t in self.tokens], dim=2)
        return a if valid is None else a * valid.unsqueeze(-1)

    def _extended(self, t: Tensor, name: str) -> Tensor:
        """Keys or values [n s e] with the learned one and with the zero that the module adds."""
        learned = detached_parameter(self.module, name)
        more = [] if learned is None else [learned.expand(t.shape[0], -1, -1)]
        if self.module.add_zero_attn:
            more.append(t.new_zeros(t.shape[0], 1, t.shape[2]))
        return torch.cat([t, *more], dim=1) if more else t

    def _padding(self) -> Tensor | None:
        """The key_padding_mask [n s] as a term of the scores."""
        given = self.call.argument(3, "key_padding_mask")
        return None if given is None else _added(given, self.tokens[0]).reshape(self.tokens[1].shape[:2])

    def _mask(self, queries: int, keys: int, like: Tensor) -> Tensor | None:
        """The term of the scores, which broadcasts to [n h l s]; every query sees the keys that the module adds."""
        padding, given = self._padding(), self.call.argument(5, "attn_mask")
        if (
            self.call.argument(7, "is_causal", False)
            and padding is None
            and not self.call.argument(4, "need_weights", True)
        ):
            # With is_causal the fused kernel ignores the mask.
            return like.new_full((queries, keys), -math.inf).triu(1)
        terms = []
        if given is not None:
            mask = _added(given, like)
            terms.append(mask if mask.ndim == 2 else mask.unflatten(0, (-1, self.module.num_heads)))
        if padding is not None:
            terms.append(padding[:, None, None])
        padded = [F.pad(term, (0, keys - term.shape[-1])) for term in terms]
        return functools.reduce(torch.add, padded) if padded else None


def _groups(keys: Keys) -> int:
    return 3 if keys[0] in _IN else 1


def _longer(t: Tensor, rows: int) -> Tensor:
    """[n s e], padded with zeros to [n rows e]."""
    return F.pad(t, (0, 0, 0, rows - t.shape[1]))


def _added(mask: Tensor, like: Tensor) -> Tensor:
    """A mask as a term: −∞ where a boolean one is true."""
    if mask.dtype == torch.bool:
        return like.new_zeros(mask.shape).masked_fill(mask, -math.inf)
    return mask.to(like.dtype)


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors share their memory; each was detached separately."""
    return one.data_ptr() == other.data_ptr() and one.shape == other.shape and one.stride() == other.stride()
