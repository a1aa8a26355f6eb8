"""The slots of a natural gradient: metric, structure, solver, step rule."""

from __future__ import annotations

from typing import Any

from natgrad.families.base import Family


def check_slots(**slots: tuple[Any, type]) -> None:
    """Refuse what does not belong into a slot: a class instead of an instance, a name, two slots swapped."""
    for slot, (value, kind) in slots.items():
        if not isinstance(value, kind):
            got = f"the class {value.__name__}: write {value.__name__}(…)" if isinstance(value, type) else repr(value)
            if isinstance(value, Family) and slot == "metric":
                got += f", a family: write Fisher({value!r})"
            raise TypeError(f"{slot} must be a natgrad {kind.__name__}, got {got}")
