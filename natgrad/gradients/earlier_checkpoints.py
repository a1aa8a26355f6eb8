"""Checkpoints of the time when these optimizers were presets of ``NaturalGradient``: read, and never written.

There the state of a parameter has a dictionary "natgrad" of tensors beside its momentum: ``operator/S``, … of the
metric, ``inverse/S``, … of its inverse, ``flags``, and at the first parameter the number of steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

KEY = "natgrad"
_HAS_MOMENTUM = 8  # a bit of the flags: else the momentum is a place for one
_RENAMED = {"inverse/S": "S^-p", "inverse/A": "A^-p"}


def converted(state: Mapping[str, Any], names: Sequence[str], letters: Sequence[str]) -> dict[str, Any]:
    """A state in the layout of today, with these ``letters`` of a matrix; itself, if it has that layout."""
    if "param_groups" not in state or "state" not in state:
        raise ValueError('this is no state of an optimizer: it needs "state" and "param_groups". Nothing was loaded')
    if not any(KEY in of_param for of_param in state["state"].values()):
        return dict(state)
    keys = [key for group in state["param_groups"] for key in group["params"]]
    mine = [state["state"].get(key, {}).get(KEY, {}) for key in keys]
    if missing := [name for name, of_param in zip(names, mine, strict=False) if "flags" not in of_param]:
        raise ValueError(f"the state of {', '.join(missing)} is missing: it is incomplete. Nothing was loaded")
    first = mine[0]
    steps = int(first["step"])
    out = {}
    for key, of_param in zip(keys, mine, strict=True):
        rest = {what: t for what, t in state["state"][key].items() if what != KEY}
        if not int(of_param["flags"]) & _HAS_MOMENTUM:
            rest.pop("momentum", None)
        for place, t in of_param.items() if steps else ():
            letter = _RENAMED.get(place, place.removeprefix("operator/"))
            if letter in letters:
                rest[letter] = t
        out[key] = rest if steps else {}
    groups = [{**group, "steps": steps} for group in state["param_groups"]]
    return {**state, "state": out, "param_groups": groups}
