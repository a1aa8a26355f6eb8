"""What an optimizer is going to do with every parameter, and the memory for it: known before any forward pass."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from torch import Tensor

from natgrad.accelerate.inverses import balance
from natgrad.errors import NatgradError
from natgrad.geometry import Covector, Vector, unflatten
from natgrad.linalg import Damping, Relative
from natgrad.optim.estimates import MetricTracker
from natgrad.optim.metrics import ages
from natgrad.optim.owners import division
from natgrad.optim.preconditioner import Preconditioner
from natgrad.optim.update import like
from natgrad.pullbacks.layer import Block
from natgrad.pullbacks.operation_layers import is_operation
from natgrad.show import as_html, brief
from natgrad.solve.solvers import Solver
from natgrad.step.base import Step, StepRule
from natgrad.step.self_tuned import SelfTuned
from natgrad.structures.base import Cost, Operator, Refresh
from natgrad.structures.layered import LATE, Layered, LayerOperator, LayerSpectrum

_PENDING = "found at the first pass"
_IDENTITY = "metric: the identity (power 0): nothing is estimated, inverted or damped"


@final
@dataclass(frozen=True)
class Row:
    """One layer: its parameters, its rule, its structure, and the memory that they take.

    ``rule`` is None before a pass for parameters that belong to no module with a rule: the operations that use them
    tell. After a pass it is None for parameters whose rows come from torch.func.

    ``cost`` is None where the structure keeps no layer by itself, or where the memory depends on the batch.
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
class Share:
    """What falls to the process with most of it, where ``processes`` own layers: ``opt.plan(world=64).share``.

    Attributes:
        processes: How many there are.
        bytes: Of the metric and its inverse that it keeps.
        flops: Of Cholesky inverses of its factors, n³ each; eigenvectors take about nine times as many.
        estimate: Bytes that it sends with an estimate.
        step: Bytes that it sends in a step, beside what averages gradients that are divided evenly.
    """

    processes: int
    bytes: int
    flops: int
    estimate: int
    step: int

    def __str__(self) -> str:
        return (
            f"of {self.processes} processes one keeps {self.bytes:,} bytes at most, inverts in {self.flops:.2e} flops, "
            f"and sends {self.estimate:,} bytes with an estimate and {self.step:,} in a step"
        )


def share_of(rows: Sequence[Row], world: int, element: int, of_gradient: int) -> Share | None:
    """By the rows of a plan; None where they do not tell. Numbers of a metric have ``element`` bytes."""
    units, others, left, shapes = list[tuple[int, ...]](), 0, 0, list[tuple[int, int, int]]()
    for row in rows:
        if row.cost is None:
            return None
        if row.rule is None or not row.factors:
            others, left = others + row.cost.numbers, left + row.size
            continue
        factors = list(row.factors.items())
        symmetric = [shape for letter, shape in factors if letter in "SA" and len(shape) == 3]
        numbers = sum(math.prod(shape) for _, shape in factors)
        sent = numbers - sum(c * math.comb(d, 2) for c, d, _ in symmetric)  # triangles
        units.append((numbers, row.cost.numbers, sent, sum(c * d**3 for c, d, _ in symmetric), row.size))
        shapes.append(row.shape)
    if others:  # without their inverse they are half as many
        units.append((others // 2, others, others // 2, 0, left))
    homes = division(shapes, [float(unit[0]) for unit in units], world)
    each = [
        [sum(unit[k] for unit, home in zip(units, homes, strict=True) if home == r) for k in range(5)]
        for r in range(world)
    ]
    sent, moved = (sum(unit[k] for unit in units) for k in (2, 4))
    return Share(
        world,
        element * max(own[1] for own in each),
        max(own[3] for own in each),
        element * max(sent - own[2] for own in each),
        of_gradient * max((moved - own[4] + own[4] * (world - 1)) // world for own in each),
    )


@final
@dataclass(frozen=True)
class Plan:
    """What becomes of every parameter, and the memory for it; ``print`` it before training.

    ``bytes`` of the metric and its inverse are in the precision they are kept in, and None where they depend on the
    batch.

    Attributes:
        rows: A row for every layer.
        together: That of all parameters, in a structure that does not keep layers apart.
        element: The bytes of a number.
        notes: What a reader should know about damping, momentum, and parameters that are treated otherwise.
        share: What falls to one of several processes, if that was asked for.
    """

    rows: tuple[Row, ...]
    together: Cost | None  # of all parameters, in a structure that does not keep layers apart
    element: int  # bytes a number
    notes: tuple[str, ...]
    share: Share | None = None

    __repr__ = brief
    _repr_html_ = as_html

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
        costs = tuple(row.cost for row in self.rows if row.cost is not None)
        return costs if len(costs) == len(self.rows) else None

    @property
    def bytes(self) -> int | None:
        """Bytes of the metric and its inverse."""
        return None if self.costs is None else self.element * sum(cost.numbers for cost in self.costs)

    def __str__(self) -> str:
        heads = ("parameters", "rule", "structure", "W [c o i]", "kept", "bytes")
        cells = [self._cells(row) for row in self.rows]
        lines = _table(heads, cells, left=5)
        size = sum(row.size for row in self.rows)
        total = [f"{len(self.rows)} layers, {size:,} parameters"]
        if self.bytes is not None:
            total.append(f"{self.bytes:,} bytes")
        elif any(row.structure == _PENDING for row in self.rows):
            total.append("the memory is known after the first pass")
        else:
            total.append("the memory depends on the batch, or the structure does not state it")
        return "\n".join([*lines, ", ".join(total), *([] if self.share is None else [str(self.share)]), *self.notes])

    def _cells(self, row: Row) -> tuple[str, ...]:
        title, shape = " + ".join(row.names), " × ".join(map(str, row.shape))
        front = (title, row.rule or ("" if row.structure == _PENDING else "none"), row.structure, shape)
        if row.cost is None:
            return (*front, "", "")
        factors = ", ".join(f"{letter} {_shape(of)}" for letter, of in row.factors.items())
        return (*front, factors, f"{self.element * row.cost.numbers:,}")


def plan(
    tracker: MetricTracker,
    solver: Solver,
    rule: StepRule,
    groups: Sequence[Mapping[str, Any]],
    given: Damping,
    momentum_on: str,
) -> Plan:
    """The plan of an optimizer: nothing is run, and nothing changes. After a step it knows what the pass has shown.

    ``groups``: the parameter groups, with their numbers, of which the damping is of the kind that was ``given``.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(64, 20), torch.nn.Tanh(), torch.nn.Linear(20, 10))
    >>> found = ng.KFAC(model, ng.Fisher(ng.Categorical())).plan()
    >>> [(row.names, row.rule, dict(row.factors)) for row in found.rows][1]
    (('2.weight', '2.bias'), 'Linear', {'S': (1, 10, 10), 'A': (1, 21, 21)})
    >>> found.bytes  # 2 (20² + 65² + 10² + 21²) numbers of 4 bytes
    41328
    """
    if tracker.constant:
        return _identity(tracker, _movement(rule, groups, momentum_on))
    blocks = _blocks(tracker)
    damping = like(given, float(groups[0]["damping"]))
    rows = tuple(_row(tracker, block, solver, damping != 0) for block in blocks)
    by_layer = tracker.structure.by_layer
    together = None if by_layer else tracker.structure.cost(blocks, iterative=solver.iterative)
    dtype = torch.promote_types(tracker.model.example.dtype, torch.float32)
    result = Plan(rows, together, dtype.itemsize, ())
    notes = (
        _schedule(tracker),
        _damping(solver, damping),
        _movement(rule, groups, momentum_on),
        *_exceptions(tracker, result),
    )
    return replace(result, notes=notes)


def _identity(tracker: MetricTracker, movement: str) -> Plan:
    """The plan of a metric that costs nothing."""
    blocks = tracker.observer.blocks
    rows = [Row(block.names, _rule_of(block), "identity", block.shape, Cost(0)) for block in blocks]
    notes = _IDENTITY, movement
    return Plan(tuple(rows), None, tracker.model.example.element_size(), notes)


def _rule_of(block: Block) -> str | None:
    return None if block.rule is None else type(block.rule).__name__.removesuffix("Rule")


def _blocks(tracker: MetricTracker) -> list[Block]:
    """The layers, with the rules that they were seen with where a pass has been seen, in flattening order."""
    structure, blocks, G = tracker.structure, tracker.observer.blocks, tracker.like
    blocks = structure.arrange(blocks) if isinstance(structure, Layered) else blocks
    if G is None or not structure.by_layer:
        return blocks
    covered = {name for block in G.layers for name in block.names}
    layers = [*G.layers, *(left for block in blocks for left in _left(block, covered))]
    order = {name: at for at, name in enumerate(tracker.model.params)}
    return sorted(layers, key=lambda block: order[block.names[0]])


def _left(block: Block, covered: Collection[str]) -> list[Block]:
    """What is left of a block without the parameters that a rule covers."""
    bare = block.without_rule()
    pairs = [pair for pair in zip(bare.names, bare.slices, strict=True) if pair[0] not in covered]
    if not pairs:
        return []
    names, slices = zip(*pairs, strict=True)
    return [replace(bare, names=names, slices=slices, shape=(1, sum(place.shape.numel() for place in slices), 1))]


def _row(tracker: MetricTracker, block: Block, solver: Solver, damped: bool) -> Row:
    structure = tracker.structure
    shown = tracker.average is not None or tracker.metric.source == "gradients"
    if block.rule is None and not shown and structure.by_layer:
        return Row(block.names, None, _PENDING, block.shape, None)
    if tracker.parameters.unseen.issuperset(block.names):
        return Row(block.names, None, "no metric", block.shape, Cost(0))
    exact = damped and not solver.damps_factors
    cost = structure.cost([block], exact=exact, iterative=solver.iterative) if structure.by_layer else None
    title = structure.title(block) if isinstance(structure, Layered) else type(structure).__name__
    return Row(block.names, _rule_of(block), title, block.shape, cost)


def _schedule(tracker: MetricTracker) -> str:
    schedule, metric = tracker.schedule, tracker.metric
    average = f", averaged with decay {schedule.decay:g}" if schedule.decay else ""
    power = "" if tracker.structure.power == 1 else f", to the power {tracker.structure.power:g}"
    return f"metric: {metric!r}{power}, estimated every {_steps(schedule.every)}{average}, {_inverted(schedule)}"


def _inverted(schedule: Refresh) -> str:
    first = " and at first in the steps 1, 2, 4, …" if schedule.early else ""
    return f"inverted every {schedule.inverse} steps{first}" if schedule.inverse > 1 else "inverted when it has changed"


def _damping(solver: Solver, λ: Damping) -> str:
    if isinstance(λ, Relative):
        return f"damping: λ = {λ.epsilon:g} times the mean eigenvalue, factor by factor"
    return f"damping: λ = {λ:g}, {solver.damping_note}, 1 the identity in the coordinates of the parameters"


def _movement(rule: StepRule, groups: Sequence[Mapping[str, Any]], momentum_on: str) -> str:
    numbers = {key: ", ".join(dict.fromkeys(f"{g[key]:g}" for g in groups)) for key in ("lr", "momentum")}
    decay = ", ".join(dict.fromkeys(f"{g['weight_decay']:g}" for g in groups))
    closure = ", which needs opt.step(closure)" if rule.needs_closure else ""
    before = "covectors (m ← μm + (1 − μ)ω, before the metric)"
    corrected = "covectors (m ← μm + (1 − μ)ω, corrected for its start, before the metric)"
    space = {"steps": "vectors (m ← μm + v, v after the metric)", "gradients": before}.get(momentum_on, corrected)
    rates = f"lr {numbers['lr']}, momentum {numbers['momentum']} in the space of {space}"
    if isinstance(getattr(rule, "rule", rule), SelfTuned):
        rates = "it chooses learning rate, momentum and damping" + f"; lr {numbers['lr']} is of the decay" * (
            decay != "0"
        )
    return f"step: {rule!r}{closure}; {rates}, weight decay {decay} (decoupled)"


def _exceptions(tracker: MetricTracker, result: Plan) -> list[str]:
    structure, fresh = tracker.structure, tracker.average is None
    lines = []
    ruled = tracker.metric.source == "outputs"  # gradients need no rules
    unseen = tracker.parameters.unseen
    if ruled and unseen:
        lines.append(f"the outputs do not depend on {', '.join(n for n in tracker.model.params if n in unseen)}")
    uncovered = [name for name in result.uncovered if name not in unseen]
    optional = [name for name in uncovered if fresh and name in tracker.parameters.ruleless_fallback]
    others = [name for name in uncovered if name not in optional]
    strict = isinstance(structure, Layered) and structure.strict
    then = structure.uncovered() if ruled and others else None
    if then is not None and structure.by_layer:
        then = f"{then}: {_way_out(tracker, others)}"
    for names, end in ((optional, "strict=True refuses them" if strict else "AdamW steps them"), (others, then)):
        if names and end is not None:
            start = f"the rule of {{}} is {_PENDING}, from the operations that use them; if there is none, "
            lines.append((start if fresh else "no layer rule covers {}: ").format(", ".join(names)) + end)
    if result.diagonals:
        factors = sum(len(row.factors) for row in result.rows if row.rule)
        listing = "all factors" if len(result.diagonals) == factors else ", ".join(result.diagonals)
        lines.append(f"only the diagonal is kept of {listing}")
    if ruled and fresh and any(row.rule for row in result.rows):
        lines.append("a weight that is also used outside its module's forward gets another rule in the first pass")
    return lines


def _way_out(tracker: MetricTracker, uncovered: Sequence[str]) -> str:
    """What to do about parameters that no rule covers: those of known modules lost it in the passes that were seen."""
    ruled = {name: is_operation(block) for block in tracker.observer.blocks if block.rule for name in block.names}
    late, lost = ([name for name in uncovered if ruled.get(name) is shown] for shown in (True, False))
    said = [f"{', '.join(late)}: {LATE}"] if late else []
    if lost:
        said.append(
            f"{', '.join(lost)} had a rule, but the outputs of one example depend on the others, or more than its "
            "module's own forward uses it"
        )
    return "; ".join(said) or "pass rules=[…] with a rule for their module"


def _steps(count: int) -> str:
    return "step" if count == 1 else f"{count} steps"


def _shape(shape: Sequence[int]) -> str:
    """[1 d d] as d², [c d d] as c·d², [c d] as diag(c·d), D [c o i] as it is."""
    c, d = shape[0], shape[1]
    groups = f"{c}·" if c > 1 else ""
    if len(shape) == 2:
        return f"diag({groups}{d})"
    return f"{groups}{d}²" if shape[2] == d else f"{groups}{d}·{shape[2]}"


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Lines of cells; the first ``left`` columns begin at the left, the others end at the right."""
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    aligned = [
        [cell.ljust(w) if at < left else cell.rjust(w) for at, (cell, w) in enumerate(zip(row, widths, strict=True))]
        for row in (heads, *rows)
    ]
    return ["  ".join(row).rstrip() for row in aligned]


# How the metric of an optimizer stands after some steps: conditions, damping, staleness, and the last step.


@final
@dataclass(frozen=True)
class Side:
    """One factor of a layer: its condition, by how much its rank falls short, and how many of its rows are zero.

    Over several groups c the worst condition, and the sums. ``damped``: the condition after √λ/π or π√λ is added.
    A zero row of S is a unit that no gradient reaches, a zero row of A an input that is always zero.
    """

    condition: float
    damped: float
    deficit: int
    dead: int
    size: int  # c·d


@final
@dataclass(frozen=True)
class Health:
    """One layer. ``share`` = λ/(λ + the mean eigenvalue of S ⊗ A): how much of the damped metric is damping.

    ``damped``: the condition of what is inverted, (S + √λ/π) ⊗ (A + π√λ) or G + λ, to its power. ``step``: √(δᵀGδ) of
    the last step δ on this layer. Parameters without a layer rule have no factors, and only a step. ``still``: how many
    groups, or parameters without factors, do not move, since their gradients are rounding beside the largest and the
    damping is relative.
    """

    names: tuple[str, ...]
    step: float
    factors: Mapping[str, Side]
    share: float | None = None
    damped: float | None = None
    still: int = 0


@final
@dataclass(frozen=True)
class Diagnostics:
    """The health of an optimizer's metric, layer by layer; ``print`` it.

    Attributes:
        layers: Conditions, ranks and shares of the damping of every layer.
        damping: λ, or the ``Relative`` damping.
        metric_age: Steps since the metric was estimated, 0 if the last step did so; None in the identity metric.
        inverse_age: Steps since it was inverted, likewise.
        step: √(δᵀGδ) of the last step, whole; for a Fisher metric ½ of its square is, to second order, the divergence
            of the outputs after the step from those before. Weight decay is no part of δ.
        accepted: Whether the last step was made.
    """

    layers: tuple[Health, ...]
    damping: Damping
    metric_age: int | None
    inverse_age: int | None
    step: float
    accepted: bool

    __repr__ = brief
    _repr_html_ = as_html

    def numbers(self) -> dict[str, float]:
        """Conditions and steps of every layer, by its first parameter, as ``opt.metrics(layers=True)`` has them."""
        out: dict[str, float] = {}
        for layer in self.layers:
            of = {f"cond_{key}": side.condition for key, side in layer.factors.items()}
            of |= {f"rank_deficit_{key}": side.deficit for key, side in layer.factors.items()}
            if layer.factors:
                of |= {"dead_units": layer.factors["S"].dead, "dead_inputs": layer.factors["A"].dead}
            of |= {"groups_still": layer.still, **({} if layer.share is None else {"damping_share": layer.share})}
            out |= {f"layer/{layer.names[0]}/{key}": value for key, value in {**of, "step_length": layer.step}.items()}
        return out

    def __str__(self) -> str:
        heads = ("parameters", "cond S", "cond A", "damped", "damping", "rank S", "rank A", "dead units", "step")
        cells = [_cells(layer) for layer in self.layers]
        lines = _table(heads, cells, left=1)
        if still := [layer.names[0] for layer in self.layers if layer.still]:
            lines.append(f"no step where gradients are rounding beside the largest: {', '.join(still)}")
        refused = "" if self.accepted else ", which was refused"
        length = f"last step{refused}: √(δᵀGδ) = {self.step:.3g}"
        if self.metric_age is None or self.inverse_age is None:
            return "\n".join([*lines, f"{length}; {_IDENTITY}"])
        ages = f"the metric was estimated {_ago(self.metric_age)}, and inverted {_ago(self.inverse_age)}"
        return "\n".join([*lines, f"{length}; damping λ = {self.damping:.3g}", ages])


def diagnostics(tracker: MetricTracker, preconditioner: Preconditioner, last: Step | None) -> Diagnostics:
    """Look at the metric and the last step. It waits for the device and computes eigenvalues: call it now and then.

    >>> import torch, natgrad as ng
    >>> model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Tanh(), torch.nn.Linear(3, 2))
    >>> opt = ng.KFAC(model, ng.Fisher(ng.Gaussian()))
    >>> model(torch.randn(32, 4)).square().sum().backward()
    >>> opt.step()
    >>> found = opt.diagnostics()
    >>> len(found.layers), found.metric_age, found.layers[1].factors["S"].condition  # S is the unit matrix
    (2, 0, 1.0)
    """
    G = tracker.average
    if G is None or last is None:
        raise NatgradError(
            "there is nothing to diagnose before the first step: opt.plan() says what the optimizer is going to do"
        )
    λ, factored, δ = preconditioner.damping, preconditioner.solver.damps_factors, last.displacement
    if (owners := tracker.world.owners) is not None:
        δ = owners.kept_of(δ, G.layout)
    ω = G.flat(δ)
    with torch.no_grad():
        spectra = G.layer_spectra() if isinstance(G, LayerOperator) else ()
        eps = torch.finfo(G.layout.dtype).eps
        layers = [_layer(layer, λ, factored, G.power, _norm(δ, ω, layer.names), eps) for layer in spectra]
        covered = {name for layer in layers for name in layer.names}
        names = G.layout.like.keys() - covered
        others = [tuple(n for n in block.names if n in names) for block in tracker.observer.blocks]
        still = _still(preconditioner, G) if any(others) else frozenset()
        parts = (tuple(n for n in names if (n in still) == rests) for names in others for rests in (False, True))
        layers += [
            Health(names, _norm(δ, ω, names), {}, still=len(still.intersection(names))) for names in parts if names
        ]
    order = {name: at for at, name in enumerate(tracker.model.params)}
    ordered = sorted(layers, key=lambda layer: order[layer.names[0]])
    damping = like(λ, last.damping)
    return Diagnostics(tuple(ordered), damping, *ages(tracker, preconditioner), _norm(δ, ω, tuple(δ)), last.accepted)


def _still(preconditioner: Preconditioner, G: Operator) -> frozenset[str]:
    """The parameters that no covector moves, since relative damping leaves them at rest (``is_rounding``)."""
    inverse, λ = preconditioner.inverse, preconditioner.damping
    if inverse is None or preconditioner.solver.iterative or not isinstance(λ, Relative):
        return frozenset()
    v = inverse.solve(torch.arange(G.layout.size, dtype=G.layout.dtype, device=G.device).cos())
    return frozenset(name for name, t in unflatten(v, G.layout.like).items() if t.numel() and not bool(t.any()))


def _layer(layer: LayerSpectrum, damping: Damping, factored: bool, power: float, step: float, eps: float) -> Health:
    mean, still = float(layer.values.mean()), 0
    if isinstance(damping, Relative):
        ε, still = damping.epsilon, int(layer.is_zero.sum())
        shifts = {key: (ε * d.mean()).expand(len(d)) for key, d in layer.diagonals.items()}
        λ, share = ε * mean, ε / (1 + ε)
    else:
        π = balance([layer.diagonals["A"]], [layer.diagonals["S"]])
        λ = damping
        shifts = {"S": λ**0.5 / π, "A": λ**0.5 * π}
        share = λ / (λ + mean) if λ > 0 else 0.0
    sides = {key: _side(layer.factors[key], layer.diagonals[key], shifts[key], eps) for key in shifts}
    by_factors = factored or isinstance(damping, Relative)
    damped = sides["S"].damped * sides["A"].damped if by_factors else _condition(layer.values.flatten(1), λ)
    return Health(layer.names, step, sides, share, damped**power, still)


def _side(values: Tensor, diagonal: Tensor, shift: Tensor, eps: float) -> Side:
    """``eps``: the machine epsilon of the factor; smaller eigenvalues are noise."""
    largest = values.amax(-1, keepdim=True)
    noise = values.shape[-1] * eps * largest
    zero = values <= noise
    cleaned = values.masked_fill(zero, 0.0)
    return Side(
        condition=_condition(cleaned, 0.0),
        damped=_condition(cleaned + shift.unsqueeze(-1), 0.0),
        deficit=int(zero.sum()),
        dead=int((diagonal == 0).sum()),
        size=values.numel(),
    )


def _condition(values: Tensor, λ: float) -> float:
    """The largest of max/min over groups [c d]; ∞ where a value is zero."""
    shifted = values + λ
    smallest = shifted.amin(-1)
    return float(torch.where(smallest > 0, shifted.amax(-1) / smallest, torch.inf).max())


def _norm(δ: Vector, ω: Covector, names: Sequence[str]) -> float:
    """√⟨ω, δ⟩ over some parameters; below zero it is rounding."""
    total = sum((δ[name].double() * ω[name].double()).sum() for name in names)
    return math.sqrt(max(float(total), 0.0))


def _cells(layer: Health) -> tuple[str, ...]:
    title, step = " + ".join(layer.names), f"{layer.step:.1e}"
    if not layer.factors:
        return (title, *[""] * 7, step)
    s, a = layer.factors["S"], layer.factors["A"]
    ranks = (f"{side.size - side.deficit}/{side.size}" for side in (s, a))
    return (
        title,
        f"{s.condition:.1e}",
        f"{a.condition:.1e}",
        f"{layer.damped:.1e}",
        f"{layer.share:.0%}",
        *ranks,
        str(s.dead),
        step,
    )


def _ago(age: int) -> str:
    return "in the last step" if age == 0 else f"{age} step{'s' if age > 1 else ''} before it"
