"""Imports the package before pytest does: ``ng.pullback`` is a function, and shares its name with the subpackage.

pytest imports the modules that it collects one by one, and sets each as an attribute of its parent. It does not touch
what is imported already.
"""

import gc

import natgrad as natgrad


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not walk 20,000 tests again and again."""
    gc.collect()
    gc.freeze()
