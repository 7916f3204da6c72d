"""Slow links on one machine: ranks connect, links have the requested bandwidth, and every kind of
exit removes the network namespaces.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.communication import links
from tests.support import tiers

LINKS = Path(links.__file__)
NAMES = Path("/run/netns")
RANK = """
import os, sys, time, torch
from torch import distributed
distributed.init_process_group("gloo")
x = torch.ones(int(sys.argv[1]))
distributed.all_reduce(x)
distributed.barrier()
begin = time.perf_counter()
distributed.all_reduce(x)
print(int(x[0]), time.perf_counter() - begin, flush=True)
os._exit(0)  # threads of a group that is left behind may abort the process
"""


@pytest.fixture
def able() -> Any:
    if (reason := links.missing()) is not None:
        pytest.skip(f"no links can be made here: {reason}")
    return links


def left(pid: int) -> list[str]:
    return [path.name for path in NAMES.glob(f"qsync-links-{pid}-*")] if NAMES.exists() else []


def until(met: Any, seconds: float = 30) -> bool:
    end = time.monotonic() + seconds
    while not met() and time.monotonic() < end:
        time.sleep(0.05)
    return bool(met())


def test_rates_are_read() -> None:
    assert [links.bits_per_second(rate) for rate in ("1gbit", "100mbit", "2.5mbit")] == [
        1e9,
        1e8,
        2.5e6,
    ]
    for wrong in ("fast", "0mbit", "10", "1 gbit"):
        with pytest.raises(ValueError, match="is no rate"):
            links.bits_per_second(wrong)


def test_without_a_rate_ranks_speak_over_loopback() -> None:
    show = (
        "import os; print(*(os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'MASTER_ADDR', "
        "'GLOO_SOCKET_IFNAME')))"
    )
    with links.shaped(2, None) as places:
        ended = links.run(places, [sys.executable, "-c", show], caught=True)
    assert ended.codes == (0, 0)
    assert ended.printed == ("0 2 127.0.0.1 lo\n", "1 2 127.0.0.1 lo\n")


@pytest.mark.parametrize(
    ("ranks", "rate"),
    [
        pytest.param(2, "100mbit", marks=tiers.ALL),
        pytest.param(4, "100mbit", marks=tiers.ALL),
        pytest.param(2, "1gbit", marks=tiers.EVERY),
    ],
)
def test_ranks_reduce_at_the_requested_bandwidth(ranks: int, rate: str, able: Any) -> None:
    values = 2**20 if rate == "100mbit" else 2**23
    with able.shaped(ranks, rate) as places:
        ended = able.run(
            places, [sys.executable, "-c", RANK, str(values)], seconds=120, caught=True
        )
        assert left(os.getpid())
    assert ended.codes == (0,) * ranks, ended.printed
    assert not left(os.getpid())
    # Lower bound in seconds for the bytes that each rank sends and receives. A busy machine may
    # take longer.
    least = 2 * (ranks - 1) / ranks * 4 * values * 8 / able.bits_per_second(rate)
    for printed in ended.printed:
        total, seconds = printed.splitlines()[-1].split()  # gloo prints its connections first
        assert int(total) == ranks**2
        assert float(seconds) > 0.8 * least


def test_a_rank_that_fails_ends_all(able: Any) -> None:
    code = "import os, sys, time; sys.exit(3) if os.environ['RANK'] == '1' else time.sleep(100)"
    with able.shaped(2, "1gbit") as places:
        ended = able.run(places, [sys.executable, "-c", code], seconds=60)
    assert ended.codes == (-signal.SIGKILL, 3)


@pytest.mark.parametrize(
    "kill_signal", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=tiers.ALL)]
)
def test_kill_leaves_no_namespaces(kill_signal: signal.Signals, able: Any, tmp_path: Path) -> None:
    inside = (
        f"import os, time; open(r'{tmp_path}/' + os.environ['RANK'], "
        "'w').write(str(os.getpid())); time.sleep(100)"
    )
    command = [
        sys.executable,
        str(LINKS),
        "--rate",
        "1gbit",
        "--ranks",
        "2",
        "--",
        sys.executable,
        "-c",
        inside,
    ]
    process = subprocess.Popen(command)
    try:
        assert until(
            lambda: all(
                (tmp_path / rank).exists() and (tmp_path / rank).read_text() for rank in "01"
            )
        )
        assert len(left(process.pid)) == 3
        process.send_signal(kill_signal)
        process.wait(30)
        assert until(lambda: not left(process.pid))
        ranks = [int((tmp_path / rank).read_text()) for rank in "01"]
        assert until(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks))
    finally:
        process.kill()


def test_next_run_removes_files_of_a_killed_run(able: Any) -> None:
    """The namespace is named after a dead process, as if its helper had been killed too."""
    gone = subprocess.Popen(["true"])
    gone.wait()
    name = f"qsync-links-{gone.pid}-1-0"
    subprocess.run(["ip", "netns", "add", name], check=True)
    assert left(gone.pid)
    with able.shaped(1, "1gbit"):
        assert not left(gone.pid)


def test_missing_link_support_has_a_reason() -> None:
    command = [sys.executable, str(LINKS), "--rate", "1gbit", "--", "true"]
    done = subprocess.run(
        command, env={"PATH": "/nowhere"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "no links can be made here: ip is not installed" in done.stderr
