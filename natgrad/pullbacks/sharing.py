"""Weight sharing in K-FAC: which positions of an example count, and how they enter the two factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from torch import Tensor

from natgrad.pullbacks.layer import Block
from natgrad.rules.features import Features, Moment

LARGEST = 16384  # rows of a factor that is kept whole: 1 GiB in single precision


@final
@dataclass(frozen=True)
class Sharing:
    """How the positions r of an example that share a weight enter A and S, and which factors are kept diagonal.

        expand:  A = Σ_nr a aᵀ/(N·R),              S = Σ_kn Σ_r g gᵀ/N        (Grosse and Martens 2016)
        reduce:  A = Σ_n ā āᵀ/N, ā = mean_r a,     S = Σ_kn ĝ ĝᵀ/N, ĝ = Σ_r g (Eschenhagen et al. 2023)

    Both are exact for one position, R = 1, up to the independence of a and g. Positions that the loss does not see, and
    those that a layer masks, count neither in the sum nor in N·R. Of a factor with more than ``largest`` rows, that of
    a bias not counted, only the diagonal is formed. The second moment of one-hot inputs is kept diagonal too, also that
    of their means.
    """

    how: Literal["expand", "reduce"] = "expand"
    largest: int = LARGEST

    def only_diagonal(self, block: Block) -> tuple[bool, bool]:
        """Whether only the diagonals of A and of S are kept."""
        return block.sparse or block.features > self.largest, block.shape[1] > self.largest

    def inputs(self, a: Features) -> Features:
        """The a whose second moment is A."""
        return a.reduced("mean") if self.how == "reduce" else a

    def outputs(self, g: Features) -> Features:
        """The g whose second moment is S."""
        return g.reduced("sum") if self.how == "reduce" else g

    def input_moment(self, shared: Features, block: Block) -> Moment:
        """The sum of A, before it is divided by the count, from ``inputs``."""
        return shared.squares() if self.only_diagonal(block)[0] else shared.moment()

    def counted_moment(self, a: Features, block: Block, there: Tensor | None, weights: Tensor | None) -> Moment:
        """The sum of A, before it is divided by the count, from the inputs of a layer.

        ``there`` [n r]: the positions that count (``VisiblePositions``). ``weights`` [n]: 1 for examples that count.
        With "expand", ``there`` is enough: an example that does not count has no position that does.
        """
        shared = self.inputs(counted(a, there))
        if weights is None or (there is not None and self.how == "expand"):
            return self.input_moment(shared, block)
        return self.input_moment(shared.scaled(weights), block).over(shared.count(weights))

    def output_moment(self, shared: Features, block: Block) -> Moment:
        """The sum of S, before it is divided by N, from ``outputs``."""
        return shared.squares() if self.only_diagonal(block)[1] else shared.moment()

    def marked_output_moment(self, g: Features, block: Block, there: Tensor) -> Moment:
        """``output_moment`` from the cotangents of a layer. Writes where these are not all zero to ``there`` [n r]."""
        if self.how == "expand" and not self.only_diagonal(block)[1]:
            return g.marked_moment(there)
        mask = g.reached()
        there.fill_(True) if mask is None else there.copy_(mask)
        return self.output_moment(self.outputs(g), block)


def counted(a: Features, there: Tensor | None) -> Features:
    """The inputs of a layer at the positions that count, [n r]; None for all."""
    return a if there is None else a.only(there)
