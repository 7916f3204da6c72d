"""Messages between ranks through the store of torch.distributed, and detection of failed ranks.

A heartbeat thread talks to the store, as a rank may be blocked in a collective. Invariant: each
rank knows a reported failure within about a second; no call of `Channel` waits for another rank.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from torch import distributed
from torch.distributed import distributed_c10d

from qsync_fx.communication import communication_thread
from qsync_fx.errors import QSyncError, RankError
from qsync_fx.torch_internals import _get_default_store

T = TypeVar("T")
_LONGEST: Final = 20_000
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
_STATE, _STARTED = 0, 19
"""Indices of a process's state and start time in /proc/PID/stat, after its name."""


class StoreLost(Exception):
    """The store does not respond: its process has ended."""


@dataclass(frozen=True)
class Failure:
    """Failure of a rank, with the texts of a `RankError`."""

    rank: int | None
    message: str
    where: str | None = None
    do: str | None = None
    lives: bool = True  # whether its process can still receive reports

    @classmethod
    def of(cls, rank: int, error: BaseException) -> Failure:
        """Return the failure that an error on `rank` causes."""
        text = f"rank {rank} has failed: {type(error).__name__}"
        if isinstance(error, QSyncError):
            return cls(rank, f"{text}: {error.what}", error.where, error.do)
        if reason := str(error).strip()[:_LONGEST]:
            text += f": {reason}"
        return cls(rank, text)

    @classmethod
    def from_json(cls, text: str) -> Failure:
        return cls(**json.loads(text))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    def error(self) -> RankError:
        do = self.do or "correct the error on that rank, and restart all ranks"
        result = RankError(self.message, where=self.where, do=do)
        result.rank = self.rank
        return result


class Channel:
    """Message channel of all ranks, under a prefix of the store."""

    _begun = 0

    def __init__(self) -> None:
        self.rank, self.world = distributed.get_rank(), distributed.get_world_size()
        # Ranks create channels in the same order, so the counter names the same channel on each. A
        # cloned store has its own connection, which no other thread blocks.
        Channel._begun += 1
        store: Any = _get_default_store()
        self._store: Any = distributed_c10d.PrefixStore(f"qsync/{Channel._begun}", store.clone())

    def put(self, key: str, text: str) -> None:
        packed = zlib.compress(text.encode())
        self._ask(lambda: self._store.set(key, packed.hex()))

    def get(self, key: str) -> str | None:
        """Return the text of a key; None if it is not set yet."""
        if not self._ask(lambda: bool(self._store.check([key]))):
            return None
        packed: bytes = self._ask(lambda: self._store.get(key))
        return zlib.decompress(bytes.fromhex(packed.decode())).decode()

    def count(self, key: str, more: int = 0) -> int:
        """Add `more` to a counter that all ranks share, and return the sum."""
        return self._ask(lambda: int(self._store.add(key, more)))

    def report(self, failure: Failure) -> None:
        self.put(f"failure/{self.count('failures', 1)}", failure.to_json())

    def first_failure(self) -> Failure | None:
        """Return the first reported failure; None without one."""
        text = self.get("failure/1")
        return None if text is None else Failure.from_json(text)

    def _ask(self, call: Callable[[], T]) -> T:
        try:
            return call()
        # torch raises DistError (a RuntimeError) or a plain RuntimeError, depending on the store.
        except (RuntimeError, OSError) as error:
            raise StoreLost(str(error)) from error


def identity() -> str:
    """Return a unique identity of this process; "" if /proc does not provide one."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace, pid = os.readlink("/proc/self/ns/pid"), os.getpid()
        return f"{boot} {namespace} {pid} {_stat(pid)[_STARTED]}"
    except OSError:
        return ""


def has_ended(other: str) -> bool:
    """Return whether a process on this machine with this identity has ended; False if unknown."""
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


class Watcher:
    """Heartbeat thread of one rank, from `start` to `stop`.

    A rank may be silent for `silence` seconds and compile for `compiling` seconds. If this process
    is blocked `ends` seconds after a failure, it is terminated; None for never.
    """

    def __init__(
        self, channel: Channel, silence: float, compiling: float, ends: float | None
    ) -> None:
        self.channel, self.silence, self.compiling, self.ends = channel, silence, compiling, ends
        self.failure: Failure | None = None
        self.lost = False
        self._failed, self._lock = threading.Event(), threading.Lock()
        self._stop = threading.Event()
        self._is_compiling = False
        self._last_beats: dict[int, tuple[str, float]] = {}
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

    def compiles(self, begins: bool, _: object = None) -> None:
        """Record that this rank begins or ends to compile; a callback of Dynamo."""
        self._is_compiling = begins

    def hurry(self, seconds: float) -> None:
        """Shorten the limit of silence on all ranks; return once a failure is known, in time."""
        if not self.lost:
            self.channel.count("hurry", 1)
        self._failed.wait(seconds)

    def report(self, failure: Failure) -> None:
        """Report a failure to all ranks, including this one."""
        self.channel.report(failure)
        self.learn(failure, logs=failure.rank != self.channel.rank)
        self.linger()

    def learn(self, failure: Failure, logs: bool = True) -> None:
        """Record a failure and log it; `logs` is False on a rank that raises it itself."""
        with self._lock:
            if self.failure is not None:
                return
            self.failure, self._failed_at = failure, time.monotonic()
        self._failed.set()
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
                self._last_beats = {
                    r: (text, since + stood) for r, (text, since) in self._last_beats.items()
                }
            try:
                self._turn(beats, now)
            except StoreLost:
                self.lost = True
                return
            before = time.monotonic()

    def _turn(self, beats: int, now: float) -> None:
        state = {True: "compiles", False: "runs"}[self._is_compiling]
        self.channel.put(f"beat/{self.channel.rank}", f"{state} {beats}")
        if self.failure is None:
            if (reported := self.channel.first_failure()) is not None:
                self.learn(reported)
            else:
                self._look(now)
        elif self.ends is not None and now - self._failed_at > self.ends:
            message = "rank %d does not return from a collective operation and is terminated"
            _LOG.error(message, self.channel.rank)
            logging.shutdown()
            os._exit(1)

    def _look(self, now: float) -> None:
        """Report the first rank whose process has ended, that is silent or compiles too long."""
        channel = self.channel
        for rank in {(channel.rank + 1) % channel.world, (channel.rank - 1) % channel.world}:
            process = channel.get(f"process/{rank}")
            if not process or not has_ended(process):
                continue
            # A rank that finishes marks itself as done before its process ends.
            if channel.get(f"beat/{rank}") != _DONE and channel.first_failure() is None:
                message = f"the process of rank {rank} has ended without a report"
                self.report(Failure(rank, message, None, _REMEDY, lives=False))
                return
        limit = self.silence
        if channel.count("hurry"):
            limit = min(limit, _HURRIED)
        for rank in range(1, channel.world) if channel.rank == 0 else (0,):
            text = channel.get(f"beat/{rank}")
            if text is None or text == _DONE:
                continue
            if self._last_beats.get(rank, ("", 0.0))[0] != text:
                self._last_beats[rank] = text, now
            silent = now - self._last_beats[rank][1]
            if silent > limit:
                message = f"rank {rank} has sent no heartbeat for {silent:.0f} s"
                self.report(Failure(rank, message, f"limit: {limit:g} s", _REMEDY, lives=False))
                return
            if not text.startswith("compiles"):
                self._since.pop(rank, None)
            elif (compiled := now - self._since.setdefault(rank, now)) > self.compiling:
                do = "raise the limit with guard(..., compiling=SECONDS), or check its log"
                message = f"rank {rank} has been compiling for {compiled:.0f} s"
                self.report(Failure(rank, message, f"limit: {self.compiling:g} s", do))
                return
