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
from qsync_fx.graph.values import describe
from qsync_fx.passes.rewriting.found import Match
from qsync_fx.passes.rewriting.inline import OF_THE_MODEL, inlined
from qsync_fx.passes.rewriting.match import Site
from qsync_fx.passes.rewriting.trace import Traced, Untraceable, trace_call
from qsync_fx.passes.tracing.identity import identify_new
from qsync_fx.passes.tracing.in_force import Modes, restored


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
