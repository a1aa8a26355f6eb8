"""Every operation that torch dispatches, seen as it runs: the one place that knows torch's dispatcher."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode


class OperationMode(TorchDispatchMode, ABC):
    """While it is entered, ``see`` is called for every operation, below autograd, in place of the operation."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """As ``with`` does, for those who begin in one hook and end in another."""
        self.__enter__()  # type: ignore[no-untyped-call]

    def leave(self) -> None:
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().removeprefix("aten::").split(".")[0]
        return self.see(name, func, args, kwargs or {})

    @abstractmethod
    def see(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what ``run(*args, **kwargs)`` does; ``name`` is that of aten, in place ones with their underscore."""


def operations_are_seen() -> bool:
    """Whether a mode, ours or another, looks at the operations that run now."""
    return _get_current_dispatch_mode() is not None


def storage(t: Tensor) -> int:
    """The address of the memory of a tensor, which its views share; 0 where it has none."""
    if t.layout is not torch.strided or t._is_zerotensor():  # forward-mode derivatives make zeros without memory
        return 0
    return t.untyped_storage().data_ptr()


def version(t: Tensor) -> int:
    """How often the memory of a tensor was written to."""
    return 0 if t.is_inference() else t._version


def base(t: Tensor) -> Tensor | None:
    """The tensor that this one is a view of, for autograd."""
    return t._base
