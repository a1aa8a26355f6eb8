"""A dictionary of bounded size that evicts the least recently used entry."""

from __future__ import annotations

from collections import OrderedDict
from typing import TypeVar, final

K = TypeVar("K")
V = TypeVar("V")


@final
class LRU(OrderedDict[K, V]):
    """At most ``capacity`` entries; ``get`` and assignment make an entry the most recent one.

    >>> cache = LRU[str, int](capacity=2)
    >>> cache["a"], cache["b"] = 1, 2
    >>> cache.get("a")
    1
    >>> cache["c"] = 3
    >>> list(cache)
    ['a', 'c']
    """

    def __init__(self, *, capacity: int) -> None:
        super().__init__()
        self.capacity = capacity

    def get(self, key: K, default: V | None = None) -> V | None:  # type: ignore[override]
        try:
            self.move_to_end(key)
        except KeyError:
            return default
        return self[key]

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.capacity:
            self.popitem(last=False)
