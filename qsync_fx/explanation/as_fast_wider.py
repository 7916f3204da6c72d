"""Which operators that nobody named run in a format that is not faster at their shape: the option "where_faster" leaves them wider.

Invariant: it asks what that option would ask, of the graph as the model wrote it, and decides and changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping

from qsync_fx.devices import support
from qsync_fx.explanation.explanation import Explained
from qsync_fx.explanation.replan import WRITTEN, Replanned
from qsync_fx.graph import Operator
from qsync_fx.ops import Kind
from qsync_fx.plan import Plan
from qsync_fx.plan.opid import OpId
from qsync_fx.precision import Precision


def as_fast_wider(part: Explained | Replanned) -> Mapping[OpId, str]:
    """Returns the operators of a graph that the option would leave in a wider format, each with the reason; none where it has no say."""
    options = part.context.options
    if options.automatic or options.where_faster or options.exact:
        return {}
    written = {operator.id: operator for operator in _written(part)}
    found = {}
    for operator in part.operators:
        fmt, before = operator.precision, written.get(operator.id)
        if (
            operator.kind is not Kind.ADJUSTABLE
            or fmt is None
            or before is None
            or _kept(operator, before, part.context.plan)
        ):
            continue
        # Of a format without a unit a line of the explanation tells, and who asks for one seldom does for speed.
        native = support(part.context.device, fmt).how != "simulated"
        if native and (why := before.slower(fmt)) is not None:
            found[operator.id] = why
    return found


def _written(part: Explained | Replanned) -> list[Operator]:
    """Before they are lowered: what is asked of a shape is asked of torch's own operators."""
    graph = part.written if isinstance(part, Replanned) else part.snapshots.graphs[WRITTEN]
    return graph.operators(Kind.ADJUSTABLE)


def _kept(operator: Operator, before: Operator, plan: Plan) -> bool:
    """Whether an operator runs otherwise than a plan says of all: what the plan, a pass or the model names is obeyed."""
    choice, note = plan.precision_for(operator.id), operator.note
    # A region of autocast gives way to a plan, whatever plan the graph was written under.
    held = None if isinstance(note.autocast, Precision) else before.held
    return (
        choice is None
        or choice.explicit
        or note.pinned
        or note.planned is not choice.precision
        or note.precision is held
    )
