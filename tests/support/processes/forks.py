"""Test processes as forks of a process that has imported torch and qsync_fx (forking.py).

A fork saves six seconds of CPU time. Imports may depend on the environment, so forks share a server
only if their environments are equal except for variables that are read later.
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
"""Variables of a fork that its server does not have."""
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
"""Variables that may differ between the forks of a server."""
_HERE = Path(__file__).resolve().parent


class Process(Protocol):
    """Common interface of `subprocess.Popen` and a fork."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


class Server:
    """Client of a fork server process, which it starts and ends."""

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
        """Process id of the fork server, the parent of all forks."""
        return self._process.pid

    def ask(self, **request: Any) -> Any:
        """Return the answer to a request."""
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
        """Return a shell environment: `python SCRIPT`, `qsync` and torchrun's ranks run as forks.

        A fork has all variables of its shell, also if they differ from the server's.
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
        if self.poll() is None:  # after its end, another process may have its id
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> int:
        if self._code is None:
            self._code = self._server.ask(wait=self.pid)
        return self._code


_servers: dict[frozenset[tuple[str, str]], Server] = {}


def server(environment: Mapping[str, str]) -> Server:
    """Return the fork server of an environment; equal environments share a server."""
    key = frozenset(
        (name, value) for name, value in _wanted(environment).items() if name not in _LATER
    )
    if key not in _servers:
        _servers[key] = Server(environment)
    return _servers[key]


@contextlib.contextmanager
def own(environment: Mapping[str, str]) -> Iterator[Server]:
    """Yield a new fork server that imports modules from this PYTHONPATH."""
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
    """Start a Python script with its output in `log`; the default folder is the current one."""
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
    """Run a Python script and return its exit status; kill it after a timeout."""
    (code,) = ended([start(script, arguments, environment, log, folder, of)], seconds)
    return code


def ended(started: Sequence[Process], seconds: float) -> list[int]:
    """Wait for processes and return their exit status; kill them after a timeout."""
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
    """Return an environment without the variables of pytest."""
    return {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
