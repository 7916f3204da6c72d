"""Integration of the changes that a user's pass makes to a graph.

Invariant: afterwards all passes and verifier rules can read the graph, as if new operators had been
there when the earlier passes ran. Structural damage raises an error that names the pass.
"""

from __future__ import annotations

import dataclasses
import operator as py_operator
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx

from qsync_fx.errors import PassError
from qsync_fx.formats import Precision
from qsync_fx.graph import node_metadata
from qsync_fx.graph.fx_utils import format_of, is_switch, target_name
from qsync_fx.graph.graph import Context, Operator, PrecisionGraph, copied
from qsync_fx.graph.node_metadata import OperatorInfo
from qsync_fx.ops.spec import Kind
from qsync_fx.passes.annotate_cost import AnnotateCost
from qsync_fx.passes.assign import Assign
from qsync_fx.passes.cascade import Cascade
from qsync_fx.passes.classify import Classify, classify
from qsync_fx.passes.insert_casts import InsertCasts
from qsync_fx.passes.lower import Lower
from qsync_fx.passes.normalize import Normalize
from qsync_fx.passes.rewrite_pass import OF_THE_MODEL, adopted, inlined
from qsync_fx.passes.rewrite_pattern import Untraceable, trace_call
from qsync_fx.passes.tracing.operator_ids import identify_new
from qsync_fx.passes.tracing.retrace import modes, tracing
from qsync_fx.plan.operator_id import Numbering
from qsync_fx.torch_internals import HigherOrderOperator, OpOverload, tree_leaves


@dataclass(frozen=True)
class GraphSnapshot:
    """Snapshot of a graph and of the bodies of its higher-order operators."""

    nodes: dict[fx.Node, tuple[Any, ...]]
    values: dict[int, Any]
    notes: dict[fx.Node, OperatorInfo]

    @classmethod
    def of(cls, graph: PrecisionGraph) -> GraphSnapshot:
        nodes = [node for part in graph.walk() for node in part.nodes]
        values = {node: node.meta.get("val") for node in nodes}
        return cls(
            {node: (node.target, node.args, node.kwargs, id(values[node])) for node in nodes},
            {id(value): value for value in values.values()},
            {node: node_metadata.NOTE[node] for node in nodes if node in node_metadata.NOTE},
        )


def replaced(before: GraphSnapshot, graph: PrecisionGraph) -> dict[fx.Node, fx.Node]:
    """Return the removed node that each new node replaces, found by its argument positions."""
    alive = set(graph.nodes)
    removed, result = before.nodes.keys() - alive, dict[fx.Node, fx.Node]()
    todo = [(node, node) for node in graph.nodes if node in before.nodes]
    for was, now in todo:
        olds = tree_leaves(before.nodes[was][1:3])
        news = tree_leaves((now.args, now.kwargs))
        if len(olds) != len(news):
            continue
        for old, new in zip(olds, news, strict=True):
            if not isinstance(old, fx.Node) or not isinstance(new, fx.Node):
                continue
            if old in removed and new not in before.nodes and new not in result:
                result[new] = old
                todo.append((old, new))
    return result


def only_decided(before: GraphSnapshot, after: GraphSnapshot) -> bool:
    """Return whether `Operator.assign` explains all differences between two snapshots."""
    if list(before.nodes.items()) != list(after.nodes.items()):
        return False
    if before.notes.keys() != after.notes.keys():
        return False
    for node, old in before.notes.items():
        new = after.notes[node]
        undone = dataclasses.replace(
            new, pinned=old.pinned, planned=old.planned, precision=old.precision, reason=old.reason
        )
        if new != old and not (new.pinned and undone == old):
            return False
    return True


def spell(graph: PrecisionGraph, node: fx.Node) -> None:
    """Replace a new node by the operators that it calls; raise `PassError` if untraceable."""
    if node.op not in ("call_function", "call_method", "call_module") or is_switch(node):
        return
    if isinstance(node.target, (OpOverload, HigherOrderOperator)):
        return
    for used in node.all_input_nodes:
        if "val" not in used.meta and used.op in ("call_function", "get_attr"):
            evaluate(graph, used)
    values = [graph.value(used) for used in node.all_input_nodes]
    if node.op == "call_function" and not any(isinstance(value, torch.Tensor) for value in values):
        return  # unpacks a result, or computes a size
    inputs = {"args": node.args, "kwargs": node.kwargs}
    called: Any = _attribute(graph, node) if node.op == "call_module" else node.target

    def call(args: Any, kwargs: Any) -> Any:
        if node.op == "call_method":
            return getattr(args[0], str(node.target))(*args[1:], **kwargs)
        return called(*args, **kwargs)

    try:
        with tracing(graph, modes(graph)[node]):
            traced = trace_call(call, fx.node.map_arg(inputs, graph.value), recorded=True)
    except Untraceable as error:
        message = f"{target_name(node)} cannot be traced: {error}"
        do = "call torch operators, or functions and modules that compute only with tensors"
        raise PassError(message, where=f"node %{node.name}", do=do) from error.__cause__
    leaves = (leaf for leaf in tree_leaves(inputs) if isinstance(leaf, fx.Node))
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat)
    read = [leaf for leaf in leaves if isinstance(graph.value(leaf), symbolic)]
    origin = {key: node.meta[key] for key in OF_THE_MODEL if key in node.meta}
    with graph.graph.inserting_before(node):
        local = inlined(graph, traced, read, origin)
    _replace(graph, node, [local[output] for output in traced.outputs], traced.several)


def _attribute(graph: PrecisionGraph, node: fx.Node) -> Any:
    try:
        return py_operator.attrgetter(str(node.target))(graph.module)
    except AttributeError as error:
        message = f"the graph's module has no attribute {str(node.target)!r}"
        do = "add it first: graph.module.register_parameter(name, parameter), register_buffer "
        do += "or add_submodule"
        raise PassError(message, where=f"node %{node.name}", do=do) from error


def _replace(graph: PrecisionGraph, node: fx.Node, outputs: list[fx.Node], several: bool) -> None:
    results: Any = tuple(outputs) if several else outputs[0]
    for user in list(node.users):
        if several and user.target is py_operator.getitem and isinstance(user.args[1], int):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.graph.erase_node(user)
        else:
            user.args, user.kwargs = fx.node.map_arg(
                (user.args, user.kwargs), lambda used: results if used is node else used
            )
    graph.graph.erase_node(node)
    if node.op == "call_module" and not any(other.target == node.target for other in graph.nodes):
        # The graph owns the module's tensors now. AOTAutograd accepts each tensor only once.
        graph.module.delete_submodule(str(node.target))


def evaluate(graph: PrecisionGraph, node: fx.Node, before: GraphSnapshot | None = None) -> None:
    """Set the value of a new node; raise `PassError` if its arguments or tensor are invalid."""
    old = {} if before is None else before.values
    if "val" in node.meta and id(node.meta["val"]) not in old:
        return
    if node.op == "get_attr":
        live = _attribute(graph, node)
        if isinstance(live, torch.Tensor):
            adopted(graph, node, live)
    elif node.op == "call_function" and not is_switch(node):
        graph.propagate(node)


def take_in(graph: PrecisionGraph, before: GraphSnapshot, by: str, passed: Sequence[str]) -> None:
    """Integrate the nodes that the pass `by` inserted; raise `PassError` on untraceable ones."""
    parts = list(graph.walk())
    if Normalize.name not in passed:
        for part in parts:
            for node in _new(part, before):
                node_metadata.mark_as_put_in(node, by)  # retracing preserves the mark
        return
    for part in parts:
        try:
            for node in _new(part, before):
                spell(part, node)
            for node in _new(part, before):
                evaluate(part, node, before)
        except PassError as error:
            error.where = f"pass {by!r}, {error.where}"
            raise
        part.module.recompile()
    alive = {node for part in parts for node in part.nodes}
    free = {old: [old] for old in before.notes if old not in alive}
    for part in parts:
        _identify(part, before, free, by)
    operators = [operator for operator in graph.operators() if operator.node not in before.notes]
    for operator in operators:
        _decide(operator, passed)
    if Lower.name in passed:
        for part in parts:
            node_metadata.charge_all(part.graph)
    if not operators:
        return
    if Classify.name in passed and InsertCasts.name not in passed:
        graph.written = copied(graph)
        graph.__dict__.pop("costing", None)
        if Cascade.name in passed:
            Cascade()(graph)
    if AnnotateCost.name in passed:
        AnnotateCost()(graph)


def _new(graph: PrecisionGraph, before: GraphSnapshot) -> list[fx.Node]:
    return [node for node in graph.nodes if node not in before.nodes]


def _identify(
    graph: PrecisionGraph, before: GraphSnapshot, free: dict[fx.Node, list[fx.Node]], by: str
) -> None:
    copied_from = {id(note): node for node, note in before.notes.items()}
    instead = replaced(before, graph)
    for node in _new(graph, before):
        if node in node_metadata.NOTE and id(node_metadata.NOTE[node]) not in copied_from:
            continue  # a rewrite has identified it
        old = copied_from.get(id(node_metadata.NOTE.get(node)))
        del node_metadata.NOTE[node]
        if old not in free:  # it may replace a node, or compute a part of such a replacement
            heir = _nearest(node, lambda n: [u for u in n.users if u not in before.nodes], instead)
            old = heir and instead[heir]
        near, note = old if old in before.notes else _neighbour(graph, node), None
        if near is not None:
            note = node_metadata.NOTE[near]
            for key in near.meta.keys() & OF_THE_MODEL:
                node.meta.setdefault(key, near.meta[key])
        instead_of = [] if old is None else free.get(old, [])
        identify_new(graph, [node], by, "inserted", note, instead_of)


def _neighbour(graph: PrecisionGraph, node: fx.Node) -> fx.Node | None:
    """Return the operator whose module and line a new node inherits."""
    if stack := node.meta.get("nn_module_stack"):
        for operator in graph.own_operators():
            other = operator.node.meta.get("nn_module_stack")
            if other and list(other)[-1] == list(stack)[-1]:
                return operator.node
    nearest_read = _nearest(node, lambda other: other.all_input_nodes, node_metadata.NOTE)
    return nearest_read or _nearest(node, lambda other: other.users, node_metadata.NOTE)


def _nearest(
    node: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]], wanted: Container[fx.Node]
) -> fx.Node | None:
    """Return the first node of a breadth-first search that is in `wanted`."""
    todo = [node]
    for item in todo:
        if item in wanted:
            return item
        todo += [other for other in neighbours(item) if other not in todo]
    return None


def _decide(operator: Operator, passed: Sequence[str]) -> None:
    """Apply the decisions of the passes that have already run to a new operator."""
    note, owned = operator.note, format_of(operator.graph.value(operator.node))
    replaces = note.precision is not None
    if InsertCasts.name in passed:
        formats = {"precision": owned, "output": owned}
        why = f"it was inserted after {InsertCasts.name!r} had fixed all formats"
        if owned is not None:
            why += f", so it computes in the format of its inputs, {owned}"
        keeps = owned is note.output
        if Lower.name in passed and note.precision is not None and not note.precision.plain:
            keeps = str(note.precision) in operator.node.args
        if not replaces:
            operator.update(kind=Kind.FIXED, autocast=None, reason=why, **formats)
        elif not keeps:
            why = f"{note.precision} is replaced: {why}"
            operator.update(instead=why, reason=f"{note.reason}; {why}", **formats)
    elif Classify.name in passed and not replaces:
        classify(operator)
        if Assign.name in passed and operator.kind is Kind.ADJUSTABLE:
            why = (
                f"it was put in after {Assign.name!r} had applied the plan, so it stays in "
                f"{owned}: let the pass run before for the plan to decide"
            )
            operator.update(kind=Kind.FIXED, autocast=None, reason=why)


_ATTRIBUTES: Final = {
    "module": fx.GraphModule,
    "inputs": list,
    "outputs": list,
    "context": Context,
    "numbers": Numbering,
}
_METADATA: Final = {
    node_metadata.NOTE.name: OperatorInfo,
    node_metadata.CAST.name: node_metadata.CastInfo,
    node_metadata.BODIES.name: tuple,
    "custom": dict,  # torch's key
}
_DECISIONS: Final = {
    "kind": Kind,
    "reason": str,
    "precision": Precision | None,
    "output": Precision | None,
}
_OPERATIONS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")


def refuse_damage(graph: PrecisionGraph, before: GraphSnapshot, by: str) -> None:
    """Raise `PassError` if the pass `by` has corrupted the structure of a graph or its bodies."""
    for name, expected in _ATTRIBUTES.items():
        value = getattr(graph, name, None)
        if not isinstance(value, expected):
            do = "change graph.module in place, or set another torch.fx.GraphModule"
            problem = f"graph.{name} is {type(value).__name__}, not {expected.__name__}"
            raise _corrupted(by, problem, do)
    for node in graph.nodes:
        if problem := _damage(node, before):
            do = "leave the metadata of nodes in place; Operator.assign changes precisions"
            raise _corrupted(by, problem, do, node)
    operations = [node.op for node in graph.nodes]
    if operations.count("output") != 1 or operations[-1] != "output" or not graph.nodes[-1].args:
        do = "keep the output node, and set its args to (values,) to return other values"
        raise _corrupted(by, "it does not end with its only output node", do)
    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            refuse_damage(body, before, by)


def _damage(node: fx.Node, before: GraphSnapshot) -> str:
    """Return the damage to a node and its metadata, or ""."""
    meta = getattr(node, "meta", None)
    if not isinstance(meta, dict):
        return f"its meta is {type(meta).__name__}, not dict"
    for key, expected in _METADATA.items():
        if not isinstance(meta.get(key), expected | None):
            return f"its meta[{key!r}] is {type(meta[key]).__name__}, not {expected.__name__}"
    note = node_metadata.NOTE.get(node)
    if note is None and node in before.notes and node.target == before.nodes[node][0]:
        return f"the metadata of {before.notes[node].id} is gone"
    for name, types in _DECISIONS.items():
        if note is not None and not isinstance(value := getattr(note, name), types):
            return f"the {name} of {note.id} cannot be {value!r}"
    if node.op not in _OPERATIONS or callable(node.target) != (node.op == "call_function"):
        return f"{node.op} of {node.target!r} is not an operation of torch.fx"
    return ""


def refuse_calls(graph: PrecisionGraph, before: GraphSnapshot, by: str) -> None:
    """Raise `PassError` if an operator that the pass `by` has changed refuses its arguments."""
    for part in graph.walk():
        for node in part.nodes:
            call = (node.target, node.args, node.kwargs)
            if node not in before.nodes or before.nodes[node][:3] == call:
                continue
            if isinstance(node.target, OpOverload) and "val" in node.meta:
                try:
                    part.computed(node)
                except PassError as error:
                    raise _corrupted(by, error.what, error.do, node) from error


def _corrupted(by: str, problem: str, do: str | None, node: fx.Node | None = None) -> PassError:
    where = f"pass {by!r}"
    if node is not None:
        where += f", node %{node.name}"
    return PassError(f"pass {by!r} has corrupted the graph: {problem}", where=where, do=do)
