"""Execution order of the tasks of a pass, as Inductor chooses it to reduce peak memory.

Inductor compares four topological orders (torch/_inductor/memory.py): the written one, LPMF, BFS
and DFS. It selects the first one with the lowest estimated peak. Its estimate treats tasks one by
one and ignores that all tasks between two library kernels become one kernel, as well as in-place
reuse of buffers and workspaces.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

from qsync_fx.predictor.memory.buffers import Buffer, Task

_WORTH = 32
"""Inductor fuses a task that reads at most this many times the bytes that fusion saves."""


def ordered(tasks: Sequence[Task], saved: Collection[Buffer]) -> list[Task]:
    """Return the tasks of a pass in execution order.

    Args:
        tasks: tasks in program order.
        saved: buffers that are live at the end of the pass; `Buffer.stays` implies it.
    """
    groups = fused(tasks)
    pass_ = _pass(groups, frozenset(saved))
    written = list(range(len(groups)))
    result = min(
        (written, _least_growing(pass_), _first_read_first(pass_), _smallest_first(pass_)),
        key=pass_.expected,
    )
    return [task for index in result for task in groups[index]]


def fused(tasks: Sequence[Task]) -> list[list[Task]]:
    """Return the tasks grouped into kernels, as the sorts see them.

    A task joins the nearest kernel of its kind, elementwise or a sum, that writes one of its inputs
    or shares enough of them, unless an input of the task depends on that kernel. All inputs of a
    kernel run before it.
    """
    groups: list[_Kernel] = []
    needs: list[set[int]] = []
    needed_by: list[set[int]] = []
    place: dict[Buffer, int] = {}
    touching: defaultdict[Buffer, set[int]] = defaultdict(set)
    for task in tasks:
        needed = {place[buffer] for buffer in (*task.reads, *task.writes) if buffer in place}
        result = len(groups)
        if not task.library and not task.apart:
            # A candidate shares reads with the task and no input of the task depends on it.
            near = sorted(set().union(*(touching[buffer] for buffer in task.reads)), reverse=True)
            for index in near:
                if groups[index].takes(task) and not _waits(needed_by, index, needed):
                    result = index
                    break
        if result == len(groups):
            groups.append(_Kernel())
            needs.append(set())
            needed_by.append(set())
        groups[result].add(task)
        needs[result] |= needed - {result}
        for index in needed - {result}:
            needed_by[index].add(result)
        for buffer in task.writes:
            place[buffer] = result
            touching[buffer].add(result)
        for buffer in task.reads:
            touching[buffer].add(result)
    order: dict[int, None] = {}
    for index in range(len(groups)):
        visit(index, needs, int, order)
    return [groups[index].tasks for index in order]


class _Kernel:
    """Tasks that form one kernel for the sorts."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.written: set[Buffer] = set()
        self.read: set[Buffer] = set()

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        self.written.update(task.writes)
        self.read |= task.reads

    def takes(self, task: Task) -> bool:
        """Return whether a task without a library kernel can be fused into this kernel."""
        first = self.tasks[0]
        if first.library or first.apart:
            return False
        if first.sums and not task.sums:
            return (
                bool(task.reads) and task.reads <= self.written
            )  # an elementwise task on sums alone is fused with them
        if first.sums != task.sums or (task.sums and first.writes[0].bytes != task.writes[0].bytes):
            return False
        if not task.reads.isdisjoint(self.written):
            return True
        common = sum(buffer.bytes for buffer in task.reads if buffer in self.read)
        return bool(common) and _WORTH * common >= sum(buffer.bytes for buffer in task.reads)


def _waits(needed_by: Sequence[Set[int]], index: int, needed: Set[int]) -> bool:
    """Return whether any of `needed` depends on `index`. Late kernels have few dependents."""
    result: set[int] = set()
    left = [index]
    while left:
        new = needed_by[left.pop()] - result
        if not needed.isdisjoint(new):
            return True
        result |= new
        left += new
    return False


def visit(
    first: int,
    needs: Sequence[Collection[int]],
    key: Callable[[int], tuple[int, ...] | int],
    order: dict[int, None],
) -> None:
    """Append a node to an order after all of its dependencies (depth-first)."""
    stack = [first]
    while stack:
        missing = [index for index in needs[stack[-1]] if index not in order]
        if missing:
            stack.append(min(missing, key=key))
        else:
            order[stack.pop()] = None


@dataclass(frozen=True)
class _Pass:
    """Kernels of a pass, by index.

    Attributes:
        sizes: bytes that each kernel allocates.
        reads: buffers that each kernel reads from others, and own results that no kernel reads.
        writes: buffers that each kernel writes.
        before, after: kernels that must run before and after each kernel.
        readers: for each buffer that can be freed, the kernels that read it.
        given: bytes that are live before the pass.
        output: bytes that are live after the pass.
    """

    sizes: Sequence[int]
    reads: Sequence[Sequence[Buffer]]
    writes: Sequence[Sequence[Buffer]]
    before: Sequence[Sequence[int]]
    after: Sequence[Sequence[int]]
    readers: dict[Buffer, list[int]]
    given: int
    output: int

    def expected(self, order: Sequence[int]) -> int:
        """Return the peak that Inductor estimates for an order, in bytes."""
        steps = [0] * len(order)
        for step, index in enumerate(order):
            steps[index] = step
        freed = [0] * len(order)
        for buffer, readers in self.readers.items():
            freed[max(map(steps.__getitem__, readers))] += buffer.bytes
        live = most = self.given
        for step, index in enumerate(order):
            live += self.sizes[index]
            most = max(most, live)
            live -= freed[step]
        return most


def _pass(groups: Sequence[Sequence[Task]], saved: frozenset[Buffer]) -> _Pass:
    writer: dict[Buffer, int] = {}
    sizes, before = [0] * len(groups), [set[int]() for _ in groups]
    reads: list[list[Buffer]] = [[] for _ in groups]
    inputs: dict[Buffer, None] = {}
    for index, group in enumerate(groups):
        for task in group:
            for buffer in task.reads:
                if buffer not in writer:
                    inputs[buffer] = None
                elif writer[buffer] != index:
                    before[index].add(writer[buffer])
                if writer.get(buffer) != index:
                    reads[index].append(buffer)
            for buffer in task.writes:
                if buffer not in writer:
                    sizes[index] += buffer.bytes
                elif writer[buffer] != index:
                    before[index].add(writer[buffer])
                writer[buffer] = index
        reads[index] = list(dict.fromkeys(reads[index]))
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)
    for index, result in enumerate(reads):
        for buffer in result:
            readers[buffer].append(index)
    for buffer, index in writer.items():
        if buffer not in readers:
            readers[buffer] = [index]
            reads[index].append(buffer)
    released = {
        buffer: item for buffer, item in readers.items() if not buffer.stays and buffer not in saved
    }
    after = [list[int]() for _ in groups]
    for index, places in enumerate(before):
        for place in sorted(places):
            after[place].append(index)
    output = sum(buffer.bytes for buffer in {**writer, **inputs} if buffer.stays or buffer in saved)
    return _Pass(
        sizes,
        reads,
        [[buffer for task in group for buffer in task.writes] for group in groups],
        [sorted(places) for places in before],
        after,
        released,
        sum(buffer.bytes for buffer in inputs),
        output,
    )


def _least_growing(pass_: _Pass) -> list[int]:
    """LPMF: run the kernel that grows memory least, preferably below the peak so far."""
    waits = [len(places) for places in pass_.before]
    left = {buffer: len(readers) for buffer, readers in pass_.readers.items()}
    frees = [
        sum(buffer.bytes for buffer in reads if left.get(buffer) == 1) for reads in pass_.reads
    ]
    ready = [index for index, count in enumerate(waits) if not count]
    live = pass_.given
    gap = max(live, pass_.output) - live
    result: list[int] = []
    while ready:
        sizes = pass_.sizes
        index = min(
            ready,
            key=lambda index: (
                sizes[index] if sizes[index] > gap else 0,
                sizes[index] - frees[index],
                index,
            ),
        )
        ready.remove(index)
        result.append(index)
        live += sizes[index]
        gap = max(gap - sizes[index], 0) + frees[index]
        live -= frees[index]
        for place in pass_.after[index]:
            waits[place] -= 1
            if not waits[place]:
                ready.append(place)
        for buffer in pass_.reads[index]:
            if buffer in left:
                left[buffer] -= 1
                if left[buffer] == 1:
                    for place in pass_.readers[buffer]:
                        frees[place] += buffer.bytes
    return result


def _first_read_first(pass_: _Pass) -> list[int]:
    """BFS: run the kernel whose inputs were computed earliest."""
    waits = [len(places) for places in pass_.before]
    ready: list[tuple[list[int], int]] = [
        ([], index) for index, count in enumerate(waits) if not count
    ]
    heapq.heapify(ready)
    result: dict[int, int] = {}
    while ready:
        index = heapq.heappop(ready)[1]
        result[index] = len(result)
        for place in pass_.after[index]:
            waits[place] -= 1
            if not waits[place]:
                heapq.heappush(ready, (sorted(result[item] for item in pass_.before[place]), place))
    return list(result)


def _smallest_first(pass_: _Pass) -> list[int]:
    """DFS: visit kernels in ascending order of the bytes that they read and write."""

    def size(index: int) -> tuple[int, int]:
        return pass_.sizes[index] + sum(
            buffer.bytes for buffer in pass_.reads[index] if buffer not in pass_.writes[index]
        ), index

    keys = [size(index) for index in range(len(pass_.sizes))]
    result: dict[int, None] = {}
    for first in sorted(range(len(keys)), key=keys.__getitem__):
        visit(first, pass_.before, keys.__getitem__, result)
    return list(result)
