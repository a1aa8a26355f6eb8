"""The two factors of a layer whose examples are coupled by C = L Lᵀ: those of examples that are mixed by L.

    A = Σ_nm C_nm a_n a_mᵀ/(N R) = Σ_m ã_m ã_mᵀ/(N R),   ã_m = Σ_n L_nm a_n,   and S from g in the same way

Inputs are mixed where a layer is called, as a convolution is linear in them: patches are never formed for A, and what
makes the moments of a layer makes these. The 1 of a bias becomes Lᵀ1. The scale of S ⊗ A is matched by traces, relative
to C = 1, where it is that of K-FAC itself (000 (24)–(25), ERRATA 8): S is multiplied by

    κ = (tr G_C / tr S_C tr A_C) / (tr G_1 / tr S_1 tr A_1),   tr G_C = Σ_k Σ_nm C_nm ⟨R_kn, R_km⟩,  R_kn = Σ_r g aᵀ.

Where the rows R_kn of a layer are many numbers, and positions too many for their pairs, both traces of G are estimated
from the same random signs u and w, 64 of each (Hutchinson 1990): E (uᵀR w)² = ‖R‖², and uᵀR w = Σ_r (g·u)(a·w).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.factors import Factors
from natgrad.pullback.sharing import Cotangents, Sharing, mean
from natgrad.pullback.tape import Tape, Use
from natgrad.pullback.tied import trace
from natgrad.pullback.traces import Sums, paired, pairs_pay, squares, traces
from natgrad.rules.base import Moment, single
from natgrad.rules.products import channels_last

_PROBED = 2**21  # numbers of rows, or of the inputs that they are made of, from which their squares are estimated
_PROBES = 64


@final
@dataclass(frozen=True)
class Coupled:
    """C [n m] in double precision and L [n m], C = L Lᵀ, in the precision of the factors."""

    C: Tensor
    mix: Tensor
    memo: dict[Hashable, Any]  # of the tape: what stays where it is from one pass to the next

    @staticmethod
    def of(C: Tensor, mix: Tensor, memo: dict[Hashable, Any]) -> Coupled:
        """On a GPU in memory that stays, so that recorded kernels find it there."""
        if C.device.type != "cuda":
            return Coupled(C, mix, memo)
        for key, t in (("C", C), ("L", mix)):
            if key not in memo or (memo[key].shape, memo[key].dtype) != (t.shape, t.dtype):
                memo[key] = t.clone()
            else:
                memo[key].copy_(t)
        return Coupled(memo["C"], memo["L"], memo)

    @property
    def places(self) -> Hashable:
        """Where recorded kernels read it, and all that is kept beside it, which may be made anew elsewhere."""
        kept = ((key, t.data_ptr()) for key, t in self.memo.items() if isinstance(t, Tensor))
        return self.C.data_ptr(), self.mix.data_ptr(), tuple(kept)

    def factors(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, Tensor]:
        """S and A of a layer of one kind, from its cotangents s J/√N."""
        if sharing.direct(tape, block):
            totals = self._traces(tape, block, g)
            s = sharing.outputs(tape, block, self._cotangents(tape, block, g))
            moment = self._inputs(tape, block, sharing)
            before = squares(g.whole(tape, block), (0, 1, 2, 4)), self._input_squares(tape, block)
        else:
            totals = traces(self._cast(Factors(tape.inputs(block), g.whole(tape, block))), self.C, self.mix)
            f = self._cast(sharing.explicit(tape, block, g))
            plain_s, plain_a = sharing.outputs(tape, block, g), sharing.inputs(tape, block)
            s = _products(mixed(f.g, self.mix).flatten(0, 2), plain_s.ndim == 3)
            a = _products(mixed(f.a[None], self.mix).flatten(0, 2), plain_a.total.ndim == 3)
            moment, before = Moment(a, plain_a.count), (trace(plain_s), trace(plain_a.total))
        return self._scaled(s.to(self.mix.dtype), moment, before, totals)

    def _traces(self, tape: Tape, block: Block, g: Cotangents) -> tuple[Tensor, Tensor]:
        """The traces of G at C = 1 and at C. The 1 of a bias beside a weight is left out of the inputs: it is known."""
        if self._probed(tape, block):
            return self._estimated(tape, block, g)
        one = "bias" in block.keys and len(block.keys) > 1
        keys = tuple(key for key in block.keys if key != "bias" or not one)
        whole, uses = g.whole(tape, block).to(self.mix.dtype), tape.of(block)
        if len(uses) == 1 and not paired(whole, block.shape[2]):
            outer = g.outer[tape.places(block)[0]][0].to(self.mix.dtype)
            (use,), sums = uses, Sums.zero(self.mix, block.shape[0])
            if all(sums.add(use.rule.gradients(use.module, keys, use.call, column)) for column in outer):
                for column in whole if one else ():
                    sums.add(column.sum(1).unsqueeze(-1))
                return sums.plain, sums.coupled
        a = [use.rule.inputs(use.module, keys, use.call) for use in uses]
        f = self._cast(Factors(a[0] if len(a) == 1 else torch.cat(a, dim=1), whole))
        return traces(f, self.C, self.mix, one)

    def _probed(self, tape: Tape, block: Block) -> bool:
        """Whether the rows of a layer are too many to be formed, or to be formed of pairs of positions."""
        (c, o, i), n = block.shape, len(self.mix)
        if c > 1 or len(tape.places(block)) > 1:
            return False
        r = tape.of(block)[0].shape.numel() // (n * o)
        return n * i * max(o, r) >= _PROBED and not pairs_pay(r, o, i)

    def _estimated(self, tape: Tape, block: Block, g: Cotangents) -> tuple[Tensor, Tensor]:
        """The traces of G at C = 1 and at C, from random signs."""
        (use,), (_, o, i) = tape.of(block), block.shape
        u, w = self._signs(o, 1), self._signs(i, 2)
        a = use.rule.projected(use.module, block.keys, use.call, w).mT  # [n p r]
        h = g.whole(tape, block)[:, :, :, 0].to(u.dtype).mT  # [k n o r]
        q = (a * (u.T @ h)).sum(-1)  # [k n p]; a product in this order copies neither images nor sequences
        plain, coupled = (squares(rows, (0, 1, 2)) / _PROBES for rows in (q.double(), (self.mix.T @ q).double()))
        return plain.view(1), coupled.view(1)

    def _signs(self, size: int, seed: int) -> Tensor:
        """±1 [size p], always the same: no random stream is moved."""
        key = ("signs", size, seed, self.mix.dtype)
        if key not in self.memo:
            generator = torch.Generator(self.mix.device).manual_seed(seed)
            bits = torch.randint(2, (size, _PROBES), generator=generator, device=self.mix.device)
            self.memo[key] = (2 * bits - 1).to(self.mix.dtype)
        return self.memo[key]

    def _cast(self, f: Factors) -> Factors:
        return Factors(f.a.to(self.mix.dtype), f.g.to(self.mix.dtype))

    def _cotangents(self, tape: Tape, block: Block, g: Cotangents) -> Cotangents:
        """Those of the uses of a block, mixed: a layer's g are linear in the cotangents of its outputs."""
        outer = {at: tuple(mixed(t.to(self.mix.dtype), self.mix) for t in g.outer[at]) for at in tape.places(block)}
        return Cotangents(outer, {})

    def _inputs(self, tape: Tape, block: Block, sharing: Sharing) -> Moment:
        """Σ_nm C_nm a_n a_mᵀ from the moment of mixed inputs; of a bias, the row and the column are put right."""
        here = set(tape.places(block))
        uses = tuple(self._called(use) if at in here else use for at, use in enumerate(tape.uses))
        moment = sharing.inputs(replace(tape, uses=uses), block)
        if "bias" not in block.keys:
            return moment
        border = _total([self._border(use, block) for use in tape.of(block)])
        moment.total[:, -1, :] = border
        moment.total[:, :, -1] = border
        return moment

    def _called(self, use: Use) -> Use:
        """A use with mixed inputs."""
        return replace(use, call=use.call.map(lambda x: mixed(single(x).to(self.mix.dtype)[None], self.mix)[0]))

    def _border(self, use: Use, block: Block) -> Tensor:
        """Σ_nm C_nm Σ_r a_nr 1 [c i], from the inputs of one example Σ_n (C1)_n x_n; its last entry is R·1ᵀC1."""
        weights = self.C.sum(1).to(self.mix.dtype)
        return self._sum(use, block, lambda x: _combined(x, weights), weights.sum())

    def _input_squares(self, tape: Tape, block: Block) -> Tensor:
        """Σ_nr |a|² [c], from the inputs of one example Σ_n x_n²."""
        n = len(self.mix)
        ones = self.mix.new_ones(n)
        parts = [self._sum(use, block, lambda x: _combined(x.square(), ones), n) for use in tape.of(block)]
        return _total(parts).sum(1)

    def _sum(self, use: Use, block: Block, combine: Callable[[Tensor], Tensor], count: Tensor | int) -> Tensor:
        """Σ_r a [c i] of one example that is combined from all; the last entry of a bias is R times a ``count``."""
        c, o, _ = block.shape
        positions = use.shape.numel() // (len(self.mix) * c * o)
        one = use.call.map(lambda x: combine(single(x).to(self.mix.dtype)))
        sums = use.rule.input_mean(use.module, block.keys, one)[0] * positions
        if "bias" in block.keys:
            sums[:, -1] = positions * count
        return sums

    def _scaled(
        self, s: Tensor, moment: Moment, before: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """κS and A.

        A factor that the coupling makes zero (the inputs of a bias, centred) says nothing: a multiple of the identity
        with the trace that it has without one is taken, which is what a bias has.
        """
        rounding = 8 * len(self.mix) * torch.finfo(s.dtype).eps
        before = before[0].to(s.dtype), before[1].to(s.dtype)
        s = _kept(s, before[0], rounding)
        total = _kept(moment.total.to(s.dtype), before[1], rounding)
        now = trace(s).double() * trace(total).double() * totals[0]
        κ = totals[1] * before[0].double() * before[1].double() / now
        # Without any gradient there is nothing to scale.
        κ = torch.where(now > 0, κ, 1.0).to(s.dtype)
        return κ.view(-1, *[1] * (s.ndim - 1)) * s, mean(Moment(total, moment.count))


def root_of(C: Tensor) -> Tensor:
    """L [n m] with C = L Lᵀ, regular or not (a centring is singular). Nothing is read back from a GPU.

    There a matrix that has no Cholesky factor is shifted by its rounding; one that has none then is not positive, and
    its root is NaN, which is reported where factors are checked.

    >>> L = root_of(torch.eye(3).double() - 1 / 3)
    >>> torch.allclose(L @ L.T, torch.eye(3).double() - 1 / 3)
    True
    """
    factor, failed = torch.linalg.cholesky_ex(C)
    if C.device.type == "cpu":
        if not bool(failed):
            return factor
        values, vectors = torch.linalg.eigh(C)
        return vectors * values.clamp(min=0).sqrt()  # rounding below zero is zero
    shift = len(C) * torch.finfo(C.dtype).eps * C.diagonal().amax()
    shifted, hopeless = torch.linalg.cholesky_ex(C + shift * torch.eye(len(C), dtype=C.dtype, device=C.device))
    return torch.where(failed == 0, factor, torch.where(hopeless == 0, shifted, torch.nan))


def mixed(t: Tensor, mix: Tensor) -> Tensor:
    """Σ_n L_nm t_n of t [k n *rest], in the memory format that t has.

    >>> mixed(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 1.0], [0.0, 3.0]]))
    tensor([[1., 7.]])
    """
    if len(mix) == 1:  # of a single example the axis may be left out
        return t * mix[0, 0]
    last = t.ndim > 3 and channels_last(t.flatten(0, 1))
    flat = t.movedim(2, -1) if last else t
    out = (mix.T @ flat.reshape(*t.shape[:2], -1)).view(flat.shape)
    return out.movedim(-1, 2) if last else out


def _total(parts: Sequence[Tensor]) -> Tensor:
    """Their sum."""
    return parts[0] if len(parts) == 1 else torch.stack(list(parts)).sum(0)


def _kept(mixed: Tensor, before: Tensor, rounding: float) -> Tensor:
    """A factor [c d d], or its diagonal [c d]; where all of it is lost, it gets a diagonal. In place."""
    lost = trace(mixed) <= rounding * before
    diagonal = mixed if mixed.ndim == 2 else mixed.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((lost * before / mixed.shape[-1]).unsqueeze(1))
    return mixed


def _combined(x: Tensor, weights: Tensor) -> Tensor:
    """Σ_n w_n x_n [1 *rest]."""
    return x * weights[0] if len(weights) == 1 else torch.tensordot(weights, x, 1).unsqueeze(0)


def _products(x: Tensor, full: bool) -> Tensor:
    """Σ_m x xᵀ [c d e] of x [m c d], or its diagonal [c d]."""
    return torch.einsum("mcd,mce->cde", x, x) if full else x.square().sum(0)
