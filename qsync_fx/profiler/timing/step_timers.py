"""The time that each line of Inductor's wrappers takes of a GPU, while a step runs: by events that are queued around its kernels.

The GPU is held while Python queues, so that between two events lies what the kernels take, and no waiting for the next one. What a step
takes beyond that the GPU waits for Python, and that is shared out among lines by how long Python is at each.

Invariant: what comes out of a pass, outside of wrappers too, adds up to what it takes where nobody watches, if that is longer than its
kernels.

The time that each line of Inductor's wrappers takes, while a step runs.

Invariant: it costs a clock reading a line (under a microsecond), in code that calls a kernel a line; nothing else is timed line by line.

One training step, timed.

Invariant: with one thread, times are of the processor, for this thread alone: they stay what they are when others load the machine, as far
as caches and memory let them, and when this process does something else beside. Several threads wait for one another, which counts as
computing, so there times are those of the clock on the wall.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Protocol

import torch
from torch import Tensor
from torch.optim import Optimizer

from qsync_fx.errors import OptionError, ProfileError

Clock = Callable[[], float]
Seconds = Mapping[tuple[str, int, bool], float]
"""Seconds of each line: by the path of the file, the line's number, and whether it ran in the backward pass."""


class LineTimer:
    """
    Attributes:
        backward: set by whoever runs the step, while the backward pass runs.
        seconds: so far.
    """

    def __init__(self) -> None:
        self.backward = False
        self.seconds: dict[tuple[str, int, bool], float] = defaultdict(float)


@contextlib.contextmanager
def timing_lines(files: Container[str], clock: Clock) -> Iterator[LineTimer]:
    """Times the lines of wrappers that run while this is active, in this thread."""
    result = LineTimer()
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        if code.co_name != "call" or code.co_filename not in files:
            return None
        readings: list[tuple[int, float]] = []
        append, backward = readings.append, result.backward

        def line(frame: FrameType, event: str, _: Any) -> Any:
            append((frame.f_lineno, clock()))
            if event == "return":
                for (index, start), (_, end) in itertools.pairwise(readings):
                    result.seconds[code.co_filename, index, backward] += end - start
            return line

        return line

    sys.settrace(called)
    try:
        yield result
    finally:
        sys.settrace(before)


StepFunction = Callable[[Any, Any], Tensor]
"""What a user writes: from a model and a batch to the loss."""


def clock_for(threads: int) -> Clock:
    """Returns the clock that times a thread from which torch computes with so many."""
    return time.thread_time if threads == 1 else time.perf_counter


def check_batches(batches: object) -> None:
    """Raise `OptionError` if `batches` is a single batch: iterating over a tensor gives steps of one row."""
    is_batch = (
        isinstance(batches, Mapping | str | bytes)
        or hasattr(batches, "__array__")  # tensors, arrays of NumPy, data frames
        or hasattr(batches, "_fields")  # a named tuple
        or not (hasattr(batches, "__iter__") or hasattr(batches, "__getitem__"))
    )
    if is_batch:
        raise OptionError(
            f"batches is of type {type(batches).__name__}, which is one batch or none",
            where="batches",
            do="give a list of batches, [batch] for one, or a DataLoader",
        )


def first_batch(batches: Iterable[Any]) -> tuple[Any, Iterable[Any]]:
    """Return the first batch, and an iterable over all batches including the first.

    Raises:
        OptionError: `batches` is a single batch, or there is none.
    """
    check_batches(batches)
    rest = iter(batches)
    for batch in rest:
        return batch, itertools.chain([batch], rest) if rest is batches else batches
    raise OptionError("there is no batch to measure with", where="batches", do="give at least one")


def checked_loss(loss: object, where: str) -> Tensor:
    """Returns what a user's step returned; raises `ProfileError` where that is no loss that trains anything."""
    if not isinstance(loss, Tensor) or loss.dim():
        message = (
            f"a tensor of shape {list(loss.shape)}"
            if isinstance(loss, Tensor)
            else f"a {type(loss).__name__}"
        )
        do = "return the loss of the batch, a tensor without dimensions"
        raise ProfileError(f"the step returned {message}, which is no loss", where=where, do=do)
    if not loss.requires_grad:
        message = "the loss depends on no parameter that requires a gradient"
        raise ProfileError(
            message,
            where=where,
            do="let the step compute it from what the model returns, with gradients",
        )
    return loss


def finite(loss: Tensor, where: str) -> Tensor:
    """Returns a loss; raises `ProfileError` where it is NaN or infinite."""
    if not bool(loss.detach().isfinite()):
        message = f"the loss is {float(loss.detach())}"
        raise ProfileError(message, where=where, do="give a model and batches that train in FP32")
    return loss


class Watching(Protocol):
    """What times lines while a step runs, and is told which pass it is in."""

    backward: bool


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one step and its parts."""

    forward: float
    backward: float
    optimizer: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class TrainingStep:
    """What one step takes, but for the model in the form that runs.

    Attributes:
        step: the user's.
        batch: what it is given.
        optimizer: None where there is none.
        zero: lets gradients go.
        clock: what times it.
    """

    step: StepFunction
    batch: Any
    optimizer: Optimizer | None
    zero: Callable[[], None]
    clock: Clock

    def run(self, model: Any, lines: Watching | None = None) -> StepSeconds:
        """Trains a model for one step; raises `ProfileError` where that gives no loss."""
        clock = self.clock
        start = clock()
        loss = checked_loss(self.step(model, self.batch), "step")
        middle = clock()
        if lines is not None:
            lines.backward = True
        loss.backward()  # type: ignore[no-untyped-call]
        end = clock()
        del loss
        optimized = clock()
        if self.optimizer is not None:
            self.optimizer.step()
        self.zero()
        return StepSeconds(middle - start, end - middle, clock() - optimized)


_HELD: Final = 0.03
"""Seconds that a GPU is held at a time: longer than Python takes to queue what one turn of it may hold."""
_CYCLES: Final = 2e9
"""Clock cycles a second, at most: a GPU that is told to sleep so many is held as long as it should be."""
_QUEUED: Final = 250
"""Events until it is held anew: a queue has room for a thousand launches."""


class TimedDevice(Protocol):
    """What is timed."""

    def mark(self) -> Any:
        """Returns what `between` takes, of the time when all that was queued before is done."""

    def hold(self) -> None:
        """Waits for all that was queued, and has what is queued next wait a while."""

    def between(self, first: Any, last: Any) -> float:
        """Returns the seconds between two marks."""


class GpuTimer:
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
        used: float = first.elapsed_time(last) - self._own
        return max(0.0, used / 1e3)


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

    device: TimedDevice
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

    def seconds(self, full: StepSeconds) -> Seconds:
        """Returns the seconds of each line in a step whose passes take these, and in that are longer than their kernels."""
        result: dict[Key, float] = defaultdict(float)
        for line, first, last in self._kernels:
            result[line] += self.device.between(first, last)
        outside = [0.0, 0.0]
        for backward, first, last in self._outside:
            outside[backward] += self.device.between(first, last)
        for backward, used in ((False, full.forward), (True, full.backward)):
            available = sum(seconds for line, seconds in result.items() if line[2] == backward)
            waiting = max(0.0, used - available - outside[backward])
            python = {
                line: seconds for line, seconds in self._python.items() if line[2] == backward
            }
            total = sum(python.values())
            for line, seconds in python.items():
                result[line] += waiting * seconds / total
        return result


class _Call:
    """One call of a wrapper."""

    def __init__(self, result: Queued, file: str, kernels: Container[int]) -> None:
        self._found, self._file, self._kernels, self._backward = (
            result,
            file,
            kernels,
            result.backward,
        )
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
def timing_kernels(files: Mapping[str, Container[int]], device: TimedDevice) -> Iterator[Queued]:
    """Times the lines of wrappers that run while this is active, in this thread; `files` has those that call kernels."""
    result = Queued(device)
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if code.co_name != "call" or file not in files:
            return None
        result.left()
        return _Call(result, file, files[file]).line

    sys.settrace(called)
    try:
        yield result
    finally:
        sys.settrace(before)
