"""Blocks: the partition of a model's parameters into layers, and how each layer's coordinates are packed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import final

import torch
from torch import Tensor, nn

from natgrad.model import Model
from natgrad.rules.base import Rule, trainable


@final
@dataclass(frozen=True)
class Place:
    """Where a parameter lies: its local name in the layer, its first position in the flattening order, its shape."""

    key: str
    start: int
    shape: torch.Size

    @property
    def span(self) -> slice:
        return slice(self.start, self.start + self.shape.numel())


@final
@dataclass(frozen=True)
class Block:
    """The parameters of one layer. With a rule they are packed as W [c o i]; without, they are one column [1 p 1]."""

    names: tuple[str, ...]
    places: tuple[Place, ...]
    shape: tuple[int, int, int]
    device: torch.device
    rule: Rule | None = None
    modules: tuple[nn.Module, ...] = ()

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def index(self) -> Tensor:
        """[p], the position in the flattening order of every packed coordinate, row-major over [c o i].

        Made when asked for: beside one backward pass, as many integers as there are parameters are not cheap.
        """
        spans = (torch.arange(place.span.start, place.span.stop, device=self.device) for place in self.places)
        if self.rule is None:
            return torch.cat(list(spans))
        local = {place.key: span.view(place.shape) for place, span in zip(self.places, spans, strict=True)}
        return self.rule.pack(self.modules[0], local).reshape(-1)

    def pack(self, flat: Tensor) -> Tensor:
        """W [*batch c o i] from flattened parameters [*batch p]."""
        if self.rule is None:
            packed = torch.cat([flat[..., place.span] for place in self.places], dim=-1)
        elif flat.ndim > 1:
            packed = flat[..., self.index]
        else:
            local = {place.key: flat[place.span].view(place.shape) for place in self.places}
            packed = self.rule.pack(self.modules[0], local)
        return packed.reshape(*flat.shape[:-1], *self.shape)

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Write W [*batch c o i] into flattened parameters [*batch p]."""
        batch = flat.shape[:-1]
        if self.rule is None:
            sizes = [place.shape.numel() for place in self.places]
            for place, part in zip(self.places, packed.reshape(*batch, -1).split(sizes, dim=-1), strict=True):
                flat[..., place.span] = part
            return
        local = self.rule.unpack(self.modules[0], packed.reshape(*batch, *self.shape))
        if local.keys() != {place.key for place in self.places}:  # a parameter was frozen or freed since
            flat[..., self.index] = packed.reshape(*batch, -1)
            return
        for place in self.places:
            flat[..., place.span].view(*batch, *place.shape).copy_(local[place.key])

    def without_rule(self) -> Block:
        """The same parameters, to be differentiated by ``torch.func`` instead of by the rule."""
        ordered = tuple(sorted(self.places, key=lambda place: place.start))
        return replace(self, places=ordered, shape=(1, self.size, 1), rule=None, modules=())


def partition(model: Model, rules: Sequence[Rule]) -> list[Block]:
    """Blocks of all trainable parameters, in flattening order: one a layer, with its rule where there is one.

    A layer is the set of parameters whose names agree up to the last dot. Modules that share exactly the same
    parameters are one layer with several uses; modules that share only some of them have no common packing, and a
    parameter that also belongs to a module without a rule is seen only in part: both go without a rule.
    """
    places, start = {}, 0
    for name, p in model.params.items():
        places[name] = Place(name, start, p.shape)
        start += p.numel()
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in model.params:
        grouped[name.rpartition(".")[0]].append(name)
    covered = _covered(model, rules)
    blocks = []
    for names in grouped.values():
        size = sum(places[name].shape.numel() for name in names)
        block = Block(tuple(names), tuple(places[name] for name in names), (1, size, 1), model.example.device)
        modules = covered.get(frozenset(names), ())
        blocks.append(_with_rule(block, modules, rules, places, model) if modules else block)
    return blocks


def _covered(model: Model, rules: Sequence[Rule]) -> Mapping[frozenset[str], tuple[nn.Module, ...]]:
    """Sets of parameter names whose every owner has a rule and owns exactly that set."""
    if model.module is None:
        return {}
    names = {id(p): name for name, p in model.params.items()}
    sets: dict[nn.Module, frozenset[str]] = {}
    owners: dict[str, list[nn.Module]] = defaultdict(list)
    for module in model.module.modules():
        own = frozenset(names[id(p)] for p in trainable(module).values())
        sets[module] = own
        for name in own:
            owners[name].append(module)
    covered: dict[frozenset[str], list[nn.Module]] = defaultdict(list)
    for module, own in sets.items():
        sharing = {other for name in own for other in owners[name]}
        if own and all(sets[other] == own and _rule(other, rules) for other in sharing):
            covered[own].append(module)
    return {own: tuple(modules) for own, modules in covered.items()}


def _rule(module: nn.Module, rules: Sequence[Rule]) -> Rule | None:
    return next((rule for rule in rules if rule.covers(module)), None)


def _with_rule(
    block: Block, modules: tuple[nn.Module, ...], rules: Sequence[Rule], places: Mapping[str, Place], model: Model
) -> Block:
    rule = _rule(modules[0], rules)
    assert rule is not None
    names = {id(p): name for name, p in model.params.items()}
    local = trainable(modules[0])
    own = tuple(replace(places[names[id(p)]], key=key) for key, p in local.items())
    return replace(block, places=own, shape=rule.shape(modules[0]), rule=rule, modules=modules)
