"""The time that each line of Inductor's wrappers takes, while a step runs.

Invariant: it costs a clock reading a line (under a microsecond), in code that calls a kernel a line; nothing else is timed line by line.
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections import defaultdict
from collections.abc import Callable, Container, Iterator, Mapping
from types import FrameType
from typing import Any

Clock = Callable[[], float]
Seconds = Mapping[tuple[str, int, bool], float]
"""Seconds of each line: by the path of the file, the line's number, and whether it ran in the backward pass."""


class Lines:
    """
    Attributes:
        backward: set by whoever runs the step, while the backward pass runs.
        seconds: so far.
    """

    def __init__(self) -> None:
        self.backward = False
        self.seconds: dict[tuple[str, int, bool], float] = defaultdict(float)


@contextlib.contextmanager
def timing_lines(files: Container[str], clock: Clock) -> Iterator[Lines]:
    """Times the lines of wrappers that run while this is active, in this thread."""
    found = Lines()
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name != "call" or code.co_filename not in files:
            return None
        readings: list[tuple[int, float]] = []
        append, backward = readings.append, found.backward

        def line(frame: FrameType, event: str, _: Any) -> Any:
            append((frame.f_lineno, clock()))
            if event == "return":
                for (at, start), (_, end) in itertools.pairwise(readings):
                    found.seconds[code.co_filename, at, backward] += end - start
            return line

        return line

    sys.settrace(called)
    try:
        yield found
    finally:
        sys.settrace(before)
