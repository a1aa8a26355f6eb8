"""Modules that hide their layers, attention and fused recurrences: their forward is run again, layer by layer."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, cast, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.nn.utils.rnn import PackedSequence, pad_packed_sequence

from natgrad.accelerate.autograd import vjp
from natgrad.accelerate.modules import parameters_in
from natgrad.accelerate.moments import single
from natgrad.rules.base import Call, Keys, Rule, plain, trainable
from natgrad.rules.features import DenseFeatures, Features
from natgrad.show import brief


class Replayed(Rule):
    """The base class of rules for modules that hide their layers, such as fused recurrences.

    The layers are seen when the module's forward is run again: the cotangents of its outputs are taken through that
    replay.
    """

    @abstractmethod
    def replay(self, module: nn.Module, call: Call) -> Replay:
        """The forward pass again, in terms of the layers. Gradients are enabled, the arguments detached."""

    @abstractmethod
    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        """How many r·c of one example share the weight, without running anything."""

    def inputs(self, module: nn.Module, keys: Keys, call: Call) -> Features:
        with torch.no_grad():
            return self.replay(module, call).layer(keys)

    def cotangents(self, module: nn.Module, keys: Keys, g: Tensor) -> Features:
        raise TypeError(f"the cotangents of {type(module).__name__} are those of its replay")


def replaying(kinds: Iterable[type[Rule]]) -> frozenset[type[Rule]]:
    """The types among these that are ``Replayed``. For every layer, ``isinstance`` of an abstract class is slow."""
    return frozenset(kind for kind in set(kinds) if issubclass(kind, Replayed))


@final
@dataclass(frozen=True)
class Replay:
    """What a module computed when it was run again, layer by layer, with a graph.

    Args:
        outputs: Its outputs, tensor by tensor as ``tensors_of`` lists them.
        layers: The inputs of its parameters by name; those of a bias are ones.
        z: What the layer of a parameter computed [n r c o]; the parameters of one layer have the same tensor. What only
            has to be seen in the graph may be a leaf.
    """

    outputs: tuple[Tensor, ...]
    layers: Mapping[str, DenseFeatures]
    z: Mapping[str, Tensor]

    __repr__ = brief

    def pull(self, g: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """Cotangents [k n r c o] of every layer from those of the outputs [k *output], by the names of the parameters.

        Parameters of one layer have the same tensor. The cotangents of an output that has none are zeros.
        """
        distinct = {id(z): z for z in self.z.values()}
        pairs = [(y, s.to(y.dtype)) for y, s in zip(self.outputs, g, strict=True) if y.requires_grad]
        grads = vjp(tuple(y for y, _ in pairs), list(distinct.values()), tuple(s for _, s in pairs))
        k = g[0].shape[0]
        by_id = {
            key: z.new_zeros(k, *z.shape) if grad is None else grad
            for (key, z), grad in zip(distinct.items(), grads, strict=True)
        }
        return {name: by_id[id(z)] for name, z in self.z.items()}

    def layer(self, keys: Keys) -> DenseFeatures:
        """The inputs of the parameters ``keys`` of one layer, side by side along i."""
        inputs = [self.layers[key] for key in keys]
        a, valid = [one.x.detach() for one in inputs], inputs[0].valid
        if len(a) == 1:
            return DenseFeatures(a[0], valid)
        if all(t.stride(2) == 0 for t in a):  # the groups c have one input, as in self-attention: it is not repeated
            return DenseFeatures(torch.cat([t[:, :, :1] for t in a], dim=-1).expand(-1, -1, a[0].shape[2], -1), valid)
        return DenseFeatures(torch.cat(a, dim=-1), valid)


def weight_and_bias(keys: Keys, a: Tensor, valid: Tensor | None = None) -> dict[str, DenseFeatures]:
    """The inputs of a layer W a + b; ``keys`` are the names of W and, where there is one, of b.

    ``a`` [n r c i] is zero where a position is masked, and so are the ones that belong to the bias.
    """
    a = a.detach()
    ones = a.new_ones(()).expand(*a.shape[:-1], 1) if valid is None else valid.unsqueeze(-1)
    return {key: DenseFeatures(x, valid) for key, x in zip(keys, (a, ones), strict=False)}


def detached_parameter(module: nn.Module, key: str) -> Tensor | None:
    """A parameter by its local name, without its graph and in single precision at least; None where there is none."""
    parent, _, name = key.rpartition(".")
    p = parameters_in(module.get_submodule(parent)).get(name)
    return None if p is None else single(p.detach())


# ``nn.MultiheadAttention``, with plain products and softmax.


_IN, _OUT = ("in_proj_weight", "in_proj_bias"), ("out_proj.weight", "out_proj.bias")
_SPLIT = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


@final
class AttentionRule(Replayed):
    """The layer rule of ``nn.MultiheadAttention``.

    All masks and options of the module are covered, and so is the gradient of the attention weights. ``bias_k`` and
    ``bias_v`` are left to the structure's fallback. A sequence without a batch is one example.

    Method:
        y = W̄_o ō, o = softmax(q kᵀ/√d + mask) v in every head, with (q, k, v) = W̄ (query, key, value).

        The three projections are groups, W̄ [3 o i] on a [n r 3 i]. In self-attention they have the same input.
        Elsewhere the shorter sequences are padded, and the padding is masked. Keys that ``key_padding_mask`` leaves out
        have no cotangents, and are masked too.

        If keys or values have another width, there are three layers W_q, W_k, W_v [1 o i] and one for their biases [3 o
        1]. The last layer is W̄_o on the outputs of the heads; the module never calls the forward of ``out_proj``.

        The dropout mask of a fused call is not known. With dropout in training mode the replay therefore uses the
        attention weights before dropout, which are its mean: the inputs of ``out_proj``, and cotangents inside the
        module, are those of mean attention.

        Cotangents that pass through the module have seen the mask. In evaluation mode, and with dropout=0, everything
        is exact.

    Example:
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

    def groups_of(self, module: nn.Module, keys: Keys) -> int:
        return 3 if keys[0] in _IN else 1

    def replay(self, module: nn.Module, call: Call) -> Replay:
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
        return Replay((y,) if weights is None else (y, weights), layers, {key: outputs[key] for key in layers})


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


# ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and their cells, step by step.


# A recurrence over time.


State: TypeAlias = tuple[Tensor, Tensor | None]  # h [n h], and for an LSTM c [n u]; u is the number of units
Unit: TypeAlias = Callable[[Tensor, Tensor, State], State]  # the next state, from W_ih x + b_ih, W_hh h + b_hh [n o]


def unit_of(module: nn.Module) -> Unit:
    """One step of a recurrent module."""
    if isinstance(module, (nn.LSTM, nn.LSTMCell)):
        return _lstm
    if isinstance(module, (nn.GRU, nn.GRUCell)):
        return _gru
    activation = torch.relu if module.nonlinearity == "relu" else torch.tanh
    return lambda ih, hh, state: (activation(ih + hh), None)


def _lstm(ih: Tensor, hh: Tensor, state: State) -> State:
    """c' = f c + i g and h' = o tanh c' with (i, f, g, o) = (σ, σ, tanh, σ)(W_ih x + b_ih + W_hh h + b_hh)."""
    assert state[1] is not None
    i, f, g, o = (ih + hh).chunk(4, dim=-1)
    c = torch.addcmul(f.sigmoid() * state[1], i.sigmoid(), g.tanh())
    return o.sigmoid() * c.tanh(), c


def _gru(ih: Tensor, hh: Tensor, state: State) -> State:
    """h' = n + u (h − n), n = tanh(z_in + r z_hn), with r, u = σ(z_i + z_h): the two sums have their own cotangents."""
    units = ih.shape[-1] // 3
    r, u = (ih[..., : 2 * units] + hh[..., : 2 * units]).sigmoid().chunk(2, dim=-1)
    n = torch.addcmul(ih[..., 2 * units :], r, hh[..., 2 * units :]).tanh()
    return torch.lerp(n, state[0], u), None


@final
@dataclass(frozen=True)
class Direction:
    """One layer of a module in one direction of time; its parameters end with ``suffix``, as ``_l0_reverse``."""

    module: nn.Module
    suffix: str
    backward: bool = False

    @property
    def layers(self) -> tuple[Keys, ...]:
        """(W_ih, b_ih), (W_hh, b_hh) and, for an LSTM with projections, (W_hr,)."""
        names = (("weight_ih", "bias_ih"), ("weight_hh", "bias_hh"), ("weight_hr",))
        return tuple(tuple(f"{name}{self.suffix}" for name in layer) for layer in names)

    def start(self, n: int) -> State:
        """The zero state: h has the width of the input of W_hh, c has one entry per unit."""
        weight = self._weight("weight_hh")
        h = weight.new_zeros(n, weight.shape[1])
        if not isinstance(self.module, (nn.LSTM, nn.LSTMCell)):
            return h, None
        return h, weight.new_zeros(n, weight.shape[0] // 4)

    def unroll(self, x: Tensor, state: State, mask: Tensor | None) -> Unrolled:
        """Run over x [n t i] from a state. Where ``mask`` [n t] is zero the state stays, and inputs are zero.

        The sum W_hh h is never one tensor of all times: its cotangents are those of zeros z [n t 1 o] that are added.
        """
        unit, n, steps = unit_of(self.module), x.shape[0], x.shape[1]
        weight, bias = self._weight("weight_hh"), self._parameter("bias_hh")
        project = self._parameter("weight_hr")
        z_ih = F.linear(x, self._weight("weight_ih"), self._parameter("bias_ih")).unsqueeze(2)
        if torch.is_grad_enabled() and not z_ih.requires_grad:
            z_ih.requires_grad_()  # below it the arguments are constants
        z_hh = torch.zeros_like(z_ih, requires_grad=True) if unit is _gru else z_ih
        z_hr = None if project is None else z_ih.new_zeros(n, steps, 1, len(project), requires_grad=True)
        sums, added = z_ih.squeeze(2).unbind(1), z_hh.squeeze(2).unbind(1)
        before, inner, after = ([state[0]] * steps for _ in range(3))
        for t in range(steps)[:: -1 if self.backward else 1]:
            before[t], hh = state[0], F.linear(state[0], weight, bias)
            h, c = unit(sums[t], hh + added[t] if unit is _gru else hh, state)
            inner[t] = h
            if project is not None and z_hr is not None:
                h = F.linear(h, project) + z_hr[:, t, 0]
            state = (h, c) if mask is None else _where(mask[:, t, None] > 0, (h, c), state)
            after[t] = state[0]
        keep = None if mask is None else mask.unsqueeze(2)
        stacked = [torch.stack(values, dim=1) for values in (after, before, inner)]
        h_after, h_before, m = stacked if keep is None else [values * keep for values in stacked]
        inputs: dict[str, DenseFeatures] = {}
        for keys, a in zip(self.layers, (x, h_before, m), strict=True):
            inputs |= weight_and_bias(keys, a.unsqueeze(2), keep)
        z = {key: z for keys, z in zip(self.layers, (z_ih, z_hh, z_hr), strict=True) if z is not None for key in keys}
        return Unrolled(h_after, state, inputs, z)

    def _weight(self, name: str) -> Tensor:
        weight = self._parameter(name)
        assert weight is not None
        return weight

    def _parameter(self, name: str) -> Tensor | None:
        return detached_parameter(self.module, f"{name}{self.suffix}")


@final
@dataclass(frozen=True)
class Unrolled:
    """One layer in one direction: h of all times [n t h], the last state, and inputs and sums by the parameters."""

    h: Tensor
    state: State
    layers: dict[str, DenseFeatures]
    z: dict[str, Tensor]


def _where(present: Tensor, new: State, old: State) -> State:
    h = torch.where(present, new[0], old[0])
    return (h, None) if new[1] is None or old[1] is None else (h, torch.where(present, new[1], old[1]))


def _replayed(outputs: tuple[Tensor, ...], runs: Sequence[Unrolled]) -> Replay:
    layers = {name: inputs for run in runs for name, inputs in run.layers.items()}
    return Replay(outputs, layers, {name: z for run in runs for name, z in run.z.items()})


@final
class RecurrentRule(Replayed):
    """The layer rule of ``nn.RNN``, ``nn.LSTM`` and ``nn.GRU``.

    All layers, both directions, projections, either order of the axes, initial states and packed sequences are covered;
    times after the end of a sequence are masked, and count nowhere. A sequence without a batch is one example.

    Method:
        Every layer and direction has the layers W̄_ih on x̄_t, W̄_hh on h̄_{t−1}, and W_hr. The factors sum over the
        times as if they were independent (Martens, Ba and Johnson 2018).

        z_t = W̄_ih x̄_t + W̄_hh h̄_{t−1} is shared over the times t, which are the positions r; the gates of a unit are
        rows of one W̄ [1 o i] (i, f, g, o of an LSTM; r, z, n of a GRU). W_ih and W_hh of an RNN or an LSTM have the
        same cotangents.

        The dropout mask of a fused call is not known. With dropout between the layers, in training mode, the replay
        runs without it: inputs and cotangents inside the module are those of the mean network. Cotangents that pass
        through the module have seen the mask. In evaluation mode, and with dropout=0, everything is exact.

    Example:
        >>> import natgrad as ng
        >>> lstm = nn.LSTM(2, 3, batch_first=True)
        >>> pb = ng.pullback(lstm, torch.randn(4, 5, 2), ng.Euclidean(), output=lambda out: out[0])
        >>> [layer.title for layer in pb.layers]
        ['weight_ih_l0 + bias_ih_l0', 'weight_hh_l0 + bias_hh_l0']
    """

    def covers(self, module: nn.Module) -> bool:
        kind = next((kind for kind in (nn.RNN, nn.LSTM, nn.GRU) if isinstance(module, kind)), None)
        if kind is None:
            return False
        names = (name for each in _directions(cast(nn.RNNBase, module)) for layer in each.layers for name in layer)
        return plain(module, kind, *names)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return _trained(module, _directions(cast(nn.RNNBase, module)))

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        rnn, x = cast(nn.RNNBase, module), call.argument(0, "input")
        if isinstance(x, PackedSequence) or x.ndim == 2:
            return None
        return 0 if rnn.batch_first else 1

    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        rnn, x = cast(nn.RNNBase, module), call.argument(0, "input")
        if isinstance(x, PackedSequence):
            return len(x.batch_sizes)
        return int(x.shape[1 if rnn.batch_first and x.ndim == 3 else 0])

    def replay(self, module: nn.Module, call: Call) -> Replay:
        rnn = cast(nn.RNNBase, module)
        batch = _Sequences.of(rnn, call.argument(0, "input"))
        states = batch.states(call.argument(1, "hx"))
        directions, ways = _directions(rnn), 1 + rnn.bidirectional
        h, runs = batch.x, []
        for at, direction in enumerate(directions):
            state = states[at] if states else direction.start(batch.x.shape[0])
            runs.append(direction.unroll(h, state, batch.mask))
            if (at + 1) % ways == 0:  # the last direction of a layer
                h = torch.cat([run.h for run in runs[-ways:]], dim=-1)
        outputs = (*batch.outputs(h), *batch.last([run.state for run in runs]))
        return _replayed(outputs, runs)


@final
class CellRule(Replayed):
    """The layer rule of recurrent cells: one step of a recurrence.

    Method:
        W̄_ih on x̄ and W̄_hh on h̄, as in ``RecurrentRule``. Steps are uses, one after another.

    Example:
        >>> CellRule().layers(nn.GRUCell(2, 3, bias=False))
        (('weight_ih',), ('weight_hh',))
    """

    def covers(self, module: nn.Module) -> bool:
        kind = next((kind for kind in (nn.RNNCell, nn.LSTMCell, nn.GRUCell) if isinstance(module, kind)), None)
        names = (name for layer in Direction(module, "").layers for name in layer)
        return kind is not None and plain(module, kind, *names)

    def layers(self, module: nn.Module) -> tuple[Keys, ...]:
        return _trained(module, (Direction(module, ""),))

    def batch_axis(self, module: nn.Module, call: Call) -> int | None:
        return 0 if call.argument(0, "input").ndim == 2 else None

    def positions(self, module: nn.Module, keys: Keys, call: Call) -> int:
        return 1

    def replay(self, module: nn.Module, call: Call) -> Replay:
        x, given = single(call.argument(0, "input")), call.argument(1, "hx")
        direction, batched = Direction(module, ""), x.ndim == 2
        state = direction.start(x.shape[0] if batched else 1)
        if given is not None:
            h, c = _pair(given)
            state = (h, c) if batched else (h.unsqueeze(0), None if c is None else c.unsqueeze(0))
        run = direction.unroll((x if batched else x.unsqueeze(0)).unsqueeze(1), state, None)
        outputs = tuple(t if batched else t.squeeze(0) for t in run.state if t is not None)
        return _replayed(outputs, [run])


@final
@dataclass(frozen=True)
class _Sequences:
    """The input of a fused recurrence as x [n t i], in the user's order, and the conversion back to its layout."""

    rnn: nn.RNNBase
    given: Any
    x: Tensor
    mask: Tensor | None = None  # [n t], one where an example has not ended

    @staticmethod
    def of(rnn: nn.RNNBase, given: Any) -> _Sequences:
        if isinstance(given, PackedSequence):
            x, lengths = pad_packed_sequence(given, batch_first=True)
            mask = (torch.arange(x.shape[1]) < lengths.unsqueeze(1)).to(x.device)
            return _Sequences(rnn, given, single(x), single(mask.to(x.dtype)))
        x = single(given)
        if x.ndim == 2:
            return _Sequences(rnn, given, x.unsqueeze(0))
        return _Sequences(rnn, given, x if rnn.batch_first else x.transpose(0, 1))

    @property
    def batched(self) -> bool:
        return isinstance(self.given, PackedSequence) or self.given.ndim == 3

    def states(self, hx: Any) -> list[State]:
        """The initial states of every layer and direction [n h]; none where they are zero."""
        if hx is None:
            return []
        h, c = (t if t is None or self.batched else t.unsqueeze(1) for t in _pair(hx))
        assert h is not None
        return list(zip(h.unbind(0), [None] * len(h) if c is None else c.unbind(0), strict=True))

    def outputs(self, h: Tensor) -> tuple[Tensor, ...]:
        """The output tensors of the module for h [n t h] of its last layer."""
        if self.mask is not None:
            there = torch.arange(len(h)) < self.given.batch_sizes.unsqueeze(1)  # [t n], sorted by length; on the CPU
            time, example = there.nonzero().to(h.device).unbind(1)
            order, fixed = self.given.sorted_indices, (self.given.sorted_indices, self.given.unsorted_indices)
            packed = h[example if order is None else order[example], time]
            return (packed, self.given.batch_sizes, *(t for t in fixed if t is not None))
        if not self.batched:
            return (h.squeeze(0),)
        return (h if self.rnn.batch_first else h.transpose(0, 1),)

    def last(self, states: list[State]) -> tuple[Tensor, ...]:
        """The last states, [layer n h] each."""
        stacked = [
            torch.stack([t for t in side if t is not None]) for side in zip(*states, strict=True) if _there(side)
        ]
        return tuple(t if self.batched else t.squeeze(1) for t in stacked)


def _there(side: tuple[Tensor | None, ...]) -> bool:
    return side[0] is not None


def _pair(hx: Any) -> State:
    """h and, for an LSTM, c."""
    h, c = hx if isinstance(hx, (tuple, list)) else (hx, None)
    return single(h), None if c is None else single(c)


def _directions(rnn: nn.RNNBase) -> tuple[Direction, ...]:
    """Every layer in every direction, in the order of the states."""
    ways = (("", False), ("_reverse", True)) if rnn.bidirectional else (("", False),)
    return tuple(Direction(rnn, f"_l{layer}{end}", back) for layer in range(rnn.num_layers) for end, back in ways)


def _trained(module: nn.Module, directions: tuple[Direction, ...]) -> tuple[Keys, ...]:
    """The layers, without parameters that are frozen."""
    names = trainable(module)
    layers = [tuple(n for n in layer if n in names) for direction in directions for layer in direction.layers]
    return tuple(keys for keys in layers if keys)
