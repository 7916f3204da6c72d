"""A thread on each rank that says that the rank lives, and sees how the others fare while the rank itself waits for them.

Every rank's heart beats in the channel. Rank 0 looks at all of them, the others look at rank 0's and at what was told: so what a rank has
to look at does not grow with their number. A rank that compiles for too long, and one that says nothing for too long, is told by the rank
that sees it. That a process was killed its neighbours see at once, where they are on its machine.

Invariant: what is told anywhere is known on every rank, and in its log, within about a second, whatever its own code does meanwhile, unless
that keeps Python from running other threads. A rank that stood still itself blames no other for the silence.

Whether the process of a rank on the same machine is still there.

A process that is killed closes its connections, and who waits for it in no collective does not see that. Invariant: one that is said to be
gone is gone; of one on another machine, or in another container, nothing is said.
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
"""Where a process's state and start stand in its line of /proc, behind its name."""


def identity() -> str:
    """Returns what tells this process from every other; "" where that cannot be known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getpid()} {_stat(os.getpid())[_STARTED]}"
    except OSError:
        return ""


def gone(other: str) -> bool:
    """Whether a process on this machine that had this identity has ended."""
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
"""Seconds of silence after which a rank counts as gone once a collective has failed: then one is."""
_LINGERS: Final = 5.0
_GONE: Final = "done"
_WHY: Final = "see whether its process was killed or stopped, or its machine ran out of memory, and start all ranks again"


class Watcher:
    """The thread, from `start` to `stop`.

    Args:
        channel: of the guard.
        silence: seconds that a rank may say nothing.
        compiling: seconds that a rank may compile.
        ends: seconds after a failure at which the process is ended if it does not come back from where it waits; None for never.

    Attributes:
        failure: what is known to have failed.
        lost: whether the store has gone.
    """

    def __init__(
        self, channel: Channel, silence: float, compiling: float, ends: float | None
    ) -> None:
        self.channel, self.silence, self.compiling, self.ends = channel, silence, compiling, ends
        self.failure: Failure | None = None
        self.lost = False
        self._known, self._lock = threading.Event(), threading.Lock()
        self._stop = threading.Event()
        self._compiles = threading.Event()
        self._seen: dict[int, tuple[str, float]] = {}
        self._since: dict[int, float] = {}
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self.channel.put(f"process/{self.channel.rank}", identity())
        self._thread = communication_thread.start("qsync-watcher", self._run, self._stop.set)

    def stop(self, done: bool) -> None:
        """Ends the thread; `done` says that the rank needs no more watching, for it has come to its end."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(5)
        if done and not self.lost:
            try:
                self.channel.put(f"beat/{self.channel.rank}", _GONE)
            except StoreLost:
                self.lost = True

    def compiles(self, begins: bool) -> None:
        """Notes that this rank begins or ends to compile."""
        if begins:
            self._compiles.set()
        else:
            self._compiles.clear()

    def wait(self, seconds: float) -> Failure | None:
        """Returns what has failed, once it is known, or None after some seconds."""
        self._known.wait(seconds)
        return self.failure

    def hurry(self) -> None:
        """Says that a collective has failed: whoever is silent now is gone."""
        if not self.lost:
            self.channel.count("hurry", 1)

    def tell(self, failure: Failure) -> None:
        """Tells all ranks, and this one."""
        self.channel.tell(failure)
        self.learn(failure, logs=failure.rank != self.channel.rank)
        self.linger()

    def learn(self, failure: Failure, logs: bool = True) -> None:
        """Takes notice of what has failed, and notes it in the log but where this rank raises it itself."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._at = failure, time.monotonic()
        self._known.set()
        if logs:
            _LOG.error("%s", failure.error())
        self.channel.count("known", 1)

    def linger(self) -> None:
        """Waits until all ranks know what has failed, for some seconds: the store may end with this rank's process."""
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
                self._seen = {
                    rank: (text, index + stood) for rank, (text, index) in self._seen.items()
                }
            try:
                self._turn(beats, now)
            except StoreLost:
                self.lost = True
                return
            before = time.monotonic()

    def _turn(self, beats: int, now: float) -> None:
        state = "compiles" if self._compiles.is_set() else "runs"
        self.channel.put(f"beat/{self.channel.rank}", f"{state} {beats}")
        if self.failure is None:
            if (reported := self.channel.told()) is not None:
                self.learn(reported)
            else:
                self._look(now)
        elif self.ends is not None and now - self._at > self.ends:
            _LOG.error(
                "rank %d does not come back from where it waits, and is ended", self.channel.rank
            )
            logging.shutdown()
            os._exit(1)

    def _look(self, now: float) -> None:
        for rank in {
            (self.channel.rank + 1) % self.channel.world,
            (self.channel.rank - 1) % self.channel.world,
        }:
            # A rank that has come to its end says so before it ends.
            available = self.channel.get(f"process/{rank}")
            if (
                available
                and gone(available)
                and self.channel.get(f"beat/{rank}") != _GONE
                and self.channel.told() is None
            ):
                message = f"rank {rank} has ended without a word"
                self.tell(Failure(rank, message, None, _WHY, lives=False))
                return
        limit = min(self.silence, _HURRIED) if self.channel.count("hurry") else self.silence
        for rank in range(self.channel.world) if self.channel.rank == 0 else (0,):
            text = self.channel.get(f"beat/{rank}")
            if text is None or text == _GONE or rank == self.channel.rank:
                continue
            if self._seen.get(rank, ("", 0.0))[0] != text:
                self._seen[rank] = text, now
            silent = now - self._seen[rank][1]
            if silent > limit:
                message = f"rank {rank} has said nothing for {silent:.0f} s"
                self.tell(Failure(rank, message, f"limit: {limit:g} s", _WHY, lives=False))
                return
            since = (
                self._since.setdefault(rank, now)
                if text.startswith("compiles")
                else self._since.pop(rank, now)
            )
            if now - since > self.compiling and text.startswith("compiles"):
                do = "give guard(..., compiling=SECONDS) more time, or see in its log what takes so long"
                message = f"rank {rank} has been compiling for {now - since:.0f} s"
                self.tell(Failure(rank, message, f"limit: {self.compiling:g} s", do))
                return
