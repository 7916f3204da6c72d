"""Cascade: dependent operators get the promoted precision of their inputs.

Invariant: afterwards every operator with floating-point output has a precision and an output
precision (QSync, section IV-B and footnote 1). graph/cascade_rules.py has the rules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from qsync_fx.devices.format_support import row_on
from qsync_fx.formats import Precision
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import operands
from qsync_fx.graph.cascade_rules import Rule, handed_on, rule_of, wants_wide, wide_readers
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope

Formats = dict[fx.Node, Precision | None]
Rules = dict[fx.Node, Rule]


@dataclass(frozen=True)
class Cascade:
    name: ClassVar[str] = "cascade"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        # A sweep in topological order decides all formats except the output formats of scaled
        # operators, which depend on their readers.
        rules: Rules = {}
        while _sweep(graph, {}, rules):
            pass


def _sweep(graph: PrecisionGraph, formats: Formats, rules: Rules) -> bool:
    changed = False
    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            for inner, outer in operands(node, body):
                if isinstance(outer, fx.Node):
                    formats[inner] = formats.get(outer)
            changed |= _sweep(body, formats, rules)
        if node.op == "placeholder" and node in formats:
            continue
        if node not in node_metadata.NOTE:
            formats[node] = format_of(graph.value(node))
            source = handed_on(graph, node, graph.context.automatic)
            if source is not None:
                formats[node] = formats.get(source, formats[node])
            continue
        operator = Operator(graph, node)
        before = operator.note
        if before.kind is Kind.ADJUSTABLE:
            operator.update(output=_output(graph, node, before))
        else:
            if node not in rules:
                rules[node] = rule_of(graph, node, graph.context.automatic)
            _follow(operator, rules[node], formats)
        formats[node] = operator.note.output
        changed |= operator.note != before
    return changed


def _follow(operator: Operator, rule: Rule, formats: Formats) -> None:
    result, large = rule.precision([formats.get(used) for used in rule.inputs])
    row, reason = operator.row, operator.note.reason
    if row is not None and rule.in_place:
        reason = f"{row.reason}; it writes in place, in the format of its target"
    elif row is not None and large is not None:
        widest = rule.promotion([formats.get(used) for used in rule.inputs])
        why = f"its argument {large:g} does not fit {widest}"
        reason = f"{row.reason}; {why}, so it runs in {result}"
    operator.update(precision=result, output=rule.output(result), reason=reason)


def _output(graph: PrecisionGraph, node: fx.Node, note: OperatorInfo) -> Precision | None:
    """Return an operator's output format (QSync, footnote 3)."""
    assert note.precision is not None, f"{note.id} was not assigned"
    owned = format_of(graph.value(node))
    if owned is None:
        return None
    narrow = row_on(graph.context.device, note.precision).output
    if not note.precision.scaled:
        return narrow
    if owned.bits < 32:
        return owned
    readers = wide_readers(node)
    if readers is None:
        return narrow
    notes = [node_metadata.NOTE[user] for user in readers]
    return owned if all(wants_wide(n.kind, n.precision) for n in notes) else narrow
