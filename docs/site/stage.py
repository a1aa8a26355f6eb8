"""Write the source of the site: the pages of docs/, with links that work there, and one page for every public name.

    python docs/site/stage.py build/source

The pages link to files of the repository, as they must on a code host. Here a link to a page becomes a link to the page
of the site, and any other file is copied and linked. API pages are made of tests/public_names.txt: an object that has
several public names has one page, under the shortest. Sphinx reads what this writes; nothing of it is edited.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import shutil
import sys
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(ROOT))  # this checkout, and not what is installed
ELSEWHERE = {
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changes.md",
    "README.md": "index.md",
    "experiments/sobolev_cifar/protocol.md": "cifar_protocol.md",
}
DIRECTIVES = {str: "autodata", type(re): "automodule"}
OPTIONS = {"autoclass": "\n   :members:\n   :show-inheritance:", "automodule": "\n   :members:"}
CALLED = ("autoclass", "autofunction")
LINK = re.compile(r"(\]\()(?!https?:|#)([^)\s#]+)((?:#[^)\s]*)?\))")


def write(path: Path, text: str) -> None:
    """Write a file if it has another text: Sphinx reads only what is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists() or path.read_text(encoding="utf-8") != text:
        path.write_text(text, encoding="utf-8")


def pages() -> dict[Path, str]:
    """The files of all written pages, and their names in the site."""
    written = [path for path in DOCS.rglob("*.md") if path.relative_to(DOCS).parts[0] != "site"]
    return {path: path.relative_to(DOCS).as_posix() for path in written} | {
        ROOT / name: page for name, page in ELSEWHERE.items() if page != "index.md"
    }


def stage_page(path: Path, name: str, source: Path) -> None:
    """Write one page, and copy what it links to."""
    names = {**pages(), ROOT / "README.md": "index.md"}
    for script in (ROOT / "examples" / "gallery").rglob("plot_*.py"):  # Sphinx makes a page of each
        names[script] = script.relative_to(ROOT / "examples").with_suffix(".rst").as_posix()
    here = Path(name).parent

    def translate(link: re.Match[str]) -> str:
        target = (path.parent / link[2]).resolve()
        if (page := names.get(target)) is not None:
            return f"{link[1]}{os.path.relpath(page, here)}{link[3]}"
        if not target.is_file():
            return link[0]
        if target.suffix == ".md":  # a record: a page that no list of pages has
            write(
                source / "records" / target.name,
                f"---\norphan: true\n---\n\n# {target.stem}\n\n{target.read_text(encoding='utf-8')}",
            )
            return f"{link[1]}{os.path.relpath(Path('records') / target.name, here)}{link[3]}"
        copy = target.relative_to(DOCS if target.is_relative_to(DOCS) else ROOT)
        copy = copy if target.is_relative_to(DOCS) else "files" / copy
        (source / copy).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(target, source / copy)
        return f"{link[1]}{os.path.relpath(copy, here)}{link[3]}"

    text = LINK.sub(translate, path.read_text(encoding="utf-8"))
    # A number of a table stays on one line with its deviation.
    write(
        source / name,
        re.sub(r"(?m)^\|.*$", lambda row: row[0].replace(" ± ", "\N{NO-BREAK SPACE}±\N{NO-BREAK SPACE}"), text),
    )


class Entry(NamedTuple):
    """A public object: its shortest name, its other names, and the name of its page."""

    name: str
    others: tuple[str, ...]
    page: str
    directive: str
    line: str


def summary(thing: object) -> str:
    """The first sentence of a docstring, if it is its own and not that of its class."""
    if inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing):
        text = inspect.getdoc(thing) or ""
        return " ".join(text.split("\n\n")[0].split())
    return ""


def entries() -> list[Entry]:
    """Every public object once."""
    names: dict[object, list[str]] = defaultdict(list)
    stored = (ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").splitlines(keepends=True)
    for name in map(str.strip, stored):
        module, _, attribute = name.rpartition(".")
        thing = getattr(importlib.import_module(module), attribute)
        if inspect.ismodule(thing) and f"{thing.__name__}." in "".join(stored):
            continue  # a namespace: its names have pages of their own
        hashable = inspect.isclass(thing) or inspect.isroutine(thing) or inspect.ismodule(thing)
        names[thing if hashable else name].append(name)
    listed, taken = [], set[str]()
    for thing, known in names.items():
        first, *others = sorted(known, key=lambda name: (name.count("."), len(name), name))
        directive = DIRECTIVES.get(type(thing), "autoclass" if inspect.isclass(thing) else "autofunction")
        page = (
            first if first.lower() not in taken else f"{first}.{directive.removeprefix('auto')}"
        )  # pullback, Pullback
        taken.add(page.lower())
        listed.append(Entry(first, tuple(others), page, directive, summary(thing)))
    return sorted(listed, key=lambda entry: entry.name.lower())


def escape(text: str) -> str:
    """Prose of a docstring as reStructuredText: ``*``, ``|`` and a last ``_`` are what they are, as in [n *out]."""
    text = re.sub(r"(``[^`]+``)(\w?)", lambda m: f"{m[1]}\\ {m[2]}" if m[2] else m[1], text)  # ``gtol``²
    pieces = re.split(r"(``.*?``|:\w+:`[^`]*`|`[^`]*`_?)", text, flags=re.DOTALL)
    return "".join(p if i % 2 else re.sub(r"(?<!\\)([*|]|_(?!\w))", r"\\\1", p) for i, p in enumerate(pieces))


def stage_api(source: Path) -> list[Entry]:
    """Write one page for every public object, and an index of them by namespace."""
    listed = entries()
    namespaces: dict[str, list[Entry]] = defaultdict(list)
    for entry in listed:
        namespaces[entry.name.rpartition(".")[0]].append(entry)
        options = OPTIONS.get(entry.directive, "")
        short = entry.name.rpartition(".")[2]
        also = f"\nAlso ``{'``, ``'.join(entry.others)}``.\n" if entry.others else ""
        gallery = (
            f"\n.. minigallery:: {entry.name}\n   :add-heading: In the gallery\n" if entry.directive in CALLED else ""
        )
        title = f"{short}\n{'=' * len(short)}"
        text = f"{title}\n\n.. {entry.directive}:: {entry.name}{options}\n{also}{gallery}"
        write(source / "api" / f"{entry.page}.rst", text)
    index = ["API", "===", "", "Every public name. ``import natgrad as ng``; ``ng.KFAC`` is ``natgrad.KFAC``.", ""]
    for namespace, group in sorted(namespaces.items()):
        about = summary(importlib.import_module(namespace))
        index += [namespace, "-" * len(namespace), "", escape(about) if namespace != "natgrad" else "", ""]
        index += [".. list-table::", "   :widths: 30 70", "   :class: api-names", ""]
        for entry in group:
            label = entry.name.rpartition(".")[2]
            index += [f"   * - :doc:`{label} <{entry.page}>`", f"     - {escape(entry.line)}"]
        index += [""]
    index += [".. toctree::", "   :hidden:", ""] + [f"   {entry.page}" for entry in listed] + [""]
    write(source / "api" / "index.rst", "\n".join(index))
    pages = {f"{entry.page}.rst" for entry in listed} | {"index.rst"}
    for path in (source / "api").glob("*.rst"):
        if path.name not in pages:
            path.unlink()
    return listed


def stage(source: Path) -> None:
    """Write all of the site's source, and remove pages that are no more."""
    for path, name in pages().items():
        stage_page(path, name, source)
    for page in source.rglob("*.md"):
        if page.relative_to(source).parts[0] not in ("gallery", "files", "records") and page.relative_to(
            source
        ).as_posix() not in {*pages().values()}:
            page.unlink()
    stage_api(source)


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
