"""Whose time the kernels of a node take: the operator of the model that it belongs to, and the part where it is one of a cast.

Invariant: every node of a lowered graph that computes is charged to an operator (`charge`), and torch carries that on through AOTAutograd
and Inductor. What these make without it is charged to what it stands beside (`charges`): sums of gradients, writes to buffers, constants
of decompositions, and what a pattern of Inductor's has put in the place of several operators. Of those `from_node` tells nothing: it names
nodes of the pattern's own graph, and of others none.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from qsync_fx.graph import meta
from qsync_fx.graph.graph import PrecisionGraph
from qsync_fx.graph.meta import Charge


def charges(graph: fx.Graph) -> dict[fx.Node, Charge]:
    """Returns whom each node that computes is charged to, in a graph of any stage after lowering: Dynamo's, AOTAutograd's or Inductor's.

    A node without a mark belongs to what reads it: the sum of two gradients to the operator that produced the value, the middle of an
    attention that was fused to the product at its end. One that nobody reads belongs to what it reads. A node that is
    connected with no operator is missing.
    """
    found = {node: charge for node in graph.nodes if computes(node) and (charge := meta.charged(node)) is not None}
    known = -1
    # Again while it finds any: what was charged to what it reads may have read constants of its own.
    while known < len(found):
        known = len(found)
        for node in reversed(graph.nodes):
            _beside(found, node, node.users)
        for node in graph.nodes:
            _beside(found, node, node.all_input_nodes)
    return found


def charge(graph: PrecisionGraph) -> None:
    """Marks the nodes of a graph in which casts stand: operators as their own, a cast as that of the operator that it is for.

    What is neither belongs to what it stands beside, and what is connected with no operator, such as the counter of a batch norm, to the
    operator that follows it.
    """
    operators = {node: note for node in graph.nodes if (note := meta.NOTE.get(node)) is not None}
    for node in graph.nodes:
        cast = meta.CAST.get(node)
        if node in operators:
            meta.charge(node, operators[node].id)
        elif cast is not None and cast.owner is not None:
            meta.charge(node, cast.owner, cast.part)
    found = charges(graph.graph)
    near = next((str(note.id) for note in reversed(operators.values())), None)
    for node in reversed(graph.nodes):
        near = str(operators[node].id) if node in operators else near
        owner = found[node].owner if node in found else near
        if computes(node) and owner is not None:
            cast = meta.CAST.get(node)
            meta.charge(node, owner, cast.part if cast is not None else None)


def computes(node: fx.Node) -> bool:
    return node.op in ("call_function", "call_method", "call_module")


def _beside(found: dict[fx.Node, Charge], node: fx.Node, others: Iterable[fx.Node]) -> None:
    """Charges a node that is not charged yet to one of the others, rather to an operator than to the cast that stands before it."""
    known = sorted((found[other] for other in others if other in found), key=lambda charge: charge.part is not None)
    if known and node not in found and computes(node):
        found[node] = Charge(known[0].owner)
