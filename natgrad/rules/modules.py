"""What a module is, and which parameters are its own."""

from __future__ import annotations

from torch import Tensor, nn


def trainable(module: nn.Module) -> dict[str, Tensor]:
    """The trainable parameters that the module itself owns, by local name."""
    # named_parameters(recurse=False) is slow, and this is asked for every layer of every estimate.
    return {name: p for name, p in module._parameters.items() if p is not None and p.requires_grad}


def plain(module: nn.Module, kind: type[nn.Module], *names: str) -> bool:
    """Whether a module is of this very type, with no parameters but these and the forward of its class.

    Pruning, spectral norm and the like leave the type, and put other parameters or another forward in.
    """
    return type(module) is kind and module._parameters.keys() <= set(names) and "forward" not in vars(module)
