"""Process of a rank: measures a profile, agrees on a plan, trains both models, reports results.

Invariant: a rank prints nothing to the terminal. It sends messages through its pipe, and library
output goes to its log. It reports every exception before the process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import os
import socket
import sys
import threading
import time
import traceback
from dataclasses import replace
from itertools import zip_longest
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import data
import planning
import torch
import torch.distributed as dist
from messages import ROLES, RUNS, WORLD, Failed, Job, Phase, Result
from training import Run, batches, fresh

import qsync_fx
from qsync_fx.serialization.atomic_files import write_text

_TIMEOUT = 300
"""Seconds that a rank waits for the other, which may be compiling."""


def main() -> NoReturn:
    """Run the rank; the process's argument is the file descriptor of the pipe."""
    faulthandler.enable()
    pipe = Connection(int(sys.argv[1]))
    job: Job = pipe.recv()
    launcher = threading.Thread(target=_end_with_launcher, args=(pipe,), daemon=True)
    launcher.start()
    try:
        pipe.send(train(job, pipe))
    except Exception as error:  # noqa: BLE001 - whatever it is, the launcher has to know
        traceback.print_exc()
        expected = isinstance(error, qsync_fx.QSyncError)
        text = str(error) if expected else f"{type(error).__name__}: {error}"
        pipe.send(Failed(text, expected, time.monotonic()))
        sys.stderr.flush()
    while True:
        launcher.join()


def _end_with_launcher(pipe: Connection) -> None:
    """End the process when the launcher closes its end of the pipe or dies."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


def train(job: Job, pipe: Connection) -> Result:
    """Find a plan, train, and return the result."""
    torch.set_num_threads(1)
    pipe.send(Phase("reading the images"))
    images = data.load(job.source)
    if job.samples is not None:
        images = images.subset(job.samples, job.seed)
    pipe.send(Phase("ready"))
    connect(job)
    plan = (
        planning.find_plan(job, images, pipe) if job.plan_path is None else planning.load_plan(job)
    )
    pipe.send(Phase("explaining"))
    plans = dict(zip(RUNS, (planning.uniform(), plan), strict=True))
    first, second = (
        plan.batches.get(role, batch) for role, batch in zip(ROLES, job.batches, strict=True)
    )
    jobs = dict(zip(RUNS, (job, replace(job, batches=(first, second))), strict=True))
    explained = {name: explain(name, item, jobs[name], images) for name, item in plans.items()}
    pipe.send(Phase("compiling"))
    runs = [Run(name, jobs[name], images, item) for name, item in plans.items()]
    for epoch in range(1, job.epochs + 1):
        # Steps of both runs are interleaved, so that load from other processes affects both.
        for _ in zip_longest(*(run.epoch(epoch, pipe) for run in runs)):
            pass
    parameters = sum(parameter.numel() for parameter in runs[0].model.parameters())
    return Result({run.name: run.ran(explained[run.name]) for run in runs}, parameters)


def explain(name: str, plan: qsync_fx.ClusterPlan, job: Job, images: data.Data) -> dict[str, str]:
    """Return the precision of each adjustable operator; write the explanation of the found plan."""
    model, _ = fresh(job, images)
    x, _ = next(batches(job, images, 0))
    options: dict[str, Any] = {"plan": plan, "inner_backend": job.inner_backend}
    explanation = qsync_fx.explain(model, images.normalized(x), options=options)
    if name == RUNS[-1]:
        write_text(job.output / f"explain-rank{job.rank}.txt", f"{explanation}\n")
        explanation.save_dot(job.output / f"explain-rank{job.rank}.dot")
    return {
        str(op.id): str(op.precision) for op in explanation.operators if op.kind == "adjustable"
    }


def connect(job: Job) -> None:
    """Connect the two ranks by gloo over the loopback interface.

    The process group is never destroyed, which could deadlock on objects that its threads own. The
    process ends after the launcher has both results, so that no rank loses its connection early.
    """
    # A file store needs no free port, and the loopback interface excludes other machines.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(job.rendezvous), WORLD)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=WORLD, timeout=timeout)


if __name__ == "__main__":
    main()
