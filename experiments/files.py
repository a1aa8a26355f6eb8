"""Files of results: written whole or not at all, whenever the program is killed; the commit; JSON and Markdown."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """A temporary file that replaces ``path`` when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        with new.open("wb") as file:
            yield file
        os.replace(new, path)
    finally:
        new.unlink(missing_ok=True)


def commit() -> str:
    """The commit of the code, with "-dirty" where files differ from it."""
    here = Path(__file__).resolve().parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise SystemExit(
            "results name the commit that they were made with: git tells none, so give --commit"
        ) from error


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of cells.

    >>> print(markdown_table(["a", "b"], [["1", "2"]]))
    | a | b |
    | --- | --- |
    | 1 | 2 |
    """
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rows))


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON; a list of numbers is one line."""
    with replaced(path) as file:
        file.write((_json(content, 0) + "\n").encode())


def _json(content: Any, depth: int) -> str:
    """``json.dumps(indent=2)``, but with lists of numbers on one line.

    >>> print(_json({"a": [1, 2], "b": {}}, 0))
    {
      "a": [1, 2],
      "b": {}
    }
    """
    inner, outer = "\n" + "  " * (depth + 1), "\n" + "  " * depth
    if isinstance(content, dict) and content:
        items = (f"{json.dumps(key, ensure_ascii=False)}: {_json(value, depth + 1)}" for key, value in content.items())
        return "{" + inner + ("," + inner).join(items) + outer + "}"
    if isinstance(content, list) and any(isinstance(value, (dict, list)) for value in content):
        return "[" + inner + ("," + inner).join(_json(value, depth + 1) for value in content) + outer + "]"
    return json.dumps(content, ensure_ascii=False, allow_nan=False)
