"""Result of an allocator: plans, their evaluation, a lower bound, notes and trials."""

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
from qsync_fx.formatting import duration, many, short
from qsync_fx.html_view import HtmlView
from qsync_fx.plan.cluster_plan import TRANSPORT, ClusterPlan, between_nodes
from qsync_fx.plan.plan import Plan
from qsync_fx.serialization.schema import Path
from qsync_fx.text_tables import Fitted, plain, table_of

if TYPE_CHECKING:
    from qsync_fx.profiler.profile import Profile


@dataclass(frozen=True)
class PredictedCost:
    """Predicted cost of a plan on a device, in the plan's notes; None for unknown values.

    The unit of `computing` is seconds per step; `peak` and its limit `memory` are in bytes.
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
    STOPPED = "the time limit of the solver was reached"
    UNFIT = "the plan exceeds a limit"
    BATCH = "the batch size is proportional to the speed"
    PLANNED_BATCH = "the batch size is planned"
    RECOMPUTES = "activations are recomputed, as memory limits the formats or the batch"
    JOINS = "the device makes the run faster"
    DOES_NOT_HELP = "the device does not make the run faster"
    BINDS = "a higher limit may allow a better plan"
    RECKONED = "the certified gap exceeds the goal; for similar plans only, the bound is tighter"
    KEEPS = "this class is the fastest, and trains in its widest format"
    WAITS = "the device waits for gradients"
    LEAVES = "the plan leaves a margin, in case this device is slower than predicted"
    NOT_SENT = "codecs have no effect: a single device sends no gradients"
    ONE_NODE = "codecs have no effect: all ranks share one node, in which gradients are FP32"
    NOT_INSIDE = "codecs inside nodes have no effect: each rank has a node of its own"
    BETWEEN_NODES = "codecs are used between nodes only: compress(..., hierarchical=True)"
    TWO_LEVELS = "codecs are used between nodes and inside them by compress(ddp, plan)"
    UNEVEN = "codecs are used between all ranks, as nodes have different numbers of ranks"
    BY_HOST = "the prediction assumes that coded gradients are sent through host memory, over gloo"
    LEFT_OUT = "formats not used: their effect on the gradients is unknown"
    HAS_NOT = "formats not used: the device does not support them, or they were not measured"
    SUBSET = "cost of training on these devices only"
    NOT_USED = "the plan leaves these devices out, as the others train at a lower cost"
    UNSETTLED = "predicted and measured times still differ; measure longer, on an idle machine"


@dataclass(frozen=True)
class PlanNote:
    """Remark on a plan; `device` and `operator` are "" if it concerns none in particular."""

    kind: PlanNoteKind
    device: str = ""
    operator: str = ""
    formats: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class SolverIteration:
    """One solve of an allocator's own model, and the evaluation of its plan.

    `bound` is valid within that model; `learned` is true if the evaluation revealed new costs.
    """

    evaluation: Evaluation
    bound: float
    fits: bool
    learned: bool


@dataclass(frozen=True)
class Trial:
    """Measured run of a plan on a local device.

    Attributes:
        predicted, measured: computing seconds per step.
        spread: median deviation of steps, relative to `measured`.
        interpolated: number of operators with no measurement in the plan's states before the run.
        more_bytes: measured minus predicted peak memory; 0 if not measured.
    """

    device: str
    predicted: float
    measured: float
    spread: float
    interpolated: int
    more_bytes: int = 0

    @property
    def agrees(self) -> bool:
        """Whether the difference is within `AGREES` or the spread of the steps."""
        return abs(self.predicted - self.measured) <= max(AGREES, self.spread) * self.measured


@dataclass(frozen=True)
class PlanResult(HtmlView):
    """Plans that an allocator chose, with their evaluation.

    Codecs are in `evaluation` by bucket, and in `codecs` by parameter.

    Attributes:
        bound: lower bound of the objective over all plans by `PlanEvaluator`; None if unknown.
        took: runtime of the allocator in seconds.
        iterations: iterations of the solver; empty for allocators that only call the evaluator.
        trials: measured runs of each round, over all local classes.
        ran: round in which this plan was run, from 1; None if it was not.
        batches: samples per step of each device, by class, if the allocator chose them.
        memory_budgets: share of the saved activations that stay saved, by class that recomputes.
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
    batches: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    memory_budgets: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
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
    def samples_per_price(self) -> float | None:
        """Samples per unit of the prices' currency; None if a price or a batch is unknown."""
        cluster = self.problem.cluster
        if cluster.price_per_hour is None or cluster.samples is None:
            return None
        return 3600 * cluster.samples / (self.evaluation.seconds * cluster.price_per_hour)

    @property
    def fits(self) -> bool:
        """Whether all limits are met."""
        return not self.evaluation.exceeds(self.problem)

    @property
    def codecs(self) -> Mapping[str, str]:
        """Codec of each parameter whose gradient is not sent in FP32, by parameter name."""
        return self.evaluation.sent

    def plan(self, name: str | None = None) -> Plan:
        """Return the plan of a class, by default of the only open class, or raise `PlanError`."""
        if name is None:
            if len(self.problem.open) > 1:
                message = f"there are plans of {len(self.problem.open)} classes of devices"
                raise PlanError(message, do=f"name one: {', '.join(self.problem.open)}")
            (name,) = self.problem.open
        if name not in self.plans:
            raise PlanError(f"there are no devices {name!r}", do=nearest(name, self.plans))
        part, evaluation = self.problem.classes[name], self.evaluation
        notes = {
            "allocator": self.allocator,
            "seconds": f"{evaluation.seconds:.6g}",
            "variance": f"{evaluation.variance:.6g}",
        }
        if self.gap is not None:
            notes["gap"] = f"{self.gap:.2%}"
        if self.ran is not None:
            notes["plans measured"] = str(len(self.trials))
            for trial in self.trials[self.ran - 1]:
                if trial.device == name:
                    notes["seconds predicted"] = f"{trial.predicted:.6g}"
                    notes["seconds measured"] = f"{trial.measured:.6g}"
        if part.conditions:
            notes["measured with"] = part.conditions
        notes |= PredictedCost.of(evaluation.classes[name], part.memory).notes()
        return Plan(operators=self.plans[name], notes=notes)

    def to_plans(self) -> dict[str, Plan]:
        """Return the plans of all classes."""
        return {name: self.plan(name) for name in self.plans}

    def as_plan(self) -> Plan | ClusterPlan:
        """Return the value of the option "plan": a cluster plan for several classes, for codecs,
        for chosen batches or for recomputation.
        """
        plans, cluster = self.to_plans(), self.problem.cluster
        if len(plans) == 1 and not (self.codecs or self.batches or self.memory_budgets):
            return next(iter(plans.values()))
        notes: dict[str, str] = {}
        if self.codecs:
            notes = {TRANSPORT: cluster.transport}
            if cluster.nodes < cluster.ranks:
                notes |= between_nodes(cluster.ranks_per_node)
        return ClusterPlan(
            plans,
            notes=notes,
            codecs=self.codecs,
            batches=self.batches,
            memory_budgets=self.memory_budgets,
        )

    def save(self, path: Path) -> None:
        """Write the plan for all ranks to a file atomically; raise `PlanError` on failure."""
        self.as_plan().save(path)

    def __deepcopy__(self, memo: object) -> PlanResult:
        """Return itself, as it is immutable; Accelerate copies the options of a compilation."""
        return self

    def text(self, width: int | None = None) -> str:
        """Return the text of `print`, optionally fitted to a width in columns."""
        return plain(answer_table(self), width)

    def __repr__(self) -> str:
        """Return one line for notebooks and debuggers."""
        counts = [f"{d.count} {name}" for name, d in self.problem.cluster.devices.items()]
        step, variance = duration(self.evaluation.seconds), f"{self.evaluation.variance:.4g}"
        gap = "no bound" if self.gap is None else f"gap {self.gap:.2%}"
        metrics = f"{step} a step on {', '.join(counts)}, variance {variance}, {gap}"
        return f"PlanResult({self.allocator}, {metrics})"

    def __str__(self) -> str:
        return self.text()


class Allocator(Protocol):
    """Chooser of a plan."""

    @property
    def name(self) -> str: ...

    def allocate(self, problem: Problem) -> PlanResult:
        """Return the plan for a problem; raise `PlanError` with a remedy if no plan fits."""


def differing(first: Plans, second: Plans) -> Sequence[tuple[str, str]]:
    """Return the pairs of class and operator that have different formats in two sets of plans."""
    return [
        (name, operator)
        for name, requested in first.items()
        for operator, fmt in requested.items()
        if second[name].get(operator) != fmt
    ]


_EXAMPLES: Final = 2
"""Maximum number of operators that a note names."""


def answer_table(answer: PlanResult) -> RenderableType:
    """Return a result for a rich console."""
    conditions = {name: part.conditions for name, part in answer.problem.classes.items()}
    measured = [f"{name}: measured with {text}" for name, text in conditions.items() if text]
    lines = [*limit_lines(answer), *_coding(answer), *_trials(answer), *measured]
    lines += [*note_lines(answer), bound_line(answer)]
    return Group(*map(Text, _head(answer)), _classes(answer), *map(Text, lines))


def _head(answer: PlanResult) -> Iterator[str]:
    evaluation, problem = answer.evaluation, answer.problem
    limit = "" if problem.seconds is None else f" of {duration(problem.seconds)} allowed"
    yield f"{duration(evaluation.seconds)} a step{limit}"
    text = f"variance {evaluation.variance:.4g} added to the mean gradient"
    if share := variance_share(answer):
        text += f", {share}"
    yield text
    if rate := answer.samples_per_price:
        price = _rounded(problem.cluster.price_per_hour or 0.0)
        yield f"{_rounded(rate)} samples per unit of currency, at {price} an hour"


def variance_share(answer: PlanResult) -> str:
    """Return the variance relative to uniform plans in the narrowest formats, and to the variance
    of the gradient between batches, where these are known.
    """
    problem, variance, shares = answer.problem, answer.evaluation.variance, list[str]()
    if narrowest := problem.variance_of(problem.uniform()):
        names = "/".join(dict.fromkeys(problem.classes[name].lowest for name in problem.open))
        shares.append(f"{variance / narrowest:.2g} of uniform {names}'s")
    if noise := problem.noise:
        shares.append(f"{variance / noise:.2g} of the gradient's own noise between batches")
    return ", ".join(shares)


def limit_lines(answer: PlanResult) -> Iterator[str]:
    """Yield sentences on the limits that the plan reaches or exceeds."""
    problem, reached = answer.problem, False
    for note in answer.notes:
        if note.kind is not PlanNoteKind.BINDS:
            continue
        reached = True
        subject, value = next(iter(note.numbers.items()))
        limit = note.numbers["limit"]
        match subject:
            case "memory":
                subject = f"memory of {note.device}"
                values = f"{short(value, 'B')} of {short(limit, 'B')}"
            case "seconds":
                subject, values = "step time", f"{duration(value)} of {duration(limit)}"
            case _:
                values = f"{value:.4g} of {limit:.4g}"
        yield f"the {subject} limits the plan: {values} allowed"
    for subject, excess in answer.evaluation.exceeds(problem).items():
        reached = True
        yield f"the plan exceeds the limit of the {subject} by {excess:.4g}"
    if not reached:
        goal = "variance" if problem.least == "variance" else "step time"
        yield f"no limit is reached: the plan has the least {goal} that was found"


def bound_line(answer: PlanResult) -> str:
    """Return a sentence on the lower bound of the objective."""
    bound = "no bound is known"
    if answer.ran is not None:
        bound += " for the measured costs"  # other plans have only predicted ones
    if answer.bound is not None and answer.gap != 1:  # a bound of 0 holds for every plan
        figure = f"step below {duration(answer.bound)}"
        if answer.problem.least == "variance":
            figure = f"variance below {answer.bound:.4g}"
        if any(note.kind is PlanNoteKind.SUBSET for note in answer.notes):
            figure = f"cost below {answer.bound / answer.value:.2%} of this one, on any devices"
        bound = f"no plan has a {figure}, gap {answer.gap:.2%}"
    return f"allocator {answer.allocator}, {answer.took:.2f} s: {bound}"


def _classes(answer: PlanResult) -> RenderableType:
    requested = (fmt for plan in answer.plans.values() for fmt in plan.values())
    formats = sorted(set(requested), key=width_of)
    columns = ["devices", "count", "computing", "waiting", "sending", "memory", "variance"]
    columns += formats
    table = table_of(columns, right=columns[1:])
    for name, figures in answer.evaluation.classes.items():
        limit = answer.problem.classes[name].memory
        peak = "?" if figures.peak_bytes is None else short(figures.peak_bytes, "B")
        if limit is not None:
            peak += f" of {short(limit, 'B')}"
        counts = Counter(answer.plans[name].values())
        shares = [f"{counts[fmt]} ({counts[fmt] / counts.total():.0%})" for fmt in formats]
        table.add_row(
            Text(name),
            str(answer.problem.cluster.devices[name].count),
            *map(duration, (figures.computing, figures.waiting, figures.sending)),
            peak,
            f"{figures.variance:.4g}",
            *(share if counts[fmt] else "-" for fmt, share in zip(formats, shares, strict=True)),
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
    yield f"source of the codec speeds: {coding.rates.source}"


def _trials(answer: PlanResult) -> Iterator[str]:
    """Yield a line per measured run, round by round."""
    for index, trials in enumerate(answer.trials, 1):
        plan = "this plan" if index == answer.ran else "another plan"
        for trial in trials:
            text = f"{trial.device} ran {plan} in round {index} of {len(answer.trials)}: "
            text += f"{duration(trial.predicted)} predicted, {duration(trial.measured)} measured"
            if trial.predicted:
                text += f" ({trial.measured / trial.predicted - 1:+.1%})"
            if answer.problem.classes[trial.device].memory is not None and trial.more_bytes > 0:
                text += f", peak memory {short(trial.more_bytes, 'B')} above the prediction"
            if trial.interpolated:
                text += f", {trial.interpolated} operators not measured before"
            yield text


def note_lines(answer: PlanResult) -> Iterator[str]:
    """Yield a line per kind of note and device; `limit_lines` covers the limits."""
    by_kind: dict[tuple[PlanNoteKind, str], list[str]] = {}
    for note in answer.notes:
        if note.kind is not PlanNoteKind.BINDS:
            details = by_kind.setdefault((note.kind, note.device), [])
            details += filter(None, [_detail(note)])
    for (kind, device), details in by_kind.items():
        text = f"{device}: {kind}" if device else str(kind)
        if kind is PlanNoteKind.NOT_FASTER:
            text = f"{text} for {many(len(details), 'operator')}"
        if details:
            text += f": {'; '.join(details[:_EXAMPLES])}"
        if len(details) > _EXAMPLES:
            text += "; ..."
        yield text


def _detail(note: PlanNote) -> str:
    match note.kind, dict(note.numbers):
        case PlanNoteKind.JOINS | PlanNoteKind.DOES_NOT_HELP, {
            "samples a second": rate,
            "without it": without,
        }:
            return f"{_rounded(rate)} samples a second, {_rounded(without)} without it"
        case PlanNoteKind.WAITS, {"seconds": waiting, "of a step of": step}:
            advice = 'gradient codecs, such as codecs=["qsgd8"], send fewer bytes'
            return f"{duration(waiting)} of a step of {duration(step)}; {advice}"
        case PlanNoteKind.NOT_FASTER, {"seconds more": more}:
            narrow, wide = note.formats
            return f"{note.operator} takes {duration(more)} more in {narrow} than in {wide}"
    numbers = ", ".join(_note_number(note, name, value) for name, value in note.numbers.items())
    return " ".join(part for part in (note.operator, "/".join(note.formats), numbers) if part)


def _note_number(note: PlanNote, name: str, value: float) -> str:
    """Return a number of a note with name and unit; a limit has the unit of the limited value."""
    meant = next(iter(note.numbers)) if name == "limit" else name
    if name.startswith("seconds"):
        return f"{duration(value)}{name.removeprefix('seconds')}"
    if meant.startswith("seconds"):
        return f"{name} {duration(value)}"
    if meant.startswith("memory"):
        return f"{name} {short(value, 'B')}"
    if meant == "share":
        return f"{value:.1%}"
    return f"{name} {_rounded(value)}"


def _rounded(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
