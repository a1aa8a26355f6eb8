"""``help()`` of every public name: a purpose in one line, every argument, short paragraphs, no method without words."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

SECTION = re.compile(r"^(?:Args|Attributes):\n((?: {4}.*\n?|\n)*)", re.MULTILINE)
ENTRY = r" {4}(?=\w+: )"
EQUATION = re.compile(r"[=←≤≥Σ∫∇∂‖√∈↦]")


def public() -> dict[str, Any]:
    """Every public class and function once, by one of its names."""
    found: dict[int, tuple[str, Any]] = {}
    for name in Path(__file__).with_name("public_names.txt").read_text(encoding="utf-8").split():
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute)
        inside = vars(thing).items() if inspect.ismodule(thing) else ()
        own = [(f"{name}.{each}", one) for each, one in inside if getattr(one, "__module__", "") == thing.__name__]
        for label, one in [(name, thing), *own]:
            if (inspect.isclass(one) or inspect.isroutine(one)) and not one.__name__.startswith("_"):
                found.setdefault(id(one), (label, one))
    return dict(found.values())


PUBLIC = public()


def text_of(thing: Any) -> str:
    return inspect.cleandoc(thing.__doc__ or "")


def parameters(thing: Any) -> list[str]:
    try:
        return [
            p.name
            for p in inspect.signature(thing).parameters.values()
            if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
    except (TypeError, ValueError):  # exceptions
        return []


def methods(thing: type) -> Iterator[tuple[str, str | None]]:
    """The public methods and properties that natgrad has written, and their docstrings, which may be inherited."""
    for name in filter(lambda name: not name.startswith("_"), dir(thing)):
        member = inspect.getattr_static(thing, name, None)
        inner = getattr(member, "fget", None) or getattr(member, "func", None) or getattr(member, "__func__", member)
        if inspect.isfunction(inner) and inner.__module__.startswith("natgrad") and inner.__name__ != "<lambda>":
            yield name, inspect.getdoc(getattr(thing, name) if inspect.isfunction(member) else member)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_first_line_says_what_it_is_for(name: str) -> None:
    first, _, rest = text_of(PUBLIC[name]).partition("\n")
    assert first.endswith("."), "a sentence on a line of its own"
    assert not rest or rest.startswith("\n"), "a sentence on a line of its own"
    assert len(first) <= 90
    assert not EQUATION.search(first), "equations stand under Method"


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if len(parameters(thing)) > 1])
def test_every_argument_has_its_line(name: str) -> None:
    described = {
        entry
        for section in SECTION.findall(text_of(PUBLIC[name]))
        for entry in re.findall(r"^ {4}(\w+): ", section, re.M)
    }
    assert not set(parameters(PUBLIC[name])) - described
    assert not described - set(parameters(PUBLIC[name])), "arguments that are no more"


@pytest.mark.parametrize("name", PUBLIC)
def test_paragraphs_are_short(name: str) -> None:
    for paragraph in text_of(PUBLIC[name]).split("\n\n"):
        if ">>>" not in paragraph:
            for part in re.split(rf"\n(?:{ENTRY}| *- )", paragraph):
                assert len(part.split()) <= 60, part


@pytest.mark.parametrize("name", [name for name, thing in PUBLIC.items() if inspect.isclass(thing)])
def test_every_public_method_has_a_docstring(name: str) -> None:
    assert not [method for method, text in methods(PUBLIC[name]) if not text]
