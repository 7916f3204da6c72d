"""One thread that does one thing after the other, in the order they were given.

A hook of DistributedDataParallel may not wait for other ranks on the threads that gloo calls it from: with several buckets in flight all of
them would. Here the threads of autograd put buckets into a queue, and this one, alone, talks to the other ranks. What lies on a GPU it
works on beside the stream of those threads.

Invariant: after an error nothing is done any more, and whatever was given or is given gets that error.
"""

from __future__ import annotations

import queue
import threading
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from qsync_fx.communication import threads
from qsync_fx.communication.wire.side import Side

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
        threads.start(name, partial(_run, weakref.ref(self), self._todo), stop)

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
        found: Tensor | BaseException
        try:
            if self.error is not None:
                found = self.error
            else:
                with self._side.behind(mark):
                    found = work()
        except BaseException as error:  # noqa: BLE001  whatever it is, the step ends with it
            found = self.error = error
        try:
            done.set_result(found)
        finally:
            with self._idle:
                self._open -= 1
                self._idle.notify_all()


def _taken(done: Any) -> Tensor:
    found = done.value()
    if isinstance(found, BaseException):
        raise found
    taken: Tensor = found
    return taken


def _run(worker: weakref.ref[Worker], todo: queue.SimpleQueue[tuple[Work, Any, Any] | None]) -> None:
    while (given := todo.get()) is not None:
        alive = worker()
        if alive is None:
            return
        alive.do(*given)
        del alive, given
