"""`Command`: a verb of the command line.

Invariant: a command either runs or contains actions, which are commands. It stores no name; it is
named by its file, its entry point, or its key in `actions`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from qsync_fx.errors import QSyncError

Run = Callable[[argparse.Namespace], None]
Arguments = Callable[[argparse.ArgumentParser], None]


@dataclass(frozen=True)
class Command:
    """Verb of `qsync`, or an action of a verb.

    Attributes:
        help: short description for the list of commands.
        run: implementation, called with the parsed arguments. A `QSyncError` that it raises is
            printed in its three lines.
        arguments: adds arguments to a parser.
        about: description at the top of its --help; by default `help`.
        examples: lines at the end of its --help.
        actions: sub-commands by name, as in "qsync kernels list".
    """

    help: str
    run: Run | None = None
    arguments: Arguments | None = None
    about: str = ""
    examples: str = ""
    actions: Mapping[str, Command] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (self.run is None) == (not self.actions):
            raise QSyncError(
                "a command needs either a function or actions",
                do="pass run=... or actions={...}, but not both",
            )


def literal(text: str) -> str:
    """Escape "%" in a help text, which argparse would interpolate."""
    return text.replace("%", "%%")
