"""What plans cost: seconds of a step of the cluster, waiting and peak of each class, variance of the mean gradient.

Invariant: says what `qsync_fx.replay` says of the same plans, but for peaks: those suffice in either order that a compiler may take
(`memories`). After any number of changes, and of changes undone, it says what a new judge would.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from qsync_fx.allocator.coding import Codecs, options_of
from qsync_fx.allocator.judging.memories import Memories
from qsync_fx.allocator.judging.remembered import remembered
from qsync_fx.allocator.problem import Plans, Problem
from qsync_fx.predictor.mapper import CostMapper, States, scheduled, states
from qsync_fx.predictor.model.value import StateNames
from qsync_fx.predictor.replay.fleet import played
from qsync_fx.predictor.schedule import Schedule
from qsync_fx.timeline.timeline import Timeline

TOLERANCE = 1e-9
"""By how much, of a limit, rounding may take a plan beyond it."""
_MANY = 0.1
"""The share of operators from which on changing them one by one takes longer than looking at all."""
_SEEN = 8
"""Plans of which it is kept what they hold."""


@dataclass(frozen=True)
class Figures:
    """What a plan costs one device of a class, in a step of the cluster.

    Attributes:
        computing: seconds of both passes and the optimizer.
        waiting: seconds in which it does nothing because others are not ready to send.
        sending: seconds in which it does nothing because gradients travel.
        peak_bytes: what a step holds at most, in whichever order a compiler runs it; None where that is not known.
        variance: what its plan adds to that of its own gradients.
    """

    computing: float
    waiting: float
    sending: float
    peak_bytes: int | None
    variance: float


@dataclass(frozen=True)
class Judged:
    """
    Attributes:
        seconds: from one step of the cluster to the next.
        variance: of the mean gradient of all ranks, by roundings and by codecs.
        classes: figures of each class.
        codecs: of each bucket of gradients; () where there was nothing to choose.
        coding: what of the variance is by codecs.
        sent: what the gradient of a parameter is sent in, by its name, of those that do not go in FP32.
    """

    seconds: float
    variance: float
    classes: Mapping[str, Figures]
    codecs: Codecs = ()
    coding: float = 0.0
    sent: Mapping[str, str] = field(default_factory=dict)

    def exceeds(self, problem: Problem) -> dict[str, float]:
        """Returns by how much limits are exceeded: "seconds", "variance", and of classes "memory NAME"; nothing where all are kept."""
        pairs = [("seconds", self.seconds, problem.seconds), ("variance", self.variance, problem.variance)]
        pairs += [
            (f"memory {name}", figures.peak_bytes or 0, problem.classes[name].memory)
            for name, figures in self.classes.items()
        ]
        return {what: value - limit for what, value, limit in pairs if limit is not None and beyond(value, limit)}

    def value(self, problem: Problem) -> float:
        """Returns what is to be as small as it can be."""
        return self.variance if problem.least == "variance" else self.seconds


def beyond(value: float, limit: float) -> bool:
    """Whether a value is above a limit by more than rounding."""
    return value > limit * (1 + TOLERANCE)


class Judge:
    """
    Args:
        problem: what is asked.
        plans: of all classes, to start from.
        codecs: of buckets; FP32 for all where none are given.

    Attributes:
        buckets: the parameters of each.
        options: what there is to choose of codecs.
        codecs: those of buckets now.

    Raises:
        PlanError, ProfileError: a plan does not fit the model, or a time is not known.
    """

    def __init__(self, problem: Problem, plans: Plans, codecs: Codecs | None = None) -> None:
        self.problem = problem
        self._times = {name: remembered(found.times) for name, found in problem.classes.items()}
        self._mappers: dict[str, CostMapper] = {}
        self._asked = {name: dict(plans[name]) for name in problem.classes}
        self._undo: list[tuple[str, str, str]] = []
        self._states: dict[str, States] = {}
        self._schedules: dict[str, Schedule] = {}
        self._memories: dict[str, Memories] = {}
        self._seen: dict[tuple[str, tuple[StateNames, ...]], Memories] = {}
        self._timeline: Timeline | None = None
        fleet = played(self.schedules(), problem.cluster)
        parameters = next(iter(self._schedules.values())).parameters
        places = {p.path: at for at, p in enumerate(parameters)}
        # Gradients arrive in one order under all plans, so that buckets are those of any.
        self.buckets: Sequence[Sequence[int]] = [[places[path] for path in one.parameters] for one in fleet.buckets]
        self.options = options_of(problem, parameters, fleet.buckets)
        self.codecs = codecs or self.options.plain

    def set(self, name: str, operator: str, fmt: str) -> None:
        """Gives an operator of a class another format."""
        self._undo.append((name, operator, self._asked[name][operator]))
        self._change(name, operator, fmt)

    def undo(self) -> None:
        """Takes back the last change that was not taken back yet."""
        self._change(*self._undo.pop())

    def become(self, plans: Plans, codecs: Codecs | None = None) -> Judged:
        """Changes to other plans, and to other codecs where these are given, which cannot be undone; returns what they cost."""
        if codecs is not None and codecs != self.codecs:
            self.codecs, self._timeline = codecs, None
        for name, asked in plans.items():
            changes = {operator: fmt for operator, fmt in asked.items() if self._asked[name][operator] != fmt}
            if len(changes) > _MANY * len(asked):
                self._asked[name] |= changes
                self._mappers.pop(name, None)
                self._forget(name)
            else:
                for operator, fmt in changes.items():
                    self._change(name, operator, fmt)
        self._undo.clear()
        return self.judged()

    @property
    def plans(self) -> dict[str, dict[str, str]]:
        """The plans now."""
        return {name: dict(asked) for name, asked in self._asked.items()}

    @property
    def seconds(self) -> float:
        """Seconds of a step of the cluster."""
        return self.timeline.seconds

    @property
    def variance(self) -> float:
        """The variance of the mean gradient."""
        return self.problem.variance_of(self._asked) + self.options.added(self.codecs)

    @property
    def transfer(self) -> Sequence[float]:
        """The seconds that each bucket travels, coding included."""
        return self.options.travel(self.codecs)

    @property
    def computed_later(self) -> Sequence[float]:
        """The seconds that devices, as fast as their profiles say, compute later for each bucket."""
        return self.options.computed_later(self.codecs)

    def computing(self, name: str) -> float:
        """Returns the seconds that a device of a class computes in a step; followed change by change, so quick to ask."""
        return self._mapper(name).seconds * self.problem.cluster.devices[name].slowdown

    def states(self, name: str) -> States:
        """Returns what the operators of a class compute in and give out."""
        if name not in self._states:
            mapper = self._mappers.get(name)
            graph = self.problem.classes[name].graph
            self._states[name] = states(graph, self._asked[name]) if mapper is None else mapper.states()
        return self._states[name]

    def schedules(self) -> Mapping[str, Schedule]:
        """Returns the step of each class."""
        whole = self.problem.cluster.buckets.whole_graphs
        for name in self.problem.classes:
            if name not in self._schedules:
                self._schedules[name] = scheduled(self.states(name), self._times[name], whole)
        return self._schedules

    def memory(self, name: str) -> Memories | None:
        """Returns what a step of a class holds; None where that is not known."""
        part = self.problem.classes[name]
        if name not in self._memories and part.training is not None:
            found = self.states(name)
            key = name, found.names
            # What a step holds takes long to know, and a search comes back to plans: uniform ones, and the best so far.
            known = self._seen.pop(key) if key in self._seen else Memories(part, found)
            self._memories[name] = self._seen[key] = known
            while len(self._seen) > _SEEN:
                del self._seen[next(iter(self._seen))]
        return self._memories.get(name)

    def peak(self, name: str) -> int | None:
        """Returns what a step of a class holds at most; None where that is not known."""
        memory = self.memory(name)
        return None if memory is None else memory.peak_bytes

    def fits(self) -> bool:
        """Whether all limits are kept; asks for what is quick to know first."""
        problem = self.problem
        if problem.variance is not None and beyond(self.variance, problem.variance):
            return False
        if problem.seconds is not None:
            if any(beyond(self.computing(name), problem.seconds) for name in problem.classes):
                return False
            if beyond(self.seconds, problem.seconds):
                return False
        limits = {name: found.memory for name, found in problem.classes.items() if found.memory is not None}
        return not any(beyond(self.peak(name) or 0, limit) for name, limit in limits.items())

    def judged(self) -> Judged:
        """Returns all of it."""
        found = self.timeline
        figures = {
            name: Figures(
                float(found.played.devices[name].seconds.sum()) + found.played.devices[name].optimizer,
                found.waiting[name],
                found.sending[name],
                self.peak(name),
                self.problem.classes[name].variance(self._asked[name]),
            )
            for name in self.problem.classes
        }
        sent = self.options.by_parameter(self.codecs)
        return Judged(found.seconds, self.variance, figures, self.codecs, self.options.added(self.codecs), sent)

    @property
    def timeline(self) -> Timeline:
        """The step of the cluster, as `replay` shows it."""
        if self._timeline is None:
            peaks = {name: memory.expected_bytes for name, memory in self._memories.items()}
            how = self.options.compression(self.codecs)
            fleet = played(
                self.schedules(),
                self.problem.cluster,
                how,
                indices=self.buckets,
                transfer=self.transfer,
                later=self.computed_later,
            )
            self._timeline = Timeline(fleet, peaks)
        return self._timeline

    def _change(self, name: str, operator: str, fmt: str) -> None:
        self._mapper(name).set(operator, fmt)
        self._asked[name][operator] = fmt
        self._forget(name)

    def _mapper(self, name: str) -> CostMapper:
        if name not in self._mappers:
            graph = self.problem.classes[name].graph
            self._mappers[name] = CostMapper(graph, self._times[name], self._asked[name])
        return self._mappers[name]

    def _forget(self, name: str) -> None:
        """Lets go what is known of a class, whose plan is another now."""
        self._timeline = None
        for known in (self._states, self._schedules, self._memories):
            known.pop(name, None)


def with_peaks(problem: Problem, plans: Plans, found: Judged) -> Judged:
    """Returns what was judged of plans where what a step holds was left out of some classes, as a judge of the problem says it."""
    figures = dict(found.classes)
    for name, part in problem.classes.items():
        if part.training is not None and figures[name].peak_bytes is None:
            peak = Memories(part, states(part.graph, plans[name])).peak_bytes
            figures[name] = replace(figures[name], peak_bytes=peak)
    return replace(found, classes=figures)


def judged(problem: Problem, plans: Plans, codecs: Codecs | None = None) -> Judged:
    """Returns what plans of all classes cost, with all gradients in FP32 or in the codecs that are given for buckets."""
    return Judge(problem, plans, codecs).judged()
