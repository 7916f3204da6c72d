"""Execution order of the tasks of a pass, as Inductor chooses it to reduce peak memory.

Inductor compares four topological orders (torch/_inductor/memory.py): the written one, LPMF, BFS
and DFS. It selects the first one with the lowest estimated peak. Its estimate ignores later fusion
of tasks, in-place reuse of buffers and workspaces.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set

from qsync_fx.predictor.memory.buffers import Buffer, Task

_WORTH = 32
"""Inductor fuses a task that reads at most this many times the bytes that fusion saves."""


def ordered(tasks: Sequence[Task], saved: Collection[Buffer]) -> list[Task]:
    """Return the tasks of a pass in execution order; `saved` buffers are live at its end."""
    groups = fused(tasks)
    kernels = _Pass(groups, saved)
    orders = (
        list(range(len(groups))),
        kernels.least_growing(),
        kernels.first_read_first(),
        kernels.smallest_first(),
    )
    return [task for index in min(orders, key=kernels.estimated_peak) for task in groups[index]]


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
        near = set[int]()
        if not task.library and not task.apart:
            near = near.union(*(touching[buffer] for buffer in task.reads))
        for result in sorted(near, reverse=True):
            if groups[result].takes(task) and not _waits(needed_by, result, needed):
                break
        else:
            result = len(groups)
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
            # An elementwise task on sums alone is fused with them.
            return bool(task.reads) and task.reads <= self.written
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


class _Pass:
    """Kernels of a pass, by index.

    Attributes:
        reads: buffers that each kernel reads from others, and own results that no kernel reads.
        before, after: kernels that must run before and after each kernel.
        readers: for each buffer that can be freed, the kernels that read it.
        given, output: bytes that are live before and after the pass.
    """

    def __init__(self, groups: Sequence[Sequence[Task]], saved: Collection[Buffer]) -> None:
        self.sizes = [0] * len(groups)
        self.reads = [set[Buffer]() for _ in groups]
        self.before, self.after = [set[int]() for _ in groups], [set[int]() for _ in groups]
        writer: dict[Buffer, int] = {}
        inputs: set[Buffer] = set()
        for index, group in enumerate(groups):
            for task in group:
                inputs |= task.reads - writer.keys()
                self.reads[index] |= {b for b in task.reads if writer.get(b) != index}
                self.sizes[index] += sum(b.bytes for b in task.writes if b not in writer)
                needed = {writer.get(b, index) for b in (*task.reads, *task.writes)}
                self.before[index] |= needed - {index}
                writer |= dict.fromkeys(task.writes, index)
        self._moved = [
            size + sum(buffer.bytes for buffer in reads)
            for size, reads in zip(self.sizes, self.reads, strict=True)
        ]
        for buffer in writer.keys() - set().union(*self.reads):
            self.reads[writer[buffer]].add(buffer)
        live = {b for b in writer.keys() | inputs if b.stays or b in saved}
        self.readers: defaultdict[Buffer, list[int]] = defaultdict(list)
        for index, reads in enumerate(self.reads):
            for buffer in reads - live:
                self.readers[buffer].append(index)
            for place in self.before[index]:
                self.after[place].add(index)
        self.input_bytes = sum(buffer.bytes for buffer in inputs)
        self.output = sum(buffer.bytes for buffer in live)

    def estimated_peak(self, order: Sequence[int]) -> int:
        """Return the peak that Inductor estimates for an order, in bytes."""
        steps = {index: step for step, index in enumerate(order)}
        freed = [0] * len(order)
        for buffer, readers in self.readers.items():
            freed[max(map(steps.__getitem__, readers))] += buffer.bytes
        live = most = self.input_bytes
        for step, index in enumerate(order):
            live += self.sizes[index]
            most = max(most, live)
            live -= freed[step]
        return most

    def least_growing(self) -> list[int]:
        """LPMF: run the kernel that grows memory least, preferably below the peak so far."""
        sizes, waits = self.sizes, [len(places) for places in self.before]
        left = {buffer: len(readers) for buffer, readers in self.readers.items()}
        frees = [sum(b.bytes for b in reads if left.get(b) == 1) for reads in self.reads]
        ready = {index for index, count in enumerate(waits) if not count}
        gap = max(self.input_bytes, self.output) - self.input_bytes
        result: list[int] = []

        def growth(index: int) -> tuple[int, int, int]:
            above = sizes[index] if sizes[index] > gap else 0
            return above, sizes[index] - frees[index], index

        while ready:
            index = min(ready, key=growth)
            ready.remove(index)
            result.append(index)
            gap = max(gap - sizes[index], 0) + frees[index]
            for place in self.after[index]:
                waits[place] -= 1
                if not waits[place]:
                    ready.add(place)
            for buffer in self.reads[index] & left.keys():
                left[buffer] -= 1
                if left[buffer] == 1:
                    for place in self.readers[buffer]:
                        frees[place] += buffer.bytes
        return result

    def first_read_first(self) -> list[int]:
        """BFS: run the kernel whose inputs were computed earliest."""
        waits = [len(places) for places in self.before]
        ready: list[tuple[list[int], int]]
        ready = [([], index) for index, count in enumerate(waits) if not count]
        result: dict[int, int] = {}
        while ready:
            index = heapq.heappop(ready)[1]
            result[index] = len(result)
            for place in self.after[index]:
                waits[place] -= 1
                if not waits[place]:
                    inputs = sorted(result[item] for item in self.before[place])
                    heapq.heappush(ready, (inputs, place))
        return list(result)

    def smallest_first(self) -> list[int]:
        """DFS: visit kernels in ascending order of the bytes that they read and write."""
        keys = [(moved, index) for index, moved in enumerate(self._moved)]
        result: dict[int, None] = {}
        for _, first in sorted(keys):
            visit(first, self.before, keys.__getitem__, result)
        return list(result)
