"""The operators of a model as a Graphviz graph, coloured by precision.

Invariant: what comes from the model (names, lines of source) is quoted, so that no model can write a graph of its own.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from torch import fx

from qsync_fx import meta
from qsync_fx.graph import PrecisionGraph
from qsync_fx.precision import Precision

if TYPE_CHECKING:
    from qsync_fx.explanation import Explanation


def dot(explanation: Explanation) -> str:
    """Returns the explanation in the DOT language; one cluster a graph."""
    lines = ["digraph qsync {", '  node [shape=box, style="rounded,filled", fontname="Helvetica"];', "  rankdir=TB;"]
    at = 0
    for part in explanation.graphs:
        for graph in part.graph.walk():
            lines += _cluster(graph, at)
            at += 1
    return "\n".join([*lines, "}"]) + "\n"


def _cluster(graph: PrecisionGraph, at: int) -> list[str]:
    name = f"g{at}"
    lines = [f"  subgraph cluster_{at} {{", f'    label="graph {at}";']
    for operator in graph.own_operators():
        label = f"{operator.id}\n{operator.precision or '-'} -> {operator.output or '-'}"
        style = f"fillcolor={json.dumps(colour(operator.precision))}"
        lines.append(
            f"    {_name(name, operator.node)} [label={json.dumps(label)}, {style}, tooltip={json.dumps(operator.reason)}];"
        )
    for operator in graph.own_operators():
        for source in dict.fromkeys(_sources(operator.node)):
            lines.append(f"    {_name(name, source)} -> {_name(name, operator.node)};")
    return [*lines, "  }"]


def _name(graph: str, node: fx.Node) -> str:
    return json.dumps(f"{graph}.{node.name}")


def _sources(node: fx.Node) -> list[fx.Node]:
    """The operators that a node reads from, through casts and unpacking."""
    found: list[fx.Node] = []
    for used in node.all_input_nodes:
        if used in meta.NOTE:
            found.append(used)
        elif used.op == "call_function":
            found += _sources(used)
    return found


def colour(fmt: Precision | None) -> str:
    """Returns a colour by width: the narrower, the warmer."""
    if fmt is None:
        return "#eeeeee"
    return {32: "#dbe9f6", 64: "#c6d4e8", 19: "#d5efe6", 16: "#fdeec4", 8: "#f9cdb5"}.get(fmt.bits, "#f4b6c2")
