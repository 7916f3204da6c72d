"""Rank processes of the demo: start, message loop and termination.

Invariant: no process is alive after a `Ranks` context exits, however it exits. The death of a rank
ends the run immediately.
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
"""Seconds without a message after which the ranks count as hung; longer than a rank's own timeout.
"""

_GRACE = 2.0
"""Seconds to wait for an error of the other rank, to distinguish the cause from its consequence."""


class RankFailed(Exception):
    """Failure of a rank.

    Attributes:
        rank: index of the rank.
        what: its error, or how its process ended.
        expected: whether the error says what to do; otherwise the log has the details.
    """

    def __init__(self, rank: int, message: str, expected: bool) -> None:
        self.rank, self.what, self.expected = rank, message, expected
        super().__init__(message)


class Ranks:
    """Processes of a run."""

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
                # The launcher handles Ctrl-C, and processes that the rank starts end with its
                # group.
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
        """Yield (rank, message) until every rank has sent its result.

        Raises:
            RankFailed: a rank died or reported an error, or all ranks were silent for too long.
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
        """Return the first failure; the other rank often only reports the lost connection."""
        until = time.monotonic() + _GRACE
        while others and (left := until - time.monotonic()) > 0:
            for pipe in wait(list(others), timeout=left):
                assert isinstance(pipe, Connection)
                message = _receive(pipe)
                if message is None or isinstance(message, Failed):
                    failures[others.pop(pipe)] = message
        # A rank that ended without a message was killed, which caused any error of the other rank.
        times = {rank: getattr(failure, "time_s", 0.0) for rank, failure in failures.items()}
        first = min(times, key=times.__getitem__)
        failure = failures[first]
        if failure is not None:
            return RankFailed(first, failure.text, failure.expected)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._processes[first].wait(_GRACE)
        return RankFailed(
            first,
            "the process ended without an error message "
            f"({_exit_text(self._processes[first].returncode)})",
            False,
        )


def _environment() -> dict[str, str]:
    """Return the environment of a rank: one thread, also for compilation, and huge pages.

    Single threads confine each rank to its core. Huge pages shorten steps (`qsync doctor`) and make
    the step time independent of the memory addresses of a model, so that profiles apply to the
    training.
    """
    name, _, setting = SWITCH.partition("=")
    if current := os.environ.get(name):
        setting += f":{current}"
    requested = {name: setting}
    return {**os.environ, **requested, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}


def _receive(pipe: Connection) -> Any:
    try:
        return pipe.recv()
    except (EOFError, OSError):
        return None


def _exit_text(code: int | None) -> str:
    if code is not None and code < 0:
        with contextlib.suppress(ValueError):
            text = f"killed by {signal.Signals(-code).name}"
            if code == -signal.SIGKILL:
                text += ", for example because the machine ran out of memory"
            return text
    return "it closed its pipe" if code is None else f"exit code {code}"
