"""Blocks: the partition of a model's parameters into layers, and how each layer's coordinates are packed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor, nn

from natgrad.model import Model
from natgrad.rules.base import Rule, trainable


@final
@dataclass(frozen=True)
class Block:
    """The parameters of one layer. With a rule they are packed as W [c o i]; without, they are one column [1 p 1].

    ``index`` [p] holds the position in the flattening order of every packed coordinate, row-major over [c o i].
    """

    names: tuple[str, ...]
    index: Tensor
    shape: tuple[int, int, int]
    rule: Rule | None = None
    modules: tuple[nn.Module, ...] = ()

    @property
    def size(self) -> int:
        return self.index.numel()

    def pack(self, flat: Tensor) -> Tensor:
        """W [*batch c o i] from flattened parameters [*batch p]."""
        return flat[..., self.index].reshape(*flat.shape[:-1], *self.shape)

    def unpack(self, packed: Tensor, flat: Tensor) -> None:
        """Write W [*batch c o i] into flattened parameters [*batch p]."""
        flat[..., self.index] = packed.reshape(*flat.shape[:-1], -1)

    def without_rule(self) -> Block:
        """The same parameters, to be differentiated by ``torch.func`` instead of by the rule."""
        return replace(self, index=self.index.sort().values, shape=(1, self.size, 1), rule=None, modules=())


def partition(model: Model, rules: Sequence[Rule]) -> list[Block]:
    """Blocks of all trainable parameters, in flattening order: one a layer, with its rule where there is one.

    A layer is the set of parameters whose names agree up to the last dot. Modules that share exactly the same
    parameters are one layer with several uses; modules that share only some of them have no common packing, and a
    parameter that also belongs to a module without a rule is seen only in part: both go without a rule.
    """
    offsets, start = {}, 0
    for name, p in model.params.items():
        offsets[name] = torch.arange(start, start + p.numel(), device=model.example.device).view(p.shape)
        start += p.numel()
    grouped: dict[str, list[str]] = defaultdict(list)
    for name in model.params:
        grouped[name.rpartition(".")[0]].append(name)
    covered = _covered(model, rules)
    blocks = []
    for names in grouped.values():
        flat = torch.cat([offsets[name].reshape(-1) for name in names])
        block = Block(tuple(names), flat, (1, flat.numel(), 1))
        modules = covered.get(frozenset(names), ())
        blocks.append(_with_rule(block, modules, rules, offsets, model) if modules else block)
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
    block: Block, modules: tuple[nn.Module, ...], rules: Sequence[Rule], offsets: Mapping[str, Tensor], model: Model
) -> Block:
    rule = _rule(modules[0], rules)
    assert rule is not None
    names = {id(p): name for name, p in model.params.items()}
    # Packing the positions themselves says where every packed coordinate lies in the flattening order.
    local = {key: offsets[names[id(p)]] for key, p in trainable(modules[0]).items()}
    packed = rule.pack(modules[0], local)
    c, o, i = packed.shape
    return replace(block, index=packed.reshape(-1), shape=(c, o, i), rule=rule, modules=modules)
