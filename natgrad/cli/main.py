"""The `natgrad` command, also where its extra is not installed: then it says what to install."""

from __future__ import annotations

import sys
from collections.abc import Sequence

EXTRA = ("typer", "rich", "matplotlib")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return its exit code, which `natgrad --help` explains.

    >>> main(["demo", "--steps", "-1"])
    2
    """
    try:
        from natgrad.cli.commands import app
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(
            f"natgrad: the command needs {error.name}, which is not installed. Install the command-line extra:\n"
            "    pip install 'natgrad[cli]'",
            file=sys.stderr,
        )
        return 1
    try:
        app(sys.argv[1:] if argv is None else list(argv), prog_name="natgrad")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
