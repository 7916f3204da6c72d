"""In which order a compiler has the tasks of a backward pass run.

Inductor tries several and takes that of which it expects the lowest peak. Two are told apart here: as the pass was written, where a
gradient is widened to its parameter's format as soon as it is there, and that where widening waits until all else is done.

Invariant: a compiler expects less than there will be: it reckons with one task at a time, where many widen gradients in one kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

from qsync_fx.predictor.memory.buffers import Task, lives


def ordered(forward: Sequence[Task], backward: Sequence[Task]) -> list[Task]:
    """Returns the tasks of both passes in the order in which they run."""
    written = [*forward, *backward]
    widening = sorted((task for task in backward if task.widens), key=lambda task: sum(b.bytes for b in task.writes))
    waiting = [*forward, *(task for task in backward if not task.widens), *widening]
    return min((written, waiting), key=_expected)


def _expected(tasks: Sequence[Task]) -> int:
    return max((live.bytes for live in lives(tasks, False, lambda buffer: None, None)), default=0)
