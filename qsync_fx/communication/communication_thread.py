"""Communication thread, which runs tasks in order off the threads of autograd.

A DDP comm hook must not block on other ranks: with several buckets in flight, all threads that gloo
calls it from would block. Invariant: after an error, no task runs, and all futures get that error.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import queue
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

LIMIT_S: Final = 60.0  # for all threads to end, while another rank may still compute its messages
_GLOO: Final = "pt_gloo_runloop"
_GLOO_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.02
_LOG = logging.getLogger("qsync_fx.communication")
_Stops = weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]]
_stops = _Stops()


def start(name: str, run: Callable[[], None], stop: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that is stopped and joined before the interpreter exits.

    A daemon thread in a C++ call of torch during interpreter finalization would end the process by
    `std::terminate`; a thread that is no daemon would be joined without a limit. `stop` makes `run`
    return after its queued tasks, without blocking; it must not reference the thread's owner.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


def wait_for_gloo() -> None:
    """Return once gloo's threads have freed their completed all-reduces, after 10 s at most.

    Gloo's thread acquires the GIL to free an all-reduce. If the process group is freed by then,
    torch hangs; if the interpreter finalizes, the process aborts (torch 2.13).
    """
    deadline = time.monotonic() + _GLOO_LIMIT_S
    # Sleeping releases the GIL to threads that wait for it. A runnable thread still needs the CPU.
    time.sleep(_PAUSE_S)
    while _gloo_is_runnable() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    time.sleep(_PAUSE_S)


def _gloo_is_runnable() -> bool:
    for task in Path("/proc/self/task").glob("*/stat"):
        try:
            name, _, fields = task.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if name == _GLOO and fields.split()[0] == "R":
            return True
    return False


@atexit.register
def _join_all() -> None:
    deadline = time.monotonic() + LIMIT_S
    threads = [(thread, stop) for thread, stop in _stops.items() if thread.is_alive()]
    for _, stop in threads:
        stop()
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            message = "the thread %r still waits for another rank after %g s; the process exits "
            message += "without it. Check the logs of the other ranks for a stopped rank"
            _LOG.error(message, thread.name, LIMIT_S)
    if threads:
        wait_for_gloo()


Work = Callable[[], Tensor]
Tasks = queue.SimpleQueue[tuple[Work, Any, Any] | None]


class Worker:
    """Thread that runs tasks one at a time, in submission order; see `start`.

    For gradients on a GPU, tasks run on a side stream. With `blocking`, the thread waits for the
    stream after each task; otherwise only the streams of those who use its result wait.
    """

    def __init__(
        self, name: str, device: torch.device | None = None, blocking: bool = True
    ) -> None:
        self.error: BaseException | None = None
        self._blocking = blocking
        is_gpu = device is not None and device.type == "cuda"
        self._devices: list[Any] = [device] if is_gpu else []
        make_stream: Any = torch.cuda.Stream
        self._stream: Any = make_stream(device) if is_gpu else None
        self._todo = Tasks()
        self._idle = threading.Condition()
        self._open = 0
        # The waiting thread has no strong reference to the worker: it ends with the last user.
        stop = partial(self._todo.put, None)
        weakref.finalize(self, stop)
        start(name, partial(_run, weakref.ref(self), self._todo), stop)

    def submit(self, work: Work) -> Any:
        """Queue a task for the thread; return a torch future of its result."""
        done: Any = torch.futures.Future(devices=self._devices)
        mark = None
        if self._stream is not None:
            mark = torch.cuda.current_stream(self._devices[0]).record_event()
        with self._idle:
            self._open += 1
        self._todo.put((work, mark, done))
        return done.then(_result)

    def wait(self) -> None:
        """Return once all submitted tasks are done; raise the error of a failed one."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)
        if self.error is not None:
            raise self.error
        if self._stream is not None and not self._blocking:
            torch.cuda.current_stream(self._devices[0]).wait_stream(self._stream)

    def do(self, work: Work, mark: Any, done: Any) -> None:
        """Run one task on the thread, after the device work queued before `mark`."""
        result: Tensor | BaseException | None = self.error
        try:
            with self._on_stream():
                try:
                    if result is None and self._stream is not None:
                        self._stream.wait_event(mark)
                    result = work() if result is None else result
                    if self._stream is not None and self._blocking:
                        self._stream.synchronize()
                except BaseException as error:  # noqa: BLE001  any exception must end the step
                    result = self.error = error
                # The future records the work of the current stream.
                done.set_result(result)
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()

    @contextlib.contextmanager
    def _on_stream(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._devices[0]), torch.cuda.stream(self._stream):
            yield


def _result(done: Any) -> Any:
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    return result


def _run(worker: weakref.ref[Worker], todo: Tasks) -> None:
    while (inputs := todo.get()) is not None:
        alive = worker()
        if alive is None:
            return
        alive.do(*inputs)
        del alive, inputs
