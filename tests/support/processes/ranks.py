"""Ranks of a test as processes, each with a log, a result and an exit status.

No rank outlives the call. The scripts in ../communication and ../distributed import tests.support
from PYTHONPATH, the root of the repository. The store of their process group is in the test's
process, as in torchrun's launcher, so it survives a killed rank.
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
"""Environment variables of ranks, in addition to the test's own."""


@dataclass(frozen=True)
class Ended:
    """Result of a rank.

    Attributes:
        code: exit status; None if it was killed after a timeout.
        log: its output.
        result: its result; None if it did not write one.
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
    """Run a script of tests/support on all ranks and return their results.

    Kill ranks that run longer than `seconds`, and the last running rank after `after` seconds. CUDA
    does not work in a fork of a process that initialized it: ranks with a GPU must not be `forked`.
    """
    store = distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    environment = {**os.environ, **ENVIRONMENT}
    path = script_of(script)
    logs = [folder / f"{rank}.log" for rank in range(world)]
    started: list[forks.Process] = []
    try:
        for rank in range(world):
            command = [str(rank), str(world), str(store.port), str(folder), json.dumps(job)]
            begin = forks.start if forked else _fresh
            started.append(begin(path, command, environment, logs[rank]))
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
            json.loads(output.read_text()) if (output := results[rank]).exists() else None,
        )
        for rank in range(world)
    ]


def _fresh(
    path: Path, arguments: list[str], environment: Mapping[str, str], log: Path
) -> forks.Process:
    """Start a script as a new Python process."""
    with log.open("w") as out:
        return subprocess.Popen(
            [sys.executable, str(path), *arguments], env=dict(environment), stdout=out, stderr=out
        )


def script_of(name: str) -> Path:
    """Return the path of a script."""
    (path,) = SUPPORT.rglob(name)
    return path


def results(name: str, world: int, folder: Path, *, script: str, **job: Any) -> list[Any]:
    """Run function `name` of a script on all ranks and return the results; assert exit status 0."""
    folder.mkdir(exist_ok=True)
    ended = run(script, world, folder, name=name, **job)
    assert [rank.code for rank in ended] == [0] * world, "\n".join(rank.log for rank in ended)
    return [rank.result for rank in ended]


def join(arguments: list[str], limit: float = 60) -> tuple[int, int, Path, dict[str, Any]]:
    """Join the process group as a rank of `run`; return rank, number of ranks, folder and job."""
    import datetime

    rank, world, port, folder, job = arguments
    store = distributed.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
    settings = json.loads(job)
    timeout = datetime.timedelta(seconds=settings.get("limit", limit))
    if "debug" in settings:  # torch reads TORCH_DISTRIBUTED_DEBUG at import, which is before a fork
        distributed.set_debug_level(distributed.DebugLevel.__members__[settings["debug"]])
    backend = settings.get("backend", "gloo")
    distributed.init_process_group(
        backend, store=store, rank=int(rank), world_size=int(world), timeout=timeout
    )
    if "compress" in settings:  # new defaults of keyword arguments
        from qsync_fx.distributed import compress

        compress.__kwdefaults__.update(settings["compress"])
    return int(rank), int(world), Path(folder), settings


def play(
    parts: Mapping[str, Any], arguments: list[str], meet: Callable[[str], bool] = lambda name: False
) -> None:
    """Call the function that the job names with (rank, world, job), write its result, and exit.

    Args:
        parts: globals of a script.
        arguments: arguments from `run`; the job's "where" is by default the folder of the ranks.
        meet: whether all ranks wait at a barrier after the function of this name.
    """
    torch.set_num_threads(1)
    rank, world, folder, job = join(arguments)
    write(folder, rank, parts[job["name"]](rank, world, {"where": str(folder), **job}))
    if meet(job["name"]):
        with contextlib.suppress(RuntimeError):
            distributed.barrier()
    os._exit(0)  # skip cleanup, which would wait for ranks that have exited


def write(folder: Path, rank: int, result: Any) -> None:
    """Write the result of a rank."""
    part = folder / f"{rank}.part"
    part.write_text(json.dumps(result))
    part.rename(folder / f"{rank}.json")
