"""What an allocator found: plans, what the judge says of them, and how near to the best they are known to be.

Invariant: frozen. What it says in words is made from what it holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import TYPE_CHECKING, Final, Protocol

from qsync_fx.allocator.foreseen import Foreseen
from qsync_fx.allocator.judging.judge import Judged
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.codec import Path
from qsync_fx.errors import PlanError, nearest
from qsync_fx.plan import ClusterPlan, Plan
from qsync_fx.plan.gradient_codecs import between_nodes

if TYPE_CHECKING:
    from qsync_fx.profiling.profile import Profile

AGREES: Final = 0.02
"""The share by which a step that is foreseen well may differ from one that was measured: what compiling twice makes of one plan."""


class NoteKind(StrEnum):
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
    BETWEEN_NODES = "codecs are foreseen between nodes alone, as compress(..., hierarchical=True) has it"
    UNEVEN = "nodes have different numbers of ranks, so that codecs are foreseen between all ranks, and not between nodes alone"
    BY_HOST = "gradients in codecs go by way of the GPU's host, over gloo, which is what is foreseen of them"
    LEFT_OUT = "left out, as how much it disturbs gradients is not known"
    HAS_NOT = "left out, as these devices do not compute in it, or were not measured in it"
    UNSETTLED = (
        "what is foreseen and what is measured still differ; measure more turns, on a machine that does nothing else"
    )


@dataclass(frozen=True)
class Note:
    """Something to know about a plan.

    Attributes:
        kind: what it says.
        device: the class that it is about; "" for all.
        operator: the operator that it is about; "" for none.
        formats: that it is about.
        numbers: what it goes by, by name.
    """

    kind: NoteKind
    device: str = ""
    operator: str = ""
    formats: tuple[str, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))


@dataclass(frozen=True)
class Round:
    """One time that an allocator solved what it reckons with, and had the judge look at it.

    Attributes:
        judged: what the judge says.
        bound: that nothing is below in what it reckons with.
        fits: whether the judge says that all limits are kept.
        learned: whether the judge says something of the plan's parts that it did not reckon with.
    """

    judged: Judged
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
class Answer:
    """
    Attributes:
        problem: what was asked.
        plans: the format of each operator, of all classes.
        judged: what that costs.
        allocator: who found it.
        bound: below which no plan's variance, or seconds, can be by the judge; None where that is not known.
        took: seconds that finding it took.
        rounds: in order; empty where an allocator asks the judge all along.
        notes: what else to know.
        trials: of each round in which a plan was run, those of all classes at hand.
        ran: the number of the round in which this plan was run, from 1; None where it was not.
        profiles: of the classes at hand, corrected by what was measured; none where nothing was.

    Codecs of gradients are in `judged`, by bucket, and in `codecs`, by parameter.
    """

    problem: Problem = field(repr=False, compare=False)
    plans: Plans = field(repr=False)
    judged: Judged
    allocator: str
    bound: float | None = None
    took: float = field(default=0.0, compare=False)
    rounds: tuple[Round, ...] = field(default=(), repr=False)
    notes: tuple[Note, ...] = field(default=(), repr=False)
    trials: tuple[tuple[Trial, ...], ...] = field(default=(), repr=False, compare=False)
    ran: int | None = field(default=None, compare=False)
    profiles: Mapping[str, Profile] = field(default_factory=lambda: MappingProxyType({}), repr=False, compare=False)

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
                what = f"there are plans of {len(self.problem.open)} classes of devices"
                raise PlanError(what, do=f"name one: {', '.join(self.problem.open)}")
            (name,) = self.problem.open
        if name not in self.plans:
            raise PlanError(f"there are no devices {name!r}", do=nearest(name, self.plans))
        gap = {} if self.gap is None else {"gap": f"{self.gap:.2%}"}
        figures = {"seconds": f"{self.judged.seconds:.6g}", "variance": f"{self.judged.variance:.6g}", **gap}
        if self.ran is not None:
            figures["rounds"] = str(len(self.trials))
            own = [trial for trial in self.trials[self.ran - 1] if trial.device == name]
            figures |= {key: f"{value:.6g}" for one in own for key, value in _said(one).items()}
        if conditions := self.problem.classes[name].conditions:
            figures["measured with"] = conditions
        foreseen = Foreseen.of(self.judged.classes[name], self.problem.classes[name].memory).notes()
        return Plan(operators=self.plans[name], notes={"allocator": self.allocator, **figures, **foreseen})

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
        from qsync_fx.report.answer_text import answer_text

        return answer_text(self, width)

    def __repr__(self) -> str:
        """One line, as notebooks and debuggers show it."""
        from qsync_fx.report.numbers import duration

        gap = "no bound" if self.gap is None else f"gap {self.gap:.2%}"
        devices = ", ".join(f"{device.count} {name}" for name, device in self.problem.cluster.devices.items())
        step, variance = duration(self.judged.seconds), f"{self.judged.variance:.4g}"
        return f"Answer({self.allocator}, {step} a step on {devices}, variance {variance}, {gap})"

    def __str__(self) -> str:
        return self.text()


class Allocator(Protocol):
    """What chooses a plan.

    Attributes:
        name: what users call it.
    """

    @property
    def name(self) -> str: ...

    def allocate(self, problem: Problem) -> Answer:
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
        for name, asked in first.items()
        for operator, fmt in asked.items()
        if second[name].get(operator) != fmt
    ]
