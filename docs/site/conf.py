"""Configuration of the site (Sphinx). ``make site`` builds what stage.py writes; ONLINE=1 links to torch's pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.writers.html5 import HTML5Translator

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import stage  # noqa: E402

import natgrad  # noqa: E402

project, author, copyright = "natgrad", "natgrad contributors", "2026, natgrad contributors"
version = release = natgrad.__version__
root_doc = "index"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["files/**"]
source_suffix = {".rst": "restructuredtext", ".md": "markdown"}

# Pages: anchors as those of a code host, so that links work in both places.
myst_enable_extensions = ["colon_fence", "dollarmath", "deflist"]
myst_heading_anchors = 4
suppress_warnings = ["config.cache"]

# Docstrings
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_member_order = "bysource"
napoleon_custom_sections = ["Method"]
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 80
add_module_names = False
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
intersphinx_mapping = (
    {
        "python": ("https://docs.python.org/3", None),
        "torch": ("https://docs.pytorch.org/docs/stable", None),
    }
    if os.environ.get("ONLINE")
    else {}
)

# Gallery: every script is run, in one process, with its own small data.
sphinx_gallery_conf = {
    "examples_dirs": str(HERE.parents[1] / "examples" / "gallery"),
    "gallery_dirs": "gallery",
    "filename_pattern": "/plot_",
    "ignore_pattern": "style|__init__",
    "backreferences_dir": "api/backreferences",
    "doc_module": ("natgrad",),
    "image_scrapers": ("sphinx_gallery_svg",),
    "min_reported_time": 1e9,
    "capture_repr": (),
    "show_memory": False,
    "show_signature": False,
    "write_computation_times": False,
    "abort_on_example_error": True,
    "reference_url": {"natgrad": None},
}

# Look
html_theme = "furo"
html_title = f"natgrad {release}"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_math_renderer = "mathml"
pygments_style, pygments_dark_style = "friendly", "github-dark"
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#a3191b", "color-brand-content": "#a3191b"},
    "dark_css_variables": {"color-brand-primary": "#ff8f86", "color-brand-content": "#ff8f86"},
    "navigation_with_keys": True,
}


def inline_math(translator: HTML5Translator, node: nodes.math) -> None:
    """Formulas become MathML, which browsers draw themselves: no script, no font, no network."""
    translator.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def block_math(translator: HTML5Translator, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="math">{tex2mathml(node.astext(), as_block=True)}</div>')
    raise nodes.SkipNode


def escape_docstring(app: Sphinx, what: str, name: str, thing: object, options: object, lines: list[str]) -> None:
    """Outside of examples and literals, ``*`` and ``|`` of a docstring are signs of mathematics, not of markup."""
    prose, text, in_example = [], [], False
    for line in [*lines, ">>>"]:
        in_example = line.lstrip().startswith(">>>") or (in_example and bool(line.strip()))
        if not in_example:
            prose.append(line)
            continue
        text += stage.escape("\n".join(prose)).split("\n") if prose else []
        prose = []
        text.append(line)
    lines[:] = text[:-1]


def setup(app: Sphinx) -> None:
    app.add_html_math_renderer("mathml", (inline_math, None), (block_math, None))
    app.connect("autodoc-process-docstring", escape_docstring, priority=100)
