"""Gives every adjustable operator the plan's precision.

Invariant: afterwards each adjustable operator has a precision and the reason for it: the plan's choice, restricted by what the operator
and the device can run. What the model itself says by autocast gives way to an explicit choice for the operator, not to a default. Where
nobody asked, what is as fast in FP32 runs in FP32 (giving_way.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from qsync_fx.devices import row_on
from qsync_fx.devices.format_support import stays
from qsync_fx.formats import FP32, Precision
from qsync_fx.graph import Operator, PrecisionGraph
from qsync_fx.graph.fx_utils import format_of
from qsync_fx.ops import Kind
from qsync_fx.passes.pass_base import Scope
from qsync_fx.passes.widen_small_ops import give_way
from qsync_fx.plan.validation import check_plan


@dataclass(frozen=True)
class Assign:
    name: ClassVar[str] = "assign"
    scope: ClassVar[Scope] = Scope.MODEL

    def __call__(self, graph: PrecisionGraph) -> None:
        _check(graph)
        unasked: list[Operator] = []
        for operator in graph.operators():
            if (
                operator.kind is Kind.ADJUSTABLE
                and not operator.note.pinned
                and _assign(operator.graph, operator)
            ):
                unasked.append(operator)
        give_way(graph, unasked)


def _check(graph: PrecisionGraph) -> None:
    """Raises where the plan is sure to be another model's; what other graphs may still show is decided once they are there."""
    context = graph.context
    ids = [operator.id for operator in graph.operators(Kind.ADJUSTABLE)]
    # Evaluation may leave out what training has, and a graph without operators of a plan's is no model.
    complete = context.complete and context.training and bool(ids)
    check_plan(context.plan, ids, complete, context.seen, context.modules)


def _assign(graph: PrecisionGraph, operator: Operator) -> bool:
    """Gives an operator its precision; returns whether it is the device's default, for which nobody asked."""
    choice = graph.context.plan.precision_for(operator.id)
    owned = format_of(graph.value(operator.node)) or FP32
    explicit = choice is not None and choice.explicit
    skip_unprofitable = graph.context.options.skip_unprofitable and not explicit
    region = operator.note.autocast
    if choice is None:
        operator.decide(owned, "the plan does not name it: it stays as the model wrote it")
    elif region == "off" and not explicit:
        operator.decide(
            owned, "the model disables autocast here, and the plan does not name the operator"
        )
    elif isinstance(region, Precision) and graph.context.automatic:
        operator.decide(region, "the model's autocast region")
    elif (
        not explicit
        and region is None
        and stays(owned, row_on(graph.context.device, choice.precision), graph.context.automatic)
    ):
        operator.decide(owned, f"the model holds it in {owned}, which no default changes")
    elif graph.context.automatic:
        operator.decide(
            choice.precision, "no precision was asked for, and this is the device's default"
        )
        return True
    else:
        operator.decide(choice.precision, choice.reason, skip_unprofitable=skip_unprofitable)
    return False
