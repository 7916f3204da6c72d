"""Traced code becomes nodes of a graph.

Invariant: what is put in is spelled as the model is, and says that it comes from where its caller tells.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import fx

from qsync_fx.graph import PrecisionGraph
from qsync_fx.passes.rewriting.attach import attached
from qsync_fx.passes.rewriting.trace import Traced

OF_THE_MODEL = ("stack_trace", "nn_module_stack")
"""What a node's metadata say of where in the model it comes from."""


def inlined(
    graph: PrecisionGraph, traced: Traced, given: Sequence[fx.Node], origin: Mapping[str, Any]
) -> dict[fx.Node, fx.Node]:
    """Copies traced code to where the graph's insertion point is; returns the new node for each of the traced ones.

    Args:
        given: what it reads, one node for each value that it was traced with.
        origin: metadata of each new node, beside its value.
    """
    inputs = [*given, *(attached(graph, tensor) for tensor in traced.tensors)]
    local = dict(zip(traced.inputs, inputs, strict=True))
    for node in traced.module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            new = local[node] = graph.graph.node_copy(node, lambda used: local[used])
            new.meta = {**{key: node.meta[key] for key in ("val",) if key in node.meta}, **origin}
            if node.op == "get_attr":
                _constant(graph, new, getattr(traced.module, str(node.target)))
    return local


def _constant(graph: PrecisionGraph, node: fx.Node, value: Any) -> None:
    """Keeps a number that the function has written down, such as `torch.tensor(2.0)`."""
    at = 0
    while hasattr(graph.module, f"constant_{at}"):
        at += 1
    node.target = f"constant_{at}"
    graph.module.__dict__[node.target] = value
    node.meta.setdefault("val", value)
