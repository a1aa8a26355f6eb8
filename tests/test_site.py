"""The site has every page and every public name once. Sphinx itself is not needed: `make site` runs it, with -W."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def stage() -> Any:
    before = list(sys.path)
    spec = importlib.util.spec_from_file_location("stage", ROOT / "docs" / "site" / "stage.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path[:] = before
    return module


def test_every_page_is_in_the_table_of_contents_once(stage: Any) -> None:
    trees = re.findall(r"```\{toctree\}\n(.*?)```", INDEX, re.DOTALL)
    listed = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    written = {page.removesuffix(".md") for page in stage.pages().values()} - {"index"}
    assert sorted(listed) == sorted(written | {"gallery/index", "api/index"})


def test_every_public_name_has_one_page(stage: Any) -> None:
    entries = stage.entries()
    stored = set((ROOT / "tests" / "public_names.txt").read_text(encoding="utf-8").split())
    named = [name for entry in entries for name in (entry.name, *entry.others)]
    assert len(named) == len(set(named))
    namespaces = {name for name in stored if any(other.startswith(f"{name}.") for other in stored)}
    assert stored - set(named) == namespaces
    pages = [entry.page.lower() for entry in entries]  # some file systems do not tell Pullback from pullback
    assert len(pages) == len(set(pages))
    assert all(entry.line for entry in entries if entry.directive != "autodata")


def test_links_to_files_of_the_repository_lead_to_files_of_the_site(stage: Any, tmp_path: Path) -> None:
    for path, name in stage.pages().items():
        stage.stage_page(path, name, tmp_path)
    for page in tmp_path.rglob("*.md"):
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for link in re.findall(r"\]\((?!https?:|#)([^)\s#]+)", text):
            target = (page.parent / link).resolve()
            assert target.is_relative_to(tmp_path.resolve()), f"{page.name}: {link}"
            drawn = target.suffix == ".rst" and target.relative_to(tmp_path.resolve()).parts[0] == "gallery"
            script = ROOT / "examples" / target.relative_to(tmp_path.resolve()).with_suffix(".py")
            assert (
                target.is_file()
                or (drawn and script.is_file())
                or (ROOT / "docs" / page.relative_to(tmp_path)).parent.joinpath(link).is_dir()
            ), link


@pytest.mark.parametrize(
    ("prose", "markup"),
    [
        ("θ* of [n *out], |x|", r"θ\* of [n \*out], \|x\|"),
        ("``a*b`` and ``**c``", "``a*b`` and ``**c``"),
        ("``gtol``² is", r"``gtol``\ ² is"),
        ("``ftol`` times ``xtol`` or ``gtol``²", r"``ftol`` times ``xtol`` or ``gtol``\ ²"),
        ("the mean of x_ and J_nᵀ", r"the mean of x\_ and J_nᵀ"),
    ],
)
def test_signs_of_mathematics_are_no_markup(stage: Any, prose: str, markup: str) -> None:
    assert stage.escape(prose) == markup


# Studies and records, which may be as long as they are; the bibliography; what contributors read.
EVIDENCE = {"benchmarks", "cifar", "cifar_record", "least_squares_scipy", "pde_results", "races", "sobolev_study"}
PAGES = [
    page
    for page in sorted((ROOT / "docs").rglob("*.md"))
    if page.stem not in EVIDENCE | {"architecture", "references", "index"}
]


def words(page: Path) -> int:
    return len(re.sub(r"<!--.*?-->", "", page.read_text(encoding="utf-8")).split())


@pytest.mark.parametrize(("captions", "most"), [(("Guides", "Look and understand"), 25_000), (("Start",), 3_000)])
def test_what_a_user_reads_is_no_book(captions: tuple[str, ...], most: int) -> None:
    trees = re.findall(r":caption: ([^\n]+)\n\n(.*?)```", INDEX, re.DOTALL)
    read = [name for caption, tree in trees if caption in captions for name in tree.split() if name != "gallery/index"]
    assert len(read) > 5
    assert sum(words(ROOT / "docs" / f"{name}.md") for name in read) < most


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_page_is_short_and_so_are_its_sentences(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert words(page) < 1800
    prose = re.sub(r"```.*?```|\$\$.*?\$\$|<!--.*?-->", "", text, flags=re.DOTALL)
    paragraphs = [p for p in prose.split("\n\n") if not p.lstrip().startswith(("|", "#", "- ", "!"))]
    sentences = [s.split() for p in paragraphs for s in re.split(r"(?<=[.!?:])\s+", re.sub(r"\]\([^)]*\)", "]", p))]
    long = [sentence for sentence in sentences if len(sentence) > 25]
    assert len(long) <= 0.15 * len(sentences), long
