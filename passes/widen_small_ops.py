"""Where 16 bits that nobody asked for give way to FP32: products that are too small to pay in them, and what stands between such.

A product alone is told by its lowering, as for the option "skip_unprofitable". But a result in FP32 makes FP32 of all that it is added to
or
multiplied with: a gate of a few numbers would make a whole image wide, and all that is added to that. So operators whose results are joined
are of one mind: as narrow as by default where one of them pays, and wide where none does. What has no weight (norms, attention, embeddings)
stays narrow where it reads what pays; else it goes with its neighbors: wide if a product that gave way is next to it and none that pays.

Invariant: only operators whose precision is the device's default are changed, and none that stays narrow is joined with one that gave way.
What changes, and what is too small and stays, says why.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import fx

from qsync_fx.formats import FP32, Precision
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import operands
from qsync_fx.graph.cascade_rules import handed_on, rule_of
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.ops import Kind

_WIDE = 32


def give_way(graph: PrecisionGraph, unasked: Iterable[Operator]) -> None:
    """Lets operators that have the default of the device run in FP32 where that is as fast, and says why.

    Args:
        unasked: the operators of the graph whose precision is the default.
    """
    default = {
        op.node: op for op in unasked if op.precision is not None and op.precision.bits < _WIDE
    }
    small = {
        node: why for node, op in default.items() if (why := op.slower(_precision(op))) is not None
    }
    if not small:
        return
    joins = _Joins()
    joins.sweep(graph)
    # A product that is not too small pays. So does what is narrow because somebody said so, and what has no weight and reads what pays.
    paying: dict[fx.Node, str] = {}
    for node, reads in joins.narrow.items():
        before = next((paying[root] for root in map(joins.root, reads) if root in paying), None)
        if node not in default or (_weighted(default[node]) and node not in small):
            paying.setdefault(
                joins.root(node),
                str(node_metadata.NOTE[node].id) if node in node_metadata.NOTE else node.name,
            )
        elif before is not None and node not in small:
            paying.setdefault(joins.root(node), before)
    gone = {joins.root(node) for node in small} - paying.keys()
    _spread(gone, paying.keys(), joins)
    for node, op in default.items():
        root, fmt = joins.root(node), _precision(op)
        if root in gone:
            why = small.get(node, f"what stands around it is too small for {fmt} to pay")
            but = f"{why}, so it runs in {FP32}"
            op.update(precision=FP32, instead=but, reason=f"{op.note.reason}; {but}")
        elif node in small:
            neighbours = f"what becomes of its result is in {fmt} by {paying[root]}"
            op.update(reason=f"{op.note.reason}; {small[node]}, but {neighbours}, so it stays")


def _weighted(operator: Operator) -> bool:
    return operator.row is not None and bool(operator.row.scaled)


def _precision(operator: Operator) -> Precision:
    assert operator.precision is not None, "it was assigned"
    return operator.precision


def _spread(gone: set[fx.Node], staying: Iterable[fx.Node], joins: _Joins) -> None:
    """Adds to what gave way what stands next to it, and next to that, and not next to what pays."""
    staying = set(staying)
    neighbours: dict[fx.Node, set[fx.Node]] = {}
    for node, reads in joins.narrow.items():
        for read in reads:
            a, b = joins.root(read), joins.root(node)
            neighbours.setdefault(a, set()).add(b)
            neighbours.setdefault(b, set()).add(a)
    reached = list(gone)
    while reached:
        for root in neighbours.get(reached.pop(), ()):
            if root not in gone and root not in staying and not neighbours[root] & staying:
                gone.add(root)
                reached.append(root)


@dataclass
class _Joins:
    """Which narrow results are joined: added to each other, say, by operators that take the widest format of what they read.

    Attributes:
        narrow: what gives 16 bits by itself, in order: adjustable operators, with those whose results, or what has become of them, they
            read; and what the model holds in them.
    """

    narrow: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _formats: dict[fx.Node, Precision | None] = field(default_factory=dict)
    _sources: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """Of what is narrow, one of those that give 16 bits and that it comes from."""
    _roots: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def root(self, node: fx.Node) -> fx.Node:
        """Returns the one that stands for all that a narrow result is joined with."""
        while (above := self._roots.get(node, node)) is not node:
            self._roots[node] = self._roots.get(above, above)
            node = above
        return node

    def sweep(self, graph: PrecisionGraph) -> None:
        """Follows formats through a graph, as the cascade will, where adjustable operators have what they were assigned."""
        for node in graph.nodes:
            for body in node_metadata.bodies(node):
                for inside, outside in operands(node, body):
                    if isinstance(outside, fx.Node):
                        self._hand_on(inside, outside)
                self.sweep(body)
            if node.op == "placeholder" and node in self._formats:
                continue
            if node not in node_metadata.NOTE:
                source = handed_on(graph, node, graph.context.automatic)
                if source is not None and source in self._formats:
                    self._hand_on(node, source)
                else:
                    self._begin(node, format_of(graph.value(node)))
            elif node_metadata.NOTE[node].kind is Kind.ADJUSTABLE:
                self._begin(
                    node,
                    node_metadata.NOTE[node].precision
                    if format_of(graph.value(node)) is not None
                    else None,
                )
                if node in self.narrow:
                    self.narrow[node] = [
                        self._sources[used]
                        for used in node.all_input_nodes
                        if used in self._sources
                    ]
            else:
                self._follow(graph, node)

    def _begin(self, node: fx.Node, fmt: Precision | None) -> None:
        self._formats[node] = fmt
        if fmt is not None and fmt.bits < _WIDE:
            self._sources[node] = node
            self.narrow[node] = []

    def _hand_on(self, node: fx.Node, source: fx.Node) -> None:
        self._formats[node] = self._formats.get(source)
        if source in self._sources:
            self._sources[node] = self._sources[source]

    def _follow(self, graph: PrecisionGraph, node: fx.Node) -> None:
        rule = rule_of(graph, node, graph.context.automatic)
        result, _ = rule.precision([self._formats.get(used) for used in rule.inputs])
        fmt = rule.output(result)
        sources = [self._sources[used] for used in rule.inputs if used in self._sources]
        if not sources or fmt is None or fmt.bits >= _WIDE:
            self._begin(node, fmt)
            return
        self._formats[node], self._sources[node] = fmt, sources[0]
        for other in sources[1:] if rule.promotes else ():
            self._roots[self.root(other)] = self.root(sources[0])
