"""Where ``torch.optim`` keeps state: what the metric and the solver hold as tensors, parameter by parameter.

A checkpoint of torch (``torch.distributed.checkpoint``, ``get_state_dict``) knows the state of a parameter, in
``state_dict()["state"]``, and nothing beside it. There every parameter has a dictionary "natgrad" of tensors:

    operator/S, operator/A, …    of the metric, at the first parameter of their layer
    inverse/S, inverse/A, …      of its inverse
    flags                        what is true of the parameter, in bits

and the first parameter has all that belongs to none: numbers [], words and what else was found as bytes. A name has no
dot in it, since torch joins names by dots.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

Entry: TypeAlias = dict[str, Any]

KEY = "natgrad"
_HALF = "it is incomplete. Nothing was loaded"
IN_PLACE = (
    "torch.distributed.checkpoint loads what the optimizer has a place for, and here it has one after its first step "
    "only: make one step, on any batch, and then load. Nothing was loaded"
)
_OPERATORS = ("operator", "inverse")
_SETS = ("wanted", "outside", "unreached")  # of names of parameters
_NUMBERS = ("step", "estimated", "inverted", "inverse_damping", "outdated", "rank")
_FLOATS = ("inverse_damping", "mass")  # an integer that is loaded into would cut them
_HAS = ("has_operator", "has_inverse")
_HAS_MOMENTUM, _HAS_MOMENTS, _COUNTED = (1 << at + len(_SETS) for at in range(3))


def divided(
    entry: Mapping[str, Any],
    blank: Mapping[str, Mapping[str, Tensor]],
    words: Sequence[str],
    states: Mapping[str, Mapping[str, Any]],
    device: torch.device,
) -> dict[str, dict[str, Tensor]]:
    """The entry of a checkpoint, by the names of the parameters, whose ``states`` torch.optim has. Tensors are copied.

    ``words``: the names of what is in words in every state of such an optimizer. ``blank``: tensors that have the
    place of those that there are none of before the first step.
    """
    out: dict[str, dict[str, Tensor]] = {name: {} for name in states}
    first = next(iter(states))
    for operator in _OPERATORS:
        for key, t in (entry[operator] or blank[operator]).items():
            owner, slash, rest = key.partition("/")
            owned = slash and owner in out
            place = f"{operator}/{rest}" if owned else f"{operator}//{key}"
            out[owner if owned else first][_without_dots(place)] = t.clone()
    for name, state in states.items():
        bits = sum((name in entry[of]) << at for at, of in enumerate(_SETS))
        bits += _HAS_MOMENTUM * ("momentum" in state) + _HAS_MOMENTS * ("exp_avg" in state)
        bits += _COUNTED * bool(entry["counted"])  # of all alike: the other numbers have no place in older states
        out[name]["flags"] = torch.tensor(bits)
    numbers = {name: entry[name] for name in _NUMBERS} | dict(zip(("mass", "step_size"), entry["mass"], strict=True))
    numbers |= {f"has_{operator}": bool(entry[operator]) for operator in _OPERATORS}
    out[first] |= {name: _number(name, value) for name, value in numbers.items()}
    out[first]["generator"] = entry["generator"].to(device, copy=True)
    out[first]["words"] = _bytes({name: entry[name] for name in words} | {"names": list(states)}, device)
    placed = {*_OPERATORS, *_SETS, *_NUMBERS, *words, "mass", "counted", "generator"}
    if others := {name: value for name, value in entry.items() if name not in placed and value}:
        out[first]["found"] = _bytes(others, device)
    return out


def joined(state: Mapping[str, Any]) -> Entry:
    """A state with its metric in one entry beside those of torch.optim, as in version 0.1.0, from either layout."""
    if KEY in state:
        return {**state, KEY: renamed(state[KEY])}
    keys = [key for group in state.get("param_groups", ()) for key in group["params"]]
    plain = {key: dict(of_param) for key, of_param in state.get("state", {}).items()}
    mine = [plain.get(key, {}).pop(KEY, {}) for key in keys]
    if not mine or "words" not in mine[0]:
        raise ValueError('this is not the state of a NaturalGradient: it has no "natgrad" entry')
    words = _read(mine[0], "words")
    entry, names, numbers = _shared(mine[0]), words.pop("names"), mine[0]
    if len(names) != len(keys):
        raise ValueError(
            f"the state has {len(keys)} parameters in its groups, and was saved with {len(names)}: {_HALF}"
        )
    if missing := [name for name, of_param in zip(names, mine, strict=True) if "flags" not in of_param]:
        raise ValueError(f"the state of {', '.join(missing)} is missing: {_HALF}")
    for name, key, of_param in zip(names, keys, mine, strict=True):
        bits = int(of_param["flags"])
        entry["counted"] = bool(bits & _COUNTED)
        for at, of in enumerate(_SETS):
            entry[of] += [name] if bits >> at & 1 else []
        if not bits & _HAS_MOMENTUM:
            plain.get(key, {}).pop("momentum", None)
        for what, bit in (("momentum", _HAS_MOMENTUM), ("exp_avg", _HAS_MOMENTS)):
            if bits & bit and what not in plain.get(key, {}):
                raise ValueError(f"{what} of {name} is missing in the state. {IN_PLACE}")
        for place, t in of_param.items():
            operator, _, rest = _with_dots(place).partition("/")
            if operator in _OPERATORS and numbers[f"has_{operator}"]:
                entry[operator][rest[1:] if rest.startswith("/") else f"{name}/{rest}"] = t
    for operator in _OPERATORS:
        if numbers[f"has_{operator}"] and not entry[operator]:
            raise ValueError(f"the metric is missing in the state ({operator}). {IN_PLACE}")
    return {**state, "state": {key: of_param for key, of_param in plain.items() if of_param}, KEY: entry | words}


def renamed(entry: Mapping[str, Any]) -> Entry:
    """An entry of version 0.1.0, where the fallback was called the rest, under the names of today."""
    if "rest" in entry.get("parameters", ()):
        return dict(entry)
    present = [operator for operator in _OPERATORS if isinstance(entry.get(operator), dict)]
    return dict(entry) | {
        operator: {re.sub(r"^rest/", "fallback/", key): t for key, t in entry[operator].items()} for operator in present
    }


def _shared(first: Mapping[str, Tensor]) -> Entry:
    """What belongs to no parameter."""
    needed = [*_NUMBERS, *_HAS, "mass", "step_size", "generator"]
    if missing := [name for name in needed if name not in first]:
        raise ValueError(f'the "natgrad" entry of the state has no {", ".join(missing)}: {_HALF}')
    entry: Entry = {operator: {} for operator in _OPERATORS} | {of: [] for of in _SETS}
    entry |= {name: first[name].item() for name in _NUMBERS}
    entry |= {"mass": (first["mass"].item(), first["step_size"].item()), "generator": first["generator"].cpu()}
    return entry | (_read(first, "found") if "found" in first else {})


def _number(name: str, value: float) -> Tensor:
    """[], on the host, exactly."""
    return torch.tensor(value, dtype=torch.float64 if name in _FLOATS else None)


def _bytes(content: Mapping[str, Any], device: torch.device) -> Tensor:
    return torch.tensor(list(json.dumps(content, ensure_ascii=False).encode()), dtype=torch.uint8, device=device)


def _read(first: Mapping[str, Tensor], name: str) -> Entry:
    try:
        content: Entry = json.loads(bytes(first[name].tolist()).decode())
    except ValueError as error:
        raise ValueError(f'"{name}" of the state cannot be read: it is damaged. Nothing was loaded') from error
    return content


def _without_dots(place: str) -> str:
    return place.replace("%", "%25").replace(".", "%2E")


def _with_dots(place: str) -> str:
    return place.replace("%2E", ".").replace("%25", "%")
