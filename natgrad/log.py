"""Messages: warnings where a user must act, else log records, once and short; numbers for a logger."""

from __future__ import annotations

import inspect
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias, final
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from natgrad.errors import NatgradWarning

_log = logging.getLogger("natgrad")
_NAMED = 4  # how many names a message lists
_INSIDE = ("natgrad", "torch", "logging", "contextlib")


@final
class Warner(logging.Handler):
    """Warns of what is logged as a warning, in the user's line: so it can be filtered, or be an error.

    >>> with warnings.catch_warnings(record=True) as seen:
    ...     warnings.simplefilter("always")
    ...     _log.warning("%s does not fit", "the key")
    >>> seen[0].category.__name__, str(seen[0].message)
    ('NatgradWarning', 'natgrad: the key does not fit')
    """

    def emit(self, record: logging.LogRecord) -> None:
        """Warn."""
        frame, level = inspect.currentframe(), 1
        while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _INSIDE:
            frame, level = frame.f_back, level + 1
        warnings.warn(f"natgrad: {record.getMessage()}", NatgradWarning, stacklevel=level)


_log.addHandler(Warner(logging.WARNING))


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


# Numbers for a logger: what `opt.metrics()` is made of.


Numbers: TypeAlias = dict[str, Any]  # a number, a tensor [], or None for what is not known


def flat(numbers: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors [] with their names for a logger: what the host knows in its memory, the rest where it is.

    >>> flat({"lr": 0.5, "loss": None})
    {'natgrad/lr': tensor(0.5000, dtype=torch.float64)}
    """
    return {
        f"natgrad/{name}": value.detach().clone()  # a captured step overwrites it
        if isinstance(value, Tensor)
        else torch.tensor(value, dtype=torch.float64, device="cpu")
        for name, value in numbers.items()
        if value is not None
    }


def of_groups(groups: Sequence[Mapping[str, Any]]) -> Numbers:
    """Learning rates of all groups, and the other numbers of the first."""
    more = {f"lr/{at}": group["lr"] for at, group in enumerate(groups) if at}
    return {key: groups[0][key] for key in ("lr", "damping", "momentum", "weight_decay") if key in groups[0]} | more


def nbytes(tensors: Iterable[Any]) -> int:
    """Bytes of the tensors among these."""
    return sum(t.nbytes for t in tensors if isinstance(t, Tensor))
