"""Try the wheel and the sdist of a folder as a user would: install each into an empty folder, and run it there.

    python .ci/smoke.py dist [v0.2.0]

torch is that of the interpreter. A tag must be that of the version. The sdist also runs tests of its
own, unpacked.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

PROGRAM = """
import sys
from importlib.metadata import metadata
from importlib.resources import files
from pathlib import Path

import natgrad as ng

assert Path(ng.__file__).is_relative_to(sys.argv[1]), ng.__file__
about = metadata("natgrad")
assert about["Version"] == ng.__version__ == sys.argv[2], (about["Version"], ng.__version__, sys.argv[2])
assert about["License-Expression"] == "MIT AND CC-BY-4.0", about["License-Expression"]
assert files("natgrad").joinpath("py.typed").is_file()
"""
TESTS = ("tests/test_public_names.py", "tests/test_packaging.py", "tests/test_docs.py", "tests/test_geometry.py")


def run(*command: str, folder: Path, library: Path) -> None:
    """Run a command in a folder, with the library that was installed there before any other."""
    environment = {**os.environ, "PYTHONPATH": str(library)}
    subprocess.run([sys.executable, *command], cwd=folder, env=environment, check=True)


def smoke(artefact: Path, version: str, readme: str) -> None:
    """Install a wheel or an sdist into an empty folder; run the first program of README and the command there."""
    with tempfile.TemporaryDirectory() as name:
        library, empty = Path(name, "library").resolve(), Path(name, "empty").resolve()
        empty.mkdir()
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(library), str(artefact)]
        subprocess.run(pip, check=True)
        run("-c", PROGRAM + readme, str(library), version, folder=empty, library=library)
        run("-m", "natgrad.cli.main", "demo", "--steps", "2", folder=empty, library=library)
        if artefact.suffix == ".gz":
            with tarfile.open(artefact) as archive:
                archive.extractall(empty, filter="data")
            unpacked = empty / artefact.name.removesuffix(".tar.gz")
            run("-m", "pytest", "-q", "-p", "no:cacheprovider", *TESTS, folder=unpacked, library=library)
    print(f"{artefact.name}: runs")


def main(dist: str, tag: str = "") -> None:
    artefacts = sorted(Path(dist).resolve().iterdir())
    kinds = sorted(artefact.suffix for artefact in artefacts)
    assert kinds == [".gz", ".whl"], f"expected a wheel and an sdist in {dist}, not {artefacts}"
    version = artefacts[0].name.split("-")[1]
    assert tag in ("", f"v{version}"), f"the tag is {tag}, the version {version}"
    readme = Path(__file__).resolve().parents[1].joinpath("README.md").read_text(encoding="utf-8")
    program = re.search(r"```python\n(.*?)```", readme, re.DOTALL)
    assert program is not None
    for artefact in artefacts:
        smoke(artefact, version, program[1])


if __name__ == "__main__":
    main(*sys.argv[1:])
