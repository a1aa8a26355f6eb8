"""One forward hook on many modules."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, TypeAlias, final

from torch import nn
from torch.utils.hooks import RemovableHandle

Hook: TypeAlias = Callable[[nn.Module, tuple[Any, ...], dict[str, Any], Any], Any]


@final
class Hooks:
    """Forward hooks, with keyword arguments, that are put on modules before every estimate and taken off after it.

    As ``register_forward_hook(hook, with_kwargs=True)``, which makes a handle with three weak references for every
    module. Here they all have the number of one handle, which torch gives to no other hook: one a module.

    >>> calls, layer = [], nn.Identity()
    >>> hooks = Hooks()
    >>> hooks.put(layer, lambda module, args, kwargs, output: calls.append(args), first=True)
    >>> _ = layer(1)
    >>> hooks.remove()
    >>> _ = layer(2)
    >>> calls
    [(1,)]
    """

    def __init__(self) -> None:
        self._number = RemovableHandle(OrderedDict()).id
        self._modules: list[nn.Module] = []

    def put(self, module: nn.Module, hook: Hook, first: bool) -> None:
        """``first``: before the hooks that the module has now."""
        module._forward_hooks[self._number] = hook
        module._forward_hooks_with_kwargs[self._number] = True
        if first:
            module._forward_hooks.move_to_end(self._number, last=False)  # type: ignore[attr-defined]
        self._modules.append(module)

    def remove(self) -> None:
        """From all modules."""
        for module in self._modules:
            module._forward_hooks.pop(self._number, None)
            module._forward_hooks_with_kwargs.pop(self._number, None)
        self._modules.clear()
