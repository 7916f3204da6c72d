"""What plans cost: seconds of a step of the cluster, waiting and peak of each class, variance of the mean gradient.

Invariant: says what `qsync_fx.replay` says of the same plans, but for peaks: those suffice in either order that a compiler may take
(`memories`). After any number of changes, and of changes undone, it says what a new judge would.

What plans cost, whoever found them: `judge`, and what it asks for.

What a step of a class of devices holds under a plan, in the order in which it is expected to run and in that in which it is written.

A compiler sorts each pass as it expects to need least memory, and what it expects is known roughly. A limit is kept in both orders: then
it is kept whichever the compiler takes of these, and what no plan holds less than can be said of the one that follows no plan.

Invariant: peaks are those of `qsync_fx.predictor.memory`, corrected by what was measured of other plans.

Times that are asked once for each question.

Invariant: answers are those of the times that are asked.

A class of devices with another batch, from a model whose batch is a symbol.

What was measured was measured with one batch. With another one an operator takes as much longer as it has more to compute, or to move where
it computes nothing that counts; what the catalog reckons is reckoned anew.

Invariant: with the batch that it was measured with, a class takes what was measured.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qsync_fx.allocator.codec_choice import Codecs, options_of
from qsync_fx.allocator.problem import DeviceClass, Plans, Problem
from qsync_fx.errors import ProfileError, shown
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper.cost_cache import scheduled
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.memory.buffers import Task, whole
from qsync_fx.predictor.memory.outside_passes import LossMemory, TrainingMemory
from qsync_fx.predictor.memory.peak_memory import Orders, StepMemory, anchored_bytes, step_memory
from qsync_fx.predictor.model.model_graph import ModelGraph, StateNames
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.predictor.times import ANYBODY, Beside, Schedule, Seconds, Times
from qsync_fx.timeline.timeline import Timeline


class PeakMemoryEvaluator:
    """
    Args:
        part: the class.
        states: of its operators.
    """

    def __init__(self, part: DeviceClass, states: States) -> None:
        self._part, self._states = part, states

    @property
    def peak_bytes(self) -> int:
        """The most that a step holds, in whichever order that is more."""
        return self.expected_bytes + max(0, self.written.peak.bytes - self.expected.peak.bytes)

    @property
    def tasks(self) -> Sequence[Task]:
        """What a step does with memory, in that order."""
        return self._orders.written if self.worst is self.written else self._orders.expected

    @property
    def worst(self) -> StepMemory:
        """What a step holds at each moment in that order, uncorrected."""
        return max(self.expected, self.written, key=lambda memory: memory.peak.bytes)

    @cached_property
    def expected_bytes(self) -> int:
        """The most that a step holds, in the order in which it is expected to run."""
        result = self.expected
        if not self._part.anchors:
            return result.peak.bytes
        return result.held_bytes + anchored_bytes(
            self._states, self._part.anchors, self._part.training, result
        )

    @cached_property
    def expected(self) -> StepMemory:
        """What a step holds at each moment in the order in which it is expected to run, uncorrected."""
        return step_memory(self._states, self._part.training, self._orders.expected)

    @cached_property
    def written(self) -> StepMemory:
        """The same in the order in which it is written."""
        return step_memory(self._states, self._part.training, self._orders.written)

    @cached_property
    def _orders(self) -> Orders:
        return Orders.of(self._states, self._part.training)


def remembered(times: Times) -> Times:
    """Returns times that remember their answers; these themselves where they do."""
    return times if isinstance(times, CachedTimes) else CachedTimes(times)


class CachedTimes:
    """Times that are asked once for each question."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._operators: dict[tuple[str, object, tuple[object, ...]], Seconds] = {}
        self._least: dict[tuple[str, object, frozenset[tuple[int, object]]], Seconds] = {}
        self._told: dict[tuple[str, object], Sequence[Collection[StateNames] | None]] = {}
        self._casts: dict[tuple[str, str, str, int, bool], Seconds] = {}

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        key = operator, state.names, tuple(None if item is None else item.names for item in around)
        if key not in self._operators:
            self._operators[key] = self._times.operator(operator, state, around)
        return self._operators[key]

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        near = frozenset(
            (by, None if item is None else item.names) for by, item in neighbours.items()
        )
        key = operator, state.names, near
        if key not in self._least:
            self._least[key] = self._times.least(operator, state, neighbours)
        return self._least[key]

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        key = operator, state.names
        if key not in self._told:
            self._told[key] = self._times.told_apart(operator, state)
        return self._told[key]

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        key = operator, before, after, numel, differentiated
        if key not in self._casts:
            self._casts[key] = self._times.cast(operator, before, after, numel, differentiated)
        return self._casts[key]

    def outside(self) -> Seconds:
        return self._times.outside()

    def optimizer(self) -> float:
        return self._times.optimizer()


TOLERANCE = 1e-9
"""By how much, of a limit, rounding may take a plan beyond it."""
_MANY = 0.1
"""The share of operators from which on changing them one by one takes longer than looking at all."""
_SEEN = 8
"""Plans of which it is kept what they hold."""


@dataclass(frozen=True)
class DeviceMetrics:
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
class Evaluation:
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
    classes: Mapping[str, DeviceMetrics]
    codecs: Codecs = ()
    coding: float = 0.0
    sent: Mapping[str, str] = field(default_factory=dict)

    def exceeds(self, problem: Problem) -> dict[str, float]:
        """Returns by how much limits are exceeded: "seconds", "variance", and of classes "memory NAME"; nothing where all are kept."""
        pairs = [
            ("seconds", self.seconds, problem.seconds),
            ("variance", self.variance, problem.variance),
        ]
        pairs += [
            (f"memory {name}", figures.peak_bytes or 0, problem.classes[name].memory)
            for name, figures in self.classes.items()
        ]
        return {
            subject: value - limit
            for subject, value, limit in pairs
            if limit is not None and beyond(value, limit)
        }

    def value(self, problem: Problem) -> float:
        """Returns what is to be as small as it can be."""
        return self.variance if problem.least == "variance" else self.seconds


def beyond(value: float, limit: float) -> bool:
    """Whether a value is above a limit by more than rounding."""
    return value > limit * (1 + TOLERANCE)


class PlanEvaluator:
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
        self._times = {name: remembered(item.times) for name, item in problem.classes.items()}
        self._mappers: dict[str, CostMapper] = {}
        self._asked = {name: dict(plans[name]) for name in problem.classes}
        self._undo: list[tuple[str, str, str]] = []
        self._states: dict[str, States] = {}
        self._schedules: dict[str, Schedule] = {}
        self._memories: dict[str, PeakMemoryEvaluator] = {}
        self._seen: dict[tuple[str, tuple[StateNames, ...]], PeakMemoryEvaluator] = {}
        self._timeline: Timeline | None = None
        fleet = simulate(self.schedules(), problem.cluster)
        parameters = next(iter(self._schedules.values())).parameters
        places = {p.path: index for index, p in enumerate(parameters)}
        # Gradients arrive in one order under all plans, so that buckets are those of any.
        self.buckets: Sequence[Sequence[int]] = [
            [places[path] for path in item.parameters] for item in fleet.buckets
        ]
        self.options = options_of(problem, parameters, fleet.buckets)
        self.codecs = codecs or self.options.plain

    def set(self, name: str, operator: str, fmt: str) -> None:
        """Gives an operator of a class another format."""
        self._undo.append((name, operator, self._asked[name][operator]))
        self._change(name, operator, fmt)

    def undo(self) -> None:
        """Takes back the last change that was not taken back yet."""
        self._change(*self._undo.pop())

    def become(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Changes to other plans, and to other codecs where these are given, which cannot be undone; returns what they cost."""
        if codecs is not None and codecs != self.codecs:
            self.codecs, self._timeline = codecs, None
        for name, requested in plans.items():
            changes = {
                operator: fmt
                for operator, fmt in requested.items()
                if self._asked[name][operator] != fmt
            }
            if len(changes) > _MANY * len(requested):
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
        return {name: dict(requested) for name, requested in self._asked.items()}

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
            self._states[name] = (
                states(graph, self._asked[name]) if mapper is None else mapper.states()
            )
        return self._states[name]

    def schedules(self) -> Mapping[str, Schedule]:
        """Returns the step of each class."""
        full = self.problem.cluster.buckets.whole_graphs
        for name in self.problem.classes:
            if name not in self._schedules:
                self._schedules[name] = scheduled(self.states(name), self._times[name], full)
        return self._schedules

    def memory(self, name: str) -> PeakMemoryEvaluator | None:
        """Returns what a step of a class holds; None where that is not known."""
        part = self.problem.classes[name]
        if name not in self._memories and part.training is not None:
            result = self.states(name)
            key = name, result.names
            # What a step holds takes long to know, and a search comes back to plans: uniform ones, and the best so far.
            available = (
                self._seen.pop(key) if key in self._seen else PeakMemoryEvaluator(part, result)
            )
            self._memories[name] = self._seen[key] = available
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
        limits = {
            name: item.memory for name, item in problem.classes.items() if item.memory is not None
        }
        return not any(beyond(self.peak(name) or 0, limit) for name, limit in limits.items())

    def judged(self) -> Evaluation:
        """Returns all of it."""
        result = self.timeline
        figures = {
            name: DeviceMetrics(
                float(result.played.devices[name].seconds.sum())
                + result.played.devices[name].optimizer,
                result.waiting[name],
                result.sending[name],
                self.peak(name),
                self.problem.classes[name].variance(self._asked[name]),
            )
            for name in self.problem.classes
        }
        sent = self.options.by_parameter(self.codecs)
        return Evaluation(
            result.seconds,
            self.variance,
            figures,
            self.codecs,
            self.options.added(self.codecs),
            sent,
        )

    @property
    def timeline(self) -> Timeline:
        """The step of the cluster, as `replay` shows it."""
        if self._timeline is None:
            peaks = {name: memory.expected_bytes for name, memory in self._memories.items()}
            settings = self.options.compression(self.codecs)
            fleet = simulate(
                self.schedules(),
                self.problem.cluster,
                settings,
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
        for available in (self._states, self._schedules, self._memories):
            available.pop(name, None)


def with_peaks(problem: Problem, plans: Plans, result: Evaluation) -> Evaluation:
    """Returns what was judged of plans where what a step holds was left out of some classes, as a judge of the problem says it."""
    figures = dict(result.classes)
    for name, part in problem.classes.items():
        if part.training is not None and figures[name].peak_bytes is None:
            peak = PeakMemoryEvaluator(part, states(part.graph, plans[name])).peak_bytes
            figures[name] = replace(figures[name], peak_bytes=peak)
    return replace(result, classes=figures)


def evaluate_plan(problem: Problem, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
    """Returns what plans of all classes cost, with all gradients in FP32 or in the codecs that are given for buckets."""
    return PlanEvaluator(problem, plans, codecs).judged()


def resized(part: DeviceClass, symbolic: ModelGraph, batch: int) -> DeviceClass:
    """Returns a class of devices with another batch.

    Args:
        part: the class.
        symbolic: the model with its batch as its one symbolic size.
        batch: samples of one device in a step.

    Raises:
        ProfileError: the model has not one symbolic size, or is another one.
    """
    if len(symbolic.symbols) != 1:
        result = ", ".join(sorted(symbolic.symbols)) or "none"
        do = "explain it with torch._dynamo.mark_dynamic(input, 0) on the inputs whose first side is the batch"
        raise ProfileError(
            f"the model is to have one symbolic size, its batch, and has {result}", do=do
        )
    if [op.id for op in symbolic.operators] != [op.id for op in part.graph.operators]:
        strange = next(
            iter({op.id for op in symbolic.operators} ^ {op.id for op in part.graph.operators}),
            "their order",
        )
        message = f"with the batch as a symbol the model has other operators: {shown(strange)}"
        raise ProfileError(message, do="compare with batches that need no other trace")
    (symbol,) = symbolic.symbols
    graph = symbolic.at(**{symbol: batch})
    before = part.times
    times: Times = (
        before.of(graph) if isinstance(before, DeviceTimes) else Scaled(before, part.graph, graph)
    )
    return replace(
        part,
        graph=graph,
        times=times,
        anchors=(),
        training=_trained(part.training, part.graph, graph),
    )


def _trained(
    training: TrainingMemory | None, before: ModelGraph, after: ModelGraph
) -> TrainingMemory | None:
    """What a loss takes follows what the model returns."""
    if (
        training is None
        or training.loss is None
        or (live := _returned(before)) == (now := _returned(after))
    ):
        return training
    if not live:
        return replace(training, loss=None)
    loss = LossMemory(
        *(-(-size * now // live) for size in (training.loss.held, training.loss.most))
    )
    return replace(training, loss=loss)


def _returned(graph: ModelGraph) -> int:
    return sum(whole(graph.values[read.value].numel) for read in graph.outputs)


@dataclass(frozen=True)
class Scaled:
    """
    Attributes:
        times: with the batch that was measured.
        before: the model with that batch.
        after: the model with another one.
    """

    times: Times = field(repr=False)
    before: ModelGraph = field(repr=False)
    after: ModelGraph = field(repr=False)

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        result, more = self.times.operator(operator, state, around), self._more(operator, state)
        return Seconds(result.forward * more, result.backward * more, interpolated=True)

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        result, more = self.times.least(operator, state, neighbours), self._more(operator, state)
        return Seconds(result.forward * more, result.backward * more, interpolated=True)

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return self.times.told_apart(operator, state)

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        return self.times.cast(operator, before, after, numel, differentiated)

    def outside(self) -> Seconds:
        return self.times.outside()

    def optimizer(self) -> float:
        return self.times.optimizer()

    def _more(self, operator: str, state: OperandState) -> float:
        before, after = (
            graph.operator(operator).costs[state.names].work for graph in (self.before, self.after)
        )
        if before.flops:
            return float(after.flops) / float(before.flops)
        return float(after.bytes) / float(before.bytes) if before.bytes else 1.0
