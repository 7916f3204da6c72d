"""Graph tab: operators of a model, tensors between them, and their formats after each pass."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from qsync_fx.diagnostics.explanation import Explanation
from qsync_fx.diagnostics.graph_export import edges, shown
from qsync_fx.formatting import number
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.cost_algebra import Cost

_MOST_LINES: Final = 300
"""Lines of a pass's diff in a report."""
_CASTS: Final = (node_metadata.Part.CONVERT, node_metadata.Part.ROUND, node_metadata.Part.QUANTIZE)
"""Parts that stand for a cast; a quantized cast has more nodes."""


def add_explanation(tabs: Any, explanation: Explanation) -> None:
    """Add the graph of an explained model, and its formats to the plan tab if that is empty."""
    with explanation.on_target():
        nodes: list[dict[str, Any]] = []
        places: dict[tuple[int, str], int] = {}
        for index, part in enumerate(explanation.graphs):
            for graph in part.graph.walk():
                for operator in shown(graph):
                    places[index, str(operator.id)] = len(nodes)
                    nodes.append(_node(operator))
        pairs = sorted(
            {
                (places[index, edge.source], places[index, edge.reader])
                for index, part in enumerate(explanation.graphs)
                for edge in edges(part.graph)
            }
        )
        passes = [_pass(explanation, name, places) for name in explanation.passes]
    for entry, name, before in zip(
        passes, explanation.passes, ["", *explanation.passes], strict=False
    ):
        entry["diff"] = _diff(explanation, before, name)
    tabs["graph"] = {"nodes": nodes, "edges": pairs, "passes": passes}
    summary = tabs.summary()
    adjustable = explanation.adjustable
    if not summary["sentences"]:
        counts: dict[str, int] = {}
        for operator in adjustable:
            counts[str(operator.precision)] = counts.get(str(operator.precision), 0) + 1
        text = ", ".join(f"{count} in {fmt}" for fmt, count in counts.items())
        summary["sentences"].append(f"{len(adjustable)} adjustable operators: {text}.")
    summary["details"] += [
        f"graph break: {text.strip().partition(chr(10))[0]}" for text in explanation.breaks
    ]
    summary["details"] += [
        f"in no graph: {module.path}, {module.cause.reason}" for module in explanation.uncovered
    ]
    if "plan" not in tabs and adjustable:
        layers: list[dict[str, Any]] = [
            {"id": str(op.id), "cells": [[str(op.precision), None, [], op.reason]], "line": op.line}
            for op in adjustable
        ]
        tabs["plan"] = {"devices": [{"name": "this model", "count": None}], "layers": layers}


def _node(operator: Operator) -> dict[str, Any]:
    result: dict[str, Any] = {
        "id": str(operator.id),
        "module": operator.id.module,
        "operator": operator.id.operator,
        "kind": str(operator.kind),
        "reason": operator.reason,
        "line": operator.line,
        "code": operator.source.code if operator.source else "",
    }
    if operator.note.planned not in (None, operator.precision):
        result["planned"] = str(operator.note.planned)
    if operator.note.cost is not None:
        result |= _costs(operator.note.cost)
    return result


def _costs(cost: Cost) -> dict[str, Any]:
    values = {"flops": cost.flops, "bytes": cost.bytes, "saved": cost.saved_bytes}
    result: dict[str, Any] = {}
    for name, size in values.items():
        value = number(size)
        result[name] = str(size) if value is None else value
    return result


Place = tuple[int, str]


def _pass(explanation: Explanation, name: str, places: dict[Place, int]) -> dict[str, Any]:
    """Return the state of the operators after a pass: compute format, output format and casts."""
    formats: dict[int, list[str | None]] = {}
    casts: dict[int, list[str]] = {}
    count = 0
    for index, part in enumerate(explanation.graphs):
        for graph in part.snapshots.graphs[name].walk():
            count += len(list(graph.nodes))
            for operator in graph.own_operators():
                place = places.get((index, str(operator.id)))
                if place is not None:
                    formats[place] = [_name(operator.precision), _name(operator.output)]
            for owner, fmt in _casts(graph):
                place = places.get((index, owner))
                if place is not None:
                    casts.setdefault(place, []).append(fmt)
    return {"name": name, "formats": formats, "casts": casts, "nodes": count}


def _name(value: object) -> str | None:
    return None if value is None else str(value)


def _casts(graph: PrecisionGraph) -> Iterator[tuple[str, str]]:
    """Yield the operator of each cast, and its format."""
    for node in graph.nodes:
        info = node_metadata.CAST.get(node)
        if info is None or info.owner is None or info.format is None:
            continue
        if info.part in _CASTS:
            yield str(info.owner), str(info.format)


def _diff(explanation: Explanation, before: str, name: str) -> list[str]:
    """Return the changed lines of a pass, at most `_MOST_LINES`."""
    if not before:
        return []
    lines = [
        line
        for line in explanation.diff(before, name).splitlines()
        if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")
    ]
    if len(lines) > _MOST_LINES:
        return [*lines[:_MOST_LINES], f"and {len(lines) - _MOST_LINES} more lines"]
    return lines
