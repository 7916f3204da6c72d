"""Timers of a training step and of the lines of Inductor's wrappers.

On the CPU, a trace function reads a clock per line, which costs less than 1 us. With one thread the
clock is the thread's CPU time, which is robust against other load. Several threads wait for one
another, so they need the wall clock.

On a GPU, events are queued around each kernel. The GPU is blocked while Python queues, so that the
time between events contains no launch latency. The rest of an untraced step is time in which the
GPU waits for Python; it is split among lines by Python's time in each.

Invariant: the times of a pass add up to its untraced time, if that exceeds its kernels.
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
"""Seconds by file path, line number, and whether the line ran in the backward pass."""


class LineTimer:
    """Line times of a step.

    Attributes:
        backward: set by the runner of the step during the backward pass.
        seconds: accumulated seconds.
    """

    def __init__(self) -> None:
        self.backward = False
        self.seconds: dict[tuple[str, int, bool], float] = defaultdict(float)


@contextlib.contextmanager
def timing_lines(files: Container[str], clock: Clock) -> Iterator[LineTimer]:
    """Time the lines of the wrappers that this thread runs within the context."""
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
"""A user's step: from a model and a batch to the loss."""


def clock_for(threads: int) -> Clock:
    """Return the clock for a thread that computes with `threads` threads of torch."""
    return time.thread_time if threads == 1 else time.perf_counter


def check_batches(batches: object) -> None:
    """Raise `OptionError` if `batches` is one batch: iterating over a tensor yields its rows."""
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
    """Return a step's loss; raise `ProfileError` if it is no scalar that requires a gradient."""
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
    """Return a loss; raise `ProfileError` if it is NaN or infinite."""
    if not bool(loss.detach().isfinite()):
        message = f"the loss is {float(loss.detach())}"
        raise ProfileError(message, where=where, do="give a model and batches that train in FP32")
    return loss


class Watching(Protocol):
    """Line timer that knows which pass is running."""

    backward: bool


@dataclass(frozen=True)
class StepSeconds:
    forward: float
    backward: float
    optimizer: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class TrainingStep:
    """A training step, without the model.

    Attributes:
        step: the user's step.
        batch: its batch.
        optimizer: None for none.
        zero: clears the gradients.
        clock: returns seconds.
    """

    step: StepFunction
    batch: Any
    optimizer: Optimizer | None
    zero: Callable[[], None]
    clock: Clock

    def run(self, model: Any, lines: Watching | None = None) -> StepSeconds:
        """Run one step and return its times; raise `ProfileError` if it returns no loss."""
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
"""Seconds to block the GPU; Python must queue `_QUEUED` events in less."""
_CYCLES: Final = 2e9
"""Upper bound on the GPU's clock rate in Hz, so that it sleeps at least as long as intended."""
_QUEUED: Final = 250
"""Events queued before the GPU is blocked again; the queue has room for 1,000 launches."""


class TimedDevice(Protocol):
    """A timed device."""

    def mark(self) -> Any:
        """Record an event after all queued work and return it, for `between`."""

    def hold(self) -> None:
        """Wait for all queued work, and delay the work queued next."""

    def between(self, first: Any, last: Any) -> float:
        """Return the seconds between two events."""


class GpuTimer:
    """A CUDA device and its current stream."""

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
    """Return a wall clock for a GPU, which synchronizes the device first."""

    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


Key = tuple[str, int, bool]


@dataclass
class Queued:
    """Events and Python times of one step.

    Attributes:
        backward: set by the runner of the step during the backward pass.
    """

    device: TimedDevice
    backward: bool = False
    _kernels: list[tuple[Key, Any, Any]] = field(default_factory=list)
    _python: dict[Key, float] = field(default_factory=lambda: defaultdict(float))
    _outside: list[tuple[bool, Any, Any]] = field(default_factory=list)
    _since: Any = None

    def clock(self) -> float:
        """Begin a segment outside of wrappers; called between the passes as the step's clock."""
        self.end_outside()
        self.device.hold()
        self._since = self.device.mark()
        return 0.0

    def end_outside(self) -> None:
        """End a segment outside of wrappers."""
        if self._since is not None:
            self._outside.append((self.backward, self._since, self.device.mark()))
        self._since = None

    def begin_outside(self) -> None:
        """Begin a segment outside of wrappers."""
        self._since = self.device.mark()

    def kernel(self, line: Key, first: Any, last: Any) -> None:
        self._kernels.append((line, first, last))

    def python(self, line: Key, seconds: float) -> None:
        self._python[line] += seconds

    def seconds(self, full: StepSeconds) -> Seconds:
        """Return the seconds of each line, given the untraced seconds of the passes.

        A pass's time in excess of its kernels is split among its lines by their Python time.
        """
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
        """Trace function: called before each line, and at the return."""
        now = None
        if self._at is not None:
            self._found.python(self._at, time.perf_counter() - self._since)
            if self._begun is not None:
                now = self._found.device.mark()
                self._found.kernel(self._at, self._begun, now)
        self._at, self._begun = (self._file, frame.f_lineno, self._backward), None
        if event == "return":
            self._at = None
            self._found.begin_outside()
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
    """Time the lines of the wrappers that this thread runs within the context.

    Args:
        files: lines that call kernels, by path of the wrapper.
    """
    result = Queued(device)
    before = sys.gettrace()

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if code.co_name != "call" or file not in files:
            return None
        result.end_outside()
        return _Call(result, file, files[file]).line

    sys.settrace(called)
    try:
        yield result
    finally:
        sys.settrace(before)
