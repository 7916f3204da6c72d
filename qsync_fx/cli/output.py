"""Output of commands, and the exit status of `qsync`.

Results go to standard output, all other messages to standard error. Tables have the width of the
terminal or of COLUMNS; other pipes get unwrapped lines, which programs can search. An exception of
the user's own code is printed with its traceback.
"""

from __future__ import annotations

import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from qsync_fx import environment
from qsync_fx.errors import QSyncError
from qsync_fx.progress import progress as progress
from qsync_fx.serialization.atomic_files import check_writable

if TYPE_CHECKING:
    from pathlib import Path

    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text


_LONGEST = 100_000
"""Width for rich if lines must not wrap."""


def status_of(run: Callable[[], None]) -> int:
    """Run a command and return the exit status of the process.

    Returns:
        0 on success; 2 after a `QSyncError`; 130 after Ctrl-C; 141 if the reader of standard output
            has closed the pipe.
    """
    for stream in (sys.stdout, sys.stderr):
        # Module names and source lines may have characters that the terminal's encoding lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        try:
            run()
        finally:
            sys.stdout.flush()
    except QSyncError as error:
        note(error)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # Python flushes the stream at exit, and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    return 0


def note(description: object) -> None:
    """Print a message that is no result to standard error: a written file, a failure."""
    print(f"qsync: {description}", file=sys.stderr)


def to_write(path: str) -> Path:
    """Return the path of a writable file; for `add_argument(type=...)`, before any work is done."""
    check_writable(path)
    return pathlib.Path(path)


def wrote(path: str | Path) -> None:
    note(f"wrote {path}")


def as_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def show(description: RenderableType) -> None:
    """Print a table or another rich renderable at the width of the output."""
    from rich.console import Console

    from qsync_fx.text_tables import captured

    console = Console(width=None if sys.stdout.isatty() else width() or _LONGEST)
    print(captured(console, description))


def width() -> int | None:
    """Return the width of standard output; None for a pipe without COLUMNS."""
    if sys.stdout.isatty():
        from rich.console import Console

        return Console().width
    text = environment.text("COLUMNS")
    if text.isdecimal() and text.isascii() and 0 < int(text) < _LONGEST:
        return int(text)
    return None


def table(
    columns: Iterable[str], rows: Iterable[Iterable[str | Text]], right: Iterable[str] = ()
) -> Table:
    """Return a table of texts; long cells wrap, because cut cells would lose information.

    Args:
        right: names of right-aligned columns, which contain numbers.
    """
    from rich.table import Table
    from rich.text import Text

    made, numbers = Table(header_style="bold", box=None, pad_edge=False), set(right)
    for name in columns:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for row in rows:
        # Device names and paths may contain rich markup characters.
        made.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return made


def diff(text: str) -> None:
    """Print a unified diff, colored on a terminal."""
    from rich.console import Console
    from rich.syntax import Syntax

    console = Console()
    if console.is_terminal:
        console.print(Syntax(text, "diff", background_color="default"), soft_wrap=True)
    else:
        print(text)
