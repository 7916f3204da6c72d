"""Replacement of matched nodes by the traced code of a rewrite.

Invariant: readers of the old results read new ones of the same shapes and dtypes. New nodes are
normalized like the model and inherit module and source line from the nodes that they replace. They
get new ids, except that an operator of the same name inherits the id, so that a plan that names it
still applies.

Each tensor that a replacement refers to occurs once in the graph: as Dynamo's input if it has one,
else as a parameter or buffer of the graph's module. AOTAutograd makes that an input, so each step
reads its current value, its gradient reaches the tensor itself, and writes to it persist.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._dynamo.source import ConstantSource
from torch.utils import _pytree as pytree

from qsync_fx.errors import PassError
from qsync_fx.graph import node_metadata
from qsync_fx.graph.alias_analysis import AliasSets, handed_in, may_write, operands
from qsync_fx.graph.fx_utils import describe, tensors
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.passes.rewriting.match import Match, MatchSite
from qsync_fx.passes.rewriting.pattern import TracedPattern, Untraceable, trace_call
from qsync_fx.passes.tracing.operator_ids import identify_new
from qsync_fx.passes.tracing.retrace import Modes, restored


def attached(graph: PrecisionGraph, tensor: Tensor) -> fx.Node:
    """Return the node of a user's tensor; attach the tensor to the graph if it has none.

    A body receives the tensor as an additional operand.
    """
    if graph.parent is not None:
        caller = next(node for node in graph.parent.nodes if graph in node_metadata.bodies(node))
        outer = attached(graph.parent, tensor)
        for inner, value in operands(caller, graph):
            if value is outer:
                return inner
        return handed_in(graph, caller, outer, "attached")
    module, fake = graph.module, _fake(graph, tensor)
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr") and node.meta.get("val") is fake:
            return node
    name = _free_name(module)
    if isinstance(tensor, nn.Parameter):
        module.register_parameter(name, tensor)
    else:
        module.register_buffer(name, tensor)
    first = next(node for node in graph.nodes if node.op != "placeholder")
    with graph.graph.inserting_before(first):
        result = graph.graph.get_attr(name)
    return _held(graph, result, fake)


def adopted(graph: PrecisionGraph, node: fx.Node, tensor: Tensor) -> fx.Node:
    """Return the node of a tensor that a pass added to the graph's module and reads by `node`."""
    if graph.parent is not None:
        result = attached(graph, tensor)
        name, module = str(node.target), graph.module
        node.replace_all_uses_with(result)
        graph.graph.erase_node(node)
        if not any(other.op == "get_attr" and other.target == name for other in graph.nodes):
            # AOTAutograd would treat it as a parameter of the top-level graph.
            path, _, last = name.rpartition(".")
            delattr(module.get_submodule(path), last)
        return result
    return _held(graph, node, _fake(graph, tensor))


def _fake(graph: PrecisionGraph, tensor: Tensor) -> Tensor:
    mode = graph.context.fake_mode
    if mode is None:
        return tensor
    return mode.from_tensor(tensor, static_shapes=True)


def _held(graph: PrecisionGraph, node: fx.Node, fake: Any) -> fx.Node:
    if hasattr(graph.module, "_param_name_to_source"):
        # AOTAutograd requires Dynamo's source of each parameter. Dynamo has none for this one and
        # installs no guard on it.
        name, sources = str(node.target), graph.module._param_name_to_source
        graph.module._param_name_to_source = {name: ConstantSource(name), **sources}  # type: ignore[dict-item, assignment]
    node.meta["val"] = fake
    return node


def _free_name(module: torch.nn.Module) -> str:
    return next(name for index in range(2**16) if not hasattr(module, name := f"attached_{index}"))


OF_THE_MODEL = ("stack_trace", "nn_module_stack")
"""Metadata keys for a node's position in the model."""


def inlined(
    graph: PrecisionGraph,
    traced: TracedPattern,
    value: Sequence[fx.Node],
    origin: Mapping[str, Any],
) -> dict[fx.Node, fx.Node]:
    """Copy traced code to the graph's insertion point; return the new node of each traced one.

    Args:
        value: the inputs, one node for each value that the code was traced with.
        origin: metadata of each new node besides its value.
    """
    inputs = [*value, *(attached(graph, tensor) for tensor in traced.tensors)]
    local = dict(zip(traced.inputs, inputs, strict=True))
    for node in traced.module.graph.nodes:
        if node.op in ("call_function", "get_attr"):
            new = local[node] = graph.graph.node_copy(node, lambda used: local[used])
            new.meta = dict(origin)
            if "val" in node.meta:
                new.meta["val"] = node.meta["val"]
            if node.op == "get_attr":
                _constant(graph, new, getattr(traced.module, str(node.target)))
    return local


def _constant(graph: PrecisionGraph, node: fx.Node, value: Any) -> None:
    """Store a constant of the function, such as `torch.tensor(2.0)`."""
    index = 0
    while hasattr(graph.module, f"constant_{index}"):
        index += 1
    node.target = f"constant_{index}"
    graph.module.__dict__[node.target] = value
    node.meta.setdefault("val", value)


def put(
    graph: PrecisionGraph,
    site: MatchSite,
    name: str,
    function: Callable[..., Any],
    match: Match,
    modes: Modes,
) -> dict[fx.Node, fx.Node]:
    """Replace a site by the computation of `function`; return the new node of each old result.

    The new nodes run at the position of the site's last node.

    Raises:
        PassError: the function cannot be traced, or its outputs differ from the site's outputs in
            number, shape or dtype.
    """
    wanted = inspect.signature(function).parameters
    arguments = {key: value for key, value in site.arguments.items() if key in wanted}
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]
    if "match" in wanted:
        function = functools.partial(function, match=match)
    where = match.main.where
    traced = _traced(graph, name, function, arguments, where, modes)
    _check(traced, site, name, where)
    last = site.matched[-1]
    model = {key: value for key, value in match.main.node.meta.items() if key in OF_THE_MODEL}
    with graph.graph.inserting_before(last.next):
        local = inlined(graph, traced, leaves, model)
    freed = [operator.node for operator in match.operators]
    put_in = [local[node] for node in traced.module.graph.nodes if node.op == "call_function"]
    results = {old: local[output] for old, output in zip(site.outputs, traced.outputs, strict=True)}
    for old, new in results.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in put_in)
    for node in reversed(site.matched):
        graph.graph.erase_node(node)
    identify_new(graph, put_in, name, "rewritten", match.main.note, freed)
    return results


def _traced(
    graph: PrecisionGraph,
    name: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    where: str,
    modes: Modes,
) -> TracedPattern:
    values = fx.node.map_arg(arguments, graph.value)
    assert graph.context.fake_mode is not None
    with restored(), graph.context.fake_mode:
        modes.apply()
        try:
            return trace_call(function, values, recorded=True)
        except Untraceable as error:
            message = f"the replacement of {name!r} cannot be traced: {error}"
            do = "use only torch operators on its arguments, existing tensors and its match"
            raise PassError(message, where=where, do=do) from error.__cause__


def _check(traced: TracedPattern, site: MatchSite, name: str, where: str) -> None:
    old = ", ".join(describe(output.meta["val"]) for output in site.outputs)
    new = ", ".join(describe(output.meta["val"]) for output in traced.outputs)
    if old != new:
        raise PassError(
            f"the replacement of {name!r} returns {new} where the model computes {old}",
            where=where,
            do="return as many tensors as the pattern, of the same shapes and dtypes "
            "(y.to(x.dtype) converts y to the dtype of x)",
        )


def obstacle(graph: PrecisionGraph, site: MatchSite, modes: Mapping[fx.Node, Modes]) -> str:
    """Return why a site cannot be rewritten, or "".

    The replacement runs at the site's last node; no other node may then read different values.
    """
    order = {node: index for index, node in enumerate(graph.nodes)}
    matched, last = set(site.matched), order[site.matched[-1]]
    if not any(node in node_metadata.NOTE for node in site.matched):
        return "it computes with no floating-point values, and so has no id"
    if any(modes[node] != modes[site.matched[-1]] for node in site.matched):
        return "autocast or the recording of gradients changes within it"
    for node in site.matched:
        outside = [user for user in node.users if user not in matched]
        if node not in site.outputs and outside:
            return f"its inner value %{node.name} is read by %{outside[0].name} too"
        for user in outside:
            if order[user] < last:
                reader = f"is read by %{user.name} before its last result is computed"
                return f"its result %{node.name} {reader}"
    return _written_within(graph, site, order)


def _written_within(graph: PrecisionGraph, site: MatchSite, order: Mapping[fx.Node, int]) -> str:
    first, last = order[site.matched[0]], order[site.matched[-1]]
    others = (node for node in graph.nodes[first:last] if node not in site.matched)
    writers = [node for node in others if may_write(node)]
    if not writers:
        return ""
    memory = AliasSets(graph)
    used = {node for item in site.matched for node in (item, *item.all_input_nodes)}
    places = frozenset().union(*(memory.of(node) for node in used if tensors(graph.value(node))))
    for node in writers:
        if any(memory.of(written) & places for written in may_write(node)):
            return f"%{node.name} writes in place to a value of it before its end"
    return ""
