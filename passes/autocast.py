"""Replacement of the model's autocast regions by explicit casts.

Invariant: the graph computes the same values as under autocast. Regions remain only around
operators that stay as Dynamo wrote them. Each operator records its region for `assign`.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from qsync_fx.autocast_policy import Policy, policy as policy_of
from qsync_fx.formats import precision_of
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.fx_utils import format_of, is_float
from qsync_fx.graph.node_metadata import CastInfo, Part, Purpose
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope
from qsync_fx.torch_internals import OpOverload, _enter_autocast, _exit_autocast

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
        for node in reversed(graph.nodes):
            is_switch = node.target in (_enter_autocast, _exit_autocast)
            if is_switch and node not in node_metadata.KEPT:
                graph.graph.erase_node(node)
        if graph.context.ambient is not None and graph.parent is None:
            first = next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))
            _enclose(graph, first, graph.nodes[-1], None, False, None)
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
    if not isinstance(node.target, OpOverload):
        if not node_metadata.bodies(node):
            _wrap(graph, node, region)
        return
    subject = policy_of(node.target, graph.context.device.type)
    if subject == "inside":
        if operator.kind is not Kind.ADJUSTABLE:
            _wrap(graph, node, region)
    elif subject is not None:
        dtypes = [v.dtype for v in map(graph.value, node.all_input_nodes) if is_float(v)]
        wanted = dtype
        if subject == "fp32" or (subject != "lower" and torch.float32 in dtypes):
            wanted = torch.float32
        node.args, node.kwargs = fx.node.map_arg(
            (node.args, node.kwargs), lambda used: _cast(graph, node, used, wanted, subject)
        )


def _cast(
    graph: PrecisionGraph, node: fx.Node, used: fx.Node, wanted: torch.dtype, policy: Policy
) -> fx.Node:
    value = graph.value(used)
    # Autocast converts Float8 tensors of the model too.
    floats = isinstance(value, torch.Tensor) and value.dtype.is_floating_point
    if not floats or value.dtype is torch.float64 or value.dtype is wanted:
        return used
    with graph.graph.inserting_before(node):
        cast = graph.graph.call_function(torch.ops.aten.to.dtype, (used, wanted))
    owner, fmt, purpose = node_metadata.NOTE[node].id, precision_of(wanted), Purpose.AUTOCAST
    node_metadata.CAST[cast] = CastInfo(Part.CONVERT, owner, fmt, None, purpose, policy)
    graph.propagate(cast)
    return cast


def _wrap(graph: PrecisionGraph, node: fx.Node, region: Region) -> None:
    """Leave an opaque node in its original autocast region."""
    _enclose(graph, node, node.next, region[1], region[0], True)
    node_metadata.REGION[node] = region


def _enclose(graph: PrecisionGraph, first: fx.Node, after: fx.Node, *settings: Any) -> None:
    """Insert an autocast region (dtype, enabled, cached) from `first` up to before `after`."""
    with graph.graph.inserting_before(first):
        arguments = (graph.context.device.type, *settings)
        enter = graph.graph.call_function(_enter_autocast, arguments)
    with graph.graph.inserting_before(after):
        leave = graph.graph.call_function(_exit_autocast, (enter,))
    node_metadata.KEPT[enter] = node_metadata.KEPT[leave] = True
