"""Graphviz rendering of a model's operators, coloured by precision.

Invariant: names and source lines from the model are quoted, so they cannot inject DOT syntax.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from torch import fx

from qsync_fx.formats import Precision
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.cost_dag import precision_dag

if TYPE_CHECKING:
    from qsync_fx.diagnostics.explanation import Explanation


def dot(explanation: Explanation) -> str:
    """Return the explanation in the DOT language.

    Each graph is a cluster. Each tensor that an operator reads in a role is an edge.
    """
    lines = [
        "digraph qsync {",
        '  node [shape=box, style="rounded,filled", fontname="Helvetica"];',
        "  rankdir=TB;",
    ]
    clusters = 0
    for index, part in enumerate(explanation.graphs):
        for graph in part.graph.walk():
            lines += _cluster(graph, index, clusters)
            clusters += 1
        lines += _edges(part.graph, index)
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(graph: PrecisionGraph, index: int, cluster: int) -> list[str]:
    lines = [f"  subgraph cluster_{cluster} {{", f'    label="graph {cluster}";']
    for operator in _shown(graph):
        label = f"{operator.id}\n{operator.precision or '-'} -> {operator.output or '-'}"
        style = f"fillcolor={json.dumps(colour(operator.precision))}"
        name, reason = _name(index, str(operator.id)), json.dumps(operator.reason)
        lines.append(f"    {name} [label={json.dumps(label)}, {style}, tooltip={reason}];")
    return [*lines, "  }"]


def _shown(graph: PrecisionGraph) -> list[Operator]:
    """Return the operators except calls of bodies, as the bodies are shown themselves."""
    return [
        operator for operator in graph.own_operators() if not node_metadata.bodies(operator.node)
    ]


def _edges(graph: PrecisionGraph, index: int) -> list[str]:
    dag, operators = (
        precision_dag(graph),
        [operator for part in graph.walk() for operator in _shown(part)],
    )
    shown = {str(operator.id) for operator in operators}
    lines = [
        f"  {_name(index, source)} -> {_name(index, reader)} [tooltip={json.dumps(_carries(data))}];"
        for source, reader, data in dag.edges(data=True)
        if source in shown and reader in shown
    ]
    # Operators that a pass inserts after the decisions are not in the precision DAG.
    for operator in operators:
        late = str(operator.id) not in dag
        for source in dict.fromkeys(_sources(operator.node)):
            if source in shown and (late or source not in dag):
                lines.append(f"  {_name(index, source)} -> {_name(index, str(operator.id))};")
    return lines


def _carries(data: dict[str, Any]) -> str:
    return f"{data['role']}: {data['numel']} values" + (
        "" if data["gradient"] else ", without a gradient"
    )


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
    return {32: "#dbe9f6", 64: "#c6d4e8", 19: "#d5efe6", 16: "#fdeec4", 8: "#f9cdb5"}.get(
        fmt.bits, "#f4b6c2"
    )
