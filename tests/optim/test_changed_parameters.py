"""A model whose parameters changed after the optimizer was made."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from natgrad.model import Model
from natgrad.watch.model import ModelState


def made(module: nn.Module) -> ModelState:
    return ModelState(Model.of(module), module)


def test_a_replaced_module_or_parameter_is_noticed_at_any_depth() -> None:
    module = nn.Sequential(nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    parameters = made(module)
    assert not parameters.moved(certain=True)
    inner = module[0]
    module[0] = nn.Sequential(nn.Linear(1, 1))
    assert parameters.moved(certain=False)
    assert parameters.moved(certain=True)
    module[0] = inner
    assert not parameters.moved(certain=True)
    module[1].weight = nn.Parameter(torch.ones(1, 1))
    assert parameters.moved(certain=True)


def test_an_added_module_does_not_take_parameters_away() -> None:
    first = nn.Sequential(nn.Linear(1, 1))
    module = nn.Sequential(first, nn.Linear(1, 1))
    parameters = made(module)
    first.append(module[1])  # torch now lists these parameters under their first name only
    assert not parameters.moved(certain=True)


class Listed(nn.Module):
    """Has its parameter under no key."""

    def __init__(self) -> None:
        super().__init__()
        self.own = [nn.Parameter(torch.ones(1))]

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        yield "own", self.own[0]


def test_a_parameter_that_only_the_class_knows_of_is_asked_for_by_name() -> None:
    module = Listed()
    parameters = made(module)
    assert not parameters.moved(certain=True)
    module.own[0] = nn.Parameter(torch.ones(1))
    assert parameters.moved(certain=True)


def test_a_compiled_forward_is_found_beside_plain_modules_of_its_type() -> None:
    last = nn.Linear(1, 1)
    parameters = made(nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1), last)))
    assert not parameters.compiled()
    last.forward = torch.compile(last.forward, backend="eager")  # type: ignore[method-assign]
    assert parameters.compiled()
    del last.forward
    assert not parameters.compiled()
    last.compile(backend="eager")
    assert parameters.compiled()


def test_a_compiled_module_is_found_where_another_was_and_where_none_was() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.Tanh())
    parameters = made(module)
    module[1] = nn.ReLU()
    module[1].compile(backend="eager")
    assert not parameters.moved(certain=True)
    assert parameters.compiled()
    module = nn.Sequential(nn.Linear(1, 1))
    parameters = made(module)
    module.append(nn.ReLU())
    assert not parameters.compiled()
    module[1].compile(backend="eager")
    assert parameters.compiled()
    module[1] = nn.Tanh()
    assert not parameters.compiled()
    module[1] = nn.ReLU()
    module[1].compile(backend="eager")
    assert parameters.compiled()
