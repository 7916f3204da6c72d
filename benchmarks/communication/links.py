"""Command that runs once per rank, over rate-limited links between network namespaces.

    python benchmarks/communication/links.py --rate 1gbit --ranks 2 -- python script.py
    python benchmarks/communication/links.py --rate 100mbit --ranks 4 -- \
        python benchmarks/communication/reductions.py

Each rank has its own network namespace on one virtual switch. RANK, WORLD_SIZE, MASTER_ADDR and
MASTER_PORT are set as by torchrun, for `torch.distributed.init_process_group("gloo")`. As a module:

    with links.shaped(ranks=2, rate="1gbit") as places:
        codes = links.run(places, [sys.executable, "script.py"])

A link has the rate in each direction (veth, tc tbf). It requires root and iproute2; `missing()`
returns what is missing. Without a rate, ranks are processes that communicate over loopback.

Invariant: namespaces and links are removed when the process that created them ends, even if it is
killed: a helper process waits for its end. If the helper was killed too, the next run removes them.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import functools
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

_PREFIX = "qsync-links-"
_UNITS = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_NAMESPACES = Path("/run/netns")
_REMOVE = (
    'cat; for name in "$@"; do ip netns pids "$name" | xargs -r kill -9; '
    'ip netns del "$name"; done 2>/dev/null'
)
"""Command of the helper process. Its standard input ends when the creating process ends."""


@dataclass(frozen=True)
class Place:
    """Network location of a rank.

    Attributes:
        address: IP address for the other ranks.
        interface: network interface to the other ranks.
        prefix: command prefix that runs a program in this location.
        ends: (namespace, device) of both sides of its link.
    """

    address: str
    interface: str
    prefix: tuple[str, ...] = ()
    ends: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ended:
    """Exit status of each rank, and its output if it was captured."""

    codes: tuple[int, ...]
    printed: tuple[str, ...] = field(default=())


def bits_per_second(rate: str) -> float:
    """Return the bits per second of a rate such as "1gbit" or "100mbit".

    Raises:
        ValueError: the rate is invalid.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    if match is None or not float(match[1]):
        raise ValueError(f"{rate!r} is no rate: write 1gbit, 100mbit")
    return float(match[1]) * _UNITS[match[2]]


@functools.cache
def missing() -> str | None:
    """Return why links cannot be created on this machine; None if they can."""
    for tool in ("ip", "tc", "xargs"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed (iproute2, findutils)"
    if os.geteuid() != 0:
        return "network namespaces take root"
    try:
        with shaped(1, "1gbit"):
            return None
    except subprocess.CalledProcessError as error:
        return f"{' '.join(error.cmd)}: {error.stderr.strip() or error.returncode}"


def told_missing(left: str) -> str | None:
    """Return `missing()`; print a reason together with `left`, the part that runs without links."""
    reason = missing()
    if reason is not None:
        print(f"{left} alone: no links can be made here: {reason}")
    return reason


@contextlib.contextmanager
def shaped(ranks: int, rate: str | None, burst: str | None = None) -> Iterator[list[Place]]:
    """Create a location for each rank, and remove all of them on exit.

    Args:
        ranks: number of ranks.
        rate: of each link, in each direction; None for unlimited loopback.
        burst: bucket size of the token bucket filter. 1 Gbps is not reached below 256 KB; far above
            it, 100 Mbps is exceeded.

    Raises:
        subprocess.CalledProcessError: the system does not permit it.
    """
    if rate is None:
        yield [Place("127.0.0.1", "lo") for _ in range(ranks)]
        return
    sweep()
    prefix = f"{_PREFIX}{os.getpid()}-{_born(os.getpid())}"
    switch, names = f"{prefix}-switch", [f"{prefix}-{rank}" for rank in range(ranks)]
    # Its own session protects it from Ctrl-C, which ends this process's group.
    helper = subprocess.Popen(
        ["sh", "-c", _REMOVE, "sh", *names, switch],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        _ip("netns", "add", switch)
        _ip("-n", switch, "link", "add", "br0", "type", "bridge")
        _ip("-n", switch, "link", "set", "br0", "up")
        for rank, name in enumerate(names):
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
            _ip(
                "-n",
                name,
                "link",
                "add",
                "eth0",
                "type",
                "veth",
                "peer",
                "name",
                f"port{rank}",
                "netns",
                switch,
            )
            _ip("-n", name, "addr", "add", f"{_address(rank)}/24", "dev", "eth0")
            _ip("-n", name, "link", "set", "eth0", "up")
            _ip("-n", switch, "link", "set", f"port{rank}", "master", "br0")
            _ip("-n", switch, "link", "set", f"port{rank}", "up")
        places = [
            Place(
                _address(rank),
                "eth0",
                ("ip", "netns", "exec", name),
                ((name, "eth0"), (switch, f"port{rank}")),
            )
            for rank, name in enumerate(names)
        ]
        reshape(places, rate, burst)
        yield places
    finally:
        assert helper.stdin is not None
        helper.stdin.close()
        helper.wait()


def reshape(places: Sequence[Place], rate: str, burst: str | None = None) -> None:
    """Change the rate of links that are in use."""
    burst = burst or ("256kb" if bits_per_second(rate) >= 5e8 else "64kb")
    shape = ["tbf", "rate", rate, "burst", burst, "latency", "50ms"]
    for namespace, device in (end for place in places for end in place.ends):
        _done(["tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", *shape])


def run(
    places: Sequence[Place],
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    seconds: float | None = None,
    caught: bool = False,
) -> Ended:
    """Run a command once per location; kill all ranks when one fails or the time is over.

    Args:
        places: one per rank.
        command: program and arguments.
        environment: additions to this process's environment.
        seconds: time limit of all ranks together.
        caught: whether to capture the output of the ranks instead of printing it.
    """
    shared = {
        "MASTER_ADDR": places[0].address,
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(len(places)),
        "GLOO_SOCKET_IFNAME": places[0].interface,
    }
    started: list[subprocess.Popen[bytes]] = []
    until = None if seconds is None else time.monotonic() + seconds
    with contextlib.ExitStack() as files:
        logs = [
            files.enter_context(tempfile.TemporaryFile("w+")) if caught else None for _ in places
        ]
        try:
            for rank, (place, log) in enumerate(zip(places, logs, strict=True)):
                variables = {
                    **os.environ,
                    **(environment or {}),
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                line = [*place.prefix, *command]
                started.append(
                    subprocess.Popen(
                        line, env=variables, stdout=log, stderr=log, preexec_fn=_die_with_parent
                    )
                )
            while True:
                codes = [process.poll() for process in started]
                if (
                    None not in codes
                    or any(codes)
                    or (until is not None and time.monotonic() > until)
                ):
                    break
                time.sleep(0.02)
        finally:
            for process in started:
                process.kill()
                process.wait()
        printed = tuple(_all_of(log) for log in logs if log is not None)
    return Ended(tuple(process.returncode for process in started), printed)


def sweep() -> None:
    """Remove namespaces of processes that no longer run."""
    names = [path.name for path in _NAMESPACES.glob(f"{_PREFIX}*")]
    for name in names:
        pid, born = name.removeprefix(_PREFIX).split("-")[:2]
        if _born(int(pid)) != int(born):
            subprocess.run(["sh", "-c", _REMOVE, "sh", name], stdin=subprocess.DEVNULL, check=False)


def _address(rank: int) -> str:
    return f"10.77.1.{rank + 1}"


def _ip(*arguments: str) -> None:
    _done(["ip", *arguments])


def _done(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True)


def _born(pid: int) -> int:
    """Return the start time of a process in clock ticks since boot; 0 if it does not exist.

    It identifies a process together with its pid, which the system reuses.
    """
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _all_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("", 0))
        port: int = listener.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--rate",
        help="of each link in each direction, as 1gbit or 100mbit; none for loopback as it is",
    )
    parser.add_argument("--burst", help="burst size of a link; by default chosen for the rate")
    parser.add_argument("--ranks", type=int, default=2, help="how many (%(default)s)")
    parser.add_argument("command", nargs="+", help="command of each rank, after --")
    options = parser.parse_args()
    if options.rate is not None:
        try:
            bits_per_second(options.rate)
        except ValueError as error:
            parser.error(str(error))
        if (reason := missing()) is not None:
            print(f"links.py: no links can be made here: {reason}", file=sys.stderr)
            return 2
    # SIGTERM raises SystemExit, so that ranks and links are removed as after an error.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    try:
        with shaped(options.ranks, options.rate, options.burst) as places:
            codes = run(places, options.command).codes
    except KeyboardInterrupt:
        return 130
    for rank, code in enumerate(codes):
        if code:
            print(f"links.py: rank {rank} ended with {code}", file=sys.stderr)
    return int(any(codes))


if __name__ == "__main__":
    sys.exit(main())
