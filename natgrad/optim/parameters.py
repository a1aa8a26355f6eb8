"""What becomes of every parameter: the metric moves it, AdamW steps it, or it rests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import final


class ParameterStatus(Enum):
    """What moves a parameter, and why; docs/architecture.md has the table."""

    METRIC = "the metric moves it"
    ADAMW = "AdamW steps it, by its shape, its module or its group"
    RULELESS = "AdamW steps it, as the first pass that was estimated shows no layer rule for it"
    UNSEEN = "it rests: the outputs of no estimate so far depend on it"
    PENDING = "it rests: it has a gradient, and the metric is due in every step until an estimate has seen it"
    OUTSIDE = "the loss reaches it, but not through the outputs: AdamW steps it if it may, else it rests"


@final
class ParameterTable:
    """The status of every parameter, by name, and the sets of names that a step asks for.

    ``by_adamw``: those that AdamW steps from the beginning. ``backed``: those that it steps if the metric does not see
    them, and, where a metric needs layer rules (``ruled``), if no rule covers them.

    >>> table = ParameterTable(["weight", "gain"], by_adamw=["gain"], backed=["weight"], ruled=True)
    >>> table.put(ParameterStatus.OUTSIDE, ["weight"])
    >>> sorted(table.adamw), sorted(table.unseen)
    (['gain', 'weight'], ['weight'])
    >>> table.see([])
    >>> table.status["weight"].name
    'METRIC'
    """

    def __init__(self, names: Iterable[str], *, by_adamw: Iterable[str], backed: Iterable[str], ruled: bool) -> None:
        self.backed, self._by_adamw = frozenset(backed), frozenset(by_adamw)
        self.optional = self.backed if ruled else frozenset()
        self.status = dict.fromkeys(names, ParameterStatus.METRIC)
        self.reset({})

    def reset(self, names: Mapping[ParameterStatus, Iterable[str]]) -> None:
        """The statuses of the beginning, but for these; a later one takes the place of an earlier."""
        self.status = {
            name: ParameterStatus.ADAMW if name in self._by_adamw else ParameterStatus.METRIC for name in self.status
        }
        for status, group in names.items():
            self.status.update(dict.fromkeys(group, status))
        self._collect()

    def put(self, status: ParameterStatus, names: Iterable[str]) -> None:
        """Give the parameters this status."""
        if fresh := dict.fromkeys(names, status):
            self.status.update(fresh)
            self._collect()

    def see(self, unseen: Iterable[str]) -> None:
        """Every estimate so far has seen all parameters of the metric but these."""
        now = frozenset(unseen) - self.without_metric
        if now == self.unseen:
            return
        self.status.update(dict.fromkeys(self.unseen - now, ParameterStatus.METRIC))
        self.status.update(dict.fromkeys(now - self.unseen, ParameterStatus.UNSEEN))
        self._collect()

    def _collect(self) -> None:
        names = {status: frozenset(n for n, its in self.status.items() if its is status) for status in ParameterStatus}
        self.ruleless = names[ParameterStatus.RULELESS]
        self.pending, self.outside = names[ParameterStatus.PENDING], names[ParameterStatus.OUTSIDE]
        self.unseen = names[ParameterStatus.UNSEEN] | self.pending | self.outside
        self.without_metric = names[ParameterStatus.ADAMW] | self.ruleless  # they are not in its model
        self.adamw = self.without_metric | (self.outside & self.backed)
