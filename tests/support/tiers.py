"""Tiers of tests: what a newcomer runs, what continuous integration runs, and what takes hours.

    pytest                 fast: one of each idea; `make test` pytest --tier all      all models,
        each in two formats, each kind of kernel on the CPU, samples of what nvcc makes, one
        benchmark of
                           each kind; `make test-all`
    pytest --tier every    each model in each format, every kernel on the CPU, every benchmark, each
    trainer over ranks

A test without a mark runs in each. One that takes long is marked `tiers.ALL`, alone, as a parameter
or with its file (`pytestmark`), where a quicker test of the same idea stays without. Of a test with
many parameters the fast tier runs one, which is the same one each time, and another one of another
test, so that each format and each device has its turn; of properties it draws fewer examples.

Invariant: what a tier runs, the wider ones run too. A test that the command line names by its id
    runs whatever its tier, and a file that it names runs with all parameters.

A plugin of pytest; see conftest.
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
EXAMPLES: Final = 10
"""How many examples the fast tier draws of a property that asks for no number; Hypothesis draws a
hundred.
"""
T = TypeVar("T")
_chosen = "fast"


def chosen(fast: Sequence[T], everything: Sequence[T], every: Sequence[T] | None = None) -> list[T]:
    """Returns what the tier of this run takes, for what a file prepares at once for all of its
    tests.
    """
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
    if _chosen == "fast":
        settings.register_profile("fast", settings(), max_examples=EXAMPLES)
        settings.load_profile("fast")
    config.addinivalue_line(
        "markers", "tier(name): runs in this tier and wider ones alone; see tests/support/tiers.py"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if any("::" in argument for argument in config.args):
        return
    runs = [
        item for item in items if all(_runs(mark.args[0]) for mark in item.iter_markers("tier"))
    ]
    if _chosen == "fast" and not any(argument.endswith(".py") for argument in config.args):
        runs = _one_of_each(runs)
    chosen = set(runs)
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    items[:] = _long_ones_first(runs)


def _long_ones_first(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the items, those files first that may take longest, so that no worker is at one of
    them when the others have ended.

    What takes long has been given a time limit of its own; where none has, the number of tests says
    it.
    """
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)

    def length(found: Sequence[pytest.Item]) -> tuple[float, int]:
        limits = [
            mark.args[0]
            for item in found
            if (mark := item.get_closest_marker("timeout")) is not None
        ]
        return max(limits, default=0.0), len(found)

    return [item for found in sorted(files.values(), key=length, reverse=True) for item in found]


def _one_of_each(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Returns the items with one for each test function, in their order.

    The function's name says which one.
    """
    functions: dict[str, list[pytest.Item]] = {}
    for item in items:
        functions.setdefault(item.nodeid.partition("[")[0], []).append(item)
    chosen = {found[zlib.crc32(name.encode()) % len(found)] for name, found in functions.items()}
    return [item for item in items if item in chosen]


def _runs(tier: str) -> bool:
    return TIERS.index(tier) <= TIERS.index(_chosen)
