"""From a model and a batch to a pullback: the forward pass, the layers that have a rule in it, and the root."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import torch
from torch import Tensor, nn

from natgrad.errors import BatchStatisticsError
from natgrad.model import Inputs, Model
from natgrad.output.metric import Coupling, OutputMetric
from natgrad.pullback.batch import Batch, Passes, Seen
from natgrad.pullback.blocks import Block, partition
from natgrad.pullback.broadcast import spread
from natgrad.pullback.finite import check_outputs
from natgrad.pullback.judged import Judgements, Refused
from natgrad.pullback.parts import Part, check_inputs, examples, forward, pass_bytes
from natgrad.pullback.pullback import MEMORY, Pullback
from natgrad.pullback.recorded import Recordings
from natgrad.pullback.roots import Root
from natgrad.pullback.separate import Verdicts
from natgrad.pullback.tables import over_examples
from natgrad.pullback.tape import Tape, record
from natgrad.rules import RULES, Rule
from natgrad.slots import check_slots

_log = logging.getLogger("natgrad")
_ELSEWHERE = (
    "the layer rules of {} are not used, and the model is run example by example for them, which is slow: behind them "
    "the outputs of one example depend on the others, as in z @ z.T or F.batch_norm(…, training=True) (nn.BatchNorm1d, "
    "2d and 3d are understood), or the layers do not have the examples on one axis, in their order, as after an index, "
    "a sort or a concatenation of examples. The outputs of the model have them on their first axis, linear layers, "
    "LayerNorm, RMSNorm and embeddings on any, all others where the module has its batch: put them there before these "
    "layers, and back behind them. strict=True refuses such layers, and opt.plan() lists them after the first pass"
)
_IDLE = "the layer rules of {} are not used: a layer was called, and the outputs of the model do not depend on its own"


def pullback(
    model: nn.Module | Callable[..., Any] | Model,
    x: Inputs,
    metric: OutputMetric,
    target: Any = None,
    generator: torch.Generator | None = None,
    *,
    params: Mapping[str, Tensor] | None = None,
    output: Callable[[Any], Tensor] | None = None,
    memory: int = MEMORY,
    rules: Sequence[Rule] = (),
) -> Pullback:
    """Pull the metric on the outputs of a model back to its parameters (paper 002, (29); paper 004, (42), (53)).

    ``x``: a tensor, a tuple of positional or a dict of keyword inputs, examples on every first axis. ``params``: the
    parameters of a pure function ``f(params, x)``. ``output``: takes what the model returns to y [n *out]. ``memory``:
    bytes that a structure may occupy; work is chunked over roots and examples within an eighth of it. ``rules``: for
    layers of one's own; they are asked before those of the library.

    >>> import natgrad as ng
    >>> model = nn.Linear(2, 3)
    >>> pb = ng.pullback(model, torch.randn(5, 2), ng.Fisher(ng.Categorical()))
    >>> ng.Dense().estimate(pb).dense().shape
    torch.Size([9, 9])
    """
    wrapped = Model.of(model, params, output)
    check_slots(metric=(metric, OutputMetric))
    return View(wrapped, metric, layers_of(wrapped, rules), generator, memory).checked(x, target)


@final
@dataclass(frozen=True)
class Known:
    """What is remembered of a model that is looked at again and again."""

    verdicts: Verdicts = field(default_factory=Verdicts)
    judgements: Judgements = field(default_factory=Judgements)
    recordings: Recordings = field(default_factory=Recordings)


@final
@dataclass(frozen=True)
class View:
    """How a model is looked at: the metric on its outputs, its layers, and what is known about its graphs.

    ``deferred``: numbers are not looked at while they are computed, which would make a GPU wait; whether they are
    finite is found out by those who average them.
    """

    model: Model
    metric: OutputMetric
    blocks: list[Block]
    generator: torch.Generator | None
    memory: int = MEMORY
    known: Known = field(default_factory=Known)
    deferred: bool = False

    def checked(self, x: Inputs, target: Any = None) -> Pullback:
        """The pullback at inputs, and targets, that are looked at first."""
        check_inputs(self.model, x)
        self.metric.check_target(target)
        self.model.check_separable()
        return self.of(Batch(self.model, x, target))

    def of(self, batch: Batch) -> Pullback:
        """The pullback at a batch, in a forward pass of our own; ``deferred`` ones are never cut into parts."""
        if self.deferred:
            tape = record(self.model, self.blocks, batch.x)
            return self.assemble(batch, tape, [(0, tape.y.shape[0])])
        bound = pass_bytes(self.memory, self.model.example.device)
        tape, parts = forward(self.model, self.blocks, batch.x, bound)
        return self.assemble(batch, tape, parts)

    def assemble(self, batch: Batch, tape: Tape, parts: list[Part], fleeting: bool = False) -> Pullback:
        """The pullback from a forward pass that has been run already, as by an optimizer's hook.

        ``fleeting``: it is used up at once.
        """
        # Under autocast outputs and cotangents come in half precision: what is made of them is kept in single, at
        # least. A copy: the outputs are the user's, who may go on to change them in place.
        y = tape.y.detach().to(torch.promote_types(tape.y.dtype, torch.float32), copy=not fleeting)
        if parts[-1][1] > y.shape[0]:  # the tape is of the first part only
            with torch.no_grad():
                y = torch.cat([self.model(None, examples(batch.x, part, parts[-1][1])) for part in parts]).to(y.dtype)
        if not self.deferred:
            check_outputs(self.model, batch.x, y)
        tape = over_examples(tape)
        # What the first part of a batch does not use, another may.
        whole = parts[-1][1] == y.shape[0] == tape.y.shape[0]
        judged = self.known.judgements.of(self.model, self.blocks, tape, whole, self.known.verdicts)
        blocks, tape = spread(self.model, judged.blocks, replace(tape.turned(judged.axes), memo=judged.memo))
        bare = [block for block in blocks if block.rule is None]
        refused = judged.refused.among(bare)
        self._tell([block for block in bare if block.names[0] not in judged.unused], refused)
        coupled = self.metric.coupled(batch.x, y.shape[0], y.dtype)
        if coupled is not None:
            parts = [(0, y.shape[0])]
        return Pullback(
            batch=replace(batch, model=self.model),
            metric=self.metric,
            y=y,
            roots=Root.of(self, batch.target, y, coupled is not None),
            seen=Seen(blocks, judged.positions_of(blocks, tape), judged.unused, refused.names),
            passes=Passes(
                memory=self.memory,
                parts=parts,
                tapes={parts[0]: tape} if parts == [(0, tape.y.shape[0])] else {},
                recordings=self.known.recordings if y.device.type == "cuda" else None,
                verdicts=self.known.verdicts,
            ),
            coupled=None if coupled is None else _placed(coupled, y),
        )

    def _tell(self, blocks: Sequence[Block], refused: Refused) -> None:
        """Say once which parameters have no rule, those of ``blocks``, or are seen in another mode than the others.

        That a rule there is cannot be used is a warning: the model can be written so that it can.
        """
        for level, text, found in (
            (logging.WARNING, _ELSEWHERE, refused.elsewhere),
            (logging.INFO, _IDLE, refused.idle - refused.elsewhere),
        ):
            if found and self.known.verdicts.news(message := text.format(", ".join(sorted(found)))):
                _log.log(level, message)
        if not blocks:
            return
        names = ", ".join(name for block in blocks for name in block.names)
        try:
            self.model.check_separable()
        except BatchStatisticsError:
            message = f"no layer rule covers {names}: in training mode they are seen in evaluation mode"
            if self.known.verdicts.news(message):
                _log.info(message)


def _placed(coupled: Coupling, y: Tensor) -> Coupling:
    """Where the outputs are, all but L in double precision."""
    C, K, L, weights = coupled.C, coupled.K, coupled.L, coupled.weights
    return Coupling(
        C.to(y.device, torch.float64),
        None if K is None else K.to(y.device, torch.float64),
        None if L is None else L.to(y.device),
        None if weights is None else weights.to(y.device, torch.float64),
    )


def layers_of(model: Model, rules: Sequence[Rule] = ()) -> list[Block]:
    """The model's layers, with the user's rules and those that ship with the library."""
    check_slots(**{f"rules[{at}]": (rule, Rule) for at, rule in enumerate(rules)})
    return partition(model, (*rules, *RULES))


def at(pb: Pullback, params: Mapping[str, Tensor]) -> Pullback:
    """The same model, batch, metric and targets at other parameters."""
    moved = Model(lambda θ, x: pb.model({**params, **θ}, x), {name: p.detach() for name, p in params.items()})
    return pullback(moved, pb.batch.x, pb.metric, target=pb.batch.target, memory=pb.memory)
