"""Graphs of a model's operators for Graphviz and for Model Explorer, coloured by precision.

Invariant: names and source lines from the model are quoted, so they cannot inject DOT syntax. Each
tensor that an operator reads in a role is an edge.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.formatting import short
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import expression, tensors


def dot(graphs: Sequence[PrecisionGraph]) -> str:
    """Return the graphs of a model in the DOT language; each graph is a cluster."""
    lines = [
        "digraph qsync {",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica"];',
        "  rankdir=TB;",
    ]
    clusters = 0
    for index, model in enumerate(graphs):
        for graph in model.walk():
            lines.append(f'  subgraph cluster_{clusters} {{\n    label="graph {clusters}";')
            lines += [_box(index, operator) for operator in shown(graph)]
            lines.append("  }")
            clusters += 1
        for edge in edges(model):
            attributes = edge.text and f" [tooltip={json.dumps(edge.text)}]"
            source, reader = _name(index, edge.source), _name(index, edge.reader)
            lines.append(f"  {source} -> {reader}{attributes};")
    return "\n".join([*lines, "}"]) + "\n"


def _box(index: int, operator: Operator) -> str:
    label = f"{operator.id}\n{operator.precision or '-'} -> {operator.output or '-'}"
    attributes = {"label": label, "fillcolor": colour(operator.precision)}
    attributes["tooltip"] = operator.reason
    text = ", ".join(f"{name}={json.dumps(value)}" for name, value in attributes.items())
    return f"    {_name(index, str(operator.id))} [{text}];"


def _name(graph: int, operator: str) -> str:
    return json.dumps(f"g{graph}.{operator}")


def model_explorer(graphs: Sequence[PrecisionGraph], label: str) -> str:
    """Return the graphs of a model as a graph collection of Model Explorer, in JSON.

    Modules are its layers (namespaces): a layer contains the operators and layers of its module.
    """
    collection = []
    for index, model in enumerate(graphs):
        incoming: dict[str, list[dict[str, str]]] = defaultdict(list)
        for edge in edges(model):
            inputs = incoming[edge.reader]
            inputs.append({"sourceNodeId": edge.source, "sourceNodeOutputId": "0"})
            inputs[-1]["targetNodeInputId"] = str(len(inputs) - 1)
        nodes = [
            {
                "id": str(operator.id),
                "label": operator.id.operator,
                "namespace": operator.id.module.replace(".", "/"),
                "attrs": [{"key": key, "value": text} for key, text in _attributes(operator)],
                "incomingEdges": incoming[str(operator.id)],
                "style": {"backgroundColor": colour(operator.precision)},
            }
            for graph in model.walk()
            for operator in shown(graph)
        ]
        collection.append({"id": f"graph {index}", "nodes": nodes})
    return json.dumps({"label": label, "graphs": collection}, indent=1) + "\n"


def _attributes(operator: Operator) -> Iterator[tuple[str, str]]:
    note, cost = operator.note, operator.note.cost
    yield "kind", str(note.kind)
    yield "precision", str(note.precision or "-")
    if note.planned is not None and note.planned is not note.precision:
        yield "planned", str(note.planned)
    yield "output", str(note.output or "-")
    yield "reason", operator.reason
    if cost is not None:
        yield "flops", short(cost.flops)
        yield "memory traffic", short(cost.bytes, "B")
        yield "saved for backward", short(cost.saved_bytes, "B")
    if operator.source is not None:
        yield "source", f"{operator.source}: {operator.source.code}"


def shown(graph: PrecisionGraph) -> list[Operator]:
    """Return the operators except calls of bodies, as the bodies are shown themselves."""
    return [op for op in graph.own_operators() if not node_metadata.bodies(op.node)]


@dataclass(frozen=True)
class Edge:
    """Tensor between two operators, by their ids; `text` is "" for inserted operators."""

    source: str
    reader: str
    text: str = ""


def edges(graph: PrecisionGraph) -> Iterator[Edge]:
    """Yield the tensors that operators pass to others, one for each role of a reader."""
    flow = graph.costing.flow
    written = {str(site.id) for site in flow.sites}
    operators = {str(op.id): op for part in graph.walk() for op in shown(part)}
    for site in flow.sites:
        for operand, need in zip(site.operands, site.needs, strict=True):
            note = node_metadata.NOTE.get(flow.source(operand.node))
            values = tensors(site.graph.value(operand.node))
            if note is None or not values or not {str(note.id), str(site.id)} <= operators.keys():
                continue
            count = sum((expression(t.numel()) for t in values), start=0)
            suffix = "" if need else ", without a gradient"
            yield Edge(str(note.id), str(site.id), f"{operand.role}: {count} values{suffix}")
    # Operators that a pass inserts after the decisions are not in the written graph.
    for reader, operator in operators.items():
        for source in dict.fromkeys(_sources(operator.node)):
            if source in operators and not {source, reader} <= written:
                yield Edge(source, reader)


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
