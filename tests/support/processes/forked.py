"""Replacement of Python in shells and torchrun that runs a script in a fork, see forks.py.

    python -IS forked.py DOOR [-u] SCRIPT ARGUMENTS...
    python -IS forked.py DOOR [-u] -m torch.distributed.run ARGUMENTS...

Other commands run in Python itself. The fork has the folder, environment and standard streams of
this process and receives its signals. It is killed with this process and sets its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

FORKED = ("torch.distributed.run", "qsync_fx.cli")
"""Modules that `-m` runs in a fork."""


def main(door: str, arguments: list[str]) -> None:
    script = arguments[arguments[:1] == ["-u"] :]
    if not (
        script[1:2] and script[1] in FORKED
        if script[:1] == ["-m"]
        else script and not script[0].startswith("-")
    ):
        os.execv(sys.executable, [sys.executable, *arguments])
    with socket.socket(socket.AF_UNIX) as line:
        connect(line, door)
        request = json.dumps(
            {"run": script, "folder": os.getcwd(), "environment": dict(os.environ)}
        ).encode()
        socket.send_fds(line, [len(request).to_bytes(8, "little")], [0, 1, 2])
        line.sendall(request)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda number, _: line.sendall(bytes([number])))
        answer = line.recv(4, socket.MSG_WAITALL)
    if len(answer) < 4:
        sys.exit("forked.py: the process that is forked has ended")
    code = int.from_bytes(answer, "little", signed=True)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code)


def connect(line: socket.socket, door: str) -> None:
    """Connect to the socket of the server; retry for 60 s while the server starts."""
    until = time.monotonic() + 60
    while True:
        try:
            return line.connect(door)
        except (FileNotFoundError, ConnectionRefusedError):
            if time.monotonic() > until:
                raise
            time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
