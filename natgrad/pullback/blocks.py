"""Blocks: the partition of a model's parameters into layers, and how each layer's coordinates are packed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias, final

import torch
from torch import Tensor, nn

from natgrad.model import Model
from natgrad.rules.base import Keys, Rule, trainable


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

    @property
    def title(self) -> str:
        """The names of the parameters, for people."""
        return " + ".join(self.names)

    @cached_property
    def keys(self) -> Keys:
        """The local names, in the order of the places."""
        return tuple(place.key for place in self.places)

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
        local = self.rule.unpack(self.modules[0], self.keys, packed.reshape(*batch, *self.shape))
        for place in self.places:
            flat[..., place.span].view(batch + place.shape).copy_(local[place.key])

    def packed(self, named: Mapping[str, Tensor]) -> Tensor:
        """W [c o i] from named tensors, without flattening."""
        if self.rule is None:
            return torch.cat([named[name].reshape(-1) for name in self.names]).view(self.shape)
        by_start = sorted(self.places, key=lambda place: place.start)
        keys = dict(zip(self.names, (place.key for place in by_start), strict=True))
        local = {keys[name]: named[name] for name in self.names}
        return self.rule.pack(self.modules[0], {key: local[key] for key in self.keys}).reshape(self.shape)

    def unpacked(self, packed: Tensor) -> dict[str, Tensor]:
        """The inverse of ``packed``."""
        by_start = sorted(self.places, key=lambda place: place.start)
        if self.rule is None:
            parts = packed.reshape(-1).split([place.shape.numel() for place in by_start])
            pairs = zip(self.names, by_start, parts, strict=True)
            return {name: part.view(place.shape) for name, place, part in pairs}
        local = self.rule.unpack(self.modules[0], self.keys, packed)
        return {name: local[place.key] for name, place in zip(self.names, by_start, strict=True)}

    def without_rule(self) -> Block:
        """The same parameters, to be differentiated by ``torch.func`` instead of by the rule."""
        ordered = tuple(sorted(self.places, key=lambda place: place.start))
        return replace(self, places=ordered, shape=(1, self.size, 1), rule=None, modules=())


@final
@dataclass(frozen=True)
class _Claim:
    """A parameter as one module has it: under which name, and in which of the module's layers."""

    module: nn.Module
    rule: Rule | None
    key: str
    layer: int

    @property
    def where(self) -> tuple[int, int]:
        return id(self.module), self.layer


_Claims: TypeAlias = dict[str, list[_Claim]]


def partition(model: Model, rules: Sequence[Rule]) -> list[Block]:
    """Blocks of all trainable parameters, in flattening order: one a layer, with its rule where there is one.

    Parameters that are together in a layer of every module that has them are one block, with several uses where there
    are several modules. A parameter that also belongs to a module without a rule is seen only in part, and one that
    two modules pack in different ways has no common packing: both go without a rule, together with the others whose
    names agree up to the last dot.
    """
    places, start = {}, 0
    for name, p in model.params.items():
        places[name] = Place(name, start, p.shape)
        start += p.numel()
    claims = _claims(model, rules)
    grouped: dict[object, list[str]] = defaultdict(list)
    for name in model.params:
        own = claims.get(name, [])
        ruled = bool(own) and all(claim.rule for claim in own)
        grouped[tuple(c.where for c in own) if ruled else name.rpartition(".")[0]].append(name)
    blocks = []
    for group, names in grouped.items():
        size = sum(places[name].shape.numel() for name in names)
        block = Block(tuple(names), tuple(places[name] for name in names), (1, size, 1), model.example.device)
        blocks.append(_with_rule(block, claims) if isinstance(group, tuple) else block)
    return blocks


def _claims(model: Model, rules: Sequence[Rule]) -> _Claims:
    """Every module's claims on the trainable parameters."""
    claims: _Claims = defaultdict(list)
    if model.module is None:
        return claims
    names = {id(p): name for name, p in model.params.items()}
    spoken_for: set[nn.Module] = set()  # submodules whose parameters the rule of a module above speaks for
    for module in model.module.modules():
        if module in spoken_for:
            continue
        rule = next((rule for rule in rules if rule.covers(module)), None)
        # What the rule does not speak for is the module's own all the same.
        own = trainable(module) if rule is None else trainable(module) | rule.parameters(module)
        layers = () if rule is None else rule.layers(module)
        spoken_for |= {module.get_submodule(key.rpartition(".")[0]) for key in own if "." in key}
        for key, p in own.items():
            layer = next((at for at, keys in enumerate(layers) if key in keys), -1)
            claims[names[id(p)]].append(_Claim(module, rule if layer >= 0 else None, key, layer))
    return claims


def _with_rule(block: Block, claims: _Claims) -> Block:
    """The block with the rule that all its modules agree on; without one where they do not."""
    first = [claims[name][0] for name in block.names]
    rule, module = first[0].rule, first[0].module
    assert rule is not None
    order = rule.layers(module)[first[0].layer]
    keys = [claim.key for claim in first]
    for name, key in zip(block.names, keys, strict=True):
        if any(type(claim.rule) is not type(rule) or claim.key != key for claim in claims[name]):
            return block
    modules = tuple(claim.module for claim in claims[block.names[0]])
    own = sorted(
        (replace(place, key=key) for place, key in zip(block.places, keys, strict=True)),
        key=lambda place: order.index(place.key),
    )
    chosen = tuple(place.key for place in own)
    shapes = {rule.shape(m, chosen) for m in modules}
    if len(shapes) > 1:
        return block
    return replace(block, places=tuple(own), shape=shapes.pop(), rule=rule, modules=modules)
