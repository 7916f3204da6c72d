"""Where the random numbers of stochastic rounding come from.

Invariant: one random number a graph and step, drawn from torch's generator, and a stream of its own for every rounding. So
torch.manual_seed reproduces a run exactly; and a body that is recomputed, which gets the number of the graph around it as one more
operand, is rounded as it was.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph


def drawn(graph: PrecisionGraph, rounding: str) -> fx.Node:
    """Returns a new first node that draws the number; one that gives zero where no rounding is random."""
    first = next(node for node in graph.nodes if node.op not in ("placeholder", "get_attr"))
    keywords: dict[str, Any] = {"dtype": torch.int64, "device": graph.context.device}
    target: Any = torch.ops.aten.zeros.default
    args: tuple[Any, ...] = ([1],)
    if rounding == "stochastic":
        target, args = torch.ops.aten.randint.default, (2**62, [1])
    with graph.graph.inserting_before(first):
        seed = graph.graph.create_node("call_function", target, args, keywords, name="seed")
    seed.meta["qsync_cast"] = True
    graph.propagate(seed)
    return seed


def handed_in(body: PrecisionGraph, node: fx.Node, seed: fx.Node) -> fx.Node:
    """Returns a new last placeholder of a body, and gives the higher-order operator `node` the argument for it."""
    graph, placeholders = body.graph, [n for n in body.nodes if n.op == "placeholder"]
    with graph.inserting_after(placeholders[-1]) if placeholders else graph.inserting_before(body.nodes[0]):
        found = graph.placeholder("seed")
    found.meta["val"] = seed.meta["val"]
    node.args = (*node.args, seed)
    return found
