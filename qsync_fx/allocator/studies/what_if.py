"""What if operators had other formats: `what_if`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.judge import judged
from qsync_fx.allocator.studies.one_step import check_adjustable, open_class
from qsync_fx.errors import PlanError


def what_if(answer: Answer, changes: Mapping[str, str], device: str | None = None) -> Answer:
    """Returns the answer with other formats for some operators, which may exceed limits, and says so.

    Args:
        answer: what was found.
        changes: formats by the ids of operators.
        device: the class of devices; may be left out where one is open to choice.

    Raises:
        PlanError: no plan decides on an operator, or it cannot have the format.
    """
    problem, name = answer.problem, open_class(answer, device)
    part = problem.classes[name]
    for operator, fmt in changes.items():
        check_adjustable(answer, name, operator)
        if fmt not in part.formats:
            do = f"ask for one of {', '.join(part.choices[operator])}"
            raise PlanError(f"plans for {name} do not ask for {fmt!r}", where=f"operator {operator}", do=do)
    plans = {**answer.plans, name: {**answer.plans[name], **changes}}
    found = judged(problem, plans)
    over = found.exceeds(problem)
    notes = (Note(NoteKind.UNFIT, numbers=over),) if over else ()
    return replace(
        answer, plans=plans, judged=found, bound=answer.bound, took=0.0, rounds=(), notes=notes, trials=(), ran=None
    )
