"""Weight-sharing approximations of K-FAC: what becomes of the positions of an example in the two factors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from natgrad.pullback.layer import Block
from natgrad.rules.features import Features, Moment

LARGEST = 16384  # rows of a factor that is kept whole: 1 GiB in single precision


@final
@dataclass(frozen=True)
class Sharing:
    """What becomes of the positions r of an example that share a weight, and of factors that are too large.

        expand:  A = Σ_nr a aᵀ/(N·R),              S = Σ_kn Σ_r g gᵀ/N        (Grosse and Martens 2016)
        reduce:  A = Σ_n ā āᵀ/N, ā = mean_r a,     S = Σ_kn ĝ ĝᵀ/N, ĝ = Σ_r g (Eschenhagen et al. 2023)

    Both are exact for one position, R = 1, up to the independence of a and g. Masked positions count neither in the sum
    nor in N·R. Of a factor with more than ``largest`` rows, that of a bias not counted, only the diagonal is formed.
    The second moment of one-hot inputs is kept diagonal too, also that of their means.
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
        """A of a layer before its division, from ``inputs``."""
        return shared.squares() if self.only_diagonal(block)[0] else shared.moment()

    def output_moment(self, shared: Features, block: Block) -> Moment:
        """S of a layer before its division, from ``outputs``."""
        return shared.squares() if self.only_diagonal(block)[1] else shared.moment()
