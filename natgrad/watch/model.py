"""Whether a model is still the one that an optimizer was made for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor, nn
from torch.jit import ScriptModule

from natgrad.accelerate.modules import (
    children_in,
    children_of,
    compiled_from,
    parameters_in,
    replaced,
)
from natgrad.errors import NatgradError
from natgrad.log import listed
from natgrad.model import Model, any_compiled, plain_name
from natgrad.pullbacks.layer import Block
from natgrad.watch.base import Watcher


@final
class ModelState:
    """A module as it was when the optimizer was made: its parameters, and the forward of its layers.

    ``moved`` and ``compiled`` are called in every pass that is estimated, and are quick. ``blocks``: the layers. Those
    that have a rule must compute what they did when the rule was chosen.
    """

    def __init__(self, model: Model, module: nn.Module, blocks: Sequence[Block] = ()) -> None:
        self._model, self._module = model, module
        self._inside, self._children = self._tree()
        mine = {id(p) for p in model.params.values()}
        modules = [m for m in module.modules() if not isinstance(m, ScriptModule)]  # they stay what they are
        self._parents = [(m, key, child) for m in modules for key, child in children_in(m).items()]
        self._owners = [(m, key, p) for m in modules for key, p in parameters_in(m).items() if id(p) in mine]
        # Parameters that no module holds under a key: only ``named_parameters`` of the user's class lists them.
        self.hides_parameters: bool = bool(mine - {id(p) for _, _, p in self._owners})
        self.frozen_at_first: list[tuple[str, nn.Parameter]] = [
            (name, p) for name, p in module.named_parameters() if not p.requires_grad and id(p) not in mine
        ]
        self._kinds = {name: _kind(p) for name, p in model.params.items()}
        self.first_seen: list[tuple[Tensor, torch.dtype, torch.device]] = [
            (p, *_kind(p)) for p in model.params.values()
        ]
        ruled = ((block, m) for block in blocks for kind in block.kinds if kind.rule for m in kind.modules)
        self._forwards = [(block.title, m, _own_forward(m), type(m).forward) for block, m in ruled]

    def moved(self, certain: bool) -> bool:
        """Whether the pass that begins is at other parameters, or does not train those that there are.

        Either ``torch.func.functional_call`` put them there for a while, or a module was replaced. A parameter is
        where it was if every module above it has the same children, and its own module holds it: names are compared
        only otherwise, or where the module has parameters under no key and the answer must be ``certain``.

        Parameters that are frozen in a pass belong to the step of another model: a generator is trained through a
        frozen discriminator. If they still are, the step of this optimizer refuses them.
        """
        if (self.changed() or (certain and self.hides_parameters)) and self.missing():
            return True
        if certain and self._other():
            self.refuse_cast()
            return True
        # A layer with another forward: the step of this optimizer refuses it, but the pass may belong to a new one.
        return certain and bool(self.patched())

    def compiled(self) -> bool:
        """Whether the module, or one inside it, is compiled."""
        if children_of(self._inside) != self._children:
            self._inside, self._children = self._tree()
        return any_compiled(self._inside)

    def _tree(self) -> tuple[list[nn.Module], list[nn.Module | None]]:
        """All modules, and the children that they have."""
        inside = list(self._module.modules())
        return inside, children_of(inside)

    def patched(self) -> list[str]:
        """The layers with a rule whose forward is not the one that the rule was chosen for."""
        others = [
            at
            for at in self._forwards
            if at[1].__dict__.get("forward") is not at[2] or type(at[1]).forward is not at[3]
        ]
        return [title for title, module, given, of_class in others if not _same_forward(module, given, of_class)]

    def frozen(self) -> list[str]:
        """The parameters of the optimizer that are frozen now."""
        return [name for name, p in self._model.params.items() if not p.requires_grad]

    def refuse_cast(self) -> None:
        """Raise if a parameter has another dtype or device than it had."""
        for name, p in self._model.params.items():
            dtype, device = self._kinds[name]
            if p.dtype != dtype or p.device != device:
                was, now = (f"{dtype} on {device}" for dtype, device in (self._kinds[name], _kind(p)))
                raise NatgradError(
                    f"{name} is {now}, and was {was} when the optimizer was made: the metric is in that precision and "
                    "on that device. Call model.to(…), .double() or .cuda() first, and make the optimizer after it"
                )

    def _other(self) -> bool:
        """Whether a parameter was frozen, cast or moved."""
        # Lists: generators take twice as long, in every pass.
        return bool(
            [p for p, dtype, at in self.first_seen if not p.requires_grad or p.dtype is not dtype or p.device != at]
        )

    def changed(self) -> bool:
        """Whether a module has another child or parameter than it had."""
        return replaced(self._parents, self._owners)

    def missing(self) -> list[str]:
        """The parameters of the optimizer that the module no longer has."""
        now = {plain_name(name): p for name, p in self._module.named_parameters()}
        leaves = self._model.leaves
        kept = [name for name, p in self._model.params.items() if now.get(name) is p or now.get(name) is leaves[name]]
        return [name for name in self._model.params if name not in kept]


@final
class ModelWatch(Watcher):
    """Refuses a step after which happened what the optimizer cannot follow.

    A module was replaced, parameters were frozen or cast, or a layer that has a rule got another forward. Parameters
    that were frozen at first, and are not any more, are named in the log.
    """

    def __init__(self, state: ModelState) -> None:
        super().__init__()
        self._state = state

    def gradients(self, grads: Mapping[str, Tensor], *, whole: bool, due: bool) -> None:
        state = self._state
        if thawed := [name for name, p in state.frozen_at_first if p.requires_grad]:
            self.warn(
                f"{listed(thawed)} was frozen when the optimizer was made, and is trainable now, but not stepped: "
                "make a new one"
            )
        p, dtype, device = state.first_seen[0]
        if p.dtype is not dtype or p.device != device:  # a model is cast or moved as a whole
            state.refuse_cast()
        changed = state.changed()
        if changed or due or not whole:
            self._refuse_missing(changed)
            if frozen := state.frozen():
                raise NatgradError(
                    f"{', '.join(frozen)} was trainable when the optimizer was made, and is frozen now: the metric is "
                    "over the parameters that were trainable at first. Make a new optimizer, or leave it trainable "
                    "with lr=0"
                )
        if patched := state.patched() if due else []:
            raise NatgradError(
                f"the forward of the layer {', '.join(dict.fromkeys(patched))} was replaced after the optimizer was "
                "made: the layer rule, which was chosen for the one before, would give a wrong metric. Make a new "
                "optimizer for the model as it is now"
            )

    def _refuse_missing(self, changed: bool) -> None:
        state = self._state
        if missing := state.missing() if changed or state.hides_parameters else []:
            raise NatgradError(
                f"the model no longer has {', '.join(missing)}, which the optimizer was made with: a module was "
                "replaced. Make a new optimizer for the model as it is now"
            )


def _kind(p: Tensor) -> tuple[torch.dtype, torch.device]:
    return p.dtype, p.device


def _own_forward(module: nn.Module) -> Any:
    """The forward that was set on the module itself, in place of that of its class; else None."""
    return module.__dict__.get("forward")


def _same_forward(module: nn.Module, given: Any, of_class: Any) -> bool:
    """Whether the forward that a module has now is the one that it had, compiled, or kept from being compiled."""
    if type(module).forward is not of_class:
        return False
    now = _own_forward(module)
    inner = compiled_from(now)
    # torch.compile wraps functions from torch's own files once more.
    candidates = [now] if inner is None else [inner, getattr(inner, "__wrapped__", None)]
    if given is not None:
        return given in candidates
    return any(getattr(f, "__func__", None) is of_class and f.__self__ is module for f in candidates)
