"""Messages that are logged once."""

from __future__ import annotations

import logging
from typing import final

_log = logging.getLogger("natgrad")


@final
class OnceLogger:
    """Logs every message once, for a model that is used repeatedly.

    >>> logger = OnceLogger()
    >>> logger.log_once(logging.DEBUG, "%s has no rule", "w"), logger.log_once(logging.DEBUG, "%s has no rule", "v")
    (True, False)
    """

    def __init__(self) -> None:
        self._logged: set[str] = set()

    def log_once(self, level: int, message: str, *args: object) -> bool:
        """Log a message, unless one with the same format was logged before; return whether it was new."""
        new = message not in self._logged
        self._logged.add(message)
        if new:
            _log.log(level, message, *args)
        return new
