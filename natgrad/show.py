"""How objects look: one line for ``repr``, and what ``print`` says in a notebook."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

_ENTRIES, _WIDTH = 3, 60  # shown of a sequence, and characters of one value


def brief(thing: Any) -> str:
    """The ``repr`` of a dataclass or named tuple in one line: shapes of tensors, names of modules and functions.

    >>> from typing import NamedTuple
    >>> import torch
    >>> class Pair(NamedTuple):
    ...     values: Tensor
    ...     names: tuple[str, ...]
    >>> brief(Pair(torch.zeros(3, 2), ("a", "b", "c", "d")))
    "Pair(values=[3 2], names=('a', 'b', 'c', … 4 in all))"
    """
    names = [f.name for f in fields(thing) if f.repr] if is_dataclass(thing) else [*type(thing).__annotations__]
    return f"{type(thing).__name__}({', '.join(f'{name}={_in_words(getattr(thing, name))}' for name in names)})"


def _in_words(value: Any) -> str:
    if isinstance(value, Tensor) and value.ndim:
        return f"[{' '.join(map(str, value.shape))}]"
    if isinstance(value, float | Tensor):
        return f"{float(value):.4g}"
    if isinstance(value, nn.Module) or callable(value):
        return getattr(value, "__name__", type(value).__name__)
    if isinstance(value, Mapping | list | tuple):
        pairs = value.items() if isinstance(value, Mapping) else (("", entry) for entry in value)
        shown = [f"{key}: {_in_words(one)}" if key else _in_words(one) for key, one in [*pairs][:_ENTRIES]]
        more = [f"… {len(value)} in all"] if len(value) > _ENTRIES else []
        inside = ", ".join(shown + more)
        return f"{{{inside}}}" if isinstance(value, Mapping) else f"({inside})"
    text = "" if is_dataclass(value) and _holds_much(value) else " ".join(repr(value).split())
    if isinstance(value, str) or (text and " object at 0x" not in text and len(text) <= _WIDTH):
        return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}…"
    return f"{type(value).__name__}(…)"


def _holds_much(value: Any) -> bool:
    """Whether the text of a dataclass has no end: it holds tensors or modules, or what holds them."""
    return any(isinstance(getattr(value, f.name), Tensor | nn.Module | Mapping | list | tuple) for f in fields(value))


def as_html(thing: Any) -> str:
    """What ``print`` says, for a notebook: lines are not wrapped, wide tables scroll."""
    return f'<pre style="overflow-x: auto; white-space: pre">{html.escape(str(thing))}</pre>'
