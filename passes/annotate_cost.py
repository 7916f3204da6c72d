"""Operator costs as expressions of the graph's symbolic sizes, valid for every batch size.

Invariant: each cast of the lowered graph is charged to one operator, and the sum over the operators
is the cost of the graph, without fusion and rematerialization in the inner compiler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.cost_algebra import Cost, Work
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.graph.operator_costs import Costing, flops_of, size_in
from qsync_fx.passes.pass_base import Scope


@dataclass(frozen=True)
class AnnotateCost:
    name: ClassVar[str] = "annotate_cost"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        for operator, cost in costed(graph, graph.costing):
            operator.update(cost=cost)


def costed(graph: PrecisionGraph, costing: Costing) -> list[tuple[Operator, Cost]]:
    """Return the operators of a graph with assigned precisions, each with its cost."""
    operators = graph.operators()
    costs = costing.of({operator.id: OperandState.of(operator.note) for operator in operators})
    return [(operator, costs.get(operator.id) or _moved(operator)) for operator in operators]


def _moved(operator: Operator) -> Cost:
    """Return the cost of an inserted operator; zero for one whose body is charged itself."""
    node, graph = operator.node, operator.graph
    if node_metadata.bodies(node):
        return Cost()
    nodes = (*node.all_input_nodes, node)
    return Cost(
        Work(
            flops_of(graph, node),
            sum((size_in(graph.value(used), operator.precision) for used in nodes), start=0),
        )
    )
