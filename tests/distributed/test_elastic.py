"""Elastic torchrun with one or two nodes: if a node leaves or joins, training restarts under a plan
for the present ranks.
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
    """Yield the fork server of all processes of a device, and their environment."""
    environment = {
        **os.environ,
        **ranks.ENVIRONMENT,
        "DEVICE": device,
        # Otherwise a launcher retains the store of its first world, and a launcher that joins later
        # never gets its address.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
    }
    with forks.own(environment) as server:
        yield server, server.shell(environment)


@contextmanager
def node(
    folder: Path, port: int, of: tuple[forks.Server, dict[str, str]], host: bool
) -> Iterator[None]:
    """Run a launcher with one rank in the context, and kill both at its end."""
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
    """Kill a launcher with its rank, like a machine that is switched off."""
    while pids := subprocess.run(
        ["pgrep", "-P", str(server.pid)], capture_output=True, text=True
    ).stdout.split():
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), signal.SIGKILL)
        time.sleep(0.05)


def trainings(folder: Path) -> list[dict[str, Any]]:
    """Return the last report of every start of the script."""
    return [json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")]


def until(
    folder: Path, condition: Callable[[list[dict[str, Any]]], bool], seconds: float = 280
) -> list[dict[str, Any]]:
    end = time.monotonic() + seconds
    while not condition(reports := trainings(folder)):
        logs = "\n".join(path.read_text()[-3000:] for path in folder.glob("*.log"))
        assert time.monotonic() < end, f"{reports}\n{logs}"
        time.sleep(0.2)
    return reports


@pytest.mark.timeout(900)
def test_ranks_that_leave_and_join_have_a_plan_for_the_world_that_is(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    with machine("fast") as fast, machine("slow") as slow, node(tmp_path, port, fast, host=True):
        with node(tmp_path, port, slow, host=False):
            until(tmp_path, lambda reports: sum(report["reached"] >= 8 for report in reports) == 2)
        both = trainings(tmp_path)
        assert {report["world"] for report in both} == {2}
        assert {frozenset(report["ranks"]) for report in both} == {frozenset({"fast", "slow"})}

        alone = until(
            tmp_path,
            lambda reports: any(
                report["world"] == 1 and report["reached"] > report["done"] + 8
                for report in reports
            ),
        )
        (survivor,) = (report for report in alone if report["world"] == 1)
        assert survivor["ranks"] == ["fast"]
        assert survivor["done"] >= 8, "training resumes from the checkpoint of two ranks"
        assert survivor["done"] % 4 == 0

        with node(tmp_path, port, slow, host=False):
            after_join = until(
                tmp_path,
                lambda reports: (
                    sum(
                        report["world"] == 2 and report["done"] > survivor["done"]
                        for report in reports
                    )
                    == 2
                ),
            )
            rejoined = [
                report
                for report in after_join
                if report["world"] == 2 and report["done"] > survivor["done"]
            ]
            assert {frozenset(report["ranks"]) for report in rejoined} == {
                frozenset({"fast", "slow"})
            }
            (tmp_path / "go").touch()
            until(
                tmp_path, lambda reports: sum(report.get("ended", False) for report in reports) == 2
            )
    ended = [report for report in trainings(tmp_path) if report.get("ended")]
    assert [report["world"] for report in ended] == [2, 2]
    assert len({report["reached"] for report in ended}) == 1
    assert min(report["reached"] for report in ended) >= STEPS
