"""Tiers of tests: a pytest plugin (see conftest).

    pytest                 fast: one test of each idea; `make test`
    pytest --tier all      all models, each in two formats; each kind of kernel on the CPU; a sample
                           of compiled CUDA kernels; one benchmark of each kind; `make test-all`
    pytest --tier every    each model in each format, every kernel on the CPU, every benchmark, each
                           trainer on several ranks; runs for hours

A tier includes all tests of the tiers above it. A test without a mark is in each tier. Mark a slow
test, parameter or file `tiers.ALL` if a faster test covers the same idea. The fast tier runs one
parameter of each test, selected by the name of the test, and fewer examples of properties. Mark a
slow test with many parameters `tiers.one_in(3)`: the tier all then runs every third parameter and
the parameter of the fast tier. Tests selected by id on the command line, and all parameters of
files that it names, run in any tier.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Final, TypeVar

import pytest
from hypothesis import settings

TIERS: Final = ("fast", "all", "every")
ALL: Final = pytest.mark.tier("all")
EVERY: Final = pytest.mark.tier("every")
EXAMPLES: Final = {"fast": 10, "all": 40, "every": 100}
"""Default number of Hypothesis examples by tier."""
T = TypeVar("T")


def one_in(number: int) -> pytest.MarkDecorator:
    """Return the mark of a test; the tier all runs one in `number` of its parameters."""
    return pytest.mark.one_in(number)


_chosen = "fast"


def chosen(fast: Sequence[T], everything: Sequence[T], every: Sequence[T] | None = None) -> list[T]:
    """Return the values for the tier of this run, for data shared by the tests of a file."""
    return list(
        {"fast": fast, "all": everything, "every": everything if every is None else every}[_chosen]
    )


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--tier",
        choices=TIERS,
        default="fast",
        help="how much is tested; see tests/support/tiers.py",
    )


def pytest_configure(config: pytest.Config) -> None:
    global _chosen
    _chosen = config.getoption("tier")
    settings.register_profile(_chosen, settings(), max_examples=EXAMPLES[_chosen])
    settings.load_profile(_chosen)
    config.addinivalue_line(
        "markers", "tier(name): runs in this tier and wider ones alone; see tests/support/tiers.py"
    )
    config.addinivalue_line(
        "markers", "one_in(number): the tier all runs one in so many; see tests/support/tiers.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    runs = [
        item for item in items if all(_runs(mark.args[0]) for mark in item.iter_markers("tier"))
    ]
    if not any(argument.endswith(".py") for argument in config.args):
        if _chosen == "fast":
            runs = _one_of_each(runs)
        elif _chosen == "all":
            runs = _in_part(runs)
    chosen = set(runs)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = _long_ones_first(runs)


def _long_ones_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items with the longest files first, so that all workers end at a similar time.

    Files are sorted by their largest timeout mark, then by their number of tests.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def length(file_items: Sequence[pytest.Item]) -> tuple[float, int]:
        limits = [
            mark.args[0]
            for item in file_items
            if (mark := item.get_closest_marker("timeout")) is not None
        ]
        return max(limits, default=0.0), len(file_items)

    return [
        item
        for file_items in sorted(files.values(), key=length, reverse=True)
        for item in file_items
    ]


def _one_of_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return one item of each test function, selected by a hash of its name, in order."""
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {group[zlib.crc32(name.encode()) % len(group)] for name, group in functions.items()}
    return [item for item in items if item in chosen]


def _in_part(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Return the items that `one_in` selects and the items of the fast tier."""
    selected = set(_one_of_each([item for item in items if not any(item.iter_markers("tier"))]))
    counts: dict[str, int] = {}
    for item in items:
        name, mark = item.nodeid.partition("[")[0], item.get_closest_marker("one_in")
        if mark is None or counts.get(name, 0) % mark.args[0] == 0:
            selected.add(item)
        counts[name] = counts.get(name, 0) + 1
    return [item for item in items if item in selected]


def _runs(tier: str) -> bool:
    return TIERS.index(tier) <= TIERS.index(_chosen)
