"""Cotangents that are used on the way, together or one by one, are those of a whole backward pass."""

from collections.abc import Sequence

import pytest
import torch
from torch import nn

from natgrad.pullback.flow import Flow
from natgrad.pullback.sharing import Cotangents, Expand
from natgrad.pullback.sink import Collected, Layers
from natgrad.pullback.streamed import factors_of
from tests import zoo
from tests.pulled import close, normal, pull, random_roots


@pytest.mark.parametrize("room", [0, 200, 1000, 10**9])
@pytest.mark.parametrize("name", ["mlp_tanh", "conv", "called_twice", "tied_embedding"])
def test_the_factors_do_not_depend_on_how_many_cotangents_wait(name: str, room: int) -> None:
    problem = zoo.case(name).make()
    pb = pull(problem, random_roots(problem, k=1))
    blocks = [block for block in pb.layers if block.rule is not None]
    expected = factors_of(pb, blocks, Expand())
    layers, sink, tape = Layers(tuple(blocks), Expand(), pb.y.dtype, pb.n), Collected(len(blocks)), pb.tape(pb.parts[0])
    calls: list[list[int]] = []

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        calls.append(list(numbers))
        for b in numbers:
            layers.put_outputs(b, tape, g, sink)

    for b in range(len(blocks)):
        layers.put_inputs(b, tape, sink)
    Flow(tape, layers, serve, room).run(pb.root)
    assert sorted(b for numbers in calls for b in numbers) == list(range(len(blocks)))
    for (s, a), (right_s, right_a) in zip(sink.pairs(), expected, strict=True):
        close(s, right_s)
        close(a, right_a)


def test_what_has_been_used_is_forgotten_before_the_rest_is_made() -> None:
    problem = zoo.Problem(nn.Sequential(*(nn.Linear(8, 8) for _ in range(6))).double(), normal(4, 8))
    pb = pull(problem, random_roots(problem, k=1))
    layers, tape = Layers(tuple(pb.layers), Expand(), torch.float64, pb.n), pb.tape(pb.parts[0])
    most = 0

    def serve(numbers: Sequence[int], g: Cotangents) -> None:
        nonlocal most
        most = max(most, len(g.outer))

    Flow(tape, layers, serve, 2 * 4 * 8 * 8 - 1).run(pb.root)
    assert most == 2
