"""Assignment of the plan's precisions, or of the device's default, to adjustable operators.

Invariant: afterwards each adjustable operator has a precision and the reason for it. An explicit
choice for the operator overrides the model's autocast region, a default does not.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar, cast

import networkx as nx
from networkx.utils import UnionFind
from torch import fx

from qsync_fx.devices.format_support import row_on, stays
from qsync_fx.formats import FP32, Precision
from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import operands
from qsync_fx.graph.cascade_rules import handed_on, rule_of
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope
from qsync_fx.plan.plan import check_plan


@dataclass(frozen=True)
class Assign:
    name: ClassVar[str] = "assign"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        context = graph.context
        ids = [operator.id for operator in graph.operators(Kind.ADJUSTABLE)]
        # Unused entries of the plan may belong to graphs that are compiled later. An evaluation
        # graph may lack operators of training, and a graph without adjustable operators is not a
        # model.
        complete = context.complete and context.training and bool(ids)
        check_plan(context.plan, ids, complete, context.earlier_operators, context.modules)
        unasked: list[Operator] = []
        for operator in graph.operators():
            if operator.kind is not Kind.ADJUSTABLE or operator.note.pinned:
                continue
            if _assign(operator.graph, operator):
                unasked.append(operator)
        give_way(graph, unasked)


def _assign(graph: PrecisionGraph, operator: Operator) -> bool:
    """Assign the operator's precision; return whether it is the device's default."""
    choice, context = graph.context.plan.precision_for(operator.id), graph.context
    owned = format_of(graph.value(operator.node)) or FP32
    region = operator.note.autocast
    if choice is None:
        operator.decide(owned, "the plan does not name it: it stays as the model wrote it")
    elif region == "off" and not choice.explicit:
        reason = "the model disables autocast here, and the plan does not name the operator"
        operator.decide(owned, reason)
    elif isinstance(region, Precision) and context.automatic:
        operator.decide(region, "the model's autocast region")
    elif (
        region is None
        and not choice.explicit
        and stays(owned, row_on(context.device, choice.precision), context.automatic)
    ):
        operator.decide(owned, f"its format in the model is {owned}, which no default changes")
    elif context.automatic:
        reason = "no precision was requested, and this is the default of the device"
        operator.decide(choice.precision, reason)
        return True
    else:
        skip = context.skips_unprofitable and not choice.explicit
        operator.decide(choice.precision, choice.reason, skip_unprofitable=skip)
    return False


_WIDE = 32


def give_way(graph: PrecisionGraph, unasked: Iterable[Operator]) -> None:
    """Widen operators with the device's default precision, `unasked`, to FP32 if as fast."""
    default = {op.node: op for op in unasked if _precision(op).bits < _WIDE}
    reasons = {node: op.slower(_precision(op)) for node, op in default.items()}
    small = {node: why for node, why in reasons.items() if why is not None}
    if not small:
        return
    joins = _Joins()
    joins.sweep(graph)
    # An FP32 result promotes what it is combined with, so operators with joined results are decided
    # as a group. A group stays narrow because of a product that is large enough, an operator with a
    # requested precision, or an operator without a weight that reads from a narrow group.
    paying: dict[fx.Node, str] = {}
    for node, reads in joins.narrow.items():
        before = next((paying[root] for root in map(joins.root, reads) if root in paying), None)
        op = default.get(node)
        if op is None or (op.row is not None and op.row.scaled and node not in small):
            name = node.name
            if node in node_metadata.NOTE:
                name = str(node_metadata.NOTE[node].id)
            paying.setdefault(joins.root(node), name)
        elif before is not None and node not in small:
            paying.setdefault(joins.root(node), before)
    wide = {joins.root(node) for node in small} - paying.keys()
    pairs = ((read, node) for node, reads in joins.narrow.items() for read in reads)
    groups = nx.Graph((joins.root(read), joins.root(node)) for read, node in pairs)
    narrow = paying.keys() & groups
    others = groups.subgraph({*groups} - narrow.union(*map(groups.neighbors, narrow)) | wide)
    wide.update(*(nx.node_connected_component(others, root) for root in wide & others.nodes))
    for node, op in default.items():
        root, fmt = joins.root(node), _precision(op)
        if root in wide:
            why = small.get(node, f"its neighbours are too small for {fmt} to be faster")
            but = f"{why}, so it runs in {FP32}"
            op.update(precision=FP32, instead=but, reason=f"{op.note.reason}; {but}")
        elif node in small:
            neighbours = f"its result is used in {fmt} by {paying[root]}"
            op.update(reason=f"{op.note.reason}; {small[node]}, but {neighbours}, so it stays")


def _precision(operator: Operator) -> Precision:
    assert operator.precision is not None, "it was assigned"
    return operator.precision


@dataclass
class _Joins:
    """Groups of 16-bit results that operators join by promotion, such as an addition.

    `narrow` has the nodes that produce 16-bit values themselves, in topological order, each with
    the producers of the narrow values that it reads.
    """

    narrow: dict[fx.Node, list[fx.Node]] = field(default_factory=dict)
    _formats: dict[fx.Node, Precision | None] = field(default_factory=dict)
    _sources: dict[fx.Node, fx.Node] = field(default_factory=dict)
    """A 16-bit producer for each narrow node that derives from it."""
    _groups: UnionFind = field(default_factory=UnionFind)

    def root(self, node: fx.Node) -> fx.Node:
        """Return the representative of the group that a narrow producer belongs to."""
        return cast(fx.Node, self._groups[node])

    def sweep(self, graph: PrecisionGraph) -> None:
        """Propagate formats as the cascade does, given the assigned precisions."""
        for node in graph.nodes:
            for body in node_metadata.bodies(node):
                for inside, outside in operands(node, body):
                    if isinstance(outside, fx.Node):
                        self._hand_on(inside, outside)
                self.sweep(body)
            if node.op == "placeholder" and node in self._formats:
                continue
            note = node_metadata.NOTE.get(node)
            if note is None:
                source = handed_on(graph, node, graph.context.automatic)
                if source is not None and source in self._formats:
                    self._hand_on(node, source)
                else:
                    self._begin(node, format_of(graph.value(node)))
            elif note.kind is Kind.ADJUSTABLE:
                self._begin(node, format_of(graph.value(node)) and note.precision)
                if node in self.narrow:
                    sources = map(self._sources.get, node.all_input_nodes)
                    self.narrow[node] = [source for source in sources if source is not None]
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
        if rule.promotes:
            self._groups.union(*sources)
