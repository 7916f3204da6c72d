"""How far one cast is shared: the pass that inserts casts and the rules that check them ask here.

Invariant: a cast of a tensor stands in for another one exactly if nothing between the two may write to the tensor, and both record
gradients or neither does. A cast from before a write holds a stale value; one that was made without gradients loses them. What a node
reads it reads before it writes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable

from torch import fx

from qsync_fx.graph.effects.memory import Memory, may_write
from qsync_fx.graph.effects.modes import switches_grad
from qsync_fx.graph.graph import PrecisionGraph

Epoch = tuple[Hashable, int]


class Sharing:
    """Walks a graph from its first node to its last: `passed` is called with each, once all that it reads has been dealt with."""

    def __init__(self, graph: PrecisionGraph, memory: Memory | None = None) -> None:
        self.memory = memory or Memory(graph)
        # What a body starts with is its caller's affair.
        self.mode: tuple[Hashable, ...] = (graph.context.training if graph.parent is None else None,)
        self._writes: Counter[Hashable] = Counter()
        self._modes: dict[fx.Node, Hashable] = {}

    def epoch(self, source: fx.Node) -> Epoch:
        """Returns what two casts of a tensor have in common that may be one."""
        return self.mode, self.writes(source)

    def writes(self, source: fx.Node) -> int:
        """Returns how many writes so far may have changed a tensor."""
        return sum(self._writes[place] for place in self.memory.of(source))

    def records_as_here(self, node: fx.Node) -> bool:
        """Whether gradients are recorded here as they were where the node stands."""
        return self._modes.get(node, self.mode) == self.mode

    def passed(self, node: fx.Node) -> None:
        self._modes[node] = self.mode
        if switches_grad(node):
            self.mode = _switched(self.mode, node)
        for used in may_write(node):
            self._writes.update(self.memory.of(used))


def _switched(mode: tuple[Hashable, ...], node: fx.Node) -> tuple[Hashable, ...]:
    """The mode after a switch: whether gradients are recorded, then the regions of inference mode that are open."""
    if "exit" in getattr(node.target, "__name__", ""):
        return (mode[0], *(region for region in mode[1:] if region is not node.args[0]))
    if "enter" in getattr(node.target, "__name__", ""):
        return (*mode, node)
    return (bool(node.args[0]), *mode[1:])
