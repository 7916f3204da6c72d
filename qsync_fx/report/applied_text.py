"""The table of `applied`: one operator or one module that is in no graph a line, then what is planned and not applied.

Invariant: as of the table of an explanation, whose columns these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.coverage.causes import way_out
from qsync_fx.coverage.log import Ran
from qsync_fx.coverage.telling import unused_text
from qsync_fx.report.text import fit, plain, precision_cell, table_of, uncovered_cells

if TYPE_CHECKING:
    from qsync_fx.explanation.applied_plan import Applied

_COLUMNS = ("operator", "kind", "precision", "output", "line", "reason")


def applied_text(applied: Applied, width: int | None = None) -> str:
    """Returns the table as plain text, fitted to a width where one is given."""
    return plain(applied_table(applied, width), width)


def applied_table(applied: Applied, width: int | None = None) -> RenderableType:
    """Returns the table for a rich console."""
    table = table_of(_COLUMNS)
    for module in applied.modules:
        for ran in module.operators:
            table.add_row(*map(Text, _cells(ran)))
        if module.uncovered is not None:
            table.add_row(*map(Text, uncovered_cells(module.uncovered, _COLUMNS)))
    if width is not None:
        fit(table, width)
    return Group(table, *map(Text, _notes(applied)))


def _cells(ran: Ran) -> tuple[str, ...]:
    precision = precision_cell(ran.precision, ran.planned)
    return str(ran.id), str(ran.kind), precision, str(ran.output or "-"), ran.line, ran.reason


def _notes(applied: Applied) -> list[str]:
    missing = applied.uncovered
    with_parameters = len({module.path for module in applied.modules})
    lines = [f"{applied.model}: {with_parameters - len(missing)} of {with_parameters} modules run in compiled code"]
    lines += applied.unasked
    lines += [f"{unused_text(entry)}" for entry in applied.unused]
    ways = dict.fromkeys(text for module in missing if module.lost and (text := way_out(module.cause)))
    lines += [f"to do: {text}" for text in ways]
    if applied.complete:
        lines.append("all that is planned is applied")
    return lines
