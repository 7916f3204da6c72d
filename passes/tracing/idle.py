"""Conversions that return their input, where it shows that they do.

`y.float().add_(1)` writes to an FP32 `y`, `y, y.float()[0]` returns two views of one tensor, and
`y[::2].float().as_strided(...)` reads values of `y` outside its operand. Invariant: that is so in every format. Such a
conversion expresses no wish for a format; the model uses it for the memory of its input.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

import torch
from torch import fx

from qsync_fx.graph import PrecisionGraph
from qsync_fx.graph.effects.memory import Memory
from qsync_fx.ops import row_for


def without_idle_conversions(graph: PrecisionGraph) -> None:
    """Remove conversions without an effect if their memory is written, read by strides or returned twice."""
    conversions = [node for node in graph.nodes if (row := row_for(node.target)) is not None and row.converts]
    if not conversions:
        return
    memory = Memory(graph)
    leaving: Counter[Hashable] = Counter(place for used in graph.nodes[-1].all_input_nodes for place in memory.of(used))
    strided = [node for node in graph.nodes if node.target is torch.ops.aten.as_strided.default]
    by_strides = frozenset(place for node in strided for place in memory.of(node))
    for node in conversions:
        source, places = node.args[0], memory.of(node)
        if not isinstance(source, fx.Node) or graph.value(source).dtype is not graph.value(node).dtype:
            continue
        shared = places & memory.of(source)
        if shared & (memory.written | by_strides) or any(leaving[place] > 1 for place in shared):
            node.replace_all_uses_with(source)
            graph.graph.erase_node(node)
