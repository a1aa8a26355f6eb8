"""Two mistakes in residuals that leave no error: differences of all pairs, and activations that are flat everywhere."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_DIFFERENCES = {"sub", "sub_", "subtract", "rsub", "__sub__", "__rsub__", "__isub__", "add", "add_", "__add__"}
_FLAT = {"relu", "relu_", "relu6", "threshold", "threshold_", "hardtanh", "hardtanh_", "clamp", "clamp_", "clamp_min"}


@final
class _Operations(TorchFunctionMode):
    """Looks at every operation: its name, the tensors among its arguments, and its result."""

    def __init__(self, look: Callable[[str, list[Tensor], Any], None]) -> None:
        super().__init__()
        self._look = look

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        tensors = [a for a in args if isinstance(a, Tensor)]
        out = func(*args, **(kwargs or {}))
        self._look(getattr(func, "__name__", ""), tensors, out)
        return out


def refuse_pairs(residuals: Callable[[], Tensor], shape: torch.Size) -> None:
    """Refuse residuals of this shape if they are differences of all pairs by mistake: [n, 1] − [n] is [n, n].

    One of the two depends on the unknowns (requires a gradient), the other is data, and nothing else of the shape
    [n, n] meets the difference: the residuals of a matrix have data for its pairs. Only residuals of n² numbers are
    evaluated again.
    """
    n = shape[0] if len(shape) == 2 else math.isqrt(shape.numel())
    if n < 2 or tuple(shape) not in ((n, n), (n * n,)):
        return
    differences: dict[int, Tensor] = {}  # of the differences of all pairs
    honest = False

    def look(name: str, operands: list[Tensor], out: Any) -> None:
        nonlocal honest
        is_outer = name in _DIFFERENCES and {tuple(t.shape) for t in operands} == {(n, 1), (n,)}
        if is_outer and [t.requires_grad for t in operands].count(True) == 1:
            differences[id(out)] = out
        elif any(id(t) in differences for t in operands):
            honest |= any(tuple(t.shape) == (n, n) and id(t) not in differences for t in operands)
            if isinstance(out, Tensor):
                differences[id(out)] = out

    with torch.enable_grad(), _Operations(look):
        end = residuals()
    if id(end) in differences and not honest:
        raise ValueError(
            f"the residuals have the shape {list(shape)}, because tensors [{n}] and [{n}, 1] meet in a sum or a "
            f"difference, and broadcasting makes all {n} × {n} pairs of them: give both one shape, by y[:, None] or "
            f".squeeze(-1) (if pairs are meant, write the row as [1, {n}])"
        )


def flat_activations(residuals: Callable[[], Any], net: nn.Module | None = None) -> list[str]:
    """The activations that return one value for all they get, and so have the derivative zero: "1 (ReLU)", or "relu".

    By the name of the module in ``net``, if it is one; else by that of the operation.
    """
    operations: list[str] = []
    modules: list[str] = []

    def is_flat(out: Any) -> bool:
        return isinstance(out, Tensor) and out.numel() > 0 and bool((out == out.reshape(-1)[0]).all())

    def look(name: str, operands: list[Tensor], out: Any) -> None:
        if name in _FLAT and any(t.requires_grad for t in operands) and is_flat(out):
            operations.append(name.rstrip("_"))

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def after(module: nn.Module, _: Any, out: Any) -> None:
            if is_flat(out):
                modules.append(f"{name} ({type(module).__name__})")

        return after

    plain = [] if net is None else [(k, m) for k, m in net.named_modules() if k and not list(m.parameters())]
    handles = [module.register_forward_hook(hook(name)) for name, module in plain]
    try:
        with torch.enable_grad(), _Operations(look):
            residuals()
    finally:
        for handle in handles:
            handle.remove()
    return list(dict.fromkeys(modules if modules and operations else operations))
