"""Buffers of a training step, the tasks that write and read them, and their liveness.

`Values` maps the values of a model to storage and sizes under given operator states. `lives`
computes the live bytes over time for a list of tasks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from qsync_fx.errors import ProfileError
from qsync_fx.formats import FORMATS
from qsync_fx.graph.cost_algebra import Size
from qsync_fx.graph.graph import VECTORS
from qsync_fx.ops import table
from qsync_fx.predictor.cost_mapper.plan_states import States
from qsync_fx.predictor.memory.cuda_memory import allocated
from qsync_fx.predictor.model.model_graph import ModelOperator, Name, Value

HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
"""Operators whose result Inductor materializes on a CPU if several operators read it."""
GATES = ("relu", "threshold")
GATHERS = ("embedding",)


def convolves(operator: ModelOperator) -> bool:
    """Return whether an operator is a convolution."""
    return "conv" in operator.row


def attends(operator: ModelOperator) -> bool:
    """Return whether an operator is attention, with a single kernel for all of its gradients."""
    return "attention" in operator.row


def has_expensive_gradient(operator: ModelOperator) -> bool:
    """Return whether the gradient of an operator reads a `HEAVY` intermediate several times."""
    return operator.row == "silu" or (operator.row == "gelu" and operator.method == "tanh")


def draws_alone(operator: ModelOperator) -> bool:
    """Return whether one kernel draws the dropout mask, without random numbers in memory."""
    return operator.method == VECTORS


def pools(operator: ModelOperator) -> bool:
    """Return whether an operator is max pooling."""
    return operator.row.startswith("max_pool")


def integer_size(size: Size) -> int:
    """Return a size as an integer; raise `ProfileError` for a symbolic size."""
    try:
        return int(size)
    except TypeError:
        message = f"memory cannot be predicted for the symbolic size {size}"
        do = "set numbers with graph.at(batch=64), or explain the model with static shapes"
        raise ProfileError(message, do=do) from None


def value_bytes(value: Value, fmt: Name) -> int:
    """Return the bytes of a value in a format."""
    floats = FORMATS[fmt].dtype.itemsize * integer_size(value.numel) if fmt is not None else 0
    return floats + integer_size(value.fixed)


class Values:
    def __init__(self, states: States) -> None:
        self.states, self.graph = states, states.graph
        self._products = {row.name: row.added for row in table().values() if row.products}
        self._roots = [value.tensor for value in self.graph.values]
        same: dict[int, int] = {}
        for operator in self.graph.operators:
            if "dropout" in operator.row and not any(
                cost.saved for cost in operator.costs.values()
            ):
                # Dropout without a mask returns its input.
                tensor = self._roots[operator.reads[0].value]
                same[operator.result] = same.get(tensor, tensor)
        self._roots = [same.get(tensor, tensor) for tensor in self._roots]

    def root(self, value: int) -> int:
        """Return the index of the value whose storage a value shares."""
        return self._roots[value]

    def bytes(self, value: int, fmt: Name) -> int:
        """Return the bytes of a value in a format, on a GPU rounded up to allocator blocks."""
        return allocated(self.graph, value_bytes(self.graph.values[value], fmt))

    def multiplies(self, operator: ModelOperator) -> bool:
        """Return whether an operator is a product, which a library kernel computes."""
        return operator.row in self._products

    def multiplied(self, operator: ModelOperator) -> tuple[int, int]:
        """Return the operand indices of a product's two factors, without added operands (bias)."""
        added = self._products[operator.row]
        first, second = [place for place in range(2 + len(added)) if place not in added][:2]
        return first, second

    def other(self, operator: ModelOperator, place: int) -> int:
        """Return the index of the other factor, from which the gradient of a factor is computed."""
        return sum(self.multiplied(operator)) - place

    def made_by(self, value: int) -> ModelOperator | None:
        """Return the operator that computes a value; None for a value from before the step."""
        maker = self.graph.values[self.root(value)].operator
        if maker is None or self.exists_before_step(value):
            return None
        return self.graph.operators[maker]

    def exists_before_step(self, value: int) -> bool:
        """Return whether a value exists before the step."""
        return self.graph.values[self.root(value)].source != "operator"

    def is_part(self, value: int) -> bool:
        """Return whether a value is a view of part of a larger one; products read it as a copy."""
        whole_one = self.graph.values[self.root(value)]
        numel = integer_size(self.graph.values[value].numel)
        return not self.exists_before_step(value) and numel < integer_size(whole_one.numel)


class Category(StrEnum):
    """Purpose of bytes."""

    PARAMETERS = "parameters, buffers and batch"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients of parameters"
    BUCKETS = "buckets of gradients"
    SAVED = "saved for the backward pass"
    CASTS = "copies in other formats"
    LOSS = "kept by the loss"
    CUDA = "workspaces and fragmentation on the GPU"
    TEMPORARY = "temporaries"


@dataclass(frozen=True, eq=False)
class Buffer:
    """Region of memory with one value.

    Attributes:
        category: purpose of the bytes unless they are saved for backward.
        stays: whether it is live after the backward pass, such as parameter gradients.
        passing: whether it is in memory only if a kernel other than its writer reads it.
    """

    name: str
    format: Name
    bytes: int
    category: Category = Category.TEMPORARY
    stays: bool = False
    passing: bool = False


@dataclass(frozen=True)
class Task:
    """Unit of work that reads and writes buffers.

    Attributes:
        operator: id of the operator that it belongs to; "" for the loss.
        library: whether a library kernel runs it.
        reads, writes: buffers; a buffer with an earlier writer is not allocated again.
        workspace: temporary bytes while it runs.
        sums: whether it reduces over the batch, so that no elementwise kernel can include it.
        holds: buffers to free after it, although a compiler assumes an earlier release.
        anew: whether it copies inputs into another layout, so it cannot write in place.
        apart: whether it iterates in an element order of its own, which prevents fusion.
    """

    operator: str
    backward: bool
    library: bool
    reads: frozenset[Buffer] = frozenset()
    writes: tuple[Buffer, ...] = ()
    workspace: int = 0
    holds: tuple[Buffer, ...] = ()
    sums: bool = False
    anew: bool = False
    apart: bool = False


Kind = tuple[Category, Name]
K = TypeVar("K", bound=Hashable)


@dataclass(frozen=True)
class Live(Generic[K]):
    """Live bytes during a kernel, by key of the caller's choice.

    `operator` is the id of its last operator, which runs in the backward pass if `backward`.
    """

    operator: str
    backward: bool
    kinds: Mapping[K, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def lives(tasks: Sequence[Task], kind: Callable[[Buffer], K], workspace: K) -> list[Live[K]]:
    """Return the live bytes over time, by the keys of buffers and of the workspace.

    A buffer is live from the kernel that writes it to the last one that reads it, or to the end of
    the step if it stays. All tasks between two library kernels form one kernel.
    """
    ends = {
        buffer: index
        for index, task in enumerate(tasks)
        for buffer in (*task.reads, *task.writes, *task.holds)
    }
    dying: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer, index in ends.items():
        if not buffer.stays:
            dying[index].append(buffer)
    live: set[Buffer] = set()
    kinds: defaultdict[K, int] = defaultdict(int)
    result: list[Live[K]] = []
    begin = 0
    while begin < len(tasks):
        end = begin + 1
        while not tasks[begin].library and end < len(tasks) and not tasks[end].library:
            end += 1
        kernel, gone = tasks[begin:end], [b for index in range(begin, end) for b in dying[index]]
        for task in kernel:
            for buffer in task.writes:
                if buffer in live or (buffer.passing and ends[buffer] < end):
                    continue
                if (under := _overwritten(task, buffer, gone, live)) is not None:
                    live.remove(under)
                    kinds[kind(under)] -= under.bytes
                live.add(buffer)
                kinds[kind(buffer)] += buffer.bytes
        now = defaultdict(int, {key: size for key, size in kinds.items() if size})
        if working := max(task.workspace for task in kernel):
            now[workspace] += working
        result.append(Live(kernel[-1].operator, kernel[-1].backward, dict(now)))
        for buffer in live.intersection(gone):
            live.remove(buffer)
            kinds[kind(buffer)] -= buffer.bytes
        begin = end
    return result


def _overwritten(
    task: Task, buffer: Buffer, gone: Sequence[Buffer], live: set[Buffer]
) -> Buffer | None:
    """Return a dead input of equal size that a task overwrites; None if there is none."""
    if task.library or task.anew:
        return None
    same_size = (b for b in gone if b in live and b in task.reads and b.bytes == buffer.bytes)
    return next(same_size, None)
