"""Plan evaluator: time, waiting, peak memory and gradient variance of plans on a cluster.

`PlanEvaluator` combines the cost mapper, the memory model and the replayer, and updates its results
incrementally. Metrics equal those in `qsync_fx.replay`, except peaks, which cover two task orders.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final, TypeVar

import sympy

from qsync_fx.allocator.codec_choice import Codecs, options_of
from qsync_fx.allocator.problem import DeviceClass, Plans, Problem
from qsync_fx.errors import PlanError, ProfileError, shown
from qsync_fx.formats import FORMATS
from qsync_fx.graph.operand_formats import OperandState
from qsync_fx.predictor.analytic_times import DeviceTimes
from qsync_fx.predictor.cost_mapper.cost_mapper import CostMapper, scheduled
from qsync_fx.predictor.cost_mapper.plan_states import States, states
from qsync_fx.predictor.cost_mapper.times import ANYBODY, Beside, Schedule, Seconds, Times
from qsync_fx.predictor.memory.backward import Backward, recomputed
from qsync_fx.predictor.memory.buffers import Task, integer_size
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.memory.peak_memory import (
    LossMemory,
    Orders,
    StepMemory,
    anchored_bytes,
    step_memory,
)
from qsync_fx.predictor.model.model_graph import ModelGraph, StateNames
from qsync_fx.predictor.replayer.cluster_step import simulate
from qsync_fx.timeline.timeline import Timeline

T = TypeVar("T")

_RECOMPUTATION_ERROR: Final = 0.15
"""Share by which a peak with recomputation may be above its prediction."""


class PeakMemoryEvaluator:
    """Peak memory of a step of one device class under a plan, in two task orders.

    A compiler reorders each pass to reduce its memory, and its order can be predicted only
    approximately. The peak therefore covers the expected order and the program order.
    """

    def __init__(self, part: DeviceClass, states: States) -> None:
        self._part, self._states = part, states

    @property
    def peak_bytes(self) -> int:
        """Peak memory of a step in bytes, the maximum of both orders."""
        return self.expected_bytes + max(0, self.written.peak.bytes - self.expected.peak.bytes)

    @property
    def tasks(self) -> Sequence[Task]:
        """Tasks of a step in the order with the higher peak."""
        if self.worst is self.written:
            return self._orders.written
        return self._orders.expected

    @property
    def worst(self) -> StepMemory:
        """Memory of a step over time in the order with the higher peak, uncorrected."""
        return max(self.expected, self.written, key=lambda memory: memory.peak.bytes)

    @cached_property
    def expected_bytes(self) -> int:
        """Peak memory in bytes in the expected order, corrected by measured plans."""
        result, training = self.expected, self._part.training
        if training is not None and training.memory_budget < 1.0:
            return result.peak.bytes + round(_RECOMPUTATION_ERROR * result.step_bytes)
        if not self._part.anchors:
            return result.peak.bytes
        return result.held_bytes + anchored_bytes(
            self._states, self._part.anchors, training, result
        )

    @cached_property
    def expected(self) -> StepMemory:
        """Memory of a step over time in the expected order, uncorrected."""
        return step_memory(self._states, self._part.training, self._orders.expected)

    @cached_property
    def written(self) -> StepMemory:
        """Memory of a step over time in the program order, uncorrected."""
        return step_memory(self._states, self._part.training, self._orders.written)

    @cached_property
    def _orders(self) -> Orders:
        return Orders.of(self._states, self._part.training)


class CachedTimes:
    """Cache of the results of `Times`, one entry per distinct call."""

    def __init__(self, times: Times) -> None:
        self._times = times
        self._cache: dict[object, Any] = {}

    @classmethod
    def of(cls, times: Times) -> Times:
        return times if isinstance(times, CachedTimes) else cls(times)

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        key = operator, state.names, tuple(item and item.names for item in around)
        return self._once(key, self._times.operator, operator, state, around)

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        near = frozenset((by, item and item.names) for by, item in neighbours.items())
        key = operator, state.names, near
        return self._once(key, self._times.least, operator, state, neighbours)

    def told_apart(
        self, operator: str, state: OperandState
    ) -> Sequence[Collection[StateNames] | None]:
        return self._once((operator, state.names), self._times.told_apart, operator, state)

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        key = operator, before, after, numel, differentiated
        return self._once(key, self._times.cast, *key)

    def outside(self) -> Seconds:
        return self._times.outside()

    def optimizer(self) -> float:
        return self._times.optimizer()

    def _once(self, key: object, compute: Callable[..., T], *arguments: Any) -> T:
        if key not in self._cache:
            self._cache[key] = compute(*arguments)
        result: T = self._cache[key]
        return result


TOLERANCE = 1e-9
"""Relative tolerance for rounding when a value is compared with a limit."""
_MANY = 0.1
"""Share of changed operators above which a full rebuild is faster than single changes."""
_SEEN = 8
"""Number of plans with cached peak memory."""


@dataclass(frozen=True)
class DeviceMetrics:
    """Metrics of one device of a class in a step of the cluster, in seconds and bytes.

    `waiting` ends when all devices are ready to send, `sending` when the gradients have arrived.
    The peak is the maximum of both task orders; None if unknown. `variance` is added to the
    device's own gradients.
    """

    computing: float
    waiting: float
    sending: float
    peak_bytes: int | None
    variance: float


@dataclass(frozen=True)
class Evaluation:
    """Metrics of the plans of all classes.

    Attributes:
        variance: variance of the mean gradient of all ranks, due to rounding and codecs.
        codecs: codec of each gradient bucket; () if there is no choice.
        coding: part of `variance` due to codecs.
        sent: codec of each parameter whose gradient is not sent in FP32, by parameter name.
    """

    seconds: float
    variance: float
    classes: Mapping[str, DeviceMetrics]
    codecs: Codecs = ()
    coding: float = 0.0
    sent: Mapping[str, str] = field(default_factory=dict)

    def exceeds(self, problem: Problem) -> dict[str, float]:
        """Return the excess over each exceeded limit: "seconds", "variance", "memory NAME"."""
        values = {"seconds": self.seconds, "variance": self.variance}
        for name, metrics in self.classes.items():
            values[f"memory {name}"] = metrics.peak_bytes or 0
        result = {}
        for subject, value in values.items():
            limit = problem.limit(subject)
            if limit is not None and beyond(value, limit):
                result[subject] = value - limit
        return result

    def value(self, problem: Problem) -> float:
        """Return the value of the problem's objective."""
        return self.variance if problem.least == "variance" else self.seconds


def beyond(value: float, limit: float) -> bool:
    """Return whether a value exceeds a limit by more than rounding."""
    return value > limit * (1 + TOLERANCE)


class PlanEvaluator:
    """Incremental evaluator of plans and codecs.

    `buckets` has the indices of the parameters in each gradient bucket. Codecs are FP32 by default.
    """

    def __init__(
        self,
        problem: Problem,
        plans: Plans,
        codecs: Codecs | None = None,
    ) -> None:
        self.problem = problem
        self._times = {name: CachedTimes.of(item.times) for name, item in problem.classes.items()}
        self._mappers: dict[str, CostMapper] = {}
        self._requested = {name: dict(plans[name]) for name in problem.classes}
        self._undo: list[tuple[str, str, str]] = []
        self._states: dict[str, States] = {}
        self._schedules: dict[str, Schedule] = {}
        self._memories: dict[str, PeakMemoryEvaluator] = {}
        self._evaluators: dict[tuple[str, tuple[StateNames, ...]], PeakMemoryEvaluator] = {}
        self._timeline: Timeline | None = None
        fleet = simulate(self.schedules(), problem.cluster)
        parameters = self._schedules[next(iter(problem.classes))].parameters
        places = {p.path: index for index, p in enumerate(parameters)}
        # Gradients become ready in the same order under all plans, so that buckets do not change.
        self.buckets: Sequence[Sequence[int]] = [
            [places[path] for path in item.parameters] for item in fleet.buckets
        ]
        self.options = options_of(problem, parameters, fleet.buckets)
        self.codecs = codecs or self.options.plain

    def set(self, name: str, operator: str, fmt: str) -> None:
        """Change the format of an operator of a class."""
        self._undo.append((name, operator, self._requested[name][operator]))
        self._change(name, operator, fmt)

    def undo(self) -> None:
        """Undo the last change that is not undone yet."""
        self._change(*self._undo.pop())

    def set_plans(self, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
        """Switch to other plans, and codecs if given; the undo history is cleared."""
        if codecs is not None and codecs != self.codecs:
            self.codecs, self._timeline = codecs, None
        for name, requested in plans.items():
            before = self._requested[name]
            changes = {op: fmt for op, fmt in requested.items() if before[op] != fmt}
            if len(changes) > _MANY * len(requested):
                self._requested[name] |= changes
                self._mappers.pop(name, None)
                self._forget(name)
            else:
                for operator, fmt in changes.items():
                    self._change(name, operator, fmt)
        self._undo.clear()
        return self.evaluate()

    @property
    def plans(self) -> dict[str, dict[str, str]]:
        """Copies of the current plans."""
        return {name: dict(requested) for name, requested in self._requested.items()}

    @property
    def seconds(self) -> float:
        """Seconds of a step of the cluster."""
        return self.timeline.seconds

    @property
    def variance(self) -> float:
        """Variance of the mean gradient."""
        return self.problem.variance_of(self._requested) + self.options.added(self.codecs)

    @property
    def transfer(self) -> Sequence[float]:
        """Transfer time of each bucket in seconds, coding included."""
        return self.options.travel(self.codecs)

    @property
    def computed_later(self) -> Sequence[float]:
        """Seconds by which each bucket delays computation, on devices without slowdown."""
        return self.options.computed_later(self.codecs)

    def computing(self, name: str) -> float:
        """Return the computing seconds of a device per step; inexpensive, updated incrementally."""
        return self._mapper(name).seconds * self.problem.cluster.devices[name].slowdown

    def states(self, name: str) -> States:
        """Return the compute and output formats of the operators of a class."""
        if name not in self._states:
            if name in self._mappers:
                self._states[name] = self._mappers[name].states()
            else:
                self._states[name] = states(self.problem.classes[name].graph, self._requested[name])
        return self._states[name]

    def schedules(self) -> Mapping[str, Schedule]:
        """Return the schedule of a step of each class."""
        full = self.problem.cluster.buckets.whole_graphs
        for name in self.problem.classes:
            if name not in self._schedules:
                self._schedules[name] = scheduled(self.states(name), self._times[name], full)
        return self._schedules

    def memory(self, name: str) -> PeakMemoryEvaluator | None:
        """Return the peak memory evaluator of a class; None if training memory is unknown."""
        part = self.problem.classes[name]
        if name not in self._memories and part.training is not None:
            states = self.states(name)
            key = name, states.names
            # The memory model is expensive, and a search revisits the uniform and the best plans.
            memory = self._evaluators.pop(key, None) or PeakMemoryEvaluator(part, states)
            self._memories[name] = self._evaluators[key] = memory
            while len(self._evaluators) > _SEEN:
                del self._evaluators[next(iter(self._evaluators))]
        return self._memories.get(name)

    def peak(self, name: str) -> int | None:
        """Return the peak memory of a step of a class in bytes; None if unknown."""
        if (memory := self.memory(name)) is None:
            return None
        return memory.peak_bytes

    def fits(self) -> bool:
        """Return whether all limits are met, with inexpensive checks first."""
        problem = self.problem
        if problem.variance is not None and beyond(self.variance, problem.variance):
            return False
        if problem.seconds is not None:
            if any(beyond(self.computing(name), problem.seconds) for name in problem.classes):
                return False
            if beyond(self.seconds, problem.seconds):
                return False
        return not any(
            part.memory is not None and beyond(self.peak(name) or 0, part.memory)
            for name, part in problem.classes.items()
        )

    def evaluate(self) -> Evaluation:
        """Return all metrics of the current plans."""
        result, classes = self.timeline, {}
        for name, part in self.problem.classes.items():
            device = result.played.devices[name]
            classes[name] = DeviceMetrics(
                float(device.seconds.sum()) + device.optimizer,
                result.waiting[name],
                result.sending[name],
                self.peak(name),
                part.variance(self._requested[name]),
            )
        coding, sent = self.options.added(self.codecs), self.options.by_parameter(self.codecs)
        return Evaluation(result.seconds, self.variance, classes, self.codecs, coding, sent)

    @property
    def timeline(self) -> Timeline:
        """Timeline of a step of the cluster, as `qsync_fx.replay` shows it."""
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
        self._requested[name][operator] = fmt
        self._forget(name)

    def _mapper(self, name: str) -> CostMapper:
        if name not in self._mappers:
            graph = self.problem.classes[name].graph
            self._mappers[name] = CostMapper(graph, self._times[name], self._requested[name])
        return self._mappers[name]

    def _forget(self, name: str) -> None:
        """Drop the cached results of a class after a change of its plan."""
        self._timeline = None
        for available in (self._states, self._schedules, self._memories):
            available.pop(name, None)


def without_peaks(problem: Problem) -> Problem:
    """Return the problem without peak memory and its limits, which is faster to evaluate."""
    parts = problem.classes.items()
    classes = {name: replace(part, memory=None, training=None) for name, part in parts}
    return replace(problem, classes=classes)


def with_peaks(problem: Problem, plans: Plans, result: Evaluation) -> Evaluation:
    """Return the evaluation with peaks added for classes that were evaluated without them."""
    figures = dict(result.classes)
    for name, part in problem.classes.items():
        if part.training is not None and figures[name].peak_bytes is None:
            peak = PeakMemoryEvaluator(part, states(part.graph, plans[name])).peak_bytes
            figures[name] = replace(figures[name], peak_bytes=peak)
    return replace(result, classes=figures)


def evaluate_plan(problem: Problem, plans: Plans, codecs: Codecs | None = None) -> Evaluation:
    """Return the metrics of plans of all classes; gradients are in FP32 if no codecs are given."""
    return PlanEvaluator(problem, plans, codecs).evaluate()


def resized(part: DeviceClass, symbolic: ModelGraph, batch: int) -> DeviceClass:
    """Return a device class with another batch.

    Measured times are scaled, see `Scaled`; times of the catalog are computed again. The
    sensitivity is scaled by `Sensitivity.at_batch`.

    `symbolic` is the model graph with the batch per device as its only symbolic size.
    """
    if len(symbolic.symbols) != 1:
        count = len(symbolic.symbols)
        message = f"the model graph needs one symbolic size, its batch, and has {count}"
        do = "explain it with torch._dynamo.mark_dynamic(input, 0) on inputs with a batch axis"
        raise ProfileError(message, do=do)
    before, after = ([op.id for op in each.operators] for each in (part.graph, symbolic))
    if before != after:
        different = next(iter(set(before) ^ set(after)), "their order")
        message = f"with a symbolic batch the model has other operators: {shown(different)}"
        raise ProfileError(message, do="compare with batches that need no other trace")
    (symbol,) = symbolic.symbols
    graph = symbolic.at(**{symbol: batch})
    times: Times = Scaled(part.times, part.graph, graph)
    if isinstance(part.times, DeviceTimes):
        times = part.times.of(graph)
    training = part.training
    if training is not None and training.loss is not None:
        # The memory of the loss scales with the model's outputs.
        live, now = (
            sum(integer_size(each.values[read.value].numel) for read in each.outputs)
            for each in (part.graph, graph)
        )
        sizes = (-(-size * now // live) for size in (training.loss.held, training.loss.most))
        training = replace(training, loss=LossMemory(*sizes) if live else None)
    sensitivity = part.sensitivity.at_batch(_batch_of(part.graph, symbolic), batch)
    return replace(
        part, graph=graph, times=times, sensitivity=sensitivity, anchors=(), training=training
    )


def may_recompute(part: DeviceClass) -> bool:
    """Return whether recomputation can be planned: known memory, and formats without scales."""
    if part.fixed_plan is None:
        plain = any(not FORMATS[fmt].scaled for fmt in part.formats)
    else:
        plain = all(not FORMATS[fmt].scaled for fmt in part.fixed_plan.values())
    return plain and part.training is not None


def recomputing(part: DeviceClass, budget: float) -> DeviceClass:
    """Return a device class that recomputes activations within an activation memory budget.

    Operators that are recomputed under a uniform plan of any of its formats run their forward pass
    again in the backward pass. Scaled formats are left out: the tensors that the partitioner saves
    next to quantized ones are not predicted. Raises `PlanError` unless `may_recompute`.
    """
    if budget == 1.0:
        return part
    if not may_recompute(part) or part.training is None:
        do = "measure with the optimizer, and allow a format without scales, such as fp32"
        raise PlanError("recomputation needs a known memory and a format without scales", do=do)
    formats = tuple(fmt for fmt in part.formats if not FORMATS[fmt].scaled)
    operators = set[str]()
    for fmt in formats:
        forward = Forward(states(part.graph, part.uniform(fmt)), part.training.fused_attention)
        operators.update(recomputed(forward, Backward(forward).tasks, budget).operators())
    times = RecomputingTimes(part.times, frozenset(operators))
    training = replace(part.training, memory_budget=budget)
    return replace(part, times=times, training=training, anchors=(), formats=formats)


def _batch_of(graph: ModelGraph, symbolic: ModelGraph) -> float:
    """Return the batch of a graph, from the first tensor that is proportional to it."""
    for value, sized in zip(symbolic.values, graph.values, strict=True):
        if isinstance(value.numel, sympy.Expr):
            for symbol in value.numel.free_symbols:
                if (value.numel / symbol).is_number:
                    return float(sized.numel / (value.numel / symbol))
    message = "no tensor of the model has a number of elements proportional to its batch"
    raise ProfileError(message, do="compare with batches that need no other trace")


@dataclass(frozen=True)
class _DerivedTimes:
    """Times of a device, of which subclasses change the operators."""

    times: Times = field(repr=False)

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


@dataclass(frozen=True)
class Scaled(_DerivedTimes):
    """Measured times, scaled to another batch.

    An operator's time scales with its FLOPs, or with its bytes if it has no FLOPs. With the
    measured batch, times do not change.
    """

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

    def _more(self, operator: str, state: OperandState) -> float:
        before, after = (
            graph.operator(operator).costs[state.names].work for graph in (self.before, self.after)
        )
        if before.flops:
            return float(after.flops) / float(before.flops)
        return float(after.bytes) / float(before.bytes) if before.bytes else 1.0


@dataclass(frozen=True)
class RecomputingTimes(_DerivedTimes):
    """Times of a step whose backward pass repeats the forward pass of some operators."""

    operators: Collection[str]

    def operator(
        self, operator: str, state: OperandState, around: Sequence[OperandState | None]
    ) -> Seconds:
        return self._repeated(operator, self.times.operator(operator, state, around))

    def least(self, operator: str, state: OperandState, neighbours: Beside = ANYBODY) -> Seconds:
        return self._repeated(operator, self.times.least(operator, state, neighbours))

    def cast(
        self, operator: str, before: str, after: str, numel: int, differentiated: bool
    ) -> Seconds:
        result = self.times.cast(operator, before, after, numel, differentiated)
        return self._repeated(operator, result)

    def _repeated(self, operator: str, seconds: Seconds) -> Seconds:
        if operator not in self.operators:
            return seconds
        return replace(seconds, backward=seconds.backward + seconds.forward)
