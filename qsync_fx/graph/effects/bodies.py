"""What crosses the border of a higher-order operator that just calls its body, as activation checkpointing does.

Invariant: such a border changes nothing: formats, casts and random numbers are those of the body written in its place. So a model trains to
the same bits with checkpointing as without, and what is kept for the recomputation is kept in the narrow format.
"""

from __future__ import annotations

import operator as py_operator
from collections.abc import Iterator
from typing import Any

from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.graph import PrecisionGraph


def operands(node: fx.Node, body: PrecisionGraph) -> list[tuple[fx.Node, Any]]:
    """Returns the placeholders of a body, each with the argument of the higher-order operator that it stands for."""
    placeholders = [p for p in body.nodes if p.op == "placeholder"]
    return list(zip(placeholders, node.args[1:], strict=True))


def results(body: PrecisionGraph) -> tuple[Any, ...]:
    """Returns what a body returns: the nodes that `getitem` takes from the higher-order operator."""
    returned = body.nodes[-1].args[0]
    return tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)


def result_of(node: fx.Node) -> fx.Node | None:
    """Returns the node inside a body that a `getitem` outside of it takes; None for any other node."""
    if node.target is not py_operator.getitem:
        return None
    source, at = node.args
    bodies = meta.bodies(source) if isinstance(source, fx.Node) else None
    found = results(bodies[0])[at] if bodies and isinstance(at, int) else None
    return found if isinstance(found, fx.Node) else None


def readers(node: fx.Node) -> Iterator[fx.Node]:
    """Yields the nodes that read a node's value, on whichever side of a border."""
    for user in node.users:
        caller = meta.CALLER.get(user)
        if bodies := meta.bodies(user):
            for placeholder, given in operands(user, bodies[0]):
                if given is node:
                    yield from readers(placeholder)
        elif user.op == "output" and caller is not None:
            for taken in caller.users:
                if result_of(taken) is node:
                    yield from readers(taken)
        else:
            yield user


def handed_in(body: PrecisionGraph, node: fx.Node, given: fx.Node, name: str) -> fx.Node:
    """Returns a new last placeholder of a body, and gives the higher-order operator `node` the argument for it."""
    graph, placeholders = body.graph, [n for n in body.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(body.nodes[0]):
        found = graph.placeholder(name)
    found.target = found.name  # the name of an argument, of which there may be several
    found.meta["val"] = given.meta["val"]
    node.args = (*node.args, given)
    return found
