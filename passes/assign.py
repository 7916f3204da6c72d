"""Assignment of the plan's precisions to adjustable operators.

Invariant: afterwards each adjustable operator has a precision and the reason for it: the plan's
choice, restricted by the capabilities of the operator and the device. An explicit choice for the
operator overrides the model's autocast region, a default does not. Operators that get the device's
default run in FP32 if that is as fast (widen_small_ops.py).
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
    """Raise if the plan was certainly made for another model.

    Entries that this graph does not use may belong to graphs that are compiled later.
    """
    context = graph.context
    ids = [operator.id for operator in graph.operators(Kind.ADJUSTABLE)]
    # An evaluation graph may lack operators of training, and a graph without adjustable operators
    # is not a model.
    complete = context.complete and context.training and bool(ids)
    check_plan(context.plan, ids, complete, context.seen, context.modules)


def _assign(graph: PrecisionGraph, operator: Operator) -> bool:
    """Assign the operator's precision; return whether it is the device's default."""
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
        operator.decide(owned, f"its format in the model is {owned}, which no default changes")
    elif graph.context.automatic:
        operator.decide(
            choice.precision, "no precision was requested, and this is the default of the device"
        )
        return True
    else:
        operator.decide(choice.precision, choice.reason, skip_unprofitable=skip_unprofitable)
    return False
