"""Analysis of a planning result: comparison of allocators, single changes, Pareto front, what-if.

All numbers come from `PlanEvaluator`. The `*_table` functions render the results.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.allocator.api import allocators
from qsync_fx.allocator.baselines import Uniform, exceeded
from qsync_fx.allocator.evaluator import TOLERANCE, Evaluation, PlanEvaluator, evaluate_plan
from qsync_fx.allocator.plan_result import Allocator, PlanResult
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
        message = f"no plan was chosen for devices {device!r}"
        raise PlanError(message, where="device", do=nearest(device, available))
    return device


def selected(answer: PlanResult, selected: str, device: str | None = None) -> list[str]:
    """Return the ids of the adjustable operators that an id or a pattern selects.
    Raises:
        PlanError: the operator is not adjustable, or the pattern selects none.
    """
    part = answer.problem.classes[open_class(answer, device)]
    if selected in part.choices:
        return [selected]
    if selected in part.graph.places:
        message = f"no plan decides on this operator, which is {part.graph.operator(selected).kind}"
        do = "name an adjustable operator, such as one that it reads; qsync inspect lists them"
        raise PlanError(message, where=f"operator {selected}", do=do)
    result = [operator for operator in part.choices if OpId.parse(operator).matches(selected)]
    if not result:
        message = f"the model has no operator {selected!r} that a plan decides on"
        raise PlanError(message, do=nearest(selected, part.choices))
    return result


Say = Callable[[str], None]


@dataclass(frozen=True)
class AllocatorComparison:
    """Result of an allocator, and the highest lower bound that any allocator found, if any."""

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
    result = []
    for allocator in requested:
        item = AllocatorComparison(allocator.name, None, None, None)
        try:
            item = replace(item, answer=allocator.allocate(problem))
        except PlanError as error:
            item = replace(item, error=error)
        result.append(item)
        say(allocator.name)
    bounds = [item.answer.bound for item in result if item.answer is not None]
    bound = max((bound for bound in bounds if bound is not None), default=None)
    return [replace(item, bound=bound) for item in result]


class Why(StrEnum):
    """Reason against a format."""

    CHOSEN = "the current format"
    BREAKS = "would exceed a limit"
    WORSE = "would be worse"
    NO_GAIN = "would not be better"
    BETTER = "would be better: the allocator did not find it"


@dataclass(frozen=True)
class SingleChange:
    """Effect of one operator in another format: changed metrics, and their differences."""

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

    Tied operators change together. `operator` is an id, or a pattern that selects one operator.

    Raises:
        PlanError: the class or operator does not exist, or the operator is not adjustable.
    """
    problem, name = answer.problem, open_class(answer, device)
    operators, choices = selected(answer, operator, name), problem.classes[name].choices
    if len(operators) > 1:
        message = f"{operator!r} selects {len(operators)} operators, and one is explained at a time"
        raise PlanError(message, where="operator", do=f"name one: {', '.join(operators[:5])}")
    (operator,) = operators
    together = next((group for group in problem.tied if operator in group), operators)
    evaluator = PlanEvaluator(problem, answer.plans, answer.evaluation.codecs)
    now = evaluator.evaluate()
    result = []
    for fmt in sorted(choices[operator], key=width):
        changed = [op for op in together if fmt in choices[op]]
        for op in changed:
            evaluator.set(name, op, fmt)
        then = evaluator.evaluate()
        for _ in changed:
            evaluator.undo()
        result.append(_change(answer, name, operator, fmt, now, then))
    return result


def _change(
    answer: PlanResult, name: str, operator: str, fmt: str, now: Evaluation, then: Evaluation
) -> SingleChange:
    before, after, more_bytes = now.classes[name], then.classes[name], None
    if before.peak_bytes is not None and after.peak_bytes is not None:
        more_bytes = after.peak_bytes - before.peak_bytes
    exceeds, why = then.exceeds(answer.problem), Why.NO_GAIN
    value, changed = now.value(answer.problem), then.value(answer.problem)
    if answer.plans[name][operator] == fmt:
        why = Why.CHOSEN
    elif exceeds:
        why = Why.BREAKS
    elif changed > value * (1 + TOLERANCE):
        why = Why.WORSE
    elif changed < value * (1 - TOLERANCE):
        why = Why.BETTER
    seconds, variance = then.seconds - now.seconds, then.variance - now.variance
    computing = after.computing - before.computing
    return SingleChange(
        name, operator, fmt, then, seconds, computing, more_bytes, variance, exceeds, why
    )


@dataclass(frozen=True)
class ParetoFront:
    """Plans without a faster plan of equal or less variance, fastest first.

    Uniform plans are for comparison; they can exceed memory limits. So is `chosen`, if given.
    """

    points: tuple[PlanResult, ...]
    uniform: Mapping[str, PlanResult]
    chosen: PlanResult | None = None


def check_points(points: int) -> None:
    """Raise `PlanError` for an invalid number of points."""
    if points < 2:
        message = f"a front cannot have {points} points"
        raise PlanError(message, where="points", do="request at least 2")


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
        points: number of step times to try, both ends included.
        chosen: a plan to show in addition.

    Raises:
        PlanError: no plan fits into memory.
    """
    check_points(points)
    free = replace(problem, seconds=None, variance=None)
    fastest = allocator.allocate(replace(free, least="seconds", variance=float("inf")))
    say("the fastest")
    calmest = allocator.allocate(replace(free, least="variance"))
    say("the least variance")
    result = [fastest, calmest]
    first, last = fastest.evaluation.seconds, calmest.evaluation.seconds
    for index in range(1, points - 1):
        seconds = first + (last - first) * index / (points - 1)
        # Plans exist between both ends. The other points are valid if the allocator misses one.
        with contextlib.suppress(PlanError):
            result.append(allocator.allocate(replace(free, least="variance", seconds=seconds)))
        say(f"{index} of {points - 2}")
    uniform = {fmt: Uniform(fmt).allocate(free) for fmt in uniforms(free)}
    return ParetoFront(tuple(_undominated(result)), uniform, chosen)


def _undominated(results: list[PlanResult]) -> list[PlanResult]:
    saved: list[PlanResult] = []
    for answer in sorted(results, key=lambda it: (it.evaluation.seconds, it.evaluation.variance)):
        if not saved or answer.evaluation.variance < saved[-1].evaluation.variance:
            saved.append(answer)
    return saved


def what_if(
    answer: PlanResult, changes: Mapping[str, str], device: str | None = None
) -> PlanResult:
    """Return the result with other formats for some operators, and a note on exceeded limits.

    `changes` has formats by operator id or pattern, as in plans; later entries override others.

    Raises:
        PlanError: an operator is not adjustable, or plans of the class do not have the format.
    """
    problem, name = answer.problem, open_class(answer, device)
    part = problem.classes[name]
    requested = dict(answer.plans[name])
    for chosen, fmt in changes.items():
        operators = selected(answer, chosen, name)
        if fmt not in part.formats:
            message = f"plans for {name} do not ask for {fmt!r}"
            do = f"use one of {', '.join(part.choices[operators[0]])}"
            raise PlanError(message, where=f"operator {operators[0]}", do=do)
        requested |= {operator: part.called(operator, fmt) for operator in operators}
    plans = {**answer.plans, name: requested}
    evaluation = evaluate_plan(problem, plans, answer.evaluation.codecs)
    notes = exceeded(problem, evaluation)
    return PlanResult(problem, plans, evaluation, answer.allocator, answer.bound, notes=notes)


def comparison_table(compared: Sequence[AllocatorComparison]) -> RenderableType:
    """Return a table of allocators, in order, with the limits that each exceeds."""
    answers = [item.answer for item in compared if item.answer is not None]
    classes = list(answers[0].evaluation.classes) if answers else []
    of_classes = [f"{subject} {name}" for name in classes for subject in ("waiting", "memory")]
    columns = ["allocator", "a step", "samples/s", *of_classes, "variance", "gap", "found in"]
    table = table_of([*columns, "limits"], right=columns[1:])
    for item in compared:
        if item.answer is None:
            reason = getattr(item.error, "what", "")
            cells = [item.allocator, *[""] * (len(columns) - 1), f"none: {reason}"]
        else:
            cells = [item.allocator, *_compared(item, item.answer)]
        table.add_row(*map(Text, cells))
    return Fitted(table)


def _compared(item: AllocatorComparison, answer: PlanResult) -> Iterator[str]:
    evaluation = answer.evaluation
    yield duration(evaluation.seconds)
    samples = answer.problem.cluster.samples
    yield f"{samples / evaluation.seconds:.4g}" if samples and evaluation.seconds else "?"
    for metrics in evaluation.classes.values():
        yield duration(metrics.waiting)
        yield _size(metrics.peak_bytes)
    yield f"{evaluation.variance:.4g}"
    yield "" if item.gap is None else f"{item.gap:.2%}"
    yield f"{answer.took:.2f} s"
    yield _limits(evaluation.exceeds(answer.problem))


def steps_table(steps: Sequence[SingleChange]) -> RenderableType:
    """Return a table of the formats of an operator, with the effect and the reason against each."""
    columns = ["format", "a step", "computing", "memory", "variance", "why not"]
    table = table_of(columns, right=columns[1:-1])
    for step in steps:
        why = ": ".join(filter(None, (step.why, _limits(step.exceeds))))
        changes = [
            _more(step.seconds, duration),
            _more(step.computing, duration),
            _more(step.peak_bytes, _size),
            _more(step.variance, "{:.4g}".format),
        ]
        table.add_row(*map(Text, (step.fmt, *changes, why)))
    title = f"{steps[0].operator} on {steps[0].device}, effect of each format:"
    return Group(Text(title), table)


def changes_table(before: PlanResult, after: PlanResult) -> RenderableType:
    """Return a table of the costs of two plans and their differences."""
    table = table_of(["", "before", "after", "change"], right=["before", "after", "change"])

    def compare(name: str, first: float | None, second: float | None, shown: Shown) -> None:
        cells = ["?", "?", "?"]
        if first is not None and second is not None:
            cells = [shown(first), shown(second), _more(second - first, shown)]
        table.add_row(Text(name), *map(Text, cells))

    old, new = before.evaluation, after.evaluation
    compare("a step", old.seconds, new.seconds, duration)
    compare("variance", old.variance, new.variance, "{:.4g}".format)
    for name, first in old.classes.items():
        second = new.classes[name]
        compare(f"computing {name}", first.computing, second.computing, duration)
        compare(f"waiting {name}", first.waiting, second.waiting, duration)
        compare(f"memory {name}", first.peak_bytes, second.peak_bytes, _size)
    limits = "all limits are met"
    if over := new.exceeds(after.problem):
        limits = f"exceeds limits: {_limits(over)}"
    return Group(table, Text(limits))


def front_table(front: ParetoFront) -> RenderableType:
    """Return a table of the front, fastest first, then uniform plans, then the chosen plan."""
    classes = front.points[0].evaluation.classes
    columns = ["plan", "a step", "variance", *(f"memory {name}" for name in classes), "limits"]
    table = table_of(columns, right=columns[1:-1])
    named = [(f"{index}", answer) for index, answer in enumerate(front.points, 1)]
    named += [(f"uniform {fmt}", answer) for fmt, answer in front.uniform.items()]
    if front.chosen is not None:
        named.append(("chosen", front.chosen))
    for name, answer in named:
        evaluation = answer.evaluation
        table.add_row(
            Text(name),
            duration(evaluation.seconds),
            f"{evaluation.variance:.4g}",
            *(_size(metrics.peak_bytes) for metrics in evaluation.classes.values()),
            Text(_limits(evaluation.exceeds(answer.problem))),
        )
    return Fitted(table)


Shown = Callable[[float], str]


def _limits(over: Mapping[str, float]) -> str:
    """Return the excess over limits as text; "" if all limits are met."""
    shown: Mapping[str, Shown] = {"variance": "{:.4g}".format, "seconds": duration}
    return ", ".join(f"{name} +{shown.get(name, _size)(by)}" for name, by in over.items())


def _more(value: float | None, shown: Shown) -> str:
    """Return a change with its sign; "-" if it is 0, "?" if it is unknown."""
    if value is None:
        return "?"
    text = shown(abs(value))
    if not value or text == "-":
        return "-"
    return f"-{text}" if value < 0 else f"+{text}"


def _size(nbytes: float | None) -> str:
    return "?" if nbytes is None else short(nbytes, "B")
