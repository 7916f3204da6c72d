"""Starts the ranks, listens to them, and ends them.

Invariant: when a `Ranks` context is left, however it is left, none of its processes is alive. A rank that dies ends the run at once:
nobody waits for what will not come.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from messages import Failed, Job, Result

from qsync_fx.devices.machine import SWITCH

_SILENCE = 400.0
"""Seconds without a word of any rank, after which something must hang; more than a rank itself waits for the other."""

_GRACE = 2.0
"""Seconds in which the other rank may fail too, to tell the first cause from what followed."""


class RankFailed(Exception):
    """A rank could not go on.

    Attributes:
        rank: which one.
        what: its error, or how it ended.
        expected: whether it is an error that says what to do, rather than a crash whose log one has to read.
    """

    def __init__(self, rank: int, what: str, expected: bool) -> None:
        self.rank, self.what, self.expected = rank, what, expected
        super().__init__(what)


class Ranks:
    """The processes of a run."""

    def __init__(self, jobs: list[Job]) -> None:
        self.jobs = jobs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._pipes: dict[Connection, int] = {}

    def __enter__(self) -> Ranks:
        self._folder = Path(tempfile.mkdtemp(prefix="qsync-demo-"))
        try:
            for job in self.jobs:
                self._start(replace(job, rendezvous=self._folder / "rendezvous"))
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, job: Job) -> None:
        ours, theirs = multiprocessing.Pipe()
        self._pipes[ours] = job.rank
        with theirs, open(job.log, "wb") as log:
            self._processes[job.rank] = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("rank.py")), str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=_environment(),
                # Ctrl-C is the launcher's to handle, and what the rank starts itself ends with it.
                start_new_session=True,
            )
        ours.send(job)

    def __exit__(self, *error: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self._processes.values():
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(process.pid, number)
            for process in self._processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(3)
        for pipe in self._pipes:
            pipe.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def messages(self) -> Iterator[tuple[int, Any]]:
        """Yields (rank, message) until every rank has sent its result.

        Raises:
            RankFailed: a rank died, told an error, or all have been silent for too long.
        """
        talking = dict(self._pipes)
        while talking:
            ready = wait(list(talking), timeout=_SILENCE)
            if not ready:
                raise RankFailed(
                    min(talking.values()), f"no rank has said anything for {_SILENCE:.0f} s", False
                )
            for pipe in ready:
                assert isinstance(pipe, Connection)
                message = _receive(pipe)
                if message is None or isinstance(message, Failed):
                    raise self._first_failure({talking.pop(pipe): message}, talking)
                yield talking[pipe], message
                if isinstance(message, Result):
                    del talking[pipe]

    def _first_failure(
        self, failures: dict[int, Failed | None], others: dict[Connection, int]
    ) -> RankFailed:
        """Returns the failure that came first; the other rank's is often but the lost connection to this one."""
        until = time.monotonic() + _GRACE
        while others and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(others), timeout=left):
                assert isinstance(pipe, Connection)
                message = _receive(pipe)
                if message is None or isinstance(message, Failed):
                    failures[others.pop(pipe)] = message
        # A rank that ended without a word was killed, and its death is the cause of whatever the other says.
        first = min(
            failures, key=lambda rank: failure.at if (failure := failures[rank]) else float("-inf")
        )
        failure = failures[first]
        if failure is not None:
            return RankFailed(first, failure.text, failure.expected)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[first].wait(_GRACE)
        return RankFailed(
            first,
            f"the process ended without a word ({_how(self._processes[first].returncode)})",
            False,
        )


def _environment() -> dict[str, str]:
    """Returns a rank's: one thread, also for compiling, as their cores are not to be each other's, and memory in huge pages.

    With those steps are shorter (`qsync doctor`), and equal copies of a model, which else differ by where in memory they lie, take the
    same: what is measured of a plan holds when it trains.
    """
    name, _, setting = SWITCH.partition("=")
    given = os.environ.get(name)
    asked = {name: f"{setting}:{given}" if given else setting}
    return {**os.environ, **asked, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _how(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            out_of_memory = (
                ", as by a machine that runs out of memory" if code == -signal.SIGKILL else ""
            )
            return f"killed by {signal.Signals(-code).name}{out_of_memory}"
    return "it closed its pipe" if code is None else f"exit code {code}"
