"""Entry point of the `natgrad` command: one module per subcommand, with `configure(parser)` and `run(arguments)`."""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Sequence

from natgrad.cli import demo

EXTRA = ("rich", "matplotlib")
COMMANDS = {"demo": (demo, "compare SGD, AdamW, natural gradients and K-FAC on handwritten digits")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit code.

    >>> main(["demo", "--steps", "-1"])
    1
    """
    parser = ArgumentParser(prog="natgrad", description="Natural gradients for PyTorch.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for name, (module, help_text) in COMMANDS.items():
        command = commands.add_parser(name, help=help_text, description=(module.__doc__ or "").splitlines()[0])
        module.configure(command)
        command.set_defaults(run=module.run)
    arguments = parser.parse_args(argv)
    try:
        code: int = arguments.run(arguments)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        print(
            f"natgrad: this command needs {error.name}, which is not installed. Install the command-line extra:\n"
            "    pip install 'natgrad[cli]'",
            file=sys.stderr,
        )
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
