"""Tables of what is asked of an answer: allocators side by side, an operator's formats, a plan beside another one, a front.

Invariant: every number is one that the values hold; differences have a sign.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.allocator.answer import Answer
from qsync_fx.allocator.judging.judge import Judged
from qsync_fx.allocator.studies import Compared, Front, OneStep
from qsync_fx.report.fitted import Fitted
from qsync_fx.report.numbers import duration, short
from qsync_fx.report.text import table_of


def comparison_table(compared: Sequence[Compared]) -> RenderableType:
    """Returns allocators side by side, in the order in which they were asked; those that exceed limits say which."""
    answers = [one.answer for one in compared if one.answer is not None]
    classes = list(answers[0].judged.classes) if answers else []
    of_classes = [f"{what} {name}" for name in classes for what in ("waiting", "memory")]
    columns = ["allocator", "a step", "samples/s", *of_classes, "variance", "gap", "found in", "limits"]
    table = table_of(columns, right=columns[1:-1])
    for one in compared:
        if one.answer is None:
            found = one.error.what if one.error is not None else ""
            table.add_row(Text(one.allocator), *[""] * (len(columns) - 2), Text(f"none: {found}"))
        else:
            table.add_row(Text(one.allocator), *map(Text, _compared(one, one.answer)))
    return Fitted(table)


def _compared(one: Compared, answer: Answer) -> list[str]:
    judged = answer.judged
    cells = [duration(judged.seconds), _samples(answer)]
    for figures in judged.classes.values():
        cells += [duration(figures.waiting), _bytes(figures.peak_bytes)]
    gap = "" if one.gap is None else f"{one.gap:.2%}"
    return [*cells, f"{judged.variance:.4g}", gap, f"{answer.took:.2f} s", _limits(judged.exceeds(answer.problem))]


def steps_table(steps: Sequence[OneStep]) -> RenderableType:
    """Returns the formats of an operator on a class of devices, and why it has the one that it has."""
    columns = ["format", "a step", "computing", "memory", "variance", "why not"]
    table = table_of(columns, right=columns[1:-1])
    for step in steps:
        numbers = (_more(step.seconds, duration), _more(step.computing, duration), _more(step.peak_bytes, _size))
        why = str(step.why) + (f": {_limits(step.exceeds)}" if step.exceeds else "")
        table.add_row(Text(step.fmt), *numbers, _more(step.variance, "{:.4g}".format), Text(why))
    return Group(Text(f"{steps[0].operator} on {steps[0].device}; what other formats would change:"), table)


def changes_table(before: Answer, after: Answer) -> RenderableType:
    """Returns what a plan costs beside another one, and what changes from the first to the second."""
    table = table_of(["", "before", "after", "change"], right=["before", "after", "change"])
    for name, (first, second, shown) in _figures(before.judged, after.judged).items():
        change = _more(None if first is None or second is None else second - first, shown)
        table.add_row(Text(name), *("?" if value is None else shown(value) for value in (first, second)), change)
    over = after.judged.exceeds(after.problem)
    return Group(table, Text(f"exceeds limits: {_limits(over)}" if over else "all limits are kept"))


def front_table(front: Front) -> RenderableType:
    """Returns the points of a front from the fastest on, then uniform plans, then the one that was chosen."""
    judged = front.points[0].judged
    columns = ["plan", "a step", "variance", *(f"memory {name}" for name in judged.classes), "limits"]
    table = table_of(columns, right=columns[1:-1])
    named = [(f"{at + 1}", answer) for at, answer in enumerate(front.points)]
    named += [(f"uniform {fmt}", answer) for fmt, answer in front.uniform.items()]
    named += [("chosen", front.chosen)] if front.chosen is not None else []
    for name, answer in named:
        peaks = (_bytes(figures.peak_bytes) for figures in answer.judged.classes.values())
        limits = _limits(answer.judged.exceeds(answer.problem))
        table.add_row(
            Text(name), duration(answer.judged.seconds), f"{answer.judged.variance:.4g}", *peaks, Text(limits)
        )
    return Fitted(table)


Shown = Callable[[float], str]


def _figures(before: Judged, after: Judged) -> Mapping[str, tuple[float | None, float | None, Shown]]:
    found: dict[str, tuple[float | None, float | None, Shown]] = {
        "a step": (before.seconds, after.seconds, duration),
        "variance": (before.variance, after.variance, "{:.4g}".format),
    }
    for name, first in before.classes.items():
        second = after.classes[name]
        found[f"computing {name}"] = (first.computing, second.computing, duration)
        found[f"waiting {name}"] = (first.waiting, second.waiting, duration)
        found[f"memory {name}"] = (first.peak_bytes, second.peak_bytes, _size)
    return found


def _limits(over: Mapping[str, float]) -> str:
    """Returns by how much limits are exceeded; "" where none is."""
    return ", ".join(f"{what} +{_over(what, by)}" for what, by in over.items())


def _over(what: str, by: float) -> str:
    if what == "variance":
        return f"{by:.4g}"
    return duration(by) if what == "seconds" else _size(by)


def _more(value: float | None, shown: Shown) -> str:
    if value is None:
        return "?"
    text = shown(abs(value)) if value else "-"
    return text if text == "-" else f"{'+' if value > 0 else '-'}{text}"


def _size(nbytes: float) -> str:
    return short(nbytes, "B")


def _bytes(peak: int | None) -> str:
    return "?" if peak is None else _size(peak)


def _samples(answer: Answer) -> str:
    devices = answer.problem.cluster.devices.values()
    batches = [device.batch * device.count for device in devices if device.batch is not None]
    if len(batches) < len(devices) or not answer.judged.seconds:
        return "?"
    return f"{sum(batches) / answer.judged.seconds:.4g}"
