"""Parameter groups: what they may hold."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from natgrad.model import Model


def complete(model: Model, groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups that cover every trainable parameter once; those nobody named come first."""
    names = {id(p): name for name, p in model.params.items()}
    given = []
    for group in groups:
        params = group["params"]
        given.append({**group, "params": [params] if isinstance(params, Tensor) else list(params)})
    for group in given:
        strange = [p for p in group["params"] if id(p) not in names]
        if strange:
            raise ValueError(
                f"a parameter group holds {len(strange)} tensors that are not trainable parameters of the model"
            )
    taken = {id(p) for group in given for p in group["params"]}
    rest = [p for p in model.params.values() if id(p) not in taken]
    return ([{"params": rest}] if rest else []) + given


def check_numbers(group: Mapping[str, Any]) -> None:
    """Refuse numbers that no step can be made with."""
    for key in ("lr", "damping", "momentum", "weight_decay"):
        if not 0 <= group[key] < (1 if key == "momentum" else float("inf")):
            raise ValueError(
                f"{key} must be {'in [0, 1)' if key == 'momentum' else 'finite and ≥ 0'}, got {group[key]}"
            )


def common_damping(groups: Iterable[Mapping[str, Any]]) -> float:
    """λ, which all groups share: the metric is one."""
    dampings = {float(group["damping"]) for group in groups}
    if len(dampings) > 1:
        raise ValueError(f"the damping must be the same in all parameter groups, got {sorted(dampings)}")
    return dampings.pop()
