"""Table of an explanation.

Each operator, and each module in no graph, is one line, in execution order. Plain text is as wide
as its content, so that it can be searched and compared; with a given width, lines wrap instead of
being cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.coverage.findings import Uncovered
from qsync_fx.devices.format_support import TARGETS, support
from qsync_fx.diagnostics.explanation import Explanation, as_fast_wider
from qsync_fx.formats import Precision
from qsync_fx.formatting import many, short
from qsync_fx.graph import Operator
from qsync_fx.ops.spec import Kind
from qsync_fx.plan.cluster_plan import CHOSEN_BY
from qsync_fx.plan.operator_id import OpId
from qsync_fx.plan.plan import DEVICE_CLASS
from qsync_fx.text_tables import table_of

_COSTS = ("flops", "bytes", "saved")
_COLUMNS = ("operator", "kind", "precision", "output", *_COSTS, "line", "reason")


def explanation_table(
    explanation: Explanation, kind: Kind | None = None, width: int | None = None
) -> RenderableType:
    """Return the explanation for a rich console, for one kind and fitted to a width if given."""
    table = table_of(_COLUMNS)
    notes: list[str] = []
    with explanation.there():
        operators = explanation.operators
        shown = [operator for operator in operators if kind in (None, operator.kind)]
        for operator in shown:
            table.add_row(*map(Text, _cells(operator)))
        if kind is None:
            for module in explanation.uncovered:
                table.add_row(*map(Text, uncovered_cells(module, _COLUMNS)))
        else:
            notes.append(f"{len(shown)} of {len(operators)} operators are {kind} and shown")
        notes += _notes(explanation)
    fit(table, width)
    return Group(table, *map(Text, notes))


def fit(table: Table, width: int | None) -> None:
    """Wrap long columns; below 120 columns omit costs and lines, below 60 also kind and output."""
    if width is None:
        return
    dropped = {*_COSTS, "line"} if width < 120 else set()
    if width < 60:
        dropped |= {"kind", "output"}
    table.columns[:] = [column for column in table.columns if column.header not in dropped]
    for column in table.columns:
        if column.header in ("operator", "line", "reason"):
            column.no_wrap, column.overflow = False, "fold"


def precision_cell(precision: Precision | None, planned: Precision | None) -> str:
    """Return the precision that runs, and the planned one if it differs."""
    if planned is not None and precision is not None and planned is not precision:
        return f"{precision} (not {planned})"
    return str(precision or "-")


def uncovered_cells(module: Uncovered, columns: Sequence[str]) -> list[str]:
    """Return the row of a module that is in no graph."""
    precision = "as written"
    if module.lost:
        precision += f" (not {module.planned})"
    available = {
        "operator": f"{module.path} ({module.type})".strip(),
        "kind": "in no graph",
        "precision": precision,
        "reason": module.cause.reason,
    }
    return [available.get(name, "") for name in columns]


def _cells(operator: Operator) -> list[str]:
    note, cost = operator.note, operator.note.cost
    costs = ["", "", ""]
    if cost is not None:
        costs = [short(cost.flops), short(cost.bytes, "B"), short(cost.saved_bytes, "B")]
    precision = precision_cell(note.precision, note.planned)
    head = [str(note.id), str(note.kind), precision, str(note.output or "-")]
    return [*head, *costs, operator.line, operator.reason]


def _notes(explanation: Explanation) -> Iterator[str]:
    counts = Counter(str(operator.precision) for operator in explanation.adjustable)
    formats = ", ".join(f"{count} in {name}" for name, count in counts.most_common())
    number = f"{len(explanation.adjustable)} adjustable operators"
    yield f"{number}: {formats}" if formats else number
    if explanation.graphs:
        context = explanation.graphs[0].context
        yield from _substitutes(explanation)
        yield from _unprofitable(explanation)
        if DEVICE_CLASS in (notes := context.plan.notes):
            yield f"plan: the part for {notes[DEVICE_CLASS]}, chosen by {notes[CHOSEN_BY]}"
        device, target = f"device {context.device}", context.options.target
        if target is not None:
            version = ".".join(map(str, TARGETS[target]))
            device = f"target {target} (compute capability {version}), explained on {device}"
        yield f"{device}, {many(len(explanation.graphs), 'graph')}"
    for name, done in explanation.rewritten.items():
        yield f"rewrite {name}: {many(done.count, 'place')}"
        yield from (f"  left alone: {where}" for where in done.left)
    for text in explanation.breaks:
        first_line = text.strip().partition("\n")[0]
        yield f"graph break: {first_line}"
    advice = dict.fromkeys(module.cause.advice for module in explanation.uncovered)
    yield from (f"in no graph: {text}" for text in advice if text)
    for name, count in explanation.unknown.items():
        yield f"not in the operator table, so FP32: {name} ({count})"


def _substitutes(explanation: Explanation) -> Iterator[str]:
    result: dict[str, str] = {}
    for operator in explanation.adjustable:
        context, fmt = operator.graph.context, operator.precision
        if fmt is not None:
            settings = support(context.device, fmt, context.options.emulate_unsupported)
            if settings.how != "native":
                result[str(fmt)] = f"{fmt}: {settings.how}, {settings.reason}"
    yield from result.values()


def _unprofitable(explanation: Explanation) -> Iterator[str]:
    result: dict[OpId, str] = {}
    for part in explanation.graphs:
        result.update(as_fast_wider(part))
    if not result:
        return
    first, why = next(iter(result.items()))
    yield (
        f"in a format that is not faster here: {many(len(result), 'operator')}, such as {first} "
        f'({why}); the option "skip_unprofitable" uses a wider format instead'
    )
