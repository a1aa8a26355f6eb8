"""How much every estimate counts in a moving average to which they come one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import final


@final
@dataclass
class Mass:
    """The weights of Ḡ = Σ_t β^{T−t} Σ_j m_tj G_tj / Σ_t β^{T−t} Σ_j m_tj, estimate by estimate (002 (32)).

    G_tj is the estimate of the pass j of step t, and m_tj the number of its examples over that of the last whole step:
    the average is over examples, and older steps count less. Where all steps have as many examples it is the usual
    average, corrected for its start (ERRATA, section D).

    >>> mass = Mass(decay=0.5)
    >>> mass.whole(8), mass.whole(8), mass.part(4), mass.part(4)
    (1.0, 0.6666666666666666, 0.4, 0.2857142857142857)
    """

    decay: float
    total: float = 0.0  # Σ_t β^{T−t} Σ_j m_tj
    usual: int = 0  # examples of the last whole step, in which the total is counted; 0 where that is not known
    seen: int = 0  # examples of this step, so far

    def whole(self, n: int) -> float:
        """The weight of all estimates of one step, averaged before."""
        self.total, self.usual, self.seen = self.decay * self.total + 1.0, n, 0
        return 1.0 / self.total

    def part(self, n: int) -> float:
        """The weight of an estimate from n examples, of which a step may have several."""
        if not self.seen:
            self.total *= self.decay
        self.seen += n
        self.usual = self.usual or n
        own = n / self.usual
        self.total += own
        return own / self.total

    def end(self) -> None:
        """Of the step: what comes next is newer."""
        if self.seen and self.usual:  # what was counted in steps of the old size is now in those of the new one
            self.total *= self.usual / self.seen
        self.usual, self.seen = self.seen or self.usual, 0
