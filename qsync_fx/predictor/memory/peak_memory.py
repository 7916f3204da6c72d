"""Peak memory of a training step under a plan, by category and format.

`step_memory` is a pure function of the model graph, the operator states and the memory outside of
the passes. `anchored_bytes` corrects it by measured peaks: a measured plan has no error, others
average the errors of the measured ones, weighted by the share of equal operator states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from types import MappingProxyType

from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States
from qsync_fx.predictor.memory.backward import Backward
from qsync_fx.predictor.memory.buffers import Buffer, Category, Kind, Live, Task, lives, whole
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.memory.kernel_order import ordered
from qsync_fx.predictor.model.model_graph import ModelGraph

_FP32 = 4


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer, in FP32 values per parameter element.

    `qsync_fx.profiler.timing.measured_memory.optimizer_memory` measures it. The constants below are
    for torch's CPU optimizers.

    Attributes:
        state: persistent state.
        temporary: temporaries during the update of a parameter.
        before: temporaries of the previous parameter that are still live then.
        together: temporaries for all parameters at once, in an optimizer with a joint update.
    """

    state: float = 0.0
    temporary: float = 0.0
    before: float = 0.0
    together: float = 0.0

    def state_bytes(self, numels: Sequence[int]) -> int:
        return round(self.state * sum(numels)) * _FP32

    def step_bytes(self, numels: Sequence[int]) -> int:
        """Return the peak of an optimizer step beyond state and gradients, in bytes."""
        pairs = zip(numels, [0, *numels], strict=False)
        alone = max(
            (self.temporary * owned + self.before * before for owned, before in pairs), default=0.0
        )
        return round(alone + self.together * sum(numels)) * _FP32


SGD = OptimizerMemory()
MOMENTUM = OptimizerMemory(state=1)
ADAM = OptimizerMemory(state=2, temporary=2, before=1)
FUSED_ADAM = OptimizerMemory(state=2)


@dataclass(frozen=True)
class LossMemory:
    """Memory of a loss outside of the compiled model, for the results of one batch, in bytes.

    `qsync_fx.profiler.timing.measured_memory.loss_memory` measures it.

    Attributes:
        held: live throughout the model's backward pass, beyond the incoming gradients. On a CPU,
            torch's mse_loss and smooth_l1_loss retain the storage of all differences.
        most: peak between the model's results and their gradients, both included.
    """

    held: int = 0
    most: int = 0


@dataclass(frozen=True)
class TrainingMemory:
    """Memory settings of a training.

    Attributes:
        optimizer: memory of the optimizer.
        buckets: whether gradients are copied into communication buckets, as in
            DistributedDataParallel without gradient_as_bucket_view.
        loss: memory of a loss outside of the model. None if unknown: incoming gradients of the
            backward pass then count as live throughout it, as an estimate.
    """

    optimizer: OptimizerMemory = SGD
    buckets: bool = False
    loss: LossMemory | None = None


_HELD = frozenset({Category.PARAMETERS, Category.OPTIMIZER})


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a step.

    Attributes:
        place: "forward", "backward" or "optimizer".
        operator: id of the running operator; "" for none.
        kinds: bytes by category and format. The format is None for categories without distinction
            by format.
    """

    place: str
    operator: str
    kinds: Mapping[Kind, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())

    def of(self, category: Category) -> int:
        """Return the bytes of a category."""
        return sum(size for (item, _), size in self.kinds.items() if item is category)

    def __str__(self) -> str:
        where = ", ".join(filter(None, (self.place, self.operator)))
        lines = [f"{self.bytes / 1e6:10.2f} MB  {where}"]
        for (category, fmt), size in sorted(self.kinds.items(), key=lambda item: -item[1]):
            kind = f"{category} in {fmt}" if fmt else category
            lines.append(f"{size / 1e6:10.2f} MB    {kind}")
        return "\n".join(lines)


@dataclass(frozen=True)
class StepMemory:
    """Live bytes over a training step.

    Attributes:
        moments: moments of the step, in order.
    """

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes before the step: parameters, buffers, the batch and the optimizer state."""
        return sum(self.moments[0].of(category) for category in _HELD)

    @property
    def step_bytes(self) -> int:
        """Peak bytes beyond `held_bytes`.

        `qsync_fx.profiler.timing.measured_memory.measured_peak` measures the same quantity.
        """
        return self.peak.bytes - self.held_bytes

    def __str__(self) -> str:
        return f"most at once:\n{self.peak}"


def step_memory(
    states: States, training: TrainingMemory | None = None, tasks: Sequence[Task] | None = None
) -> StepMemory:
    """Return the live bytes of a step over time.

    Args:
        states: operator states under the plan.
        training: memory of optimizer, loss and buckets.
        tasks: tasks of one of the step's `Orders`; None for the expected order.

    Raises:
        ProfileError: the model has symbolic sizes.
    """
    training = training or TrainingMemory()
    if tasks is None:
        tasks = step_tasks(states, training)
    made = {buffer for task in tasks if not task.backward for buffer in task.writes}
    saved = made & {buffer for task in tasks if task.backward for buffer in task.reads}

    def kind(buffer: Buffer) -> Kind:
        if buffer in saved:
            return Category.SAVED, buffer.format
        if buffer.category is Category.CASTS:
            return Category.CASTS, buffer.format
        return buffer.category, None

    live_bytes, working = _held(states.graph, training), kind(Buffer("", None, 0))
    result = [_moment(live, live_bytes) for live in lives(tasks, True, kind, working)]
    return StepMemory((*result, _optimizer(states.graph, training, live_bytes)))


def step_tasks(states: States, training: TrainingMemory | None = None) -> list[Task]:
    """Return the tasks of both passes of a step in the expected execution order."""
    return Orders.of(states, training).expected


@dataclass(frozen=True)
class Orders:
    """Tasks of both passes of a step in two possible execution orders.

    Attributes:
        written: program order.
        expected: order that a compiler is expected to choose to reduce peak memory.
    """

    written: list[Task]
    expected: list[Task]

    @classmethod
    def of(cls, states: States, training: TrainingMemory | None = None) -> Orders:
        """Return both orders, for a training with a known or an unknown loss."""
        loss = None if training is None else training.loss
        forward = Forward(states)
        backward = Backward(forward)
        existing = _by_graph(states.graph, forward.tasks)
        back = _by_graph(states.graph, backward.tasks)
        saved, written, expected = set[Buffer](), list[Task](), list[Task]()
        made = {buffer for part in existing for task in part for buffer in task.writes}
        # A compiler counts graph inputs as live throughout, such as incoming gradients.
        inputs = {buffer for task in backward.incoming for buffer in task.writes}
        for part in reversed([*existing, backward.incoming, *back]):
            now, then = list(part), ordered(part, saved | forward.outputs | inputs)
            if loss is None:
                now, then = _held_throughout(now, made), _held_throughout(then, made)
            written, expected = [*now, *written], [*then, *expected]
            saved |= {buffer for task in part for buffer in (*task.reads, *task.writes)}
        if loss is not None:
            written, expected = (_with_loss(tasks, loss, inputs) for tasks in (written, expected))
        return cls(written, expected)


def most_bytes(states: States, training: TrainingMemory | None = None) -> int:
    """Return the larger peak of both execution orders in bytes, parameters included."""
    orders = Orders.of(states, training)
    return max(
        step_memory(states, training, tasks).peak.bytes
        for tasks in (orders.expected, orders.written)
    )


def _by_graph(graph: ModelGraph, tasks: Sequence[Task]) -> list[list[Task]]:
    """Return the tasks per graph; a compiler sorts each graph separately."""
    result: dict[int, list[Task]] = {}
    index = -1
    for task in tasks:
        if task.operator:
            index = graph.operators[graph.places[task.operator]].graph
        result.setdefault(index, []).append(task)
    return list(result.values())


def _held_throughout(tasks: list[Task], made: Set[Buffer]) -> list[Task]:
    """Return the tasks of a pass, with incoming gradients live until its end.

    Autograd does not retain them (torch 2.13). They represent the memory of an unknown loss outside
    of the model, which may retain as much (`LossMemory`).
    """
    existing = made | {buffer for task in tasks for buffer in task.writes}
    inputs = {
        buffer: None
        for task in tasks
        if task.backward
        for buffer in task.reads
        if buffer not in existing
    }
    if inputs:
        tasks[-1] = replace(tasks[-1], holds=(*tasks[-1].holds, *inputs))
    return tasks


def _with_loss(tasks: list[Task], loss: LossMemory, value: Set[Buffer]) -> list[Task]:
    """Return the tasks with the memory of the loss, while it runs and during the backward pass."""
    ends = [index for index, task in enumerate(tasks) if not value.isdisjoint(task.writes)]
    if not ends:
        return tasks
    result, begun = list(tasks), ends[-1]
    more = max(0, loss.most - loss.held - sum(buffer.bytes for buffer in value))
    saved = Buffer("loss", None, loss.held, Category.LOSS)
    result[begun] = replace(result[begun], writes=(*result[begun].writes, saved), workspace=more)
    result[-1] = replace(result[-1], holds=(*result[-1].holds, saved))
    return result


def peak_bytes(states: States, training: TrainingMemory | None = None) -> int:
    """Return the peak memory of a step in bytes, including parameters and optimizer state."""
    return step_memory(states, training).peak.bytes


def _held(graph: ModelGraph, training: TrainingMemory) -> Mapping[Kind, int]:
    parameters = sum(whole(p.numel) * p.dtype_bytes for p in graph.parameters)
    result: dict[Kind, int] = {(Category.PARAMETERS, None): parameters + sum(_given(graph))}
    if state := training.optimizer.state_bytes(_trained(graph)):
        result[Category.OPTIMIZER, None] = state
    if training.buckets:
        result[Category.BUCKETS, None] = _gradients(graph)
    return MappingProxyType(result)


def _given(graph: ModelGraph) -> Iterator[int]:
    for index, value in enumerate(graph.values):
        if value.source in ("buffer", "input") and value.tensor == index:
            itemsize = FORMATS[value.own].dtype.itemsize if value.own is not None else 0
            yield whole(value.numel) * itemsize + whole(value.fixed)


def _trained(graph: ModelGraph) -> list[int]:
    return [whole(parameter.numel) for parameter in graph.parameters if parameter.trained]


def _gradients(graph: ModelGraph) -> int:
    return sum(
        whole(parameter.numel) * parameter.dtype_bytes
        for parameter in graph.parameters
        if parameter.trained
    )


def _moment(live: Live[Kind], live_bytes: Mapping[Kind, int]) -> Moment:
    place = "backward" if live.backward else "forward"
    return Moment(place, live.operator, MappingProxyType({**live_bytes, **live.kinds}))


def _optimizer(graph: ModelGraph, training: TrainingMemory, live: Mapping[Kind, int]) -> Moment:
    kinds = {**live, (Category.GRADIENTS, None): _gradients(graph)}
    if temporary := training.optimizer.step_bytes(_trained(graph)):
        kinds[Category.TEMPORARY, None] = temporary
    return Moment("optimizer", "", MappingProxyType(kinds))


@dataclass(frozen=True)
class Anchor:
    """Plan with a measured peak.

    Attributes:
        states: operator states under the plan.
        step_bytes: measured peak of a step of a single rank, beyond the bytes before the step.
    """

    states: States
    step_bytes: int

    def error(self, training: TrainingMemory | None) -> int:
        """Return the measured minus the predicted peak, in bytes."""
        if training not in self._errors:
            # The measurement excludes buckets, whose size is known.
            alone = None if training is None else replace(training, buckets=False)
            self._errors[training] = self.step_bytes - step_memory(self.states, alone).step_bytes
        return self._errors[training]

    @cached_property
    def _errors(self) -> dict[TrainingMemory | None, int]:
        return {}


def anchored_bytes(
    states: States,
    anchors: Sequence[Anchor],
    training: TrainingMemory | None = None,
    memory: StepMemory | None = None,
) -> int:
    """Return the peak of a step beyond the bytes before it, corrected by measured plans.

    Args:
        states: operator states under the plan.
        anchors: measured plans.
        training: memory of optimizer, loss and buckets.
        memory: result of `step_memory` for these states, if available.

    Raises:
        ProfileError: there are no anchors, or a measured peak is not positive.
    """
    if not anchors:
        raise ProfileError(
            "no measured plan to predict from", do="measure one, or use predictor.memory.peak_bytes"
        )
    if wrong := [anchor.step_bytes for anchor in anchors if anchor.step_bytes <= 0]:
        raise ProfileError(
            f"the measured peak of a step is {wrong[0]} bytes, which is not positive",
            do="measure it again",
        )
    pure = (memory or step_memory(states, training)).step_bytes
    errors = [anchor.error(training) for anchor in anchors]
    equal = [_alike(states, anchor.states) for anchor in anchors]
    if 1.0 in equal:
        return pure + errors[equal.index(1.0)]
    total = sum(equal)
    if not total:
        return pure
    return pure + round(
        sum(error * share for error, share in zip(errors, equal, strict=True)) / total
    )


def _alike(first: States, second: States) -> float:
    """Return the share of operators in equal states, weighted by output elements."""
    sizes = [int(first.graph.values[operator.result].numel) for operator in first.graph.operators]
    same = [mine == theirs for mine, theirs in zip(first.names, second.names, strict=True)]
    if all(same):
        return 1.0
    return min(
        sum(size for size, item in zip(sizes, same, strict=True) if item) / max(sum(sizes), 1),
        1 - 1e-9,
    )
