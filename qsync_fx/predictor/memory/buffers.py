"""What a step puts into memory, in order: buffers, the tasks that write and read them, and what is held while a task runs.

Invariant: a buffer is there from the task that writes it to the last that reads it, and to the end of the step where it stays.

What the memory of a step tells operators apart by, and sizes as numbers.

The values of a model in a step: where they lie, how large they are, and who makes them.

Invariant: follows from the graph and the states of its operators alone; nothing is said of when.
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
from qsync_fx.predictor.model.model_graph import ModelOperator, Name

HEAVY = ("exp", "log", "log10", "log1p", "log2", "sigmoid", "tanh")
"""What Inductor has computed once, into memory, where several read it (on a CPU)."""
SIGMOIDS = ("silu",)
"""Activations whose gradient Inductor computes from a sigmoid that it reads several times."""
GATES = ("relu", "threshold")
GATHERS = ("embedding",)


def convolves(operator: ModelOperator) -> bool:
    return "conv" in operator.row


def attends(operator: ModelOperator) -> bool:
    """Whether it is attention as one product of query, key and value, all of whose gradients one kernel computes."""
    return "attention" in operator.row


def dear_gradient(operator: ModelOperator) -> bool:
    """Whether its gradient is computed from something `HEAVY` that it reads several times."""
    return operator.row in SIGMOIDS or (operator.row == "gelu" and operator.method == "tanh")


def draws_alone(operator: ModelOperator) -> bool:
    """Whether what it drops is drawn as a mask by one kernel, with no random numbers in memory."""
    return operator.method == VECTORS


def pools(operator: ModelOperator) -> bool:
    """Whether it gives the largest of each window."""
    return operator.row.startswith("max_pool")


def whole(size: Size) -> int:
    """Returns a size as a number; raises `ProfileError` for an expression."""
    try:
        return int(size)
    except TypeError:
        raise ProfileError(
            f"memory is predicted for sizes that are numbers, and one is {size}",
            do="put numbers in their place, graph.at(batch=64), or explain the model with static shapes",
        ) from None


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
                # Without a mask it gives back what it reads.
                tensor = self._roots[operator.reads[0].value]
                same[operator.result] = same.get(tensor, tensor)
        self._roots = [same.get(tensor, tensor) for tensor in self._roots]
        values = [self.graph.values[root] for root in self._roots]
        self._given = [value.source != "operator" for value in values]
        self._makers = [
            None if argument or value.operator is None else self.graph.operators[value.operator]
            for value, argument in zip(values, self._given, strict=True)
        ]

    def root(self, value: int) -> int:
        """Returns the place of the value whose memory a value lies in."""
        return self._roots[value]

    def bytes(self, value: int, fmt: Name) -> int:
        """Returns the bytes of a value in a format."""
        live = self.graph.values[value]
        floats = FORMATS[fmt].dtype.itemsize * whole(live.numel) if fmt is not None else 0
        return floats + whole(live.fixed)

    def multiplies(self, operator: ModelOperator) -> bool:
        """Whether it is a product, which a kernel of a library computes."""
        return operator.row in self._products

    def multiplied(self, operator: ModelOperator) -> tuple[int, int]:
        """Returns the places of the two readings that a product multiplies, whatever is added to it before or behind them."""
        added = self._products[operator.row]
        first, second = [place for place in range(2 + len(added)) if place not in added][:2]
        return first, second

    def other(self, operator: ModelOperator, place: int) -> int:
        """Returns the place of the factor of a product of two with which the gradient of the one at a place is computed."""
        return sum(self.multiplied(operator)) - place

    def made_by(self, value: int) -> ModelOperator | None:
        """Returns the operator that makes a value; None for what is there before the step."""
        return self._makers[value]

    def given(self, value: int) -> bool:
        """Whether a value is there before the step."""
        return self._given[value]

    def is_part(self, value: int) -> bool:
        """Whether it is a view of a part of a larger value, which a product reads from a copy."""
        whole_one = self.graph.values[self.root(value)]
        return not self.given(value) and whole(self.graph.values[value].numel) < whole(
            whole_one.numel
        )


class Category(StrEnum):
    """What bytes are for."""

    PARAMETERS = "parameters, buffers and batch"
    OPTIMIZER = "optimizer state"
    GRADIENTS = "gradients of parameters"
    BUCKETS = "buckets of gradients"
    SAVED = "saved for the backward pass"
    CASTS = "copies in other formats"
    LOSS = "kept by the loss"
    TEMPORARY = "temporaries"


@dataclass(frozen=True, eq=False)
class Buffer:
    """
    Attributes:
        name: of the value in it.
        format: what its floating-point values are in.
        bytes: how many.
        category: what they are for, where nothing keeps them for the backward pass.
        stays: whether it outlives the backward pass, as gradients of parameters do.
        passing: whether it is in memory only if another kernel reads it than the one that writes it.
    """

    name: str
    format: Name
    bytes: int
    category: Category = Category.TEMPORARY
    stays: bool = False
    passing: bool = False


@dataclass(frozen=True)
class Task:
    """
    Attributes:
        operator: the id of the operator that it is done for; "" for the loss.
        backward: whether it belongs to the backward pass.
        library: whether a library's kernel does it. What a compiler makes of others between two of those is one kernel: it allocates all
            that it writes before it runs, and releases nothing before it has.
        reads, writes: buffers; what was written before is not allocated again.
        workspace: bytes that it takes while it runs.
        sums: whether it sums over the batch, which no kernel does that computes element by element.
        holds: what is not released before it has run, though a compiler reckons that it were.
        anew: whether it lays out anew what it reads, so that it writes over none of that.
        apart: whether it does so in an order of elements of its own, so that it is no kernel with others to a compiler's sorts.
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
    """What is held while a task, or several that are one kernel, runs.

    Attributes:
        operator: the last operator that it is for.
        backward: whether that is in the backward pass.
        kinds: bytes by what they count as.
    """

    operator: str
    backward: bool
    kinds: Mapping[K, int]

    @property
    def bytes(self) -> int:
        return sum(self.kinds.values())


def lives(
    tasks: Sequence[Task], grouped: bool, kind: Callable[[Buffer], K], workspace: K
) -> list[Live[K]]:
    """Returns what is held at each moment of the tasks in this order.

    Args:
        grouped: whether what stands between two kernels of libraries is one kernel.
        kind: what a buffer counts as.
        workspace: what bytes count as that are taken while a task runs.
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
    kinds: dict[K, int] = {}
    result: list[Live[K]] = []
    index = 0
    while index < len(tasks):
        end = index + 1
        while grouped and not tasks[index].library and end < len(tasks) and not tasks[end].library:
            end += 1
        gone = [buffer for place in range(index, end) for buffer in dying[place]]
        for task in tasks[index:end]:
            for buffer in task.writes:
                if buffer in live or (buffer.passing and ends[buffer] < end):
                    continue
                under = _under(task, buffer, gone, live)
                if under is not None:
                    live.remove(under)
                    kinds[kind(under)] -= under.bytes
                live.add(buffer)
                subject = kind(buffer)
                kinds[subject] = kinds.get(subject, 0) + buffer.bytes
        last, working = tasks[end - 1], max(task.workspace for task in tasks[index:end])
        now = {subject: size for subject, size in kinds.items() if size > 0}
        if working:
            now[workspace] = now.get(workspace, 0) + working
        result.append(Live(last.operator, last.backward, now))
        for buffer in gone:
            if buffer in live:
                live.remove(buffer)
                kinds[kind(buffer)] -= buffer.bytes
        index = end
    return result


def _under(task: Task, buffer: Buffer, gone: Sequence[Buffer], live: set[Buffer]) -> Buffer | None:
    """What a task writes a buffer over: something as large that nothing else reads any more."""
    if task.library or task.anew:
        return None
    return next(
        (b for b in gone if b in live and b in task.reads and b.bytes == buffer.bytes), None
    )
