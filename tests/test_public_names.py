"""The public names are fixed: ``public_names.txt`` has one line for every name that a user may import."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path
from types import ModuleType

import pytest

import natgrad

STORED = Path(__file__).with_name("public_names.txt")
NAMESPACES = (
    "natgrad",
    "natgrad.data",
    "natgrad.errors",
    "natgrad.families",
    "natgrad.functionspace",
    "natgrad.invariance",
    "natgrad.mirror",
    "natgrad.operators",
    "natgrad.optim",
    "natgrad.output",
    "natgrad.pde",
    "natgrad.pullbacks",
    "natgrad.rules",
    "natgrad.solve",
    "natgrad.step",
    "natgrad.structures",
    "natgrad.vi",
    "natgrad.watch",
)


def exported(namespace: str) -> set[str]:
    """The names that a module defines, or imports in the form ``X as X``."""
    source = importlib.import_module(namespace).__file__
    assert source is not None
    names: set[str] = set()
    for node in ast.parse(Path(source).read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom | ast.Import):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
        elif isinstance(node, ast.ClassDef | ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("namespace", NAMESPACES)
def test_the_public_names_are_the_stored_ones(namespace: str) -> None:
    stored = {
        line.rpartition(".")[2]
        for line in STORED.read_text(encoding="utf-8").split()
        if line.rpartition(".")[0] == namespace
    }
    module = importlib.import_module(namespace)
    lost = sorted(name for name in stored if not hasattr(module, name))
    assert not lost, f"{namespace} has lost {lost}. Public names stay: export them again from {namespace}."
    new = sorted(f"{namespace}.{name}" for name in exported(namespace) - stored)
    assert not new, f"New public names: {new}. If they are meant to be public, add these lines to tests/{STORED.name}."


def test_dir_lists_public_names_alone() -> None:
    """No module of the inside: neither what a name is imported from, nor what that module imports."""
    stored = {line.removeprefix("natgrad.") for line in STORED.read_text(encoding="utf-8").split()}
    listed = {name for name in dir(natgrad) if not name.startswith("_")}
    namespaces = {namespace.removeprefix("natgrad.") for namespace in NAMESPACES} - {"natgrad", "data"}
    assert listed == {name for name in stored if "." not in name} | namespaces
    assert sorted(natgrad.__all__) == sorted(listed)
    for name in listed:
        assert hasattr(natgrad, name)


def test_a_public_module_is_imported_by_its_name() -> None:
    """Not one that a function of the same name hides."""
    for name in natgrad.__all__:
        value = getattr(natgrad, name)
        if isinstance(value, ModuleType):
            assert value is importlib.import_module(f"natgrad.{name}")


def test_every_stored_name_belongs_to_a_namespace_that_is_checked() -> None:
    lines = STORED.read_text(encoding="utf-8").split()
    assert lines == sorted(set(lines)), f"tests/{STORED.name} is sorted, with every name once"
    assert {line.rpartition(".")[0] for line in lines} == set(NAMESPACES)
