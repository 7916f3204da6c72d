"""Dependent operators take the promoted precision of their inputs (paper, section IV-B and footnote 1), to a fixed point.

Invariant: afterwards every operator with floating-point output has a precision and an output precision, and every dependent operator's
precision is the promotion of its inputs' output precisions. Promotion is torch's own: tensors without dimensions do not widen.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qsync_fx.devices import row_on
from qsync_fx.graph import Operator, PrecisionGraph, meta
from qsync_fx.graph.effects.bodies import operands, readers, result_of
from qsync_fx.graph.effects.writes import in_place, writes
from qsync_fx.graph.notes import Note
from qsync_fx.graph.values import format_of, is_float
from qsync_fx.ops import Kind
from qsync_fx.passes.base import Scope
from qsync_fx.precision import FP32, Precision, precision_of, promoted

Formats = dict[fx.Node, Precision | None]


@dataclass(frozen=True)
class Cascade:
    name: ClassVar[str] = "cascade"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        # A sweep in topological order settles everything but writes in place, whose effect on earlier aliases needs another one.
        while _sweep(graph, {}):
            pass


def _sweep(graph: PrecisionGraph, formats: Formats) -> bool:
    changed = False
    for node in graph.nodes:
        for body in meta.bodies(node):
            given = {p: formats.get(operand) for p, operand in operands(node, body) if isinstance(operand, fx.Node)}
            formats.update(given)
            changed |= _sweep(body, formats)
        if node.op == "placeholder" and node in formats:
            continue
        if node not in meta.NOTE:
            formats[node] = _passed_on(graph, node, formats)
            continue
        operator = Operator(graph, node)
        before = operator.note
        _decide(graph, operator, formats)
        formats[node] = operator.note.output
        changed |= operator.note != before
    return changed


def _passed_on(graph: PrecisionGraph, node: fx.Node, formats: Formats) -> Precision | None:
    """The format of a node that is no operator: what the model says, or that of the operator whose result it unpacks."""
    own = format_of(graph.value(node))
    source = node.args[0] if node.args else None
    if own is None or not isinstance(source, fx.Node):
        return own
    cast = meta.CAST.get(node)
    if cast is not None and cast.policy == "lower" and not graph.context.automatic:
        # Where to compute in fewer bits is the plan's choice, against the region's.
        return formats.get(source, own)
    if (result := result_of(node)) is not None:
        return formats.get(result, own)
    if getattr(node.target, "__name__", "") != "getitem":
        return own
    return formats.get(source, own) if own == format_of(graph.value(source)) else own


def _decide(graph: PrecisionGraph, operator: Operator, formats: Formats) -> None:
    node, note, row = operator.node, operator.note, operator.row
    own = format_of(graph.value(node))
    if note.kind is Kind.ADJUSTABLE:
        operator.update(output=_output(graph, node, note, own))
    elif row is not None and row.converts:
        found = _conversion(graph, node, formats, own)
        operator.update(precision=found, output=found)
    elif note.kind is Kind.FIXED and not in_place(node):
        found = _fixed(graph, operator, own)
        operator.update(precision=found, output=found)
    else:
        found, why = _dependent(graph, node, formats, own)
        reason = f"{row.reason}; {why}" if row is not None and why else note.reason
        explicit = _named_format(node)
        operator.update(precision=found, output=explicit or found, reason=reason)


def _output(graph: PrecisionGraph, node: fx.Node, note: Note, own: Precision | None) -> Precision | None:
    """An operator's output format: its precision's, but FP32 from a scaled operator whose every reader wants FP32 (paper, footnote 3)."""
    assert note.precision is not None, f"{note.id} was not assigned"
    if own is None:
        return None
    given = row_on(graph.context.device, note.precision)
    if not note.precision.scaled:
        return given.output
    if own.bits < 32:
        return own
    wide = all(_wants_wide(user) for user in readers(node))
    return own if wide else given.output


def _wants_wide(user: fx.Node) -> bool:
    note = meta.NOTE.get(user)
    if note is None:
        return user.op == "output"
    if note.kind is Kind.ADJUSTABLE:
        return note.precision is not None and note.precision.plain and note.precision.bits >= 32
    if note.kind is Kind.DEPENDENT:
        # Known from the second sweep on: another of its inputs makes it wide, whatever this operator gives.
        return note.precision is not None and note.precision.bits >= 32
    return True


def _fixed(graph: PrecisionGraph, operator: Operator, own: Precision | None) -> Precision | None:
    """What the model wrote; where only its autocast region has it narrow and a plan decides in the region's place, at least FP32."""
    narrowed = operator.row is not None and isinstance(operator.note.autocast, Precision)
    return promoted(own, FP32) if own is not None and narrowed and not graph.context.automatic else own


def _conversion(graph: PrecisionGraph, node: fx.Node, formats: Formats, own: Precision | None) -> Precision | None:
    explicit = _named_format(node)
    if explicit is not None or own is None:
        return explicit
    like = [used for used in node.all_input_nodes if is_float(graph.value(used))]
    return formats.get(like[-1], own) if like else own


def _named_format(node: fx.Node) -> Precision | None:
    """The format that a node's own arguments ask for: `softmax(x, dtype=torch.float32)`."""
    named = [a for a in (*node.args, *node.kwargs.values()) if isinstance(a, torch.dtype)]
    return precision_of(named[0]) if named else None


def _dependent(
    graph: PrecisionGraph, node: fx.Node, formats: Formats, own: Precision | None
) -> tuple[Precision | None, str]:
    if in_place(node):
        return formats.get(writes(node)[0], own), "it writes in place, in the format of what it writes to"
    inputs = [used for used in node.all_input_nodes if is_float(graph.value(used))]
    ranked = [used for used in inputs if graph.value(used).dim() > 0] or inputs
    inputs_formats = [found for used in ranked if (found := formats.get(used)) is not None]
    if own is None or not inputs_formats:
        return own, ""
    widest = inputs_formats[0]
    for found in inputs_formats[1:]:
        widest = promoted(widest, found)
    scalar = _too_large(node, widest)
    if scalar is not None:
        return own, f"its argument {scalar:g} does not fit {widest}, so it runs in {own}"
    return widest, ""


def _too_large(node: fx.Node, fmt: Precision) -> float | None:
    """A finite scalar argument beyond the format's range: models write `masked_fill(mask, torch.finfo(torch.float32).min)`."""
    scalars: list[float] = []

    def look(value: Any) -> Any:
        if isinstance(value, float) and math.isfinite(value) and abs(value) > fmt.max:
            scalars.append(value)
        return value

    fx.node.map_aggregate((node.args, node.kwargs), look)
    return scalars[0] if scalars else None
