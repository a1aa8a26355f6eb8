"""What an optimizer is going to do with every parameter, and what that costs: known before any forward pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, final

import torch

from natgrad.operators import EigenKroneckerOperator, KroneckerOperator
from natgrad.optim.costs import Cost, layer_cost, whole_cost
from natgrad.pullback.blocks import Block
from natgrad.solve import CG, Factored, Pinv
from natgrad.structures import EigenKronecker, Implicit, Kronecker, Refresh

if TYPE_CHECKING:
    from natgrad.optim.optimizer import NaturalGradient


@final
@dataclass(frozen=True)
class Row:
    """One layer: its parameters, its rule (None: rows come from torch.func), its structure, and what it costs.

    ``cost`` is None where the structure keeps no layer by itself, or where the cost depends on the batch.
    """

    names: tuple[str, ...]
    rule: str | None
    structure: str
    shape: tuple[int, int, int]  # of the packed parameters W [c o i]; without a rule one column [1 p 1]
    cost: Cost | None

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def factors(self) -> Mapping[str, tuple[int, ...]]:
        """The shapes of S, A, … ; [c d] where only the diagonal is kept."""
        return {} if self.cost is None else self.cost.factors


@final
@dataclass(frozen=True)
class Plan:
    """A row a layer, the schedule and the totals; ``print`` it before training.

    ``bytes`` of the metric and its inverse, in the precision they are kept in; ``flops`` of a step, inverses shared out
    over the steps between them; ``position_flops``: what the estimate adds, shared out likewise, for every position of
    every example and every column of the metric's root (an output, or a sample). Each is None where it depends on the
    batch. ``notes``: what a reader should know about damping, momentum, and parameters that are treated otherwise.
    """

    rows: tuple[Row, ...]
    together: Cost | None  # of all parameters, in a structure that does not keep layers apart
    schedule: Refresh
    element: int  # bytes a number
    notes: tuple[str, ...]

    @property
    def uncovered(self) -> tuple[str, ...]:
        """The parameters that no layer rule covers."""
        return tuple(name for row in self.rows if row.rule is None for name in row.names)

    @property
    def diagonals(self) -> tuple[str, ...]:
        """The factors of which only the diagonal is kept."""
        pairs = ((row, letter, shape) for row in self.rows if row.rule for letter, shape in row.factors.items())
        return tuple(f"{letter} of {' + '.join(row.names)}" for row, letter, shape in pairs if len(shape) == 2)

    @property
    def costs(self) -> tuple[Cost, ...] | None:
        """All there is to add up; None where a part of it depends on the batch."""
        if self.together is not None:
            return (self.together,)
        found = tuple(row.cost for row in self.rows if row.cost is not None)
        return found if len(found) == len(self.rows) else None

    @property
    def bytes(self) -> int | None:
        return None if self.costs is None else self.element * sum(cost.kept for cost in self.costs)

    @property
    def flops(self) -> float | None:
        between = max(self.schedule.every, self.schedule.inverse)
        return None if self.costs is None else sum(cost.solve + cost.invert / between for cost in self.costs)

    @property
    def position_flops(self) -> float | None:
        every = self.schedule.every
        return None if self.costs is None else sum(cost.position for cost in self.costs) / every

    def __str__(self) -> str:
        heads = ("parameters", "rule", "structure", "W [c o i]", "kept", "bytes", "inverse", "solve", "position")
        cells = [self._cells(row) for row in self.rows]
        widths = [max(map(len, column)) for column in zip(heads, *cells, strict=True)]
        lines = [_line(row, widths) for row in (heads, *cells)]
        size = sum(row.size for row in self.rows)
        total = [f"{len(self.rows)} layers, {size:,} parameters"]
        if self.bytes is not None and self.flops is not None and self.position_flops is not None:
            total += [
                f"{self.bytes:,} bytes",
                f"{self.flops:.2g} flops a step",
                f"and {self.position_flops:.2g} a position and column",
            ]
        else:
            total.append("memory and cost depend on the batch")
        return "\n".join([*lines, ", ".join(total), *self.notes])

    def _cells(self, row: Row) -> tuple[str, ...]:
        title, shape = " + ".join(row.names), " × ".join(map(str, row.shape))
        front = (title, row.rule or "none", row.structure, shape)
        if row.cost is None:
            return (*front, "", "", "", "", "")
        counts = (f"{count:.1e}" for count in (row.cost.invert, row.cost.solve, row.cost.position))
        kept = ", ".join(f"{letter} {_shape(of)}" for letter, of in row.factors.items())
        return (*front, kept, f"{self.element * row.cost.kept:,}", *counts)


def plan(opt: NaturalGradient) -> Plan:
    """The plan of an optimizer: nothing is run, and nothing changes. After a step it knows what the pass has shown.

    >>> import natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 20), torch.nn.Tanh(), torch.nn.Linear(20, 10))
    >>> found = ng.KFAC(model, ng.Fisher(ng.Categorical())).plan()
    >>> [(row.names, row.rule, dict(row.factors)) for row in found.rows][1]
    (('2.weight', '2.bias'), 'Linear', {'S': (1, 10, 10), 'A': (1, 21, 21)})
    >>> found.bytes  # 2 (20² + 65² + 10² + 21²) numbers of 4 bytes
    41328
    """
    schedule, blocks = opt.keeper.structure, _blocks(opt)
    damped = float(opt.param_groups[0]["damping"]) > 0
    rows = tuple(_row(opt, block, damped) for block in blocks)
    together = whole_cost(schedule.structure, blocks, opt.solver)
    dtype = torch.promote_types(opt.keeper.model.example.dtype, torch.float32)
    found = Plan(rows, together, schedule, dtype.itemsize, ())
    notes = (_schedule(opt), _damping(opt), _movement(opt), *_exceptions(opt, found))
    return Plan(rows, together, schedule, dtype.itemsize, notes)


def _blocks(opt: NaturalGradient) -> list[Block]:
    """The layers, with the rules that they were seen with where a pass has been seen, in flattening order."""
    blocks, G = opt.keeper.view.blocks, opt.keeper.average
    if not isinstance(G, KroneckerOperator | EigenKroneckerOperator):
        return blocks
    seen = {name for block in G.blocks for name in block.names}
    found = [*G.blocks, *(left for block in blocks for left in _left(block, seen))]
    order = {name: at for at, name in enumerate(opt.keeper.model.params)}
    return sorted(found, key=lambda block: order[block.names[0]])


def _left(block: Block, seen: Collection[str]) -> list[Block]:
    """What is left of a block without the parameters that were seen by a rule."""
    bare = block.without_rule()
    pairs = [pair for pair in zip(bare.names, bare.places, strict=True) if pair[0] not in seen]
    if not pairs:
        return []
    names, places = zip(*pairs, strict=True)
    return [replace(bare, names=names, places=places, shape=(1, sum(place.shape.numel() for place in places), 1))]


def _row(opt: NaturalGradient, block: Block, damped: bool) -> Row:
    structure = opt.keeper.structure.structure
    name = type(structure).__name__
    if block.rule is None and isinstance(structure, Kronecker | EigenKronecker):
        fallback = f"{type(structure.fallback).__name__} (fallback)"
        name = "refused (strict=True)" if structure.strict else fallback
    rule = None if block.rule is None else type(block.rule).__name__.removesuffix("Rule")
    return Row(block.names, rule, name, block.shape, layer_cost(structure, block, opt.solver, damped))


def _schedule(opt: NaturalGradient) -> str:
    schedule, metric = opt.keeper.structure, opt.keeper.metric
    average = f", averaged with decay {schedule.decay:g}" if schedule.decay else ""
    inverse = f"inverted every {schedule.inverse} steps" if schedule.inverse > 1 else "inverted when it has changed"
    return f"metric: {metric!r}, estimated every {_steps(schedule.every)}{average}, {inverse}"


def _damping(opt: NaturalGradient) -> str:
    λ = float(opt.param_groups[0]["damping"])
    identity = "1 the identity in the coordinates of the parameters"
    match opt.solver:
        case Factored():
            how = f"factored, (S + √λ/π) ⊗ (A + π√λ) in place of G + λ·1, {identity}"
        case Pinv():
            how = f"exact, (G + λ·1)⁺, {identity}"
        case CG():
            how = f"exact, G + λ·1 solved by conjugate gradients, {identity}"
        case _:
            how = f"exact, (G + λ·1)⁻¹, {identity}"
    return f"damping: λ = {λ:g}, {how}"


def _movement(opt: NaturalGradient) -> str:
    groups = opt.param_groups
    numbers = {key: ", ".join(dict.fromkeys(f"{g[key]:g}" for g in groups)) for key in ("lr", "momentum")}
    decay = ", ".join(dict.fromkeys(f"{g['weight_decay']:g}" for g in groups))
    closure = ", which needs opt.step(closure)" if opt.needs_closure else ""
    return (
        f"step: {opt.rule!r}{closure}; lr {numbers['lr']}, momentum {numbers['momentum']} in the space of vectors "
        f"(m ← μm + v, v after the metric), weight decay {decay} (decoupled)"
    )


def _exceptions(opt: NaturalGradient, found: Plan) -> list[str]:
    structure, fresh = opt.keeper.structure.structure, opt.keeper.average is None
    lines = []
    if found.uncovered and not isinstance(structure, Implicit):
        first = "the first pass may find them spread over the examples; if not, " if fresh else ""
        then = "their rows come from torch.func, which is slow"
        if isinstance(structure, Kronecker | EigenKronecker):
            refused = (
                f"strict=True refuses them in the first pass that uses them (strict=False: {structure.fallback!r})"
            )
            then = refused if structure.strict else f"{then}, and their metric is {structure.fallback!r}"
            then = f"{then}: {_way_out(opt, found)}"
        lines.append(f"no layer rule covers {', '.join(found.uncovered)}: {first}{then}")
    if found.diagonals:
        lines.append(f"only the diagonal is kept of {', '.join(found.diagonals)}")
    if fresh and any(row.rule for row in found.rows):
        lines.append("a weight that is used without its module's forward loses its rule when the first pass shows it")
    return lines


def _way_out(opt: NaturalGradient, found: Plan) -> str:
    """What to do about parameters that no rule covers: those of known modules lost it in the passes that were seen."""
    ruled = {name for block in opt.keeper.view.blocks if block.rule for name in block.names}
    lost = [name for name in found.uncovered if name in ruled]
    if not lost:
        return "pass rules=[…] with a rule for their module"
    return (
        f"{', '.join(lost)} had a rule, but the outputs of one example depend on the others, or more than its module's "
        "own forward uses it"
    )


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _shape(shape: Sequence[int]) -> str:
    """[1 d d] as d², [c d d] as c·d², [c d] as diag(c·d), D [c o i] as it is."""
    c, d = shape[0], shape[1]
    groups = f"{c}·" if c > 1 else ""
    if len(shape) == 2:
        return f"diag({groups}{d})"
    return f"{groups}{d}²" if shape[2] == d else f"{groups}{d}·{shape[2]}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [
        cell.ljust(w) if at < 5 else cell.rjust(w) for at, (cell, w) in enumerate(zip(cells, widths, strict=True))
    ]
    return "  ".join(padded).rstrip()
