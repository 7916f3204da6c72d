"""Replacement of Python in shells and torchrun: requests a fork that runs the script, see forks.py.

    python -IS forked.py DOOR [-u] SCRIPT ARGUMENTS...
    python -IS forked.py DOOR [-u] -m torch.distributed.run ARGUMENTS...

Other commands run in Python itself. The fork has this process's folder, environment and standard
streams.
It receives signals of this process, is killed with it, and determines its exit status.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time

FORKED = ("torch.distributed.run", "qsync_fx.cli")
"""Modules that run in a fork."""


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
        asked = json.dumps(
            {"run": script, "folder": os.getcwd(), "environment": dict(os.environ)}
        ).encode()
        socket.send_fds(line, [len(asked).to_bytes(8, "little")], [0, 1, 2])
        line.sendall(asked)
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
    """Connect to the socket, which exists shortly after the start of the server."""
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
