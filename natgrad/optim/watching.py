"""An optimizer watches its model for as long as it is held, and not until Python next looks for cycles."""

from __future__ import annotations

import gc
import sys
import weakref
from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from natgrad.optim.keeper import Keeper


def load_compiler() -> None:
    """Load torch's compiler, as any optimizer of torch does when it is made, and leave nothing of that behind.

    While it is loaded, ``torch.fx.wrap`` takes its own frame into a variable. That cycle, which is torch's own, holds
    all frames that were active with their variables: the optimizer that is being made, and the user's own function, in
    which it is. So the garbage of the import is collected at once, one time in a process.
    """
    if "torch._dynamo" not in sys.modules:
        import_module("torch._dynamo")
        gc.collect()


def watch(keeper: Keeper, owner: object) -> None:
    """Tell the keeper of the model's forward passes until its owner, the optimizer, is let go.

    Not until the keeper is: the traceback of an error in a pass holds it, and an interactive session holds its last
    error. The optimizer that the message of the error advises must not find the old one at work.
    """
    from natgrad.optim.watch import Watch

    handle = keeper.watched.register_forward_pre_hook(Watch(keeper), with_kwargs=True)
    weakref.finalize(owner, handle.remove)
