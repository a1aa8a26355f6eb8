"""The documents run, are current, and point at what exists."""

from __future__ import annotations

import doctest
import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import pages

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = sorted((ROOT / "docs").rglob("*.md"))
WRITTEN = [README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *PAGES]
STALE = "quotes what the results do not say: run `python -m benchmarks.pages`"


@pytest.mark.parametrize("page", pages.pages(), ids=lambda page: page.stem)
def test_a_page_quotes_what_was_measured(page: Path) -> None:
    text = page.read_text()
    assert text == pages.filled(text), f"{page.name} {STALE}"
    assert text.count("<!-- {{ ") == text.count("<!-- end -->") == len(pages.MARK.findall(text))
    inline = re.findall(r"^<!-- \{\{.*<!-- end -->", text, re.MULTILINE)
    assert not inline, f"a line that begins with a comment is HTML, not Markdown: put a word before {inline[0]}"


# Libraries that some pages compare with, and that the tests do not install.
PEERS = {"backpack", "curvlinops", "gpytorch", "kronfluence", "laplace", "pina"}


def runnable(page: Path) -> str:
    """The text of a page, without the blocks that import a library of others that is not installed."""
    missing = {name for name in PEERS if find_spec(name) is None}
    blocks = re.split(r"(?m)^(?=```)", page.read_text())
    return "".join(block for block in blocks if not missing & {*re.findall(r"(?m)^>>> (?:from|import) (\w+)", block)})


@pytest.mark.parametrize("page", [p for p in PAGES if ">>>" in p.read_text()], ids=lambda page: page.stem)
def test_every_example_of_the_page_prints_what_it_says(page: Path) -> None:
    test = doctest.DocTestParser().get_doctest(runnable(page), {}, page.stem, str(page), 0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
        failures, examples = runner.run(test)
    assert examples > 0
    assert failures == 0


def test_every_block_of_the_readme_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for block in blocks:
            exec(block, names)
    model, x_test, t_test = names["model"], names["x_test"], names["t_test"]
    assert float((model(x_test).argmax(1) == t_test).double().mean()) > 0.95
    assert float(names["ω"] @ names["v"]) > 0  # an ascent vector
    torch.testing.assert_close(names["curve"].x, torch.tensor([3.0, 0.7]), rtol=1e-2, atol=1e-2)
    made, loss, train, test = names["problem"]()
    for batches in (train, test):
        assert all(loss(made(inputs), targets).isfinite() for inputs, targets in batches)


def test_the_readme_is_short_and_names_only_what_exists() -> None:
    import natgrad as ng

    text = README.read_text()
    assert len(re.sub(r"<!--.*?-->", "", text).split()) < 900
    used = set(re.findall(r"\bng\.([A-Za-z_]+)", text)) | set(re.findall(r"`([A-Z][A-Za-z]+)\(", text))
    assert not [name for name in used - {"MyRule"} if not hasattr(ng, name)]


NAME = r"(?:van |Van )?[A-Z][a-zà-ÿ][\w-]*"
CITATION = re.compile(rf"({NAME}(?:(?:, | and | & |, and ){NAME})*(?: et al\.)?),? \(?((?:1[89]|20)\d\d)\b(?!,\d)")


def citations() -> dict[tuple[str, int], str]:
    """A file for every first author and year that a document or a docstring cites."""
    cited = {}
    for folder in ("docs", "natgrad", "examples", "experiments", "benchmarks", "tests"):
        paths = [*(ROOT / folder).rglob("*.md"), *(ROOT / folder).rglob("*.py")]
        for path in sorted(p for p in paths if p.stem != "references"):
            prose = " ".join(line.strip().lstrip("#").strip() for line in path.read_text().splitlines())
            for match in CITATION.finditer(prose):
                cited[match[1].split()[0].strip(","), int(match[2])] = path.relative_to(ROOT).as_posix()
    return cited


def test_the_bibliography_has_what_is_cited_and_nothing_else() -> None:
    bibliography = (ROOT / "docs" / "references.md").read_text()
    entries = re.findall(r"^- \*\*([^*]+?) \((\d{4})\)\*\*\.", bibliography, re.MULTILINE)
    listed = {(authors.split()[0].strip(","), int(year)) for authors, year in entries}
    cited = citations()
    missing = {f"{author} ({year}) in {path}" for (author, year), path in cited.items() if (author, year) not in listed}
    assert not missing, f"Add these to docs/references.md: {missing}"
    assert not listed - cited.keys(), f"Nobody cites these entries of docs/references.md: {listed - cited.keys()}"


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.stem)
def test_every_link_leads_to_a_file_and_a_heading(page: Path) -> None:
    for link in re.findall(r"\]\((?!https?:)([^)\s]+)\)", page.read_text()):
        file, _, anchor = link.partition("#")
        target = (page.parent / file).resolve() if file else page
        assert target.exists(), link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings], link


@pytest.mark.parametrize("draw", [pages.draw, pages.draw_cost, pages.draw_rates])
def test_the_figures_of_the_pages_are_drawn_and_small(draw: Callable[[Path], None], tmp_path: Path) -> None:
    draw(tmp_path / "figure.svg")
    assert (tmp_path / "figure.svg").stat().st_size < 100_000


def test_the_architecture_page_names_what_exists() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text()
    paths = set(re.findall(r"`(natgrad/[\w/.]+\.py)`", text))
    assert len(paths) > 14
    assert not [path for path in paths if not (ROOT / path).exists()]
    for nouns, path in re.findall(r"^\| (`[^|]+`) \| `([^|`]+)` \|", text, re.MULTILINE):
        for noun in re.findall(r"`(\w+)`", nouns):
            assert re.search(rf"^(class|def) {noun}\b", (ROOT / path).read_text(), re.MULTILINE), f"{noun} in {path}"
    for path, names in re.findall(r"^\| \d+ \| `([^|`]+)` \| (.+) \|$", text, re.MULTILINE):  # what is to be read
        beside = [(ROOT / path).parent / name for name in re.findall(r"`(\w+\.py)`", names)]
        code = "\n".join(file.read_text() for file in [ROOT / path, *beside])
        for name in re.findall(r"`(?:\w+\.)?(\w+)`", re.sub(r"`\w+\.py`|`opt[^`]*`", "", names)):
            assert re.search(rf"^ *(class|def) {name}\b", code, re.MULTILINE), f"{name} in {path}"
