"""Integration of the changes that a user's pass makes to a graph.

The runner compares snapshots before and after the pass. Structural damage raises an error that
names the pass. A new call of a torch function, method or module is traced to ATen operators. Each
new operator gets an id, a kind, a reason and a source line, as if it had been there when the
earlier passes ran; decisions that are final by then (the plan, inserted casts) appear in its
reason.

Invariant: afterwards all passes and verifier rules can read the graph. A pass that only calls
`Operator.assign` cannot break a rule; a later violation is a bug of qsync_fx.
"""

from __future__ import annotations

import dataclasses
import operator as py_operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils import _pytree as pytree

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
from qsync_fx.passes.rewriting.apply_rewrite import OF_THE_MODEL, adopted, inlined
from qsync_fx.passes.rewriting.pattern import TracedPattern, Untraceable, trace_call
from qsync_fx.passes.tracing.operator_ids import identify_new, mark
from qsync_fx.passes.tracing.retrace import modes, restored
from qsync_fx.plan.operator_id import Numbering, OpId


@dataclass(frozen=True)
class GraphSnapshot:
    """Snapshot of a graph and of the bodies of its higher-order operators.

    Attributes:
        nodes: every node in order, with its target, args, kwargs and the id of its value.
        values: the values of the nodes.
        notes: the `OperatorInfo` of each operator.
    """

    nodes: dict[fx.Node, tuple[Any, ...]]
    values: tuple[Any, ...]
    notes: dict[fx.Node, OperatorInfo]

    def holds(self, value: Any) -> bool:
        """Return whether a value belonged to a node of the snapshot."""
        return any(entry is value for entry in self.values)


def look(graph: PrecisionGraph) -> GraphSnapshot:
    nodes = [node for part in graph.walk() for node in part.nodes]
    return GraphSnapshot(
        {node: (node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in nodes},
        tuple(node.meta.get("val") for node in nodes),
        {node: node_metadata.NOTE[node] for node in nodes if node in node_metadata.NOTE},
    )


def replaced(before: GraphSnapshot, graph: PrecisionGraph) -> dict[fx.Node, fx.Node]:
    """Return the removed node that each new node replaces, found by its argument positions."""
    alive = set(graph.nodes)
    removed, result = before.nodes.keys() - alive, dict[fx.Node, fx.Node]()
    todo = [(node, node) for node in graph.nodes if node in before.nodes]
    for was, now in todo:
        olds = pytree.tree_leaves(before.nodes[was][1:3])
        news = pytree.tree_leaves((now.args, now.kwargs))
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
    return all(_decided(note, after.notes[node]) for node, note in before.notes.items())


def _decided(before: OperatorInfo, after: OperatorInfo) -> bool:
    decision = {name: getattr(before, name) for name in ("planned", "precision", "reason")}
    undone = dataclasses.replace(after, pinned=before.pinned, **decision)
    return after == before or (after.pinned and undone == before)


def spell(graph: PrecisionGraph, node: fx.Node) -> None:
    """Replace a new node by the operators that it calls; raise `PassError` if untraceable."""
    if node.op not in ("call_function", "call_method", "call_module") or is_switch(node):
        return
    if isinstance(node.target, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        return
    for used in node.all_input_nodes:
        if "val" not in used.meta and used.op in ("call_function", "get_attr"):
            evaluate(graph, used)
    values = [graph.value(used) for used in node.all_input_nodes]
    if node.op == "call_function" and not any(isinstance(value, torch.Tensor) for value in values):
        return  # unpacks a result, or computes a size
    inputs = {"args": node.args, "kwargs": node.kwargs}
    traced, several = _traced(graph, node, inputs)
    leaves = (leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, fx.Node))
    symbolic = (torch.Tensor, torch.SymInt, torch.SymFloat)
    read = [leaf for leaf in leaves if isinstance(graph.value(leaf), symbolic)]
    origin = {key: node.meta[key] for key in OF_THE_MODEL if key in node.meta}
    with graph.graph.inserting_before(node):
        local = inlined(graph, traced, read, origin)
    _replace(graph, node, tuple(local[output] for output in traced.outputs), several)


def _traced(
    graph: PrecisionGraph, node: fx.Node, value: dict[str, Any]
) -> tuple[TracedPattern, bool]:
    called, several = _called(graph, node), False

    def run(args: Any, kwargs: Any) -> Any:
        nonlocal several
        returned = called(*args, **kwargs)
        several = isinstance(returned, (tuple, list))
        return returned

    assert graph.context.fake_mode is not None
    in_force = modes(graph)[node]
    with restored(), graph.context.fake_mode:
        in_force.apply()
        try:
            return trace_call(run, fx.node.map_arg(value, graph.value), recorded=True), several
        except Untraceable as error:
            message = f"{target_name(node)} cannot be traced: {error}"
            do = "call torch operators, or functions and modules that compute only with tensors"
            raise PassError(message, where=f"node %{node.name}", do=do) from error.__cause__


def _called(graph: PrecisionGraph, node: fx.Node) -> Any:
    if node.op == "call_module":
        return _attribute(graph, node)
    if node.op == "call_method":
        return lambda first, *args, **kwargs: getattr(first, str(node.target))(*args, **kwargs)
    return node.target


def _attribute(graph: PrecisionGraph, node: fx.Node) -> Any:
    try:
        return py_operator.attrgetter(str(node.target))(graph.module)
    except AttributeError as error:
        raise PassError(
            f"the graph's module has no attribute {str(node.target)!r}",
            where=f"node %{node.name}",
            do="add it first: graph.module.register_parameter(name, parameter), register_buffer "
            "or add_submodule",
        ) from error


def _replace(
    graph: PrecisionGraph, node: fx.Node, outputs: tuple[fx.Node, ...], several: bool
) -> None:
    results: Any = outputs if several else outputs[0]
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
    if "val" in node.meta and not (before is not None and before.holds(node.meta["val"])):
        return
    if node.op == "get_attr":
        live = _attribute(graph, node)
        if isinstance(live, torch.Tensor):
            adopted(graph, node, live)
    elif node.op == "call_function" and not is_switch(node):
        graph.propagate(node)


def take_in(graph: PrecisionGraph, before: GraphSnapshot, by: str, passed: Sequence[str]) -> None:
    """Integrate the nodes that the pass `by` inserted, after the passes named in `passed`.

    Raises:
        PassError: an operator does not accept its arguments, or a call cannot be traced.
    """
    parts = list(graph.walk())
    if Normalize.name not in passed:
        for part in parts:
            for node in _new(part, before):
                mark(node, by)
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
        origin = copied_from.get(id(node_metadata.NOTE.get(node)))
        del node_metadata.NOTE[node]
        old = origin if origin in free else _place_of(node, instead, before)
        near, note = old if old in before.notes else _neighbour(graph, node), None
        if near is not None:
            note = node_metadata.NOTE[near]
            for key in near.meta.keys() & OF_THE_MODEL:
                node.meta.setdefault(key, near.meta[key])
        instead_of = [] if old is None else free.get(old, [])
        identify_new(graph, [node], by, "inserted", note, instead_of)


def _place_of(
    node: fx.Node, instead: dict[fx.Node, fx.Node], before: GraphSnapshot
) -> fx.Node | None:
    """Return the removed node that a new node, or a new node computed from it, replaces."""
    todo = [node]
    for index in todo:
        if index in instead:
            return instead[index]
        todo += [user for user in index.users if user not in before.nodes and user not in todo]
    return None


def _neighbour(graph: PrecisionGraph, node: fx.Node) -> fx.Node | None:
    """Return the operator whose module and source line a new node inherits.

    It is an operator of the module that the pass sets, else the nearest operator that the node
    reads, else the nearest one that reads the node.
    """
    if stack := node.meta.get("nn_module_stack"):
        for operator in graph.own_operators():
            other = operator.node.meta.get("nn_module_stack")
            if other and list(other)[-1] == list(stack)[-1]:
                return operator.node
    nearest_read = _nearest(node, lambda other: other.all_input_nodes)
    return nearest_read or _nearest(node, lambda other: other.users)


def _nearest(node: fx.Node, neighbours: Callable[[fx.Node], Iterable[fx.Node]]) -> fx.Node | None:
    todo = [node]
    for index in todo:
        if index is not node and index in node_metadata.NOTE:
            return index
        todo += [other for other in neighbours(index) if other not in todo]
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


_ATTRIBUTES: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "module": (fx.GraphModule,),
        "inputs": (list,),
        "outputs": (list,),
        "context": (Context,),
        "unknown": (dict,),
        "written": (PrecisionGraph, type(None)),
        "numbers": (Numbering,),
        "rewritten": (dict,),
    }
)
"""Expected types of a `PrecisionGraph`'s attributes."""

_KEYS: Mapping[str, type] = MappingProxyType(
    {
        node_metadata.NOTE.name: OperatorInfo,
        node_metadata.CAST.name: node_metadata.CastInfo,
        node_metadata.BODIES.name: tuple,
        "custom": dict,
    }
)
"""Expected types of metadata that later passes read; "custom" is torch's key."""

_FIELDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "id": (OpId,),
        "kind": (Kind,),
        "reason": (str,),
        "precision": (Precision, type(None)),
        "output": (Precision, type(None)),
    }
)
"""Expected types of an operator's decisions."""

_REPAIRS: Mapping[str, str] = MappingProxyType(
    {"module": "change graph.module in place, or set another torch.fx.GraphModule"}
)
_LEAVE = "leave the metadata of nodes in place; Operator.assign changes precisions"
_OPERATIONS = ("placeholder", "get_attr", "call_function", "call_method", "call_module", "output")


class Damage(NamedTuple):
    """Damage to a graph.

    Attributes:
        node: the damaged node; None for damage to the graph as such.
        problem: a sentence without a full stop.
        repair: advice for the author of the pass.
    """

    node: fx.Node | None
    problem: str
    repair: str


def refuse_damage(graph: PrecisionGraph, before: GraphSnapshot, by: str) -> None:
    """Raise `PassError` if the pass `by` has corrupted the structure of a graph or its bodies."""
    for damage in _damage(graph, before):
        _refuse(damage, by)


def refuse_calls(graph: PrecisionGraph, before: GraphSnapshot, by: str) -> None:
    """Raise `PassError` if an operator that the pass `by` has changed refuses its arguments."""
    for part in graph.walk():
        for node in part.nodes:
            call = (node.target, node.args, node.kwargs)
            if node not in before.nodes or before.nodes[node][:3] == call:
                continue
            if isinstance(node.target, torch._ops.OpOverload) and "val" in node.meta:
                try:
                    part.computed(node)
                except PassError as error:
                    repair = error.do or "set the arguments of its schema"
                    _refuse(Damage(node, error.what, repair), by)


def _refuse(damage: Damage, by: str) -> None:
    where = f"pass {by!r}"
    if damage.node is not None:
        where += f", node %{damage.node.name}"
    message = f"pass {by!r} has corrupted the graph: {damage.problem}"
    raise PassError(message, where=where, do=damage.repair)


def _damage(graph: PrecisionGraph, before: GraphSnapshot) -> Iterator[Damage]:
    yield from _damage_to_attributes(graph)
    for node in graph.nodes:
        yield from _damage_to_node(node, before)
    yield from _damage_to_output(graph.nodes)
    for node in graph.nodes:
        for body in node_metadata.bodies(node):
            yield from _damage(body, before)


def _damage_to_attributes(graph: PrecisionGraph) -> Iterator[Damage]:
    for name, types in _ATTRIBUTES.items():
        value = getattr(graph, name, None)
        if not isinstance(value, types):
            problem = f"graph.{name} is {type(value).__name__}, not {types[0].__name__}"
            yield Damage(None, problem, _REPAIRS.get(name, f"do not set graph.{name}"))
    fx_graph = getattr(graph.module, "graph", None)
    if not isinstance(fx_graph, fx.Graph):
        problem = f"graph.module.graph is {type(fx_graph).__name__}, not Graph"
        yield Damage(None, problem, "set a torch.fx.Graph")


def _damage_to_node(node: fx.Node, before: GraphSnapshot) -> Iterator[Damage]:
    facts = getattr(node, "meta", None)
    if not isinstance(facts, dict):
        yield Damage(node, f"its meta is {type(facts).__name__}, not dict", _LEAVE)
        return
    for key, expected in _KEYS.items():
        if key in facts and not isinstance(facts[key], expected):
            problem = f"its meta[{key!r}] is {type(facts[key]).__name__}, not {expected.__name__}"
            yield Damage(node, problem, _LEAVE)
    if (note := node_metadata.NOTE.get(node)) is not None:
        for field, types in _FIELDS.items():
            value = getattr(note, field)
            if not isinstance(value, types):
                problem = f"the {field} of {note.id} is {value!r}, not a {types[0].__name__}"
                yield Damage(node, problem, _LEAVE)
    lost = node in before.notes and node not in node_metadata.NOTE
    if lost and node.target == before.nodes[node][0]:
        yield Damage(node, f"the metadata of {before.notes[node].id} is gone", _LEAVE)
    target, name = node.target, type(node.target).__name__
    if node.op not in _OPERATIONS:
        repair = f"use one of: {', '.join(_OPERATIONS)}"
        yield Damage(node, f"{node.op!r} is not an operation of torch.fx", repair)
    elif node.op == "call_function" and not callable(target):
        yield Damage(node, f"its target is {name}, not a function", "set a function of torch")
    elif node.op != "call_function" and not isinstance(target, str):
        yield Damage(node, f"the target of {node.op} is {name}, not str", "set a name")


def _damage_to_output(nodes: list[fx.Node]) -> Iterator[Damage]:
    outputs = [node for node in nodes if node.op == "output"]
    keep = "keep the output node, and set its args to return other values"
    if not outputs:
        yield Damage(None, "it has no output node", keep)
    elif len(outputs) > 1:
        yield Damage(outputs[1], f"it has {len(outputs)} output nodes", keep)
    elif nodes[-1] is not outputs[0]:
        yield Damage(nodes[-1], "it follows the output node", "insert it before the output node")
    elif len(outputs[0].args) != 1:
        problem = f"the output node has {len(outputs[0].args)} arguments, not 1"
        yield Damage(outputs[0], problem, "set its args to (values,)")
