"""Where a NaN or an infinity comes from. Looking is slow and happens only after one was seen."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from natgrad.errors import NonFiniteError
from natgrad.model import Inputs, Model, tensors_of


def check_outputs(model: Model, x: Inputs, y: Tensor) -> None:
    """Raise if an output is not finite, naming the first module whose output is not."""
    if bool(torch.isfinite(y.detach()).all()):
        return
    raise NonFiniteError(f"the outputs are not finite; {_origin(model, x)}. Nothing was changed")


def _origin(model: Model, x: Inputs) -> str:
    for name, p in model.params.items():
        if not bool(torch.isfinite(p.detach()).all()):
            return f"parameter {name} holds NaN or infinity: reload it from a checkpoint"
    if not all(bool(torch.isfinite(t).all()) for t in tensors_of(x) if t.is_floating_point()):
        return "the inputs hold NaN or infinity: clean the batch"
    first = _first_module(model, x)
    return f"the first layer with NaN or infinity is {first}: lower the learning rate or raise the damping"


def _first_module(model: Model, x: Inputs) -> str:
    if model.module is None:
        return "the function itself"
    found: list[str] = []
    handles = []
    for name, module in model.module.named_modules():

        def look(_m: nn.Module, _x: Any, out: Any, name: str = name, kind: str = type(module).__name__) -> None:
            if not all(bool(torch.isfinite(t).all()) for t in tensors_of(out) if t.is_floating_point()):
                found.append(f"{name or 'the model'} ({kind})")

        handles.append(module.register_forward_hook(look))
    try:
        with torch.no_grad():
            model(None, x)
    finally:
        for handle in handles:
            handle.remove()
    return found[0] if found else "outside every module"
