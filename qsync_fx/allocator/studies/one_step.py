"""Why an operator has its format: what each other one would cost in time, memory and variance, all else as it is.

Invariant: the plan of the answer stays as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from qsync_fx.allocator.answer import Answer
from qsync_fx.allocator.judging.judge import TOLERANCE, Judge, Judged
from qsync_fx.allocator.problem import width
from qsync_fx.allocator.studies.selecting import open_class, selected
from qsync_fx.errors import PlanError


class Why(StrEnum):
    """What speaks against a format."""

    CHOSEN = "this is what it has"
    BREAKS = "would exceed a limit"
    WORSE = "would be worse"
    NO_GAIN = "would win nothing"
    BETTER = "would be better: the allocator did not find it"


@dataclass(frozen=True)
class OneStep:
    """An operator in a format.

    Attributes:
        device: the class.
        operator: its id.
        fmt: the format that is asked for.
        judged: what the plan costs with it.
        seconds, computing, peak_bytes, variance: what it changes: of the step, of the device, of its memory, of the mean gradient.
        exceeds: by how much limits are exceeded.
        why: what speaks against it.
    """

    device: str
    operator: str
    fmt: str
    judged: Judged = field(repr=False)
    seconds: float
    computing: float
    peak_bytes: int | None
    variance: float
    exceeds: Mapping[str, float]
    why: Why


def one_step(answer: Answer, operator: str, device: str | None = None) -> list[OneStep]:
    """Returns the formats that an operator can have on a class of devices, from the narrowest up, the one that it has among them.

    Args:
        answer: what was found.
        operator: its id, or a pattern that selects it alone. One that is tied changes together with those that it is tied to.
        device: the class; may be left out where one is open to choice.

    Raises:
        PlanError: there is no such class or operator, or no plan decides on it.
    """
    problem = answer.problem
    name = open_class(answer, device)
    part = problem.classes[name]
    (operator,) = _one(answer, operator, name)
    together = next((list(group) for group in problem.tied if operator in group), [operator])
    judge = Judge(problem, answer.plans, answer.judged.codecs)
    now = judge.judged()
    found = []
    for fmt in sorted(part.choices[operator], key=width):
        changed = [op for op in together if answer.plans[name][op] != fmt and fmt in part.choices[op]]
        for op in changed:
            judge.set(name, op, fmt)
        then = judge.judged()
        for _ in changed:
            judge.undo()
        found.append(_step(answer, name, operator, fmt, now, then))
    return found


def _one(answer: Answer, operator: str, name: str) -> list[str]:
    """Returns the one operator that is meant; raises `PlanError` where a pattern selects several."""
    found = selected(answer, operator, name)
    if len(found) > 1:
        what = f"{operator!r} selects {len(found)} operators, and one is explained at a time"
        raise PlanError(what, where="operator", do=f"name one: {', '.join(found[:5])}")
    return found


def _step(answer: Answer, name: str, operator: str, fmt: str, now: Judged, then: Judged) -> OneStep:
    before, after = now.classes[name], then.classes[name]
    more = None if before.peak_bytes is None or after.peak_bytes is None else after.peak_bytes - before.peak_bytes
    exceeds = then.exceeds(answer.problem)
    return OneStep(
        name,
        operator,
        fmt,
        then,
        then.seconds - now.seconds,
        after.computing - before.computing,
        more,
        then.variance - now.variance,
        exceeds,
        _why(answer, answer.plans[name][operator] == fmt, now, then, exceeds),
    )


def _why(answer: Answer, chosen: bool, now: Judged, then: Judged, exceeds: Mapping[str, float]) -> Why:
    if chosen:
        return Why.CHOSEN
    if exceeds:
        return Why.BREAKS
    before, after = now.value(answer.problem), then.value(answer.problem)
    if after > before * (1 + TOLERANCE):
        return Why.WORSE
    return Why.BETTER if after < before * (1 - TOLERANCE) else Why.NO_GAIN
