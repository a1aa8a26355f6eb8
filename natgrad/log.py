"""Messages that are logged once, and short."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import final
from weakref import WeakKeyDictionary

_log = logging.getLogger("natgrad")
_NAMED = 4  # how many names a message lists


@final
class OnceLogger:
    """Logs every message once, for a model that is used repeatedly.

    >>> logger = OnceLogger()
    >>> logger.log_once(logging.DEBUG, "%s has no rule", "w"), logger.log_once(logging.DEBUG, "%s has no rule", "v")
    (True, False)
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    @staticmethod
    def of(owner: object) -> OnceLogger:
        """The logger of a module, or of another owner: the same one for as long as that lives."""
        return _LOGGERS.setdefault(owner, OnceLogger())

    def log_once(self, level: int, message: str, *args: object) -> bool:
        """Log a message, unless one with the same format was logged before; return whether it was new."""
        new = message not in self._logged
        self._logged.add(message)
        if new:
            _log.log(level, message, *args)
        return new


_LOGGERS: WeakKeyDictionary[object, OnceLogger] = WeakKeyDictionary()


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are.

    >>> listed(["a", "b"]), listed(f"layers.{k}" for k in range(40))
    ('a, b', 'layers.0, layers.1, layers.2 and 37 more')
    """
    every = list(names)
    if len(every) <= _NAMED:
        return ", ".join(every)
    return f"{', '.join(every[: _NAMED - 1])} and {len(every) - _NAMED + 1} more"
