"""Fork server: a process that has imported torch and qsync_fx, and waits for requests.

    python forking.py DOOR

Tests send lines of JSON on standard input (forks.py) and read answers on standard output. Processes
of a
shell or torchrun request a fork at DOOR, a socket (forked.py).

Invariant: the server has one thread and has computed nothing, so a fork behaves like a new process.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    "torch._inductor.compile_fx",
    "torch.distributed.fsdp",
    "torch.distributed.optim",
    "torch.distributed.run",
    "qsync_fx.backend.compile",
    "qsync_fx.distributed",
)
Guests = dict[int, tuple[int, socket.socket]]
"""Forks that were requested at the socket: descriptor, process id, and connection to the client."""


def serve(door: socket.socket) -> list[str]:
    """Answer requests until there are no more; return, in each fork, the script to run."""
    guests: Guests = {}
    asked = b""
    while True:
        # A line contains signals or ends the connection; a descriptor is readable when its fork
        # ends.
        ready, _, _ = select.select(
            [0, door, *guests, *(line for _, line in guests.values())], [], []
        )
        attend(guests, ready)
        if 0 in ready:
            if not (part := os.read(0, 1 << 16)):
                sys.exit(0)
            *lines, asked = (asked + part).split(b"\n")
            for text in lines:
                request = json.loads(text)
                if "fork" not in request:
                    print(json.dumps(told(request)), flush=True)
                elif pid := os.fork():
                    print(json.dumps(pid), flush=True)
                else:
                    apart(guests)
                    return begun(request)
        if door in ready:
            guest, _ = door.accept()
            wanted = request_of(guest)
            if wanted is None:
                guest.close()
            elif pid := os.fork():
                for stream in wanted["streams"]:
                    os.close(stream)
                guests[os.pidfd_open(pid)] = pid, guest
            else:
                guest.close()
                apart(guests)
                return invited(wanted)


def told(request: Mapping[str, int]) -> int | None:
    """Return the exit status of a fork, after waiting for it if necessary."""
    (pid,) = request.values()
    found, status = os.waitpid(pid, os.WNOHANG if "poll" in request else 0)
    return os.waitstatus_to_exitcode(status) if found else None


def attend(guests: Guests, ready: Sequence[object]) -> None:
    """Forward signals, report the exit status of a fork, and kill forks whose clients are gone."""
    for ended, (pid, line) in list(guests.items()):
        if ended not in ready and line in ready:
            try:
                signals = line.recv(16)
            except OSError:
                signals = b""
            for number in signals or [signal.SIGKILL]:
                os.kill(pid, number)
            if signals:
                continue
        elif ended not in ready:
            continue
        _, status = os.waitpid(pid, 0)
        with contextlib.suppress(OSError):
            line.sendall(os.waitstatus_to_exitcode(status).to_bytes(4, "little", signed=True))
        del guests[ended]
        line.close()
        os.close(ended)


def request_of(guest: socket.socket) -> dict[str, Any] | None:
    """Return a request at the socket with three streams; None if the client is gone."""
    with contextlib.suppress(OSError):
        size, streams, _, _ = socket.recv_fds(guest, 8, 3)
        text = guest.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if len(streams) == 3 and text:
            return {**json.loads(text), "streams": streams}
    return None


def apart(guests: Guests) -> None:
    """Drop the other forks in a fork; the server owns them."""
    for descriptor, (_, line) in guests.items():
        os.close(descriptor)
        line.close()


def begun(request: Mapping[str, Any]) -> list[str]:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    return placed(request, (os.open(os.devnull, os.O_RDONLY), log, log), request["fork"])


def invited(request: Mapping[str, Any]) -> list[str]:
    os.environ.clear()
    return placed(request, request["streams"], request["run"])


def placed(request: Mapping[str, Any], streams: Sequence[int], found: list[str]) -> list[str]:
    """Set folder, streams, environment and path of a fork; return the script to run."""
    os.chdir(request["folder"])
    for ours, theirs in zip(streams, (0, 1, 2), strict=True):
        os.dup2(ours, theirs)
    for stream in set(streams):
        os.close(stream)
    # The existing streams have cached whether their files can seek.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.update(request["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))  # a library read it at import
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    first = os.getcwd() if found[0] == "-m" else str(Path(found[0]).resolve().parent)
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return found


def main() -> list[str]:
    # NumPy's library starts one thread per core at import.
    own = "OPENBLAS_NUM_THREADS" not in os.environ
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Before slow imports, so that the socket exists when clients connect.
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        for name in IMPORTED:
            importlib.import_module(name)
        if own:
            del os.environ["OPENBLAS_NUM_THREADS"]
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, f"{len(threads)} threads cannot be forked"
        return serve(door)


if __name__ == "__main__":
    sys.argv = main()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
