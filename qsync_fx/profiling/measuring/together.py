"""What sending gradients adds to a step that all ranks train together: measured by such steps.

DistributedDataParallel wraps the model, so that graphs are split and buckets are sent as in training. Its hook sends a bucket in one step
and leaves it in the next: what differs is sending, with all that it takes of cores that compute, and the waiting of ranks for one another.

Invariant: all ranks call it together and know the same numbers; no parameter is sent to another rank, and none changes.
"""

from __future__ import annotations

import gc
import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.profiling.measuring.steps import Training
from qsync_fx.profiling.runs import faster_half

_BUCKETS: Final = 6
"""Of which a small model is to send so many: one alone would travel behind the backward pass."""
_LARGEST: Final = 25
"""MiB of a bucket at most, as DistributedDataParallel has them."""
_WARM: Final = 3
"""Steps until buckets are those that stay."""
_ROUNDS: Final = 9


@dataclass(frozen=True)
class Together:
    """Steps without an optimizer, of all ranks at once.

    Attributes:
        apart: seconds of the slowest rank where no gradient is sent.
        sending: seconds where all are.
        bucket_bytes: at which a bucket was full.
    """

    apart: float
    sending: float
    bucket_bytes: int


@dataclass
class _Hook:
    sends: bool = True

    def take(self, _state: object, bucket: Any) -> Future[torch.Tensor]:
        if self.sends:
            work = distributed.all_reduce(bucket.buffer(), async_op=True)
            assert work is not None
            future: Future[Any] = work.get_future()
            return future.then(lambda done: done.value()[0])
        left: Future[torch.Tensor] = Future()
        left.set_result(bucket.buffer())
        return left

    # DistributedDataParallel compares annotations with classes, and these are texts.
    take.__annotations__.clear()


def together(module: nn.Module, compiled: Callable[[nn.Module, Training], Any], training: Training) -> Together:
    """Measures steps of a model on all ranks.

    Args:
        module: the same on all ranks.
        compiled: compiles it by training it for a step.
        training: of the model; its optimizer is left out.
    """
    total = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    mebibytes = min(_LARGEST, max(1, round(total / _BUCKETS / 2**20)))
    parallel = DistributedDataParallel(module, init_sync=False, bucket_cap_mb=mebibytes, **_leaving_buffers())
    hook = _Hook()
    parallel.register_comm_hook(None, hook.take)
    passes = replace(training, optimizer=None, zero=module.zero_grad)
    model = compiled(parallel, passes)
    for _ in range(_WARM):
        passes.run(model)
    found: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(_ROUNDS):
        for hook.sends, seconds in found.items():
            distributed.barrier()
            begin = time.perf_counter()
            passes.run(model)
            seconds.append(time.perf_counter() - begin)
    slowest = torch.tensor([faster_half(found[False]), faster_half(found[True])], dtype=torch.float64)
    distributed.all_reduce(slowest, op=distributed.ReduceOp.MAX)
    # What DistributedDataParallel has hung on parameters goes with it.
    del parallel, model
    gc.collect()
    apart, sending = slowest.tolist()
    return Together(apart, sending, mebibytes * 2**20)


def _leaving_buffers() -> dict[str, Any]:
    """Returns how DistributedDataParallel is told to send no buffers, which torch 2.13 calls otherwise than those before."""
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    return {next(name for name in ("forward_sync_buffers", "broadcast_buffers") if name in names): False}
