"""Tables of an explanation and of `plan_coverage`.

Each operator, and each module in no graph, is one line, in execution order. Plain text is as wide
as its content, so that it can be searched and compared; with a given width, lines wrap instead of
being cut off.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from qsync_fx.coverage.causes import Reason, reason, way_out
from qsync_fx.coverage.compilation_log import Ran
from qsync_fx.coverage.findings import Uncovered
from qsync_fx.coverage.first_step_check import unused_text
from qsync_fx.devices.format_support import TARGETS
from qsync_fx.formats import Precision
from qsync_fx.formatting import short
from qsync_fx.graph.graph import Context, Operator
from qsync_fx.ops.spec import Kind
from qsync_fx.plan.cluster_plan import CHOSEN_BY
from qsync_fx.plan.plan import DEVICE_CLASS, Plan
from qsync_fx.text_tables import plain, table_of

if TYPE_CHECKING:
    from qsync_fx.diagnostics.coverage_report import PlanCoverage
    from qsync_fx.diagnostics.explanation import Explanation


def explanation_text(
    explanation: Explanation, kind: Kind | None = None, width: int | None = None
) -> str:
    """Return the explanation as plain text, optionally for one kind and fitted to a width."""
    return plain(explanation_table(explanation, kind, width), width)


def explanation_table(
    explanation: Explanation, kind: Kind | None = None, width: int | None = None
) -> RenderableType:
    """Return the explanation for a rich console: one line per operator, then notes."""
    with explanation.there():
        return _explanation_table(explanation, kind, width)


def _explanation_table(
    explanation: Explanation, kind: Kind | None, width: int | None
) -> RenderableType:
    columns = (
        "operator",
        "kind",
        "precision",
        "output",
        "flops",
        "bytes",
        "saved",
        "line",
        "reason",
    )
    table = table_of(columns)
    every = explanation.operators
    shown = [operator for operator in every if kind is None or operator.kind is kind]
    for operator in shown:
        table.add_row(*map(Text, _cells(operator)))
    for module in explanation.uncovered if kind is None else ():
        table.add_row(*map(Text, uncovered_cells(module, columns)))
    if width is not None:
        fit(table, width)
    left_out = (
        [f"{len(shown)} of {len(every)} operators are {kind} and shown"] if kind is not None else []
    )
    return Group(table, *(Text(line) for line in (*left_out, *_notes(explanation))))


def fit(table: Table, width: int) -> None:
    """Wrap long columns; below 120 columns omit costs and lines, below 60 also kind and output."""
    dropped = {"flops", "bytes", "saved", "line"} if width < 120 else set()
    dropped |= {"kind", "output"} if width < 60 else set()
    table.columns[:] = [column for column in table.columns if column.header not in dropped]
    for column in table.columns:
        if column.header in ("operator", "line", "reason"):
            column.no_wrap, column.overflow = False, "fold"


def precision_cell(precision: Precision | None, planned: Precision | None) -> str:
    """Return the precision that runs, and the planned one if it differs."""
    if planned is not None and precision is not None and planned is not precision:
        return f"{precision} (not {planned})"
    return str(precision or "-")


def uncovered_cells(module: Uncovered, columns: Sequence[str]) -> tuple[str, ...]:
    """Return the row of a module that is in no graph."""
    available = {
        "operator": f"{module.path} ({module.type})".strip(),
        "kind": "in no graph",
        "precision": "as written" + (f" (not {module.planned})" if module.lost else ""),
        "reason": reason(module.cause),
    }
    return tuple(available.get(name, "") for name in columns)


def _cells(operator: Operator) -> tuple[str, ...]:
    from qsync_fx.diagnostics.explanation import line_of

    note = operator.note
    cost = note.cost
    return (
        str(operator.id),
        str(operator.kind),
        precision_cell(note.precision, note.planned),
        str(note.output or "-"),
        short(cost.flops) if cost else "",
        short(cost.bytes, "B") if cost else "",
        short(cost.saved_bytes, "B") if cost else "",
        line_of(operator),
        operator.reason,
    )


def _notes(explanation: Explanation) -> list[str]:
    adjustable = [op for op in explanation.operators if op.kind is Kind.ADJUSTABLE]
    counts = Counter(str(op.precision) for op in adjustable)
    parts = ", ".join(
        f"{count} in {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])
    )
    lines = [f"{len(adjustable)} adjustable operators{': ' + parts if parts else ''}"]
    if explanation.graphs:
        context = explanation.graphs[0].context
        lines += [f"{name}: {why}" for name, why in _simulated(explanation)]
        lines += _as_fast_wider(explanation)
        lines += [part_line(context.plan)] if DEVICE_CLASS in context.plan.notes else []
        lines.append(
            f"{_device(context)}, {len(explanation.graphs)} graph{'s' * (len(explanation.graphs) != 1)}"
        )
    for name, done in explanation.rewritten.items():
        lines.append(
            f"rewrite {name}: {done.count} place{'s' * (done.count != 1)}"
            if done.count
            else f"rewrite {name}: found nowhere"
        )
        lines += [f"  left alone: {where}" for where in done.left]
    lines += [f"graph break: {_first_line(why)}" for why in explanation.breaks]
    lines += dict.fromkeys(
        f"in no graph: {method}"
        for module in explanation.uncovered
        if (method := way_out(module.cause))
    )
    lines += [
        f"not in the operator table, so FP32: {name} ({count})"
        for name, count in explanation.unknown.items()
    ]
    return lines


def part_line(plan: Plan) -> str:
    """Return the device class whose part of a cluster plan this is, and how it was chosen."""
    return f"plan: the part for {plan.notes[DEVICE_CLASS]}, chosen by {plan.notes[CHOSEN_BY]}"


def _device(context: Context) -> str:
    target = context.options.target
    if target is None:
        return f"device {context.device}"
    return f"target {target} (compute capability {'.'.join(map(str, TARGETS[target]))}), explained on device {context.device}"


def _simulated(explanation: Explanation) -> list[tuple[str, str]]:
    from qsync_fx.devices.format_support import support

    result: dict[str, str] = {}
    for operator in explanation.operators:
        context, fmt = operator.graph.context, operator.precision
        if operator.kind is Kind.ADJUSTABLE and fmt is not None:
            settings = support(context.device, fmt, context.options.emulate_unsupported)
            if settings.how != "native":
                result[str(fmt)] = f"{settings.how}, {settings.reason}"
    return list(result.items())


def _as_fast_wider(explanation: Explanation) -> list[str]:
    from qsync_fx.diagnostics.explanation import as_fast_wider

    result = {
        op_id: why for part in explanation.graphs for op_id, why in as_fast_wider(part).items()
    }
    if not result:
        return []
    some, why = next(iter(result.items()))
    such = ": " if len(result) == 1 else ", such as "
    count = "1 operator is" if len(result) == 1 else f"{len(result)} operators are"
    method = 'the option "skip_unprofitable" leaves what is so in a wider one'
    return [f"{count} in a format that is not faster here{such}{some} ({why}); {method}"]


def _first_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[0] if lines else text


_COVERAGE_COLUMNS = ("operator", "kind", "precision", "output", "line", "reason")


def coverage_text(applied: PlanCoverage, width: int | None = None) -> str:
    """Return the coverage table as plain text, fitted to `width` if given."""
    return plain(coverage_table(applied, width), width)


def coverage_table(applied: PlanCoverage, width: int | None = None) -> RenderableType:
    """Return the coverage table for a rich console."""
    table = table_of(_COVERAGE_COLUMNS)
    for module in applied.modules:
        for ran in module.operators:
            table.add_row(*map(Text, _coverage_cells(ran)))
        if module.uncovered is not None:
            table.add_row(*map(Text, uncovered_cells(module.uncovered, _COVERAGE_COLUMNS)))
    if width is not None:
        fit(table, width)
    return Group(table, *map(Text, _coverage_notes(applied)))


def _coverage_cells(ran: Ran) -> tuple[str, ...]:
    precision = precision_cell(ran.precision, ran.planned)
    return str(ran.id), str(ran.kind), precision, str(ran.output or "-"), ran.line, ran.reason


def _coverage_notes(applied: PlanCoverage) -> list[str]:
    missing = applied.uncovered
    with_parameters = len({module.path for module in applied.modules})
    lines = [
        f"{applied.model}: {with_parameters - len(missing)} of {with_parameters} modules run in compiled code"
    ]
    lines += applied.unasked
    lines += [f"{unused_text(entry)}" for entry in applied.unused]
    if not applied.called:
        lines.append("nothing of it has run in compiled code yet")
    advised = [module for module in missing if _needs_advice(module, applied)]
    lines += [
        f"to do: {text}"
        for text in dict.fromkeys(way_out(module.cause) for module in advised)
        if text
    ]
    uncalled = any(module.cause.why is Reason.NOT_CALLED for module in missing)
    if applied.complete and (applied.planned or not missing):
        lines.append(
            "all that is planned is applied" + ", as far as the model has been called" * uncalled
        )
    elif applied.complete:
        lines.append("no plan or precision is given: modules in no graph run as written")
    return lines


def _needs_advice(module: Uncovered, applied: PlanCoverage) -> bool:
    """Return whether to advise how a module gets into a graph."""
    if module.lost or module.cause.why is Reason.NOT_MET:
        return True
    return not applied.planned and module.ran and module.cause.why is not Reason.NOT_GIVEN
