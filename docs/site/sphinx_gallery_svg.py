"""Pictures of the gallery are SVG: sharp on every screen, with text that can be searched, on the page's background."""

from __future__ import annotations

from typing import Any

from sphinx_gallery.scrapers import matplotlib_scraper


def scrape(*arguments: Any, **options: Any) -> Any:
    return matplotlib_scraper(*arguments, format="svg", transparent=True, **options)


def _get_sg_image_scraper() -> Any:
    return scrape
