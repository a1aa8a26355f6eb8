"""The report in headless Chromium, from disk: no error, boxes hide curves, it fits a phone and can be printed."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from pathlib import Path
from typing import Any

import pytest

from natgrad.cli.main import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs chromium, such as that of Debian")


def chromium(page: Path, *options: str) -> tuple[str, list[str]]:
    """The page after its scripts have run, and what they wrote to the console."""
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr"]
    done = subprocess.run(
        [*command, f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=5000", *options, page.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout, re.findall(r"CONSOLE.*", done.stderr)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """That of a demo of three steps."""
    out = tmp_path_factory.mktemp("demo")
    assert main(["demo", "--out", str(out), "--steps", "3"]) == 0
    return out / "report.html"


def answer(report: Path, name: str, page: str) -> Any:
    """What the script of a page has written into <output>."""
    path = report.with_name(name)
    path.write_text(page, encoding="utf-8")
    found = re.search(r"<output>(.*?)</output>", chromium(path, "--dump-dom")[0])
    assert found is not None
    return json.loads(found[1])


def test_the_console_is_empty(report: Path) -> None:
    assert chromium(report, "--dump-dom")[1] == []
    wrong = report.with_name("wrong.html")
    wrong.write_text(report.read_text(encoding="utf-8").replace("for (const box", "oops(); for (const box"))
    assert "oops is not defined" in chromium(wrong, "--dump-dom")[1][0], "an error would be seen"


def test_a_box_hides_the_curves_of_its_optimizer_alone(report: Path) -> None:
    script = """<output></output><script>
    const lines = name => [...document.querySelectorAll(`svg [id^="${name}:"]`)];
    const shown = name => lines(name).filter(line => line.getBoundingClientRect().width > 0).length;
    const box = document.getElementById("digits/AdamW"), all = [];
    for (const _ of "abc") {
      all.push([shown("digits/AdamW"), shown("digits/Muon"), shown("differential equation/AdamW")]);
      box.click();
    }
    document.querySelector("output").textContent = JSON.stringify(all);
    </script>"""
    page = report.read_text(encoding="utf-8").replace("</html>", script)
    shown, hidden, again = answer(report, "toggled.html", page)
    assert shown == [6, 6, 6]  # a curve and a name in each of three panels
    assert hidden == [0, 6, 6]
    assert again == shown


@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window(report: Path, width: int) -> None:
    script = """<script>onload = () => {
      const page = document.querySelector("iframe").contentDocument, out = document.querySelector("output");
      const curves = [...page.querySelectorAll("svg")].map(svg => Math.round(svg.getBoundingClientRect().width));
      out.textContent = JSON.stringify([page.documentElement.scrollWidth, page.documentElement.clientWidth, curves]);
    }</script>"""
    frame = f'<iframe width="{width}" height="800" srcdoc="{escape(report.read_text(encoding="utf-8"))}"></iframe>'
    page = f"<!doctype html><output></output>{frame}{script}"
    whole, seen, curves = answer(report, f"framed{width}.html", page)
    assert seen > width - 30
    assert whole <= seen
    assert len(curves) == 6
    assert min(curves) > 280, "a curve can be read"


def test_it_prints_on_a_few_pages(report: Path) -> None:
    pdf = report.with_name("report.pdf")
    chromium(report, f"--print-to-pdf={pdf}")
    assert 1 <= len(re.findall(rb"/Type\s*/Page\b", pdf.read_bytes())) <= 6
