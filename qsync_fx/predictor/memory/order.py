"""In which order a compiler has the tasks of a pass run.

Inductor sorts a graph in four ways and takes that of which it expects the lowest peak, the first of several (torch/_inductor/memory.py). It
reckons with one task at a time, where it will make one kernel of all that stands between two of a library's, with nothing written over
anything, and with no workspace.

Invariant: an order runs nothing before what it reads.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from qsync_fx.predictor.memory.buffers import Buffer, Task


def ordered(tasks: Sequence[Task], kept: Collection[Buffer]) -> list[Task]:
    """Returns the tasks of a pass in the order in which they run.

    Args:
        tasks: as the pass was written.
        kept: what is there when the pass has ended; what stays need not be named.
    """
    pass_ = _pass(tasks, frozenset(kept))
    written = list(range(len(tasks)))
    found = min((written, _least_growing(pass_), _first_read_first(pass_), _smallest_first(pass_)), key=pass_.expected)
    return [tasks[at] for at in found]


@dataclass(frozen=True)
class _Pass:
    """Tasks by their places.

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
        steps = {at: step for step, at in enumerate(order)}
        freed: Counter[int] = Counter()
        for buffer, readers in self.readers.items():
            freed[max(steps[at] for at in readers)] += buffer.bytes
        held = most = self.given
        for step, at in enumerate(order):
            held += self.sizes[at]
            most = max(most, held)
            held -= freed[step]
        return most


def _pass(tasks: Sequence[Task], kept: frozenset[Buffer]) -> _Pass:
    writer: dict[Buffer, int] = {}
    sizes, before = [0] * len(tasks), [set[int]() for _ in tasks]
    reads = [list(task.reads) for task in tasks]
    given: dict[Buffer, None] = {}
    for at, task in enumerate(tasks):
        for buffer in task.reads:
            if buffer in writer:
                before[at].add(writer[buffer])
            else:
                given[buffer] = None
        for buffer in task.writes:
            if buffer in writer:
                before[at].add(writer[buffer])
            else:
                sizes[at] += buffer.bytes
            writer[buffer] = at
    readers: defaultdict[Buffer, list[int]] = defaultdict(list)
    for at, found in enumerate(reads):
        for buffer in found:
            readers[buffer].append(at)
    for buffer, at in writer.items():
        if buffer not in readers:
            readers[buffer] = [at]
            reads[at].append(buffer)
    released = {buffer: found for buffer, found in readers.items() if not buffer.stays and buffer not in kept}
    after = [list[int]() for _ in tasks]
    for at, places in enumerate(before):
        for place in sorted(places):
            after[place].append(at)
    output = sum(buffer.bytes for buffer in {**writer, **given} if buffer.stays or buffer in kept)
    return _Pass(
        sizes,
        reads,
        [list(task.writes) for task in tasks],
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
        stack = [first]
        while stack:
            at = stack[-1]
            missing = [place for place in pass_.before[at] if place not in found]
            if missing:
                stack.append(min(missing, key=keys.__getitem__))
            else:
                found[stack.pop()] = None
    return list(found)
