"""Heartbeat thread that detects failed ranks while the main thread is blocked.

Every rank writes a heartbeat to the store. Rank 0 reads all heartbeats, the others only rank 0's
and the first reported failure. A rank that is silent or compiles for too long is reported by its
observer. The neighbours of a rank on the same machine also detect that its process has ended, from
/proc. A reported failure is known and logged on every rank within about a second.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path
from typing import Final

from qsync_fx.communication import communication_thread
from qsync_fx.distributed.consensus.store_channel import Channel, Failure, StoreLost

_STATE, _STARTED = 0, 19
"""Indices of a process's state and start time in /proc/PID/stat, after its name."""


def identity() -> str:
    """Return a unique identity of this process; "" if /proc does not provide one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, pid = os.readlink("/proc/self/ns/pid"), os.getpid()
        return f"{boot} {namespace} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(other: str) -> bool:
    """Return whether a process on this machine with this identity has ended.

    False if its state is unknown: on another machine, or in another PID namespace.
    """
    mine, theirs = identity().split(), other.split()
    if len(mine) != 4 or len(theirs) != 4 or mine[:2] != theirs[:2]:
        return False
    try:
        result = _stat(int(theirs[2]))
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return result[_STATE] in "ZX" or result[_STARTED] != theirs[3]


def _stat(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


_LOG = logging.getLogger("qsync_fx.distributed")
_PERIOD: Final = 0.25
_HURRIED: Final = 3.0
"""Limit of silence in seconds after a failed collective, which implies that a rank is gone."""
_LINGERS: Final = 5.0
_DONE: Final = "done"
_REMEDY: Final = (
    "check whether its process was killed or stopped, or its machine ran out of memory; then "
    "restart all ranks"
)


class Watcher:
    """Heartbeat thread of one rank, from `start` to `stop`.

    Args:
        silence: seconds without a heartbeat until a rank counts as failed.
        compiling: seconds that a rank may compile.
        ends: seconds after a failure until this process is terminated, if it stays blocked; None
            for never.
    """

    def __init__(
        self, channel: Channel, silence: float, compiling: float, ends: float | None
    ) -> None:
        self.channel, self.silence, self.compiling, self.ends = channel, silence, compiling, ends
        self.failure: Failure | None = None
        self.lost = False
        self._known, self._lock = threading.Event(), threading.Lock()
        self._stop = threading.Event()
        self._is_compiling = False
        self._seen: dict[int, tuple[str, float]] = {}
        self._since: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.channel.put(f"process/{self.channel.rank}", identity())
        self._thread = communication_thread.start("qsync-watcher", self._run, self._stop.set)

    def stop(self, done: bool) -> None:
        """End the thread; `done` marks this rank as finished, so that its silence is no failure."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        if done and not self.lost:
            try:
                self.channel.put(f"beat/{self.channel.rank}", _DONE)
            except StoreLost:
                self.lost = True

    def compiles(self, begins: bool) -> None:
        """Record that this rank begins or ends to compile."""
        self._is_compiling = begins

    def wait(self, seconds: float) -> Failure | None:
        """Return the failure as soon as one is known; None after `seconds`."""
        self._known.wait(seconds)
        return self.failure

    def hurry(self) -> None:
        """Shorten the limit of silence on all ranks, because a collective has failed."""
        if not self.lost:
            self.channel.count("hurry", 1)

    def tell(self, failure: Failure) -> None:
        """Report a failure to all ranks, including this one."""
        self.channel.tell(failure)
        self.learn(failure, logs=failure.rank != self.channel.rank)
        self.linger()

    def learn(self, failure: Failure, logs: bool = True) -> None:
        """Record a failure and log it; `logs` is False on a rank that raises it itself."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._at = failure, time.monotonic()
        self._known.set()
        if logs:
            _LOG.error("%s", failure.error())
        self.channel.count("known", 1)

    def linger(self) -> None:
        """Wait up to 5 s until all ranks know the failure: the store may end with this process."""
        until = time.monotonic() + _LINGERS
        others = self.channel.world - (self.failure is not None and not self.failure.lives)
        while self.channel.count("known") < others and time.monotonic() < until:
            time.sleep(0.05)

    def _run(self) -> None:
        beats, period = 0, max(_PERIOD, self.channel.world / 2000)
        before = time.monotonic()
        while not self._stop.wait(period):
            beats += 1
            now = time.monotonic()
            if (stood := now - before) > 4 * period:
                # A suspended thread does not blame others for its own silence.
                self._seen = {r: (text, since + stood) for r, (text, since) in self._seen.items()}
            try:
                self._turn(beats, now)
            except StoreLost:
                self.lost = True
                return
            before = time.monotonic()

    def _turn(self, beats: int, now: float) -> None:
        state = "compiles" if self._is_compiling else "runs"
        self.channel.put(f"beat/{self.channel.rank}", f"{state} {beats}")
        if self.failure is None:
            if (reported := self.channel.told()) is not None:
                self.learn(reported)
            else:
                self._look(now)
        elif self.ends is not None and now - self._at > self.ends:
            message = "rank %d does not return from a collective operation and is terminated"
            _LOG.error(message, self.channel.rank)
            logging.shutdown()
            os._exit(1)

    def _look(self, now: float) -> None:
        channel = self.channel
        for rank in {(channel.rank + 1) % channel.world, (channel.rank - 1) % channel.world}:
            process = channel.get(f"process/{rank}")
            if not process or not has_ended(process):
                continue
            # A rank that finishes marks itself as done before its process ends.
            if channel.get(f"beat/{rank}") != _DONE and channel.told() is None:
                message = f"the process of rank {rank} has ended without a report"
                self.tell(Failure(rank, message, None, _REMEDY, lives=False))
                return
        limit = self.silence
        if channel.count("hurry"):
            limit = min(limit, _HURRIED)
        for rank in range(1, channel.world) if channel.rank == 0 else (0,):
            text = channel.get(f"beat/{rank}")
            if text is None or text == _DONE:
                continue
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now
            silent = now - self._seen[rank][1]
            if silent > limit:
                message = f"rank {rank} has sent no heartbeat for {silent:.0f} s"
                self.tell(Failure(rank, message, f"limit: {limit:g} s", _REMEDY, lives=False))
                return
            if not text.startswith("compiles"):
                self._since.pop(rank, None)
            elif (compiled := now - self._since.setdefault(rank, now)) > self.compiling:
                do = "raise the limit with guard(..., compiling=SECONDS), or check its log"
                message = f"rank {rank} has been compiling for {compiled:.0f} s"
                self.tell(Failure(rank, message, f"limit: {self.compiling:g} s", do))
                return
