"""Argument parser of `qsync`.

Invariant: a command line loads only the command that it names; a list of commands loads all. A
command of an installed package that cannot be loaded is listed with its error and does not affect
other commands.
"""

from __future__ import annotations

import argparse
import platform
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any, Final

from qsync_fx import __version__
from qsync_fx.cli import commands
from qsync_fx.cli.command import Command, Run, literal
from qsync_fx.errors import QSyncError

_ABOUT = """\
Tools for training in mixed precision with torch.compile(model, backend="qsync").

They inspect a model without training it, measure operators, find plans, and
describe this machine. qsync COMMAND --help shows arguments and examples."""

_EXAMPLES = """\
first steps:
  qsync doctor                                hardware, tools and formats of this machine
  qsync inspect bert:small --precision int8   operators of the model of small() in bert.py"""

_Raw = argparse.RawDescriptionHelpFormatter
_RUN: Final = "_run"


def parsed(arguments: Sequence[str]) -> tuple[Run, argparse.Namespace]:
    """Return the function of the command, and its parsed arguments."""
    parser = argparse.ArgumentParser(
        prog="qsync", description=_ABOUT, epilog=_EXAMPLES, formatter_class=_Raw, allow_abbrev=False
    )
    parser.add_argument(
        "--version",
        action="version",
        # The import of torch would be slow.
        version=f"qsync_fx {__version__}, torch {version('torch')}, "
        f"Python {platform.python_version()}",
        help="print the versions of qsync_fx, torch and Python",
    )
    choices = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    available = commands.names()
    without_command = ("-h", "--help", "--version")
    words = (word for word in arguments if word in without_command or not word.startswith("-"))
    first = next(words, None)
    if first in available:
        _add(choices, {first: commands.load(first)})
    else:
        for name in available:
            choices.add_parser(name, help=_listed_help(name))
    namespace = parser.parse_args(arguments)
    return getattr(namespace, _RUN), namespace


def _listed_help(name: str) -> str:
    try:
        text = commands.load(name).help
    except QSyncError as error:
        text = f"cannot be used: {error.what}"
    return literal(text)


def _add(choices: Any, result: Mapping[str, Command]) -> None:
    for name, command in result.items():
        parser = choices.add_parser(
            name,
            help=literal(command.help),
            description=command.about or command.help,
            epilog=command.examples,
            formatter_class=_Raw,
        )
        if command.arguments is not None:
            command.arguments(parser)
        if command.run is not None:
            parser.set_defaults(**{_RUN: command.run})
        else:
            actions = parser.add_subparsers(title="actions", required=True, metavar="ACTION")
            _add(actions, command.actions)
