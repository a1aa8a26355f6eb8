"""``memory=`` bounds what a structure may occupy: that many bytes, by default half of what the device has."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch

import natgrad as ng
from tests.pullback.test_neighbours import graph

PHYSICAL = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def test_the_default_is_half_of_the_memory_of_the_device() -> None:
    model, x = torch.nn.Linear(3, 2), torch.ones(4, 3)
    assert ng.pullback(model, x, ng.Euclidean()).memory == PHYSICAL // 2
    assert ng.pullback(model, x, ng.Euclidean(), memory=10**6).memory == 10**6
    assert ng.KFAC(model, ng.Euclidean(), lr=0.1).tracker.observer.bound == PHYSICAL // 2


def test_a_structure_that_exceeds_the_default_is_refused_with_bytes_and_what_fits() -> None:
    model, x = torch.nn.Linear(2**14, 2**10, bias=False), torch.ones(1, 2**14)
    needed = 4 * model.weight.numel() ** 2
    message = rf"needs {needed:,} bytes, over the bound memory={PHYSICAL // 2:,}. These fit: .*Diagonal"
    with pytest.raises(ng.errors.MemoryBoundError, match=message):
        ng.Dense().estimate(ng.pullback(model, x, ng.Euclidean()))


def test_rows_without_a_layer_rule_are_refused_before_they_are_made() -> None:
    """[k n p] of all examples; smaller batches have room for theirs."""
    message = r"rows of 40 examples for mix, body.weight, .* need 10,240 bytes, over the bound .*DataLoader"
    model, x = graph("index", n=40)
    with pytest.raises(ng.errors.MemoryBoundError, match=message):
        ng.Diagonal().estimate(ng.pullback(model, x, ng.Euclidean(), memory=2**13))
    model, x = graph("index", n=20)
    ng.Diagonal().estimate(ng.pullback(model, x, ng.Euclidean(), memory=2**13))


@pytest.mark.parametrize("memory", [True, 0, -1, "4 GiB"])
def test_what_is_no_number_of_bytes_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="memory must be a number of bytes, or None for half of those of the device"):
        ng.pullback(torch.nn.Linear(3, 2), torch.ones(4, 3), ng.Euclidean(), memory=memory)
