"""Rank process of the tests of faults during planning, started by tests/distributed."""

from __future__ import annotations

import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.distributed import fleet_plan, guard
from tests.support.distributed.guarded_rank import data, network, train, weights
from tests.support.processes import ranks


@contextmanager
def as_a_plan_is_chosen(act: Callable[[], None]) -> Iterator[None]:
    """Call `act` on rank 0 after it has received all profiles, before it solves."""
    choosing = fleet_plan._Choosing

    def begin(*arguments: Any) -> Any:
        act()
        return choosing(*arguments)

    with mock.patch.object(fleet_plan, "_Choosing", begin):
        yield


def loss_of(model: Any, x: Tensor) -> Tensor:
    loss: Tensor = model(x).square().mean()
    return loss


def find(
    rank: int,
    name: str = "",
    max_replans: int = 0,
    formats: tuple[str, ...] = ("fp32",),
    **options: Any,
) -> Any:
    """Find a plan with one repetition per measurement."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return qsync_fx.distributed.measure_and_plan(
        model,
        loss_of,
        [data(rank)],
        optimizer=optimizer,
        device_class=name or ["fast", "slow"][rank],
        precisions=list(formats),
        progress=False,
        repeats=1,
        max_replans=max_replans,
        **options,
    )


def told(call: Callable[[], Any]) -> list[str]:
    try:
        call()
    except qsync_fx.QSyncError as error:
        return [type(error).__name__, str(error)]
    return []


def survived(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Return the errors of successive faults; between them, find a plan and train under it."""
    folder, odd = Path(job["where"]), rank == 1
    results: dict[str, Any] = {}
    torch.__version__ = torch.__version__ + "x" * odd  # type: ignore[assignment]
    results["version"] = told(lambda: find(rank))
    torch.__version__ = str(torch.__version__).removesuffix("x")  # type: ignore[assignment]

    plan = find(rank, "both", 1, ("fp32", "bf16"), save=folder / "plan.json")
    model: nn.Module = torch.compile(
        network(), backend="qsync", options={"plan": plan, "inner_backend": "aot_eager"}
    )
    parallel = DistributedDataParallel(model)
    with guard(parallel, check_every=1):
        list(train(parallel, rank, 2))
    results["twice"] = {"plan": plan.to_json(), "weights": weights(parallel)}

    results["class"] = told(lambda: find(rank, memory={"v100": "1 GB"}))
    results["weights"] = told(lambda: find(rank, memory={"slow": 500}))

    # Without a trial run of the plan: writes of Inductor would fail before the write of the plan.
    with full_disk() as fill, as_a_plan_is_chosen(fill):
        results["disk"] = told(lambda: find(rank, save=folder / "plan.json"))

    for name, text in (
        ("truncated", '{"format": "qsync-meas'),
        ("nan", '{"format": "qsync-measurement", "version": NaN}'),
    ):
        if odd:
            (folder / f"{name}.1.json.partial").write_text(text)
        results[name] = told(lambda name=name: find(rank, path=folder / f"{name}.json"))  # type: ignore[misc]
    return results


@contextmanager
def full_disk() -> Iterator[Callable[[], None]]:
    """Yield a function that limits files of this process to 64 bytes until the context ends."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        yield lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def killed(rank: int, world: int, job: dict[str, Any]) -> dict[str, Any]:
    """Kill a rank while rank 0 solves, and return the error of the other rank."""
    folder, who = Path(job["where"]), job["who"]
    began = folder / "solves"

    def dies() -> None:
        began.touch()
        if who == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        while not (folder / "dead").exists():
            time.sleep(0.05)

    if rank == 1 and who == 1:
        # Another process kills rank 1, which waits for rank 0's broadcast.
        script = (
            f"while [ ! -e {began} ]; do sleep 0.1; done; kill -9 {os.getpid()}; touch "
            f"{folder / 'dead'}"
        )
        os.spawnlp(os.P_NOWAIT, "sh", "sh", "-c", script)
    with as_a_plan_is_chosen(dies):
        return {"told": told(lambda: find(rank))}


if __name__ == "__main__":
    ranks.play(globals(), sys.argv[1:])
