"""What `natgrad inspect` tells of a model: who steps its parameters, what that costs, and the metric's spectrum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, final

from torch import Tensor

import natgrad as ng
from natgrad.accelerate.devices import fake_tensors
from natgrad.cli.training import Problem
from natgrad.log import listed, nbytes

_PAGE = (
    '<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">{}</html>'
)
_STYLE = (
    "<style>:root {{ color-scheme: light dark }} body {{ font: 16px/1.5 system-ui, sans-serif; margin: 1rem }}</style>"
)


@final
@dataclass(frozen=True)
class Inspection:
    """Numbers for JSON, and what to print, by title."""

    numbers: Mapping[str, Any]
    sections: Mapping[str, Any]

    def __str__(self) -> str:
        return "\n\n".join(f"{title}\n\n{text}" for title, text in self.sections.items())

    def page(self, title: str) -> str:
        """One HTML file."""
        body = "".join(
            f"<h2>{escape(name)}</h2><pre style='overflow-x: auto'>{escape(str(text))}</pre>"
            for name, text in self.sections.items()
        )
        return _PAGE.format(f"<title>{escape(title)}</title>{_STYLE.format()}<h1>{escape(title)}</h1>{body}")


def inspect(problem: Problem, *, spectrum: bool = True) -> Inspection:
    """The plans of ``ng.Natural`` and ``ng.KFAC``, after one training step where there are data, and the spectrum.

    A model on the meta device, which has shapes and no numbers, is not run: this costs no memory.
    """
    model, batch = problem.model, next(iter(problem.train), None)
    size = sum(p.numel() for p in model.parameters())
    numbers: dict[str, Any] = {"parameters": size, "bytes": nbytes(model.parameters())}
    sections: dict[str, Any] = {}
    with_values = not any(p.is_meta for p in model.parameters())
    if not with_values:
        with fake_tensors():
            model.to_empty(device="cpu")
            _plans(problem, None, numbers, sections)
    else:
        if spectrum and batch is not None and problem.loss is not model:
            x, target = batch
            metric = ng.metric_of(problem.loss)
            G = ng.pullback(model, x, metric, target=target) if metric.needs_target else ng.pullback(model, x, metric)
            density = ng.spectral_density(G)
            numbers["largest_eigenvalue"] = density.largest
            sections["spectrum of the metric on the first batch"] = density
        _plans(problem, batch, numbers, sections)
    uncovered = numbers["uncovered"]
    share = 100 * (1 - numbers["uncovered_parameters"] / size) if size else 100.0
    coverage = f"{share:.1f} % of the parameters have a layer rule"
    unknown = "" if batch is not None and with_values else " (the operations of a forward pass may add to it)"
    missing = f"\nwithout: {listed(uncovered)}{unknown}" if uncovered else ""
    state = "\n".join(f"state of {name}: {_megabytes(count)}" for name, count in numbers["state_bytes"].items())
    overview = f"{size:,} parameters, {_megabytes(numbers['bytes'])}\n{state}\n{coverage}{missing}"
    return Inspection(numbers, {**sections, "in all": overview})


def _plans(problem: Problem, batch: Any, numbers: dict[str, Any], sections: dict[str, Any]) -> None:
    """Of both optimizers, K-FAC's after a step on the batch if there is one."""
    model = problem.model
    natural = ng.Natural(model).plan()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    state = numbers["state_bytes"] = {"ng.Natural": sum(_state(a, params[a.name]) for a in natural.assignments)}
    sections["ng.Natural"] = natural
    kfac = ng.KFAC(model, problem.loss)
    if batch is not None:

        def closure() -> Tensor:
            kfac.zero_grad()
            loss, _ = problem.of_batch(batch)
            loss.backward()  # type: ignore[no-untyped-call, unused-ignore]
            return loss

        kfac.step(closure)
        state["ng.KFAC"] = int(kfac.metrics()["natgrad/state_bytes"])
    sections["ng.KFAC"] = plan = kfac.plan()
    if batch is None:
        known = [row.cost.numbers for row in plan.rows if row.cost is not None]  # of the others a pass tells
        of = "ng.KFAC" if len(known) == len(plan.rows) else "ng.KFAC, at least"
        state[of] = plan.element * sum(known) + nbytes(params.values())  # with momentum
    numbers["uncovered"] = list(plan.uncovered)
    numbers["uncovered_parameters"] = sum(params[name].numel() for name in plan.uncovered)


def _state(assignment: Any, p: Tensor) -> int:
    """Bytes that ``ng.Natural`` keeps for a parameter: momentum and two diagonals, or the two moments of AdamW."""
    if not assignment.is_matrix:
        return 2 * p.nbytes + 4
    n, _, o, i = assignment.sizes
    return int(p.nbytes + 4 * n * (o + i))


def _megabytes(count: int) -> str:
    return f"{count / 2**20:,.1f} MiB"
