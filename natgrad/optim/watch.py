"""The hook on the model's forward pass. It is imported where an optimizer is made: torch's compiler loads slowly."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any, final

import torch
from torch import nn

from natgrad.wrapped import compiling

if TYPE_CHECKING:
    from natgrad.optim.keeper import Keeper

_WHY = (
    "an optimizer of natgrad looks at the inputs of this call. With fullgraph=True compile the model by "
    "torch.compile(model) and give the compiled model to the optimizer"
)


@final
class Watch:
    """Tells a keeper of every call. It does not keep the keeper alive, and copies of the model are not watched."""

    def __init__(self, keeper: Keeper | None = None) -> None:
        self._keeper = None if keeper is None else weakref.ref(keeper)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        # No training pass, and torch.export refuses what is not compiled: it is not reached there.
        if not torch.compiler.is_exporting():
            self._look(args, kwargs)

    # The call itself is not compiled, and so sees whether its caller is.
    @torch.compiler.disable(recursive=False, reason=_WHY)  # type: ignore[untyped-decorator]
    def _look(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        keeper = None if self._keeper is None else self._keeper()
        if keeper is not None:
            _tell(keeper, args, kwargs, compiling())

    def __reduce__(self) -> tuple[type[Watch], tuple[()]]:
        return Watch, ()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _tell(keeper: Keeper, args: tuple[Any, ...], kwargs: dict[str, Any], inside: bool) -> None:
    keeper.before(args, kwargs, inside)
