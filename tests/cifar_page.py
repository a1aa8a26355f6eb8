"""docs/cifar.md, and the numbers that the experiment wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "experiments" / "results" / "sobolev_cifar"
PAGE = ROOT / "docs" / "cifar.md"


def text() -> str:
    """Of the page, in one line."""
    return " ".join(PAGE.read_text().split())


def read(name: str) -> Any:
    """A file of the results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def finals(schedule: str = "tenths") -> dict[str, Any]:
    """The curves of a schedule, by optimizer."""
    return read("summary")["cifar10"][schedule]


def pair(first: str, second: str, schedule: str = "tenths", other: str | None = None) -> dict[str, Any]:
    """The first optimizer less the second; ``other`` is the second's schedule where it is another."""
    sides = [first, schedule], [second, other or schedule]
    (found,) = (p for p in read("pairs")["pairs"] if (p["dataset"], p["first"], p["second"]) == ("cifar10", *sides))
    return found


def reached(rival: str, quantity: str, schedule: str = "tenths") -> tuple[dict[str, Any], dict[str, str]]:
    """Epochs and seconds until an optimizer is where the rival ends."""
    place = "cifar10", schedule, rival, quantity
    rows = read("pairs")["reached"]
    (found,) = (r for r in rows if (r["dataset"], r["schedule"], r["rival"], r["quantity"]) == place)
    return found["epochs"], {arm: f"{seconds:.0f} s" for arm, seconds in found["seconds"].items()}


def signed(value: float, digits: int = 2) -> str:
    """As the page has it."""
    return f"{value:+.{digits}f}".replace("-", "−")
