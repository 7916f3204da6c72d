"""`Command`: a verb of the command line.

Invariant: a command either runs or contains actions, which are commands. It stores no name; it is
named by its file, its entry point, or its key in `actions`.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from inspect import cleandoc
from types import MappingProxyType
from typing import Any

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


def add_options(
    group: argparse._ActionsContainer,
    usage: str,
    types: Mapping[str, Callable[[str], Any]] = MappingProxyType({}),
    **defaults: object,
) -> None:
    """Add options to a parser or to one of its groups.

    Args:
        usage: one option per line, separated from its help text by two spaces; an indented line
            continues the text. "--json" is a switch, "-o --output FILE" has a value, and
            "--codec NAME..." is repeatable.
        types: converters of values, by attribute of the namespace; by default values are strings.
        defaults: by attribute of the namespace.
    """
    for option in re.split(r"\n(?=-)", cleandoc(usage)):
        syntax, text = re.split(r"\s{2,}", option, maxsplit=1)
        *flags, metavar = syntax.split()
        settings: dict[str, Any] = {"metavar": metavar.rstrip(".")}
        if metavar.startswith("-"):
            flags, settings = [*flags, metavar], {"action": "store_true"}
        elif metavar.endswith("..."):
            settings |= {"action": "append", "default": []}
        action = group.add_argument(*flags, help=" ".join(text.split()), **settings)
        action.type = types.get(action.dest)
        action.default = defaults.get(action.dest, action.default)
