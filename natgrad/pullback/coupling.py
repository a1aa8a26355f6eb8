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

from abc import ABC, abstractmethod
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.moments import single
from natgrad.pullback.factors import Factors, Sums, paired, pairs_pay, squares, traces
from natgrad.pullback.features import Cotangents, Sharing
from natgrad.pullback.layer import Block, trace
from natgrad.pullback.tape import Tape, Use
from natgrad.rules.base import Call, Moment

# What the examples of a pass are to each other, for the factors of its layers: coupled, or of different weights.


class Relation(ABC):
    """A coupling C of the examples, as the factors of a layer see it."""

    @property
    @abstractmethod
    def places(self) -> Hashable:
        """Where recorded kernels read it."""

    @abstractmethod
    def factors(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, Moment]:
        """S and A of a layer of one kind, from its cotangents s J/√N."""


def products(x: Tensor, full: bool) -> Tensor:
    """Σ_m x xᵀ [c d e] of x [m c d], or its diagonal [c d].

    >>> products(torch.tensor([[[1.0, 2.0]]]), full=False)
    tensor([[1., 4.]])
    """
    return torch.einsum("mcd,mce->cde", x, x) if full else x.square().sum(0)


# The two factors of a layer whose examples have weights: a coupling C = diag(c) that mixes none of them.
#
#     A = Σ_n c_n Σ_r a aᵀ / Σ_n c_n R_n,   S = Σ_n c_n Σ_kr g gᵀ,   c_n = N w_n
#
# It is K-FAC of the measure Σ_n w_n δ(x − x_n) on the inputs: weights that are numbers of repetitions give
# the factors of
# the batch with the repetitions in it. Traces are not matched: those at C = 1 are of equal weights, which is no measure
# of interest where the examples are nodes of a rule.


@final
@dataclass(frozen=True)
class Weighed(Relation):
    """c [n] in double precision.

    >>> import natgrad as ng
    >>> pb = ng.pullback(torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]]), ng.Euclidean())
    >>> weighed = replace(pb, coupled=ng.output.metric.Coupling.of_weights(torch.tensor([1.5, 0.5]), torch.float32))
    >>> ng.Kronecker().estimate(weighed).right[0]  # (3·1² + 1·2²)/4
    tensor([[[1.7500]]])
    """

    weights: Tensor
    dtype: torch.dtype  # of the factors

    @staticmethod
    def of(weights: Tensor, dtype: torch.dtype, memo: dict[Hashable, Any]) -> Weighed:
        """On a GPU in memory that stays, that of the tape, so that recorded kernels find it there."""
        if weights.device.type != "cuda":
            return Weighed(weights, dtype)
        if "weights" not in memo or memo["weights"].shape != weights.shape:
            memo["weights"] = weights.clone()
        else:
            memo["weights"].copy_(weights)
        return Weighed(memo["weights"], dtype)

    @property
    def places(self) -> Hashable:
        return self.weights.data_ptr()

    def factors(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, Moment]:
        s = sharing.outputs(tape, block, self._cotangents(tape, block, g)).to(self.dtype)
        if sharing.direct(tape, block):
            total, count = self._linear(tape, block, sharing)
        else:
            total, count = self._explicit(tape, block, sharing, g)
        ratio = self._kept(tape, block, count).to(self.dtype)
        return s, Moment(total.mul_(ratio.view(-1, *[1] * (total.ndim - 1))), count)

    def _cotangents(self, tape: Tape, block: Block, g: Cotangents) -> Cotangents:
        """Those of a block times √c_n: of its uses or, where it is inside a replay, of itself."""
        places, key = tape.places(block), block.keys[0]
        outer = {at: tuple(self._rooted(t, 1) for t in g.outer[at]) for at in places if at not in g.inner}
        return Cotangents(outer, {at: {key: self._rooted(g.inner[at][key], 1)} for at in places if at in g.inner})

    def _linear(self, tape: Tape, block: Block, sharing: Sharing) -> tuple[Tensor, int | Tensor]:
        """Σ c a aᵀ and the number of positions, from inputs times √c_n where a layer is called: no patches are formed.

        Of a bias, whose 1 is not multiplied, the row and the column are put right.
        """
        uses, border = list(tape.uses), torch.zeros(1, dtype=self.dtype, device=self.weights.device)
        for at in tape.places(block):
            use = tape.uses[at]
            uses[at] = replace(use, call=use.call.map(lambda x: self._rooted(single(x), 0)))
            if "bias" in block.keys:
                border = border + self._sum(use, block)
        moment = sharing.inputs(replace(tape, uses=tuple(uses)), block)
        total = moment.total.to(self.dtype)
        if "bias" in block.keys:
            total[:, -1, :] = border
            total[:, :, -1] = border
        return total, moment.count

    def _sum(self, use: Use, block: Block) -> Tensor:
        """Σ_nr c_n a [c i] of one use."""
        means = use.rule.input_mean(use.module, block.keys, use.call).to(self.dtype)
        positions = use.shape.numel() // (len(means) * block.shape[0] * block.shape[1])
        return torch.einsum("n,nci->ci", self.weights.to(self.dtype) * positions, means)

    def _explicit(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, int | Tensor]:
        """The same from the inputs themselves."""
        like = sharing.inputs(tape, block)
        a = self._rooted(sharing.explicit(tape, block, g).a, 0)
        return products(a.flatten(0, 1), like.total.ndim == 3), like.count

    def _kept(self, tape: Tape, block: Block, count: int | Tensor) -> Tensor:
        """Σ_n R_n / Σ_n c_n R_n [c], or [1]: masked positions count in neither."""
        if not isinstance(count, Tensor):
            return self.weights.mean().reciprocal().view(1)
        found = (use.rule.valid(use.module, block.keys, use.call).double() for use in tape.of(block))
        valid = torch.cat(list(found), dim=1).sum(1)  # [n c]
        weighed = self.weights @ valid
        return torch.where(weighed > 0, valid.sum(0) / weighed, 1.0)  # of nothing the sum is zero, too

    def _rooted(self, t: Tensor, axis: int) -> Tensor:
        """√c_n t, for t with the examples on an axis, which may be left out where there is one."""
        root = self.weights.sqrt().to(self.dtype)
        return t.to(self.dtype) * root.view(-1, *[1] * (t.ndim - 1 - axis))


_PROBED = 2**21  # numbers of rows, or of the inputs that they are made of, from which their squares are estimated
_PROBES = 64


@final
@dataclass(frozen=True)
class Coupled(Relation):
    """C [n m] in double precision, and Lᵀ with C = L Lᵀ and 1ᵀC below it.

    Where C is large, rows that nearly cancel are mixed in double precision: then L comes in it.
    """

    C: Tensor
    rows: Tensor  # [m + 1 n]
    dtype: torch.dtype  # of the factors
    memo: dict[Hashable, Any]  # of the tape: what stays where it is from one pass to the next

    @staticmethod
    def of(C: Tensor, mix: Tensor, dtype: torch.dtype, memo: dict[Hashable, Any]) -> Coupled:
        """From L [n m]. On a GPU in memory that stays, so that recorded kernels find it there."""
        # Σ_m C_nm may cancel to the last digit; L(Lᵀ1) is as exact as L.
        sums = mix @ mix.sum(0) if mix.dtype == C.dtype else C.sum(0).to(mix.dtype)
        rows = torch.cat([mix.T, sums.unsqueeze(0)])
        if C.device.type != "cuda":
            return Coupled(C, rows, dtype, memo)
        for key, t in (("C", C), ("L", rows)):
            if key not in memo or (memo[key].shape, memo[key].dtype) != (t.shape, t.dtype):
                memo[key] = t.clone()
            else:
                memo[key].copy_(t)
        return Coupled(memo["C"], memo["L"], dtype, memo)

    @property
    def places(self) -> Hashable:
        """It, and all that is kept beside it, which may be made anew elsewhere."""
        kept = ((key, t.data_ptr()) for key, t in self.memo.items() if isinstance(t, Tensor))
        return self.C.data_ptr(), self.rows.data_ptr(), tuple(kept)

    @property
    def n(self) -> int:
        """Examples."""
        return len(self.C)

    @property
    def mix(self) -> Tensor:
        """Lᵀ [m n]."""
        return self.rows[:-1]

    def factors(self, tape: Tape, block: Block, sharing: Sharing, g: Cotangents) -> tuple[Tensor, Moment]:
        if sharing.direct(tape, block):
            totals = self._traces(tape, block, g)
            s = sharing.outputs(tape, block, self._cotangents(tape, block, g))
            moment, inputs = self._inputs(tape, block, sharing)
            before = squares(single(g.whole(tape, block)), (0, 1, 2, 4)), inputs
        elif (x := self._entries(tape, block, sharing)) is not None:
            return self._scaled(*self._entrywise(x, g.whole(tape, block).squeeze(4), "bias" in block.keys))
        else:
            totals = traces(self._cast(Factors(tape.inputs(block), g.whole(tape, block))), self.C, self.mix.T)
            f = self._cast(sharing.explicit(tape, block, g))
            plain_s, plain_a = sharing.outputs(tape, block, g), sharing.inputs(tape, block)
            s = products(self._by(f.g, self.mix).flatten(0, 2), plain_s.ndim == 3)
            a = products(self._by(f.a[None], self.mix).flatten(0, 2), plain_a.total.ndim == 3)
            moment, before = Moment(a, plain_a.count), (trace(plain_s), trace(plain_a.total))
        return self._scaled(s.to(self.dtype), moment, before, totals)

    def _traces(self, tape: Tape, block: Block, g: Cotangents) -> tuple[Tensor, Tensor]:
        """The traces of G at C = 1 and at C. The 1 of a bias beside a weight is left out of the inputs: it is known."""
        if self._probed(tape, block):
            return self._estimated(tape, block, g)
        one = "bias" in block.keys and len(block.keys) > 1
        keys = tuple(key for key in block.keys if key != "bias" or not one)
        whole, uses = g.whole(tape, block).to(self.dtype), tape.of(block)
        if len(uses) == 1 and not paired(whole, block.shape[2]):
            outer = g.outer[tape.places(block)[0]][0].to(self.dtype)
            (use,), sums = uses, Sums.zero(self.mix.T, block.shape[0])
            if all(sums.add(use.rule.gradients(use.module, keys, use.call, column)) for column in outer):
                for column in whole if one else ():
                    sums.add(column.sum(1).unsqueeze(-1))
                return sums.plain, sums.coupled
        a = [use.rule.inputs(use.module, keys, use.call) for use in uses]
        f = self._cast(Factors(a[0] if len(a) == 1 else torch.cat(a, dim=1), whole))
        return traces(f, self.C, self.mix.T, one)

    def _probed(self, tape: Tape, block: Block) -> bool:
        """Whether the rows of a layer are too many to be formed, or to be formed of pairs of positions."""
        c, o, i = block.shape
        if c > 1 or len(tape.places(block)) > 1:
            return False
        r = tape.of(block)[0].shape.numel() // (self.n * o)
        return self.n * i * max(o, r) >= _PROBED and not pairs_pay(r, o, i)

    def _estimated(self, tape: Tape, block: Block, g: Cotangents) -> tuple[Tensor, Tensor]:
        """The traces of G at C = 1 and at C, from random signs."""
        (use,), (_, o, i) = tape.of(block), block.shape
        u, w = self._signs(o, 1), self._signs(i, 2)
        a = use.rule.projected(use.module, block.keys, use.call, w)  # [n r p]
        # Images may be copied for it: one large product is faster than one an image.
        h = g.whole(tape, block)[:, :, :, 0].to(u.dtype) @ u  # [k n r p]
        q = h.mul_(a).sum(2)  # [k n p]
        q = q.to(self.mix.dtype)
        both = torch.cat([q, self.mix @ q]).double().square_().view(2, -1).sum(1) / _PROBES
        return both[:1], both[1:]

    def _signs(self, size: int, seed: int) -> Tensor:
        """±1 [size p], always the same: no random stream is moved."""
        key = ("signs", size, seed, self.dtype)
        if key not in self.memo:
            generator = torch.Generator(self.rows.device).manual_seed(seed)
            bits = torch.randint(2, (size, _PROBES), generator=generator, device=self.rows.device)
            self.memo[key] = (2 * bits - 1).to(self.dtype)
        return self.memo[key]

    def _cast(self, f: Factors) -> Factors:
        return Factors(f.a.to(self.dtype), f.g.to(self.dtype))

    def _cotangents(self, tape: Tape, block: Block, g: Cotangents) -> Cotangents:
        """Those of the uses of a block, mixed: a layer's g are linear in the cotangents of its outputs."""
        places = tape.places(block)
        return Cotangents({at: tuple(self._by(t, self.mix) for t in g.outer[at]) for at in places}, {})

    def _by(self, t: Tensor, rows: Tensor) -> Tensor:
        """Σ_n rows_mn t_n, in the precision of the rows."""
        return mixed(t.to(rows.dtype), rows).to(self.dtype)

    def _inputs(self, tape: Tape, block: Block, sharing: Sharing) -> tuple[Moment, Tensor]:
        """Σ_nm C_nm a_n a_mᵀ from the moment of mixed inputs, and Σ_nr |a|² [c].

        Of a bias the row and the column are put right, by what one example Σ_n (C1)_n x_n has.
        """
        uses, sums = list(tape.uses), []
        for at in tape.places(block):
            uses[at], own = self._mixed(tape.uses[at], block)
            sums.append(own)
        border, norms = sums[0] if len(sums) == 1 else torch.stack(sums).sum(0)
        moment = sharing.inputs(replace(tape, uses=tuple(uses)), block)
        if "bias" in block.keys:
            moment.total[:, -1, :] = border
            moment.total[:, :, -1] = border
        return moment, norms.sum(1)

    def _mixed(self, use: Use, block: Block) -> tuple[Use, Tensor]:
        """A use with mixed inputs, and Σ_r a [2 c i] of two examples, Σ_n (C1)_n x_n and Σ_n x_n².

        The last entry of a bias is R·1ᵀC1, and R·n.
        """
        x, (c, o, _) = single(use.call.x).to(self.dtype), block.shape
        if self.n == 1:  # its axis may be left out
            mixed_x, sums_of = self._by(x, self.rows[:1]), [self._by(x, self.rows[1:]), x.square()]
        else:
            made = self._by(x[None], self.rows)[0]
            mixed_x, sums_of = made[:-1], [torch.cat([made[-1:], squares(x, (0,)).unsqueeze(0)])]
        positions = use.shape.numel() // (self.n * c * o)
        means = [use.rule.input_mean(use.module, block.keys, _called(use, t)) for t in sums_of]
        sums = (means[0] if len(means) == 1 else torch.cat(means)) * positions
        if "bias" in block.keys:
            sums[0, :, -1] = positions * self.rows[-1].sum()
            sums[1, :, -1] = positions * self.n
        return replace(use, call=_called(use, mixed_x)), sums

    def _entries(self, tape: Tape, block: Block, sharing: Sharing) -> Tensor | None:
        """x̂ [n r c] of a layer whose groups are entries, called once, whose positions count by themselves."""
        uses = tape.of(block)
        if len(uses) > 1 or not sharing.expands(block):
            return None
        x = uses[0].rule.normalised_entries(uses[0].module, block.keys, uses[0].call)
        return None if x is None else x.to(self.dtype)

    def _entrywise(
        self, x: Tensor, g: Tensor, bias: bool
    ) -> tuple[Tensor, Moment, tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        """S and A of entries z = γ x̂ + β, their traces at C = 1, and those of G, from x̂ [n r c] and g [k n r c]."""
        g, (n, r, c) = g.to(x.dtype), x.shape
        mixed_x, mixed_g = self._by(x[None], self.rows)[0], self._by(g, self.mix)
        total, norms, sums = squares(mixed_x[:-1], (0, 1)), squares(x, (0, 1)), Sums.zero(self.mix.T, c)
        if bias:
            corner = (r * self.rows[-1].sum()).to(x.dtype).expand(c)
            border = mixed_x[-1].sum(0)
            total, norms = torch.stack([total, border, border, corner], dim=-1), norms + n * r
        for column in g:
            sums.add((column * x).sum(1)[:, :, None, None])
            if bias:
                sums.add(column.sum(1)[:, :, None, None])
        s, before = squares(mixed_g, (0, 1, 2)).view(c, 1, 1), squares(g, (0, 1, 2))
        return s, Moment(total.view(c, 1 + bias, 1 + bias), n * r), (before, norms), (sums.plain, sums.coupled)

    def _scaled(
        self, s: Tensor, moment: Moment, before: tuple[Tensor, Tensor], totals: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Moment]:
        """κS and A.

        A factor that the coupling makes zero (the inputs of a bias, centred) says nothing: a multiple of the identity
        with the trace that it has without one is taken, which is what a bias has.
        """
        before = before[0].to(s.dtype), before[1].to(s.dtype)
        total = moment.total.to(s.dtype)
        # Of squares of what is mixed; a bias has 1ᵀC1 itself, in double precision. n equal inputs keep 1/n.
        rounding = self.n * max(64 * torch.finfo(s.dtype).eps ** 2, 8 * torch.finfo(torch.float64).eps)
        now = _kept(s, before[0], rounding).double() * _kept(total, before[1], rounding) * totals[0]
        κ = totals[1] * before[0] * before[1] / now
        # Without any gradient there is nothing to scale.
        κ = torch.where(now > 0, κ, 1.0).to(s.dtype)
        return s.mul_(κ.view(-1, *[1] * (s.ndim - 1))), Moment(total, moment.count)


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


def mixed(t: Tensor, rows: Tensor) -> Tensor:
    """Σ_n rows_mn t_n of t [k n *rest], in the order that t has in memory. Of one row and one example, t [k *rest].

    >>> mixed(torch.tensor([[1.0, 2.0]]), torch.tensor([[1.0, 0.0], [1.0, 3.0]]))
    tensor([[1., 7.]])
    """
    if rows.numel() == 1:  # where the axis may be left out
        return t * rows[0, 0]
    order = sorted(range(2, t.ndim), key=t.stride, reverse=True)
    flat = t.permute(0, 1, *order)
    out = (rows @ flat.reshape(*t.shape[:2], -1)).view(t.shape[0], len(rows), *flat.shape[2:])
    return out.permute(0, 1, *(2 + order.index(axis) for axis in range(2, t.ndim)))


def _called(use: Use, x: Tensor) -> Call:
    """The call of a use with another tensor."""
    return use.call.map(lambda _: x)


def _kept(factor: Tensor, before: Tensor, rounding: float) -> Tensor:
    """The trace of a factor [c d d], or [c d] of a diagonal; where all of it is lost, it gets a diagonal. In place."""
    now = trace(factor)
    more = (now <= rounding * before) * before
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((more / factor.shape[-1]).unsqueeze(1))
    return now + more
