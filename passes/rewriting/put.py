"""What a rewrite puts in the place of what it found.

Invariant: the readers of the old results read new ones of the same shapes and types. What is put in is spelled as the model is,
belongs to the module and line of what it replaces, and has ids of its own; an operator of the same name takes the id over, so that a
plan that names it still does.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from qsync_fx.errors import PassError
from qsync_fx.graph import PrecisionGraph
from qsync_fx.passes.identity import identify_new
from qsync_fx.passes.in_force import Modes, restored
from qsync_fx.passes.rewriting.attach import attached
from qsync_fx.passes.rewriting.found import Match
from qsync_fx.passes.rewriting.match import Site
from qsync_fx.passes.rewriting.trace import Traced, Untraceable, trace_call
from qsync_fx.values import describe

_OF_THE_MODEL = ("stack_trace", "nn_module_stack")


def put(
    graph: PrecisionGraph, site: Site, name: str, function: Callable[..., Any], match: Match, modes: Modes
) -> dict[fx.Node, fx.Node]:
    """Puts what `function` computes in place of what stands at a site; returns the new node for each of the old results.

    Raises:
        PassError: the function cannot be traced, or gives something else than what stands there.
    """
    wanted = inspect.signature(function).parameters
    arguments = {argument: value for argument, value in site.arguments.items() if argument in wanted}
    leaves = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, fx.Node)]
    traced = _traced(
        graph, name, function, arguments, {"match": match} if "match" in wanted else {}, match.main.where, modes
    )
    _check(traced, site, name, match.main.where)
    last = site.matched[-1]
    local: dict[fx.Node, fx.Node] = {}
    given = [*leaves, *(attached(graph, tensor) for tensor in traced.tensors)]
    local.update(zip(traced.inputs, given, strict=True))
    model = {key: value for key, value in match.main.node.meta.items() if key in _OF_THE_MODEL}
    with graph.graph.inserting_before(last.next):
        for node in traced.module.graph.nodes:
            if node.op in ("call_function", "get_attr"):
                new = local[node] = graph.graph.node_copy(node, lambda used: local[used])
                new.meta = {**{key: node.meta[key] for key in ("val",) if key in node.meta}, **model}
                if node.op == "get_attr":
                    _constant(graph, new, getattr(traced.module, str(node.target)))
    freed = [operator.id for operator in match.operators]
    put_in = [local[node] for node in traced.module.graph.nodes if node.op == "call_function"]
    results = {old: local[output] for old, output in zip(site.outputs, traced.outputs, strict=True)}
    for old, new in results.items():
        old.replace_all_uses_with(new, delete_user_cb=lambda user: user not in put_in)
    for node in reversed(site.matched):
        graph.graph.erase_node(node)
    identify_new(graph, put_in, name, match.main.id, freed)
    return results


def _traced(
    graph: PrecisionGraph,
    name: str,
    function: Callable[..., Any],
    arguments: dict[str, Any],
    others: dict[str, Any],
    where: str,
    modes: Modes,
) -> Traced:
    values = fx.node.map_arg(arguments, graph.value)
    assert graph.context.fake_mode is not None

    def run(**given: Any) -> Any:
        return function(**given, **others)

    with restored(), graph.context.fake_mode:
        modes.apply()
        try:
            return trace_call(run, values, recorded=True)
        except Untraceable as error:
            raise PassError(
                f"the replacement of {name!r} cannot be traced: {error}",
                where=where,
                do="write it in torch operators on its arguments, tensors that exist before, and what its match tells",
            ) from error.__cause__


def _check(traced: Traced, site: Site, name: str, where: str) -> None:
    old = ", ".join(describe(output.meta["val"]) for output in site.outputs)
    new = ", ".join(describe(output.meta["val"]) for output in traced.outputs)
    if old != new:
        raise PassError(
            f"the replacement of {name!r} gives {new} where the model computes {old}",
            where=where,
            do="return as many tensors as the pattern does, of the same shapes and types (y.to(x.dtype) gives y the type of x)",
        )


def _constant(graph: PrecisionGraph, node: fx.Node, value: Any) -> None:
    """Keeps a number that the function has written down, such as `torch.tensor(2.0)`."""
    at = 0
    while hasattr(graph.module, f"constant_{at}"):
        at += 1
    node.target = f"constant_{at}"
    graph.module.__dict__[node.target] = value
    node.meta.setdefault("val", value)
