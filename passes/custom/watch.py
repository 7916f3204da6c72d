"""What a user's pass has done to a graph: whether it only decided, or changed what the passes after it build upon.

Invariant: a pass that only decides, by `Operator.assign`, can break no rule; what breaks one afterwards is a pass of ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import fx
from torch.utils import _pytree as pytree

from qsync_fx.graph import PrecisionGraph, meta
from qsync_fx.graph.notes import Note


@dataclass(frozen=True)
class Seen:
    """A graph, and the bodies of its higher-order operators, as they were.

    Attributes:
        nodes: every node in order, with what it calls, with what, and its value.
        values: theirs.
        notes: what was known of each operator.
    """

    nodes: dict[fx.Node, tuple[Any, ...]]
    values: tuple[Any, ...]
    notes: dict[fx.Node, Note]

    def holds(self, value: Any) -> bool:
        """Whether a value was that of a node."""
        return any(known is value for known in self.values)


def look(graph: PrecisionGraph) -> Seen:
    nodes = [node for part in graph.walk() for node in part.nodes]
    return Seen(
        {node: (node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in nodes},
        tuple(node.meta.get("val") for node in nodes),
        {node: meta.NOTE[node] for node in nodes if node in meta.NOTE},
    )


def replaced(before: Seen, graph: PrecisionGraph) -> dict[fx.Node, fx.Node]:
    """Returns for new nodes which ones that are gone they are read in place of."""
    alive = set(graph.nodes)
    found: dict[fx.Node, fx.Node] = {}
    todo = [(before.nodes[node][1:3], (node.args, node.kwargs)) for node in alive if node in before.nodes]
    for was, now in todo:
        olds, news = pytree.tree_leaves(was), pytree.tree_leaves(now)
        for old, new in zip(olds, news, strict=True) if len(olds) == len(news) else ():
            both = isinstance(old, fx.Node) and isinstance(new, fx.Node)
            if both and old not in alive and old in before.nodes and new not in before.nodes and new not in found:
                found[new] = old
                todo.append((before.nodes[old][1:3], (new.args, new.kwargs)))
    return found


def only_decided(before: Seen, after: Seen) -> bool:
    """Whether nothing but `Operator.assign` tells the two apart."""
    same = list(before.nodes.items()) == list(after.nodes.items()) and before.notes.keys() == after.notes.keys()
    return same and all(_decided(note, after.notes[node]) for node, note in before.notes.items())


def _decided(before: Note, after: Note) -> bool:
    undone = dataclasses.replace(
        after, planned=before.planned, precision=before.precision, reason=before.reason, pinned=before.pinned
    )
    return after == before or (after.pinned and undone == before)
