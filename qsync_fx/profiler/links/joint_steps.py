"""Steps of all ranks together: the cost of copying, sending and coding gradients.

DistributedDataParallel wraps the model, as in training. The differences between the variants of
`_Treatment` include waiting for cores, for other ranks and for the interpreter lock.
"""

from __future__ import annotations

import contextlib
import gc
import inspect
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, Final

import torch
from torch import distributed, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel

from qsync_fx.communication.codecs import codec_named
from qsync_fx.communication.control_group import carrying, meet, slowest
from qsync_fx.communication.ddp_hook import DdpCompressor, to_all
from qsync_fx.plan.plan import Plan
from qsync_fx.profiler.run_statistics import faster_half
from qsync_fx.profiler.timing.step_timers import TrainingStep

_BUCKETS: Final = 6
"""Buckets of a small model; a single one would be sent only after the backward pass."""
_LARGEST_BUCKET_MIB: Final = 25
"""Maximum size of a bucket, as in DistributedDataParallel."""
_WARMUP_STEPS: Final = 3
"""Rounds until DistributedDataParallel's buckets are final."""
_LEAST, _MOST, _SECONDS = 5, 21, 20.0
"""Minimum and maximum number of measured rounds, and the target duration in seconds."""
_ROW_S: Final = 0.3
"""Seconds of consecutive steps of one variant: sending in a step affects the next one."""
CODEC: Final = "qsgd8"
"""Codec of the coded steps: a likely choice of users, and as fast as most."""


class _Treatment(Enum):
    """Treatment of gradients in a step: not copied, copied into buckets, all-reduced, or coded."""

    LEFT, COPIED, SENT, CODED = range(4)


def planned_seconds(seconds: float, share: float = 1.0) -> float:
    """Return the seconds of the steps of `together` if one step takes `seconds`."""
    row, rounds = _rounds(seconds, share)
    return len(_Treatment) * (_WARMUP_STEPS + row * rounds) * seconds


@dataclass(frozen=True)
class Unsent:
    """Seconds of steps without sent gradients, not copied or copied into buckets and back."""

    left: float
    copied: float


@dataclass(frozen=True)
class JointSteps:
    """Times of steps of all ranks at once; `this_rank` and `slowest` exclude sending.

    Attributes:
        sending: seconds of the slowest rank's steps with all-reduces.
        coded: seconds of the slowest rank's steps with gradients in `CODEC`; None if not measured.
    """

    this_rank: Unsent
    slowest: Unsent
    sending: float
    bucket_bytes: int
    coded: float | None = None


@dataclass
class _Hook:
    """Communication hook of DistributedDataParallel; `treatment` applies to the next gradients."""

    codes: DdpCompressor | None
    group: distributed.ProcessGroup | None
    treatment: _Treatment = _Treatment.SENT

    def take(self, state: object, bucket: Any) -> Future[torch.Tensor]:
        if self.treatment is _Treatment.CODED and self.codes is not None:
            return self.codes.hook(state, bucket)
        if self.treatment is _Treatment.SENT:
            work = distributed.all_reduce(bucket.buffer(), group=self.group, async_op=True)
            assert work is not None
            future: Future[Any] = work.get_future()
            return future.then(lambda done: done.value()[0])
        left: Future[torch.Tensor] = Future()
        left.set_result(bucket.buffer())
        return left

    # DistributedDataParallel compares annotations with classes, but these are strings.
    take.__annotations__.clear()


def _round(
    model: Any, parallel: DistributedDataParallel, hook: _Hook, training: TrainingStep, row: int
) -> list[float]:
    """Return the seconds per step of each variant, over `row` consecutive steps."""
    result = []
    for hook.treatment in _Treatment:
        if hook.treatment is _Treatment.CODED and hook.codes is None:
            break
        meet()
        begin = time.perf_counter()
        with contextlib.ExitStack() as stack:
            if hook.treatment is _Treatment.LEFT:
                stack.enter_context(parallel.no_sync())
            for _ in range(row):
                training.run(model)
        if parallel.device_type == "cuda":
            torch.cuda.synchronize(parallel.device)
        result.append((time.perf_counter() - begin) / row)
    return result


CompilePlan = Callable[[nn.Module, TrainingStep, Plan], Any]
"""Compiles a module under a plan by training it for a step."""


def together(
    module: nn.Module,
    compiled: CompilePlan,
    training: TrainingStep,
    plan: Plan,
    share: float = 1.0,
) -> JointSteps:
    """Measure steps of a model on all ranks, which call this together.

    Args:
        module: the same on all ranks; no parameters are sent.
        training: step of the model; with an optimizer, parameters change differently on each rank.
        share: duration of the measurement, as a fraction of the default.
    """
    total = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    mebibytes = min(_LARGEST_BUCKET_MIB, max(1, round(total / _BUCKETS / 2**20)))
    group = carrying(next(module.parameters()).device)
    settings: dict[str, Any] = {"process_group": group, "bucket_cap_mb": mebibytes}
    # The option against sending buffers, which torch 2.13 renames.
    names = inspect.signature(DistributedDataParallel.__init__).parameters
    settings[next(n for n in ("forward_sync_buffers", "broadcast_buffers") if n in names)] = False
    parallel = DistributedDataParallel(module, init_sync=False, **settings)
    with _coding(module) as codes:
        hook = _Hook(codes, group)
        parallel.register_comm_hook(None, hook.take)
        training = replace(training, zero=module.zero_grad)
        model = compiled(parallel, training, plan)
        warm = [_round(model, parallel, hook, training, 1) for _ in range(_WARMUP_STEPS)]
        (longest,) = slowest([max(warm[-1])])
        row, rounds = _rounds(longest, share)
        result = [_round(model, parallel, hook, training, row) for _ in range(rounds)]
    typical = [faster_half(seconds) for seconds in zip(*result, strict=True)]
    unmeasured = [math.inf] * (len(_Treatment) - len(typical))
    left, copied, sending, coded = slowest([*typical, *unmeasured])
    # This frees the hooks that DistributedDataParallel registered on parameters.
    del parallel, model
    gc.collect()
    return JointSteps(
        this_rank=Unsent(typical[0], typical[1]),
        slowest=Unsent(left, copied),
        sending=sending,
        bucket_bytes=mebibytes * 2**20,
        coded=None if math.isinf(coded) else coded,
    )


@contextlib.contextmanager
def _coding(module: nn.Module) -> Iterator[DdpCompressor | None]:
    group = distributed.new_group(backend="gloo")
    named = [(name, item) for name, item in module.named_parameters() if item.requires_grad]
    assigned = to_all(codec_named(CODEC), [item.numel() for _, item in named])
    codes = None
    if all(item.device.type == "cpu" for _, item in named):
        rank, ranks = distributed.get_rank(), distributed.get_world_size()
        codes = DdpCompressor(group, rank, ranks, named, assigned, 0, 0)
    try:
        yield codes
    finally:
        distributed.destroy_process_group(group)


def _rounds(seconds: float, share: float) -> tuple[int, int]:
    """Return the consecutive steps of a variant, and the rounds, by the seconds of a step."""
    row = max(1, round(share * _ROW_S / seconds))
    rounds = round(share * _SECONDS / (row * len(_Treatment) * seconds))
    return row, min(_MOST, max(_LEAST, rounds))
