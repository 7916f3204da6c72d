"""Analysis of a planning result: comparison of allocators, single changes, Pareto front, what-if.

`compare` runs several allocators on one problem. `single_change` evaluates each other format of an
operator, `what_if` a set of changes, and `pareto` minimizes the variance at several times per step.
The `*_table` functions render the results.

Invariant: all numbers come from `PlanEvaluator`; the given result is not modified.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.allocator.api import allocators
from qsync_fx.allocator.baselines import Uniform
from qsync_fx.allocator.evaluator import TOLERANCE, Evaluation, PlanEvaluator, evaluate_plan
from qsync_fx.allocator.plan_result import Allocator, PlanNote, PlanNoteKind, PlanResult
from qsync_fx.allocator.problem import Problem, uniforms, width
from qsync_fx.errors import PlanError, nearest
from qsync_fx.formatting import duration, short
from qsync_fx.plan.operator_id import OpId
from qsync_fx.text_tables import Fitted, table_of

__all__ = [
    "AllocatorComparison",
    "ParetoFront",
    "SingleChange",
    "compare",
    "pareto",
    "selected",
    "single_change",
    "what_if",
]


def open_class(answer: PlanResult, device: str | None) -> str:
    """Return the open class that is meant; raise `PlanError` if it is unknown or ambiguous."""
    available = answer.problem.open
    if device is None and len(available) == 1:
        return available[0]
    if device is None:
        message = f"plans of {len(available)} classes of devices were chosen"
        raise PlanError(message, where="device", do=f"name one: {', '.join(available)}")
    if device not in available:
        raise PlanError(
            f"no plan was chosen for devices {device!r}",
            where="device",
            do=nearest(device, available),
        )
    return device


def selected(answer: PlanResult, selected: str, device: str | None = None) -> list[str]:
    """Return the ids of the adjustable operators that an id or a pattern selects.

    Args:
        answer: the planning result.
        selected: an id, or a pattern of modules or operators, as in plans.
        device: device class; optional if only one is open to choice.

    Raises:
        PlanError: the operator is not adjustable, or the pattern selects none.
    """
    part = answer.problem.classes[open_class(answer, device)]
    if selected in part.choices:
        return [selected]
    if selected in part.graph.places:
        kind = part.graph.operator(selected).kind
        do = "ask for one of kind adjustable, such as those that it reads; qsync inspect lists them"
        raise PlanError(
            f"no plan decides on this operator, which is {kind}",
            where=f"operator {selected}",
            do=do,
        )
    result = [operator for operator in part.choices if OpId.parse(operator).matches(selected)]
    if not result:
        message = f"the model has no operator {selected!r} that a plan decides on, and none that this selects"
        raise PlanError(message, do=nearest(selected, part.choices))
    return result


Say = Callable[[str], None]


@dataclass(frozen=True)
class AllocatorComparison:
    """Result of an allocator on a problem that several allocators solve.

    Attributes:
        allocator: name of the allocator.
        answer: its result; None if it found no plan.
        error: reason for the failure.
        bound: highest lower bound found by any of the allocators; None if none found a bound.
    """

    allocator: str
    answer: PlanResult | None
    error: PlanError | None
    bound: float | None

    @property
    def gap(self) -> float | None:
        """Maximum relative distance to the optimum; None if unknown, or if limits are exceeded."""
        if self.answer is None or self.bound is None or not self.answer.fits:
            return None
        value = self.answer.value
        return max(0.0, value - self.bound) / value if value > 0 else 0.0


def side_by_side(problem: Problem, more: Sequence[Allocator] = ()) -> list[Allocator]:
    """Return the allocators without arguments, one uniform allocator per format, and `more`."""
    available = allocators()
    formats = [Uniform(fmt) for fmt in uniforms(problem)]
    return [*(available[name] for name in available if name != Uniform().name), *formats, *more]


def compare(
    problem: Problem, requested: Sequence[Allocator], say: Say = lambda name: None
) -> list[AllocatorComparison]:
    """Return the results of the allocators in order; `say` reports each finished one by name."""
    result = list(_each(problem, requested, say))
    bounds = [
        answer.bound for _, answer, _ in result if answer is not None and answer.bound is not None
    ]
    bound = max(bounds, default=None)
    return [AllocatorComparison(name, answer, error, bound) for name, answer, error in result]


def _each(
    problem: Problem, requested: Sequence[Allocator], say: Say
) -> Iterator[tuple[str, PlanResult | None, PlanError | None]]:
    for allocator in requested:
        try:
            yield allocator.name, allocator.allocate(problem), None
        except PlanError as error:
            yield allocator.name, None, error
        say(allocator.name)


class Why(StrEnum):
    """Reason against a format."""

    CHOSEN = "this is what it has"
    BREAKS = "would exceed a limit"
    WORSE = "would be worse"
    NO_GAIN = "would win nothing"
    BETTER = "would be better: the allocator did not find it"


@dataclass(frozen=True)
class SingleChange:
    """Effect of one operator in another format.

    Attributes:
        device: device class.
        operator: operator id.
        fmt: requested format.
        evaluation: metrics of the changed plans.
        seconds: change of the step time.
        computing: change of the computing seconds of the device.
        peak_bytes: change of the device's peak memory.
        variance: change of the variance of the mean gradient.
        exceeds: excess over exceeded limits.
        why: reason against the format.
    """

    device: str
    operator: str
    fmt: str
    evaluation: Evaluation = field(repr=False)
    seconds: float
    computing: float
    peak_bytes: int | None
    variance: float
    exceeds: Mapping[str, float]
    why: Why


def single_change(
    answer: PlanResult, operator: str, device: str | None = None
) -> list[SingleChange]:
    """Return the effect of each format of an operator, narrowest first, the current one included.

    Args:
        answer: the planning result.
        operator: its id, or a pattern that selects only this operator. Tied operators change
            together.
        device: device class; optional if only one is open to choice.

    Raises:
        PlanError: the class or operator does not exist, or the operator is not adjustable.
    """
    problem = answer.problem
    name = open_class(answer, device)
    part = problem.classes[name]
    (operator,) = _one(answer, operator, name)
    together = next((list(group) for group in problem.tied if operator in group), [operator])
    evaluator = PlanEvaluator(problem, answer.plans, answer.evaluation.codecs)
    now = evaluator.evaluate()
    result = []
    for fmt in sorted(part.choices[operator], key=width):
        changed = [
            op for op in together if answer.plans[name][op] != fmt and fmt in part.choices[op]
        ]
        for op in changed:
            evaluator.set(name, op, fmt)
        then = evaluator.evaluate()
        for _ in changed:
            evaluator.undo()
        result.append(_step(answer, name, operator, fmt, now, then))
    return result


def _one(answer: PlanResult, operator: str, name: str) -> list[str]:
    """Return a list with the selected operator; raise `PlanError` if there are several."""
    result = selected(answer, operator, name)
    if len(result) > 1:
        message = f"{operator!r} selects {len(result)} operators, and one is explained at a time"
        raise PlanError(message, where="operator", do=f"name one: {', '.join(result[:5])}")
    return result


def _step(
    answer: PlanResult, name: str, operator: str, fmt: str, now: Evaluation, then: Evaluation
) -> SingleChange:
    before, after = now.classes[name], then.classes[name]
    more = (
        None
        if before.peak_bytes is None or after.peak_bytes is None
        else after.peak_bytes - before.peak_bytes
    )
    exceeds = then.exceeds(answer.problem)
    return SingleChange(
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


def _why(
    answer: PlanResult,
    chosen: bool,
    now: Evaluation,
    then: Evaluation,
    exceeds: Mapping[str, float],
) -> Why:
    if chosen:
        return Why.CHOSEN
    if exceeds:
        return Why.BREAKS
    before, after = now.value(answer.problem), then.value(answer.problem)
    if after > before * (1 + TOLERANCE):
        return Why.WORSE
    return Why.BETTER if after < before * (1 - TOLERANCE) else Why.NO_GAIN


@dataclass(frozen=True)
class ParetoFront:
    """Plans without a faster plan of equal or less variance.

    Attributes:
        points: results, fastest first.
        uniform: uniform plans by format, for comparison; they can exceed memory limits.
        chosen: a plan for comparison, not necessarily on the front.
    """

    points: tuple[PlanResult, ...]
    uniform: Mapping[str, PlanResult]
    chosen: PlanResult | None = None


def check_points(points: int) -> None:
    """Raise `PlanError` for an invalid number of points."""
    if points < 2:
        raise PlanError(
            f"a front of {points} points is none", where="points", do="ask for 2 at least"
        )


def pareto(
    problem: Problem,
    allocator: Allocator,
    points: int = 9,
    chosen: PlanResult | None = None,
    say: Say = lambda name: None,
) -> ParetoFront:
    """Return the Pareto front of step time and variance within the problem's memory limits.

    Args:
        problem: the planning problem; its limits of seconds and variance are ignored.
        allocator: the allocator that finds each point.
        points: number of step times to try, both ends included.
        chosen: a plan to show in addition.
        say: called with a label after each point.

    Raises:
        PlanError: no plan fits into memory.
    """
    check_points(points)
    free = replace(problem, seconds=None, variance=None)
    fastest = allocator.allocate(replace(free, least="seconds", variance=float("inf")))
    say("the fastest")
    calmest = allocator.allocate(replace(free, least="variance"))
    say("that of least variance")
    result = [fastest, calmest]
    first, last = fastest.evaluation.seconds, calmest.evaluation.seconds
    for index in range(1, points - 1):
        seconds = first + (last - first) * index / (points - 1)
        # Plans exist between both ends. If the allocator misses a point, the other points are
        # valid.
        with contextlib.suppress(PlanError):
            result.append(allocator.allocate(replace(free, least="variance", seconds=seconds)))
        say(f"{index} of {points - 2}")
    uniform = {fmt: Uniform(fmt).allocate(free) for fmt in uniforms(free)}
    return ParetoFront(tuple(_undominated(result)), uniform, chosen)


def _undominated(result: list[PlanResult]) -> list[PlanResult]:
    ordered = sorted(
        result, key=lambda answer: (answer.evaluation.seconds, answer.evaluation.variance)
    )
    saved: list[PlanResult] = []
    for answer in ordered:
        if not saved or answer.evaluation.variance < saved[-1].evaluation.variance:
            saved.append(answer)
    return saved


def what_if(
    answer: PlanResult, changes: Mapping[str, str], device: str | None = None
) -> PlanResult:
    """Return the result with other formats for some operators, and a note on exceeded limits.

    Args:
        answer: the planning result.
        changes: formats by operator id or pattern, as in plans; later entries override earlier
            ones.
        device: device class; optional if only one is open to choice.

    Raises:
        PlanError: an operator is not adjustable, or plans of the class do not have the format.
    """
    problem, name = answer.problem, open_class(answer, device)
    part = problem.classes[name]
    requested = dict(answer.plans[name])
    for chosen, fmt in changes.items():
        operators = selected(answer, chosen, name)
        if fmt not in part.formats:
            do = f"ask for one of {', '.join(part.choices[operators[0]])}"
            raise PlanError(
                f"plans for {name} do not ask for {fmt!r}", where=f"operator {operators[0]}", do=do
            )
        requested |= {operator: part.called(operator, fmt) for operator in operators}
    plans = {**answer.plans, name: requested}
    result = evaluate_plan(problem, plans, answer.evaluation.codecs)
    over = result.exceeds(problem)
    notes = (PlanNote(PlanNoteKind.UNFIT, numbers=over),) if over else ()
    return replace(
        answer,
        plans=plans,
        evaluation=result,
        bound=answer.bound,
        took=0.0,
        iterations=(),
        notes=notes,
        trials=(),
        ran=None,
    )


def comparison_table(compared: Sequence[AllocatorComparison]) -> RenderableType:
    """Return a table of allocators, in order, with the limits that each exceeds."""
    answers = [item.answer for item in compared if item.answer is not None]
    classes = list(answers[0].evaluation.classes) if answers else []
    of_classes = [f"{subject} {name}" for name in classes for subject in ("waiting", "memory")]
    columns = [
        "allocator",
        "a step",
        "samples/s",
        *of_classes,
        "variance",
        "gap",
        "found in",
        "limits",
    ]
    table = table_of(columns, right=columns[1:-1])
    for item in compared:
        if item.answer is None:
            result = item.error.what if item.error is not None else ""
            table.add_row(Text(item.allocator), *[""] * (len(columns) - 2), Text(f"none: {result}"))
        else:
            table.add_row(Text(item.allocator), *map(Text, _compared(item, item.answer)))
    return Fitted(table)


def _compared(item: AllocatorComparison, answer: PlanResult) -> list[str]:
    evaluation = answer.evaluation
    cells = [duration(evaluation.seconds), _samples(answer)]
    for figures in evaluation.classes.values():
        cells += [duration(figures.waiting), _bytes(figures.peak_bytes)]
    gap = "" if item.gap is None else f"{item.gap:.2%}"
    return [
        *cells,
        f"{evaluation.variance:.4g}",
        gap,
        f"{answer.took:.2f} s",
        _limits(evaluation.exceeds(answer.problem)),
    ]


def steps_table(steps: Sequence[SingleChange]) -> RenderableType:
    """Return a table of the formats of an operator, with the effect and the reason against each."""
    columns = ["format", "a step", "computing", "memory", "variance", "why not"]
    table = table_of(columns, right=columns[1:-1])
    for step in steps:
        numbers = (
            _more(step.seconds, duration),
            _more(step.computing, duration),
            _more(step.peak_bytes, _size),
        )
        why = str(step.why) + (f": {_limits(step.exceeds)}" if step.exceeds else "")
        table.add_row(Text(step.fmt), *numbers, _more(step.variance, "{:.4g}".format), Text(why))
    return Group(
        Text(f"{steps[0].operator} on {steps[0].device}; what other formats would change:"), table
    )


def changes_table(before: PlanResult, after: PlanResult) -> RenderableType:
    """Return a table of the costs of two plans and their differences."""
    table = table_of(["", "before", "after", "change"], right=["before", "after", "change"])
    for name, (first, second, shown) in _figures(before.evaluation, after.evaluation).items():
        change = _more(None if first is None or second is None else second - first, shown)
        table.add_row(
            Text(name),
            *("?" if value is None else shown(value) for value in (first, second)),
            change,
        )
    over = after.evaluation.exceeds(after.problem)
    return Group(table, Text(f"exceeds limits: {_limits(over)}" if over else "all limits are kept"))


def front_table(front: ParetoFront) -> RenderableType:
    """Return a table of the front, fastest first, then uniform plans, then the chosen plan."""
    evaluation = front.points[0].evaluation
    columns = [
        "plan",
        "a step",
        "variance",
        *(f"memory {name}" for name in evaluation.classes),
        "limits",
    ]
    table = table_of(columns, right=columns[1:-1])
    named = [(f"{index + 1}", answer) for index, answer in enumerate(front.points)]
    named += [(f"uniform {fmt}", answer) for fmt, answer in front.uniform.items()]
    named += [("chosen", front.chosen)] if front.chosen is not None else []
    for name, answer in named:
        peaks = (_bytes(figures.peak_bytes) for figures in answer.evaluation.classes.values())
        limits = _limits(answer.evaluation.exceeds(answer.problem))
        table.add_row(
            Text(name),
            duration(answer.evaluation.seconds),
            f"{answer.evaluation.variance:.4g}",
            *peaks,
            Text(limits),
        )
    return Fitted(table)


Shown = Callable[[float], str]


def _figures(
    before: Evaluation, after: Evaluation
) -> Mapping[str, tuple[float | None, float | None, Shown]]:
    result: dict[str, tuple[float | None, float | None, Shown]] = {
        "a step": (before.seconds, after.seconds, duration),
        "variance": (before.variance, after.variance, "{:.4g}".format),
    }
    for name, first in before.classes.items():
        second = after.classes[name]
        result[f"computing {name}"] = (first.computing, second.computing, duration)
        result[f"waiting {name}"] = (first.waiting, second.waiting, duration)
        result[f"memory {name}"] = (first.peak_bytes, second.peak_bytes, _size)
    return result


def _limits(over: Mapping[str, float]) -> str:
    """Return the excess over limits as text; "" if all limits are met."""
    return ", ".join(f"{subject} +{_over(subject, by)}" for subject, by in over.items())


def _over(description: str, by: float) -> str:
    if description == "variance":
        return f"{by:.4g}"
    return duration(by) if description == "seconds" else _size(by)


def _more(value: float | None, shown: Shown) -> str:
    if value is None:
        return "?"
    text = shown(abs(value)) if value else "-"
    return text if text == "-" else f"{'+' if value > 0 else '-'}{text}"


def _size(nbytes: float) -> str:
    return short(nbytes, "B")


def _bytes(peak: int | None) -> str:
    return "?" if peak is None else _size(peak)


def _samples(answer: PlanResult) -> str:
    devices = answer.problem.cluster.devices.values()
    batches = [device.batch * device.count for device in devices if device.batch is not None]
    if len(batches) < len(devices) or not answer.evaluation.seconds:
        return "?"
    return f"{sum(batches) / answer.evaluation.seconds:.4g}"
