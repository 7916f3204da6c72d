"""In which order a compiler has the tasks of a pass run.

Inductor sorts a graph in four ways and takes that of which it expects the lowest peak, the first of several (torch/_inductor/memory.py). It
reckons with one task at a time, where it will make one kernel of all that stands between two of a library's, with nothing written over
anything, and with no workspace.

Invariant: an order runs nothing before what it reads.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence, Set
from dataclasses import dataclass

from qsync_fx.predictor.memory.buffers import Buffer, Task

_WORTH = 32
"""Inductor fuses what holds this many times the bytes that it need not read twice, and no more."""


def ordered(tasks: Sequence[Task], kept: Collection[Buffer]) -> list[Task]:
    """Returns the tasks of a pass in the order in which they run.

    Args:
        tasks: as the pass was written.
        kept: what is there when the pass has ended; what stays need not be named.
    """
    groups = fused(tasks)
    pass_ = _pass(groups, frozenset(kept))
    written = list(range(len(groups)))
    found = min((written, _least_growing(pass_), _first_read_first(pass_), _smallest_first(pass_)), key=pass_.expected)
    return [task for at in found for task in groups[at]]


def fused(tasks: Sequence[Task]) -> list[list[Task]]:
    """Returns the tasks with those together that are one kernel to the sorts: of elements, or of sums, of what they read in common.

    A task joins the nearest of its kind that writes some of what it reads, or reads half of it, and that nothing which it needs waits
    for. What such a kernel needs runs before all of it.
    """
    groups: list[_Kernel] = []
    needs: list[set[int]] = []
    needed_by: list[set[int]] = []
    place: dict[Buffer, int] = {}
    touching: defaultdict[Buffer, set[int]] = defaultdict(set)
    for task in tasks:
        needed = {place[buffer] for buffer in (*task.reads, *task.writes) if buffer in place}
        found = len(groups)
        if not task.library and not task.apart:
            # What it joins has some of its reads in common with it, and waits for nothing that the task needs.
            near = sorted(set().union(*(touching[buffer] for buffer in task.reads)), reverse=True)
            for at in near:
                if groups[at].takes(task) and not _waits(needed_by, at, needed):
                    found = at
                    break
        if found == len(groups):
            groups.append(_Kernel())
            needs.append(set())
            needed_by.append(set())
        groups[found].add(task)
        needs[found] |= needed - {found}
        for at in needed - {found}:
            needed_by[at].add(found)
        for buffer in task.writes:
            place[buffer] = found
            touching[buffer].add(found)
        for buffer in task.reads:
            touching[buffer].add(found)
    order: dict[int, None] = {}
    for at in range(len(groups)):
        visit(at, needs, int, order)
    return [groups[at].tasks for at in order]


class _Kernel:
    """Tasks that are one kernel to the sorts."""

    def __init__(self) -> None:
        self.tasks: list[Task] = []
        self.written: set[Buffer] = set()
        self.read: set[Buffer] = set()

    def add(self, task: Task) -> None:
        self.tasks.append(task)
        self.written.update(task.writes)
        self.read |= task.reads

    def takes(self, task: Task) -> bool:
        """Whether a task that is no library's is of its kind, and has enough in common with it."""
        first = self.tasks[0]
        if first.library or first.apart:
            return False
        if first.sums and not task.sums:
            return bool(task.reads) and task.reads <= self.written  # what is done to sums alone is done with them
        if first.sums != task.sums or (task.sums and first.writes[0].bytes != task.writes[0].bytes):
            return False
        if not task.reads.isdisjoint(self.written):
            return True
        common = sum(buffer.bytes for buffer in task.reads if buffer in self.read)
        return bool(common) and _WORTH * common >= sum(buffer.bytes for buffer in task.reads)


def _waits(needed_by: Sequence[Set[int]], at: int, needed: Set[int]) -> bool:
    """Whether any of the needed ones waits for one place: what waits for a late one is little."""
    found: set[int] = set()
    left = [at]
    while left:
        new = needed_by[left.pop()] - found
        if not needed.isdisjoint(new):
            return True
        found |= new
        left += new
    return False


def visit(
    first: int, needs: Sequence[Collection[int]], key: Callable[[int], tuple[int, ...] | int], order: dict[int, None]
) -> None:
    """Adds a place to an order, behind what it needs."""
    stack = [first]
    while stack:
        missing = [at for at in needs[stack[-1]] if at not in order]
        if missing:
            stack.append(min(missing, key=key))
        else:
            order[stack.pop()] = None


@dataclass(frozen=True)
class _Pass:
    """Tasks, those of one kernel together, by their places.

    Attributes:
        sizes: what each allocates.
        reads: the buffers that each reads; of what it has written itself only what nobody else reads.
        before, after: the places of those that it must run behind, and of those that must run behind it.
        readers: of each buffer that may be released, the places of those that read it.
        given: what is there before the pass.
        output: the bytes of what is there when it has ended.
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
        """The peak that the compiler expects of an order."""
        steps = [0] * len(order)
        for step, at in enumerate(order):
            steps[at] = step
        freed = [0] * len(order)
        for buffer, readers in self.readers.items():
            freed[max(map(steps.__getitem__, readers))] += buffer.bytes
        held = most = self.given
        for step, at in enumerate(order):
            held += self.sizes[at]
            most = max(most, held)
            held -= freed[step]
        return most


def _pass(groups: Sequence[Sequence[Task]], kept: frozenset[Buffer]) -> _Pass:
    writer: dict[Buffer, int] = {}
    sizes, before = [0] * len(groups), [set[int]() for _ in groups]
    reads: list[list[Buffer]] = [[] for _ in groups]
    given: dict[Buffer, None] = {}
    for at, group in enumerate(groups):
        for task in group:
            for buffer in task.reads:
                if buffer not in writer:
                    given[buffer] = None
                elif writer[buffer] != at:
                    before[at].add(writer[buffer])
                if writer.get(buffer) != at:
                    reads[at].append(buffer)
            for buffer in task.writes:
                if buffer not in writer:
                    sizes[at] += buffer.bytes
                elif writer[buffer] != at:
                    before[at].add(writer[buffer])
                writer[buffer] = at
        reads[at] = list(dict.fromkeys(reads[at]))
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)
    for at, found in enumerate(reads):
        for buffer in found:
            readers[buffer].append(at)
    for buffer, at in writer.items():
        if buffer not in readers:
            readers[buffer] = [at]
            reads[at].append(buffer)
    released = {buffer: found for buffer, found in readers.items() if not buffer.stays and buffer not in kept}
    after = [list[int]() for _ in groups]
    for at, places in enumerate(before):
        for place in sorted(places):
            after[place].append(at)
    output = sum(buffer.bytes for buffer in {**writer, **given} if buffer.stays or buffer in kept)
    return _Pass(
        sizes,
        reads,
        [[buffer for task in group for buffer in task.writes] for group in groups],
        [sorted(places) for places in before],
        after,
        released,
        sum(buffer.bytes for buffer in given),
        output,
    )


def _least_growing(pass_: _Pass) -> list[int]:
    """The next is what grows memory least, of those that stay below the most there was."""
    waits = [len(places) for places in pass_.before]
    left = {buffer: len(readers) for buffer, readers in pass_.readers.items()}
    frees = [sum(buffer.bytes for buffer in reads if left.get(buffer) == 1) for reads in pass_.reads]
    ready = [at for at, count in enumerate(waits) if not count]
    live = pass_.given
    gap = max(live, pass_.output) - live
    found: list[int] = []
    while ready:
        sizes = pass_.sizes
        at = min(ready, key=lambda at: (sizes[at] if sizes[at] > gap else 0, sizes[at] - frees[at], at))
        ready.remove(at)
        found.append(at)
        live += sizes[at]
        gap = max(gap - sizes[at], 0) + frees[at]
        live -= frees[at]
        for place in pass_.after[at]:
            waits[place] -= 1
            if not waits[place]:
                ready.append(place)
        for buffer in pass_.reads[at]:
            if buffer in left:
                left[buffer] -= 1
                if left[buffer] == 1:
                    for place in pass_.readers[buffer]:
                        frees[place] += buffer.bytes
    return found


def _first_read_first(pass_: _Pass) -> list[int]:
    """The next is what reads what ran earliest."""
    waits = [len(places) for places in pass_.before]
    ready: list[tuple[list[int], int]] = [([], at) for at, count in enumerate(waits) if not count]
    heapq.heapify(ready)
    found: dict[int, int] = {}
    while ready:
        at = heapq.heappop(ready)[1]
        found[at] = len(found)
        for place in pass_.after[at]:
            waits[place] -= 1
            if not waits[place]:
                heapq.heappush(ready, (sorted(found[one] for one in pass_.before[place]), place))
    return list(found)


def _smallest_first(pass_: _Pass) -> list[int]:
    """What reads and writes least, each behind what it needs."""

    def size(at: int) -> tuple[int, int]:
        return pass_.sizes[at] + sum(buffer.bytes for buffer in pass_.reads[at] if buffer not in pass_.writes[at]), at

    keys = [size(at) for at in range(len(pass_.sizes))]
    found: dict[int, None] = {}
    for first in sorted(range(len(keys)), key=keys.__getitem__):
        visit(first, pass_.before, keys.__getitem__, found)
    return list(found)
