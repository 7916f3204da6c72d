"""Command line `qsync`: effects of the backend on a model, plans, and checks of this machine.

Each verb is a module of commands/ that defines a `Command` (command.py), or an entry point of an
installed package. parser.py parses arguments, model_args.py defines shared arguments, and
output.py prints results and returns the exit status.

Invariant: this package, `qsync --help` and `qsync --version` do not import torch. Results go to
standard output and all other messages to standard error, so that results can be piped.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from qsync_fx.cli.command import Command
from qsync_fx.cli.output import status_of
from qsync_fx.cli.parser import parsed
from qsync_fx.progress import announced

__all__ = ["Command", "main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; see `output.status_of`."""
    if argv is None:
        argv = sys.argv[1:]

    def run() -> None:
        chosen, arguments = parsed(argv)
        model = getattr(arguments, "model", None)
        with announced("loading torch" + (f" and {model}" if model else "")):
            chosen(arguments)

    return status_of(run)
