"""A table that is turned where it is too wide: its rows become columns.

Invariant: no cell is cut off. Where it fits neither way, cells wrap.
"""

from __future__ import annotations

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

from qsync_fx.report.text import AS_LONG_AS_IT_TAKES, table_of


class Fitted:
    """
    Args:
        table: whose first column names its rows.
    """

    def __init__(self, table: Table) -> None:
        self.table = table

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        free = options.update(max_width=AS_LONG_AS_IT_TAKES)
        ways = (self.table, turned(self.table))
        found = next((one for one in ways if console.measure(one, options=free).maximum <= options.max_width), None)
        if found is None:
            found = self.table
            for column in found.columns:
                column.no_wrap, column.overflow = False, "fold"
        yield found


def turned(table: Table) -> Table:
    """Returns a table with a column for each row of another, and a row for each of its columns but the first."""
    first, *others = table.columns
    names = [str(cell) for cell in first.cells]
    found = table_of([str(first.header), *names], right=names)
    for column in others:
        found.add_row(Text(str(column.header)), *column.cells)
    return found
