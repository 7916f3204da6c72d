"""Entry points of installed packages.

Invariant: an error of a broken package names the package and its entry point, because the user may
not know that it is installed.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from qsync_fx.errors import QSyncError

Value = TypeVar("Value")


def tuples(group: str, kind: type[Value], wanted: str) -> dict[str, tuple[Value, ...]]:
    """Return the tuples that installed packages add to a table, by their origin.

    Args:
        group: group of the entry points, whose values are tuples.
        kind: class of the tuple elements.
        wanted: name of this class in error messages.

    Returns:
        Tuples by a description of the entry point for error messages.

    Raises:
        QSyncError: an entry point cannot be loaded, or has another type.
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
        raise QSyncError(
            f"the installed package {package(entry)} cannot be loaded: "
            f"{type(error).__name__}: {error}",
            where=place(entry),
            do=f"upgrade or uninstall {package(entry)}; correct the package if it is your own",
        ) from error


def unfit(entry: EntryPoint, result: object, wanted: str) -> QSyncError:
    """Return the error for an entry point of the wrong type."""
    return QSyncError(
        f"the installed package {package(entry)} offers {_kind(result)} "
        f"where {wanted} is expected",
        where=place(entry),
        do=f"upgrade or uninstall {package(entry)}; correct the package if it is your own",
    )


def package(entry: EntryPoint) -> str:
    """Return the distribution name of an entry point's package."""
    return entry.dist.name if entry.dist is not None else entry.module


def place(entry: EntryPoint) -> str:
    """Return the definition of an entry point, for error messages."""
    return f'entry point {entry.name} = "{entry.value}" in the group {entry.group}'


def _kind(result: object) -> str:
    return (
        f"the class {result.__name__}"
        if isinstance(result, type)
        else f"a value of type {type(result).__name__}"
    )
