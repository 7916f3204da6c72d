"""Slow links for real, on one machine: each rank in a network namespace of its own, all on one switch, by links of a given rate.

    python benchmarks/communication/links.py --rate 1gbit --ranks 2 -- python script.py
    python benchmarks/communication/links.py --rate 100mbit --ranks 4 -- qsync comm bench

runs the command once a rank, with RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT as torchrun gives them, so that
`torch.distributed.init_process_group("gloo")` finds the others. As a module:

    with links.shaped(ranks=2, rate="1gbit") as places:
        codes = links.run(places, [sys.executable, "script.py"])

A link has the rate in each direction (veth, tc tbf). It takes root, and iproute2; `missing()` says what there is not. Without a rate
ranks are processes beside one another that speak over loopback, and nothing is made.

Invariant: what was made is gone when the process that made it is, however it ended: a helper waits for that, and removes it. What was left
by one whose helper was killed, too, the next one removes.
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
_REMOVE = 'cat; for name in "$@"; do ip netns pids "$name" | xargs -r kill -9; ip netns del "$name"; done 2>/dev/null'
"""What the helper runs: its standard input ends with the process that holds the other end."""


@dataclass(frozen=True)
class Place:
    """Where a rank runs.

    Attributes:
        address: at which the others reach it.
        interface: through which it reaches them.
        prefix: what stands before a command to run it there.
        ends: of its link: namespace and device of both sides.
    """

    address: str
    interface: str
    prefix: tuple[str, ...] = ()
    ends: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Ended:
    """What became of the ranks: exit statuses, and what they printed where that was caught."""

    codes: tuple[int, ...]
    printed: tuple[str, ...] = field(default=())


def bits_per_second(rate: str) -> float:
    """Returns what a rate such as "1gbit" or "100mbit" means.

    Raises:
        ValueError: it means nothing.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg]?bit)", rate)
    if found is None or not float(found[1]):
        raise ValueError(f"{rate!r} is no rate: write 1gbit, 100mbit")
    return float(found[1]) * _UNITS[found[2]]


@functools.cache
def missing() -> str | None:
    """Returns why no links can be made here; None where they can."""
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
    """Returns what `missing` does, and prints it with what is left to do without links."""
    reason = missing()
    if reason is not None:
        print(f"{left} alone: no links can be made here: {reason}")
    return reason


@contextlib.contextmanager
def shaped(ranks: int, rate: str | None, burst: str | None = None) -> Iterator[list[Place]]:
    """Makes a place for each rank, and removes them in the end.

    Args:
        ranks: how many.
        rate: of each link, in each direction; None for loopback as it is.
        burst: what a link lets through at once. Below 256 KB 1 Gbps is not reached, and far above 100 Mbps is none any more.

    Raises:
        subprocess.CalledProcessError: the system does not allow it.
    """
    if rate is None:
        yield [Place("127.0.0.1", "lo") for _ in range(ranks)]
        return
    sweep()
    own = f"{_PREFIX}{os.getpid()}-{_born(os.getpid())}"
    switch, names = f"{own}-switch", [f"{own}-{rank}" for rank in range(ranks)]
    # In a session of its own: a key that ends this process's group leaves it alone.
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
    """Gives links another rate, while ranks use them."""
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
    """Runs a command once a place. When one rank fails or time is over, all are ended: they would wait for it.

    Args:
        places: one a rank.
        command: program and arguments.
        environment: put over this process's own.
        seconds: that all may take.
        caught: whether what ranks print is returned in place of printed.
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
                own = {
                    **os.environ,
                    **(environment or {}),
                    **shared,
                    "RANK": str(rank),
                    "LOCAL_RANK": str(rank),
                }
                line = [*place.prefix, *command]
                started.append(
                    subprocess.Popen(
                        line, env=own, stdout=log, stderr=log, preexec_fn=_die_with_parent
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
    """Removes what processes that are gone have left."""
    names = [path.name for path in _NAMESPACES.glob(f"{_PREFIX}*")] if _NAMESPACES.is_dir() else []
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
    """Returns when a process began, in ticks since the system did; 0 where there is none. A pid alone may be another's by now."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


def _all_of(log: IO[str]) -> str:
    log.seek(0)
    return log.read()


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("", 0))
        port: int = found.getsockname()[1]
        return port


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--rate",
        help="of each link in each direction, as 1gbit or 100mbit; none for loopback as it is",
    )
    parser.add_argument(
        "--burst", help="what a link lets through at once; by default what suits the rate"
    )
    parser.add_argument("--ranks", type=int, default=2, help="how many (%(default)s)")
    parser.add_argument("command", nargs="+", help="what each of them runs, behind --")
    options = parser.parse_args()
    if options.rate is not None:
        try:
            bits_per_second(options.rate)
        except ValueError as error:
            parser.error(str(error))
        if (reason := missing()) is not None:
            print(f"links.py: no links can be made here: {reason}", file=sys.stderr)
            return 2
    # Ended by a signal it leaves as by an error: ranks and links are removed.
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
