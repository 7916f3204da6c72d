"""Training of a model on a rank under a plan: steps, times and results.

Invariant: both runs of a rank start from the same weights and read the same images in the same
order; they differ only in the plan, and in the rank that processes an image.
"""

from __future__ import annotations

import hashlib
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection
from typing import Any

import data
import models
import torch
import torch.distributed as dist
from clock import Clock
from messages import WARM_UP, WORLD, Epoch, Job, Ran, Step
from torch import nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import qsync_fx
from qsync_fx.profiler.timing.measured_memory import measured_peak

_MEASURED = 2
"""Steps before the memory measurement: weights, optimizer state and buckets exist by then."""

Batch = tuple[torch.Tensor, torch.Tensor]


def fresh(job: Job, images: data.Data) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the network with its initial weights, equal on all ranks, and its optimizer."""
    torch.manual_seed(job.seed)
    model = models.ResNet(images.classes, 8, 1) if job.small else models.ResNet(images.classes)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return model, torch.optim.SGD(
        model.parameters(), _rate(job), momentum=0.9, nesterov=True, weight_decay=5e-4
    )


def step_of(images: data.Data, share: float = 1.0) -> Callable[[Any, Batch], torch.Tensor]:
    """Return the training step of this rank: its loss, times `share`."""

    def step(model: Any, batch: Batch) -> torch.Tensor:
        return share * F.cross_entropy(model(images.normalized(batch[0])), batch[1])

    return step


def batches(job: Job, images: data.Data, epoch: int) -> Iterator[Batch]:
    """Yield this rank's batch for each step of an epoch."""
    shuffle = torch.Generator().manual_seed(job.seed * 1000 + epoch)
    order, total = torch.randperm(len(images.train[1]), generator=shuffle), sum(job.batches)
    first = sum(job.batches[: job.rank])
    for start in range(0, len(order) - total + 1, total):
        chosen = order[start + first : start + first + job.batches[job.rank]]
        yield images.train[0][chosen], images.train[1][chosen]


class Run:
    """Training of a model under a plan.

    Args:
        name: name of the run.
        job: of the rank.
        images: to train on.
        plan: of the cluster.
    """

    def __init__(self, name: str, job: Job, images: data.Data, plan: qsync_fx.ClusterPlan) -> None:
        self.name, self.job, self.images = name, job, images
        self.model, self.optimizer = fresh(job, images)
        self.clock = Clock()
        self.peak: int | None = None
        self.correct: int | None = None
        steps = job.epochs * (len(images.train[1]) // sum(job.batches)) + 1
        self._schedule = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, _rate(job), total_steps=steps
        )
        # DistributedDataParallel averages over ranks, which overweights images of a small batch.
        self._step = step_of(images, job.batches[job.rank] * WORLD / sum(job.batches))
        self._compiled, self._graphs = compiled(self.model, plan, job.inner_backend, self.clock)

    def epoch(self, epoch: int, pipe: Connection) -> Iterator[None]:
        """Train one epoch, one step per iteration of the generator; then evaluate on rank 0."""
        loss, done = 0.0, 0
        steps = self._steps(epoch)
        for done, loss in steps:
            if self.peak is None and done == _MEASURED:
                self.peak = self._bytes_before_a_step() + measured_peak(lambda: next(steps, None))
            pipe.send(Step(self.name, epoch, done, loss))
            yield
        average_buffers(self.model)
        self.correct = evaluate(self.model, self.images) if self.job.rank == 0 else None
        pipe.send(Epoch(self.name, epoch, loss, self.correct))

    def ran(self, explained: Mapping[str, str]) -> Ran:
        """Return the result; `explained` has the precisions according to `qsync_fx.explain`."""
        operators = {name: precision for graph in self._graphs for name, precision in graph.items()}
        return Ran(
            batch=self.job.batches[self.job.rank],
            operators=dict(Counter(operators.values())),
            graphs=len(self._graphs),
            unexplained=sorted({name for name, _ in operators.items() ^ explained.items()}),
            took=self.clock.medians(),
            timed=max(0, len(self.clock.computing) - WARM_UP),
            peak=self.peak,
            digest=digest(self.model),
            correct=self.correct,
        )

    def _steps(self, epoch: int) -> Iterator[tuple[int, float]]:
        """Yield the number of completed steps and their mean loss, after each step."""
        total = 0.0
        for done, batch in enumerate(batches(self.job, self.images, epoch), start=1):
            self.clock.start()
            loss = self._step(self._compiled, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            self.clock.reduced()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.clock.end()
            self._schedule.step()
            total += loss.item()
            yield done, total / done

    def _bytes_before_a_step(self) -> int:
        """Return bytes before a step: parameters, buffers, optimizer state and DDP's buckets."""
        parameters = sum(parameter.nbytes for parameter in self.model.parameters())
        states = (value for state in self.optimizer.state.values() for value in state.values())
        state_bytes = sum(value.nbytes for value in states if isinstance(value, torch.Tensor))
        return (
            parameters
            + sum(buffer.nbytes for buffer in self.model.buffers())
            + state_bytes
            + parameters
        )


def compiled(
    model: nn.Module, plan: qsync_fx.ClusterPlan, inner_backend: str, clock: Clock
) -> tuple[Callable[..., torch.Tensor], list[dict[str, str]]]:
    """Return the DDP model compiled under this rank's plan, and the precisions in each graph.

    The list grows with each compiled graph.
    """
    with warnings.catch_warnings():
        # torch 2.13 renames the argument; torch 2.11 does not accept the new name.
        warnings.simplefilter("ignore", FutureWarning)
        # Batch norm statistics are averaged once per epoch instead: see `average_buffers`.
        ddp = DistributedDataParallel(model, broadcast_buffers=False)
    ddp.register_comm_hook(clock, Clock.hand_over)
    ran: list[dict[str, str]] = []
    options: dict[str, Any] = {
        "plan": plan,
        "inner_backend": inner_backend,
        "passes": [recorder(ran)],
    }
    return torch.compile(ddp, backend="qsync", options=options), ran


def recorder(ran: list[dict[str, str]]) -> object:
    """Return a pass that records the compiled precisions of each graph."""

    @qsync_fx.graph_pass(after="lower")
    def record(graph: qsync_fx.PrecisionGraph) -> None:
        ran.append({str(op.id): str(op.precision) for op in graph.operators(kind="adjustable")})

    return record


def average_buffers(model: nn.Module) -> None:
    """Average batch norm statistics over the ranks, whose images and precisions differ."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            dist.all_reduce(buffer)
            buffer.div_(WORLD)


@torch.no_grad()
def evaluate(model: nn.Module, images: data.Data) -> int:
    """Return the number of correct test images, evaluated in FP32 without compilation."""
    model.eval()
    inputs, labels = images.test
    parts = zip(torch.split(inputs, 500), torch.split(labels, 500), strict=True)
    correct = sum(int((model(images.normalized(x)).argmax(1) == y).sum()) for x, y in parts)
    model.train()
    return correct


def digest(model: nn.Module) -> str:
    """Return the SHA-256 over all parameters and buffers with names, dtypes and shapes."""
    hasher = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)};".encode())
        hasher.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()


def _rate(job: Job) -> float:
    return 0.2 * sum(job.batches) / 256
