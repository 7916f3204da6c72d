"""Which dropout draws what it drops in vectors, from the stream of the roundings: the option "fast_dropout".

Invariant: who compiles and who foresees ask the same function. Where nothing is asked for, dropout of a CPU is drawn so wherever it can be.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import fx

from qsync_fx.devices.counted import ANY, capability
from qsync_fx.graph.graph import PrecisionGraph

aten = torch.ops.aten

VECTORS: Final = "vectors"
"""How an operator computes that drops what is drawn so."""
_DROPPING: Final = (aten.dropout.default, aten.native_dropout.default, aten.scaled_dot_product_attention.default)


def drops(node: fx.Node) -> bool:
    """Whether a node may be a dropout, or have one in it."""
    return node.target in _DROPPING


def may_be_drawn(graph: PrecisionGraph) -> bool:
    """Whether there is a dropout in a graph that is compiled for a CPU, and nothing asks for torch's."""
    context = graph.context
    asked = context.options.fast_dropout is not False and context.options.inner == "inductor"
    if not asked or context.device.type != "cpu" or capability(context.device) != ANY:
        return False
    return any(drops(node) for part in graph.walk() for node in part.nodes)


def drawn(graph: PrecisionGraph) -> bool:
    """Whether it is drawn in vectors: not in the body of an operator, which may be computed again from another seed, nor where the model
    calls torch.native_dropout."""
    if not may_be_drawn(graph):
        return False
    parts = list(graph.walk())
    return len(parts) == 1 and not any(node.target is aten.native_dropout.default for node in parts[0].nodes)
