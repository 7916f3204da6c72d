"""What a verb of the command line is.

Invariant: a command either does something or is a choice of actions that do, which are commands themselves. It has no name: it is called
as its file is, as its entry point is, or as the key that it stands under.
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
    """A verb of `qsync`, or an action of one.

    Attributes:
        help: what it does, in a few words, for the list of commands.
        run: does it, with what the command line says. A `QSyncError` that it raises is told in its three lines.
        arguments: adds to a parser what the command line may say.
        about: what stands above the arguments in its --help; `help` where it is empty.
        examples: lines for the end of its --help.
        actions: the verb's own verbs, by name, as in "qsync kernels list".
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
                "a command runs, or has actions that do",
                do="give it either run=... or actions={...}",
            )


def literal(text: str) -> str:
    """Returns a text as argparse takes it for the help of an argument, where it puts values in the place of what % stands before."""
    return text.replace("%", "%%")
