"""What a step puts into memory, in order: buffers, the tasks that write and read them, and what is held while a task runs.

Invariant: a buffer is there from the task that writes it to the last that reads it, and to the end of the step where it stays.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Generic, TypeVar

from qsync_fx.predictor.model.value import Name


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


def lives(tasks: Sequence[Task], grouped: bool, kind: Callable[[Buffer], K], workspace: K) -> list[Live[K]]:
    """Returns what is held at each moment of the tasks in this order.

    Args:
        grouped: whether what stands between two kernels of libraries is one kernel.
        kind: what a buffer counts as.
        workspace: what bytes count as that are taken while a task runs.
    """
    ends = {buffer: at for at, task in enumerate(tasks) for buffer in (*task.reads, *task.writes, *task.holds)}
    dying: defaultdict[int, list[Buffer]] = defaultdict(list)
    for buffer, at in ends.items():
        if not buffer.stays:
            dying[at].append(buffer)
    held: set[Buffer] = set()
    kinds: dict[K, int] = {}
    found: list[Live[K]] = []
    at = 0
    while at < len(tasks):
        end = at + 1
        while grouped and not tasks[at].library and end < len(tasks) and not tasks[end].library:
            end += 1
        gone = [buffer for place in range(at, end) for buffer in dying[place]]
        for task in tasks[at:end]:
            for buffer in task.writes:
                if buffer in held or (buffer.passing and ends[buffer] < end):
                    continue
                under = _under(task, buffer, gone, held)
                if under is not None:
                    held.remove(under)
                    kinds[kind(under)] -= under.bytes
                held.add(buffer)
                what = kind(buffer)
                kinds[what] = kinds.get(what, 0) + buffer.bytes
        last, working = tasks[end - 1], max(task.workspace for task in tasks[at:end])
        now = {what: size for what, size in kinds.items() if size > 0}
        if working:
            now[workspace] = now.get(workspace, 0) + working
        found.append(Live(last.operator, last.backward, now))
        for buffer in gone:
            if buffer in held:
                held.remove(buffer)
                kinds[kind(buffer)] -= buffer.bytes
        at = end
    return found


def _under(task: Task, buffer: Buffer, gone: Sequence[Buffer], held: set[Buffer]) -> Buffer | None:
    """What a task writes a buffer over: something as large that nothing else reads any more."""
    if task.library or task.anew:
        return None
    return next((b for b in gone if b in held and b in task.reads and b.bytes == buffer.bytes), None)
