"""Background threads that end before the interpreter does.

A daemon thread that returns from a C++ call of torch while the interpreter finalizes is ended by `pthread_exit`, which the C++ frames above
it turn into `std::terminate`: "terminate called without an active exception", SIGABRT. A thread that is not a daemon would be joined
without a limit, and gloo cannot be interrupted.

Invariant: at exit, also after an exception or KeyboardInterrupt, each thread finishes its queued work and is joined. A thread that waits
for another rank for longer than the limit is reported.
"""

from __future__ import annotations

import atexit
import logging
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Final

LIMIT_S: Final = 60.0
"""Seconds that all threads together have to end. Another rank may still compute the step whose messages a thread waits for."""
_GLOO: Final = "pt_gloo_runloop"
_GLOO_LIMIT_S: Final = 10.0
_PAUSE_S: Final = 0.02
_LOG = logging.getLogger("qsync_fx.communication")
_stops: weakref.WeakKeyDictionary[threading.Thread, Callable[[], object]] = weakref.WeakKeyDictionary()


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
