"""Processes that begin where another has imported torch and qsync_fx: forks of it, each of which saves six seconds of a core.

    python forks.py     the process that is forked; what it is asked comes as lines of JSON, what it answers goes out as such

Invariant: what is forked has one thread and has computed nothing, so that a fork is as much a process of its own as one that started from
nothing. What a process imports may depend on its environment: a fork has the one that was there when its first module was imported, but for
what nobody asks for before it is needed.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

_LATER = ("PATH", "PYTHONPATH", "PYTHONDONTWRITEBYTECODE", "QSYNC_CACHED_PLAN", "QSYNC_CACHE_DIR", "HF_HUB_OFFLINE")
"""What may differ between the forks of a process."""
_IMPORTED = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "qsync_fx.backend.compile",
    "qsync_fx.distributed",
)


class Process(Protocol):
    """What `subprocess.Popen` and a fork have in common."""

    pid: int

    def poll(self) -> int | None: ...
    def kill(self) -> None: ...
    def wait(self) -> int: ...


def start(
    script: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path | None = None,
    fork: bool = True,
) -> Process:
    """Starts a Python script in a folder, the one at hand by default; what it prints goes to a file.

    Without `fork` it begins with nothing imported, as it may with it.
    """
    wanted = {name: value for name, value in environment.items() if not name.startswith("PYTEST_")}
    folder = folder or Path.cwd()
    if fork:
        later = {name: wanted[name] for name in _LATER if name in wanted}
        return _server(wanted).fork([str(script), *arguments], log.resolve(), folder.resolve(), later)
    with open(log, "w") as output:
        command = [sys.executable, str(script), *arguments]
        return subprocess.Popen(command, env=wanted, cwd=folder, stdout=output, stderr=subprocess.STDOUT)


def run(
    script: Path,
    arguments: list[str],
    environment: Mapping[str, str],
    log: Path,
    folder: Path,
    fork: bool = True,
    seconds: float = 900,
) -> int:
    """Runs a Python script to its end, and returns its status; one that takes longer is ended."""
    process = start(script, arguments, environment, log, folder, fork)
    until = time.monotonic() + seconds
    try:
        while (code := process.poll()) is None and time.monotonic() < until:
            time.sleep(0.05)
    finally:
        process.kill()
        process.wait()
    return -signal.SIGKILL if code is None else code


class _Server:
    """The process that is forked."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__], env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        atexit.register(self._end)

    def ask(self, **request: Any) -> Any:
        """Returns the answer to a request."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def fork(self, command: list[str], log: Path, folder: Path, environment: Mapping[str, str]) -> Process:
        return _Fork(self, self.ask(fork=command, log=str(log), folder=str(folder), environment=environment))

    def _end(self) -> None:
        self._process.communicate()


class _Fork:
    def __init__(self, server: _Server, pid: int) -> None:
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


_servers: dict[frozenset[tuple[str, str]], _Server] = {}


def _server(environment: Mapping[str, str]) -> _Server:
    """Returns what can be forked in an environment: one that is asked for once has imported no more than its fork would have."""
    fixed = {name: value for name, value in environment.items() if name not in _LATER}
    key = frozenset(fixed.items())
    if key not in _servers:
        _servers[key] = _Server(environment)
    return _servers[key]


def _serve() -> list[str]:
    """Answers until there are no more requests, in the process that is forked; returns, in each fork, what that is to run."""
    # NumPy's library starts threads as it is loaded, one a core.
    own = "OPENBLAS_NUM_THREADS" not in os.environ
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name in _IMPORTED:
        importlib.import_module(name)
    if own:
        del os.environ["OPENBLAS_NUM_THREADS"]
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"{len(threads)} threads cannot be forked"
    for line in sys.stdin:
        request = json.loads(line)
        if "fork" in request:
            if (pid := os.fork()) == 0:
                return _begun(request)
            answer: int | None = pid
        else:
            (pid,) = request.values()
            found, status = os.waitpid(pid, os.WNOHANG if "poll" in request else 0)
            answer = os.waitstatus_to_exitcode(status) if found else None
        print(json.dumps(answer), flush=True)
    sys.exit(0)


def _begun(request: Mapping[str, Any]) -> list[str]:
    os.chdir(request["folder"])
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for ours, theirs in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(ours, theirs)
    os.environ.update(request["environment"])
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    found: list[str] = request["fork"]
    sys.path[:1] = [str(Path(found[0]).parent), *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return found


if __name__ == "__main__":
    sys.argv = _serve()
    runpy.run_path(sys.argv[0], run_name="__main__")
