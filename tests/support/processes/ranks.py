"""Starts the ranks of a test as processes of their own, each with a log, a result and an end. None
outlives the call.

The scripts are in ../communication and ../distributed; PYTHONPATH is the root of the repository, so
that they import tests.support.

The store of their process group lives in the test's process, as in the launcher's under torchrun:
no rank takes it along when it dies.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.support.processes import forks

SUPPORT = Path(__file__).resolve().parents[1]
ROOT = SUPPORT.parents[1]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PYTHONPATH": str(ROOT),
}
"""What every process of a rank is given, beside what the tests have."""


@dataclass(frozen=True)
class Ended:
    """One rank.

    Attributes:
        code: its exit status; None for one that had to be ended after the others.
        log: what it printed.
        result: what it wrote; None where it did not come so far.
    """

    code: int | None
    log: str
    result: Any


def run(
    script: str,
    world: int,
    folder: Path,
    seconds: float = 150,
    after: float = 60,
    forked: bool = True,
    **job: Any,
) -> list[Ended]:
    """Runs a script of tests/support on all ranks; returns what became of each.

    Waits until all have ended, and, where one has not, so many seconds `after` the others. A GPU is
    nothing to a fork of a process that has
    asked for one: where ranks use it, they are not `forked`.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, **ENVIRONMENT}
    path = script_of(script)
    logs = [folder / f"{rank}.log" for rank in range(world)]
    started: list[forks.Process] = []
    try:
        for rank in range(world):
            given = [str(rank), str(world), str(store.port), str(folder), json.dumps(job)]
            begin = forks.start if forked else _fresh
            started.append(begin(path, given, environment, logs[rank]))
        until = time.monotonic() + seconds
        while (
            alive := sum(process.poll() is None for process in started)
        ) and time.monotonic() < until:
            until = min(until, time.monotonic() + after) if alive == 1 and after else until
            after = 0 if alive == 1 else after
            time.sleep(0.05)
        codes = [process.poll() for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    results = [folder / f"{rank}.json" for rank in range(world)]
    return [
        Ended(
            codes[rank],
            logs[rank].read_text(),
            json.loads(found.read_text()) if (found := results[rank]).exists() else None,
        )
        for rank in range(world)
    ]


def _fresh(
    path: Path, given: list[str], environment: Mapping[str, str], log: Path
) -> forks.Process:
    """Starts a script as a process of its own."""
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, str(path), *given], env=dict(environment), stdout=out, stderr=out
        )


def script_of(name: str) -> Path:
    """Returns where a script lies."""
    (found,) = SUPPORT.rglob(name)
    return found


def results(name: str, world: int, folder: Path, *, script: str, **job: Any) -> list[Any]:
    """Returns what all ranks have written of a part of a script; they all have to come to their
    end.
    """
    folder.mkdir(exist_ok=True)
    ended = run(script, world, folder, name=name, **job)
    assert [rank.code for rank in ended] == [0] * world, "\n".join(rank.log for rank in ended)
    return [rank.result for rank in ended]


def join(arguments: list[str], limit: float = 60) -> tuple[int, int, Path, dict[str, Any]]:
    """Joins the process group as a rank that `run` has started; returns the rank, how many there
    are, the folder and the job.
    """
    import datetime

    rank, world, port, folder, job = arguments
    store = distributed.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    found = json.loads(job)
    timeout = datetime.timedelta(seconds=found.get("limit", limit))
    if (
        "debug" in found
    ):  # what torch makes of TORCH_DISTRIBUTED_DEBUG as it is imported, which a fork has behind it
        distributed.set_debug_level(distributed.DebugLevel.__members__[found["debug"]])
    backend = found.get("backend", "gloo")
    distributed.init_process_group(
        backend, store=store, rank=int(rank), world_size=int(world), timeout=timeout
    )
    return int(rank), int(world), Path(folder), found


def play(
    parts: Mapping[str, Any], arguments: list[str], meet: Callable[[str], bool] = lambda name: False
) -> None:
    """Runs the part that the job of a rank names, as (rank, world, job), writes what it returns,
    and ends the process.

    Args:
        parts: a script's globals.
        arguments: what `run` has given the rank; the job's "where" is the ranks' folder, unless it
            has one.
        meet: whether ranks of a part wait for one another at the end.
    """
    torch.set_num_threads(1)
    rank, world, folder, job = join(arguments)
    write(folder, rank, parts[job["name"]](rank, world, {"where": str(folder), **job}))
    if meet(job["name"]):
        with contextlib.suppress(RuntimeError):
            distributed.barrier()
    os._exit(0)  # a rank that is gone would be waited for


def write(folder: Path, rank: int, result: Any) -> None:
    """Writes what a rank has to say."""
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{rank}.json")
