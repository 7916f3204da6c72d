"""Output of commands, and the exit status of `qsync`.

Results go to standard output, all other messages to standard error. Tables have the width of the
terminal or of COLUMNS; other pipes get unwrapped lines, which programs can search. An exception of
the user's own code is printed with its traceback.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import sys
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, TextIO, cast

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
        0 on success; 2 after a `QSyncError` or if standard output cannot be written; 130 after
            Ctrl-C; 141 if the reader of standard output has closed the pipe.
    """
    _open_standard_streams()
    if sys.stdout is None:
        note(
            "standard output is closed, so results cannot be printed: "
            "redirect it to a file or to /dev/null"
        )
        return 2
    for stream in (sys.stdout, sys.stderr):
        # Module names and source lines may have characters that the terminal's encoding lacks.
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    output = _CheckedOutput(sys.stdout)
    status, exit_request = 0, None
    with contextlib.redirect_stdout(cast(TextIO, output)):
        try:
            run()
        except QSyncError as error:
            note(error)
            status = 2
        except SystemExit as error:
            exit_request = error
        except KeyboardInterrupt:
            status = 130
        except OSError:
            if output.error is None:
                raise
        with contextlib.suppress(OSError):
            output.flush()
    if output.error is not None:
        return _report_unwritable(sys.stdout, output.error)
    if exit_request is not None:
        raise exit_request
    return status


class _CheckedOutput:
    """Standard output that records the first failed write, because argparse ignores such errors."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self.error: OSError | None = None

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._stream, name)
        if name not in ("write", "writelines", "flush"):
            return value

        def recording(*arguments: object) -> object:
            try:
                return value(*arguments)
            except OSError as error:
                self.error = self.error or error
                raise

        return recording


def _report_unwritable(stream: TextIO, error: OSError) -> int:
    with contextlib.suppress(OSError):
        # Python flushes the stream at exit, and would report the same error again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    if isinstance(error, BrokenPipeError):
        return 141  # the reader (head, less) needs no more
    note(f"standard output cannot be written: {error.strerror or error}")
    return 2


def _open_standard_streams() -> None:
    """Open /dev/null for each closed descriptor of 0 to 2.

    Otherwise the next file that is opened would get the descriptor, and messages that C++ code
    writes to standard error would end up in that file.
    """
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stderr is None:
        sys.stderr = os.fdopen(2, "w", closefd=False)


def note(description: object) -> None:
    """Print a message that is no result to standard error: a written file, a failure."""
    with contextlib.suppress(OSError):  # there is no other stream to report to
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
    from rich.text import Text

    styles = {"+": "green", "-": "red", "@": "cyan"}
    console = Console()
    for line in text.splitlines():
        if console.is_terminal:
            console.print(Text(line, style=styles.get(line[:1], "")), soft_wrap=True)
        else:
            print(line)
