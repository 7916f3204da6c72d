"""torchrun with one to two nodes: training starts again when one is gone, and when one joins, each
time under a plan for who is there.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.support import tiers
from tests.support.processes import forks, ranks

pytestmark = tiers.ALL

SCRIPT = ranks.script_of("elastic_train.py")
STEPS = 20


@contextmanager
def machine(device: str) -> Iterator[tuple[forks.Server, dict[str, str]]]:
    """What all processes of one device are forks of, and the environment in which they are."""
    environment = {
        **os.environ,
        **ranks.ENVIRONMENT,
        "DEVICE": device,
        # Else a launcher keeps the store of its first world, and one that joins later waits for its
        # address in vain.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with forks.own(environment) as server:
        yield server, server.shell(environment)


@contextmanager
def node(
    folder: Path, port: int, of: tuple[forks.Server, dict[str, str]], host: bool
) -> Iterator[None]:
    """A launcher with one rank; in the end both are killed."""
    server, environment = of
    command = [
        environment["PYTHON_EXEC"],
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "1:2",
        "--nproc-per-node",
        "1",
    ]
    command += [
        "--max-restarts",
        "9",
        "--monitor-interval",
        "0.2",
        "--rdzv-id",
        "elastic",
        "--rdzv-backend",
        "c10d",
    ]
    conf = f"is_host={int(host)},last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=5"
    command += [
        "--rdzv-endpoint",
        f"localhost:{port}",
        "--rdzv-conf",
        conf,
        str(SCRIPT),
        str(folder),
        str(STEPS),
    ]
    with open(folder / f"{environment['DEVICE']}.log", "ab") as log:
        started = subprocess.Popen(
            command, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        yield
    finally:
        gone(server)
        started.wait()


def gone(server: forks.Server) -> None:
    """Kills a launcher with its rank, as a machine that is switched off."""
    while found := subprocess.run(
        ["pgrep", "-P", str(server.pid)], capture_output=True, text=True
    ).stdout.split():
        for pid in found:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def trainings(folder: Path) -> list[dict[str, Any]]:
    """Returns what every start of the script has said last."""
    return [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]


def until(
    folder: Path, seen: Callable[[list[dict[str, Any]]], bool], seconds: float = 280
) -> list[dict[str, Any]]:
    end = time.monotonic() + seconds
    while not seen(found := trainings(folder)):
        logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
        assert time.monotonic() < end, f"{found}\n{logs}"
        time.sleep(0.2)
    return found


@pytest.mark.timeout(900)
def test_ranks_that_leave_and_join_have_a_plan_for_the_world_that_is(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with machine("fast") as fast, machine("slow") as slow, node(tmp_path, port, fast, host=True):
        with node(tmp_path, port, slow, host=False):
            until(tmp_path, lambda said: sum(one["reached"] >= 8 for one in said) == 2)
        both = trainings(tmp_path)
        assert {one["world"] for one in both} == {2}
        assert {frozenset(one["ranks"]) for one in both} == {frozenset({"fast", "slow"})}

        alone = until(
            tmp_path,
            lambda said: any(
                one["world"] == 1 and one["reached"] > one["done"] + 8 for one in said
            ),
        )
        (left,) = (one for one in alone if one["world"] == 1)
        assert left["ranks"] == ["fast"]
        assert left["done"] >= 8, "from the checkpoint of two ranks"
        assert left["done"] % 4 == 0

        with node(tmp_path, port, slow, host=False):
            again = until(
                tmp_path,
                lambda said: (
                    sum(one["world"] == 2 and one["done"] > left["done"] for one in said) == 2
                ),
            )
            found = [one for one in again if one["world"] == 2 and one["done"] > left["done"]]
            assert {frozenset(one["ranks"]) for one in found} == {frozenset({"fast", "slow"})}
            (tmp_path / "go").touch()
            until(tmp_path, lambda said: sum(one.get("ended", False) for one in said) == 2)
    ended = [one for one in trainings(tmp_path) if one.get("ended")]
    assert [one["world"] for one in ended] == [2, 2]
    assert len({one["reached"] for one in ended}) == 1
    assert min(one["reached"] for one in ended) >= STEPS
