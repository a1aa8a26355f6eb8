"""How large the package is, and how much of it a K-FAC loop runs through: numbers to watch, not to optimise.

    python -m benchmarks.census         # a table
    python -m benchmarks.census --json  # the same for a program

A module counts as executed if one of its functions is called between the construction of the optimizer and the end of
the loop; its lines are all lines of its file. Lines that run are counted once; "% in the order" is the share of
them in the files of the reading order of docs/architecture.md. Operations are those that torch dispatches.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import natgrad as ng

PACKAGE = Path(ng.__file__).parent


class Operations(TorchDispatchMode):
    """Counts the operations that torch dispatches."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """Counts calls of the package's functions, the modules that they are in, and the lines that run."""

    def __init__(self) -> None:
        self.count = 0
        self.modules: set[str] = set()
        self.lines: set[tuple[str, int]] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Calls | None:
        name = frame.f_code.co_filename
        if not name.startswith(str(PACKAGE)):
            return None
        if event == "call" and not frame.f_code.co_name.startswith("<"):
            self.count += 1
            self.modules.add(name)
        elif event == "line":
            self.lines.add((name, frame.f_lineno))
        return self


@contextmanager
def counting() -> Iterator[Calls]:
    """Count the calls inside."""
    calls = Calls()
    before = sys.gettrace()
    sys.settrace(calls)
    try:
        yield calls
    finally:
        sys.settrace(before)


def lines_of(path: str | Path) -> int:
    return len(Path(path).read_text(encoding="utf-8").splitlines())


def package() -> dict[str, int]:
    """Modules (without ``__init__``), lines and classes of the package."""
    files = sorted(PACKAGE.rglob("*.py"))
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in files]
    return {
        "modules": sum(path.name != "__init__.py" for path in files),
        "lines": sum(map(lines_of, files)),
        "classes": sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree)),
    }


def loop(model: nn.Module, x: torch.Tensor, steps: int) -> tuple[Callable[[], None], ng.NaturalGradient]:
    """Train for some steps; the function gives the model its next gradient."""
    opt = ng.KFAC(model, ng.Fisher(ng.Categorical()), lr=0.1)
    target = torch.arange(len(x)) % 2

    def backward() -> None:
        opt.zero_grad()
        nn.functional.cross_entropy(model(x), target).backward()

    for _ in range(steps):
        backward()
        opt.step()
    return backward, opt


def executed() -> dict[str, int]:
    """What a loop of 101 steps of K-FAC runs through: estimates, inverses and plain steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 2)
    )
    with counting() as calls:
        loop(model, torch.randn(16, 1, 6, 6), 101)
    order = {str(PACKAGE.parent / path) for path in reading_order()}
    return {
        "loop modules": len(calls.modules),
        "loop lines": sum(map(lines_of, calls.modules)),
        "lines that run": len(calls.lines),
        "% in the order": round(100 * sum(name in order for name, _ in calls.lines) / len(calls.lines)),
    }


def reading_order() -> list[str]:
    """The files of the reading order of docs/architecture.md."""
    text = (PACKAGE.parent / "docs/architecture.md").read_text(encoding="utf-8")
    return re.findall(r"^\| \d+ \| `([^`]+)` \|", text, re.MULTILINE)


def plain_step() -> dict[str, int]:
    """A step of eight linear layers in which neither the metric nor its inverse is due."""
    torch.manual_seed(0)
    model = nn.Sequential(*[m for _ in range(8) for m in (nn.Linear(16, 16), nn.Tanh())])
    backward, opt = loop(model, torch.randn(32, 16), 22)  # after the early refreshes
    backward()
    with counting() as calls:
        opt.step()
    backward()
    with Operations() as operations:
        opt.step()
    return {"step calls": calls.count, "step modules": len(calls.modules), "step operations": operations.count}


def census() -> dict[str, int]:
    """All counts."""
    return {**package(), **executed(), **plain_step()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    counts = census()
    if parser.parse_args().json:
        print(json.dumps(counts))
    else:
        print("\n".join(f"{name:<16}{count:>8,}" for name, count in counts.items()))


if __name__ == "__main__":
    main()
