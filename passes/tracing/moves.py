"""Conversions that name no type: what goes to a device, or to where another tensor is, keeps the format that it has.

torch traces `x.to(device)` as a conversion to the type that x has in the model as written, which would be taken for the model's wish.
Invariant: a conversion that names a type is such a wish, also where it changes nothing as written: `scores.float()` is written for the
day that scores are narrow. One that names none is none: it is gone where it changes nothing, and elsewhere follows a tensor.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_MOVES = ("to", "cpu", "cuda")


def copied(graph: fx.Graph, node: fx.Node, local: dict[fx.Node, fx.Node]) -> fx.Node:
    """Returns what stands in `graph` for a node of Dynamo's, mostly a copy; `local` has what stands there for its operands."""
    if node.op == "call_method" and node.target in _MOVES and not _names_a_type(node):
        source, *others = node.all_input_nodes
        before, after = (used.meta.get("example_value") for used in (source, node))
        if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
            if before is after:
                return local[source]
            if before.dtype is after.dtype:
                return _as_it_is(graph, node, local[source], after.device)
            if before.device == after.device and others:
                return _described(
                    graph.call_function(torch.ops.aten.type_as.default, (local[source], local[others[0]])), node
                )
    return graph.node_copy(node, lambda used: local[used])


def _names_a_type(node: fx.Node) -> bool:
    return any(isinstance(argument, torch.dtype) for argument in (*node.args, *node.kwargs.values()))


def _as_it_is(graph: fx.Graph, node: fx.Node, source: fx.Node, device: torch.device) -> fx.Node:
    """A copy elsewhere, or in another layout, of the type that the source turns out to have."""
    options: dict[str, Any] = {
        name: node.kwargs[name] for name in ("non_blocking", "memory_format") if name in node.kwargs
    }
    return _described(
        graph.call_function(torch.ops.aten._to_copy.default, (source,), {"device": device, **options}), node
    )


def _described(new: fx.Node, node: fx.Node) -> fx.Node:
    new.meta = dict(node.meta)
    return new
