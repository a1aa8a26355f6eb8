"""The same network in other affine bases of its activations and pre-activations (003 theorems 2.1, 4.2 and 5.2)."""

from __future__ import annotations

import copy
from collections.abc import Collection

from torch import nn

from natgrad.errors import IncompatibleError
from natgrad.invariance.affine import Bases, Random, Transformed
from natgrad.invariance.unrolled import Unrolled
from natgrad.rules.base import trainable

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_RECURRENT = (nn.RNN, nn.LSTM, nn.GRU)


def reparametrise(model: nn.Module, seed: int | Bases = 0, *, keep: Collection[str] = ()) -> nn.Module:
    """A new network that computes the same function with a† = Ωa + γ and z = Φz† + τ in every layer (003 (3.3), (3.4)).

    Every ``Linear``, convolution and ``RNN``/``LSTM``/``GRU`` of a copy of the model is replaced by one in other bases;
    what lies between (activation functions, pooling, residual sums) stays, so that the transformed activation function
    of a layer is Ωφ(Φ· + τ) + γ with whatever φ the network has there. ``seed`` draws the bases, or is the ``Bases``:
    ``Original()`` gives the network itself in the same form, ``Chosen({name: Coordinates(…)})`` given ones. The inputs
    and outputs of the network keep their bases: Ω_0 is applied inside, and no Ω follows the last layer (ERRATA 45).

    ``keep`` names modules that stay as they are with all they contain. Trainable parameters of other layers must be
    frozen or kept; that is asked for by name.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    >>> x = torch.randn(5, 3, dtype=torch.float64)
    >>> torch.allclose(reparametrise(model, seed=1)(x), model(x))
    True
    """
    copied = copy.deepcopy(model)
    unknown = sorted(set(keep) - {name for name, _ in copied.named_modules()})
    if unknown:
        raise ValueError(f"keep names no module of the model: {', '.join(unknown)}")
    kept = {part for name, module in copied.named_modules() if name in keep for part in module.modules()}
    _check(copied, kept)
    bases = Random(seed) if isinstance(seed, int) else seed
    moved: dict[nn.Module, nn.Module] = {}
    for name, module in copied.named_modules():
        if module in kept or _reason(module):
            continue
        if isinstance(module, _RECURRENT):
            moved[module] = Unrolled(name, module, bases)
        elif isinstance(module, _LAYERS):
            moved[module] = Transformed(name, module, bases)
    if not moved:
        raise ValueError(f"there is nothing to transform in {type(model).__name__}: it has no {_names()} outside keep=")
    for parent in copied.modules():
        for name, child in parent._modules.items():  # named_children() would skip a layer that is there twice
            if child in moved:
                parent._modules[name] = moved[child]
    return moved.get(copied, copied)


def _names() -> str:
    *first, last = (kind.__name__ for kind in (*_LAYERS, *_RECURRENT))
    return f"{', '.join(first)} or {last}"


def _check(model: nn.Module, kept: set[nn.Module]) -> None:
    """Refuse what has no affine bases to change, by name."""
    others = []
    owners: dict[nn.Parameter, tuple[str, nn.Module]] = {}
    for name, module in model.named_modules():
        own = module._parameters.values()
        for parameter in [p for p in own if p is not None and p.requires_grad]:
            first, owner = owners.setdefault(parameter, (name, module))
            if owner is not module and not {owner, module} <= kept:
                raise IncompatibleError(
                    f"{first} and {name} share a parameter, so that one change of basis would have to fit both: "
                    f"give them parameters of their own, or keep both, keep=({first!r}, {name!r})"
                )
        if module not in kept and (reason := _reason(module)) and trainable(module):
            others.append(f"{name or 'the model'} ({reason})")
    if others:
        raise IncompatibleError(
            f"there is no change of basis for {', '.join(others)}: a layer must be exactly a {_names()}. Freeze its "
            "parameters with requires_grad_(False), or leave it as it is with keep=(name,)"
        )


def _reason(module: nn.Module) -> str:
    """Why the parameters of a module cannot be transformed; empty where they can."""
    if type(module) not in (*_LAYERS, *_RECURRENT):
        return type(module).__name__
    if "forward" in vars(module):
        return f"{type(module).__name__} with another forward"
    if isinstance(module, nn.RNNBase) and module.proj_size:
        return f"{type(module).__name__} with proj_size={module.proj_size}"
    if isinstance(module, nn.RNNBase) and module.dropout and module.num_layers > 1:
        return f"{type(module).__name__} with dropout={module.dropout}"
    extra = set(module._parameters) - {"weight", "bias"}
    if extra and not isinstance(module, nn.RNNBase):
        return f"{type(module).__name__} with the parameter {', '.join(sorted(extra))}"
    return ""
