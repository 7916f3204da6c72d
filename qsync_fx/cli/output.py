"""What commands print, and the status that `qsync` ends with.

Invariant: results go to standard output and everything else to standard error, so that output can be piped. A terminal gets colours, and
tables of its width, which whoever sets COLUMNS gets too, as pagers and scripts do. Piped without it, lines are as long as what they say,
since other programs search them.

What goes wrong in the words of qsync_fx (`QSyncError`) is told in its three lines, with status 2, as argparse does for arguments. What
the user's own code raises comes with its traceback: that is what it takes to find it.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qsync_fx.errors import QSyncError
from qsync_fx.files import check_writable
from qsync_fx.profiling.progress import progress as progress

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


_LONGEST = 100_000
"""Rich wants a width, and no line is that long."""


def status_of(run: Callable[[], None]) -> int:
    """Does what a command does and returns the status that it ends with: 0; 2 where qsync_fx complains."""
    for stream in (sys.stdout, sys.stderr):
        # Module names and source lines may hold what a terminal's encoding cannot say.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        run()
        sys.stdout.flush()
    except QSyncError as error:
        note(error)
        return 2
    except BrokenPipeError:
        # The reader (head, less) has seen enough. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt:
        return 130
    return 0


def note(what: object) -> None:
    """Says on standard error what is no result: that a file was written, what could not be done."""
    print(f"qsync: {what}", file=sys.stderr)


def to_write(path: str) -> Path:
    """Returns the path that an option names, where a file can be written; made for `add_argument(type=...)`, so that it is known before
    any work is done.

    Raises:
        QSyncError: none can be written there.
    """
    check_writable(path)
    return pathlib.Path(path)


def wrote(path: str | Path) -> None:
    """Says that a file was written."""
    note(f"wrote {path}")


def as_json(value: object) -> None:
    """Prints a value for other programs."""
    print(json.dumps(value, indent=2))


def show(what: RenderableType) -> None:
    """Prints a table, or whatever else rich prints, as wide as the place that it goes to."""
    from rich.console import Console

    console = Console(width=None if sys.stdout.isatty() else width() or _LONGEST)
    with console.capture() as captured:
        console.print(what)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def width() -> int | None:
    """Returns how wide standard output is; None where nobody has said it."""
    if sys.stdout.isatty():
        from rich.console import Console

        return Console().width
    text = os.environ.get("COLUMNS", "")
    return int(text) if text.isdecimal() and text.isascii() and 0 < int(text) < _LONGEST else None


def table(columns: Iterable[str], rows: Iterable[Iterable[str | Text]], right: Iterable[str] = ()) -> Table:
    """Returns a table of texts; `right` names the columns of numbers. What is long wraps: cut off it would be worth nothing."""
    from rich.table import Table
    from rich.text import Text

    made, numbers = Table(header_style="bold", box=None, pad_edge=False), set(right)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        # Names of devices and paths are data: nothing in them is markup.
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def diff(text: str) -> None:
    """Prints a unified diff, coloured on a terminal."""
    from rich.console import Console
    from rich.text import Text

    styles = {"+": "green", "-": "red", "@": "cyan"}
    console = Console()
    for line in text.splitlines():
        if console.is_terminal:
            console.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)
        else:
            print(line)
