"""Classification of operators as adjustable, dependent or fixed.

Invariant: every operator has a kind and a reason, and the row of a product with a weight names the
weight. An operator without a row is fixed, and counted in `graph.unknown`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qsync_fx.graph import Operator, PrecisionGraph, node_metadata
from qsync_fx.graph.alias_analysis import in_place
from qsync_fx.graph.fx_utils import target_name
from qsync_fx.graph.graph import copied
from qsync_fx.graph.operand_formats import Origins, with_weight
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope
from qsync_fx.torch_internals import HigherOrderOperator


@dataclass(frozen=True)
class Classify:
    name: ClassVar[str] = "classify"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        for part in graph.walk():
            origins = Origins(part)
            for operator in part.own_operators():
                classify(operator, origins)
        graph.written = copied(graph)


def classify(operator: Operator, origins: Origins | None = None) -> None:
    """Set one operator's kind and the reason; `origins` avoids computing the graph's again."""
    graph, node, row = operator.graph, operator.node, operator.row
    if opaque := node_metadata.OPAQUE.get(node):
        operator.update(kind=Kind.FIXED, reason=opaque)
    elif isinstance(node.target, HigherOrderOperator):
        operator.update(kind=Kind.FIXED, reason=_higher_order(node_metadata.bodies(node)))
    elif row is None:
        name = target_name(node)
        graph.unknown[name] = graph.unknown.get(name, 0) + 1
        reason = f"{name} is not in the operator table: FP32 in, FP32 out"
        operator.update(kind=Kind.FIXED, reason=reason)
    elif row.kind is Kind.ADJUSTABLE and in_place(node):
        reason = "it writes in place, into a tensor whose dtype does not change"
        operator.update(kind=Kind.FIXED, reason=reason)
    else:
        row = with_weight(graph, node, row, origins or Origins(graph))
        operator.update(kind=row.kind, reason=row.reason, row=row)


def _higher_order(bodies: tuple[PrecisionGraph, ...]) -> str:
    if bodies:
        return "a higher-order operator: the operators of its body follow the plan"
    return "a higher-order operator whose body stays as the model wrote it"
