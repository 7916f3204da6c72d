"""Replacement of the model's autocast regions by explicit casts.

Invariant: the graph computes the same values as under autocast. Regions remain only around
operators that stay as Dynamo wrote them. Each operator records its region for the pass `assign`. A
graph that is called under autocast starts with a node that disables autocast, so that no cast
happens twice.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast

from qsync_fx.autocast_policy import Policy, policy
from qsync_fx.formats import precision_of
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import format_of, is_float
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope

Region = tuple[bool, torch.dtype]


@dataclass(frozen=True)
class Autocast:
    name: ClassVar[str] = "autocast"
    scope: ClassVar[Scope] = Scope.BODY

    def __call__(self, graph: PrecisionGraph) -> None:
        device = graph.context.device.type
        stack: list[Region | None] = [graph.context.ambient]
        for node in graph.nodes:
            if node.target is _enter_autocast:
                stack.append(_region(node, device) or stack[-1])
            elif node.target is _exit_autocast:
                stack.pop()
            elif node in node_metadata.NOTE and (region := stack[-1]) is not None:
                _apply(graph, node, region)
        _remove_regions(graph)
        if graph.context.ambient is not None and graph.parent is None:
            _switch_off(graph)
        graph.module.recompile()


def _region(node: fx.Node, device: str) -> Region | None:
    kind, dtype, enabled, _ = node.args
    if kind != device:
        return None
    if not isinstance(dtype, torch.dtype):
        dtype = torch.get_autocast_dtype(device)
    return bool(enabled), dtype


def _apply(graph: PrecisionGraph, node: fx.Node, region: Region) -> None:
    enabled, dtype = region
    operator = Operator(graph, node)
    # The dtype of the result shows the compute dtype: some operators widen, and many preserve the
    # dtype of their operands.
    computed = format_of(graph.value(node)) or precision_of(dtype)
    operator.update(autocast=computed if enabled else "off")
    for body in node_metadata.bodies(node):
        body.context = dataclasses.replace(body.context, ambient=region)
    if not enabled:
        return
    if not isinstance(node.target, torch._ops.OpOverload):
        if not node_metadata.bodies(node):
            _wrap(graph, node, region)
        return
    subject = policy(node.target, graph.context.device.type)
    if subject == "inside":
        if operator.kind is not Kind.ADJUSTABLE:
            _wrap(graph, node, region)
    elif subject is not None:
        wanted = _wanted(graph, node, subject, dtype)
        node.args, node.kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda used: _cast(graph, node, used, wanted, subject)
        )


def _wanted(
    graph: PrecisionGraph, node: fx.Node, description: Policy, dtype: torch.dtype
) -> torch.dtype:
    if description == "lower":
        return dtype
    if description == "fp32":
        return torch.float32
    dtypes = [v.dtype for v in map(graph.value, node.all_input_nodes) if is_float(v)]
    return torch.float32 if torch.float32 in dtypes else dtype


def _cast(
    graph: PrecisionGraph, node: fx.Node, used: fx.Node, wanted: torch.dtype, description: Policy
) -> fx.Node:
    value = graph.value(used)
    # Autocast converts Float8 tensors of the model too.
    floats = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    if not floats or value.dtype is torch.float64 or value.dtype is wanted:
        return used
    with graph.graph.inserting_before(node):
        cast = graph.graph.call_function(torch.ops.aten.to.dtype, (used, wanted))
    owner, fmt = node_metadata.NOTE[node].id, precision_of(wanted)
    node_metadata.CAST[cast] = node_metadata.CastInfo(
        node_metadata.Part.CONVERT, owner, fmt, None, node_metadata.Purpose.AUTOCAST, description
    )
    graph.propagate(cast)
    return cast


def _wrap(graph: PrecisionGraph, node: fx.Node, region: Region) -> None:
    """Leave an opaque node in its original autocast region."""
    with graph.graph.inserting_before(node):
        enter = graph.graph.call_function(
            _enter_autocast, (graph.context.device.type, region[1], region[0], True)
        )
    with graph.graph.inserting_after(node):
        leave = graph.graph.call_function(_exit_autocast, (enter,))
    node_metadata.KEPT[enter] = node_metadata.KEPT[leave] = True
    node_metadata.REGION[node] = region


def _remove_regions(graph: PrecisionGraph) -> None:
    for node in reversed(graph.nodes):
        if node.target in (_enter_autocast, _exit_autocast) and node not in node_metadata.KEPT:
            graph.graph.erase_node(node)


def _switch_off(graph: PrecisionGraph) -> None:
    nodes = graph.nodes
    first = next(node for node in nodes if node.op not in ("placeholder", "get_attr"))
    with graph.graph.inserting_before(first):
        off = graph.graph.call_function(
            _enter_autocast, (graph.context.device.type, None, False, None)
        )
    with graph.graph.inserting_before(nodes[-1]):
        leave = graph.graph.call_function(_exit_autocast, (off,))
    node_metadata.KEPT[off] = node_metadata.KEPT[leave] = True
