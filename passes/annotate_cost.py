"""What each operator costs, as expressions of the graph's symbolic sizes.

Invariant: costs follow from shapes and formats alone, so they hold for every batch size that the graph is compiled for. Each cast of the
lowered graph is charged to one operator, and the sum over operators is the cost of the graph. What the inner compiler fuses, or computes
again rather than keep it, is its own affair.
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
    """Returns the operators of a graph whose states are decided, each with its cost."""
    operators = graph.operators()
    costs = costing.of({operator.id: OperandState.of(operator.note) for operator in operators})
    return [(operator, costs.get(operator.id) or _moved(operator)) for operator in operators]


def _moved(operator: Operator) -> Cost:
    """The cost of a node that a pass has put in, and the model never wrote: what it reads and writes. That of a body is its operators'."""
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
