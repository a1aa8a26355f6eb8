"""The two factors of a layer whose examples are coupled by C = L Lᵀ: those of examples that are mixed by L.

    A = Σ_nm C_nm a_n a_mᵀ/(N R) = Σ_m ã_m ã_mᵀ/(N R),   ã_m = Σ_n L_nm a_n,   and S from g in the same way

The homogeneous 1 of a bias is mixed too, and becomes Lᵀ1. The scale of S ⊗ A is matched by traces, relative to C = 1,
where it is that of K-FAC itself: S is multiplied by

    κ = (tr G_C / tr S_C tr A_C) / (tr G_1 / tr S_1 tr A_1),   tr G_C = Σ_k Σ_nm C_nm ⟨R_kn, R_km⟩,  R_kn = Σ_r g aᵀ.

Where the rows R_kn of a layer are many numbers, and positions too many for their pairs, both traces of G are estimated
from the same random signs u and w, 64 of each (Hutchinson 1990): E (uᵀR w)² = ‖R‖², and uᵀR w = Σ_r (g·u)(a·w).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any, cast, final

import torch
from torch import Tensor

from natgrad.accelerate.devices import is_asynchronous
from natgrad.accelerate.temporaries import PROBED, STAYS_IN_GPU_CACHE, at_once
from natgrad.linalg import eigh
from natgrad.pullbacks.layer import Block, Sharing, counted, trace
from natgrad.rules.features import Features, Moment

_PROBES = 64


@final
@dataclass(frozen=True)
class Weights:
    """Examples that count c_n times, C = diag(c), with c [n] in double precision: nothing is mixed.

        A = Σ_n c_n Σ_r a aᵀ / Σ_n c_n R_n,   S = Σ_n c_n Σ_kr g gᵀ,   c_n = N w_n

    This is K-FAC of the measure Σ_n w_n δ(x − x_n) on the inputs: weights that are numbers of repetitions give the
    factors of the batch with the repetitions in it. Traces are not matched: those at C = 1 are of equal weights, which
    is no measure of interest where the examples are nodes of a quadrature.

    >>> import natgrad as ng
    >>> from dataclasses import replace
    >>> pb = ng.pullback(torch.nn.Linear(1, 1, bias=False), torch.tensor([[1.0], [2.0]]), ng.Euclidean())
    >>> weighted = replace(pb, coupled=ng.output.metric.Coupling.of_weights(torch.tensor([1.5, 0.5]), torch.float32))
    >>> ng.Kronecker().estimate(weighted).right[0]  # (3·1² + 1·2²)/4
    tensor([[[1.7500]]])
    """

    c: Tensor
    dtype: torch.dtype  # of the factors

    @staticmethod
    def of(c: Tensor, dtype: torch.dtype, memo: dict[Hashable, Any]) -> Weights:
        """In memory that stays, that of the tape, so that captured kernels find them there."""
        return Weights(at_fixed_address(memo, "weights", c), dtype)

    @property
    def address_key(self) -> Hashable:
        """Where captured kernels read."""
        return self.c.data_ptr()

    def factors(
        self, a: Features, g: Features, block: Block, sharing: Sharing, there: Tensor | None = None
    ) -> tuple[Tensor, Moment]:
        """S and A of a layer of one kind; ``there`` [n r]: the positions that count, None for all."""
        s = sharing.output_moment(sharing.outputs(g).weight_examples(self.c), block).total
        shared = sharing.inputs(counted(a, there))
        total = sharing.input_moment(shared.weight_examples(self.c), block).total
        return s.to(self.dtype), Moment(total.to(self.dtype), shared.count(self.c))


@final
@dataclass(frozen=True)
class Mixing:
    """C [n m] in double precision, and L [n m] with C = L Lᵀ.

    Where C is large, rows that nearly cancel are mixed in double precision: then L comes in it.
    """

    C: Tensor
    L: Tensor
    dtype: torch.dtype  # of the factors
    memo: dict[Hashable, Any]  # of the tape: what stays where it is from one pass to the next
    matched: bool = True  # κ as above, and 1 without

    @staticmethod
    def of(C: Tensor, L: Tensor, dtype: torch.dtype, memo: dict[Hashable, Any], *, matched: bool = True) -> Mixing:
        """In memory that stays, so that captured kernels find it there."""
        return Mixing(at_fixed_address(memo, "C", C), at_fixed_address(memo, "L", L), dtype, memo, matched)

    @property
    def address_key(self) -> Hashable:
        """Where captured kernels read: C, L, and all that is cached beside them and may be made anew elsewhere."""
        cached = ((key, t.data_ptr()) for key, t in self.memo.items() if isinstance(t, Tensor))
        return self.C.data_ptr(), self.L.data_ptr(), tuple(cached)

    def factors(
        self, a: Features, g: Features, block: Block, sharing: Sharing, there: Tensor | None = None
    ) -> tuple[Tensor, Moment]:
        """κS and A of a layer of one kind, from its inputs and its cotangents s J; ``there``: as in ``Weights``.

        A factor that the coupling makes zero (the inputs of a bias, centred) says nothing: a multiple of the identity
        with the trace that it has without a coupling is taken, which is what a bias has.
        """
        plain, coupled = self.traces(a, g) if self.matched else (None, None)
        a, g = sharing.inputs(counted(a, there)), sharing.outputs(g)
        before = [trace(x.squares().total).to(self.dtype) for x in (g, a)]
        s = sharing.output_moment(g.mixed(self.L), block).total.to(self.dtype)
        moment = sharing.input_moment(a.mixed(self.L), block)
        total = moment.total.to(self.dtype)
        # Of squares of what is mixed. n equal inputs keep 1/n.
        rounding = len(self.C) * max(64 * torch.finfo(self.dtype).eps ** 2, 8 * torch.finfo(torch.float64).eps)
        of_s, of_a = (_trace_or_identity(x, was, rounding) for x, was in zip((s, total), before, strict=True))
        if plain is None or coupled is None:
            return s, Moment(total, moment.count)
        now = of_s.double() * of_a * plain
        κ = coupled * before[0] * before[1] / now
        κ = torch.where(now > 0, κ, 1.0).to(self.dtype)  # without any gradient there is nothing to scale
        return s * κ.view(-1, *[1] * (s.ndim - 1)), Moment(total, moment.count)

    def traces(self, a: Features, g: Features) -> tuple[Tensor, Tensor]:
        """The traces [c] of G at C = 1 and at C, in double precision."""
        (n, r, c, i), o = a.shape, g.shape[-1]
        if c == 1 and n * i * max(o, r) >= PROBED and not pairs_pay(r, o, i):
            return self._estimated_traces(a, g)
        return traces(a, g.dense().to(self.dtype), self.C, self.L)

    def _estimated_traces(self, a: Features, g: Features) -> tuple[Tensor, Tensor]:
        """The same from random signs."""
        h = g.project(self._signs(g.shape[-1], 1))  # [k n r p]
        q = h.mul_(a.project(self._signs(a.shape[-1], 2))).sum(2).to(self.L.dtype)  # [k n p]
        both = torch.cat([q, self.L.mT @ q]).double().square_().view(2, -1).sum(1) / _PROBES
        return both[:1], both[1:]

    def _signs(self, size: int, seed: int) -> Tensor:
        """±1 [size p], always the same: no random stream is moved."""
        key = ("signs", size, seed, self.dtype)
        if key not in self.memo:
            generator = torch.Generator(self.L.device).manual_seed(seed)
            bits = torch.randint(2, (size, _PROBES), generator=generator, device=self.L.device)
            self.memo[key] = (2 * bits - 1).to(self.dtype)
        return self.memo[key]


def traces(a: Features, g: Tensor, C: Tensor, L: Tensor) -> tuple[Tensor, Tensor]:
    """The traces [c] of G at C = 1 and at C = L Lᵀ, in double precision, from inputs and g [k n r c o].

        tr G_C = Σ_k Σ_nm C_nm ⟨R_kn, R_km⟩ = Σ_k ‖Lᵀ R_k‖²,   R_kn = Σ_r g aᵀ

    >>> from natgrad.rules.features import DenseFeatures
    >>> a, g = DenseFeatures(torch.tensor([1.0, 2.0]).view(2, 1, 1, 1)), torch.tensor([1.0, 3.0]).view(1, 2, 1, 1, 1)
    >>> traces(a, g, torch.ones(2, 2).double(), torch.tensor([[1.0, 0.0], [1.0, 0.0]]))  # 1² + 6² and (1 + 6)²
    (tensor([37.], dtype=torch.float64), tensor([49.], dtype=torch.float64))
    """
    _, _, r, c, o = g.shape
    if c == 1 and pairs_pay(r, o, a.shape[-1]):
        return _by_pairs(a.dense(), g, C)
    plain, coupled = torch.zeros(2, c, dtype=torch.float64, device=L.device)
    for rows in a.gradients(g, STAYS_IN_GPU_CACHE):  # [n c o i]
        mixed = L.mT @ rows.reshape(len(rows), -1).to(L.dtype)  # its squares do not cancel, as products with C do
        plain += torch.linalg.vector_norm(rows, dim=(0, 2, 3)).square()
        coupled += torch.linalg.vector_norm(mixed.view(rows.shape), dim=(0, 2, 3)).square()
    return plain, coupled


def pairs_pay(r: int, o: int, i: int) -> bool:
    """Whether products of pairs of positions, in double precision, cost less than rows."""
    return r == 1 or 4 * r**2 * (o + i + 100) < o * i


def _by_pairs(a: Tensor, g: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """From ⟨R_n, R_m⟩ = Σ_rs ⟨a_nr, a_ms⟩⟨g_nr, g_ms⟩, whose sum with C cancels: in double precision."""
    n, r = a.shape[:2]
    a = a[:, :, 0].double().flatten(0, 1)  # [(n r) i]
    g = g[:, :, :, 0].double().permute(1, 2, 0, 3).flatten(2).flatten(0, 1)  # [(n r) (k o)]
    plain, coupled = C.new_zeros(1), C.new_zeros(1)
    step = at_once(n * r * r, STAYS_IN_GPU_CACHE)
    for start in range(0, n, step):
        rows = slice(start * r, (start + step) * r)
        products = (a @ a[rows].T).mul_(g @ g[rows].T)
        gram = products.view(n, r, -1, r).sum((1, 3))  # [n m]
        plain += gram.diagonal(-start).sum()
        coupled += (gram * C[:, start : start + step]).sum()
    return plain, coupled.clamp_(min=0)  # a sum of squares; below zero it is rounding


def at_fixed_address(memo: dict[Hashable, Any], key: Hashable, t: Tensor) -> Tensor:
    """t or, on a GPU, a copy of it in memory that stays the same from one pass to the next.

    Batches of other sizes have it in the same place: only the largest so far has new memory.
    """
    if not is_asynchronous(t.device):
        return t
    if key not in memo or memo[key].dtype != t.dtype or memo[key].numel() < t.numel():
        memo[key] = t.new_empty(t.numel())
    return cast(Tensor, memo[key])[: t.numel()].view(t.shape).copy_(t)


def root_of(C: Tensor) -> Tensor:
    """L [n m] with C = L Lᵀ, regular or not (a centring is singular). Nothing is read back from a GPU.

    There a matrix that has no Cholesky factor is shifted by its rounding; one that has none then is not positive, and
    its root is NaN, which is reported where factors are checked.

    >>> L = root_of(torch.eye(3).double() - 1 / 3)
    >>> torch.allclose(L @ L.T, torch.eye(3).double() - 1 / 3)
    True
    """
    factor, failed = torch.linalg.cholesky_ex(C)
    if not is_asynchronous(C.device):
        if not bool(failed):
            return factor
        values, vectors = eigh(C, "the matrix that couples the examples")
        return vectors * values.clamp(min=0).sqrt()  # rounding below zero is zero
    shift = len(C) * torch.finfo(C.dtype).eps * C.diagonal().amax()
    shifted, hopeless = torch.linalg.cholesky_ex(C + shift * torch.eye(len(C), dtype=C.dtype, device=C.device))
    return torch.where(failed == 0, factor, torch.where(hopeless == 0, shifted, torch.nan))


def _trace_or_identity(factor: Tensor, before: Tensor, rounding: float) -> Tensor:
    """The trace of a factor [c d d], or [c d]; a factor that is lost to rounding becomes a multiple of 1, in place."""
    now = trace(factor)
    more = (now <= rounding * before) * before
    diagonal = factor if factor.ndim == 2 else factor.diagonal(dim1=-2, dim2=-1)
    diagonal.add_((more / factor.shape[-1]).unsqueeze(1))
    return now + more
