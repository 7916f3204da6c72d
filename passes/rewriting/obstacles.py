"""Why a place that computes a pattern is left alone all the same.

Invariant: what is put in runs where the last node of the place ran. Where something else would then see another value, nothing is changed.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.effects.memory import Memory, may_write
from qsync_fx.graph.values import tensors
from qsync_fx.passes.rewriting.match import Site
from qsync_fx.passes.tracing.in_force import Modes


def obstacle(graph: PrecisionGraph, site: Site, modes: Mapping[fx.Node, Modes]) -> str:
    """Returns why a place cannot be rewritten; "" where it can."""
    order = {node: at for at, node in enumerate(graph.nodes)}
    matched, last = set(site.matched), order[site.matched[-1]]
    if not any(node in meta.NOTE for node in site.matched):
        return "it computes with no floating-point values, and so has no id"
    if any(modes[node] != modes[site.matched[-1]] for node in site.matched):
        return "autocast or the recording of gradients changes within it"
    for node in site.matched:
        outside = [user for user in node.users if user not in matched]
        if node not in site.outputs and outside:
            return f"its inner value %{node.name} is read by %{outside[0].name} too"
        early = [user for user in outside if order[user] < last]
        if early:
            return f"its result %{node.name} is read by %{early[0].name} before its last one is there"
    return _written_within(graph, site, order)


def _written_within(graph: PrecisionGraph, site: Site, order: Mapping[fx.Node, int]) -> str:
    first, last = order[site.matched[0]], order[site.matched[-1]]
    between = [node for node in graph.nodes[first:last] if node not in site.matched and may_write(node)]
    if not between:
        return ""
    memory = Memory(graph)
    used = {node for one in site.matched for node in (one, *one.all_input_nodes) if tensors(graph.value(node))}
    places = frozenset().union(*map(memory.of, used))
    for node in between:
        if any(memory.of(written) & places for written in may_write(node)):
            return f"%{node.name} writes in place to a value of it before its end"
    return ""
