"""The verbs of `qsync`.

Invariant: one module a verb, which is called as the module is and holds `COMMAND`, a `qsync_fx.cli.Command`; a new verb is a new module.
Installed packages add verbs through the entry point group `qsync_fx.commands`; a verb is called as its entry point is. A module imports
little before its command is run: `qsync --help` imports all of them.
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
    """Returns what each verb is called: ours, then those of installed packages."""
    ours = _ours()
    return [*ours, *sorted(entry_points(group=_GROUP).names - ours.keys())]


def load(name: str) -> Command:
    """Returns the verb called `name`, which is one of `names()`.

    Raises:
        QSyncError: its package cannot be loaded or offers something else, or there are several of this name.
    """
    ours, entries = _ours().get(name), tuple(entry_points(group=_GROUP, name=name))
    if ours is None and len(entries) == 1:
        result = installed.load(entries[0])
        if not isinstance(result, Command):
            raise installed.unfit(entries[0], result, "a qsync_fx.cli.Command")
        return result
    if entries:
        where = [
            *([] if ours is None else [ours]),
            *(f"the package {installed.package(entry)}" for entry in entries),
        ]
        raise QSyncError(
            f"several commands are called {name!r}",
            where=" and ".join(where),
            do="uninstall all packages but one",
        )
    command: Command = importlib.import_module(ours or name).COMMAND
    return command


def _ours() -> dict[str, str]:
    """Returns the modules of our own verbs."""
    return {
        module.name.replace("_", "-"): f"{__name__}.{module.name}"
        for module in pkgutil.iter_modules(__path__)
    }
