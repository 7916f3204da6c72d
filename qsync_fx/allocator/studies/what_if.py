"""What if operators had other formats: `what_if`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from qsync_fx.allocator.answer import Answer, Note, NoteKind
from qsync_fx.allocator.judging.judge import judged
from qsync_fx.allocator.studies.selecting import open_class, selected
from qsync_fx.errors import PlanError


def what_if(answer: Answer, changes: Mapping[str, str], device: str | None = None) -> Answer:
    """Returns the answer with other formats for some operators, which may exceed limits, and says so.

    Args:
        answer: what was found.
        changes: formats by the ids of operators, or by patterns, as in plans; what is said last wins.
        device: the class of devices; may be left out where one is open to choice.

    Raises:
        PlanError: no plan decides on an operator, or it cannot have the format.
    """
    problem, name = answer.problem, open_class(answer, device)
    part = problem.classes[name]
    asked = dict(answer.plans[name])
    for which, fmt in changes.items():
        operators = selected(answer, which, name)
        if fmt not in part.formats:
            do = f"ask for one of {', '.join(part.choices[operators[0]])}"
            raise PlanError(f"plans for {name} do not ask for {fmt!r}", where=f"operator {operators[0]}", do=do)
        asked |= {operator: part.called(operator, fmt) for operator in operators}
    plans = {**answer.plans, name: asked}
    found = judged(problem, plans, answer.judged.codecs)
    over = found.exceeds(problem)
    notes = (Note(NoteKind.UNFIT, numbers=over),) if over else ()
    return replace(
        answer, plans=plans, judged=found, bound=answer.bound, took=0.0, rounds=(), notes=notes, trials=(), ran=None
    )
