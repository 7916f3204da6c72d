"""Result of an allocator: plans, their evaluation, a lower bound, notes and trials.

`PlanResult` is immutable; `print` shows a summary that is derived from its fields. `PredictedCost`
stores the predicted cost in the notes of a plan, so that a training run can compare itself with it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from rich.console import Group, RenderableType
from rich.text import Text

from qsync_fx.allocator.evaluator import DeviceMetrics, Evaluation
from qsync_fx.allocator.problem import Plans, Problem, width as width_of
from qsync_fx.errors import PlanError, nearest
from qsync_fx.formatting import duration, short
from qsync_fx.plan.cluster_plan import ClusterPlan, between_nodes
from qsync_fx.plan.plan import Plan
from qsync_fx.serialization.schema import Path
from qsync_fx.text_tables import Fitted, plain, table_of

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile


@dataclass(frozen=True)
class PredictedCost:
    """Predicted cost of a plan on a device, stored in the plan's notes; None for unknown values.

    Plans with no such notes, or notes from another author, are valid.

    Attributes:
        computing: computing seconds per step.
        peak: peak memory of a step in bytes, parameters and optimizer state included.
        memory: memory limit in bytes.
    """

    computing: float | None = None
    peak: float | None = None
    memory: float | None = None

    @classmethod
    def of(cls, figures: DeviceMetrics, memory: float | None) -> PredictedCost:
        return cls(figures.computing, figures.peak_bytes, memory)

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> PredictedCost:
        """Return the cost that the notes of a plan contain."""
        return cls(**{part.name: _number(notes.get(part.name, "")) for part in fields(cls)})

    def notes(self) -> dict[str, str]:
        """Return the known values as notes."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: f"{value:.9g}" for name, value in values.items() if value is not None}


def _number(text: str) -> float | None:
    try:
        result = float(text)
    except ValueError:
        return None
    return result if 0 < result < float("inf") else None


AGREES: Final = 0.02
"""Relative tolerance within which a prediction agrees: two compilations of a plan differ by it."""


class PlanNoteKind(StrEnum):
    """Kind of a note, with its text."""

    NOT_FASTER = "a narrower format is not faster"
    STOPPED = "the search was stopped before it was done"
    UNFIT = "the plan exceeds a limit"
    BATCH = "trains with a batch in proportion to its speed"
    JOINS = "the device makes the run faster"
    DOES_NOT_HELP = "the device does not make the run faster"
    BINDS = "the plan comes near to a limit; allow more, and it may be better"
    RECKONED = "the linear program, which proves nothing here as it takes memory and neighbours from plans like the one found, says"
    KEEPS = "trains in its widest format alone, as the quickest class"
    WAITS = "waits for gradients, which codecs would make smaller; allow some, and it will be seen whether they pay"
    LEAVES = "planned on as slower than it is, so that others need not wait where a step takes longer than is foreseen"
    NOT_SENT = "one device sends no gradients, so that codecs have nothing to do"
    ONE_NODE = "all ranks share one node, inside of which gradients go in FP32, so that codecs have nothing to do"
    BETWEEN_NODES = (
        "codecs are foreseen between nodes alone, as compress(..., hierarchical=True) has it"
    )
    UNEVEN = "nodes have different numbers of ranks, so that codecs are foreseen between all ranks, and not between nodes alone"
    BY_HOST = "gradients in codecs go by way of the GPU's host, over gloo, which is what is foreseen of them"
    LEFT_OUT = "left out, as how much it disturbs gradients is not known"
    HAS_NOT = "left out, as these devices do not compute in it, or were not measured in it"
    UNSETTLED = "what is foreseen and what is measured still differ; measure more turns, on a machine that does nothing else"


@dataclass(frozen=True)
class PlanNote:
    """Remark on a plan.

    Attributes:
        kind: kind of the remark.
        device: device class; "" for all.
        operator: operator id; "" for none.
        formats: formats concerned.
        numbers: supporting values, by name.
    """

    kind: PlanNoteKind
    device: str = ""
    operator: str = ""
    formats: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class SolverIteration:
    """One solve of an allocator's own model, and the evaluation of its plan.

    Attributes:
        evaluation: metrics of the plan by `PlanEvaluator`.
        bound: lower bound of the objective within the allocator's model.
        fits: whether the plan meets all limits by `PlanEvaluator`.
        learned: whether the evaluation revealed costs that the model lacked.
    """

    evaluation: Evaluation
    bound: float
    fits: bool
    learned: bool


@dataclass(frozen=True)
class Trial:
    """Measured run of a plan on a local device.

    Attributes:
        device: device class.
        foreseen: predicted computing seconds per step.
        measured: measured computing seconds per step.
        spread: median deviation of steps, relative to `measured`.
        interpolated: number of operators with no measurement in the plan's states before the run.
        more_bytes: measured minus predicted peak memory; 0 if not measured.
    """

    device: str
    foreseen: float
    measured: float
    spread: float
    interpolated: int
    more_bytes: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the difference is within `AGREES` or the spread of the steps."""
        return abs(self.foreseen - self.measured) <= max(AGREES, self.spread) * self.measured


@dataclass(frozen=True)
class PlanResult:
    """Plans that an allocator chose, with their evaluation.

    Codecs are in `evaluation` by bucket, and in `codecs` by parameter.

    Attributes:
        problem: the planning problem.
        plans: format of each operator, for all classes.
        evaluation: metrics of the plans.
        allocator: name of the allocator.
        bound: lower bound of the objective over all plans by `PlanEvaluator`; None if unknown.
        took: runtime of the allocator in seconds.
        iterations: iterations of the solver; empty for allocators that only call the evaluator.
        notes: remarks on the plan.
        trials: measured runs of each round, over all local classes.
        ran: round in which this plan was run, from 1; None if it was not.
        profiles: corrected profiles of the local classes.
    """

    problem: Problem = field(repr=False, compare=False)
    plans: Plans = field(repr=False)
    evaluation: Evaluation
    allocator: str
    bound: float | None = None
    took: float = field(default=0.0, compare=False)
    iterations: tuple[SolverIteration, ...] = field(default=(), repr=False)
    notes: tuple[PlanNote, ...] = field(default=(), repr=False)
    trials: tuple[tuple[Trial, ...], ...] = field(default=(), repr=False, compare=False)
    ran: int | None = field(default=None, compare=False)
    profiles: Mapping[str, Profile] = field(
        default_factory=lambda: MappingProxyType({}), repr=False, compare=False
    )

    @property
    def value(self) -> float:
        """Value of the objective."""
        return self.evaluation.value(self.problem)

    @property
    def gap(self) -> float | None:
        """Maximum relative distance of the value to the optimum; None if no bound is known."""
        if self.bound is None:
            return None
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0

    @property
    def fits(self) -> bool:
        """Whether all limits are met."""
        return not self.evaluation.exceeds(self.problem)

    @property
    def codecs(self) -> Mapping[str, str]:
        """Codec of each parameter whose gradient is not sent in FP32, by parameter name."""
        return self.evaluation.sent

    def plan(self, name: str | None = None) -> Plan:
        """Return the plan of a class; by default of the only open class.

        Raises:
            PlanError: the class does not exist, or several classes are open and none is named.
        """
        if name is None:
            if len(self.problem.open) > 1:
                message = f"there are plans of {len(self.problem.open)} classes of devices"
                raise PlanError(message, do=f"name one: {', '.join(self.problem.open)}")
            (name,) = self.problem.open
        if name not in self.plans:
            raise PlanError(f"there are no devices {name!r}", do=nearest(name, self.plans))
        gap = {} if self.gap is None else {"gap": f"{self.gap:.2%}"}
        figures = {
            "seconds": f"{self.evaluation.seconds:.6g}",
            "variance": f"{self.evaluation.variance:.6g}",
            **gap,
        }
        if self.ran is not None:
            figures["plans measured"] = str(len(self.trials))
            owned = [trial for trial in self.trials[self.ran - 1] if trial.device == name]
            figures |= {key: f"{value:.6g}" for item in owned for key, value in _said(item).items()}
        if conditions := self.problem.classes[name].conditions:
            figures["measured with"] = conditions
        foreseen = PredictedCost.of(
            self.evaluation.classes[name], self.problem.classes[name].memory
        ).notes()
        return Plan(
            operators=self.plans[name], notes={"allocator": self.allocator, **figures, **foreseen}
        )

    def to_plans(self) -> dict[str, Plan]:
        """Return the plans of all classes."""
        return {name: self.plan(name) for name in self.plans}

    def as_plan(self) -> Plan | ClusterPlan:
        """Return the value of the option "plan": the plan of a single class without codecs.

        Otherwise it is a cluster plan with the codecs of the gradients.
        """
        plans, size = self.to_plans(), self.problem.cluster.nodes.ranks
        if len(plans) == 1 and not self.codecs:
            return next(iter(plans.values()))
        notes = between_nodes(size) if self.codecs and size > 1 else {}
        return ClusterPlan(plans, notes=notes, codecs=self.codecs)

    def save(self, path: Path) -> None:
        """Write the plan for all ranks to a file atomically; raise `PlanError` on failure."""
        self.as_plan().save(path)

    def text(self, width: int | None = None) -> str:
        """Return the text of `print`, optionally fitted to a width in columns."""

        return answer_text(self, width)

    def __repr__(self) -> str:
        """Return one line for notebooks and debuggers."""
        from qsync_fx.formatting import duration

        gap = "no bound" if self.gap is None else f"gap {self.gap:.2%}"
        devices = ", ".join(
            f"{device.count} {name}" for name, device in self.problem.cluster.devices.items()
        )
        step, variance = duration(self.evaluation.seconds), f"{self.evaluation.variance:.4g}"
        return (
            f"PlanResult({self.allocator}, {step} a step on {devices}, variance {variance}, {gap})"
        )

    def __str__(self) -> str:
        return self.text()


class Allocator(Protocol):
    """Chooser of a plan.

    Attributes:
        name: name for users.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan for a problem.

        Raises:
            PlanError: no plan meets the limits; states the exceeded limits, the excess and a
                remedy.
        """


def _said(trial: Trial) -> dict[str, float]:
    return {"seconds foreseen": trial.foreseen, "seconds measured": trial.measured}


def differing(first: Plans, second: Plans) -> Sequence[tuple[str, str]]:
    """Return the pairs of class and operator that have different formats in two sets of plans."""
    return [
        (name, operator)
        for name, requested in first.items()
        for operator, fmt in requested.items()
        if second[name].get(operator) != fmt
    ]


_SHOWN = 5


def answer_text(answer: PlanResult, width: int | None = None) -> str:
    """Return a result as plain text, optionally fitted to a width in columns."""
    return plain(answer_table(answer), width)


def answer_table(answer: PlanResult) -> RenderableType:
    """Return a result for a rich console."""
    lines = (*_coding(answer), *_trials(answer), *_conditions(answer), *_notes(answer))
    return Group(*map(Text, _head(answer)), _classes(answer), *map(Text, lines))


def _head(answer: PlanResult) -> list[str]:
    evaluation, problem = answer.evaluation, answer.problem
    limit = "" if problem.seconds is None else f" of {duration(problem.seconds)} allowed"
    result = [f"{duration(evaluation.seconds)} a step{limit}, variance {evaluation.variance:.4g}"]
    available = "no bound is known" + (" of a plan as it ran" if answer.ran is not None else "")
    if answer.bound is not None:
        unit = f"{answer.bound:.4g}" if problem.least == "variance" else duration(answer.bound)
        available = f"no plan has a {problem.least if problem.least == 'variance' else 'step'} below {unit}, gap {answer.gap:.2%}"
    iterations = f" in {len(answer.iterations)} iterations" if answer.iterations else ""
    return [*result, f"{answer.allocator}: {available}; {answer.took:.2f} s{iterations}"]


def _classes(answer: PlanResult) -> RenderableType:
    formats = sorted(
        {fmt for requested in answer.plans.values() for fmt in requested.values()}, key=width_of
    )
    columns = [
        "devices",
        "count",
        "computing",
        "waiting",
        "sending",
        "memory",
        "variance",
        *formats,
    ]
    table = table_of(columns, right=columns[1:])
    for name, figures in answer.evaluation.classes.items():
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


def _coding(answer: PlanResult) -> Iterator[str]:
    """Yield lines on the codecs of gradients, if there was a choice."""
    evaluation, coding = answer.evaluation, answer.problem.coding
    if coding is None:
        return
    counts = Counter(evaluation.codecs)
    kinds = ", ".join(f"{counts[codec]} in {codec}" for codec in coding.codecs if counts[codec])
    yield f"buckets of gradients: {kinds}; codecs add {evaluation.coding:.4g} of the variance"
    yield f"how fast they code is {coding.rates.source}"


def _trials(answer: PlanResult) -> Iterator[str]:
    """Yield a line per measured run, round by round."""
    count = len(answer.trials)
    alone = " by itself" if answer.problem.cluster.ranks > 1 else ""
    for index, trials in enumerate(answer.trials, 1):
        for trial in trials:
            off = (trial.measured - trial.foreseen) / trial.foreseen if trial.foreseen else 0.0
            unknown = (
                f", {trial.interpolated} operators interpolated before"
                if trial.interpolated
                else ""
            )
            limited = (
                answer.problem.classes[trial.device].memory is not None and trial.more_bytes > 0
            )
            live = f", held {short(trial.more_bytes, 'B')} more than foreseen" if limited else ""
            selected = "this plan" if index == answer.ran else "another plan"
            yield (
                f"{trial.device} ran {selected}{alone} in round {index} of {count}: {duration(trial.foreseen)} foreseen, "
                f"{duration(trial.measured)} measured ({off:+.1%}){live}{unknown}"
            )


def _conditions(answer: PlanResult) -> Iterator[str]:
    yield from (
        f"{name}: measured with {item.conditions}"
        for name, item in answer.problem.classes.items()
        if item.conditions
    )


def _notes(answer: PlanResult) -> Iterator[str]:
    by_kind: dict[tuple[str, str], list[PlanNote]] = {}
    for note in answer.notes:
        by_kind.setdefault((note.kind, note.device), []).append(note)
    for (kind, device), notes in by_kind.items():
        where = f"{device}: " if device else ""
        details = [_detail(note) for note in notes]
        shown = [detail for detail in details if detail][:_SHOWN]
        more = (
            f" and {len(details) - len(shown)} more" if shown and len(details) > len(shown) else ""
        )
        yield f"{where}{kind}" + (f": {'; '.join(shown)}{more}" if shown else "")


def _detail(note: PlanNote) -> str:
    numbers = ", ".join(_note_number(note, name, value) for name, value in note.numbers.items())
    return " ".join(part for part in (note.operator, "/".join(note.formats), numbers) if part)


def _note_number(note: PlanNote, name: str, value: float) -> str:
    """Return a number of a note with name and unit; a limit has the unit of the limited value."""
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
