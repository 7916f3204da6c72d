"""Fork server: a process that has imported torch and qsync_fx, and forks on request.

    python forking.py DOOR

Tests (forks.py) send lines of JSON to standard input and read answers from standard output. Shells
and torchrun (forked.py) request a fork at DOOR, a socket.

Invariant: the server has one thread and computes no tensors, so a fork behaves like a new process.
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
"""Forks requested at the socket: process id and client connection by pidfd."""


def serve(door: socket.socket) -> list[str]:
    """Answer requests until standard input ends; in a fork, return the script to run."""
    guests: Guests = {}
    pending = b""
    while True:
        # A client sends signals or closes its connection; a pidfd is readable when its fork ends.
        ready, _, _ = select.select(
            [0, door, *guests, *(line for _, line in guests.values())], [], []
        )
        attend(guests, ready)
        if 0 in ready:
            if not (part := os.read(0, 1 << 16)):
                sys.exit(0)
            *lines, pending = (pending + part).split(b"\n")
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
    """Return the exit status of a fork, or None if a poll finds it running."""
    (pid,) = request.values()
    ended, status = os.waitpid(pid, os.WNOHANG if "poll" in request else 0)
    return os.waitstatus_to_exitcode(status) if ended else None


def attend(guests: Guests, ready: Sequence[object]) -> None:
    """Forward signals, send exit statuses, and kill forks whose clients have disconnected."""
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
    """Return a request with three streams from a client; None if it has disconnected."""
    with contextlib.suppress(OSError):
        size, streams, _, _ = socket.recv_fds(guest, 8, 3)
        text = guest.recv(int.from_bytes(size, "little"), socket.MSG_WAITALL)
        if len(streams) == 3 and text:
            return {**json.loads(text), "streams": streams}
    return None


def apart(guests: Guests) -> None:
    """Close the descriptors of other forks, which belong to the server, in a fork."""
    for descriptor, (_, line) in guests.items():
        os.close(descriptor)
        line.close()


def begun(request: Mapping[str, Any]) -> list[str]:
    log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    return placed(request, (os.open(os.devnull, os.O_RDONLY), log, log), request["fork"])


def invited(request: Mapping[str, Any]) -> list[str]:
    os.environ.clear()
    return placed(request, request["streams"], request["run"])


def placed(request: Mapping[str, Any], streams: Sequence[int], argv: list[str]) -> list[str]:
    """Set folder, streams, environment and sys.path of a fork; return the script to run."""
    os.chdir(request["folder"])
    for ours, theirs in zip(streams, (0, 1, 2), strict=True):
        os.dup2(ours, theirs)
    for stream in set(streams):
        os.close(stream)
    # New stream objects, as the existing ones have cached whether their files are seekable.
    sys.stdin = os.fdopen(0, closefd=False)
    sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.update(request["environment"])
    if threads := os.environ.get("OMP_NUM_THREADS"):
        import torch

        torch.set_num_threads(int(threads))  # OpenMP read it at import
    sys.dont_write_bytecode = bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
    first = os.getcwd() if argv[0] == "-m" else str(Path(argv[0]).resolve().parent)
    sys.path[:1] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))]
    return argv


def main() -> list[str]:
    # OpenBLAS, which NumPy imports, starts one thread per core by default.
    added = "OPENBLAS_NUM_THREADS" not in os.environ
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    # Bind before the slow imports, so that clients can connect.
    with socket.socket(socket.AF_UNIX) as door:
        door.bind(sys.argv[1])
        door.listen()
        for name in IMPORTED:
            importlib.import_module(name)
        if added:
            del os.environ["OPENBLAS_NUM_THREADS"]
        threads = os.listdir("/proc/self/task")
        assert len(threads) == 1, (
            f"{len(threads)} threads are running: only one thread can be forked safely"
        )
        return serve(door)


if __name__ == "__main__":
    sys.argv = main()
    if sys.argv[0] == "-m":
        del sys.argv[0]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(sys.argv[0], run_name="__main__")
