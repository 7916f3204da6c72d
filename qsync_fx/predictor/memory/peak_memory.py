"""Peak memory of a training step under a plan, by category and format.

`step_memory` depends on the operator states and the memory outside of the passes. `anchored_bytes`
replaces its peak by a measured one if there is one for the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import pairwise

from qsync_fx.devices.cpu_features import multiplied_in_fp32
from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.predictor.cost_mapper.plan_states import States
from qsync_fx.predictor.memory.backward import Backward, recomputed
from qsync_fx.predictor.memory.buffers import (
    Buffer,
    Category,
    Kind,
    Task,
    integer_size,
    lives,
    value_bytes,
)
from qsync_fx.predictor.memory.cuda_memory import (
    FRAGMENTATION,
    allocated,
    on_gpu,
    workspace_bytes,
)
from qsync_fx.predictor.memory.forward import Forward
from qsync_fx.predictor.memory.kernel_order import ordered
from qsync_fx.predictor.model.model_graph import ModelGraph, ModelParameter

_FP32 = 4


@dataclass(frozen=True)
class OptimizerMemory:
    """Memory of an optimizer, in FP32 values per parameter element.

    The constants below are for torch's CPU optimizers.

    Attributes:
        state: persistent state.
        temporary, before: temporaries during the update of a parameter, and those of the previous
            parameter that are still live then.
        together: temporaries for all parameters at once, in an optimizer with a joint update.
    """

    state: float = 0.0
    temporary: float = 0.0
    before: float = 0.0
    together: float = 0.0

    def state_bytes(self, numels: Sequence[int]) -> int:
        return round(self.state * sum(numels)) * _FP32

    def step_bytes(self, numels: Sequence[int], on_gpu: bool = False) -> int:
        """Return the peak of an optimizer step beyond state and gradients, in bytes.

        On a GPU, torch's optimizers update all parameters at once (`foreach`).
        """
        pairs = pairwise([0, *numels])
        alone = max((self.temporary * n + self.before * before for before, n in pairs), default=0.0)
        if on_gpu:
            alone = self.temporary * sum(numels)
        return round(alone + self.together * sum(numels)) * _FP32


SGD = OptimizerMemory()
MOMENTUM = OptimizerMemory(state=1)
ADAM = OptimizerMemory(state=2, temporary=2, before=1)


@dataclass(frozen=True)
class LossMemory:
    """Memory of a loss outside of the compiled model, for the results of one batch, in bytes.

    Attributes:
        held: live throughout the model's backward pass, beyond the incoming gradients.
        most: peak between the model's results and their gradients, both included.
    """

    held: int = 0
    most: int = 0


@dataclass(frozen=True)
class TrainingMemory:
    """Memory settings of a training.

    `buckets`: gradients are copied into communication buckets, as in DistributedDataParallel
    without gradient_as_bucket_view. The `loss` is outside of the model; None if unknown.
    `fused_attention`: torch's fused kernels accept all attention on a GPU. They refuse some masks;
    then matrices of scores are in memory. `memory_budget`: share of the saved activations that stay
    saved, see the option "memory_budget"; others are recomputed.
    """

    optimizer: OptimizerMemory = SGD
    buckets: bool = False
    loss: LossMemory | None = None
    fused_attention: bool = True
    memory_budget: float = 1.0


_HELD = frozenset({Category.PARAMETERS, Category.OPTIMIZER, Category.CUDA})


@dataclass(frozen=True)
class Moment:
    """Live bytes at one moment of a step, by category and format.

    `place` is "forward", "backward" or "optimizer", `operator` the id of the running one, if any.
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
    """Live bytes at the moments of a training step, in order."""

    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment:
        """The first moment with the most live bytes."""
        return max(self.moments, key=lambda moment: moment.bytes)

    @property
    def held_bytes(self) -> int:
        """Bytes before the step: parameters, buffers, batch, optimizer state and workspaces."""
        return sum(self.moments[0].of(category) for category in _HELD)

    @property
    def step_bytes(self) -> int:
        """Peak bytes beyond `held_bytes`, as `measured_memory.measured_peak` measures it."""
        return self.peak.bytes - self.held_bytes

    def __str__(self) -> str:
        return f"most at once:\n{self.peak}"


def step_memory(
    states: States, training: TrainingMemory | None = None, tasks: Sequence[Task] | None = None
) -> StepMemory:
    """Return the live bytes of a step over time; raise `ProfileError` for symbolic sizes.

    `tasks` are one of the step's `Orders`, by default the expected one.
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

    trained = [parameter for parameter in states.graph.parameters if parameter.trained]
    numels = [integer_size(parameter.numel) for parameter in trained]
    gradients = sum(_parameter_bytes(states.graph, parameter) for parameter in trained)
    before: dict[Kind, int] = {(Category.PARAMETERS, None): _given_bytes(states.graph)}
    if state := training.optimizer.state_bytes(numels):
        before[Category.OPTIMIZER, None] = state
    if training.buckets:
        before[Category.BUCKETS, None] = gradients
    if on_gpu(states.graph):
        before[Category.CUDA, None] = workspace_bytes(states.graph.device) + FRAGMENTATION
    result = []
    for live in lives(tasks, kind, kind(Buffer("", None, 0))):
        place = "backward" if live.backward else "forward"
        result.append(Moment(place, live.operator, {**before, **live.kinds}))
    update = {**before, (Category.GRADIENTS, None): gradients}
    if temporary := training.optimizer.step_bytes(numels, on_gpu(states.graph)):
        update[Category.TEMPORARY, None] = temporary
    return StepMemory((*result, Moment("optimizer", "", update)))


def step_tasks(states: States, training: TrainingMemory | None = None) -> list[Task]:
    """Return the tasks of both passes of a step in the expected execution order."""
    return Orders.of(states, training).expected


@dataclass(frozen=True)
class Orders:
    """Tasks of both passes of a step in program order and in the order expected of a compiler."""

    written: list[Task]
    expected: list[Task]

    @classmethod
    def of(cls, states: States, training: TrainingMemory | None = None) -> Orders:
        """Return both orders, for a training with a known or an unknown loss."""
        training = training or TrainingMemory()
        forward = Forward(states, training.fused_attention)
        backward = Backward(forward)
        tasks = backward.tasks
        if training.memory_budget < 1.0:
            tasks = recomputed(forward, tasks, training.memory_budget).tasks
        # A compiler counts graph inputs as live throughout, such as incoming gradients.
        inputs = {buffer for task in backward.incoming for buffer in task.writes}
        saved, written, expected = set[Buffer](), list[Task](), list[Task]()
        parts = (
            *_by_graph(states.graph, _with_copies(forward, forward.tasks)),
            backward.incoming,
            *_by_graph(states.graph, _with_copies(forward, tasks)),
        )
        for part in reversed(parts):
            written = [*part, *written]
            expected = [*ordered(part, saved | forward.outputs | inputs), *expected]
            saved |= {buffer for task in part for buffer in (*task.reads, *task.writes)}
        if inputs:
            loss = training.loss
            written, expected = (_with_loss(tasks, loss, inputs) for tasks in (written, expected))
        return cls(written, expected)


def _by_graph(graph: ModelGraph, tasks: Sequence[Task]) -> list[list[Task]]:
    """Return the tasks per graph; a compiler sorts each graph separately."""
    result: dict[int, list[Task]] = {}
    index = -1
    for task in tasks:
        if task.operator:
            index = graph.operators[graph.places[task.operator]].graph
        result.setdefault(index, []).append(task)
    return list(result.values())


def _with_copies(forward: Forward, tasks: list[Task]) -> list[Task]:
    """Return the tasks with the FP32 copies that products make on a CPU without AVX-512."""
    dtypes = multiplied_in_fp32() if forward.graph.device == "cpu" else ()
    if not dtypes:
        return tasks
    narrow = {name for name, row in FORMATS.items() if row.plain and row.dtype in dtypes}
    products = {item.id for item in forward.graph.operators if forward.multiplies(item)}
    result = []
    for task in tasks:
        if task.library and task.reads and task.operator in products:
            read, written = (
                sum(buffer.bytes for buffer in buffers if buffer.format in narrow)
                for buffers in (task.reads, task.writes)
            )
            # The copies of the operands are freed before the rounded result is allocated.
            copies = max(2 * read + written, 2 * written)
            result.append(replace(task, workspace=task.workspace + copies))
        else:
            result.append(task)
    return result


def _with_loss(tasks: list[Task], loss: LossMemory | None, gradients: Set[Buffer]) -> list[Task]:
    """Return the tasks with the memory of the loss, while it runs and during the backward pass.

    An unknown loss is assumed to retain as much as the incoming gradients (`LossMemory`).
    """
    if loss is None:
        return [*tasks[:-1], replace(tasks[-1], holds=(*tasks[-1].holds, *gradients))]
    saved = Buffer("loss", None, loss.held, Category.LOSS)
    result = list(tasks)
    last = max(n for n, task in enumerate(tasks) if not gradients.isdisjoint(task.writes))
    more = max(0, loss.most - loss.held - sum(buffer.bytes for buffer in gradients))
    result[last] = replace(result[last], writes=(*result[last].writes, saved), workspace=more)
    result[-1] = replace(result[-1], holds=(*result[-1].holds, saved))
    return result


def peak_bytes(states: States, training: TrainingMemory | None = None) -> int:
    """Return the peak memory of a step in bytes, including parameters and optimizer state."""
    return step_memory(states, training).peak.bytes


def _given_bytes(graph: ModelGraph) -> int:
    """Return the bytes of parameters, buffers and the batch."""
    result = sum(_parameter_bytes(graph, parameter) for parameter in graph.parameters)
    for index, value in enumerate(graph.values):
        if value.source in ("buffer", "input") and value.tensor == index:
            result += allocated(graph, value_bytes(value, value.own))
    return result


def _parameter_bytes(graph: ModelGraph, parameter: ModelParameter) -> int:
    return allocated(graph, integer_size(parameter.numel) * parameter.dtype_bytes)


@dataclass(frozen=True)
class Anchor:
    """Operator states of a plan with a measured peak of a step, beyond the bytes before it."""

    states: States
    step_bytes: int

    def __post_init__(self) -> None:
        if self.step_bytes <= 0:
            message = f"the measured peak of a step is {self.step_bytes} bytes, not a positive size"
            raise ProfileError(message, do="measure it again")

    def error(self, training: TrainingMemory | None) -> int:
        """Return the measured minus the predicted peak, in bytes."""
        # The measurement excludes buckets, whose size is known.
        alone = training and replace(training, buckets=False)
        return self.step_bytes - step_memory(self.states, alone).step_bytes


def anchored_bytes(
    states: States,
    anchors: Sequence[Anchor],
    training: TrainingMemory | None = None,
    memory: StepMemory | None = None,
) -> int:
    """Return the peak of a step beyond the bytes before it, as measured if an anchor has it."""
    predicted = (memory or step_memory(states, training)).step_bytes
    for anchor in anchors:
        if anchor.states.names == states.names:
            return predicted + anchor.error(training)
    return predicted
