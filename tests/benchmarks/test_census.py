"""The census counts what is there."""

from benchmarks import census


def test_the_census_counts_the_package_and_a_plain_step() -> None:
    size, step = census.package(), census.plain_step()
    assert 50 < size["modules"] < size["classes"] < size["lines"]
    assert 0 < step["step modules"] < size["modules"]
    assert 0 < step["step operations"] <= 80


def test_the_reading_order_is_of_twelve_files_that_run() -> None:
    run = census.executed()
    assert len(census.reading_order()) <= 12
    assert 50 < run["% in the order"] < 100
