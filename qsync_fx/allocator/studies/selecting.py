"""Which operators are meant where an answer is asked about: one by its id, or several by a pattern, as in plans."""

from __future__ import annotations

from qsync_fx.allocator.answer import Answer
from qsync_fx.errors import PlanError, nearest
from qsync_fx.plan.opid import OpId


def open_class(answer: Answer, device: str | None) -> str:
    """Returns the class of devices that is meant; raises `PlanError` where that cannot be told."""
    known = answer.problem.open
    if device is None and len(known) == 1:
        return known[0]
    if device is None:
        what = f"plans of {len(known)} classes of devices were chosen"
        raise PlanError(what, where="device", do=f"name one: {', '.join(known)}")
    if device not in known:
        raise PlanError(f"no plan was chosen for devices {device!r}", where="device", do=nearest(device, known))
    return device


def selected(answer: Answer, which: str, device: str | None = None) -> list[str]:
    """Returns the ids of the operators that are meant, those that a plan decides on.

    Args:
        answer: what was found.
        which: an id, or a pattern of modules or operators.
        device: the class of devices; may be left out where one is open to choice.

    Raises:
        PlanError: no plan decides on the operator, or nothing is meant.
    """
    part = answer.problem.classes[open_class(answer, device)]
    if which in part.choices:
        return [which]
    if which in part.graph.places:
        kind = part.graph.operator(which).kind
        do = "ask for one of kind adjustable, such as those that it reads; qsync inspect lists them"
        raise PlanError(f"no plan decides on this operator, which is {kind}", where=f"operator {which}", do=do)
    found = [operator for operator in part.choices if OpId.parse(operator).matches(which)]
    if not found:
        what = f"the model has no operator {which!r} that a plan decides on, and none that this selects"
        raise PlanError(what, do=nearest(which, part.choices))
    return found
