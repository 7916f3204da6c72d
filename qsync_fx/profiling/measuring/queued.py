"""The time that each line of Inductor's wrappers takes of a GPU, while a step runs: by events that are queued around its kernels.

The GPU is held while Python queues, so that between two events lies what the kernels take, and no waiting for the next one. What a step
takes beyond that the GPU waits for Python, and that is shared out among lines by how long Python is at each.

Invariant: what comes out of a pass, outside of wrappers too, adds up to what it takes where nobody watches, if that is longer than its
kernels.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol

import torch

from qsync_fx.profiling.measuring.lines import Seconds
from qsync_fx.profiling.measuring.steps import StepSeconds

_HELD: Final = 0.03
"""Seconds that a GPU is held at a time: longer than Python takes to queue what one turn of it may hold."""
_CYCLES: Final = 2e9
"""Clock cycles a second, at most: a GPU that is told to sleep so many is held as long as it should be."""
_QUEUED: Final = 250
"""Events until it is held anew: a queue has room for a thousand launches."""


class Device(Protocol):
    """What is timed."""

    def mark(self) -> Any:
        """Returns what `between` takes, of the time when all that was queued before is done."""

    def hold(self) -> None:
        """Waits for all that was queued, and has what is queued next wait a while."""

    def between(self, first: Any, last: Any) -> float:
        """Returns the seconds between two marks."""


class Gpu:
    """A GPU of CUDA, and its current stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hold()
        marks = [self.mark() for _ in range(33)]
        torch.cuda.synchronize(device)
        self._own = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    def mark(self) -> Any:
        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hold(self) -> None:
        torch.cuda.synchronize(self._device)
        sleep: Any = torch.cuda._sleep
        sleep(int(_HELD * _CYCLES))

    def between(self, first: Any, last: Any) -> float:
        last.synchronize()
        taken: float = first.elapsed_time(last) - self._own
        return max(0.0, taken / 1e3)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Returns the clock that times passes on a GPU: by the wall, when all that was queued is done."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


Key = tuple[str, int, bool]


@dataclass
class Queued:
    """
    Attributes:
        backward: set by whoever runs the step, while the backward pass runs.
    """

    device: Device
    backward: bool = False
    _kernels: list[tuple[Key, Any, Any]] = field(default_factory=list)
    _python: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    _outside: list[tuple[bool, Any, Any]] = field(default_factory=list)
    _since: Any = None

    def clock(self) -> float:
        """What a step calls between its passes."""
        self.left()
        self.device.hold()
        self._since = self.device.mark()
        return 0.0

    def left(self) -> None:
        """Ends a stretch outside of wrappers."""
        if self._since is not None:
            self._outside.append((self.backward, self._since, self.device.mark()))
        self._since = None

    def entered(self) -> None:
        """Begins such a stretch."""
        self._since = self.device.mark()

    def kernel(self, line: Key, first: Any, last: Any) -> None:
        self._kernels.append((line, first, last))

    def python(self, line: Key, seconds: float) -> None:
        self._python[line] += seconds

    def seconds(self, whole: StepSeconds) -> Seconds:
        """Returns the seconds of each line in a step whose passes take these, and in that are longer than their kernels."""
        found: dict[Key, float] = defaultdict(float)
        for line, first, last in self._kernels:
            found[line] += self.device.between(first, last)
        outside = [0.0, 0.0]
        for backward, first, last in self._outside:
            outside[backward] += self.device.between(first, last)
        for backward, taken in ((False, whole.forward), (True, whole.backward)):
            known = sum(seconds for line, seconds in found.items() if line[2] == backward)
            waiting = max(0.0, taken - known - outside[backward])
            python = {line: seconds for line, seconds in self._python.items() if line[2] == backward}
            total = sum(python.values())
            for line, seconds in python.items():
                found[line] += waiting * seconds / total
        return found


class _Call:
    """One call of a wrapper."""

    def __init__(self, found: Queued, file: str, kernels: Container[int]) -> None:
        self._found, self._file, self._kernels, self._backward = found, file, kernels, found.backward
        self._at: Key | None = None
        self._begun: Any = None
        self._since, self._marks = 0.0, 0

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        """What Python calls before each line, and at the end."""
        now = None
        if self._at is not None:
            self._found.python(self._at, time.perf_counter() - self._since)
            if self._begun is not None:
                now = self._found.device.mark()
                self._found.kernel(self._at, self._begun, now)
        self._at, self._begun = (self._file, frame.f_lineno, self._backward), None
        if event == "return":
            self._at = None
            self._found.entered()
            return self.line
        if frame.f_lineno in self._kernels:
            if self._marks >= _QUEUED:
                self._found.device.hold()
                self._marks, now = 0, None
            self._begun = now or self._found.device.mark()
            self._marks += 1
        self._since = time.perf_counter()
        return self.line


@contextlib.contextmanager
def timing_kernels(files: Mapping[str, Container[int]], device: Device) -> Iterator[Queued]:
    """Times the lines of wrappers that run while this is active, in this thread; `files` has those that call kernels."""
    found = Queued(device)
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if code.co_name != "call" or file not in files:
            return None
        found.left()
        return _Call(found, file, files[file]).line

    sys.settrace(called)
    try:
        yield found
    finally:
        sys.settrace(before)
