"""The two factors of a layer whose examples have weights: a coupling C = diag(c) that mixes none of them.

    A = Σ_n c_n Σ_r a aᵀ / Σ_n c_n R_n,   S = Σ_n c_n Σ_kr g gᵀ,   c_n = N w_n

It is K-FAC of the measure Σ_n w_n δ(x − x_n) on the inputs: weights that are numbers of repetitions give the factors of
the batch with the repetitions in it. Traces are not matched: those at C = 1 are of equal weights, which is no measure
of interest where the examples are nodes of a rule.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.pullback.blocks import Block
from natgrad.pullback.relation import Relation, products
from natgrad.pullback.sharing import Cotangents, Sharing
from natgrad.pullback.tape import Tape
from natgrad.pullback.uses import Use
from natgrad.rules.base import Moment
from natgrad.rules.precision import single


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
