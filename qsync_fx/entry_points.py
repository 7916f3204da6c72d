"""Extension points: values that modules of a package, or installed packages, add to a table.

Invariant: an error of a broken installed package names the package and its entry point, because the
user may not know that it is installed.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from qsync_fx.errors import QSyncError

Value = TypeVar("Value")


def listed_in_modules(parent: str, attribute: str) -> dict[str, Any]:
    """Return the values that the modules of a package list, by their `name`.

    Args:
        parent: name of the package; its modules are imported, those of its subpackages are not.
        attribute: name of the tuple of values in a module; most modules have none.
    """
    result: dict[str, Any] = {}
    owner: dict[str, str] = {}
    for entry in pkgutil.iter_modules(importlib.import_module(parent).__path__, f"{parent}."):
        for value in getattr(importlib.import_module(entry.name), attribute, ()):
            if value.name in result:
                raise QSyncError(
                    f"two {attribute} are called {value.name!r}",
                    where=f"{owner[value.name]} and {entry.name}",
                    do="rename one of them",
                )
            result[value.name], owner[value.name] = value, entry.name
    return result


def tuples(group: str, kind: type[Value], wanted: str) -> dict[str, tuple[Value, ...]]:
    """Return the tuples that installed packages add to a table, by their origin in words.

    Args:
        group: group of the entry points, whose values are tuples.
        kind: class of the tuple elements.
        wanted: name of this class in error messages.
    """
    result: dict[str, tuple[Value, ...]] = {}
    for entry in entry_points(group=group):
        inputs = load(entry)
        if not isinstance(inputs, Iterable) or isinstance(inputs, str):
            raise unfit(entry, inputs, f"a tuple of {wanted}")
        values = tuple(inputs)
        for value in values:
            if not isinstance(value, kind):
                raise unfit(entry, value, f"a tuple of {wanted}")
        result[f"{entry.value} of the package {package(entry)}"] = values
    return result


def load(entry: EntryPoint) -> object:
    """Return the object of an entry point; raise `QSyncError` if it cannot be loaded."""
    try:
        return entry.load()
    except Exception as error:
        raise _broken(entry, f"cannot be loaded: {type(error).__name__}: {error}") from error


def unfit(entry: EntryPoint, result: object, wanted: str) -> QSyncError:
    """Return the error for an entry point of the wrong type."""
    actual = f"a value of type {type(result).__name__}"
    if isinstance(result, type):
        actual = f"the class {result.__name__}"
    return _broken(entry, f"offers {actual} where {wanted} is expected")


def _broken(entry: EntryPoint, problem: str) -> QSyncError:
    name = package(entry)
    do = f"upgrade or uninstall {name}; correct the package if it is your own"
    return QSyncError(f"the installed package {name} {problem}", where=place(entry), do=do)


def package(entry: EntryPoint) -> str:
    """Return the distribution name of an entry point's package."""
    return entry.dist.name if entry.dist is not None else entry.module


def place(entry: EntryPoint) -> str:
    """Return the definition of an entry point, for error messages."""
    return f'entry point {entry.name} = "{entry.value}" in the group {entry.group}'
