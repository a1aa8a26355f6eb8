"""The laws of the house that a program can check. Each law has a list of today's exceptions, which only shrinks.

Exceptions are counted by package or folder, so that code may move within it. When a count falls, lower the number;
never raise one.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("natgrad", "tests", "benchmarks", "experiments", "examples", "docs")
Offences = dict[str, list[str]]


@cache
def modules() -> dict[str, ast.Module]:
    """The syntax trees of the package, by path from its root."""
    package = ROOT / "natgrad"
    return {
        path.relative_to(package).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(package.rglob("*.py"))
    }


def check(offences: Mapping[str, list[str]], allowed: Mapping[str, int], law: str) -> None:
    for where, lines in offences.items():
        allowance = allowed.get(where, 0)
        listing = "\n  ".join(lines)
        assert len(lines) <= allowance, f"{law}\n{where}: {len(lines)} exceptions, {allowance} allowed:\n  {listing}"


def is_device_or_private(name: str) -> bool:
    """``torch.cuda.…``, cuDNN's switches, ``torch._x`` and ``torch.utils._x``; base classes of layers are neither."""
    if not name.startswith("torch.") or name.startswith("torch.nn.modules."):
        return False
    if name.startswith(("torch.cuda", "torch.backends.cud")):
        return True
    return any(step.startswith("_") and not step.endswith("__") for step in name.split("."))


def looks_at_devices(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return any(is_device_or_private(alias.name) for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return any(is_device_or_private(f"{node.module}.{alias.name}") for alias in node.names)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        private = any(name in node.value for name in ("_hooks", "_torchdynamo", "_orig_mod"))
        return is_device_or_private(node.value.partition(" ")[0]) or (private and ">>>" not in node.value)
    if isinstance(node, ast.Attribute):
        root: ast.expr = node
        while isinstance(root, ast.Attribute | ast.Call | ast.Subscript):
            root = root.func if isinstance(root, ast.Call) else root.value
        if node.attr in ("is_cuda", "type") or (isinstance(root, ast.Name) and root.id == "torch"):
            text = ast.unparse(node)  # which is slow
            return node.attr == "is_cuda" or text.endswith("device.type") or is_device_or_private(text)
    return False


DEVICES: dict[str, int] = {}


def test_only_accelerate_looks_at_a_device_or_at_private_torch() -> None:
    offences: Offences = defaultdict(list)
    for path, tree in modules().items():
        if not path.startswith("accelerate/"):
            numbers = {
                node.lineno
                for node in ast.walk(tree)
                if isinstance(node, ast.stmt | ast.expr) and looks_at_devices(node)
            }
            lines = (ROOT / "natgrad" / path).read_text(encoding="utf-8").splitlines()
            hits = [f"{path}:{number} {lines[number - 1].strip()}" for number in sorted(numbers)]
            offences[path.split("/")[0]] += hits
    check(offences, DEVICES, "Only natgrad/accelerate may do this: ask accelerate/devices.py.")


BOUNDS = {
    "_MEMORY": "above it an error is raised",
    "_NODES": "likewise",
    "_NEAR, _FAR": "units in the last place",
}


def test_only_accelerate_says_how_much_is_computed_at_once() -> None:
    """A module elsewhere that names a power of two tunes something."""
    found = {
        f"{path}: {ast.unparse(node)}"
        for path, tree in modules().items()
        for node in tree.body
        if isinstance(node, ast.Assign)
        and not path.startswith("accelerate/")
        and any(isinstance(part, ast.BinOp) and ast.unparse(part).startswith("2 **") for part in ast.walk(node.value))
        and ast.unparse(node.targets[0]).strip("()") not in BOUNDS
    }
    assert not found, "put it into natgrad/accelerate/temporaries.py"


FACTORISATIONS = {f"torch.linalg.{name}" for name in ("eigh", "eigvalsh", "svd", "svdvals", "cholesky")}
RAW: dict[str, int] = {}


def test_matrices_are_factored_where_what_is_not_finite_has_a_name() -> None:
    """torch's own routines return NaN, finite noise or an error of LAPACK, as the size has it."""
    offences: Offences = {}
    elsewhere = [item for item in modules().items() if not item[0].startswith(("accelerate/", "linalg.py"))]
    for path, tree in elsewhere:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in FACTORISATIONS:
                offences.setdefault(path.split("/")[0], []).append(f"{path}:{node.lineno} {ast.unparse(node)}")
    check(offences, RAW, "Call eigh, eigvalsh, svd, svdvals or cholesky of natgrad/linalg.py.")


PRIVATE: dict[str, int] = {}


def test_only_accelerate_reads_private_attributes_of_torch() -> None:
    """``node._saved_self``, ``module._forward_hooks``, …: names with an underscore that the package does not define.

    What a class inherits from torch, ``self._extended_shape``, is its own.
    """
    defined: set[str] = set()
    offences: Offences = {}
    for tree in modules().values():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                defined.add(node.name)
            elif isinstance(node, ast.Attribute | ast.Name) and isinstance(node.ctx, ast.Store):
                defined.add(node.attr if isinstance(node, ast.Attribute) else node.id)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.Attribute) or node.attr in defined or looks_at_devices(node):
                continue
            if ast.unparse(node.value) == "self":
                continue
            if node.attr.startswith("_") and not node.attr.endswith("__") and not path.startswith("accelerate/"):
                line = f"{path}:{node.lineno} {ast.unparse(node)}"
                offences.setdefault(path.split("/")[0], []).append(line)
    check(offences, PRIVATE, "Only natgrad/accelerate reads private attributes of torch.")


# Both classes of a pair are public, each in its own namespace, and public names stay. By name: the two packages.
TWICE: dict[str, list[str]] = {
    "Conjugate": ["mirror", "vi"],  # the convex conjugate ψ* of a potential; a likelihood that is conjugate to a family
    "Laplace": ["families", "vi"],  # the distribution; the approximation of a posterior
    "Quadrature": ["functionspace", "vi"],  # nodes and weights of a measure; a likelihood that is integrated by nodes
    "Space": ["families", "invariance"],  # the domain of all finite points; the activations of a layer, in groups
    "Step": ["step", "vi"],  # what a step rule returns; the size of a variational step, as asked and as taken
}


def test_a_class_name_exists_once() -> None:
    homes: Offences = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(f"{path}:{node.lineno}")
    packages = {name: sorted(home.split("/")[0] for home in where) for name, where in homes.items()}
    twice = {name: where for name, where in homes.items() if len(where) > 1 and packages[name] != TWICE.get(name)}
    assert not twice, f"A class name exists once in the package, with or without an underscore: {twice}"
    once = [name for name in TWICE if len(homes[name]) < 2]
    assert not once, f"These names no longer exist twice: take them off the list: {once}"


def test_only_public_names_exist_twice() -> None:
    public = set((ROOT / "tests/public_names.txt").read_text(encoding="utf-8").split())
    pairs = {f"natgrad.{package}.{name}" for name, pair in TWICE.items() for package in pair}
    assert pairs <= public, f"Not public, so rename the class: {sorted(pairs - public)}"


def test_an_import_loads_no_compiler() -> None:
    """torch's takes longer than all of natgrad: an optimizer loads it, as those of torch do."""
    program = "import sys, natgrad; sys.exit('torch._dynamo' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == 0, "call natgrad.accelerate.modules.uncompiled, not torch.compiler.disable"


# Lines of code by package: no docstrings, comments, imports, blank lines. An entry is lowered when its package shrinks.
# Who raises one says in the commit which measurement pays for it, and what was deleted instead (CONTRIBUTING.md).
LINES: dict[str, int] = {
    "accelerate": 2630,
    "cli": 916,
    "data": 23,
    "families": 2110,
    "fit": 2078,
    "gradients": 1208,
    "functionspace": 1306,
    "integrations": 107,
    "invariance": 606,
    "kernels": 558,
    "mirror": 1062,
    "natgrad": 2955,
    "operators": 0,
    "optim": 3628,
    "output": 1245,
    "pullbacks": 4318,
    "rules": 1156,
    "solve": 239,
    "step": 832,
    "structures": 3028,
    "vi": 1291,
    "watch": 573,
}


def lines_of_code(tree: ast.Module, text: str) -> int:
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    code = {n for token in tokens if token.type not in _NO_CODE for n in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom) or (
            isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ):
            code.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(code)


_NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def test_the_code_of_a_package_does_not_grow() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path, tree in modules().items():
        package = path.split("/")[0] if "/" in path else "natgrad"
        counts[package] += lines_of_code(tree, (ROOT / "natgrad" / path).read_text(encoding="utf-8"))
    grown = {name: f"{count} lines" for name, count in counts.items() if count > LINES.get(name, 0)}
    assert not grown, f"delete something, or raise LINES and say what pays for it: {grown}, where {LINES} are allowed"


OPTIONS: dict[str, int] = {}


def test_arguments_are_visible() -> None:
    offences: Offences = defaultdict(list)
    for path, tree in modules().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (kwargs := node.args.kwarg) is not None:
                annotation = ast.unparse(kwargs.annotation) if kwargs.annotation is not None else ""
                if kwargs.arg == "options" or "Unpack" in annotation:
                    offences[path.split("/")[0]].append(f"{path}:{node.lineno} {node.name}(**{kwargs.arg})")
    check(offences, OPTIONS, "Arguments are keyword-only and visible in help(): no **options, no Unpack.")


# Citations by the number of a file, or of a row of a list, that no reader has.
CITATION = re.compile(
    r"(?<![\d.])00[0-4](?=[ ,]+(\(|section|appendix|§|prop|theorem|eq|def|ex|lemma))|paper 00\d|errata \d"
    r"|def test_[a-z]\d+_",
    re.I,
)
CITATIONS: dict[str, int] = {}


def test_papers_are_cited_by_author_and_year() -> None:
    offences: Offences = defaultdict(list)
    files = [path for folder in FOLDERS for kind in ("*.py", "*.md") for path in sorted((ROOT / folder).rglob(kind))]
    for path in [*files, *sorted(ROOT.glob("*.md")), ROOT / "pyproject.toml", ROOT / "Makefile"]:
        if path == Path(__file__):
            continue
        name = path.relative_to(ROOT).as_posix()
        where = name.split("/")[0]
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if CITATION.search(line):
                offences[where].append(f"{name}:{number} {line.strip()}")
    check(offences, CITATIONS, "Cite papers as Author (year), listed in docs/references.md.")
