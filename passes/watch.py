"""What a user's pass has done to a graph: whether it only decided, or changed what the passes after it build upon.

Invariant: a pass that only decides, by `Operator.assign`, can break no rule; what breaks one afterwards is a pass of ours.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

from torch import fx

from qsync_fx.graph import PrecisionGraph
from qsync_fx.notes import Note


@dataclass(frozen=True)
class Seen:
    """A graph, and the bodies of its higher-order operators, as they were.

    Attributes:
        nodes: every node in order, with what it calls, with what, and its value.
        notes: what was known of each operator.
    """

    nodes: dict[fx.Node, tuple[Any, ...]]
    notes: dict[fx.Node, Note]


def look(graph: PrecisionGraph) -> Seen:
    nodes = [node for part in graph.walk() for node in part.nodes]
    return Seen(
        {node: (node.target, node.args, node.kwargs, id(node.meta.get("val"))) for node in nodes},
        {node: node.meta["qsync"] for node in nodes if "qsync" in node.meta},
    )


def only_decided(before: Seen, after: Seen) -> bool:
    """Whether nothing but `Operator.assign` tells the two apart."""
    same = list(before.nodes.items()) == list(after.nodes.items()) and before.notes.keys() == after.notes.keys()
    return same and all(_decided(note, after.notes[node]) for node, note in before.notes.items())


def _decided(before: Note, after: Note) -> bool:
    undone = dataclasses.replace(
        after, planned=before.planned, precision=before.precision, reason=before.reason, pinned=before.pinned
    )
    return after == before or (after.pinned and undone == before)
