"""The text of a graph, for people, diffs and golden tests.

Invariant: equal graphs have equal text. One line a node: its name, its type, what it calls, and for an operator its id, kind and format.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.effects.modes import is_switch
from qsync_fx.graph.nodes import target_name
from qsync_fx.graph.values import describe


def graph_text(graph: PrecisionGraph, indent: str = "") -> str:
    """Returns the graph as text, bodies of higher-order operators indented below their node."""
    lines = []
    for node in graph.nodes:
        lines.append(indent + _line(graph, node))
        for body in meta.bodies(node):
            lines.append(graph_text(body, indent + "    "))
    return "\n".join(lines)


def _line(graph: PrecisionGraph, node: fx.Node) -> str:
    if node.op == "output":
        return f"return {_argument(node.args[0])}"
    value = graph.value(node)
    # A mode is no value, and the name of its class is another one in every torch.
    head = f"%{node.name}" + (f": {describe(value)}" if value is not None and not is_switch(node) else "")
    if node.op == "placeholder":
        return f"{head} = input"
    if node.op == "get_attr":
        return f"{head} = attribute {node.target}"
    arguments = [_argument(a) for a in node.args] + [f"{k}={_argument(v)}" for k, v in node.kwargs.items()]
    name = target_name(node).removesuffix(".default")
    line = f"{head} = {name}({', '.join(arguments)})"
    note = meta.NOTE.get(node)
    if note is None:
        return line
    formats = f" {note.precision}" if note.precision else ""
    if note.output is not None and note.output is not note.precision:
        formats += f"->{note.output}"
    return f"{line}  # {note.id} {note.kind}{formats}"


def _argument(value: Any) -> str:
    if isinstance(value, fx.Node):
        return f"%{value.name}"
    if isinstance(value, (list, tuple)):
        inner = ", ".join(_argument(item) for item in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_argument(item)}" for key, item in value.items()) + "}"
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return repr(value)
