"""What an allocator found: plans, what the judge says of them, and how near to the best they are known to be.

Invariant: frozen. What it says in words is made from what it holds.

What a plan is expected to take on a device, as notes of it, so that whoever trains under it can compare.

Invariant: what a note of ours says is what was reckoned; a plan that has none, or whose notes someone else has written, is as good as any.

What `print(answer)` shows: the step, the classes of devices, operators by format, and what to know about the plan.

Invariant: every number is one that the answer holds, and every sentence is of the kind of a note.
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
    """
    Attributes:
        computing: seconds of a step in which the device computes.
        peak: bytes that a step holds at most, parameters and the optimizer's state included.
        memory: bytes that it may hold.

    What is not known is None.
    """

    computing: float | None = None
    peak: float | None = None
    memory: float | None = None

    @classmethod
    def of(cls, figures: DeviceMetrics, memory: float | None) -> PredictedCost:
        return cls(figures.computing, figures.peak_bytes, memory)

    @classmethod
    def noted(cls, notes: Mapping[str, str]) -> PredictedCost:
        """Returns what the notes of a plan say."""
        return cls(**{part.name: _number(notes.get(part.name, "")) for part in fields(cls)})

    def notes(self) -> dict[str, str]:
        """Returns it as notes."""
        values = {part.name: getattr(self, part.name) for part in fields(self)}
        return {name: f"{value:.9g}" for name, value in values.items() if value is not None}


def _number(text: str) -> float | None:
    try:
        result = float(text)
    except ValueError:
        return None
    return result if 0 < result < float("inf") else None


AGREES: Final = 0.02
"""The share by which a step that is foreseen well may differ from one that was measured: what compiling twice makes of one plan."""


class PlanNoteKind(StrEnum):
    """What a note says."""

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
    """Something to know about a plan.

    Attributes:
        kind: what it says.
        device: the class that it is about; "" for all.
        operator: the operator that it is about; "" for none.
        formats: that it is about.
        numbers: what it goes by, by name.
    """

    kind: PlanNoteKind
    device: str = ""
    operator: str = ""
    formats: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class SolverIteration:
    """One time that an allocator solved what it reckons with, and had the judge look at it.

    Attributes:
        judged: what the judge says.
        bound: that nothing is below in what it reckons with.
        fits: whether the judge says that all limits are kept.
        learned: whether the judge says something of the plan's parts that it did not reckon with.
    """

    judged: Evaluation
    bound: float
    fits: bool
    learned: bool


@dataclass(frozen=True)
class Trial:
    """A plan that was found and then run, on a device at hand.

    Attributes:
        device: the class.
        foreseen: seconds that a device computes in a step, as they were known before.
        measured: the same, as it took.
        spread: how far steps lay from that, in the median, as a share of it.
        interpolated: how many operators nothing had been measured of in the states that the plan puts them into.
        more_bytes: that a step held beyond what was foreseen; below 0 where it held less, 0 where it was not measured.
    """

    device: str
    foreseen: float
    measured: float
    spread: float
    interpolated: int
    more_bytes: int = 0

    @property
    def agrees(self) -> bool:
        """Whether both differ by chance alone, as far as can be told."""
        return abs(self.foreseen - self.measured) <= max(AGREES, self.spread) * self.measured


@dataclass(frozen=True)
class PlanResult:
    """
    Attributes:
        problem: what was asked.
        plans: the format of each operator, of all classes.
        judged: what that costs.
        allocator: who found it.
        bound: below which no plan's variance, or seconds, can be by the judge; None where that is not known.
        took: seconds that finding it took.
        iterations: of the solver, in order; empty where an allocator asks the judge all along.
        notes: what else to know.
        trials: of each round in which a plan was run, those of all classes at hand.
        ran: the number of the round in which this plan was run, from 1; None where it was not.
        profiles: of the classes at hand, corrected by what was measured; none where nothing was.

    Codecs of gradients are in `judged`, by bucket, and in `codecs`, by parameter.
    """

    problem: Problem = field(repr=False, compare=False)
    plans: Plans = field(repr=False)
    judged: Evaluation
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
        """What was to be as small as it can be."""
        return self.judged.value(self.problem)

    @property
    def gap(self) -> float | None:
        """How far, of what it is, the value may be above the best; None where nothing is known."""
        if self.bound is None:
            return None
        return max(0.0, self.value - self.bound) / self.value if self.value > 0 else 0.0

    @property
    def fits(self) -> bool:
        """Whether all limits are kept."""
        return not self.judged.exceeds(self.problem)

    @property
    def codecs(self) -> Mapping[str, str]:
        """What the gradient of a parameter is sent in, by its name, of those that do not go in FP32."""
        return self.judged.sent

    def plan(self, name: str | None = None) -> Plan:
        """Returns the plan of a class of devices; of the one that was open to choice where none is named.

        Raises:
            PlanError: there is no such class, or several were open.
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
            "seconds": f"{self.judged.seconds:.6g}",
            "variance": f"{self.judged.variance:.6g}",
            **gap,
        }
        if self.ran is not None:
            figures["plans measured"] = str(len(self.trials))
            owned = [trial for trial in self.trials[self.ran - 1] if trial.device == name]
            figures |= {key: f"{value:.6g}" for item in owned for key, value in _said(item).items()}
        if conditions := self.problem.classes[name].conditions:
            figures["measured with"] = conditions
        foreseen = PredictedCost.of(
            self.judged.classes[name], self.problem.classes[name].memory
        ).notes()
        return Plan(
            operators=self.plans[name], notes={"allocator": self.allocator, **figures, **foreseen}
        )

    def to_plans(self) -> dict[str, Plan]:
        """Returns the plans of all classes."""
        return {name: self.plan(name) for name in self.plans}

    def as_plan(self) -> Plan | ClusterPlan:
        """Returns what the option "plan" takes and files hold: the plan of the one class, or that of the cluster, with codecs of gradients
        where there are any."""
        plans, size = self.to_plans(), self.problem.cluster.nodes.ranks
        if len(plans) == 1 and not self.codecs:
            return next(iter(plans.values()))
        notes = between_nodes(size) if self.codecs and size > 1 else {}
        return ClusterPlan(plans, notes=notes, codecs=self.codecs)

    def save(self, path: Path) -> None:
        """Writes it to a file for all ranks in one step; raises `PlanError` if it cannot."""
        self.as_plan().save(path)

    def text(self, width: int | None = None) -> str:
        """Returns what `print` shows, fitted to a width where one is given."""

        return answer_text(self, width)

    def __repr__(self) -> str:
        """One line, as notebooks and debuggers show it."""
        from qsync_fx.formatting import duration

        gap = "no bound" if self.gap is None else f"gap {self.gap:.2%}"
        devices = ", ".join(
            f"{device.count} {name}" for name, device in self.problem.cluster.devices.items()
        )
        step, variance = duration(self.judged.seconds), f"{self.judged.variance:.4g}"
        return (
            f"PlanResult({self.allocator}, {step} a step on {devices}, variance {variance}, {gap})"
        )

    def __str__(self) -> str:
        return self.text()


class Allocator(Protocol):
    """What chooses a plan.

    Attributes:
        name: what users call it.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, problem: Problem) -> PlanResult:
        """Returns the plan that it chooses.

        Raises:
            PlanError: there is no plan within the limits; the error says which of them, by how much, and what would do.
        """


def _said(trial: Trial) -> dict[str, float]:
    return {"seconds foreseen": trial.foreseen, "seconds measured": trial.measured}


def differing(first: Plans, second: Plans) -> Sequence[tuple[str, str]]:
    """Returns the operators, with their classes, that two answers give different formats."""
    return [
        (name, operator)
        for name, requested in first.items()
        for operator, fmt in requested.items()
        if second[name].get(operator) != fmt
    ]


_SHOWN = 5


def answer_text(answer: PlanResult, width: int | None = None) -> str:
    """Returns an answer as plain text, fitted to a width where one is given."""
    return plain(answer_table(answer), width)


def answer_table(answer: PlanResult) -> RenderableType:
    """Returns an answer for a rich console."""
    lines = (*_coding(answer), *_trials(answer), *_conditions(answer), *_notes(answer))
    return Group(*map(Text, _head(answer)), _classes(answer), *map(Text, lines))


def _head(answer: PlanResult) -> list[str]:
    judged, problem = answer.judged, answer.problem
    limit = "" if problem.seconds is None else f" of {duration(problem.seconds)} allowed"
    result = [f"{duration(judged.seconds)} a step{limit}, variance {judged.variance:.4g}"]
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


def _coding(answer: PlanResult) -> Iterator[str]:
    """Which codecs gradients go in, where there was a choice."""
    judged, coding = answer.judged, answer.problem.coding
    if coding is None:
        return
    counts = Counter(judged.codecs)
    kinds = ", ".join(f"{counts[codec]} in {codec}" for codec in coding.codecs if counts[codec])
    yield f"buckets of gradients: {kinds}; codecs add {judged.coding:.4g} of the variance"
    yield f"how fast they code is {coding.rates.source}"


def _trials(answer: PlanResult) -> Iterator[str]:
    """What came out where plans were run, round by round."""
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
