"""The table of `applied`: one operator or one module that is in no graph a line, then what is planned and not applied.

Invariant: as of the table of an explanation, whose columns these are.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.coverage.causes import Why, way_out
from qsync_fx.coverage.findings import Uncovered
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
    if not applied.called:
        lines.append("nothing of it has run in compiled code yet")
    advised = [module for module in missing if _needs_advice(module, applied)]
    lines += [f"to do: {text}" for text in dict.fromkeys(way_out(module.cause) for module in advised) if text]
    uncalled = any(module.cause.why is Why.NOT_CALLED for module in missing)
    if applied.complete and (applied.planned or not missing):
        lines.append("all that is planned is applied" + ", as far as the model has been called" * uncalled)
    elif applied.complete:
        lines.append("no plan or precision is given: modules in no graph run as written")
    return lines


def _needs_advice(module: Uncovered, applied: Applied) -> bool:
    """Return whether to say how a module gets into a graph."""
    if module.lost or module.cause.why is Why.NOT_MET:
        return True
    return not applied.planned and module.ran and module.cause.why is not Why.NOT_GIVEN
