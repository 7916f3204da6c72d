"""Damage that a user's pass can do to the structure of a graph, checked directly after the pass.

Invariant: a graph without damage can be read by every pass and by every rule of the verifier.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import fx

from qsync_fx.errors import PassError
from qsync_fx.graph import Context, PrecisionGraph, meta
from qsync_fx.graph.notes import Note
from qsync_fx.ops import Kind
from qsync_fx.passes.custom.watch import Seen
from qsync_fx.plan.opid import Numbering, OpId
from qsync_fx.precision import Precision

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
"""The types of a `PrecisionGraph`'s attributes."""

_KEYS: Mapping[str, type] = MappingProxyType(
    {meta.NOTE.name: Note, meta.CAST.name: meta.Cast, meta.BODIES.name: tuple, "custom": dict}
)
"""The types of metadata that later passes read; "custom" is torch's."""

_FIELDS: Mapping[str, tuple[type, ...]] = MappingProxyType(
    {
        "id": (OpId,),
        "kind": (Kind,),
        "reason": (str,),
        "precision": (Precision, type(None)),
        "output": (Precision, type(None)),
    }
)
"""The types of an operator's decisions."""

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


def refuse_damage(graph: PrecisionGraph, before: Seen, by: str) -> None:
    """Check the structure of a graph and of the bodies of its higher-order operators.

    Args:
        graph: the graph after the pass.
        before: the graph before the pass.
        by: the name of the pass.

    Raises:
        PassError: the pass has damaged the graph.
    """
    for damage in _damage(graph, before):
        _refuse(damage, by)


def refuse_calls(graph: PrecisionGraph, before: Seen, by: str) -> None:
    """Check that each operator that a pass has changed accepts its arguments.

    Args:
        graph: the graph after the pass, with the values of new nodes.
        before: the graph before the pass.
        by: the name of the pass.

    Raises:
        PassError: an operator does not accept its arguments.
    """
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
    node = "" if damage.node is None else f", node %{damage.node.name}"
    raise PassError(
        f"pass {by!r} has damaged the graph: {damage.problem}",
        where=f"pass {by!r}{node}",
        do=damage.repair,
    )


def _damage(graph: PrecisionGraph, before: Seen) -> Iterator[Damage]:
    yield from _damage_to_attributes(graph)
    for node in graph.nodes:
        yield from _damage_to_node(node, before)
    yield from _damage_to_output(graph.nodes)
    for node in graph.nodes:
        for body in meta.bodies(node):
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


def _damage_to_node(node: fx.Node, before: Seen) -> Iterator[Damage]:
    facts = getattr(node, "meta", None)
    if not isinstance(facts, dict):
        yield Damage(node, f"its meta is {type(facts).__name__}, not dict", _LEAVE)
        return
    for key, expected in _KEYS.items():
        if key in facts and not isinstance(facts[key], expected):
            problem = f"its meta[{key!r}] is {type(facts[key]).__name__}, not {expected.__name__}"
            yield Damage(node, problem, _LEAVE)
    if (note := meta.NOTE.get(node)) is not None:
        for field, types in _FIELDS.items():
            value = getattr(note, field)
            if not isinstance(value, types):
                problem = f"the {field} of {note.id} is {value!r}, not a {types[0].__name__}"
                yield Damage(node, problem, _LEAVE)
    if node in before.notes and node not in meta.NOTE and node.target == before.nodes[node][0]:
        yield Damage(node, f"the metadata of {before.notes[node].id} is gone", _LEAVE)
    target, name = node.target, type(node.target).__name__
    if node.op not in _OPERATIONS:
        repair = f"use one of: {', '.join(_OPERATIONS)}"
        yield Damage(node, f"{node.op!r} is no operation of torch.fx", repair)
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
