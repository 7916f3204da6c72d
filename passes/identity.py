"""Gives every operator its identity.

Invariant: an `OpId` depends on the model's source alone. Module paths come from `nn_module_stack`, which names the user's modules
whatever Dynamo, DDP's graph splits or a rank call their nodes; occurrences are counted on through all graphs of one frame, so that an
operator has one id whether DDP or a graph break splits the graph or not.
"""

from __future__ import annotations

import re
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch._guards import TracingContext

from qsync_fx.graph import PrecisionGraph
from qsync_fx.modes import is_switch
from qsync_fx.module_tree import joined
from qsync_fx.notes import Note
from qsync_fx.opid import OpId
from qsync_fx.ops import Kind, OperatorRow, row_for
from qsync_fx.passes.frames import Place, clean_path, place, translator
from qsync_fx.values import is_float, tensors
from qsync_fx.writes import writes


@dataclass
class Numbering:
    """How many operators of each name each module has shown so far, and which module came last."""

    seen: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    last: str = ""

    def number(self, module: str, operator: str) -> OpId:
        after = "" if module else self.last
        if module:
            self.last = module
        key = (module, operator, after)
        self.seen[key] += 1
        return OpId(module, operator, self.seen[key] - 1, after)

    def put_in(self, near: OpId, operator: str) -> OpId:
        """Returns the id of an operator that a pass puts in where `near` is; those of the model keep their numbers."""
        key = (near.module, operator, near.after)
        self.seen[key] += 1
        return OpId(near.module, operator, self.seen[key] - 1, near.after)

    def copy(self) -> Numbering:
        return Numbering(Counter(self.seen), self.last)


_numberings: weakref.WeakKeyDictionary[TracingContext, Numbering] = weakref.WeakKeyDictionary()
_at_breaks: weakref.WeakKeyDictionary[nn.Module, dict[tuple[str, int], Numbering]] = weakref.WeakKeyDictionary()


def numbering(here: Place) -> Numbering:
    """Returns the numbering of the compilation under way, which goes on where an earlier graph of the same frame ended.

    DDP's buckets are compiled one by one, in one tracing context. What follows a graph break is another frame: it finds the numbering by
    its line.
    """
    context = TracingContext.try_get()
    if context is None:
        return Numbering()
    if context not in _numberings:
        ended = _at_breaks.get(here.root, {}) if here.root is not None else {}
        line = here.resumes_at
        before = ended.get((here.code.co_filename, line)) if here.code is not None and line is not None else None
        _numberings[context] = before.copy() if before is not None else Numbering()
    return _numberings[context]


def numbering_now() -> Callable[[], None]:
    """Returns what puts the numbering of the compilation under way back to where it is now: for a graph that is begun once more."""
    context = TracingContext.try_get()
    before = _numberings[context].copy() if context is not None and context in _numberings else None

    def put_back() -> None:
        if context is None:
            return
        if before is None:
            _numberings.pop(context, None)
        else:
            _numberings[context] = before

    return put_back


def remember_break(here: Place, numbers: Numbering) -> None:
    """Keeps the numbering for what follows the graph break, if it is one that ends the graph."""
    tx = translator()
    reason = tx.output.compile_subgraph_reason if tx is not None else None
    if reason is not None and reason.graph_break and here.root is not None:
        for frame in reason.user_stack:
            _at_breaks.setdefault(here.root, {})[frame.filename, frame.lineno or 0] = numbers.copy()


def identify(graph: PrecisionGraph, numbers: Numbering, here: Place) -> None:
    """Writes a note with an id to every node that computes with floating-point values."""
    for node in graph.nodes:
        for body in node.meta.get("qsync_bodies", ()):
            identify(body, numbers, here)
        if node.op != "call_function" and node.op != "call_method":
            continue
        if getattr(node.target, "__name__", "") == "getitem" or not _computes(graph, node):
            continue
        name, row = _named(node)
        _note(node, Note(numbers.number(module_path(node, here), name), row.kind if row else Kind.FIXED, "", row))


def identify_new(graph: PrecisionGraph, nodes: list[fx.Node], by: str, near: OpId, instead_of: list[OpId]) -> None:
    """Writes a note with an id to each of the nodes that a rewrite has put in.

    Args:
        graph: where they are.
        nodes: the new nodes.
        by: the name of the rewrite. It is part of new ids, so that whether and where it finds something changes no id of the model's.
        near: the operator whose place the nodes take.
        instead_of: the ids of all that the nodes replace. An operator of the same name takes one over.
    """
    numbers, free = numbering(place(graph.context.options)), list(instead_of)
    for node in nodes:
        if getattr(node.target, "__name__", "") == "getitem" or is_switch(node) or not _computes(graph, node):
            continue
        name, row = _named(node)
        op_id = next((known for known in free if known.operator == name), None)
        if op_id is None:
            op_id = numbers.put_in(near, f"{by}.{name}")
        else:
            free.remove(op_id)
        _note(node, Note(op_id, row.kind if row else Kind.FIXED, "", row, by=by))


def _named(node: fx.Node) -> tuple[str, OperatorRow | None]:
    row = row_for(node.target)
    return (row.name if row else _operator_name(node)), row


def _note(node: fx.Node, note: Note) -> None:
    node.meta["qsync"] = note
    node.meta["custom"] = {**node.meta.get("custom", {}), "qsync": str(note.id)}


def _computes(graph: PrecisionGraph, node: fx.Node) -> bool:
    """Whether a node returns or writes floating-point values, or makes others of them: a spectrum, positions, truth values."""
    made = [t for value in (node, *writes(node)) for t in tensors(graph.value(value))]
    read = (t for used in node.all_input_nodes for t in tensors(graph.value(used)))
    return any(is_float(t) for t in made) or (bool(made) and any(is_float(t) for t in read))


def module_path(node: fx.Node, here: Place) -> str:
    """Returns the path of the innermost module that a node belongs to, as state_dict spells it; "" outside any."""
    stack: dict[str, tuple[str, Any]] | None = node.meta.get("nn_module_stack")
    if not stack:
        return here.path
    address, (path, _) = list(stack.items())[-1]
    # A module that is called again is "address@1".
    known = here.path_of(address.partition("@")[0])
    return known if known is not None else joined(here.path, clean_path(path))


def name_inputs(graph: fx.Graph) -> None:
    """Notes the paths that parameters and buffers have in the model, and names inputs after them.

    `layer1_conv_weight` rather than `l_self_modules_layer1_modules_conv_parameters_weight_`.
    """
    for node in graph.nodes:
        source = getattr(node, "_dynamo_source", None)
        if node.op != "placeholder" or source is None:
            continue
        text = source.name() if callable(source.name) else source.name
        path = clean_path(text)
        node.meta["qsync_input"] = path
        name = re.sub(r"\W+", "_", path or text.partition("[")[2]).strip("_")
        if name and not name[0].isdigit():
            node._rename(name)


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.partition("::")[2]
    return re.sub(r"\W", "_", getattr(node.target, "__name__", str(node.target)))
