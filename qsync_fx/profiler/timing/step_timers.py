"""A user's training step: checks, compilation under plans, and timers of steps and their lines.

On the CPU, a trace function reads a clock per line of Inductor's wrappers. On a GPU, events are
queued around each kernel while the GPU is blocked, so that they exclude launch latency.
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
from types import CodeType, FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from qsync_fx.coverage.compilation_log import collecting
from qsync_fx.errors import OptionError, ProfileError
from qsync_fx.options import Options
from qsync_fx.torch_internals import _sleep, dynamo_config, reset_code

StepFunction = Callable[[Any, Any], Tensor]


def check_model(model: object) -> None:
    """Raise `OptionError` if `model` is no module, such as a profile that find_plan requires."""
    if not isinstance(model, nn.Module):
        raise OptionError(
            f"a module is required, not a value of type {type(model).__name__}",
            where="model",
            do="pass the model to train; with profiles call qsync_fx.find_plan(profiles, cluster)",
        )


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
    """Return the first batch, and an iterable over all batches including the first."""
    check_batches(batches)
    rest = iter(batches)
    for batch in rest:
        return batch, itertools.chain([batch], rest) if rest is batches else batches
    raise OptionError("there is no batch to measure with", where="batches", do="give at least one")


def checked_loss(loss: object, where: str) -> Tensor:
    """Return a step's loss; raise `ProfileError` if it is no scalar that requires a gradient."""
    if not isinstance(loss, Tensor) or loss.dim():
        result = f"a {type(loss).__name__}"
        if isinstance(loss, Tensor):
            result = f"a tensor of shape {list(loss.shape)}"
        raise ProfileError(
            f"the step returned {result}, which is no loss",
            where=where,
            do="return the loss of the batch, a tensor without dimensions",
        )
    if not loss.requires_grad:
        raise ProfileError(
            "the loss depends on no parameter that requires a gradient",
            where=where,
            do="let the step compute it from what the model returns, with gradients",
        )
    return loss


def checking(step: StepFunction, module: nn.Module, where: str = "step") -> StepFunction:
    """Return a step that raises `ProfileError` for its own backward() or an invalid loss."""

    def accumulated(_: Tensor) -> None:
        raise ProfileError(
            "the step calls backward() itself, which the profiler does with the returned loss",
            where=where,
            do="let step(model, batch) return the loss, without backward() and optimizer.step()",
        )

    def checked(model: Any, batch: Any) -> Tensor:
        leaves = [p for p in module.parameters() if p.requires_grad and p.is_leaf]
        register: Any = Tensor.register_post_accumulate_grad_hook
        hooks = [register(leaf, accumulated) for leaf in leaves]
        try:
            loss = step(model, batch)
        finally:
            for hook in hooks:
                hook.remove()
        loss = checked_loss(loss, where)
        if not bool(loss.detach().isfinite()):
            message = f"the loss is {float(loss.detach())}"
            do = "give a model and batches that train in FP32"
            raise ProfileError(message, where=where, do=do)
        return loss

    return checked


@dataclass(frozen=True)
class StepSeconds:
    forward: float
    backward: float
    optimizer: float

    @property
    def passes(self) -> float:
        return self.forward + self.backward

    @property
    def full(self) -> float:
        return self.passes + self.optimizer


@dataclass(frozen=True)
class TrainingStep:
    """A training step, without the model; `zero` clears the gradients."""

    step: StepFunction
    batch: Any
    optimizer: Optimizer | None
    zero: Callable[[], None]
    clock: Clock

    def run(self, model: Any, lines: LineTimer | Queued | None = None) -> StepSeconds:
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


Compiled = Callable[..., Any]
CompileUnder = Callable[[nn.Module, Mapping[str, object], TrainingStep], Compiled]


@contextlib.contextmanager
def compiling() -> Iterator[CompileUnder]:
    """Yield a function that compiles a module with options by training it for one step.

    Dynamo's recompile limits are lifted. On exit the compiled code is reset, so the user's own
    compiled model recompiles at its next call.
    """
    codes: set[CodeType] = set()

    def compile_with(
        module: nn.Module, options: Mapping[str, object], training: TrainingStep
    ) -> Compiled:
        inputs: dict[str, Any] = dict(options)
        with collecting(Options.parse(options)) as log:
            compiled = torch.compile(module, backend="qsync", options=inputs, dynamic=False)
            training.run(compiled)
            codes.update(code for code, _ in log.frames)
        return compiled

    limit = 2**16
    with dynamo_config.patch(recompile_limit=limit, accumulated_recompile_limit=limit):
        try:
            yield compile_with
        finally:
            for code in codes:
                reset_code(code)


Clock = Callable[[], float]
Line = tuple[str, int, bool]
"""File path, line number, and whether the line ran in the backward pass."""
Seconds = Mapping[Line, float]


def clock_for(threads: int) -> Clock:
    """Return the clock for a thread that computes with `threads` threads of torch.

    The CPU time of a single thread is robust against other load, but excludes waiting for others.
    """
    return time.thread_time if threads == 1 else time.perf_counter


def clock_of(device: torch.device) -> Clock:
    def clock() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return clock


class LineTimer:
    """Accumulated line times of a step; its runner sets `backward`."""

    def __init__(self) -> None:
        self.backward = False
        self.seconds: dict[Line, float] = defaultdict(float)


@contextlib.contextmanager
def timing_lines(files: Container[str], clock: Clock) -> Iterator[LineTimer]:
    """Time the lines of the wrappers that this thread runs within the context."""
    result = LineTimer()

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

    with _tracing(called):
        yield result


@contextlib.contextmanager
def _tracing(called: Callable[[FrameType, str, Any], Any]) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield
    finally:
        sys.settrace(before)


_BLOCKED_S: Final = 0.03
"""Seconds to block the GPU; Python must queue `_QUEUED` events in less."""
_CYCLES: Final = 2e9
"""Upper bound on the GPU's clock rate in Hz, so that it sleeps at least as long."""
_QUEUED: Final = 250
"""Events queued before the GPU is blocked again; the queue has room for 1,000 launches."""


class GpuTimer:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.hold()
        marks = [self.mark() for _ in range(33)]
        torch.cuda.synchronize(device)
        self._overhead = statistics.median(a.elapsed_time(b) for a, b in itertools.pairwise(marks))

    def mark(self) -> Any:
        kind: Any = torch.cuda.Event
        event = kind(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def hold(self) -> None:
        torch.cuda.synchronize(self._device)
        sleep: Any = _sleep
        sleep(int(_BLOCKED_S * _CYCLES))

    def between(self, first: Any, last: Any) -> float:
        last.synchronize()
        used: float = first.elapsed_time(last) - self._overhead
        return max(0.0, used / 1e3)


@dataclass
class Queued:
    """Events and Python times of one step; its runner sets `backward` in the backward pass."""

    device: GpuTimer
    backward: bool = False
    kernels: list[tuple[Line, Any, Any]] = field(default_factory=list)
    python: dict[Line, float] = field(default_factory=lambda: defaultdict(float))
    _outside: list[tuple[bool, Any, Any]] = field(default_factory=list)
    _since: Any = None

    def clock(self) -> float:
        self.end_outside()
        self.device.hold()
        self.begin_outside()
        return 0.0

    def end_outside(self) -> None:
        if self._since is not None:
            self._outside.append((self.backward, self._since, self.device.mark()))
        self._since = None

    def begin_outside(self) -> None:
        self._since = self.device.mark()

    def seconds(self, full: StepSeconds) -> Seconds:
        """Return the seconds of each line, given the untraced seconds of the passes.

        A pass's time in excess of its kernels is split among its lines by their Python time.
        """
        result: dict[Line, float] = defaultdict(float)
        on_device, python = [0.0, 0.0], [0.0, 0.0]
        for line, first, last in self.kernels:
            seconds = self.device.between(first, last)
            result[line] += seconds
            on_device[line[2]] += seconds
        for backward, first, last in self._outside:
            on_device[backward] += self.device.between(first, last)
        for line, seconds in self.python.items():
            python[line[2]] += seconds
        for line, seconds in self.python.items():
            used = (full.forward, full.backward)[line[2]]
            waiting = max(0.0, used - on_device[line[2]])
            result[line] += waiting * seconds / python[line[2]]
        return result


class _WrapperCall:
    def __init__(self, result: Queued, file: str, kernels: Container[int]) -> None:
        self._result, self._file, self._kernels = result, file, kernels
        self._backward = result.backward
        self._line: Line | None = None
        self._begun: Any = None
        self._since, self._marks = 0.0, 0

    def line(self, frame: FrameType, event: str, _: Any) -> Any:
        now, device = None, self._result.device
        if self._line is not None:
            self._result.python[self._line] += time.perf_counter() - self._since
            if self._begun is not None:
                now = device.mark()
                self._result.kernels.append((self._line, self._begun, now))
        self._line, self._begun = (self._file, frame.f_lineno, self._backward), None
        if event == "return":
            self._line = None
            self._result.begin_outside()
            return self.line
        if frame.f_lineno in self._kernels:
            if self._marks >= _QUEUED:
                device.hold()
                self._marks, now = 0, None
            self._begun = now or device.mark()
            self._marks += 1
        self._since = time.perf_counter()
        return self.line


@contextlib.contextmanager
def timing_kernels(files: Mapping[str, Container[int]], device: GpuTimer) -> Iterator[Queued]:
    """Time the lines of wrappers that this thread runs; `files` has the lines of kernels."""
    result = Queued(device)

    def called(frame: FrameType, event: str, _: Any) -> Any:
        code = frame.f_code
        file = code.co_filename
        if code.co_name != "call" or file not in files:
            return None
        result.end_outside()
        return _WrapperCall(result, file, files[file]).line

    with _tracing(called):
        yield result
