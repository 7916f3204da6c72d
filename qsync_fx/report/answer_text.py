"""What `print(answer)` shows: the step, the classes of devices, operators by format, and what to know about the plan.

Invariant: every number is one that the answer holds, and every sentence is of the kind of a note.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.allocator.problem import width as width_of
from qsync_fx.report.fitted import Fitted
from qsync_fx.report.numbers import duration, short
from qsync_fx.report.text import plain, table_of

if TYPE_CHECKING:
    from qsync_fx.allocator.answer import Answer, Note

_SHOWN = 5


def answer_text(answer: Answer, width: int | None = None) -> str:
    """Returns an answer as plain text, fitted to a width where one is given."""
    return plain(answer_table(answer), width)


def answer_table(answer: Answer) -> RenderableType:
    """Returns an answer for a rich console."""
    lines = (*_coding(answer), *_trials(answer), *_conditions(answer), *_notes(answer))
    return Group(*map(Text, _head(answer)), _classes(answer), *map(Text, lines))


def _head(answer: Answer) -> list[str]:
    judged, problem = answer.judged, answer.problem
    limit = "" if problem.seconds is None else f" of {duration(problem.seconds)} allowed"
    found = [f"{duration(judged.seconds)} a step{limit}, variance {judged.variance:.4g}"]
    known = "no bound is known" + (" of a plan as it ran" if answer.ran is not None else "")
    if answer.bound is not None:
        unit = f"{answer.bound:.4g}" if problem.least == "variance" else duration(answer.bound)
        known = f"no plan has a {problem.least if problem.least == 'variance' else 'step'} below {unit}, gap {answer.gap:.2%}"
    rounds = f" in {len(answer.rounds)} rounds" if answer.rounds else ""
    return [*found, f"{answer.allocator}: {known}; {answer.took:.2f} s{rounds}"]


def _classes(answer: Answer) -> RenderableType:
    formats = sorted({fmt for asked in answer.plans.values() for fmt in asked.values()}, key=width_of)
    columns = ["devices", "count", "computing", "waiting", "sending", "memory", "variance", *formats]
    table = table_of(columns, right=columns[1:])
    for name, figures in answer.judged.classes.items():
        limit = answer.problem.classes[name].memory
        peak = "?" if figures.peak_bytes is None else short(figures.peak_bytes, "B")
        counts = Counter(answer.plans[name].values())
        table.add_row(
            Text(name),
            str(answer.problem.cluster.devices[name].count),
            *map(duration, (figures.computing, figures.waiting, figures.sending)),
            peak if limit is None else f"{peak} of {short(limit, 'B')}",
            f"{figures.variance:.4g}",
            *(str(counts[fmt] or "-") for fmt in formats),
        )
    return Fitted(table)


def _coding(answer: Answer) -> Iterator[str]:
    """Which codecs gradients go in, where there was a choice."""
    judged, coding = answer.judged, answer.problem.coding
    if coding is None:
        return
    counts = Counter(judged.codecs)
    kinds = ", ".join(f"{counts[codec]} in {codec}" for codec in coding.codecs if counts[codec])
    yield f"buckets of gradients: {kinds}; codecs add {judged.coding:.4g} of the variance"
    yield f"how fast they code is {coding.rates.source}"


def _trials(answer: Answer) -> Iterator[str]:
    """What came out where plans were run, round by round."""
    count = len(answer.trials)
    alone = " by itself" if answer.problem.cluster.ranks > 1 else ""
    for at, trials in enumerate(answer.trials, 1):
        for trial in trials:
            off = (trial.measured - trial.foreseen) / trial.foreseen if trial.foreseen else 0.0
            unknown = f", {trial.interpolated} operators interpolated before" if trial.interpolated else ""
            limited = answer.problem.classes[trial.device].memory is not None and trial.more_bytes > 0
            held = f", held {short(trial.more_bytes, 'B')} more than foreseen" if limited else ""
            which = "this plan" if at == answer.ran else "another plan"
            yield (
                f"{trial.device} ran {which}{alone} in round {at} of {count}: {duration(trial.foreseen)} foreseen, "
                f"{duration(trial.measured)} measured ({off:+.1%}){held}{unknown}"
            )


def _conditions(answer: Answer) -> Iterator[str]:
    yield from (
        f"{name}: measured with {one.conditions}" for name, one in answer.problem.classes.items() if one.conditions
    )


def _notes(answer: Answer) -> Iterator[str]:
    by_kind: dict[tuple[str, str], list[Note]] = {}
    for note in answer.notes:
        by_kind.setdefault((note.kind, note.device), []).append(note)
    for (kind, device), notes in by_kind.items():
        where = f"{device}: " if device else ""
        details = [_detail(note) for note in notes]
        shown = [detail for detail in details if detail][:_SHOWN]
        more = f" and {len(details) - len(shown)} more" if shown and len(details) > len(shown) else ""
        yield f"{where}{kind}" + (f": {'; '.join(shown)}{more}" if shown else "")


def _detail(note: Note) -> str:
    numbers = ", ".join(_number(note, name, value) for name, value in note.numbers.items())
    return " ".join(part for part in (note.operator, "/".join(note.formats), numbers) if part)


def _number(note: Note, name: str, value: float) -> str:
    """Returns a number of a note with its name, in its unit; a limit has that of what it limits."""
    meant = next(iter(note.numbers)) if name in ("limit", "of a step of") else name
    if name.startswith("seconds"):
        return f"{duration(value)}{name.removeprefix('seconds')}"
    if meant.startswith("seconds"):
        return f"{name} {duration(value)}"
    if meant.startswith("memory"):
        return f"{name} {short(value, 'B')}"
    if meant == "share":
        return f"{value:.1%}"
    return f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}"
