"""Writes in place become plain operators where nobody can tell.

Invariant: values and gradients are those of the in-place graph. `y = relu_(x)` becomes `y = relu(x)`, and later readers of x read y,
only if x is a fresh tensor of this graph (an operator's own result, not an input, attribute or view) of which no view exists. The
point is freedom of precision: the result of a write in place must have the format of what it writes to; that of a plain operator
need not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher

from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.effects.modes import switches_grad
from qsync_fx.graph.effects.writes import in_place, writes
from qsync_fx.graph.values import is_alias, is_float
from qsync_fx.ops import Kind, row_for


def without_needless_writes(graph: PrecisionGraph) -> None:
    """Replaces in-place operators by plain ones where the invariant allows it."""
    if any(switches_grad(node) for node in graph.nodes):
        # Under no_grad a write in place keeps the tensor's history, which a plain operator would cut.
        return
    order = {node: at for at, node in enumerate(graph.nodes)}
    replaced: set[fx.Node] = set()
    for node in graph.nodes:
        plain = _plain_target(node)
        if plain is None:
            continue
        (written,) = writes(node)
        if node.args[0] is not written or not _is_fresh(written) or not _same_type(graph, node, written):
            continue
        if any(not _returns_fresh(user) for user in written.users if order[user] < order[node]):
            continue
        if _outcome(graph, node, node.target) != _outcome(graph, node, plain):
            continue
        node.target = plain
        node._rename(plain._schema.name.partition("::")[2])
        for user in list(written.users):
            if order[user] > order[node]:
                user.replace_input_with(written, node)
        replaced.add(node)
    _move_out(graph, replaced)


def _move_out(graph: PrecisionGraph, replaced: set[fx.Node]) -> None:
    """Gives what is a tensor of its own now, and the views of it, values that share no memory with the tensor that was written to."""
    moved: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        before = graph.value(node)
        views = isinstance(before, torch.Tensor) and any(
            used in moved and is_alias(before, moved[used]) for used in node.all_input_nodes
        )
        if node in replaced or views:
            moved[node] = before
            graph.propagate(node)


def _plain_target(node: fx.Node) -> Any:
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or not target._schema.name.endswith("_") or len(writes(node)) != 1:
        return None
    namespace, _, name = target._schema.name.partition("::")
    packet = getattr(getattr(torch.ops, namespace), name.removesuffix("_"), None)
    return getattr(packet, target._overloadname, None) if packet is not None else None


def _is_fresh(node: fx.Node) -> bool:
    return node.op == "call_function" and _returns_fresh(node) and not in_place(node)


def _returns_fresh(node: fx.Node) -> bool:
    """Whether a node's result shares no memory with anything: told by the schema, for operators whose schema tells the truth."""
    if node.op == "output":
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload):
        return False
    row = row_for(target)
    if torch._C._dispatch_has_kernel_for_dispatch_key(_qualified_name(target), "CompositeImplicitAutograd"):
        # A composite operator may return its input without saying so (dropout in evaluation does).
        return row is not None and row.kind is Kind.ADJUSTABLE
    return all(result.alias_info is None for result in target._schema.returns)


def _qualified_name(target: torch._ops.OpOverload) -> str:
    schema = target._schema
    return f"{schema.name}.{schema.overload_name}" if schema.overload_name else schema.name


def _outcome(graph: PrecisionGraph, node: fx.Node, target: Any) -> object:
    """What a target makes of a node's arguments: type, shape and the formula of its gradient.

    Some formulas differ in place, where `elu_` has its result alone to go by; a comparison in place gives numbers, not truth values; and
    an operator without its underscore may be another one.
    """

    def fresh(used: fx.Node) -> Any:
        value = graph.value(used)
        if not isinstance(value, torch.Tensor):
            return value
        leaf = torch.empty_like(value)
        return leaf.requires_grad_().clone() if used is node.args[0] and is_float(value) else leaf

    args, kwargs = fx.node.map_arg((node.args, node.kwargs), fresh)
    try:
        with torch.enable_grad(), torch.autocast(graph.context.device.type, enabled=False), enable_python_dispatcher():
            result = target(*args, **kwargs)
            return result.dtype, result.shape, type(result.grad_fn)
    except Exception:  # noqa: BLE001 - whatever stops it, it does not do the same
        return object()


def _same_type(graph: PrecisionGraph, node: fx.Node, written: fx.Node) -> bool:
    ours = graph.value(written)
    operands = [graph.value(used) for used in node.all_input_nodes]
    dtypes = {v.dtype for v in operands if isinstance(v, torch.Tensor) and v.dtype.is_floating_point}
    shapes = [v.shape for v in operands if isinstance(v, torch.Tensor)]
    # A plain operator promotes and broadcasts where a write in place does not.
    return dtypes == {ours.dtype} and all(len(shape) <= ours.dim() for shape in shapes)
