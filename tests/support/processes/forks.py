"""Processes that begin where another has imported torch and qsync_fx: forks of it (forking.py),
each of which saves six seconds of a core.

Invariant: what a process imports may depend on its environment: a fork has the one that was there
    when its first module was imported, but for what nobody asks for before it is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

_EACH = ("OMP_NUM_THREADS", "GLOO_SOCKET_IFNAME", "COLUMNS")
"""What each fork is given as it starts; the process that is forked has none of it, and threads are
set by the first (forking.py).
"""
_LATER = (
    *_EACH,
    "PATH",
    "PYTHON_EXEC",
    "PYTHONPATH",
    "PYTHONDONTWRITEBYTECODE",
    "QSYNC_CACHED_PLAN",
    "QSYNC_CACHE_DIR",
    "HF_HUB_OFFLINE",
)
"""What may differ between the forks of a process."""
_HERE = Path(__file__).resolve().parent


class Process(Protocol):
    """What `subprocess.Popen` and a fork have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Server:
    """A process that is forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="forks-"))
        door = self._folder / "door"
        self._process = subprocess.Popen(
            [sys.executable, str(_HERE / "forking.py"), str(door)],
            env={name: value for name, value in _wanted(environment).items() if name not in _EACH},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self.end)
        self._commands = self._folder / "commands"
        self._commands.mkdir()
        qsync = shutil.which("qsync", path=Path(sys.executable).parent)
        for name, script in {"python": None, "qsync": qsync}.items():
            line = shlex.join(
                [
                    sys.executable,
                    "-IS",
                    str(_HERE / "forked.py"),
                    str(door),
                    *filter(None, [script]),
                ]
            )
            (self._commands / name).write_text(f'#!/bin/sh\nexec {line} "$@"\n')
            (self._commands / name).chmod(0o755)

    @property
    def pid(self) -> int:
        """Of which all forks are children."""
        return self._process.pid

    def ask(self, **request: Any) -> Any:
        """Returns the answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(
        self, command: list[str], log: Path, folder: Path, environment: Mapping[str, str]
    ) -> Process:
        return _Fork(
            self, self.ask(fork=command, log=str(log), folder=str(folder), environment=environment)
        )

    def shell(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Returns the environment of a shell in which `python SCRIPT`, `qsync` and what torchrun
        starts are forks, too.

        A fork has all of the variables that its shell has, whatever was there as modules were
        imported.
        """
        path = os.pathsep.join([str(self._commands), environment.get("PATH", os.defpath)])
        return {**_wanted(environment), "PATH": path, "PYTHON_EXEC": str(self._commands / "python")}

    def end(self) -> None:
        atexit.unregister(self.end)
        self._process.communicate()
        shutil.rmtree(self._folder, ignore_errors=True)


class _Fork:
    def __init__(self, server: Server, pid: int) -> None:
        self.pid = pid
        self._server = server
        self._code: int | None = None

    def poll(self) -> int | None:
        if self._code is None:
            self._code = self._server.ask(poll=self.pid)
        return self._code

    def kill(self) -> None:
        if self.poll() is None:  # else its number may be another's
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._server.ask(wait=self.pid)
        return self._code


_servers: dict[frozenset[tuple[str, str]], Server] = {}


def server(environment: Mapping[str, str]) -> Server:
    """Returns what can be forked in an environment: one that is asked for once has imported no more
    than its fork would have.
    """
    key = frozenset(
        (name, value) for name, value in _wanted(environment).items() if name not in _LATER
    )
    if key not in _servers:
        _servers[key] = Server(environment)
    return _servers[key]


@contextlib.contextmanager
def own(environment: Mapping[str, str]) -> Iterator[Server]:
    """Yields what can be forked with the modules that this PYTHONPATH has."""
    started = Server(environment)
    try:
        yield started
    finally:
        started.end()


def shell(environment: Mapping[str, str]) -> dict[str, str]:
    return server(environment).shell(environment)


def start(
    script: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path | None = None,
    of: Server | None = None,
) -> Process:
    """Starts a Python script in a folder, the one at hand by default; what it prints goes to a
    file.
    """
    later = {name: environment[name] for name in _LATER if name in environment}
    of = of or server(environment)
    return of.fork(
        [str(script), *arguments], log.resolve(), (folder or Path.cwd()).resolve(), later
    )


def run(
    script: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    of: Server | None = None,
    seconds: float = 900,
) -> int:
    """Runs a Python script to its end, and returns its status; one that takes longer is ended."""
    (code,) = ended([start(script, arguments, environment, log, folder, of)], seconds)
    return code


def ended(started: Sequence[Process], seconds: float) -> list[int]:
    """Waits for processes, and returns their status; those that take longer are killed."""
    until = time.monotonic() + seconds
    try:
        while None in [process.poll() for process in started] and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        for process in started:
            process.kill()
        codes = [process.wait() for process in started]
    return codes


def _wanted(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without what pytest tells its own processes."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
