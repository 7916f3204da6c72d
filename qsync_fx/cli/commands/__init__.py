"""Verbs of `qsync`.

Each module is one verb: its name is the module's name, and it defines `COMMAND`, a
`qsync_fx.cli.Command`. Installed packages add verbs through the entry point group
`qsync_fx.commands`. `qsync --help` imports all modules, so they import little before their command
runs.
"""

from __future__ import annotations

import importlib
import pkgutil
from importlib.metadata import entry_points

from qsync_fx import entry_points as installed
from qsync_fx.cli.command import Command
from qsync_fx.errors import QSyncError

_GROUP = "qsync_fx.commands"


def names() -> list[str]:
    """Return the names of all verbs: first of qsync_fx, then of installed packages."""
    ours = _ours()
    return [*ours, *sorted(entry_points(group=_GROUP).names - ours.keys())]


def load(name: str) -> Command:
    """Return the verb called `name`; raise `QSyncError` if its package is broken or ambiguous."""
    ours, entries = _ours().get(name), tuple(entry_points(group=_GROUP, name=name))
    if ours is None and len(entries) == 1:
        result = installed.load(entries[0])
        if not isinstance(result, Command):
            raise installed.unfit(entries[0], result, "a qsync_fx.cli.Command")
        return result
    if entries:
        places = [ours, *(f"the package {installed.package(entry)}" for entry in entries)]
        raise QSyncError(
            f"several commands have the name {name!r}",
            where=" and ".join(filter(None, places)),
            do="uninstall packages until one command has this name",
        )
    command: Command = importlib.import_module(ours or name).COMMAND
    return command


def _ours() -> dict[str, str]:
    """Return the module of each verb of qsync_fx, by the verb's name."""
    return {
        module.name.replace("_", "-"): f"{__name__}.{module.name}"
        for module in pkgutil.iter_modules(__path__)
    }
