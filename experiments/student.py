"""Student's test of differences, one a seed."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import Any, final

from scipy import stats


def two_sided(t: float, degrees: int) -> float:
    """P(|T| ≥ |t|) of Student's distribution.

    >>> round(two_sided(4.303, 2), 4), round(two_sided(12.706, 1), 4)
    (0.05, 0.05)
    """
    return float(2 * stats.t.sf(abs(t), degrees))


def critical(level: float, degrees: int) -> float:
    """The t that |T| exceeds with this probability.

    >>> round(critical(0.05, 2), 3)
    4.303
    """
    return float(stats.t.isf(level / 2, degrees))


@final
@dataclass(frozen=True)
class Paired:
    """Differences of two optimizers, one a seed.

    >>> found = Paired((1.0, 2.0, 3.0))
    >>> found.mean, found.deviation, round(found.t, 3), round(found.p, 4), round(found.margin, 3)
    (2.0, 1.0, 3.464, 0.0742, 2.484)
    """

    differences: tuple[float, ...]

    @property
    def mean(self) -> float:
        """Over the seeds."""
        return statistics.fmean(self.differences)

    @property
    def deviation(self) -> float:
        """With n − 1."""
        return statistics.stdev(self.differences)

    @property
    def error(self) -> float:
        """Of the mean: the deviation over √n."""
        return self.deviation / math.sqrt(len(self.differences))

    @property
    def t(self) -> float:
        """The mean over its error; infinite where all differences are one number that is not zero."""
        if self.error == 0:
            return math.copysign(math.inf, self.mean) if self.mean else 0.0
        return self.mean / self.error

    @property
    def p(self) -> float:
        """How often |t| would be as large if there were no difference; n − 1 degrees of freedom."""
        return two_sided(self.t, len(self.differences) - 1)

    @property
    def margin(self) -> float:
        """Mean ± margin has the true difference inside with probability 95 %."""
        return critical(0.05, len(self.differences) - 1) * self.error

    def columns(self) -> dict[str, Any]:
        """For the file; an infinite t is null."""
        numbers = {name: getattr(self, name) for name in ("mean", "deviation", "t", "p", "margin")}
        rounded = {name: float(f"{v:.5g}") if math.isfinite(v) else None for name, v in numbers.items()}
        return {"differences": [float(f"{d:.5g}") for d in self.differences], **rounded}
