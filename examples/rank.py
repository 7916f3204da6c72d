"""What one of the two processes does: explain, compile and train the model under its plan, and say how it went.

Invariant: a rank owns no screen. It tells the launcher everything through its pipe, as the values below, and what libraries print goes
to its log. Whatever goes wrong is told before the process ends.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import hashlib
import os
import socket
import sys
import threading
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NoReturn

import data
import models
import torch
import torch.distributed as dist
from clock import Clock
from messages import WARM_UP, WORLD, Epoch, Failed, Job, Phase, Result, Step
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.files import write_text

_TIMEOUT = 300
"""Seconds that a rank waits for the other, which may still compile."""


def main() -> NoReturn:
    """Entry point of the process; its argument is the number of the pipe's file descriptor."""
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
    """Ends the process when the launcher closes its end: it has all it wants, or it died."""
    with contextlib.suppress(EOFError, OSError):
        pipe.recv()
    os._exit(0)


def train(job: Job, pipe: Connection) -> Result:
    """Trains, and returns how it went."""
    torch.set_num_threads(1)
    pipe.send(Phase("reading the images"))
    images = data.load(job.source)
    if job.samples is not None:
        images = images.subset(job.samples, job.seed)

    torch.manual_seed(job.seed)
    model = models.ResNet(images.classes)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    options: dict[str, Any] = {"plan": job.plan, "inner": job.inner}
    pipe.send(Phase("explaining"))
    explained = explain(model, images.normalized(images.train[0][: job.batch]), options, job)

    pipe.send(Phase("ready"))
    connect(job)
    with warnings.catch_warnings():
        # torch 2.13 renames the argument, and torch 2.11 does not know the new name.
        warnings.simplefilter("ignore", FutureWarning)
        # Batch norms' statistics are averaged once an epoch instead: see `average_buffers`.
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
    clock = Clock()
    ddp.register_comm_hook(clock, Clock.hand_over)
    ran: list[dict[str, str]] = []
    options["passes"] = [recorder(ran)]
    compiled = torch.compile(ddp, backend="qsync", options=options)
    pipe.send(Phase("compiling"))
    correct = _epochs(job, images, model, compiled, clock, pipe)

    operators = {name: precision for graph in ran for name, precision in graph.items()}
    differ = {name for name, _ in operators.items() ^ explained.items()}
    return Result(
        operators=dict(Counter(operators.values())),
        graphs=len(ran),
        unexplained=sorted(differ),
        compute=clock.median(clock.computing),
        waiting=clock.median(clock.waiting),
        timed=max(0, len(clock.computing) - WARM_UP),
        digest=digest(model),
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        correct=correct,
    )


def explain(model: nn.Module, inputs: torch.Tensor, options: dict[str, Any], job: Job) -> dict[str, str]:
    """Writes what the backend does to the model under the plan; returns the precision of each adjustable operator."""
    explanation = qsync_fx.explain(model, inputs, options=options)
    write_text(job.output / f"explain-rank{job.rank}.txt", f"{explanation}\n")
    explanation.save_dot(job.output / f"explain-rank{job.rank}.dot")
    return {str(op.id): str(op.precision) for op in explanation.operators if op.kind == "adjustable"}


def recorder(ran: list[dict[str, str]]) -> object:
    """Returns a pass that writes down what is compiled, graph by graph: what was explained is a promise, this is the deed."""

    @qsync_fx.graph_pass(after="lower")
    def record(graph: qsync_fx.PrecisionGraph) -> None:
        ran.append({str(op.id): str(op.precision) for op in graph.operators(kind="adjustable")})

    return record


def connect(job: Job) -> None:
    """Connects the two ranks by gloo over the loopback interface.

    The group is never destroyed: its threads may hold what Python has to delete, and destroying it would wait for them for ever. The
    process ends instead, when the launcher has both results, so that no rank loses its connection to one that is done.
    """
    # The ranks meet in a file, so that no port can be in use; and nobody outside this machine has a say.
    if "lo" in (name for _, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(job.rendezvous), WORLD)  # type: ignore[attr-defined]
    timeout = datetime.timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=job.rank, world_size=WORLD, timeout=timeout)


def _epochs(
    job: Job, images: data.Data, model: nn.Module, compiled: Callable[..., torch.Tensor], clock: Clock, pipe: Connection
) -> int | None:
    """Trains all epochs; returns how many test images are right at the end, where this rank evaluates."""
    steps = len(images.train[1]) // (WORLD * job.batch)
    rate = 0.2 * WORLD * job.batch / 256
    optimizer = torch.optim.SGD(model.parameters(), rate, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=job.epochs * steps + 1)
    correct = None
    for epoch in range(1, job.epochs + 1):
        shuffle = torch.Generator().manual_seed(job.seed * 1000 + epoch)
        mine = torch.randperm(len(images.train[1]), generator=shuffle)[job.rank :: WORLD]
        total = 0.0
        for step in range(steps):
            started = time.perf_counter()
            chosen = mine[step * job.batch : (step + 1) * job.batch]
            x, y = images.normalized(images.train[0][chosen]), images.train[1][chosen]
            optimizer.zero_grad()
            loss = F.cross_entropy(compiled(x), y)
            loss.backward()  # type: ignore[no-untyped-call]
            reduced = time.perf_counter()
            optimizer.step()
            clock.step(started, reduced, time.perf_counter())
            schedule.step()
            total += loss.item()
            pipe.send(Step(epoch, step + 1, total / (step + 1)))
        average_buffers(model)
        correct = evaluate(model, images) if job.rank == 0 else None
        pipe.send(Epoch(epoch, total / steps, correct))
    return correct


def average_buffers(model: nn.Module) -> None:
    """Averages batch norms' statistics over the ranks: each has seen other images, in another precision."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(WORLD)


@torch.no_grad()
def evaluate(model: nn.Module, images: data.Data) -> int:
    """Returns how many test images the model gets right, in FP32 and not compiled."""
    model.eval()
    inputs, labels = images.test
    batches = zip(torch.split(inputs, 500), torch.split(labels, 500), strict=True)
    correct = sum(int((model(images.normalized(x)).argmax(1) == y).sum()) for x, y in batches)
    model.train()
    return correct


def digest(model: nn.Module) -> str:
    """Returns the SHA-256 of every bit of every parameter and buffer, with its name, type and shape."""
    found = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        found.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        found.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


if __name__ == "__main__":
    main()
