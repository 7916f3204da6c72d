"""A table that is turned where it is too wide: its rows become columns.

Invariant: no cell is cut off. Where it fits neither way, cells wrap.

What people read: tables in a terminal, and graphs for other tools.

Invariant: reports read explanations, plans and measurements; nothing depends on a report.

Tables of rich as plain text, and how they are made.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

# Rich wants a number, and no line is that long.
AS_LONG_AS_IT_TAKES = 100_000


def plain(description: RenderableType, width: int | None = None) -> str:
    """Returns what a terminal of a width would show, without colours; of any width where none is given."""
    console = Console(
        width=width or AS_LONG_AS_IT_TAKES,
        no_color=True,
        force_terminal=False,
        legacy_windows=False,
    )
    with console.capture() as capture:
        console.print(description)
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def table_of(columns: Sequence[str], right: Sequence[str] = ("flops", "bytes", "saved")) -> Table:
    """Returns an empty table with these columns; `right` names those of numbers."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in right else "left", no_wrap=True)
    return table


class Fitted:
    """
    Args:
        table: whose first column names its rows.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(max_width=AS_LONG_AS_IT_TAKES)
        methods = (self.table, turned(self.table))
        result = next(
            (
                item
                for item in methods
                if console.measure(item, options=free).maximum <= options.max_width
            ),
            None,
        )
        if result is None:
            result = self.table
            for column in result.columns:
                column.no_wrap, column.overflow = False, "fold"
        yield result


def turned(table: Table) -> Table:
    """Returns a table with a column for each row of another, and a row for each of its columns but the first."""
    first, *others = table.columns
    names = [str(cell) for cell in first.cells]
    result = table_of([str(first.header), *names], right=names)
    for column in others:
        result.add_row(Text(str(column.header)), *column.cells)
    return result
