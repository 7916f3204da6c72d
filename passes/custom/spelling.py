"""What a user's pass has written into a graph, spelled as the model is and with values.

A pass may call any function of torch, a method, or a module that it has added to the graph's: it is traced as the model is. Invariant:
afterwards a node calls an operator and has the value of what it computes, or was laid at its pass's door.
"""

from __future__ import annotations

import operator as py_operator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from qsync_fx.errors import PassError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.effects.modes import is_switch
from qsync_fx.graph.nodes import target_name
from qsync_fx.passes.custom.watch import Seen
from qsync_fx.passes.rewriting.attach import adopted
from qsync_fx.passes.rewriting.inline import OF_THE_MODEL, inlined
from qsync_fx.passes.rewriting.trace import Traced, Untraceable, trace_call
from qsync_fx.passes.tracing.in_force import modes, restored


def spell(graph: PrecisionGraph, node: fx.Node) -> None:
    """Puts the operators that a new node calls in its place, if it is none itself.

    Raises:
        PassError: what it calls cannot be traced, or is not there.
    """
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
    given = {"args": node.args, "kwargs": node.kwargs}
    traced, several = _traced(graph, node, given)
    leaves = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, fx.Node)]
    read = [leaf for leaf in leaves if isinstance(graph.value(leaf), (torch.Tensor, torch.SymInt, torch.SymFloat))]
    with graph.graph.inserting_before(node):
        local = inlined(graph, traced, read, {key: node.meta[key] for key in OF_THE_MODEL if key in node.meta})
    _replace(graph, node, tuple(local[output] for output in traced.outputs), several)


def _traced(graph: PrecisionGraph, node: fx.Node, given: dict[str, Any]) -> tuple[Traced, bool]:
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
            return trace_call(run, fx.node.map_arg(given, graph.value), recorded=True), several
        except Untraceable as error:
            raise PassError(
                f"{target_name(node)} cannot be traced: {error}",
                where=f"node %{node.name}",
                do="call operators of torch, or functions and modules that compute with tensors alone",
            ) from error.__cause__


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
            do="give it one first: graph.module.register_parameter(name, parameter), register_buffer or add_submodule",
        ) from error


def _replace(graph: PrecisionGraph, node: fx.Node, outputs: tuple[fx.Node, ...], several: bool) -> None:
    def instead(used: fx.Node) -> Any:
        return used if used is not node else outputs if several else outputs[0]

    for user in list(node.users):
        if several and user.target is py_operator.getitem and isinstance(user.args[1], int):
            user.replace_all_uses_with(outputs[user.args[1]])
            graph.graph.erase_node(user)
        else:
            user.args, user.kwargs = fx.node.map_arg((user.args, user.kwargs), instead)
    graph.graph.erase_node(node)
    if node.op == "call_module" and not any(other.target == node.target for other in graph.nodes):
        # Its tensors are the graph's now. AOTAutograd takes each once.
        graph.module.delete_submodule(str(node.target))


def evaluate(graph: PrecisionGraph, node: fx.Node, before: Seen | None = None) -> None:
    """Gives a new node the value of what it computes; one that was copied with the node too.

    Raises:
        PassError: its operator does not take what it is given, or the tensor that it names is not there.
    """
    if "val" in node.meta and not (before is not None and before.holds(node.meta["val"])):
        return
    if node.op == "get_attr":
        held = _attribute(graph, node)
        if isinstance(held, torch.Tensor):
            adopted(graph, node, held)
    elif node.op == "call_function" and not is_switch(node):
        graph.propagate(node)
