"""Background threads that end before the interpreter does.

A daemon thread that returns from a C++ call of torch while the interpreter finalizes is ended by `pthread_exit`, which the C++ frames above
it turn into `std::terminate`: "terminate called without an active exception", SIGABRT. A thread that is not a daemon would be joined
without a limit, and gloo cannot be interrupted.

Invariant: at exit, also after an exception or KeyboardInterrupt, each thread finishes its queued work and is joined. A thread that waits
for another rank for longer than the limit is reported.

Work on gradients that lie on a GPU, on a stream of its own beside those that compute.

Invariant: work begins when what the thread that gave it had queued before is done, and what it has queued is done when it ends: whoever is
told that it has ended need not wait for the device.

One thread that does one thing after the other, in the order they were given.

A hook of DistributedDataParallel may not wait for other ranks on the threads that gloo calls it from: with several buckets in flight all of
them would. Here the threads of autograd put buckets into a queue, and this one, alone, talks to the other ranks. What lies on a GPU it
works on beside the stream of those threads.

Invariant: after an error nothing is done any more, and whatever was given or is given gets that error.
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

LIMIT_S: Final = 60.0
"""Seconds that all threads together have to end. Another rank may still compute the step whose messages a thread waits for."""
_GLOO: Final = "pt_gloo_runloop"
_GLOO_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.02
_LOG = logging.getLogger("qsync_fx.communication")
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = (
    weakref.WeakKeyDictionary()
)


def start(name: str, run: Callable[[], None], stop: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread that is stopped and joined before the interpreter exits.

    Args:
        run: the body of the thread.
        stop: has `run` return once its queued work is done; returns at once. It must not keep the owner of the thread alive.
    """
    thread = threading.Thread(target=run, name=name, daemon=True)
    _stops[thread] = stop
    thread.start()
    return thread


def wait_for_gloo() -> None:
    """Return once gloo's threads have freed the all-reduces that they have completed, after 10 s at most.

    An all-reduce that DistributedDataParallel starts in a backward pass references a Python object. Gloo's thread acquires the GIL to free
    it, perhaps after the main thread has the result. If the process group is freed by then, torch waits for that thread with the GIL,
    and hangs; if the interpreter finalizes, the thread is ended inside C++ frames, and the process aborts (torch 2.13).
    """
    deadline = time.monotonic() + _GLOO_LIMIT_S
    # While this thread sleeps, a thread that waits for the GIL gets it. One that is runnable has not been given the CPU yet.
    time.sleep(_PAUSE_S)
    while _gloo_is_runnable() and time.monotonic() < deadline:
        time.sleep(_PAUSE_S)
    time.sleep(_PAUSE_S)


def _gloo_is_runnable() -> bool:
    """Return whether a thread of gloo is runnable; False where the system does not report it."""
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
    """Stop and join the threads that are alive."""
    deadline = time.monotonic() + LIMIT_S
    threads = [(thread, stop) for thread, stop in _stops.items() if thread.is_alive()]
    for _, stop in threads:
        stop()
    for thread, _ in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
        if thread.is_alive():
            _LOG.error(
                "the thread %r still waits for another rank after %g s, and the process exits without it: see in the logs of the other "
                "ranks whether one is stopped",
                thread.name,
                LIMIT_S,
            )
    if threads:
        wait_for_gloo()


class Side:
    """A stream of a device; on the CPU, where everything is done as it is called, nothing."""

    def __init__(self, device: torch.device) -> None:
        self.devices: list[int | str | torch.device] = [device] if device.type == "cuda" else []
        stream: Any = torch.cuda.Stream
        self._stream: Any = stream(device) if self.devices else None

    def mark(self) -> Any:
        """Returns what has been queued until now, by the thread that calls it."""
        return torch.cuda.current_stream(self.devices[0]).record_event() if self.devices else None

    @contextlib.contextmanager
    def behind(self, mark: Any) -> Iterator[None]:
        """Has what is called within be queued behind a mark, and waits for all of it."""
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self.devices[0]), torch.cuda.stream(self._stream):
            self._stream.wait_event(mark)
            yield
            self._stream.synchronize()


Work = Callable[[], Tensor]


class Worker:
    """Args:
        device: where what is worked on lies.

    Attributes:
        error: what ended the work; None while there is nothing wrong.
    """

    def __init__(self, name: str, device: torch.device | None = None) -> None:
        self.error: BaseException | None = None
        self._side = Side(device or torch.device("cpu"))
        self._todo: queue.SimpleQueue[tuple[Work, Any, Any] | None] = queue.SimpleQueue()
        self._idle = threading.Condition()
        self._open = 0
        # The thread holds no reference to the worker while it waits: with its last user the worker ends.
        stop = partial(self._todo.put, None)
        weakref.finalize(self, stop)
        start(name, partial(_run, weakref.ref(self), self._todo), stop)

    def submit(self, work: Work) -> Any:
        """Returns a future of torch of what `work` returns, which is called on the thread."""
        done: Any = torch.futures.Future(devices=self._side.devices)
        with self._idle:
            self._open += 1
        self._todo.put((work, self._side.mark(), done))
        return done.then(_taken)

    def wait(self) -> None:
        """Returns when everything given is done; raises what went wrong."""
        with self._idle:
            self._idle.wait_for(lambda: self._open == 0)
        if self.error is not None:
            raise self.error

    def do(self, work: Work, mark: Any, done: Any) -> None:
        """Does one piece of work, on the thread, behind what was queued on a device when it was given."""
        result: Tensor | BaseException
        try:
            if self.error is not None:
                result = self.error
            else:
                with self._side.behind(mark):
                    result = work()
        except BaseException as error:  # noqa: BLE001  whatever it is, the step ends with it
            result = self.error = error
        try:
            done.set_result(result)
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def _taken(done: Any) -> Tensor:
    result = done.value()
    if isinstance(result, BaseException):
        raise result
    used: Tensor = result
    return used


def _run(
    worker: weakref.ref[Worker], todo: queue.SimpleQueue[tuple[Work, Any, Any] | None]
) -> None:
    while (inputs := todo.get()) is not None:
        alive = worker()
        if alive is None:
            return
        alive.do(*inputs)
        del alive, inputs
