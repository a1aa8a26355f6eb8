"""The scripts of the gallery run, are short, and look alike: a method has one colour, its name stands at its line."""

from __future__ import annotations

import re
import runpy
import warnings
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import pytest
import torch

from examples.gallery import style

ROOT = Path(__file__).parents[1]
SCRIPTS = sorted((ROOT / "examples" / "gallery").rglob("plot_*.py"))


@pytest.fixture
def pyplot(monkeypatch: pytest.MonkeyPatch) -> Iterator[object]:
    """Without a screen, with few steps; figures and the style are gone afterwards."""
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    monkeypatch.setenv("GALLERY", "quick")
    with torch.random.fork_rng(), matplotlib.rc_context():
        yield plt
        plt.close("all")


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem.removeprefix("plot_"))
def test_a_script_draws_its_picture(path: Path, pyplot: object, tmp_path: Path) -> None:
    import matplotlib.pyplot as plt

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of few steps
        runpy.run_path(str(path))
    (number,) = plt.get_fignums()
    figure = plt.figure(number)
    for axes in figure.axes:
        assert axes.get_title(), "a title says what is drawn; it is what a screen reader reads"
        assert axes.get_legend() is None, "names stand at the lines (style.curves)"
    figure.savefig(tmp_path / "picture.svg", transparent=True)
    look_alike(tmp_path / "picture.svg")


def look_alike(path: Path) -> None:
    """Text is text; the name of a method has its colour; there is no legend and no background."""
    picture = path.read_text(encoding="utf-8")
    root = ElementTree.fromstring(picture)
    texts = [
        ("".join(node.itertext()).strip(), node.get("style", ""))
        for node in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    assert texts, "text is text, and not outlines"
    for text, look in texts:
        if (colour := style.COLOURS.get(text)) is not None:
            assert f"fill: {colour}" in look, f"{text} has the colour {look}, not {colour}"
    assert 'id="legend' not in picture, "names stand at the lines (style.name_lines)"
    assert "fill: #ffffff" not in picture, "no background: the page may be dark"


DOCUMENTS = sorted([*(ROOT / "docs" / "figures").glob("*"), *(ROOT / "experiments" / "results").rglob("*.svg")])


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.stem)
def test_the_figures_of_the_documents_look_alike_and_have_a_title(path: Path) -> None:
    assert path.suffix == ".svg"
    look_alike(path)
    assert re.search(r"<title>\S.*</title>", path.read_text(encoding="utf-8")), "for screen readers"


def test_every_method_has_one_colour_and_is_drawn_somewhere() -> None:
    drawn = "".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name in ("ng.Natural", "Muon", "SOAP", "KL-Shampoo", "AdamW", "K-FAC", "Gauss–Newton", "L-BFGS"):
        assert f">{name}</text>" in drawn


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem.removeprefix("plot_"))
def test_a_script_is_short_and_has_a_page(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 60
    title = re.match(r'"""\n(.+)\n(=+)\n\n\S', text)
    assert title is not None, "a docstring with a title and a text"
    assert len(title[1]) == len(title[2])


def test_methods_have_different_colours() -> None:
    methods = [name for name in style.COLOURS if name not in ("first", "second")]
    assert len({style.COLOURS[name] for name in methods}) == len(methods)


def luminance(colour: str) -> float:
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("name", style.COLOURS)
def test_a_colour_can_be_seen_on_light_and_on_dark_pages(name: str) -> None:
    """Contrast at least 3 (WCAG, graphics) with white and with furo's dark background."""
    colour, dark = luminance(style.COLOURS[name]), luminance("#131416")
    assert 1.05 / (colour + 0.05) > 3
    assert (colour + 0.05) / (dark + 0.05) > 3
