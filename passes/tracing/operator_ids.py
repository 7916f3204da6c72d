"""Operator ids: module path, operator name and occurrence.

Invariant: an `OpId` depends on the model's source alone. Occurrences are counted across all graphs
of one frame, so ids do not change if DDP or a graph break splits the graph.
"""

from __future__ import annotations

import dataclasses
import re
import weakref
from collections.abc import Callable
from typing import Any

from torch import fx, nn

from qsync_fx.formats import Precision
from qsync_fx.graph import PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import writes
from qsync_fx.graph.fx_utils import format_of, is_float, is_switch, tensors
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.module_paths import joined, unwrapped
from qsync_fx.ops import Kind, OperatorRow, row_for
from qsync_fx.passes.tracing.dynamo_frames import SourcePlace, clean_path, translator
from qsync_fx.plan.operator_id import Numbering, OpId
from qsync_fx.torch_internals import OpOverload, TracingContext

_VARIABLE = re.compile(r"([LG])\['(\w+)'\]")
"""Prefix of Dynamo's names of inputs: a local or a global variable of the frame."""

_numberings: weakref.WeakKeyDictionary[TracingContext, Numbering] = weakref.WeakKeyDictionary()
_at_breaks: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], Numbering]] = (
    weakref.WeakKeyDictionary()
)


def numbering(current: SourcePlace) -> Numbering:
    """Return the current numbering, continued from earlier graphs of the same frame.

    DDP's buckets are compiled one by one in one tracing context. The code after a graph break is
    another frame, which finds the numbering by its line.
    """
    context = TracingContext.try_get()
    if context is None:
        return Numbering()
    if context not in _numberings:
        before, line = Numbering(), current.resumes_at
        if current.root is not None and current.code is not None and line is not None:
            breaks = _at_breaks.get(current.root, {})
            before = breaks.get((current.code.co_filename, line), before)
        _numberings[context] = before.copy()
    return _numberings[context]


def numbering_now() -> Callable[[], None]:
    """Return a function that resets the numbering to its current state, for a second attempt."""
    context = TracingContext.try_get()
    if context is None:
        return lambda: None
    before = _numberings.get(context)
    state = before and before.copy()

    def put_back() -> None:
        _numberings.pop(context, None)
        if state is not None:
            _numberings[context] = state

    return put_back


def remember_break(current: SourcePlace, numbers: Numbering) -> None:
    """Store the numbering for the frame that resumes after a graph break."""
    tx = translator()
    if tx is None or current.root is None:
        return
    reason = tx.output.compile_subgraph_reason
    if reason is not None and reason.graph_break:
        breaks = _at_breaks.setdefault(current.root, {})
        for frame in reason.user_stack:
            breaks[frame.filename, frame.lineno or 0] = numbers.copy()


def identify(graph: PrecisionGraph, numbers: Numbering, current: SourcePlace) -> None:
    """Write a note with an id to every node that computes with floating-point values."""
    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            identify(body, numbers, current)
        if not _is_operator(graph, node):
            continue
        row, by = row_for(node.target), node_metadata.put_in_by(node)
        module, name = _module_path(node, current), _operator_name(node, row)
        if by:
            near = OpId(module, name, after="" if module else numbers.last)
            op_id = numbers.put_in(near, f"{by}.{name}")
        else:
            op_id = numbers.number(module, name)
        _note(node, OperatorInfo(op_id, row.kind if row else Kind.FIXED, "", row, by=by))


def identify_new(
    graph: PrecisionGraph,
    nodes: list[fx.Node],
    by: str,
    settings: str,
    near: OperatorInfo | None,
    instead_of: list[fx.Node],
) -> None:
    """Write a note with an id to each operator among nodes that a pass inserted.

    `by`, the name of the pass, is part of new ids, so that ids of the model do not depend on it.
    `near` is the operator that the nodes replace or follow, if any. A new operator of the same name
    as one in `instead_of` inherits its id and decision and removes the entry.
    """
    notes = node_metadata.NOTE
    for node in nodes:
        if not _is_operator(graph, node):
            continue
        row = row_for(node.target)
        name = _operator_name(node, row)
        old = next((entry for entry in instead_of if notes[entry].id.operator == name), None)
        if old is not None:
            instead_of.remove(old)
            _note(node, dataclasses.replace(notes[old], row=row, by=by, change=settings))
            continue
        near_id, region = OpId("", name), None
        if near is not None:
            near_id, region = near.id, near.autocast
        if isinstance(region, Precision):
            region = format_of(graph.value(node)) or region
        op_id, kind = graph.top_level.numbers.put_in(near_id, f"{by}.{name}"), Kind.FIXED
        if row is not None:
            kind = row.kind
        _note(node, OperatorInfo(op_id, kind, "", row, autocast=region, by=by, change=settings))


def _note(node: fx.Node, note: OperatorInfo) -> None:
    node_metadata.NOTE[node] = note
    node_metadata.charge(node, note.id)


def _is_operator(graph: PrecisionGraph, node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method") or is_switch(node):
        return False
    unpacks = getattr(node.target, "__name__", "") == "getitem"
    if unpacks or node in node_metadata.CAST:
        return False
    # An operator computes floating-point values, or other values from them.
    made = [t for value in (node, *writes(node)) for t in tensors(graph.value(value))]
    read = (t for used in node.all_input_nodes for t in tensors(graph.value(used)))
    return any(is_float(t) for t in made) or (bool(made) and any(is_float(t) for t in read))


def _module_path(node: fx.Node, current: SourcePlace) -> str:
    """Return the state_dict path of a node's innermost module; "" outside of any module."""
    stack: dict[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return current.path
    address, (path, _) = list(stack.items())[-1]
    # A repeated call of a module has the key "address@1".
    available = current.path_of(address.partition("@")[0])
    return joined(current.path, clean_path(path)) if available is None else available


def name_inputs(graph: fx.Graph, current: SourcePlace) -> None:
    """Record the paths of parameters and buffers in the model, and rename inputs accordingly."""
    for node in graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        if node.op != "placeholder" or source is None:
            continue
        text = source.name() if callable(source.name) else source.name
        path = clean_path(text)
        node_metadata.PATH[node] = path and joined(_holder(text, current), path)
        name = re.sub(r"\W+", "_", path or text.partition("[")[2]).strip("_")
        if name and not name[0].isdigit():
            node._rename(name)


def _holder(text: str, current: SourcePlace) -> str:
    """Return the path of the module at the start of Dynamo's name of an input, or ""."""
    tx, result = translator(), _VARIABLE.match(text)
    if tx is None or result is None:
        return ""
    variables = {"L": tx.f_locals, "G": tx.f_globals}[result[1]]
    module = variables.get(result[2])
    if not isinstance(module, nn.Module):
        return ""
    return current.path_of(str(id(unwrapped(module)))) or ""


def _operator_name(node: fx.Node, row: OperatorRow | None) -> str:
    if row is not None:
        return row.name
    if isinstance(node.target, OpOverload):
        return node.target._schema.name.partition("::")[2]
    return re.sub(r"\W", "_", getattr(node.target, "__name__", str(node.target)))
