"""Imports the package before pytest does: ``ng.pullback`` is a function, and shares its name with the subpackage.

pytest imports the modules that it collects one by one, and sets each as an attribute of its parent. It does not touch
what is imported already.
"""

import gc
import logging

import pytest

import natgrad as natgrad


def pytest_configure() -> None:
    """Let torch's loggers propagate: else pytest adds its handler to each of the fifty, three times in every test."""
    for name in [*logging.root.manager.loggerDict]:
        if name.startswith("torch."):
            logging.getLogger(name).propagate = True


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not walk 15,000 tests again and again."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """After a file, freeze what its tests have left, too: caches, and libraries that they import."""
    if nextitem is not None and nextitem.path != item.path:
        gc.collect(1)  # what is young: a whole collection takes long, and there are 400 files
        gc.freeze()
