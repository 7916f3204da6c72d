"""What installed packages offer through entry points.

Invariant: a package that is broken, or offers something of another kind, is named in the error together with its entry point: it is
rarely the user who wrote it, and who reads the error may not know that it is there.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import EntryPoint, entry_points
from typing import TypeVar

from qsync_fx.errors import QSyncError

Value = TypeVar("Value")


def tuples(group: str, kind: type[Value], wanted: str) -> dict[str, tuple[Value, ...]]:
    """Returns what every installed package adds to a table, by where it comes from, in words for errors.

    Args:
        group: of the entry points, whose values are tuples.
        kind: the class of what is in the tuples.
        wanted: its name, as a package's author writes it.

    Raises:
        QSyncError: an entry point cannot be loaded, or names something else.
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
    """Returns what an entry point names; raises `QSyncError` where it cannot be loaded."""
    try:
        return entry.load()
    except Exception as error:
        raise QSyncError(
            f"the installed package {package(entry)} cannot be loaded: {type(error).__name__}: {error}",
            where=place(entry),
            do=f"upgrade {package(entry)}, or uninstall it; correct it if it is yours",
        ) from error


def unfit(entry: EntryPoint, result: object, wanted: str) -> QSyncError:
    """Returns the error for an entry point that names something of the wrong type."""
    return QSyncError(
        f"the installed package {package(entry)} offers {_kind(result)} where {wanted} is expected",
        where=place(entry),
        do=f"upgrade {package(entry)}, or uninstall it; correct it if it is yours",
    )


def package(entry: EntryPoint) -> str:
    """Returns the name that pip knows the package of an entry point by."""
    return entry.dist.name if entry.dist is not None else entry.module


def place(entry: EntryPoint) -> str:
    """Returns where an entry point is written down."""
    return f'entry point {entry.name} = "{entry.value}" in the group {entry.group}'


def _kind(result: object) -> str:
    return (
        f"the class {result.__name__}"
        if isinstance(result, type)
        else f"a value of type {type(result).__name__}"
    )
