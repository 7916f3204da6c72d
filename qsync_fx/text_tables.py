"""Tables of rich as plain text, transposed if they are too wide.

Invariant: no cell is truncated. If a table fits in neither orientation, its cells wrap.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

_UNLIMITED = 100_000
"""Width for rich if lines must not wrap."""


def plain(description: RenderableType, width: int | None = None) -> str:
    """Return the text of a terminal of this width, without colors; unlimited width for None."""
    console = Console(
        width=width or _UNLIMITED, no_color=True, force_terminal=False, legacy_windows=False
    )
    return captured(console, description)


def captured(console: Console, description: RenderableType) -> str:
    """Return the text that a console prints, without trailing spaces."""
    with console.capture() as capture:
        console.print(description)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table_of(columns: Sequence[str], right: Sequence[str] = ("flops", "bytes", "saved")) -> Table:
    """Return an empty table with these columns; `right` names the right-aligned numeric columns."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


class Fitted:
    """Renderable that prints a table, whose first column has row names, transposed if it fits."""

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(max_width=_UNLIMITED)
        for table in (self.table, transposed(self.table)):
            if console.measure(table, options=free).maximum <= options.max_width:
                yield table
                return
        for column in self.table.columns:
            column.no_wrap, column.overflow = False, "fold"
        yield self.table


def transposed(table: Table) -> Table:
    """Return the transposed table: a column per row, and a row per column except the first."""
    first, *others = table.columns
    names = [str(cell) for cell in first.cells]
    result = table_of([str(first.header), *names], right=names)
    for column in others:
        result.add_row(Text(str(column.header)), *column.cells)
    return result
