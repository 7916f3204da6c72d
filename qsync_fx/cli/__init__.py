"""The command `qsync`: what the backend does to a model, and what this machine offers, in a terminal.

    command    what a verb is
    commands/  the verbs, one file each: a new verb is a new file there, or an entry point of an installed package
    parsing    their arguments
    model      what verbs that take a model have in common: the arguments that name it, and the options of the backend
    output     what verbs print: tables, JSON, progress, errors, and the status that the command ends with
    reference, machine    "module:function" as a model; what this machine offers

Invariant: importing this imports no torch, nor do `qsync --help` and `qsync --version`. Results go to standard output and everything else
to standard error, so that output can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qsync_fx.cli.command import Command
from qsync_fx.cli.output import status_of
from qsync_fx.cli.parser import parsed

__all__ = ["Command", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status: 0, or 2 after an error of qsync_fx or argparse."""

    def run() -> None:
        chosen, arguments = parsed(sys.argv[1:] if argv is None else argv)
        chosen(arguments)

    return status_of(run)
