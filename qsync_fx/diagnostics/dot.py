"""Graphviz rendering of a model's operators, coloured by precision.

Invariant: names and source lines from the model are quoted, so they cannot inject DOT syntax.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import expression, tensors


def dot(graphs: Sequence[PrecisionGraph]) -> str:
    """Return the graphs of a model in the DOT language.

    Each graph is a cluster. Each tensor that an operator reads in a role is an edge.
    """
    lines = [
        "digraph qsync {",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica"];',
        "  rankdir=TB;",
    ]
    clusters = 0
    for index, model in enumerate(graphs):
        for graph in model.walk():
            lines.append(f'  subgraph cluster_{clusters} {{\n    label="graph {clusters}";')
            lines += [_box(index, operator) for operator in _shown(graph)]
            lines.append("  }")
            clusters += 1
        lines += _edges(model, index)
    return "\n".join([*lines, "}"]) + "\n"


def _box(index: int, operator: Operator) -> str:
    label = f"{operator.id}\n{operator.precision or '-'} -> {operator.output or '-'}"
    attributes = {"label": label, "fillcolor": colour(operator.precision)}
    attributes["tooltip"] = operator.reason
    text = ", ".join(f"{name}={json.dumps(value)}" for name, value in attributes.items())
    return f"    {_name(index, str(operator.id))} [{text}];"


def _shown(graph: PrecisionGraph) -> list[Operator]:
    """Return the operators except calls of bodies, as the bodies are shown themselves."""
    return [op for op in graph.own_operators() if not node_metadata.bodies(op.node)]


def _edges(graph: PrecisionGraph, index: int) -> list[str]:
    flow = graph.costing.flow
    written = {str(site.id) for site in flow.sites}
    operators = {str(op.id): op for part in graph.walk() for op in _shown(part)}
    lines = []

    def connect(source: str, reader: str, attributes: str = "") -> None:
        if source in operators and reader in operators:
            lines.append(f"  {_name(index, source)} -> {_name(index, reader)}{attributes};")

    for site in flow.sites:
        for operand, need in zip(site.operands, site.needs, strict=True):
            note = node_metadata.NOTE.get(flow.source(operand.node))
            values = tensors(site.graph.value(operand.node))
            if note is not None and values:
                count = sum((expression(t.numel()) for t in values), start=0)
                suffix = "" if need else ", without a gradient"
                tooltip = json.dumps(f"{operand.role}: {count} values{suffix}")
                connect(str(note.id), str(site.id), f" [tooltip={tooltip}]")
    # Operators that a pass inserts after the decisions are not in the written graph.
    for reader, operator in operators.items():
        for source in dict.fromkeys(_sources(operator.node)):
            if not {source, reader} <= written:
                connect(source, reader)
    return lines


def _name(graph: int, operator: str) -> str:
    return json.dumps(f"g{graph}.{operator}")


def _sources(node: fx.Node) -> list[str]:
    """Return the ids of the operators that a node reads from, through casts and unpacking."""
    result: list[str] = []
    for used in node.all_input_nodes:
        note = node_metadata.NOTE.get(used)
        if note is not None:
            result.append(str(note.id))
        elif used.op == "call_function":
            result += _sources(used)
    return result


def colour(fmt: Precision | None) -> str:
    """Return a colour by width: narrower formats are warmer."""
    if fmt is None:
        return "#eeeeee"
    colours = {64: "#c6d4e8", 32: "#dbe9f6", 19: "#d5efe6", 16: "#fdeec4", 8: "#f9cdb5"}
    return colours.get(fmt.bits, "#f4b6c2")
